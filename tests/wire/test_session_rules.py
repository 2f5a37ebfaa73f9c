"""Rules between messages: each is broken once, in both directions, and every time the same code comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mlxtp.errors import Code, LocalProtocolError, RemoteProtocolError
from mlxtp.wire import messages as msg
from mlxtp.wire.frames import encode
from mlxtp.wire.rank_stats import RankStats
from mlxtp.wire.session import LinkKind, LinkState, Side

from .forwards import of_prompt, of_prompts
from .walk import EPOCH, Pair, pair_in, requests, sequences

PONG = msg.Pong("idle", 0.0, 0, 0, "", RankStats())
UP, DOWN = Side.UPPER, Side.LOWER
DIGEST = b"d" * 16


def step(*rows: int) -> msg.Forward:
    return msg.Forward(rows, (2,) * len(rows))


def wide(widths: tuple[int, ...], tokens: int, positions: tuple[int, ...] = (2,)) -> msg.Forward:
    return msg.Forward((1,), positions, widths, (5,) * tokens)


def behind(source: int, offset: int, total: int = 50, *, uid: int = 2, take: bool = False) -> msg.Forward:
    return of_prompt(uid, offset, total, (5,), source=source, take=take)


def batch(*prompts: tuple[int, int, int, int, int], tokens: int = -1, parts: int = -1) -> msg.Forward:
    """Of each prompt: uid, total, offset, source, take."""
    uids, totals, offsets, sources, takes = zip(*prompts, strict=True)
    count = sum(totals) - sum(offsets) if tokens < 0 else tokens
    whole = of_prompts(uids, totals, offsets, (5,) * count, sources, takes)
    return whole if parts < 0 else replace(whole, prompts=whole.prompts[:parts])


def kept(uid: int, keep: int) -> msg.SessionStop:
    return msg.SessionStop(uid, "stop", 1, keep)


def scored(
    index: int = 0, tokens: int = 1, logprobs: int = 1, top: int = 0, tops: int = 0
) -> msg.ScoredDelta:
    return msg.ScoredDelta(1, index, (9,) * tokens, (-1.0,) * logprobs, top, (9,) * tops, (-1.0,) * tops)


def prompt(uid: int, offset: int, total: int, count: int) -> msg.Forward:
    return of_prompt(uid, offset, total, (5,) * count)


def ack(seq: int) -> msg.Ack:
    return msg.Ack(seq, 1, 1, 0)


def delta(*tokens: tuple[int, int]) -> msg.Delta:
    return msg.Delta(tuple(uid for uid, _ in tokens), tuple(i for _, i in tokens), (9,) * len(tokens))


def stop(uid: int) -> msg.SessionStop:
    return msg.SessionStop(uid, "stop", 1)


def finished(uid: int) -> msg.Finished:
    return msg.Finished(uid, "stop", 1, 1)


def failed(uid: int) -> msg.Error:
    return msg.Error(Code.BAD_REQUEST, "no", uid)


# Each case starts in LOADED with uid 1 live: its prompt complete on a decode link, where seqs go on from
# FIRST; without tokens on a pipe. `said` is legal; `wrong` is not.
TIME = msg.TimeCollectives("sum", 1024, 8)
FIRST = 6

DECODE_CASES: dict[str, tuple[Sequence[tuple[Side, msg.Message]], tuple[Side, msg.Message], Code]] = {
    "a prompt for an old uid": ([(UP, stop(1))], (UP, prompt(1, 0, 2, 2)), Code.WRONG_UID),
    "a prompt for a running uid": ([], (UP, prompt(1, 0, 2, 2)), Code.WRONG_UID),
    "uids that go back": ([(UP, prompt(9, 0, 2, 2))], (UP, prompt(8, 0, 2, 2)), Code.WRONG_UID),
    "a prompt that starts late": ([], (UP, prompt(2, 1, 3, 2)), Code.OUT_OF_ORDER),
    "a gap between chunks": ([(UP, prompt(2, 0, 9, 2))], (UP, prompt(2, 3, 9, 1)), Code.OUT_OF_ORDER),
    "a chunk twice": ([(UP, prompt(2, 0, 9, 2))], (UP, prompt(2, 0, 9, 2)), Code.OUT_OF_ORDER),
    "another total": ([(UP, prompt(2, 0, 9, 2))], (UP, prompt(2, 2, 8, 1)), Code.OUT_OF_ORDER),
    "past the total": ([(UP, prompt(2, 0, 3, 2))], (UP, prompt(2, 2, 3, 2)), Code.FIELD_INVALID),
    "a step for a stranger": ([], (UP, step(1, 2)), Code.WRONG_UID),
    "a step for half a prompt": ([(UP, prompt(2, 0, 9, 2))], (UP, step(2)), Code.WRONG_UID),
    "a step for a stopped uid": ([(UP, stop(1))], (UP, step(1)), Code.WRONG_UID),
    "a row twice": ([], (UP, step(1, 1)), Code.WRONG_UID),
    "a stop for a stranger": ([], (UP, stop(2)), Code.WRONG_UID),
    "a stop twice": ([(UP, stop(1))], (UP, stop(1)), Code.WRONG_UID),
    "a prompt after its stop": (
        [(UP, prompt(2, 0, 9, 2)), (UP, stop(2))],
        (UP, prompt(2, 2, 9, 2)),
        Code.WRONG_UID,
    ),
    "a step without positions for all": ([], (UP, msg.Forward((1,), (2, 2))), Code.FIELD_INVALID),
    "widths for more than its rows": ([], (UP, wide((1, 1), 2)), Code.FIELD_INVALID),
    "fewer tokens than widths": ([], (UP, wide((2,), 1)), Code.FIELD_INVALID),
    "more tokens than widths": ([], (UP, wide((2,), 3)), Code.FIELD_INVALID),
    "tokens without widths": ([], (UP, wide((), 1)), Code.FIELD_INVALID),
    "a step past the prompt": ([], (UP, wide((), 0, (3,))), Code.OUT_OF_ORDER),
    "a step past the last one": ([(UP, step(1))], (UP, wide((), 0, (4,))), Code.OUT_OF_ORDER),
    "a step past the drafts": ([(UP, wide((3,), 3))], (UP, wide((), 0, (6,))), Code.OUT_OF_ORDER),
    "a source that never was": ([], (UP, behind(9, 2)), Code.WRONG_UID),
    "a source that was not kept": ([(UP, stop(1))], (UP, behind(1, 2)), Code.WRONG_UID),
    "a source that is half a prompt": ([(UP, prompt(2, 0, 9, 2))], (UP, behind(2, 2, uid=3)), Code.WRONG_UID),
    "itself for a source": ([], (UP, behind(2, 2)), Code.WRONG_UID),
    "taking what runs": ([], (UP, behind(1, 2, take=True)), Code.WRONG_UID),
    "taking what was taken": (
        [(UP, kept(1, 2)), (UP, behind(1, 2, take=True))],
        (UP, behind(1, 2, uid=3)),
        Code.WRONG_UID,
    ),
    "taking from no one": ([], (UP, of_prompt(2, 0, 2, (5, 5), take=True)), Code.FIELD_INVALID),
    "a start behind more than runs": ([], (UP, behind(1, 3)), Code.OUT_OF_ORDER),
    "a start behind more than was kept": ([(UP, kept(1, 1))], (UP, behind(1, 2)), Code.OUT_OF_ORDER),
    "a start behind nothing of a source": ([], (UP, behind(1, 0)), Code.OUT_OF_ORDER),
    "a start behind the whole prompt": ([], (UP, behind(1, 2, 2)), Code.FIELD_INVALID),
    "a source in a later chunk": ([(UP, behind(1, 2))], (UP, behind(1, 3)), Code.OUT_OF_ORDER),
    "a gap after a source": ([(UP, behind(1, 2))], (UP, prompt(2, 4, 50, 1)), Code.OUT_OF_ORDER),
    "a copy under an old uid": ([], (UP, of_prompt(2, 0, 9, (5, 5), save=1)), Code.WRONG_UID),
    "a copy under its own uid": ([], (UP, of_prompt(2, 0, 9, (5, 5), save=2)), Code.WRONG_UID),
    "a copy of a whole prompt": ([], (UP, of_prompt(2, 0, 2, (5, 5), save=3)), Code.FIELD_INVALID),
    "a prompt under the uid of a copy": (
        [(UP, of_prompt(2, 0, 9, (5, 5), save=3))],
        (UP, prompt(3, 0, 2, 2)),
        Code.WRONG_UID,
    ),
    "a start behind more than a copy holds": (
        [(UP, of_prompt(2, 0, 9, (5, 5), save=3))],
        (UP, behind(3, 3, uid=4)),
        Code.OUT_OF_ORDER,
    ),
    "dropping a copy twice": (
        [(UP, of_prompt(2, 0, 9, (5, 5), save=3)), (UP, msg.Evict((3,)))],
        (UP, msg.Evict((3,))),
        Code.WRONG_UID,
    ),
    "covering what is not kept": (
        [(UP, of_prompt(2, 0, 9, (5, 5), save=3))],
        (UP, of_prompt(2, 2, 9, (5, 5), save=4, covers=(2,))),
        Code.WRONG_UID,
    ),
    "covering as much as itself": (
        [(UP, of_prompt(2, 0, 9, (5, 5), save=3))],
        (UP, msg.SessionStop(2, "stop", 1, keep=2, covers=(3,))),
        Code.WRONG_UID,
    ),
    "covering with nothing": (
        [(UP, of_prompt(2, 0, 9, (5, 5), save=3))],
        (UP, of_prompt(2, 2, 9, (5, 5), covers=(3,))),
        Code.WRONG_UID,
    ),
    "keeping more than a prompt": ([], (UP, kept(1, 3)), Code.OUT_OF_ORDER),
    "keeping more than was fed": ([(UP, step(1))], (UP, kept(1, 4)), Code.OUT_OF_ORDER),
    "keeping more than half a prompt": ([(UP, prompt(2, 0, 9, 2))], (UP, kept(2, 3)), Code.OUT_OF_ORDER),
    "dropping what runs": ([], (UP, msg.Evict((1,))), Code.WRONG_UID),
    "dropping what was not kept": ([(UP, stop(1))], (UP, msg.Evict((1,))), Code.WRONG_UID),
    "dropping twice": ([(UP, kept(1, 2)), (UP, msg.Evict((1,)))], (UP, msg.Evict((1,))), Code.WRONG_UID),
    "dropping twice at once": ([(UP, kept(1, 2))], (UP, msg.Evict((1, 1))), Code.WRONG_UID),
    "dropping what was taken": (
        [(UP, kept(1, 2)), (UP, behind(1, 2, take=True))],
        (UP, msg.Evict((1,))),
        Code.WRONG_UID,
    ),
    "a start from what was dropped": (
        [(UP, kept(1, 2)), (UP, msg.Evict((1,)))],
        (UP, behind(1, 2)),
        Code.WRONG_UID,
    ),
    "spilling more than is held": ([(UP, kept(1, 2))], (UP, msg.Spill(1, 0, 3, DIGEST)), Code.OUT_OF_ORDER),
    "spilling what is not there": ([(UP, stop(1))], (UP, msg.Spill(1, 0, 1, DIGEST)), Code.OUT_OF_ORDER),
    "spilling nothing": ([], (UP, msg.Spill(1, 1, 1, DIGEST)), Code.OUT_OF_ORDER),
    "fetching under an old uid": ([], (UP, msg.FetchBlocks(1, 2, DIGEST)), Code.WRONG_UID),
    "half a digest": ([], (UP, msg.FetchBlocks(2, 2, DIGEST + b"half")), Code.FIELD_INVALID),
    "having fetched what was not wanted": ([], (DOWN, msg.FetchedBlocks(2, 1)), Code.WRONG_UID),
    "having fetched twice": (
        [(UP, msg.FetchBlocks(2, 2, DIGEST)), (DOWN, msg.FetchedBlocks(2, 1))],
        (DOWN, msg.FetchedBlocks(2, 1)),
        Code.WRONG_UID,
    ),
    "having fetched more than was wanted": (
        [(UP, msg.FetchBlocks(2, 2, DIGEST))],
        (DOWN, msg.FetchedBlocks(2, 2)),
        Code.FIELD_INVALID,
    ),
    "restoring what was not fetched": ([], (UP, msg.Restore(2, 0)), Code.WRONG_UID),
    "restoring before it is fetched": (
        [(UP, msg.FetchBlocks(2, 2, DIGEST))],
        (UP, msg.Restore(2, 1)),
        Code.OUT_OF_ORDER,
    ),
    "restoring more than was fetched": (
        [(UP, msg.FetchBlocks(2, 2, DIGEST * 2)), (DOWN, msg.FetchedBlocks(2, 1))],
        (UP, msg.Restore(2, 2)),
        Code.OUT_OF_ORDER,
    ),
    "restoring twice": (
        [(UP, msg.FetchBlocks(2, 2, DIGEST)), (DOWN, msg.FetchedBlocks(2, 1)), (UP, msg.Restore(2, 1))],
        (UP, msg.Restore(2, 1)),
        Code.WRONG_UID,
    ),
    "a start from what was not restored": (
        [(UP, msg.FetchBlocks(2, 2, DIGEST)), (DOWN, msg.FetchedBlocks(2, 1)), (UP, msg.Restore(2, 0))],
        (UP, behind(2, 2, uid=3)),
        Code.WRONG_UID,
    ),
    "a step for what was kept": ([(UP, kept(1, 2))], (UP, step(1)), Code.WRONG_UID),
    "prompts of an old uid": ([(UP, stop(1))], (UP, batch((1, 2, 0, 0, 0))), Code.WRONG_UID),
    "prompts whose uids go back": ([], (UP, batch((3, 2, 0, 0, 0), (2, 2, 0, 0, 0))), Code.WRONG_UID),
    "prompts of one uid": ([], (UP, batch((2, 2, 0, 0, 0), (2, 2, 0, 0, 0))), Code.WRONG_UID),
    "prompts with fewer tokens": ([], (UP, batch((2, 2, 0, 0, 0), tokens=1)), Code.FIELD_INVALID),
    "prompts with more tokens": ([], (UP, batch((2, 2, 0, 0, 0), tokens=3)), Code.FIELD_INVALID),
    "prompts with fewer samplings": (
        [],
        (UP, batch((2, 2, 0, 0, 0), (3, 2, 0, 0, 0), parts=1)),
        Code.FIELD_INVALID,
    ),
    "a prompt of nothing among others": (
        [],
        (UP, batch((2, 2, 2, 1, 0), (3, 2, 0, 0, 0))),
        Code.FIELD_INVALID,
    ),
    "prompts that start late": ([], (UP, batch((2, 3, 1, 0, 0))), Code.OUT_OF_ORDER),
    "prompts from strangers": ([], (UP, batch((2, 3, 1, 9, 0))), Code.WRONG_UID),
    "a prompt from another beside it": ([], (UP, batch((2, 3, 0, 0, 0), (3, 3, 1, 2, 0))), Code.WRONG_UID),
    "two prompts that take the same": (
        [(UP, kept(1, 2))],
        (UP, batch((2, 3, 2, 1, 1), (3, 3, 2, 1, 1))),
        Code.WRONG_UID,
    ),
    "prompts that take what runs": ([], (UP, batch((2, 3, 2, 1, 1))), Code.WRONG_UID),
    "prompts that take from no one": ([], (UP, batch((2, 3, 0, 0, 1))), Code.FIELD_INVALID),
    "prompts behind more than is held": ([], (UP, batch((2, 4, 3, 1, 0))), Code.OUT_OF_ORDER),
    "a later chunk of prompts together": (
        [(UP, batch((2, 3, 0, 0, 0)))],
        (UP, prompt(2, 3, 4, 1)),
        Code.WRONG_UID,
    ),
    "an Ack of nothing": ([], (DOWN, ack(FIRST)), Code.OUT_OF_ORDER),
    "an Ack twice": ([(UP, step(1)), (DOWN, ack(FIRST))], (DOWN, ack(FIRST)), Code.OUT_OF_ORDER),
    "Acks out of order": ([(UP, step(1)), (UP, step(1))], (DOWN, ack(FIRST + 1)), Code.OUT_OF_ORDER),
    "an Ack of a stop": ([(UP, stop(1))], (DOWN, ack(FIRST)), Code.OUT_OF_ORDER),
    **{
        f"{type(command).__name__} before the Ack": ([(UP, step(1))], (UP, command), Code.OUT_OF_ORDER)
        for command in (msg.SanityCheck(), msg.Unload(), TIME, msg.Shutdown())
    },
}

PIPE_CASES: dict[str, tuple[Sequence[tuple[Side, msg.Message]], tuple[Side, msg.Message], Code]] = {
    "a uid twice": ([], (UP, msg.Generate(1, (5,), 9)), Code.WRONG_UID),
    "uids that go back": ([(UP, msg.Generate(9, (5,), 9))], (UP, msg.Generate(8, (5,), 9)), Code.WRONG_UID),
    "a Cancel before its Generate": ([], (UP, msg.Cancel(2)), Code.WRONG_UID),
    "a Delta for a stranger": ([], (DOWN, delta((2, 0))), Code.WRONG_UID),
    "a Delta after Finished": ([(DOWN, finished(1))], (DOWN, delta((1, 0))), Code.WRONG_UID),
    "a Delta after its Error": ([(DOWN, failed(1))], (DOWN, delta((1, 0))), Code.WRONG_UID),
    "a first token that is not 0": ([], (DOWN, delta((1, 1))), Code.OUT_OF_ORDER),
    "a gap": ([(DOWN, delta((1, 0)))], (DOWN, delta((1, 2))), Code.OUT_OF_ORDER),
    "a repeat": ([(DOWN, delta((1, 0)))], (DOWN, delta((1, 0))), Code.OUT_OF_ORDER),
    "a repeat in one Delta": ([], (DOWN, delta((1, 0), (1, 0))), Code.OUT_OF_ORDER),
    "lists of two lengths": ([], (DOWN, msg.Delta((1,), (0, 1), (9,))), Code.FIELD_INVALID),
    "Accepted for a stranger": ([], (DOWN, msg.Accepted(2)), Code.WRONG_UID),
    "Prefilled for a stranger": ([], (DOWN, msg.Prefilled(2, 5, 0)), Code.WRONG_UID),
    "Prefilled after its Error": ([(DOWN, failed(1))], (DOWN, msg.Prefilled(1, 5, 0)), Code.WRONG_UID),
    "Accepted after its Error": ([(DOWN, failed(1))], (DOWN, msg.Accepted(1)), Code.WRONG_UID),
    "fewer scores than tokens": ([], (DOWN, scored(tokens=2)), Code.FIELD_INVALID),
    "more scores than tokens": ([], (DOWN, scored(logprobs=2)), Code.FIELD_INVALID),
    "fewer alternatives": ([], (DOWN, scored(tokens=2, logprobs=2, top=2, tops=3)), Code.FIELD_INVALID),
    "alternatives not counted": ([], (DOWN, scored(tops=1)), Code.FIELD_INVALID),
    "alternatives without scores": (
        [],
        (DOWN, msg.ScoredDelta(1, 0, (9,), (-1.0,), 1, (9,), ())),
        Code.FIELD_INVALID,
    ),
    "scores that start late": ([], (DOWN, scored(1)), Code.OUT_OF_ORDER),
    "a gap after scores": ([(DOWN, scored(tokens=3, logprobs=3))], (DOWN, delta((1, 2))), Code.OUT_OF_ORDER),
    "scores after Finished": ([(DOWN, finished(1))], (DOWN, scored()), Code.WRONG_UID),
    "Finished twice": ([(DOWN, finished(1))], (DOWN, finished(1)), Code.WRONG_UID),
    "Finished after Error": ([(DOWN, failed(1))], (DOWN, finished(1)), Code.WRONG_UID),
    "an Error for a stranger": ([], (DOWN, failed(2)), Code.WRONG_UID),
    "a Pong unasked": ([], (DOWN, PONG), Code.OUT_OF_ORDER),
    "a Pong twice": ([(UP, msg.Ping()), (DOWN, PONG)], (DOWN, PONG), Code.OUT_OF_ORDER),
}

GONE = msg.Gathered(0, b"", "rank 1 is gone")
BYTES = msg.SideChannel(1, b"abcd")
ROUND_CASES: dict[str, tuple[Sequence[tuple[Side, msg.Message]], tuple[Side, msg.Message], Code]] = {
    "a first round that is not 1": ([], (DOWN, msg.SideChannel(2, b"")), Code.OUT_OF_ORDER),
    "a round before the answer": ([(DOWN, BYTES)], (DOWN, msg.SideChannel(2, b"")), Code.OUT_OF_ORDER),
    "a round twice": ([(DOWN, BYTES), (UP, msg.Gathered(1, b""))], (DOWN, BYTES), Code.OUT_OF_ORDER),
    "an answer to no question": ([], (UP, msg.Gathered(0, b"")), Code.OUT_OF_ORDER),
    "an answer twice": (
        [(DOWN, BYTES), (UP, msg.Gathered(1, b""))],
        (UP, msg.Gathered(1, b"")),
        Code.OUT_OF_ORDER,
    ),
    "an answer to another round": ([(DOWN, BYTES)], (UP, msg.Gathered(2, b"")), Code.OUT_OF_ORDER),
    "an error with bytes": ([(DOWN, BYTES)], (UP, msg.Gathered(1, b"abcd", "no")), Code.FIELD_INVALID),
    "an error twice": ([(UP, GONE)], (UP, GONE), Code.OUT_OF_ORDER),
    "an answer after the error": ([(DOWN, BYTES), (UP, GONE)], (UP, msg.Gathered(1, b"")), Code.OUT_OF_ORDER),
}
"""Of a rank that forms the group."""


TABLES = {LinkKind.PIPE: ROUND_CASES, LinkKind.DECODE: DECODE_CASES, LinkKind.PIPE_LEADER: PIPE_CASES}
CASES = [(link, name) for link, cases in TABLES.items() for name in cases]


def after(link: LinkKind, name: str) -> tuple[Pair, Side, msg.Message, Code]:
    said, (side, wrong), code = TABLES[link][name]
    pair = pair_in(link, LinkState.LINKED if link is LinkKind.PIPE else LinkState.LOADED)
    for sender, message in said:
        pair.move(sender, message)
    return pair, side, wrong, code


@pytest.mark.parametrize(("link", "name"), CASES)
def test_it_is_not_sent(link: LinkKind, name: str) -> None:
    pair, side, wrong, code = after(link, name)
    with pytest.raises(LocalProtocolError) as caught:
        pair.end(side).send(wrong)
    assert caught.value.code is code
    assert type(wrong).__name__ in caught.value.detail
    assert pair.end(side).state is LinkState.FAILED


@pytest.mark.parametrize(("link", "name"), CASES)
def test_it_is_not_accepted(link: LinkKind, name: str) -> None:
    pair, side, wrong, code = after(link, name)
    receiver = pair.end(side.peer)
    with pytest.raises(RemoteProtocolError) as caught:
        receiver.receive_data(encode(wrong, EPOCH, pair.end(side).seq + 1))
    assert caught.value.code is code
    assert receiver.state is LinkState.FAILED


def test_the_seq_of_the_cases() -> None:
    assert pair_in(LinkKind.DECODE, LinkState.LOADED).upper.seq == FIRST - 1


def test_a_cancel_may_come_late() -> None:
    pair = pair_in(LinkKind.PIPE_LEADER, LinkState.LOADED)
    pair.down(finished(1))
    pair.up(msg.Cancel(1), msg.Cancel(1))


def test_sequences_that_begin_alike_start_from_each_other() -> None:
    link = pair_in(LinkKind.DECODE, LinkState.LOADED)
    link.up(behind(1, 2, uid=2), behind(1, 1, uid=3))  # copies of a row that runs
    link.up(step(1), kept(1, 3))
    link.up(behind(1, 3, uid=4), behind(1, 2, uid=5), behind(1, 1, uid=6, take=True))
    link.up(kept(4, 4), prompt(5, 3, 50, 47), msg.Evict((4,)))
    for end in (link.upper, link.lower):
        assert not sequences(end).kept


def test_prompts_together_run_at_once() -> None:
    link = pair_in(LinkKind.DECODE, LinkState.LOADED)
    link.up(kept(1, 2), batch((2, 3, 0, 0, 0), (4, 3, 2, 1, 0), (5, 3, 1, 1, 1)))
    link.up(msg.Forward((2, 4, 5), (3, 3, 3)), kept(4, 4), behind(4, 4, uid=6))
    assert link.upper.outstanding == 3
    link.down(ack(link.upper.seq - 3))


def test_what_was_drafted_may_be_kept_or_rolled_back() -> None:
    link = pair_in(LinkKind.DECODE, LinkState.LOADED)
    link.up(wide((4,), 4), wide((), 0, (3,)), wide((2,), 2, (4,)), behind(1, 6), kept(1, 6))
    assert sequences(link.lower).kept == {1: 6}


def test_rows_that_feed_different_widths() -> None:
    link = pair_in(LinkKind.DECODE, LinkState.LOADED)
    link.up(prompt(2, 0, 3, 3), msg.Forward((1, 2), (2, 3), (0, 3), (5, 6, 7)))
    link.up(msg.Forward((2, 1), (6, 3)))


@pytest.mark.parametrize("command", [msg.Unload(), msg.Shutdown()])
def test_a_command_that_ends_everything_is_the_end_of_what_was_kept(command: msg.Message) -> None:
    link = pair_in(LinkKind.DECODE, LinkState.LOADED)
    link.up(prompt(2, 0, 1, 1), prompt(3, 0, 9, 1), kept(1, 2))
    for seq in (FIRST, FIRST + 1):
        link.down(ack(seq))
    link.up(command)
    link.down(msg.Done())
    for end in (link.upper, link.lower):
        ledger = sequences(end)
        assert not ledger.kept
        assert not ledger.running
        assert not ledger.prompts
        assert ledger.last_uid == 3


def test_scores_count_as_tokens() -> None:
    pipe = pair_in(LinkKind.PIPE_LEADER, LinkState.LOADED)
    pipe.down(msg.Accepted(1), scored(0, 2, 2, 2, 4), delta((1, 2)), scored(3))
    assert requests(pipe.upper).tokens == {1: 4}


def test_nothing_is_kept_of_what_is_over() -> None:
    decode = pair_in(LinkKind.DECODE, LinkState.LOADED)
    pipe = pair_in(LinkKind.PIPE_LEADER, LinkState.LOADED)
    decode.up(stop(1))
    pipe.down(finished(1))
    for uid in range(2, 500):
        decode.up(prompt(uid, 0, 1, 1))
        decode.down(ack(decode.upper.seq))
        decode.up(kept(uid, 1) if uid % 3 else stop(uid))
        if uid % 3:
            decode.up(msg.Evict((uid,)))
        pipe.up(msg.Generate(uid, (5,), 9))
        pipe.down(delta((uid, 0)), finished(uid))
    for end in (decode.upper, decode.lower):
        ledger = sequences(end)
        assert not ledger.prompts
        assert not ledger.running
        assert not ledger.kept
        assert not ledger.steps
    for end in (pipe.upper, pipe.lower):
        assert not requests(end).tokens
