"""TLS 1.3 between members of a cluster: contexts, the peer's identity, and TLS over blocking sockets.

A member accepts only certificates from its own cluster's authority. Host names do not matter. ALPN selects
the protocol of a connection. A joining Mac has no certificate yet, so it may use only `mlxtp-join`.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Code, LinkError, MlxtpError, ProtocolError

if TYPE_CHECKING:  # importing this takes 0.05 s, and a rank with links on one Mac only needs no certificate
    from .certificates import NodeIdentity

ALPN_CONTROL = "mlxtp-control"
ALPN_REQUESTS = "mlxtp-requests"
ALPN_JOIN = "mlxtp-join"
ALPN_DECODE = "mlxtp-decode"
ALPN_MODELS = "mlxtp-models"
AGENT_ALPNS = (ALPN_CONTROL, ALPN_REQUESTS, ALPN_JOIN)  #: protocols of an agent's control port

HANDSHAKE_S = 3.0  #: seconds from TCP connection to the end of the handshake
GOODBYE_S = 1.0  #: seconds to wait for the peer's TLS close message

_HEADER_BYTES = 5
_RECORD_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files (PEM) of a member: its private key; its certificate, followed by the authority's."""

    key: Path
    member: Path

    @classmethod
    def of(cls, folder: Path) -> Credentials:
        return cls(folder / "node.key", folder / "member.pem")


@dataclass(frozen=True, slots=True)
class Peer:
    alpn: str
    address: str
    identity: NodeIdentity | None  #: None for a joiner only


# --- contexts -----------------------------------------------------------------------------------------


def member_context_server(credentials: Credentials, alpns: Sequence[str] = AGENT_ALPNS) -> ssl.SSLContext:
    """Return a context to accept peers. With `mlxtp-join`, the caller must `judge_client` each peer."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, alpns)
    context.verify_mode = ssl.CERT_OPTIONAL if ALPN_JOIN in alpns else ssl.CERT_REQUIRED
    context.num_tickets = 0  # no session resumption: each connection shows its certificate
    _load(context, credentials)
    return context


def member_context_client(credentials: Credentials, alpn: str) -> ssl.SSLContext:
    """Return a context to connect to a member. Raises ProtocolError if the files cannot be used."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, (alpn,))
    context.verify_mode = ssl.CERT_REQUIRED
    _load(context, credentials)
    return context


def join_context() -> ssl.SSLContext:
    """Return a context without certificate or check: the caller judges the peer."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, (ALPN_JOIN,))


def _context(side: int, alpns: Sequence[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname = False  # certificates name node ids, not addresses
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.options |= ssl.OP_NO_TICKET
    context.set_alpn_protocols(list(alpns))
    return context


def _load(context: ssl.SSLContext, credentials: Credentials) -> None:
    from .certificates import MemberCertificates

    try:
        shown = MemberCertificates.from_pem(credentials.member.read_bytes())
        context.load_verify_locations(cadata=shown.authority)
        # Without a password, OpenSSL would prompt at the terminal for an encrypted key.
        context.load_cert_chain(credentials.member, credentials.key, password=b"")
    except (OSError, ValueError) as error:
        raise ProtocolError(
            f"{credentials.member} and {credentials.key} cannot be used: {error}", Code.NOT_AUTHENTIC
        ) from None


# --- identity of the peer -----------------------------------------------------------------------------


def peer_identity(secured: ssl.SSLObject | ssl.SSLSocket | TlsSocket) -> NodeIdentity:
    """Return the peer's identity after a handshake. Raises ProtocolError (NOT_AUTHENTIC) if it has none."""
    from .certificates import read_node

    certificate = secured.getpeercert(True)
    if certificate is None:
        raise ProtocolError("the peer shows no certificate", Code.NOT_AUTHENTIC)
    return read_node(certificate)


def judge_client(secured: ssl.SSLObject | ssl.SSLSocket | TlsSocket, address: str) -> Peer:
    """Return the peer. Raises ProtocolError (NOT_AUTHENTIC) for an unknown protocol, or no certificate."""
    alpn = secured.selected_alpn_protocol()
    if alpn is None:
        raise ProtocolError(f"{address} speaks none of this port's protocols", Code.NOT_AUTHENTIC)
    return Peer(alpn, address, None if alpn == ALPN_JOIN else peer_identity(secured))


def explained(error: Exception, where: str, deadline_s: float) -> MlxtpError:
    """Return an error of mlxtp: ProtocolError (NOT_AUTHENTIC) for a peer of another cluster or without TLS
    1.3, else LinkError (LINK_TIMEOUT after `deadline_s` seconds, LINK_LOST).
    """
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
    """Connected blocking TLS socket: one thread may receive while another sends, as with a plain socket. The
    lock of OpenSSL's object is free while a thread waits for the network.
    """

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
    ) -> None:
        self.family = sock.family
        self.setsockopt, self.settimeout, self.fileno = sock.setsockopt, sock.settimeout, sock.fileno
        self.shutdown, self.close = sock.shutdown, sock.close  # `shutdown` wakes threads that wait
        self.getpeercert, self.selected_alpn_protocol = tls.getpeercert, tls.selected_alpn_protocol
        self._sock = sock
        self._tls = tls
        self._incoming = incoming
        self._outgoing = outgoing
        self._lock = threading.Lock()
        self._turn_to_send = threading.Lock()
        self._ended = False

    def sendall(self, data: bytes) -> None:
        """Send all of `data`. After an error, nothing more can be sent."""
        with self._turn_to_send:  # send records in the order of their encryption
            with self._lock:
                rest = memoryview(data)
                while rest:
                    rest = rest[self._tls.write(rest) :]
                records = self._outgoing.read()
            self._sock.sendall(records)

    def recv(self, size: int) -> bytes:
        """Decrypt at most `size` received bytes; b"" at the end of the stream. No decrypted bytes stay
        behind, because a poll would not report them. Raises TimeoutError also for part of a record.
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
        # If OpenSSL must reply (to a change of keys), the reply goes out with the next `sendall`.
        with contextlib.suppress(ssl.SSLWantReadError):
            while part := self._tls.read(_RECORD_BYTES):
                yield part
            self._ended = True
            with contextlib.suppress(OSError):  # a poll reports the end, even if the peer's socket stays open
                self._sock.shutdown(socket.SHUT_RD)


def wrap_blocking(
    sock: socket.socket, context: ssl.SSLContext, *, server_side: bool, handshake_s: float = HANDSHAKE_S
) -> TlsSocket:
    """Shake hands; the server may still refuse. On failure, closes the socket and raises `explained`."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=server_side)
    timeout_s = sock.gettimeout()
    try:
        _shake_hands(sock, tls, incoming, outgoing, time.monotonic() + handshake_s)
        sock.settimeout(timeout_s)
    except OSError as error:
        where = _where(sock)
        with contextlib.suppress(OSError):  # send the TLS alert if possible
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
    """Yield bytes, never beyond a record, so that data after the handshake stays in the socket."""
    while True:
        header = yield from _exactly(sock, _HEADER_BYTES, ends_at)
        yield from _exactly(sock, int.from_bytes(header[3:], "big"), ends_at)


def _exactly(sock: socket.socket, size: int, ends_at: float) -> Generator[bytes, None, bytes]:
    data = b""
    while len(data) < size:
        sock.settimeout(_left(ends_at))
        if not (part := sock.recv(size - len(data))):
            raise ConnectionResetError("it hung up")
        data += part
        yield part
    return data


def _left(ends_at: float) -> float:
    if (left := ends_at - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _where(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except (OSError, ValueError):
        return "the peer"
    return f"{host}:{port}"
