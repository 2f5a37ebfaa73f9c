"""One end of a link against the other: whole lives, every illegal move, the envelope, the end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.errors import Code, LinkError, LocalProtocolError, RemoteProtocolError
from mlxtp.wire.cluster_messages import BOTH_WAYS
from mlxtp.wire.frames import encode, messages
from mlxtp.wire.messages import (
    Accepted,
    Ack,
    Arrange,
    Cancel,
    ChosenTokens,
    Delta,
    Done,
    Error,
    Evict,
    FetchBlocks,
    FetchedBlocks,
    Finished,
    Forward,
    Gathered,
    Generate,
    Init,
    KvBudget,
    LoadShard,
    Message,
    Ping,
    Pong,
    Prefilled,
    Restore,
    Sampling,
    SanityCheck,
    ScoredDelta,
    SessionEnd,
    SessionStop,
    Shutdown,
    SideChannel,
    Spill,
    TimeCollectives,
    Unload,
)
from mlxtp.wire.protocol import TERMINAL, RequestFailed, table
from mlxtp.wire.session import DecodeLedger, LinkKind, LinkState, PipeLedger, Received, Session, Side

from .forwards import of_prompt, of_prompts
from .samples import EXAMPLES, MESSAGE
from .walk import EPOCH, USUAL, Pair, example, pair_in, path_to, requests, sequences

EVERYWHERE = [(link, state) for link in LinkKind for state in LinkState if state in table(link)]
KINDS: list[type[Message]] = [*messages().values(), RequestFailed]


def say(name: str) -> Message:
    return next(message for kind, message in EXAMPLES.items() if kind.__name__ == name)


# --- stories ----------------------------------------------------------------------------------------


def test_the_life_of_a_decode_link() -> None:
    link = Pair.of(LinkKind.DECODE)
    link.down(say("Hello"))
    link.up(say("Welcome"))
    link.up(Init())
    link.down(say("InitDone"))
    link.up(SanityCheck())
    link.down(say("SanityDone"))

    link.up(LoadShard("/models/missing", 512, ()))
    link.down(Error(Code.MODEL_INVALID, "no such folder", 0))
    assert link.upper.state is LinkState.PROVEN, "a load that failed leaves the group usable"
    link.up(Unload())  # other ranks could load it
    link.down(Done())
    link.up(LoadShard("/models/tiny", 512, ()))
    link.down(say("Loaded"))

    link.up(of_prompt(1, 0, 5, (10, 11, 12)))
    link.up(of_prompt(1, 3, 5, (13, 14)))  # ahead of the first one's Ack
    first, second = link.upper.seq - 1, link.upper.seq
    assert link.upper.outstanding == link.lower.outstanding == 2
    link.down(Ack(first, 1, 2, 0))
    link.up(Forward((1,), (5,)))
    link.up(ChosenTokens(2, (7,)))
    link.down(Ack(second, 2, 4, 99), Ack(link.upper.seq - 1, 3, 6, 98))
    link.up(of_prompt(2, 0, 1, (20,)), Forward((2, 1), (1, 6)))
    link.up(SessionStop(1, "stop", 4, keep=6))
    link.down(Ack(link.upper.seq - 2, 4, 8, 97), Ack(link.upper.seq - 1, 5, 10, 96))

    link.up(Forward((2,), (2,), (4,), (21, 22, 23, 24)))
    link.down(Ack(link.upper.seq, 6, 12, 95))
    link.up(of_prompt(3, 3, 5, (30, 31), source=1, take=True))
    link.down(Ack(link.upper.seq, 7, 14, 94))
    link.up(SanityCheck())
    assert link.lower.state is LinkState.CHECKING
    link.down(say("SanityDone"))
    link.up(say("TimeCollectives"))
    assert link.lower.state is LinkState.MEASURING
    link.down(say("CollectivesTimed"))
    link.up(Forward((2, 3), (4, 5)))
    link.down(Ack(link.upper.seq, 8, 16, 93))
    link.up(Unload())
    link.down(Done())
    link.up(Shutdown())
    link.down(Done(), SessionEnd())

    assert link.upper.closed
    assert link.lower.closed
    link.upper.receive_eof()
    link.lower.receive_eof()


def test_the_life_of_a_pipe_to_rank_0() -> None:
    pipe = Pair.of(LinkKind.PIPE_LEADER)
    pipe.down(say("Hello"))
    pipe.up(say("Welcome"), Ping(), say("Bootstrap"))
    pipe.down(say("Pong"), Done())
    pipe.up(Init())
    pipe.up(Ping(), Ping())
    pipe.down(say("Pong"), say("InitDone"), say("Pong"))
    pipe.up(SanityCheck())
    pipe.down(say("SanityDone"))
    pipe.up(say("LoadShard"))
    pipe.down(say("Loaded"))

    pipe.up(Generate(1, (5, 6), 10), Generate(2, (7,), 10), Generate(5, (8,), 10))
    pipe.down(Accepted(1), Accepted(2), Delta((1,), (0,), (50,)))
    pipe.down(ScoredDelta(1, 1, (51, 52), (-0.5, -1.0), 1, (51, 53), (-0.5, -0.25)))
    pipe.down(Delta((1, 2), (3, 0), (53, 60)))
    pipe.down(Error(Code.CONTEXT_OVERFLOW, "too long", 5))
    pipe.up(Cancel(5), Cancel(2))
    pipe.down(Delta((2, 2), (1, 2), (61, 62)), Finished(2, "cancel", 3, 3))
    pipe.down(Finished(1, "stop", 4, 4, cached=1, drafted=2, accepted=1))

    pipe.up(Generate(6, (9,), 10))
    pipe.up(KvBudget(1 << 20), Generate(7, (9,), 10))
    pipe.down(Accepted(6), Accepted(7), Error(Code.CONTEXT_OVERFLOW, "outgrown", 7), say("Loaded"))
    assert pipe.upper.state is LinkState.LOADED
    pipe.up(Unload(), Cancel(6))
    pipe.down(Delta((6, 6, 6), (0, 1, 2), (70, 71, 72)))  # it crossed the Unload
    pipe.down(Done())
    pipe.up(Shutdown())
    pipe.down(Done(), SessionEnd())
    assert pipe.upper.closed
    assert pipe.lower.closed


def test_the_life_of_a_plain_pipe() -> None:
    pipe = Pair.of(LinkKind.PIPE)
    pipe.down(say("Hello"))
    pipe.up(say("Welcome"), say("Bootstrap"))
    pipe.down(Done())
    pipe.up(Ping())
    pipe.down(say("Pong"))
    pipe.up(Shutdown())
    pipe.down(Done(), SessionEnd())
    assert pipe.upper.closed


def test_the_life_of_a_join_link() -> None:
    link = Pair.of(LinkKind.JOIN)
    link.up(say("JoinOffer"))
    link.down(say("JoinRequest"))
    link.up(say("JoinGrant"))
    for end in (link.upper, link.lower):
        assert end.closed
        end.receive_eof()


def test_a_joiner_that_is_refused() -> None:
    link = pair_in(LinkKind.JOIN, LinkState.ASKED)
    link.up(Error(Code.JOIN_REFUSED, "the token has expired", 0))
    assert link.lower.closed


@pytest.mark.parametrize("state", [LinkState.NEW, LinkState.OFFERED, LinkState.ASKED])
def test_who_joins_is_given_little_room_to_the_end(state: LinkState) -> None:
    pair = pair_in(LinkKind.JOIN, state)
    for end in (pair.upper, pair.lower):
        with pytest.raises(RemoteProtocolError) as caught:
            end.receive_data(encode(LoadShard("x" * 4000, 512, (1,) * 64), EPOCH, 1))
        assert caught.value.code is Code.FRAME_OVERSIZE


@pytest.mark.parametrize("kind", [LinkKind.PIPE, LinkKind.PIPE_LEADER])
def test_the_side_channel_of_a_rank_that_forms(kind: LinkKind) -> None:
    pipe = pair_in(kind, LinkState.LINKED)
    if kind is LinkKind.PIPE_LEADER:
        pipe.up(Init())
    pipe.down(SideChannel(1, b"abcd"))
    pipe.up(Ping(), Gathered(1, b"abcdABCD"))
    pipe.down(say("Pong"), SideChannel(2, b""))
    pipe.up(Gathered(2, b""))
    if kind is LinkKind.PIPE_LEADER:
        pipe.down(say("InitDone"))
    pipe.up(Gathered(2, b"", "rank 1 did not form"))
    pipe.up(Shutdown())
    pipe.down(Done(), SessionEnd())


@pytest.mark.parametrize(
    ("kind", "state"), [(LinkKind.PIPE, LinkState.LINKED), (LinkKind.PIPE_LEADER, LinkState.FORMING)]
)
def test_a_round_that_crosses_what_ends_it(kind: LinkKind, state: LinkState) -> None:
    pipe = pair_in(kind, state)
    error = pipe.upper.send(Gathered(0, b"", "rank 1 is gone"))
    late = pipe.lower.send(SideChannel(1, b"abcd"))
    assert len(pipe.upper.receive_data(late)) == len(pipe.lower.receive_data(error)) == 1
    pipe = pair_in(kind, state)
    shutdown = pipe.upper.send(Shutdown())
    late = pipe.lower.send(SideChannel(1, b"abcd"))
    assert len(pipe.upper.receive_data(late)) == len(pipe.lower.receive_data(shutdown)) == 1
    if kind is LinkKind.PIPE_LEADER:
        pipe.down(say("InitDone"))
    pipe.down(Done(), SessionEnd())


def test_a_hello_that_is_refused() -> None:
    link = pair_in(LinkKind.DECODE, LinkState.GREETED)
    link.up(Error(Code.NOT_AUTHENTIC, "another epoch's key", 0))
    assert link.lower.closed
    link.lower.receive_eof()


def test_tokens_on_their_way_when_shutdown_was_sent() -> None:
    pipe = pair_in(LinkKind.PIPE_LEADER, LinkState.LOADED)
    shutdown = pipe.upper.send(Shutdown())
    late = pipe.lower.send(Delta((1,), (0,), (50,))) + pipe.lower.send(Finished(1, "stop", 1, 1))
    assert len(pipe.upper.receive_data(late)) == 2
    pipe.lower.receive_data(shutdown)
    pipe.down(Done(), SessionEnd())


@pytest.mark.parametrize("crossed", [True, False])
@pytest.mark.parametrize(
    ("state", "reply"),
    [
        (LinkState.LINKING, "Done"),
        (LinkState.FORMING, "InitDone"),
        (LinkState.PROVING, "SanityDone"),
        (LinkState.LOADING, "Loaded"),
        (LinkState.LOADING, "Error"),
        (LinkState.UNLOADING, "Done"),
    ],
)
def test_shutdown_of_a_busy_rank_gets_both_replies(state: LinkState, reply: str, crossed: bool) -> None:
    pipe = pair_in(LinkKind.PIPE_LEADER, state)
    shutdown = pipe.upper.send(Shutdown())
    if crossed:
        pipe.upper.receive_data(pipe.lower.send(say(reply)))
        pipe.lower.receive_data(shutdown)
    else:
        pipe.lower.receive_data(shutdown)
        pipe.down(say(reply))
    pipe.down(Done(), SessionEnd())
    assert pipe.upper.closed


# --- order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("link", "state"), EVERYWHERE)
def test_every_legal_move_leads_where_the_table_says(link: LinkKind, state: LinkState) -> None:
    for side in Side:
        for kind, end in table(link)[state][side].items():
            if kind is FetchedBlocks and state is not LinkState.LOADED:
                continue  # the way here led past no FetchBlocks; the next test has it
            pair = pair_in(link, state)
            if kind is Cancel and not requests(pair.upper).last_uid:
                continue  # the way here led past no request
            prepare(pair, kind)
            pair.move(side, legal(pair, kind))
            assert pair.upper.state is end


@pytest.mark.parametrize("command", [SanityCheck(), TimeCollectives("sum", 8, 1), Unload(), Shutdown()])
def test_what_was_read_from_disk_may_cross_a_command(command: Message) -> None:
    pair = pair_in(LinkKind.DECODE, LinkState.LOADED)
    pair.up(FetchBlocks(2, 256, b"d" * 16), FetchBlocks(3, 256, b"d" * 16), Restore(3, 0), command)
    pair.down(FetchedBlocks(2, 1), FetchedBlocks(3, 1))
    assert pair.upper.state is pair.lower.state is not LinkState.FAILED


def prepare(pair: Pair, kind: type[Message]) -> None:
    """Send what must have come before, other than what the state tells."""
    if kind is Pong:
        pair.up(Ping())
    if kind is Ack:
        pair.up(Forward((1,), (2,)))
    if kind is Evict:
        pair.up(SessionStop(1, "stop", 1, keep=2))
    if kind in (FetchedBlocks, Restore) and 2 not in sequences(pair.upper).fetches:
        pair.up(FetchBlocks(2, 256, b"d" * 32))
    if kind is Restore:
        pair.down(FetchedBlocks(2, 1))


def legal(pair: Pair, kind: type[Message]) -> Message:
    if kind is Ack:
        return Ack(pair.upper.seq, 1, 1, 0)
    if kind is Generate:
        return Generate(2, (5,), 10)
    if kind is Forward:
        return Forward((1,), (2,))
    if kind in (FetchedBlocks, Restore):
        return kind(2, 1)
    if kind is FetchBlocks:
        return FetchBlocks(3, 256, b"d" * 32)
    return example(kind)


@pytest.mark.parametrize(("link", "state"), EVERYWHERE)
def test_every_illegal_move_is_refused_at_both_ends(link: LinkKind, state: LinkState) -> None:
    for side in Side:
        for kind in KINDS:
            if kind not in table(link)[state][side]:
                refuse_to_send(link, state, side, example(kind))
                refuse_to_receive(link, state, side, example(kind))


def refuse_to_send(link: LinkKind, state: LinkState, side: Side, message: Message) -> None:
    sender = pair_in(link, state).end(side)
    if state in TERMINAL:
        with pytest.raises(LinkError, match=f"in state {state}"):
            sender.send(message)
        assert sender.state is state
        return
    for attempt in (message, Ping(), Done()):
        with pytest.raises(LocalProtocolError) as caught:
            sender.send(attempt)
        assert caught.value.code is Code.OUT_OF_ORDER
        for part in (str(link), link.who(side), type(message).__name__, f"in state {state}"):
            assert part in caught.value.detail
    assert sender.state is LinkState.FAILED
    with pytest.raises(LocalProtocolError):
        sender.receive_data(b"")
    with pytest.raises(LocalProtocolError):
        sender.receive_eof()


def refuse_to_receive(link: LinkKind, state: LinkState, side: Side, message: Message) -> None:
    pair = pair_in(link, state)
    receiver = pair.end(side.peer)
    frame = encode(message, EPOCH, pair.end(side).seq + 1)
    if state in TERMINAL and path_to(link, state)[-1][0] is receiver.side:
        assert receiver.receive_data(frame) == [], "what was on its way when we ended is discarded"
        receiver.receive_eof()
        return
    with pytest.raises(RemoteProtocolError) as caught:
        receiver.receive_data(frame)
    assert caught.value.code is Code.OUT_OF_ORDER
    for part in (str(link), link.who(side), type(message).__name__, f"in state {state}"):
        assert part in caught.value.detail
    assert receiver.state is LinkState.FAILED
    with pytest.raises(RemoteProtocolError, match="may not send"):
        receiver.receive_data(b"")
    with pytest.raises(RemoteProtocolError, match="may not send"):
        receiver.send(Ping())


def test_a_rank_other_than_0_that_speaks() -> None:
    pipe = pair_in(LinkKind.PIPE, LinkState.LINKED)
    with pytest.raises(LocalProtocolError, match="pipe: the rank may not send Delta in state linked"):
        pipe.lower.send(say("Delta"))


def test_what_any_member_may_send_on_an_open_control_link() -> None:
    """A new message of agents is legal from every member: to name it here is the decision that it may be."""
    assert " ".join(sorted(kind.__name__ for kind in BOTH_WAYS)) == (
        "AuthorityHandover AuthorityKept Beat "
        "Deployments Echo EndEpoch EpochEnded FabricAnswer FabricWanted "
        "MachineWanted Members ModelPull "
        "Prepare Prepared RankGathered RankPong RankSide RankStarted RankTrouble Report ReportsSent "
        "StartRank TokenIssued TokenWanted"
    )


# --- the envelope -----------------------------------------------------------------------------------


def test_a_frame_of_another_epoch_is_dropped_and_counted() -> None:
    pair = pair_in(LinkKind.DECODE, LinkState.LOADED)
    stale = encode(SessionEnd(), EPOCH - 1, 1) + encode(Ack(1, 1, 1, 1), EPOCH + 1, 900)
    assert pair.upper.receive_data(stale) == []
    assert pair.upper.dropped == 2
    pair.up(Forward((1,), (2,)))
    pair.down(Ack(pair.upper.seq, 1, 1, 0))


@pytest.mark.parametrize("offset", [-1, 0, 2, 1000])
def test_a_wrong_seq(offset: int) -> None:
    pair = pair_in(LinkKind.DECODE, LinkState.LOADED)
    last = pair.upper.seq
    with pytest.raises(RemoteProtocolError) as caught:
        pair.lower.receive_data(encode(Forward((1,), (2,)), EPOCH, last + offset))
    assert caught.value.code is Code.WRONG_SEQ
    assert f"numbered {last + offset}, expected {last + 1}" in caught.value.detail
    assert pair.lower.state is LinkState.FAILED


def test_frames_are_numbered_from_1_in_each_direction() -> None:
    pair = Pair.of(LinkKind.DECODE)
    assert pair.move(Side.LOWER, say("Hello")) == [Received(1, say("Hello"))]
    assert pair.move(Side.UPPER, say("Welcome")) == [Received(1, say("Welcome"))]
    assert pair.move(Side.UPPER, Init()) == [Received(2, Init())]
    assert (pair.upper.seq, pair.lower.seq) == (2, 1)


def test_a_bad_value_is_not_sent() -> None:
    pair = pair_in(LinkKind.DECODE, LinkState.LOADED)
    with pytest.raises(LocalProtocolError) as caught:
        pair.upper.send(Evict((0,)))
    assert caught.value.code is Code.FIELD_INVALID
    assert pair.upper.state is LinkState.FAILED


def test_an_error_does_not_repeat_secrets() -> None:
    pair = pair_in(LinkKind.PIPE, LinkState.OPEN)
    bad = replace(say("Bootstrap"), world_size=99)  # type: ignore[type-var]
    with pytest.raises(LocalProtocolError) as caught:
        pair.upper.send(bad)
    assert "world_size" in caught.value.detail
    assert "kkkk" not in caught.value.detail


def test_the_frame_limit_rises_with_welcome_even_in_the_middle_of_a_read() -> None:
    pair = pair_in(LinkKind.DECODE, LinkState.GREETED)
    data = pair.upper.send(say("Welcome"))
    long = LoadShard("x" * 4000, 512, (1,) * 64)
    stray = encode(long, EPOCH, 2)
    assert len(stray) > 4096
    with pytest.raises(RemoteProtocolError) as caught:
        pair.lower.receive_data(data + stray)
    assert caught.value.code is Code.OUT_OF_ORDER, "judged by its order, not by its size"
    with pytest.raises(RemoteProtocolError) as caught:
        Session(LinkKind.DECODE, Side.LOWER, EPOCH).receive_data(stray)
    assert caught.value.code is Code.FRAME_OVERSIZE


@given(st.lists(st.integers(1, 200), max_size=30))
def test_how_the_stream_is_cut_does_not_matter(sizes: list[int]) -> None:
    stream, expected = STREAM
    lower = pair_in(LinkKind.DECODE, LinkState.LOADED).lower
    received: list[Received] = []
    for size in [*sizes, len(stream)]:
        received += lower.receive_data(stream[:size])
        stream = stream[size:]
    assert received == expected


def _recorded() -> tuple[bytes, list[Received]]:
    pair = pair_in(LinkKind.DECODE, LinkState.LOADED)
    messages: list[Message] = [
        of_prompt(2, 0, 9, tuple(range(8)), sampling=Sampling(0.7, seed=2**63 - 1)),
        of_prompt(2, 8, 9, (1,), exchange="logits", agreement="broadcast"),
        *(Forward((1, 2), (2 + n, 9 + n)) for n in range(5)),
        Forward((1, 2), (7, 14), (3, 0), (5, 6, 7), "logits", "broadcast"),
        SessionStop(1, "length", 6, keep=8),
        of_prompt(3, 8, 9, (1,), source=1, take=True),
        of_prompts((4, 5), (9, 2), (8, 0), (1, 2, 3), (3, 0), samplings=(Sampling(), Sampling(0.5))),
        Forward((2,), (15,)),
    ]
    first = pair.upper.seq + 1
    stream = b"".join(pair.upper.send(message) for message in messages)
    return stream, [Received(first + n, message) for n, message in enumerate(messages)]


STREAM = _recorded()


# --- the end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("link", "state"), [(k, s) for k, s in EVERYWHERE if s not in TERMINAL])
def test_eof_before_session_end_is_a_lost_link(link: LinkKind, state: LinkState) -> None:
    upper = pair_in(link, state).upper
    with pytest.raises(LinkError, match=f"is gone, in state {state}") as caught:
        upper.receive_eof()
    assert caught.value.code is Code.LINK_LOST
    assert upper.state is LinkState.FAILED
    with pytest.raises(LinkError):
        upper.send(Ping())


def test_eof_in_the_middle_of_a_frame() -> None:
    pair = pair_in(LinkKind.DECODE, LinkState.LOADED)
    pair.upper.receive_data(encode(Ack(1, 1, 1, 1), EPOCH, 1)[:-1])
    with pytest.raises(LinkError, match="the rank is gone, in the middle of a frame"):
        pair.upper.receive_eof()


def test_rank_0_reports_its_end_to_the_others() -> None:
    link = pair_in(LinkKind.DECODE, LinkState.LOADED)
    link.up(Forward((1,), (2,)))
    ack = link.lower.send(Ack(link.upper.seq, 1, 1, 0))
    link.lower.receive_data(link.upper.send(Error(Code.FORWARD_FAILED, "NaN", 0)))
    assert link.lower.state is LinkState.FAILED
    assert link.upper.receive_data(ack) == []
    with pytest.raises(LinkError, match="the rank may not send Ack in state failed"):
        link.lower.send(Ack(2, 1, 1, 0))


def test_a_rank_that_reported_its_end_hears_nothing_more() -> None:
    pipe = pair_in(LinkKind.PIPE_LEADER, LinkState.LOADED)
    ping = pipe.upper.send(Ping())
    pipe.upper.receive_data(pipe.lower.send(Error(Code.FORWARD_FAILED, "NaN", 0)))
    assert pipe.lower.receive_data(ping) == []
    pipe.lower.receive_eof()
    assert pipe.upper.state is LinkState.FAILED
    with pytest.raises(LinkError, match="is gone, in state failed"):
        pipe.upper.receive_eof()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(LinkKind), st.sampled_from(Side), MESSAGE)
def test_any_message_of_a_peer_is_taken_or_refused(link: LinkKind, side: Side, message: Message) -> None:
    pair = pair_in(link, USUAL.get(link, LinkState.LOADED))
    receiver = pair.end(side)
    try:
        received = receiver.receive_data(encode(message, EPOCH, pair.end(side.peer).seq + 1))
    except RemoteProtocolError:
        assert receiver.state is LinkState.FAILED
    else:
        assert [r.message for r in received] == [message]


# --- two ends that are never at the same place ------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(LinkKind), st.integers(0, 2**32))
def test_lawful_ends_never_accuse_each_other(link: LinkKind, seed: int) -> None:
    """Both ends send anything that is legal for them, and bytes arrive late; neither ever breaks a rule."""
    rng = random.Random(seed)
    pair = Pair.of(link)
    on_the_way = {Side.UPPER: b"", Side.LOWER: b""}
    for _ in range(150):
        side = rng.choice((Side.UPPER, Side.LOWER))
        end = pair.end(side)
        if rng.random() < 0.5:
            size = rng.randint(0, len(on_the_way[side]))
            end.receive_data(on_the_way[side][:size])
            on_the_way[side] = on_the_way[side][size:]
        elif (message := anything_legal(rng, end)) is not None:
            on_the_way[side.peer] += end.send(message)
    for side, data in on_the_way.items():
        pair.end(side).receive_data(data)
    ended = {pair.upper.state, pair.lower.state} & TERMINAL
    assert ended or pair.upper.state is pair.lower.state


def anything_legal(rng: random.Random, end: Session) -> Message | None:
    kinds = list(table(end.link)[end.state][end.side])
    rng.shuffle(kinds)
    for kind in kinds:
        rare = kind in (Error, Shutdown, SessionEnd) and rng.random() < 0.9
        message = None if rare else lawful(rng, end, kind)
        if message is not None:
            return message
    return None


def lawful(rng: random.Random, end: Session, kind: type[Message]) -> Message | None:
    """A message of this kind that the ledger allows, if there is one."""
    if end.link is LinkKind.DECODE:
        return lawful_on_decode(rng, end, kind)
    if kind is Pong:
        return example(kind) if end.outstanding else None
    if kind in (SideChannel, Gathered):
        return lawful_round(rng, end, kind)
    if kind not in (Generate, Cancel, Accepted, Prefilled, Delta, ScoredDelta, Finished, RequestFailed):
        return example(kind)
    ledger = requests(end)
    if kind is Generate:
        return Generate(ledger.last_uid + rng.randint(1, 3), (5,), 10)
    if kind is Cancel:
        return Cancel(rng.randint(1, ledger.last_uid)) if ledger.last_uid else None
    if not ledger.tokens:
        return None
    uid, index = rng.choice(list(ledger.tokens.items()))
    if kind is Accepted:
        return Accepted(uid)
    if kind is Prefilled:
        return Prefilled(uid, 512, 128)
    if kind is Delta:
        return Delta((uid, uid), (index, index + 1), (50, 51))
    if kind is ScoredDelta:
        return ScoredDelta(uid, index, (50, 51), (-1.0, -2.0), 0, (), ())
    return Finished(uid, "stop", 1, 1) if kind is Finished else Error(Code.INTERNAL, "", uid)


def lawful_round(rng: random.Random, end: Session, kind: type[Message]) -> Message | None:
    """A rank takes part until it hears of an error; the agent answers, or gives up at any time."""
    ledger = end.ledger
    assert isinstance(ledger, PipeLedger)
    if ledger.rounds_are_over:
        return None
    if kind is SideChannel:
        return None if ledger.round_is_open else SideChannel(ledger.round + 1, b"abcd")
    if rng.random() < 0.1:
        return Gathered(0, b"", "rank 1 is gone")
    return Gathered(ledger.round, b"abcdabcd") if ledger.round_is_open else None


def lawful_prompts(rng: random.Random, ledger: DecodeLedger) -> Forward:
    """Up to three prompts of which each may start from what runs or was kept."""
    free = ledger.running | ledger.kept
    uids, totals, offsets, sources, takes = [], [], [], [], []
    for uid in range(ledger.last_uid + 1, ledger.last_uid + 1 + rng.randint(1, 3)):
        source = rng.choice([0, *free])
        offset = rng.randint(1, free[source]) if source else 0
        take = source in ledger.kept and rng.random() < 0.5
        if take:
            del free[source]
        uids.append(uid)
        offsets.append(offset)
        totals.append(offset + rng.randint(1, 3))
        sources.append(source)
        takes.append(take)
    count = sum(totals) - sum(offsets)
    return of_prompts(tuple(uids), totals, tuple(offsets), (5,) * count, sources, takes)


def lawful_on_disk(rng: random.Random, ledger: DecodeLedger, kind: type[Message]) -> Message | None:
    if kind is FetchBlocks:
        return FetchBlocks(ledger.last_uid + 1, 2, b"d" * 16 * rng.randint(1, 3))
    if kind is FetchedBlocks:
        asked = list(ledger.reading.items())
        uid, blocks = rng.choice(asked) if asked else (0, 0)
        return FetchedBlocks(uid, rng.randint(0, blocks)) if uid else None
    if kind is Restore:
        wanted = list(ledger.fetches.items())
        uid, (blocks, _) = rng.choice(wanted) if wanted else (0, (0, 0))
        return Restore(uid, 0 if uid in ledger.reading else rng.randint(0, blocks)) if uid else None
    held = {uid: offset for uid, (offset, _) in ledger.prompts.items()} | ledger.running | ledger.kept
    if not held:
        return None
    uid, length = rng.choice(list(held.items()))
    return Spill(uid, rng.randint(0, length - 1), length, b"d" * 16)


def lawful_prompt(rng: random.Random, ledger: DecodeLedger) -> Forward:
    """The next part of a prompt, which may start from what runs or was kept."""
    if ledger.prompts and rng.random() < 0.7:
        uid, (offset, total) = rng.choice(list(ledger.prompts.items()))
        count = rng.randint(1, total - offset)
        save = ledger.last_uid + 1 if count < total - offset and rng.random() < 0.5 else 0
        shorter = tuple(kept for kept, held in ledger.kept.items() if save and held < offset + count)
        return of_prompt(uid, offset, total, (5,) * count, save=save, covers=shorter)
    sources = [(uid, held, True) for uid, held in ledger.kept.items()]
    sources += [(uid, held, False) for uid, held in ledger.running.items()]
    if sources and rng.random() < 0.5:
        source, held, kept = rng.choice(sources)
        offset = rng.randint(1, held)
        take = kept and rng.random() < 0.5
        return of_prompt(ledger.last_uid + 1, offset, offset + 1, (5,), source=source, take=take)
    return of_prompt(ledger.last_uid + 1, 0, 4, (5,) * rng.randint(1, 4))


def lawful_step(rng: random.Random, ledger: DecodeLedger) -> Forward | None:
    running = sorted(ledger.running)
    if not running:
        return None
    rows = tuple(rng.sample(running, rng.randint(1, len(running))))
    positions = tuple(ledger.running[uid] for uid in rows)
    widths = tuple(rng.randint(0, 3) for _ in rows) if rng.random() < 0.5 else ()
    return Forward(rows, positions, widths, (5,) * sum(widths))


def lawful_on_decode(rng: random.Random, end: Session, kind: type[Message]) -> Message | None:
    ledger = sequences(end)
    if kind is Forward:
        return rng.choice((lawful_prompt, lawful_prompts, lawful_step))(rng, ledger)
    if kind is ChosenTokens:
        return ChosenTokens(ledger.chosen + 1, (5,))
    if kind is SessionStop:
        live = ledger.running | {uid: offset for uid, (offset, _) in ledger.prompts.items()}
        if not live:
            return None
        uid, held = rng.choice(list(live.items()))
        return SessionStop(uid, "stop", 1, rng.randint(0, held))
    if kind is Evict:
        old = list(ledger.kept)
        return Evict(tuple(rng.sample(old, rng.randint(0, len(old)))))
    if kind is Arrange:
        slots = len(ledger.running) + rng.randint(0, 2)
        return Arrange((64,) * slots, trim=True, lanes=(0,) * rng.choice((0, slots)))
    if kind is Ack:
        return Ack(ledger.steps[0], 1, 1, 0) if ledger.steps else None
    if kind in (Spill, FetchBlocks, FetchedBlocks, Restore):
        return lawful_on_disk(rng, ledger, kind)
    if kind in (SanityCheck, Unload, TimeCollectives, Shutdown) and ledger.steps:
        return None
    return example(kind)
