"""Handlers of commands to a running agent, and the file by which commands find it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..api.api_keys import KeyRing
from ..cluster.introduction import versions_here
from ..config import parse_nodes, parse_seconds
from ..diagnostics.checkup import Checkup
from ..errors import Code, ConfigError, UserError
from ..groups import sleep
from ..groups.drain import Drain
from ..identity.store import Store
from ..models.hub_cache import Repo, cache_folder, hub_name
from ..models.inspect import is_hub_id, models_here
from ..placement.cost_model import RING_LOOPBACK
from .parts import AgentParts
from .snapshot import Observer

FILE = "agent.json"  # In the home, readable only by this user: the agent's address and key.

COMING = "it is being copied or downloaded; try again when that has finished"

Json = Mapping[str, Any]


class Admin:
    """Handlers of commands. An agent that runs alone has no members to speak of."""

    def __init__(self, parts: AgentParts, store: Store) -> None:
        self.key = secrets.token_urlsafe(24)
        self.draining = Drain(parts.supervisor, parts.reconciler)
        self.api_keys: KeyRing | None = None
        self.checkup: Checkup | None = None
        self.started_with: Json = {}
        self.observer = Observer(parts)
        self.selection = parts.selection
        self._supervisor = parts.supervisor
        self._parts = parts
        self._store = store

    def status(self) -> Json:
        """Return a snapshot of this agent, and of its cluster as it sees it."""
        return self._here() if self._parts.node.alone else {**self._here(), **self._cluster()}

    def _here(self) -> Json:
        supervisor = self._supervisor
        group = supervisor.status.group
        model = next(iter(supervisor.gateway.models()), None)
        ranks = supervisor.status.ranks
        pongs = supervisor.status.pongs
        pids = {each.rank: each.pid for each in ranks.processes} if ranks is not None and pongs else {}
        health = supervisor.gateway.health()
        return {
            "versions": list(versions_here()),
            "name": self._parts.node.name,
            "pid": os.getpid(),
            "state": health.state,
            "reason": health.reason or "",
            "starting": health.starting,
            "epoch": supervisor.status.epoch,
            "model": model.id if model is not None else "",
            "world_size": group.world_size if group is not None else 0,
            "backend": group.backend if group is not None else "none",
            "kind": group.kind if group is not None else "",
            "open_requests": supervisor.gateway.open_requests,
            "left_wired": sleep.HERE.summary(),
            "ranks": [
                {
                    "rank": rank,
                    "pid": pids.get(rank),
                    "phase": pong.phase,
                    "memory_bytes": pong.memory_bytes,
                    "step_us": pong.step_us,
                }
                for rank, pong in sorted(pongs.items())
            ],
        }

    def drain(self, within: str) -> Json:
        """Drain the agent: finish open requests, take no new ones, and end, `within` some seconds."""
        self.draining.start(parse_seconds(within, "--within") if within else None)
        return self.draining.now()

    async def drain_progress(self) -> Json:
        """Return the drain's progress, once it has changed or a while has passed."""
        return await self.draining.drain_progress()

    def keys(self) -> Json:
        """Return the time of each API key's last use since this agent started, in seconds since 1970."""
        return {"used": dict(self.api_keys.used) if self.api_keys is not None else {}}

    def settings(self) -> Json:
        """Return the settings this agent was started with, and the source of each."""
        return self.started_with

    async def models(self) -> Json:
        """Return the models on this machine's disk that can be named without a path."""
        found = await asyncio.to_thread(models_here)
        return {"models": [asdict(each) for each in found]}

    async def doctor(self) -> Json:
        """Return this machine's problems, as this agent sees them."""
        assert self.checkup is not None
        return await self.checkup.report()

    def removable(self, model: str, repair: str) -> Json:
        """Check that OWNER/NAME may be removed from this Mac's disk, or its damaged files (`repair`).

        Raises UserError while it is needed; for a repair, while a rank of this Mac has it open.
        """
        repo = hub_name(model)[0].as_here()
        if why := self._in_use(repo) if repair else self._needed(repo):
            raise UserError(f"{repo.name} cannot be {'repaired now' if repair else 'removed'}: {why}")
        return {"removable": repo.name}

    def close(self) -> None:
        """Stop observing, and end all event streams."""
        self.draining.close()
        self.observer.over.set()

    def _check_cluster(self) -> None:
        """Raise UserError in an agent that runs alone."""
        if self._parts.node.alone:
            raise UserError(
                "this agent keeps to this Mac (--alone, or several --ranks), so there is no cluster; start "
                "`mlxtp node` without them",
                Code.NOT_SUPPORTED,
            )

    def _cluster(self) -> Json:
        parts = self._parts
        desired = parts.node.replica.desired
        claim = parts.node.leadership.claim
        return {
            "problem": parts.node.introduction.problem,
            "waiting": parts.node.leadership.waiting,
            "left_out": parts.placer.left_out_lines(),
            "cluster": parts.node.identity.cluster_id,
            "node_id": parts.node.node_id,
            "coordinator": parts.node.name_of(claim.node_id) if claim.node_id else "",
            "term": claim.term,
            "desired": {
                "model": desired.model,
                "nodes": desired.nodes,
                "version": desired.version,
                "pinned": desired.pinned,
            },
            "coming": self.selection.progress(),
            "fabric": self._fabric(),
            "members": self._members(),
        }

    def _fabric(self) -> Json | None:
        """Return the measurement of the group that serves; None without one."""
        parts = self._parts
        for serving in self._parts.servings.all():
            found = parts.results.of(serving.participants, serving.kind)
            if serving.state == "ready" and found is not None:
                return asdict(found)
        return None

    def plan(self) -> Json:
        """Return the machines of the members that are present, for `mlxtp plan`."""
        parts = self._parts
        return {
            "coordinator": parts.node.leadership.claim.node_id,
            "fabric": [asdict(each) for each in parts.results.results],
            "nodes": [
                {
                    "node_id": member.node_id,
                    "name": member.name,
                    "machine": asdict(parts.node.peer_info.machines[member.node_id]),
                    "held_bytes": member.held_bytes,
                }
                for member in parts.placer.members()
            ],
        }

    async def token(self) -> Json:
        """Return a new join token."""
        self._check_cluster()
        return {"token": await self._parts.tokens.token(), "valid_s": 900}

    async def bench_fabric(self) -> Json:
        """Measure collectives in the group that serves, on any Mac that has its rank 0.

        Between ranks of one machine the result is not kept.
        """
        if self._parts.node.alone:
            return await self._bench_here()
        result = await self._parts.fabric_bench.bench()
        return {**asdict(result), "names": [self._parts.node.name_of(node) for node in result.nodes]}

    async def _bench_here(self) -> Json:
        group, times = self._supervisor.status.group, await self._parts.fabric_bench.measure()
        assert group is not None
        return {
            "nodes": [],
            "names": [f"rank {rank}" for rank in range(group.world_size)],
            "backend": group.backend,
            "kind": group.kind or RING_LOOPBACK,
            "fast_fences": self._parts.node.settings.fast_fences,
            "at": int(time.time()),
            **asdict(times),
        }

    async def serve(self, model: str, nodes: str) -> Json:
        """Set the model that the cluster serves, once it is on disk."""
        if not model:
            raise UserError("which model? A folder that every Mac has, or an id on the Hub")
        said = await self.selection.serve(model, parse_nodes(nodes, "--nodes") if nodes else "")
        desired = said.desired
        return {
            "model": said.model,
            "nodes": desired.nodes,
            "version": desired.version,
            "coming": said.coming,
            "until_then": desired.model if said.coming else "",
        }

    async def pull(self, model: str, everywhere: str) -> Json:
        """Begin to download a model of the Hub, here or on all members that are present."""
        return {"model": await self._parts.transfers.pull(model, everywhere=bool(everywhere))}

    def pulling(self, model: str) -> Json:
        """Return the download's progress on each member that is to have the model."""
        return {"members": self._parts.transfers.progress(model)}

    def stored(self) -> Json:
        """Return the folder of models here, and the models on other members' disks."""
        parts = self._parts
        parts.transfers.stored.refresh()
        return {
            "folder": str(cache_folder()),
            "elsewhere": [
                {"node": parts.node.name_of(node), "node_id": node, **asdict(model)}
                for node, models in sorted(parts.transfers.stored.elsewhere.items())
                for model in models
            ],
        }

    def _needed(self, repo: Repo) -> str:
        parts = self._parts
        wanted = parts.node.replica.desired.model
        if is_hub_id(wanted) and hub_name(wanted)[0].as_here().name == repo.name:
            return (
                "the cluster serves it, or is about to; `mlxtp unload`, or `mlxtp serve` another model, first"
            )
        if parts.transfers.is_getting(repo.name):
            return COMING
        source = self._supervisor.source
        paths = (source.path, source.draft_path) if source is not None else ()
        in_use = _has_one(repo, paths)
        return "it is served here; `mlxtp unload`, or stop `mlxtp node`, first" if in_use else ""

    def _in_use(self, repo: Repo) -> str:
        parts = self._parts
        if parts.transfers.is_getting(repo.name):
            return COMING
        if parts.hosted.serving.epoch and _has_one(repo, (parts.hosted.serving.model,)):
            return "a rank of this Mac has it open; `mlxtp unload` first"
        source = self._supervisor.source if self._supervisor.status.in_epoch else None
        paths = (source.path, source.draft_path) if source is not None else ()
        return "a rank of this Mac has it open; `mlxtp unload` first" if _has_one(repo, paths) else ""

    def removed(self, model: str) -> Json:
        """Check files of OWNER/NAME again, after a command has changed them, and report to the others."""
        self._parts.transfers.stored.changed(hub_name(model)[0].name)
        return {"model": model}

    def unload(self) -> Json:
        """Serve no model."""
        self.selection.cancel()
        desired = self._parts.node.desired.set("")
        return {"model": "", "nodes": desired.nodes, "version": desired.version}

    def members(self) -> Json:
        """Return all members of the parts."""
        self._check_cluster()
        return {"cluster": self._parts.node.identity.cluster_id, "members": self._members()}

    def let_in(self, node: str) -> Json:
        """Return the members that `node` admitted by a token, and in turn those that they admitted."""
        self._check_cluster()
        node_id = self._other(node)
        return {"name": self._parts.node.name_of(node_id), "let_in": self._admitted(node_id)}

    async def remove(self, node: str, with_admitted: str) -> Json:
        """Remove a member, by name or by the start of its id, and on request those that it admitted.

        Returns when another member has it on its disk, or after some seconds.
        """
        self._check_cluster()
        parts, node_id = self._parts, self._other(node)
        name, let_in = parts.node.name_of(node_id), self._admitted(node_id)
        parts.node.enrolment.remove(node_id, *(each["node_id"] for each in let_in if with_admitted))
        others = parts.node.replica.roster.members().keys() - {parts.node.node_id}
        there = others & parts.node.links.nodes()
        saved_by = await parts.node.saved_elsewhere() if there else []
        return {
            "removed": name,
            "node_id": node_id,
            "let_in": let_in,
            "with_admitted": bool(with_admitted),
            "others": len(others),
            "saved_by": [parts.node.name_of(each) for each in saved_by],
        }

    def _admitted(self, node_id: str) -> list[dict[str, str]]:
        parts = self._parts
        found = parts.node.replica.roster.let_in(node_id)
        return [
            {"node_id": each, "name": parts.node.name_of(each)}
            for each in found
            if each != parts.node.node_id
        ]

    def _other(self, node: str) -> str:
        """Return the node id of another member, by name, or by the start of its id."""
        parts = self._parts
        members = parts.node.replica.roster.members()
        found = [each for each in members if parts.node.name_of(each) == node]
        found = found or [each for each in members if each.startswith(node)]
        if not node or len(found) != 1:
            known = ", ".join(f"{parts.node.name_of(each)} ({each[:8]})" for each in members)
            what = "more than one member is" if found else "no member is"
            raise UserError(f"{what} called {node!r}; there are {known}")
        if found[0] == parts.node.node_id:
            raise UserError("this Mac itself leaves with `mlxtp cluster leave`")
        return found[0]

    def leave(self, force: str) -> Json:
        """Leave the cluster; the agent ends. The founder's leaving requires `force`."""
        self._check_cluster()
        parts = self._parts
        others = [each for each in parts.node.replica.roster.members() if each != parts.node.node_id]
        if others and parts.node.identity.authority is not None and not force:
            raise UserError(
                "this Mac founded the cluster and alone can let others in: once it leaves, no other Mac can "
                "join. `mlxtp cluster leave --force` leaves all the same"
            )
        if others:
            parts.node.enrolment.remove(parts.node.node_id)
        self._store.leave()
        parts.node.end()
        return {"left": parts.node.identity.cluster_id, "members": len(others)}

    def _members(self) -> list[Json]:
        parts = self._parts
        ranks = {
            node_id: rank
            for serving in self._parts.servings.all()
            if serving.state == "ready"
            for rank, node_id in enumerate(serving.participants)
        }
        found: list[Json] = []
        for node_id, entry in parts.node.replica.roster.members().items():
            machine = parts.node.peer_info.machines.get(node_id)
            model = (
                parts.model.status
                if node_id == parts.node.node_id
                else parts.node.peer_info.models.get(node_id)
            )
            link = parts.node.links.to(node_id)
            found.append(
                {
                    "node_id": node_id,
                    "name": parts.node.name_of(node_id) or entry.name,
                    "state": str(parts.node.membership.status_of(node_id).state),
                    "draining": node_id in parts.node.leadership.draining,
                    "self": node_id == parts.node.node_id,
                    "coordinator": node_id == parts.node.leadership.claim.node_id,
                    "rank": ranks.get(node_id),
                    "address": link.remote if link is not None else "",
                    "http": parts.node.introduction.http
                    if node_id == parts.node.node_id
                    else parts.node.peer_info.https.get(node_id, ""),
                    "chip": machine.chip if machine is not None else "",
                    "memory_bytes": machine.memory_bytes if machine is not None else 0,
                    "notes": list(machine.notes) if machine is not None else [],
                    "admitted_by": entry.admitted_by,
                    "admitted_by_name": parts.node.name_of(entry.admitted_by) if entry.admitted_by else "",
                    "joined_from": entry.address,
                    "joined_at": entry.at,
                    "model_problem": model.problem if model is not None else "",
                    "model_progress": parts.transfers.progress_text(
                        parts.node.replica.desired.model, node_id
                    ),
                }
            )
        return found


def _has_one(repo: Repo, paths: Iterable[Path | None]) -> bool:
    return any(path is not None and repo.has_inside(path) for path in paths)


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
    """Write the agent's URL, its key, and its `certificate` (PEM) for HTTPS to a file in the home.

    `certificate` is empty for HTTP. Raises ConfigError when the home cannot be written.
    """
    path = home / FILE
    draft = path.with_suffix(".draft")
    try:
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            found = {"url": url, "key": key, "certificate": certificate, "pid": os.getpid()}
            json.dump(found, file)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"--home {home}: {path.name} cannot be written: {error.strerror}") from None
