"""Identity of this Mac, kept in the folder `identity` of its home.

    node_id         32 hex digits, drawn once
    node.key        private key of this Mac (PEM)
    member.pem      certificates of this Mac and of its cluster's authority, if it is a member
    authority.pem   certificate and private key of the authority, on Macs that hold it; at first the founder
    next.key        while this Mac leaves: the private key that will replace node.key

All are closed to other users. `load` refuses files that are not, or that do not belong together.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from ..errors import ConfigError, MlxtpError, ProtocolError, UserError, in_words
from ..wire.certificates import (
    Authority,
    MemberCertificates,
    PrivateKey,
    authority_of,
    certificates_from_pem,
    certificates_to_pem,
    check_node,
    fingerprint,
    found,
    key_from_pem,
    key_to_pem,
    new_key,
)
from ..wire.peer_messages import NODE_ID_BYTES
from ..wire.tls import Credentials
from .private_files import check_private_folder, make_private_folder, read_private, sync_folder, write_private

CLUSTER_ID_BYTES = 8
FOLDER = "identity"
NODE_ID = "node_id"
NODE_KEY = "node.key"
MEMBER = "member.pem"
AUTHORITY = "authority.pem"
NEXT_KEY = "next.key"

_RESTORE = "restore the whole folder from one backup"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of this Mac. With an `authority` it can let others in."""

    node_id: str
    key: PrivateKey = field(repr=False)
    membership: MemberCertificates | None = None
    authority: Authority | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the public key, 64 hex digits."""
        return fingerprint(self.key.public_key())

    @property
    def member(self) -> MemberCertificates:
        assert self.membership is not None
        return self.membership

    @property
    def cluster_id(self) -> str:
        """Cluster id, 16 hex digits; "" without a cluster."""
        return self.membership.cluster_id if self.membership else ""


class Store:
    """Identity of one home, changed by one process at a time."""

    def __init__(self, home: Path) -> None:
        self.folder = home / FOLDER

    @property
    def credentials(self) -> Credentials:
        return Credentials.of(self.folder)

    def load_or_create(self) -> Identity:
        if not self.folder.exists():
            self._create()
        self._finish_leaving()
        return self.load()

    def load(self) -> Identity:
        """Load the identity. Raises ConfigError with a remedy for open files, or if they do not match."""
        check_private_folder(self.folder)
        node_id = self._node_id()
        key = self._parsed(NODE_KEY, key_from_pem)
        if key is None:
            self._refuse(f"{NODE_KEY} is missing")
        membership, authority = self._parsed(MEMBER, MemberCertificates.from_pem), self._authority()
        if membership is not None:
            if wrong := _why_not(node_id, key, membership):
                self._refuse(f"{MEMBER} cannot be used: {wrong}")
            if authority is not None and authority.certificate != membership.authority:
                self._refuse(f"{AUTHORITY} is of another cluster than {MEMBER}")
        return Identity(node_id, key, membership, authority)

    def found_cluster(self) -> Identity:
        """Make this Mac the first of a cluster, or finish doing so. Raises UserError if it is in one."""
        identity = self._without_cluster()
        authority = identity.authority
        if authority is None:
            authority = found(secrets.token_hex(CLUSTER_ID_BYTES), new_key())
            self._write_authority(authority)
        certificate = authority.certify(identity.node_id, identity.key.public_key())
        self._write_membership(MemberCertificates(certificate, authority.certificate))
        return self.load()

    def save_membership(self, membership: MemberCertificates) -> Identity:
        """Become a member. Raises UserError in a cluster, or for another node's certificate or key."""
        identity = self._without_cluster()
        if wrong := _why_not(identity.node_id, identity.key, membership):
            raise UserError(f"this Mac cannot become a member with this certificate: {wrong}")
        authority = self._authority()
        if authority is not None and authority.certificate != membership.authority:
            (self.folder / AUTHORITY).unlink()  # left by an interrupted founding
        self._write_membership(membership)
        return self.load()

    def save_authority(self, authority: Authority) -> Identity:
        """Keep an authority handed over by another Mac. Raises UserError if it is another cluster's."""
        identity = self.load()
        if identity.membership is None or authority.certificate != identity.membership.authority:
            raise UserError("this is the authority of another cluster")
        self._write_authority(authority)
        return self.load()

    def drop_authority(self) -> Identity:
        (self.folder / AUTHORITY).unlink(missing_ok=True)
        sync_folder(self.folder)
        return self.load()

    def leave(self) -> Identity:
        """Forget the cluster, and replace the key, which is void there. The node id stays. Raises OSError."""
        # If interrupted before the membership is gone, this has no effect; later, the next start finishes it.
        write_private(self.folder / NEXT_KEY, key_to_pem(new_key()))
        (self.folder / MEMBER).unlink(missing_ok=True)
        sync_folder(self.folder)
        self._finish_leaving()
        return self.load()

    def _without_cluster(self) -> Identity:
        identity = self.load_or_create()
        if identity.membership is not None:
            raise UserError(
                f"this Mac is a member of cluster {identity.cluster_id}; `mlxtp cluster leave` ends that"
            )
        return identity

    def _finish_leaving(self) -> None:
        following = self.folder / NEXT_KEY
        if not following.exists():
            return
        if (self.folder / MEMBER).exists():
            following.unlink()
            return
        (self.folder / AUTHORITY).unlink(missing_ok=True)
        sync_folder(self.folder)
        following.replace(self.folder / NODE_KEY)
        sync_folder(self.folder)

    def _create(self) -> None:
        """Create the identity under another name first, so that there is never half of one."""
        fresh = self.folder.with_name(f".{FOLDER}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        make_private_folder(fresh)
        write_private(fresh / NODE_ID, f"{secrets.token_hex(NODE_ID_BYTES)}\n".encode())
        write_private(fresh / NODE_KEY, key_to_pem(new_key()))
        with in_words(ConfigError, f"{self.folder} cannot be made"):
            fresh.rename(self.folder)
            sync_folder(self.folder.parent)

    def _write_membership(self, membership: MemberCertificates) -> None:
        write_private(self.folder / MEMBER, membership.to_pem())

    def _write_authority(self, authority: Authority) -> None:
        pem = certificates_to_pem(authority.certificate) + key_to_pem(authority.key)
        write_private(self.folder / AUTHORITY, pem)

    def _node_id(self) -> str:
        data = read_private(self.folder / NODE_ID)
        if data is None:
            self._refuse(f"{NODE_ID} is missing")
        try:
            node_id = data.decode("ascii").strip()
            if len(bytes.fromhex(node_id)) != NODE_ID_BYTES or node_id != node_id.lower():
                raise ValueError
        except ValueError:
            self._refuse(f"{NODE_ID} does not hold {2 * NODE_ID_BYTES} hex digits")
        return node_id

    def _authority(self) -> Authority | None:
        certificates = self._parsed(AUTHORITY, certificates_from_pem)
        key = self._parsed(AUTHORITY, key_from_pem)
        if certificates is None or key is None:
            return None
        try:
            return authority_of(certificates[0], key)
        except ProtocolError:
            self._refuse(f"the certificate and the key in {AUTHORITY} do not belong together")

    def _parsed(self, name: str, parse: Callable[[bytes], T]) -> T | None:
        data = read_private(self.folder / name)
        if data is None:
            return None
        try:
            return parse(data)
        except ValueError as error:
            self._refuse(f"{name} cannot be used: {error}")

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"{self.folder}: {what}. Either {_RESTORE}, or remove the folder and join again as a new node "
            f"(`mlxtp node --join TOKEN`)"
        )


def _why_not(node_id: str, key: PrivateKey, membership: MemberCertificates) -> str:
    try:
        node = check_node(membership.certificate, membership.authority)
    except MlxtpError as error:
        return error.detail
    if node.node_id != node_id:
        return f"its certificate is for node {node.node_id}, and this is node {node_id}"
    if node.fingerprint != fingerprint(key.public_key()):
        return f"its certificate is for another key than that in {NODE_KEY}"
    return ""
