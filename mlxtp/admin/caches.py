"""Caches of earlier prompts: their use by this agent's groups, what is on this Mac's disk, and clearing.

`use_of` and `none_kept` are pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ..api.admin import Json
from ..cluster.cluster_state import name_of
from ..errors import UserError
from ..groups.group import Group
from ..models import disk_cache
from ..wire.messages import Pong
from .parts import AgentParts, deployments_of


@dataclass(frozen=True, slots=True)
class GroupCaches:
    """Use of one group's caches in this epoch, by the newest heartbeats of its ranks.

    `reused` prompts began with `reused_tokens` of a cache. Of these, `fetched` and `fetched_tokens` came from
    disk. Bytes are those of all ranks. `disk_bytes` and `disk_room_bytes` are those of the group's Macs, for
    all their models.
    """

    group: str
    kept_bytes: int
    evicted_bytes: int
    spilled_bytes: int
    reused: int
    reused_tokens: int
    fetched: int
    fetched_tokens: int
    disk_bytes: int
    disk_room_bytes: int


def use_of(group: str, pongs: Mapping[int, Pong], nodes: Sequence[str]) -> GroupCaches:
    """Sum up the heartbeats of a group's ranks, of which there is one at least; `nodes` has their Macs."""
    ranks, first = pongs.values(), pongs[min(pongs)]
    # Each rank reports the disk of its Mac, which several ranks may share.
    macs = {(nodes[rank] if len(nodes) > 1 else ""): pong for rank, pong in sorted(pongs.items())}.values()
    return GroupCaches(
        group,
        sum(each.kept_bytes for each in ranks),
        sum(each.evicted_bytes for each in ranks),
        sum(each.spilled_bytes for each in ranks),
        first.reused,
        first.reused_tokens,
        first.fetched,
        first.fetched_tokens,
        sum(each.disk_bytes for each in macs),
        sum(each.disk_room_bytes for each in macs),
    )


def none_kept(model: str, where: str, *, served: bool) -> str:
    """Return why there is nothing to clear; `served`: by a group of another Mac."""
    if served:
        what = f"{model} has no rank 0" if model else "no model has its rank 0"
        return (
            f"{what} on this Mac, so nothing of it is kept here; `mlxtp status` names the owner of each "
            "group: clear it there"
        )
    what = model or "no model"
    if where == "memory":
        return f"{what} is {'not ' if model else ''}served"
    return (
        f"{what} is {'neither' if model else 'either'} served {'nor' if model else 'or'} on this Mac's disk"
    )


def gather(parts: AgentParts) -> tuple[GroupCaches, ...]:
    """Return the use of each group whose rank 0 is here."""
    return tuple(map(_use, _with_ranks(parts)))


class CacheHandlers:
    """Handlers of commands about caches of earlier prompts."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts

    async def kept(self) -> Json:
        """Return what each group whose rank 0 is here keeps, what is on this disk, and the other groups."""
        settings = self._parts.node.settings
        return {
            "groups": [asdict(each) for each in gather(self._parts)],
            "elsewhere": self._elsewhere(""),
            "disk": await asyncio.to_thread(disk_cache.listed, settings.home, settings.cache_disk),
        }

    async def clear(self, model: str, where: str) -> Json:
        """Drop the caches of a model, or of all: of groups whose rank 0 is here, and those on this disk.

        `where`: "memory" or "disk" alone; empty for both. Returns what was dropped, the groups that other
        Macs own, and the Macs whose disks may still have something. Raises UserError if no such group is here
        and nothing was on disk.
        """
        if where not in ("", "memory", "disk"):
            raise UserError(f"{where!r} is not memory or disk")
        name, groups, removed = name_of(model), [], []
        if where != "disk":
            groups = [each for each in _with_ranks(self._parts) if name in ("", each.scope.deployment)]
        kept = [asdict(_use(group)) for group in groups]
        for group in groups:
            await group.supervisor.kv.clear()
            self._parts.gateway.deployments.forget_prefixes(group.scope.group)
        if where != "memory":
            folder = disk_cache.folder_in(self._parts.node.settings.home)
            removed = await asyncio.to_thread(disk_cache.clear, folder, model, agent_runs=True)
        if not groups and not removed and where != "disk":
            raise UserError(none_kept(model, where, served=bool(self._elsewhere(name))))
        return {
            "groups": kept,
            "disk": disk_cache.by_model(removed),
            "elsewhere": self._elsewhere(name) if where != "disk" else [],
            "other_macs": self._other_macs() if where != "memory" else [],
        }

    def _other_macs(self) -> list[str]:
        node = self._parts.node
        return sorted(node.name_of(each) for each in node.replica.roster.members() if each != node.node_id)

    def _elsewhere(self, name: str) -> list[Json]:
        """Return the groups of a deployment, or of all, that another Mac owns."""
        here = {each.scope.group for each in _with_ranks(self._parts)}
        found = deployments_of(self._parts, self._parts.groups.reports())
        return [
            {
                "group": group.id,
                "owner": self._parts.node.name_of(group.owner),
                "cached_tokens": group.cached,
            }
            for each in found
            if name in ("", each.row.name)
            for group in each.groups
            if group.members and group.id not in here
        ]


def _with_ranks(parts: AgentParts) -> Iterable[Group]:
    return [each for each in parts.groups.by_id.values() if each.supervisor.status.pongs]


def _use(group: Group) -> GroupCaches:
    status = group.supervisor.status
    return use_of(group.scope.group, status.pongs, status.group.nodes if status.group is not None else ())
