"""A model's way onto ranks that are proven, and the golden proof: what other answers than before mean."""

from __future__ import annotations

import asyncio
import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest

from mlxtp.config import Settings
from mlxtp.engine.kv_cache import SHORTEST_HIT
from mlxtp.errors import Code, GroupError, ModelError
from mlxtp.groups.loading import ModelLoader, refusal
from mlxtp.groups.process_group import EpochGroup
from mlxtp.models import self_test
from mlxtp.models.inspect import ModelSource
from mlxtp.placement.cost_model import RING_ETHERNET
from mlxtp.placement.pipelines import counted_shares

from ..placement.made_up_models import layered

COMMIT = "a" * 40


@pytest.mark.parametrize(("ranks", "split"), [(1, ()), (2, ()), (2, (2, 1))])
def test_ranks_are_told_what_their_plan_counted_on(
    tmp_path: Path, ranks: int, split: tuple[int, ...]
) -> None:
    model = layered(num_hidden_layers=3)
    group = EpochGroup(1, ranks, "none", split=split)
    told = MagicMock(load=AsyncMock(side_effect=ModelError("seen", Code.MODEL_INVALID)), group=group)
    loader = ModelLoader(Settings(tmp_path, "", 0, 1, "tiny"), MagicMock())
    source = ModelSource("m", tmp_path, MagicMock(eos=(7,)), shape=model)
    with pytest.raises(ModelError, match="seen"):
        asyncio.run(loader.bring_up(told, source, print))
    told.load.assert_awaited_once_with(str(tmp_path), (7,), "", counted_shares(model, ranks, split))


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
def test_a_refusal_names_the_model_as_it_was_asked_for_and_is_said_once(
    model: str, folder: str, ranks: int, said: str, words: str
) -> None:
    error = refusal(model, folder, ranks, ModelError(said, Code.MODEL_INVALID))
    assert (error.detail, error.code) == (words, Code.MODEL_INVALID)


KEPT = ((1, 2, 3), (4, 5, 6))
OTHER = ((1, 2, 3), (4, 9, 9))
PROMPTS = [(10, 11), (12, 13)]
WHERE_THEY_PART = (12, 13, 4)
TIE = ((9, -1.0), (5, -1.1))
CLEAR = ((9, -1.0), (5, -1.0 - self_test.NEAR_TIE))


class Answering:
    """A gateway whose group says `again` to the prompts, and has `top` as most probable tokens."""

    def __init__(self, again: self_test.SelfTestTokens, top: tuple[tuple[int, float], ...] = TIE) -> None:
        self.again = again
        self.top = top
        self.asked: list[tuple[int, ...]] = []

    def self_test(self, _ranks: Any) -> Answering:
        return self

    async def golden_answers(self, prompts: Any) -> self_test.SelfTestTokens:
        assert prompts == PROMPTS
        return self.again

    async def most_probable(self, prompt: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
        self.asked.append(prompt)
        return self.top


def judged(tmp_path: Path, gateway: Answering) -> str:
    """Return what is said of a group that answers OTHER for the first time."""
    loader = ModelLoader(Settings(tmp_path, "", 0, 1, "tiny"), cast(Any, gateway.self_test))
    asyncio.run(loader.judge(cast(Any, None), PROMPTS, KEPT, OTHER))
    return loader.proof


@pytest.mark.parametrize("again", [OTHER, KEPT])
def test_a_near_tie_that_falls_the_other_way_is_no_finding(
    tmp_path: Path, again: self_test.SelfTestTokens
) -> None:
    gateway = Answering(again)
    assert judged(tmp_path, gateway) == ""
    assert gateway.asked == [WHERE_THEY_PART]


@pytest.mark.parametrize(
    "top",
    [
        pytest.param(CLEAR, id="a clear winner"),
        pytest.param(((9, -1.0), (6, -1.1)), id="another runner-up"),
        pytest.param(((8, -1.0), (5, -1.1)), id="another winner"),
    ],
)
def test_the_same_wrong_answer_twice_is_an_error(tmp_path: Path, top: Any) -> None:
    with pytest.raises(GroupError, match="golden proof failed") as failed:
        judged(tmp_path, Answering(OTHER, top))
    assert failed.value.code is Code.PROOF_FAILED


def test_one_near_tie_does_not_excuse_another_wrong_answer(tmp_path: Path) -> None:
    both = ((7, 2, 3), (4, 9, 9))
    gateway = Answering(both)  # its tie is at the second answer
    loader = ModelLoader(Settings(tmp_path, "", 0, 1, "tiny"), cast(Any, gateway.self_test))
    with pytest.raises(GroupError, match="golden proof failed"):
        asyncio.run(loader.judge(cast(Any, None), PROMPTS, KEPT, both))


@pytest.mark.parametrize("again", [KEPT, ((1, 2, 3), (4, 9, 8))])
def test_an_answer_that_does_not_come_again_is_a_warning(
    tmp_path: Path, again: self_test.SelfTestTokens
) -> None:
    assert "differently each time" in judged(tmp_path, Answering(again, CLEAR))


def test_the_second_answer_is_computed_and_not_taken_from_kept_caches() -> None:
    assert self_test.PROMPT_TOKENS + self_test.ANSWER_TOKENS <= SHORTEST_HIT


def test_the_first_answers_are_kept_and_files_of_old_versions_replaced(tmp_path: Path) -> None:
    path = tmp_path / self_test.FILE
    path.write_text(json.dumps({"a": "a digest", "b": [[1], [2]]}))
    assert self_test.kept(path, "a", KEPT) == KEPT
    assert self_test.kept(path, "a", OTHER) == KEPT
    assert self_test.kept(path, "b", OTHER) == OTHER
    assert self_test.kept(path, "b", KEPT) == OTHER


def test_sums_of_a_large_mesh_stay_below_what_comes_in_order_of_arrival() -> None:
    assert self_test.prompt_tokens(4096, mesh=True) == 8
    assert self_test.prompt_tokens(4096, mesh=False) == self_test.PROMPT_TOKENS
    assert self_test.prompt_tokens(0, mesh=True) == self_test.PROMPT_TOKENS
    assert self_test.prompt_tokens(1 << 20, mesh=True) == 1
    assert self_test.prompt_tokens(16, mesh=True) == self_test.PROMPT_TOKENS
    long, short = self_test.prompts(500), self_test.prompts(500, 3)
    assert [prompt[:3] for prompt in long] == short


def test_only_a_jaccl_mesh_of_three_varies() -> None:
    assert EpochGroup(1, 3, "jaccl").varies
    assert not EpochGroup(1, 2, "jaccl").varies
    assert not EpochGroup(1, 3, "jaccl", jaccl_ring=True).varies
    assert not EpochGroup(1, 3, "ring", kind=RING_ETHERNET).varies
    assert not EpochGroup(1, 3, "jaccl", split=(2, 1, 1)).varies  # it has no sums


def test_each_part_of_the_key_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    group = EpochGroup(1, 2, "ring", machines=("M3 24A", "M4 24A"))
    others: tuple[dict[str, Any], ...] = (
        {}, {"backend": "jaccl"}, {"machines": ("M4 24A", "M3 24A")}, {"world_size": 3}, {"split": (3, 1)},
        {"split": (2, 2)},
    )  # fmt: skip
    keys = {
        self_test.key(tmp_path, replace(group, **other).about, settings)
        for other in others
        for settings in ({}, {"compiled": False})
    }
    assert len(keys) == 12


def test_a_machine_without_a_cluster_has_its_chip_and_system_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = self_test.key(tmp_path, {}, {})
    monkeypatch.setattr(platform, "version", lambda: "Darwin Kernel Version 25.4.0: RELEASE_ARM64_T6031")
    assert self_test.key(tmp_path, {}, {}) != before
