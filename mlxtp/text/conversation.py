"""Requests for text in no dialect, and the events of answers. Pure."""

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
    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None  #: JSON schema of an object; None takes nothing.
    aliases: tuple[str, ...] = ()  #: other names under which the model may call it

    @property
    def schema(self) -> Mapping[str, Any]:
        return self.parameters or {"type": "object", "properties": {}}


def tool_json(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's form, which chat templates take as well."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = AUTO  #: or NONE, REQUIRED (the model has to call one), or a tool's name
    parallel: bool = True  #: One answer may hold several calls.
    thinking: bool | None = None  #: None leaves it to the model's template.
    template_options: Mapping[str, Any] = field(default_factory=dict)
    needs_thinking: bool = False  #: A model that cannot think is refused.


Prompt = str | tuple[int, ...]  #: Text or tokens that a model continues, without a chat template.


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    n: int = 1
    max_tokens: int | None = None  #: None, or a number that does not fit: as many as fit
    stop: tuple[str, ...] = ()
    #: what else a client set of the engine's `Sampling` and `Shaping`, by their fields
    settings: Mapping[str, float] = field(default_factory=dict)
    format: Mapping[str, Any] | None = None  #: `response_format` of OpenAI's chat
    logprobs: int = -1  #: -1: none, 0: those of the chosen tokens, k: also the k most probable others
    ignore_eos: bool = False
    seed: int | None = None  #: None: a fresh one
    logit_bias: Mapping[str, float] = field(default_factory=dict)  #: by token ids as text
    deadline_s: float = 0.0  #: 0: the server's own


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    model: str | None  #: None or "default" is the one that is loaded.
    prompt: Conversation | tuple[Prompt, ...]
    options: GenerationOptions = GenerationOptions()
    stream: bool = False
    user: str = ""  #: distinguishes clients of one address
    dialect: Any = None  #: data that the adapter needs again when it writes the answer
    keep_s: float | None = None  #: as in `Backend.acquire_model`


FinishReason = Literal["stop", "length", "cancel"]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability (natural) of one chosen token, and the most probable (token, log-probability) pairs."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly confirmed tokens, in order. An end token may be among them; its text is never shown."""

    tokens: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()  #: of each token if the request has log-probabilities


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Last event of a request. "cancel": the backend gave it up, and the client sees an error, no answer."""

    reason: FinishReason
    generated: int  #: every token, the end token too
    cached: int = 0  #: prompt tokens from the prefix cache
    drafted: int = 0
    accepted: int = 0  #: of the drafted tokens


TokenEvent = Tokens | StreamEnd


def characters(conversation: Conversation) -> int:
    """Return the length of the conversation before the template adds its own text, in characters."""
    turns = conversation.messages
    calls = sum(len(call.name) + len(call.arguments) for turn in turns for call in turn.calls)
    tools = sum(len(json.dumps(tool_json(tool))) for tool in conversation.tools)
    return sum(len(turn.text) + len(turn.reasoning) for turn in turns) + calls + tools
