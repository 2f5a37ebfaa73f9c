"""The path from HTTP to rank 0: client requests in, confirmed tokens out. `api/` sees the cluster through it.

If a group ends, open requests of local clients go to another ready group of the same deployment, or wait for
the next one. The new group generates the rest (`ClientRequest.again`). Requests of other agents go back to
them: each agent looks after its own clients, so no answer depends on a Mac that died.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..api.backend import (
    AT_ONCE,
    Health,
    ModelInfo,
    ModelLease,
    StoredModelInfo,
    Tokens,
    TokenScore,
    TokenStream,
)
from ..errors import Code, GroupError, MlxtpError, RequestError
from ..models import self_test
from ..text.tokenizer import Text
from ..wire.codecs import Message
from ..wire.messages import MAX_FRAME_TOKENS, Generate, RequestEvent, Sampling
from .admission import Admission, AdmissionLimits, FreeMemory, SystemMemory, client_number
from .dispatcher import NOT_READY, RequestDispatcher, ServedDeployments
from .ready_groups import ReadyGroup
from .request import ClientRequest, ForwardedRequest, RequestBackend, cost
from .routing import GroupLoad

WARM_UP_PROMPT = 8
WARM_UP_TOKENS = 6


class ModelSwitch:
    """The part of a `Backend` that loads the models requests name. This base class loads none."""

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        return ()

    async def acquire_model(
        self, name: str | None, within_s: float, keep_s: float | None, client: int
    ) -> ModelLease:
        return AT_ONCE


class Gateway:
    """Implementation of `api.backend.Backend`. Every open request ends, with its last token or with an error.

    health      returns the health of a deployment, by its name, or of the cluster for ""
    recovery_s  seconds that a request waits for another group; see `RequestDispatcher`
    deadline_s  seconds that a request may take in all
    memory      returns the memory that this machine has left
    """

    def __init__(
        self,
        health: Callable[[str], Health],
        bounds: AdmissionLimits,
        recovery_s: float = 60.0,
        deadline_s: float = 3600.0,
        memory: Callable[[], SystemMemory] | None = None,
    ) -> None:
        self._health = health
        self._deadline_s = deadline_s
        self._salt = secrets.token_bytes(16)
        self.admission = Admission(bounds, memory or FreeMemory())
        self.deployments = ServedDeployments(recovery_s)
        self._switch = ModelSwitch()
        self._on_serving: Callable[[], None] = lambda: None
        #: The reason to refuse new requests; else "". Open ones continue, from group to group if need be.
        self.closing = ""

    # --- called by the agent -------------------------------------------------------------------------

    def serve(
        self,
        group: str,
        deployment: str,
        backend: RequestBackend,
        info: ModelInfo,
        text: Text,
        *,
        here: bool = True,
        load_s: float = 0.0,
        room: int = 0,
    ) -> None:
        """Send requests for a deployment to one more ready group through `backend`, or update that group.

        `here`: the backend is rank 0, and takes forwarded requests, too. `load_s`: seconds that the model
        took to load, 0 if unknown. `room`: tokens that its KV caches may hold, 0 without a bound.
        """
        self.deployments.homes[group] = deployment
        dispatcher = self.deployments.named(deployment)
        ready = dispatcher.groups.get(group)
        if ready is None or ready.backend is not backend or ready.here != here:
            ready = ReadyGroup(backend, here=here, room=room)
            if not here and (told := self.deployments.loads.get(group)) is not None:
                ready.take(told, GroupLoad())
        ready.prefixes.bound(room)
        dispatcher.attach(group, ready, info, text, load_s)
        self._on_serving()

    def switch_models(self, switch: ModelSwitch, on_serving: Callable[[], None]) -> None:
        """Let requests name models for `switch` to load. Call `on_serving` when a model is available."""
        self._switch, self._on_serving = switch, on_serving

    def detach(self, group: str, until: MlxtpError | None = None) -> None:
        """Send no new requests to a group for now; open ones stay with it. See `RequestDispatcher.detach`."""
        if (deployment := self.deployments.of_group(group)) is not None:
            deployment.detach(group, until)

    def park(self, group: str, error: MlxtpError, *, spare: bool = False) -> None:
        """Move a group's open requests to another ready group at once, or make them wait for one.

        The group, or the link to it, ended with `error`. If a better group replaces it, new requests wait,
        too. `spare`: end no suspect.
        """
        if (deployment := self.deployments.of_group(group)) is not None:
            deployment.park_group(group, error, spare=spare)

    def load(self, group: str, load: GroupLoad) -> None:
        """Store the owner's report of a group's work. It may arrive before the group is served."""
        self.deployments.loads[group] = load
        deployment = self.deployments.of_group(group)
        if deployment is not None and group in deployment.groups:
            deployment.groups.take(group, load)

    def fail(self, deployment: str, error: MlxtpError, *, unless_ready: bool = False) -> None:
        """Refuse requests for a deployment from now on, and end the open ones with `error`.

        `unless_ready`: not while a group of it is ready, or about to be.
        """
        dispatcher = self.deployments.by_name.get(deployment)
        if dispatcher is not None and not (
            unless_ready and (dispatcher.groups or self.deployments.coming(deployment))
        ):
            dispatcher.withdraw(error)

    def close(self, error: MlxtpError) -> None:
        """Stop serving on this Mac. Requests of other agents may continue elsewhere."""
        for each in self.deployments.by_name.values():
            each.give_back(error)
            each.withdraw(error)

    def on_event(self, event: RequestEvent) -> None:
        self.deployments.on_event(event)

    def self_test(self, deployment: str, ranks: RequestBackend) -> GroupSelfTest:
        """Return the self-test of a group that takes no requests yet."""
        dispatcher = self.deployments.named(deployment)

        def start(told: Generate) -> TokenStream:
            started = ClientRequest(told, dispatcher.abandon)
            try:
                dispatcher.send(started, ranks)
            except MlxtpError as error:
                raise RequestError(f"rank 0 is gone: {error.detail}", Code.NOT_READY, status=503) from error
            started.end_within(self._deadline_s)
            return started

        return GroupSelfTest(start)

    @property
    def open_requests(self) -> int:
        """Requests that wait for more tokens, other agents' included."""
        return len(self.deployments.requests)

    # --- called by HTTP ------------------------------------------------------------------------------

    def health(self, model: str = "") -> Health:
        return self._health(model)

    def models(self) -> tuple[ModelInfo, ...]:
        models = [each.model for each in self.deployments.ready() if each.model is not None]
        return tuple(sorted(models, key=lambda each: each.vectors is not None))  # the default writes text

    def text(self, model: str = "") -> Text | None:
        deployment = self.deployments.serving(model)
        return deployment.text if deployment is not None else None

    def shortage(self) -> RequestError | None:
        return self.admission.shortage()

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        return await self._switch.on_request()

    async def acquire_model(
        self, name: str | None, within_s: float = 0.0, keep_s: float | None = None, client: str = ""
    ) -> ModelLease:
        number = client_number(client, self._salt)
        return await self._switch.acquire_model(name, within_s, keep_s, number)

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
        told = replace(
            told,
            client=client_number(client, self._salt),
            user=client_number(user, self._salt),
            # The same number on all Macs: each may send the request to the group with its cached prefix.
            salt=client_number(sharer, b""),
        )
        deployment = self.deployments.serving(model)
        self._check(deployment, told)
        assert deployment is not None
        assert deployment.served is not None
        asked = ClientRequest(told, deployment.abandon)
        deployment.admit(asked, deployment.handover or NOT_READY)
        asked.end_within(min(deadline_s or self._deadline_s, self._deadline_s))
        asked.watch = self.deployments.meter.begin(deployment.served.id, asked.group, told.tokens)
        return asked

    def relay(self, generate: Generate, tell: Callable[[Message], None]) -> Callable[[], None]:
        """Start a request that another agent forwarded. `tell` gets its events under the uid it has there.

        Returns the function that cancels it. Raises RequestError for an immediate refusal. Between two
        groups, it raises the reason for the gap, or GroupError (LINK_LOST); the request's own gateway then
        makes it wait for the next group.
        """
        # If it forwarded, two agents that each take the other for rank 0's would do so forever.
        deployment = self.deployments.owning(generate.group)
        between = self.deployments.of_group(generate.group) if deployment is None else None
        if between and between.served and generate.group not in between.groups and not self.closing:
            raise between.handover or GroupError("the group has ended", Code.LINK_LOST)
        self._check(deployment, generate)
        assert deployment is not None
        forwarded = ForwardedRequest(generate, tell)
        deployment.admit(forwarded)

        def cancel() -> None:
            deployment.abandon(forwarded)
            forwarded.cancelled()

        return cancel

    def _check(self, deployment: RequestDispatcher | None, told: Generate) -> None:
        if self.closing:
            raise RequestError(f"{self.closing}; try again", Code.SHUTTING_DOWN, status=503)
        if deployment is None:
            raise RequestError("no model is loaded right now; try again soon", Code.NOT_READY, status=503)
        self.admission.check(told.client, cost(told, len(told.tokens)), self.deployments.open())
        if len(told.tokens) > MAX_FRAME_TOKENS:
            raise RequestError(
                f"the prompt has {len(told.tokens)} tokens; this server takes at most {MAX_FRAME_TOKENS}",
                Code.CONTEXT_OVERFLOW,
            )


class GroupSelfTest:
    """Short sequences on a group before its first request. `start` sends one to its rank 0."""

    def __init__(self, start: Callable[[Generate], TokenStream]) -> None:
        self._start = start

    async def warm_up(self, prompts: Sequence[tuple[int, ...]]) -> self_test.SelfTestTokens:
        """Run short sequences before the first request, since a first forward compiles kernels for seconds.

        Returns the answers to the golden prompts, which run first. Raises the errors of a request.
        """
        answers = await self.golden_answers(prompts)
        # Two at once cover the other kinds of steps: one can copy from its prompt, one samples.
        repeated = prompts[0][: max(WARM_UP_PROMPT // 2, 1)] * 2
        sampled = Sampling(temperature=1.0, seed=1)
        await asyncio.gather(
            self._run(repeated, WARM_UP_TOKENS),
            self._run(prompts[1][:WARM_UP_PROMPT], WARM_UP_TOKENS, sampling=sampled),
        )
        return answers

    async def golden_answers(self, prompts: Sequence[tuple[int, ...]]) -> self_test.SelfTestTokens:
        """Return the answers to the prompts, one by one."""
        return tuple([(await self._run(prompt, self_test.ANSWER_TOKENS))[0] for prompt in prompts])

    async def most_probable(self, prompt: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
        """Return the two most probable tokens after a prompt, with their log-probabilities."""
        _, scores = await self._run(prompt, 1, logprobs=2)
        return scores[0].top

    async def _run(
        self, prompt: tuple[int, ...], most: int, **wanted: Any
    ) -> tuple[tuple[int, ...], tuple[TokenScore, ...]]:
        tokens: list[int] = []
        scores: list[TokenScore] = []
        async for event in self._start(Generate(0, prompt, most, ignore_eos=True, **wanted)):
            if isinstance(event, Tokens):
                tokens += event.tokens
                scores += event.scores
        return tuple(tokens), tuple(scores)
