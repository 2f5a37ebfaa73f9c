"""Decisions of the coordinator, case by case, and refusals by others. One view, one action."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.cluster.cluster_state import NO_CLAIM, LeaderClaim
from mlxtp.cluster.deployments import DesiredState
from mlxtp.cluster.membership import MemberState, MemberStatus
from mlxtp.cluster.reconcile import (
    Action,
    ClusterView,
    FormEpoch,
    GroupPlan,
    HandOver,
    NoAction,
    RunningEpoch,
    StopEpoch,
    TryGroup,
    Wait,
    better,
    decide,
    drained_by,
    may_leave,
    refusal,
)

LLAMA = DesiredState(3, "b", "llama", "auto")
NOW = 100.0


def here(*names: str, **others: MemberStatus) -> Mapping[str, MemberStatus]:
    return {name: MemberStatus(MemberState.ALIVE, f"{name}-1", True) for name in names} | others


def epoch(*ranks: str, **changes: Any) -> RunningEpoch:
    running = RunningEpoch(
        4, ranks, tuple(f"{r}-1" for r in ranks), (float(len(ranks)),), "llama", 3, ready=True
    )
    return replace(running, **changes)


def plan(*ranks: str) -> GroupPlan:
    return GroupPlan(ranks, (float(len(ranks)),))


VIEW = ClusterView(
    now=NOW,
    self_id="a",
    leading=True,
    claim=LeaderClaim(5, "a"),
    statuses=here("a", "b", "c"),
    desired=LLAMA,
    plan=plan("a", "b"),
    epoch=8,
    names={"a": "studio", "b": "mini", "c": "book"},
)


def decided(**changes: Any) -> Action:
    return decide(replace(VIEW, **changes))


FOLLOWING: dict[str, Any] = {"leading": False, "claim": LeaderClaim(6, "b")}


# --- forming ----------------------------------------------------------------------------------------------


def test_the_coordinator_forms_what_is_wanted_under_the_next_number() -> None:
    assert decided() == FormEpoch(9, plan("a", "b"), ("a-1", "b-1"))


def test_no_other_agent_forms_anything() -> None:
    assert decided(**FOLLOWING) == NoAction()
    assert decided(leading=False, claim=NO_CLAIM) == NoAction()


def test_when_nothing_is_wanted_nothing_is_formed() -> None:
    assert decided(desired=DesiredState(4, "b", "", "auto")) == NoAction()


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


def test_it_hands_over_to_the_agent_that_gets_rank_0() -> None:
    assert decided(plan=plan("b", "a")) == HandOver("b")
    assert decided(plan=plan("b", "c")) == HandOver("b")


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


@pytest.mark.parametrize("said", LOST)
@pytest.mark.parametrize("leading", [True, False])
def test_a_participant_leaves_an_epoch_whose_owner_is_gone(said: str, leading: bool) -> None:
    action = decided(running=epoch("b", "a"), statuses=here("a", "c", b=LOST[said]), leading=leading)
    assert isinstance(action, StopEpoch)
    assert action.lost
    assert "(rank 0)" in action.reason


def test_a_participant_that_is_merely_silent_is_not_gone() -> None:
    silent = here("a", "c", b=MemberStatus(MemberState.SUSPECT, "b-1", True))
    assert decided(running=epoch("a", "b"), statuses=silent) == NoAction()


def test_participants_do_not_judge_each_other() -> None:
    assert decided(running=epoch("b", "a", "c"), statuses=here("a", "b"), **FOLLOWING) == NoAction()


def test_an_unknown_participant_is_gone() -> None:
    action = decided(running=epoch("a", "zeta-node-id"), statuses=here("a"))
    assert isinstance(action, StopEpoch)
    assert "lost zeta-nod (rank 1)" in action.reason


# --- what is wanted changes -------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", [True, False])
def test_an_unloaded_model_ends_its_epoch_with_its_owner(leading: bool) -> None:
    nothing = DesiredState(4, "b", "", "auto")
    own, others = epoch("a", "b", open_requests=1), epoch("b", "a")
    assert decided(running=own, desired=nothing, leading=leading) == StopEpoch("llama was unloaded")
    assert decided(running=others, desired=nothing, leading=leading) == NoAction()


def test_another_model_takes_its_place() -> None:
    qwen = DesiredState(4, "b", "qwen", "auto")
    assert decided(running=epoch("a", "b"), desired=qwen) == StopEpoch("qwen is wanted now")
    again = DesiredState(4, "b", "llama", "2")
    assert decided(running=epoch("a", "b"), desired=again) == StopEpoch("llama is wanted now")


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
    assert decided(others=[elsewhere], running=elsewhere, plan=three) == TryGroup(9, three)
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


def test_a_better_group_has_to_hold_still_first() -> None:
    assert decided(running=ALONE, settled_at=NOW + 1) == Wait("members come and go", NOW + 1)
    assert decided(running=ALONE, unsynced=["b"]) == Wait("mini has not yet reported its state")


def test_a_member_that_was_lost_a_moment_ago_ends_no_running_epoch() -> None:
    action = decided(running=ALONE, flapping={"b": NOW + 7})
    assert isinstance(action, Wait)
    assert action.until == NOW + 7
    assert isinstance(decided(running=ALONE, flapping={"b": NOW, "c": NOW + 7}), StopEpoch)
    assert isinstance(decided(flapping={"b": NOW + 7}), FormEpoch)  # where nothing runs it is welcome


# --- after a partition has healed -------------------------------------------------------------------------

PAIR = epoch("b", "c", number=7)


def test_a_former_coordinator_goes_on_until_the_new_one_decides() -> None:
    assert decided(running=epoch("a", "c"), **FOLLOWING) == NoAction()


def test_a_coordinator_without_an_epoch_hands_over_to_one_that_serves() -> None:
    assert decided(others=[PAIR]) == HandOver("b")
    assert decided(others=[PAIR], plan=None) == HandOver("b")
    assert decided(others=[PAIR], running=replace(PAIR, ranks=("b", "a"), boots=("b-1", "a-1"))) == HandOver(
        "b"
    )


def test_it_does_not_when_that_serves_something_else_or_is_gone_or_could_be_bettered() -> None:
    assert isinstance(decided(others=[replace(PAIR, model="qwen")]), FormEpoch)
    assert isinstance(
        decided(others=[PAIR], statuses=here("a", "b", "c") | {"b": LOST["dead"]}), Wait | FormEpoch
    )
    three = GroupPlan(("a", "b", "c"), (3.0,))
    assert isinstance(decided(others=[PAIR], plan=three), FormEpoch)


def test_a_better_group_waits_for_the_requests_of_the_epoch_it_takes_apart() -> None:
    busy = replace(PAIR, open_requests=1)
    three = GroupPlan(("a", "b", "c"), (3.0,))
    assert decided(others=[busy], plan=three) == Wait("open requests: 1", NOW + 10, for_requests=True)
    assert isinstance(decided(others=[busy], plan=three, waiting_since=NOW - 10), FormEpoch)


def test_a_coordinator_that_takes_part_elsewhere_leaves_before_it_forms() -> None:
    elsewhere = epoch("b", "a", number=7)
    three = GroupPlan(("a", "b", "c"), (3.0,))
    assert decided(running=elsewhere, others=[elsewhere], plan=three) == StopEpoch(
        "a better group is there than that of epoch 7"
    )


def test_of_two_epochs_the_worse_one_ends() -> None:
    assert decided(running=ALONE, others=[PAIR]) == StopEpoch("mini has a better group")
    assert decided(running=epoch("a", "d"), statuses=here(*"abcd"), others=[PAIR]) == NoAction()
    mine = {"running": epoch("a", "d"), "statuses": here(*"abcd"), **FOLLOWING}
    assert decided(others=[PAIR], **mine) == StopEpoch("mini coordinates and serves the model")
    assert decided(others=[epoch("b")], **mine) == NoAction()


def test_an_epoch_that_serves_does_not_end_for_one_that_is_not_ready() -> None:
    loading = replace(PAIR, ready=False)
    assert decided(running=ALONE, others=[loading], plan=None) == NoAction()
    mine = {"running": epoch("a", "d"), "statuses": here(*"abcd"), **FOLLOWING}
    assert decided(others=[loading], **mine) == NoAction()
    best = replace(loading, ranks=("b", "c", "d"), key=(3.0,))
    both = [best, replace(PAIR, ranks=("c", "d"))]
    action = decided(running=ALONE, others=both, plan=None, statuses=here(*"abcd"))
    assert action == StopEpoch("book has a better group")


def test_the_better_of_several_is_handed_over_to() -> None:
    several = [epoch("b"), epoch("d", "e"), epoch("c", "f"), epoch("e", "g")]
    assert decided(statuses=here(*"abcdefg"), others=several) == HandOver("c")


_name = st.sampled_from("abcd")
_running = st.none() | st.builds(
    lambda ranks, key, ready, requests: RunningEpoch(
        4, tuple(ranks), tuple(f"{rank}-1" for rank in ranks), (key,), "llama", 3, ready, requests
    ),
    st.lists(_name, min_size=1, max_size=4, unique=True),
    st.sampled_from((1.0, 2.0, 3.0)),
    st.booleans(),
    st.integers(0, 1),
)
_standing = st.sampled_from((MemberStatus(MemberState.ALIVE, "", True), *LOST.values()))


@given(_running, _running, _running, st.dictionaries(st.sampled_from("bcd"), _standing), st.booleans())
def test_of_two_owners_never_both_give_way_and_never_both_go_on(
    mine: RunningEpoch | None,
    theirs: RunningEpoch | None,
    candidate: RunningEpoch | None,
    statuses: dict[str, MemberStatus],
    since: bool,
) -> None:
    """Two nodes that see the same: `a` coordinates, `b` did."""
    both = {
        "statuses": here("a", "b")
        | {k: replace(v, boot_id=f"{k}-1") for k, v in statuses.items()}
        | here("a", "b"),
        "claim": LeaderClaim(5, "a"),
        "waiting_since": NOW - 10 if since else None,
    }
    if mine is None or theirs is None or mine.owner != "a" or theirs.owner != "b" or candidate is None:
        return
    leader = decided(running=mine, others=[theirs], plan=GroupPlan(mine.ranks, mine.key), **both)
    follower = decided(running=theirs, others=[mine], self_id="b", leading=False, **both)
    stops = [isinstance(action, StopEpoch) and not action.lost for action in (leader, follower)]
    assert stops != [True, True]
    settled = theirs.ready or not better(theirs.key, mine.key)
    if (
        mine.ready
        and settled
        and since
        and not any(isinstance(a, StopEpoch) and a.lost for a in (leader, follower))
    ):
        assert any(stops)


# --- asked to take part -----------------------------------------------------------------------------------


def test_a_node_takes_part_when_the_coordinator_asks() -> None:
    assert refusal("b", 9, LeaderClaim(6, "b"), joined=8) is None


@pytest.mark.parametrize(
    ("sender", "number", "claim", "said"),
    [
        ("a", 9, LeaderClaim(6, "b"), "epoch 9 comes from a, but b coordinates (term 6)"),
        ("a", 9, NO_CLAIM, "no node coordinates yet"),
        ("b", 8, LeaderClaim(6, "b"), "epoch 8 is not newer than epoch 8"),
        ("b", 7, LeaderClaim(6, "b"), "epoch 7 is not newer than epoch 8"),
    ],
)
def test_it_refuses_anybody_else_and_anything_old(
    sender: str, number: int, claim: LeaderClaim, said: str
) -> None:
    reason = refusal(sender, number, claim, joined=8)
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
        ((2.0, 1.0), (1.0,), True),
        ((1.0, 9.0), (1.0,), False),
        ((9.0,), (), False),
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


def test_a_coordinator_that_is_about_to_stop_hands_over_after_any_failure() -> None:
    assert decided(plan=plan("b", "c"), **A_STOPS) == HandOver("b")
    assert decided(plan=plan("b"), hold_until=NOW + 5, hold="it failed", **A_STOPS) == HandOver("b")


@pytest.mark.parametrize(
    ("stops", "changes"), [(frozenset("b"), {}), (frozenset(), {"draining": True})], ids=["owner", "rank"]
)
def test_no_coordinator_hands_over_to_a_group_that_is_about_to_end(
    stops: frozenset[str], changes: dict[str, Any]
) -> None:
    theirs = epoch("b", "c", key=(9.0,), open_requests=4, **changes)
    assert decided(others=[theirs], draining=stops) == FormEpoch(9, plan("a", "b"), ("a-1", "b-1"))
    mine = epoch("a", key=(1.0,))
    assert decided(running=mine, plan=None, others=[theirs], draining=stops) == NoAction()


def left(**changes: Any) -> bool:
    return may_leave(replace(VIEW, **{"plan": None, **A_STOPS, **changes}))


def test_a_coordinator_leaves_when_it_has_handed_over_or_no_member_can_take_over() -> None:
    assert left()
    assert left(running=epoch("a", "b"))
    assert not left(plan=plan("b"))
    assert not left(plan=plan("b"), running=epoch("a", "b"))
    assert left(plan=plan("b"), **FOLLOWING)


def test_a_rank_leaves_when_its_group_has_ended_or_is_done() -> None:
    hosted = epoch("b", "a")
    host = replace(hosted, ready=False, draining=True)
    assert left(**FOLLOWING)
    assert not left(running=hosted, **FOLLOWING)
    assert not left(running=hosted, others=[replace(host, draining=False)], **FOLLOWING)
    assert not left(running=hosted, others=[replace(host, open_requests=1)], **FOLLOWING)
    assert not left(running=hosted, others=[replace(host, number=3)], **FOLLOWING)
    assert left(running=hosted, others=[host, epoch("c", number=2, open_requests=1)], **FOLLOWING)


def test_a_group_takes_nothing_new_when_a_member_of_it_stops() -> None:
    stops = {"draining": frozenset("bc")}
    assert drained_by(replace(VIEW, running=epoch("a", "b"), **stops)) == ("b",)
    assert drained_by(replace(VIEW, running=epoch("a"), **stops)) == ()
    assert drained_by(replace(VIEW, running=epoch("c", "a"), **stops)) == ()
    assert drained_by(replace(VIEW, **stops)) == ()
