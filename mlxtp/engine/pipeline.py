"""Stages of a pipeline: each rank computes some whole layers and passes hidden states on.

Rank 0 has the last layers and the output head; the last rank has the first layers and the embedding. Each
rank sends hidden states to the next lower rank. Layers of other ranks have no weights and return their input.
"""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import accumulate, islice
from math import prod
from operator import getitem
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..errors import Code, GroupError, ModelError
from ..wire.messages import Forward
from .families import change
from .group import Group, LoneGroup, RingGroup, uncounted
from .sampler import Chosen
from .sharding import EMBEDDINGS, HEADS, ShardedEmbedding, Vocabulary, shard


def check_split(split: Sequence[int], world_size: int, layers: int) -> None:
    if len(split) != world_size or sum(split) != layers:
        raise ModelError(
            f"the split {', '.join(map(str, split))} has {sum(split)} layers for {len(split)} ranks; "
            f"this model has {layers} layers, and the group {world_size} ranks",
            Code.MODEL_NOT_DIVISIBLE,
        )


class _Reached(Exception): ...


@dataclass(slots=True)
class LayerTrace:
    caches: tuple[int, ...]  # numbers of the caches that it uses
    needs: tuple[int, ...]  # earlier layers that must be on its stage, as it needs more than hidden states
    extras: int | None  # further results; None: it returns the hidden states alone
    counted: bool  # an argument depends, or may depend, on the position of the first token
    hidden: mx.array


class Stage:
    """Layers `first` to `end` (exclusive) of `model`, computed by `rank` of `ranks`.

    Raises ModelError (MODEL_UNSUPPORTED) if a stage would need more than hidden states from another.
    """

    def __init__(self, model: Any, rank: int, split: Sequence[int]) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self.rank, self.ranks = rank, len(split)
        self.first = sum(split[rank + 1 :])
        self.end = self.first + split[rank]
        self.embeds, self.chooses = self.first == 0, rank == 0  # has the embedding; has the output head
        self.given: mx.array | None = None  # input of the next forward: hidden states [B, L, hidden]
        self._empty: list[Any] = make_prompt_cache(model)
        try:
            facts = trace_layers(model, self._empty)
        except ModelError as error:
            why = f"{model.model_type} cannot run as a pipeline: {error.detail}"
            raise ModelError(why, error.code) from None
        spans = [(sum(split[each + 1 :]), sum(split[each:])) for each in range(self.ranks)]
        owned = [self._owned(facts, *span) for span in spans]
        self._own = owned[rank]
        #: Each stage has a cache that counts positions.
        self.counting = all(any(counts_positions(self._empty[number]) for number in each) for each in owned)
        self._check(facts)
        self._stand_ins = [self._stand_in(number) for number in range(len(self._empty))]
        self._shape, self.dtype = facts[0].hidden.shape[2:], facts[0].hidden.dtype
        self.hidden = prod(self._shape)  # numbers of a token, of all its streams
        self._cut(model, facts)
        self.layers = tuple(at for at, layer in enumerate(model.layers) if tree_flatten(layer.parameters()))

    def caches(self) -> list[Any]:
        return deepcopy([self._empty[number] for number in self._own])

    def all_caches(self) -> list[Any]:
        return deepcopy(self._empty)

    def _owned(self, facts: Sequence[LayerTrace], first: int, end: int) -> list[int]:
        layers = [set(layer.caches) for layer in facts]
        own = set().union(*layers[first:end])
        return sorted(own if first else own | set(range(len(self._empty))).difference(*layers))

    def _check(self, facts: Sequence[LayerTrace]) -> None:
        joined, keepers = border_rules(facts, self._empty)
        if self.first in joined:
            why = f"layer {self.first} reads more of those before it than hidden states; give one rank both"
            raise ModelError(why, Code.MODEL_UNSUPPORTED)
        if keepers and not set(keepers).intersection(range(self.first, self.end)):
            raise ModelError(
                f"layers {self.first} to {self.end - 1} have no cache that counts positions, and this model "
                "needs one on each rank; give their rank more layers",
                Code.MODEL_UNSUPPORTED,
            )

    def _cut(self, model: Any, facts: Sequence[LayerTrace]) -> None:
        for at, layer in enumerate(model.layers):
            if self.first <= at < self.end:
                change(layer, self._own_layer(type(layer), at))
            else:
                _empty_out(layer)
                change(layer, _pass_on(facts[at].extras))
        heads = [module for path, module in model.named_modules() if path.rpartition(".")[2] in HEADS]
        for module in [] if self.chooses else heads:
            _empty_out(module)
        for module in [] if self.embeds or (self.chooses and not heads) else embeddings_of(model):
            width = module(mx.zeros((1, 1), dtype=mx.int32)).shape[-1]
            _empty_out(module)
            change(module, _zeros(width, self.dtype))
        change(model, self._own_model(type(model)), make_cache=lambda _: self.caches())

    def _own_model(self, kind: type) -> Callable[..., Any]:
        def forward(model: Any, tokens: mx.array, cache: list[Any] | None = None) -> Any:
            if cache is not None:  # a model makes its masks from the caches of certain layers
                places = enumerate(self._stand_ins)
                cache = [reduce(getitem, place, cache) if place else self._empty[at] for at, place in places]
            try:
                return kind.__call__(model, tokens, cache=cache)
            except _Reached as reached:
                return reached.args[0]

        return forward

    def _own_layer(self, kind: type, at: int) -> Callable[..., Any]:
        def layer(module: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            if at == self.first and self.given is not None:
                x = self.given.reshape(*self.given.shape[:2], *self._shape)
            out = kind.__call__(module, x, *args, **kwargs)
            if at == self.end - 1 and not self.chooses:
                raise _Reached(_hidden(out).flatten(2))
            return out

        return layer

    def _stand_in(self, number: int) -> tuple[int, ...]:
        """Return the place among this stage's caches, or within one of several, for a cache of the model."""
        if number in self._own:
            return (self._own.index(number),)
        wanted, own = self._empty[number], [self._empty[other] for other in self._own]
        every: list[tuple[tuple[int, ...], Any]] = [((place,), cache) for place, cache in enumerate(own)]
        every += [
            ((place, at), part)
            for place, cache in enumerate(own)
            for at, part in enumerate(getattr(cache, "caches", ()))
        ]
        same = [place for place, cache in every if _kind(cache) == _kind(wanted)]
        alike = [place for place, cache in every if _counts(cache) and _counts(wanted)]
        return next(iter([*same, *alike]), ())


_uncut = partial(ModelError, code=Code.MODEL_UNSUPPORTED)


class _ForwardTrace:
    """Forward that is traced and never computed; zeros replace layers' results to show what uses them."""

    ROWS = (3, 1)  # of tokens

    def __init__(self, caches: list[Any]) -> None:
        self.caches = caches
        self.facts: dict[int, LayerTrace] = {}
        self.untold: set[int] = set()  # layers with a further result that is None
        self._marks: dict[str, mx.array] = {}  # the zeros, by "layer:number"; the embedding's layer is -1

    def mark(self, like: mx.array, at: int) -> mx.array:
        zeros = mx.zeros(like.shape, dtype=like.dtype)
        mx.eval(zeros)
        # Keep another object, because a model may change this one in place.
        self._marks[f"{at}:{len(self._marks)}"] = zeros.reshape(zeros.shape)
        return zeros

    def graph(self, values: Any) -> str:
        text = io.StringIO()
        arrays = [mx.stop_gradient(part) for part in _parts(values) if isinstance(part, mx.array)]
        mx.export_to_dot(text, *arrays, **self._marks)
        return text.getvalue()

    def sources(self, values: Any) -> set[int]:
        return {int(at) for at in re.findall(r'"(-?\d+):\d+" ->', self.graph(values))}

    def embedding(self, kind: type) -> Callable[..., mx.array]:
        return lambda module, *args, **kwargs: self.mark(kind.__call__(module, *args, **kwargs), -1)

    def layer(self, kind: type, at: int) -> Callable[..., Any]:
        def layer(module: Any, x: mx.array | None = None, *args: Any, **kwargs: Any) -> Any:
            if at in self.facts or x is None:
                raise _uncut(f"layer {at} {'is given its input by name' if x is None else 'runs twice'}")
            out = kind.__call__(module, self.mark(x, at) if at else x, *args, **kwargs)
            hidden = self._note(at, x, [*args, *kwargs.values()], out)
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

        return layer

    def _note(self, at: int, x: mx.array, given: list[Any], out: Any) -> mx.array:
        parts, hidden = list(_parts(given)), _hidden(out)
        arrays = [part for part in parts if isinstance(part, mx.array) and part.dtype != mx.bool_]
        numbers = {at for at, cache in enumerate(self.caches) if any(cache is part for part in parts)}
        sharing = {other for other, fact in self.facts.items() if numbers.intersection(fact.caches)}
        needs = self.sources(out) | sharing
        if at and (self.sources(x) != {at - 1} or self.graph(x).count("rectangle") > 1):
            needs |= self.sources(x)  # the input is not just the previous layer's result
        if at - 1 in self.untold and any(part is None for part in parts):
            needs.add(at - 1)  # numbers after more tokens, perhaps
        if isinstance(out, tuple) and any(part is None for part in _parts(list(out[1:]))):
            self.untold.add(at)
        like = next(iter(self.facts.values())).hidden if self.facts else hidden
        if hidden.shape != (*self.ROWS, *like.shape[2:]) or hidden.dtype != like.dtype or hidden.ndim > 4:
            raise _uncut(f"layer {at} returns other hidden states than a row of numbers for each token")
        if max(needs, default=at) > at:
            raise _uncut(f"layer {at} runs after layer {max(needs)}")
        self.facts[at] = LayerTrace(
            caches=tuple(sorted(numbers)),
            needs=tuple(sorted({max(other, 0) for other in needs} - {at})),
            extras=len(out) - 1 if isinstance(out, tuple) else None,
            counted=any(type(value) is int for value in given) or not all(map(self.sources, arrays)),
            hidden=self.mark(hidden, at),
        )
        return self.facts[at].hidden


def trace_layers(model: Any, empty: Sequence[Any]) -> list[LayerTrace]:
    """Trace each layer. Raises ModelError (MODEL_UNSUPPORTED) that says why the model cannot be cut."""
    layers = list(model.layers)
    trace, logits = _traced(model, deepcopy(list(empty)))
    picked = max([getattr(part, "index_topk", 0) for part in model.modules()])
    if trace.untold and picked:  # layers pick tokens, and tell the next which, once there are more of them
        trace, logits = _traced(model, _filled(model, empty, picked + 1))
    if len(trace.facts) < len(layers):
        raise _uncut("not all of its layers are called")
    *others, last = [trace.facts[at] for at in range(len(layers))]
    needs = {*last.needs, *(max(at, 0) for at in trace.sources(logits))} - {len(others)}
    found = [*others, replace(last, needs=tuple(sorted(needs)))]
    if 0 < len(others) == len(border_rules(found, empty)[0]):
        raise _uncut("each layer reads more of those before it than hidden states")
    if any(layer.counted for layer in found) and not any(map(counts_positions, empty)):
        raise _uncut("its layers are given positions, which none of its caches counts")
    return found


def _filled(model: Any, empty: Sequence[Any], tokens: int) -> list[Any]:
    """Return caches of so many tokens, without their numbers."""
    caches = deepcopy(list(empty))
    with uncounted():
        model(mx.zeros((_ForwardTrace.ROWS[0], tokens), dtype=mx.int32), cache=caches)
    for cache in [part for each in caches for part in getattr(each, "caches", (each,))]:
        vars(cache).update(tree_map(_hollow, vars(cache)))
    return caches


def _hollow(value: Any) -> Any:
    return mx.zeros(value.shape, dtype=value.dtype) if isinstance(value, mx.array) else value


def _traced(model: Any, caches: list[Any]) -> tuple[_ForwardTrace, mx.array]:
    layers, embeddings, trace = list(model.layers), embeddings_of(model), _ForwardTrace(caches)
    kinds = [(module, type(module)) for module in [*embeddings, *layers]]
    try:
        for module in embeddings:
            change(module, trace.embedding(type(module)))
        for at, layer in enumerate(layers):
            change(layer, trace.layer(type(layer), at))
        with uncounted():
            logits = model(mx.zeros(trace.ROWS, dtype=mx.int32), cache=trace.caches)
    finally:
        for module, kind in reversed(kinds):
            module.__class__ = kind
    return trace, logits


def border_rules(
    facts: Sequence[LayerTrace], caches: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers to keep with the one before, and the layers of which each rank needs at least one."""
    spans = [range(min(layer.needs) + 1, at + 1) for at, layer in enumerate(facts) if layer.needs]
    counted = any(layer.counted for layer in facts)
    keepers = [
        at
        for at, layer in enumerate(facts)
        if any(counts_positions(caches[number]) or not counted for number in layer.caches)
    ]
    joined = sorted({at for span in spans for at in span})
    return tuple(joined), () if len(keepers) == len(facts) else tuple(keepers)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


def _hidden(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _kind(cache: Any) -> tuple[Any, ...]:
    inside = tuple(_kind(each) for each in getattr(cache, "caches", ()))
    return type(cache), getattr(cache, "max_size", 0), getattr(cache, "chunk_size", 0), inside


def counts_positions(cache: Any) -> bool:
    return any(map(_counts, getattr(cache, "caches", (cache,))))


def _counts(cache: Any) -> bool:
    return hasattr(cache, "offset") and hasattr(cache, "make_mask")


def embeddings_of(model: Any) -> list[Any]:
    modules, layers = dict(model.named_modules()), {id(layer) for layer in model.layers}

    def whole(path: str) -> Any:
        ends = [at for at, char in enumerate(f"{path}.") if char == "."]
        around = [modules[path[:end]] for end in ends if path[:end] in modules]
        return next(module for module in around if layers.isdisjoint(map(id, module.modules())))

    return [whole(path) for path in modules if path.rpartition(".")[2] in EMBEDDINGS]


def _zeros(width: int, dtype: mx.Dtype) -> Callable[..., mx.array]:
    return lambda _module, tokens, **_: mx.zeros((*tokens.shape, width), dtype=dtype)


def _empty_out(module: Any) -> None:
    """Delete a module's arrays, but keep flags and submodules: a model may read them."""
    for part in module.modules():
        for name in [name for name, value in part.items() if isinstance(value, mx.array)]:
            del part[name]


def _pass_on(extras: int | None) -> Callable[..., Any]:
    def passed(_module: Any, x: mx.array, *_args: Any, **_kwargs: Any) -> Any:
        return x if extras is None else (x, *[None] * extras)

    return passed


class StageVocabulary(Vocabulary):
    """The parts of `whole` that a stage has. `beside`: an MTP head's embedding, if the stage has none."""

    def __init__(self, whole: Vocabulary, stage: Stage, beside: ShardedEmbedding | None = None) -> None:
        embedding = whole.embedding if stage.embeds else beside
        super().__init__(whole.size, whole.group, embedding, whole.head if stage.chooses else None)
        self.stage = stage
        self.chooses = stage.chooses

    def forward(
        self,
        model: Any,
        tokens: mx.array,
        cache: list[Any],
        *,
        given: mx.array | None = None,
        ends: mx.array | None = None,
    ) -> mx.array:
        entrance = self.stage if self.chooses or self.embedding is None else self.embedding
        entrance.given = given
        try:
            if self.chooses:
                return super().forward(model, tokens, cache, ends=ends)
            return cast("mx.array", model(tokens, cache=cache))
        finally:
            entrance.given = None


def nothing_chosen(rows: int, width: int, after: list[mx.array]) -> mx.array:
    """Return zeros in place of tokens, int32 [rows, width], that are ready once `after` is computed."""
    return cast("mx.array", mx.depends([mx.zeros((rows, width), dtype=mx.int32)], after)[0])


def whole_vocabulary(model: Any, size: int = 0) -> Vocabulary:
    """Return the whole model's vocabulary. Raises ModelError if it has no known embedding."""
    whole = shard(model, LoneGroup(), size=size)
    if whole.embedding is None:
        raise ModelError(f"{model.model_type}: no embedding was found", Code.MODEL_UNSUPPORTED)
    return whole


def cut_into_stage(
    model: Any, group: Group, split: Sequence[int], size: int, *, embeds: bool = False
) -> StageVocabulary:
    """Cut a model to the layers of this rank, without evaluation. `size` and errors: see `shard`."""
    check_split(split, group.size, len(model.layers))
    whole, beside = whole_vocabulary(model, size), None
    if embeds:
        # This rank needs an embedding, too: a copy, unless the output head is the same module.
        beside = whole.embedding if whole.head is whole.embedding else deepcopy(whole.embedding)
    return StageVocabulary(whole, Stage(model, group.rank, split), beside)


# --- borders: one message for each forward, from the rank above and to the rank below ---------------------

#: Tokens of a message of hidden states, on links whose messages must all have the same shape.
UNIT_TOKENS = 16
LAST = 1 << 62  # above the number of any forward

_MASK = 0xFFFFFFFF
_WORDS = {2: mx.uint16, 4: mx.uint32}  # bits of a number, by its bytes


@dataclass(frozen=True, slots=True)
class HiddenStates:
    given: mx.array | None = None  # [rows, width, hidden]
    number: mx.array | None = None  # the sender's forward, uint32 [1]; known when all pieces have arrived
    pieces: Sequence[mx.array] = ()  # receives of both, in this order

    def post_receives(self) -> None:
        for piece in self.pieces:
            mx.async_eval(piece)
        if self.number is not None:
            mx.async_eval(self.number)

    def wait(self, forward: int) -> None:
        """Wait for arrival. Raises GroupError (DESYNC) if the sender's forward is another one."""
        if self.number is not None and (sent := self.number.item()) != forward & _MASK:
            raise GroupError(
                f"the stage before sent the hidden states of forward {sent}, not {forward}", Code.DESYNC
            )


class StageTimes:
    def __init__(self) -> None:
        self.busy_s = self.waiting_s = 0.0
        self._ended = 0.0  # when the newest forward ended
        self._blocked_s = 0.0  # since then
        self._prompts: tuple[int, ...] = ()  # uids of prompts in prefill
        self._running = 0  # forwards that were submitted and have not ended

    def began(self, frame: Forward, now: float, *, idle: bool) -> None:
        goes_on = not frame.prompts or frame.rows == self._prompts
        self._prompts = frame.rows if frame.unfinished else ()
        if idle and goes_on:
            self.waiting_s += now - self._ended
        if idle:
            self._ended = now  # the time before is already counted

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        since = time.monotonic()
        try:
            yield
        finally:
            self._blocked_s += time.monotonic() - since

    def tokens_came(self, now: float) -> None:
        if not self._running:
            self._blocked_s += now - self._ended

    def submitted(self) -> None:
        self._running += 1

    def ended(self, took_s: float, now: float) -> None:
        self._running -= 1
        self.waiting_s += self._blocked_s
        self.busy_s += max(took_s - self._blocked_s, 0.0)
        self._blocked_s, self._ended = 0.0, now


def padded(tokens: Sequence[int], widths: Sequence[int], width: int) -> mx.array:
    """Return the tokens of rows of these widths, int32 [rows, width], padded with zeros."""
    each = iter(tokens)
    table = [[*islice(each, count), *[0] * (width - count)] for count in widths]
    return mx.array(table, dtype=mx.int32)


class LateTokens:
    """Input tokens of a pipeline's rows. In queued steps, zeros stand for unknown tokens until `supply`."""

    def __init__(self) -> None:
        self.needs = 0  #: forward that chooses input tokens of the next one to submit; 0 if all are known
        self._newest = 0  # the newest forward whose tokens are known
        self._last: dict[int, int] = {}  # last known token by uid
        #: Forwards whose tokens are not known yet: number, rows, and how many tokens each row gets.
        self._choosing: deque[tuple[int, tuple[int, ...], tuple[int, ...]]] = deque()
        #: Steps that lack input tokens: number, the forward that chooses them, rows without one, all inputs.
        self._open: deque[tuple[int, int, list[tuple[int, int]], mx.array]] = deque()

    def feed(self, frame: Forward, width: int, forward: int) -> tuple[mx.array, mx.array | None]:
        widths = frame.widths or (0,) * len(frame.rows)
        tokens = padded(frame.tokens, widths, width)
        rows = zip(frame.rows, widths, strict=True)
        inside = [(row, uid) for row, (uid, count) in enumerate(rows) if not count]
        uids = {uid for _, uid in inside}
        self.needs = max([number for number, rows, _ in self._choosing if uids.intersection(rows)], default=0)
        if inside:
            self._open.append((forward, self.needs, inside, tokens))
            self._fill()
        return tokens, None

    def chose(self, chosen: Chosen, _embeddings: object) -> None:
        self._choosing.append((chosen.forward, chosen.rows, chosen.widths))

    def joined(self, chosen: Chosen, _embeddings: object) -> None:
        self._last.update(dict.fromkeys(chosen.rows, 0))
        self.chose(chosen, None)

    def supply(self, forward: int, tokens: tuple[int, ...]) -> None:
        """Take a forward's tokens, in row order. Raises GroupError (DESYNC) if another forward is next."""
        number, rows, widths = self._choosing.popleft() if self._choosing else (0, (), ())
        if number != forward or sum(widths) != len(tokens):
            raise GroupError(
                f"{len(tokens)} tokens of forward {forward}, but {sum(widths)} of forward {number} are next",
                Code.DESYNC,
            )
        for uid, end in zip(rows, accumulate(widths), strict=True):
            if uid in self._last:
                self._last[uid] = tokens[end - 1]
        self._newest = forward
        self._fill()

    def known(self, forward: int = LAST) -> bool:
        return not self._open or self._open[0][0] > forward

    def left(self, uid: int, _order: list[int]) -> None:
        del self._last[uid]

    def _fill(self) -> None:
        while self._open and self._open[0][1] <= self._newest:
            _, _, inside, tokens = self._open.popleft()
            view = memoryview(tokens)  # type: ignore[arg-type]  # of memory that no forward has read yet
            for row, uid in inside:
                view[row, 0] = self._last[uid]


@dataclass(frozen=True, slots=True)
class _HeldForward:
    forward: int
    needs: int  # as in LateTokens
    after: HiddenStates
    arrays: tuple[Any, ...]
    handed_on: tuple[mx.array, ...]  # hidden states and the messages that send them; none on rank 0


class Border:
    """Messages of hidden states to and from `stage`; none if ranks share each layer instead.

    All ranks queue messages in the order of forwards, so no two ranks wait for each other. macOS ends GPU
    work that waits for some seconds, so a forward is submitted once its tokens and hidden states are here.
    Rank 0 can send other frames while it holds a forward for hidden states; other ranks hold it for tokens.
    Raises GroupError (DESYNC) if hidden states are another forward's.
    """

    def __init__(self, stage: Stage | None, group: Group) -> None:
        self.stage = stage
        self._group = group
        self._chooses = stage is not None and stage.chooses
        self._held: deque[_HeldForward] = deque()
        self._handing_on: tuple[mx.array, ...] = ()  # by the forward that is being queued
        self._handed_on: tuple[mx.array, ...] = ()  # by the newest submitted forward
        self._receiving = 0  # the newest forward with posted receives
        self.tokens = LateTokens()
        self.times = StageTimes()
        self.queued_s = 0.0  #: seconds that MLX took to queue the newest forward; 0 in a pipeline

    def expect(self, rows: int, width: int) -> HiddenStates:
        stage = self.stage
        if stage is None or stage.embeds:
            return HiddenStates()
        assert isinstance(self._group, RingGroup)
        bits = _WORDS[stage.dtype.size]
        size = rows * width * stage.hidden
        pieces = self._group.receive_row(
            size + 4 // bits.size, bits, stage.rank + 1, UNIT_TOKENS * stage.hidden
        )
        with mx.stream(self._group.messages):  # not in the queue of forwards
            message = mx.concatenate(pieces) if len(pieces) > 1 else pieces[0]
            number = message[size : size + 4 // bits.size].view(mx.uint32)
        hidden = message[:size].view(stage.dtype).reshape(rows, width, stage.hidden)
        return HiddenStates(hidden, number, pieces)

    def hand_on(self, hidden: mx.array, forward: int) -> mx.array:
        stage = self.stage
        assert stage is not None
        assert isinstance(self._group, RingGroup)
        bits = _WORDS[stage.dtype.size]
        parts = [hidden.view(bits).reshape(-1), mx.array([forward & _MASK], dtype=mx.uint32).view(bits)]
        pieces = self._group.send_row(mx.concatenate(parts), stage.rank - 1, UNIT_TOKENS * stage.hidden)
        self._handing_on = (hidden, *pieces)
        return pieces[-1]

    def submit(self, forward: int, after: HiddenStates, *arrays: Any, told: Any = ()) -> None:
        """Compute `arrays`. `told`: what rank 0 alone needs.

        MLX orders a graph by all arrays that it is asked for: with rank 0's own among them, its collectives
        have been in another order than on other ranks.
        """
        if self.stage is None:
            began = time.monotonic()
            mx.async_eval(*arrays)
            if told:
                mx.async_eval(told)
            self.queued_s = time.monotonic() - began
            return
        # Copy the handles, because a later forward may assign to them.
        self._held.append(
            _HeldForward(forward, self.tokens.needs, after, deepcopy((*arrays, told)), self._handing_on)
        )
        self.tokens.needs, self._handing_on = 0, ()
        self._go_on()

    def supply(self, forward: int, tokens: tuple[int, ...]) -> None:
        """Take a forward's tokens (none if it ended no prompt), and submit forwards that waited for them."""
        if tokens:
            self.tokens.supply(forward, tokens)
        if self.stage is None:
            return
        is_lane = bool(self._held) and 0 < self._held[0].needs < forward  # not a chunk of a prompt
        if not self._chooses and self._is_known():
            self.times.tokens_came(time.monotonic())
        self._go_on()
        if self._chooses and is_lane:  # the next forward of another lane
            self.flush(self._held[0].forward)

    def make_way(self) -> None:
        while self.stage is not None and len(self._held) >= self.stage.ranks - 1:
            self.flush(self._held[0].forward)

    def flush(self, forward: int = LAST) -> None:
        """Submit held forwards up to `forward`, and wait for earlier stages."""
        while self._held and self._held[0].forward <= forward:
            held = self._held.popleft()
            self.times.submitted()
            if held.after.number is not None:
                if not self._chooses:
                    held.after.post_receives()
                    mx.eval(self._handed_on[:1])  # finish the forward before; its compute time is not waiting
                with self.times.blocked():
                    held.after.wait(held.forward)
            self._handed_on = held.handed_on
            for piece in held.handed_on:  # in this order
                mx.async_eval(piece)
            mx.async_eval(*held.arrays)

    def _go_on(self) -> None:
        if not self._chooses:
            while self._is_known():
                self.flush(self._held[0].forward)
            return
        for held in self._held:  # post only these receives: on submitting more, MLX may wait for them
            if held.forward > self._receiving and self.tokens.known(held.forward):
                held.after.post_receives()
                self._receiving = held.forward

    def _is_known(self) -> bool:
        return bool(self._held) and self.tokens.known(self._held[0].forward)
