"""A group beside the one that serves: when it is loaded, taken over, ended or left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.cluster.alternatives import Alternative
from mlxtp.cluster.memory import RankMemory
from mlxtp.cluster.speed import ALONE, RING_ETHERNET
from mlxtp.errors import Code, GroupError, MlxtpError
from mlxtp.node.supervisor import Plan
from mlxtp.node.trials import Trials

from .scenes import run, sees

NEEDS = RankMemory("b", "b", 10, 0, 0, 15, 100)
PAIR = Alternative(RING_ETHERNET, 2, "chosen", ranks=("a", "b"), backend="ring", memory=(NEEDS,))
MODEL = object()


class Stage:
    """Trials with a pretended supervisor, whose next group fails with `error` if there is one."""

    def __init__(self) -> None:
        self.error: MlxtpError | None = None
        self.held = 0
        self.left_out: list[MlxtpError] = []
        self.forgotten: list[int] = []
        self.ended: list[MlxtpError | None] = []
        self.tried: list[Plan] = []
        self.go = asyncio.Event()
        self.go.set()
        self.model: Any = MODEL
        self.standing = standing = SimpleNamespace(boot_id="boot", present=True)
        cluster = SimpleNamespace(
            model=SimpleNamespace(source=self.model),
            coordination=SimpleNamespace(leading=True, saw_epoch=lambda _number: None),
            knowledge=SimpleNamespace(servings={}),
            membership=SimpleNamespace(standing=lambda _node: standing),
            supervisor=SimpleNamespace(try_out=self.try_out, end_beside=self.end_beside),
            name_of=lambda node: node,
            changed=lambda: None,
        )
        self.cluster = cluster
        groups = SimpleNamespace(
            group=lambda *_, **__: None,
            forget=self.forgotten.append,
            held_bytes=lambda _node: self.held,
            leave_out=lambda _chosen, error, _strikes: self.left_out.append(error),
            serving=lambda: None,
        )
        self.trials = Trials(cast(Any, cluster), cast(Any, groups))

    async def try_out(self, plan: Plan) -> Plan:
        self.tried.append(plan)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        if plan.model is None:
            return plan
        failed = asyncio.get_running_loop().create_future()
        return Plan(plan.epoch, plan.model, plan.group, ranks=cast(Any, SimpleNamespace(failed=failed)))

    async def end_beside(self, error: MlxtpError | None = None) -> None:
        self.ended.append(error)

    async def tries(self, number: int = 5) -> None:
        self.trials.begin(number, PAIR)
        await sees(lambda: not self.trials.busy)


def play(story: Callable[[Stage], Awaitable[None]]) -> None:
    async def scene() -> None:
        await story(Stage())

    run(scene())


def test_a_loaded_group_waits_until_it_is_taken_over() -> None:
    async def story(stage: Stage) -> None:
        trials = stage.trials
        assert not trials.is_over(PAIR)
        assert trials.is_over(Alternative(ALONE, 1))
        await stage.tries()
        assert [plan.model for plan in stage.tried] == [MODEL]
        assert trials.is_over(PAIR)
        assert trials.ranks == PAIR.ranks
        trials.look(PAIR)
        other = Alternative(RING_ETHERNET, 3, ranks=("a", "b", "c"))
        assert not trials.is_over(other)
        assert trials.take(other) is None
        taken = trials.take(PAIR)
        assert taken is not None
        assert taken.epoch == 5
        assert trials.take(PAIR) is None
        assert (stage.ended, stage.forgotten) == ([], [])

    play(story)


def test_without_memory_for_both_a_group_is_proven_alone() -> None:
    async def story(stage: Stage) -> None:
        stage.held = 6
        await stage.tries()
        assert [plan.model for plan in stage.tried] == [None]
        assert stage.trials.is_over(PAIR)
        assert stage.trials.take(PAIR) is None
        assert stage.forgotten == [5]
        stage.held = 0
        assert not stage.trials.is_over(PAIR), "it can load by now"

    play(story)


@pytest.mark.parametrize("code", [Code.MODEL_INVALID, Code.FORM_FAILED, Code.PROOF_FAILED])
def test_a_group_that_fails_is_left_out(code: Code) -> None:
    async def story(stage: Stage) -> None:
        stage.error = GroupError("it failed", code)
        await stage.tries()
        assert stage.left_out == [stage.error]
        assert not stage.trials.is_over(PAIR)
        assert stage.trials.ranks == ()

    play(story)


@pytest.mark.parametrize("present", [True, False])
def test_a_group_that_served_once_and_fails_has_to_prove_itself_again(present: bool) -> None:
    async def story(stage: Stage) -> None:
        stage.trials.served(PAIR)
        stage.error = GroupError("it failed", Code.FORM_FAILED)
        stage.standing.present = present
        await stage.tries()
        assert len(stage.left_out) == present
        stage.held = 6  # by now memory is short, so that nothing is left but the proof
        assert not stage.trials.is_over(PAIR)

    play(story)


def test_a_group_that_did_not_load_may_load_once_it_is_planned_again() -> None:
    async def story(stage: Stage) -> None:
        stage.error = GroupError("a file is damaged", Code.MODEL_INVALID)
        await stage.tries()
        stage.error = None
        await stage.tries(6)
        assert [plan.model for plan in stage.tried] == [MODEL, MODEL]

    play(story)


def test_a_group_without_memory_after_all_is_proven_and_loads_later() -> None:
    async def story(stage: Stage) -> None:
        stage.error = GroupError("out of memory", Code.OUT_OF_MEMORY)
        await stage.tries()
        assert stage.left_out == []
        assert stage.trials.is_over(PAIR), "a second try beside would fail as well"

    play(story)


def test_the_group_that_serves_goes_on_while_another_one_is_tried() -> None:
    async def story(stage: Stage) -> None:
        stage.go.clear()
        stage.trials.begin(5, PAIR)
        stage.trials.begin(6, PAIR)
        await sees(lambda: stage.tried)
        assert stage.trials.busy
        assert not stage.trials.is_over(PAIR)
        await stage.trials.stop()
        assert not stage.trials.busy
        assert len(stage.tried) == 1

    play(story)


def test_a_loaded_group_that_fails_is_ended_and_left_out() -> None:
    async def story(stage: Stage) -> None:
        await stage.tries()
        ahead = stage.trials._ahead
        assert ahead is not None
        assert ahead.plan.ranks is not None
        lost = GroupError("rank 1 is gone", Code.RANK_LOST)
        ahead.plan.ranks.failed.set_result(lost)
        stage.trials.look(PAIR)
        assert stage.trials.take(PAIR) is None
        await sees(lambda: not stage.trials.busy)
        assert (stage.ended, stage.left_out, stage.forgotten) == ([lost], [lost], [5])

    play(story)


@pytest.mark.parametrize("change", ["plan", "model", "coordinator"])
def test_a_loaded_group_that_is_no_longer_planned_is_ended(change: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.tries()
        if change == "model":
            stage.cluster.model.source = object()
        stage.cluster.coordination.leading = change != "coordinator"
        stage.trials.look(None if change == "plan" else PAIR)
        assert stage.trials.busy
        await sees(lambda: not stage.trials.busy)
        assert (stage.ended, stage.left_out) == ([None], [])
        assert stage.trials.is_over(PAIR), "it is not loaded a second time beside this epoch"

    play(story)
