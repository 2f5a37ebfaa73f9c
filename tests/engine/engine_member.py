"""A rank that errs while a file says so: `engine_member.py FOLDER <arguments of mlxtp.engine.worker>`.

While FOLDER/<name of a fault> exists, rank 1 has it; every other rank is as it should be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlxtp.engine import worker
from mlxtp.engine.executor import Forward, RankExecutor
from mlxtp.engine.sampler import Sampler
from mlxtp.wire.messages import PromptTokens, StepToken

FAULTS = ("another draw", "another position", "another token")


def err(is_ordered: Callable[[str], bool]) -> None:
    """Put the faults around the engine of this process."""
    choose, launch = Sampler.choose, RankExecutor.launch

    def choose_else(sampler: Sampler, logits: mx.array, positions: mx.array) -> mx.array:
        if is_ordered("another token"):
            return mx.minimum(choose(sampler, logits, positions) + 1, logits.shape[-1] - 1)
        return choose(sampler, logits, positions + 1 if is_ordered("another draw") else positions)

    def launch_else(rank: RankExecutor, step: int, frame: PromptTokens | StepToken) -> Forward:
        if isinstance(frame, StepToken) and is_ordered("another position"):
            frame = replace(frame, positions=tuple(position + 1 for position in frame.positions))
        return launch(rank, step, frame)

    Sampler.choose = choose_else  # type: ignore[method-assign]
    RankExecutor.launch = launch_else  # type: ignore[method-assign]


def main() -> None:
    folder, *arguments = sys.argv[1:]
    if arguments[arguments.index("--rank") + 1] == "1":
        err(lambda fault: (Path(folder) / fault).exists())
    worker.main(arguments)


if __name__ == "__main__":
    main()
