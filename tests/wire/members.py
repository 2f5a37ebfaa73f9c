"""Members of clusters to test with: real keys, certificates and files."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from mlxtp.identity.store import Identity, Store
from mlxtp.wire.certificates import Authority, MemberCertificates
from mlxtp.wire.tls import Credentials


@dataclass(frozen=True)
class Member:
    """One Mac in a home of its own."""

    store: Store
    identity: Identity

    @property
    def credentials(self) -> Credentials:
        return self.store.credentials

    @property
    def membership(self) -> MemberCertificates:
        assert self.identity.membership is not None
        return self.identity.membership

    @property
    def authority(self) -> Authority:
        assert self.identity.authority is not None
        return self.identity.authority


def founder(folder: Path) -> Member:
    """The first Mac of a new cluster."""
    store = Store(folder / secrets.token_hex(4))
    return Member(store, store.found_cluster())


def member_of(first: Member, folder: Path) -> Member:
    """Another Mac of the cluster that `first` founded."""
    store = Store(folder / secrets.token_hex(4))
    identity = store.load_or_create()
    certificate = first.authority.certify(identity.node_id, identity.key.public_key())
    return Member(store, store.save_membership(MemberCertificates(certificate, first.authority.certificate)))
