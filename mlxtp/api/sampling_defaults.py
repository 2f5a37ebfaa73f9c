"""Sampling defaults by a model's makers: `generation_config.json` in its folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..tokenizer_file import content_of
from .backend import GREEDY, Sampling

log = logging.getLogger(__name__)


def load_defaults(folder: Path) -> Sampling:
    """Return the defaults for requests that leave settings out. Greedy if the file is missing or unusable."""
    path = folder / "generation_config.json"
    try:
        config = json.loads(content_of(path))
    except FileNotFoundError:
        return GREEDY
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is not used: %s", path, error)
        return GREEDY
    return defaults_of(config) if isinstance(config, dict) else GREEDY


def defaults_of(config: Mapping[str, Any]) -> Sampling:
    """Return temperature, top_p, top_k and min_p if the model is to be sampled (`do_sample`), else greedy.

    A value out of range counts as absent. Pure.
    """
    if config.get("do_sample") is not True:
        return GREEDY
    return Sampling(
        temperature=_number(config.get("temperature"), 0.0, 2.0, 1.0),
        top_p=_number(config.get("top_p"), 0.0, 1.0, 1.0),
        top_k=int(_number(config.get("top_k"), 0, 2**31 - 1, 0)),
        min_p=_number(config.get("min_p"), 0.0, 1.0, 0.0),
    )


def _number(value: object, low: float, high: float, absent: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return absent
    return float(value) if low <= value <= high else absent
