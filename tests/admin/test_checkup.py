"""Facts of an agent about the other members: from its own tries and its links."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.admin.checkup import AgentCheckup
from mlxtp.cluster.state_changes import RosterProofs
from mlxtp.diagnostics.checkup import attempts, shared
from mlxtp.diagnostics.facts import Attempt
from mlxtp.discovery.addresses import DiscoveredPeer
from mlxtp.wire.cluster_messages import Interface, Members, ModelStatus

from ..groups.one_node import MACHINE, A, B, Node, alone, by_hand, play
from ..played import scenes
from ..wire.members import Member

played = scenes(play, "tmp_path", "member")


@contextlib.contextmanager
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def closed() -> str:
    with listening() as address:
        return address


@played()
async def test_a_member_is_seen_by_tries_and_links(node: Node) -> None:
    cluster = node.parts
    dialer = SimpleNamespace(sightings=(DiscoveredPeer(A, "", "mac-a", (), False, 1),), trouble="")
    endpoint = cast(Any, SimpleNamespace(url="http://127.0.0.1:52415"))
    agent = AgentCheckup(cluster.node.settings, endpoint, cluster, cast(Any, dialer))
    a, b = node.meet(A), node.meet(B)
    node.hear(a, MACHINE, ModelStatus("", "ab" * 32, ""))
    node.hear(b, ModelStatus("", "", "it is gated"))
    b.close()
    with listening() as there:
        cluster.node.peer_info.addresses.update({A: (there,), B: ("127.0.0.1:1",)})
        first, second = sorted(await agent._members(MACHINE), key=lambda each: each.name)
        a.dialled = True  # from here
        again, _ = sorted(await agent._members(MACHINE), key=lambda each: each.name)
    assert (first.name, first.linked, first.heard) == ("mac-a", True, True)
    assert first.ours == (Attempt(there),)
    assert (first.called, again.called) == (True, False)
    assert (first.fingerprint, second.fingerprint) == ("ab" * 32, "")
    assert (second.name, second.linked, second.heard, second.called) == ("mac-f", False, False, False)
    assert second.ours == (Attempt("127.0.0.1:1", "Connection refused", 111),)


@played()
async def test_the_doctor_knows_which_macs_let_others_in(node: Node, first: Member) -> None:
    endpoint = cast(Any, SimpleNamespace(url="http://127.0.0.1:52415"))
    agent = AgentCheckup(node.parts.node.settings, endpoint, node.parts, None)
    a, _ = node.meet(A), node.meet(B)
    node.holds(A, first)
    node.holds(B, first)
    a.close()
    found = await agent._identity()
    assert (found.holders, found.holders_here) == (("mac-a", "mac-f"), ("mac-f",))
    assert (found.authority_lost, found.alone) == (False, False)
    own = node.parts.node.node_id
    entry = RosterProofs(first.identity).holding(
        replace(node.parts.node.replica.roster.members()[own], holds=True, holds_in=60)
    )
    node.hear(node.meet(A), Members((entry,)))
    assert (await agent._identity()).authority_lost


def test_an_address_is_tried_by_connecting_to_it() -> None:
    with listening() as there:
        unused = closed()
        found = asyncio.run(attempts((there, unused, "nonsense", "10.0.0.1:0")))
    assert found == (
        Attempt(there),
        Attempt(unused, "Connection refused", 111),
        Attempt("nonsense", "is not an address"),
        Attempt("10.0.0.1:0", "is not an address"),
    )


def test_a_network_in_common_is_told_from_another() -> None:
    machine = replace(
        MACHINE,
        interfaces=(
            Interface("en0", "10.0.0.1", 24, "ethernet", 0, True),
            Interface("en5", "169.254.1.1", 16, "thunderbolt", 0, True),
            Interface("en6", "10.9.0.1", 24, "ethernet", 0, False),
        ),
    )
    addresses = ("10.0.0.7:1", "10.0.1.7:1", "169.254.9.9:1", "10.9.0.7:1", "a.name:1")
    found = shared(map(Attempt, addresses), machine)
    assert [each.shared for each in found] == [True, False, False, False, False]


def test_an_agent_alone_has_no_control_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        parts = alone(tmp_path)
        monkeypatch.setattr(parts.node.introduction, "addresses", lambda: ("192.0.2.2:0",))
        endpoint = cast(Any, SimpleNamespace(url="http://127.0.0.1:52415"))
        agent = AgentCheckup(parts.node.settings, endpoint, parts, None)
        assert [each.name for each in await agent._ports()] == ["endpoint"]
        await parts.close()

    with by_hand():
        asyncio.run(story())
