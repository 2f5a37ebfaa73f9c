"""Results of a soak, as numbers, as a table, and as a list of what is wrong with it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.table import Table

from mlxtp.errors import Code

from ..chaos.findings import percentile
from .load import CUT, ENDED, NO_CLAIM, RIGHT, WRONG

_WARM_UP = 400
"""Right answers to all clients before a process's samples count: caches fill, and code is run for the first
time. A busy machine takes long for so many."""
_GROWTH = 0.05
_GROWTH_MB = 4.0
"""A process that keeps nothing of what is over may grow by these together in a whole run."""
_GRAPH_MB = 0.45
"""Memory of a traced graph of the tiny model's steps, as glibc counts it."""
_DESCRIPTORS = 2
_POOL = min(32, (os.cpu_count() or 1) + 4)
"""Threads of asyncio's pool, which begins one for each piece of work until it has so many."""
_OF_A_RANK = 4
"""Descriptors, and threads, at most, that an agent has for each of its rank processes."""


@dataclass(frozen=True)
class Sample:
    """A process at a moment, in seconds since the run began. Until then `answers` were right, of all."""

    at: float
    memory_mb: float
    descriptors: int
    threads: int
    answers: int
    ranks: int
    graphs: int = 0  #: that a rank has traced and keeps


@dataclass
class Watched:
    """A process for as long as it was watched."""

    name: str
    samples: list[Sample] = field(default_factory=list)
    idle: tuple[Sample, Sample] | None = None
    """Before the first client asked, and after the last had gone."""

    @property
    def warm(self) -> list[Sample]:
        """None if too few answers came meanwhile: then nothing is known of its growth."""
        return [each for each in self.samples if each.answers - self.samples[0].answers >= _WARM_UP]

    @property
    def growth_mb(self) -> float:
        """Twice what its second half's least is above its first half's: of steady growth, all.

        Memory swings by what is computed at once; only what a process keeps lifts its least. Graphs are
        bounded, and take long to fill.
        """
        warm = self.warm
        half = len(warm) // 2
        if not half:
            return 0.0
        first, second = (
            min(each.memory_mb - _GRAPH_MB * each.graphs for each in part)
            for part in (warm[:half], warm[half:])
        )
        return 2 * (second - first)

    @property
    def allowed_mb(self) -> float:
        return _GROWTH_MB + _GROWTH * (self.warm[0].memory_mb if self.warm else 0.0)


@dataclass(frozen=True)
class Fault:
    """`pause_s`: until all was ready again; None if nothing was to happen, and nothing did."""

    name: str
    at: float
    pause_s: float | None = None
    problem: str = ""


@dataclass
class Asked:
    """Outcomes of the requests to one agent."""

    agent: str
    outcomes: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    hung: int = 0
    complaints: list[str] = field(default_factory=list)


@dataclass
class Soak:
    """A whole run of a cluster. The agent `steady` is never ended, so its clients lose nothing."""

    shape: str
    seed: int
    seconds: float
    steady: str
    faults: list[Fault] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    processes: list[Watched] = field(default_factory=list)
    cut_short_at: float | None = None
    """The time at which a user ended it, in seconds since it began."""
    left_over: list[str] = field(default_factory=list)
    """Left-overs after everything has ended."""

    @property
    def problems(self) -> list[str]:
        """One sentence each; none after a good run."""
        found = [
            f"{fault.name} at {fault.at:.0f} s: {fault.problem}" for fault in self.faults if fault.problem
        ]
        for asked in self.asked:
            if wrong := asked.outcomes[WRONG]:
                found.append(f"{wrong} answers of {asked.agent} are wrong; the first: {asked.complaints[0]}")
            if asked.hung:
                found.append(f"{asked.hung} requests to {asked.agent} have no end")
            if codes := [code for code in asked.codes if code != Code.SHUTTING_DOWN]:
                found.append(f"requests to {asked.agent} ended with {', '.join(sorted(codes))}")
            if not asked.outcomes[RIGHT]:
                found.append(f"{asked.agent} has answered no one")
            if asked.agent == self.steady:
                found += [
                    f"{count} requests to {asked.agent}, which was there all the time: {outcome}"
                    for outcome in (CUT, ENDED, NO_CLAIM)
                    if (count := asked.outcomes[outcome])
                ]
        for process in self.processes:
            if process.growth_mb > process.allowed_mb:
                found.append(
                    f"{process.name} grew by {process.growth_mb:.1f} MB; {process.allowed_mb:.1f} are allowed"
                )
            if process.idle is not None:
                first, last = process.idle
                more = _OF_A_RANK * max(last.ranks - first.ranks, 0)
                for what, usual in (("descriptors", _DESCRIPTORS), ("threads", _POOL)):
                    before, after = getattr(first, what), getattr(last, what)
                    if after > before + usual + more:
                        found.append(
                            f"{process.name} had {before} {what} before anybody asked, and {after} after"
                        )
        return found + self.left_over

    def as_json(self) -> dict[str, Any]:
        # Python 3.11's asdict makes the keys of a Counter pairs.
        counted = [
            vars(asked) | {name: dict(getattr(asked, name)) for name in ("outcomes", "codes", "kinds")}
            for asked in self.asked
        ]
        return asdict(replace(self, asked=[])) | {
            "asked": counted,
            "problems": self.problems,
            "growth_mb": {process.name: round(process.growth_mb, 2) for process in self.processes},
        }


def tables(soak: Soak) -> list[Table]:
    """Requests, faults, processes."""
    outcomes = sorted({outcome for asked in soak.asked for outcome in asked.outcomes})
    requests = _table("requests", "to", "tokens", *outcomes, "hung")
    for asked in soak.asked:
        counts = (asked.tokens, *(asked.outcomes[outcome] for outcome in outcomes), asked.hung)
        requests.add_row(asked.agent, *(f"{count:,}" for count in counts))
    faults = _table("faults (s until all is ready: p50 / p95 / max)", "fault", "times", "seconds")
    for name in sorted({fault.name for fault in soak.faults}):
        same = [fault for fault in soak.faults if fault.name == name]
        pauses = [fault.pause_s for fault in same if fault.pause_s is not None]
        shown = [percentile(pauses, 0.5), percentile(pauses, 0.95), max(pauses)] if pauses else []
        faults.add_row(name, str(len(same)), " / ".join(f"{each:.1f}" for each in shown) or "–")
    processes = _table("processes", "process", "minutes", "MB", "grew by", "descriptors", "threads")
    for process in soak.processes:
        warm = process.warm or process.samples
        processes.add_row(
            process.name,
            f"{(process.samples[-1].at - process.samples[0].at) / 60:.1f}",
            f"{warm[0].memory_mb:.1f} → {warm[-1].memory_mb:.1f}",
            f"{process.growth_mb:+.1f} MB" if process.warm else "–",
            *(" → ".join(map(str, _counts(process, what))) for what in ("descriptors", "threads")),
        )
    return [requests, faults, processes]


def _counts(process: Watched, what: str) -> tuple[int, int]:
    """Return the counts of the idle time, or else the least and the most."""
    if process.idle is not None:
        return getattr(process.idle[0], what), getattr(process.idle[1], what)
    values = [getattr(sample, what) for sample in process.warm or process.samples]
    return min(values), max(values)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
