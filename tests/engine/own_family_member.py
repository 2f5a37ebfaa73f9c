"""One member of a bare group (`members.py`) that divides models.

Its arrays are the logits of every chunk of some prompts, and of steps with all of them in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxtp.engine import kv_cache
from mlxtp.engine.batch import (
    Bucket,
    CacheKind,
    ForwardShape,
    MergedBucket,
    MergedCaches,
    SlotCaches,
    in_parts,
)
from mlxtp.engine.group import CollectiveCounter, Group
from mlxtp.engine.loader import ModelShare, load, run_alone
from mlxtp.engine.recurrent import views_of

from .members import Notes, be_member
from .vocabulary_member import first, reads_own_bytes, sizes_of

LENGTHS = (21, 9, 5)
"""Of the prompts."""
CHUNK = 8
STEPS = 3


def prompt(row: int, size: int) -> list[int]:
    return [(7 * at * (row + 1) + 3 * row + 1) % size for at in range(LENGTHS[row])]


def chunks(tokens: list[int]) -> list[list[int]]:
    return [tokens[at : at + CHUNK] for at in range(0, len(tokens), CHUNK)]


def fed(step: int, size: int) -> list[int]:
    """One token for each row."""
    return [(31 * step + 11 * row + 2) % size for row in range(len(LENGTHS))]


def forwards(loaded: ModelShare, counter: CollectiveCounter) -> Notes:
    vocabulary, model = loaded.vocabulary, loaded.model
    kind = CacheKind(model)
    rows = range(len(LENGTHS))
    batches = [kind.empty_batch()] * len(rows) if kind.can.batched else [kind.empty_batch() for _ in rows]
    found: dict[str, mx.array] = {}
    before = counter.count
    for row in rows:
        caches = kind.new()
        for number, chunk in enumerate(chunks(prompt(row, vocabulary.size))):
            tokens = mx.array([chunk], dtype=mx.int32)
            given = None
            if number == 1 and vocabulary.embedding is not None:  # as after a step that chose its winner
                given = vocabulary.embedding(tokens)
                kept = np.array(given.astype(mx.float32))
            local = vocabulary.forward(model, tokens, caches, given=given)
            found[f"prompt-{row}-{number}"] = vocabulary.gather(local)[0]
            mx.eval(found)
            if given is not None:
                np.testing.assert_array_equal(np.array(given.astype(mx.float32)), kept)
        batches[row].join(row, caches)
    counted = counter.count - before

    def one(
        buckets: Sequence[Bucket | MergedBucket], inputs: list[mx.array], at: tuple[int, ...]
    ) -> list[mx.array]:
        (tokens,), (part,) = inputs, buckets
        if isinstance(part, MergedBucket):
            return [vocabulary.forward(model, tokens, part.caches)]
        part.reserve(max(at) + 1)
        view = min(kv_cache.view(max(at) + 1), part.shape[1])
        rings = kind.rings(part.room)
        shape = ForwardShape(*ForwardShape.arrays(mx.array(at, dtype=mx.int32), 1, view, rings))
        views = kind.views(part.arrays, shape)
        states = views_of(kind.recurrence, part.states.kept if part.states is not None else [])
        local = vocabulary.forward(model, tokens, kind.layers([views], [states], [shape]))
        part.arrays = [array for each in views for array in each.arrays]
        if part.states is not None:
            part.states.fed(at, 1, [each.kept for each in states])
        return [local]

    for step in range(STEPS):
        results = []
        for batch in dict.fromkeys(batches):
            assert isinstance(batch, SlotCaches | MergedCaches)
            tokens = mx.array(fed(step, vocabulary.size), dtype=mx.int32)[mx.array(batch.rows), None]
            positions = tuple(LENGTHS[row] + step for row in batch.rows)
            each = [[part] for part in batch.parts(batch.rows)]
            (local,) = in_parts(each, batch.rows, [tokens], positions, forward=one)
            results.append(vocabulary.gather(local)[:, 0])
            mx.eval(results, batch.arrays())
        found[f"step-{step}"] = mx.concatenate(results)
    facts = {"collectives": counted, "layers": len(model.layers), **sizes_of(loaded)}
    return facts, {name: np.array(array.astype(mx.float32)) for name, array in found.items()}


def work(folder: Path, group: Group, counter: CollectiveCounter) -> Notes:
    loaded = load(folder, group, lambda: None)
    own, same = reads_own_bytes(loaded, folder, group)
    if group.rank:
        run_alone(loaded, group.size, partial(first, loaded))  # rank 0 would not answer a collective
    facts, arrays = forwards(loaded, counter)
    return {**facts, "own": own, "same": same}, arrays


if __name__ == "__main__":
    be_member(work)
