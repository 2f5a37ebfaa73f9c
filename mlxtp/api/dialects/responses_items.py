"""The items of `/v1/responses`: what a conversation is made of there, and the turns that it means. Pure.

An item is checked once, when it comes, and has its published shape and an id from then on.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ...errors import RequestError
from ..ask import Call, Turn
from ..extent import check_extent
from ..schema import Schema, checked, not_supported, shown, wrong

Json = dict[str, Any]

_ROLES: dict[str, Literal["user", "system"]] = {"user": "user", "system": "system", "developer": "system"}


class _Message(Schema):
    role: str
    content: Any = None
    id: str | None = None


class _FunctionCall(Schema):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class _FunctionCallOutput(Schema):
    call_id: str
    output: Any
    id: str | None = None


class _Reasoning(Schema):
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None


class _Reference(Schema):
    id: str


# --- what a client sends ----------------------------------------------------------------------------------


def items_of(given: str | list[Any], find: Callable[[str, str], Json]) -> list[Json]:
    """The items of `input`. `find` has the item behind an id, for a reference `where` it stands.

    Raises RequestError that names the place.
    """
    if isinstance(given, str):
        return [_input_message("user", [_input_text(given)], None)]
    return [_item(item, f"input[{i}]", find) for i, item in enumerate(given)]


def _item(item: Any, where: str, find: Callable[[str, str], Json]) -> Json:
    if not isinstance(item, dict):
        raise wrong(where, "an item, an object", item)
    kind = item.get("type")
    if kind is None:  # the two whose type may be left out
        kind = "message" if "role" in item else "item_reference"
    match kind:
        case "message":
            return _message(checked(_Message, item, where), where)
        case "function_call":
            return _call(checked(_FunctionCall, item, where), where)
        case "function_call_output":
            return _call_output(checked(_FunctionCallOutput, item, where), where)
        case "reasoning":
            return _reasoning(checked(_Reasoning, item, where), where)
        case "item_reference":
            return find(checked(_Reference, item, where).id, f"{where}.id")
        case str():
            raise not_supported(
                f"{where}: items of type {shown(kind)} are not supported, only message, function_call, "
                "function_call_output, reasoning and item_reference",
                f"{where}.type",
            )
        case _:
            raise wrong(f"{where}.type", "a string", kind)


def _message(message: _Message, where: str) -> Json:
    texts = _texts(message.content, f"{where}.content")
    if message.role == "assistant":
        return {
            "type": "message",
            "id": message.id or new_id("msg"),
            "role": "assistant",
            "status": "completed",
            "content": [output_text(text) for text in texts],
        }
    if message.role not in _ROLES:
        raise RequestError(
            f"{where}.role: {shown(message.role)} is none of {', '.join(_ROLES)}, assistant",
            param=f"{where}.role",
        )
    return _input_message(message.role, [_input_text(text) for text in texts], message.id)


def _input_message(role: str, content: list[Json], id_: str | None) -> Json:
    return {
        "type": "message",
        "id": id_ or new_id("msg"),
        "role": role,
        "status": "completed",
        "content": content,
    }


def _input_text(text: str) -> Json:
    return {"type": "input_text", "text": text}


def output_text(text: str, logprobs: Sequence[Json] = ()) -> Json:
    """What the model has said, as a part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _call(call: _FunctionCall, where: str) -> Json:
    if not call.name:
        raise wrong(f"{where}.name", "the name of a function", call.name)
    arguments = call.arguments.strip() or "{}"
    check_extent(arguments, where=f"{where}.arguments", param=f"{where}.arguments")
    if call.status != "incomplete" and not _is_object(arguments):
        raise wrong(f"{where}.arguments", "the JSON text of an object", call.arguments)
    status = "incomplete" if call.status == "incomplete" else "completed"
    return function_call(call.id or new_id("fc"), Call(call.call_id, call.name, arguments), status)


def function_call(id_: str, call: Call, status: str) -> Json:
    """A call of a function, as an item."""
    return {
        "type": "function_call",
        "id": id_,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def _call_output(output: _FunctionCallOutput, where: str) -> Json:
    given: Any = output.output
    if not isinstance(given, str):
        given = [_input_text(text) for text in _texts(given, f"{where}.output")]
    return {
        "type": "function_call_output",
        "id": output.id or new_id("fco"),
        "call_id": output.call_id,
        "output": given,
        "status": "completed",
    }


def _reasoning(reasoning: _Reasoning, where: str) -> Json:
    """What only its maker can read (`encrypted_content`) is left out."""
    content = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(reasoning.content or ())]
    summary = [_part(part, f"{where}.summary[{i}]") for i, part in enumerate(reasoning.summary or ())]
    return {
        "type": "reasoning",
        "id": reasoning.id or new_id("rs"),
        "status": "completed",
        "summary": [{"type": "summary_text", "text": text} for text in summary],
        "content": [{"type": "reasoning_text", "text": text} for text in content],
    }


def _texts(content: object, where: str) -> list[str]:
    match content:
        case str(text):
            return [text]
        case list(parts):
            return [_part(part, f"{where}[{i}]") for i, part in enumerate(parts)]
        case _:
            raise wrong(where, "a string or a list of text parts", content)


_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def _part(part: object, where: str) -> str:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in _TEXT_PARTS:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind)} if kind not in (*_TEXT_PARTS, "refusal"):
            raise not_supported(f"{where}: parts of type {shown(kind)} are not supported, only text", where)
        case _:
            raise wrong(where, '{"type": "input_text", "text": "..."}', part)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def new_id(prefix: str) -> str:
    """For an item that came without one."""
    return f"{prefix}_{secrets.token_hex(16)}"


# --- what it means ----------------------------------------------------------------------------------------


def turns_of(instructions: str | None, items: Sequence[Json], known: int) -> tuple[Turn, ...]:
    """The conversation. The first `known` items are those of earlier answers.

    What the assistant thinks, says and calls in a row is one turn; system messages in a row are one, too,
    because many templates take no more. A call that was cut off was never made. Raises RequestError for a
    result whose call is not there.
    """
    reader = _Reader(instructions)
    for i, item in enumerate(items):
        reader.read(item, f"input[{i - known}]")
    reader.close()
    if not reader.turns:
        raise RequestError("input is empty, and there are no instructions", param="input")
    return tuple(reader.turns)


def worth_keeping(items: Sequence[Json]) -> list[Json]:
    """Without what no turn is made of: calls that were cut off, and thoughts that lead nowhere."""
    found: list[Json] = []
    thoughts: list[Json] = []
    for item in items:
        if item["type"] == "reasoning":
            thoughts.append(item)
        elif item.get("status") != "incomplete" or item["type"] != "function_call":
            if item["type"] == "function_call" or item.get("role") == "assistant":
                found += thoughts
            thoughts = []
            found.append(item)
    return found


def pieces(item: Json) -> int:
    """It and its parts."""
    return 1 + sum(len(value) for value in item.values() if isinstance(value, list))


class _Reader:
    """Reads items one after the other."""

    def __init__(self, instructions: str | None) -> None:
        self.turns: list[Turn] = []
        self._system = [instructions] if instructions else []
        self._names: dict[str, str] = {}
        """What was called, by the id of the call."""
        self._begin()

    def read(self, item: Json, where: str) -> None:
        match item["type"]:
            case "function_call":
                self._read_call(item)
            case "function_call_output":
                self.close()
                self._read_output(item, where)
            case "reasoning":
                self._assistant(anew=True)
                self._thoughts.append(_text(item["content"] or item["summary"]))
            case _ if item["role"] == "assistant":
                self._assistant(anew=True)
                self._said, self._text = True, _text(item["content"])
            case _:
                self._read_message(_ROLES[item["role"]], _text(item["content"]))

    def close(self) -> None:
        """The end of what is one turn. Thoughts alone lead nowhere."""
        if self._system:
            self.turns.append(Turn("system", "\n\n".join(self._system)))
            self._system = []
        if self._said or self._calls:
            reasoning = "\n".join(self._thoughts)
            self.turns.append(Turn("assistant", self._text, reasoning, tuple(self._calls)))
        self._begin()

    def _begin(self) -> None:
        self._said = False
        self._text = ""
        self._thoughts: list[str] = []
        self._calls: list[Call] = []

    def _assistant(self, *, anew: bool) -> None:
        """What comes is the assistant's, and `anew` not part of what it has said or called already."""
        if self._system or (anew and (self._said or self._calls)):
            self.close()

    def _read_call(self, item: Json) -> None:
        if item["status"] == "completed":
            self._assistant(anew=False)
            self._names[item["call_id"]] = item["name"]
            self._calls.append(Call(item["call_id"], item["name"], item["arguments"]))

    def _read_output(self, item: Json, where: str) -> None:
        call_id, output = item["call_id"], item["output"]
        if call_id not in self._names:
            raise RequestError(
                f"{where}.call_id: no function_call before this output has the call_id {shown(call_id)}",
                param=f"{where}.call_id",
            )
        text = output if isinstance(output, str) else _text(output)
        self.turns.append(Turn("tool", text, call_id=call_id, name=self._names[call_id]))

    def _read_message(self, role: Literal["user", "system"], text: str) -> None:
        if role == "user":
            self.close()
            self.turns.append(Turn("user", text))
        else:
            if self._said or self._calls:
                self.close()
            self._system.append(text)


def _text(parts: Sequence[Json]) -> str:
    return "\n".join(part["text"] for part in parts)
