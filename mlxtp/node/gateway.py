"""Between HTTP and rank 0: requests in, confirmed tokens out. What `api/` sees of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable

from ..api.backend import End, Event, Health, ModelInfo, Tokens
from ..api.text import Text
from ..errors import Code, GroupError, MlxtpError, RequestError
from ..wire.messages import MAX_FRAME_TOKENS, Cancel, Delta, Error, Finished, Generate
from .ranks import Ranks, RequestEvent

_Item = Event | MlxtpError

WARM_UP_PROMPT = 8
WARM_UP_TOKENS = 3


class Gateway:
    """Implements `api.backend.Backend`. Every open request ends: with its last token or with an error."""

    def __init__(self, health: Callable[[int], Health], max_open: int) -> None:
        self._health = health
        self._max_open = max_open
        self._uids = itertools.count(1)
        self._open: dict[int, asyncio.Queue[_Item]] = {}
        self._ranks: Ranks | None = None
        self._model: ModelInfo | None = None
        self._text: Text | None = None

    # --- what the agent tells ------------------------------------------------------------------------

    def serve(self, ranks: Ranks, model: ModelInfo, text: Text) -> None:
        """From now on requests go to `ranks`."""
        self._ranks, self._model, self._text = ranks, model, text

    def suspend(self, error: MlxtpError) -> None:
        """No requests from now on; those that are open end with `error`."""
        self._ranks = self._model = self._text = None
        for queue in self._open.values():
            queue.put_nowait(error)
        self._open.clear()

    def on_event(self, event: RequestEvent) -> None:
        """What rank 0 emitted."""
        match event:
            case Delta():
                for uid, token in zip(event.uids, event.tokens, strict=True):
                    if queue := self._open.get(uid):
                        queue.put_nowait(Tokens((token,)))
            case Finished():
                if queue := self._open.pop(event.uid, None):
                    queue.put_nowait(End(event.reason, event.generated))  # type: ignore[arg-type]
            case Error():
                if queue := self._open.pop(event.uid, None):
                    queue.put_nowait(_refusal(Code(event.code), event.detail))

    # --- what HTTP asks ------------------------------------------------------------------------------

    def health(self) -> Health:
        return self._health(len(self._open))

    def models(self) -> tuple[ModelInfo, ...]:
        return () if self._model is None else (self._model,)

    def text(self) -> Text | None:
        return self._text

    def generate(self, prompt: tuple[int, ...], max_tokens: int) -> AsyncIterator[Event]:
        """Start a request; see `Backend.generate`."""
        ranks = self._ranks
        if ranks is None:
            raise RequestError("no model is loaded right now; try again soon", Code.NOT_READY, status=503)
        if len(self._open) >= self._max_open:
            raise RequestError(
                f"{len(self._open)} requests are open, the most this server takes",
                Code.OVERLOADED,
                status=429,
            )
        return self._start(ranks, prompt, max_tokens)

    async def warm_up(self, ranks: Ranks, vocabulary: int) -> None:
        """Run two short sequences at once before anybody waits: a first forward compiles kernels for seconds.

        Raises what a request would raise.
        """
        prompt = tuple(range(min(WARM_UP_PROMPT, vocabulary)))

        async def run() -> None:
            async for _ in self._start(ranks, prompt, WARM_UP_TOKENS):
                pass

        await asyncio.gather(run(), run())

    def _start(self, ranks: Ranks, prompt: tuple[int, ...], max_tokens: int) -> _Answer:
        if len(prompt) > MAX_FRAME_TOKENS:
            raise RequestError(
                f"{len(prompt)} prompt tokens; this server takes {MAX_FRAME_TOKENS}", Code.CONTEXT_OVERFLOW
            )
        uid = next(self._uids)
        queue: asyncio.Queue[_Item] = asyncio.Queue()
        try:
            ranks.send(Generate(uid, prompt, max_tokens))
        except MlxtpError as error:
            raise RequestError(f"rank 0 is gone: {error.detail}", Code.NOT_READY, status=503) from error
        self._open[uid] = queue
        return _Answer(queue, lambda: self._abandon(uid, ranks))

    def _abandon(self, uid: int, ranks: Ranks) -> None:
        """Nobody waits for this answer any more; unless it is complete, every rank stops working on it."""
        if self._open.pop(uid, None) is not None:
            with contextlib.suppress(MlxtpError):  # rank 0 is gone: nothing decodes any more
                ranks.send(Cancel(uid))


class _Answer:
    """The events of one request. Closing it before its end cancels the request, even if never iterated."""

    def __init__(self, queue: asyncio.Queue[_Item], abandon: Callable[[], None]) -> None:
        self._queue = queue
        self._abandon = abandon
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self._ended = not isinstance(item, Tokens)
        if isinstance(item, MlxtpError):
            raise item
        return item

    async def aclose(self) -> None:
        self._ended = True
        self._abandon()


def _refusal(code: Code, detail: str) -> MlxtpError:
    if code in (Code.BAD_REQUEST, Code.CONTEXT_OVERFLOW):
        return RequestError(detail, code)
    return GroupError(detail, code)
