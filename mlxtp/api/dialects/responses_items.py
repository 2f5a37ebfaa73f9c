"""Items of `/v1/responses`, the parts of a conversation, and their conversion to tools and messages. Pure.

An item is checked once, on arrival. From then on it has this module's shape, without ids.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from ...errors import RequestError
from ...text.conversation import AUTO, Call, ChatMessage
from ...text.json_limits import check_extent
from ..adapter import Json
from ..answer_shapes import fields
from ..request_body import Schema, check_finite, checked, missing, wrong
from .request_parts import (
    SUMMARY,
    ClientTool,
    Parameters,
    Tools,
    arguments_text,
    content_text,
    content_texts,
    joined,
    log_left_out,
    newest,
    plain_choice,
    role_of,
    text_arguments,
    text_parameters,
    thought_text,
    words_of,
)

CALLS = ("function_call", "custom_tool_call", "tool_search_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output", "tool_search_output")


class _Message(Schema):
    role: str
    content: Any = None


class _Call(Schema):
    """A call. The name may be missing and the arguments may be anything."""

    call_id: str | None = None
    id: str | None = None
    name: str | None = None
    arguments: Any = None
    input: Any = None
    namespace: str | None = None
    status: str | None = None


class _CallOutput(Schema):
    call_id: str | None = None
    id: str | None = None
    name: str | None = None
    output: Any = None


class _MoreTools(Schema):
    call_id: str | None = None
    tools: list[Json]


class _Reference(Schema):
    id: str


# --- items from clients -----------------------------------------------------------------------------------


def items_of(given: str | list[Any], find: Callable[[str, str], Json]) -> list[Json]:
    """Return the items of `input`. Raises RequestError that names the place.

    `find` resolves a reference: it takes the id of an item and the place of the reference.
    """
    if isinstance(given, str):
        return [_spoken("user", [given])]
    items: list[Json] = []
    own = newest([_speaker(each) for each in given])
    for i, each in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(each, dict):
            raise wrong(where, "an item, an object", each)
        if not {"type", "role", "id"} & each.keys():
            raise missing(f"{where}.type")
        match each.get("type", "message" if "role" in each else "item_reference"):
            case "item_reference":
                items.append(find(checked(_Reference, each, where).id, f"{where}.id"))
            case "message":
                items.append(_message(each, where, last=i == len(given) - 1, own=i == own))
            case "compaction_trigger":
                pass  # obeyed where it is the last one
            case str(kind) if (item := _item(kind, each, where)) is not None:
                items.append(item)
            case str(kind) if text := words_of(each):
                items.append(_spoken("assistant", [text]))
            case str(kind):
                log_left_out("items", kind)
            case kind:
                raise wrong(f"{where}.type", "a string", kind)
    return items


def _speaker(item: object) -> str:
    """Return the role of a message, or "tool" for a call's output."""
    match item:
        case {"type": str(kind)} if kind.endswith("_output"):
            return "tool"
        case {"role": str(role)}:
            return role
    return ""


def _item(kind: str, item: Json, where: str) -> Json | None:
    """Return an item in this module's shape; None if only its provider can read or run it."""
    has_id = item.get("call_id") is not None
    if kind.startswith("tool_search_") and (item.get("execution") == "server" or not has_id):
        return None
    if kind not in _READ:  # a provider's tool that the client ran, such as a shell, becomes a function
        if kind.endswith("_call_output"):
            given = item.get("output") or item.get("status")
            return _call_output(item | {"type": "function_call_output", "output": given}, where)
        if kind.endswith("_call") and has_id:
            given = item.get("action", item.get("operation"))
            name = kind.removesuffix("_call")
            return _call(item | {"type": "function_call", "name": name, "arguments": given}, where)
        return None
    return _READ[kind](item, where)


def _message(item: Json, where: str, *, last: bool, own: bool) -> Json:
    """Return a message. `own`: it is the newest, and the user's own."""
    message = checked(_Message, item, where)
    role, mark = role_of(message.role, f"{where}.role", last=last)
    texts = [mark, *content_texts(message.content, f"{where}.content", strict=own)]
    if role == "tool":
        return {"type": "function_call_output", "call_id": "", "output": _parts(texts)}
    return _spoken(role, texts)


def _spoken(role: str, texts: Iterable[str]) -> Json:
    return {"type": "message", "role": role, "content": _parts(texts)}


def _parts(texts: Iterable[str]) -> list[Json]:
    return [{"text": text} for text in texts if text]


def _call(item: Json, where: str) -> Json:
    call, kind = checked(_Call, item, where), item["type"]
    if kind == "tool_search_call":
        arguments = call.arguments if isinstance(call.arguments, dict) else {}
        check_finite(arguments, f"{where}.arguments")
        return search_call(call.call_id or "", arguments, _status(call.status))
    if kind == "custom_tool_call":
        text = content_text(call.input)
    else:
        text = arguments_text(call.arguments).strip()
        check_extent(text, where=f"{where}.arguments", param=f"{where}.arguments")
    made = Call(call.call_id or call.id or "", call.name or "", text)
    return call_item(kind, made, _status(call.status), call.namespace)


def _status(given: str | None) -> str:
    return "incomplete" if given == "incomplete" else "completed"


def call_item(kind: str, call: Call, status: str, namespace: str | None = None) -> Json:
    """Return a call as an item. A custom tool's call has text for arguments."""
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


def _more_tools(item: Json, where: str) -> Json:
    more = checked(_MoreTools, item, where)
    check_finite(more.tools, f"{where}.tools")
    return {"type": item["type"], "call_id": more.call_id, "tools": more.tools}


def _call_output(item: Json, where: str) -> Json:
    """Return a call's output. The client may have dropped the call."""
    output = checked(_CallOutput, item, where)
    given = output.output if isinstance(output.output, str) else _parts(content_texts(output.output))
    id_ = output.call_id or output.id or ""
    return {"type": item["type"], "call_id": id_, "name": output.name or "", "output": given}


def _reasoning(item: Json, _where: str) -> Json:
    """Return thoughts, without `encrypted_content`: only its maker can read it."""

    def parts(given: object) -> list[Json]:
        return _parts(map(thought_text, given if isinstance(given, list) else [given]))

    return {"type": "reasoning", "summary": parts(item.get("summary")), "content": parts(item.get("content"))}


def object_in(text: str) -> Json | None:
    """Return the object that `text` is in JSON, or None."""
    try:
        found = from_json(text.encode(errors="replace"), allow_inf_nan=False)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


# --- compactions ------------------------------------------------------------------------------------------


_OURS = "mlxtp:"  # begins the content of mlxtp's own compactions
_OTHERS = ("user", "system", "developer")
_LEAST_KEPT = 2000  # characters
#: Request for a summary, the last words of a user.
COMPACT = """Write a summary of the conversation so far. From now on you will see it in place of your own
messages, of your calls and of their results; only messages of the user stay. Say what the user wants, what
was decided and why, what was done and found out, and what remains to be done. Keep names, paths, commands,
numbers and errors as they are. Call no tool. Write only the summary."""


def compaction_content(summary: str) -> str:
    """Return the content of a compaction: plain text in base64, not encrypted. Empty without a summary."""
    return _OURS + b64encode(summary.encode(errors="replace")).decode() if summary else ""


def _summary(content: object) -> str:
    """Return the summary in a compaction; empty if another server made it, since only that can read it."""
    if not isinstance(content, str) or not content.startswith(_OURS):
        return ""
    try:
        return b64decode(content.removeprefix(_OURS), validate=True).decode()
    except ValueError:
        return ""


def _compaction(item: Json, _where: str) -> Json | None:
    content = item.get("encrypted_content")
    return {"type": "compaction", "encrypted_content": content} if _summary(content) else None


def still_meant(items: Sequence[Json]) -> list[Json]:
    """Return the items to make a prompt of.

    Before a compaction, only messages that are not the assistant's stay. A cut-off call counts as never made
    unless the client answered it.
    """
    found: list[Json] = []
    answered: set[str] = set()
    compacted = False
    for item in reversed(items):
        if item["type"] in OUTPUTS:
            answered.add(item["call_id"])
        cut = item["type"] in CALLS and item["status"] == "incomplete" and item["call_id"] not in answered
        if not cut and (not compacted or item.get("role") in _OTHERS):
            found.append(item)
        compacted |= item["type"] == "compaction"
    return found[::-1]


def users_of(items: Sequence[Json], size: int) -> list[Json]:
    """Return messages of the user as a client keeps them: the newest, and others up to half of `size`
    characters.
    """
    room, kept = max(size // 2, _LEAST_KEPT), list[Json]()
    for item in reversed(items):
        if item.get("role") == "user":
            content = [{"type": "input_text", "text": part["text"]} for part in item["content"]]
            room -= len(json.dumps(content))
            if room < 0 and kept:
                break
            kept.append({"type": "message", "role": "user", "status": "completed", "content": content})
    return kept[::-1]


_READ: Mapping[str, Callable[[Json, str], Json | None]] = {
    "function_call": _call,
    "function_call_output": _call_output,
    "custom_tool_call": _call,
    "custom_tool_call_output": _call_output,
    "tool_search_call": _call,
    "tool_search_output": _more_tools,
    "additional_tools": _more_tools,
    "reasoning": _reasoning,
    "compaction": _compaction,
    "compaction_summary": _compaction,
    "context_compaction": _compaction,
}


# --- tools ------------------------------------------------------------------------------------------------


_Name = Annotated[str, Field(min_length=1)]


class _Function(Schema):
    type: Literal["function"]
    name: _Name
    description: str | None = None
    parameters: Parameters = None
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
    parameters: Parameters = None


_PLAIN: list[Json] = [_Function.model_json_schema(), _Custom.model_json_schema()]
_NOT_PLAIN, _UNREAD = [
    fields({"type": {"type": "string", "not": {"enum": ["function", "custom", *more]}}})
    for more in ((), ("namespace",))
]
_INNER = fields({"tools": {"type": "array", "items": {"anyOf": [*_PLAIN, _NOT_PLAIN]}}})
_ANY = {"anyOf": [*_PLAIN, _UNREAD, {"allOf": [_Namespace.model_json_schema(), _INNER]}]}
TOOLS: Json = {"anyOf": [{"type": "null"}, {"type": "array", "items": _ANY}]}  #: for /openapi.json


def read_tools(
    given: Sequence[Json], where: str, namespace: str | None = None
) -> tuple[list[ClientTool], list[Json]]:
    """Return the tools that a model may call, and their JSON for the answer. Raises RequestError."""
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

    The first `known` items belong to earlier answers.
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


def repeated_choice(given: Any) -> Json | str:
    """Return a checked choice without unknown fields."""
    match plain_choice(given):
        case {"type": "function" | "custom" as kind, "name": name}:
            return {"type": kind, "name": name}
        case {"type": "allowed_tools", "mode": mode, "tools": allowed}:
            plain = [plain_choice(tool) for tool in allowed]
            tools = [{"type": tool["type"], "name": tool["name"]} for tool in plain]
            return {"type": "allowed_tools", "mode": mode, "tools": tools}
        case word:
            return str(word or AUTO)


# --- messages ---------------------------------------------------------------------------------------------


def turns_of(instructions: str | None, items: Sequence[Json], tools: Tools) -> tuple[ChatMessage, ...]:
    """Return the turns of a conversation, made of the items from `still_meant`.

    `tools` are by the model's names. Consecutive thoughts, text and calls of the assistant are one turn. So
    are consecutive system messages, since many templates take only one.
    """
    reader = _Reader(instructions, {(tool.namespace, tool.name): name for name, tool in tools.items()})
    for item in items:
        reader.read(item)
    reader.close()
    if not reader.turns:
        raise RequestError("input is empty, and there are no instructions", param="input")
    return tuple(reader.turns)


def worth_keeping(items: Sequence[Json]) -> list[Json]:
    """Return the items that make turns, without thoughts that led to no answer."""
    found: list[Json] = []
    thoughts: list[Json] = []
    for item in items:
        if item["type"] == "reasoning":
            thoughts.append(item)
        else:
            if item["type"] in CALLS or item.get("role") == "assistant":
                found += thoughts
            thoughts = []
            found.append(item)
    return found


def listed(id_: str, items: Sequence[Json]) -> list[Json]:
    """Return the kept items of a response's input as a client reads them, each with an id."""
    return [_listed(item, id_.removeprefix("resp_"), i) for i, item in enumerate(items)]


_PREFIXES = {"message": "msg", "reasoning": "rs", "compaction": "cmp"}


def _listed(item: Json, place: str, index: int) -> Json:
    kind = item["type"]
    prefix = _PREFIXES.get(kind) or "".join([word[0] for word in kind.split("_")])
    found: Json = {"id": f"{prefix}_{place}_in{index}", "status": "completed"} | item
    said = "output_text" if item.get("role") == "assistant" else "input_text"
    types = {"content": said, "output": said}
    if kind == "reasoning":
        types = {"summary": "summary_text", "content": "reasoning_text"}
    for name, part in types.items():
        if isinstance(parts := item.get(name), list):
            more: Json = {"annotations": [], "logprobs": []} if part == "output_text" else {}
            found[name] = [{"type": part, **more} | each for each in parts]
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
        self._text = ""
        self._begun = False  # the next message goes on in the last one
        self._begin()

    def read(self, item: Json) -> None:
        match item["type"]:
            case kind if kind in CALLS:
                self._assistant(begins=False)
                call = self._called(item)
                self._names[call.id] = call.name
                self._calls.append(call)
            case kind if kind in OUTPUTS:
                self.close()
                self._read_output(item)
            case "additional_tools":
                pass  # they are offered with the others
            case "compaction":
                self._read_message("user", f"{SUMMARY}\n{_summary(item['encrypted_content'])}")
            case "reasoning":
                self._assistant(begins=True)
                self._thoughts.append(_text(item["content"] or item["summary"]))
            case _ if item["role"] == "assistant":
                self._assistant(begins=True)
                self._text = self._text * self._begun + _text(item["content"])
                self._said, self._begun = True, item.get("begun", False)
            case _:
                self._read_message(item["role"], _text(item["content"]))

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
        self._begun = False
        self._text = ""
        self._thoughts: list[str] = []
        self._calls: list[Call] = []

    def _assistant(self, *, begins: bool) -> None:
        """Close the turn before the assistant's. `begins`: also one of the assistant with text or calls."""
        if self._system or (begins and not self._begun and (self._said or self._calls)):
            self.close()

    def _called(self, item: Json) -> Call:
        """Return the call as the model wrote it, so that the prompt repeats the same text."""
        if item["type"] == "tool_search_call":
            return Call(item["call_id"], "tool_search", json.dumps(item["arguments"], ensure_ascii=False))
        namespace, name = item.get("namespace"), item["name"]
        name = self._known.get((namespace, name)) or joined(namespace, name)
        if item["type"] == "custom_tool_call":
            return Call(item["call_id"], name, text_arguments(item["input"]))
        return Call(item["call_id"], name, item["arguments"])

    def _read_output(self, item: Json) -> None:
        call_id = item["call_id"]
        if item["type"] == "tool_search_output":
            found = read_tools(item["tools"], "tools")[0]
            names = [self._known[tool.namespace, tool.name] for tool in found]
            text = f"These tools can be called now: {', '.join(names) or 'none'}"
        else:
            text = item["output"] if isinstance(item["output"], str) else _text(item["output"])
        name = self._names.get(call_id) or item.get("name", "")
        self.turns.append(ChatMessage("tool", text, call_id=call_id, name=name))

    def _read_message(self, role: str, text: str) -> None:
        if role == "user":
            self.close()
            self.turns.append(ChatMessage("user", text))
        else:
            if self._said or self._calls:
                self.close()
            self._system.append(text)


def _text(parts: Sequence[Json]) -> str:
    return "\n".join(part["text"] for part in parts)
