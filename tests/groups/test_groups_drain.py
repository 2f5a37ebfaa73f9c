"""An agent that is told to stop: nothing new, what is open to its end, and the others know of it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.admin.handlers import Admin as Administration
from mlxtp.agent import drain_on_signal
from mlxtp.api.backend import StreamEnd, Tokens
from mlxtp.errors import Code, GroupError, RequestError
from mlxtp.groups.groups import LOOK_S, Drain
from mlxtp.groups.health import ServingState
from mlxtp.models.inspect import ModelSource, open_model
from mlxtp.verbs import DrainProgress, StartDrain, Status
from mlxtp.wire.cluster_messages import Beat, GroupAssignment, Prepare, RankTrouble, Serving
from mlxtp.wire.messages import Error, Generate

from ..gateway import test_gateway
from ..gateway.test_gateway import DEPLOYMENT, GROUP, MODEL, TEXT, FakeRanks, everything
from ..live_cluster import START_S
from ..played import scenes
from ..stories.test_requests_go_on import COUNT, Client
from ..wire.members import Member
from . import one_node
from . import test_lifecycle as test_supervisor
from .fake_rank import ENDLESS
from .one_node import A, B, FakeLink, Node, at_leader, at_node
from .scenes import in_a_loop, sees
from .two_agents import two_agents

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return asyncio.run(open_model("tiny"))


at_gateway = scenes(test_gateway.play)
supervised = scenes(test_supervisor.play, "tmp_path", "source")


def drain_of(stage: test_supervisor.Stage, **how: Any) -> Drain:
    """The drain of an agent that no other Mac needs."""
    node, groups = (
        SimpleNamespace(drain=lambda: stage.supervisor.status.drain("")),
        SimpleNamespace(may_leave=True),
    )
    return Drain(cast(Any, node), stage.gateway, cast(Any, groups), **how)


def refused(gateway: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        gateway.generate(Generate(0, (1,), 9))
    return raised.value


@at_gateway()
async def test_nothing_new_is_taken_and_what_is_open_goes_on_from_group_to_group(
    stage: test_gateway.Stage,
) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.closing = "this Mac is about to stop"
    error = refused(stage.gateway)
    assert (error.code, error.status) == (Code.SHUTTING_DOWN, 503)
    assert error.detail == "this Mac is about to stop; try again"
    with pytest.raises(RequestError) as relayed:
        stage.gateway.relay(Generate(1, (1,), 9), lambda _: None)
    assert relayed.value.code is Code.SHUTTING_DOWN
    stage.say(1, 50)
    stage.gateway.park(GROUP, GroupError("another group goes on", Code.REPLANNED))
    elsewhere = FakeRanks()
    stage.gateway.serve(GROUP, DEPLOYMENT, cast(Any, elsewhere), MODEL, TEXT, here=False)
    assert elsewhere.sent == [Generate(2, (1, 50), 9, answered=1, group=GROUP)]
    stage.finish(2, "stop", 1)
    assert await everything(answer) == [Tokens((50,)), StreamEnd("stop", 1)]


@at_gateway()
async def test_a_draining_agent_is_not_the_last_to_be_asked_for_what_had_begun(
    stage: test_gateway.Stage,
) -> None:
    """The first time its refusal is the client's; what a client was promised waits for another group."""
    stage.gateway.serve(GROUP, DEPLOYMENT, cast(Any, stage.ranks), MODEL, TEXT, here=False)
    first = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.on_event(Error(Code.SHUTTING_DOWN, "about to stop", 1))
    assert stage.open == 0
    with pytest.raises(GroupError):
        await first.accepted()
    begun = stage.gateway.generate(Generate(0, (1,), 9))
    stage.say(2, 50)
    stage.gateway.on_event(Error(Code.REPLANNED, "another group goes on", 2))
    stage.gateway.deployments.named(DEPLOYMENT).resume()
    stage.gateway.on_event(Error(Code.SHUTTING_DOWN, "about to stop", 3))
    assert stage.open == 1
    await begun.aclose()


@supervised()
async def test_an_agent_is_draining_until_its_last_request_is_done(
    stage: test_supervisor.Stage, tmp_path: Path
) -> None:
    await stage.serves(1)
    admin = Administration(one_node.alone(tmp_path), cast(Any, None))
    admin.draining = drain_of(stage)
    answer = stage.gateway.generate(Generate(0, (5,), ENDLESS))
    await answer.accepted()
    assert not (await admin.drain_progress(DrainProgress()))["draining"]
    assert admin.drain(StartDrain()) == {"draining": True, "over": False, "open_requests": 1, "left_s": None}
    assert stage.supervisor.status.state is ServingState.DRAINING
    assert refused(stage.gateway).code is Code.SHUTTING_DOWN
    health = stage.gateway.health()
    assert (health.state, health.ready, health.reason) == ("draining", False, "this Mac is about to stop")
    await asyncio.sleep(3 * LOOK_S)
    assert not admin.draining.over.is_set()
    await answer.aclose()
    await admin.draining.over.wait()
    assert (await admin.drain_progress(DrainProgress()))["over"]


@supervised()
async def test_ctrl_c_says_what_a_second_one_does_which_ends_the_drain_and_further_ones_cut_nothing(
    stage: test_supervisor.Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await stage.serves(1)
    drain = drain_of(stage)
    drain_on_signal(drain, 60.0)
    answer = stage.gateway.generate(Generate(0, (5,), ENDLESS))
    await answer.accepted()
    signal.raise_signal(signal.SIGINT)
    await sees(lambda: drain.begun)
    assert "open requests get 60 s to end; a second Ctrl-C ends at once" in caplog.text
    await asyncio.sleep(3 * LOOK_S)
    assert not drain.over.is_set()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
        await asyncio.sleep(0.01)
    await asyncio.wait_for(drain.over.wait(), 5.0)
    await answer.aclose()


@supervised()
async def test_a_group_that_fails_meanwhile_is_formed_again_and_is_draining(
    stage: test_supervisor.Stage,
) -> None:
    await stage.serves(1)
    drain = drain_of(stage)
    answer = stage.gateway.generate(Generate(0, (5,), ENDLESS))
    await anext(answer)
    drain.start()
    stage.supervisor.end_epoch(GroupError("a better group is there", Code.REPLANNED))
    await sees(lambda: stage.asked == 2)
    assert stage.gateway.health().state == "draining"
    stage.plan(2)
    await stage.until(ServingState.DRAINING, 2)
    await sees(lambda: any(note["answered"] for note in stage.orders.notes("generate")))
    assert not drain.over.is_set()
    await answer.aclose()
    await drain.over.wait()


@supervised()
async def test_the_earliest_limit_holds_for_any_open_requests(stage: test_supervisor.Stage) -> None:
    await stage.serves(1)
    now = 100.0
    drain = drain_of(stage, clock=lambda: now)
    answer = stage.gateway.generate(Generate(0, (5,), ENDLESS))
    await answer.accepted()
    drain.start(60.0)
    drain.start(10.0)
    drain.start(30.0)
    drain.start()
    assert drain.left_s == 10.0
    now = 109.9
    await asyncio.sleep(0.3)
    assert not drain.over.is_set()
    now = 110.0
    await drain.over.wait()
    await answer.aclose()


@at_leader()
async def test_the_others_hear_at_once_who_is_about_to_stop(node: Node, a: FakeLink, member: Member) -> None:
    assert not any(beat.draining for beat in a.heard(Beat))
    admin = Administration(node.parts, member.store)
    admin.drain(StartDrain())
    assert a.heard(Beat)[-1].draining
    told = len(a.heard(Beat))
    admin.draining.start(5.0)
    assert len(a.heard(Beat)) == told, "once"
    node.live_once(a)
    status = admin.status(Status())
    assert [row["self"] for row in status["members"] if row["draining"]] == [True]
    assert (status["state"], status["reason"]) == ("draining", "this Mac is about to stop")
    assert node.parts.gateway.closing == "this Mac is about to stop"


@at_leader()
async def test_a_coordinator_assigns_what_it_owns_to_another_mac_and_leaves_when_its_ranks_have_ended(
    node: Node, a: FakeLink
) -> None:
    group = node.group
    assert group.scope.owned
    group.supervisor.status.in_epoch = True
    node.parts.node.drain()
    assert not node.parts.groups.may_leave
    node.live(a)
    assigned = a.heard(GroupAssignment)[-1]
    assert assigned.ranks == (A,)
    assert not node.parts.groups.may_leave
    group.supervisor.status.in_epoch = False
    assert node.parts.groups.may_leave


@at_leader()
async def test_a_coordinator_without_another_mac_keeps_its_group_and_may_leave(
    node: Node, a: FakeLink
) -> None:
    group = node.group
    one_node.awaited(group)
    node.live(a)
    assert group.supervisor.status.in_epoch
    node.hear(a, Beat(0, "", 0, 0, 0, True, 0, draining=True))
    node.parts.node.drain()
    assert not node.parts.groups.may_leave
    node.tick()
    assert node.parts.node.leadership.leading
    assert group.scope.owned
    assert node.parts.groups.may_leave
    group.scope.plan, group.supervisor.status.in_epoch = None, False


@at_node()
async def test_an_agent_about_to_stop_takes_part_in_nothing_new(node: Node) -> None:
    b = node.meet(B)
    node.follow(b)
    node.hear_assigned(b, B, node.parts.node.node_id)
    node.hear(b, Prepare(8, 1, "", "tiny", group=GROUP))
    assert [order.epoch for _, order in node.orders] == [8]  # type: ignore[attr-defined]
    node.parts.node.drain()
    node.hear(b, Prepare(9, 1, "", "tiny", group=GROUP))
    assert len(node.orders) == 1
    assert b.heard(RankTrouble)[-1].detail == "studio is about to stop"


@at_node()
async def test_what_drains_elsewhere_is_shown_and_not_asked(node: Node) -> None:
    b = node.meet(B)
    node.follow(b)
    why = "mac-f is about to stop"
    node.parts.node.desired.serve("tiny")
    node.hear_assigned(b, B)
    ends = {"group": GROUP, "deployment": DEPLOYMENT}
    node.hear(b, Serving(7, "draining", why, "none", "", (B,), 2, "", 0, 9, 9, (1,), **ends))
    node.tick()
    health = node.parts.gateway.health()
    assert (health.state, health.reason, health.ready) == ("draining", why, False)
    assert node.group.controller.situation(None).others == {}


@pytest.mark.group
@in_a_loop(seconds=2 * START_S)
async def test_a_rank_that_the_group_needs_stays_until_all_requests_are_done(tmp_path: Path) -> None:
    """Both Macs are wanted, so there is no group without it. Neither takes anything new."""
    async with two_agents(tmp_path) as agents:
        for agent in agents:
            await agent.wait_ready()
        first, second = sorted(agents, key=lambda agent: not agent.parts.groups.in_epoch)
        client = Client(first, Generate(0, COUNT, 300))
        reading = asyncio.ensure_future(client.read())
        await sees(lambda: client.tokens)
        epoch = first.parts.groups.shown.supervisor.status.epoch
        second.drain.start()
        over = asyncio.ensure_future(second.drain.over.wait())
        await sees(lambda: first.parts.groups.shown.supervisor.status.state is ServingState.DRAINING)
        await sees(lambda: first.parts.gateway.models() == ())
        name = second.parts.node.name
        why = f"{name} is about to stop, and the group needs it; try again"
        with pytest.raises(RequestError, match=why):
            await first.parts.gateway.acquire_model(None)
        assert refused(second.parts.gateway).code is Code.SHUTTING_DOWN
        await asyncio.wait({reading, over}, return_when=asyncio.FIRST_COMPLETED)
        assert reading.done(), "it left too early"
        assert client.end.reason == "stop"
        await over
        assert first.parts.groups.shown.supervisor.status.epoch == epoch
        assert first.parts.node.leadership.draining == {second.parts.node.node_id}
