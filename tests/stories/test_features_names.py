"""Fields that clients of other servers send, on real ranks, by OpenAI's own library."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import openai
import pytest

from mlxtp.api.sampling import choices
from mlxtp.wire.messages import Generate, Sampling, Shaping

from ..live_cluster import WAIT_S, Cluster
from ..reference import prompt_ids, random_text, spoken, text

pytestmark = pytest.mark.group

ECHO = "Repeat exactly: FALCON-MERCURY-7749"
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def chat(cluster: Cluster, **fields: Any) -> Any:
    """The choice of a chat, with fields that the library does not know."""
    body: Any = {"model": "default", "messages": [{"role": "user", "content": ECHO}], "temperature": 0}
    answer = client(cluster).chat.completions.create(**body, extra_body={"max_tokens": 40} | fields)
    return answer.choices[0]


def is_number(said: str) -> bool:
    return list(json.loads(said)) == ["a"]


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"structured_outputs": {"choice": ["a::= b", 'c"d']}}, lambda said: said in ("a::= b", 'c"d')),
        ({"guided_json": json.dumps(NUMBER)}, is_number),
        ({"regex": "[0-9]{3}-x"}, lambda said: re.fullmatch("[0-9]{3}-x", said)),
        ({"ebnf": 'root ::= a+\na ::= [xyz]{2} "."'}, lambda said: re.fullmatch(r"([xyz]{2}\.)+", said)),
    ],
)
def test_a_constraint_holds_under_every_name(
    two_ranks: Cluster, api: str, fields: dict[str, Any], fits: Any
) -> None:
    if api == "chat":
        said = chat(two_ranks, **fields).message.content
    else:
        body = {"model": "default", "prompt": ECHO, "max_tokens": 40, "extra_body": fields}
        said = client(two_ranks).completions.create(**body).choices[0].text
    assert fits(said)


def test_a_stop_token_ends_an_answer_on_every_rank(two_ranks: Cluster) -> None:
    whole = chat(two_ranks, return_token_ids=True)
    ids = whole.token_ids
    assert (text().decoded(ids[:-1]), whole.stop_reason, whole.matched_stop) == (ECHO[16:], None, ids[-1])
    at = next(i for i in range(3, len(ids)) if ids[i] not in ids[:i])
    before = two_ranks.idle()
    cut = chat(two_ranks, stop_token_ids=[ids[at]], return_token_ids=True, ignore_eos=True)
    assert (cut.token_ids, cut.stop_reason, cut.finish_reason) == (ids[: at + 1], ids[at], "stop")
    assert cut.message.content == text().decoded(ids[:at])
    forwards = (two_ranks.idle() - before).forwards
    assert len(set(forwards)) == 1
    assert forwards[0] <= at + 3
    # not before `min_tokens`, as end tokens
    later = chat(two_ranks, stop_token_ids=[ids[at]], min_tokens=at + 2, return_token_ids=True)
    assert len(later.token_ids) >= at + 2
    assert ids[at] not in later.token_ids[: at + 1]


def test_only_allowed_tokens_come(two_ranks: Cluster) -> None:
    allowed = [text().encoded(each, special=False)[0] for each in ("A", "B")]
    found = chat(two_ranks, allowed_token_ids=allowed, return_token_ids=True, max_tokens=5, temperature=2)
    assert len(found.token_ids) == 5
    assert set(found.token_ids) <= set(allowed)


@pytest.mark.parametrize("fields", [{"stop_tokens": (512,)}, {"shaping": Shaping(allowed_tokens=(512,))}])
def test_rank_0_refuses_tokens_that_the_model_lacks(two_ranks: Cluster, fields: dict[str, Any]) -> None:
    [outcome] = two_ranks.ask_all([Generate(0, (0, 43), 5, **fields)])
    assert outcome.error is not None
    assert outcome.error.detail == "token 512 is not in the model's vocabulary of 512"


def test_the_choices_of_one_prompt_compute_it_once(two_ranks: Cluster) -> None:
    prompt = prompt_ids(f"Repeat exactly: {random_text(Random(77), 90)}")
    wanted = choices(Generate(0, prompt, 8, Sampling(2.0, seed=5)), 4)
    outcomes = two_ranks.ask_all(wanted)
    assert sorted(each.whole().cached for each in outcomes)[1:] == [len(prompt) - 1] * 3
    assert len({spoken(each.tokens) for each in outcomes}) > 1


def test_the_best_of_several_are_returned(two_ranks: Cluster) -> None:
    body: Any = {"model": "default", "prompt": "Well then", "temperature": 2.0, "seed": 5, "max_tokens": 6}
    every = client(two_ranks).completions.create(**body, n=6, logprobs=0)
    best = client(two_ranks).completions.create(**body, n=2, best_of=6)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / max(len(choice.logprobs.token_logprobs), 1)

    expected = sorted(every.choices, key=mean, reverse=True)[:2]
    assert [choice.text for choice in best.choices] == [choice.text for choice in expected]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == every.usage.completion_tokens
