"""Clients that keep a connection waiting: real sockets before the real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic

import pytest
from starlette.types import Receive, Scope, Send

from mlxtp.api import request_body
from mlxtp.api import server as http_server
from mlxtp.api.access_log import AccessLog
from mlxtp.api.app import create_app
from mlxtp.api.endpoint import here_and_now, own_tls
from mlxtp.api.request_context import current
from mlxtp.api.request_metrics import RequestMetrics
from mlxtp.api.server import bind, serve
from mlxtp.api.streaming import PARTS_AT_ONCE

from .conftest import BYTE_LEVEL, WAIT_S, FakeBackend, Loaded, forever, says, then

pytestmark = pytest.mark.slow

SOON_S = 0.2
REQUEST = b'{"messages": [{"role": "user", "content": "hello"}], "stream": true}'
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
HEAD = POST % len(REQUEST)
CLOSING = HEAD.replace(b"Host", b"Connection: close\r\nHost")
PLAIN = REQUEST.replace(b"true", b"null")
ENDLESS = 400_000
Room = Callable[[int], None]


class Client:
    """A socket that reads when it is told to. Its own buffer is small."""

    def __init__(self, address: tuple[str, int], source: str) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.bind((source, 0))
        self._socket.connect(address)
        self._socket.setblocking(False)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def read(self, size: int = 65536) -> bytes:
        """Empty at the end, also where the server has cut it off."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, size)
        except ConnectionResetError:
            return b""

    async def rest(self) -> bytes:
        received = b""
        while data := await self.read():
            received += data
        return received

    def close(self) -> None:
        self._socket.close()


@contextlib.asynccontextmanager
async def served(
    backend: FakeBackend,
    *,
    stall_s: float = 60,
    request_s: float = 60,
    body_s: float = 60,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Callable[..., Client]]:
    """What makes clients of a running server."""
    sock, stop = bind("127.0.0.1", 0), asyncio.Event()
    app = AccessLog(create_app(backend, body_s=body_s), RequestMetrics(monotonic))
    limits = {"stall_s": stall_s, "request_s": request_s}
    serving = asyncio.create_task(serve(app, sock, stop, tls=tls, grace_s=1, **limits))
    clients: list[Client] = []

    def connect(source: str = "127.0.0.1") -> Client:
        clients.append(Client(sock.getsockname(), source))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    stop.set()
    await serving


@pytest.fixture
def backend(loaded: dict[str, Loaded]) -> FakeBackend:
    return FakeBackend(loaded[BYTE_LEVEL].text, says([60, 61, 62]))


async def test_who_stops_reading_is_cut_off_and_its_request_cancelled(backend: FakeBackend) -> None:
    backend.scripts = [says([60] * ENDLESS), says([60, 61, 62])]
    async with served(backend, stall_s=SOON_S) as connect:
        deaf, other = connect(), connect()
        await deaf.send(HEAD + REQUEST)
        await deaf.read(100)
        await other.send(CLOSING + REQUEST)
        assert b"[DONE]" in await other.rest()
        closed = backend.answers[0].closed
        assert not backend.answers[0].finished
        await asyncio.to_thread(closed.wait, WAIT_S)
        assert closed.is_set()
        assert not backend.answers[0].finished
        assert b"[DONE]" not in await deaf.rest()


async def test_what_waits_for_a_client_is_bounded(backend: FakeBackend) -> None:
    backend.script = says([60] * ENDLESS)
    async with served(backend, stall_s=10 * SOON_S) as connect:
        deaf = connect()
        await deaf.send(HEAD + REQUEST)
        await asyncio.to_thread(backend.began.wait, WAIT_S)
        received = 0
        for _ in range(100):  # slowly, and for longer than the limit
            received += len(await deaf.read())
            await asyncio.sleep(SOON_S / 8)
        assert not backend.answers[0].closed.is_set()
        assert not backend.answers[0].finished
        await asyncio.to_thread(backend.answers[0].closed.wait, WAIT_S)
        left = len(await deaf.rest())
        assert left < 4 * http_server.UNREAD_BYTES


async def test_a_whole_answer_that_no_client_takes_is_not_kept_for_ever(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "UNREAD_BYTES", 4096)
    backend.script = says([60] * 40_000, step=10_000)  # one write, and less than asyncio calls much
    async with served(backend, stall_s=SOON_S) as connect:
        deaf = connect()
        await deaf.send(HEAD + PLAIN)
        head = await deaf.read(300)
        assert head.startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(3 * SOON_S)
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        assert len(await deaf.rest()) < length - len(head)


async def test_slow_is_not_deaf(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all that waits is taken within the limit, but some of it is, each time."""
    monkeypatch.setattr(http_server, "UNREAD_BYTES", 4096)
    backend.script = says([60] * 300_000, step=10_000)
    async with served(backend, stall_s=5 * SOON_S) as connect:
        slow = connect()
        await slow.send(CLOSING + PLAIN)
        received = b""
        while data := await slow.read(4096):
            received += data
            await asyncio.sleep(SOON_S / 8)
        assert received.endswith(b"}")


async def test_nothing_is_written_to_a_client_that_left_within_a_burst(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps that come together are sent in one go, before the server can see that a client has left.

    asyncio logs a warning for each but the first few.
    """
    sock, stop, asked = bind("127.0.0.1", 0), asyncio.Event(), asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # at once, by a reset
        for _ in range(PARTS_AT_ONCE):
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
        asked.set()

    serving = asyncio.create_task(serve(app, sock, stop, grace_s=1))
    client = socket.create_connection(sock.getsockname())
    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asked.wait()
    stop.set()
    await serving
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", HEAD[:-2] + b"X: "])
async def test_half_a_head_is_not_waited_for_for_ever(backend: FakeBackend, sent: bytes) -> None:
    async with served(backend, request_s=SOON_S) as connect:
        client = connect()
        await client.send(sent)
        assert await client.rest() == b""


async def test_one_byte_now_and_then_extends_no_deadline(backend: FakeBackend) -> None:
    async with served(backend, request_s=5 * SOON_S) as connect:
        client = connect()
        reading = asyncio.create_task(client.rest())
        while not reading.done():
            try:
                await client.send(b"X")
            except OSError:
                break
            await asyncio.sleep(SOON_S / 10)
        assert await reading == b""


async def test_half_a_second_request_is_not_waited_for_for_ever(backend: FakeBackend) -> None:
    async with served(backend, request_s=SOON_S) as connect:
        client = connect()
        await client.send(HEAD + REQUEST)
        received = b""
        while b"[DONE]" not in received or not received.endswith(b"0\r\n\r\n"):
            received += await client.read()
        await client.send(HEAD[:20])
        assert await client.rest() == b""


async def test_half_a_body_is_refused_in_words(backend: FakeBackend) -> None:
    async with served(backend, body_s=SOON_S) as connect:
        client = connect()
        await client.send(HEAD + REQUEST[:-5])
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert "not complete within 0.2 s" in json.loads(body)["error"]["message"]
        assert backend.requests == []


async def test_a_long_answer_has_no_such_deadline(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it count as unread once all that had to wait is read."""
    monkeypatch.setattr(http_server, "UNREAD_BYTES", 4096)

    async def later() -> None:
        await asyncio.sleep(6 * SOON_S)

    backend.script = then([60] * 40_000, later)
    async with served(backend, request_s=SOON_S, stall_s=2 * SOON_S, body_s=SOON_S) as connect:
        client = connect()
        await client.send(CLOSING + REQUEST)
        assert b"[DONE]" in await client.rest()


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
GET_CLOSING = GET.replace(b"Host", b"Connection: close\r\nHost")


@pytest.mark.parametrize(
    ("head", "behind"),
    [(HEAD, (b"\r\n",)), (HEAD, (GET,)), (HEAD, (GET, GET)), (CLOSING, (b"\r\n",))],
    ids=["blank", "request", "requests", "close"],
)
async def test_who_leaves_is_seen_behind_what_came_before(
    backend: FakeBackend, head: bytes, behind: tuple[bytes, ...]
) -> None:
    backend.script = then([], forever)
    async with served(backend) as connect:
        client = connect()
        await client.send(head + PLAIN)
        await asyncio.to_thread(backend.began.wait, WAIT_S)
        for data in behind:
            await client.send(data)
            await asyncio.sleep(SOON_S / 4)
        assert not backend.answers[0].closed.is_set()
        client.close()
        assert await asyncio.to_thread(backend.answers[0].closed.wait, WAIT_S / 4)


async def test_requests_one_behind_the_other_are_answered_in_turn(backend: FakeBackend) -> None:
    async def later() -> None:
        await asyncio.sleep(SOON_S)

    backend.script = then([60], later)
    async with served(backend) as connect:
        client = connect()
        await client.send(HEAD + PLAIN)
        await asyncio.sleep(SOON_S / 4)
        await client.send(b"\r\n" + GET)
        await client.send(GET_CLOSING)
        answers = (await client.rest()).split(b"HTTP/1.1 ")
        assert [answer[:3] for answer in answers] == [b"", b"200", b"200", b"200"]
        assert b"chat.completion" in answers[1]


async def test_what_follows_a_request_is_bounded(backend: FakeBackend) -> None:
    backend.script = then([], forever)
    async with served(backend) as connect:
        client = connect()
        await client.send(HEAD + PLAIN)
        await asyncio.to_thread(backend.began.wait, WAIT_S)
        await client.send(b"x" * 2 * http_server.BEHIND_BYTES)
        assert await client.rest() == b""
        assert await asyncio.to_thread(backend.answers[0].closed.wait, WAIT_S)


CHUNKED = HEAD.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"


def chunks_of(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("spaces", "size", "taken"),
    [(800, 1, True), (2_000_000, 300, True), (3_000, 1, False), (100_000, 80, False)],
)
async def test_a_body_in_thousands_of_small_chunks_is_cut_off(
    backend: FakeBackend, spaces: int, size: int, taken: bool
) -> None:
    """Each costs as much of the event loop as a large one, and 43,000 arrive at once."""
    async with served(backend) as connect:
        client = connect()
        with contextlib.suppress(ConnectionError):
            await client.send(CHUNKED + chunks_of(PLAIN + b" " * spaces, size))
        assert (await client.read()).startswith(b"HTTP/1.1 200 ") is taken
        other = connect()
        await other.send(GET)
        assert (await other.read()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("late", [False, True])
async def test_blank_lines_between_requests_are_nothing(backend: FakeBackend, late: bool) -> None:
    async with served(backend) as connect:
        client = connect()
        await client.send(b"\r\n" + GET if late else GET + b"\r\n")
        assert (await client.read()).startswith(b"HTTP/1.1 200 ")
        if late:
            await client.send(b"\r")
            await asyncio.sleep(SOON_S / 4)
            await client.send(b"\n\r\n")
            await asyncio.sleep(SOON_S / 4)
        await client.send(GET_CLOSING)
        assert (await client.rest()).count(b"HTTP/1.1 200 ") == 1


@pytest.mark.parametrize("pipelined", [False, True])
async def test_what_is_no_request_is_logged_without_the_id_of_the_last(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    ids: list[object] = []

    def note(_record: logging.LogRecord) -> bool:
        ids.append(current())
        return True

    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "filters", [note])
    async with served(backend) as connect:
        client, nonsense = connect(), b"\x00 nonsense\r\n\r\n"
        if pipelined:
            await client.send(GET + nonsense)
        else:
            await client.send(POST % 300_000 + PLAIN.ljust(300_000))
            await client.read()
            await client.send(nonsense)
        assert b"HTTP/1.1 400 " in await client.rest()
    assert ids == [None]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    """Set how many bytes all bodies may have together."""
    return lambda size: monkeypatch.setattr(request_body, "MAX_BODIES_BYTES", size)


async def test_large_bodies_share_what_room_there_is(backend: FakeBackend, room: Room) -> None:
    room(200_000)
    large = PLAIN + b" " * 150_000
    async with served(backend) as connect:
        holding, late, short = connect(), connect(), connect()
        await holding.send(POST % 300_000 + b" " * 200_000)
        await asyncio.sleep(SOON_S)
        await late.send(POST % len(large) + large)
        head, _, body = (await late.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in head
        assert json.loads(body)["error"]["code"] == "overloaded"
        await short.send(POST % len(PLAIN) + PLAIN)
        assert (await short.read()).startswith(b"HTTP/1.1 200 ")
        holding.close()
        for _ in range(2):  # what was parsed makes room, too
            await asyncio.sleep(SOON_S / 2)
            await late.send(POST % len(large) + large)
            assert (await late.read()).startswith(b"HTTP/1.1 200 ")


async def test_of_bodies_that_come_at_once_the_first_is_answered(backend: FakeBackend, room: Room) -> None:
    room(250_000)
    large = PLAIN + b" " * 250_000
    async with served(backend) as connect:
        clients = [connect() for _ in range(2)]
        for client in clients:
            await client.send(POST % len(large) + large[:150_000])
            await asyncio.sleep(SOON_S)
        for client in clients:
            await client.send(large[150_000:])
        heads = [(await client.read())[:13] for client in clients]
        assert heads == [b"HTTP/1.1 200 ", b"HTTP/1.1 503 "]


async def test_a_short_body_gives_way_to_none(backend: FakeBackend, room: Room) -> None:
    room(100_000)
    large = PLAIN + b" " * 250_000
    async with served(backend) as connect:
        first, second, short = connect(), connect(), connect()
        for client, text in ((first, large[:150_000]), (second, large[:70_000])):
            await client.send(POST % len(large) + text)
            await asyncio.sleep(SOON_S)
        await short.send(POST % len(PLAIN) + PLAIN[:10])
        await asyncio.sleep(SOON_S)
        await first.send(large[150_000:])
        assert (await first.read()).startswith(b"HTTP/1.1 503 ")
        await short.send(PLAIN[10:])
        assert (await short.read()).startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_trickles_gives_its_room_to_one_that_needs_it(
    backend: FakeBackend, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room(200_000)
    monkeypatch.setattr(request_body, "RATE_S", SOON_S)
    large = PLAIN + b" " * 150_000
    async with served(backend) as connect:
        stalled, other = connect(), connect("127.0.0.2")
        await stalled.send(POST % 300_000 + b" " * 230_000)
        for _ in range(3):
            await asyncio.sleep(SOON_S / 2)
            await stalled.send(b" ")
        await other.send(POST % len(large) + large)
        assert (await other.read()).startswith(b"HTTP/1.1 200 ")
        await stalled.send(b" " * (300_000 - 230_003))  # it hears why, although it still sends
        head, _, body = (await stalled.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert "65536 bytes a second" in json.loads(body)["error"]["message"]


async def test_bodies_of_one_client_leave_room_for_others(backend: FakeBackend, room: Room) -> None:
    room(1_000_000)
    large = PLAIN + b" " * 150_000
    async with served(backend) as connect:
        greedy = [connect() for _ in range(5)]
        for client in greedy:
            await client.send(POST % 300_000 + b" " * 290_000)
        await asyncio.sleep(SOON_S)
        other = connect("127.0.0.2")
        await other.send(POST % len(large) + large)
        assert (await other.read()).startswith(b"HTTP/1.1 200 ")
        for client in greedy:
            await client.send(b" " * 10_000)
        answers = [(await client.read())[9:12] for client in greedy]
        assert answers == [b"400"] * 3 + [b"503"] * 2


@pytest.mark.parametrize("letter", [b"a", b"\xc3\xa9", b"\\u00e9"])
async def test_text_that_is_not_ascii_takes_four_times_the_room(
    backend: FakeBackend, room: Room, letter: bytes
) -> None:
    room(300_000)
    large = PLAIN.replace(b"hello", letter) + b" " * 150_000
    async with served(backend) as connect:
        client = connect()
        await client.send(POST % len(large) + large)
        head = await client.read()
        assert head.startswith(b"HTTP/1.1 200 " if letter == b"a" else b"HTTP/1.1 503 ")


@pytest.mark.parametrize(
    ("bound", "words"),
    [("MAX_CONNECTIONS", "this server takes"), ("MAX_PER_ADDRESS", "of 127.0.0.1 are open")],
)
async def test_one_connection_too_many_is_told_so(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, bound: str, words: str
) -> None:
    monkeypatch.setattr(http_server, bound, 2)
    backend.script = then([], forever)
    async with served(backend) as connect:
        for _ in range(2):
            client = connect()
            await client.send(HEAD + REQUEST)
            await client.read(10)
        one_more = connect()
        await one_more.send(HEAD + REQUEST)
        head, _, body = (await one_more.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in head
        error = json.loads(body)["error"]
        assert error["code"] == "overloaded"
        assert words in error["message"]
        assert len(backend.requests) == 2


async def test_who_sends_nothing_gives_way_and_who_is_answered_does_not(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 4)
    backend.script = then([60], forever)
    async with served(backend) as connect:
        answered, silent, newcomer = connect(), connect(), None
        await answered.send(HEAD + REQUEST)
        assert await answered.read(10)
        for _ in range(8):
            newcomer = connect()
        assert newcomer is not None
        assert await silent.read() == b""
        await newcomer.send(GET)
        assert (await newcomer.read()).startswith(b"HTTP/1.1 200 ")
        assert not backend.answers[0].closed.is_set()


def client_hello() -> bytes:
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(received, sent, server_hostname="localhost").do_handshake()
    return sent.read()


@pytest.mark.parametrize("secured", [False, True])
async def test_connections_that_are_cut_take_no_place(
    backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secured: bool
) -> None:
    """All of them come before the server looks at the first one."""
    monkeypatch.setattr(http_server, "MOST_PER_ADDRESS", 1)
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 2)
    tls = own_tls(tmp_path, ("localhost",), ("127.0.0.1",), here_and_now()).context if secured else None
    async with served(backend, tls=tls) as connect:
        for _ in range(3):
            connect()
        other = connect("127.0.0.2")
        await other.send(client_hello() if secured else HEAD + REQUEST)
        assert await other.read(10)
