"""Download of one model into this Mac's cache, from the Hub or a member."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..errors import Code, LinkError, ModelError, ProtocolError, why_not_written
from . import hub_client, peer_copy
from .hub_cache import Damaged, FileQueue, PartialFile, Repo, Stopped, hub_name, take
from .manifest import Manifest, is_commit, wanted

FILES_AT_ONCE = 4  #: Files that the Hub sends at the same time.
LOOK_S = 0.25
END_S = 1.0  #: Seconds to wait for threads to end. Threads that end later write nothing.
PROGRESS_S = 1.0
CLOSE_S = 2.0  #: Seconds that the end of a program waits for threads that wait for the network.

T = TypeVar("T")
Connect = Callable[[], peer_copy.PeerConnection]
#: Called with the bytes that are here and the bytes of all files (0: not known yet).
OnProgress = Callable[[int, int], None]
#: Fetches files of the queue until it is empty or the function returns True.
Bring = Callable[[FileQueue, Callable[[], bool]], None]


def begin(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a daemon thread. A caller can only abandon it, since it may wait for a network."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: the waiting caller raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="apart", daemon=True).start()
    return future


async def apart(work: Callable[[], T]) -> T:
    """Run `work` as `begin` does and await its result. Cancellation ends only the wait."""
    return await asyncio.wrap_future(begin(work))


async def download(name: str, on_progress: OnProgress, known: Manifest | None = None) -> Path:
    """Download OWNER/NAME[@REVISION], or its missing files; return the folder. Raises ModelError."""
    return await Fetch(*hub_name(name), known=known).run(on_progress)


class Fetch:
    """Download of `revision`, from the Hub or a member. `refs`: more branches and tags to point at it.

    `known`: the Hub's manifest, if it has been requested. `by_hub`: refs that the Hub mapped to this commit.
    """

    def __init__(
        self,
        repo: Repo,
        revision: str,
        refs: Iterable[str] = (),
        *,
        known: Manifest | None = None,
        by_hub: Iterable[str] = (),
    ) -> None:
        self.repo = repo
        self.revision = revision
        self.manifest: Manifest | None = None  #: None until it is known.
        self.refs = frozenset(each for each in (revision, *refs) if not is_commit(each))
        #: The subset of `refs` that the Hub itself, not only a member, maps to the commit.
        self.by_hub = self.refs & frozenset(by_hub)
        self._known = known
        #: Files that are missing; None until the disk is known to have room for them.
        self._parts: Sequence[PartialFile] | None = None
        self._stop = threading.Event()

    def stop(self) -> None:
        """Stop the download: within two seconds it raises Stopped. Bytes on the disk stay."""
        self._stop.set()

    @property
    def held_bytes(self) -> int:
        if self.manifest is None or self._parts is None:
            return 0
        return self.manifest.size - sum(part.file.size - part.held_bytes for part in self._parts)

    async def run(self, on_progress: OnProgress, connect: Connect | None = None, model: str = "") -> Path:
        """Run `from_hub`, or with `connect` `from_member`, and call `on_progress` once a second."""
        work = self.from_hub if connect is None else partial(self.from_member, model, connect)
        running = asyncio.ensure_future(apart(work))
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=PROGRESS_S)
                on_progress(self.held_bytes, self.manifest.size if self.manifest is not None else 0)
            return running.result()
        except asyncio.CancelledError:
            self.stop()
            await asyncio.wait({running}, timeout=CLOSE_S)
            raise
        finally:
            running.add_done_callback(lambda task: task.cancelled() or task.exception())

    def from_hub(self) -> Path:
        """Download all files from the Hub; return the folder. Raises ModelError and Stopped."""
        (manifest,) = self._run([self._look_up], threading.Event())

        def bring(queue: FileQueue, _: object) -> None:
            while (part := take(queue)) is not None:
                hub_client.fetch(manifest, part)

        with contextlib.suppress(Damaged):
            return self._bring(manifest, bring, FILES_AT_ONCE)
        try:
            return self._bring(manifest, bring, FILES_AT_ONCE)
        except Damaged as error:
            raise ModelError(f"cannot get {self.repo.name}: {error}, twice; try again") from None

    def _look_up(self) -> Manifest:
        found = self._known or hub_client.look_up(self.repo.name, self.revision)
        self.by_hub |= self.refs & {self.revision}
        self.by_hub |= hub_client.named(found.name, found.revision, self.refs - self.by_hub).keys()
        return found

    def from_member(self, model: str, connect: Connect) -> Path:
        """Copy all files from the seeder behind `connect`; return the folder.

        A seeder's manifest is only a hint: see `needed`, `hub_client.confirm`. Raises LinkError,
        ProtocolError or Damaged if the seeder fails, ModelError if this Mac does.
        """

        def ask() -> Manifest:
            with contextlib.closing(connect()) as connection:
                return peer_copy.ask(connection, model)[0]

        (offered,) = self._run([ask], threading.Event())
        if offered.name != self.repo.name:
            raise LinkError(f"{offered.name} was offered for {self.repo.name}")
        if is_commit(self.revision) and offered.revision != self.revision:
            raise LinkError(f"{offered.revision} of {self.repo.name} was offered for {self.revision}")
        if self._known is None or self._known.revision != offered.revision:
            self._known = None
            self.by_hub = self.by_hub if is_commit(self.revision) else frozenset()
        repo, commit = self.repo, offered.revision
        mine = repo.manifest(commit) if repo.snapshot(commit) is not None else None
        manifest = mine or needed(offered)

        def bring(queue: FileQueue, stopped: Callable[[], bool]) -> None:
            with contextlib.closing(connect()) as connection:
                peer_copy.bring(connection, offered, model, queue, stopped)

        def confirm() -> None:
            self.by_hub |= hub_client.confirm(manifest, self.refs - self.by_hub, self._known)

        return self._bring(manifest, bring, peer_copy.CONNECTIONS, confirm)

    def _bring(self, manifest: Manifest, bring: Bring, times: int, *beside: Callable[[], None]) -> Path:
        repo, blobs = self.repo, self.repo.blobs
        try:
            found = repo.snapshot(manifest.revision)
            if found is not None and repo.refs.commit(self.revision) == manifest.revision:
                self.manifest, self._parts = manifest, ()
                return found
            with repo.locked(self._stop.is_set):
                self._parts, self.manifest = None, manifest
                for file in manifest.blobs:
                    if self._stop.is_set():
                        raise Stopped
                    blobs.drop_if_wrong(file)
                blobs.check_room(manifest)
                repo.keep(manifest)
                ended = threading.Event()

                def stopped() -> bool:
                    return self._stop.is_set() or ended.is_set()

                parts = [PartialFile(blobs, file, stopped) for file in manifest.blobs if not blobs.has(file)]
                self._parts = parts
                try:
                    for part in parts:
                        if part.held_bytes:
                            part.open()  # now, lest a connection idle while this is hashed
                    work = partial(bring, list(parts), stopped)
                    self._run([*beside, *([work] * times if parts else ())], ended)
                finally:
                    for part in parts:
                        part.close()
                return repo.publish(manifest, self.revision, by_hub=self.revision in self.by_hub)
        except OSError as error:
            raise ModelError(f"{repo.name}: {why_not_written(error, repo.cache)}") from None

    def _run(self, works: Sequence[Callable[[], T]], ended: threading.Event) -> list[T]:
        """Run all at once. At `stop` or the first failure, set `ended` and raise Stopped or the failure."""
        begun = [begin(each) for each in works]
        while not self._stop.is_set():
            done, running = wait(begun, LOOK_S, FIRST_EXCEPTION)
            if not running or any(each.exception() for each in done):
                break
        ended.set()
        done, running = wait(begun, END_S)
        failures = [error for each in done if (error := each.exception()) is not None]
        for error in sorted(failures, key=lambda error: isinstance(error, Stopped)):
            raise error
        if running:
            raise Stopped
        return [each.result() for each in begun]


def needed(offered: Manifest) -> Manifest:
    """Return the files of a member's manifest that serving needs. Raises ProtocolError if it is no model."""
    manifest = replace(offered, files=wanted(offered.files))
    paths = [file.path for file in manifest.files]
    if "config.json" not in paths or not any(path.endswith(".safetensors") for path in paths):
        raise ProtocolError(f"a member offers no model as {offered.name}", Code.NOT_AUTHENTIC)
    return manifest
