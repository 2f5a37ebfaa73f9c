"""Transfer of one model to this node, and the reports of other members about it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import MlxtpError
from ..wire.cluster_messages import ModelHeld
from .download import Fetch
from .holdings import Holding, TransferRate
from .hub_cache import Repo, free_bytes, hub_name
from .manifest import Manifest


class ModelTransfer:
    """Transfer of one model, kept while this agent runs. `refs`: branches and tags that will name it."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.repo, self.revision = hub_name(model)
        self.refs: set[str] = set()
        self.of_hub: set[str] = set()  #: Those that the Hub itself mapped to this commit here.
        self.known: Manifest | None = None  #: The Hub's answer about `model` for the next download.
        self.own: Holding | None = None  #: None until a member needs the model.
        self.reported: ModelHeld | None = None
        self.reported_at = 0.0
        self.others: dict[str, ModelHeld] = {}
        #: The seeder that the coordinator named; None until it has, "" if no member can be it.
        self.lender: str | None = None
        self.began = time.monotonic()
        self.fetch: Fetch | None = None
        self.task: asyncio.Task[Path] | None = None
        self.waiting = 0
        self.inspecting = False  #: True while the disk is read for another member's report.
        #: True if it was requested on all Macs. It then starts again when a member has it later.
        self.everywhere = False
        self.speeds: dict[str, TransferRate] = {}
        self.changed = asyncio.Event()

    @property
    def runs(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def complete(self) -> bool:
        """True if all of it was here at the end of the last request."""
        task = self.task
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    @property
    def failure(self) -> str:
        """Reason why the last request failed; empty if it did not."""
        task = self.task
        if task is None or not task.done() or task.cancelled() or (error := task.exception()) is None:
            return ""
        return error.detail if isinstance(error, MlxtpError) else f"{type(error).__name__}: {error}"

    def ended(self, task: asyncio.Task[Path]) -> None:
        """Mark the error as read: a waiting caller raises it, but there may be none."""
        self.known = None
        if not task.cancelled():
            task.exception()

    @property
    def ends(self) -> bool:
        """True if it was cancelled and has not ended yet."""
        return self.task is not None and not self.task.done() and bool(self.task.cancelling())

    def holdings(self, me: str) -> list[tuple[str, Holding]]:
        """Return the progress of each member that is to have the model, this node (`me`) first."""
        mine = self.own or (Holding() if self.runs else None)
        if why := self.failure:
            mine = mine or Holding()
            mine = replace(mine, wants=True, problem=mine.problem or why)
        found = [(me, mine)] if mine is not None else []
        found += [(node, holding(report)) for node, report in sorted(self.others.items())]
        return [
            (node, held)
            for node, held in found
            if held.wants or (self._came(node, held, me) and not held.total)
        ]

    def _came(self, node: str, held: Holding, me: str) -> bool:
        return held.complete or bool(node == me and self.complete and held.revision and not held.total)

    def row(self, node: str, held: Holding, me: str, name_of: Callable[[str], str]) -> dict[str, Any]:
        """Return the progress of a member for commands: bytes, bytes per second, seconds left."""
        speed = self.speeds[node].bytes_per_s if node in self.speeds else 0.0
        left_s = round((held.total - held.held) / speed) if speed and held.total else None
        return {
            "node_id": node,
            "self": node == me,
            "name": name_of(node),
            "lender": name_of(self.lender) if self.lender not in (None, "", node) else "",
            "held_bytes": held.held,
            "total_bytes": held.total,
            "bytes_per_s": round(speed),
            "left_s": left_s,
            "complete": self._came(node, held, me),
            "problem": held.problem,
        }

    async def pause(self) -> None:
        """Wait for a message about the transfer, at most half a second."""
        self.changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self.changed.wait()

    @property
    def heard_at(self) -> float:
        """Time of the seeder's last report, in seconds; 0 if there is none."""
        speed = self.speeds.get(self.lender or "")
        return speed.seen[-1][0] if speed is not None and speed.seen else 0.0


def look(repo: Repo, revision: str, wants: bool) -> tuple[Path | None, Holding]:
    """Return what is here of a model: its folder if it is complete, and its progress. Reads the disk."""
    folder = repo.snapshot(revision)
    try:
        free = free_bytes(repo.cache)
    except OSError:
        free = 0
    if folder is None:
        begun = repo.begun()
        return None, Holding("", repo.blobs.held_bytes(begun) if begun is not None else 0, 0, free, wants)
    manifest = repo.manifest(folder.name)
    if manifest is None:  # from a program with other file names: usable, but not for copies
        return folder, Holding(folder.name, 0, 0, free, wants=False)
    return folder, Holding(folder.name, manifest.size, manifest.size, free, wants)


def holding(report: ModelHeld) -> Holding:
    """Return what a member has reported of a model."""
    return Holding(report.revision, report.held, report.total, report.free, report.wants, report.problem)
