"""The scheduler's decisions: as stories, and as rules that hold for any course of events."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxtp.engine.disk_index import MAX_FETCHES
from mlxtp.engine.kv_cache import Hit, PrefixCache, capacity
from mlxtp.engine.scheduler import MAX_PREFILLING, Scheduler
from mlxtp.engine.sequence import MOST_OVERTAKING, Lanes, SequenceState
from mlxtp.engine.steps import DecodeFrame, Policy, SampledToken
from mlxtp.errors import Code, MlxtpError
from mlxtp.wire.messages import (
    MAX_PROMPTS,
    MAX_WIDTH,
    RESTS,
    Arrange,
    Evict,
    Finished,
    Forward,
    Generate,
    Restore,
    Sampling,
    SessionStop,
    Shaping,
    digests_in,
)

from ..wire.forwards import is_step, reads_prompts
from .simulation import EOS, Disk, FakeGuide, Request, Simulation, next_frame
from .tables import cases, refused

pytestmark = pytest.mark.fault

RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])
LONG = tuple(range(100, 300))
"""A beginning that prompts share."""


def sketch(moves: list[DecodeFrame]) -> str:
    """`P1 P(23) D123 S1 X1`: prefills of 1, of 2 and 3 together; a step; a stop of 1, its cache dropped.

    `T`: memory is given back.
    """
    words = []
    for move in moves:
        match move:
            case SessionStop():
                words.append(f"S{move.uid}")
            case Forward():
                rows = "".join(map(str, move.rows))
                words.append(
                    f"{'P' if move.prompts else 'D'}{f'({rows})' if len(move.prompts) > 1 else rows}"
                )
            case Evict():
                words.append("X" + "".join(map(str, move.uids)))
            case Arrange(trim=True):
                words.append("T")
    return " ".join(words)


def reasons(moves: list[DecodeFrame]) -> list[str]:
    return [move.reason for move in moves if isinstance(move, SessionStop)]


def decodes(moves: list[DecodeFrame]) -> list[Forward]:
    return [move for move in moves if is_step(move)]


def widths(moves: list[DecodeFrame]) -> list[int]:
    return [max(move.widths, default=1) for move in decodes(moves)]


def check_answer(request: Request) -> None:
    """It got all of its own tokens, one after the other, and ended once."""
    tokens, reason = request.expected
    assert (tuple(request.tokens), [end.reason for end in request.ends]) == (tokens, [reason])
    assert request.indices == list(range(len(tokens)))
    assert request.ends[0].generated == len(tokens) + (reason == "stop")
    assert request.read == (len(request.prompt) if request.scored_prompt else 1)


def check_answers(simulation: Simulation) -> None:
    """Of all that were neither cancelled nor refused."""
    for uid, request in simulation.requests.items():
        if not request.cancelled and not request.failures:
            check_answer(request)
            assert request.ends[0].forwards == simulation.forwards_of(uid)


def finish(simulation: Simulation) -> Simulation:
    simulation.drain()
    check_answers(simulation)
    return simulation


def asked(
    set_up: Mapping[str, Any], *what: Any, others: Sequence[tuple[Any, ...]] = (), **wants: Any
) -> tuple[Simulation, Request]:
    """A request, beside others that come after it, from its beginning to its end."""
    simulation = Simulation(**set_up)
    request = simulation.add(*what, **wants)
    for other in others:
        simulation.add(*other)
    simulation.drain()
    return simulation, request


def chunks_of(simulation: Simulation, request: int) -> list[Any]:
    return [chunk for chunk in simulation.prefills() if chunk.request == request]


def played(course: str, **set_up: Any) -> Simulation:
    """`3+20 t2 2x12+1b c1 | end`: a prompt of 3 tokens for 20 new ones, two turns of the loop, two prompts of
    12 for 1, of a batch, the first one's cancel; what comes then counts, until nothing is left to do.
    """
    simulation = Simulation(**set_up)
    for word in course.split():
        if word == "end":
            finish(simulation)
        elif word == "|":
            simulation.frames.clear()
        elif word[0] in "tc":
            (simulation.ticks if word[0] == "t" else simulation.cancel)(int(word[1:]))
        else:
            times, _, sizes = word.rpartition("x")
            for _ in range(int(times or 1)):
                simulation.add(*map(int, sizes.removesuffix("b").split("+")), batch=sizes[-1] == "b")
    return simulation


MOVES = """
others decode between the chunks of a long prompt
  prefill_chunk=4; 3+20 t2 12+2 | t8; P2 D1 P2 D1 P2 D12 S2 D1
beside others chunks are smaller
  prefill_chunk=8 chunk_beside=2; 3+9 t2 5+9 | t6; P2 D1 P2 D1 P2 D12
short prompts share the budget of one chunk
  prefill_chunk=6; 5x3+20 t8; P1 P2 D12 P3 P4 D1234 P5 D12345
short prompts are computed together
  prefill_chunk=16 together=16; 3+4 5+4 4+4 2+4 9+4 end; P(123) ...
what prompts took beside rows limits none that come alone
  prefill_chunk=16 together=16; 16+1 end 2x5+1 end; P1 S1 P(23) S2 S3
prompts of one token answer together
  together=64; 3x2+1 end; P(123) S1 S2 S3
caches that share no arrays are filled together, too
  together=64 rolls_back=0; 3x2+1 end; P(123) S1 S2 S3
prompts whose caches cannot be cut stop together before their last tokens
  together=256 whole=1; 3x40+1 end; P(123) P(123) S1 ...
short ones join those that lack one token
  together=256 whole=1; 2x40+1 2x3+1 end; P(12) P(1256) S1 ...
one that lacks its last token does not wait for other prompts
  prefill_chunk=64 whole=1; 3x60+1 end; P1 P1 S1 P3 P3 ...
long prompts take turns
  prefill_chunk=4; 3x12+1 end; P1 P2 P3 P1 P2 P3 P1 S1 P2 S2 P3 S3
a short prompt passes a long one
  prefill_chunk=4; 100+1 2+1 t3; P1 P2 S2
a full batch makes others wait
  max_rows=2; 3x1+3 end; P1 P2 D12 D12 S1 S2 P3 D3 D3 S3
the oldest kept cache makes room for a new one
  prefixes=1 kv_tokens=512; 100+2 end 100+2 end 100+2 end 100+2 end; P1 D1 S1 P2 D2 S2 P3 D3 S3 X1 P4 D4 S4 X2
prompts that do not fit beside each other come one by one
  kv_tokens=256 prefill_chunk=80; 3x150+3 end; P1 P1 D1 D1 S1 P2 P2 D2 D2 S2 P3 P3 D3 D3 S3
each row needs room for its own length: 352 and 96 with a wide step
  kv_tokens=448; 257+10 20+10 end; P1 P2 D12 ...
one position less is no room for both
  kv_tokens=447; 257+10 20+10 end; P1 D1 D1 ...
""".strip().splitlines()


@cases("of", dict(zip(MOVES[::2], MOVES[1::2], strict=True)))
def test_moves(of: str) -> None:
    set_up, course, moves = of.strip().split("; ")
    settings_ = {name: int(value) for name, _, value in (each.partition("=") for each in set_up.split())}
    found = sketch(played(course, **settings_).frames)
    assert found.startswith(moves.removesuffix("...")) if moves.endswith("...") else found == moves


@RUN_AHEAD
@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_n_tokens_take_one_prefill_and_n_minus_1_steps(n: int, run_ahead: int) -> None:
    simulation, request = asked({"run_ahead": run_ahead}, 3, n)
    assert sketch(simulation.frames) == " ".join(["P1"] + ["D1"] * (n - 1) + ["S1"])
    assert request.indices == list(range(n))
    assert request.ends == [Finished(1, "length", n, n)]


def _stop(generated: int, forwards: int, token: int) -> Finished:
    return Finished(1, "stop", generated, forwards, ended_by=token)


@cases(
    "says, limit, run_ahead, moves, forwards",
    {
        "costs no further step in lockstep": ((7, 8, EOS), 9, 0, "P1 D1 D1 S1", 3),
        "throws away a step that ran ahead": ((7, 8, EOS), 9, 1, "P1 D1 D1 D1 S1", 4),
        "may be the first word": ((EOS,), 9, 0, "P1 S1", 1),
        "may be the first word, running ahead": ((EOS,), 9, 1, "P1 D1 S1", 2),
        "is no cut exactly at the limit": ((7, 8, EOS), 3, 0, "P1 D1 D1 S1", 3),
        "is no cut at the limit, running ahead": ((7, 8, EOS), 3, 1, "P1 D1 D1 S1", 3),
    },
)
def test_an_end_token(says: tuple[int, ...], limit: int, run_ahead: int, moves: str, forwards: int) -> None:
    simulation, request = asked({"run_ahead": run_ahead}, 3, limit, says)
    assert sketch(simulation.frames) == moves
    assert (request.tokens, request.ends) == ([*says[:-1]], [_stop(len(says), forwards, EOS)])


@cases(
    "wants, says, moves, end",
    {
        "ends it": ({}, (7, 8, 9, 8), "P1 D1 S1", (2, 2, 8)),
        "ends it where end tokens do not": ({"ignore_eos": True}, (EOS, 8, 7), "P1 D1 S1", (2, 2, 8)),
        "is not waited for by an end token": ({}, (EOS, 8), "P1 S1", (1, 1, EOS)),
    },
)
def test_a_stop_token(wants: dict[str, Any], says: tuple[int, ...], moves: str, end: tuple[int, ...]) -> None:
    scheduler = Scheduler(Policy(frozenset({EOS})))
    scheduler.add(Generate(1, (5, 6, 7), 9, stop_tokens=(3, 8), **wants))
    results: list[Any] = []
    frames = []
    for token in says:
        frames.append(next_frame(scheduler))
        results += scheduler.record((token,))
        if isinstance(results[-1], Finished):
            break
    frames.append(next_frame(scheduler))
    assert sketch(frames) == moves
    assert [each.token for each in results[:-1]] == [*says[: end[0] - 1]]
    assert results[-1] == _stop(*end)


def test_an_answer_that_an_earlier_group_began_goes_on_with_its_next_number() -> None:
    scheduler = Scheduler(Policy(frozenset()))
    scheduler.add(Generate(1, (5, 6, 7, 8), 3, answered=2))
    assert reads_prompts(frame := next_frame(scheduler))
    assert (frame.tokens, frame.unfinished) == ((5, 6, 7, 8), False)
    assert scheduler.record((9,)) == [SampledToken(1, 2, 9), Finished(1, "length", 3, 1)]


def test_a_prompt_with_scores_starts_from_no_cache_and_in_smaller_chunks() -> None:
    simulation = Simulation(prefixes=True, prefill_chunk=2048, chunk_beside=2048)
    prompt = tuple(range(1000, 1600))
    for scored in (False, True, False):
        simulation.add(prompt, 1, scored_prompt=scored)
        simulation.drain()
    sizes = {
        uid: [(chunk.offset, len(chunk.tokens)) for chunk in chunks_of(simulation, uid)] for uid in (1, 2, 3)
    }
    assert sizes == {1: [(0, 600)], 2: [(0, 256), (256, 256), (512, 88)], 3: [(599, 1)]}
    check_answers(simulation)


GREEDY: dict[str, Any] = {}
WARM, SHAPED = {"sampling": Sampling(0.7)}, {"shaping": Shaping(presence_penalty=1.0)}
GUIDED, SCORED = {"guide": FakeGuide((5,) * 9)}, {"logprobs": 0}
OWN = ((), "verify")


def checked(*uids: int) -> tuple[tuple[int, ...], str]:
    return uids, "verify"


def told(*uids: int) -> tuple[tuple[int, ...], str]:
    return uids, "broadcast"


@cases(
    "wants, agreement, expected",
    {
        "greedy rows exchange winners and check each other": ([GREEDY], "auto", [OWN] * 2),
        "a row that draws brings its own logits to all": (
            [GREEDY, WARM],
            "auto",
            [OWN, checked(2), checked(2)],
        ),
        "and so does one with scores": ([SCORED, GREEDY], "auto", [checked(1), OWN, checked(1)]),
        "and each of several": ([WARM, GREEDY, SCORED], "auto", [checked(1), OWN, checked(3), checked(1, 3)]),
        "what rank 0 alone can choose it says to all": ([GREEDY, SHAPED], "auto", [OWN, told(2), told(2)]),
        "as for a grammar": ([GREEDY, GUIDED], "auto", [OWN, told(2), told(2)]),
        "and what is drawn beside it": (
            [WARM, GREEDY, SHAPED],
            "auto",
            [checked(1), OWN, told(3), told(1, 3)],
        ),
        "ordered": ([GREEDY, GREEDY], "broadcast", [told(1), told(2), told(1, 2)]),
        "ordered, where rank 0 alone can choose": ([SHAPED], "verify", [told(1)] * 2),
        "ordered for draws, which greedy rows have not": ([GREEDY], "broadcast-draws", [OWN] * 2),
        "ordered for draws": ([WARM, GREEDY], "broadcast-draws", [told(1), OWN, told(1)]),
    },
)
def test_exchange_and_agreement_of_rows_that_run_together(
    wants: Sequence[dict[str, Any]], agreement: Any, expected: list[tuple[tuple[int, ...], str]]
) -> None:
    scheduler = Scheduler(Policy(frozenset(), together=0, agreement=agreement))
    for uid, want in enumerate(wants, 1):
        fields = {name: value for name, value in want.items() if name != "guide"}
        scheduler.add(Generate(uid, (5,), 9, **fields), want.get("guide"))
    moves = []
    for _ in range(len(wants) + 1):
        moves.append(next_frame(scheduler))
        if reads_prompts(moves[-1]):
            scheduler.record((5,))
    assert is_step(moves[-1])
    assert [(move.gathered, move.agreement) for move in moves if isinstance(move, Forward)] == expected


def test_a_newcomer_waits_no_longer_than_the_others() -> None:
    simulation = played("3+9 50+9 t4", prefill_chunk=100, chunk_beside=4)
    assert sketch(simulation.frames) == "P1 P2 D1 P2"
    assert [len(chunk.tokens) for chunk in simulation.prefills()] == [3, 4, 4]


def test_chunks_of_a_long_prompt_shrink_where_attention_holds_their_scores() -> None:
    chunks = played("12000+1 9000+1 end", prefill_chunk=2048, scores=1 << 20).prefills()
    assert all(len(c.tokens) * (c.offset + len(c.tokens)) <= 1 << 20 for c in chunks)
    assert {len(c.tokens) for c in chunks if not c.last} == {1024, 512, 256, 128, 64}


def test_costs_of_drafts_are_those_of_the_longest_row() -> None:
    simulation = played("40+9 5000+9 end")
    assert simulation.scheduler.speculation.choice.costs.context == 3


def test_a_prompt_of_one_chunk_waits_for_no_long_ones_however_many_are_being_read() -> None:
    simulation = played(f"{MAX_PREFILLING}x2000+3 t10 20+3 2000+3 t8", prefill_chunk=64, together=0)
    *_, short, another = simulation.requests.values()
    assert short.tokens
    assert not another.tokens
    assert len(simulation.ranks.prefilling) == MAX_PREFILLING


def beginnings(simulation: Simulation) -> list[int]:
    return [chunk.request for chunk in simulation.prefills() if chunk.offset == 0]


def line_up(
    simulation: Simulation, client: int, count: int, user: int = 0, tokens: int = 1, **wants: Any
) -> list[int]:
    wants |= {"client": client, "user": user}
    return [simulation.add(prompt=1, max_tokens=tokens, **wants).uid for _ in range(count)]


def in_turn(course: str) -> list[int]:
    """`8 7/1bx3 @2 c1-2`: requests of client 8, and of client 7's user 1 three for a batch; turns of the loop
    until two have begun; cancels. Returns the requests in the order of their beginnings, one at a time.
    """
    simulation = Simulation(max_rows=1)
    for word in course.split():
        if word[0] == "@":
            while len(beginnings(simulation)) < int(word[1:]):
                simulation.tick()
        elif word[0] == "c":
            for uid in numbers(word[1:]):
                simulation.cancel(uid)
        else:
            whose, _, count = word.partition("x")
            client, _, user = whose.removesuffix("b").partition("/")
            line_up(simulation, int(client), int(count or 1), int(user or 0), batch=whose[-1] == "b")
    simulation.drain()
    return beginnings(simulation)


def numbers(words: str) -> list[int]:
    ends = [word.partition("-") for word in words.split()]
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]


TURNS = """
clients take turns, each served in its order
  7x6 8x3 9; 1 7 10 2 8 3 9 4-6
users take those of their client alone, and one for each request gains nothing
  7/1x4 8x3 7/2x2 9/10 9/11 9/12 9/13; 1 5 10 8 6 11 2 7 12 9 13 3 4
a new user takes a turn of its client however busy other clients' users are
  8/1x9 @9 7/1x3 7/2 7/3; 1-9 10 13 14 11 12
and among batch requests
  8/1bx9 @9 7/1bx3 7/2b 7/3b; 1-9 10 13 14 11 12
a client with many requests is not starved by others that come again and again
  7x4 8 9 @3 8 9 @5 8 9 @7 8 9; 1 5 6 2 7 8 3 9 10 4 11 12
nor by batch requests of others
  7bx4 8b 9b @3 8b 9b @5 8b 9b @7 8b 9b; 1 5 6 2 7 8 3 9 10 4 11 12
what a client cancelled is not held against it
  8 @1 7x9 8x3 c2-10 7; 1 14 11-13
batch requests do not wait where no other does
  7 7bx5 8b; 1 2 7 3-6
they wait for interactive ones
  7 7bx5 8b 7x3; 1 8-10 2 7 3-6
but not for ever
  7 7bx5 8b 7x16; 1 8-14 2 15-22 7 23 3-6
users take turns in their class
  7/1 7/1b 7/1 7/1b 7/2b 7/2; 1 6 3 2 5 4
a user's turns count once they have begun
  7/1x5 @2 7/2x3; 1 2 6 3 7 4 8 5
those of batch requests, too
  7/1bx5 @2 7/2bx3; 1 2 6 3 7 4 8 5
turns of one class are none of the other
  7/1 @1 7/1bx3 7/2x4 @5 8b 7/2b; 1 5-8 2 9 10 3 4
a cancelled batch request takes its turn with it
  7bx3 8x24 @8 c1; 4-19 2 20-27 3
""".strip().splitlines()


@cases("of", dict(zip(TURNS[::2], TURNS[1::2], strict=True)))
def test_turns(of: str) -> None:
    course, turns = of.split(";")
    assert in_turn(course) == numbers(turns)


def test_a_batch_prompt_under_way_is_none_that_waits() -> None:
    simulation = Simulation(max_rows=3, prefill_chunk=1)
    simulation.add(100, 1, batch=True)
    simulation.ticks(2)
    line_up(simulation, 8, 5)
    simulation.ticks(20)
    assert beginnings(simulation) == [*range(1, 7)]
    line_up(simulation, 7, 1, batch=True)
    line_up(simulation, 8, 12)
    assert beginnings(finish(simulation))[6:] == [*range(8, 16), 7, *range(16, 20)]


@cases(
    "prompt, limit, ticks, came, forwards, moves",
    {
        "while it waits leaves no trace": (3, 5, 0, 0, 0, ""),
        "between two chunks": (12, 5, 2, 0, 2, "P1 P1 S1"),
        "while decoding throws away what is in flight": (3, 20, 4, 3, 4, "P1 D1 D1 D1 S1"),
        "after the last forward but before its token": (3, 2, 2, 1, 2, "P1 D1 S1"),
    },
)
def test_a_cancel(prompt: int, limit: int, ticks: int, came: int, forwards: int, moves: str) -> None:
    simulation = Simulation(prefill_chunk=4)
    request = simulation.add(prompt, limit)
    simulation.ticks(ticks)
    assert simulation.cancel(1) == Finished(1, "cancel", came, forwards)
    simulation.drain()
    assert (sketch(simulation.frames), request.indices) == (moves, list(range(came)))


VERSE = (11, 12, 13, 14, 15, 16, 17, 18)
NEW = tuple(range(2000, 2200))
"""Words that no prompt foretells."""


def verses(count: int, of: tuple[int, ...] = VERSE) -> tuple[int, ...]:
    """Verses that end unlike each other."""
    return tuple(token for verse in range(count) for token in (*of, 50 + verse))


class Parrot:
    """Proposes what it was told, and notes for how many rows it was asked."""

    def __init__(self, says: tuple[int, ...]) -> None:
        self._says = says
        self.asked: list[int] = []

    def propose(self, rows: Mapping[int, Sequence[int]], limit: int) -> dict[int, tuple[int, ...]]:
        self.asked.append(len(rows))
        return {row: self._says[len(tokens) - 3 :][:limit] for row, tokens in rows.items()}


@RUN_AHEAD
def test_right_drafts_save_forwards(run_ahead: int) -> None:
    simulation, request = asked({"drafts": True, "run_ahead": run_ahead}, VERSE * 3, 64, VERSE * 8)
    check_answer(request)
    (end,) = request.ends
    assert end.accepted == end.drafted > 40
    assert end.forwards == simulation.forwards_of(1) == 64 - end.accepted


@RUN_AHEAD
def test_wrong_drafts_cost_few_forwards_and_no_token(run_ahead: int) -> None:
    _, request = asked({"drafts": True, "run_ahead": run_ahead}, VERSE * 2, 80, verses(20, VERSE[:3]))
    check_answer(request)
    (end,) = request.ends
    assert end.drafted > end.accepted
    assert end.forwards == 80 - end.accepted


@RUN_AHEAD
def test_an_end_token_among_drafts_is_the_end(run_ahead: int) -> None:
    song = (*VERSE, EOS, 21, 22)
    _, request = asked({"drafts": True, "run_ahead": run_ahead}, song * 3, 64, song)
    check_answer(request)
    assert request.ends[0].forwards < len(VERSE)


def test_a_forced_end_token_is_the_end() -> None:
    says = (50, 51, EOS, 52)
    check_answer(asked({}, 3, 40, says, guide=FakeGuide(says, frozenset({1, 2, 3})))[1])


@pytest.mark.parametrize("guided", [False, True])
def test_drafts_whose_steps_cost_more_than_they_give_pause_where_time_may_decide(guided: bool) -> None:
    """Steps of a row with a grammar never run ahead, and yet are what its drafts have to beat."""
    says = verses(60)

    def accepted(*, timed: bool) -> int:
        set_up = {"drafts": True, "slow_when_wide": True, "timed": timed}
        _, request = asked(set_up, VERSE * 3, len(says), says, guide=FakeGuide(says) if guided else None)
        check_answer(request)
        return request.ends[0].accepted

    assert accepted(timed=True) < 0.6 * accepted(timed=False)


@pytest.mark.parametrize("drafts", [False, True])
def test_other_programs_that_slow_steps_are_no_loss_by_drafts(drafts: bool) -> None:
    simulation = Simulation(drafts=drafts, slow_when_wide=True)
    simulation.add(3, 200)
    while simulation.tick() is not None:
        simulation.pause(9.0 * (len(simulation.frames) % 7 == 0))
    assert simulation.scheduler.speculation.use.figures()["draft_gain"] == pytest.approx(1.0)


@pytest.mark.parametrize("timed", [False, True])
def test_no_step_has_drafts_of_a_length_without_a_kernel(timed: bool) -> None:
    says = verses(40)

    def lengths(unfused: range) -> set[int]:
        simulation, request = asked(
            {"drafts": True, "timed": timed, "unfused": unfused}, VERSE * 3, len(says), says
        )
        check_answer(request)
        return {width - 1 for width in widths(simulation.frames)}

    assert lengths(range(0)) & set(range(3, 8))
    found = lengths(range(3, 8))
    assert not found & set(range(3, 8))
    assert max(found) > 1


def test_what_only_rank_0_can_choose_is_drafted() -> None:
    scheduler = Scheduler(Policy(frozenset()))
    scheduler.add(Generate(1, VERSE * 3, 20, shaping=Shaping(frequency_penalty=0.5)))
    scheduler.next()
    scheduler.record((VERSE[0],))
    assert is_step(step := next_frame(scheduler))
    assert (step.agreement, step.tokens[:3]) == ("broadcast", VERSE[:3])


@RUN_AHEAD
@pytest.mark.parametrize("others", [0, 1])
def test_drafts_of_a_guided_row_end_where_its_grammar_forbids_or_forces(run_ahead: int, others: int) -> None:
    says = verses(20)
    guide = FakeGuide(says, frozenset(range(12, 160, 9)), ends=150)
    set_up, beside = {"drafts": True, "run_ahead": run_ahead}, [(3, 160)] * others
    _, request = asked(set_up, VERSE * 2, 160, says, guide=guide, others=beside)
    assert tuple(request.tokens) == says[:150]
    (end,) = request.ends
    assert end.accepted == end.drafted > 30, "wrong ones were not even fed"


@pytest.mark.parametrize("most", [1, 0])
def test_drafts_that_a_grammar_refuses_are_soon_left_alone(most: int) -> None:
    """And near the end of its budget there are none, so that none counts as wrong."""
    drafter, guide = Parrot((7,) * 200), FakeGuide(NEW)
    guide.most_drafted = most
    _, request = asked({"drafts": True, "drafter": drafter}, 3, 200, NEW, guide=guide)
    check_answer(request)
    assert request.ends[0].drafted == 0
    assert len(drafter.asked) < 40 * most + 1


@pytest.mark.parametrize(("mode", "first"), [("auto", 1), ("mtp", 1), ("lookup", 0), ("off", 0)])
def test_a_prompt_s_end_asks_the_mtp_head_for_the_first_draft(mode: Any, first: int) -> None:
    scheduler = Scheduler(Policy(frozenset(), drafts=mode, mtp=3, prefill_chunk=4))
    scheduler.add(Generate(1, tuple(range(50, 56)), 20))
    assert reads_prompts(chunk := scheduler.next())
    assert reads_prompts(last := scheduler.next())
    assert (chunk.drafts, last.drafts) == (0, first)
    scheduler.record(())
    scheduler.record((7,), proposed=[(8,)] if first else ())
    assert is_step(step := next_frame(scheduler))
    assert step.tokens == ((7, 8) if first else ())
    for uid in (2, 3):
        scheduler.add(Generate(uid, (uid, 60), 20))
    assert reads_prompts(group := scheduler.next())
    assert (group.rows, group.drafts) == ((2, 3), first)


def test_a_useless_head_rests_until_another_request_is_due_to_try_it() -> None:
    scheduler = Scheduler(Policy(frozenset(), drafts="mtp", mtp=3, run_ahead=0))
    asked: list[int] = []

    def answer(request: int, count: int) -> None:
        scheduler.add(Generate(request, (7, 8, 9), count))
        while scheduler:
            if is_step(move := scheduler.next()):
                asked.append(move.drafts)
                width = sum(move.widths) or 1
                scheduler.record((50,) * width, proposed=[(60,) * move.drafts] if move.drafts > 0 else ())
            elif reads_prompts(move):
                asked.append(move.drafts)
                scheduler.record((50,), proposed=[(60,)] if move.drafts else ())

    answer(1, 1500)
    first = asked.index(RESTS)
    assert 50 < first < 600, "after a few trials"
    assert set(asked[first:]) == {RESTS, 0}, "this row lacks entries from then on"
    asked.clear()
    answer(2, 100)
    assert asked[0] == 1, "another row has them"
    assert RESTS in asked


@RUN_AHEAD
@pytest.mark.parametrize("others", [0, 5])
def test_a_drafter_proposes_for_all_rows_together(run_ahead: int, others: int) -> None:
    """Where a lookup finds nothing."""
    set_up = {"drafts": True, "drafter": (drafter := Parrot(NEW)), "run_ahead": run_ahead}
    simulation, _ = asked(set_up, 3, 40, NEW, others=[(3, 40, NEW)] * others)
    check_answers(simulation)
    assert all(request.ends[0].accepted > 10 for request in simulation.requests.values())
    assert drafter.asked.count(1 + others) > len(drafter.asked) / 2


def test_a_drafter_that_is_always_wrong_is_soon_left_alone() -> None:
    simulation, request = asked({"drafts": True, "drafter": Parrot((7,) * 200)}, 3, 200, NEW)
    check_answer(request)
    assert request.ends[0].forwards == 200
    assert sum(width > 1 for width in widths(simulation.frames)) < 30


WORDS = tuple(range(50, 70))


@pytest.mark.parametrize(("others", "run_ahead", "more"), [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 3)])
def test_forwards_that_forced_tokens_cost(others: int, run_ahead: int, more: int) -> None:
    """None of their own. Running ahead beside others, one each time, and one for the end."""
    guide = FakeGuide(WORDS, frozenset(range(3, 8)) | {10}, ends=20)
    _, request = asked({"run_ahead": run_ahead}, 3, 40, WORDS, guide=guide, others=[(3, 40)] * others)
    assert tuple(request.tokens) == WORDS
    assert request.ends == [Finished(1, "stop", 20, 20 - 6 + more)]


def test_a_guided_row_runs_ahead_beside_others_and_chooses_late() -> None:
    simulation = Simulation()
    simulation.add(3, 20, WORDS, guide=FakeGuide(WORDS))
    simulation.add(3, 20)
    for _ in range(5):
        assert simulation.tick() is not None, "no step waits for the tokens of the one before"
    # The second prefill ran while the first one's token was booked.
    assert simulation.late == [False, True, True]
    finish(simulation)


@pytest.mark.parametrize(("others", "widest"), [(0, 16), (1, 8), (3, 4), (7, 2), (15, 1)])
def test_forced_tokens_make_no_step_wider_than_drafts_may(others: int, widest: int) -> None:
    """All rows are padded to the widest."""
    says = tuple(range(50, 100))
    simulation = Simulation(run_ahead=0, draft_room=16)
    for _ in range(others):
        simulation.add(3, 60)
    simulation.add(3, 40, says, guide=FakeGuide(says, frozenset(range(1, 40))))
    steps = [move for move in decodes(finish(simulation).frames) if len(move.rows) == others + 1]
    assert max(max(move.widths, default=1) for move in steps) == widest


@pytest.mark.parametrize("run", [10, 30])
def test_forced_tokens_that_cost_more_than_they_save_are_fed_one_at_a_time(run: int) -> None:
    says = tuple(range(50, 2050))
    forced = frozenset(each for each in range(2000) if each % run > 1)

    def cost(*, timed: bool) -> int:
        set_up = {"run_ahead": 0, "slow_when_wide": True, "timed": timed}
        simulation, request = asked(set_up, 3, 2000, says, guide=FakeGuide(says, forced))
        check_answer(request)
        return sum(width**2 for width in widths(simulation.frames))

    assert cost(timed=True) * 1.4 < cost(timed=False)


@pytest.mark.parametrize("says", [WORDS, (*WORDS, EOS)])
@pytest.mark.parametrize(("cuts", "reason"), [(18, "length"), (21, "stop")])
def test_an_answer_that_its_guide_cut_ends_for_its_length(
    says: tuple[int, ...], cuts: int, reason: str
) -> None:
    ends = -1 if EOS in says else len(says)
    _, request = asked({}, 3, 40, says, guide=FakeGuide(says, ends=ends, cuts=cuts))
    assert tuple(request.tokens) == WORDS
    assert [end.reason for end in request.ends] == [reason]


def test_a_scored_row_is_forced_nothing() -> None:
    guide = FakeGuide(WORDS, frozenset(range(1, 6)))
    _, request = asked({}, 3, 10, WORDS, guide=guide, scored=True)
    check_answer(request)
    assert request.ends[0].forwards == 10


@RUN_AHEAD
def test_a_grammar_without_a_way_on_fails_its_request_alone(run_ahead: int) -> None:
    guide = FakeGuide(WORDS, fails=4)
    simulation, failing = asked({"run_ahead": run_ahead}, 3, 20, WORDS, guide=guide, others=[(3, 20)])
    assert [failure.code for failure in failing.failures] == [Code.BAD_REQUEST]
    assert failing.indices == list(range(4))  # a token that is refused never leaves
    assert not failing.ends
    check_answers(simulation)
    assert reasons(simulation.frames) == ["error", "length"]


@RUN_AHEAD
def test_the_next_turn_takes_over_the_cache_of_the_last(run_ahead: int) -> None:
    simulation, first = asked({"prefixes": True, "prefill_chunk": 512, "run_ahead": run_ahead}, LONG, 5)
    second = simulation.add((*LONG, *first.tokens, 7, 8, 9), 5)
    (chunk,) = chunks_of(finish(simulation), 2)
    # The last token of an answer was never fed, and the one before may not be known when the last is queued.
    assert (chunk.part.source, chunk.part.take, chunk.offset) == (1, True, len(LONG) + 4 - run_ahead)
    assert second.ends[0].cached == chunk.offset


@RUN_AHEAD
@pytest.mark.parametrize("how", [{"prefixes": True}, {"prefixes": True, "together": 4096}, {"whole": True}])
def test_equal_prompts_at_once_are_computed_once(run_ahead: int, how: dict[str, Any]) -> None:
    simulation, _ = asked(
        {**how, "prefill_chunk": 64, "run_ahead": run_ahead}, LONG, 5, others=[(LONG, 5)] * 5
    )
    assert sum(len(chunk.tokens) for chunk in simulation.prefills()) == 200 + 5
    check_answers(simulation)


@pytest.mark.parametrize("together", [0, 4096])
def test_a_prompt_of_another_salt_is_computed_again(together: int) -> None:
    """From no kept cache and no running one, without a wait for the other, and the next turn as usual."""
    simulation = Simulation(prefixes=True, prefill_chunk=256, together=together)
    for last, salts in ((1001, (0, 1, 2)), (1002, (1, 2, 3))):
        for salt in salts:
            simulation.add((*LONG, last), 3, salt=salt)
        finish(simulation)
    assert [simulation.requests[n].ends[0].cached for n in range(1, 7)] == [0, 0, 0, 200, 200, 0]


@cases(
    "prefixes, one, salts",
    {
        "another salt": (True, (*LONG, 1001), (1, 2)),
        "no cache that is kept": (False, (*LONG, 1001), (0, 0)),
        "a long one that begins alike": (True, (*LONG[:40], *range(5000, 8000)), (0, 0)),
    },
)
def test_a_prompt_does_not_wait_for_one_of(
    prefixes: bool, one: tuple[int, ...], salts: tuple[int, int]
) -> None:
    simulation = Simulation(prefixes=prefixes, prefill_chunk=64)
    for prompt, salt in zip((one, (*LONG[: 40 if len(one) > 1000 else 200], 1002)), salts, strict=True):
        simulation.add(prompt, 3, salt=salt)
    simulation.ticks(2)
    assert sketch(simulation.frames) == "P1 P2"


def test_a_copy_that_prompts_start_from_together_is_evicted_behind_them() -> None:
    """So many copies of their own take its place."""
    simulation = Simulation(whole=True, together=4096, prefill_chunk=4096)
    simulation.add(LONG, 1)
    simulation.drain()
    before = len(simulation.frames)
    for number in range(9):
        simulation.add((*LONG[:-1], *range(1000 * number, 1000 * number + 40)), 2)
    simulation.drain()
    together, evicted = simulation.frames[before : before + 2]
    assert isinstance(together, Forward)
    assert isinstance(evicted, Evict)
    (source,) = {part.source for part in together.prompts}
    assert len(together.rows) == 9
    assert together.unfinished
    assert source in evicted.uids


KEPT = {"prefixes": True, "together": 512}
JOINED = {"whole": True, "together": 256, "prefill_chunk": 16384}


@cases(
    "length, ends, set_up, together",
    {
        "scores have no more room": (8000, [40] * 4, {**KEPT, "prefill_chunk": 256, "scores": 64 * 8200}, 1),
        "they have, though each alone would have to be shorter": (
            (1900, [129, 5], {**KEPT, "prefill_chunk": 2048, "scores": 1 << 19}, 2)
        ),
        "copies are short": (8000, [1, 1], JOINED, 2),
        "copies are long": (9000, [1, 1], JOINED, 1),  # to join them would take longer than what it saves
        "copies take their share of the room": (4000, [1, 1], {**JOINED, "kv_tokens": 12 * 8200}, 2),
        "copies would take more of it": (4000, [1, 1], {**JOINED, "kv_tokens": 12 * 8000}, 1),
    },
)
def test_prompts_with_a_beginning_in_common_are_computed_together(
    length: int, ends: list[int], set_up: dict[str, Any], together: int
) -> None:
    simulation, _ = asked(set_up, (*range(length), 1), 1)
    simulation.frames.clear()
    for number, more in enumerate(ends, 2):
        simulation.add((*range(length), *[number] * more), 1)
    reads = [frame for frame in finish(simulation).frames if isinstance(frame, Forward)]
    assert max(len(read.prompts) for read in reads) == together


@pytest.mark.parametrize("max_rows", [3, 4])
def test_prompts_that_have_rows_end_together_however_many_may_begin(max_rows: int) -> None:
    simulation = played("3x40+1 end", together=256, whole=True, max_rows=max_rows)
    assert sketch(simulation.frames).startswith("P(123) P(123)")


def test_a_prompt_waits_for_its_beginning_to_be_computed() -> None:
    set_up = {"prefixes": True, "prefill_chunk": 64}
    simulation, _ = asked(set_up, (*LONG, 1001), 3, others=[((*LONG, 1002), 3), (10, 3)])
    chunks = simulation.prefills()
    found = [(chunk.request, chunk.offset) for chunk in chunks]
    assert found == [(1, 0), (3, 0), (1, 64), (1, 128), (1, 192), (2, 200)]
    assert chunks[-1].part.source == chunks[0].uid
    check_answers(simulation)


def test_when_that_is_cancelled_it_starts_from_what_there_is() -> None:
    simulation = Simulation(prefixes=True, prefill_chunk=64)
    simulation.add((*LONG, 1001), 3)
    simulation.add((*LONG, 1002), 3)
    simulation.ticks(2)
    simulation.cancel(1)
    assert [chunk.offset for chunk in chunks_of(finish(simulation), 2)] == [128, 192]


def test_no_row_takes_what_another_begins_from_beside_it() -> None:
    simulation, _ = asked({"prefixes": True, "prefill_chunk": 256, "together": 256}, LONG, 1)
    simulation.add((*LONG, 7, 8, 9), 3)
    simulation.add((*LONG, 17, 18, 19), 3)
    simulation.frames.clear()
    assert sum(len(chunk.tokens) for chunk in finish(simulation).prefills()) == 6


class CountingCache(PrefixCache):
    """Counts how often it is asked."""

    asked = 0

    def find(self, prompt: Sequence[int], salt: int = 0) -> Hit | None:
        self.asked += 1
        return super().find(prompt, salt)


def test_a_waiting_request_asks_again_only_when_something_has_changed() -> None:
    cache = CountingCache(1 << 20, 8)
    scheduler = Scheduler(Policy(frozenset(), prefill_chunk=2), cache)
    for uid in range(1, 65):
        scheduler.add(Generate(uid, LONG, 9))
    for _ in range(99):
        assert reads_prompts(move := scheduler.next())
        assert move.rows == (1,)
        scheduler.record(())
    assert cache.asked <= 3 * 64


def test_what_could_not_run_even_alone_is_refused() -> None:
    simulation = Simulation(kv_tokens=128)
    simulation.add(100, 28)
    with refused(MlxtpError, Code.CONTEXT_OVERFLOW, "100 prompt tokens and 29 new ones"):
        simulation.add(100, 29)
    del simulation.requests[2]
    finish(simulation)
    policy = Policy(frozenset(), kv_tokens=128)
    Scheduler(policy).add(Generate(1, LONG[:100], 68, answered=40))  # these count once
    with refused(MlxtpError, Code.CONTEXT_OVERFLOW, "room for 129"):
        Scheduler(replace(policy, row_tokens=1)).add(Generate(1, LONG[:100], 28))


def preempted(simulation: Simulation) -> list[int]:
    """The requests that made room, in order."""
    stops = [move for move in simulation.frames if isinstance(move, SessionStop)]
    return [simulation.ranks.request_of[move.uid] for move in stops if move.reason == "preempt"]


@pytest.mark.parametrize("prefixes", [False, True])
@cases(
    "course, taken",
    {
        "a short prompt before a long one": ("20+300 20+200 150+200", 2),
        "its answer counts, too": ("20+300 20+200 t120 100+200", 3),
        "but not the oldest, however little it has": ("20+300 150+200", 2),
        "of equals the youngest": ("20+300 40+200 40+200", 3),
        "a batch request before others that lose less": ("20+300 20+200 150+200b", 3),
        "a batch request though it is the oldest": ("20+300b 20+200 150+200", 1),
        "of several batch requests the one that loses least": ("20+300 20+200b 150+200b", 2),
        "of batch requests alone not the oldest": ("20+300b 20+200b 150+200b", 2),
    },
)
def test_the_one_that_loses_least_makes_room(course: str, taken: int, prefixes: bool) -> None:
    """There is room for 20 and 300 tokens, and for half of the others."""
    simulation = played(f"{course} end", kv_tokens=576, prefill_chunk=512, prefixes=prefixes)
    assert preempted(simulation)[0] == taken


def test_a_batch_request_makes_room_for_interactive_ones_once() -> None:
    """Then its age counts, as that of any other."""
    simulation = Simulation(kv_tokens=1024, prefill_chunk=512)
    for prompt, batch in ((80, True), (80, False), (80, False)):
        simulation.add(prompt, 100, batch=batch)
    simulation.ticks(10)
    simulation.resize(400)
    assert preempted(simulation) == [1]
    simulation.add(80, 100)
    simulation.resize(1024)
    simulation.ticks(10)
    assert beginnings(simulation)[3:] == [4, 1]
    simulation.resize(400)
    assert preempted(simulation) == [1, 4, 3]
    finish(simulation)


@pytest.mark.parametrize("ticks", [3, 12])
def test_a_preempted_prompt_has_each_of_its_scores_once(ticks: int) -> None:
    """It is preempted between two of its chunks, or once it has begun to answer."""
    simulation = Simulation(kv_tokens=2048, prefill_chunk=512, chunk_beside=256)
    simulation.add(80, 200)
    simulation.add(600, 100, scored_prompt=True)
    simulation.ticks(ticks)
    assert bool(simulation.requests[2].tokens) == (ticks > 3)
    assert 1 < simulation.requests[2].read <= 600
    simulation.resize(768)
    assert preempted(simulation) == [2]
    finish(simulation)


def test_a_batch_request_whose_turn_it_was_makes_room_without_its_turn() -> None:
    simulation = Simulation(kv_tokens=1024, prefill_chunk=512, max_rows=3)
    line_up(simulation, 8, MOST_OVERTAKING)
    simulation.add(80, 100, batch=True)
    line_up(simulation, 8, 1)
    simulation.add(80, 100, client=8)
    while len(beginnings(simulation)) < MOST_OVERTAKING + 3:
        simulation.tick()
    assert beginnings(simulation)[-3:] == [9, 10, 11]
    simulation.resize(192)
    assert preempted(simulation) == [9]
    simulation.add(80, 100)
    simulation.resize(1024)
    simulation.drain()
    assert beginnings(simulation)[-2:] == [12, 9]


def test_what_another_row_has_too_is_not_lost() -> None:
    """The third shares 200 tokens with the second, and the first never makes room."""
    simulation = Simulation(kv_tokens=960, prefixes=True, prefill_chunk=512)
    for prompt, new in ((9, 200), (LONG, 190), ((*LONG, 7), 200), (60, 150)):
        simulation.add(prompt, new)
        simulation.ticks(9)
    while not preempted(simulation):
        simulation.tick()
    assert preempted(simulation) == [3]
    again = simulation.add((*LONG, 8), 2)
    assert finish(simulation).requests[again.uid].ends[0].cached == len(LONG), (
        "a look at a row changes nothing"
    )


def test_what_made_room_comes_back_by_age_and_before_newcomers() -> None:
    """However many turns their clients and users had before."""
    simulation = Simulation(kv_tokens=1536, prefill_chunk=512)
    for prompt, client in ((80, 7), (60, 7), (80, 8)):
        simulation.add(prompt, 100, client=client)
    simulation.ticks(10)
    simulation.add(20, 100, client=7)
    simulation.ticks(10)
    simulation.frames.clear()
    simulation.resize(192)
    assert preempted(simulation) == [4, 2, 3]
    for client in (7, 8):
        simulation.add(80, 100, client=client, user=9)
    simulation.resize(1536)
    assert [chunk.request for chunk in finish(simulation).prefills()] == [2, 3, 4, 6, 5]


def test_a_prompt_under_way_makes_room_too() -> None:
    simulation = played("100+300 t150 180+5 end", kv_tokens=640, prefill_chunk=1)
    assert preempted(simulation)[0] == 2


@RUN_AHEAD
@pytest.mark.parametrize("drafts", [False, True])
def test_one_long_row_and_many_short_ones_run_together_in_the_room_of_their_lengths(
    run_ahead: int, *, drafts: bool
) -> None:
    """In arrays of the longest for all, no more than three would fit. Short prompts join at once."""
    room = {"kv_tokens": 1480, "together": 64, "prefill_chunk": 512, "chunk_beside": 256}
    others = [(prompt, 80) for prompt in ((*range(20), *range(20)), 5, 12, 20, 30)]
    simulation, _ = asked({**room, "run_ahead": run_ahead, "drafts": drafts}, 350, 90, others=others)
    check_answers(simulation)
    assert "preempt" not in reasons(simulation.frames)
    assert max(len(step.rows) for step in decodes(simulation.frames)) == 6
    assert simulation.ranks.most_buckets > 1


def test_room_is_made_before_it_is_used() -> None:
    simulation = played("250+1 end 60+200 end", kv_tokens=512, prefill_chunk=512, prefixes=True)
    (at,) = [index for index, move in enumerate(simulation.frames) if move == Evict((1,))]
    assert is_step(then := simulation.frames[at + 1])
    assert then.positions == (193,), "with room for a wide step the next size is 384, beside 250"


def test_what_is_kept_takes_the_room_of_the_row_that_left() -> None:
    # Room for 352 and three times 288.
    simulation = played("257+60 190+12 2x190+40", kv_tokens=352 + 3 * 288, prefill_chunk=512, prefixes=True)
    while not isinstance(move := simulation.tick(), SessionStop):
        assert move is not None
    assert (move.uid, move.keep) == (2, 200)
    slots = [(288, 0), (288, 0), (352, 0)]
    assert sorted(simulation.ranks.slots) == [(288, 0), *slots], "the row's slot is free"
    simulation.tick()
    assert sorted(simulation.ranks.slots) == slots
    assert simulation.ranks.occupied() == 288 + 288 + 352 + 224
    finish(simulation)


@pytest.mark.parametrize("first", [20, 21, 22])
def test_a_preempted_request_keeps_its_grammar(first: int) -> None:
    guide = FakeGuide(range(2000, 2300), frozenset(range(first, 300, 3)))
    simulation = played("20+250", kv_tokens=512)
    simulation.add(20, 250, tuple(range(2000, 2300)), guide=guide)
    assert "preempt" in reasons(finish(simulation).frames)
    assert guide.accepted == 250


def test_a_preempted_request_may_have_no_way_on() -> None:
    says = tuple(range(2000, 2300))

    def crowded(guide: FakeGuide) -> Simulation:
        simulation = played("20+250", kv_tokens=512)
        simulation.add(20, 250, says, guide=guide)
        return simulation

    first = FakeGuide(says, frozenset(range(21, 300, 3)))
    simulation = crowded(first)
    while not isinstance(simulation.tick(), SessionStop):
        assert len(simulation.scheduler) == 2
    assert reasons(simulation.frames) == ["preempt"]

    second = FakeGuide(says, frozenset(range(21, 300, 3)))
    second.stuck_at = first.accepted  # nothing but the token that was to be forced there is known to fit
    simulation = finish(crowded(second))
    failing = simulation.requests[2]
    assert [failure.detail for failure in failing.failures] == ["no way on"]
    assert failing.ends == []
    assert reasons(simulation.frames) == ["error", "length"]


def crowded_by_four(kv_tokens: int, **policy: Any) -> Simulation:
    """Four requests run. They have room for 128 tokens each, and will have 192 in the end."""
    room = {"kv_tokens": kv_tokens, "prefill_chunk": 512, "together": 512}
    simulation = played("4x80+100 t30", **room, **policy)
    assert len(simulation.ranks.rows) == 4
    simulation.frames.clear()
    return simulation


@RUN_AHEAD
@pytest.mark.parametrize("policy", [{}, {"prefixes": True}, {"rolls_back": False}])
def test_less_room_is_made_at_once_by_the_youngest(run_ahead: int, policy: dict[str, bool]) -> None:
    simulation = crowded_by_four(1024, run_ahead=run_ahead, **policy)
    simulation.resize(400)
    assert sketch(simulation.frames) == "S4 S3 T"
    finish(simulation)


def test_more_room_takes_effect_at_once() -> None:
    simulation = crowded_by_four(1024)
    simulation.resize(400)
    simulation.ticks(20)
    assert simulation.ranks.rows == [1, 2]
    simulation.frames.clear()
    simulation.resize(2048)
    assert simulation.frames == []
    simulation.ticks(3)
    assert len(simulation.ranks.rows) == 4
    simulation.frames.clear()
    simulation.resize(2048)
    assert sketch(simulation.frames) == "T", "as much is not more"
    finish(simulation)


def test_kept_caches_give_way_before_a_sequence_does() -> None:
    course = "100+2 end 100+2 end 100+2 end 20+200 t10 |"
    simulation = played(course, kv_tokens=1024, prefixes=True, prefill_chunk=512)
    simulation.resize(512)
    assert sketch(simulation.frames) == "X1 T", "no more than half of the room may be kept caches"
    simulation.resize(256)
    assert "preempt" not in reasons(finish(simulation).frames)
    scheduler = played("100+2 end", prefixes=True).scheduler
    scheduler.resize(scheduler._kv.kv_tokens, clear=True)
    assert scheduler.next() == Evict((1,))


def test_a_sequence_fails_when_it_has_more_tokens_than_the_room() -> None:
    simulation = crowded_by_four(1024)
    simulation.resize(128)
    simulation.drain()
    for request in simulation.requests.values():
        (failure,) = request.failures
        assert failure.code is Code.CONTEXT_OVERFLOW
        for words in ("80 prompt tokens and", "of 100 new ones outgrow the KV cache", "has room for 128"):
            assert words in failure.detail
        assert 40 > 128 - 80 - len(request.tokens) > 0, "it went on as long as there was room"
    with pytest.raises(MlxtpError, match=r"room for 192 in the KV cache; .* has room for 128"):
        simulation.add(80, 100)


def test_a_sequence_without_room_fails_at_once() -> None:
    simulation = crowded_by_four(1024)
    simulation.resize(96)
    assert sketch(simulation.frames) == "S1 S2 S3 S4 T"
    assert reasons(simulation.frames) == ["error"] * 4


def test_prompts_under_way_make_room_too() -> None:
    simulation = played("3x250+5 t5", kv_tokens=4096, prefill_chunk=16)
    assert len(simulation.ranks.prefilling) == 3
    simulation.resize(400)
    assert list(simulation.ranks.prefilling) == [1]
    finish(simulation)


def places_read(simulation: Simulation, request: int) -> list[tuple[int, bool]]:
    """Where each chunk of a prompt begins, and whether a copy of its cache is kept."""
    return [(chunk.offset, chunk.part.save > 0) for chunk in chunks_of(simulation, request)]


@RUN_AHEAD
@pytest.mark.parametrize("says", [(), (5, 6, EOS)])
def test_the_next_turn_starts_from_the_end_of_the_last(run_ahead: int, says: tuple[int, ...]) -> None:
    set_up = {"whole": True, "prefill_chunk": 512, "run_ahead": run_ahead}
    simulation, first = asked(set_up, LONG, 40, (*range(2, 42), *says))
    second = simulation.add((*LONG, *first.tokens, 7, 8, 9), 5)
    (chunk,) = chunks_of(finish(simulation), 2)
    # All but its last token, which was never fed.
    assert (chunk.part.source, chunk.part.take, chunk.offset) == (1, False, len(LONG) + 39)
    assert second.ends[0].cached == chunk.offset


def test_an_answer_that_is_rendered_otherwise_leaves_what_is_before_it() -> None:
    simulation, _ = asked({"whole": True, "prefill_chunk": 512}, LONG, 40, places=(120, 195))
    assert places_read(simulation, 1) == [(0, True), (120, True), (195, False)]
    for prompt, cached in (((*LONG[:198], 1, 2), 195), ((*LONG[:190], 1), 120), (LONG[:120], 0), (LONG, 195)):
        request = simulation.add(prompt, 2)
        finish(simulation)
        assert request.ends[0].cached == cached


@pytest.mark.parametrize(("ticks", "kept"), [(90, 124), (91, 0)])
def test_a_cancelled_answer_keeps_no_cache_that_would_have_to_be_cut(ticks: int, kept: int) -> None:
    """In a pipeline a row may have two steps in flight. What the second one is fed is not known yet."""
    simulation = played(f"80+120 t{ticks} c1 end", whole=True, stages=2)
    assert [move.keep for move in simulation.frames if isinstance(move, SessionStop)] == [kept]


def test_a_grammar_that_refuses_a_forced_token_beside_others_leaves_no_cache_that_would_be_cut() -> None:
    """Its next step is in flight by then."""
    simulation = played("60+100", whole=True, rolls_back=True)
    guide = FakeGuide((7,) * 100, frozenset(range(40, 50)), fails=44)
    simulation.add(60, 100, (7,) * 100, guide=guide)
    simulation.drain()
    assert [move.keep for move in simulation.frames if isinstance(move, SessionStop)] == [0, 159]


def test_places_that_save_little_are_left_out() -> None:
    simulation, _ = asked({"whole": True, "prefill_chunk": 512}, LONG, 40, places=(20, 51))
    simulation.add((*LONG, *range(2, 20)), 40, places=(190, 210))
    simulation.drain()
    assert places_read(simulation, 1) == [(0, True), (51, True), (199, False)]
    assert places_read(simulation, 2) == [(199, False)]


def test_a_copy_for_which_there_is_no_room_beside_its_source_takes_its_place() -> None:
    room = {"row_tokens": 100, "kv_tokens": 1000, "prefill_chunk": 512}
    simulation, first = asked({"whole": True, **room}, LONG, 40, places=(195,))
    simulation.add((*LONG, *first.tokens, *range(3000, 3100)), 5, places=(300,))
    finish(simulation)
    assert places_read(simulation, 2) == [(239, True), (300, True), (339, False)]
    assert [chunk.part.take for chunk in chunks_of(simulation, 2)] == [True, False, False]


@RUN_AHEAD
def test_the_turns_of_a_conversation_hold_its_tokens_once(run_ahead: int) -> None:
    """Each turn keeps three caches; what does not grow counts for every one of them."""
    simulation = Simulation(whole=True, row_tokens=10, prefill_chunk=4096, run_ahead=run_ahead)
    prompt = tuple(range(30_000))
    for turn in range(1, 3):
        request = simulation.add(prompt, 100, places=(len(prompt) - 100, len(prompt) - 5))
        finish(simulation)
        assert len(simulation.ranks.kept) == 3 * turn
        assert simulation.ranks.occupied() == capacity(len(prompt) + 99) + 3 * turn * 10
        assert request.ends[0].cached == (len(prompt) - 151 if turn > 1 else 0)
        prompt = (*prompt, *request.tokens, *range(2, 152))


def test_a_preempted_prompt_begins_again_without_copies_because_these_made_room_before() -> None:
    simulation = Simulation(whole=True, kv_tokens=640, prefill_chunk=512)
    for _ in range(2):
        simulation.add(100, 150, tuple(range(2, 200)), places=(90,))
    assert reasons(finish(simulation).frames)[0] == "preempt"
    assert [chunk.offset for chunk in chunks_of(simulation, 2)] == [0, 90, 0, 90]


class Steady(Random):
    """Nothing is lost, nothing lags behind, and no reply comes by itself."""

    def random(self) -> float:
        return 0.5


def after_a_restart(*prompts: tuple[int, ...], **policy: Any) -> tuple[Simulation, Disk]:
    """A simulation whose disk has these prompts, LONG by default, with requests that wait for the disk."""
    disk = Disk(Steady())
    before = Simulation(prefixes=True, disk=disk)
    after = Simulation(prefixes=True, disk=disk, **policy)
    for prompt in prompts or (LONG,):
        before.add(prompt, 4)
        before.drain()
        after.add((*prompt, 1, 2, 3), 4)
    after.ticks(2 + len(prompts))
    assert len(after.ranks.fetches) == min(len(after.requests), MAX_FETCHES)
    return after, disk


def fetched(simulation: Simulation, uid: int = 0) -> None:
    uid = uid or min(simulation.ranks.fetches)
    blocks = simulation.ranks.reply(uid)
    simulation.fetched(uid, blocks)
    while uid in simulation.ranks.fetches:
        simulation.ticks(1)


def finished(simulation: Simulation) -> list[int]:
    """Where chunks began. No cache is left that the index does not know, which `drain` checks."""
    while simulation.ranks.fetches:
        fetched(simulation)
    return [chunk.offset for chunk in finish(simulation).prefills()]


def test_a_prompt_that_is_on_disk_is_not_computed_again_and_others_run_while_it_is_read() -> None:
    simulation, _ = after_a_restart()
    other = simulation.add(3, 4)
    simulation.ticks(20)
    assert other.ends
    assert simulation.ranks.fetches
    finished(simulation)
    assert [(chunk.offset, chunk.cached) for chunk in chunks_of(simulation, 1)] == [(200, 200)]


def test_blocks_go_to_a_disk_that_lags_behind_though_the_next_turn_takes_over_their_cache() -> None:
    disk = Disk(Steady())
    simulation = Simulation(prefixes=True, disk=disk)
    disk.random.random = lambda: 0.8  # type: ignore[method-assign]  # it takes nothing
    first = simulation.add(LONG, 4)
    simulation.ticks(40)
    assert first.ends
    simulation.add((*LONG, *first.tokens, 1, 2, 3), 4)
    simulation.ticks(6)
    assert not disk.blocks
    disk.random = Steady()
    simulation.drain()
    assert {end for end, _, _ in disk.blocks.values()} >= set(range(8, len(LONG), 8))


def test_a_crowd_that_comes_back_is_not_computed_again() -> None:
    prompts = [tuple(range(1000 * number, 1000 * number + 200)) for number in range(1, 7)]
    simulation, _ = after_a_restart(*prompts)
    while simulation.ranks.fetches:
        fetched(simulation)
        simulation.ticks(9)
    assert set(finished(simulation)) == {200}


@pytest.mark.parametrize("arrived", [False, True])
def test_cancel_while_the_disk_is_read_leaves_no_trace(*, arrived: bool) -> None:
    simulation, _ = after_a_restart()
    if arrived:
        fetched(simulation)
    simulation.cancel(1)
    assert finished(simulation) == []
    assert simulation.ranks.kept == {}


def test_a_block_that_one_rank_has_not_got_ends_the_beginning_and_is_deleted() -> None:
    simulation, disk = after_a_restart()
    (fetch,) = simulation.ranks.fetches.values()
    lost = {digests_in(fetch.digests)[at] for at in (2, 5)}
    disk.elsewhere -= lost
    fetched(simulation)
    assert finished(simulation) == [16]
    assert all(disk.has(digest) for digest in digests_in(fetch.digests)), "computed and written again"
    assert lost <= disk.elsewhere


def test_a_rank_that_does_not_reply_costs_no_block() -> None:
    simulation, disk = after_a_restart()
    (fetch,) = simulation.ranks.fetches.values()
    written = len(disk.blocks)
    simulation.fetched(fetch.uid, 0, late=True)
    simulation.ticks(1)
    assert finished(simulation)[0] == 0
    assert len(disk.blocks) >= written


def test_nothing_is_fetched_while_a_rank_s_disk_hangs() -> None:
    simulation, _ = after_a_restart()
    (fetch,) = simulation.ranks.fetches.values()
    index = simulation.scheduler.disk
    index.expect(fetch.uid, 0.0)
    assert index.over(1.0) == [Restore(fetch.uid, 0)]
    again = SequenceState(Generate(8, LONG, 3))
    assert index.fetch(again, 80, 0) is None
    index.reply(0, fetch.uid, 1)
    assert index.fetch(again, 80, 0) is not None


def test_a_cache_in_memory_that_is_longer_by_now_is_used_instead() -> None:
    simulation, disk = after_a_restart()
    (fetch,) = simulation.ranks.fetches.values()
    disk.elsewhere.discard(digests_in(fetch.digests)[2])
    other = simulation.add((*LONG[:150], 7), 1)
    while not other.ends:
        if len(simulation.ranks.fetches) > 1:
            fetched(simulation, max(simulation.ranks.fetches))
        simulation.ticks(1)
    disk.elsewhere.discard(digests_in(fetch.digests)[2])
    simulation.resize(440)  # not for both caches and the prompt
    fetched(simulation)
    assert finished(simulation)[-1] == 150


def test_rows_of_batched_caches_go_to_disk_only_before_they_join_and_after_they_end() -> None:
    """Tokens of one row cannot be taken out of mlx-lm's own batched caches."""
    disk = Disk(Steady())
    _, request = asked({"prefixes": True, "rolls_back": False, "prefill_chunk": 100, "disk": disk}, LONG, 20)
    check_answer(request)
    assert len(disk.blocks) == (len(LONG) + 19) // 8


def test_of_the_copies_of_a_prompt_the_last_alone_goes_to_disk() -> None:
    disk = Disk(Steady())
    asked({"whole": True, "prefill_chunk": 512, "disk": disk}, LONG, 40, places=(120, 195))
    assert sorted(end for end, *_ in disk.blocks.values()) == [195, 239]


def test_a_row_that_needs_room_takes_it_from_what_is_fetched() -> None:
    simulation, disk = after_a_restart(kv_tokens=600, run_ahead=0)
    disk.room_bytes = 0  # a block on its way there would hide a rest
    grows = simulation.add(40, 450, ignore_eos=True)
    while not grows.ends:
        assert simulation.tick() is not None, "the loop rests while a row runs"
    finished(simulation)
    assert [chunk.offset for chunk in chunks_of(simulation, grows.uid)] == [0]


def test_less_room_takes_it_from_what_is_fetched() -> None:
    simulation, _ = after_a_restart(LONG, LONG[::-1])
    simulation.resize(300)
    finished(simulation)


def test_a_disk_that_has_failed_is_not_waited_for_and_nothing_is_lined_up_for_it() -> None:
    for ticks in (2, 0):
        simulation = Simulation(prefixes=True, prefill_chunk=50, disk=(disk := Disk(Steady())))
        simulation.add(LONG, 4)
        simulation.ticks(ticks)
        assert simulation.scheduler.disk.spills == (ticks > 0)
        disk.room_bytes = 0
        assert not simulation.scheduler.disk.spills
    simulation.drain()
    disk.room_bytes = 1
    assert not simulation.scheduler.disk.spills


def opcodes(think: Callable[[], object]) -> int:
    """Count the instructions of Python it takes: a measure that does not depend on the machine's load."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        think()
    finally:
        sys.settrace(before)
    return count


def crowd(waiting: int, prompt: tuple[int, ...], **policy: Any) -> Scheduler:
    """Two requests run, and so many wait."""
    scheduler = Scheduler(Policy(frozenset(), prefill_chunk=64, **policy), PrefixCache(1 << 20, 8))
    for uid in range(1, 3):
        scheduler.add(Generate(uid, (7, 8, 9), 999))
        next_frame(scheduler)
        scheduler.record((5,))
    for uid in range(3, 3 + waiting):
        scheduler.add(Generate(uid, prompt, 999))
    return scheduler


@pytest.mark.parametrize(
    ("prompt", "policy"),
    [
        ((7, 8, 9), {"max_rows": 2}),  # no row is free
        (LONG, {}),  # all wait for the first to be computed
        ((7, 8, 9), {"kv_tokens": 1024}),  # there is no room
    ],
)
def test_a_crowd_that_waits_costs_its_number_alone(prompt: tuple[int, ...], policy: dict[str, Any]) -> None:
    def cost(waiting: int) -> int:
        scheduler = crowd(waiting, prompt, **policy)
        next_frame(scheduler)
        return max(opcodes(scheduler.next) for _ in range(3))

    assert opcodes(lambda: None) > 0
    assert cost(256) < 5 * cost(64)


SMALL_WORDS = st.integers(2, 5)
answers = st.one_of(
    st.just(()),
    st.lists(st.integers(2, 60), max_size=6).map(lambda tokens: (*tokens, EOS)),
    st.lists(SMALL_WORDS, min_size=40, max_size=40).map(tuple),
    st.lists(SMALL_WORDS, max_size=30).map(lambda tokens: (*tokens, EOS)),
)
prompts = st.one_of(
    st.integers(1, 30),
    st.tuples(st.integers(1, 200), st.lists(SMALL_WORDS, max_size=30)).map(lambda p: (*LONG[: p[0]], *p[1])),
    st.lists(SMALL_WORDS, min_size=1, max_size=60).map(tuple),
)
guides = st.one_of(st.none(), st.none(), st.frozensets(st.integers(0, 39), max_size=25))
scores = st.sampled_from((False, True, "prompt"))
admissions = st.tuples(st.just("add"), prompts, st.integers(1, 40), answers, guides, st.booleans(), scores)
cancels = st.tuples(st.just("cancel"), st.integers(1, 12))
ticks = st.tuples(st.just("tick"), st.integers(1, 12))
courses = st.lists(st.one_of(admissions, admissions, cancels, ticks, ticks), max_size=40)
WAYS = {name: st.booleans() for name in ("rolls_back", "drafts", "prefixes", "whole")}
WAYS |= {"run_ahead": st.integers(0, 1)}
set_ups = st.fixed_dictionaries(
    {
        **WAYS,
        "prefill_chunk": st.integers(1, 80),
        "chunk_beside": st.integers(1, 40),
        "max_rows": st.integers(1, 5),
        "together": st.sampled_from((0, 64, 256)),
        "kv_tokens": st.sampled_from((384, 512, 768, 1024, 1 << 40)),
    }
)

rooms = (128, 256, 384, 512, 768, 1024)
resizes = st.tuples(st.just("resize"), st.sampled_from(rooms))

Course = list[tuple[Any, ...]]
NEITHER = dict.fromkeys(("drafts", "prefixes", "whole"), False)
PLAIN = {**NEITHER, "rolls_back": True, "max_rows": 2, "run_ahead": 1, "together": 0, "kv_tokens": 1 << 40}
PLAIN |= {"prefill_chunk": 3, "chunk_beside": 3}
STORM: Course = [
    ("add", 7, 9, (4, EOS), None, False, False),
    ("add", 1, 1, (), None, False, True),
    ("tick", 1),
    ("add", 30, 12, (), frozenset({2, 3}), True, False),
    ("cancel", 1),
]
ROOMY: Course = [
    ("add", prompt, answer, (), None, False, False)
    for prompt, answer in ((26, 12), (LONG[:132], 4), ((*LONG[:155], 2, 2, 2, 2, 2, 2), 1))
]
"""A copy of a prompt's beginning is saved while the rows that run have much room to grow."""
ALIKE: Course = [("add", LONG, 40, (), None, False, False)] * 8


def play(set_up: dict[str, Any], course: Course, disk: Disk | None = None) -> Simulation:
    drafts = set_up["drafts"] and set_up["rolls_back"]
    simulation = Simulation(**{**set_up, "drafts": drafts}, disk=disk)
    for event in course:
        match event:
            case ("add", prompt, max_tokens, says, forced, ignore_eos, scored):
                preview = Request(len(simulation.requests) + 1, (), max_tokens, says)
                words = [preview.answer(index) for index in range(max_tokens)]
                guide = None if forced is None else FakeGuide(words, forced)
                length = prompt if isinstance(prompt, int) else len(prompt)
                places = tuple(place for place in (length // 2, length - 3) if place > 0)
                wants = {"guide": guide, "ignore_eos": ignore_eos, "places": places}
                wants |= {"scored": scored is True, "scored_prompt": scored == "prompt"}
                try:
                    simulation.add(prompt, max_tokens, says, **wants)
                except MlxtpError:
                    if simulation.ranks.kv_tokens >= set_up["kv_tokens"]:
                        raise
                    simulation.requests.popitem()
            case ("resize", kv_tokens):
                simulation.resize(kv_tokens)
            case ("cancel", uid):
                simulation.cancel(uid)
            case ("tick", count):
                simulation.ticks(count)
    simulation.drain()
    return simulation


@settings(max_examples=120, deadline=None)
@given(set_ups, courses)
@example(PLAIN, STORM)
@example({**PLAIN, "prefill_chunk": 2, "max_rows": 3, "run_ahead": 0}, STORM)
@example({**PLAIN, "prefixes": True, "kv_tokens": 768, "drafts": True, "max_rows": 5}, ALIKE)
@example(
    {**PLAIN, "prefill_chunk": 27, "chunk_beside": 27, "max_rows": 3, "whole": True, "kv_tokens": 768}, ROOMY
)
def test_every_request_gets_its_own_answer_and_ends_exactly_once(
    set_up: dict[str, Any], course: Course
) -> None:
    simulation = play(set_up, course)
    check_answers(simulation)
    check_pauses(simulation, set_up)
    for uid, request in simulation.requests.items():
        if request.cancelled:
            assert [(end.reason, end.forwards) for end in request.ends] == [
                ("cancel", simulation.forwards_of(uid))
            ]
            assert request.indices == list(range(len(request.tokens)))
            assert tuple(request.tokens) == request.expected[0][: len(request.tokens)]


def check_pauses(simulation: Simulation, set_up: Mapping[str, int]) -> None:
    """A step waits for a small chunk at most."""
    most = min(set_up["chunk_beside"], set_up["prefill_chunk"])
    running: set[int] = set()
    since_decode = 0
    for move in simulation.frames:
        match move:
            case Forward() if move.prompts:
                tokens = len(move.tokens)
                assert tokens <= set_up["prefill_chunk"]
                since_decode = since_decode + tokens if running else 0
                assert since_decode <= most
                running |= set() if move.unfinished else set(move.rows)
            case Forward():
                since_decode = 0
                assert len(move.rows) <= set_up["max_rows"]
                assert set(move.rows) == running, "no running row is left out"
            case SessionStop():
                running.discard(move.uid)


crowded_prompts = st.one_of(
    st.integers(40, 230),
    st.tuples(st.integers(40, 200), st.integers(1, 9)).map(lambda p: (*LONG[: p[0]], 900 + p[1])),
)
crowded_scores = st.sampled_from((False, "prompt"))
crowded = st.tuples(
    st.just("add"), crowded_prompts, st.integers(1, 120), answers, st.none(), st.just(True), crowded_scores
)
crowd_ticks = st.tuples(st.just("tick"), st.integers(1, 60))
crowds = st.lists(st.one_of(crowded, crowded, cancels, crowd_ticks))
tight = st.fixed_dictionaries(
    {
        **WAYS,
        "prefill_chunk": st.sampled_from((16, 64, 512)),
        "chunk_beside": st.sampled_from((16, 64)),
        "max_rows": st.just(5),
        "together": st.sampled_from((0, 512)),
        "kv_tokens": st.sampled_from((384, 512, 600, 768, 900)),
        "row_tokens": st.sampled_from((0, 40)),
    }
)


@settings(max_examples=100, deadline=None)
@given(tight, crowds)
def test_where_room_is_tight_no_request_exceeds_it_and_none_is_lost(
    set_up: dict[str, Any], course: Course
) -> None:
    """The room itself is checked at every forward. What does not grow counts for every sequence and copy."""
    check_answers(play({**set_up, "kv_tokens": set_up["kv_tokens"] + set_up["row_tokens"]}, course))


@pytest.mark.parametrize("rolls_back", [True, False])
@pytest.mark.parametrize("stages", [2, 3])
def test_lanes_of_a_pipeline_alternate_and_lose_nothing(stages: int, rolls_back: bool) -> None:
    """Ranks check that a step's rows are a whole lane with all its tokens."""
    lanes, overlapped = set(), 0
    for seed in range(4):
        random = Random(seed)
        simulation = Simulation(
            stages=stages,
            rolls_back=rolls_back,
            kv_tokens=random.choice((1500, 4000)),
            prefixes=rolls_back and random.random() < 0.5,
            drafts=rolls_back and random.random() < 0.5,
            together=random.choice((0, 512)),
            prefill_chunk=random.choice((16, 64, 512)),
            chunk_beside=64,
            max_rows=8,
        )
        for _ in range(14):
            length = random.choice((random.randint(5, 60), random.randint(200, 400)))
            simulation.add(length, random.randint(1, 200))
            simulation.ticks(random.randint(0, 60))
            if random.random() < 0.2:
                simulation.cancel(random.randint(1, len(simulation.requests)))
        finish(simulation)
        lanes.add(simulation.ranks.most_lanes)
        steps = [set(move.rows) for move in decodes(simulation.frames)]
        overlapped += sum(not one & other for one, other in pairwise(steps))
    assert max(lanes) == stages
    assert overlapped > 30


def layouts_of(simulation: Simulation) -> list[tuple[int, ...]]:
    """Collect the rooms of each layout from now on."""
    layouts, make = list[tuple[int, ...]](), simulation.ranks.make

    def note(move: DecodeFrame, *known: Any) -> Any:
        if isinstance(move, Arrange):
            layouts.append(move.rooms)
        return make(move, *known)

    simulation.ranks.make = note  # type: ignore[method-assign]
    return layouts


def test_lanes_have_as_many_rows_give_or_take_one() -> None:
    rows = [SequenceState(Generate(uid, (1,), 1), uid=uid) for uid in range(1, 8)]
    lanes = Lanes(rows, 3)
    steps = [lanes.next(lambda _: True) for _ in range(3)]
    assert sorted(len(step) for step in steps) == [2, 2, 3]
    assert sorted(row.uid for step in steps for row in step) == list(range(1, 8))
    waiting = steps[0]
    assert lanes.next(lambda row: row not in waiting) == steps[1]
    del rows[:]
    rows += steps[2]
    assert len({row.progress.lane for step in (lanes.next(lambda _: True),) for row in step}) == 1
    assert len(lanes.next(lambda _: True)) == 1, "the rows that are left are in two lanes"


@pytest.mark.parametrize("seeds", [8, pytest.param(24, marks=pytest.mark.chaos)])
def test_rows_of_unlike_lengths_never_exceed_the_room_and_lose_nothing(seeds: int) -> None:
    """The room is checked at every forward. Little of it is free, so that all layouts occur."""
    buckets, preempted = set(), 0
    for seed in range(seeds):
        random = Random(seed)
        simulation = Simulation(
            kv_tokens=random.choice((1200, 1500, 2000)),
            run_ahead=random.randint(0, 1),
            prefixes=random.random() < 0.5,
            drafts=random.random() < 0.5,
            together=random.choice((0, 512)),
            prefill_chunk=random.choice((16, 64, 512)),
            chunk_beside=64,
            max_rows=8,
            bucket_tokens=random.choice((200, 1 << 40)),
        )
        for _ in range(12):
            length = random.choice((random.randint(5, 60), random.randint(400, 900)))
            simulation.add(length, random.randint(1, 200))
            simulation.ticks(random.randint(0, 40))
        finish(simulation)
        buckets.add(simulation.ranks.most_buckets)
        preempted += reasons(simulation.frames).count("preempt")
    assert buckets >= {2, 3}
    assert preempted > seeds // 3


@pytest.mark.parametrize("seeds", [8, pytest.param(48, marks=pytest.mark.chaos)])
def test_the_oldest_never_makes_room_and_others_not_for_ever(seeds: int) -> None:
    """Of the others a batch request does that never did before, else the one that loses least; none often."""
    taken = 0
    for seed in range(seeds):
        random = Random(seed)
        simulation = Simulation(
            kv_tokens=random.choice((512, 700, 900)),
            run_ahead=random.randint(0, 1),
            rolls_back=random.random() < 0.7,
            together=random.choice((0, 512)),
            prefill_chunk=random.choice((16, 64, 512)),
            chunk_beside=64,
            max_rows=8,
        )
        batch = check_whom_it_takes(simulation)
        for uid in range(1, 13):
            batch |= {uid} if random.random() < 0.3 else set()
            length = random.choice((random.randint(5, 60), random.randint(100, 300)))
            simulation.add(length, random.randint(1, 120), batch=uid in batch)
            simulation.ticks(random.randint(0, 25))
        finish(simulation)
        often = Counter(preempted(simulation))
        taken += often.total()
        assert max(often.values(), default=0) <= 3
    assert taken > seeds


def check_whom_it_takes(simulation: Simulation) -> set[int]:
    """Check each preemption from now on. Returns the batch requests that made no room, to be added to."""
    gives_way, ranks = set[int](), simulation.ranks
    make = ranks.make

    def checked(frame: DecodeFrame, *known: Any) -> Any:
        if isinstance(frame, SessionStop) and frame.reason == "preempt":
            uids = (*ranks.rows, *ranks.prefilling)
            held = {ranks.request_of[uid]: len(ranks.contents[uid]) for uid in uids}
            del held[min(held, key=lambda uid: (uid in gives_way, uid))]
            first = min(held, key=lambda uid: (uid not in gives_way, held[uid], -uid))
            assert ranks.request_of[frame.uid] == first
            gives_way.discard(first)
        return make(frame, *known)

    ranks.make = checked  # type: ignore[method-assign]
    return gives_way


def test_short_rows_that_come_and_go_beside_a_long_one_change_the_layout_once() -> None:
    """Two or three beside it are where a forward of its own begins to pay."""
    simulation = Simulation(bucket_tokens=9000, run_ahead=0)
    layouts = layouts_of(simulation)
    simulation.add(6000, 1000, ignore_eos=True)
    for _ in range(40):
        simulation.add(200, 20, ignore_eos=True)
        simulation.ticks(12)
    buckets = [len(set(rooms)) for rooms in layouts]
    assert sum([one != other for one, other in pairwise(buckets)]) == 1
    assert sorted(layouts[-1]) == [384, 384, 8192]


@settings(max_examples=120, deadline=None)
@given(tight, st.lists(st.one_of(crowded, crowded, cancels, crowd_ticks, resizes, resizes)))
def test_room_that_changes_at_any_move_is_kept_to_and_only_what_outgrows_it_fails(
    set_up: dict[str, Any], course: Course
) -> None:
    """The room itself is checked after every change and at every forward."""
    simulation = play({**set_up, "row_tokens": 0}, course)
    check_answers(simulation)
    least = min([set_up["kv_tokens"], *(event[1] for event in course if event[0] == "resize")])
    for request in simulation.requests.values():
        if request.failures:
            assert request.ends == []
            assert [failure.code for failure in request.failures] == [Code.CONTEXT_OVERFLOW]
            assert tuple(request.tokens) == request.expected[0][: len(request.tokens)]
            longest = len(request.prompt) + min(len(request.tokens) + 1 + MAX_WIDTH, request.max_tokens)
            assert capacity(longest) > least


@settings(max_examples=60, deadline=None)
@given(
    tight,
    st.lists(st.one_of(crowded, crowded, cancels, crowd_ticks, resizes)),
    st.integers(0, 999),
    st.booleans(),
)
def test_what_was_on_disk_before_changes_no_answer(
    set_up: dict[str, Any], course: Course, seed: int, rolls_back: bool
) -> None:
    """The second time, ranks that remember nothing find some of the first time's blocks, not all on all."""
    disk = Disk(Random(seed))
    for _ in range(2):
        check_answers(
            play({**set_up, "row_tokens": 0, "prefixes": True, "rolls_back": rolls_back}, course, disk)
        )


lines = st.tuples(st.integers(7, 9), st.integers(0, 2), st.booleans(), st.integers(1, 12), st.integers(0, 9))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3), st.sampled_from((0, 64)), st.lists(lines, max_size=20))
def test_no_batch_request_starves_and_none_begins_before_an_interactive_one_without_need(
    max_rows: int, together: int, course: list[tuple[int, int, bool, int, int]]
) -> None:
    """Prompts that are computed together begin together, at most `MAX_PROMPTS`, before turns are counted."""
    simulation = Simulation(max_rows=max_rows, together=together)
    waiting: dict[int, bool] = {}
    batch, overtaking, seen = dict[int, bool](), 0, 0

    def watch() -> None:
        nonlocal overtaking, seen
        begun = beginnings(simulation)
        for uid in begun[seen:]:
            del waiting[uid]
            if batch[uid]:
                assert overtaking >= MOST_OVERTAKING or all(waiting.values()), "an interactive one waits"
            overtaking = 0 if batch[uid] or not any(waiting.values()) else overtaking + 1
            assert overtaking < MOST_OVERTAKING + max(min(max_rows, MAX_PROMPTS) if together else 1, 1)
        seen = len(begun)

    for client, user, is_batch, count, ticks in course:
        new = line_up(simulation, client, count, user, batch=is_batch)
        waiting |= dict.fromkeys(new, is_batch)
        batch |= dict.fromkeys(new, is_batch)
        for _ in range(ticks):
            simulation.tick()
            watch()
    finish(simulation)
    watch()
    assert not waiting


@settings(max_examples=80, deadline=None)
@given(set_ups, courses)
@example(PLAIN, STORM)
@example({**PLAIN, "prefill_chunk": 2, "max_rows": 3, "run_ahead": 0}, STORM)
def test_forwards_are_few_and_prompts_start_in_the_order_they_came(
    set_up: dict[str, Any], course: Course
) -> None:
    """Without drafts and preemption: one for each chunk and each token but the first, and those run ahead."""
    simulation = play({**set_up, "drafts": False, "kv_tokens": 1 << 40}, course)
    firsts = [chunk.request for chunk in simulation.prefills() if chunk.offset == 0]
    assert set_up["prefixes"] or firsts == sorted(firsts)
    for request in simulation.requests.values():
        if request.cancelled:
            continue
        (end,) = request.ends
        chunks = chunks_of(simulation, request.uid)
        assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        most = len(chunks) + end.generated - 1 + (set_up["run_ahead"] if end.reason == "stop" else 0)
        assert end.forwards <= most


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=8))
def test_the_same_calls_give_the_same_moves(chunk: int, requests: list[tuple[int, int]]) -> None:
    def run() -> list[DecodeFrame]:
        simulation = Simulation(prefill_chunk=chunk, prefixes=True, drafts=True)
        for prompt, max_tokens in requests:
            simulation.add(prompt, max_tokens)
            simulation.tick()
        simulation.drain()
        return simulation.frames

    assert run() == run()


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_the_last_step_that_ran_ahead_is_no_measure_of_a_plain_one(run_ahead: int) -> None:
    """Rank 0 queues no step behind it, so its result is seen early after the one before."""
    scheduler = Scheduler(Policy(frozenset(), drafts="mtp", run_ahead=run_ahead))  # without a head
    scheduler.add(Generate(1, (7, 8, 9), 9))
    on_its_way, at_s = 0, 1.0
    while scheduler:
        move = next_frame(scheduler) if on_its_way <= run_ahead else None
        if isinstance(move, Forward):
            on_its_way += 1
            continue
        if move is None and on_its_way:
            on_its_way -= 1
            at_s += 0.01 if on_its_way or not run_ahead else 0.001
            scheduler.record((50,), at_s=at_s)
    assert scheduler.speculation.choice.costs.plain_s(1) == pytest.approx(0.01)
