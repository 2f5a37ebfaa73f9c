"""Agents, peers and the client that the cases share: each starts at its first use, and ends at the end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from mlxtp.agent import Agent, running_agent
from mlxtp.api.backend import StreamEnd, Tokens
from mlxtp.config import EMBEDDED_MODEL, Settings, embedded_model_path
from mlxtp.groups.ranks import WORKER
from mlxtp.text.tokenizer import Text
from mlxtp.wire.messages import Generate

from .bare_loop import BareGroup
from .decoded import Decoded
from .errors import Unmeasured
from .http_client import Client, Endpoint
from .pinning import pin
from .server_peer import ServerPeer

T = TypeVar("T")

RANKS = 2
_SETTINGS = frozenset(field.name for field in dataclasses.fields(Settings))


class Stage:
    """One run of the benchmark. `folder` is temporary, and each case's own."""

    def __init__(self, folder: Path, console: Console, *, quick: bool) -> None:
        self.folder = self._root = folder
        self.quick = quick
        self._console = console
        self._stack = AsyncExitStack()
        self._agents: dict[tuple[tuple[str, object], ...], Agent] = {}
        self._homes = 0
        self._bare: BareGroup | None = None
        self._server: ServerPeer | None = None
        self._client: Client | None = None

    async def __aenter__(self) -> Stage:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def enter(self, case: str) -> None:
        """Begin a case: others may give their models the same names."""
        self.folder = self._root / case
        self.folder.mkdir()

    # --- how long it takes ---------------------------------------------------------------------------

    def pick(self, full: int, quick: int) -> int:
        """A count of tokens or requests."""
        return quick if self.quick else full

    def rounds(self, what: str, full: int, quick: int) -> Iterator[int]:
        """Numbers of the rounds; number 0 warms up and does not count."""
        count = self.pick(full, quick)
        for number in range(count + 1):
            self.say(f"{what}: {f'round {number} of {count}' if number else 'warming up'}")
            yield number

    def say(self, text: str) -> None:
        self._console.print(f"  [dim]{time.strftime('%H:%M:%S')}[/] {text}", highlight=False)

    # --- what is measured ----------------------------------------------------------------------------

    async def agent(self, **changes: object) -> Agent:
        """A ready agent with the embedded model, its ranks pinned. The same `changes` give the same agent."""
        key = tuple(sorted(changes.items()))
        if key not in self._agents:
            self._agents[key] = await self._stack.enter_async_context(self.own_agent(changes))
        return self._agents[key]

    @asynccontextmanager
    async def own_agent(
        self,
        changes: Mapping[str, object],
        *,
        model: Path | str = EMBEDDED_MODEL,
        worker: Sequence[str] = WORKER,
        stages: dict[str, float] | None = None,
        spares: bool = False,
    ) -> AsyncIterator[Agent]:
        """An agent that ends with the context. `stages` gets the seconds at which each stage was reached.

        Without `spares`, whose imports would take time from what is measured. What `changes` say of a setting
        that does not exist is left out; see `require`.
        """
        self._homes += 1
        settings = dataclasses.replace(
            Settings(self.folder / f"home-{self._homes}", "127.0.0.1", 0, RANKS, str(model)),
            **{name: value for name, value in changes.items() if name in _SETTINGS},  # type: ignore[arg-type]
        )
        said = ", ".join(f"{name}={value}" for name, value in changes.items() if name != "limits")
        self.say(f"starting an agent ({Path(model).name}{', ' if said else ''}{said})")
        reached: dict[str, float] = {} if stages is None else stages
        async with running_agent(settings, reached.__setitem__, worker, spares=spares) as agent:
            await agent.wait_ready()
            for pid, rank in rank_pids(agent):
                pin(pid, rank)
            yield agent

    async def bare(self) -> BareGroup:
        if self._bare is None:
            self.say("starting the bare loop")
            self._bare = BareGroup(embedded_model_path(), RANKS, self.folder)
            self._stack.push_async_callback(self._bare.stop)
            await self._bare.start()
        return self._bare

    async def server(self) -> ServerPeer:
        if self._server is None:
            client = await self.client()
            self.say("starting mlx_lm.server")
            self._server = ServerPeer(embedded_model_path(), RANKS, self.folder)
            self._stack.push_async_callback(self._server.stop)
            await self._server.start(client)
        return self._server

    async def client(self) -> Client:
        if self._client is None:
            self._client = Client()
            self._stack.push_async_callback(self._client.stop)
            await self._client.start()
        return self._client


def in_turn(number: int, *items: T) -> Sequence[T]:
    """Return the order of measuring in round `number`: back and forth, so that none is always first."""
    return items[::-1] if number % 2 else items


def require(*settings: str) -> None:
    """Raises Unmeasured when `Settings` lacks one of these fields."""
    if missing := sorted(set(settings) - _SETTINGS):
        raise Unmeasured(f"Settings has no {' and no '.join(missing)}")


def rank_pids(agent: Agent) -> list[tuple[int, int]]:
    """(pid, rank) of each rank process."""
    ranks = agent.parts.groups.shown.supervisor.status.ranks
    if ranks is None:
        raise Unmeasured("the agent has no ranks right now")
    return [(child.pid, child.rank) for child in ranks.processes]


def endpoint(agent: Agent) -> Endpoint:
    return Endpoint("the agent", agent.url, "default")


def text_of(agent: Agent) -> Text:
    """The tokenizer side of the agent's model."""
    text = agent.parts.groups.shown.supervisor.gateway.text()
    if text is None:
        raise Unmeasured("the agent has no model right now")
    return text


async def decode(agent: Agent, request: Generate) -> Decoded:
    """One request at the engine's pipe."""
    tokens: list[int] = []
    times: list[float] = []
    accepted = drafted = 0
    began = time.perf_counter()
    answer = agent.parts.groups.shown.supervisor.gateway.generate(request)
    async for event in answer:
        if isinstance(event, Tokens):
            tokens += event.tokens
            times += [time.perf_counter()] * len(event.tokens)
        elif isinstance(event, StreamEnd):
            accepted, drafted = event.accepted, event.drafted
    if len(tokens) < 2:
        raise Unmeasured(f"{len(tokens)} tokens are too few to measure")
    return Decoded.timed(tokens, began, times, accepted, drafted)
