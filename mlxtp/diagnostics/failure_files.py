"""Files of failures, of which each Mac keeps its own: others ask for them, to lay them beside theirs."""

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

ANSWER_S = 5.0
"""How long the others may take."""
_MAX_FILES = 32
"""Of one failure: more ranks than any group has. Those who are asked share it."""
_FILES_OF_A_MEMBER = 2
"""At least: what the agent knew, and its rank."""


class FailureFiles:
    """Asks all members that have a link, and answers them."""

    def __init__(self, cluster: Surroundings) -> None:
        self._cluster = cluster
        self._asked: dict[bytes, _PendingReply] = {}
        self._answers: dict[str, asyncio.Task[None]] = {}
        """By who asked."""

    async def gather(self, number: int, epoch_id: str) -> list[dict[str, Any]]:
        """The fields of the files that others keep of this epoch, and as `told_by` whose each is; who does
        not answer in time is left out."""
        nonce = secrets.token_bytes(16)
        asked = self._asked[nonce] = _PendingReply()
        try:
            for node_id in sorted(self._cluster.links.nodes()):
                with contextlib.suppress(MlxtpError):  # it has just gone
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
        """Another agent asks or answers."""
        if isinstance(message, RecordsWanted):
            if node_id not in self._answers:  # who asks again before there is an answer gets one
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
        """The last link to an agent has ended."""
        for asked in self._asked.values():
            asked.answered(node_id)

    async def _answer(self, node_id: str, wanted: RecordsWanted) -> None:
        home = self._cluster.settings.home
        bodies = await asyncio.to_thread(kept, home, wanted.number, wanted.epoch_id)
        with contextlib.suppress(MlxtpError):  # it is gone
            for body in bodies:
                self._cluster.links.send(node_id, Record(wanted.nonce, body))
            self._cluster.links.send(node_id, RecordsTold(wanted.nonce))

    async def close(self) -> None:
        """Answer nobody more."""
        answers = list(self._answers.values())
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


class _PendingReply:
    """Who has still to answer, and what came."""

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self.files: dict[str, list[dict[str, Any]]] = {}
        self._changed = asyncio.Event()

    @property
    def share(self) -> int:
        """How many files each may tell."""
        return max(_MAX_FILES // len(self.files), _FILES_OF_A_MEMBER)

    def answered(self, node_id: str) -> None:
        self.waiting.discard(node_id)
        self._changed.set()

    async def all_answered(self) -> None:
        while self.waiting:
            self._changed.clear()
            await self._changed.wait()


def kept(home: Path, number: int, epoch_id: str) -> list[bytes]:
    """The files of this epoch. A file, or a question, without an id is of ranks that were not told the key of
    their epoch before it ended: then the number has to do."""
    found = []
    for path in sorted((home / failure_store.FOLDER).glob(f"{failure_store.PATTERN}/*.json")):
        try:
            body = path.read_bytes()
            fields = json.loads(body)
            same = fields["epoch"] == number and (
                epoch_id in ("", fields["epoch_id"]) or not fields["epoch_id"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is left aside: %s", path, error)
        else:
            if same and len(body) <= MAX_RECORD:
                found.append(body)
    return found[-_MAX_FILES:]
