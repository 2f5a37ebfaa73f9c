"""Configurations of tiny models, one for each family: as little as still has every kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

Config = Mapping[str, Any]


def of(*others: Config, **fields: Any) -> Config:
    """Return the fields of others, of which a later one counts, and further ones."""
    return {name: value for each in (*others, fields) for name, value in each.items()}


FOUR = of(num_hidden_layers=4)
SIZES = of(hidden_size=64, intermediate_size=128, num_attention_heads=4)
HEADS = of(num_key_value_heads=2, head_dim=16)
THETA, ROOM = of(rope_theta=10000.0), of(max_position_embeddings=512)
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
WINDOW = of(sliding_window=8)
WINDOWED = of(WINDOW, layer_types=WINDOWS)
#: Attention over compressed keys and values.
_COMPRESSED = of(kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16)
LATENT = of(_COMPRESSED, num_key_value_heads=4)
INDEXED = of(index_head_dim=32, index_n_heads=4, index_topk=8)

TWO = of(num_experts_per_tok=2)
FEW_EXPERTS, LOCAL_EXPERTS = of(TWO, num_experts=4), of(TWO, num_local_experts=4)
NARROW, SHARED_NARROW = of(moe_intermediate_size=64), of(shared_expert_intermediate_size=64)
GROUPED = of(n_group=1, topk_group=1)
ROUTED = of(NARROW, TWO, GROUPED, n_routed_experts=4, n_shared_experts=1, norm_topk_prob=True)
EXPERTS = of(ROUTED, routed_scaling_factor=1.0, first_k_dense_replace=1)
QWEN_MOE = of(FEW_EXPERTS, NARROW, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True)
BAILING = of(QWEN_MOE, GROUPED, num_shared_experts=1, first_k_dense_replace=1)
EXAONE_MOE = of(QWEN_MOE, WINDOW, num_shared_experts=1)

KEYS = of(linear_key_head_dim=16, linear_num_key_heads=2)
LINEAR = of(KEYS, linear_value_head_dim=16, linear_num_value_heads=4)
QWEN3_5 = of(SIZES, HEADS, LINEAR, ROOM, num_hidden_layers=2, full_attention_interval=2)
DEEPSEEK = of(SIZES, ROOM, LATENT, EXPERTS, num_hidden_layers=2)
LONGCAT = of(
    LATENT,
    of(attention_method="MLA", attention_bias=False, mla_scale_q_lora=True, mla_scale_kv_lora=True),
    of(num_layers=2, ffn_hidden_size=128, expert_ffn_hidden_size=64, n_routed_experts=4, moe_topk=2),
    of(zero_expert_num=1, zero_expert_type="identity", routed_scaling_factor=1.0),
)
NGRAMS = of(hidden_size=72, ngram_vocab_size_ratio=2)
STEP = of(
    of(WINDOW, NARROW, num_attention_groups=2, moe_num_experts=4, moe_top_k=2, share_expert_dim=64),
    moe_layers_enum="1",
)
SCALED_LATER = of(THETA, original_max_position_embeddings=512, llama_4_scaling_beta=0.1)
DEFAULT_ROPE = of(THETA, rope_type="default")

FAMILIES: Mapping[str, Config] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "ministral3": {"rope_parameters": of(SCALED_LATER, rope_type="default")},
    "qwen3_moe": QWEN_MOE,
    "gpt_oss": of(LOCAL_EXPERTS, WINDOW),
    "deepseek_v2": of(
        of(LATENT, EXPERTS, topk_method="greedy"),
        rope_scaling={"type": "yarn", "factor": 2.0, "mscale_all_dim": 0.7},
    ),
    "deepseek_v3": of(LATENT, EXPERTS),
    "deepseek_v32": of(LATENT, EXPERTS, INDEXED),
    "glm4_moe": of(
        EXPERTS, rope_scaling=None, use_qk_norm=True, attention_bias=False, partial_rotary_factor=0.5
    ),
    "glm4_moe_lite": of(LATENT, EXPERTS),
    "exaone_moe": of(EXAONE_MOE, layer_types=WINDOWS[:2], is_moe_layer=[False, True]),
    "minimax": of(LOCAL_EXPERTS, shared_intermediate_size=64, rotary_dim=8),
    "mistral4": of(LATENT, EXPERTS, rope_parameters=SCALED_LATER),
    "iquestloopcoder": {},
    "step3p5": of(STEP, layer_types=["full_attention", "full_attention"]),
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": of(LONGCAT, NGRAMS),
    "qwen3_5": {"text_config": QWEN3_5},
    "qwen3_5_moe": {"text_config": of(QWEN3_5, QWEN_MOE, SHARED_NARROW)},
    "kimi_k25": {"text_config": DEEPSEEK},
    "solar_open": of(EXPERTS, partial_rotary_factor=0.5),
}


def asked_for(request: pytest.FixtureRequest, parameter: str) -> set[str]:
    """Return the values that tests of this run and file have for a parameter, as a module's fixture needs."""
    items = [
        each for each in request.session.items if each.path == request.path and hasattr(each, "callspec")
    ]
    return {each.callspec.params[parameter] for each in items if parameter in each.callspec.params}


NAMED = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""Families that are tried in all types."""

GEMMA = of(SIZES, FOUR, HEADS, WINDOW, sliding_window_pattern=2)
GEMMA4 = of(
    GEMMA, global_head_dim=32, num_kv_shared_layers=0, hidden_size_per_layer_input=0, layer_types=WINDOWS
)
TEXT = of(SIZES, FOUR, HEADS, THETA, ROOM, model_type="qwen3", rms_norm_eps=1e-5)
UNBIASED = of(attention_bias=False, mlp_bias=False)
GRANITE = of(
    of(UNBIASED, logits_scaling=2.0, attention_multiplier=0.25),
    of(embedding_multiplier=2.0, residual_multiplier=0.5),
)
SHORT_CONV = of(norm_eps=1e-5, conv_bias=False, conv_L_cache=3)
LFM = of(SHORT_CONV, layer_types=["conv", "full_attention", "conv", "full_attention"])
LFM_BLOCKS = of(
    block_dim=64, block_multiple_of=8, block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=False
)
MLA_MOE = of(topk_method="noaux_tc", scoring_func="sigmoid")
GRANITE_MAMBA = of(
    of(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_d_conv=4, mamba_n_groups=1),
    of(mamba_proj_bias=False, mamba_conv_bias=True),
)
NEMOTRON_MAMBA = of(
    of(mamba_num_heads=4, mamba_head_dim=16, mamba_proj_bias=False, ssm_state_size=16, conv_kernel=4),
    of(UNBIASED, n_groups=1, use_bias=False, use_conv_bias=True, layer_norm_epsilon=1e-5),
)
LONGROPE = of(
    of(type="longrope", short_factor=[1.0] * 8, long_factor=[1.0] * 8), short_mscale=1.0, long_mscale=1.0
)
LLAMA4 = of(
    of(TEXT, model_type="llama4_text", num_experts_per_tok=1, num_local_experts=4, intermediate_size_mlp=128),
    of(attention_bias=False, attention_chunk_size=8, interleave_moe_layer_step=2, use_qk_norm=True),
    of(rope_scaling=None, attn_temperature_tuning=4, floor_scale=4),
)
SPARSE = of(
    of(sparse_num_index_heads=2, sparse_index_dim=16, sparse_block_size=4, sparse_topk_blocks=2),
    of(sparse_local_block=1, sparse_attention_freq=[0, 0, 1, 1]),
)
MINIMAX_M3 = of(
    of(TEXT, LOCAL_EXPERTS, model_type="minimax_m3", dense_intermediate_size=128),
    of(shared_intermediate_size=64, moe_layer_freq=[0, 1, 1, 1], sparse_attention_config=SPARSE),
)
DELTA = of(of(kda_layers=[1, 3], full_attn_layers=[2, 4], num_heads=4, head_dim=16), short_conv_kernel_size=4)
#: Four layers of other families.
_QWEN3_5, _DEEPSEEK = of(QWEN3_5, FOUR), of(DEEPSEEK, FOUR)

PIPELINE: Mapping[str, Config] = {
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16.0},
    "gemma3": {"text_config": of(GEMMA, model_type="gemma3_text")},
    "gemma3_text": GEMMA,
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": of(
        GEMMA4, NARROW, enable_moe_block=True, num_experts=4, top_k_experts=2, attention_k_eq_v=True
    ),
    "mistral3": {"text_config": of(TEXT, model_type="llama")},
    "mixtral": LOCAL_EXPERTS,
    "qwen2_moe": of(QWEN_MOE, SHARED_NARROW),
    "qwen3_next": of(_QWEN3_5, QWEN_MOE, SHARED_NARROW, linear_conv_kernel_dim=4, partial_rotary_factor=0.5),
    "qwen3_vl": {"text_config": TEXT},
    "qwen3_vl_moe": of(text_config=of(TEXT, QWEN_MOE, model_type="qwen3_moe"), tie_word_embeddings=False),
    "glm": {},
    "glm4": of(attention_bias=True, partial_rotary_factor=0.5),
    "glm_moe_dsa": of(
        of(LATENT, EXPERTS, INDEXED, MLA_MOE),
        of(moe_layer_freq=1, attention_bias=False, rope_parameters=DEFAULT_ROPE),
    ),
    "llama4": {"text_config": LLAMA4},
    "llama4_text": of(intermediate_size_mlp=128, no_rope_layers=[1, 1, 1, 0], use_qk_norm=True),
    "exaone4": of(WINDOW, sliding_window_pattern="LG", rope_scaling={"rope_type": "default"}),
    "phi3": {},
    "phimoe": of(num_local_experts=4, rope_scaling=LONGROPE, original_max_position_embeddings=512),
    "olmo2": {},
    "olmo3": WINDOWED,
    "olmoe": FEW_EXPERTS,
    "cohere": {"logit_scale": 1.0},
    "cohere2": of(WINDOW, sliding_window_pattern=2, logit_scale=1.0),
    "granite": GRANITE,
    "granitemoe": of(GRANITE, LOCAL_EXPERTS),
    "granitemoehybrid": of(
        of(GRANITE, LOCAL_EXPERTS, GRANITE_MAMBA, layer_types=["mamba", "attention", "mamba", "attention"]),
        of(shared_intermediate_size=64, position_embedding_type="nope"),
    ),
    "seed_oss": {},
    "nemotron": of(hidden_act="relu2", norm_eps=1e-5),
    "nemotron_h": of(
        of(NEMOTRON_MAMBA, ROUTED, hybrid_override_pattern=["M", "E", "*", "M", "-", "*"]),
        of(moe_shared_expert_intermediate_size=64, routed_scaling_factor=1.0),
    ),
    "mimo": {},
    "mimo_v2_flash": of(
        of(EXPERTS, MLA_MOE, hybrid_layer_pattern=[0, 1, 1, 0], moe_layer_freq=[0, 1, 1, 1]),
        of(add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, layernorm_epsilon=1e-5),
        of(swa_rope_theta=10000.0, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16),
        of(sliding_window_size=8, v_head_dim=16, swa_v_head_dim=16, partial_rotary_factor=0.5),
    ),
    "dots1": EXPERTS,
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": of(
        of(NARROW, use_bias=False, moe_num_experts=4, moe_layer_start_index=1),
        of(moe_k=2, moe_num_shared_experts=1),
    ),
    "hunyuan": of(
        of(NARROW, attention_bias=False, moe_topk=2, num_experts=4, num_shared_expert=1),
        of(use_mixed_mlp_moe=True, use_qk_norm=True, use_cla=True, cla_share_factor=2),
        rope_scaling={"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    ),
    "hunyuan_v1_dense": {},
    "smollm3": {},
    "minimax_m3_vl": {"text_config": MINIMAX_M3},
    "kimi_linear": of(
        of(LATENT, QWEN_MOE, num_experts_per_token=2, num_shared_experts=1, first_k_dense_replace=1),
        of(model_max_length=512, linear_attn_config=DELTA),
    ),
    "kimi_vl": {"text_config": _DEEPSEEK},
    "deepseek": of(EXPERTS, num_key_value_heads=4),
    "bailing_moe": BAILING,
    "afmoe": of(WINDOWED, FEW_EXPERTS, NARROW, num_dense_layers=1),
    "apertus": of(UNBIASED, post_norm=False, qk_norm=True),
    "internlm2": {},
    "internlm3": {},
    "starcoder2": {"norm_epsilon": 1e-5},
    "stablelm": of(use_qkv_bias=True, partial_rotary_factor=0.5, layer_norm_eps=1e-5),
    "phi": {"num_key_value_heads": 4},
    "lfm2": of(LFM, LFM_BLOCKS),
    "lfm2_moe": of(LFM, QWEN_MOE, use_expert_bias=True, num_dense_layers=1),
    "Klear": of(QWEN_MOE, attention_bias=False, n_shared_experts=1),
    "minicpm": of(dim_model_base=32, scale_depth=1.4, scale_emb=2.0, tie_word_embeddings=False),
    "telechat3": {},
    "youtu_llm": LATENT,
    "laguna": of(WINDOWED, FEW_EXPERTS, NARROW, SHARED_NARROW, rope_parameters=None),
    "mellum": of(QWEN_MOE, WINDOWED, rope_parameters=dict.fromkeys(WINDOWS, DEFAULT_ROPE)),
    "muse_glimmer": WINDOWED,
    "falcon_h1": of(
        of(mamba_d_head=16, mamba_d_ssm=64, mamba_d_state=16, mamba_n_heads=4),
        of(embedding_multiplier=1.0, lm_head_multiplier=1.0),
    ),
    "jamba": of(
        of(attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2),
        of(FEW_EXPERTS, mamba_d_conv=4, mamba_d_state=16, mamba_expand=2),
    ),
    "kimi_k25": {"text_config": _DEEPSEEK},
    "longcat_flash": of(LONGCAT, num_layers=4),
    "longcat_flash_ngram": of(LONGCAT, NGRAMS, num_layers=4),
    "qwen3_5": {"text_config": _QWEN3_5},
    "qwen3_5_moe": {"text_config": of(_QWEN3_5, QWEN_MOE, SHARED_NARROW)},
    "exaone_moe": of(EXAONE_MOE, layer_types=WINDOWS, is_moe_layer=[False, True, True, True]),
    "step3p5": of(STEP, layer_types=WINDOWS, moe_layers_enum="1,3"),
    "bailing_hybrid": of(
        of(BAILING, LATENT, layer_group_size=2, group_norm_size=2, routed_scaling_factor=1.0),
        moe_shared_expert_intermediate_size=64,
    ),
    "bailing_moe_v3": of(BAILING, LATENT, layer_group_size=2, moe_shared_expert_intermediate_size=64),
    "bailing_moe_linear": of(BAILING, layer_group_size=2, group_norm_size=2),
}
"""Families of pipelines, with four layers for three ranks."""


def named(family: str, *others: Config, **fields: Any) -> Config:
    """Return another shape of a family."""
    return of(*others, **{"model_type": family, **fields})


OWN: Mapping[str, Config] = {
    **{
        family: PIPELINE[family]
        for family in (
            *("cohere2", "dots1", "ernie4_5_moe", "gemma3", "gemma3_text", "gemma4", "gemma4_text"),
            *("granite", "granitemoe", "kimi_vl", "llama4", "mistral3", "mixtral", "olmo2", "qwen3_next"),
            *("qwen3_vl", "qwen3_vl_moe"),
        )
    },
    "exaone4": of(PIPELINE["exaone4"], FOUR, layer_types=WINDOWS),
    "llama4_text": of(PIPELINE["llama4_text"], tie_word_embeddings=False),
    "nemotron_h": of(PIPELINE["nemotron_h"], n_groups=2),
    "olmo3": of(PIPELINE["olmo3"], FOUR),
    "seed_oss": of(attention_bias=True, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=False),
}
#: Two layers more than `GEMMA4` has, which read keys of others.
SIX = of(num_hidden_layers=6, layer_types=[*WINDOWS, *WINDOWS[:2]], num_kv_shared_layers=2)
PER_LAYER = of(hidden_size_per_layer_input=8, vocab_size_per_layer_input=512)
VARIANTS: Mapping[str, Config] = {
    "ernie4_5_moe-biased": named("ernie4_5_moe", OWN["ernie4_5_moe"], use_bias=True),
    # E2B: layers that read keys of others, wide MLPs there, and embeddings for single layers.
    "gemma4_text-shared": named("gemma4_text", GEMMA4, SIX, PER_LAYER, num_key_value_heads=1),
    # 31B: keys as values, and fewer heads of these in layers with all tokens.
    "gemma4_text-few": named("gemma4_text", GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1),
    "mistral3-ministral3": named(
        "mistral3", text_config=of(TEXT, FAMILIES["ministral3"], model_type="ministral3")
    ),
    "nemotron_h-latent": named(
        "nemotron_h",
        OWN["nemotron_h"],
        of(moe_latent_size=32, mlp_bias=True, attention_bias=True, mamba_proj_bias=True),
    ),
    "qwen3_next-dense": named("qwen3_next", OWN["qwen3_next"], mlp_only_layers=[1]),
    "olmo2-copied": named("olmo2", num_key_value_heads=1),
    "llama4-copied": named("llama4", text_config=of(LLAMA4, num_key_value_heads=1)),
}
"""Folder name -> what `write_model` takes, for other shapes of the same families."""

OLMO_HYBRID = of(LINEAR, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True, attention_bias=False)
RECURRENT_GEMMA = of(
    of(FOUR, head_dim=None, num_key_value_heads=1, attention_bias=False),
    of(conv1d_width=4, logits_soft_cap=30.0, attention_window_size=2048),
)
PLAMO2 = of(head_dim=None, hidden_size_per_head=32, mamba_num_heads=4, mamba_d_state=16, mamba_step=2)
#: Names of sizes that a family does not take from those that others share.
_NO_HEADS: Config = dict.fromkeys(("head_dim", "num_attention_heads", "num_key_value_heads"))
NO_SIZES = of(_NO_HEADS, hidden_size=None, intermediate_size=None, num_hidden_layers=None)
#: GPT-2's names of fields, instead of those that others share.
GPT = of(
    of(_NO_HEADS, hidden_size=None, num_hidden_layers=None),
    of(n_embd=64, n_head=4, n_layer=4, n_positions=512, layer_norm_epsilon=1e-5),
)
_UNLISTED_LFM = of(SHORT_CONV, LFM_BLOCKS)
_UNTOLD_QWEN = {name: value for name, value in QWEN3_5.items() if name != "full_attention_interval"}
MAMBA = of(FOUR, _NO_HEADS, state_size=16, conv_kernel=4, use_bias=False, use_conv_bias=True)
OTHERS: Mapping[str, Config] = {
    "afm7": of(NO_SIZES, hidden_dim=64, num_layers=6, num_kv_reuse_layers=2, num_heads=4, num_kv_heads=2),
    "baichuan_m1": of(
        of(FOUR, tie_word_embeddings=False, head_dim=None, conv_window=2, num_key_value_heads=1),
        of(sliding_window=20, sliding_window_layers=[1, 3]),
        of(num_swa_attention_heads=2, num_swa_key_value_heads=2),
    ),
    "bailing_moe_v3-rest": named(
        "bailing_moe_v3", PIPELINE["bailing_moe_v3"], num_hidden_layers=9, layer_group_size=4
    ),
    "dbrx": of(
        of(NO_SIZES, d_model=64, n_heads=4, n_layers=4),
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "deepseek_v41": of(
        of(FOUR, NARROW, TWO, num_key_value_heads=None, head_dim=32, q_lora_rank=32, qk_rope_head_dim=16),
        of(o_groups=2, o_lora_rank=16, n_routed_experts=4, hc_mult=2),
        of(WINDOW, compress_ratios=[0, 4, 4, 4], kv_source_layer_ids=[1], index_source_layer_ids=[1, 3]),
        of(index_n_heads=2, index_head_dim=32, index_topk=4),
    ),
    "exaone": of(num_hidden_layers=None, num_layers=4, layer_norm_epsilon=1e-5),
    "gear": of(FOUR, WINDOW, layer_types=["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]),
    "gemma3n": {
        "text_config": of(
            of(GEMMA, SIX, PER_LAYER, ROOM, THETA, rms_norm_eps=1e-5, rope_local_base_freq=10000.0),
            of(altup_active_idx=0, altup_coef_clip=120.0, altup_correct_scale=True, altup_num_inputs=2),
            of(activation_sparsity_pattern=[0.0] * 6, final_logit_softcapping=30.0, laurel_rank=8),
        )
    },
    "gpt2": of(GPT, n_ctx=512),
    "gpt_bigcode": of(GPT, n_inner=128),
    "gpt_neox": of(layer_norm_eps=1e-5, num_key_value_heads=None, rotary_emb_base=1e4, rotary_pct=0.5),
    "gptj": of(GPT, rotary_dim=8),
    "granitemoehybrid-rare": named(
        "granitemoehybrid",
        PIPELINE["granitemoehybrid"],
        FOUR,
        layer_types=["mamba", "mamba", "attention", "mamba"],
    ),
    "helium": of(UNBIASED, tie_word_embeddings=False),
    "jamba-listed": named(
        "jamba", PIPELINE["jamba"], FOUR, layers_block_type=["mamba", "mamba", "attention", "mamba"]
    ),
    "jamba-rare": named(
        "jamba", PIPELINE["jamba"], num_hidden_layers=14, attn_layer_period=14, attn_layer_offset=7
    ),
    "kimi_k3": {
        "text_config": of(
            of(PIPELINE["kimi_linear"], FOUR, SIZES, attn_res_block_size=2),
            of(activation_situ_beta=1.0, activation_situ_linear_beta=1.0),
            linear_attn_config=of(DELTA, kda_layers=[1, 2, 4], gate_lower_bound=-5.0),
        )
    },
    "lfm2-numbered": named("lfm2", FOUR, _UNLISTED_LFM, full_attn_idxs=[1]),
    "minicpm3": of(
        of(LATENT, dim_model_base=32, head_dim=None, scale_depth=1.4, scale_emb=2.0),
        rope_scaling=of(
            of(type="longrope", long_factor=[1.0] * 8, short_factor=[1.0] * 8),
            original_max_position_embeddings=512,
        ),
    ),
    "mamba": of(MAMBA, time_step_rank=8),
    "mamba2": of(
        of(MAMBA, head_dim=32, num_heads=4, layer_norm_epsilon=1e-5, n_groups=1),
        of(time_step_limit=[0.0, 10.0], time_step_rank=8),
    ),
    "mimo_v2_flash-wide": named(
        "mimo_v2_flash",
        FOUR,
        PIPELINE["mimo_v2_flash"],
        WINDOW,
        of(swa_num_key_value_heads=4, head_dim=24, swa_head_dim=24),
    ),
    "nanbeige": {"num_loops": 2},
    "nanochat": of(head_dim=None, num_key_value_heads=4),
    "nemotron_h-letters": named("nemotron_h", PIPELINE["nemotron_h"], hybrid_override_pattern="M*-M"),
    "nemotron_h-words": named(
        "nemotron_h",
        PIPELINE["nemotron_h"],
        of(hybrid_override_pattern=None, layers_block_type=["mamba", "attention", "moe", "mlp"]),
    ),
    "olmo_hybrid": of(FOUR, OLMO_HYBRID),
    "olmo_hybrid-listed": named(
        "olmo_hybrid",
        FOUR,
        OLMO_HYBRID,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
    "openelm": of(
        of(NO_SIZES, head_dim=16, model_dim=64, num_transformer_layers=4, ffn_dim_divisor=16),
        of(num_query_heads=[4, 4, 8, 8], num_kv_heads=[1, 1, 2, 2], ffn_multipliers=[1.0, 1.0, 2.0, 2.0]),
    ),
    "phi3small": of(
        of(vocab_size=100352, dense_attention_every_n_layers=2, ff_intermediate_size=128),
        of(gegelu_limit=20.0, head_dim=None, layer_norm_epsilon=1e-5),
    ),
    "pixtral": {"text_config": TEXT},
    "plamo": of(n_shared_head=2, num_key_value_heads=None, head_dim=None),
    "plamo2": of(FOUR, PLAMO2),
    "plamo2-rare": named("plamo2", PLAMO2, num_hidden_layers=8, mamba_step=4),
    "plamo2-without": named("plamo2", FOUR, PLAMO2, mamba_enabled=False),
    "plamo3": of(FOUR, sliding_window_pattern=2, window_size=8),
    "qwen": of(head_dim=None, intermediate_size=256, kv_channels=16, num_key_value_heads=None),
    "qwen2_vl": {"text_config": of(TEXT, model_type="qwen2")},
    "qwen3_5-untold": named("qwen3_5", text_config=of(_UNTOLD_QWEN, FOUR)),
    "recurrent_gemma": of(RECURRENT_GEMMA, block_types=["recurrent", "recurrent", "attention"]),
    "recurrent_gemma-2b": named("recurrent_gemma", RECURRENT_GEMMA, _block_types=["recurrent", "attention"]),
    "rwkv7": of(
        of(FOUR, num_attention_heads=None, num_key_value_heads=None, norm_eps=1e-5),
        of(a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8, decay_low_rank_dim=8),
    ),
    "spark2_5": of(FOUR, WINDOWED, rope_parameters={kind: {"rope_theta": 1e4} for kind in set(WINDOWS)}),
    "talkie": {"num_key_value_heads": None},
}
"""Folder name -> what `write_model` takes, as above."""
