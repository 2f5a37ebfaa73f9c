"""KV caches that outlive their request: what is not computed again, and that nothing changes by it."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from mlxtp.wire.messages import Generate

from ..live_cluster import Cluster
from ..reference import answer, chat_ids, endless_prompt, prompt_ids, random_text, reference, spoken, text

pytestmark = [pytest.mark.group, pytest.mark.fault]

MAX_TOKENS = 60


def fresh(seed: int, length: int = 30) -> str:
    """A request that no other test makes."""
    return f"Repeat exactly: {random_text(Random(seed), length)}"


def ask(cluster: Cluster, prompt: tuple[int, ...], max_tokens: int = MAX_TOKENS) -> int:
    """Return the number of cached tokens of the prompt. Fails unless the answer is the right one."""
    tokens, end = cluster.complete(prompt, max_tokens)
    assert tokens == reference(prompt, max_tokens)
    return end.cached


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_the_same_prompt_again_computes_its_last_token_only(cluster: Cluster) -> None:
    prompt = prompt_ids(fresh(1))
    ask(cluster, prompt)
    for _ in range(2):
        before = cluster.idle()
        assert ask(cluster, prompt) == len(prompt) - 1
        assert len(set((cluster.idle() - before).forwards)) == 1


def test_caches_that_are_cleared_are_gone_on_every_rank_and_what_runs_goes_on(cluster: Cluster) -> None:
    prompt, other = prompt_ids(fresh(3)), endless_prompt()
    ask(cluster, prompt)
    running = cluster.start(other, 400)
    assert all(pong.stats.kept_bytes > 0 for pong in cluster._hear_from_all())
    room = cluster.supervisor.kv.tokens

    async def clear() -> None:
        await running.read(1)
        await cluster.supervisor.kv.clear()

    cluster.call(clear())
    assert len(running.tokens) < 400
    assert [pong.stats.kept_bytes for pong in cluster._hear_from_all()] == [0] * cluster.settings.ranks
    assert cluster.supervisor.kv.tokens == room
    assert ask(cluster, prompt) < 20
    assert running.finish()[0] == reference(other, 400)


def test_a_second_turn_computes_only_what_is_new(cluster: Cluster) -> None:
    """The model's own answer is not read again either."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": fresh(2, 12)}]
    held: tuple[int, ...] = ()
    for turn in range(3):
        prompt = chat_ids(text(), chat)
        expected = answer(prompt, MAX_TOKENS)
        cached = ask(cluster, prompt)
        if turn:
            assert len(held) > len(prompt) / 2
            # All that was fed: the prompt before and its answer but the token that came last.
            assert common(held, prompt) - 1 <= cached <= common(held, prompt) + 1
        held = (*prompt, *expected.tokens)
        said = text().detokenizer().push(expected.tokens)
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": fresh(20 + turn, 5)}]


def test_a_shared_beginning_is_computed_once(cluster: Cluster) -> None:
    """Also among requests that come at the same time."""
    system = {"role": "system", "content": random_text(Random(30), 60)}
    prompts = [chat_ids(text(), [system, {"role": "user", "content": fresh(31 + i, 8)}]) for i in range(8)]
    shared = min(common(prompts[0], prompt) for prompt in prompts[1:])
    assert shared > 40
    outcomes = cluster.ask_all([Generate(0, prompt, MAX_TOKENS) for prompt in prompts])
    cached = sorted(outcome.whole().cached for outcome in outcomes)
    assert [outcome.tokens for outcome in outcomes] == [reference(prompt, MAX_TOKENS) for prompt in prompts]
    assert cached[0] < shared
    assert cached[1] >= shared


def test_four_choices_over_http(cluster: Cluster) -> None:
    question = "Well then, who are you?"  # the model has learned no answer to it
    body = cluster.chat(question, n=4, temperature=2.0, max_tokens=12, seed=5)
    choices = [choice["message"]["content"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len(set(choices)) > 1
    again = cluster.chat(question, n=4, temperature=2.0, max_tokens=12, seed=5)
    assert [choice["message"]["content"] for choice in again["choices"]] == choices
    details = again["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


def test_a_cancelled_answer_leaves_what_it_computed(cluster: Cluster) -> None:
    prompt = (*prompt_ids(fresh(60)), *endless_prompt())
    request = cluster.start(prompt, 500)
    said = request.take(10)[:10]
    request.close()
    cluster.idle()
    longer = (*prompt, *said)
    assert ask(cluster, longer, 10) >= len(prompt)
    assert ask(cluster, prompt, 10) == len(prompt) - 1


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.chaos), True])
def test_a_stop_string_stops_every_rank_at_once(two_ranks: Cluster, stream: bool) -> None:
    question = f"Count from 1 to {60 - stream}."
    said = spoken(reference(prompt_ids(question), 400))
    stop = said[20:24]
    before = two_ranks.idle()
    if stream:
        chunks = two_ranks.stream(question, stop=stop, max_tokens=400)
        got = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = two_ranks.chat(question, stop=stop, max_tokens=400)["choices"][0]
        got, reason = choice["message"]["content"], choice["finish_reason"]
    work = two_ranks.idle() - before
    assert (got, reason) == (said[:20], "stop")
    assert work.forwards[0] == work.forwards[1]
    # Some tokens were on their way; most of the answer was never computed.
    assert work.emitted[0] < len(reference(prompt_ids(question), 400)) / 2
