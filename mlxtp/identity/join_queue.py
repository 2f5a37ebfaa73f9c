"""Order in which a joining Mac sends its requests. Pure: time comes in.

Any Mac on the network can announce any addresses under the cluster's id. The queue therefore alternates
between announcers, and between the addresses of each. An honest one loses only the share of the false ones.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable

from ..discovery.dial_schedule import host_and_port

#: Seconds that an address may take to answer: the first time, the second, and later.
PATIENCE_S = (1.0, 2.0, 5.0)
AGAIN_S = 1.0  #: seconds after which an address that did not admit this Mac is tried again
MAX_OF_EACH = 32  #: addresses that are kept of one announcer


class JoinQueue:
    """Addresses ("ip:port") by announcer."""

    def __init__(self) -> None:
        self._addresses: dict[str, deque[str]] = {}
        self._turns: deque[str] = deque()
        self._due: dict[str, float] = {}
        self._tries: Counter[str] = Counter()

    @property
    def addresses(self) -> frozenset[str]:
        """Every address that was added."""
        return frozenset(each for mine in self._addresses.values() for each in mine)

    def add(self, announcer: str, addresses: Iterable[str], *, first: bool = False) -> None:
        """Add addresses of an announcer, in random order; `first`: before its other ones."""
        if announcer not in self._addresses:
            self._addresses[announcer] = deque(maxlen=MAX_OF_EACH)
            self._turns.append(announcer)
        mine = self._addresses[announcer]
        fresh = list(dict.fromkeys(each for each in addresses if each not in mine and host_and_port(each)))
        random.shuffle(fresh)
        if first:
            mine.extendleft(fresh)
        else:
            mine.extend(fresh[: MAX_OF_EACH - len(mine)])

    def take(self, now: float) -> tuple[str, str, float] | None:
        """Return the announcer and address to try now, and its time limit in seconds; None if none is due."""
        for _ in range(len(self._turns)):
            announcer, mine = self._turns[0], self._addresses[self._turns[0]]
            self._turns.rotate(-1)
            for _ in range(len(mine)):
                address = mine[0]
                mine.rotate(-1)
                if self._due.get(address, now) <= now:
                    self._due[address] = float("inf")
                    patience_s = PATIENCE_S[min(self._tries[address], len(PATIENCE_S) - 1)]
                    self._tries[address] += 1
                    return announcer, address, patience_s
        return None

    def asked(self, address: str, now: float) -> None:
        """Note that the exchange with an address is over."""
        self._due[address] = now + AGAIN_S
