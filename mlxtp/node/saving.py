"""Beliefs of this node on its disk, and reports of the others' disks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from ..cluster.beliefs import Roster
from ..errors import UserError
from ..wire.control import RosterSaved
from .state import Kept, save

log = logging.getLogger(__name__)

ELSEWHERE_S = 5.0  #: How long a removal waits until another member's disk has it.


class Saving:
    """Writes `state.json` when something changed, and again at each tick until that works.

    `on_roster` is called with what to tell the others once a new roster is on the disk.
    """

    def __init__(self, home: Path, on_roster: Callable[[RosterSaved], None]) -> None:
        self._home = home
        self._on_roster = on_roster
        self._saved: Kept | None = None
        self._problem = ""
        self._rosters: dict[str, int] = {}
        """The digest of the roster on each other member's disk."""
        self._reported = asyncio.Event()

    def save(self, kept: Kept) -> None:
        """Write what is kept, unless the file has it."""
        if kept == self._saved:
            return
        try:
            save(self._home, kept)
        except UserError as error:
            if error.detail != self._problem:
                log.error("%s", error.detail)
            self._problem = error.detail
            return
        before, self._saved, self._problem = self._saved, kept, ""
        if before is None or before.beliefs.roster != kept.beliefs.roster:
            self._on_roster(RosterSaved(kept.beliefs.roster.digest()))

    def received(self, node_id: str, report: RosterSaved) -> None:
        """Another member wrote its roster."""
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
