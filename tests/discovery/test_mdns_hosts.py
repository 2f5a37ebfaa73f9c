"""Real discoveries on hosts of their own, which find each other by multicast."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from zeroconf import DNSAddress, DNSOutgoing, DNSPointer, DNSService, DNSText

from mlxtp.discovery.addresses import MAX_SIGHTINGS, SERVICE, Advert, DiscoveredPeer

from ..hosts import Host, Hosts, requires_namespaces
from ..live_cluster import SLOWNESS, until

pytestmark = [pytest.mark.slow, requires_namespaces]

FOUND_S = 10 * SLOWNESS
A = Advert("a" * 32, "c" * 16, "Anna's Mac", 52414, True, 1)
B = Advert("b" * 32, "", "Ben's Mac", 52415, False, 1)


class Member:
    """A process on a host that runs a discovery, and what it told so far."""

    def __init__(self, host: Host, advert: Advert, addresses: tuple[str, ...] = (), **constants: Any) -> None:
        options = {"advert": dataclasses.asdict(advert), "addresses": addresses, "constants": constants}
        self.process: subprocess.Popen[str] = host.start(
            [sys.executable, "-m", "tests.discovery.discovery_member", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.sightings: tuple[DiscoveredPeer, ...] = ()
        self.history: list[tuple[DiscoveredPeer, ...]] = []
        self.said: list[str] = []
        self.closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            match json.loads(line):
                case {"sightings": sightings}:
                    self.sightings = tuple(
                        DiscoveredPeer(**{**each, "addresses": tuple(each["addresses"])})
                        for each in sightings
                    )
                    self.history.append(self.sightings)
                case {"said": sentence}:
                    self.said.append(sentence)
                case {"closed": _}:
                    self.closed = True

    def command(self, *words: str) -> None:
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()

    def sees(self, *expected: DiscoveredPeer) -> bool:
        return self.sightings == expected

    def close(self) -> None:
        """Lets it say goodbye, and checks that it ended without an error."""
        self.command("close")
        assert self.process.wait(FOUND_S) == 0
        self._reader.join(FOUND_S)
        assert self.closed


def sighting(advert: Advert, *addresses: str) -> DiscoveredPeer:
    """Return the sighting that others make of it."""
    return DiscoveredPeer(
        advert.node_id,
        advert.cluster_id,
        advert.name,
        tuple(f"{address}:{advert.port}" for address in addresses),
        advert.has_ca,
        advert.version,
    )


@pytest.fixture
def net() -> Iterator[Hosts]:
    with Hosts(2) as net:
        yield net


def test_two_hosts_find_each_other_and_say_goodbye(net: Hosts) -> None:
    a, b = net.hosts
    anna, ben = Member(a, A), Member(b, B)
    until(lambda: anna.sees(sighting(B, b.address)), "Anna sees Ben", FOUND_S)
    until(lambda: ben.sees(sighting(A, a.address)), "Ben sees Anna", FOUND_S)
    # Who comes to have something else to say is believed at once, and under the same name.
    joined = dataclasses.replace(B, cluster_id="c" * 16)
    ben.command("update", json.dumps(dataclasses.asdict(joined)))
    until(lambda: anna.sees(sighting(joined, b.address)), "Anna sees that Ben joined", FOUND_S)
    ben.close()
    until(anna.sees, "Anna hears Ben's goodbye", FOUND_S)
    # A restart has another port.
    again = dataclasses.replace(joined, port=60000)
    ben = Member(b, again)
    until(lambda: anna.sees(sighting(again, b.address)), "Anna sees Ben's new port", FOUND_S)
    # After kill -9 there is no goodbye, and the next start replaces what was there.
    ben.process.kill()
    ben.process.wait()
    last = dataclasses.replace(again, port=60001)
    ben = Member(b, last)
    until(lambda: anna.sees(sighting(last, b.address)), "Anna sees Ben's next port", FOUND_S)
    assert not any(len(sightings) > 1 for sightings in anna.history)
    assert not anna.said
    anna.close()


def test_a_host_is_found_when_its_cable_is_put_in(net: Hosts) -> None:
    a, b = net.hosts
    net.cut(b)
    anna, ben = Member(a, A), Member(b, B)
    until(lambda: ben.said, "Ben says that he has no network", FOUND_S)
    assert "no network interface of this machine that is up" in ben.said[0]
    net.mend(b)
    ben.command("refresh")
    until(lambda: anna.sees(sighting(B, b.address)), "Anna sees Ben", FOUND_S)
    until(lambda: ben.sees(sighting(A, a.address)), "Ben sees Anna", FOUND_S)
    until(lambda: ben.said[1:], "Ben says that he has a network", FOUND_S)
    assert ben.said[1:] == ["other Macs can be found by multicast again"]


def test_addresses_come_and_go(net: Hosts) -> None:
    a, b = net.hosts
    anna, _ben = Member(a, A, REFRESH_S=0.3), Member(b, B, REFRESH_S=0.3)
    until(lambda: anna.sees(sighting(B, b.address)), "Anna sees Ben", FOUND_S)
    cable = net.cable(a, b)
    both = sighting(B, b.address, cable.addresses[1])
    until(lambda: anna.sees(both), "Anna sees the address of Ben's new cable", FOUND_S)
    # From here on the cable is the only way between them, which each of them has to notice by itself.
    net.cut(b)
    until(lambda: anna.sees(sighting(B, cable.addresses[1])), "Anna sees what is left", FOUND_S)
    cable.cut()
    b.ip("addr flush dev eth0", "addr add 10.87.0.77/24 broadcast + dev eth0")
    net.mend(b)
    until(lambda: anna.sees(sighting(B, "10.87.0.77")), "Anna sees Ben at his other address", FOUND_S)


def test_eight_interfaces_hear_announcements_on_two(net: Hosts) -> None:
    a, b = net.hosts
    cables = [net.cable(a, b) for _ in range(7)]
    with net.capture() as capture:
        anna, ben = Member(a, A), Member(b, B)
        everywhere = sighting(B, *sorted((b.address, *(cable.addresses[1] for cable in cables))))
        until(lambda: anna.sees(everywhere), "Anna sees all addresses of Ben", FOUND_S)
        until(lambda: ben.sightings, "Ben sees Anna", FOUND_S)
    group = {source for source, target in capture.streams() if target.startswith("224.0.0.251:")}
    hosts = {source.partition(":")[0] for source in group}
    assert hosts == {a.address, b.address, *cables[0].addresses}


def test_what_was_heard_before_interfaces_changed_does_not_count(net: Hosts) -> None:
    a, b = net.hosts
    anna, ben = Member(a, A, REFRESH_S=0.3), Member(b, B)
    until(lambda: anna.sees(sighting(B, b.address)), "Anna sees Ben", FOUND_S)
    moved = dataclasses.replace(B, port=60000)
    with net.capture() as capture:
        # Anna does not hear what Ben says now, and his old records are good for two minutes.
        net.partition([a], [b])
        ben.command("update", json.dumps(dataclasses.asdict(moved)))
        said = (b"Ben's Mac", moved.port.to_bytes(2))
        until(
            lambda: sum(all(each in frame for each in said) for frame in capture.frames) >= 3,
            "Ben says it three times",
            FOUND_S,
        )
    net.heal()
    a.ip("addr add 10.87.0.88/24 dev eth0")
    until(lambda: anna.sees(sighting(moved, b.address)), "Anna sees Ben's new port", FOUND_S)


def test_an_interface_that_is_made_again_is_used_again(net: Hosts) -> None:
    a, b = net.hosts
    first = net.cable(a, b)
    anna = Member(a, A, first.addresses[:1], REFRESH_S=0.3)
    ben = Member(b, B, first.addresses[1:], REFRESH_S=0.3)
    until(lambda: anna.sees(sighting(B, first.addresses[1])), "Anna sees Ben", FOUND_S)
    for host, address in zip((a, b), first.addresses, strict=True):
        host.ip(f"link set {first.interface} down", f"addr flush dev {first.interface}")
        host.ip(f"link set {first.interface} name old")
        host.ip(f"addr add {address}/30 dev eth0")
    # Now the same addresses are on eth0: memberships of the old interface are worth nothing.
    ben.close()
    moved = dataclasses.replace(B, port=60000)
    ben = Member(b, moved, first.addresses[1:])
    until(lambda: anna.sees(sighting(moved, first.addresses[1])), "Anna sees Ben again", FOUND_S)


def test_who_cannot_find_out_whether_its_name_is_free_takes_it(net: Hosts) -> None:
    a, b = net.hosts
    _anna, ben = Member(a, A, REGISTER_S=0.1), Member(b, B)
    until(lambda: ben.sees(sighting(A, a.address)), "Ben sees Anna", FOUND_S)


def announcement(
    service: str, txt: bytes, *, address: str = "10.87.0.2", port: int = 7, ttl: int = 4500
) -> bytes:
    """Return the packet that a responder multicasts to announce a service."""
    out = DNSOutgoing(0x8400)
    out.add_answer_at_time(DNSPointer(SERVICE, 12, 1, ttl, service), 0)
    out.add_answer_at_time(DNSService(service, 33, 0x8001, ttl, 0, 0, port, service), 0)
    out.add_answer_at_time(DNSText(service, 16, 0x8001, ttl, txt), 0)
    out.add_answer_at_time(DNSAddress(service, 1, 0x8001, ttl, socket.inet_aton(address)), 0)
    return bytes(out.packets()[0])


def txt_record(*items: str) -> bytes:
    return b"".join(bytes([len(item)]) + item.encode() for item in items)


def false_node(number: int) -> bytes:
    """A node that is not there, announced as it should be."""
    advert = Advert(f"{number:08x}{'f' * 24}", "c" * 16, "False", 1 + number % 60000, False, 1)
    items = (f"{key}={value}" for key, value in advert.properties().items())
    return announcement(advert.service(), txt_record(*items))


@contextlib.contextmanager
def multicasting(host: Host) -> Iterator[socket.socket]:
    """A socket that sends what others take for a responder's word."""
    with host.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host.address, 5353))
        sock.connect(("224.0.0.251", 5353))
        yield sock


def test_ten_thousand_false_nodes_cost_little(net: Hosts) -> None:
    a, b = net.hosts
    rests = {"FIRST_REST_S": 0.5, "MAX_REST_S": 0.5}
    anna, ben = Member(a, A, **rests), Member(b, B, **rests)
    until(lambda: anna.sees(sighting(B, b.address)), "Anna sees Ben", FOUND_S)
    process = psutil.Process(anna.process.pid)
    rss, cpu_s = process.memory_info().rss, sum(process.cpu_times()[:2])
    with multicasting(b) as sock:
        for number in range(10_000):
            sock.send(false_node(number))
            if number % 50 == 0:
                time.sleep(0.005)  # a network would not deliver them faster
    until(lambda: anna.said, "Anna says that she is flooded", FOUND_S)
    assert "512 names were announced" in anna.said[0]
    now = dataclasses.replace(B, port=60000)
    ben.command("update", json.dumps(dataclasses.asdict(now)))
    until(
        lambda: sighting(now, b.address) in anna.sightings, "Anna sees what Ben said meanwhile", 2 * FOUND_S
    )
    grown, spent_s = process.memory_info().rss - rss, sum(process.cpu_times()[:2]) - cpu_s
    print(f"{grown / 1e6:.1f} MB, {spent_s:.2f} s of CPU, {len(anna.history)} changes")
    assert all(len(sightings) <= MAX_SIGHTINGS for sightings in anna.history)
    assert grown < 10e6
    assert spent_s < 2 * SLOWNESS


GOOD = ("txtvers=1", f"id={'9' * 32}", "cl=", "v=1", "ca=")


@pytest.mark.parametrize(
    ("service", "items", "records"),
    [
        (f"Bad [99999999].{SERVICE}", ("txtvers=2", *GOOD[1:]), {}),
        (f"Bad [99999999].{SERVICE}", GOOD, {"port": 0}),
        (f"Bad\x1b[2J [99999999].{SERVICE}", GOOD, {}),
        (f"_sub.{SERVICE}", GOOD, {}),
        ("somewhere._else._tcp.local.", GOOD, {}),
    ],
)
def test_what_no_node_would_say_is_not_believed(
    watcher: tuple[Hosts, Member], service: str, items: tuple[str, ...], records: dict[str, Any]
) -> None:
    net, anna = watcher
    seen = len(anna.history)
    with multicasting(net.hosts[1]) as sock:
        sock.send(announcement(service, txt_record(*items), **records))
        # The same socket delivers in order: when Anna believes in this one, she has judged the other.
        number = time.monotonic_ns() % 10**9
        sock.send(false_node(number))
        until(
            lambda: any(int(s.node_id[:8], 16) == number for s in anna.sightings), "Anna sees more", FOUND_S
        )
    assert not [s for all_ in anna.history[seen:] for s in all_ if s.node_id == "9" * 32]
    assert anna.process.poll() is None


@pytest.fixture(scope="module")
def watcher() -> Iterator[tuple[Hosts, Member]]:
    """A Mac that is on the network before false records come."""
    with Hosts(2) as net:
        anna = Member(net.hosts[0], A)
        with multicasting(net.hosts[1]) as sock:

            def heard() -> bool:
                sock.send(false_node(1))
                return bool(anna.sightings)

            until(heard, "Anna hears what is sent", FOUND_S)
        yield net, anna


def test_a_node_that_did_not_answer_is_asked_again(net: Hosts) -> None:
    a, b = net.hosts
    anna = Member(a, A, RESOLVE_S=0.3)
    name = DNSOutgoing(0x8400)
    name.add_answer_at_time(DNSPointer(SERVICE, 12, 1, 4500, B.service()), 0)
    items = tuple(f"{key}={value}" for key, value in B.properties().items())
    records = announcement(B.service(), txt_record(*items), address=b.address, port=B.port)
    first_asked_at = float("inf")
    with multicasting(b) as sock, listening(b) as asked:

        def answered() -> bool:
            nonlocal first_asked_at
            if first_asked_at == float("inf"):
                sock.send(bytes(name.packets()[0]))
            for _ in asked():
                first_asked_at = min(first_asked_at, time.monotonic())
                # The first time, which takes 0.3 s, no host replies.
                if time.monotonic() - first_asked_at > 0.7:
                    sock.send(records)
            return anna.sees(sighting(B, b.address))

        until(answered, "Anna sees Ben", FOUND_S)


@contextlib.contextmanager
def listening(host: Host) -> Iterator[Callable[[], list[bytes]]]:
    """The questions with Ben's name in them that were multicast since the last call."""
    with host.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("224.0.0.251", 5353))
        group = socket.inet_aton("224.0.0.251") + socket.inet_aton(host.address)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        sock.setblocking(False)

        def received() -> list[bytes]:
            found = []
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet, (sender, _) = sock.recvfrom(10_000)
                    if sender != host.address and b"Ben's Mac" in packet:
                        found.append(packet)
            return found

        yield received
