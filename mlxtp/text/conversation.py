"""Requests for text in no dialect, and the events of answers. Pure.

Every adapter converts its clients' requests to this form, and writes the answer in its dialect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that a model made. `arguments` is JSON text of an object; in history, any text."""

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

    `aliases` are other names under which the model may call it.
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
    """Options of an answer.

    `max_tokens` None is as many as fit, and so is a number that does not fit. `settings` has the rest that a
    client set of the engine's `Sampling` and `Shaping`, by their fields. `seed` None is a fresh one.
    `logit_bias` has token ids as text for keys. `format` is a `response_format` in the form of OpenAI's chat.
    `logprobs` -1 requests none, 0 those of the chosen tokens, k also the k most probable others. `deadline_s`
    0 is the server's own, in seconds.
    """

    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    settings: Mapping[str, float] = field(default_factory=dict)
    format: Mapping[str, Any] | None = None
    logprobs: int = -1
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: Mapping[str, float] = field(default_factory=dict)
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


# --- sizes ------------------------------------------------------------------------------------------------


def characters(conversation: Conversation) -> int:
    """Return the length of the conversation before the template adds its own text, in characters."""
    turns = conversation.messages
    calls = sum(len(call.name) + len(call.arguments) for turn in turns for call in turn.calls)
    tools = sum(len(json.dumps(tool_json(tool))) for tool in conversation.tools)
    return sum(len(turn.text) + len(turn.reasoning) for turn in turns) + calls + tools
