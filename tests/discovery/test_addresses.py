"""Sightings of announcements, and how long they count."""

from __future__ import annotations

import dataclasses
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf.asyncio import AsyncServiceInfo

from mlxtp.discovery.addresses import (
    BELIEVED_S,
    CONFIRM_S,
    MAX_ADDRESSES,
    MAX_SIGHTINGS,
    RETRY,
    SERVICE,
    Advert,
    DiscoveredPeer,
    PeerCache,
    Refused,
    announced_from,
    explain,
    is_copy,
    validate,
)

ADVERT = Advert("a" * 32, "c" * 16, "Anna's Mac", 52414, True, 1)
NAME = f"Anna's Mac [aaaaaaaa].{SERVICE}"
SIGHTING = DiscoveredPeer("a" * 32, "c" * 16, "Anna's Mac", ("10.0.0.5:52414",), True, 1)
TXT: dict[bytes, bytes | None] = {
    b"txtvers": b"1",
    b"id": b"a" * 32,
    b"cl": b"c" * 16,
    b"v": b"1",
    b"ca": b"1",
}


def packed(*addresses: str) -> list[bytes]:
    return [socket.inet_aton(address) for address in addresses]


ETHERNET, WIFI, OTHER_NETWORK = "192.168.1.20/24", "192.168.1.21/24", "10.9.0.5/16"
CABLES = tuple(f"10.201.{number}.1/30" for number in range(6))
FACTORY_BRIDGE, VPN = "169.254.3.4/16", "100.64.0.9/32"


@pytest.mark.parametrize(
    ("interfaces", "primary", "expected"),
    [
        ((ETHERNET, WIFI, *CABLES), ETHERNET, {ETHERNET, CABLES[0]}),
        ((*reversed(CABLES), WIFI, ETHERNET), WIFI, {WIFI, CABLES[0]}),
        (CABLES, "", {CABLES[0], CABLES[1]}),
        ((WIFI, ETHERNET), ETHERNET, {ETHERNET, WIFI}),
        ((WIFI, FACTORY_BRIDGE), WIFI, {WIFI, FACTORY_BRIDGE}),
        ((VPN, WIFI, OTHER_NETWORK, CABLES[0]), VPN, {OTHER_NETWORK, CABLES[0]}),
        ((VPN,), VPN, {VPN}),
    ],
)
def test_it_announces_on_the_network_and_one_more_interface(
    interfaces: tuple[str, ...], primary: str, expected: set[str]
) -> None:
    plain = {each: each.partition("/")[0] for each in (*interfaces, primary)}
    prefixes = {plain[each]: int(each.partition("/")[2]) for each in interfaces}
    numbers = {plain[each]: number for number, each in enumerate(interfaces)}
    found = announced_from(numbers, prefixes, plain[primary])
    assert set(found) == {plain[each] for each in expected}
    more = {**numbers, "192.168.7.7": numbers[found[0]]}
    assert {more[each] for each in announced_from(more, prefixes, "")} == {numbers[each] for each in found}


def test_what_a_node_announces_is_what_others_believe() -> None:
    assert ADVERT.service() == NAME
    assert next(iter(ADVERT.properties())) == "txtvers"
    # Later versions may have more to say, and of one name that two machines have one is changed.
    renamed = f"Anna's Mac [aaaaaaaa]-2.{SERVICE}"
    for name, txt in ((NAME, TXT), (NAME, {**TXT, b"new": b"1", b"flag": None}), (renamed, TXT)):
        assert validate(name, txt, packed("10.0.0.5"), 52414) == SIGHTING
    plain = validate(f"someone.{SERVICE}", TXT, packed("10.0.0.5"), 52414)
    assert isinstance(plain, DiscoveredPeer)
    assert plain.name == "someone"


@given(
    advert=st.builds(
        Advert,
        node_id=st.text("0123456789abcdef", min_size=32, max_size=32),
        cluster_id=st.just("0123456789abcdef"),
        name=st.text(max_size=80),
        port=st.integers(1, 65535),
        has_ca=st.booleans(),
        version=st.integers(0, 9999),
    )
)
def test_any_name_of_a_mac_can_be_announced(advert: Advert) -> None:
    info = AsyncServiceInfo(
        SERVICE,
        advert.service(),
        port=advert.port,
        properties=advert.properties(),
        parsed_addresses=["10.0.0.5"],
    )
    sighting = validate(info.name, info.properties, info.addresses, info.port)
    assert isinstance(sighting, DiscoveredPeer)
    assert sighting.name.isprintable()
    assert sighting.addresses == (f"10.0.0.5:{advert.port}",)
    told = dataclasses.asdict(sighting) | {"port": advert.port, "name": advert.name}
    del told["addresses"]
    assert Advert(**told) == advert


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("mac.local", "mac-local [aaaaaaaa]"),
        ("", "mlxtp [aaaaaaaa]"),
        ("\x1b[2Jtwo\nlines", "[2Jtwolines [aaaaaaaa]"),
        # There is room for what the library appends to a name that another Mac has.
        ("x" * 100, f"{'x' * 47} [aaaaaaaa]"),
        ("é" * 100, f"{'é' * 23} [aaaaaaaa]"),
    ],
)
def test_a_name_becomes_one_part_of_a_name_on_the_network(name: str, label: str) -> None:
    assert dataclasses.replace(ADVERT, name=name).service() == f"{label}.{SERVICE}"
    assert len(label.encode()) <= 58


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({b"txtvers": b"2"}, "txtvers is not 1"),
        ({b"id": b"a" * 31}, "id is not 32 hex digits"),
        ({b"id": b"a" * 32 + b"\n"}, "id is not 32 hex digits"),
        ({b"cl": b"g" * 16}, "cl is not 16 hex digits or empty"),
        ({b"v": b"12345"}, "v is not a number of up to 4 digits"),
        ({b"v": "١".encode()}, "v is not a number of up to 4 digits"),
        ({b"ca": b"2"}, "ca is not 1 or empty"),
        ({b"cl": b""}, "the key of a cluster that has no id"),
        ({b"x": b"y" * 500}, "a TXT record of 6 keys and 566 bytes"),
        ({b"%d" % n: b"" for n in range(12)}, "a TXT record of 17 keys and 79 bytes"),
    ],
)
def test_a_txt_record_that_is_not_ours(change: dict[bytes, bytes | None], why: str) -> None:
    assert validate(NAME, {**TXT, **change}, packed("10.0.0.5"), 52414) == Refused(why)


@pytest.mark.parametrize(
    ("name", "port", "why"),
    [
        (f"x.{SERVICE}x", 1, "the name does not end with"),
        (f".{SERVICE}", 1, "a name of 0 bytes"),
        (f"{'é' * 32}.{SERVICE}", 1, "a name of 64 bytes"),
        (f"\x1b[2J.{SERVICE}", 1, "cannot be printed"),
        (NAME, None, "port None is not from 1 to 65535"),
        (NAME, 0, "port 0 is not from 1 to 65535"),
        (NAME, 65536, "port 65536 is not from 1 to 65535"),
    ],
)
def test_a_name_or_a_port_that_cannot_be(name: str, port: int | None, why: str) -> None:
    verdict = validate(name, TXT, packed("10.0.0.5"), port)
    assert isinstance(verdict, Refused)
    assert why in verdict.reason


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "0.1.2.3", "224.0.0.251", "239.1.1.1", "240.0.0.1", "255.255.255.255", "127.0.0.1"]
)
def test_an_address_of_no_machine_is_left_out(address: str) -> None:
    refused = Refused("no IPv4 address that could be dialled")
    assert validate(NAME, TXT, packed(address), 52414) == refused
    assert validate(NAME, TXT, packed(address, "10.0.0.5"), 52414) == SIGHTING
    assert validate(NAME, TXT, [b"\x20\x01" + bytes(14)], 52414) == refused
    assert validate(NAME, TXT, [], 52414) == refused


def test_addresses_are_sorted_and_not_too_many() -> None:
    many = [f"10.0.{n % 3}.{n}" for n in range(30)]
    sighting = validate(NAME, TXT, packed(*many, *many), 52414)
    assert isinstance(sighting, DiscoveredPeer)
    assert len(sighting.addresses) == MAX_ADDRESSES
    assert sighting.addresses[:3] == ("10.0.0.0:52414", "10.0.0.3:52414", "10.0.0.6:52414")


def test_on_the_loopback_only_the_loopback_counts() -> None:
    both = packed("127.0.0.1", "10.0.0.5")
    sighting = validate(NAME, TXT, both, 52414, loopback=True)
    assert isinstance(sighting, DiscoveredPeer)
    assert sighting.addresses == ("127.0.0.1:52414",)
    assert isinstance(validate(NAME, TXT, packed("10.0.0.5"), 52414, loopback=True), Refused)


@given(
    name=st.one_of(st.text(), st.text().map(lambda text: f"{text}.{SERVICE}")),
    txt=st.dictionaries(
        st.one_of(st.sampled_from(sorted(TXT)), st.binary(max_size=8)),
        st.one_of(st.none(), st.sampled_from(sorted(filter(None, TXT.values()))), st.binary(max_size=300)),
        max_size=20,
    ),
    addresses=st.lists(st.one_of(st.binary(min_size=4, max_size=4), st.binary(max_size=16)), max_size=20),
    port=st.one_of(st.none(), st.integers(-10, 1 << 17)),
)
def test_any_machine_is_judged(
    name: str, txt: dict[bytes, bytes | None], addresses: list[bytes], port: int | None
) -> None:
    verdict = validate(name, {**TXT, **txt}, addresses, port)
    if isinstance(verdict, Refused):
        assert verdict.reason.isprintable()
        assert len(verdict.reason) < 100
    else:
        assert verdict.name.isprintable()
        assert 1 <= len(verdict.addresses) <= MAX_ADDRESSES
        assert all(address.endswith(f":{port}") for address in verdict.addresses)


def test_our_id_from_elsewhere_is_a_copy() -> None:
    assert not is_copy(NAME, SIGHTING, NAME, ["10.0.0.5", "192.168.7.7"])
    assert is_copy(NAME, SIGHTING, NAME, ["10.0.0.6"])
    # A copy on this very machine has another name, as one name cannot be announced twice.
    assert is_copy(NAME, SIGHTING, f"Anna's Mac [aaaaaaaa]-2.{SERVICE}", ["10.0.0.5"])


@pytest.mark.parametrize(
    ("errno", "said"),
    [
        (65, "Local Network Privacy: allow it, or the app that it was started in (iTerm, an editor)"),
        (48, "UDP port 5353 is taken"),
        (98, "UDP port 5353 is taken"),
        (101, "cannot be found by multicast: Network is unreachable; other Macs can be named by --peer"),
        (None, "cannot be found by multicast: Network is unreachable"),
    ],
)
def test_what_keeps_multicast_from_working_is_explained(errno: int | None, said: str) -> None:
    assert said in explain(errno, "Network is unreachable")
    assert ("--peer" in explain(errno, "x")) == (errno is not None)


def seen(sightings: PeerCache, name: str, now: float, sighting: DiscoveredPeer = SIGHTING) -> bool:
    sightings.announced(name, now)
    return sightings.resolved(name, sighting, now)


def numbered(number: int) -> str:
    return f"node {number}.{SERVICE}"


STORIES = """
a name is believed once its records are there
    10 announced x; due x; believes; 10 resolves! x 5; believes 5; due
a sighting is confirmed now and then and changes only when it does
    0 announced x; 0 resolves! x 5; 29.9; due; 30; due x; resolves x 5; resolves! x 6; believes 6
other records of a known name are looked at at once
    0 announced x; 0 resolves! x 5; 1 announced x; due x; believes 5
goodbye is believed, and records that were on their way then are of no use
    0 announced x; 0 resolves! x 5; withdrawn! x; believes; withdrawn x; 0.1 resolves x 5; believes
records that are refused are forgotten until they change
    0 announced x; resolves x -; knows 0; 1 announced x; resolves! x 5; 2 announced x; resolves! x -; believes
after a change of network everything is in doubt
    0 announced x; resolves! x 5; announced y; failed y; 0.5; due; doubt; due x y; believes 5
"""
"""Of each its name, and what is heard at which time. With a `!` what is believed changes."""
LINES = STORIES.strip().split("\n")


@pytest.mark.parametrize("script", LINES[1::2], ids=LINES[::2])
def test_a_story_of_names(script: str) -> None:
    sightings, now = PeerCache(), 0.0
    for step in script.split(";"):
        at, *words = step.split() if step.strip()[0].isdigit() else [now, *step.split()]
        now = float(at)
        what, *names = words or ["wait"]
        services = [f"{name}.{SERVICE}" for name in names]
        match what.rstrip("!"):
            case "due":
                assert sightings.due(now) == services, step
            case "believes":
                believed = tuple(at for each in sightings.believed for at in each.addresses)
                assert believed == tuple(f"10.0.0.{name}:52414" for name in names), step
            case "knows":
                assert len(sightings) == int(names[0])
            case "announced":
                sightings.announced(services[0], now)
            case "doubt":
                sightings.doubt(now)
            case "withdrawn":
                assert sightings.withdrawn(services[0]) is what.endswith("!"), step
            case "failed":
                assert not sightings.failed(services[0], now)
            case "resolves":
                found = dataclasses.replace(SIGHTING, addresses=(f"10.0.0.{names[1]}:52414",))
                verdict = Refused("why") if names[1] == "-" else found
                assert sightings.resolved(services[0], verdict, now) is what.endswith("!"), step


@pytest.mark.parametrize("name", ["x._http._tcp.local.", f"{'x' * 200}.{SERVICE}", f"\x07.{SERVICE}"])
def test_a_name_that_cannot_be_is_not_even_kept(name: str) -> None:
    sightings = PeerCache()
    sightings.announced(name, 0.0)
    assert len(sightings) == 0


def test_who_does_not_answer_is_asked_again_ever_more_rarely() -> None:
    sightings = PeerCache()
    sightings.announced(NAME, 0.0)
    now, waits = 0.0, []
    for _ in range(10):
        assert sightings.due(now) == [NAME]
        assert not sightings.failed(NAME, now)
        due = sightings.next_due()
        assert due is not None
        assert sightings.due(due - 0.01) == []
        waits.append(due - now)
        now = due
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]
    assert sightings.resolved(NAME, SIGHTING, now)


def test_who_is_silent_is_believed_for_a_while() -> None:
    sightings = PeerCache()
    seen(sightings, NAME, 100.0)
    now = 100.0 + CONFIRM_S
    while now < 100.0 + BELIEVED_S:
        assert not sightings.failed(NAME, now)
        assert sightings.believed == (SIGHTING,)
        now = sightings.next_due() or 0.0
    assert sightings.failed(NAME, now)
    assert sightings.believed == ()
    assert now < 100.0 + BELIEVED_S + RETRY.most_s
    # Its name is kept, and it may come back.
    assert sightings.resolved(NAME, SIGHTING, now + 1.0)


def test_the_sighting_confirmed_longest_ago_goes_when_there_are_too_many() -> None:
    sightings = PeerCache()
    for number in range(MAX_SIGHTINGS):
        seen(sightings, numbered(number), float(number), dataclasses.replace(SIGHTING, name=str(number)))
    sightings.resolved(numbered(0), dataclasses.replace(SIGHTING, name="0"), 100.0)
    seen(sightings, numbered(1000), 101.0, dataclasses.replace(SIGHTING, name="1000"))
    names = {sighting.name for sighting in sightings.believed}
    assert len(names) == MAX_SIGHTINGS
    assert {"0", "1000"} <= names
    assert "1" not in names


def test_a_new_name_is_looked_at_before_those_that_did_not_answer() -> None:
    sightings = PeerCache()
    for number in range(60):
        sightings.announced(numbered(number), 0.0)
        sightings.failed(numbered(number), 0.0)
    sightings.announced(NAME, 100.0)
    assert sightings.due(100.0)[0] == NAME
    assert len(sightings.due(100.0)) == 61


def test_the_latest_name_is_looked_at_first_and_stays_longest() -> None:
    sightings = PeerCache()
    for number in (1, 2, 3):
        sightings.announced(numbered(number), 0.0)
    sightings.announced(numbered(1), 0.0)
    assert sightings.due(0.0) == [numbered(1), numbered(3), numbered(2)]
    for number in range(10, 10 + MAX_SIGHTINGS - 1):
        sightings.announced(numbered(number), 0.0)
    assert numbered(1) in sightings.due(0.0)
    assert numbered(3) not in sightings.due(0.0)


_operations = st.lists(
    st.tuples(
        st.sampled_from(["announced", "withdrawn", "resolved", "refused", "failed", "doubt"]),
        st.integers(0, 200).map(numbered),
        st.floats(0.0, 50.0),
    ),
    max_size=400,
)


@given(_operations)
def test_it_is_always_little_and_says_when_it_changed(operations: list[tuple[str, str, float]]) -> None:
    sightings, now = PeerCache(), 0.0
    for operation, name, later in operations:
        now += later
        before = sightings.believed
        changed = False
        match operation:
            case "announced":
                sightings.announced(name, now)
                assert name in sightings.due(now)
            case "withdrawn":
                changed = sightings.withdrawn(name)
            case "resolved":
                changed = sightings.resolved(name, dataclasses.replace(SIGHTING, name=name), now)
            case "refused":
                changed = sightings.resolved(name, Refused("why"), now)
            case "failed":
                changed = sightings.failed(name, now)
                assert name not in sightings.due(now)
            case "doubt":
                sightings.doubt(now)
        assert changed == (sightings.believed != before)
        assert len(sightings) <= 2 * MAX_SIGHTINGS
        assert len(sightings.believed) <= MAX_SIGHTINGS
