"""End of a member's certificate, judged by the cluster's time. Pure, but for `own_time`.

A certificate holds for a year and is renewed in the second half of it, so a Mac may be away for half a year
and notice nothing. The cluster's time is the median of the clocks of this Mac and of the members with a link.
Of two in the middle the earlier one counts, because a clock that is ahead must end no membership.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

DAY_S = 86_400.0
CERTIFICATE_S = 365 * DAY_S  #: seconds for which a certificate holds
RENEW_S = CERTIFICATE_S / 2  #: seconds before its end from which on it is renewed
#: Seconds by which an end may lie further ahead than a renewal would put it, because clocks differ.
SLACK_S = 7 * DAY_S
#: Seconds since 1970. No certificate that ends was made before, so that a clock before it is wrong.
EARLIEST = 1_793_491_200.0


def own_time() -> float:
    """Return this Mac's clock, in seconds since 1970."""
    return time.time()


def cluster_time(own: float, others: Iterable[float]) -> float:
    """Return the time by most clocks, in seconds since 1970: this Mac's `own`, and those of linked members.

    Clocks before EARLIEST have no vote.
    """
    votes = sorted(each for each in (own, *others) if each >= EARLIEST)
    return votes[(len(votes) - 1) // 2] if votes else EARLIEST


def is_due(ends: float, now: float) -> bool:
    """Return True when a certificate should be renewed: half its time is over, or it ends too late.

    Too late end those that an earlier version made, or a Mac whose clock was ahead.
    """
    return not now + RENEW_S <= ends <= now + CERTIFICATE_S + SLACK_S


def accepts_ended(now: float, own_ends: float, *, listed: bool, can_renew: bool) -> bool:
    """Return True when this Mac takes in a member whose certificate has ended by the cluster's time `now`.

    `listed`: its key is on the list of members. `can_renew`: one of the two Macs holds the authority's key,
    so that the link begins with a renewal. A Mac whose own certificate has ended by the same time judges
    none: it was off for long, or its clock is ahead. It may be new, and know no list yet.
    """
    return own_ends <= now or (listed and can_renew)


class ClusterClock:
    """The cluster's time, from the clocks that members report in their beats."""

    def __init__(self) -> None:
        self._ahead: dict[str, float] = {}  #: By node id: seconds by which its clock is ahead of this Mac's.

    def told(self, node_id: str, clock: int) -> None:
        """Note a member's clock, in seconds since 1970; 0 for none."""
        if clock:
            self._ahead[node_id] = clock - own_time()

    def unlinked(self, node_id: str) -> None:
        """Forget the clock of a member without a link."""
        self._ahead.pop(node_id, None)

    def now(self) -> float:
        """Return the cluster's time, in seconds since 1970."""
        own = own_time()
        return cluster_time(own, (own + ahead for ahead in self._ahead.values()))

    @property
    def ahead(self) -> Mapping[str, float]:
        """Seconds by which each member's clock is ahead of this Mac's, by node id."""
        return self._ahead


def day(seconds: float) -> str:
    """Return the UTC day of a time in seconds since 1970, for users, such as 2026-11-26."""
    seconds = min(max(seconds, 0.0), 253_402_300_799.0)
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
