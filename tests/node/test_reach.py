"""Which addresses members reach of each other: what is asked and answered, and what is not tried."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlxtp.cluster.own_build import versions_here
from mlxtp.diagnostics import reachability
from mlxtp.diagnostics.facts import Attempt
from mlxtp.diagnostics.local_facts import shared
from mlxtp.diagnostics.reachability import ReachabilityReply, attempts
from mlxtp.wire.cluster_messages import ReachTold, ReachWanted, Tried
from mlxtp.wire.machine import Interface

from ..wire.members import Member
from .one_node import MACHINE, A, B, FakeLink, Node, play

NONCE = b"n" * 16


@contextlib.contextmanager
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def closed() -> str:
    with listening() as address:
        return address


def alike(link: FakeLink) -> FakeLink:
    """A member that runs what this node runs."""
    link.hello = replace(link.hello, versions=versions_here())
    return link


async def asked(link: FakeLink) -> ReachWanted:
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # one for the question itself, one for those asked at once
    [wanted] = link.heard(ReachWanted)
    return wanted


def test_an_address_is_tried_by_connecting_to_it() -> None:
    with listening() as there:
        nobody = closed()
        found = asyncio.run(attempts((there, nobody, "nonsense", "10.0.0.1:0")))
    assert found == (
        Attempt(there),
        Attempt(nobody, "Connection refused", 111),
        Attempt("nonsense", "is not an address"),
        Attempt("10.0.0.1:0", "is not an address"),
    )


def test_a_member_is_asked_and_its_clock_is_compared(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        a, b = alike(node.meet(A)), node.meet(B)  # which runs something else
        asking = asyncio.ensure_future(node.cluster.reachability.ask(("10.0.0.1:52414",)))
        wanted = await asked(a)
        assert wanted.addresses == ("10.0.0.1:52414",)
        heard_us = int((time.time() + 60) * 1e6)
        tries = (Tried("10.0.0.1:52414", 61, "Connection refused"),)
        node.hear(b, ReachTold(wanted.nonce, heard_us, heard_us, ()))  # which was not asked that
        node.hear(a, ReachTold(wanted.nonce, heard_us, heard_us + 3_000_000, tries))
        node.hear(a, ReachTold(wanted.nonce, 0, 0, ()))
        answers = await asking
        assert answers[A].tries == (Attempt("10.0.0.1:52414", "Connection refused", 61),)
        assert answers[A].clock_s == pytest.approx(61.5, abs=0.5)  # it says it took 3 s for the answer
        assert answers[A].clock_error_s < 0.5
        assert b.heard(ReachWanted) == []
        assert answers[B] == ReachabilityReply(not_asked="it runs another version of mlxtp")

    play(tmp_path, member, story)


def test_who_goes_or_says_nothing_is_not_waited_for(
    tmp_path: Path, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(node: Node) -> None:
        a = alike(node.meet(A))
        asking = asyncio.ensure_future(node.cluster.reachability.ask(()))
        await asked(a)
        a.close()
        assert await asking == {A: ReachabilityReply(not_asked="its link ended")}
        monkeypatch.setattr(reachability, "ANSWER_S", 0.05)
        alike(node.meet(B))
        assert await node.cluster.reachability.ask(()) == {
            B: ReachabilityReply(not_asked="it did not answer within 0.05 s")
        }

    play(tmp_path, member, story)


def test_who_asks_is_told_and_nobody_is_knocked_at_in_its_name(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        a = node.meet(A)  # its link comes from 127.0.0.1
        with listening() as there, socket.create_server(("127.0.0.2", 0)) as stranger:
            other = f"127.0.0.2:{stranger.getsockname()[1]}"
            node.hear(a, ReachWanted(NONCE, (there, other)), ReachWanted(b"m" * 16, (there,)))
            await asyncio.gather(*node.cluster.reachability._answers.values())
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.accept()
        [told] = a.heard(ReachTold)  # one question at a time
        assert told.nonce == NONCE
        assert told.tries == (Tried(there, 0, ""), Tried(other, 0, "is not one that it announces"))
        assert abs(told.heard_us / 1e6 - time.time()) < 60
        assert told.told_us >= told.heard_us

    play(tmp_path, member, story)


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
