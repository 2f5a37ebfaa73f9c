"""Membership of this Mac: it is a member already, founds a cluster, or joins one with a token."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .. import audit
from ..background import Background
from ..config import Settings
from ..discovery.addresses import Advert, DiscoveredPeer, host_and_port
from ..discovery.mdns import Discovery
from ..errors import Code, ConfigError, LinkError, ProtocolError, RemoteProtocolError, UserError
from ..wire.certificates import authority_hash
from ..wire.messages import PROTOCOL_VERSION, Error, Message
from ..wire.peer_messages import NONCE_BYTES, JoinGrant, JoinOffer, JoinRefusal, JoinRequest
from ..wire.session import LinkKind, Session, Side
from ..wire.streams import StreamLink, open_tls
from ..wire.tls import ALPN_JOIN, join_context
from .join_protocol import (
    Admitted,
    AskElsewhere,
    Denied,
    Granted,
    Host,
    Joiner,
    JoinToken,
    read_token,
    spoken,
    token_name,
)
from .store import Identity, Store

log = logging.getLogger(__name__)

# --- both ends of `join_protocol.py`, each exchange on its own TLS connection ----------------------------

JOIN_S = 10.0  #: seconds for one exchange, connecting included
_EPOCH = 0


async def ask_to_join(host: str, port: int, joiner: Joiner, deadline_s: float = JOIN_S) -> Granted:
    """Join the cluster of a member. Raises as `Joiner` does, and LinkError after `deadline_s` seconds."""
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await open_tls(host, port, join_context(), ALPN_JOIN, deadline_s)
            connection = StreamLink(reader, writer, Session(LinkKind.JOIN, Side.LOWER, _EPOCH))
            certificate = writer.get_extra_info("ssl_object").getpeercert(True)
            try:
                return await _exchange(connection, joiner, certificate)
            finally:
                connection.close()
    except TimeoutError:
        raise LinkError(f"{host}:{port} did not answer within {deadline_s:g} s", Code.LINK_TIMEOUT) from None


async def _exchange(connection: StreamLink, joiner: Joiner, certificate: bytes) -> Granted:
    offer = await _next(connection)
    assert isinstance(offer, JoinOffer)  # no other message is legal
    connection.send(joiner.on_offer(offer, certificate))
    answer = await _next(connection)
    if isinstance(answer, JoinRefusal):
        raise joiner.on_refusal(answer)
    if isinstance(answer, Error):
        raise ProtocolError(f"the Mac there ended the exchange: {spoken(answer.detail)}")
    assert isinstance(answer, JoinGrant)
    return joiner.on_grant(answer)


async def answer_joiner(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    host: Host | JoinOffer,
    clock: Callable[[], float],
    deadline_s: float = JOIN_S,
) -> Admitted | None:
    """Run the exchange with one joiner, and return it if it was admitted.

    `host`: on a Mac without the authority's key, the offer from `redirect`. `clock`: the issuer's. Raises
    RemoteProtocolError if the joiner breaks the rules, LinkError if it is gone or late.
    """
    connection = StreamLink(reader, writer, Session(LinkKind.JOIN, Side.UPPER, _EPOCH))
    try:
        async with asyncio.timeout(deadline_s):
            connection.send(host if isinstance(host, JoinOffer) else host.offer)
            request = await _next(connection)
            assert isinstance(request, JoinRequest)  # no other message is legal
            if isinstance(host, JoinOffer):
                raise RemoteProtocolError("the joiner sent its request here, but the offer named another Mac")
            answer = host.on_request(request, clock())
            connection.send(answer.message)
            if isinstance(answer.message, JoinRefusal) and not answer.message.ask:
                name, why = spoken(request.name), answer.message.detail
                words = f"{name} at {host.address} may not join: {why}"
                about = {"member": name, "address": host.address, "token": token_name(request.token_id)}
                audit.record("join_refused", words, about, foreign=True)
            return answer.admitted
    except TimeoutError:
        raise LinkError(f"no request from the joiner within {deadline_s:g} s", Code.LINK_TIMEOUT) from None
    finally:
        connection.close()


async def _next(connection: StreamLink) -> Message:
    received = await connection.receive()
    if not received:
        raise LinkError("the link ended before the expected message")
    return received[0].message


# --- membership of this Mac ------------------------------------------------------------------------------

FIND_S = 30.0  #: seconds to search for a Mac of the token's cluster
TICK_S = 0.1
MAX_ASKED = 32  #: open requests to join


@dataclass(frozen=True, slots=True)
class JoinResult:
    identity: Identity
    founded: bool = False  #: This start founded the cluster.
    joined: bool = False  #: This start joined it.
    peers: tuple[str, ...] = ()  #: addresses of members


async def enter(settings: Settings, store: Store, forget: Callable[[], None]) -> JoinResult:
    """Load, found or join a cluster. `forget` removes an earlier cluster's state. Raises UserError."""
    identity = store.load_or_create()
    if not settings.join:
        if identity.membership is not None:
            return JoinResult(identity)
        if settings.join is not None:
            raise ConfigError(
                "--join without a token is for a Mac that is a member already, and this one is not. Run "
                "`mlxtp token` on a Mac of the cluster, then here `mlxtp node --join TOKEN`"
            )
        forget()
        return JoinResult(store.found_cluster(), founded=True)
    token = read_token(settings.join)
    if identity.membership is not None:
        if token.authority_hash != authority_hash(identity.membership.authority):
            raise ConfigError(
                f"this Mac is a member of cluster {identity.cluster_id}, the token is for "
                f"{token.cluster_id}; run `mlxtp cluster leave`, then use the token"
            )
        log.info("this Mac is a member of cluster %s already", identity.cluster_id)
        return JoinResult(identity)
    joined = await _join(settings, identity, token)
    forget()
    return JoinResult(
        store.save_membership(joined.membership),
        joined=True,
        peers=tuple(filter(host_and_port, joined.peers)),
    )


async def _join(settings: Settings, identity: Identity, token: JoinToken) -> Granted:
    queue = JoinQueue()
    for peer in settings.peers:
        queue.add(peer, (peer,))
    discovery = Discovery(lambda sightings: _note(sightings, token, queue), log.warning)
    if settings.discovery:
        only = (settings.loopback,) if settings.loopback else ()
        own = Advert(identity.node_id, "", settings.name, settings.control_port or 1, False, PROTOCOL_VERSION)
        await discovery.start(own, only)
    try:
        return await _JoinSearch(settings, identity, token, queue).run()
    finally:
        if settings.discovery:
            await discovery.close()


class _JoinSearch:
    """Search that tries many addresses at once, because an impostor may have announced any of them."""

    def __init__(self, settings: Settings, identity: Identity, token: JoinToken, queue: JoinQueue) -> None:
        self._settings = settings
        self._identity = identity
        self._token = token
        self._queue = queue
        self._foreign: set[str] = set()  #: addresses of other clusters
        self._problem = ""
        self._outcome: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()
        self._requests = Background()

    async def run(self) -> Granted:
        log.info("looking for cluster %s", self._token.cluster_id)
        until = time.monotonic() + FIND_S
        try:
            while time.monotonic() < until and not self._outcome.done() and not self._is_hopeless():
                self._ask_more()
                ends: set[asyncio.Future[Any]] = {self._outcome, *self._requests.tasks}
                await asyncio.wait(ends, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._requests.close()
        if self._outcome.done():
            return self._outcome.result()
        cluster = self._token.cluster_id
        if self._is_hopeless():
            raise ConfigError(self._problem)
        if not self._queue.addresses:
            raise ConfigError(
                f"no Mac of cluster {cluster} announced itself on this network within {FIND_S:g} s. "
                "Is `mlxtp node` running there? Its address can be given: --peer HOST:PORT"
            )
        raise ConfigError(f"cluster {cluster} could not be joined within {FIND_S:g} s: {self._problem}")

    def _is_hopeless(self) -> bool:
        """True if the user named all known addresses and all are of another cluster."""
        addresses = self._queue.addresses
        return bool(addresses) and not self._settings.discovery and self._foreign >= addresses

    def _ask_more(self) -> None:
        now = time.monotonic()
        while len(self._requests.tasks) < MAX_ASKED and (taken := self._queue.take(now)) is not None:
            self._requests.start(self._ask(*taken), f"a request to join at {taken[1]}")

    async def _ask(self, announcer: str, address: str, patience_s: float) -> None:
        where, identity = host_and_port(address), self._identity
        assert where is not None  # `JoinQueue` accepts only addresses
        nonce = secrets.token_bytes(NONCE_BYTES)
        joiner = Joiner(self._token, identity.node_id, identity.key, self._settings.name, nonce)
        try:
            self._settle(await ask_to_join(*where, joiner, patience_s))
        except Denied as denied:
            self._settle(denied)
        except AskElsewhere as elsewhere:
            self._problem = elsewhere.detail
            self._queue.add(announcer, elsewhere.addresses, first=True)
        except (LinkError, ProtocolError) as error:
            self._problem = error.detail
        except UserError as refused:
            self._problem = refused.detail
            self._foreign.add(address)
        finally:
            self._queue.asked(address, time.monotonic())

    def _settle(self, outcome: Granted | Denied) -> None:
        if self._outcome.done():  # one Mac may answer at several addresses
            return
        if isinstance(outcome, Denied):
            self._outcome.set_exception(outcome)
        else:
            self._outcome.set_result(outcome)


def _note(sightings: tuple[DiscoveredPeer, ...], token: JoinToken, queue: JoinQueue) -> None:
    # Macs that can admit others go first.
    for sighting in sorted(sightings, key=lambda sighting: not sighting.has_ca):
        if sighting.cluster_id == token.cluster_id:
            queue.add(f"{sighting.node_id} {sighting.name}", sighting.addresses)


# --- the order of the requests --------------------------------------------------------------------------

#: Seconds for an address to answer: the first time, the second, and later.
PATIENCE_S = (1.0, 2.0, 5.0)
AGAIN_S = 1.0  #: seconds until an address that did not admit this Mac is tried again
MAX_OF_EACH = 32  #: addresses kept per announcer


class JoinQueue:
    """Queue of addresses ("ip:port") to try, by announcer.

    Any Mac can announce any address under the cluster's id. So announcers take turns, and so do the addresses
    of each: false addresses cost an honest one only their share.
    """

    def __init__(self) -> None:
        self._addresses: dict[str, deque[str]] = {}
        self._turns: deque[str] = deque()
        self._due: dict[str, float] = {}
        self._tries: Counter[str] = Counter()

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(each for mine in self._addresses.values() for each in mine)

    def add(self, announcer: str, addresses: Iterable[str], *, first: bool = False) -> None:
        """Add an announcer's addresses in random order. `first`: ahead of its other ones."""
        if announcer not in self._addresses:
            self._addresses[announcer] = deque(maxlen=MAX_OF_EACH)
            self._turns.append(announcer)
        mine = self._addresses[announcer]
        fresh = list(dict.fromkeys(each for each in addresses if each not in mine and host_and_port(each)))
        random.shuffle(fresh)
        if first:
            mine.extendleft(fresh)
        else:
            mine.extend(fresh[: MAX_OF_EACH - len(mine)])

    def take(self, now: float) -> tuple[str, str, float] | None:
        """Return the announcer and address to try now, and the seconds it may take; None if none is due."""
        for _ in range(len(self._turns)):
            announcer, mine = self._turns[0], self._addresses[self._turns[0]]
            self._turns.rotate(-1)
            for _ in range(len(mine)):
                address = mine[0]
                mine.rotate(-1)
                if self._due.get(address, now) <= now:
                    self._due[address] = math.inf
                    patience_s = PATIENCE_S[min(self._tries[address], len(PATIENCE_S) - 1)]
                    self._tries[address] += 1
                    return announcer, address, patience_s
        return None

    def asked(self, address: str, now: float) -> None:
        self._due[address] = now + AGAIN_S
