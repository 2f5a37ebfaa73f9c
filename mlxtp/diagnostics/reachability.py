"""Tests of TCP connections between members, tried here and requested of the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..cluster.own_build import versions_here
from ..cluster.surroundings import Surroundings
from ..discovery.dial_schedule import host_and_port
from ..errors import MlxtpError
from ..wire.cluster_messages import MAX_TRIES, ReachTold, ReachWanted, Tried
from .facts import Attempt

#: Seconds for one connection. On one network it takes a millisecond.
TRY_S = 2.0
#: Seconds for the replies. The members try all addresses at once.
ANSWER_S = 4.0


@dataclass(frozen=True, slots=True)
class ReachabilityReply:
    """A member's report of its way to this one, or `not_asked`: why there is none.

    Its clock is `clock_s` ahead of ours, give or take `clock_error_s`.
    """

    tries: tuple[Attempt, ...] | None = None
    not_asked: str = ""
    clock_s: float | None = None
    clock_error_s: float = 0.0


async def attempt(address: str) -> Attempt:
    """Connect to "ip:port" and hang up. Does not raise."""
    found = host_and_port(address)
    if found is None:
        return Attempt(address, "is not an address")
    try:
        async with asyncio.timeout(TRY_S):
            _, writer = await asyncio.open_connection(*found)
    except TimeoutError:
        return Attempt(address, f"no answer within {TRY_S:g} s")
    except OSError as error:
        number = error.errno if error.errno is not None and error.errno > 0 else 0
        return Attempt(address, os.strerror(number) if number else str(error)[:100], number)
    writer.transport.abort()
    return Attempt(address)


async def attempts(addresses: Iterable[str]) -> tuple[Attempt, ...]:
    """Try all addresses at once."""
    return tuple(await asyncio.gather(*map(attempt, addresses)))


class Reachability:
    """Connection tests: those requested of members, and those that members request."""

    def __init__(self, cluster: Surroundings) -> None:
        self._cluster = cluster
        self._asked: dict[tuple[str, bytes], asyncio.Future[ReachabilityReply]] = {}
        self._sent_at: dict[bytes, float] = {}
        #: By the node id of the requesting agent.
        self._answers: dict[str, asyncio.Task[None]] = {}

    async def ask(self, addresses: Sequence[str]) -> Mapping[str, ReachabilityReply]:
        """Return which of our addresses each linked member reaches, by node id."""
        nodes = sorted(self._cluster.links.nodes())
        answers = await asyncio.gather(*(self._ask(node_id, addresses[:MAX_TRIES]) for node_id in nodes))
        return dict(zip(nodes, answers, strict=True))

    async def _ask(self, node_id: str, addresses: Sequence[str]) -> ReachabilityReply:
        link = self._cluster.links.to(node_id)
        if link is None:
            return ReachabilityReply(not_asked="it has just gone")
        if link.hello.versions != versions_here():  # an older one ends the link at an unknown message
            return ReachabilityReply(not_asked="it runs another version of mlxtp")
        key = node_id, secrets.token_bytes(16)
        answer = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            self._sent_at[key[1]] = time.time()
            link.send(ReachWanted(key[1], tuple(addresses)))
            async with asyncio.timeout(ANSWER_S):
                found: ReachabilityReply = await answer
                return found
        except TimeoutError:
            return ReachabilityReply(not_asked=f"it did not answer within {ANSWER_S:g} s")
        except MlxtpError:
            return ReachabilityReply(not_asked="it has just gone")
        finally:
            del self._asked[key], self._sent_at[key[1]]

    def received(self, node_id: str, message: ReachWanted | ReachTold) -> None:
        """Handle a request or a reply of another agent."""
        if isinstance(message, ReachWanted):
            if node_id not in self._answers:  # one request at a time
                task = self._answers[node_id] = asyncio.ensure_future(self._answer(node_id, message))
                task.add_done_callback(lambda _: self._answers.pop(node_id))
            return
        answer = self._asked.get((node_id, message.nonce))
        if answer is not None and not answer.done():
            answer.set_result(_told(message, self._sent_at[message.nonce], time.time()))

    def lost(self, node_id: str) -> None:
        """Handle the end of the last link to an agent."""
        for (asked, _), answer in self._asked.items():
            if asked == node_id and not answer.done():
                answer.set_result(ReachabilityReply(not_asked="its link ended"))

    async def _answer(self, node_id: str, wanted: ReachWanted) -> None:
        heard_us = _now_us()
        own = self._hosts_of(node_id)
        tries = await asyncio.gather(
            *(attempt(each) if _host(each) in own else _not_its_own(each) for each in wanted.addresses)
        )
        told = tuple(Tried(each.address, each.errno, each.problem) for each in tries)
        with contextlib.suppress(MlxtpError):  # its link has ended
            self._cluster.links.send(node_id, ReachTold(wanted.nonce, heard_us, _now_us(), told))

    def _hosts_of(self, node_id: str) -> frozenset[str]:
        """Return the hosts that a member may have tested: its own. It must not make this Mac probe others."""
        link = self._cluster.links.to(node_id)
        announced = map(_host, self._cluster.peer_info.addresses.get(node_id, ()))
        return frozenset([*announced, *([link.remote] if link is not None else [])])

    async def close(self) -> None:
        """Cancel the tests in progress."""
        answers = list(self._answers.values())
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


def _told(message: ReachTold, sent_at: float, now: float) -> ReachabilityReply:
    """Compute the offset as NTP does: the time that the other end took for its reply does not count."""
    heard, told = message.heard_us / 1e6, message.told_us / 1e6
    way_s = max((now - sent_at) - (told - heard), 0.0)
    return ReachabilityReply(
        tuple(Attempt(each.address, each.problem, each.errno) for each in message.tries),
        clock_s=((heard - sent_at) + (told - now)) / 2,
        clock_error_s=way_s / 2,
    )


async def _not_its_own(address: str) -> Attempt:
    return Attempt(address, "is not one that it announces")


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _now_us() -> int:
    return int(time.time() * 1e6)
