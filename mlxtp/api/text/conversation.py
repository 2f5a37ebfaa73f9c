"""A conversation as chat templates take it. Pure.

A model whose template knows nothing of tools is told of them in the system message, and asked to call them
as Hermes and Qwen do; what its tools returned comes as the user's words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..ask import Conversation, Tool, Turn
from .calls import tool_json

Json = dict[str, Any]

_TOLD = """You can call functions to help with the user's request. These exist, one JSON object a line:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as a JSON object between these tags, and nothing else:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""


def template_messages(conversation: Conversation, knows_tools: bool) -> list[Json]:
    """The messages for a template that has its own way with tools (`knows_tools`), or has none."""
    if knows_tools:
        return [_message(turn) for turn in conversation.turns]
    turns = [_told_apart(turn) for turn in conversation.turns]
    return [{"role": turn.role, "content": turn.text} for turn in _with_tools(turns, conversation.tools)]


def template_options(conversation: Conversation) -> Json:
    """What else a template is given. It ignores what it does not know."""
    options = dict(conversation.template_options)
    if conversation.thinking is not None:
        options |= {"enable_thinking": conversation.thinking, "thinking": conversation.thinking}
    return options


def characters(conversation: Conversation) -> int:
    """How long it is before the template adds its own."""
    turns = sum(len(turn.text) + len(turn.reasoning) + _call_characters(turn) for turn in conversation.turns)
    return turns + sum(len(json.dumps(tool_json(tool))) for tool in conversation.tools)


def _call_characters(turn: Turn) -> int:
    return sum(len(call.name) + len(call.arguments) for call in turn.calls)


def _message(turn: Turn) -> Json:
    message: Json = {"role": turn.role, "content": turn.text}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call, arguments in ((call, _object(call.arguments)) for call in turn.calls)
        ]
    if turn.role == "tool":
        message |= {"tool_call_id": turn.call_id, "name": turn.name}
    return message


def _object(arguments: str) -> Mapping[str, Any]:
    """Templates take arguments as an object. Text that is none stays visible."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _told_apart(turn: Turn) -> Turn:
    if turn.role == "tool":
        return Turn("user", f"<tool_response>\n{turn.text}\n</tool_response>")
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in turn.calls
    ]
    return Turn(turn.role, "\n".join([*filter(None, [turn.text]), *calls]))


def _with_tools(turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Turn]:
    """Answers of several tools in one message of the user, and the tools in the system message."""
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn.role == "user" and turn.text.startswith("<tool_response>"):
            last = joined[-1]
            if last.role == "user" and last.text.startswith("<tool_response>"):
                joined[-1] = Turn("user", f"{last.text}\n{turn.text}")
                continue
        joined.append(turn)
    if not tools:
        return joined
    told = _TOLD.format(tools="\n".join(json.dumps(tool_json(tool), ensure_ascii=False) for tool in tools))
    if joined and joined[0].role == "system":
        return [Turn("system", f"{joined[0].text}\n\n{told}"), *joined[1:]]
    return [Turn("system", told), *joined]
