"""What an agent finds out about the other members: from its own tries, its links, and their answers."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from mlxtp.cluster.own_build import versions_here
from mlxtp.diagnostics.checkup import AgentCheckup
from mlxtp.diagnostics.facts import Attempt
from mlxtp.discovery.peer_cache import DiscoveredPeer
from mlxtp.wire.cluster_messages import ModelStatus, ReachTold, ReachWanted, Tried

from ..wire.members import Member
from .one_node import MACHINE, A, B, Node, play, report


def test_a_member_is_seen_from_both_ends(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        cluster = node.cluster
        cluster.listens_at = lambda _machine: ("127.0.0.1:52414",)
        dialer = SimpleNamespace(sightings=(DiscoveredPeer(A, "", "mac-a", (), False, 1),), trouble="")
        agent = AgentCheckup(
            replace(cluster.settings, control_host="127.0.0.1"),
            cluster.supervisor,
            cast(Any, SimpleNamespace(url="http://127.0.0.1:52415")),
            cluster,
            cast(Any, dialer),
        )
        a, b = node.meet(A), node.meet(B)
        a.hello = replace(a.hello, versions=versions_here())
        node.hear(a, report(MACHINE), ModelStatus(0, "ab" * 32, ""))
        node.hear(b, ModelStatus(0, "", "it is gated"))
        b.close()
        with socket.create_server(("127.0.0.1", 0)) as server:
            there = f"127.0.0.1:{server.getsockname()[1]}"
            cluster.peer_info.addresses.update({A: (there,), B: ("127.0.0.1:1",)})
            asking = asyncio.ensure_future(agent._members(MACHINE))
            async with asyncio.timeout(10):
                while not a.heard(ReachWanted):  # noqa: ASYNC110 - the link is played by hand
                    await asyncio.sleep(0.001)
            [wanted] = a.heard(ReachWanted)
            control, drawn = wanted.addresses
            assert control == "127.0.0.1:52414"
            _, writer = await asyncio.open_connection(*drawn.split(":"))  # it is open while members are asked
            writer.close()
            now_us = int(time.time() * 1e6)
            tries = (Tried(control, 0, ""), Tried(drawn, 61, "Connection refused"))
            node.hear(a, ReachTold(wanted.nonce, now_us, now_us, tries))
            first, second = sorted(await asking, key=lambda each: each.name)
        assert (first.name, first.linked, first.heard) == ("mac-a", True, True)
        assert first.ours == (Attempt(there),)
        assert first.theirs == (Attempt(control), Attempt(drawn, "Connection refused", 61, drawn=True))
        assert first.clock_s is not None
        assert (first.fingerprint, second.fingerprint) == ("ab" * 32, "")
        assert (second.name, second.linked, second.heard) == ("mac-f", False, False)
        assert second.ours == (Attempt("127.0.0.1:1", "Connection refused", 111),)
        assert (second.theirs, second.unasked) == (None, "there is no link to it")

    play(tmp_path, member, story)


def test_the_port_that_is_drawn_for_a_question_is_closed_after_it(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        settings = replace(node.cluster.settings, control_host="127.0.0.1")
        agent = AgentCheckup(settings, node.cluster.supervisor, cast(Any, None), node.cluster)
        asked: list[str] = []

        async def ask(addresses: tuple[str, ...]) -> dict[str, Any]:
            await asyncio.sleep(0)
            asked.extend(addresses)
            return {}

        node.cluster.listens_at = lambda _machine: ("127.0.0.1:52414",)
        node.cluster.reachability.ask = ask  # type: ignore[method-assign,assignment]
        assert await agent._answers(node.cluster) == {}
        drawn = int(asked[-1].rpartition(":")[2])
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", drawn)) != 0

    play(tmp_path, member, story)
