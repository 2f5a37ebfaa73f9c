"""Recurrent layers, as in Qwen3.5, Nemotron-H or LFM2, and how they undo rejected drafts.

A recurrent state cannot be truncated. A step of several tokens therefore leaves it unchanged and keeps the
recurrence's inputs; the next step first replays the accepted ones. Convolutions keep all their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce, wraps
from inspect import signature
from sys import modules
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

STATE = "ArraysCache"  #: mlx-lm's cache of such a layer


def _attributes(*names: str) -> Callable[[Any], dict[str, Any]]:
    return lambda layer: {name: getattr(layer, name) for name in names}


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Kind of recurrent layer, by names in mlx-lm's code. Its cache: convolution inputs, then a state."""

    inputs: tuple[str, ...] = ("conv_kernel_size",)  # attributes with the kernel size: kept inputs plus one
    update: str = ""  # module function or method that computes the recurrence; "" for convolutions alone
    taken: tuple[str, ...] = ()  # its arguments per token, [rows, tokens, ...], that change the state
    read: tuple[tuple[str, str], ...] = ()  # its other arguments per token, each with a `taken` of its shape
    constants: Callable[[Any], dict[str, Any]] = lambda _: {}  # its arguments that depend only on the layer
    together: bool = False  # it takes several tokens and a mask, and gives the same bits as one by one
    padded: bool = True  # mlx-lm's code knows rows that are shorter than the others

    @property
    def size(self) -> int:
        return len(self.inputs) + bool(self.update)

    def run(self, update: Callable[..., Any], given: dict[str, Any], stands: mx.array | None = None) -> Any:
        """Return results and state of `update`. Only tokens in `stands`, bool [rows, tokens], change it."""
        if self.together:
            return update(**{**given, "mask": stands})
        count = given[self.taken[0]].shape[1]
        if count == 1 and stands is None:
            return update(**given)
        results, state = [], given["state"]
        each = [*self.taken, *[name for name, _ in self.read]]
        for at in range(count):
            own = {name: given[name][:, at : at + 1] for name in each}
            found, after = update(**{**given, **own, "state": state})
            if stands is not None:
                after = mx.where(stands[:, at].reshape(-1, *[1] * (after.ndim - 1)), after, state)
            results.append(found)
            state = after
        return mx.concatenate(results, axis=1), state


_DELTAS = Recurrence(
    update="gated_delta_update",
    taken=("k", "v", "a", "b"),
    read=(("q", "k"),),
    constants=_attributes("A_log", "dt_bias"),
    together=True,
)
_MAMBA = Recurrence(
    update="ssm_update",
    taken=("hidden_states", "B", "dt"),
    read=(("C", "B"),),
    constants=_attributes("A_log", "D", "dt_bias", "time_step_limit"),
)
_SHORT = Recurrence(inputs=("L_cache",))
_KIMI = replace(
    _DELTAS,
    inputs=("q_conv.kernel_size", "k_conv.kernel_size", "v_conv.kernel_size"),
    constants=lambda layer: {
        "A_log": layer.A_log.reshape(-1, 1),
        "dt_bias": layer.dt_bias.reshape(-1, layer.head_dim),
        "lower_bound": getattr(layer, "lower_bound", None),
    },
)
#: By module and class. Mamba 2 is recognized by its `time_step_limit`. Other families subclass these layers.
_KINDS: Mapping[str, Recurrence] = {
    "bailing_moe_v3.BailingKDA": replace(_KIMI, inputs=("conv_kernel_size",) * 3),
    "jamba.JambaMambaMixer": Recurrence(
        update="ssm_step",
        taken=("x",),
        constants=lambda layer: {"self": layer, "A": -mx.exp(layer.A_log)},
        padded=False,
    ),
    "kimi_linear.KimiDeltaAttention": _KIMI,
    "lfm2.ShortConv": _SHORT,
    "lfm2_moe.ShortConv": _SHORT,
    "olmo_hybrid.GatedDeltaNet": replace(
        _DELTAS,
        inputs=("conv_kernel_size",) * 3,
        constants=_attributes("A_log", "dt_bias", "allow_neg_eigval"),
        padded=False,
    ),
    "qwen3_5.GatedDeltaNet": _DELTAS,
    "qwen3_next.Qwen3NextGatedDeltaNet": _DELTAS,
}


class StateView:
    """A layer's view of the rows' states during one forward, in place of mlx-lm's `ArraysCache`.

    `kept`: the last inputs of each convolution [rows, inputs, channels] and the recurrent state; after a step
    of several tokens, also its arguments [rows, tokens, ...]. The first `stood` of them in each row, int32
    [rows], are replayed; `stands`, bool [rows, tokens], marks the same.
    """

    lengths = left_padding = None

    def __init__(
        self,
        kind: Recurrence,
        kept: list[mx.array],
        stood: mx.array | None = None,
        stands: mx.array | None = None,
    ) -> None:
        self.kept = list(kept)
        self._kind, self._convolutions = kind, len(kind.inputs)
        self._stood, self._stands = stood, stands

    def make_mask(self, _count: int) -> None:
        return None

    def advance(self, _count: int) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(self._kind.size))

    def __getitem__(self, index: int) -> Any:
        if index == self._convolutions:
            return self
        inputs = self.kept[index]
        if self._stood is None or self._stands is None:
            return inputs
        places = self._stood[:, None] + mx.arange(inputs.shape[1] - self._stands.shape[1])
        return mx.take_along_axis(inputs, places[..., None], axis=1)

    def __setitem__(self, index: int, value: Any) -> None:
        if index < self._convolutions:
            self.kept[index] = value

    def recur(self, update: Callable[..., Any], given: dict[str, Any]) -> Any:
        state = self.settled(update, given)
        found, after = self._kind.run(update, {**given, "state": state})
        tokens = [given[name] for name in self._kind.taken]
        now = [after] if tokens[0].shape[1] == 1 else [state, *tokens]
        self.kept = [*self.kept[: self._convolutions], *now]
        return found, self

    def settled(self, update: Callable[..., Any], given: dict[str, Any]) -> mx.array:
        state, *tokens = self.kept[self._convolutions :]
        if self._stands is None:
            return state
        again = {**given, **dict(zip(self._kind.taken, tokens, strict=True)), "state": state}
        again |= {name: again[like] for name, like in self._kind.read}
        settled: mx.array = self._kind.run(update, again, self._stands)[1]
        return settled

    def arrays_of(self, layer: Any) -> list[mx.array]:
        inputs = [self[at] for at in range(self._convolutions)]
        if not self._kind.update:
            return inputs
        update = getattr(_owner(type(layer), self._kind.update), self._kind.update)
        return [*inputs, self.settled(update, self._kind.constants(layer))]


class JointStateView(StateView):
    """View of several buckets' states in one forward. Recurrences run bucket by bucket and copy no state."""

    def __init__(self, kind: Recurrence, views: Sequence[StateView], ends: Sequence[int]) -> None:
        super().__init__(kind, [])
        self._views = views
        self._ends = list(ends)  # as in `JointView`

    def __getitem__(self, index: int) -> Any:
        if index == self._convolutions:
            return self
        return mx.concatenate([view[index] for view in self._views])

    def __setitem__(self, index: int, value: Any) -> None:
        if index < self._convolutions:
            for view, own in zip(self._views, mx.split(value, self._ends), strict=True):
                view[index] = own

    def recur(self, update: Callable[..., Any], given: dict[str, Any]) -> Any:
        names = [*self._kind.taken, *[name for name, _ in self._kind.read]]
        each = zip(*[mx.split(given[name], self._ends) for name in names], strict=True)
        found = [
            view.recur(update, {**given, **dict(zip(names, own, strict=True))})[0]
            for view, own in zip(self._views, each, strict=True)
        ]
        return mx.concatenate(found), self


def views_of(
    kind: Recurrence | None, kept: list[list[mx.array]], stood: Sequence[mx.array] = ()
) -> list[StateView]:
    return [] if kind is None else [StateView(kind, layer, *stood) for layer in kept]


@dataclass(slots=True)
class States:
    """States of the rows of a bucket."""

    kind: Recurrence
    kept: list[list[mx.array]]  # for each layer, as in `StateView`
    held: list[int]  # tokens of each row that the states include
    waiting: int = 0  # further tokens that were fed to each row; some may be rejected

    @property
    def arrays(self) -> list[mx.array]:
        return [array for layer in self.kept for array in layer]

    def stood(self, lengths: Iterable[int]) -> list[mx.array]:
        """Return how many waiting tokens of each row are accepted, and a mask of them; [] if none wait."""
        if not self.waiting:
            return []
        pairs = zip(lengths, self.held, strict=True)
        stood = mx.array([length - held for length, held in pairs], dtype=mx.int32)
        return [stood, mx.arange(self.waiting) < stood[:, None]]

    def fed(self, lengths: Sequence[int], width: int, kept: list[list[mx.array]]) -> None:
        self.kept, self.waiting = kept, width if width > 1 else 0
        self.held = [length + (width == 1) for length in lengths]

    def rows(self, rows: Sequence[int]) -> States:
        chosen = mx.array(list(rows))
        kept = [[array[chosen] for array in layer] for layer in self.kept]
        return replace(self, kept=kept, held=[self.held[row] for row in rows])

    def beside(self, other: States) -> States:
        waiting = max(self.waiting, other.waiting)
        layers = zip(self._padded(other, waiting), other._padded(self, waiting), strict=True)
        kept = [[mx.concatenate(list(both)) for both in zip(*each, strict=True)] for each in layers]
        return States(self.kind, kept, self.held + other.held, waiting)

    def _padded(self, like: States, waiting: int) -> list[list[mx.array]]:
        more = waiting - self.waiting
        if not more:
            return self.kept

        def longer(array: mx.array) -> mx.array:
            return mx.pad(array, [(0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)])

        found, inputs, size = [], len(self.kind.inputs), self.kind.size
        for layer, others in zip(self.kept, like.kept, strict=True):
            none = [mx.zeros((len(self.held), 0, *other.shape[2:]), other.dtype) for other in others[size:]]
            tokens = layer[size:] or none
            found.append([*map(longer, layer[:inputs]), *layer[inputs:size], *map(longer, tokens)])
        return found

    def fill(self, caches: Sequence[Any], layers: Sequence[Any], length: int) -> None:
        views = views_of(self.kind, self.kept, self.stood([length]))
        for found, layer, view in zip(caches, layers, views, strict=True):
            found.cache = view.arrays_of(layer)


def states_of(kind: Recurrence, caches: Sequence[Any], length: int) -> States:
    return States(kind, [list(cache.cache) for cache in caches], [length])


def recurrent_layers(model: Any, states: int) -> tuple[Recurrence | None, list[Any]]:
    """Make recurrent layers accept a `StateView`. Returns their kind, and the layers that have weights."""
    parts = [part for layer in model.layers if states for part in layer.children().values()]
    known = [(part, *found) for part in parts if (found := _known(part))]
    if not known or len(known) != states:
        return None, []
    for part, layer_class, kind in known:
        own: Any = type(part)
        part.__class__ = _taught(own, layer_class, kind)
    return known[0][2], [part for part, *_ in known if tree_flatten(part.parameters())]


def _known(layer: Any) -> tuple[type, Recurrence] | None:
    bases = [base for base in type(layer).__mro__ if base.__module__.startswith("mlx_lm.models.")]
    if not bases:
        return None
    name = f"{bases[-1].__module__.rpartition('.')[2]}.{bases[-1].__name__}"
    kind = _MAMBA if hasattr(layer, "time_step_limit") else _KINDS.get(name)
    return None if kind is None else (bases[-1], kind)


@cache
def _taught(own: Any, layer_class: Any, kind: Recurrence) -> Any:
    if hasattr(own, "takes_views"):
        return own
    functions: dict[str, Any] = {
        name: each for name, each in vars(layer_class).items() if isinstance(each, FunctionType)
    }
    if kind.update:
        update = _taking_views(getattr(_owner(layer_class, kind.update), kind.update))
        # Only these methods see the replacement of a module function.
        functions = {name: _seeing(each, {kind.update: update}) for name, each in functions.items()}
        if hasattr(layer_class, kind.update):
            functions[kind.update] = update
    functions["__call__"] = _keeping_inputs(functions["__call__"], kind.inputs)
    named = {"__module__": layer_class.__module__, "takes_views": True}
    taught = type(layer_class.__name__, (layer_class,), {**named, **functions})
    return taught if own is layer_class else type(own.__name__, (own, taught), named)


def _seeing(function: Any, names: Mapping[str, Any]) -> Any:
    names = {**function.__globals__, **names}
    same = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    same.__kwdefaults__ = function.__kwdefaults__
    return same


def _owner(layer_class: type, update: str) -> Any:
    return layer_class if hasattr(layer_class, update) else modules[layer_class.__module__]


def _taking_views(update: Callable[..., Any]) -> Callable[..., Any]:
    names = list(signature(update).parameters)

    @wraps(update)
    def taking(*args: Any, **named: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **named}
        if isinstance(state := given.get("state"), StateView):
            return state.recur(update, given)
        if "lengths" in names and given.get("lengths") is None and given.get("mask") is not None:
            given["lengths"] = given["mask"].sum(axis=1)  # some families' code leaves them out
        return update(**given)

    return taking


def _keeping_inputs(call: Callable[..., mx.array], inputs: Sequence[str]) -> Callable[..., mx.array]:
    """Wrap a layer's call so that all inputs of its convolutions stay in a StateView, not just the last."""

    def keep_more(layer: Any, count: int) -> None:
        for path in inputs:
            *parts, name = path.split(".")
            part = reduce(getattr, parts, layer)
            setattr(part, name, getattr(part, name) + count)  # mlx-lm reads it only to know how many to keep

    @wraps(call)
    def keeping(layer: Any, *args: Any, **named: Any) -> mx.array:
        given = (*args, *named.values())
        count = given[0].shape[1]
        if count == 1 or not any(isinstance(each, StateView) for each in given):
            return call(layer, *args, **named)
        keep_more(layer, count)
        try:
            return call(layer, *args, **named)
        finally:
            keep_more(layer, -count)

    return keeping
