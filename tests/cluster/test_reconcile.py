"""Decisions of a group's owner, case by case, and refusals by others. One view, one action."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.cluster.membership import MemberState, MemberStatus
from mlxtp.cluster.reconcile import (
    Action,
    FormEpoch,
    GroupPlan,
    GroupView,
    NoAction,
    RunningEpoch,
    StopEpoch,
    TryGroup,
    Wait,
    Wanted,
    better,
    decide,
    drained_by,
    refusal,
)

LLAMA = Wanted("llama")
NOW = 100.0


def here(*names: str, **others: MemberStatus) -> Mapping[str, MemberStatus]:
    return {name: MemberStatus(MemberState.ALIVE, f"{name}-1", True) for name in names} | others


def epoch(*ranks: str, **changes: Any) -> RunningEpoch:
    running = RunningEpoch(
        4, ranks, tuple(f"{r}-1" for r in ranks), (float(len(ranks)),), Wanted("llama"), ready=True
    )
    return replace(running, **changes)


def plan(*ranks: str) -> GroupPlan:
    return GroupPlan(ranks, (float(len(ranks)),))


VIEW = GroupView(
    now=NOW,
    self_id="a",
    assignee="a",
    nodes="abcd",
    statuses=here("a", "b", "c"),
    wanted=LLAMA,
    plan=plan("a", "b"),
    epoch=8,
    names={"a": "studio", "b": "mini", "c": "book"},
)


def decided(**changes: Any) -> Action:
    return decide(replace(VIEW, **changes))


ELSEWHERE: dict[str, Any] = {"assignee": "b"}


# --- forming ----------------------------------------------------------------------------------------------


def test_the_owner_forms_what_is_wanted_under_the_next_number() -> None:
    assert decided() == FormEpoch(9, plan("a", "b"), ("a-1", "b-1"))


def test_no_other_agent_forms_anything() -> None:
    assert decided(**ELSEWHERE) == NoAction()
    assert decided(assignee="") == NoAction()


def test_when_nothing_is_wanted_nothing_is_formed() -> None:
    assert decided(wanted=None) == NoAction()


def test_it_waits_until_members_have_stopped_coming_and_going() -> None:
    assert decided(settled_at=NOW + 0.2) == Wait("members come and go", NOW + 0.2)
    assert isinstance(decided(settled_at=NOW), FormEpoch)


def test_it_waits_for_what_present_members_have_to_tell() -> None:
    assert decided(unsynced=["c"]) == Wait("book has not yet reported its state")


def test_without_a_plan_it_waits_with_the_reason() -> None:
    assert decided(plan=None, refusal="needs 2 of 3 nodes") == Wait("needs 2 of 3 nodes", math.inf)


def test_after_failed_epochs_it_waits_its_time() -> None:
    assert decided(hold_until=NOW + 4, hold="the ring did not form") == Wait("the ring did not form", NOW + 4)
    assert isinstance(decided(hold_until=NOW, hold="the ring did not form"), FormEpoch)


def test_no_silent_member_is_taken_along() -> None:
    silent = here("a", "c", b=MemberStatus(MemberState.SUSPECT, "b-1", True))
    assert decided(statuses=silent) == Wait("mini is silent")


def test_an_owner_that_can_be_in_no_group_waits_with_the_reason() -> None:
    assert decided(plan=plan("b", "c")) == Wait("studio can be in no group, mini can")


# --- losing a member --------------------------------------------------------------------------------------

LOST = {
    "dead": MemberStatus(MemberState.DEAD, "b-1", False),
    "left": MemberStatus(MemberState.LEFT, "b-1", False),
    "removed": MemberStatus(MemberState.REMOVED, "b-1", False),
    "away": MemberStatus(MemberState.AWAY, "", False),
    "its link broke": MemberStatus(MemberState.SUSPECT, "b-1", False),
    "its agent was restarted": MemberStatus(MemberState.ALIVE, "b-2", True),
}


@pytest.mark.parametrize("said", LOST)
def test_an_epoch_ends_at_once_when_a_participant_is_gone(said: str) -> None:
    action = decided(
        running=epoch("a", "b", open_requests=3),
        statuses=here("a", "c", b=LOST[said]),
        settled_at=NOW + 1,
        unsynced=["c"],
    )
    assert isinstance(action, StopEpoch)
    assert action.lost
    assert action.reason.startswith("epoch 4 lost mini (rank 1): ")
    assert said in action.reason


def test_a_participant_that_is_merely_silent_is_not_gone() -> None:
    silent = here("a", "c", b=MemberStatus(MemberState.SUSPECT, "b-1", True))
    assert decided(running=epoch("a", "b"), statuses=silent) == NoAction()


def test_an_unknown_participant_is_gone() -> None:
    action = decided(running=epoch("a", "zeta-node-id"), statuses=here("a"))
    assert isinstance(action, StopEpoch)
    assert "lost zeta-nod (rank 1)" in action.reason


# --- what is wanted changes -------------------------------------------------------------------------------


@pytest.mark.parametrize("assignee", ["a", "b", ""])
def test_an_unloaded_model_ends_its_epoch(assignee: str) -> None:
    own = epoch("a", "b", open_requests=1)
    assert decided(running=own, wanted=None, assignee=assignee) == StopEpoch("llama was unloaded")


def test_another_model_takes_its_place() -> None:
    qwen = Wanted("qwen")
    assert decided(running=epoch("a", "b"), wanted=qwen) == StopEpoch("qwen is wanted now")
    more = Wanted("llama", "2")
    assert decided(running=epoch("a", "b"), wanted=more) == StopEpoch("llama is wanted now")
    for other in (Wanted("llama", parallel="pipeline"), Wanted("llama", split="40,24")):
        assert decided(running=epoch("a", "b"), wanted=other) == StopEpoch("llama is wanted now")
        fits = epoch("a", "b", wanted=other)
        assert decided(running=fits, wanted=other) == NoAction()


def test_the_next_revision_is_ready_before_the_present_one_ends() -> None:
    newer, unproven = Wanted("llama@2"), replace(plan("a", "b"), proven=False)
    busy = epoch("a", "b", open_requests=2)
    assert decided(running=busy, wanted=newer, plan=unproven) == TryGroup(9, unproven)
    ready: dict[str, Any] = {"wanted": newer, "plan": plan("a", "b")}
    waiting, over = Wait("open requests: 2", NOW + 10, for_requests=True), StopEpoch("llama@2 is wanted now")
    assert decided(running=busy, **ready) == waiting, "another model cannot go on with them"
    assert decided(running=busy, waiting_since=NOW - 10, **ready) == over
    assert decided(running=epoch("a", "b"), **ready) == over
    assert decided(running=busy, wanted=newer, plan=None, refusal="it comes") == Wait("it comes")
    loading = epoch("a", "b", ready=False)
    assert decided(running=loading, wanted=newer, plan=unproven) == StopEpoch("llama@2 is wanted now")


# --- something better -------------------------------------------------------------------------------------

ALONE = epoch("a")


def test_a_running_epoch_is_left_alone() -> None:
    assert decided(running=epoch("a", "b")) == NoAction()
    assert decided(running=epoch("a", "c")) == NoAction()
    assert decided(running=epoch("a", "b"), plan=None, refusal="too slow") == NoAction()
    assert decided(running=epoch("a", "b", "c", "d"), statuses=here(*"abcd")) == NoAction()


def test_a_better_group_takes_over_without_requests() -> None:
    assert decided(running=ALONE) == StopEpoch("a better group is there with mini")


def test_a_slightly_better_group_does_not() -> None:
    for key, action in (((1.04,), NoAction()), ((1.06,), StopEpoch("a better group is there with mini"))):
        assert decided(running=ALONE, plan=GroupPlan(("a", "b"), key)) == action


def test_fewer_macs_may_be_better() -> None:
    action = decided(running=epoch("a", "b"), plan=GroupPlan(("a",), (9.0,)))
    assert action == StopEpoch("a better group is there with fewer Macs")


def test_an_epoch_that_still_forms_is_not_disturbed() -> None:
    assert decided(running=epoch("a", ready=False)) == NoAction()


def test_a_group_that_never_formed_is_tried_beside_the_one_that_serves() -> None:
    unproven = replace(plan("a", "b"), proven=False)
    busy = epoch("a", open_requests=2)
    assert decided(running=busy, plan=unproven) == TryGroup(9, unproven)
    assert isinstance(decided(running=busy, plan=unproven, settled_at=NOW + 1), Wait)
    assert isinstance(decided(running=busy, plan=unproven, flapping={"b": NOW + 7}), Wait)
    assert decided(running=epoch("a", ready=False), plan=unproven) == NoAction()
    three = replace(plan("a", "b", "c"), proven=False)
    elsewhere = epoch("b", "a", number=7)
    assert decided(others=[elsewhere], plan=three) == TryGroup(9, three)
    assert isinstance(decided(plan=unproven), FormEpoch), "nothing serves that it could disturb"


def test_a_better_plan_with_rank_0_elsewhere_ends_nothing_here() -> None:
    for proven in (True, False):
        elsewhere = replace(plan("b", "c"), proven=proven)
        assert decided(running=ALONE, plan=elsewhere) == NoAction()


def test_a_faster_fabric_between_the_same_macs_takes_over() -> None:
    ring, jaccl = epoch("a", "b", backend="ring"), GroupPlan(("a", "b"), (9.0,), "jaccl")
    assert decided(running=ring, plan=jaccl) == StopEpoch("a better group is there with jaccl")
    assert decided(running=ring, plan=replace(jaccl, backend="ring")) == NoAction()


def test_open_requests_are_waited_for_and_not_for_ever() -> None:
    busy = epoch("a", open_requests=2)
    waiting = Wait("open requests: 2", NOW + 10.0, for_requests=True)
    assert decided(running=busy) == waiting
    since = decided(running=busy, waiting_since=NOW - 1)
    assert since == Wait("open requests: 2", NOW + 9, for_requests=True)
    assert isinstance(decided(running=busy, waiting_since=NOW - 10), StopEpoch)


def test_a_healthy_group_over_rdma_outweighs_a_better_one_that_takes_a_last_formation() -> None:
    jaccl = GroupPlan(("a", "b", "c"), (9.0,), "jaccl", scarce=True)
    two = epoch("a", "b", backend="jaccl")
    assert decided(running=two, plan=jaccl) == NoAction()
    assert isinstance(decided(running=two, plan=replace(jaccl, scarce=False)), StopEpoch)
    assert isinstance(decided(running=replace(two, backend="ring"), plan=jaccl), StopEpoch)
    assert isinstance(decided(running=two, plan=jaccl, wanted=Wanted("other")), StopEpoch), "a person's word"


def test_a_better_group_has_to_hold_still_first() -> None:
    assert decided(running=ALONE, settled_at=NOW + 1) == Wait("members come and go", NOW + 1)
    assert decided(running=ALONE, unsynced=["b"]) == Wait("mini has not yet reported its state")


def test_a_member_that_was_lost_a_moment_ago_ends_no_running_epoch() -> None:
    action = decided(running=ALONE, flapping={"b": NOW + 7})
    assert isinstance(action, Wait)
    assert action.until == NOW + 7
    assert isinstance(decided(running=ALONE, flapping={"b": NOW, "c": NOW + 7}), StopEpoch)
    assert isinstance(decided(flapping={"b": NOW + 7}), FormEpoch)  # where nothing runs it is welcome


# --- assigned to another owner, or to other Macs ----------------------------------------------------------

PAIR = epoch("b", "c", number=7)


def test_a_former_owner_goes_on_until_its_requests_are_done_and_not_for_ever() -> None:
    busy = epoch("a", "c", open_requests=2)
    waiting = Wait("open requests: 2", NOW + 10, for_requests=True)
    over = StopEpoch("mini has the group now")
    serves = {"others": [PAIR], **ELSEWHERE}
    assert decided(running=busy, **serves) == waiting
    assert decided(running=busy, waiting_since=NOW - 10, **serves) == over
    assert decided(running=epoch("a", "c"), **serves) == over


def test_a_former_owner_goes_on_until_the_next_one_serves_and_not_for_ever() -> None:
    mine, over = epoch("a", "c"), StopEpoch("mini has the group now")
    forming = {"others": [replace(PAIR, ready=False)], **ELSEWHERE}
    waiting = Wait("mini has yet to serve the group", NOW + 10, for_requests=True)
    assert decided(running=mine, **forming) == waiting
    assert decided(running=mine, **ELSEWHERE) == waiting
    assert decided(running=mine, waiting_since=NOW - 10, **forming) == over
    assert decided(running=replace(mine, ready=False), **forming) == over
    assert decided(running=mine, **forming | {"statuses": here("a", "c") | {"b": LOST["dead"]}}) == over


def test_a_group_that_has_no_place_any_longer_ends_with_the_reason() -> None:
    action = decided(running=epoch("a"), assignee="", refusal="1 replica is wanted")
    assert action == StopEpoch("1 replica is wanted")


def test_a_mac_that_another_group_needs_is_given_up_once_there_is_a_plan_without_it() -> None:
    pair = epoch("a", "b")
    assert decided(running=pair, nodes="a", plan=plan("a")) == StopEpoch("mini is needed for another group")
    assert decided(running=pair, nodes="a", plan=None, refusal="too large") == Wait("too large")


def test_a_new_owner_waits_for_the_requests_of_the_epoch_before() -> None:
    busy = replace(PAIR, open_requests=1)
    assert decided(others=[busy]) == Wait("open requests: 1", NOW + 10, for_requests=True)
    assert isinstance(decided(others=[busy], waiting_since=NOW - 10), FormEpoch)
    assert isinstance(decided(others=[replace(busy, ready=False)]), FormEpoch)
    assert isinstance(decided(others=[busy], statuses=here("a", "b", "c") | {"b": LOST["dead"]}), Wait)
    gone = {"plan": plan("a", "c"), "statuses": here("a", "c") | {"b": LOST["dead"]}}
    assert isinstance(decided(others=[busy], **gone), FormEpoch)


# --- asked to take part -----------------------------------------------------------------------------------


def test_a_node_takes_part_when_the_owner_asks() -> None:
    assert refusal("b", 9, "b", joined=8) is None
    assert refusal("b", 9, "", joined=8) is None  # it may not have received the assignment yet


@pytest.mark.parametrize(
    ("sender", "number", "assignee", "said"),
    [
        ("a", 9, "b", "epoch 9 comes from a, but b owns its group"),
        ("b", 8, "b", "epoch 8 is not newer than epoch 8"),
        ("b", 7, "", "epoch 7 is not newer than epoch 8"),
    ],
)
def test_it_refuses_any_other_agent_and_anything_old(
    sender: str, number: int, assignee: str, said: str
) -> None:
    reason = refusal(sender, number, assignee, joined=8)
    assert reason is not None
    assert said in reason


# --- comparing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "clearly"),
    [
        ((2.0,), (1.0,), True),
        ((1.0,), (2.0,), False),
        ((1.0,), (1.0,), False),
        ((1.02, 5.0), (1.0, 1.0), True),
        ((1.0, 5.0), (1.02, 1.0), True),
        ((1.0, 5.0), (2.0, 1.0), False),
        ((0.0,), (0.0,), False),
        ((), (), False),
    ],
)
def test_the_first_number_that_differs_much_decides(
    one: tuple[float, ...], other: tuple[float, ...], clearly: bool
) -> None:
    assert better(one, other) is clearly


_key = st.lists(st.floats(0, 100), min_size=2, max_size=2)


@given(_key, _key)
def test_two_plans_are_never_better_than_each_other(one: list[float], other: list[float]) -> None:
    assert not (better(one, other) and better(other, one))


# --- those that are about to stop -------------------------------------------------------------------------

B_STOPS: dict[str, Any] = {"draining": frozenset("b")}
A_STOPS: dict[str, Any] = {"draining": frozenset("a")}


def test_a_group_ends_at_once_when_another_can_do_without_the_stopping_agent() -> None:
    """Requests outlive groups, so nothing is waited for: neither they, nor the load, nor calm."""
    busy = epoch("a", "b", open_requests=3)
    stop = StopEpoch("mini is about to stop, and another group goes on")
    for changes in ({}, {"settled_at": NOW + 1}, {"unsynced": ["c"]}, {"flapping": {"c": NOW + 5}}):
        assert decided(running=busy, plan=plan("a", "c"), **B_STOPS, **changes) == stop
    assert decided(running=epoch("a", "b", ready=False), plan=plan("a"), **B_STOPS) == stop
    assert decided(running=busy, plan=plan("b", "c"), **A_STOPS) == StopEpoch(
        "studio is about to stop, and another group goes on"
    )


def test_a_group_that_needs_the_stopping_agent_goes_on() -> None:
    for who in (A_STOPS, B_STOPS):
        assert decided(running=epoch("a", "b", open_requests=3), plan=None, **who) == NoAction()


def test_who_takes_no_part_stops_without_an_effect() -> None:
    assert decided(running=epoch("a", "b"), plan=plan("a", "b"), draining=frozenset("c")) == NoAction()


def test_an_owner_that_stops_ends_its_epoch_once_the_group_is_assigned_elsewhere() -> None:
    busy = epoch("a", "b", open_requests=3)
    stop = StopEpoch("studio is about to stop, and another group goes on")
    assert decided(running=busy, plan=None, **A_STOPS, **ELSEWHERE) == stop


def test_a_group_takes_nothing_new_when_a_member_of_it_stops() -> None:
    stops = {"draining": frozenset("bc")}
    assert drained_by(replace(VIEW, running=epoch("a", "b"), **stops)) == ("b",)
    assert drained_by(replace(VIEW, running=epoch("a"), **stops)) == ()
    assert drained_by(replace(VIEW, **stops)) == ()
