"""Two whole agents in the test's own process, with ranks in processes of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mlxtp.agent import Agent, running_agent
from mlxtp.config import Settings
from mlxtp.groups.group import Group
from mlxtp.groups.ranks import WORKER

from ..live_cluster import LIMITS, assert_marked, rank_processes


def owner(*agents: Agent) -> Group:
    """The group that these agents show, at the one that owns it."""
    [found] = [agent.parts.groups.shown for agent in agents if agent.parts.groups.shown.scope.owned]
    return found


async def _nothing(_first: Agent) -> None:
    pass


@asynccontextmanager
async def two_agents(
    folder: Path,
    worker: Sequence[str] = WORKER,
    founder: Mapping[str, Any] = {},
    meanwhile: Callable[[Agent], Awaitable[None]] = _nothing,
    **settings: Any,
) -> AsyncIterator[tuple[Agent, Agent]]:
    """The founder, with more settings in `founder`, and the one that joined it, both on loopback.

    `meanwhile` is awaited before the second one starts.
    """
    assert_marked()

    def of(name: str, **more: Any) -> Settings:
        home = folder / name
        fields = {"cluster": True, "name": name, "control_host": "127.0.0.1"}
        fields |= {"control_port": 0, "discovery": False, "limits": LIMITS, "nodes": "2"}
        return Settings(home, "127.0.0.1", 0, 1, "tiny", **{**fields, **settings, **more})

    async with running_agent(of("a", **founder), worker=worker) as first:
        await meanwhile(first)
        token = await first.parts.tokens.token()
        async with running_agent(
            of("b", join=token, peers=first.parts.node.introduction.addresses()), worker=worker
        ) as second:
            yield first, second
    assert [rank_processes(folder / name) for name in "ab"] == [[], []], "no rank outlives its agent"
