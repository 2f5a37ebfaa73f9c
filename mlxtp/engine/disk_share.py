"""One rank's share of the KV caches on disk, for one loaded model. Rank 0's frames drive it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from ..model_files import fingerprint
from ..wire.messages import Bootstrap, FetchBlocks, LoadShard, Restore, Spill, digests_in
from .batch import CacheKind, Caches, share
from .block_store import BlockStore, Read, caches_of
from .loader import leaves
from .runner import Runner

LAYOUT = 1  # version of blocks; a new number makes older blocks useless


class DiskShare:
    """Blocks of this rank. Without a `store`, it replies that it has none. `post` gets threads' results."""

    def __init__(
        self, runner: Runner, kinds: CacheKind, store: BlockStore | None, post: Callable[[object], None]
    ) -> None:
        self.store = store
        self._runner = runner
        self._kinds = kinds
        self._post = post
        #: By uid: the frame that requests blocks (None once it is restored), and caches (None until read).
        self._fetches: dict[int, tuple[FetchBlocks | None, Caches | None]] = {}

    def spill(self, frame: Spill) -> None:
        """Queue a block, unless this rank's disk lags far behind rank 0's."""
        if self.store is not None and self.store.follows:
            items = self._runner.block(frame.uid, frame.start, frame.end)
            self.store.put(frame.digest, frame.end, frame.previous, items)

    def fetch(self, frame: FetchBlocks) -> None:
        self._fetches[frame.uid] = frame, None
        if self.store is None:
            self._post(Read(frame.uid, 0, []))
        else:
            self.store.read(frame.uid, digests_in(frame.digests))

    def arrived(self, read: Read) -> tuple[int, int] | None:
        """Return the uid and the number of usable leading blocks; None if no frame requested them."""
        if read.uid not in self._fetches:
            return None
        frame, _ = self._fetches.pop(read.uid)
        if frame is None:
            return read.uid, 0
        caches, blocks = Caches(), read.blocks
        if blocks:
            try:
                length, truncatable = frame.block * blocks, self._kinds.can.truncatable
                caches = caches_of(self._kinds.new(), read.items, length, truncatable=truncatable)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError):
                blocks = 0  # they have another layout
        self._fetches[read.uid] = frame, caches
        return read.uid, blocks

    def restore(self, frame: Restore) -> None:
        wanted, caches = self._fetches.pop(frame.uid)
        assert wanted is not None, "the protocol admits one Restore of a fetch"
        if caches is None:
            self._fetches[frame.uid] = None, None  # its blocks are not read yet
        if frame.blocks and caches is not None:
            length = frame.blocks * wanted.block
            kept = share(caches, length) if self._kinds.can.truncatable else caches
            self._runner.kept.insert(frame.uid, kept, length, fetched=True)
        if frame.bad and self.store is not None:
            for digest in digests_in(wanted.digests)[frame.blocks :]:
                self.store.delete(digest)

    def use(self) -> dict[str, int]:
        if (store := self.store) is None:
            return {}
        room, used = store.room_bytes, store.used_bytes
        return {"spilled_bytes": store.spilled_bytes, "disk_bytes": used, "disk_room_bytes": room}

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def open_store(
    bootstrap: Bootstrap, folder: Path, command: LoadShard, kinds: CacheKind, post: Callable[[object], None]
) -> BlockStore | None:
    import mlx_lm

    if not (bootstrap.disk_folder and bootstrap.disk_bytes and kinds.can.copyable):
        return None
    about: dict[str, object] = {
        "model": str(folder),
        "rank": bootstrap.rank,
        "ranks": bootstrap.world_size,
        "kv_bits": command.kv_bits,
    }
    try:
        weights = fingerprint(folder)
    except OSError:  # the weights are in memory, so this rank serves without a disk
        return None
    parts = {
        **about,
        "model": "",  # another folder may hold the same weights
        "layout": LAYOUT,
        "split": command.split,
        "weights": weights,
        "caches": [type(cache).__name__ for cache in leaves(kinds.new())],
        "device": str(mx.default_device()),
        "mlx": mx.__version__,  # type: ignore[attr-defined]
        "mlx-lm": mlx_lm.__version__,
    }
    layout = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    return BlockStore(Path(bootstrap.disk_folder), layout, about, bootstrap.disk_bytes, post)
