"""Clients for commands: of a home's agent, and of the endpoint."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import ssl
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from .errors import Code, GroupError, MlxtpError, UserError
from .verbs import Status, Verb

# --- one chat request to the endpoint, with its reply as a stream ----------------------------------------

T = TypeVar("T")
_CODES = frozenset(map(str, Code))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reply."""

    text: str = ""
    thought: str = ""
    waiting: str = ""  #: why it waits, such as "loading 40 %"
    model: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0  #: in the last part only
    tokens: int = 0  #: in the last part only


@dataclass(slots=True)
class EndpointAnswer:
    """The reply so far. Times are readings of a monotonic clock, in seconds."""

    asked_at: float
    text: str = ""
    thoughts: str = ""
    model: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    first_at: float | None = None
    last_at: float = 0.0

    def add(self, piece: Piece, at: float) -> None:
        self.text += piece.text
        self.thoughts += piece.thought
        if piece.text or piece.thought:
            self.first_at = self.first_at or at
        if not piece.waiting:
            self.last_at = at
        self.model = piece.model or self.model
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.prompt_tokens += piece.prompt_tokens
        self.tokens += piece.tokens

    @property
    def ttft_s(self) -> float:
        return 0.0 if self.first_at is None else self.first_at - self.asked_at

    @property
    def tokens_per_second(self) -> float:
        """Rate of the tokens after the first; 0 for fewer than two tokens, or if their count is unknown."""
        s = 0.0 if self.first_at is None else self.last_at - self.first_at
        return (self.tokens - 1) / s if s > 0 and self.tokens > 1 else 0.0


def ask(connection: http.client.HTTPConnection, key: str, body: Mapping[str, Any]) -> Generator[Piece]:
    """Send a request to /v1/chat/completions and yield the reply as `streamed` does."""
    return streamed(connection, key, "/v1/chat/completions", body, _of_chunk)


def streamed(
    connection: http.client.HTTPConnection,
    key: str,
    path: str,
    body: Mapping[str, Any],
    read: Callable[[Mapping[str, Any]], Iterable[T]],
) -> Generator[T]:
    """Send a request, and yield `read(event)`'s items for each event. Blocks. Closing stops the reply.

    Raises UserError if the endpoint refuses the request, GroupError if the reply breaks off.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), headers)
            with connection.getresponse() as response:  # else the socket stays open and the reply runs on
                for event in _events(response):
                    yield from read(event)
    except BrokenPipeError:  # our own output has lost its reader
        raise
    except (OSError, http.client.HTTPException) as error:
        raise GroupError(f"the answer broke off: {error or type(error).__name__}", Code.LINK_LOST) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise GroupError(
            "this is not a reply of mlxtp; another program may listen there", Code.INTERNAL
        ) from None


def _events(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    if response.status != http.client.OK:
        raise _refusal(response.status, response.read())
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise GroupError(str(chunk["error"]["message"]), _code(chunk["error"]))
        yield chunk
    raise GroupError("the answer broke off", Code.LINK_LOST)


def _of_chunk(chunk: Mapping[str, Any]) -> Iterator[Piece]:
    model, waiting = str(chunk.get("model") or ""), _waiting(chunk)
    for choice in chunk["choices"]:
        delta = choice["delta"]
        yield Piece(
            text=delta.get("content") or "",
            thought=delta.get("reasoning_content") or "",
            waiting=waiting,
            model=model,
            finish_reason=choice.get("finish_reason") or "",
        )
    if usage := chunk.get("usage"):
        yield Piece(prompt_tokens=usage["prompt_tokens"], tokens=usage["completion_tokens"])


def _waiting(chunk: Mapping[str, Any]) -> str:
    if progress := chunk.get("prompt_progress"):
        return f"reading the prompt, {100 * progress['processed'] // progress['total']} %"
    return str(chunk.get("state") or "")


def _refusal(status: int, content: bytes) -> MlxtpError:
    try:
        error = json.loads(content)["error"]
        return UserError(str(error["message"]), _code(error))
    except (ValueError, LookupError, TypeError, RecursionError):
        said = content.decode(errors="replace")
        return GroupError(f"the endpoint answered {status}: {said}", Code.INTERNAL)


def _code(error: Mapping[str, Any]) -> Code:
    code = error.get("code")
    return Code(code) if code in _CODES else Code.INTERNAL


# --- client for the agent of a home ----------------------------------------------------------------------

FILE = "agent.json"
LOCK = "lock"
#: Seconds without a byte. The endpoint sends some every few seconds.
ANSWER_TIMEOUT_S = 120.0


class AgentClient:
    """Client of this home's agent. Raises UserError if none runs there.

    `key` is the agent's own: only this user can read it, and the endpoint accepts it as an API key.
    """

    def __init__(self, home: Path, timeout_s: float | None = None) -> None:
        """`timeout_s` replaces each verb's own."""
        self._home = home
        self._timeout_s = timeout_s
        try:
            found = json.loads((home / FILE).read_text())
            self.url, self.key = str(found["url"]), str(found["key"])
            self.certificate = str(found["certificate"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"no mlxtp node runs with home {home}; start one with `mlxtp node`, or name its --home",
                Code.NOT_READY,
            ) from None

    @property
    def page(self) -> str:
        """The address of the agent's page, with the key. Browsers do not send the part after #."""
        return f"{self.url}/#key={quote(self.key, safe='')}"

    def send(self, verb: Verb) -> dict[str, Any]:
        """Return the agent's reply to a command. Raises UserError with its message if it refuses."""
        path, body = f"/admin/{verb.path}", verb.body()
        status, answer = self._request(verb.method, path, body, self.key, verb.reply_s)
        if status == http.client.UNAUTHORIZED:
            raise self._silent("another program listens there")
        if status != http.client.OK:
            said = answer.get("error")
            said = said if isinstance(said, dict) else {"message": answer}
            code = said.get("code")
            raise UserError(str(said.get("message")), Code(code) if code in _CODES else None)
        return answer

    def snapshot(self) -> dict[str, Any]:
        """Return the present state, as in `docs/operations.md`. Raises as `send` does."""
        status, answer = self._request("GET", "/cluster", {}, self.key)
        if status != http.client.OK:
            raise self._silent(f"status {status}")
        return answer

    def ask(self, body: Mapping[str, Any]) -> Generator[Piece]:
        """Send a chat request with the agent's own key. Yields and raises as the function `ask` does."""
        try:
            connection = connection_to(self.url, self.certificate, ANSWER_TIMEOUT_S)
        except ValueError as error:
            raise self._silent(error) from None
        return ask(connection, self.key, body)

    def models(self, key: str) -> list[dict[str, Any]]:
        """Return what a program with this API key ("" for none) finds at /v1/models. Raises UserError."""
        status, answer = self._request("GET", "/v1/models", {}, key)
        if status == http.client.UNAUTHORIZED:
            why = "refuses this API key" if key else "requires an API key"
            raise UserError(
                f"the endpoint {why}: give one with --key or in MLXTP_KEY; `mlxtp key create NAME` makes one"
            )
        if status != http.client.OK:
            raise self._silent(f"status {status}")
        return list(answer.get("data", ()))

    def _request(
        self, method: str, path: str, body: Mapping[str, Any], key: str, reply_s: float = Status.reply_s
    ) -> tuple[int, dict[str, Any]]:
        """Return status and body. Raises UserError if no agent of mlxtp replies."""
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection = connection_to(self.url, self.certificate, self._timeout_s or reply_s)
            with contextlib.closing(connection):
                connection.request(method, path, json.dumps(body) if body else None, headers)
                response = connection.getresponse()
                answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise self._silent(error) from None
        if not isinstance(answer, dict):
            raise self._silent("another program listens there")
        return response.status, answer

    def _silent(self, why: object) -> UserError:
        return UserError(
            f"the agent of {self._home} does not answer at {self.url} ({why}); is it still running?",
            Code.NOT_READY,
        )


def connection_to(url: str, certificate: str, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection, which raises SSLError for another `certificate`. Raises ValueError for no PEM."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        return http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    return _Pinned(parts.netloc, ssl.PEM_cert_to_DER_cert(certificate), timeout_s)


class _Pinned(http.client.HTTPSConnection):
    """Connection to the holder of one certificate, whose other contents are ignored: it may have expired."""

    def __init__(self, netloc: str, certificate: bytes, timeout_s: float) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # `connect` checks the certificate before anything is sent
        super().__init__(netloc, timeout=timeout_s, context=context)
        self._expected = certificate

    def connect(self) -> None:
        super().connect()
        assert isinstance(self.sock, ssl.SSLSocket)
        if self.sock.getpeercert(binary_form=True) != self._expected:
            self.close()
            raise ssl.SSLError("its certificate is not this agent's")


def wait_for_end(home: Path) -> None:
    with contextlib.suppress(OSError), (home / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


def agent_runs(home: Path) -> bool:
    """Return True if an agent holds this home, even if it does not reply."""
    try:
        with (home / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
