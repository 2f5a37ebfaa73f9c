"""The control port: it accepts members and joiners. Join tokens, which any Mac requests.

Macs that hold the authority's key issue them. Each keeps its own in memory: a joiner has to reach that Mac.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import zip_longest

from .. import audit
from ..discovery.addresses import host_and_port
from ..discovery.mdns import addresses_up
from ..errors import ConfigError, LinkError, MlxtpError, UserError
from ..identity.join_network import answer_joiner
from ..identity.join_protocol import Host, TokenIssuer, read_token, redirect, token_name
from ..wire.blocking import listen
from ..wire.certificates import NodeIdentity, authority_hash
from ..wire.cluster_messages import TokenIssued, TokenWanted
from ..wire.peer_messages import MAX_ADDRESS, MAX_ADDRESSES, MAX_PEERS, NONCE_BYTES, JoinOffer
from ..wire.streams import TlsAcceptor
from ..wire.tls import ALPN_CONTROL, ALPN_REQUESTS, Credentials, Peer, member_context_server
from .links import ControlLink
from .node import ClusterNode

ANSWER_S = 5.0
SECRET_BYTES = 16
UNKNOWN = "the Mac that founded this cluster"  #: The holder of the authority, before a roster has come.


class TokenIssuing:
    """Requests join tokens, and issues them by `issuer` where the authority's key is."""

    def __init__(self, node: ClusterNode) -> None:
        membership = node.identity.member
        self.issuer = TokenIssuer(membership.cluster_id, authority_hash(membership.authority))
        self._node = node
        # Tokens that removed members requested are void.
        node.enrolment.on_change(lambda: self.issuer.keep(node.replica.roster.members()))
        node.links.on(self._issue, TokenWanted)

    async def token(self) -> str:
        """Return a new join token, from a Mac that can issue one. Raises UserError when none can now."""
        node = self._node
        if node.identity.authority is not None:
            return self._made("")
        roster, names = node.replica.roster, _names(node, node.replica.roster.holders())
        if roster.orphaned:
            raise UserError(
                "no Mac that holds this cluster's authority belongs to it any longer, so no Mac can join it; "
                "found a new cluster"
            )
        refusal = UserError(
            f"only {names or UNKNOWN} can issue join tokens, but is out of reach; start it, or run this "
            "command there"
        )
        for holder in roster.holders():
            if holder in node.links.nodes():
                try:
                    return await self._asked(holder)
                except UserError as error:
                    refusal = error
        raise refusal

    async def _asked(self, holder: str) -> str:
        wanted = TokenWanted(secrets.token_bytes(16))
        try:
            issued = await self._node.links.ask(holder, wanted, TokenIssued, ANSWER_S)
        except LinkError:
            raise UserError(f"{self._node.name_of(holder)} did not reply; try again") from None
        if not issued.token:
            raise UserError(issued.problem)
        return self._checked(issued.token, holder)

    def _checked(self, text: str, holder: str) -> str:
        membership = self._node.identity.member
        with contextlib.suppress(ConfigError):
            token = read_token(text)
            ours = (membership.cluster_id, authority_hash(membership.authority))
            if (token.cluster_id, token.authority_hash) == ours:
                return token.text()
        name = self._node.name_of(holder)
        raise UserError(
            f"{name} replied with something else than a join token of this cluster; do not trust that Mac"
        )

    def _made(self, asked_by: str) -> str:
        """Return a new token, which the member `asked_by` requested, or this one. Raises UserError."""
        node, member = self._node, asked_by or self._node.node_id
        fresh, now = secrets.token_bytes(SECRET_BYTES), time.monotonic()
        token = self.issuer.issue(fresh, now, member, own=not asked_by)
        about = {"token": token_name(token.id), "member": node.name_of(member), "node_id": member}
        about |= {"by": about["member"]} if asked_by else {}
        audit.record("token_made", f"join token {about['token']} is made for {about['member']}", about)
        return token.text()

    def _issue(self, link: ControlLink, wanted: TokenWanted) -> None:
        token, problem = "", "this Mac cannot issue join tokens"
        if self._node.identity.authority is not None:
            try:
                token, problem = self._made(link.node_id), ""
            except UserError as error:
                problem = error.detail
        with contextlib.suppress(MlxtpError):
            self._node.links.send(link.node_id, TokenIssued(wanted.nonce, token, problem))


# --- the port --------------------------------------------------------------------------------------------

#: Serves the requests link of a member until it ends.
ServeRequests = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def bind_control(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"--control {host}:{port}: no interface of this Mac has this address; it has "
                f"{', '.join(addresses_up())}. If its cable is plugged in later, restart mlxtp then"
            ) from None
        raise ConfigError(
            f"--control {host}:{port} cannot be used: {error.strerror}. Another mlxtp node may run here; "
            f"give each its own --control ADDRESS:PORT"
        ) from None


class ControlPort:
    """Accepts control and requests links from members. Admits joiners where the authority's key is."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        node: ClusterNode,
        tokens: TokenIssuing,
        serve_requests: ServeRequests,
    ) -> None:
        self._node = node
        self._tokens = tokens
        self._serve_requests = serve_requests
        self._requests: dict[asyncio.StreamWriter, NodeIdentity] = {}
        node.enrolment.on_change(lambda: self._cut(self._is_removed))
        # No client reads the replies to a node that vanished.
        node.links.on_lost(lambda node_id, _: self._cut(lambda identity: identity.node_id == node_id))
        self._acceptor = TlsAcceptor(
            sock,
            member_context_server(credentials),
            self._welcome,
            belongs=lambda identity: not self._is_removed(identity),
        )

    async def run(self) -> None:
        await self._acceptor.run()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer) -> None:
        if peer.identity is None:
            await self._join(reader, writer, peer.address)
        elif peer.alpn == ALPN_CONTROL:
            await self._node.links.called(reader, writer, peer.identity)
        elif peer.alpn == ALPN_REQUESTS and self._may_ask(peer.identity):
            self._requests[writer] = peer.identity
            try:
                await self._serve_requests(reader, writer)
            finally:
                del self._requests[writer]

    def _is_removed(self, identity: NodeIdentity) -> bool:
        return self._node.replica.roster.removed(identity.fingerprint)

    def _may_ask(self, identity: NodeIdentity) -> bool:
        """Return True when a member may send requests. Only a control link shows that a member vanished."""
        return not self._is_removed(identity) and self._node.links.linked(identity)

    def _cut(self, whose: Callable[[NodeIdentity], bool]) -> None:
        for writer, identity in self._requests.items():
            if whose(identity):
                writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, at: str) -> None:
        try:
            admitted = await answer_joiner(reader, writer, self._offer(at), time.monotonic)
        except MlxtpError as error:
            words = f"a Mac at {at} failed to join: {error.detail}"
            audit.record("join_refused", words, {"address": at}, foreign=True)
            return
        if admitted is not None:
            who = (admitted.node_id, admitted.name, admitted.fingerprint)
            with contextlib.suppress(MlxtpError):
                self._node.enrolment.admit(*who, by=admitted.by, address=at, token=admitted.token)

    def _offer(self, joiner_at: str) -> Host | JoinOffer:
        node, nonce = self._node, secrets.token_bytes(NONCE_BYTES)
        authority, membership = node.identity.authority, node.identity.member
        names, at = self._other_holders()
        if authority is None:
            return redirect(membership.authority, nonce, names or UNKNOWN, at)
        members = {node_id: entry.fingerprint for node_id, entry in node.replica.roster.members().items()}
        peers = tuple(address for each in members for address in _sendable(node, each))
        return Host(
            authority,
            membership.certificate,
            self._tokens.issuer,
            nonce,
            members=members,
            peers=(*node.introduction.addresses(), *peers)[:MAX_PEERS],
            address=joiner_at,
            others=(names, at),
        )

    def _other_holders(self) -> tuple[str, tuple[str, ...]]:
        """Return the names of the other Macs that issue tokens, and addresses: of each, the nearest first."""
        node, found = self._node, []
        holders = [each for each in node.replica.roster.holders() if each != node.node_id]
        for holder in sorted(holders, key=lambda each: each not in node.links.nodes()):
            link = node.links.to(holder)
            near = link.remote if link is not None else ""
            addresses = _sendable(node, holder)
            found.append(sorted(addresses, key=lambda address: not address.startswith(f"{near}:")))
        at = [each for row in zip_longest(*found) for each in row if each is not None]
        return _names(node, holders), tuple(at[:MAX_ADDRESSES])


def _names(node: ClusterNode, node_ids: Iterable[str]) -> str:
    return " or ".join(map(node.name_of, node_ids))


def _sendable(node: ClusterNode, node_id: str) -> tuple[str, ...]:
    """Return the addresses of a node that fit into an offer. An invalid one must not keep joiners out."""
    addresses = node.peer_info.addresses.get(node_id, ())
    return tuple(each for each in addresses if len(each) <= MAX_ADDRESS and host_and_port(each))
