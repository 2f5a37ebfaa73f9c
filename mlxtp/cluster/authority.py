"""The cluster's authority: the Macs that hold its key, the certificates that they renew, and its rotation.

A holder can let Macs in, remove each one, and make members. `Roster.holders` names the holders by statements
that the authority signed, which the members exchange like admissions. The key passes directly between two
members, over their control link (TLS 1.3, both sides certified), and in no other message.

A renewal leaves key, node id and links as they are. Only a key on the list of members gets another
certificate. In a rotation, one holder makes the next key. Other holders present get it before any member
hears of it. Members follow (`identity/validity.py`), request certificates of the next authority, and trust
the former one until a holder reports that all have moved, or its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from .. import audit
from ..background import Background
from ..errors import ConfigError, LinkError, MlxtpError, ProtocolError, UserError
from ..identity.store import Identity, Store
from ..identity.validity import CERTIFICATE_S, DAY_S, day, ends_at, followed, is_at_once, is_due
from ..wire.certificates import (
    Authority,
    MemberCertificates,
    PublicKey,
    authority_of,
    fingerprint,
    key_at,
    key_from_pem,
    key_id,
    key_to_pem,
    point_of,
    read_node,
)
from ..wire.cluster_messages import (
    AuthorityChange,
    AuthorityHandover,
    AuthorityKept,
    CertificateIssued,
    CertificateWanted,
)
from .links import ControlLink, Handlers
from .node import ClusterNode

log = logging.getLogger(__name__)


# --- holders --------------------------------------------------------------------------------------------

HAND_OVER_S = 10.0  #: seconds for the other Mac's reply; its disk flushes a file of 1 KB meanwhile


def _check_holder(node: ClusterNode) -> None:
    if node.identity.authority is None:
        names = " or ".join(map(node.name_of, node.replica.roster.holders()))
        raise UserError(
            "this Mac does not hold the cluster's authority; run this command on "
            f"{names or 'the Mac that founded the cluster'}"
        )


class AuthorityKeeping:
    """Hands the authority's key to other members, and takes it from holders. `store` has this Mac's own."""

    def __init__(self, node: ClusterNode, store: Store) -> None:
        self._node = node
        self._store = store
        node.links.on(self._handed, AuthorityHandover)

    def check_hand_over(self, node_id: str) -> None:
        """Raise UserError when this Mac cannot hand the key to a member now."""
        node = self._node
        _check_holder(node)
        if node_id not in node.links.nodes():
            raise UserError(f"{node.name_of(node_id)} is away; the key passes only between two Macs that run")

    async def hand_over(self, node_id: str) -> None:
        """Hand the authority's key to a member. Returns once it is on that Mac's disk.

        Raises UserError when it cannot be handed over, or that Mac does not confirm.
        """
        self.check_hand_over(node_id)
        node, authority = self._node, self._node.identity.authority
        assert authority is not None
        name = node.name_of(node_id)
        message = AuthorityHandover(secrets.token_bytes(16), authority.certificate, key_to_pem(authority.key))
        try:
            kept = await node.links.ask(node_id, message, AuthorityKept, HAND_OVER_S)
        except LinkError as error:
            raise UserError(
                f"{name} has not confirmed that it has the key: {error.detail}. `mlxtp cluster members` "
                "shows whether it holds the authority"
            ) from None
        about = {"member": name, "node_id": node_id}
        if kept.problem:
            words = f"{name} did not take the cluster's authority: {kept.problem}"
            audit.record("authority_refused", words, about)
            raise UserError(words)
        audit.record("authority_given", f"{name} holds the cluster's authority now", about)

    async def give_up(self) -> None:
        """Forget the key here. Only after `hand_over`, which shows that another Mac has it.

        Raises UserError when the file cannot be removed: then this Mac still holds it.
        """
        node, authority = self._node, self._node.identity.authority
        self._hold(None)
        await node.saved_elsewhere()
        try:
            self._store.drop_authority()
        except (OSError, ConfigError) as error:
            self._hold(authority)
            raise UserError(f"{self._store.folder}: the key could not be removed: {error}") from None
        audit.record("authority_given_up", "this Mac no longer holds the cluster's authority", {})

    def _handed(self, link: ControlLink, handed: AuthorityHandover) -> None:
        node, name = self._node, self._node.name_of(link.node_id)
        about = {"by": name, "node_id": link.node_id}
        try:
            authority = self._accepted(link, handed)
            self._store.save_authority(authority)
        except MlxtpError as error:
            problem = error.detail
            words = f"the cluster's authority was not taken from {name}: {problem}"
            audit.record("authority_refused", words, about, foreign=True)
        else:
            problem = ""
            audit.record("authority_taken", f"{name} handed the cluster's authority to this Mac", about)
            self._hold(authority)
        with contextlib.suppress(MlxtpError):
            node.links.send(link.node_id, AuthorityKept(handed.nonce, problem))

    def _accepted(self, link: ControlLink, handed: AuthorityHandover) -> Authority:
        """Return the authority in a message. Raises MlxtpError for one that this Mac must not keep."""
        if link.node_id not in self._node.replica.roster.holders():
            raise UserError("that Mac does not hold it, as far as this one knows")
        try:
            key = key_from_pem(handed.key)
        except ValueError as error:
            raise UserError(str(error)) from None
        return authority_of(handed.certificate, key)

    def _hold(self, authority: Authority | None) -> None:
        """Act as a Mac that has this key, or none, and state that to the other members."""
        node = self._node
        node.identity = replace(node.identity, authority=authority)
        node.enrolment.hold(node.identity)


# --- renewal --------------------------------------------------------------------------------------------

RENEWAL_LOOK_S = 60.0  #: Seconds between two looks at this Mac's certificate.
AGAIN_S = 3600.0  #: Seconds until the next try after a renewal that left the certificate due.
ANSWER_S = 5.0


class Renewal:
    """Keeps this Mac's certificate valid, and renews those of others where the authority's key is."""

    def __init__(self, node: ClusterNode, store: Store) -> None:
        self._node = node
        self._store = store
        #: Called once other certificates are in the files that TLS reads.
        self.on_renewed = Handlers[Callable[[], None]]()
        self._wake = asyncio.Event()
        self._rest_until = 0.0
        #: By node id: the authority, a member's last certificate of it, and until when that is sent again.
        self._issued: dict[str, tuple[bytes, bytes, float]] = {}
        node.enrolment.on_gone(lambda node_id: self._issued.pop(node_id, None))
        node.links.on(self._wanted, CertificateWanted)
        node.links.on_up(lambda _link: self._wake.set())

    def hold(self, identity: Identity) -> None:
        """Go on with other certificates of this Mac, which are in its files."""
        self._node.identity = identity
        self._node.enrolment.renewed(identity)
        self._rest_until = 0.0
        self._wake.set()
        for handler in self.on_renewed:
            handler()

    async def run(self) -> None:
        """Renew this Mac's certificate whenever it is due, until cancelled."""
        while True:
            self._wake.clear()
            if time.monotonic() >= self._rest_until and self._is_due():
                try:
                    await self._renew()
                except MlxtpError as error:
                    log.warning("this Mac's certificate is not renewed yet: %s", error.detail)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEWAL_LOOK_S):
                    await self._wake.wait()

    def _is_due(self) -> bool:
        return is_due(self._ends(), self._node.peer_info.clock.now()) or not self._membership.moved

    @property
    def _membership(self) -> MemberCertificates:
        return self._node.identity.member

    def _ends(self) -> float:
        return read_node(self._membership.certificate).ends

    async def _renew(self) -> None:
        node, key = self._node, self._node.identity.key.public_key()
        if node.identity.authority is not None:
            self._keep(self._certified(node.node_id, key), node.node_id)
            return
        for holder in node.links.nodes().intersection(node.replica.roster.holders()):
            wanted = CertificateWanted(secrets.token_bytes(16), point_of(key))
            try:
                issued = await node.links.ask(holder, wanted, CertificateIssued, ANSWER_S)
                if issued.problem:
                    raise ProtocolError(issued.problem)
                self._keep(issued.certificate, holder)
            except MlxtpError as error:
                name = node.name_of(holder)
                log.warning("%s did not renew this Mac's certificate: %s", name, error.detail)
            else:
                return

    def _keep(self, certificate: bytes, holder: str) -> None:
        """Keep another certificate. Raises UserError for one that is not of this node, key and cluster.

        In no thread, so that no hand-over or rotation changes the identity meanwhile.
        """
        node = self._node
        fresh = replace(self._membership, certificate=certificate, bridge=b"")
        self.hold(self._store.save_membership(fresh))
        ends = self._ends()
        if self._is_due():
            self._rest_until = time.monotonic() + AGAIN_S
        by = node.name_of(holder)
        words = f"{by} renewed this Mac's certificate, which ends on {day(ends)} now"
        audit.record("certificate_renewed", words, {"member": node.name, "node_id": node.node_id, "by": by})

    # --- where the authority's key is

    def _wanted(self, link: ControlLink, wanted: CertificateWanted) -> None:
        certificate, problem = b"", ""
        try:
            certificate = self._granted(link, wanted)
        except MlxtpError as error:
            problem = error.detail
        with contextlib.suppress(MlxtpError):
            link.send(CertificateIssued(wanted.nonce, certificate, problem))

    def _granted(self, link: ControlLink, wanted: CertificateWanted) -> bytes:
        """Return another certificate for a member, at most one an hour, and only when its own is due.

        Raises ProtocolError with the reason to refuse.
        """
        node, roster = self._node, self._node.replica.roster
        try:
            key = key_at(wanted.public_key)
        except ValueError:
            raise ProtocolError("its key is not one on the curve P-256") from None
        if fingerprint(key) != link.fingerprint:
            raise ProtocolError("its key is not the one that it showed")
        entry = roster.members().get(link.node_id)
        if entry is None or entry.fingerprint != link.fingerprint or roster.removed(link.fingerprint):
            raise ProtocolError("its key is not on the list of members")
        authority, known = self._membership.authority, self._issued.get(link.node_id)
        if known is not None and known[0] == authority and time.monotonic() < known[2]:
            return known[1]
        now, shown = node.peer_info.clock.now(), link.identity
        early_or_late = is_due(shown.ends, now + DAY_S) or is_due(shown.ends, now - DAY_S)  # clocks differ
        if shown.signer == key_id(authority) and not early_or_late:
            raise ProtocolError(f"its certificate is not due: it ends on {day(shown.ends)}")
        certificate, name = self._certified(link.node_id, key), node.name_of(link.node_id)
        self._issued[link.node_id] = authority, certificate, time.monotonic() + AGAIN_S
        words = f"{node.name} renews the certificate of {name}"
        about = {"member": name, "node_id": link.node_id, "address": link.remote, "by": node.name}
        audit.record("certificate_renewed", words, about, foreign=True)
        return certificate

    def _certified(self, node_id: str, key: PublicKey) -> bytes:
        authority = self._node.identity.authority
        if authority is None:
            raise ProtocolError(f"{self._node.name} does not hold the authority's key")
        return authority.certify(node_id, key, self._node.peer_info.clock.now(), CERTIFICATE_S)


# --- rotation -------------------------------------------------------------------------------------------

ROTATION_LOOK_S = 1.0  #: Seconds between two looks at who has moved.
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
        node.enrolment.on_gone(
            lambda node_id: self._answered.pop(node_id, None), lambda node_id: self._moved.pop(node_id, None)
        )
        node.links.on_up(self._greet)
        node.rounds.every(ROTATION_LOOK_S, self._watch, needed=self._is_news)

    @property
    def _membership(self) -> MemberCertificates:
        return self._node.identity.member

    # --- the Mac that begins it

    async def rotate(self, *, at_once: bool) -> None:
        """Make the next authority, and have others follow it. With `at_once` the present one ends in seconds.

        Raises UserError where the authority's key is not, or while another rotation is under way.
        """
        node, held = self._node, self._membership
        _check_holder(node)
        if held.former and not at_once:
            raise UserError(
                f"the authority is being rotated: the former one ends on {day(ends_at(held))}, or once all "
                "members have moved; `mlxtp cluster members` shows which have. --at-once ends it now"
            )
        self._follow(self._store.rotate(node.peer_info.clock.now(), at_once=at_once))
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
