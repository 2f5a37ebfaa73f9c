"""The OpenAI dialect: `POST /v1/chat/completions`, whole and streamed, and `/v1/models`.

It also has the answer shapes that OpenAI's other dialects share, and the cluster's health.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...errors import MlxtpError, RequestError
from ...text.conversation import Call, ChatMessage, Conversation, GenerationOptions, GenerationRequest
from ...text.tokenizer import Name
from ...text.transcript import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    ContentDelta,
    Finish,
    ReasoningDelta,
    Scored,
    WholeAnswer,
)
from ..adapter import SSE, About, AnswerWriter, Json, Operation, compact, error_body_of
from ..answer_shapes import NO_ITEMS, NO_SCORES, NOT_TRUE, NULL, TRUE, rules
from ..backend import Health, ModelInfo, StoredModelInfo
from ..constraints import ConstrainedBody
from ..generation import Adapter, Generation, Handler
from ..request_body import (
    MOST_MESSAGES,
    BodySchema,
    Integer,
    Schema,
    in_range,
    missing,
    named,
    not_supported,
    parsed,
    shown,
)
from ..streaming import COMMENT
from . import anthropic
from .request_parts import (
    FLAGS,
    MOST_TOKENS,
    THOUGHTS,
    ClientTool,
    OpenAIBody,
    Parameters,
    RoleName,
    TextReader,
    Unused,
    arguments_text,
    begins_answer,
    check_parts,
    content_rule,
    content_text,
    continued,
    lines,
    log_left_out,
    newest,
    role_of,
    template_options,
    text_arguments,
    text_of,
    text_parameters,
    thought_text,
    tool_choice,
)


class Function(Schema):
    """The function of a tool call. The name may be missing and the arguments may be anything."""

    name: str | None = None
    arguments: Any = None


class CustomCallInput(Schema):
    name: str | None = None
    input: str | None = None


class ToolCallInput(Schema):
    id: str | None = None
    type: str | None = None
    function: Function | None = None
    custom: CustomCallInput | None = None


_NO_CALLS: Json = {"tool_calls": NO_ITEMS, "function_call": NULL}


class MessageInput(Schema):
    model_config = rules(
        ({"role": {"const": "assistant"}}, _NO_CALLS),
        content_rule(),
    )

    role: RoleName
    content: Any = None
    name: str | None = None
    refusal: str | None = None
    audio: Json | None = None
    # thoughts, as different servers name them
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_details: Any = None
    thinking_blocks: Any = None
    tool_calls: list[ToolCallInput | None] | None = None
    tool_call_id: str | None = None
    function_call: Function | None = None


class ToolFunction(Schema):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: Parameters = None


class CustomTool(Schema):
    """A tool that takes plain text."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    format: Json | None = None


class OfferedTool(Schema):
    type: str
    function: ToolFunction | None = None
    custom: CustomTool | None = None


class StreamOptions(BodySchema):
    api = "stream_options"

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


MOST_LOGPROBS = 20  # alternatives of a token

Limit = Annotated[Integer, in_range(1, MOST_TOKENS, -1)] | None  # of tokens in an answer; -1: none
TokenIds = Annotated[list[Annotated[Integer, in_range(0, MOST_TOKENS)]], Field(fail_fast=True)] | None


STREAM_RULES = ({"stream_options": NULL}, {"stream": TRUE}), ({"prompt_logprobs": NULL}, {"stream": NOT_TRUE})


class PromptBody(OpenAIBody, ConstrainedBody):
    """Fields of chats and completions."""

    model_config = rules(*STREAM_RULES)

    n: Annotated[Annotated[Integer, in_range(1, 16)] | None, named("n", "n_cmpl")] = None
    max_tokens: Annotated[Limit, named("max_tokens", "n_predict")] = None
    stop_token_ids: TokenIds = None
    allowed_token_ids: TokenIds = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[Integer, in_range(0, MOST_LOGPROBS)] | None = None

    @property
    def scored_prompt(self) -> int:
        """`GenerationOptions.prompt_logprobs`. Raises RequestError for a stream."""
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs needs stream false", param="prompt_logprobs")
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    def options(self, max_tokens: int | None, logprobs: int) -> GenerationOptions:
        """Return the options that both APIs share; no limit of tokens for -1."""
        field, format_ = self.constraint()
        usage = self.stream_options if self.include_usage else None
        return GenerationOptions(
            self.n or 1,
            None if max_tokens == -1 else max_tokens,
            format=format_,
            format_field=field,
            logprobs=logprobs,
            prompt_logprobs=self.scored_prompt,
            stop_tokens=tuple(self.stop_token_ids or ()),
            allowed_tokens=tuple(self.allowed_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            token_ids=bool(self.return_token_ids),
            counts=bool(usage and usage.continuous_usage_stats),
            names_ids=bool(self.return_tokens_as_token_ids),
        )

    @property
    def include_usage(self) -> bool:
        """Raises RequestError for options of a stream that is not asked for."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream true", param="stream_options")
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(PromptBody):
    """The body of `POST /v1/chat/completions`. None means absent, everywhere."""

    api = "chat"
    model_config = rules(*STREAM_RULES, ({"top_logprobs": NO_SCORES}, {"logprobs": TRUE}))

    # the list of errors is bounded
    messages: Annotated[list[MessageInput], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Limit = None
    # scores of its tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, in_range(0, MOST_LOGPROBS)] | None = None
    # tools, and thinking
    tools: Annotated[list[OfferedTool], Field(fail_fast=True)] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Json | None = None
    # a last message of the assistant, as vLLM and SGLang call it
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    echo: bool | None = None
    # refused by `_check_supported`
    functions: Unused = None
    function_call: Annotated[Any, WithJsonSchema({"enum": [None, "none", "auto"]})] = None
    modalities: Annotated[list[Any] | None, WithJsonSchema({"enum": [None, [], ["text"]]})] = None
    audio: Annotated[Any, WithJsonSchema({"type": "null"})] = None

    @property
    def budget(self) -> int | None:
        """The client's limit of tokens in the answer; None without one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


@dataclass(frozen=True, slots=True)
class OpenAIAnswerOptions:
    """Options of the answer. `custom`: names of the tools that take plain text. `echo`: what is repeated."""

    include_usage: bool
    custom: frozenset[str]
    echo: str = ""


# --- from a body to a request. Pure ----------------------------------------------------------------------


def parse_chat(body: bytes) -> GenerationRequest:
    """Return the checked request. Raises RequestError that names the field, the reason and the value."""
    request = parsed(ChatRequest, body)
    if request.max_tokens and request.max_completion_tokens not in (None, request.max_tokens):
        raise RequestError(
            f"max_tokens ({request.max_tokens}) and max_completion_tokens "
            f"({request.max_completion_tokens}) are the same setting: send one of them",
            param="max_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        words = f"top_logprobs {request.top_logprobs} needs logprobs true"
        raise RequestError(words, param="top_logprobs")
    _check_supported(request)
    tools = _tools(request.tools or ())
    offered, choice = tool_choice(request.tool_choice, {tool.name: tool for tool in tools})
    custom = frozenset(tool.name for tool in tools if tool.kind == "custom")
    given = request.chat_template_kwargs or {}  # some clients send the flags there
    conversation = Conversation(
        turns(request.messages),
        tuple(tool.function(tool.name) for tool in tools if tool.name in offered),
        choice,
        request.parallel_tool_calls is not False,
        None if request.reasoning_effort is None else request.reasoning_effort != "none",
        template_options(
            {name: given[name] for name in given if name not in FLAGS}, request.reasoning_effort
        ),
    )
    if begins_answer([given.get(name, getattr(request, name)) for name in FLAGS], conversation):
        conversation = continued(conversation)
    echo = conversation.messages[-1].text if request.echo and conversation.continues else ""
    asked = OpenAIAnswerOptions(request.include_usage, custom, echo)
    logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    return request.generation(conversation, request.options(request.budget, logprobs), asked)


def turns(messages: Sequence[MessageInput]) -> tuple[ChatMessage, ...]:
    """Return a conversation's turns: `developer` becomes `system`, parts of text are joined."""
    found: list[ChatMessage] = []
    names: dict[str, str] = {}
    check_parts(*[part for message in messages for part in (message.content, *_thinking(message))])
    own = newest([message.role for message in messages])
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role, mark = role_of(message.role, f"{where}.role", last=message is messages[-1])
        calls = tuple(_calls(message))
        if calls and role != "assistant":
            raise RequestError(
                f"{where}.tool_calls: only the assistant calls tools, not role {shown(message.role)}",
                param=f"{where}.tool_calls",
            )
        text = lines([mark, content_text(message.content, f"{where}.content", strict=i == own)])
        call_id = message.tool_call_id or ""
        match role:
            case "assistant":
                names |= {call.id: call.name for call in calls}
                spoken = content_text({**message.audio, "type": "audio"}) if message.audio else ""
                text = lines([text, message.refusal or "", spoken])
                found.append(ChatMessage(role, text, _thoughts(message), calls))
            case "tool":
                name = message.name or names.get(call_id, "")
                found.append(ChatMessage(role, text, call_id=call_id, name=name))
            case _:
                found.append(ChatMessage(role, text))
    return tuple(found)


def _calls(message: MessageInput) -> Iterator[Call]:
    """Yield the calls of a message, including one in the older form."""
    for call in (*(message.tool_calls or ()), ToolCallInput(function=message.function_call)):
        match call:
            case ToolCallInput(id=id_, custom=CustomCallInput() as custom):
                yield Call(id_ or "", custom.name or "", text_arguments(custom.input or ""))
            case ToolCallInput(id=id_, function=function) if id_ or function:
                name, given = (function.name, function.arguments) if function else (None, None)
                yield Call(id_ or "", name or "", arguments_text(given))


def _thoughts(message: MessageInput) -> str:
    parts = message.content if isinstance(message.content, list) else ()
    inside = [part for part in parts if isinstance(part, dict) and part.get("type") in THOUGHTS]
    return thought_text(*_thinking(message), inside)


def _thinking(message: MessageInput) -> tuple[Any, ...]:
    """Return the fields that different servers use for thoughts, in order of precedence."""
    return (message.reasoning_content, message.reasoning, message.reasoning_details, message.thinking_blocks)


def _check_supported(request: ChatRequest) -> None:
    called = request.function_call not in (None, "none", "auto")
    other = set(map(str, request.modalities or ())) - {"text"}
    wants: tuple[tuple[str, bool, str], ...] = (
        ("functions", bool(request.functions), "is the older form: send tools"),
        ("function_call", called, "is the older form: send tool_choice"),
        ("modalities", bool(other), "is not supported: answers are text"),
        ("audio", request.audio is not None, "is not supported: answers are text"),
    )
    for name, wanted, why in wants:
        if wanted:
            raise not_supported(f"{name} {shown(getattr(request, name))} {why}", name)


def _tools(given: Sequence[OfferedTool]) -> list[ClientTool]:
    """Return the tools that a model may call, without the provider's own."""
    tools: list[ClientTool] = []
    for i, tool in enumerate(given):
        match tool:
            case OfferedTool(type="function", function=ToolFunction() as function):
                tools.append(ClientTool(function.name, function.description or "", function.parameters))
            case OfferedTool(type="custom", custom=CustomTool() as custom):
                parameters = text_parameters(custom.format)
                tools.append(ClientTool(custom.name, custom.description or "", parameters, "custom"))
            case OfferedTool(type="function" | "custom" as kind):
                raise missing(f"tools[{i}].{kind}")
            case _:
                log_left_out("tools", tool.type)
    return tools


# --- answers ----------------------------------------------------------------------------------------------


Names = Callable[[int], Name]

LEAST_LOGPROB = -9999.0  # OpenAI's value for next to impossible tokens; JSON has no minus infinity


def usage(about: About, finishes: Sequence[Finish]) -> Json:
    """Return the usage of all answers. A prompt token is cached only if no answer had to compute it."""
    prompt, n = sum(about.prompt_tokens), about.ask.options.n
    ends = [finish.end for finish in finishes]
    completion = sum(end.generated for end in ends)
    accepted = sum(end.accepted for end in ends)
    cached = sum(min(end.cached for end in ends[first : first + n]) for first in range(0, len(ends), n))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(end.drafted for end in ends) - accepted,
            "reasoning_tokens": sum(finish.thought for finish in finishes),
        },
    }


def completion_body(
    about: About, wholes: Sequence[WholeAnswer], custom: Collection[str] = (), echo: str = ""
) -> Json:
    """Return the whole answer to a request that does not stream: its texts begin with `echo`.

    `custom`: names of plain-text tools.
    """
    scored = about.ask.options.logprobs >= 0
    rows = [
        {
            "index": index,
            "message": _message(whole, custom, echo),
            "logprobs": logprobs(whole.scores, about.names) if scored else None,
            "finish_reason": whole.finish.reason,
            **ending(about, whole.finish, whole.scores),
        }
        for index, whole in enumerate(wholes)
    ]
    counts = usage(about, [whole.finish for whole in wholes])
    ids = {"prompt_token_ids": about.prompt_ids[0]} if about.ask.options.token_ids else {}
    more = prompt_scores(about, wholes[0], about.ask.options.prompt_logprobs) | ids
    return head(about, "chatcmpl", "chat.completion") | {"choices": rows, "usage": counts} | more


def ending(about: About, finish: Finish, scores: Sequence[Scored] = ()) -> Json:
    """Return what ended an answer, as vLLM and SGLang name it; with its last tokens if they are wanted."""
    matched, options = finish.matched, about.ask.options
    own = isinstance(matched, str) or matched in options.stop_tokens
    last = [finish.end.token] if finish.end.token >= 0 else []
    ids = {"token_ids": [*(token for token, _ in scores), *last]} if options.token_ids else {}
    return {"stop_reason": matched if own else None, "matched_stop": matched} | ids


def _message(whole: WholeAnswer, custom: Collection[str], echo: str) -> Json:
    message: Json = {"role": "assistant", "content": echo + whole.text, "refusal": None}
    if whole.reasoning:
        message |= dict.fromkeys(("reasoning", "reasoning_content"), whole.reasoning)
    if calls := whole.complete_calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            _tool_call(call.id, call.name, call.arguments, call.name in custom) for call in calls
        ]
    return message


def _tool_call(id_: str, name: str, arguments: str, custom: bool) -> Json:
    if custom:
        return {"id": id_, "type": "custom", "custom": {"name": name, "input": text_of(arguments)}}
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def logprobs(scores: Sequence[Scored], names: Names) -> Json:
    """Return scores in OpenAI's shape. A token without bytes has no text in the answer."""
    content = [
        _logprob(token, score.logprob, names)
        | {"top_logprobs": [_logprob(other, logprob, names) for other, logprob in score.top]}
        for token, score in scores
    ]
    return {"content": content, "refusal": None}


def prompt_scores(about: About, whole: WholeAnswer, top: int) -> Json:
    """Return `prompt_logprobs` in vLLM's shape, with `top` alternatives; nothing for -1."""
    if top < 0:
        return {}
    rows: list[Json | None] = [None]  # the first token has no score
    for token, score in whole.prompt:
        ranked = {other: (logprob, rank) for rank, (other, logprob) in enumerate(score.top[:top], 1)}
        rows.append(
            {
                str(each): {"logprob": bounded(logprob), "rank": rank, "decoded_token": about.names(each)[0]}
                for each, (logprob, rank) in ({token: (score.logprob, None)} | ranked).items()
            }
        )
    return {"prompt_logprobs": rows}


def _logprob(token: int, logprob: float, names: Names) -> Json:
    name, bytes_ = names(token)
    return {"token": name, "logprob": bounded(logprob), "bytes": bytes_}


def bounded(logprob: float) -> float:
    """Return a finite logprob, for JSON."""
    return min(max(logprob, LEAST_LOGPROB), 0.0)


def head(about: About, prefix: str, object_: str) -> Json:
    return {
        "id": f"{prefix}-{about.id}",
        "object": object_,
        "created": int(about.created),
        "model": about.model,
    }


class SseWriter(AnswerWriter):
    """Writer of chunks that begin with the same fields. `include_usage`: the last has the usage."""

    def __init__(self, about: About, prefix: str, object_: str, include_usage: bool) -> None:
        self.about = about
        self.head = head(about, prefix, object_)
        self.ends: dict[int, Finish] = {}  # of the choices that have ended
        self.no_usage: Json = {"usage": None} if include_usage else {}  # of all chunks but the last one
        self._counted: Counter[int] = Counter()  # tokens of each choice so far

    def open(self) -> bytes:
        return COMMENT

    def close(self) -> bytes:
        if not self.no_usage:
            return _DONE
        in_order = [self.ends[index] for index in range(self.about.choices)]
        return sse(self.head | {"choices": [], "usage": usage(self.about, in_order)}) + _DONE

    def fail(self, error: MlxtpError) -> bytes:
        return sse(error_body_of(error))

    def running(self) -> Json:
        """Return the usage of a chunk that is not the last."""
        if not self.about.ask.options.counts:
            return self.no_usage
        prompt, completion = sum(self.about.prompt_tokens), self._counted.total()
        total = prompt + completion
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}}

    def tokens(self, choice: int, scores: Sequence[Scored]) -> Json:
        """Count new tokens of a choice, and return them if the request wants them."""
        self._counted[choice] += len(scores)
        wanted = self.about.ask.options.token_ids
        return {"token_ids": [token for token, _ in scores]} if wanted else {}

    def ended(self, choice: int, finish: Finish) -> Json:
        self.ends[choice], self._counted[choice] = finish, finish.end.generated
        return ending(self.about, finish)

    @property
    def first_open(self) -> int:
        return next(choice for choice in range(self.about.choices) if choice not in self.ends)


_DONE = b"data: [DONE]\n\n"


class ChunkWriter(SseWriter):
    """Writer of a chat's chunks. It encodes their common part once."""

    def __init__(
        self, about: About, include_usage: bool, custom: Collection[str] = (), echo: str = ""
    ) -> None:
        super().__init__(about, "chatcmpl", "chat.completion.chunk", include_usage)
        self._custom, self._echo = custom, echo
        self._texts: dict[tuple[int, int], TextReader] = {}  # of the custom calls, by choice and number
        self._before = b"data: " + compact(self.head)[:-1] + b',"choices":[{"index":'
        self._usage = _inside(self.no_usage)
        self._silent = set(range(about.choices))  # choices with nothing sent yet, not even the role

    def begin(self) -> bytes:
        wanted = self.about.ask.options.token_ids
        first = self.idle({"prompt_token_ids": self.about.prompt_ids[0]}) if wanted else b""
        echoed = [ContentDelta(choice, self._echo) for choice in range(self.about.choices) if self._echo]
        return first + b"".join(map(self.write, echoed))

    def idle(self, more: Json) -> bytes:
        """Return an empty chunk of the first open choice, with its role in its first chunk."""
        index = self.first_open
        delta = {"role": "assistant", "content": ""} if index in self._silent else {}
        self._silent.discard(index)
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        choice |= self.tokens(index, ())
        return sse(self.head | {"choices": [choice]} | self.running() | more)

    def write(self, event: AnswerEvent) -> bytes:
        if event.choice not in self._silent:
            return self._rest(event)
        self._silent.remove(event.choice)
        return self._chunk(event.choice, b'{"role":"assistant","content":""}') + self._rest(event)

    def _rest(self, event: AnswerEvent) -> bytes:
        index = event.choice
        match event:
            case ContentDelta(text=text, scores=scores):
                shown = scores and self.about.ask.options.logprobs >= 0
                known = compact(logprobs(scores, self.about.names)) if shown else b"null"
                more = self.tokens(index, scores)
                return self._chunk(index, b'{"content":%b}' % compact(text), known, more=more)
            case ReasoningDelta(text=text):
                thought = compact(text)
                return self._chunk(index, b'{"reasoning":%b,"reasoning_content":%b}' % (thought, thought))
            case CallBegan() | CallArguments():
                return self._call(event)
            case Finish(reason=reason):
                return self._chunk(index, b"{}", reason=compact(reason), more=self.ended(index, event))

    def _call(self, event: CallBegan | CallArguments) -> bytes:
        at = event.choice, event.index
        call: Json = {"index": event.index}
        if isinstance(event, CallBegan):
            custom = event.name in self._custom
            if custom:
                self._texts[at] = TextReader()
            call |= _tool_call(event.id, event.name, "", custom)
        elif at in self._texts:
            more = self._texts[at].push(event.text)
            if not more:
                return b""
            call["custom"] = {"input": more}
        else:
            call["function"] = {"arguments": event.text}
        return self._chunk(event.choice, compact({"tool_calls": [call]}))

    def _chunk(
        self,
        index: int,
        delta: bytes,
        scores: bytes = b"null",
        reason: bytes = b"null",
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        usage = _inside(self.running()) if self.about.ask.options.counts else self._usage
        if self.about.ask.options.token_ids:
            more = {"token_ids": [], **more}
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}]%b}\n\n' % (
            self._before, index, delta, scores, reason, _inside(more), usage,
        )  # fmt: skip


def _inside(fields: Mapping[str, Any]) -> bytes:
    """Return fields for the end of a JSON object."""
    return b"," + compact(dict(fields))[1:-1] if fields else b""


def sse(data: Json) -> bytes:
    return b"data: %b\n\n" % compact(data)


def model_body(model: ModelInfo | StoredModelInfo) -> Json:
    known: Json = {"supported_features": list(model.features)} if isinstance(model, ModelInfo) else {}
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "mlxtp",
        "root": model.id,
        "context_length": model.context,
        "max_model_len": model.context,
    } | known


def models_body(models: Sequence[ModelInfo | StoredModelInfo]) -> Json:
    return {"object": "list", "data": [model_body(model) for model in models]}


def health_body(health: Health) -> Json:
    return {
        "status": "ok" if health.ready else "unavailable",
        "state": health.state,
        "epoch": health.epoch,
        "world_size": health.world_size,
        "backend": health.backend,
        "model": health.model,
        "reason": health.reason,
        "ready": health.ready,
        "open_requests": health.open_requests,
        "ranks": [dict(rank) for rank in health.ranks],
        "deployments": [asdict(each) for each in health.deployments],
    }


# --- the adapter ------------------------------------------------------------------------------------------


PATH = "/v1/chat/completions"
MODELS = "/v1/models"


class OpenAIChat(Adapter):
    """The adapter of chats, and of all paths that no other dialect owns."""

    prefixes = ("/v1/", "/")

    @property
    def endpoints(self) -> Mapping[Operation, Handler]:
        return {
            Operation("GET", MODELS, "The models that can be served, the loaded one first"): _models,
            Operation("GET", f"{MODELS}/", ""): _models,
            Operation("GET", f"{MODELS}/{{id:path}}", "One model"): _model,
            Operation("POST", PATH, "Answer a chat", ChatRequest, SSE): self._chat,
            Operation("POST", f"{PATH}/input_tokens", "Count the tokens of a chat", ChatRequest): _counted,
        }

    async def _chat(self, generation: Generation, request: Request) -> Response:
        return await generation.answer(self, request, parse_chat)

    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        asked: OpenAIAnswerOptions = about.ask.dialect
        return completion_body(about, wholes, asked.custom, asked.echo)

    def writer(self, about: About) -> AnswerWriter:
        asked: OpenAIAnswerOptions = about.ask.dialect
        return ChunkWriter(about, asked.include_usage, asked.custom, asked.echo)


async def _counted(generation: Generation, request: Request) -> Response:
    tokens = await generation.count(request, parse_chat)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})


async def _models(generation: Generation, request: Request) -> Response:
    shape = anthropic.models_body if speaks_anthropic(request.headers) else models_body
    return JSONResponse(shape(await generation.catalog.listed()))


async def _model(generation: Generation, request: Request) -> Response:
    shape = anthropic.model_body if speaks_anthropic(request.headers) else model_body
    return JSONResponse(shape(await generation.catalog.find(request.path_params["id"])))


def speaks_anthropic(headers: Headers) -> bool:
    """Return True for a client of Anthropic's dialect, which lists models at the same path."""
    return "anthropic-version" in headers
