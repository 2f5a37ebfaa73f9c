"""Agreement of all ranks on each token, from the logits that every rank gathered.

`verify`: every rank samples alike; the digests in the Acks are compared before the token leaves. `broadcast`:
rank 0 samples, and one small sum in the graph carries its choice to all. What only rank 0 knows about a
request (penalties, grammars) is in its `LogitShaping`; the other ranks have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import mlx.core as mx

from ..wire.messages import Sampling
from .group import Group
from .sampler import Sampler, scores

Scores = Mapping[int, tuple[mx.array, mx.array, mx.array]]


class LogitShaping(Protocol):
    """Changes to the logits of its rows that rank 0 alone makes."""

    def shape(self, uid: int, logits: mx.array) -> mx.array:
        """Return the row's logits [width, V] with penalties, biases and its grammar's mask."""
        ...

    def chosen(self, uid: int, tokens: mx.array) -> None:
        """Take the row's new tokens, int32 [width], perhaps not computed yet."""
        ...

    def top(self, uid: int) -> int:
        """Return the number of alternatives to score for the row; -1 for no scores at all."""
        ...


class NoLogitShaping:
    """Shaping of ranks above 0, and of a rank 0 whose rows need none."""

    def shape(self, uid: int, logits: mx.array) -> mx.array:
        return logits

    def chosen(self, uid: int, tokens: mx.array) -> None:
        pass

    def top(self, uid: int) -> int:
        return -1


class Chooser:
    """Choice of tokens from gathered logits on one rank."""

    def __init__(self, group: Group, shaping: LogitShaping, special: tuple[int, ...] = ()) -> None:
        self._group = group
        self._shaping = shaping
        self._special = special
        self._sampler = Sampler(())
        self._samplings: tuple[Sampling, ...] = ()

    def agree(self, tokens: mx.array) -> mx.array:
        """Return rank 0's `tokens` (int32, any shape) on every rank."""
        return self._group.agree(tokens.reshape(-1)).reshape(tokens.shape)

    def choose(
        self,
        logits: mx.array,
        rows: tuple[int, ...],
        widths: tuple[int, ...],
        samplings: tuple[Sampling, ...],
        at: mx.array,
        *,
        broadcast: bool,
    ) -> tuple[mx.array, Scores]:
        """Return tokens int32 [rows, width] from `logits` [rows, width, V], and the scores by uid.

        `at` (int32 [rows]) is the position of the token that each row's first column chooses. Under
        `broadcast` rank 0's choice counts. The others sample too, so that every rank's result depends on the
        same collectives.
        """
        if samplings != self._samplings:
            self._sampler, self._samplings = Sampler(samplings, self._special), samplings
        shaping = self._shaping
        shaped = logits
        if broadcast:
            shaped = mx.stack(
                [shaping.shape(uid, logits[i]).astype(mx.float32) for i, uid in enumerate(rows)]
            )
        tokens = self._sampler.choose(shaped, at)
        if broadcast:
            tokens = self.agree(tokens)
        found: dict[int, tuple[mx.array, mx.array, mx.array]] = {}
        for i, uid in enumerate(rows):
            if broadcast:
                shaping.chosen(uid, tokens[i, : widths[i]])
            if (top := shaping.top(uid)) >= 0:
                found[uid] = scores(logits[i], tokens[i], top)
        if found:
            mx.async_eval(tokens, [array for arrays in found.values() for array in arrays])
        return tokens, found
