"""The doctor's facts, as a running agent sees them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

from ..api.admin import Json
from ..api.endpoint import Endpoint
from ..cluster.dialer import Dialer
from ..config import Settings
from ..diagnostics import failure_store, local_facts
from ..diagnostics.checkup import Checkup
from ..diagnostics.facts import AgentFacts, IdentityFacts, MemberFacts, ModelFacts, PortFacts
from ..diagnostics.local_facts import attempts
from ..groups import sleep
from ..wire.cluster_messages import ModelStatus
from ..wire.reports import Machine
from .parts import AgentParts


class AgentCheckup(Checkup):
    """Facts visible to an agent. An agent that runs alone has no `dialer`."""

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
        parts = self._parts
        supervisor = parts.supervisor
        health = supervisor.gateway.health()
        model = next(iter(supervisor.gateway.models()), None)
        hosted = parts.hosted.serving.epoch > 0
        return AgentFacts(
            runs_here=True,
            url=self._endpoint.url,
            pid=os.getpid(),
            state=str(health.state),
            reason=health.reason or "",
            problem_of_cluster=parts.node.introduction.problem,
            waiting=parts.node.leadership.waiting,
            left_out=tuple(parts.placer.left_out_lines()),
            proof=supervisor.loader.proof,
            model=model.id if model is not None else "",
            has_rank=supervisor.status.in_epoch or hosted,
            keep_awake=self._settings.keep_awake,
            left_wired=sleep.HERE.summary(),
            failures=len(list((self._settings.home / failure_store.FOLDER).glob(failure_store.PATTERN))),
        )

    def _model(self) -> ModelFacts:
        here = self._parts.model
        return ModelFacts(self._parts.node.replica.desired.model, here.fingerprint, here.problem)

    async def _identity(self) -> IdentityFacts:
        found = await super()._identity()
        parts = self._parts
        if parts.node.alone:
            return replace(found, cluster_id="")
        founder = parts.node.peer_info.authority
        return replace(
            found,
            authority=parts.node.name_of(founder) if founder else "",
            authority_linked=founder in parts.node.links.nodes(),
        )

    def _ports(self) -> tuple[PortFacts, ...]:
        parts = self._parts
        told = [("endpoint", "--http", self._endpoint.url.rpartition("/")[2])]
        told += [
            ("control port", "--control", each)
            for each in (parts.node.introduction.addresses() if parts else ())[:6]
        ]
        return tuple(PortFacts(name, flag, address, ours=True) for name, flag, address in told)

    async def _heard(self) -> tuple[bool, str, tuple[str, ...]]:
        dialer = self._dialer
        if dialer is None or not self._settings.discovery:
            return False, "", ()
        return True, dialer.trouble, tuple(sorted(each.name for each in dialer.sightings))

    async def _members(self, machine: Machine) -> tuple[MemberFacts, ...]:
        parts = self._parts
        others = [each for each in parts.node.replica.roster.members() if each != parts.node.node_id]
        remembered = parts.node.dialing.remembered()
        found = [parts.node.peer_info.addresses.get(each) or remembered.get(each, ()) for each in others]
        tried = await asyncio.gather(*map(attempts, found))
        linked = parts.node.links.nodes()
        called = {link.node_id for link in parts.node.links.links() if not link.dialled}
        heard = {each.node_id for each in self._dialer.sightings} if self._dialer is not None else set()
        models = {each: parts.node.peer_info.models.get(each) or ModelStatus(0, "", "") for each in others}
        return tuple(
            MemberFacts(
                name=parts.node.name_of(node_id),
                state=str(parts.node.membership.status_of(node_id).state),
                linked=node_id in linked,
                heard=node_id in heard,
                ours=local_facts.shared(ours, machine),
                called=node_id in called,
                fingerprint=models[node_id].fingerprint,
                model_problem=models[node_id].problem,
            )
            for node_id, ours in zip(others, tried, strict=True)
        )
