"""Answers under a grammar that are complete when their budget ends, whatever the model would rather say."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from mlxtp.engine.desk import Guided
from mlxtp.engine.grammar import Grammars

from ..reference import TINY, model_of

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


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    held = Grammars(TINY, VOCABULARY, EOS)
    yield held
    held.close()


def rambles(allowed: Sequence[int], dice: random.Random) -> int:
    """Prefer letters, so that no string ever ends by itself."""
    letters = [token for token in allowed if (TOKENIZER.id_to_token(token) or "").isalpha()]
    return dice.choice(letters or allowed)


def anything(allowed: Sequence[int], dice: random.Random) -> int:
    return dice.choice(allowed)


def answer(guide: Guided, budget: int, chooses: Chooses, dice: random.Random) -> str:
    """The text of an answer of at most `budget` tokens; steps feed forced tokens as the scheduler does."""
    tokens: list[int] = []
    while len(tokens) < budget and not guide.finished:
        forced = guide.forced(min(budget - len(tokens) - 1, dice.choice([0, 15])))
        allowed = [int(token) for token in np.flatnonzero(guide.mask) if int(token) not in EOS]
        for token in (*forced, *([chooses(allowed, dice)] if allowed else [])):
            if not guide.finished:
                guide.accept(token)
                tokens.append(token)
    assert len(tokens) <= budget
    return str(TOKENIZER.decode(tokens, skip_special_tokens=False))


def guided(grammars: Grammars, schema: Any, budget: int) -> Guided:
    return Guided(grammars.compile("json_schema", json.dumps(schema)).matcher(), VOCABULARY, budget)


@pytest.mark.parametrize("chooses", [rambles, anything])
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_complete_within_its_budget(grammars: Grammars, name: str, chooses: Chooses) -> None:
    dice = random.Random(name)
    for budget in (90, 93, 120, 250):
        guide = guided(grammars, SCHEMAS[name], budget)
        json.loads(answer(guide, budget, chooses, dice))


def test_an_answer_that_was_cut_says_so(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    guide = guided(grammars, schema, 60)
    assert len(json.loads(answer(guide, 60, rambles, random.Random(1)))["a"]) > 20
    assert guide.cut


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
