"""Files of a repository that are wanted."""

from __future__ import annotations

import pytest

from mlxtp.model_files import MAX_CONFIG_BYTES, MAX_TEXT_BYTES
from mlxtp.models.manifest import ModelFile, wanted

MANY = 1 << 43


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("config.json", MAX_CONFIG_BYTES),
        ("tokenizer.json", MAX_TEXT_BYTES),
        ("vocab.txt", MAX_TEXT_BYTES),
        ("tiktoken.model", MAX_TEXT_BYTES),
        ("chat_template.jinja", MAX_TEXT_BYTES),
        ("model.safetensors", MANY),
    ],
)
def test_a_file_that_is_larger_than_models_need_is_not_wanted(path: str, most: int) -> None:
    files = [ModelFile(path, size, "a" * 40) for size in (most, most + 1)]
    assert wanted(files[:1]) == (files[0],)
    assert bool(wanted(files[1:])) == (most == MANY)


@pytest.mark.parametrize(
    ("there", "named"),
    [
        (("consolidated", "model-1-of-1", "mtp"), ("model-1-of-1", "mtp")),
        (("consolidated", "model"), ("model",)),
        (("mtp", "adapters", "adapter_model", "weights"), ("mtp",)),
    ],
)
def test_a_head_in_its_own_file_is_wanted_with_its_model(
    there: tuple[str, ...], named: tuple[str, ...]
) -> None:
    files = [ModelFile(f"{name}.safetensors", 9, "a" * 40) for name in there]
    assert [each.path for each in wanted(files)] == [f"{name}.safetensors" for name in named]
