"""Transfers of models: one member gets a model from the Hub, the others copy it from there.

A member that needs a model broadcasts what it has of it (`ModelHeld`). The other members reply with what is
on their disks. When all have replied, the coordinator names the seeder (`ModelLender`). It has all of the
model, or is to download it from the Hub. The others copy while the seeder is still getting it. When it fails
or leaves, the coordinator names another one, and the pieces that have come count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..cluster.links import ControlLink
from ..cluster.node import BEAT_S, ClusterNode
from ..errors import Code, LinkError, MlxtpError, ModelError, ProtocolError, why_not_written
from ..placement.topology import MemberMachine, Topology
from ..wire.certificates import NodeIdentity
from ..wire.cluster_messages import MAX_STORED, ModelHeld, ModelLender, ModelPull, ModelsHere, StoredModel
from ..wire.tls import Credentials
from . import hub_client, peer_copy
from .download import Fetch, apart
from .holdings import TransferRate, described, elect_seeder
from .hub_cache import Damaged, Repo, Stopped, hub_name
from .inspect import revisions_here
from .manifest import Manifest, is_commit
from .model_transfer import ModelTransfer, holding, look

log = logging.getLogger(__name__)

TOLD_S = 1.0  #: Seconds between two progress reports to the others.
#: Seconds that the coordinator waits for the reports of all present members: a sleeping disk takes seconds.
ALL_SAY_S = 10.0
REPORT_S = 10.0  #: Seconds between two looks at the models on this disk.
#: Seconds that a member waits for the coordinator's choice, before it goes to the Hub itself.
NO_WORD_S = 15.0
NO_FILES_S = 120.0  #: Seconds that it waits for the seeder to know the files.
AGAIN_S = 1.0  #: Seconds from an interrupted copy to the next try.
TRIES = 4  #: Failed copies from a seeder before this Mac goes to the Hub itself.
AT_ONCE = 4  #: Models that come to this Mac at one time; the next ones wait.
MAX_JOBS = 256  #: Models for which a transfer is kept.
MAX_ASKED = 8  #: Models that come to this Mac at one time at the request of one other member.
CLOSE_S = 2.0  #: Seconds that the end of this agent waits for threads that wait for the network.


class TransferCoordinator:
    """Coordinator of all transfers.

    Everything runs in the agent's event loop, except what reads the disk or waits for the network.
    """

    def __init__(self, node: ClusterNode, credentials: Credentials) -> None:
        self.stored: dict[str, tuple[StoredModel, ...]] = {}  #: Models on the disk of each other node.
        self._node = node
        self._credentials = credentials
        self._on_files: list[Callable[[str], None]] = []
        self._jobs: dict[str, ModelTransfer] = {}
        self._lender: peer_copy.PeerServer | None = None
        self._here: tuple[StoredModel, ...] = ()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._line: list[ModelTransfer] = []  #: Running transfers (the first AT_ONCE), then those that wait.
        #: Number of models that come at the request of each other member.
        self._asked: Counter[str] = Counter()
        #: Members of which a request was refused, so that the log reports each once.
        self._failures: set[str] = set()
        node.links.on(self._received, ModelHeld, ModelLender, ModelPull, ModelsHere)
        node.links.on_up(self._greet)
        node.links.on_lost(self._lost)
        node.rounds.every(REPORT_S, lambda _now: self.report_stored())
        node.rounds.add(self._advance)

    def on_files(self, handler: Callable[[str], None]) -> None:
        """Have `handler` called with OWNER/NAME when its files on this disk have changed."""
        self._on_files.append(handler)

    # --- requests ------------------------------------------------------------------------------------

    async def get(self, model: str) -> Path:
        """Return OWNER/NAME[@REVISION] on this Mac: from its disk or another member, else from the Hub.

        Raises ModelError if it cannot be had. Cancelling the last waiting caller ends the work.
        """
        return await self._had(self._job(model))

    def learned(self, model: str, manifest: Manifest) -> None:
        """Keep the Hub's answer about a model, so that its next download does not ask again."""
        self._job(model).known = manifest

    async def _had(self, job: ModelTransfer, *refs: str) -> Path:
        job.waiting += 1
        try:
            while job.task is not None and job.ends:
                await asyncio.wait({job.task})
            return await asyncio.shield(self._run(job, *refs))
        finally:
            job.waiting -= 1
            if not job.waiting and job.runs and not job.ends:
                self._stop(job)

    def _run(self, job: ModelTransfer, *refs: str) -> asyncio.Task[Path]:
        """Begin, unless it runs."""
        if job.task is None or job.task.done():
            job.own, job.refs = None, set()
            if not is_commit(job.revision):
                job.of_hub = set()
            job.task = asyncio.ensure_future(self._get(job))
            job.task.add_done_callback(job.ended)
            self._node.changed()
        job.refs |= {ref for ref in (job.revision, *refs) if not is_commit(ref)}
        return job.task

    async def pull(self, model: str, *, everywhere: bool, known: Manifest | None = None) -> str:
        """Begin to get what the Hub has under this name now; returns the name by which `progress` knows it.

        `known`: the Hub's answer, if it was asked just now. If it cannot be reached, the models of members
        count. Raises ModelError.
        """
        repo, revision = hub_name(model)
        if known is None:
            with contextlib.suppress(ModelError):
                known = await apart(partial(hub_client.look_up, repo.name, revision))
        commit = known.revision if known is not None else ""
        name = f"{repo.name}@{commit}" if commit else model
        if known is not None:
            self._job(name).of_hub.add(revision)
            self._job(name).known = known
        self._begin(name, revision, everywhere=everywhere)
        if everywhere:
            self._node.links.broadcast(ModelPull(model, commit))
        return name

    def _begin(self, name: str, *refs: str, everywhere: bool) -> asyncio.Task[Path]:
        """Begin a transfer, and forget earlier failures of other members. Raises ModelError for too many."""
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
        """Report that files of OWNER/NAME on this disk have changed."""
        self.report_stored()
        for handler in self._on_files:
            handler(name)

    def progress(self, model: str) -> list[dict[str, Any]]:
        """Return the progress of each member that needs a model: bytes, bytes per second, seconds left."""
        job = self._jobs.get(model)
        if job is None:
            return []
        me, name_of = self._node.node_id, self._node.name_of
        return [
            job.row(node, held, me, name_of) | {"waits": node == me and job in self._line[AT_ONCE:]}
            for node, held in job.holdings(me)
        ]

    def progress_text(self, model: str, node_id: str = "") -> str:
        """Return the progress of a model to a node, this one by default, for people; empty if it is not on
        its way.
        """
        node_id = node_id or self._node.node_id
        rows = [row for row in self.progress(model) if row["node_id"] == node_id]
        coming = rows and not rows[0]["complete"] and not rows[0]["problem"]
        return f"{model} is on its way: {described(rows[0])}" if coming else ""

    def has(self, node_id: str, model: str) -> bool:
        """Return True if another member has reported OWNER/NAME or OWNER/NAME@COMMIT as complete.

        Branches and tags are not reported.
        """
        name, _, revision = model.partition("@")
        return any(
            each.complete and each.name == name and revision in ("", each.revision)
            for each in self.stored.get(node_id, ())
        )

    def is_elsewhere(self, model: str) -> bool:
        """Return True if any other member has it."""
        return any(self.has(node_id, model) for node_id in self.stored)

    def under_way(self) -> list[str]:
        """Return the models that come to this Mac now, by the names that `progress` knows."""
        return [
            name for name, job in self._jobs.items() if job.runs and job.own is not None and job.own.wants
        ]

    def is_getting(self, name: str) -> bool:
        """Return True if this Mac is getting or seeding OWNER/NAME, as its disk spells that."""
        return any(
            job.repo.as_here().name == name and (job.runs or (self._lender is not None and self._needed(job)))
            for job in self._jobs.values()
        )

    # --- one model -----------------------------------------------------------------------------------

    def _job(self, model: str) -> ModelTransfer:
        """Return the transfer of a model. Raises ModelError for an invalid name and for too many."""
        if model not in self._jobs:
            found = ModelTransfer(model)
            if len(self._jobs) >= MAX_JOBS:
                self._jobs = {name: job for name, job in self._jobs.items() if self._is_busy(job)}
            if len(self._jobs) >= MAX_JOBS:
                raise ModelError(
                    f"{MAX_JOBS} models are under way here; request {model} when some are done",
                    Code.NOT_READY,
                )
            self._jobs[model] = found
        return self._jobs[model]

    def _is_busy(self, job: ModelTransfer) -> bool:
        return job.runs or job.inspecting or self._lends(job)

    def _stop(self, job: ModelTransfer) -> None:
        if job.fetch is not None:
            job.fetch.stop()
        if job.task is not None:
            job.task.cancel()
        if job.own is not None:
            job.own = replace(job.own, wants=False)
            self._report(job)

    async def _get(self, job: ModelTransfer) -> Path:
        job.lender, job.began = None, time.monotonic()
        here, mine = await asyncio.to_thread(look, job.repo, job.revision, True)
        job.own = mine
        if here is not None and not mine.total:
            await self._refer(job, here)
            return here
        self._report(job)
        tries, copied = 0, False
        while True:
            lender = await self._named(job, here is not None)
            copied = copied or lender != self._node.node_id
            if lender == self._node.node_id and here is not None:
                break
            other = job.others.get(lender)
            if here is not None and other is not None and other.revision == mine.revision:
                break
            try:
                here = await self._bring(job, lender if tries < TRIES else self._node.node_id)
                break
            except Stopped:
                continue  # there is another seeder
            except ModelError as error:
                job.own = replace(job.own or mine, problem=error.detail[:1000])
                self._report(job)
                hopeless = error.code is not Code.MODEL_NOT_FOUND or tries >= TRIES
                if hopeless or not await self._another(job, patient=copied):
                    raise
            except (LinkError, ProtocolError, Damaged) as error:
                lies = isinstance(error, Damaged) or error.code is Code.NOT_AUTHENTIC
                tries = TRIES if lies else tries + 1
                log.warning("%s from %s: %s", job.model, self._node.name_of(lender), error)
                await asyncio.sleep(AGAIN_S)
        await self._refer(job, here)
        _, job.own = await asyncio.to_thread(look, job.repo, here.name, True)
        self._report(job)
        return here

    async def _refer(self, job: ModelTransfer, here: Path) -> None:
        """Point the requested branches and tags at this commit. Raises ModelError."""
        repo, seen = job.repo, set[str]()
        while wrong := {ref for ref in job.refs - seen if repo.refs.commit(ref) != here.name}:
            seen |= wrong
            try:
                for refs, by_hub in ((wrong & job.of_hub, True), (wrong - job.of_hub, False)):
                    refer = partial(repo.refer, refs, here.name, by_hub=by_hub)
                    await asyncio.to_thread(refer, lambda: not job.runs or job.ends)
            except OSError as error:
                raise ModelError(f"{repo.name}: {why_not_written(error, repo.cache)}") from None

    async def _bring(self, job: ModelTransfer, lender: str) -> Path:
        named = job.lender
        self._line.append(job)
        try:
            while job in self._line[AT_ONCE:]:
                if job.lender not in (named, None):
                    raise Stopped
                if time.monotonic() - job.reported_at >= TOLD_S:
                    self._report(job)  # the others learn that it will come
                await job.pause()
            return await self._brought(job, lender, named)
        finally:
            self._line.remove(job)
            for waiting in self._line:
                waiting.changed.set()

    async def _brought(self, job: ModelTransfer, lender: str, named: str | None) -> Path:
        by_hub = job.of_hub | {job.revision} if job.known is not None else job.of_hub
        fetch = job.fetch = Fetch(job.repo, job.revision, job.refs, known=job.known, by_hub=by_hub)
        connect = None
        if lender == self._node.node_id:
            log.info("%s comes from the Hub", job.model)
        else:
            log.info("%s is copied from %s", job.model, self._node.name_of(lender))
            connect = self._connect(job, lender)

        def on_progress(_held: int, _total: int) -> None:
            self._look_at(job)
            if job.lender not in (named, None):
                fetch.stop()  # there is another seeder

        found = await fetch.run(on_progress, connect, job.model)
        job.of_hub |= fetch.by_hub
        return found

    async def _named(self, job: ModelTransfer, complete: bool) -> str:
        """Return the seeder; this node's id means the Hub. Raises ModelError if no member can get it."""
        began = time.monotonic()
        while time.monotonic() - max(began, job.heard_at) < (NO_WORD_S if job.lender is None else NO_FILES_S):
            self._decide(job)
            match job.lender:
                case None:
                    pass
                case "" if job.own is not None and job.own.problem:
                    raise ModelError(job.own.problem, Code.MODEL_NOT_FOUND)
                case lender if lender == self._node.node_id or complete:
                    return lender
                case lender if (word := job.others.get(lender)) is not None and word.port and word.total:
                    return lender
            await job.pause()
        return self._node.node_id

    async def _another(self, job: ModelTransfer, *, patient: bool) -> bool:
        """Return True if another member has the model or can get it, after this Mac failed at the Hub.

        `patient`: wait even if there is none, because a member that had it may be back soon.
        """
        ends_at, me = time.monotonic() + NO_WORD_S, self._node.node_id
        while time.monotonic() < ends_at:
            self._decide(job)
            if job.lender not in (None, me, ""):
                return True
            if job.lender == "" and not patient:
                return False
            await job.pause()
        return False

    def _connect(self, job: ModelTransfer, lender: str) -> Callable[[], peer_copy.PeerConnection]:
        credentials, port = self._credentials, job.others[lender].port if lender in job.others else 0
        addresses = [f"{host}:{port}" for host in self._hosts(lender)]
        return lambda: peer_copy.connect(addresses, lender, credentials)

    def _hosts(self, node_id: str) -> list[str]:
        """Return the addresses of a member, those on the fastest network first."""
        node = self._node
        me, link = node.node_id, node.links.to(node_id)
        machines = node.peer_info.machines
        near = link.remote if link is not None else ""
        found: list[str] = []
        if me in machines and node_id in machines:
            both = [MemberMachine(me, "", machines[me]), MemberMachine(node_id, "", machines[node_id], near)]
            found = [each.addresses[node_id] for each in Topology(both).fastest(me, node_id)]
        return list(dict.fromkeys(filter(None, [*found, near])))

    # --- messages from others ------------------------------------------------------------------------

    def _received(self, link: ControlLink, message: ModelHeld | ModelLender | ModelPull | ModelsHere) -> None:
        """Process a message about models from another agent."""
        node_id = link.node_id
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
        elif node_id == self._node.leadership.claim.node_id:
            job.lender = message.node_id
        job.changed.set()

    def _pull_for(self, node_id: str, name: str, ref: str) -> None:
        """Begin a transfer that another member requested. Raises ModelError."""
        if self._asked[node_id] >= MAX_ASKED:
            why = f"{MAX_ASKED} models come here at your request already; request {name} when some are done"
            self._send(node_id, ModelHeld(name, "", 0, 0, 0, wants=True, problem=why, port=0))
            self._count_failure(node_id, f"{MAX_ASKED} models come here at its request already")
            return
        task = self._begin(name, ref, everywhere=True)
        self._asked[node_id] += 1
        task.add_done_callback(lambda _: self._asked.subtract((node_id,)))

    def _count_failure(self, node_id: str, why: str) -> None:
        if node_id not in self._failures:
            self._failures.add(node_id)
            log.warning("request by %s refused: %s", self._node.name_of(node_id), why)

    def _reaches(self, job: ModelTransfer, node_id: str, word: ModelHeld) -> None:
        first = node_id not in job.others
        had_it = not first and holding(job.others[node_id]).complete
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
        if self._node.leadership.leading and job.lender is not None and word.wants:
            self._send(node_id, ModelLender(job.model, job.lender))
        if holding(word).complete and not had_it and self._is_left(job):
            self._begin(job.model, *job.refs, everywhere=job.everywhere)
        self._lend()

    def _is_left(self, job: ModelTransfer) -> bool:
        """Return True if it failed, but must start again when a member has it."""
        wanted = job.everywhere or job.model == self._node.leadership.desired.model
        return wanted and not job.runs and job.own is not None and bool(job.own.wants and job.own.problem)

    async def _look_for(self, job: ModelTransfer) -> None:
        """Read this Mac's disk and report, because another member needs the model."""
        wants = job.own is not None and job.own.wants
        _, mine = await asyncio.to_thread(look, job.repo, job.revision, False)
        job.inspecting = False
        if not job.runs and mine != job.own:
            job.own = replace(mine, wants=wants and mine.complete)
            self._report(job)

    def _report(self, job: ModelTransfer) -> None:
        if job.own is None:
            return
        port = self._lender.port if self._lender is not None and self._lends(job) else 0
        word = ModelHeld(model=job.model, port=port, **asdict(job.own))
        job.reported, job.reported_at = word, time.monotonic()
        self._node.links.broadcast(word)
        job.changed.set()

    def _send(self, node_id: str, message: ModelHeld | ModelLender | ModelsHere) -> None:
        with contextlib.suppress(MlxtpError):  # it has just gone
            self._node.links.send(node_id, message)

    def _greet(self, link: ControlLink) -> None:
        """Send the state of transfers to a member that has just come."""
        for job in self._jobs.values():
            if job.reported is not None and job.reported.wants:
                link.send(job.reported)
        link.send(ModelsHere(self._here))

    def _lost(self, node_id: str, _why: str) -> None:
        """Forget an agent whose last link has ended."""
        self.stored.pop(node_id, None)
        self._failures.discard(node_id)
        for job in self._jobs.values():
            job.others.pop(node_id, None)
            job.speeds.pop(node_id, None)
            if job.lender == node_id:
                job.lender = None
            job.changed.set()
        self._lend()

    # --- advancing -----------------------------------------------------------------------------------

    def _advance(self, now: float) -> float | None:
        """Advance all transfers. Return the time of the next advance while one runs."""
        for job in list(self._jobs.values()):
            self._decide(job)
        self._lend()
        return now + BEAT_S if any(job.runs for job in self._jobs.values()) else None

    def _decide(self, job: ModelTransfer) -> None:
        """Choose and broadcast the seeder, if this node is the coordinator."""
        node = self._node
        if not node.leadership.leading or job.own is None:
            return
        members = {node.node_id: job.own, **{each: holding(word) for each, word in job.others.items()}}
        if not any(held.wants for held in members.values()):
            return
        silent = node.links.nodes() - members.keys()
        if silent and time.monotonic() - job.began < ALL_SAY_S:
            return
        chosen = elect_seeder(members, job.lender or "")
        if chosen != job.lender:
            job.lender = chosen
            node.links.broadcast(ModelLender(job.model, chosen))
            job.changed.set()
            self._lend()

    def _lends(self, job: ModelTransfer) -> bool:
        return job.lender == self._node.node_id and self._needed(job)

    def _needed(self, job: ModelTransfer) -> bool:
        return any(word.wants and not holding(word).complete for word in job.others.values())

    def _lend(self) -> None:
        """Listen while other members copy from here."""
        lent = [job for job in self._jobs.values() if self._lends(job)]
        if lent and self._lender is None:
            host = self._node.settings.control_host
            try:
                self._lender = peer_copy.PeerServer(host, self._credentials, self._lent, self._may_copy)
            except OSError as error:
                log.error("other Macs cannot copy models from here: %s", error)
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
        """Return the files to copy for a model; None if there are none. Called from threads."""
        job = self._jobs.get(model)
        if job is None or job.own is None:
            return None
        manifest = job.fetch.manifest if job.fetch is not None else None
        if manifest is None:
            manifest = job.repo.manifest(job.repo.refs.commit(job.revision))
        return (job.repo, manifest) if manifest is not None else None

    def _may_copy(self, identity: NodeIdentity) -> bool:
        """Return True for members with a control link, as with requests. Called from threads."""
        removed = self._node.leadership.roster.removed(identity.fingerprint)
        return not removed and identity.node_id in self._node.links.nodes()

    def _look_at(self, job: ModelTransfer) -> None:
        """Update and report this Mac's progress."""
        fetch = job.fetch
        if fetch is None or fetch.manifest is None or job.own is None:
            return
        manifest, held = fetch.manifest, min(fetch.held_bytes, fetch.manifest.size - 1)
        job.own = replace(job.own, revision=manifest.revision, held=held, total=manifest.size)
        job.speeds.setdefault(self._node.node_id, TransferRate()).add(time.monotonic(), held)
        self._report(job)
        self._node.changed()

    def report_stored(self) -> None:
        """Report to the others which models are here, if that has changed."""
        task = asyncio.ensure_future(self._list())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _list(self) -> None:
        here = await asyncio.to_thread(revisions_here)
        largest = sorted(here, key=lambda each: -each.total)[:MAX_STORED]
        found = tuple(StoredModel(each.name, each.revision, each.total, each.complete) for each in largest)
        if found != self._here:
            self._here = found
            self._node.links.broadcast(ModelsHere(found))
            for job in list(self._jobs.values()):
                if (
                    job.own is not None and job.own.complete and not job.runs
                ):  # the last report may be outdated
                    await self._look_for(job)

    async def close(self) -> None:
        """Stop everything; downloaded pieces stay."""
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
