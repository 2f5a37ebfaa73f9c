"""Forwards of one loaded model over the caller's KV caches, each followed by its MTP head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, cast

import mlx.core as mx

from . import kv_cache
from .batch import Bucket, CacheKind, ExactShape, ForwardShape, MergedBucket, in_parts
from .group import CollectiveCounter
from .loader import ModelShare
from .mtp_head import ChosenStep, MtpHead, follow
from .payoff import LENGTHS
from .recurrent import views_of
from .sharding import at_ends

MAX_GRAPHS, MAX_SHAPES = 128, 1024  # most to keep
MAX_LAYERS = 4096  #: of all graphs together: each layer of one holds 20 to 90 KB
#: Without drafts, the MTP head's cache is updated once for so many steps: single entries cost much.
BEHIND = 32
STEPS_BEFORE_TRACE = 3  #: of several rows; few enough that warming up compiles the kernels
WIDTHS = frozenset(1 + drafts for drafts in (0, *LENGTHS))  #: tokens of a row in steps that are traced

#: Rows, slots and capacity of a bucket's arrays, view, and width.
ShapeKey = tuple[int, int, int, int, int]
Key = tuple[tuple[ShapeKey, ...], tuple[Any, ...]]
#: A bucket's arrays, its layers' states, and masks of the waiting tokens that were accepted.
Held = tuple[list[mx.array], list[list[mx.array]], list[mx.array]]


class DecodeGraphs:
    """Traced graphs of decode steps by shape and kind, because building one costs as much as running it."""

    def __init__(
        self, body: Callable[..., Any], counter: CollectiveCounter, *, traces: bool, layers: int = 1
    ) -> None:
        self._body = body
        self._most = max(1, min(MAX_GRAPHS, MAX_LAYERS // layers))
        self._counter = counter
        self._traces = traces
        self._graphs: dict[Key, tuple[Callable[..., Any], int]] = {}  # with the number of collectives
        self._shapes: Counter[Key] = Counter()  # steps of several tokens

    def __len__(self) -> int:
        return len(self._graphs)

    def run(
        self, shapes: tuple[ShapeKey, ...], kind: tuple[Any, ...], inputs: tuple[Any, ...], *, again: bool
    ) -> Any:
        if self._traces and again and self._comes_again((shapes, kind)):
            return self._replay((shapes, kind), inputs)
        return self._body(*kind, *inputs)

    def _comes_again(self, key: Key) -> bool:
        (rows, *_, width), *more = key[0]
        alone = rows == 1 and not more
        if (alone and width == 1) or key in self._graphs:
            return True
        if len(self._shapes) > MAX_SHAPES:
            self._shapes.clear()
        self._shapes[key] += 1
        return self._shapes[key] > (1 if alone else STEPS_BEFORE_TRACE)

    def _replay(self, key: Key, inputs: tuple[Any, ...]) -> Any:
        graph, collectives = self._graphs.pop(key, (None, 0))
        before = self._counter.count
        if graph is not None:
            self._graphs[key] = graph, collectives  # the most recent is last
            outcome = graph(*inputs)
            # A replay bypasses the counter. Without a compiler, MLX runs the body again, and that counts.
            self._counter.count = before + collectives
            return outcome
        if len(self._graphs) == self._most:
            del self._graphs[next(iter(self._graphs))]
        graph = mx.compile(partial(self._body, *key[1]))
        try:
            outcome = graph(*inputs)
        except (ValueError, RuntimeError):
            # A model that reads its own values cannot be traced. All ranks fail here, before anything runs.
            self._traces = False
            self._counter.count = before
            return self._body(*key[1], *inputs)
        self._graphs[key] = graph, self._counter.count - before
        return outcome


@dataclass(frozen=True, slots=True)
class StepInputs:
    tokens: mx.array  # int32 [rows, width]
    given: mx.array | None  # embeddings, or the previous stage's hidden states, [rows, width, hidden]
    widths: tuple[int, ...]  # tokens of each row without padding

    def chose(self, hidden: mx.array, following: mx.array, chosen: mx.array) -> ChosenStep:
        counts = mx.array(self.widths, dtype=mx.int32)
        return ChosenStep(hidden, following, chosen, self.tokens, counts)


class ModelForwards:
    def __init__(
        self, loaded: ModelShare, caches: CacheKind, counter: CollectiveCounter, *, traces: bool
    ) -> None:
        self.head: MtpHead | None = loaded.mtp_head
        self._model = loaded.model
        self._vocabulary = loaded.vocabulary
        self._caches = caches
        self._layers = slice(None, None if self.head is None else -1)  # caches of the model's own layers
        self.graphs = DecodeGraphs(self._body, counter, traces=traces, layers=len(loaded.model.layers))
        self._head_graphs = DecodeGraphs(self._head_body, counter, traces=traces)

    @property
    def traced(self) -> int:
        return len(self.graphs) + len(self._head_graphs)

    def read(
        self,
        tokens: mx.array,
        caches: Sequence[Any],
        given: mx.array | None = None,
        *,
        ends: mx.array,
        following: Sequence[int] = (0,),
        every: bool = False,
    ) -> tuple[mx.array, Callable[[mx.array | None], mx.array | None]]:
        """Queue a forward over prompts' `tokens` int32 [rows, length]; return logits at `ends` int32 [rows].

        `every`: at all positions instead. Also return a function that adds the prompts to the MTP head's
        cache and returns the head's output at `ends`. Its argument: embeddings [rows, 1, hidden] of the next
        tokens, or None for `following`.
        """
        head, wanted = self.head, None if every else ends
        forward = partial(self._vocabulary.forward, self._model, ends=wanted)
        if head is None:
            return forward(tokens, list(caches), given=given), lambda _: None
        length = tokens.shape[1]
        behind = mx.arange(length + 1) == ends[:, None] + 1
        longer = mx.where(
            behind, mx.array(list(following), dtype=mx.int32)[:, None], mx.pad(tokens, [(0, 0), (0, 1)])
        )
        embeddings = self.embedded(longer)
        own = embeddings[:, :length] if given is None else given
        local = forward(tokens, list(caches[self._layers]), given=own)
        hidden, known = self._vocabulary.hidden(), embeddings[:, 1:]

        def remember(last: mx.array | None) -> mx.array:
            is_last = (mx.arange(length) == ends[:, None])[:, :, None]
            following = known if last is None else mx.where(is_last, last, known)
            return at_ends(head(hidden, following, caches[-1]), ends)

        return local, remember

    def embedded(self, tokens: mx.array) -> mx.array:
        assert self._vocabulary.embedding is not None, "ranks with an MTP head have one"
        return self._vocabulary.embedding(tokens)

    def step(
        self,
        parts: Sequence[Bucket | MergedBucket],
        rows: tuple[int, ...],
        positions: tuple[int, ...],
        inputs: StepInputs,
        *,
        winners: bool,
        drafts: int,
    ) -> list[mx.array]:
        """Return this rank's share of the logits [rows, width, share], or its winners: tokens, embeddings.

        With an MTP head, hidden states [rows, width, hidden] are last, and its `drafts` get room.
        """
        arrays = [inputs.tokens, *([] if inputs.given is None else [inputs.given])]
        forward = partial(self._step, winners=winners, drafts=drafts)
        together = [parts] if self._caches.joins_buckets else [[part] for part in parts]
        return in_parts(together, rows, arrays, positions, forward=forward)

    def follow(
        self,
        parts: Sequence[Bucket | MergedBucket],
        rows: tuple[int, ...],
        positions: tuple[int, ...],
        step: ChosenStep,
        *,
        drafts: int,
    ) -> list[mx.array]:
        """Run the MTP head on chosen tokens; return its proposals, int32 [rows, drafts], or [] for none."""
        arrays = [step.hidden, step.following, step.chosen, step.fed, step.counts]
        each = [[part] for part in parts]
        return in_parts(each, rows, arrays, positions, forward=partial(self._follow, drafts=drafts))

    def catch_up(self, parts: Sequence[Bucket | MergedBucket]) -> None:
        """Add recent steps without drafts to the MTP head's cache, before it is used or moved."""
        for part in parts:
            if not isinstance(part, Bucket) or self.head is None or not part.behind:
                continue
            positions, hidden = part.behind[0][0], [step[1] for step in part.behind]
            following = [step[2] for step in part.behind]
            _, shape = _shape(part, positions, len(hidden), 0)
            (view,) = self._caches.views(part.arrays[-self._caches.parts :], ForwardShape(*shape))
            part.arrays, part.behind = part.arrays[: -self._caches.parts], []
            self.head(mx.concatenate(hidden, axis=1), mx.concatenate(following, axis=1), view)
            part.arrays += view.arrays

    def _lag(self, part: Bucket, positions: tuple[int, ...], hidden: mx.array, following: mx.array) -> None:
        if part.behind and positions != tuple([at + len(part.behind) for at in part.behind[0][0]]):
            self.catch_up([part])
        part.behind.append((positions, hidden, following))
        if len(part.behind) == BEHIND:
            self.catch_up([part])

    def _step(
        self,
        buckets: Sequence[Bucket | MergedBucket],
        inputs: list[mx.array],
        positions: tuple[int, ...],
        *,
        winners: bool,
        drafts: int,
    ) -> list[mx.array]:
        tokens, given = inputs[0], inputs[1:]
        if isinstance(buckets[0], MergedBucket):
            embeddings = given[0] if given else None
            local = self._vocabulary.forward(self._model, tokens, buckets[0].caches, given=embeddings)
            return list(self._vocabulary.winners(local)) if winners else [local]
        if not given and self._vocabulary.embedding is not None:
            given = [self._vocabulary.embedding(tokens)]
        width, left, at = tokens.shape[1], iter(positions), list[tuple[int, ...]]()
        of_each = list[tuple[ShapeKey, list[Any], Held, int]]()
        for bucket in cast("Sequence[Bucket]", buckets):
            at.append(tuple(islice(left, len(bucket.rows))))
            of_each.append(self._taken(bucket, at[-1], width, drafts))
        keys, shapes, held, waiting = zip(*of_each, strict=True)
        del of_each
        known = any(isinstance(shape[0], int) for shape in shapes)  # a known position never repeats
        again = all(_again(key, drafts) for key in keys) and not known
        values = ((tokens, given), shapes, held)
        outcome: list[mx.array]
        outcome, after = self.graphs.run(keys, (winners, waiting), values, again=again)
        for bucket, own, (arrays, kept) in zip(cast("Sequence[Bucket]", buckets), at, after, strict=True):
            bucket.arrays = arrays
            if bucket.states is not None:
                bucket.states.fed(own, width, kept)
        return outcome

    def _taken(
        self, bucket: Bucket, positions: tuple[int, ...], width: int, drafts: int
    ) -> tuple[ShapeKey, list[Any], Held, int]:
        key, shape = _shape(bucket, positions, width, drafts, self._caches)
        arrays, bucket.arrays = bucket.arrays, []  # the last other owner, so MLX writes in place
        if (states := bucket.states) is None:
            return key, shape, (arrays, [], []), 0
        kept, states.kept = states.kept, []
        return key, shape, (arrays, kept, states.stood(positions)), states.waiting

    def _follow(
        self,
        buckets: Sequence[Bucket | MergedBucket],
        step: list[mx.array],
        positions: tuple[int, ...],
        *,
        drafts: int,
    ) -> list[mx.array]:
        (part,) = buckets
        assert isinstance(part, Bucket)
        hidden, following, *_ = step
        if hidden.shape[1] == 1 and not drafts:
            self._lag(part, positions, hidden, following)
            return []
        self.catch_up([part])
        key, shape = _shape(part, positions, hidden.shape[1], drafts)
        rest, own = part.arrays[: -self._caches.parts], part.arrays[-self._caches.parts :]
        part.arrays = rest
        outcome: list[mx.array]
        outcome, own = self._head_graphs.run((key,), (drafts,), (step, shape, own), again=_again(key, drafts))
        part.arrays = [*rest, *own]
        return outcome

    def _body(
        self,
        winners: bool,
        _waiting: tuple[int, ...],
        inputs: tuple[mx.array, list[mx.array]],
        shapes: Sequence[list[Any]],
        held: Sequence[Held],
    ) -> tuple[list[mx.array], list[tuple[list[mx.array], list[list[mx.array]]]]]:
        tokens, given = inputs
        forwards = [ExactShape(*each) if isinstance(each[0], int) else ForwardShape(*each) for each in shapes]
        states = [views_of(self._caches.recurrence, kept, stood) for _, kept, stood in held]
        views = [self._caches.views(own, each) for (own, *_), each in zip(held, forwards, strict=True)]
        layers = self._caches.layers(views, states, forwards)
        embeddings = given[0] if given else None
        local = self._vocabulary.forward(self._model, tokens, layers[self._layers], given=embeddings)
        outcome = list(self._vocabulary.winners(local)) if winners else [local]
        if self.head is not None:
            outcome.append(self._vocabulary.hidden())
        return outcome, [
            ([array for view in own for array in view.arrays], [each.kept for each in recurrent])
            for own, recurrent in zip(views, states, strict=True)
        ]

    def _head_body(
        self, drafts: int, step: list[mx.array], shape: list[mx.array], arrays: list[mx.array]
    ) -> tuple[list[mx.array], list[mx.array]]:
        assert self.head is not None
        (view,) = self._caches.views(arrays, ForwardShape(*shape))
        return follow(self.head, self._vocabulary, ChosenStep(*step), view, drafts), view.arrays


def _again(key: ShapeKey, drafts: int) -> bool:
    """Return True if a step's shape will repeat: it is of usual width, or one row with the head's drafts."""
    rows, *_, width = key
    return width in WIDTHS or (rows == 1 and drafts > 0)


def _shape(
    bucket: Bucket, positions: tuple[int, ...], width: int, drafts: int, kinds: CacheKind | None = None
) -> tuple[ShapeKey, list[Any]]:
    """Make room for a step; return its key, and arguments of its ForwardShape, which stay out of graphs.

    `kinds`: None for the MTP head's caches alone.
    """
    longest = max(positions) + width + max(drafts - 1, 0)
    bucket.reserve(longest)
    held, room = bucket.shape
    view = min(kv_cache.view(longest), room)
    key = (len(positions), held, room, view, width)
    if kinds is None:
        return key, ForwardShape.arrays(mx.array(positions, dtype=mx.int32), width, view)
    return key, kinds.layout.arguments(positions, width, view, kinds.rings(room))
