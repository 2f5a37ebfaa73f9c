"""Markers of a model's thoughts and calls, read off its chat template and vocabulary. Pure.

The families' markers are those of mlx-lm's `tokenizer_utils` (0.32.2); Llama and gpt-oss are added.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import NamedTuple

from .tool_calls import ToolFormat

_THINK = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
)
_XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")

#: Formats in the order of the search; one needs all of the texts of any of its groups.
_CALLS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("minimax_m2", (("<minimax:tool_call>",),)),
    ("gemma4", (("<|tool_call>", "<tool_call|>"),)),
    ("function_gemma", (("<start_function_call>",),)),
    ("longcat", (("<longcat_tool_call>",),)),
    ("glm47", (("<arg_key>",),)),
    ("pythonic", (("<|tool_list_start|>",), ("<|tool_call_start|>",))),
    ("qwen3_coder", (("<tool_call>\\n<function=",), ("<tool_call>\n<function=",))),
    ("kimi_k2", (("<|tool_calls_section_begin|>",),)),
    ("minicpm5", (('<function name="', '<param name="'),)),
    ("mistral", (("[TOOL_CALLS]",),)),
    ("muse_spark", (("<atem:function_calls>",),)),
    ("json_tools", (("<tool_call>",),)),
    ("llama", (('"parameters": dictionary of argument name',), ("<|python_tag|>",))),
)


@dataclass(frozen=True, slots=True)
class Markup:
    """Markers of a model. `think`: those before and after a thought. `call`: the same of a call, or empty.

    `headers`: special tokens that begin the header of a message. `header_end` ends it. Clients never see
    headers.
    """

    think: tuple[str, str] | None = None
    call: tuple[str, str] = ("", "")
    bare_calls: bool = False
    headers: tuple[str, ...] = ()
    header_end: str = ""

    def with_calls(self, format_: ToolFormat) -> Markup:
        """Return the same for an answer in which calls are looked for."""
        return replace(self, call=(format_.start, format_.end), bare_calls=format_.bare)


def thinking_markup(vocabulary: Container[str]) -> Markup:
    """Return the markers of thoughts; none for a model that does not think aloud."""
    for start, end in _THINK:
        if start in vocabulary and end in vocabulary:
            return Markup((start, end))
    if "<|channel>" in vocabulary and "<channel|>" in vocabulary:
        return Markup(("<|channel>thought", "<channel|>"))
    if all(token in vocabulary for token in _XTML):
        return Markup(("<|open|>think<|sep|>", "<|close|>think<|sep|>"))
    if all(token in vocabulary for token in _HARMONY):
        think = ("<|channel|>analysis<|message|>", "<|end|>")
        return Markup(think, headers=("<|start|>", "<|channel|>"), header_end="<|message|>")
    return Markup()


class Address(NamedTuple):
    """Address of a gpt-oss message: the tool that it is for, or empty, and whether it is a thought."""

    recipient: str
    thought: bool


def address_of(header: str) -> Address:
    """Return the address in a header, whose special tokens are left out.

    The recipient stands in the role (`assistant to=functions.f commentary json`) or in the channel
    (`assistant commentary to=functions.f json`), which may be `analysis` as well.
    """
    recipient = _RECIPIENT.search(header)
    return Address(recipient[1] if recipient else "", "analysis" in header.split())


def opens_header(text: str) -> bool | None:
    """Return True if the first words continue the header that the prompt began; None if not clear yet."""
    return None if len(text) < len("to=") and "to=".startswith(text) else text.startswith("to=")


def call_format(template: str, vocabulary: Container[str]) -> str | None:
    """Return the name of the model's call format, or None if neither template nor vocabulary shows one."""
    for name, groups in _CALLS:
        if any(all(text in template for text in group) for group in groups):
            return name
    if all(token in vocabulary for token in _XTML):
        return "kimi_k3"
    if all(token in vocabulary for token in _HARMONY):
        return "harmony"
    if "<|tool_call_start|>" in vocabulary and "<|tool_call_end|>" in vocabulary:
        return "pythonic"
    return None
