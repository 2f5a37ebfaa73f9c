"""Draft model: a small model that proposes tokens, on rank 0 alone. It changes the speed, never the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from ..errors import Code, ModelError
from . import kv_cache
from .batch import Bucket, CacheKind, Caches, ForwardShape, SlotCaches, arrays_of, cut
from .group import LoneGroup
from .loader import load, make_cache
from .recurrent import views_of
from .steps import Drafts

MAX_KEPT = 4  # most kept caches of ended sequences
CACHES_SHARE = 8  # its caches get 1 / CACHES_SHARE of the room for KV caches
CHUNK = 512
#: Most tokens of a row in a batched forward, padded to the widest row. More are read in another forward.
FEW = 32


class DraftModel:
    """Greedy `steps.Drafter`: each forward adds one token to the drafts of all rows."""

    def __init__(self, folder: Path, vocabulary: int, progress: Callable[[], None] = lambda: None) -> None:
        """Load the model. Raises ModelError if `folder` has none, or its vocabulary size differs."""
        loaded = load(folder, LoneGroup(), progress)
        if loaded.vocabulary.size != vocabulary:
            sizes = f"{loaded.vocabulary.size} tokens, the model's has {vocabulary}; they must be the same"
            raise ModelError(f"draft model {folder.name}: its vocabulary has {sizes}", Code.MODEL_INVALID)
        self.weight_bytes = loaded.weight_bytes
        self._room_bytes = 1 << 62  # bytes that its caches may take
        self._model = loaded.model
        self._kinds = _kinds(self._model, folder.name)
        self._token_bytes = max(loaded.kv_token_bytes, 1)
        #: Bytes of a row's states, twice: a copy from before its drafts is kept.
        self._row_bytes = 0 if self._kinds.can.truncatable else 2 * loaded.kv_row_bytes
        #: Tokens in each row's cache, which is in the batch, or in `_reading` while it reads its prompt.
        self._fed: dict[int, list[int]] = {}
        self._reading: dict[int, Caches] = {}
        self._batch = cast("SlotCaches", self._kinds.empty_batch())
        #: Tokens and caches of rows that have ended, latest last.
        self._kept: list[tuple[list[int], Caches]] = []

    def propose(self, rows: Mapping[int, Sequence[int]], limit: int) -> Drafts:
        """Return the most likely `limit` next tokens of each row. Rows that are not in `rows` have ended.

        A row gets no draft while it lacks room or still reads its prompt, one chunk a call.
        """
        fitting = self._fitting(rows, limit)
        for row in [row for row in self._fed if row not in fitting]:
            fed = self._fed.pop(row)
            caches = self._reading.pop(row, None) or self._batch.leave(row, len(fed))
            if caches is not None:  # another row may begin with the same tokens
                self._kept = [*self._kept[-MAX_KEPT + 1 :], (fed, caches)]
        ready = [row for row, tokens in fitting.items() if self._has_read(row, tokens)]
        drafts = self._drafts(fitting, limit) if ready else {}
        self.bound(self._room_bytes)
        return drafts

    def bound(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        while self._kept and self._held() > room_bytes:
            self._kept.pop(0)
        if self._held() > room_bytes:
            self._fed.clear()
            self._reading.clear()
            self._batch = cast("SlotCaches", self._kinds.empty_batch())

    def _held(self) -> int:
        own = [*self._reading.values(), *[caches for _, caches in self._kept]]
        arrays = [*self._batch.arrays(), *[array for caches in own for array in arrays_of(caches)]]
        return sum(array.nbytes for array in arrays)

    def _fitting(self, rows: Mapping[int, Sequence[int]], limit: int) -> dict[int, Sequence[int]]:
        fitting: dict[int, Sequence[int]] = {}
        for row, tokens in sorted(rows.items(), key=lambda item: len(item[1])):
            size = kv_cache.roomy(len(tokens) + limit + FEW)
            if (len(fitting) + 1) * (size * self._token_bytes + self._row_bytes) > self._room_bytes:
                break
            fitting[row] = tokens
        return fitting

    def _has_read(self, row: int, tokens: Sequence[int]) -> bool:
        """Truncate a row to its prefix of `tokens`, and read a chunk of the rest. True if in the batch."""
        if row not in self._fed:
            self._fed[row], self._reading[row] = self._resume(tokens)
        fed = self._fed[row]
        had = len(fed)
        del fed[min(_shared(fed, tokens), len(tokens) - 1) :]  # leave at least one token to feed
        if len(fed) < had and not self._goes_back(row, len(fed)):
            if row not in self._reading:
                self._batch.leave(row, 0)
            fed.clear()
            self._reading[row] = self._kinds.new()
        if row not in self._reading:
            if len(tokens) - len(fed) <= FEW:
                return True
            self._reading[row] = self._batch.leave(row, len(fed)) or self._kinds.new()
        caches = cut(self._reading[row], len(fed))
        if chunk := list(tokens[len(fed) : -1][:CHUNK]):
            self._model(mx.array([chunk]), cache=caches)
            mx.eval(arrays_of(caches))
            fed += chunk
        if len(fed) < len(tokens) - 1 or not (fed or self._kinds.can.truncatable):
            return False
        self._batch.join(row, self._reading.pop(row))
        return True

    def _goes_back(self, row: int, length: int) -> bool:
        """Return True if a row can be truncated to `length` tokens. States lag behind the last tokens."""
        if self._kinds.can.truncatable:
            return True
        if row in self._reading:
            return False
        (bucket,) = self._batch.parts([row])
        return bucket.states is not None and bucket.states.held[bucket.rows.index(row)] <= length

    def _drafts(self, rows: Mapping[int, Sequence[int]], limit: int) -> Drafts:
        """Draft for all rows. Drafts overwrite the padding on the right; states exclude the drafts."""
        batch = self._batch
        longest = max([len(rows[row]) for row in batch.rows]) + limit
        size = kv_cache.roomy(longest + FEW)
        if len(batch.every) > 1 or batch.every[0].shape != (len(batch.rows), size):
            batch.arrange([size] * len(batch.rows))
        (bucket,) = batch.every
        ends = [len(rows[row]) for row in bucket.rows]
        todo = [list(rows[row][len(self._fed[row]) :]) for row in bucket.rows]
        width, view = max(map(len, todo)), min(kv_cache.view(longest), size)
        starts = [end - len(new) for end, new in zip(ends, todo, strict=True)]
        last = mx.array([[[len(new) - 1]] for new in todo])
        tokens = mx.array([new + [0] * (width - len(new)) for new in todo])
        places, before = [], bucket.states
        for place in range(limit):
            logits = self._forward(bucket, tokens, starts, view)
            tokens = mx.argmax(mx.take_along_axis(logits, last, axis=1), axis=-1)
            if not place and bucket.states is not None:
                before = replace(bucket.states)
            places.append(tokens)
            starts, last = [end + place for end in ends], mx.zeros_like(last)
        bucket.states = before
        mx.eval(places, batch.arrays())
        found = cast("list[list[int]]", mx.concatenate(places, axis=1).tolist())
        for row, drafts in zip(bucket.rows, found, strict=True):
            self._fed[row] = [*rows[row], *drafts[:-1]] if self._kinds.can.truncatable else list(rows[row])
        return {row: tuple(drafts) for row, drafts in zip(bucket.rows, found, strict=True)}

    def _forward(self, bucket: Bucket, tokens: mx.array, starts: Sequence[int], view: int) -> mx.array:
        """Feed tokens [rows, width] at `starts`; return logits. Attention reads `view` positions."""
        shape = ForwardShape(*ForwardShape.arrays(mx.array(list(starts)), tokens.shape[1], view))
        arrays, bucket.arrays, states = bucket.arrays, [], bucket.states
        growing = self._kinds.views(arrays, shape)
        recurrent = [] if states is None else views_of(states.kind, states.kept, states.stood(starts))
        layers = self._kinds.layers([growing], [recurrent], [shape])
        del arrays  # the last other owner, so MLX writes in place
        logits: mx.array = self._model(tokens, cache=layers)
        bucket.arrays = [array for view in growing for array in view.arrays]
        if states is not None:
            states.fed(starts, tokens.shape[1], [view.kept for view in recurrent])
        return logits

    def _resume(self, tokens: Sequence[int]) -> tuple[list[int], Caches]:
        shared = [_shared(fed, tokens) for fed, _ in self._kept]
        best = max(range(len(shared)), key=shared.__getitem__, default=-1)
        if best < 0 or not shared[best] or 2 * shared[best] < len(self._kept[best][0]):
            return [], self._kinds.new()
        return self._kept.pop(best)


def _kinds(model: Any, name: str) -> CacheKind:
    """Return the kind of its caches. Windows become plain caches of all tokens, which can roll back."""
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    caches = make_cache(model)
    if any(type(cache) is RotatingKVCache for cache in caches):
        plain = all(type(cache) in (KVCache, RotatingKVCache) for cache in caches)
        model.make_cache = lambda: [KVCache() for _ in caches] if plain else caches
    kinds = CacheKind(model)
    if not kinds.can.rolls_back:
        detail = f"draft model {name}: its caches cannot be rolled back, so it cannot draft"
        raise ModelError(detail, Code.MODEL_UNSUPPORTED)
    return kinds


def _shared(fed: Sequence[int], tokens: Sequence[int]) -> int:
    length = min(len(fed), len(tokens))
    if list(fed[:length]) == list(tokens[:length]):
        return length
    return next(i for i in range(length) if fed[i] != tokens[i])
