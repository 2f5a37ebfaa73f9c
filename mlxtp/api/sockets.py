"""WebSockets of `/v1/responses`. Each message is a request to the app, so that all rules of requests hold."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..admission_counter import AdmissionCounter
from ..errors import Code
from .adapter import Json, error_body

PATH = "/v1/responses"
SOCKET = "mlxtp.socket"  #: ASGI scope entry: the `Socket` that a request belongs to.
MOST, MOST_OF_ONE = 64, 16  #: Sockets of this Mac, and of one client.
MOST_BYTES = 4 * 1024 * 1024  #: Bytes of one message. One more waits, and one arrives, for each socket.
LIMIT_S = 3600.0  #: Life of a socket, as in OpenAI's API.
_POLICY = 1008  # status of a close
_OF_CONNECTION = (b"connection", b"upgrade", b"content-", b"transfer-", b"sec-websocket-")


class Socket:
    """An open WebSocket: its requests, one after the other, and the latest answer that is no stream.

    Events of streams go to the client, until `gone`. `forget` drops the response that only this socket may
    continue.
    """

    def __init__(self, app: ASGIApp, opened: AdmissionCounter, scope: Scope, send: Send) -> None:
        self.id = uuid.uuid4().hex
        self.client: str | None = None
        self.forget: Callable[[], None] = lambda: None
        self.gone = asyncio.Event()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self._app = app
        self._opened = opened
        self._send = send
        kept = [each for each in scope["headers"] if not each[0].lower().startswith(_OF_CONNECTION)]
        self._headers = [*kept, (b"content-type", b"application/json")]
        scheme = "https" if scope["scheme"] == "wss" else "http"
        self._scope = {**scope, "type": "http", "scheme": scheme, "query_string": b"", SOCKET: self}

    def admit(self, client: str) -> str:
        """Return why a client may not have this socket, or ""."""
        if why := self._opened.admit(client):
            return f"{why}: at most {MOST} WebSockets of this Mac, and {MOST_OF_ONE} of one client, are open"
        self.client = client
        return ""

    async def request(self, method: str, body: bytes) -> None:
        self.status, self.body = 0, b""
        left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        headers = [*self._headers, (b"content-length", b"%d" % len(body))]

        async def receive() -> Message:
            if left:
                return left.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        await self._app({**self._scope, "method": method, "headers": headers}, receive, self._take)

    async def take_turns(self, receive: Receive) -> None:
        waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + LIMIT_S
        reading = asyncio.create_task(_read(receive, waiting, self.gone))
        try:
            while (body := await asyncio.wait_for(waiting.get(), ends_at - loop.time())) is not None:
                await self.request("POST", body)
                await self._tell_refusal()
            await self._send({"type": "websocket.close", "code": _POLICY, "reason": "wait for each answer"})
        except TimeoutError:
            words = f"a WebSocket is open for {LIMIT_S:g} s at most; open another one"
            await _tell(
                self._send, 400, error_body(words, "websocket_connection_limit_reached", 400)["error"]
            )
            await self._send({"type": "websocket.close"})
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _tell_refusal(self) -> None:
        """Send the refusal of the latest request, if it was refused."""
        if self.status != 200 and self.body:
            error: Json = json.loads(self.body)["error"]
            if error["code"] == Code.NOT_FOUND and error["param"] == "previous_response_id":
                error["code"] = "previous_response_not_found"
            self.forget()
            await _tell(self._send, self.status, error)

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
        elif self.status == 200:
            for event in message.get("body", b"").split(b"\n\n"):
                if data := event.partition(b"\ndata: ")[2]:
                    await self._send({"type": "websocket.send", "text": data.decode()})
        else:
            self.body += message.get("body", b"")


async def _tell(send: Send, status: int, error: Json) -> None:
    text = json.dumps({"type": "error", "status": status, "error": error})
    await send({"type": "websocket.send", "text": text})


class ResponseSockets:
    """Outermost ASGI middleware. A handshake is a GET, and a message a POST, of the same path and headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open = AdmissionCounter(MOST, MOST_OF_ONE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        socket = Socket(self._app, self._open, scope, send)
        await receive()  # the handshake
        try:
            await socket.request("GET", b"")
            if socket.status == 101:
                await send({"type": "websocket.accept"})
                with suppress(OSError):  # a client that leaves
                    await socket.take_turns(receive)
            else:
                start = {"status": socket.status, "headers": socket.headers}
                await send({"type": "websocket.http.response.start", **start})
                await send({"type": "websocket.http.response.body", "body": socket.body})
        finally:
            socket.forget()
            if socket.client is not None:
                self._open.release(socket.client)


async def _read(receive: Receive, waiting: asyncio.Queue[bytes | None], gone: asyncio.Event) -> None:
    """Queue messages until the client leaves, or sends a second one while one waits; then None alone."""
    while (message := await receive())["type"] == "websocket.receive" and waiting.empty():
        waiting.put_nowait(message.get("bytes") or (message.get("text") or "").encode())
    gone.set()
    while not waiting.empty():
        waiting.get_nowait()
    waiting.put_nowait(None)
