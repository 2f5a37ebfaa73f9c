"""A group beside the one that serves: when it is loaded, taken over, ended or left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.cluster.reconcile import Wanted
from mlxtp.errors import Code, GroupError, MlxtpError
from mlxtp.groups.controller import Trials
from mlxtp.groups.lifecycle import EpochPlan
from mlxtp.placement.candidates import Candidate, Fabrics
from mlxtp.placement.cost_model import ALONE, JACCL_MESH, JACCL_RING, RING_ETHERNET, RankMemory
from mlxtp.placement.topology import Topology
from mlxtp.wire.cluster_messages import Serving

from ..placement.made_up_macs import cabled, mac
from .one_node import GROUP
from .scenes import run, sees

NEEDS = RankMemory("b", "b", 10, 0, 0, 15, 100)
PAIR = Candidate(RING_ETHERNET, 2, "chosen", ranks=("a", "b"), backend="ring", memory=(NEEDS,))
MODEL = object()

MACS = cabled([mac(place) for place in range(3)], [(0, 1), (0, 2), (1, 2)])
TOPOLOGY = Topology(MACS)
A, B, C = (each.node_id for each in MACS)


def jaccl(*ranks: str, circle: bool = False) -> Candidate:
    """A group over JACCL on Macs of `TOPOLOGY`."""
    fabrics = Fabrics({each.node_id: each for each in MACS}, TOPOLOGY)
    kind, matrix = JACCL_RING if circle else JACCL_MESH, fabrics.matrix(ranks, circle=circle)
    return Candidate(kind, len(ranks), ranks=ranks, backend="jaccl", jaccl_ring=circle, rdma=matrix)


def serving(backend: str, *participants: str, held_mib: tuple[int, ...] = ()) -> Serving:
    """An owner's report of its group."""
    words = ("ready", "", backend, "", participants, (0.0, 1.0), 0, "tiny", 1, 0, 0, (), 0, held_mib)
    return Serving(3, *words)


class Stage:
    """Trials with a pretended supervisor, whose next group fails with `error` if there is one."""

    def __init__(self) -> None:
        self.error: MlxtpError | None = None
        self.held = 0
        self.serving: Any = None
        self.left_out: list[MlxtpError] = []
        self.alternative = True
        self.formed: list[bool] = []
        self.stages = ["spawned", "linked", "formed", "proven"]
        self.forgotten: list[int] = []
        self.ended: list[MlxtpError | None] = []
        self.tried: list[EpochPlan] = []
        self.groups: list[tuple[int, tuple[str, ...]]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.model: Any = MODEL
        self.standing = standing = SimpleNamespace(boot_id="boot", present=True)
        self.node = SimpleNamespace(
            replica=SimpleNamespace(saw_epoch=lambda _number: None),
            peer_info=SimpleNamespace(servings={}),
            membership=SimpleNamespace(status_of=lambda _node: standing),
            name_of=lambda node: node,
            changed=lambda: None,
        )
        self.scope = SimpleNamespace(
            owned=True, model=SimpleNamespace(name="tiny", source=self.model), wanted=Wanted("tiny")
        )
        supervisor = SimpleNamespace(beside=SimpleNamespace(try_out=self.try_out, end=self.end_beside))
        groups = SimpleNamespace(
            group=lambda number, tried, **_: self.groups.append((number, tried.ranks)),
            release=self.forgotten.append,
            held_bytes=lambda _node: self.held,
            leave_out=self.leave_out,
            topology=lambda: TOPOLOGY,
            owned=None,
        )
        self.parts = groups
        self.trials = Trials(
            *cast(Any, (self.node, self.scope, supervisor)),
            **cast(Any, dict.fromkeys(("builder", "reports", "placer", "machines"), groups)),
            all_reports=self.servings,
        )

    def servings(self) -> list[Serving]:
        mine = [self.serving] if self.serving is not None else []
        return [*mine, *self.node.peer_info.servings.values()]

    def leave_out(self, _chosen: Candidate, error: MlxtpError, *, formed: bool) -> bool:
        self.left_out.append(error)
        self.formed.append(formed)
        return self.alternative

    async def try_out(self, plan: EpochPlan, on_stage: Callable[[str], None]) -> EpochPlan:
        self.tried.append(plan)
        await self.go.wait()
        for stage in self.stages:
            on_stage(stage)
        if self.error is not None:
            raise self.error
        if plan.model is None:
            return plan
        failed = asyncio.get_running_loop().create_future()
        return EpochPlan(plan.epoch, plan.model, plan.group, ranks=cast(Any, SimpleNamespace(failed=failed)))

    async def end_beside(self, error: MlxtpError | None = None) -> None:
        self.ended.append(error)

    async def tries(self, number: int = 5, chosen: Candidate = PAIR) -> None:
        self.trials.begin(number, chosen)
        await sees(lambda: not self.trials.busy)


def play(story: Callable[[Stage], Awaitable[None]]) -> None:
    async def scene() -> None:
        await story(Stage())

    run(scene())


def test_a_loaded_group_waits_until_it_is_taken_over() -> None:
    async def story(stage: Stage) -> None:
        trials = stage.trials
        assert not trials.is_over(PAIR)
        assert trials.is_over(Candidate(ALONE, 1))
        await stage.tries()
        assert [plan.model for plan in stage.tried] == [MODEL]
        assert trials.is_over(PAIR)
        trials.end_stale(PAIR)
        other = Candidate(RING_ETHERNET, 3, ranks=("a", "b", "c"))
        assert not trials.is_over(other)
        assert trials.take_over(other) is None
        taken = trials.take_over(PAIR)
        assert taken is not None
        assert taken.epoch == 5
        assert trials.take_over(PAIR) is None
        assert (stage.ended, stage.forgotten) == ([], [])

    play(story)


def test_without_memory_for_both_a_group_is_proven_alone() -> None:
    async def story(stage: Stage) -> None:
        stage.held = 6
        await stage.tries()
        assert [plan.model for plan in stage.tried] == [None]
        assert stage.trials.is_over(PAIR)
        assert stage.trials.take_over(PAIR) is None
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

    play(story)


@pytest.mark.parametrize("stages", [[], ["formed"], ["formed", "proven"]])
def test_a_group_that_failed_after_its_proof_is_no_group_that_does_not_form(stages: list[str]) -> None:
    async def story(stage: Stage) -> None:
        stage.error, stage.stages = GroupError("it failed", Code.RANK_LOST), stages
        await stage.tries()
        assert stage.formed == ["proven" in stages]

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


def test_a_group_that_did_not_load_and_has_no_alternative_is_not_loaded_beside_again() -> None:
    async def story(stage: Stage) -> None:
        stage.error, stage.alternative = GroupError("a file is damaged", Code.MODEL_INVALID), False
        await stage.tries()
        stage.error = None
        await stage.tries(6)
        assert [plan.model for plan in stage.tried] == [MODEL, None]

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
        stage.trials.end_stale(PAIR)
        assert stage.trials.take_over(PAIR) is None
        await sees(lambda: not stage.trials.busy)
        assert (stage.ended, stage.left_out, stage.forgotten) == ([lost], [lost], [5])

    play(story)


@pytest.mark.parametrize("change", ["plan", "model", "owner"])
def test_a_loaded_group_that_is_no_longer_planned_is_ended(change: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.tries()
        if change == "model":
            stage.scope.model.source = object()
        stage.scope.owned = change != "owner"
        stage.trials.end_stale(None if change == "plan" else PAIR)
        assert stage.trials.busy
        await sees(lambda: not stage.trials.busy)
        assert (stage.ended, stage.left_out) == ([None], [])
        assert stage.trials.is_over(PAIR), "it is not loaded a second time beside this epoch"

    play(story)


@pytest.mark.parametrize("circle", [False, True])
def test_of_a_larger_group_the_newcomer_s_cable_is_tried_while_devices_are_in_use(circle: bool) -> None:
    async def story(stage: Stage) -> None:
        chosen = jaccl(A, B, C, circle=circle)
        stage.serving = serving("jaccl", A, B, held_mib=(1, 1))
        assert not stage.trials.is_over(chosen)
        await stage.tries(5, chosen)
        assert stage.groups == [(5, (A, C))]
        assert [plan.model for plan in stage.tried] == [None]
        assert stage.trials.is_over(chosen)
        stage.trials.failed(chosen)
        assert not stage.trials.is_over(chosen), "its parts have to prove themselves again, too"

    play(story)


def test_a_newcomer_that_owns_the_next_group_tries_each_of_its_cables() -> None:
    async def story(stage: Stage) -> None:
        chosen = jaccl(A, B, C)
        stage.node.peer_info.servings = {(B, GROUP): serving("jaccl", B, C, held_mib=(1, 1))}
        await stage.tries(5, chosen)
        assert not stage.trials.is_over(chosen)
        stage.error = GroupError("errno 60", Code.FORM_FAILED)
        await stage.tries(6, chosen)
        assert stage.groups == [(5, (A, B)), (6, (A, C))]
        assert stage.left_out == [stage.error]
        assert not stage.trials.is_over(chosen)

    play(story)


def test_a_group_whose_free_cables_are_elsewhere_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def story(stage: Stage) -> None:
        chosen = jaccl(A, B, C)
        stage.node.peer_info.servings = {
            (B, GROUP): serving("jaccl", B, A, held_mib=(1, 1)),
            (C, GROUP): serving("jaccl", C, A, held_mib=(1, 1)),
        }
        for number in (5, 6):
            stage.trials.begin(number, replace(chosen, reason=f"as planned for the {number}th time"))
            assert not stage.trials.busy
            assert not stage.trials.is_over(chosen)
        stage.node.peer_info.servings = {}
        await stage.tries(7, chosen)
        assert stage.trials.is_over(chosen)

    play(story)
    assert len([each for each in caplog.messages if "the present group goes on" in each]) == 1


def test_a_group_loads_beside_another_owner_s_where_memory_permits_both() -> None:
    async def story(stage: Stage) -> None:
        servings = stage.node.peer_info.servings
        servings["b", GROUP] = serving("none", "b")
        await stage.tries()
        assert [plan.model for plan in stage.tried] == [None], "it is not known what b's rank holds"
        servings["b", GROUP] = serving("none", "b", held_mib=(1,))
        assert not stage.trials.is_over(PAIR)
        await stage.tries(6)
        assert [plan.model for plan in stage.tried] == [None, MODEL]
        assert stage.trials.take_over(PAIR) is not None

    play(story)


def test_another_revision_on_one_mac_loads_beside_the_present_one() -> None:
    """Only for a group that serves the same model there is nothing to prove where one Mac is enough."""

    async def story(stage: Stage) -> None:
        alone = Candidate(ALONE, 1, "chosen", ranks=("a",), backend="none", memory=(NEEDS,))
        stage.parts.owned = SimpleNamespace(wanted=Wanted("tiny"))
        assert stage.trials.is_over(alone)
        stage.scope.wanted = Wanted("tiny@main")
        assert not stage.trials.is_over(alone)
        await stage.tries(5, alone)
        assert [plan.model for plan in stage.tried] == [MODEL]
        assert stage.trials.is_over(alone)
        assert stage.trials.take_over(alone) is not None

    play(story)
