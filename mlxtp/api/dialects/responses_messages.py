"""Conversion of the items of `/v1/responses` to the turns of a conversation. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...errors import RequestError
from ...text.conversation import Call, ChatMessage
from ..request_body import shown
from .client_tools import joined, text_arguments
from .responses_items import CALLS, OUTPUTS, ROLES
from .responses_tools import Tools, read_tools

Json = dict[str, Any]


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
