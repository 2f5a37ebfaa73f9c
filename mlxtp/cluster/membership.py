"""Presence of the known members, without I/O or clock. `TRANSITIONS` has every legal change.

A boot id names one start of an agent, an incarnation. After a partition, it returns with a new link. A new
boot id is a restart, and retires the previous incarnation for good once that has no link. If two incarnations
beat at once, or a retired one keeps calling, two machines share one identity: a home folder was copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ..errors import UserError
from ..wire.cluster_messages import MAX_MEMBERS
from .cluster_state import FULL

# --- states of members, and every legal change between them ----------------------------------------------


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits, in seconds."""

    beat_s: float = 0.5
    suspect_s: float = 1.5  #: of silence until a member is a suspect
    dead_s: float = 3.0  #: of silence until it is dead
    broken_s: float = 1.5  #: for a broken link to return
    lag_s: float = 0.5  #: of delay of this node's own tick until it is unwell


class MemberState(StrEnum):
    AWAY = "away"
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"
    REMOVED = "removed"


class ChangeCause(StrEnum):
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


#: (state, cause) -> next state. Other pairs do not happen.
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
    """Change of a member's state. `boot_id` is its incarnation, or empty."""

    node_id: str
    before: MemberState
    after: MemberState
    why: ChangeCause
    boot_id: str


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Two machines with one identity: their boot ids and addresses, the earlier first."""

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
        """True if other nodes can rely on this member: it is alive, or a suspect whose link is up."""
        return self.state is MemberState.ALIVE or (self.state is MemberState.SUSPECT and self.linked)


# --- the members -----------------------------------------------------------------------------------------

_RETIRED = 16  #: Retired boot ids kept for each member. Older incarnations have no link left.
_LINKS = 4  #: Links of one member at once: more than one while both ends dial, or after a restart.
_PROOF_BEATS = 2  #: Beats of each of two incarnations that prove that both live.
_PROOF_LINKS = 3  #: New links of a retired incarnation that prove that it lives: two may have been under way.


@dataclass(slots=True)
class _Link:
    boot_id: str
    address: str
    last_heard: float
    beats: int = 0  #: Beats since the youngest link of the same member came up.


@dataclass(slots=True)
class _Member:
    node_id: str
    state: MemberState = MemberState.AWAY
    boot_id: str = ""
    last_heard: float = 0.0
    broken: float | None = None  #: When a suspect's incarnation lost its last link.
    links: dict[int, _Link] = field(default_factory=dict)
    retired: dict[str, int] = field(default_factory=dict)  #: Boot ids, oldest first: new links since.

    def linked(self, boot_id: str) -> bool:
        return any(link.boot_id == boot_id for link in self.links.values())

    def excuse(self, late_s: float, now: float) -> None:
        """Excuse the time that this node stood still: it may not have read messages of that time yet."""
        self.last_heard = min(self.last_heard + late_s, now)
        if self.broken is not None:
            self.broken = min(self.broken + late_s, now)
        for link in self.links.values():
            link.last_heard = min(link.last_heard + late_s, now)

    def retire(self, boot_id: str) -> None:
        self.retired.setdefault(boot_id, 0)
        if len(self.retired) > _RETIRED:
            del self.retired[next(iter(self.retired))]


class LocalHealth:
    """Health of this node's own loop: while it lags, or just did, its judgment of others is doubtful."""

    def __init__(self, pace: Timeouts, now: float) -> None:
        self.stood_still_s = 0.0  #: Seconds that the loop stood still before the last tick.
        self._pace = pace
        self._last_tick = now
        self._unwell_until = now

    @property
    def healthy(self) -> bool:
        return self._last_tick >= self._unwell_until

    @property
    def patience(self) -> float:
        return 1.0 if self.healthy else 2.0

    def tick(self, now: float) -> float:
        """Return the seconds that the loop stood still; 0 if the tick is in time."""
        late_s = now - self._last_tick - self._pace.beat_s
        self._last_tick = now
        self.stood_still_s = late_s if late_s > self._pace.lag_s else 0.0
        if self.stood_still_s:
            self._unwell_until = now + 2 * self._pace.dead_s
        return self.stood_still_s


class Membership:
    """The members as node `self_id` sees them, since its start `boot_id` at `now`.

    The caller never reuses a link's number. It calls `tick` at every beat, and after any input that must take
    effect at once, and then closes every link whose `counts` is False.
    """

    def __init__(
        self, self_id: str, boot_id: str, known: Iterable[str], now: float, pace: Timeouts | None = None
    ) -> None:
        self.self_id = self_id
        self.boot_id = boot_id
        self.pace = pace or Timeouts()
        self.health = LocalHealth(self.pace, now)
        self._members: dict[str, _Member] = {}
        self._of_link: dict[int, _Member] = {}
        self._events: list[Change | Duplicate] = []
        self._reported_duplicates = False
        for node_id in known:
            self.admitted(node_id)

    # --- queries

    def status_of(self, node_id: str) -> MemberStatus:
        if node_id == self.self_id:
            return MemberStatus(MemberState.ALIVE, self.boot_id, True)
        member = self._members.get(node_id)
        if member is None:
            return MemberStatus(MemberState.AWAY, "", False)
        return MemberStatus(member.state, member.boot_id, member.linked(member.boot_id))

    def statuses(self) -> dict[str, MemberStatus]:
        return {node_id: self.status_of(node_id) for node_id in (self.self_id, *self._members)}

    def counts(self, link: int) -> bool:
        return link in self._of_link

    # --- events

    def admitted(self, node_id: str) -> None:
        """Add a new or removed member. Raises UserError if there is no room."""
        if node_id == self.self_id:
            return
        member = self._members.get(node_id)
        if member is not None:
            if member.state is MemberState.REMOVED:
                self._move(member, ChangeCause.ADMITTED)
            return
        removed = [known for known, other in self._members.items() if other.state is MemberState.REMOVED]
        if len(self._members) - len(removed) >= MAX_MEMBERS - 1:
            raise UserError(FULL)
        if len(self._members) >= MAX_MEMBERS - 1:
            del self._members[removed[0]]
        self._members[node_id] = _Member(node_id)

    def removed(self, node_id: str) -> None:
        member = self._members.get(node_id)
        if member is not None and member.state is not MemberState.REMOVED:
            self._drop(member, member.links)
            self._move(member, ChangeCause.REMOVED)

    def link_up(self, link: int, node_id: str, boot_id: str, address: str, now: float) -> bool:
        """Add a link. Return False to close it: of a stranger, a retired incarnation, or this node."""
        if link in self._of_link:
            raise ValueError(f"link {link} is up already")
        if node_id == self.self_id:
            if boot_id != self.boot_id and not self._reported_duplicates:
                self._reported_duplicates = True
                self._events.append(Duplicate(node_id, (self.boot_id, boot_id), ("", address)))
            return False
        member = self._members.get(node_id)
        if member is None or member.state is MemberState.REMOVED or len(member.links) >= _LINKS:
            return False
        if boot_id in member.retired:
            self._refuse(member, boot_id, address)
            return False
        for other in member.links.values():
            other.beats = 0
        member.links[link] = _Link(boot_id, address, now)
        self._of_link[link] = member
        self._here(member, boot_id, now)
        return True

    def beat(self, link: int, now: float) -> None:
        self.heard(link, now)
        if (member := self._of_link.get(link)) is not None:
            member.links[link].beats += 1

    def heard(self, link: int, now: float) -> None:
        """Note a message over this link: beats may wait behind slow messages."""
        if (member := self._of_link.get(link)) is None:
            return
        one = member.links[link]
        one.last_heard = now
        if one.boot_id == member.boot_id:
            member.last_heard = now
            if member.state is MemberState.SUSPECT:
                self._move(member, ChangeCause.HEARD)

    def link_down(self, link: int, now: float) -> None:
        if (member := self._of_link.get(link)) is None:
            return
        boot_id = member.links[link].boot_id
        self._drop(member, [link])
        if member.linked(boot_id):
            return
        if boot_id != member.boot_id:
            member.retire(boot_id)
        elif not self._fall_back(member, now):
            member.broken = now
            if member.state is MemberState.ALIVE:
                self._move(member, ChangeCause.BROKEN)

    def goodbye(self, link: int, now: float) -> None:
        if (member := self._of_link.get(link)) is None:
            return
        boot_id = member.links[link].boot_id
        self._end(member, boot_id)
        if boot_id == member.boot_id and not self._fall_back(member, now):
            self._move(member, ChangeCause.GOODBYE)

    def tick(self, now: float) -> tuple[Change | Duplicate, ...]:
        """Judge silence. Return the changes since the last tick, in order."""
        late_s = self.health.tick(now)
        for member in self._members.values():
            if late_s:
                member.excuse(late_s, now)
            self._judge(member, now)
        events, self._events = tuple(self._events), []
        return events

    # --- judgment

    def _judge(self, member: _Member, now: float) -> None:
        pace, patience = self.pace, self.health.patience
        beating = {one.boot_id: one for one in member.links.values() if one.beats >= _PROOF_BEATS}
        if len(beating) > 1:
            self._report_duplicates(member, *list(beating.values())[:2])
            return
        for link, one in list(member.links.items()):
            if now - one.last_heard >= pace.dead_s * patience:
                self.link_down(link, now)
        silent_s = now - member.last_heard
        if member.state is MemberState.ALIVE and silent_s >= pace.suspect_s * patience:
            self._move(member, ChangeCause.SILENT)
        if member.state is not MemberState.SUSPECT:
            return
        broken_s = 0.0 if member.broken is None else now - member.broken
        if silent_s >= pace.dead_s * patience or broken_s >= pace.broken_s * patience:
            self._move(member, ChangeCause.GIVEN_UP)

    def _fall_back(self, member: _Member, now: float) -> bool:
        """Switch to another linked incarnation: the successor's link may be up before this one's ends."""
        if not member.links:
            return False
        member.retire(member.boot_id)
        self._here(member, next(reversed(member.links.values())).boot_id, now)
        return True

    def _refuse(self, member: _Member, boot_id: str, address: str) -> None:
        member.retired[boot_id] += 1
        current = next((one for one in member.links.values() if one.boot_id == member.boot_id), None)
        if member.retired[boot_id] >= _PROOF_LINKS and current is not None:
            member.retired[boot_id] = 0
            self._report_duplicates(member, current, _Link(boot_id, address, 0.0))

    def _report_duplicates(self, member: _Member, one: _Link, other: _Link) -> None:
        self._events.append(
            Duplicate(member.node_id, (one.boot_id, other.boot_id), (one.address, other.address))
        )
        for boot_id in {link.boot_id for link in member.links.values()}:
            self._end(member, boot_id)
        self._move(member, ChangeCause.TWINS)

    def _here(self, member: _Member, boot_id: str, now: float) -> None:
        before = member.boot_id
        if before and before != boot_id:
            if member.state in (MemberState.ALIVE, MemberState.SUSPECT):
                self._move(member, ChangeCause.ENDED)
            if not member.linked(before):
                member.retire(before)
        member.boot_id, member.last_heard, member.broken = boot_id, now, None
        if member.state is MemberState.ALIVE:
            return
        if before and member.state in (MemberState.DEAD, MemberState.LEFT):
            self._move(member, ChangeCause.RETURNED if before == boot_id else ChangeCause.RESTARTED)
        else:
            self._move(member, ChangeCause.LINKED)

    def _end(self, member: _Member, boot_id: str) -> None:
        member.retire(boot_id)
        self._drop(member, [key for key, link in member.links.items() if link.boot_id == boot_id])

    def _drop(self, member: _Member, links: Iterable[int]) -> None:
        for link in list(links):
            del member.links[link]
            del self._of_link[link]

    def _move(self, member: _Member, why: ChangeCause) -> None:
        before = member.state
        member.state = TRANSITIONS[before, why]
        self._events.append(Change(member.node_id, before, member.state, why, member.boot_id))
