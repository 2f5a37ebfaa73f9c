"""The agent of one machine: builds model, ranks and endpoint, and shuts them down."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.types import ASGIApp

from .admin.checkup import AgentCheckup
from .admin.handlers import Admin, announce, announced
from .admin.metrics import observed
from .admin.parts import AgentParts
from .api.app import create_app
from .api.backend import Health
from .api.endpoint import Endpoint, open_endpoint
from .api.server import serve
from .background import CLOSE_S, Background, end_within, watched_loop
from .cluster.authority import AuthorityKeeping
from .cluster.cluster_state import NO_DEPLOYMENTS, PINNED, YIELDS
from .cluster.control_port import ControlPort, Dialer, TokenIssuing, bind_control
from .cluster.node import ClusterNode
from .cluster.peer_reports import MachineReports, RoundTripTimes
from .cluster.state_file import forget
from .config import Settings, told
from .errors import MANY_FILES, RAISE_FILES, Code, ConfigError, GroupError, MlxtpError, ModelError, in_words
from .gateway.admission import AdmissionLimits, FreeMemory, look_at_memory
from .gateway.gateway import Gateway
from .groups import boot_record, overview
from .groups.controller import RemoteRanks
from .groups.coordinator import Coordinator
from .groups.fabric import FabricBench, FabricResults
from .groups.forwarding import serve_requests
from .groups.group import Group, SharedParts
from .groups.groups import Drain, Groups, group_of
from .groups.health import ServingState
from .groups.hosted_rank import HostedRanks
from .groups.lifecycle import StageListener
from .groups.machines import Machines
from .groups.on_request import OnRequest
from .groups.overview import MemoryCheck, ReplicaLoads
from .groups.ranks import WORKER, Worker
from .groups.selection import ModelSelection
from .groups.sleep import KeepAwake, watch_sleep
from .groups.warm_pool import WarmPool, log_lines
from .identity.join_network import JoinResult, enter
from .identity.private_files import FILE_MODE, check_home, make_folder, temporary_folder
from .identity.store import Store
from .models import disk_cache
from .models.download import apart, download
from .models.inspect import find_model, full_name, hub_folder, in_folders, inspect, is_hub_id, lasting_name
from .models.local_model import LocalModels
from .models.manifest import gigabytes
from .models.model_transfer import StoredModels
from .models.transfers import TransferCoordinator
from .placement import hardware
from .wire.cluster_messages import Machine

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.1  #: Seconds between two looks at a model that is not ready.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True, eq=False)
class Agent:
    """A running agent. `founded`: it founded its cluster. `on_left` is called once its ranks have ended."""

    #: URL of the endpoint for programs of this Mac, such as http://127.0.0.1:52415.
    url: str
    warm_pool: WarmPool
    drain: Drain
    parts: AgentParts
    founded: bool = False
    #: The endpoint's HTTPS certificate (PEM); "" for HTTP.
    certificate: str = ""
    #: Key of this Mac's own commands. The endpoint always accepts it.
    key: str = field(default="", repr=False)
    on_left: Callable[[], None] = lambda: None

    @property
    def over(self) -> asyncio.Future[None]:
        """Done once this agent has left its cluster, or a bug ended it."""
        return self.parts.node.over

    async def wait_ready(self) -> None:
        """Wait until the first deployment is ready, or `over`. Raises the MlxtpError that prevents it.

        In a cluster a missing model may still arrive, so it raises nothing.
        """
        groups, alone = self.parts.groups, self.parts.node.alone
        while not self.over.done():
            group = groups.shown
            status = group.supervisor.status
            if status.state is ServingState.READY:
                return
            if status.state in (ServingState.FAILED, ServingState.STOPPED):
                raise status.reason or GroupError("the ranks were stopped before they were ready")
            if alone and (why := group.scope.model.problem or group.unplanned):
                raise ModelError(why)
            await asyncio.wait({self.over}, timeout=LOOK_S)
        self.over.result()


@asynccontextmanager
async def running_agent(
    settings: Settings,
    on_stage: StageListener = lambda _stage, _seconds: None,
    worker: Sequence[str] = WORKER,
    *,
    spares: bool = True,
) -> AsyncIterator[Agent]:
    """Run an agent until the context ends. Raises ConfigError and ModelError before anything starts."""
    heard = log_lines if settings.log_file or settings.log_format == "json" else None
    watched = watched_loop(settings.log_format, settings.log_file)
    with watched, _own_home(settings.home), open_endpoint(settings) as endpoint:
        wanted = settings.ranks if spares else 0
        async with (
            WarmPool(worker, settings.home / "run", wanted, heard) as warm_pool,
            _entered(settings) as entered,
            _running(entered, endpoint, on_stage, warm_pool) as agent,
        ):
            yield agent


@dataclass(frozen=True, slots=True)
class _Entered:
    """The agent's cluster. `sock` is its control port; an agent that runs alone has none."""

    settings: Settings
    store: Store
    result: JoinResult
    sock: socket.socket | None = None


@asynccontextmanager
async def _entered(settings: Settings) -> AsyncIterator[_Entered]:
    """Join, found or reenter a cluster, or be one alone. Raises UserError, ModelError."""
    settings = replace(
        settings,
        name=settings.name or socket.gethostname().partition(".")[0],
        model=full_name(settings.model, settings.model_folders),
        draft_model=full_name(settings.draft_model, settings.model_folders),
    )
    await _check_folders(settings)
    if not settings.cluster:
        for name in filter(None, (in_folders(settings.model, settings.model_folders), settings.draft_model)):
            await _download(name)
        with temporary_folder("mlxtp-") as folder:
            store = Store(folder)
            yield _Entered(settings, store, JoinResult(store.found_cluster()))
        return
    store = Store(settings.home)
    with contextlib.closing(bind_control(settings.control_host, settings.control_port)) as sock:
        result = await enter(settings, store, partial(forget, settings.home))
        settings = replace(settings, peers=(*settings.peers, *result.peers))
        yield _Entered(settings, store, result, sock)


async def _download(name: str) -> None:
    """Download a model of the Hub if it is not here. Raises ModelError if it cannot be served."""
    if not is_hub_id(name) or await asyncio.to_thread(hub_folder, name) is not None:
        return
    servable = await apart(partial(inspect, name, ask_hub=True))
    reported = 0

    def on_progress(held: int, total: int) -> None:
        nonlocal reported
        if total and 10 * held // total > reported:
            reported = 10 * held // total
            log.info("%s: %s of %s are here", name, gigabytes(held), gigabytes(total))

    log.info("%s comes from the Hub", name)
    await download(name, on_progress, servable.manifest)


@asynccontextmanager
async def _running(
    entered: _Entered, endpoint: Endpoint, on_stage: StageListener, warm_pool: WarmPool
) -> AsyncIterator[Agent]:
    settings, store = entered.settings, entered.store
    machine = _counted(settings.home, await hardware.probe(settings.loopback))
    port = entered.sock.getsockname()[1] if entered.sock is not None else 0
    node = ClusterNode(
        settings,
        entered.result.identity,
        machine,
        home=store.folder.parent,
        http=endpoint.summary,
        listens_at=partial(_control_addresses, settings, port),
    )
    parts = build_parts(node, store, warm_pool, on_stage)
    dialer: Dialer | None = None
    work = [node.live()]
    if entered.sock is not None:
        requests = partial(serve_requests, gateway=parts.gateway)
        control_port = ControlPort(entered.sock, store.credentials, node, parts.tokens, requests)
        dialer = Dialer(node, store.credentials, port, parts.readings.rewired)
        work += [control_port.run(), dialer.run()]
    _deploy_first(node, entered)
    stop = asyncio.Event()
    admin = Admin(parts, store)
    admin.checkup = AgentCheckup(settings, endpoint, parts, dialer)
    admin.api_keys, admin.started_with = endpoint.keys, told(settings)
    access = endpoint.access(admin.key)
    app = create_app(parts.gateway, admin=admin, observed=admin.observer, access=access)
    bug = partial(_report_bug, node.end)
    serving = Background(bug).start(
        _serve(observed(app, parts, endpoint.keys), endpoint, stop, settings, admin.key), "the endpoint"
    )

    def woke(slept_s: float) -> None:
        parts.groups.woke(slept_s)
        parts.readings.rewired()
        if dialer is not None:
            dialer.woke()

    def has_rank() -> bool:
        return parts.groups.in_epoch or bool(parts.hosted.ranks)

    keep_awake = KeepAwake() if settings.keep_awake and sys.platform == "darwin" else None
    work.append(watch_sleep(woke, has_rank, keep_awake))
    tasks = Background(bug)
    parts.groups.start()
    for each in work:
        tasks.start(each, "a part of this agent")
    certificate, key = endpoint.certificate, admin.key
    agent = Agent(endpoint.url, warm_pool, admin.draining, parts, entered.result.founded, certificate, key)
    try:
        with announced(settings.home, endpoint.url, key, certificate):
            yield agent
    finally:
        admin.close()  # ends event streams
        await _end_parts(parts, tasks)
        agent.on_left()
        stop.set()
        await asyncio.wait({serving})  # until clients have their last replies


def _deploy_first(node: ClusterNode, entered: _Entered) -> None:
    settings = entered.settings
    if entered.result.joined and settings.model_given:
        log.warning("--model is ignored: `mlxtp serve` sets the model of a cluster")
    elif settings.model_given or entered.result.founded or node.alone:
        keep_s = PINNED if settings.model_given else YIELDS
        node.desired.serve(
            lasting_name(settings.model), nodes=settings.nodes, keep_s=keep_s, split=settings.split
        )


async def _end_parts(parts: AgentParts, tasks: Background) -> None:
    parts.gateway.close(GroupError("the server is shutting down", Code.SHUTTING_DOWN))
    await asyncio.wait({tasks.start(parts.groups.close(), "the end of the groups")})
    # Ranks for other Macs end, and each link gets its goodbye.
    await asyncio.wait({tasks.start(parts.close(), "the end of the parts")})
    await tasks.close()  # from here on no heartbeat, listening or dialing


def make_gateway(
    settings: Settings, health: Callable[[str], Health], free_bytes: Callable[[], int] = lambda: 0
) -> Gateway:
    limits, memory = settings.limits, FreeMemory(lambda: look_at_memory(free_bytes()))
    bounds = AdmissionLimits(limits.max_open_requests)
    return Gateway(health, bounds, limits.recovery_s, limits.deadline_s, memory)


def _counted(home: Path, machine: Machine) -> Machine:
    return replace(boot_record.with_counts(home, machine), caches=disk_cache.ranks_in(home))


def build_parts(
    node: ClusterNode,
    store: Store,
    worker: Worker = WORKER,
    on_stage: StageListener = lambda _stage, _seconds: None,
) -> AgentParts:
    """Build all parts of an agent. Each registers with the node for what it handles."""
    gateway = make_gateway(
        node.settings,
        lambda model: overview.health(node, groups, gateway, model),
        lambda: node.links.reports.of(Machine)[node.node_id].free_bytes,
    )
    readings = MachineReports(node, partial(_counted, node.home))
    round_trips, credentials = RoundTripTimes(node), store.credentials
    keeping, tokens = AuthorityKeeping(node, store), TokenIssuing(node)
    transfers = TransferCoordinator(node, credentials, StoredModels(node))
    models = LocalModels(node, transfers)
    hosted = HostedRanks(node, models.folder, node.replica.epoch, worker)
    results = FabricResults(node)
    machines = Machines(node, results)
    remote, lives = RemoteRanks(node), Background(partial(_report_bug, node.end))
    shared = SharedParts(
        node, gateway, models, machines, remote, readings, credentials, worker, on_stage, lives
    )
    groups = Groups(node, gateway, hosted, partial(Group, shared=shared))
    MemoryCheck(node, machines, groups)
    ReplicaLoads(node, gateway, groups)
    coordinator = Coordinator(node, models, machines, groups)
    node.rounds.add(coordinator.step)
    node.rounds.add(groups.decide)
    selection = ModelSelection(node, transfers, machines)
    on_request = OnRequest(node, gateway, groups, machines)
    models.resolve(NO_DEPLOYMENTS, node.desired.table)
    groups.sync()
    return AgentParts(
        node,
        readings,
        round_trips,
        keeping,
        tokens,
        transfers,
        models,
        gateway,
        hosted,
        results,
        machines,
        groups,
        coordinator,
        FabricBench(node, gateway, lambda name: group_of(groups, name).supervisor, results),
        selection,
        on_request,
    )


async def _check_folders(settings: Settings) -> None:
    """Raise ModelError if the user named a folder that has no model."""
    named = settings.model_given or not settings.cluster  # alone, an agent needs the default model
    for name in (settings.model if named else "", settings.draft_model):
        if name and not is_hub_id(name):
            await find_model(in_folders(name, settings.model_folders))


async def _serve(app: ASGIApp, endpoint: Endpoint, stop: asyncio.Event, settings: Settings, key: str) -> None:
    tls = endpoint.tls.context if endpoint.tls is not None else None
    tell = partial(announce, settings.home, endpoint.url, key)
    renewing = asyncio.create_task(endpoint.keep_certificate(tell))
    keeping = [renewing, *([asyncio.create_task(endpoint.keys.keep())] if endpoint.keys is not None else ())]
    try:
        await serve(app, endpoint.sock, stop, tls=tls)
    finally:
        for each in keeping:
            each.cancel()
        await asyncio.wait(keeping)


def _control_addresses(settings: Settings, port: int, machine: Machine) -> tuple[str, ...]:
    if settings.control_host != "0.0.0.0":
        return (f"{settings.control_host}:{port}",)
    found = tuple(f"{each.address}:{port}" for each in machine.interfaces if each.up)[:16]
    return found or (f"127.0.0.1:{port}",)


def _report_bug(end: Callable[[MlxtpError], None], _: asyncio.Task[None], error: BaseException) -> None:
    """End the agent after a bug in one of its parts, so that the service restarts it."""
    log.critical("a part of this agent ended", exc_info=error)
    end(GroupError(f"{type(error).__name__}: {error}", Code.INTERNAL))


async def stopped_by_signal(work: Coroutine[Any, Any, T]) -> tuple[T | None, bool]:
    """Run `work` to its end, or for CLOSE_S after a signal. Return its result, and True after a signal."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        task.cancel()
        end_within(CLOSE_S)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        return await task, False
    except asyncio.CancelledError:
        return None, True


def drain_on_signal(drain: Drain, within_s: float) -> None:
    """Drain at the first signal. The next one ends the drain; later ones change nothing."""
    loop = asyncio.get_running_loop()

    def first(number: signal.Signals) -> None:
        for each in _SIGNALS:
            loop.add_signal_handler(each, drain.start, 0.0)
        drain.start(within_s)
        if number == signal.SIGINT and drain.now()["open_requests"]:
            log.info("open requests get %g s to end; a second Ctrl-C ends at once", within_s)

    for number in _SIGNALS:
        loop.add_signal_handler(number, first, number)


@contextmanager
def _own_home(home: Path) -> Iterator[None]:
    """Create the home, and lock it for this agent until the process ends."""
    with in_words(ConfigError, f"--home {home}"):
        make_folder(home)
        check_home(home, ("run", "lock", disk_cache.folder_in(home).name))
        make_folder(home / "run")
        lock = os.fdopen(os.open(home / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE), "w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another mlxtp node uses {home}; give each its own folder with --home"
            ) from None
        for left in (home / "run").glob("epoch-*"):  # left by an agent that was killed
            shutil.rmtree(left, ignore_errors=True)
        _allow_many_files()
        yield


def _allow_many_files() -> None:
    """Raise the limit of open files: macOS allows 256. Raises ConfigError if ranks could not start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    low = hard != endless and hard < MANY_FILES
    if low or (soft != endless and soft < MANY_FILES):
        try:  # root may raise the hard limit too
            resource.setrlimit(resource.RLIMIT_NOFILE, (MANY_FILES, MANY_FILES if low else hard))
        except (ValueError, OSError):
            raise ConfigError(
                f"at most {hard} files may be open here, and ranks need {MANY_FILES}; {RAISE_FILES}"
            ) from None
