"""Choice of who proposes drafts and how many: the most tokens a second, by measured costs and successes.

`StepCosts` knows what a step costs by its kind, and `Acceptance` how often drafts are right. `Choice`
combines them for all rows of a step, which are padded to the widest, and bounds what trying may lose.
Pure: seconds are passed in.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, pairwise
from math import inf
from statistics import fmean
from typing import Any, Literal, NamedTuple

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

    def figures(self) -> dict[str, Any]:
        """Return what a heartbeat says of it, by the names of `RankStats`."""
        return {
            "drafted": tuple(self.drafted),
            "accepted": tuple(self.accepted),
            "right_at": tuple(self.right_at),
            "decode_steps": self.steps,
            "decode_widths": self.widths,
            "draft_gain": self.gain,
            "mtp": self.mtp,
        }

    def checked(self, proposer: Proposer, drafted: int, right: int) -> None:
        """Count a row's drafts, of which the first `right` were right."""
        at = PROPOSERS.index(proposer)
        self.drafted[at] += drafted
        self.accepted[at] += right
        for place in range(min(right, MOST_DRAFTED)):
            self.right_at[place] += 1

    def took(self, seconds: float, plain_s: float) -> None:
        """Count the time of a step, and that of plain steps for as many tokens, 0 if unknown."""
        if not plain_s:
            return
        self._took_s += seconds - self._took_s / RECENT_STEPS
        self._plain_s += plain_s - self._plain_s / RECENT_STEPS


# --- costs -----------------------------------------------------------------------------------------------

HELD = -1  #: in place of a number of drafts: a step without any, which waited for the token before it
SAMPLES = 15  #: newest steps of a kind, of which the cost is a mean
FEW = 3  #: samples, beside fewer of which the guess counts, too; plain ones that others are compared with
MOST_SLOWER = 4.0  #: times its expected cost that one step may count, because it may have compiled kernels
SHORT = 1024  #: tokens of a row, above which each doubling has costs of its own
WIDER = 0.1  #: guess, while nothing is measured: cost of a further token of a step, in steps of one token
NO_PROPOSERS: frozenset[Proposer] = frozenset()


def doublings(tokens: int) -> int:
    """Return how often SHORT is doubled in a row of so many tokens, rounded up."""
    return (tokens // SHORT).bit_length()


class Kind(NamedTuple):
    """Kind of step: its rows, its longest draft, 0 for none, and the proposers that took time in it."""

    rows: int
    drafts: int
    asks: frozenset[Proposer] = NO_PROPOSERS


_Place = tuple[int, Kind]


class StepCosts:
    """Costs of kinds of steps, in plain ones of as many rows: means of measured steps, else guesses.

    A plain step has no drafts and waits for nothing. Guesses rest on `rehearsed` steps of one row, and on
    those of shorter rows: some attentions take longer for several tokens the more tokens a row has.
    """

    def __init__(self) -> None:
        self.context = 0  #: doublings of SHORT in the longest row
        self._alone: list[tuple[int, float]] = [(1, 1.0)]  # tokens of a step and its cost, ascending
        self._held = 1.0
        self._proposing: dict[Proposer, float] = {}  # cost of one draft of each row
        #: By doublings of SHORT and kind.
        self._samples: defaultdict[_Place, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._means: dict[_Place, float] = {}
        self._lacking: set[tuple[int, int]] = set()  # doublings and rows whose plain steps come first
        self._uncounted = 0.0  # part of the last step's cost, if it had drafts and was far above the expected

    def rehearsed(
        self, ahead_s: float, waiting_s: Mapping[int, float], proposing_s: Mapping[Proposer, float]
    ) -> None:
        """Take the seconds of steps of one row: of one that ran ahead, and by their tokens of those that
        waited. `proposing_s`: of one draft by each proposer.
        """
        most = 0.0
        self._alone = []
        for tokens, seconds in sorted(waiting_s.items()):
            most = max(most, seconds / waiting_s[1])
            self._alone.append((tokens, most))
        self._held = max(waiting_s[1] / ahead_s, 1.0)
        self._proposing = {proposer: seconds / ahead_s for proposer, seconds in proposing_s.items()}

    def measured(self, rows: int) -> bool:
        """Return True if the cost of such steps rests on any measurement."""
        return len(self._alone) > 1 or self.plain_s(rows) > 0

    def comparable(self, rows: int) -> bool:
        """Return False if plain steps are to be measured first, because all others are compared with them."""
        return (self.context, rows) not in self._lacking

    def plain_s(self, rows: int) -> float:
        """Return the seconds of a plain step, 0 while none was measured."""
        return self._means.get((self.context, Kind(rows, 0)), 0.0)

    def took(self, kind: Kind, seconds: float) -> float:
        """Record a step, which counts where a few plain ones were measured before; returns its cost.

        That is the usual one, unless two steps with drafts in a row were far slower: then it is their own,
        with what the first did not count.
        """
        at, rows = (self.context, kind), (self.context, kind.rows)
        plain, samples = self._samples[self.context, Kind(kind.rows, 0)], self._samples[at]
        if kind.drafts and len(plain) < FEW:
            self._lacking.add(rows)
            return self.cost(kind)
        if kind.drafts:
            seconds, most = seconds / self.plain_s(kind.rows), MOST_SLOWER * self.cost(kind)
            self._uncounted, before = max(seconds - most, 0.0), self._uncounted
            if self._uncounted and before:
                samples.clear()
                samples.extend([seconds] * FEW)
                self._means[at] = seconds
                return seconds + before
            seconds = min(seconds, most)
        samples.append(seconds)
        guess = [self._guess(kind)] if kind.drafts and len(samples) < FEW else []
        self._means[at] = _usual([*guess, *samples])
        if len(plain) >= FEW:
            self._lacking.discard(rows)
        return self.cost(kind)

    def renew(self, but: Kind) -> None:
        """Have all steps of as many rows measured again, plain ones first, but for one kind with drafts."""
        for at in [at for at in self._means if at[1].rows == but.rows and at[1].drafts >= 0]:
            context, kind = at
            if not kind.drafts:
                self._lacking.add((context, kind.rows))
            if kind != but or not kind.drafts:
                del self._means[at], self._samples[at]

    def cost(self, kind: Kind) -> float:
        """Return the cost of a step in plain steps. One of a longer draft costs no less."""
        rows, drafts, asks = kind
        if drafts == 0:
            return 1.0
        known = self._mean(kind)
        longer = [self._mean(Kind(rows, length, asks)) for length in LENGTHS if length > drafts > 0]
        found = [each for each in longer if each is not None]
        return min([self._guess(kind) if known is None else known, *found])

    def hoped(self, kind: Kind) -> float:
        """Return the same for a trial: such a step may cost less than it did, or than is guessed."""
        return min(self.cost(kind), 1 + sum(map(self._proposes, kind.asks)) + WIDER * max(kind.drafts, 0))

    def _mean(self, kind: Kind) -> float | None:
        """Return the measured cost, of rows as long or of the nearest shorter ones; None for no measure."""
        found = (self._means.get((context, kind)) for context in range(self.context, -1, -1))
        return next((each for each in found if each is not None), None)

    def _guess(self, kind: Kind) -> float:
        """Return the cost as it grows from the nearest measured shorter draft, or from a plain step."""
        rows, drafts, asks = kind
        known = {length: mean for length in LENGTHS if (mean := self._mean(Kind(rows, length, asks)))}
        longer = next((length for length in known if length > drafts), 0)
        shorter = next((length for length in reversed(known) if length < drafts), 0)
        from_cost = known[shorter] if shorter else self._held
        if longer and drafts > 0:
            to_cost = known[longer]
            return from_cost + (to_cost - from_cost) * (drafts - shorter) / (longer - shorter)
        wider = self._tokens(rows * (1 + max(drafts, 0))) / self._tokens(rows * (1 + shorter))
        proposing = sum(map(self._proposes, asks)) * (max(drafts, 1) - shorter)
        return from_cost * wider + proposing

    def _proposes(self, proposer: Proposer) -> float:
        return self._proposing.get(proposer, 0.0)

    def _tokens(self, tokens: int) -> float:
        """Return the cost of a step of so many tokens, in those of one, from the nearest rehearsed ones."""
        if len(self._alone) == 1:
            return 1 + WIDER * (tokens - 1)
        at = next((i for i, (each, _) in enumerate(self._alone) if each >= tokens), len(self._alone) - 1)
        (few, few_cost), (many, many_cost) = self._alone[max(at, 1) - 1], self._alone[max(at, 1)]
        return few_cost + (many_cost - few_cost) * (tokens - few) / (many - few)


def _usual(samples: Collection[float]) -> float:
    """Return the mean without the largest fifth: plain steps that ran ahead may come two at a time."""
    return (
        fmean(sorted(samples)[: len(samples) - -(-len(samples) // 5)]) if len(samples) > 1 else min(samples)
    )


# --- success ---------------------------------------------------------------------------------------------

#: Success of a draft while none was checked.
FIRST_RATE: Mapping[Source, float] = {
    ("lookup", 0): 0.4, ("lookup", 1): 0.65, ("lookup", 2): 0.9, ("mtp", 0): 0.7, ("draft", 0): 0.7,
}  # fmt: skip
PLACES = 5  #: places of a draft that are told apart: the first, the second, two, four, and the rest
MEMORY = 0.95  #: part of what was seen that still counts after the next report of a row
COMMON_MEMORY = 0.97  #: the same for all rows together
USUAL_WEIGHT = 5.0  #: reports that the success of all rows counts for in one of them
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


# --- the choice ------------------------------------------------------------------------------------------

HOPED = 0.85  #: success that a trial supposes
TRIED = 2  #: most drafts of a trial
LEAST_TRIAL, LONGEST_TRIAL = 4, 9  #: steps of a trial, after which success and cost are known
MOST_TRIED = 1.5  #: plain steps that a trial may have lost when it goes on
MOST_OWN = 2.0  #: cost of one step of a trial, in plain steps for as many tokens, with which the trial ends
FIRST_PAUSE, LONGEST_PAUSE = 48, 512  #: steps between trials of a source; doubled until it is chosen
BETTER = 1.06  #: times the tokens a second without drafts that begin drafts
SURE = 1.5  #: times the tokens a second without drafts that no wrong cost explains
STILL_BETTER = 1.0  #: the same for drafts that go on
OTHER = 1.04  #: times the tokens a second of the last choice that another one must have
FIRST_AUDIT, AUDIT_STEPS = 32, 512  #: steps with drafts after which other costs are measured again; doubled

CREDIT_PER_STEP = 0.015  #: plain steps that each step may lose
FIRST_CREDIT, MOST_CREDIT = 3.0, 8.0
LEAST_CREDIT = 1.0  #: with which drafts begin
MOST_DEBT = -6.0  #: by steps that took less than half of their cost, which is a wrong one then


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
    asks: frozenset[Proposer] = NO_PROPOSERS


NONE = Plan()


@dataclass(slots=True)
class _Pause:
    """Steps until a source is tried again, and the pause after the next trial."""

    left: int = 0
    next: int = FIRST_PAUSE


@dataclass(slots=True)
class Choice:
    """Choice for rows that step together. The same reports and options give the same plans.

    Drafts may lose 3 plain steps, 0.015 for each step, and what they gained. At most 8 are kept, so that
    gains of the past do not pay for long losses.
    """

    costs: StepCosts = field(default_factory=StepCosts)
    credit: float = FIRST_CREDIT
    _common: dict[Source, Acceptance] = field(default_factory=dict)
    _pauses: defaultdict[Source, _Pause] = field(default_factory=lambda: defaultdict(_Pause))
    _tried: set[Source] = field(default_factory=set)  # on trial
    _steps: int = 0  # of this trial
    _given: float = 0.0  # tokens a row in these
    _bar: float = 1.0  # worth of what the trial stands for
    _last: Plan = NONE
    _drafted: int = 0  # steps with drafts since the last audit
    _audit_at: int = FIRST_AUDIT
    _sure: bool = False  # drafts give so much that only a late audit pays
    #: By the sources on trial, what was weighed last, and the result.
    _weighed: dict[frozenset[Source], tuple[Any, tuple[Plan, float]]] = field(default_factory=dict)

    def plan(self, options: Sequence[Options], rows: int, most: int) -> Plan:
        """Choose for the next step of `rows` rows. `most`: longest draft that there is room for."""
        self._last = self._planned(options, rows, most)
        return self._last

    def _planned(self, options: Sequence[Options], rows: int, most: int) -> Plan:
        offered = {source for each in options for source in each.sources}
        if most < 1 or not offered or not self.costs.comparable(rows):
            return NONE
        best, worth = self._best(options, rows, most)
        if self._tried & offered:  # a trial goes on, because its first steps say little
            trial, hoped = self._best(options, rows, min(most, TRIED), self._tried)
            if hoped > worth:
                return trial
            self._tried.clear()  # a long match was found meanwhile, say
        self._sure = worth > SURE
        if self.credit <= (0 if self._last.drafts else LEAST_CREDIT) and not self._sure:
            return NONE
        if worth < (STILL_BETTER if self._last.drafts else BETTER):
            best, worth = NONE, 1.0
        due = {each for each in offered if not self._pauses[each].left} - _sources(best)
        if due and self.credit > LEAST_CREDIT:
            trial, hoped = self._best(options, rows, min(most, TRIED), due)
            if due & _sources(trial) and hoped > BETTER * worth:
                self._tried = due & _sources(trial)
                self._steps, self._given, self._bar = 0, 0.0, worth
                self.costs.renew(Kind(rows, bucket(best.drafts), best.asks))
                self._weighed.clear()
                return trial if self.costs.comparable(rows) else NONE
        for source in _sources(best):
            self._pauses[source] = _Pause(FIRST_PAUSE)
        return best

    def rests(self, source: Source) -> bool:
        """Return True for a source that failed in several trials and will not be tried soon."""
        pause = self._pauses.get(source)
        if pause is None or pause.next <= 2 * FIRST_PAUSE:
            return False
        return pause.left > LONGEST_TRIAL or self.credit <= LEAST_CREDIT

    def _best(
        self, options: Sequence[Options], rows: int, most: int, hoped: Collection[Source] = ()
    ) -> tuple[Plan, float]:
        """Return the best plan with drafts, and its tokens a second in those without. `hoped`: on trial.

        Plain steps change nothing about it, so it is weighed once for many of them.
        """
        offered = [(dict(each.sources), each.success, each.ahead) for each in options]
        asked = offered, rows, most, self.costs.context, self._last.drafts, self._last.asks
        known = self._weighed.get(key := frozenset(hoped))
        if known is None or known[0] != asked:
            self._weighed[key] = known = asked, self._weigh(options, rows, most, hoped)
        return known[1]

    def _weigh(
        self, options: Sequence[Options], rows: int, most: int, hoped: Collection[Source]
    ) -> tuple[Plan, float]:
        gains = [
            {
                source: self._gains(source, each, min(limit, most), hoped)
                for source, limit in each.sources.items()
            }
            for each in options
        ]
        cost = self.costs.hoped if hoped else self.costs.cost
        slow = {source[0] for each in gains for source in each} - {"lookup"}
        best, worth, found = NONE, 0.0, 0.0
        for asks in _subsets(slow):
            for length in _lengths(most):
                plan, tokens = _plan(gains, length, asks)
                if not plan.drafts:
                    continue
                value = tokens / len(options) / cost(Kind(rows, bucket(plan.drafts), plan.asks))
                same = (plan.drafts, plan.asks) == (self._last.drafts, self._last.asks)
                if value * (OTHER if same else 1.0) > found:
                    best, worth, found = plan, value, value * (OTHER if same else 1.0)
        return best, worth

    def _gains(self, source: Source, row: Options, limit: int, hoped: Collection[Source]) -> list[float]:
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
            key=lambda length: (rows + length) / self.costs.cost(Kind(rows, bucket(length))),
        )

    def checked(self, success: dict[Source, Acceptance], source: Source, drafted: int, right: int) -> None:
        """Record that the first `right` drafts of a row were right; `success` as in `Options`."""
        self._weighed.clear()
        success.setdefault(source, Acceptance(MEMORY)).report(drafted, right)
        self._common.setdefault(source, Acceptance(COMMON_MEMORY)).report(drafted, right)

    def step(self, kind: Kind, tokens: int, seconds: float = 0.0, *, paid: bool = True) -> None:
        """Record a step that gave `tokens` tokens, and its seconds, 0 where unknown.

        `paid`: drafts were the reason of what it cost; forced tokens are not.
        """
        rows, drafts, _ = kind
        if drafts:
            self._weighed.clear()
        cost = self.costs.took(kind, seconds) if seconds else self.costs.cost(kind)
        own = seconds / plain_s if (plain_s := self.costs.plain_s(rows)) else 0.0  # cost of this step
        lost = cost - tokens / rows if paid else 0.0
        most_debt = min(self.credit, MOST_DEBT) if 2 * own < cost else -inf
        self.credit = max(min(self.credit + CREDIT_PER_STEP - lost, MOST_CREDIT), most_debt)
        for source, pause in self._pauses.items():
            if source not in self._tried:
                pause.left = max(pause.left - 1, 0)
        if self._tried and drafts:
            self._steps += 1
            self._given += tokens / rows
            lost = self._steps * self._bar * cost - self._given
            is_lost = self._steps >= LEAST_TRIAL and lost > MOST_TRIED
            if self._steps == LONGEST_TRIAL or is_lost or own > MOST_OWN * tokens / rows:
                for source in self._tried:
                    pause = self._pauses[source]
                    pause.left, pause.next = pause.next, min(2 * pause.next, LONGEST_PAUSE)
                self._tried.clear()
        self._drafted += drafts > 0
        if self._drafted >= (AUDIT_STEPS if self._sure else self._audit_at):
            self._drafted, self._audit_at = 0, min(2 * self._audit_at, AUDIT_STEPS)
            self.costs.renew(kind)


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
