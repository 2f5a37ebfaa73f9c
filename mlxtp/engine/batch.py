"""The KV caches of the sequences that decode together.

`SlotBatch` holds the caches of all rows in one array a layer, with a length for each row. Joining, leaving
and rolling back touch one row, and a forward may feed rows several tokens. It takes sequences whose layers
all use mlx-lm's plain `KVCache`. `MergedBatch` uses mlx-lm's own batched caches for every other kind
(rotating, recurrent), one token a row and step. Both are the same on every rank, because the same frames
drive them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from ..errors import Code, ModelError
from .kv_cache import SMALLEST, capacity, slots
from .loader import leaves, make_cache, unrun_arrays

#: Numbers that share a scale, the best first. A head's keys and values must divide by it.
QUANTIZATION_GROUPS = (64, 32)

KVCACHE_STEP = 256  # positions by which mlx-lm's own caches grow

Caches = list[Any]  # one mlx-lm cache a layer, of one sequence


#: Shape and type of the keys or values that a layer holds for a row without tokens.
Empty = tuple[tuple[int, ...], mx.Dtype]


class Batch(Protocol):
    """Rows in the order in which `StepToken` names them. The last row takes the place of one that leaves."""

    rows: list[int]

    def join(self, uid: int, caches: Caches) -> None:
        """Add `uid` as the last row. The batch owns `caches` from now on."""
        ...

    def leave(self, uid: int, keep: int, longest: int = 0) -> Caches | None:
        """Remove a row. Returns the caches of its first `keep` tokens, None for 0.

        `longest`: tokens of the longest remaining row, where it is known; room beyond it may be freed.
        """
        ...

    def copy(self, uid: int, length: int) -> Caches:
        """Return caches of the first `length` tokens of a row that remains."""
        ...

    def trim(self, longest: int) -> None:
        """Free all room but that of rows of at most `longest` tokens."""
        ...


class LayerView:
    """View that one layer of a model has of a SlotBatch during one forward.

    `keys`, `values`: [slots, KV heads, capacity, head size]. Rows write their new tokens at `positions`
    (int32 [rows]) and on; attention reads the first `view` positions of each row, under `mask`.
    """

    def __init__(self, keys: mx.array, values: mx.array, forward: ForwardShape) -> None:
        self.keys = keys
        self.values = values
        self._forward = forward

    @property
    def offset(self) -> mx.array:
        """Position of the first new token of each row, for rotary embeddings."""
        return self._forward.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = self._forward.write(self.keys, keys)
        self.values = self._forward.write(self.values, values)
        return self._forward.read(self.keys), self._forward.read(self.values)

    def make_mask(self, count: int, window_size: int | None = None, **_: object) -> mx.array:
        return self._forward.mask(window_size)


class ForwardShape:
    """Rows and positions of one forward over a SlotBatch, shared by its layers.

    `positions` int32 [rows]: where each row's first new token goes. `targets` int32 [rows, width]: where
    each of them goes. `mask` bool [rows, 1, width, view]: each new token sees its row up to itself.
    """

    def __init__(self, positions: mx.array, targets: mx.array, mask: mx.array, first: int = 0) -> None:
        self.positions = positions
        self._targets = targets
        self._mask = mask
        self._first = first
        self._rows, _, _, self._view = mask.shape

    @staticmethod
    def arrays(positions: mx.array, width: int, view: int) -> list[mx.array]:
        """Return the constructor's arguments."""
        targets = positions[:, None] + mx.arange(width)[None]
        return [positions, targets, (mx.arange(view) <= targets[:, :, None])[:, None]]

    @staticmethod
    def of_prompts(
        offsets: Sequence[int], totals: Sequence[int], first: int, room: int, view: int
    ) -> ForwardShape:
        """Lay out prompts of different lengths in rows from `first` on, their last tokens in the last column.

        Padding comes before a prompt's tokens. It writes to the row's last position, which no token has yet,
        and may see the row's first one, so that it computes no NaN. No token sees it.
        """
        width = max(total - offset for offset, total in zip(offsets, totals, strict=True))
        starts = [total - width for total in totals]
        targets = [
            [at if at >= offset else room - 1 for at in range(start, start + width)]
            for start, offset in zip(starts, offsets, strict=True)
        ]
        sees = mx.array([[max(at, 0) for at in range(start, start + width)] for start in starts])
        mask = (mx.arange(view) <= sees[:, :, None])[:, None]
        return ForwardShape(mx.array(starts, dtype=mx.int32), mx.array(targets, dtype=mx.int32), mask, first)

    def write(self, kept: mx.array, new: mx.array) -> mx.array:
        """Write `new` [rows, KV heads, width, head size] into `kept`; returns the result."""
        if self._rows == 1 and kept.shape[0] == 1:
            return mx.slice_update(kept, new, self.positions, axes=(2,))
        rows = mx.arange(self._first, self._first + self._rows)[:, None, None]
        heads = mx.arange(new.shape[1])[None, :, None]
        kept[rows, heads, self._targets[:, None]] = new
        return kept

    def read(self, kept: mx.array) -> mx.array:
        return kept[self._first : self._first + self._rows, :, : self._view]

    def mask(self, window: int | None) -> mx.array:
        """Return the mask, limited to the last `window` positions where the model wants a window."""
        if window is None:
            return self._mask
        return self._mask & (mx.arange(self._view) > self._targets[:, None, :, None] - window)


class SlotBatch:
    """All rows of a layer in one array for keys and one for values, [slots, KV heads, capacity, head size].

    Both sizes grow and shrink in the steps of `kv_cache.py`, so that they seldom change. A single row uses
    its sequence's own arrays, and joins and leaves without a copy.
    """

    def __init__(self, empty: Sequence[Empty] = ()) -> None:
        self.rows: list[int] = []
        #: Keys and values of the first layer, of the second, and so on.
        self.arrays: list[mx.array] = []
        self._empty = empty

    def shape(self) -> tuple[int, int]:
        """Return slots and capacity."""
        return (self.arrays[0].shape[0], self.arrays[0].shape[2]) if self.arrays else (0, 0)

    def join(self, uid: int, caches: Caches) -> None:
        self.rows.append(uid)
        if caches[0].keys is None:
            arrays = [mx.zeros(shape, dtype=dtype) for shape, dtype in self._empty]
        else:
            arrays = [array for cache in caches for array in (cache.keys, cache.values)]
        if len(self.rows) == 1:
            self.arrays = arrays
            return
        length = arrays[0].shape[2]
        self._resize(slots(len(self.rows)), max(self.shape()[1], capacity(caches[0].offset + 1)))
        row = len(self.rows) - 1
        room = self.shape()[1]
        self.arrays = [
            mx.slice_update(kept, new[:, :, : min(length, room)], mx.array([row]), axes=(0,))
            for kept, new in zip(self.arrays, arrays, strict=True)
        ]

    def leave(self, uid: int, keep: int, longest: int = 0) -> Caches | None:
        row = self.rows.index(uid)
        kept = self.copy(uid, keep) if keep else None
        last = len(self.rows) - 1
        if row != last:
            self._move(last, row)
            self.rows[row] = self.rows[last]
        self.rows.pop()
        if not self.rows:
            self.arrays = []
            return kept
        held, room = self.shape()
        fewer = slots(len(self.rows))
        shorter = capacity(longest + 1) if longest else room
        self._resize(
            fewer if fewer * 2 < held or fewer == 1 else held,
            shorter if shorter * 2 <= room else room,
        )
        return kept

    def copy(self, uid: int, length: int) -> Caches:
        row = self.rows.index(uid)
        return [
            _plain(self._part(keys, row, length), self._part(values, row, length), length)
            for keys, values in zip(self.arrays[::2], self.arrays[1::2], strict=True)
        ]

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens."""
        slots_now, room = self.shape()
        if room < length:
            self._resize(slots_now, capacity(length))

    def trim(self, longest: int) -> None:
        if self.rows:
            self._resize(slots(len(self.rows)), capacity(longest))

    def _part(self, array: mx.array, row: int, length: int) -> mx.array:
        if array.shape[0] == 1 and array.shape[2] <= capacity(length):
            return mx.array(array)  # shared; the first write copies
        return mx.contiguous(array[row : row + 1, :, :length])

    def _move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        moved = [mx.contiguous(array[source : source + 1]) for array in self.arrays]
        # Computed before their source arrays are written to, so that those can be written in place.
        mx.async_eval(moved)
        self.arrays = [
            mx.slice_update(array, row, mx.array([target]), axes=(0,))
            for array, row in zip(self.arrays, moved, strict=True)
        ]

    def _resize(self, new_slots: int, room: int) -> None:
        if (new_slots, room) == self.shape():
            return
        self.arrays = [_resized(array, new_slots, room) for array in self.arrays]


def _resized(array: mx.array, new_slots: int, room: int) -> mx.array:
    part = array[:new_slots, :, :room]
    missing = [(0, new_slots - part.shape[0]), (0, 0), (0, room - part.shape[2]), (0, 0)]
    return mx.contiguous(mx.pad(part, missing))


def _plain(keys: mx.array, values: mx.array, length: int) -> Any:
    from mlx_lm.models.cache import KVCache

    cache = KVCache()
    cache.keys, cache.values, cache.offset = keys, values, length
    return cache


class MergedBatch:
    """Batch of mlx-lm's own batched caches; a sequence alone keeps its plain ones."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.caches: Caches = []
        self._merged = False

    def join(self, uid: int, caches: Caches) -> None:
        self.rows.append(uid)
        if len(self.rows) == 1:
            self.caches, self._merged = caches, False
            return
        if not self._merged:
            self.caches = [cache.merge([cache]) for cache in self.caches]
            self._merged = True
        for running, joining in zip(self.caches, caches, strict=True):
            running.extend(joining.merge([joining]))

    def leave(self, uid: int, keep: int, longest: int = 0) -> Caches | None:
        row = self.rows.index(uid)
        kept = self.copy(uid, keep) if keep else None
        last = len(self.rows) - 1
        order = list(range(last))
        if row != last:
            order[row] = last
            self.rows[row] = self.rows[last]
        self.rows.pop()
        if not self.rows:
            self.caches, self._merged = [], False
        elif len(self.rows) == 1:
            self.caches = [cache.extract(order[0]) for cache in self.caches]
            self._merged = False
        else:
            for cache in self.caches:
                cache.filter(mx.array(order))
        return kept

    def copy(self, uid: int, length: int) -> Caches:
        row = self.rows.index(uid)
        if not self._merged:
            return share(self.caches, length)
        return cut([cache.extract(row) for cache in self.caches], length)

    def trim(self, longest: int) -> None:
        """Do nothing: these arrays have the size that mlx-lm gives them."""


def share(caches: Caches, length: int) -> Caches:
    """Return separate caches of the first `length` tokens. Arrays are shared until one side writes."""
    from copy import deepcopy  # copies handles, not buffers: mlx arrays are immutable underneath

    from mlx_lm.models.cache import RotatingKVCache

    shared: Caches = deepcopy(caches)
    for cache in leaves(shared):
        if plain(cache):
            # The next write copies the whole array, so it holds only the tokens that are needed.
            cache.keys, cache.values = cache.keys[..., :length, :], cache.values[..., :length, :]
            cache.offset = min(cache.offset, length)
        elif type(cache) is RotatingKVCache and cache.keys is not None:
            _only_window(cache)
    return cut(shared, length)


def snapshot(caches: Caches, length: int) -> Caches:
    """Return separate caches of the first `length` tokens of a sequence that continues.

    They have arrays of their own, so that both sides take the room that is counted for them.
    """
    from mlx_lm.models.cache import RotatingKVCache

    copies = share(caches, length)
    separate(copies)
    for cache in leaves(copies):
        if type(cache) is RotatingKVCache and cache.keys is not None:
            cache.keys, cache.values = mx.contiguous(cache.keys), mx.contiguous(cache.values)
    return copies


def overlap(caches: Caches, longer: Caches) -> None:
    """Have plain caches share the arrays of `longer` ones, which begin with their tokens."""
    for cache, other in zip(leaves(caches), leaves(longer), strict=True):
        if plain(cache):
            cache.keys, cache.values = (
                other.keys[..., : cache.offset, :],
                other.values[..., : cache.offset, :],
            )


def separate(caches: Caches) -> None:
    """Give plain caches arrays of their own, so that they hold no others' memory."""
    for cache in filter(plain, leaves(caches)):
        cache.keys, cache.values = mx.contiguous(cache.keys), mx.contiguous(cache.values)


def plain(cache: Any) -> bool:
    """Return True for one of mlx-lm's plain caches that has tokens."""
    from mlx_lm.models.cache import KVCache

    return type(cache) is KVCache and cache.keys is not None


def _only_window(cache: Any) -> None:
    """Drop the tokens before the window, which a chunk of a prompt leaves there until the next token."""
    keys, values, offset, keep, window, end = cache.state
    if not keep and end == keys.shape[2] > window:
        cache.state = keys[..., -window:, :], values[..., -window:, :], offset, keep, window, window


def cut(caches: Caches, length: int) -> Caches:
    """Roll caches back to their first `length` tokens."""
    for cache in leaves(caches):
        if (beyond := getattr(cache, "offset", length) - length) > 0:
            cache.trim(beyond)
    return caches


#: mlx-lm's caches that hold the keys and values of every token, so that they can be cut anywhere.
_PLAIN = frozenset({"KVCache", "QuantizedKVCache"})
#: Those whose copies are independent: the plain ones, windows of tokens, and states of fixed size.
_COPIED = _PLAIN | {"ArraysCache", "ChunkedKVCache", "LayerCache", "RotatingKVCache"}
#: Those of them that grow with each token and cannot be cut.
_GROWING = frozenset({"LayerCache"})
#: mlx-lm's rotary embedding that compares a position with the model's context, so all rows must share one.
_ONE_OFFSET = "DynamicNTKScalingRoPE"


class CacheKind:
    """Abilities of a model's KV caches. `kv_bits` 0 leaves keys and values as they are.

    slots     sequences can share a SlotBatch, so a step may feed rows several tokens and roll back
    batches   sequences can decode together at all
    cuttable  a sequence may start from any beginning of another's caches
    reusable  a sequence may start from a copy of another's caches, as long as all of their tokens begin it
    overlapping  not cuttable, but what grows with each token is, so that `overlap` frees all of it

    Raises ModelError (MODEL_UNSUPPORTED) when they cannot be quantized.
    """

    def __init__(self, model: Any, kv_bits: int = 0) -> None:
        self._model = model
        self._kv_bits = kv_bits
        self.group_size = self._find_group_size() if kv_bits else 0
        new = self.new()
        kinds = {type(cache).__name__ for cache in new}
        inside = {type(cache).__name__ for cache in leaves(new)}
        alone = kv_bits or any(type(module).__name__ == _ONE_OFFSET for module in model.modules())
        self.slots = kinds == {"KVCache"} and not alone
        self.batches = all(hasattr(cache, "merge") for cache in new) and not alone
        self.cuttable = inside <= _PLAIN
        self.reusable = inside <= _COPIED
        self.overlapping = self.reusable and not self.cuttable and not inside & _GROWING
        self._empty = self._shapes() if self.slots else []

    def empty_batch(self) -> Batch:
        return SlotBatch(self._empty) if self.slots else MergedBatch()

    def _shapes(self) -> list[Empty]:
        """Return shapes and types of an empty row's keys and values, from a forward that is never run."""
        arrays = unrun_arrays(self._model, self.new())
        return [((1, array.shape[1], SMALLEST, array.shape[3]), array.dtype) for array in arrays]

    def new(self) -> Caches:
        """Return empty caches for one sequence."""
        caches = make_cache(self._model)
        if not self._kv_bits:
            return caches
        return [cache.to_quantized(group_size=self.group_size, bits=self._kv_bits) for cache in caches]

    def _find_group_size(self) -> int:
        """Return the group size, from the shapes of a forward that is built and never run."""
        from mlx_lm.models.cache import KVCache

        caches = make_cache(self._model)
        if not all(type(cache) is KVCache for cache in caches):
            kinds = ", ".join(sorted({type(cache).__name__ for cache in caches}))
            raise self._refusal(f"this model's caches ({kinds}) cannot be quantized")
        heads = {array.shape[-1] for array in unrun_arrays(self._model, caches)}
        for size in QUANTIZATION_GROUPS:
            if not any(head % size for head in heads):
                return size
        sizes = " and ".join(str(head) for head in sorted(heads))
        raise self._refusal(
            f"this model's keys and values of {sizes} numbers do not divide by {QUANTIZATION_GROUPS[-1]}"
        )

    def _refusal(self, why: str) -> ModelError:
        return ModelError(f"--kv-bits {self._kv_bits}: {why}; leave it out", Code.MODEL_UNSUPPORTED)
