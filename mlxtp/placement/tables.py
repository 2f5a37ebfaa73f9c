"""Tables of chips, of published models and of their MTP heads. Pure data; every number has its source.

bandwidth    of the memory: Apple's technical specifications of the Macs with that chip. An M5 Ultra's is
             given as 1.2 TB/s, and published as 1,229 GB/s with 64 and with 80 cores. An M6's is given as 170
             GB/s with 12 cores; that the one with 160 has 10 is an assumption.
flops        of 16-bit matrix products on the GPU, a core: clock x 128 lanes x 2, which is Apple's figure for
             the M1 (2.6 TFLOPS on 8 cores) and, for later ones, what cores and clocks give (14.2 on an M3 Max
             of 40 cores, 18.4 on an M4 Max of 40). M5 cores have matrix units; Apple names more than four
             times an M4's peak for such work. M6 cores count as M5 cores.
efficiency   share of the memory's bandwidth that a decode reaches: see `SINGLE` and `FUSED`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from ..model_config import Config

SINGLE = 0.90  #: Share of the specified bandwidth that decoding reaches on a chip of one die.
#: The same on an Ultra, which is two dies. Both are fitted, together with `cost_model.KERNEL_S`, to published
#: decode speeds of single Macs; others measured 244 of 273 GB/s on an M4 Pro, and 650 to 690 of 819 on an M3
#: Ultra.
FUSED = 0.80
CPU_EFFICIENCY = 0.5  #: The same for machines without a known GPU; an assumption.


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip. `bandwidth` in bytes/s, `flops` of its whole GPU in 1/s, `gpu_cores` 0 if unknown.

    known         False if its name is not in the table and the numbers are those of a similar chip
    thunderbolt5  whether Macs with it have Thunderbolt 5, without which there is no RDMA
    ports         cables with RDMA that Macs with it take at once; Mac Studios have one more port without
    """

    name: str
    bandwidth: float
    efficiency: float
    gpu_cores: int
    flops: float
    thunderbolt5: bool = False
    ports: int = 3
    known: bool = True

    @property
    def reading(self) -> float:
        """Bytes a second that a decode reads."""
        return self.bandwidth * self.efficiency


#: GB/s by chip and GPU cores. The most cores come first and stand for a chip whose cores are not known.
_GBPS: Mapping[str, Mapping[int, float]] = {
    "M1": {8: 68.25, 7: 68.25},
    "M1 Pro": {16: 200, 14: 200},
    "M1 Max": {32: 400, 24: 400},
    "M1 Ultra": {64: 800, 48: 800},
    "M2": {10: 100, 8: 100},
    "M2 Pro": {19: 200, 16: 200},
    "M2 Max": {38: 400, 30: 400},
    "M2 Ultra": {76: 800, 60: 800},
    "M3": {10: 100, 8: 100},
    "M3 Pro": {18: 150, 14: 150},
    "M3 Max": {40: 400, 30: 300},
    "M3 Ultra": {80: 819, 60: 819},
    "M4": {10: 120, 8: 120},
    "M4 Pro": {20: 273, 16: 273},
    "M4 Max": {40: 546, 32: 410},
    "M5": {10: 153, 8: 153},
    "M5 Pro": {20: 307, 16: 307},
    "M5 Max": {40: 614, 32: 460},
    "M5 Ultra": {80: 1229, 64: 1229},
    "M6": {12: 170, 10: 160},
}
#: 16-bit FLOPS of a GPU core, by generation.
_CORE_FLOPS = {1: 0.325e12, 2: 0.36e12, 3: 0.355e12, 4: 0.46e12, 5: 1.84e12, 6: 1.84e12}
_THUNDERBOLT5 = frozenset({"M3 Ultra", "M4 Pro", "M4 Max", "M5 Pro", "M5 Max", "M5 Ultra"})
_PORTS, _ULTRA_PORTS = 3, 5
#: An unknown machine: two channels of its memory, and a few cores' worth of arithmetic. Assumptions.
_CPU = Chip("", 20e9, CPU_EFFICIENCY, 0, 0.2e12, known=False)

_NAME = re.compile(r"\bApple M(\d+)(?: (Pro|Max|Ultra))?\b", re.IGNORECASE)


def chip(name: str, gpu_cores: int = 0) -> Chip:
    """Return the chip that Apple calls `name` ("Apple M3 Ultra"), with so many GPU cores (0: its largest).

    A chip that is newer than the table counts as the newest of its kind in it; anything else as a plain
    computer. Both are marked as not known.
    """
    key, known = _entry(name)
    if not key:
        return replace(_CPU, name=name)
    cores = gpu_cores if gpu_cores in _GBPS[key] else next(iter(_GBPS[key]))
    ultra = key.endswith("Ultra")
    return Chip(
        name=name,
        bandwidth=_GBPS[key][cores] * 1e9,
        efficiency=FUSED if ultra else SINGLE,
        gpu_cores=gpu_cores or cores,
        flops=_CORE_FLOPS[_generation(key)] * (gpu_cores or cores),
        thunderbolt5=key in _THUNDERBOLT5,
        ports=_ULTRA_PORTS if ultra else _PORTS,
        known=known,
    )


def core_counts(name: str) -> tuple[int, ...]:
    """Return the numbers of GPU cores with which this chip is made; () for one that is not in the table."""
    key, known = _entry(name)
    return tuple(_GBPS[key]) if known else ()


def names() -> tuple[str, ...]:
    """Return all chips in the table, as Apple calls them."""
    return tuple(f"Apple {key}" for key in _GBPS)


def named(text: str) -> str:
    """Return Apple's name of the chip that a user means: "Apple M4 Pro" for "m4 pro". Empty if unknown."""
    return _BY_WORDS.get(_words(text), "")


def nearest(text: str) -> str:
    """Return the known chip whose name is most like `text`, or an empty string."""
    found = get_close_matches(_words(text), _BY_WORDS, n=1)
    return _BY_WORDS[found[0]] if found else ""


def _words(text: str) -> str:
    return " ".join(text.lower().split()).removeprefix("apple ")


_BY_WORDS = {_words(name): name for name in names()}


def _entry(name: str) -> tuple[str, bool]:
    """Return the chip's key in the table and True, or the most similar chip's key, if any, and False."""
    found = _NAME.search(name)
    if found is None:
        return "", False
    generation, tier = int(found[1]), (found[2] or "").capitalize()
    key = f"M{generation} {tier}".strip()
    if key in _GBPS:
        return key, True
    similar = [k for k in _GBPS if k.partition(" ")[2] == tier and _generation(k) <= generation]
    return max(similar, key=_generation, default=""), False


def _generation(key: str) -> int:
    return int(key[1:].partition(" ")[0])


# --- MTP heads: the share of first drafts that are right, by `model_type` ---------------------------------
# Where several figures are published, the lowest one counts.

ACCEPTED: Mapping[str, float] = {
    "deepseek_v3": 0.85,  # 85 to 90 %: DeepSeek-V3's report (arXiv 2412.19437), section 5.4.3
    "glm4_moe": 0.84,  # 84 % with GLM-4.5-Air in ik_llama.cpp #1992, over 90 % by vLLM's recipe for GLM-4.X
    "glm4_moe_lite": 0.9,  # over 90 %: the same recipe, which names GLM-4.7-Flash
    "mimo": 0.9,  # about 90 %: XiaomiMiMo/MiMo, README
    "qwen3_5": 0.65,  # Qwen3.8-27B, code, facts, prose: tenstorrent/vllm #442; 80 %: ml-explore/mlx-lm #990
    "qwen3_5_moe": 0.75,  # 75 to 80 %: waybarrios/vllm-mlx #245
}
ACCEPTED_UNKNOWN = 0.6  #: The same of any other family; an assumption.
#: Share of right drafts behind a right one, which the head makes from its own output. DeepSeek V3's gave 3.2
#: tokens a step with seven drafts (nebius/MTP-DeepSeek-V3-0324), GLM-5's more.
ACCEPTED_LATER = 0.6


# --- models that can be planned for without their files: the published config.json of each ---------------
# Only the fields that count are here. The quantizations are those of the usual MLX conversions. Where a
# conversion quantizes module by module, one module of each kind is enough.


def _affine(bits: int, **modules: object) -> Config:
    return {"quantization": {"group_size": 64, "bits": bits, **modules}}


_LLAMA_8B: Config = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
_LLAMA_70B: Config = {
    **_LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_QWEN3_235B: Config = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}
_QWEN_27B: Config = {
    "model_type": "qwen3_5",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_value_heads": 48,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mtp_num_hidden_layers": 1,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
}
_DEEPSEEK_V3: Config = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "n_group": 8,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}
_KIMI_K2: Config = {
    **_DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "n_group": 1,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
}
#: Kimi K2 Thinking was trained so that its routed experts have 4 bits; everything else has 16.
_PLAIN_BUT_EXPERTS: Config = {
    "quantization": {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": False,
        "model.layers.0.mlp.up_proj": False,
        "model.layers.1.self_attn.o_proj": False,
        "model.layers.1.self_attn.q_a_proj": False,
        "model.layers.1.mlp.shared_experts.up_proj": False,
        "lm_head": False,
    }
}
_LLAMA4_SCOUT: Config = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "vocab_size": 202048,
        "max_position_embeddings": 10485760,
    },
}
_LLAMA4_MAVERICK: Config = {
    **_LLAMA4_SCOUT,
    "text_config": {
        **_LLAMA4_SCOUT["text_config"],
        "num_local_experts": 128,
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1048576,
    },
}
_GLM_46: Config = {
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 151552,
    "max_position_embeddings": 202752,
}
_GLM_5: Config = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
}
_GPT_OSS_120B: Config = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "quantization": {
        "group_size": 32,
        "bits": 4,
        "mode": "mxfp4",
        "model.embed_tokens": {"group_size": 64, "bits": 8, "mode": "affine"},
        "model.layers.0.self_attn.q_proj": {"group_size": 64, "bits": 8, "mode": "affine"},
        "lm_head": {"group_size": 64, "bits": 8, "mode": "affine"},
    },
}

_QWEN3_NEXT: Config = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}
_QWEN36_35B: Config = {
    **_QWEN3_NEXT,
    "model_type": "qwen3_5_moe",
    "num_hidden_layers": 40,
    "mtp_num_hidden_layers": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 248320,
}
_QWEN35_397B: Config = {
    **_QWEN3_NEXT,
    "model_type": "qwen3_5_moe",
    "hidden_size": 4096,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "linear_num_value_heads": 64,
    "vocab_size": 248320,
}
_GEMMA4_31B: Config = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
    },
}
_GEMMA4_26B: Config = {
    "model_type": "gemma4",
    "text_config": {
        **_GEMMA4_31B["text_config"],
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}
_NEMOTRON3_SUPER: Config = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 512,
    "n_shared_experts": 1,
    "num_experts_per_tok": 22,
    "moe_latent_size": 1024,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
}

#: Configurations by the names that `mlxtp plan --model` accepts.
KNOWN: Mapping[str, Config] = {
    "llama-3.1-8b-4bit": {**_LLAMA_8B, **_affine(4)},
    "llama-3.1-8b-8bit": {**_LLAMA_8B, **_affine(8)},
    "llama-3.1-8b-bf16": _LLAMA_8B,
    "llama-3.3-70b-4bit": {**_LLAMA_70B, **_affine(4)},
    "llama-3.3-70b-8bit": {**_LLAMA_70B, **_affine(8)},
    "llama-3.3-70b-bf16": _LLAMA_70B,
    "qwen3.6-27b-4bit": {**_QWEN_27B, **_affine(4)},
    "qwen3.6-27b-8bit": {**_QWEN_27B, **_affine(8)},
    "qwen3.6-35b-a3b-4bit": {**_QWEN36_35B, **_affine(4)},
    "qwen3.6-35b-a3b-8bit": {**_QWEN36_35B, **_affine(8)},
    "qwen3.5-397b-a17b-4bit": {**_QWEN35_397B, **_affine(4)},
    "qwen3.5-397b-a17b-8bit": {**_QWEN35_397B, **_affine(8)},
    "qwen3-next-80b-a3b-4bit": {**_QWEN3_NEXT, **_affine(4)},
    "qwen3-next-80b-a3b-8bit": {**_QWEN3_NEXT, **_affine(8)},
    "gemma-4-26b-a4b-4bit": {**_GEMMA4_26B, **_affine(4)},
    "gemma-4-26b-a4b-8bit": {**_GEMMA4_26B, **_affine(8)},
    "gemma-4-31b-4bit": {**_GEMMA4_31B, **_affine(4)},
    "gemma-4-31b-8bit": {**_GEMMA4_31B, **_affine(8)},
    "nemotron-3-super-120b-a12b-4bit": {**_NEMOTRON3_SUPER, **_affine(4)},
    "nemotron-3-super-120b-a12b-8bit": {**_NEMOTRON3_SUPER, **_affine(8)},
    "qwen3-235b-a22b-4bit": {**_QWEN3_235B, **_affine(4)},
    "qwen3-235b-a22b-8bit": {**_QWEN3_235B, **_affine(8)},
    "gpt-oss-120b": _GPT_OSS_120B,
    "llama-4-scout-4bit": {**_LLAMA4_SCOUT, **_affine(4)},
    "llama-4-scout-8bit": {**_LLAMA4_SCOUT, **_affine(8)},
    "llama-4-maverick-4bit": {**_LLAMA4_MAVERICK, **_affine(4)},
    "llama-4-maverick-6bit": {**_LLAMA4_MAVERICK, **_affine(6)},
    "glm-4.6-4bit": {**_GLM_46, **_affine(4)},
    "glm-4.6-8bit": {**_GLM_46, **_affine(8)},
    "glm-5-4bit": {**_GLM_5, **_affine(4)},
    "glm-5-mxfp8": {**_GLM_5, "quantization": {"group_size": 32, "bits": 8, "mode": "mxfp8"}},
    "deepseek-v3.1-4bit": {**_DEEPSEEK_V3, **_affine(4)},
    "deepseek-v3.1-8bit": {**_DEEPSEEK_V3, **_affine(8)},
    "kimi-k2-4bit": {**_KIMI_K2, **_affine(4)},
    "kimi-k2-thinking": {**_KIMI_K2, **_PLAIN_BUT_EXPERTS},
}
