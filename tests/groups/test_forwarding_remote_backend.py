"""Requests of one agent's clients, answered by another's rank 0: two gateways, a real link between them."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from mlxtp.api.backend import Health, Progress, StreamEnd, Tokens, TokenScore
from mlxtp.errors import Code, GroupError, LinkError, MlxtpError, RequestError
from mlxtp.gateway import request as client_request
from mlxtp.gateway.admission import AdmissionLimits
from mlxtp.gateway.dispatcher import RequestDispatcher
from mlxtp.gateway.gateway import Gateway
from mlxtp.groups import forwarding
from mlxtp.groups.forwarding import RemoteBackend, serve_requests
from mlxtp.wire.frames import encode
from mlxtp.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Delta,
    Error,
    Finished,
    Generate,
    Message,
    Pooling,
    Prefilled,
    ScoredDelta,
    Shaping,
    Vectors,
    Welcome,
)
from mlxtp.wire.session import LinkKind, Session, Side
from mlxtp.wire.streams import StreamLink

from ..gateway.test_gateway import DEPLOYMENT, GROUP, MODEL, TEXT, FakeRanks, everything
from ..played import scenes
from .scenes import run, sees, within

MAX_OPEN = 4


def gateway() -> Gateway:
    def health(_model: str) -> Health:
        return Health("ready", 1, 2, "ring", "tiny", None, True, made.open_requests)

    made = Gateway(health, AdmissionLimits(MAX_OPEN))
    return made


async def linked(theirs: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, asyncio.Future[None]]:
    """One end of a new link, and what serves requests at the other until it ends."""
    one, other = socket.socketpair()
    serving = asyncio.ensure_future(serve_requests(*await asyncio.open_connection(sock=other), theirs))
    return *await asyncio.open_connection(sock=one), serving


class Stage:
    """`ours` has the client, `theirs` has rank 0; between them is a link."""

    def __init__(self) -> None:
        self.ranks = FakeRanks()
        self.ours, self.theirs = gateway(), gateway()
        self.theirs.serve(GROUP, DEPLOYMENT, cast(Any, self.ranks), MODEL, TEXT)
        self.lost: list[MlxtpError] = []

    async def open(self) -> None:
        reader, self.writer, self.serving = await linked(self.theirs)
        self.desk = await RemoteBackend(reader, self.writer, self.ours.on_event, self.lost.append).greet()
        self.ours.serve(GROUP, DEPLOYMENT, self.desk, MODEL, TEXT, here=False)

    async def stranger(self) -> tuple[StreamLink, asyncio.StreamWriter, asyncio.Future[None]]:
        """The end of another agent's link, whose other end has been greeted and is served until it ends."""
        reader, writer, serving = await linked(self.theirs)
        link = StreamLink(reader, writer, Session(LinkKind.REQUESTS, Side.UPPER, 0))
        await link.receive()
        link.send(Welcome(PROTOCOL_VERSION, b""))
        return link, writer, serving

    async def asked(self, count: int = 1) -> list[Generate]:
        """Return the requests that have reached rank 0."""
        await sees(lambda: len(self.ranks.sent_of(Generate)) >= count)
        return self.ranks.sent_of(Generate)

    def say(self, *events: Any) -> None:
        for event in events:
            self.theirs.on_event(event)

    async def read(self, answer: Any) -> list[Any]:
        """Return the client's tokens; the error that ended the answer comes last."""
        found = []
        try:
            async for event in answer:
                found.append(event)
        except MlxtpError as error:
            found.append(error)
        return found

    @property
    def open_requests(self) -> tuple[int, int]:
        return self.ours.open_requests, self.theirs.open_requests


def play(story: Callable[[Stage], Awaitable[None]]) -> None:
    async def scene() -> None:
        stage = Stage()
        await stage.open()
        try:
            await within(story(stage))
        finally:
            await stage.desk.close()
            await stage.serving
        assert stage.theirs.open_requests == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scene())


scene = scenes(play)


@scene()
async def test_an_answer_is_the_same_here_as_there(stage: Stage) -> None:
    """Rank 0's messages, in any portions, reach the client as if it were on this Mac."""
    request = Generate(0, (1, 2, 3), 9, shaping=Shaping(min_tokens=2))
    here = stage.theirs.generate(request)
    answers = [stage.ours.generate(request), stage.ours.generate(Generate(0, (1,), 9, logprobs=2))]
    generates = await stage.asked(3)
    assert generates[0].tokens == generates[1].tokens == (1, 2, 3)
    assert generates[0].shaping == generates[1].shaping
    assert [generate.uid for generate in generates] == [1, 2, 3]
    for uid in (1, 2):
        stage.say(
            Accepted(uid),
            Delta((uid, uid), (0, 1), (50, 51)),
            Delta((uid,), (2,), (52,)),
            Finished(uid, "length", 3, 3, cached=7, drafted=2, accepted=1),
        )
    await answers[0].accepted()
    assert await everything(answers[0]) == await everything(here)
    stage.say(
        ScoredDelta(3, 0, (60, 61), (-1.0, -2.0), 2, (5, 6, 7, 8), (-0.5, -1.5, -2.5, -3.5)),
        ScoredDelta(3, 2, (62,), (-0.25,), 2, (9, 10), (-4.0, -5.0)),
        Finished(3, "stop", 3, 3),
    )
    assert await everything(answers[1]) == [
        Tokens(
            (60, 61), (TokenScore(-1.0, ((5, -0.5), (6, -1.5))), TokenScore(-2.0, ((7, -2.5), (8, -3.5))))
        ),
        Tokens((62,), (TokenScore(-0.25, ((9, -4.0), (10, -5.0))),)),
        StreamEnd("stop", 3),
    ]
    assert stage.open_requests == (0, 0)


@scene()
async def test_vectors_come_from_there(stage: Stage) -> None:
    answer = stage.ours.generate(Generate(0, (1, 2, 3), 1, pooling=Pooling((1, 2), "mean", True, 2)))
    [asked] = await stage.asked(1)
    assert asked.pooling == Pooling((1, 2), "mean", True, 2)
    stage.say(Accepted(1), Vectors(1, (1, 0), b"aaaabbbb"), Finished(1, "stop", 0, 0))
    assert await everything(answer) == [StreamEnd("stop", 0)]
    assert answer.vectors == {1: b"aaaa", 0: b"bbbb"}


def test_a_bug_under_an_event_ends_the_link_instead_of_leaving_its_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours: list[RequestDispatcher] = []
    on_event = RequestDispatcher.on_event

    def faulty(dispatcher: RequestDispatcher, event: Any) -> None:
        if dispatcher in ours:
            raise ZeroDivisionError("by a bug")
        on_event(dispatcher, event)

    monkeypatch.setattr(RequestDispatcher, "on_event", faulty)

    async def story(stage: Stage) -> None:
        ours.append(stage.ours.deployments.named(DEPLOYMENT))
        answer = stage.ours.generate(Generate(0, (1, 2, 3), 9))
        await stage.asked()
        stage.say(Accepted(1))
        await sees(lambda: stage.lost)
        stage.ours.fail(DEPLOYMENT, stage.lost[0])  # as the follower does
        assert await stage.read(answer) == stage.lost
        assert stage.lost[0].code == Code.INTERNAL

    play(story)
    assert "reading a requests link failed" in caplog.text


@scene()
async def test_the_progress_of_a_prefill_there_is_known_here(stage: Stage) -> None:
    here = stage.theirs.generate(Generate(0, (1,), 9))  # uids differ from here on
    answer = stage.ours.generate(Generate(0, (1, 2, 3), 9))
    await stage.asked(2)
    stage.say(Accepted(2), Prefilled(2, 2, 1))
    await answer.accepted()
    await sees(lambda: answer.progress() == Progress("prefill", 3, 1, 2))
    await answer.aclose()
    await here.aclose()


@scene()
async def test_a_client_that_stops_reading_there_holds_up_no_client_here(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own gateway always reads, so the link never fills; the client alone is ended."""
    monkeypatch.setattr(client_request, "MAX_UNREAD", 100)
    monkeypatch.setattr(forwarding, "MAX_UNSENT_BYTES", 4096)
    deaf, other = (stage.ours.generate(Generate(0, (number,), 900)) for number in (1, 2))
    await stage.asked(2)
    stage.say(Accepted(1), Accepted(2))
    for index in range(400):
        stage.say(Delta((1, 2), (index, index), (7, 8)))
        if index < 399:
            assert await anext(cast(Any, other)) == Tokens((8,))
    await sees(lambda: stage.ranks.sent_of(Cancel) == [Cancel(1)])
    stage.say(Finished(2, "stop", 400, 400))
    assert await stage.read(other) == [Tokens((8,)), StreamEnd("stop", 400)]
    *tokens, error = await stage.read(deaf)
    assert len(tokens) == 101
    assert error.code is Code.CLIENT_TOO_SLOW
    assert stage.lost == []


@scene()
async def test_a_refusal_of_rank_0_is_the_clients_own(stage: Stage) -> None:
    answer = stage.ours.generate(Generate(0, (1,), 9))
    await stage.asked()
    stage.say(Error(Code.BAD_REQUEST, "no such grammar", 1))
    with pytest.raises(RequestError, match="no such grammar"):
        await answer.accepted()


@scene()
async def test_a_client_that_leaves_stops_the_work_over_there(stage: Stage) -> None:
    answer: Any = stage.ours.generate(Generate(0, (1,), 9))
    await stage.asked()
    stage.say(Delta((1,), (0,), (50,)))
    assert await anext(answer) == Tokens((50,))
    await answer.aclose()
    await sees(lambda: stage.ranks.sent_of(Cancel) == [Cancel(1)])
    stage.say(Delta((1,), (1,), (51,)), Finished(1, "cancel", 2, 2))  # had been on their way
    again = stage.ours.generate(Generate(0, (2,), 9))
    await stage.asked(2)
    stage.say(Finished(2, "stop", 0, 0))
    assert await everything(again) == [StreamEnd("stop", 0)]
    ledger: Any = stage.desk._connection.protocol.ledger
    assert ledger.tokens == {}, "a request that was cancelled is over on the link, too"
    assert stage.lost == []


@scene()
async def test_a_cancel_that_crosses_the_end_is_no_error(stage: Stage) -> None:
    answer: Any = stage.ours.generate(Generate(0, (1,), 9))
    await stage.asked()
    stage.say(Finished(1, "stop", 0, 0))
    await answer.aclose()  # before it could be heard here
    again = stage.ours.generate(Generate(0, (2,), 9))
    await stage.asked(2)
    stage.say(Finished(2, "stop", 0, 0))
    assert await everything(again) == [StreamEnd("stop", 0)]
    assert stage.ranks.sent_of(Cancel) == []


@scene()
async def test_when_the_client_s_agent_is_gone_all_of_its_requests_are_cancelled(stage: Stage) -> None:
    own = stage.theirs.generate(Generate(0, (9,), 9))
    for _ in range(3):
        stage.ours.generate(Generate(0, (1,), 9))
    await stage.asked(4)
    stage.writer.transport.abort()
    await stage.serving
    assert stage.ranks.sent_of(Cancel) == [Cancel(2), Cancel(3), Cancel(4)]
    assert stage.theirs.open_requests == 1
    stage.say(Finished(1, "stop", 0, 0))
    assert await everything(own) == [StreamEnd("stop", 0)]


@scene()
async def test_when_rank_0_s_agent_is_gone_the_client_hears_of_it(stage: Stage) -> None:
    answer = stage.ours.generate(Generate(0, (1,), 9))
    await stage.asked()
    stage.serving.cancel()
    await asyncio.wait({stage.serving})
    await sees(lambda: stage.lost)
    stage.ours.fail(DEPLOYMENT, stage.lost[0])  # as the follower does; nothing looked like an end before
    assert await stage.read(answer) == stage.lost
    assert stage.ranks.sent_of(Cancel) == [Cancel(1)]
    stage.ours.serve(GROUP, DEPLOYMENT, stage.desk, MODEL, TEXT, here=False)
    assert isinstance(stage.lost[0], LinkError)
    late = stage.ours.generate(Generate(0, (1,), 9))
    assert late.progress() == Progress("restarting")
    await late.aclose()
    stage.serving = asyncio.ensure_future(asyncio.sleep(0))


@scene()
async def test_when_the_group_ends_requests_come_back_and_go_on_in_the_next(stage: Stage) -> None:
    answers = [stage.ours.generate(Generate(0, (1,), 9)) for _ in range(2)]
    await stage.asked(2)
    stage.say(Delta((1,), (0,), (50,)))
    stage.theirs.park(GROUP, GroupError("rank 1 is gone", Code.RANK_LOST))
    late = stage.ours.generate(Generate(0, (1,), 9))
    await sees(lambda: stage.open_requests == (3, 0))
    stage.theirs.serve(GROUP, DEPLOYMENT, cast(Any, stage.ranks), MODEL, TEXT)
    unseen, first, second = (await stage.asked(5))[2:]
    assert (unseen.tokens, unseen.strikes) == ((1,), 0)
    assert (first.tokens, first.answered, first.strikes) == ((1, 50), 1, 1)
    assert (second.tokens, second.answered, second.strikes) == ((1,), 0, 1)
    stage.say(Delta((first.uid,), (1,), (51,)))
    stage.say(*(Finished(each.uid, "stop", 0, 0) for each in (unseen, first, second)))
    assert await stage.read(late) == [StreamEnd("stop", 0)]
    assert await stage.read(answers[0]) == [Tokens((50,)), Tokens((51,)), StreamEnd("stop", 0)]
    assert await stage.read(answers[1]) == [StreamEnd("stop", 0)]
    assert stage.open_requests == (0, 0)


@scene()
async def test_a_model_that_is_taken_away_ends_its_requests_everywhere(stage: Stage) -> None:
    answer = stage.ours.generate(Generate(0, (1,), 9))
    await stage.asked()
    stage.theirs.fail(DEPLOYMENT, GroupError("tiny was unloaded", Code.SHUTTING_DOWN))
    [error] = await stage.read(answer)
    assert (error.code, error.detail) == (Code.SHUTTING_DOWN, "tiny was unloaded")
    assert stage.open_requests == (0, 0)


@scene()
async def test_a_flood_of_requests_is_refused_one_by_one_and_leaves_nothing_behind(stage: Stage) -> None:
    """Not the other gateway's own limit holds it back, but the one of the agent with rank 0."""
    flood, _, serving = await stage.stranger()
    for uid in range(1, 1001):
        flood.send(Generate(uid, (1,), 9))
    heard: list[Message] = []
    while len(heard) < 1000 - MAX_OPEN:
        heard += [received.message for received in await flood.receive()]
    assert {each.code for each in heard if isinstance(each, Error)} == {Code.OVERLOADED}
    assert len(stage.ranks.sent) == MAX_OPEN
    stage.say(Finished(1, "stop", 0, 0))
    answer = stage.ours.generate(Generate(0, (2,), 9))  # a place is free, and no client was cut off
    generates = await stage.asked(MAX_OPEN + 1)
    stage.say(Finished(generates[-1].uid, "stop", 0, 0))
    assert await everything(answer) == [StreamEnd("stop", 0)]
    flood.close()
    await serving
    assert len(stage.ranks.sent_of(Cancel)) == MAX_OPEN - 1


@scene()
async def test_an_agent_that_does_not_read_is_cut_off(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "MAX_UNSENT_BYTES", 100_000)
    idle, writer, serving = await stage.stranger()
    idle.send(Generate(1, (1,), 9))
    await stage.asked()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    for index in itertools.count(step=1000):
        stage.say(Delta((1,) * 1000, tuple(range(index, index + 1000)), (5,) * 1000))
        await asyncio.sleep(0)
        if serving.done():
            break
    assert stage.ranks.sent_of(Cancel) == [Cancel(1)]
    writer.transport.abort()


@pytest.mark.parametrize(
    "wrong",
    [Generate(1, (1,), 9), Cancel(77), Delta((1,), (0,), (5,)), Accepted(1)],
    ids=["a uid again", "a cancel of nothing", "tokens", "an acceptance"],
)
@scene()
async def test_who_breaks_the_rules_loses_the_link_and_what_it_had_asked_for(
    stage: Stage, wrong: Message
) -> None:
    peer, writer, serving = await stage.stranger()
    peer.send(Generate(1, (1,), 9))
    await stage.asked()
    writer.write(encode(wrong, 0, 3))
    await serving
    assert stage.ranks.sent_of(Cancel) == [Cancel(1)]
    writer.close()


@scene()
async def test_an_agent_whose_rank_0_is_elsewhere_passes_nothing_on(stage: Stage) -> None:
    """Else two agents that take each other for it would pass a request to and fro."""
    reader, writer, serving = await linked(stage.ours)
    third = gateway()
    desk = await RemoteBackend(reader, writer, third.on_event, stage.lost.append).greet()
    third.serve(GROUP, DEPLOYMENT, desk, MODEL, TEXT, here=False)
    [refused] = await stage.read(third.generate(Generate(0, (1,), 9)))
    assert (refused.code, refused.status) == (Code.NOT_READY, 503)
    assert stage.ranks.sent == []
    await desk.close()
    await serving
