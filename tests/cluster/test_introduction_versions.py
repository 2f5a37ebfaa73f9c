"""Two members of unlike protocol versions: each knows why it has no link, and removals pass."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mlxtp.cluster import introduction
from mlxtp.cluster.cluster_state import MAX_ENTRIES, MAX_TEXT, roster_entries, roster_text
from mlxtp.cluster.links import Rejected
from mlxtp.cluster.node import ClusterNode
from mlxtp.config import Settings
from mlxtp.errors import Code, ProtocolError
from mlxtp.wire.blocking import listen
from mlxtp.wire.certificates import NodeIdentity
from mlxtp.wire.cluster_messages import AgentHello, RosterEntry
from mlxtp.wire.streams import TlsAcceptor, open_tls
from mlxtp.wire.tls import ALPN_CONTROL, Peer, member_context_client, member_context_server, peer_identity

from ..groups.one_node import MACHINE
from ..groups.scenes import run, sees, within
from ..played import scenes
from ..wire.members import Member, founder, member_of
from ..wire.samples import to_body

played = scenes(lambda story: run(within(story())), stages=0)


class Agent:
    """One agent's node and control port, of this protocol version."""

    def __init__(self, member: Member, name: str, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
        home = member.store.folder.parent / f"home-{name}"
        home.mkdir()
        self.member = member
        self.node = ClusterNode(Settings(home, "", 0, 1, name), member.identity, MACHINE)

        def hello() -> AgentHello:
            monkeypatch.setattr(introduction, "PROTOCOL_VERSION", version)
            return introduction.Introduction.hello(self.node.introduction)

        self.node.introduction.hello = hello  # type: ignore[method-assign]
        self.node.links._hello = hello
        sock = listen("127.0.0.1")
        self.port = sock.getsockname()[1]
        self._acceptor = TlsAcceptor(sock, member_context_server(member.credentials), self._welcome)
        self._open = asyncio.ensure_future(self._acceptor.run())

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer) -> None:
        assert peer.identity is not None
        await self.node.links.called(reader, writer, peer.identity)

    async def dial(self, other: Agent) -> str:
        context = member_context_client(self.member.credentials, ALPN_CONTROL)
        reader, writer = await open_tls("127.0.0.1", other.port, context, ALPN_CONTROL, 5.0)
        identity = peer_identity(writer.get_extra_info("ssl_object"))
        return await self.node.links.dialled(reader, writer, identity)

    def enrol(self, *others: Agent) -> None:
        for each in others:
            self.node.enrolment.admit(each.node.node_id, each.node.name, each.member.identity.fingerprint)

    async def close(self) -> None:
        await self.node.close()
        self._open.cancel()
        await asyncio.wait({self._open})


@asynccontextmanager
async def agents(folder: Path, monkeypatch: pytest.MonkeyPatch, *versions: int) -> AsyncIterator[list[Agent]]:
    """Members of one cluster, of these versions."""
    first = founder(folder)
    members = [first, *(member_of(first, folder) for _ in versions[1:])]
    found = [
        Agent(member, name, version, monkeypatch)
        for member, name, version in zip(members, ("mini", "studio", "gone"), versions, strict=False)
    ]
    try:
        yield found
    finally:
        for each in found:
            await each.close()


@pytest.mark.slow
@pytest.mark.parametrize("newer", [True, False], ids=["the newer removes", "the older removes"])
@pytest.mark.parametrize("calls", [True, False], ids=["and dials", "and is dialled"])
@played()
async def test_removals_pass_between_versions_and_both_ends_know_why_they_have_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: bool, calls: bool
) -> None:
    version = 13 if newer else 11
    async with agents(tmp_path, monkeypatch, version, 12, 12) as (a, b, gone):
        a.enrol(b, gone)
        b.enrol(a, gone)
        assert await gone.dial(b) == b.node.node_id  # it is a member
        a.node.enrolment.remove(gone.node.node_id)
        with pytest.raises(Rejected, match="install the same mlxtp on both"):
            await (a.dial(b) if calls else b.dial(a))
        await sees(lambda: gone.node.node_id not in b.node.replica.roster.members())
        with pytest.raises(Rejected, match="was removed") as refused:
            await gone.dial(b)
        assert refused.value.code is Code.REMOVED_NODE
        for one, other in ((a, b), (b, a)):
            reason = one.node.links.refused[other.node.node_id]
            assert "protocol 12" in reason
            assert f"protocol {version}" in reason


@played()
async def test_a_link_clears_reasons_which_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with agents(tmp_path, monkeypatch, 12, 12) as (a, b):
        for number in range(200):
            identity = NodeIdentity(f"{number:032x}", b.node.identity.cluster_id, "f" * 64)
            a.node.links.refused.note(identity, ProtocolError("no", Code.MISMATCH))
        assert len(a.node.links.refused) == 64
        a.node.links.refused[b.node.node_id] = "of another version"
        await a.dial(b)
        await sees(lambda: b.node.node_id not in a.node.links.refused)


@pytest.mark.parametrize("calls", [True, False])
@played()
async def test_a_roster_that_cannot_be_applied_costs_neither_the_refusal_nor_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, calls: bool
) -> None:
    async with agents(tmp_path, monkeypatch, 13, 12) as (a, b):
        a.node.enrolment.received = lambda *_: {}["a bug"]  # type: ignore[method-assign]
        with pytest.raises(Rejected, match="install the same mlxtp on both"):
            await (a.dial(b) if calls else b.dial(a))
        assert "KeyError('a bug')" in caplog.text
        assert "protocol 13" in a.node.links.refused[b.node.node_id]


@played()
async def test_a_removed_member_that_is_dialled_is_told_and_believed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another version it would hand over a list in which it removes the others."""
    taken: list[object] = []
    async with agents(tmp_path, monkeypatch, 13, 12) as (a, b):
        a.enrol(b)
        a.node.enrolment.remove(b.node.node_id)
        a.node.enrolment.received = lambda *told: taken.append(told)  # type: ignore[method-assign]
        with pytest.raises(ProtocolError, match="removed") as refused:
            await a.dial(b)
        assert refused.value.code is Code.REMOVED_NODE
        assert not taken
        assert not b.node.replica.roster.removed(b.member.identity.fingerprint)


ENTRY = RosterEntry("a" * 32, "mini", "f" * 64, True, 3, removed_in=4)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (ENTRY,)),
        ({"later": {"version": 2}}, (ENTRY,)),
        ({"version": 2}, ()),
        ({"roster": [{"of": 1}, 7, None]}, ()),
        ({"roster": {}}, ()),
    ],
)
def test_another_versions_roster_is_read_as_far_as_this_one_understands_it(
    changed: dict[str, object], expected: tuple[RosterEntry, ...]
) -> None:
    text = roster_text([ENTRY])
    assert text.isascii()
    table = json.loads(text)
    table["roster"][0]["unknown"] = [1]
    assert roster_entries(json.dumps(table | changed)) == expected
    assert roster_entries(text[:-3]) == roster_entries("[" * 100_000) == ()


def test_the_largest_roster_fits_and_a_hello_may_have_more_fields() -> None:
    longest = {"node_id": 32, "name": 80, "fingerprint": 64, "admission": 160, "removal": 160, "remover": 130}
    entry = replace(ENTRY, **{name: "x" * size for name, size in longest.items()}, holding="x" * 160)
    assert len(roster_text([replace(entry, authorized="x" * 160)] * MAX_ENTRIES)) < MAX_TEXT
    hello = AgentHello(14, "a", "c", "b", "mini", (), (), (), "")
    assert AgentHello.CODEC.from_wire(to_body(hello) | {"later": [1]}) == hello
