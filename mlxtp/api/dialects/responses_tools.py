"""The tools of `/v1/responses`, and the choice among them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ...errors import RequestError
from ...text.conversation import AUTO, NONE, REQUIRED
from ..request_body import Schema, checked, not_supported, shown, wrong
from .client_tools import ClientTool, log_left_out, text_parameters

Json = dict[str, Any]
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
                raise RequestError(f"{at}.type is missing", param=f"{at}.type")
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
    if function.parameters is not None and function.parameters.get("type", "object") != "object":
        where += ".parameters.type"
        raise wrong(where, 'a schema of an "object"', function.parameters["type"])
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
