"""Fields of config.json: families and the ways in which ranks can share them, sizes to be divided. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import Code, ModelError

# --- families, by mlx-lm's names ------------------------------------------------------------------------

#: Other names of families, by mlx-lm's own table. A test compares the two tables.
ALSO_CALLED = {
    "mistral": "llama", "iquestcoder": "llama", "xverse": "llama", "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3", "minimax_m2": "minimax", "deepseek_v41_text": "deepseek_v41",
    "llava": "mistral3", "phi-msft": "phixtral", "falcon_mamba": "mamba", "qwen2_5_vl": "qwen2_vl",
    "gemma4_unified": "gemma4",
}  # fmt: skip

#: Families that mlx-lm itself can divide among ranks. A test compares this with the installed mlx-lm.
DIVIDED_BY_MLX_LM = frozenset(
    ("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "exaone_moe", "glm4_moe", "glm4_moe_lite",
     "glm_moe_dsa", "gpt_oss", "iquestloopcoder", "kimi_k25", "kimi_k3", "llama", "longcat_flash",
     "longcat_flash_ngram", "minimax", "minimax_m3_vl", "ministral3", "mistral4", "muse_spark",
     "prism_hadamard_qwen35", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "solar_open",
     "step3p5")
)  # fmt: skip
#: Families that `engine/families.py` divides. A test compares this with its table.
DIVIDED_HERE = frozenset(
    ("cohere2", "dots1", "ernie4_5_moe", "exaone4", "gemma3", "gemma3_text", "gemma4", "gemma4_text",
     "granite", "granitemoe", "kimi_vl", "llama4", "llama4_text", "mistral3", "mixtral", "nemotron_h",
     "olmo2", "olmo3", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "seed_oss")
)  # fmt: skip
TENSOR_FAMILIES = DIVIDED_BY_MLX_LM | DIVIDED_HERE

#: Families that hand over to another family's `shard`, which copies no KV heads.
_HANDED_OVER = frozenset({"kimi_vl", "mistral3", "qwen3_vl", "qwen3_vl_moe"})
#: Families in which several ranks have the same KV head if there are fewer heads than ranks.
COPIES_KV_HEADS = frozenset({"qwen3_5", "qwen3_5_moe"}) | (DIVIDED_HERE - _HANDED_OVER)
#: Families whose few dense MLPs stay whole on each rank where ranks cannot share them, beside experts.
KEEPS_MLP_WHOLE = frozenset({"deepseek_v2", "glm4_moe"})

#: mlx-lm's modules whose layers a test has cut into stages, with the same text as one rank's.
PIPELINE_FAMILIES = frozenset(
    ("afmoe", "apertus", "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "bailing_moe_v3", "cohere",
     "cohere2", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5", "ernie4_5_moe",
     "exaone4", "exaone_moe", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4",
     "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granite",
     "granitemoe", "granitemoehybrid", "hunyuan", "hunyuan_v1_dense", "internlm2", "internlm3", "jamba",
     "kimi_k25", "kimi_linear", "kimi_vl", "Klear", "laguna", "lfm2", "lfm2_moe", "llama", "llama4",
     "llama4_text", "longcat_flash", "longcat_flash_ngram", "mellum", "mimo", "mimo_v2_flash", "minicpm",
     "minimax", "minimax_m3_vl", "ministral3", "mistral3", "mistral4", "mixtral", "muse_glimmer", "nemotron",
     "nemotron_h", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
     "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3",
     "solar_open", "stablelm", "starcoder2", "step3p5", "telechat3", "youtu_llm")
)  # fmt: skip

_NEXT_N = "model.layers.{}."  # behind the model's own layers, whose number it has
#: Where the tensors of an MTP head begin, by the family. Only the first head of several is used.
MTP_PLACES = {
    "deepseek_v3": _NEXT_N, "glm4_moe": _NEXT_N, "glm4_moe_lite": _NEXT_N, "llama": _NEXT_N,
    "mimo": "model.mtp_layers.0.", "qwen3_5": "mtp.", "qwen3_5_moe": "mtp.", "qwen3_next": "mtp.",
}  # fmt: skip


# --- fields ---------------------------------------------------------------------------------------------

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


#: Fields for the number of layers in an MTP head.
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def family(config: Config) -> str:
    """Return mlx-lm's name of the family; empty if the configuration has none."""
    name = str(config.get("model_type", ""))
    return ALSO_CALLED.get(name, name)


def mtp_place(config: Config) -> str:
    """Return what names of an MTP head's tensors begin with; empty for a model without a head."""
    text, place = text_config(config), MTP_PLACES.get(family(config), "")
    named = number(text, *MTP_LAYERS) or family(config) == "qwen3_next"  # whose configuration does not say
    return place.format(number(text, "num_hidden_layers")) if named else ""


def name_in_head(name: str, place: str) -> str:
    """Return a tensor's name in an MTP head at `mtp_place`; empty for tensors elsewhere.

    Conversions of models that also see put the language model's name before it.
    """
    name = name.removeprefix("language_model.")
    return name.removeprefix(place) if name.startswith(place) else ""


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


# --- quantizations --------------------------------------------------------------------------------------

_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")  # of MLX
_MXFP4: Config = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
#: Formats that others write: what mlx-lm makes of them, and the families of which it reads them; () for all.
#: FP8 becomes plain weights, which are larger than their files. Tests load FP8, AWQ and packed integers.
_FORMATS: Mapping[str, tuple[Config, tuple[str, ...]]] = {
    "awq": ({"bits": 4, "group_size": 128}, ()),
    "bitnet": ({"bits": 2}, ()),
    "fp8": (
        {},
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k25", "mimo_v2_flash", "minimax", "mistral4"),
    ),
    "mxfp4": (_MXFP4, ("gpt_oss",)),
    "mxfp4-pack-quantized": (_MXFP4, ("kimi_k3",)),
    "mxfp8": ({"bits": 8, "group_size": 32, "mode": "mxfp8"}, ("deepseek_v41", "minimax_m3_vl")),
    "NVFP4": ({"bits": 4, "group_size": 16, "mode": "nvfp4"}, ("muse_spark",)),
    "pack-quantized": ({"bits": 4, "group_size": 32}, ("deepseek_v3", "kimi_k25", "mistral4")),
}
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def quantizations(config: Config) -> dict[str, Config]:
    """Return `quantization`, which is MLX's, or else `quantization_config`, also of the language model alone.

    Raises ModelError as `table`.
    """
    text = table(config, "text_config")
    for name in ("quantization", "quantization_config"):
        if found := table(config, name) or table(text, name):
            return {name: found}
    return {}


def quantization(config: Config) -> Config:
    """Return the table of MLX for the loaded weights; empty for plain ones. Raises ModelError as `table`."""
    told = next(iter(quantizations(config).values()), {})
    if not (name := _format(told)):
        return told
    plain = [told.get("modules_to_not_convert"), told.get("ignore"), ["lm_head", "model.embed_tokens"]]
    paths = [path for each in plain if isinstance(each, list) for path in each if isinstance(path, str)]
    group = {"group_size": number(told, "group_size") or 128} if name == "awq" else {}
    return {**_FORMATS.get(name, ({}, ()))[0], **group, **dict.fromkeys(paths, False)}


def expands(config: Config) -> bool:
    """Return whether mlx-lm makes larger weights of those on the disk. Raises ModelError as `table`."""
    return _format(quantizations(config).get("quantization_config", {})) == "fp8"


def unreadable(config: Config) -> str:
    """Return why mlx-lm cannot read the weights as they are quantized; "" if it can.

    Raises ModelError as `table`.
    """
    told = quantizations(config)
    if mine := told.get("quantization"):
        mode = mine.get("mode", "affine")
        return "" if mode in _MODES else f"its weights are quantized in the mode {mode!r:.40}, unknown to MLX"
    if not (other := told.get("quantization_config")):
        return ""
    name, text = _format(other), text_config(config)
    known = family(text if family(config) == "mistral3" else config)
    families = _FORMATS.get(name, ({}, ("",)))[1]
    packed = (other.get("bits", 4), str(other.get("version", "gemm")).lower(), number(text, *_EXPERTS))
    flaw = {
        "awq": packed != (4, "gemm", 0),
        "fp8": (other.get("weight_block_size") or [128, 128]) != [128, 128],
    }
    if not flaw.get(name) and (not families or known in families):
        return ""
    method = str(other.get("quant_method", "a method without a name"))
    words = method if name in ("", method) else f"{method} ({name})"
    return (
        f"its weights are quantized by {words:.80}, which mlx-lm cannot read for the family {known!r}; use a "
        "conversion for MLX, or the weights that are not quantized"
    )


def _format(told: Config) -> str:
    """Return the format of the weights that `quantization_config` names; empty if it names no method."""
    method = told.get("quant_method")
    if method == "compressed-tensors":
        return str(told.get("format"))
    if method == "modelopt":
        return str((table(told, "quantization") or told).get("quant_algo"))
    if method == "fp8" and told.get("scale_fmt") == "ue8m0" and told.get("weight_block_size") == [32, 32]:
        return "mxfp8"
    return str(method or "")


# --- sizes that ranks divide ----------------------------------------------------------------------------


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
