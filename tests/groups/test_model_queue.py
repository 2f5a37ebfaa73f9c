"""Requests that wait for a model at one node, whose coordinator and models are played by hand."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlxtp.api.backend import ModelInfo, ModelLease
from mlxtp.cluster.reconcile import Situation
from mlxtp.config import Limits, embedded_model_path
from mlxtp.errors import Code, GroupError, MlxtpError, ModelError, RequestError
from mlxtp.groups.health import ServingState
from mlxtp.groups.lifecycle import DEPLOYMENT, GROUP
from mlxtp.models.inspect import ModelSource
from mlxtp.wire.cluster_messages import Deployments, ModelQueue, ModelStatus, ModelTurn
from mlxtp.wire.messages import Generate

from ..cluster.deployed import only
from ..gateway.test_gateway import TEXT, FakeRanks
from ..wire.members import Member
from .one_node import CLOCK, MACHINE, A, B, FakeLink, Node, play
from .scenes import sees, within

TERM = 5
LOADED = "org/loaded"
WANTED = "tiny"
"""It is on every Mac's disk."""


class Waiting:
    """A request that waits for its turn."""

    def __init__(self, turn: ModelLease) -> None:
        self.turn = turn
        self.told: list[str] = []
        self._task = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        async for what in self.turn.wait():
            self.told.append(what)

    async def has_come(self) -> None:
        await within(asyncio.shield(self._task))
        assert self.turn.come

    async def refused(self) -> RequestError:
        with pytest.raises(RequestError) as caught:
            await within(asyncio.shield(self._task))
        return caught.value


async def ask(node: Node, model: str | None, within_s: float = 0.0) -> Waiting:
    waiting = Waiting(await node.parts.groups.shown.supervisor.gateway.acquire_model(model, within_s))
    await asyncio.sleep(0)
    node.tick(0.01)
    return waiting


async def refusal(node: Node, model: str) -> RequestError:
    """Of a request that need not even wait."""
    with pytest.raises(RequestError) as caught:
        await node.parts.groups.shown.supervisor.gateway.acquire_model(model)
    return caught.value


def served(node: Node, model: str) -> None:
    """From now on this model is there for requests; an empty one: none is."""
    info = ModelInfo(model, ("default",), Path(), 1000, 1, (1,), 300)
    gateway = node.parts.groups.shown.supervisor.gateway
    if model:
        gateway.serve(GROUP, DEPLOYMENT, cast(Any, FakeRanks()), info, TEXT)
    else:
        gateway.detach(GROUP)
    node.tick(0.01)


def following(node: Node, *, pinned: bool = False) -> FakeLink:
    """The other end, which coordinates a cluster that serves `LOADED`."""
    link = node.meet(A)
    node.follow(link, TERM)
    desires(node, link, LOADED, pinned=pinned)
    served(node, LOADED)
    return link


def desires(node: Node, link: FakeLink, model: str, *, pinned: bool = False) -> None:
    version = node.parts.node.replica.desired.version + 1
    served(node, "")
    node.hear(link, *only(version, A, model, pinned=pinned).messages())


def last(link: FakeLink) -> ModelQueue:
    queue: ModelQueue = link.heard(ModelQueue)[-1]
    return queue


def test_a_request_for_the_loaded_model_begins_at_once_without_a_message(
    tmp_path: Path, member: Member
) -> None:
    async def story(node: Node) -> None:
        link = following(node)
        for name in (None, "", "default", LOADED):
            turn = await node.parts.groups.shown.supervisor.gateway.acquire_model(name)
            assert turn.come
            turn.close()
        node.tick()
        assert link.heard(ModelQueue) == []

    play(tmp_path, member, story, load_on_request=True)


def test_a_request_waits_until_the_coordinator_has_its_model_loaded(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        link = following(node)
        running = await ask(node, LOADED)
        waiting = await ask(node, WANTED)
        assert last(link) == ModelQueue(0, 0, (WANTED,), 1)
        node.hear(node.meet(B), ModelTurn(TERM, 1, WANTED, "", ""))
        node.tick(0.01)
        assert last(link).number == 0, "only who coordinates gives turns"
        node.hear(link, ModelTurn(TERM, 1, WANTED, "", ""))
        node.tick(0.01)
        assert last(link) == ModelQueue(TERM, 1, (WANTED,), 1)
        behind = await ask(node, LOADED)
        assert not behind.turn.come
        running.turn.close()
        node.tick(0.01)
        assert last(link) == ModelQueue(TERM, 1, (WANTED, LOADED), 0)
        desires(node, link, WANTED)
        node.parts.groups.shown.supervisor.status.reason = GroupError("loading 40 %")
        await sees(lambda: "loading 40 %" in waiting.told)
        served(node, WANTED)
        await waiting.has_come()
        assert waiting.told[0] == f"waiting until the requests for {LOADED} end"
        assert waiting.turn.model == WANTED
        assert not behind.turn.come
        node.hear(link, ModelTurn(TERM, 2, LOADED, "", ""))
        late = await ask(node, WANTED)
        assert not late.turn.come, "it came after a request that waits for the other one"
        node.tick(0.01)
        assert last(link) == ModelQueue(TERM, 2, (LOADED, WANTED), 1)
        for each in (waiting, behind, late):
            each.turn.close()
        node.tick(0.01)
        assert last(link) == ModelQueue(TERM, 2, (), 0)

    play(tmp_path, member, story, load_on_request=True)


def test_what_is_on_no_disk_is_answered_as_ever(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        link = following(node)
        for name in ("org/none", "/no/such/folder", "nonsense"):
            assert (await node.parts.groups.shown.supervisor.gateway.acquire_model(name)).come
        assert link.heard(ModelQueue) == []

    play(tmp_path, member, story, load_on_request=True)


def test_without_the_option_nothing_is_wanted_and_the_turn_of_others_is_kept(
    tmp_path: Path, member: Member
) -> None:
    async def story(node: Node) -> None:
        link = following(node)
        assert await node.parts.groups.shown.supervisor.gateway.on_request() == ()
        assert (
            await node.parts.groups.shown.supervisor.gateway.acquire_model(WANTED)
        ).come  # to be told that it is not there
        running = await ask(node, LOADED)
        node.tick()
        assert link.heard(ModelQueue) == []
        node.hear(link, ModelTurn(TERM, 1, WANTED, "", ""))
        node.tick(0.01)
        assert last(link) == ModelQueue(TERM, 1, (), 1)
        error = await refusal(node, LOADED)
        assert (error.status, error.code) == (503, Code.NOT_READY)
        assert f"{WANTED} is loaded next" in error.detail
        running.turn.close()
        node.tick(0.01)
        assert last(link) == ModelQueue(TERM, 1, (), 0)

    play(tmp_path, member, story)


def test_a_pinned_model_is_named_with_what_changes_it(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        link = following(node)
        waiting = await ask(node, WANTED)
        assert WANTED in {each.id for each in await node.parts.groups.shown.supervisor.gateway.on_request()}
        desires(node, link, LOADED, pinned=True)
        node.tick(0.01)
        for error in (await waiting.refused(), await refusal(node, WANTED)):
            assert (error.status, error.code, error.param) == (404, Code.MODEL_NOT_FOUND, "model")
            assert f"{LOADED} is pinned" in error.detail
            assert f"`mlxtp serve {WANTED}`" in error.detail
            assert "`mlxtp unload`" in error.detail
        assert await node.parts.groups.shown.supervisor.gateway.on_request() == ()
        served(node, LOADED)
        assert (await ask(node, LOADED)).turn.come

    play(tmp_path, member, story, load_on_request=True)


@pytest.mark.parametrize(
    ("broken", "status", "code", "more"),
    [(True, 400, Code.MODEL_INVALID, ""), (False, 503, Code.NOT_READY, "; try again later")],
)
def test_who_waited_for_what_cannot_be_loaded_hears_why_and_who_comes_soon_too(
    tmp_path: Path, member: Member, broken: bool, status: int, code: Code, more: str
) -> None:
    async def story(node: Node) -> None:
        link = following(node)
        waiting, patient = await ask(node, WANTED), await ask(node, LOADED)
        node.hear(link, ModelTurn(TERM, 1, LOADED, WANTED, "no weights", broken))
        node.tick(0.01)
        for error in (await waiting.refused(), await refusal(node, WANTED)):
            assert (error.status, error.code) == (status, code)
            assert error.detail == f"{WANTED} could not be loaded: no weights{more}"
        await patient.has_come()
        node.tick(61)
        assert not (await ask(node, WANTED)).turn.come

    play(tmp_path, member, story, load_on_request=True)


def test_who_names_nothing_takes_what_is_wanted_and_brings_nothing_back(
    tmp_path: Path, member: Member
) -> None:
    async def story(node: Node) -> None:
        link = following(node)
        node.hear(link, ModelTurn(TERM, 1, WANTED, "", ""))
        first, second = await ask(node, "default"), await ask(node, None)
        desires(node, link, WANTED)
        served(node, WANTED)
        await first.has_come()
        assert first.turn.model == WANTED, "it was asked when the other one was loaded"
        for each in (first, second):
            each.turn.close()
        desires(node, link, LOADED)
        unnamed, named = await ask(node, ""), await ask(node, WANTED)
        desires(node, link, "")  # a person unloads it
        node.tick(0.01)
        error = await unnamed.refused()
        assert (error.status, error.code) == (503, Code.NOT_READY)
        assert "nothing is loaded; name a model" in error.detail
        assert "`mlxtp serve MODEL`" in error.detail
        assert last(link).waiting == (WANTED,)
        assert str(await refusal(node, "default")) == error.detail
        named.turn.close()

    play(tmp_path, member, story, load_on_request=True)


@pytest.mark.parametrize(
    ("queue_s", "within_s", "status", "code"),
    [(0.05, 0.0, 503, Code.OVERLOADED), (0.05, 9.0, 503, Code.OVERLOADED), (9.0, 0.05, 504, Code.DEADLINE)],
)
def test_no_request_waits_for_ever(
    tmp_path: Path, member: Member, queue_s: float, within_s: float, status: int, code: Code
) -> None:
    async def story(node: Node) -> None:
        link = following(node)
        error = await (await ask(node, WANTED, within_s)).refused()
        assert (error.status, error.code) == (status, code)
        assert "within 0.05 s" in error.detail
        node.tick(0.01)
        assert last(link).waiting == ()

    play(tmp_path, member, story, load_on_request=True, limits=replace(Limits(), queue_s=queue_s))


def test_a_request_at_an_agent_about_to_stop_must_ask_another(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        following(node)
        waiting = await ask(node, WANTED)
        node.parts.groups.shown.supervisor.gateway.closing = "this Mac is about to stop"
        node.parts.switcher.advance(CLOCK.now)
        error = await waiting.refused()
        assert (error.status, error.code) == (503, Code.SHUTTING_DOWN)

    play(tmp_path, member, story, load_on_request=True)


def test_a_new_coordinator_is_told_who_waits(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        following(node)
        other = node.meet(B)
        await ask(node, WANTED)
        assert other.heard(ModelQueue) == []
        node.follow(other, TERM + 1)
        node.tick(0.01)
        assert last(other) == ModelQueue(0, 0, (WANTED,), 0)

    play(tmp_path, member, story, load_on_request=True)


def test_turns_of_two_coordinators_of_one_term_are_told_apart(tmp_path: Path, member: Member) -> None:
    """So it is when a partition heals whose sides both had lost the same one."""

    async def story(node: Node) -> None:
        before = node.meet(B)
        node.follow(before, TERM)
        desires(node, before, LOADED)
        served(node, LOADED)
        node.hear(before, ModelTurn(TERM, 3, WANTED, "", ""))
        waiting = await ask(node, LOADED)
        assert last(before) == ModelQueue(TERM, 3, (LOADED,), 0)
        link = node.meet(A)
        node.follow(link, TERM)
        node.tick(0.01)
        await waiting.has_come()
        wants = await ask(node, WANTED)
        assert last(link) == ModelQueue(0, 0, (WANTED,), 1), "of this one's turns it has heard none"
        node.hear(link, ModelTurn(TERM, 1, WANTED, "", ""))
        node.tick(0.01)
        assert last(link) == ModelQueue(TERM, 1, (WANTED,), 1)
        for each in (waiting, wants):
            each.turn.close()

    play(tmp_path, member, story, load_on_request=True)


# --- where this node coordinates --------------------------------------------------------------------------


def leading(node: Node) -> FakeLink:
    """The other end of a link to a node that coordinates a cluster which serves `LOADED`."""
    link = node.meet(B)
    node.lead(ModelSource(LOADED, embedded_model_path(), cast(Any, None)))
    unplanned(node, "")
    node.parts.node.desired.set(LOADED, by_person=False)
    node.parts.forwarding.follow = lambda: None  # type: ignore[method-assign]
    node.parts.groups.shown.supervisor.status.state = ServingState.READY
    served(node, LOADED)
    return link


async def loads(node: Node) -> None:
    """Once it has looked at the model on its disk, the coordinator has it loaded."""

    def look() -> bool:
        node.tick(0.0)
        return node.parts.node.replica.desired.model == WANTED

    await sees(look)


def unplanned(node: Node, why: str) -> None:
    """From now on there is no group, or none is possible."""
    node.parts.controller.situation = lambda _hosted: Situation(refusal=why)  # type: ignore[method-assign]


def tell(node: Node, link: FakeLink, *waiting: str, running: int = 0) -> None:
    """The queue of the other member, which has heard of the last turn."""
    turns = link.heard(ModelTurn)
    term, number = (turns[-1].term, turns[-1].number) if turns else (0, 0)
    node.hear(link, ModelQueue(term, number, waiting, running))
    node.tick(0.01)


def test_the_coordinator_loads_what_is_asked_for_once_no_request_is_answered_by_the_other(
    tmp_path: Path, member: Member
) -> None:
    async def story(node: Node) -> None:
        link, cluster = leading(node), node.parts
        here = await ask(node, LOADED)
        tell(node, link, WANTED)
        [turn] = link.heard(ModelTurn)
        assert turn == ModelTurn(cluster.node.leadership.claim.term, 1, WANTED, "", "")
        tell(node, link, WANTED)
        assert cluster.node.replica.desired.model == LOADED, "a request runs here"
        here.turn.close()
        await loads(node)
        desired = cluster.node.replica.desired
        assert (desired.model, desired.pinned) == (WANTED, False)
        assert link.heard(Deployments)[-1].rows == cluster.node.replica.deployments.rows

    play(tmp_path, member, story)


def test_requests_of_a_member_that_is_not_heard_for_a_moment_are_not_cut(
    tmp_path: Path, member: Member
) -> None:
    async def story(node: Node) -> None:
        link, cluster = leading(node), node.parts
        tell(node, link, running=1)
        waiting = await ask(node, WANTED)
        link.close()
        node.tick(0.5)
        assert cluster.node.replica.desired.model == LOADED, "it may be back in a moment"
        for _ in range(3):
            node.tick(0.5)
        await loads(node)  # it is gone, and its requests with it
        waiting.turn.close()

    play(tmp_path, member, story, load_on_request=True)


def test_requests_passed_on_to_rank_0_run_in_any_order_of_reports(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        link, cluster = leading(node), node.parts
        gateway = cluster.supervisor.gateway
        cancel = gateway.relay(Generate(1, (1, 2), 9), lambda _: None)
        waiting = await ask(node, WANTED)
        tell(node, link)
        assert cluster.node.replica.desired.model == LOADED
        cancel()
        await loads(node)
        waiting.turn.close()

    play(tmp_path, member, story, load_on_request=True)


@pytest.mark.parametrize(
    ("before", "why", "status"),
    [
        (LOADED, ModelError("no weights"), 400),
        ("", GroupError("no weights", Code.MODEL_NOT_DIVISIBLE), 400),
        (LOADED, GroupError("rank 1 was ended by signal 9"), 503),
    ],
)
def test_what_cannot_be_served_gives_way_to_what_was_there_before(
    tmp_path: Path, member: Member, before: str, why: MlxtpError, status: int
) -> None:
    async def story(node: Node) -> None:
        link, cluster = leading(node), node.parts
        cluster.node.desired.set(before, by_person=False)
        served(node, before)
        waiting = await ask(node, WANTED)
        tell(node, link)
        await loads(node)
        served(node, "")
        supervisor = cluster.supervisor
        supervisor.status.resting, supervisor.status.state = True, ServingState.FAILED
        supervisor.status.reason = why
        node.tick(0.01)
        error = await waiting.refused()
        assert error.detail.startswith(f"{WANTED} could not be loaded: {why.detail}")
        assert error.status == status, "only what is wrong with the model itself is a mistake of the client"
        desired = cluster.node.replica.desired
        assert (desired.model, desired.pinned) == (before, False)
        told = link.heard(ModelTurn)[-1]
        assert (told.model, told.refused, told.why, told.broken) == (
            before,
            WANTED,
            why.detail,
            status == 400,
        )
        version = desired.version
        behind = await ask(node, before) if before else None
        for _ in range(3):  # the state is still that of the failure
            node.tick(1.0)
        if behind is not None:
            supervisor.status.resting, supervisor.status.state = False, ServingState.READY
            served(node, before)
            await behind.has_come()
        assert cluster.node.replica.desired.version == version

    play(tmp_path, member, story, load_on_request=True)


def test_what_a_person_unloaded_does_not_come_back_in_place_of_what_cannot_be_served(
    tmp_path: Path, member: Member
) -> None:
    async def story(node: Node) -> None:
        link, cluster = leading(node), node.parts
        link.close()
        for _ in range(4):
            node.tick(0.5)
        cluster.node.desired.set("")
        waiting = await ask(node, WANTED)  # before anybody has looked
        await loads(node)
        supervisor = cluster.supervisor
        supervisor.status.resting, supervisor.status.state = True, ServingState.FAILED
        supervisor.status.reason = GroupError("no weights")
        node.tick(0.01)
        assert "no weights" in (await waiting.refused()).detail
        assert cluster.node.replica.desired.model == ""

    play(tmp_path, member, story, load_on_request=True)


def test_who_waits_for_the_only_model_there_was_is_told_why_it_is_not_there(
    tmp_path: Path, member: Member
) -> None:
    async def story(node: Node) -> None:
        leading(node)
        cluster = node.parts
        cluster.switcher.fate = replace(cluster.switcher.fate, served=None)
        supervisor = cluster.supervisor
        supervisor.status.resting, supervisor.status.state = True, ServingState.FAILED
        supervisor.status.reason = GroupError("no weights")
        served(node, "")
        error = await (await ask(node, LOADED)).refused()
        assert "no weights" in error.detail
        assert cluster.node.replica.desired.model == LOADED

    play(tmp_path, member, story, load_on_request=True)


def test_a_model_that_has_no_place_for_a_while_has_none(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        link, cluster = leading(node), node.parts
        waiting = await ask(node, WANTED)
        tell(node, link)
        await loads(node)
        served(node, "")
        cluster.supervisor.status.state = ServingState.IDLE
        unplanned(node, "64 GB are too little")
        for _ in range(11):
            node.live_once(link)
            node.tick(0.5)
        assert cluster.node.replica.desired.model == WANTED, "memory that was just freed is told late"
        for _ in range(3):
            node.live_once(link)
            node.tick(0.5)
        assert "64 GB are too little" in (await waiting.refused()).detail
        assert cluster.node.replica.desired.model == LOADED

    play(tmp_path, member, story, load_on_request=True)


def test_what_is_pinned_and_has_no_place_is_not_waited_for(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        link, cluster = leading(node), node.parts
        served(node, "")
        cluster.supervisor.status.state = ServingState.IDLE
        unplanned(node, "64 GB are too little")
        waiting = await ask(node, "default")
        cluster.node.desired.set(LOADED)
        for _ in range(13):
            node.live_once(link)
            node.tick(0.5)
        for each in (waiting, await ask(node, LOADED)):
            error = await each.refused()
            assert (error.status, error.code) == (503, Code.NOT_READY)
            assert "64 GB are too little" in error.detail
        told = len(link.heard(ModelTurn))
        tell(node, link, LOADED)
        assert len(link.heard(ModelTurn)) == told + 1, "who waits elsewhere is told, too"
        assert cluster.node.replica.desired.pinned
        cluster.supervisor.status.resting, cluster.supervisor.status.state = True, ServingState.FAILED
        cluster.supervisor.status.reason = ModelError("no weights")
        tell(node, link, LOADED)
        told_last = link.heard(ModelTurn)[-1]
        assert (told_last.why, told_last.broken) == ("no weights", False), "no client chose it"
        cluster.supervisor.status.resting = False
        unplanned(node, "")
        node.live_once(link)
        cluster.supervisor.status.state = ServingState.READY
        served(node, LOADED)
        assert (await ask(node, LOADED)).turn.come

    play(tmp_path, member, story, load_on_request=True)


@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_served_elsewhere_and_cannot_be_had_here_is_not_waited_for(
    tmp_path: Path, member: Member, pinned: bool
) -> None:
    async def story(node: Node) -> None:
        link, cluster = following(node), node.parts
        desires(node, link, "house", pinned=pinned)
        waiting = await ask(node, "default")
        node.hear(link, ModelStatus(cluster.node.replica.desired.model, "5" * 64, ""))
        await sees(lambda: cluster.models.desired.problem)
        node.tick(0.01)
        for error in (await waiting.refused(), await refusal(node, "house")):
            assert (error.status, error.code) == (503, Code.NOT_READY)
            assert error.detail == "house cannot be served on this Mac: house is not here"
        cluster.models.desired.problem = ""
        served(node, "house")
        assert (await ask(node, "house")).turn.come

    play(tmp_path, member, story, load_on_request=True)


def test_what_is_served_goes_on_though_its_files_are_gone(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        following(node, pinned=True)
        node.parts.models.desired.problem = "the disk is gone"
        assert (await ask(node, LOADED)).turn.come

    play(tmp_path, member, story, load_on_request=True)


def test_what_is_wanted_again_is_not_refused_for_what_was(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        link = following(node)
        node.hear(link, ModelTurn(TERM, 1, LOADED, WANTED, "no weights", True))
        node.hear(link, ModelTurn(TERM, 2, LOADED, LOADED, "no place"))
        assert (await ask(node, LOADED)).turn.come
        await refusal(node, WANTED)
        desires(node, link, WANTED, pinned=True)
        node.hear(link, ModelTurn(TERM, 3, WANTED, "", ""))
        served(node, WANTED)
        assert (await ask(node, WANTED)).turn.come

    play(tmp_path, member, story, load_on_request=True)


def test_what_is_not_on_the_coordinators_disk_may_be_on_another_one(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        link, cluster = leading(node), node.parts
        waiting = await ask(node, WANTED)
        tell(node, link)
        await loads(node)
        served(node, "")
        cluster.supervisor.status.state = ServingState.IDLE
        cluster.models.desired.problem = "tiny is not here"
        cluster.node.peer_info.forget_model(WANTED)
        unplanned(node, cluster.models.desired.problem)
        node.tick(1.0)
        node.tick(1.0)
        assert waiting.turn.come is False
        assert cluster.node.replica.desired.model == WANTED
        node.hear(link, ModelStatus(cluster.node.replica.desired.model, "", "nor here"))
        node.tick(0.01)
        assert "tiny is not here" in (await waiting.refused()).detail
        assert cluster.node.replica.desired.model == LOADED

    play(tmp_path, member, story, load_on_request=True)


def test_what_is_too_large_is_refused_before_anything_is_unloaded_for_it(
    tmp_path: Path, member: Member
) -> None:
    async def story(node: Node) -> None:
        link, cluster = leading(node), node.parts
        machines = cluster.node.peer_info.machines
        for each in machines:
            machines[each] = replace(MACHINE, memory_bytes=1 << 20, free_bytes=0)
        waiting = await ask(node, WANTED)
        tell(node, link)
        await sees(lambda: node.tick(0.0) or waiting.turn not in cluster.switcher.requests.waiting)  # type: ignore[func-returns-value]
        error = await waiting.refused()
        assert (error.status, error.code) == (503, Code.NOT_READY)
        assert "(studio) has 0.0 GB for 0.6 GB" in error.detail
        assert (cluster.node.replica.desired.model, cluster.supervisor.status.state) == (
            LOADED,
            ServingState.READY,
        )
        told = link.heard(ModelTurn)[-1]
        assert (told.model, told.refused) == (LOADED, WANTED)
        assert (await ask(node, LOADED)).turn.come
        cluster.switcher.announcement.refused.clear()
        for each in machines:  # what others run may end, and what is loaded now will
            machines[each] = replace(MACHINE, free_bytes=1 << 20)
        for waiter in list(cluster.switcher.requests.running):
            waiter.close()
        waiting = await ask(node, WANTED)
        tell(node, link)
        await loads(node)
        waiting.turn.close()

    play(tmp_path, member, story, load_on_request=True)


def test_what_its_configuration_tells_cannot_be_served_is_not_waited_for(
    tmp_path: Path, member: Member
) -> None:
    async def story(node: Node) -> None:
        link = following(node)
        folder = shutil.copytree(embedded_model_path(), tmp_path / "embedding")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
        error = await refusal(node, str(folder))
        assert (error.status, error.code, error.param) == (400, Code.MODEL_INVALID, "model")
        assert error.detail == f"{folder} cannot be served: it is a BertModel, which writes no text"
        assert link.heard(ModelQueue) == []

    play(tmp_path, member, story, load_on_request=True)


def test_who_missed_a_turn_hears_it_again(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        link = leading(node)
        tell(node, link, WANTED)
        [turn] = link.heard(ModelTurn)
        node.hear(link, ModelQueue(turn.term, 0, (LOADED,), 0))
        assert link.heard(ModelTurn)[1:] == [turn], "it spoke of an older one"
        node.hear(link, ModelQueue(turn.term, turn.number, (WANTED,), 0))
        assert len(link.heard(ModelTurn)) == 2
        link.close()
        assert node.meet(B).heard(ModelTurn) == [turn], "it was away"

    play(tmp_path, member, story)


def test_after_a_broken_link_the_coordinator_hears_again_who_waits(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        link = following(node)
        waiting = await ask(node, WANTED)
        assert last(link).waiting == (WANTED,)
        link.close()
        again = node.meet(A)
        node.follow(again, TERM)
        node.tick(0.01)
        assert last(again).waiting == (WANTED,)
        waiting.turn.close()

    play(tmp_path, member, story, load_on_request=True)


def test_a_folder_that_was_served_keeps_its_short_name(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        link = following(node)
        folder = shutil.copytree(embedded_model_path(), tmp_path / "beta")
        gateway = node.parts.groups.shown.supervisor.gateway
        desires(node, link, str(folder))
        assert (await ask(node, "beta")).turn.come, "no agent knows it yet"
        served(node, "beta")
        desires(node, link, LOADED)
        served(node, LOADED)
        assert [each.id for each in await gateway.on_request()][-1] == "beta"
        waiting = await ask(node, "beta")
        assert last(link).waiting == (str(folder),)
        waiting.turn.close()
        (folder / "tokenizer.json").unlink()
        assert "beta" not in {each.id for each in await gateway.on_request()}
        error = await refusal(node, "beta")
        assert (error.status, error.code, error.param) == (404, Code.MODEL_NOT_FOUND, "model")
        assert error.detail == "beta cannot be served: the folder is incomplete: it lacks tokenizer.json"

    play(tmp_path, member, story, load_on_request=True)
