"""Two Macs, each with its share of the caches on its own disk: what comes back when they were away."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from mlxtp.wire.messages import BLOCK, Generate

from ..hosts import Hosts, requires_namespaces
from ..reference import expected, text
from ..stories.test_features_disk import LONG, blocks, new_tokens, written
from .agents import Agent, on_hosts, wait

pytestmark = [requires_namespaces, pytest.mark.chaos]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Agent]]:
    folder = tmp_path_factory.mktemp("agents")
    with Hosts(2) as net:
        flags = ("--model", str(model), "--cache-disk", "1GB", "--nodes", "2")
        a, b = on_hosts(folder, net, "a", "b", flags=flags)
        a.start()
        b.start("--join", a.first_token())
        yield a, b


def ready(*agents: Agent) -> None:
    """Wait until these serve together."""

    def agree() -> bool:
        states = [agent.status() for agent in agents]
        return all(s and (s["state"], s["world_size"]) == ("ready", len(agents)) for s in states)

    wait(agree, "they serve together", *agents)


def answer(agent: Agent, wanted: Generate, model: Path) -> int:
    """Return the number of cached tokens. Fails unless the answer is the right one."""
    body = {"model": "default", "prompt": list(wanted.tokens), "max_tokens": wanted.max_tokens}
    with agent.request("POST", "/v1/completions", body | {"temperature": 0}) as response:
        given = json.loads(response.read())
    detokenizer = text(model).detokenizer()
    right = detokenizer.push(expected(wanted, model).tokens)
    assert given["choices"][0]["text"] == right
    return int(given["usage"]["prompt_tokens_details"]["cached_tokens"])


def restart(a: Agent, b: Agent) -> None:
    for agent in (a, b):
        agent.stop()
    for agent in (a, b):
        agent.start()


def cut_power(a: Agent, b: Agent) -> None:
    for agent in (a, b):
        agent.kill()
    for agent in (b, a):
        agent.start()


def drain(a: Agent, b: Agent) -> None:
    assert b.command("drain").returncode == 0
    assert b.ended() == 0
    b.start()


@pytest.mark.parametrize("away", [restart, cut_power, drain])
def test_a_conversation_comes_back_with_the_macs(
    pair: tuple[Agent, Agent], model: Path, away: Callable[[Agent, Agent], None]
) -> None:
    a, b = pair
    random = Random(away.__name__)
    wanted = Generate(0, new_tokens(random, LONG), 20)
    ready(a, b)
    assert answer(a, wanted, model) == 0
    kept = [sum(bool(blocks(agent.home, rank)) for rank in (0, 1)) for agent in pair]
    assert kept == [1, 1], "each has its own share alone"
    away(a, b)
    ready(a, b)
    said = expected(wanted, model).tokens
    turn = Generate(0, (*wanted.tokens, *said, *new_tokens(random, 50)), 20)
    assert answer(b, turn, model) >= LONG - LONG % BLOCK
