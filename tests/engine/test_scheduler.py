"""The scheduler's decisions: as stories, and as rules that hold for any course of events."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxtp.engine.scheduler import Decode, End, Move, Prefill, Stop

from .simulation import EOS, Simulation


def sketch(moves: list[Move]) -> str:
    """`P1 D1 D12 S1`: prefill of 1, decode of 1, of 1 and 2, stop of 1."""
    return " ".join(
        "D" + "".join(map(str, m.rows)) if isinstance(m, Decode) else f"{type(m).__name__[0]}{m.uid}"
        for m in moves
    )


# --- stories ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_n_tokens_take_one_prefill_and_n_minus_1_steps(n: int, run_ahead: int) -> None:
    simulation = Simulation(run_ahead=run_ahead)
    request = simulation.add(max_tokens=n)
    simulation.drain()
    assert sketch(simulation.moves) == " ".join(["P1"] + ["D1"] * (n - 1) + ["S1"])
    assert request.indices == list(range(n))
    assert request.ends == [End(1, "length", n, n)]


def test_an_end_token_in_lockstep_costs_no_further_step() -> None:
    simulation = Simulation(run_ahead=0)
    request = simulation.add(max_tokens=9, says=(7, 8, EOS))
    simulation.drain()
    assert sketch(simulation.moves) == "P1 D1 D1 S1"
    assert request.tokens == [7, 8]
    assert request.ends == [End(1, "stop", 3, 3)]


def test_running_ahead_the_step_after_an_end_token_is_thrown_away() -> None:
    simulation = Simulation(run_ahead=1)
    request = simulation.add(max_tokens=9, says=(7, 8, EOS))
    simulation.drain()
    assert sketch(simulation.moves) == "P1 D1 D1 D1 S1"
    assert request.tokens == [7, 8]
    assert request.ends == [End(1, "stop", 3, 4)]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_the_end_token_as_the_first_word(run_ahead: int) -> None:
    simulation = Simulation(run_ahead=run_ahead)
    request = simulation.add(says=(EOS,))
    simulation.drain()
    assert request.tokens == []
    assert [(end.reason, end.generated) for end in request.ends] == [("stop", 1)]
    assert sketch(simulation.moves) == "P1 " + "D1 " * run_ahead + "S1"


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_the_end_token_exactly_at_the_limit_is_an_end_not_a_cut(run_ahead: int) -> None:
    simulation = Simulation(run_ahead=run_ahead)
    request = simulation.add(max_tokens=3, says=(7, 8, EOS))
    simulation.drain()
    assert sketch(simulation.moves) == "P1 D1 D1 S1"
    assert request.tokens == [7, 8]
    assert request.ends == [End(1, "stop", 3, 3)]


def test_a_long_prompt_goes_in_chunks_that_join_up() -> None:
    simulation = Simulation(prefill_chunk=4)
    request = simulation.add(prompt=10, max_tokens=1)
    simulation.drain()
    chunks = [m for m in simulation.moves if isinstance(m, Prefill)]
    assert [(c.offset, len(c.tokens), c.total, c.last) for c in chunks] == [
        (0, 4, 10, False),
        (4, 4, 10, False),
        (8, 2, 10, True),
    ]
    assert tuple(token for c in chunks for token in c.tokens) == request.prompt


def test_others_decode_between_the_chunks_of_a_long_prompt() -> None:
    simulation = Simulation(prefill_chunk=4)
    simulation.add(prompt=3, max_tokens=20)
    simulation.tick()
    simulation.tick()
    simulation.add(prompt=12, max_tokens=2)
    simulation.moves.clear()
    for _ in range(8):
        simulation.tick()
    assert sketch(simulation.moves) == "P2 D1 P2 D1 P2 D12 S2 D1"


def test_short_prompts_share_the_budget_of_one_chunk() -> None:
    simulation = Simulation(prefill_chunk=6)
    for _ in range(5):
        simulation.add(prompt=3, max_tokens=20)
    for _ in range(8):
        simulation.tick()
    assert sketch(simulation.moves) == "P1 P2 D12 P3 P4 D1234 P5 D12345"


def test_first_come_first_served() -> None:
    simulation = Simulation(prefill_chunk=4)
    simulation.add(prompt=9, max_tokens=9)
    simulation.add(prompt=1, max_tokens=9)
    simulation.add(prompt=2, max_tokens=9)
    simulation.drain()
    firsts = [m.uid for m in simulation.moves if isinstance(m, Prefill) and m.offset == 0]
    assert firsts == [1, 2, 3]


def test_a_full_batch_makes_others_wait() -> None:
    simulation = Simulation(max_rows=2)
    for _ in range(3):
        simulation.add(prompt=1, max_tokens=3)
    simulation.drain()
    assert sketch(simulation.moves) == "P1 P2 D12 D12 S1 S2 P3 D3 D3 S3"


def test_whoever_is_over_leaves_before_anybody_moves_on() -> None:
    simulation = Simulation(run_ahead=0)
    simulation.add(prompt=1, max_tokens=9, says=(7, EOS))
    simulation.add(prompt=1, max_tokens=4)
    simulation.add(prompt=1, max_tokens=4)
    simulation.drain()
    assert sketch(simulation.moves) == "P1 P2 P3 D123 S1 D23 D23 S2 S3"


# --- cancelling -------------------------------------------------------------------------------------------


def test_cancel_while_waiting_leaves_no_trace() -> None:
    simulation = Simulation()
    simulation.add()
    assert simulation.cancel(1) == End(1, "cancel", 0, 0)
    simulation.drain()
    assert simulation.moves == []
    assert len(simulation.scheduler) == 0


def test_cancel_between_two_chunks() -> None:
    simulation = Simulation(prefill_chunk=4)
    simulation.add(prompt=12)
    simulation.tick()
    simulation.tick()
    assert simulation.cancel(1) == End(1, "cancel", 0, 2)
    simulation.drain()
    assert sketch(simulation.moves) == "P1 P1 S1"


def test_cancel_while_decoding_throws_away_what_is_on_its_way() -> None:
    simulation = Simulation()
    request = simulation.add(max_tokens=20)
    for _ in range(4):
        simulation.tick()
    assert simulation.cancel(1) == End(1, "cancel", 3, 4)
    simulation.drain()
    assert sketch(simulation.moves) == "P1 D1 D1 D1 S1"
    assert request.indices == [0, 1, 2]


def test_cancel_after_the_last_forward_but_before_its_token() -> None:
    simulation = Simulation()
    request = simulation.add(max_tokens=2)
    simulation.tick()
    simulation.tick()
    assert len(request.tokens) == 1
    end = simulation.cancel(1)
    assert end is not None
    assert end.reason == "cancel"
    simulation.drain()
    assert sketch(simulation.moves) == "P1 D1 S1"
    assert request.indices == [0]
    assert len(request.ends) == 1


def test_cancel_after_the_end_is_nothing() -> None:
    simulation = Simulation()
    request = simulation.add(max_tokens=2)
    simulation.drain()
    assert simulation.cancel(1) is None
    assert simulation.cancel(99) is None
    assert [end.reason for end in request.ends] == ["length"]


def test_cancelling_one_leaves_the_others_as_they_are() -> None:
    simulation = Simulation()
    simulation.add(prompt=1, max_tokens=20)
    staying = simulation.add(prompt=1, max_tokens=6)
    for _ in range(4):
        simulation.tick()
    simulation.cancel(1)
    simulation.drain()
    assert (tuple(staying.tokens), staying.ends[0].reason) == staying.expected


def test_nothing_to_do_is_none() -> None:
    assert Simulation().scheduler.next() is None


# --- rules ------------------------------------------------------------------------------------------------

answers = st.one_of(st.just(()), st.lists(st.integers(2, 60), max_size=6).map(lambda tokens: (*tokens, EOS)))
admissions = st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 12), answers)
cancels = st.tuples(st.just("cancel"), st.integers(1, 12))
courses = st.lists(st.one_of(admissions, cancels, st.just(("tick",)), st.just(("tick",))), max_size=60)
set_ups = st.fixed_dictionaries(
    {"prefill_chunk": st.integers(1, 12), "max_rows": st.integers(1, 5), "run_ahead": st.integers(0, 1)}
)

Course = list[tuple[Any, ...]]
STORM: Course = [("add", 7, 9, (4, EOS)), ("add", 1, 1, ()), ("tick",), ("add", 30, 12, ()), ("cancel", 1)]


def play(set_up: dict[str, int], course: Course) -> Simulation:
    simulation = Simulation(**set_up)
    for event in course:
        match event:
            case ("add", prompt, max_tokens, says):
                simulation.add(prompt, max_tokens, says)
            case ("cancel", uid):
                simulation.cancel(uid)
            case _:
                simulation.tick()
    simulation.drain()
    return simulation


@given(set_ups, courses)
@example({"prefill_chunk": 3, "max_rows": 1, "run_ahead": 1}, STORM)
def test_every_sequence_gets_its_own_answer_and_ends_exactly_once(
    set_up: dict[str, int], course: Course
) -> None:
    simulation = play(set_up, course)
    for request in simulation.requests.values():
        tokens, reason = request.expected
        assert len(request.ends) == 1
        assert request.indices == list(range(len(request.tokens)))
        if request.cancelled:
            assert request.ends[0].reason == "cancel"
            assert tuple(request.tokens) == tokens[: len(request.tokens)]
        else:
            assert (tuple(request.tokens), request.ends[0].reason) == (tokens, reason)
            assert request.ends[0].generated == len(tokens) + (reason == "stop")
    assert len(simulation.scheduler) == 0
    assert simulation.must_stop == set()


@given(set_ups, courses)
@example({"prefill_chunk": 3, "max_rows": 2, "run_ahead": 1}, STORM)
def test_every_sequence_prefills_whole_then_decodes_then_stops_once(
    set_up: dict[str, int], course: Course
) -> None:
    simulation = play(set_up, course)
    for uid, request in simulation.requests.items():
        moves = simulation.moves_of(uid)
        kinds = [kind for kind, _ in groupby(map(type, moves))]
        assert kinds in ([], [Prefill, Stop], [Prefill, Decode, Stop])
        chunks = [m for m in moves if isinstance(m, Prefill)]
        assert all(0 < len(c.tokens) <= set_up["prefill_chunk"] for c in chunks)
        read = tuple(token for c in chunks for token in c.tokens)
        assert read == request.prompt[: len(read)]
        if Decode in kinds or not request.cancelled:
            assert chunks[-1].last
        stops = [m for m in moves if isinstance(m, Stop)]
        assert len(stops) == bool(moves)
        if stops:
            assert stops[0].forwards == simulation.forwards_of(uid)
        if not request.cancelled:
            assert request.ends[0].forwards == simulation.forwards_of(uid)
            least = len(chunks) + request.ends[0].generated - 1
            most = least + (set_up["run_ahead"] if request.ends[0].reason == "stop" else 0)
            assert least <= simulation.forwards_of(uid) <= most


@given(set_ups, courses)
@example({"prefill_chunk": 2, "max_rows": 3, "run_ahead": 0}, STORM)
def test_prompts_go_first_come_first_served_and_never_hold_the_others_up(
    set_up: dict[str, int], course: Course
) -> None:
    simulation = play(set_up, course)
    firsts = [m.uid for m in simulation.moves if isinstance(m, Prefill) and m.offset == 0]
    assert firsts == sorted(firsts)
    running: set[int] = set()
    since_decode = 0
    unfinished = None
    for move in simulation.moves:
        match move:
            case Prefill():
                assert unfinished in (None, move.uid)
                since_decode = since_decode + len(move.tokens) if running else len(move.tokens)
                assert since_decode <= set_up["prefill_chunk"]
                unfinished = None if move.last else move.uid
                if move.last:
                    running.add(move.uid)
            case Decode():
                since_decode = 0
                assert len(set(move.rows)) == len(move.rows) <= set_up["max_rows"]
                # Nobody who runs is left out, but for those who have all the forwards they need.
                assert set(move.rows) <= running
            case Stop():
                running.discard(move.uid)
                if unfinished == move.uid:
                    unfinished = None


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=8))
def test_the_same_calls_give_the_same_moves(chunk: int, requests: list[tuple[int, int]]) -> None:
    def run() -> list[Move]:
        simulation = Simulation(prefill_chunk=chunk)
        for prompt, max_tokens in requests:
            simulation.add(prompt, max_tokens)
            simulation.tick()
        simulation.drain()
        return simulation.moves

    assert run() == run()
