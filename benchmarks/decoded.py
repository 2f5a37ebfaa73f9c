"""One sequence that was decoded, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens, and tokens per second: `rate` after the first one, `whole_rate` from the request on.

    `accepted` of the tokens were right drafts, of all that were `drafted`.
    """

    tokens: tuple[int, ...]
    rate: float
    whole_rate: float
    accepted: int = 0
    drafted: int = 0

    @classmethod
    def timed(
        cls, tokens: Sequence[int], began: float, times: Sequence[float], accepted: int = 0, drafted: int = 0
    ) -> Decoded:
        """`times[i]` is when token i was there, in seconds; at least two tokens."""
        rate, whole_rate = (len(tokens) - 1) / (times[-1] - times[0]), len(tokens) / (times[-1] - began)
        return cls(tuple(tokens), rate, whole_rate, accepted, drafted)
