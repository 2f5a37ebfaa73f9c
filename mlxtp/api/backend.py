"""What the HTTP side needs from the rest of the agent: `gateway/gateway.py` has it, tests bring their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ..wire.messages import MAX_BIASES, MAX_GRAMMAR, PLAIN, Sampling, Shaping

if TYPE_CHECKING:
    from ..errors import RequestError
    from ..text.tokenizer import Text

__all__ = [
    "AT_ONCE",
    "COMING",
    "DRAINING",
    "GREEDY",
    "MAX_BIASES",
    "MAX_GRAMMAR",
    "PLAIN",
    "Backend",
    "FinishReason",
    "Health",
    "ImmediateLease",
    "ModelInfo",
    "ModelLease",
    "Progress",
    "Request",
    "Sampling",
    "Shaping",
    "StoredModelInfo",
    "StreamEnd",
    "TokenEvent",
    "TokenScore",
    "TokenStream",
    "Tokens",
]  # fmt: skip

FinishReason = Literal["stop", "length", "cancel"]
GREEDY = Sampling()
DRAINING = "draining"
"""The state of an agent that finishes what it has begun, and takes nothing new."""
COMING = ("starting", "forming", "loading", "restarting")
"""The states of one that may have a model in a moment, whose name is not known here yet."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `sampling.seed` is always set: no two requests without a wish share theirs.

    `logprobs` -1 wants none, 0 those of the chosen tokens, k the k most probable alternatives as well.
    Clients take turns, and users take those of their `client`; an empty name is one, too. `deadline_s` 0 is
    the server's own.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    shaping: Shaping = PLAIN
    logprobs: int = -1
    ignore_eos: bool = False
    client: str = ""
    user: str = ""
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability (natural) of one chosen token, and the most probable (token, log-probability) pairs."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly confirmed tokens, in order. An end token may be among them; its text is never shown.

    `scores` has one entry for each token of a request that asked for log-probabilities, else it is empty.
    """

    tokens: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The last event of a request. `generated` counts every token, the end token too.

    "cancel" means that the backend gave the request up: the client sees an error, never a short answer.
    `cached` prompt tokens came from the prefix cache. Of `drafted` tokens, `accepted` were right.
    """

    reason: FinishReason
    generated: int
    cached: int = 0
    drafted: int = 0
    accepted: int = 0


TokenEvent = Tokens | StreamEnd


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a request between two tokens, such as "loading 40 %"; empty while tokens come.

    In a prefill, `processed` of the prompt's `total` tokens are computed. It began with `cached` of them,
    `time_ms` ago.
    """

    state: str = ""
    total: int = 0
    cached: int = 0
    processed: int = 0
    time_ms: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that can be served: `path` its folder, `context` in tokens, `created` in seconds since 1970.

    `defaults` are for requests that leave a setting out; their seed means nothing. `features` are those of
    `Text.features`.
    """

    id: str
    aliases: tuple[str, ...]
    path: Path
    context: int
    created: int
    eos: tuple[int, ...]
    vocabulary: int
    defaults: Sampling = GREEDY
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredModelInfo:
    """A model that is not loaded, and is served when a request names it. The fields are `ModelInfo`'s."""

    id: str
    path: Path
    context: int
    created: int


@dataclass(frozen=True, slots=True)
class Health:
    """One moment of the cluster as this agent sees it. `reason` says why it is not ready, in plain words.

    `starting` is what is on its way, such as "tiny is loading (40 %)"; empty when no model is.
    """

    state: str
    epoch: int
    world_size: int
    backend: str
    model: str | None
    reason: str | None
    ready: bool
    open_requests: int
    ranks: tuple[Mapping[str, object], ...] = ()
    starting: str = ""


class TokenStream(Protocol):
    """The events of one request: any number of `Tokens`, then one `StreamEnd`.

    Iterating raises MlxtpError when the epoch ends for good under the request.
    """

    async def accepted(self) -> None:
        """Wait until rank 0 has taken the request. Raises RequestError when it refuses it."""
        ...

    def progress(self) -> Progress: ...

    def __aiter__(self) -> TokenStream: ...

    async def __anext__(self) -> TokenEvent: ...

    async def aclose(self) -> None:
        """Cancel the request on every rank, unless it has ended. May be repeated."""
        ...


class ModelLease(Protocol):
    """A request's turn with the model that it names, from when it waits for it until it has ended.

    `model`: what the model is called once it is there, where the request called it otherwise; else empty.
    """

    model: str

    @property
    def come(self) -> bool:
        """Whether the request may begin. From then on its model stays loaded until `close`."""
        ...

    def progress(self) -> str:
        """What it waits for, such as "loading 40 %"."""
        ...

    def wait(self) -> AsyncIterator[str]:
        """Until it has come; what it waits for, now and then.

        Raises RequestError when it never will: the model cannot be loaded, another one was pinned meanwhile,
        or others take too long.
        """
        ...

    def close(self) -> None:
        """The request has ended, or waits no more. May be repeated."""
        ...


class ImmediateLease:
    """The turn of a request where nobody waits."""

    come = True
    model = ""

    def progress(self) -> str:
        return ""

    async def wait(self) -> AsyncIterator[str]:
        return
        yield

    def close(self) -> None:
        pass


AT_ONCE = ImmediateLease()


class Backend(Protocol):
    """The model as the HTTP side sees it. Everything runs on one event loop."""

    def health(self) -> Health: ...

    def models(self) -> tuple[ModelInfo, ...]:
        """What can be served now: the loaded model, or nothing."""
        ...

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        """What would be loaded for a request that names it: nothing where requests load nothing."""
        ...

    async def acquire_model(self, name: str | None, within_s: float = 0.0) -> ModelLease:
        """The turn of a request for the model `name`, which waits `within_s`; 0 is the server's own limit.

        Raises RequestError: 404 when a pinned model is in its way, 400 when its configuration tells that it
        cannot be served, 503 when another one is about to be loaded and requests here do not wait, or when it
        names none and nothing is loaded.

        What is nowhere has its turn at once: the request then ends as one whose model is not loaded. The
        caller closes the turn after the request.
        """
        ...

    def shortage(self) -> RequestError | None:
        """Return why nothing large is taken now, such as a lack of memory; None where it is."""
        ...

    def text(self) -> Text | None:
        """The tokenizer side of the loaded model, the same object as long as that model stays loaded."""
        ...

    def generate(self, request: Request) -> TokenStream:
        """Start a request.

        A plain function, not a coroutine: what can be refused at once (nothing loaded: RequestError 503
        NOT_READY; full: 429 or 503 OVERLOADED) is raised by this call. What only rank 0 can judge (a grammar,
        the KV cache) is raised by `TokenStream.accepted`, so that a streaming client still gets a real
        status. The caller closes the answer or cancels the task that waits in it: either cancels the request
        on every rank.
        """
        ...
