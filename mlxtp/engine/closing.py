"""Complete answers under a grammar: JSON closes before its budget ends. On rank 0 alone, without MLX.

A string or an array without a bound goes on for as long as the model likes. Near the end of the budget,
`Room` allows only tokens after which the shortest known ending still fits.
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
MOST_STEPS = 1000  # of all candidates' endings together; others wait for this step
LONGEST_ENDING = 1024  # tokens
SAME = 4  # times in a row that an ending may repeat a token
GROWTH = 8  # tokens by which the ending grows at most for each token of the answer, beyond the margin


class Room:
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
        if left > self._check_at:
            return words
        ending = self._ending(matcher, left)
        spare = 0 if ending is None else left - len(ending)
        if ending is None or spare > self._margin:  # without an ending: perhaps there is one later
            self._check_at = left - max(1, (left if ending is None else spare - self._margin) // GROWTH)
            return words
        allowed = [int(token) for token in np.flatnonzero(unpack(words, 32 * len(words)))]
        if len(allowed) <= min(MOST_TRIED, MOST_STEPS // max(len(ending), 1)):
            kept = [each for each in allowed if each in ending[:1] or _fits(matcher, each, left - 1)]
            self.cut = self.cut or len(kept) == 1 < len(allowed)
            return _mask(kept, len(words))
        free = np.zeros_like(words) if ending else words
        if ending and spare > SLACK:
            hints, escapes = matcher.hints, spare > ESCAPE
            free = words & (hints.inside if escapes and _in_string(matcher, words) else hints.plain)
        elif ending:
            self.cut = True
        return free | _mask(ending[:1], len(words))

    def _ending(self, matcher: Matcher, left: int) -> tuple[int, ...] | None:
        """Return the shortest known ending, perhaps the rest of the last one, and remember it."""
        last, room = self._planned
        rest = last[room - left :] if room > left else ()
        ending = _ending(matcher, left)
        if rest and (ending is None or len(rest) < len(ending)) and _completes(matcher, rest):
            ending = rest
        self._planned = ending or (), left
        return ending


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
            tokens = state.forced(most + 1) or (_closing(state, found[-SAME:]),)
            found += tokens
            if len(found) > most:
                return None
            for token in tokens:
                state.accept(token)
    except MlxtpError:  # no way on
        return None
    return tuple(found)


def _closing(state: Matcher, last: list[int]) -> int:
    """Return the token that brings JSON closest to its end; for other text, any that is allowed.

    A token that all of `last` repeat leads nowhere.
    """
    words, hints = state.mask(), state.hints
    if _in_string(state, words):
        return hints.quote
    stale = last[0] if len(last) == SAME and len(set(last)) == 1 else -1
    for token in hints.closing:
        if token != stale and _has(words, token):
            return token
    allowed = np.flatnonzero(unpack(words, 32 * len(words)))
    return next((int(token) for token in allowed if token != stale), int(allowed[0]))


def _in_string(state: Matcher, words: NDArray[np.uint32]) -> bool:
    """Return True in a string of JSON without a pattern: it may end, and it may go on with any letter."""
    return _has(words, state.hints.quote) and _has(words, state.hints.letter)


def _has(words: NDArray[np.uint32], token: int) -> bool:
    return token >= 0 and bool(int(words[token >> 5]) >> (token & 31) & 1)


def _mask(tokens: list[int] | tuple[int, ...], length: int) -> NDArray[np.uint32]:
    words = np.zeros(length, np.uint32)
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words
