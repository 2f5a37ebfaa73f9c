"""Opening of one epoch's decode links: rank 0 accepts one from every other rank.

Between ranks of one agent, links are plain TCP on loopback; between agents, TLS 1.3 with the key of the other
rank's agent pinned. In both cases, both ends prove that they have the epoch's key.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ..admission_counter import AdmissionCounter
from ..errors import Code, LinkError, MlxtpError, ProtocolError
from ..wire import tls
from ..wire.blocking import BlockingLink, connect
from ..wire.messages import PROTOCOL_VERSION, Bootstrap, Hello, Welcome, hello_proof, verify, welcome_proof
from ..wire.session import LinkKind, Session, Side

SEND_TIMEOUT_S = 5.0
HANDSHAKE_S = 3.0
FASTER_S = 3.0  #: for each address of rank 0 before the last one
MAX_STRANGERS = 32  # most connections under check at a time; more are closed at once
MAX_STRANGERS_PER_SOURCE = 2  # the same from one address, other than this machine's own
_ACCEPT_TICK_S = 0.05

Socket = socket.socket | tls.TlsSocket


@dataclass(frozen=True, slots=True)
class Epoch:
    number: int
    bootstrap: Bootstrap
    credentials: tls.Credentials | None

    def hello(self) -> Hello:
        b, nonce = self.bootstrap, os.urandom(16)
        proof = hello_proof(b.epoch_key, self.number, b.rank, nonce)
        return Hello(PROTOCOL_VERSION, b.rank, os.getpid(), nonce, proof)

    def welcome(self, hello: Hello) -> Welcome:
        proof = welcome_proof(self.bootstrap.epoch_key, self.number, hello.rank, hello.nonce)
        return Welcome(PROTOCOL_VERSION, proof)

    def check_pin(self, sock: Socket, rank: int) -> None:
        """Check that the peer is the agent of `rank`. Raises ProtocolError (NOT_AUTHENTIC)."""
        pins = self.bootstrap.pins
        if pins and (isinstance(sock, socket.socket) or tls.peer_identity(sock).fingerprint != pins[rank]):
            raise ProtocolError(f"the peer that claims rank {rank} has another key", Code.NOT_AUTHENTIC)


def open_links(
    number: int, bootstrap: Bootstrap, listener: socket.socket | None, identity: Path | None
) -> dict[int, BlockingLink]:
    """Open this rank's decode links, by the rank at the other end. `identity`: folder of this node's key.

    Raises LinkError (LINK_TIMEOUT), or ProtocolError (NOT_AUTHENTIC) if the peer is not rank 0.
    """
    if bootstrap.world_size == 1:
        return {}
    credentials = tls.Credentials.of(identity) if bootstrap.pins and identity is not None else None
    epoch = Epoch(number, bootstrap, credentials)
    if bootstrap.rank:
        return {0: _connect(epoch)}
    assert listener is not None
    return _Reception(epoch).accept_all(listener)


class _Reception:
    """Rank 0's side. A thread checks each connection, so a silent stranger delays no rank."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._context = None
        if epoch.credentials is not None:
            self._context = tls.member_context_server(epoch.credentials, (tls.ALPN_DECODE,))
        self._taking = threading.Lock()
        self._strangers = AdmissionCounter(MAX_STRANGERS, MAX_STRANGERS_PER_SOURCE)
        self._links: dict[int, BlockingLink] = {}

    def accept_all(self, listener: socket.socket) -> dict[int, BlockingLink]:
        bootstrap = self._epoch.bootstrap
        ends_at = time.monotonic() + bootstrap.deadline_s
        listener.settimeout(_ACCEPT_TICK_S)
        with contextlib.closing(listener):
            while len(self._links) < bootstrap.world_size - 1:
                if time.monotonic() > ends_at:
                    missing = sorted(set(range(1, bootstrap.world_size)) - set(self._links))
                    detail = f"ranks {missing} did not connect within {bootstrap.deadline_s:g} s"
                    raise LinkError(detail, Code.LINK_TIMEOUT)
                with contextlib.suppress(TimeoutError, ConnectionError):  # the peer may have left again
                    sock, address = listener.accept()
                    self._begin(sock, str(address[0]))
        return self._links

    def _begin(self, sock: socket.socket, source: str) -> None:
        with self._taking:
            if self._strangers.admit(source, exempt=_is_here(source)):
                sock.close()
                return
        threading.Thread(target=self._judge, args=(sock, source), daemon=True).start()

    def _judge(self, sock: socket.socket, source: str) -> None:
        try:
            self._let_in(sock)
        except (MlxtpError, OSError):
            sock.close()  # a peer that fails is a stranger; keep waiting for the real ranks
        finally:
            with self._taking:
                self._strangers.release(source)

    def _let_in(self, sock: socket.socket) -> None:
        secured: Socket = sock
        if self._context is not None:
            secured = tls.wrap_blocking(sock, self._context, server_side=True, handshake_s=HANDSHAKE_S)
        link = BlockingLink(secured, Session(LinkKind.DECODE, Side.UPPER, self._epoch.number), SEND_TIMEOUT_S)
        hello = self._checked(_first(link, HANDSHAKE_S), secured)
        with self._taking:
            if hello.rank in self._links:
                raise ProtocolError(f"rank {hello.rank} is here already", Code.NOT_AUTHENTIC)
            link.send(self._epoch.welcome(hello))
            self._links[hello.rank] = link

    def _checked(self, hello: object, sock: Socket) -> Hello:
        epoch = self._epoch
        if not isinstance(hello, Hello) or not 0 < hello.rank < epoch.bootstrap.world_size:
            raise ProtocolError("the greeting does not name a rank of this group", Code.NOT_AUTHENTIC)
        epoch.check_pin(sock, hello.rank)
        expected = hello_proof(epoch.bootstrap.epoch_key, epoch.number, hello.rank, hello.nonce)
        if not verify(expected, hello.proof):
            raise ProtocolError(f"rank {hello.rank} does not know this epoch's key", Code.NOT_AUTHENTIC)
        return hello


def _is_here(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback  # ranks of this agent, not strangers


def _connect(epoch: Epoch) -> BlockingLink:
    *faster, last = epoch.bootstrap.decode_address.split(",")
    for address in faster:
        with contextlib.suppress(MlxtpError):
            return _connect_to(address, FASTER_S, epoch)
    return _connect_to(last, epoch.bootstrap.deadline_s, epoch)


def _connect_to(address: str, deadline_s: float, epoch: Epoch) -> BlockingLink:
    sock: Socket = connect(address, deadline_s)
    try:
        if epoch.credentials is not None:
            assert isinstance(sock, socket.socket)
            context = tls.member_context_client(epoch.credentials, tls.ALPN_DECODE)
            sock = tls.wrap_blocking(sock, context, server_side=False, handshake_s=deadline_s)
        epoch.check_pin(sock, 0)
        link = BlockingLink(sock, Session(LinkKind.DECODE, Side.LOWER, epoch.number), SEND_TIMEOUT_S)
        hello = epoch.hello()
        link.send(hello)
        welcome = _first(link, epoch.bootstrap.deadline_s)
        if not isinstance(welcome, Welcome) or not verify(epoch.welcome(hello).proof, welcome.proof):
            detail = "the peer at rank 0's address does not know this epoch's key"
            raise ProtocolError(detail, Code.NOT_AUTHENTIC)
        return link
    except BaseException:
        sock.close()  # do not keep a peer waiting that is not rank 0
        raise


def _first(link: BlockingLink, timeout_s: float) -> object:
    batch = link.receive(timeout_s)
    if len(batch) != 1:
        raise LinkError(f"{len(batch)} frames where one greeting was expected")
    return batch[0].message
