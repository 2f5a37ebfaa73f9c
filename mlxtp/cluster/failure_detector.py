"""States of members, and every legal change between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits, in seconds.

    `suspect_s`, `dead_s`  silence after which a member is a suspect, and dead
    `broken_s`             the time in which a link that broke may come back
    `lag_s`                how late our own tick may come before we count as unwell
    """

    beat_s: float = 0.5
    suspect_s: float = 1.5
    dead_s: float = 3.0
    broken_s: float = 1.5
    lag_s: float = 0.5


class MemberState(StrEnum):
    """State of one member, as this node sees it."""

    AWAY = "away"
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"
    REMOVED = "removed"


class ChangeCause(StrEnum):
    """Cause of a change of a member's state."""

    LINKED = "linked"
    RETURNED = "the same start of its agent is back"
    RESTARTED = "its agent was restarted"
    HEARD = "its beats are back"
    SILENT = "silent"
    BROKEN = "its link broke"
    GIVEN_UP = "did not come back in time"
    ENDED = "that start of its agent is over"
    TWINS = "two machines have its identity"
    GOODBYE = "its agent stopped"
    REMOVED = "removed from the cluster"
    ADMITTED = "admitted to the cluster"


#: (state, cause) -> next state. A pair that is missing here does not happen.
TRANSITIONS: Mapping[tuple[MemberState, ChangeCause], MemberState] = {
    (MemberState.AWAY, ChangeCause.LINKED): MemberState.ALIVE,
    (MemberState.SUSPECT, ChangeCause.LINKED): MemberState.ALIVE,
    (MemberState.SUSPECT, ChangeCause.HEARD): MemberState.ALIVE,
    (MemberState.DEAD, ChangeCause.RETURNED): MemberState.ALIVE,
    (MemberState.DEAD, ChangeCause.RESTARTED): MemberState.ALIVE,
    (MemberState.LEFT, ChangeCause.RESTARTED): MemberState.ALIVE,
    (MemberState.ALIVE, ChangeCause.SILENT): MemberState.SUSPECT,
    (MemberState.ALIVE, ChangeCause.BROKEN): MemberState.SUSPECT,
    (MemberState.SUSPECT, ChangeCause.GIVEN_UP): MemberState.DEAD,
    **{
        (state, why): after
        for state in (MemberState.ALIVE, MemberState.SUSPECT)
        for why, after in (
            (ChangeCause.ENDED, MemberState.DEAD),
            (ChangeCause.TWINS, MemberState.DEAD),
            (ChangeCause.GOODBYE, MemberState.LEFT),
        )
    },
    **{
        (state, ChangeCause.REMOVED): MemberState.REMOVED
        for state in MemberState
        if state is not MemberState.REMOVED
    },
    (MemberState.REMOVED, ChangeCause.ADMITTED): MemberState.AWAY,
}


@dataclass(frozen=True, slots=True)
class Change:
    """Change of a member's state. `boot_id` is the incarnation it is about, empty for none."""

    node_id: str
    before: MemberState
    after: MemberState
    why: ChangeCause
    boot_id: str


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Two machines with one identity: their boot ids and addresses, in the order in which they came."""

    node_id: str
    boot_ids: tuple[str, str]
    addresses: tuple[str, str]


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """Status of a member. `linked`: its incarnation `boot_id` has a link."""

    state: MemberState
    boot_id: str
    linked: bool

    @property
    def present(self) -> bool:
        """True when other nodes can count on this member. They cannot count on a suspect whose link broke."""
        return self.state is MemberState.ALIVE or (self.state is MemberState.SUSPECT and self.linked)
