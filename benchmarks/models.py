"""Model folders made on the spot, without MLX: one is large, one slow, one never repeats itself.

All have the embedded model's tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mlxtp.config import embedded_model_path

#: Little attention: that of the embedded model takes a CPU seconds for a prompt of thousands of tokens.
THIN: Mapping[str, int] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
}

#: Attention over compressed keys and values as in DeepSeek V3: a quarter of its sizes, 16 of its 128 heads.
LATENT: Mapping[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_nextn_predict_layers": 0,
}

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SEED = 1
_SCALE = np.float32(0.02)

WALK_STEP = 149  #: Prime, so that steps of it reach each of the walk's tokens before one comes again.
_WALK_FIRST = 8  #: Tokens below are special, end tokens among them.

#: 203 million weights, 17 % of them in embedding and head: about what an 8B Llama has.
LARGE: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 15,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16_384,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_large(folder: Path, **changes: int) -> int:
    """A Llama of about 400 MB in bfloat16 with random weights. Returns the bytes of all its weights.

    `changes` are the configuration's.
    """
    config = _config(**LARGE, **changes)
    random = _bfloat16(np.random.default_rng(_SEED).standard_normal(1 << 22, dtype=np.float32) * _SCALE)
    one = _bfloat16(np.ones(1, dtype=np.float32))
    tensors = {
        name: np.resize(one if name.endswith("norm.weight") else random, shape)
        for name, shape in shapes(config).items()
    }
    _write(folder, config, tensors)
    return sum(array.nbytes for array in tensors.values())


def write_deep(folder: Path, layers: int) -> Path:
    """The embedded model with idle layers behind its own: the same tokens, more time for each of them.

    An idle layer computes like the others, then multiplies with zeros. Returns `folder`.
    """
    config = _config()
    tensors = load_file(embedded_model_path() / "model.safetensors")
    first = {name: array for name, array in tensors.items() if name.startswith("model.layers.0.")}
    for layer in range(config["num_hidden_layers"], layers):
        for name, array in first.items():
            idle = name.endswith(("o_proj.weight", "down_proj.weight"))
            copy = np.zeros_like(array) if idle else array
            tensors[name.replace("layers.0.", f"layers.{layer}.")] = copy
    config["num_hidden_layers"] = layers
    _write(folder, config, tensors)
    return folder


def write_walk(folder: Path, **changes: Any) -> Path:
    """As large and as fast as the embedded model, but each token has one successor, and none comes twice.

    Its layers are idle; the head's row of a token's successor is the token's own embedding, so that it wins
    by far. `changes` are the configuration's. Returns `folder`.
    """
    config = _config(tie_word_embeddings=False, **changes)
    random = np.random.default_rng(_SEED)
    tensors: dict[str, NDArray[Any]] = {}
    for name, shape in shapes(config).items():
        if name.endswith("norm.weight"):
            tensors[name] = np.ones(shape, dtype=np.float32)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros(shape, dtype=np.float32)
        else:
            tensors[name] = random.standard_normal(shape, dtype=np.float32)
    embedding = tensors["model.embed_tokens.weight"]
    head = np.zeros_like(embedding)
    for token in range(_WALK_FIRST, len(embedding)):
        head[successor(token, len(embedding))] = embedding[token]
    tensors["lm_head.weight"] = head
    _write(folder, config, tensors)
    return folder


def successor(token: int, vocabulary: int) -> int:
    """The token that the walk says next."""
    return _WALK_FIRST + (token - _WALK_FIRST + WALK_STEP) % (vocabulary - _WALK_FIRST)


def walk_tokens(count: int, seed: int) -> tuple[int, ...]:
    """A random prompt for the walk."""
    draw = np.random.default_rng(seed)
    return tuple(int(token) for token in draw.integers(_WALK_FIRST, 500, size=count))


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a Llama, or of what has LATENT."""
    hidden, middle, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    attention = _latent(config) if "kv_lora_rank" in config else _heads(config)
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        **{f"self_attn.{name}": shape for name, shape in attention.items()},
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocabulary, hidden)
    return found


def _heads(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, kv_heads = (config[key] * width for key in ("num_attention_heads", "num_key_value_heads"))
    return {
        "q_proj": (heads, hidden),
        "k_proj": (kv_heads, hidden),
        "v_proj": (kv_heads, hidden),
        "o_proj": (hidden, heads),
    }


def _latent(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    of_query, of_rest, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    query, rank = config["q_lora_rank"], config["kv_lora_rank"]
    return {
        "q_a_proj": (query, hidden),
        "q_a_layernorm": (query,),
        "q_b_proj": (heads * (of_query + of_rest), query),
        "kv_a_proj_with_mqa": (rank + of_rest, hidden),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (of_query + value), rank),
        "o_proj": (hidden, heads * value),
    }


def _config(**changes: object) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((embedded_model_path() / "config.json").read_text())
    return config | changes


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of 32-bit floats: numpy has no type for them."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
    """A model folder; 16-bit arrays stand for bfloat16. The file format is that of safetensors."""
    folder.mkdir(parents=True)
    for name in _TOKENIZER:
        shutil.copy(embedded_model_path() / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    names = {np.dtype(np.float32): "F32", np.dtype(np.uint16): "BF16"}
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": (offset, end)}
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for array in tensors.values():
            array.tofile(file)
