"""Decode links as rank 0 opens them while strangers are about: real sockets, real TLS, ranks in threads."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import delayed_worker
from benchmarks.delay import Delay
from mlxtp.engine import decode_links
from mlxtp.engine.decode_links import MAX_STRANGERS, open_links
from mlxtp.errors import Code, LinkError, ProtocolError
from mlxtp.wire.blocking import BlockingLink, listen
from mlxtp.wire.frames import encode
from mlxtp.wire.messages import (
    PROTOCOL_VERSION,
    Ack,
    Bootstrap,
    Hello,
    Init,
    InitDone,
    Message,
    Welcome,
    hello_proof,
    welcome_proof,
)
from mlxtp.wire.tls import ALPN_DECODE, member_context_client, member_context_server

from ..live_cluster import WAIT_S
from ..wire.members import Member, founder, member_of
from .tables import refused

pytestmark = pytest.mark.slow

EPOCH = 7
KEY = b"k" * 32
Links = dict[int, BlockingLink]


class Group:
    """The Macs of a group in rank order, and one more that is a member of the cluster and of no rank."""

    def __init__(self, folder: Path, size: int = 2, *, pinned: bool = True) -> None:
        self.listener = listen("127.0.0.1")
        self.port = self.listener.getsockname()[1]
        self.macs: list[Member] = []
        if pinned:
            first = founder(folder)
            self.macs = [first, *(member_of(first, folder) for _ in range(size - 1))]
            self.outsider = member_of(first, folder)
        pins = tuple(mac.identity.fingerprint for mac in self.macs)
        address, hosts = f"127.0.0.1:{self.port}", ("",) * size
        self.bootstrap = Bootstrap(0, size, "ring", hosts, address, KEY, WAIT_S, 1.0, 1, pins=pins)
        self._threads = ThreadPoolExecutor()
        self._links: list[Future[Links]] = []

    def rank(
        self, rank: int, *, mac: Member | None = None, epoch: int = EPOCH, **changes: object
    ) -> Future[Links]:
        """A rank opens its links as `engine/worker.py` has it do, on its own Mac or another."""
        bootstrap = replace(self.bootstrap, rank=rank, **changes)  # type: ignore[arg-type]
        mac = mac or (self.macs[rank] if self.macs else None)
        identity = mac.store.folder if mac is not None else None
        listener = self.listener if rank == 0 else None
        links = self._threads.submit(open_links, epoch, bootstrap, listener, identity)
        self._links.append(links)
        return links

    def knock(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def close(self) -> None:
        self._threads.shutdown()
        for links in self._links:
            if links.exception() is None:
                for link in links.result().values():
                    link.close()
        self.listener.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with contextlib.closing(Group(tmp_path)) as made:
        yield made


@contextlib.contextmanager
def of_one_agent(folder: Path, size: int = 2) -> Iterator[Group]:
    """Ranks that need no certificates."""
    with contextlib.closing(Group(folder, size, pinned=False)) as made:
        yield made


def joined(zero: Future[Links], *others: Future[Links]) -> None:
    """All are there, and what rank 0 sends to each arrives at that one."""
    links = zero.result(WAIT_S)
    assert sorted(links) == list(range(1, len(others) + 1))
    for rank, other in enumerate(others, 1):
        [theirs] = other.result(WAIT_S).values()
        links[rank].send(Init())
        [received] = theirs.receive(WAIT_S)
        assert received.message == Init()
        theirs.send(InitDone(rank, len(others) + 1))
        [answer] = links[rank].receive(WAIT_S)
        assert answer.message == InitDone(rank, len(others) + 1)


def hello(rank: int = 1, key: bytes = KEY, epoch: int = EPOCH) -> Hello:
    nonce = os.urandom(16)
    return Hello(PROTOCOL_VERSION, rank, 1, nonce, hello_proof(key, epoch, rank, nonce))


def closed(sock: socket.socket) -> bool:
    """Return whether the other end hangs up without a message."""
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_ranks_of_several_macs_find_each_other(tmp_path: Path) -> None:
    with contextlib.closing(Group(tmp_path, 4)) as group:
        others = [group.rank(rank) for rank in (3, 1, 2)]
        joined(group.rank(0), others[1], others[2], others[0])


def test_the_next_address_of_rank_0_is_tried_where_the_faster_one_is_of_no_use(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cable is out, or another machine has that address on a network of its own."""
    monkeypatch.setattr(decode_links, "FASTER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        ports = (1, stranger.getsockname()[1], group.port)
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        joined(group.rank(0), group.rank(1, decode_address=addresses))


def test_the_benchmark_delays_both_ends_of_every_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_links, "BlockingLink", BlockingLink)  # is put back afterwards
    delay = Delay(tmp_path / "delay")
    delay.set(0.1)
    delayed_worker.delay_links(delay)
    began = time.monotonic()
    with of_one_agent(tmp_path) as group:
        joined(group.rank(0), group.rank(1))
    assert time.monotonic() - began > 4 * 0.1  # Hello, Welcome, Init, InitDone


def test_what_passes_between_macs_cannot_be_read(group: Group) -> None:
    """A tap on the wire between them sees neither the greeting nor what follows."""
    tap = listen("127.0.0.1")
    seen = bytearray()

    def pass_on() -> None:
        with tap, tap.accept()[0] as one, group.knock() as other, ThreadPoolExecutor() as ways:
            ways.submit(copy, one, other)
            ways.submit(copy, other, one)

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                seen.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with ThreadPoolExecutor() as threads:
        threads.submit(pass_on)
        zero, one = group.rank(0), group.rank(1, decode_address=f"127.0.0.1:{tap.getsockname()[1]}")
        joined(zero, one)
        for links in (zero, one):
            for link in links.result().values():
                link.close()
    assert len(seen) > 1000
    assert b"proof" not in seen
    assert b"world_size" not in seen


def test_another_member_of_the_cluster_is_no_rank_though_it_knows_everything(group: Group) -> None:
    """Its certificate is good and it has the epoch's key, but the agent of rank 1 has another one."""
    zero = group.rank(0)
    impostor = group.rank(1, mac=group.outsider)
    with pytest.raises(LinkError):
        impostor.result(WAIT_S)
    joined(zero, group.rank(1))


def test_a_rank_gives_its_proof_to_rank_0_alone(group: Group) -> None:
    """A process that listens in rank 0's place is a member, too; it gets not one frame."""
    context = member_context_server(group.outsider.credentials, (ALPN_DECODE,))
    one = group.rank(1)
    with group.listener.accept()[0] as sock:
        sock.settimeout(WAIT_S)
        with context.wrap_socket(sock, server_side=True) as secured:
            assert closed(secured)
        with refused(ProtocolError, Code.NOT_AUTHENTIC, "the peer that claims rank 0 has another key"):
            one.result(WAIT_S)


def test_pins_are_never_left_aside(group: Group) -> None:
    """Without its certificate a rank does not fall back to what anybody could read."""

    def plain() -> bytes:
        with group.listener.accept()[0] as sock:
            return sock.recv(1)

    with ThreadPoolExecutor() as threads:
        accepted = threads.submit(plain)
        with pytest.raises(ProtocolError, match="has another key"):
            open_links(EPOCH, replace(group.bootstrap, rank=1), None, None)
        assert accepted.result(WAIT_S) == b""


@pytest.mark.parametrize(
    "greeting",
    [
        *(hello(key=b"x" * 32), hello(epoch=EPOCH + 1), hello(rank=0), hello(rank=2)),
        *(replace(hello(), rank=7), replace(hello(), proof=b""), Ack(1, 1, 1, 0)),
    ],
    ids=["another key", "another epoch's", "rank 0", "rank 2 of 2", "rank 7", "no proof", "no hello"],
)
def test_a_greeting_that_proves_nothing(tmp_path: Path, greeting: Message) -> None:
    with of_one_agent(tmp_path) as group:
        zero = group.rank(0)
        with group.knock() as sock:
            sock.sendall(encode(greeting, EPOCH, 1))
            assert closed(sock)
        joined(zero, group.rank(1))


def test_a_second_rank_1_does_not_take_the_place_of_the_first(tmp_path: Path) -> None:
    with of_one_agent(tmp_path, 3) as group:
        zero, one = group.rank(0), group.rank(1)
        one.result(WAIT_S)
        with group.knock() as sock:
            sock.sendall(encode(hello(), EPOCH, 1))
            assert closed(sock)
        joined(zero, one, group.rank(2))


def test_who_answers_without_the_epoch_s_key_is_not_rank_0(tmp_path: Path) -> None:
    with of_one_agent(tmp_path) as group:
        one = group.rank(1)
        with group.listener.accept()[0] as sock:
            sock.recv(65536)
            welcome = Welcome(PROTOCOL_VERSION, welcome_proof(b"x" * 32, EPOCH, 1, bytes(16)))
            sock.sendall(encode(welcome, EPOCH, 1))
            with pytest.raises(ProtocolError, match="does not know this epoch's key"):
                one.result(WAIT_S)


def test_strangers_hold_up_no_rank(group: Group) -> None:
    """As many as may be judged at one time, minus one: some silent, some loud, some without TLS."""
    zero = group.rank(0)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(group.knock()) for _ in range(MAX_STRANGERS - 1)]
        for sock in strangers[::3]:
            sock.sendall(os.urandom(2000))
        for sock in strangers[1::3]:
            sock.sendall(encode(hello(), EPOCH, 1))
        joined(zero, group.rank(1))


def test_a_member_of_another_cluster_gets_no_word_in(group: Group, tmp_path: Path) -> None:
    zero = group.rank(0)
    context = member_context_client(founder(tmp_path).credentials, ALPN_DECODE)
    context.verify_mode = ssl.CERT_NONE
    with group.knock() as sock, contextlib.suppress(OSError), context.wrap_socket(sock) as secured:
        secured.sendall(encode(hello(), EPOCH, 1))
        assert closed(secured)
    joined(zero, group.rank(1))


def test_too_many_strangers_are_closed_unheard_and_their_places_come_back(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_links, "MAX_STRANGERS", 3)
    monkeypatch.setattr(decode_links, "HANDSHAKE_S", 2 * WAIT_S)
    zero = group.rank(0)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(group.knock()) for _ in range(3)]
        extra = stack.enter_context(group.knock())
        assert closed(extra)
        for sock in held:
            sock.close()
    while True:  # until the threads have noticed
        with group.knock() as sock:
            sock.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                assert sock.recv(1) == b""
                continue
            break
    joined(zero, group.rank(1))


def test_one_address_of_the_network_may_not_fill_all_places(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_links, "_is_here", lambda _: False)
    monkeypatch.setattr(decode_links, "HANDSHAKE_S", 2 * WAIT_S)
    zero = group.rank(0)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(group.knock())
        for _ in range(5):
            assert closed(stack.enter_context(group.knock()))
        monkeypatch.setattr(decode_links, "_is_here", lambda _: True)  # the rank comes from another one
        joined(zero, group.rank(1))


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with of_one_agent(tmp_path, 4) as group:
        zero = group.rank(0, deadline_s=0.5)
        group.rank(2)
        with refused(LinkError, Code.LINK_TIMEOUT, r"ranks \[1, 3\] did not connect within 0\.5 s"):
            zero.result(WAIT_S)
        with pytest.raises(ConnectionRefusedError):
            group.knock()
