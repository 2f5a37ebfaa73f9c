"""One model on its way into this Mac's cache, from the Hub or a member. It waits: use it in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from ...cluster.manifests import Manifest
from ...errors import (
    LinkError,
    MlxtpError,
    ModelError,
    why_not_written,
)
from . import copying, hub
from .hub_cache import (
    Damaged,
    Part,
    Repo,
    Stopped,
)

FILES_AT_ONCE = 4
"""From the Hub."""

Connect = Callable[[], copying.Channel]
Work = Callable[[], None]


class Fetch:
    """`revision` is to come, and to be called `ref`, a branch, a tag or the commit itself.

    One call of `from_hub` or `from_member` at a time.
    """

    def __init__(self, repo: Repo, ref: str, revision: str) -> None:
        self.repo = repo
        self.ref = ref
        self.revision = revision
        self.manifest: Manifest | None = None
        """Once it is known."""
        self._parts: Sequence[Part] = ()
        self._stop = threading.Event()
        self._failed = threading.Event()

    def stop(self) -> None:
        """It is not wanted any more: what runs raises Stopped soon, and what has come stays."""
        self._stop.set()

    @property
    def held(self) -> int:
        """Bytes that are here."""
        missing = sum(part.file.size - part.held for part in self._parts)
        return self.manifest.size - missing if self.manifest is not None else 0

    def from_hub(self) -> Path:
        """Have all of it here; the folder. Raises ModelError and Stopped."""
        manifest = hub.look_up(self.repo.name, self.revision)
        for attempt in (1, 2):
            try:
                return self._bring(manifest, self._hub_work)
            except Damaged as error:
                if attempt == 2:
                    raise ModelError(f"cannot get {self.repo.name}: {error}, twice; try again") from None
        raise AssertionError

    def from_member(self, model: str, connect: Connect) -> Path:
        """The same, from the lender behind `connect`.

        Raises LinkError, ProtocolError and Damaged when that one is of no use, ModelError when this Mac is
        not.
        """
        channel = connect()
        try:
            manifest, _ = copying.ask(channel, model)
        finally:
            channel.close()
        if manifest.name != self.repo.name:
            raise LinkError(f"{manifest.name} was offered for {self.repo.name}")

        def work(parts: Sequence[Part]) -> list[Work]:
            board = copying.Board(manifest, parts)
            return [lambda: self._copy(model, manifest, connect, board)] * copying.CONNECTIONS

        return self._bring(manifest, work)

    def _hub_work(self, parts: Sequence[Part]) -> list[Work]:
        left, lock = list(reversed(parts)), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not left:
                        return
                    part = left.pop()
                part.open()
                assert self.manifest is not None
                hub.fetch(self.manifest, part, self._stopped)

        return [work] * FILES_AT_ONCE

    def _copy(self, model: str, manifest: Manifest, connect: Connect, board: copying.Board) -> None:
        channel = connect()
        try:
            copying.bring(channel, manifest, model, board, self._stopped)
        finally:
            channel.close()

    def _stopped(self) -> bool:
        return self._stop.is_set() or self._failed.is_set()

    def _bring(self, manifest: Manifest, work: Callable[[Sequence[Part]], list[Work]]) -> Path:
        repo = self.repo
        try:
            if (found := repo.snapshot(manifest.revision)) is not None and repo.commit(
                self.ref
            ) == manifest.revision:
                self.manifest, self._parts = manifest, ()
                return found
            with repo.locked(self._stopped):
                repo.keep(manifest)
                parts = [Part(repo, file, self._stopped) for file in manifest.blobs if not repo.has(file)]
                self._parts, self.manifest = parts, manifest
                repo.check_room(manifest)
                if parts:
                    self._run([lambda: _finish(parts), *work(parts)], parts)
                return repo.publish(manifest, self.ref)
        except OSError as error:
            raise ModelError(f"{repo.name}: {why_not_written(error, repo.cache)}") from None

    def _run(self, works: Sequence[Work], parts: Sequence[Part]) -> None:
        """All at once, until all have ended. The first failure ends the others, and is raised."""
        self._failed.clear()
        failures: list[BaseException] = []

        def run(work: Work) -> None:
            try:
                work()
            except (MlxtpError, OSError, Damaged, Stopped) as error:
                failures.append(error)
                self._failed.set()

        try:
            with ThreadPoolExecutor(len(works), thread_name_prefix="fetch") as pool:
                done = [pool.submit(run, each) for each in works]
                wait(done)
                for each in done:
                    each.result()
        finally:
            for part in parts:
                part.close()
        if failures:
            raise next((each for each in failures if not isinstance(each, Stopped)), failures[0])


def _finish(parts: Sequence[Part]) -> None:
    for part in parts:
        part.finish()
        part.close()
