"""Descriptions against the tables of families, against real shares, and against what is no model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlxtp.description import Description, from_text, to_text
from mlxtp.placement import model_shape
from mlxtp.placement.model_shape import CacheTraits, ModelShape, shape_of

from ..placement.test_model_weights import CACHED, MODELS, WHOLE, config_of
from .small_models import CONFIG

#: Models that are what their modules show, and not what the tables say.
OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "weights": {
        "baichuan_m1": "gates beside its windows",
        "longcat_flash_ngram": "embeddings of runs of tokens",
        "gemma3n": "inputs of each layer",
        "plamo2": "inner sizes",
        **dict.fromkeys(("gpt2", "gpt_neox"), "positions"),
        **dict.fromkeys(("gptj", "phi3small", "qwen", "nanochat"), "MLPs of other shapes"),
        **dict.fromkeys(("recurrent_gemma", "recurrent_gemma-2b"), "MLPs of half the width"),
    },
    "whole": {
        **dict.fromkeys(("gemma4_text-few", "llama4-copied", "olmo2-copied"), "copies of KV heads"),
        "kimi_k3": "its shard cuts more",
        "gemma4_text-shared": "inputs of each layer",
    },
    "collectives": {
        "iquestloopcoder": "each layer runs twice",
        **dict.fromkeys(
            ("longcat_flash", "longcat_flash_ngram"), "two attentions and MLPs a layer, and experts"
        ),
    },
    "caches": {
        "plamo2-without": "no layer has a state",
        "gemma2": "masks by row are no masks here",
        "phi3small": "masks by row are no masks here",
    },
    "borders": {"gemma4_text-shared": "each layer reads an input of its own"},
}


def described(*configs: Mapping[str, Any]) -> list[str]:
    """Describe models in a process of its own: mlx-lm's modules and MLX are watched there."""
    command = [sys.executable, "-m", "tests.engine.describe_member"]
    lines = "".join(json.dumps(config) + "\n" for config in configs)
    root = Path(__file__).parents[2]
    done = subprocess.run(command, input=lines, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@cache
def descriptions() -> Mapping[str, str]:
    names = sorted(CACHED)
    texts = described(*({**config_of(name), "dtype": "float32"} for name in names))
    return dict(zip(names, texts, strict=True))


@cache
def both(name: str) -> tuple[Description, ModelShape]:
    return from_text(descriptions()[name]), shape_of({**config_of(name), "dtype": "float32"})


def otherwise(what: str, name: str) -> bool:
    return name in OTHERWISE[what] or name.partition("-")[0] in OTHERWISE[what]


EVERY = pytest.mark.parametrize("name", sorted(CACHED))
pytestmark = pytest.mark.slow


def total(found: Description, field: str) -> int:
    return sum(getattr(part, field) for part in (found.embedding, *found.layers, found.head))


@EVERY
def test_sizes_are_those_of_the_tables(name: str) -> None:
    found, table = both(name)
    assert (len(found.layers), found.hidden, found.vocabulary) == (
        table.layers,
        table.hidden,
        table.vocabulary,
    )
    assert (found.bits, found.group, found.number_bytes) == (table.bits, table.group, 4)
    if name not in WHOLE:
        windows = [layer for layer in found.layers if layer.window]
        assert total(found, "kv_token_bytes") == table.kv_token_bytes
        assert sum(layer.kv_token_bytes for layer in windows) == table.kv_window_bytes
        assert {layer.window for layer in windows} == {table.window} - {0}
    if name in MODELS:
        assert (found.experts, found.picked) == (table.experts, table.experts_per_token)
        same = total(found, "weight_bytes") == pytest.approx(table.weight_bytes, rel=0.03)
        assert same or otherwise("weights", name)


@EVERY
def test_shares_and_borders_are_those_of_the_tables(name: str) -> None:
    found, table = both(name)
    shareable = table.shardable and any(not table.obstacles(ranks) for ranks in range(2, 9))
    assert (not found.unsharable) is shareable
    if table.shardable and not table.obstacles(2):
        assert (found.collectives + 1 == table.collectives) is not otherwise("collectives", name)
        most = 0.01 * table.weight_bytes
        same = abs(total(found, "whole_bytes") - table.whole_bytes) <= most
        assert same or otherwise("whole", name) or otherwise("weights", name)
    if table.cuttable and not otherwise("borders", name):
        assert found.uncuttable == ""
        assert (found.joined, found.keepers) == (tuple(sorted(table.rules.joined)), table.rules.keepers)


def traits(found: Description) -> CacheTraits:
    """Return the kind of the tables that has the same capabilities."""
    caches = found.caches
    if "ChunkedKVCache" in caches.kinds:
        return model_shape.CHUNKS
    if not caches.batched:
        return model_shape.COMPRESSED
    if "ArraysCache" in caches.kinds:
        return model_shape.FED_AGAIN if caches.rolls_back else model_shape.STATES
    if "RotatingKVCache" in caches.kinds:
        return model_shape.WINDOWS
    return model_shape.PLAIN if caches.rolls_back else model_shape.LISTS


@EVERY
def test_caches_can_do_what_the_tables_say(name: str) -> None:
    found, table = both(name)
    assert (traits(found) == table.caches) is not otherwise("caches", name)
    assert found.caches.truncatable is table.caches.cuttable or otherwise("caches", name)


def test_a_description_travels_as_text() -> None:
    found, _ = both("llama")
    assert from_text(to_text(found)) == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', "[" * 100_000])
def test_another_text_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"no description|another format|Expecting"):
        from_text(text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rms_norm_eps": None}, "config.json lacks rms_norm_eps"),
        ({"model_type": "nothing_like_it"}, "mlx-lm has no model family 'nothing_like_it'"),
        ({"hidden_size": "wide"}, "mlx-lm cannot build it"),
        ({"num_attention_heads": 0}, "mlx-lm cannot build it"),
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

    def run(path: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mlxtp.engine.describe", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert [run(tmp_path).stdout.strip()] == described(CONFIG)
    assert run(tmp_path / "config.json").stdout == run(tmp_path).stdout
    (tmp_path / "other.json").write_text('{"model_type": "llama"}')
    refused = run(tmp_path / "other.json")  # and not what stands beside it
    assert refused.returncode
    assert refused.stderr.startswith("mlxtp: config.json lacks hidden_size")
    assert "No such file" in run(tmp_path / "none.json").stderr
    (tmp_path / "other.json").write_text("[" * 100_000)
    assert run(tmp_path / "other.json").stderr.startswith("mlxtp: ")
