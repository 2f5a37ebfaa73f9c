"""Descriptions against real caches, shares and heads, against recordings, and of what is no model.

Each figure of a recording equalled what tables of families had said, or was found right where it did not.
"""

from __future__ import annotations

import json
import subprocess
import sys
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
from mlxtp.description import Description, PartFacts, from_text
from mlxtp.engine.batch import CacheKind
from mlxtp.engine.group import LoneGroup
from mlxtp.engine.loader import kv_sizes, leaves, load, make_cache
from mlxtp.engine.mtp_head import read_head
from mlxtp.engine.sharding import shard
from mlxtp.model_config import text_config
from mlxtp.placement.model_shape import shape_of

from .described_models import (
    EVERY,
    FEW,
    MANY,
    MODELS,
    RECORDED,
    UNTRIED,
    config_of,
    described,
    description,
    recorded,
    widened,
)
from .mtp_heads import add_head
from .small_models import CONFIG, write_model

pytestmark = pytest.mark.slow

MODULES = Path(next(iter(models.__path__)))
LONG = 100_000
NAMES = pytest.mark.parametrize("name", sorted(EVERY))


def model_of(config: Mapping[str, Any]) -> Any:
    model_class, arguments_class = _get_classes(config)
    return model_class(arguments_class.from_dict(config))


def total(found: Description, field: str) -> int:
    return sum(getattr(part, field) for part in (found.embedding, *found.layers, found.head))


FIGURES = (
    *("family", "hidden", "vocabulary", "experts", "picked", "bits", "group", "kernels", "collectives"),
    *("mlp_bytes", "unsharable", "uncuttable"),
)


def figures(found: Description) -> dict[str, Any]:
    """What is recorded of a description."""
    caches = [name for name in found.caches.__slots__ if getattr(found.caches, name) is True]
    all_of_it = {
        **{name: getattr(found, name) for name in FIGURES},
        **{name: total(found, name) for name in PartFacts.__slots__ if name not in ("kv_heads", "window")},
        "layers": len(found.layers),
        "kv_heads": sorted({layer.kv_heads for layer in found.layers}),
        "windows": sorted({layer.window for layer in found.layers} - {0}),
        "caches": [*caches, *found.caches.kinds],
        "joined": list(found.joined),
        "keepers": list(found.keepers),
    }
    return {name: value for name, value in all_of_it.items() if value}


@NAMES
def test_a_description_is_as_recorded(name: str) -> None:
    # To record them again: python -c "from tests.engine.test_describe import *; record()"
    assert figures(description(name)) == recorded()[name]


def record() -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(figures(description(name)))}" for name in sorted(EVERY)]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def test_every_family_of_mlx_lm_is_described() -> None:
    named = {path.stem for path in MODULES.glob("*.py") if "class ModelArgs" in path.read_text()}
    tried = {str(of.get("model_type", name)) for name, of in EVERY.items()}
    assert named == tried | UNTRIED.keys()
    assert not tried & UNTRIED.keys()


def test_only_layers_with_growing_caches_attend() -> None:
    layers = description("qwen3_next").layers
    assert {bool(layer.attended) for layer in layers} == {True, False}
    assert all(bool(layer.attended) == bool(layer.kv_token_bytes) for layer in layers)


@NAMES
def test_caches_grow_as_described(name: str) -> None:
    """A window of tokens counts as if it kept all of them, which its own cache does not."""
    config, windows = config_of(name), any(layer.window for layer in description(name).layers)
    model = model_of(widened(config) if windows else config)

    def cache_bytes(tokens: int) -> int:
        cache = make_prompt_cache(model)
        model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
        states = tree_flatten([c.state for c in cache if not c.empty()])
        return sum(array.nbytes for _, array in states if isinstance(array, mx.array))

    grown = (cache_bytes(MANY) - cache_bytes(FEW)) // (MANY - FEW)
    assert total(description(name), "kv_token_bytes") == grown


@NAMES
def test_a_long_text_takes_what_its_caches_hold(name: str) -> None:
    """To two percent, as windows may be of several sizes. Plans leave out states, which do not grow."""
    per_token, at_most = kv_sizes(model_of(config_of(name)))
    counted = shape_of(description(name)).rank_kv(1, LONG) + total(description(name), "state_bytes")
    assert counted == pytest.approx(per_token * LONG + at_most, rel=0.02)


@pytest.mark.parametrize("family", ["gpt_oss", "exaone_moe"])
@pytest.mark.parametrize("tokens", [5, 8, 9, 1000])
def test_a_window_counts_its_own_slots(family: str, tokens: int) -> None:
    config = {**config_of(family), "layer_types": ["sliding_attention", "full_attention"]}
    per_token, of_windows = kv_sizes(model_of(config))
    slots = ring_slots(config["sliding_window"])
    expected = per_token * tokens + of_windows * min(tokens, slots) // slots
    [text] = described(config)
    assert shape_of(from_text(text)).rank_kv(1, tokens) == expected
    assert 0 < of_windows < per_token * slots * 2


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_engine_finds_the_same_in_a_model(name: str) -> None:
    assert CacheKind(model_of(config_of(name))).can == description(name).caches


@NAMES
def test_a_rank_finds_as_many_layers_and_tokens(name: str) -> None:
    config = config_of(name)
    model = model_of(config)
    found = shard(model, LoneGroup(), size=text_config(config)["vocab_size"]).size
    assert (len(model.layers), found) == (len(description(name).layers), description(name).vocabulary)
    assert {type(cache).__name__ for cache in leaves(make_cache(model))} == {*description(name).caches.kinds}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "glm4_moe", "mimo"])
def test_an_mtp_head_is_one_more_layer_that_every_rank_has_whole(tmp_path: Path, family: str) -> None:
    folder = add_head(write_model(tmp_path, model_type=family, **MODELS.get(family, {})), (7, 8, 9), length=8)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    loaded = load(folder, LoneGroup(), lambda: None, (), read_head)
    weights = sum(weight.nbytes for _, weight in tree_flatten(loaded.mtp_head.parameters()))
    model = from_text(described(config)[0])
    with_head, without = shape_of(model, mtp=True), shape_of(model)
    assert model.has_head
    assert model.drafts
    assert with_head.whole_bytes - without.whole_bytes == pytest.approx(weights, rel=0.02)
    assert with_head.rank_kv(1, 100) == 100 * loaded.kv_token_bytes
    assert with_head.rank_kv(2, 100) - without.rank_kv(2, 100) == 100 * with_head.mtp_kv_bytes
    assert with_head.token_bytes == without.token_bytes
    last, first = with_head.stage(1, 2), with_head.stage(0, 1)
    assert (first.weight_bytes, first.mtp_kv_bytes) == (without.stage(0, 1).weight_bytes, 0)
    assert last.weight_bytes - without.stage(1, 2).weight_bytes >= weights * 0.98
    assert last.mtp_kv_bytes == with_head.mtp_kv_bytes


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', "[" * 100_000])
def test_another_text_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"no description|another format|Expecting"):
        from_text(text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rms_norm_eps": None}, "config.json lacks rms_norm_eps"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"model_type": "nothing_like_it"}, "mlx-lm has no model family 'nothing_like_it'"),
        ({"hidden_size": "wide"}, "mlx-lm cannot build it"),
        ({"hidden_size": -1}, "mlx-lm cannot build it"),
        ({"num_attention_heads": 0}, "mlx-lm cannot build it"),
        ({"text_config": 3}, "text_config is 3, not an object"),
        ({"num_hidden_layers": 10**9}, "config.json names 1000000000 layers, more than 1024"),
        ({"quantization": {"group_size": 0, "bits": 4}}, "mlx-lm cannot build it"),
        ({"model_type": "olmo"}, "ends the process that imports it"),
    ],
)
def test_what_cannot_be_built_is_refused(changes: Mapping[str, Any], says: str) -> None:
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    [text] = described(config)
    assert says in json.loads(text)["refused"]


def test_the_command_prints_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def run(path: Path | str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mlxtp.engine.describe", str(path)]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    assert [run(tmp_path).stdout.strip()] == described(CONFIG)
    assert run(tmp_path / "config.json").stdout == run(tmp_path).stdout == run("-", json.dumps(CONFIG)).stdout
    (tmp_path / "other.json").write_text('{"model_type": "llama"}')
    refused = run(tmp_path / "other.json")  # and not what stands beside it
    assert refused.returncode
    assert refused.stderr.startswith("mlxtp: config.json lacks hidden_size")
    assert "No such file" in run(tmp_path / "none.json").stderr
    (tmp_path / "other.json").write_text("[" * 100_000)
    assert run(tmp_path / "other.json").stderr.startswith("mlxtp: ")
