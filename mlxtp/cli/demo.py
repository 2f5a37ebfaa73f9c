"""`mlxtp demo`: a cluster on this machine, one chat request, and the time of each stage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.padding import Padding

from .. import client
from ..agent import LOOK_S, Agent, running_agent
from ..client import ANSWER_TIMEOUT_S, AgentClient, EndpointAnswer, connection_to
from ..config import EMBEDDED_MODEL, Settings
from ..groups.health import ServingState
from ..values import stage_words
from ..verbs import Status
from .printing import Console
from .status import deployments_shown

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


LOOPBACK = "127.0.0.1"


class DemoConsole(Console):
    """Console that raises BrokenPipeError once its reader has left; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class DemoView:
    def __init__(self, console: Console, settings: Settings) -> None:
        self._console = console
        self._settings = settings
        self.stages: dict[str, float] = {}

    def start(self, replicas: int = 1) -> None:
        s = self._settings
        if replicas > 1:
            self._console.print(
                f"[bold]mlxtp[/]  {replicas} agents on this machine, {replicas} replicas of model "
                f"[cyan]{escape(s.model)}[/]\n"
            )
            return
        how = "a ring over loopback" if s.ranks > 1 else "no group"
        ranks = f"{s.ranks} ranks" if s.ranks > 1 else "1 rank"
        self._console.print(f"[bold]mlxtp[/]  {ranks}, {how}, model [cyan]{escape(s.model)}[/]\n")

    def stage(self, name: str, seconds: float) -> None:
        took = seconds - max(self.stages.values(), default=0.0)
        self.stages[name] = seconds
        if self._settings.ranks == 1 and name in _GROUP_STAGES:
            return
        self._console.print(f"  [green]✓[/] {_STAGES.get(name, name):<32} {took:6.2f} s")

    def group(self, split: Sequence[int]) -> None:
        if self._settings.ranks > 1:
            how = f"as a {stage_words(split)}" if split else "each with a part of each layer"
            self._console.print(f"\n  {self._settings.ranks} ranks share it, {how}")

    def ask(self, prompt: str) -> None:
        self._console.print(f"\n  [dim]›[/] {escape(prompt)}\n  [dim]‹[/] ", end="")

    def text(self, piece: str) -> None:
        self._console.print(escape(piece), end="", style="bold", soft_wrap=True)

    def answered(self, answer: EndpointAnswer) -> None:
        self._console.print(
            f"\n\n  first token after {answer.ttft_s * 1000:.0f} ms, "
            f"then {answer.tokens_per_second:.0f} tokens/s ({answer.tokens} tokens)"
        )

    def progress(self, what: str, seconds: float) -> None:
        self._console.print(f"  [green]✓[/] {what:<32} {seconds:6.2f} s")

    def shared(self, status: Mapping[str, Any], answers: Mapping[str, int]) -> None:
        self._console.print()
        for line in deployments_shown(status["deployments"], min(self._console.width, 80) - 2):
            self._console.print(Padding(line, (0, 0, 0, 2)))
        said = ", ".join(f"{count} by {group}" for group, count in sorted(answers.items()))
        self._console.print(
            f"\n  {sum(answers.values())} more requests at once were answered: {escape(said)}"
        )

    def serving(self, url: str) -> None:
        """Print the addresses, and commands to paste, in at most 80 columns."""
        home, program = shlex.quote(str(self._settings.home)), Path(sys.argv[0])
        # A checkout's command is not on a new shell's PATH.
        aside = program.name == "mlxtp" and shutil.which("mlxtp") is None
        command = shlex.quote(os.path.relpath(program)) if aside else "mlxtp"
        self._console.print(
            f"\n  endpoint  [bold cyan]{url}/v1[/]\n  page      {url}/\n  health    {url}/health\n\n"
            f"  curl {url}/v1/chat/completions \\\n"
            "    -H 'Content-Type: application/json' \\\n"
            f"    -d {escape(_BODY)}\n\n"
            f"  Other commands need --home:\n  {escape(command)} status \\\n    --home {escape(home)}\n\n"
            "  Ctrl-C stops it.",
            soft_wrap=True,
        )


async def run(
    settings: Settings, prompt: str | None, view: DemoView, *, once: bool, replicas: int = 1
) -> dict[str, Any]:
    """Send the prompt once ready; then return the outcome (`once`) or serve. Raises MlxtpError."""
    question = prompt or (EMBEDDED_PROMPT if settings.model == EMBEDDED_MODEL else OTHER_PROMPT)
    began = time.monotonic()
    view.start(replicas)
    answered_by: Mapping[str, int] = {}
    several = replicas > 1
    async with (
        running_replicas(settings, replicas, view) if several else running_agent(settings, view.stage)
    ) as agent:
        try:
            await agent.wait_ready()
            ready_s = time.monotonic() - began
            group = agent.parts.groups.shown.supervisor.status.group
            view.group(group.split if group is not None else ())
            view.ask(question)
            answer = await asyncio.to_thread(
                ask, agent.url, question, view.text, agent.key, agent.certificate
            )
            view.answered(answer)
            if several:
                answered_by = await answering_groups(agent, question, 4 * replicas)
                status = await asyncio.to_thread(AgentClient(settings.home).send, Status())
                view.shared(status, answered_by)
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
        **({"replicas": replicas, "answered_by": answered_by} if several else {}),
    }


@asynccontextmanager
async def running_replicas(settings: Settings, replicas: int, view: DemoView) -> AsyncIterator[Agent]:
    """Run a cluster of `replicas` agents on loopback, with a replica on each. Yields the first agent."""
    began = time.monotonic()
    own = replace(
        settings, cluster=True, name="mac-1", control_host=LOOPBACK, control_port=0, discovery=False,
        nodes="1", model_given=True,
    )  # fmt: skip
    async with AsyncExitStack() as ending:
        first = await ending.enter_async_context(running_agent(own))
        node = first.parts.node
        view.progress("mac-1 has founded a cluster", time.monotonic() - began)
        for name in (f"mac-{number}" for number in range(2, replicas + 1)):
            token = await first.parts.tokens.token()
            other = replace(
                own,
                home=settings.home / name,
                name=name,
                http_port=0,
                join=token,
                model_given=False,
                peers=node.introduction.addresses(),
            )
            await ending.enter_async_context(running_agent(other))
            view.progress(f"{name} has joined it", time.monotonic() - began)
        node.desired.serve(own.model, replicas=replicas)
        ready: set[str] = set()
        while len(ready) < replicas and not first.over.done():
            await asyncio.sleep(LOOK_S)
            reports = first.parts.groups.reports()
            for each in reports:
                if each.state == ServingState.READY and each.group not in ready:
                    ready.add(each.group)
                    where = " and ".join(map(node.name_of, each.participants))
                    view.progress(f"{each.group} is ready on {where}", time.monotonic() - began)
        try:
            yield first
        finally:  # as each agent ends, the others warn that they lack room for all replicas
            logging.getLogger("mlxtp").setLevel(logging.ERROR)


async def answering_groups(agent: Agent, prompt: str, requests: int) -> Mapping[str, int]:
    body = json.dumps(_request(prompt))
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {agent.key}"}

    def one() -> str:
        with contextlib.closing(connection_to(agent.url, agent.certificate, ANSWER_TIMEOUT_S)) as connection:
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            response.read()
            return response.headers.get("x-mlxtp-group", "no group")

    return Counter(await asyncio.gather(*(asyncio.to_thread(one) for _ in range(requests))))


def _request(prompt: str) -> dict[str, Any]:
    message = {"role": "user", "content": prompt}
    return {"model": "default", "messages": [message], "max_tokens": MAX_TOKENS, "temperature": 0}


def ask(
    url: str, prompt: str, on_text: Callable[[str], None], key: str = "", certificate: str = ""
) -> EndpointAnswer:
    """Send a request, and stream the reply. Blocks. Raises as `client.ask` does."""
    answer = EndpointAnswer(time.monotonic())
    for piece in client.ask(connection_to(url, certificate, ANSWER_TIMEOUT_S), key, _request(prompt)):
        answer.add(piece, time.monotonic())
        if piece.text:
            on_text(piece.text)
    return answer
