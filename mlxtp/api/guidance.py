"""Constraints of an answer: tool calls, JSON of a schema, or free text. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..text.conversation import AUTO, NONE, REQUIRED, Conversation, GenerationRequest
from ..text.tokenizer import Text
from ..text.tool_calls import JSON_CALLS, CallStyle, Separators, ToolFormat, tool_json
from ..text.tool_grammar import (
    JSON_STYLE,
    answer_grammar,
    call_grammar,
    checked_tools,
    guided_schema,
    marked_call_grammar,
)
from .schema import not_supported, shown

MOST_SCHEMAS = 16_000  # characters of all tools' schemas that a grammar may hold beside another


@dataclass(frozen=True, slots=True)
class Guidance:
    """Constraints of one answer, and the format of its calls.

    `grammar` is its kind and text, empty for free text. `calls` is the format of calls in the answer; None:
    there are none. `forced`: the answer is one call in plain JSON. `banned` tokens begin calls, which are not
    allowed. `dropped`: calls are not allowed, and any that come are left out of the answer.
    """

    grammar: tuple[str, str] = ("", "")
    calls: ToolFormat | None = None
    forced: bool = False
    banned: tuple[int, ...] = ()
    dropped: bool = False


def guidance(ask: GenerationRequest, text: Text, eos: tuple[int, ...]) -> Guidance:
    """Return the constraints of the answer to a request; one of `eos` ends it. Raises RequestError."""
    prompt, format_ = ask.prompt, ask.options.format
    if not isinstance(prompt, Conversation):
        return Guidance(_grammar(format_, Separators()))
    if not prompt.tools:
        if prompt.tool_choice not in (AUTO, NONE):
            raise RequestError(
                f"tool_choice {prompt.tool_choice!r} needs tools beside it", param="tool_choice"
            )
        return Guidance(_behind_prefix(_grammar(format_, Separators()), text))
    style = text.call_style(eos)
    schemas = checked_tools([tool_json(tool) for tool in prompt.tools])
    if prompt.tool_choice in (AUTO, NONE):
        answer = _grammar(format_, Separators() if style is None else style.separators)
        if prompt.tool_choice == NONE:
            return _without_calls(_behind_prefix(answer, text), text)
        return Guidance(_or_call(answer, schemas, style, text), text.tool_calls)
    required = None if prompt.tool_choice == REQUIRED else prompt.tool_choice
    grammar = call_grammar(schemas, style or JSON_STYLE, text.grammar_tokens, required=required)
    return Guidance(("lark", grammar), text.tool_calls if style else JSON_CALLS, forced=style is None)


def _without_calls(grammar: tuple[str, str], text: Text) -> Guidance:
    """Ban the token that begins a call.

    Without such a token, and where bare JSON is a call, the model stays free to write one. It is then read
    like any other and left out, so that no client sees markup. A grammar allows no call anyway.
    """
    banned, calls = text.call_tokens, text.tool_calls
    if grammar[0] or (banned and not calls.bare):
        return Guidance(grammar, banned=banned)
    return Guidance(grammar, calls, banned=banned, dropped=True)


def _behind_prefix(grammar: tuple[str, str], text: Text) -> tuple[str, str]:
    """Allow the text that the template writes before an answer."""
    if grammar[0] != "json_schema" or not text.answer_prefix:
        return grammar
    return "lark", answer_grammar(text.answer_prefix, grammar[1], text.grammar_tokens)


def _or_call(
    grammar: tuple[str, str], tools: Mapping[str, Mapping[str, Any]], style: CallStyle | None, text: Text
) -> tuple[str, str]:
    """Allow a call instead of the answer that `grammar` describes.

    The arguments of such a call are any object where the schemas of all tools make a grammar too large.
    """
    kind, schema = grammar
    if not kind:
        return grammar
    if kind != "json_schema":
        raise not_supported(
            f"response_format of type {kind} is not supported beside tools: "
            'leave one of them out, or send tool_choice "none"',
            "response_format",
        )
    otherwise = (text.answer_prefix, schema)
    if style is None or style.field is not None:
        return "lark", marked_call_grammar(text.tool_calls, text.grammar_tokens, otherwise)
    if len(json.dumps(tools)) > MOST_SCHEMAS:
        tools = {name: {"type": "object"} for name in tools}
    try:
        return "lark", call_grammar(tools, style, text.grammar_tokens, otherwise=otherwise)
    except ValueError:  # a call in bare JSON with other text around it
        return "lark", marked_call_grammar(text.tool_calls, text.grammar_tokens, otherwise)


def _grammar(format_: Mapping[str, Any] | None, separators: Separators) -> tuple[str, str]:
    """Return kind and text of the grammar of a format. Raises RequestError."""
    match format_:
        case None | {"type": "text"}:
            return "", ""
        case {"type": "regex", "pattern": str(pattern)} if pattern:
            return "regex", pattern
        case {"type": "regex"}:
            raise _incomplete("pattern", "a regular expression (a string)", format_)
        case {"type": "grammar" | "lark", "grammar": str(grammar)} if grammar:
            return "lark", grammar
        case {"type": "grammar" | "lark"}:
            raise _incomplete("grammar", "a Lark grammar (a string)", format_)
        case {"type": "json_object", "schema": dict(schema)}:  # as some clients spell json_schema
            pass
        case {"type": "json_object"}:
            schema = {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            pass
        case {"type": "json_schema"}:
            raise _incomplete("json_schema.schema", "a JSON schema (an object)", format_)
        case _:
            raise not_supported(
                f"response_format {shown(format_)} is not supported; its type may be text, json_object, "
                "json_schema, regex or lark",
                "response_format",
            )
    return "json_schema", guided_schema(schema, separators, "response_format")


def _incomplete(field: str, what: str, format_: Mapping[str, Any]) -> RequestError:
    return RequestError(
        f"response_format.{field} should be {what}, got {shown(format_)}", param=f"response_format.{field}"
    )
