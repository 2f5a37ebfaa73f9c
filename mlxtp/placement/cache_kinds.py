"""Kinds of KV caches by model family, and what the engine leaves out with each. Pure."""

from __future__ import annotations

from dataclasses import dataclass

#: Families with windows of tokens in every model.
_WINDOWS = frozenset(
    ("afmoe", "cohere2", "exaone4", "exaone_moe", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text",
     "gpt_oss", "iquestloopcoder", "laguna", "mellum", "mimo_v2_flash", "muse_glimmer", "muse_spark", "olmo3",
     "plamo3", "spark2_5")
)  # fmt: skip
#: Families with windows in the layers that their configuration calls sliding.
_WINDOWS_IN_SOME = frozenset(("llama", "ministral3", "mistral3", "step3p5"))
#: Families with recurrent states, some of them beside windows.
_STATES = frozenset(
    ("baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "falcon_h1", "gear",
     "granitemoehybrid", "jamba", "kimi_k3", "kimi_linear", "lfm2", "lfm2_moe", "longcat_flash_ngram",
     "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "plamo2", "prism_hadamard_qwen35", "qwen3_5",
     "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv7")
)  # fmt: skip
_LISTS = frozenset(("deepseek_v32", "glm_moe_dsa", "longcat_flash", "minimax_m3_vl"))
_COMPRESSED = frozenset(("deepseek_v41",))
_CHUNKS = frozenset(("llama4",))


@dataclass(frozen=True, slots=True)
class CacheTraits:
    """One kind of KV caches. `off` names what is left out, and `why`; both empty where nothing is.

    `cuttable`: a kept cache serves from any of its tokens on, not only as a whole.
    """

    name: str
    cuttable: bool = True
    off: str = ""
    why: str = ""


_NOT_WIDE = "drafts, forced tokens, several prompts in one forward, quantized KV"
ALONE = "requests at once"  #: Among `off`: no two requests are decoded together.
PLAIN = CacheTraits("keys and values")
LISTS = CacheTraits(
    "keys and values, with an index", off=_NOT_WIDE, why="rows of a batch cannot roll back one by one"
)
WINDOWS = CacheTraits(
    "windows of tokens", cuttable=False, off=_NOT_WIDE, why="what a window has dropped cannot come back"
)
STATES = CacheTraits(
    "recurrent states", cuttable=False, off=_NOT_WIDE, why="a state cannot be rolled back to fewer tokens"
)
COMPRESSED = CacheTraits(
    "compressed groups",
    cuttable=False,
    off=f"{_NOT_WIDE}, {ALONE}",
    why="closed groups cannot be opened, nor caches be joined",
)
CHUNKS = CacheTraits(
    "chunks of tokens",
    cuttable=False,
    off=f"{_NOT_WIDE}, {ALONE}",
    why="what is before a chunk cannot come back, nor can mlx-lm join such caches",
)


def traits_of(family: str, layer_types: object = ()) -> CacheTraits:
    """Return the kind of a family's caches; `layer_types` as in config.json."""
    sliding = isinstance(layer_types, list | tuple) and "sliding_attention" in layer_types
    kinds = (
        (_STATES, STATES),
        (_WINDOWS, WINDOWS),
        (_LISTS, LISTS),
        (_COMPRESSED, COMPRESSED),
        (_CHUNKS, CHUNKS),
    )
    for families, traits in kinds:
        if family in families:
            return traits
    return WINDOWS if sliding and family in _WINDOWS_IN_SOME else PLAIN
