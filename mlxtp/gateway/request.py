"""One open request of a local client or of another agent's gateway, and its retries."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ..api.backend import ModelInfo, Progress, StreamEnd, TokenEvent, Tokens, TokenScore, TokenStream
from ..api.request_metrics import UNWATCHED, SequenceMeter
from ..errors import Code, GroupError, MlxtpError
from ..wire.codecs import Message
from ..wire.messages import (
    Accepted,
    Delta,
    Error,
    Finished,
    Generate,
    Prefilled,
    PrefixDigests,
    ScoredDelta,
    Vectors,
)

# --- retries after a group has failed under a request. Pure ----------------------------------------------
# Most groups fail for reasons of their own, and every request continues in the next one. But a request may
# be the reason: it fills the memory, or crashes a kernel. This policy finds it without ending others. A
# request is a suspect after two failures in a row without progress in between. A single suspect is ended.
# Several are sent again one at a time. If the group fails once more, the suspect that ran is ended.

#: A request that got so many tokens from a group is not blamed for its failure.
PROVEN_TOKENS = 16
SUSPECT = 2  #: Failures in a row that make a suspect.

#: Codes of epochs that ended or became unreachable for reasons other than a request.
_NOBODYS = frozenset((Code.REPLANNED, Code.SHUTTING_DOWN, Code.LINK_LOST, Code.NOT_READY))


def may_blame(code: Code) -> bool:
    """Return True if a request may have caused an end with `code`."""
    return code not in _NOBODYS


def strikes_after(requests: Sequence[RoutedRequest], code: Code, *, spare: bool = False) -> list[int | None]:
    """Return the strikes of each request after its group ended with `code`; None to end the request.

    `spare` ends none unless memory ran out: the fabric may be to blame, and the next group has another.
    """
    if not may_blame(code):
        return [each.strikes for each in requests]
    if code is Code.OUT_OF_MEMORY:
        return _without_the_largest(requests)
    strikes: list[int | None] = [struck(each) for each in requests]
    if spare:
        return strikes
    suspects = [i for i, count in enumerate(strikes) if count is not None and count >= SUSPECT]
    for i in suspects:
        was_alone = len(suspects) == 1 or requests[i].strikes >= SUSPECT
        if was_alone and requests[i].running:
            strikes[i] = None
    return strikes


def struck(request: RoutedRequest) -> int:
    """Return the strikes of a request after a failure that it may have caused."""
    if not request.running:
        return request.strikes
    return 0 if request.came >= PROVEN_TOKENS else request.strikes + 1


def _without_the_largest(requests: Sequence[RoutedRequest]) -> list[int | None]:
    """End the request that filled the memory: the longest without a token yet, else the longest."""
    strikes: list[int | None] = [each.strikes for each in requests]
    running = [i for i, each in enumerate(requests) if each.running]
    begun = [i for i in running if not requests[i].came]
    if running:
        strikes[max(begun or running, key=lambda i: requests[i].length)] = None
    return strikes


def ended(code: Code, detail: str) -> GroupError:
    """Return the error for a request that is not sent again after an end with `code`."""
    if code is Code.OUT_OF_MEMORY:
        return GroupError(f"memory ran out under this request: {detail}", Code.OUT_OF_MEMORY)
    return GroupError(f"the ranks failed twice under this request: {detail}", Code.REQUEST_FATAL)


# --- requests --------------------------------------------------------------------------------------------

# --- of another agent's gateway; rank 0's events go back under the uid it has there -----------------------

RequestProgress = Accepted | Prefilled | ScoredDelta | Vectors  #: a ScoredDelta of the prompt's tokens
RequestResult = Delta | ScoredDelta | Finished | MlxtpError  #: A Delta has one token.


class RequestBackend(Protocol):
    """The destination of requests: rank 0, or the agent on its Mac."""

    def send(self, message: Message) -> None:
        """Send Generate or Cancel. Raises MlxtpError if the backend is gone."""


_numbers = itertools.count(1)


TEXT_COST = 64  #: least tokens that each text of a request for vectors counts as


def cost(told: Generate, tokens: int) -> int:
    """Return the tokens that a request of `tokens` tokens counts as against the limits of open ones."""
    return max(tokens, TEXT_COST * len(told.pooling.lengths))


class RoutedRequest:
    """An open request: its message, its group, and its answer so far."""

    def __init__(self, generate: Generate) -> None:
        self.generate = generate  #: As its present group has it, or as it arrived here.
        self.number = next(_numbers)  #: Unique while this agent runs.
        self.uid = 0  #: Its uid at the backend; 0 while no backend has it.
        self.group = ""  #: Id of the group that has it; empty while none has it, and for a self-test.
        self.backend: RequestBackend | None = None
        self.elsewhere = False  #: True if that backend is on another Mac.
        self.strikes = generate.strikes  #: Failures of groups in a row that it may have caused.
        self.begun_with: ModelInfo | None = None  #: The model that has it, or had it; None before.
        self.left = 0  #: Tokens left to prefill before the next token.
        self._tokens = list(generate.tokens)  #: Prompt and answer so far.
        self._digests = PrefixDigests(self._tokens, generate.salt)

    @property
    def running(self) -> bool:
        return self.uid != 0

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self._tokens)

    @property
    def cost(self) -> int:
        """Tokens that it counts as: a short text's vector takes room, too."""
        return cost(self.generate, self.length)

    @property
    def came(self) -> int:
        """Number of answer tokens that are not in the message."""
        return len(self._tokens) - len(self.generate.tokens)

    @property
    def got(self) -> int:
        """Number of answer tokens so far."""
        return self.generate.answered + self.came

    def hashes(self) -> list[bytes]:
        """Return the block digests of prompt and answer so far."""
        return [] if self.generate.pooling.lengths else self._digests.blocks()


class ForwardedRequest(RoutedRequest):
    """A request of another agent. Its events go back there as messages, under the uid it has there."""

    watch = UNWATCHED  #: Not metered: each agent counts its own clients' requests.

    def __init__(self, generate: Generate, tell: Callable[[Message], None]) -> None:
        super().__init__(generate)
        self._notify = tell

    def again(self, uid: int) -> Generate:
        """Return the message for rank 0, with the uid it will have there."""
        return replace(self.generate, uid=uid, group="")

    def cancelled(self) -> None:
        """Send the last event: the request's own gateway has given it up."""
        self._notify(Finished(self.generate.uid, "cancel", self.got, 0))

    def advance(self, event: RequestProgress) -> None:
        self._notify(replace(event, uid=self.generate.uid))

    def give_back(self, error: MlxtpError, *, struck: bool) -> None:
        """Return it to its own gateway to retry. `struck`: it may have caused the failure."""
        self._notify(Error(Code.RANK_LOST if struck else Code.REPLANNED, error.detail, self.generate.uid))

    def put(self, item: RequestResult) -> None:
        uid = self.generate.uid
        if isinstance(item, Delta | ScoredDelta):
            self._tokens += item.tokens
        match item:
            case Delta():
                self._notify(Delta((uid,), item.indices, item.tokens))
            case ScoredDelta() | Finished():
                self._notify(replace(item, uid=uid))
            case _:
                self._notify(Error(item.code, item.detail, uid))


# --- of a local client, with its unread tokens -----------------------------------------------------------

#: Approximate limit of a client's unread tokens. Beyond it, the request ends.
MAX_UNREAD = 16_384


_QUEUED = Progress("queued")


class ClientRequest(RoutedRequest):
    """Implementation of `api.backend.TokenStream`. Closing it early cancels the request, even uniterated.

    It outlives its group: `again` returns the message for the next one.
    """

    def __init__(self, generate: Generate, abandon: Callable[[ClientRequest], None]) -> None:
        super().__init__(generate)
        self.times = 0  #: Number of times it was sent to a group.
        self.refusals = 0  #: Number of times an agent with a group refused it.
        self._scored = 0  #: Tokens of the prompt up to the last one with a score.
        self.pending: asyncio.TimerHandle | None = None  #: Ends the request unless a group takes it first.
        self.deadline: asyncio.TimerHandle | None = None  #: Ends the request unless it completes first.
        self.watch: SequenceMeter = UNWATCHED  #: Counts its tokens and its end.
        self._prefill = _QUEUED
        self._began = 0.0  # start of the prefill, by the clock
        self._items: asyncio.Queue[TokenEvent | MlxtpError] = asyncio.Queue()
        self._abandon = abandon
        #: The refusal of the request, or None once a backend has accepted it. Its client waits for that.
        self._verdict: asyncio.Future[MlxtpError | None] = asyncio.get_running_loop().create_future()
        self._ended = False
        self.vectors: dict[int, bytes] = {}

    # --- called by the gateway -----------------------------------------------------------------------

    def again(self, uid: int) -> Generate:
        """Return the message for the rest of the answer, under a new uid."""
        self.times += 1
        self._prefill = _QUEUED
        self.generate = replace(
            self.generate, uid=uid, tokens=tuple(self._tokens), answered=self.got, strikes=self.strikes
        )
        if self.got:  # the prompt's scores are complete
            self.generate = replace(self.generate, prompt_logprobs=-1)
        return self.generate

    def accept(self) -> None:
        if not self._verdict.done():
            self.watch.accepted()
            self._verdict.set_result(None)
        self.wait_no_more()

    def advance(self, event: RequestProgress) -> None:
        """Record rank 0's acceptance, prefill progress with scores of the prompt, or vectors."""
        if isinstance(event, Vectors):
            size = len(event.data) // len(event.texts)
            for place, text in enumerate(event.texts):
                if text < len(self.generate.pooling.lengths):
                    self.vectors[text] = event.data[place * size : (place + 1) * size]
            return
        if isinstance(event, Accepted):
            self.accept()
            return
        if isinstance(event, ScoredDelta):
            known = max(self._scored - event.index, 0)  # from a group that has ended
            self._scored = max(self._scored, event.index + len(event.tokens))
            scores = _scores(event)[known:]
            self._items.put_nowait(Tokens(event.tokens[known:], scores, prompt=True))
            return
        now = time.monotonic()
        if self._prefill is _QUEUED:
            self._began = now
        prompt, time_ms = len(self.generate.tokens), round(1000 * (now - self._began))
        self._prefill = Progress("prefill", prompt, event.cached, event.computed, time_ms)

    def wait_no_more(self) -> None:
        """Stop waiting for a group: one has taken the request, or none needs to."""
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None

    def end_within(self, deadline_s: float) -> None:
        """End the request with an error unless it is complete in so many seconds."""
        self.deadline = asyncio.get_running_loop().call_later(deadline_s, self._too_late, deadline_s)

    def put(self, result: RequestResult) -> None:
        item, behind = _event(result), False
        if isinstance(item, Tokens):
            self._tokens += item.tokens
            behind = self._items.qsize() >= MAX_UNREAD
        else:
            self._no_deadline()
            if isinstance(item, StreamEnd):
                self.watch.end(item)
            else:
                self.watch.fail(item)
                if not self._verdict.done():
                    self._verdict.set_result(item)
        if self.pending is not None or not self._verdict.done():
            self.accept()
        self._items.put_nowait(item)
        if behind:
            self._abandon(self)
            detail = f"the client is more than {MAX_UNREAD} tokens behind in reading its answer"
            self.put(MlxtpError(detail, Code.CLIENT_TOO_SLOW))

    # --- called by HTTP ------------------------------------------------------------------------------

    async def accepted(self) -> None:
        try:
            refusal = await asyncio.shield(self._verdict)
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if refusal is not None:
            self._ended = True
            raise refusal

    def progress(self) -> Progress:
        if self.pending is not None:
            return Progress("restarting")
        return Progress() if self.came else self._prefill

    @property
    def cached(self) -> int:
        return self._prefill.cached

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
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
        self._no_deadline()
        self.watch.leave()
        self._abandon(self)

    def _too_late(self, deadline_s: float) -> None:
        self._abandon(self)
        self.put(MlxtpError(f"the answer was not complete within {deadline_s:g} s", Code.DEADLINE))

    def _no_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def _event(result: RequestResult) -> TokenEvent | MlxtpError:
    match result:
        case Delta():
            return Tokens(result.tokens)
        case ScoredDelta():
            return Tokens(result.tokens, _scores(result))
        case Finished(_, reason, generated, _, cached, drafted, accepted, last):
            return StreamEnd(reason, generated, cached, drafted, accepted, last)  # type: ignore[arg-type]
        case _:
            return result


def _scores(event: ScoredDelta) -> tuple[TokenScore, ...]:
    top, pairs = event.top, tuple(zip(event.top_tokens, event.top_logprobs, strict=True))
    return tuple(
        [TokenScore(logprob, pairs[i * top : (i + 1) * top]) for i, logprob in enumerate(event.logprobs)]
    )
