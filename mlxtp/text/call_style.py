"""Style that a chat template writes calls in, found by probing the template. Pure.

A grammar forces calls in this style. The next turn's prompt then repeats their tokens, and the prefix cache
holds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import RequestError
from .calls import CallFormat
from .conversation import Call, ChatMessage, Conversation, Tool

#: Renders a conversation; with True also the beginning of the answer. Raises RequestError.
Render = Callable[[Conversation, bool], str]

_NAME, _ID, _TEXT = "probe_name", "probeid00", "probe text"
_KEYS = ("probe_a", "probe_c")
_USER = ChatMessage("user", "probe user")
_OBJECT = re.compile(r'\{"probe_a"(\s*:\s*)"probe_b"(\s*,\s*)"probe_c"\1"probe_d"\}')
# Atomic groups keep it linear: a template may repeat these words any number of times.
_FIELDS = re.compile(r'(?>([^"]*?)probe_a)(?>([^"]*?)probe_b)(?>([^"]*?)probe_c)(?>[^"]*?probe_d)([^"]*)')
_TOOL = Tool(
    _NAME,
    "",
    {"type": "object", "properties": {key: {"type": "string"} for key in _KEYS}, "required": list(_KEYS)},
)


@dataclass(frozen=True, slots=True)
class Separators:
    item: str = ", "
    key: str = ": "


@dataclass(frozen=True, slots=True)
class CallStyle:
    before: str
    between: str
    after: str
    separators: Separators = Separators()
    field: tuple[str, str, str] | None = None  #: around an unquoted key and value; None: arguments are JSON


def answer_prefix(render: Render) -> str:
    """Return the text that the template writes before an answer, such as gpt-oss's channel."""
    prompt, written = _written(render, ChatMessage("assistant", _TEXT), ())
    start, end = len(prompt), written.rfind(_TEXT)
    return written[start:end] if written.startswith(prompt) and end > start else ""


def call_style(render: Render, format_: CallFormat, ends: Iterable[str]) -> CallStyle | None:
    """Return the style of the template's calls; None if no grammar can follow it.

    No grammar follows a call with an id, or with arguments before the name. `ends` end an answer.
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
    end = min((at for end in ends if end and (at := call.find(end)) >= 0), default=len(call))
    call = call[:end].rstrip()
    before, name, rest = call.partition(_NAME)
    if not name or _ID in call or _NAME in rest:
        return None
    if (found := _OBJECT.search(rest)) is not None:
        separators = Separators(item=found[2], key=found[1])
        return CallStyle(before, rest[: found.start()], rest[found.end() :], separators)
    return _by_fields(before, rest)


def _by_fields(before: str, rest: str) -> CallStyle | None:
    if (found := _FIELDS.fullmatch(rest)) is None:
        return None
    to_first, inside, to_second, after = found.groups()
    opening = next(each for at in range(len(to_first) + 1) if to_second.endswith(each := to_first[at:]))
    closing = to_second.removesuffix(opening)
    if not opening or not inside or not closing or not after.startswith(closing):
        return None
    between = to_first.removesuffix(opening)
    return CallStyle(before, between, after.removeprefix(closing), field=(opening, inside, closing))


def _written(render: Render, answer: ChatMessage, tools: tuple[Tool, ...]) -> tuple[str, str]:
    asked = Conversation((_USER,), tools, thinking=False)
    answered = Conversation((_USER, answer), tools, thinking=False)
    return render(asked, True), render(answered, False)
