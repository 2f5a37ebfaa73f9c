"""The path from HTTP to rank 0: client requests in, confirmed tokens out. `api/` sees the cluster through it.

A group may end under open requests. Requests of local clients then wait for the next group, which gets the
part that is missing (`ClientRequest.again`). Requests of other agents go back to them: each agent looks after
its own clients, so that no answer depends on a Mac that died.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from ..api.backend import (
    AT_ONCE,
    Health,
    ModelInfo,
    ModelLease,
    Request,
    StoredModelInfo,
    Tokens,
    TokenScore,
    TokenStream,
)
from ..errors import Code, GroupError, MlxtpError, RequestError
from ..models import self_test
from ..text.tokenizer import Text
from ..wire.codecs import Message
from ..wire.messages import MAX_FRAME_TOKENS, Generate, Sampling
from .admission import Admission, AdmissionLimits, FreeMemory, SystemMemory, client_number
from .dispatcher import OpenRequests, RequestDispatcher
from .request import ClientRequest, ForwardedRequest, RequestBackend

WARM_UP_PROMPT = 8
WARM_UP_TOKENS = 6


class ModelSwitch:
    """The part that loads a model because a request names it. This one loads none."""

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        """Return the models that a request can load; see `Backend.on_request`."""
        return ()

    async def acquire_model(
        self, name: str | None, within_s: float, keep_s: float | None = None
    ) -> ModelLease:
        """Return the lease of a request; see `Backend.acquire_model`."""
        return AT_ONCE


class Gateway:
    """Implementation of `api.backend.Backend`. Every open request ends, with its last token or with an error.

    recovery_s  seconds that a request waits for another group; see `RequestDispatcher`
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
        self._deadline_s = deadline_s
        self._salt = secrets.token_bytes(16)
        self.admission = Admission(bounds, memory or FreeMemory())
        self.dispatcher = RequestDispatcher(recovery_s)
        self._model: ModelInfo | None = None
        self._served: ModelInfo | None = None  #: The model that open requests are for.
        self._text: Text | None = None
        #: The reason for the gap between two groups while the second is on its way.
        self._handover: MlxtpError | None = None
        self._switch = ModelSwitch()
        self._on_serving: Callable[[], None] = lambda: None
        #: The reason why new requests are refused. Open ones continue, from group to group if need be.
        self.closing = ""

    # --- called by the agent -------------------------------------------------------------------------

    def serve(
        self, backend: RequestBackend, model: ModelInfo, text: Text, *, here: bool = True, load_s: float = 0.0
    ) -> None:
        """Send requests to `backend` from now on. `here`: it is rank 0, and takes forwarded requests, too.

        `load_s`: seconds that the model took to load, 0 where unknown.
        """
        if self._served is not None and (self._served.id, self._served.path) != (model.id, model.path):
            self.dispatcher.end_all(
                GroupError(f"the cluster now serves {model.id}; send the request again", Code.SHUTTING_DOWN)
            )
        self._model = self._served = model
        self._text, self._handover = text, None
        self.dispatcher.attach(backend, here=here, load_s=load_s)
        self._on_serving()

    def switch_models(self, switch: ModelSwitch, on_serving: Callable[[], None]) -> None:
        """Have requests name models that `switch` loads. Call `on_serving` when a model is available."""
        self._switch, self._on_serving = switch, on_serving

    def detach(self) -> None:
        """Take no new requests for now; open ones stay with their backend."""
        self._model = self._text = self._handover = None
        self.dispatcher.detach()

    def park_open_requests(self, error: MlxtpError) -> None:
        """Move open requests to the next group, because theirs, or the link to it, ended with `error`.

        If a better group takes its place, new requests wait for that one, too.
        """
        model, text = self._model, self._text
        self.detach()
        if error.code is Code.REPLANNED and model is not None:
            self._model, self._text, self._handover = model, text, error
        self.dispatcher.park_all(error)

    def fail_all(self, error: MlxtpError) -> None:
        """Refuse requests from now on, and end the open ones with `error`."""
        self.detach()
        self._served = None
        self.dispatcher.end_all(error)

    def close(self, error: MlxtpError) -> None:
        """Stop serving on this Mac. Requests of other agents may continue elsewhere."""
        self.dispatcher.give_back(error)
        self.fail_all(error)

    def self_test(self, ranks: RequestBackend) -> GroupSelfTest:
        """Return the self-test of a group that takes no requests yet."""
        return GroupSelfTest(lambda request: self._start(ranks, request))

    @property
    def open_requests(self) -> int:
        """Requests that wait for more tokens, other agents' included."""
        return len(self.dispatcher.requests)

    def count_open(self) -> OpenRequests:
        """Count the requests that are open now."""
        return self.dispatcher.count_open(self._served.id if self._served is not None else "")

    # --- called by HTTP ------------------------------------------------------------------------------

    def health(self, model: str = "") -> Health:
        return self._health(self.open_requests)

    def models(self) -> tuple[ModelInfo, ...]:
        return () if self._model is None else (self._model,)

    def text(self, model: str = "") -> Text | None:
        return self._text if self._model is not None and model in ("", self._model.id) else None

    def shortage(self) -> RequestError | None:
        return self.admission.shortage()

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        return await self._switch.on_request()

    async def acquire_model(
        self, name: str | None, within_s: float = 0.0, keep_s: float | None = None
    ) -> ModelLease:
        return await self._switch.acquire_model(name, within_s, keep_s)

    def generate(self, request: Request) -> TokenStream:
        """Start a request; see `Backend.generate`."""
        client = client_number(request.client, self._salt)
        user = client_number(request.user, self._salt)
        self._check(client, len(request.prompt))
        asked = self._start(self.dispatcher.backend, request, client, user)
        assert self._served is not None
        asked.watch = self.dispatcher.meter.begin(self._served.id, request.prompt)
        return asked

    def relay(self, generate: Generate, tell: Callable[[Message], None]) -> Callable[[], None]:
        """Start a request that another agent forwarded. `tell` gets its events under the uid it has there.

        Returns the function that cancels it. Raises RequestError if it is refused at once.
        """
        self._check(generate.client, len(generate.tokens))
        backend = self.dispatcher.backend
        # Two agents that each take the other for rank 0's would forward it for ever.
        if backend is None or not self.dispatcher.here:
            raise RequestError("rank 0 is no longer on this Mac; try again", Code.NOT_READY, status=503)
        forwarded = ForwardedRequest(generate, tell)
        self.dispatcher.admit(forwarded, backend)

        def cancel() -> None:
            self.dispatcher.abandon(forwarded)
            forwarded.cancelled()

        return cancel

    def _check(self, client: int, prompt: int) -> None:
        """Raise RequestError for a new request with `prompt` tokens that is not accepted."""
        if self.closing:
            raise RequestError(f"{self.closing}; try again", Code.SHUTTING_DOWN, status=503)
        if self.dispatcher.backend is None and self._handover is None:
            raise RequestError("no model is loaded right now; try again soon", Code.NOT_READY, status=503)
        open_ = [(request.generate.client, request.length) for request in self.dispatcher.requests]
        self.admission.check(client, prompt, open_)

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
        asked = ClientRequest(generate, self.dispatcher.abandon)
        if backend is None:
            assert self._handover is not None
            self.dispatcher.park(asked, self._handover)
        else:
            self.dispatcher.admit(asked, backend)
        asked.end_within(min(request.deadline_s or self._deadline_s, self._deadline_s))
        return asked


class GroupSelfTest:
    """Short sequences on a group before its first request. `start` sends one to its rank 0."""

    def __init__(self, start: Callable[[Request], TokenStream]) -> None:
        self._start = start

    async def warm_up(self, prompts: Sequence[tuple[int, ...]]) -> self_test.SelfTestTokens:
        """Run short sequences before the first request: a first forward compiles kernels for seconds.

        Returns the answers to the golden prompts, which run first. Raises what a request would raise.
        """
        answers = await self.golden_answers(prompts)
        # Two at once cover the other kinds of steps: one has something to copy, one samples.
        repeated = prompts[0][: max(WARM_UP_PROMPT // 2, 1)] * 2
        sampled = Sampling(temperature=1.0, seed=1)
        await asyncio.gather(
            self._run(Request(repeated, WARM_UP_TOKENS, ignore_eos=True)),
            self._run(Request(prompts[1][:WARM_UP_PROMPT], WARM_UP_TOKENS, sampled, ignore_eos=True)),
        )
        return answers

    async def golden_answers(self, prompts: Sequence[tuple[int, ...]]) -> self_test.SelfTestTokens:
        """Return the answers to the prompts, one by one."""
        requests = [Request(prompt, self_test.ANSWER_TOKENS, ignore_eos=True) for prompt in prompts]
        return tuple([(await self._run(request))[0] for request in requests])

    async def most_probable(self, prompt: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
        """Return the two most probable tokens after a prompt, with their log-probabilities."""
        _, scores = await self._run(Request(prompt, 1, logprobs=2, ignore_eos=True))
        return scores[0].top

    async def _run(self, request: Request) -> tuple[tuple[int, ...], tuple[TokenScore, ...]]:
        tokens: list[int] = []
        scores: list[TokenScore] = []
        async for event in self._start(request):
            if isinstance(event, Tokens):
                tokens += event.tokens
                scores += event.scores
        return tuple(tokens), tuple(scores)
