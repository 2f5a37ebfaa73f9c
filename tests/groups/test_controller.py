"""Groups formed as they are assigned, with members that lack something: the model, JACCL, a cable.

And owners that could do harm: epochs that must not form, and ones that must not end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.cluster.cluster_state import KEEP_S, PINNED
from mlxtp.cluster.reconcile import FormEpoch, GroupForm
from mlxtp.errors import Code, GroupError, ModelError
from mlxtp.groups.controller import _joined
from mlxtp.groups.health import RestartPolicy, ServingState
from mlxtp.groups.lifecycle import EpochPlan
from mlxtp.groups.process_group import EpochGroup, ProcessGroup
from mlxtp.models.inspect import ModelSource
from mlxtp.models.local_model import TELL_S
from mlxtp.placement.candidates import Candidate
from mlxtp.placement.cost_model import ALONE, JACCL_MESH, RING_ETHERNET
from mlxtp.placement.formation import RETRY_S, USED_UP_RETRY_S, FailedGroup
from mlxtp.wire.cluster_messages import (
    Beat,
    GroupAssignment,
    LeftOutGroup,
    Machine,
    ModelStatus,
    RankTrouble,
    Serving,
)
from mlxtp.wire.rank_stats import RankStats

from ..cluster.deployed import only
from ..gateway.test_gateway import MODEL
from ..placement.made_up_macs import cabled, mac, on_lan
from ..wire.members import Member
from .one_node import FINGERPRINT, GROUP, MACHINE, A, B, FakeLink, Node, at_leader, at_node, awaited, play
from .test_coordinator import LAN


def desk(cables: bool = True) -> dict[str, Machine]:
    """Two Macs with RDMA on one network: this one ("") and A's."""
    here, there = on_lan([mac(0), mac(1)])
    if cables:
        here, there = cabled([here, there], [(0, 1)])
    return {"": here.machine, A: there.machine}


at_desk = partial(at_leader, machines=desk())


def follows(node: Node, source: ModelSource, machines: Mapping[str, Machine], *links: FakeLink) -> None:
    """The other end of the first link coordinates. All want `tiny`, have it, and report these machines."""
    node.know(source)
    node.parts.node.desired.serve("tiny", keep_s=PINNED)
    for link in links:
        node.hear(link, ModelStatus("tiny", FINGERPRINT, ""), Beat(0, "", 0, 0, 0, True, 0))
        if link.node_id in machines:
            node.hear(link, machines[link.node_id])
    node.follow(links[0])
    node.tick()


def begun(node: Node, *links: FakeLink) -> EpochGroup:
    """The next group that is formed, at once without `links`; it goes on."""
    plan = awaited(node.group)
    if links:
        node.live(*links)
    else:
        node.tick()
    assert plan.done(), node.group.waiting
    return plan.result().group


def over(node: Node) -> None:
    """As if its epoch had ended, with no report of it."""
    node.group.scope.plan, node.group.supervisor.status.in_epoch = None, False


def formed(node: Node, *links: FakeLink) -> EpochGroup:
    """The next group that is formed, and nothing more becomes of it."""
    group = begun(node, *links)
    over(node)
    return group


@at_node(machine=desk(cables=False)[""], nodes="2")
async def test_a_group_of_two_and_where_its_ranks_find_each_other(node: Node, weights: ModelSource) -> None:
    a = node.meet(A)
    a.local = "192.168.7.1"
    node.lead(weights, desk(cables=False))
    group = formed(node, a)
    assert (group.local, group.world_size, group.backend) == (1, 2, "ring")
    assert group.decode_hosts == ("127.0.0.1", "192.168.7.1")
    assert group.pins == (node.parts.node.identity.fingerprint, a.fingerprint)
    assert group.fabric == "192.168.7.1"
    assert group.nodes == (node.parts.node.node_id, A)


@at_node(machine=LAN[""])
async def test_the_owner_forms_exactly_the_ranks_that_are_assigned(node: Node, weights: ModelSource) -> None:
    """In their order, over their fabric and in their split, though one Mac alone would do."""
    here, a = node.parts.node.node_id, node.meet(A)
    follows(node, weights, LAN, a, node.meet(B))
    node.obey(a, GroupAssignment(GROUP, "tiny", 5, 1, (here, B, A), RING_ETHERNET, (2, 1, 1)))
    form = GroupForm("tiny", (here, B, A), RING_ETHERNET, (2, 1, 1))
    assert node.group.controller.form() == (form, "")
    group, supervisor = begun(node), node.group.supervisor
    assert (supervisor.status.in_epoch, supervisor.has_ranks) == (True, False), "it counts at once"
    assert (group.nodes, group.kind, group.split) == ((here, B, A), RING_ETHERNET, (2, 1, 1))
    assert (group.backend, group.fabric) == ("ring", "192.168.7.1")
    node.group.scope.broadcast()
    told = a.heard(Serving)[-1]
    assert (told.participants, told.kind) == ((here, B, A), RING_ETHERNET)
    node.obey(a, GroupAssignment(GROUP, "tiny", 5, 2, (B, A), RING_ETHERNET))
    assert node.group.controller.form() == (None, "tiny has enough other groups")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (JACCL_MESH, "1 of 1 links by cables with RDMA are missing"),
        (RING_ETHERNET, "studio – mac-a (no IPv4 network in common)"),
    ],
)
@at_node(machine=desk()[""])
async def test_ranks_that_lack_a_link_are_not_formed_and_say_so_until_it_is_there(
    node: Node, weights: ModelSource, kind: str, why: str
) -> None:
    here, a = node.parts.node.node_id, node.meet(A)
    follows(node, weights, {}, a)
    node.obey(a, GroupAssignment(GROUP, "tiny", 5, 1, (here, A), kind))
    plan = awaited(node.group)
    node.tick()
    assert node.group.waiting == "mac-a has not reported its machine"
    node.hear(a, replace(desk()[A], interfaces=(), ports=()))
    node.tick()
    assert why in node.group.waiting
    assert (plan.done(), node.group.scope.plan) == (False, None)
    node.group.scope.broadcast()
    told = a.heard(Serving)[-1]
    assert (told.reason, told.participants) == (node.group.waiting, ())
    node.hear(a, desk()[A])
    assert begun(node).nodes == (here, A)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (ModelStatus("tiny", "", "/models/x is not here"), "/models/x is not here"),
        (
            ModelStatus("tiny", "6" * 64, ""),
            "its files of the model differ: 666666666666 there, 555555555555 on studio; bring the same files "
            "to mac-a and studio",
        ),
        (ModelStatus("tiny", "", ""), "it is still getting the model"),
        (ModelStatus("other", FINGERPRINT, ""), "it has not yet reported whether it has the model"),
    ],
)
@at_desk(nodes="all")
async def test_who_lacks_the_model_is_left_out_and_named(
    node: Node, a: FakeLink, status: ModelStatus, words: str
) -> None:
    assert node.group.scope.assignment.ranks == (node.parts.node.node_id, A)
    before = ModelStatus("tiny", FINGERPRINT, "")
    node.no_longer(a, before)
    node.hear(a, status)
    node.live(a)
    assert node.group.scope.assignment.ranks == (node.parts.node.node_id,)
    node.parts.node.desired.serve("tiny", nodes="2")
    node.live(a)
    assert node.group.waiting.startswith(f"mac-a is left out: {words}; ")
    assert "needs 2 nodes, 1 of the 2 here can" in node.group.waiting


@at_node(machine=desk()[""])
async def test_who_has_another_revision_is_left_out_and_told_what_to_do(
    node: Node, tmp_path: Path, weights: ModelSource
) -> None:
    a = node.meet(A)
    node.lead(weights, desk())
    node.parts.node.desired.serve("org/one", replace=True, nodes="2")
    model = node.group.scope.model
    model.path = tmp_path / ("c" * 40)
    model.path.symlink_to(weights.path)
    for revision, left_out in (("c" * 40, False), ("", False), ("d" * 40, True)):
        node.hear(a, ModelStatus("org/one", FINGERPRINT, "", revision))
        node.live(a)
        words = "mac-a is left out: it has the model at commit dddddddddddd, studio at cccccccccccc; "
        assert node.group.waiting.startswith(words) is left_out


@at_leader()
async def test_memory_that_another_owner_s_ranks_of_the_group_hold_is_free_for_its_next_epoch(
    node: Node, a: FakeLink
) -> None:
    """That of other groups is held too, and not free."""
    mine, other = node.group.scope, node.parts.groups.known("other#0").scope

    def held(node_id: str) -> int:
        """Of the memory there, as the placement of this group sees it."""
        members = node.parts.machines.members(held_bytes=mine.held_bytes)
        return next(each.held_bytes >> 30 for each in members if each.node_id == node_id)

    node.hear(a, serving("ring", A, B))
    assert mine.held_bytes(A) == 0
    node.hear(a, replace(serving("ring", A, B), held_mib=(2048, 1024), group="other#0"))
    assert (other.held_bytes(A) >> 30, mine.held_bytes(A)) == (2, 0)
    assert held(A) == 0
    node.no_longer(a, replace(serving("ring", A), group="other#0"))
    node.hear(a, replace(serving("ring", A, B), held_mib=(3072, 1024)))
    assert [mine.held_bytes(each) >> 30 for each in (A, B, node.parts.node.node_id)] == [3, 1, 0]
    assert held(A) == 3


@at_node(machine=desk()[""], nodes="2")
async def test_an_owner_reports_what_it_serves_and_what_its_ranks_hold_once_it_does(
    node: Node, weights: ModelSource
) -> None:

    def told() -> tuple[object, ...]:
        found = node.group.scope.serving()
        return found.state, found.context, found.vocabulary, found.eos, found.held_mib

    a = node.meet(A)
    node.lead(weights, desk())
    group, supervisor = begun(node, a), node.group.supervisor
    supervisor.info = replace(MODEL, context=4096, vocabulary=512, eos=(1,))
    pongs = {rank: SimpleNamespace(stats=RankStats(memory_bytes=(rank + 1) << 30)) for rank in (0, 1)}
    supervisor.status.ranks = cast(Any, SimpleNamespace(group=group, watch=SimpleNamespace(pongs=pongs)))
    assert told() == ("restarting", 0, 0, (), ()), "its ranks are about to start"
    supervisor._current = cast(Any, SimpleNamespace())
    supervisor.status.enter(ServingState.LOADING)
    assert told() == ("loading", 4096, 512, (1,), ())
    supervisor.status.enter(ServingState.READY)
    assert told() == ("ready", 4096, 512, (1,), (1024, 2048))
    assert [node.group.scope.held_bytes(each) >> 30 for each in (*group.nodes, B)] == [1, 2, 0]
    supervisor.status.ranks = supervisor._current = None
    over(node)
    assert node.group.scope.held_bytes(A) == 0
    assert told() == ("idle", 0, 0, (), ())
    status = supervisor.status
    status.resting, status.state = True, ServingState.FAILED
    for error, broken in ((ModelError("torn"), True), (GroupError("gone"), False)):
        status.reason = error
        found = node.group.scope.serving()
        assert (found.state, found.reason, found.broken) == ("failed", error.detail, broken)


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"open_requests": 2}, {A: 2}),
        ({"state": "draining"}, {}),
        ({"state": "loading"}, {}),
        ({"participants": (B, A)}, {}),
        ({"participants": ()}, {}),
        ({"group": "other#0"}, {}),
    ],
)
@at_node()
async def test_epochs_that_others_report_count_if_they_are_their_own_and_ready(
    node: Node, changes: Mapping[str, Any], counted: Mapping[str, int]
) -> None:
    node.hear(node.meet(A), replace(serving("ring", A, B), **changes))
    assert node.parts.groups.known(GROUP).scope.others() == counted


@at_node(machine=desk(cables=False)[""])
async def test_a_group_that_failed_before_and_is_formed_again_has_no_other_place(
    node: Node, weights: ModelSource
) -> None:
    follows(node, weights, desk(cables=False), a := node.meet(A))
    node.hear(a, GroupAssignment(GROUP, "tiny", 5, 1, (node.parts.node.node_id, A), RING_ETHERNET))
    controller, remote = node.group.controller, node.group.controller._remote
    for another in (True, False):
        begun(node).endpoints(cast(Any, None))
        assert [node_id for node_id, _ in remote.by_epoch] == [A]
        assert controller.failed(GroupError("a sum is wrong", Code.PROOF_FAILED), formed=True) is another
        controller._let_go()
        assert remote.by_epoch == {}
        over(node)


@at_node()
async def test_all_are_told_both_ends_of_the_control_links(node: Node) -> None:
    """Link-local addresses count where they are these two."""
    a = node.meet(A)
    a.local, a.remote = "169.254.31.7", "169.254.88.10"
    b = node.meet(B)
    ends = ("127.0.0.1 127.0.0.1", "169.254.31.7 169.254.88.10")
    assert b.heard(Machine)[-1].reached == ends
    assert node.parts.node.links.reports.of(Machine)[node.parts.node.node_id].reached == ends
    a.close()
    assert b.heard(Machine)[-1].reached == ends[:1]


@pytest.mark.parametrize(("backend", "looks"), [("jaccl", 1), ("ring", 0)])
@at_node()
async def test_ports_are_read_again_after_a_group_over_jaccl(
    node: Node, weights: ModelSource, backend: str, looks: int
) -> None:
    """With a cable out JACCL forms all the same, and hangs."""
    controller, looked = node.group.controller, []

    async def look(nodes: tuple[str, ...]) -> None:
        looked.append((node.group.scope.plan, nodes))
        assert node.group.scope.running() is None

    node.parts.readings.read_machine_now = look  # type: ignore[method-assign]
    ranks = (node.parts.node.node_id, A, B)
    order = FormEpoch(1, GroupForm("tiny", ranks), ("", "", ""))
    wired = Candidate(RING_ETHERNET, 3, backend=backend)
    mine = node.group.scope.plan = EpochPlan(order, weights, EpochGroup(1, 3, backend), wired)
    node.group.scope.serving = lambda: None  # type: ignore[method-assign]
    await asyncio.wait({planning := asyncio.ensure_future(controller.next_plan())}, timeout=0.01)
    planning.cancel()
    assert looked == [(mine, ranks)] * looks
    assert node.group.scope.plan is None


def serving(backend: str, *participants: str) -> Serving:
    return Serving(3, "ready", "", backend, "", participants, 0, "tiny", 1, 0, 0, (), 0, (), GROUP, "tiny")


def test_the_log_of_an_epoch_says_how_its_ranks_work_together() -> None:
    alone = EpochGroup(1, 1, "none", kind=ALONE, nodes=(A,))
    assert _joined(alone) == ALONE
    several = replace(alone, world_size=3, split=(2, 1, 1))
    assert _joined(several) == "3 ranks, pipeline of 2 + 1 + 1 layers"
    two = EpochGroup(1, 2, "ring", kind=RING_ETHERNET, nodes=(A, B), split=(3, 1))
    assert _joined(two) == f"{RING_ETHERNET}, pipeline of 3 + 1 layers"


@at_node(nodes="2")
async def test_why_nothing_is_served_is_logged_once_with_the_way_out(
    node: Node, weights: ModelSource, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        return [each.getMessage() for each in caplog.records if "is not served" in each.getMessage()]

    caplog.set_level("INFO")
    node.lead(weights)
    awaited(node.group)
    node.live()
    why = node.group.waiting
    assert why == (
        "tensor parallel of 2: needs 2 nodes, 1 is here; "
        "`mlxtp serve MODEL --nodes auto` uses the Macs that are here"
    )
    assert lines() == [f"tiny is not served: {why}"]
    node.live()
    assert len(lines()) == 1, "it is still so"
    node.parts.node.desired.serve("tiny", nodes="auto")
    node.live()
    assert node.group.waiting == ""
    assert len(lines()) == 1


@at_node(machine=replace(MACHINE, memory_bytes=1 << 20, free_bytes=1 << 20), nodes="2")
async def test_what_no_number_of_macs_can_serve_names_no_way_out(node: Node, weights: ModelSource) -> None:
    node.lead(weights)
    assert "needs 2 nodes" in node.group.waiting
    assert "--nodes auto" not in node.group.waiting


@at_node(machine=desk()[""])
async def test_a_member_that_has_just_come_has_a_moment_to_say_whether_it_has_the_model(
    node: Node, weights: ModelSource
) -> None:
    node.lead(weights, desk())
    a = node.meet(A)
    node.hear(a, desk()[A])
    node.parts.node.desired.serve("other", replace=True)
    group = node.group
    for _ in range(int(TELL_S / 0.5) - 2):
        node.live_once(a)
    why = "mac-a has not yet reported whether it has the model"
    assert (group.scope.assignment.owner, node.parts.coordinator.waiting) == ("", why)
    for _ in range(4):
        node.live_once(a)
    assert group.scope.assignment.ranks == (node.parts.node.node_id,)


@at_node(machine=desk()[""])
async def test_an_owner_waits_a_moment_before_it_says_that_a_member_has_not_told_of_its_model(
    node: Node, weights: ModelSource
) -> None:
    a = node.meet(A)
    follows(node, weights, desk(), a)
    node.no_longer(a, ModelStatus("tiny", FINGERPRINT, ""))
    node.hear_assigned(a, node.parts.node.node_id, A)
    why = "mac-a cannot take part: it has not yet reported whether it has the model"
    node.live_once(a)
    assert (node.group.waiting, node.group.unplanned) == (why, "")
    node.tick(TELL_S)
    assert (node.group.waiting, node.group.unplanned) == (why, why)


@at_desk()
async def test_files_of_the_hub_that_differ_are_repaired_by_a_command(node: Node, a: FakeLink) -> None:
    node.parts.node.desired.serve("org/model", replace=True, nodes="2")
    node.hear(a, ModelStatus("org/model", "6" * 64, ""))
    node.live(a)
    words = "; `mlxtp verify org/model --repair` on mac-a, then on studio, gets"
    assert words in node.group.waiting


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"num_hidden_layers": "many"}'])
def test_a_configuration_that_is_gone_or_makes_no_sense_is_said(
    tmp_path: Path, member: Member, text: str | None
) -> None:
    folder = tmp_path / "model"
    if text is not None:
        folder.mkdir()
        (folder / "config.json").write_text(text)

    async def story(node: Node) -> None:
        node.lead(ModelSource("odd", folder, cast(Any, None)))
        assert node.group.controller.form()[0] is None
        node.live()
        why = f"{folder} cannot be read" if text is None else ""
        assert f"studio is left out: {why}" in node.group.unplanned

    play(tmp_path / "home", member, story)


jaccl = partial(at_desk, nodes="2")


NO_JACCL = GroupError("MLX on mac-a has no JACCL", Code.FORM_FAILED)


@pytest.mark.parametrize(("fabric", "then"), [("auto", "ring"), ("jaccl", "jaccl")])
@jaccl("fabric")
async def test_two_macs_use_their_cable_and_without_jaccl_on_one_auto_takes_the_ring(
    node: Node, a: FakeLink, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    a.local = "192.168.7.1"
    group = begun(node, a)
    assert (group.backend, group.rdma) == ("jaccl", ("", "rdma_en2", "rdma_en2", ""))
    cable = next(each.address for each in desk()[""].interfaces if each.kind == "thunderbolt")
    assert group.decode_hosts == ("127.0.0.1", f"{cable},192.168.7.1"), "though the control link is elsewhere"
    assert node.group.controller.failed(NO_JACCL, formed=False)
    assert f"did not form: {NO_JACCL.detail}; it is left out for " in caplog.text
    over(node)
    assert formed(node, a).backend == then, "an explicit backend never falls back"


@pytest.mark.parametrize(("fabric", "backend"), [("auto", "ring"), ("jaccl", None)])
@at_leader("fabric", machines=desk() | {A: replace(desk()[A], bridge_up=True)}, nodes="2")
async def test_what_would_keep_jaccl_from_forming_is_said_before(
    node: Node, a: FakeLink, backend: str | None
) -> None:
    if backend is not None:
        assert formed(node, a).backend == backend
        return
    plan = awaited(node.group)
    node.live(a)
    assert not plan.done()
    assert "bridge0" in node.group.waiting


@pytest.mark.parametrize(("count", "left_s"), [(3, USED_UP_RETRY_S), (0, RETRY_S)])
@at_node(machine=desk()[""], nodes="2")
async def test_where_protection_domains_may_be_used_up_the_ring_goes_on_and_the_count_is_told(
    node: Node, weights: ModelSource, caplog: pytest.LogCaptureFixture, count: int, left_s: float
) -> None:
    def after(machine: Machine) -> Machine:
        return replace(machine, ports=tuple(replace(port, formations=count) for port in machine.ports))

    a = node.meet(A)
    node.lead(weights, {name: after(each) for name, each in desk().items()})
    assert begun(node, a).backend == "jaccl", "the count alone refuses nothing"
    group = node.group
    words = "mac-a: rank 1: jaccl did not form: [jaccl] Couldn't allocate protection domain"
    assert group.controller.failed(GroupError(words, Code.FORM_FAILED), formed=False)
    [(left_out, seconds)] = node.parts.machines.left_out()
    assert seconds == pytest.approx(left_s, abs=60)
    assert words in left_out.reason
    assert words in caplog.text
    over(node)
    assert formed(node, a).backend == "ring"


CRASH = GroupError("mac-a: rank 1 was ended by signal 11 in phase prefill")
SLOW = GroupError("no progress in prefill for 31 s; no rank is behind: 0 at step 1", Code.RANK_STALLED)


@pytest.mark.parametrize(
    ("ends", "left_out"),
    [
        ([(CRASH, 0, False), (CRASH, 0, False)], [False, True]),
        ([(CRASH, 2, False)], [True]),
        ([(CRASH, 0, True)], [True]),
        ([(SLOW, 0, True), (SLOW, 0, True)], [False, False]),
        ([(SLOW, 2, False)], [True]),
        ([(GroupError("rank 1 has been silent for 3.1 s"), 2, True)], [False]),
        ([(GroupError("rank 1 is full", Code.OUT_OF_MEMORY), 2, True)], [False]),
    ],
)
@jaccl()
async def test_jaccl_is_left_out_for_its_own_kind_of_ends_until_a_request_ends_the_ring_too(
    node: Node, a: FakeLink, ends: list[tuple[GroupError, int, bool]], left_out: list[bool]
) -> None:
    begun(node, a)
    group, died = node.group, node.group.controller.died
    assert not group.controller.failed(SLOW, formed=True), "a first forward may be slow once"
    found = [died(error, 5.0, strikes, last=last) for error, strikes, last in ends]
    assert found == left_out
    assert bool(node.parts.machines.left_out()) == left_out[-1]
    if not left_out[-1]:
        return
    over(node)
    assert begun(node, a).backend == "ring"
    assert not died(GroupError("the group is replaced", Code.REPLANNED), 5.0, 0, last=False)
    assert not died(CRASH, 5.0, 2, last=False)
    assert node.parts.machines.left_out() == (), "the request was to blame"


@pytest.mark.parametrize("rdma", [(f"{at}=rdma_en7", f"studio/{at}=rdma_en9") for at in ("mac-a", "aaaa", A)])
@jaccl("rdma")
async def test_devices_by_hand_for_a_node_by_its_name_or_the_beginning_of_its_id(
    node: Node, a: FakeLink
) -> None:
    assert formed(node, a).rdma == ("", "rdma_en9", "rdma_en7", "")


@at_node(machine=desk()[""], rdma=("aa=en3",))
async def test_a_name_counts_more_than_the_beginning_of_an_id(node: Node) -> None:
    for node_id in (A, B):
        node.hear(node.meet(node_id), desk()[A])
    node.parts.node.introduction.name = "aa"
    found = node.parts.machines.devices_by_hand()
    assert set(found) == {node.parts.node.node_id}, "and not that of the Mac whose id begins so"


@at_node(machine=desk()[""], rdma=("studio/mac-a=en3", "mac-a=en5", "nobody=en6", "mac-a/nobody=en7"))
async def test_a_device_may_be_for_one_cable_of_many(node: Node) -> None:
    for node_id in (A, B):
        node.hear(node.meet(node_id), desk()[A])
    found = node.parts.machines.devices_by_hand()
    assert found == {node.parts.node.node_id: {A: "en3"}, A: {node.parts.node.node_id: "en5", B: "en5"}}


def left_out(*links: FakeLink) -> list[list[LeftOutGroup]]:
    return [link.heard(LeftOutGroup) for link in links]


@at_node(machine=desk()[""], nodes="2")
async def test_a_group_that_failed_is_told_to_all_and_to_newcomers_until_its_macs_change(
    node: Node, weights: ModelSource
) -> None:
    a, b = node.meet(A), node.meet(B)
    node.lead(weights, desk())
    group, mine = begun(node, a, b), node.group.scope.plan
    assert group.backend == "jaccl"
    assert node.group.controller.failed(GroupError("no address", Code.FORM_FAILED), formed=False)
    cable = " ".join((*sorted(mine.order.form.ranks), *("rdma_en2",) * 2))
    told = LeftOutGroup(JACCL_MESH, (cable,), "it did not form: no address", over=False)
    assert left_out(a, b) == [[told]] * 2
    b.close()
    assert left_out(node.meet(B, "again")) == [[told]]
    [row] = node.parts.node.desired.table.live()
    [failed] = node.parts.machines.options(row, "tiny").failed
    assert failed == node.parts.machines.left_out()[0][0]
    node.hear(a, replace(desk()[A], release="26.3"))
    node.tick()
    assert a.ended(LeftOutGroup) == left_out(a)[0][-1:]
    assert node.parts.machines.options(row, "tiny").failed == ()


@jaccl()
async def test_what_is_told_of_a_group_from_its_forming_to_its_end(node: Node, a: FakeLink) -> None:
    awaited(node.group)
    node.live(a)
    first = next(serving for serving in a.heard(Serving) if serving.participants)
    assert first.participants == (node.parts.node.node_id, A)
    assert first.state != "ready"
    told = len(a.heard(Serving))
    cast(Any, node.group.controller)._let_go()
    [over] = a.heard(Serving)[told:]
    assert (over.state, over.participants, over.group, over.deployment) == ("idle", (), GROUP, "tiny")
    assert (first.group, first.deployment) == (GROUP, "tiny")
    node.parts.node.desired.unload("tiny")
    node.tick()
    node.tick()
    assert a.ended(Serving) == a.heard(Serving)[-1:]


@jaccl()
async def test_an_epoch_goes_on_for_requests_of_the_same_model(node: Node, a: FakeLink) -> None:
    """A person on the other side of a partition pinned it."""
    awaited(node.group)
    node.live(a)
    first, desired = a.heard(Serving)[-1], node.parts.node.desired
    assert first.participants
    desired.serve("tiny", keep_s=KEEP_S)
    node.live(a)
    version = desired.table.newest
    assert a.heard(Serving)[-1] == replace(first, desired=version)
    assert version > first.desired
    node.hear(a, *only(version + 2, A, "tiny", node.parts.node.settings.nodes).messages())
    node.live(a)
    assert a.heard(Serving)[-1] == replace(first, desired=version + 2)


@jaccl()
async def test_words_about_another_epoch_reach_no_seat(node: Node, a: FakeLink) -> None:
    group = formed(node, a)
    reports: list[Any] = []
    watcher = cast(Any, type("Ranks", (), {"report": lambda _, each: reports.append(each)})())
    [seat] = group.endpoints(watcher)
    node.hear(a, RankTrouble(cast(Any, seat).epoch + 1, 1, Code.RANK_LOST, "not this one", True))
    b = node.meet(B)
    node.hear(b, RankTrouble(cast(Any, seat).epoch, 1, Code.RANK_LOST, "not its rank", True))
    b.close()
    assert reports == []
    node.hear(a, RankTrouble(cast(Any, seat).epoch, 1, Code.OUT_OF_MEMORY, "no room", False))
    assert [each.error.code for each in reports] == [Code.OUT_OF_MEMORY]


def running(node: Node, link: FakeLink) -> ProcessGroup:
    """The ranks of the next group, as if they ran."""
    awaiting, supervisor = awaited(node.group), node.group.supervisor
    node.live(link)
    plan = awaiting.result()
    ranks = ProcessGroup(node.parts.node.settings, plan.order.number, lambda _: None, group=plan.group)
    supervisor._current = ranks
    node.live(link)
    assert ranks.watch.reports == []
    return ranks


@pytest.mark.parametrize("sign", ["its link ends", "its agent is back"])
@jaccl()
async def test_a_lost_mac_reaches_the_epoch_as_one_report(node: Node, a: FakeLink, sign: str) -> None:
    """The next rounds notice the same loss again."""
    ranks = running(node, a)
    if sign == "its link ends":
        a.close()
    else:
        node.meet(A, "another boot")
    how = {"its link ends": "its link broke", "its agent is back": "its agent was restarted"}[sign]
    words = f"epoch {ranks.epoch} lost mac-a (rank 1): {how}"
    for _ in range(3):
        node.tick()
    assert [(each.rank, each.error.detail) for each in ranks.watch.reports] == [(1, words)]
    assert ranks.watch.reports[0].error.code is Code.RANK_LOST
    error = await ranks.failed
    assert error.detail.endswith(words)


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
    follows(node, weights, {}, a)
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
    follows(node, weights, {}, a)
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
