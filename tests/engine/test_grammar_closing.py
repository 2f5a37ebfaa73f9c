"""Answers under a grammar that are complete when their budget ends, even if the model would go on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from mlxtp.engine.grammar import Grammars, Matcher
from mlxtp.engine.logit_shaping import AnswerBudget, Guided
from mlxtp.text.call_style import CallStyle
from mlxtp.text.calls import CallReader, CallText
from mlxtp.text.conversation import Tool
from mlxtp.text.markups import CALLS
from mlxtp.text.tool_grammar import call_grammar, marked_call_grammar

from ..reference import TINY, model_of

pytestmark = [pytest.mark.slow, pytest.mark.fault]

VOCABULARY = 512
EOS = model_of(TINY)[1]
TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
Chooses = Callable[[Sequence[int], random.Random], int]

ITEM = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"}, "why": {"type": "string"}, "tag": {"enum": ["red", "green"]}, "opt": {}
    },
    "required": ["a", "why", "tag"],
    "additionalProperties": False,
}  # fmt: skip
NODE = {
    "type": "object",
    "properties": {"v": {"type": "string"}, "c": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["v", "c"],
    "additionalProperties": False,
}
FIELDS = ["name", "street", "city", "country", "email_address", "phone", "company", "comment"]
NAMES = {
    "properties": {field: {"type": "string"} for field in FIELDS},
    "required": FIELDS,
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "list": {"type": "array", "items": ITEM},
    "object": {
        "type": "object",
        "properties": {
            "answer": {"type": "string"},
            "steps": {"type": "array", "items": ITEM, "minItems": 1},
            "ok": {"anyOf": [{"type": "null"}, ITEM]},
            "share": {"type": "number"},
        },
        "required": ["answer", "steps", "ok", "share"],
        "additionalProperties": False,
    },
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "anything": {"type": "object"},
    "large items": {"type": "array", "items": {"type": "object", **NAMES}},
    "patterns": {
        "type": "object",
        "properties": {
            "email": {"type": "string", "format": "email"},
            "sku": {"type": "string", "pattern": "^[0-9]+-[A-Z]+$"},
            "share": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        },
        "required": ["email", "sku", "share"],
        "additionalProperties": False,
    },
}


def tool(required: int, *optional: str) -> Tool:
    """A tool with optional strings before, and a number behind, those that are required."""
    names = [f"f{n}" for n in range(required)]
    fields = {name: {"type": "string"} for name in (*optional, *names)} | {"n": {"type": "integer"}}
    return Tool("write", "", {"type": "object", "properties": fields, "required": [*names, "n"]})


WRITES = {"short": tool(2, "note"), "long": tool(12, "note", "mode", "owner", "group", "flags")}
CODER = next(row.format for row in CALLS if row.format.name == "qwen_xml")
VALUE_END = ("</parameter>", 4)  # a token that ends a value, as in GLM
CODER_STYLE = CallStyle(
    "<tool_call>\n<function=",
    ">\n",
    "</function>\n</tool_call>",
    field=("<parameter=", ">\n", "\n</parameter>\n"),
)
ANSWER = {"properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
OTHERWISE = "", json.dumps({"type": "object", **ANSWER})
MARKED = {
    "letters": marked_call_grammar(CODER, (), OTHERWISE),
    "a token": marked_call_grammar(CODER, ((CODER.end_mark, 3),), OTHERWISE),
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    held = Grammars(TINY, VOCABULARY, EOS)
    yield held
    held.close()


def rambles(allowed: Sequence[int], dice: random.Random) -> int:
    """Prefer letters, so that no string ever ends by itself."""
    letters = [token for token in allowed if (TOKENIZER.id_to_token(token) or "").isalpha()]
    return dice.choice(letters or allowed)


def strays(allowed: Sequence[int], dice: random.Random) -> int:
    """Begin tags, and write letters where an optional field could have its name."""
    tags = [token for token in allowed if (TOKENIZER.id_to_token(token) or "").startswith(("<", "p"))]
    return dice.choice(tags) if tags and dice.random() < 0.5 else anything(allowed, dice)


def anything(allowed: Sequence[int], dice: random.Random) -> int:
    return dice.choice(allowed)


def answer(guide: Guided, budget: int, chooses: Chooses, dice: random.Random) -> str:
    """The text of an answer of at most `budget` tokens; steps feed forced tokens as the scheduler does."""
    tokens: list[int] = []
    while len(tokens) < budget and not guide.finished:
        forced = guide.forced(min(budget - len(tokens) - 1, dice.choice([0, 15])))
        allowed = [int(token) for token in np.flatnonzero(guide.masks[-1]) if int(token) not in EOS]
        for token in (*forced, *([chooses(allowed, dice)] if allowed else [])):
            if not guide.finished:
                guide.accept(token)
                tokens.append(token)
    assert len(tokens) <= budget
    return str(TOKENIZER.decode(tokens, skip_special_tokens=False))


def guided(grammars: Grammars, schema: Any, budget: int) -> Guided:
    return Guided(grammars.compile("json_schema", json.dumps(schema)).matcher(), VOCABULARY, budget)


@pytest.mark.parametrize("budgets", [(90, 120), pytest.param((93, 250), marks=pytest.mark.chaos)])
@pytest.mark.parametrize("chooses", [pytest.param(rambles, marks=pytest.mark.chaos), anything])
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_complete_within_its_budget(
    grammars: Grammars, name: str, chooses: Chooses, budgets: tuple[int, ...]
) -> None:
    dice = random.Random(name)
    for budget in budgets:
        guide = guided(grammars, SCHEMAS[name], budget)
        json.loads(answer(guide, budget, chooses, dice))


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize(
    "chooses", [anything, *(pytest.param(each, marks=pytest.mark.chaos) for each in (rambles, strays))]
)
@pytest.mark.parametrize(
    ("name", "budgets"),
    [
        ("short", (150, 163)),
        ("long", (296,)),
        pytest.param("short", (200, 1000), marks=pytest.mark.chaos),
        pytest.param("long", (298, 303, 520), marks=pytest.mark.chaos),
    ],
)
def test_a_call_with_plain_text_in_it_is_complete_within_its_budget(
    grammars: Grammars, name: str, budgets: tuple[int, ...], chooses: Chooses, token: bool
) -> None:
    dice, schema = random.Random(5), WRITES[name].parameters or {}
    tokens = [VALUE_END] if token else []
    matcher = grammars.compile("lark", call_grammar({"write": schema}, CODER_STYLE, tokens)).matcher
    for budget in budgets:
        guide = Guided(matcher(), VOCABULARY, budget)
        text = answer(guide, budget, chooses, dice)
        if token:
            text = text.replace(TOKENIZER.id_to_token(VALUE_END[1]), VALUE_END[0])
        assert guide.finished
        assert guide.cut or chooses is not rambles
        reader = CallReader(CODER, [WRITES[name]])
        pieces = [
            *reader.start(CODER.start),
            *reader.push(text.removeprefix(CODER.start)),
            *reader.finish(False),
        ]
        assert isinstance(pieces[1], CallText)
        assert set(schema["required"]) <= set(json.loads(pieces[1].text))


@pytest.mark.parametrize("name", MARKED)
def test_any_call_beside_an_answer_is_complete_within_its_budget(grammars: Grammars, name: str) -> None:
    dice = random.Random(name)
    for budget in (60, 67, 400):
        guide = Guided(grammars.compile("lark", MARKED[name]).matcher(), VOCABULARY, budget)
        for token in TOKENIZER.encode(CODER.start, add_special_tokens=False).ids:
            guide.accept(token)
        answer(guide, budget, rambles, dice)
        assert guide.finished
        assert guide.cut


def test_text_whose_end_is_unknown_is_not_searched(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = grammars.compile("regex", "[^;]*;").matcher()
    room, steps = AnswerBudget(matcher, 1000), list[int]()
    mask = Matcher.mask
    monkeypatch.setattr(Matcher, "mask", lambda self: steps.append(1) or mask(self))
    room.fitting(matcher, 1000)
    assert len(steps) < 10


def letters(text: str) -> list[int]:
    """One token for each letter."""
    return [token for each in text for token in TOKENIZER.encode(each, add_special_tokens=False).ids]


@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_only_an_answer_without_room_for_another_letter_was_cut(grammars: Grammars, spare: int) -> None:
    begun, end = letters('{"a": "gray'), letters('"}')
    guide = guided(grammars, {"type": "object", **ANSWER}, len(begun) + len(end) + spare)
    for token in begun:
        assert guide.masks[-1][token]
        guide.accept(token)
        guide.forced(0)
    assert guide.masks[-1][end[0]]
    assert guide.cut == (guide.masks[-1].sum() == 1) == (spare == 0)


def answered(grammars: Grammars, tokens: Sequence[int], budget: int) -> Guided:
    """The guide of an answer that goes on behind `tokens`."""
    matcher = grammars.compile("json_schema", json.dumps({"type": "object", **ANSWER})).matcher()
    return Guided(matcher, VOCABULARY, budget, tokens)


@pytest.mark.parametrize("text", ['{"a": "gray', '{"a": "gray"', '{"a": "gray"}'])
def test_an_answer_that_goes_on_still_knows_that_it_was_cut(grammars: Grammars, text: str) -> None:
    tokens = letters(text)
    whole = len(tokens) + len('{"a": "gray"}') - len(text)
    assert answered(grammars, tokens, whole).cut
    assert not answered(grammars, tokens, whole + 1).cut


def test_a_choice_stays_the_models_where_every_choice_fits(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"tag": {"enum": ["red", "green"]}},
        "required": ["tag"],
        "additionalProperties": False,
    }
    dice = random.Random(4)
    found = set()
    for _ in range(20):
        guide = guided(grammars, schema, 18)  # little enough to be watched from the start
        found.add(json.loads(answer(guide, 18, anything, dice))["tag"])
        assert not guide.cut
    assert found == {"red", "green"}


def test_a_number_is_complete_when_its_room_ends(grammars: Grammars) -> None:
    dice = random.Random(3)
    for _ in range(60):
        json.loads(answer(guided(grammars, {"type": "number"}, 4), 4, anything, dice))


def test_what_cannot_be_complete_is_not_disturbed(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 2000}}, "required": ["a"]}
    guide = guided(grammars, schema, 100)
    assert len(answer(guide, 100, rambles, random.Random(2))) > 100
    assert not guide.cut


@pytest.mark.parametrize("id_", [4_294_967_296, VOCABULARY, "9" * 5000])
def test_a_comment_of_a_client_that_looks_like_a_token_is_only_a_comment(
    grammars: Grammars, id_: object
) -> None:
    grammar = grammars.compile("lark", f'// text <[{id_}]>\nstart: /(?s:[^#])*/ "#"')
    guide = Guided(grammar.matcher(), VOCABULARY, 8)
    assert len(answer(guide, 8, rambles, random.Random(1))) <= 64
