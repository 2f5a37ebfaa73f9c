"""Rank 0's own knowledge of running requests: penalties, grammars, wanted scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..wire.messages import PLAIN, Generate
from .agreement import LogitShaping
from .grammar import AnswerBudget, Matcher, unpack
from .sampler import Shaper

RECENT = 16  # tokens of an interrupted answer that are searched again for its ending


@dataclass(slots=True)
class _Order:
    """Shaping of one request. `generated` counts its answer's tokens that have been fed or chosen."""

    shaper: Shaper | None
    guide: Guided | None
    top: int
    generated: int = 0


class Guided:
    """Implementation of `scheduler.Guide`: a matcher, and the mask for the next token."""

    def __init__(self, matcher: Matcher, vocabulary: int, left: int, answered: Sequence[int] = ()) -> None:
        """Begin with room for `left` tokens, including the ones already `answered`.

        Raises MlxtpError when no token can come, or the grammar does not allow one of `answered`.
        """
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._left = left
        self._room = AnswerBudget(matcher, left)
        for number, token in enumerate(answered, RECENT - len(answered)):
            # It may have been cut just before it was interrupted. Searching further back would delay rows.
            if number >= 0 and self._room.watched(self._left):
                self._room.fitting(matcher, self._left)
            self.accept(token)
        #: Bool [vocabulary]: tokens that may come after those that `forced` returned last.
        self.mask = np.zeros(vocabulary, np.bool_)
        if not self.finished:
            self.mask = unpack(self._room.fitting(matcher, self._left), vocabulary)

    @property
    def finished(self) -> bool:
        return self._matcher.finished

    @property
    def cut(self) -> bool:
        return self._room.cut

    @property
    def foretells(self) -> bool:
        return len(self._matcher.forced(2)) > 1

    def accept(self, token: int) -> None:
        self._matcher.accept(token)
        self._left -= 1

    def forced(self, limit: int) -> tuple[int, ...]:
        tokens = self._matcher.forced(limit) if limit > 0 else ()
        matcher = self._matcher
        if tokens:
            matcher = matcher.copy()  # they are accepted when their step is recorded
            for token in tokens:
                matcher.accept(token)
        words = self._room.fitting(matcher, self._left - len(tokens))
        self.mask = unpack(words, self._vocabulary)
        return tokens


class RequestShaping(LogitShaping):
    """Shaping of all requests: requests by their own uid, sequences by their uid in frames."""

    def __init__(self) -> None:
        self._orders: dict[int, _Order] = {}
        self._sequences: dict[int, _Order] = {}
        self._vocabulary = 0
        self._eos: tuple[int, ...] = ()

    def prepare(self, vocabulary: int, eos: frozenset[int]) -> None:
        """Prepare for a loaded model."""
        self.clear()
        self._vocabulary, self._eos = vocabulary, tuple(sorted(eos))

    def clear(self) -> None:
        self._orders.clear()
        self._sequences.clear()

    def enter(self, request: Generate, guide: Guided | None) -> None:
        """Add an admitted request. `guide` has already accepted the request's part of its answer."""
        shaped = request.shaping != PLAIN or guide is not None
        if not shaped and request.logprobs < 0:
            return
        eos = () if request.ignore_eos else self._eos
        shaper = None
        if shaped:
            begun = len(request.tokens) - request.answered
            prompt, answer = request.tokens[:begun], request.tokens[begun:]
            shaper = Shaper(request.shaping, prompt, self._vocabulary, eos, answer)
        self._orders[request.uid] = _Order(shaper, guide, request.logprobs, request.answered)

    def leave(self, request: int) -> None:
        """Remove a request that has ended."""
        if (order := self._orders.pop(request, None)) is not None:
            self._sequences = {uid: other for uid, other in self._sequences.items() if other is not order}

    def assign(self, uid: int, request: int) -> None:
        """Assign a sequence to a request."""
        if (order := self._orders.get(request)) is not None:
            self._sequences[uid] = order

    def forced(self, uid: int, tokens: Sequence[int]) -> None:
        """Count tokens that the row's next step feeds before it chooses one."""
        if (order := self._sequences.get(uid)) is not None and order.shaper is not None:
            for token in tokens:
                order.shaper.advance(token)

    def shape(self, uid: int, logits: mx.array) -> mx.array:
        order = self._sequences.get(uid)
        if order is None or order.shaper is None:
            return logits
        mask = None if order.guide is None else order.guide.mask
        return order.shaper.apply(logits, generated=order.generated, mask=mask)

    def chosen(self, uid: int, tokens: mx.array) -> None:
        if (order := self._sequences.get(uid)) is not None and order.shaper is not None:
            order.shaper.advance(tokens[-1])
            order.generated += tokens.shape[0]

    def top(self, uid: int) -> int:
        order = self._sequences.get(uid)
        return -1 if order is None else order.top
