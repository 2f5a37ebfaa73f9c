"""Account of each Mac's memory over the ranks of all groups: their budgets and their reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MIB = 1024**2
#: Bytes that a rank may have beside weights and KV caches, for forwards and buffers: the larger of the two.
WORK_BYTES, WORK_SHARE = 1024 * MIB, 8  # bytes; one part in so many of its weights


@dataclass(frozen=True, slots=True)
class RankAccount:
    """Memory of one rank of `group`, in bytes: its weights and budget of KV caches, and what it reports.

    `memory_bytes` and `kv_bytes` are those of its newest heartbeat, `kv_budget` the bound in force (0: none).
    """

    group: str
    node_id: str
    weight_bytes: int
    kv_budget: int
    memory_bytes: int
    kv_bytes: int

    @property
    def promised(self) -> int:
        """Bytes that it may come to have, forwards aside."""
        return self.weight_bytes + self.kv_budget


def findings(ranks: Iterable[RankAccount], room: Mapping[str, int]) -> dict[tuple[str, str], str]:
    """Return in words what does not fit the account, by node id and group; the group is "" for a whole Mac.

    `room`: bytes that ranks of all groups may have together, by node id. Macs that it does not name are not
    judged as a whole.
    """
    found: dict[tuple[str, str], str] = {}
    promised: dict[str, int] = {}
    for rank in ranks:
        promised[rank.node_id] = promised.get(rank.node_id, 0) + rank.promised
        work = max(WORK_BYTES, rank.weight_bytes // WORK_SHARE)
        if rank.kv_budget and rank.kv_bytes > rank.kv_budget:
            found[rank.node_id, rank.group] = (
                f"its KV caches have {_mib(rank.kv_bytes)}, and may have {_mib(rank.kv_budget)}"
            )
        elif rank.kv_budget and rank.memory_bytes > rank.promised + work:
            found[rank.node_id, rank.group] = (
                f"it has {_mib(rank.memory_bytes)}, and weights, KV caches and forwards may have "
                f"{_mib(rank.promised + work)}"
            )
    for node_id, total in promised.items():
        if total > room.get(node_id, total):
            found[node_id, ""] = (
                f"its groups may have {_mib(total)} together, and this Mac has {_mib(room[node_id])} for them"
            )
    return found


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
