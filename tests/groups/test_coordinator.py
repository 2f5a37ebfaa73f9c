"""What a coordinator assigns, who obeys it, and what becomes of groups that are wanted no longer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.cluster.cluster_state import PINNED, YIELDS
from mlxtp.cluster.node import BEAT_S, ClusterNode
from mlxtp.cluster.reconcile import Situation, Wait
from mlxtp.gateway.dispatcher import ServedDeployments
from mlxtp.groups import group as group_module
from mlxtp.groups.scope import NOTHING_WANTED
from mlxtp.models.inspect import ModelSource
from mlxtp.placement.cost_model import ALONE, JACCL_MESH, RING_ETHERNET, RING_LOOPBACK, RING_THUNDERBOLT
from mlxtp.placement.model_shape import DescribedModel
from mlxtp.wire.cluster_messages import Beat, Deployment, GroupAssignment, LeftOutGroup, ModelStatus, Serving

from ..placement.made_up_macs import all_pairs, cabled, mac, on_lan
from ..placement.made_up_models import llama
from .one_node import CLOCK, FINGERPRINT, GROUP, MACHINE, A, B, FakeLink, Node, at_leader, at_node, awaited
from .scenes import sees

LAN = dict(zip(("", A, B), (each.machine for each in on_lan([mac(0), mac(1), mac(2)])), strict=True))
"""Three Macs on one network: this one (""), and those of A and B."""
CABLED = cabled(on_lan([mac(0), mac(1)]), [(0, 1)])
SPLIT = (3, 1)


def served(epoch: int, *ranks: str, group: str = GROUP) -> Serving:
    """An owner's report of a group that is ready; over several Macs a pipeline."""
    name, held_mib = group.rpartition("#")[0], (1,) * len(ranks)
    kind, split = (RING_ETHERNET, SPLIT) if len(ranks) > 1 else (ALONE, ())
    told = ("ready", "", "ring", kind, ranks, 0, name, 1, 4096, 512, (), 0, held_mib)
    return Serving(epoch, *told, group, name, split=split)


def assigned(link: FakeLink, group: str = GROUP) -> list[GroupAssignment]:
    """The assignments of a group that the other end of this link has heard."""
    return [each for each in link.heard(GroupAssignment) if each.group == group]


def has(node: Node, name: str, *links: FakeLink) -> None:
    """All of them have this model."""
    for link in links:
        node.hear(link, ModelStatus(name, FINGERPRINT, "", "", 1))


def deploy(node: Node, name: str, *links: FakeLink, replicas: int = 1, **row: object) -> None:
    node.parts.node.desired.serve(name, replicas=replicas, **row)  # type: ignore[arg-type]
    has(node, name, *links)
    node.live(*links)


def follows(node: Node, source: ModelSource, coordinator: FakeLink, *links: FakeLink) -> None:
    """The other end of the first link coordinates, and all want `tiny`."""
    node.know(source)
    node.parts.node.desired.serve("tiny", keep_s=PINNED)
    has(node, "tiny", coordinator, *links)
    node.follow(coordinator)
    node.tick()


@at_leader()
async def test_an_assignment_is_broadcast_once_for_each_change_and_again_to_a_new_link(
    node: Node, a: FakeLink
) -> None:
    here = node.parts.node.node_id
    [first] = assigned(a)
    assert (first.ranks, first.kind, first.why) == ((here, A), RING_LOOPBACK, "")
    node.live(a)
    assert assigned(a) == [first], "nothing is different"
    deploy(node, "other", a)
    [_, second] = assigned(a)
    [other] = assigned(a, "other#0")
    assert (second.ranks, other.ranks) == ((here,), (A,)), "each has a Mac of its own"
    assert second.number != other.number
    assert min(second.number, other.number) > first.number
    deploy(node, "other", a, keep_s=60)
    assert (len(assigned(a)), len(assigned(a, "other#0"))) == (2, 1), "no group is elsewhere now"
    b = node.meet(B)
    assert assigned(b) == [], "it has yet to report what it runs"
    node.live(a, b)
    assert (assigned(b), assigned(b, "other#0")) == ([second], [other])
    assert assigned(a)[2:] == [second], "with it"


@at_node(nodes="1")
async def test_a_group_is_placed_again_once_for_each_time_that_a_person_says_so(
    node: Node, weights: ModelSource
) -> None:
    a = node.meet(A)
    node.lead(weights, {A: replace(MACHINE, memory_bytes=60 << 30)})
    here = node.parts.node.node_id
    deploy(node, "other", a, nodes="1", on=(A,))
    node.hear(a, replace(served(3, A, group="other#0"), used=True))
    node.live(a)
    assert assigned(a, "other#0")[-1].ranks == (A,)
    deploy(node, "other", a, on=())
    node.live(a)
    assert (assigned(a, "other#0")[-1].ranks, assigned(a, "other#0")[-1].again) == ((A,), 0), "it stays"
    node.parts.node.desired.unload("tiny")
    deploy(node, "other", a, again=1)
    assert (assigned(a, "other#0")[-1].ranks, assigned(a, "other#0")[-1].again) == ((here,), 1)
    node.live(a)
    count = len(assigned(a, "other#0"))
    node.live(a)
    assert len(assigned(a, "other#0")) == count


@at_leader()
async def test_macs_that_are_about_to_stop_are_named_in_an_assignment(node: Node, a: FakeLink) -> None:
    """Their agents wait for it: from then on all groups plan without them."""
    assert A in assigned(a)[-1].ranks
    node.hear(a, Beat(0, "", 0, 0, 0, True, 0, True))
    node.tick()
    assert (assigned(a)[-1].ranks, assigned(a)[-1].leaving) == ((node.parts.node.node_id,), (A,))


@at_node()
async def test_a_group_that_is_given_up_keeps_its_owner_and_takes_no_room(
    node: Node, weights: ModelSource
) -> None:
    """It may try again; meanwhile its Mac counts as free."""
    a = node.meet(A)
    node.lead(weights)
    deploy(node, "broken", a, nodes="1")
    assert assigned(a, "broken#0")[-1].owner == A
    version = node.parts.node.desired.table.get("broken").version  # type: ignore[union-attr]
    failed = served(0, group="broken#0")
    given_up = replace(failed, state="failed", reason="no weights", desired=version)
    node.hear(a, given_up)
    node.live(a)
    deploy(node, "third", a, nodes="1")
    assert assigned(a, "third#0")[-1].ranks == (A,), "not beside the one that serves here"
    assert assigned(a, "broken#0")[-1].owner == A


@at_node()
async def test_a_mac_that_is_refused_has_that_as_its_reason_for_serving_nothing(node: Node) -> None:
    """It knows no deployment: `mlxtp serve` on it would not be the remedy."""
    reasons = []
    for problem in ("kv_bits differs", ""):
        node.parts.node.introduction.problem = problem
        node.tick()
        reason = node.group.supervisor.status.reason
        reasons.append((reason.detail, node.group.waiting))
    assert reasons == [("kv_bits differs",) * 2, (NOTHING_WANTED,) * 2]


@at_node()
async def test_only_the_present_coordinator_is_obeyed_and_of_its_assignments_the_last(
    node: Node, weights: ModelSource
) -> None:
    a, b = node.meet(A), node.meet(B)
    follows(node, weights, a, b)
    group = node.group

    def says(link: FakeLink, term: int, number: int, owner: str) -> str:
        node.obey(link, GroupAssignment(GROUP, "tiny", term, number, (owner,), ALONE))
        return group.scope.assignment.owner

    assert says(a, 4, 9, A) == "", "of an earlier term"
    assert says(b, 5, 9, A) == "", "of a member that does not coordinate"
    assert says(a, 5, 3, A) == A
    assert says(a, 5, 2, B) == A, "it was overtaken on the way"
    assert says(a, 5, 4, node.parts.node.node_id) == node.parts.node.node_id
    assert group.scope.owned
    node.follow(b, 6)
    assert group.scope.owned, "an assignment outlasts its coordinator"
    assert says(a, 5, 5, A) == node.parts.node.node_id, "it coordinates no longer"
    assert says(b, 6, 1, B) == B, "numbers begin again with each term"


@at_leader()
async def test_who_does_not_coordinate_assigns_nothing(node: Node, a: FakeLink) -> None:
    count = len(a.heard(GroupAssignment))
    node.follow(a, 99)
    node.parts.node.desired.serve("other")
    has(node, "other", a)
    node.tick()
    node.tick()
    assert len(a.heard(GroupAssignment)) == count
    assert [each.group for each in a.ended(GroupAssignment)] == [GROUP]
    b = node.meet(B)
    assert b.heard(GroupAssignment) == []


@pytest.mark.parametrize("told", [True, False])
@at_node(nodes="2")
async def test_a_new_coordinator_keeps_what_owners_report(
    node: Node, weights: ModelSource, told: bool
) -> None:
    """Though the group would be elsewhere if it were new, and whether it knows the assignment or not."""
    a, b = node.meet(A), node.meet(B)
    follows(node, weights, a, b)
    if told:
        node.hear_assigned(a, B, A)
    node.hear(b, served(3, B, A))
    node.lead(weights)
    last = assigned(b)[-1]
    assert (last.ranks, last.kind, last.split) == ((B, A), RING_ETHERNET, SPLIT)
    assert last.term == node.parts.node.leadership.claim.term


@pytest.mark.parametrize(("ranks", "nodes"), [((A,), "1"), ((A, B), "2")], ids=["alone", "two"])
@at_node("nodes")
async def test_an_owner_keeps_its_group_between_two_epochs(
    node: Node, weights: ModelSource, ranks: tuple[str, ...]
) -> None:
    """Its report has no ranks then, and another Mac, fabric or split might seem to be better."""
    a, b = node.meet(A), node.meet(B)
    follows(node, weights, a, b)
    node.hear(a, ready := served(3, *ranks))
    node.lead(weights)

    def runs() -> int:
        return len(node.parts.coordinator._reports())

    over = replace(ready, state="idle", kind="", participants=(), held_mib=(), split=())
    node.hear(a, over)
    node.live(a, b)
    assert runs() == 1
    assert assigned(a)[-1].ranks == ranks
    node.no_longer(a, over)
    node.live(a, b)
    assert runs() == 0


@at_node(machine=LAN[""], nodes="2")
async def test_a_coordinator_keeps_its_own_group_between_two_epochs(node: Node, weights: ModelSource) -> None:
    a, b = node.meet(A), node.meet(B)
    node.lead(weights, LAN)
    scope = node.group.scope
    assert (len(scope.assignment.ranks), scope.assignment.kind) == (2, RING_ETHERNET)
    forms(node, GROUP, a, b)
    other = B if scope.assignment.ranks[1] == A else A
    scope.assignment = replace(scope.assignment, ranks=(node.parts.node.node_id, other))
    node.live(a, b)
    node.group.scope.plan, node.group.supervisor.status.in_epoch = None, False
    node.live(a, b)
    assert scope.assignment.ranks == (node.parts.node.node_id, other), "no other one is planned"


@pytest.mark.parametrize(("ready_s", "owner"), [(100, B), (7, A)], ids=["longer", "as long"])
@at_node()
async def test_of_two_owners_of_a_group_the_one_that_has_served_it_longer_keeps_it(
    node: Node, weights: ModelSource, ready_s: int, owner: str
) -> None:
    """Two that were apart both formed it. Of equal ages the assigned one counts, or neither would rest."""
    a = node.meet(A)
    node.hear(a, replace(served(9, A), ready_s=5))
    node.lead(weights)
    assert assigned(a)[-1].owner == A
    b = node.meet(B)
    has(node, "tiny", b)
    node.hear(b, MACHINE, replace(served(8, B), ready_s=ready_s))
    node.live(a, b)
    assert {assigned(link)[-1].owner for link in (a, b)} == {owner}


@at_node()
async def test_a_greeting_ends_with_the_beat(node: Node, weights: ModelSource) -> None:
    """A coordinator decides once it has a member's beat: all reports of that member must be there then."""
    node.lead(weights)
    a = node.meet(A)
    sent = [type(message) for message in a.sent]
    assert a.heard(Serving)
    assert (sent[-1], sent.count(Beat)) == (Beat, 1)


@at_node(machine=CABLED[0].machine, nodes="2")
async def test_what_any_owner_left_out_is_in_no_plan_while_that_owner_is_here(
    node: Node, weights: ModelSource
) -> None:
    a, b = node.meet(A), node.meet(B)
    node.lead(weights, {A: CABLED[1].machine})
    assert assigned(a)[-1].kind == JACCL_MESH
    cable = " ".join((*sorted((node.parts.node.node_id, A)), "rdma_en2", "rdma_en2"))
    node.hear(b, LeftOutGroup(JACCL_MESH, (cable,), "no address", over=False))
    node.live(a, b)
    assert (len(assigned(a)[-1].ranks), assigned(a)[-1].kind) == (2, RING_THUNDERBOLT)
    b.close()
    node.live(a)
    assert assigned(a)[-1].kind == JACCL_MESH


OTHERS = (A, "b" * 32, "c" * 32, B)


async def leads_without_files(node: Node, count: int, **row: object) -> list[FakeLink]:
    """So many cabled Macs have a model of 30 GB. This node coordinates, and does not have it."""
    shape = DescribedModel(llama(num_hidden_layers=64), 30 << 30, mtp=False).packed()
    macs = cabled(on_lan([mac(each) for each in range(count)]), all_pairs(count))
    links = [node.meet(each) for each in OTHERS[:count]]
    node.parts.node.desired.serve("big", keep_s=PINNED, **row)  # type: ignore[arg-type]
    await sees(lambda: node.group.scope.model.problem == "big is not here")
    for link, each in zip(links, macs, strict=True):
        node.hear(link, Beat(0, "", 0, 0, 0, True, 0), each.machine)
        node.hear(link, ModelStatus("big", FINGERPRINT, "", "", 30 << 10, shape))
    leadership = node.parts.node.leadership
    leadership._follow(leadership._next_claim(leadership.self_id), CLOCK.now)
    node.live(*links)
    assert leadership.leading
    return links


@pytest.mark.parametrize("liar", ["0" * 32, "d" * 32], ids=["first", "later"])
@pytest.mark.parametrize(
    "shape", [b"garbage", DescribedModel(llama(num_hidden_layers=1), 1 << 30, False).packed()[:-9]]
)
@at_node()
async def test_a_shape_that_makes_no_sense_costs_only_the_link_of_who_sent_it(
    node: Node, liar: str, shape: bytes
) -> None:
    links = await leads_without_files(node, 2, nodes="2")
    node.hear(lying := node.meet(liar), Beat(0, "", 0, 0, 0, True, 0), MACHINE)
    node.hear(lying, ModelStatus("big", FINGERPRINT, "", "", 1, shape))
    node.live(*links, lying)
    assert node.parts.node.links.nodes() == {*OTHERS[:2]}
    last = assigned(links[0], "big#0")[-1]
    assert ({*last.ranks}, last.kind, last.why) == ({*OTHERS[:2]}, JACCL_MESH, "")


@at_node()
async def test_a_plan_for_now_is_the_coordinators_beside_what_runs(node: Node) -> None:
    """Also of a model whose files others have, by their shape of it: its size alone could not be divided."""
    links = await leads_without_files(node, 2, nodes="2")
    [view] = node.parts.coordinator._view(CLOCK.now).wanted
    assert (view.weight_bytes >> 30, [*view.lacks]) == (30, [node.parts.node.node_id])
    coordinator, most = node.parts.coordinator, DescribedModel(llama(), 600 << 30, mtp=False)
    wanted = Deployment("other", "other", on=OTHERS[:2])
    first, gone = coordinator.foresee(wanted, most)
    assert (first.ranks, gone) == ((), ())
    assert "GB" in first.why
    small = replace(most, weight_bytes=8 << 30)
    less, _ = coordinator.foresee(wanted, small)
    before = assigned(links[0], "big#0")[-1]
    assert ({*before.ranks}, before.kind, before.why) == ({*OTHERS[:2]}, JACCL_MESH, "")
    assert node.parts.groups.by_id.keys() == {"big#0"}, "nothing is assigned"
    again, _ = coordinator.foresee(replace(node.parts.node.desired.table.get("big"), version=9), small)
    assert (again.ranks, again.kind) == (before.ranks, before.kind), "what is deployed stays"
    node.parts.node.desired.serve("other", keep_s=PINNED, on=OTHERS[:2])
    for link in links:
        node.hear(link, ModelStatus("other", FINGERPRINT, "", "", 8 << 10, small.packed()))
    node.live(*links)
    [given] = assigned(links[0], "other#0")[-1:]
    assert (given.ranks, given.kind, given.why) == (less.ranks, less.kind, less.why)
    assert less.ranks


@at_node()
async def test_a_faster_place_is_told_to_all(node: Node) -> None:
    links = await leads_without_files(node, 4)
    node.hear(links[0], replace(served(3, A, group="big#0"), used=True))
    node.live(*links)
    last = assigned(links[1], "big#0")[-1]
    assert last.ranks == (A,)
    assert last.faster.startswith("JACCL mesh of mac-a + mac-b + mac-c + mac-f: ")
    node.follow(links[1], 99)
    node.obey(links[1], replace(last, term=99, faster="elsewhere"))
    assert node.group.scope.assignment.faster == "elsewhere"


@at_leader()
async def test_more_requests_at_a_group_that_has_some_are_no_reason_to_plan_again(
    node: Node, a: FakeLink
) -> None:
    coordinator = node.parts.coordinator
    views = []
    for requests in (0, 1, 2):
        node.hear(a, replace(served(3, A), open_requests=requests))
        views.append(coordinator._view(CLOCK.now))
    assert views[0] != views[1] == views[2]


def end_of(node: Node, name: str) -> list[str]:
    """From now on, why the epoch of a group is ended."""
    group, reasons = node.parts.groups.known(name), list[str]()
    group.supervisor.status.in_epoch = True
    group.supervisor.end_epoch = lambda error, _lost="": reasons.append(error.detail)  # type: ignore[method-assign]
    return reasons


def forms(node: Node, name: str, *links: FakeLink) -> None:
    """This node, which owns it, forms the group."""
    group = node.parts.groups.known(name)
    awaited(group)
    node.live(*links)
    assert group.scope.plan is not None, group.waiting


@at_leader()
async def test_the_groups_of_a_removed_deployment_end(node: Node, a: FakeLink) -> None:
    deploy(node, "other", a)
    forms(node, GROUP, a)
    reasons = end_of(node, GROUP)
    node.live(a)
    assert reasons == []
    node.parts.node.desired.unload("tiny")
    node.tick()
    assert reasons == ["tiny was unloaded"]
    group = node.parts.groups.by_id[GROUP]
    group.supervisor.status.in_epoch, group.scope.plan = False, None
    node.live(a)
    assert list(node.parts.groups.by_id) == ["other#0"]


@at_leader()
async def test_memory_that_ranks_of_a_removed_deployment_hold_is_taken_until_they_have_ended(
    node: Node, a: FakeLink
) -> None:
    gone = replace(served(3, A, group="gone#0"), deployment="gone", held_mib=(2048,))
    node.hear(a, replace(served(4, A, B), held_mib=(1024, 512)), gone)
    node.live(a)
    members = {each.node_id: each for each in node.parts.coordinator._view(CLOCK.now).members}
    assert [size >> 20 for size in (members[A].held_bytes, members[A].taken_bytes)] == [3072, 2048]


@at_node()
async def test_the_last_epoch_of_a_group_that_is_no_longer_reported_has_ended(
    node: Node, weights: ModelSource
) -> None:
    a, groups = node.meet(A), node.parts.groups
    node.lead(weights)
    node.hear(a, gone := replace(served(3, A, group="gone#0"), deployment="gone"))
    node.live(a)
    [running] = groups.known("gone#0").supervisor.status.history.stories
    assert running.lasted_s is None
    node.no_longer(a, gone)
    node.live(a)
    [(name, over)] = groups.past
    assert (name, over.epoch, over.lasted_s is None) == ("gone#0", 3, False)


@at_node()
async def test_only_the_ranks_here_of_a_lost_owner_end(node: Node) -> None:
    node.meet(A)
    b, ended = node.meet(B), list[object]()
    ranks = [SimpleNamespace(host=each, host_boot="boot", order=SimpleNamespace(epoch=3)) for each in (A, B)]
    hosted = SimpleNamespace(ranks=ranks, clear=lambda _why, chosen: ended.extend(filter(chosen, ranks)))
    others = node.parts.groups._others
    others._hosted = cast(Any, hosted)
    others.end_lost()
    assert ended == []
    b.close()
    others.end_lost()
    assert ended == ranks[1:]


@at_node()
async def test_a_decision_waits_for_requests_since_it_first_had_to(node: Node, weights: ModelSource) -> None:
    node.lead(weights)
    group, requests = node.group, Wait("open requests: 1", for_requests=True)
    situation = group.controller.situation(None)
    waits = [(requests, 10.0, 10.0), (requests, 12.0, 10.0), (Wait("not here"), 13.0, None)]
    for wait, now, since in (*waits, (requests, 14.0, 14.0), (None, 15.0, None)):
        group._note(wait, situation, now)
        assert group._waiting_since == since
    why = "mac-a cannot take part"
    for reason, unplanned in ((why, why), ("members come and go", "")):
        group._note(Wait(reason), Situation(refusal=why), 20.0)
        assert group.unplanned == unplanned


@at_leader()
async def test_no_group_begins_while_an_agent_ends(node: Node, a: FakeLink) -> None:
    """The end of its groups may take several rounds. A group that one of these began would never end."""
    deploy(node, "other", a)
    groups = node.parts.groups
    groups.start()
    await asyncio.sleep(0)
    ending = asyncio.ensure_future(groups.close())
    await asyncio.sleep(0)
    node.live(a)
    deploy(node, "third", a)
    await ending
    running = {task.get_name() for task in asyncio.all_tasks()}
    assert not running & groups.by_id.keys()
    assert all(each.scope.plan is None for each in groups.by_id.values())


@at_node()
async def test_an_agent_alone_looks_whether_open_requests_have_ended(
    node: Node, weights: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their end begins no round. A new revision must not wait for as long as it may wait for them."""
    monkeypatch.setattr(ClusterNode, "alone", True)
    node.lead(weights)
    for for_requests, next_in_s in ((True, BEAT_S), (False, 10.0)):
        wait = Wait("", CLOCK.now + 10.0, for_requests=for_requests)
        monkeypatch.setattr(group_module, "decide", lambda _view, wait=wait: wait)
        assert node.group.decide(CLOCK.now) == CLOCK.now + next_in_s


@at_node()
async def test_with_fewer_replicas_the_group_that_is_not_ready_ends_once_it_is_idle(
    node: Node, weights: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [1]
    monkeypatch.setattr(ServedDeployments, "open_at", lambda *_: requests[0])
    here, a = node.parts.node.node_id, node.meet(A)
    node.lead(weights)
    deploy(node, "tiny", a, replicas=2, nodes="1")
    groups = {name: node.parts.groups.known(name) for name in (GROUP, "tiny#1")}
    owners = {name: each.scope.assignment.owner for name, each in groups.items()}
    assert set(owners.values()) == {here, A}
    mine, other = sorted(owners, key=lambda name: owners[name] != here)
    forms(node, mine, a)
    reasons = end_of(node, mine)
    node.hear(a, served(7, A, group=other))
    deploy(node, "tiny", a, replicas=1)
    assert (groups[other].scope.assignment.owner, groups[mine].scope.assignment.owner) == (A, "")
    assert reasons == [], "a request is open"
    requests[0] = 0
    node.tick()
    assert reasons == ["tiny has enough other groups"]


@at_leader()
async def test_of_as_many_replicas_as_there_is_room_for_those_without_room_are_nowhere(
    node: Node, a: FakeLink
) -> None:
    here = node.parts.node.node_id
    deploy(node, "tiny", a, replicas=0, nodes="1")
    assert [assigned(a, name)[-1].ranks for name in (GROUP, "tiny#1")] == [(here,), (A,)]
    deploy(node, "tiny", a, replicas=0, on=(here,))
    assert [assigned(a, name)[-1].owner for name in (GROUP, "tiny#1")] == [here, ""]
    assert list(node.parts.groups.by_id) == [GROUP], "nothing of the other one is left"


@at_node(machine=replace(MACHINE, memory_bytes=1 << 30, free_bytes=1 << 30))
async def test_an_unpinned_deployment_gives_way_to_one_that_needs_its_room(
    node: Node, weights: ModelSource
) -> None:
    node.lead(weights)
    desired = node.parts.node.desired

    def runs(name: str) -> bool:
        node.live()
        return node.parts.groups.known(f"{name}#0").scope.owned

    desired.unload("tiny")
    desired.serve("one", keep_s=YIELDS)
    assert runs("one")
    forms(node, "one#0")
    reasons = end_of(node, "one#0")
    desired.serve("two", keep_s=PINNED)
    assert runs("two")
    assert [row.name for row in desired.table.live()] == ["two"]
    assert set(reasons) == {"one was unloaded"}
    desired.serve("three", keep_s=PINNED)
    assert not runs("three"), "what a user asked for gives no room"
    assert runs("two")
    assert "three" in [row.name for row in desired.table.live()]
    assert "GB" in node.parts.groups.known("three#0").waiting
