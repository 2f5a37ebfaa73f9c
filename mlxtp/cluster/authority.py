"""Hand-over of the cluster's authority: of the key that lets a Mac admit and remove any member.

`Roster.holders` names the holders, by statements that the authority signed. The key passes directly between
two members, over their control link (TLS 1.3, both sides certified), and in no other message.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace

from .. import audit
from ..errors import ConfigError, LinkError, MlxtpError, UserError
from ..identity.store import Store
from ..wire.certificates import Authority, authority_of, key_from_pem, key_to_pem
from ..wire.cluster_messages import AuthorityHandover, AuthorityKept
from .links import ControlLink
from .node import ClusterNode

HAND_OVER_S = 10.0  #: seconds for the other Mac to flush the key to its disk and reply


def _check_holder(node: ClusterNode) -> None:
    if node.identity.authority is None:
        names = " or ".join(map(node.name_of, node.replica.roster.holders()))
        raise UserError(
            "this Mac does not hold the cluster's authority; run this command on "
            f"{names or 'the Mac that founded the cluster'}"
        )


class AuthorityKeeping:
    """Hands the authority's key to other members, and takes it from holders, into `store`."""

    def __init__(self, node: ClusterNode, store: Store) -> None:
        self._node = node
        self._store = store
        node.links.on(self._handed, AuthorityHandover)

    def check_hand_over(self, node_id: str) -> None:
        node = self._node
        _check_holder(node)
        if node_id not in node.links.nodes():
            raise UserError(f"{node.name_of(node_id)} is away; the key passes only between two Macs that run")

    async def hand_over(self, node_id: str) -> None:
        """Hand the key to a member. Returns once it is on that Mac's disk. Raises UserError."""
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
        """Forget the key here, after `hand_over` to another Mac. Raises UserError if its file cannot be
        removed: this Mac then still holds it.
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
        if link.node_id not in self._node.replica.roster.holders():
            raise UserError("that Mac does not hold it, as far as this one knows")
        try:
            key = key_from_pem(handed.key)
        except ValueError as error:
            raise UserError(str(error)) from None
        return authority_of(handed.certificate, key)

    def _hold(self, authority: Authority | None) -> None:
        node = self._node
        node.identity = replace(node.identity, authority=authority)
        node.enrolment.hold(node.identity)
