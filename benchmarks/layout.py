"""Rows of unlike lengths: the share of the room that tokens take, and the time of their steps.

Also steps of several tokens of a model whose attention is over compressed keys and values.

The first is counted with rank 0's scheduler alone. As a program, this is one rank with a model and nothing
around it. It answers each line on stdin with the mean seconds of a step. A line is a JSON list of the rows'
lengths, layouts, steps for each of these, and the tokens of a row in a step. Without layouts, the rank
takes the one that rank 0 would choose where there is room for any.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from mlxtp.engine.kv_cache import another_bucket, capacity, cheapest, laned_layouts, roomy
from mlxtp.engine.scheduler import Scheduler
from mlxtp.engine.steps import Policy
from mlxtp.wire.messages import Forward, Generate, PromptPart

from . import child, models
from .errors import Unmeasured
from .measures import Row, absolute, compare
from .stage import Stage, in_turn

ROOM = 1 << 16  #: tokens
LONG, SHORT = 1 << 15, (500, 2000)  #: tokens of the one long prompt, and fewest and most of the others
WAITING = 63
CHUNK = 512
TIMED_LONG, TIMED_SHORT = 2000, 200
BY_COST, LATENT = 3800, 2048  #: tokens of the long row beside seven short ones, and of the one over latents

#: Lengths of rows, layouts of their arrays, steps with each layout, and tokens of a row in a step.
Course = tuple[Sequence[int], Sequence[Sequence[int]], int, int]


async def measure(stage: Stage) -> list[Row]:
    shares = [held(seed) for seed in stage.rounds("room of unlike rows", full=15, quick=3) if seed]
    thin = models.write_walk(stage.folder / "rows", **models.THIN)
    latent = models.write_walk(stage.folder / "latent", **models.LATENT)
    unlike, steps = (TIMED_LONG, *[TIMED_SHORT] * 15), stage.pick(full=60, quick=20)
    alike, most = (TIMED_SHORT,) * 8, TIMED_SHORT + 256
    grown = tuple([(capacity(length),) * 8 for length in range(TIMED_SHORT + 64, most + 1, 64)])
    by_cost, apart = (BY_COST, *alike[1:]), (alike[1:], (BY_COST,))
    rows = [absolute("tokens in the room for KV caches, one long row beside short ones", shares)]
    async with _rank(thin, BY_COST) as step_ms:
        rows += [
            await _race(
                stage,
                step_ms,
                "a step of 16 rows, one of them long, by length vs in one array",
                (unlike, [[capacity(length + steps) for length in unlike]], steps, 1),
                (unlike, [[roomy(TIMED_LONG + steps)] * 16], steps, 1),
            ),
            await _race(
                stage,
                step_ms,
                "a step of 8 rows that are copied every 64 tokens vs never",
                (alike, grown, 64, 1),
                (alike, [[grown[-1][0]] * 8] * len(grown), 64, 1),
            ),
            await _race(
                stage,
                step_ms,
                "a step of 7 short rows and a long one, vs the same apart",
                (by_cost, [], steps, 1),
                *[(lengths, [], steps, 1) for lengths in apart],
            ),
        ]
    async with _rank(latent, LATENT) as step_ms:
        name = "a step of two tokens behind 2,048 over compressed keys, vs one token"
        courses = [((LATENT,), [], steps // 2, width) for width in (2, 1)]
        return [*rows, await _race(stage, step_ms, name, *courses)]


@asynccontextmanager
async def _rank(model: Path, longest: int) -> AsyncIterator[Callable[[Course], Awaitable[float]]]:
    """A rank for rows of up to `longest` tokens, as a function that returns milliseconds of a step."""
    process = await child.start(0, "benchmarks.layout", str(model), str(longest))

    async def step_ms(course: Course) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(course).encode() + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise Unmeasured("the rank ended")
        return float(json.loads(line)) * 1e3

    try:
        yield step_ms
    finally:
        await child.end(process)


async def _race(
    stage: Stage, step_ms: Callable[[Course], Awaitable[float]], what: str, ours: Course, *peers: Course
) -> Row:
    """The time of a step against the sum of those of `peers`."""
    columns: tuple[list[float], list[float]] = [], []
    for number in stage.rounds(what, full=9, quick=2):
        for i in in_turn(number, 0, 1):
            took_ms = sum([await step_ms(course) for course in ((ours,), peers)[i]])
            if number:
                columns[i].append(took_ms)
    return compare(what, *columns)


def held(seed: int) -> float:
    """Return the share of the room that tokens take once no further sequence is admitted."""
    random = Random(seed)
    policy = Policy(frozenset(), prefill_chunk=ROOM, chunk_beside=ROOM, kv_tokens=ROOM, drafts=False)
    scheduler = Scheduler(policy)
    lengths = [LONG, *[random.randint(*SHORT) for _ in range(WAITING)]]
    for uid, length in enumerate(lengths, 1):
        scheduler.add(Generate(uid, (7,) * length, 400))
    while True:
        frame = scheduler.next()
        if isinstance(frame, Forward) and not frame.prompts:
            return sum(frame.positions) / ROOM
        if isinstance(frame, Forward):
            scheduler.record(() if frame.unfinished else (7,) * len(frame.rows))


def _main(folder: Path, longest: int) -> None:
    import mlx.core as mx

    from mlxtp.engine.batch import CacheKind
    from mlxtp.engine.group import CollectiveCounter, LoneGroup
    from mlxtp.engine.loader import load
    from mlxtp.engine.runner import Runner
    from mlxtp.engine.sampler import Chooser, LogitShaping

    group = LoneGroup()
    loaded = load(folder, group, lambda: None)
    chooser = Chooser(group, LogitShaping())
    kinds = CacheKind(loaded.model)
    runner = Runner(loaded, kinds, CollectiveCounter(), chooser, compiled=True)
    gpu = mx.metal.is_available()
    bucket = another_bucket(kinds.attending, loaded.kv_token_bytes, gpu=gpu, skips=gpu)
    for at in range(0, longest, CHUNK):
        tokens = (7,) * (min(at + CHUNK, longest) - at)
        part = PromptPart(longest)
        mx.eval(runner.run(Forward((1,), (at,), (len(tokens),), tokens, prompts=(part,))).tokens)
    runner.stop(1, longest)
    uid = 1
    for line in sys.stdin:
        lengths, layouts, steps, width = json.loads(line)
        uids, took_s = tuple(range(uid + 1, uid + 1 + len(lengths))), []
        fed = ((width,) * len(uids), (7,) * width * len(uids)) if width > 1 else ((), ())
        if not layouts:
            needed = tuple([length + steps + width for length in lengths])
            ways = laned_layouts(needed, (0,) * len(needed))
            layouts = [[room for room, _ in cheapest(ways, needed, bucket, 0)]]
        for uid, length in zip(uids, lengths, strict=True):
            part = PromptPart(length, source=1)
            mx.eval(runner.run(Forward((uid,), (length - 1,), (1,), (7,), prompts=(part,))).tokens)
        for number, rooms in enumerate(layouts):
            for step in range(steps):
                began = time.perf_counter()
                if not step:
                    runner.arrange(tuple(rooms))
                positions = tuple([length + number * steps + step for length in lengths])
                mx.eval(runner.run(Forward(uids, positions, *fed)).tokens)
                took_s.append(time.perf_counter() - began)
        for each in uids:
            runner.stop(each, 0)
        print(sum(took_s[steps // 4 :]) / len(took_s[steps // 4 :]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
