"""Drafts: likely next tokens, found in the sequence so far.

One forward over all tokens of a draft checks it. Right tokens save forwards, wrong ones cost the width of
one. `Lookup` finds drafts, `Adaptive` limits their length, `Payoff` pauses lengths that do not pay. None
touches logits, so a wrong draft changes no token.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

SHORTEST_MATCH = 3  # tokens that must have occurred before, in this order, for a draft
LONGEST_MATCH = 64  # most tokens of a match that count
CANDIDATES = 16  # latest earlier places that are compared


class Lookup:
    """Prompt and answer of one sequence, and the places in it that match its end.

    Drafts come from the place of the longest match with the end, among the `CANDIDATES` latest places that
    match `SHORTEST_MATCH` tokens; the latest of equals. The place is kept while its predictions are right.
    Memory: one dictionary entry and 8 bytes a token.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        #: End of the latest n-gram by its tokens, without the one at the sequence's own end.
        self._latest: dict[tuple[int, ...], int] = {}
        #: For each n-gram before another token, in order, the end of the same one before; 0 for none.
        self._previous = array("q")
        self._place = 0  # index of the token that predicts the next one; 0 for none
        self._matched = 0
        shortest = SHORTEST_MATCH
        grams = zip(*(self._tokens[i:-1] for i in range(shortest)), strict=False)
        for end, gram in enumerate(grams, shortest):
            self._previous.append(self._latest.get(gram, 0))
            self._latest[gram] = end
        self._find()

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def matched(self) -> int:
        """Number of tokens before the draft's place that match the end; 0 without a place, at most 64."""
        return self._matched

    def append(self, token: int) -> None:
        """Append `token` to the sequence."""
        tokens = self._tokens
        if len(tokens) >= SHORTEST_MATCH:
            gram = tuple(tokens[-SHORTEST_MATCH:])
            self._previous.append(self._latest.get(gram, 0))
            self._latest[gram] = len(tokens)
        right = self._place > 0 and tokens[self._place] == token
        tokens.append(token)
        if right:
            self._place += 1
            self._matched = min(self._matched + 1, LONGEST_MATCH)
        else:
            self._find()

    def draft(self, limit: int) -> tuple[int, ...]:
        """Return the next `limit` tokens, or none. Past the end of the sequence, the draft repeats itself."""
        if not self._place or limit <= 0:
            return ()
        known = self._tokens[self._place : self._place + limit]
        while len(known) < limit:
            known += known[: limit - len(known)]
        return tuple(known)

    def _find(self) -> None:
        self._place = self._matched = 0
        tokens = self._tokens
        if len(tokens) < SHORTEST_MATCH:
            return
        place = self._latest.get(tuple(tokens[-SHORTEST_MATCH:]), 0)
        for _ in range(CANDIDATES):
            if not place:
                return
            matched = self._match(place)
            if matched > self._matched:
                self._place, self._matched = place, matched
            place = self._previous[place - SHORTEST_MATCH]

    def _match(self, place: int) -> int:
        """Return how many tokens before `place` match the end; at least the shortest match."""
        tokens, end = self._tokens, len(self._tokens)
        matched = SHORTEST_MATCH
        while (
            matched < min(place, LONGEST_MATCH) and tokens[place - 1 - matched] == tokens[end - 1 - matched]
        ):
            matched += 1
        return matched


MOST_DRAFTED = 16  # tokens of the longest draft
CREDIT_PER_STEP = 0.02  # credit that a step earns; a wrong draft costs 1
CREDIT_PER_TOKEN = 0.25  # credit that a draft's right token earns
FIRST_CREDIT = 2.0
MOST_CREDIT = 4.0
#: Tokens that must match, by whole credits. A sequence with little credit risks it on likely drafts only.
LEAST_MATCH = (LONGEST_MATCH + 1, 12, 6, SHORTEST_MATCH, SHORTEST_MATCH)


class Adaptive:
    """Limit of one sequence's drafts, from the success of earlier ones.

    A draft of which less than a quarter was right is wrong and costs a credit. Right tokens earn some, and
    each step earns a little. So there are never more wrong drafts than 2 + 0.02 * steps + 0.25 * right
    tokens.
    """

    def __init__(self, most: int = MOST_DRAFTED) -> None:
        self._most = most
        self._credit = FIRST_CREDIT

    def limit(self, matched: int | None = None) -> int:
        """Return how many tokens the next step may draft, 0 for none. Changes nothing.

        `matched` is the lookup's. A draft is no longer than its match, so that it doubles while drafts are
        right. Without `matched`, the length follows the credit.
        """
        credits = int(self._credit)
        if not credits:
            return 0
        if matched is None:
            return min(4 * credits, self._most)
        return min(matched, self._most) if matched >= LEAST_MATCH[credits] else 0

    def report(self, drafted: int, accepted: int) -> None:
        """Record a step that carried `drafted` tokens, of which the first `accepted` were right.

        Every step counts, one without a draft as (0, 0).
        """
        self._credit += CREDIT_PER_STEP + CREDIT_PER_TOKEN * accepted
        if is_wrong(drafted, accepted):
            self._credit -= 1.0
        self._credit = min(self._credit, MOST_CREDIT)


RECENT = 0.2  #: weight of the newest step in the averages
LEAST_STEPS = 16  #: with drafts, before they are judged
PAUSE_STEPS = 256  #: without drafts of a length, before it is tried again


@dataclass(slots=True)
class _Width:
    """Averages of recent steps with drafts of one length: a row's tokens, and time in plain steps."""

    gain: float = 0.0
    cost: float = 0.0
    seen: int = 0
    pause: int = 0


class Payoff:
    """Comparison of steps with drafts or forced tokens to steps without, in tokens a second.

    A wide step may cost many times as much. All rows are padded to the widest, and models with a compressed
    cache unpack all of it then. Steps are compared with plain ones of equally many rows, by the
    length of their longest draft, rounded up to a power of two. Forced tokens are drafts that are right, and
    are judged by a `Payoff` of their own. `most_cost`: of one step, in plain steps.
    """

    def __init__(self, most_cost: int = MOST_DRAFTED) -> None:
        self._most_cost = most_cost
        self._plain_s: dict[int, float] = {}
        self._widths: defaultdict[int, _Width] = defaultdict(_Width)

    def limit(self, most: int) -> int:
        """Return the longest length of drafts, up to `most`, that is not paused; 0 for none."""
        while most > 0 and self._widths[_bucket(most)].pause:
            most = _bucket(most) // 2
        return max(most, 0)

    def step(self, rows: int, tokens: int, seconds: float, *, drafted: int) -> None:
        """Record a step of `rows` rows that gave `tokens` tokens in all. `drafted`: its longest draft."""
        for width in self._widths.values():
            width.pause = max(width.pause - 1, 0)
        if not drafted:
            usual = self._plain_s.get(rows, seconds)
            self._plain_s[rows] = usual + RECENT * (seconds - usual)
            return
        if rows not in self._plain_s:
            return
        width = self._widths[_bucket(drafted)]
        weight = RECENT if width.seen else 1.0
        width.gain += weight * (tokens / rows - width.gain)
        # Bounded, because a step that compiled kernels is no measure.
        width.cost += weight * (min(seconds / self._plain_s[rows], self._most_cost) - width.cost)
        width.seen += 1
        if width.seen >= LEAST_STEPS and width.cost > width.gain:
            width.seen, width.pause = 0, PAUSE_STEPS


def _bucket(length: int) -> int:
    """Return `length`, at least 1, rounded up to a power of two."""
    return 1 << (length - 1).bit_length()


def is_wrong(drafted: int, accepted: int) -> bool:
    """Return True if a draft cost more than it saved: less than a quarter of it was right."""
    return 4 * accepted < drafted
