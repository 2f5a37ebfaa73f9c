"""The path from HTTP to rank 0: client requests in, confirmed tokens out. `api/` sees the cluster through it.

A group may end under open requests. Requests of local clients then wait for the next group, which gets the
part that is missing (`ClientRequest.again`). Requests of other agents go back to them: each agent looks after
its own clients, so that no answer depends on a Mac that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..api.backend import (
    AT_ONCE,
    Health,
    ModelInfo,
    ModelLease,
    Request,
    StoredModelInfo,
    StreamEnd,
    Tokens,
    TokenScore,
    TokenStream,
)
from ..api.request_metrics import UNWATCHED, NoRequestMeter, RequestMeter
from ..errors import Code, GroupError, MlxtpError, RequestError
from ..groups.local_rank import RequestEvent
from ..models import self_test
from ..text.tokenizer import Text
from ..wire.codecs import Message
from ..wire.messages import (
    MAX_FRAME_TOKENS,
    Accepted,
    Cancel,
    Delta,
    Error,
    Finished,
    Generate,
    Prefilled,
    Sampling,
    ScoredDelta,
)
from .admission import (
    AdmissionLimits,
    FreeMemory,
    SystemMemory,
    client_number,
    is_short,
    load_of,
    refusal,
    short_of_memory,
)
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

WARM_UP_PROMPT = 8
WARM_UP_TOKENS = 6
LOADS = 3  #: A request waits for at most so many loads: one may fail, and fewer Macs take longer.
ASK_AGAIN_S = 0.5  #: Seconds until a request goes again to an agent whose rank 0 was not ready.


class ModelSwitch(Protocol):
    """The part that loads a model because a request names it."""

    async def on_request(self) -> tuple[StoredModelInfo, ...]: ...

    async def acquire_model(self, name: str | None, within_s: float) -> ModelLease: ...


class NoModelSwitch:
    """A switch for a single model, which requests do not change."""

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        return ()

    async def acquire_model(self, _name: str | None, _within_s: float) -> ModelLease:
        return AT_ONCE


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


class Gateway:
    """Implementation of `api.backend.Backend`. Every open request ends, with its last token or with an error.

    recovery_s  seconds that a request waits for another group before it ends with an error; or `LOADS` times
                the last load of the model, if that is longer
    deadline_s  seconds that a request may take in all
    memory      returns the memory that this machine has left
    """

    def __init__(
        self,
        health: Callable[[int], Health],
        bounds: AdmissionLimits,
        recovery_s: float = 60.0,
        deadline_s: float = 3600.0,
        memory: Callable[[], SystemMemory] | None = None,
    ) -> None:
        self._health = health
        self._bounds = bounds
        self._recovery_s = recovery_s
        self.load_s = 0.0  #: Seconds that the served model took to load; 0 where unknown.
        self._deadline_s = deadline_s
        self._memory = memory or FreeMemory()
        self._salt = secrets.token_bytes(16)
        self._uids = itertools.count(1)
        #: By uid: the requests that a backend works on.
        self._open: dict[int, ClientRequest | ForwardedRequest] = {}
        self._paused: dict[ClientRequest, None] = {}  #: In order: the requests that wait for a group.
        #: The requests that wait until the suspect before them has proven harmless.
        self._suspects: deque[ClientRequest | ForwardedRequest] = deque()
        self._suspect: ClientRequest | ForwardedRequest | None = None
        self._backend: RequestBackend | None = None
        self._here = False
        self._model: ModelInfo | None = None
        self._served: ModelInfo | None = None  #: The model that open requests are for.
        self._text: Text | None = None
        #: The reason for the gap between two groups while the second is on its way.
        self._handover: MlxtpError | None = None
        self._admission_hold = ""
        #: Tokens from rank 0 for requests of this gateway; on the Mac of rank 0, for all requests.
        self.confirmed_tokens = 0
        self._elsewhere: Callable[[], str] = lambda: ""
        self._switch: ModelSwitch = NoModelSwitch()
        self._on_serving: Callable[[], None] = lambda: None
        #: The reason why new requests are refused. Open ones continue, from group to group if need be.
        self.closing = ""
        self.meter: RequestMeter = NoRequestMeter()  #: Counts the requests of local clients.

    # --- called by the agent -------------------------------------------------------------------------

    def serve(
        self, backend: RequestBackend, model: ModelInfo, text: Text, *, here: bool = True, load_s: float = 0.0
    ) -> None:
        """Send requests to `backend` from now on. `here`: it is rank 0, and takes forwarded requests, too.

        `load_s`: seconds that the model took to load, 0 where unknown.
        """
        if self._served is not None and (self._served.id, self._served.path) != (model.id, model.path):
            self._end_all(
                GroupError(f"the cluster now serves {model.id}; send the request again", Code.SHUTTING_DOWN)
            )
        self._backend, self._model, self._text, self._here = backend, model, text, here
        self._handover = None
        self._served, self.load_s = model, load_s
        self._take_up()
        self._on_serving()

    def switch_models(self, switch: ModelSwitch, on_serving: Callable[[], None]) -> None:
        """Have requests name models that `switch` loads. Call `on_serving` when a model is available."""
        self._switch, self._on_serving = switch, on_serving

    def mind_memory(self, elsewhere: Callable[[], str]) -> None:
        """Refuse requests also while `elsewhere` returns the name of a Mac that is short of memory."""
        self._elsewhere = elsewhere

    def detach(self) -> None:
        """Take no new requests for now; open ones stay with their backend."""
        self._backend = self._model = self._text = self._handover = None

    def park_open_requests(self, error: MlxtpError) -> None:
        """Move open requests to the next group, because theirs, or the link to it, ended with `error`.

        If a better group takes its place, new requests wait for that one, too.
        """
        model, text = self._model, self._text
        self.detach()
        if error.code is Code.REPLANNED and model is not None:
            self._model, self._text, self._handover = model, text, error
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
                self._park(request, error)

    def fail_all(self, error: MlxtpError) -> None:
        """Refuse requests from now on, and end the open ones with `error`."""
        self.detach()
        self._end_all(error)

    def close(self, error: MlxtpError) -> None:
        """Stop serving on this Mac. Requests of other agents may continue elsewhere."""
        for request in [*self._open.values(), *self._suspects]:
            if isinstance(request, ForwardedRequest):
                request.give_back(error, struck=False)
        self._open = {
            uid: request for uid, request in self._open.items() if isinstance(request, ClientRequest)
        }
        self._suspects = deque(request for request in self._suspects if isinstance(request, ClientRequest))
        self.fail_all(error)

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

    @contextlib.contextmanager
    def hold_admission(self, why: str) -> Iterator[None]:
        """Refuse new requests with the reason `why` inside this context. Clients may retry soon."""
        self._admission_hold = why
        try:
            yield
        finally:
            self._admission_hold = ""

    @property
    def open_requests(self) -> int:
        """Requests that wait for more tokens, other agents' included."""
        return len(self._requests)

    @property
    def relayed(self) -> int:
        """Requests of other agents' clients that run here."""
        return sum(isinstance(request, ForwardedRequest) for request in self._requests)

    def count_open(self) -> OpenRequests:
        """Count the requests that are open now."""
        own = [
            request
            for request in self._requests
            if isinstance(request, ClientRequest) and request.watch is not UNWATCHED
        ]
        running = sum(request.uid != 0 and request.got > 0 for request in own)
        there = self._open.values() if self._here else ()
        held = sum(request.length for request in there if request.record.progress)
        name = self._served.id if self._served is not None else ""
        return OpenRequests(name, running, len(own) - running, held)

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

    @property
    def _requests(self) -> list[ClientRequest | ForwardedRequest]:
        return [*self._open.values(), *self._paused, *self._suspects]

    # --- called by HTTP ------------------------------------------------------------------------------

    def health(self) -> Health:
        return self._health(self.open_requests)

    def models(self) -> tuple[ModelInfo, ...]:
        return () if self._model is None else (self._model,)

    def text(self) -> Text | None:
        return self._text

    def shortage(self) -> RequestError | None:
        return short_of_memory(self._bounds, self._memory(), self._elsewhere())

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        return await self._switch.on_request()

    async def acquire_model(self, name: str | None, within_s: float = 0.0) -> ModelLease:
        return await self._switch.acquire_model(name, within_s)

    def generate(self, request: Request) -> TokenStream:
        """Start a request; see `Backend.generate`."""
        self._refuse_if_closing()
        client = client_number(request.client, self._salt)
        user = client_number(request.user, self._salt)
        asked = self._start(self._available_backend(client, len(request.prompt)), request, client, user)
        assert self._served is not None
        asked.watch = self.meter.begin(self._served.id, request.prompt)
        return asked

    def relay(self, generate: Generate, tell: Callable[[Message], None]) -> Callable[[], None]:
        """Start a request that another agent forwarded. `tell` gets its events under the uid it has there.

        Returns the function that cancels it. Raises RequestError if it is refused at once.
        """
        self._refuse_if_closing()
        backend = self._available_backend(generate.client, len(generate.tokens))
        # Two agents that each take the other for rank 0's would forward it for ever.
        if backend is None or not self._here:
            raise RequestError("rank 0 is no longer on this Mac; try again", Code.NOT_READY, status=503)
        forwarded = ForwardedRequest(generate, tell)
        self._admit(forwarded, backend)

        def cancel() -> None:
            self._abandon(forwarded)
            forwarded.cancelled()

        return cancel

    def _refuse_if_closing(self) -> None:
        if self.closing:
            raise RequestError(f"{self.closing}; try again", Code.SHUTTING_DOWN, status=503)

    def _available_backend(self, client: int, prompt: int) -> RequestBackend | None:
        if self._backend is None and self._handover is None:
            raise RequestError("no model is loaded right now; try again soon", Code.NOT_READY, status=503)
        if self._admission_hold:
            raise RequestError(self._admission_hold, Code.NOT_READY, status=503)
        open_ = [(request.generate.client, request.length) for request in self._requests]
        load = load_of(client, open_, self._bounds.request_tokens)
        refused = refusal(self._bounds, load, prompt, self._memory(), self._elsewhere())
        if refused is not None:
            raise refused
        return self._backend

    @property
    def short(self) -> bool:
        """True while this machine has less memory left than new requests need."""
        return is_short(self._bounds, self._memory())

    async def warm_up(
        self, ranks: RequestBackend, prompts: Sequence[tuple[int, ...]]
    ) -> self_test.SelfTestTokens:
        """Run short sequences before the first request: a first forward compiles kernels for seconds.

        Returns the answers to the golden prompts, which run first. Raises what a request would raise.
        """
        answers = await self.golden_answers(ranks, prompts)
        # Two at once cover the other kinds of steps: one has something to copy, one samples.
        repeated = prompts[0][: max(WARM_UP_PROMPT // 2, 1)] * 2
        sampled = Sampling(temperature=1.0, seed=1)
        await asyncio.gather(
            self._run(ranks, Request(repeated, WARM_UP_TOKENS, ignore_eos=True)),
            self._run(ranks, Request(prompts[1][:WARM_UP_PROMPT], WARM_UP_TOKENS, sampled, ignore_eos=True)),
        )
        return answers

    async def golden_answers(
        self, ranks: RequestBackend, prompts: Sequence[tuple[int, ...]]
    ) -> self_test.SelfTestTokens:
        """Return the answers of a group without requests to the prompts, one by one."""
        requests = [Request(prompt, self_test.ANSWER_TOKENS, ignore_eos=True) for prompt in prompts]
        return tuple([(await self._run(ranks, request))[0] for request in requests])

    async def most_probable(
        self, ranks: RequestBackend, prompt: tuple[int, ...]
    ) -> tuple[tuple[int, float], ...]:
        """Return the two most probable tokens after a prompt, with their log-probabilities."""
        _, scores = await self._run(ranks, Request(prompt, 1, logprobs=2, ignore_eos=True))
        return scores[0].top

    async def _run(
        self, ranks: RequestBackend, request: Request
    ) -> tuple[tuple[int, ...], tuple[TokenScore, ...]]:
        tokens: list[int] = []
        scores: list[TokenScore] = []
        async for event in self._start(ranks, request):
            if isinstance(event, Tokens):
                tokens += event.tokens
                scores += event.scores
        return tuple(tokens), tuple(scores)

    # --- one request ---------------------------------------------------------------------------------

    def _start(
        self, backend: RequestBackend | None, request: Request, client: int = 0, user: int = 0
    ) -> ClientRequest:
        if len(request.prompt) > MAX_FRAME_TOKENS:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens; this server takes at most {MAX_FRAME_TOKENS}",
                Code.CONTEXT_OVERFLOW,
            )
        generate = Generate(
            1,
            request.prompt,
            request.max_tokens,
            request.sampling,
            request.shaping,
            request.logprobs,
            request.ignore_eos,
            client=client,
            user=user,
        )
        asked = ClientRequest(generate, self._abandon)
        if backend is None:
            assert self._handover is not None
            self._park(asked, self._handover)
        else:
            self._admit(asked, backend)
        deadline_s = min(request.deadline_s or self._deadline_s, self._deadline_s)
        loop = asyncio.get_running_loop()
        asked.deadline = loop.call_later(deadline_s, self._too_late, asked, deadline_s)
        return asked

    def _too_late(self, asked: ClientRequest, deadline_s: float) -> None:
        self._abandon(asked)
        asked.put(MlxtpError(f"the answer was not complete within {deadline_s:g} s", Code.DEADLINE))

    def _admit(self, request: ClientRequest | ForwardedRequest, backend: RequestBackend) -> None:
        """Send a request to `backend`, or queue it behind suspects. Raises RequestError if rank 0 is gone."""
        if self._here and request.strikes >= SUSPECT:
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
            backend is self._backend and not self._here,
        )
        self._open[uid] = request

    def _abandon(self, request: ClientRequest | ForwardedRequest) -> None:
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

    # --- from one group to the next ------------------------------------------------------------------

    def _park(self, asked: ClientRequest, error: MlxtpError) -> None:
        asked.uid = 0
        self._paused[asked] = None
        if asked.pending is None:
            loop = asyncio.get_running_loop()
            recovery_s = max(self._recovery_s, LOADS * self.load_s)
            asked.pending = loop.call_later(recovery_s, self._give_up, asked, error, recovery_s)

    def _give_up(self, asked: ClientRequest, error: MlxtpError, waited_s: float) -> None:
        self._abandon(asked)
        detail = f"no group resumed this request within {waited_s:.3g} s: {error.detail}"
        asked.put(GroupError(detail, error.code))

    def _take_up(self) -> None:
        """Send the paused requests to this group, for the parts that are missing."""
        paused, self._paused, backend = self._paused, {}, self._backend
        assert backend is not None
        for asked in paused:
            if asked.got >= asked.generate.max_tokens:  # only the end is missing
                asked.put(StreamEnd("length", asked.got))
                continue
            try:
                self._admit(asked, backend)
            except RequestError as error:
                self._park(asked, error)

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
        self._park(request, error)
        asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._ask_again)

    def _ask_again(self) -> None:
        if self._backend is not None:
            self._take_up()

    def _next_suspect(self) -> None:
        suspect = self._suspect
        assert suspect is not None
        if self._open.get(suspect.uid) is suspect and suspect.record.progress < PROVEN_TOKENS:
            return
        self._suspect = None
        while self._suspects and self._suspect is None and self._backend is not None:
            waiting = self._suspects.popleft()
            try:
                self._admit(waiting, self._backend)
            except RequestError as error:
                if isinstance(waiting, ClientRequest):
                    self._park(waiting, error)
                else:
                    waiting.put(error)

    def _end_all(self, error: MlxtpError) -> None:
        requests = self._requests
        self._open.clear()
        self._paused.clear()
        self._suspects.clear()
        self._suspect = self._served = None
        for request in requests:
            request.put(error)


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
