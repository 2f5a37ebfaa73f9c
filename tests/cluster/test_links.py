"""Control links between two agents, over real TLS; some of the peers know only half of the rules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.cluster import links as neighbours_module
from mlxtp.cluster.links import FREE_S, LONGEST_PAUSE_S, MOST_S, SHARE, ControlLink, CpuShares, PeerLinks
from mlxtp.errors import Code, LinkError, MlxtpError, ProtocolError
from mlxtp.wire.blocking import listen
from mlxtp.wire.certificates import NodeIdentity
from mlxtp.wire.cluster_messages import (
    MAX_ENTERED,
    AgentHello,
    Beat,
    Deployment,
    Deployments,
    Members,
    Prepare,
    RosterEntry,
)
from mlxtp.wire.codecs import Message
from mlxtp.wire.frames import encode
from mlxtp.wire.messages import Error, Generate, SessionEnd
from mlxtp.wire.session import LinkKind, Session, Side
from mlxtp.wire.streams import StreamLink, TlsAcceptor, open_tls
from mlxtp.wire.tls import ALPN_CONTROL, Peer, member_context_client, member_context_server, peer_identity

from ..groups.scenes import run, sees, within
from ..played import scenes
from ..wire.members import Member, founder, member_of

BEAT = Beat(1, "", 0, 0, 0, True, 1)
DESIRED = Deployments((Deployment("org/model", "org/model", version=3, writer="a"),), 0, False)


@dataclass
class Events:
    """Events of one agent, in order."""

    welcome: bool = True
    links: list[ControlLink] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    ends: list[tuple[str, bool]] = field(default_factory=list)

    def opened(self, link: ControlLink) -> bool:
        self.links.append(link)
        return self.welcome

    def counts(self, _number: int) -> bool:
        return True

    def received(self, _link: ControlLink, message: Message) -> None:
        self.messages.append(message)

    def closed(self, link: ControlLink, why: str, goodbye: bool) -> None:
        self.ends.append((why, goodbye))


class Agent:
    """One agent's links, and the port at which it is called."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.node_id = member.identity.node_id
        self.hello = AgentHello(
            1, self.node_id, member.identity.cluster_id, "boot", self.node_id[:4], (), (), (), ""
        )
        self.events = Events()
        self.refusal: MlxtpError | None = None
        self.in_one_breath = b""
        """Bytes for each caller, instead of the right ones."""
        self.neighbours = PeerLinks(self.node_id, lambda: self.hello, self._judge, self.events)
        self.neighbours.on(self.events.received, Beat, Deployments, Members, Prepare, Error)
        sock = listen("127.0.0.1")
        self.port = sock.getsockname()[1]
        self._doorman = TlsAcceptor(sock, member_context_server(member.credentials), self._welcome)
        self.listening = asyncio.ensure_future(self._doorman.run())

    def _judge(self, identity: NodeIdentity, hello: AgentHello) -> MlxtpError | None:
        assert identity.node_id == hello.node_id
        return self.refusal

    async def _welcome(self, reader: Any, writer: Any, peer: Peer) -> None:
        assert peer.identity is not None
        if self.in_one_breath:
            await reader.read(65536)
            writer.write(self.in_one_breath)
            await reader.read(65536)
            return
        await self.neighbours.called(reader, writer, peer.identity)

    async def streams(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = member_context_client(self.member.credentials, ALPN_CONTROL)
        return await open_tls("127.0.0.1", port, context, ALPN_CONTROL, 5.0)

    async def dial(self, other: Agent) -> str:
        reader, writer = await self.streams(other.port)
        opened = len(self.events.links)
        try:
            identity = peer_identity(writer.get_extra_info("ssl_object"))
            node_id = await self.neighbours.dialled(reader, writer, identity)
        except BaseException:
            writer.transport.abort()
            raise
        await sees(lambda: len(self.events.links) > opened)
        return node_id

    async def close(self) -> None:
        await self.neighbours.close()
        self.listening.cancel()
        await asyncio.wait({self.listening})


class Stage:
    """Two agents. `a` has the smaller node id."""

    def __init__(self, folder: Path) -> None:
        first = founder(folder)
        members = sorted((first, member_of(first, folder)), key=lambda member: member.identity.node_id)
        self.a, self.b = map(Agent, members)

    async def raw(self) -> StreamLink:
        """A link from `a` to `b` on which `a` has said nothing yet."""
        return StreamLink(*await self.a.streams(self.b.port), Session(LinkKind.CONTROL, Side.LOWER, 0))


def play(tmp_path: Path, story: Callable[[Stage], Awaitable[None]]) -> None:
    async def scene() -> None:
        stage = Stage(tmp_path)
        try:
            await within(story(stage))
        finally:
            await stage.a.close()
            await stage.b.close()
        for agent in (stage.a, stage.b):
            assert agent.neighbours.links() == ()
            opened = [link for link in agent.events.links if agent.events.welcome]
            assert len(agent.events.ends) == len(opened), "each link that was opened ends once"
        await sees(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    run(scene())


played = scenes(play, "tmp_path")


@played()
async def test_a_link_from_its_hello_to_its_goodbye(stage: Stage) -> None:
    a, b = stage.a, stage.b
    assert await a.dial(b) == b.node_id
    await sees(lambda: b.events.links)
    [here], [there] = a.events.links, b.events.links
    assert (here.hello, there.hello) == (b.hello, a.hello)
    assert (here.dialled, there.dialled) == (True, False)
    assert (here.remote, there.remote, there.local) == ("127.0.0.1",) * 3
    assert here.fingerprint == b.member.identity.fingerprint
    assert a.neighbours.nodes() == {b.node_id}
    a.neighbours.send(b.node_id, BEAT)
    a.neighbours.broadcast(DESIRED)
    b.neighbours.broadcast(BEAT)
    await sees(lambda: (b.events.messages, a.events.messages) == ([BEAT, DESIRED], [BEAT]))
    await a.neighbours.close()
    await sees(lambda: b.events.ends == [("its agent stopped", True)])
    assert b.neighbours.nodes() == frozenset()
    with pytest.raises(LinkError, match="no link to node"):
        b.neighbours.send(a.node_id, BEAT)
    b.neighbours.broadcast(BEAT)  # who is gone is told nothing


@played()
async def test_of_two_links_both_ends_mean_the_same(stage: Stage) -> None:
    a, b = stage.a, stage.b
    await b.dial(a)
    await a.dial(b)
    await sees(lambda: len(a.events.links) == len(b.events.links) == 2)
    here, there = a.neighbours.to(b.node_id), b.neighbours.to(a.node_id)
    assert (here.dialled, there.dialled) == (True, False)
    here.close()
    await sees(lambda: len(a.neighbours.links()) == len(b.neighbours.links()) == 1)
    assert a.neighbours.nodes() == {b.node_id}
    a.neighbours.send(b.node_id, BEAT)
    b.neighbours.send(a.node_id, DESIRED)
    await sees(lambda: a.events.messages + b.events.messages == [DESIRED, BEAT])


@played()
async def test_who_is_refused_hears_why_at_either_end(stage: Stage) -> None:
    a, b = stage.a, stage.b
    b.refusal = ProtocolError("mini was removed from this cluster", Code.REMOVED_NODE)
    with pytest.raises(ProtocolError, match="mini was removed from this cluster") as refused:
        await a.dial(b)
    assert refused.value.code is Code.REMOVED_NODE
    assert a.events.links == b.events.links == []
    a.refusal, b.refusal = ProtocolError("mlx 1 there, mlx 2 here", Code.MISMATCH), None
    with pytest.raises(ProtocolError, match="mlx 1 there"):
        await a.dial(b)
    assert a.events.links == []
    await sees(lambda: b.events.ends)  # it had welcomed us before
    assert b.events.ends[0][1] is False


@played()
async def test_a_link_that_is_not_wanted_after_all_ends_without_a_goodbye(stage: Stage) -> None:
    a, b = stage.a, stage.b
    b.events.welcome = False
    await a.dial(b)
    await sees(lambda: a.events.ends)
    assert a.events.ends[0][1] is False
    assert b.neighbours.links() == ()


HELLO = AgentHello(1, "", "", "boot", "mini", (), (), (), "")


@pytest.mark.parametrize(
    "greeting",
    [encode(BEAT, 0, 1), encode(SessionEnd(), 0, 1), os.urandom(64), (1 << 20).to_bytes(4, "big"), b""],
    ids=["a beat", "a goodbye", "noise", "a large frame", "silence"],
)
@played()
async def test_who_does_not_say_its_name(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, greeting: bytes
) -> None:
    monkeypatch.setattr(neighbours_module, "GREETING_S", 0.2)
    reader, writer = await stage.a.streams(stage.b.port)
    writer.write(greeting)
    assert await reader.read() == b""
    writer.close()
    assert stage.b.events.links == []


@pytest.mark.parametrize(
    "wrong",
    [
        encode(replace(HELLO, node_id="x"), 0, 2),
        encode(Generate(1, (1,), 1), 0, 2),
        encode(BEAT, 0, 7),
        b"\x00\x00\x00\x04noise",
    ],
    ids=["a second hello", "a request", "a frame too late", "noise"],
)
@played()
async def test_who_breaks_the_rules_later_is_cut_off(stage: Stage, wrong: bytes) -> None:
    a, b = stage.a, stage.b
    reader, writer = await a.streams(b.port)
    writer.write(encode(a.hello, 0, 1))
    await sees(lambda: b.events.links)
    writer.write(wrong)
    await sees(lambda: b.events.ends)
    assert b.events.ends[0][1] is False
    assert b.events.messages == []
    while await reader.read(65536):
        pass
    writer.close()


@played()
async def test_an_agent_that_does_not_read_is_cut_off(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours_module, "MAX_UNSENT_BYTES", 100_000)
    link = await stage.raw()
    link.send(stage.a.hello)
    await link.receive()
    link._writer.transport.pause_reading()  # type: ignore[attr-defined]
    entries = tuple(RosterEntry(f"{i:032x}", "n" * 80, "f" * 64, False, i) for i in range(MAX_ENTERED))
    while not stage.b.events.ends:
        stage.b.neighbours.broadcast(Members(entries))
        await asyncio.sleep(0)
    assert stage.b.neighbours.nodes() == frozenset()
    link._writer.transport.abort()


@played()
async def test_a_link_that_breaks_and_one_that_ends_with_an_error(stage: Stage) -> None:
    b = stage.b
    link = await stage.raw()
    link.send(stage.a.hello)
    await sees(lambda: b.events.links)
    link._writer.transport.abort()
    await sees(lambda: b.events.ends)
    assert b.events.ends == [("control link: the agent that called is gone, in state open", False)]
    link = await stage.raw()
    link.send(stage.a.hello)
    await link.receive()
    link.send(Error(Code.DUPLICATE_NODE, "two Macs are one", 0))
    await sees(lambda: len(b.events.ends) == 2)
    assert b.events.messages == [Error(Code.DUPLICATE_NODE, "two Macs are one", 0)]
    assert b.events.ends[1] == ("two Macs are one", False)
    link.close()


@played()
async def test_what_is_said_together_with_the_hello_is_heard_after_it(stage: Stage) -> None:
    a, b = stage.a, stage.b
    words = (b.hello, BEAT, DESIRED)
    b.in_one_breath = b"".join(encode(each, 0, number) for number, each in enumerate(words, 1))
    await a.dial(b)
    await sees(lambda: a.events.messages == [BEAT, DESIRED])


COSTS = st.lists(st.tuples(st.floats(1e-5, 1.5), st.floats(0.0, 3.0)), max_size=200)


@given(COSTS)
def test_a_member_takes_its_share_of_the_cpu_whatever_it_sends_and_however_often_it_connects(
    sent: list[tuple[float, float]],
) -> None:
    """Each message has its CPU seconds, and comes so long after the one before."""
    now = took = largest = 0.0
    shares = CpuShares(lambda: now)
    for cpu_s, after_s in sent:
        now += after_s
        if shares.refusal("liar"):
            continue
        now, took, largest = now + cpu_s, took + cpu_s, max(largest, cpu_s)
        assert took <= SHARE * now + FREE_S + largest
        with contextlib.suppress(ProtocolError):
            now += (pause_s := shares.spend("liar", cpu_s))
            assert pause_s <= LONGEST_PAUSE_S
    assert shares.refusal("honest") is None
    now += MOST_S * 2 / SHARE
    assert shares.refusal("liar") is None
    assert shares.spend("liar", FREE_S) == 0.0, "members that meet may send as much as that"
    began = now
    with contextlib.suppress(ProtocolError):
        while True:
            now += 0.01 + shares.spend("flood", 0.01)
    assert now - began > (MOST_S - FREE_S) / SHARE, "it is read slower first"


@played()
async def test_a_member_that_floods_is_read_slower_then_cut_and_kept_out_for_a_while(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in (("SHARE", 0.05), ("FREE_S", 0.1), ("MOST_S", 0.2), ("CALL_S", 0.0)):
        monkeypatch.setattr(neighbours_module, name, seconds)
    caplog.set_level(logging.WARNING)
    a, b = stage.a, stage.b

    def slow(_link: ControlLink, _message: Message) -> None:
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass

    b.neighbours.on(slow, Deployments)
    await a.dial(b)
    await sees(lambda: b.events.links)
    began, behind = time.monotonic(), False
    for _ in range(2000):
        a.neighbours.broadcast(DESIRED)
    while not b.events.ends:
        before = time.thread_time()
        await asyncio.sleep(0.001)
        assert time.thread_time() - before < 0.1, "other links have their turn after each message"
        behind = behind or b.neighbours.shares.refusal(a.node_id) is not None
    assert behind
    assert len(b.events.messages) * 0.004 < 0.05 * (time.monotonic() - began) + 0.3
    assert "CPU time beyond a member's share of 5%; it may be faulty" in caplog.text
    await sees(lambda: a.events.ends)
    assert "CPU time" in a.events.ends[0][0]
    with pytest.raises(ProtocolError, match="took more than 5% of this Mac's CPU time"):
        await a.dial(b)
    await sees(lambda: not b.neighbours.shares.refusal(a.node_id))
    await a.dial(b)
