"""Prompt lookup: drafts copied from earlier in the same sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

SHORTEST_MATCH = 3  # the last tokens must have occurred before, in this order, for a draft
LONGEST_MATCH = 64  # most tokens of a match to count
CANDIDATES = 16  # latest earlier places to compare


class Lookup:
    """Prompt and answer of one sequence. Drafts continue the longest earlier match of its end."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        #: Last end of each n-gram, apart from the end of the sequence.
        self._latest: dict[tuple[int, ...], int] = {}
        #: For each n-gram in order, where the same one ended before; 0 for nowhere.
        self._previous = array("q")
        self._place = 0  # index of the token that is the next draft; 0 for none
        self.matched = 0  #: Length of the match before that place, at most LONGEST_MATCH.
        shortest = SHORTEST_MATCH
        grams = zip(*(self._tokens[i:-1] for i in range(shortest)), strict=False)
        for end, gram in enumerate(grams, shortest):
            self._previous.append(self._latest.get(gram, 0))
            self._latest[gram] = end
        self._find()

    def append(self, token: int) -> None:
        tokens = self._tokens
        if len(tokens) >= SHORTEST_MATCH:
            gram = tuple(tokens[-SHORTEST_MATCH:])
            self._previous.append(self._latest.get(gram, 0))
            self._latest[gram] = len(tokens)
        right = self._place > 0 and tokens[self._place] == token
        tokens.append(token)
        if right:
            self._place += 1
            self.matched = min(self.matched + 1, LONGEST_MATCH)
        else:
            self._find()

    def draft(self, limit: int) -> tuple[int, ...]:
        """Return the next draft tokens. A draft that reaches the end of the sequence repeats itself."""
        if not self._place or limit <= 0:
            return ()
        known = self._tokens[self._place : self._place + limit]
        while len(known) < limit:
            known += known[: limit - len(known)]
        return tuple(known)

    def _find(self) -> None:
        self._place = self.matched = 0
        tokens = self._tokens
        if len(tokens) < SHORTEST_MATCH:
            return
        place = self._latest.get(tuple(tokens[-SHORTEST_MATCH:]), 0)
        for _ in range(CANDIDATES):
            if not place:
                return
            matched = self._match(place)
            if matched > self.matched:
                self._place, self.matched = place, matched
            place = self._previous[place - SHORTEST_MATCH]

    def _match(self, place: int) -> int:
        tokens, end = self._tokens, len(self._tokens)
        same = SHORTEST_MATCH
        while same < min(place, LONGEST_MATCH) and tokens[place - 1 - same] == tokens[end - 1 - same]:
            same += 1
        return same
