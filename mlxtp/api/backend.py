"""What the HTTP side needs from the rest of the agent: `node/gateway.py` has it, tests bring their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from .text import Text

Reason = Literal["stop", "length", "cancel"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly confirmed tokens, in order. An end token may be among them; its text is never shown."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The last event of a request. `generated` counts every token, the end token too.

    "cancel" means that the backend gave the request up: the client sees an error, never a short answer.
    """

    reason: Reason
    generated: int


Event = Tokens | End


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that can be served: `path` its folder, `context` in tokens, `created` in seconds since 1970."""

    id: str
    aliases: tuple[str, ...]
    path: Path
    context: int
    created: int
    eos: tuple[int, ...]
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Health:
    """One moment of the cluster as this agent sees it. `reason` says why it is not ready, in plain words."""

    state: str
    epoch: int
    world_size: int
    backend: str
    model: str | None
    reason: str | None
    ready: bool
    open_requests: int
    ranks: tuple[Mapping[str, object], ...] = ()


class Backend(Protocol):
    """The model as the HTTP side sees it. Everything runs on one event loop."""

    def health(self) -> Health: ...

    def models(self) -> tuple[ModelInfo, ...]:
        """What can be served now: the loaded model, or nothing."""
        ...

    def text(self) -> Text | None:
        """The tokenizer side of the loaded model, the same object as long as that model stays loaded."""
        ...

    def generate(self, prompt: tuple[int, ...], max_tokens: int) -> AsyncIterator[Event]:
        """Any number of `Tokens`, then one `End`.

        A plain function, not a coroutine: what can be refused at once (nothing loaded: RequestError 503
        NOT_READY; full: 429 or 503 OVERLOADED) is raised by this call, so that a streaming client still gets
        a real status. While iterating it raises MlxtpError when the epoch ends for good under the request.
        The caller closes the iterator (`aclose`, where it has one) or cancels the task that waits in it:
        either cancels the request on every rank.
        """
        ...
