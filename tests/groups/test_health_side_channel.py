"""The middle of JACCL's side channel."""

from __future__ import annotations

import itertools

import pytest

from mlxtp.groups.health import SideChannelHub
from mlxtp.wire.messages import MAX_ROUNDS, Bootstrap, Gathered, SideChannel


def part(rank: int, round_number: int, size: int = 4) -> SideChannel:
    return SideChannel(round_number, bytes([rank * 16 + round_number % 16]) * size)


def go_round(
    hub: SideChannelHub, ranks: range, round_number: int, size: int = 4
) -> list[tuple[int, Gathered]]:
    """All of them come; what the last one's coming answers."""
    answers = []
    for rank in ranks:
        assert answers == []
        answers = hub.receive(rank, part(rank, round_number, size))
    return answers


def test_each_rank_gets_all_bytes_in_rank_order_however_they_came() -> None:
    for order in itertools.permutations(range(3)):
        hub = SideChannelHub(3)
        for number, size in enumerate((4, 84, 0, 1), 1):
            answers: list[tuple[int, Gathered]] = []
            for rank in order:
                assert answers == []
                answers = hub.receive(rank, part(rank, number, size))
                assert hub.has_begun is (rank == order[0]), "a round begins with the first who comes"
            data = b"".join(part(rank, number, size).data for rank in range(3))
            assert answers == [(rank, Gathered(number, data)) for rank in range(3)]
            assert hub.late() == [], "no rank is late between two rounds"
    hub = SideChannelHub(2)
    assert hub.receive(0, SideChannel(1, b"same")) == []
    assert [answer.data for _, answer in hub.receive(1, SideChannel(1, b"same"))] == [b"samesame"] * 2


def test_ranks_that_stay_away_are_named_to_those_who_came() -> None:
    hub = SideChannelHub(3)
    assert hub.late() == []
    go_round(hub, range(3), 1)
    hub.receive(0, part(0, 2))
    hub.receive(2, part(2, 2))
    words = "rank 1 did not come to round 2 of JACCL's side channel within 10 s"
    assert hub.late() == [(rank, Gathered(2, b"", words)) for rank in range(3)]
    assert hub.error == words
    assert hub.late() == []
    hub = SideChannelHub(4)
    hub.receive(2, part(2, 1))
    ((rank, answer),) = hub.late()
    assert rank == 2
    assert answer.error.startswith("rank 0 and rank 1 and rank 3 did not come to round 1")


def test_who_speaks_after_the_end_is_told_why_and_only_once() -> None:
    hub = SideChannelHub(3)
    hub.receive(0, part(0, 1))
    assert [rank for rank, _ in hub.abort("rank 1 is gone")] == [0]
    assert hub.receive(2, part(2, 1)) == [(2, Gathered(1, b"", "rank 1 is gone"))]
    assert hub.receive(2, part(2, 1)) == []
    assert hub.receive(0, part(0, 2)) == []
    assert hub.late() == []


def test_the_first_reason_counts_and_none_is_an_error_too() -> None:
    hub = SideChannelHub(2)
    assert hub.abort("rank 0 did not form: errno 22") == []
    assert hub.abort("rank 1 is gone") == []
    ((_, answer),) = hub.receive(1, part(1, 1))
    assert answer.error == "rank 0 did not form: errno 22"
    hub = SideChannelHub(2)
    assert hub.abort("") == []
    ((_, answer),) = hub.receive(1, part(1, 1))
    assert answer.error


@pytest.mark.parametrize(
    ("rounds", "rank", "message", "words"),
    [
        (0, 1, SideChannel(2, b"abcd"), "rank 1 came with round 2 to round 1"),
        (0, 1, SideChannel(1, b"abcde"), "rank 1 sent 5 bytes in round 1 of {channel}, rank 0 sent 4; they"),
        (0, 1, SideChannel(1, b""), "rank 1 sent 0 bytes in round 1 of {channel}, rank 0 sent 4; they"),
        (1, 1, SideChannel(1, b"abcd"), "rank 1 came with round 1 to round 2"),
        (0, 0, SideChannel(1, b"abcd"), "rank 0 came twice to round 1"),
    ],
)
def test_a_rank_with_other_settings_ends_it_for_all(
    rounds: int, rank: int, message: SideChannel, words: str
) -> None:
    hub = SideChannelHub(3)
    for number in range(1, rounds + 1):
        go_round(hub, range(3), number)
    hub.receive(0, SideChannel(rounds + 1, b"abcd"))
    answers, words = hub.receive(rank, message), words.format(channel="JACCL's side channel")
    told = [0, 1, 2] if rounds else sorted({0, rank})
    assert [each for each, _ in answers] == told
    assert all(answer.error.startswith(words) and not answer.data for _, answer in answers)
    assert hub.error.startswith(words)
    assert [each for each, _ in hub.receive(2, SideChannel(rounds + 1, b"abcd"))] == [2][: 2 not in told]


def test_more_rounds_than_anybody_needs() -> None:
    hub = SideChannelHub(2)
    for number in range(1, MAX_ROUNDS + 1):
        assert len(go_round(hub, range(2), number)) == 2
    assert hub.abort("enough")[0][1].round == MAX_ROUNDS


def test_the_middle_gives_up_before_the_ranks_do() -> None:
    """So what they report names who was missing."""
    waits = next(f.default for f in Bootstrap.__dataclass_fields__.values() if f.name == "round_s")
    assert waits > SideChannelHub.ROUND_S
