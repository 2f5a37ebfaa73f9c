"""The group whose rank 0 is here: its making, and the reports by which other nodes know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from ..cluster.links import ControlLink
from ..cluster.node import BEAT_S, ClusterNode
from ..cluster.reconcile import FormEpoch, RunningEpoch
from ..placement.candidates import Candidate
from ..placement.planner import Placement
from ..wire.cluster_messages import (
    EpochEnded,
    Prepare,
    Prepared,
    RankPong,
    RankSide,
    RankStarted,
    RankTrouble,
    Serving,
)
from ..wire.rdma import flat
from .health import ServingState
from .lifecycle import GROUP, Supervisor
from .placer import Placer, in_steps, matrix
from .process_group import EpochGroup
from .ranks import RankWord, RemoteRank, Watcher

MIB = 1 << 20
KEY_NUMBERS = 2  #: Length of the key by which plans are compared, see `Placer.key`.


@dataclass(frozen=True, slots=True)
class OwnedEpoch:
    """An epoch that this node forms or runs, and the model and version of the desired state it is for."""

    form: FormEpoch
    placement: Placement
    model: str
    desired: int


class ServingReports:
    """Reports of groups: of the `owned` one to all members, and those of other nodes."""

    def __init__(self, node: ClusterNode, supervisor: Supervisor) -> None:
        self.owned: OwnedEpoch | None = None
        self._node = node
        self._supervisor = supervisor
        node.links.on_up(self._greet)
        node.rounds.every(BEAT_S, lambda _now: self.broadcast(), needed=node.links.nodes)

    def broadcast(self) -> None:
        """Send the present report to all members."""
        if (serving := self.serving()) is not None:
            self._node.links.broadcast(serving)

    def _greet(self, link: ControlLink) -> None:
        if (serving := self.serving()) is not None:
            link.send(serving)

    def all(self) -> list[Serving]:
        """Return this node's report and those of other nodes."""
        mine = self.serving()
        return [*([mine] if mine is not None else []), *self._node.peer_info.servings.values()]

    def serving(self) -> Serving | None:
        """Return this node's group, for all others; None when it has none and another node coordinates."""
        mine, supervisor = self.owned, self._supervisor
        if mine is None:
            return self._nothing() if self._node.leadership.leading else None
        if supervisor.has_ranks:
            state, requests = supervisor.status.state, supervisor.gateway.open_requests
            info = next(iter(supervisor.gateway.models()), None)
        else:  # it is about to begin, or is over; the supervisor shows the node that this one follows
            state, requests, info = ServingState.RESTARTING, 0, None
        group, error = supervisor.status.group, supervisor.status.reason
        reason = error.detail if error is not None else ""
        if state is ServingState.LOADING:
            reason = supervisor.status.progress
        loaded = state in (ServingState.READY, ServingState.DRAINING)
        return Serving(
            mine.form.number,
            str(state),
            supervisor.gateway.closing or reason,
            group.backend if group is not None else "none",
            group.kind if group is not None else "",
            mine.form.plan.ranks,
            mine.form.plan.key,
            requests,
            mine.model,
            mine.desired,
            info.context if info is not None else 0,
            info.vocabulary if info is not None else 0,
            info.eos if info is not None else (),
            math.ceil(supervisor.load_s),
            tuple(-(-self._held_here(node) // MIB) for node in mine.form.plan.ranks) if loaded else (),
            GROUP,
            mine.model,
        )

    def _nothing(self) -> Serving:
        """Return the report of a coordinator without a group, with the reason."""
        status, version = self._supervisor.status, self._node.replica.desired.version
        state, why = ServingState.IDLE, self._node.leadership.waiting
        if status.resting and status.state is ServingState.FAILED:
            state, why = status.state, status.reason.detail if status.reason is not None else ""
        return Serving(status.epoch, str(state), why, "none", "", (), (), 0, "", version, 0, 0, ())

    def held_bytes(self, node_id: str, group: str) -> int:
        """Return the bytes of that Mac's memory that ranks of this group hold: free for its next epoch."""
        told = [each for each in self._node.peer_info.servings.values() if each.group == group]
        theirs = [dict(zip(each.participants, each.held_mib, strict=False)) for each in told]
        ours = self._held_here(node_id) if group == GROUP else 0
        return in_steps(ours + sum(held.get(node_id, 0) * MIB for held in theirs))

    def _held_here(self, node_id: str) -> int:
        """Return the bytes that ranks of this node's groups hold of that Mac's memory."""
        pongs = [
            ranks.watch.pongs.get(ranks.group.nodes.index(node_id))
            for ranks in (self._supervisor.status.ranks, self._supervisor.beside.ranks)
            if ranks is not None and node_id in ranks.group.nodes
        ]
        return sum(pong.memory_bytes for pong in pongs if pong is not None)

    def running(self) -> RunningEpoch | None:
        """Return the epoch that this node owns, for decisions; None while it has none."""
        mine, state = self.owned, self._supervisor.status.state
        if mine is None or not self._supervisor.status.in_epoch:
            return None
        return RunningEpoch(
            mine.form.number,
            mine.form.plan.ranks,
            mine.form.boots,
            mine.form.plan.key,
            mine.model,
            mine.desired,
            state in (ServingState.READY, ServingState.DRAINING),
            self._supervisor.gateway.open_requests,
            state is ServingState.DRAINING,
            mine.form.plan.backend,
        )

    def others(self) -> tuple[RunningEpoch, ...]:
        """Return the epochs of other nodes, for decisions."""
        servings = self._node.peer_info.servings.items()
        return tuple(filter(None, [_running(owner, serving) for (owner, _), serving in servings]))


def _running(owner: str, serving: Serving) -> RunningEpoch | None:
    if serving.participants[:1] != (owner,) or len(serving.key) != KEY_NUMBERS:
        return None  # only the node of rank 0 reports a group
    if serving.state not in (ServingState.READY, ServingState.LOADING, ServingState.DRAINING):
        return None
    return RunningEpoch(
        serving.epoch,
        serving.participants,
        (),
        serving.key,
        serving.model,
        serving.desired,
        serving.state == ServingState.READY,
        serving.open_requests,
        serving.state == ServingState.DRAINING,
        serving.backend,
    )


class GroupBuilder:
    """Maker of the ranks of this node's epochs. Those on other Macs get their agents' reports through it."""

    def __init__(self, node: ClusterNode, placer: Placer) -> None:
        self._node = node
        self._placer = placer
        self._endpoints: dict[tuple[str, int], RemoteRank] = {}  #: By node id and epoch.
        node.links.on(self._reported, Prepared, RankStarted, RankPong, RankTrouble, EpochEnded, RankSide)
        node.links.on_lost(self._lost)

    def group(self, number: int, chosen: Candidate, *, trial: bool = False) -> EpochGroup:
        """Return the ranks of epoch `number`. `trial`: they run beside those that serve."""
        node = self._node
        here, world, model = node.settings.ranks, len(chosen.ranks), node.replica.desired.model
        if here > 1:
            return EpochGroup(here, here, node.settings.local_backend, nodes=chosen.ranks)
        known = node.peer_info.machines
        machines = tuple(f"{known[each].chip} {known[each].build}" for each in chosen.ranks)
        if world == 1:
            return EpochGroup(1, 1, "none", kind=chosen.kind, machines=machines, nodes=chosen.ranks)
        fabric = chosen.ring_addresses or ("",) * world
        members = node.replica.roster.members()

        def endpoints(watcher: Watcher) -> tuple[RemoteRank, ...]:
            made = {}
            for rank, node_id in enumerate(chosen.ranks[1:], 1):
                order = Prepare(number, rank, fabric[rank], model, trial, GROUP)
                made[node_id, number] = RemoteRank(
                    partial(node.links.send, node_id), node.name_of(node_id), order, watcher
                )
            self._endpoints |= made
            return tuple(made.values())

        return EpochGroup(
            1,
            world,
            chosen.backend,
            fabric=fabric[0],
            endpoints=endpoints,
            decode_hosts=("127.0.0.1", *map(self._addresses_for, chosen.ranks[1:])),
            pins=tuple(members[node_id].fingerprint for node_id in chosen.ranks),
            kind=chosen.kind,
            rdma=flat(matrix(chosen)) if chosen.backend == "jaccl" else (),
            jaccl_ring=chosen.jaccl_ring,
            machines=machines,
            nodes=chosen.ranks,
            without_jaccl=lambda ranks: self._placer.without_jaccl([chosen.ranks[rank] for rank in ranks]),
        )

    def _addresses_for(self, node_id: str) -> str:
        """Return this node's addresses for a member: on the fastest network, then on the control link."""
        me, link = self._node.node_id, self._node.links.to(node_id)
        faster = [each.addresses[me] for each in self._placer.topology().fastest(me, node_id)[:1]]
        return ",".join(dict.fromkeys([*faster, *([link.local] if link is not None else [])]))

    def release(self, number: int) -> None:
        """Drop the ranks on other Macs of epoch `number`, which has ended."""
        self._endpoints = {key: endpoint for key, endpoint in self._endpoints.items() if key[1] != number}

    def _reported(self, link: ControlLink, message: RankWord) -> None:
        """Pass an agent's report on to the endpoint of the rank that it runs for this node."""
        if endpoint := self._endpoints.get((link.node_id, message.epoch)):
            endpoint.received(message)

    def _lost(self, node_id: str, why: str) -> None:
        """Note that the last link to an agent has ended."""
        for (host, _), endpoint in self._endpoints.items():
            if host == node_id:
                endpoint.link_lost(why)
