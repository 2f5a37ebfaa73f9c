"""The asyncio shell over a socket pair whose other end is a `BlockingLink` or a bare socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from mlxtp.errors import Code, LinkError, RemoteProtocolError
from mlxtp.wire.blocking import BlockingLink
from mlxtp.wire.frames import encode
from mlxtp.wire.messages import Cancel, Delta, Finished, Forward, Generate, SessionEnd
from mlxtp.wire.session import LinkKind, LinkState, Received
from mlxtp.wire.streams import StreamLink

from ..played import scenes
from .walk import EPOCH, pair_in

TIMEOUT_S = 5.0
"""Far longer than anything here takes: a test that reaches it fails."""

Story = Callable[[StreamLink, BlockingLink, socket.socket], Awaitable[None]]


def play(story: Story, kind: LinkKind = LinkKind.PIPE_LEADER, state: LinkState = LinkState.LOADED) -> None:
    """Run `story(agent, rank, socket of the rank)` with the agent's end in an event loop."""

    async def run() -> None:
        pair = pair_in(kind, state)
        agent_sock, rank_sock = socket.socketpair()
        rank = BlockingLink(rank_sock, pair.lower, TIMEOUT_S)
        agent = await StreamLink.from_socket(agent_sock, pair.upper)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await story(agent, rank, rank_sock)
        finally:
            rank.close()
            agent.close()
            await agent.wait_closed()

    asyncio.run(run())


played = scenes(play, stages=3)


@played()
async def test_a_request_and_its_tokens(agent: StreamLink, rank: BlockingLink, sock: socket.socket) -> None:
    seq = agent.send(Generate(2, (5, 6), 10))
    await agent.drain()
    assert rank.receive() == [Received(seq, Generate(2, (5, 6), 10))]
    rank.send(Delta((2,), (0,), (50,)))
    rank.send(Finished(2, "length", 1, 1))
    received: list[Received] = []
    while len(received) < 2:
        received += await agent.receive()
    assert [type(r.message) for r in received] == [Delta, Finished]


@played()
async def test_a_large_prompt(agent: StreamLink, rank: BlockingLink, sock: socket.socket) -> None:
    prompt = Generate(2, tuple(range(500_000)), 10)
    reading = asyncio.create_task(asyncio.to_thread(rank.receive))
    agent.send(prompt)
    await agent.drain()
    assert [r.message for r in await reading] == [prompt]


def test_the_end_in_order() -> None:
    async def story(agent: StreamLink, rank: BlockingLink, sock: socket.socket) -> None:
        rank.send(SessionEnd())
        rank.close()
        assert [r.message for r in await agent.receive()] == [SessionEnd()]
        assert await agent.receive() == []

    play(story, LinkKind.PIPE, LinkState.ENDED)


@played()
async def test_a_rank_that_is_gone(agent: StreamLink, rank: BlockingLink, sock: socket.socket) -> None:
    rank.close()
    with pytest.raises(LinkError, match="rank 0 is gone, in state loaded") as caught:
        await agent.receive()
    assert caught.value.code is Code.LINK_LOST


@played()
async def test_a_rank_that_is_gone_with_a_prompt_on_its_way(
    agent: StreamLink, rank: BlockingLink, sock: socket.socket
) -> None:
    agent.send(Generate(2, tuple(range(500_000)), 10))
    rank.close()
    with pytest.raises(LinkError, match="cannot send"):
        await agent.drain()
    with pytest.raises(LinkError):
        await agent.receive()
    with pytest.raises(LinkError):
        agent.send(Cancel(1))


@played()
async def test_a_rank_that_breaks_a_rule(agent: StreamLink, rank: BlockingLink, sock: socket.socket) -> None:
    sock.sendall(encode(Forward((1,), (2,)), EPOCH, rank.protocol.seq + 1))
    with pytest.raises(RemoteProtocolError, match="rank 0 may not send Forward"):
        await agent.receive()
    with pytest.raises(RemoteProtocolError):
        agent.send(Cancel(1))


@played()
async def test_close_wakes_the_reader(agent: StreamLink, rank: BlockingLink, sock: socket.socket) -> None:
    reading = asyncio.create_task(agent.receive())
    await asyncio.sleep(0)
    agent.close()
    assert await reading == []
    with pytest.raises(LinkError, match="closed"):
        agent.send(Cancel(1))


@played()
async def test_what_was_sent_before_close_still_arrives(
    agent: StreamLink, rank: BlockingLink, sock: socket.socket
) -> None:
    agent.send(Cancel(1))
    agent.close()
    await agent.wait_closed()
    assert [r.message for r in rank.receive()] == [Cancel(1)]


@played()
async def test_a_cancelled_read_loses_nothing(
    agent: StreamLink, rank: BlockingLink, sock: socket.socket
) -> None:
    reading = asyncio.create_task(agent.receive())
    await asyncio.sleep(0)
    reading.cancel()
    rank.send(Delta((1,), (0,), (5,)))
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert [r.message for r in await agent.receive()] == [Delta((1,), (0,), (5,))]
