"""Models of the Hub, once for the whole cluster: one member gets a model, the others copy it from there.

Whoever wants a model tells all what it has of it (`ModelHeld`); who does not want it answers with what is on
its disk. When all have spoken, the coordinator names the one to copy from (`ModelLender`): who has all of it,
or who is to ask the Hub. The others copy while it is still getting it. When it fails or goes, the coordinator
names another one, and what has come counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..cluster.surroundings import Surroundings
from ..errors import Code, LinkError, MlxtpError, ModelError, ProtocolError, why_not_written
from ..placement.topology import MemberMachine, Topology
from ..wire.certificates import NodeIdentity
from ..wire.cluster_messages import MAX_STORED, ModelHeld, ModelLender, ModelPull, ModelsHere, StoredModel
from ..wire.tls import Credentials
from . import hub_client, peer_copy
from .daemon_thread import apart
from .download import Fetch
from .hub_cache import Damaged, Repo, Stopped, free_bytes, gigabytes, hub_name
from .inventory import revisions_here
from .manifest import Manifest, is_commit
from .seeder import Holding, elect_seeder

log = logging.getLogger(__name__)

TOLD_S = 1.0
"""How often the others hear how far a model is here."""
ALL_SAY_S = 10.0
"""How long the coordinator waits for the word of everybody present: a disk that sleeps takes seconds."""
NO_WORD_S = 15.0
"""How long a member waits for the coordinator's, and then sees for itself."""
NO_FILES_S = 120.0
"""How long it waits for the one that was named to know the files."""
AGAIN_S = 1.0
"""After a copy that was cut short, until the next try."""
TRIES = 4
"""How often a lender is tried in vain before this Mac asks the Hub itself."""
AT_ONCE = 4
"""Models that come to this Mac at one time; the next ones wait for their turn."""
MAX_JOBS = 256
"""Of which anything is kept."""
MAX_ASKED = 8
"""Models that come to this Mac at one time by the word of one other member."""
CLOSE_S = 2.0
"""How long this agent's end waits for threads that wait for the network."""
RATE_S = 10.0
"""Over how long speeds are told."""


@dataclass(slots=True)
class TransferRate:
    """Bytes per second of what comes."""

    seen: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now: float, held: int) -> None:
        """So much is there now."""
        self.seen.append((now, held))
        while now - self.seen[0][0] > RATE_S:
            self.seen.popleft()

    @property
    def bytes_per_s(self) -> float:
        """Over the last seconds; 0 until that is known."""
        (began, had), (now, has) = (self.seen[0], self.seen[-1]) if self.seen else ((0.0, 0), (0.0, 0))
        return max(has - had, 0) / (now - began) if now > began else 0.0


class _Transfer:
    """One model, as long as this agent runs. `refs` are the branches and tags that are to name what comes."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.repo, self.revision = hub_name(model)
        self.refs: set[str] = set()
        self.of_hub: set[str] = set()
        """Those of which the Hub itself said here that they are this commit."""
        self.own: Holding | None = None
        """None until somebody here or elsewhere wanted it."""
        self.reported: ModelHeld | None = None
        self.reported_at = 0.0
        self.others: dict[str, ModelHeld] = {}
        self.lender: str | None = None
        """Whom the coordinator named; None until it has."""
        self.began = time.monotonic()
        self.fetch: Fetch | None = None
        self.task: asyncio.Task[Path] | None = None
        self.waiting = 0
        self.inspecting = False
        """Whether the disk is looked at, because somebody else wants it."""
        self.everywhere = False
        """Whether it was asked for on all Macs, and so goes on when somebody has it later."""
        self.speeds: dict[str, TransferRate] = {}
        self.changed = asyncio.Event()

    @property
    def runs(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def complete(self) -> bool:
        """Whether all of it was here when it was last asked for."""
        task = self.task
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    @property
    def failure(self) -> str:
        """Why it did not come when it was last asked for."""
        task = self.task
        if task is None or not task.done() or task.cancelled() or (error := task.exception()) is None:
            return ""
        return error.detail if isinstance(error, MlxtpError) else f"{type(error).__name__}: {error}"

    @property
    def ends(self) -> bool:
        """Whether it was told to stop, and has not yet."""
        return self.task is not None and not self.task.done() and bool(self.task.cancelling())


class TransferCoordinator:
    """Everything runs in the agent's event loop, but what reads the disk or waits for the network."""

    def __init__(self, cluster: Surroundings) -> None:
        self.credentials: Credentials | None = None
        self.stored: dict[str, tuple[StoredModel, ...]] = {}
        """What each other node has on its disk."""
        self._cluster = cluster
        self._jobs: dict[str, _Transfer] = {}
        self._lender: peer_copy.PeerServer | None = None
        self._here: tuple[StoredModel, ...] = ()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._line: list[_Transfer] = []
        """What comes now (the first AT_ONCE), and what waits for its turn."""
        self._asked: Counter[str] = Counter()
        """How many models come by the word of each other member."""
        self._failures: set[str] = set()
        """Whose words were refused, so that the log says it once."""

    # --- what is asked -------------------------------------------------------------------------------

    async def get(self, model: str) -> Path:
        """OWNER/NAME[@REVISION] on this Mac: what is here or on another member, else from the Hub.

        Raises ModelError when it cannot be had. Whoever is cancelled here ends the work if nobody else waits.
        """
        return await self._had(self._job(model))

    async def _had(self, job: _Transfer, *refs: str) -> Path:
        job.waiting += 1
        try:
            while job.task is not None and job.ends:
                await asyncio.wait({job.task})
            return await asyncio.shield(self._run(job, *refs))
        finally:
            job.waiting -= 1
            if not job.waiting and job.runs and not job.ends:
                self._stop(job)

    def _run(self, job: _Transfer, *refs: str) -> asyncio.Task[Path]:
        """Begin, unless it runs."""
        if job.task is None or job.task.done():
            job.own, job.refs = None, set()
            job.task = asyncio.ensure_future(self._get(job))
            job.task.add_done_callback(_ended)
        job.refs |= {ref for ref in (job.revision, *refs) if not is_commit(ref)}
        return job.task

    async def pull(self, model: str, *, everywhere: bool) -> str:
        """Begin to get what the Hub has under this name now; returns the name by which `progress` knows it.

        Where the Hub cannot be asked, what members have counts. Raises ModelError.
        """
        repo, revision = hub_name(model)
        commit = ""
        with contextlib.suppress(ModelError):
            commit = (await apart(partial(hub_client.look_up, repo.name, revision))).revision
        name = f"{repo.name}@{commit}" if commit else model
        if commit:
            self._job(name).of_hub.add(revision)
        self._begin(name, revision, everywhere=everywhere)
        if everywhere:
            self._cluster.links.broadcast(ModelPull(model, commit))
        return name

    def _begin(self, name: str, *refs: str, everywhere: bool) -> asyncio.Task[Path]:
        """What was told of it before counts no more. Raises ModelError when too much is under way."""
        job = self._job(name)
        job.everywhere = everywhere or job.everywhere
        if job.ends:
            job.own = None
        else:
            self._run(job, *refs)
        if everywhere:  # the others try it again as well
            job.others = {node: replace(word, problem="") for node, word in job.others.items()}
        task = asyncio.ensure_future(self._had(job, *refs))
        self._tasks.add(task)
        task.add_done_callback(partial(self._pulled, job.repo.name))
        return task

    def _pulled(self, name: str, task: asyncio.Task[Path]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.warning("%s", error.detail if isinstance(error, MlxtpError) else error)
        self.changed(name)

    def changed(self, name: str) -> None:
        """Files of OWNER/NAME on this disk are others than before."""
        self.report_stored()
        self._cluster.model.files_arrived(name)

    def progress(self, model: str) -> list[dict[str, Any]]:
        """How far each member that wants a model is: bytes, bytes per second, seconds left."""
        job = self._jobs.get(model)
        if job is None:
            return []
        cluster = self._cluster
        mine = job.own or (Holding() if job.runs else None)
        if why := job.failure:
            mine = mine or Holding()
            mine = replace(mine, wants=True, problem=mine.problem or why)
        rows = [(cluster.node_id, mine)] if mine is not None else []
        rows += [(node, _held(word)) for node, word in sorted(job.others.items())]
        found = []
        for node, held in rows:
            came = held.complete or (
                node == cluster.node_id and job.complete and held.revision and not held.total
            )
            if not (held.wants or (came and not held.total)):
                continue
            speed = job.speeds[node].bytes_per_s if node in job.speeds else 0.0
            left_s = (held.total - held.held) / speed if speed and held.total else None
            found.append(
                {
                    "node_id": node,
                    "self": node == cluster.node_id,
                    "name": cluster.name_of(node),
                    "lender": cluster.name_of(job.lender) if job.lender not in (None, "", node) else "",
                    "held_bytes": held.held,
                    "total_bytes": held.total,
                    "bytes_per_s": round(speed),
                    "left_s": left_s if left_s is None else round(left_s),
                    "waits": node == cluster.node_id and job in self._line[AT_ONCE:],
                    "complete": bool(came),
                    "problem": held.problem,
                }
            )
        return found

    def progress_text(self, model: str, node_id: str = "") -> str:
        """How far a model is on its way to a node, this one unless another is named, for people; or empty."""
        node_id = node_id or self._cluster.node_id
        rows = [row for row in self.progress(model) if row["node_id"] == node_id]
        coming = rows and not rows[0]["complete"] and not rows[0]["problem"]
        return f"{model} is on its way: {described(rows[0])}" if coming else ""

    def has(self, node_id: str, model: str) -> bool:
        """Whether another member has OWNER/NAME or OWNER/NAME@COMMIT complete, as far as it has told.

        Branches and tags are not told.
        """
        name, _, revision = model.partition("@")
        return any(
            each.complete and each.name == name and revision in ("", each.revision)
            for each in self.stored.get(node_id, ())
        )

    def is_elsewhere(self, model: str) -> bool:
        """Whether any other member has it."""
        return any(self.has(node_id, model) for node_id in self.stored)

    def under_way(self) -> list[str]:
        """The models that come to this Mac now, by the names that `progress` knows."""
        return [
            name for name, job in self._jobs.items() if job.runs and job.own is not None and job.own.wants
        ]

    def is_getting(self, name: str) -> bool:
        """Whether this Mac is getting OWNER/NAME, as its disk spells that, or lends it."""
        return any(
            job.repo.as_here().name == name and (job.runs or (self._lender is not None and self._needed(job)))
            for job in self._jobs.values()
        )

    # --- one model -----------------------------------------------------------------------------------

    def _job(self, model: str) -> _Transfer:
        """Raises ModelError for what is no name, and when too much is under way."""
        if model not in self._jobs:
            found = _Transfer(model)
            if len(self._jobs) >= MAX_JOBS:
                self._jobs = {name: job for name, job in self._jobs.items() if self._is_busy(job)}
            if len(self._jobs) >= MAX_JOBS:
                raise ModelError(
                    f"{MAX_JOBS} models are under way here; ask for {model} when some have come",
                    Code.NOT_READY,
                )
            self._jobs[model] = found
        return self._jobs[model]

    def _is_busy(self, job: _Transfer) -> bool:
        return job.runs or job.inspecting or self._lends(job)

    def _stop(self, job: _Transfer) -> None:
        if job.fetch is not None:
            job.fetch.stop()
        if job.task is not None:
            job.task.cancel()
        if job.own is not None:
            job.own = replace(job.own, wants=False)
            self._report(job)

    async def _get(self, job: _Transfer) -> Path:
        job.lender, job.began = None, time.monotonic()
        here, mine = await asyncio.to_thread(_look, job.repo, job.revision, True)
        job.own = mine
        if here is not None and not mine.total:
            await self._refer(job, here)
            return here
        self._report(job)
        tries, copied = 0, False
        while True:
            lender = await self._named(job, here is not None)
            copied = copied or lender != self._cluster.node_id
            if lender == self._cluster.node_id and here is not None:
                break
            other = job.others.get(lender)
            if here is not None and other is not None and other.revision == mine.revision:
                break
            try:
                here = await self._bring(job, lender if tries < TRIES else self._cluster.node_id)
                break
            except Stopped:
                continue  # another one is to be copied from
            except ModelError as error:
                job.own = replace(job.own or mine, problem=error.detail[:1000])
                self._report(job)
                hopeless = error.code is not Code.MODEL_NOT_FOUND or tries >= TRIES
                if hopeless or not await self._another(job, patient=copied):
                    raise
            except (LinkError, ProtocolError, Damaged) as error:
                lies = isinstance(error, Damaged) or error.code is Code.NOT_AUTHENTIC
                tries = TRIES if lies else tries + 1
                log.warning("%s from %s: %s", job.model, self._cluster.name_of(lender), error)
                await asyncio.sleep(AGAIN_S)
        await self._refer(job, here)
        _, job.own = await asyncio.to_thread(_look, job.repo, here.name, True)
        self._report(job)
        return here

    async def _refer(self, job: _Transfer, here: Path) -> None:
        """Whoever names a branch or tag by which it was asked for gets this commit. Raises ModelError."""
        repo, seen = job.repo, set[str]()
        while wrong := {ref for ref in job.refs - seen if repo.commit(ref) != here.name}:
            seen |= wrong
            try:
                for refs, by_hub in ((wrong & job.of_hub, True), (wrong - job.of_hub, False)):
                    refer = partial(repo.refer, refs, here.name, by_hub=by_hub)
                    await asyncio.to_thread(refer, lambda: not job.runs or job.ends)
            except OSError as error:
                raise ModelError(f"{repo.name}: {why_not_written(error, repo.cache)}") from None

    async def _bring(self, job: _Transfer, lender: str) -> Path:
        named = job.lender
        self._line.append(job)
        try:
            while job in self._line[AT_ONCE:]:
                if job.lender not in (named, None):
                    raise Stopped
                if time.monotonic() - job.reported_at >= TOLD_S:
                    self._report(job)  # whoever waits for it here hears that it will come
                await _pause(job)
            return await self._brought(job, lender, named)
        finally:
            self._line.remove(job)
            for waiting in self._line:
                waiting.changed.set()

    async def _brought(self, job: _Transfer, lender: str, named: str | None) -> Path:
        fetch = job.fetch = Fetch(job.repo, job.revision, job.revision, job.refs)
        if lender == self._cluster.node_id:
            log.info("%s comes from the Hub", job.model)
            work: Callable[[], Path] = fetch.from_hub
        else:
            log.info("%s is copied from %s", job.model, self._cluster.name_of(lender))
            work = partial(fetch.from_member, job.model, self._connect(job, lender))
        running = asyncio.ensure_future(apart(work))
        running.add_done_callback(_ended)
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=TOLD_S)
                self._look_at(job)
                if job.lender not in (named, None):
                    fetch.stop()  # another one is to be copied from
            found = running.result()
            job.of_hub |= fetch.by_hub
            return found
        except asyncio.CancelledError:
            fetch.stop()
            await asyncio.wait({running}, timeout=CLOSE_S)
            raise

    async def _named(self, job: _Transfer, complete: bool) -> str:
        """Whom to copy from; this node itself is to ask the Hub. Raises ModelError when nobody can get it."""
        began = time.monotonic()
        while time.monotonic() - max(began, _heard_at(job)) < (
            NO_WORD_S if job.lender is None else NO_FILES_S
        ):
            self._decide(job)
            match job.lender:
                case None:
                    pass
                case "" if job.own is not None and job.own.problem:
                    raise ModelError(job.own.problem, Code.MODEL_NOT_FOUND)
                case lender if lender == self._cluster.node_id or complete:
                    return lender
                case lender if (word := job.others.get(lender)) is not None and word.port and word.total:
                    return lender
            await _pause(job)
        return self._cluster.node_id

    async def _another(self, job: _Transfer, *, patient: bool) -> bool:
        """This Mac cannot get it from the Hub: whether another one can, or has it.

        Patient: one that had it has gone, and may be back in a moment.
        """
        ends_at, me = time.monotonic() + NO_WORD_S, self._cluster.node_id
        while time.monotonic() < ends_at:
            self._decide(job)
            if job.lender not in (None, me, ""):
                return True
            if job.lender == "" and not patient:
                return False
            await _pause(job)
        return False

    def _connect(self, job: _Transfer, lender: str) -> Callable[[], peer_copy.PeerConnection]:
        assert self.credentials is not None
        credentials, port = self.credentials, job.others[lender].port if lender in job.others else 0
        addresses = [f"{host}:{port}" for host in self._hosts(lender)]
        return lambda: peer_copy.connect(addresses, lender, credentials)

    def _hosts(self, node_id: str) -> list[str]:
        """Where a member is, by the fastest network first."""
        cluster = self._cluster
        me, link = cluster.node_id, cluster.links.to(node_id)
        machines = cluster.peer_info.machines
        near = link.remote if link is not None else ""
        found: list[str] = []
        if me in machines and node_id in machines:
            both = [MemberMachine(me, "", machines[me]), MemberMachine(node_id, "", machines[node_id], near)]
            found = [each.addresses[node_id] for each in Topology(both).fastest(me, node_id)]
        return list(dict.fromkeys(filter(None, [*found, near])))

    # --- what all say --------------------------------------------------------------------------------

    def received(self, node_id: str, message: ModelHeld | ModelLender | ModelPull | ModelsHere) -> None:
        """Another agent speaks of a model."""
        if isinstance(message, ModelsHere):
            self.stored[node_id] = message.models
            return
        try:
            if isinstance(message, ModelPull):
                repo, revision = hub_name(message.model)
                commit = message.commit if is_commit(message.commit) else ""
                self._pull_for(node_id, f"{repo.name}@{commit}" if commit else message.model, revision)
                return
            job = self._job(message.model)
        except ModelError as error:
            self._count_failure(node_id, error.detail)
            return
        if isinstance(message, ModelHeld):
            self._reaches(job, node_id, message)
        elif node_id == self._cluster.leadership.claim.node_id:
            job.lender = message.node_id
        job.changed.set()

    def _pull_for(self, node_id: str, name: str, ref: str) -> None:
        """By the word of another member. Raises ModelError."""
        if self._asked[node_id] >= MAX_ASKED:
            why = f"{MAX_ASKED} models come here by your word already; ask for {name} when some have come"
            self._send(node_id, ModelHeld(name, "", 0, 0, 0, wants=True, problem=why, port=0))
            self._count_failure(node_id, f"no more than {MAX_ASKED} models come here at one time by its word")
            return
        task = self._begin(name, ref, everywhere=True)
        self._asked[node_id] += 1
        task.add_done_callback(lambda _: self._asked.subtract((node_id,)))

    def _count_failure(self, node_id: str, why: str) -> None:
        if node_id not in self._failures:
            self._failures.add(node_id)
            log.warning("%s asks for what cannot be: %s", self._cluster.name_of(node_id), why)

    def _reaches(self, job: _Transfer, node_id: str, word: ModelHeld) -> None:
        first = node_id not in job.others
        had_it = not first and _held(job.others[node_id]).complete
        job.others[node_id] = word
        job.speeds.setdefault(node_id, TransferRate()).add(time.monotonic(), word.held)
        if job.own is None and not job.runs and not job.inspecting:
            job.inspecting = True
            task = asyncio.ensure_future(self._look_for(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif first:
            self._report(job)
        if first:
            job.began = time.monotonic()
        if self._cluster.leadership.leading and job.lender is not None and word.wants:
            self._send(node_id, ModelLender(job.model, job.lender))
        if _held(word).complete and not had_it and self._is_left(job):
            self._begin(job.model, *job.refs, everywhere=job.everywhere)
        self._lend()

    def _is_left(self, job: _Transfer) -> bool:
        """Whether it could not be had, and is to come all the same when it can."""
        wanted = job.everywhere or job.model == self._cluster.leadership.desired.model
        return wanted and not job.runs and job.own is not None and bool(job.own.wants and job.own.problem)

    async def _look_for(self, job: _Transfer) -> None:
        """Somebody else wants it: perhaps it is here."""
        wants = job.own is not None and job.own.wants
        _, mine = await asyncio.to_thread(_look, job.repo, job.revision, False)
        job.inspecting = False
        if not job.runs and mine != job.own:
            job.own = replace(mine, wants=wants and mine.complete)
            self._report(job)

    def _report(self, job: _Transfer) -> None:
        if job.own is None:
            return
        port = self._lender.port if self._lender is not None and self._lends(job) else 0
        word = ModelHeld(model=job.model, port=port, **asdict(job.own))
        job.reported, job.reported_at = word, time.monotonic()
        self._cluster.links.broadcast(word)
        job.changed.set()

    def _send(self, node_id: str, message: ModelHeld | ModelLender | ModelsHere) -> None:
        with contextlib.suppress(MlxtpError):  # it has just gone
            self._cluster.links.send(node_id, message)

    def met(self) -> list[ModelHeld | ModelsHere]:
        """What a member that has just come is told."""
        words = [
            job.reported for job in self._jobs.values() if job.reported is not None and job.reported.wants
        ]
        return [*words, ModelsHere(self._here)]

    def lost(self, node_id: str) -> None:
        """The last link to an agent has ended."""
        self.stored.pop(node_id, None)
        self._failures.discard(node_id)
        for job in self._jobs.values():
            job.others.pop(node_id, None)
            job.speeds.pop(node_id, None)
            if job.lender == node_id:
                job.lender = None
            job.changed.set()
        self._lend()

    # --- what follows --------------------------------------------------------------------------------

    def advance(self) -> None:
        """Called a few times a second."""
        for job in list(self._jobs.values()):
            self._decide(job)
        self._lend()

    def _decide(self, job: _Transfer) -> None:
        """The coordinator names whom to copy from."""
        cluster = self._cluster
        if not cluster.leadership.leading or job.own is None:
            return
        members = {cluster.node_id: job.own, **{node: _held(word) for node, word in job.others.items()}}
        if not any(held.wants for held in members.values()):
            return
        silent = cluster.links.nodes() - members.keys()
        if silent and time.monotonic() - job.began < ALL_SAY_S:
            return
        chosen = elect_seeder(members, job.lender or "")
        if chosen != job.lender:
            job.lender = chosen
            cluster.links.broadcast(ModelLender(job.model, chosen))
            job.changed.set()
            self._lend()

    def _lends(self, job: _Transfer) -> bool:
        return job.lender == self._cluster.node_id and self._needed(job)

    def _needed(self, job: _Transfer) -> bool:
        return any(word.wants and not _held(word).complete for word in job.others.values())

    def _lend(self) -> None:
        """Listen as long as somebody copies from here."""
        lent = [job for job in self._jobs.values() if self._lends(job)]
        if lent and self._lender is None and self.credentials is not None:
            host = self._cluster.settings.control_host
            try:
                self._lender = peer_copy.PeerServer(host, self.credentials, self._lent, self._may_copy)
            except OSError as error:
                log.error("nothing can be lent to other Macs: %s", error)
        elif not lent and self._lender is not None:
            self._lender.close()
            self._lender = None
        for job in lent:
            if (
                self._lender is not None
                and job.reported is not None
                and job.reported.port != self._lender.port
            ):
                self._report(job)

    def _lent(self, model: str) -> tuple[Repo, Manifest] | None:
        """Called from threads."""
        job = self._jobs.get(model)
        if job is None or job.own is None:
            return None
        manifest = job.fetch.manifest if job.fetch is not None else None
        if manifest is None:
            manifest = job.repo.manifest(job.repo.commit(job.revision))
        return (job.repo, manifest) if manifest is not None else None

    def _may_copy(self, identity: NodeIdentity) -> bool:
        """Called from threads. Members with a control link, as with requests."""
        removed = self._cluster.leadership.roster.removed(identity.fingerprint)
        return not removed and identity.node_id in self._cluster.links.nodes()

    def _look_at(self, job: _Transfer) -> None:
        """How far is it here?"""
        fetch = job.fetch
        if fetch is None or fetch.manifest is None or job.own is None:
            return
        manifest, held = fetch.manifest, min(fetch.held_bytes, fetch.manifest.size - 1)
        job.own = replace(job.own, revision=manifest.revision, held=held, total=manifest.size)
        job.speeds.setdefault(self._cluster.node_id, TransferRate()).add(time.monotonic(), held)
        self._report(job)
        self._cluster.changed()

    def report_stored(self) -> None:
        """Tell the others which models are here, when that has changed."""
        task = asyncio.ensure_future(self._list())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _list(self) -> None:
        here = await asyncio.to_thread(revisions_here)
        largest = sorted(here, key=lambda each: -each.total)[:MAX_STORED]
        found = tuple(StoredModel(each.name, each.revision, each.total, each.complete) for each in largest)
        if found != self._here:
            self._here = found
            self._cluster.links.broadcast(ModelsHere(found))
            for job in list(self._jobs.values()):
                if (
                    job.own is not None and job.own.complete and not job.runs
                ):  # what was told of it may be wrong by now
                    await self._look_for(job)

    async def close(self) -> None:
        """Stop everything; what has come stays."""
        works = [job.task for job in self._jobs.values() if job.task is not None]
        for job in self._jobs.values():
            if job.fetch is not None:
                job.fetch.stop()
        for task in (*works, *self._tasks):
            task.cancel()
        if self._lender is not None:
            self._lender.close()
        if left := {*works, *self._tasks}:
            await asyncio.wait(left, timeout=CLOSE_S)


def described(row: dict[str, Any]) -> str:
    """How far it is, for people: `12.3 GB of 40.1 GB, 110 MB/s, 4 min left`."""
    if row["problem"]:
        return str(row["problem"])
    if row["waits"]:
        return "waits for others to come first"
    if not row["total_bytes"]:
        return "its files are looked up"
    words = [f"{gigabytes(row['held_bytes'])} of {gigabytes(row['total_bytes'])}"]
    if row["bytes_per_s"]:
        words.append(f"{row['bytes_per_s'] / 1e6:.0f} MB/s")
    if row["left_s"] is not None:
        words.append(f"{row['left_s'] // 60} min left" if row["left_s"] >= 90 else f"{row['left_s']} s left")
    return ", ".join([*words, *([f"from {row['lender']}"] if row["lender"] else [])])


def _look(repo: Repo, revision: str, wants: bool) -> tuple[Path | None, Holding]:
    """What is here of a model: its folder if it is complete. Reads the disk."""
    folder = repo.snapshot(revision)
    try:
        free = free_bytes(repo.cache)
    except OSError:
        free = 0
    if folder is None:
        begun = repo.begun()
        return None, Holding("", repo.held_bytes(begun) if begun is not None else 0, 0, free, wants)
    manifest = repo.manifest(folder.name)
    if manifest is None:  # by a program that names its files otherwise: it can be used, not lent
        return folder, Holding(folder.name, 0, 0, free, wants=False)
    return folder, Holding(folder.name, manifest.size, manifest.size, free, wants)


def _held(word: ModelHeld) -> Holding:
    return Holding(word.revision, word.held, word.total, word.free, word.wants, word.problem)


def _heard_at(job: _Transfer) -> float:
    """When the lender last spoke of it."""
    speed = job.speeds.get(job.lender or "")
    return speed.seen[-1][0] if speed is not None and speed.seen else 0.0


async def _pause(job: _Transfer) -> None:
    """Until something is said of it, or half a second has passed."""
    job.changed.clear()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await job.changed.wait()


def _ended(task: asyncio.Task[Path]) -> None:
    """Who waits for it has the error; nobody may be left to."""
    if not task.cancelled():
        task.exception()
