"""Facts of a model that the engine reads from its modules, for agents to plan with. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

FORMAT = 3
#: Status of a describing process for a wrong configuration; 1 means an unusable one.
INVALID = 2


@dataclass(frozen=True, slots=True)
class PartFacts:
    """One layer, or the part before or after all layers. Bytes are of tensors as stored."""

    numbers: int = 0  #: weights, without the scales of quantized ones
    weight_bytes: int = 0  #: of all tensors
    whole_bytes: int = 0  #: the part that each of several ranks needs whole; 0 if ranks cannot share layers
    token_numbers: int = 0  #: like `numbers`, for one token: experts that it meets, one embedding row
    token_bytes: int = 0  #: likewise
    token_whole_bytes: int = 0  #: likewise
    kv_token_bytes: int = 0  #: of one more token in its caches, as long as they grow
    kv_window_bytes: int = 0  #: the part of `kv_token_bytes` in caches of at most `window` tokens
    kv_heads: int = 1  #: most ranks that can divide its caches
    window: int = 0  #: 0 if its caches keep all tokens
    state_bytes: int = 0  #: per sequence, in caches that do not grow
    attended: int = 0  #: products of a prompt's token with each earlier one, in MLX's fused attention

    def __add__(self, other: PartFacts) -> PartFacts:
        both = {name: (getattr(self, name), getattr(other, name)) for name in self.__slots__}
        most = ("kv_heads", "window")
        return PartFacts(**{n: (max if n in most else sum)(two) for n, two in both.items()})


@dataclass(frozen=True, slots=True)
class Dimension:
    """One size that ranks divide equally."""

    what: str  #: name, such as "KV heads"
    size: int
    reads: str = ""  #: name of the numbers in a projection whose input is cut; "" if none is
    width: int = 1  #: numbers per unit of `size`; they are cut only between quantization groups
    copies: bool = False  #: Several ranks may have the same unit.

    def obstacle(self, ranks: int, group: int) -> str:
        """Return why `ranks` ranks cannot divide it in quantization groups of `group`; "" if they can."""
        if self.size % ranks and not (self.copies and ranks % self.size == 0):
            if self.what.endswith(("heads", "groups", "of a group")):
                return f"{self.size} {self.what} do not divide by {ranks}"
            return f"{self.what} {self.size} does not divide by {ranks}"
        part = self.size * self.width // ranks
        if self.reads and part % group:
            whole = f"{self.reads} {self.size * self.width} / {ranks} = {part}"
            return f"{whole} is no multiple of the quantization group {group}"
        return ""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """All sizes of a model that ranks divide, and the size of its quantization groups (1: none)."""

    each: tuple[Dimension, ...] = ()
    group: int = 1

    def obstacles(self, ranks: int) -> tuple[str, ...]:
        if ranks == 1:
            return ()
        found = (dimension.obstacle(ranks, self.group) for dimension in self.each)
        return tuple(dict.fromkeys(filter(None, found)))


@dataclass(frozen=True, slots=True)
class CacheCapabilities:
    """Capabilities of a model's KV caches."""

    batched: bool  #: Sequences decode together.
    joint: bool  #: Prompts of unlike lengths are read in one forward.
    rolls_back: bool  #: A step may feed rows several tokens, and each row may drop some of them again.
    truncatable: bool  #: A sequence may start from any beginning of another's caches.
    copyable: (
        bool  #: A sequence may start from a copy of another's caches if it begins with all their tokens.
    )
    quantizable: bool  #: Keys and values may be kept in few bits.
    kinds: tuple[str, ...]  #: mlx-lm's names of the caches


@dataclass(frozen=True, slots=True)
class Description:
    """A model as its modules show it."""

    family: str  #: mlx-lm's name of it
    hidden: int
    vocabulary: int
    embedding: PartFacts
    layers: tuple[PartFacts, ...]
    head: PartFacts  #: If it is tied to the embedding, it has only the figures for a token.
    caches: CacheCapabilities
    tied: bool = False  #: Head and embedding are one.
    experts: int = 0  #: routed experts of a layer; 0 without
    picked: int = 0  #: of `experts`, how many a token meets; 0 without
    mlp_bytes: int = 0  #: of dense MLPs (`mlp_width`) that ranks need whole, if they cannot share them
    mlp_width: int = 0
    bits: int = 16  #: of the quantization; 16 or 32 without
    group: int = 1  #: of the quantization; 1 without
    number_bytes: int = 2  #: of one unquantized number
    expands: bool = False  #: mlx-lm expands the weights on disk.
    context: int = 0  #: most tokens that it supports; 0 if its configuration does not say
    has_head: bool = False  #: Its configuration names an MTP head.
    drafts: bool = False  #: That head is usable.
    dimensions: Dimensions = Dimensions()  #: sizes that ranks divide
    kernels: int = 1  #: kernels started per token
    collectives: int = 0  #: sums over the ranks per token; 0 if ranks cannot share layers
    joined: tuple[int, ...] = ()  #: layers that must be on the same rank as the layer before
    keepers: tuple[
        int, ...
    ] = ()  #: layers with special caches: each stage needs one; () if any layer will do
    unsharable: str = ""  #: why ranks cannot share layers; "" if they can
    uncuttable: str = ""  #: why ranks cannot have whole layers; "" if they can


def to_text(description: Description) -> str:
    return json.dumps({"format": FORMAT, **asdict(description)})


def built(kind: Any, told: Any) -> Any:
    """Rebuild a value of this type from JSON of its `asdict`. Raises as the type does."""
    if get_origin(kind) is tuple:
        return tuple(built(get_args(kind)[0], each) for each in told)
    if not is_dataclass(kind):
        return told
    types = get_type_hints(kind)
    return kind(**{name: built(types[name], value) for name, value in told.items()})  # type: ignore[operator]


def from_text(text: str) -> Description:
    """Parse the output of `to_text`. Checks names only. Raises ValueError for wrong ones."""
    try:
        told: dict[str, Any] = json.loads(text)
        if told.pop("format") != FORMAT:
            raise ValueError("it is of another format")
        found: Description = built(Description, told)
        return found
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no description of a model: {error}") from error
