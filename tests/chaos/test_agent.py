"""The agent as a process of its own, with the limits of production: how it ends, and what it leaves.

Agents outlive ranks; ranks do not outlive agents.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from ..agents import agents
from ..live_cluster import SLOWNESS, START_S, WAIT_S, rank_processes, until
from .answers import COUNT, SHORT, Answer, read_events
from .findings import found, wrong
from .harness import alive, assert_honest, kill, listening, processes_of

chaos = pytest.mark.chaos

RANKS_GONE_S = 2.0 * SLOWNESS
ORDERLY_END_S = 10.0 * SLOWNESS


class Agent(agents.Agent):
    """`mlxtp node` with two ranks, at a known port."""

    def __init__(self, folder: Path, port: int, *flags: str, program: tuple[str, ...]) -> None:
        flags = ("--ranks", "2", "--model", "tiny", "--http", f"127.0.0.1:{port}", *flags)
        super().__init__(folder, "home", None, *flags, program=program)
        self.url = f"http://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def health(self) -> dict[str, object]:
        try:
            return httpx.get(f"{self.url}/health", timeout=10 * SLOWNESS).json()
        except httpx.TransportError:
            return {"ready": False, "state": ""}

    def wait_ready(self) -> None:
        until(lambda: not self.runs or self.health()["ready"], "ready", START_S)
        assert self.runs, self.log

    def wait_ranks(self) -> list[int]:
        """Pids of both ranks as soon as they are there."""
        until(lambda: len(rank_processes(self.home)) == 2, "two ranks", START_S)
        return rank_processes(self.home)

    def content(self, prompt: str) -> str:
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 400}
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60 * SLOWNESS)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    def wait_end(self, within_s: float) -> int:
        """Its exit status."""
        until(lambda: not self.runs, f"its end\n{self.log}", within_s)
        assert self.process is not None
        return self.process.wait()


class Agents:
    """Starts agents and ends what a test leaves of them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.home = folder, folder / "home"
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
        self._started: list[Agent] = []

    def start(self, *flags: str, program: tuple[str, ...] = agents.NODE) -> Agent:
        self._started.append(Agent(self._folder, self.port, *flags, program=program))
        self._started[-1].start()
        return self._started[-1]

    def close(self) -> None:
        for agent in self._started:
            agent.close()


@pytest.fixture(name="agents")
def _agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(tmp_path)
    yield found
    found.close()


class Reader:
    """A client in the background that streams a long answer."""

    def __init__(self, agent: Agent) -> None:
        self.answer = Answer()
        self.broken = False
        self._url = f"{agent.url}/v1/chat/completions"
        self._text_came = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        body = {"messages": [{"role": "user", "content": COUNT}], "temperature": 0, "max_tokens": 400}
        try:
            with httpx.stream(
                "POST", self._url, json=body | {"stream": True}, timeout=60 * SLOWNESS
            ) as response:
                for line in response.iter_lines():
                    read_events(iter([line]), self.answer)
                    if line.startswith("data: "):
                        self._text_came.set()
        except httpx.TransportError:
            self.broken = True

    def wait_text(self) -> None:
        assert self._text_came.wait(60 * SLOWNESS), "the answer stands still"

    def result(self) -> Answer:
        self._thread.join(70 * SLOWNESS)
        assert not self._thread.is_alive(), "the client hangs"
        return self.answer


def crowd(agent: Agent) -> list[Reader]:
    """Clients enough to keep the ranks busy for a second, all of whom have begun to read."""
    readers = [Reader(agent) for _ in range(12)]
    for reader in readers:
        reader.wait_text()
    return readers


def wait_gone(
    pids: list[int],
    within_s: float,
    case: str,
    *,
    since: float,
    answers: Sequence[Answer] = (),
    expected: str = "",
) -> None:
    """Wait until none of them lives: then the end of their agent, `since` when it is over, is noticed."""

    def living() -> list[int]:
        return [pid for pid in pids if alive(pid)]

    try:
        until(lambda: not living(), f"processes {pids} are gone", within_s)
    finally:
        found(
            case,
            detect_s=round(time.time() - since, 3),
            tokens_checked=sum(answer.tokens for answer in answers),
            wrong_tokens=sum(wrong(answer.text, expected, whole=answer.done) for answer in answers),
            orphans=len(living()),
        )


def assert_nothing_left(agents: Agents, pids: list[int]) -> None:
    assert not [pid for pid in pids if alive(pid)]
    assert rank_processes(agents.home) == []
    run = agents.home / "run"
    assert not run.exists() or list(run.iterdir()) == []
    with socket.socket() as sock:  # not reusing an address: no socket listens or is bound
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", agents.port))


@chaos
def test_killed_while_it_decodes(agents: Agents) -> None:
    """Its ranks follow it; the next agent on the same home and port cleans up and serves."""
    agent = agents.start()
    agent.wait_ready()
    expected = agent.content(COUNT)
    pids = agent.wait_ranks()
    assert listening({agent.pid}) == {agents.port}
    leftover = agents.home / "run" / "epoch-1" / "leftover"
    leftover.write_text("")
    readers = crowd(agent)
    at = kill(agent.pid)
    answers = [reader.result() for reader in readers]
    assert any(reader.broken for reader in readers)
    for reader, answer in zip(readers, answers, strict=True):
        assert expected.startswith(answer.text)
        assert answer.done != reader.broken
    wait_gone(pids, RANKS_GONE_S, "kill -9 of the agent", since=at, answers=answers, expected=expected)
    agent.wait_end(WAIT_S)
    following = agents.start()
    following.wait_ready()
    assert following.content(COUNT) == expected
    assert not leftover.exists()
    assert not set(following.wait_ranks()) & set(pids)
    pids = following.wait_ranks()
    kill(following.pid, signal.SIGTERM)
    assert following.wait_end(ORDERLY_END_S) == 0
    assert_nothing_left(agents, pids)


def test_killed_with_spares(agents: Agents) -> None:
    """A rank that does not run cannot see that its agent is gone; the kernel can, also for a spare.

    The second spare is started when the first one waits; here it is in the midst of its imports.
    """
    agent = agents.start(program=("mlxtp",))
    agent.wait_ready()
    pids = until(lambda: len(found := rank_processes(agents.home)) == 4 and found, "two spares", START_S)
    for pid in (pids[0], pids[2]):
        kill(pid, signal.SIGSTOP)
    at = kill(agent.pid)
    wait_gone(pids[:3], RANKS_GONE_S, "kill -9 of the agent, a rank and a spare stopped", since=at)
    wait_gone(pids[3:], WAIT_S, "kill -9 of the agent, a spare in its imports", since=at)


@chaos
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_told_to_stop_while_it_decodes(agents: Agents, number: signal.Signals) -> None:
    """SIGTERM to the agent, or Ctrl-C to the whole group of processes: what has begun ends as it should,
    nothing new is taken, and then all of it ends in order."""
    agent = agents.start("--drain", "600")
    agent.wait_ready()
    expected = agent.content(COUNT)
    pids = agent.wait_ranks()
    readers = crowd(agent)
    if number is signal.SIGINT:
        os.killpg(agent.pid, number)
    else:
        kill(agent.pid, number)
    late = Reader(agent)
    for reader in readers:
        assert (reader.result().text, reader.answer.done) == (expected, True)
    assert late.broken or late.result().code in (None, "shutting_down")
    assert_honest(late.answer, expected) if late.answer.text else None
    assert agent.wait_end(ORDERLY_END_S) == 0
    assert_nothing_left(agents, pids)
    told = agent.log
    assert not [word for word in ("SIGKILL", "Traceback", "never") if word in told], "never: a forgotten task"


@chaos
@pytest.mark.parametrize(("drain_s", "signals"), [("600", 2), ("0.2", 1)], ids=["twice", "too long"])
def test_told_to_stop_twice_or_for_too_long(agents: Agents, drain_s: str, signals: int) -> None:
    """A request that is open then ends with an error that says so."""
    agent = agents.start("--drain", drain_s)
    agent.wait_ready()
    expected = agent.content(COUNT)
    pids = agent.wait_ranks()
    readers = crowd(agent)
    for _ in range(signals):
        kill(agent.pid, signal.SIGTERM)
        until(lambda: "draining" in agent.log, "draining")
    for reader in readers:
        assert_honest(reader.result(), expected)
    assert {reader.answer.code for reader in readers} <= {None, "shutting_down"}
    assert any(reader.answer.error for reader in readers)
    assert agent.wait_end(ORDERLY_END_S) == 0
    assert_nothing_left(agents, pids)


@chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("words", ["spawned after", "linked after", "loaded after", "next one in"])
def test_ended_on_its_way_up(agents: Agents, words: str, number: signal.Signals) -> None:
    """Also while it waits for its next group."""
    agent = agents.start()
    if words == "next one in":
        agent.wait_ready()
        kill(agent.wait_ranks()[1])
    until(lambda: words in agent.log, words, START_S)
    pids = sorted(processes_of(agent.pid))
    at = kill(agent.pid, number)
    if number is signal.SIGKILL:
        agent.wait_end(WAIT_S)
        wait_gone(pids, RANKS_GONE_S, f"kill -9 of the agent, {words}", since=at)
    else:
        assert agent.wait_end(ORDERLY_END_S) == 0
        assert_nothing_left(agents, pids)


@chaos
def test_told_to_stop_while_it_ends_an_epoch(agents: Agents) -> None:
    """One rank is dead, the other stopped and must be killed; two signals come meanwhile."""
    agent = agents.start()
    agent.wait_ready()
    pids = agent.wait_ranks()
    kill(pids[0], signal.SIGSTOP)
    kill(pids[1])
    until(lambda: agent.health()["state"] == "restarting", "restarting")
    kill(agent.pid, signal.SIGTERM)
    time.sleep(0.2)
    kill(agent.pid, signal.SIGTERM)
    assert agent.wait_end(ORDERLY_END_S) == 0
    assert_nothing_left(agents, pids)
    assert "Traceback" not in agent.log


@chaos
def test_stopped_itself_for_a_while(agents: Agents) -> None:
    """It blames no rank for what it did not hear meanwhile."""
    agent = agents.start()
    agent.wait_ready()
    expected = agent.content(SHORT)
    kill(agent.pid, signal.SIGSTOP)
    time.sleep(2)
    kill(agent.pid, signal.SIGCONT)
    time.sleep(2)
    assert agent.health()["epoch"] == 1
    assert agent.content(SHORT) == expected
