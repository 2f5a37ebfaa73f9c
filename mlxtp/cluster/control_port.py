"""The control port, which accepts members and joiners, the dialer of other Macs' ports, and join tokens.

A holder of the authority's key issues tokens, and keeps them in memory: the joiner must reach that Mac.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import zip_longest

from .. import audit
from ..background import Background
from ..discovery.addresses import MAX_KNOWN, Advert, DiscoveredPeer, explain, host_and_port
from ..discovery.mdns import Addresses, Discovery, addresses_up
from ..errors import Code, ConfigError, LinkError, MlxtpError, UserError
from ..identity.join_network import answer_joiner
from ..identity.join_protocol import Host, TokenIssuer, read_token, redirect, token_name
from ..wire.blocking import listen
from ..wire.certificates import NodeIdentity, authority_hash
from ..wire.cluster_messages import TokenIssued, TokenWanted
from ..wire.messages import PROTOCOL_VERSION
from ..wire.peer_messages import MAX_ADDRESS, MAX_ADDRESSES, MAX_PEERS, NONCE_BYTES, JoinOffer
from ..wire.streams import TlsAcceptor, open_tls
from ..wire.tls import (
    ALPN_CONTROL,
    ALPN_REQUESTS,
    Credentials,
    Peer,
    member_context_client,
    member_context_server,
    peer_identity,
)
from .links import ControlLink, Rejected
from .node import ClusterNode

log = logging.getLogger(__name__)

ANSWER_S = 5.0
SECRET_BYTES = 16
UNKNOWN = "the Mac that founded this cluster"  #: The authority's holder, before a roster arrives.


class TokenIssuing:
    """Requests join tokens, or issues them with `issuer` if this Mac has the authority's key."""

    def __init__(self, node: ClusterNode) -> None:
        membership = node.identity.member
        self.issuer = TokenIssuer(membership.cluster_id, authority_hash(membership.authority))
        self._node = node
        # Removed members' tokens are void.
        node.enrolment.on_change(lambda: self.issuer.keep(node.replica.roster.members()))
        node.links.on(self._issue, TokenWanted)

    async def token(self) -> str:
        """Return a new join token, from a Mac that can issue it. Raises UserError if none can."""
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
        """Make a token for the member `asked_by`, by default this one. Raises UserError."""
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

#: Serves a member's requests link until it ends.
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
    """Accepts control and requests links from members, and joiners if this Mac has the authority's key."""

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
        # A vanished node's clients no longer read replies.
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
        """Return True if a member may send requests. It needs a control link, which shows if it vanishes."""
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
        """Return the names of other Macs that issue tokens, and addresses, each Mac's nearest first."""
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
    """Return a node's addresses that fit into an offer: an invalid address must not keep joiners out."""
    addresses = node.peer_info.addresses.get(node_id, ())
    return tuple(each for each in addresses if len(each) <= MAX_ADDRESS and host_and_port(each))


# --- dialing: by Bonjour, and by given or remembered addresses, repeatedly -------------------------------

DIAL_S = 3.0
TICK_S = 0.25
INTERFACES_S = 2.0  #: Seconds between two checks of this machine's addresses.
TOLD_S = 60.0  #: Seconds until the log repeats the same refusal by the same address.
#: Another Mac's refusals that this Mac's user must know.
_OURS_TO_MEND = (Code.DUPLICATE_NODE, Code.REMOVED_NODE, Code.MISMATCH)


class Dialer:
    """Dials every member within reach. `port` is this agent's control port."""

    def __init__(
        self, node: ClusterNode, credentials: Credentials, port: int, rewired: Callable[[], None]
    ) -> None:
        self._settings = node.settings
        self._node = node
        self._port = port
        self._rewired = rewired
        self._credentials = credentials
        self._dialing = node.dialing
        self._discovery = Discovery(self._sighted, log.warning)
        self._dials = Background()
        self._logged: dict[str, tuple[str, float]] = {}
        self._refusal = ""  #: The last refusal by another Mac, until that Mac accepts this one.
        self._addresses: Addresses | None = None
        self._look_at = 0.0
        self.sightings: tuple[DiscoveredPeer, ...] = ()

    async def run(self) -> None:
        if self._settings.discovery:
            only = (self._settings.loopback,) if self._settings.loopback else ()
            await self._discovery.start(self._advert(), only)
        try:
            while True:
                now = time.monotonic()
                self._notice_interfaces(now)
                members = self._node.replica.roster.members()
                for node_id in list(self._dialing.remembered()):
                    if node_id not in members:
                        self._dialing.forget(node_id)
                for address in self._dialing.tick(now, self._node.links.nodes()):
                    self._dials.start(self._dial(address), f"dialling {address}")
                await asyncio.sleep(TICK_S)
        finally:
            await self._dials.close()
            if self._settings.discovery:
                with contextlib.suppress(OSError):
                    await self._discovery.close()

    @property
    def trouble(self) -> str:
        """Reason why multicast finds no other Macs; empty if it works, or if discovery is off."""
        return self._discovery.problem

    def woke(self) -> None:
        self._dialing.interfaces_changed(time.monotonic())
        if self._settings.discovery:
            self._discovery.refresh()

    def _notice_interfaces(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + INTERFACES_S
        addresses = addresses_up()
        if self._addresses is not None and addresses != self._addresses:
            log.info("this Mac's network addresses changed")
            self._dialing.interfaces_changed(now)
            self._discovery.refresh()
            self._rewired()
        self._addresses = addresses

    def _advert(self) -> Advert:
        identity = self._node.identity
        return Advert(
            identity.node_id,
            identity.cluster_id,
            self._node.name,
            self._port,
            identity.authority is not None,
            PROTOCOL_VERSION,
        )

    def _sighted(self, sightings: tuple[DiscoveredPeer, ...]) -> None:
        self.sightings = sightings
        self._dialing.sighted(sightings, time.monotonic())

    async def _dial(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        now = time.monotonic
        try:
            context = member_context_client(self._credentials, ALPN_CONTROL)
            reader, writer = await open_tls(host, int(port), context, ALPN_CONTROL, DIAL_S)
            try:
                identity = peer_identity(writer.get_extra_info("ssl_object"))
                node_id = await self._node.links.dialled(reader, writer, identity)
            except BaseException:
                writer.transport.abort()
                raise
        except MlxtpError as error:
            if error.code is Code.SAME_NODE:
                self._dialing.ourselves(address)
                return
            if error.code in (Code.NOT_AUTHENTIC, Code.REMOVED_NODE):
                self._dialing.foreign(address, now())
            else:
                self._dialing.failed(address, now())
            self._log_once(address, error)
            return
        self._dialing.reached(address, node_id, now())
        said, _ = self._logged.pop(address, ("", 0.0))
        if said == self._refusal:
            self._refusal = ""
            if self._node.introduction.problem == said:
                self._node.introduction.problem = ""

    def _log_once(self, address: str, error: MlxtpError) -> None:
        quiet = error.code in (Code.LINK_LOST, Code.LINK_TIMEOUT)
        said, at = self._logged.get(address, ("", 0.0))
        if error.detail == said and time.monotonic() - at < TOLD_S:
            return
        self._logged[address] = (error.detail, time.monotonic())
        if len(self._logged) > MAX_KNOWN:  # a flood of new addresses
            del self._logged[next(iter(self._logged))]
        if "Errno 65" in error.detail:  # macOS blocks the local network, usually silently
            log.warning("%s: %s", address, explain(65, error.detail))
            return
        log.log(logging.DEBUG if quiet else logging.WARNING, "%s: %s", address, error.detail)
        if isinstance(error, Rejected) and error.code in _OURS_TO_MEND:
            self._node.introduction.problem = self._refusal = error.detail
