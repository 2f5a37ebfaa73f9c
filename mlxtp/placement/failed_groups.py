"""Memory of groups that failed to form, so that the next best plan takes their place. Pure.

A cable in the wrong port, a device without an address or queue pairs that are used up fail again at each try.
The group is left out of planning for a while, or until its Macs change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from ..errors import Code
from .jaccl_preflight import NO_ADDRESS, explain
from .topology import MemberMachine

RETRY_S = 600.0  #: Until a group that failed to form may be tried again.
SOON_S = 60.0  #: The same after the loss of a process or link, which may not happen again.
ADDRESS_RETRY_S = 20.0  #: The same while an RDMA port may still get its address.
ADDRESSES_COME_S = 180.0  #: After the first failure; macOS assigns addresses minutes after a boot.

DOUBLINGS = 6  #: Of these times, while the group fails again.

_LOSSES = frozenset((Code.RANK_LOST, Code.LINK_LOST, Code.NOT_READY))

#: Two node ids in order, and the RDMA device of each; no devices over TCP.
FailedLink = tuple[str, str, str, str]
Links = frozenset[FailedLink]


def links_of(ranks: Sequence[str], rdma: Sequence[Sequence[str | None]]) -> Links:
    """Return what joins `ranks`: the cables of the matrix `rdma`, or all pairs without one."""
    found = set()
    for i, j in combinations(range(len(ranks)), 2):
        ends = sorted([(ranks[i], rdma[i][j] if rdma else ""), (ranks[j], rdma[j][i] if rdma else "")])
        (a, at_a), (b, at_b) = ends[0], ends[1]
        if not rdma or at_a or at_b:
            found.add((a, b, at_a or "", at_b or ""))
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """A group that must not be planned. `kind` is a key of `cost_model.FABRICS`."""

    kind: str
    links: Links
    reason: str

    @property
    def nodes(self) -> list[str]:
        """Its node ids, sorted."""
        return sorted({node for link in self.links for node in link[:2]})

    def is_in(self, kind: str, links: Links) -> bool:
        """Return whether a group of `kind` with `links` contains this one."""
        return kind == self.kind and self.links <= links


@dataclass(slots=True)
class _Failure:
    """`circumstances` of its Macs, when it failed first, and when it may be tried again."""

    group: FailedGroup
    circumstances: object
    first_at: float
    until: float = 0.0
    strikes: int = 0


@dataclass(slots=True)
class FailedGroups:
    """The groups that failed, by kind and links. Times are of the caller's clock, in seconds."""

    _failures: dict[tuple[str, Links], _Failure] = field(default_factory=dict)

    def failed(
        self,
        group: FailedGroup,
        code: Code,
        members: Mapping[str, MemberMachine],
        now: float,
        *,
        strikes: int = 1,
    ) -> bool:
        """Note a failure. Return whether the group is left out from now on: at the `strikes`-th in a row."""
        key, circumstances = (group.kind, group.links), _circumstances(group.links, members)
        known = self._failures.get(key)
        if known is None or known.circumstances != circumstances:
            known = self._failures[key] = _Failure(group, circumstances, now)
        known.group = group
        trouble = explain(group.reason)
        if trouble and trouble.errno == NO_ADDRESS and now < known.first_at + ADDRESSES_COME_S:
            known.until = now + ADDRESS_RETRY_S
            return True
        known.strikes += 1
        if known.strikes < strikes:
            return False
        retry_s = SOON_S if code in _LOSSES else RETRY_S
        known.until = now + retry_s * 2 ** min(known.strikes - strikes, DOUBLINGS)
        return True

    def formed(self, kind: str, links: Links) -> None:
        """Forget a failure: the group has formed."""
        self._failures.pop((kind, links), None)

    forget = formed

    def left_out(
        self, members: Mapping[str, MemberMachine], now: float
    ) -> tuple[tuple[FailedGroup, float], ...]:
        """Return the groups not to be planned, and the seconds until each may be.

        A group whose Macs changed since is forgotten: other cables, ports, addresses, versions, or a restart.
        """
        for key, failure in list(self._failures.items()):
            if failure.circumstances != _circumstances(failure.group.links, members):
                del self._failures[key]
        return tuple(
            (failure.group, failure.until - now) for failure in self._failures.values() if now < failure.until
        )


def _circumstances(links: Links, members: Mapping[str, MemberMachine]) -> object:
    """Return what may make a group of these links form where it failed before."""
    nodes = FailedGroup("", links, "").nodes
    return tuple(_of_mac(members[node]) if node in members else None for node in nodes)


def _of_mac(member: MemberMachine) -> tuple[object, ...]:
    machine = member.machine
    addresses = frozenset((each.name, each.address, each.up) for each in machine.interfaces)
    system = (machine.release, machine.build, machine.rdma, machine.bridge_up)
    return (member.boot_id, system, addresses, machine.ports)
