"""One node's part in the choice of a coordinator, without I/O or clock.

Each beat of the coordinator increments a pulse, and all nodes pass on the highest: a cut link does not unseat
it. When it is lost, the present node with the smallest id claims the next term. The stronger of two claims
wins everywhere (`cluster_state.stronger`), so a healed partition has one coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..wire.cluster_messages import Beat
from .cluster_state import NO_CLAIM, ClusterState, LeaderClaim, Replica, check_leaps, stronger
from .membership import Change, ChangeCause, Duplicate, Membership, MemberState, MemberStatus
from .reconcile import GroupView, Situation, Wait


@dataclass(frozen=True, slots=True)
class Debounce:
    """Seconds to wait before acting on a change."""

    settle_s: float = 0.3  #: after the last change of membership, before groups are assigned or formed
    settle_most_s: float = 2.0  #: after the first change, if changes continue
    start_s: float = 2.0  #: after the start, before a node that misses members claims to coordinate
    patience_s: float = 10.0  #: for open requests, before another group takes over
    flapping_s: float = 10.0  #: after a member was lost, before running groups may move to it


@dataclass(slots=True)
class _Following:
    """State of the followed claim."""

    heartbeat_seq: int = 0  #: the highest pulse
    at: float = 0.0  #: when the pulse last rose
    spoke: float = -math.inf  #: when the claimant's last beat arrived
    boot_id: str = ""  #: of the claimant, after its first beat
    over: bool = False  #: this start of it ended


@dataclass(slots=True)
class _Flapping:
    """First and last of the present changes of membership, and recently lost members."""

    calm: Debounce
    first: float
    last: float
    flapping: dict[str, float] = field(default_factory=dict)

    def changed(self, now: float) -> None:
        if now - self.last >= self.calm.settle_s:
            self.first = now
        self.last = now

    @property
    def settled_at(self) -> float:
        return min(self.last + self.calm.settle_s, self.first + self.calm.settle_most_s)


class Leadership:
    """This node's view of the coordinator, and its decisions, since its start at `now`. `term` is its saved
    claim's. A node that is no `founder` knows that others exist.
    """

    def __init__(
        self, replica: Replica, term: int, now: float, calm: Debounce | None = None, *, founder: bool = True
    ) -> None:
        self.self_id = replica.self_id
        self._replica = replica
        self._founder = founder
        self.debounce = calm or Debounce()
        self.claim = NO_CLAIM
        self._floor = term
        self._following = _Following(at=now)
        self._started = now
        self._synced: dict[str, str] = {}
        self._leaving: set[str] = set()  #: Nodes that are about to stop; perhaps this node.
        self._flapping = _Flapping(self.debounce, now, now)

    # --- what this node knows

    @property
    def leading(self) -> bool:
        """True while this node coordinates. A claim from before its start does not count."""
        return self.claim.node_id == self.self_id and self.claim.term > self._floor

    @property
    def draining(self) -> frozenset[str]:
        return frozenset(self._leaving)

    def persistent_state(self) -> ClusterState:
        claim = self.claim if self.claim.term >= self._floor else LeaderClaim(self._floor)
        replica = self._replica
        return ClusterState(claim, replica.deployments, replica.roster, replica.epoch)

    def beat(self, *, healthy: bool) -> Beat:
        """Return the next beat, for all links. New links and a new claim also need one at once."""
        if self.leading:
            self._following.heartbeat_seq += 1
        return Beat(
            self.claim.term,
            self.claim.node_id,
            self._replica.deployments.digest,
            self._replica.digest,
            self._replica.epoch,
            healthy,
            self._following.heartbeat_seq,
            self.self_id in self._leaving,
        )

    # --- messages of other members

    def received_beat(self, sender: str, boot_id: str, beat: Beat, now: float) -> bool:
        """Take in a member's beat, over a link that counts. Return True if this changes the claim."""
        check_leaps(
            (beat.term, max(self.claim.term, self._floor)), (beat.pulse, self._following.heartbeat_seq)
        )
        self._replica.saw_epoch(beat.epoch)
        self._synced[sender] = boot_id
        if beat.draining:
            self._leaving.add(sender)
        else:
            self._leaving.discard(sender)
        claim, following = LeaderClaim(beat.term, beat.coordinator), self._following
        if not claim.node_id or stronger(claim, self.claim) != claim:
            return False
        changed = claim != self.claim
        if changed:
            following = self._follow(claim, now)
        if beat.pulse > following.heartbeat_seq:
            following.heartbeat_seq, following.at = beat.pulse, now
        if sender == claim.node_id:
            following.spoke, following.boot_id = now, boot_id
        return changed

    # --- requests at this node

    def drain(self) -> None:
        self._leaving.add(self.self_id)

    # --- consequences

    def tick(self, membership: Membership, changes: Iterable[Change | Duplicate], now: float) -> bool:
        """Take in the result of a tick of `membership`. Return True if this node now claims to coordinate."""
        for change in changes:
            if isinstance(change, Change):
                self._take_in(change, now)
        late_s, following = membership.health.stood_still_s, self._following
        following.at, following.spoke = min(following.at + late_s, now), min(following.spoke + late_s, now)
        statuses = membership.statuses()
        self._synced = {
            node_id: boot_id
            for node_id, boot_id in self._synced.items()
            if node_id in statuses and statuses[node_id].boot_id == boot_id
        }
        self._leaving &= {self.self_id, *self._synced}
        lost = self._is_lost(membership, now) and not self._unsynced(statuses)
        if not lost or not self._has_waited(statuses, now):
            return False
        present = {node_id for node_id, status in statuses.items() if status.present}
        if min(present - self._leaving or present) != self.self_id:
            return False
        self._follow(self._next_claim(self.self_id), now)
        return True

    def view(self, membership: Membership, situation: Situation, now: float) -> GroupView:
        statuses = membership.statuses()
        return GroupView(
            now=now,
            self_id=self.self_id,
            statuses=statuses,
            epoch=self._replica.epoch,
            unrest=self.unrest(statuses, now),
            patience_s=self.debounce.patience_s,
            names=self._replica.names,
            draining=self.draining,
            **{name: getattr(situation, name) for name in Situation.__match_args__},
        )

    def unrest(self, statuses: Mapping[str, MemberStatus], now: float) -> Wait | None:
        """Return the wait before groups may be assigned or formed, or None."""
        if unsynced := self._unsynced(statuses):
            name = self._replica.names.get(unsynced[0]) or unsynced[0][:8]
            return Wait(f"{name} has not yet reported its state")
        settled_at = self._flapping.settled_at
        return Wait("members come and go", settled_at) if now < settled_at else None

    @property
    def flapping(self) -> Mapping[str, float]:
        """Return recently lost members, and the time until which each counts as unreliable."""
        return self._flapping.flapping

    # --- details

    def _next_claim(self, node_id: str) -> LeaderClaim:
        return LeaderClaim(max(self._floor, self.claim.term) + 1, node_id)

    def _follow(self, claim: LeaderClaim, now: float) -> _Following:
        self.claim, self._following = claim, _Following(at=now)
        self._flapping.changed(now)
        return self._following

    def _take_in(self, change: Change, now: float) -> None:
        self._flapping.changed(now)
        if change.after in (MemberState.DEAD, MemberState.LEFT, MemberState.REMOVED):
            if self._synced.get(change.node_id) == change.boot_id:
                del self._synced[change.node_id]
            if change.node_id == self.claim.node_id and change.boot_id == self._following.boot_id:
                self._following.over |= change.why is not ChangeCause.GIVEN_UP
        if change.after is MemberState.DEAD or change.why is ChangeCause.BROKEN:
            self._flapping.flapping[change.node_id] = now + self.debounce.flapping_s
        if change.after is MemberState.REMOVED:
            self._flapping.flapping.pop(change.node_id, None)

    def _is_lost(self, membership: Membership, now: float) -> bool:
        claim, following, pace = self.claim, self._following, membership.pace
        if self.leading:
            return False
        if claim.node_id in ("", self.self_id) or following.over:
            return True
        state = membership.status_of(claim.node_id).state
        if state in (MemberState.LEFT, MemberState.REMOVED):
            return True
        # A present coordinator without pulses does not know of its claim. Relayed pulses are irregular.
        passed_on = following.at - following.spoke > 2 * pace.beat_s
        limit_s = pace.broken_s if state is MemberState.DEAD and not passed_on else pace.dead_s
        return now - following.at >= limit_s * membership.health.patience

    def _unsynced(self, statuses: Mapping[str, MemberStatus]) -> list[str]:
        return [
            node_id
            for node_id, status in statuses.items()
            if status.present and node_id != self.self_id and node_id not in self._synced
        ]

    def _has_waited(self, statuses: Mapping[str, MemberStatus], now: float) -> bool:
        missing = any(status.state is MemberState.AWAY for status in statuses.values())
        missing |= not self._founder and len(statuses) == 1  # the member that admitted this node is missing
        return not missing or now - self._started >= self.debounce.start_s
