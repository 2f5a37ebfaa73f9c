"""An agent whose rank 0 is elsewhere: a real TLS port with a gateway behind it, and a node that believes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.api.backend import Health, StreamEnd, Tokens
from mlxtp.cluster.introduction import PeerInfo
from mlxtp.config import Settings, embedded_model_path
from mlxtp.errors import Code, GroupError, MlxtpError, RequestError
from mlxtp.gateway.admission import AdmissionLimits
from mlxtp.gateway.gateway import Gateway
from mlxtp.groups import forwarding as follower_module
from mlxtp.groups import loading
from mlxtp.groups.forwarding import ForwardingBackend, followed, serve_requests
from mlxtp.groups.health import ServingState
from mlxtp.models.inspect import ModelSource
from mlxtp.wire.blocking import listen
from mlxtp.wire.cluster_messages import Deployment, GroupAssignment, Serving
from mlxtp.wire.messages import Cancel, Delta, Finished, Generate
from mlxtp.wire.streams import TlsAcceptor
from mlxtp.wire.tls import Peer, member_context_server

from ..gateway.test_gateway import DEPLOYMENT, GROUP, MODEL, TEXT, FakeRanks, everything
from ..played import scenes
from ..wire.members import founder, member_of
from .scenes import made, run, sees, within

HOST, OTHER = "a" * 32, "b" * 32
READY = Serving(
    7, "ready", "", "ring", "ring over Ethernet", (HOST, OTHER), 0, "tiny", 3, 4096, 512, (1,),
    group=GROUP, deployment=DEPLOYMENT,
)  # fmt: skip


class Stage:
    """`follower` of one node, and the port of the other, whose rank 0 remembers what it is asked."""

    def __init__(self, folder: Path) -> None:
        first = founder(folder)
        self.ranks = FakeRanks()
        self.host = Gateway(
            lambda _model: Health("ready", 7, 2, "ring", "tiny", None, True, 0), AdmissionLimits(8)
        )
        self.host.serve(GROUP, DEPLOYMENT, cast(Any, self.ranks), MODEL, TEXT)
        self.connections = 0
        self.silent = False
        sock = listen("127.0.0.1")
        self.port = sock.getsockname()[1]
        self._doorman = TlsAcceptor(sock, member_context_server(first.credentials), self._serve)
        self.knowledge = PeerInfo()
        self.servings: dict[str, Serving] = {}
        self.knowledge.addresses[HOST] = (f"10.0.0.9:{self.port}",)
        self.supervisor = made(Settings(folder, "", 0, 1, "tiny"))
        self.present = True
        self.node = SimpleNamespace(
            peer_info=self.knowledge,
            membership=SimpleNamespace(status_of=lambda _: SimpleNamespace(present=self.present)),
            links=SimpleNamespace(to=lambda _: SimpleNamespace(remote="127.0.0.1")),
            name_of=lambda node_id: f"mac-{node_id[:1]}",
            changed=lambda: None,
        )
        self.model = SimpleNamespace(problem="", source=ModelSource("tiny", embedded_model_path(), TEXT))
        self.scope = SimpleNamespace(
            node=self.node,
            supervisor=self.supervisor,
            row=Deployment("tiny", "tiny"),
            model=self.model,
            owned=False,
            why_not="members come and go",
            assignment=GroupAssignment(GROUP, DEPLOYMENT, ranks=(HOST,)),
            waiting="",
            reports=lambda: list(self.servings.items()),
        )
        self.follower = ForwardingBackend(cast(Any, self.scope), member_of(first, folder).credentials)

    async def _serve(self, reader: Any, writer: Any, _peer: Peer) -> None:
        self.connections += 1
        try:
            if self.silent:
                await reader.read()
            else:
                await serve_requests(reader, writer, self.host)
        finally:
            self.connections -= 1

    def hears(self, serving: Serving | None) -> None:
        self.servings = {HOST: serving} if serving is not None else {}
        self.follower.follow()

    async def follows(self) -> None:
        self.hears(READY)
        await sees(self.shows(ServingState.READY))

    def shows(self, state: ServingState) -> Callable[[], bool]:
        def look() -> bool:
            self.follower.follow()
            return self.supervisor.status.state is state

        return look

    def ask(self) -> Any:
        return self.supervisor.gateway.generate(Generate(0, (1, 2), 9))

    @property
    def model_here(self) -> tuple[Any, Any]:
        """The same model, as this node's own ranks serve it."""
        return replace(MODEL, path=embedded_model_path()), TEXT


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "RETRY_S", 0.05)


def play(tmp_path: Path, story: Callable[[Stage], Awaitable[None]]) -> None:
    async def scene() -> None:
        stage = Stage(tmp_path)
        door = asyncio.ensure_future(stage._doorman.run())
        try:
            await within(story(stage))
        finally:
            await stage.follower.close()
            await sees(lambda: stage.connections == 0)
            door.cancel()
            await asyncio.gather(door, return_exceptions=True)
        assert stage.host.open_requests == 0
        await sees(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    run(scene())


scene = scenes(play, "tmp_path")


@scene()
async def test_requests_go_to_where_rank_0_is(stage: Stage) -> None:
    """They wait as long as the model takes to load there; a pipeline is shown as one."""
    stage.hears(replace(READY, load_s=63, split=(3, 1)))
    await sees(stage.shows(ServingState.READY))
    assert stage.supervisor.gateway.deployments.named(DEPLOYMENT).load_s == 63
    assert stage.supervisor.status.group.split == (3, 1)
    health = stage.supervisor.gateway.health()
    assert (health.state, health.epoch, health.world_size, health.backend) == ("ready", 7, 2, "ring")
    [model] = stage.supervisor.gateway.models()
    assert (model.id, model.context, model.vocabulary, model.eos) == ("tiny", 4096, 512, (1,))
    answer = stage.ask()
    await sees(lambda: stage.ranks.sent_of(Generate))
    stage.host.on_event(Delta((1,), (0,), (50,)))
    stage.host.on_event(Finished(1, "stop", 1, 1))
    assert await everything(answer) == [Tokens((50,)), StreamEnd("stop", 1)]


def test_a_bug_on_the_way_there_is_logged_and_the_way_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    defaults = iter([ZeroDivisionError("bug"), loading.load_defaults(embedded_model_path())])

    def once(_path: Path) -> Any:
        if isinstance(found := next(defaults), Exception):
            raise found
        return found

    monkeypatch.setattr(loading, "load_defaults", once)
    play(tmp_path, Stage.follows)
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info[0] is ZeroDivisionError


@scene()
async def test_what_the_other_agent_no_longer_serves_waits_for_another_group(stage: Stage) -> None:
    await stage.follows()
    answer = stage.ask()
    await sees(lambda: stage.ranks.sent_of(Generate))
    stage.host.on_event(Delta((1,), (0,), (50,)))
    assert await anext(answer) == Tokens((50,))
    stage.hears(None)
    assert stage.supervisor.gateway.models() == ()
    await sees(lambda: stage.ranks.sent_of(Cancel))
    stage.follower.follow()
    assert stage.follower._served is None
    mine = FakeRanks()
    stage.supervisor.gateway.serve(GROUP, DEPLOYMENT, cast(Any, mine), *stage.model_here)
    assert mine.sent == [Generate(2, (1, 2, 50), 9, answered=1)]
    await answer.aclose()


@pytest.mark.parametrize("serving", [replace(READY, state="restarting"), replace(READY, model="other")])
@scene()
async def test_between_two_groups_of_the_other_agent_its_link_stays(stage: Stage, serving: Serving) -> None:
    """Its word about each request is waited for: it alone knows under which its group failed."""
    await stage.follows()
    kept, lost = stage.ask(), stage.ask()
    await sees(lambda: len(stage.ranks.sent_of(Generate)) == 2)
    stage.hears(serving)
    with pytest.raises(RequestError):
        stage.ask()
    stage.host.on_event(Finished(1, "stop", 0, 0))
    assert await everything(kept) == [StreamEnd("stop", 0)]
    stage.host.park(GROUP, GroupError("rank 1 is gone", Code.RANK_LOST))
    await sees(lambda: stage.host.open_requests == 0)
    again = FakeRanks()
    stage.host.serve(GROUP, DEPLOYMENT, cast(Any, again), MODEL, TEXT)
    stage.hears(replace(READY, epoch=8))
    await sees(lambda: again.sent_of(Generate))
    assert again.sent == [Generate(3, (1, 2), 9, strikes=1)]
    assert stage.connections == 1
    stage.host.on_event(Finished(3, "stop", 0, 0))
    assert await everything(lost) == [StreamEnd("stop", 0)]


@scene()
async def test_a_link_that_breaks_is_opened_again(stage: Stage) -> None:
    await stage.follows()
    answer = stage.ask()
    await sees(lambda: stage.ranks.sent_of(Generate))
    for task in stage._doorman._tasks:
        task.cancel()
    await sees(lambda: stage.supervisor.gateway.models() == ())
    await sees(stage.shows(ServingState.READY))
    await sees(lambda: len(stage.ranks.sent_of(Generate)) == 2)
    stage.host.on_event(Finished(2, "stop", 0, 0))
    assert await everything(answer) == [StreamEnd("stop", 0)]


@scene()
async def test_a_group_of_its_own_is_not_disturbed_by_the_one_it_followed(stage: Stage) -> None:
    await stage.follows()
    mine = FakeRanks()
    stage.supervisor.status.in_epoch = True
    stage.supervisor.gateway.fail(DEPLOYMENT, MlxtpError("another group is formed"))
    stage.supervisor.gateway.serve(GROUP, DEPLOYMENT, cast(Any, mine), MODEL, TEXT)
    answer = stage.ask()
    stage.follower.follow()
    await sees(lambda: stage.connections == 0)
    stage.supervisor.gateway.on_event(Finished(1, "stop", 0, 0))
    assert await everything(answer) == [StreamEnd("stop", 0)]
    stage.supervisor.status.in_epoch = False


@scene()
async def test_a_group_of_its_own_that_begins_while_the_link_is_opened(stage: Stage) -> None:
    stage.hears(READY)
    stage.supervisor.status.in_epoch = True
    await sees(lambda: stage.follower._opening is None or stage.follower._opening.done())
    assert stage.supervisor.gateway.models() == ()
    stage.supervisor.status.in_epoch = False
    await sees(lambda: stage.connections == 0)


@pytest.mark.parametrize(
    "addresses", [(), ("nonsense",), ("1.2.3.4:http", "[::1]:99999", "x:-1", "y:0"), ("1.2.3.4:1",)]
)
@scene()
async def test_an_address_that_makes_no_sense_is_said_and_tried_again(
    stage: Stage, addresses: tuple[str, ...]
) -> None:
    right, stage.knowledge.addresses[HOST] = stage.knowledge.addresses[HOST], addresses
    stage.hears(READY)
    await sees(lambda: stage.follower._opening is None or stage.follower._opening.done())
    assert stage.supervisor.gateway.health().reason == "connecting to rank 0"
    stage.knowledge.addresses[HOST] = (*addresses[:0], *right)
    await sees(stage.shows(ServingState.READY))


@scene()
async def test_a_host_that_says_nothing_is_let_go_with_its_connection(stage: Stage) -> None:
    stage.silent = True
    stage.hears(READY)
    await sees(lambda: stage.connections == 1)
    stage.hears(None)
    await sees(lambda: stage.connections == 0)
    stage.silent = False
    await stage.follows()
    assert stage.connections == 1


@scene()
async def test_a_model_that_is_not_here_yet_is_waited_for(stage: Stage) -> None:
    source, stage.model.source = stage.model.source, None
    stage.hears(READY)
    assert stage.supervisor.status.state is ServingState.LOADING
    stage.model.problem = "/models/x is not here"
    stage.hears(READY)
    health = stage.supervisor.gateway.health()
    assert (health.state, health.reason) == ("idle", "/models/x is not here"), "nothing comes by itself"
    stage.model.source, stage.model.problem = source, ""
    await sees(stage.shows(ServingState.READY))


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("starting", ServingState.FORMING),
        ("loading", ServingState.LOADING),
        ("stopped", ServingState.FORMING),
        ("failed", ServingState.FAILED),
    ],
)
@scene()
async def test_the_state_of_the_group_is_shown(stage: Stage, said: str, shown: ServingState) -> None:
    stage.hears(replace(READY, state=said, reason="rank 1 is gone"))
    assert (stage.supervisor.status.state, stage.supervisor.gateway.health().reason) == (
        shown,
        "rank 1 is gone",
    )


@scene()
async def test_a_failure_elsewhere_is_not_kept_as_one_s_own(stage: Stage) -> None:
    stage.hears(replace(READY, state="failed", reason="it is broken"))
    stage.hears(None)
    assert stage.supervisor.status.state is ServingState.IDLE
    assert stage.supervisor.gateway.health().reason == "members come and go"


@scene()
async def test_a_failure_of_its_own_stays_until_there_is_something_new(stage: Stage) -> None:
    stage.supervisor.status.resting = True
    stage.supervisor.status.enter(ServingState.FAILED)
    stage.hears(None)
    assert stage.supervisor.status.state is ServingState.FAILED


@scene()
async def test_no_link_is_opened_to_a_group_that_still_serves_another_model(stage: Stage) -> None:
    stage.hears(replace(READY, model="other"))
    assert stage.supervisor.status.state is ServingState.LOADING
    assert stage.follower._opening is None


@scene()
async def test_the_link_to_an_owner_ends_when_another_one_serves(stage: Stage) -> None:
    await stage.follows()
    stage.servings = {OTHER: READY}
    stage.follower.follow()
    await sees(lambda: stage.connections == 0)


LOADS, NOWHERE = replace(READY, state="loading"), replace(READY, state="idle", participants=())


@pytest.mark.parametrize(
    ("servings", "counts"),
    [
        ({}, None),
        ({HOST: READY, OTHER: READY}, OTHER),
        ({HOST: READY, OTHER: LOADS}, OTHER),
        ({HOST: READY, OTHER: NOWHERE}, HOST),
        ({HOST: LOADS, OTHER: NOWHERE}, OTHER),
        ({HOST: LOADS}, None),
        ({"c" * 32: READY, HOST: READY}, HOST),
    ],
)
def test_the_owner_s_report_counts_unless_only_another_node_serves(
    servings: Mapping[str, Serving], counts: str | None
) -> None:
    assert followed(servings, owner=OTHER) == counts


@scene()
async def test_of_several_owners_that_of_the_assignment_counts(stage: Stage) -> None:
    stage.servings = {OTHER: replace(READY, epoch=9), HOST: replace(READY, state="loading")}
    stage.follower.follow()
    assert (stage.supervisor.status.state, stage.supervisor.status.epoch) == (ServingState.LOADING, 7)
    stage.present = False
    stage.follower.follow()
    assert stage.supervisor.status.state is ServingState.IDLE
