"""From texts to tokens and back: prompts, ends, limits, and what a client hears of them."""

from __future__ import annotations

import json
import struct
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mlxtp.api import vectors
from mlxtp.api.backend import ModelInfo
from mlxtp.api.dialects.embeddings import EmbeddingsBody, OllamaEmbed, RerankBody, numbers, texts_of
from mlxtp.api.request_body import Schema, parsed
from mlxtp.api.vectors import TEXT, VectorAnswer, VectorRequest, check_kind, named, told_of
from mlxtp.config import embedded_model_path
from mlxtp.errors import Code, RequestError
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text
from mlxtp.vector_files import EMBED, RERANK, VectorModel

PROMPTS = {"query": "Q: ", "document": ""}
OF = VectorModel(EMBED, width=64, end=9, prompts=PROMPTS)
JUDGE = VectorModel(RERANK, width=64, scored=(6, 5))


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(LocalRenderer.load(embedded_model_path()))


def model(made: VectorModel | None = OF, context: int = 300) -> ModelInfo:
    return ModelInfo("org/m", (), Path(), context, 1, (1,), 512, vectors=made)


def rows(text: Text, ask: VectorRequest, made: VectorModel = OF) -> list[tuple[int, ...]]:
    told = told_of(ask, model(made), text)
    tokens = iter(told.tokens)
    return [tuple(islice(tokens, length)) for length in told.pooling.lengths]


def ids(text: Text, said: str) -> tuple[int, ...]:
    return text.encoded(said, special=True)


def asked(*texts: Any, **more: Any) -> VectorRequest:
    return VectorRequest(None, texts, **more)


def test_prompts_and_ends_are_added(text: Text) -> None:
    assert rows(text, asked("here", (5, 6), (7, 9))) == [(*ids(text, "here"), 9), (5, 6, 9), (7, 9)]
    for name, before in (("query", "Q: "), ("search_query", "Q: "), ("document", ""), ("passage", "")):
        assert rows(text, asked("here", prompt=name)) == [(*ids(text, before + "here"), 9)]
    always = VectorModel(EMBED, width=64, prompts=PROMPTS, default_prompt="query")
    assert rows(text, asked("here"), always) == [ids(text, "Q: here")]
    assert rows(text, asked("here", prompt="document"), always) == [ids(text, "here")]


def test_a_pair_is_written_as_the_model_was_trained(text: Text) -> None:
    told = told_of(asked("here", query="where"), model(JUDGE, 900), text)
    assert (told.pooling.kind, told.pooling.scored) == ("scores", (6, 5))
    parts = vectors._JUDGE, vectors._PAIR.format(vectors.TASK, "where", "here"), vectors._VERDICT
    assert told.tokens == sum((text.encoded(part, special=False) for part in parts), ())


def test_what_does_not_fit_is_cut_if_the_client_wants(text: Text) -> None:
    long = "a b c " * 500
    [found] = rows(text, asked(long, cut=True))
    assert found == (*ids(text, long)[:300],)
    pair = asked(long, query="q", field="documents", cut=True, most=40)
    empty = told_of(asked(" ", query="q"), model(JUDGE, 1000), text)
    assert len(told_of(pair, model(JUDGE, 1000), text).tokens) - len(empty.tokens) in (38, 39, 40)
    with pytest.raises(RequestError, match=r"query has .* takes 300"):
        told_of(asked("a", query=long), model(JUDGE), text)


def test_vectors_are_cut_and_normalized(text: Text) -> None:
    plain = VectorModel(EMBED, "mean", width=64, normalized=False)
    for dimensions, normalized in ((0, False), (8, True)):
        pooling = told_of(asked("a", dimensions=dimensions), model(plain), text).pooling
        assert (pooling.kind, pooling.dimensions, pooling.normalized) == ("mean", dimensions, normalized)


@pytest.mark.parametrize(
    ("ask", "words", "code"),
    [
        (asked("a", ""), "input[1] is empty", Code.BAD_REQUEST),
        (asked("a b c " * 2000), "tokens, and org/m takes at most 300", Code.CONTEXT_OVERFLOW),
        (asked("a", "b " * 999), "input[1] has ", Code.CONTEXT_OVERFLOW),
        (asked("a", (5, 512)), "input[1]: expected token ids below 512", Code.BAD_REQUEST),
        (asked("a", dimensions=65), "dimensions 65 is more than the 64 of org/m", Code.BAD_REQUEST),
        (asked("a", prompt="x", strict=True), "the model's prompts are query, document", Code.BAD_REQUEST),
        (asked("a", "b c", "d"), "the first 2 texts of input have", Code.BAD_REQUEST),
        (asked("a", "b", "c", "d"), "4 vectors of 64 numbers; one request gets at", Code.BAD_REQUEST),
    ],
)  # fmt: skip
def test_what_is_too_much_is_refused_with_numbers(
    text: Text, monkeypatch: pytest.MonkeyPatch, ask: VectorRequest, words: str, code: Code
) -> None:
    monkeypatch.setattr(vectors, "MOST_NUMBERS", 192)
    monkeypatch.setattr(vectors, "MOST_TOKENS", 4 if len(ask.texts) == 3 else 3000)
    with pytest.raises(RequestError) as refused:
        told_of(ask, model(), text)
    assert words in refused.value.detail
    assert refused.value.code is code


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "input is missing"),
        ([], "input is empty"),
        ({"a": 1}, "input: expected a string, strings"),
        (["a", 5], "input[1]: expected a string or token ids"),
        ([5, -1], "input[1]: expected a token id"),
        (["a"] * 2049, "input has 2049 texts; at most 2048"),
    ],
)
def test_what_is_no_text_is_refused(given: Any, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        texts_of(given)
    assert words in refused.value.detail


def test_a_model_for_something_else_is_named_with_the_remedy() -> None:
    for made, wanted, words in (
        (None, EMBED, "writes text, and embeddings need an embedding model, such as Qwen/Qwen3-Embedding"),
        (OF, TEXT, "makes embeddings, and an answer needs a model that writes text"),
        (OF, RERANK, "makes embeddings, and a ranking needs a reranking model, such as Qwen/Qwen3-Reranker"),
    ):
        with pytest.raises(RequestError) as refused:
            check_kind(model(made), wanted)
        assert f"org/m {words}" in refused.value.detail
        assert (refused.value.status, refused.value.code) == (400, Code.NOT_SUPPORTED)
    assert named(None, RERANK, (model(None), model(OF), model(JUDGE))) == "org/m"
    assert named("default", RERANK, (model(None), model(OF))) == "default"


def test_numbers_come_back_bit_for_bit() -> None:
    given = struct.pack("<5f", 0.1, -1 / 3, 1e-30, 0.0, 16777217.0)
    assert struct.pack("<5f", *eval(numbers(given))) == given


def test_a_ranking_is_best_first() -> None:
    body = RerankBody(query="q", documents=["a", {"text": "b"}, "c"], top_n=2, return_documents=True)
    pairs = [struct.pack("<2f", *pair) for pair in ((3.0, 1.0), (-800.0, 800.0), (2.0, 2.0))]
    found = body.ranked(VectorAnswer("m", tuple(pairs), 9))["results"]
    assert found == [
        {"index": 1, "relevance_score": 1.0, "document": {"text": "b"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
    ]


JUNK = [None, True, -1, 2**40, 0.5, "", "x", [], [None], [[]], [[1, "a"]], [{"text": 5}], {}, {"a": [1]}]
BODIES: dict[type[Schema], Any] = {
    EmbeddingsBody: EmbeddingsBody.asked,
    OllamaEmbed: partial(OllamaEmbed.asked, models=()),
    RerankBody: RerankBody.asked,
}


@pytest.mark.parametrize("body", BODIES)
def test_any_value_of_a_field_is_taken_or_refused_in_words(body: type[Schema]) -> None:
    whole = {"input": "x", "query": "q", "documents": ["d"]}
    taken = 0
    for name in body.model_fields:
        for value in JUNK:
            try:
                ask = BODIES[body](parsed(body, json.dumps(whole | {name: value}).encode()))
            except RequestError:
                continue
            assert ask.texts
            taken += 1
    assert taken > len(body.model_fields)
