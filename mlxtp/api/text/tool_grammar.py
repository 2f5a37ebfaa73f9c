"""The grammar of a tool call: what a model may write when it has to call one of the tools it was offered."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import RequestError

WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
"""What may stand between two parts of the arguments; the same as in every other JSON that is asked for."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_TOKEN = re.compile(r"<\[\d+\]>")


def tool_call_grammar(
    tools: Sequence[Any], *, required: str | None, opening: str, closing: str
) -> tuple[str, str]:
    """Kind and text of a grammar for exactly one call: `opening{"name": NAME, "arguments": OBJECT}closing`.

    `tools` are as OpenAI has them: `{"type": "function", "function": {"name": ..., "parameters": SCHEMA}}`.
    OBJECT is valid for the parameters of the tool that NAME names; a tool without parameters takes `{}`.
    `required` is the only tool that may be called, None allows all. `opening` and `closing` are text; one
    that is a single special token is written `<[id]>`.

    Raises RequestError naming what is wrong with the tools.
    """
    schemas = dict(_schema(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    if not schemas:
        raise RequestError("tools: a tool call needs at least one tool", param="tools")
    if len(schemas) < len(tools):
        raise RequestError("tools: two tools have the same name", param="tools")
    if required is not None and required not in schemas:
        raise RequestError(f"tool_choice: there is no tool named {required!r}", param="tool_choice")
    allowed = {name: schema for name, schema in schemas.items() if required in (None, name)}
    calls = " | ".join(f"call_{index}" for index in range(len(allowed)))
    lines = [f"start: {_literal(opening)} ({calls}) {_literal(closing)}"]
    for index, (name, schema) in enumerate(allowed.items()):
        head = _literal(f'{{"name": {json.dumps(name)}, "arguments": ')
        lines.append(f'call_{index}: {head} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {schema}")
    return "lark", "\n".join(lines) + "\n"


def _schema(tool: Any, where: str) -> tuple[str, str]:
    """A tool's name and the schema of its arguments as JSON text on one line."""
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise RequestError(f'{where}: expected {{"type": "function", "function": ...}}', param=where)
    function = tool.get("function")
    where += ".function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}: expected an object with a name and parameters", param=where)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name: expected the tool's name", param=f"{where}.name")
    where += ".parameters"
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_ARGUMENTS
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where}: expected a JSON schema, an object", param=where)
    if parameters.get("type", "object") != "object":
        raise RequestError(f'{where}.type: arguments are always an "object"', param=f"{where}.type")
    options = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    try:
        text = json.dumps({**parameters, "type": "object", "x-guidance": options}, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise RequestError(f"{where}: this is no JSON schema", param=where) from None
    return name, text


def _literal(text: str) -> str:
    """`text` as a Lark grammar writes it."""
    return text if not text or _TOKEN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
