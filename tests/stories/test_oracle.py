"""The whole of it against known answers: real ranks, real HTTP, and the same weights in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from mlxtp.api.backend import StreamEnd
from mlxtp.errors import Code, MlxtpError

from ..live_cluster import Cluster, Snapshot
from ..reference import answer, endless_prompt, prompt_ids, random_text, reference, spoken

pytestmark = [pytest.mark.group, pytest.mark.fault]

SECRET = "FALCON-MERCURY-7749"
QUESTION = f"Repeat exactly: {SECRET}"
LONG = f"Repeat exactly: {random_text(Random(7), 90)}"
LAYERS = 4
CHUNK = 16


@pytest.fixture(scope="module")
def step_by_step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks that feed one token a step and keep nothing, so that forwards can be counted."""
    home = tmp_path_factory.mktemp("step-by-step")
    with Cluster(home, speculation="off", prefix_cache=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks that take a prompt 16 tokens at a time."""
    home = tmp_path_factory.mktemp("chunked")
    with Cluster(home, prefill_chunk=CHUNK, speculation="off", prefix_cache=False) as cluster:
        yield cluster


@pytest.fixture(params=["one_rank", "two_ranks"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    found: Cluster = request.getfixturevalue(request.param)
    return found


def how(end: StreamEnd) -> tuple[str, int]:
    """Return why it ended and after how many tokens."""
    return end.reason, end.generated


def said(cluster: Cluster, prompt: tuple[int, ...], max_tokens: int) -> tuple[tuple[int, ...], str, int]:
    """Tokens, reason and count of one request."""
    tokens, end = cluster.complete(prompt, max_tokens)
    return tokens, *how(end)


def counted(cluster: Cluster, prompt: tuple[int, ...], max_tokens: int) -> tuple[Snapshot, int]:
    """Return what one request, alone, made the ranks do, and its number of tokens, the end token among them.

    Fails unless the tokens are the reference's.
    """
    before = cluster.idle()
    tokens, end = cluster.complete(prompt, max_tokens)
    expected = answer(prompt, max_tokens)
    assert tokens == expected.tokens
    assert how(end) == (expected.reason, expected.generated)
    return cluster.idle() - before, end.generated


def test_the_answer_is_the_secret_and_nothing_else(cluster: Cluster) -> None:
    response = cluster.post(QUESTION)
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] == SECRET
    assert choice["finish_reason"] == "stop"
    assert response.text.count(SECRET) == 1


def test_the_streamed_answer_is_the_same(cluster: Cluster) -> None:
    choices = [chunk["choices"][0] for chunk in cluster.stream(QUESTION)]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == SECRET
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert len([c for c in choices if c["delta"].get("content")]) == len(reference(prompt_ids(QUESTION), 64))


def test_rank_0_emits_every_token_once_and_the_others_none(two_ranks: Cluster) -> None:
    before = two_ranks.idle()
    chunks = two_ranks.stream(QUESTION)
    work = two_ranks.idle() - before
    visible = len(reference(prompt_ids(QUESTION), 64))
    assert work.emitted == (visible, 0)
    assert len([c for c in chunks if c["choices"][0]["delta"].get("content")]) == visible
    rows = two_ranks.health()["ranks"]
    assert [row["rank"] for row in rows] == [0, 1]
    assert rows[0]["emitted"] == before.emitted[0] + visible
    assert rows[1]["emitted"] == 0


@pytest.mark.parametrize("n", [1, 5, *(pytest.param(n, marks=pytest.mark.chaos) for n in (2, 64))])
def test_n_tokens_take_one_prefill_and_n_minus_1_steps(step_by_step: Cluster, n: int) -> None:
    work, generated = counted(step_by_step, prompt_ids(LONG), n)
    assert generated == n
    assert work.forwards == (n, n)
    assert work.emitted == (n, 0)
    # Winners come with the embeddings that the next step feeds: only the prompt's must be looked up.
    assert work.collectives == (1 + n * (2 * LAYERS + 1),) * 2


def test_running_ahead_costs_at_most_one_forward_at_an_end_token(step_by_step: Cluster) -> None:
    work, generated = counted(step_by_step, prompt_ids(QUESTION), 64)
    assert generated < 64
    assert generated <= work.forwards[0] <= generated + 1
    assert work.forwards[0] == work.forwards[1]


def test_a_prompt_in_chunks_takes_one_forward_a_chunk(chunked: Cluster) -> None:
    prompt = prompt_ids(LONG)
    chunks = -(-len(prompt) // CHUNK)
    assert chunks > 3
    work, generated = counted(chunked, prompt, 10)
    assert work.forwards == (chunks + generated - 1,) * 2
    # Each chunk looks its tokens up; only the last one and the steps choose a token.
    assert work.collectives == (work.forwards[0] * 2 * LAYERS + chunks + generated,) * 2


def answered(text: str) -> tuple[int, ...]:
    """A prompt that holds the whole answer already: the next token is the end."""
    prompt = prompt_ids(f"Repeat exactly: {text}")
    whole = answer(prompt, 64)
    assert whole.reason == "stop"
    return prompt + whole.tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 64])
def test_the_end_token_comes_first(cluster: Cluster, max_tokens: int) -> None:
    prompt = answered("ABC-123")
    assert answer(prompt, max_tokens).generated == 1
    assert said(cluster, prompt, max_tokens) == ((), "stop", 1)


def test_the_end_token_comes_exactly_at_the_limit(cluster: Cluster) -> None:
    prompt = prompt_ids("Repeat exactly: ABC-123")
    whole = answer(prompt, 64)
    assert whole.reason == "stop"
    assert said(cluster, prompt, whole.generated) == (whole.tokens, "stop", whole.generated)
    assert said(cluster, prompt, whole.generated + 1) == (whole.tokens, "stop", whole.generated)
    short = whole.generated - 1
    assert said(cluster, prompt, short) == (whole.tokens, "length", short)


def test_eight_at_once(cluster: Cluster) -> None:
    texts = ["ABC-123", "DOG-4", "HELLO", "K-9", "ZEBRA-11", "Q1W2", "TEN-10", "M-5"]
    prompts = [prompt_ids(f"Repeat exactly: {text}") for text in texts]
    answers = cluster.complete_all(prompts, 40, at_once=8)
    assert [tokens for tokens, _ in answers] == [reference(prompt, 40) for prompt in prompts]
    assert cluster.idle().forwards


def test_fifty_requests_each_get_their_own_string_back(two_ranks: Cluster) -> None:
    random = Random(100)
    texts = [random_text(random, random.randint(4, 14)) for _ in range(50)]
    prompts = [prompt_ids(f"Repeat exactly: {text}") for text in texts]
    before = two_ranks.idle()
    answers = two_ranks.complete_all(prompts, 40, at_once=16)
    work = two_ranks.idle() - before
    assert [tokens for tokens, _ in answers] == [reference(prompt, 40) for prompt in prompts]
    own = [spoken(tokens) == text for (tokens, _), text in zip(answers, texts, strict=True)]
    assert sum(own) >= 47
    assert work.emitted == (sum(len(tokens) for tokens, _ in answers), 0)
    # Shared steps: far fewer forwards than tokens.
    assert work.forwards[0] < work.emitted[0] / 2 + 50


def test_a_long_prompt_in_chunks_beside_a_running_stream(chunked: Cluster) -> None:
    beside = f"Repeat exactly: {random_text(Random(8), 70)}"
    running = chunked.start(prompt_ids(beside), 64)
    running.take(3)
    before = len(running.tokens)
    tokens, _ = chunked.complete(prompt_ids(LONG), 64)
    assert tokens == reference(prompt_ids(LONG), 64)
    assert running.finish()[0] == reference(prompt_ids(beside), 64)
    assert len(running.tokens) > before


def test_a_cancelled_request_stops_on_every_rank_and_the_next_one_is_right(two_ranks: Cluster) -> None:
    before = two_ranks.idle()
    request = two_ranks.start(endless_prompt(), 3000)
    assert request.take(5)[:5] == reference(endless_prompt(), 5)
    request.close()
    work = two_ranks.idle() - before
    assert work.forwards[0] < 3000
    # One forward for each token that left, and those that were on their way when the word came.
    assert work.forwards[0] - work.emitted[0] <= 4
    assert two_ranks.health()["open_requests"] == 0
    assert two_ranks.content(QUESTION) == SECRET


def test_a_cancelled_prompt_stops_between_its_chunks(chunked: Cluster) -> None:
    prompt = prompt_ids("Repeat exactly: " + "ABCDEFGH-" * 200)
    chunks = -(-len(prompt) // CHUNK)
    assert chunks > 20
    before = chunked.idle()
    request = chunked.start(prompt, 100)
    request.close()
    work = chunked.idle() - before
    assert work.forwards[0] < chunks
    assert work.emitted == (0, 0)
    assert chunked.content(QUESTION) == SECRET


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code", "words"),
    [
        ((1_000_000,), 5, Code.BAD_REQUEST, "token 1000000 is not in the model's vocabulary of 512"),
        ((0, 43), 5000, Code.CONTEXT_OVERFLOW, "2 prompt tokens and 5000 new ones exceed"),
    ],
)
def test_what_rank_0_refuses_ends_that_request_alone(
    two_ranks: Cluster, prompt: tuple[int, ...], max_tokens: int, code: Code, words: str
) -> None:
    beside = two_ranks.start(prompt_ids(LONG), 40)
    beside.take(1)
    before = two_ranks.supervisor.status.epoch
    with pytest.raises(MlxtpError) as refused:
        two_ranks.complete(prompt, max_tokens)
    assert refused.value.code is code
    assert words in refused.value.detail
    assert beside.finish()[0] == reference(prompt_ids(LONG), 40)
    assert two_ranks.supervisor.status.epoch == before


@pytest.mark.chaos
def test_four_ranks_say_the_same(tmp_path: Path) -> None:
    with Cluster(tmp_path, ranks=4) as cluster:
        before = cluster.idle()
        assert cluster.content(QUESTION) == SECRET
        work = cluster.idle() - before
        assert len(set(work.forwards)) == 1
        assert work.emitted == (len(reference(prompt_ids(QUESTION), 64)), 0, 0, 0)
