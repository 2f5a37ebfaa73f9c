"""Transfers of models: one member downloads a model from the Hub, the others copy it from that seeder.

Members report what they have of a wanted model (`ModelHeld`). The coordinator names the seeder
(`ModelLender`), and another if it fails or leaves. A model that cannot be had raises ModelError.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..background import Background, log_failure
from ..cluster.node import BEAT_S, ClusterNode
from ..errors import Code, LinkError, MlxtpError, ModelError, ProtocolError, why_not_written
from ..placement.topology import MemberMachine, Topology
from ..wire.certificates import NodeIdentity
from ..wire.cluster_messages import Machine, ModelHeld, ModelLender, ModelPull
from ..wire.tls import Credentials
from . import hub_client, peer_copy
from .download import Fetch, apart
from .hub_cache import Damaged, Repo, Stopped, hub_name
from .manifest import Manifest, described, elect_seeder, is_commit
from .model_transfer import ModelTransfer, StoredModels, TransferTable

log = logging.getLogger(__name__)

REPORT_AGAIN_S = 1.0  #: Seconds between two progress reports to the others.
#: Seconds that the coordinator waits for all present members' reports; a sleeping disk takes seconds.
ALL_REPORT_S = 10.0
#: Seconds that a member waits for the coordinator's choice before it uses the Hub itself.
NO_SEEDER_S = 15.0
NO_FILES_S = 120.0  #: Seconds that it waits for the seeder to learn the list of files.
AGAIN_S = 1.0  #: Seconds from an interrupted copy to the next attempt.
TRIES = 4  #: Failed copies from seeders before this Mac uses the Hub itself.
AT_ONCE = 4  #: Models that this Mac gets at the same time. More wait.
MAX_PULLS = 8  #: Models that this Mac gets at the same time for one other member's requests.
CLOSE_S = 2.0  #: Seconds that the agent's end waits for threads that wait for the network.


class SeederElection:
    """Agreement on each model's seeder, and the server of copies while this node is a seeder."""

    def __init__(
        self, node: ClusterNode, credentials: Credentials, table: TransferTable, background: Background
    ) -> None:
        self._node = node
        self._credentials = credentials
        self._table = table
        self._background = background
        self._server: peer_copy.PeerServer | None = None
        node.links.on_lost(self._lost)
        node.rounds.add(self._advance)

    def announce(self, job: ModelTransfer) -> None:
        if job.own is None:
            return
        port = self._port if job.lends(self._node.node_id) else 0
        report = replace(job.own, port=port)
        job.reports.sent, job.reports.sent_at = report, time.monotonic()
        reports = (each.reports.sent for each in self._table)
        self._node.links.reports.publish(ModelHeld, *filter(None, reports))
        job.changed.set()

    @property
    def _port(self) -> int:
        return self._server.port if self._server is not None else 0

    def look_again(self, job: ModelTransfer) -> None:
        job.inspecting = True
        self._background.start(self._look(job), f"the look at {job.model}")

    async def _look(self, job: ModelTransfer) -> None:
        wants = job.own is not None and job.own.wants
        try:
            _, mine = await asyncio.to_thread(job.look, job.revision, False)
        finally:
            job.inspecting = False
        if not job.runs and mine != job.own:
            job.own = replace(mine, wants=wants and mine.complete)
            self.announce(job)

    def decide(self, job: ModelTransfer) -> None:
        """Choose the seeder if this node is the coordinator, else adopt the coordinator's choice."""
        chosen = self._elected(job) if self._node.leadership.leading else self._named(job)
        if chosen not in (None, job.lender):
            job.lender = chosen
            job.changed.set()
            self._node.changed()

    def _named(self, job: ModelTransfer) -> str | None:
        node = self._node
        named = node.links.reports.of(ModelLender, job.model).get(node.leadership.claim.node_id)
        there = named is not None and named.node_id in {"", node.node_id, *node.links.nodes()}
        return named.node_id if named is not None and there else None

    def _elected(self, job: ModelTransfer) -> str | None:
        node = self._node
        if job.own is None:
            return None
        members = {node.node_id: job.own, **job.reports.others}
        if not any(held.wants for held in members.values()):
            return None
        silent = node.links.nodes() - members.keys()
        if silent and time.monotonic() - job.reports.since < ALL_REPORT_S:
            return None
        return elect_seeder(members, job.lender or "")

    def update_lending(self) -> None:
        lent = [job for job in self._table if job.lends(self._node.node_id)]
        if not lent:
            self.close()
        elif self._server is None:
            host = self._node.settings.control_host
            try:
                self._server = peer_copy.PeerServer(host, self._credentials, self._lent, self._may_copy)
            except OSError as error:
                log.error("other Macs cannot copy models from here: %s", error)
        for job in lent:
            sent = job.reports.sent
            if self._port and sent is not None and sent.port != self._port:
                self.announce(job)

    def _lent(self, model: str) -> tuple[Repo, Manifest] | None:
        """Return the files of a model to serve, or None. Called from threads."""
        job = self._table.find(model)
        if job is None or job.own is None:
            return None
        manifest = (job.fetch.manifest if job.fetch is not None else None) or job.repo.manifest(job.revision)
        return (job.repo, manifest) if manifest is not None else None

    def _may_copy(self, identity: NodeIdentity) -> bool:
        """Return True for a member that has a control link and is not removed. Called from threads."""
        removed = self._node.replica.roster.removed(identity.fingerprint)
        return not removed and self._node.links.linked(identity)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _lost(self, node_id: str, _why: str) -> None:
        for job in self._table:
            job.reports.rates.pop(node_id, None)
            if job.lender == node_id:
                job.lender = None
            job.changed.set()
        self.update_lending()

    def _advance(self, now: float) -> float | None:
        for job in self._table:
            self.decide(job)
        jobs = self._table if self._node.leadership.leading else ()
        chosen = [ModelLender(job.model, job.lender) for job in jobs if job.lender is not None]
        self._node.links.reports.publish(ModelLender, *chosen)
        self.update_lending()
        return now + BEAT_S if any(job.runs for job in self._table) else None


class Downloads:
    """Models that this Mac gets: AT_ONCE at a time, the others in line, each from its seeder."""

    def __init__(self, node: ClusterNode, credentials: Credentials, election: SeederElection) -> None:
        self._node = node
        self._credentials = credentials
        self._election = election
        self._line: list[ModelTransfer] = []  #: The first AT_ONCE are running, the others wait.

    def waits(self, job: ModelTransfer) -> bool:
        return job in self._line[AT_ONCE:]

    async def run(self, job: ModelTransfer) -> Path:
        """Get one model and return its folder. Raises ModelError."""
        job.lender, job.reports.since = None, time.monotonic()
        here, mine = await asyncio.to_thread(job.look, job.revision, True)
        job.own = mine
        if here is not None and not mine.total:
            await self._refer(job, here)
            return here
        self._election.announce(job)
        tries, copied, me = 0, False, self._node.node_id
        while True:
            lender = await self._wait_for_seeder(job, here is not None)
            copied = copied or lender != me
            other = job.reports.others.get(lender)
            if here is not None and (lender == me or (other is not None and other.revision == mine.revision)):
                break
            try:
                here = await self._download_in_turn(job, lender if tries < TRIES else me)
                break
            except Stopped:
                continue  # the seeder has changed
            except ModelError as error:
                job.own = replace(job.own or mine, problem=error.detail[:1000])
                self._election.announce(job)
                hopeless = error.code is not Code.MODEL_NOT_FOUND or tries >= TRIES
                if hopeless or not await self._finds_other_seeder(job, patient=copied):
                    raise
            except (LinkError, ProtocolError, Damaged) as error:
                lies = isinstance(error, Damaged) or error.code is Code.NOT_AUTHENTIC
                tries = TRIES if lies else tries + 1
                log.warning("%s from %s: %s", job.model, self._node.name_of(lender), error)
                await asyncio.sleep(AGAIN_S)
        await self._refer(job, here)
        _, job.own = await asyncio.to_thread(job.look, here.name, True)
        self._election.announce(job)
        return here

    async def _refer(self, job: ModelTransfer, here: Path) -> None:
        repo, seen = job.repo, set[str]()
        while wrong := {ref for ref in job.refs - seen if repo.refs.commit(ref) != here.name}:
            seen |= wrong
            try:
                for refs, by_hub in ((wrong & job.of_hub, True), (wrong - job.of_hub, False)):
                    refer = partial(repo.refer, refs, here.name, by_hub=by_hub)
                    await asyncio.to_thread(refer, lambda: not job.runs or job.ends)
            except OSError as error:
                raise ModelError(f"{repo.name}: {why_not_written(error, repo.cache)}") from None

    async def _download_in_turn(self, job: ModelTransfer, lender: str) -> Path:
        named = job.lender
        self._line.append(job)
        try:
            while self.waits(job):
                if job.lender not in (named, None):
                    raise Stopped
                if time.monotonic() - job.reports.sent_at >= REPORT_AGAIN_S:
                    self._election.announce(job)  # so that the others know it is in line
                await job.pause()
            return await self._download(job, lender, named)
        finally:
            self._line.remove(job)
            for waiting in self._line:
                waiting.changed.set()

    async def _download(self, job: ModelTransfer, lender: str, named: str | None) -> Path:
        by_hub = job.of_hub | {job.revision} if job.known is not None else job.of_hub
        fetch = job.fetch = Fetch(job.repo, job.revision, job.refs, known=job.known, by_hub=by_hub)
        connect = self._connect(job, lender) if lender != self._node.node_id else None
        copied = f"is copied from {self._node.name_of(lender)}"
        log.info("%s %s", job.model, "comes from the Hub" if connect is None else copied)

        def on_progress(held: int, total: int) -> None:
            if job.lender not in (named, None):
                fetch.stop()  # the seeder has changed
            if fetch.manifest is None or job.own is None or not total:
                return
            held = min(held, total - 1)
            job.own = replace(job.own, revision=fetch.manifest.revision, held=held, total=total)
            job.reports.rates[self._node.node_id].add(time.monotonic(), held)
            self._election.announce(job)
            self._node.changed()

        found = await fetch.run(on_progress, connect, job.model)
        job.of_hub |= fetch.by_hub
        return found

    async def _wait_for_seeder(self, job: ModelTransfer, complete: bool) -> str:
        """Return the seeder; this node's own id means the Hub. Raises ModelError if no member can get it."""
        began = time.monotonic()
        while True:
            last_at = max(began, job.reports.last_at(job.lender or ""))
            if time.monotonic() - last_at >= (NO_SEEDER_S if job.lender is None else NO_FILES_S):
                return self._node.node_id
            self._election.decide(job)
            match job.lender:
                case None:
                    pass
                case "" if job.own is not None and job.own.problem:
                    raise ModelError(job.own.problem, Code.MODEL_NOT_FOUND)
                case lender if lender == self._node.node_id or complete:
                    return lender
                case lender:
                    report = job.reports.others.get(lender)
                    if report is not None and report.port and report.total:
                        return lender
            await job.pause()

    async def _finds_other_seeder(self, job: ModelTransfer, *, patient: bool) -> bool:
        """Return True if another member can seed it after the Hub failed. `patient`: wait for one."""
        ends_at, me = time.monotonic() + NO_SEEDER_S, self._node.node_id
        while time.monotonic() < ends_at:
            self._election.decide(job)
            if job.lender not in (None, me, ""):
                return True
            if job.lender == "" and not patient:
                return False
            await job.pause()
        return False

    def _connect(self, job: ModelTransfer, lender: str) -> Callable[[], peer_copy.PeerConnection]:
        report = job.reports.others.get(lender)
        port = report.port if report is not None else 0
        addresses = [f"{host}:{port}" for host in self._hosts(lender)]
        return partial(peer_copy.connect, addresses, lender, self._credentials)

    def _hosts(self, node_id: str) -> list[str]:  # fastest network first
        node = self._node
        me, link = node.node_id, node.links.to(node_id)
        machines = node.links.reports.of(Machine)
        near = link.remote if link is not None else ""
        found: list[str] = []
        if me in machines and node_id in machines:
            both = [MemberMachine(each, "", machines[each]) for each in (me, node_id)]
            found = [each.addresses[node_id] for each in Topology(both).fastest(me, node_id)]
        return list(dict.fromkeys(filter(None, [*found, near])))


class TransferCoordinator:
    def __init__(self, node: ClusterNode, credentials: Credentials, stored: StoredModels) -> None:
        self.stored = stored
        self.table = TransferTable(node.node_id, node.links.reports)
        self._node = node
        self._background = Background(_log_failure)
        self._election = SeederElection(node, credentials, self.table, self._background)
        self._downloads = Downloads(node, credentials, self._election)
        self._requested: Counter[str] = Counter()  #: Models under way for each other member's requests.
        self._refused: set[str] = set()  #: Members with a refused request, so that each is logged once.
        stored.on_change(self._look_again)
        node.links.reports.on(self._received, ModelHeld)
        node.links.on(lambda link, message: self._received(link.node_id, message), ModelPull)
        node.links.on_lost(lambda node_id, _why: self._refused.discard(node_id))

    async def get(self, model: str) -> Path:
        """Return the folder of OWNER/NAME[@REVISION], from this disk, a member or the Hub.

        Cancelling the last waiting caller cancels the transfer. Raises ModelError.
        """
        return await self._wait(self.table.of(model))

    def learned(self, model: str, manifest: Manifest) -> None:
        self.table.of(model).known = manifest

    async def _wait(self, job: ModelTransfer, *refs: str) -> Path:
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
        if job.task is None or job.task.done():
            job.own, job.refs = None, set()
            if not is_commit(job.revision):
                job.of_hub = set()
            job.task = asyncio.ensure_future(self._downloads.run(job))
            job.task.add_done_callback(job.ended)
            self._node.changed()
        job.refs |= {ref for ref in (job.revision, *refs) if not is_commit(ref)}
        return job.task

    async def pull(self, model: str, *, everywhere: bool, known: Manifest | None = None) -> str:
        """Start a transfer of what the Hub has under this name now; return its name for `progress`.

        `known`: the Hub's manifest, if it has just been requested. If the Hub fails, a member's model counts.
        """
        repo, revision = hub_name(model)
        if known is None:
            with contextlib.suppress(ModelError):
                known = await apart(partial(hub_client.look_up, repo.name, revision))
        commit = known.revision if known is not None else ""
        name = f"{repo.name}@{commit}" if commit else model
        if known is not None:
            self.table.of(name).of_hub.add(revision)
            self.table.of(name).known = known
        self._begin(name, revision, everywhere=everywhere)
        if everywhere:
            self._node.links.broadcast(ModelPull(model, commit))
        return name

    def _begin(self, name: str, *refs: str, everywhere: bool) -> asyncio.Task[Path]:
        job = self.table.of(name)
        job.everywhere = everywhere or job.everywhere
        if job.ends:
            job.own = None
        else:
            self._run(job, *refs)
        if everywhere:  # the other members retry too
            job.reports.clear_problems()

        def ended(done: asyncio.Task[Path]) -> None:
            if not done.cancelled():
                self.stored.changed(job.repo.name)

        task = self._background.start(self._wait(job, *refs), name)
        task.add_done_callback(ended)
        return task

    def progress(self, model: str) -> list[dict[str, Any]]:
        """Return the progress of each member that needs a model; see `ModelTransfer.rows`."""
        job = self.table.find(model)
        if job is None:
            return []
        waits = self._downloads.waits(job)
        return [
            row | {"waits": row["self"] and waits} for row in job.rows(self._node.node_id, self._node.name_of)
        ]

    def progress_text(self, model: str, node_id: str = "") -> str:
        """Return a node's progress with a model in words; "" if none. `node_id` defaults to this node."""
        node_id = node_id or self._node.node_id
        rows = [row for row in self.progress(model) if row["node_id"] == node_id]
        coming = rows and not rows[0]["complete"] and not rows[0]["problem"]
        return f"{model} is on its way: {described(rows[0])}" if coming else ""

    def under_way_anywhere(self) -> list[dict[str, Any]]:
        rows = [{"model": job.model, **row} for job in self.table for row in self.progress(job.model)]
        return [row for row in rows if not row["complete"] and not row["problem"]]

    def under_way(self) -> list[str]:
        """Return the models that this Mac is getting, under their names for `progress`."""
        return [job.model for job in self.table if job.runs and job.own is not None and job.own.wants]

    def is_getting(self, name: str) -> bool:
        """Return True if this Mac is getting or seeding OWNER/NAME, spelled as on its disk."""
        busy = (job for job in self.table if job.runs or job.lends(self._node.node_id))
        return any(job.repo.as_here().name == name for job in busy)

    def _stop(self, job: ModelTransfer) -> None:
        if job.fetch is not None:
            job.fetch.stop()
        if job.task is not None:
            job.task.cancel()
        if job.own is not None:
            job.own = replace(job.own, wants=False)
            self._election.announce(job)

    def _received(self, node_id: str, message: ModelHeld | ModelPull) -> None:
        try:
            if isinstance(message, ModelPull):
                self._pull_for(node_id, message)
                return
            job = self.table.of(message.model)
        except ModelError as error:
            self._log_refusal(node_id, error.detail)
            return
        self._receive_report(job, node_id, message)

    def _pull_for(self, node_id: str, message: ModelPull) -> None:
        repo, ref = hub_name(message.model)
        name = f"{repo.name}@{message.commit}" if is_commit(message.commit) else message.model
        if self._requested[node_id] >= MAX_PULLS:
            why = f"{MAX_PULLS} models come here at your request already; request {name} when some are done"
            refusal = ModelHeld(name, problem=why)
            with contextlib.suppress(MlxtpError):  # its link is gone
                self._node.links.send(node_id, self._node.links.reports.report(refusal))
            self._log_refusal(node_id, f"{MAX_PULLS} models come here at its request already")
            return
        task = self._begin(name, ref, everywhere=True)
        self._requested[node_id] += 1
        task.add_done_callback(lambda _: self._requested.subtract((node_id,)))

    def _log_refusal(self, node_id: str, why: str) -> None:
        if node_id not in self._refused:
            self._refused.add(node_id)
            log.warning("request by %s refused: %s", self._node.name_of(node_id), why)

    def _receive_report(self, job: ModelTransfer, node_id: str, report: ModelHeld) -> None:
        before = job.reports.others.get(node_id)
        job.reports.record(node_id, report)
        if job.own is None and not job.runs and not job.inspecting:
            self._election.look_again(job)
        came = report.complete and not (before is not None and before.complete)
        wanted = [row.model for row in self._node.desired.table.live()]
        if came and job.begins_again(wanted):
            self._begin(job.model, *job.refs, everywhere=job.everywhere)
        job.changed.set()

    def _look_again(self) -> None:
        for job in self.table:
            if job.own is not None and job.own.complete and not job.runs:
                self._election.look_again(job)

    async def close(self) -> None:
        """Stop everything. Downloaded bytes stay."""
        for job in self.table:
            if job.fetch is not None:
                job.fetch.stop()
        left = {*self._background.tasks, *(job.task for job in self.table if job.task is not None)}
        for task in left:
            task.cancel()
        self._election.close()
        if left:
            await asyncio.wait(left, timeout=CLOSE_S)
        await self.stored.close()


def _log_failure(task: asyncio.Task[Any], error: BaseException) -> None:
    if isinstance(error, MlxtpError | OSError):
        log.warning("%s", error.detail if isinstance(error, MlxtpError) else error)
    else:
        log_failure(task, error)
