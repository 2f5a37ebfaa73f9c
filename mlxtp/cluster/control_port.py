"""The control port: it accepts members and joiners."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import time
from collections.abc import Callable

from ..discovery.addresses import host_and_port
from ..discovery.mdns import addresses_up
from ..errors import ConfigError, MlxtpError
from ..gateway.remote_backend import serve_requests
from ..identity.join_network import answer_joiner
from ..identity.join_protocol import Host, redirect
from ..identity.join_token import TokenIssuer
from ..identity.store import Identity, Store
from ..wire.blocking import listen
from ..wire.certificates import NodeIdentity, authority_hash
from ..wire.peer_messages import MAX_ADDRESS, MAX_ADDRESSES, MAX_PEERS, NONCE_BYTES, JoinOffer
from ..wire.tls import ALPN_CONTROL, ALPN_REQUESTS, Peer, member_context_server
from ..wire.tls_acceptor import TlsAcceptor
from .node import NodeLoop

log = logging.getLogger(__name__)

SECRET_BYTES = 16


def check_interface(address: str) -> None:
    """Raise ConfigError when no interface of this Mac has the `address` that --interface names."""
    if not address:
        return
    with socket.socket() as sock:
        try:
            sock.bind((address, 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise ConfigError(f"--interface {address} cannot be used: {error.strerror}") from None
            raise ConfigError(
                f"--interface {address}: no interface of this Mac has this address; it has "
                f"{', '.join(addresses_up())}. If its cable is plugged in later, restart mlxtp then"
            ) from None


def bind_control(host: str, port: int) -> socket.socket:
    """Return the listening socket of the control port. Raises ConfigError when it cannot be opened."""
    try:
        return listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"--control {host}:{port}: this Mac does not have this address") from None
        raise ConfigError(
            f"--control {host}:{port} cannot be used: {error.strerror}. Another mlxtp node may run here; "
            f"give each its own --control ADDRESS:PORT"
        ) from None


class ControlPort:
    """Accepts control and requests links from members. Admits joiners where the authority's key is."""

    def __init__(self, sock: socket.socket, store: Store, identity: Identity, cluster: NodeLoop) -> None:
        self._identity = identity
        self._cluster = cluster
        assert identity.membership is not None
        self._membership = identity.membership
        self._issuer: TokenIssuer | None = None
        if identity.authority is not None:
            self._issuer = TokenIssuer(identity.cluster_id, authority_hash(identity.membership.authority))
            cluster.token_issuing.issuer = self.token
        self._requests: dict[asyncio.StreamWriter, NodeIdentity] = {}
        cluster.on_roster = self._cut_removed
        cluster.on_gone = self._cut_gone
        self._acceptor = TlsAcceptor(
            sock,
            member_context_server(store.credentials),
            self._welcome,
            belongs=lambda identity: not self._is_removed(identity),
        )

    def token(self, asked_by: str = "") -> str:
        """Return a new join token. `asked_by` is the member that requested it; empty for this one.

        Raises UserError when too many tokens are open.
        """
        assert self._issuer is not None
        asked_by = asked_by or self._identity.node_id
        return self._issuer.issue(secrets.token_bytes(SECRET_BYTES), time.monotonic(), asked_by).text()

    async def run(self) -> None:
        """Run until cancelled."""
        await self._acceptor.run()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer) -> None:
        if peer.identity is None:
            await self._join(reader, writer, peer.address)
        elif peer.alpn == ALPN_CONTROL:
            await self._cluster.links.called(reader, writer, peer.identity)
        elif peer.alpn == ALPN_REQUESTS and self._may_ask(peer.identity):
            self._requests[writer] = peer.identity
            try:
                await serve_requests(reader, writer, self._cluster.supervisor.gateway)
            finally:
                del self._requests[writer]

    def _is_removed(self, identity: NodeIdentity) -> bool:
        return self._cluster.leadership.roster.removed(identity.fingerprint)

    def _may_ask(self, identity: NodeIdentity) -> bool:
        """Return True when a member may send requests. Only a control link shows that a member vanished."""
        return not self._is_removed(identity) and identity.node_id in self._cluster.links.nodes()

    def _cut_removed(self) -> None:
        """End the requests of a removed node, and void the tokens that it requested."""
        self._cut(self._is_removed)
        if self._issuer is not None:
            self._issuer.keep(self._cluster.leadership.roster.members())

    def _cut_gone(self, node_id: str) -> None:
        """End the requests of a node that vanished: no client reads the replies."""
        self._cut(lambda identity: identity.node_id == node_id)

    def _cut(self, whose: Callable[[NodeIdentity], bool]) -> None:
        """Abort requests links, which cancels the requests that came over them."""
        for writer, identity in self._requests.items():
            if whose(identity):
                writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, at: str) -> None:
        try:
            admitted = await answer_joiner(reader, writer, self._offer(at), time.monotonic)
        except MlxtpError as error:
            log.info("a Mac failed to join: %s", error.detail)
            return
        if admitted is not None:
            with contextlib.suppress(MlxtpError):
                self._cluster.admit(
                    admitted.node_id, admitted.name, admitted.fingerprint, by=admitted.by, address=at
                )

    def _offer(self, joiner_at: str) -> Host | JoinOffer:
        cluster, nonce = self._cluster, secrets.token_bytes(NONCE_BYTES)
        authority = self._identity.authority
        if authority is None or self._issuer is None:
            founder = cluster.peer_info.authority
            link = cluster.links.to(founder)
            near = link.remote if link is not None else ""
            at = sorted(_sendable(cluster, founder), key=lambda address: not address.startswith(f"{near}:"))
            name = cluster.name_of(founder) if founder else "the Mac that founded this cluster"
            return redirect(self._membership.authority, nonce, name, tuple(at[:MAX_ADDRESSES]))
        members = {
            node_id: entry.fingerprint for node_id, entry in cluster.leadership.roster.members().items()
        }
        peers = tuple(address for node in members for address in _sendable(cluster, node))
        return Host(
            authority,
            self._membership.certificate,
            self._issuer,
            nonce,
            members=members,
            peers=(*cluster.addresses, *peers)[:MAX_PEERS],
            address=joiner_at,
        )


def _sendable(cluster: NodeLoop, node_id: str) -> tuple[str, ...]:
    """Return the addresses of a node that fit into an offer. An invalid one must not keep joiners out."""
    addresses = cluster.peer_info.addresses.get(node_id, ())
    return tuple(each for each in addresses if len(each) <= MAX_ADDRESS and host_and_port(each))
