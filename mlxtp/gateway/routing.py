"""Choice of the group for a request: where its first token and its steps are expected soonest. Pure.

A group that has the beginning of a prompt in its KV caches computes less of it. So a gateway remembers the
beginnings of prompts, by the digests of `wire.messages.PrefixDigests`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..wire.messages import BLOCK

SPEED = 500.0  #: Prompt tokens per second of a group while no group of its deployment is measured.
TIE = 1.1  #: Expected times count as equal up to this factor, since speeds are measured.
ANSWER = 400  #: Tokens of an answer, as of the plan's chat, unless the request wants fewer.
#: Prompt tokens that take as long as a further row of a step: 1.4 with the embedded model on a CPU, 3.5 with
#: DeepSeek V4 Flash on two M3 Ultra, as published.
ROW = 2
ROWS = 64  #: Rows of a step. Further requests wait for answers to end.
LEAST_TOKENS = 64  #: A shorter prefill says nothing about speed.
MAX_HASHES = 512  #: Digests of beginnings that one group reports: 131,072 tokens.
KEPT = 0.9  #: Share of a measurement that is left after the next one.


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Work of one group, as its owner knows it.

    queued    prompt tokens that are not computed yet, of all its requests
    requests  open requests
    speed     prompt tokens that it computes per second; 0 where not measured
    prefixes  digests of beginnings that it has cached; see `PrefixSummary.hashes`
    """

    queued: int = 0
    requests: int = 0
    speed: float = 0.0
    prefixes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteOption:
    """A group that can take a request. It has `cached` tokens of its prompt.

    `here`: this agent has its rank 0.
    """

    group: str
    here: bool
    load: GroupLoad
    cached: int = 0


def load_tokens(answer: int, requests: int) -> int:
    """Return the prompt tokens that take as long as what open requests add to an answer of so many tokens."""
    return ROW * (answer * min(requests, ROWS) + ANSWER * max(requests - ROWS, 0))


def choose(prompt: int, options: Sequence[RouteOption], answer: int = ANSWER) -> RouteOption:
    """Return the option with the least expected time. There has to be one.

    That is the time to the first token, and the time that more open requests than elsewhere add to an answer
    of at most `answer` tokens. Where times are about equal: fewest open requests, then a group here, then by
    id. A group that was not measured counts as fast as the fastest one, so that it gets requests and is
    measured.
    """
    answer = min(answer, ANSWER)
    unknown = max(option.load.speed for option in options) or SPEED
    loads = [load_tokens(answer, option.load.requests) for option in options]
    times = [
        (max(prompt - each.cached, 0) + each.load.queued + load - min(loads)) / (each.load.speed or unknown)
        for each, load in zip(options, loads, strict=True)
    ]
    most = min(times) * TIE
    equal = [option for option, seconds in zip(options, times, strict=True) if seconds <= most]
    return min(equal, key=lambda each: (each.load.requests, not each.here, each.group))


class PrefillMeter:
    """Measured prefill speed of one group. It counts time only while the group has prompts to compute."""

    def __init__(self) -> None:
        self.speed = 0.0  #: Tokens per second; 0 before the first measurement.
        self._tokens = self._seconds = 0.0
        self._since = 0.0

    def begin(self, now: float) -> None:
        """Note that the group gets a prompt and had none before. `now` in seconds."""
        self._since = now

    def computed(self, tokens: int, now: float) -> None:
        """Note that the group has computed so many more tokens of prompts."""
        seconds, self._since = now - self._since, now
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        self._tokens = self._tokens * KEPT + tokens
        self._seconds = self._seconds * KEPT + seconds
        self.speed = self._tokens / self._seconds


# --- beginnings of prompts that groups have -------------------------------------------------------------


class PrefixSummary:
    """Beginnings that a group has computed, the latest last, within the room of its KV caches.

    room  tokens that the KV caches may hold; 0 without a bound
    """

    def __init__(self, room: int = 0) -> None:
        self._hashes: dict[bytes, None] = {}
        self.bound(room)

    def bound(self, room: int) -> None:
        """Change the room."""
        self._most = min(room // BLOCK, MAX_HASHES) if room else MAX_HASHES
        self._trim()

    def note(self, hashes: Sequence[bytes]) -> None:
        """Note that the group has, or will have, these blocks of one sequence. The oldest give way.

        The first blocks of a sequence count as used after its last ones, which so give way before them.
        """
        for each in reversed(hashes):
            self._hashes.pop(each, None)
            self._hashes[each] = None
        self._trim()

    def _trim(self) -> None:
        while len(self._hashes) > self._most:
            del self._hashes[next(iter(self._hashes))]

    def match(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading tokens of a sequence that the group has cached."""
        known = self._hashes
        return next((count * BLOCK for count in range(len(hashes), 0, -1) if hashes[count - 1] in known), 0)

    def replace(self, hashes: Iterable[bytes]) -> None:
        """Take over the owner's report, the oldest first."""
        self._hashes = dict.fromkeys(hashes)

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """The report for other gateways: at most `MAX_HASHES` digests, the oldest first."""
        return tuple(self._hashes)
