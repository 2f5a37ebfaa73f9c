"""Weights implied by a configuration, against what mlx-lm builds from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import models
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from mlxtp.chunks import ring_slots
from mlxtp.engine.group import LoneGroup
from mlxtp.engine.loader import kv_sizes, load
from mlxtp.engine.mtp_head import read_head
from mlxtp.errors import ModelError
from mlxtp.model_config import text_config
from mlxtp.placement import model_weights
from mlxtp.placement.model_shape import shape_of

from ..engine.families import FAMILIES, FOUR, OTHERS, OWN, PIPELINE, VARIANTS
from ..engine.mtp_heads import add_head
from ..engine.small_models import CONFIG, write_model

UNCOUNTED = {"longcat_flash_ngram": "its embeddings of runs of tokens"}
"""Families of which something is left out."""
MODULES = Path(next(iter(models.__path__)))
FEW, MANY = 256, 512


MODELS: Mapping[str, Mapping[str, Any]] = {**FAMILIES, **OWN, **VARIANTS}
STAGES = {f"{name}-stages": {"model_type": name, **FOUR, **of} for name, of in PIPELINE.items()}
CACHED: Mapping[str, Mapping[str, Any]] = {**MODELS, **STAGES, **OTHERS}
UNTRIED = {
    **dict.fromkeys(("bitnet", "muse_spark"), "needs Metal"),
    **dict.fromkeys(("mamba", "mamba2", "rwkv7"), "refused: no attention heads"),
    **dict.fromkeys(("afm7", "dbrx", "openelm", "phixtral"), "names its sizes otherwise"),
    **dict.fromkeys(("lfm2-vl", "lille-130m", "nemotron-nas"), "refused: no such module"),
    "olmo": "mlx-lm ends the process",
    "prism_hadamard_qwen35": "qwen3_5 in 2 bits",
    **dict.fromkeys(("deepseek_v41", "gpt_bigcode", "plamo"), "counted for more heads than it keeps"),
}
"""Families whose caches no test compares, and why."""
LONG = 100_000
WHOLE = {
    "gpt_oss": "without the list of layers that its files have",
    "iquestloopcoder": "a window beside each cache",
    **dict.fromkeys(("recurrent_gemma", "recurrent_gemma-2b"), "its windows are nearly its context"),
}
"""Models whose windows count as if they kept all."""
#: Windows and chunks, wider than what a test feeds.
WIDE = {"sliding_window": 2 * MANY, "attention_chunk_size": 2 * MANY}


def config_of(name: str) -> dict[str, Any]:
    config = {**CONFIG, "model_type": name, **CACHED[name], "tie_word_embeddings": False}
    if "text_config" in config:
        shared = {field: config[field] for field in ("vocab_size", "tie_word_embeddings")}
        config["text_config"] = {"model_type": config["model_type"], **config["text_config"], **shared}
    return config


def widened(config: Mapping[str, Any]) -> dict[str, Any]:
    wide = {**config, **{field: size for field, size in WIDE.items() if field in config}}
    return {**wide, "text_config": widened(config["text_config"])} if "text_config" in config else wide


def model_of(config: Mapping[str, Any]) -> Any:
    model_class, arguments_class = _get_classes(config)
    return model_class(arguments_class.from_dict(config))


@pytest.mark.parametrize("family", sorted(MODELS.keys() - UNCOUNTED.keys()))
def test_weights_are_counted_as_mlx_lm_builds_them(family: str) -> None:
    """Norms, biases and convolutions aside, to one percent."""
    config = config_of(family)
    arrays = tree_flatten(model_of(config).parameters())
    built = sum(array.size for name, array in arrays if array.ndim > 1 and "conv" not in name)
    counted = sum(part.count for part in model_weights.parts_of(text_config(config)))
    assert counted == pytest.approx(built, rel=0.01)


def test_the_caches_of_every_family_are_compared() -> None:
    named = {path.stem for path in MODULES.glob("*.py") if "class ModelArgs" in path.read_text()}
    compared = {str(of.get("model_type", name)) for name, of in CACHED.items()}
    assert named == compared | UNTRIED.keys()
    assert not compared & UNTRIED.keys()


@pytest.mark.parametrize("family", sorted(CACHED.keys() - WHOLE.keys()))
def test_a_long_text_takes_what_its_caches_hold(family: str) -> None:
    """States aside, which do not grow, to two percent."""
    config = {**config_of(family), "dtype": "float32"}
    per_token, at_most = kv_sizes(model_of(config))
    assert shape_of(config).rank_kv(1, LONG) == pytest.approx(per_token * LONG + at_most, rel=0.02)


@pytest.mark.parametrize("family", sorted(CACHED))
def test_caches_grow_as_counted(family: str) -> None:
    """A window of tokens counts as if it kept all of them, which its own cache does not."""
    config = widened(config_of(family))
    model = model_of(config)

    def cache_bytes(tokens: int) -> int:
        cache = make_prompt_cache(model)
        model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
        states = tree_flatten([c.state for c in cache if not c.empty()])
        return sum(array.nbytes for _, array in states if isinstance(array, mx.array))

    grown = (cache_bytes(MANY) - cache_bytes(FEW)) // (MANY - FEW)
    assert shape_of({**config, "dtype": "float32"}).kv_token_bytes == grown


@pytest.mark.parametrize("family", ["gpt_oss", "exaone_moe"])
@pytest.mark.parametrize("tokens", [5, 8, 9, 1000])
def test_a_window_counts_its_own_slots(family: str, tokens: int) -> None:
    config = {**config_of(family), "layer_types": ["sliding_attention", "full_attention"], "dtype": "float32"}
    per_token, of_windows = kv_sizes(model_of(config))
    slots = ring_slots(config["sliding_window"])
    expected = per_token * tokens + of_windows * min(tokens, slots) // slots
    assert shape_of(config).rank_kv(1, tokens) == expected
    assert 0 < of_windows < per_token * slots * 2


def test_of_experts_a_token_meets_those_it_is_sent_to() -> None:
    config = {**config_of("qwen3_moe"), "num_experts": 8, "num_experts_per_tok": 2}
    experts = next(part for part in model_weights.parts_of(config) if part.role == "experts")
    assert experts.active * 4 == experts.count


def test_a_tied_embedding_is_read_whole_and_a_separate_one_by_the_row() -> None:
    tied = model_weights.parts_of({**CONFIG, "tie_word_embeddings": True})
    apart = model_weights.parts_of({**CONFIG, "tie_word_embeddings": False})
    assert [p.active for p in tied if p.role in ("embedding", "head")] == [512 * 64]
    assert [p.active for p in apart if p.role in ("embedding", "head")] == [64, 512 * 64]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "names no hidden size"),
        ({"num_hidden_layers": 0}, "names no number of layers"),
        ({"vocab_size": "many"}, "vocab_size is 'many', not a whole number"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"text_config": 3}, "text_config is 3, not an object"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused(change: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        shape_of({**CONFIG, **change})


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "glm4_moe", "mimo"])
def test_an_mtp_head_is_one_more_layer_that_every_rank_has_whole(tmp_path: Path, family: str) -> None:
    folder = add_head(write_model(tmp_path, model_type=family, **MODELS.get(family, {})), (7, 8, 9), length=8)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    loaded = load(folder, LoneGroup(), lambda: None, (), read_head)
    weights = sum(weight.nbytes for _, weight in tree_flatten(loaded.mtp_head.parameters()))
    with_head, without = shape_of(config, mtp=True), shape_of(config)
    assert with_head.whole_bytes - without.whole_bytes == pytest.approx(weights, rel=0.02)
    assert with_head.rank_kv(1, 100) == 100 * loaded.kv_token_bytes
    assert with_head.rank_kv(2, 100) - without.rank_kv(2, 100) == 100 * with_head.mtp_kv_bytes
    assert with_head.token_bytes == without.token_bytes
    last, first = with_head.stage(1, 2), with_head.stage(0, 1)
    assert (first.weight_bytes, first.mtp_kv_bytes) == (without.stage(0, 1).weight_bytes, 0)
    assert last.weight_bytes - without.stage(1, 2).weight_bytes >= weights * 0.98
    assert last.mtp_kv_bytes == with_head.mtp_kv_bytes
