"""Groups beside each other on two agents: each lives by itself, and each endpoint gives all of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from mlxtp.agent import Agent
from mlxtp.api.backend import StreamEnd, Tokens
from mlxtp.gateway.request import PROVEN_TOKENS
from mlxtp.groups.group import Group
from mlxtp.groups.health import ServingState
from mlxtp.wire.messages import Generate

from ..engine.small_models import write_model
from ..groups.scenes import in_a_loop, sees
from ..groups.two_agents import two_agents
from ..live_cluster import START_S
from ..reference import prompt_ids, reference

pytestmark = [pytest.mark.group, pytest.mark.fault]

COUNT = prompt_ids("Count from 1 to 60.")


def owned(agent: Agent) -> dict[str, Group]:
    """The groups whose ranks this agent serves now."""
    groups = agent.parts.groups.by_id
    return {name: each for name, each in groups.items() if each.supervisor.status.ranks is not None}


def ready(agent: Agent) -> set[str]:
    """The groups that this agent's clients can use."""
    groups = agent.parts.groups.by_id.items()
    return {name for name, each in groups if each.supervisor.status.state is ServingState.READY}


def life(group: Group) -> tuple[int, int | None]:
    """The epoch of a group, and the process of its rank 0."""
    status = group.supervisor.status
    return status.epoch, status.ranks.leader.pid


async def serve(agents: tuple[Agent, Agent], *wanted: str) -> None:
    await sees(lambda: all(ready(agent) == set(wanted) for agent in agents), f"{wanted} at both agents")


async def answer(agent: Agent, model: str) -> str:
    headers = {"authorization": f"Bearer {agent.key}"}
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "Count from 1 to 60."}],
        "temperature": 0,
        "max_tokens": 12,
    }
    async with httpx.AsyncClient(base_url=agent.url, headers=headers, timeout=START_S) as client:
        got = await client.post("/v1/chat/completions", json=asked)
        assert got.status_code == 200, got.text
        assert got.json()["model"] == model
        return str(got.json()["choices"][0]["message"]["content"])


@in_a_loop(seconds=START_S)
async def test_an_answer_goes_on_at_the_other_replica_and_is_the_same(tmp_path: Path) -> None:
    async with two_agents(tmp_path, nodes="1") as (first, second):
        first.parts.node.desired.serve("tiny", replicas=2)
        await serve((first, second), "tiny#0", "tiny#1")
        mine, theirs = owned(first), owned(second)
        assert len(mine) == len(theirs) == 1
        assert mine.keys() != theirs.keys()
        stream = first.parts.gateway.generate(Generate(0, COUNT, 150))
        tokens: list[int] = []
        groups, killed = [], False
        end = None
        async for event in stream:
            if isinstance(event, Tokens):
                tokens += event.tokens
            elif isinstance(event, StreamEnd):
                end = event
            if len(tokens) >= PROVEN_TOKENS and not killed:  # an earlier one would be a suspect
                groups.append(stream.group)
                owner = first if stream.group in mine else second
                pid = life(owned(owner)[stream.group])[1]
                os.kill(pid, signal.SIGKILL)
                killed = True
        groups.append(stream.group)
        assert end is not None
        assert sorted(groups) == ["tiny#0", "tiny#1"], "it was to go on at the other one"
        assert tuple(tokens) == reference(COUNT, 150)
        await serve((first, second), "tiny#0", "tiny#1")


@pytest.mark.chaos
@in_a_loop(seconds=START_S)
async def test_two_models_are_served_at_once_and_the_end_of_one_leaves_the_other(tmp_path: Path) -> None:
    other = str(write_model(tmp_path / "other", seed=3))
    async with two_agents(tmp_path, nodes="1") as agents:
        first, second = agents
        await serve(agents, "tiny#0")
        first.parts.node.desired.serve(other, nodes="1")
        await serve(agents, "tiny#0", "other#0")
        answers = {model: {await answer(agent, model) for agent in agents} for model in ("tiny", "other")}
        assert [len(each) for each in answers.values()] == [1, 1], answers
        assert answers["tiny"] != answers["other"]
        before = {name: life(each) for agent in agents for name, each in owned(agent).items()}
        assert before.keys() == {"tiny#0", "other#0"}
        second.parts.node.desired.unload("other")
        await serve(agents, "tiny#0")
        await sees(lambda: all(owned(agent).keys() <= {"tiny#0"} for agent in agents))
        after = {name: life(each) for agent in agents for name, each in owned(agent).items()}
        assert after == {"tiny#0": before["tiny#0"]}
        assert {await answer(agent, "tiny") for agent in agents} == answers["tiny"]
