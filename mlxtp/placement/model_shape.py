"""Sizes of a model and of its stages, for its placement, from its description."""

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
HEAD_KERNELS = 12  #: of an MTP head without its layer: two norms, their product, norm, head, a choice
_KV_SCALES = 4 / 64  # bytes of a quantized number's scales


# --- kinds of KV caches, and missing features with each -------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheWords:
    """Words about KV caches: their `name`, features that are `off`, and `why`."""

    name: str
    off: str = ""
    why: str = ""


#: By the first matching kind of mlx-lm's caches.
_NAMES = {
    "ChunkedKVCache": (
        "chunks of tokens",
        "what is before a chunk cannot come back, nor can mlx-lm join such caches",
    ),
    **dict.fromkeys(
        ("HyV4KVCache", "QSAKVCache"),
        ("keys with an index", "an index of keys is not cut, and some know one row alone"),
    ),
    "PoolingCache": ("groups of tokens", "closed groups cannot be opened"),
    "ArraysCache": ("recurrent states", "mlxtp cannot roll these states back"),
    "RotatingKVCache": (
        "windows of tokens",
        "a slot holds later tokens by then, and mlx-lm's window has no quantized numbers",
    ),
    "KVCache": ("keys and values", ""),
}
_FED_AGAIN = ", fed again", "a state holds all tokens so far; only those of the last step are fed to it again"
_SEVERAL = "several keys and values a layer", "rows of a batch cannot roll back one by one"
_OTHERS = "compressed groups", "closed groups cannot be opened, nor caches be joined"


def words_of(caches: CacheCapabilities) -> CacheWords:
    name, why = next((words for kind, words in _NAMES.items() if kind in caches.kinds), _OTHERS)
    if "ArraysCache" in caches.kinds:
        if caches.rolls_back:
            name, why = name + _FED_AGAIN[0], _FED_AGAIN[1]
        name += "" if caches.joint else ", prompts apart"
    if caches.truncatable and not caches.rolls_back:
        name, why = (
            _SEVERAL if caches.batched else (name, "its attention cannot tell rows of unlike lengths apart")
        )
    can = {
        "drafts, forced tokens": caches.rolls_back,
        "several prompts in one forward": caches.joint,
        "quantized KV": caches.quantizable,
        "requests at once": caches.batched,
    }
    off = ", ".join(words for words, here in can.items() if not here)
    return CacheWords(name, off, why if off else "")


# --- borders of stages ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageRules:
    joined: frozenset[int] = frozenset()  #: Layers on the rank of the previous layer: they read its results.
    keepers: tuple[int, ...] = ()  #: Layers with caches that count positions: each stage needs one; (): any.

    def flaw(self, begin: int, end: int) -> str:
        """Return why no stage can have the layers from `begin` up to `end`, or ""."""
        if begin in self.joined:
            return f"layer {begin} reads results of earlier layers, so both must be on one Mac"
        if self.keepers and not any(begin <= layer < end for layer in self.keepers):
            named = f"layers {begin} to {end - 1} have" if end - begin > 1 else f"layer {begin} has"
            return f"{named} no cache that counts positions, of which each Mac needs one"
        return ""

    def border(self, at: int, step: int) -> int:
        """Return the first layer that may begin a stage, from `at` on, by `step` (1 or -1)."""
        while at in self.joined:
            at += step
        return at

    def end(self, begin: int, most: int) -> int:
        """Return the end of a stage from `begin` on, at most `most`; `begin` if there is none."""
        end = self.border(most, -1)
        return begin if end <= begin or self.flaw(begin, end) else end

    def latest(self, total: int, stages: int) -> list[int]:
        """Return the latest ends of so many stages of `total` layers; [] if impossible."""
        ends = [total]
        while len(ends) < stages:
            keepers = (layer for layer in reversed(self.keepers) if layer < ends[0])
            ends.insert(0, self.border(next(keepers, -1) if self.keepers else ends[0] - 1, -1))
        return [] if ends[0] <= 0 or self.flaw(0, ends[0]) else ends


# --- shape ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartShape:
    """Sizes of a layer, of a stage's other parts, or of a whole model."""

    weight_bytes: int = 0
    token_bytes: int = 0  #: Weights read for one token, without experts that it does not meet.
    token_weights: int = 0  #: Number of weights that multiply a token.
    kernels: int = 0  #: GPU kernels started one after the other for a token.
    kv_token_bytes: int = 0  #: One more token in the KV caches.
    kv_window_bytes: int = 0  #: The part of this in layers with at most `window` tokens.
    attended: int = 0  #: Products of a prompt's token with each earlier one.
    attended_window: int = 0  #: The part of this in layers with at most `window` tokens.

    def __add__(self, other: PartShape) -> PartShape:
        return PartShape(*(getattr(self, name) + getattr(other, name) for name in PartShape.__slots__))

    def __sub__(self, other: PartShape) -> PartShape:
        return PartShape(*(getattr(self, name) - getattr(other, name) for name in PartShape.__slots__))


@dataclass(frozen=True, kw_only=True)
class ModelShape(PartShape):
    """Sizes of a model. Bytes are of weights as stored."""

    name: str
    model: Description = field(repr=False)
    layers: int
    whole_bytes: int  #: Weights that each rank of a group holds whole.
    token_whole_bytes: int  #: The part of these that a rank reads for one token.
    mlp_bytes: int  #: Dense MLPs, which are whole on each rank if they do not divide.
    kv_heads: int  #: Most ranks that share the KV caches; a compressed cache is on every rank.
    window: int
    mtp_kv_bytes: int  #: One more token in an MTP head's cache, whole on each rank; 0 without a head's files.
    mtp_head: PartShape | None  #: The MTP head that its configuration names, in its files or not.
    output_bytes: int  #: Output head, which may be the embedding's.
    before: tuple[PartShape, ...] = field(repr=False)  #: All layers before each layer, and all layers.
    ends: tuple[PartShape, PartShape] = field(repr=False)  #: Other parts of first and last stages.
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
        """Sums and gathers over the ranks for one token, including the agreement on it."""
        return self.model.collectives + 1

    @property
    def cuttable(self) -> bool:
        return not self.model.uncuttable

    def stage(self, begin: int, end: int) -> ModelShape:
        """Return the shape of a stage: the layers from `begin` up to `end`, with embedding or head."""
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
        """Return why it cannot be cut into so many stages, or by `split`; or ""."""
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
    """Return the shape of a described model, scaled to `weight_bytes` on disk if known: configurations of
    mixed quantizations are rarely complete. `kv_bits` (4 or 8) quantizes KV caches if possible. `mtp`: its
    files have an MTP head.
    """
    embedding, layers, head = model.embedding, model.layers, model.head
    whole = sum((embedding, *layers, head), PartFacts())
    joining = 2 * model.hidden**2  # weights of an MTP head without its layer, which is like the last
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
    # All other bytes are the last stage's, so that all stages together have all bytes.
    last = all_of_it - before[-1]
    if not (model.tied or mtp):  # then the last stage needs the embedding, too
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
        layer.attended,
        layer.attended if layer.window else 0,
    )


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model as known to a Mac with its files. `weight_bytes` and `mtp` as in `shape_of`."""

    model: Description
    weight_bytes: int
    mtp: bool

    def shape(self, name: str, kv_bits: int) -> ModelShape:
        return shape_of(self.model, name=name, weight_bytes=self.weight_bytes, kv_bits=kv_bits, mtp=self.mtp)

    def packed(self) -> bytes:
        numbers = f"{self.weight_bytes} {int(self.mtp)} "
        return zlib.compress((numbers + to_text(self.model)).encode())


@lru_cache(64)
def unpacked(data: bytes) -> DescribedModel:
    """Undo `packed`. Raises ValueError, also for a member's inventions."""
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
    """Raise ValueError for impossible types or numbers, such as a 0 that plans would divide by."""
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
    """Return the indivisible shape of a model with only a known size."""
    size = weight_bytes
    whole = PartFacts(0, size, size, size // 2, size, size)
    caches = CacheCapabilities(True, True, True, True, True, True, ("KVCache",))
    why = "its sizes are not known"
    model = Description("?", 1, 1, PartFacts(), (whole,), PartFacts(), caches, unsharable=why, uncuttable=why)
    return shape_of(model, name=name)
