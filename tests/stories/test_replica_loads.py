"""Two agents with a replica each: a conversation goes on where its cache is, at either endpoint."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from mlxtp.agent import Agent
from mlxtp.api.backend import StreamEnd
from mlxtp.cluster.node import BEAT_S
from mlxtp.gateway.routing import MAX_HASHES, GroupLoad
from mlxtp.groups.overview import ReplicaLoad, packed, unpacked
from mlxtp.wire.messages import BLOCK, DIGEST_BYTES, Generate

from ..groups.scenes import in_a_loop, sees
from ..groups.two_agents import two_agents

pytestmark = pytest.mark.fault

GROUPS = {"tiny#0", "tiny#1"}


def test_a_report_carries_a_groups_work_and_its_hashes() -> None:
    digests = tuple(each.to_bytes(DIGEST_BYTES, "big") for each in range(MAX_HASHES))
    load = GroupLoad(9000, 3, 512.0, digests)
    assert unpacked(packed("tiny#0", load)) == load
    assert unpacked(packed("tiny#0", GroupLoad())) == GroupLoad()


def ready_at(agent: Agent) -> set[str]:
    dispatcher = agent.parts.gateway.deployments.by_name.get("tiny")
    return set(dispatcher.groups) if dispatcher is not None else set()


async def answered(agent: Agent, prompt: tuple[int, ...]) -> tuple[str, int]:
    """Return the group that answered, and the tokens that it had cached."""
    stream = agent.parts.gateway.generate(Generate(0, prompt, 4, ignore_eos=True))
    async for event in stream:
        if isinstance(event, StreamEnd):
            return stream.group, event.cached
    raise AssertionError("no end")


@pytest.mark.group
@pytest.mark.chaos
@in_a_loop()
async def test_a_second_turn_goes_to_the_replica_that_has_its_beginning(tmp_path: Path) -> None:
    async with two_agents(tmp_path, nodes="1") as agents:
        first = agents[0]
        first.parts.node.desired.serve("tiny", replicas=2, nodes="1")
        for agent in agents:
            await sees(lambda agent=agent: ready_at(agent) == GROUPS)
        sent: list[ReplicaLoad] = []
        for agent in agents:
            agent.parts.node.links.reports.on(lambda _, load: sent.append(load), ReplicaLoad)

        prompts = {
            number: tuple(random.Random(number).choices(range(3, 500), k=2 * BLOCK)) for number in range(4)
        }
        homes = {}
        for number, prompt in prompts.items():
            homes[number], cached = await answered(agents[number % 2], prompt)
            assert cached < BLOCK
        assert set(homes.values()) == GROUPS

        def known() -> bool:
            names = [agent.parts.gateway.deployments.by_name["tiny"].groups for agent in agents]
            return all(len({frozenset(each[g].prefixes.hashes) for each in names}) == 1 for g in GROUPS)

        def rests() -> bool:
            groups = [agent.parts.gateway.deployments.by_name["tiny"].groups for agent in agents]
            return not any(each.load_of(name).queued for each in groups for name in GROUPS)

        await sees(known, "both agents know what each replica has cached")
        for number, prompt in prompts.items():
            for agent in agents:
                await sees(rests, "no report of the request before counts any longer")
                where, cached = await answered(agent, (*prompt, 7, 8, 9))
                assert where == homes[number]
                assert cached >= 2 * BLOCK - 1
        assert sent
        await sees(known)
        await asyncio.sleep(3 * BEAT_S)  # the last change
        count = len(sent)
        await asyncio.sleep(3 * BEAT_S)
        assert len(sent) == count, "nothing is sent while nothing changes"
