"""The gateway before ranks that only remember what they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.api.backend import Health, ModelInfo, Progress, StreamEnd, TokenEvent, Tokens, TokenScore
from mlxtp.errors import Code, GroupError, LinkError, MlxtpError, RequestError
from mlxtp.gateway.admission import AdmissionLimits
from mlxtp.gateway.gateway import WARM_UP_TOKENS, Gateway
from mlxtp.groups.process_group import ProcessGroup
from mlxtp.models import self_test
from mlxtp.wire.messages import (
    MAX_FRAME_TOKENS,
    Accepted,
    Cancel,
    Delta,
    Error,
    Finished,
    Generate,
    Message,
    Prefilled,
    ScoredDelta,
)

GROUP, DEPLOYMENT = "tiny#0", "tiny"
MODEL = ModelInfo("tiny", ("default",), Path(), 100, 0, (1,), 512)
TEXT: Any = SimpleNamespace(features=("tools",))


class FakeRanks:
    """Keeps what is sent to rank 0; `broken` is raised instead."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.broken: MlxtpError | None = None

    def send(self, message: Message) -> None:
        if self.broken is not None:
            raise self.broken
        self.sent.append(message)

    def sent_of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class Stage:
    """A gateway that serves, and the ranks behind it."""

    def __init__(self, max_open: int = 4, **settings: Any) -> None:
        def health(_model: str) -> Health:
            return Health("ready", 1, 2, "ring", "tiny", None, True, self.gateway.open_requests)

        self.gateway = Gateway(health, **{"bounds": AdmissionLimits(max_open)} | settings)
        self.ranks = self.next_group()

    def next_group(self, *, here: bool = True) -> FakeRanks:
        """New ranks, which the gateway sends requests to from now on."""
        ranks = FakeRanks()
        self.gateway.serve(GROUP, DEPLOYMENT, cast(Any, ranks), MODEL, TEXT, here=here)
        return ranks

    @property
    def open(self) -> int:
        return self.gateway.health().open_requests

    def say(self, uid: int, *tokens: int, start: int = 0) -> None:
        for index, token in enumerate(tokens, start):
            self.gateway.on_event(Delta((uid,), (index,), (token,)))

    def finish(self, uid: int, reason: str = "stop", generated: int = 1) -> None:
        self.gateway.on_event(Finished(uid, reason, generated, generated))


@pytest.fixture
def max_open() -> int:
    return 4


@pytest.fixture
def stage(max_open: int) -> Stage:
    return Stage(max_open)


async def everything(events: Any) -> list[TokenEvent]:
    return [event async for event in events]


async def error_of(answer: Any) -> MlxtpError:
    with pytest.raises(MlxtpError) as raised:
        await everything(answer)
    return raised.value


def play(story: Callable[[Stage], Awaitable[None]], max_open: int = 4) -> None:
    async def run() -> None:
        await story(Stage(max_open))

    asyncio.run(run())


async def test_a_request_goes_to_rank_0_and_its_tokens_come_back(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1, 2, 3), 9))
    assert stage.ranks.sent == [Generate(1, (1, 2, 3), 9)]
    assert stage.open == 1
    stage.say(1, 50, 51)
    stage.finish(1, "stop", 3)
    assert stage.open == 0
    assert await everything(answer) == [Tokens((50,)), Tokens((51,)), StreamEnd("stop", 3)]
    assert await everything(answer) == []
    await answer.aclose()
    assert stage.ranks.sent_of(Cancel) == []


async def test_an_answer_tells_what_it_waits_for(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1, 2, 3, 4), 9))
    assert answer.progress() == Progress("queued")
    stage.gateway.on_event(Accepted(1))
    assert answer.progress() == Progress("queued")
    for computed in (1, 3):
        stage.gateway.on_event(Prefilled(1, computed, 1))
        assert replace(answer.progress(), time_ms=0) == Progress("prefill", 4, 1, computed)
    assert answer.progress().time_ms >= 0
    stage.say(1, 50, 51)
    assert answer.progress() == Progress()
    stage.gateway.park(GROUP, LinkError("gone", Code.LINK_LOST))
    assert answer.progress() == Progress("restarting")
    stage.next_group()
    stage.gateway.on_event(Accepted(2))
    assert answer.progress() == Progress("queued")
    stage.gateway.on_event(Prefilled(2, 5, 0))
    assert replace(answer.progress(), time_ms=0) == Progress("prefill", 6, 0, 5)
    stage.gateway.on_event(Prefilled(9, 5, 0))  # of a request that has ended


async def test_one_step_of_several_requests_reaches_each_of_them(stage: Stage) -> None:
    answers = [stage.gateway.generate(Generate(0, (1,), 9)) for _ in range(3)]
    stage.gateway.on_event(Delta((3, 1), (0, 0), (33, 11)))
    stage.gateway.on_event(Delta((1, 2), (1, 0), (12, 22)))
    for uid in (1, 2, 3):
        stage.finish(uid)
    seen = [[e.tokens[0] for e in await everything(a) if isinstance(e, Tokens)] for a in answers]
    assert seen == [[11, 12], [22], [33]]


@given(st.permutations([(uid, index) for uid in (1, 2, 3) for index in range(4)]))
def test_no_token_of_another_request_is_ever_seen(order: list[tuple[int, int]]) -> None:
    async def story(stage: Stage) -> None:
        answers = [stage.gateway.generate(Generate(0, (1,), 9)) for _ in range(3)]
        for uid, index in order:
            stage.gateway.on_event(Delta((uid,), (index,), (100 * uid + index,)))
        for uid, answer in enumerate(answers, 1):
            stage.finish(uid)
            tokens = [e.tokens[0] for e in await everything(answer) if isinstance(e, Tokens)]
            assert tokens == [100 * uid + index for one, index in order if one == uid]

    play(story)


@pytest.mark.parametrize("max_open", [5])
async def test_clients_and_users_travel_as_numbers(stage: Stage) -> None:
    for whose in ({}, {"client": "a"}, {"client": "a", "user": "b"}, {"client": "b"}):
        stage.gateway.generate(Generate(0, (1,), 9), **whose)
    stage.gateway.relay(Generate(1, (1,), 9, client=77), lambda _: None)
    unnamed, a, of_a, b, theirs = [(each.client, each.user) for each in stage.ranks.sent_of(Generate)]
    assert (unnamed, theirs) == ((0, 0), (77, 0))
    assert (a[1], b[1]) == (0, 0)
    assert 0 != a[0] == of_a[0] != b[0] == of_a[1]
    assert a[0] > 77 < b[0], "they are no short ones"


async def test_scores_come_with_their_tokens(stage: Stage) -> None:
    answers = [stage.gateway.generate(Generate(0, (1,), 9, logprobs=top)) for top in (0, 2)]
    stage.gateway.on_event(ScoredDelta(1, 0, (50,), (-0.5,), 0, (), ()))
    stage.gateway.on_event(
        ScoredDelta(2, 0, (60, 61), (-1.0, -2.0), 2, (5, 6, 7, 8), (-0.1, -0.2, -0.3, -0.4))
    )
    for uid in (1, 2):
        stage.finish(uid)
    assert (await everything(answers[0]))[0] == Tokens((50,), (TokenScore(-0.5, ()),))
    assert (await everything(answers[1]))[0] == Tokens(
        (60, 61), (TokenScore(-1.0, ((5, -0.1), (6, -0.2))), TokenScore(-2.0, ((7, -0.3), (8, -0.4))))
    )


async def test_scores_of_a_prompt_come_once_though_its_group_ends(stage: Stage) -> None:
    def scored(uid: int, index: int, *tokens: int) -> ScoredDelta:
        return ScoredDelta(uid, index, tokens, (-0.5,) * len(tokens), 0, (), (), prompt=True)

    answer = stage.gateway.generate(Generate(0, (1, 2, 3, 4), 9, prompt_logprobs=0))
    stage.gateway.on_event(scored(1, 1, 2, 3))
    stage.gateway.park(GROUP, GroupError("gone", Code.REPLANNED))
    (again,) = stage.next_group().sent_of(Generate)
    assert (again.tokens, again.prompt_logprobs) == ((1, 2, 3, 4), 0)
    stage.gateway.on_event(scored(again.uid, 1, 2))
    stage.gateway.on_event(scored(again.uid, 2, 3, 4))
    stage.say(again.uid, 50)
    stage.gateway.park(GROUP, GroupError("gone", Code.REPLANNED))
    (last,) = stage.next_group().sent_of(Generate)
    assert (last.tokens, last.prompt_logprobs) == ((1, 2, 3, 4, 50), -1)
    stage.finish(last.uid)
    events = [event for event in await everything(answer) if isinstance(event, Tokens)]
    told = [token for event in events if event.prompt for token in event.tokens]
    assert told == [2, 3, 4]


async def test_the_end_tells_what_the_cache_and_the_drafts_were_worth(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.on_event(Finished(1, "length", 9, 4, cached=30, drafted=8, accepted=5))
    assert await everything(answer) == [StreamEnd("length", 9, 30, 8, 5)]


async def test_no_client_is_told_accepted_before_rank_0_says_so(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    waiting = asyncio.create_task(answer.accepted())
    await asyncio.sleep(0)
    assert not waiting.done()
    stage.gateway.on_event(Accepted(2))
    await asyncio.sleep(0)
    assert not waiting.done()
    stage.gateway.on_event(Accepted(1))
    await waiting
    await answer.accepted()
    stage.say(1, 50)
    stage.finish(1)
    assert await everything(answer) == [Tokens((50,)), StreamEnd("stop", 1)]


async def test_a_refusal_is_raised_by_accepted_and_ends_the_answer(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.on_event(Error(Code.BAD_REQUEST, "no such grammar", 1))
    with pytest.raises(RequestError, match="no such grammar"):
        await answer.accepted()
    assert await everything(answer) == []
    await answer.aclose()
    assert stage.ranks.sent_of(Cancel) == []
    assert stage.open == 0


async def test_a_failure_after_acceptance_is_raised_to_the_reader(stage: Stage) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.on_event(Accepted(1))
    stage.gateway.fail(DEPLOYMENT, GroupError("rank 1 is gone"))
    await answer.accepted()
    with pytest.raises(GroupError, match="rank 1 is gone"):
        await everything(answer)


@pytest.mark.parametrize("said", [(), (50,)])
async def test_closing_before_the_end_cancels_once(stage: Stage, said: tuple[int, ...]) -> None:
    answer: Any = stage.gateway.generate(Generate(0, (1,), 9))
    stage.say(1, *said)
    assert [await anext(answer) for _ in said] == [Tokens((token,)) for token in said]
    for _ in range(2):
        await answer.aclose()
    assert stage.ranks.sent_of(Cancel) == [Cancel(1)]
    assert stage.open == 0
    assert await everything(answer) == []


@pytest.mark.parametrize("wait", [everything, lambda answer: answer.accepted()])
async def test_a_reader_whose_task_is_cancelled_cancels_the_request(stage: Stage, wait: Any) -> None:
    reader = asyncio.create_task(wait(stage.gateway.generate(Generate(0, (1,), 9))))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert stage.ranks.sent_of(Cancel) == [Cancel(1)]
    assert stage.open == 0


async def test_what_rank_0_still_says_about_a_cancelled_request_is_dropped(stage: Stage) -> None:
    answer: Any = stage.gateway.generate(Generate(0, (1,), 9))
    await answer.aclose()
    stage.say(1, 50)
    stage.finish(1, "cancel", 1)
    stage.gateway.on_event(Error(Code.INTERNAL, "", 1))
    assert await everything(answer) == []


async def test_cancelling_at_a_rank_that_is_gone_is_no_error(stage: Stage) -> None:
    answer: Any = stage.gateway.generate(Generate(0, (1,), 9))
    stage.ranks.broken = LinkError("gone")
    await answer.aclose()
    assert stage.open == 0


async def test_without_a_model_nothing_is_started(stage: Stage) -> None:
    stage.gateway.fail(DEPLOYMENT, GroupError("gone"))
    assert stage.gateway.models() == ()
    assert stage.gateway.text() is None
    with pytest.raises(RequestError) as refused:
        stage.gateway.generate(Generate(0, (1,), 9))
    assert (refused.value.code, refused.value.status) == (Code.NOT_READY, 503)
    assert stage.ranks.sent == []


@pytest.mark.parametrize("max_open", [2])
async def test_more_than_the_limit_is_refused_until_one_ends(stage: Stage) -> None:
    answers: list[Any] = [stage.gateway.generate(Generate(0, (1,), 9)) for _ in range(2)]
    with pytest.raises(RequestError) as refused:
        stage.gateway.generate(Generate(0, (1,), 9))
    assert (refused.value.code, refused.value.status) == (Code.OVERLOADED, 503)
    assert "2 requests are open" in refused.value.detail
    stage.finish(1)
    stage.gateway.generate(Generate(0, (1,), 9))
    await answers[1].aclose()
    stage.gateway.generate(Generate(0, (1,), 9))
    assert stage.open == 2


async def test_a_prompt_that_no_frame_holds_is_refused(stage: Stage) -> None:
    with pytest.raises(RequestError) as refused:
        stage.gateway.generate(Generate(0, (1,) * (MAX_FRAME_TOKENS + 1), 9))
    assert refused.value.code is Code.CONTEXT_OVERFLOW
    assert stage.ranks.sent == []
    assert stage.open == 0


async def test_a_request_at_a_rank_that_is_gone_waits_for_the_next_group(stage: Stage) -> None:
    """The end of the rank is noticed a moment later."""
    stage.ranks.broken = LinkError("its link is gone")
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    assert answer.progress() == Progress("restarting")
    stage.gateway.park(GROUP, GroupError("rank 0 is gone", Code.RANK_LOST))
    ranks = stage.next_group()
    [again] = ranks.sent_of(Generate)
    assert again.strikes == 0
    stage.finish(again.uid)
    assert await everything(answer) == [StreamEnd("stop", 1)]


async def test_another_agents_request_at_a_rank_that_is_gone_waits_there_for_the_next_group(
    stage: Stage,
) -> None:
    """Its gateway would take a refusal for the last word."""
    stage.ranks.broken = LinkError("its link is gone")
    with pytest.raises(GroupError, match="its link is gone") as gone:
        stage.gateway.relay(Generate(1, (1,), 9, group=GROUP), lambda _: None)
    assert gone.value.code is Code.LINK_LOST


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.BAD_REQUEST, RequestError),
        (Code.CONTEXT_OVERFLOW, RequestError),
        (Code.SHUTTING_DOWN, GroupError),
    ],
)
async def test_what_the_client_got_wrong_is_its_error_and_any_other_is_ours(
    stage: Stage, code: Code, kind: type[MlxtpError]
) -> None:
    answer = stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.on_event(Error(code, "too much", 1))
    with pytest.raises(kind, match="too much") as raised:
        await everything(answer)
    assert raised.value.code is code
    assert stage.open == 0
    assert await everything(answer) == []


async def test_when_the_epoch_ends_every_open_request_ends_after_the_tokens_it_got(stage: Stage) -> None:
    answers = [stage.gateway.generate(Generate(0, (1,), 9)) for _ in range(3)]
    stage.say(2, 50)
    stage.finish(3)
    stage.gateway.fail(DEPLOYMENT, GroupError("rank 1 is gone", Code.RANK_LOST))
    assert stage.open == 0
    waiting, answered = answers[0], cast(Any, answers[1])
    with pytest.raises(GroupError, match="rank 1 is gone"):
        await everything(waiting)
    assert await anext(answered) == Tokens((50,))
    with pytest.raises(GroupError, match="rank 1 is gone"):
        await anext(answered)
    assert await everything(answers[2]) == [StreamEnd("stop", 1)]


async def test_a_late_word_of_the_old_epoch_harms_no_request_in_the_new_one(stage: Stage) -> None:
    stage.gateway.generate(Generate(0, (1,), 9))
    stage.gateway.fail(DEPLOYMENT, GroupError("gone"))
    ranks = stage.next_group()
    answer = stage.gateway.generate(Generate(0, (7,), 9))
    assert ranks.sent == [Generate(2, (7,), 9)]
    stage.say(1, 50)
    stage.finish(1)
    stage.say(2, 60)
    stage.finish(2)
    assert await everything(answer) == [Tokens((60,)), StreamEnd("stop", 1)]


async def test_warming_up_answers_golden_prompts_one_by_one_then_two_requests_at_once(stage: Stage) -> None:
    golden_prompts = self_test.prompts(5)
    warming = asyncio.create_task(
        stage.gateway.self_test(DEPLOYMENT, cast(ProcessGroup, stage.ranks)).warm_up(golden_prompts)
    )

    async def sent(count: int) -> list[Generate]:
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(stage.ranks.sent) == count
        return [message for message in stage.ranks.sent if isinstance(message, Generate)]

    for uid, prompt in enumerate(golden_prompts, 1):
        newest = (await sent(uid))[-1]
        assert newest == Generate(uid, prompt, self_test.ANSWER_TOKENS, ignore_eos=True)
        stage.say(uid, uid)
        stage.finish(uid)
    pair = (await sent(len(golden_prompts) + 2))[-2:]
    assert [request.max_tokens for request in pair] == [WARM_UP_TOKENS] * 2
    assert pair[1].sampling.temperature > 0
    for request in pair:
        stage.finish(request.uid)
    assert await warming == tuple((uid,) for uid in range(1, len(golden_prompts) + 1))


async def test_warming_up_fails_as_a_request_would(stage: Stage) -> None:
    warming = asyncio.create_task(
        stage.gateway.self_test(DEPLOYMENT, cast(ProcessGroup, stage.ranks)).warm_up(self_test.prompts(512))
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stage.gateway.fail(DEPLOYMENT, GroupError("rank 1 is gone"))
    with pytest.raises(GroupError, match="rank 1 is gone"):
        await warming
