"""Failed groups: what may be to blame, and how long plans leave out each."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from ..errors import NOBODY_BEHIND, Code
from ..wire.cluster_messages import Machine
from ..wire.rdma import devices
from .faults import explain, is_scarce
from .topology import MemberMachine


def blames_fabric(code: Code, message: str) -> bool:
    """Return whether the fabric may be why a group over JACCL failed while it served. A stall is a sign only
    if one rank is behind; otherwise, kernels may be slow on all.
    """
    if code is Code.RANK_STALLED:
        return NOBODY_BEHIND not in message
    crashed = re.search(r"ended by signal (6|10|11)\b", message)
    return code is Code.PROOF_FAILED or "[jaccl] " in message or crashed is not None


def may_pass(code: Code, message: str) -> bool:
    """Return whether a failure to form, such as a lost link, reveals little about a fabric."""
    return code in _LOSSES or (code is Code.RANK_STALLED and NOBODY_BEHIND in message)


# --- memory of failed groups: plans leave each out for a while, or until its Macs change -----------------

RETRY_S = 600.0  #: Seconds until the next try of a group that failed to form.
NO_ADDRESS, USED_UP = "jaccl-address", "jaccl-used-up"  #: Faults; either may mean a used-up device.
USED_UP_RETRY_S = 86_400.0  #: The same if a device seems used up until its Mac restarts; an assumption.
SOON_S = 60.0  #: The same after the loss of a process or link, which may be an accident.
ADDRESS_RETRY_S = 20.0  #: The same while an RDMA port may still get its address.
ADDRESSES_COME_S = 180.0  #: Since the first failure: macOS assigns addresses minutes after a boot.

DOUBLINGS = 6  #: Most doublings of these times, as failures repeat.
DEATHS = 2  #: Failures in a row while serving that leave out a group.
ROW_S = 120.0  #: Least seconds of service that end such a row, as in RestartPolicy.

_LOSSES = frozenset((Code.RANK_LOST, Code.LINK_LOST, Code.NOT_READY))

#: Two node ids in order, and the RDMA device of each; no devices over TCP.
FailedLink = tuple[str, str, str, str]
Links = frozenset[FailedLink]


def links_of(ranks: Sequence[str], rdma: Sequence[Sequence[str | None]]) -> Links:
    """Return the links of `ranks`: the cables of the matrix `rdma`; without one, all pairs."""
    found = set()
    for (a, i), (b, j) in combinations(sorted((node, rank) for rank, node in enumerate(ranks)), 2):
        at_a, at_b = (rdma[i][j] or "", rdma[j][i] or "") if rdma else ("", "")
        if not rdma or at_a or at_b:
            found.add((a, b, at_a, at_b))
    return frozenset(found)


def runs_short(links: Links, machines: Mapping[str, Machine]) -> bool:
    return any(
        is_scarce(port.formations) and port.rdma in devices(entry)
        for a, b, at_a, at_b in links
        for node, entry in ((a, at_a), (b, at_b))
        for port in (machines[node].ports if node in machines else ())
    )


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """A group that plans leave out. `kind` is a key of `cost_model.FABRICS`, or empty for any."""

    kind: str
    links: Links
    reason: str

    @property
    def nodes(self) -> list[str]:
        return sorted({node for link in self.links for node in link[:2]})

    def is_in(self, kind: str, links: Links) -> bool:
        return kind == self.kind and self.links <= links

    def circumstances(self, members: Mapping[str, MemberMachine]) -> object:
        """Return facts whose change may let it form."""
        return tuple(_state_of(members[node]) if node in members else None for node in self.nodes)


@dataclass(slots=True)
class _Failure:
    """Failures of a group in the same `circumstances`."""

    group: FailedGroup
    circumstances: object
    first_at: float
    until: float = 0.0  #: Time of the next try.
    strikes: int = 0  #: Failures to form.
    deaths: int = 0  #: Failures in a row while it served, the last at `died_at`.
    died_at: float = 0.0
    out_s: float = 0.0  #: Seconds that the last of these left it out.

    def died(self, now: float, served_s: float, strikes: int) -> bool:
        """Note a failure while it served; see `FailedGroups.failed`. Failures are in a row if it served for
        less than `ROW_S`, or than it was left out, and soon after the last.
        """
        if served_s >= max(ROW_S, self.out_s) or now - self.died_at >= RETRY_S + 2 * self.out_s:
            self.deaths, self.out_s = 0, 0.0
        self.deaths, self.died_at = self.deaths + 1, now
        if self.deaths < strikes:
            return False
        self.out_s = RETRY_S * 2 ** min(max(self.deaths - DEATHS, 0), DOUBLINGS)
        self.until = now + self.out_s
        return True


@dataclass(slots=True)
class FailedGroups:
    """Failed groups, by kind and links. Times are of the caller's clock, in seconds."""

    _failures: dict[tuple[str, Links], _Failure] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._failures)

    def failed(
        self,
        group: FailedGroup,
        code: Code,
        members: Mapping[str, MemberMachine],
        now: float,
        *,
        strikes: int = 1,
        served_s: float | None = None,
    ) -> bool:
        """Note a failure after `served_s` of service, or to form. Return whether it leaves out the group: the
        `strikes`-th in a row does, or the first to form over a scarce device.
        """
        key, circumstances = (group.kind, group.links), group.circumstances(members)
        known = self._failures.get(key)
        if known is None or known.circumstances != circumstances:
            known = self._failures[key] = _Failure(group, circumstances, now)
        known.group = group
        if served_s is not None:
            return known.died(now, served_s, strikes)
        fault = explain(group.reason)
        scarce = runs_short(group.links, {node: member.machine for node, member in members.items()})
        soon = fault is not None and fault.id == NO_ADDRESS and not scarce
        if soon and now < known.first_at + ADDRESSES_COME_S:
            known.until = now + ADDRESS_RETRY_S
            return True
        known.strikes += 1
        strikes = 1 if scarce else strikes
        if known.strikes < strikes:
            return False
        retry_s = SOON_S if may_pass(code, group.reason) and not scarce else RETRY_S
        if scarce and fault is not None and fault.id in (NO_ADDRESS, USED_UP):
            retry_s = USED_UP_RETRY_S
        known.until = now + retry_s * 2 ** min(known.strikes - strikes, DOUBLINGS)
        return True

    def formed(self, kind: str, links: Links) -> None:
        """Forget failures to form. Failures while it served count until it serves for long."""
        known = self._failures.pop((kind, links), None)
        if known is not None and known.deaths:
            known.strikes, self._failures[kind, links] = 0, known

    def absolve(self, nodes: Collection[str]) -> list[FailedGroup]:
        """Forget failures of these nodes' serving groups: a request was to blame. Return left-out groups."""
        failures = self._failures.items()
        found = {key: each for key, each in failures if each.deaths and {*each.group.nodes} & {*nodes}}
        self._failures = {key: each for key, each in failures if key not in found}
        return [each.group for each in found.values() if each.out_s]

    def known(
        self, members: Mapping[str, MemberMachine], now: float
    ) -> tuple[tuple[FailedGroup, float], ...]:
        """Return all failed groups, and the seconds until plans may use each, negative if they may. Forget
        groups whose Macs changed: by other cables, ports, addresses, versions, or a restart.
        """
        self._failures = {
            key: failure
            for key, failure in self._failures.items()
            if failure.circumstances == failure.group.circumstances(members)
        }
        return tuple((each.group, each.until - now) for each in self._failures.values() if each.until)

    def left_out(
        self, members: Mapping[str, MemberMachine], now: float
    ) -> tuple[tuple[FailedGroup, float], ...]:
        return tuple(each for each in self.known(members, now) if each[1] > 0)


def _state_of(member: MemberMachine) -> tuple[object, ...]:
    machine = member.machine
    return (
        member.boot_id,
        (machine.release, machine.build, machine.rdma, machine.bridge_up),
        frozenset((each.name, each.address, each.up) for each in machine.interfaces),
        tuple(replace(port, formations=0, service="") for port in machine.ports),
    )
