"""Fields of config.json: how they are read, and the sizes that ranks must divide among them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import Code, ModelError
from .model_families import ALSO_CALLED, COPIES_KV_HEADS, KEEPS_MLP_WHOLE, MTP_PLACES

Config = Mapping[str, Any]

_MOST = 1 << 48  #: Above any size of a model.
_GEMMA3: Config = {"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6}
_GEMMA4: Config = {
    "head_dim": 256,
    "global_head_dim": 512,
    "num_key_value_heads": 1,
    "num_attention_heads": 8,
    "sliding_window": 512,
    "sliding_window_pattern": 5,
    "vocab_size": 262144,
    "tie_word_embeddings": True,
}
#: Fields that published configurations leave out, as mlx-lm's modules fill them in.
_FILLED_IN: Mapping[str, Config] = {
    "gemma3": {**_GEMMA3, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
    "gemma3_text": {**_GEMMA3, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144},
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
}


def family(config: Config) -> str:
    """Return mlx-lm's name of the family; empty if the configuration has none."""
    name = str(config.get("model_type", ""))
    return ALSO_CALLED.get(name, name)


def mtp_place(config: Config) -> str:
    """Return what names of an MTP head's tensors begin with; empty for a model without a head."""
    if not number(config, "num_nextn_predict_layers"):
        return ""
    return MTP_PLACES.get(family(config), "").format(number(config, "num_hidden_layers"))


def text_config(config: Config) -> Config:
    """Return the fields of the language model, which some families keep apart from other parts."""
    return {**_FILLED_IN.get(family(config), {}), **config, **table(config, "text_config")}


def table(config: Config, name: str) -> Config:
    """Return an object in config.json, empty if it is missing. Raises ModelError if it is something else."""
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {name} is {value!r}, not an object", Code.MODEL_INVALID)
    return value


def number(config: Config, *names: str) -> int:
    """Return the first of these sizes that is there, or 0. Raises ModelError if it is no whole number."""
    for name in names:
        value = config.get(name) or 0
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
            told = f"{value!r:.40}"
            raise ModelError(f"config.json: {name} is {told}, not a whole number", Code.MODEL_INVALID)
        if value:
            return value
    return 0


def quantization(config: Config) -> Config:
    """Return how the weights are quantized; empty for plain ones. Raises ModelError as `table`."""
    return table(config, "quantization") or table(config, "quantization_config")


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
        """Return why `ranks` ranks cannot divide the model, each reason once; () if they can."""
        if ranks == 1:
            return ()
        found = (dimension.obstacle(ranks, self.group) for dimension in self.each)
        return tuple(dict.fromkeys(filter(None, found)))


def dimensions_of(config: Config) -> Dimensions:
    """Return the sizes that ranks divide. Raises ModelError (MODEL_INVALID) for one that is no number.

    The layers of most families, cut without these checks, would floor their head counts and go wrong later.
    """
    return Dimensions(tuple(_dimensions(config)), number(quantization(config), "group_size") or 1)


def _dimensions(config: Config) -> Iterator[Dimension]:
    text, name = text_config(config), family(config)
    heads = number(text, "num_attention_heads")
    kv_heads = number(text, "num_key_value_heads") or heads
    head_dim = number(text, "head_dim") or number(text, "hidden_size") // max(heads, 1)
    yield Dimension("attention heads", heads, "attention output", head_dim)
    yield Dimension("KV heads", kv_heads, copies=name in COPIES_KV_HEADS)
    experts = number(text, "moe_intermediate_size")
    if not (name in KEEPS_MLP_WHOLE and experts):
        yield _width("intermediate size", number(text, "intermediate_size"))
    yield _width("expert intermediate size", experts)
    if name in ("gemma4", "gemma4_text"):
        yield Dimension("attention heads", heads, "global attention output", number(text, "global_head_dim"))
        global_heads = number(text, "num_global_key_value_heads")
        yield Dimension("global KV heads", global_heads, copies=True)
    if name in ("llama4", "llama4_text"):
        yield _width("dense intermediate size", number(text, "intermediate_size_mlp"))
    if name in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        keys, values = number(text, "linear_num_key_heads"), number(text, "linear_num_value_heads")
        width = values * number(text, "linear_value_head_dim") // max(keys, 1)
        yield Dimension("linear key heads", keys, "linear attention output", width)
        yield _width("shared expert intermediate size", number(text, "shared_expert_intermediate_size"))
    if name == "nemotron_h":
        groups, inner = number(text, "n_groups"), number(text, "mamba_num_heads")
        width = inner * number(text, "mamba_head_dim") // max(groups, 1)
        yield Dimension("Mamba groups", groups, "Mamba output", width)
        yield _width("shared expert intermediate size", number(text, "moe_shared_expert_intermediate_size"))


def _width(what: str, size: int) -> Dimension:
    return Dimension(what, size, what)
