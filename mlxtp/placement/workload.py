"""Workloads: the kind of requests whose expected time a placement minimizes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

ENOUGH = 32  #: Requests from which a workload is learnt.
MUCH = 1.5  #: Factor by which a mean must differ from the present workload to count as another one.


@dataclass(frozen=True, slots=True)
class Workload:
    """A typical request, and how many come at once.

    prompt   tokens of its prompt
    cached   those of them that are not computed, because a prefix cache has them
    answer   tokens of its answer
    at_once  requests that run at the same time, 1 or more
    """

    name: str
    prompt: int
    cached: int
    answer: int
    at_once: int = 1

    def __str__(self) -> str:
        """Return it in words."""
        cached = f" ({self.cached:,} cached)" if self.cached else ""
        at_once = f", {self.at_once} at once" if self.at_once > 1 else ""
        return f"{self.prompt:,} tokens in{cached}, {self.answer:,} out{at_once}"


CHAT = Workload("chat", 4_000, 0, 400)
AGENT = Workload("agent", 30_000, 27_000, 300)
BATCH = Workload("batch", 1_000, 0, 250, 16)
LEARNT = "learnt"
AUTO = "auto"
#: Workloads by the names that the setting accepts.
WORKLOADS: Mapping[str, Workload] = {each.name: each for each in (CHAT, AGENT, BATCH)}


def learnt(requests: int, mean: Workload, now: Workload) -> Workload:
    """Return the workload of `requests` requests with this mean; `now` until they are enough and differ much.

    Plans thus stay as they are while requests only waver.
    """
    if requests < ENOUGH:
        return now
    pairs = zip(_counts(mean), _counts(now), strict=True)
    return mean if any(a > MUCH * b or b > MUCH * a for a, b in pairs) else now


def _counts(workload: Workload) -> tuple[int, ...]:
    """Return the numbers that a request's time depends on, each at least 1."""
    _, prompt, cached, answer, at_once = astuple(workload)
    return max(1, prompt), max(1, prompt - cached), max(1, answer), at_once
