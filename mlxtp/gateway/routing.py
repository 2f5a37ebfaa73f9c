"""Choice of the group for a request: the one from which the first token is expected soonest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SPEED = 500.0  #: Prompt tokens per second of a group while no group of its deployment is measured.
TIE = 1.1  #: Expected times count as equal up to this factor, since speeds are measured.
LEAST_TOKENS = 64  #: A shorter prefill says nothing about speed.
KEPT = 0.9  #: Share of a measurement that is left after the next one.


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Work of one group, as its owner knows it.

    queued    prompt tokens that are not computed yet, of all its requests
    requests  open requests
    speed     prompt tokens that it computes per second; 0 where not measured
    prefixes  hashes of beginnings that it has cached; see `prefixes.PrefixSummary.hashes`
    """

    queued: int = 0
    requests: int = 0
    speed: float = 0.0
    prefixes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteOption:
    """A group that can take a request. It has `cached` tokens of its prompt.

    `here`: this agent has its rank 0.
    """

    group: str
    here: bool
    load: GroupLoad
    cached: int = 0


def seconds_to_first_token(prompt: int, option: RouteOption, speed: float) -> float:
    """Return the expected seconds for a prompt of so many tokens at `speed` tokens per second."""
    return (max(prompt - option.cached, 0) + option.load.queued) / speed


def choose(prompt: int, options: Sequence[RouteOption]) -> RouteOption:
    """Return the option with the first token soonest. There has to be one.

    Where times are about equal: fewest open requests, then a group here, then by id. A group that was not
    measured counts as fast as the fastest one, so that it gets requests and is measured.
    """
    unknown = max(option.load.speed for option in options) or SPEED
    times = [seconds_to_first_token(prompt, each, each.load.speed or unknown) for each in options]
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
