"""Memory of ranks: the room for a rank's share of a model on a machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .model_shape import ModelShape
from .topology import MemberMachine

#: Bytes that a rank needs beside weights and caches: Python, MLX, the arrays of one chunk.
HEADROOM_BYTES = 512 * 1024**2
HEADROOM_SHARE = 0.07  #: Share of a rank's weights that loading takes on top at its peak.
_SMALL_MAC = 36 * 1024**3


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's memory, in bytes. `available` is what it may have, `total` what its machine has."""

    node_id: str
    name: str
    weights: int
    kv: int
    headroom: int
    available: int
    total: int

    @property
    def needed(self) -> int:
        return self.weights + self.kv + self.headroom

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def rank_memory(
    member: MemberMachine, shape: ModelShape, ranks: int, context: int, *, sharing: int = 1
) -> RankMemory:
    """Return the memory that one of `ranks` ranks needs with KV caches of `context` tokens.

    `sharing` of them share the machine.
    """
    weights = shape.rank_weights(ranks)
    return RankMemory(
        node_id=member.node_id,
        name=member.name,
        weights=weights,
        kv=shape.rank_kv(ranks, context),
        headroom=HEADROOM_BYTES + int(HEADROOM_SHARE * weights),
        available=usable_bytes(member) // sharing,
        total=member.machine.memory_bytes,
    )


def fits_beside(memory: Iterable[RankMemory], held: Mapping[str, int]) -> bool:
    """Return whether ranks have room while those before them still hold `held` bytes, by node id."""
    return all(each.needed + held.get(each.node_id, 0) <= each.available for each in memory)


def usable_bytes(member: MemberMachine) -> int:
    """Return the bytes that ranks may take there: at most what its GPU may wire, and at most what is free.

    Memory that a rank of ours holds counts as free: it ends before the next one begins. If the GPU's limit is
    unknown, it is macOS's default: two thirds of up to 36 GiB, three quarters of more.
    """
    machine = member.machine
    limit = machine.gpu_bytes
    if not limit:
        small = machine.memory_bytes <= _SMALL_MAC
        share = 1.0 if machine.system != "macos" else 2 / 3 if small else 3 / 4
        limit = int(machine.memory_bytes * share)
    free = machine.free_bytes + member.held_bytes if machine.free_bytes else machine.memory_bytes
    return min(limit, free)
