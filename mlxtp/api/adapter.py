"""What a dialect of HTTP has to bring: from its body to a `GenerationRequest`, and from events to its
answers.

Each has one object with these methods and its routes (`generation.Adapter`), named in
`app.adapters`. What it may leave to `generation.py`: models, tokens, queues, clients that leave, keep-alive,
failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import MlxtpError
from ..text.conversation import GenerationRequest
from ..text.events import AnswerEvent, WholeAnswer
from ..text.tokenizer import Name

Json = dict[str, Any]
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"


@dataclass(slots=True)
class About:
    """What all parts of one answer have in common.

    `id` is 32 hexadecimal digits. `created` in seconds since 1970. `prompt_tokens`: of each prompt.
    `prompts`: each prompt's text, for prompts that are continued; a conversation has none. `names`: how one
    token is shown alone, and its bytes.

    A stream may begin before the model is there. Until then each of `prompt_tokens` is 0, and `prompts` is
    empty.
    """

    id: str
    created: float
    model: str
    prompt_tokens: tuple[int, ...]
    prompts: tuple[str, ...]
    names: Callable[[int], Name]
    ask: GenerationRequest

    @property
    def choices(self) -> int:
        """How many answers there are: those of the first prompt first."""
        return len(self.prompt_tokens) * self.ask.options.n


class AnswerWriter(Protocol):
    """One answer as it is streamed. Each method returns what is sent, which may be nothing."""

    def open(self) -> bytes:
        """Return what goes out with the headers. `About` may be incomplete."""
        ...

    def begin(self) -> bytes:
        """Return what precedes the first event. `About` is complete from here on."""
        ...

    def write(self, event: AnswerEvent) -> bytes: ...

    def close(self) -> bytes:
        """After every choice has had its `Finish`."""
        ...

    def fail(self, error: MlxtpError) -> bytes:
        """Instead of `close`. What the client has so far must not look complete."""
        ...

    def idle(self, more: Json) -> bytes:
        """Return an event without content, for clients that count events.

        `more` has fields with the progress.
        """
        ...


class Dialect(Protocol):
    """How one dialect reads and writes.

    `names`: what it calls a field of `GenerationRequest`, `GenerationOptions` or `Conversation` where it
    calls it otherwise; errors speak the client's language. `too_long` is its sentence for a prompt of
    {tokens} tokens where {most} fit. `media_type` is that of its streams.
    """

    @property
    def names(self) -> Mapping[str, str]: ...

    @property
    def too_long(self) -> str: ...

    @property
    def media_type(self) -> str: ...

    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        """The body of an answer that is not streamed; there is one of `wholes` for each choice."""
        ...

    def writer(self, about: About) -> AnswerWriter: ...

    def error(self, error: MlxtpError, status: int) -> Json:
        """The body of a refusal with this HTTP status."""
        ...
