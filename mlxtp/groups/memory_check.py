"""Check of the groups that this agent owns: their ranks keep to the account of each Mac's memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from ..cluster.node import ClusterNode
from ..placement.cost_model import usable_bytes
from .groups import Groups
from .machines import Machines
from .memory_account import RankAccount, findings

log = logging.getLogger(__name__)

CHECK_S = 10.0  #: Seconds between two checks.


class MemoryCheck:
    """Logs each finding once, until it is gone."""

    def __init__(self, node: ClusterNode, machines: Machines, groups: Groups) -> None:
        self._node = node
        self._machines = machines
        self._groups = groups
        self._logged: frozenset[tuple[str, str]] = frozenset()
        node.rounds.every(CHECK_S, self.check, needed=lambda: groups.in_epoch)

    def check(self, _now: float) -> None:
        """Compare the newest heartbeats with the account."""
        members = self._machines.members(held_bytes=self._groups.held_bytes)
        found = findings(self._ranks(), {each.node_id: usable_bytes(each) for each in members})
        for node_id, group in sorted(found.keys() - self._logged):
            about = f"{group} on {self._node.name_of(node_id)}" if group else self._node.name_of(node_id)
            log.warning("memory of %s: %s", about, found[node_id, group])
        self._logged = frozenset(found)

    def _ranks(self) -> Iterator[RankAccount]:
        for name, group in self._groups.by_id.items():
            ranks, kv = group.supervisor.status.ranks, group.supervisor.kv
            if ranks is None or kv.loaded is None:
                continue
            # What was found at load is no part of the account: it is bounded once others share the Mac.
            budget = kv.loaded.kv_bytes if kv.limit_bytes else 0
            for rank, node_id in enumerate(ranks.group.nodes):
                if (pong := ranks.watch.pongs.get(rank)) is not None:
                    held = pong.memory_bytes, pong.kv_bytes
                    yield RankAccount(name, node_id, pong.weight_bytes, budget, *held)
