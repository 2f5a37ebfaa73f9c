"""Blocks on disk: what is damaged, missing or of another layout is a miss, and the room is kept."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlxtp.engine import block_store
from mlxtp.engine.block_store import (
    RETRY_S,
    BlockStore,
    Items,
    Raw,
    Read,
    Written,
    array_of,
    block_of,
    caches_of,
    read_block,
    write_block,
)

ROOM = 1 << 20
ITEMS: Items = [
    ("0.0", mx.arange(48, dtype=mx.float32).reshape(1, 2, 4, 6)),
    ("0.1", mx.arange(48).astype(mx.bfloat16).reshape(1, 2, 4, 6)),
    ("1.0", mx.array([True, False])),
    ("1.1", mx.array(7)),
    ("1.2", mx.zeros((0, 3))),
    ("1.3", None),
    ("1.4", 5),
]


class Store:
    """A store, and what its threads post. They wait for arrays, and compute none."""

    def __init__(self, folder: Path, room: int = ROOM, layout: str = "layout") -> None:
        self.posted: SimpleQueue[object] = SimpleQueue()
        self.now = 0.0
        self.store = BlockStore(
            folder, layout, {"model": "tiny"}, room, self.posted.put, clock=lambda: self.now
        )

    def put(self, number: int, items: Items = ITEMS, previous: int | None = None) -> None:
        mx.eval([value for _, value in items if isinstance(value, mx.array)])
        assert self.store.put(digest(number), 4, b"" if previous is None else digest(previous), items)
        assert isinstance(self.posted.get(timeout=20), Written)

    def read(self, *numbers: int) -> Read:
        self.store.read(1, tuple(map(digest, numbers)))
        read = self.posted.get(timeout=20)
        assert isinstance(read, Read)
        return read

    def fill(self, *numbers: int) -> None:
        """Keep blocks of 1000 bytes."""
        for number in numbers:
            self.put(number, block(1000))

    def files(self) -> list[Path]:
        return sorted(self.store._folder.glob("[!.]*-*"))

    def age(self, number: int) -> float:
        """Seconds since a block was last used."""
        (file,) = self.store._folder.glob(f"{digest(number).hex()}-*")
        return time.time() - file.stat().st_mtime

    def set_age(self, number: int, age_s: float) -> None:
        (file,) = self.store._folder.glob(f"{digest(number).hex()}-*")
        os.utime(file, (time.time() - age_s,) * 2)


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    stores: list[Store] = []

    def opened(*args: Any, **fields: Any) -> Store:
        stores.append(Store(tmp_path / "cache", *args, **fields))
        return stores[-1]

    yield opened
    for each in stores:
        each.store.close()


Open = Callable[..., Store]


@pytest.fixture
def store(open_store: Open) -> Store:
    return open_store()


def same(items: Items, expected: Items) -> bool:
    """Bit by bit."""

    def bits(value: Any) -> Any:
        array = array_of(value) if isinstance(value, Raw) else value
        return (array.dtype, array.shape, array.tolist()) if isinstance(array, mx.array) else value

    found, wanted = ({name: bits(value) for name, value in each} for each in (items, expected))
    return found == wanted


def test_a_block_comes_back_as_it_was_also_in_another_process(open_store: Open) -> None:
    first = open_store()
    first.put(1)
    assert same(first.read(1).items, ITEMS)
    again = open_store()
    assert again.store.has(digest(1))
    assert same(again.read(1).items, ITEMS)


def test_files_are_for_their_owner_alone(store: Store) -> None:
    store.put(1)
    (file,) = store.files()
    for path in (file, file.parent / "about.json", *file.parent.parent.glob(".[lu]*")):
        assert path.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert file.parent.parent.stat().st_mode & 0o777 == 0o700


def test_blocks_are_joined_along_the_tokens_up_to_what_is_missing(store: Store) -> None:
    parts = {number: [("0", mx.full((1, 2, 3, 4), float(number)))] for number in (0, 1, 2, 4)}
    for number, items in parts.items():
        store.put(number, items)
    read = store.read(0, 1, 2, 3, 4)
    assert (read.uid, read.blocks) == (1, 3)
    assert same(read.items, [("0", mx.concatenate([parts[n][0][1] for n in range(3)], axis=-2))])
    assert store.read(3, 4).blocks == 0


@pytest.mark.parametrize("at", [0, 1, 3, 9, 40, 200, -5, -4, -1])
def test_a_flipped_byte_is_a_miss_and_the_file_is_deleted(store: Store, at: int) -> None:
    store.put(1)
    (file,) = store.files()
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert store.read(1).blocks == 0
    assert store.files() == []
    assert not store.store.has(digest(1))


@pytest.mark.parametrize("size", [0, 4, 8, 100])
def test_a_torn_file_is_a_miss(open_store: Open, size: int) -> None:
    store = open_store()
    store.put(1)
    os.truncate(*store.files(), size)
    assert open_store().read(1).blocks == 0
    assert store.files() == []


def test_blocks_of_two_layouts_do_not_join(store: Store) -> None:
    store.put(0, [("0", mx.ones((1, 1, 2, 2)))])
    store.put(1, [("0", mx.ones((1, 1, 2, 2)).astype(mx.bfloat16))])
    store.put(2, [("1", mx.ones((1, 1, 2, 2)))])
    assert store.read(0, 1).blocks == 0
    assert store.read(0, 2).blocks == 0


def test_the_thread_that_reads_survives_a_lack_of_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_parts: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    store.put(1)
    with monkeypatch.context() as patch:
        patch.setattr(block_store, "joined", full)
        assert store.read(1).blocks == 0
    assert store.read(1).blocks == 1


def test_a_file_that_vanishes_is_a_miss_and_is_written_again(store: Store) -> None:
    store.put(1)
    store.put(2)
    for file in store.files():
        file.unlink()
    assert store.read(1).blocks == 0
    assert not store.store.is_kept(digest(1))
    assert not store.store.is_kept(digest(2)), "it looks again"
    store.put(1)
    store.files()[0].unlink()
    store.put(1)
    assert store.read(1).blocks == 1


def test_a_folder_that_was_removed_is_made_again(store: Store, tmp_path: Path) -> None:
    store.put(1)
    shutil.rmtree(tmp_path / "cache")
    store.put(2)  # notices it
    store.put(3)
    assert store.read(3).blocks == 1
    assert store.read(1).blocks == 0
    assert [path.name for path in (tmp_path / "cache" / "layout").glob("about*")] == ["about.json"]
    assert used(tmp_path / "cache") == int((tmp_path / "cache" / ".used").read_text())
    shutil.rmtree(tmp_path / "cache")
    assert store.read(3).blocks == 0
    assert not store.store.is_kept(digest(3))


def test_files_of_other_names_are_let_alone(open_store: Open, tmp_path: Path) -> None:
    open_store().put(1)
    names, folder = {"notes.txt", "a-b-c", "12-x-"}, tmp_path / "cache" / "layout"
    for name in names:
        (folder / name).write_text("mine")
    open_store(room=2000).fill(*range(9))
    assert names <= {path.name for path in folder.iterdir()}


def block(size: int) -> Items:
    array = mx.zeros((1, 1, 1, size), dtype=mx.uint8)
    mx.eval(array)
    return [("0", array)]


def used(folder: Path) -> int:
    """Bytes of all blocks, while no store changes them."""
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return sum(path.stat().st_size for path in folder.glob("*/[!.]*-*"))


def test_the_least_recently_used_goes_first(open_store: Open) -> None:
    store = open_store(room=5000)
    for number in range(4):
        store.fill(number)
        store.set_age(number, 1000 - number)
    store = open_store(room=5000)
    store.read(0)  # used
    store.fill(4)
    assert [store.read(number).blocks for number in range(5)] == [1, 0, 1, 1, 1]


def test_of_one_conversation_its_end_goes_before_its_beginning(open_store: Open) -> None:
    store = open_store(room=5000)
    for number in range(4):
        store.store.put(digest(number), number + 1, digest(number - 1) if number else b"", block(1000))
        store.posted.get(timeout=20)
        store.set_age(number, 1000 - number)
    store = open_store(room=5000)
    store.read(0, 1, 2, 3)
    store.fill(9)
    assert store.read(0, 1, 2, 3).blocks == 3


def test_a_turn_marks_what_it_continues(open_store: Open) -> None:
    store = open_store()
    store.fill(0)
    store.set_age(0, 1000)
    open_store().put(1, block(100), previous=0)
    assert store.age(0) < 100


@pytest.mark.parametrize("clock_s", [-1e6, 1e6])
def test_the_room_is_kept_though_the_clock_jumps(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock_s: float
) -> None:
    store, now = open_store(room=5000), time.time
    store.fill(*range(4))
    monkeypatch.setattr(block_store.time, "time", lambda: now() + clock_s)
    for number in range(4, 9):
        store.fill(number)
        assert store.read(number).blocks == 1, "what is new stays"
        assert used(tmp_path / "cache") <= 5000


def test_the_room_is_kept_by_stores_that_write_at_once(open_store: Open, tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=open_store(20_000, layout).fill, args=range(25 * at, 25 * at + 40))
        for at, layout in enumerate(("one", "one", "two"))  # the first two share some
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert used(tmp_path / "cache") <= 20_000
    assert used(tmp_path / "cache") > 15_000
    assert int((tmp_path / "cache" / ".used").read_text()) == used(tmp_path / "cache")


def test_less_room_evicts_at_the_next_start(open_store: Open, tmp_path: Path) -> None:
    open_store(room=20_000).fill(*range(9))
    open_store(room=3000)
    assert used(tmp_path / "cache") <= 3000


def test_what_is_larger_than_the_room_is_not_kept(open_store: Open) -> None:
    store = open_store(room=2000)
    store.fill(1)
    store.put(2, block(3000))
    assert [store.read(number).blocks for number in (1, 2)] == [1, 0]


def test_what_a_killed_process_left_unfinished_goes(open_store: Open, tmp_path: Path) -> None:
    open_store().put(1)
    folder = tmp_path / "cache" / "layout"
    (folder / ".123-abc").write_bytes(b"half")
    (folder / ".124-abc").write_bytes(b"half, and still being written")
    os.utime(folder / ".123-abc", (0, 0))
    store = open_store()
    assert sorted(path.name for path in folder.glob(".*")) == [".124-abc"]
    assert store.read(1).blocks == 1


def test_a_disk_that_fails_ends_the_writing_with_one_line(
    store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(path: Path, items: Items, name: str) -> int:
        write_block(path, items[:1], name)
        raise OSError(5, "Input/output error")

    store.put(1)
    monkeypatch.setattr(block_store, "write_block", fails)
    for number in (2, 3):
        store.store.put(digest(number), 4, b"", ITEMS)
    for _ in range(2):
        assert isinstance(store.posted.get(timeout=20), Written)
    assert not store.store.takes
    assert not store.store.put(digest(4), 4, b"", ITEMS)
    assert store.read(1).blocks == 1, "what is there is used"
    assert capfd.readouterr().err.count("KV caches are no longer kept on disk") == 1
    assert len(store.files()) == 1, "nothing half-written is left"


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_disk_that_has_room_again_is_written_again(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], from_the_start: bool
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(block_store, "_write_text" if from_the_start else "write_block", full)
        store = open_store()
        for _ in range(3):
            if store.store.takes:
                store.put(1)
            assert (store.store.takes, store.store.room_bytes) == (False, 0)
            store.now += RETRY_S - 1
            assert not store.store.takes, "the disk has rest meanwhile"
            store.now += 1
            assert (store.store.takes, store.store.room_bytes) == (True, ROOM)
    store.put(2)
    assert store.read(2).blocks == 1
    about = json.loads((store.store._folder / "about.json").read_text())
    assert about == {"model": "tiny"}
    said = capfd.readouterr().err
    assert (said.count("no longer kept on disk"), said.count("kept on disk again")) == (1, 1)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    store = Store(tmp_path / "file")
    assert not store.store.takes
    assert store.read(1).blocks == 0
    assert "Not a directory" in capfd.readouterr().err


def test_a_full_queue_takes_no_more(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sends no more than its own queue takes. A slower rank loses none of these, up to a bound."""
    goes_on = threading.Event()
    write = block_store.write_block
    monkeypatch.setattr(block_store, "write_block", lambda *all_of: (goes_on.wait(20), write(*all_of))[1])
    size = sum(value.nbytes for _, value in ITEMS if isinstance(value, mx.array))
    monkeypatch.setattr(block_store, "LAG_BYTES", 30 * size)
    asked = [(store.store.takes, store.store.put(digest(number), 4, b"", ITEMS)) for number in range(40)]
    took, queued = zip(*asked, strict=True)
    assert block_store.QUEUED_BLOCKS <= took.count(True) <= block_store.QUEUED_BLOCKS + 1
    assert queued.count(True) == 30
    goes_on.set()
    for _ in range(30):
        assert isinstance(store.posted.get(timeout=20), Written)
    assert store.store.takes
    assert all(store.read(number).blocks == 1 for number in range(30))


def test_no_thread_outlives_a_store_that_ends_with_a_full_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, writes, goes_on = set(threading.enumerate()), threading.Event(), threading.Event()
    store = Store(tmp_path / "cache").store
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    monkeypatch.setattr(block_store, "CLOSE_S", 0.1)
    monkeypatch.setattr(block_store, "write_block", lambda *_: (writes.set(), goes_on.wait(20))[1])
    store.put(digest(1), 4, b"", ITEMS)
    assert writes.wait(10)
    while store.takes:
        store.put(os.urandom(16), 4, b"", ITEMS)
    store.close()
    goes_on.set()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_a_block_is_written_once(tmp_path: Path) -> None:
    write_block(tmp_path / "block", ITEMS, "one")
    with pytest.raises(FileExistsError):
        write_block(tmp_path / "block", ITEMS, "one")
    assert len(read_block(tmp_path / "block", "one")) == len(ITEMS)


@pytest.mark.parametrize("layout", ["layout", "other"])
def test_a_file_under_the_name_of_another_block_is_a_miss(
    open_store: Open, tmp_path: Path, layout: str
) -> None:
    store = open_store()
    store.put(1)
    number = 2 if layout == "layout" else 1
    (tmp_path / "cache" / layout).mkdir(exist_ok=True)
    store.files()[0].rename(tmp_path / "cache" / layout / f"{digest(number).hex()}-4-")
    other = open_store(layout=layout)
    assert other.read(number).blocks == 0
    assert other.files() == []


def test_what_a_killed_process_left_is_not_in_the_way_of_another_of_its_number(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, each start has the same process numbers."""

    def killed(path: Path, *rest: Any) -> int:
        write_block(path, *rest)
        monkeypatch.setattr(block_store, "write_block", write_block)
        raise FileNotFoundError

    monkeypatch.setattr(block_store, "write_block", killed)
    monkeypatch.setattr(Path, "unlink", lambda *_all, **_fields: None)
    store.put(1)
    store.put(1)
    assert store.store.takes
    assert store.read(1).blocks == 1


def test_a_block_behind_one_that_was_removed_finds_that_out(store: Store) -> None:
    store.put(1)
    store.put(2, previous=1)
    for file in store.files():
        file.unlink()
    store.put(3, previous=2)
    assert [store.store.is_kept(digest(number)) for number in (1, 2, 3)] == [False, False, True]


def test_a_block_that_is_deleted_can_be_written_at_once(store: Store) -> None:
    goes_on = threading.Event()
    store.put(1)
    store.store._reads.put(lambda: goes_on.wait(20))  # the reader is behind
    store.store.delete(digest(1))
    assert not store.store.is_kept(digest(1))
    store.put(1)
    goes_on.set()
    assert store.read(1).blocks == 1


def filled(cache: KVCache | RotatingKVCache, seed: int) -> KVCache | RotatingKVCache:
    mx.random.seed(seed)
    cache.update_and_fetch(mx.random.normal((1, 2, 8, 4)), mx.random.normal((1, 2, 8, 4)))
    return cache


def test_a_part_of_each_layers_keys_and_values_comes_back_in_its_place() -> None:
    caches = [filled(KVCache(), seed) for seed in range(12)]
    items = block_of(caches, 2, 6, truncatable=True)
    back = caches_of([KVCache() for _ in caches], items, 4, truncatable=True)
    for cache, was in zip(back, caches, strict=True):
        assert cache.offset == 4
        assert mx.array_equal(cache.keys, was.keys[..., 2:6, :])
        assert mx.array_equal(cache.values, was.values[..., 2:6, :])
    with pytest.raises(ValueError, match="tokens"):  # those behind them would be at wrong positions
        caches_of([KVCache() for _ in caches], items, 8, truncatable=True)


def test_windows_and_states_come_back_whole() -> None:
    window, state = filled(RotatingKVCache(max_size=16), 3), ArraysCache(2)
    state[0] = mx.random.normal((1, 3))
    items = block_of([window, state], 0, 8, truncatable=False)
    new, other = caches_of([RotatingKVCache(max_size=16), ArraysCache(2)], items, 8, truncatable=False)
    assert new.offset == window.offset
    assert mx.array_equal(new.keys, window.keys)
    assert mx.array_equal(new.values, window.values)
    assert mx.array_equal(other[0], state[0])
    assert other[1] is None
