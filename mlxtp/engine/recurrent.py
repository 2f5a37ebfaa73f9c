"""Recurrent states of gated-delta layers, as in Qwen3-Next and Qwen3.5, and the way back behind wrong drafts.

A state is of all tokens so far, and cannot be cut. So a step of several tokens leaves it as it was before
them, and keeps the inputs of the recurrence: a hundredth of a state for each token. The next step first feeds
as many of them as were right, without the layers' other parts, and then its own. Nothing is copied, and no
rank waits to learn their number: it follows from the position of the next step.

The same code of mlx-lm computes prompts, steps and what is fed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any

import mlx.core as mx

STATE = "ArraysCache"  #: mlx-lm's cache of such a layer
#: mlx-lm's layers whose states are kept here, by their modules. Other modules use the same ones.
_LAYERS = {"qwen3_5": "GatedDeltaNet", "qwen3_next": "Qwen3NextGatedDeltaNet"}


class StateView:
    """View that a layer has of the rows' states during one forward, in place of mlx-lm's `ArraysCache`.

    `kept`: the last inputs of its convolution [rows, inputs, channels], and the state of its recurrence.
    After a step of several tokens, its keys, values and gates come behind, each [rows, tokens, ...].
    The first `stood` of each row, int32 [rows], are fed again. Without these, `stood` is None.
    """

    arrays: Sequence[mx.array] = ()  # that grow with each token
    lengths = left_padding = None

    def __init__(self, kept: list[mx.array], stood: mx.array | None = None) -> None:
        self.kept = list(kept)
        self._stood = stood

    def make_mask(self, _count: int) -> None:
        return None

    def advance(self, _count: int) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        """Return the inputs of the convolution before this step, or this object for `recur`."""
        inputs = self.kept[0]
        if index or self._stood is None:
            return self if index else inputs
        places = self._stood[:, None] + mx.arange(inputs.shape[1] - self.kept[2].shape[1])
        return mx.take_along_axis(inputs, places[..., None], axis=1)

    def __setitem__(self, index: int, value: Any) -> None:
        if not index:
            self.kept[0] = value

    def recur(self, update: Callable[..., Any], queries: mx.array, *fed: mx.array) -> Any:
        """Call mlx-lm's `gated_delta_update` with the state, and return its results."""
        inputs, (*tokens, rate, bias) = self.kept[0], fed
        state = self.settled(update, rate, bias)
        found, after = update(queries, *fed, state)
        self.kept = [inputs, after] if queries.shape[1] == 1 else [inputs, state, *tokens]
        return found, self

    def settled(self, update: Callable[..., Any], rate: mx.array, bias: mx.array) -> mx.array:
        """Return the state of what stood."""
        _, state, *tokens = self.kept
        if self._stood is not None:
            stands = mx.arange(tokens[0].shape[1]) < self._stood[:, None]
            _, state = update(tokens[0], *tokens, rate, bias, state, stands)
        return state


@dataclass(slots=True)
class States:
    """States of the rows of a bucket.

    `kept`: those of each layer, as in `StateView`. `held`: the tokens of each row that the states hold.
    `waiting`: how many more were fed to each row, of which only some may stand.
    """

    kept: list[list[mx.array]]
    held: list[int]
    waiting: int = 0

    @property
    def arrays(self) -> list[mx.array]:
        return [array for layer in self.kept for array in layer]

    def stood(self, lengths: Iterable[int]) -> list[mx.array]:
        """Return how many of the tokens that wait stand for rows of these lengths; nothing if none wait."""
        if not self.waiting:
            return []
        pairs = zip(lengths, self.held, strict=True)
        return [mx.array([length - held for length, held in pairs], dtype=mx.int32)]

    def fed(self, lengths: Sequence[int], width: int, kept: list[list[mx.array]]) -> None:
        """Take the states of a step of `width` tokens behind these lengths."""
        self.kept, self.waiting = kept, width if width > 1 else 0
        self.held = [length + (width == 1) for length in lengths]

    def rows(self, rows: Sequence[int]) -> States:
        """Return the states of some rows."""
        chosen = mx.array(list(rows))
        kept = [[array[chosen] for array in layer] for layer in self.kept]
        return States(kept, [self.held[row] for row in rows], self.waiting)

    def beside(self, other: States) -> States:
        """Return the states of these rows and of others behind them."""
        waiting = max(self.waiting, other.waiting)
        layers = zip(self._padded(other, waiting), other._padded(self, waiting), strict=True)
        kept = [[mx.concatenate(list(both)) for both in zip(*each, strict=True)] for each in layers]
        return States(kept, self.held + other.held, waiting)

    def _padded(self, like: States, waiting: int) -> list[list[mx.array]]:
        """Return the states with room for `waiting` tokens of which more than there are never stand."""
        more = waiting - self.waiting
        if not more:
            return self.kept
        found = []
        for (inputs, state, *tokens), (_, _, *others) in zip(self.kept, like.kept, strict=True):
            none = [mx.zeros((len(self.held), 0, *other.shape[2:]), other.dtype) for other in others]
            longer = [
                mx.pad(array, [(0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)])
                for array in (inputs, *(tokens or none))
            ]
            found.append([longer[0], state, *longer[1:]])
        return found

    def caches(self, length: int, layers: Sequence[Any]) -> list[Any]:
        """Return mlx-lm's caches of the only row here, which has `length` tokens, for these layers."""
        from mlx_lm.models.cache import ArraysCache
        from mlx_lm.models.gated_delta import gated_delta_update

        stood = next(iter(self.stood([length])), None)
        caches = []
        for kept, layer in zip(self.kept, layers, strict=True):
            view, found = StateView(kept, stood), ArraysCache(2)
            found.cache = [view[0], view.settled(gated_delta_update, layer.A_log, layer.dt_bias)]
            caches.append(found)
        return caches


def states_of(caches: Sequence[Any], length: int) -> States:
    """Return the states of one sequence of `length` tokens from mlx-lm's caches."""
    return States([list(cache.cache) for cache in caches], [length])


def recurrent_layers(model: Any, states: int) -> list[Any]:
    """Return the layers of a model of so many recurrent ones whose states are kept here; none if not all are.

    mlx-lm's code of such layers takes a `StateView` from then on. A stage has other stages' layers, too.
    """
    parts = [getattr(layer, "linear_attn", None) for layer in model.layers] if states else []
    found = [part for part in parts if part is not None and isinstance(part, _taught())]
    return found if len(found) == states else []


@cache
def _taught() -> tuple[type, ...]:
    """Have mlx-lm's layers take a `StateView`; returns their classes."""
    kinds = []
    for name, kind in _LAYERS.items():
        module = import_module(f"mlx_lm.models.{name}")
        module.gated_delta_update = _taking_views(module.gated_delta_update)  # type: ignore[attr-defined]
        kinds.append(getattr(module, kind))
        kinds[-1].__call__ = _keeping_inputs(kinds[-1].__call__)
    return tuple(kinds)


def _taking_views(update: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(update)
    def taking(q: mx.array, *fed: Any, **how: Any) -> Any:
        *arrays, state, _ = fed
        if isinstance(state, StateView):
            return state.recur(partial(update, **how), q, *arrays)
        return update(q, *fed, **how)

    return taking


def _keeping_inputs(call: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a layer's call that leaves all inputs of its convolution in a StateView, not just the last."""

    @wraps(call)
    def keeping(layer: Any, inputs: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        more = inputs.shape[1] if isinstance(cache, StateView) and inputs.shape[1] > 1 else 0
        layer.conv_kernel_size += more  # which only says how many are kept
        try:
            return call(layer, inputs, mask, cache)
        finally:
            layer.conv_kernel_size -= more

    return keeping
