"""Requests for text, and events of answers, independent of dialects. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str  #: JSON text of an object; in history, any text


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Role
    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""  #: of the call that a "tool" message answers
    name: str = ""  #: that call's tool


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None  #: JSON schema of an object; None: no parameters.
    aliases: tuple[str, ...] = ()  #: other names under which the model may call it

    @property
    def schema(self) -> Mapping[str, Any]:
        return self.parameters or {"type": "object", "properties": {}}


def tool_json(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's form, which chat templates take too."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = AUTO  #: or NONE, REQUIRED (the model must call a tool), or a tool's name
    parallel: bool = True  #: An answer may hold several calls.
    thinking: bool | None = None  #: None leaves it to the model's template.
    template_options: Mapping[str, Any] = field(default_factory=dict)
    needs_thinking: bool = False  #: Models that cannot think are refused.
    continues: bool = False  #: The last message, the assistant's, is the beginning of the answer.


Prompt = str | tuple[int, ...]  #: Text or tokens to continue, without a chat template.


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    n: int = 1
    max_tokens: int | None = None  #: None, or more than fit: as many as fit; 0: the prompt is only read
    stop: tuple[str, ...] = ()
    #: the client's other values for the engine's `Sampling` and `Shaping`, by field
    settings: Mapping[str, float] = field(default_factory=dict)
    format: Mapping[str, Any] | None = None  #: `response_format` of OpenAI's chat
    format_field: str = "response_format"  #: the client's field with it
    logprobs: int = -1  #: -1: none, 0: of the chosen tokens, k: also of the k most probable others
    prompt_logprobs: int = -1  #: the same for the prompt's tokens
    ignore_eos: bool = False
    stop_tokens: tuple[int, ...] = ()
    allowed_tokens: tuple[int, ...] = ()  #: empty: all
    bad_words: tuple[str, ...] = ()  #: that the answer may not have
    token_ids: bool = False  #: the answer names its tokens, and the prompt's
    counts: bool = False  #: each event of a stream counts the tokens so far
    names_ids: bool = False  #: in scores, tokens have their ids as names
    seed: int | None = None  #: None: a fresh one
    logit_bias: Mapping[str, float] = field(default_factory=dict)  #: by token ids as text
    deadline_s: float = 0.0  #: 0: the server's own


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    model: str | None  #: None or "default": the loaded model.
    prompt: Conversation | tuple[Prompt, ...]
    options: GenerationOptions = GenerationOptions()
    stream: bool = False
    user: str = ""  #: distinguishes clients of one address
    dialect: Any = None  #: the adapter's own data for writing the answer
    keep_s: float | None = None  #: as in `Backend.acquire_model`
    batch: bool = False  #: as in `Generate`
    ignored: tuple[str, ...] = ()  #: names of fields that the client sent in vain


FinishReason = Literal["stop", "length", "cancel"]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Natural log-probability of a chosen token."""

    logprob: float
    top: tuple[tuple[int, float], ...]  #: (token, log-probability) of the most probable tokens


@dataclass(frozen=True, slots=True)
class Tokens:
    """New confirmed tokens, in order. They may include an end token, whose text is never shown."""

    tokens: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()  #: one per token if the request wants log-probabilities
    prompt: bool = False  #: tokens of the prompt, but for its first, before any of the answer


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Last event of a request."""

    reason: FinishReason  #: "cancel": the backend gave up, so the client sees an error, no answer
    generated: int  #: all tokens, including the end token
    cached: int = 0  #: prompt tokens from the prefix cache
    drafted: int = 0
    accepted: int = 0  #: drafted tokens that were right
    token: int = -1  #: the end or stop token, which is in no `Tokens`; -1 without one


TokenEvent = Tokens | StreamEnd


def characters(conversation: Conversation) -> int:
    turns = conversation.messages
    calls = sum(len(call.name) + len(call.arguments) for turn in turns for call in turn.calls)
    tools = sum(len(json.dumps(tool_json(tool))) for tool in conversation.tools)
    return sum(len(turn.text) + len(turn.reasoning) for turn in turns) + calls + tools
