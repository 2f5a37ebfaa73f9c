"""Requests for vectors on a rank that is alone: forwards of their own, without the scheduler.

A forward has texts of similar lengths, padded at the end, where a decoder's real tokens never look. It is as
short as a chunk of a prompt. Clients take turns at forwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx

from ..admission_counter import FairQueue
from ..wire import messages as msg
from .loader import ModelShare
from .runner import clear_pool
from .sequence import MOST_OVERTAKING
from .sharding import Tap
from .telemetry import RankTelemetry

TOGETHER = 64  # texts in one forward
ON_GPU, ON_CPU = 2048, 512  # tokens in one forward, padding included
LEAST_NORM = 1e-12

#: Places of texts and their vectors [texts, numbers], float32; none after a part of a long text.
Ready = tuple[Sequence[int], mx.array | None]


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the places of texts for each forward, shortest first; a text of more than `most` tokens alone."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) == TOGETHER or (len(batch) + 1) * lengths[place] > most):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


class Pooler:
    """Forwards for vectors. `most`: tokens in one."""

    def __init__(self, share: ModelShare, most: int) -> None:
        self._share = share
        self.most = most

    def forwards(self, request: msg.Generate) -> Iterator[Ready]:
        """Yield the vectors of each forward. It runs when they are evaluated."""
        pooling, ends = request.pooling, [*accumulate(request.pooling.lengths)]
        texts = [request.tokens[end - n : end] for end, n in zip(ends, pooling.lengths, strict=True)]
        for places in batches(pooling.lengths, self.most):
            if len(texts[places[0]]) > self.most:
                yield from self._long(places, texts[places[0]], pooling)
                continue
            found = self._run([texts[place] for place in places], None, pooling)
            yield places, self._vectors(found, pooling)

    def _long(self, places: Sequence[int], text: Sequence[int], pooling: msg.Pooling) -> Iterator[Ready]:
        from mlx_lm.models.cache import make_prompt_cache

        caches, total = make_prompt_cache(self._share.model), mx.zeros(())
        for at in range(0, len(text), self.most):
            part = text[at : at + self.most]
            found = self._run([part], caches, pooling)
            if pooling.kind == "mean":
                total = found = total + found * (len(part) / len(text))
            elif pooling.kind == "cls":
                total = found = total if at else found
            if at + self.most < len(text):
                mx.eval(found, [cache.state for cache in caches])
                yield (), None
            else:
                yield places, self._vectors(found, pooling)

    def _run(self, rows: Sequence[Sequence[int]], caches: list[Any] | None, pooling: msg.Pooling) -> mx.array:
        """Pool texts of one forward: float32 [texts, width]. Only what is used is computed."""
        width, lengths = max(map(len, rows)), mx.array([len(row) for row in rows])
        tokens = mx.array([(*row, *(0,) * (width - len(row))) for row in rows], dtype=mx.int32)
        vocabulary, model = self._share.vocabulary, self._share.model
        if pooling.kind == "scores":
            logits = vocabulary.forward(model, tokens, caches, ends=lengths - 1)  # type: ignore[arg-type]
            return logits[:, 0, mx.array(pooling.scored)].astype(mx.float32)
        head = vocabulary.head
        assert head is not None
        before, head.tap = head.tap, Tap()
        try:
            model(tokens, cache=caches)
            states = head.tap.hidden
        finally:
            head.tap = before
        assert states is not None
        return _pooled(states, lengths, pooling.kind)

    def _vectors(self, vectors: mx.array, pooling: msg.Pooling) -> mx.array:
        if pooling.dimensions:
            vectors = vectors[:, : pooling.dimensions]
        if pooling.normalized:
            vectors = vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), LEAST_NORM)
        return mx.contiguous(vectors)


def _pooled(states: mx.array, lengths: mx.array, kind: str) -> mx.array:
    """Pool float32 [texts, width] from [texts, L, width]."""
    if kind == "cls":
        return states[:, 0].astype(mx.float32)
    if kind == "mean":
        real = mx.arange(states.shape[1])[None, :, None] < lengths[:, None, None]
        return mx.where(real, states.astype(mx.float32), 0).sum(axis=1) / lengths[:, None]
    return mx.take_along_axis(states, (lengths - 1)[:, None, None], axis=1)[:, 0].astype(mx.float32)


@dataclass(frozen=True, slots=True)
class PoolingStep:
    """A forward's vectors of some texts, float32. `computed`: tokens so far. `finite`: none is broken."""

    uid: int
    places: tuple[int, ...]
    data: bytes
    computed: int
    ended: bool
    finite: bool


@dataclass(slots=True, eq=False, repr=False)
class _Job:
    request: msg.Generate
    forwards: Iterator[Ready]
    short: bool  # no text takes several forwards
    turn: int = 0
    left: int = 0  # texts without a vector
    computed: int = 0  # tokens


class PoolingRequests:
    """Open requests for vectors. `next` runs one forward for one of them."""

    def __init__(self, pooler: Pooler, status: RankTelemetry) -> None:
        self._pooler = pooler
        self._status = status
        self._jobs: dict[int, _Job] = {}
        self._turns = FairQueue()
        self._overtaking = 0  # forwards of interactive requests in a row while a batch request waits
        self._begun = 0  # uid of a request whose long text has a KV cache: no other may begin one

    def add(self, request: msg.Generate) -> None:
        lengths = request.pooling.lengths
        short = max(lengths) <= self._pooler.most
        job = _Job(request, self._pooler.forwards(request), short, left=len(lengths))
        self._line_up(job)
        self._jobs[request.uid] = job

    def cancel(self, uid: int) -> bool:
        return self._jobs.pop(uid, None) is not None

    def clear(self) -> None:
        self._jobs.clear()

    def _line_up(self, job: _Job) -> None:
        whose = job.request.client, job.request.batch
        own = [
            each.turn for each in self._jobs.values() if (each.request.client, each.request.batch) == whose
        ]
        job.turn = self._turns.following(whose, own)

    def _choose(self) -> _Job:
        begun = self._jobs.get(self._begun)
        may = [job for job in self._jobs.values() if begun in (None, job) or job.short]
        batch = [job for job in may if job.request.batch]
        others = [job for job in may if not job.request.batch]
        overtaken = bool(batch) and self._overtaking >= MOST_OVERTAKING
        job = min(
            batch if overtaken or not others else others, key=lambda each: (each.turn, each.request.uid)
        )
        self._overtaking = 0 if job.request.batch or not batch else self._overtaking + 1
        return job

    def next(self) -> PoolingStep | None:
        """Run the next forward, and wait for it. None if there is none to run."""
        if not self._jobs:
            return None
        job = self._choose()
        uid = job.request.uid
        self._turns.record((job.request.client, job.request.batch), job.turn)
        self._status.launched("prefill", self._pooler.most, time.monotonic())
        places, vectors = next(job.forwards)
        if vectors is None:
            self._begun = uid
        elif self._begun == uid:
            self._begun = 0
        data, finite = b"", True
        if vectors is not None:
            found: Any = vectors  # mlx's arrays are buffers, which its types do not say
            finite, data = bool(mx.isfinite(vectors).all().item()), bytes(memoryview(found))
        clear_pool()  # each forward has other sizes
        self._status.settled(time.monotonic())
        self._status.stats.forwards += 1
        job.left -= len(places)
        job.computed += sum(job.request.pooling.lengths[place] for place in places)
        if job.left and finite:
            job.turn = -1  # not one of the own that wait
            self._line_up(job)
        else:
            del self._jobs[uid]
        return PoolingStep(uid, tuple(places), data, job.computed, ended=not job.left, finite=finite)
