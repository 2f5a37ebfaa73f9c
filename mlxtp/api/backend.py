"""The HTTP side's interface to the agent. `gateway/gateway.py` implements it; tests have their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..text.conversation import StreamEnd as StreamEnd
from ..text.conversation import TokenEvent as TokenEvent
from ..text.conversation import Tokens as Tokens
from ..text.conversation import TokenScore as TokenScore
from ..vector_files import VectorModel as VectorModel
from ..wire.messages import GREEDY as GREEDY
from ..wire.messages import MAX_BAD_WORDS as MAX_BAD_WORDS
from ..wire.messages import MAX_BIASES as MAX_BIASES
from ..wire.messages import MAX_GRAMMAR as MAX_GRAMMAR
from ..wire.messages import MAX_STOP_TOKENS as MAX_STOP_TOKENS
from ..wire.messages import MAX_WORD_TOKENS as MAX_WORD_TOKENS
from ..wire.messages import PLAIN as PLAIN
from ..wire.messages import Generate as Generate
from ..wire.messages import Pooling as Pooling
from ..wire.messages import Sampling as Sampling
from ..wire.messages import Shaping as Shaping

if TYPE_CHECKING:
    from ..errors import RequestError
    from ..text.tokenizer import Text

DRAINING = "draining"  # State of an agent that finishes its open requests and takes no new ones.
#: States of an agent that may soon have a model whose name it does not know yet.
COMING = ("starting", "forming", "loading", "restarting")


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a request between two tokens, such as "loading 40 %"; empty while it generates.

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

    `defaults` are for requests that leave a setting out; their seed is unused. `features`: `Text.features`.
    `checkpoints`: its KV caches cannot be truncated, so requests name positions to save them at.
    `vectors`: it writes no text, but makes vectors of texts.
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
    checkpoints: bool = False
    vectors: VectorModel | None = None


@dataclass(frozen=True, slots=True)
class StoredModelInfo:
    """A model that is not loaded, but loads when a request names it. The fields are `ModelInfo`'s."""

    id: str
    path: Path
    context: int
    created: int


@dataclass(frozen=True, slots=True)
class DeploymentHealth:
    """State of one deployment, by its `name`.

    `model` is the `ModelInfo.id` that it has or will have, empty if unknown. `pinned`: it stays until a user
    unloads it. `groups_wanted` 0: as many as fit. `reason` says why it is not ready, or why fewer groups are.
    `expires_s`: seconds until an idle deployment is unloaded; None for never.
    """

    name: str
    model: str
    state: str
    pinned: bool
    ready: bool
    reason: str | None = None
    groups_ready: int = 0
    groups_wanted: int = 1
    expires_s: float | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """Snapshot of the cluster as this agent sees it. `reason` says why it is not ready, in plain words.

    `starting` describes the model that is loading, such as "tiny is loading (40 %)"; empty when no model is.
    With several deployments, `ready` means that every pinned one has a ready group.
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
    deployments: tuple[DeploymentHealth, ...] = ()


class TokenStream(Protocol):
    """The events of one request: any number of `Tokens`, then one `StreamEnd`.

    Iterating raises MlxtpError when the epoch ends under the request and it cannot continue.
    """

    async def accepted(self) -> None:
        """Wait until rank 0 has accepted the request. Raises RequestError when rank 0 refuses it."""

    @property
    def group(self) -> str:
        """Id of the group that has the request; empty while none has it, or if unknown."""

    @property
    def vectors(self) -> Mapping[int, bytes]:
        """Vectors of the texts of a request for them, by their places; all of them at its end."""

    def progress(self) -> Progress: ...
    @property
    def cached(self) -> int:
        """Prompt tokens from the prefix cache, as far as known."""

    def __aiter__(self) -> TokenStream: ...
    async def __anext__(self) -> TokenEvent: ...
    async def aclose(self) -> None:
        """Cancel the request on every rank, unless it has ended. May be repeated."""


class ModelLease(Protocol):
    """A request's lease of the model that it names, from the start of its wait until its end.

    `model`: the model's name once it is loaded, where the request named it otherwise; else empty.
    """

    model: str

    @property
    def come(self) -> bool:
        """True once the request may begin. From then on its model stays loaded until `close`."""

    def progress(self) -> str:
        """Return the reason for the wait, such as "loading 40 %"."""

    def wait(self) -> AsyncIterator[str]:
        """Wait for the lease; yield the progress now and then.

        Raises RequestError when the lease cannot be granted: the model cannot be loaded, another one was
        pinned meanwhile, or other requests take too long.
        """

    def close(self) -> None:
        """End the lease, or the wait for it. May be repeated."""


class ImmediateLease:
    """Lease of a request that need not wait."""

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
    """The models as the HTTP side sees them. Everything runs on one event loop."""

    def health(self, model: str = "") -> Health:
        """Return the state of everything that is served, or of one deployment, by its name.

        Then `ready`, `reason`, `starting` and the ranks are about this deployment.
        """

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the models that can be served now, the default first. Their ids differ."""

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        """Return the models that a request can load by name; none if requests may load nothing."""

    async def acquire_model(
        self, name: str | None, within_s: float = 0.0, keep_s: float | None = None, client: str = ""
    ) -> ModelLease:
        """Return the lease of a request for the model `name`. It waits for `within_s`; 0: the server's limit.

        While it waits, it counts among the open requests of its `client`.

        `keep_s`: seconds that the model stays loaded after the request, unless it is pinned; 0 unloads it
        once no request needs it, -1 keeps it forever, None changes nothing.

        Raises RequestError: 404 when its files are missing, or another model is pinned under its name; 400
        when it cannot be served; 503 when it is not served soon, or when it names none and nothing is loaded;
        429 or 503 OVERLOADED when it would wait while too many requests are open.

        An unknown model gets its lease at once; the request then fails because its model is not loaded. The
        caller closes the lease after the request.
        """

    def shortage(self) -> RequestError | None:
        """Return the reason to refuse large requests now, such as a lack of memory; else None."""

    def text(self, model: str = "") -> Text | None:
        """Return the text side of a loaded model, the same object while that model stays loaded.

        `model` is a `ModelInfo.id`; empty for the default. None if it is not loaded.
        """

    def generate(
        self,
        told: Generate,
        *,
        model: str = "",
        client: str = "",
        user: str = "",
        sharer: str = "",
        deadline_s: float = 0.0,
    ) -> TokenStream:
        """Start a request. It has no uid and no client numbers yet.

        `model` is a `ModelInfo.id`; empty for the default. Clients take turns, and so do the users of one
        `client`; an empty name is a client, too. Requests with one `sharer` share cached prompt prefixes.
        `deadline_s` 0 means the server's own.

        Raises immediate refusals: RequestError 503 NOT_READY if nothing is loaded, 429 or 503 OVERLOADED if
        full. Rank 0 decides about grammars and the KV cache; `TokenStream.accepted` raises its refusals. The
        caller closes the answer or cancels the task that reads it: both cancel the request on every rank.
        """
