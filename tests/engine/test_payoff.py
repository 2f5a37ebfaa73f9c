"""The choice of proposers and widths, in played worlds: costs, successes and texts that change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.engine.payoff import (
    AUDIT_STEPS,
    CREDIT_PER_STEP,
    FIRST_CREDIT,
    HELD,
    LEAST_CREDIT,
    LENGTHS,
    MOST_DEBT,
    PLACES,
    Choice,
    Kind,
    Options,
    Plan,
    Proposer,
    Source,
    StepCosts,
    bucket,
    doublings,
)

HEAD: Source = ("mtp", 0)
MODEL: Source = ("draft", 0)
WELL, BADLY = (0.85, 0.8, 0.7, 0.7, 0.6), (0.05,) * PLACES
Cost = Callable[[int, int], float]  # seconds of a step by rows and drafts, as in `StepCosts`


def costs(a_token: float, waiting: float = 0.1) -> Cost:
    """A step of one row takes 10 ms. Each further token and waiting take these parts of it."""

    def seconds(rows: int, drafts: int) -> float:
        wider = a_token * (rows * (1 + max(drafts, 0)) - 1)
        return 0.01 * (1 + wider + (waiting if drafts else 0))

    return seconds


@dataclass
class World:
    """Rows that decode, with the success of each source's drafts by their place.

    An MTP head computes drafts for the step after. `noise`: standard deviation of the logarithm of measured
    seconds. Of 100 steps, `spikes` take five times as long.
    """

    cost: Cost
    proposing_s: Mapping[Proposer, float]
    rows: list[dict[Source, Sequence[float]]]
    noise: float = 0.0
    spikes: float = 0.0
    most: int = 16
    choice: Choice = field(default_factory=Choice)
    ready: bool = False  # the head has proposed
    seconds: float = 0.0
    tokens: float = 0  # as expected, which varies less than what was drawn
    plans: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(3)
        waiting = {width: self.cost(1, width - 1 or HELD) for width in (1, 2, 4, 8)}
        self.choice.costs.rehearsed(self.cost(1, 0), waiting, self.proposing_s)
        self.options = [Options({}, {}) for _ in self.rows]

    def run(self, steps: int) -> World:
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> None:
        count = len(self.rows)
        for options, success in zip(self.options, self.rows, strict=True):
            options.sources = dict.fromkeys(success, self.most)
        plan = self.choice.plan(self.options, count, self.most)
        begins = "mtp" in plan.asks and not self.ready
        tokens, fed = count, HELD if begins else 0
        self.tokens += count
        for options, planned, success in zip(self.options, plan.rows, self.rows, strict=False):
            if planned is None or (begins and planned[0] == HEAD):
                continue
            source, drafts = planned
            right = 0
            while right < drafts and self.random.random() < rate(success[source], right):
                right += 1
            self.choice.checked(options.success, source, drafts, right)
            tokens, fed = tokens + right, max(fed, drafts)
            self.tokens += sum(expected(success[source], drafts))
        took_s = self.cost(count, fed) + plan.drafts * sum(self.costs_of(each) for each in plan.asks)
        measured_s = took_s * self.random.lognormvariate(0, self.noise)
        measured_s *= 5 if self.random.random() < self.spikes / 100 else 1
        self.choice.step(Kind(count, bucket(fed), plan.asks), tokens, measured_s)
        self.ready = "mtp" in plan.asks
        self.seconds += took_s
        self.plans.append(plan)

    def costs_of(self, proposer: Proposer) -> float:
        """Seconds of a draft of every row."""
        rows = len(self.rows)
        scale = self.cost(1, rows - 1 or HELD) / self.cost(1, HELD) if proposer == "mtp" else 1.0
        return scale * self.proposing_s[proposer]

    def rate(self, steps: int) -> float:
        """Tokens a second of so many further steps."""
        tokens, seconds = self.tokens, self.seconds
        self.run(steps)
        return (self.tokens - tokens) / (self.seconds - seconds)

    def best(self) -> float:
        """Tokens a second of the best fixed choice, on average."""
        count = len(self.rows)
        found = [count / self.cost(count, 0)]
        for length in [length for length in LENGTHS if length <= self.most]:
            for source in {source for row in self.rows for source in row}:
                tokens = float(count)
                for row in self.rows:
                    tokens += sum(expected(row[source], length)) if source in row else 0
                proposing_s = length * self.costs_of(source[0])
                found.append(tokens / (self.cost(count, length) + proposing_s))
        return max(found)

    def switches(self) -> int:
        return sum(bool(one.drafts) != bool(other.drafts) for one, other in pairwise(self.plans))


def expected(success: Sequence[float], drafts: int) -> Iterator[float]:
    """Yield the chance of each of so many drafts to be right with all before it."""
    return accumulate([rate(success, place) for place in range(drafts)], mul)


def rate(success: Sequence[float], place: int) -> float:
    return success[min(place.bit_length(), PLACES - 1)]


SO_SO = (0.6, 0.3, 0.1, 0.1, 0.1)
BOTH_S: Mapping[Proposer, float] = {"mtp": 0.001, "draft": 0.005}
BOTH_BADLY = {HEAD: BADLY, MODEL: BADLY}
CHEAP, DEAR = costs(0.03), costs(0.6)
WORLDS = {
    "a useless head": (CHEAP, {"mtp": 0.001}, [{HEAD: BADLY}]),
    "a useless head where width is dear": (DEAR, {"mtp": 0.001}, [{HEAD: BADLY}]),
    "useless drafts of two, eight rows": (CHEAP, {"mtp": 0.001, "draft": 0.004}, [BOTH_BADLY] * 8),
    "a good head": (CHEAP, {"mtp": 0.001}, [{HEAD: WELL}]),
    "a head that is right for one token": (costs(0.1), {"mtp": 0.001}, [{HEAD: (0.9, 0.2, 0.1, 0.1, 0.1)}]),
    "a slow draft model and a worse head": (CHEAP, BOTH_S, [{HEAD: SO_SO, MODEL: WELL}]),
    "a draft model that takes too long": (CHEAP, {"draft": 0.012}, [{MODEL: WELL}]),
    "four of eight with a good head": (costs(0.01), {"mtp": 0.001}, [{HEAD: WELL}, {HEAD: BADLY}] * 4),
    "width for nothing": (costs(0.0, 0.0), {"mtp": 0.0005}, [{HEAD: BADLY}]),
}  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
def test_hardly_slower_than_the_best_fixed_choice_and_than_none(world: str) -> None:
    cost, proposing_s, rows = WORLDS[world]
    played = World(cost, proposing_s, rows, noise=0.1, spikes=2, most=16 // len(rows))  # type: ignore[arg-type]
    assert played.run(300).rate(1000) > 0.97 * played.best()
    assert played.switches() < 60, "it does not switch to and fro"


@given(
    st.floats(0.0, 0.8),
    st.floats(0.0, 0.3),
    st.lists(st.floats(0.0, 0.95), min_size=PLACES, max_size=PLACES),
    st.sampled_from((1, 2, 8)),
    st.integers(0, 1000),
)
@settings(max_examples=10, deadline=None)
def test_never_much_slower_than_none(
    a_token: float, waiting: float, success: list[float], rows: int, seed: int
) -> None:
    """Width costs anything and drafts are right by any chance. In plain steps, from the first one on."""
    played = World(costs(a_token, waiting), {"mtp": 0.001}, [{HEAD: success}] * rows, most=16 // rows)
    played.random.seed(seed)
    played.run(400)
    lost = played.seconds / played.cost(rows, 0) - played.tokens / rows
    allowed = FIRST_CREDIT + 400 * CREDIT_PER_STEP - MOST_DEBT
    assert lost < allowed + 3, "what is allowed, with the debt of a trial and bad luck in its drafts"


@pytest.mark.parametrize("slow", [10, 30, 100])
@pytest.mark.parametrize(
    ("source", "success"), [(("lookup", 2), (1.0,) * PLACES), (("lookup", 2), BADLY), (HEAD, WELL)]
)
def test_steps_that_are_far_slower_than_rehearsed_are_few(
    slow: int, source: Source, success: Sequence[float]
) -> None:
    """An attention may take a hundred times as long for two tokens as for one, of a long text alone."""
    world = World(costs(0.1), {"mtp": 0.0005}, [{source: success}], noise=0.05)
    world.most = 2 if source == HEAD else 16
    world.cost = lambda rows, drafts: 0.01 * (slow if drafts > 0 else 1)
    while world.tokens < 10_000:
        world.step()
    lost = world.seconds / 0.01 - world.tokens
    assert lost < FIRST_CREDIT + 0.02 * 10_000 + 3 * slow


def test_each_length_of_text_has_costs_of_its_own() -> None:
    world = World(costs(0.05), {}, [{("lookup", 2): WELL}])
    drafts = []
    for length in (100, 1500, 6000, 50_000, 100):
        world.choice.costs.context = doublings(length)
        world.cost = costs(0.05 * (length / 1000) ** 2)
        world.run(600)
        drafts.append(fmean(plan.drafts for plan in world.plans[-200:]))
    short, _, long, longest, again = drafts
    assert short > 4
    assert long < 1
    assert longest < 1
    assert again == pytest.approx(short, rel=0.3), "as before the long text"


def test_a_text_that_changes_is_followed() -> None:
    played = World(CHEAP, {"mtp": 0.001}, [{HEAD: WELL}]).run(300)
    assert sum(bool(plan.drafts) for plan in played.plans[-100:]) > 90
    played.rows = [{HEAD: BADLY}]
    played.run(60)
    assert played.rate(600) > 0.97 * played.best()
    played.rows = [{HEAD: WELL}]
    played.run(600)
    assert played.rate(600) > 0.97 * played.best()


def test_costs_that_change_are_followed() -> None:
    """Another program takes the GPU, say: width is dear suddenly, and cheap again."""
    played = World(CHEAP, {"mtp": 0.001}, [{HEAD: (0.5,) * PLACES}]).run(300)
    played.cost = DEAR
    played.run(100)
    assert played.rate(600) > 0.97 * played.best()
    played.cost = CHEAP
    played.run(1500)
    assert played.rate(600) > 0.97 * played.best()


def test_rows_that_accept_little_draft_less() -> None:
    played = World(costs(0.01), {"mtp": 0.0001}, [{HEAD: WELL}, {HEAD: BADLY}], most=8).run(400)
    numbers = [Counter[int](), Counter[int]()]
    for plan in played.plans[-100:]:
        for number, planned in zip(numbers, plan.rows, strict=False):
            number[planned[1] if planned else 0] += 1
    assert max(numbers[0], key=numbers[0].__getitem__) >= 4
    assert max(numbers[1], key=numbers[1].__getitem__) <= 1


def test_what_is_off_is_tried_rarely_and_again() -> None:
    played = World(CHEAP, {"mtp": 0.001}, [{HEAD: BADLY}]).run(3000)
    tried = [at for at, plan in enumerate(played.plans) if plan.drafts]
    assert 0 < len(tried) < 0.03 * 3000
    assert tried[-1] > 2400


def test_debts_hold_back_what_gains_little_and_not_what_surely_pays() -> None:
    for success, waits in (((0.5, 0.2, 0.1, 0.1, 0.1), True), (WELL, False)):
        played = World(CHEAP, {"mtp": 0.001}, [{HEAD: success}]).run(300)
        played.choice.credit = -5.0
        played.step()
        assert bool(played.plans[-1].drafts) != waits


def test_it_decides_alike_when_it_is_told_the_same() -> None:
    one, other = (World(CHEAP, {"mtp": 0.001}, [{HEAD: WELL}] * 3, noise=0.2, most=8) for _ in range(2))
    assert one.run(200).plans == other.run(200).plans


def test_a_source_rests_while_no_trial_is_affordable() -> None:
    """Its pause may be over by then: an MTP head would get entries that no trial reads."""
    choice = World(costs(0.6, 0.5), {"mtp": 0.002}, [{HEAD: BADLY}]).run(491).choice
    assert choice.rests(HEAD), "its pause is over, but its trials have cost too much"
    choice.credit = LEAST_CREDIT + 0.1
    assert not choice.rests(HEAD)


class Forgetful(Choice):
    """One that weighs drafts before each step, also where nothing changed."""

    def plan(self, options: Sequence[Options], rows: int, most: int) -> Plan:
        self._weighed.clear()
        return Choice.plan(self, options, rows, most)


@pytest.mark.parametrize("success", [WELL, BADLY, (0.5, 0.5, 0.4, 0.4, 0.3)])
def test_what_was_weighed_holds_only_while_nothing_changes(success: Sequence[float]) -> None:
    rows = [{HEAD: success, ("lookup", 1): BADLY}, {HEAD: BADLY}]
    plans = [
        World(costs(0.1, 0.3), {"mtp": 0.001}, [dict(row) for row in rows], 0.2, 3, choice=choice)
        .run(250)
        .plans
        for choice in (Choice(), Forgetful())
    ]
    assert plans[0] == plans[1]
    assert len({plan.drafts for plan in plans[0]}) > 1


def test_success_that_is_told_between_plain_steps_is_weighed() -> None:
    world = World(costs(0.1), {}, [{("lookup", 0): BADLY}]).run(200)
    assert not world.choice.plan(world.options, 1, 16).drafts
    for _ in range(30):  # tokens that a lookup foretold while it waited
        world.choice.checked(world.options[0].success, ("lookup", 0), 1, 1)
    assert world.choice.plan(world.options, 1, 16).drafts


def test_the_cost_without_drafts_is_measured_again_now_and_then() -> None:
    played = World(CHEAP, {"mtp": 0.001}, [{HEAD: WELL}]).run(2 * AUDIT_STEPS)
    assert sum(not plan.drafts for plan in played.plans[-AUDIT_STEPS:]) == 3


# --- costs -----------------------------------------------------------------------------------------------


def known_costs(**more: float) -> StepCosts:
    """Costs rehearsed by steps of 1.2 to 2.6 s, beside plain ones of 1 s for one row."""
    costs = StepCosts()
    costs.rehearsed(1.0, {1: 1.2, 2: 1.4, 4: 1.8, 8: 2.6}, more)  # type: ignore[arg-type]
    for _ in range(3):
        costs.took(Kind(1, 0), 1.0)
    return costs


def test_costs_are_guessed_by_the_rehearsal() -> None:
    known = known_costs(mtp=0.3)
    assert [known.cost(Kind(1, drafts)) for drafts in (0, HELD, 1, 3, 7)] == pytest.approx(
        [1, 1.2, 1.4, 1.8, 2.6]
    )
    assert known.cost(Kind(1, 15)) == pytest.approx(4.2), "as far beyond as before"
    assert known.cost(Kind(1, 3, frozenset({"mtp"}))) == pytest.approx(1.8 + 3 * 0.3)
    assert known.cost(Kind(4, 1)) / known.cost(Kind(4, HELD)) == pytest.approx(2.6 / 1.8)


def test_measured_costs_replace_guesses_and_are_between_their_neighbours() -> None:
    known = known_costs()
    guessed = known.cost(Kind(4, 2))
    known.took(Kind(4, 2), 9.0)
    assert known.cost(Kind(4, 2)) == guessed, "with no plain step to compare it with, it does not count"
    assert not known.comparable(4)
    for _ in range(3):
        known.took(Kind(4, 0), 3.0)
    assert known.comparable(4)
    for _ in range(3):
        known.took(Kind(4, 2), 3.9)
        known.took(Kind(4, 8), 6.0)
    assert known.cost(Kind(4, 2)) == pytest.approx(1.3)
    assert known.cost(Kind(4, 4)) == pytest.approx(1.3 + (2.0 - 1.3) / 3)
    assert known.cost(Kind(4, 1)) == pytest.approx((1.2 + 1.3) / 2), "from a step that waits"
    assert known.cost(Kind(4, 16)) > 2.0


def test_a_shorter_draft_costs_no_more_than_a_longer_one() -> None:
    known = known_costs()
    for _ in range(3):
        known.took(Kind(1, 1), 3.0)
        known.took(Kind(1, 2), 1.5)
    assert known.cost(Kind(1, 1)) == pytest.approx(1.5)


def test_one_slow_step_is_no_measure() -> None:
    """Its kernels were compiled, say."""
    known = known_costs()
    for _ in range(3):
        known.took(Kind(1, 1), 1.1)
    known.took(Kind(1, 1), 100.0)
    assert known.cost(Kind(1, 1)) == pytest.approx(1.1)


def test_a_trial_measures_again() -> None:
    known = known_costs()
    for _ in range(20):
        known.took(Kind(1, 8), 3.5)
    assert known.cost(Kind(1, 8)) == pytest.approx(3.5)
    assert known.hoped(Kind(1, 8)) < 2
    known.renew(Kind(1, 8))
    assert known.cost(Kind(1, 8)) == pytest.approx(3.5), "what is in use stays"
    known.renew(Kind(1, 0))
    assert known.cost(Kind(1, 8)) == known_costs().cost(Kind(1, 8))


def test_forced_tokens_are_fed_as_many_as_save_time() -> None:
    choice = Choice()
    assert choice.forced(1, 10) == 10, "without a measure, all"
    choice.costs.took(Kind(1, 0), 1.0)
    choice.costs.rehearsed(1.0, {1: 1.0, 2: 1.2, 4: 2.0, 8: 8.0}, {})
    assert choice.forced(1, 10) == 2
    assert choice.forced(1, 0) == 0
