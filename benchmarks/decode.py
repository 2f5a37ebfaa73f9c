"""One stream on two pinned ranks: at the engine's pipe and over HTTP, beside the bare loop and mlx_lm.server.

Speculation is off here: what is compared is one forward a token with one forward a token.
"""

from __future__ import annotations

from collections import defaultdict

from mlxtp.wire.messages import Generate

from . import prompts
from .decoded import Decoded
from .errors import Unmeasured
from .http_client import Answer, Ask, user
from .measures import Row, absolute, compare
from .stage import Stage, decode, endpoint, in_turn, text_of

PROMPT = prompts.count(0)


async def measure(stage: Stage) -> list[Row]:
    agent = await stage.agent(speculation="off")
    bare, server, client = await stage.bare(), await stage.server(), await stage.client()
    tokens = stage.pick(full=170, quick=120)
    prompt = prompts.ids(text_of(agent), PROMPT)
    asks = [Ask(user(PROMPT), tokens)]

    async def at_bare() -> Decoded:
        return await bare.run(prompt, tokens)

    async def at_pipe() -> Decoded:
        return await decode(agent, Generate(0, prompt, tokens))

    async def at_http() -> Answer:
        (answer,) = await client.ask(endpoint(agent), asks)
        return answer

    async def at_server() -> Answer:
        async with server.awake() as there:
            (answer,) = await client.ask(there, asks)
        return answer

    inside = {"bare": at_bare, "pipe": at_pipe}
    outside = {"http": at_http, "server": at_server}
    rates: dict[str, list[float]] = defaultdict(list)
    for number in stage.rounds("one stream", full=9, quick=3):
        decoded = {name: await inside[name]() for name in in_turn(number, *inside)}
        answers = {name: await outside[name]() for name in in_turn(number, *outside)}
        _check_same(decoded["bare"].tokens == decoded["pipe"].tokens, "the engine and the bare loop")
        _check_same(answers["http"].text == answers["server"].text, "the two servers")
        if number:
            for name, of in decoded.items():
                rates[name].append(of.rate)
                rates[f"{name} whole"].append(of.whole_rate)
            for name, answer in answers.items():
                rates[name].append(answer.rate)
    costs = [1e6 / http - 1e6 / pipe for http, pipe in zip(rates["http"], rates["pipe whole"], strict=True)]
    return [
        absolute("bare loop, one stream", rates["bare"]),
        compare("one stream, pipe vs bare loop", rates["pipe"], rates["bare"]),
        compare("one stream, HTTP vs bare loop", rates["http"], rates["bare whole"]),
        compare("one stream, HTTP vs mlx_lm.server", rates["http"], rates["server"]),
        absolute("HTTP and text, cost of a token", costs),
    ]


def _check_same(same: bool, who: str) -> None:
    if not same:
        raise Unmeasured(f"{who} chose different tokens for {PROMPT!r}")
