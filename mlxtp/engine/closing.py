"""Complete answers under a grammar: JSON closes before its budget ends. On rank 0 alone, without MLX.

Only the model itself ends a string or an array without a bound, or text up to a suffix. Near the end of the
budget, `AnswerBudget` allows only tokens after which the shortest known ending still fits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import MlxtpError
from .grammar import Matcher, unpack

LEAST_MARGIN, MOST_MARGIN = 32, 512  # tokens; between them, the length of the grammar itself
ESCAPE = 16  # tokens that an escape in a string adds at most
SLACK = 3  # tokens that plain text adds at most: the rest of a character, a digit behind a point
MOST_TRIED = 24  # candidates that are tried one by one; where more are allowed, text is free
MOST_STEPS = 1000  # of all candidates' endings together, because other requests wait for this step
LONGEST_ENDING = 1024  # tokens
SAME = 4  # times in a row that an ending may repeat a token
GROWTH = 8  # tokens by which the ending grows at most for each token of the answer, beyond the margin


class AnswerBudget:
    """The room that one answer has left. `left` counts tokens."""

    def __init__(self, matcher: Matcher, left: int) -> None:
        self.cut = False  #: The ending left the model no choice.
        # One token lengthens the ending by an object at most, whose names and braces are in the grammar.
        self._margin = min(max(LEAST_MARGIN, matcher.grammar_tokens), MOST_MARGIN)
        self._check_at = left  # tokens left
        self._planned: tuple[tuple[int, ...], int] = (), 0  # the last ending, and the room at its start

    def fitting(self, matcher: Matcher, left: int) -> NDArray[np.uint32]:
        """Return the mask of tokens that may come next, with `left` tokens for them and the rest.

        An answer that cannot be complete in time keeps the mask of its grammar. Raises as `Matcher.mask`.
        """
        words = matcher.mask()
        if not self.watched(left):
            return words
        found = _ending(matcher, left)
        ending = self._continued(matcher, left, found)
        spare = 0 if ending is None else left - len(ending)
        if ending is None or spare > self._margin:  # without an ending: perhaps there is one later
            self._check_at = left - max(1, (left if ending is None else spare - self._margin) // GROWTH)
            return words
        allowed = [int(token) for token in np.flatnonzero(unpack(words, 32 * len(words)))]
        if len(allowed) <= min(MOST_TRIED, MOST_STEPS // max(len(ending), 1)):
            kept = [each for each in allowed if each in ending[:1] or _fits(matcher, each, left - 1)]
            self.cut = self.cut or len(kept) == 1 < len(allowed)
            return _mask(kept, len(words))
        if not ending:
            return words
        # Any other token than the ending's makes the ending begin again.
        free = words & _text(matcher, words, 0 if found is None else left - len(found))
        self.cut = self.cut or (ending is found and not free.any())
        return free | _mask(ending[:1], len(words))

    def watched(self, left: int) -> bool:
        """Return True where `fitting` may leave tokens out."""
        return left <= self._check_at

    def _continued(
        self, matcher: Matcher, left: int, found: tuple[int, ...] | None
    ) -> tuple[int, ...] | None:
        """Return the rest of the last ending if it is shorter than `found`, else `found`; remember it."""
        last, room = self._planned
        rest = last[room - left :] if room > left else ()
        shorter = rest and (found is None or len(rest) < len(found)) and _completes(matcher, rest)
        ending = rest if shorter else found
        self._planned = ending or (), left
        return ending


def _text(matcher: Matcher, words: NDArray[np.uint32], spare: int) -> NDArray[np.uint32]:
    """Return the mask of tokens that lengthen the shortest ending by less than `spare` tokens."""
    hints = matcher.hints
    if spare <= 0:
        return np.zeros_like(words)
    if spare > SLACK:
        if _in_text(matcher, words):
            return hints.text
        return hints.inside if spare > ESCAPE and _in_string(matcher, words) else hints.plain
    if _in_text(matcher, words):
        return hints.text & hints.whole
    return hints.plain & hints.whole if _in_string(matcher, words) else np.zeros_like(words)


def _fits(matcher: Matcher, token: int, left: int) -> bool:
    """Return True if the answer can still be complete after `token`."""
    state = matcher.copy()
    try:
        state.accept(token)
    except MlxtpError:
        return False
    return _ending(state, left) is not None


def _completes(matcher: Matcher, tokens: tuple[int, ...]) -> bool:
    state = matcher.copy()
    try:
        for token in tokens:
            state.accept(token)
    except MlxtpError:
        return False
    return state.complete


def _ending(matcher: Matcher, most: int) -> tuple[int, ...] | None:
    """Return tokens that complete the text, as few as a greedy search finds; None if they exceed `most`."""
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
    except MlxtpError:  # no way on
        return None
    return tuple(found)


def _closing(state: Matcher, last: list[int]) -> tuple[int, ...]:
    """Return tokens that bring JSON or a text closest to its end; for anything else, one that is allowed.

    A token that all of `last` repeat leads nowhere. Empty where nothing known ends a text.
    """
    words, hints = state.mask(), state.hints
    stale = last[0] if len(last) == SAME and len(set(last)) == 1 else -1
    if _in_text(state, words):
        ends = (*hints.suffixes, (hints.quote,))
        return next((end for end in ends if _leads_out(state, end)), ())
    if _in_string(state, words):
        return () if hints.quote == stale else (hints.quote,)
    for token in hints.closing:
        if token != stale and _has(words, token):
            return (token,)
    allowed = np.flatnonzero(unpack(words, 32 * len(words)))
    return (next((int(token) for token in allowed if token != stale), int(allowed[0])),)


def _leads_out(state: Matcher, end: tuple[int, ...]) -> bool:
    """Return True if `end` ends the text at `state`."""
    after = state.copy()
    try:
        for token in end:
            after.accept(token)
        return after.complete or not _in_text(after, after.mask())
    except MlxtpError:
        return False


def _in_string(state: Matcher, words: NDArray[np.uint32]) -> bool:
    """Return True in a string of JSON without a pattern: it may end or continue with any letter."""
    return _has(words, state.hints.quote) and _has(words, state.hints.letter)


def _in_text(state: Matcher, words: NDArray[np.uint32]) -> bool:
    """Return True in text that is no JSON: no string of JSON has a line break in it."""
    return _in_string(state, words) and _has(words, state.hints.newline)


def _has(words: NDArray[np.uint32], token: int) -> bool:
    return token >= 0 and bool(int(words[token >> 5]) >> (token & 31) & 1)


def _mask(tokens: list[int] | tuple[int, ...], length: int) -> NDArray[np.uint32]:
    words = np.zeros(length, np.uint32)
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words
