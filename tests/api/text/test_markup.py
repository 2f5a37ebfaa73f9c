from __future__ import annotations

import pytest

from mlxtp.text.reasoning import Markup, call_format, thinking_markup

TEMPLATES = {
    "json_tools": "<tool_call>{{ tool_call.name }}",
    "qwen3_coder": "<tool_call>\n<function=x>",
    "glm47": "<tool_call>x<arg_key>",
    "mistral": "[TOOL_CALLS]",
    "gemma4": "<|tool_call>x<tool_call|>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "minimax_m2": "<minimax:tool_call>",
    "llama": '{"name": function name, "parameters": dictionary of argument name and its value}',
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_its_format(name: str) -> None:
    assert call_format(f"x {TEMPLATES[name]} y", ()) == name


def test_a_vocabulary_tells_where_the_template_does_not() -> None:
    assert call_format("x", {"<|tool_call_start|>", "<|tool_call_end|>"}) == "pythonic"
    assert call_format("x", {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"}) == "kimi_k3"
    assert call_format("x", {"<|start|>", "<|channel|>", "<|message|>", "<|call|>"}) == "harmony"
    assert call_format("x", {"a"}) is None


def test_thoughts_are_known_by_the_vocabulary() -> None:
    assert thinking_markup({"<think>", "</think>"}).think == ("<think>", "</think>")
    assert thinking_markup({"<|channel>", "<channel|>"}).think == ("<|channel>thought", "<channel|>")
    assert thinking_markup({"<think>"}) == Markup()
