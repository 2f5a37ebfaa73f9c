from __future__ import annotations

from pathlib import Path

import pytest

from mlxtp.api.backend import GREEDY, Sampling
from mlxtp.api.catalog import defaults_of, load_defaults


def test_a_model_that_is_to_be_sampled_says_how() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "eos": [1]}
    assert defaults_of(config) == Sampling(0.6, 0.95, 20, 0.1)
    assert defaults_of({"do_sample": True}) == Sampling(1.0)


def test_any_other_model_is_greedy() -> None:
    for do_sample in (None, False, 1, "true"):
        assert defaults_of({"do_sample": do_sample, "temperature": 0.6}) == GREEDY


@pytest.mark.parametrize("wrong", [None, "0.5", -1, True, [], 10**400, float("nan"), float("inf")])
def test_a_wrong_value_counts_as_absent(wrong: object) -> None:
    config = {"do_sample": True, "temperature": wrong, "top_p": wrong, "top_k": wrong, "min_p": wrong}
    assert defaults_of(config) == Sampling(1.0)


def test_the_file_is_read_and_a_broken_one_is_passed_over(tmp_path: Path) -> None:
    assert load_defaults(tmp_path) == GREEDY
    path = tmp_path / "generation_config.json"
    path.write_text('{"do_sample": true, "temperature": 0.25}')
    assert load_defaults(tmp_path) == Sampling(0.25)
    for broken in ("", "[]", "{", "[" * 100_000, "\0"):
        path.write_text(broken)
        assert load_defaults(tmp_path) == GREEDY
    path.write_bytes(b"\xff")
    assert load_defaults(tmp_path) == GREEDY
