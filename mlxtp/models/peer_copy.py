"""Copies of models between members, over TLS connections of their own, in threads.

The seeder has a model, or is downloading it from the Hub. Each of a copy's few connections carries one file
after the other, as soon as the seeder has it. Both ends authenticate with certificates of the cluster.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import Code, LinkError, MlxtpError, ProtocolError, RemoteProtocolError
from ..wire.blocking import listen
from ..wire.certificates import NodeIdentity
from ..wire.codecs import Message
from ..wire.frames import MAX_FRAME, MAX_OPENING_FRAME, Decoder, encode
from ..wire.peer_messages import FileHeld, FilesHeld, FilesWanted, FileWanted
from ..wire.tls import (
    ALPN_MODELS,
    HANDSHAKE_S,
    Credentials,
    member_context_client,
    member_context_server,
    peer_identity,
)
from .hub_cache import FileQueue, PartialFile, Repo, Stopped, take
from .manifest import Manifest, from_bytes, to_bytes

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

CONNECTIONS = 2  #: Connections per copy. More gain nothing, as Python decrypts in one thread at a time.
MAX_CONNECTIONS = 32  #: Connections that a seeder serves at once.
MAX_PER_MEMBER = 12  #: Connections of one member: four models at once, plus some that are ending.
#: Connections not yet authenticated. One more closes the oldest of the address that has the most.
MAX_STRANGERS = 8
IDLE_S = 60  #: Seconds that the other end may neither send nor read.
#: Seconds that a seeder may take to send STEP_BYTES, or to get new bytes itself.
STEP_S = 300
STEP_BYTES = 4 << 20
AGAIN_S = 1.0  #: Seconds between two requests for the list of files that a seeder has.
_BLOCK_BYTES = 1 << 18
_LENGTH_BYTES = 4  # before each frame

#: Returns the files that a model's copy may have, or None. Called from threads.
Lent = Callable[[str], tuple[Repo, Manifest] | None]


class PeerConnection:
    """One end of a copying connection. Raises LinkError if the other end is gone or silent."""

    def __init__(self, tls: ssl.SSLSocket, limit: int) -> None:
        self._tls = tls
        self._limit = limit
        self._tls.settimeout(IDLE_S)
        self._ends_at = math.inf

    def hurry(self) -> None:
        """Give the other end STEP_S seconds for its replies, until the next call."""
        self._ends_at = time.monotonic() + STEP_S

    def send(self, message: Message) -> None:
        self.send_bytes(encode(message, 0, 0))

    def send_bytes(self, data: bytes | memoryview) -> None:
        try:
            self._tls.sendall(data)
        except OSError as error:
            raise _cut_short(error) from None

    def receive(self, expected: type[M]) -> M:
        """Return the next message. Raises RemoteProtocolError if it is not of this type."""
        message = self.next()
        if not isinstance(message, expected):
            raise RemoteProtocolError(f"{type(message).__name__} where {expected.__name__} was due")
        return message

    def next(self) -> Message:
        """Return the next message without reading past it."""
        decoder, header = Decoder(), self._exactly(_LENGTH_BYTES)
        decoder.limit = self._limit
        decoder.feed(header)
        if (frame := decoder.next_frame()) is None:  # no error: the length is within the limit
            decoder.feed(self._exactly(int.from_bytes(header, "big")))
            frame = decoder.next_frame()
        assert frame is not None
        return frame.message

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        try:
            while view:
                count = self._tls.recv_into(view)
                if not count:
                    raise LinkError("a copy was cut short: the other Mac hung up")
                view = view[count:]
                if time.monotonic() > self._ends_at:
                    raise LinkError(f"nothing new has come for {STEP_S} s", Code.LINK_TIMEOUT)
        except OSError as error:
            raise _cut_short(error) from None

    def close(self) -> None:
        _cut(self._tls)
        self._tls.close()


def connect(addresses: Sequence[str], node_id: str, credentials: Credentials) -> PeerConnection:
    """Connect to the seeder at the first of its addresses ("ip:port") that answers.

    Raises LinkError if none does, ProtocolError (NOT_AUTHENTIC) if another node answers.
    """
    context = member_context_client(credentials, ALPN_MODELS)
    why = "it has no address"
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = context.wrap_socket(sock)
        except OSError as error:
            why = f"{address}: {error}"
            continue
        other = peer_identity(tls).node_id
        if tls.selected_alpn_protocol() != ALPN_MODELS or other != node_id:
            tls.close()
            raise ProtocolError(f"{address} is another node than {node_id[:8]}", Code.NOT_AUTHENTIC)
        return PeerConnection(tls, MAX_FRAME)
    raise LinkError(f"nothing can be copied from there: {why}")


def ask(connection: PeerConnection, model: str) -> tuple[Manifest, FilesHeld]:
    """Return the seeder's manifest of a model, and its whole reply. Raises LinkError if it has nothing."""
    connection.send(FilesWanted(model))
    held = connection.receive(FilesHeld)
    if not held.manifest:
        raise LinkError(f"nothing of {model} is there any more")
    try:
        manifest = from_bytes(held.manifest)
    except ValueError as error:
        raise RemoteProtocolError(f"a manifest that makes no sense: {error}", Code.FIELD_INVALID) from None
    if len(held.complete) != len(manifest.blobs):
        why = f"{len(held.complete)} files were reported, {len(manifest.blobs)} are due"
        raise RemoteProtocolError(why, Code.FIELD_INVALID)
    return manifest, held


def bring(
    connection: PeerConnection, manifest: Manifest, model: str, queue: FileQueue, stopped: Callable[[], bool]
) -> None:
    """Copy files until the queue is empty. Raises LinkError, Damaged, Stopped, OSError."""
    places = {file.hash: place for place, file in enumerate(manifest.blobs)}
    connection.hurry()
    block, held = memoryview(bytearray(_BLOCK_BYTES)), 0
    while queue:
        if stopped():
            raise Stopped
        now, has = ask(connection, model)
        if now != manifest:
            raise LinkError("the other Mac gets another revision by now")
        if has.held != held:
            held = has.held
            connection.hurry()
        there = {each for each, place in places.items() if has.complete[place]}
        while (part := take(queue, there)) is not None:
            _receive(connection, places[part.file.hash], part, block)
        if queue:
            threading.Event().wait(AGAIN_S)  # the seeder does not have it yet either


def _receive(connection: PeerConnection, place: int, part: PartialFile, block: memoryview) -> None:
    at = part.open()
    left = part.file.size - at
    if left:
        connection.hurry()
        connection.send(FileWanted(place, at))
        if connection.receive(FileHeld).size != left:
            raise LinkError(f"{part.file.path} is not there any more")
    while left:
        count = min(left, _BLOCK_BYTES)
        connection.receive_into(block[:count])
        part.write(block[:count])
        left -= count
        if left % STEP_BYTES < _BLOCK_BYTES:
            connection.hurry()
    part.finish()


class PeerServer:
    """Server of models to other members. It calls `may_copy` again for each STEP_BYTES."""

    def __init__(
        self, host: str, credentials: Credentials, lent: Lent, may_copy: Callable[[NodeIdentity], bool]
    ) -> None:
        self._sock = listen(host)
        self.port: int = self._sock.getsockname()[1]
        self._credentials = credentials
        self._lent = lent
        self._may_copy = may_copy
        self._open: dict[socket.socket, str] = {}  #: Authenticated connections, with their node ids.
        #: Connections not yet authenticated, with their addresses, oldest first.
        self._strangers: dict[socket.socket, str] = {}
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        threading.Thread(target=self._accept, name="lender", daemon=True).start()

    def close(self) -> None:
        self._wake.close()
        with self._lock:
            for sock in (*self._open, *self._strangers):
                _cut(sock)

    def _accept(self) -> None:
        with self._sock, self._woken, selectors.DefaultSelector() as ready:
            for each in (self._sock, self._woken):
                ready.register(each, selectors.EVENT_READ)
            while all(key.fileobj is not self._woken for key, _ in ready.select()):
                try:
                    sock, address = self._sock.accept()
                except OSError as error:
                    log.debug("cannot accept a connection for a copy: %s", error)
                    continue
                with self._lock:
                    self._strangers[sock] = str(address[0])
                    if len(self._strangers) > MAX_STRANGERS:
                        counts = Counter(self._strangers.values())
                        surplus = max(self._strangers, key=lambda each: counts[self._strangers[each]])
                        del self._strangers[surplus]
                        _cut(surplus)
                threading.Thread(target=self._attend, args=(sock, str(address[0])), daemon=True).start()

    def _attend(self, sock: socket.socket, address: str) -> None:
        with sock:
            try:
                connection, identity = self._welcome(sock)
                with contextlib.closing(connection):
                    self._serve(connection, identity)
            except (MlxtpError, OSError) as error:
                log.debug("a copy by %s ended: %s", address, error)
            finally:
                with self._lock:
                    self._strangers.pop(sock, None)
                    self._open.pop(sock, None)

    def _welcome(self, sock: socket.socket) -> tuple[PeerConnection, NodeIdentity]:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # One deadline for the whole handshake, because each byte restarts a socket's own timeout.
        hurry = threading.Timer(HANDSHAKE_S, lambda: _cut(sock))
        hurry.start()
        try:
            copy = sock.dup()  # so that `close` can cut `sock` even when this copy is closed
            tls = member_context_server(self._credentials, (ALPN_MODELS,)).wrap_socket(copy, server_side=True)
        finally:
            hurry.cancel()
        identity, why = peer_identity(tls), ""
        may_copy = tls.selected_alpn_protocol() == ALPN_MODELS and self._may_copy(identity)
        with self._lock:
            if not may_copy:
                why = "may not copy here"
            elif len(self._open) >= MAX_CONNECTIONS or sock not in self._strangers:
                why = f"is one more than the {MAX_CONNECTIONS} connections that there may be"
            elif sum(node == identity.node_id for node in self._open.values()) >= MAX_PER_MEMBER:
                why = f"has {MAX_PER_MEMBER} connections, the most of one member"
            else:
                del self._strangers[sock]
                self._open[sock] = identity.node_id
                return PeerConnection(tls, MAX_OPENING_FRAME), identity
        tls.close()
        raise LinkError(f"{identity.node_id[:8]} {why}")

    def _serve(self, connection: PeerConnection, identity: NodeIdentity) -> None:
        lent: tuple[Repo, Manifest] | None = None
        while self._may_copy(identity):
            match connection.next():
                case FilesWanted(model):
                    lent = self._lent(model)
                    connection.send(_held(lent))
                case FileWanted() as wanted if lent is not None:
                    _lend(connection, lent, wanted, lambda: self._may_copy(identity))
                case other:
                    raise RemoteProtocolError(f"{type(other).__name__} is not due here", Code.OUT_OF_ORDER)


def _held(lent: tuple[Repo, Manifest] | None) -> FilesHeld:
    if lent is None:
        return FilesHeld(b"", b"", 0)
    repo, manifest = lent
    complete = bytes(repo.blobs.has(file) for file in manifest.blobs)
    return FilesHeld(to_bytes(manifest), complete, repo.blobs.held_bytes(manifest))


def _lend(
    connection: PeerConnection, lent: tuple[Repo, Manifest], wanted: FileWanted, may_copy: Callable[[], bool]
) -> None:
    repo, files, place, at = lent[0], lent[1].blobs, wanted.file, wanted.at
    if place >= len(files) or at > files[place].size:
        raise RemoteProtocolError(f"no file has the number {place} and a byte {at}", Code.FIELD_INVALID)
    file, block = files[place], memoryview(bytearray(_BLOCK_BYTES))
    try:
        if not repo.blobs.has(file):
            raise FileNotFoundError
        source = repo.blobs.readable(file).open("rb", buffering=0)
    except OSError:
        connection.send(FileHeld(0))
        return
    with source:
        source.seek(at)
        left = file.size - at
        connection.send(FileHeld(left))
        while left:
            count = source.readinto(block[: min(left, _BLOCK_BYTES)])
            if not count:
                raise LinkError(f"{file.path} is shorter than it was")
            connection.send_bytes(block[:count])
            left -= count
            if left % STEP_BYTES < _BLOCK_BYTES and not may_copy():
                raise ProtocolError("it may not copy here any longer", Code.NOT_AUTHENTIC)


def _cut_short(error: OSError) -> LinkError:
    if isinstance(error, TimeoutError):
        return LinkError(f"a copy stood still for {IDLE_S} s", Code.LINK_TIMEOUT)
    return LinkError(f"a copy was cut short: {error}")


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
