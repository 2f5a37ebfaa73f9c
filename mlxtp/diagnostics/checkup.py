"""Collection of the doctor's facts about this machine: all at once, each with a time limit.

`Checkup` is what a command finds out by itself, where no agent runs. `admin.checkup` runs within an agent,
which sees the network as a service does and has links to the other members.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from zeroconf import Error as ZeroconfError

from ..api.endpoint import here_and_now
from ..api.server import bind
from ..cluster.state_file import SavedState
from ..config import Settings, is_loopback
from ..discovery.addresses import SERVICE
from ..discovery.mdns import Network
from ..gateway.admission import look_at_memory
from ..placement import hardware
from ..placement import probe_macos as probes
from ..placement.hardware import RunProbe, run_as_self, run_command
from ..placement.probe_macos import Output
from ..wire.blocking import listen
from ..wire.reports import Machine
from . import local_facts
from .facts import (
    AgentFacts,
    ClockFacts,
    Disk,
    FirewallFacts,
    IdentityFacts,
    MachineFacts,
    MemberFacts,
    MemoryRoom,
    ModelFacts,
    NetworkFacts,
    PortFacts,
    PowerFacts,
    Software,
)
from .local_facts import attempts, in_time, problem_of, slow
from .rows import ROWS, examine, to_json

#: Seconds for which a command listens for other agents. They reply within half a second.
LISTEN_S = 1.5
_MANY = 1 << 20

Json = Mapping[str, Any]
T = TypeVar("T")


class Checkup:
    """Facts visible to this process. `problem`: why the agent that holds this home could not be queried."""

    def __init__(
        self,
        settings: Settings,
        problem: str = "",
        *,
        run: RunProbe = run_command,
        run_as_self: RunProbe = run_as_self,
        system: str = sys.platform,
    ) -> None:
        self._settings = settings
        self._problem = problem
        self._run = run
        self._run_as_self = run_as_self
        self._system = system
        self._crashed: list[str] = []

    async def report(self) -> Json:
        """Return the findings by rows. `docs/doctor.md` names the fields."""
        facts = await self.facts()
        return to_json(examine(ROWS, facts), facts)

    async def facts(self) -> MachineFacts:
        """Collect all facts. Takes some seconds; the slowest part is `system_profiler`."""
        settings = self._settings
        self._crashed = []
        (machine, identity, software, network, wrong), (room, firewall, power, clock) = await asyncio.gather(
            asyncio.gather(
                hardware.probe(system=self._system, run=self._run),
                self._identity(),
                self._in_time(local_facts.software_here, Software("", "", "", "", ())),
                self._network(),
                self._wrong_settings(),
            ),
            asyncio.gather(self._room(), self._firewall(), self._power(), self._clock()),
        )
        members = await self._members(machine)
        sent = await asyncio.to_thread(local_facts.sent, [each for member in members for each in member.ours])
        return MachineFacts(
            name=settings.name or socket.gethostname().partition(".")[0],
            now=here_and_now(),
            machine=machine,
            agent=self._agent(),
            software=software,
            room=room,
            network=replace(network, unicast=sent),
            firewall=firewall,
            power=power,
            clock=clock,
            identity=identity,
            model=self._model(),
            members=members,
            discovery=settings.discovery and not _alone(settings),
            alone=_alone(settings),
            wrong_settings=wrong,
            crashed=tuple(self._crashed),
        )

    # --- what an agent knows better -----------------------------------------------------------------------

    def _agent(self) -> AgentFacts:
        return AgentFacts(problem=self._problem, keep_awake=self._settings.keep_awake)

    def _model(self) -> ModelFacts:
        return ModelFacts()

    async def _members(self, machine: Machine) -> tuple[MemberFacts, ...]:
        """Return the members stored in the home, each tried from this process."""
        kept, identity = await asyncio.gather(
            self._in_time(lambda: local_facts.kept_at(self._settings.home), SavedState()),
            self._in_time(lambda: local_facts.stored(self._settings.home)[0], None),
        )
        if identity is None or identity.membership is None:
            return ()
        others = [
            (entry.name or node_id[:8], local_facts.literal(kept.peers.get(node_id, ())))
            for node_id, entry in kept.beliefs.roster.members().items()
            if node_id != identity.node_id
        ]
        tried = await asyncio.gather(*(attempts(addresses) for _, addresses in others))
        return tuple(
            MemberFacts(name, "", False, False, local_facts.shared(ours, machine))
            for (name, _), ours in zip(others, tried, strict=True)
        )

    def _ports(self) -> tuple[PortFacts, ...]:
        """Return the ports an agent needs, and why it could not get one."""
        settings = self._settings
        if self._problem:
            return ()
        found = [local_facts.free("endpoint", "--http", settings.http_host, settings.http_port, bind)]
        if not _alone(settings):
            found.append(
                local_facts.free(
                    "control port", "--control", settings.control_host, settings.control_port, listen
                )
            )
        return tuple(port for port in found if port is not None)

    async def _heard(self) -> tuple[bool, str, tuple[str, ...]]:
        """Return whether discovery was tried, the problem if not, and the names found."""
        settings = self._settings
        usable = local_facts.usable(settings)
        if not settings.discovery or _alone(settings) or not usable:
            return False, "", ()
        names: set[str] = set()
        try:
            network = Network(usable, lambda name, there: names.add(name) if there else None)
            try:
                await network.ask()
                await asyncio.sleep(LISTEN_S)
            finally:
                await network.close(goodbye=False)
        except (OSError, ZeroconfError) as error:
            return False, f"other Macs cannot be found by multicast: {error}", ()
        return True, "", tuple(sorted(each.removesuffix(f".{SERVICE}").rpartition(" [")[0] for each in names))

    # --- what any process sees ----------------------------------------------------------------------------

    async def _network(self) -> NetworkFacts:
        loopback, (listened, problem, heard) = await asyncio.gather(
            local_facts.reaches_itself(), self._heard()
        )
        return NetworkFacts(
            loopback=loopback,
            multicast=local_facts.multicast(local_facts.usable(self._settings)),
            multicast_problem=problem,
            listened=listened,
            heard=heard,
            ports=self._ports(),
            beyond_loopback=not is_loopback(self._settings.http_host),
        )

    async def _identity(self) -> IdentityFacts:
        return await self._in_time(
            lambda: local_facts.identity_here(self._settings), IdentityFacts(problem=slow("the home"))
        )

    async def _wrong_settings(self) -> tuple[str, ...]:
        return await self._in_time(lambda: local_facts.wrong_settings(self._settings.home), ())

    async def _room(self) -> MemoryRoom:
        settings = self._settings
        memory = await asyncio.to_thread(look_at_memory)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = soft if self._agent().runs_here else hard  # an agent raises its own limit
        models = await self._in_time(local_facts.models_folder, settings.home)
        folders = {"mlxtp's own files": settings.home, "models": models}
        disks = [await self._disk(purpose, folder) for purpose, folder in folders.items()]
        return MemoryRoom(
            settings.limits.min_free_bytes,
            memory.critical,
            tuple(disks),
            _MANY if files == resource.RLIM_INFINITY else files,
        )

    async def _disk(self, purpose: str, folder: Path) -> Disk:
        return await self._in_time(
            lambda: local_facts.disk(purpose, folder), Disk(purpose, str(folder), None, slow("it"))
        )

    async def _firewall(self) -> FirewallFacts:
        if self._system == "darwin":
            program = local_facts.program_here()
            state, everything, app = await asyncio.gather(
                self._ask(probes.FIREWALL, "--getglobalstate"),
                self._ask(probes.FIREWALL, "--getblockall"),
                self._ask(probes.FIREWALL, "--getappblocked", program),
            )
            return local_facts.mac_firewall(state, everything, app)
        # Only root may read the rules, so an agent that is root keeps root's rights for this command.
        return local_facts.linux_firewall(await self._run_as_self("nft", ("list", "ruleset"), probes.ASK_S))

    async def _power(self) -> PowerFacts:
        if self._system != "darwin":
            return PowerFacts()
        said = await self._ask("pmset", "-g")
        reading = probes.parse_power(said.text)
        return PowerFacts(reading.value, problem_of("pmset", said, reading))

    async def _clock(self) -> ClockFacts:
        if self._system != "darwin":
            said = await self._ask("timedatectl", "show", "--property=NTPSynchronized")
            reading = probes.parse_timedatectl(said.text)
            return ClockFacts(synchronised=reading.value, problem=problem_of("timedatectl", said, reading))
        text = await self._in_time(lambda: local_facts.text_of(Path(probes.NTP_CONF)), "")
        server = probes.parse_ntp_conf(text) or "time.apple.com"
        answer = await self._ask("sntp", server)
        offset = probes.parse_sntp(answer.text)
        ahead_s = None if offset.value is None else -offset.value
        return ClockFacts(ahead_s, server, problem=problem_of(f"sntp {server}", answer, offset))

    async def _in_time(self, look: Callable[[], T], otherwise: T) -> T:
        return await in_time(look, otherwise, self._crashed.append)

    async def _ask(self, program: str, *arguments: str) -> Output:
        return await self._run(program, arguments, probes.ASK_S)


def _alone(settings: Settings) -> bool:
    return settings.alone or settings.ranks > 1
