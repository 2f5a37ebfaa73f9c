"""Calls that a grammar forces, against what chat templates of the model families write."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken

from mlxtp.api.sampling import Guidance, guidance
from mlxtp.engine.grammar import Grammars, Matcher, unpack
from mlxtp.text.answers import AnswerParser, ReadingPlan
from mlxtp.text.call_style import Separators, call_style
from mlxtp.text.calls import CallReader
from mlxtp.text.conversation import (
    AUTO,
    REQUIRED,
    Call,
    ChatMessage,
    Conversation,
    GenerationOptions,
    GenerationRequest,
    Tool,
)
from mlxtp.text.markups import JSON_CALLS
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text

from ..api.conftest import byte_level, save
from .reading import Read, collected, pieces

pytestmark = pytest.mark.slow

LISTED = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
HEAD = LISTED + (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{% set f = c.function %}{{ CALL }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ THINK }}{% endif %}"
)
JSON_CALL = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
GLM_CALL = (
    "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HARMONY = LISTED + (
    "{% for m in messages %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}<|start|>assistant"
    " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A chat template, its special tokens and those tokens that are added without being special."""

    template: str
    specials: tuple[str, ...]
    added: tuple[str, ...] = ()
    end: str = "<|im_end|>"


def chatml(call: str, think: str = "") -> str:
    return HEAD.replace("{{ CALL }}", call).replace("{{ THINK }}", think)


IM = ("<|im_start|>", "<|im_end|>")
FAMILIES = {
    "hermes": Family(chatml(JSON_CALL), IM, ("<tool_call>", "</tool_call>")),
    "qwen3": Family(
        chatml(JSON_CALL, "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"),
        IM,
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "llama": Family(
        chatml(
            '{# "parameters": dictionary of argument name #}'
            '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
        ),
        IM,
    ),
    "llama with another end": Family(
        chatml(
            '{# "parameters": dictionary of argument name #}'
            '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eom_id|>'
        ),
        (*IM, "<|eom_id|>"),
        end="<|eom_id|>",
    ),
    "mistral": Family(
        chatml("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"), (*IM, "[TOOL_CALLS]", "[ARGS]")
    ),
    "compact": Family(
        chatml(JSON_CALL.replace("| tojson", "| tojson(separators=(',', ':'))")), IM, ("<tool_call>",)
    ),
    "qwen3_coder": Family(chatml("{# <tool_call>\\n<function= #}" + XML_CALL), IM, ("<tool_call>",)),
    "glm": Family(chatml("{# <arg_key> #}" + GLM_CALL), IM, GLM),
    "harmony": Family(
        HARMONY, ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>"), end="<|call|>"
    ),
    "numbered": Family(
        chatml(JSON_CALL.replace("}\n</tool_call>", ', "id": "{{ c.id }}"}\n</tool_call>')),
        IM,
        ("<tool_call>",),
    ),
}
TOOLS = (
    Tool("ls", "Lists", {"type": "object", "properties": {}}),
    Tool(
        "write",
        "Writes",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "lines": {"type": "integer"},
                "mode": {"enum": ["new", "append"]},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["path", "lines", "mode"],
        },
    ),
)
ARGUMENTS = {"path": "a b/ü.txt", "lines": 12, "mode": "append", "tags": ["x", "y"]}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ANSWER = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


@cache
def loaded(name: str, folder: Path) -> tuple[Text, Path, int]:
    family = FAMILIES[name]
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(family.specials))
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in family.added])
    path = save(tokenizer, folder, family.template)
    end = tokenizer.token_to_id(IM[1] if IM[1] in family.specials else family.end)
    assert end is not None
    return Text(LocalRenderer.load(path)), path, end


def held(text: Text, end: int, choice: str, format_: Any = None, tools: tuple[Tool, ...] = TOOLS) -> Guidance:
    prompt = Conversation((ChatMessage("user", "go"),), tools, choice, thinking=False)
    return guidance(GenerationRequest(None, prompt, GenerationOptions(format=format_)), text, (end,))


def rest_of_prompt(text: Text, answer: ChatMessage) -> str:
    """Return what the next turn's prompt has in place of an answer."""
    asked = (ChatMessage("user", "go"),)
    prompt = text.rendered(Conversation(asked, TOOLS, thinking=False))
    written = text.rendered(Conversation((*asked, answer), TOOLS, thinking=False), False)
    if not written.startswith(prompt):  # an earlier turn has no empty thought
        written = written.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert written.startswith(prompt)
    return written[len(prompt) :]


def accepted(grammars: Grammars, held_to: Guidance, tokens: tuple[int, ...]) -> Matcher:
    matcher = grammars.compile(*held_to.grammar).matcher()
    for token in tokens:
        assert unpack(matcher.mask(), 400)[token], "the grammar refuses what the template writes"
        matcher.accept(token)
    return matcher


FOLLOWED = [name for name in FAMILIES if name != "numbered"]


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_forced_call_is_written_as_the_template_writes_it(name: str, tmp_path: Path) -> None:
    text, path, end = loaded(name, tmp_path)
    written = rest_of_prompt(
        text, ChatMessage("assistant", "", calls=(Call("call_1", "write", json.dumps(ARGUMENTS)),))
    )
    tokens = text.encoded(written.partition(FAMILIES[name].end)[0], special=False)
    grammars = Grammars(path, len(text._writer.facts.tokens.starts) - 1, frozenset({end}))
    try:
        required = held(text, end, REQUIRED)
        assert accepted(grammars, required, tokens).complete
        beside = held(text, end, AUTO, ANSWER)
        assert accepted(grammars, beside, tokens).complete
        prefix = text.answer_prefix
        key = ":" if name == "compact" else ": "
        answer = text.encoded(f'{prefix}{{"n"{key}5}}', special=False)
        assert accepted(grammars, beside, answer).complete
        with pytest.raises(AssertionError, match="refuses"):
            accepted(grammars, required, answer)
    finally:
        grammars.close()


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_forced_call_is_read_back(name: str, tmp_path: Path) -> None:
    text, _, end = loaded(name, tmp_path)
    written = rest_of_prompt(
        text, ChatMessage("assistant", "", calls=(Call("call_1", "write", json.dumps(ARGUMENTS)),))
    )
    required = held(text, end, REQUIRED)
    assert required.calls is text.tool_calls
    assert not required.forced
    reading, parts = AnswerParser(ReadingPlan(text.markup, calls=CallReader(required.calls, TOOLS))), []
    for piece, special in pieces(
        written.partition(FAMILIES[name].end)[0], FAMILIES[name].specials, Random(name)
    ):
        parts += reading.push(piece, special)
    parts += reading.finish(cut=False)
    assert collected(parts) == Read(calls=(("write", ARGUMENTS),))


def test_a_call_with_its_id_in_it_is_forced_as_plain_json(tmp_path: Path) -> None:
    text, _, end = loaded("numbered", tmp_path)
    assert text.call_style((end,)) is None
    assert held(text, end, REQUIRED).forced


def test_a_call_whose_text_cannot_be_followed_may_still_come_instead_of_json(tmp_path: Path) -> None:
    text, path, end = loaded("numbered", tmp_path)
    grammars = Grammars(path, len(text._writer.facts.tokens.starts) - 1, frozenset({end}))
    beside = held(text, end, AUTO, ANSWER)
    try:
        for answer in ('<tool_call>\n{"name": "ls", "arguments": {}, "id": "1"}\n</tool_call>', '{"n": 5}'):
            assert accepted(grammars, beside, text.encoded(answer, special=False)).complete
    finally:
        grammars.close()


def test_json_has_the_separators_of_the_templates_calls(tmp_path: Path) -> None:
    text, path, end = loaded("compact", tmp_path)
    style = text.call_style((end,))
    assert style is not None
    assert style.separators == Separators(",", ":")
    grammars = Grammars(path, len(text._writer.facts.tokens.starts) - 1, frozenset({end}))
    try:
        beside = held(text, end, AUTO, ANSWER)
        assert accepted(grammars, beside, text.encoded('{"n":5}', special=False)).complete
        with pytest.raises(AssertionError, match="refuses"):
            accepted(grammars, beside, text.encoded('{"n": 5}', special=False))
    finally:
        grammars.close()


def test_arguments_in_xml_have_a_style_of_their_own(tmp_path: Path) -> None:
    text, _, end = loaded("qwen3_coder", tmp_path)
    style = text.call_style((end,))
    assert style is not None
    assert style.field is not None
    before_key, between, after_value = style.field
    call = f"{style.before}f{style.between}{before_key}k{between}v{after_value}{style.after}"
    assert call == "<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n</tool_call>"


def test_a_template_that_repeats_names_and_values_is_read_in_linear_time() -> None:
    """No answer of a template may take the agent's time: going back would take 10^13 steps."""
    written = "".join(f"probe_{letter}" * 30_000 for letter in "abc")
    assert call_style(lambda *_: f"<tool_call>probe_name{written}", JSON_CALLS, []) is None


def test_an_answer_of_gpt_oss_begins_with_its_channel(tmp_path: Path) -> None:
    text, _, _ = loaded("harmony", tmp_path)
    assert text.answer_prefix == "<|channel|>final<|message|>"


def test_a_call_that_must_not_come_has_its_first_token_banned(tmp_path: Path) -> None:
    text, _, end = loaded("hermes", tmp_path)
    none = held(text, end, "none")
    assert none.banned == text.encoded("<tool_call>", special=False)
    assert (none.calls, none.dropped) == (None, False)
    assert none.grammar == ("", "")


@pytest.mark.parametrize("name", ["llama", "harmony"])
def test_calls_that_no_token_begins_are_left_out_of_an_answer_that_may_be_anything(
    name: str, tmp_path: Path
) -> None:
    text, _, end = loaded(name, tmp_path)
    none = held(text, end, "none")
    assert (none.calls, none.dropped) == (text.tool_calls, True)
    assert not held(text, end, "none", ANSWER).dropped  # JSON that looks like a call is the answer
