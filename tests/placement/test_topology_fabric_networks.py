"""Links that may carry tensors in the clear: Thunderbolt cables, Ethernet of two Macs alone, or any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mlxtp.placement.candidates import Candidate, exposed
from mlxtp.placement.cost_model import JACCL_MESH, RING_ETHERNET, RING_LOOPBACK, RING_THUNDERBOLT, RING_WIFI
from mlxtp.placement.planner import Placement, PlacementOptions, plan
from mlxtp.placement.topology import FABRIC_NETWORKS, MemberMachine, Topology
from mlxtp.wire.cluster_messages import Interface

from .made_up_macs import add, cabled, changed, ethernet, linked, linux, mac, node_id, on_lan
from .made_up_models import layered, uncut
from .recorded_macs import factory_ends

A, B, C = (node_id(i) for i in range(3))
SELF = ("169.254.31.7", "169.254.88.10")
ONE_MACHINE = [linux(i, "127.0.0.1", memory=99) for i in range(2)]
LAYERED = layered(num_attention_heads=24, num_key_value_heads=6, intermediate_size=14592)
DIVIDES = uncut(LAYERED)


def macs(size: int = 2) -> list[MemberMachine]:
    return [mac(i) for i in range(size)]


def wifi(members: list[MemberMachine], network: str = "192.168.9", prefix: int = 24) -> list[MemberMachine]:
    return [
        add(m, [Interface("en8", f"{network}.{i + 1}", prefix, "wifi", 1000, True)])
        for i, m in enumerate(members)
    ]


def for_two(members: list[MemberMachine], **of_both: str) -> list[MemberMachine]:
    """The same, with an Ethernet cable between the first two, whose network has two addresses."""
    ends = [replace(ethernet(f"10.9.0.{host}", 30, name="en7", mbps=1000), **of_both) for host in (1, 2)]
    return [add(m, [end]) for m, end in zip(members, ends, strict=False)] + members[2:]


def tcp_cable() -> list[MemberMachine]:
    return cabled(macs(), [(0, 1)], rdma="")


def astray(*places: int) -> list[MemberMachine]:
    """A cable, and Macs whose packets may leave by Wi-Fi with the same addresses."""
    cable, both = tcp_cable(), wifi(tcp_cable(), "10.0.0", 30)
    return [both[i] if i in places else cable[i] for i in range(2)]


def bridged(*, cable: bool) -> list[MemberMachine]:
    """Two Macs whose Thunderbolt ports are in the bridge, with or without a cable that both see."""
    found = cabled(macs(), [(0, 1)], rdma="") if cable else macs()
    ends = [Interface("bridge0", f"10.8.0.{host}", 24, "bridge", 0, True) for host in (1, 2)]
    return [changed(m, interfaces=(end,)) for m, end in zip(found, ends, strict=True)]


def planned(members: list[MemberMachine], setting: str, nodes: str | int = 2) -> Placement:
    return plan(members, DIVIDES, A, PlacementOptions(nodes=nodes, fabric_networks=setting))


def chosen(made: Placement) -> Candidate:
    assert made.chosen is not None, made.reason
    return made.chosen


#: Two Macs; the strictest setting with which they form a group, and its kind then.
DESKS: dict[str, tuple[Callable[[], list[MemberMachine]], str, str]] = {
    "a cable with RDMA": (lambda: on_lan(cabled(macs(), [(0, 1)])), "thunderbolt", JACCL_MESH),
    "a cable without": (lambda: on_lan(tcp_cable()), "thunderbolt", RING_THUNDERBOLT),
    "the bridge over a cable": (lambda: bridged(cable=True), "thunderbolt", RING_THUNDERBOLT),
    "the bridge, and no known cable": (lambda: bridged(cable=False), "any", RING_THUNDERBOLT),
    "a bridge with self-assigned addresses": (lambda: linked(factory_ends(), *SELF), "any", RING_THUNDERBOLT),
    "one machine": (lambda: ONE_MACHINE, "thunderbolt", RING_LOOPBACK),
    "Ethernet for two": (lambda: for_two(macs()), "private", RING_ETHERNET),
    "Ethernet for two, beside a faster network": (lambda: for_two(on_lan(macs())), "private", RING_ETHERNET),
    "Ethernet with room for others": (lambda: on_lan(macs()), "any", RING_ETHERNET),
    "a network for two over a bridge": (lambda: for_two(macs(), kind="other"), "any", RING_ETHERNET),
    "Wi-Fi": (lambda: wifi(macs()), "any", RING_WIFI),
    "Wi-Fi for two": (lambda: wifi(macs(), prefix=30), "any", RING_WIFI),
    "Wi-Fi with the addresses of the cable": (lambda: astray(0, 1), "any", RING_THUNDERBOLT),
    "such Wi-Fi of the first alone": (lambda: astray(0), "any", RING_THUNDERBOLT),
    "such Wi-Fi of the second alone": (lambda: astray(1), "any", RING_THUNDERBOLT),
    "such Wi-Fi beside Ethernet for two": (lambda: wifi(for_two(macs()), "10.9.0", 30), "any", RING_ETHERNET),
    "Wi-Fi around a cable": (lambda: wifi(tcp_cable(), "10.0.1", 8), "thunderbolt", RING_THUNDERBOLT),
}


@pytest.mark.parametrize("setting", FABRIC_NETWORKS)
@pytest.mark.parametrize("desk", DESKS)
def test_only_links_that_the_setting_admits_make_a_group(desk: str, setting: str) -> None:
    make, strictest, kind = DESKS[desk]
    made = planned(make(), setting)
    if FABRIC_NETWORKS.index(setting) < FABRIC_NETWORKS.index(strictest):
        assert made.chosen is None
        assert f"--fabric-networks {setting} excludes " in made.reason
        assert " a – b" in made.reason
    else:
        assert chosen(made).kind == kind


@pytest.mark.parametrize(
    ("members", "setting", "why"),
    [
        (wifi(macs()), "private", "--fabric-networks private excludes 1 link: Wi-Fi a – b"),
        (
            wifi([*macs(), mac(2, memory=4)]),  # too small to be one of several
            "private",
            "--fabric-networks private excludes 1 link: Wi-Fi a – b",
        ),
        (on_lan(macs()), "private", "--fabric-networks private excludes 1 link: shared Ethernet a – b"),
        (for_two(macs()), "thunderbolt", "--fabric-networks thunderbolt excludes 1 link: Ethernet a – b"),
        (
            bridged(cable=False),
            "private",
            "--fabric-networks private excludes 1 link: Thunderbolt without a known cable, "
            "or with a self-assigned address a – b",
        ),
    ],
)
def test_one_mac_serves_alone_where_the_link_to_another_is_excluded(
    members: list[MemberMachine], setting: str, why: str
) -> None:
    made = planned(members, setting, "all")
    assert chosen(made).ranks == (A,)
    refused = [
        one.reason for one in made.alternatives if one.backend == "none" and one.kind.startswith("ring")
    ]
    assert refused == [why]
    assert made.notes == ()


def test_a_circle_crosses_private_networks_only() -> None:
    """A pipeline, too: the third Mac has a cable to the first, and only Wi-Fi to the second."""
    links = [add(m, i.machine.interfaces) for m, i in zip(for_two(macs(3)), wifi(macs(3)), strict=True)]
    members = cabled(links, [(0, 2)], rdma="")
    for parallel in ("tensor", "pipeline"):
        options = PlacementOptions(nodes=3, parallel=parallel)
        model = LAYERED
        assert chosen(plan(members, model, A, options)).kind == RING_WIFI
        made = plan(members, model, A, replace(options, fabric_networks="private"))
        assert made.chosen is None
        why = "--fabric-networks private excludes 3 links: Wi-Fi a – b, Wi-Fi a – c, Wi-Fi b – c"
        assert why in [one.reason for one in made.alternatives]


def test_the_private_network_is_taken_though_a_shared_one_is_faster() -> None:
    members = for_two(on_lan(macs()))
    assert set(chosen(planned(members, "any")).ring_addresses) == {"192.168.7.1", "192.168.7.2"}
    assert set(chosen(planned(members, "private")).ring_addresses) == {"10.9.0.1", "10.9.0.2"}


def test_a_group_is_exposed_as_its_kind_and_its_links_are() -> None:
    both, private = for_two(on_lan(macs())), for_two(macs())
    assert "shared Ethernet" in exposed(RING_ETHERNET, (B, A), Topology(both))
    assert exposed(RING_ETHERNET, (B, A), Topology(both, admitted="private")) == ""
    assert exposed(RING_ETHERNET, (B, A), Topology(private)) == ""
    assert "shared Ethernet" in exposed(RING_ETHERNET, (A, C), Topology(private))  # nothing is known of C
    assert exposed(RING_ETHERNET, (A, C), Topology(private, admitted="private")) == ""
    assert "Wi-Fi" in exposed(RING_WIFI, (A, B), Topology([]))
    assert exposed(JACCL_MESH, (A, B), Topology([])) == ""
