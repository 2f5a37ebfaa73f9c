from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxtp.engine import sequence
from mlxtp.engine.sequence import FairQueue


class Line:
    """Requests that wait, as (turn, number, client)."""

    def __init__(self) -> None:
        self.turns = FairQueue()
        self.waiting: list[tuple[int, int, int]] = []
        self._numbers = 0

    def come(self, client: int) -> int:
        self._numbers += 1
        turn = self.turns.following(client, [turn for turn, _, other in self.waiting if other == client])
        self.waiting.append((turn, self._numbers, client))
        return self._numbers

    def begin(self) -> tuple[int, int]:
        """Number and client of the next one."""
        self.waiting.sort()
        turn, number, client = self.waiting.pop(0)
        self.turns.record(client, turn)
        return number, client


@given(st.lists(st.one_of(st.integers(1, 4), st.none()), max_size=80))
def test_each_client_is_served_in_its_order_and_none_twice_while_a_newcomer_waits(
    course: list[int | None],
) -> None:
    """A number is a request of that client; None begins the next one."""
    line = Line()
    order: dict[int, list[int]] = {}
    passed: dict[int, list[int]] = {}
    for client in course:
        if client is not None:
            number = line.come(client)
            if all(other != client for _, _, other in line.waiting[:-1]):
                passed[number] = []
        elif line.waiting:
            number, begun = line.begin()
            passed.pop(number, None)
            order.setdefault(begun, []).append(number)
            for others in passed.values():
                others.append(begun)
                assert others.count(begun) <= 2
    for numbers in order.values():
        assert numbers == sorted(numbers)


def test_memory_of_clients_is_bounded_and_forgetting_favours_no_client() -> None:
    line = Line()
    first = line.come(0)
    assert line.begin() == (first, 0)
    waiting = line.come(0)
    for client in range(1, 3 * sequence.MAX_CLIENTS):
        line.come(client)
        line.begin()
        if (waiting, 0) not in [(number, who) for _, number, who in line.waiting]:
            break
    else:
        raise AssertionError("newcomers starve it")
    for client in range(10_000, 10_000 + 3 * sequence.MAX_CLIENTS):
        line.come(client)
        line.begin()
    assert len(line.turns._begun) <= sequence.MAX_CLIENTS
