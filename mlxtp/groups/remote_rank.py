"""A rank on another Mac, as the coordinator's agent sees it: requests go to that Mac's agent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..errors import Code, FailureReport, GroupError, MlxtpError, ModelError
from ..wire.cluster_messages import (
    EndEpoch,
    EpochEnded,
    Prepare,
    Prepared,
    RankGathered,
    RankPong,
    RankSide,
    RankStarted,
    RankTrouble,
    StartRank,
)
from ..wire.codecs import Message
from ..wire.messages import Bootstrap, Gathered
from .local_rank import Watcher

END_GRACE_S = 4.0  #: Seconds that another agent may take to end its rank before this one stops waiting.

M = TypeVar("M", bound=Message)
#: Reports of another agent about a rank that it runs for this one.
RankWord = Prepared | RankStarted | RankPong | RankTrouble | EpochEnded | RankSide


@dataclass(frozen=True, slots=True)
class RankReady:
    """Rank process after its Hello: its address on MLX's ring ("ip:port") and the model's folder there."""

    ring: str = ""
    path: str = ""


class RemoteRank:
    """The rank reports to its `ProcessGroup`. The reader of the control link calls `received` and `lost`.

    `send` brings a message to the other agent, and raises LinkError when it is gone. `name` is for users.
    """

    def __init__(self, send: Callable[[Message], None], name: str, order: Prepare, watcher: Watcher) -> None:
        self.rank = order.rank
        self.epoch = order.epoch
        self._send = send
        self.name = name
        self._order = order
        self._watcher = watcher
        self._awaited: type[Message] | None = None
        self._answer: asyncio.Future[Message] | None = None
        self._ended = asyncio.Event()
        self._asked = False

    async def prepare(self) -> RankReady:
        """Have its process started. A failure is reported and ends the epoch, which cancels this wait."""
        self._asked = True
        prepared = await self._ask(self._order, Prepared)
        return RankReady(prepared.ring, prepared.path)

    async def join(self, bootstrap: Bootstrap) -> bool:
        """Send it its group. Return True if MLX has JACCL there."""
        return (await self._ask(StartRank(self.epoch, bootstrap), RankStarted)).jaccl

    def gathered(self, message: Gathered) -> None:
        """Send the reply to its round of JACCL's all-gather."""
        with contextlib.suppress(MlxtpError):
            self._send(RankGathered(self.epoch, self.rank, message))

    async def shut_down(self) -> None:
        """End it in order, after rank 0 has ended its loop."""
        await self._end(in_order=True)

    async def kill(self) -> None:
        """End it at once. May be repeated. Returns also when its agent no longer replies."""
        with contextlib.suppress(TimeoutError):  # it ends with its own link, if it has not yet
            async with asyncio.timeout(END_GRACE_S):
                await self._end(in_order=False)

    async def _end(self, *, in_order: bool) -> None:
        if not self._asked or self._ended.is_set():
            return
        try:
            self._send(EndEpoch(self.epoch, in_order))
        except MlxtpError:
            return  # without its link the other agent ends it by itself
        await self._ended.wait()

    async def _ask(self, order: Message, expected: type[M]) -> M:
        self._awaited, self._answer = expected, asyncio.get_running_loop().create_future()
        try:
            self._send(order)
            answer = await self._answer
        finally:
            self._answer = None
        assert isinstance(answer, expected)
        return answer

    def received(self, message: RankWord) -> None:
        """Take in its agent's report about it."""
        match message:
            case RankSide():
                self._watcher.side(self.rank, message.side)
            case RankPong():
                self._watcher.received_pong(self.rank, message.pong)
            case RankTrouble():
                code = Code(message.code)
                kind = ModelError if code.startswith("model_") else GroupError
                error = kind(f"{self.name}: {message.detail}", code)
                self._watcher.report(FailureReport(self.rank, error, message.outside))
            case EpochEnded():
                self._ended.set()
            case _ if self._answer is None or self._answer.done() or type(message) is not self._awaited:
                what = f"{self.name} sent an unexpected {type(message).__name__}"
                self._watcher.report(FailureReport(self.rank, GroupError(what, Code.OUT_OF_ORDER)))
            case _:
                self._answer.set_result(message)

    def lost(self, why: str) -> None:
        """Note that the control link to its agent is gone."""
        self._ended.set()
        error = GroupError(f"rank {self.rank}: {self.name} is gone: {why}", Code.RANK_LOST)
        self._watcher.report(FailureReport(self.rank, error, seen_from_outside=True))
