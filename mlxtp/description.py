"""Facts of a model that the engine reads off its modules, and by which agents plan. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

FORMAT = 1
#: Status of a process that describes, for a configuration that is wrong; 1 for one that it cannot use.
INVALID = 2


@dataclass(frozen=True, slots=True)
class PartFacts:
    """One layer, or what stands before or behind the layers. Bytes are of tensors as they are stored.

    numbers         weights: of quantized ones without their scales
    weight_bytes    all tensors
    whole_bytes     of these, those that each of several ranks has whole; 0 where ranks cannot share layers
    token_*         the same, of experts those that one token meets, of an embedding one row
    kv_token_bytes  bytes of one more token in its caches, as long as these grow
    kv_window_bytes the part of these in caches that keep `window` tokens at most
    kv_heads        ranks among which these can be divided at most
    window          0 where its caches keep all tokens
    state_bytes     bytes of a sequence in its caches that do not grow
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
    """One size of which each rank gets an equal part.

    what    its name, such as "KV heads"
    reads   name of the numbers that a projection reads whose input is cut; "" if none is
    width   how many of these numbers belong to one of `size`; they are cut between quantization groups only
    copies  whether several ranks may have the same one
    """

    what: str
    size: int
    reads: str = ""
    width: int = 1
    copies: bool = False

    def obstacle(self, ranks: int, group: int) -> str:
        """Return why `ranks` ranks cannot divide it, in quantization groups of `group`; "" if they can."""
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
    """All sizes of a model that ranks divide, and the size of its quantization groups, 1 without."""

    each: tuple[Dimension, ...] = ()
    group: int = 1

    def obstacles(self, ranks: int) -> tuple[str, ...]:
        if ranks == 1:
            return ()
        found = (dimension.obstacle(ranks, self.group) for dimension in self.each)
        return tuple(dict.fromkeys(filter(None, found)))


@dataclass(frozen=True, slots=True)
class CacheCapabilities:
    """Capabilities of the KV caches of a model.

    batched      sequences decode together
    rolls_back   a step may feed rows several tokens, and each row goes back to some of them
    truncatable  a sequence may start from any beginning of another's caches
    copyable     a sequence may start from a copy of another's caches, as long as all their tokens begin it
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
    """A model, as its modules show it.

    family        mlx-lm's name of it
    hidden, vocabulary    sizes
    embedding, layers, head    parts; a head that is the embedding has only the figures of a token
    caches        what its KV caches can do
    tied          whether head and embedding are one
    experts, picked    routed experts of a layer, and how many of them a token meets; 0 without
    mlp_bytes     of dense MLPs of `mlp_width` that a rank has whole where ranks cannot share them; 0 without
    bits, group   of the quantization; 16 or 32 bits and group 1 without
    number_bytes  of one number that is not quantized
    expands       mlx-lm makes larger weights of those on the disk
    context       most tokens that it supports; 0 where its configuration does not say
    has_head      its configuration names an MTP head, and `drafts`: one that can be used
    dimensions    sizes that ranks divide
    kernels       operations for one token that each start a kernel
    collectives   sums over the ranks for one token; 0 where ranks cannot share layers
    joined        layers that must be on the rank of the layer before
    keepers       layers of which each stage needs one, because of their caches; () where any layer will do
    unsharable, uncuttable    why ranks cannot share each layer, or have whole ones; "" if they can
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
    """Return the value of this type of which `asdict` and JSON made `told`. Raises as the type does."""
    if get_origin(kind) is tuple:
        return tuple(built(get_args(kind)[0], each) for each in told)
    if not is_dataclass(kind):
        return told
    types = get_type_hints(kind)
    return kind(**{name: built(types[name], value) for name, value in told.items()})  # type: ignore[operator]


def from_text(text: str) -> Description:
    """Return what `to_text` made this of. Checks names alone. Raises ValueError for other ones."""
    try:
        told: dict[str, Any] = json.loads(text)
        if told.pop("format") != FORMAT:
            raise ValueError("it is of another format")
        found: Description = built(Description, told)
        return found
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no description of a model: {error}") from error
