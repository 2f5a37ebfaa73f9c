"""Renewal of certificates over control links: members request it, Macs with the authority's key grant it.

Key and node id stay, links stay open. Only a key on the list of members gets another certificate.
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
from ..errors import MlxtpError, ProtocolError
from ..identity.store import Identity, Store
from ..identity.validity import CERTIFICATE_S, day, is_due
from ..wire.certificates import (
    MemberCertificates,
    PublicKey,
    fingerprint,
    key_at,
    point_of,
    read_node,
)
from ..wire.cluster_messages import CertificateIssued, CertificateWanted
from .links import ControlLink
from .node import ClusterNode

log = logging.getLogger(__name__)

LOOK_S = 60.0  #: Seconds between two looks at this Mac's certificate.
AGAIN_S = 3600.0  #: Seconds until the next try after a renewal that left the certificate due.
ANSWER_S = 5.0


class Renewal:
    """Keeps this Mac's certificate valid, and renews those of others where the authority's key is."""

    def __init__(self, node: ClusterNode, store: Store) -> None:
        self._node = node
        self._store = store
        self._on_renewed: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._rest_until = 0.0
        node.links.on(self._wanted, CertificateWanted)
        node.links.on_up(lambda _link: self._wake.set())

    def on_renewed(self, handler: Callable[[], None]) -> None:
        """Have `handler` called once other certificates are in the files that TLS reads."""
        self._on_renewed.append(handler)

    def hold(self, identity: Identity) -> None:
        """Go on with other certificates of this Mac, which are in its files."""
        self._node.identity = identity
        self._node.enrolment.renewed(identity)
        self._rest_until = 0.0
        self._wake.set()
        for handler in self._on_renewed:
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
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()

    def _is_due(self) -> bool:
        return is_due(self._ends(), self._node.peer_info.clock.now()) or not self._membership.moved

    @property
    def _membership(self) -> MemberCertificates:
        membership = self._node.identity.membership
        assert membership is not None
        return membership

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
        """Return another certificate for a member. Raises ProtocolError with the reason to refuse."""
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
        certificate, name = self._certified(link.node_id, key), node.name_of(link.node_id)
        words = f"{node.name} renews the certificate of {name}"
        about = {"member": name, "node_id": link.node_id, "address": link.remote, "by": node.name}
        audit.record("certificate_renewed", words, about)
        return certificate

    def _certified(self, node_id: str, key: PublicKey) -> bytes:
        authority = self._node.identity.authority
        if authority is None:
            raise ProtocolError(f"{self._node.name} does not hold the authority's key")
        return authority.certify(node_id, key, self._node.peer_info.clock.now(), CERTIFICATE_S)
