"""Files of a repository that are wanted."""

from __future__ import annotations

import pytest

from mlxtp.models.manifest import ModelFile, wanted
from mlxtp.tokenizer_file import MAX_CONFIG_BYTES, MAX_TEXT_BYTES

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
