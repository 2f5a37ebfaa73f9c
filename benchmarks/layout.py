"""Rows of unlike lengths: the share of the room that tokens take, and the time of their steps.

The first is counted with rank 0's scheduler alone. As a program, this is one rank with a model and nothing
around it. It answers each line on stdin, a JSON list of the rows' lengths, layouts and steps for each of
them, with the mean seconds of a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from mlxtp.engine.kv_cache import capacity, roomy
from mlxtp.engine.scheduler import Scheduler
from mlxtp.engine.steps import Decode, Policy, Prefill, PrefillTogether, SequenceParams

from . import child, models
from .errors import Unmeasured
from .measures import Row, absolute, compare
from .stage import Stage, in_turn

ROOM = 1 << 16  #: tokens
LONG, SHORT = 1 << 15, (500, 2000)  #: tokens of the one long prompt, and fewest and most of the others
WAITING = 63
CHUNK = 512
TIMED_LONG, TIMED_SHORT = 2000, 200

#: Lengths of rows, layouts of their arrays, and steps with each layout.
Course = tuple[Sequence[int], Sequence[Sequence[int]], int]


async def measure(stage: Stage) -> list[Row]:
    shares = [held(seed) for seed in stage.rounds("room of unlike rows", full=15, quick=3) if seed]
    model = models.write_walk(stage.folder / "rows", **models.THIN)
    process = await child.start(0, "benchmarks.layout", str(model))

    async def step_s(course: Course) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(course).encode() + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise Unmeasured("the rank ended")
        return float(json.loads(line)) * 1e3

    async def race(what: str, ours: Course, peer: Course) -> Row:
        columns: tuple[list[float], list[float]] = [], []
        for number in stage.rounds(what, full=9, quick=2):
            times = {i: await step_s((ours, peer)[i]) for i in in_turn(number, 0, 1)}
            for i in range(2 if number else 0):
                columns[i].append(times[i])
        return compare(what, *columns)

    unlike, steps = (TIMED_LONG, *[TIMED_SHORT] * 15), stage.pick(full=60, quick=20)
    alike, most = (TIMED_SHORT,) * 8, TIMED_SHORT + 256
    grown = tuple([(capacity(length),) * 8 for length in range(TIMED_SHORT + 64, most + 1, 64)])
    try:
        rows = [
            await race(
                "a step of 16 rows, one of them long, by length vs in one array",
                (unlike, [[capacity(length + steps) for length in unlike]], steps),
                (unlike, [[roomy(TIMED_LONG + steps)] * 16], steps),
            ),
            await race(
                "a step of 8 rows that are copied every 64 tokens vs never",
                (alike, grown, 64),
                (alike, [[grown[-1][0]] * 8] * len(grown), 64),
            ),
        ]
    finally:
        await child.end(process)
    return [absolute("tokens in the room for KV caches, one long row beside short ones", shares), *rows]


def held(seed: int) -> float:
    """Return the share of the room that tokens take once no further sequence is admitted."""
    random = Random(seed)
    policy = Policy(frozenset(), prefill_chunk=ROOM, chunk_beside=ROOM, kv_tokens=ROOM, drafts=False)
    scheduler = Scheduler(policy)
    lengths = [LONG, *[random.randint(*SHORT) for _ in range(WAITING)]]
    for uid, length in enumerate(lengths, 1):
        scheduler.add(uid, (7,) * length, SequenceParams(400))
    while True:
        move = scheduler.next()
        match move:
            case Prefill():
                scheduler.record((7,) if move.last else ())
            case PrefillTogether():
                scheduler.record((7,) * len(move.prompts))
            case Decode():
                return sum(move.positions) / ROOM


def _main(folder: Path) -> None:
    import mlx.core as mx

    from mlxtp.engine.batch import CacheKind
    from mlxtp.engine.group import CollectiveCounter, LoneGroup
    from mlxtp.engine.loader import load
    from mlxtp.engine.runner import Runner
    from mlxtp.engine.sampler import Chooser, LogitShaping
    from mlxtp.wire.messages import PromptTokens, StepToken

    group = LoneGroup()
    loaded = load(folder, group, lambda: None)
    chooser = Chooser(group, LogitShaping())
    runner = Runner(loaded, CacheKind(loaded.model), CollectiveCounter(), chooser, compiled=True)
    for at in range(0, TIMED_LONG, CHUNK):
        tokens = (7,) * (min(at + CHUNK, TIMED_LONG) - at)
        mx.eval(runner.prefill(PromptTokens(1, at, TIMED_LONG, tokens)).tokens)
    runner.stop(1, TIMED_LONG)
    uid = 1
    for line in sys.stdin:
        lengths, layouts, steps = json.loads(line)
        uids, took_s = tuple(range(uid + 1, uid + 1 + len(lengths))), []
        for uid, length in zip(uids, lengths, strict=True):
            mx.eval(runner.prefill(PromptTokens(uid, length - 1, length, (7,), 1)).tokens)
        for number, rooms in enumerate(layouts):
            for step in range(steps):
                began = time.perf_counter()
                if not step:
                    runner.arrange(tuple(rooms))
                positions = tuple([length + number * steps + step for length in lengths])
                mx.eval(runner.step(StepToken(uids, positions)).tokens)
                took_s.append(time.perf_counter() - began)
        for each in uids:
            runner.stop(each, 0)
        print(sum(took_s[steps // 4 :]) / len(took_s[steps // 4 :]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
