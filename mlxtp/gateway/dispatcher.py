"""Open requests on their way from group to group. Each ends, with its last token or with an error."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from ..api.backend import StreamEnd, Tokens, TokenScore
from ..api.request_metrics import UNWATCHED, RequestMeter
from ..errors import Code, GroupError, MlxtpError, RequestError
from ..wire.messages import Accepted, Cancel, Delta, Error, Finished, Prefilled, RequestEvent, ScoredDelta
from .request import (
    PROVEN_TOKENS,
    SUSPECT,
    ClientRequest,
    ForwardedRequest,
    RequestBackend,
    ended,
    strikes_after,
    struck,
)

log = logging.getLogger(__name__)

LOADS = 3  #: A request waits for at most so many loads: one may fail, and fewer Macs take longer.
ASK_AGAIN_S = 0.5  #: Seconds until a request goes again to an agent whose rank 0 was not ready.


@dataclass(frozen=True, slots=True)
class OpenRequests:
    """Open requests of local clients for `model`, without those that the agent itself makes.

    running  requests with a first token
    waiting  requests that wait for one: in a queue, in prefill, or for another group
    held     tokens of prompts and answers of all requests at a local rank 0, other agents' included
    """

    model: str
    running: int
    waiting: int
    held: int


class RequestDispatcher:
    """Open requests of one gateway: at a backend, paused between two groups, or behind a suspect.

    recovery_s  seconds that a request waits for another group before it ends with an error; or `LOADS` times
                the last load of the model, if that is longer
    """

    def __init__(self, recovery_s: float) -> None:
        self.recovery_s = recovery_s
        self.load_s = 0.0  #: Seconds that the served model took to load; 0 where unknown.
        self.backend: RequestBackend | None = None
        self.here = False  #: True if the backend is rank 0, which takes forwarded requests, too.
        #: Tokens from rank 0 for requests of this gateway; on the Mac of rank 0, for all requests.
        self.confirmed_tokens = 0
        self.meter = RequestMeter()  #: Counts the requests of local clients.
        self._uids = itertools.count(1)
        #: By uid: the requests that a backend works on.
        self._open: dict[int, ClientRequest | ForwardedRequest] = {}
        self._paused: dict[ClientRequest, None] = {}  #: In order: the requests that wait for a group.
        #: The requests that wait until the suspect before them has proven harmless.
        self._suspects: deque[ClientRequest | ForwardedRequest] = deque()
        self._suspect: ClientRequest | ForwardedRequest | None = None

    # --- one request ---------------------------------------------------------------------------------

    def admit(self, request: ClientRequest | ForwardedRequest, backend: RequestBackend) -> None:
        """Send a request to `backend`, or queue it behind suspects. Raises RequestError if rank 0 is gone."""
        if self.here and request.strikes >= SUSPECT:
            if self._suspect is not None:
                self._suspects.append(request)
                if isinstance(request, ClientRequest):
                    request.wait_no_more()  # there is a group, which will run it later
                return
            self._suspect = request
        uid = next(self._uids)
        try:
            backend.send(request.again(uid))
        except MlxtpError as error:
            if self._suspect is request:
                self._suspect = None
            raise RequestError(f"rank 0 is gone: {error.detail}", Code.NOT_READY, status=503) from error
        request.uid, request.backend, request.elsewhere = (
            uid,
            backend,
            backend is self.backend and not self.here,
        )
        self._open[uid] = request

    def abandon(self, request: ClientRequest | ForwardedRequest) -> None:
        """Drop a request without a waiting client. Unless it is complete, every rank stops working on it."""
        if isinstance(request, ClientRequest):
            self._paused.pop(request, None)
            request.wait_no_more()
        if request in self._suspects:
            self._suspects.remove(request)
        if self._open.get(request.uid) is request:
            del self._open[request.uid]
            assert request.backend is not None
            with contextlib.suppress(MlxtpError):  # rank 0 is gone: nothing decodes any more
                request.backend.send(Cancel(request.uid))
        if self._suspect is request:
            self._next_suspect()

    def on_event(self, event: RequestEvent) -> None:
        """Process an event of rank 0."""
        match event:
            case Delta():
                now = self.meter.clock()
                self.confirmed_tokens += len(event.tokens)
                for uid, token in zip(event.uids, event.tokens, strict=True):
                    if request := self._open.get(uid):
                        request.put(Tokens((token,)))
                        request.watch.tokens(1, now)
            case ScoredDelta():
                self.confirmed_tokens += len(event.tokens)
                if request := self._open.get(event.uid):
                    request.put(Tokens(event.tokens, _scores(event)))
                    request.watch.tokens(len(event.tokens), self.meter.clock())
            case Accepted() | Prefilled():
                if request := self._open.get(event.uid):
                    request.advance(event)
            case Finished():
                if request := self._open.pop(event.uid, None):
                    request.put(
                        StreamEnd(
                            event.reason,  # type: ignore[arg-type]
                            event.generated,
                            event.cached,
                            event.drafted,
                            event.accepted,
                        )
                    )
            case Error():
                if request := self._open.pop(event.uid, None):
                    self._refused(request, _refusal(Code(event.code), event.detail))
        if self._suspect is not None:
            self._next_suspect()

    # --- from one group to the next ------------------------------------------------------------------

    def attach(self, backend: RequestBackend, *, here: bool, load_s: float = 0.0) -> None:
        """Send requests to `backend` from now on, those first that are paused."""
        self.backend, self.here, self.load_s = backend, here, load_s
        self.resume()

    def detach(self) -> None:
        """Forget the backend; open requests stay with it."""
        self.backend = None

    def park_all(self, error: MlxtpError) -> None:
        """Pause the open requests of local clients, because their backend ended with `error`.

        Requests of other agents go back there. A request that may be the reason ends.
        """
        requests = [*self._open.values(), *self._suspects]
        strikes = strikes_after([request.record for request in requests], error.code)
        self._open.clear()
        self._suspects.clear()
        self._suspect = None
        for request, count in zip(requests, strikes, strict=True):
            if count is None:
                log.error("a request ends and is not sent to another group: %s", error.detail)
                request.put(ended(error.code, error.detail))
            elif isinstance(request, ForwardedRequest):
                request.give_back(error, struck=count != request.strikes)
            else:
                request.strikes = count
                self.park(request, error)

    def park(self, request: ClientRequest, error: MlxtpError) -> None:
        """Have a request wait for the next group, for so long before it ends with `error`."""
        request.uid = 0
        self._paused[request] = None
        if request.pending is None:
            loop = asyncio.get_running_loop()
            wait_s = max(self.recovery_s, LOADS * self.load_s)
            request.pending = loop.call_later(wait_s, self._give_up, request, error, wait_s)

    def resume(self) -> None:
        """Send the paused requests to the backend, if there is one, for the parts that are missing."""
        if (backend := self.backend) is None:
            return
        paused, self._paused = self._paused, {}
        for request in paused:
            if request.got >= request.generate.max_tokens:  # only the end is missing
                request.put(StreamEnd("length", request.got))
                continue
            try:
                self.admit(request, backend)
            except RequestError as error:
                self.park(request, error)

    def give_back(self, error: MlxtpError) -> None:
        """Return the requests of other agents, which may continue elsewhere."""
        for request in [*self._open.values(), *self._suspects]:
            if isinstance(request, ForwardedRequest):
                request.give_back(error, struck=False)
        self._open = {
            uid: request for uid, request in self._open.items() if isinstance(request, ClientRequest)
        }
        self._suspects = deque(request for request in self._suspects if isinstance(request, ClientRequest))

    def end_all(self, error: MlxtpError) -> None:
        """End the open requests with `error`."""
        requests = self.requests
        self._open.clear()
        self._paused.clear()
        self._suspects.clear()
        self._suspect = None
        for request in requests:
            request.put(error)

    def _give_up(self, request: ClientRequest, error: MlxtpError, waited_s: float) -> None:
        self.abandon(request)
        detail = f"no group resumed this request within {waited_s:.3g} s: {error.detail}"
        request.put(GroupError(detail, error.code))

    def _refused(self, request: ClientRequest | ForwardedRequest, error: MlxtpError) -> None:
        """Handle an Error for a request: from rank 0 it is final, from another agent it may not be."""
        if (
            isinstance(request, ForwardedRequest)
            or not request.elsewhere
            or not _another_group_may(request, error)
        ):
            request.put(error)
            return
        if error.code is Code.RANK_LOST:
            request.strikes = struck(request.record)
        self.park(request, error)
        asyncio.get_running_loop().call_later(ASK_AGAIN_S, self.resume)

    def _next_suspect(self) -> None:
        suspect = self._suspect
        assert suspect is not None
        if self._open.get(suspect.uid) is suspect and suspect.record.progress < PROVEN_TOKENS:
            return
        self._suspect = None
        while self._suspects and self._suspect is None and self.backend is not None:
            waiting = self._suspects.popleft()
            try:
                self.admit(waiting, self.backend)
            except RequestError as error:
                if isinstance(waiting, ClientRequest):
                    self.park(waiting, error)
                else:
                    waiting.put(error)

    # --- counts --------------------------------------------------------------------------------------

    @property
    def requests(self) -> list[ClientRequest | ForwardedRequest]:
        """Requests that wait for more tokens, other agents' included."""
        return [*self._open.values(), *self._paused, *self._suspects]

    @property
    def relayed(self) -> int:
        """Number of requests of other agents' clients that run here."""
        return sum(isinstance(request, ForwardedRequest) for request in self.requests)

    def count_open(self, model: str) -> OpenRequests:
        """Count the requests that are open now; they are for `model`."""
        own = [
            request
            for request in self.requests
            if isinstance(request, ClientRequest) and request.watch is not UNWATCHED
        ]
        running = sum(request.uid != 0 and request.got > 0 for request in own)
        there = self._open.values() if self.here else ()
        held = sum(request.length for request in there if request.record.progress)
        return OpenRequests(model, running, len(own) - running, held)

    @property
    def queue(self) -> Mapping[str, int]:
        """Open requests, other agents' included, by their phase.

        generating   they have tokens of the present group
        first_token  they wait for the first token, in rank 0's queue or in prefill
        group        they wait for a group to serve
        held_back    they wait for a suspect before them
        """
        progress = [request.record.progress for request in self._open.values()]
        generating = sum(count > 0 for count in progress)
        return {
            "generating": generating,
            "first_token": len(progress) - generating,
            "group": len(self._paused),
            "held_back": len(self._suspects),
        }


def _another_group_may(asked: ClientRequest, error: MlxtpError) -> bool:
    """Return whether a request that another agent has given back can continue in the next group."""
    if isinstance(error, RequestError) or error.code is Code.SHUTTING_DOWN:
        come_back = (Code.NOT_READY, Code.OVERLOADED, Code.SHUTTING_DOWN)
        return asked.times > 1 and error.code in come_back
    return error.code not in (Code.OUT_OF_MEMORY, Code.REQUEST_FATAL)


def _scores(event: ScoredDelta) -> tuple[TokenScore, ...]:
    top = event.top
    pairs = tuple(zip(event.top_tokens, event.top_logprobs, strict=True))
    return tuple(
        TokenScore(logprob, pairs[i * top : (i + 1) * top]) for i, logprob in enumerate(event.logprobs)
    )


def _refusal(code: Code, detail: str) -> MlxtpError:
    if code in (Code.BAD_REQUEST, Code.CONTEXT_OVERFLOW, Code.NOT_SUPPORTED, Code.GRAMMAR_STUCK):
        return RequestError(detail, code)
    if code is Code.OVERLOADED:
        return RequestError(detail, code, status=429)
    if code is Code.NOT_READY:
        return RequestError(detail, code, status=503)
    return GroupError(detail, code)
