"""Rules between messages: each is broken once, in both directions, and every time the same code comes out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxtp.errors import Code, LocalProtocolError, RemoteProtocolError
from mlxtp.wire import messages as msg
from mlxtp.wire.frames import encode
from mlxtp.wire.rank_stats import RankStats
from mlxtp.wire.session import LinkKind, LinkState, Side

from .forwards import of_prompt, of_prompts
from .walk import EPOCH, Pair, pair_in, requests, sequences

PONG = msg.Pong("idle", 0.0, 0, 0, "", RankStats())
DOWN = (
    msg.Ack, msg.FetchedBlocks, msg.Accepted, msg.Prefilled, msg.Delta, msg.ScoredDelta, msg.Vectors,
    msg.Finished, msg.Error, msg.Pong, msg.SideChannel,
)  # fmt: skip
"""What the lower side sends; the upper one sends the others."""
Cases = dict[str, tuple[Any, ...]]
UID, ORDER, FIELD = Code.WRONG_UID, Code.OUT_OF_ORDER, Code.FIELD_INVALID
DIGEST = b"d" * 16


def step(*rows: int) -> msg.Forward:
    return msg.Forward(rows, (2,) * len(rows))


def wide(widths: tuple[int, ...], tokens: int, positions: tuple[int, ...] = (2,)) -> msg.Forward:
    return msg.Forward((1,), positions, widths, (5,) * tokens)


def behind(source: int, offset: int, total: int = 50, *, uid: int = 2, take: bool = False) -> msg.Forward:
    return of_prompt(uid, offset, total, (5,), source=source, take=take)


def batch(*prompts: tuple[int, int, int, int, int]) -> msg.Forward:
    """Of each prompt: uid, total, offset, source, take."""
    uids, totals, offsets, sources, takes = zip(*prompts, strict=True)
    return of_prompts(uids, totals, offsets, (5,) * (sum(totals) - sum(offsets)), sources, takes)


def kept(uid: int, keep: int) -> msg.SessionStop:
    return msg.SessionStop(uid, "stop", 1, keep)


def scored(
    index: int = 0, tokens: int = 1, logprobs: int = 1, top: int = 0, tops: int = 0
) -> msg.ScoredDelta:
    return msg.ScoredDelta(1, index, (9,) * tokens, (-1.0,) * logprobs, top, (9,) * tops, (-1.0,) * tops)


def prompt(uid: int, offset: int, total: int, count: int) -> msg.Forward:
    return of_prompt(uid, offset, total, (5,) * count)


def parts(*prompts: tuple[int, int, int, int], save: int = 0, source: int = 0) -> msg.Forward:
    """Of each prompt: uid, offset, total, count. The first is saved, the last has a source."""
    uids, offsets, totals, counts = zip(*prompts, strict=True)
    own = [msg.PromptPart(total) for total in totals]
    own[0], own[-1] = replace(own[0], save=save), replace(own[-1], source=source)
    return msg.Forward(uids, offsets, counts, (5,) * sum(counts), prompts=tuple(own))


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


TIME = msg.TimeCollectives("sum", 1024, 8)
COMMANDS = (msg.SanityCheck(), msg.Unload(), TIME, msg.Shutdown())
# Each case starts in LOADED with uid 1 live: its prompt complete on a decode link, where seqs go on from
# FIRST; without tokens on a pipe. It has the code of its last message, which is wrong; those before are not.
FIRST = 6

BEGUN = parts((2, 0, 9, 2), (3, 0, 9, 2))
COPY = of_prompt(2, 0, 9, (5, 5), save=3)
FETCH, FETCHED = msg.FetchBlocks(2, 2, DIGEST), msg.FetchedBlocks(2, 1)
DECODE_CASES: Cases = {
    "a prompt for an old uid": (UID, stop(1), prompt(1, 0, 2, 2)),
    "a prompt for a running uid": (UID, prompt(1, 0, 2, 2)),
    "uids that go back": (UID, prompt(9, 0, 2, 2), prompt(8, 0, 2, 2)),
    "a prompt that starts late": (ORDER, prompt(2, 1, 3, 2)),
    "a gap between chunks": (ORDER, prompt(2, 0, 9, 2), prompt(2, 3, 9, 1)),
    "a chunk twice": (ORDER, prompt(2, 0, 9, 2), prompt(2, 0, 9, 2)),
    "another total": (ORDER, prompt(2, 0, 9, 2), prompt(2, 2, 8, 1)),
    "past the total": (FIELD, prompt(2, 0, 3, 2), prompt(2, 2, 3, 2)),
    "one prompt that ends and one that does not": (FIELD, parts((2, 0, 2, 2), (3, 0, 9, 2))),
    "one that does not and one that ends": (FIELD, parts((2, 0, 9, 2), (3, 0, 2, 2))),
    "a prompt twice in a forward": (UID, parts((2, 0, 9, 2), (2, 2, 9, 2))),
    "a gap in a prompt beside others": (ORDER, BEGUN, parts((2, 2, 9, 7), (3, 3, 9, 6))),
    "a copy of the same forward for a source": (UID, parts((2, 0, 9, 2), (3, 2, 9, 2), save=4, source=4)),
    "a row that feeds too many": (
        FIELD,
        wide((msg.MAX_WIDTH,), msg.MAX_WIDTH),
        wide((msg.MAX_WIDTH + 1,), msg.MAX_WIDTH + 1),
    ),
    "tokens of the same forward twice": (ORDER, msg.ChosenTokens(2, (5,)), msg.ChosenTokens(2, (5,))),
    "tokens of an older forward": (ORDER, msg.ChosenTokens(2, (5,)), msg.ChosenTokens(1, (5,))),
    "fewer rooms than rows": (FIELD, prompt(2, 0, 1, 1), msg.Arrange((64,))),
    "lanes for more than its rooms": (FIELD, msg.Arrange((64,), lanes=(0, 0))),
    "lanes for more than its rows": (FIELD, msg.Arrange(lanes=(0, 0))),
    "logits of a row that is not in the step": (UID, replace(step(1), gathered=(7,))),
    "a step for a stranger": (UID, step(1, 2)),
    "a step for half a prompt": (UID, prompt(2, 0, 9, 2), step(2)),
    "a step for a stopped uid": (UID, stop(1), step(1)),
    "a row twice": (UID, step(1, 1)),
    "a stop for a stranger": (UID, stop(2)),
    "a stop twice": (UID, stop(1), stop(1)),
    "a prompt after its stop": (UID, prompt(2, 0, 9, 2), stop(2), prompt(2, 2, 9, 2)),
    "a step without positions for all": (FIELD, msg.Forward((1,), (2, 2))),
    "widths for more than its rows": (FIELD, wide((1, 1), 2)),
    "fewer tokens than widths": (FIELD, wide((2,), 1)),
    "more tokens than widths": (FIELD, wide((2,), 3)),
    "tokens without widths": (FIELD, wide((), 1)),
    "a step past the prompt": (ORDER, wide((), 0, (3,))),
    "a step past the last one": (ORDER, step(1), wide((), 0, (4,))),
    "a step past a row that feeds nothing": (ORDER, wide((0,), 0), wide((), 0, (4,))),
    "a step past the drafts": (ORDER, wide((3,), 3), wide((), 0, (6,))),
    "a source that never was": (UID, behind(9, 2)),
    "a source that was not kept": (UID, stop(1), behind(1, 2)),
    "a source that is half a prompt": (UID, prompt(2, 0, 9, 2), behind(2, 2, uid=3)),
    "itself for a source": (UID, behind(2, 2)),
    "taking what runs": (UID, behind(1, 2, take=True)),
    "taking what was taken": (UID, kept(1, 2), behind(1, 2, take=True), behind(1, 2, uid=3)),
    "taking from no one": (FIELD, of_prompt(2, 0, 2, (5, 5), take=True)),
    "a start behind more than runs": (ORDER, behind(1, 3)),
    "a start behind more than was kept": (ORDER, kept(1, 1), behind(1, 2)),
    "a start behind nothing of a source": (ORDER, behind(1, 0)),
    "a start behind the whole prompt": (FIELD, behind(1, 2, 2)),
    "a source in a later chunk": (ORDER, behind(1, 2), behind(1, 3)),
    "a gap after a source": (ORDER, behind(1, 2), prompt(2, 4, 50, 1)),
    "a copy under an old uid": (UID, of_prompt(2, 0, 9, (5, 5), save=1)),
    "a copy under its own uid": (UID, of_prompt(2, 0, 9, (5, 5), save=2)),
    "a copy of a whole prompt": (FIELD, of_prompt(2, 0, 2, (5, 5), save=3)),
    "a prompt under the uid of a copy": (UID, COPY, prompt(3, 0, 2, 2)),
    "a start behind more than a copy holds": (ORDER, COPY, behind(3, 3, uid=4)),
    "dropping a copy twice": (UID, COPY, msg.Evict((3,)), msg.Evict((3,))),
    "covering what is not kept": (UID, COPY, of_prompt(2, 2, 9, (5, 5), save=4, covers=(2,))),
    "covering as much as itself": (UID, COPY, msg.SessionStop(2, "stop", 1, keep=2, covers=(3,))),
    "covering with nothing": (UID, COPY, of_prompt(2, 2, 9, (5, 5), covers=(3,))),
    "keeping more than a prompt": (ORDER, kept(1, 3)),
    "keeping more than was fed": (ORDER, step(1), kept(1, 4)),
    "keeping more than half a prompt": (ORDER, prompt(2, 0, 9, 2), kept(2, 3)),
    "dropping what runs": (UID, msg.Evict((1,))),
    "dropping what was not kept": (UID, stop(1), msg.Evict((1,))),
    "dropping twice": (UID, kept(1, 2), msg.Evict((1,)), msg.Evict((1,))),
    "dropping twice at once": (UID, kept(1, 2), msg.Evict((1, 1))),
    "dropping what was taken": (UID, kept(1, 2), behind(1, 2, take=True), msg.Evict((1,))),
    "a start from what was dropped": (UID, kept(1, 2), msg.Evict((1,)), behind(1, 2)),
    "spilling more than is held": (ORDER, kept(1, 2), msg.Spill(1, 0, 3, DIGEST)),
    "spilling what is not there": (ORDER, stop(1), msg.Spill(1, 0, 1, DIGEST)),
    "spilling nothing": (ORDER, msg.Spill(1, 1, 1, DIGEST)),
    "fetching under an old uid": (UID, msg.FetchBlocks(1, 2, DIGEST)),
    "fetching more than a context": (FIELD, msg.FetchBlocks(2, msg.MAX_CONTEXT, DIGEST * 2)),
    "half a digest": (FIELD, msg.FetchBlocks(2, 2, DIGEST + b"half")),
    "having fetched what was not wanted": (UID, FETCHED),
    "having fetched twice": (UID, FETCH, FETCHED, FETCHED),
    "having fetched more than was wanted": (FIELD, FETCH, msg.FetchedBlocks(2, 2)),
    "restoring what was not fetched": (UID, msg.Restore(2, 0)),
    "restoring before it is fetched": (ORDER, FETCH, msg.Restore(2, 1)),
    "restoring more than was fetched": (ORDER, msg.FetchBlocks(2, 2, DIGEST * 2), FETCHED, msg.Restore(2, 2)),
    "restoring twice": (UID, FETCH, FETCHED, msg.Restore(2, 1), msg.Restore(2, 1)),
    "a start from what was not restored": (UID, FETCH, FETCHED, msg.Restore(2, 0), behind(2, 2, uid=3)),
    "a step for what was kept": (UID, kept(1, 2), step(1)),
    "prompts with fewer samplings": (FIELD, replace(BEGUN, prompts=BEGUN.prompts[:1])),
    "a prompt of nothing among others": (FIELD, batch((2, 2, 2, 1, 0), (3, 2, 0, 0, 0))),
    "a prompt from another beside it": (UID, batch((2, 3, 0, 0, 0), (3, 3, 1, 2, 0))),
    "two prompts that take the same": (UID, kept(1, 2), batch((2, 3, 2, 1, 1), (3, 3, 2, 1, 1))),
    "an Ack of nothing": (ORDER, ack(FIRST)),
    "an Ack twice": (ORDER, step(1), ack(FIRST), ack(FIRST)),
    "Acks out of order": (ORDER, step(1), step(1), ack(FIRST + 1)),
    "an Ack of a stop": (ORDER, stop(1), ack(FIRST)),
    **{f"{type(command).__name__} before the Ack": (ORDER, step(1), command) for command in COMMANDS},
}

PIPE_CASES: Cases = {
    "a uid twice": (UID, msg.Generate(1, (5,), 9)),
    "uids that go back": (UID, msg.Generate(9, (5,), 9), msg.Generate(8, (5,), 9)),
    "a Cancel before its Generate": (UID, msg.Cancel(2)),
    "a Delta for a stranger": (UID, delta((2, 0))),
    "a Delta after Finished": (UID, finished(1), delta((1, 0))),
    "a Delta after its Error": (UID, failed(1), delta((1, 0))),
    "a first token that is not 0": (ORDER, delta((1, 1))),
    "a gap": (ORDER, delta((1, 0)), delta((1, 2))),
    "a repeat": (ORDER, delta((1, 0)), delta((1, 0))),
    "a repeat in one Delta": (ORDER, delta((1, 0), (1, 0))),
    "lists of two lengths": (FIELD, msg.Delta((1,), (0, 1), (9,))),
    "Accepted for a stranger": (UID, msg.Accepted(2)),
    "Prefilled for a stranger": (UID, msg.Prefilled(2, 5, 0)),
    "Prefilled after its Error": (UID, failed(1), msg.Prefilled(1, 5, 0)),
    "Accepted after its Error": (UID, failed(1), msg.Accepted(1)),
    "fewer scores than tokens": (FIELD, scored(tokens=2)),
    "more scores than tokens": (FIELD, scored(logprobs=2)),
    "fewer alternatives": (FIELD, scored(tokens=2, logprobs=2, top=2, tops=3)),
    "alternatives not counted": (FIELD, scored(tops=1)),
    "alternatives without scores": (FIELD, msg.ScoredDelta(1, 0, (9,), (-1.0,), 1, (9,), ())),
    "scores that start late": (ORDER, scored(1)),
    "a gap after scores": (ORDER, scored(tokens=3, logprobs=3), delta((1, 2))),
    "scores after Finished": (UID, finished(1), scored()),
    "vectors for a stranger": (UID, msg.Vectors(2, (0,), bytes(8))),
    "vectors of unequal lengths": (FIELD, msg.Vectors(1, (0, 1), bytes(12))),
    "texts of other lengths": (FIELD, msg.Generate(9, (5, 6), 9, pooling=msg.Pooling((1, 2)))),
    "Finished twice": (UID, finished(1), finished(1)),
    "Finished after Error": (UID, failed(1), finished(1)),
    "an Error for a stranger": (UID, failed(2)),
    "a Pong unasked": (ORDER, PONG),
    "a Pong twice": (ORDER, msg.Ping(), PONG, PONG),
}

GONE = msg.Gathered(0, b"", "rank 1 is gone")
BYTES = msg.SideChannel(1, b"abcd")
ROUND_CASES: Cases = {
    "a first round that is not 1": (ORDER, msg.SideChannel(2, b"")),
    "a round before the answer": (ORDER, BYTES, msg.SideChannel(2, b"")),
    "a round twice": (ORDER, BYTES, msg.Gathered(1, b""), BYTES),
    "an answer to no question": (ORDER, msg.Gathered(0, b"")),
    "an answer twice": (ORDER, BYTES, msg.Gathered(1, b""), msg.Gathered(1, b"")),
    "an answer to another round": (ORDER, BYTES, msg.Gathered(2, b"")),
    "an error with bytes": (FIELD, BYTES, msg.Gathered(1, b"abcd", "no")),
    "an error twice": (ORDER, GONE, GONE),
    "an answer after the error": (ORDER, BYTES, GONE, msg.Gathered(1, b"")),
}
"""Of a rank that forms the group."""


TABLES = {LinkKind.PIPE: ROUND_CASES, LinkKind.DECODE: DECODE_CASES, LinkKind.PIPE_LEADER: PIPE_CASES}
CASES = [(link, name) for link, cases in TABLES.items() for name in cases]


def after(link: LinkKind, name: str) -> tuple[Pair, Side, msg.Message, Code]:
    code, *said, wrong = TABLES[link][name]
    pair = pair_in(link, LinkState.LINKED if link is LinkKind.PIPE else LinkState.LOADED)
    for message in said:
        pair.move(side_of(message), message)
    return pair, side_of(wrong), wrong, code


def side_of(message: msg.Message) -> Side:
    return Side.LOWER if isinstance(message, DOWN) else Side.UPPER


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


def test_what_comes_back_from_disk_is_kept_like_all_else() -> None:
    link = pair_in(LinkKind.DECODE, LinkState.LOADED)
    link.up(kept(1, 1), FETCH)
    link.down(FETCHED)
    link.up(msg.Restore(2, 1), behind(2, 2, uid=3), msg.SessionStop(3, "stop", 1, keep=3, covers=(1, 2)))
    link.up(prompt(4, 0, 9, 2), msg.Spill(4, 0, 2, DIGEST))
    link.up(of_prompt(4, 2, 9, (5, 5), save=5, covers=(1, 3)), behind(5, 4, uid=6))


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
    link.up(msg.Forward((2, 1), (6, 3), gathered=(1, 2)))


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
        assert not [*ledger.kept, *ledger.running, *ledger.prompts]
        assert (ledger.last_uid, ledger.chosen) == (3, 0)


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
        assert not [*ledger.prompts, *ledger.running, *ledger.kept, *ledger.steps]
    for end in (pipe.upper, pipe.lower):
        assert not requests(end).tokens
