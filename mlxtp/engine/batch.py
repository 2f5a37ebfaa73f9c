"""KV caches of the sequences that decode together. The same frames make them the same on every rank.

A sliding-window layer has a ring buffer (*ring*): slot p mod the number of slots holds position p. A ring is
longer than the window by the widest step, so entries of rejected drafts always fall outside the window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import wraps
from itertools import accumulate, chain
from sys import modules
from typing import Any, Generic, TypeVar, cast

import mlx.core as mx
from mlx.utils import tree_map

from ..chunks import ring_slots
from ..description import CacheCapabilities
from ..errors import Code, ModelError
from ..model_sources import MLX_VLM
from .families import attention_heads, change
from .group import uncounted
from .kv_cache import SMALLEST, capacity, roomy
from .loader import arrays_of as arrays_of
from .loader import has_head, leaves, make_cache, unrun_arrays
from .pipeline import Stage
from .recurrent import (
    STATE,
    JointStateView,
    Recurrence,
    States,
    StateView,
    recurrent_layers,
    states_of,
    views_of,
)

#: Numbers that share a scale, the best first. A head's keys and values must divide by it.
QUANTIZATION_GROUPS = (64, 32)

WHOLE = (1 << 31) - 1  # longer than any sequence

Caches = list[Any]  # one mlx-lm cache a layer, of one sequence

#: A layer's keys or values for a row without tokens: shape, type, and the maximum number of slots.
Empty = tuple[tuple[int, ...], mx.Dtype, int]


class LayerView:
    def __init__(self, arrays: list[mx.array], forward: ForwardShape) -> None:
        self.arrays = arrays  # keys and values, each [slots, KV heads, capacity, head size]
        self._forward = forward

    @property
    def offset(self) -> mx.array | int:
        return self._forward.positions

    def at(self, positions: mx.array) -> LayerView:
        """Return the view for a later forward of one token a row, at `positions` int32 [rows]."""
        view = copy(self)
        view._forward = ForwardShape(*ForwardShape.arrays(positions, 1, self._forward.view))
        return view

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self._fetched([keys, values])

    def _fetched(self, new: list[mx.array]) -> list[mx.array]:
        write, read = self._forward.write, self._forward.read
        self.arrays = [write(kept, each) for kept, each in zip(self.arrays, new, strict=True)]
        return [read(array) for array in self.arrays]

    def keys_and_values(self) -> Any:  # for a layer that shares another layer's keys and values
        return [self._forward.read(array) for array in self.arrays]

    def make_mask(self, count: int, window_size: int | None = None, **_: object) -> mx.array | None:
        return self._forward.mask(window_size)


class JointView:
    """View of several buckets in one forward. Each bucket's queries attend to its own arrays, unpadded.

    Keys, values and masks are given by bucket; only attention that `attend_by_bucket` has changed takes them.
    """

    def __init__(self, views: Sequence[LayerView], offset: mx.array, ends: Sequence[int]) -> None:
        self.offset = offset  # int32 [rows]
        self.views = views
        self.ends = list(ends)  # rows of the first bucket, of the first two, and so on up to the last but one

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        new = zip(self.views, mx.split(keys, self.ends), mx.split(values, self.ends), strict=True)
        return zip(*[view.update_and_fetch(*own) for view, *own in new], strict=True)

    def keys_and_values(self) -> Any:
        return zip(*[view.keys_and_values() for view in self.views], strict=True)

    def make_mask(self, count: int, window_size: int | None = None, **_: object) -> list[Any]:
        return [view.make_mask(count, window_size) for view in self.views]


_ATTENTION = "scaled_dot_product_attention"


def attend_by_bucket(model: Any) -> None:
    """Change mlx-lm's function for attention in all modules of this model's layers.

    Attention over latents reads its caches before that function does, so it runs as a whole for each bucket.
    """
    for part in [each for each in model.modules() if "embed_q" in each and not hasattr(each, "by_bucket")]:
        change(part, _each_bucket(type(part).__call__))
        part.by_bucket = True
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    for names in [vars(modules[kind.__module__]) for kind in kinds]:
        if _ATTENTION in names and not hasattr(names[_ATTENTION], "by_bucket"):
            names[_ATTENTION] = _by_bucket(names[_ATTENTION])


def _by_bucket(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @wraps(attention)
    def attend(queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, **more: Any) -> mx.array:
        if not isinstance(cache, JointView):
            return attention(queries, keys, values, cache, scale, **more)
        each = zip(cache.views, mx.split(queries, cache.ends), keys, values, more.pop("mask"), strict=True)
        return mx.concatenate([attention(*own, view, scale, mask=mask, **more) for view, *own, mask in each])

    attend.by_bucket = True  # type: ignore[attr-defined]
    return attend


def _each_bucket(call: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attend(part: Any, x: mx.array, *args: Any, **named: Any) -> mx.array:
        caches = [each for each in args if isinstance(each, JointView)]
        if not caches:
            return call(part, x, *args, **named)
        found: list[mx.array] = []
        each = [_split(value, x.shape[0], caches[0]) for value in (x, *args)]
        for own, *more in zip(*each, strict=True):
            # Every rank must run its sums in the same order.
            (after,) = mx.depends([own], found[-1:]) if found else (own,)
            found.append(call(part, after, *more, **named))
        return mx.concatenate(found)

    return attend


def _split(value: Any, rows: int, joint: JointView) -> Sequence[Any]:
    if isinstance(value, JointView):
        return value.views
    if isinstance(value, mx.array) and value.shape[:1] == (rows,):
        return list(mx.split(value, joint.ends))
    return value if isinstance(value, list) else [value] * len(joint.views)


class QuantizedView(LayerView):
    """View of quantized arrays: packed numbers, scales and biases of the keys, then of the values."""

    def __init__(self, arrays: list[mx.array], forward: ForwardShape, group_size: int, bits: int) -> None:
        super().__init__(arrays, forward)
        self.group_size = group_size
        self.bits = bits

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        quantized = [mx.quantize(each, group_size=self.group_size, bits=self.bits) for each in (keys, values)]
        fetched = self._fetched([array for each in quantized for array in each])
        return fetched[:3], fetched[3:]


#: Write a single row with one slice update. On Metal, an extra kernel would compute the slice's position.
PIECES = not mx.metal.is_available()


class ForwardShape:
    """Rows and positions of one forward over a Bucket, shared by its layers."""

    def __init__(self, positions: mx.array, targets: mx.array, mask: mx.array, *rings: mx.array) -> None:
        self.positions: mx.array | int = positions  # int32 [rows], of each row's first new token
        self.offset = positions
        self._starts: mx.array | None = positions  # where each row's slice begins
        self._targets = targets  # int32 [rows, width], where each new token goes
        #: Bool [rows, 1 or query heads, width, view]: each new token sees its row up to itself.
        self._mask = mask
        self.rows, _, _, self.view = mask.shape
        self._places: dict[int, tuple[mx.array, mx.array]] = {}  # row and head indices, by number of KV heads
        self.rings = _rings(positions, rings)  # one shape for each kind of ring

    @staticmethod
    def arrays(
        positions: mx.array, width: int, view: int, rings: Sequence[tuple[int, int]] = ()
    ) -> list[mx.array]:
        """Return the constructor's arguments. `rings`: window and slots of each kind of ring."""
        targets = positions[:, None] + mx.arange(width)[None]
        shape = [positions, targets, (mx.arange(view) <= targets[:, :, None])[:, None]]
        for window, slots in rings:
            ages = (targets[:, :, None] - mx.arange(min(view, slots))) % slots
            shape += [targets % slots, (ages < mx.minimum(targets + 1, window)[:, :, None])[:, None]]
        return shape

    def write(self, kept: mx.array, new: mx.array) -> mx.array:
        """Write `new` [rows, KV heads, width, head size] into `kept`, and return the result."""
        if PIECES and self.rows == 1 and kept.shape[0] == 1 and self._starts is not None:
            return mx.slice_update(kept, new, self._starts, axes=(2,))
        heads = new.shape[1]
        if heads not in self._places:
            self._places[heads] = mx.arange(self.rows)[:, None, None], mx.arange(heads)[None, :, None]
        kept[*self._places[heads], self._targets[:, None]] = new
        return kept

    def read(self, kept: mx.array) -> mx.array:
        return kept[: self.rows, :, : self.view]

    def mask(self, window: int | None) -> mx.array | None:
        if window is None:
            return self._mask
        return self._mask & (mx.arange(self.view) > self._targets[:, None, :, None] - window)


class RingShape(ForwardShape):
    """ForwardShape of ring buffers. The mask shows the slots whose age is within the window."""

    def __init__(self, positions: mx.array, targets: mx.array, mask: mx.array) -> None:
        super().__init__(positions, targets, mask)
        self._starts = targets[:, 0] if targets.shape[1] == 1 else None

    def mask(self, window: int | None) -> mx.array:
        return self._mask


class ExactShape(ForwardShape):
    """ForwardShape of a single row that is fed one token at a known `position`: it needs no mask."""

    def __init__(self, position: int, positions: mx.array, *rings: mx.array) -> None:
        self.positions, self.offset = position, positions
        self.rows, self.view = 1, position + 1
        self.rings = _rings(positions, rings)

    def write(self, kept: mx.array, new: mx.array) -> mx.array:
        kept[:1, :, self.view - 1 : self.view] = new
        return kept

    def mask(self, window: int | None) -> mx.array | None:
        if window is None or window >= self.view:
            return None
        return (mx.arange(self.view) >= self.view - window)[None, None, None]


def _rings(positions: mx.array, arrays: Sequence[mx.array]) -> list[ForwardShape]:
    return [RingShape(positions, *arrays[at : at + 2]) for at in range(0, len(arrays), 2)]


#: A single row with this many keys is read without a mask: MLX then reads keys and values once for 8, 12 or
#: 16 query heads (`sdpa_vector_2pass_1_gqa`). For fewer keys, a traced graph saves more.
EXACT_FROM = 8192
VECTOR_WIDTH = 8  #: most queries a row that MLX's vector kernel for attention accepts
VECTOR_QUERIES = 32  #: most queries a row times query heads of a KV head that the same kernel accepts


def unfused_drafts(heads: int, kv_heads: int) -> range:
    """Return the draft counts that Metal's attention has no fused kernel for; none if no count has one."""
    queries = VECTOR_QUERIES * kv_heads // heads if heads else 0
    return range(queries, VECTOR_WIDTH) if queries > 1 else range(0)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Requirements of this device's attention; the defaults are a CPU's."""

    exact_from: int = WHOLE  # a single row with this many keys gets an `ExactShape`, and no traced graph
    heads: int = 0  # repeat masks of several rows for so many heads; Metal would do it again in each layer

    @classmethod
    def here(cls, model: Any, kv_bits: int) -> StepLayout:
        if not mx.metal.is_available():
            return cls()
        return cls(EXACT_FROM, 0 if kv_bits else attention_heads(model)[0])  # quantized: other kernels

    def arguments(
        self, positions: tuple[int, ...], width: int, view: int, rings: Sequence[tuple[int, int]] = ()
    ) -> list[Any]:
        rows = len(positions)
        shape = ForwardShape.arrays(mx.array(positions, dtype=mx.int32), width, view, rings)
        if rows == width == 1 and positions[0] + 1 >= self.exact_from:
            return [positions[0], shape[0], *shape[3:]]
        if self.heads and rows > 1 and width <= VECTOR_WIDTH:
            for at in range(2, len(shape), 2):
                whole = (rows, self.heads, *shape[at].shape[2:])
                shape[at] = mx.contiguous(mx.broadcast_to(shape[at], whole))
        return shape


@dataclass(eq=False, repr=False, slots=True)
class Bucket:
    """Rows that share arrays: keys, then values of the first layer, of the second, and so on."""

    rows: list[int]
    arrays: list[mx.array]  # each [slots, KV heads, capacity, ...]
    room: int  # capacity of the arrays; a ring may have fewer slots
    most: Sequence[int]  # maximum slots of each array
    #: Entries that the MTP head's arrays still lack: positions, hidden states and embeddings of recent steps.
    behind: list[tuple[tuple[int, ...], mx.array, mx.array]] = field(default_factory=list)
    states: States | None = None

    @property
    def every_array(self) -> list[mx.array]:
        return [*self.arrays, *(self.states.arrays if self.states else ())]

    @property
    def shape(self) -> tuple[int, int]:
        return self.arrays[0].shape[0], self.room  # slots and capacity

    def reserve(self, length: int) -> None:
        if self.room < length:
            self.room = roomy(length)
            self.arrays = _resized(self.arrays, self.shape[0], self.room, self.most)

    def part(self, uid: int, length: int) -> list[mx.array]:
        row, (held, room) = self.rows.index(uid), self.shape
        if held == 1 and room <= capacity(length):
            return [mx.array(array) for array in self.arrays]  # the first write copies
        return [mx.contiguous(array[row : row + 1, :, :length]) for array in self.arrays]

    def leave(self, uid: int) -> None:
        row, last = self.rows.index(uid), len(self.rows) - 1
        if row != last:
            moved = [mx.contiguous(array[last : last + 1]) for array in self.arrays]
            # Compute these copies first: MLX can then write to the source arrays in place.
            mx.async_eval(moved)
            self.arrays = _placed(self.arrays, moved, row)
            self.rows[row] = self.rows[last]
        if self.states is not None and last:
            self.states = self.states.rows(rows_without(row, last))
        self.rows.pop()


class MergedBucket:
    """Rows of mlx-lm's own batched caches; a single sequence keeps its plain caches."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.caches: Caches = []

    @property
    def every_array(self) -> list[mx.array]:
        return arrays_of(self.caches)

    def join(self, uid: int, caches: Caches) -> None:
        self.rows.append(uid)
        if len(self.rows) == 1:
            self.caches = caches
            return
        if len(self.rows) == 2:
            self.caches = [cache.merge([cache]) for cache in self.caches]
        for running, joining in zip(self.caches, caches, strict=True):
            running.extend(joining.merge([joining]))

    def leave(self, uid: int) -> None:
        row = self.rows.index(uid)
        self.rows[row] = self.rows[-1]
        self.rows.pop()
        order = rows_without(row, len(self.rows))
        if len(order) > 1:
            for cache in self.caches:
                cache.filter(mx.array(order))
        else:
            self.caches = [cache.extract(at) for at in order for cache in self.caches]

    def copy(self, uid: int, length: int) -> Caches:
        if len(self.rows) == 1:
            return share(self.caches, length)
        row = self.rows.index(uid)
        return cut([cache.extract(row) for cache in self.caches], length)


def rows_without(row: int, last: int) -> list[int]:
    """Return the order of rows after the `last` one has moved to the place of `row`."""
    return [*range(row), last, *range(row + 1, last)][:last]


P = TypeVar("P", Bucket, MergedBucket)


class SequenceCaches(Generic[P]):
    """KV caches of the rows that decode together. When a row leaves, the last row takes its place."""

    def __init__(self) -> None:
        self.rows: list[int] = []  # in the order of a step's rows
        self.every: list[P] = []  # parts; a step runs one forward for each

    def copy(self, uid: int, length: int) -> Caches:
        raise NotImplementedError

    def leave(self, uid: int, keep: int) -> Caches | None:
        kept, part = self.copy(uid, keep) if keep else None, self.part(uid)
        part.leave(uid)
        if not part.rows:
            self.every.remove(part)
        self.rows[self.rows.index(uid)] = self.rows[-1]
        self.rows.pop()
        return kept

    def parts(self, rows: Sequence[int]) -> list[P]:
        wanted = set(rows)
        return [part for part in self.every if wanted.intersection(part.rows)]

    def part(self, uid: int) -> P:
        return next(part for part in self.every if uid in part.rows)

    def arrays(self, rows: Sequence[int] = ()) -> list[mx.array]:
        return [array for part in (self.parts(rows) if rows else self.every) for array in part.every_array]


class SlotCaches(SequenceCaches[Bucket]):
    """Rows of similar lengths in shared arrays; a new row has its own until `arrange`. `empty`: see Empty."""

    def __init__(
        self,
        empty: Sequence[Empty],
        caches_of: Callable[[list[mx.array], int, States | None], Caches],
        recurrence: Recurrence | None = None,
    ) -> None:
        super().__init__()
        self._empty = empty
        self._most = [most for *_, most in empty]
        self._caches_of = caches_of
        self._recurrence = recurrence

    def join(self, uid: int, caches: Caches) -> None:
        """Add `uid` as the last row; this object then owns `caches`."""
        self.rows.append(uid)
        growing = [cache for cache in leaves(caches) if not _is_state(cache)]
        length, room = growing[0].offset, SMALLEST
        if growing[0].keys is None:
            arrays = [mx.zeros(shape, dtype=dtype) for shape, dtype, _ in self._empty]
        else:
            whole = [_arrays_of(cache)[0].shape[2] for cache in growing if not _is_window(cache)]
            room = whole[0] if whole else capacity(length)
            of_each = [_rings_of(each, room) if _is_window(each) else _arrays_of(each) for each in growing]
            arrays = list(chain(*of_each))
        bucket = Bucket([uid], arrays, room, self._most)
        held = [cache for cache in leaves(caches) if _is_state(cache)]
        if held and self._recurrence is not None:
            bucket.states = states_of(self._recurrence, held, length)
        self.every.append(bucket)

    def copy(self, uid: int, length: int) -> Caches:
        bucket = self.part(uid)
        states = bucket.states and bucket.states.rows([bucket.rows.index(uid)])
        return self._caches_of(bucket.part(uid, length), length, states)

    def between(self, uid: int, start: int, end: int) -> Caches:
        bucket = self.part(uid)
        row = bucket.rows.index(uid)
        parts = [array[row : row + 1, :, start:end] for array in bucket.arrays]
        return self._caches_of(parts, end - start, None)

    def arrange(self, rooms: Sequence[int], lanes: Sequence[int] = ()) -> None:
        slots = [(room, lanes[at] if lanes else 0) for at, room in enumerate(rooms)]
        uids: dict[tuple[int, int], list[int]] = {}
        for uid, slot in zip(self.rows, slots, strict=False):
            uids.setdefault(slot, []).append(uid)
        held = Counter(slots)
        self.every = [self._gathered(rows, held[slot], slot[0]) for slot, rows in uids.items()]

    def gather(self, uids: Sequence[int], room: int) -> Bucket:
        gathered = self._gathered(uids, len(uids), room)
        self.every = [bucket for bucket in self.every if bucket.rows[0] not in uids]
        self.every.append(gathered)
        return gathered

    def _gathered(self, uids: Sequence[int], held: int, room: int) -> Bucket:
        wanted = set(uids)
        base = max(self.every, key=lambda bucket: len(wanted.intersection(bucket.rows)))
        stay = [row for row, uid in enumerate(base.rows) if uid in wanted]
        rows, arrays, states = [base.rows[row] for row in stay], base.arrays, base.states
        if len(stay) < len(base.rows):
            arrays = [array[mx.array(stay)] for array in arrays]
            states = states and states.rows(stay)
        arrays = _resized(arrays, held, room, self._most)
        for uid in uids:
            if uid not in rows:
                bucket = self.part(uid)
                arrays = _placed(arrays, bucket.part(uid, room), len(rows))
                if states is not None and bucket.states is not None:
                    states = states.beside(bucket.states.rows([bucket.rows.index(uid)]))
                rows.append(uid)
        return Bucket(rows, arrays, room, self._most, states=states)


def _placed(arrays: list[mx.array], new: list[mx.array], row: int) -> list[mx.array]:
    pairs = zip(arrays, new, strict=True)
    return [mx.slice_update(kept, each, mx.array([row]), axes=(0,)) for kept, each in pairs]


def _resized(arrays: list[mx.array], held: int, room: int, most: Sequence[int]) -> list[mx.array]:
    def sized(array: mx.array, room: int) -> mx.array:
        if array.shape[0] == held and array.shape[2] == room:
            return array
        part = array[:held, :, :room]
        more = [(0, held - part.shape[0]), (0, 0), (0, room - part.shape[2]), (0, 0)]
        return mx.contiguous(mx.pad(part, more))

    return [sized(array, min(room, each)) for array, each in zip(arrays, most, strict=True)]


def _rings_of(cache: Any, room: int) -> list[mx.array]:
    *arrays, length, _, window, end = cache.state  # the newest token is at `end - 1`
    count, slots = min(length, window), min(room, ring_slots(window))
    tokens = [mx.roll(array, -end, 2)[:, :, -count:] for array in arrays]
    padded = [mx.pad(each, [(0, 0), (0, 0), (0, slots - count), (0, 0)]) for each in tokens]
    return [mx.contiguous(mx.roll(each, (length - count) % slots, 2)) for each in padded]


def _fill_window(cache: Any, rings: Sequence[mx.array], length: int) -> None:
    count = min(length, cache.max_size)
    rolled = [mx.roll(each, -((length - count) % each.shape[2]), 2)[:, :, :count] for each in rings]
    cache.state = (*map(mx.contiguous, rolled), length, 0, cache.max_size, count)


def _kind(cache: Any) -> str:
    return type(cache).__name__


def _is_state(cache: Any) -> bool:
    return _kind(cache) == STATE


def _is_window(cache: Any) -> bool:
    return _kind(cache) == _WINDOW and not cache.keep


def _arrays_of(cache: Any) -> list[mx.array]:
    both = (cache.keys, cache.values)
    return [array for each in both for array in (each if isinstance(each, list | tuple) else (each,))]


# A module function, because a closure that calls itself would keep its arrays alive.
def _next_view(cache: Any, growing: Iterator[LayerView | JointView], recurrent: Iterator[StateView]) -> Any:
    if hasattr(cache, "caches"):
        return [_next_view(each, growing, recurrent) for each in cache.caches]
    return next(recurrent) if _is_state(cache) else next(growing)


def in_parts(
    parts: Sequence[Sequence[Bucket | MergedBucket]],
    rows: Sequence[int],
    inputs: list[mx.array],
    positions: tuple[int, ...],
    *,
    forward: Callable[[Sequence[Bucket | MergedBucket], list[mx.array], tuple[int, ...]], list[mx.array]],
) -> list[mx.array]:
    """Call `forward` for each part, a list of buckets. Inputs [rows, ...] and results follow `rows`."""
    held = [[uid for bucket in part for uid in bucket.rows] for part in parts]
    if held == [list(rows)]:
        return forward(parts[0], inputs, positions)
    place = {uid: row for row, uid in enumerate(rows)}
    outcomes: list[list[mx.array]] = []
    order: list[int] = []
    for part, uids in zip(parts, held, strict=True):
        places = [place[uid] for uid in uids]
        at = mx.array(places)
        own = [each[at] for each in inputs]
        if outcomes and outcomes[-1]:  # every rank must run its collectives in the same order
            own = mx.depends(own, outcomes[-1])
        outcomes.append(forward(part, own, tuple([positions[each] for each in places])))
        order += places
    back = mx.array(sorted(range(len(order)), key=order.__getitem__))
    return [mx.concatenate(list(parts))[back] for parts in zip(*outcomes, strict=True)]


class MergedCaches(SequenceCaches[MergedBucket]):
    """Rows in mlx-lm's own batched caches. With `lanes`, a joining row stays alone until `arrange`."""

    def __init__(self, *, lanes: bool = False) -> None:
        super().__init__()
        self._lanes = lanes

    def join(self, uid: int, caches: Caches) -> None:
        self.rows.append(uid)
        if self._lanes or not self.every:
            self.every.append(MergedBucket())
        self.every[-1].join(uid, caches)

    def copy(self, uid: int, length: int) -> Caches:
        return self.part(uid).copy(uid, length)

    def arrange(self, rooms: Sequence[int], lanes: Sequence[int]) -> None:
        for number in sorted(set(lanes)):
            uids = [uid for uid, lane in zip(self.rows, lanes, strict=True) if lane == number]
            into = self.part(uids[0])
            for other in [uid for uid in into.rows if uid not in uids]:
                self.every.append(MergedBucket())
                self._move(other, self.every[-1])
            for uid in uids:
                if uid not in into.rows:
                    self._move(uid, into)

    def _move(self, uid: int, into: MergedBucket) -> None:
        part = self.part(uid)
        caches = part.copy(uid, WHOLE)
        part.leave(uid)
        into.join(uid, caches)
        self.every = [each for each in self.every if each.rows]


def share(caches: Caches, length: int) -> Caches:
    """Return separate caches of the first `length` tokens. They share arrays until one side writes."""
    shared: Caches = deepcopy(caches)  # handles, not buffers: mlx arrays are immutable underneath
    for cache in leaves(shared):
        if _kind(cache) in _PLAIN and cache.keys is not None:
            # The next write copies the whole array, so leave only the needed tokens in it.
            _only_first(cache, length)
            cache.offset = min(cache.offset, length)
        elif _is_window(cache) and cache.keys is not None:
            keys, values, offset, keep, window, end = cache.state
            if end == keys.shape[2] > window:  # prefill leaves tokens from before the window
                cache.state = keys[..., -window:, :], values[..., -window:, :], offset, keep, window, window
    return cut(shared, length)


def merged(rows: Sequence[Caches], widths: Sequence[int], width: int) -> Caches:
    """Return mlx-lm's batched caches for a forward of `width` tokens; rows have `widths` of them."""
    found = [caches[0].merge(list(caches)) for caches in zip(*rows, strict=True)]
    for cache in found:
        cache.prepare(lengths=list(widths), right_padding=[width - own for own in widths])
    return found


def divide(batched: Caches, rows: Sequence[Caches], widths: Sequence[int], width: int) -> None:
    """Give `rows` what the forward has put into their `merged` caches, without the padding."""
    for whole, caches in zip(batched, zip(*rows, strict=True), strict=True):
        _divide(whole, caches, widths, width)


def _divide(whole: Any, caches: Sequence[Any], widths: Sequence[int], width: int) -> None:
    if hasattr(whole, "caches"):
        for part, each in zip(
            whole.caches, zip(*[cache.caches for cache in caches], strict=True), strict=True
        ):
            _divide(part, each, widths, width)
        return
    if _kind(caches[0]) == STATE:
        for row, cache in enumerate(caches):
            cache.cache = [mx.contiguous(array[row : row + 1]) for array in whole.cache]
        return
    held = [cache.size() for cache in caches]
    # Rows are right-aligned before the new tokens. A window has lost the oldest ones to them.
    before = (whole.keys.shape[2] if _is_window(caches[0]) else max(held) + width) - width
    for row, (cache, own, size) in enumerate(zip(caches, widths, held, strict=True)):
        span = slice(max(before - size, 0), before + own)
        keys, values = [mx.contiguous(array[row : row + 1, :, span]) for array in (whole.keys, whole.values)]
        length = cache.offset + own
        if _is_window(cache):
            cache.state = keys, values, length, 0, cache.max_size, keys.shape[2]
        else:
            cache.keys, cache.values, cache.offset = keys, values, length


def snapshot(caches: Caches, length: int) -> Caches:
    copies = share(caches, length)
    separate(copies)
    return copies


def overlap(caches: Caches, longer: Caches) -> None:
    """Make plain caches share the arrays of `longer` ones, whose first tokens are the same."""
    for cache, other in zip(leaves(caches), leaves(longer), strict=True):
        if plain(cache):
            cache.keys, cache.values = other.keys, other.values
            _only_first(cache, cache.offset)


def separate(caches: Caches) -> None:
    for cache in leaves(caches):
        if plain(cache) or (_kind(cache) == _WINDOW and cache.keys is not None):
            cache.keys, cache.values = mx.contiguous(cache.keys), mx.contiguous(cache.values)
        elif _is_state(cache):  # mlx-lm's convolution inputs are slices of a whole chunk's
            cache.cache = [mx.contiguous(array) for array in cache.cache]


def plain(cache: Any) -> bool:
    return _kind(cache) == "KVCache" and cache.keys is not None


def _only_first(cache: Any, length: int) -> None:
    cache.keys, cache.values = tree_map(lambda array: array[..., :length, :], (cache.keys, cache.values))


def cut(caches: Caches, length: int) -> Caches:
    for cache in leaves(caches):
        if (beyond := getattr(cache, "offset", length) - length) > 0:
            cache.trim(beyond)
    return caches


#: mlx-lm's caches that hold the keys and values of every token, and so can be truncated anywhere.
_PLAIN = frozenset({"KVCache", "QuantizedKVCache"})
_WINDOW = "RotatingKVCache"
#: Caches of mlx-vlm whose padded rows attend as each row alone.
_PADDED = frozenset({STATE, "HyV4KVCache", "PoolingCache"})
#: Caches that can be copied and grow with each token, but cannot be truncated.
_GROWING = frozenset({"HyV4KVCache", "LayerCache", "PoolingCache", "QSAKVCache"})
#: Caches whose copies are independent: plain caches, windows, and states of fixed size.
_COPIED = _PLAIN | _GROWING | {STATE, "ChunkedKVCache", _WINDOW}
#: Modules of mlx-lm that need all rows to share one position: a rotary embedding that compares it with the
#: model's context, and attention that takes it from the shape of its keys.
_ONE_OFFSET = frozenset({"DynamicNTKScalingRoPE", "KVReuseAttention"})


class CacheKind:
    """Kinds and capabilities of a model's KV caches. With `kv_bits` 0, they are not quantized.

    Raises ModelError (MODEL_UNSUPPORTED) if `kv_bits` is set and they cannot be quantized.
    """

    def __init__(
        self, model: Any, kv_bits: int = 0, stage: Stage | None = None, layout: StepLayout | None = None
    ) -> None:
        self.model = model
        self.layout = layout or StepLayout.here(model, kv_bits)
        self._kv_bits = kv_bits
        self._staged = stage is not None
        every = make_cache(model) if stage is None else stage.all_caches()
        self.group_size = self._find_group_size(every) if kv_bits else 0
        new = self._quantized(every)
        kinds = {"KVCache" if _is_window(cache) else _kind(cache) for cache in new}
        inside, names = (set(map(_kind, leaves(caches))) for caches in (new, every))
        modules = model.modules()
        # Blocks of keys are counted from the padding that mlx-lm puts before shorter rows (MiniMax M3).
        blocks = any(getattr(module, "index_block_size", None) for module in modules)
        foreign = {_kind(cache) for cache in leaves(every) if type(cache).__module__.startswith(MLX_VLM)}
        alone = blocks or not _ONE_OFFSET.isdisjoint(map(_kind, modules)) or not foreign <= _PADDED
        self._own = make_cache(model)
        attend_by_bucket(model)
        # The kind of the model's recurrent layers, if they can undo drafts, and this stage's own layers.
        self.recurrence, self._recurrent = recurrent_layers(model, sum(map(_is_state, leaves(new))))
        if self.recurrence is None:
            uniform = len(kinds) == 1 and kinds <= _PLAIN
        else:
            uniform = inside == {"KVCache", STATE} and (stage is None or stage.counting)
        own = [cache for cache in leaves(self._own) if not _is_state(cache)]
        self.attending = len(own)  #: layers of this rank with keys and values
        #: Window of each of this rank's layers with keys and values; 0 for a layer without a window.
        self._windows = [cache.max_size if _is_window(cache) else 0 for cache in own]
        rolls_back = uniform and not alone
        batched = rolls_back or (all(hasattr(cache, "merge") for cache in new) and not alone)
        self._empty = self._shapes() if rolls_back else []
        if rolls_back and self.recurrence is None and not self._runs([SMALLEST]):
            rolls_back = batched = False
        #: Buckets step in one forward; otherwise each has its own.
        self.joins_buckets = rolls_back and self._runs([SMALLEST, 2 * SMALLEST])
        shared = rolls_back and inside <= _PLAIN
        padded = STATE not in inside or (self.recurrence is not None and self.recurrence.padded)
        windows = [cache for cache in leaves(new) if _kind(cache) == _WINDOW]
        mergeable = inside <= {"KVCache", _WINDOW, STATE} and all(map(_is_window, windows))
        self.can = CacheCapabilities(  # of the whole model, also on a pipeline stage
            batched=batched,
            joint=shared or (batched and padded and mergeable),
            rolls_back=rolls_back,
            truncatable=inside <= _PLAIN,
            copyable=inside <= _COPIED,
            quantizable=rolls_back and names == {"KVCache"},
            kinds=tuple(sorted(names)),
        )
        #: These caches cannot be truncated, but `overlap` frees every array that grows with tokens.
        self.overlapping = self.can.copyable and not self.can.truncatable and not inside & _GROWING

    @property
    def parts(self) -> int:
        return 6 if self._kv_bits else 2  # arrays of a layer's keys and values

    def empty_batch(self) -> SlotCaches | MergedCaches:
        if self.can.rolls_back:
            return SlotCaches(self._empty, self.caches_of, self.recurrence)
        return MergedCaches(lanes=self._staged)

    def caches_of(self, arrays: list[mx.array], length: int, states: States | None) -> Caches:
        caches = self.new()
        if states is not None:
            states.fill([cache for cache in leaves(caches) if _is_state(cache)], self._recurrent, length)
        for layer, cache in enumerate([cache for cache in leaves(caches) if not _is_state(cache)]):
            own = arrays[layer * self.parts : (layer + 1) * self.parts]
            if _is_window(cache):
                _fill_window(cache, own, length)
                continue
            cache.keys, cache.values = (own[:3], own[3:]) if self._kv_bits else own
            cache.offset = length
        return caches

    def views(self, arrays: list[mx.array], forward: ForwardShape) -> list[LayerView]:
        layers = [arrays[at : at + self.parts] for at in range(0, len(arrays), self.parts)]
        if not self._kv_bits:
            shapes = {0: forward, **dict(zip(self.windows, forward.rings, strict=False))}
            windows = self._windows[-len(layers) :]
            return [LayerView(own, shapes[each]) for own, each in zip(layers, windows, strict=True)]
        return [QuantizedView(own, forward, self.group_size, self._kv_bits) for own in layers]

    def layers(
        self,
        views: Sequence[list[LayerView]],
        states: Sequence[list[StateView]],
        shapes: Sequence[ForwardShape],
    ) -> list[Any]:
        """Return what the model's layers take in place of mlx-lm's caches; each argument is by bucket."""
        if len(views) == 1:
            return self._beside(views[0], states[0])
        *ends, _ = accumulate([shape.rows for shape in shapes])
        offset = mx.concatenate([shape.offset for shape in shapes])
        growing = [JointView(each, offset, ends) for each in zip(*views, strict=True)]
        recurrence = cast("Recurrence", self.recurrence)
        recurrent = [JointStateView(recurrence, each, ends) for each in zip(*states, strict=True)]
        return self._beside(growing, recurrent)

    @property
    def windows(self) -> list[int]:
        return sorted(set(self._windows) - {0})

    def rings(self, room: int) -> list[tuple[int, int]]:
        return [(window, min(room, ring_slots(window))) for window in self.windows]

    def _beside(self, views: Sequence[LayerView | JointView], states: Sequence[StateView]) -> list[Any]:
        growing, recurrent = iter(views), iter(states)
        return [_next_view(cache, growing, recurrent) for cache in self._own]

    def reserve(self, caches: Caches, offset: int, total: int) -> None:
        """Grow caches once for a whole prompt; by default mlx-lm would copy them for each chunk."""
        if not self.can.rolls_back:
            return
        for cache in [cache for cache in leaves(caches) if _kind(cache) in _PLAIN]:
            if cache.keys is not None and _arrays_of(cache)[0].shape[2] < total:
                _only_first(cache, offset)
            cache.step = capacity(total) - offset

    def _runs(self, rooms: Sequence[int]) -> bool:
        """Return True if a forward accepts masks by row, and several buckets if `rooms` has several."""
        rows = self._empty[0][0][1] + 1  # one more than heads: gemma2 would take as many for its heads
        positions = mx.zeros(rows, dtype=mx.int32)
        shapes = [ForwardShape(*ForwardShape.arrays(positions, 1, room, self.rings(room))) for room in rooms]
        views = []
        for room, shape in zip(rooms, shapes, strict=True):
            sizes = [((rows, each[1], min(room, most), each[3]), kind) for each, kind, most in self._empty]
            views.append(self.views([mx.zeros(size, dtype=kind) for size, kind in sizes], shape))
        kept = [[mx.zeros((rows, *each), dtype=kind) for each, kind in layer] for layer in self._states]
        layers = self.layers(views, [views_of(self.recurrence, kept) for _ in rooms], shapes)
        tokens = mx.zeros((rows * len(rooms), 1), dtype=mx.int32)
        try:
            with uncounted():
                self.model(tokens, cache=layers[: len(layers) - has_head(self.model)])
        except (AttributeError, IndexError, TypeError, ValueError):
            return False
        return True

    def _shapes(self) -> list[Empty]:
        caches = self.new()
        try:
            unrun_arrays(self.model, caches)
            growing = [cache for cache in leaves(caches) if not _is_state(cache)]
            arrays = [(array, cache) for cache in growing for array in _arrays_of(cache)]
            self._states = [
                [(each.shape[1:], each.dtype) for each in cache.cache if each is not None]
                for cache in leaves(caches)
                if _is_state(cache)
            ]
        except (AttributeError, TypeError, ValueError) as error:
            if not self._kv_bits:
                raise
            raise self._refusal("this model's attention cannot read quantized keys and values") from error
        return [
            (
                (1, array.shape[1], SMALLEST, array.shape[3]),
                array.dtype,
                ring_slots(cache.max_size) if _is_window(cache) else WHOLE,
            )
            for array, cache in arrays
        ]

    def new(self) -> Caches:
        return self._quantized(make_cache(self.model))

    def _quantized(self, caches: Caches) -> Caches:
        if not self._kv_bits:
            return caches
        return [cache.to_quantized(group_size=self.group_size, bits=self._kv_bits) for cache in caches]

    def _find_group_size(self, every: Caches) -> int:
        kinds = set(map(_kind, every))
        if kinds != {"KVCache"}:
            raise self._refusal(f"this model's caches ({', '.join(sorted(kinds))}) cannot be quantized")
        heads = {array.shape[-1] for array in unrun_arrays(self.model, make_cache(self.model))}
        for size in QUANTIZATION_GROUPS:
            if not any(head % size for head in heads):
                return size
        sizes = " and ".join(str(head) for head in sorted(heads))
        raise self._refusal(
            f"this model's keys and values of {sizes} numbers do not divide by {QUANTIZATION_GROUPS[-1]}"
        )

    def _refusal(self, why: str) -> ModelError:
        return ModelError(f"--kv-bits {self._kv_bits}: {why}; leave it out", Code.MODEL_UNSUPPORTED)
