"""Handlers of commands to a running agent, and the file that tells commands its address and key."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import secrets
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

from .. import verbs
from ..api.admin import Json
from ..api.api_keys import KeyRing
from ..cluster.cluster_state import PINNED, is_holder, name_of
from ..cluster.node import ClusterNode
from ..diagnostics.checkup import Checkup
from ..errors import Code, ConfigError, RequestError, UserError, in_words
from ..groups.groups import Drain, group_of
from ..groups.machines import parallel_of
from ..identity.store import Store
from ..models import disk_cache
from ..models.hub_cache import Repo, cache_folder, hub_name
from ..models.inspect import full_name, is_hub_id, models_here
from ..placement.cost_model import RING_LOOPBACK
from ..placement.model_shape import unpacked
from ..short_names import stands_for
from ..wire.cluster_messages import Deployment, Machine, StoredModel
from . import snapshot
from .parts import AgentParts, cache_use, caches_of, deployments_of, senders, with_ranks
from .snapshot import Observer

FILE = "agent.json"  # in the home, readable only by this user

LAST_HOLDER = (
    "only this Mac holds the cluster's authority: once it leaves, no other Mac can join. `mlxtp cluster "
    "authority move NODE` hands it to another first; `mlxtp cluster leave --force` leaves all the same"
)
COMING = "it is being copied or downloaded; try again when that has finished"


def handlers_of(*parts: object) -> Mapping[type[verbs.Verb], Callable[[Any], Json | Awaitable[Json]]]:
    """Map each verb to the method of these objects that takes it. Raises KeyError if a verb has none."""
    methods = [method for part in parts for _, method in inspect.getmembers(part, inspect.ismethod)]
    taken = {kind: method for method in methods for kind in get_type_hints(method).values()}
    return {kind: taken[kind] for kind in verbs.VERBS.values()}


class Admin:
    """Handlers of commands about this agent. `models`, `members` and `caches` have the others."""

    def __init__(self, parts: AgentParts, store: Store) -> None:
        self.key = secrets.token_urlsafe(24)
        self.draining = Drain(parts.node, parts.gateway, parts.groups)
        self.models = ModelHandlers(parts)
        self.plans = PlanHandlers(parts)
        self.members = MemberHandlers(parts, store)
        self.caches = CacheHandlers(parts)
        self.api_keys: KeyRing | None = None
        self.checkup: Checkup | None = None
        self.started_with: Json = {}
        self.observer = Observer(parts)
        self._parts = parts
        self._handlers = handlers_of(self, self.plans, self.models, self.members, self.caches)

    async def carry_out(self, verb: verbs.Verb) -> Json:
        reply = self._handlers[type(verb)](verb)
        return await reply if isinstance(reply, Awaitable) else reply

    def status(self, _: verbs.Status) -> Json:
        return snapshot.status(snapshot.gather(self._parts))

    def drain(self, verb: verbs.StartDrain) -> Json:
        self.draining.start(verb.parsed().get("within"))
        return self.draining.now()

    async def drain_progress(self, _: verbs.DrainProgress) -> Json:
        return await self.draining.drain_progress()

    def keys(self, _: verbs.KeyUses) -> Json:
        used = self.api_keys.reports() if self.api_keys is not None else []
        return {"keys": used, "requests": senders(self._parts.gateway.deployments)}

    def settings(self, _: verbs.AgentSettings) -> Json:
        return self.started_with

    async def doctor(self, _: verbs.Diagnose) -> Json:
        assert self.checkup is not None
        return await self.checkup.report()

    async def bench_fabric(self, verb: verbs.BenchFabric) -> Json:
        if self._parts.node.alone:
            return await self._bench_here(name_of(verb.model))
        result = await self._parts.fabric_bench.bench(name_of(verb.model))
        return {**asdict(result), "names": [self._parts.node.name_of(node) for node in result.nodes]}

    async def _bench_here(self, deployment: str) -> Json:
        parts = self._parts
        group = group_of(parts.groups, deployment).supervisor.status.group
        result = await parts.fabric_bench.measure(deployment)
        assert group is not None
        names = [f"rank {rank}" for rank in range(group.world_size)]
        return {**asdict(result), "nodes": [], "names": names, "kind": result.kind or RING_LOOPBACK}

    def close(self) -> None:
        self.draining.close()
        self.observer.over.set()


class PlanHandlers:
    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts

    def plan(self, _: verbs.PresentMachines) -> Json:
        parts, node = self._parts, self._parts.node
        reports = node.links.reports.of(Machine)
        return {
            "coordinator": node.leadership.claim.node_id,
            "fabric": [asdict(each) for each in parts.results.results],
            "parallel": node.settings.parallel,
            "fabric_networks": node.settings.fabric_networks,
            "nodes": [
                {name: getattr(member, name) for name in ("node_id", "name", "held_bytes", "control_address")}
                | {"machine": asdict(reports[member.node_id])}
                for member in parts.machines.members(held_bytes=parts.groups.held_bytes)
            ],
        }

    def plan_now(self, verb: verbs.PlanNow) -> Json:
        node = self._parts.node
        try:
            described = unpacked(b64decode(verb.described, validate=True))
        except ValueError as error:
            raise RequestError(f"described: {error}", param="described") from None
        wishes = {"nodes": verb.nodes, "parallel": verb.parallel, "split": verb.split, "keep_s": PINNED}
        row = node.desired.row(verb.model, **wishes)
        placed, gives_way = self._parts.coordinator.foresee(replace(row, version=row.version + 1), described)
        return {
            "macs": [node.name_of(each) for each in placed.ranks],
            "kind": placed.kind,
            "split": placed.split,
            "why": placed.why,
            "gives_way": gives_way,
        }


class ModelHandlers:
    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts

    async def on_disk(self, _: verbs.ModelsOnDisk) -> Json:
        return {"models": await asyncio.to_thread(models_here)}

    async def serve(self, verb: verbs.Serve) -> Json:
        if not (model := verb.model):
            raise UserError("which model? A folder that every Mac has, or an id on the Hub")
        asked = verb.parsed()
        asked["keep_s"] = asked.pop("keep", PINNED)
        if "on" in asked:
            asked["on"] = self._nodes_called(asked["on"])
        if stands_for(model):
            model = await asyncio.to_thread(full_name, model, self._parts.node.settings.model_folders)
        node, name = self._parts.node, name_of(model)
        before = node.desired.table
        if verb.again and (deployed := before.get(name)) is not None:
            asked["again"] = deployed.again + 1
        others = [each for each in before.live() if each.name != name]
        selected = await self._parts.selection.serve(model, replace=verb.only, **asked)
        table, coming = node.desired.table, selected.coming
        row, was = table.get(name) or Deployment(name), before.get(name)
        again = replace(was or row, version=row.version, writer=row.writer)  # the same wish once more
        return {
            **row.wishes(),
            "model": model,
            "name": name,
            "parallel": parallel_of(node.settings, row),
            "on": [node.name_of(each) for each in row.on],
            "version": table.newest,
            "change": "added" if was is None else "kept" if row == again else "changed",
            "replaced": [each.model for each in others if table.get(each.name) is None],
            "coming": coming,
            "downloads": selected.downloads,
            "until_then": ", ".join(each.model for each in others) if coming else "",
        }

    def _nodes_called(self, names: tuple[str, ...]) -> tuple[str, ...]:
        found: dict[str, str] = {}
        for name in names:
            if (other := found.setdefault(self._node_called(name), name)) is not name:
                raise UserError(f"--on: {other} and {name} are one Mac; name each once")
        return tuple(found)

    def _node_called(self, wanted: str) -> str:
        """Return the node id of a member by its name or the start of its id. Raises UserError."""
        node = self._parts.node
        found = _members_called(node, wanted)
        if len(found) != 1:
            known = ", ".join(sorted(map(node.name_of, node.replica.roster.members())))
            what = "no member is" if not found else f"{len(found)} members are"
            raise UserError(f"--on {wanted}: {what} called that; the members are {known}")
        return found[0]

    def unload(self, verb: verbs.UnloadModel) -> Json:
        node, model = self._parts.node, verb.model
        live = [row.name for row in node.desired.table.live()]
        if len(live) > 1 and not (model or verb.everything):
            raise UserError(
                f"several models are deployed: {', '.join(live)}. Name one, or use `mlxtp unload --all`"
            )
        if name_of(model) not in live:
            model = stands_for(model) or model
        cancelled = self._parts.selection.cancel(model)
        if not model:
            node.desired.unload_all()
        elif name_of(model) in live or not cancelled:
            node.desired.unload(model)
        left = node.desired.table.live()
        return {
            "model": left[0].model if left else "",
            "nodes": left[0].nodes if left else "auto",
            "version": node.desired.table.newest,
            "unloaded": [each for each in live if node.desired.table.get(each) is None],
            "left": [row.model for row in left],
            "cancelled": cancelled,
        }

    async def pull(self, verb: verbs.PullModel) -> Json:
        return {"model": await self._parts.transfers.pull(verb.model, everywhere=verb.everywhere)}

    def pulling(self, verb: verbs.PullProgress) -> Json:
        return {"members": self._parts.transfers.progress(verb.model)}

    def stored(self, _: verbs.ModelsStored) -> Json:
        parts = self._parts
        parts.transfers.stored.refresh()
        return {
            "folder": str(cache_folder()),
            "elsewhere": [
                {"node": parts.node.name_of(node), "node_id": node, **asdict(model)}
                for node, model in parts.node.links.reports.others(StoredModel)
            ],
        }

    def removable(self, verb: verbs.CheckRemovable) -> Json:
        """Raise UserError if the files are needed; for a repair, only if a rank here has them open."""
        repo = hub_name(verb.model)[0].as_here()
        if why := self._in_use(repo) if verb.repair else self._needed(repo):
            raise UserError(f"{repo.name} cannot be {'repaired now' if verb.repair else 'removed'}: {why}")
        return {"removable": repo.name}

    def removed(self, verb: verbs.FilesRemoved) -> Json:
        self._parts.transfers.stored.changed(hub_name(verb.model)[0].name)
        return {"model": verb.model}

    def _needed(self, repo: Repo) -> str:
        parts = self._parts
        wanted = [row.model for row in parts.node.desired.table.live() if is_hub_id(row.model)]
        if any(hub_name(each)[0].as_here().name == repo.name for each in wanted):
            return (
                "the cluster serves it, or is about to; `mlxtp unload`, or `mlxtp serve` another model, first"
            )
        if parts.transfers.is_getting(repo.name):
            return COMING
        in_use = any(_has_one(repo, paths) for paths in self._open_here(also_last=True))
        return "it is served here; `mlxtp unload`, or stop `mlxtp node`, first" if in_use else ""

    def _in_use(self, repo: Repo) -> str:
        if self._parts.transfers.is_getting(repo.name):
            return COMING
        opened = (*self._open_here(also_last=False), tuple(self._parts.hosted.models))
        in_use = any(_has_one(repo, paths) for paths in opened)
        return "a rank of this Mac has it open; `mlxtp unload` first" if in_use else ""

    def _open_here(self, *, also_last: bool) -> Iterator[tuple[Path | None, ...]]:
        """Yield model folders of this agent's running epochs; `also_last`: also of the latest ended ones."""
        for group in self._parts.groups.by_id.values():
            supervisor = group.supervisor
            if supervisor.source is not None and (also_last or supervisor.status.in_epoch):
                yield supervisor.source.path, supervisor.source.draft_path


class MemberHandlers:
    """Handlers of commands about members. An agent that runs alone refuses all of them."""

    def __init__(self, parts: AgentParts, store: Store) -> None:
        self._parts = parts
        self._store = store

    def roster(self, _: verbs.ListMembers) -> Json:
        self._clustered()
        cluster = snapshot.gather(self._parts).cluster
        return {"cluster": cluster.cluster_id, "members": snapshot.members(cluster)}

    async def token(self, _: verbs.MakeToken) -> Json:
        self._clustered()
        return {"token": await self._parts.tokens.token(), "valid_s": 900}

    def let_in(self, verb: verbs.LetIn) -> Json:
        node, node_id = self._clustered(), self._other(verb.node, former=True)
        return {"name": node.name_of(node_id), "let_in": self._admitted(node_id)}

    async def remove(self, verb: verbs.RemoveMember) -> Json:
        """Remove a member. Return when another member has that on disk, or after some seconds.

        If repeated, it checks again. Raises UserError as long as no disk has it.
        """
        node, node_id = self._clustered(), self._other(verb.node, former=True)
        roster, let_in = node.replica.roster, self._admitted(node_id)
        members = roster.members()
        name = node.name_of(node_id) if node_id in members else verb.node
        gone = [node_id, *(each["node_id"] for each in let_in if verb.with_admitted)]
        held = [node.name_of(each) for each in roster.holders() if each in gone]
        former = () if node_id in members else roster.entries
        held += [name] * any(each.node_id == node_id and is_holder(each) for each in former)
        node.enrolment.remove(*(each for each in gone if each in members))
        others = node.replica.roster.members().keys() - {node.node_id}
        saved_by = await node.saved_elsewhere() if others & node.links.nodes() else []
        if (problem := await node.save()) and not saved_by:
            raise UserError(
                f"{name} is removed until this agent restarts, as no disk has that yet. {problem}. Free "
                "space there, and run this command again; the agent itself tries again, too"
            )
        return {
            "removed": name,
            "node_id": node_id,
            "let_in": let_in,
            "with_admitted": verb.with_admitted,
            "held_authority": held,
            "others": len(others),
            "saved_by": [node.name_of(each) for each in saved_by],
            "problem": problem,
        }

    def leave(self, verb: verbs.LeaveCluster) -> Json:
        node = self._clustered()
        roster, self_id = node.replica.roster, node.node_id
        others = [each for each in roster.members() if each != self_id]
        last = node.identity.authority is not None and not set(roster.holders()) - {self_id}
        if others and last and not verb.force:
            raise UserError(LAST_HOLDER)
        if others:
            node.enrolment.remove(self_id)
        self._store.leave()
        node.end()
        return {"left": node.identity.cluster_id, "members": len(others)}

    async def hand_over(self, verb: verbs.HandOver) -> Json:
        node, authority = self._clustered(), self._parts.authority
        node_id = self._other(verb.node, "this Mac hands the key over; name another member")
        authority.check_hand_over(node_id)
        if verb.sure:
            await authority.hand_over(node_id)
        if verb.sure and verb.move:
            await authority.give_up()
        names = [node.name_of(each) for each in node.replica.roster.holders()]
        return {"name": node.name_of(node_id), "node_id": node_id, "moved": verb.move, "holders": names}

    def _admitted(self, node_id: str) -> list[dict[str, str]]:
        node = self._parts.node
        others = [each for each in node.replica.roster.let_in(node_id) if each != node.node_id]
        return [{"node_id": each, "name": node.name_of(each)} for each in others]

    def _other(
        self,
        node: str,
        itself: str = "this Mac itself leaves with `mlxtp cluster leave`",
        *,
        former: bool = False,
    ) -> str:
        """Return the node id of another member by its name or the start of its id.

        With `former` the last removed member counts if no present one matches. Raises UserError, for this Mac
        with the words `itself`.
        """
        here = self._parts.node
        found = _members_called(here, node)
        if former and not found:
            gone = sorted((e for e in here.replica.roster.entries if e.removed), key=lambda e: e.removed_in)
            found = [e.node_id for e in gone if e.name == node or e.node_id.startswith(node)][-1:]
        if not node or len(found) != 1:
            members = here.replica.roster.members().items()
            known = ", ".join(f"{entry.name} ({each[:8]})" for each, entry in members)
            what = "more than one member is" if found else "no member is"
            raise UserError(f"{what} called {node!r}; there are {known}")
        if found[0] == here.node_id:
            raise UserError(itself)
        return found[0]

    def _clustered(self) -> ClusterNode:
        """Return the node. Raises UserError if the agent runs alone."""
        if self._parts.node.alone:
            raise UserError(
                "this agent keeps to this Mac (--alone, or several --ranks), so there is no cluster; start "
                "`mlxtp node` without them",
                Code.NOT_SUPPORTED,
            )
        return self._parts.node


def _members_called(node: ClusterNode, wanted: str) -> list[str]:
    """Return the node ids of members with this name, else of members whose ids begin with it."""
    members = node.replica.roster.members()
    found = [each for each, entry in members.items() if wanted in (node.name_of(each), entry.name)]
    return found or [each for each in members if each.startswith(wanted)]


def _has_one(repo: Repo, paths: Iterable[Path | None]) -> bool:
    return any(path is not None and repo.has_inside(path) for path in paths)


# --- the file ---------------------------------------------------------------------------------------------


@contextmanager
def announced(home: Path, url: str, key: str, certificate: str = "") -> Iterator[None]:
    """Announce the agent to this user's commands until the context ends. Raises as `announce` does."""
    announce(home, url, key, certificate)
    try:
        yield
    finally:
        with suppress(OSError):
            (home / FILE).unlink()


def announce(home: Path, url: str, key: str, certificate: str = "") -> None:
    """Write the agent's URL, key, and certificate (PEM, "" for HTTP) to the home. Raises ConfigError."""
    path = home / FILE
    draft = path.with_suffix(".draft")
    with in_words(ConfigError, f"--home {home}: {path.name} cannot be written"):
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            found = {"url": url, "key": key, "certificate": certificate, "pid": os.getpid()}
            json.dump(found, file)
        draft.replace(path)


class CacheHandlers:
    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts

    async def kept(self, _: verbs.ListCaches) -> Json:
        settings = self._parts.node.settings
        disk = await asyncio.to_thread(disk_cache.listed, settings.home, settings.cache_disk)
        return {"groups": list(caches_of(self._parts)), "elsewhere": self._elsewhere(""), "disk": disk}

    async def clear(self, verb: verbs.ClearCaches) -> Json:
        """Return what was dropped, the groups that other Macs own, and Macs whose disks may have more.

        Raises UserError if no such group is here and the disk had nothing.
        """
        model, where = verb.model, verb.where
        if where not in ("", "memory", "disk"):
            raise UserError(f"{where!r} is not memory or disk")
        name, groups, removed = name_of(model), [], []
        if where != "disk":
            groups = [each for each in with_ranks(self._parts) if name in ("", each.scope.deployment)]
        kept, node = [cache_use(group) for group in groups], self._parts.node
        other_macs = sorted(map(node.name_of, node.replica.roster.members().keys() - {node.node_id}))
        for group in groups:
            await group.supervisor.kv.clear()
            self._parts.gateway.deployments.forget_prefixes(group.scope.group)
        if where != "memory":
            folder = disk_cache.folder_in(node.settings.home)
            removed = await asyncio.to_thread(disk_cache.clear, folder, model, agent_runs=True)
        if not groups and not removed and where != "disk":
            raise UserError(none_kept(model, where, served=bool(self._elsewhere(name))))
        return {
            "groups": kept,
            "disk": disk_cache.by_model(removed),
            "elsewhere": self._elsewhere(name) if where != "disk" else [],
            "other_macs": other_macs if where != "memory" else [],
        }

    def _elsewhere(self, name: str) -> list[Json]:
        """Return the groups that another Mac owns, of one deployment or of all."""
        here = {each.scope.group for each in with_ranks(self._parts)}
        found = deployments_of(self._parts, self._parts.groups.reports())
        groups = [group for each in found if name in ("", each.row.name) for group in each.groups]
        named = self._parts.node.name_of
        return [
            {"group": each.id, "owner": named(each.owner), "cached_tokens": each.cached}
            for each in groups
            if each.members and each.id not in here
        ]


def none_kept(model: str, where: str, *, served: bool) -> str:
    """Return why there is nothing to clear. `served`: another Mac's group serves it."""
    if served:
        what = f"{model} has no rank 0" if model else "no model has its rank 0"
        return (
            f"{what} on this Mac, so nothing of it is kept here; `mlxtp status` names the owner of each "
            "group: clear it there"
        )
    if where == "memory":
        return f"{model} is not served" if model else "no model is served"
    if model:
        return f"{model} is neither served nor on this Mac's disk"
    return "no model is either served or on this Mac's disk"
