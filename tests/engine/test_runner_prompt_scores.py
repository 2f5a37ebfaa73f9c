"""Scores of prompts: what mlx-lm's logits say of each token, in parts, together, and beside others."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from random import Random

import mlx.core as mx
import pytest

from mlxtp.engine.sampler import Scores
from mlxtp.wire.messages import Forward

from ..reference import model_of
from .test_runner import runner_of, tokens_of
from .test_runner_joint_prompts import Prompts, folder_of, joint

TOP = 3


def scored(frame: Forward, *uids: int) -> Forward:
    parts = zip(frame.rows, frame.prompts, strict=True)
    return replace(
        frame, prompts=tuple(replace(part, scores=TOP if uid in uids else -1) for uid, part in parts)
    )


def check(scores: Scores, prompts: Prompts, folder: Path, at: int = 0, to: int | None = None) -> None:
    """Compare scores of the tokens after `at` up to `to` with those of mlx-lm's logits of whole prompts."""
    model, _ = model_of(folder)
    for uid, found in scores.items():
        tokens = prompts[uid]
        logits = model(mx.array([tokens]))[0].astype(mx.float32)
        logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[
            at : (to or len(tokens)) - (not to)
        ]
        targets = mx.array(tokens[at + 1 : to and to + 1])
        own = mx.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
        assert mx.allclose(found[0], own, atol=2e-3)
        assert mx.allclose(found[2], mx.sort(logprobs, axis=-1)[:, ::-1][:, :TOP], atol=2e-3)
        assert mx.allclose(mx.take_along_axis(logprobs, found[1], axis=-1), found[2], atol=2e-3)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v32", "nemotron_h"])
def test_each_token_has_the_score_of_mlx_lms_logits(tmp_path: Path, family: str) -> None:
    folder, dice = folder_of(tmp_path, family), Random(1)
    lengths = {1: 40, 2: 9, 3: 30}
    prompts = {uid: tuple(dice.randrange(6, 500) for _ in range(length)) for uid, length in lengths.items()}
    runner, chosen = runner_of(folder), list[tuple[int, ...]]()
    for uid, tokens in prompts.items():
        begun = runner.run(scored(joint({uid: tokens}, to=-4), 1, 3))
        ended = runner.run(scored(joint({uid: tokens}, at=-4), 1, 3))
        assert begun.prompts.keys() == ended.prompts.keys() == {uid} & {1, 3}
        check(begun.prompts, prompts, folder, to=len(tokens) - 4)
        check(ended.prompts, prompts, folder, at=len(tokens) - 4)
        chosen += tokens_of(ended)
    together = runner_of(folder).run(scored(joint(prompts), 1, 3))
    assert together.prompts.keys() == {1, 3}
    check(together.prompts, prompts, folder)
    assert tokens_of(together) == chosen


def test_a_choice_depends_on_the_scores_of_its_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing says which of both are exchanged first."""
    folder = folder_of(tmp_path, "llama")
    runner, graph = runner_of(folder), io.StringIO()
    monkeypatch.setattr(mx, "async_eval", lambda *_: None)
    found = runner.run(scored(joint({1: (7, 8, 9)}), 1))
    mx.export_to_dot(graph, found.tokens)
    assert "Depends" in graph.getvalue()
