"""Decisions of a group's owner, case by case, and refusals by others. One view, one action."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from mlxtp.cluster.membership import MemberState, MemberStatus
from mlxtp.cluster.reconcile import (
    Action,
    FormEpoch,
    GroupForm,
    GroupView,
    NoAction,
    StopEpoch,
    Wait,
    decide,
    drained_by,
    refusal,
)

NOW = 100.0


def here(*names: str, **others: MemberStatus) -> Mapping[str, MemberStatus]:
    return {name: MemberStatus(MemberState.ALIVE, f"{name}-1", True) for name in names} | others


def form(*ranks: str, **changes: Any) -> GroupForm:
    return replace(GroupForm("llama", ranks, "ring"), **changes)


def runs(*ranks: str, ready: bool = True, open_requests: int = 0) -> dict[str, Any]:
    """An epoch of this node."""
    running = FormEpoch(4, form(*ranks), tuple(f"{r}-1" for r in ranks))
    return {"running": running, "ready": ready, "open_requests": open_requests}


VIEW = GroupView(
    now=NOW,
    self_id="a",
    assignee="a",
    statuses=here("a", "b", "c"),
    model="llama",
    form=form("a", "b"),
    epoch=8,
    names={"a": "studio", "b": "mini", "c": "book"},
)


def decided(**changes: Any) -> Action:
    return decide(replace(VIEW, **changes))


UNREST = Wait("members come and go", NOW + 1)
ELSEWHERE: dict[str, Any] = {"assignee": "b", "form": None}


# --- forming ----------------------------------------------------------------------------------------------


def test_the_owner_forms_what_is_wanted_under_the_next_number() -> None:
    assert decided() == FormEpoch(9, form("a", "b"), ("a-1", "b-1"))


def test_no_other_agent_forms_anything() -> None:
    assert decided(**ELSEWHERE) == NoAction()
    assert decided(assignee="", form=None) == NoAction()


def test_when_nothing_is_wanted_nothing_is_formed() -> None:
    assert decided(model="", form=None) == NoAction()


def test_it_waits_until_members_have_stopped_coming_and_going() -> None:
    assert decided(unrest=UNREST) == UNREST


def test_what_cannot_be_formed_waits_with_the_reason() -> None:
    assert decided(form=None, refusal="it still comes") == Wait("it still comes", math.inf)


def test_no_silent_member_is_taken_along() -> None:
    silent = here("a", "c", b=MemberStatus(MemberState.SUSPECT, "b-1", True))
    assert decided(statuses=silent) == Wait("mini is silent")


def test_a_rank_that_is_not_here_is_waited_for() -> None:
    assert decided(form=form("a", "d")) == Wait("d is not here", lacks="d")
    assert decided(statuses=here("a", "c", b=LOST["dead"])) == Wait("mini is not here", lacks="b")


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
    action = decided(**runs("a", "b", open_requests=3), statuses=here("a", "c", b=LOST[said]), unrest=UNREST)
    assert isinstance(action, StopEpoch)
    assert action.lost
    assert action.reason.startswith("epoch 4 lost mini (rank 1): ")
    assert said in action.reason


def test_a_participant_that_is_merely_silent_is_not_gone() -> None:
    silent = here("a", "c", b=MemberStatus(MemberState.SUSPECT, "b-1", True))
    assert decided(**runs("a", "b"), statuses=silent) == NoAction()


def test_an_unknown_participant_is_gone() -> None:
    action = decided(**runs("a", "zeta-node-id"), statuses=here("a"))
    assert isinstance(action, StopEpoch)
    assert "lost zeta-nod (rank 1)" in action.reason


# --- what is wanted changes -------------------------------------------------------------------------------


@pytest.mark.parametrize("assignee", ["a", "b", ""])
def test_an_unloaded_model_ends_its_epoch(assignee: str) -> None:
    own = runs("a", "b", open_requests=1)
    assert decided(**own, model="", form=None, assignee=assignee) == StopEpoch("llama was unloaded")


def test_another_model_takes_its_place_once_requests_are_done_and_not_for_ever() -> None:
    other: dict[str, Any] = {"model": "qwen", "form": form("a", "b", model="qwen")}
    over, busy = StopEpoch("qwen is wanted now"), runs("a", "b", open_requests=2)
    waiting = Wait("open requests: 2", NOW + 10.0, for_requests=True)
    assert decided(**runs("a", "b"), **other) == over
    assert decided(**busy, **other) == waiting
    assert decided(**busy, waiting_since=NOW - 1, **other) == replace(waiting, until=NOW + 9)
    assert decided(**busy, waiting_since=NOW - 10, **other) == over
    assert decided(**busy, model="qwen", form=None, refusal="it comes") == NoAction()


# --- another place ----------------------------------------------------------------------------------------


def test_a_running_epoch_is_left_alone() -> None:
    assert decided(**runs("a", "b")) == NoAction()
    assert decided(**runs("a", "b"), form=None, refusal="too slow") == NoAction()
    assert decided(**runs("a", "b", ready=False)) == NoAction()


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (form("a"), "studio"),
        (form("a", "c"), "studio + book"),
        (form("a", "b", kind="jaccl"), "studio + mini"),
        (form("a", "b", split=(3, 1)), "studio + mini"),
    ],
)
def test_an_epoch_that_is_assigned_otherwise_forms_anew_once_requests_are_done(
    other: GroupForm, where: str
) -> None:
    over, busy = StopEpoch(f"it forms again on {where}"), runs("a", "b", open_requests=2)
    assert decided(**runs("a", "b"), form=other) == over
    assert decided(**runs("a", "b", ready=False), form=other) == over
    assert decided(**busy, form=other) == Wait("open requests: 2", NOW + 10.0, for_requests=True)
    assert decided(**busy, form=other, waiting_since=NOW - 10) == over


def test_an_epoch_ends_for_another_place_only_if_that_can_be_formed_now() -> None:
    new: dict[str, Any] = {**runs("a"), "form": form("a", "b")}
    assert decided(**new, unrest=UNREST) == UNREST
    silent = here("a", "c", b=MemberStatus(MemberState.SUSPECT, "b-1", True))
    assert decided(**new, statuses=silent) == Wait("mini is silent")


# --- assigned to another owner, or to other Macs ----------------------------------------------------------

OTHERS: dict[str, Any] = {"others": {"b": 0}}


def test_a_former_owner_goes_on_until_its_requests_are_done_and_not_for_ever() -> None:
    busy = runs("a", "c", open_requests=2)
    waiting = Wait("open requests: 2", NOW + 10, for_requests=True)
    over = StopEpoch("mini has the group now")
    serves = {**OTHERS, **ELSEWHERE}
    assert decided(**busy, **serves) == waiting
    assert decided(**busy, waiting_since=NOW - 10, **serves) == over
    assert decided(**runs("a", "c"), **serves) == over


def test_a_former_owner_goes_on_until_the_next_one_serves_and_not_for_ever() -> None:
    mine, over = runs("a", "c"), StopEpoch("mini has the group now")
    forming = {"others": {"c": 0}, **ELSEWHERE}
    waiting = Wait("mini has yet to serve the group", NOW + 10, for_requests=True)
    assert decided(**mine, **forming) == waiting
    assert decided(**mine, **ELSEWHERE) == waiting
    assert decided(**mine, waiting_since=NOW - 10, **forming) == over
    assert decided(**mine | {"ready": False}, **forming) == over
    assert decided(**mine, **forming | {"statuses": here("a", "c") | {"b": LOST["dead"]}}) == over


def test_a_group_that_has_no_place_any_longer_ends_with_the_reason() -> None:
    action = decided(**runs("a"), assignee="", form=None, refusal="1 replica is wanted")
    assert action == StopEpoch("1 replica is wanted")


def test_a_new_owner_waits_for_the_requests_of_the_epoch_before() -> None:
    busy = {"b": 1}
    assert decided(others=busy) == Wait("open requests: 1", NOW + 10, for_requests=True)
    assert isinstance(decided(others=busy, waiting_since=NOW - 10), FormEpoch)
    assert isinstance(decided(**OTHERS), FormEpoch)
    assert isinstance(decided(others=busy, statuses=here("a", "b", "c") | {"b": LOST["dead"]}), Wait)
    gone: dict[str, Any] = {"form": form("a", "c"), "statuses": here("a", "c") | {"b": LOST["dead"]}}
    assert isinstance(decided(others=busy, **gone), FormEpoch)


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


# --- those that are about to stop -------------------------------------------------------------------------

B_STOPS: dict[str, Any] = {"draining": frozenset("b")}
A_STOPS: dict[str, Any] = {"draining": frozenset("a")}


def test_a_group_ends_at_once_when_another_can_do_without_the_stopping_agent() -> None:
    """Requests outlive groups, so nothing is waited for: neither they, nor the load, nor calm."""
    busy = runs("a", "b", open_requests=3)
    stop = StopEpoch("mini is about to stop, and another group goes on")
    for changes in ({}, {"unrest": UNREST}):
        assert decided(**busy, form=form("a", "c"), **B_STOPS, **changes) == stop
    assert decided(**runs("a", "b", ready=False), form=form("a"), **B_STOPS) == stop
    assert decided(**busy, form=form("b", "c"), **A_STOPS) == StopEpoch(
        "studio is about to stop, and another group goes on"
    )


def test_a_group_that_needs_the_stopping_agent_goes_on() -> None:
    for who in (A_STOPS, B_STOPS):
        assert decided(**runs("a", "b", open_requests=3), **who) == NoAction()


def test_who_takes_no_part_stops_without_an_effect() -> None:
    assert decided(**runs("a", "b"), form=form("a", "b"), draining=frozenset("c")) == NoAction()


def test_an_owner_that_stops_ends_its_epoch_once_the_group_is_assigned_elsewhere() -> None:
    busy = runs("a", "b", open_requests=3)
    stop = StopEpoch("studio is about to stop, and another group goes on")
    assert decided(**busy, **A_STOPS, **ELSEWHERE) == stop


def test_a_group_takes_nothing_new_when_a_member_of_it_stops() -> None:
    stops = {"draining": frozenset("bc")}
    assert drained_by(replace(VIEW, **runs("a", "b"), **stops)) == ("b",)
    assert drained_by(replace(VIEW, **runs("a"), **stops)) == ()
    assert drained_by(replace(VIEW, **stops)) == ()
