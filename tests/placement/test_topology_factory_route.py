"""Two Macs on a cable as they left the factory, with macOS's one route for self-assigned addresses."""

from __future__ import annotations

import socket

import pytest

from mlxtp.placement.topology import MemberMachine, Topology

from ..hosts import Host, Hosts, requires_namespaces
from .made_up_macs import linked
from .recorded_macs import factory_ends

pytestmark = [pytest.mark.slow, requires_namespaces]

TRY_S = 1.0


def set_up(host: Host, member: MemberMachine, cable: str, primary: str) -> None:
    """Give a host the addresses of a recorded Mac, and one route for 169.254.0.0/16: by `primary`."""
    wifi, bridge = (
        next(each.address for each in member.machine.interfaces if each.name == name)
        for name in ("en0", "bridge0")
    )
    # An address of one interface is not answered for on another, as on macOS.
    host.run(["sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore"])
    host.ip(
        f"addr add {wifi}/24 dev eth0",
        f"addr add {bridge}/32 dev {cable}",
        f"route add 169.254.0.0/16 dev {primary} src {bridge if primary == cable else wifi}",
    )


def control_link(one: Host, other: Host, address: str) -> tuple[str, str] | None:
    """Return both ends of a connection, opened as agents and MLX's ring do; None where it does not arrive."""
    with other.inside(lambda: socket.create_server((address, 0))) as server:
        port = server.getsockname()[1]
        try:
            with one.inside(lambda: socket.create_connection((address, port), TRY_S)) as link:
                return link.getsockname()[0], link.getpeername()[0]
        except OSError:
            return None


@pytest.mark.parametrize(("primary", "network"), [("eth0", "wifi"), ("tb0", "thunderbolt")])
def test_the_fastest_link_is_one_that_a_ring_can_connect_over(primary: str, network: str) -> None:
    with Hosts(2) as net:
        (a, b), macs = net.hosts, factory_ends()
        cable = net.cable(a, b).interface
        for host, member in zip(net.hosts, macs, strict=True):
            set_up(host, member, cable, primary)
        addresses = [each.address for each in macs[1].machine.interfaces]
        ends = next(filter(None, (control_link(a, b, each) for each in sorted(addresses))))
        planned = linked(macs, *ends)
        link = Topology(planned).fastest(*(each.node_id for each in planned))[0]
        assert link.network == network
        assert control_link(a, b, link.addresses[macs[1].node_id]) is not None
        assert control_link(b, a, link.addresses[macs[0].node_id]) is not None
