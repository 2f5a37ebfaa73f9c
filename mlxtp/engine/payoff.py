"""Choice of the source and number of drafts with the most tokens a second, by measured cost and acceptance.

Drafts pay or rest: a source that does not beat plain steps is asked again after pauses that double, and the
time lost so is limited. Pure: seconds are passed in.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, NamedTuple

Proposer = Literal["lookup", "mtp", "draft"]
#: A proposer, and a lookup's class of match length: longer matches are accepted much more often.
Source = tuple[Proposer, int]

PROPOSERS: tuple[Proposer, ...] = ("lookup", "mtp", "draft")
MOST_DRAFTED = 16  #: tokens of the longest draft of one row
LENGTHS = (1, 2, 4, 8, MOST_DRAFTED)  #: numbers of drafts that are compared
RECENT_STEPS = 1000  #: steps over which the gain in heartbeats is averaged


@dataclass(slots=True)
class DraftUse:
    """An epoch's counts of drafts, for heartbeats."""

    drafted: list[int] = field(default_factory=lambda: [0] * len(PROPOSERS))  # tokens by PROPOSERS
    accepted: list[int] = field(default_factory=lambda: [0] * len(PROPOSERS))
    right_at: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTED)  # by their place in the draft
    steps: int = 0
    widths: int = 0  # sum over steps of the most tokens fed to one row
    mtp: bool = False  # the model's MTP head is loaded
    _took_s: float = 0.0
    _plain_s: float = 0.0

    def figures(self) -> dict[str, Any]:
        counts = {name: tuple(getattr(self, name)) for name in ("drafted", "accepted", "right_at")}
        gain = self._plain_s / self._took_s if self._took_s else 0.0
        steps = {"decode_steps": self.steps, "decode_widths": self.widths}
        return {**counts, **steps, "draft_gain": gain, "mtp": self.mtp}

    def checked(self, proposer: Proposer, drafted: int, right: int) -> None:
        self.drafted[PROPOSERS.index(proposer)] += drafted
        self.accepted[PROPOSERS.index(proposer)] += right
        for place in range(min(right, MOST_DRAFTED)):
            self.right_at[place] += 1

    def took(self, seconds: float, plain_s: float) -> None:
        """`plain_s`: seconds that plain steps take for as many tokens; 0 if unknown."""
        if plain_s:
            self._took_s += seconds - self._took_s / RECENT_STEPS
            self._plain_s += plain_s - self._plain_s / RECENT_STEPS


SAMPLES, FEW = 10, 3  #: newest steps of a kind to average; plain steps to measure before any drafts
SHORT = 1024  #: tokens of a row; costs are kept apart for each doubling above it
WIDTHS = (1, *[1 + drafts for drafts in LENGTHS])  #: tokens fed to a row
WIDER = 0.1  #: guess: cost of each token fed to a row, in plain steps
TOO_SLOW = 2.0  #: plain steps for each token of a step that needs no second one to count


class StepKind(NamedTuple):
    """`fed`: tokens that the host feeds a row: 1 and the drafts, or 0 in a plain step, which runs ahead."""

    rows: int
    fed: int = 0
    proposer: Proposer = "lookup"


class StepCosts:
    """Table of average seconds of steps by context and kind, with rows rounded up to a power of two."""

    def __init__(self) -> None:
        self.context = 0  #: doublings of SHORT in the longest row, rounded up
        self._average_s: dict[tuple[int, StepKind], float] = {}
        self.newest = defaultdict[tuple[int, StepKind], deque[float]](lambda: deque(maxlen=SAMPLES))
        self._drafting = 0  # steps since the last plain one

    def plain_s(self, rows: int) -> float:
        """Return the seconds of a plain step; 0 before enough were measured."""
        return self._average_s.get((self.context, StepKind(bucket(rows))), 0.0)

    def table(self, rows: int, proposer: Proposer) -> dict[int, float]:
        """Return costs in plain steps by tokens fed: measured, or estimated from shorter or fewer rows."""
        known = {1: 1 + WIDER}
        for context, halved in product(range(self.context, -1, -1), range(bucket(rows).bit_length())):
            fewer = bucket(rows) >> halved
            if plain_s := self._average_s.get((context, StepKind(fewer))):
                kinds = [(context, StepKind(fewer, fed, proposer)) for fed in WIDTHS]
                if found := [at for at in kinds if at in self._average_s]:
                    known |= {at[1].fed: self._average_s[at] / plain_s for at in found}
                    break
        costs = [_estimate(known, fed) for fed in WIDTHS]
        return {fed: min(costs[at:]) for at, fed in enumerate(WIDTHS)}  # a longer draft costs more

    def took(self, kind: StepKind, tokens: int, seconds: float) -> bool:
        """Record a step; return True if both of its kind are slow. The first may have compiled kernels."""
        slow = 0 < TOO_SLOW * tokens * self.plain_s(kind.rows) < seconds * kind.rows
        kind = kind._replace(rows=bucket(kind.rows))
        enough = slow and any(kind == earlier for _, earlier in self.newest)
        newest = self.newest[self.context, kind]
        newest += [seconds] * (2 if enough and not newest else 1)
        if len(newest) >= (2 if kind.fed else FEW):  # the results of two plain steps may arrive together
            usual = sorted(newest)[: max(len(newest) * 4 // 5, 1)]
            self._average_s[self.context, kind] = sum(usual) / len(usual)
        self._drafting = self._drafting % LONGEST_PAUSE + 1 if kind.fed else 0
        if self._drafting == LONGEST_PAUSE:
            self._average_s.pop((self.context, StepKind(kind.rows)), None)
            self.newest[self.context, StepKind(kind.rows)].clear()
        return slow and len(newest) == 2

    def forget(self, proposer: Proposer) -> None:
        for at in [at for at in self.newest if at[1].fed and at[1].proposer == proposer]:
            self.newest[at].clear()
            self._average_s.pop(at, None)


def _estimate(known: Mapping[int, float], fed: int) -> float:
    low, high = max([at for at in known if at <= fed]), min([at for at in known if at >= fed], default=0)
    if high > low:
        return known[low] + (known[high] - known[low]) * (fed - low) / (high - low)
    return known[low] * (1 + WIDER * fed) / (1 + WIDER * low)


#: Acceptance of drafts, given that the drafts before were accepted: first, second, next two, next four, and
#: the rest, each with its weight in reports. A place without reports takes the one before.
Shares = list[tuple[float, float]]

FIRST_SHARE: Mapping[Source, float] = {
    ("lookup", 0): 0.4, ("lookup", 1): 0.65, ("lookup", 2): 0.9, ("mtp", 0): 0.7, ("draft", 0): 0.7,
}  # fmt: skip
FIRST_WEIGHT, MOST_WEIGHT = 2.0, 20  #: weight of a first share in reports; most reports in an average
DRIFT = 0.01  #: with each report too short to reach it, a place moves this far to the place before it
LIKELY, TRIED = 0.05, 2  #: least probability of a draft to feed it; most drafts before the first report


def source_of_match(matched: int) -> Source:
    return "lookup", 0 if matched < 6 else 1 if matched < 12 else 2


def report(shares: Shares, drafted: int, right: int) -> None:
    for index in range(min(right + 1, drafted)):
        if (place := index.bit_length()) == len(shares):
            shares.append((shares[-1][0], FIRST_WEIGHT))
        share, weight = shares[place]
        weight = min(weight + 1, MOST_WEIGHT)
        shares[place] = share + ((index < right) - share) / weight, weight
    for place in range((drafted - 1).bit_length() + 1, len(shares)):
        share, weight = shares[place]
        shares[place] = share + (shares[place - 1][0] - share) * DRIFT, max(weight - 0.25, FIRST_WEIGHT)


def gains(shares: Shares, limit: int) -> list[float]:
    chance, found = 1.0, [0.0]
    for index in range(min(limit, MOST_DRAFTED if shares[0][1] > FIRST_WEIGHT else TRIED)):
        chance *= shares[min(index.bit_length(), len(shares) - 1)][0]
        if chance < LIKELY:
            break
        found.append(found[-1] + chance)
    return found


FLOOR = 1.04  #: least expected speedup over plain steps to begin with drafts
PAUSE, LONGEST_PAUSE = 48, 512  #: steps until a source is asked again, doubled; LONGEST also for plain steps
EARNED, AT_FIRST, AT_MOST = 0.015, 3.0, 8.0  #: plain steps to lose: earned a step, at first, at most

#: One row's sources with the most drafts that each may propose now, and their shares in this row.
RowOptions = tuple[Mapping[Source, int], dict[Source, Shares]]
#: Source and number of drafts of each row; empty for a plain step.
DraftPlan = tuple[tuple[Source, int] | None, ...]
NONE: tuple[float, int, Source] = (0.0, 0, ("lookup", 0))


@dataclass(slots=True)
class DraftPolicy:
    """Choice for rows that step together. The same reports and options give the same plans."""

    costs: StepCosts = field(default_factory=StepCosts)
    allowance: float = AT_FIRST  # plain steps that drafts may lose before no source is asked again
    _shares: dict[Source, Shares] = field(default_factory=dict)  # of all rows
    _pauses: dict[Source, tuple[int, int]] = field(default_factory=dict)  # the step that ends it; its length
    _asked: Any = None  # options that `_best` is the plan for; None once something changes
    _best: DraftPlan = ()
    _steps: int = 0

    def plan(self, options: Sequence[RowOptions], rows: int, most: int) -> DraftPlan:
        sources = {source: None for offered, _ in options for source in offered if most > 0}
        if not sources or (self.costs.newest and not self.costs.plain_s(rows)):
            return ()
        used = {planned[0] for planned in self._best if planned}
        for source in sources:
            at, pause = self._pauses.setdefault(source, (self._steps + PAUSE, PAUSE))
            if source in used:
                self._pauses[source] = self._steps + pause, max(pause - 4, PAUSE)
            elif self._steps >= at and self.allowance > 0:
                pause, self._asked = min(2 * pause, LONGEST_PAUSE), None
                self._pauses[source] = self._steps + pause, pause
                self.costs.forget(source[0])
                for shares in (self._shares, *[own for _, own in options]):
                    shares.pop(source, None)
        if self._asked != (asked := (options, rows, most, self.costs.context)):
            self._compare(options, rows, most)
            self._asked = asked
        return self._best

    def _compare(self, options: Sequence[RowOptions], rows: int, most: int) -> None:
        right = [
            [(each, gains(own.get(each) or self._of_all(each), limit)) for each, limit in offered.items()]
            for offered, own in options
        ]
        best, self._best = 1.0 if self._best else FLOOR, ()
        for proposer in dict.fromkeys([source[0] for offered, _ in options for source in offered]):
            costs = self.costs.table(rows, proposer)
            for length in sorted({min(each, most) for each in LENGTHS}):
                chosen = [_most_right(row, length, proposer) for row in right]
                drafts = max([number for _, number, _ in chosen])
                worth = (1 + sum([gain for gain, _, _ in chosen]) / len(chosen)) / costs[1 + bucket(drafts)]
                if worth > best and proposer in {source[0] for _, number, source in chosen if number}:
                    planned = [(source, number) if number else None for _, number, source in chosen]
                    best, self._best = worth, tuple(planned)

    def _of_all(self, source: Source) -> Shares:
        return self._shares.setdefault(source, [(FIRST_SHARE[source], FIRST_WEIGHT)])

    def suspends(self, source: Source) -> bool:
        """Return True if a source failed several times and will not be asked soon."""
        at, pause = self._pauses.get(source, (0, 0))
        return pause > 2 * PAUSE and (self._steps < at or self.allowance <= 0)

    def forced(self, rows: int, most: int) -> int:
        if not most or not self.costs.plain_s(rows):
            return most
        costs, lengths = {0: 1.0} | self.costs.table(rows, "lookup"), {min(each, most) for each in LENGTHS}
        return max((0, *lengths), key=lambda length: (rows + length) / costs[length and 1 + bucket(length)])

    def checked(self, own: dict[Source, Shares], source: Source, drafted: int, right: int) -> None:
        self._asked = None
        report(own.setdefault(source, [*self._of_all(source)]), drafted, right)
        report(self._of_all(source), drafted, right)

    def step(self, kind: StepKind, tokens: int, seconds: float = 0.0, *, paid: bool = True) -> None:
        """Record a step. `seconds`: 0 if unknown. `paid`: drafts caused the cost, not forced tokens."""
        self._steps += 1
        slow = seconds > 0 and self.costs.took(kind, tokens, seconds)
        gained = 0.0
        self._asked = None if kind.fed else self._asked
        if kind.fed and paid:
            gained = tokens / kind.rows - self.costs.table(kind.rows, kind.proposer)[kind.fed]
        self.allowance = min(self.allowance + EARNED + gained * (1 + slow), AT_MOST)


def _most_right(
    row: Sequence[tuple[Source, list[float]]], length: int, proposer: Proposer
) -> tuple[float, int, Source]:
    found = [(source, gain) for source, gain in row if source[0] in ("lookup", proposer)]
    return max([(gain[at := min(length, len(gain) - 1)], at, source) for source, gain in found], default=NONE)


def bucket(drafts: int) -> int:
    return 1 << (drafts - 1).bit_length() if drafts else 0
