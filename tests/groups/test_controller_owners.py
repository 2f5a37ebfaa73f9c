"""Owners that could do harm: epochs that must not form, and ones that must not end."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

from mlxtp.errors import Code
from mlxtp.groups.health import RestartPolicy, ServingState
from mlxtp.models.inspect import ModelSource
from mlxtp.placement.cost_model import JACCL_MESH
from mlxtp.placement.formation import FailedGroup
from mlxtp.wire.cluster_messages import Beat, GroupAssignment, LeftOutGroup, ModelStatus

from .one_node import FINGERPRINT, GROUP, A, B, FakeLink, Node, at_node, awaited
from .test_controller import CRASH, at_desk, begun, desk, over
from .test_coordinator import follows


class Follower:
    """This node's life while another one coordinates."""

    def __init__(self, node: Node, coordinator: FakeLink) -> None:
        self._node, self._link, self._pulse = node, coordinator, 10

    def live(self, seconds: int) -> None:
        for _ in range(2 * seconds):
            self._pulse += 1
            self._node.hear(self._link, Beat(5, A, 0, 0, 0, True, self._pulse))
            self._node.tick()


def pretend_ready(node: Node, group: str = GROUP) -> list[str]:
    """As if the epoch of this group served. Return the reasons for which it would end, as they come."""
    supervisor, reasons = node.parts.groups.by_id[group].supervisor, list[str]()
    supervisor.status.enter(ServingState.LOADING)
    supervisor.status.enter(ServingState.READY)
    supervisor._current = cast(Any, SimpleNamespace())
    supervisor.end_epoch = lambda error, _lost="": reasons.append(error.detail)  # type: ignore[method-assign]
    return reasons


@at_desk()
async def test_no_epoch_ends_for_a_revision_that_another_rank_still_gets(node: Node, a: FakeLink) -> None:
    node.parts.node.desired.serve("org/one", replace=True, nodes="2")
    node.hear(a, ModelStatus("org/one", FINGERPRINT, ""))
    node.live(a)
    group = node.parts.groups.by_id["org/one#0"]
    plan = awaited(group)
    node.live(a)
    assert plan.done()
    reasons = pretend_ready(node, "org/one#0")
    node.parts.node.desired.serve("org/one@v2", nodes="2")
    node.hear(a, ModelStatus("org/one@v2", "", ""))
    node.live(a)
    assert reasons == []
    node.hear(a, ModelStatus("org/one@v2", FINGERPRINT, ""))
    node.live(a)
    assert set(reasons) == {"org/one@v2 is wanted now"}
    group.supervisor._current = None


@at_node(machine=desk(cables=False)[""])
async def test_no_epoch_ends_for_a_place_that_cannot_be_wired(node: Node, weights: ModelSource) -> None:
    a = node.meet(A)
    follows(node, weights, a)
    life, here = Follower(node, a), node.parts.node.node_id
    node.hear_assigned(a, here)
    plan = awaited(node.group)
    life.live(3)
    assert plan.done()
    reasons = pretend_ready(node)
    node.obey(a, GroupAssignment(GROUP, "tiny", 5, 5000, (here, A), JACCL_MESH))
    life.live(3)
    assert reasons == []
    node.group.supervisor._current = None


@at_node(machine=desk(cables=False)[""])
async def test_a_mac_that_an_owner_does_not_reach_is_left_out_after_a_while(
    node: Node, weights: ModelSource
) -> None:
    """The coordinator may reach it."""
    a = node.meet(A)
    follows(node, weights, a)
    life = Follower(node, a)
    node.hear_assigned(a, node.parts.node.node_id, B)
    plan = awaited(node.group)
    life.live(3)
    assert node.parts.machines.all_failed(over=True) == ()
    life.live(10)
    assert not plan.done()
    [failed] = node.parts.machines.all_failed(over=False)
    assert (failed.kind, failed.nodes) == ("", sorted((node.parts.node.node_id, B)))
    assert a.heard(LeftOutGroup)[-1].reason.startswith("studio does not reach ")
    plan.cancel()


@at_node(machine=desk()[""], fabric="jaccl", nodes="2")
async def test_a_place_that_fails_for_want_of_another_one_is_given_up(
    node: Node, weights: ModelSource
) -> None:
    a, policy, delays = node.meet(A), RestartPolicy(), []
    node.lead(weights, desk())
    for count in range(8):
        begun(node, a)
        now = 1000.0 + 10 * count
        replaced = node.group.controller.died(CRASH, 5.0, count + 1, last=policy.is_last(now))
        delays.append(policy.replaced() if replaced else policy.delay_s(now, CRASH, True, jaccl=True))
        over(node)
    assert None in delays


@at_desk(nodes="2")
async def test_of_many_groups_that_failed_the_latest_are_told(node: Node, a: FakeLink) -> None:
    machines, now = node.parts.machines, time.monotonic()
    members = {each.node_id: each for each in machines.members()}
    links = frozenset({(*sorted((node.parts.node.node_id, A)), "", "")})
    for kind, at in [*((f"kind {i}", now - 10_000) for i in range(16)), (JACCL_MESH, now)]:
        machines.failed.failed(FailedGroup(kind, cast(Any, links), "it hung"), Code.FORM_FAILED, members, at)
    machines.tell()
    told = a.heard(LeftOutGroup)
    assert (len(told), told[0].kind, told[0].over) == (16, JACCL_MESH, False)
