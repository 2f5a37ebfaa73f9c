"""Models on the members' disks, reports of them, and transfers to this node."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..background import Background
from ..cluster.links import Handlers, ReportTable
from ..cluster.node import ClusterNode
from ..errors import Code, MlxtpError, ModelError
from ..wire.cluster_messages import ModelHeld, StoredModel
from .download import Fetch
from .hub_cache import commits_here, free_bytes, hub_name
from .manifest import Manifest, TransferRate

# --- models on the disks of members ---------------------------------------------------------------------

REPORT_S = 10.0  #: Seconds between two looks at the models on this disk.


class StoredModels:
    """Models that members have reported as stored, and the handlers of changes on this disk."""

    def __init__(self, node: ClusterNode) -> None:
        self._node = node
        #: Called with OWNER/NAME when its files on this disk have changed.
        self.on_files = Handlers[Callable[[str], None]]()
        #: Called when the list of models on this disk has changed.
        self.on_change = Handlers[Callable[[], None]]()
        self._background = Background()
        node.rounds.every(REPORT_S, lambda _now: self.refresh())

    def changed(self, name: str) -> None:
        self.refresh()
        for handler in self.on_files:
            handler(name)

    def refresh(self) -> None:
        """Report this disk's models to the other members if the list has changed."""
        self._background.start(self._list(), "the list of models on this disk")

    def has(self, node_id: str, model: str) -> bool:
        """Return True if another member has reported OWNER/NAME[@COMMIT] as complete."""
        name, _, revision = model.partition("@")
        return any(
            each.complete and each.name == name and revision in ("", each.revision)
            for each in self._node.links.reports.by(node_id, StoredModel)
        )

    def is_elsewhere(self, model: str) -> bool:
        return any(self.has(node_id, model) for node_id in self._node.links.nodes())

    async def _list(self) -> None:
        here = await asyncio.to_thread(commits_here)
        largest = sorted(here, key=lambda each: -each.total)[: StoredModel.MOST]
        found = [StoredModel(each.name, each.revision, each.total, each.complete) for each in largest]
        if found != self._node.links.reports.by(self._node.node_id, StoredModel):
            self._node.links.reports.publish(StoredModel, *found)
            for handler in self.on_change:
                handler()

    async def close(self) -> None:
        await self._background.close()


# --- transfers ------------------------------------------------------------------------------------------

MAX_JOBS = ModelHeld.MOST  #: Transfers kept at a time.


class MemberReports:
    """Reports about one model: the other members' and the last one of this node."""

    def __init__(self, rows: Callable[[], Mapping[str, ModelHeld]]) -> None:
        self._rows = rows  #: Returns the other members' reports, by node id.
        self._forgiven: Mapping[str, ModelHeld] = {}
        self.sent: ModelHeld | None = None
        self.sent_at = 0.0
        self.since = time.monotonic()  #: Start of the seconds that all present members have to report.
        self.rates: defaultdict[str, TransferRate] = defaultdict(TransferRate)

    @property
    def others(self) -> dict[str, ModelHeld]:
        return {
            node: replace(held, problem="") if self._forgiven.get(node) == held else held
            for node, held in self._rows().items()
        }

    def record(self, node_id: str, report: ModelHeld) -> None:
        if node_id not in self.others:
            self.since = time.monotonic()
        self.rates[node_id].add(time.monotonic(), report.held)

    def clear_problems(self) -> None:
        """Forget why other members could not get the model, because they try again."""
        self._forgiven = self._rows()

    def last_at(self, node_id: str) -> float:
        seen = self.rates[node_id].seen
        return seen[-1][0] if seen else 0.0

    @property
    def needed(self) -> bool:
        """True if another member wants the model and lacks some of it."""
        return any(report.wants and not report.complete for report in self.others.values())


class ModelTransfer:
    """Transfer of one model, kept while this agent runs. `refs`: branches and tags to point at it."""

    def __init__(self, model: str, rows: Callable[[], Mapping[str, ModelHeld]]) -> None:
        self.model = model
        self.repo, self.revision = hub_name(model)
        self.refs: set[str] = set()
        self.of_hub: set[str] = set()  #: The subset of `refs` that the Hub itself mapped to this commit.
        self.known: Manifest | None = None  #: The Hub's manifest of `model`, for the next download.
        self.own: ModelHeld | None = None  #: None until a member needs the model.
        self.reports = MemberReports(rows)
        #: The seeder that the coordinator chose; None before that, "" if no member is able.
        self.lender: str | None = None
        self.fetch: Fetch | None = None
        self.task: asyncio.Task[Path] | None = None
        self.waiting = 0
        self.inspecting = False  #: True while the disk is read because of another member's report.
        #: True if all Macs are to get it. It then restarts when a member gets it later.
        self.everywhere = False
        self.changed = asyncio.Event()

    @property
    def runs(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def complete(self) -> bool:
        """True if the last request ended with a complete model."""
        task = self.task
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    @property
    def failure(self) -> str:
        task = self.task
        if task is None or not task.done() or task.cancelled() or (error := task.exception()) is None:
            return ""
        return error.detail if isinstance(error, MlxtpError) else f"{type(error).__name__}: {error}"

    def ended(self, task: asyncio.Task[Path]) -> None:
        self.known = None
        if not task.cancelled():
            task.exception()  # retrieved, because there may be no caller

    @property
    def ends(self) -> bool:
        """True if it was cancelled but has not ended yet."""
        return self.task is not None and not self.task.done() and bool(self.task.cancelling())

    def lends(self, me: str) -> bool:
        return self.lender == me and self.reports.needed

    def begins_again(self, wanted: Collection[str]) -> bool:
        """Return True if it failed but will restart once a member has it. `wanted`: deployed models."""
        failed = not self.runs and self.own is not None and bool(self.own.wants and self.own.problem)
        return failed and (self.everywhere or self.model in wanted)

    def rows(self, me: str, name_of: Callable[[str], str]) -> list[dict[str, Any]]:
        """Return the progress of each member that is to get the model, this node (`me`) first."""
        mine, why = self.own or (ModelHeld(self.model) if self.runs else None), self.failure
        if why:
            mine = mine or ModelHeld(self.model)
            mine = replace(mine, wants=True, problem=mine.problem or why)
        found = [(me, mine)] if mine is not None else []
        found += sorted(self.reports.others.items())
        rows = [(held, self._row(node, held, node == me, name_of)) for node, held in found]
        return [row for held, row in rows if held.wants or (row["complete"] and not held.total)]

    def _row(self, node: str, held: ModelHeld, own: bool, name_of: Callable[[str], str]) -> dict[str, Any]:
        speed = self.reports.rates[node].bytes_per_s
        return {
            "node_id": node,
            "self": own,
            "name": name_of(node),
            "lender": name_of(self.lender) if self.lender not in (None, "", node) else "",
            "held_bytes": held.held,
            "total_bytes": held.total,
            "bytes_per_s": round(speed),
            "left_s": round((held.total - held.held) / speed) if speed and held.total else None,
            "problem": held.problem,
            "complete": held.complete or bool(own and self.complete and held.revision and not held.total),
        }

    def look(self, revision: str, wants: bool) -> tuple[Path | None, ModelHeld]:
        """Return the model's folder if it is complete here, and its progress. Reads the disk."""
        here, held = self.repo.stored(revision), ModelHeld(self.model, wants=wants)
        with contextlib.suppress(OSError):
            held = replace(held, free=free_bytes(self.repo.cache))
        if not here.complete:
            begun = self.repo.begun()
            return None, replace(held, held=begun.held if begun is not None else 0)
        if here.manifest is None:  # another program's file names: usable, but cannot be copied
            return here.folder, replace(held, revision=here.revision, wants=False)
        return here.folder, replace(held, revision=here.revision, held=here.held, total=here.total)

    async def pause(self) -> None:
        self.changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self.changed.wait()


class TransferTable:
    """Transfers that this agent keeps, by OWNER/NAME[@REVISION]. `me`: the id of this node."""

    def __init__(self, me: str, reports: ReportTable) -> None:
        self._me = me
        self._reports = reports
        self._all: dict[str, ModelTransfer] = {}

    def __iter__(self) -> Iterator[ModelTransfer]:
        return iter(list(self._all.values()))

    def find(self, model: str) -> ModelTransfer | None:
        """Return the transfer of a model, or None. May be called from threads."""
        return self._all.get(model)

    def of(self, model: str) -> ModelTransfer:
        """Return the transfer of a model, new if needed. Raises ModelError for a bad name or too many."""
        if (found := self._all.get(model)) is not None:
            return found
        found = ModelTransfer(model, lambda: self._others(model))
        if len(self._all) >= MAX_JOBS:
            busy = [job for job in self if job.runs or job.inspecting or job.lends(self._me)]
            self._all = {job.model: job for job in busy}
        if len(self._all) >= MAX_JOBS:
            why = f"{MAX_JOBS} models are under way here; request {model} when some are done"
            raise ModelError(why, Code.NOT_READY)
        self._all[model] = found
        return found

    def _others(self, model: str) -> dict[str, ModelHeld]:
        rows = self._reports.of(ModelHeld, model)
        return {node: row for node, row in rows.items() if node != self._me}
