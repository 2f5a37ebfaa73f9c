"""TLS 1.3 between the members of a cluster: contexts, who the peer is, and TLS over blocking sockets.

A member shows its certificate and takes only peers whose certificate its own cluster's authority made; no
other authority counts, and the names that certificates carry elsewhere do not matter. Which protocol a
connection speaks is agreed by ALPN. A Mac that wants to join has no certificate yet, and may speak
`mlxtp-join` only.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import Code, LinkError, MlxtpError, ProtocolError
from .certificates import NodeIdentity, certificates_from_pem, read_node

ALPN_CONTROL = "mlxtp-control"
ALPN_REQUESTS = "mlxtp-requests"
ALPN_JOIN = "mlxtp-join"
ALPN_DECODE = "mlxtp-decode"
ALPN_MODELS = "mlxtp-models"
AGENT_ALPNS = (ALPN_CONTROL, ALPN_REQUESTS, ALPN_JOIN)
"""What is spoken on an agent's control port."""

HANDSHAKE_S = 3.0
"""Seconds from TCP connection to the end of the handshake."""
GOODBYE_S = 1.0
"""Seconds for which the end of a connection waits for the peer to agree that it is over."""

_HEADER_BYTES = 5
_RECORD_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files (PEM) of a member: its private key; its certificate, followed by its authority's."""

    key: Path
    member: Path

    @classmethod
    def of(cls, folder: Path) -> Credentials:
        """Those in the folder of an identity."""
        return cls(folder / "node.key", folder / "member.pem")


class PeerTls(Protocol):
    """The part of `ssl.SSLObject` that tells who the peer is."""

    def getpeercert(self, binary_form: bool) -> bytes | None: ...

    def selected_alpn_protocol(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, and what it speaks. Only a joiner has no `identity`."""

    alpn: str
    address: str
    identity: NodeIdentity | None


# --- contexts -----------------------------------------------------------------------------------------


def member_context_server(credentials: Credentials, alpns: Sequence[str] = AGENT_ALPNS) -> ssl.SSLContext:
    """For accepting peers. A certificate is asked for, and demanded unless `alpns` has `mlxtp-join`.

    `judge_client` then decides over each connection. Raises ProtocolError as `member_context_client` does.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, alpns)
    context.verify_mode = ssl.CERT_OPTIONAL if ALPN_JOIN in alpns else ssl.CERT_REQUIRED
    context.num_tickets = 0  # no session is resumed: each connection shows who it is
    _load(context, credentials)
    return context


def member_context_client(credentials: Credentials, alpn: str) -> ssl.SSLContext:
    """For connecting to a member, to speak `alpn`.

    Raises ProtocolError (NOT_AUTHENTIC) when the files cannot be used.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, (alpn,))
    context.verify_mode = ssl.CERT_REQUIRED
    _load(context, credentials)
    return context


def join_context() -> ssl.SSLContext:
    """For connecting as a joiner: shows nothing, believes nothing. Whoever uses it judges the peer itself."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, (ALPN_JOIN,))


def _context(side: int, alpns: Sequence[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname = False  # members are known by node id, not by where they are
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.options |= ssl.OP_NO_TICKET
    context.set_alpn_protocols(list(alpns))
    return context


def _load(context: ssl.SSLContext, credentials: Credentials) -> None:
    try:
        _, authority = certificates_from_pem(credentials.member.read_bytes())
        context.load_verify_locations(cadata=authority)
        # A key that is encrypted would be asked for at the terminal; ours never is.
        context.load_cert_chain(credentials.member, credentials.key, password=b"")
    except (OSError, ValueError) as error:
        raise ProtocolError(
            f"{credentials.member} and {credentials.key} cannot be used: {error}", Code.NOT_AUTHENTIC
        ) from None


# --- who is it ----------------------------------------------------------------------------------------


def peer_identity(secured: PeerTls) -> NodeIdentity:
    """Who the peer is, after a handshake in one of the members' contexts, which checked its certificate.

    Raises ProtocolError (NOT_AUTHENTIC) when it showed none, or one that names no node.
    """
    certificate = secured.getpeercert(True)
    if certificate is None:
        raise ProtocolError("the peer shows no certificate", Code.NOT_AUTHENTIC)
    return read_node(certificate)


def judge_client(secured: PeerTls, address: str) -> Peer:
    """Who connected to a server of ours, right after the handshake.

    Raises ProtocolError (NOT_AUTHENTIC) for whoever speaks none of our protocols, or wants more than to join
    and shows no certificate.
    """
    alpn = secured.selected_alpn_protocol()
    if alpn is None:
        raise ProtocolError(f"{address} speaks none of this port's protocols", Code.NOT_AUTHENTIC)
    if alpn == ALPN_JOIN:
        return Peer(alpn, address, None)
    return Peer(alpn, address, peer_identity(secured))


def explained(error: Exception, where: str, deadline_s: float) -> MlxtpError:
    """The error of a connection or handshake (an OSError) in our words, to be raised."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message or "not accepted"
        return ProtocolError(f"{where}: its certificate is not of this cluster ({why})", Code.NOT_AUTHENTIC)
    if isinstance(error, ssl.SSLError):
        return ProtocolError(f"{where}: no TLS 1.3 with it ({error.reason or error})", Code.NOT_AUTHENTIC)
    if isinstance(error, TimeoutError):
        return LinkError(f"{where}: no secure connection within {deadline_s:g} s", Code.LINK_TIMEOUT)
    return LinkError(f"{where}: cannot connect: {error}")


# --- blocking sockets ---------------------------------------------------------------------------------


class TlsSocket:
    """A connected blocking socket that speaks TLS, with the part of a socket's interface that a
    `BlockingLink` uses.

    One thread may receive while another sends. OpenSSL's object is used by one thread at a time, under a
    lock that nobody holds while the network makes them wait.
    """

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
    ) -> None:
        self.family = sock.family
        self._sock = sock
        self._tls = tls
        self._incoming = incoming
        self._outgoing = outgoing
        self._lock = threading.Lock()
        self._turn_to_send = threading.Lock()
        self._ended = False

    def sendall(self, data: bytes) -> None:
        """As a socket's. After an error nothing more can be sent."""
        with self._turn_to_send:  # records leave in the order in which they were made
            with self._lock:
                rest = memoryview(data)
                while rest:
                    rest = rest[self._tls.write(rest) :]
                records = self._outgoing.read()
            self._sock.sendall(records)

    def recv(self, size: int) -> bytes:
        """What has come, or b"" at the end of the stream, with or without TLS's own goodbye.

        `size` bounds what is read from the network; nothing that is decrypted stays behind, or a poll on
        `fileno` would not tell of it. Raises TimeoutError when nothing came within the socket's timeout, or
        only part of a record did, and other OSErrors as a socket's.
        """
        if self._ended:
            return b""
        records = self._sock.recv(size)
        with self._lock:
            if not records:
                self._ended = True
                return b""
            self._incoming.write(records)
            data = b"".join(self._decrypted())
        if not data and not self._ended:
            raise TimeoutError("only part of a record has come")
        return data

    def _decrypted(self) -> Iterator[bytes]:
        # What OpenSSL wants to say to this (the answer to a change of keys) goes out with the next `sendall`.
        with contextlib.suppress(ssl.SSLWantReadError):
            while part := self._tls.read(_RECORD_BYTES):
                yield part
            self._ended = True
            with contextlib.suppress(
                OSError
            ):  # a poll tells of the end, even if the peer's socket stays open
                self._sock.shutdown(socket.SHUT_RD)

    def getpeercert(self, binary_form: bool) -> bytes | None:
        """The peer's certificate (DER)."""
        assert binary_form
        return self._tls.getpeercert(True)

    def selected_alpn_protocol(self) -> str | None:
        """What both ends agreed to speak."""
        return self._tls.selected_alpn_protocol()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._sock.setsockopt(level, option, value)

    def settimeout(self, timeout_s: float | None) -> None:
        self._sock.settimeout(timeout_s)

    def fileno(self) -> int:
        return self._sock.fileno()

    def shutdown(self, how: int) -> None:
        """Ends the TCP connection at once and wakes whoever waits."""
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


def wrap_blocking(
    sock: socket.socket, context: ssl.SSLContext, *, server_side: bool, handshake_s: float = HANDSHAKE_S
) -> TlsSocket:
    """TLS over a connected socket, after its handshake. At the client's end the server may yet say no.

    Raises ProtocolError (NOT_AUTHENTIC) when the peer is not of this cluster or speaks no TLS 1.3, LinkError
    when it is gone or did not finish within `handshake_s` seconds; the socket is closed then.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=server_side)
    timeout_s = sock.gettimeout()
    try:
        _shake_hands(sock, tls, incoming, outgoing, time.monotonic() + handshake_s)
        sock.settimeout(timeout_s)
    except OSError as error:
        where = _where(sock)
        with contextlib.suppress(OSError):  # it is told why, if that is still possible
            sock.settimeout(0)
            sock.sendall(outgoing.read())
        sock.close()
        raise explained(error, where, handshake_s) from None
    return TlsSocket(sock, tls, incoming, outgoing)


def _shake_hands(
    sock: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, ends_at: float
) -> None:
    records = _records(sock, ends_at)
    while True:
        try:
            tls.do_handshake()
            wants_more = False
        except ssl.SSLWantReadError:
            wants_more = True
        if outgoing.pending:
            sock.settimeout(_left(ends_at))
            sock.sendall(outgoing.read())
        if not wants_more:
            return
        incoming.write(next(records))


def _records(sock: socket.socket, ends_at: float) -> Iterator[bytes]:
    """Bytes as they come, never beyond one record: what follows the handshake stays in the socket."""
    while True:
        header = b""
        while len(header) < _HEADER_BYTES:
            part = _receive(sock, _HEADER_BYTES - len(header), ends_at)
            header += part
            yield part
        left = int.from_bytes(header[3:], "big")
        while left:
            part = _receive(sock, left, ends_at)
            left -= len(part)
            yield part


def _receive(sock: socket.socket, size: int, ends_at: float) -> bytes:
    sock.settimeout(_left(ends_at))
    data = sock.recv(size)
    if not data:
        raise ConnectionResetError("it hung up")
    return data


def _left(ends_at: float) -> float:
    left = ends_at - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _where(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except (OSError, ValueError):
        return "the peer"
    return f"{host}:{port}"
