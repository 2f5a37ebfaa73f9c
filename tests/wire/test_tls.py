"""TLS between members: who is let through a handshake, and what a blocking socket makes of records."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from mlxtp.errors import Code, LinkError, ProtocolError
from mlxtp.wire.certificates import certificates_to_pem, found, key_to_pem, new_key
from mlxtp.wire.tls import (
    AGENT_ALPNS,
    ALPN_CONTROL,
    ALPN_DECODE,
    ALPN_JOIN,
    Credentials,
    TlsSocket,
    join_context,
    judge_client,
    member_context_client,
    member_context_server,
    peer_identity,
    wrap_blocking,
)

from .members import Member, founder, member_of
from .test_blocking_link import in_background

TIMEOUT_S = 5.0
"""Far longer than anything here takes: a test that reaches it fails."""

Secured = Future[TlsSocket]


@dataclass(frozen=True)
class Cluster:
    """Two members of one cluster, and the founder of another one."""

    first: Member
    second: Member
    stranger: Member
    folder: Path

    def server(self, alpns: Sequence[str] = AGENT_ALPNS) -> ssl.SSLContext:
        return member_context_server(self.first.credentials, alpns)

    def client(self, alpn: str = ALPN_CONTROL) -> ssl.SSLContext:
        return member_context_client(self.second.credentials, alpn)

    def showing(self, key: bytes, *certificates: bytes) -> ssl.SSLContext:
        """A client that shows these certificates and takes any server."""
        credentials = Credentials(self.folder / "key.pem", self.folder / "shown.pem")
        credentials.key.write_bytes(key)
        credentials.member.write_bytes(certificates_to_pem(*certificates))
        context = careless()
        context.load_cert_chain(credentials.member, credentials.key)
        return context


def careless(alpn: str | None = ALPN_CONTROL) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn is not None:
        context.set_alpn_protocols([alpn])
    return context


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    folder = tmp_path_factory.mktemp("members")
    first = founder(folder)
    return Cluster(first, member_of(first, folder), founder(folder), folder)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[Secured, Secured]:
    """The two ends of one connection, or what each of them raised."""
    a, b = socket.socketpair()
    for sock in (a, b):
        sock.settimeout(TIMEOUT_S)
    ends = (
        in_background(lambda: wrap_blocking(a, server, server_side=True)),
        in_background(lambda: wrap_blocking(b, client, server_side=False)),
    )
    for end in ends:
        end.exception(TIMEOUT_S)
    return ends


def refused(end: Secured) -> str:
    error = end.exception(TIMEOUT_S)
    assert isinstance(error, ProtocolError)
    assert error.code is Code.NOT_AUTHENTIC
    return error.detail


def closed(*ends: Secured) -> None:
    for end in ends:
        if end.exception() is None:
            end.result().close()


def test_two_members_know_each_other(cluster: Cluster) -> None:
    server, client = handshake(cluster.server(), cluster.client())
    peer = judge_client(server.result(), "10.0.0.2")
    assert peer.alpn == ALPN_CONTROL
    assert peer.identity == peer_identity(server.result())
    assert peer.identity.node_id == cluster.second.identity.node_id
    assert peer.identity.cluster_id == cluster.first.identity.cluster_id
    assert peer.identity.fingerprint == cluster.second.identity.fingerprint
    assert peer_identity(client.result()).node_id == cluster.first.identity.node_id
    closed(server, client)


def test_a_joiner_shows_nothing_and_may_only_join(cluster: Cluster) -> None:
    server, client = handshake(cluster.server(), join_context())
    peer = judge_client(server.result(), "10.0.0.2")
    assert (peer.alpn, peer.address, peer.identity) == (ALPN_JOIN, "10.0.0.2", None)
    closed(server, client)


def test_who_shows_nothing_cannot_speak_control(cluster: Cluster) -> None:
    server, client = handshake(cluster.server(), careless())
    with pytest.raises(ProtocolError, match="shows no certificate") as caught:
        judge_client(server.result(), "10.0.0.2")
    assert caught.value.code is Code.NOT_AUTHENTIC
    closed(server, client)


@pytest.mark.parametrize("alpn", [None, "http/1.1", ALPN_DECODE])
def test_who_speaks_something_else_is_turned_away(cluster: Cluster, alpn: str | None) -> None:
    server, client = handshake(cluster.server(), careless(alpn))
    with pytest.raises(ProtocolError, match=r"10\.0\.0\.2 speaks none of this port's protocols") as caught:
        judge_client(server.result(), "10.0.0.2")
    assert caught.value.code is Code.NOT_AUTHENTIC
    closed(server, client)


def test_where_no_mac_joins_a_certificate_is_demanded_and_who_has_none_is_told_so(cluster: Cluster) -> None:
    server, client = handshake(cluster.server([ALPN_DECODE]), careless(ALPN_DECODE))
    assert "no TLS 1.3 with it" in refused(server)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):  # its end of the handshake is over
        client.result().recv(100)
    closed(client)
    server, client = handshake(cluster.server([ALPN_DECODE]), cluster.client(ALPN_DECODE))
    assert judge_client(server.result(), "").identity is not None
    closed(server, client)


def made_by_a_member(cluster: Cluster, key: ec.EllipticCurvePrivateKey) -> bytes:
    """A certificate that the second member signed with its own key."""
    member = x509.load_der_x509_certificate(cluster.second.membership.certificate)
    signer = cluster.second.identity.key
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(member.subject)
        .issuer_name(member.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(member.not_valid_before_utc)
        .not_valid_after(member.not_valid_after_utc)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issuer, critical=False)
        .sign(signer, hashes.SHA256())
        .public_bytes(Encoding.DER)
    )


def test_only_what_the_clusters_authority_made_is_taken(cluster: Cluster) -> None:
    theirs, second, key = cluster.stranger, cluster.second, new_key()
    impostor = found(cluster.first.identity.cluster_id, new_key())  # an authority of the same name
    forged = impostor.certify(second.identity.node_id, key.public_key())
    member = made_by_a_member(cluster, key)
    for own, *shown in (
        (theirs.identity.key, theirs.membership.certificate),
        (key, forged),
        (key, forged, impostor.certificate),
        (key, member, second.membership.certificate, cluster.first.authority.certificate),
    ):
        server, client = handshake(cluster.server(), cluster.showing(key_to_pem(own), *shown))
        assert "its certificate is not of this cluster" in refused(server)
        closed(client)


def test_a_server_of_another_cluster(cluster: Cluster) -> None:
    server, client = handshake(
        cluster.server(), member_context_client(cluster.stranger.credentials, ALPN_CONTROL)
    )
    assert "its certificate is not of this cluster" in refused(client)
    refused(server)


@pytest.mark.parametrize("side", ["server", "client"])
def test_nothing_older_than_tls_1_3(cluster: Cluster, side: str) -> None:
    server, client = cluster.server(), cluster.client()
    older = careless() if side == "client" else cluster.server()
    older.minimum_version = ssl.TLSVersion.TLSv1_2
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    ends = handshake(server, older) if side == "client" else handshake(older, client)
    for end in ends:
        assert "no TLS 1.3 with it" in refused(end)


def test_no_session_is_resumed(cluster: Cluster) -> None:
    context = cluster.client()
    for _ in range(2):
        server, client = handshake(cluster.server(), context)
        server.result().sendall(b"hello")
        assert client.result().recv(100) == b"hello"
        session = client.result()._tls.session
        assert not session.has_ticket
        closed(server, client)


def test_only_the_clusters_authority_counts(cluster: Cluster) -> None:
    for context in (cluster.server(), cluster.client()):
        (authority,) = context.get_ca_certs(binary_form=True)
        assert authority == cluster.first.authority.certificate
    assert join_context().get_ca_certs() == []


@pytest.mark.parametrize("garbage", [b"", b"text"])
def test_files_that_tls_cannot_use(cluster: Cluster, tmp_path: Path, garbage: bytes) -> None:
    good = cluster.first.credentials
    bad = tmp_path / "bad.pem"
    bad.write_bytes(garbage)
    for credentials in (
        Credentials(bad, good.member),
        Credentials(good.key, bad),
        Credentials(good.key, tmp_path / "missing"),
        Credentials(cluster.second.credentials.key, good.member),
    ):
        with pytest.raises(ProtocolError, match="cannot be used") as caught:
            member_context_client(credentials, ALPN_CONTROL)
        assert caught.value.code is Code.NOT_AUTHENTIC


def shaking(cluster: Cluster, sock: socket.socket, handshake_s: float) -> Secured:
    return in_background(
        lambda: wrap_blocking(sock, cluster.server(), server_side=True, handshake_s=handshake_s)
    )


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_has_a_deadline(cluster: Cluster, sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(sent)
    start = time.monotonic()
    error = shaking(cluster, ours, 0.1).exception(TIMEOUT_S)
    assert isinstance(error, LinkError)
    assert error.code is Code.LINK_TIMEOUT
    assert 0.1 <= time.monotonic() - start < TIMEOUT_S
    assert theirs.recv(10) == b""
    theirs.close()


def test_bytes_that_drip_do_not_extend_it(cluster: Cluster) -> None:
    ours, theirs = socket.socketpair()
    end = shaking(cluster, ours, 0.2)
    with contextlib.suppress(OSError):
        for byte in b"\x16\x03\x01\x02\x00" + b"\1" * 1000:
            theirs.sendall(bytes((byte,)))
            if end.done():
                break
            with contextlib.suppress(TimeoutError):
                end.exception(0.01)
    assert end.exception(TIMEOUT_S) is not None
    theirs.close()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"SSH-2.0-x\r\n"])
def test_who_speaks_no_tls_is_refused_at_once_by_its_address(cluster: Cluster, noise: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, (host, port) = listener.accept()
        theirs.sendall(noise)
        assert refused(shaking(cluster, ours, TIMEOUT_S)).startswith(f"{host}:{port}: no TLS 1.3 with it")
        theirs.close()


def test_a_peer_that_hangs_up(cluster: Cluster) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"\x16\x03\x01")
    theirs.close()
    error = shaking(cluster, ours, TIMEOUT_S).exception(TIMEOUT_S)
    assert isinstance(error, LinkError)
    assert (error.code, error.detail) == (Code.LINK_LOST, "the peer: cannot connect: it hung up")


class Wire:
    """A server's and a client's end, and in between a test that decides when bytes arrive."""

    def __init__(self, cluster: Cluster) -> None:
        server_sock, self.to_server = socket.socketpair()
        client_sock, self.to_client = socket.socketpair()
        for sock in (server_sock, client_sock):
            sock.settimeout(TIMEOUT_S)
        server = in_background(lambda: wrap_blocking(server_sock, cluster.server(), server_side=True))
        client = in_background(lambda: wrap_blocking(client_sock, cluster.client(), server_side=False))
        self.carry(self.to_client, self.to_server)
        self.carry(self.to_server, self.to_client)
        self.client = client.result(TIMEOUT_S)
        self.client.sendall(b"early")
        # The client's last words of the handshake and its first data arrive together.
        self.carry(self.to_client, self.to_server)
        self.server = server.result(TIMEOUT_S)

    def carry(self, source: socket.socket, target: socket.socket) -> None:
        target.sendall(self.taken(source))

    def taken(self, source: socket.socket) -> bytes:
        """All that is on its way here now; it must be something."""
        source.settimeout(TIMEOUT_S)
        return source.recv(1 << 20)

    def close(self) -> None:
        for end in (self.client, self.server, self.to_client, self.to_server):
            end.close()


@pytest.fixture
def wire(cluster: Cluster) -> Iterator[Wire]:
    joined = Wire(cluster)
    yield joined
    joined.close()


def readable(sock: TlsSocket | socket.socket) -> bool:
    return bool(select.select([sock.fileno()], [], [], 0)[0])


def test_what_came_with_the_handshake_is_still_to_be_read(wire: Wire) -> None:
    assert readable(wire.server), "or a poll would wait for ever for what is there already"
    assert wire.server.recv(100) == b"early"
    assert not readable(wire.server)


def record_to_server(wire: Wire, data: bytes) -> bytes:
    """Return what `data` looks like on its way from client to server, if nothing else is there."""
    assert wire.server.recv(100) == b"early"
    wire.client.sendall(data)
    return wire.taken(wire.to_client)


def test_a_record_in_parts(wire: Wire) -> None:
    record = record_to_server(wire, b"whole")
    for part in (record[:3], record[3:-1]):
        wire.to_server.sendall(part)
        with pytest.raises(TimeoutError, match="only part of a record"):
            wire.server.recv(100)
        assert not readable(wire.server)
    wire.to_server.sendall(record[-1:])
    assert wire.server.recv(100) == b"whole"


def test_whole_records_and_a_part_of_another(wire: Wire) -> None:
    records = record_to_server(wire, b"x" * 20_000)  # as two of them
    wire.to_server.sendall(records[:-1])
    assert wire.server.recv(1 << 16) == b"x" * 16_384
    wire.to_server.sendall(records[-1:])
    assert wire.server.recv(1 << 16) == b"x" * 3_616


def damaged(record: bytes) -> bytes:
    return record[:-1] + bytes((record[-1] ^ 1,))


@pytest.mark.parametrize("change", [damaged, lambda record: record + record, lambda record: record[5:]])
def test_a_record_that_was_changed_or_sent_twice(wire: Wire, change: Callable[[bytes], bytes]) -> None:
    wire.to_server.sendall(change(record_to_server(wire, b"x" * 100)))
    with pytest.raises(ssl.SSLError):
        wire.server.recv(1 << 16)
    wire.client.sendall(b"and now the right one")
    wire.carry(wire.to_client, wire.to_server)
    with pytest.raises(ssl.SSLError):  # it is over for good
        wire.server.recv(1 << 16)


@dataclass
class Ends:
    server: TlsSocket
    client: TlsSocket

    def close(self) -> None:
        self.server.close()
        self.client.close()


@pytest.fixture
def ends(cluster: Cluster) -> Iterator[Ends]:
    server, client = handshake(cluster.server(), cluster.client())
    joined = Ends(server.result(), client.result())
    yield joined
    joined.close()


@pytest.mark.parametrize("size", [1, 100, 4096, 1 << 20])
def test_nothing_that_is_decrypted_stays_behind(ends: Ends, size: int) -> None:
    data = bytes(range(256)) * 200  # several records, all of which the socket holds
    ends.client.sendall(data)
    received = b""
    while readable(ends.server):
        with contextlib.suppress(TimeoutError):
            received += ends.server.recv(size)
    assert received == data


def test_the_end_with_and_without_a_goodbye(ends: Ends) -> None:
    ends.client.sendall(b"last words")
    ends.client.close()
    assert ends.server.recv(100) == b"last words"
    assert ends.server.recv(100) == b""
    assert ends.server.recv(100) == b""


def test_a_goodbye_from_a_peer_that_does_not_hang_up(ends: Ends) -> None:
    ends.client.sendall(b"last words")
    with contextlib.suppress(ssl.SSLWantReadError):
        ends.client._tls.unwrap()
    ends.client._sock.sendall(ends.client._outgoing.read())
    assert ends.server.recv(100) == b"last words"
    assert ends.server.recv(100) == b""
    assert readable(ends.server)


class Watched:
    """OpenSSL's object, and whether two threads were in it at once."""

    def __init__(self, tls: ssl.SSLObject) -> None:
        self._tls = tls
        self._inside = threading.Lock()
        self.crowded = False

    def _alone(self, act: Callable[..., object], *arguments: object) -> object:
        if not self._inside.acquire(blocking=False):
            self.crowded = True
            raise AssertionError("two threads in one OpenSSL object")
        try:
            return act(*arguments)
        finally:
            self._inside.release()

    def read(self, size: int) -> object:
        return self._alone(self._tls.read, size)

    def write(self, data: bytes) -> object:
        return self._alone(self._tls.write, data)


def test_megabytes_in_both_directions_at_once(ends: Ends) -> None:
    """Each end reads with one thread while another sends, and OpenSSL sees one of them at a time."""
    watched = []
    for end in (ends.server, ends.client):
        watched.append(Watched(end._tls))
        end._tls = watched[-1]  # type: ignore[assignment]
    sent = {id(ends.server): b"s" * (8 << 20), id(ends.client): b"c" * (8 << 20)}

    def send(end: TlsSocket) -> None:
        data = sent[id(end)]
        for start in range(0, len(data), 1 << 20):
            end.sendall(data[start : start + (1 << 20)])

    def receive(end: TlsSocket, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            with contextlib.suppress(TimeoutError):
                received += end.recv(1 << 16)
        return bytes(received)

    readings = [in_background(receive, end, 8 << 20) for end in (ends.server, ends.client)]
    sendings = [in_background(send, end) for end in (ends.server, ends.client)]
    for sending in sendings:
        sending.result(TIMEOUT_S)
    assert readings[0].result(TIMEOUT_S) == sent[id(ends.client)]
    assert readings[1].result(TIMEOUT_S) == sent[id(ends.server)]
    assert not any(one.crowded for one in watched)


class Slow:
    """A socket on which one thread waits for another one to overtake it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._meeting = threading.Barrier(2)

    def sendall(self, data: bytes) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._meeting.wait(0.1)
            raise AssertionError("overtaken")
        self._sock.sendall(data)

    def close(self) -> None:
        self._sock.close()


def test_records_leave_in_the_order_in_which_they_were_made(ends: Ends) -> None:
    ends.client._sock = Slow(ends.client._sock)  # type: ignore[assignment]
    sending = [in_background(ends.client.sendall, data) for data in (b"one", b"two")]
    for one in sending:
        one.result(TIMEOUT_S)
    received = read_some(ends.server)
    if len(received) < 6:
        received += read_some(ends.server)
    assert received in (b"onetwo", b"twoone")


def read_some(sock: TlsSocket) -> bytes:
    while True:
        with contextlib.suppress(TimeoutError):
            return sock.recv(1 << 16)
