"""Macs are told to stop and are started again, one by one, while apps on each ask all the time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import pytest

from ..hosts import Hosts, requires_namespaces
from ..live_cluster import SLOWNESS
from .agents import Agent, on_hosts, serving, wait

pytestmark = requires_namespaces

COUNT = "Count from 1 to 60."
"""The longest answer that the embedded model has learned: 171 tokens."""
DRAIN_S = 60 * SLOWNESS
"""Time enough to form a group that goes on with what is open."""


class App:
    """Asks one agent again and again, streamed and not, and comes back when it is told to."""

    def __init__(self, agent: Agent, expected: str) -> None:
        self.agent = agent
        self.right = self.refused = 0
        self.wrong: list[str] = []
        self._expected = expected
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for stream in self._turns():
            self._ask(stream)

    def _turns(self) -> Iterator[bool]:
        stream = False
        while not self._over.wait(0.05):
            stream = not stream
            yield stream

    def _ask(self, stream: bool) -> None:
        accepted = False
        body = {"messages": [{"role": "user", "content": COUNT}], "max_tokens": 400, "temperature": 0}
        try:
            with self.agent.request("POST", "/v1/chat/completions", body | {"stream": stream}) as response:
                if response.status == 503:
                    self._refused(response.getheader("Retry-After"), response.read())
                    return
                accepted = True
                text = _text(response.read(), stream) if response.status == 200 else str(response.status)
        except (OSError, HTTPException) as error:
            if accepted:
                self.wrong.append(f"cut: {error!r}")
            else:  # no agent listened, or none received it
                self.refused += 1
            return
        if text == self._expected:
            self.right += 1
        else:
            self.wrong.append(text)

    def _refused(self, retry_after: str | None, body: bytes) -> None:
        self.refused += 1
        code = json.loads(body)["error"]["code"]
        if retry_after is None or code not in ("shutting_down", "not_ready"):
            self.wrong.append(f"{code}, to be asked again after {retry_after}")
        self._over.wait(0.2)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def _text(body: bytes, stream: bool) -> str:
    """The answer's text; what was streamed has to end as it should."""
    if not stream:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: ")]
    if lines[-1:] != [b"[DONE]"]:
        return f"no end: {body[-300:]!r}"
    chunks = [json.loads(line)["choices"] for line in lines[:-1]]
    return "".join(choices[0]["delta"].get("content", "") for choices in chunks if choices)


@contextmanager
def apps(*agents: Agent) -> Iterator[list[App]]:
    """Meanwhile apps ask. Afterwards each has got answers, and nothing but right and complete ones."""
    expected = agents[0].chat(COUNT, max_tokens=400)
    assert expected.endswith("60")
    asking = [App(agent, expected) for agent in agents for _ in range(2)]
    try:
        yield asking
    finally:
        for app in asking:
            app.stop()
    for app in asking:
        print(f"{app.agent.name}: {app.right} answers, {app.refused} times asked to come back")
        assert app.wrong == []
        assert app.right > 0


def roll(agent: Agent, *others: Agent) -> None:
    """Tell one to stop, see it end in order, start it again, and wait until it answers."""
    epochs = {other.name: other.status()["epoch"] for other in others}
    began = time.monotonic()
    agent.stop()
    print(f"{agent.name} ended after {time.monotonic() - began:.1f} s")
    assert agent.said("drained"), agent.log
    for other in others:
        wait(lambda other=other: other.member(agent)["state"] == "left", "it has left", other)
        assert not other.said(agent.name, "is dead")

        def goes_on(other: Agent = other) -> bool:  # the next owner shows epoch 0 before its first one
            return bool(other.status()["epoch"] > epochs[other.name])

        wait(goes_on, f"{other.name} sees a group without {agent.name}", other)
    agent.start()
    wait(lambda: agent.status().get("state") == "ready", f"{agent.name} serves again", agent, *others)


@pytest.mark.chaos
def test_three_macs_are_started_again_and_no_answer_is_lost(tmp_path: Path) -> None:
    with Hosts(3) as net:
        agents = on_hosts(tmp_path, net, "anna", "ben", "cleo", flags=("--drain", str(DRAIN_S)))
        a, b, c = agents
        a.start()
        b.start("--join", a.first_token())
        serving(a, b)
        c.start("--join", a.token())
        serving(*agents, ranks=2)
        with apps(*agents):
            for agent in agents:
                roll(agent, *(other for other in agents if other is not agent))
        serving(*agents, ranks=2)
