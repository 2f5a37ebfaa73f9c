"""From a `GenerationRequest` to its answer, for all dialects: model, prompt, queue, stream, errors."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import Code, MlxtpError, RequestError
from ..text.answers import ReadingPlan, StopFinder
from ..text.calls import CallReader
from ..text.conversation import ChatMessage, Conversation, GenerationOptions, GenerationRequest, characters
from ..text.replay import Beginning, CompleteAnswer
from ..text.tokenizer import Name, Text
from ..text.transcript import AnswerEvent, ContentDelta, Finish, ReasoningDelta, Transcript, WholeAnswer
from . import field_names
from . import sampling as settings
from .adapter import About, AnswerWriter, Dialect, Json, Operation, compact, error_status, in_words_of
from .backend import (
    MAX_STOP_TOKENS,
    Backend,
    Generate,
    ModelInfo,
    ModelLease,
    Progress,
    Shaping,
    StoredModelInfo,
)
from .catalog import Catalog, token_budget
from .guard import address_of, is_local
from .key_limits import BATCH, INTERACTIVE, PRIORITIES
from .prompts import Prompts, WrittenPrompts, encoded
from .request_body import BODY_S, MAX_BODY_BYTES, Bodies, Body, wrong
from .request_context import current, note
from .sampling import Guidance, guidance
from .streaming import AnswerStream, Choices, LoadingStream, collect, unless_gone
from .vectors import COUNTED, TEXT, VectorAnswer, VectorRequest, bytes_of, check_kind, named, told_of

log = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S")
AnyModel = ModelInfo | StoredModelInfo

PRIORITY = "x-mlxtp-priority"  #: Header with the class of a request.
MOST_BEGUN = 4096  #: tokens of an answer's beginning that a rank reads by a grammar, while others wait
ACCEPT_S = 1.0  # seconds that headers wait for acceptance
_PLAIN = "/#:@+=,;!~ "  # not escaped in a header, nor are letters and digits


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """A checked request, with one backend request a choice. Answers are remembered at `place`, if any."""

    text: Text
    model: ModelInfo
    requests: tuple[Generate, ...]
    stops: tuple[str, ...]
    about: About
    held: Guidance
    thinking: bool
    place: Beginning | None

    def transcripts(self) -> list[Transcript]:
        """Return a transcript for each choice. Raises RequestError for a beginning that is no such one."""
        options = self.about.ask.options
        finder = StopFinder(self.stops) if self.stops else None  # builds its tables once for all choices
        given = _given(self.about.ask)
        found = [
            Transcript(
                self.text.detokenizer(skip=self.model.eos, inside=given is not None),
                copy(finder),
                self.requests[0].logprobs >= 0,
                named=options.token_ids or options.counts,
                silent=options.max_tokens == 0,
                choice=index,
                plan=self._plan(),
                specials=self.text.specials,
            )
            for index in range(len(self.requests))
        ]
        if given is not None:
            for transcript in found:
                transcript.begin_with(given)
        return found

    def _plan(self) -> ReadingPlan | None:
        """Return the plan for reading an answer; None when it can contain only text."""
        prompt, markup, held = self.about.ask.prompt, self.text.markup, self.held
        if self.requests[0].shaping.grammar_kind:  # a grammar leaves no room for thoughts
            markup = replace(markup, think=None)
        if not isinstance(prompt, Conversation) or not (held.calls or markup.think or markup.headers):
            return None
        if held.calls is None:
            return ReadingPlan(markup, self.thinking)
        most = 0 if prompt.parallel or held.dropped else 1
        calls = CallReader(held.calls, prompt.tools, held.forced, most)
        return ReadingPlan(markup, self.thinking, calls, held.dropped)


class Generation:
    """Generation of answers for every adapter's routes. `retry_after_s`: the `Retry-After` of refusals."""

    def __init__(
        self,
        backend: Backend,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        keep_alive_s: float = 3.0,
        retry_after_s: int = 5,
        body_s: float = BODY_S,
    ) -> None:
        self.catalog = Catalog(backend)
        self._backend = backend
        self._prompts = Prompts()
        self._bodies = Bodies(backend, max_body_bytes, body_s)
        self.keep_alive_s = keep_alive_s
        self._retry_after_s = retry_after_s

    async def parsed(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """Return the result of `parse` for the whole body. Raises the errors of `parse` and `Bodies.read`."""
        async with self._bodies.read(request) as body:
            return await body.parsed(parse)

    async def count(self, request: Request, parse: Callable[[bytes], GenerationRequest]) -> int:
        """Return the number of tokens in the request's prompt. Raises RequestError."""

        def write(ask: GenerationRequest, text: Text, model: AnyModel, guided: bool) -> WrittenPrompts:
            return self._prompts.written(ask, text, model, guided=guided, client=_sharer(request))

        *_, found = await self.prompted(request, parse, write)
        return sum(map(len, found.tokens))

    async def prompted(
        self,
        request: Request,
        parse: Callable[[bytes], GenerationRequest],
        write: Callable[[GenerationRequest, Text, AnyModel, bool], WrittenPrompts],
    ) -> tuple[GenerationRequest, Text, AnyModel, WrittenPrompts]:
        """Return a request that needs no answer, with its prompts as `write` makes them, and their tokens.

        `write` gets the request, its model, and True for an answer without thoughts. Raises RequestError.
        """
        async with self._bodies.read(request) as body:
            ask = await body.parsed(parse, slow=True)
            model, text = await self.catalog.opened(ask.model)
            client, size = _client(request), _size(ask, body)

            def written() -> WrittenPrompts:
                return write(ask, text, model, bool(guidance(ask, text, text.eos).grammar[0]))

            prompts = await text.line(size).run(written, client, size)
            found = await encoded(ask, text, prompts, model.context, client=client)
            if (context := current()) is not None:
                context.counted_tokens += sum(map(len, found.tokens))
            return ask, text, model, found

    async def load(self, request: Request, name: str | None, keep_s: float | None) -> ModelInfo:
        """Return the model of this name, once it is loaded. The request's body must have been read.

        `keep_s`: see `Backend.acquire_model`. Raises RequestError if there is no such model, it cannot be
        loaded, or the key may not load it or change how long it stays.
        """
        name = await self._permitted(name)
        if keep_s is not None and (context := current()) is not None and not context.loads:
            words = f"the key {context.key} may not change how long models stay: that is scope on-request"
            raise RequestError(words, Code.NOT_PERMITTED, status=403)
        with closing(await self._backend.acquire_model(name, 0.0, keep_s, _client(request))) as lease:
            await unless_gone(request.receive, _come(lease))
            return (await self.catalog.loaded(lease.model or name))[0]

    async def answer(
        self,
        dialect: Adapter,
        request: Request,
        parse: Callable[[bytes], GenerationRequest],
        *,
        slow: bool = False,
    ) -> Response:
        """Return the answer to one request, streamed or whole. Raises MlxtpError before anything was sent.

        `slow`: `parse` may take long even for a short body.
        """
        async with AsyncExitStack() as open_:
            body = await open_.enter_async_context(self._bodies.read(request))
            ask = await body.parsed(parse, slow=slow)
            context = current()
            ask = replace(ask, model=await self._permitted(ask.model), batch=_is_batch(request))
            keep_s = ask.keep_s if context is None or context.loads else None
            lease = await self._backend.acquire_model(
                ask.model, ask.options.deadline_s, keep_s, _client(request)
            )
            open_.callback(lease.close)
            about, answers = _about(ask), Choices()
            open_.push_async_callback(answers.aclose)
            asking = asyncio.create_task(self._asked(request, body, lease, about, answers))
            open_.push_async_callback(_end, asking)
            if ask.stream:
                await unless_gone(request.receive, asyncio.wait({asking}, timeout=ACCEPT_S))
                if asking.done():
                    asking.result()  # a refusal that still gets its status
                # The model has one name in all events, from the first one on.
                about.model = about.model or lease.model or ask.model or "default"
                waiting = LoadingStream(dialect, about, asking, partial(_progress, lease, answers))
                source = open_.pop_all()  # from here on the stream closes them
                stream = AnswerStream(
                    waiting.parts(),
                    source,
                    self.keep_alive_s,
                    waiting.idle,
                    dialect.media_type,
                    headers=_headers(about),
                )
                return dialect.streamed(waiting.writer, stream)
            wholes = await unless_gone(request.receive, _wholes(asking, about.choices))
        if max(ask.options.logprobs, ask.options.prompt_logprobs) < 0:
            return _json(dialect.whole(about, wholes), _headers(about))
        # Scores take long to encode; a thread keeps other requests' tokens moving.
        return await asyncio.to_thread(lambda: _json(dialect.whole(about, wholes), _headers(about)))

    async def vectors(
        self, request: Request, parse: Callable[[bytes], S], ask_of: Callable[[S], VectorRequest]
    ) -> tuple[S, VectorAnswer, AsyncExitStack]:
        """Return the parsed body, the vectors or scores that it asks for, and their room. Raises MlxtpError.

        The caller closes the room once the client has them.
        """

        def both(data: bytes) -> tuple[S, VectorRequest]:
            return (found := parse(data)), ask_of(found)

        async with AsyncExitStack() as room:
            body = await room.enter_async_context(self._bodies.read(request))
            found, ask = await body.parsed(both)
            name = await self._permitted(named(ask.model, ask.kind, self.catalog.models()))
            keep_s = ask.keep_s if (context := current()) is None or context.loads else None
            with closing(await self._backend.acquire_model(name, 0.0, keep_s, _client(request))) as lease:
                making = self._vectors(request, ask, body, lease, name)
                return found, await unless_gone(request.receive, making), room.pop_all()

    async def _vectors(
        self, request: Request, ask: VectorRequest, body: Body, lease: ModelLease, name: str | None
    ) -> VectorAnswer:
        arrived_ns, client, batch = time.perf_counter_ns(), _client(request), _is_batch(request)
        await _come(lease)
        loaded_ns = max(time.perf_counter_ns() - arrived_ns, 1)
        model, text = await self.catalog.loaded(lease.model or name)
        check_kind(model, ask.kind)
        size = max(body.size, len(ask.texts) * COUNTED)
        told = await text.line(size).run(partial(told_of, ask, model, text, batch=batch), client)
        body.release()
        body.hold(bytes_of(ask, model))
        user, sharer = ask.user[: settings.MAX_USER_CHARS], _sharer(request)
        answer = self._backend.generate(told, model=model.id, client=client, user=user, sharer=sharer)
        try:
            await answer.accepted()
            async for _ in answer:
                pass
        finally:
            await answer.aclose()
        found = [answer.vectors.get(place, b"") for place in range(len(ask.texts))]
        if len(set(map(len, found))) != 1 or not found[0]:
            raise MlxtpError("the ranks sent other vectors than were asked for", Code.INTERNAL)
        return VectorAnswer(model.id, tuple(found), len(told.tokens), loaded_ns)

    def refusal(self, dialect: Dialect, error: MlxtpError, more: Mapping[str, str] | None = None) -> Response:
        """Return the response that refuses. `more` adds or replaces headers."""
        status = error_status(error)
        note(error.code)
        if not isinstance(error, RequestError):
            log.warning("request failed with %s: %s", error.code, error.detail)
        headers = dict(more or {})
        if status in (429, 503, 529):
            headers.setdefault("retry-after", str(self._retry_after_s))
        elif status == 504:  # the same request would take too long again
            headers["x-should-retry"] = "false"
        elif status == 408:  # the rest of the body must not be taken for another request
            headers["connection"] = "close"
        body = dialect.error(in_words_of(dialect, error), status)
        if "request_id" in body:  # Anthropic's clients look for it in both places
            headers["request-id"] = body["request_id"]
        return JSONResponse(body, status, headers=headers)

    async def _permitted(self, name: str | None) -> str | None:
        name = self.catalog.permitted(name)
        await self.catalog.check_loads(name)
        return name

    async def _asked(
        self, request: Request, body: Body, lease: ModelLease, about: About, answers: Choices
    ) -> AsyncGenerator[AnswerEvent]:
        """Return the events of `answers` once rank 0 has accepted the request, and complete `about`."""
        ask, client, sharer = about.ask, _client(request), _sharer(request)
        if not lease.come:
            arrived = time.monotonic()
            await _come(lease)
            waited_s = time.monotonic() - arrived
            about.loaded_ns = max(int(waited_s * 1e9), 1)
            ask = replace(ask, options=_left(ask.options, waited_s))
        about.ask = ask = replace(ask, model=lease.model or ask.model)
        job = await self._job(about, body, client, sharer)
        if (given := _given(ask)) is None:
            transcripts = job.transcripts()
        else:  # it may be long
            size = len(given.text or given.reasoning)
            transcripts = await job.text.line(size).run(job.transcripts, client)
        body.release()
        for told in job.requests:
            answers.add(
                self._backend.generate(
                    told,
                    model=job.model.id,
                    client=client,
                    user=ask.user[: settings.MAX_USER_CHARS],
                    sharer=sharer,
                    deadline_s=ask.options.deadline_s,
                )
            )
        try:
            await answers.accepted()
        except RequestError as error:
            if error.code is Code.BAD_REQUEST:
                field = "tools" if ask.options.format is None and job.held.grammar[0] else None
                error.param = error.param or (
                    field if ask.options.format is None else ask.options.format_field
                )
            raise
        about.group = answers.group

        def ended(record: WholeAnswer, finish: Finish) -> None:
            if job.place is not None:
                prompt, tokens = job.requests[finish.choice].tokens, transcripts[finish.choice].tokens
                answer = CompleteAnswer(prompt, tokens, record, finish)
                self._prompts.remember(job.text, job.model.eos, job.place, answer)

        if given is None:
            return answers.events(transcripts, ended)
        begun = ReasoningDelta(0, given.reasoning), ContentDelta(0, given.text)
        return answers.events(transcripts, ended, begun)

    async def _job(self, about: About, body: Body, client: str, sharer: str) -> _PreparedRequest:
        ask, options = about.ask, about.ask.options
        model, text = await self.catalog.loaded(ask.model)
        check_kind(model, TEXT)
        seed = secrets.randbits(63) if options.seed is None else settings.seed_of(options.seed)
        about.sampling = sampling = settings.sampling(options, model.defaults, seed)
        stops = settings.stop_strings(options.stop)
        ends = settings.token_ids(options.stop_tokens, model.vocabulary, MAX_STOP_TOKENS, "stop_token_ids")

        def write() -> tuple[Guidance, Shaping, WrittenPrompts]:
            held = guidance(ask, text, model.eos)
            shaping = settings.shaping(options, model.vocabulary, held.grammar, held.banned)
            shaping = settings.without_words(shaping, options.bad_words, text, model.vocabulary)
            guided = bool(shaping.grammar_kind)
            return held, shaping, self._prompts.written(ask, text, model, guided=guided, client=sharer)

        held, shaping, written = await text.line(_size(ask, body)).run(write, client)
        prompted = await encoded(
            ask, text, written, model.context, checkpoints=model.checkpoints, client=client
        )
        prompts = prompted.tokens
        guided = bool(shaping.grammar_kind)
        given = _given(ask)
        budgets = [token_budget(options.max_tokens, prompt, model) for prompt in prompts]
        if guided and given is not None:
            shaping = replace(shaping, grammar_begun=_begun(text, prompts[0], given.text))
        settings.check_scores(sum(map(len, prompts)) * options.n, options)
        settings.check_min_tokens(shaping.min_tokens, options.max_tokens)
        shaping = replace(shaping, min_tokens=min(shaping.min_tokens, *budgets))
        if self._backend.text(model.id) is not text:  # the model was loaded again, or is gone
            raise self.catalog.not_ready(model.id)
        requests: list[Generate] = []
        for prompt, max_tokens in zip(prompts, budgets, strict=True):
            first = Generate(
                0,
                prompt,
                max_tokens,
                sampling,
                shaping,
                logprobs=options.logprobs,
                prompt_logprobs=options.prompt_logprobs,
                ignore_eos=options.ignore_eos,
                stop_tokens=ends,
                places=prompted.places,
                batch=ask.batch,
            )
            requests += settings.choices(first, options.n)

        def name(token: int) -> Name:
            alone, bytes_ = text.name(token)
            alone = f"token_id:{token}" if options.names_ids else alone
            return alone, None if token in model.eos else bytes_

        about.names, about.model = name, about.model or model.id
        about.prompt_tokens, about.prompts = tuple(map(len, prompts)), _shown_prompts(ask, text)
        about.prompt_ids = tuple(prompts)
        thinking = not guided and text.thinks_on(prompts[0]) if given is None else not given.text
        own_style = not (held.forced or held.dropped)  # a template writes what the model wrote
        place = prompted.place if own_style else None
        return _PreparedRequest(text, model, tuple(requests), stops, about, held, thinking, place)


Handler = Callable[[Generation, Request], Awaitable[Response]]


class Adapter(Dialect):
    """A dialect with its endpoints. `prefixes`: paths below which an error has its shape."""

    prefixes: tuple[str, ...]

    @property
    @abstractmethod
    def endpoints(self) -> Mapping[Operation, Handler]:
        """Handlers, each of an entry in `/openapi.json`. A generating one calls `Generation.answer`."""

    def streamed(self, writer: AnswerWriter, stream: AnswerStream) -> Response:
        """Return the response to a request with a streamed answer. Must not raise: the stream is open."""
        return stream


async def _come(lease: ModelLease) -> None:
    async for _ in lease.wait():
        pass


def _given(ask: GenerationRequest) -> ChatMessage | None:
    """Return the beginning of the answer, if the client gave one."""
    prompt = ask.prompt
    return prompt.messages[-1] if isinstance(prompt, Conversation) and prompt.continues else None


def _begun(text: Text, prompt: Sequence[int], given: str) -> int:
    """Return the number of tokens of an answer's beginning that its grammar reads. Raises RequestError."""
    if 0 < (count := text.spelling(prompt, given)) <= MOST_BEGUN:
        return count
    why = f"has {count} tokens; at most {MOST_BEGUN} can be held to a format"
    if not count:
        why = (
            "cannot be held to a format: it is a thought, or its first token is partly of the text before it"
        )
    raise RequestError(f"the assistant's last message {why}; leave out one of both", param="messages")


def _left(options: GenerationOptions, waited_s: float) -> GenerationOptions:
    left_s = options.deadline_s and max(options.deadline_s - waited_s, 0.001)
    return replace(options, deadline_s=left_s)


def _shown_prompts(ask: GenerationRequest, text: Text) -> tuple[str, ...]:
    if isinstance(ask.prompt, Conversation):
        return ()
    return tuple(each if isinstance(each, str) else text.decoded(each) for each in ask.prompt)


def _about(ask: GenerationRequest) -> About:
    prompts = 1 if isinstance(ask.prompt, Conversation) else len(ask.prompt)
    return About(uuid.uuid4().hex, time.time(), "", (0,) * prompts, (), lambda _token: ("", None), ask)


def _progress(lease: ModelLease, answers: Choices) -> Progress:
    return answers.progress() if lease.come else Progress(lease.progress())


async def _wholes(asking: asyncio.Task[AsyncGenerator[AnswerEvent]], count: int) -> list[WholeAnswer]:
    return await collect(await asking, count)


def _client(request: Request) -> str:
    """Return the client of the current HTTP request: its key, else its address."""
    account = current()
    return f"key {account.key}" if account is not None and account.key else address_of(request.client)


def _sharer(request: Request) -> str:
    """Return the name under which a request shares cached prompt prefixes: its key, else its address.

    Empty for all programs on this Mac that need no key.
    """
    account = current()
    if account is not None and account.key_hash:
        return f"key {account.key_hash}"
    return "" if is_local(request.scope) else f"address {address_of(request.client)}"


def _is_batch(request: Request) -> bool:
    """Return True for a request of class batch, by its key or its header. Raises RequestError."""
    given, account = request.headers.get(PRIORITY, INTERACTIVE), current()
    if given not in PRIORITIES:
        raise wrong(PRIORITY, " or ".join(PRIORITIES), given)
    return given == BATCH or (account is not None and account.batch)


async def _end(task: asyncio.Task[AsyncGenerator[AnswerEvent]]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _size(ask: GenerationRequest, body: Body) -> int:
    """Return the larger of body and prompts, since a short body may refer to a long conversation."""
    prompt = ask.prompt
    return max(body.size, characters(prompt) if isinstance(prompt, Conversation) else sum(map(len, prompt)))


def _headers(about: About) -> dict[str, str]:
    """Return the headers of an answer. The group's id is percent-encoded if it is not ASCII."""
    found = {"x-mlxtp-group": quote(about.group, safe=_PLAIN)} if about.group else {}
    return found | field_names.headers(about.ask.ignored)


def _json(body: Json, headers: Mapping[str, str]) -> Response:
    return Response(compact(body), headers=headers, media_type="application/json")
