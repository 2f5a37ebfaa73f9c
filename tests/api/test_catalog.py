from __future__ import annotations

from pathlib import Path

import pytest

from mlxtp.api import catalog
from mlxtp.api.backend import GREEDY, ModelInfo, Sampling
from mlxtp.api.catalog import defaults_of, load_defaults
from mlxtp.errors import Code, RequestError


def info(id_: str = "org/tiny", *aliases: str, context: int = 100) -> ModelInfo:
    return ModelInfo(id_, aliases, Path(), context, 1234, (1,), 50)


def test_a_model_is_found_by_id_then_alias_then_default() -> None:
    models = [info("a", "b"), info("b", "c")]
    names = ["a", "b", "c", "default", None, ""]
    found = [catalog.find_model(name, models) for name in names]
    assert [each and each.id for each in found] == ["a", "b", "b", "a", "a", "a"]


def test_an_unknown_model_is_a_404_that_says_what_there_is() -> None:
    assert catalog.find_model("gpt-9", [info()]) is None
    assert catalog.find_model("default", []) is None
    error = catalog.unknown_model("gpt-9", ["org/tiny", "tiny"])
    assert error.detail.endswith('"gpt-9" was not found: it does not exist here; available: org/tiny, tiny')
    assert (error.status, error.code) == (404, Code.MODEL_NOT_FOUND)


def test_the_budget_is_what_was_asked_or_what_fits() -> None:
    model = info(context=100)
    assert catalog.token_budget(None, [1] * 40, model) == 60
    assert catalog.token_budget(None, [1] * 99, model) == 1
    assert catalog.token_budget(60, [1] * 40, model) == 60
    assert catalog.token_budget(61, [1] * 40, model) == 60


@pytest.mark.parametrize(("asked", "prompt", "most"), [(None, 100, 99), (1, 120, 100)])
def test_more_than_the_context_is_refused_with_the_numbers(asked: int | None, prompt: int, most: int) -> None:
    with pytest.raises(catalog.TooLong) as caught:
        catalog.token_budget(asked, [1] * prompt, info(context=100))
    assert (caught.value.code, caught.value.param) == (Code.CONTEXT_OVERFLOW, "messages")
    assert (caught.value.counted, caught.value.most) == (str(prompt), most)


def test_a_token_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(RequestError, match="token 50"):
        catalog.token_budget(5, [1, 50], info())
    with pytest.raises(RequestError, match="the prompt is empty"):
        catalog.token_budget(5, [], info())


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
