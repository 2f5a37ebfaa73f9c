"""How a model marks what it thinks and what it calls, read off its chat template and vocabulary. Pure.

Which sign means which family is what mlx-lm's `tokenizer_utils` knows (0.32.2); Llama and gpt-oss are added.
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
"""Formats in the order in which they are looked for; one needs all of the texts of any of its groups."""


@dataclass(frozen=True, slots=True)
class Markup:
    """`think`: what stands before and after a thought. `call`: the same of a call, or empty.

    `headers`: special tokens that begin the header of a message, which `header_end` ends and nobody is shown.
    """

    think: tuple[str, str] | None = None
    call: tuple[str, str] = ("", "")
    bare_calls: bool = False
    headers: tuple[str, ...] = ()
    header_end: str = ""

    def with_calls(self, format_: ToolFormat) -> Markup:
        """The same for an answer in which calls are looked for."""
        return replace(self, call=(format_.start, format_.end), bare_calls=format_.bare)


def thinking_markup(vocabulary: Container[str]) -> Markup:
    """How thoughts are marked; nothing for a model that does not think aloud."""
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
    """Of a message of gpt-oss: the tool that it is for, or empty, and whether it is a thought."""

    recipient: str
    thought: bool


def address_of(header: str) -> Address:
    """What a header says, its special tokens left out.

    The recipient stands in the role (`assistant to=functions.f commentary json`) or in the channel
    (`assistant commentary to=functions.f json`), which may be `analysis` as well.
    """
    recipient = _RECIPIENT.search(header)
    return Address(recipient[1] if recipient else "", "analysis" in header.split())


def opens_header(text: str) -> bool | None:
    """Whether first words go on with the header that the prompt began; None: not clear yet."""
    return None if len(text) < len("to=") and "to=".startswith(text) else text.startswith("to=")


def call_format(template: str, vocabulary: Container[str]) -> str | None:
    """The name of the format of its calls, or None when neither template nor vocabulary tell of one."""
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
