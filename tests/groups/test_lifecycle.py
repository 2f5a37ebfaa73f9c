"""Epochs that an owner plans, one after the other: real processes that compute nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.api.backend import StreamEnd, Tokens
from mlxtp.cluster.reconcile import FormEpoch, GroupForm
from mlxtp.config import Settings
from mlxtp.diagnostics import failure_store
from mlxtp.errors import Code, GroupError, MlxtpError
from mlxtp.groups import health as epoch
from mlxtp.groups import lifecycle
from mlxtp.groups.fabric import FabricBench
from mlxtp.groups.health import MAX_FAILURES, RestartPolicy, ServingState, is_legal
from mlxtp.groups.lifecycle import EpochPlan
from mlxtp.groups.process_group import EpochGroup
from mlxtp.models import self_test
from mlxtp.models.inspect import ModelSource, open_model
from mlxtp.placement.candidates import Candidate
from mlxtp.placement.cost_model import RING_ETHERNET, RING_THUNDERBOLT
from mlxtp.wire.messages import Delta, Generate, Pong
from mlxtp.wire.rank_stats import RankStats

from ..gateway.test_gateway import DEPLOYMENT, GROUP, MODEL, TEXT, FakeRanks, everything
from ..live_cluster import LIMITS, WAIT_S, rank_processes
from ..played import scenes
from .fake_rank import CONTEXT, ENDLESS, Orders
from .scenes import in_a_loop, made, run, sees, within

pytestmark = [pytest.mark.slow, pytest.mark.fault]

ALONE = EpochGroup(1, 1, "none", kind="one Mac alone")
CLOSED = GroupError("the server is shutting down", Code.SHUTTING_DOWN)


def planned(number: int, source: ModelSource, group: EpochGroup = ALONE) -> EpochPlan:
    order = FormEpoch(number, GroupForm(source.id, ("",)), ("",))
    return EpochPlan(order, source, group, Candidate(group.kind, group.world_size, backend=group.backend))


class Stage:
    """A supervisor, and the one who plans: it takes the place of the controller."""

    def __init__(self, tmp_path: Path, source: ModelSource) -> None:
        self.orders = Orders(tmp_path / "orders")
        self.home = tmp_path / "home"
        self.home.mkdir()
        self.source = source
        self.supervisor = made(
            Settings(self.home, "", 0, 1, "tiny", limits=LIMITS), worker=self.orders.worker
        )
        self.gateway = self.supervisor.gateway
        self._plans: asyncio.Queue[EpochPlan] = asyncio.Queue()
        self._changes: asyncio.Queue[None] = asyncio.Queue()
        self.asked = 0
        self.instead = False
        self.formed: list[bool] = []
        self.running: asyncio.Future[None]
        self.states: list[ServingState] = []
        enter = self.supervisor.status.enter
        self.supervisor.status.enter = lambda state: (self.states.append(state), enter(state))[1]  # type: ignore[method-assign, func-returns-value]

    async def next_plan(self) -> EpochPlan:
        self.asked += 1
        return await self._plans.get()

    async def changed(self) -> None:
        await self._changes.get()

    def failed(self, _error: MlxtpError, formed: bool) -> bool:
        self.formed.append(formed)
        return self.instead

    def died(self, _error: MlxtpError, _served_s: float, _strikes: int, *, last: bool) -> bool:
        return False

    def plan(self, epoch: int, group: EpochGroup = ALONE) -> None:
        self._plans.put_nowait(planned(epoch, self.source, group))

    def change(self) -> None:
        self._changes.put_nowait(None)

    async def serves(self, epoch: int, group: EpochGroup = ALONE) -> None:
        self.plan(epoch, group)
        await self.until(ServingState.READY, epoch)

    async def until(self, state: ServingState, epoch: int | None = None) -> None:
        await sees(
            lambda: self.supervisor.status.state is state and epoch in (None, self.supervisor.status.epoch),
            f"{state}",
        )

    async def error_of(self, answer: Any) -> MlxtpError:
        with pytest.raises(MlxtpError) as raised:
            await everything(answer)
        return raised.value


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return asyncio.run(open_model("tiny"))


def play(tmp_path: Path, source: ModelSource, story: Callable[[Stage], Awaitable[None]]) -> None:
    async def scene() -> None:
        stage = Stage(tmp_path, source)
        stage.running = asyncio.ensure_future(stage.supervisor.run(stage))
        try:
            await within(story(stage))
        finally:
            stage.gateway.close(CLOSED)
            stage.running.cancel()
            async with asyncio.timeout(WAIT_S):
                await asyncio.wait({stage.running})
        assert stage.running.cancelled(), stage.running.exception()
        assert (stage.supervisor.status.state, stage.gateway.open_requests) == (ServingState.STOPPED, 0)
        assert all(is_legal(before, after) for before, after in pairwise(stage.states)), stage.states
        assert stage.gateway.models() == ()
        assert rank_processes(stage.home) == []
        assert list(stage.home.glob("run/*/*")) == []

    run(scene())


scene = scenes(play, "tmp_path", "source")


def test_a_planned_epoch_that_does_not_begin_counts_no_longer(tmp_path: Path, source: ModelSource) -> None:
    async def scene() -> None:
        plan: asyncio.Future[EpochPlan] = asyncio.get_running_loop().create_future()

        async def next_plan() -> EpochPlan:
            return await plan

        supervisor = made(Settings(tmp_path, "", 0, 1, "tiny", limits=LIMITS))
        running = asyncio.ensure_future(supervisor.run(cast(Any, SimpleNamespace(next_plan=next_plan))))
        await asyncio.sleep(0)
        supervisor.status.in_epoch = True  # by the owner
        plan.set_result(planned(1, source))
        running.cancel()  # before its task has seen the plan
        await asyncio.wait({running})
        assert (supervisor.status.in_epoch, supervisor.has_ranks) == (False, False)

    run(scene())


@scene()
async def test_each_epoch_has_the_number_and_the_group_that_were_planned(stage: Stage) -> None:
    await stage.serves(41)
    answer = stage.gateway.generate(Generate(0, (5, 6, 7), 2))
    assert await everything(answer) == [Tokens((5,)), Tokens((6,)), StreamEnd("length", 2)]
    stage.supervisor.end_epoch(GroupError("a better group is there", Code.REPLANNED))
    await sees(lambda: stage.asked == 2)
    assert stage.orders.notes("shut down"), "it was to end in order"
    assert not stage.supervisor.status.in_epoch
    await stage.serves(50)
    assert [note["epoch"] for note in stage.orders.notes("started")] == [41, 50]
    assert ServingState.FAILED not in stage.states


@scene()
async def test_a_request_that_another_mac_answered_is_answered_here_when_a_group_forms_here(
    stage: Stage, source: ModelSource
) -> None:
    elsewhere, model = FakeRanks(), replace(MODEL, path=source.path)
    stage.gateway.serve(GROUP, DEPLOYMENT, cast(Any, elsewhere), model, TEXT, here=False)
    answer = stage.gateway.generate(Generate(0, (5, 6, 7), 3))
    stage.gateway.on_event(Delta((1,), (0,), (5,)))
    stage.plan(1)
    expected = [Tokens((5,)), Tokens((6,)), Tokens((7,)), StreamEnd("length", 3)]
    assert await everything(answer) == expected


def budgets(stage: Stage, what: str) -> list[int]:
    return [note["kv_bytes"] for note in stage.orders.notes(what)]


@scene()
async def test_a_limit_of_kv_caches_holds_at_once_and_in_each_epoch_after(stage: Stage) -> None:
    supervisor = stage.supervisor
    await supervisor.kv.limit(3000)
    await stage.serves(1)
    assert (budgets(stage, "load"), budgets(stage, "budget")) == ([3000], [])
    answer = stage.gateway.generate(Generate(0, (5,), ENDLESS))
    await answer.accepted()
    await supervisor.kv.limit(2000)
    await supervisor.kv.limit(2000)
    assert budgets(stage, "budget") == [2000]
    assert supervisor.kv.tokens == 2000
    (model,) = stage.gateway.models()
    assert model.context == 2000
    assert stage.gateway.open_requests == 1
    supervisor.end_epoch(GroupError("it is dead", Code.RANK_LOST))
    await sees(lambda: not supervisor.status.in_epoch)
    assert supervisor.kv.tokens == 0
    await stage.serves(2)
    assert (budgets(stage, "load"), budgets(stage, "budget")) == ([3000, 2000], [2000])
    await asyncio.gather(*(supervisor.kv.limit(size) for size in (1000, 500, 0)))
    assert budgets(stage, "budget") == [2000, 1000, 0], "what was overtaken is left out"
    assert supervisor.kv.tokens == CONTEXT
    await answer.aclose()


@scene()
async def test_a_limit_that_comes_while_a_model_loads_holds_once_it_serves(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = stage.supervisor.status.enter
    limits = []

    def limited(state: ServingState) -> None:
        enter(state)
        if state is ServingState.LOADING:
            limits.append(asyncio.ensure_future(stage.supervisor.kv.limit(700)))

    monkeypatch.setattr(stage.supervisor.status, "enter", limited)
    await stage.serves(1)
    await sees(lambda: stage.supervisor.kv.tokens == 700)
    assert (budgets(stage, "load"), budgets(stage, "budget")) == ([0], [700])


@scene()
async def test_a_limit_that_comes_while_a_fabric_is_measured_waits_until_it_is(stage: Stage) -> None:
    """The pipe of a rank takes one command at a time: another ended the epoch."""
    supervisor = stage.supervisor
    links, settings = SimpleNamespace(on=lambda *_: None), SimpleNamespace(fast_fences=False)
    node = cast(Any, SimpleNamespace(links=links, settings=settings))
    bench = FabricBench(node, stage.gateway, lambda _: supervisor, cast(Any, None))
    await stage.serves(1, EpochGroup(2, 2, "ring"))
    times, _, _ = await asyncio.gather(bench.measure(), supervisor.kv.limit(700), supervisor.kv.clear())
    assert times.collective_s == 1.0
    assert (supervisor.status.state, supervisor.kv.tokens) == (ServingState.READY, 700)
    assert budgets(stage, "budget") == [700, 700]


@scene()
async def test_links_are_judged_when_a_model_has_loaded_on_several_macs(stage: Stage) -> None:
    said = "ring over Thunderbolt carries 4.2 MB/s, where 3,000 MB/s are expected"
    for number, kind, expected in ((1, RING_THUNDERBOLT, said), (2, RING_ETHERNET, "")):
        await stage.serves(number, EpochGroup(2, 2, "ring", kind=kind))
        assert stage.supervisor.kv.loaded.slow_link == expected  # type: ignore[union-attr]
        stage.supervisor.end_epoch(GroupError("another plan", Code.REPLANNED))
        await sees(lambda: not stage.supervisor.status.in_epoch)


@scene()
async def test_an_epoch_that_ends_while_its_limit_changes_is_followed_by_one_within_the_limit(
    stage: Stage,
) -> None:
    stage.orders.give(0, die_on="KvBudget")
    await stage.serves(1)
    stage.orders.give(0)
    await stage.supervisor.kv.limit(700)
    await sees(lambda: not stage.supervisor.status.in_epoch)
    assert stage.supervisor.status.reason is not None
    await stage.serves(2)
    assert (budgets(stage, "load"), budgets(stage, "budget")) == ([0, 700], [])


@pytest.mark.parametrize("code", [Code.RANK_LOST, Code.REPLANNED])
@scene()
async def test_requests_go_on_in_the_next_epoch(stage: Stage, code: Code) -> None:
    await stage.serves(1)
    answer = stage.gateway.generate(Generate(0, (5,), ENDLESS))
    await answer.accepted()
    first = await anext(answer)
    stage.supervisor.end_epoch(GroupError("epoch 1 lost mini (rank 1): it is dead", code))
    stage.supervisor.end_epoch(GroupError("again"))  # there is none now
    await sees(lambda: not stage.supervisor.status.in_epoch)
    assert stage.gateway.open_requests == 1
    assert bool(stage.gateway.models()) is (code is Code.REPLANNED)
    await stage.serves(2)
    assert len(stage.supervisor._policy.failures) == (code is not Code.REPLANNED), (
        "another plan waits for none"
    )
    await sees(lambda: any(note["answered"] for note in stage.orders.notes("generate")))
    assert first == Tokens((5,))
    assert stage.orders.notes("generate")[-1]["tokens"] == [5, 5]
    await answer.aclose()


@in_a_loop()
async def test_requests_that_come_while_an_epoch_ends_for_another_plan_are_for_the_next_one(
    tmp_path: Path,
) -> None:
    supervisor, ranks, ends = made(Settings(tmp_path, "", 0, 1, "tiny")), FakeRanks(), list[object]()
    supervisor._current = cast(Any, SimpleNamespace(give_up=ends.append, lost=lambda *how: ends.append(how)))
    supervisor.gateway.serve(GROUP, DEPLOYMENT, cast(Any, ranks), MODEL, TEXT)
    supervisor.end_epoch(error := GroupError("it is dead", Code.REPLANNED), "b" * 32)
    assert ends == [("b" * 32, "it is dead")]
    supervisor.gateway.generate(Generate(0, (5,), ENDLESS))
    supervisor.end_epoch(error)
    assert ends[1:] == [error]
    supervisor.gateway.generate(Generate(0, (6,), ENDLESS))
    assert (len(ranks.sent), supervisor.gateway.open_requests) == (1, 2)
    supervisor.gateway.close(CLOSED)


@scene()
async def test_an_end_is_taken_at_any_time_on_the_way_up(stage: Stage) -> None:
    stage.orders.give(0, deaf=True)
    stage.plan(1)
    await sees(lambda: stage.supervisor.status.in_epoch)
    stage.supervisor.end_epoch(GroupError("members come and go", Code.REPLANNED))
    await sees(lambda: stage.asked == 2)
    stage.plan(2)
    await sees(lambda: any(note["epoch"] == 2 for note in stage.orders.notes("started")))
    await sees(lambda: stage.orders.notes("bootstrap"))
    stage.supervisor.end_epoch(GroupError("members come and go", Code.REPLANNED))
    await sees(lambda: stage.asked == 3)
    stage.orders.give(0)
    await stage.serves(3)


@scene()
async def test_after_too_many_failures_it_waits_for_something_to_change(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        RestartPolicy, "delay_s", lambda _, __, error, ___, **____: None if "memory" in str(error) else 0.0
    )
    stage.orders.give(0, die_on="Init", code="forward_failed")
    stage.plan(1)
    await sees(lambda: stage.asked == 2)
    assert not stage.supervisor.status.resting
    stage.gateway.serve(GROUP, DEPLOYMENT, cast(Any, FakeRanks()), MODEL, TEXT, here=False)
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.orders.give(0, die_on="Init", code="out_of_memory")
    stage.plan(2)
    await stage.until(ServingState.FAILED)
    assert (await stage.error_of(answer)).code is Code.OUT_OF_MEMORY
    assert stage.supervisor.status.resting
    assert stage.gateway.health().reason == "rank 0 ended with out_of_memory"
    assert not stage.supervisor.status.in_epoch
    stage.orders.give(0)
    stage.change()
    await sees(lambda: stage.asked == 3)
    assert not stage.supervisor.status.resting
    await stage.serves(3)


@scene()
async def test_the_wait_after_an_epoch_depends_on_its_backend_and_where_it_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []

    def delay_s(*_: object, jaccl: bool, at_ring: bool) -> float:
        seen.append((jaccl, at_ring))
        return 0.0

    monkeypatch.setattr(RestartPolicy, "delay_s", delay_s)
    for number, backend, at in ((1, "jaccl", "Bootstrap"), (2, "ring", "Init"), (3, "none", "Init")):
        stage.orders.give(0, die_on=at, code="group_form_failed")
        stage.plan(number, EpochGroup(1, 1, backend))
        await sees(lambda number=number: stage.asked == number + 1)
    assert seen == [(True, False), (False, True), (False, False)]


@pytest.mark.parametrize(
    ("message", "code"),
    [("LoadShard", "out_of_memory"), pytest.param("Generate", "gpu_timeout", marks=pytest.mark.chaos)],
)
@scene()
async def test_groups_that_formed_and_failed_are_counted_although_other_plans_are_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, message: str, code: str
) -> None:
    monkeypatch.setattr(epoch, "BACKOFF_S", (0.0,) * (MAX_FAILURES - 1))
    stage.instead = True
    stage.orders.give(0, error_on=message, code=code)
    for number in range(1, MAX_FAILURES + 2):
        stage.plan(number)
    await sees(lambda: ServingState.FAILED in stage.states or stage.asked > MAX_FAILURES)
    assert stage.supervisor.status.state is ServingState.FAILED
    assert stage.supervisor.status.epoch == MAX_FAILURES
    assert stage.formed == [True] * MAX_FAILURES


@scene()
async def test_groups_that_do_not_form_are_replaced_as_long_as_other_plans_are_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "BACKOFF_S", (0.0,) * (MAX_FAILURES - 1))
    monkeypatch.setattr(lifecycle, "ANSWER_S", WAIT_S)
    stage.instead = True
    stage.orders.give(0, die_on="Init", code="group_form_failed")
    for number in range(1, MAX_FAILURES + 3):
        stage.plan(number)
    for count in (MAX_FAILURES, MAX_FAILURES + 1):
        await sees(lambda count=count: len(stage.formed) == count)
        await sees(lambda: stage.supervisor.status.resting)
        assert (stage.asked, stage.supervisor.status.state) == (count, ServingState.RESTARTING)
        stage.change()  # another place was found
    monkeypatch.setattr(lifecycle, "ANSWER_S", 0.01)
    await stage.until(ServingState.FAILED)
    assert stage.formed == [False] * (MAX_FAILURES + 2)


@scene()
async def test_a_change_ends_the_wait_after_a_failed_epoch(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator may have found another place at once."""
    monkeypatch.setattr(epoch, "BACKOFF_S", (10 * WAIT_S,) * (MAX_FAILURES - 1))
    stage.orders.give(0, die_on="Init", code="group_form_failed")
    stage.plan(1)
    await sees(lambda: stage.supervisor.status.resting)
    assert stage.asked == 1
    stage.orders.give(0)
    stage.change()
    await stage.serves(2)


@scene()
async def test_a_home_that_takes_no_files_fails_the_epoch_and_not_the_agent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestartPolicy, "delay_s", lambda *_, **__: 0.0)
    (stage.home / "run").write_text("in the way")
    stage.plan(1)
    await sees(lambda: stage.asked == 2)
    assert stage.supervisor.status.reason.code is Code.FORM_FAILED
    assert str(stage.home) in stage.supervisor.status.reason.detail
    (stage.home / "run").unlink()
    await stage.serves(2)


@scene()
async def test_the_reason_of_a_golden_proof_that_failed_reaches_the_postmortem(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank reports it: the agent compares."""

    def kept(*_: object) -> self_test.SelfTestTokens:
        raise GroupError("golden proof failed: it said so", Code.PROOF_FAILED)

    monkeypatch.setattr(self_test, "kept", kept)
    stage.plan(1)
    await sees(lambda: stage.asked == 2)
    [folder] = (stage.home / failure_store.FOLDER).iterdir()
    told = json.loads((folder / "epoch.json").read_text())
    assert told["cause"] == {"code": "group_proof_failed", "detail": "golden proof failed: it said so"}


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_full_disk_takes_the_recorder_and_not_the_epoch(
    tmp_path: Path, source: ModelSource, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """Not even the folder of the epoch can be made: one rank alone needs none."""
    mkdir, temporary = Path.mkdir, tmp_path / "tmp"
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if elsewhere:
        temporary.mkdir()

    def full(path: Path, *args: Any, **how: Any) -> None:
        if (tmp_path / "home") in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(path, *args, **how)

    monkeypatch.setattr(Path, "mkdir", full)

    async def story(stage: Stage) -> None:
        await stage.serves(1)
        stage.supervisor.end_epoch(GroupError("it was killed", Code.RANK_LOST))
        await sees(lambda: stage.asked == 2)
        await stage.serves(2)
        assert not (stage.home / "run").exists()
        assert not (stage.home / failure_store.FOLDER).exists()

    play(tmp_path, source, story)
    assert not elsewhere or list(temporary.iterdir()) == []


@scene()
async def test_a_group_that_ends_here_leaves_its_requests_to_another_until_the_agent_stops(
    stage: Stage, source: ModelSource
) -> None:
    await stage.serves(1)
    moved, left = (stage.gateway.generate(Generate(0, (each,), ENDLESS)) for each in (5, 1))
    await moved.accepted()
    stage.running.cancel()
    await asyncio.wait({stage.running})
    assert stage.gateway.open_requests == 2
    elsewhere, model = FakeRanks(), replace(MODEL, path=source.path)
    stage.gateway.serve("tiny#1", DEPLOYMENT, cast(Any, elsewhere), model, TEXT, here=False)
    assert len(elsewhere.sent) == 2
    await moved.aclose()
    stage.gateway.close(CLOSED)
    assert (await stage.error_of(left)).code is Code.SHUTTING_DOWN


@scene()
async def test_what_another_mac_says_is_shown_until_there_is_a_group_here(stage: Stage) -> None:
    stage.supervisor.status.follow(ServingState.READY, 7, "", EpochGroup(0, 3, "jaccl", kind="JACCL mesh"))
    health = stage.gateway.health()
    assert (health.state, health.epoch, health.world_size, health.backend) == ("ready", 7, 3, "jaccl")
    assert not stage.supervisor.status.in_epoch
    await stage.serves(8)
    health = stage.gateway.health()
    assert (health.state, health.epoch, health.world_size) == ("ready", 8, 1)


@in_a_loop()
async def test_how_far_a_load_is_can_be_told_in_per_cent(tmp_path: Path) -> None:
    supervisor = made(Settings(tmp_path, "", 0, 1, "tiny"))
    assert supervisor.status.progress == "starting"
    supervisor.status.follow(ServingState.LOADING, 3, "loading 7 %", EpochGroup(0, 2, "ring"))
    assert supervisor.status.progress == "loading 7 %"
    supervisor.status._own, supervisor.status.weight_bytes = ServingState.LOADING, 1000
    for held, shown in ((0, 0), (204, 40), (900, 99)):  # of each rank; and the rest of it is not the load
        pongs = {rank: Pong("loading", 0.0, 0, 0, "", RankStats(memory_bytes=held)) for rank in range(2)}
        supervisor.status.ranks = cast(Any, SimpleNamespace(watch=SimpleNamespace(pongs=pongs)))
        assert supervisor.status.progress == f"loading {shown} %"
        supervisor.status.wanted = "org/m"
        assert supervisor.gateway.health().starting == f"org/m is loading ({shown} %)"


@scene()
async def test_what_is_on_its_way_until_it_is_served_or_prevented(stage: Stage) -> None:
    def starting(state: ServingState, reason: str) -> str:
        stage.supervisor.status.follow(state, 0, reason, EpochGroup(0, 0, "none"))
        return stage.gateway.health().starting

    assert starting(ServingState.IDLE, "no model is configured") == ""
    stage.supervisor.status.wanted = "org/m"
    assert starting(ServingState.IDLE, "members come and go") == "org/m is about to load"
    assert starting(ServingState.IDLE, "org/m is on its way: 1 of 2 GB") == "org/m is on its way: 1 of 2 GB"
    assert starting(ServingState.LOADING, "") == "org/m is loading"
    assert starting(ServingState.FAILED, "") == ""
    await stage.serves(8)
    assert stage.gateway.health().starting == ""
