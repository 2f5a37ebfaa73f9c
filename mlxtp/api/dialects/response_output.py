"""What `/v1/responses` says of an answer: its items while they come, and the response around them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...errors import MlxtpError
from ..adapter import About
from ..ask import Call
from ..errors import error_status
from ..events import Finish, Scored, Whole
from . import openai_answers as answers
from .response_items import function_call, output_text
from .response_request import FunctionTool, Wanted

Json = dict[str, Any]


class Item(Protocol):
    """One item of the output while it is made. Events lack their numbers and the item's place."""

    kind: str
    id: str

    def opened(self) -> list[Json]:
        """What is said when it begins, after it is announced."""
        ...

    def closed(self) -> list[Json]:
        """What is said when it is over, before the whole item is."""
        ...

    def json(self, status: str) -> Json:
        """The item; "in_progress" has nothing in it yet."""
        ...


class Message:
    """What the model says."""

    kind = "message"

    def __init__(self, place: str) -> None:
        self.id = f"msg_{place}"
        self._text: list[str] = []
        self._logprobs: list[Json] = []

    def more(self, text: str, logprobs: Sequence[Json] = ()) -> Json:
        self._text.append(text)
        self._logprobs += logprobs
        return self._event("response.output_text.delta", delta=text, logprobs=list(logprobs))

    def opened(self) -> list[Json]:
        return [self._event("response.content_part.added", part=output_text(""))]

    def closed(self) -> list[Json]:
        part = output_text("".join(self._text), self._logprobs)
        return [
            self._event("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", part=part),
        ]

    def json(self, status: str) -> Json:
        part = output_text("".join(self._text), self._logprobs)
        content = [] if status == "in_progress" else [part]
        return {
            "type": "message",
            "id": self.id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self.id, "content_index": 0} | fields


class Reasoning:
    """What the model thinks."""

    kind = "reasoning"

    def __init__(self, place: str) -> None:
        self.id = f"rs_{place}"
        self._text: list[str] = []

    def more(self, text: str) -> Json:
        self._text.append(text)
        return self._event("response.reasoning_text.delta", delta=text)

    def opened(self) -> list[Json]:
        return [self._event("response.content_part.added", part=_reasoning_text(""))]

    def closed(self) -> list[Json]:
        text = "".join(self._text)
        return [
            self._event("response.reasoning_text.done", text=text),
            self._event("response.content_part.done", part=_reasoning_text(text)),
        ]

    def json(self, status: str) -> Json:
        content = [] if status == "in_progress" else [_reasoning_text("".join(self._text))]
        return {"type": "reasoning", "id": self.id, "status": status, "summary": [], "content": content}

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self.id, "content_index": 0} | fields


class ToolCall:
    """What the model calls."""

    kind = "function_call"

    def __init__(self, place: str, call_id: str, name: str) -> None:
        self.id = f"fc_{place}"
        self._call_id = call_id
        self._name = name
        self._arguments: list[str] = []

    def more(self, text: str) -> Json:
        self._arguments.append(text)
        return self._event("response.function_call_arguments.delta", delta=text)

    def opened(self) -> list[Json]:
        return []

    def closed(self) -> list[Json]:
        arguments = "".join(self._arguments)
        kind = "response.function_call_arguments.done"
        return [self._event(kind, name=self._name, arguments=arguments)]

    def json(self, status: str) -> Json:
        return function_call(self.id, Call(self._call_id, self._name, "".join(self._arguments)), status)

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self.id} | fields


def _reasoning_text(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def logprobs(about: About, scores: Sequence[Scored]) -> list[Json]:
    """As an `output_text` has them: `bytes` is never null, a token without any has an empty list."""
    content: list[Json] = answers.logprobs(scores, about.names)["content"]
    for each in content:
        for row in (each, *each["top_logprobs"]):
            row["bytes"] = row["bytes"] or []
    return content


# --- whole answers ----------------------------------------------------------------------------------------


def place(about: About, index: int) -> str:
    """What the id of output number `index` ends with."""
    return f"{about.id}_{index}"


def items_of_whole(about: About, whole: Whole, finish: Finish) -> list[Json]:
    """The output of an answer that is not streamed. What was cut off is the last item."""
    items: list[Item] = []
    if whole.reasoning:
        thoughts = Reasoning(place(about, 0))
        thoughts.more(whole.reasoning)
        items.append(thoughts)
    if whole.text or speaks(finish, bool(whole.reasoning), bool(whole.calls)):
        message = Message(place(about, len(items)))
        message.more(whole.text, logprobs(about, _of_text(about, whole)))
        items.append(message)
    for call in whole.calls:
        made = ToolCall(place(about, len(items)), call.id, call.name)
        made.more(call.arguments)
        items.append(made)
    return [item.json("completed") for item in items[:-1]] + [items[-1].json(status_of(finish))]


def speaks(finish: Finish, thought: bool, called: bool) -> bool:
    """Whether an answer without a word has a message all the same: somebody looks for its text."""
    return not called and not (thought and finish.reason == "length")


def status_of(finish: Finish) -> str:
    """That of a response, and of the last of its items."""
    return "incomplete" if finish.reason == "length" else "completed"


def scores_of_first(about: About, text: str, scores: Sequence[Scored]) -> Sequence[Scored]:
    """Of the scores that come with the first `text` after thoughts, those that are not of the thoughts."""
    start = b"".join(_pieces(about, scores)).rfind(text.encode())
    return _overlapping(about, scores, start, None) if start >= 0 else scores


def _of_text(about: About, whole: Whole) -> Sequence[Scored]:
    """The scores of what was said, without those of thoughts before and calls after it."""
    if not (whole.reasoning or whole.calls):
        return whole.scores
    text = whole.text.encode()
    start = b"".join(_pieces(about, whole.scores)).find(text, len(whole.reasoning.encode()))
    end = start + len(text) if whole.calls else None
    return _overlapping(about, whole.scores, start, end) if start >= 0 else whole.scores


def _pieces(about: About, scores: Sequence[Scored]) -> list[bytes]:
    return [bytes(about.names(token)[1] or ()) for token, _ in scores]


def _overlapping(about: About, scores: Sequence[Scored], start: int, end: int | None) -> list[Scored]:
    """Those of the tokens that have something of the bytes from `start` to `end`, or come after them."""
    kept: list[Scored] = []
    at = 0
    for piece, scored in zip(_pieces(about, scores), scores, strict=True):
        if (kept or at + len(piece) > start) and (end is None or at < end):
            kept.append(scored)
        at += len(piece)
    return kept


# --- the response -----------------------------------------------------------------------------------------


def response_body(
    about: About,
    status: str,
    output: Sequence[Json],
    *,
    finish: Finish | None = None,
    error: MlxtpError | None = None,
    completed_at: float | None = None,
) -> Json:
    """The response at one moment: "in_progress", "completed", "incomplete" or "failed"."""
    wanted: Wanted = about.ask.dialect
    request = wanted.request
    reasoning = request.reasoning
    return {
        "id": f"resp_{about.id}",
        "object": "response",
        "created_at": int(about.created),
        "status": status,
        "background": False,
        "completed_at": int(completed_at) if completed_at is not None else None,
        "error": None if error is None else _error(error),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": about.model,
        "output": list(output),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": _text(request.prompt_cache_key),
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "safety_identifier": _text(request.safety_identifier),
        "service_tier": "default",
        "store": request.kept,
        "temperature": request.temperature,
        "text": {
            "format": wanted.format,
            "verbosity": "medium",
        },
        "tool_choice": wanted.tool_choice,
        "tools": [_tool(tool) for tool in wanted.tools],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None if finish is None else _usage(about, finish),
        "user": _text(request.user),
        "metadata": request.metadata or {},
    }


def _usage(about: About, finish: Finish) -> Json:
    """Nothing is charged for being written to a cache."""
    prompt, end = about.prompt_tokens[0], finish.end
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": end.cached, "cache_write_tokens": 0},
        "output_tokens": end.generated,
        "output_tokens_details": {"reasoning_tokens": finish.thought},
        "total_tokens": prompt + end.generated,
    }


def _error(error: MlxtpError) -> Json:
    """`code` is one of the few that this dialect knows, `type` ours."""
    code = "rate_limit_exceeded" if error_status(error) == 429 else "server_error"
    return {"code": code, "message": error.detail, "type": error.code.value, "param": None}


def _tool(tool: FunctionTool) -> Json:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
