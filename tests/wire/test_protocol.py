"""One end of a link against the other: the table of moves, whole lives, the envelope, the end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.errors import Code, LinkError, LocalProtocolError, RemoteProtocolError
from mlxtp.wire import messages as msg
from mlxtp.wire.cluster_messages import BOTH_WAYS
from mlxtp.wire.frames import encode, messages
from mlxtp.wire.protocol import TERMINAL, RequestFailed, table
from mlxtp.wire.session import DecodeLedger, LinkKind, LinkState, PipeLedger, Session, Side

from .forwards import of_prompt, of_prompts
from .samples import EXAMPLES, MESSAGE
from .walk import EPOCH, USUAL, Pair, example, pair_in, path_to, requests, sequences

EVERYWHERE = [(link, state) for link in LinkKind for state in LinkState if state in table(link)]
KINDS: list[type[msg.Message]] = [*messages().values(), RequestFailed]
VOICE = (
    msg.Accepted, msg.Prefilled, msg.Delta, msg.ScoredDelta, msg.Vectors, msg.Finished, RequestFailed,
)  # fmt: skip


def say(name: str) -> msg.Message:
    return next(message for kind, message in EXAMPLES.items() if kind.__name__ == name)


def test_the_life_of_a_decode_link() -> None:
    link = Pair.of(LinkKind.DECODE)
    link.down(say("Hello"))
    link.up(say("Welcome"))
    link.up(msg.Init())
    link.down(say("InitDone"))
    link.up(msg.SanityCheck())
    link.down(say("SanityDone"))

    link.up(msg.LoadShard("/models/missing", 512, ()))
    link.down(msg.Error(Code.MODEL_INVALID, "no such folder", 0))
    assert link.upper.state is LinkState.PROVEN, "a load that failed leaves the group usable"
    link.up(msg.Unload())  # other ranks could load it
    link.down(msg.Done())
    link.up(msg.LoadShard("/models/tiny", 512, ()))
    link.down(say("Loaded"))

    link.up(of_prompt(1, 0, 5, (10, 11, 12)))
    link.up(of_prompt(1, 3, 5, (13, 14)))  # ahead of the first one's Ack
    first, second = link.upper.seq - 1, link.upper.seq
    assert link.upper.outstanding == link.lower.outstanding == 2
    link.down(msg.Ack(first, 1, 2, 0))
    link.up(msg.Forward((1,), (5,)))
    link.up(msg.ChosenTokens(2, (7,)))
    link.down(msg.Ack(second, 2, 4, 99), msg.Ack(link.upper.seq - 1, 3, 6, 98))
    link.up(of_prompt(2, 0, 1, (20,)), msg.Forward((2, 1), (1, 6)))
    link.up(msg.SessionStop(1, "stop", 4, keep=6))
    link.down(msg.Ack(link.upper.seq - 2, 4, 8, 97), msg.Ack(link.upper.seq - 1, 5, 10, 96))

    link.up(msg.Forward((2,), (2,), (4,), (21, 22, 23, 24)))
    link.down(msg.Ack(link.upper.seq, 6, 12, 95))
    link.up(of_prompt(3, 3, 5, (30, 31), source=1, take=True))
    link.down(msg.Ack(link.upper.seq, 7, 14, 94))
    link.up(msg.SanityCheck())
    assert link.lower.state is LinkState.CHECKING
    link.down(say("SanityDone"))
    link.up(say("TimeCollectives"))
    assert link.lower.state is LinkState.MEASURING
    link.down(say("CollectivesTimed"))
    link.up(msg.Forward((2, 3), (4, 5)))
    link.down(msg.Ack(link.upper.seq, 8, 16, 93))
    link.up(msg.Unload())
    link.down(msg.Done())
    link.up(msg.Shutdown())
    link.down(msg.Done(), msg.SessionEnd())

    assert link.upper.closed
    assert link.lower.closed
    link.upper.receive_eof()
    link.lower.receive_eof()


def test_the_life_of_a_pipe_to_rank_0() -> None:
    pipe = Pair.of(LinkKind.PIPE_LEADER)
    pipe.down(say("Hello"))
    pipe.up(say("Welcome"), msg.Ping(), say("Bootstrap"))
    pipe.down(say("Pong"), msg.Done())
    pipe.up(msg.Init())
    pipe.up(msg.Ping(), msg.Ping())
    pipe.down(say("Pong"), say("InitDone"), say("Pong"))
    pipe.up(msg.SanityCheck())
    pipe.down(say("SanityDone"))
    pipe.up(say("LoadShard"))
    pipe.down(say("Loaded"))

    pipe.up(msg.Generate(1, (5, 6), 10), msg.Generate(2, (7,), 10), msg.Generate(5, (8,), 10))
    pipe.down(msg.Accepted(1), msg.Accepted(2), msg.Delta((1,), (0,), (50,)))
    pipe.down(msg.ScoredDelta(1, 1, (51, 52), (-0.5, -1.0), 1, (51, 53), (-0.5, -0.25)))
    pipe.down(msg.Delta((1, 2), (3, 0), (53, 60)))
    pipe.down(msg.Error(Code.CONTEXT_OVERFLOW, "too long", 5))
    pipe.up(msg.Cancel(5), msg.Cancel(2))
    pipe.down(msg.Delta((2, 2), (1, 2), (61, 62)), msg.Finished(2, "cancel", 3, 3))
    pipe.down(msg.Finished(1, "stop", 4, 4, cached=1, drafted=2, accepted=1))

    pipe.up(msg.Generate(6, (9,), 10))
    pipe.up(msg.KvBudget(1 << 20), msg.Generate(7, (9,), 10))
    pipe.down(
        msg.Accepted(6), msg.Accepted(7), msg.Error(Code.CONTEXT_OVERFLOW, "outgrown", 7), say("Loaded")
    )
    assert pipe.upper.state is LinkState.LOADED
    pipe.up(msg.Unload(), msg.Cancel(6))
    pipe.down(msg.Delta((6, 6, 6), (0, 1, 2), (70, 71, 72)))  # it crossed the Unload
    pipe.down(msg.Done())
    pipe.up(msg.Shutdown())
    pipe.down(msg.Done(), msg.SessionEnd())
    assert pipe.upper.closed
    assert pipe.lower.closed


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (LinkKind.JOIN, "<JoinOffer >JoinRequest <JoinGrant"),
        (LinkKind.CONTROL, ">AgentHello <RosterParting >RosterParting <RosterParting <Error"),
        (LinkKind.REQUESTS, ">Hello <Welcome <Generate >Accepted >Delta <Cancel >Finished >SessionEnd"),
    ],
)
def test_the_life_of_a_link_between_agents(kind: LinkKind, said: str) -> None:
    link = Pair.of(kind)
    for side, *name in said.split():
        (link.up if side == "<" else link.down)(say("".join(name)))
    for end in (link.upper, link.lower):
        assert end.closed
        end.receive_eof()


@pytest.mark.parametrize("state", [LinkState.NEW, LinkState.OFFERED, LinkState.ASKED])
def test_who_joins_is_given_little_room_to_the_end(state: LinkState) -> None:
    pair = pair_in(LinkKind.JOIN, state)
    for end in (pair.upper, pair.lower):
        with pytest.raises(RemoteProtocolError) as caught:
            end.receive_data(encode(msg.LoadShard("x" * 4000, 512, (1,) * 64), EPOCH, 1))
        assert caught.value.code is Code.FRAME_OVERSIZE


@pytest.mark.parametrize("kind", [LinkKind.PIPE, LinkKind.PIPE_LEADER])
def test_the_side_channel_of_a_rank_that_forms(kind: LinkKind) -> None:
    pipe = pair_in(kind, LinkState.LINKED)
    if kind is LinkKind.PIPE_LEADER:
        pipe.up(msg.Init())
    pipe.down(msg.SideChannel(1, b"abcd"))
    pipe.up(msg.Ping(), msg.Gathered(1, b"abcdABCD"))
    pipe.down(say("Pong"), msg.SideChannel(2, b""))
    pipe.up(msg.Gathered(2, b""))
    if kind is LinkKind.PIPE_LEADER:
        pipe.down(say("InitDone"))
    pipe.up(msg.Gathered(2, b"", "rank 1 did not form"))
    pipe.up(msg.Shutdown())
    pipe.down(msg.Done(), msg.SessionEnd())


@pytest.mark.parametrize(
    ("kind", "state"), [(LinkKind.PIPE, LinkState.LINKED), (LinkKind.PIPE_LEADER, LinkState.FORMING)]
)
def test_a_round_that_crosses_what_ends_it(kind: LinkKind, state: LinkState) -> None:
    pipe = pair_in(kind, state)
    error = pipe.upper.send(msg.Gathered(0, b"", "rank 1 is gone"))
    late = pipe.lower.send(msg.SideChannel(1, b"abcd"))
    assert len(pipe.upper.receive_data(late)) == len(pipe.lower.receive_data(error)) == 1
    pipe = pair_in(kind, state)
    shutdown = pipe.upper.send(msg.Shutdown())
    late = pipe.lower.send(msg.SideChannel(1, b"abcd"))
    assert len(pipe.upper.receive_data(late)) == len(pipe.lower.receive_data(shutdown)) == 1
    if kind is LinkKind.PIPE_LEADER:
        pipe.down(say("InitDone"))
    pipe.down(msg.Done(), msg.SessionEnd())


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
    shutdown = pipe.upper.send(msg.Shutdown())
    if crossed:
        pipe.upper.receive_data(pipe.lower.send(say(reply)))
        pipe.lower.receive_data(shutdown)
    else:
        pipe.lower.receive_data(shutdown)
        pipe.down(say(reply))
    pipe.down(msg.Done(), msg.SessionEnd())
    assert pipe.upper.closed


@pytest.mark.parametrize(("link", "state"), EVERYWHERE)
def test_every_legal_move_leads_where_the_table_says(link: LinkKind, state: LinkState) -> None:
    assert state in TERMINAL or any(table(link)[state].values())
    for side in Side:
        for kind, end in table(link)[state][side].items():
            if kind is msg.FetchedBlocks and state is not LinkState.LOADED:
                continue  # the way here led past no FetchBlocks; the next test has it
            pair = pair_in(link, state)
            if kind is msg.Cancel and not requests(pair.upper).last_uid:
                continue  # the way here led past no request
            prepare(pair, kind)
            pair.move(side, legal(pair, kind))
            assert pair.upper.state is end


@pytest.mark.parametrize(
    "command", [msg.SanityCheck(), msg.TimeCollectives("sum", 8, 1), msg.Unload(), msg.Shutdown()]
)
def test_what_was_read_from_disk_may_cross_a_command(command: msg.Message) -> None:
    pair = pair_in(LinkKind.DECODE, LinkState.LOADED)
    pair.up(
        msg.FetchBlocks(2, 256, b"d" * 16), msg.FetchBlocks(3, 256, b"d" * 16), msg.Restore(3, 0), command
    )
    pair.down(msg.FetchedBlocks(2, 1), msg.FetchedBlocks(3, 1))
    assert pair.upper.state is pair.lower.state is not LinkState.FAILED


def prepare(pair: Pair, kind: type[msg.Message]) -> None:
    """Send what must have come before, other than what the state tells."""
    if kind is msg.Pong:
        pair.up(msg.Ping())
    if kind is msg.Ack:
        pair.up(msg.Forward((1,), (2,)))
    if kind is msg.Evict:
        pair.up(msg.SessionStop(1, "stop", 1, keep=2))
    if kind in (msg.FetchedBlocks, msg.Restore) and 2 not in sequences(pair.upper).fetches:
        pair.up(msg.FetchBlocks(2, 256, b"d" * 32))
    if kind is msg.Restore:
        pair.down(msg.FetchedBlocks(2, 1))


def legal(pair: Pair, kind: type[msg.Message]) -> msg.Message:
    if kind is msg.Ack:
        return msg.Ack(pair.upper.seq, 1, 1, 0)
    if kind is msg.Generate:
        return msg.Generate(2, (5,), 10)
    if kind is msg.Forward:
        return msg.Forward((1,), (2,))
    if kind in (msg.FetchedBlocks, msg.Restore):
        return kind(2, 1)
    if kind is msg.FetchBlocks:
        return msg.FetchBlocks(3, 256, b"d" * 32)
    return example(kind)


@pytest.mark.parametrize(("link", "state"), EVERYWHERE)
def test_every_illegal_move_is_refused_at_both_ends(link: LinkKind, state: LinkState) -> None:
    for side in Side:
        for kind in KINDS:
            if kind not in table(link)[state][side]:
                refuse_to_send(link, state, side, example(kind))
                refuse_to_receive(link, state, side, example(kind))


def refuse_to_send(link: LinkKind, state: LinkState, side: Side, message: msg.Message) -> None:
    sender = pair_in(link, state).end(side)
    if state in TERMINAL:
        with pytest.raises(LinkError, match=f"in state {state}"):
            sender.send(message)
        assert sender.state is state
        return
    for attempt in (message, msg.Ping(), msg.Done()):
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


def refuse_to_receive(link: LinkKind, state: LinkState, side: Side, message: msg.Message) -> None:
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
        receiver.send(msg.Ping())


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


def test_a_frame_of_another_epoch_is_dropped_and_counted() -> None:
    pair = pair_in(LinkKind.DECODE, LinkState.LOADED)
    stale = encode(msg.SessionEnd(), EPOCH - 1, 1) + encode(msg.Ack(1, 1, 1, 1), EPOCH + 1, 900)
    assert pair.upper.receive_data(stale) == []
    assert pair.upper.dropped == 2
    pair.up(msg.Forward((1,), (2,)))
    pair.down(msg.Ack(pair.upper.seq, 1, 1, 0))


@pytest.mark.parametrize("offset", [-1, 0, 2, 1000])
def test_a_wrong_seq(offset: int) -> None:
    pair = pair_in(LinkKind.DECODE, LinkState.LOADED)
    last = pair.upper.seq
    with pytest.raises(RemoteProtocolError) as caught:
        pair.lower.receive_data(encode(msg.Forward((1,), (2,)), EPOCH, last + offset))
    assert caught.value.code is Code.WRONG_SEQ
    assert f"numbered {last + offset}, expected {last + 1}" in caught.value.detail
    assert pair.lower.state is LinkState.FAILED


def test_a_bad_value_is_not_sent_and_its_error_repeats_no_secrets() -> None:
    pair = pair_in(LinkKind.PIPE, LinkState.OPEN)
    bad = replace(say("Bootstrap"), world_size=99)  # type: ignore[type-var]
    with pytest.raises(LocalProtocolError) as caught:
        pair.upper.send(bad)
    assert caught.value.code is Code.FIELD_INVALID
    assert pair.upper.state is LinkState.FAILED
    assert "world_size" in caught.value.detail
    assert "kkkk" not in caught.value.detail


def test_the_frame_limit_rises_with_welcome_even_in_the_middle_of_a_read() -> None:
    pair = pair_in(LinkKind.DECODE, LinkState.GREETED)
    data = pair.upper.send(say("Welcome"))
    long = msg.LoadShard("x" * 4000, 512, (1,) * 64)
    stray = encode(long, EPOCH, 2)
    assert len(stray) > 4096
    with pytest.raises(RemoteProtocolError) as caught:
        pair.lower.receive_data(data + stray)
    assert caught.value.code is Code.OUT_OF_ORDER, "judged by its order, not by its size"
    with pytest.raises(RemoteProtocolError) as caught:
        Session(LinkKind.DECODE, Side.LOWER, EPOCH).receive_data(stray)
    assert caught.value.code is Code.FRAME_OVERSIZE


@pytest.mark.parametrize(("link", "state"), [(k, s) for k, s in EVERYWHERE if s not in TERMINAL])
def test_eof_before_session_end_is_a_lost_link(link: LinkKind, state: LinkState) -> None:
    upper = pair_in(link, state).upper
    with pytest.raises(LinkError, match=f"is gone, in state {state}") as caught:
        upper.receive_eof()
    assert caught.value.code is Code.LINK_LOST
    assert upper.state is LinkState.FAILED
    with pytest.raises(LinkError):
        upper.send(msg.Ping())


def test_eof_in_the_middle_of_a_frame() -> None:
    pair = pair_in(LinkKind.DECODE, LinkState.LOADED)
    pair.lower.receive_data(encode(msg.Unload(), EPOCH, 1)[:-1])
    with pytest.raises(LinkError, match="rank 0 is gone, in the middle of a frame"):
        pair.lower.receive_eof()


def test_rank_0_reports_its_end_to_the_others() -> None:
    link = pair_in(LinkKind.DECODE, LinkState.LOADED)
    link.up(msg.Forward((1,), (2,)))
    ack = link.lower.send(msg.Ack(link.upper.seq, 1, 1, 0))
    link.lower.receive_data(link.upper.send(msg.Error(Code.FORWARD_FAILED, "NaN", 0)))
    assert link.lower.state is LinkState.FAILED
    assert link.upper.receive_data(ack) == []
    with pytest.raises(LinkError, match="the rank may not send Ack in state failed"):
        link.lower.send(msg.Ack(2, 1, 1, 0))


def test_a_rank_that_reported_its_end_hears_nothing_more() -> None:
    pipe = pair_in(LinkKind.PIPE_LEADER, LinkState.LOADED)
    ping = pipe.upper.send(msg.Ping())
    pipe.upper.receive_data(pipe.lower.send(msg.Error(Code.FORWARD_FAILED, "NaN", 0)))
    assert pipe.lower.receive_data(ping) == []
    pipe.lower.receive_eof()
    assert pipe.upper.state is LinkState.FAILED
    with pytest.raises(LinkError, match="is gone, in state failed"):
        pipe.upper.receive_eof()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(LinkKind), st.sampled_from(Side), MESSAGE)
def test_any_message_of_a_peer_is_taken_or_refused(link: LinkKind, side: Side, message: msg.Message) -> None:
    pair = pair_in(link, USUAL.get(link, LinkState.LOADED))
    receiver = pair.end(side)
    try:
        received = receiver.receive_data(encode(message, EPOCH, pair.end(side.peer).seq + 1))
    except RemoteProtocolError:
        assert receiver.state is LinkState.FAILED
    else:
        assert [r.message for r in received] == [message]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(LinkKind), st.integers(0, 2**32))
def test_lawful_ends_never_accuse_each_other(link: LinkKind, seed: int) -> None:
    """Both ends send anything that is legal for them, and bytes arrive late; neither ever breaks a rule."""
    rng = random.Random(seed)
    pair = pair_in(link, USUAL.get(link, LinkState.LOADED)) if seed % 2 else Pair.of(link)
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


def anything_legal(rng: random.Random, end: Session) -> msg.Message | None:
    kinds = list(table(end.link)[end.state][end.side])
    rng.shuffle(kinds)
    for kind in kinds:
        rare = kind in (msg.Error, msg.Shutdown, msg.SessionEnd, msg.Unload) and rng.random() < 0.99
        message = None if rare else lawful(rng, end, kind)
        if message is not None:
            return message
    return None


def lawful(rng: random.Random, end: Session, kind: type[msg.Message]) -> msg.Message | None:
    """A message of this kind that the ledger allows, if there is one."""
    if end.link is LinkKind.DECODE:
        return lawful_on_decode(rng, end, kind)
    if kind is msg.Pong:
        return example(kind) if end.outstanding else None
    if kind in (msg.SideChannel, msg.Gathered):
        return lawful_round(rng, end, kind)
    if kind not in (msg.Generate, msg.Cancel, *VOICE):
        return example(kind)
    ledger = requests(end)
    if kind is msg.Generate:
        return msg.Generate(ledger.last_uid + rng.randint(1, 3), (5,), 10)
    if kind is msg.Cancel:
        return msg.Cancel(rng.randint(1, ledger.last_uid)) if ledger.last_uid else None
    if not ledger.tokens:
        return None
    uid, index = rng.choice(list(ledger.tokens.items()))
    if kind is msg.Accepted:
        return msg.Accepted(uid)
    if kind is msg.Prefilled:
        return msg.Prefilled(uid, 512, 128)
    if kind is msg.Delta:
        return msg.Delta((uid, uid), (index, index + 1), (50, 51))
    if kind is msg.ScoredDelta:
        return msg.ScoredDelta(uid, index, (50, 51), (-1.0, -2.0), 0, (), ())
    if kind is msg.Vectors:
        return msg.Vectors(uid, (0, 1), bytes(16))
    return msg.Finished(uid, "stop", 1, 1) if kind is msg.Finished else msg.Error(Code.INTERNAL, "", uid)


def lawful_round(rng: random.Random, end: Session, kind: type[msg.Message]) -> msg.Message | None:
    """A rank takes part until it hears of an error; the agent answers, or gives up at any time."""
    ledger = end.ledger
    assert isinstance(ledger, PipeLedger)
    if ledger.rounds_are_over:
        return None
    if kind is msg.SideChannel:
        return None if ledger.round_is_open else msg.SideChannel(ledger.round + 1, b"abcd")
    if rng.random() < 0.1:
        return msg.Gathered(0, b"", "rank 1 is gone")
    return msg.Gathered(ledger.round, b"abcdabcd") if ledger.round_is_open else None


def lawful_prompts(rng: random.Random, ledger: DecodeLedger) -> msg.Forward:
    """Up to three prompts of which each may start from what runs or was kept; or more of those begun."""
    if ledger.prompts and rng.random() < 0.5:
        uids = rng.sample(sorted(ledger.prompts), rng.randint(1, len(ledger.prompts)))
        begun = [ledger.prompts[uid] for uid in uids]
        ends = rng.random() < 0.5
        begun = [(at, total) for at, total in begun if ends or total - at > 1]
        uids = [uid for uid in uids if ends or ledger.prompts[uid] in begun]
        counts = tuple(total - at if ends else 1 for at, total in begun)
        parts = tuple(msg.PromptPart(total) for _, total in begun)
        offsets = tuple(at for at, _ in begun)
        if uids:
            return msg.Forward(tuple(uids), offsets, counts, (5,) * sum(counts), prompts=parts)
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


def lawful_on_disk(rng: random.Random, ledger: DecodeLedger, kind: type[msg.Message]) -> msg.Message | None:
    if kind is msg.FetchBlocks:
        return msg.FetchBlocks(ledger.last_uid + 1, 2, b"d" * 16 * rng.randint(1, 3))
    if kind is msg.FetchedBlocks:
        asked = list(ledger.reading.items())
        uid, blocks = rng.choice(asked) if asked else (0, 0)
        return msg.FetchedBlocks(uid, rng.randint(0, blocks)) if uid else None
    if kind is msg.Restore:
        wanted = list(ledger.fetches.items())
        uid, (blocks, _) = rng.choice(wanted) if wanted else (0, (0, 0))
        return msg.Restore(uid, 0 if uid in ledger.reading else rng.randint(0, blocks)) if uid else None
    held = {uid: offset for uid, (offset, _) in ledger.prompts.items()} | ledger.running | ledger.kept
    if not held:
        return None
    uid, length = rng.choice(list(held.items()))
    return msg.Spill(uid, rng.randint(0, length - 1), length, b"d" * 16)


def lawful_prompt(rng: random.Random, ledger: DecodeLedger) -> msg.Forward:
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


def lawful_step(rng: random.Random, ledger: DecodeLedger) -> msg.Forward | None:
    running = sorted(ledger.running)
    if not running:
        return None
    rows = tuple(rng.sample(running, rng.randint(1, len(running))))
    positions = tuple(ledger.running[uid] for uid in rows)
    widths = tuple(rng.randint(0, 3) for _ in rows) if rng.random() < 0.5 else ()
    return msg.Forward(rows, positions, widths, (5,) * sum(widths))


def lawful_on_decode(rng: random.Random, end: Session, kind: type[msg.Message]) -> msg.Message | None:
    ledger = sequences(end)
    if kind is msg.Forward:
        return rng.choice((lawful_prompt, lawful_prompts, lawful_step))(rng, ledger)
    if kind is msg.ChosenTokens:
        return msg.ChosenTokens(ledger.chosen + 1, (5,))
    if kind is msg.SessionStop:
        live = ledger.running | {uid: offset for uid, (offset, _) in ledger.prompts.items()}
        if not live:
            return None
        uid, held = rng.choice(list(live.items()))
        return msg.SessionStop(uid, "stop", 1, rng.randint(0, held))
    if kind is msg.Evict:
        old = list(ledger.kept)
        return msg.Evict(tuple(rng.sample(old, rng.randint(0, len(old)))))
    if kind is msg.Arrange:
        rooms = rng.choice((0, len(ledger.running) + rng.randint(0, 2)))
        lanes = rng.choice((0, rooms or len(ledger.running)))
        return msg.Arrange((64,) * rooms, trim=True, lanes=(0,) * lanes)
    if kind is msg.Ack:
        return msg.Ack(ledger.steps[0], 1, 1, 0) if ledger.steps else None
    if kind in (msg.Spill, msg.FetchBlocks, msg.FetchedBlocks, msg.Restore):
        return lawful_on_disk(rng, ledger, kind)
    if kind in (msg.SanityCheck, msg.Unload, msg.TimeCollectives, msg.Shutdown) and ledger.steps:
        return None
    return example(kind)


def senders(link: LinkKind, message: type[msg.Message]) -> set[Side]:
    return {side for moves in table(link).values() for side in Side if message in moves[side]}


def test_only_rank_0_has_a_voice() -> None:
    sides = {Side.LOWER: VOICE, Side.UPPER: (msg.Generate, msg.Cancel)}
    for side, message in [(side, each) for side, kinds in sides.items() for each in kinds]:
        assert senders(LinkKind.PIPE_LEADER, message) == {side}
        assert not senders(LinkKind.PIPE, message)
        assert not senders(LinkKind.DECODE, message)


@pytest.mark.parametrize(("link", "state"), EVERYWHERE)
def test_messages_that_cross_lead_both_ends_to_the_same_state(link: LinkKind, state: LinkState) -> None:
    moves = table(link)
    for command, commanded in moves[state][Side.UPPER].items():
        for answer, answered in moves[state][Side.LOWER].items():
            if link is LinkKind.DECODE and answer is msg.Ack and commanded is not state:
                continue  # the ledger forbids a command while an Ack may be on its way
            # An end that has spoken its last word discards what was on its way; the other one hears it.
            if answered not in TERMINAL:
                assert command in moves[answered][Side.UPPER], (command, answer)
            if commanded not in TERMINAL:
                assert answer in moves[commanded][Side.LOWER], (command, answer)
            if not {answered, commanded} & TERMINAL:
                assert moves[answered][Side.UPPER][command] is moves[commanded][Side.LOWER][answer]
