"""Sizes of a model and of its stages, on which its placement depends. Pure: its description in."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, get_args, get_origin, get_type_hints

from ..description import CacheCapabilities, Description, PartFacts, from_text, to_text
from ..model_config import ASSUMED_CONTEXT
from ..wire.messages import MAX_RANKS as MAX_RANKS

MAX_TEXT = 1 << 20  #: characters of a description from another Mac
HEAD_KERNELS = 12  #: of an MTP head beside its layer: two norms, their product, norm, head, a choice
_KV_SCALES = 4 / 64  # bytes of a quantized number's scales


# --- kinds of KV caches, and what the engine leaves out with each ---------------------------------------


@dataclass(frozen=True, slots=True)
class CacheWords:
    """Words about KV caches. `off` names what is left out, and `why`; both empty without."""

    name: str
    off: str = ""
    why: str = ""


#: By the first of mlx-lm's kinds that a model has.
_NAMES = {
    "ChunkedKVCache": (
        "chunks of tokens",
        "what is before a chunk cannot come back, nor can mlx-lm join such caches",
    ),
    "ArraysCache": ("recurrent states", "mlxtp cannot roll these states back"),
    "RotatingKVCache": (
        "windows of tokens",
        "a prompt is computed in mlx-lm's own window, which has one sequence and no quantized numbers",
    ),
    "KVCache": ("keys and values", ""),
}
_FED_AGAIN = ", fed again", "a state holds all tokens so far; only those of the last step are fed to it again"
_SEVERAL = "several keys and values a layer", "rows of a batch cannot roll back one by one"
_OTHERS = "compressed groups", "closed groups cannot be opened, nor caches be joined"


def words_of(caches: CacheCapabilities) -> CacheWords:
    name, why = next((words for kind, words in _NAMES.items() if kind in caches.kinds), _OTHERS)
    if "ArraysCache" in caches.kinds and caches.rolls_back:
        name, why = name + _FED_AGAIN[0], _FED_AGAIN[1]
    if caches.truncatable and not caches.rolls_back:
        name, why = _SEVERAL if caches.batched else (name, "its attention takes no masks by row")
    can = {
        "drafts, forced tokens": caches.rolls_back,
        "several prompts in one forward": caches.rolls_back and caches.truncatable,
        "quantized KV": caches.quantizable,
        "requests at once": caches.batched,
    }
    off = ", ".join(words for words, here in can.items() if not here)
    return CacheWords(name, off, why if off else "")


# --- borders of stages ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageRules:
    """Rules for stages.

    joined   layers that must be on the rank of the layer before, because they read results of earlier ones
    keepers  layers whose caches count positions, of which each stage needs one; () where any layer will do
    """

    joined: frozenset[int] = frozenset()
    keepers: tuple[int, ...] = ()

    def flaw(self, begin: int, end: int) -> str:
        """Return why no stage can have the layers from `begin` up to `end`; empty if one can."""
        if begin in self.joined:
            return f"layer {begin} reads results of earlier layers, so both must be on one Mac"
        if self.keepers and not any(begin <= layer < end for layer in self.keepers):
            named = f"layers {begin} to {end - 1} have" if end - begin > 1 else f"layer {begin} has"
            return f"{named} no cache that counts positions, of which each Mac needs one"
        return ""

    def border(self, at: int, step: int) -> int:
        """Return `at`, or the next layer by `step` (1 or -1) before which a stage may begin."""
        while at in self.joined:
            at += step
        return at

    def end(self, begin: int, most: int) -> int:
        """Return where a stage from `begin` on ends, at `most` or before; `begin` where none can be."""
        end = self.border(most, -1)
        return begin if end <= begin or self.flaw(begin, end) else end

    def latest(self, total: int, stages: int) -> list[int]:
        """Return where each of so many stages of `total` layers must end; [] where they cannot be so many."""
        ends = [total]
        while len(ends) < stages:
            keepers = (layer for layer in reversed(self.keepers) if layer < ends[0])
            ends.insert(0, self.border(next(keepers, -1) if self.keepers else ends[0] - 1, -1))
        return [] if ends[0] <= 0 or self.flaw(0, ends[0]) else ends


# --- shape ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartShape:
    """Sizes of one layer, of what a stage has beside its layers, or of all.

    token_bytes      weights read for one token: of routed experts only those it meets
    token_weights    number of weights that a token is multiplied by
    kernels          GPU kernels started one after the other for one token
    kv_token_bytes   bytes of one more token in the KV caches
    kv_window_bytes  the part of these in layers with slots for `window` tokens at most
    """

    weight_bytes: int = 0
    token_bytes: int = 0
    token_weights: int = 0
    kernels: int = 0
    kv_token_bytes: int = 0
    kv_window_bytes: int = 0

    def __add__(self, other: PartShape) -> PartShape:
        return PartShape(*(getattr(self, name) + getattr(other, name) for name in PartShape.__slots__))

    def __sub__(self, other: PartShape) -> PartShape:
        return PartShape(*(getattr(self, name) - getattr(other, name) for name in PartShape.__slots__))


@dataclass(frozen=True, kw_only=True)
class ModelShape(PartShape):
    """Sizes of a model that its placement depends on. Bytes are of weights as they are stored.

    whole_bytes   of the weights, what each rank of a group holds whole; `token_whole_bytes`: reads whole
    mlp_bytes     of dense MLPs, which some families keep whole where they do not divide
    kv_heads      ranks that share the KV caches at most; a compressed cache is on every rank
    mtp_kv_bytes  of one more token in an MTP head's cache, whole on each rank; 0 where its files have none
    mtp_head      sizes of the MTP head that its configuration names, in its files or not
    output_bytes  of the output head, which may be the embedding's
    before        sizes of all layers before each one, and of all
    ends          sizes of what first and last stages have beside layers: the embedding; norm and head
    """

    name: str
    model: Description = field(repr=False)
    layers: int
    whole_bytes: int
    token_whole_bytes: int
    mlp_bytes: int
    kv_heads: int
    window: int
    mtp_kv_bytes: int
    mtp_head: PartShape | None
    output_bytes: int
    before: tuple[PartShape, ...] = field(repr=False)
    ends: tuple[PartShape, PartShape] = field(repr=False)
    rules: StageRules = field(repr=False)

    @property
    def family(self) -> str:
        return self.model.family

    @property
    def hidden(self) -> int:
        return self.model.hidden

    @property
    def max_context(self) -> int:
        return self.model.context or ASSUMED_CONTEXT

    @property
    def collectives(self) -> int:
        """Sums and gathers over the ranks for one token; one of them agrees on it."""
        return self.model.collectives + 1

    @property
    def cuttable(self) -> bool:
        return not self.model.uncuttable

    def stage(self, begin: int, end: int) -> ModelShape:
        """Return the shape of a stage: the layers from `begin` up to `end`, and what its place brings."""
        if (begin, end) == (0, self.layers):
            return self
        sizes = self.before[end] - self.before[begin]
        if begin == 0:
            sizes += self.ends[0]
        if end == self.layers:
            sizes += self.ends[1]
        own = self.mtp_kv_bytes if end == self.layers else 0
        return replace(self, layers=end - begin, mtp_kv_bytes=own, **asdict(sizes))

    def rank_weights(self, ranks: int) -> int:
        return self._shared_out(self.weight_bytes, self.whole_bytes, ranks)

    def rank_token_bytes(self, ranks: int) -> int:
        return self._shared_out(self.token_bytes, self.token_whole_bytes, ranks)

    def _shared_out(self, total: int, whole: int, ranks: int) -> int:
        width = self.model.mlp_width
        if width % ranks or width // ranks % self.model.group:
            whole += self.mlp_bytes
        return total if ranks == 1 else -(-(total - whole) // ranks) + whole

    def rank_kv(self, ranks: int, tokens: int) -> int:
        beyond = max(tokens - self.window, 0)
        size = self.kv_token_bytes * tokens - self.kv_window_bytes * beyond
        return -(-size // min(ranks, self.kv_heads)) + self.mtp_kv_bytes * tokens

    def uncuttable(self, ranks: int, split: Sequence[int] = ()) -> str:
        """Return why it cannot be cut into so many stages, or as `split` has it; empty if it can."""
        if not self.cuttable:
            return f"the family {self.family!r} cannot be cut into {ranks} stages: {self.model.uncuttable}"
        told = ",".join(map(str, split))
        if split and sum(split) != self.layers:
            return f"the split {told} has {sum(split)} layers, and {self.name} has {self.layers}"
        for begin, end in pairwise(accumulate(reversed(split), initial=0)):
            if why := self.rules.flaw(begin, end):
                return f"the split {told} cannot be: {why}"
        if self.layers < ranks:
            return f"{self.layers} layers are fewer than {ranks} Macs"
        many = not split and not self.rules.latest(self.layers, ranks)
        return f"the layers of {self.name} depend on each other too much for {ranks} stages" if many else ""

    def obstacles(self, ranks: int) -> tuple[str, ...]:
        if ranks > 1 and self.model.unsharable:
            why = self.model.unsharable
            return (f"no layer of the family {self.family!r} can be divided among {ranks} ranks: {why}",)
        return self.model.dimensions.obstacles(ranks)


def shape_of(
    model: Description, *, name: str = "", weight_bytes: int = 0, kv_bits: int = 0, mtp: bool = False
) -> ModelShape:
    """Return the shape of a described model.

    Sizes are scaled to `weight_bytes` on disk, if known: configurations of mixed quantizations are rarely
    complete. `kv_bits` (4 or 8) quantizes the KV cache where it can be. `mtp`: its files have an MTP head.
    """
    embedding, layers, head = model.embedding, model.layers, model.head
    whole = sum((embedding, *layers, head), PartFacts())
    joining = 2 * model.hidden**2  # weights of an MTP head beside a layer like the last one
    joining_bytes = joining * layers[-1].weight_bytes // max(layers[-1].numbers, 1)
    own = layers[-1].weight_bytes + joining_bytes if mtp else 0  # each rank has all of it
    implied = whole.weight_bytes + own
    scale = weight_bytes / implied if weight_bytes and not model.expands else 1.0
    quantized = (kv_bits / 8 + _KV_SCALES) / model.number_bytes
    kv_scale = quantized if kv_bits and model.caches.quantizable else 1.0
    kernels = model.kernels // len(layers)
    each = [_part(layer, scale, kv_scale, kernels) for layer in layers]
    before = tuple(accumulate(each, initial=PartShape()))
    all_of_it = replace(
        before[-1],
        weight_bytes=weight_bytes if scale != 1.0 else implied,
        token_bytes=int(scale * whole.token_bytes),
        token_weights=whole.token_numbers,
        kernels=model.kernels,
    )
    table = PartShape(int(scale * embedding.weight_bytes))
    # What the layers leave is the last stage's, so that all stages together have all bytes.
    last = all_of_it - before[-1]
    if not (model.tied or mtp):  # whose output or head needs the embedding, too
        last -= table
    mtp_head = None
    if model.has_head:
        beside = int(scale * joining_bytes)
        mtp_head = each[-1] + PartShape(beside, beside, joining, HEAD_KERNELS)
    return ModelShape(
        name=name or model.family,
        model=model,
        layers=len(layers),
        whole_bytes=int(scale * (whole.whole_bytes + own)),
        token_whole_bytes=int(scale * whole.token_whole_bytes),
        mlp_bytes=int(scale * model.mlp_bytes),
        kv_heads=min((layer.kv_heads for layer in layers if layer.kv_token_bytes), default=1),
        window=whole.window,
        mtp_kv_bytes=each[-1].kv_token_bytes if mtp else 0,
        mtp_head=mtp_head,
        output_bytes=int(scale * head.token_bytes),
        before=before,
        ends=(table, last),
        rules=StageRules(frozenset(model.joined), model.keepers),
        **asdict(all_of_it),
    )


def _part(layer: PartFacts, scale: float, kv_scale: float, kernels: int) -> PartShape:
    return PartShape(
        int(scale * layer.weight_bytes),
        int(scale * layer.token_bytes),
        layer.token_numbers,
        kernels,
        int(kv_scale * layer.kv_token_bytes),
        int(kv_scale * layer.kv_window_bytes),
    )


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model as a Mac that has its files knows it. `weight_bytes` and `mtp` as in `shape_of`."""

    model: Description
    weight_bytes: int
    mtp: bool

    def shape(self, name: str, kv_bits: int) -> ModelShape:
        return shape_of(self.model, name=name, weight_bytes=self.weight_bytes, kv_bits=kv_bits, mtp=self.mtp)

    def packed(self) -> bytes:
        """Return it in the form that members send, about a kilobyte."""
        numbers = f"{self.weight_bytes} {int(self.mtp)} "
        return zlib.compress((numbers + to_text(self.model)).encode())


@lru_cache(64)
def unpacked(data: bytes) -> DescribedModel:
    """Return what `packed` made this of. Raises ValueError, also for what a member made up."""
    unpacking = zlib.decompressobj()
    try:
        weight_bytes, mtp, described = unpacking.decompress(data, MAX_TEXT).decode().split(" ", 2)
        found = DescribedModel(from_text(described), int(weight_bytes), mtp == "1")
    except (zlib.error, TypeError, LookupError) as error:
        raise ValueError(f"no model is like that: {error}") from error
    _check(found, DescribedModel, "model")
    if not found.model.layers or (found.model.drafts and not found.model.has_head):
        raise ValueError("no model is like that: it has no layers, or drafts without a head")
    return found


def _check(value: object, kind: Any, name: str) -> None:
    """Raise ValueError where types or numbers are none of a model. What plans divide by is not 0."""
    if get_origin(kind) is tuple:
        for part in value if isinstance(value, tuple) else [None]:
            _check(part, get_args(kind)[0], name)
    elif type(value) is not kind or (kind is int and not (name in _AT_LEAST_1) <= value < MOST):  # type: ignore[operator]
        raise ValueError(f"no model is like that: {name} is {value!r}")
    elif is_dataclass(value):
        for each, part in get_type_hints(kind).items():
            _check(getattr(value, each), part, each)


_AT_LEAST_1 = {"kv_heads", "group", "number_bytes", "kernels", "hidden", "vocabulary", "width"}
MOST = 1 << 60  #: bytes, or numbers, of any model


def unknown_shape(name: str, weight_bytes: int) -> ModelShape:
    """Return the shape of a model of which only the size of its weights is known: one rank has it whole."""
    size = weight_bytes
    whole = PartFacts(0, size, size, size // 2, size, size)
    caches, why = CacheCapabilities(True, True, True, True, True, ("KVCache",)), "its sizes are not known"
    model = Description("?", 1, 1, PartFacts(), (whole,), PartFacts(), caches, unsharable=why, uncuttable=why)
    return shape_of(model, name=name)
