"""Items of `/v1/responses`, the parts of a conversation: their tools, and the messages made of them. Pure.

An item is checked once, on arrival. From then on it has the shape of this module, without ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from ...errors import RequestError
from ...text.conversation import AUTO, NONE, REQUIRED, Call, ChatMessage
from ...text.json_limits import check_extent
from ..adapter import Json
from ..request_body import Schema, check_finite, checked, missing, none_of, not_supported, shown, wrong
from .request_parts import ClientTool, joined, log_left_out, text_arguments, text_parameters

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


class _Reference(Schema):
    id: str


# --- items from clients -----------------------------------------------------------------------------------


def items_of(given: str | list[Any], find: Callable[[str, str], Json]) -> list[Json]:
    """Return the items of `input`. Raises RequestError that names the place.

    `find` returns the item with an id, for a reference to it at a place.
    """
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
            items.append(_item(each, where, find))
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


def _item(item: Json, where: str, find: Callable[[str, str], Json]) -> Json:
    kind = item.get("type")
    if kind is None:  # the two types that need not be named
        kind = "message" if "role" in item else "item_reference"
    match kind:
        case str() if kind in _READ:
            return _READ[kind](item, where)
        case "item_reference":
            return find(checked(_Reference, item, where).id, f"{where}.id")
        case str():
            known = ", ".join((*_READ, "item_reference"))
            raise not_supported(
                f"{where}: items of type {shown(kind)} are not supported, only {known}", f"{where}.type"
            )
        case _:
            raise wrong(f"{where}.type", "a string", kind)


def _message(item: Json, where: str) -> Json:
    message = checked(_Message, item, where)
    texts = _texts(message.content, f"{where}.content")
    if message.role != "assistant" and message.role not in ROLES:
        raise none_of(message.role, (*ROLES, "assistant"), f"{where}.role")
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


# --- tools ------------------------------------------------------------------------------------------------


Tools = Mapping[str, ClientTool]  # by the model's names
_Name = Annotated[str, Field(min_length=1)]
_BY_NAME = '{"type": "function", "name": "..."}'


class _Function(Schema):
    type: Literal["function"]
    name: _Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class _Custom(Schema):
    type: Literal["custom"]
    name: _Name
    description: str | None = None
    format: Json | None = None


class _Namespace(Schema):
    type: Literal["namespace"]
    name: _Name
    description: str = ""
    tools: list[Json]


class _SearchTool(Schema):
    """A search for more tools that the client runs."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None = None
    parameters: Json | None = None


def read_tools(
    given: Sequence[Json], where: str, namespace: str | None = None
) -> tuple[list[ClientTool], list[Json]]:
    """Return the tools that a model may call, and the same as an answer repeats them. Raises RequestError."""
    tools: list[ClientTool] = []
    repeated: list[Json] = []
    for i, each in enumerate(given):
        at = f"{where}[{i}]"
        match each.get("type"):
            case "namespace" if namespace is None:
                group = checked(_Namespace, each, at)
                inner, inner_repeated = read_tools(group.tools, f"{at}.tools", group.name)
                tools += inner
                repeated.append(group.model_dump() | {"tools": inner_repeated})
            case "function" | "custom":
                tool, said = _tool(each, at, namespace)
                tools.append(tool)
                repeated.append(said)
            case "tool_search" if each.get("execution") == "client":
                search = checked(_SearchTool, each, at)
                tools.append(
                    ClientTool(
                        "tool_search", search.description or "", search.parameters, "tool_search", where=at
                    )
                )
                repeated.append(search.model_dump())
            case str(kind):
                log_left_out("tools", kind)
            case None:
                raise missing(f"{at}.type")
            case kind:
                raise wrong(f"{at}.type", '"function"', kind)
    return tools, repeated


def _tool(given: Json, where: str, namespace: str | None) -> tuple[ClientTool, Json]:
    if given["type"] == "custom":
        custom = checked(_Custom, given, where)
        parameters = text_parameters(custom.format)
        tool = ClientTool(custom.name, custom.description or "", parameters, "custom", namespace, where)
        return tool, custom.model_dump()
    function = checked(_Function, given, where)
    description = function.description or ""
    tool = ClientTool(function.name, description, function.parameters, "function", namespace, where)
    return tool, function.model_dump()


def tools_of_items(items: Sequence[Json], known: int, offered: Sequence[ClientTool]) -> list[ClientTool]:
    """Return the tools that items add to `offered`. A search may find a tool that is already offered.

    The first `known` items are those of earlier answers.
    """
    names = {(tool.namespace, tool.name) for tool in offered}
    added: list[ClientTool] = []
    for i, item in enumerate(items):
        if item["type"] in ("additional_tools", "tool_search_output"):
            for tool in read_tools(item["tools"], f"input[{i - known}].tools")[0]:
                if (tool.namespace, tool.name) not in names:
                    names.add((tool.namespace, tool.name))
                    added.append(tool)
    return added


# --- the choice among them --------------------------------------------------------------------------------


def tool_choice(given: object, tools: Tools) -> tuple[Tools, str]:
    """Return the offered tools, and the choice among them as in `Conversation`."""
    match given:
        case None | "auto":
            return tools, AUTO
        case "none":
            return tools, NONE
        case "required":
            return _some(tools, "tool_choice"), REQUIRED
        case {"type": "function" | "custom" as kind, "name": str(name)} if name not in (AUTO, NONE, REQUIRED):
            return tools, _named(kind, name, tools, "tool_choice.name")
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = {_allowed(tool, tools, i) for i, tool in enumerate(allowed)}
            offered = {name: tool for name, tool in tools.items() if name in names}
            if mode == "auto":
                return offered, AUTO
            return _some(offered, "tool_choice.tools"), REQUIRED
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            raise _not_run(kind, "tool_choice")
        case _:
            raise wrong("tool_choice", f'"auto", "none", "required" or {_BY_NAME}', given)


def _allowed(given: object, tools: Tools, index: int) -> str:
    where = f"tool_choice.tools[{index}]"
    match given:
        case {"type": "function" | "custom" as kind, "name": str(name)}:
            return _named(kind, name, tools, f"{where}.name")
        case {"type": str(kind)} if kind not in ("function", "custom"):
            raise _not_run(kind, where)
        case _:
            raise wrong(where, _BY_NAME, given)


def _not_run(kind: str, where: str) -> RequestError:
    return not_supported(
        f"{where}: tools of type {shown(kind)} are not supported, because this server runs no tools; "
        "name a function or a custom tool",
        where,
    )


def _named(kind: str, name: str, tools: Tools, where: str) -> str:
    """Return the model's name for the tool with this name, the client's or the model's."""
    for known in (name, *tools):  # the model's own name counts first
        if known in tools and tools[known].kind == kind and name in (known, tools[known].name):
            return known
    raise RequestError(f"{where}: there is no tool named {shown(name)}", param=where)


def _some(tools: Tools, where: str) -> Tools:
    if not tools:
        raise RequestError(f"{where}: a call is required, but there are no tools to call", param=where)
    return tools


def repeated_choice(given: Any) -> Json | str:
    """Return a checked choice without unknown fields."""
    match given:
        case {"type": "function" | "custom" as kind, "name": name}:
            return {"type": kind, "name": name}
        case {"type": "allowed_tools", "mode": mode, "tools": allowed}:
            tools = [{"type": tool["type"], "name": tool["name"]} for tool in allowed]
            return {"type": "allowed_tools", "mode": mode, "tools": tools}
        case _:
            return str(given or AUTO)


# --- messages ---------------------------------------------------------------------------------------------


def turns_of(
    instructions: str | None, items: Sequence[Json], known: int, tools: Tools
) -> tuple[ChatMessage, ...]:
    """Return the conversation. The first `known` items are those of earlier answers.

    `tools` are by the model's names. Consecutive thoughts, text and calls of the assistant are one turn. So
    are consecutive system messages: many templates take only one. A call that was cut off was never made.
    Raises RequestError for a result whose call is not there.
    """
    reader = _Reader(instructions, {(tool.namespace, tool.name): name for name, tool in tools.items()})
    for i, item in enumerate(items):
        reader.read(item, f"input[{i - known}]")
    reader.close()
    if not reader.turns:
        raise RequestError("input is empty, and there are no instructions", param="input")
    return tuple(reader.turns)


def worth_keeping(items: Sequence[Json]) -> list[Json]:
    """Return the items that make turns. Leave out calls that were cut off, and thoughts without an answer."""
    found: list[Json] = []
    thoughts: list[Json] = []
    for item in items:
        if item["type"] == "reasoning":
            thoughts.append(item)
        elif item.get("status") != "incomplete" or item["type"] not in CALLS:
            if item["type"] in CALLS or item.get("role") == "assistant":
                found += thoughts
            thoughts = []
            found.append(item)
    return found


def pieces(item: Json) -> int:
    """Count an item and its parts."""
    return 1 + sum(len(value) for value in item.values() if isinstance(value, list))


class _Reader:
    """Reader of items, one after the other."""

    def __init__(self, instructions: str | None, names: Mapping[tuple[str | None, str], str]) -> None:
        self.turns: list[ChatMessage] = []
        self._known = names
        self._system = [instructions] if instructions else []
        self._names: dict[str, str] = {}  # names of called functions, by call id
        self._begin()

    def read(self, item: Json, where: str) -> None:
        match item["type"]:
            case kind if kind in CALLS:
                self._read_call(item)
            case kind if kind in OUTPUTS:
                self.close()
                self._read_output(item, where)
            case "additional_tools":
                pass  # they are offered with the others
            case "reasoning":
                self._assistant(begins=True)
                self._thoughts.append(_text(item["content"] or item["summary"]))
            case _ if item["role"] == "assistant":
                self._assistant(begins=True)
                self._said, self._text = True, _text(item["content"])
            case _:
                self._read_message(ROLES[item["role"]], _text(item["content"]))

    def close(self) -> None:
        """End a turn. Thoughts alone are dropped."""
        if self._system:
            self.turns.append(ChatMessage("system", "\n\n".join(self._system)))
            self._system = []
        if self._said or self._calls:
            reasoning = "\n".join(self._thoughts)
            self.turns.append(ChatMessage("assistant", self._text, reasoning, tuple(self._calls)))
        self._begin()

    def _begin(self) -> None:
        self._said = False
        self._text = ""
        self._thoughts: list[str] = []
        self._calls: list[Call] = []

    def _assistant(self, *, begins: bool) -> None:
        """Close the turn before the assistant's. `begins`: also one with text or calls of the assistant."""
        if self._system or (begins and (self._said or self._calls)):
            self.close()

    def _read_call(self, item: Json) -> None:
        if item["status"] == "completed":
            self._assistant(begins=False)
            call = self._called(item)
            self._names[call.id] = call.name
            self._calls.append(call)

    def _called(self, item: Json) -> Call:
        """Return the call as the model wrote it, so that the prompt repeats the same text."""
        if item["type"] == "tool_search_call":
            return Call(item["call_id"], "tool_search", json.dumps(item["arguments"], ensure_ascii=False))
        namespace, name = item.get("namespace"), item["name"]
        name = self._known.get((namespace, name)) or joined(namespace, name)
        if item["type"] == "custom_tool_call":
            return Call(item["call_id"], name, text_arguments(item["input"]))
        return Call(item["call_id"], name, item["arguments"])

    def _read_output(self, item: Json, where: str) -> None:
        call_id = item["call_id"]
        if call_id not in self._names:
            raise RequestError(
                f"{where}.call_id: no call before this output has the call_id {shown(call_id)}",
                param=f"{where}.call_id",
            )
        if item["type"] == "tool_search_output":
            found = read_tools(item["tools"], f"{where}.tools")[0]
            names = [self._known[tool.namespace, tool.name] for tool in found]
            text = f"These tools can be called now: {', '.join(names) or 'none'}"
        else:
            text = item["output"] if isinstance(item["output"], str) else _text(item["output"])
        self.turns.append(ChatMessage("tool", text, call_id=call_id, name=self._names[call_id]))

    def _read_message(self, role: Literal["user", "system"], text: str) -> None:
        if role == "user":
            self.close()
            self.turns.append(ChatMessage("user", text))
        else:
            if self._said or self._calls:
                self.close()
            self._system.append(text)


def _text(parts: Sequence[Json]) -> str:
    return "\n".join(part["text"] for part in parts)
