"""One chat request to the endpoint, with its reply as a stream."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import Code, GroupError, MlxtpError, UserError

_CODES = frozenset(map(str, Code))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reply. `waiting`: the reason for a wait, such as "loading 40 %". Counts come at the end."""

    text: str = ""
    thought: str = ""
    waiting: str = ""
    model: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    tokens: int = 0


@dataclass(slots=True)
class EndpointAnswer:
    """The reply so far. Times are of a monotonic clock, in seconds."""

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
        """Add one more piece, which came `at` that time."""
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
        """Seconds until the first token; 0 without one."""
        return 0.0 if self.first_at is None else self.first_at - self.asked_at

    @property
    def tokens_per_second(self) -> float:
        """Rate of the tokens after the first; 0 for fewer than two tokens, or without a count of them."""
        if self.first_at is None or self.last_at <= self.first_at or self.tokens < 2:
            return 0.0
        return (self.tokens - 1) / (self.last_at - self.first_at)


def ask(connection: http.client.HTTPConnection, key: str, body: Mapping[str, Any]) -> Generator[Piece]:
    """Send a request to /v1/chat/completions and yield the reply. Closing the generator stops it. Blocks.

    Raises UserError when the endpoint refuses the request, and GroupError when the reply breaks off.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            with connection.getresponse() as response:  # else it keeps the socket, and the reply runs on
                yield from _pieces(response)
    except BrokenPipeError:  # the reader of our output has left
        raise
    except (OSError, http.client.HTTPException) as error:
        raise GroupError(f"the answer broke off: {error or type(error).__name__}", Code.LINK_LOST) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise GroupError(
            "this is not a reply of mlxtp; another program may listen there", Code.INTERNAL
        ) from None


def _pieces(response: http.client.HTTPResponse) -> Iterator[Piece]:
    """Yield the events of a stream up to [DONE]."""
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
        yield from _of_chunk(chunk)
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
    except (ValueError, LookupError, TypeError):
        said = content.decode(errors="replace")
        return GroupError(f"the endpoint answered {status}: {said}", Code.INTERNAL)


def _code(error: Mapping[str, Any]) -> Code:
    code = error.get("code")
    return Code(code) if code in _CODES else Code.INTERNAL
