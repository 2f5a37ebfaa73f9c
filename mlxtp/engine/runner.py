"""Runs forwards, on every rank alike: prefill chunks and decode steps over the running batch.

It decides nothing. Frames name every forward, every sequence that joins and every one that leaves; the same
frames give the same graph on every rank. Results are lazy arrays already being computed: whoever reads them
waits, nobody else does.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import Code, GroupError
from .group import Group
from .loader import LoadedModel, make_cache

CLEAR_EVERY = 256
"""Forwards after which buffers that MLX keeps for reuse go back to the system, as mlx-lm does it."""


class Runner:
    """The sequences of one loaded model and their KV caches."""

    def __init__(self, loaded: LoadedModel, group: Group) -> None:
        self._model = loaded.model
        self._group = group
        self._prefilling: dict[int, list[Any]] = {}
        self._forwards: dict[int, int] = {}
        self._rows: list[int] = []
        self._cache: list[Any] = []
        self._merged = False
        self._tokens: mx.array | None = None
        self.forwards = 0
        """Forwards of this runner, prefill chunks and steps."""

    def prefill(self, uid: int, tokens: tuple[int, ...], *, last: bool) -> mx.array:
        """Queue one forward over the next `tokens` of a prompt.

        Returns the first new token, int32 [1], when this chunk is the prompt's `last` and the sequence has
        joined the batch as its last row; before that a zero [1] to wait for.
        """
        cache = self._prefilling.get(uid)
        if cache is None:
            cache = self._prefilling[uid] = make_cache(self._model)
            self._forwards[uid] = 0
        self._forwards[uid] += 1
        self._count()
        logits = self._model(mx.array(tokens, dtype=mx.int32)[None], cache=cache)
        if not last:
            # Waiting for the caches alone leaves out the head and the last layer's output, on every rank.
            done: mx.array = mx.depends([mx.zeros((1,), dtype=mx.int32)], _arrays(cache))[0]
            mx.async_eval(done)
            return done
        token = self._choose(logits)
        mx.async_eval(token, _arrays(cache))
        del self._prefilling[uid]
        self._join(uid, cache, token)
        return token

    def step(self, rows: tuple[int, ...]) -> mx.array:
        """Queue one decode forward; returns each row's next token, int32 [rows], in row order.

        Raises GroupError (DESYNC) when the frame's rows are not the rows this rank holds.
        """
        if rows != tuple(self._rows) or self._tokens is None:
            raise GroupError(f"a step for rows {rows}, but this rank runs {tuple(self._rows)}", Code.DESYNC)
        for uid in rows:
            self._forwards[uid] += 1
        self._count()
        tokens = self._choose(self._model(self._tokens[:, None], cache=self._cache))
        mx.async_eval(tokens)
        self._tokens = tokens
        return tokens

    def stop(self, uid: int) -> int:
        """Forget a sequence. Returns the number of forwards it took part in."""
        self._prefilling.pop(uid, None)
        if uid in self._rows:
            self._leave(self._rows.index(uid))
        return self._forwards.pop(uid)

    def clear(self) -> None:
        """Forget every sequence."""
        for uid in tuple(self._forwards):
            self.stop(uid)

    def _choose(self, logits: mx.array) -> mx.array:
        return self._group.agree(mx.argmax(logits[:, -1, :], axis=-1).astype(mx.int32))

    def _count(self) -> None:
        self.forwards += 1
        if self.forwards % CLEAR_EVERY == 0:
            mx.clear_cache()

    def _join(self, uid: int, cache: list[Any], token: mx.array) -> None:
        if self._tokens is None:
            # One sequence alone keeps its plain cache: no padding, no mask.
            self._cache, self._tokens, self._merged = cache, token, False
        else:
            if not self._merged:
                self._cache = [c.merge([c]) for c in self._cache]
                self._merged = True
            for running, joining in zip(self._cache, cache, strict=True):
                running.extend(joining.merge([joining]))
            self._tokens = mx.concatenate([self._tokens, token])
        self._rows.append(uid)

    def _leave(self, row: int) -> None:
        del self._rows[row]
        if not self._rows or self._tokens is None:
            self._cache, self._tokens, self._merged = [], None, False
            return
        keep = mx.array([i for i in range(len(self._rows) + 1) if i != row])
        self._tokens = self._tokens[keep]
        if len(self._rows) == 1:
            self._cache = [c.extract(1 - row) for c in self._cache]
            self._merged = False
            return
        for cache in self._cache:
            cache.filter(keep)


def _arrays(cache: list[Any]) -> list[mx.array]:
    return [item for _, item in tree_flatten([c.state for c in cache]) if isinstance(item, mx.array)]
