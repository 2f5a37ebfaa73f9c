"""Vectors are those of transformers, together as alone, and clients take turns at forwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from mlxtp.engine import pooling
from mlxtp.engine.group import LoneGroup
from mlxtp.engine.loader import ModelShare, load
from mlxtp.engine.pooling import TOGETHER, Pooler, PoolingRequests, PoolingStep, Ready, batches
from mlxtp.engine.telemetry import RankTelemetry
from mlxtp.wire import messages as msg

from .record_vectors import RECORDING, SCORED, TEXTS, write

Rows = NDArray[np.float32]


def asked(uid: int, texts: list[list[int]] = TEXTS, client: int = 0, **how: object) -> msg.Generate:
    pooling = msg.Pooling(tuple(map(len, texts)), **how)  # type: ignore[arg-type]
    tokens = tuple(token for text in texts for token in text)
    return msg.Generate(uid, tokens, 1, client=client, pooling=pooling)


def run(requests: PoolingRequests) -> list[PoolingStep]:
    found: list[PoolingStep] = []
    while (step := requests.next()) is not None:
        found.append(step)
    return found


def vectors(share: ModelShare, most: int, texts: list[list[int]] = TEXTS, **how: object) -> Rows:
    requests = PoolingRequests(Pooler(share, most), RankTelemetry())
    requests.add(asked(1, texts, **how))
    steps, rows = run(requests), dict[int, Rows]()
    assert [step.ended for step in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-1].computed == sum(map(len, texts))
    for step in filter(lambda each: each.places, steps):
        found = np.frombuffer(step.data, "<f4").reshape(len(step.places), -1)
        rows |= dict(zip(step.places, found, strict=True))
    return np.stack([rows[place] for place in range(len(texts))])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def share(folder: Path) -> ModelShare:
    return load(folder, LoneGroup(), lambda: None)


@pytest.mark.parametrize("most", [4096, 100, 16])  # one forward, some, and long texts in parts
@pytest.mark.parametrize("kind", ["last", "mean", "cls", "scores"])
def test_they_are_those_of_transformers_together_and_alone(share: ModelShare, kind: str, most: int) -> None:
    scored = tuple(SCORED) if kind == "scores" else ()
    expected = np.array(json.loads(RECORDING.read_text())[kind], np.float32)
    found = vectors(share, most, kind=kind, scored=scored)
    assert found.shape == expected.shape
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(axis=1) / norms).min() > 0.99999
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    alone = np.concatenate([vectors(share, 4096, [text], kind=kind, scored=scored) for text in TEXTS])
    assert np.abs(found - alone).max() < 1e-5 * np.abs(expected).max()


def test_they_are_cut_before_they_are_normalized(share: ModelShare) -> None:
    whole, cut = vectors(share, 64), vectors(share, 64, dimensions=8, normalized=True)
    assert np.allclose(cut, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True), atol=1e-6)


def test_a_decoder_without_head_and_prefix_is_read(share: ModelShare, folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "Qwen3-Embedding-0.6B"
    bare.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (bare / path.name).write_bytes(path.read_bytes())
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = {
        name.removeprefix("model."): array
        for name, array in tree_flatten(dict(mx.load(str(folder / "model.safetensors"))))  # type: ignore[arg-type]
    }
    mx.save_safetensors(str(bare / "model.safetensors"), weights, {"format": "pt"})
    found = load(bare, LoneGroup(), lambda: None)
    assert np.array_equal(vectors(found, 64), vectors(share, 64))


@pytest.mark.parametrize("most", [1, 20, 512])
def test_each_text_is_in_one_batch_and_no_batch_is_too_large(most: int) -> None:
    lengths = [*range(1, 60, 3), *[2] * 200, 700]
    found = list(batches(lengths, most))
    assert sorted(place for batch in found for place in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) <= TOGETHER
        assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= most


class Counting:
    """A text takes a forward."""

    most = 1

    def forwards(self, request: msg.Generate) -> Iterator[Ready]:
        for place in range(len(request.pooling.lengths)):
            yield (place,), mx.array([[float("nan") if request.salt else 1.0]])


def counting() -> PoolingRequests:
    return PoolingRequests(Counting(), RankTelemetry())  # type: ignore[arg-type]


def order(requests: PoolingRequests) -> list[int]:
    return [step.uid for step in run(requests)]


def test_clients_take_turns_at_forwards() -> None:
    requests = counting()
    for uid in (1, 2, 3):
        requests.add(asked(uid, [[5]] * 4, client=7))
    requests.next()
    requests.add(asked(4, [[5]] * 2, client=8))
    assert 4 in order(requests)[:2]
    assert requests.next() is None


class Long(Counting):
    """A text of several tokens takes three forwards, over a KV cache that it keeps."""

    def forwards(self, request: msg.Generate) -> Iterator[Ready]:
        for place, length in enumerate(request.pooling.lengths):
            yield from [((), None)] * 2 * (length > self.most)
            yield (place,), mx.array([[1.0]])


def test_one_long_text_at_a_time_holds_a_cache() -> None:
    requests = PoolingRequests(Long(), RankTelemetry())  # type: ignore[arg-type]
    for uid in (1, 2):
        requests.add(asked(uid, [[5, 5]], client=uid))
    requests.next()
    requests.add(asked(3, [[5, 5]], client=3))
    assert order(requests) == [1, 1, 2, 2, 2, 3, 3, 3]


def test_the_buffers_of_each_forward_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    monkeypatch.setattr(pooling, "clear_pool", lambda: freed.append(1))
    requests = PoolingRequests(Long(), RankTelemetry())  # type: ignore[arg-type]
    requests.add(asked(1, [[5, 5]] * 2))
    assert len(run(requests)) == len(freed) == 6


def test_short_requests_pass_between_the_parts_of_a_long_text() -> None:
    requests = PoolingRequests(Long(), RankTelemetry())  # type: ignore[arg-type]
    for uid in (1, 2):
        requests.add(asked(uid, [[5, 5]]))
    requests.next()
    requests.add(asked(3, [[5]]))
    assert order(requests) == [1, 3, 1, 2, 2, 2]


def test_a_batch_request_waits_for_others_but_not_for_ever() -> None:
    requests = counting()
    requests.add(replace(asked(1, [[5]]), batch=True))
    requests.add(asked(2, [[5]] * 20))
    assert order(requests).index(1) == 8


def test_one_that_is_cancelled_or_not_finite_leaves_others_alone() -> None:
    requests = counting()
    requests.add(replace(asked(1), salt=1))
    requests.add(asked(2))
    requests.add(asked(3, [[5]]))
    assert requests.cancel(2)
    assert not requests.cancel(2)
    assert [(step.uid, step.finite) for step in run(requests)] == [(1, False), (3, True)]
