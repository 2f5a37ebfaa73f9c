"""Requests whose group ends under them, before ranks that only remember what they were sent."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlxtp.api.backend import StreamEnd, Tokens
from mlxtp.errors import Code, GroupError, LinkError, MlxtpError, RequestError
from mlxtp.gateway import dispatcher
from mlxtp.gateway.request import PROVEN_TOKENS, SUSPECT
from mlxtp.wire.messages import Accepted, Cancel, Delta, Error, Finished, Generate, Message, Sampling, Shaping

from .test_gateway import DEPLOYMENT, GROUP, MODEL, TEXT, FakeRanks, Stage, error_of, everything
from .test_gateway import max_open as max_open
from .test_gateway import stage as stage

LOST = GroupError("rank 1 is gone", Code.RANK_LOST)
REPLANNED = GroupError("a better group is there", Code.REPLANNED)


def asked(ranks: FakeRanks) -> list[Generate]:
    found: list[Generate] = ranks.sent_of(Generate)
    return found


@pytest.mark.parametrize("why", [LOST, REPLANNED])
async def test_the_next_group_is_asked_for_what_is_missing(stage: Stage, why: GroupError) -> None:
    """With everything that decides which token comes next, and under a uid that was never used."""
    wanted = Generate(
        0, (1, 2, 3), 9, Sampling(0.7, seed=5), Shaping(min_tokens=2), 3, ignore_eos=True, batch=True
    )
    answer = stage.gateway.generate(wanted)
    stage.gateway.on_event(Accepted(1))
    stage.say(1, 50, 51)
    stage.gateway.park(GROUP, why)
    stage.say(1, 52, start=2)  # from ranks that are being ended
    ranks = stage.next_group()
    [again] = asked(ranks)
    [first] = asked(stage.ranks)
    strikes = 1 if why is LOST else 0
    assert first == replace(wanted, uid=1)
    assert again == replace(first, uid=2, tokens=(1, 2, 3, 50, 51), answered=2, strikes=strikes)
    stage.say(2, 60, start=2)
    stage.finish(2, "stop", 4)
    assert await everything(answer) == [Tokens((50,)), Tokens((51,)), Tokens((60,)), StreamEnd("stop", 4)]
    assert stage.open == 0


async def test_a_request_that_was_not_even_accepted_is_asked_again(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1, 2), 9))
    stage.gateway.park(GROUP, LOST)
    accepted = asyncio.ensure_future(answer.accepted())
    await asyncio.sleep(0)
    assert not accepted.done()
    assert asked(stage.next_group()) == [Generate(2, (1, 2), 9, strikes=1)]
    stage.gateway.on_event(Accepted(2))
    await accepted
    stage.finish(2)
    await everything(answer)


async def test_it_survives_several_groups(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    for uid in range(1, 6):
        stage.say(uid, 50 + uid, start=uid - 1)
        stage.gateway.park(GROUP, REPLANNED)
        [again] = asked(stage.next_group())
        assert (again.uid, again.answered) == (uid + 1, uid)
    stage.finish(6, "length", 5)
    assert [e.tokens[0] for e in await everything(answer) if isinstance(e, Tokens)] == [51, 52, 53, 54, 55]


async def test_an_answer_that_lacks_only_its_end_is_not_asked_again(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 2))
    stage.say(1, 50, 51)
    stage.gateway.park(GROUP, LOST)
    assert asked(stage.next_group()) == []
    assert (await everything(answer))[-1] == StreamEnd("length", 2)
    assert stage.open == 0


async def test_who_waits_for_its_turn_alone_is_not_given_up_while_there_is_a_group(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.gateway.deployments.named(DEPLOYMENT), "recovery_s", 0.02)
    answers = [stage.gateway.generate(Generate(0, (1, 2, 3), 50)) for _ in range(3)]
    for _ in range(SUSPECT):
        for sent in asked(stage.ranks):
            stage.gateway.on_event(Accepted(sent.uid))
        stage.gateway.park(GROUP, LOST)
        ranks = stage.next_group()
    for turn in range(3):
        *_, alone = asked(ranks)
        assert len(asked(ranks)) == turn + 1
        stage.gateway.on_event(Accepted(alone.uid))
        await asyncio.sleep(0.05)
        stage.say(alone.uid, 7)
        stage.finish(alone.uid)
    assert [await everything(answer) for answer in answers] == [[Tokens((7,)), StreamEnd("stop", 1)]] * 3


async def test_meanwhile_new_requests_are_refused_and_old_ones_count(stage: Stage) -> None:
    answers = [stage.gateway.generate(Generate(0, (1,), 9)) for _ in range(2)]
    stage.gateway.park(GROUP, LOST)
    assert stage.open == 2
    with pytest.raises(MlxtpError) as refused:
        stage.gateway.generate(Generate(0, (1,), 9))
    assert refused.value.code is Code.NOT_READY
    stage.next_group()
    assert stage.open == 2
    for answer in answers:
        await answer.aclose()
    assert stage.open == 0


async def test_a_client_that_leaves_during_the_pause_leaves_nothing_behind(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.park(GROUP, LOST)
    await answer.aclose()
    assert stage.open == 0
    assert stage.ranks.sent_of(Cancel) == []  # those ranks are gone
    assert stage.next_group().sent == []


async def test_a_client_that_leaves_after_the_pause_cancels_where_its_request_is_now(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.park(GROUP, LOST)
    ranks = stage.next_group()
    await answer.aclose()
    assert ranks.sent_of(Cancel) == [Cancel(2)]
    assert stage.ranks.sent_of(Cancel) == []


async def test_no_request_waits_longer_than_the_limit(stage: Stage) -> None:
    stage.gateway.deployments.named(DEPLOYMENT).recovery_s = 0.05
    open_one = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.on_event(Accepted(1))
    never_accepted = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.park(GROUP, LOST)
    error = await error_of(open_one)
    assert (error.code, "rank 1 is gone" in error.detail) == (Code.RANK_LOST, True)
    with pytest.raises(GroupError):
        await never_accepted.accepted()
    assert stage.open == 0
    assert stage.next_group().sent == []


@pytest.mark.parametrize(("load_s", "waits_s"), [(0.0, 60.0), (19.0, 60.0), (63.0, 189.0)])
async def test_a_model_that_takes_long_to_load_is_waited_for(
    stage: Stage, load_s: float, waits_s: float
) -> None:
    stage.gateway.serve(GROUP, DEPLOYMENT, cast(Any, stage.ranks), MODEL, TEXT, load_s=load_s)
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    began = asyncio.get_running_loop().time()
    stage.gateway.park(GROUP, LOST)
    assert answer.pending is not None
    assert answer.pending.when() - began == pytest.approx(waits_s, abs=5.0)
    await answer.aclose()


async def test_a_group_that_takes_it_up_and_says_nothing_is_not_waited_for_either(stage: Stage) -> None:
    stage.gateway.deployments.named(DEPLOYMENT).recovery_s = 0.05
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.on_event(Accepted(1))
    stage.gateway.park(GROUP, LOST)
    ranks = stage.next_group()
    await error_of(answer)
    assert ranks.sent_of(Cancel) == [Cancel(2)]


async def test_who_was_accepted_again_has_all_the_time_it_needs(stage: Stage) -> None:
    stage.gateway.deployments.named(DEPLOYMENT).recovery_s = 0.05
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.park(GROUP, LOST)
    stage.next_group()
    stage.gateway.on_event(Accepted(2))
    await asyncio.sleep(0.1)
    stage.finish(2)
    assert await everything(answer) == [StreamEnd("stop", 1)]


async def test_only_an_answer_that_has_not_begun_goes_on_with_another_revision(stage: Stage) -> None:
    begun, fresh = (stage.gateway.generate(Generate(0, (1,), 9)) for _ in range(2))
    stage.say(1, 50)
    stage.gateway.park(GROUP, REPLANNED)
    ranks = FakeRanks()
    stage.gateway.serve(GROUP, DEPLOYMENT, cast(Any, ranks), replace(MODEL, path=Path("/newer")), TEXT)
    assert [each.tokens for each in asked(ranks)] == [(1,)]
    with pytest.raises(GroupError, match="send the request again"):
        await everything(begun)
    stage.finish(asked(ranks)[0].uid)
    assert await everything(fresh)


async def test_another_model_ends_what_was_asked_of_the_last_one(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.park(GROUP, REPLANNED)
    ranks = FakeRanks()
    stage.gateway.serve(
        GROUP, DEPLOYMENT, cast(Any, ranks), replace(MODEL, id="other", path=Path("/other")), TEXT
    )
    assert (await error_of(answer)).code is Code.SHUTTING_DOWN
    assert ranks.sent == []


async def test_requests_wait_for_the_next_group_however_often_it_is_announced(stage: Stage) -> None:
    for _ in range(2):  # the owner decides in each round until the ranks have ended
        stage.gateway.detach(GROUP, REPLANNED)
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.park(GROUP, REPLANNED)
    [again] = asked(stage.next_group())
    stage.finish(again.uid)
    assert await everything(answer) == [StreamEnd("stop", 1)]


async def test_a_desk_that_breaks_at_once_leaves_requests_waiting(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.park(GROUP, LOST)
    broken = FakeRanks()
    broken.broken = LinkError("gone", Code.LINK_LOST)
    stage.gateway.serve(GROUP, DEPLOYMENT, cast(Any, broken), MODEL, TEXT)
    assert stage.open == 1
    stage.gateway.park(GROUP, LOST)
    [again] = asked(stage.next_group())
    stage.finish(again.uid)
    assert await everything(answer) == [StreamEnd("stop", 1)]


async def test_of_several_suspects_one_goes_at_a_time(stage: Stage) -> None:
    """The second of three kills; the others get their answers."""
    answers = [stage.gateway.generate(Generate(0, (number,), 99)) for number in (1, 2, 3)]
    for _ in range(2):
        stage.gateway.park(GROUP, LOST)
        ranks = stage.next_group()
    [first] = asked(ranks)
    assert (first.tokens, first.strikes) == ((1,), 2)
    stage.say(first.uid, *[5] * PROVEN_TOKENS)
    second = asked(ranks)[1]
    assert (second.tokens, len(asked(ranks))) == ((2,), 2)
    stage.gateway.park(GROUP, LOST)
    assert (await error_of(answers[1])).code is Code.REQUEST_FATAL
    ranks = stage.next_group()
    again = {each.tokens[0]: each for each in asked(ranks)}
    assert (again[1].strikes, again[1].answered, again[3].strikes) == (0, PROVEN_TOKENS, 2)
    for each in again.values():
        stage.finish(each.uid)
    for answer in (answers[0], answers[2]):
        assert (await everything(answer))[-1] == StreamEnd("stop", 1)
    assert stage.open == 0


@pytest.mark.parametrize("how", ["finishes", "leaves", "fails"])
async def test_the_next_suspect_goes_when_the_one_before_it_is_over(stage: Stage, how: str) -> None:
    answers = [stage.gateway.generate(Generate(0, (number,), 99)) for number in (1, 2)]
    for _ in range(2):
        stage.gateway.park(GROUP, LOST)
        ranks = stage.next_group()
    [first] = asked(ranks)
    if how == "finishes":
        stage.finish(first.uid)
    elif how == "fails":
        stage.gateway.on_event(Error(Code.BAD_REQUEST, "no", first.uid))
    else:
        await answers[0].aclose()
    assert [each.tokens for each in asked(ranks)] == [(1,), (2,)]
    await answers[1].aclose()
    assert stage.open == 0


async def test_a_suspect_that_waits_can_be_cancelled_and_ended(stage: Stage) -> None:
    answers = [stage.gateway.generate(Generate(0, (number,), 99)) for number in (1, 2, 3)]
    for _ in range(2):
        stage.gateway.park(GROUP, LOST)
        stage.next_group()
    await answers[1].aclose()
    assert stage.open == 2
    stage.gateway.fail(DEPLOYMENT, GroupError("the model was unloaded", Code.SHUTTING_DOWN))
    assert (await error_of(answers[2])).code is Code.SHUTTING_DOWN
    assert stage.open == 0


async def test_when_memory_runs_out_who_did_it_is_told_and_the_others_go_on(stage: Stage) -> None:
    small, large = (stage.gateway.generate(Generate(0, (1,) * size, 9)) for size in (5, 500))
    stage.gateway.park(GROUP, GroupError("rank 1 ran out of memory", Code.OUT_OF_MEMORY))
    assert (await error_of(large)).code is Code.OUT_OF_MEMORY
    [again] = asked(stage.next_group())
    assert (len(again.tokens), again.strikes) == (5, 0)
    stage.finish(again.uid)
    await everything(small)


async def test_requests_of_other_agents_are_given_back_to_them(stage: Stage) -> None:
    told: list[Message] = []
    cancelled: list[Message] = []
    stage.gateway.relay(Generate(70, (1, 2, 3), 9, answered=1, batch=True), told.append)
    assert asked(stage.ranks) == [Generate(1, (1, 2, 3), 9, answered=1, batch=True)]
    stage.say(1, 50, start=1)
    assert told == [Delta((70,), (1,), (50,))]
    stage.gateway.relay(Generate(69, (1, 2, 3), 9, answered=1), cancelled.append)()
    assert cancelled == [Finished(69, "cancel", 1, 0)]
    stage.gateway.park(GROUP, LOST)
    assert told[1:] == [Error(Code.RANK_LOST, "rank 1 is gone", 70)]
    assert asked(stage.next_group()) == []
    stage.gateway.relay(Generate(71, (1,), 9), told.append)
    stage.gateway.park(GROUP, REPLANNED)
    assert told[2:] == [Error(Code.REPLANNED, "a better group is there", 71)]
    stage.gateway.serve(GROUP, DEPLOYMENT, cast(Any, stage.ranks), MODEL, TEXT)
    for uid in (72, 73):
        stage.gateway.relay(Generate(uid, (1,), 9, strikes=2), told.append)
    stage.gateway.close(GroupError("the server is shutting down", Code.SHUTTING_DOWN))
    assert told[3:] == [Error(Code.REPLANNED, "the server is shutting down", uid) for uid in (72, 73)]
    assert stage.open == 0


async def test_a_request_that_another_agent_sent_into_the_gap_between_two_groups_goes_back_to_it(
    stage: Stage,
) -> None:
    """It waits there for the next group, as a new one of this agent does here."""

    def relay(group: str) -> None:
        stage.gateway.relay(Generate(70, (1,), 9, group=group), lambda _: None)

    for end in (stage.gateway.detach, stage.gateway.park):
        end(GROUP, REPLANNED)
        with pytest.raises(GroupError, match="a better group is there") as raised:
            relay(GROUP)
        assert raised.value.code is Code.REPLANNED
    with pytest.raises(RequestError, match="no model is loaded right now"):
        relay("another#0")
    relay_to = stage.next_group()
    relay(GROUP)
    assert len(asked(relay_to)) == 1
    stage.gateway.park(GROUP, LOST)
    with pytest.raises(GroupError, match="ended") as lost:
        relay(GROUP)
    assert lost.value.code is Code.LINK_LOST
    stage.gateway.fail(DEPLOYMENT, LOST)
    with pytest.raises(RequestError, match="no model is loaded right now"):
        relay(GROUP)


async def test_one_whose_prompt_was_written_while_the_group_ended_waits_for_the_next(stage: Stage) -> None:
    stage.gateway.park(GROUP, LOST)
    assert stage.gateway.text(MODEL.id) is TEXT
    answer = stage.gateway.generate(Generate(0, (1,), 9), model=MODEL.id)
    [again] = asked(stage.next_group())
    stage.finish(again.uid, "stop", 0)
    assert await everything(answer) == [StreamEnd("stop", 0)]
    stage.gateway.fail(DEPLOYMENT, LOST)
    assert stage.gateway.text(MODEL.id) is None
    with pytest.raises(RequestError, match="no model is loaded right now"):
        stage.gateway.generate(Generate(0, (1,), 9), model=MODEL.id)


async def test_a_suspect_of_another_agent_waits_its_turn_too(stage: Stage) -> None:
    told: list[Message] = []
    for uid in (70, 71):
        stage.gateway.relay(Generate(uid, (uid,), 9, strikes=2), told.append)
    [first] = asked(stage.ranks)
    stage.gateway.park(GROUP, LOST)
    assert [(each.code, each.uid) for each in told if isinstance(each, Error)] == [
        (Code.REQUEST_FATAL, 70),
        (Code.REPLANNED, 71),
    ]
    assert first.tokens == (70,)


@pytest.mark.parametrize(("code", "strikes"), [(Code.RANK_LOST, 1), (Code.REPLANNED, 0)])
async def test_what_another_agent_gives_back_is_asked_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, code: Code, strikes: int
) -> None:
    """Of the same agent: its group is another one by then, or it says that it is not ready."""
    monkeypatch.setattr(dispatcher, "ASK_AGAIN_S", 0.01)

    ranks = stage.next_group(here=False)
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.say(1, 50)
    stage.gateway.on_event(Error(code, "rank 1 is gone", 1))
    assert stage.open == 1
    await asyncio.sleep(0.05)
    assert asked(ranks)[1:] == [Generate(2, (1, 50), 9, answered=1, strikes=strikes, group=GROUP)]
    stage.gateway.on_event(Error(Code.NOT_READY, "no model is loaded", 2))
    await asyncio.sleep(0.05)
    assert asked(ranks)[2:] == [Generate(3, (1, 50), 9, answered=1, strikes=strikes, group=GROUP)]
    stage.finish(3, "stop", 2)
    assert await everything(answer) == [Tokens((50,)), StreamEnd("stop", 2)]


@pytest.mark.parametrize(
    "code", [Code.SHUTTING_DOWN, Code.REQUEST_FATAL, Code.OUT_OF_MEMORY, Code.BAD_REQUEST, Code.OVERLOADED]
)
async def test_some_words_of_another_agent_are_the_last(stage: Stage, code: Code) -> None:
    stage.next_group(here=False)
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.on_event(Error(code, "no", 1))
    assert (await error_of(answer)).code is code
    assert stage.open == 0


async def test_while_a_better_group_takes_over_new_requests_wait_for_it(stage: Stage) -> None:
    stage.next_group()
    stage.gateway.park(GROUP, REPLANNED)
    assert stage.gateway.models()
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.park(GROUP, REPLANNED)
    ranks = stage.next_group()
    assert [each.tokens for each in ranks.sent_of(Generate)] == [(1,)]
    stage.gateway.park(GROUP, LOST)
    with pytest.raises(MlxtpError, match="no model is loaded right now"):
        stage.gateway.generate(Generate(0, (1,), 9))
    assert not stage.gateway.models()
    await answer.aclose()
