"""`mlxtp demo`: a cluster on this machine, one question over HTTP, and what each stage took."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from .client import connection_to
from .config import EMBEDDED_MODEL, Settings
from .errors import Code, GroupError
from .node.agent import running_agent

EMBEDDED_PROMPT = "Repeat exactly: FALCON-MERCURY-7749"
OTHER_PROMPT = "In one sentence: what can two computers do together that one cannot?"
RANKS = 2
MAX_TOKENS = 256
ANSWER_TIMEOUT_S = 120.0

_STAGES = {
    "spawned": "rank processes spawned",
    "linked": "Python and MLX up, links open",
    "formed": "MLX group formed",
    "proven": "group proved by value",
    "loaded": "model sharded and loaded",
    "warmed up": "first forwards run",
}
_GROUP_STAGES = ("formed", "proven")


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. `tokens_per_second` counts the tokens after the first."""

    text: str
    tokens: int
    ttft_s: float
    tokens_per_second: float


class Screen(Console):
    """A console whose reader may leave; rich would end the process from whichever task printed last."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class View:
    """What a person sees."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._console = console
        self._settings = settings
        self.stages: dict[str, float] = {}

    def begin(self) -> None:
        s = self._settings
        how = "a ring over loopback" if s.ranks > 1 else "no group"
        ranks = f"{s.ranks} ranks" if s.ranks > 1 else "1 rank"
        self._console.print(f"[bold]mlxtp[/]  {ranks}, {how}, model [cyan]{escape(s.model)}[/]\n")

    def stage(self, name: str, seconds: float) -> None:
        """A stage was reached, `seconds` after the start."""
        took = seconds - max(self.stages.values(), default=0.0)
        self.stages[name] = seconds
        if self._settings.ranks == 1 and name in _GROUP_STAGES:
            return
        self._console.print(f"  [green]✓[/] {_STAGES.get(name, name):<32} {took:6.2f} s")

    def ask(self, prompt: str) -> None:
        self._console.print(f"\n  [dim]›[/] {escape(prompt)}\n  [dim]‹[/] ", end="")

    def text(self, piece: str) -> None:
        self._console.print(escape(piece), end="", style="bold", soft_wrap=True)

    def answered(self, answer: Answer) -> None:
        self._console.print(
            f"\n\n  first token after {answer.ttft_s * 1000:.0f} ms, "
            f"then {answer.tokens_per_second:.0f} tokens/s ({answer.tokens} tokens)"
        )

    def serving(self, url: str) -> None:
        home = shlex.quote(str(self._settings.home))
        body = json.dumps(
            {"model": "default", "messages": [{"role": "user", "content": "Repeat exactly: Hello, 2 Macs!"}]}
        )
        self._console.print(
            f"\n  endpoint [bold cyan]{url}/v1[/]   page {url}/   health {url}/health\n\n"
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f"    -d {escape(repr(body))}\n\n"
            f"  mlxtp status --home {escape(home)}   and so for other commands\n\n  Ctrl-C stops it.",
            soft_wrap=True,
        )


async def run(settings: Settings, prompt: str | None, view: View, *, once: bool) -> dict[str, Any]:
    """Start, ask, and either return the outcome or serve until cancelled.

    Raises ConfigError, ModelError or GroupError when the cluster does not get ready.
    """
    question = prompt or (EMBEDDED_PROMPT if settings.model == EMBEDDED_MODEL else OTHER_PROMPT)
    began = time.monotonic()
    view.begin()
    async with running_agent(settings, view.stage) as agent:
        await agent.wait_ready()
        ready_s = time.monotonic() - began
        view.ask(question)
        answer = await asyncio.to_thread(ask, agent.url, question, view.text, agent.key, agent.certificate)
        view.answered(answer)
        if not once:
            view.serving(agent.url)
            await asyncio.shield(agent.over)
    return {
        **asdict(answer),
        "prompt": question,
        "model": settings.model,
        "ranks": settings.ranks,
        "backend": settings.local_backend,
        "ready_s": round(ready_s, 3),
        "stages_s": {name: round(at_s, 3) for name, at_s in view.stages.items()},
    }


def ask(
    url: str, prompt: str, on_text: Callable[[str], None], key: str = "", certificate: str = ""
) -> Answer:
    """Ask the endpoint at `url`, with an API key if it wants one, and stream the answer. Blocks.

    `certificate` (PEM) is the one that an https:// endpoint has to show. Raises GroupError when the answer is
    refused or breaks off.
    """
    connection = connection_to(url, certificate, ANSWER_TIMEOUT_S)
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, tokens, arrivals = "", 0, []
    try:
        with contextlib.closing(connection):
            sent_at = time.monotonic()
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            for chunk in _chunks(connection.getresponse()):
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
                for choice in chunk["choices"]:
                    if piece := choice["delta"].get("content"):
                        arrivals.append(time.monotonic())
                        text += piece
                        on_text(piece)
            ended_at = time.monotonic()
    except BrokenPipeError:  # whoever reads our output has left
        raise
    except (OSError, http.client.HTTPException) as error:
        raise GroupError(f"the answer broke off: {error or type(error).__name__}", Code.LINK_LOST) from None
    first_at = arrivals[0] if arrivals else ended_at
    rate = (tokens - 1) / (ended_at - first_at) if tokens > 1 and ended_at > first_at else 0.0
    return Answer(text, tokens, round(first_at - sent_at, 4), round(rate, 1))


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The data events of a stream up to [DONE]."""
    if response.status != http.client.OK:
        raise GroupError(
            f"the endpoint answered {response.status}: {response.read().decode()}", Code.INTERNAL
        )
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise GroupError(chunk["error"]["message"], Code.INTERNAL)
        yield chunk
    raise GroupError("the answer broke off", Code.LINK_LOST)


@contextlib.contextmanager
def temporary_home() -> Iterator[Path]:
    """A home that is gone afterwards, for when no other was asked for."""
    with tempfile.TemporaryDirectory(prefix="mlxtp-demo-") as folder:
        yield Path(folder)
