"""Requests for text in no dialect, their form for chat templates, and the events of answers. Pure.

Every adapter converts its clients' requests to this form, and writes the answer in its dialect. For a model
whose template does not support tools, the system message describes them and requests calls in the format of
Hermes and Qwen. Results of its tools become messages of the user.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that a model made. `arguments` is JSON text, an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. `call_id` and `name` identify the call that a "tool" turn answers."""

    role: Role
    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """Function that the model may call. `parameters` is a JSON schema of an object; None takes nothing.

    `aliases`: other names under which a model may call it.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    aliases: tuple[str, ...] = ()


def tool_json(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's form, which chat templates take as well."""
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation for a model with a chat template to answer.

    `tool_choice`: `AUTO` (the model decides), `NONE`, `REQUIRED` (it has to call one), or a tool's name.
    `parallel`: one answer may hold several calls. `thinking` None leaves it to the model's template.
    `template_options` go to the template unchanged. With `needs_thinking`, a model that cannot think is
    refused.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = AUTO
    parallel: bool = True
    thinking: bool | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    needs_thinking: bool = False


Prompt = str | tuple[int, ...]  #: Text or tokens that a model continues, without a chat template.


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options of an answer. None: the client did not set it, the model's default counts.

    `max_tokens` None is as many as fit, and so is a number that does not fit. `format` is a `response_format`
    in the form of OpenAI's chat. `logprobs` -1 requests none, 0 those of the chosen tokens, k also the k most
    probable others. `logit_bias` has token ids as text for keys. `deadline_s` 0 is the server's own, in
    seconds.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    format: Mapping[str, Any] | None = None
    logprobs: int = -1
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Conversation to answer, or prompts to continue, each `options.n` times.

    `model` None or "default" is the one that is loaded. `user` distinguishes clients of one address.
    `dialect` is data that the adapter needs again when it writes the answer. `keep_s` is that of
    `Backend.acquire_model`.
    """

    model: str | None
    prompt: Conversation | tuple[Prompt, ...]
    options: GenerationOptions = GenerationOptions()
    stream: bool = False
    user: str = ""
    dialect: Any = None
    keep_s: float | None = None


# --- the answer, as a model gives it ---------------------------------------------------------------------

FinishReason = Literal["stop", "length", "cancel"]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability (natural) of one chosen token, and the most probable (token, log-probability) pairs."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly confirmed tokens, in order. An end token may be among them; its text is never shown.

    `scores` has one entry for each token if the request has log-probabilities, else it is empty.
    """

    tokens: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Last event of a request. `generated` counts every token, the end token too.

    "cancel" means that the backend gave the request up: the client sees an error, never a short answer.
    `cached` prompt tokens came from the prefix cache. Of `drafted` tokens, `accepted` were right.
    """

    reason: FinishReason
    generated: int
    cached: int = 0
    drafted: int = 0
    accepted: int = 0


TokenEvent = Tokens | StreamEnd


# --- conversations in the form of chat templates ---------------------------------------------------------


Json = dict[str, Any]

_TOLD = """You can call functions to help with the user's request. These exist, one JSON object a line:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as a JSON object between these tags, and nothing else:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""


def template_messages(conversation: Conversation, knows_tools: bool) -> list[Json]:
    """Return the messages for a template that supports tools (`knows_tools`), or does not."""
    return next(_ways_to_say(conversation, knows_tools))


def plainer_messages(conversation: Conversation, knows_tools: bool) -> Iterator[list[Json]]:
    """Yield other forms of the same messages, for a template that refused the first; each changes more."""
    ways = _ways_to_say(conversation, knows_tools)
    last = next(ways)
    for messages in ways:
        if messages != last:
            yield messages
        last = messages


def _ways_to_say(conversation: Conversation, knows_tools: bool) -> Iterator[list[Json]]:
    if knows_tools:
        yield [_message(turn) for turn in _matched(conversation.messages)]
        renamed = numbered(conversation.messages)
        yield [_message(turn) for turn in renamed]
        yield [_message(turn) for turn in _one_at_a_time(renamed)]
    else:
        turns = _with_tools([_told_apart(turn) for turn in conversation.messages], conversation.tools)
        yield [{"role": turn.role, "content": turn.text} for turn in turns]
        yield [{"role": turn.role, "content": turn.text} for turn in _taking_turns(turns)]


def template_options(conversation: Conversation) -> Json:
    """Return further variables for the template, which ignores those that it does not know."""
    options = dict(conversation.template_options)
    if conversation.thinking is not None:
        options |= {"enable_thinking": conversation.thinking, "thinking": conversation.thinking}
    return options


def characters(conversation: Conversation) -> int:
    """Return the length of the conversation before the template adds its own text, in characters."""
    turns = sum(
        len(turn.text) + len(turn.reasoning) + _call_characters(turn) for turn in conversation.messages
    )
    return turns + sum(len(json.dumps(tool_json(tool))) for tool in conversation.tools)


def _call_characters(turn: ChatMessage) -> int:
    return sum(len(call.name) + len(call.arguments) for call in turn.calls)


def _message(turn: ChatMessage) -> Json:
    message: Json = {"role": turn.role, "content": turn.text}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call, arguments in ((call, _object(call.arguments)) for call in turn.calls)
        ]
    if turn.role == "tool":
        message |= {"tool_call_id": turn.call_id, "name": turn.name}
    return message


def _object(arguments: str) -> Mapping[str, Any]:
    """Return arguments as the object that templates take. Text that is no object stays visible."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _told_apart(turn: ChatMessage) -> ChatMessage:
    if turn.role == "tool":
        return ChatMessage("user", f"<tool_response>\n{turn.text}\n</tool_response>")
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in turn.calls
    ]
    return ChatMessage(turn.role, "\n".join([*filter(None, [turn.text]), *calls]))


def _with_tools(turns: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[ChatMessage]:
    """Join results of several tools in one message of the user, and put the tools in the system message."""
    joined: list[ChatMessage] = []
    for turn in turns:
        if joined and turn.role == "user" and turn.text.startswith("<tool_response>"):
            last = joined[-1]
            if last.role == "user" and last.text.startswith("<tool_response>"):
                joined[-1] = ChatMessage("user", f"{last.text}\n{turn.text}")
                continue
        joined.append(turn)
    if not tools:
        return joined
    told = _TOLD.format(tools="\n".join(json.dumps(tool_json(tool), ensure_ascii=False) for tool in tools))
    if joined and joined[0].role == "system":
        return [ChatMessage("system", f"{joined[0].text}\n\n{told}"), *joined[1:]]
    return [ChatMessage("system", told), *joined]


# --- requirements of templates ------------------------------------------------------------------------------


def numbered(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Give calls new ids in their order, of nine digits, because Mistral's templates take no others."""
    return _matched(turns, renumber=True)


def _matched(turns: Sequence[ChatMessage], renumber: bool = False) -> list[ChatMessage]:
    """Give results of tools the names of their calls: each answers the first open call with its id.

    A model that writes its ids itself may use one twice.
    """
    matched: list[ChatMessage] = []
    numbers, open_ = count(1), dict[str, list[Call]]()
    for turn in turns:
        calls: list[Call] = []
        latest: dict[str, list[Call]] = {}
        for call in turn.calls:
            calls.append(replace(call, id=f"{next(numbers):09}") if renumber else call)
            latest.setdefault(call.id, []).append(calls[-1])
        open_ |= latest
        found = replace(turn, calls=tuple(calls))
        if turn.role == "tool" and open_.get(turn.call_id):
            answered = open_[turn.call_id].pop(0)
            found = replace(turn, call_id=answered.id, name=answered.name)
        matched.append(found)
    return matched


def _one_at_a_time(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Put each call in a turn of its own, with its result behind it, because Llama 3 requires it.

    No two calls have the same id.
    """
    answers = {turn.call_id: turn for turn in turns if turn.role == "tool"}
    apart: list[ChatMessage] = []
    for turn in turns:
        if turn.role == "tool":
            apart += [turn] if answers.pop(turn.call_id, None) is not None else []
        elif not turn.calls:
            apart.append(turn)
        else:
            first, *others = turn.calls
            apart.append(replace(turn, calls=(first,)))
            for call in (first, *others):
                if call is not first:
                    apart.append(ChatMessage("assistant", "", calls=(call,)))
                if (answer := answers.pop(call.id, None)) is not None:
                    apart.append(answer)
    return apart


def _taking_turns(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Make user and assistant alternate, without a system role, for Gemma and the first Mistral."""
    two = [replace(turn, role="user") if turn.role == "system" else turn for turn in turns]
    return [
        ChatMessage(role, "\n\n".join([turn.text for turn in group]))
        for role, group in groupby(two, key=lambda turn: turn.role)
    ]
