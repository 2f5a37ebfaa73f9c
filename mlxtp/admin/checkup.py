"""The doctor's facts, as a running agent sees them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

from ..api.admin import Json
from ..api.endpoint import Endpoint
from ..cluster.control_port import Dialer
from ..config import Settings
from ..diagnostics import checkup, failure_store
from ..diagnostics.checkup import Checkup, attempts
from ..diagnostics.facts import (
    AgentFacts,
    Attempt,
    IdentityFacts,
    MemberFacts,
    ModelFacts,
    PortFacts,
    StageFacts,
)
from ..placement.probe_macos import UNKNOWN
from ..wire.cluster_messages import Machine
from .parts import AgentParts
from .snapshot import ClusterSnapshot, MemberSnapshot, Snapshot, formations, gather


class AgentCheckup(Checkup):
    """Facts visible to an agent. Without a cluster it has no `dialer`."""

    def __init__(
        self, settings: Settings, endpoint: Endpoint, parts: AgentParts, dialer: Dialer | None = None
    ) -> None:
        super().__init__(settings)
        self._endpoint = endpoint
        self._parts = parts
        self._dialer = dialer
        self._busy = asyncio.Lock()

    async def report(self) -> Json:
        async with self._busy:  # one at a time: each report connects to all members
            return await super().report()

    def _agent(self) -> AgentFacts:
        home, awake = self._settings.home, self._settings.keep_awake
        failures = len(list((home / failure_store.FOLDER).glob(failure_store.PATTERN)))
        facts = agent_facts(gather(self._parts))
        return replace(facts, url=self._endpoint.url, keep_awake=awake, failures=failures)

    def _model(self) -> ModelFacts:
        return model_facts(gather(self._parts).cluster)

    async def _identity(self) -> IdentityFacts:
        found = await super()._identity()
        parts = self._parts
        if parts.node.alone:
            return replace(found, cluster_id="")
        roster, self_id = parts.node.replica.roster, parts.node.node_id
        others = [each for each in roster.holders() if each != self_id]
        return replace(
            found,
            holders=tuple(map(parts.node.name_of, others)),
            holders_here=tuple(map(parts.node.name_of, parts.node.links.nodes().intersection(others))),
            authority_lost=not found.authority_here and self_id in roster.holders(),
            alone=len(roster.members()) == 1,
        )

    async def _ports(self) -> tuple[PortFacts, ...]:
        node = self._parts.node
        ports = [("endpoint", "--http", self._endpoint.url.rpartition("/")[2])]
        if not node.alone:
            ports += [("control port", "--control", each) for each in node.introduction.addresses()[:6]]
        return tuple(PortFacts(*each, ours=True) for each in ports)

    async def _heard(self) -> tuple[bool, str, tuple[str, ...]]:
        dialer = self._dialer
        if dialer is None or not self._settings.discovery:
            return False, "", ()
        return True, dialer.trouble, tuple(sorted(each.name for each in dialer.sightings))

    async def _members(self, machine: Machine) -> tuple[MemberFacts, ...]:
        node, cluster = self._parts.node, gather(self._parts).cluster
        unlike = node.introduction.unlike
        others = [each for each in cluster.members if not each.here]
        remembered = node.dialing.remembered()
        found = (
            node.peer_info.addresses.get(each.node_id) or remembered.get(each.node_id, ()) for each in others
        )
        tried = [checkup.shared(each, machine) for each in await asyncio.gather(*map(attempts, found))]
        heard = {each.node_id for each in self._dialer.sightings} if self._dialer is not None else set()
        return tuple(
            member_facts(each, heard=each.node_id in heard, ours=ours, unlike=unlike.get(each.node_id, ""))
            for each, ours in zip(others, tried, strict=True)
        )


# --- the doctor's rendering of a snapshot -----------------------------------------------------------------


def agent_facts(now: Snapshot) -> AgentFacts:
    """Return the facts about an agent that a snapshot has: all but its settings' and its disk's."""
    agent, cluster = now.agent, now.cluster
    names = {each.node_id: each.name for each in cluster.members}
    macs, kind = [names.get(each, "?") for each in now.participants], agent.group.kind if agent.group else ""
    split, pongs = agent.group.split if agent.group is not None else (), agent.pongs or {}
    return AgentFacts(
        runs_here=True,
        pid=os.getpid(),
        state=agent.health.state,
        reason=agent.health.reason or "",
        problem_of_cluster=cluster.problem,
        waiting=cluster.waiting,
        left_out=cluster.left_out,
        fabric=f"{kind} on {' + '.join(macs)}" if len(macs) > 1 else "",
        proof=agent.proof,
        slow_link=agent.slow_link,
        model=agent.model.id if agent.model is not None else "",
        has_rank=agent.in_epoch or now.hosted,
        left_wired=now.left_wired,
        formations=formations(next((x.machine for x in cluster.members if x.here and x.machine), UNKNOWN)),
        stages=tuple(
            StageFacts(rank, split[rank], pong.stats.stage_busy_us / 1e6, pong.stats.stage_waiting_us / 1e6)
            for rank, pong in pongs.items()
            if rank < len(split)
        ),
    )


def model_facts(cluster: ClusterSnapshot) -> ModelFacts:
    desired = cluster.deployments[0].row.model if cluster.deployments else ""
    here = next((each.model for each in cluster.members if each.here), None)
    return ModelFacts(desired, here.fingerprint, here.problem) if here is not None else ModelFacts(desired)


def member_facts(
    member: MemberSnapshot, *, heard: bool, ours: tuple[Attempt, ...], unlike: str = ""
) -> MemberFacts:
    model = member.model
    return MemberFacts(
        name=member.name,
        state=member.state,
        linked=bool(member.address),
        heard=heard,
        ours=ours,
        called=member.called,
        fingerprint=model.fingerprint if model is not None else "",
        model_problem=model.problem if model is not None else "",
        unlike=unlike,
        refused=member.refused,
    )
