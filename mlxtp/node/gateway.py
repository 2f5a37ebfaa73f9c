"""Between HTTP and rank 0: requests in, confirmed tokens out. What `api/` sees of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ..api.backend import Answer, End, Event, Health, ModelInfo, Request, Score, Tokens
from ..api.text import Text
from ..errors import Code, GroupError, MlxtpError, RequestError
from ..wire.base import Message
from ..wire.messages import (
    MAX_FRAME_TOKENS,
    Accepted,
    Cancel,
    Delta,
    Error,
    Finished,
    Generate,
    Sampling,
    ScoredDelta,
)
from . import golden
from .rank_process import RequestEvent
from .relayed import Item, Relayed


class Desk(Protocol):
    """Where requests go: rank 0, or the agent that has it."""

    def send(self, message: Message) -> None:
        """Generate or Cancel. Raises MlxtpError when nobody takes them any more."""


WARM_UP_PROMPT = 8
WARM_UP_TOKENS = 6


class Gateway:
    """Implements `api.backend.Backend`. Every open request ends: with its last token or with an error."""

    def __init__(self, health: Callable[[int], Health], max_open: int) -> None:
        self._health = health
        self._max_open = max_open
        self._uids = itertools.count(1)
        self._open: dict[int, _Answer | Relayed] = {}
        self._desk: Desk | None = None
        self._here = False
        self._model: ModelInfo | None = None
        self._text: Text | None = None

    # --- what the agent tells ------------------------------------------------------------------------

    def serve(self, desk: Desk, model: ModelInfo, text: Text, *, here: bool = True) -> None:
        """From now on requests go to `desk`. `here`: that is rank 0, and requests of others may go there."""
        self._desk, self._model, self._text, self._here = desk, model, text, here

    def suspend(self, error: MlxtpError) -> None:
        """No requests from now on; those that are open end with `error`."""
        self._desk = self._model = self._text = None
        for answer in self._open.values():
            answer.put(error)
        self._open.clear()

    def on_event(self, event: RequestEvent) -> None:
        """What rank 0 emitted."""
        match event:
            case Delta():
                for uid, token in zip(event.uids, event.tokens, strict=True):
                    if answer := self._open.get(uid):
                        answer.put(Tokens((token,)))
            case ScoredDelta():
                if answer := self._open.get(event.uid):
                    answer.put(Tokens(event.tokens, _scores(event)))
            case Accepted():
                if answer := self._open.get(event.uid):
                    answer.accept()
            case Finished():
                if answer := self._open.pop(event.uid, None):
                    answer.put(
                        End(
                            event.reason,  # type: ignore[arg-type]
                            event.generated,
                            event.cached,
                            event.drafted,
                            event.accepted,
                        )
                    )
            case Error():
                if answer := self._open.pop(event.uid, None):
                    answer.put(_refusal(Code(event.code), event.detail))

    @property
    def open_requests(self) -> int:
        """Requests that wait for more tokens, other agents' included."""
        return len(self._open)

    # --- what HTTP asks ------------------------------------------------------------------------------

    def health(self) -> Health:
        return self._health(len(self._open))

    def models(self) -> tuple[ModelInfo, ...]:
        return () if self._model is None else (self._model,)

    def text(self) -> Text | None:
        return self._text

    def generate(self, request: Request) -> Answer:
        """Start a request; see `Backend.generate`."""
        return self._start(self._free_desk(), request)

    def relay(self, generate: Generate, tell: Callable[[Message], None]) -> Callable[[], None]:
        """Start a request that another agent's gateway sent; `tell` gets its events under its own uid.

        Returns what cancels it. Raises RequestError when it is refused at once.
        """
        desk = self._free_desk()
        if not self._here:  # two agents that each take the other for rank 0's would pass it on for ever
            raise RequestError("rank 0 is not on this Mac any more", Code.NOT_READY, status=503)
        uid = next(self._uids)
        self._send(desk, replace(generate, uid=uid))
        relayed = Relayed(generate.uid, tell)
        self._open[uid] = relayed

        def cancel() -> None:
            self._abandon(uid, desk)
            relayed.cancelled()

        return cancel

    def _free_desk(self) -> Desk:
        if self._desk is None:
            raise RequestError("no model is loaded right now; try again soon", Code.NOT_READY, status=503)
        if len(self._open) >= self._max_open:
            raise RequestError(
                f"{len(self._open)} requests are open, the most this server takes",
                Code.OVERLOADED,
                status=429,
            )
        return self._desk

    async def warm_up(self, ranks: Desk, vocabulary: int) -> tuple[int, ...]:
        """Run short sequences before anybody waits: a first forward compiles kernels for seconds.

        Returns the answers to the golden prompts, which go first, one by one. Raises what a request would
        raise.
        """

        async def run(request: Request) -> tuple[int, ...]:
            tokens: list[int] = []
            async for event in self._start(ranks, request):
                if isinstance(event, Tokens):
                    tokens += event.tokens
            return tuple(tokens)

        fixed = golden.prompts(vocabulary)
        answers = [await run(Request(prompt, golden.ANSWER_TOKENS, ignore_eos=True)) for prompt in fixed]
        # Two at once, one of them with something to copy, one that samples: the other kinds of steps.
        repeated = fixed[0][: max(WARM_UP_PROMPT // 2, 1)] * 2
        sampled = Sampling(temperature=1.0, seed=1)
        await asyncio.gather(
            run(Request(repeated, WARM_UP_TOKENS, ignore_eos=True)),
            run(Request(fixed[1][:WARM_UP_PROMPT], WARM_UP_TOKENS, sampled, ignore_eos=True)),
        )
        return tuple([token for answer in answers for token in answer])

    def _start(self, desk: Desk, request: Request) -> _Answer:
        if len(request.prompt) > MAX_FRAME_TOKENS:
            raise RequestError(
                f"{len(request.prompt)} prompt tokens; this server takes {MAX_FRAME_TOKENS}",
                Code.CONTEXT_OVERFLOW,
            )
        uid = next(self._uids)
        self._send(
            desk,
            Generate(
                uid,
                request.prompt,
                request.max_tokens,
                request.sampling,
                request.shaping,
                request.logprobs,
                request.ignore_eos,
            ),
        )
        answer = _Answer(lambda: self._abandon(uid, desk))
        self._open[uid] = answer
        return answer

    def _send(self, desk: Desk, generate: Generate) -> None:
        try:
            desk.send(generate)
        except MlxtpError as error:
            raise RequestError(f"rank 0 is gone: {error.detail}", Code.NOT_READY, status=503) from error

    def _abandon(self, uid: int, desk: Desk) -> None:
        """Nobody waits for this answer any more; unless it is complete, every rank stops working on it."""
        if self._open.pop(uid, None) is not None:
            with contextlib.suppress(MlxtpError):  # rank 0 is gone: nothing decodes any more
                desk.send(Cancel(uid))


class _Answer:
    """The events of one request. Closing it before its end cancels the request, even if never iterated."""

    def __init__(self, abandon: Callable[[], None]) -> None:
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._abandon = abandon
        self._judged = asyncio.Event()
        self._refusal: MlxtpError | None = None
        self._ended = False

    # --- what the gateway puts in --------------------------------------------------------------------

    def accept(self) -> None:
        self._judged.set()

    def put(self, item: Item) -> None:
        if isinstance(item, MlxtpError) and not self._judged.is_set():
            self._refusal = item
        self._judged.set()
        self._items.put_nowait(item)

    # --- what HTTP takes out -------------------------------------------------------------------------

    async def accepted(self) -> None:
        try:
            await self._judged.wait()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if self._refusal is not None:
            self._ended = True
            raise self._refusal

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._items.get()
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


def _scores(event: ScoredDelta) -> tuple[Score, ...]:
    top = event.top
    pairs = tuple(zip(event.top_tokens, event.top_logprobs, strict=True))
    return tuple(Score(logprob, pairs[i * top : (i + 1) * top]) for i, logprob in enumerate(event.logprobs))


def _refusal(code: Code, detail: str) -> MlxtpError:
    if code in (Code.BAD_REQUEST, Code.CONTEXT_OVERFLOW, Code.NOT_SUPPORTED, Code.GRAMMAR_STUCK):
        return RequestError(detail, code)
    if code is Code.OVERLOADED:
        return RequestError(detail, code, status=429)
    if code is Code.NOT_READY:
        return RequestError(detail, code, status=503)
    return GroupError(detail, code)
