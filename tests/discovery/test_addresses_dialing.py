"""Order and times of addresses to dial."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from mlxtp.discovery.addresses import (
    AT_ONCE,
    AT_ONCE_A_NODE,
    DIAL_S,
    FIRST_BACKOFF_S,
    FOREIGN_S,
    HINTED_AT_ONCE,
    MAX_BACKOFF_S,
    MAX_KNOWN,
    STEADY_S,
    Dialing,
    DiscoveredPeer,
    host_and_port,
)

ME, ANNA, BEN = "0" * 32, "a" * 32, "b" * 32
OURS, THEIRS = "c" * 16, "d" * 16
TICK_S = 0.5


def sighting(node_id: str, *addresses: str, cluster_id: str = OURS) -> DiscoveredPeer:
    return DiscoveredPeer(node_id, cluster_id, "x", addresses, False, 1)


def dialing(*static: str) -> Dialing:
    return Dialing(ME, OURS, static)


def dialled(policy: Dialing, until: float, start: float = 0.0, linked: Iterable[str] = ()) -> list[float]:
    """Return the times at which addresses were dialled, each of which failed at once."""
    times, now, linked = [], start, set(linked)
    while now <= until:
        for address in policy.tick(now, linked):
            times.append(now)
            policy.failed(address, now)
        now += TICK_S
    return times


NODES = {"me": ME, "a": ANNA, "b": BEN}


def address(name: str) -> str:
    return f"10.0.0.{name}:1" if name.isdigit() else f"{name}:1"


def sightings(words: Iterable[str]) -> list[DiscoveredPeer]:
    """Return those of "a@1 b@2!": node a at address 1, and node b of another cluster, or of none, at 2."""
    found = []
    for word in words:
        node, _, at = word.partition("@")
        cluster_id = {"!": THEIRS, "?": ""}.get(at[-1], OURS)
        found.append(sighting(NODES[node], address(at.rstrip("!?")), cluster_id=cluster_id))
    return found


def told(script: str) -> Dialing:
    """Play "at S what ..." for each sentence of a script, where S is the time; "at 3+a" has a link with a."""
    policy = dialing(*map(address, script.partition(";")[0].split()))
    for step in script.split("; ")[1:]:
        when, what, *words = step.split()
        at, *linked = when.split("+")
        now, here = float(at), [NODES[each] for each in linked]
        match what, words:
            case "sees", _:
                policy.sighted(sightings(words), now)
            case "dials", _:
                assert policy.tick(now, here) == list(map(address, words)), step
            case "fails_until", [until]:
                assert dialled(policy, float(until), now, here)
            case "rests_until", [until]:
                assert not dialled(policy, float(until), now, here)
            case "remember", [node, *addresses]:
                policy.remember(NODES[node], map(address, addresses))
            case "remembers", _:
                known = {NODES[each[0]]: tuple(map(address, each[2:].split(","))) for each in words}
                assert policy.remembered() == known
            case "knows", [count]:
                assert len(policy) == int(count)
            case "reached", [name, node]:
                policy.reached(address(name), NODES[node], now)
            case "failed" | "foreign", [name]:
                getattr(policy, what)(address(name), now)
            case "ourselves", [name]:
                policy.ourselves(address(name))
            case "forget", [node]:
                policy.forget(NODES[node])
            case _:
                assert what == "other_interfaces"
                policy.interfaces_changed(now)
    return policy


STORIES = """
addresses of all sources are dialled at once
    mac; 0 remember a 1; 0 sees b@2; 0 dials mac 1 2; 0.5 dials
who is linked is not dialled
    ; 0 remember a 1 3; 0 sees b@2; 0+a dials 2; 1+b dials 1 3
an address of the user is dialled despite reports of others
    1; 0 sees a@1; 0+a dials 1; 0.1 reached 1 a; 0.5+a rests_until 100; 100.5 fails_until 101
other clusters and our own sightings are not dialled
    ; 0 sees a@1! b@2?; 1 sees me@3; 1 remember me 3; 1 dials; 1 knows 0
a sighting that is gone is no longer dialled unless it was once true
    ; 0 sees a@1 b@2; 0 dials 1 2; 0.1 reached 1 a; 0.2 sees; 0.3 failed 2; 100 dials 1; 100 knows 1
a new sighting ends the wait and an old one does not
    1; 0 fails_until 60; 60.5 sees a@1; 60.5 dials 1; 60.5 failed 1; 60.6 sees a@1; 60.9 dials; 61 dials 1
we are not dialled again
    mac 1; 0 dials mac 1; 0 ourselves mac; 0 reached 1 me; 0.5 rests_until 100
another interface is a new chance for all
    mac self other; 0 dials mac self other; 0 ourselves self; 0 foreign other; 0 failed mac; \
    0.5 fails_until 30; 30.6 other_interfaces; 30.6 dials mac self other
a dial of which nothing is heard has failed
    mac; 0 dials mac; 29.9 dials; 30 dials; 30.5 dials mac
a link that was steady is dialled at once when it breaks
    mac; 0 fails_until 30; 40 dials mac; 40.1 reached mac a; 41+a rests_until 59; \
    60 dials mac; 60 failed mac; 60.5 dials mac
another cluster is not forgotten with its sighting
    ; 0 sees a@1; 0 dials 1; 0 foreign 1; 1 sees; 1 knows 0; 2 sees a@1; 59 dials; 60 dials 1
nor by being remembered meanwhile
    ; 0 sees a@1; 0 dials 1; 0 foreign 1; 1 sees; 2 remember a 1; 59 dials; 60 dials 1
who answers counts more than who was said to be there, even if other members say so
    ; 0 sees b@1; 0 dials 1; 0.1 reached 1 a; 20 sees b@1 b@2; 20+a dials 2; 20 remembers a:1
the address of the last link is remembered first
    ; 0 remember a 1 2; 0 dials 1 2; 1 reached 2 a; 1 remembers a:2,1; 2 reached 1 a; 2 remembers a:1,2
a node that was removed is forgotten
    mac; 0 remember a 1; 0 dials mac 1; 0.1 reached mac a; 0.1 failed 1; 0.1 forget a; 0.1 remembers; \
    60 dials mac; 60 knows 1
a sighting that comes and goes does not make us dial without rest
    ; 0 sees a@1; 0 dials 1; 0.1 failed 1; 0.2 sees; 0.3 sees a@1; 0.3 dials; 0.5 dials 1
one node is dialled at two addresses at once
    ; 0 remember a 1 2 3 4 5; 0 dials 1 2
"""
"""Of each its name, and below it the user's addresses and what happens."""
LINES = STORIES.replace("\\\n   ", "").strip().split("\n")


@pytest.mark.parametrize("script", LINES[1::2], ids=LINES[::2])
def test_a_story_of_dialling(script: str) -> None:
    assert len(told(script)) <= MAX_KNOWN


def test_the_wait_doubles_from_half_a_second_to_ten() -> None:
    assert dialled(dialing("mac:1"), 60.0) == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 25.5, 35.5, 45.5, 55.5]


def test_a_link_that_breaks_again_and_again_is_not_dialled_without_rest() -> None:
    policy = dialing("mac:1")
    times, now = [], 0.0
    while now < 60.0:
        if policy.tick(now, ()):
            times.append(now)
            policy.reached("mac:1", ANNA, now)
            policy.tick(now + 0.1, (ANNA,))
        now += TICK_S
    assert times == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 25.5, 35.5, 45.5, 55.5]
    assert STEADY_S > 0.1


def test_hints_leave_room_for_what_is_more_than_a_hint() -> None:
    policy = dialing()
    policy.sighted([sighting(f"{n:032x}", f"10.1.0.{n}:1") for n in range(1, 60)], 0.0)
    assert len(policy.tick(0.0, ())) == HINTED_AT_ONCE
    policy.remember(ANNA, ["10.0.0.1:1"])
    assert policy.tick(TICK_S, ()) == ["10.0.0.1:1"]


def test_at_most_so_many_at_once() -> None:
    policy = dialing(*(f"mac{n}:1" for n in range(20)))
    first = policy.tick(0.0, ())
    assert len(first) == AT_ONCE
    policy.failed(first[0], 0.5)
    # Addresses that were not tried yet come first.
    assert policy.tick(1.0, ()) == ["mac8:1"]


def test_addresses_are_bounded_and_what_is_more_than_a_hint_stays() -> None:
    policy = dialing("mac:1")
    policy.remember(ANNA, ["10.0.0.1:1"])
    for step in range(10):
        hints = [f"10.{step}.{n // 250}.{n % 250}:1" for n in range(3000)]
        policy.sighted([sighting(f"{n:032x}", address) for n, address in enumerate(hints, 1)], float(step))
        for address in policy.tick(float(step), ()):
            policy.failed(address, float(step))
        assert len(policy) <= MAX_KNOWN
    assert {"mac:1", "10.0.0.1:1"} <= set(policy.tick(200.0, ()))


def test_remembered_addresses_are_bounded() -> None:
    policy = dialing()
    for n in range(1000):
        policy.remember(f"{n:032x}", [f"10.0.{n // 250}.{n % 250}:1"])
    assert len(policy) == 256
    policy.reached("10.9.9.9:1", ANNA, 1.0)
    assert policy.remembered()[ANNA] == ("10.9.9.9:1",)
    assert len(policy) == 256


class AnyOrder(RuleBasedStateMachine):
    """The promises hold for any reports in any order."""

    addresses = Bundle("addresses")

    def __init__(self) -> None:
        super().__init__()
        self.policy = Dialing(ME, OURS, ("s1:1", "s2:1"))
        self.now = 0.0
        self.in_flight: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.own: set[str] = set()
        self.foreign: dict[str, float] = {}
        self.known = {"s1:1", "s2:1"}

    @rule(target=addresses, name=st.sampled_from([f"10.0.0.{n}:1" for n in range(12)] + ["s1:1", "s2:1"]))
    def address(self, name: str) -> str:
        return name

    @rule(
        hints=st.lists(
            st.tuples(
                st.sampled_from([ME, *(f"{n:032x}" for n in range(1, 6))]),
                st.sampled_from([f"10.0.0.{n}:1" for n in range(12)]),
                st.sampled_from([OURS, OURS, THEIRS]),
            ),
            max_size=8,
        )
    )
    def sighted(self, hints: list[tuple[str, str, str]]) -> None:
        self.policy.sighted([sighting(n, a, cluster_id=c) for n, a, c in hints], self.now)
        self.known |= {a for n, a, c in hints if c == OURS and n != ME}

    @rule(address=addresses, node=st.integers(1, 5))
    def remember(self, address: str, node: int) -> None:
        self.policy.remember(f"{node:032x}", [address])
        self.known.add(address)

    @rule(later=st.floats(0.0, 40.0), linked=st.sets(st.integers(1, 5).map(lambda n: f"{n:032x}")))
    def tick(self, later: float, linked: set[str]) -> None:
        self.dial(later, linked)

    def dial(self, later: float, linked: set[str]) -> set[str]:
        """Check what a tick after some time dials."""
        self.now += later
        self.in_flight = {a: at for a, at in self.in_flight.items() if self.now - at < DIAL_S}
        chosen = self.policy.tick(self.now, linked)
        for address in chosen:
            assert address in self.known
            assert address not in self.in_flight
            assert address not in self.own
            assert self.now >= self.foreign.get(address, 0.0)
            assert self.now - self.last.get(address, -1.0) >= FIRST_BACKOFF_S
            self.in_flight[address] = self.last[address] = self.now
        assert len(self.in_flight) <= AT_ONCE
        return set(chosen)

    @rule(later=st.floats(0.0, 5.0), data=st.data(), node=st.integers(0, 5))
    def end(self, later: float, data: st.DataObject, node: int) -> None:
        if not self.in_flight:
            return
        self.now += later
        address = data.draw(st.sampled_from(sorted(self.in_flight)))
        del self.in_flight[address]
        match data.draw(st.sampled_from(["reached", "failed", "ourselves", "foreign"])):
            case "reached":
                self.policy.reached(address, f"{node:032x}", self.now)
                if node == 0:
                    self.own.add(address)
            case "failed":
                self.policy.failed(address, self.now)
            case "ourselves":
                self.policy.ourselves(address)
                self.own.add(address)
            case _:
                self.policy.foreign(address, self.now)
                self.foreign[address] = self.now + FOREIGN_S

    @rule()
    def interfaces_changed(self) -> None:
        self.policy.interfaces_changed(self.now)
        self.own.clear()
        self.foreign.clear()

    @rule(node=st.integers(1, 5))
    def forget(self, node: int) -> None:
        self.policy.forget(f"{node:032x}")
        assert f"{node:032x}" not in self.policy.remembered()

    @rule()
    def the_user_is_not_forgotten(self) -> None:
        """An address of the user is dialled when no agent is linked, however long it was silent."""
        dialled: set[str] = set()
        # One node may be behind all of them, of which two are dialled at once.
        for _ in range(len(self.known) // AT_ONCE_A_NODE + 1):
            for address in self.in_flight:
                self.policy.failed(address, self.now)
            self.in_flight.clear()
            dialled |= self.dial(MAX_BACKOFF_S + FOREIGN_S, set())
        assert {"s1:1", "s2:1"} - self.own <= dialled

    @invariant()
    def it_is_bounded(self) -> None:
        assert len(self.policy) <= len(self.known)


AnyOrder.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestAnyOrder = pytest.mark.slow(AnyOrder.TestCase)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("10.0.0.1:52414", ("10.0.0.1", 52414)),
        ("studio.local:1", ("studio.local", 1)),
        ("::1:65535", ("::1", 65535)),
        ("10.0.0.1:0", None),
        ("10.0.0.1:65536", None),
        ("10.0.0.1:-1", None),
        ("10.0.0.1:²", None),
        (":52414", None),
        ("x" * 300 + ":1", None),
    ],
)
def test_what_is_an_address(said: str, meant: tuple[str, int] | None) -> None:
    assert host_and_port(said) == meant
