"""Several groups of one deployment, and several deployments: failover, routing, blame."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.api.backend import Health, Progress, StreamEnd, Tokens
from mlxtp.errors import Code, GroupError, LinkError, MlxtpError, RequestError
from mlxtp.gateway import ready_groups
from mlxtp.gateway.admission import AdmissionLimits
from mlxtp.gateway.gateway import Gateway
from mlxtp.gateway.request import PROVEN_TOKENS, SUSPECT
from mlxtp.gateway.routing import GroupLoad
from mlxtp.wire.messages import BLOCK, Accepted, Cancel, Delta, Error, Finished, Generate, Message, Sampling

from .test_gateway import MODEL, TEXT, FakeRanks, error_of, everything

LOST = GroupError("rank 1 is gone", Code.RANK_LOST)
OTHER = replace(MODEL, id="other", aliases=())


class Stage:
    """A gateway with groups `tiny#0`, `tiny#1` and so on, and the ranks behind each."""

    def __init__(self, max_open: int = 100) -> None:
        def health(_model: str) -> Health:
            return Health("ready", 1, 2, "ring", "tiny", None, True, self.gateway.open_requests)

        self.gateway = Gateway(health, AdmissionLimits(max_open))
        self.ranks: dict[str, FakeRanks] = {}

    def serve(self, *groups: str, here: bool = True, model: Any = MODEL) -> None:
        for group in groups:
            self.ranks[group] = FakeRanks()
            deployment = group.partition("#")[0]
            self.gateway.serve(group, deployment, cast(Any, self.ranks[group]), model, TEXT, here=here)

    def lose(self, group: str, error: MlxtpError = LOST) -> None:
        self.gateway.park(group, error)

    def asked(self, group: str) -> list[Generate]:
        return self.ranks[group].sent_of(Generate)

    def where(self, uid: int) -> str:
        [group] = [name for name in self.ranks if any(each.uid == uid for each in self.asked(name))]
        return group

    def say(self, uid: int, tokens: list[int], start: int = 0) -> None:
        for index, token in enumerate(tokens, start):
            self.gateway.on_event(Delta((uid,), (index,), (token,)))

    def finish(self, uid: int, generated: int = 1, cached: int = 0) -> None:
        self.gateway.on_event(Finished(uid, "stop", generated, generated, cached=cached))


def play(story: Callable[[Stage], Awaitable[None]], *groups: str, here: bool = True) -> None:
    async def run() -> None:
        stage = Stage()
        stage.serve(*groups or ("tiny#0", "tiny#1"), here=here)
        async with asyncio.timeout(20):
            await story(stage)
        stage.gateway.close(LOST)
        assert stage.gateway.open_requests == 0

    asyncio.run(run())


@pytest.fixture
def groups() -> int:
    return 2


@pytest.fixture
def here() -> bool:
    return True


@pytest.fixture
def stage(groups: int, here: bool) -> Iterator[Stage]:
    stage = Stage()
    stage.serve(*(f"tiny#{number}" for number in range(groups)), here=here)
    yield stage
    stage.gateway.close(LOST)
    assert stage.gateway.open_requests == 0


elsewhere = pytest.mark.parametrize("here", [False])


def served(groups: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("groups", [groups])


@pytest.mark.parametrize("here", [True, False])
async def test_an_answer_goes_on_at_the_other_group_at_once(stage: Stage, here: bool) -> None:
    """From the same position, with the same seed; nothing is awaited in between."""
    answer = stage.gateway.generate(Generate(0, (1, 2, 3), 40, Sampling(0.7, seed=5)))
    stage.gateway.on_event(Accepted(1))
    first, other = sorted(stage.ranks, key=lambda group: group != stage.where(1))
    assert answer.group == first
    stage.say(1, list(range(50, 50 + PROVEN_TOKENS)))
    stage.lose(first)
    assert answer.group == other
    [begun], [again] = stage.asked(first), stage.asked(other)
    so_far = tuple(range(50, 50 + PROVEN_TOKENS))
    assert (again.tokens, again.answered, again.strikes) == ((1, 2, 3, *so_far), len(so_far), 0)
    assert (again.sampling, again.group) == (begun.sampling, "" if here else other)
    stage.say(1, [99])  # from ranks that are being ended
    stage.say(2, [70, 71], start=PROVEN_TOKENS)
    stage.finish(2, PROVEN_TOKENS + 2)
    *tokens, end = await everything(answer)
    assert [each.tokens[0] for each in tokens if isinstance(each, Tokens)] == [*so_far, 70, 71]
    assert end == StreamEnd("stop", PROVEN_TOKENS + 2)


async def test_the_end_of_one_group_touches_no_request_of_another(stage: Stage) -> None:
    answers = [stage.gateway.generate(Generate(0, (number,), 99)) for number in range(4)]
    assert [len(stage.asked(group)) for group in stage.ranks] == [2, 2]
    stay = [each.uid for each in stage.asked("tiny#1")]
    for each in stage.asked("tiny#0"):
        stage.say(each.uid, [7] * PROVEN_TOKENS)
    stage.lose("tiny#0")
    assert [each.uid for each in stage.asked("tiny#1")][:2] == stay
    assert [each.strikes for each in stage.asked("tiny#1")] == [0, 0, 0, 0]
    assert stage.gateway.models() == (MODEL,)
    for each in stage.asked("tiny#1"):
        stage.finish(each.uid)
    for answer in answers:
        assert (await everything(answer))[-1] == StreamEnd("stop", 1)


async def test_without_another_group_requests_wait_and_go_to_the_first_that_is_ready(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    for group in ("tiny#0", "tiny#1"):
        stage.lose(group, LinkError("gone", Code.LINK_LOST))
    assert answer.progress() == Progress("restarting")
    assert (answer.group, stage.gateway.models()) == ("", ())
    stage.serve("tiny#1")
    assert [each.tokens for each in stage.asked("tiny#1")] == [(1,)]
    await answer.aclose()
    assert stage.ranks["tiny#1"].sent_of(Cancel) == [Cancel(stage.asked("tiny#1")[0].uid)]


@served(1)
async def test_a_group_that_comes_later_gets_all_requests_until_it_has_as_many(stage: Stage) -> None:
    """What the first one has, begun or not, stays there: it has the prompts. If it fails, they go on."""
    answers = [stage.gateway.generate(Generate(0, (number,), 99)) for number in range(30)]
    for uid in range(1, 29):  # two of them are in its queue
        stage.say(uid, [7])
    stage.serve("tiny#1")
    counts = []
    for number in range(30, 62):
        answers.append(stage.gateway.generate(Generate(0, (number,), 99)))
        counts.append((len(stage.asked("tiny#0")), len(stage.asked("tiny#1"))))
    assert counts == [*((30, count) for count in range(1, 31)), (31, 30), (31, 31)]
    stage.lose("tiny#0", LinkError("gone", Code.LINK_LOST))
    assert sorted(each.tokens[0] for each in stage.asked("tiny#1")) == [*range(62)]
    for answer in answers:
        await answer.aclose()


async def test_a_group_that_cannot_be_reached_is_passed_over(stage: Stage) -> None:
    stage.ranks["tiny#0"].broken = LinkError("gone", Code.LINK_LOST)
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    assert [len(stage.asked(group)) for group in stage.ranks] == [0, 1]
    await answer.aclose()


async def test_a_group_that_is_detached_keeps_its_requests_and_gets_no_more(stage: Stage) -> None:
    answers = [stage.gateway.generate(Generate(0, (number,), 9)) for number in range(2)]
    stage.gateway.detach("tiny#0")
    answers += [stage.gateway.generate(Generate(0, (number,), 9)) for number in range(2)]
    assert [len(stage.asked(group)) for group in stage.ranks] == [1, 3]
    stage.lose("tiny#0", LinkError("gone", Code.LINK_LOST))  # it ends after all
    assert len(stage.asked("tiny#1")) == 4
    for answer in answers:
        await answer.aclose()


@elsewhere
async def test_what_one_owner_refuses_goes_to_another_before_its_client_hears_of_it(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.on_event(Error(Code.OVERLOADED, "full", 1))
    assert [len(stage.asked(group)) for group in stage.ranks] == [1, 1]
    stage.gateway.on_event(Error(Code.OVERLOADED, "full, too", 2))
    with pytest.raises(RequestError, match="full, too"):
        await answer.accepted()


@elsewhere
async def test_what_a_group_about_to_stop_refuses_goes_to_the_only_other_one(stage: Stage) -> None:
    """The group has left before its refusal comes; the other one has refused nothing."""
    answer = stage.gateway.generate(Generate(0, (1,), 90))
    first = stage.where(1)
    stage.gateway.detach(first)
    stage.gateway.on_event(Error(Code.SHUTTING_DOWN, "this Mac is about to stop; try again", 1))
    assert [len(stage.asked(group)) for group in stage.ranks] == [1, 1]
    await answer.aclose()


@elsewhere
@served(3)
async def test_what_an_owner_gives_back_goes_to_another_group_at_once(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 90))
    first = stage.where(1)
    stage.gateway.on_event(Error(Code.RANK_LOST, "rank 1 is gone", 1))
    [again] = [each for group in stage.ranks if group != first for each in stage.asked(group)]
    assert (again.uid, again.strikes) == (2, 1)
    await answer.aclose()


async def test_requests_of_other_agents_go_back_and_find_the_group_that_they_name(stage: Stage) -> None:
    told: list[Message] = []
    for uid in (70, 71):
        stage.gateway.relay(Generate(uid, (1,), 9, group="tiny#1"), told.append)
    assert [len(stage.asked(group)) for group in stage.ranks] == [0, 2]
    assert {each.group for each in stage.asked("tiny#1")} == {""}
    stage.lose("tiny#1")
    assert told == [Error(Code.RANK_LOST, "rank 1 is gone", uid) for uid in (70, 71)]
    assert stage.asked("tiny#0") == []
    with pytest.raises(GroupError) as back:
        stage.gateway.relay(Generate(72, (1,), 9, group="tiny#1"), told.append)
    assert back.value.code is Code.LINK_LOST


async def test_one_suspect_of_a_deployment_runs_at_a_time_over_all_groups(stage: Stage) -> None:
    stage.gateway.detach("tiny#1")
    answers = [stage.gateway.generate(Generate(0, (number,), 99)) for number in range(3)]
    for _ in range(SUSPECT):
        stage.lose("tiny#0")
        stage.serve("tiny#0")
    stage.serve("tiny#1")
    asked = [each for group in stage.ranks for each in stage.asked(group)]
    assert [(each.tokens, each.strikes) for each in asked] == [((0,), SUSPECT)]
    stage.finish(asked[0].uid)
    assert len([each for group in stage.ranks for each in stage.asked(group)]) == 2
    for answer in answers:
        await answer.aclose()
    assert stage.gateway.open_requests == 0


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("poison", range(6))
async def test_one_poisonous_request_leaves_one_of_two_groups_up(
    stage: Stage, poison: int, here: bool
) -> None:
    """Requests that have come far go on at once, the others one by one when both groups are ready again."""
    answers = [stage.gateway.generate(Generate(0, (number,), 99)) for number in range(6)]
    groups = stage.gateway.deployments.named("tiny").groups
    seen: set[int] = set()
    ends = 0

    def new(name: str) -> list[Generate]:
        return [each for each in stage.asked(name) if each.uid not in seen]

    for _ in range(40):
        for name in list(groups):
            asked = new(name)
            seen.update(each.uid for each in asked)
            if any(each.tokens[0] == poison for each in asked):
                stage.lose(name)
                ends += 1
                assert groups, "one group stays up"
                continue
            for each in asked:
                stage.say(each.uid, [7] * PROVEN_TOKENS, start=each.answered)
        if not any(map(new, groups)):
            lost = [name for name in stage.ranks if name not in groups]
            if not lost:
                break
            stage.serve(*lost, here=here)
    assert ends == SUSPECT
    for number, answer in enumerate(answers):
        if number == poison:
            assert (await error_of(answer)).code is Code.REQUEST_FATAL
    for name in groups:
        for each in stage.asked(name):
            stage.finish(each.uid)
    for number, answer in enumerate(answers):
        if number != poison:
            assert (await everything(answer))[-1] == StreamEnd("stop", 1)


async def test_a_suspect_waits_for_a_second_group_and_others_go_on_at_once(stage: Stage) -> None:
    stage.gateway.detach("tiny#1")
    far, begun, later = (stage.gateway.generate(Generate(0, (number,), 99)) for number in range(3))
    stage.serve("tiny#1")
    stage.say(1, [7] * PROVEN_TOKENS)
    stage.lose("tiny#0")
    assert [each.tokens[0] for each in stage.asked("tiny#1")] == [0]
    fresh = stage.gateway.generate(Generate(0, (3,), 9))
    assert [each.tokens[0] for each in stage.asked("tiny#1")] == [0, 3]
    assert stage.gateway.deployments.phases["held_back"] == 2
    stage.serve("tiny#0")
    [first] = [each for name in stage.ranks for each in stage.asked(name) if each.strikes]
    assert first.tokens == (1,)
    stage.finish(first.uid)
    assert [each.tokens for name in stage.ranks for each in stage.asked(name) if each.strikes][-1] == (2,)
    for answer in (far, begun, later, fresh):
        await answer.aclose()


async def test_a_suspect_waits_no_longer_than_for_a_group(stage: Stage) -> None:
    dispatcher = stage.gateway.deployments.named("tiny")
    dispatcher.recovery_s = 0.05
    answers = [stage.gateway.generate(Generate(0, (number,), 99)) for number in range(2)]
    stage.lose("tiny#0")
    assert len(stage.asked("tiny#1")) == 1
    await asyncio.sleep(0.2)
    assert len(stage.asked("tiny#1")) == 2
    for answer in answers:
        await answer.aclose()


def conversation(number: int, blocks: int) -> tuple[int, ...]:
    return tuple(number * 100_000 + index for index in range(blocks * BLOCK))


async def test_a_second_turn_goes_where_the_first_one_is_cached(stage: Stage) -> None:
    stage.gateway.generate(Generate(0, conversation(1, 2), 9))
    stage.gateway.generate(Generate(0, conversation(2, 2), 9))
    for uid in (1, 2):
        stage.finish(uid)
    assert stage.where(1) != stage.where(2)
    for number in (2, 1, 1, 2):
        answer = stage.gateway.generate(Generate(0, (*conversation(number, 2), 8, 8), 9))
        uid = max(each.uid for group in stage.ranks for each in stage.asked(group))
        assert stage.where(uid) == stage.where(number)
        stage.finish(uid)
        await everything(answer)


@elsewhere
async def test_what_others_have_cached_does_not_count(stage: Stage) -> None:
    """Not to those who share nothing with them; to these it counts at every gateway."""
    there = Stage()
    there.serve("tiny#1")
    there.gateway.generate(Generate(0, conversation(1, 4), 9), sharer="key a")
    report = there.gateway.deployments.named("tiny").groups.load_of("tiny#1")
    stage.gateway.load("tiny#1", replace(report, requests=0, queued=0))
    expected = {"": "tiny#0", "key b": "tiny#0", "key a": "tiny#1"}
    for uid, sharer in enumerate(expected, 1):
        answer = stage.gateway.generate(Generate(0, (*conversation(1, 4), 5), 9), sharer=sharer)
        stage.finish(uid)
        await everything(answer)
    assert [stage.where(uid) for uid in (1, 2, 3)] == list(expected.values())


def test_requests_of_one_sharer_have_one_salt_at_every_gateway() -> None:
    def salts(stage: Stage) -> list[int]:
        stage.serve("tiny#0")
        for sharer in ("", "key a", "key b", "key a"):
            stage.gateway.generate(Generate(0, (1, 2, 3), 9), sharer=sharer)
        asked = [each.salt for each in stage.asked("tiny#0")]
        stage.gateway.relay(Generate(1, (1, 2, 3), 9, salt=77), [].append)
        assert stage.asked("tiny#0")[-1].salt == 77, "that of the gateway that has the client"
        stage.gateway.close(LOST)
        return asked

    async def story() -> None:
        none, one, other, again = salts(Stage())
        assert (none, again) == (0, one)
        assert len({none, one, other}) == 3
        assert salts(Stage()) == [none, one, other, again]

    asyncio.run(story())


async def test_the_answer_counts_as_cached_too(stage: Stage) -> None:
    prompt, said = conversation(1, 1)[:-6], [7] * (BLOCK + 6)
    stage.gateway.generate(Generate(0, prompt, 900))
    stage.say(1, said)
    stage.finish(1, len(said))
    dispatcher = stage.gateway.deployments.named("tiny")
    answer = stage.gateway.generate(Generate(0, (*prompt, *said, 3), 9))
    home = dispatcher.groups[stage.where(1)]
    assert home.prefixes.match(answer.hashes()) == 2 * BLOCK
    assert stage.where(2) == stage.where(1)
    for group in (stage.where(1), "none"):
        stage.gateway.deployments.forget_prefixes(group)
    assert home.prefixes.match(answer.hashes()) == 0


def cached_share(groups: int, *, around: bool, seed: int) -> float:
    """Return the share of 32 second turns that find the first one cached; `around`: the groups take turns."""
    order = random.Random(seed)
    hits = []

    async def story(stage: Stage) -> None:
        homes, uid = {}, 0
        for turn in (1, 2):
            numbers = list(range(32))
            order.shuffle(numbers)
            for place, number in enumerate(numbers):
                uid += 1
                stage.gateway.generate(Generate(0, (*conversation(number, 3), *[4] * (turn - 1)), 9))
                where = f"tiny#{place % groups}" if around else stage.where(uid)
                if turn == 2:
                    hits.append(where == homes[number])
                homes[number] = where
                if place % 4 == 3:  # some of them run at the same time
                    for each in range(uid - 3, uid + 1):
                        stage.finish(each)

    play(story, *(f"tiny#{number}" for number in range(groups)))
    return sum(hits) / len(hits)


@pytest.mark.parametrize("seed", range(5))
def test_second_turns_over_two_groups_find_as_much_cached_as_over_one(seed: int) -> None:
    one = cached_share(1, around=False, seed=seed)
    assert cached_share(2, around=False, seed=seed) >= 0.95 * one
    assert cached_share(2, around=True, seed=seed) < 0.75 * one


@elsewhere
async def test_what_a_report_says_of_own_requests_ends_with_them(stage: Stage) -> None:
    """The next report may be half a second away; until then other agents' requests still count."""
    groups = stage.gateway.deployments.named("tiny").groups
    first = stage.gateway.generate(Generate(0, tuple(range(600)), 8))
    [uid] = [each.uid for name in stage.ranks for each in stage.asked(name)]
    home = stage.where(uid)
    stage.gateway.load(home, GroupLoad(queued=650, requests=3, speed=1000.0))
    assert (groups.load_of(home).queued, groups.load_of(home).requests) == (650, 3)
    stage.say(uid, [7])
    stage.finish(uid)
    await everything(first)
    assert (groups.load_of(home).queued, groups.load_of(home).requests) == (50, 2)


async def test_each_model_has_its_own_groups_and_its_own_end(stage: Stage) -> None:
    stage.serve("other#0", model=OTHER)
    assert [each.id for each in stage.gateway.models()] == ["tiny", "other"]
    stage.gateway.deployments.order = lambda: ("other", "tiny")
    assert [each.id for each in stage.gateway.models()] == ["other", "tiny"]
    tiny = stage.gateway.generate(Generate(0, (1,), 9), model="tiny")
    other = stage.gateway.generate(Generate(0, (2,), 9))
    assert (stage.where(1)[:4], stage.where(2)) == ("tiny", "other#0")
    with pytest.raises(RequestError):
        stage.gateway.generate(Generate(0, (2,), 9), model="third")
    stage.gateway.fail("other", GroupError("it was unloaded", Code.SHUTTING_DOWN))
    assert (await error_of(other)).code is Code.SHUTTING_DOWN
    assert stage.gateway.models() == (MODEL,)
    assert (stage.gateway.text("other"), stage.gateway.text()) == (None, TEXT)
    stage.finish(1)
    assert await everything(tiny) == [StreamEnd("stop", 1)]


async def test_the_requests_of_a_client_count_together_over_groups_and_deployments() -> None:
    stage = Stage(max_open=8)
    stage.serve("tiny#0", "tiny#1")
    stage.serve("other#0", model=OTHER)
    for number in range(7):
        stage.gateway.generate(Generate(0, (1,), 9), client="a", model=("tiny", "other")[number % 2])
    with pytest.raises(RequestError, match="7 requests of this client are open"):
        stage.gateway.generate(Generate(0, (1,), 9), client="a", model="tiny")
    stage.gateway.close(LOST)


@served(0)
async def test_a_group_is_unused_from_the_end_of_its_last_request_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one has some seconds for its first request. From 10 s on only steps are counted."""
    clock = [1000.0]
    monkeypatch.setattr(ready_groups, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    stage.serve("tiny#0")
    deployments = stage.gateway.deployments

    def after(seconds: float) -> int:
        clock[0] += seconds
        return deployments.unused_s("tiny#0")

    assert (after(9.9), after(1.3)) == (0, 1)
    answer = stage.gateway.generate(Generate(0, (1, 2, 3), 40))
    assert after(500) == 0
    stage.finish(1)
    assert (after(0), after(9.5), after(20)) == (0, 9, 20)
    await answer.aclose()
    gone = stage.gateway.generate(Generate(0, (1, 2, 3), 40))
    assert after(50) == 0
    await gone.aclose()
    assert after(3) == 3, "its client has left"
    stage.gateway.generate(Generate(0, (1, 2, 3), 40))
    stage.gateway.on_event(Error(Code.BAD_REQUEST, "no", 3))
    assert after(4) == 4, "it was refused"
    deployments.leased = lambda name: name == "tiny"
    assert after(0) == 0, "a client is about to send its request"
    assert deployments.unused_s("tiny#7") == 0
