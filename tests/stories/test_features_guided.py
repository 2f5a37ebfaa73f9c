"""Answers held to grammars, on two real ranks and on one: valid, beside others that are not touched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlxtp.api.backend import Sampling, Shaping
from mlxtp.errors import Code, MlxtpError
from mlxtp.wire.messages import Generate

from ..engine.small_models import write_model
from ..live_cluster import Cluster, Outcome
from ..reference import answer, expected, prompt_ids, spoken

pytestmark = [pytest.mark.group, pytest.mark.fault]

MAX_TOKENS = 250
QUESTION = prompt_ids("Repeat exactly: FALCON-MERCURY-7749")


@dataclass(frozen=True)
class Kind:
    """A grammar, and whether a text is what it asks for."""

    kind: str
    text: str
    fits: Callable[[str], bool]

    def wanted(self, prompt: tuple[int, ...], sampling: Sampling, max_tokens: int = MAX_TOKENS) -> Generate:
        shaping = Shaping(grammar_kind=self.kind, grammar=self.text)
        return Generate(0, prompt, max_tokens, sampling, shaping)


def schema(fits: Callable[[Any], bool], **of: Any) -> Kind:
    def checked(text: str) -> bool:
        return fits(json.loads(text))

    return Kind("json_schema", json.dumps(of), checked)


def pattern(text: str) -> Kind:
    return Kind("regex", text, lambda answer: re.fullmatch(text, answer) is not None)


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SHORT_TEXT = {"type": "string", "maxLength": 6}
KINDS = [
    schema(
        lambda value: list(value) == ["name", "age"] and 0 <= value["age"] <= 99 and len(value["name"]) <= 6,
        **closed(name=SHORT_TEXT, age={"type": "integer", "minimum": 0, "maximum": 99}),
    ),
    pattern(r"[A-Z]{3}-[0-9]{4}"),
    schema(lambda value: value in ("red", "green", 7), enum=["red", "green", 7]),
    Kind(
        "lark",
        'start: greeting " " WORD "!"\ngreeting: "hello there" | "good evening"\nWORD: /[a-z]{2,5}/',
        lambda text: re.fullmatch(r"(hello there|good evening) [a-z]{2,5}!", text) is not None,
    ),
    schema(
        lambda value: 2 <= len(value) <= 3 and all(isinstance(item, bool) for item in value),
        type="array",
        items={"type": "boolean"},
        minItems=2,
        maxItems=3,
    ),
    pattern(r"(yes|no|certainly not, my friend)\."),
    schema(
        lambda value: set(value) == {"outer"} and set(value["outer"]) == {"an_inner_name"},
        **closed(outer=closed(an_inner_name={"enum": ["x", "yy", None]})),
    ),
]


def assert_fits(kind: Kind, outcome: Outcome) -> None:
    end = outcome.whole()
    assert end.reason == "stop", (kind, spoken(outcome.tokens))
    assert kind.fits(spoken(outcome.tokens)), (kind, spoken(outcome.tokens))


@pytest.mark.chaos
def test_two_hundred_requests_guided_and_not_in_turn(two_ranks: Cluster, tmp_path: Path) -> None:
    """Random weights: nothing but the grammars makes these answers what they are."""
    random = Random(200)
    folder = write_model(tmp_path / "small")
    kinds: list[Kind | None] = [None if i % 2 else KINDS[i // 2 % len(KINDS)] for i in range(200)]
    wanted = []
    for i, kind in enumerate(kinds):
        prompt = tuple(random.randrange(6, 512) for _ in range(random.randint(1, 9)))
        sampling = Sampling(temperature=random.choice((0.0, 5.0, 20.0)), seed=i)
        wanted.append(kind.wanted(prompt, sampling) if kind else Generate(0, prompt, 12, sampling))
    epoch = two_ranks.epoch
    two_ranks.load(folder)
    try:
        before = two_ranks.idle()
        outcomes = two_ranks.ask_all(wanted, at_once=24)
        work = two_ranks.idle() - before
    finally:
        two_ranks.load("tiny")
    for kind, each, outcome in zip(kinds, wanted, outcomes, strict=True):
        if kind is None:
            assert outcome.tokens == expected(each, folder).tokens
        else:
            assert_fits(kind, outcome)
    assert len({outcome.tokens for outcome in outcomes}) > 100
    assert work.forwards[0] == work.forwards[1]
    assert two_ranks.epoch == epoch


def test_each_kind_alone(cluster: Cluster) -> None:
    for sampling in (Sampling(), Sampling(temperature=1.5, seed=4)):
        wanted = [kind.wanted(QUESTION, sampling) for kind in KINDS]
        for kind, outcome in zip(KINDS, cluster.ask_all(wanted, at_once=1), strict=True):
            assert_fits(kind, outcome)


def test_forced_tokens_change_nothing_and_save_forwards(two_ranks: Cluster) -> None:
    """Answers with scores are forced nothing: every token of theirs is chosen, so that it has one."""
    forwards, answers = [], []
    for logprobs in (-1, 0):
        wanted = [replace(kind.wanted(QUESTION, Sampling()), logprobs=logprobs) for kind in KINDS]
        before = two_ranks.idle()
        answers.append([outcome.tokens for outcome in two_ranks.ask_all(wanted, at_once=1)])
        forwards.append((two_ranks.idle() - before).forwards[0])
    assert answers[0] == answers[1]
    assert forwards[0] < forwards[1]


@pytest.mark.parametrize("max_tokens", [2, *(pytest.param(n, marks=pytest.mark.chaos) for n in (1, 5))])
def test_an_answer_that_is_cut_is_the_beginning_of_the_whole(cluster: Cluster, max_tokens: int) -> None:
    """Also within forced tokens."""
    for kind in KINDS:
        whole, short = cluster.ask_all(
            [kind.wanted(QUESTION, Sampling()), kind.wanted(QUESTION, Sampling(), max_tokens)], at_once=1
        )
        assert short.tokens == whole.tokens[:max_tokens]
        if len(whole.tokens) > max_tokens:
            assert (short.whole().reason, short.whole().generated) == ("length", max_tokens)


def test_guided_answers_can_be_scored_biased_and_long(cluster: Cluster) -> None:
    kind = pattern(r"[ab]{1,30}")
    base = kind.wanted(QUESTION, Sampling())
    scored = Generate(0, base.tokens, base.max_tokens, base.sampling, base.shaping, logprobs=3)
    least = Generate(
        0,
        base.tokens,
        base.max_tokens,
        base.sampling,
        Shaping(grammar_kind="regex", grammar=kind.text, min_tokens=12, presence_penalty=0.5),
    )
    plain, with_scores, longer = cluster.ask_all([base, scored, least])
    assert with_scores.tokens == plain.tokens
    assert len(with_scores.scores) == len(with_scores.tokens)
    assert kind.fits(spoken(longer.tokens))
    assert len(longer.tokens) >= 12


def test_over_http(cluster: Cluster) -> None:
    kind = KINDS[0]
    format_ = {"type": "json_schema", "json_schema": {"name": "person", "schema": json.loads(kind.text)}}
    text = cluster.content("Repeat exactly: ABC-1", response_format=format_, max_tokens=MAX_TOKENS)
    assert kind.fits(text)
    chunks = cluster.stream("Repeat exactly: ABC-1", response_format=format_, max_tokens=MAX_TOKENS)
    streamed = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(streamed) == text


SLOW = Kind("json_schema", json.dumps({"type": "integer", "multipleOf": 999983}), bool)
"""Nothing but a deadline stops its compilation."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_grammar_is_refused_before_any_rank_hears_of_it(two_ranks: Cluster, stream: bool) -> None:
    before = two_ranks.idle()
    response = two_ranks.post("Hi", response_format={"type": "regex", "pattern": "[a-z"}, stream=stream)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    work = two_ranks.idle() - before
    assert set(work.forwards) == set(work.collectives) == {0}


STUCK = {
    "after a forced letter": ('start: "a" B\nB: /b/ & /c/', "a"),
    "later": ('start: "ab" x\nx: "c" y\ny: y "b" | y "c"', "abc?"),
    "after a choice": ('start: /[a-c]/ x\nx: "d" x', "[abc]d*"),
    "at once": ('start: "a" x "q"\nx: "d" x', "(ad*)?"),
}
"""Grammars, and what of an answer each allows."""


@pytest.mark.parametrize(
    "sampling", [Sampling(), pytest.param(Sampling(temperature=2.0, seed=3), marks=pytest.mark.chaos)]
)
@pytest.mark.parametrize(
    "name",
    ["later", *(pytest.param(name, marks=pytest.mark.chaos) for name in sorted(set(STUCK) - {"later"}))],
)
def test_a_grammar_with_no_way_on_ends_its_request_alone(
    cluster: Cluster, name: str, sampling: Sampling
) -> None:
    epoch, (grammar, allowed) = cluster.epoch, STUCK[name]
    beside = cluster.start(QUESTION, 40)
    (outcome,) = cluster.ask_all([Kind("lark", grammar, bool).wanted(QUESTION, sampling, 30)])
    assert isinstance(outcome.error, MlxtpError)
    assert outcome.error.code is Code.GRAMMAR_STUCK
    assert "cannot continue within its grammar" in outcome.error.detail
    assert re.fullmatch(allowed, spoken(outcome.tokens)), "no token left that the grammar does not allow"
    assert beside.finish()[0] == answer(QUESTION, 40).tokens
    assert cluster.complete(QUESTION, 40)[0] == answer(QUESTION, 40).tokens
    assert cluster.epoch == epoch


def test_going_away_while_a_grammar_compiles(two_ranks: Cluster) -> None:
    before = two_ranks.idle()
    request = two_ranks.ask(SLOW.wanted(QUESTION, Sampling()))
    beside = two_ranks.start(QUESTION, 40)
    request.close()
    assert beside.finish()[0] == answer(QUESTION, 40).tokens
    assert two_ranks.health()["open_requests"] == 0
    alone = (two_ranks.idle() - before).forwards[0]
    assert 0 < alone <= 41
    # The next grammar waits for nothing but the deadline of the one before.
    (outcome,) = two_ranks.ask_all([KINDS[1].wanted(QUESTION, Sampling())])
    assert_fits(KINDS[1], outcome)
