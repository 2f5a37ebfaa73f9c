"""Requests whose grammar is compiled, and those that have to come again."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer

from mlxtp.description import CacheCapabilities
from mlxtp.engine import requests as requests_module
from mlxtp.engine.grammar import Grammars
from mlxtp.engine.kv_cache import APART, another_bucket
from mlxtp.engine.logit_shaping import RequestShaping
from mlxtp.engine.pooling import PoolingStep
from mlxtp.engine.requests import MAX_COMPILING, MAX_OWN_COMPILING, Emitter, Requests
from mlxtp.engine.telemetry import RankTelemetry
from mlxtp.errors import Code, RequestError
from mlxtp.wire import messages
from mlxtp.wire.messages import (
    Accepted,
    Error,
    Finished,
    Generate,
    Loaded,
    LoadShard,
    Message,
    Pooling,
    Prefilled,
    Shaping,
    Vectors,
)

from ..reference import TINY, model_of

TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))


class NeverDone:
    """Grammars of which none is ever compiled."""

    def __init__(self) -> None:
        self.submitted: list[str] = []

    def kept(self, _kind: str, _text: str) -> None:
        return None

    def submit(self, _kind: str, text: str, _then: object) -> Future[None]:
        self.submitted.append(text)
        return Future()


@pytest.fixture
def refused() -> dict[int, Code]:
    return {}


@pytest.fixture
def requests(refused: dict[int, Code]) -> Requests:
    emitter = SimpleNamespace(
        send_error=lambda uid, code, _detail: refused.update({uid: code}), admit=lambda _uid: None
    )
    made = Requests(*cast(Any, (None, None, None, emitter)))
    made._grammars = cast(Any, NeverDone())
    return made


def knows(requests: Requests, context: int, vocabulary: int) -> None:
    loaded = SimpleNamespace(vocabulary=SimpleNamespace(size=vocabulary))
    requests._context, requests._rank = context, cast(Any, SimpleNamespace(loaded=loaded))


def guided(uid: int, pattern: str, answered: int = 0, client: int = 0, *, batch: bool = False) -> Generate:
    tokens = (1, *range(10, 10 + answered))
    shaping = Shaping(grammar_kind="regex", grammar=pattern)
    return Generate(uid, tokens, 9, shaping=shaping, answered=answered, client=client, batch=batch)


def test_biased_tokens_and_values_of_unlike_number_are_refused(
    requests: Requests, refused: dict[int, Code]
) -> None:
    """An agent sends none; another member's message may."""
    knows(requests, context=100, vocabulary=9)
    requests.admit(Generate(7, (1,), 9, shaping=Shaping(bias_tokens=(1, 2), bias_values=(0.5,))))
    assert refused == {7: Code.BAD_REQUEST}


def test_tokens_beyond_the_vocabulary_and_the_context_are_refused(
    requests: Requests, refused: dict[int, Code]
) -> None:
    knows(requests, context=100, vocabulary=9)
    requests.admit(Generate(7, (9,), 1))
    requests.admit(Generate(8, (1,), 100))
    assert refused == {7: Code.BAD_REQUEST, 8: Code.CONTEXT_OVERFLOW}


def test_many_may_wait_for_one_grammar(requests: Requests, refused: dict[int, Code]) -> None:
    for uid in range(2 * MAX_COMPILING):
        requests._compile(guided(uid, "[a-z]+"))
    assert refused == {}
    assert cast(Any, requests._grammars).submitted == ["[a-z]+"]


def test_of_too_many_grammars_the_new_ones_are_refused_and_never_an_answer_that_has_begun(
    requests: Requests, refused: dict[int, Code]
) -> None:
    for uid in range(MAX_COMPILING + 1):  # one of them is being compiled
        requests._compile(guided(uid, f"a{uid}", client=uid % 2))
    assert refused == {}
    requests._compile(guided(100, "b"))
    assert refused == {100: Code.OVERLOADED}
    requests._compile(guided(101, "c", answered=3))
    requests._compile(guided(102, "a0"))
    assert refused == {100: Code.OVERLOADED}


@pytest.mark.parametrize(("budget", "reason"), [(5, "length"), (8, "stop")])
def test_an_answer_that_only_lacks_its_end_says_whether_it_was_cut(budget: int, reason: str) -> None:
    ended: list[Finished] = []
    emitter = SimpleNamespace(emit=ended.extend)
    requests = Requests(*cast(Any, (None, None, RequestShaping(), emitter)))
    requests.scheduler = cast(Any, object())
    knows(requests, context=100, vocabulary=512)
    grammars = Grammars(TINY, 512, model_of(TINY)[1])
    try:
        grammar = grammars.compile("json_schema", '{"type": "string"}')
        tokens = [token for each in '"gra"' for token in TOKENIZER.encode(each, add_special_tokens=False).ids]
        requests._start(Generate(1, (9, *tokens), budget, answered=len(tokens)), grammar)
    finally:
        grammars.close()
    assert [end.reason for end in ended] == [reason]


@pytest.mark.parametrize(("given", "fits"), [('"gra', True), ('"gram"', True), ("gra", False)])
def test_a_grammar_reads_the_beginning_that_is_in_the_prompt(given: str, fits: bool) -> None:
    started, refused, ended = list[Any](), list[Any](), list[Finished]()
    emitter = SimpleNamespace(
        send_error=lambda *error: refused.append(error), accept=lambda _: None, emit=ended.extend
    )
    requests = Requests(*cast(Any, (None, None, RequestShaping(), emitter)))
    requests.scheduler = cast(Any, SimpleNamespace(add=lambda _, guide: started.append(guide)))
    knows(requests, context=100, vocabulary=512)
    grammars = Grammars(TINY, 512, model_of(TINY)[1])
    try:
        grammar = grammars.compile("json_schema", '{"type": "string"}')
        tokens = [token for each in given for token in TOKENIZER.encode(each, add_special_tokens=False).ids]
        shaping = Shaping(grammar_kind="json_schema", grammar="", grammar_begun=len(tokens))
        requests._start(Generate(1, (9, *tokens), 8, shaping=shaping), grammar)
    finally:
        grammars.close()
    if not fits:
        [(_, code, why)] = refused
        assert (code, "no beginning that the answer's format allows" in why) == (Code.BAD_REQUEST, True)
    assert len(started) + len(ended) == fits


def test_one_client_s_grammars_leave_places_for_others_and_clients_take_turns(
    requests: Requests, refused: dict[int, Code]
) -> None:
    for uid in range(MAX_OWN_COMPILING + 1):
        requests._compile(guided(uid, f"a{uid}", client=7))
    assert refused == {}
    for uid in (100, 102):
        requests._compile(guided(uid, "b", client=7, batch=uid == 102))
    assert refused == {100: Code.OVERLOADED, 102: Code.OVERLOADED}
    requests._compile(guided(101, "c", client=8))
    grammars = cast(Any, requests._grammars)
    assert grammars.submitted == ["a0"]
    for text in ("a0", "c"):
        requests.compiled(grammars, "regex", text, RequestError("too big"))
    assert grammars.submitted == ["a0", "c", "a1"]


def test_batch_requests_take_turns_at_the_compiler_with_interactive_ones_of_their_client(
    requests: Requests,
) -> None:
    for uid in range(4):
        requests._compile(guided(uid, f"a{uid}", client=7, batch=uid < 3))
    grammars = cast(Any, requests._grammars)
    for text in ("a0", "a3"):
        requests.compiled(grammars, "regex", text, RequestError("too big"))
    assert grammars.submitted == ["a0", "a3", "a1"]


def test_a_grammar_without_a_waiting_request_is_not_compiled(requests: Requests) -> None:
    requests.emit = lambda _outcomes: None  # type: ignore[method-assign]
    for uid in range(3):
        requests._compile(guided(uid, f"a{uid}"))
    requests.cancel(1)
    grammars = cast(Any, requests._grammars)
    requests.compiled(grammars, "regex", "a0", RequestError("too big"))
    assert grammars.submitted == ["a0", "a2"]


@pytest.mark.parametrize(
    ("gpu", "score", "kv_bytes", "most"),
    [
        # A third of their room is free beside them, a quarter of that.
        (True, 100, 12 << 32, (1 << 32) // 100),
        (True, 100, 1 << 30, (256 << 20) // 100),
        (True, 0, 1 << 30, requests_module.UNLIMITED),  # attention that keeps none
        (False, 100, 1 << 30, requests_module.UNLIMITED),
    ],
)
def test_scores_of_a_chunk_take_part_of_what_caches_leave_free_on_a_gpu(
    gpu: bool, score: int, kv_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap = SimpleNamespace(
        large_buffers=False, speculation="off", repeatable=False, agreement="auto", run_ahead=1, world_size=1
    )
    rank = SimpleNamespace(
        bootstrap=bootstrap,
        loaded=SimpleNamespace(model=None, stage=None, vocabulary=SimpleNamespace(size=9, head=None)),
        caches=SimpleNamespace(
            can=CacheCapabilities(*[True] * 6, ()), overlapping=False, joins_buckets=gpu, attending=3
        ),
        eos=frozenset(),
        disk=None,
        status=SimpleNamespace(drafts=None),
    )
    monkeypatch.setattr("mlx.core.metal.is_available", lambda: gpu)
    monkeypatch.setattr(requests_module, "score_bytes", lambda _model, _kv_bits: score)
    monkeypatch.setattr(requests_module, "attention_heads", lambda _model: (0, 0))
    made = Requests(*cast(Any, (rank, None, RequestShaping(), None)))
    made.open(
        LoadShard(str(TINY), 2048, ()), Loaded(4096, 9, 1, (), kv_bytes=kv_bytes, kv_token_bytes=1), None
    )
    assert made._policy is not None
    assert made._policy.scores == most
    bucket = another_bucket(3, 1, gpu=True, skips=True) if gpu else APART
    assert made._policy.bucket_tokens == bucket, "here only the GPU's model joins buckets"
    made.close()


class Pooled:
    """Gives steps; keeps what it is asked."""

    def __init__(self, *steps: PoolingStep) -> None:
        self.steps, self.asked = list(steps), list[int]()

    def add(self, request: Generate) -> None:
        self.asked.append(request.uid)

    def cancel(self, uid: int) -> bool:
        return uid in self.asked

    def next(self) -> PoolingStep | None:
        return self.steps.pop(0) if self.steps else None


def vectors(uid: int, *lengths: int) -> Generate:
    return Generate(uid, (1,) * sum(lengths), 1, pooling=Pooling(lengths))


def test_vectors_are_accepted_and_sent_in_parts_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Message] = []
    emitter = Emitter(cast(Any, SimpleNamespace(send=sent.append)), RankTelemetry())
    requests = Requests(*cast(Any, (None, None, RequestShaping(), emitter)))
    knows(requests, context=10, vocabulary=9)
    monkeypatch.setattr(messages, "MAX_VECTOR_BYTES", 8)
    requests.admit(vectors(1, 10, 9))
    step = PoolingStep(2, (2, 0, 1), b"aaaabbbbcccc", 9, ended=True, finite=True)
    broken = PoolingStep(4, (0,), b"aaaa", 1, ended=False, finite=False)
    requests._pooling = cast(Any, Pooled(step, broken))
    for told in (vectors(2, 3, 3, 3), vectors(3, 2, 11), vectors(4, 1, 1), vectors(5, 1)):
        requests.admit(told)
    requests.cancel(5)
    while requests.pool():
        pass
    codes = [(each.uid, each.code) for each in sent if isinstance(each, Error)]
    assert codes == [(1, Code.NOT_SUPPORTED), (3, Code.CONTEXT_OVERFLOW), (4, Code.INTERNAL)]
    assert [each for each in sent if not isinstance(each, Error)] == [
        *map(Accepted, (2, 4, 5)),
        Finished(5, "cancel", 0, 0),
        Vectors(2, (2, 0), b"aaaabbbb"),
        Vectors(2, (1,), b"cccc"),
        Prefilled(2, 9, 0),
        Finished(2, "stop", 0, 0),
    ]
    assert requests._waiting_since == {}
