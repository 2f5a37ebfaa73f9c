"""Rows of unlike lengths in one forward: each bucket attends to its own arrays."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlxtp.engine.batch import StepLayout
from mlxtp.engine.families import attention_heads
from mlxtp.engine.runner import Runner

from ..reference import reference
from .families import OTHERS
from .test_runner import runner_of, step, tokens_of
from .test_runner_joint_prompts import SAID, SIZED, folder_of, joint

CASTS = frozenset(("phi", "plamo", "stablelm"))
"""Their attention casts what its caches return."""
FAMILIES = {name: sizes for name, sizes in {**OTHERS, **SIZED}.items() if "-" not in name}
LENGTHS = (40, 3, 90, 200, 41)
ROOMS = (128, 128, 192, 256, 128)
MASKLESS = 150  # keys of a row alone in its bucket


def forwards_of(runner: Runner) -> list[int]:
    """Return a list that gets the number of rows of each forward of the model."""
    vocabulary, rows = runner._model._vocabulary, list[int]()
    whole = vocabulary.forward

    def forward(model: Any, tokens: Any, *args: Any, **named: Any) -> Any:
        rows.append(tokens.shape[0])
        return whole(model, tokens, *args, **named)

    vocabulary.forward = forward  # type: ignore[method-assign]
    return rows


@pytest.fixture(params=["a CPU", "a GPU"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With what Metal wants: repeated masks, and none for the one row of the longest bucket."""
    if request.param == "a GPU":
        layout = staticmethod(lambda model, _: StepLayout(MASKLESS, attention_heads(model)[0]))
        monkeypatch.setattr(StepLayout, "here", layout)
    return bool(request.param == "a GPU")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rows_of_unlike_lengths_say_what_they_say_alone(
    tmp_path: Path, family: str, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in steps that are traced, which the last two are without a GPU, and where rows share no arrays."""
    monkeypatch.setitem(SIZED, family, FAMILIES[family])
    folder, dice = folder_of(tmp_path, family), Random(1)
    runner = runner_of(folder)
    can = runner._caches.can
    lengths = LENGTHS if can.batched else LENGTHS[:1]
    prompts = {uid: tuple(dice.randrange(6, 500) for _ in range(size)) for uid, size in enumerate(lengths, 1)}
    texts = [tokens_of(runner.run(joint({uid: tokens})))[0] for uid, tokens in prompts.items()]
    if can.rolls_back:
        runner.arrange(ROOMS)
    forwards = forwards_of(runner)
    for number in range(SAID - 1):
        found = step(runner, {uid: len(tokens) + number for uid, tokens in prompts.items()})
        for text, (token,) in zip(texts, found, strict=True):
            text.append(token)
        if can.rolls_back and not number:
            assert forwards == ([3, 1, 1] if family in CASTS else [5])
    if family == "llama":
        assert len(forwards) == SAID - 1 - (not gpu), "a replay runs no code of the model"
    expected = map(partial(reference, max_tokens=SAID, folder=folder), prompts.values())
    assert list(map(tuple, texts)) == list(expected)
