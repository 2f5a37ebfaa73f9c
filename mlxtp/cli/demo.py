"""`mlxtp demo`: a cluster on this machine, one chat request, and the time of each stage."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape

from .. import client
from ..agent import running_agent
from ..client import ANSWER_TIMEOUT_S, EndpointAnswer, connection_to
from ..config import EMBEDDED_MODEL, Settings

EMBEDDED_PROMPT = "Repeat exactly: FALCON-MERCURY-7749"
OTHER_PROMPT = "In one sentence: what can two computers do together that one cannot?"
RANKS = 2
MAX_TOKENS = 256

_STAGES = {
    "spawned": "rank processes spawned",
    "linked": "Python and MLX up, links open",
    "formed": "MLX group formed",
    "proven": "group proved by value",
    "loaded": "model sharded and loaded",
    "warmed up": "first forwards run",
}
_BODY = """'{"model": "default", "messages": [
      {"role": "user", "content": "Repeat exactly: Hello, 2 Macs!"}]}'"""
_GROUP_STAGES = ("formed", "proven")


class DemoConsole(Console):
    """A console whose reader may leave. rich would end the process from the task that printed last."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class DemoView:
    """Output of the demo."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._console = console
        self._settings = settings
        self.stages: dict[str, float] = {}

    def start(self) -> None:
        s = self._settings
        how = "a ring over loopback" if s.ranks > 1 else "no group"
        ranks = f"{s.ranks} ranks" if s.ranks > 1 else "1 rank"
        self._console.print(f"[bold]mlxtp[/]  {ranks}, {how}, model [cyan]{escape(s.model)}[/]\n")

    def stage(self, name: str, seconds: float) -> None:
        """Show a stage that was reached `seconds` after the start."""
        took = seconds - max(self.stages.values(), default=0.0)
        self.stages[name] = seconds
        if self._settings.ranks == 1 and name in _GROUP_STAGES:
            return
        self._console.print(f"  [green]✓[/] {_STAGES.get(name, name):<32} {took:6.2f} s")

    def ask(self, prompt: str) -> None:
        self._console.print(f"\n  [dim]›[/] {escape(prompt)}\n  [dim]‹[/] ", end="")

    def text(self, piece: str) -> None:
        self._console.print(escape(piece), end="", style="bold", soft_wrap=True)

    def answered(self, answer: EndpointAnswer) -> None:
        self._console.print(
            f"\n\n  first token after {answer.ttft_s * 1000:.0f} ms, "
            f"then {answer.tokens_per_second:.0f} tokens/s ({answer.tokens} tokens)"
        )

    def serving(self, url: str) -> None:
        """Print the addresses and commands to paste, none wider than 80 columns."""
        home = shlex.quote(str(self._settings.home))
        self._console.print(
            f"\n  endpoint  [bold cyan]{url}/v1[/]\n  page      {url}/\n  health    {url}/health\n\n"
            f"  curl {url}/v1/chat/completions \\\n"
            "    -H 'Content-Type: application/json' \\\n"
            f"    -d {escape(_BODY)}\n\n"
            f"  Other commands need --home:\n  mlxtp status \\\n    --home {escape(home)}\n\n"
            "  Ctrl-C stops it.",
            soft_wrap=True,
        )


async def run(settings: Settings, prompt: str | None, view: DemoView, *, once: bool) -> dict[str, Any]:
    """Start, send the prompt, and either return the outcome or serve until cancelled.

    Raises ConfigError, ModelError or GroupError when the cluster does not get ready.
    """
    question = prompt or (EMBEDDED_PROMPT if settings.model == EMBEDDED_MODEL else OTHER_PROMPT)
    began = time.monotonic()
    view.start()
    async with running_agent(settings, view.stage) as agent:
        try:
            await agent.wait_ready()
            ready_s = time.monotonic() - began
            view.ask(question)
            answer = await asyncio.to_thread(
                ask, agent.url, question, view.text, agent.key, agent.certificate
            )
            view.answered(answer)
            if not once:
                view.serving(agent.url)
                await asyncio.shield(agent.over)
        except asyncio.CancelledError:  # after Ctrl-C, do not report the replies that it cuts off
            logging.getLogger("mlxtp").setLevel(logging.ERROR)
            raise
    return {
        "text": answer.text,
        "tokens": answer.tokens,
        "ttft_s": round(answer.ttft_s, 4),
        "tokens_per_second": round(answer.tokens_per_second, 1),
        "prompt": question,
        "model": settings.model,
        "ranks": settings.ranks,
        "backend": settings.local_backend,
        "ready_s": round(ready_s, 3),
        "stages_s": {name: round(at_s, 3) for name, at_s in view.stages.items()},
    }


def ask(
    url: str, prompt: str, on_text: Callable[[str], None], key: str = "", certificate: str = ""
) -> EndpointAnswer:
    """Send a request to the endpoint at `url`, with an API key if it requires one, and stream the reply.
    Blocks.

    `certificate` (PEM) is the one that an https:// endpoint must show. Raises as `client.ask` does.
    """
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    answer = EndpointAnswer(time.monotonic())
    for piece in client.ask(connection_to(url, certificate, ANSWER_TIMEOUT_S), key, body):
        answer.add(piece, time.monotonic())
        if piece.text:
            on_text(piece.text)
    return answer
