"""A model of about 400 MB: what a rank holds of it, its peak while it loaded, and how long that took."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from mlxtp.agent import Agent

from . import models
from .errors import Unmeasured
from .measures import Row, absolute, compare
from .stage import RANKS, Stage

_HEARTBEATS_S = 1.2  #: Seconds for two heartbeats of a rank, which report the memory that it holds.


async def measure(stage: Stage) -> list[Row]:
    folder = stage.folder / "large"
    stage.say("writing a model of about 400 MB")
    share = await asyncio.to_thread(models.write_large, folder) / RANKS / 1e6
    held, peaks, times = [], [], []
    for number in range(stage.pick(full=3, quick=1)):
        stage.say(f"loading it, round {number + 1}")
        stages: dict[str, float] = {}
        async with stage.own_agent({}, model=folder, stages=stages) as agent:
            await asyncio.sleep(_HEARTBEATS_S)
            held.append(_largest(agent, "weight_bytes", "memory_bytes") / 1e6)
            peaks.append(_largest(agent, "load_peak_bytes", "peak_memory_bytes") / 1e6)
        times.append(stages["loaded"] - stages["proven"])
    shares = [share] * len(held)
    return [
        compare("weights of a rank vs total / N", held, shares),
        compare("peak memory while loading vs the shard", peaks, shares),
        absolute("load time, 400 MB model", times),
    ]


def _largest(agent: Agent, *names: str) -> float:
    """The largest that a rank reports under the first of these names that it knows."""
    rows: tuple[Mapping[str, object], ...] = agent.parts.groups.shown.supervisor.gateway.health().ranks
    for name in names:
        values = [row[name] for row in rows if name in row]
        if len(values) == RANKS:
            return max(float(value) for value in values if isinstance(value, int | float))
    raise Unmeasured(f"/health reports none of {', '.join(names)} for each rank")
