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
LOST = {
    "dead": MemberStatus(MemberState.DEAD, "b-1", False),
    "left": MemberStatus(MemberState.LEFT, "b-1", False),
    "removed": MemberStatus(MemberState.REMOVED, "b-1", False),
    "away": MemberStatus(MemberState.AWAY, "", False),
    "its link broke": MemberStatus(MemberState.SUSPECT, "b-1", False),
    "its agent was restarted": MemberStatus(MemberState.ALIVE, "b-2", True),
}
SILENT = here("a", "c", b=MemberStatus(MemberState.SUSPECT, "b-1", True))
B_DEAD = here("a", "c", b=LOST["dead"])
IDLE, BUSY = runs("a", "b"), runs("a", "b", open_requests=2)
OTHER_MODEL: dict[str, Any] = {"model": "qwen", "form": form("a", "b", model="qwen")}
ELSEWHERE: dict[str, Any] = {"assignee": "b", "form": None}
B_SERVES: dict[str, Any] = {"others": {"b": 0}, **ELSEWHERE}
C_SERVES: dict[str, Any] = {"others": {"c": 0}, **ELSEWHERE}
A_STOPS: dict[str, Any] = {"draining": frozenset("a")}
B_STOPS: dict[str, Any] = {"draining": frozenset("b")}
LATE: dict[str, Any] = {"waiting_since": NOW - 10}
FORMS = FormEpoch(9, form("a", "b"), ("a-1", "b-1"))
FOR_REQUESTS = Wait("open requests: 2", NOW + 10, for_requests=True)
FOR_ONE = Wait("open requests: 1", NOW + 10, for_requests=True)
FOR_MINI = Wait("mini has yet to serve the group", NOW + 10, for_requests=True)
MINI_HAS_IT = StopEpoch("mini has the group now")
MINI_STOPS = StopEpoch("mini is about to stop, and another group goes on")
STUDIO_STOPS = StopEpoch("studio is about to stop, and another group goes on")
ANEW = StopEpoch("it forms again on studio + book")
HERE_ANEW = StopEpoch("it forms again on studio + mini")
NEXT: dict[str, Any] = {**runs("a", "b", open_requests=2), "form": form("a", "c")}
REPLICA: dict[str, Any] = {"refusal": "1 replica is wanted", "assignee": "", "form": None}
UNLOADED: dict[str, Any] = {"model": "", "form": None}
AT_B_AND_C: dict[str, Any] = {"form": form("b", "c")}

CASES: dict[str, tuple[dict[str, Any], Action]] = {
    "the owner forms what is wanted under the next number": ({}, FORMS),
    "no other agent forms anything": (ELSEWHERE, NoAction()),
    "nor where no agent is to": ({"assignee": "", "form": None}, NoAction()),
    "when nothing is wanted nothing is formed": (UNLOADED, NoAction()),
    "members have to stop coming and going": ({"unrest": UNREST}, UNREST),
    "what cannot be formed waits": ({"form": None, "refusal": "it comes"}, Wait("it comes", math.inf)),
    "no silent member is taken along": ({"statuses": SILENT}, Wait("mini is silent")),
    "a rank that never was here is waited for": ({"form": form("a", "d")}, Wait("d is not here", lacks="d")),
    "a rank that is gone is waited for": ({"statuses": B_DEAD}, Wait("mini is not here", lacks="b")),
    "a participant that is merely silent is not gone": ({**IDLE, "statuses": SILENT}, NoAction()),
    **{
        f"an unloaded model ends its epoch, owned by {who!r}": (
            {**BUSY, **UNLOADED, "assignee": who},
            StopEpoch("llama was unloaded"),
        )
        for who in ("a", "b", "")
    },
    "another model takes its place": ({**IDLE, **OTHER_MODEL}, StopEpoch("qwen is wanted now")),
    "once requests are done": ({**BUSY, **OTHER_MODEL}, FOR_REQUESTS),
    "and not for ever": ({**BUSY, **OTHER_MODEL, **LATE}, StopEpoch("qwen is wanted now")),
    "a running epoch is left alone": (IDLE, NoAction()),
    "it forms anew elsewhere": ({**IDLE, "form": form("a", "c")}, ANEW),
    "over another fabric": ({**IDLE, "form": form("a", "b", kind="jaccl")}, HERE_ANEW),
    "at once where it is not ready": ({**runs("a", "b", ready=False), "form": form("a", "c")}, ANEW),
    "else once requests take too long": ({**NEXT, **LATE}, ANEW),
    "it ends for another place only when that is calm": ({**runs("a"), "unrest": UNREST}, UNREST),
    "and all of it is heard": ({**runs("a"), "statuses": SILENT}, Wait("mini is silent")),
    "a former owner goes on until its requests are done": ({**BUSY, **B_SERVES}, FOR_REQUESTS),
    "without requests it ends": ({**IDLE, **B_SERVES}, MINI_HAS_IT),
    "it goes on until the next one serves": ({**runs("a", "c"), **C_SERVES}, FOR_MINI),
    "and not for ever then": ({**runs("a", "c"), **LATE, **C_SERVES}, MINI_HAS_IT),
    "nor before it is ready": ({**runs("a", "c", ready=False), **C_SERVES}, MINI_HAS_IT),
    "a group without a place ends": ({**runs("a"), **REPLICA}, StopEpoch("1 replica is wanted")),
    "a new owner waits for the requests of the epoch before": ({"others": {"b": 1}}, FOR_ONE),
    "but not for ever": ({"others": {"b": 1}, **LATE}, FORMS),
    "nor without requests": ({"others": {"b": 0}}, FORMS),
    "and not for the requests of a dead one": (
        {"others": {"b": 1}, "form": form("a", "c"), "statuses": B_DEAD},
        FormEpoch(9, form("a", "c"), ("a-1", "c-1")),
    ),
    "for a Mac that stops it ends at once": ({**NEXT, **B_STOPS}, MINI_STOPS),
    "and before it is ready, for a Mac that stops": (
        {**runs("a", "b", ready=False), "form": form("a"), **B_STOPS},
        MINI_STOPS,
    ),
    "also where the owner stops": ({**BUSY, **AT_B_AND_C, **A_STOPS}, STUDIO_STOPS),
    "once the group is assigned elsewhere": ({**BUSY, **ELSEWHERE, **A_STOPS}, STUDIO_STOPS),
    "a group that needs a Mac that stops goes on": ({**BUSY, **B_STOPS}, NoAction()),
    "who takes no part stops without an effect": ({**IDLE, "draining": frozenset("c")}, NoAction()),
}


@pytest.mark.parametrize(("changes", "action"), CASES.values(), ids=CASES)
def test_what_the_owner_does(changes: dict[str, Any], action: Action) -> None:
    assert decided(**changes) == action


@pytest.mark.parametrize("said", LOST)
def test_an_epoch_ends_at_once_when_a_participant_is_gone(said: str) -> None:
    action = decided(**runs("a", "b", open_requests=3), statuses=here("a", "c", b=LOST[said]), unrest=UNREST)
    assert isinstance(action, StopEpoch)
    assert action.lost
    assert action.reason.startswith("epoch 4 lost mini (rank 1): ")
    assert said in action.reason


def test_an_unknown_participant_is_gone() -> None:
    action = decided(**runs("a", "zeta-node-id"), statuses=here("a"))
    assert isinstance(action, StopEpoch)
    assert "lost zeta-nod (rank 1)" in action.reason


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
def test_it_refuses_other_agents_and_what_is_old(sender: str, number: int, assignee: str, said: str) -> None:
    reason = refusal(sender, number, assignee, joined=8)
    assert said in reason


def test_a_group_takes_nothing_new_when_a_member_of_it_stops() -> None:
    stops = {"draining": frozenset("bc")}
    assert drained_by(replace(VIEW, **runs("a", "b"), **stops)) == ("b",)
    assert drained_by(replace(VIEW, **runs("a"), **stops)) == ()
    assert drained_by(replace(VIEW, **stops)) == ()
