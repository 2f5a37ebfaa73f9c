"""Snapshot of an agent and its cluster, for the page and other watchers. Unknown facts are None."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

from ..api.admin import Json
from ..cluster.introduction import versions_here
from ..groups.health import ServingState
from ..groups.history import RateMeter, to_json
from ..placement.cost_model import JACCL_MESH, RING_LOOPBACK
from ..placement.topology import NETWORKS, Topology
from ..wire.cluster_messages import Serving
from ..wire.reports import FabricResult
from .parts import AgentParts

#: Fields of each rank's heartbeat.
_RANK = (
    "phase", "memory_bytes", "weight_bytes", "kv_bytes", "step_us", "wait_us", "collective_us", "in_flight",
)  # fmt: skip


class Observer:
    """Source of snapshots: `api.admin.Observed` for one agent. One that runs alone names no cluster."""

    def __init__(self, parts: AgentParts) -> None:
        self.over = asyncio.Event()
        self._supervisor = parts.supervisor
        self._parts = parts
        self._meter = RateMeter()

    def snapshot(self) -> Json:
        """Return all current facts, as JSON; `docs/operations.md` lists the fields."""
        supervisor = self._supervisor
        health = supervisor.gateway.health()
        participants = self._participants()
        return {
            "versions": list(versions_here()),
            "self": self._parts.node.node_id,
            "state": health.state,
            "ready": health.ready,
            "reason": health.reason,
            "starting": health.starting,
            "epoch": health.epoch,
            "model": health.model,
            "model_bytes": self._model_bytes(),
            "context": next((model.context for model in supervisor.gateway.models()), None),
            "group": self._group(participants),
            "ranks": self._ranks(participants),
            "tokens_per_second": self._speed(),
            "requests": {"open": health.open_requests, **supervisor.gateway.dispatcher.queue},
            "history": to_json(supervisor.status.history.stories),
            **self._nodes(),
        }

    # --- the group ---------------------------------------------------------------------------------------

    def _participants(self) -> tuple[str, ...]:
        """Return node ids in rank order; () while there is no group."""
        group, node = self._supervisor.status.group, self._parts.node
        if node.alone:
            return (node.node_id,) * (group.world_size if group is not None else 0)
        serving = self._serving()
        return serving.participants if serving is not None else ()

    def _serving(self) -> Serving | None:
        """Return a report of the group whose epoch this node shows."""
        told, epoch = self._parts.servings.all(), self._supervisor.status.epoch
        mentioned = [each for each in told if each.epoch == epoch and each.participants]
        return mentioned[0] if mentioned else None

    def _group(self, participants: Sequence[str]) -> Json | None:
        group = self._supervisor.status.group
        if group is None or group.world_size == 0:
            return None
        kind = group.kind or (RING_LOOPBACK if group.world_size > 1 else "")
        return {
            "world_size": group.world_size,
            "backend": group.backend,
            "kind": kind,
            "pairs": pairs(group.world_size, mesh=kind == JACCL_MESH),
            "fabric": self._fabric(participants, kind),
        }

    def _fabric(self, participants: Sequence[str], kind: str) -> Json | None:
        """Return the best known time of a collective: measured for this group, or from the last proof."""
        parts = self._parts
        if (found := parts.results.of(tuple(participants), kind)) is not None:
            return _measured(found)
        pongs = self._supervisor.status.pongs
        slowest_us = max((pong.collective_us for pong in pongs.values()), default=0)
        return {"collective_us": slowest_us, "by": "proof", "at": None} if slowest_us else None

    def _ranks(self, participants: Sequence[str]) -> list[Json]:
        """Return every rank of the group. Figures are None on an agent that receives no heartbeats of it."""
        pongs = self._supervisor.status.pongs
        return [
            {
                "rank": rank,
                "node": node,
                **{name: getattr(pongs[rank], name) if rank in pongs else None for name in _RANK},
            }
            for rank, node in enumerate(participants)
        ]

    def _model_bytes(self) -> int | None:
        """Return the disk size of the weights of the model that is served, or about to be."""
        source = self._parts.model.source
        return _weights(source.path) if source is not None else None

    def _speed(self) -> Json:
        """Return tokens per second of all requests where rank 0 is, elsewhere of this agent's requests."""
        supervisor = self._supervisor
        if supervisor.status.state not in (ServingState.READY, ServingState.DRAINING):
            self._meter.reset()
            return {"value": None, "of": "group"}
        rate = self._meter.rate(supervisor.gateway.dispatcher.confirmed_tokens, time.monotonic())
        return {"value": rate, "of": "group" if supervisor.status.ranks is not None else "here"}

    # --- nodes and links ---------------------------------------------------------------------------------

    def _nodes(self) -> Json:
        parts = self._parts
        desired, claim = parts.node.replica.desired, parts.node.leadership.claim
        alone = parts.node.alone
        return {
            "cluster": None if alone else parts.node.identity.cluster_id,
            "coordinator": None if alone else claim.node_id or None,
            "problem": parts.node.introduction.problem or None,
            "waiting": parts.node.leadership.waiting or None,
            "desired": {"model": desired.model, "nodes": desired.nodes},
            "coming": parts.selection.progress(),
            "nodes": [self._node(node_id) for node_id in parts.node.replica.roster.members()],
            "links": links(parts.placer.topology(), self._present(), parts.round_trips.between),
        }

    def _present(self) -> list[str]:
        return [member.node_id for member in self._parts.placer.members()]

    def _node(self, node_id: str) -> Json:
        parts = self._parts
        machine = parts.node.peer_info.machines.get(node_id)
        here = node_id == parts.node.node_id
        model = parts.model.status if here else parts.node.peer_info.models.get(node_id)
        link = parts.node.links.to(node_id)
        return {
            "node_id": node_id,
            "name": parts.node.name_of(node_id),
            "state": str(parts.node.membership.status_of(node_id).state),
            "self": here,
            "coordinator": not parts.node.alone and node_id == parts.node.leadership.claim.node_id,
            "draining": node_id in parts.node.leadership.draining,
            "address": link.remote if link is not None else None,
            "chip": machine.chip or None if machine is not None else None,
            "memory_bytes": machine.memory_bytes or None if machine is not None else None,
            "notes": list(machine.notes) if machine is not None else [],
            "model_problem": model.problem or None if model is not None else None,
            "model_progress": parts.transfers.progress_text(parts.node.replica.desired.model, node_id)
            or None,
        }


def pairs(world_size: int, *, mesh: bool) -> list[tuple[int, int]]:
    """Return the pairs of ranks that exchange bytes: all in a mesh, neighbours in a ring."""
    if mesh or world_size < 3:
        return list(combinations(range(world_size), 2))
    return [(rank, (rank + 1) % world_size) for rank in range(world_size)]


def links(topology: Topology, nodes: Sequence[str], trip_us: Callable[[str, str], int | None]) -> list[Json]:
    """Return the best link of each two nodes that have one: RDMA on a cable, else the fastest network.

    `mbps` is the speed reported by the slower end. `trip_us` is the round-trip time of the agents' messages,
    by the network of their control link, which may be another one.
    """
    found: list[Mapping[str, Any]] = []
    for a, b in combinations(sorted(nodes), 2):
        ends = {"a": a, "b": b, "trip_us": trip_us(a, b)}
        if topology.rdma(a, b) is not None:
            found.append({**ends, "network": "thunderbolt", "rdma": True, "mbps": None})
            continue
        for network in NETWORKS:
            if (link := topology.tcp(network, a, b)) is not None:
                found.append({**ends, "network": network, "rdma": False, "mbps": link.mbps or None})
                break
    return found


def _measured(found: FabricResult) -> Json:
    return {"collective_us": round(found.collective_s * 1e6), "by": "bench", "at": found.at}


@lru_cache(maxsize=8)
def _weights(folder: Path) -> int | None:
    """Return the bytes of the weights in a model folder; None when it cannot be read."""
    try:
        return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
    except OSError:
        return None
