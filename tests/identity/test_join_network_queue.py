"""Order of the Macs that a joiner asks, beside announcements of others. Time by hand."""

from __future__ import annotations

import heapq

import pytest

from mlxtp.identity.join_network import AGAIN_S, MAX_ASKED, MAX_OF_EACH, PATIENCE_S, JoinQueue


def addresses(announcer: int, count: int) -> list[str]:
    return [f"198.51.{announcer}.{i}:52414" for i in range(1, count + 1)]


def until_asked(queue: JoinQueue, right: str, now: float = 0.0) -> float:
    """Return the time at which the right address is asked, if none of the others ever replies."""
    running: list[tuple[float, str]] = []
    while True:
        while len(running) < MAX_ASKED and (taken := queue.take(now)) is not None:
            _, address, patience_s = taken
            if address == right:
                return now
            heapq.heappush(running, (now + patience_s, address))
        now, ended = heapq.heappop(running)
        queue.asked(ended, now)


@pytest.mark.parametrize("honest_first", [True, False])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_beside_16_liars_with_16_addresses_each_the_right_mac_is_asked_within_10_s(
    count: int, honest_first: bool
) -> None:
    """For each of the addresses by which this Mac may reach it."""
    for right in addresses(200, count):
        queue = JoinQueue()
        announcers = [(f"liar {number}", addresses(number, 16)) for number in range(16)]
        announcers.insert(0 if honest_first else 16, ("honest", addresses(200, count)))
        for name, told in announcers:
            queue.add(name, told)
        assert until_asked(queue, right) < 10.0


def test_who_comes_while_liars_are_asked_has_its_turn() -> None:
    queue, now, running = JoinQueue(), 0.0, []
    for number in range(16):
        queue.add(f"liar {number}", addresses(number, 16))
    while (taken := queue.take(now)) is not None and len(running) < MAX_ASKED:
        running.append(taken[1])
    queue.add("honest", addresses(200, 1))
    for address in running:
        queue.asked(address, PATIENCE_S[0])
    assert until_asked(queue, *addresses(200, 1), now=PATIENCE_S[0]) < 10.0


def test_an_address_is_asked_by_one_at_a_time_and_longer_each_time() -> None:
    queue, now = JoinQueue(), 0.0
    queue.add("one", ["10.0.0.1:1"])
    queue.add("two", ["10.0.0.1:1", "no address", "10.0.0.1:99999"])
    assert queue.addresses == {"10.0.0.1:1"}
    for patience_s in (*PATIENCE_S, PATIENCE_S[-1]):
        assert queue.take(now) in (("one", "10.0.0.1:1", patience_s), ("two", "10.0.0.1:1", patience_s))
        assert queue.take(now) is None
        queue.asked("10.0.0.1:1", now)
        assert queue.take(now) is None
        now += AGAIN_S


def test_where_another_mac_is_said_to_let_in_is_asked_first_of_that_announcers() -> None:
    queue = JoinQueue()
    queue.add("member", addresses(1, MAX_OF_EACH + 5))
    assert len(queue.addresses) == MAX_OF_EACH
    queue.add("member", ["10.0.0.1:1"], first=True)
    assert queue.take(0.0) == ("member", "10.0.0.1:1", PATIENCE_S[0])
    assert len(queue.addresses) == MAX_OF_EACH
