"""What a dialect of HTTP has to bring: from its body to an `Ask`, and from events to its answers.

Each adapter is one file with one object that has these methods, named in `app.ADAPTERS`. What it may
leave to the others: models, tokens, queues, clients that leave, keep-alive, failures (`generation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from starlette.routing import Route

from ..errors import MlxtpError
from .ask import Ask
from .events import Event, Whole
from .text import Name

if TYPE_CHECKING:
    from .generation import Generation

Json = dict[str, Any]
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class About:
    """What all parts of one answer have in common.

    `id` is 32 hexadecimal digits. `created` in seconds since 1970. `prompt_tokens`: of each prompt.
    `prompts`: each prompt's text, for prompts that are continued; a conversation has none. `names`: how one
    token is shown alone, and its bytes.
    """

    id: str
    created: float
    model: str
    prompt_tokens: tuple[int, ...]
    prompts: tuple[str, ...]
    names: Callable[[int], Name]
    ask: Ask

    @property
    def choices(self) -> int:
        """How many answers there are: those of the first prompt first."""
        return len(self.prompt_tokens) * self.ask.options.n


class Writer(Protocol):
    """One answer as it is streamed. Each method returns what is sent, which may be nothing."""

    def open(self) -> bytes:
        """Sent before the model has said anything."""
        ...

    def write(self, event: Event) -> bytes: ...

    def close(self) -> bytes:
        """After every choice has had its `Finish`."""
        ...

    def fail(self, error: MlxtpError) -> bytes:
        """Instead of `close`. What the client has so far must not look complete."""
        ...

    def idle(self) -> bytes:
        """What keeps client and proxies patient while nothing comes."""
        ...


class Adapter(Protocol):
    """One dialect.

    `prefixes`: paths below which an error has this dialect's shape. `names`: what this dialect calls a field
    of `Ask`, `Options` or `Conversation` where it calls it otherwise; errors speak the client's language.
    `media_type` is that of its streams.
    """

    prefixes: tuple[str, ...]
    names: Mapping[str, str]
    media_type: str

    def routes(self, generation: Generation) -> Sequence[Route]:
        """Its endpoints. One that generates calls `generation.answer(self, request, self.parse)`."""
        ...

    def whole(self, about: About, answers: Sequence[Whole]) -> Json:
        """The body of an answer that is not streamed; `answers` has one for each choice."""
        ...

    def writer(self, about: About) -> Writer: ...

    def error(self, error: MlxtpError, status: int) -> Json:
        """The body of a refusal with this HTTP status."""
        ...
