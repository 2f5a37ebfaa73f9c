"""Choice of the group that is expected to answer a request soonest. Pure.

A group computes less of a prompt if its KV caches contain a prefix of it. So a gateway remembers prefixes of
prompts, by the digests in `wire.messages.PrefixDigests`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..wire.messages import BLOCK

SPEED = 500.0  #: Assumed prompt tokens per second until a group of the deployment is measured.
TIE = 1.1  #: Expected times count as equal up to this factor, since speeds are measured.
ANSWER = 400  #: Assumed tokens of an answer, as in the plan's chat, unless the request wants fewer.
#: Prompt tokens that take as long as one more row of a step: 1.4 with the embedded model on a CPU, 3.5 with
#: DeepSeek V4 Flash on two M3 Ultra, as published.
ROW = 2
ROWS = 64  #: Rows of a step. More requests than that wait for others to end.
LEAST_TOKENS = 64  #: A shorter prefill says nothing about speed.
MAX_HASHES = 512  #: Prefix digests that one group reports: 131,072 tokens.
KEPT = 0.9  #: Weight that a measurement keeps after each later one.


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Work of one group, as its owner knows it.

    queued    prompt tokens of all its requests that are not computed yet
    requests  open requests
    speed     prompt tokens per second; 0 if not measured
    prefixes  digests of the prefixes in its cache; see `PrefixSummary.hashes`
    """

    queued: int = 0
    requests: int = 0
    speed: float = 0.0
    prefixes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteOption:
    """A group that can take a request, with `cached` tokens of its prompt.

    `here`: this agent has its rank 0.
    """

    group: str
    here: bool
    load: GroupLoad
    cached: int = 0


def load_tokens(answer: int, requests: int) -> int:
    """Return, in prompt tokens, the time that open requests add to an answer of `answer` tokens."""
    return ROW * (answer * min(requests, ROWS) + ANSWER * max(requests - ROWS, 0))


def choose(prompt: int, options: Sequence[RouteOption], answer: int = ANSWER) -> RouteOption:
    """Return the option with the least expected time. `options` is not empty.

    That is the time to the first token, plus the time that more open requests than elsewhere add to an answer
    of at most `answer` tokens. If times are about equal, it prefers fewer open requests, then a group here,
    then the lower id. An unmeasured group counts as fast as the fastest, so it gets requests to measure.
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
    """Measured prefill speed of one group, over the time when it has prompts to compute."""

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


# --- prefixes of prompts in the groups' caches -----------------------------------------------------------


class PrefixSummary:
    """Prefixes that a group has computed, the latest last, within the room of its KV caches.

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
        """Note that the group has, or will have, these blocks of one sequence. Drop the oldest.

        The first blocks of a sequence count as the most recently used, so its last blocks go first.
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
        """Replace all by the owner's report, oldest first."""
        self._hashes = dict.fromkeys(hashes)

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """The report for other gateways: at most `MAX_HASHES` digests, the oldest first."""
        return tuple(self._hashes)
