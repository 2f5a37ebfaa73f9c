"""Scores of prompts from live ranks against mlx-lm's logits: in parts, together, beside other requests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import mlx.core as mx
import pytest

from ..live_cluster import WAIT_S, Cluster
from ..reference import TINY, model_of

pytestmark = [pytest.mark.group, pytest.mark.fault]

TOP = 3


def logprobs(tokens: Sequence[int]) -> Any:
    """Log-probabilities after each token, [tokens, V], by mlx-lm's model in this process."""
    model, _ = model_of(TINY)
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def complete(cluster: Cluster, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, **fields}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_prompt_has_the_scores_of_its_tokens_and_one_more(cluster: Cluster) -> None:
    dice = Random(3)
    prompts = [[dice.randrange(6, 500) for _ in range(length)] for length in (1, 2, 40, 300, 700, 41)]
    complete(cluster, prompts[3], max_tokens=2)  # it is in a cache now, which scores cannot begin with
    with ThreadPoolExecutor() as pool:
        chat = pool.submit(cluster.content, "Count from 1 to 60.")
        alone = pool.submit(complete, cluster, prompts[4], prompt_logprobs=TOP, max_tokens=1)
        found = complete(cluster, prompts, echo=True, logprobs=TOP, max_tokens=1)
        assert chat.result()
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for tokens, choice in zip(prompts, found["choices"], strict=True):
        scores, right = choice["logprobs"], logprobs(tokens)
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        own = [right[at, token].item() for at, token in enumerate(tokens[1:])]
        assert scores["token_logprobs"][1:] == pytest.approx([*own, right[-1].max().item()], abs=0.02)
        for at, best in enumerate(scores["top_logprobs"][1:]):
            assert max(best.values()) == pytest.approx(right[at].max().item(), abs=0.02)
    rows = alone.result()["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    right = logprobs(prompts[4])
    for at, (token, row) in enumerate(zip(prompts[4][1:], rows[1:], strict=True)):
        assert row[str(token)]["logprob"] == pytest.approx(right[at, token].item(), abs=0.02)
        ranks = {each["rank"]: each["logprob"] for each in row.values()}
        assert ranks[1] == pytest.approx(right[at].max().item(), abs=0.02)


def test_no_token_is_generated_where_none_is_wanted(cluster: Cluster) -> None:
    found = complete(cluster, "The sky is", echo=True, logprobs=0, max_tokens=0)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("The sky is", "length")
    assert len(choice["logprobs"]["tokens"]) == found["usage"]["prompt_tokens"]
    assert found["usage"]["completion_tokens"] == 0


def test_ranks_that_go_through_a_graph_in_other_orders_exchange_the_same(tmp_path: Path) -> None:
    """A sum that was left for a later graph was exchanged for a number of that graph's own, with one rank's
    scores among what it asked for.
    """
    dice = Random(2)
    kinds: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"prompt_logprobs": 2},
        {"logprobs": 2, "temperature": 0.8, "seed": 3},
        {"presence_penalty": 1.0},
    ]
    wanted = [
        kinds[at % 4]
        | {"prompt": [dice.randrange(6, 500) for _ in range(dice.choice((2, 2, 3, 5, 9, 20, 25)))]}
        | {"max_tokens": dice.choice((3, 8))}
        for at in range(120)
    ]
    with Cluster(tmp_path, orders=[20, 1]) as cluster, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: complete(cluster, **each), wanted))
        assert cluster.epoch == 1
