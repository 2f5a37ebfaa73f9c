"""Time of a cluster's credentials: the end of certificates, and the change from one authority to the next.

A certificate holds for a year and is renewed in the second half of it, so a Mac may be away for half a year
and notice nothing. The cluster's time is the median of the clocks of this Mac and of the members with a link.
Of two in the middle the earlier one counts, because a clock that is ahead must end no membership.

The authority before certifies the key of the next one (`cross`), so that a member that was away takes the
certificates of the next authority. The next one certifies the key before (`past[0]`), so that a newcomer
believes what the former one signed. The `cross` holds from the beginning of the rotation to its end. Pure,
but for `own_time`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import ProtocolError
from ..wire.certificates import (
    Authority,
    MemberCertificates,
    PublicKey,
    authority_hash,
    authority_key,
    cluster_of,
    found,
    key_id,
    new_key,
    vouched,
)
from ..wire.cluster_messages import MAX_PAST

# --- end of certificates --------------------------------------------------------------------------------

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

    Too late ends one that a Mac made whose clock was ahead.
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
        self.ahead: dict[str, float] = {}  #: By node id: seconds by which its clock is ahead of this Mac's.

    def told(self, node_id: str, clock: int) -> None:
        """Note a member's clock, in seconds since 1970; 0 for none."""
        if clock:
            self.ahead[node_id] = clock - own_time()

    def unlinked(self, node_id: str) -> None:
        """Forget the clock of a member without a link."""
        self.ahead.pop(node_id, None)

    def now(self) -> float:
        """Return the cluster's time, in seconds since 1970."""
        own = own_time()
        return cluster_time(own, (own + ahead for ahead in self.ahead.values()))


def day(seconds: float) -> str:
    """Return the UTC day of a time in seconds since 1970, for users, such as 2026-11-26."""
    seconds = min(max(seconds, 0.0), 253_402_300_799.0)
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


# --- succession of authorities --------------------------------------------------------------------------

OVERLAP_S = 30 * DAY_S  #: seconds for which both authorities count, so that absent members can come back


@dataclass(frozen=True, slots=True)
class Successor:
    """The next authority with its key, and what others need to follow it: see `MemberCertificates`."""

    authority: Authority
    cross: bytes
    past: tuple[bytes, ...]


def successor(present: Authority, past: tuple[bytes, ...], at: float, *, at_once: bool) -> Successor:
    """Make the next authority, `at` a time in seconds since 1970. With `at_once` the present one ends then.

    `past` is that of `MemberCertificates`.
    """
    following = found(cluster_of(present.certificate), new_key())
    cross = present.vouch(following.certificate, at, at if at_once else at + OVERLAP_S)
    back = following.vouch(present.certificate)
    return Successor(following, cross, (back, *past)[:MAX_PAST])


def followed(
    held: MemberCertificates, authority: bytes, cross: bytes, past: tuple[bytes, ...]
) -> MemberCertificates | None:
    """Return a member's certificates when it follows another authority; None when it does not, or did before.

    It follows the next authority after its own. Of two that follow one authority, because two Macs rotated at
    one time, all members choose the same: one that ended the former at once, then the smaller hash.
    """
    try:
        if authority == held.authority:
            return _informed(held, cross, past)
        cluster_id = held.cluster_id
        if cluster_of(authority) != cluster_id or key_id(cross) != key_id(authority):
            return None
        _check(authority, past, cluster_id)
        former = _former(held, past)
        if not former:
            return None
        times = vouched(cross, former, cluster_id)
        if former == held.former:
            ours = vouched(held.cross, former, cluster_id)
            if _rank(ours, held.authority) <= _rank(times, authority):
                return None
    except (ProtocolError, ValueError, AssertionError):
        return None
    bridge = held.cross if former == held.former and held.moved else b""
    return replace(held, authority=authority, former=former, cross=cross, bridge=bridge, past=past)


def ends_at(held: MemberCertificates) -> float:
    """Return when the former authority ends, in seconds since 1970; 0 if there is none."""
    return vouched(held.cross, held.former, held.cluster_id)[1] if held.former else 0.0


def is_at_once(held: MemberCertificates) -> bool:
    """Return True when the former authority ended as soon as the present one began."""
    return bool(held.former) and _at_once(vouched(held.cross, held.former, held.cluster_id))


@lru_cache(maxsize=4)
def keys(held: MemberCertificates) -> tuple[PublicKey, ...]:
    """Return the keys whose signatures count: that of the present authority, then those of earlier ones."""
    return tuple(map(authority_key, (held.authority, *held.past)))


def _former(held: MemberCertificates, past: tuple[bytes, ...]) -> bytes:
    """Return which authority that this member trusts is the one before; empty for none."""
    before = key_id(past[0]) if past else ""
    return next((each for each in (held.authority, held.former) if each and key_id(each) == before), b"")


def _check(authority: bytes, past: tuple[bytes, ...], cluster_id: str) -> None:
    """Check that each authority vouches for the one before. Raises ProtocolError (NOT_AUTHENTIC)."""
    by = authority
    for each in past:
        vouched(each, by, cluster_id)
        by = each


def _informed(held: MemberCertificates, cross: bytes, past: tuple[bytes, ...]) -> MemberCertificates | None:
    """Return the certificates of a newcomer with the authorities before its own."""
    if len(past) <= len(held.past):
        return None
    _check(held.authority, past, held.cluster_id)
    vouched(cross, past[0], held.cluster_id)
    return replace(held, cross=cross, past=past)


def _at_once(times: tuple[float, float]) -> bool:
    return times[0] == times[1]


def _rank(times: tuple[float, float], authority: bytes) -> tuple[bool, bytes]:
    return not _at_once(times), authority_hash(authority)
