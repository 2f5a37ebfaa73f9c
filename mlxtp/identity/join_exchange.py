"""Joining over the network: the two ends of `join_protocol.py`, each on a TLS connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import Code, LinkError, ProtocolError, RemoteProtocolError
from ..wire.messages import Error, Message
from ..wire.peer_messages import JoinGrant, JoinOffer, JoinRefusal, JoinRequest
from ..wire.session import LinkKind, Session, Side
from ..wire.streams import StreamLink
from ..wire.tls import ALPN_JOIN, join_context
from ..wire.tls_acceptor import open_tls
from .join_protocol import Admitted, Granted, Host, Joiner, spoken

JOIN_S = 10.0  #: seconds that one exchange may take, connecting included
_EPOCH = 0


async def ask_to_join(host: str, port: int, joiner: Joiner, deadline_s: float = JOIN_S) -> Granted:
    """Join the cluster of the member at `host` and `port`.

    Raises what `Joiner` raises: UserError (JOIN_REFUSED), AskElsewhere with the addresses to try instead,
    Denied, ProtocolError (NOT_AUTHENTIC). Nothing is sent before the member has proven to be of the token's
    cluster.

    Raises LinkError when no answer comes within `deadline_s` seconds.
    """
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await open_tls(host, port, join_context(), ALPN_JOIN, deadline_s)
            connection = StreamLink(reader, writer, Session(LinkKind.JOIN, Side.LOWER, _EPOCH))
            certificate = writer.get_extra_info("ssl_object").getpeercert(True)
            try:
                return await _join(connection, joiner, certificate)
            finally:
                connection.close()
    except TimeoutError:
        raise LinkError(f"{host}:{port} did not answer within {deadline_s:g} s", Code.LINK_TIMEOUT) from None


async def _join(connection: StreamLink, joiner: Joiner, certificate: bytes) -> Granted:
    offer = await _next(connection)
    assert isinstance(offer, JoinOffer)  # nothing else is legal
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
    """Run the exchange with one joiner. Return the joiner that it admitted, if any.

    `host` is a Host on the Mac that has the authority's key; elsewhere it is the offer in which
    `join_protocol.redirect` names that Mac. `clock` is the issuer's. Raises RemoteProtocolError for a joiner
    that breaks the rules, LinkError for one that is gone or takes longer than `deadline_s` seconds.
    """
    connection = StreamLink(reader, writer, Session(LinkKind.JOIN, Side.UPPER, _EPOCH))
    try:
        async with asyncio.timeout(deadline_s):
            connection.send(host if isinstance(host, JoinOffer) else host.offer)
            request = await _next(connection)
            assert isinstance(request, JoinRequest)  # nothing else is legal
            if isinstance(host, JoinOffer):
                raise RemoteProtocolError("the joiner sent its request here, but the offer named another Mac")
            answer = host.on_request(request, clock())
            connection.send(answer.message)
            return answer.admitted
    except TimeoutError:
        raise LinkError(f"no request from the joiner within {deadline_s:g} s", Code.LINK_TIMEOUT) from None
    finally:
        connection.close()


async def _next(connection: StreamLink) -> Message:
    """Return the one message that is due. Raises LinkError when the link ends without it."""
    received = await connection.receive()
    if not received:
        raise LinkError("the link ended before the expected message")
    return received[0].message
