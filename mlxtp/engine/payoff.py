"""Choice of the source and number of drafts with the most tokens a second, by measured cost and acceptance.

A source that does not beat plain steps is tried again after an interval, which doubles up to a bound. A
credit limits the time lost to trials. Pure: seconds are passed in.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
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

    @property
    def gain(self) -> float:
        """Speedup of recent steps over plain steps; 0 if unknown."""
        return self._plain_s / self._took_s if self._took_s else 0.0

    def figures(self) -> dict[str, Any]:
        counts = {name: tuple(getattr(self, name)) for name in ("drafted", "accepted", "right_at")}
        steps = {"decode_steps": self.steps, "decode_widths": self.widths}
        return {**counts, **steps, "draft_gain": self.gain, "mtp": self.mtp}

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


# --- costs -----------------------------------------------------------------------------------------------

SAMPLES, FEW = 10, 3  #: newest steps of a kind to average; plain steps to measure before any drafts
SHORT = 1024  #: tokens of a row; costs are kept apart for each doubling above it
WIDER = 0.1  #: guess: cost of each token that the host feeds a row, in plain steps


class StepKind(NamedTuple):
    """`fed`: tokens that the host feeds a row: 1 and the drafts, or 0 in a plain step, which runs ahead."""

    rows: int
    fed: int = 0
    proposer: Proposer = "lookup"


class StepCosts:
    """Average or guessed costs of steps by context and kind, in plain steps of as many rows."""

    def __init__(self) -> None:
        self.context = 0  #: doublings of SHORT in the longest row, rounded up
        #: Costs of the newest steps; of plain steps, seconds.
        self._samples = defaultdict[tuple[int, StepKind], deque[float]](lambda: deque(maxlen=SAMPLES))
        #: By context, rows and proposer: fed tokens and cost of the newest step with drafts.
        self._newest: dict[tuple[int, int, Proposer], tuple[int, float]] = {}

    def plain_s(self, rows: int) -> float:
        return _average(self._samples.get((self.context, StepKind(rows)), ()))

    def comparable(self, rows: int) -> bool:
        return len(self._samples.get((self.context, StepKind(rows)), range(FEW))) >= FEW

    def cost(self, kind: StepKind) -> float:
        """Return a step's cost. A single sample above the guess is ignored: it may have compiled kernels."""
        if not kind.fed:
            return 1.0
        samples: Collection[float] = self._samples.get((self.context, kind), ())
        if len(samples) > 1:
            return _average(samples)
        fed, cost = self._newest.get((self.context, kind.rows, kind.proposer), (2, 1 + 2 * WIDER))
        if kind.fed > fed and kind.proposer == "lookup":
            guess: float = cost * (1 + WIDER * kind.fed) / (1 + WIDER * fed)
        else:
            guess = 1 + WIDER + (cost - 1 - WIDER) * (kind.fed - 1) / (fed - 1)
        return min((guess, *samples))

    def took(self, kind: StepKind, seconds: float) -> float:
        """Record a step; return its cost, doubled if the first sample was slow and so was left out."""
        samples, usual = self._samples[self.context, kind], self.cost(kind)
        if not kind.fed:
            samples.append(seconds)
        if not kind.fed or len(self._samples[self.context, StepKind(kind.rows)]) < FEW:
            return usual
        samples.append(seconds / self.plain_s(kind.rows))
        if len(samples) == 1 and samples[0] > usual:
            return usual
        cost = _average(samples)
        if kind.fed > 1:
            self._newest[self.context, kind.rows, kind.proposer] = kind.fed, cost
        for drafts in [drafts for drafts in LENGTHS if 1 + drafts < kind.fed]:
            shorter = self.context, kind._replace(fed=1 + drafts)
            if _average(self._samples.get(shorter, ())) > cost:
                del self._samples[shorter]  # outdated: a shorter draft costs less
        return cost * 2 if len(samples) == 2 and samples[0] > usual else cost

    def forget(self, rows: int, proposer: Proposer | None = None) -> None:
        for at in [at for at in self._samples if at[0] == self.context and at[1].rows == rows and at[1].fed]:
            if proposer in (None, at[1].proposer):
                del self._samples[at]
        if proposer:
            self._newest.pop((self.context, rows, proposer), None)
        else:
            self._samples[self.context, StepKind(rows)].clear()


def _average(samples: Collection[float]) -> float:
    """Average without the largest fifth: the results of two plain steps may arrive together."""
    return fmean(sorted(samples)[: max(len(samples) * 4 // 5, 1)]) if samples else 0.0


# --- acceptance ------------------------------------------------------------------------------------------

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
        share += (shares[place - 1][0] - share) * DRIFT
        shares[place] = share, max(weight - 0.25, FIRST_WEIGHT)


def gains(shares: Shares, limit: int) -> list[float]:
    chance, found = 1.0, [0.0]
    for index in range(min(limit, MOST_DRAFTED if shares[0][1] > FIRST_WEIGHT else TRIED)):
        chance *= shares[min(index.bit_length(), len(shares) - 1)][0]
        if chance < LIKELY:
            break
        found.append(found[-1] + chance)
    return found


# --- the policy ------------------------------------------------------------------------------------------

FLOOR = 1.04  #: least expected speedup over plain steps to begin with drafts
FIRST_RETRY, LAST_RETRY = 48, 512  #: steps until a source is tried again, doubled; LAST also for plain steps
CREDIT, FIRST_CREDIT, MOST_CREDIT = 0.015, 3.0, 8.0  #: plain steps to lose: earned a step, at first, most
SURE = 1.5  #: the same as FLOOR, without credit

#: One row's sources with the most drafts that each may propose now, and their shares in this row.
RowOptions = tuple[Mapping[Source, int], dict[Source, Shares]]


class DraftPlan(NamedTuple):
    rows: tuple[tuple[Source, int] | None, ...] = ()
    drafts: int = 0
    proposer: Proposer = "lookup"


NO_DRAFTS = DraftPlan()


@dataclass(slots=True)
class DraftPolicy:
    """Choice for rows that step together. The same reports and options give the same plans."""

    costs: StepCosts = field(default_factory=StepCosts)
    credit: float = FIRST_CREDIT
    _shares: dict[Source, Shares] = field(default_factory=dict)  # of all rows
    _retries: dict[Source, tuple[int, int]] = field(default_factory=dict)  # number of a step, and interval
    _last: DraftPlan = NO_DRAFTS
    _asked: Any = None  # options that `_best` is the plan for; None once something changes
    _best: DraftPlan = NO_DRAFTS
    _steps: int = 0
    _plain_at: int = 0  # number of the newest plain step

    def plan(self, options: Sequence[RowOptions], rows: int, most: int) -> DraftPlan:
        if most < 1 or not any(sources for sources, _ in options):
            self._last = NO_DRAFTS
            return NO_DRAFTS
        if self._steps >= self._plain_at + LAST_RETRY:
            self._plain_at, self._asked = self._steps, None
            self.costs.forget(rows)
        if not self.costs.comparable(rows):
            return NO_DRAFTS
        self._compare(options, rows, most)
        if self._retry(options, rows):
            self._compare(options, rows, most)
        self._last = self._best
        return self._best

    def _retry(self, options: Sequence[RowOptions], rows: int) -> bool:
        used = {row[0] for row in self._best.rows if row}
        for source in {source: None for sources, _ in options for source in sources}:
            at, interval = self._retries.get(source) or (self._steps + FIRST_RETRY, FIRST_RETRY)
            if source in used:
                interval = max(interval - 4, FIRST_RETRY)
                at = self._steps + interval
            elif self._steps >= at and self.credit > 0:
                interval = min(2 * interval, LAST_RETRY)
                at, self._asked = self._steps + interval, None
                for shares in (self._shares, *[own for _, own in options]):
                    shares.pop(source, None)
                if not used or source[0] != self._best.proposer:
                    self.costs.forget(rows, source[0])
            self._retries[source] = at, interval
        return self._asked is None

    def _compare(self, options: Sequence[RowOptions], rows: int, most: int) -> None:
        copies = [(dict(sources), own) for sources, own in options]
        asked = copies, rows, most, self.costs.context, self._last.drafts > 0, self.credit > 0
        if self._asked == asked:
            return
        self._asked, self._best, worth = asked, NO_DRAFTS, 0.0
        right = [
            [(each, gains(own.get(each) or self._of_all(each), limit)) for each, limit in sources.items()]
            for sources, own in options
        ]
        offered = {source[0] for sources, _ in options for source in sources}
        for proposer in [each for each in PROPOSERS if each == "lookup" or each in offered]:
            for length in _lengths(most):
                chosen = [_most_right(row, length, proposer) for row in right]
                if not (drafts := max([number for _, number, _ in chosen])):
                    continue
                proposes = any(source is not None and source[0] == proposer for _, _, source in chosen)
                slow = proposer if proposes else "lookup"
                tokens = 1 + sum([gain for gain, _, _ in chosen]) / len(chosen)
                value = tokens / self.costs.cost(StepKind(rows, 1 + bucket(drafts), slow))
                if value > worth:
                    planned = [(source, number) if source else None for _, number, source in chosen]
                    self._best, worth = DraftPlan(tuple(planned), drafts, slow), value
        if (not self._last.drafts and (worth < FLOOR or (self.credit <= 0 and worth < SURE))) or worth < 1:
            self._best = NO_DRAFTS

    def _of_all(self, source: Source) -> Shares:
        return self._shares.setdefault(source, [(FIRST_SHARE[source], FIRST_WEIGHT)])

    def suspends(self, source: Source) -> bool:
        """Return True if a source failed in several trials and will not be tried soon."""
        at, interval = self._retries.get(source, (0, 0))
        return interval > 2 * FIRST_RETRY and (self._steps < at or self.credit <= 0)

    def forced(self, rows: int, most: int) -> int:
        if not most or not self.costs.plain_s(rows):
            return most
        kinds = {length: StepKind(rows, length and 1 + bucket(length)) for length in (0, *_lengths(most))}
        return max(kinds, key=lambda length: (rows + length) / self.costs.cost(kinds[length]))

    def checked(self, own: dict[Source, Shares], source: Source, drafted: int, right: int) -> None:
        self._asked = None
        report(own.setdefault(source, [*self._of_all(source)]), drafted, right)
        report(self._of_all(source), drafted, right)

    def step(self, kind: StepKind, tokens: int, seconds: float = 0.0, *, paid: bool = True) -> None:
        """Record a step. `seconds`: 0 if unknown. `paid`: drafts caused the cost, not forced tokens."""
        self._steps += 1
        if kind.fed:
            self._asked = None
        if not kind.fed or not seconds:
            self._plain_at = self._steps
        cost = self.costs.took(kind, seconds) if seconds else self.costs.cost(kind)
        lost = cost - tokens / kind.rows if paid else 0.0
        self.credit = min(self.credit + CREDIT - lost, MOST_CREDIT)


def _most_right(
    row: Sequence[tuple[Source, list[float]]], length: int, proposer: Proposer
) -> tuple[float, int, Source | None]:
    found = [
        (expected[number], number, source)
        for source, expected in row
        if source[0] in ("lookup", proposer) and (number := min(length, len(expected) - 1))
    ]
    return max(found, default=(0.0, 0, None))


def _lengths(most: int) -> list[int]:
    most = min(most, MOST_DRAFTED)
    return [length for length in LENGTHS if length < most] + [most]


def bucket(drafts: int) -> int:
    return 1 << (drafts - 1).bit_length() if drafts else 0
