"""Messages about a model that ranks cannot load."""

from __future__ import annotations

import pytest

from mlxtp.errors import Code, ModelError
from mlxtp.groups.loading import refusal

COMMIT = "a" * 40


@pytest.mark.parametrize(
    ("model", "folder", "ranks", "said", "words"),
    [
        (
            "org/m",
            COMMIT,
            2,
            f"rank 0: {COMMIT}: RuntimeError: [load_safetensors] no; rank 1: {COMMIT}: RuntimeError: "
            "[load_safetensors] no",
            "org/m cannot be loaded: RuntimeError: [load_safetensors] no; `mlxtp verify org/m` checks its "
            "files for damage",
        ),
        ("m", "m", 1, "rank 0: m: broken; also", "m cannot be loaded: broken; also"),
        ("m", "m", 2, "rank 0: m: one; rank 1: m: two", "m cannot be loaded: rank 0: one; rank 1: two"),
        ("m", "m", 2, "no rank said it", "m cannot be loaded: no rank said it"),
        ("m", "m", 2, "rank 1: m: broken", "m cannot be loaded: rank 1: broken"),
    ],
)
def test_it_is_named_as_it_was_asked_for_and_said_once(
    model: str, folder: str, ranks: int, said: str, words: str
) -> None:
    error = refusal(model, folder, ranks, ModelError(said, Code.MODEL_INVALID))
    assert (error.detail, error.code) == (words, Code.MODEL_INVALID)
