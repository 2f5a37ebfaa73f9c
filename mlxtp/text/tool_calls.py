"""Reader of tool calls in a model's text, and the style in which a chat template writes them.

Pure, except for the parsers of mlx-lm.

Each model family has its own format of calls, and mlx-lm has a parser for each. They read a call when it is
complete. JSON with the name first, which most models write, is passed on while it comes.

A call that a grammar forces is written in the template's style, so that the next turn's prompt repeats its
tokens and the prefix cache holds them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import re
import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from ..errors import Code, ModelError, RequestError
from .conversation import Call, ChatMessage, Conversation, Tool, tool_json

log = logging.getLogger(__name__)

Json = dict[str, Any]
_PARSERS = "_mlxtp_tool_parsers"
_LONGEST_HEAD = 1000  # characters up to the arguments of a call that is passed on while it comes


@dataclass(frozen=True, slots=True)
class CallText:
    """A piece of call number `index`. The first of each has its `id` and `name` and no text."""

    index: int
    text: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of a model family's calls: text between `start` and `end`; an empty `end` is that of the answer.

    `parse` takes that text and the tools in OpenAI's shape, and returns one call or several as `{"name",
    "arguments"}`; it may raise anything. `streams`: the text is JSON with the name first. `bare`: an answer
    that begins with a brace is a call, too.
    """

    name: str
    start: str
    end: str
    parse: Callable[[str, Sequence[Json]], object]
    streams: bool = False
    bare: bool = False


class CallReader:
    """Reader of the calls of one answer. `forced`: a grammar guarantees JSON and nothing else."""

    def __init__(
        self, format_: ToolFormat, tools: Sequence[Tool], forced: bool = False, most: int = 0
    ) -> None:
        self.forced = forced
        #: True if a call began in the text that is read, so that the text is no answer after all.
        self.began = False
        self._most = most
        self._names = frozenset(tool.name for tool in tools)
        self._headless = False
        self.complete = 0  #: calls that were read to their end
        self.format = format_
        self._tools = [tool_json(tool) for tool in tools]
        self._next = 0
        self._ids: set[str] = set()
        self._text: list[str] = []
        self._streamed: _Streamed | None = None

    def push(self, text: str) -> Iterator[CallText]:
        """Read more of the text between the markers of a call."""
        self._text.append(text)
        if self._headless or not (self.format.streams or self.forced):
            return
        while text and not self._enough:
            if self._streamed is None:
                so_far = "".join(self._text)
                found = self._head(so_far)
                if found is None:
                    self._headless = len(so_far) > _LONGEST_HEAD
                    return
                name, end = found
                self._streamed = _Streamed(self._next)
                self._next += 1
                self.began = True
                yield CallText(self._streamed.index, "", new_id(), name)
                text = so_far[end:]
            arguments, text = self._streamed.push(text)
            if arguments:
                yield CallText(self._streamed.index, arguments)
            if self._streamed.depth:
                return
            self.complete += 1
            self._streamed = None
            self._text = [text]

    def opens(self, text: str) -> bool | None:
        """Return True if an answer that begins with `text` is a bare call of an offered tool; None if not
        clear yet.

        White space does not count. Text with other fields before its name is no call and is shown as it
        comes.
        """
        written = "".join(text[: _LONGEST_HEAD + 1].split()).lstrip("[")
        names = ['{"name":' + "".join(json.dumps(name, ensure_ascii=False).split()) for name in self._names]
        heads = [*names, '{"type":"function"', '{"parameters":{', '{"arguments":{']
        if any(written.startswith(head) for head in heads):
            return True
        waits = len(text) <= _LONGEST_HEAD and any(head.startswith(written) for head in heads)
        return None if waits else False

    @property
    def quoted(self) -> bool:
        """True if the arguments that are passed on stop in the middle of a string."""
        return self._streamed is not None and self._streamed.quoted

    @property
    def _enough(self) -> bool:
        return 0 < self._most <= self.complete

    def _head(self, text: str) -> tuple[str, int] | None:
        """Return the name of a call in JSON, and the position of its arguments."""
        head = _HEAD.match(text)
        if head is None:
            return None
        try:
            name = json.loads(head[1])
        except ValueError:
            return None
        return None if self.format.bare and name not in self._names else (name, head.end())

    def close(self, cut: bool) -> tuple[list[CallText], str]:
        """Return further pieces of calls, and text that is no call, at the end of a call or of the answer.

        `cut`: the answer was cut off in the middle of the call.
        """
        text, streamed = "".join(self._text), self._streamed
        self._text, self._streamed, self._headless = [], None, False
        if streamed is not None or not text.strip(" \n\t;,}]"):
            return [], ""
        if self.began:  # text after a call: further fields, or words
            rest = text.lstrip(" \n\t;,}]")
            return [], "" if rest.startswith('"') else rest
        if cut:
            return [], text
        try:
            calls = _calls(self.format.parse(text, self._tools), self._names if self.format.bare else None)
        except Exception as error:  # noqa: BLE001 - a model may write anything, and parsers raise as they like
            log.debug("no tool call of the kind %s: %s", self.format.name, error)
            return [], text
        pieces = []
        for call in calls[: self._most - self.complete] if self._most else calls:
            id_ = new_id() if call.id in self._ids else call.id  # some models number their calls themselves
            self._ids.add(id_)
            pieces += [CallText(self._next, "", id_, call.name), CallText(self._next, call.arguments)]
            self._next += 1
            self.complete += 1
        return pieces, ""


class _Streamed:
    """Arguments of one call, an object in JSON, up to the brace that ends it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.depth = -1  #: open brackets; -1 before the first one, 0 at the end
        self.quoted = self._escaped = False

    def push(self, text: str) -> tuple[str, str]:
        """Return the text that belongs to the object, and the text after it."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self.quoted:
                self._escaped = character == "\\"
                self.quoted = character != '"'
            elif character == '"':
                self.quoted = True
            elif character in "{[":
                self.depth = max(self.depth, 0) + 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return text[: at + 1], text[at + 1 :]
        return text, ""


_HEAD = re.compile(
    r'[\s\[\]};,]*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\\n]|\\.)+")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def new_id() -> str:
    """Return a new id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def _calls(found: object, names: Collection[str] | None) -> list[Call]:
    """Return the calls that a parser found. Raises ValueError when there is none.

    `names`: the tools that count, with arguments beside them, where any JSON could be a call.
    """
    calls = []
    for each in found if isinstance(found, list) else [found]:
        if not isinstance(each, Mapping):
            raise ValueError("a call is an object")
        name, arguments = each.get("name"), each.get("arguments", each.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if names is not None and (name not in names or not each.keys() & {"arguments", "parameters"}):
            raise ValueError("it names no offered tool")
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError("a call has a name, and an object of arguments")
        id_ = each.get("id")
        text = _object_text(arguments)
        calls.append(Call(id_ if isinstance(id_, str) and id_ else new_id(), name, text))
    if not calls:
        raise ValueError("no call")
    return calls


def _object_text(arguments: Mapping[str, Any]) -> str:
    """Return JSON, readable unless it has half a character. Raises ValueError for values that JSON lacks."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments, allow_nan=False)
    return text


# --- formats ----------------------------------------------------------------------------------------------


def _parse_json(text: str, _tools: Sequence[Json]) -> list[object]:
    """Return the JSON values that follow each other, as Llama writes several calls."""
    decoder, found, at = json.JSONDecoder(), [], 0
    text = text.strip(_BETWEEN)
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        found += value if isinstance(value, list) else [value]
        while at < len(text) and text[at] in _BETWEEN:
            at += 1
    return found


_BETWEEN = " \n\t;,"


def _parse_harmony(text: str, _tools: Sequence[Json]) -> Json:
    """Parse `functions.NAME <|constrain|>json<|message|>{...}`. Raises ValueError for anything else."""
    found = _HARMONY.match(text)
    if found is None:
        raise ValueError("no call")
    return {"name": found[1], "arguments": json.loads(found[2])}


_HARMONY = re.compile(r"\s*(?:functions\.)?([\w.-]+)[^{]*?<\|message\|>(.*)", re.DOTALL)

#: Format of Hermes and Qwen, also requested from models without a format of their own.
JSON_CALLS = ToolFormat("json_tools", "<tool_call>", "</tool_call>", _parse_json, streams=True)
LLAMA_CALLS = ToolFormat("llama", "<|python_tag|>", "", _parse_json, streams=True, bare=True)
#: Format of gpt-oss; `reasoning.address_of` finds the names.
HARMONY_CALLS = ToolFormat("harmony", "<|channel|>commentary to=", "<|call|>", _parse_harmony)


@cache
def tool_format(name: str) -> ToolFormat:
    """Return the format that mlx-lm calls `name`. Raises ModelError for an unknown one."""
    for known in (JSON_CALLS, LLAMA_CALLS, HARMONY_CALLS):
        if name == known.name:
            return known
    if not name.isidentifier():
        raise ModelError(f"there is no tool parser {name!r}", Code.MODEL_UNSUPPORTED)
    _parsers()
    try:
        module = importlib.import_module(f"{_PARSERS}.{name}")
    except ImportError:
        raise ModelError(f"this mlx-lm has no tool parser {name!r}", Code.MODEL_UNSUPPORTED) from None
    return ToolFormat(name, module.tool_call_start, module.tool_call_end, module.parse_tool_call)


def _parsers() -> ModuleType:
    """Return mlx-lm's folder of parsers under another module name, because `mlx_lm` would import MLX."""
    found = sys.modules.get(_PARSERS)
    if found is None:
        mlx_lm = importlib.util.find_spec("mlx_lm")
        assert mlx_lm is not None
        assert mlx_lm.submodule_search_locations
        folder = f"{mlx_lm.submodule_search_locations[0]}/tool_parsers"
        spec = importlib.util.spec_from_file_location(
            _PARSERS, f"{folder}/__init__.py", submodule_search_locations=[folder]
        )
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules[_PARSERS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found


# --- the style of a template's calls ----------------------------------------------------------------------


#: Write a conversation; True adds the beginning of the answer. Raises RequestError.
Render = Callable[[Conversation, bool], str]

_NAME, _ID, _TEXT = "probe_name", "probeid00", "probe text"
_KEYS = ("probe_a", "probe_c")
_VALUES = ("probe_b", "probe_d")
_USER = ChatMessage("user", "probe user")
_OBJECT = re.compile(r'\{"probe_a"(\s*:\s*)"probe_b"(\s*,\s*)"probe_c"\1"probe_d"\}')
_TOOL = Tool(
    _NAME,
    "",
    {"type": "object", "properties": {key: {"type": "string"} for key in _KEYS}, "required": list(_KEYS)},
)


@dataclass(frozen=True, slots=True)
class Separators:
    """Text between two items of JSON, and between a key and its value."""

    item: str = ", "
    key: str = ": "


@dataclass(frozen=True, slots=True)
class CallStyle:
    """Style of a call in the template: `before`, its name, `between`, its arguments, `after`.

    The arguments are a JSON object. With `field`, each of them instead stands between texts of its own:
    `field[0]` key `field[1]` value `field[2]`; a string stands there without quotes.
    """

    before: str
    between: str
    after: str
    separators: Separators = Separators()
    field: tuple[str, str, str] | None = None


def answer_prefix(render: Render) -> str:
    """Return the text that the template writes before an answer, such as a channel of gpt-oss."""
    prompt, written = _written(render, ChatMessage("assistant", _TEXT), ())
    start, end = len(prompt), written.rfind(_TEXT)
    return written[start:end] if written.startswith(prompt) and end > start else ""


def call_style(render: Render, format_: ToolFormat, ends: Iterable[str]) -> CallStyle | None:
    """Return the style of the template's calls; None where a grammar cannot follow it.

    `ends` are the tokens that end an answer. A call that carries its id cannot be followed, nor one whose
    arguments come before its name.
    """
    arguments = '{"probe_a": "probe_b", "probe_c": "probe_d"}'
    try:
        prompt, written = _written(
            render, ChatMessage("assistant", "", calls=(Call(_ID, _NAME, arguments),)), (_TOOL,)
        )
    except RequestError:
        return None
    start = (
        len(prompt) if written.startswith(prompt) else written.rfind(format_.start, 0, written.rfind(_NAME))
    )
    if start < 0 or not format_.start:
        return None
    call = written[start:]
    call = call[
        : min((at for end in ends if end and (at := call.find(end)) >= 0), default=len(call))
    ].rstrip()
    before, name, rest = call.partition(_NAME)
    if not name or _ID in call or _NAME in rest:
        return None
    if (found := _OBJECT.search(rest)) is not None:
        separators = Separators(item=found[2], key=found[1])
        return CallStyle(before, rest[: found.start()], rest[found.end() :], separators)
    return _by_fields(before, rest)


def _by_fields(before: str, rest: str) -> CallStyle | None:
    """Return the style of calls whose arguments stand one by one, as in XML; None if it is no such style."""
    marks = [rest.find(mark) for mark in (_KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1])]
    if marks[0] < 0 or marks != sorted(marks) or '"' in rest:
        return None
    ends = [at + len(_KEYS[0]) for at in marks]  # all marks are of one length
    to_first, inside, to_second, after = (
        rest[begin:end]
        for begin, end in zip([0, *ends[:2], ends[3]], [marks[0], marks[1], marks[2], len(rest)], strict=True)
    )
    opening = _common_end(to_first, to_second)
    closing = to_second.removesuffix(opening)
    if not opening or not inside or not closing or not after.startswith(closing):
        return None
    between = to_first.removesuffix(opening)
    return CallStyle(before, between, after.removeprefix(closing), field=(opening, inside, closing))


def _common_end(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return one[len(one) - length :]


def _written(render: Render, answer: ChatMessage, tools: tuple[Tool, ...]) -> tuple[str, str]:
    """Return the prompt for an answer, and the conversation with the answer in it."""
    asked = Conversation((_USER,), tools, thinking=False)
    answered = Conversation((_USER, answer), tools, thinking=False)
    return render(asked, True), render(answered, False)
