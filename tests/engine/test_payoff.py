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
    AT_FIRST,
    EARNED,
    FEW,
    LENGTHS,
    LONGEST_PAUSE,
    SHORT,
    DraftPlan,
    DraftPolicy,
    Proposer,
    RowOptions,
    Shares,
    Source,
    StepCosts,
    StepKind,
    bucket,
)

HEAD: Source = ("mtp", 0)
MODEL: Source = ("draft", 0)
PLACES = 5  # whose acceptance differs: the first, the second, two, four, and the rest
WELL, BADLY = (0.85, 0.8, 0.7, 0.7, 0.6), (0.05,) * PLACES
Cost = Callable[[int, int], float]  # seconds of a step by rows and the tokens that one is fed, as in StepKind


def costs(a_token: float, waiting: float = 0.1) -> Cost:
    """A step of one row takes 10 ms. Each further token and waiting take these parts of it."""

    def seconds(rows: int, fed: int) -> float:
        wider = a_token * (rows * max(fed, 1) - 1)
        return 0.01 * (1 + wider + (waiting if fed else 0))

    return seconds


@dataclass
class World:
    """Rows that decode, with the success of each source's drafts by their place.

    An MTP head computes drafts for the step after. `noise`: standard deviation of the logarithm of measured
    seconds. Of 100 steps, `spikes` take five times as long. `compiles`: so many times as long as later ones
    takes the first step of each width, which only the policy sees.
    """

    cost: Cost
    proposing_s: Mapping[Proposer, float]
    rows: list[dict[Source, Sequence[float]]]
    noise: float = 0.0
    spikes: float = 0.0
    most: int = 16
    compiles: float = 1.0
    policy: DraftPolicy = field(default_factory=DraftPolicy)
    shares: list[dict[Source, Shares]] = field(default_factory=list)
    compiled: set[tuple[int, int]] = field(default_factory=set)
    ready: bool = False  # the head has proposed
    waits: bool = False  # the step before had drafts
    seconds: float = 0.0
    plain_s: float = 0.0  # of plain steps for as many tokens
    tokens: float = 0  # as expected, which varies less than what was drawn
    plans: list[DraftPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(3)

    def run(self, steps: int) -> World:
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> None:
        count, before = len(self.rows), self.tokens
        self.shares += [{} for _ in self.rows[len(self.shares) :]]
        options: list[RowOptions] = [
            (dict.fromkeys(success, self.most), own)
            for success, own in zip(self.rows, self.shares, strict=False)
        ]
        plan = self.policy.plan(options, count, self.most)
        asked, proposer = drafts_of(plan), proposer_of(plan)
        begins = proposer == "mtp" and not self.ready
        tokens, drafts = count, 0
        self.tokens += count
        for (_, own), planned, success in zip(options, plan, self.rows, strict=False):
            if planned is None or (begins and planned[0] == HEAD):
                continue
            source, number = planned
            right = 0
            while right < number and self.random.random() < rate(success[source], right):
                right += 1
            self.policy.checked(own, source, number, right)
            tokens, drafts = tokens + right, max(drafts, number)
            self.tokens += sum(expected(success[source], number))
        fed = 1 + bucket(drafts) if asked or self.waits else 0
        took_s = self.cost(count, fed and 1 + drafts) + asked * self.costs_of(proposer)
        measured_s = took_s * self.random.lognormvariate(0, self.noise)
        measured_s *= 5 if self.random.random() < self.spikes / 100 else 1
        measured_s *= 1 if (count, fed) in self.compiled else self.compiles
        self.compiled.add((count, fed))
        self.policy.step(StepKind(count, fed, proposer), tokens, measured_s)
        self.ready, self.waits = proposer == "mtp", asked > 0
        self.seconds += took_s
        self.plain_s += self.cost(count, 0) * (self.tokens - before) / count
        self.plans.append(plan)

    def costs_of(self, proposer: Proposer) -> float:
        """Seconds of a draft of every row."""
        scale = self.cost(1, len(self.rows)) / self.cost(1, 1) if proposer == "mtp" else 1.0
        return scale * self.proposing_s.get(proposer, 0.0)

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
                found.append(tokens / (self.cost(count, 1 + length) + proposing_s))
        return max(found)

    def switches(self) -> int:
        return sum(bool(one) != bool(other) for one, other in pairwise(self.plans))


def drafts_of(plan: DraftPlan) -> int:
    return max([planned[1] for planned in plan if planned], default=0)


def proposer_of(plan: DraftPlan) -> Proposer:
    """The one that takes time: lookups may propose for other rows of the same step."""
    proposers: list[Proposer] = [planned[0][0] for planned in plan if planned]
    return next((each for each in proposers if each != "lookup"), "lookup")


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
    rates = []
    for seed in range(3, 7):
        played = World(cost, proposing_s, rows, noise=0.1, spikes=2, most=16 // len(rows))  # type: ignore[arg-type]
        played.random.seed(seed)
        rates.append(played.run(300).rate(1000))
        assert played.switches() < 60, "it does not switch to and fro"
    assert fmean(rates) > 0.965 * played.best()


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
    for steps, most in ((400, 50), (1200, 100)):  # the first trials of each width, then few of them
        played.run(steps)
        assert (played.seconds - played.plain_s) / played.cost(rows, 0) < most


def far_slower(slow: float, source: Source, success: Sequence[float]) -> World:
    """Steps that are fed several tokens take so many times as long as others."""
    world = World(costs(0.1), {"mtp": 0.0005}, [{source: success}], noise=0.05)
    world.most = 2 if source == HEAD else 16
    world.cost = lambda rows, fed: 0.01 * (slow if fed > 1 else 1)
    return world


@pytest.mark.parametrize("slow", [10, 30, 100])
@pytest.mark.parametrize(
    ("source", "success"), [(("lookup", 2), (1.0,) * PLACES), (("lookup", 2), BADLY), (HEAD, WELL)]
)
def test_steps_that_are_far_slower_than_others_are_few(
    slow: int, source: Source, success: Sequence[float]
) -> None:
    """An attention may take a hundred times as long for two tokens as for one, of a long text alone."""
    world = far_slower(slow, source, success)
    while world.tokens < 10_000:
        world.step()
    assert world.seconds < 1.05 * world.plain_s
    assert (world.seconds - world.plain_s) / 0.01 < AT_FIRST + 0.02 * 10_000 + 3 * slow


def test_all_sources_of_drafts_that_are_far_slower_lose_little_together() -> None:
    world = far_slower(100, HEAD, WELL)
    while world.tokens < 10_000:
        world.rows = [{HEAD: WELL, ("lookup", len(world.plans) // 20 % 3): (0.8,) * PLACES}]
        world.step()
    assert world.seconds < 1.06 * world.plain_s


@pytest.mark.parametrize("cost", [1.05, 1.3, 2.0, 5.0])
def test_text_that_is_copied_soon_has_long_drafts(cost: float) -> None:
    world = World(costs(0.1), {}, [{("lookup", 2): (0.98,) * PLACES}], noise=0.1)
    world.cost = lambda rows, fed: 0.01 * (cost if fed > 1 else 1)
    world.run(20)
    assert fmean(drafts_of(plan) for plan in world.plans) > 10
    assert world.rate(300) > 0.95 * world.best()


def test_phases_of_a_text_are_followed() -> None:
    """Half of the time it copies its prompt, and otherwise a head is right in a third of its drafts."""
    world = World(CHEAP, {"mtp": 0.001}, [], most=16)
    prose = {HEAD: (0.3, 0.2, 0.1, 0.1, 0.1)}
    for at in range(20):
        world.rows = [{**prose, ("lookup", 2): (0.97,) * PLACES} if at % 2 else prose]
        world.run(40)
    assert world.plain_s > 4.5 * world.seconds


def test_kernels_that_are_compiled_decide_nothing() -> None:
    for success in (WELL, (0.6, 0.3, 0.1, 0.1, 0.1)):
        played = World(CHEAP, {"mtp": 0.001}, [{HEAD: success}], compiles=100, most=3)
        assert played.run(100).rate(300) > 0.97 * played.best()


def test_rows_that_come_and_go_have_costs_of_their_own() -> None:
    world = World(costs(0.05), {"mtp": 0.001}, [], noise=0.05, most=3)
    for count in (1, 8, 2, 4) * 4:
        world.rows = [{HEAD: (0.8, 0.5, 0.4, 0.3, 0.2)}] * count
        world.run(150)
        if len(world.plans) > 8 * 150:
            assert world.rate(100) > 0.95 * world.best()


def test_each_length_of_text_has_costs_of_its_own() -> None:
    world = World(costs(0.05), {}, [{("lookup", 2): WELL}])
    drafts = []
    for length in (100, 1500, 6000, 50_000, 100):
        world.policy.costs.context = (length // SHORT).bit_length()
        world.cost = costs(0.05 * (length / 1000) ** 2)
        world.run(600)
        drafts.append(fmean(drafts_of(plan) for plan in world.plans[-200:]))
    short, _, long, longest, again = drafts
    assert short > 4
    assert long < 1
    assert longest < 1
    assert again == pytest.approx(short, rel=0.3), "as before the long text"


def test_a_text_that_changes_is_followed() -> None:
    played = World(CHEAP, {"mtp": 0.001}, [{HEAD: WELL}]).run(300)
    assert sum(bool(plan) for plan in played.plans[-100:]) > 90
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
        for number, planned in zip(numbers, plan, strict=False):
            number[planned[1] if planned else 0] += 1
    assert max(numbers[0], key=numbers[0].__getitem__) >= 4
    assert max(numbers[1], key=numbers[1].__getitem__) <= 1


def test_what_is_off_is_tried_rarely_and_again() -> None:
    played = World(CHEAP, {"mtp": 0.001}, [{HEAD: BADLY}]).run(3000)
    tried = [at for at, plan in enumerate(played.plans) if plan]
    assert 0 < len(tried) < 0.03 * 3000
    assert tried[-1] > 2400


def test_what_was_lost_keeps_sources_from_being_asked_again_and_not_what_pays() -> None:
    for success, pays in ((BADLY, False), (WELL, True)):
        played = World(CHEAP, {"mtp": 0.001}, [{HEAD: success}]).run(300)
        played.policy.allowance = -20.0
        played.run(LONGEST_PAUSE)
        assert sum(bool(plan) for plan in played.plans[300:]) == pytest.approx(pays * LONGEST_PAUSE, abs=5)


def test_drafts_begin_at_a_gain_that_is_no_noise_and_go_on_while_they_pay() -> None:
    policy, source = DraftPolicy(costs=known_costs()), ("lookup", 0)
    for _ in range(2):
        policy.costs.took(StepKind(1, 2), 2, 1.5)
    plans = []
    for share in (0.53, 0.57, 0.51, 0.49):
        policy.step(StepKind(1, 1), 1)
        plans.append(policy.plan([({source: 1}, {source: [(share, 20.0)]})], 1, 1))
    assert [drafts_of(plan) for plan in plans] == [0, 1, 1, 0]


def test_a_first_slow_step_is_a_loss_once_another_one_was_slow() -> None:
    """Its kernels were compiled, say."""
    policy = DraftPolicy(costs=known_costs())
    for gained in (0.8, -2 * 98.0):
        before = policy.allowance
        policy.step(StepKind(1, 2), 2, 100.0)
        assert policy.allowance == pytest.approx(before + EARNED + gained)


def test_a_source_is_suspended_while_it_may_not_be_asked() -> None:
    """Its pause may be over by then: an MTP head would get entries that are never read."""
    policy = World(costs(0.6, 0.5), {"mtp": 0.002}, [{HEAD: BADLY}]).run(2000).policy
    assert policy.suspends(HEAD), "it failed twice"
    at, _ = policy._pauses[HEAD]
    policy._steps, policy.allowance = at, -0.1
    assert policy.suspends(HEAD), "its pause is over, but drafts have cost too much"
    policy.allowance = 0.1
    assert not policy.suspends(HEAD)


class Forgetful(DraftPolicy):
    """One that compares drafts before each step, also where nothing changed."""

    def plan(self, options: Sequence[RowOptions], rows: int, most: int) -> DraftPlan:
        self._asked = None
        return DraftPolicy.plan(self, options, rows, most)


@pytest.mark.parametrize("success", [WELL, BADLY, (0.5, 0.5, 0.4, 0.4, 0.3)])
def test_what_was_compared_holds_only_while_nothing_changes(success: Sequence[float]) -> None:
    rows = [{HEAD: success, ("lookup", 1): BADLY}, {HEAD: BADLY}]
    plans = [
        World(costs(0.1, 0.3), {"mtp": 0.001}, [dict(row) for row in rows], policy=policy).run(250).plans
        for policy in (DraftPolicy(), Forgetful())
    ]
    assert plans[0] == plans[1]
    assert len({drafts_of(plan) for plan in plans[0]}) > 1


def test_success_that_is_told_between_plain_steps_is_weighed() -> None:
    world = World(costs(0.1), {}, [{("lookup", 0): BADLY}]).run(200)
    options: list[RowOptions] = [({("lookup", 0): 16}, world.shares[0])]
    assert not world.policy.plan(options, 1, 16)
    for _ in range(30):  # tokens that a lookup expected while it waited
        world.policy.checked(world.shares[0], ("lookup", 0), 1, 1)
    assert world.policy.plan(options, 1, 16)


def test_the_cost_without_drafts_is_measured_again_now_and_then() -> None:
    played = World(CHEAP, {"mtp": 0.001}, [{HEAD: WELL}]).run(2 * LONGEST_PAUSE)
    assert sum(not plan for plan in played.plans[-LONGEST_PAUSE:]) == FEW + 1, "one still waits"


def known_costs(rows: int = 1, plain_s: float = 1.0) -> StepCosts:
    costs = StepCosts()
    for _ in range(FEW):
        costs.took(StepKind(rows), rows, plain_s)
    return costs


GUESSES = {1: 1.1, 2: 1.2, 3: 1.3, 5: 1.5, 9: 1.9, 17: 2.7}


def test_costs_between_measured_ones_are_interpolated() -> None:
    known = known_costs()
    assert known.table(1, "lookup") == pytest.approx(GUESSES)
    for _ in range(2):
        known.took(StepKind(1, 9), 9, 3.8)
    middle = {2: 1.4375, 3: 1.775, 5: 2.45}
    assert known.table(1, "lookup") == pytest.approx({1: 1.1, **middle, 9: 3.8, 17: 2 * 2.7})
    assert known.table(1, "mtp") == pytest.approx(GUESSES), "of each proposer"


def test_costs_of_shorter_texts_and_fewer_rows_stand_for_others() -> None:
    known = known_costs()
    known.context = 1
    for kind in [StepKind(2)] * FEW + [StepKind(2, 2)] * 2:
        known.took(kind, kind.rows, 4.0 if kind.fed else 2.0)
    assert known.table(2, "lookup")[2] == known.table(5, "lookup")[2] == 2.0
    assert known.table(1, "lookup")[2] == pytest.approx(1.2), "one row may cost less"
    known.context = 3
    assert known.table(2, "lookup")[2] == 2.0
    known.context = 0
    assert known.table(2, "lookup")[2] == pytest.approx(1.2), "a shorter text may cost less"


def test_a_shorter_draft_costs_at_most_as_much_as_a_longer_one() -> None:
    known = known_costs()
    for kind, seconds in [(StepKind(1, 3), 5.0), (StepKind(1, 9), 2.0)] * 2:
        known.took(kind, 9, seconds)
    assert known.table(1, "lookup") == pytest.approx(
        GUESSES | {2: 2.0, 3: 2.0, 5: 2.0, 9: 2.0, 17: 5.4 / 1.9}
    )


def test_measured_costs_are_in_plain_steps_of_about_as_many_rows() -> None:
    known = StepCosts()
    known.took(StepKind(4, 3), 4, 3.9)
    known.took(StepKind(3, 3), 3, 4.2)
    known.took(StepKind(4, 3), 4, 9.0)
    assert known.table(4, "lookup") == pytest.approx(GUESSES), "without a plain step"
    for count in range(FEW):
        assert not known.plain_s(4), count
        known.took(StepKind(3 + count % 2), 3, 3.0)
    assert known.plain_s(3) == known.plain_s(4) == 3.0
    assert known.table(4, "lookup")[3] == pytest.approx(1.35), "but for the slowest"


def test_a_slow_step_counts_at_once_unless_it_is_the_first_of_its_kind() -> None:
    """Its kernels were compiled, say."""
    known, kind = known_costs(), StepKind(1, 2)
    known.took(kind, 2, 100.0)
    assert known.table(1, "lookup")[2] == pytest.approx(1.2)
    known.took(kind, 2, 1.1)
    assert known.table(1, "lookup")[2] == pytest.approx(1.1)
    known.forget("lookup")
    known.took(kind, 2, 3.9)
    assert known.table(1, "lookup")[2] == pytest.approx(1.2), "not twice as long as two plain steps"
    known.forget("lookup")
    known.took(kind, 2, 100.0)
    assert known.table(1, "lookup")[2] == pytest.approx(100.0)


def test_what_is_forgotten_is_guessed() -> None:
    known = known_costs()
    for kind in (StepKind(1, 9), StepKind(1, 2, "mtp")) * 2:
        known.took(kind, 1, 2.5)
    known.forget("lookup")
    assert known.table(1, "lookup") == pytest.approx(GUESSES)
    assert known.table(1, "mtp")[2] == pytest.approx(2.5)
    assert known.plain_s(1) == 1.0


def test_forced_tokens_are_fed_as_many_as_save_time() -> None:
    policy = DraftPolicy()
    assert policy.forced(1, 40) == 40, "without a measure, all"
    policy.costs = known_costs()
    for drafts, cost in ((1, 1.2), (2, 1.4), (4, 4.0), (8, 8.0), (16, 16.0)):
        for _ in range(2):
            policy.costs.took(StepKind(1, 1 + drafts), 1 + drafts, cost)
    assert policy.forced(1, 10) == 2
    assert policy.forced(1, 0) == 0
    policy.step(StepKind(1, 65), 41, 1.0, paid=False)
    assert policy.allowance > AT_FIRST, "more than drafts ever are"
