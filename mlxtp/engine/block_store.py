"""Blocks of KV caches on disk: files, the room they take, and the threads that write and read them.

A file ends with a checksum. Its name has the digest of all tokens up to its end, their number, and the digest
of the block before. A torn or damaged file, or one of another layout, is a miss, and is deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import secrets
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from .batch import Caches
from .loader import leaves

#: Names and values of a block: MLX arrays to write, `Raw` arrays after reading.
Items = list[tuple[str, Any]]

_WORD = struct.Struct("<I")  # the checksum is a CRC-32: others take longer than the disk
QUEUED_BLOCKS = 8  # most blocks that wait for the disk before rank 0 stops sending more
LAG_BYTES = 1 << 28  # most waiting bytes on another rank, whose disk may be slower
RETRY_S = 600.0  # seconds without writing after an error
CLOSE_S = 1.0  # seconds to write queued blocks at the end
FULL_SHARE = 0.95  # an eviction leaves this share of the room filled, so that not every block evicts
TOUCH_S = 60.0  # least seconds between two marks of a block as used
UNFINISHED_S = 600.0  # age in seconds of an unfinished file whose process must have ended
_AHEAD_S = 60.0  # most seconds that a file may be newer than the clock
_CHUNK = 1 << 22


class Block(NamedTuple):
    digest: bytes
    end: int
    previous: bytes
    size: int
    used_s: float

    @property
    def name(self) -> str:
        return f"{self.digest.hex()}-{self.end}-{self.previous.hex()}"

    @staticmethod
    def named(path: os.DirEntry[str]) -> Block | None:
        with contextlib.suppress(ValueError, OSError):
            digest, end, previous = path.name.split("-")
            size, used_s = path.stat().st_size, path.stat().st_mtime  # DirEntry caches the result
            return Block(bytes.fromhex(digest), int(end), bytes.fromhex(previous), size, used_s)
        return None


@dataclass(frozen=True, slots=True)
class Read:
    """Joined items of the first `blocks` requested blocks."""

    uid: int
    blocks: int
    items: Items


class Written: ...


# --- one file --------------------------------------------------------------------------------------------


class Raw(NamedTuple):
    """Array as read: its bits as unsigned numbers, in numpy or MLX, and the name of its MLX type."""

    bits: Any
    dtype: str


def _dtype(name: str) -> mx.Dtype:
    dtype: mx.Dtype = getattr(mx, "bool_" if name == "bool" else name)
    return dtype


def array_of(raw: Raw) -> mx.array:
    bits: mx.array = raw.bits
    return bits.view(_dtype(raw.dtype))


def write_block(path: Path, items: Items, name: str) -> int:
    """Write contiguous arrays to a new file; return its size. `read_block` must use the same `name`."""
    arrays = [(name, value) for name, value in items if isinstance(value, mx.array)]
    shapes = [(name, str(value.dtype).rpartition(".")[2], value.shape) for name, value in arrays]
    plain = [(name, value) for name, value in items if not isinstance(value, mx.array)]
    head = json.dumps([name, shapes, plain]).encode()
    checksum = 0
    path.touch(0o600, exist_ok=False)
    with path.open("wb") as file:

        def append(data: bytes | memoryview) -> None:
            nonlocal checksum
            for at in range(0, len(data), _CHUNK):
                part = data[at : at + _CHUNK]
                checksum = zlib.crc32(part, checksum)
                file.write(part)

        append(_WORD.pack(len(head)) + head)
        for _, array in arrays:
            data = memoryview(array)  # type: ignore[arg-type]  # waits until it is computed
            append(data.cast("B") if array.size and array.ndim else data.tobytes())
        append(_WORD.pack(checksum))
        return file.tell()


def read_block(path: Path, name: str) -> list[tuple[str, Any]]:
    """Return items, with arrays as `Raw`. Raises OSError, or ValueError if damaged or of another `name`."""
    data = path.read_bytes()
    body = memoryview(data)[: -_WORD.size]
    if _WORD.unpack_from(data, len(body)) != (zlib.crc32(body),):
        raise ValueError("its checksum is wrong")
    (length,) = _WORD.unpack_from(body)
    at = _WORD.size + length
    written, shapes, plain = json.loads(bytes(body[_WORD.size : at]))
    if written != name:
        raise ValueError(f"it is {written}")
    items: list[tuple[str, Any]] = [(key, value) for key, value in plain]
    for key, dtype, shape in shapes:
        bits = np.dtype(f"u{_dtype(dtype).size}")
        count = int(np.prod(shape))
        array = np.frombuffer(body, bits, count, at).reshape(shape)
        items.append((key, Raw(array, dtype)))
        at += array.nbytes
    return items


def joined(parts: Sequence[Items]) -> Iterator[tuple[str, Any]]:
    """Join blocks, item by item: arrays along the second-last axis. Raises ValueError."""
    columns: list[dict[str, Any]] = [dict(part) for part in parts]
    kinds = [{name: getattr(value, "dtype", "") for name, value in part.items()} for part in columns]
    if any(each != kinds[0] for each in kinds):
        raise ValueError("blocks of different layouts")
    for name, value in parts[-1] if parts else ():
        if isinstance(value, Raw) and len(parts) > 1:
            yield name, Raw(np.concatenate([each[name].bits for each in columns], axis=-2), value.dtype)
        else:
            yield name, value


# --- KV caches as the items of a block, and back; on the MLX thread ---------------------------------------


def block_of(caches: Caches, start: int, end: int, *, truncatable: bool) -> Items:
    def part(value: Any) -> Any:
        if not isinstance(value, mx.array):
            return value
        return mx.contiguous(value[..., start:end, :] if truncatable else value)

    held = [(cache.keys, cache.values) if truncatable else cache.state for cache in leaves(caches)]
    items: Items = tree_flatten(tree_map(part, held))
    mx.async_eval([value for _, value in items if isinstance(value, mx.array)])
    return items


def caches_of(new: Caches, items: Items, length: int, *, truncatable: bool) -> Caches:
    """Fill `new` caches with blocks of `length` tokens. Raises ValueError, or others, if they do not fit."""
    values = [(name, array_of(value) if isinstance(value, Raw) else value) for name, value in items]
    for cache, held in zip(leaves(new), tree_unflatten(values), strict=True):
        if truncatable:
            if any(array.shape[-2] != length for _, array in tree_flatten(held)):
                raise ValueError(f"blocks of other than {length} tokens")
            cache.keys, cache.values = held
            cache.offset = length
        else:
            cache.state = held
    return new


# --- the folder ------------------------------------------------------------------------------------------


class _Account:
    """Total size of all blocks in a folder, at most `room` bytes, for all ranks of a Mac."""

    def __init__(self, folder: Path, room: int, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._room = room
        self._clock = clock
        self._again_at = 0.0
        self.failing = False
        self.used = 0

    @property
    def room(self) -> int:
        return 0 if self.failing and self._clock() < self._again_at else self._room

    def failed(self, error: Exception) -> None:
        if not self.failing:
            again = f"tried again every {RETRY_S / 60:g} minutes"
            sys.stderr.write(f"KV caches are no longer kept on disk: {error}; {again}\n")
        self.failing, self._again_at = True, self._clock() + RETRY_S

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        path = self._folder / ".lock"
        path.touch(0o600)
        with path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def count(self) -> None:
        with self._locked():
            self._note(self._make_room(0))

    def admit(self, path: Path, target: Path) -> bool:
        size = path.stat().st_size
        if size > self._room * FULL_SHARE:
            return False
        with self._locked():
            if target.exists():  # another process was faster
                return True
            used = self._noted() + size
            if used > self._room:
                used = self._make_room(size) + size
            path.rename(target)
            self._note(used)
        if self.failing:
            self.failing = False
            sys.stderr.write("KV caches are kept on disk again\n")
        return True

    def remove(self, size: int) -> None:
        with self._locked():
            self._note(max(self._noted() - size, 0))

    def _noted(self) -> int:
        try:
            return int((self._folder / ".used").read_text())
        except (ValueError, FileNotFoundError):
            return self._make_room(0)

    def _note(self, used: int) -> None:
        self.used = used
        _write_text(self._folder / ".used", str(used))

    def _make_room(self, size: int) -> int:
        now = time.time()
        found: list[tuple[tuple[float, int], int, str]] = []
        for layout in os.scandir(self._folder):
            if not layout.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(layout):
                if entry.name.startswith("."):
                    with contextlib.suppress(OSError):
                        if abs(now - entry.stat().st_mtime) > UNFINISHED_S:
                            Path(entry.path).unlink()
                elif block := Block.named(entry):
                    # A file from the future was written before the clock was set back.
                    used_s = block.used_s if block.used_s <= now + _AHEAD_S else 0.0
                    found.append(((used_s, -block.end), block.size, entry.path))
        total = sum(each for _, each, _ in found)
        if total + size <= self._room:
            return total
        for _, each, path in sorted(found):  # oldest first, and a conversation from its end
            if total + size <= self._room * FULL_SHARE:
                break
            with contextlib.suppress(OSError):
                Path(path).unlink()
            total -= each
        return total


def _write_text(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text)


class BlockStore:
    """Blocks in `folder`/`layout`; `about` describes them for people. `room`: bytes for all of `folder`.

    Threads `post` a Read or Written. An error stops writing for RETRY_S.
    """

    def __init__(
        self,
        folder: Path,
        layout: str,
        about: dict[str, object],
        room: int,
        post: Callable[[object], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spilled_bytes = 0
        self._folder = folder / layout
        self._post = post
        self._account = _Account(folder, room, clock)
        self._lock = threading.Lock()  # of the following: threads write it, the main thread reads it
        self._blocks: dict[bytes, Block] = {}
        self._writing: set[bytes] = set()
        self._writes: queue.SimpleQueue[tuple[Block, Items | None] | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._about = json.dumps(about)
        self._open()
        for work in (self._write, self._read):
            threading.Thread(target=work, name=work.__name__.strip("_") + "-blocks", daemon=True).start()

    # --- for the main thread -------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return self._account.used

    @property
    def room_bytes(self) -> int:
        return self._account.room  # 0 for a while after an error

    @property
    def takes(self) -> bool:
        return self.room_bytes > 0 and self._writes.qsize() < QUEUED_BLOCKS

    @property
    def follows(self) -> bool:
        """Return True if this rank, whose disk may be slower than rank 0's, can queue another block."""
        return self.takes or (self.room_bytes > 0 and self._waiting_bytes < LAG_BYTES)

    def has(self, digest: bytes) -> bool:
        return digest in self._blocks

    def ends(self, stems: Container[bytes]) -> list[int]:
        with self._lock:
            ends = {block.end for block in self._blocks.values() if block.previous in stems}
        return sorted(ends, reverse=True)

    def is_kept(self, digest: bytes) -> bool:
        return digest in self._blocks or digest in self._writing

    def put(self, digest: bytes, end: int, previous: bytes, items: Items) -> bool:
        """Queue a block of contiguous arrays, even before they are computed. False if the queue is full."""
        if not self.follows:
            return False
        self._writing.add(digest)
        size = sum([value.nbytes for _, value in items if isinstance(value, mx.array)])
        with self._lock:
            self._waiting_bytes += size
        self._writes.put((Block(digest, end, previous, size, 0.0), items))
        return True

    def read(self, uid: int, digests: tuple[bytes, ...]) -> None:
        self._reads.put(partial(self._read_all, uid, digests))

    def delete(self, digest: bytes) -> None:
        with self._lock:
            block = self._blocks.pop(digest, None)
        if block is not None:
            self._writes.put((block, None))

    def close(self) -> None:
        self._writes.put(None)
        self._reads.put(None)
        until = time.monotonic() + CLOSE_S
        while self._writing and time.monotonic() < until:
            time.sleep(0.01)

    # --- in the threads ------------------------------------------------------------------------------

    def _write(self) -> None:
        while job := self._writes.get():
            block, items = job
            if items is None:
                self._remove(block)
                continue
            try:
                # Another process may have removed the file.
                there = self.has(block.digest) and (self._folder / block.name).exists()
                if self.room_bytes and not there:
                    self._write_one(block, items)
            except FileNotFoundError:  # the folder was removed
                self._open()
            except (OSError, RuntimeError, ValueError) as error:
                self._account.failed(error)
            finally:
                self._writing.discard(block.digest)
                with self._lock:
                    self._waiting_bytes -= block.size
                del job, items
            self._post(Written())

    def _open(self) -> None:
        try:
            self._look()  # blocks can be read even if the folder is not writable
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            _write_text(self._folder / "about.json", self._about)
            self._account.count()
            self._look()
        except OSError as error:
            self._account.failed(error)

    def _write_one(self, block: Block, items: Items) -> None:
        if self._account.failing or not self._folder.is_dir():
            self._open()
        path = self._folder / f".{secrets.token_hex(8)}"
        try:
            size = write_block(path, items, f"{self._folder.name}/{block.name}")
            block = block._replace(size=size, used_s=time.time())
            os.utime(path, (block.used_s, block.used_s))
            if not self._account.admit(path, self._folder / block.name):
                return
        finally:
            path.unlink(missing_ok=True)
        self.spilled_bytes += size
        with self._lock:
            self._blocks[block.digest] = block
        before = self._blocks.get(block.previous)
        if before is not None and not (self._folder / before.name).exists():
            self._look()  # more blocks may be gone; forget them, so that they are written again
        self._touch(block.previous)

    def _touch(self, digest: bytes) -> None:
        now = time.time()
        while (block := self._blocks.get(digest)) is not None and abs(now - block.used_s) > TOUCH_S:
            with contextlib.suppress(OSError):
                os.utime(self._folder / block.name, (now, now))
            with self._lock:
                if digest in self._blocks:
                    self._blocks[digest] = block._replace(used_s=now)
            digest = block.previous

    def _read(self) -> None:
        while work := self._reads.get():
            work()

    def _read_all(self, uid: int, digests: tuple[bytes, ...]) -> None:
        parts: list[Items] = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            try:
                parts.append(read_block(self._folder / block.name, f"{self._folder.name}/{block.name}"))
            except FileNotFoundError:  # another process evicted it, or a user deleted the folder
                with contextlib.suppress(OSError):
                    self._look()
                break
            except (OSError, ValueError, TypeError, AttributeError, struct.error):
                with self._lock:
                    self._blocks.pop(digest, None)
                self._remove(block)
                break
        try:  # one item at a time, because the parts already hold all of it in memory
            items = [
                (name, Raw(mx.array(value.bits), value.dtype) if isinstance(value, Raw) else value)
                for name, value in joined(parts)
            ]
        except (ValueError, RuntimeError, MemoryError):  # MLX raises RuntimeError when out of memory
            parts, items = [], []
        if parts:
            self._touch(digests[len(parts) - 1])
        self._post(Read(uid, len(parts), items))

    def _look(self) -> None:
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(FileNotFoundError):
            entries = list(os.scandir(self._folder))
        found = [block for entry in entries if (block := Block.named(entry))]
        with self._lock:
            self._blocks = {block.digest: block for block in found}

    def _remove(self, block: Block) -> None:
        with contextlib.suppress(OSError):
            (self._folder / block.name).unlink()
            self._account.remove(block.size)
