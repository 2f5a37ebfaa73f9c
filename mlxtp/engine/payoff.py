"""Choice of who proposes drafts and how many: the most tokens a second, by measured costs and successes.

`StepCosts` knows what a step costs by its width, `Acceptance` how often drafts are right, and `Account`
bounds what trying may lose. `Choice` combines them for all rows of a step, which are padded to the widest.
Pure: seconds are passed in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, pairwise
from typing import Literal

Proposer = Literal["lookup", "mtp", "draft"]
#: A proposer, and for a lookup how long its match is: success differs much between these.
Source = tuple[Proposer, int]

PROPOSERS: tuple[Proposer, ...] = ("lookup", "mtp", "draft")
MOST_DRAFTED = 16  # tokens of the longest draft of one row
LENGTHS = (1, 2, 4, 8, MOST_DRAFTED)  #: numbers of drafts that are compared

RECENT_STEPS = 1000  #: steps over which the gain is averaged


@dataclass(slots=True)
class DraftUse:
    """Use of drafts in an epoch, for heartbeats.

    drafted, accepted   tokens by PROPOSERS
    right_at            drafts that were right, by their place in the draft
    steps, widths       decode steps, and the sum of the most tokens that each fed one row
    mtp                 the model's MTP head is loaded
    """

    drafted: list[int] = field(default_factory=lambda: [0] * len(PROPOSERS))
    accepted: list[int] = field(default_factory=lambda: [0] * len(PROPOSERS))
    right_at: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTED)
    steps: int = 0
    widths: int = 0
    mtp: bool = False
    _took_s: float = 0.0
    _plain_s: float = 0.0

    @property
    def gain(self) -> float:
        """Tokens a second of recent steps, in those that plain steps would have given; 0 if unknown."""
        return self._plain_s / self._took_s if self._took_s else 0.0

    def checked(self, proposer: Proposer, drafted: int, right: int) -> None:
        """Count a row's drafts, of which the first `right` were right."""
        at = PROPOSERS.index(proposer)
        self.drafted[at] += drafted
        self.accepted[at] += right
        for place in range(min(right, MOST_DRAFTED)):
            self.right_at[place] += 1

    def took(self, seconds: float, plain_s: float) -> None:
        """Count the time of a step, and that of plain steps for as many tokens."""
        self._took_s += seconds - self._took_s / RECENT_STEPS
        self._plain_s += plain_s - self._plain_s / RECENT_STEPS


# --- costs -----------------------------------------------------------------------------------------------

HELD = -1  #: in place of a number of drafts: a step without any, which waited for the token before it
RECENT = 0.1  #: weight of the newest step in the averages; of the first few it is more
MOST_SLOWER = 4.0  #: times the average that one step may count, because it may have compiled kernels
FADE = 0.002  #: part of the way that averages of other widths go back to the guess, at each step
FORGOTTEN = 0.01  #: part of their weight that they lose
WIDER = 0.1  #: guess, while nothing is measured: cost of a further token of a step, in steps of one token


class StepCosts:
    """Seconds of a step by its rows and its longest draft, 0 for a plain one that ran ahead.

    Guesses rest on `rehearsed` steps of one row, and on the number of tokens. Averages of steps in use
    replace them. Without any time, costs are in plain steps.
    """

    def __init__(self) -> None:
        self._alone: list[tuple[int, float]] = [(1, 1.0)]  # tokens of a step and its seconds, ascending
        self._held = 1.0  # cost of a step that waits, in steps that run ahead
        self._known: dict[tuple[int, int], float] = {}
        self._counts: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._proposing_s: dict[Proposer, float] = {}

    def rehearsed(self, ahead_s: float, waiting_s: Mapping[int, float]) -> None:
        """Take measured steps of one row: one that ran ahead, and by their tokens those that waited."""
        most = 0.0
        self._alone = []
        for tokens, seconds in sorted(waiting_s.items()):
            most = max(most, seconds)
            self._alone.append((tokens, most))
        self._held = max(waiting_s[1] / ahead_s, 1.0)

    def measured(self, rows: int) -> bool:
        """Return True if costs of such steps are in seconds."""
        return len(self._alone) > 1 or (rows, 0) in self._known

    def seconds(self, rows: int, drafts: int) -> float:
        """Return the seconds of a step of `rows` rows whose longest draft has so many tokens."""
        known = self._known.get((rows, drafts))
        return self._guess(rows, drafts) if known is None else known

    def hoped(self, rows: int, drafts: int) -> float:
        """Return the same for a trial: what was never measured may cost less than guessed."""
        seconds = self.seconds(rows, drafts)
        if (rows, drafts) in self._known:
            return seconds
        return min(seconds, self.seconds(rows, 0) * (1 + WIDER * drafts))

    def _guess(self, rows: int, drafts: int) -> float:
        """Return the seconds by the nearest measured shorter draft, or by a plain step."""
        if not drafts:
            return self._known.get((rows, 0), self._tokens_s(rows) / self._held)
        known = next((n for n in reversed(LENGTHS) if n < drafts and (rows, n) in self._known), 0)
        beside = self._known[rows, known] if known else self.seconds(rows, 0) * self._held
        return beside * self._tokens_s(rows * (1 + max(drafts, 0))) / self._tokens_s(rows * (1 + known))

    def _tokens_s(self, tokens: int) -> float:
        """Return the seconds of a step of so many tokens, from the nearest rehearsed ones."""
        if len(self._alone) == 1:
            return self._alone[0][1] * (1 + WIDER * (tokens - 1))
        at = next((i for i, (each, _) in enumerate(self._alone) if each >= tokens), len(self._alone) - 1)
        (few, few_s), (many, many_s) = self._alone[max(at, 1) - 1], self._alone[max(at, 1)]
        return few_s + (many_s - few_s) * (tokens - few) / (many - few)

    def took(self, rows: int, drafts: int, seconds: float) -> None:
        """Record a step. Averages of other widths slowly become guesses again, so that they are retried."""
        usual = self.seconds(rows, drafts)
        if not self.measured(rows):
            if drafts:
                return  # nothing to compare it with
            usual = seconds
        counts = self._counts
        weight = max(RECENT, 1 / (2 + counts[rows, drafts]))
        self._known[rows, drafts] = usual + weight * (min(seconds, MOST_SLOWER * usual) - usual)
        counts[rows, drafts] += 1
        for each, known in self._known.items():
            if each[0] == rows and each[1] != drafts:
                counts[each] *= 1 - FORGOTTEN
                if each[1] > 0:
                    self._known[each] = known + FADE * (self._guess(*each) - known)

    def proposing_s(self, proposer: Proposer, rows: int) -> float:
        """Return the seconds that a proposer takes for one draft of each of `rows` rows.

        Those of an MTP head were rehearsed with one row, and grow as those of the model.
        """
        scale = self._tokens_s(rows) / self._tokens_s(1) if proposer == "mtp" else 1.0
        return scale * self._proposing_s.get(proposer, 0.0)

    def proposed(self, proposer: Proposer, seconds: float) -> None:
        """Record the time of one draft of every row."""
        usual = self._proposing_s.get(proposer, seconds)
        self._proposing_s[proposer] = usual + RECENT * (min(seconds, MOST_SLOWER * usual) - usual)


# --- success ---------------------------------------------------------------------------------------------

#: Success of a draft while none was checked.
FIRST_RATE: Mapping[Source, float] = {
    ("lookup", 0): 0.4, ("lookup", 1): 0.65, ("lookup", 2): 0.9, ("mtp", 0): 0.7, ("draft", 0): 0.7,
}  # fmt: skip
PLACES = 5  #: places of a draft that are told apart: the first, the second, two, four, and the rest
MEMORY = 0.95  #: part of what was seen that still counts after the next report of a row
COMMON_MEMORY = 0.99  #: the same for all rows together
USUAL_WEIGHT = 8.0  #: reports that the success of all rows counts for in one of them
FIRST_WEIGHT = 2.0  #: reports that FIRST_RATE counts for
LIKELY = 0.05  #: least probability of a draft that is fed: it takes no time beside longer ones, but room


def source_of_match(matched: int) -> Source:
    """Return the source of a lookup whose match has so many tokens."""
    return "lookup", 0 if matched < 6 else 1 if matched < 12 else 2


class Acceptance:
    """Success of one source's drafts by their place, of those whose predecessors were right."""

    __slots__ = ("_memory", "_right", "_seen")

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._seen, self._right = [0.0] * PLACES, [0.0] * PLACES

    def report(self, drafted: int, right: int) -> None:
        """Record a draft of `drafted` tokens, of which the first `right` were right."""
        for place in range(PLACES):
            self._seen[place] *= self._memory
            self._right[place] *= self._memory
        for index in range(min(right + 1, drafted)):
            place = _place(index)
            self._seen[place] += 1
            self._right[place] += index < right

    def rates(self, usual: Sequence[float], weight: float) -> list[float]:
        """Return the success at each place. `usual` counts like `weight` reports.

        Where nothing was seen, a place is like the one before in comparison with the usual.
        """
        rates: list[float] = []
        ratio = 1.0
        for seen, right, common in zip(self._seen, self._right, usual, strict=True):
            expected = min(common * ratio, 1.0)
            rates.append((right + weight * expected) / (seen + weight))
            ratio = rates[-1] / max(common, 0.01)
        return rates


def _place(index: int) -> int:
    return min(index.bit_length(), PLACES - 1)


# --- what trying may cost ---------------------------------------------------------------------------------

CREDIT_PER_STEP = 0.015  #: plain steps that each step may lose
FIRST_CREDIT = 2.0
MOST_CREDIT = 8.0


class Account:
    """Bound of what drafts may lose, in plain steps: 2 + 0.015 for each step, and what they gained.

    At most 8 are kept, so that gains of the past do not pay for long losses.
    """

    def __init__(self) -> None:
        self.credit = FIRST_CREDIT

    def step(self, lost: float) -> None:
        """Record a step that took `lost` plain steps longer than its tokens without drafts."""
        self.credit = min(self.credit + CREDIT_PER_STEP - lost, MOST_CREDIT)


# --- the choice ------------------------------------------------------------------------------------------

HOPED = 0.85  #: success that a trial supposes
TRIED = 4  #: most drafts of a trial
LONGEST_TRIAL = 8  #: steps of a trial that passes; by then its success is known
MOST_TRIED = 0.3  #: plain steps that a trial may lose before it fails
FIRST_PAUSE, LONGEST_PAUSE = 48, 512  #: steps between trials of a source; doubled until it is chosen
BETTER = 1.06  #: times the tokens a second without drafts that begin drafts
STILL_BETTER = 1.01  #: the same for drafts that go on
OTHER = 1.04  #: times the tokens a second of the last choice that another one must have
AUDIT_STEPS = 512  #: steps with drafts after which the cost without is measured again
AUDITED = 3  #: plain steps then; the first ones do not run ahead


@dataclass(slots=True)
class Options:
    """Sources of one row's drafts, with the most that each may give now, and their success in this row.

    `ahead`: the token before the drafts is not known, so a lookup has to be right about it, too.
    """

    sources: Mapping[Source, int]
    success: dict[Source, Acceptance]
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Drafts of the next step: by row their source and number, if any row has some.

    `drafts`: the longest. `asks`: proposers in use that take time.
    """

    rows: tuple[tuple[Source, int] | None, ...] = ()
    drafts: int = 0
    asks: frozenset[Proposer] = frozenset()


NONE = Plan()


@dataclass(slots=True)
class _Trial:
    """Steps until a source is tried again, and the pause after the next trial."""

    left: int = 0
    pause: int = FIRST_PAUSE
    steps: int = 0
    gained: float = 0.0

    def report(self, gained: float) -> None:
        """Record one step of a trial, which gave so many plain steps' tokens more than without."""
        self.steps += 1
        self.gained += gained
        if self.gained >= -MOST_TRIED and self.steps < LONGEST_TRIAL:
            return
        self.left, self.steps, self.gained = self.pause, 0, 0.0
        self.pause = min(2 * self.pause, LONGEST_PAUSE)


@dataclass(slots=True)
class Choice:
    """Choice for rows that step together, deterministic given what it was told."""

    costs: StepCosts = field(default_factory=StepCosts)
    _account: Account = field(default_factory=Account)
    _common: dict[Source, Acceptance] = field(default_factory=dict)
    _trials: defaultdict[Source, _Trial] = field(default_factory=lambda: defaultdict(_Trial))
    _tried: set[Source] = field(default_factory=set)  # since the last step that waited
    _bar: float = 1.0  # worth of what the trial stands for
    _last: Plan = NONE
    _drafted: int = 0  # steps with drafts since the last audit
    _audit: int = 0  # plain steps left of this one

    def plan(self, options: Sequence[Options], rows: int, most: int) -> Plan:
        """Choose for the next step of `rows` rows. `most`: longest draft that there is room for."""
        self._last = self._planned(options, rows, most)
        return self._last

    def _planned(self, options: Sequence[Options], rows: int, most: int) -> Plan:
        offered = {source for each in options for source in each.sources}
        if most < 1 or not offered or self._audit or self._account.credit <= 0:
            return NONE
        best, worth = self._best(options, rows, most)
        if worth < (STILL_BETTER if self._last.drafts else BETTER):
            best, worth = NONE, 1.0
        due = frozenset(each for each in offered if not self._trials[each].left) - _sources(best)
        if due:
            trial, hoped = self._best(options, rows, min(most, TRIED), due)
            due &= _sources(trial)
            risk = self._cost(rows, trial.drafts, trial.asks) - 1
            if due and hoped > BETTER * worth and risk < self._account.credit:
                self._tried |= due
                self._bar = worth
                return trial
        for source in _sources(best) - self._tried:
            self._trials[source] = _Trial(FIRST_PAUSE)
        return best

    def _best(
        self, options: Sequence[Options], rows: int, most: int, hoped: frozenset[Source] = frozenset()
    ) -> tuple[Plan, float]:
        """Return the best plan with drafts, and its tokens a second in those without. `hoped`: on trial."""
        gains = [
            {
                source: self._gains(source, each, min(limit, most), hoped)
                for source, limit in each.sources.items()
            }
            for each in options
        ]
        slow = {source[0] for each in gains for source in each} - {"lookup"}
        best, worth, found = NONE, 0.0, 0.0
        for asks in _subsets(slow):
            for length in _lengths(most):
                plan, tokens = _plan(gains, length, asks)
                if not plan.drafts:
                    continue
                value = tokens / len(options) / self._cost(rows, plan.drafts, plan.asks, hopes=bool(hoped))
                same = (plan.drafts, plan.asks) == (self._last.drafts, self._last.asks)
                if value * (OTHER if same else 1.0) > found:
                    best, worth, found = plan, value, value * (OTHER if same else 1.0)
        return best, worth

    def _cost(self, rows: int, drafts: int, asks: frozenset[Proposer], *, hopes: bool = False) -> float:
        """Return the cost of a step with drafts, in plain steps."""
        proposing_s = sum(self.costs.proposing_s(each, rows) for each in asks) * drafts
        step_s = (self.costs.hoped if hopes else self.costs.seconds)(rows, bucket(drafts))
        return (step_s + proposing_s) / self.costs.seconds(rows, 0)

    def _gains(self, source: Source, row: Options, limit: int, hoped: frozenset[Source]) -> list[float]:
        """Return how many drafts of a source will be right, by the number that is fed, from 0 to `limit`."""
        rates: Sequence[float] = [HOPED] * PLACES
        if source not in hoped:
            rates = [FIRST_RATE[source]] * PLACES
            if (common := self._common.get(source)) is not None:
                rates = common.rates(rates, FIRST_WEIGHT)
            if (own := row.success.get(source)) is not None:
                rates = own.rates(rates, USUAL_WEIGHT)
        chance = rates[0] if row.ahead and source[0] == "lookup" else 1.0
        gains = [0.0]
        for index in range(limit):
            chance *= rates[_place(index)]
            gains.append(gains[-1] + chance)
        return gains

    def forced(self, rows: int, most: int) -> int:
        """Return how many of `most` tokens that are right for certain one of `rows` rows is fed."""
        if not most or not self.costs.measured(rows):
            return most
        return max(
            [0, *_lengths(most)],
            key=lambda length: (rows + length) / self.costs.seconds(rows, bucket(length)),
        )

    def checked(self, success: dict[Source, Acceptance], source: Source, drafted: int, right: int) -> None:
        """Record that the first `right` drafts of a row were right; `success` as in `Options`."""
        success.setdefault(source, Acceptance(MEMORY)).report(drafted, right)
        self._common.setdefault(source, Acceptance(COMMON_MEMORY)).report(drafted, right)

    def step(
        self, rows: int, tokens: int, drafts: int, proposing_s: float = 0.0, *, began: bool = False
    ) -> None:
        """Record a step that gave `tokens` tokens; `drafts` as in `StepCosts`.

        `began`: an MTP head computed the first drafts in it, so no trial is judged by it.
        """
        cost = (self.costs.seconds(rows, bucket(drafts)) + proposing_s) / self.costs.seconds(rows, 0)
        self._account.step(cost - tokens / rows if drafts or proposing_s else 0.0)
        for source, trial in self._trials.items():
            if source not in self._tried:
                trial.left = max(trial.left - 1, 0)
            elif drafts and not began:
                trial.report(tokens / rows - self._bar * cost)
        if drafts and not began:
            self._tried.clear()
        if drafts > 0:
            self._drafted += 1
            if self._drafted >= AUDIT_STEPS:
                self._drafted, self._audit = 0, AUDITED
        else:
            self._audit = max(self._audit - 1, 0)


def _plan(
    gains: Sequence[Mapping[Source, Sequence[float]]], length: int, asks: frozenset[Proposer]
) -> tuple[Plan, float]:
    """Return the best source of each row for drafts of up to `length` tokens, and the tokens of all rows.

    Proposers that take time are in `asks`.
    """
    rows: list[tuple[Source, int] | None] = []
    tokens = float(len(gains))
    for each in gains:
        gain, best = 0.0, None
        for source, totals in each.items():
            total = totals[min(length, len(totals) - 1)]
            if total > gain and (source[0] == "lookup" or source[0] in asks):
                gain, best = total, source
        tokens += gain
        rows.append(None if best is None else (best, _likely(each[best][: length + 1])))
    drafted = [row for row in rows if row]
    drafts = max((number for _, number in drafted), default=0)
    return Plan(tuple(rows), drafts, frozenset(source[0] for source, _ in drafted) & asks), tokens


def _likely(gains: Sequence[float]) -> int:
    """Return how many drafts are likely to be reached; at least one."""
    return max(sum(after - before >= LIKELY for before, after in pairwise(gains)), 1)


def _lengths(most: int) -> list[int]:
    most = min(most, MOST_DRAFTED)
    return [length for length in LENGTHS if length < most] + [most]


def _sources(plan: Plan) -> set[Source]:
    return {row[0] for row in plan.rows if row}


def _subsets(of: set[Proposer]) -> Iterator[frozenset[Proposer]]:
    ordered = sorted(of)
    return map(frozenset, chain.from_iterable(combinations(ordered, n) for n in range(len(ordered) + 1)))


def bucket(drafts: int) -> int:
    """Return a number of drafts rounded up to a power of two, 0 and HELD as they are."""
    return drafts if drafts < 1 else 1 << (drafts - 1).bit_length()
