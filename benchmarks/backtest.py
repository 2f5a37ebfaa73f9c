"""The speed model against published speeds of answers and of prompts.

`python -m benchmarks.backtest` prints the table. None of the figures was measured here. Groups are meshes
over RDMA; those with layers are pipelines. `assumed` has the assumptions where a source leaves something
open.

exo switches fast fences on. Its README names Kimi K2 Thinking, whose experts have 4 bits and everything
else 16, and DeepSeek at 8 bits, which one Mac could not hold: the 4 bits of the table are taken. Qwen 3.5,
3.6 and 3.8 of 27B and of 35B-A3B have the same sizes. Left out: pipelines of ds4 (antirez/ds4 #651, #715)
and drafts of DeepSeek V4 and GLM-5.3-Flash (jundot/omlx #3118), which have kernels of their own; GLM-5 at
0.3 tokens a second (exo-explore/exo #1468), where GPUs waited for each other until macOS ended their work;
and Qwen3.6-27B on "two Macs" (jundot/omlx #2423), which are not named.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlxtp.placement.cost_model import (
    ALONE,
    JACCL_MESH,
    PROMPT,
    RING_THUNDERBOLT,
    RankHardware,
    SpeedEstimate,
    drafted,
    speed,
    stage_costs,
    stages,
)
from mlxtp.placement.tables import chip

from .published_models import published

M3_ULTRA = "Apple M3 Ultra"
EXO = "exo-explore/exo #1781"
GURUSWAMI = "guruswami-ai/mlx-benchmarks"
MLX_LM_MTP = "ml-explore/mlx-lm #990"


@dataclass(frozen=True, slots=True)
class Published:
    """One published decode speed, in tokens a second: one stream, short context.

    model     a name in `published_models.PUBLISHED`
    chips     of the machines, in rank order
    fast      whether it ran with fast fences
    assumed   assumptions where the source leaves something open
    split     layers of each rank of a pipeline, of which rank 0 has the last ones
    fabric    of several machines
    drafts    of an MTP head, in each step
    accepted  share of first drafts that were right
    prompt    tokens a second of a prompt of 1,000 tokens, if the source has it
    """

    model: str
    chips: tuple[str, ...]
    measured: float
    source: str
    fast: bool = True
    assumed: str = ""
    split: tuple[int, ...] = ()
    fabric: str = JACCL_MESH
    drafts: int = 0
    accepted: float = 0.0
    prompt: float = 0.0


def _scaling(model: str, source: str, figures: dict[int, float], assumed: str = "") -> list[Published]:
    """The same model on one, two or four M3 Ultra, over RDMA."""
    return [
        Published(model, (M3_ULTRA,) * n, figure, source, assumed=assumed) for n, figure in figures.items()
    ]


def _with_drafts(row: Published, measured: float, accepted: float, assumed: str = "") -> list[Published]:
    """A row, and the same with one draft of the MTP head a step."""
    return [row, replace(row, measured=measured, drafts=1, accepted=accepted, assumed=assumed or row.assumed)]


def _with_prompts(
    model: str, figures: dict[int, tuple[float, float]], assumed: str = "default fences"
) -> list[Published]:
    """The same model on one, two or four M3 Ultra, over RDMA: tokens a second of answers and of prompts."""
    return [
        replace(row, fast=False, prompt=figures[len(row.chips)][1])
        for row in _scaling(model, GURUSWAMI, {n: answer for n, (answer, _) in figures.items()}, assumed)
    ]


PUBLISHED: Sequence[Published] = (
    *_scaling("qwen3-235b-a22b-8bit", EXO, {1: 19.5, 2: 26.2, 4: 31.9}),
    *_scaling("deepseek-v3.1-4bit", EXO, {1: 21.1, 2: 27.8, 4: 32.5}),
    *_scaling("kimi-k2-thinking", EXO, {2: 21.6, 4: 28.3}, "which K2: the one whose experts have 4 bits"),
    *_scaling("llama-4-scout-4bit", EXO, {1: 46.7, 2: 58.2, 4: 69.7}),
    *_scaling("llama-4-scout-8bit", EXO, {1: 30.3, 2: 44.0, 4: 57.7}),
    *_scaling("llama-4-maverick-4bit", EXO, {1: 53.1, 2: 67.5, 4: 76.1}),
    *_scaling("llama-4-maverick-6bit", EXO, {2: 56.3, 4: 69.9}),
    *_scaling("glm-5-mxfp8", "exo-explore/exo #1468", {2: 18.3, 4: 23.7}),
    *_scaling("glm-4.6-8bit", "ml-explore/mlx-lm #698", {1: 16.0, 4: 24.6}, "8 bits, fast fences"),
    Published("gpt-oss-120b", ("Apple M4 Max",), 80.0, "exo-explore/exo #2070"),
    Published("gpt-oss-120b", ("Apple M5 Max",), 89.0, "exo-explore/exo #2070"),
    Published(
        "gpt-oss-120b", ("Apple M4 Max", "Apple M5 Max"), 98.0, "exo-explore/exo #2070", assumed="fast fences"
    ),
    Published("gpt-oss-120b", ("Apple M4 Max", "Apple M5 Max"), 48.0, "exo-explore/exo #2070, in exo"),
    Published(
        "qwen3.6-27b-4bit",
        ("Apple M4 Pro",) * 2,
        13.3,
        "ml-explore/mlx-lm #990, older",
        fast=False,
        assumed="default fences",
    ),
    *_with_drafts(
        Published(
            "qwen3.6-27b-4bit", ("Apple M4 Pro",) * 2, 17.0, MLX_LM_MTP, fast=False, assumed="default fences"
        ),
        25.0,
        0.8,
        "default fences; acceptance 0.8",
    ),
    *_with_drafts(Published("qwen3.6-27b-4bit", ("Apple M4 Pro",), 15.3, MLX_LM_MTP), 23.3, 0.806),
    *_with_drafts(
        Published("qwen3.6-27b-4bit", ("Apple M5 Pro",), 17.7, MLX_LM_MTP),
        23.25,
        0.795,
        "acceptance of 44.3 % is one of all tokens: 0.795 of drafts",
    ),
    *_with_drafts(
        Published("qwen3.6-35b-a3b-4bit", (M3_ULTRA,), 73.7, "waybarrios/vllm-mlx #245"), 85.9, 0.795
    ),
    *_with_drafts(
        Published("glm-5-4bit", (M3_ULTRA,), 15.3, "jundot/omlx #2113", assumed="GLM-5.2 as GLM-5"),
        19.0,
        0.89,
        "GLM-5.2 as GLM-5; 1 draft; acceptance of GLM-5 in vllm-project/vllm-ascend #9803",
    ),
    Published(
        "qwen3-235b-a22b-8bit",
        (M3_ULTRA, "Apple M4 Max"),
        17.8,
        "ml-explore/mlx-lm #1137",
        fast=False,
        assumed="of 256 + 64 GB: these chips, TCP over Thunderbolt, default fences",
        split=(80, 14),
        fabric=RING_THUNDERBOLT,
    ),
    *(
        Published(
            "gpt-oss-120b",
            (first, "Apple M5 Max"),
            68.0,
            "exo-explore/exo #2070, in exo over TCP",
            assumed="even split, TCP over Thunderbolt, fast fences",
            split=(18, 18),
            fabric=RING_THUNDERBOLT,
        )
        for first in ("Apple M4 Max", "Apple M5 Max")
    ),
    Published(
        "kimi-k2-thinking",
        (M3_ULTRA,) * 3,
        14.0,
        "inferencerlabs/inferencer-feedback #103, in exo",
        assumed="K2.5 as K2 Thinking; a pipeline, for 64 heads divide by no 3; split by memory; fast fences",
        split=(31, 15, 15),
    ),
    Published("llama-3.1-8b-4bit", (M3_ULTRA,), 119.0, "ml-explore/mlx-lm"),
    Published("llama-3.3-70b-4bit", ("Apple M3 Max",), 9.35, "ml-explore/mlx-lm"),
    Published("llama-3.3-70b-bf16", ("Apple M2 Ultra",), 4.7, "ml-explore/mlx-examples #1069"),
    Published("qwen3.6-27b-8bit", (M3_ULTRA,), 18.9, "ml-explore/mlx #4521"),
    *_with_prompts("llama-3.1-405b-4bit", {1: (2.99, 27.8), 2: (4.31, 51.0), 4: (6.44, 95.1)}),
    *_with_prompts(
        "deepseek-v3.1-4bit",
        {1: (20.16, 234), 2: (16.21, 304), 4: (16.9, 597)},
        "V3.2 as V3.1; default fences",
    ),
    *_with_prompts(
        "kimi-k2-thinking", {2: (14.34, 362), 4: (16.11, 555)}, "K2.5 as K2 Thinking; default fences"
    ),
    *_with_prompts("qwen2.5-32b-4bit", {1: (31.46, 349), 2: (21.63, 577), 4: (18.35, 912)}),
    *_with_prompts("mixtral-8x7b-4bit", {1: (69.09, 788), 2: (43.81, 1302), 4: (44.71, 2096)}),
)
PROMPTS = [row for row in PUBLISHED if row.prompt]


def predicted(row: Published) -> float:
    """Tokens a second of an answer by the model."""
    found, ranks = _estimate(row)
    if not row.drafts:
        return found.tokens_per_second
    return drafted(found, published(row.model), ranks, row.drafts, row.accepted).tokens_per_second


def predicted_prompt(row: Published) -> float:
    """Tokens a second of a prompt by the model."""
    return PROMPT / _estimate(row)[0].prompts_s(PROMPT, 1)


def _estimate(row: Published) -> tuple[SpeedEstimate, list[RankHardware]]:
    ranks = [RankHardware(str(i), chip(name)) for i, name in enumerate(row.chips)]
    kind = row.fabric if len(ranks) > 1 else ALONE
    shape = published(row.model)
    cut = zip(stages(row.split), ranks, strict=True) if row.split else ()
    costs = [stage_costs(shape.stage(*layers), rank) for layers, rank in cut]
    return speed(shape, ranks, kind, costs=costs, fast_fences=row.fast), ranks


def error(row: Published) -> float:
    """Return the error of the prediction, as a share of the measured speed."""
    return predicted(row) / row.measured - 1


def prompt_error(row: Published) -> float:
    return predicted_prompt(row) / row.prompt - 1


def median_error(rows: Sequence[Published] = PUBLISHED) -> float:
    return statistics.median(abs(error(row)) for row in rows)


def median_prompt_error() -> float:
    return statistics.median(abs(prompt_error(row)) for row in PROMPTS)


def text() -> str:
    """Return the table and a summary."""
    headings = ("model", "machines", "fences", "measured", "predicted", "error", "source", "assumed")
    lines = [f"| {' | '.join(headings)} |", "|---|---|---|---:|---:|---:|---|---|"]
    for row in PUBLISHED:
        fences = ("fast" if row.fast else "default") if len(row.chips) > 1 else "–"
        figures = (f"{row.measured:.4g}", f"{predicted(row):.1f}", f"{error(row):+.0%}")
        split = f", layers {' + '.join(map(str, row.split))}" if row.split else ""
        split += f", {row.drafts} MTP draft" if row.drafts else ""
        cells = (row.model, _machines(row.chips) + split, fences, *figures, row.source, row.assumed)
        lines.append(f"| {' | '.join(cells)} |")
    plain = [row for row in PUBLISHED if not row.drafts]
    alone = [row for row in plain if len(row.chips) == 1]
    groups = [row for row in plain if len(row.chips) > 1 and not row.split]
    drafts = [row for row in PUBLISHED if row.drafts]
    pipelines = [row for row in PUBLISHED if row.split]
    within = sum(abs(error(row)) <= 0.2 for row in PUBLISHED)
    lines += [
        "",
        f"Median error: {median_error():.1%} over {len(PUBLISHED)} rows; {median_error(alone):.1%} over the "
        f"{len(alone)} of single Macs, to 12 of which three constants are fitted, and "
        f"{median_error(groups):.1%} over the {len(groups)} of groups that divide each layer, to which none "
        f"is. The {len(pipelines)} of pipelines are off by {_range(pipelines)}, and the {len(drafts)} with "
        f"MTP drafts by {_range(drafts)}. "
        f"{within} rows are within 20 %.",
    ]
    lines += [
        "",
        "| a prompt of 1,000 tokens | machines | measured | predicted | error |",
        "|---|---|---:|---:|---:|",
    ]
    for row in PROMPTS:
        figures = (f"{row.prompt:.4g}", f"{predicted_prompt(row):.1f}", f"{prompt_error(row):+.0%}")
        lines.append(f"| {' | '.join((row.model, _machines(row.chips), *figures))} |")
    median = median_prompt_error()
    lines += [
        "",
        f"Median error of prompts: {median:.1%} over {len(PROMPTS)} rows; nothing is fitted to them.",
    ]
    return "\n".join(lines)


def _range(rows: Sequence[Published]) -> str:
    return f"{min(map(error, rows)):+.0%} to {max(map(error, rows)):+.0%}"


def _machines(chips: Sequence[str]) -> str:
    names = [name.removeprefix("Apple ") for name in chips]
    if len(set(names)) > 1:
        return " + ".join(names)
    return f"{len(names)} × {names[0]}" if len(names) > 1 else names[0]


if __name__ == "__main__":
    print(text())
