"""Between the ranks, and between a client and the ranks: a slow decode link, and a client that goes away.

Both use the embedded model with idle layers behind its own: the same tokens, one character each, but a step
long enough for the case.

How many steps begin after a disconnect cannot be seen from outside, but bounded: ranks count their forwards,
and a request alone takes one forward for each of its tokens. When token n reaches the client, the forward
behind it already runs: that one cannot be called back. So the ranks' count for the request, less the tokens
that the client had received, less one, is at least the number of steps begun after the disconnect; what began
while the last token was on its way to the client is among them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys

from mlxtp.agent import Agent
from mlxtp.config import Limits
from mlxtp.wire.messages import Generate

from . import models, prompts
from .delay import Delay
from .errors import Unmeasured
from .http_client import Ask, user
from .measures import Row, absolute, compare
from .stage import Stage, decode, endpoint, text_of

LAYERS = 16
DELAY_S = 0.001
_HEARTBEAT_S = 0.1
_QUIET_S = 3 * _HEARTBEAT_S
_QUIET_DEADLINE_S = 60.0
_RUNNING_FORWARDS = 1
_LEAVE_AFTER = 40


async def measure(stage: Stage) -> list[Row]:
    model = models.write_deep(stage.folder / "deep", LAYERS)
    file = stage.folder / "delay"
    delay = Delay(file)
    worker = (sys.executable, "-m", "benchmarks.delayed_worker", "frames", str(file))
    settings = {
        "limits": dataclasses.replace(Limits(), heartbeat_s=_HEARTBEAT_S),
        "speculation": "off",
    }
    async with stage.own_agent(settings, model=model, worker=worker) as agent:
        request = Generate(0, prompts.ids(text_of(agent), prompts.count(0)), stage.pick(full=150, quick=60))
        plain, late = [], []
        for number in stage.rounds("delayed decode link", full=5, quick=2):
            undelayed = await decode(agent, request)
            delay.set(DELAY_S)
            try:
                delayed = await decode(agent, request)
            finally:
                await _quiet(agent)
                delay.set(0)
            if undelayed.tokens != delayed.tokens:
                raise Unmeasured("the delayed link changed the tokens")
            if number:
                plain.append(undelayed.rate)
                late.append(delayed.rate)
        steps = [
            await _steps_after_leaving(stage, agent, _LEAVE_AFTER + number)
            for number in stage.rounds("a client goes away", full=9, quick=3)
        ]
    return [
        compare("decode link with 1 ms each way vs none", late, plain),
        absolute("model behind the delayed link, one step", [1000 / rate for rate in plain]),
        absolute("steps begun after a client's disconnect", steps[1:]),
    ]


async def _steps_after_leaving(stage: Stage, agent: Agent, characters: int) -> float:
    client = await stage.client()
    before = await _quiet(agent)
    ask = Ask(user(prompts.count(characters)), 150, leave_after=characters)
    (answer,) = await client.ask(endpoint(agent), [ask])
    forwards = await _quiet(agent) - before
    return max(forwards - len(answer.text) - _RUNNING_FORWARDS, 0)


async def _quiet(agent: Agent) -> int:
    """Wait until every rank reports twice that it is idle. Return rank 0's forwards so far."""
    seen: object = None
    async with asyncio.timeout(_QUIET_DEADLINE_S):
        while True:
            health = agent.parts.groups.shown.supervisor.gateway.health()
            counts = [row["forwards"] for row in health.ranks]
            idle = not health.open_requests and all(row["phase"] == "idle" for row in health.ranks)
            if idle and counts and counts == seen and isinstance(counts[0], int):
                return counts[0]
            seen = counts if idle else None
            await asyncio.sleep(_QUIET_S)
