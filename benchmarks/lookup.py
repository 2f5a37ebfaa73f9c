"""Rank 0 looks for a prompt of 8,000 tokens among 1,000 kept caches, in memory and on disk.

Caches that can be cut are found by their longest shared beginning, others only whole. Most of the 1,000
are of other conversations; the prompt's own is among them, and those that share its first 4,000 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from mlxtp.engine.block_store import Block, BlockStore
from mlxtp.engine.disk_index import STEM, DiskIndex
from mlxtp.engine.kv_cache import PrefixCache
from mlxtp.engine.sequence import SequenceState
from mlxtp.wire.messages import BLOCK, Generate, PrefixDigests

from .errors import Unmeasured
from .measures import Row, absolute
from .stage import Stage

ENTRIES = 1_000
PROMPT = 8_000
ALIKE = 100  #: Entries that share the prompt's first half: a system prompt and its tools.
_LOOKUPS = 40


async def measure(stage: Stage) -> list[Row]:
    return [
        absolute(f"lookup of a prompt among 1,000 caches, {where}", [_once_ms(find) for _ in range(_LOOKUPS)])
        for where, find in (
            ("memory", _in_memory(whole=False)),
            ("memory, whole", _in_memory(whole=True)),
            ("disk", _on_disk(stage.folder / "cut", whole=False)),
            ("disk, whole", _on_disk(stage.folder / "whole", whole=True)),
        )
    ]


def _once_ms(find: Callable[[], int]) -> float:
    began = time.perf_counter()
    found = find()
    took_ms = (time.perf_counter() - began) * 1e3
    if found < PROMPT - BLOCK - 1:
        raise Unmeasured(f"{found} of {PROMPT} tokens were found")
    return took_ms


def _entries() -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The prompt, and what is kept: its beginning, and others of as many or fewer tokens."""
    draw = Random(1)

    def new(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(1 << 15) for _ in range(count))

    prompt = new(PROMPT)
    half = prompt[: PROMPT // 2]
    kept = [(*half, *new(draw.randrange(64, PROMPT // 2))) for _ in range(ALIKE)]
    kept += [new(draw.randrange(1024, PROMPT)) for _ in range(ENTRIES - ALIKE - 1)]
    draw.shuffle(kept)
    return prompt, [prompt[: PROMPT - 40], *kept]


def _in_memory(*, whole: bool) -> Callable[[], int]:
    prompt, kept = _entries()
    prefixes = PrefixCache(1 << 40, ENTRIES, truncatable=not whole)
    for uid, tokens in enumerate(kept, 1):
        prefixes.keep(uid, tokens)
    if len(prefixes) != ENTRIES:
        raise Unmeasured(f"{len(prefixes)} of {ENTRIES} caches are kept")

    def find() -> int:
        hit = prefixes.find(prompt)
        return 0 if hit is None else hit.length

    return find


def _on_disk(folder: Path, *, whole: bool) -> Callable[[], int]:
    prompt, kept = _entries()
    files: dict[str, None] = {}
    for tokens in kept:
        digests, previous = PrefixDigests(tokens), b""
        ends = (len(tokens),) if whole else range(BLOCK, len(tokens) + 1, BLOCK)
        for end in ends:
            previous = digests.up_to(end - end % STEM) if whole else previous
            block = Block(digests.up_to(end), end, previous, 0, 0.0)
            files[block.name], previous = None, block.digest
    (folder / "layout").mkdir(parents=True)
    for name in list(files)[:ENTRIES]:
        (folder / "layout" / name).touch()
    store = BlockStore(folder, "layout", {}, 1 << 40, lambda _: None)
    store.close()

    def find() -> int:
        sequence = SequenceState(Generate(1, tuple(prompt), 16))
        fetch = DiskIndex(store, truncatable=not whole).fetch(sequence, 1, 0)
        return 0 if fetch is None else fetch.block * len(fetch.digests)

    return find
