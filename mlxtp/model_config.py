"""Fields of config.json: families, MTP heads, quantizations. Pure. Wrong types raise ModelError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import Code, ModelError

# --- families, by mlx-lm's names ------------------------------------------------------------------------

#: Other names of families, from mlx-lm's own table. A test compares the two.
ALSO_CALLED = {
    "mistral": "llama", "iquestcoder": "llama", "xverse": "llama", "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3", "minimax_m2": "minimax", "deepseek_v41_text": "deepseek_v41",
    "llava": "mistral3", "phi-msft": "phixtral", "falcon_mamba": "mamba", "qwen2_5_vl": "qwen2_vl",
    "gemma4_unified": "gemma4",
}  # fmt: skip

#: Families of mlx-vlm that mlx-lm lacks and that run here.
VLM_FAMILIES = frozenset(
    {"cohere2_moe", "deepseek_v4", "glm5_next", "hy_v4", "mimo_v2", "qwen4_exp", "step3p7"}
)

_NEXT_N = "model.layers.{}."  # with the index after the model's own layers
#: Prefix of an MTP head's tensors, by family. Only the first of several heads is used.
MTP_PLACES = {
    "deepseek_v3": _NEXT_N, "glm4_moe": _NEXT_N, "glm4_moe_lite": _NEXT_N, "llama": _NEXT_N,
    "mimo": "model.mtp_layers.0.", "qwen3_5": "mtp.", "qwen3_5_moe": "mtp.", "qwen3_next": "mtp.",
}  # fmt: skip


# --- fields ---------------------------------------------------------------------------------------------

Config = Mapping[str, Any]

ASSUMED_CONTEXT = 4096  #: Tokens that a model supports if its configuration does not say.
_MOST = 1 << 48  #: More than any size of a model.
_GEMMA: Config = {"head_dim": 256, "num_key_value_heads": 1, "vocab_size": 262144}
_GEMMA4: Config = {**_GEMMA, "num_attention_heads": 8, "global_head_dim": 512}
#: Fields that published configurations omit, as mlx-lm's modules fill them in.
_FILLED_IN: Mapping[str, Config] = {
    "gemma3": {**_GEMMA, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
    "gemma3_text": {**_GEMMA, "num_attention_heads": 4},
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
}

#: Fields for the number of layers of an MTP head.
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def family(config: Config) -> str:
    name = str(config.get("model_type", ""))
    return ALSO_CALLED.get(name, name)


def mtp_place(config: Config) -> str:
    """Return the prefix of an MTP head's tensors; "" if the model has no head."""
    text, place = text_config(config), MTP_PLACES.get(family(config), "")
    named = number(text, *MTP_LAYERS) or family(config) == "qwen3_next"  # its configuration does not say
    return place.format(number(text, "num_hidden_layers")) if named else ""


def name_in_head(name: str, place: str) -> str:
    """Return a tensor's name within an MTP head at `mtp_place`; "" for tensors elsewhere."""
    name = name.removeprefix("language_model.")  # added by conversions of vision models
    return name.removeprefix(place) if name.startswith(place) else ""


def text_config(config: Config) -> Config:
    """Return the fields of the language model, which some families nest."""
    return {**_FILLED_IN.get(family(config), {}), **config, **table(config, "text_config")}


def table(config: Config, name: str) -> Config:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {name} is {value!r}, not an object", Code.MODEL_INVALID)
    return value


def context_length(config: Config) -> int:
    length = text_config(config).get("max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else ASSUMED_CONTEXT


def number(config: Config, *names: str) -> int:
    """Return the first of these sizes that is there, or 0."""
    for name in names:
        value = config.get(name) or 0
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
            told = f"{value!r:.40}"
            raise ModelError(f"config.json: {name} is {told}, not a whole number", Code.MODEL_INVALID)
        if value:
            return value
    return 0


# --- quantizations --------------------------------------------------------------------------------------

_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")  # MLX's
_MXFP4: Config = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
#: Formats of other tools: mlx-lm's conversion, and the families that it reads them for; () for all. FP8
#: becomes plain weights, larger than their files. Tests load FP8, AWQ and packed integers.
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
    """Return `quantization`, which is MLX's, or else `quantization_config`."""
    text = table(config, "text_config")
    for name in ("quantization", "quantization_config"):
        if found := table(config, name) or table(text, name):
            return {name: found}
    return {}


def quantization(config: Config) -> Config:
    """Return MLX's table for the loaded weights; empty for plain ones."""
    told = next(iter(quantizations(config).values()), {})
    if not (name := _format(told)):
        return told
    plain = [told.get("modules_to_not_convert"), told.get("ignore"), ["lm_head", "model.embed_tokens"]]
    paths = [path for each in plain if isinstance(each, list) for path in each if isinstance(path, str)]
    group = {"group_size": number(told, "group_size") or 128} if name == "awq" else {}
    return {**_FORMATS.get(name, ({}, ()))[0], **group, **dict.fromkeys(paths, False)}


def expands(config: Config) -> bool:
    """Return True if mlx-lm expands the weights that are on disk."""
    return _format(quantizations(config).get("quantization_config", {})) == "fp8"


def unreadable(config: Config) -> str:
    """Return why mlx-lm cannot read the weights as they are quantized."""
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
    """Return the format of weights in `quantization_config`; "" if it names no method."""
    method = told.get("quant_method")
    if method == "compressed-tensors":
        return str(told.get("format"))
    if method == "modelopt":
        return str((table(told, "quantization") or told).get("quant_algo"))
    if method == "fp8" and told.get("scale_fmt") == "ue8m0" and told.get("weight_block_size") == [32, 32]:
        return "mxfp8"
    return str(method or "")
