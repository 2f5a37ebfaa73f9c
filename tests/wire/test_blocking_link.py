"""The blocking shell over real sockets: what it adds is waiting, so that is what is tested."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from mlxtp.errors import Code, LinkError, LocalProtocolError, MlxtpError, RemoteProtocolError
from mlxtp.wire.blocking import BlockingLink, connect, listen
from mlxtp.wire.frames import encode
from mlxtp.wire.messages import Ack, Delta, Forward, Generate, Ping, SessionEnd
from mlxtp.wire.session import LinkKind, LinkState, Received
from mlxtp.wire.tls import ALPN_DECODE, TlsSocket, member_context_client, member_context_server, wrap_blocking

from .forwards import of_prompt
from .members import founder, member_of
from .walk import EPOCH, Pair, pair_in

T = TypeVar("T")

TIMEOUT_S = 5.0
"""Far longer than anything here takes: a test that reaches it fails."""


def in_background(act: Callable[..., T], *args: object) -> Future[T]:
    """`act` in a thread of its own, which a test that fails does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act(*args))
        except MlxtpError as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Joined:
    """Two links over a socket pair, in LOADED with uid 1 live. `upper_sock` is the upper side's socket."""

    def __init__(self, pair: Pair, upper_sock: Any, lower_sock: Any, upper_timeout_s: float) -> None:
        self.upper_sock, self.lower_sock = upper_sock, lower_sock
        self.upper = BlockingLink(upper_sock, pair.upper, upper_timeout_s)
        self.lower = BlockingLink(lower_sock, pair.lower, TIMEOUT_S)


class Join(Protocol):
    def __call__(self, kind: LinkKind, state: LinkState = ..., upper_timeout_s: float = ...) -> Joined: ...


@pytest.fixture(params=["plain", pytest.param("tls", marks=pytest.mark.slow)])
def join(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Join]:
    """A maker of links: a `BlockingLink` must not notice what carries it."""
    made: list[Joined] = []

    def joined(
        kind: LinkKind, state: LinkState = LinkState.LOADED, upper_timeout_s: float = TIMEOUT_S
    ) -> Joined:
        ends: Any = socket.socketpair() if request.param == "plain" else secured(tmp_path)
        made.append(Joined(pair_in(kind, state), *ends, upper_timeout_s))
        return made[-1]

    yield joined
    for each in made:
        each.upper.close()
        each.lower.close()


def secured(folder: Path) -> tuple[TlsSocket, TlsSocket]:
    """Sockets of two members of a cluster."""
    first = founder(folder)
    second = member_of(first, folder)
    server = member_context_server(first.credentials, [ALPN_DECODE])
    client = member_context_client(second.credentials, ALPN_DECODE)
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.settimeout(TIMEOUT_S)
    accepting = in_background(lambda: wrap_blocking(ours, server, server_side=True))
    return wrap_blocking(theirs, client, server_side=False), accepting.result(TIMEOUT_S)


@pytest.fixture
def decode(join: Join) -> Joined:
    return join(LinkKind.DECODE)


@pytest.fixture
def pipe(join: Join) -> Joined:
    return join(LinkKind.PIPE_LEADER)


def test_a_step_and_its_ack(decode: Joined) -> None:
    seq = decode.upper.send(Forward((1,), (2,)))
    assert decode.lower.receive() == [Received(seq, Forward((1,), (2,)))]
    decode.lower.send(Ack(seq, 1, 1, 0))
    ((_, ack),) = decode.upper.receive()
    assert ack == Ack(seq, 1, 1, 0)


def test_a_frame_larger_than_the_socket_buffers(decode: Joined) -> None:
    tokens = tuple(range(500_000))
    received = in_background(decode.lower.receive)
    decode.upper.send(of_prompt(2, 0, len(tokens), tokens))
    ((_, prompt),) = received.result(TIMEOUT_S)
    assert prompt == of_prompt(2, 0, len(tokens), tokens)


def test_the_end_in_order(join: Join) -> None:
    joined = join(LinkKind.PIPE, LinkState.ENDED)
    joined.lower.send(SessionEnd())
    joined.lower.close()
    ((_, message),) = joined.upper.receive()
    assert message == SessionEnd()
    assert joined.upper.receive() == joined.upper.receive(timeout_s=TIMEOUT_S) == []


def test_a_peer_that_is_gone(decode: Joined) -> None:
    decode.upper.send(Forward((1,), (2,)))  # unread, so that the system resets the connection
    decode.lower.close()
    with pytest.raises(LinkError, match="the rank is gone, in state loaded") as caught:
        decode.upper.receive()
    assert caught.value.code is Code.LINK_LOST
    with pytest.raises(LinkError):
        decode.upper.send(Forward((1,), (2,)))


def test_sending_to_a_peer_that_is_gone(decode: Joined) -> None:
    decode.lower.close()
    with pytest.raises(LinkError) as caught:
        decode.upper.send(Forward((1,), (2,)))
    assert caught.value.code is Code.LINK_LOST


def test_a_peer_that_breaks_a_rule(decode: Joined) -> None:
    decode.lower_sock.sendall(encode(Delta((1,), (0,), (5,)), EPOCH, decode.lower.protocol.seq + 1))
    with pytest.raises(RemoteProtocolError, match="the rank may not send Delta"):
        decode.upper.receive()
    with pytest.raises(RemoteProtocolError, match="the rank may not send Delta"):
        decode.upper.send(Forward((1,), (2,)))


def test_a_rule_that_is_broken_here_sends_nothing(decode: Joined) -> None:
    with pytest.raises(LocalProtocolError):
        decode.lower.send(Delta((1,), (0,), (5,)))
    with pytest.raises(LinkError, match="nothing came"):
        decode.upper.receive(timeout_s=0.05)


def test_a_peer_that_does_not_read(join: Join) -> None:
    joined = join(LinkKind.DECODE, upper_timeout_s=0.2)
    tokens = tuple(range(500_000))
    with pytest.raises(LinkError, match=r"Forward was not taken within 0\.2 s") as caught:
        joined.upper.send(of_prompt(2, 0, len(tokens), tokens))
    assert caught.value.code is Code.LINK_TIMEOUT
    with pytest.raises(LinkError) as caught:
        joined.upper.send(Forward((1,), (2,)))
    assert caught.value.code is Code.LINK_LOST


def test_a_peer_that_does_not_read_can_still_be_heard(pipe: Joined) -> None:
    sending = in_background(pipe.upper.send, Generate(2, tuple(range(500_000)), 9))
    pipe.lower.send(Delta((1,), (0,), (5,)))
    ((_, delta),) = pipe.upper.receive()
    assert delta == Delta((1,), (0,), (5,))
    assert not sending.done()
    pipe.lower.receive()
    sending.result(TIMEOUT_S)


def test_waiting_outlasts_the_send_timeout(join: Join) -> None:
    joined = join(LinkKind.DECODE, upper_timeout_s=0.02)
    received = in_background(joined.upper.receive)
    with pytest.raises(TimeoutError):
        received.result(0.1)
    seq = joined.upper.send(Forward((1,), (2,)))
    joined.lower.receive()
    joined.lower.send(Ack(seq, 1, 1, 0))
    assert len(received.result(TIMEOUT_S)) == 1


def test_receive_with_a_deadline(decode: Joined) -> None:
    decode.lower_sock.sendall(b"\0\0")  # a part of a frame does not extend it
    start = time.monotonic()
    for _ in range(6):
        with pytest.raises(LinkError, match=r"nothing came within 0\.05 s") as caught:
            decode.upper.receive(timeout_s=0.05)
        assert caught.value.code is Code.LINK_TIMEOUT
    assert time.monotonic() - start < TIMEOUT_S


@pytest.mark.parametrize("timeout_s", [None, TIMEOUT_S])
def test_close_wakes_the_reader(decode: Joined, timeout_s: float | None) -> None:
    received = in_background(decode.upper.receive, timeout_s)
    decode.upper.close()
    decode.upper.close()
    assert received.result(TIMEOUT_S) == []
    assert decode.upper.receive(timeout_s) == []
    with pytest.raises(LinkError, match="closed at this end"):
        decode.upper.send(Forward((1,), (2,)))


def test_close_wakes_the_sender(decode: Joined) -> None:
    tokens = tuple(range(500_000))
    sending = in_background(decode.upper.send, of_prompt(2, 0, len(tokens), tokens))
    with pytest.raises(TimeoutError):
        sending.result(0.1)  # it has begun
    decode.upper.close()
    with pytest.raises(LinkError):
        sending.result(TIMEOUT_S)


def test_frames_of_many_threads_do_not_mix(pipe: Joined) -> None:
    count = 200
    seen: list[Received] = []

    def read() -> None:
        while len(seen) < 4 * count:
            seen.extend(pipe.lower.receive())

    reader = threading.Thread(target=read)
    reader.start()
    with ThreadPoolExecutor(4) as pool:
        seqs = [*pool.map(lambda _: pipe.upper.send(Ping()), range(4 * count))]
    reader.join(TIMEOUT_S)
    assert sorted(seqs) == [received.seq for received in seen]


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connect_and_accept(host: str) -> None:
    pair = pair_in(LinkKind.DECODE, LinkState.LOADED)
    try:
        listener = listen(host)
    except OSError:
        pytest.skip(f"{host} is not there")
    assert listener.getsockname()[1] > 1
    with listener:
        ours = connect(address_of(listener), 1.0)
        assert 0 < ours.gettimeout() <= 1
        lower = BlockingLink(ours, pair.lower, TIMEOUT_S)
        sock, _ = listener.accept()
        upper = BlockingLink(sock, pair.upper, TIMEOUT_S)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        upper.send(Forward((1,), (2,)))
        assert len(lower.receive()) == 1
        upper.close()
        lower.close()


def test_connect_waits_for_the_listener() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    with listener:
        connecting = in_background(connect, address_of(listener), TIMEOUT_S)
        with pytest.raises(TimeoutError):
            connecting.result(0.1)
        listener.listen()
        connecting.result(TIMEOUT_S).close()


def test_connect_gives_up() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(LinkError, match="no answer from 127") as caught:
            connect(address_of(closed), 0.1)
    assert caught.value.code is Code.LINK_TIMEOUT


def test_connect_to_no_host() -> None:
    with pytest.raises(LinkError, match="cannot connect to") as caught:
        connect("255.255.255.255:1", TIMEOUT_S)
    assert caught.value.code is Code.LINK_LOST
