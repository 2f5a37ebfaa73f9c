"""Main thread's processor time of a step: what surrounds the kernels, beside mlx-lm's own loops.

As a program, this is one process with the same model twice, as a rank loads it and as mlx-lm does. It answers
each line on stdin, a JSON list, with microseconds: of a decode step of so many rows, each with so many
tokens, for "ours" or "theirs"; of reading prompts, "together" or "apart", with layers of windows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxtp.wire.messages import Forward, PromptPart

from . import child, models
from .errors import Unmeasured
from .measures import Row, compare
from .stage import Stage, in_turn

LAYERS, WINDOW = 64, 32
PROMPT, PROMPTS, READINGS = 48, 8, 3
STEPS, FIRST = 40, 12  #: of a course, and those that are not measured: shapes are traced when they come again
DEEP = {**models.THIN, "num_hidden_layers": LAYERS, "head_dim": 32}
WINDOWED = {
    **DEEP,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "sliding_window": WINDOW,
}

#: Each row's name, then ours and its peer as lines for the program.
COURSES: tuple[tuple[str, list[Any], list[Any]], ...] = (
    *(
        (
            f"main thread of a step of {rows} row{'s' * (rows > 1)} vs mlx-lm",
            ["ours", rows, 1],
            ["theirs", rows],
        )
        for rows in (1, 8, 16)
    ),
    ("main thread of a step of three tokens vs of one", ["ours", 1, 3], ["ours", 1, 1]),
    ("main thread of reading 8 prompts together vs apart, windows", ["together"], ["apart"]),
)


async def measure(stage: Stage) -> list[Row]:
    folders = [
        models.write_walk(stage.folder / name, **sizes)
        for name, sizes in (("deep", DEEP), ("windowed", WINDOWED))
    ]
    process = await child.start(0, "benchmarks.building", *map(str, folders))

    async def took_us(course: list[Any]) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(course).encode() + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise Unmeasured("the process ended")
        return float(line)

    rows = []
    try:
        for name, *courses in COURSES:
            columns: tuple[list[float], list[float]] = [], []
            for number in stage.rounds(name, full=9, quick=2):
                for side in in_turn(number, 0, 1):
                    found = await took_us(courses[side])
                    if number:
                        columns[side].append(found)
            rows.append(compare(name, *columns))
    finally:
        await child.end(process)
    return rows


class OneRank:
    """A model of its own, whose rows all have the same prompt."""

    def __init__(self, folder: Path) -> None:
        from mlxtp.engine.batch import CacheKind
        from mlxtp.engine.group import CollectiveCounter, LoneGroup
        from mlxtp.engine.loader import load
        from mlxtp.engine.runner import Runner
        from mlxtp.engine.sampler import Chooser, LogitShaping

        loaded = load(folder, LoneGroup(), lambda: None)
        chooser = Chooser(LoneGroup(), LogitShaping())
        self._runner = Runner(loaded, CacheKind(loaded.model), CollectiveCounter(), chooser, compiled=True)
        self._uid = 0

    def step_s(self, rows: int, width: int) -> float:
        runner, uids = self._runner, self._uids(rows)
        for each in uids:
            runner.run(_reading(each)).tokens.tolist()
        runner.arrange((256,) * rows)
        fed = ((width,) * rows, (7,) * rows * width) if width > 1 else ((), ())
        steps = (
            runner.run(Forward(uids, (at,) * rows, *fed)).tokens for at in range(PROMPT, PROMPT + STEPS + 1)
        )
        last = [next(steps)]

        def begin() -> None:
            last.append(next(steps))
            last.pop(0).tolist()

        took_s = per_step(begin)
        for each in uids:
            runner.stop(each, 0)
        return took_s

    def reading_s(self, *, together: bool) -> float:
        took_s = 0.0
        for _ in range(READINGS):
            uids = self._uids(PROMPTS)
            for group in (uids,) if together else [(each,) for each in uids]:
                since = time.thread_time()
                chosen = self._runner.run(_reading(*group))
                took_s += time.thread_time() - since
                chosen.tokens.tolist()
            for each in uids:
                self._runner.stop(each, 0)
        return took_s / READINGS

    def _uids(self, rows: int) -> tuple[int, ...]:
        self._uid += rows
        return tuple(range(self._uid + 1 - rows, self._uid + 1))


def _reading(*uids: int) -> Forward:
    parts, widths = (PromptPart(PROMPT),) * len(uids), (PROMPT,) * len(uids)
    return Forward(uids, (0,) * len(uids), widths, (7,) * PROMPT * len(uids), prompts=parts)


def per_step(begin: Callable[[], object]) -> float:
    """Return the main thread's seconds. `begin` starts the next step and reads the tokens of the last."""
    for _ in range(FIRST):
        begin()
    since = time.thread_time()
    for _ in range(STEPS - FIRST):
        begin()
    return (time.thread_time() - since) / (STEPS - FIRST)


def step_of_theirs_s(model: Any, rows: int) -> float:
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator, generate_step

    if rows == 1:
        found = generate_step(mx.array([7] * PROMPT), model, max_tokens=STEPS + 2)
        return per_step(lambda: next(found))
    generator = BatchGenerator(model, max_tokens=STEPS + 2, prefill_batch_size=rows)
    generator.insert([[7] * PROMPT for _ in range(rows)])
    while len(generator.next_generated()) < rows:
        pass
    took_s = per_step(generator.next_generated)
    generator.close()
    return took_s


def _main(deep: Path, windowed: Path) -> None:
    from mlx_lm.utils import load_model

    ours, reader, theirs = OneRank(deep), OneRank(windowed), load_model(deep)[0]
    for line in sys.stdin:
        kind, *sizes = json.loads(line)
        if kind == "ours":
            found_s = ours.step_s(*sizes)
        elif kind == "theirs":
            found_s = step_of_theirs_s(theirs, *sizes)
        else:
            found_s = reader.reading_s(together=kind == "together")
        print(found_s * 1e6, flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main(*map(Path, sys.argv[1:]))
