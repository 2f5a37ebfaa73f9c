"""Requests that a gateway refuses or ends, before ranks that only remember what they were sent."""

from __future__ import annotations

from typing import Any

import pytest

from mlxtp.api.backend import Tokens
from mlxtp.errors import Code, GroupError, MlxtpError, RequestError
from mlxtp.gateway import request
from mlxtp.gateway.admission import AdmissionLimits, SystemMemory
from mlxtp.wire.messages import Accepted, Cancel, Delta, Finished, Generate, Message

from . import test_gateway
from .test_gateway import GROUP

PLENTY = SystemMemory(1 << 40)
SOON_S = 0.05


class Stage(test_gateway.Stage):
    def __init__(self, bounds: AdmissionLimits, deadline_s: float) -> None:
        self.memory = PLENTY
        super().__init__(bounds=bounds, deadline_s=deadline_s, memory=lambda: self.memory)

    def ask(self, prompt: int = 1, client: str = "", **fields: Any) -> Any:
        return self.gateway.generate(Generate(0, (5,) * prompt, 90), client=client, **fields)

    def relay(self, prompt: int = 1, client: int = 1) -> list[Message]:
        told: list[Message] = []
        self.gateway.relay(Generate(1, (5,) * prompt, 90, client=client), told.append)
        return told

    def refused(self, **fields: Any) -> tuple[int, str]:
        with pytest.raises(RequestError) as refused:
            self.ask(**fields)
        assert refused.value.code is Code.OVERLOADED
        return refused.value.status, refused.value.detail

    @property
    def cancelled(self) -> list[int]:
        return [cancel.uid for cancel in self.ranks.sent_of(Cancel)]


few_tokens = pytest.mark.parametrize("bounds", [AdmissionLimits(16, 100, request_tokens=1)])
soon = pytest.mark.parametrize("deadline_s", [SOON_S])


@pytest.fixture
def bounds() -> AdmissionLimits:
    return AdmissionLimits(16, request_tokens=1)


@pytest.fixture
def deadline_s() -> float:
    return 3600


@pytest.fixture
def stage(bounds: AdmissionLimits, deadline_s: float) -> Stage:
    return Stage(bounds, deadline_s)


async def heard(answer: Any) -> tuple[int, Code]:
    """Return the number of tokens that came, and the code of the error after them."""
    tokens = 0
    try:
        async for event in answer:
            tokens += isinstance(event, Tokens)
    except MlxtpError as error:
        return tokens, error.code
    raise AssertionError("it ended well")


@few_tokens
async def test_tokens_of_prompts_and_answers_are_bounded_until_a_request_ends(stage: Stage) -> None:
    stage.ask(60)
    stage.relay(30)
    assert stage.refused(prompt=11)[0] == 503
    stage.ask(2)
    stage.say(1, *[7] * 4)
    stage.say(2, *[7] * 3)
    assert "99 tokens" in stage.refused(prompt=2)[1]
    stage.gateway.on_event(Finished(1, "stop", 4, 4))
    stage.ask(40, client="somebody else")


@few_tokens
async def test_a_request_that_goes_on_in_another_group_still_counts(stage: Stage) -> None:
    stage.ask(60)
    stage.gateway.park(GROUP, GroupError("gone"))
    stage.next_group()
    assert stage.gateway.open_requests == 1
    assert stage.refused(prompt=41)[0] == 503


async def test_a_client_cannot_take_every_place(stage: Stage) -> None:
    for _ in range(14):
        stage.ask(client="many")
    assert "14 of 16" in stage.refused(client="many")[1]
    stage.ask(client="one")


async def test_clients_of_another_gateway_are_told_apart_too(stage: Stage) -> None:
    for _ in range(14):
        stage.relay(client=5)
    with pytest.raises(RequestError, match="14 of 16"):
        stage.relay(client=5)
    stage.relay(client=6)


async def test_no_memory_no_new_requests_but_those_that_are_open_go_on(stage: Stage) -> None:
    answer = stage.ask()
    stage.memory = SystemMemory(1)
    assert stage.refused()[0] == 503
    with pytest.raises(RequestError, match="short of memory"):
        stage.relay()
    stage.say(1, 7)
    assert await anext(answer) == Tokens((7,))
    stage.memory = PLENTY
    stage.ask()


@pytest.mark.parametrize(("deadline_s", "own"), [(SOON_S, 0.0), (3600, SOON_S), (SOON_S, 3600)])
async def test_a_request_ends_at_its_deadline_after_the_tokens_it_got(stage: Stage, own: float) -> None:
    answer = stage.ask(deadline_s=own)
    stage.gateway.on_event(Accepted(1))
    stage.say(1, 7, 7, 7)
    assert await heard(answer) == (3, Code.DEADLINE)
    assert stage.cancelled == [1]
    assert stage.gateway.open_requests == 0


@soon
async def test_a_deadline_before_anybody_accepted_it_is_a_refusal(stage: Stage) -> None:
    with pytest.raises(MlxtpError) as refused:
        await stage.ask().accepted()
    assert refused.value.code is Code.DEADLINE
    assert stage.cancelled == [1]


@soon
async def test_the_pause_between_two_groups_counts(stage: Stage) -> None:
    answer = stage.ask()
    stage.gateway.on_event(Accepted(1))
    stage.say(1, 7, 7)
    stage.gateway.park(GROUP, GroupError("gone", Code.RANK_LOST))
    assert await heard(answer) == (2, Code.DEADLINE)
    assert stage.next_group().sent == []
    assert stage.gateway.open_requests == 0


@soon
async def test_another_group_extends_no_deadline(stage: Stage) -> None:
    answer = stage.ask()
    stage.gateway.on_event(Accepted(1))
    stage.gateway.park(GROUP, GroupError("gone", Code.RANK_LOST))
    stage.ranks = stage.next_group()
    stage.gateway.on_event(Accepted(2))
    stage.say(2, 7)
    assert await heard(answer) == (1, Code.DEADLINE)
    assert stage.cancelled == [2]


@pytest.mark.parametrize("how", ["ends", "closed"])
async def test_what_has_ended_has_no_deadline(stage: Stage, how: str) -> None:
    answer = stage.ask()
    timer = answer.deadline
    if how == "ends":
        stage.gateway.on_event(Finished(1, "stop", 1, 1))
    else:
        await answer.aclose()
    assert timer.cancelled()


async def test_who_falls_too_far_behind_is_ended_and_told_so(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "MAX_UNREAD", 10)

    slow, quick = stage.ask(), stage.ask()
    for index in range(15):
        stage.gateway.on_event(Delta((1, 2), (index, index), (7, 8)))
        assert await anext(quick) == Tokens((8,))
    assert stage.cancelled == [1]
    assert await heard(slow) == (11, Code.CLIENT_TOO_SLOW)
    assert stage.gateway.open_requests == 1


async def test_who_reads_may_have_a_long_answer(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "MAX_UNREAD", 10)

    answer = stage.ask()
    for index in range(50):
        stage.say(1, 7, start=index)
        if index >= 9:
            assert await anext(answer) == Tokens((7,))
    assert stage.cancelled == []
