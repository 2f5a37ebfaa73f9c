"""Facts of a model that the engine reads from its modules, for agents to plan with. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

FORMAT = 1
#: Status of a describing process for a wrong configuration; 1 means an unusable one.
INVALID = 2


@dataclass(frozen=True, slots=True)
class PartFacts:
    """One layer, or the part before or after all layers. Bytes are of tensors as stored.

    numbers         weights, without the scales of quantized ones
    weight_bytes    all tensors
    whole_bytes     the part that each of several ranks needs whole; 0 if ranks cannot share layers
    token_*         the same for one token: only the experts that it meets, only one row of an embedding
    kv_token_bytes  bytes of one more token in its caches, as long as they grow
    kv_window_bytes the part of kv_token_bytes in caches of at most `window` tokens
    kv_heads        most ranks that can divide its caches
    window          0 if its caches keep all tokens
    state_bytes     bytes per sequence in its caches that do not grow
    """

    numbers: int = 0
    weight_bytes: int = 0
    whole_bytes: int = 0
    token_numbers: int = 0
    token_bytes: int = 0
    token_whole_bytes: int = 0
    kv_token_bytes: int = 0
    kv_window_bytes: int = 0
    kv_heads: int = 1
    window: int = 0
    state_bytes: int = 0

    def __add__(self, other: PartFacts) -> PartFacts:
        both = {name: (getattr(self, name), getattr(other, name)) for name in self.__slots__}
        most = ("kv_heads", "window")
        return PartFacts(**{n: (max if n in most else sum)(two) for n, two in both.items()})


@dataclass(frozen=True, slots=True)
class Dimension:
    """One size that ranks divide equally.

    what    its name, such as "KV heads"
    reads   name of the numbers in a projection whose input is cut; "" if none is
    width   numbers per unit of `size`; they are cut only between quantization groups
    copies  several ranks may have the same unit
    """

    what: str
    size: int
    reads: str = ""
    width: int = 1
    copies: bool = False

    def obstacle(self, ranks: int, group: int) -> str:
        """Return why `ranks` ranks cannot divide it in quantization groups of `group`; "" if they can."""
        if self.size % ranks and not (self.copies and ranks % self.size == 0):
            if self.what.endswith(("heads", "groups")):
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
    """Capabilities of a model's KV caches.

    batched      sequences decode together
    rolls_back   a step may feed rows several tokens, and each row may drop some of them again
    truncatable  a sequence may start from any beginning of another's caches
    copyable     a sequence may start from a copy of another's caches if it begins with all their tokens
    quantizable  keys and values may be kept in few bits
    kinds        mlx-lm's names of the caches
    """

    batched: bool
    rolls_back: bool
    truncatable: bool
    copyable: bool
    quantizable: bool
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """A model as its modules show it.

    family        mlx-lm's name of it
    hidden, vocabulary    sizes
    embedding, layers, head    parts; a head tied to the embedding has only token figures
    caches        capabilities of its KV caches
    tied          head and embedding are one
    experts, picked    routed experts of a layer, and how many of them a token meets; 0 without
    mlp_bytes     dense MLPs of `mlp_width` that a rank needs whole if ranks cannot share them; else 0
    bits, group   of the quantization; without one 16 or 32 bits and group 1
    number_bytes  of one unquantized number
    expands       mlx-lm expands the weights on disk
    context       most tokens that it supports; 0 if its configuration does not say
    has_head      its configuration names an MTP head; `drafts`: it has a usable one
    dimensions    sizes that ranks divide
    kernels       kernels started per token
    collectives   sums over the ranks per token; 0 if ranks cannot share layers
    joined        layers that must be on the same rank as the layer before
    keepers       layers with special caches: each stage needs one of them; () if any layer will do
    unsharable, uncuttable    why ranks cannot share layers, or take whole ones; "" if they can
    """

    family: str
    hidden: int
    vocabulary: int
    embedding: PartFacts
    layers: tuple[PartFacts, ...]
    head: PartFacts
    caches: CacheCapabilities
    tied: bool = False
    experts: int = 0
    picked: int = 0
    mlp_bytes: int = 0
    mlp_width: int = 0
    bits: int = 16
    group: int = 1
    number_bytes: int = 2
    expands: bool = False
    context: int = 0
    has_head: bool = False
    drafts: bool = False
    dimensions: Dimensions = Dimensions()
    kernels: int = 1
    collectives: int = 0
    joined: tuple[int, ...] = ()
    keepers: tuple[int, ...] = ()
    unsharable: str = ""
    uncuttable: str = ""


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
