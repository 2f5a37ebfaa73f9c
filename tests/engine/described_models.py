"""Small models of every family, and their descriptions, made in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mlxtp.description import Description, from_text

from .families import FAMILIES, FOUR, OTHERS, OWN, PIPELINE, VARIANTS
from .small_models import CONFIG

RECORDED = Path(__file__).parent / "recorded_descriptions.json"
FEW, MANY = 256, 512
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
MODELS: Mapping[str, Mapping[str, Any]] = {**FAMILIES, **OWN, **VARIANTS}
STAGES = {f"{name}-stages": {"model_type": name, **FOUR, **of} for name, of in PIPELINE.items()}
SLIDING = {
    f"{name}-sliding": {**MODELS[name], "model_type": name, **WINDOW} for name in ("llama", "ministral3")
}
EVERY: Mapping[str, Mapping[str, Any]] = {**MODELS, **STAGES, **SLIDING, **OTHERS}
UNTRIED = {
    **dict.fromkeys(("bitnet", "muse_spark"), "needs Metal"),
    **dict.fromkeys(("lfm2-vl", "lille-130m", "nemotron-nas"), "refused: no such module"),
    "olmo": "mlx-lm ends the process",
    "phixtral": "mlx-lm cannot build it",
    "prism_hadamard_qwen35": "qwen3_5 in 2 bits",
}
"""Families that are in no test here, and why."""
#: Windows and chunks, wider than what a test feeds.
WIDE = {"sliding_window": 2 * MANY, "attention_chunk_size": 2 * MANY}


def config_of(name: str) -> dict[str, Any]:
    config = {**CONFIG, "model_type": name, **EVERY[name], "tie_word_embeddings": False}
    if "text_config" in config:
        shared = {field: config[field] for field in ("vocab_size", "tie_word_embeddings")}
        config["text_config"] = {"model_type": config["model_type"], **config["text_config"], **shared}
    return {**config, "dtype": "float32"}


def widened(config: Mapping[str, Any]) -> dict[str, Any]:
    wide = {**config, **{field: size for field, size in WIDE.items() if field in config}}
    return {**wide, "text_config": widened(config["text_config"])} if "text_config" in config else wide


def described(*configs: Mapping[str, Any]) -> list[str]:
    """Describe models in a process of its own: mlx-lm's modules and MLX are watched there."""
    command = [sys.executable, "-m", "tests.engine.describe_member"]
    lines = "".join(json.dumps(config) + "\n" for config in configs)
    root = Path(__file__).parents[2]
    done = subprocess.run(command, input=lines, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@cache
def recorded() -> Mapping[str, Mapping[str, Any]]:
    """Return what `test_describe.py` holds descriptions against: figures, by the names of `EVERY`."""
    found: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())
    return found


def families_of_pipelines() -> frozenset[str]:
    """Return the families of which stages can be made, by what is recorded of them."""
    return frozenset(of["family"] for of in recorded().values() if "uncuttable" not in of)


@cache
def _texts() -> Mapping[str, str]:
    names = sorted(EVERY)
    return dict(zip(names, described(*map(config_of, names)), strict=True))


@cache
def description(name: str) -> Description:
    """The description of a model in `EVERY`."""
    return from_text(_texts()[name])
