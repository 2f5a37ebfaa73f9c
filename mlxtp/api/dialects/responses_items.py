"""Items of `/v1/responses`, the parts of a conversation. Pure.

An item is checked once, on arrival. From then on it has the shape of this module, without ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from ...errors import RequestError
from ...text.conversation import Call
from ...text.json_limits import check_extent
from ..request_body import Schema, check_finite, checked, not_supported, shown, wrong
from .client_tools import log_left_out

Json = dict[str, Any]

ROLES: dict[str, Literal["user", "system"]] = {"user": "user", "system": "system", "developer": "system"}
CALLS = ("function_call", "custom_tool_call", "tool_search_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output", "tool_search_output")
#: Endings of the kinds of items that only OpenAI's own servers make.
_FOREIGN = (
    "_call", "_call_output", "compaction", "compaction_trigger", "mcp_list_tools", "mcp_approval_request",
    "mcp_approval_response", "program", "program_output", "agent_message", "ghost_snapshot",
)  # fmt: skip


class _Message(Schema):
    role: str
    content: Any = None


class _FunctionCall(Schema):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    status: str | None = None


class _CustomCall(Schema):
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    input: str
    namespace: str | None = None
    status: str | None = None


class _SearchCall(Schema):
    call_id: str
    arguments: Json
    status: str | None = None


class _CallOutput(Schema):
    call_id: str
    output: Any


class _SearchOutput(Schema):
    call_id: str
    tools: list[Json]


class _MoreTools(Schema):
    tools: list[Json]


class _Reasoning(Schema):
    summary: list[Any] | None = None
    content: list[Any] | None = None


# --- items from clients -----------------------------------------------------------------------------------


def items_of(given: str | list[Any]) -> list[Json]:
    """Return the items of `input`. Raises RequestError that names the place."""
    if isinstance(given, str):
        return [_spoken("user", [given])]
    items: list[Json] = []
    left_out: set[str] = set()  # calls, by their ids
    for i, each in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(each, dict):
            raise wrong(where, "an item, an object", each)
        kind, call_id = each.get("type"), each.get("call_id")
        if _foreign(each):
            log_left_out("items", str(kind))
            left_out.add(str(call_id))
        elif kind not in OUTPUTS or call_id is None or str(call_id) not in left_out:
            items.append(_item(each, where))
    return items


def _foreign(item: Json) -> bool:
    """Return True for an item that only its provider can read or run."""
    match item.get("type"):
        case "tool_search_call" | "tool_search_output":
            return item.get("execution") == "server" or item.get("call_id") is None
        case str(kind):
            return kind not in _READ and kind.endswith(_FOREIGN)
        case _:
            return False


def _item(item: Json, where: str) -> Json:
    kind = item.get("type")
    if kind is None:  # the two types that need not be named
        kind = "message" if "role" in item else "item_reference"
    match kind:
        case str() if kind in _READ:
            return _READ[kind](item, where)
        case "item_reference":
            raise not_supported(
                f"{where}: item references are not supported; send the item itself, or the answer's id as "
                "previous_response_id. A client that makes references by itself sends items with store false",
                f"{where}.type",
            )
        case str():
            raise not_supported(
                f"{where}: items of type {shown(kind)} are not supported, only {', '.join(_READ)}",
                f"{where}.type",
            )
        case _:
            raise wrong(f"{where}.type", "a string", kind)


def _message(item: Json, where: str) -> Json:
    message = checked(_Message, item, where)
    texts = _texts(message.content, f"{where}.content")
    if message.role != "assistant" and message.role not in ROLES:
        raise RequestError(
            f"{where}.role: {shown(message.role)} is none of {', '.join(ROLES)}, assistant",
            param=f"{where}.role",
        )
    return _spoken(message.role, texts)


def _spoken(role: str, texts: Sequence[str]) -> Json:
    return {"type": "message", "role": role, "content": _parts(texts)}


def _parts(texts: Sequence[str]) -> list[Json]:
    return [{"text": text} for text in texts]


def _call(item: Json, where: str) -> Json:
    call = checked(_FunctionCall, item, where)
    if not call.name:
        raise wrong(f"{where}.name", "the name of a function", call.name)
    arguments = call.arguments.strip() or "{}"
    check_extent(arguments, where=f"{where}.arguments", param=f"{where}.arguments")
    if call.status != "incomplete" and object_in(arguments) is None:
        raise wrong(f"{where}.arguments", "the JSON text of an object", call.arguments)
    called = Call(call.call_id, call.name, arguments)
    return call_item("function_call", called, _status(call.status), call.namespace)


def _custom_call(item: Json, where: str) -> Json:
    custom = checked(_CustomCall, item, where)
    call = Call(custom.call_id, custom.name, custom.input)
    return call_item("custom_tool_call", call, _status(custom.status), custom.namespace)


def _search_call(item: Json, where: str) -> Json:
    search = checked(_SearchCall, item, where)
    check_finite(search.arguments, f"{where}.arguments")
    return search_call(search.call_id, search.arguments, _status(search.status))


def _status(given: str | None) -> str:
    return "incomplete" if given == "incomplete" else "completed"


def call_item(kind: str, call: Call, status: str, namespace: str | None = None) -> Json:
    """Return a call as an item. The arguments of a custom tool's call are its text."""
    item = {
        "type": kind,
        "call_id": call.id,
        "name": call.name,
        "input" if kind == "custom_tool_call" else "arguments": call.arguments,
        "status": status,
    }
    return item if namespace is None else item | {"namespace": namespace}


def search_call(call_id: str, arguments: Json, status: str) -> Json:
    """Return a call of the client's search for more tools, as an item."""
    return {
        "type": "tool_search_call",
        "call_id": call_id,
        "execution": "client",
        "arguments": arguments,
        "status": status,
    }


def _search_output(item: Json, where: str) -> Json:
    output = checked(_SearchOutput, item, where)
    check_finite(output.tools, f"{where}.tools")
    return {"type": "tool_search_output", "call_id": output.call_id, "tools": output.tools}


def _more_tools(item: Json, where: str) -> Json:
    more = checked(_MoreTools, item, where)
    check_finite(more.tools, f"{where}.tools")
    return {"type": "additional_tools", "tools": more.tools}


def _call_output(item: Json, where: str) -> Json:
    """Return a call's output, with a note in place of images: a refusal would end the conversation."""
    output = checked(_CallOutput, item, where)
    given: Any = output.output
    if isinstance(given, list):
        given = [_NO_IMAGE if _is_image(part) else part for part in given]
    if not isinstance(given, str):
        given = _parts(_texts(given, f"{where}.output"))
    return {"type": item["type"], "call_id": output.call_id, "output": given}


_NO_IMAGE = {"type": "input_text", "text": "[an image, left out: this model reads only text]"}


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _reasoning(item: Json, where: str) -> Json:
    """Return thoughts. Leave out `encrypted_content`, which only its maker can read."""
    reasoning = checked(_Reasoning, item, where)
    content = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(reasoning.content or ())]
    summary = [_part(part, f"{where}.summary[{i}]") for i, part in enumerate(reasoning.summary or ())]
    return {"type": "reasoning", "summary": _parts(summary), "content": _parts(content)}


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


def object_in(text: str) -> Json | None:
    """Return the object that `text` is in JSON, or None."""
    try:
        found = from_json(text.encode(errors="replace"), allow_inf_nan=False)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


_READ: Mapping[str, Callable[[Json, str], Json]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _call_output,
    "tool_search_call": _search_call,
    "tool_search_output": _search_output,
    "additional_tools": _more_tools,
    "reasoning": _reasoning,
}
