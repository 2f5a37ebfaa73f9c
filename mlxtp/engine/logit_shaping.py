"""Rank 0's own knowledge of running requests: penalties, grammars, wanted scores."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import MlxtpError
from ..wire.messages import PLAIN, Generate, Shaping
from .grammar import Matcher, unpack
from .sampler import LogitShaping

RECENT = 16  # last tokens of an interrupted answer whose ending is searched again


@dataclass(slots=True)
class _Order:
    wants: Generate
    shaper: Shaper | None
    guide: Guided | None
    generated: int = 0  # tokens of its answer before the next forward's first choice
    ahead: tuple[int, ...] = ()  # drafts or forced tokens that the next forward is fed


class Guided:
    """A `steps.Guide`: a matcher, and the masks for the next step's tokens."""

    def __init__(self, matcher: Matcher, vocabulary: int, left: int, answered: Sequence[int] = ()) -> None:
        """`left`: most tokens, including `answered`. Raises MlxtpError if no token is allowed."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._left = left
        self._room = AnswerBudget(matcher, left)
        for number, token in enumerate(answered, RECENT - len(answered)):
            # The answer may have been ended early before the interruption. A longer search would delay rows.
            if number >= 0 and self._room.watched(self._left):
                self._room.fitting(matcher, self._left)
            self.accept(token)
        #: Bool [n + 1, vocabulary]: tokens allowed in place of the n tokens returned last, and after them.
        self.masks = np.zeros((1, vocabulary), np.bool_)
        if not self.finished:
            self.masks[0] = unpack(self._room.fitting(matcher, self._left), vocabulary)

    @property
    def finished(self) -> bool:
        return self._matcher.finished

    @property
    def cut(self) -> bool:
        return self._room.cut

    @property
    def foretells(self) -> bool:
        return len(self._matcher.forced(2)) > 1

    @property
    def draftable(self) -> int:
        return self._room.unwatched(self._left)

    def accept(self, token: int) -> None:
        self._matcher.accept(token)
        self._left -= 1

    def forced(self, limit: int) -> tuple[int, ...]:
        tokens = self._matcher.forced(limit) if limit > 0 else ()
        matcher = self._matcher
        if tokens:
            matcher = matcher.copy()  # `accept` is called when their step is recorded
            for token in tokens:
                matcher.accept(token)
        words = self._room.fitting(matcher, self._left - len(tokens))
        self.masks = np.zeros((len(tokens) + 1, self._vocabulary), np.bool_)
        self.masks[np.arange(len(tokens)), list(tokens)] = True
        self.masks[-1] = unpack(words, self._vocabulary)
        return tokens

    def allowed(self, drafts: Sequence[int]) -> tuple[int, ...]:
        masks, matcher, left = [self.masks[-1]], self._matcher.copy(), self._left
        with contextlib.suppress(MlxtpError):  # a draft is not allowed, or no token after it is
            for token in drafts:
                matcher.accept(token)
                left -= 1
                if matcher.finished or matcher.forced(1) or self._room.watched(left):
                    break
                masks.append(unpack(matcher.mask(), self._vocabulary))
        self.masks = np.stack(masks)
        return tuple(drafts[: len(masks) - 1])


class RequestShaping(LogitShaping):
    def __init__(self) -> None:
        self._orders: dict[int, _Order] = {}
        self._sequences: dict[int, _Order] = {}
        self._vocabulary = 0
        self._eos: tuple[int, ...] = ()

    def prepare(self, vocabulary: int, eos: frozenset[int]) -> None:
        self.clear()
        self._vocabulary, self._eos = vocabulary, tuple(sorted(eos))

    def clear(self) -> None:
        self._orders.clear()
        self._sequences.clear()

    def enter(self, request: Generate, guide: Guided | None) -> None:
        """`guide` has already accepted the request's part of its answer."""
        shaper = None
        if request.shaping != PLAIN or guide is not None:
            begun = len(request.tokens) - request.answered
            prompt, answer = request.tokens[:begun], request.tokens[begun:]
            ends = (*(() if request.ignore_eos else self._eos), *request.stop_tokens)
            shaper = Shaper(request.shaping, prompt, self._vocabulary, ends, answer)
        if shaper is not None or request.logprobs >= 0:
            self._orders[request.uid] = _Order(request, shaper, guide)

    def leave(self, request: int) -> None:
        if (order := self._orders.pop(request, None)) is not None:
            self._sequences = {uid: other for uid, other in self._sequences.items() if other is not order}

    def assign(self, uid: int, request: int) -> None:
        if (order := self._orders.get(request)) is not None:
            self._sequences[uid] = order

    def feeds(self, uid: int, at: int, ahead: tuple[int, ...] = ()) -> None:
        """Prepare to choose token `at`, counted from the prompt's start, and one after each of `ahead`."""
        if (order := self._sequences.get(uid)) is not None:
            order.generated, order.ahead = at - len(order.wants.tokens) + order.wants.answered, ahead

    def shape(self, uid: int, logits: mx.array) -> mx.array:
        order = self._sequences.get(uid)
        if order is None or order.shaper is None:
            return logits
        own = 1 + len(order.ahead)  # the others are padding
        # After its last forced tokens, a grammar still has their masks; the choice is not sent to clients.
        masks = None if order.guide is None else order.guide.masks[-own:]
        shaped = order.shaper.apply(logits[:own], generated=order.generated, mask=masks, ahead=order.ahead)
        return shaped if own == len(logits) else mx.concatenate([shaped, logits[own:].astype(mx.float32)])

    def chosen(self, uid: int, tokens: mx.array) -> None:
        if (order := self._sequences.get(uid)) is not None and order.shaper is not None:
            order.shaper.advance(tokens, order.ahead)

    def top(self, uid: int) -> int:
        order = self._sequences.get(uid)
        return -1 if order is None else order.wants.logprobs


LEAST_BIAS = -1e9  # of tokens that are not allowed: a grammar may still need one
_ANY, _NONE = -1, -2  # in place of tokens: before a shorter bad word, and before the answer


# --- penalties, biases and masks on the logits of one row ------------------------------------------------


class Shaper:
    """Changes that a request makes to its row's logits, in this order:

    add the logit bias, and a large negative one to tokens that are not allowed; for tokens of prompt and
    answer, divide positive logits and multiply negative ones by the repetition penalty; for tokens of the
    answer, subtract the presence penalty once and the frequency penalty for each occurrence; give tokens that
    complete bad words the lowest logit; forbid end and stop tokens before `min_tokens`; apply the mask.
    """

    def __init__(
        self,
        shaping: Shaping,
        prompt: Sequence[int],
        vocabulary: int,
        eos: Sequence[int],
        answer: Sequence[int] = (),
    ) -> None:
        self._shaping = shaping
        self._ids = mx.arange(vocabulary, dtype=mx.int32)
        self._ends = np.zeros(vocabulary, dtype=bool)
        self._ends[[token for token in eos if token < vocabulary]] = True
        self._bias: mx.array | None = None
        if shaping.bias_tokens or shaping.allowed_tokens:
            bias = np.full(vocabulary, LEAST_BIAS if shaping.allowed_tokens else 0, dtype=np.float32)
            bias[[token for token in shaping.allowed_tokens if token < vocabulary]] = 0
            for token, value in zip(shaping.bias_tokens, shaping.bias_values, strict=True):
                if token < vocabulary:
                    bias[token] += value
            self._bias = mx.array(bias)
        #: Tokens of prompt and answer, bool [V]; None where no penalty needs them.
        self._seen: mx.array | None = None
        #: Occurrences of each token in the answer, float32 [V]; None where no penalty needs them.
        self._counts: mx.array | None = None
        if shaping.repetition_penalty != 1.0:
            seen = np.zeros(vocabulary, dtype=bool)
            seen[np.array([*prompt, *answer], dtype=np.int64)] = True
            self._seen = mx.array(seen)
        if shaping.presence_penalty or shaping.frequency_penalty:
            came = np.bincount(np.array(answer, dtype=np.int64), minlength=vocabulary)
            self._counts = mx.array(came.astype(np.float32))
        #: Bad words, int32 [W, K + 1], aligned to the right; None without any.
        self._words: mx.array | None = None
        if shaping.bad_lengths:
            words = np.full((len(shaping.bad_lengths), max(2, *shaping.bad_lengths)), _ANY, np.int32)
            ends = np.cumsum(shaping.bad_lengths)
            for word, end, length in zip(words, ends, shaping.bad_lengths, strict=True):
                word[-length:] = shaping.bad_tokens[end - length : end]
            self._words = mx.array(words)
            most = words.shape[1] - 1
            last = ([_NONE] * most + [*answer[-most:]])[-most:]
            self._last = mx.array(last, dtype=mx.int32)  #: the answer's last K tokens

    def advance(self, tokens: mx.array, ahead: Sequence[int] = ()) -> None:
        """Count chosen tokens int32 [L], up to the first that differs from the L - 1 fed tokens `ahead`."""
        if self._seen is None and self._counts is None and self._words is None:
            return
        came, count = self._ids == tokens[:, None], mx.array(1)
        if ahead:
            right = mx.cumprod((tokens[:-1] == mx.array(list(ahead))).astype(mx.int32))
            came[1:] = came[1:] & (right[:, None] > 0)
            count = count + right.sum()
        if self._words is not None:
            both = mx.concatenate([self._last, tokens.astype(mx.int32)])
            self._last = both[count + mx.arange(self._last.size)]
        if self._seen is not None:
            self._seen = self._seen | came.any(axis=0)
        if self._counts is not None:
            self._counts = self._counts + came.sum(axis=0)

    def apply(
        self, row_logits: mx.array, *, generated: int, mask: np.ndarray | None, ahead: Sequence[int] = ()
    ) -> mx.array:
        """Return logits float32 [L, V] of `row_logits` [L, V]. The answer has `generated` tokens before them.

        `mask`: the grammar's tokens, bool [L, V]; if only end tokens, they do not wait for `min_tokens`.
        `ahead`: the L - 1 fed tokens between the columns; penalties include them, kept counts do not.
        """
        shaping, logits = self._shaping, row_logits.astype(mx.float32)
        columns = logits.shape[0]
        if self._bias is not None:
            logits = logits + self._bias
        between = self._between(ahead)
        if self._seen is not None:
            seen = self._seen if between is None else self._seen | (between > 0)
            penalty = shaping.repetition_penalty
            logits = mx.where(seen, mx.where(logits < 0, logits * penalty, logits / penalty), logits)
        if self._counts is not None:
            counts = self._counts if between is None else self._counts + between
            logits = logits - shaping.presence_penalty * (counts > 0) - shaping.frequency_penalty * counts
        if self._words is not None:
            logits = self._without_words(logits, self._words, ahead)
        forbidden = self._forbidden(columns, generated, mask)
        return logits if forbidden is None else mx.where(mx.array(forbidden), -mx.inf, logits)

    def _without_words(self, logits: mx.array, words: mx.array, ahead: Sequence[int]) -> mx.array:
        last = mx.concatenate([self._last, mx.array(list(ahead), dtype=mx.int32)])
        places = mx.arange(logits.shape[0])[:, None] + mx.arange(self._last.size)
        before, came = words[:, :-1], last[places][:, None]
        complete = ((before == _ANY) | (before == came)).all(axis=-1)  # [L, W]
        # Lower than tokens that are not allowed, and finite: a grammar may still need one.
        return logits.at[:, words[:, -1]].minimum(mx.where(complete, 2 * LEAST_BIAS, mx.inf))

    def _between(self, ahead: Sequence[int]) -> mx.array | None:
        """Return the occurrences of each token in `ahead` before each column, int32 [L, V]."""
        if not ahead or (self._seen is None and self._counts is None):
            return None
        came = self._ids == mx.array([-1, *ahead], dtype=mx.int32)[:, None]
        return mx.cumsum(came.astype(mx.int32), axis=0)

    def _forbidden(self, columns: int, generated: int, mask: np.ndarray | None) -> np.ndarray | None:
        early = np.arange(generated, generated + columns) < self._shaping.min_tokens
        if not early.any():
            return None if mask is None else ~mask
        waiting = early[:, None] & self._ends
        if mask is None:
            return waiting
        return ~mask | (waiting & (mask & ~self._ends).any(axis=-1, keepdims=True))


# --- complete answers: JSON closes before its budget ends ------------------------------------------------
# Only the model ends a string. Near its budget's end, tokens must leave room for the shortest known ending.

LEAST_MARGIN, MOST_MARGIN = 32, 512  # tokens; between them, the length of the grammar itself
ESCAPE = 16  # most tokens that an escape adds to a string
SLACK = 3  # most tokens that plain text adds: the rest of a character, a digit after a point
MOST_TRIED = 24  # most allowed tokens to try one by one; with more, plain text is free
MOST_STEPS = 1000  # of all candidates' endings together, because other requests wait for this step
LONGEST_ENDING = 1024  # tokens
SAME = 4  # most times in a row that an ending repeats a token
Ending = tuple[int, ...]  # tokens
GROWTH = 8  # most tokens that each token of the answer adds to the ending, beyond the margin


class AnswerBudget:
    def __init__(self, matcher: Matcher, left: int) -> None:
        self.cut = False  #: The ending left the model no choice.
        # A token adds at most one object to the ending; its names and braces are in the grammar.
        self._margin = min(max(LEAST_MARGIN, matcher.grammar_tokens), MOST_MARGIN)
        self._check_at = left  # tokens left
        self._planned: tuple[Ending, int] = (), 0  # the last ending, and the room at its start

    def fitting(self, matcher: Matcher, left: int) -> NDArray[np.uint32]:
        """Return the grammar's mask; near the end of `left`, keep tokens after which an ending still fits."""
        words = matcher.mask()
        if not self.watched(left):
            return words
        matcher = matcher.copy(search=True)
        found = _ending(matcher, left)
        ending = self._continued(matcher, left, found)
        spare = 0 if ending is None else left - len(ending)
        if ending is None or spare > self._margin:  # a later search may find one
            self._check_at = left - max(1, (left if ending is None else spare - self._margin) // GROWTH)
            return words
        allowed = [int(token) for token in np.flatnonzero(unpack(words, 32 * len(words)))]
        if len(allowed) <= min(MOST_TRIED, MOST_STEPS // max(len(ending), 1)):
            kept = [each for each in allowed if each in ending[:1] or _fits(matcher, each, left - 1)]
            self.cut = self.cut or len(kept) == 1 < len(allowed)
            return _mask(kept, len(words))
        if not ending:
            return words
        # After any other token than the ending's, the ending starts again.
        free = words & _text(matcher, words, 0 if found is None else left - len(found))
        self.cut = self.cut or (ending is found and not free.any())
        return free | _mask(ending[:1], len(words))

    def watched(self, left: int) -> bool:
        return left <= self._check_at

    def unwatched(self, left: int) -> int:
        return max(left - self._check_at - 1, 0)

    def _continued(self, matcher: Matcher, left: int, found: Ending | None) -> Ending | None:
        last, room = self._planned
        rest = last[room - left :] if room > left else ()
        shorter = rest and (found is None or len(rest) < len(found))
        completes = shorter and (end := _after(matcher, rest)) is not None and end.complete
        ending = rest if completes else found
        self._planned = ending or (), left
        return ending


def _text(matcher: Matcher, words: NDArray[np.uint32], spare: int) -> NDArray[np.uint32]:
    hints = matcher.hints
    in_string = spare > 0 and _in_string(matcher, words)
    if spare <= 0 or not (in_string or spare > SLACK):
        return np.zeros_like(words)
    inside = hints.inside if spare > ESCAPE and in_string else hints.plain
    mask = hints.text if _in_text(matcher, words) else inside
    return mask if spare > SLACK else mask & hints.whole


def _after(matcher: Matcher, tokens: tuple[int, ...]) -> Matcher | None:
    state = matcher.copy()
    try:
        for token in tokens:
            state.accept(token)
    except MlxtpError:
        return None
    return state


def _fits(matcher: Matcher, token: int, left: int) -> bool:
    state = _after(matcher, (token,))
    return state is not None and _ending(state, left) is not None


def _ending(matcher: Matcher, most: int) -> Ending | None:
    """Return the ending of the text that a greedy search finds; None if it is longer than `most`."""
    state, found = matcher.copy(), list[int]()
    most = min(most, LONGEST_ENDING)
    try:
        while not state.complete:
            tokens = state.forced(most + 1) or _closing(state, found[-SAME:])
            found += tokens
            if not tokens or len(found) > most:
                return None
            for token in tokens:
                state.accept(token)
    except MlxtpError:  # a dead end
        return None
    return tuple(found)


def _closing(state: Matcher, last: list[int]) -> tuple[int, ...]:
    """Return tokens that bring JSON or a text closest to its end, but no token that fills all of `last`."""
    words, hints = state.mask(), state.hints
    stale = last[0] if len(last) == SAME and len(set(last)) == 1 else -1
    if _in_text(state, words):
        return next((end for end in (*hints.suffixes, (hints.quote,)) if _leads_out(state, end)), ())
    if _in_string(state, words):
        return () if hints.quote == stale else (hints.quote,)
    for token in hints.closing:
        if token != stale and _has(words, token):
            return (token,)
    allowed = np.flatnonzero(unpack(words, 32 * len(words)))
    return (next((int(token) for token in allowed if token != stale), int(allowed[0])),)


def _leads_out(state: Matcher, end: tuple[int, ...]) -> bool:
    if (after := _after(state, end)) is None:
        return False
    with contextlib.suppress(MlxtpError):
        return after.complete or not _in_text(after, after.mask())
    return False


def _in_string(state: Matcher, words: NDArray[np.uint32]) -> bool:
    """Return True in a JSON string without a pattern: it may end or continue with any letter."""
    return _has(words, state.hints.quote) and _has(words, state.hints.letter)


def _in_text(state: Matcher, words: NDArray[np.uint32]) -> bool:
    """Return True in a text: unlike a JSON string, it may contain a line break."""
    return _in_string(state, words) and _has(words, state.hints.newline)


def _has(words: NDArray[np.uint32], token: int) -> bool:
    return token >= 0 and bool(int(words[token >> 5]) >> (token & 31) & 1)


def _mask(tokens: Sequence[int], length: int) -> NDArray[np.uint32]:
    words = np.zeros(length, np.uint32)
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words
