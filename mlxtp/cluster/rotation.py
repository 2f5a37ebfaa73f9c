"""Rotation of the cluster's authority: a new key takes over, and every member moves to it over its links.

One Mac that holds the authority's key makes the next one. Other holders present get it before any member
hears of it. Members follow (`identity/validity.py`), request certificates of the next authority, and trust
the former one until a holder reports that all have moved, or its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from .. import audit
from ..background import Background
from ..errors import ConfigError, MlxtpError, UserError
from ..identity.store import Identity, Store
from ..identity.validity import day, ends_at, followed, is_at_once
from ..wire.certificates import MemberCertificates
from ..wire.cluster_messages import AuthorityChange
from .authority import AuthorityKeeping
from .links import ControlLink
from .node import ClusterNode
from .renewal import Renewal

log = logging.getLogger(__name__)

LOOK_S = 1.0  #: Seconds between two looks at who has moved.
MOVE_S = 10.0  #: Seconds that present members have to move when the former authority ends at once.


class Rotation:
    """This Mac's part in rotations. `keeping` hands the next key to other holders."""

    def __init__(self, node: ClusterNode, store: Store, renewal: Renewal, keeping: AuthorityKeeping) -> None:
        self._node = node
        self._store = store
        self._renewal = renewal
        self._keeping = keeping
        self._told: AuthorityChange | None = None  #: The last report to all.
        self._answered: dict[str, AuthorityChange] = {}  #: By node id: the last reply to another authority.
        self._moved: dict[str, bytes] = {}  #: By node id: the authority of a member's certificate.
        self._began = time.monotonic()  #: Time at which this Mac followed the present authority, or started.
        self._over = False  #: True once a holder has reported the end of the former authority.
        self._unsaved: tuple[ControlLink, AuthorityChange] | None = None  #: A report that could not be kept.
        self._problem = ""  #: Reason why the identity's files could not be written.
        self._work = Background()
        node.links.on(self._reported, AuthorityChange)
        node.links.on_up(self._greet)
        node.rounds.every(LOOK_S, self._watch, needed=self._is_news)

    @property
    def _membership(self) -> MemberCertificates:
        membership = self._node.identity.membership
        assert membership is not None
        return membership

    # --- the Mac that begins it

    async def rotate(self, *, at_once: bool) -> None:
        """Make the next authority, and have others follow it. With `at_once` the present one ends in seconds.

        Raises UserError where the authority's key is not, or while another rotation is under way.
        """
        node, held = self._node, self._membership
        if node.identity.authority is None:
            names = " or ".join(map(node.name_of, node.replica.roster.holders()))
            raise UserError(
                "this Mac does not hold the cluster's authority; run this command on "
                f"{names or 'the Mac that founded the cluster'}"
            )
        if held.former and not at_once:
            raise UserError(
                f"the authority is being rotated: the former one ends on {day(ends_at(held))}, or once all "
                "members have moved; `mlxtp cluster members` shows which have. --at-once ends it now"
            )
        clock = node.peer_info.clock
        self._follow(self._store.rotate(clock.now(), at_once=at_once))
        ends = "at once" if at_once else f"on {day(ends_at(self._membership))} at the latest"
        words = f"{node.name} made another authority for the cluster; the former one ends {ends}"
        about = {"by": node.name, "node_id": node.node_id, "at_once": at_once}
        audit.record("authority_rotated", words, about)
        await asyncio.gather(*(self._hand_over(each) for each in self._others_that_hold()))
        self._tell(self._change())

    def _others_that_hold(self) -> list[str]:
        holders = self._node.links.nodes().intersection(self._node.replica.roster.holders())
        return sorted(holders)

    async def _hand_over(self, node_id: str) -> None:
        """Have another holder follow, and hand it the key. Its next report repeats what failed."""
        try:
            self._node.links.send(node_id, self._change())
            await self._keeping.hand_over(node_id)
        except MlxtpError as error:
            log.warning("%s", error.detail)

    # --- every member

    def who_moved(self) -> dict[str, object]:
        """Return the state of a rotation: the names of members that moved, and of those that have not yet.

        `until` is the day on which the former authority ends; empty without a rotation under way. `away` are
        the members without a link to this Mac.
        """
        node, held = self._node, self._membership
        until = day(ends_at(held)) if held.former else ""
        members, here = node.replica.roster.members(), node.links.nodes() | {node.node_id}
        moved = [node.name_of(each) for each in members if self._has_moved(each)]
        to_come = [node.name_of(each) for each in members if until and not self._has_moved(each)]
        away = [node.name_of(each) for each in members if each not in here]
        return {"until": until, "moved": moved, "to_come": to_come, "away": away}

    def _has_moved(self, node_id: str) -> bool:
        if node_id == self._node.node_id:
            return self._membership.moved
        return self._moved.get(node_id) == self._membership.authority

    def _change(self) -> AuthorityChange:
        held, holds = self._membership, self._node.identity.authority is not None
        past = tuple(each.hex() for each in held.past)
        return AuthorityChange(held.authority, held.cross, past, held.moved, holds, holds and not held.former)

    def _greet(self, link: ControlLink) -> None:
        if self._membership.cross:
            self._tell(self._change(), link.node_id)

    def _tell(self, change: AuthorityChange, *nodes: str) -> None:
        """Report to these nodes, or to all. A holder that waits for the key reports to holders alone."""
        node = self._node
        holders = node.replica.roster.holders()
        waits = node.node_id in holders and not change.holds
        for node_id in nodes or node.links.nodes():
            if not waits or node_id in holders:
                with contextlib.suppress(MlxtpError):  # it has just gone
                    node.links.send(node_id, change)
        if not nodes:
            self._told = change

    def _reported(self, link: ControlLink, told: AuthorityChange) -> None:
        held = self._membership
        self._moved[link.node_id] = told.authority if told.moved else b""
        fresh = followed(held, told.authority, told.cross, tuple(map(bytes.fromhex, told.past)))
        if fresh is not None:
            identity = self._written(lambda: self._store.save_membership(fresh))
            self._unsaved = (link, told) if identity is None else None
            if identity is None:
                return
            self._follow(identity)
            if fresh.authority != held.authority:
                name = self._node.name_of(link.node_id)
                words = f"the cluster has another authority: {name} reported it"
                audit.record("authority_changed", words, {"by": name, "node_id": link.node_id})
        elif told.authority != held.authority:
            if held.cross:
                self._answer(link.node_id, self._change())
            return
        is_holder = link.node_id in self._node.replica.roster.holders()
        if told.ended and is_holder and told.authority == self._membership.authority:
            self._over = True
        if is_holder and not told.holds and self._node.identity.authority is not None:
            self._work.start(self._hand_over(link.node_id), "handing over the authority's key")

    def _written(self, write: Callable[[], Identity]) -> Identity | None:
        """Return the identity that `write` kept; None where files cannot be written, as on a full disk."""
        try:
            identity = write()
        except ConfigError as error:
            if error.detail != self._problem:
                log.warning("%s; the rotation of the authority waits for that here", error.detail)
            self._problem = error.detail
            return None
        self._problem = ""
        return identity

    def _answer(self, node_id: str, change: AuthorityChange) -> None:
        """Report to a Mac that is behind, or chose another authority; once, because it may do the same."""
        if self._answered.get(node_id) != change:
            self._answered[node_id] = change
            self._tell(change, node_id)

    def _follow(self, identity: Identity) -> None:
        before = self._membership.authority
        self._renewal.hold(identity)
        if self._membership.authority != before:
            self._began, self._over = time.monotonic(), False

    def _is_news(self) -> bool:
        held = self._membership
        return bool(held.former or self._unsaved or (held.cross and self._told is None))

    def _watch(self, _now: float) -> None:
        if self._unsaved is not None:
            self._reported(*self._unsaved)
        if self._membership.former and self._membership.moved and self._is_over():
            identity = self._written(self._store.end_former)
            if identity is not None:
                self._renewal.hold(identity)
                words = "the former authority of the cluster has ended, and its certificates with it"
                audit.record("authority_ended", words, {})
        if (change := self._change()) != self._told:
            self._tell(change)

    def _is_over(self) -> bool:
        """Return True when the former authority ends now. This Mac's own clock alone ends nothing."""
        node, held = self._node, self._membership
        holds, members = node.identity.authority is not None, node.replica.roster.members()
        if self._over or (holds and all(map(self._has_moved, members))):
            return True
        if is_at_once(held):
            here = node.links.nodes().intersection(members)
            waited = time.monotonic() - self._began >= MOVE_S
            return holds and (waited or all(map(self._has_moved, here)))
        clock = node.peer_info.clock
        return clock.now() >= ends_at(held) and (bool(clock.ahead) or len(members) == 1)

    async def close(self) -> None:
        """Stop handing over."""
        await self._work.close()
