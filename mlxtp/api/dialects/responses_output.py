"""The items of an answer of `/v1/responses`, in progress and whole. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...text.conversation import Call
from ...text.transcript import Finish, Scored, WholeAnswer
from ..adapter import About, Json
from . import openai_answers as answers
from .client_tools import ClientTool, TextReader, called
from .responses_items import call_item, object_in, search_call
from .responses_request import ResponsesAnswerOptions


class ItemInProgress(Protocol):
    """One output item in progress. Events lack their numbers and the item's place."""

    kind: str
    id: str

    def opened(self) -> list[Json]:
        """Return the events after the item's announcement."""
        ...

    def closed(self) -> list[Json]:
        """Return the events between the item's end and the whole item."""
        ...

    def json(self, status: str) -> Json:
        """Return the item; while "in_progress", its content is empty."""
        ...


class MessageOutput:
    """The model's text as an item."""

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
        return [self._event("response.content_part.added", part=_output_text(""))]

    def closed(self) -> list[Json]:
        part = _output_text("".join(self._text), self._logprobs)
        return [
            self._event("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", part=part),
        ]

    def json(self, status: str) -> Json:
        part = _output_text("".join(self._text), self._logprobs)
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


class ReasoningOutput:
    """The model's thoughts as an item."""

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


_FORMS: Mapping[str, tuple[str, str, str, str]] = {  # item, prefix of its id, its events, their field
    "function": ("function_call", "fc", "response.function_call_arguments", "arguments"),
    "custom": ("custom_tool_call", "ctc", "response.custom_tool_call_input", "input"),
    "tool_search": ("tool_search_call", "tsc", "", "arguments"),
}


class ToolCallOutput:
    """A call as an item. Custom tools get its text, others its arguments; searches have no own events."""

    def __init__(self, place: str, call_id: str, tool: ClientTool) -> None:
        self.kind, prefix, self._events, self._field = _FORMS[tool.kind]
        self.id = f"{prefix}_{place}"
        self._call_id = call_id
        self._tool = tool
        self._reader = TextReader() if tool.kind == "custom" else None
        self._text: list[str] = []

    def more(self, arguments: str) -> list[Json]:
        text = arguments if self._reader is None else self._reader.push(arguments)
        self._text.append(text)
        return self._event("delta", delta=text) if text else []

    def opened(self) -> list[Json]:
        return []

    def closed(self) -> list[Json]:
        name = {"name": self._tool.name} if self.kind == "function_call" else {}
        return self._event("done", **name, **{self._field: "".join(self._text)})

    def json(self, status: str) -> Json:
        text = "".join(self._text)
        if self.kind == "tool_search_call":
            item = search_call(self._call_id, object_in(text) or {}, status)
        else:
            call = Call(self._call_id, self._tool.name, text)
            item = call_item(self.kind, call, status, self._tool.namespace)
        return {"type": self.kind, "id": self.id} | item

    def _event(self, step: str, **fields: Any) -> list[Json]:
        return [{"type": f"{self._events}.{step}", "item_id": self.id} | fields] if self._events else []


def tool_call(about: About, place: str, call_id: str, name: str) -> ToolCallOutput:
    """Return the item of a call. `name` is the model's; the item has the client's."""
    wanted: ResponsesAnswerOptions = about.ask.dialect
    tool = called(name, wanted.tools)
    return ToolCallOutput(place, call_id, tool)


def _output_text(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _reasoning_text(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def logprobs(about: About, scores: Sequence[Scored]) -> list[Json]:
    """Return scores in the shape of `output_text`: `bytes` is an empty list where there are none."""
    content: list[Json] = answers.logprobs(scores, about.names)["content"]
    for each in content:
        for row in (each, *each["top_logprobs"]):
            row["bytes"] = row["bytes"] or []
    return content


# --- whole answers ----------------------------------------------------------------------------------------


def place(about: About, index: int) -> str:
    """Return the last part of the id of output number `index`."""
    return f"{about.id}_{index}"


def items_of_whole(about: About, whole: WholeAnswer, finish: Finish) -> list[Json]:
    """Return the output of an answer that is not streamed. An item that was cut off is the last one."""
    items: list[ItemInProgress] = []
    if whole.reasoning:
        thoughts = ReasoningOutput(place(about, 0))
        thoughts.more(whole.reasoning)
        items.append(thoughts)
    if whole.text or speaks(finish, bool(whole.reasoning), bool(whole.calls)):
        message = MessageOutput(place(about, len(items)))
        message.more(whole.text, logprobs(about, _of_text(about, whole)))
        items.append(message)
    for call in whole.calls:
        made = tool_call(about, place(about, len(items)), call.id, call.name)
        made.more(call.arguments)
        items.append(made)
    return [item.json("completed") for item in items[:-1]] + [items[-1].json(status_of(finish))]


def speaks(finish: Finish, thought: bool, called: bool) -> bool:
    """Return True where an answer without text has an empty message: clients look for its text."""
    return not called and not (thought and finish.reason == "length")


def status_of(finish: Finish) -> str:
    """Return the status of a response, and of the last of its items."""
    return "incomplete" if finish.reason == "length" else "completed"


def scores_of_first(about: About, text: str, scores: Sequence[Scored]) -> Sequence[Scored]:
    """Return the scores of the first `text` after thoughts, without those of the thoughts."""
    start = b"".join(_pieces(about, scores)).rfind(text.encode())
    return _overlapping(about, scores, start, None) if start >= 0 else scores


def _of_text(about: About, whole: WholeAnswer) -> Sequence[Scored]:
    """Return the scores of the text, without those of thoughts before it and calls after it."""
    if not (whole.reasoning or whole.calls):
        return whole.scores
    text = whole.text.encode()
    start = b"".join(_pieces(about, whole.scores)).find(text, len(whole.reasoning.encode()))
    end = start + len(text) if whole.calls else None
    return _overlapping(about, whole.scores, start, end) if start >= 0 else whole.scores


def _pieces(about: About, scores: Sequence[Scored]) -> list[bytes]:
    return [bytes(about.names(token)[1] or ()) for token, _ in scores]


def _overlapping(about: About, scores: Sequence[Scored], start: int, end: int | None) -> list[Scored]:
    """Return the scores of tokens that overlap the bytes from `start` to `end`, and of empty ones between."""
    kept: list[Scored] = []
    at = 0
    for piece, scored in zip(_pieces(about, scores), scores, strict=True):
        if (kept or at + len(piece) > start) and (end is None or at < end):
            kept.append(scored)
        at += len(piece)
    return kept
