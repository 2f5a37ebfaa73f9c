"""WebSockets of `/v1/responses`: turns in order, and the rules of requests for each of them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from socket import create_connection
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Response
from websockets.sync.client import ClientConnection, connect

from mlxtp.api import server as server_module
from mlxtp.api import sockets
from mlxtp.api.app import create_app
from mlxtp.api.backend import TokenEvent, Tokens
from mlxtp.api.endpoint import here_and_now, own_tls
from mlxtp.api.sockets import MOST_OF_ONE

from .conftest import BYTE_LEVEL, WAIT_S, FakeBackend, Loaded, Server, forever, on_loopback, says, then
from .dialects.test_responses import prompts
from .test_server_access import door

PATH = "/v1/responses"


@contextlib.contextmanager
def opened(
    server: Any, path: str = PATH, host: str = "127.0.0.1", **headers: str
) -> Iterator[ClientConnection]:
    url = f"ws://{host}:{server.port}{path}"
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    tcp = create_connection(("127.0.0.1", server.port))
    with connect(url, sock=tcp, additional_headers=headers, open_timeout=WAIT_S, proxy=None) as socket:
        yield socket


def said(socket: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    """The events of one turn."""
    socket.send(json.dumps({"type": "response.create", "model": "tiny", "input": "hello"} | fields))
    return heard(socket)


def heard(socket: ClientConnection) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ("error", "response.completed", "response.failed"):
        events.append(json.loads(socket.recv(WAIT_S)))
    return events


def error(socket: ClientConnection, **fields: Any) -> tuple[int, str]:
    [event] = said(socket, **fields)
    assert set(event) == {"type", "status", "error"}
    assert event["error"]["message"]
    return event["status"], event["error"]["code"]


def refused(server: Any, path: str = PATH, **headers: str) -> Response:
    """The answer to a handshake that opens no socket."""
    with pytest.raises(InvalidStatus) as found, opened(server, path, **headers):
        pass
    return found.value.response


def test_turns_of_one_socket_have_the_events_of_a_stream(server: Server) -> None:
    server.backend.script = says(server.ids("hello"))
    with opened(server) as socket:
        for _turn in range(2):
            events = said(socket)
            assert [each["sequence_number"] for each in events] == list(range(len(events)))
            assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"]
            assert events[-1]["response"]["output"][0]["content"][0]["text"] == "hello"
    assert server.ask("GET", f"{PATH}/{events[-1]['response']['id']}").is_success


def test_what_is_not_stored_goes_on_at_its_socket_alone_until_a_turn_fails(server: Server) -> None:
    server.backend.script = says(server.ids("hello"))
    lost = (404, "previous_response_not_found")
    with opened(server) as socket, opened(server) as other:
        first = said(socket, store=False)[-1]["response"]["id"]
        assert error(other, store=False, previous_response_id=first) == lost
        second = said(socket, store=False, previous_response_id=first)[-1]["response"]["id"]
        assert prompts(server)[-1].count("hello") == 3
        assert error(socket, store=False, previous_response_id=first) == lost  # the latest alone is kept
        assert error(socket, store=False, previous_response_id=second) == lost  # since that one failed
        third = said(socket, store=False)[-1]["response"]["id"]
    with opened(server) as socket:
        assert error(socket, store=False, previous_response_id=third) == lost
    assert server.ask("GET", f"{PATH}/{third}").status_code == 404


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"type": "response.cancel"}, 400),
        ({"background": True}, 400),
        ({"generate": False}, 400),
        ({"input": None}, 400),
        ({"model": "other"}, 404),
    ],
)
def test_a_refusal_leaves_the_socket_open(server: Server, fields: dict[str, Any], status: int) -> None:
    with opened(server) as socket:
        assert error(socket, **fields)[0] == status
        socket.send("{")
        assert heard(socket)[-1]["status"] == 400
        assert said(socket)[-1]["type"] == "response.completed"


def test_who_leaves_is_not_answered_on(server: Server) -> None:
    server.backend.script = then(server.ids("ab"), forever)
    with opened(server) as socket:
        socket.send(json.dumps({"type": "response.create", "input": "hello"}))
        socket.recv(WAIT_S)
        assert server.backend.began.wait(WAIT_S)
    assert server.backend.all_closed()


def test_one_message_waits_and_a_second_ends_the_socket(server: Server) -> None:
    server.backend.script = then(server.ids("ab"), forever)
    with opened(server) as socket:
        for _message in range(3):
            socket.send(json.dumps({"type": "response.create", "input": "hello"}))
            assert server.backend.began.wait(WAIT_S)
        with contextlib.suppress(ConnectionClosed):
            heard(socket)
    assert socket.close_code == 1008
    assert server.backend.all_closed()


def test_who_sends_many_pings_or_parts_is_cut(server: Server) -> None:
    for ping in (True, False):
        with opened(server) as socket:
            wire = socket.protocol
            if not ping:
                wire.send_text(b"{", fin=False)
            for _ in range(server_module.MOST_SMALL + 10):
                wire.send_ping(b"") if ping else wire.send_continuation(b"", fin=False)
            with contextlib.suppress(OSError):
                socket.socket.sendall(b"".join(wire.data_to_send()))
            with pytest.raises((ConnectionClosed, ConnectionError)):
                socket.recv(WAIT_S)


def test_messages_have_a_size_and_clients_a_number_of_sockets(server: Server) -> None:
    with opened(server) as socket, pytest.raises(ConnectionClosed):
        said(socket, input="x" * sockets.MOST_BYTES)
    with contextlib.ExitStack() as stack:
        for _socket in range(MOST_OF_ONE):
            stack.enter_context(opened(server))
        assert refused(server).status_code == 429
    with opened(server) as socket:  # they are gone
        assert said(socket)


def test_a_socket_has_an_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LIMIT_S", 0.2)
    with opened(server) as socket:
        [event] = heard(socket)
        assert event["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed):
            socket.recv(WAIT_S)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"x_api_key": "mlxtp-wrong"}, 401),
        ({"origin": "http://evil.example"}, 403),
        ({"host": "evil.example"}, 421),
    ],
)
def test_who_may_not_ask_may_not_open_a_socket(
    loaded: dict[str, Loaded], tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    with door(FakeBackend(loaded[BYTE_LEVEL].text), tmp_path) as server:
        key = {"x_api_key": server.key()} if status > 401 else {}
        answer = refused(server, **key | headers)
        assert answer.status_code == status
        assert json.loads(answer.body or b"")["error"]["code"]


def test_each_turn_is_a_request_of_its_key(loaded: dict[str, Loaded], tmp_path: Path) -> None:
    backend = FakeBackend(loaded[BYTE_LEVEL].text, says([60, 61]))
    with door(backend, tmp_path) as server:
        with opened(server, x_api_key=server.key("few", per_minute=3)) as socket:
            ids = [said(socket)[-1]["response"]["id"] for _turn in range(2)]
            assert error(socket) == (429, "rate_limit_exceeded")
        other = {"x-api-key": server.key("other")}
        assert server.ask("GET", f"{PATH}/{ids[0]}", headers=other).status_code == 404
        with opened(server, x_api_key=server.key("gone")) as socket:
            server.file.revoke("gone")
            server.now += 60
            assert error(socket) == (401, "invalid_api_key")
    assert {each.client for each in backend.whose} == {"key few"}


def test_over_tls(loaded: dict[str, Loaded], tmp_path: Path) -> None:
    tls = own_tls(tmp_path, ("localhost",), ("127.0.0.1",), here_and_now())
    trusted = ssl.create_default_context(cadata=tls.certificate)
    backend = FakeBackend(loaded[BYTE_LEVEL].text, says([60, 61]))
    with door(backend, tmp_path, tls=tls) as server:
        headers = {"x-api-key": server.key()}
        url = f"wss://127.0.0.1:{server.port}{PATH}"
        with connect(url, ssl=trusted, additional_headers=headers, proxy=None) as socket:
            assert said(socket)[-1]["type"] == "response.completed"


def test_a_socket_has_one_place_while_it_is_open_and_all_day_for_a_message(
    loaded: dict[str, Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_PER_ADDRESS", 2)
    backend = FakeBackend(loaded[BYTE_LEVEL].text)
    with on_loopback(create_app(backend), request_s=0.3) as port:
        here = Server(backend, port, loaded[BYTE_LEVEL].tokenizer)
        for _pair in range(2):
            with opened(here) as one, opened(here) as other:
                time.sleep(0.5)
                assert said(one)[-1]["type"] == said(other)[-1]["type"] == "response.completed"
                assert refused(here).status_code == 503


async def endless() -> AsyncIterator[TokenEvent]:
    while True:
        yield Tokens((70,) * 50)
        await asyncio.sleep(0)


def test_who_does_not_read_is_cut(loaded: dict[str, Loaded]) -> None:
    backend = FakeBackend(loaded[BYTE_LEVEL].text, endless)
    with (
        on_loopback(create_app(backend), stall_s=0.5) as port,
        opened(Server(backend, port, loaded[BYTE_LEVEL].tokenizer)) as socket,
    ):
        socket.send(json.dumps({"type": "response.create", "input": "hello"}))
        assert backend.began.wait(WAIT_S)
        assert backend.all_closed()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("Content-Length: 5", "request body"),
        ("Transfer-Encoding: chunked", "transfer"),
        ("\r\n".join(f"x-{number}: 1" for number in range(130)), "more than 128 headers"),
        (f"x: {'1' * 9000}", "8192"),
    ],
)
def test_a_head_that_is_no_handshake_is_refused_at_once_and_gives_its_place_back(
    loaded: dict[str, Loaded], monkeypatch: pytest.MonkeyPatch, lines: str, words: str
) -> None:
    monkeypatch.setattr(server_module, "MAX_PER_ADDRESS", 1)
    asked = f"GET {PATH} HTTP/1.1", "Host: localhost", "Connection: Upgrade", "Upgrade: websocket", lines
    head = "\r\n".join((*asked, "", ""))
    backend = FakeBackend(loaded[BYTE_LEVEL].text)
    with on_loopback(create_app(backend)) as port:
        for _time in range(2):
            with create_connection(("127.0.0.1", port), WAIT_S) as tcp:
                tcp.sendall(head.encode())
                answer = http.client.HTTPResponse(tcp)
                answer.begin()
                error = json.loads(answer.read())["error"]
                assert (answer.status, error["code"]) == (400, "invalid_request")
                assert words in error["message"].lower()
                assert tcp.recv(1) == b""


def test_a_plain_get_is_told_to_upgrade_and_no_other_path_is_a_socket(server: Server) -> None:
    assert server.ask("GET", PATH).status_code == 426
    assert refused(server, "/v1/models").status_code == 200
