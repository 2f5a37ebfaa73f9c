"""Two models of one agent: the second makes room beside the first, which goes on without a reload."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxtp.agent import Agent, running_agent
from mlxtp.api.backend import Tokens
from mlxtp.cluster.cluster_state import KEEP_S
from mlxtp.config import Settings, embedded_model_path
from mlxtp.groups import overview
from mlxtp.groups.group import Group
from mlxtp.groups.health import ServingState
from mlxtp.groups.machines import Machines
from mlxtp.groups.scope import MIB
from mlxtp.placement.cost_model import HEADROOM_BYTES
from mlxtp.placement.topology import MemberMachine
from mlxtp.text import tokenizer
from mlxtp.text.renderer import SandboxedRenderer
from mlxtp.wire.messages import Generate

from ..groups.scenes import in_a_loop, sees
from ..live_cluster import LIMITS, START_S, rank_processes

pytestmark = pytest.mark.slow


def of_one_mac(folder: Path, model: str, **more: bool) -> Settings:
    where: dict[str, Any] = {"control_host": "127.0.0.1", "control_port": 0, "discovery": False}
    return Settings(
        folder / "home", "127.0.0.1", 0, 1, model, cluster=True, name="a", limits=LIMITS, **where, **more
    )


def group_of(agent: Agent, deployment: str) -> Group:
    (group,) = agent.parts.groups.replicas_of(deployment)
    return group


def renderers(folder: Path) -> list[int]:
    """Pids of this process's helpers that run the chat template and tokenizer in `folder`."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if {"mlxtp.text.renderer", str(folder)} <= set(child.cmdline()):
                found.append(child.pid)
    return found


def pids(group: Group) -> list[int]:
    ranks = group.supervisor.status.ranks
    return [each.pid for each in ranks.processes]


def memory_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the findings of the check of memory that were logged."""
    return [record.getMessage() for record in caplog.records if record.name == overview.__name__]


async def answers(agent: Agent, *models: str) -> None:
    for model in models:
        stream = agent.parts.gateway.generate(Generate(0, (5, 6, 7) * 100, 4, ignore_eos=True), model=model)
        tokens = [event async for event in stream if isinstance(event, Tokens)]
        assert sum(len(event.tokens) for event in tokens) == 4


@in_a_loop(seconds=2 * START_S)
async def test_a_second_model_makes_room_beside_the_first_and_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are on one Mac, so that the assignment bounds the KV caches of each."""
    other = tmp_path / "other"
    monkeypatch.setattr(overview, "CHECK_S", 0.1)
    monkeypatch.setattr(tokenizer, "SandboxedRenderer", SandboxedRenderer)  # shared with no other agent
    shutil.copytree(embedded_model_path(), other)
    settings = of_one_mac(tmp_path, "tiny")
    async with running_agent(settings) as agent:
        desired, gateway = agent.parts.node.desired, agent.parts.gateway
        await sees(lambda: len(gateway.models()) == 1)
        first = group_of(agent, "tiny")
        before, alone, epoch = pids(first), first.supervisor.kv.tokens, first.supervisor.status.epoch
        assert first.scope.assignment.kv_mib == 0
        assert first.supervisor.kv.limit_bytes == 0

        desired.serve(str(other))
        await sees(lambda: len(gateway.models()) == 2)
        second = group_of(agent, "other")
        for group in (first, second):
            assert group.scope.assignment.kv_mib > 0
            # The bound changes with the machine's free memory, and the group follows.
            await sees(
                lambda group=group: group.supervisor.kv.loaded.kv_bytes == group.scope.assignment.kv_mib * MIB
            )
        assert first.supervisor.kv.tokens < alone
        await answers(agent, *(each.id for each in gateway.models()))

        assert memory_lines(caplog) == []
        # A rank that does not keep to its bound is named once.
        kv = first.supervisor.kv
        kept = kv.loaded
        assert kept is not None
        kv.loaded = replace(kept, kv_bytes=1)
        await sees(lambda: memory_lines(caplog))
        await asyncio.sleep(0.5)
        assert ["tiny#0 on a: its KV caches have" in line for line in memory_lines(caplog)] == [True]
        kv.loaded = kept

        assert renderers(other)
        text = gateway.text("other")
        desired.unload(str(other))
        await sees(lambda: first.supervisor.kv.tokens == alone)
        await sees(lambda: not renderers(other))
        assert text is not None  # no collection of garbage ended its process
        assert first.supervisor.kv.limit_bytes == 0
        await answers(agent, "")
        assert first.supervisor.status.state is ServingState.READY
        assert (pids(first), first.supervisor.status.epoch) == (before, epoch)


@in_a_loop(seconds=2 * START_S)
async def test_when_memory_shrinks_under_load_caches_give_way_and_then_what_is_not_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pinned model answers all its requests meanwhile, without a reload."""
    for name in ("other", "third"):
        shutil.copytree(embedded_model_path(), tmp_path / name)
    room: list[int] = []  #: Bytes that ranks may have on this Mac; what the system reports while it is empty.
    members = Machines.members

    def shrunk(machines: Machines, *args: Any, **more: Any) -> list[MemberMachine]:
        return [
            replace(each, machine=replace(each.machine, gpu_bytes=room[0] if room else 0))
            for each in members(machines, *args, **more)
        ]

    monkeypatch.setattr(Machines, "members", shrunk)
    settings = of_one_mac(tmp_path, "tiny", model_given=True)
    async with running_agent(settings) as agent:
        gateway, desired = agent.parts.gateway, agent.parts.node.desired

        def served() -> list[str]:
            return sorted(each.id for each in gateway.models())

        await sees(lambda: served() == ["tiny"])
        desired.serve(str(tmp_path / "other"), keep_s=KEEP_S)
        await sees(lambda: served() == ["other", "tiny"])
        first, other = group_of(agent, "tiny"), group_of(agent, "other")
        before, wide = pids(first), first.supervisor.kv.tokens
        pinned = [asyncio.create_task(answers(agent, *["tiny"] * 20)) for _ in range(4)]

        room.append(HEADROOM_BYTES * 5 // 2)  # for two models and the least of caches
        await sees(lambda: 0 < first.supervisor.kv.tokens < wide)
        assert served() == ["other", "tiny"]
        await answers(agent, "other")

        desired.serve(str(tmp_path / "third"))
        await sees(lambda: served() == ["third", "tiny"])
        assert not desired.table.get("other"), "its row gives way, too"
        assert other.supervisor.status.ranks is None
        await asyncio.gather(*pinned)
        await answers(agent, "tiny", "third")
        assert (pids(first), first.supervisor.status.state) == (before, ServingState.READY)

        room.clear()
        await sees(lambda: first.supervisor.kv.tokens >= wide)


@in_a_loop(seconds=2 * START_S)
async def test_the_next_revision_is_ready_before_the_present_one_ends(tmp_path: Path) -> None:
    """A folder of the same name stands for it. Requests get an answer of one or the other at any time."""
    for number in (1, 2):
        shutil.copytree(embedded_model_path(), tmp_path / str(number) / "model")
    settings = of_one_mac(tmp_path, str(tmp_path / "1" / "model"), model_given=True)
    async with running_agent(settings) as agent:
        gateway = agent.parts.gateway
        await sees(lambda: len(gateway.models()) == 1)
        before, folder = pids(group_of(agent, "model")), gateway.models()[0].path
        long = gateway.generate(Generate(0, (5, 6, 7), 200, ignore_eos=True))
        agent.parts.node.desired.serve(str(tmp_path / "2" / "model"))
        while gateway.models()[0].path == folder:
            await answers(agent, "model")  # raises when nothing is ready
            await asyncio.sleep(0.2)  # it changes while no request is open, or after 10 s
        tokens = [event async for event in long if isinstance(event, Tokens)]
        assert sum(len(event.tokens) for event in tokens) == 200
        await answers(agent, "model")
        await sees(lambda: pids(group_of(agent, "model")) != before)
    assert rank_processes(settings.home) == [], "no rank outlives its agent"
