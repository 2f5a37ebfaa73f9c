"""Operations of a decode step, counted in its graph beside mlx-lm's, and what MLX's attention gets on Metal.

No Metal is here. Its fast operations have stand-ins of one primitive each, and `runner_of` lays
steps out as there.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxtp.engine import batch
from mlxtp.engine.batch import EXACT_FROM, CacheKind, StepLayout, arrays_of, unfused_drafts
from mlxtp.engine.families import attention_heads
from mlxtp.engine.forwards import STEPS_BEFORE_TRACE, StepInputs
from mlxtp.engine.group import CollectiveCounter, LoneGroup
from mlxtp.engine.kernel_probe import launches
from mlxtp.engine.loader import load
from mlxtp.engine.runner import Runner
from mlxtp.engine.sampler import Chooser, LogitShaping

from ..reference import reference
from .families import FAMILIES
from .small_models import write_model
from .test_runner import PROMPT, decode, prefill, step

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "glm4_moe": FAMILIES["glm4_moe"],
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2},
    "deepseek_v3": FAMILIES["deepseek_v3"],
}


@pytest.fixture(autouse=True)
def _as_on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PIECES", False)


def runner_of(
    folder: Path, exact_from: int = batch.WHOLE, *, compiled: bool = True, kv_bits: int = 0
) -> tuple[Any, Runner]:
    """The model, and its runner with what Metal wants, as `StepLayout.here` has it there."""
    loaded = load(folder, LoneGroup(), lambda: None)
    layout = StepLayout(exact_from, 0 if kv_bits else attention_heads(loaded.model)[0])
    caches = CacheKind(loaded.model, kv_bits, layout=layout)
    chooser = Chooser(LoneGroup(), LogitShaping())
    return loaded.model, Runner(loaded, caches, CollectiveCounter(), chooser, compiled=compiled)


@pytest.mark.parametrize(
    "family",
    ["llama", "gpt_oss", "gemma3_text", "deepseek_v3", "qwen3_5", "ministral3", "iquestloopcoder", "minimax"],
)
def test_rows_alone_and_together_say_the_same_as_on_a_cpu(tmp_path: Path, family: str) -> None:
    config = SHAPES.get(family, FAMILIES.get(family, {}))
    folder = write_model(tmp_path, model_type=family, **config)
    _, runner = runner_of(folder, 40)
    said = [prefill(runner, 1, PROMPT), *decode(runner, 1, 8, 24)]  # traced
    prefill(runner, 2, PROMPT)
    runner.arrange((64, 64))
    for i in range(6):
        first, second = step(runner, {1: 32 + i, 2: 8 + i})
        said += first
        assert second == [said[1 + i]]
    runner.stop(2, 0)
    said += decode(runner, 1, 38, 20)  # alone again, in arrays for two rows; then exact
    assert tuple(said) == reference(PROMPT, 51, folder)


def test_an_exact_step_leaves_no_garbage_that_holds_states(tmp_path: Path) -> None:
    """Until the collector ran, states of many steps would stay."""
    _, runner = runner_of(write_model(tmp_path, model_type="qwen3_5", **FAMILIES["qwen3_5"]), 1)
    said = [prefill(runner, 1, PROMPT), *decode(runner, 1, 8, 3)]
    gc.collect()
    gc.disable()
    try:
        said += decode(runner, 1, 11, 5)
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert len(said) == 9


def test_quantized_keys_are_read_exactly_too(tmp_path: Path) -> None:
    folder = write_model(tmp_path, head_dim=32)

    def said(exact_from: int) -> list[int]:
        _, runner = runner_of(folder, exact_from, kv_bits=8)
        return [prefill(runner, 1, PROMPT), *decode(runner, 1, 8, 40)]

    assert said(30) == said(batch.WHOLE)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], Any]]:
    """Stand-ins for MLX's fast operations; returns shapes of keys, and masks, of each attention."""
    seen: list[tuple[tuple[int, ...], Any]] = []

    def attention(q: mx.array, k: mx.array, v: mx.array, **given: Any) -> mx.array:
        mask = given.get("mask")
        seen.append((k.shape, mask))
        inputs = [q, k, v, *([mask] if isinstance(mask, mx.array) else [])]
        (out,) = mx.depends([mx.zeros((*q.shape[:3], v.shape[-1]), q.dtype)], inputs)
        return out

    def norm(x: mx.array, weight: mx.array | None, *_: Any) -> mx.array:
        return mx.depends([x], [x if weight is None else weight])[0]

    def rope(x: mx.array, *_: Any, offset: Any, **__: Any) -> mx.array:
        return mx.depends([x], [offset if isinstance(offset, mx.array) else x])[0]

    for name, stand_in in {"scaled_dot_product_attention": attention, "rms_norm": norm, "rope": rope}.items():
        monkeypatch.setattr(mx.fast, name, stand_in)
    return seen


def graph_of(runner: Runner, rows: int, at: int) -> mx.array:
    """The logits of the next step of rows 1 and on, not run."""
    uids = tuple(range(1, rows + 1))
    inputs = StepInputs(mx.zeros((rows, 1), dtype=mx.int32), None, (1,) * rows)
    parts = runner._batch.parts(uids)
    return runner._model.step(parts, uids, (at,) * rows, inputs, winners=False, drafts=0)[0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4_moe"])
def test_a_long_row_alone_is_read_exactly_and_without_a_mask(
    tmp_path: Path, family: str, attended: list[Any]
) -> None:
    model, runner = runner_of(write_model(tmp_path, model_type=family, **SHAPES[family]), 60)
    prefill(runner, 1, PROMPT)
    for at in range(8, 58):
        step(runner, {1: at})
    for at, exact in ((58, False), (59, True), (60, True)):
        attended.clear()
        graph_of(runner, 1, at)
        if not exact:
            assert all(mask is not None for _, mask in attended)  # or its graph is only replayed
            continue
        assert len(attended) == len(model.layers)
        assert {(shape[2], mask) for shape, mask in attended} == {(at + 1, None)}


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
def test_rows_together_have_one_mask_that_metal_does_not_copy(
    tmp_path: Path, family: str, attended: list[Any]
) -> None:
    folder = write_model(tmp_path, model_type=family, **SHAPES.get(family, FAMILIES.get(family, {})))
    _, runner = runner_of(folder, compiled=False)
    for uid in (1, 2, 3):
        prefill(runner, uid, PROMPT)
    runner.arrange((64,) * 4)
    step(runner, {1: 8, 2: 8, 3: 8})
    attended.clear()
    graph_of(runner, 3, 9)
    masks = [mask for _, mask in attended]
    assert len({id(mask) for mask in masks}) <= 2  # one for whole layers, one for windows
    for mask in masks:
        assert mask.shape[:3] == (3, 4, 1)  # rows, heads
        assert memoryview(mask).c_contiguous


def of_ours(folder: Path, rows: int, *, exact: bool) -> int:
    _, runner = runner_of(folder, 1 if exact else batch.WHOLE)
    for uid in range(1, rows + 1):
        prefill(runner, uid, PROMPT)
    runner.arrange((64,) * rows)
    for at in range(8, 8 + STEPS_BEFORE_TRACE + 2):
        step(runner, dict.fromkeys(range(1, rows + 1), at))
    logits = graph_of(runner, rows, 8 + STEPS_BEFORE_TRACE + 2)
    return launches(logits, *runner._batch.arrays())


def of_mlx_lm(folder: Path, rows: int) -> int:
    model = load(folder, LoneGroup(), lambda: None).model
    each = [make_prompt_cache(model) for _ in range(rows)]
    for caches in each:
        mx.eval(model(mx.array([PROMPT]), caches), arrays_of(caches))
    caches = each[0] if rows == 1 else [layer[0].merge(list(layer)) for layer in zip(*each, strict=True)]
    return launches(model(mx.zeros((rows, 1), dtype=mx.int32), caches), *arrays_of(caches))


@pytest.mark.parametrize(("rows", "exact"), [(1, False), (1, True), (4, False)])
@pytest.mark.parametrize("family", SHAPES)
def test_a_layer_launches_no_more_than_mlx_lms(
    tmp_path: Path, family: str, rows: int, exact: bool, attended: list[Any]
) -> None:
    ours, theirs = [], []
    for layers in (2, 6):
        config = {"model_type": family, "num_hidden_layers": layers, **SHAPES[family]}
        folder = write_model(tmp_path / str(layers), **config)
        ours.append(of_ours(folder, rows, exact=exact))
        theirs.append(of_mlx_lm(folder, rows))
    assert 0 < ours[1] - ours[0] <= theirs[1] - theirs[0]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "least"),
    [(64, 8, 4), (28, 4, 4), (40, 8, 6), (32, 8, 8), (96, 8, 2), (0, 0, 8), (32, 1, 8)],
)
def test_drafts_of_a_width_that_the_vector_kernel_takes(heads: int, kv_heads: int, least: int) -> None:
    """MLX: at most 8 queries, and at most 32 of them times query heads of a KV head; heads may be unknown."""
    assert list(unfused_drafts(heads, kv_heads)) == list(range(least, 8))


@pytest.mark.parametrize(
    ("rows", "width", "before", "exact"),
    [(1, 1, 1, False), (1, 1, 0, True), (2, 1, 0, False), (1, 2, 0, False)],
)
def test_exact_reading_begins_where_mlx_has_a_kernel_for_it(
    rows: int, width: int, before: int, exact: bool
) -> None:
    keys = EXACT_FROM - before
    arguments = StepLayout(EXACT_FROM, 4).arguments((keys - 1,) * rows, width, keys)
    assert isinstance(arguments[0], int) is exact
