"""A rank that errs while a file says so: `engine_member.py FOLDER <arguments of mlxtp.engine.worker>`.

While FOLDER/<name of a fault> exists, rank 1 has it; every other rank is as it should be. Faults of messages,
but for late ones, and of choices come once for each file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxtp.engine import executor, worker
from mlxtp.engine.executor import RankExecutor, RunningForward
from mlxtp.engine.group import RingGroup
from mlxtp.engine.loader import ModelShare
from mlxtp.engine.pipeline import Border, LateTokens
from mlxtp.engine.sampler import Sampler
from mlxtp.wire.messages import Forward

from ..mlx_errors import OUT_OF_MEMORY

FAULTS = ("another draw", "another position", "another proposal")
MESSAGES = ("no message", "two messages", "messages exchanged", "a late message")


def err(is_ordered: Callable[[str], bool]) -> None:
    """Put the faults around the engine of this process."""
    choose, launch = Sampler.choose, RankExecutor.launch

    def choose_else(sampler: Sampler, logits: mx.array, positions: mx.array) -> mx.array:
        return choose(sampler, logits, positions + 1 if is_ordered("another draw") else positions)

    def launch_else(rank: RankExecutor, step: int, frame: Forward) -> RunningForward:
        if not frame.prompts and is_ordered("another position"):
            frame = replace(frame, positions=tuple(position + 1 for position in frame.positions))
        forward = launch(rank, step, frame)
        if (drafts := forward.chosen.drafts) is not None and is_ordered("another proposal"):
            forward = replace(forward, chosen=replace(forward.chosen, drafts=drafts + 1))
        return forward

    Sampler.choose = choose_else  # type: ignore[method-assign]
    RankExecutor.launch = launch_else  # type: ignore[method-assign]


def err_at_a_border(folder: Path) -> None:
    """Put the faults of MESSAGES around what this process sends to the next stage."""
    hand_on = Border.hand_on
    kept: list[tuple[mx.array, int]] = []
    once = partial(_once, folder)

    def hand_on_else(border: Border, hidden: mx.array, number: int) -> mx.array:
        if (folder / "a late message").exists():
            time.sleep(1.0)
        if once("no message"):
            return hidden
        if once("messages exchanged"):
            kept.append((hidden, number))
            return hidden
        sent = hand_on(border, hidden, number)
        if kept or once("two messages"):
            first = border._handing_on
            hand_on(border, *(kept.pop() if kept else (hidden, number)))
            border._handing_on = (*first, *border._handing_on)
        return sent

    Border.hand_on = hand_on_else  # type: ignore[method-assign]


def err_at_a_choice(folder: Path) -> None:
    """Put faults around what this process takes for the tokens that rank 0 chose.

    "another choice" lasts until the process ends.
    """
    supply = LateTokens.supply
    wrong = False

    def supply_else(late: LateTokens, forward: int, tokens: tuple[int, ...]) -> None:
        nonlocal wrong
        if _once(folder, "a choice skipped"):
            return
        wrong = wrong or _once(folder, "another choice")
        supply(late, forward, tuple(token ^ 1 for token in tokens) if wrong else tokens)

    LateTokens.supply = supply_else  # type: ignore[method-assign]


def _once(folder: Path, fault: str) -> bool:
    there = (folder / fault).exists()
    (folder / fault).unlink(missing_ok=True)
    return there


def run_out_of_memory(folder: Path) -> None:
    """Have this process find no memory, while "no memory" is ordered, once it has one layer of a model."""
    load = executor.load

    def load_else(path: Path, group: Any, progress: Callable[[], None], *how: Any, **more: Any) -> ModelShare:
        def advance() -> None:
            progress()
            if (folder / "no memory").exists():
                raise RuntimeError(OUT_OF_MEMORY[0])

        return load(path, group, advance, *how, **more)

    executor.load = load_else  # type: ignore[attr-defined]


def send_one_shape() -> None:
    """Have this process send as over JACCL: all messages to another rank have the same shape."""
    init, send = RingGroup.__init__, RingGroup._send
    sizes: set[int] = set()

    def init_uniform(group: RingGroup, handle: Any, *, uniform: bool = False) -> None:
        init(group, handle, uniform=True)

    def send_checked(group: RingGroup, row: mx.array, rank: int) -> mx.array:
        sizes.add(row.size)
        assert len(sizes) == 1, sizes
        return send(group, row, rank)

    RingGroup.__init__ = init_uniform  # type: ignore[method-assign]
    RingGroup._send = send_checked  # type: ignore[method-assign]


def main() -> None:
    folder, *arguments = sys.argv[1:]
    if arguments[arguments.index("--rank") + 1] == "1":
        err(lambda fault: (Path(folder) / fault).exists())
        err_at_a_border(Path(folder))
        err_at_a_choice(Path(folder))
        run_out_of_memory(Path(folder))
    if (Path(folder) / "one shape").exists():
        send_one_shape()
    worker.main(arguments)


if __name__ == "__main__":
    main()
