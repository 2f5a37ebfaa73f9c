"""Exchange of failure files. Each Mac keeps its own; agents request those of others to compare them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from pathlib import Path
from typing import Any

from ..cluster.surroundings import Surroundings
from ..errors import MlxtpError
from ..wire.cluster_messages import MAX_RECORD, Record, RecordsTold, RecordsWanted
from . import failure_store

log = logging.getLogger(__name__)

#: Seconds the other agents have for their replies.
ANSWER_S = 5.0
#: Limit for one failure: more than the ranks of any group. The queried agents share it.
_MAX_FILES = 32
#: Least share of an agent: its own record and that of its rank.
_FILES_OF_A_MEMBER = 2


class FailureFiles:
    """Exchange of failure files with all linked members, in both directions."""

    def __init__(self, cluster: Surroundings) -> None:
        self._cluster = cluster
        self._asked: dict[bytes, _PendingReply] = {}
        #: By the node id of the requesting agent.
        self._answers: dict[str, asyncio.Task[None]] = {}

    async def gather(self, number: int, epoch_id: str) -> list[dict[str, Any]]:
        """Return the fields of the other agents' files of this epoch, with the name of each agent as
        `told_by`. Agents that do not reply in time are left out.
        """
        nonce = secrets.token_bytes(16)
        asked = self._asked[nonce] = _PendingReply()
        try:
            for node_id in sorted(self._cluster.links.nodes()):
                with contextlib.suppress(MlxtpError):  # its link has just ended
                    self._cluster.links.send(node_id, RecordsWanted(nonce, number, epoch_id))
                    asked.waiting.add(node_id)
                    asked.files[node_id] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await asked.all_answered()
        finally:
            del self._asked[nonce]
        return [
            fields | {"told_by": self._cluster.name_of(node_id)}
            for node_id, files in asked.files.items()
            for fields in files
        ]

    def received(self, node_id: str, message: RecordsWanted | Record | RecordsTold) -> None:
        """Handle a request or a reply of another agent."""
        if isinstance(message, RecordsWanted):
            if node_id not in self._answers:  # a second request before the first reply is ignored
                task = self._answers[node_id] = asyncio.ensure_future(self._answer(node_id, message))
                task.add_done_callback(lambda _: self._answers.pop(node_id))
            return
        asked = self._asked.get(message.nonce)
        if asked is None or node_id not in asked.waiting:
            return
        if isinstance(message, RecordsTold):
            asked.answered(node_id)
        elif len(asked.files[node_id]) < asked.share:
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(fields := json.loads(message.body), dict):
                    asked.files[node_id].append(fields)

    def lost(self, node_id: str) -> None:
        """Handle the end of the last link to an agent."""
        for asked in self._asked.values():
            asked.answered(node_id)

    async def _answer(self, node_id: str, wanted: RecordsWanted) -> None:
        home = self._cluster.settings.home
        bodies = await asyncio.to_thread(kept, home, wanted.number, wanted.epoch_id)
        with contextlib.suppress(MlxtpError):  # its link has ended
            for body in bodies:
                self._cluster.links.send(node_id, Record(wanted.nonce, body))
            self._cluster.links.send(node_id, RecordsTold(wanted.nonce))

    async def close(self) -> None:
        """Cancel the replies in progress."""
        answers = list(self._answers.values())
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


class _PendingReply:
    """The agents that have not replied yet, and the files received."""

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self.files: dict[str, list[dict[str, Any]]] = {}
        self._changed = asyncio.Event()

    @property
    def share(self) -> int:
        """Number of files accepted from each agent."""
        return max(_MAX_FILES // len(self.files), _FILES_OF_A_MEMBER)

    def answered(self, node_id: str) -> None:
        self.waiting.discard(node_id)
        self._changed.set()

    async def all_answered(self) -> None:
        while self.waiting:
            self._changed.clear()
            await self._changed.wait()


def kept(home: Path, number: int, epoch_id: str) -> list[bytes]:
    """Return the files of this epoch.

    Files and requests without an id are matched by the epoch's number: their ranks did not receive the
    epoch's key before it ended.
    """
    found = []
    for path in sorted((home / failure_store.FOLDER).glob(f"{failure_store.PATTERN}/*.json")):
        try:
            body = path.read_bytes()
            fields = json.loads(body)
            same = fields["epoch"] == number and (
                epoch_id in ("", fields["epoch_id"]) or not fields["epoch_id"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is ignored: %s", path, error)
        else:
            if same and len(body) <= MAX_RECORD:
                found.append(body)
    return found[-_MAX_FILES:]
