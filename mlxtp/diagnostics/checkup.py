"""Collection of the doctor's facts about this machine: all at once, each with a time limit.

A command uses `Checkup` if no agent runs. An agent uses `admin.checkup`, because it sees the network as a
service does and has links to other members.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import ipaddress
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
from cryptography import x509
from zeroconf import Error as ZeroconfError

from ..api.api_keys import KeyFile
from ..api.endpoint import NEVER, OWN_CERTIFICATE, here_and_now
from ..api.server import bind
from ..cluster.state_file import FILE, SavedState, from_text
from ..config import Settings, is_loopback
from ..discovery.addresses import SERVICE, host_and_port
from ..discovery.mdns import Network, addresses_up, announcing_addresses, send_something
from ..errors import ConfigError, MlxtpError
from ..gateway.admission import AdmissionLimits, look_at_memory
from ..identity.store import Identity, Store
from ..placement import hardware
from ..placement import probe_macos as probes
from ..placement.hardware import RunProbe, run_as_self, run_command
from ..placement.probe_macos import NOT_INSTALLED, Output, ipv4, self_assigned
from ..wire.blocking import listen
from ..wire.cluster_messages import Machine
from .facts import (
    AgentFacts,
    Attempt,
    Certificate,
    FirewallFacts,
    IdentityFacts,
    MachineFacts,
    MemberFacts,
    ModelFacts,
    NetworkFacts,
    PortFacts,
    PowerFacts,
)
from .rows import examine, to_json

T = TypeVar("T")

LOOK_S = 5.0  #: Seconds to read files: a network disk may never reply.
TRY_S = 2.0  #: Seconds for one connection, which takes a millisecond within a network.
LISTEN_S = 1.5  #: Seconds that a command listens for other agents, which reply within half a second.
_DISCARD = 9  #: The discard port. No program listens on it.

Json = Mapping[str, Any]


# --- facts that any process can find: files, certificates, sockets. Nothing raises ------------------------


async def in_time(look: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """Return what `look` does, or `otherwise(why)` if it fails or takes LOOK_S. Its thread may go on."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    def tell(value: T) -> None:
        if not found.done():
            found.set_result(value)

    def run() -> None:
        try:
            value = look()
        except Exception as error:  # noqa: BLE001 - the thread's boundary: silence would pass for health
            value = otherwise(f"could not be read: {type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(tell, value)

    threading.Thread(target=run, daemon=True, name="checkup").start()
    try:
        async with asyncio.timeout(LOOK_S):
            return await found
    except TimeoutError:
        return otherwise(f"could not be read within {LOOK_S:g} s")


def program_here() -> str:
    """Return the program that the firewall knows. A framework's Python is another file than its name says."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process().exe() or sys.executable
    return sys.executable


def identity_here(settings: Settings) -> IdentityFacts:
    identity, problem = stored(settings.home)
    try:
        keys, keys_problem = len(KeyFile(settings.home).load()), ""
    except ConfigError as error:
        keys, keys_problem = 0, error.detail
    membership = identity.membership if identity is not None else None
    own = (membership.certificate, membership.authority) if membership is not None else ()
    names = zip(("this member", "the cluster"), map(x509.load_der_x509_certificate, own), strict=False)
    https, https_problem = _https(settings)
    return IdentityFacts(
        cluster_id=identity.cluster_id if identity is not None else "",
        problem=problem,
        certificates=(*(_certificate(*each) for each in names), *https),
        https_problem=https_problem,
        authority_here=identity is not None and identity.authority is not None,
        keys=keys,
        keys_problem=keys_problem,
        keys_asked=settings.api_keys != NEVER,
    )


def stored(home: Path) -> tuple[Identity | None, str]:
    store = Store(home)
    if not store.folder.exists():
        return None, ""
    try:
        return store.load(), ""
    except MlxtpError as error:
        return None, error.detail


def _https(settings: Settings) -> tuple[list[Certificate], str]:
    own = not settings.http_cert
    path = settings.home / OWN_CERTIFICATE if own else Path(settings.http_cert)
    if own and not (settings.http_tls and path.exists()):  # the first start makes it
        return [], ""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        return [], f"the certificate for HTTPS cannot be read: {path}: {error}"
    return [_certificate("HTTPS", found, renews=own)], ""


def _certificate(name: str, found: x509.Certificate, *, renews: bool = False) -> Certificate:
    return Certificate(name, found.not_valid_before_utc, found.not_valid_after_utc, renews)


def kept_at(home: Path) -> SavedState:
    """Return the home's saved state, an empty one if it is unreadable: the agent reports that."""
    try:
        return from_text((home / FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return SavedState()


# --- the firewall -----------------------------------------------------------------------------------------


def mac_firewall(state: Output, everything: Output, app: Output) -> FirewallFacts:
    on, all_in = probes.parse_firewall_state(state.text), probes.parse_block_all(everything.text)
    program = probes.parse_firewall_app(app.text)
    problem = problem_of("socketfilterfw", state, on)
    if on:
        problem = problem or problem_of("socketfilterfw --getblockall", everything, all_in)
        problem = problem or problem_of("socketfilterfw --getappblocked", app, program)
    return FirewallFacts(
        enabled=None if on is None else on > 0,
        blocks_all=bool(on) and (on == 2 if all_in is None else all_in),
        app=program or "",
        problem=problem,
    )


def linux_firewall(rules: Output) -> FirewallFacts:
    if rules == NOT_INSTALLED:
        return FirewallFacts(problem="nft is not installed, so the rules are not known")
    if rules.problem:
        return FirewallFacts(problem=f"nft list ruleset: {rules.problem}")
    return FirewallFacts(drops=probes.parse_nft(rules.text))


def problem_of(command: str, output: Output, found: object) -> str:
    """Return why a command's output left a fact unknown, or ""."""
    if found is not None:
        return ""
    said = output.text.strip().splitlines()[:1]
    return f"{command}: {output.problem or (said[0][:100] if said else 'it printed nothing')}"


# --- the network ------------------------------------------------------------------------------------------


def usable(settings: Settings) -> Mapping[str, int]:
    """Return this machine's addresses that others may use."""
    there, only = addresses_up(), settings.loopback
    return {at: number for at, number in there.items() if (at == only if only else not is_loopback(at))}


def literal(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses that need no name server, because a name server may not reply."""
    return tuple(each for each in addresses if ipv4(each.rpartition(":")[0]))


def multicast(usable: Mapping[str, int]) -> int | None:
    try:
        send_something(usable)
    except OSError as error:
        return error.errno or errno.EIO
    return 0 if usable else None


def sent(tries: Iterable[Attempt]) -> tuple[Attempt, ...]:
    """Send a packet to each address's discard port, to see whether it may leave this machine."""
    found = []
    for host in dict.fromkeys(each.rpartition(":")[0] for each in literal(t.address for t in tries)):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            try:
                sock.sendto(b"", (host, _DISCARD))
            except OSError as error:
                found.append(Attempt(host, error.strerror or str(error), error.errno or 0))
            else:
                found.append(Attempt(host))
    return tuple(found)


async def attempt(address: str) -> Attempt:
    """Connect to "ip:port" and hang up. Does not raise."""
    found = host_and_port(address)
    if found is None:
        return Attempt(address, "is not an address")
    try:
        async with asyncio.timeout(TRY_S):
            _, writer = await asyncio.open_connection(*found)
    except TimeoutError:
        return Attempt(address, f"no answer within {TRY_S:g} s")
    except OSError as error:
        number = error.errno if error.errno is not None and error.errno > 0 else 0
        return Attempt(address, os.strerror(number) if number else str(error)[:100], number)
    writer.transport.abort()
    return Attempt(address)


async def attempts(addresses: Iterable[str]) -> tuple[Attempt, ...]:
    return tuple(await asyncio.gather(*map(attempt, addresses)))


async def reaches_itself() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:  # the system accepts for it
            return not (await attempt(f"127.0.0.1:{server.getsockname()[1]}")).problem
    except OSError:
        return False


def is_mlxtp(host: str, port: int) -> bool:
    """Return True if an endpoint of mlxtp answers there. Blocks for up to `TRY_S`."""
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=TRY_S)) as connection:
        try:
            connection.request("GET", "/health")
            told = json.loads(connection.getresponse().read(1 << 16))
        except (OSError, http.client.HTTPException, ValueError):
            return False
    return isinstance(told, dict) and {"state", "ranks"} <= told.keys()


def free(name: str, flag: str, host: str, port: int, take: Callable[[str, int], socket.socket]) -> PortFacts:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        take(host, port).close()
    except (OSError, ConfigError) as error:
        problem = error.detail if isinstance(error, ConfigError) else error.strerror or str(error)
        return PortFacts(name, flag, address, ours=False, problem=problem, by_mlxtp=is_mlxtp(host, port))
    return PortFacts(name, flag, address, ours=False)


def shared(tries: Iterable[Attempt], machine: Machine) -> tuple[Attempt, ...]:
    """Mark each try whose address is in a network of `machine`, the machine that tried."""
    networks = [
        ipaddress.IPv4Network((each.address, each.prefix), strict=False)
        for each in machine.interfaces
        if each.up and not self_assigned(each.address)
    ]

    def is_shared(address: str) -> bool:
        host = ipv4(address.rpartition(":")[0])
        return bool(host) and any(ipaddress.IPv4Address(host) in network for network in networks)

    return tuple(replace(each, shared=is_shared(each.address)) for each in tries)


# --- all facts ---------------------------------------------------------------------------------------------


class Checkup:
    """Facts that this process can see. `problem`: why the agent of this home could not be queried."""

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

    async def report(self) -> Json:
        """Return the findings by row. `docs/doctor.md` names the fields."""
        facts = await self.facts()
        return to_json(examine(facts), facts)

    async def facts(self) -> MachineFacts:
        """Collect all facts. Takes some seconds, most of them for `system_profiler`."""
        settings = self._settings
        (machine, identity, network), (memory, firewall, power) = await asyncio.gather(
            asyncio.gather(
                hardware.probe(system=self._system, run=self._run), self._identity(), self._network()
            ),
            asyncio.gather(asyncio.to_thread(look_at_memory), self._firewall(), self._power()),
        )
        agent = self._agent()
        ports = (replace(port, formations=agent.formations.get(port.rdma, 0)) for port in machine.ports)
        machine = replace(machine, ports=tuple(ports))
        members = await self._members(machine)
        tried = [each for member in members for each in member.ours]
        return MachineFacts(
            name=settings.name or socket.gethostname().partition(".")[0],
            now=here_and_now(),
            machine=machine,
            agent=agent,
            program=program_here(),
            min_free_bytes=AdmissionLimits().free_bytes,
            pressure_critical=memory.critical,
            network=replace(network, unicast=await asyncio.to_thread(sent, tried)),
            firewall=firewall,
            power=power,
            identity=identity,
            model=self._model(),
            members=members,
            discovery=settings.discovery and not _alone(settings),
            alone=_alone(settings),
        )

    # --- what an agent knows better -----------------------------------------------------------------------

    def _agent(self) -> AgentFacts:
        return AgentFacts(problem=self._problem, keep_awake=self._settings.keep_awake)

    def _model(self) -> ModelFacts:
        return ModelFacts()

    async def _members(self, machine: Machine) -> tuple[MemberFacts, ...]:
        """Return the home's stored members, after a connection from this process to each."""
        kept, identity = await asyncio.gather(
            in_time(lambda: kept_at(self._settings.home), lambda _: SavedState()),
            in_time(lambda: stored(self._settings.home)[0], lambda _: None),
        )
        if identity is None or identity.membership is None:
            return ()
        others = {
            node_id: entry.name or node_id[:8]
            for node_id, entry in kept.beliefs.roster.members().items()
            if node_id != identity.node_id
        }
        tried = await asyncio.gather(*(attempts(literal(kept.peers.get(each, ()))) for each in others))
        named = zip(others.values(), tried, strict=True)
        return tuple(MemberFacts(name, "", False, False, shared(ours, machine)) for name, ours in named)

    async def _ports(self) -> tuple[PortFacts, ...]:
        settings = self._settings
        own = [("endpoint", "--http", settings.http_host, settings.http_port, bind)]
        if not _alone(settings):
            own.append(("control port", "--control", settings.control_host, settings.control_port, listen))
        # An agent that cannot be queried still holds its ports.
        tried = [asyncio.to_thread(free, *each) for each in own if each[3] and not self._problem]
        return tuple(await asyncio.gather(*tried))

    async def _heard(self) -> tuple[bool, str, tuple[str, ...]]:
        """Return whether discovery was tried, the problem if it failed, and the names found."""
        settings, here, names = self._settings, usable(self._settings), set[str]()
        if not settings.discovery or _alone(settings) or not here:
            return False, "", ()
        try:
            network = Network(
                here, announcing_addresses(here), lambda name, there: names.add(name) if there else None
            )
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
        loopback, (listened, problem, heard) = await asyncio.gather(reaches_itself(), self._heard())
        return NetworkFacts(
            loopback=loopback,
            multicast=multicast(usable(self._settings)),
            multicast_problem=problem,
            listened=listened,
            heard=heard,
            ports=await self._ports(),
            beyond_loopback=not is_loopback(self._settings.http_host),
        )

    async def _identity(self) -> IdentityFacts:
        return await in_time(
            lambda: identity_here(self._settings), lambda why: IdentityFacts(problem=f"the home {why}")
        )

    async def _firewall(self) -> FirewallFacts:
        if self._system == "darwin":
            program = program_here()
            state, everything, app = await asyncio.gather(
                self._ask(probes.FIREWALL, "--getglobalstate"),
                self._ask(probes.FIREWALL, "--getblockall"),
                self._ask(probes.FIREWALL, "--getappblocked", program),
            )
            return mac_firewall(state, everything, app)
        # Only root may read the rules, so an agent that runs as root does not drop its rights for this.
        return linux_firewall(await self._run_as_self("nft", ("list", "ruleset"), probes.ASK_S))

    async def _power(self) -> PowerFacts:
        if self._system != "darwin":
            return PowerFacts()
        said = await self._ask("pmset", "-g")
        used = probes.parse_power(said.text)
        return PowerFacts(used or {}, problem_of("pmset", said, used))

    async def _ask(self, program: str, *arguments: str) -> Output:
        return await self._run(program, arguments, probes.ASK_S)


def _alone(settings: Settings) -> bool:
    return settings.alone or settings.ranks > 1
