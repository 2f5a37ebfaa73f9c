"""Faults of Macs: cables, power, restarts. Afterwards they serve again without help."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ..chaos.findings import found, wrong
from ..hosts import Hosts, requires_namespaces
from ..live_cluster import WAIT_S, rank_processes
from .agents import SECRET, Agent, on_hosts, serving, wait

pytestmark = requires_namespaces

COUNT = "Count from 1 to 60."
"""The longest answer that the tiny model has learned."""
ENDS_S = 2 * WAIT_S
"""Within it every request has ended, after any fault."""


class Pair:
    """Two agents with a host each. The coordinator is `first`."""

    def __init__(self, net: Hosts, agents: tuple[Agent, Agent]) -> None:
        self.net = net
        self.agents = agents

    def whole(self) -> tuple[Agent, Agent]:
        """Wait until both serve together; the coordinator, then the other one."""
        serving(*self.agents)
        one, other = self.agents
        return (one, other) if one.status()["coordinator"] == one.name else (other, one)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("going-on")
    with Hosts(2) as net:
        a, b = on_hosts(folder, net, "anna", "ben")
        a.start()
        b.start("--join", a.first_token())
        yield Pair(net, (a, b))


@contextmanager
def asking(*agents: Agent) -> Iterator[None]:
    """Meanwhile each of them is asked the same again and again. No answer is wrong."""
    over = threading.Event()
    answers: dict[str, list[str]] = {agent.name: [] for agent in agents}
    longest_s = dict.fromkeys(answers, 0.0)

    def ask(agent: Agent) -> None:
        while not over.wait(0.2):
            began = time.monotonic()
            answers[agent.name].append(agent.chat())
            longest_s[agent.name] = max(longest_s[agent.name], time.monotonic() - began)

    threads = [threading.Thread(target=ask, args=(agent,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for name, given in answers.items():
        refused = given.count("")
        print(
            f"{name}: {len(given) - refused} answers, {refused} times none, each in {longest_s[name]:.1f} s"
        )
        assert longest_s[name] < ENDS_S
        assert SECRET in given
        assert set(given) <= {SECRET, ""}


def alone(agent: Agent, other: Agent) -> None:
    """Wait until this one has noticed that the other one is gone, and serves by itself."""
    wait(lambda: agent.member(other).get("state") == "dead", f"{agent.name} misses {other.name}", agent)
    took_s = serving(agent)
    print(f"{agent.name} alone: serving again {took_s:.1f} s after it gave {other.name} up")


@pytest.mark.chaos
def test_a_cable_goes_out_and_in(pair: Pair) -> None:
    first, other = pair.whole()
    epoch = first.status()["epoch"]
    assert other.host is not None
    with asking(first, other):
        pair.net.cut(other.host)
        alone(first, other)
        alone(other, first)
        pair.net.mend(other.host)
        print(f"both again {serving(first, other):.1f} s after the cable was put in")
    assert first.status()["epoch"] > epoch + 1


def text_of(body: bytes) -> str:
    """Return the text of a streamed answer, which has come to its end without an error."""
    *events, done = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    assert done == "[DONE]", done
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def goes_on(gateway: Agent, case: str, break_it: Callable[[], None]) -> None:
    """Break something under a stream. It is a pause: the client gets the answer that it would have got."""
    expected = text_of(gateway.stream(COUNT, max_tokens=400))
    with gateway.open_stream(COUNT, max_tokens=400) as answer:
        body = answer.read(1000)
        break_it()
        began = time.monotonic()
        assert gateway.health()["open_requests"] == 1, "the answer was complete before"
        body += answer.read()
    took_s = time.monotonic() - began
    text = text_of(body)
    tokens = body.count(b'"content"')
    found(case, recover_s=round(took_s, 3), tokens_checked=tokens, wrong_tokens=wrong(text, expected))
    assert text == expected
    assert took_s < ENDS_S


@pytest.mark.chaos
@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_is_killed_under_a_stream(pair: Pair, rank: int) -> None:
    """On either Mac: the client's is the one that does not coordinate."""
    first, other = pair.whole()
    epoch = first.status()["epoch"]
    (owner,) = (agent for agent in pair.agents if first.member(agent)["rank"] == rank)
    (pid,) = rank_processes(owner.home)
    goes_on(other, f"kill -9 of rank {rank}", lambda: os.kill(pid, signal.SIGKILL))
    assert pair.whole()[0].status()["epoch"] > epoch


@pytest.mark.chaos
def test_the_coordinators_cable_goes_out_under_a_stream(pair: Pair) -> None:
    """Of two Macs the one with the client serves alone."""
    first, other = pair.whole()
    assert first.host is not None
    host = first.host
    goes_on(other, "the coordinator's cable pulled", lambda: pair.net.cut(host))
    assert other.status()["coordinator"] == other.name
    pair.net.mend(host)
    pair.whole()


def test_the_coordinator_is_killed(pair: Pair) -> None:
    """The other one takes over, its clients' requests go on there, and who comes back is welcome."""
    first, other = pair.whole()
    term = first.status()["term"]
    goes_on(other, "kill -9 of the coordinator's agent", first.kill)
    print(f"killed: {other.name} serves again after {serving(other):.1f} s")
    status = other.status()
    assert (status["coordinator"], status["world_size"]) == (other.name, 1)
    assert status["term"] > term
    first.start()
    print(f"started again: both serve after {serving(first, other):.1f} s")
    assert first.status()["coordinator"] == other.name  # who coordinates goes on to
    assert not first.said("is a member now")  # it knew all members


def test_everything_is_started_again_at_once(pair: Pair) -> None:
    first, other = pair.whole()
    before = first.status()
    for agent in pair.agents:
        agent.kill()
    for agent in pair.agents:
        agent.start()
    print(f"all killed and started again: both serve after {serving(first, other):.1f} s")
    after = first.status()
    assert after["epoch"] > before["epoch"]
    assert after["term"] > before["term"]
    chosen = [[(each["model"], each["pinned"]) for each in told["deployments"]] for told in (before, after)]
    assert chosen[0] == chosen[1]
