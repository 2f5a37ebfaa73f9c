"""TLS 1.3 between the members of a cluster: contexts, identity of the peer, and TLS over blocking sockets.

A member shows its certificate and accepts only peers whose certificate its own cluster's authority made. No
other authority counts, and neither host names nor times in certificates matter: a control link begins with a
judgement of the time, and other connections need such a link. ALPN selects the protocol of a connection. A
Mac that wants to join has no certificate yet, and may speak `mlxtp-join` only.
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
from typing import TYPE_CHECKING

from ..errors import Code, LinkError, MlxtpError, ProtocolError

if TYPE_CHECKING:  # a rank whose links are all of one Mac reads no certificate, whose import takes 0.05 s
    from .certificates import NodeIdentity

ALPN_CONTROL = "mlxtp-control"
ALPN_REQUESTS = "mlxtp-requests"
ALPN_JOIN = "mlxtp-join"
ALPN_DECODE = "mlxtp-decode"
ALPN_MODELS = "mlxtp-models"
AGENT_ALPNS = (ALPN_CONTROL, ALPN_REQUESTS, ALPN_JOIN)  #: protocols of an agent's control port

HANDSHAKE_S = 3.0  #: seconds from TCP connection to the end of the handshake
GOODBYE_S = 1.0  #: seconds that closing a connection waits for the peer's TLS close message

_NO_CHECK_TIME = 0x200000  #: X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python does not name
_HEADER_BYTES = 5
_RECORD_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files (PEM) of a member: its private key; its certificate, followed by those of its authorities."""

    key: Path
    member: Path

    @classmethod
    def of(cls, folder: Path) -> Credentials:
        """Return the files in the folder of an identity."""
        return cls(folder / "node.key", folder / "member.pem")


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection and its protocol. Only a joiner has no `identity`."""

    alpn: str
    address: str
    identity: NodeIdentity | None


# --- contexts -----------------------------------------------------------------------------------------


def member_context_server(credentials: Credentials, alpns: Sequence[str] = AGENT_ALPNS) -> ssl.SSLContext:
    """Return a context for accepting peers. It requires a certificate unless `alpns` has `mlxtp-join`.

    With `mlxtp-join` it requests one, and `judge_client` decides about each connection. Raises ProtocolError
    as `member_context_client` does.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, alpns)
    context.verify_mode = ssl.CERT_OPTIONAL if ALPN_JOIN in alpns else ssl.CERT_REQUIRED
    context.num_tickets = 0  # no session is resumed: each connection shows its certificate
    _load(context, credentials)
    return context


def member_context_client(credentials: Credentials, alpn: str) -> ssl.SSLContext:
    """Return a context for connecting to a member, to speak `alpn`.

    Raises ProtocolError (NOT_AUTHENTIC) when the files cannot be used.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, (alpn,))
    context.verify_mode = ssl.CERT_REQUIRED
    _load(context, credentials)
    return context


def join_context() -> ssl.SSLContext:
    """Return a context for connecting as a joiner: no certificate, and no check.

    The caller judges the peer.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, (ALPN_JOIN,))


def _context(side: int, alpns: Sequence[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname = False  # members are known by node id, not by address
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT | _NO_CHECK_TIME
    context.options |= ssl.OP_NO_TICKET
    context.set_alpn_protocols(list(alpns))
    return context


def _load(context: ssl.SSLContext, credentials: Credentials) -> None:
    from .certificates import MemberCertificates

    try:
        shown = MemberCertificates.from_pem(credentials.member.read_bytes())
        context.load_verify_locations(cadata=shown.authority + shown.former)
        # With an encrypted key, OpenSSL would prompt at the terminal; ours never is.
        context.load_cert_chain(credentials.member, credentials.key, password=b"")
    except (OSError, ValueError) as error:
        raise ProtocolError(
            f"{credentials.member} and {credentials.key} cannot be used: {error}", Code.NOT_AUTHENTIC
        ) from None


# --- identity of the peer -----------------------------------------------------------------------------


def peer_identity(secured: ssl.SSLObject | ssl.SSLSocket | TlsSocket) -> NodeIdentity:
    """Return the peer's identity, after a handshake in a member context, which checked its certificate.

    Raises ProtocolError (NOT_AUTHENTIC) when the peer showed none, or one that names no node.
    """
    from .certificates import read_node

    certificate = secured.getpeercert(True)
    if certificate is None:
        raise ProtocolError("the peer shows no certificate", Code.NOT_AUTHENTIC)
    return read_node(certificate)


def judge_client(secured: ssl.SSLObject | ssl.SSLSocket | TlsSocket, address: str) -> Peer:
    """Return the peer that connected to our server, right after the handshake.

    Raises ProtocolError (NOT_AUTHENTIC) for a peer that speaks none of our protocols, or that shows no
    certificate and wants more than to join.
    """
    alpn = secured.selected_alpn_protocol()
    if alpn is None:
        raise ProtocolError(f"{address} speaks none of this port's protocols", Code.NOT_AUTHENTIC)
    if alpn == ALPN_JOIN:
        return Peer(alpn, address, None)
    return Peer(alpn, address, peer_identity(secured))


def explained(error: Exception, where: str, deadline_s: float) -> MlxtpError:
    """Return our error for the error of a connection or handshake (an OSError)."""
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
    """Connected blocking TLS socket, with the part of a socket's interface that `BlockingLink` uses.

    One thread may receive while another sends. One thread at a time uses OpenSSL's object, under a lock that
    no thread holds while it waits for the network.
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
        """Send as a socket does. After an error nothing more can be sent."""
        with self._turn_to_send:  # records leave in the order in which they were made
            with self._lock:
                rest = memoryview(data)
                while rest:
                    rest = rest[self._tls.write(rest) :]
                records = self._outgoing.read()
            self._sock.sendall(records)

    def recv(self, size: int) -> bytes:
        """Return received data, or b"" at the end of the stream, with or without TLS's own close message.

        `size` bounds the bytes read from the network. All decrypted data is returned, because a poll on
        `fileno` would not report what stays behind. Raises TimeoutError when nothing, or only part of a
        record, came within the socket's timeout, and other OSErrors as a socket does.
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
        # OpenSSL's reply to this (to a change of keys) goes out with the next `sendall`.
        with contextlib.suppress(ssl.SSLWantReadError):
            while part := self._tls.read(_RECORD_BYTES):
                yield part
            self._ended = True
            with contextlib.suppress(OSError):  # a poll reports the end, even if the peer's socket stays open
                self._sock.shutdown(socket.SHUT_RD)

    def getpeercert(self, binary_form: bool) -> bytes | None:
        """Return the peer's certificate (DER)."""
        assert binary_form
        return self._tls.getpeercert(True)

    def selected_alpn_protocol(self) -> str | None:
        """Return the protocol that both ends agreed on."""
        return self._tls.selected_alpn_protocol()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._sock.setsockopt(level, option, value)

    def settimeout(self, timeout_s: float | None) -> None:
        self._sock.settimeout(timeout_s)

    def fileno(self) -> int:
        return self._sock.fileno()

    def shutdown(self, how: int) -> None:
        """End the TCP connection at once and wake threads that wait."""
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


def wrap_blocking(
    sock: socket.socket, context: ssl.SSLContext, *, server_side: bool, handshake_s: float = HANDSHAKE_S
) -> TlsSocket:
    """Shake hands over a connected socket and return the TLS socket. The server may still refuse a client.

    Raises ProtocolError (NOT_AUTHENTIC) when the peer is not of this cluster or speaks no TLS 1.3. Raises
    LinkError when it is gone or did not finish within `handshake_s` seconds. The socket is then closed.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=server_side)
    timeout_s = sock.gettimeout()
    try:
        _shake_hands(sock, tls, incoming, outgoing, time.monotonic() + handshake_s)
        sock.settimeout(timeout_s)
    except OSError as error:
        where = _where(sock)
        with contextlib.suppress(OSError):  # send the TLS alert, if that is still possible
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
    """Yield bytes, never beyond one record, so that data after the handshake stays in the socket."""
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
