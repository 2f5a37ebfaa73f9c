"""Hub of JACCL's side channel: collects one round's bytes from every rank, and replies to all of them.

One `SideChannelHub` serves one epoch, at the group's owner. Send each reply that it returns to the rank
beside it. Pure: time comes in as an argument, in seconds on a clock that does not jump.
"""

from __future__ import annotations

from ..wire.messages import MAX_ROUNDS, Gathered, SideChannel

#: Seconds from a round's first bytes to its last. Shorter than the wait of a rank (Bootstrap.round_s), so
#: that ranks' reports name the missing rank.
ROUND_S = 10.0

RoundReplies = list[tuple[int, Gathered]]  #: Replies, each with its rank.


class SideChannelHub:
    """Rounds are numbered from 1, and every rank takes part in each with equally many bytes.

    The number of rounds is unknown: the hub is done when nothing else comes. The first error ends it. Every
    rank that has sent anything gets the reason once, and any other rank as soon as it sends.
    """

    def __init__(self, world_size: int, round_s: float = ROUND_S) -> None:
        self._size = world_size
        self._round_s = round_s
        self._round = 1
        self._parts: dict[int, bytes] = {}
        self._began_at = 0.0
        self._seen: set[int] = set()
        self._replied: set[int] = set()
        self.error = ""  #: Reason why no round will follow; empty as long as one may.

    def receive(self, rank: int, message: SideChannel, now: float) -> RoundReplies:
        """Take in a rank's part of a round. Raises ValueError for a rank that is not of this group."""
        if not 0 <= rank < self._size:
            raise ValueError(f"rank {rank} of a group of {self._size}")
        self._seen.add(rank)
        if self.error:
            return self._reply()
        if wrong := self._fault(rank, message):
            return self.abort(wrong)
        if not self._parts:
            self._began_at = now
        self._parts[rank] = message.data
        if len(self._parts) < self._size:
            return []
        gathered = Gathered(self._round, b"".join(self._parts[each] for each in range(self._size)))
        self._round += 1
        self._parts.clear()
        return [(each, gathered) for each in range(self._size)]

    def tick(self, now: float) -> RoundReplies:
        """End a round that has waited too long for a rank. Call it now and then."""
        if not self._parts or self.error or now - self._began_at <= self._round_s:
            return []
        missing = " and ".join(f"rank {rank}" for rank in range(self._size) if rank not in self._parts)
        return self.abort(f"{missing} did not come to {self._place} within {self._round_s:g} s")

    def abort(self, reason: str) -> RoundReplies:
        """End all rounds, and send `reason` to all ranks; the first reason counts."""
        self.error = self.error or reason or "forming the group was given up"
        self._parts.clear()
        return self._reply()

    def _reply(self) -> RoundReplies:
        ranks = sorted(self._seen - self._replied)
        self._replied |= self._seen
        return [(rank, Gathered(min(self._round, MAX_ROUNDS), b"", self.error)) for rank in ranks]

    @property
    def _place(self) -> str:
        return f"round {self._round} of JACCL's side channel"

    def _fault(self, rank: int, message: SideChannel) -> str:
        unlike = "they run other versions of MLX, or other settings"
        if message.round != self._round:
            return f"rank {rank} came with round {message.round} to {self._place}; {unlike}"
        if rank in self._parts:
            return f"rank {rank} came twice to {self._place}"
        for other, data in self._parts.items():
            if len(data) != len(message.data):
                return (
                    f"rank {rank} sent {len(message.data)} bytes in {self._place}, rank {other} sent "
                    f"{len(data)}; {unlike}"
                )
        return ""
