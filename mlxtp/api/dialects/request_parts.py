"""Parts of requests that several dialects share: settings of sampling and length, and tools.

Clients group functions in namespaces, offer tools that take plain text, and list tools that only their
provider supports. A model gets functions under unique names. Pure, but for one log line for each kind of tool
that is left out.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from ...errors import RequestError
from ...text.conversation import GenerationOptions, Tool
from ...text.tool_grammar import log_once
from ..request_body import Schema, in_range, shown

# --- settings ---------------------------------------------------------------------------------------------


MOST_TOKENS = 2**31 - 1


class Tuning(Schema):
    """The settings. Those with an asterisk in `docs/api.md` are not in OpenAI's own API."""

    min_tokens: Annotated[int, in_range(0, MOST_TOKENS)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, in_range(0, 2)] | None = None
    top_p: Annotated[float, in_range(0, 1)] | None = None
    top_k: Annotated[int, in_range(-1, MOST_TOKENS)] | None = None
    min_p: Annotated[float, in_range(0, 1)] | None = None
    xtc_probability: Annotated[float, in_range(0, 1)] | None = None
    xtc_threshold: Annotated[float, in_range(0, 0.5)] | None = None
    seed: int | None = None
    presence_penalty: Annotated[float, in_range(-2, 2)] | None = None
    frequency_penalty: Annotated[float, in_range(-2, 2)] | None = None
    repetition_penalty: Annotated[float, in_range(0.01, 100)] | None = None
    logit_bias: dict[str, Annotated[float, in_range(-100, 100)]] | None = None
    deadline_s: Annotated[float, in_range(0.001, 86_400)] | None = None

    def options(
        self, *, n: int = 1, max_tokens: int | None, logprobs: int, format_: Mapping[str, Any] | None
    ) -> GenerationOptions:
        """Return the options. The arguments are those that each dialect names in its own way."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        same = self.model_dump(include=_SAME_NAMES, exclude_none=True)
        return GenerationOptions(
            n=n, max_tokens=max_tokens, stop=stops, format=format_, logprobs=logprobs, **same
        )


_SAME_NAMES = {*Tuning.model_fields} - {"stop"}  # as in `GenerationOptions`


# --- tools ------------------------------------------------------------------------------------------------


ToolKind = Literal["function", "custom", "tool_search"]


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool under its client's name. `where` is its place in the request."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    kind: ToolKind = "function"
    namespace: str | None = None
    where: str = ""

    def function(self, name: str) -> Tool:
        """Return this tool as a function under the model's `name`."""
        return Tool(name, self.description, self.parameters)


def unfold(tools: Sequence[ClientTool]) -> dict[str, ClientTool]:
    """Map the model's names to tools: a tool's own name if it is unique, else `namespace__name`.

    Raises RequestError where two tools would have the same name.
    """
    count = Counter(tool.name for tool in tools)
    found: dict[str, ClientTool] = {}
    for tool in tools:
        unique = tool.namespace is None or count[tool.name] == 1
        name = tool.name if unique else joined(tool.namespace, tool.name)
        if name in found:
            where = f"{tool.where}.name"
            raise RequestError(f"{where}: there are two tools named {shown(name)}", param=where)
        found[name] = tool
    return found


def called(name: str, tools: Mapping[str, ClientTool]) -> ClientTool:
    """Return the tool that a model calls by `name`. Models also write `namespace__name` for unique names."""
    whole = (each for each in tools.values() if each.namespace and joined(each.namespace, each.name) == name)
    return tools.get(name) or next(whole, ClientTool(name))


def joined(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


# --- tools that take plain text ---------------------------------------------------------------------------


def text_parameters(format_: object) -> Mapping[str, Any]:
    """Return the schema of one string, `input`. It describes a grammar in `format_` to the model."""
    about = "The whole input, as plain text."
    match format_:
        case {"syntax": str(syntax), "definition": str(definition)} | {
            "grammar": {"syntax": str(syntax), "definition": str(definition)}
        }:
            about += f" It follows this {syntax} grammar:\n{definition}"
    return {
        "type": "object",
        "properties": {"input": {"type": "string", "description": about}},
        "required": ["input"],
        "additionalProperties": False,
    }


def text_arguments(text: str) -> str:
    """Return the arguments of a call with this text, as JSON."""
    return json.dumps({"input": text}, ensure_ascii=False)


def text_of(arguments: str) -> str:
    """Return the text in such arguments, as far as it is written."""
    return TextReader().push(arguments)


_LONGEST_HEAD = 1000  # characters before the text
_HEAD = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"')
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # the first half of a character
#: The part of a JSON string that can be read without what follows it.
_WRITTEN = re.compile(
    rf'(?:[^"\\]+|\\["\\/bfnrt]|(?!{_HIGH})\\u[0-9a-fA-F]{{4}}|{_HIGH}(?:\\u[0-9a-fA-F]{{4}}|(?=[^\\]|\\[^u])))*'
)


class TextReader:
    """Reader of a call's text: the first string in its arguments."""

    def __init__(self) -> None:
        self._began = False
        self._rest = ""  # arrived, and not read yet

    def push(self, arguments: str) -> str:
        """Return the text that these arguments add."""
        if self._rest.startswith('"') or (not self._began and len(self._rest) > _LONGEST_HEAD):
            return ""
        self._rest += arguments
        if not self._began:
            head = _HEAD.match(self._rest)
            if head is None:
                return ""
            self._began, self._rest = True, self._rest[head.end() :]
        written = _WRITTEN.match(self._rest)
        assert written is not None  # it may be empty
        self._rest = self._rest[written.end() :]
        text: str = json.loads(f'"{written[0]}"', strict=False)
        return text.encode(errors="replace").decode()  # a model may write half a character


# --- what is left out -------------------------------------------------------------------------------------


def log_left_out(what: str, kind: str) -> None:
    """Log once that tools or items of this kind are ignored."""
    log_once(f"leaving out {what} of type {shown(kind)}: only their provider supports them")
