"""Prompts of unlike lengths in one forward: each row says what it says alone, whatever its caches are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from mlxtp.engine.kv_cache import capacity
from mlxtp.engine.runner import Runner
from mlxtp.wire.messages import Forward, PromptPart

from ..reference import reference
from .described_models import config_of, recorded
from .families import OWN
from .mtp_heads import add_head
from .small_models import remember, write_model
from .test_mtp_head import runner_of as headed_runner_of
from .test_recurrent import SIZES
from .test_runner import active_bytes, runner_of, step, tokens_of

USUAL = ("deepseek_v32", "gpt_oss", "nemotron_h", "qwen3_5")
DESCRIBED = {name: config_of(name) for name in ("gemma3n", "mamba2", "plamo3", "spark2_5")}
SIZED = {**SIZES, **OWN, **DESCRIBED}
JOINT = {name: {*each["caches"]} for name, each in recorded().items() if "joint" in each["caches"]}
OTHERS = sorted(
    {
        recorded()[name]["family"] for name, can in JOINT.items() if not {"rolls_back", "truncatable"} <= can
    }.intersection(SIZED).difference(USUAL, ("llama", "ministral3", "step3p5"))  # without windows here
)
"""Families whose prompts cannot be read into arrays that rows share."""
LENGTHS = (40, 3, 90, 41)  # shorter and longer than a window, which has 8 or 20
SAID = 6

Prompts = Mapping[int, tuple[int, ...]]


def folder_of(path: Path, family: str) -> Path:
    fields = {**SIZED[family], "model_type": family, "eos_token_id": []}
    fields.pop("dtype", None)
    if "layer_types" in fields:
        fields["num_hidden_layers"] = len(fields["layer_types"])
    return remember(write_model(path / family, attentive=True, **fields))


def joint(
    prompts: Prompts, *, at: int = 0, to: int = 0, sources: Sequence[int] = (), saves: int = 0
) -> Forward:
    """Tokens of each prompt from `at` up to `to`, both from its end if they are negative."""
    offsets = tuple(at % len(tokens) for tokens in prompts.values())
    fed = [tokens[offset : to or None] for tokens, offset in zip(prompts.values(), offsets, strict=True)]
    parts = [
        PromptPart(len(tokens), source, save=saves and saves + uid, following=tokens[to] if to else 0)
        for (uid, tokens), source in zip(prompts.items(), sources or (0,) * len(prompts), strict=True)
    ]
    tokens = tuple(token for each in fed for token in each)
    return Forward(tuple(prompts), offsets, tuple(map(len, fed)), tokens, prompts=tuple(parts))


def said(runner: Runner, prompts: Prompts, ends: Forward) -> dict[int, tuple[int, ...]]:
    """Return what rows say from the forward that ends their prompts on."""
    texts = [[token] for (token,) in tokens_of(runner.run(ends))]
    if runner._caches.can.rolls_back:
        runner.arrange((192,) * len(prompts))
    for number in range(SAID - 1):
        found = step(runner, {uid: len(tokens) + number for uid, tokens in prompts.items()})
        for text, (token,) in zip(texts, found, strict=True):
            text.append(token)
    return {uid: tuple(text) for uid, text in zip(prompts, texts, strict=True)}


@pytest.mark.parametrize("family", [*USUAL, *OTHERS])
def test_each_says_what_it_says_alone_also_from_copies_of_unlike_lengths(tmp_path: Path, family: str) -> None:
    folder, dice = folder_of(tmp_path, family), Random(1)
    runner = runner_of(folder)
    can = runner._caches.can
    assert can.joint
    assert not (can.rolls_back and can.truncatable)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(dice.randrange(6, 500) for _ in range(length))

    prompts = {uid: prompt(length) for uid, length in enumerate(LENGTHS, 1)}
    chosen = runner.run(joint(prompts, to=-1, saves=10))
    assert chosen.rows == ()
    assert said(runner, prompts, joint(prompts, at=-1)) == {
        uid: reference(tokens, SAID, folder) for uid, tokens in prompts.items()
    }
    for uid in prompts:
        runner.stop(uid, 0)
    longer = {
        20 + uid: (*prompts[uid][:-1], *prompt(length))
        for uid, length in zip(prompts, (1, 30, 7, 60), strict=True)
    }
    offsets = tuple(length - 1 for length in LENGTHS)
    fed = [tokens[at:] for tokens, at in zip(longer.values(), offsets, strict=True)]
    parts = tuple(PromptPart(len(tokens), uid - 10) for uid, tokens in longer.items())
    widths, tokens = tuple(map(len, fed)), tuple(token for each in fed for token in each)
    ends = Forward(tuple(longer), offsets, widths, tokens, prompts=parts)
    assert said(runner, longer, ends) == {uid: reference(each, SAID, folder) for uid, each in longer.items()}


def test_a_head_proposes_what_it_proposes_for_each_alone(tmp_path: Path) -> None:
    prompts = {1: (7, 8, 9, 10, 11), 2: (70, 80, 90), 3: tuple(range(100, 140))}
    folder = add_head(folder_of(tmp_path, "qwen3_next"), *prompts.values())
    together, apart = headed_runner_of(folder), headed_runner_of(folder)
    together.run(joint(prompts, to=-1))
    found = together.run(replace(joint(prompts, at=-1), drafts=1))
    assert found.drafts is not None
    for row, (uid, tokens) in enumerate(prompts.items()):
        apart.run(joint({uid: tokens}, to=-1))
        alone = apart.run(replace(joint({uid: tokens}, at=-1), drafts=1))
        assert alone.drafts is not None
        assert alone.tokens.item() == found.tokens[row].item()
        assert alone.drafts.item() == found.drafts[row].item()


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5"])
def test_a_prompt_that_goes_on_alone_takes_the_room_that_is_counted(tmp_path: Path, family: str) -> None:
    runner = runner_of(folder_of(tmp_path, family))
    prompts = {uid: tuple(range(6, 106)) for uid in (1, 2)}
    runner.run(joint(prompts, to=50))
    runner.run(joint({1: prompts[1]}, at=50))
    whole = [array.shape[2] for array in runner._batch.part(1).arrays]
    assert max(whole) == capacity(100)


def test_a_state_that_is_kept_holds_no_memory_of_its_company(tmp_path: Path) -> None:
    runner = runner_of(folder_of(tmp_path, "nemotron_h"))
    prompts = {uid: tuple(range(6, 46)) for uid in range(1, 17)}
    runner.run(joint(prompts, to=-1))
    for uid in prompts:
        runner.stop(uid, 39 if uid == 1 else 0)
    before = active_bytes()
    counted = runner.kept.size_bytes
    runner.evict((1,))
    assert before - active_bytes() <= 1.2 * counted
