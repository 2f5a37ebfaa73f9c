"""Calls that a grammar forces, against what chat templates of the model families write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken

from mlxtp.api.sampling import Guidance, guidance
from mlxtp.engine.grammar import Grammars, unpack
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


@dataclass(frozen=True)
class Model:
    """A model of a family, and the grammars that hold its answers."""

    text: Text
    end: int
    grammars: Grammars

    def held(self, choice: str, format_: Any = None) -> Guidance:
        prompt = Conversation((ChatMessage("user", "go"),), TOOLS, choice, thinking=False)
        request = GenerationRequest(None, prompt, GenerationOptions(format=format_))
        return guidance(request, self.text, (self.end,))

    def takes(self, held_to: Guidance, answer: str) -> bool:
        """Return whether the grammar allows the answer to its end."""
        matcher = self.grammars.compile(*held_to.grammar).matcher()
        for token in self.text.encoded(answer, special=False):
            if not unpack(matcher.mask(), 400)[token]:
                return False
            matcher.accept(token)
        return matcher.complete

    def written(self, name: str) -> str:
        """Return a call with ARGUMENTS as the template writes it in the next turn's prompt."""
        asked = (ChatMessage("user", "go"),)
        answer = ChatMessage("assistant", "", calls=(Call("call_1", "write", json.dumps(ARGUMENTS)),))
        prompt = self.text.rendered(Conversation(asked, TOOLS, thinking=False))
        written = self.text.rendered(Conversation((*asked, answer), TOOLS, thinking=False), False)
        if not written.startswith(prompt):  # an earlier turn has no empty thought
            written = written.replace(
                "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
            )
        assert written.startswith(prompt)
        return written[len(prompt) :].partition(FAMILIES[name].end)[0]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Callable[[str], Model]]:
    """The model of a family, by its name."""
    with ExitStack() as stack:

        def loaded(name: str) -> Model:
            family = FAMILIES[name]
            tokenizer = byte_level()
            tokenizer.add_special_tokens(list(family.specials))
            tokenizer.add_tokens([AddedToken(each, normalized=False) for each in family.added])
            path = save(tokenizer, tmp_path, family.template)
            end = tokenizer.token_to_id(IM[1] if IM[1] in family.specials else family.end)
            text = Text(LocalRenderer.load(path))
            grammars = Grammars(path, len(text._writer.facts.tokens.starts) - 1, frozenset({end}))
            stack.callback(grammars.close)
            return Model(text, end, grammars)

        yield loaded


FOLLOWED = [name for name in FAMILIES if name != "numbered"]
Load = Callable[[str], Model]


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_forced_call_is_written_as_the_template_writes_it_and_read_back(model: Load, name: str) -> None:
    found = model(name)
    written, required, beside = found.written(name), found.held(REQUIRED), found.held(AUTO, ANSWER)
    assert found.takes(required, written)
    assert found.takes(beside, written)
    answer = f'{found.text.answer_prefix}{{"n":{"" if name == "compact" else " "}5}}'
    assert found.takes(beside, answer)
    assert not found.takes(required, answer)
    assert required.calls is found.text.tool_calls
    assert not required.forced
    plan = ReadingPlan(found.text.markup, calls=CallReader(required.calls, TOOLS))
    reading, parts = AnswerParser(plan), []
    for piece, special in pieces(written, FAMILIES[name].specials, Random(name)):
        parts += reading.push(piece, special)
    assert collected([*parts, *reading.finish(cut=False)]) == Read(calls=(("write", ARGUMENTS),))


def test_a_call_with_its_id_in_it_is_forced_as_plain_json_and_may_still_come(model: Load) -> None:
    found = model("numbered")
    assert found.text.call_style((found.end,)) is None
    assert found.held(REQUIRED).forced
    for answer in ('<tool_call>\n{"name": "ls", "arguments": {}, "id": "1"}\n</tool_call>', '{"n": 5}'):
        assert found.takes(found.held(AUTO, ANSWER), answer)


def test_json_has_the_separators_of_the_templates_calls(model: Load) -> None:
    found = model("compact")
    assert found.text.call_style((found.end,)).separators == Separators(",", ":")
    assert not found.takes(found.held(AUTO, ANSWER), '{"n": 5}')


def test_arguments_in_xml_have_a_style_of_their_own(model: Load) -> None:
    found = model("qwen3_coder")
    style = found.text.call_style((found.end,))
    before_key, between, after_value = style.field
    call = f"{style.before}f{style.between}{before_key}k{between}v{after_value}{style.after}"
    assert call == "<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n</tool_call>"


def test_a_template_that_repeats_names_and_values_is_read_in_linear_time() -> None:
    """No answer of a template may take the agent's time: going back would take 10^13 steps."""
    written = "".join(f"probe_{letter}" * 30_000 for letter in "abc")
    assert call_style(lambda *_: f"<tool_call>probe_name{written}", JSON_CALLS, []) is None


def test_an_answer_of_gpt_oss_begins_with_its_channel(model: Load) -> None:
    assert model("harmony").text.answer_prefix == "<|channel|>final<|message|>"


def test_a_call_that_must_not_come_has_its_first_token_banned(model: Load) -> None:
    found = model("hermes")
    none = found.held("none")
    assert none.banned == found.text.encoded("<tool_call>", special=False)
    assert (none.calls, none.dropped) == (None, False)
    assert none.grammar == ("", "")


@pytest.mark.parametrize("name", ["llama", "harmony"])
def test_calls_that_no_token_begins_are_left_out_of_an_answer_that_may_be_anything(
    model: Load, name: str
) -> None:
    found = model(name)
    none = found.held("none")
    assert (none.calls, none.dropped) == (found.text.tool_calls, True)
    assert not found.held("none", ANSWER).dropped  # JSON that looks like a call is the answer
