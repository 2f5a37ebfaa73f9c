"""One member of a bare group (`members.py`): what parts of vocabularies make of a prefill and some steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxtp.engine import loader
from mlxtp.engine.group import CollectiveCounter, Group
from mlxtp.engine.loader import ModelShare, StoredTensor, load, make_cache, read_share, run_alone
from mlxtp.engine.sharding import Vocabulary
from mlxtp.errors import ModelError

from .members import Notes, be_member

PROMPT = (3, 43, 38, 49, 40, 52, 51, 18, 50, 42, 55, 300, 41, 77, 5, 9)
STEPS = 3


def prompts(size: int) -> mx.array:
    """Two prompts for a vocabulary of `size` tokens, int32 [2, L]."""
    return mx.array([PROMPT, PROMPT[::-1]], dtype=mx.int32) % size


def run(loaded: ModelShare, counter: CollectiveCounter) -> Notes:
    """Greedy, two rows at once: (facts, arrays)."""
    vocabulary, model = loaded.vocabulary, loaded.model
    cache = make_cache(model)
    x = prompts(vocabulary.size)
    given = None
    arrays: dict[str, mx.array] = {}
    collectives = []
    for step in range(1 + STEPS):
        before = counter.count
        local = vocabulary.forward(model, x, cache, given=given, ends=mx.array([0, 0]) if step == 2 else None)
        forward, before = counter.count - before, counter.count
        if vocabulary.group.rank == 0:  # as for logprobs: own outputs must not change the order of sums
            mx.async_eval(local, [mx.logsumexp(local[row]) for row in range(2)])
        mx.async_eval(local, [c.state for c in cache])
        tokens, embeddings = vocabulary.winners(local[:, -1])
        winners, before = counter.count - before, counter.count
        mx.eval(tokens, embeddings)  # one collective after the other, as in steps: MLX orders no others
        full = vocabulary.gather(local)
        gathered, before = counter.count - before, counter.count
        mx.eval(full)
        greedy, some = vocabulary.winners_and_logits(local, [1], 2)
        mx.eval(greedy, some)
        collectives.append([forward, winners, gathered, counter.count - before])
        found = {"greedy": greedy, "tokens": tokens, "embeddings": bits(embeddings)}
        found |= {"some": some.astype(mx.float32), "logits": full.astype(mx.float32)}
        if vocabulary.embedding is not None:
            found["looked-up"] = bits(vocabulary.embedding(tokens))
        arrays |= {f"{what}-{step}": array for what, array in found.items()}
        mx.eval(arrays, [c.state for c in cache])
        # The next forward takes the embeddings that came with the winners, every other time.
        x, given = tokens[:, None], embeddings[:, None] if step % 2 == 0 else None
    ours = hard(vocabulary)
    ties, broken = vocabulary.winners(ours)[0], vocabulary.gather(ours)
    mixed, some = vocabulary.winners_and_logits(ours[:, None], list(range(len(ties)))[1::2], 1)
    arrays |= {"hard-tokens": ties, "hard-logits": broken, "hard-mixed": mixed, "hard-some": some}
    facts = {"collectives": collectives, "peak_bytes": loaded.peak_bytes, **sizes_of(loaded)}
    facts["vocabulary"] = [vocabulary.size, vocabulary.share, vocabulary.first]
    return facts, {name: np.array(array) for name, array in arrays.items()}


def sizes_of(loaded: ModelShare) -> dict[str, Any]:
    return {"weight_bytes": loaded.weight_bytes, "kv_token_bytes": loaded.kv_token_bytes}


def hard_rows(size: int) -> mx.array:
    """Logits that are hard to choose from, [6, size]: equals, minus infinity, NaN here, there, everywhere."""
    rows = mx.zeros((6, size))
    rows[0, 1:] = 7.0
    rows[1] = -mx.inf
    rows[2, 0] = mx.nan
    rows[2, size - 1] = 1.0
    rows[3, :] = mx.nan
    rows[3, size - 2] = -5.0
    rows[4] = mx.nan
    rows[5, size // 2 - 1 :: size // 4] = 2.0**-20
    return rows


def hard(vocabulary: Vocabulary) -> mx.array:
    """This rank's part of the hard rows, padded as a forward pads it."""
    padding = vocabulary.group.size * vocabulary.share - vocabulary.size
    rows = mx.pad(hard_rows(vocabulary.size), ((0, 0), (0, padding)), constant_values=-mx.inf)
    return rows[:, vocabulary.first : vocabulary.first + vocabulary.share]


def bits(array: mx.array) -> mx.array:
    """The same numbers as integers, so that -0.0 is not 0.0."""
    return array.view({2: mx.uint16, 4: mx.uint32}[array.dtype.size])


def reads_own_bytes(loaded: ModelShare, folder: Path, group: Group) -> tuple[int, bool]:
    """Count the tensors that were read by this rank's rows alone; return whether all are as if read whole."""
    calls = 0

    def counted(stored: StoredTensor, rank: int, ranks: int) -> mx.array:
        nonlocal calls
        calls += 1
        return read_share(stored, rank, ranks)

    with patch.object(loader, "read_share", counted):
        parts = dict(tree_flatten(load(folder, group, lambda: None).model.parameters()))
    with patch.object(loader, "share_of", lambda *_: False):
        wholes = dict(tree_flatten(load(folder, group, lambda: None).model.parameters()))
    ours = dict(tree_flatten(loaded.model.parameters()))
    same = ours.keys() == parts.keys() == wholes.keys() and all(
        mx.array_equal(ours[name], whole).item() and mx.array_equal(parts[name], whole).item()
        for name, whole in wholes.items()
    )
    return calls, same


def first(loaded: ModelShare) -> None:
    for width in (1, 8):
        tokens, cache = mx.zeros((1, width), dtype=mx.int32), make_cache(loaded.model)
        mx.eval(loaded.vocabulary.forward(loaded.model, tokens, cache, ends=mx.array([width - 1])))


def attempt(folder: Path, group: Group, counter: CollectiveCounter) -> Notes:
    """`run` a model, or the words that refuse it."""
    before = counter.count
    loaded: ModelShare | ModelError
    try:
        loaded = load(folder, group, lambda: None)
        own, same = reads_own_bytes(loaded, folder, group)
        if group.rank:
            run_alone(loaded, group.size, partial(first, loaded))  # rank 0 would not answer a collective
    except ModelError as error:
        loaded = error
    counted = counter.count - before
    everywhere = group.gather(mx.array([isinstance(loaded, ModelShare)])).all().item()
    if isinstance(loaded, ModelError):
        return {"code": loaded.code, "detail": loaded.detail, "counted": counted}, {}
    facts, arrays = run(loaded, counter) if everywhere else ({}, {})
    return {**facts, "counted": counted, "own": own, "same": same}, arrays


if __name__ == "__main__":
    be_member(attempt)
