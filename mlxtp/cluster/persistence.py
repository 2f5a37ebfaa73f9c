"""This node's state on its disk, and reports of the others' disks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import UserError
from ..wire.cluster_messages import RosterSaved
from .cluster_state import Roster
from .saved_state import SavedState, save

log = logging.getLogger(__name__)

ELSEWHERE_S = 5.0  #: Seconds for which a removal waits until another member's disk has it.


class Saving:
    """Writes `state.json` when something changed, and again at each tick until that works.

    One thread writes, in the order of the calls: a flush to the drive would hold up the event loop.
    `on_roster` is called with the message for the others once a new roster is on the disk.
    """

    def __init__(self, home: Path, on_roster: Callable[[RosterSaved], None]) -> None:
        self._home = home
        self._on_roster = on_roster
        self._disk = ThreadPoolExecutor(1, "saving")
        self._latest: SavedState | None = None  # written, or waiting for the thread
        self._roster: Roster | None = None  # in the file
        self._problem = ""
        self._rosters: dict[str, int] = {}  #: Digest of the roster on each other member's disk, by node id.
        self._reported = asyncio.Event()

    async def save(self, kept: SavedState) -> None:
        """Write the state, unless the file has it or is about to."""
        if kept == self._latest:
            return
        self._latest = kept
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, save, self._home, kept)
        except BaseException as error:
            self._latest = None  # so that the next call writes, also after a cancelled one
            if not isinstance(error, UserError):
                raise
            if error.detail != self._problem:
                log.error("%s", error.detail)
            self._problem = error.detail
            return
        self._problem = ""
        if self._roster != kept.beliefs.roster:
            self._roster = kept.beliefs.roster
            self._on_roster(RosterSaved(self._roster.digest()))

    async def close(self) -> None:
        """Wait until the latest state is on the disk."""
        await asyncio.to_thread(self._disk.shutdown)

    def received(self, node_id: str, report: RosterSaved) -> None:
        """Note that another member wrote its roster."""
        self._rosters[node_id] = report.roster
        self._reported.set()

    async def elsewhere(self, roster: Callable[[], Roster]) -> list[str]:
        """Return the other members whose disks have the roster: at least one, or none after some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ELSEWHERE_S):
                while not (found := self._having(roster())):
                    self._reported.clear()
                    await self._reported.wait()
                return found
        return []

    def _having(self, roster: Roster) -> list[str]:
        digest = roster.digest()
        return [node for node in roster.members() if self._rosters.get(node) == digest]
