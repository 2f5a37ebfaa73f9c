"""Requests for vectors: they survive their group, go back to other agents, and count for what they take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlxtp.api.backend import ModelInfo, StreamEnd
from mlxtp.errors import Code, GroupError, RequestError
from mlxtp.gateway.request import TEXT_COST
from mlxtp.vector_files import EMBED, VectorModel
from mlxtp.wire.codecs import Message
from mlxtp.wire.messages import Accepted, Finished, Generate, Pooling, Vectors

from .test_gateway import GROUP, MODEL, TEXT, FakeRanks, Stage, everything
from .test_gateway import max_open as max_open
from .test_gateway import stage as stage
from .test_gateway_recovery import asked

LOST = GroupError("rank 0 is gone", Code.RANK_LOST)
ASKED = Generate(0, (1, 2, 3, 4, 5, 6), 1, pooling=Pooling((1, 2, 3)))


async def test_the_next_group_is_asked_for_all_of_them_again(stage: Stage) -> None:
    answer = stage.gateway.generate(ASKED)
    stage.gateway.on_event(Accepted(1))
    stage.gateway.on_event(Vectors(1, (2, 0), b"aaaabbbb"))
    stage.gateway.park(GROUP, LOST)
    [again] = asked(stage.next_group())
    assert (again.uid, again.tokens, again.pooling) == (2, ASKED.tokens, ASKED.pooling)
    stage.gateway.on_event(Vectors(2, (0, 1), b"bbbbcccc"))
    stage.gateway.on_event(Vectors(2, (2, 77), b"aaaadddd"))  # a text that nobody sent
    stage.finish(2, "stop", 0)
    assert await everything(answer) == [StreamEnd("stop", 0)]
    assert answer.vectors == {0: b"bbbb", 1: b"cccc", 2: b"aaaa"}
    assert stage.open == 0


async def test_those_of_another_agent_go_back_under_its_uid(stage: Stage) -> None:
    told: list[Message] = []
    stage.gateway.relay(replace(ASKED, uid=33), told.append)
    [sent] = asked(stage.ranks)
    vectors = Vectors(sent.uid, (0,), b"aaaa")
    stage.gateway.on_event(vectors)
    stage.gateway.on_event(Finished(sent.uid, "stop", 0, 0))
    assert told == [replace(vectors, uid=33), Finished(33, "stop", 0, 0)]


@pytest.mark.parametrize("max_open", [100])
async def test_short_texts_count_for_the_room_of_their_vectors(stage: Stage) -> None:
    many = Generate(0, (1,) * 2048, 1, pooling=Pooling((1,) * 2048))
    for _ in range(13):
        stage.gateway.generate(many, client="one")
    with pytest.raises(RequestError) as refused:
        stage.gateway.generate(many, client="one")
    assert f"this one has {2048 * TEXT_COST} more" in refused.value.detail
    stage.gateway.generate(many, client="two")


async def test_the_default_is_a_model_that_writes_text(stage: Stage) -> None:
    vectors = ModelInfo("vectors", (), Path(), 100, 0, (1,), 512, vectors=VectorModel(EMBED))
    stage.gateway.deployments.order = lambda: ("a", MODEL.id)
    stage.gateway.serve("a#0", "a", FakeRanks(), vectors, TEXT)
    assert [model.id for model in stage.gateway.models()] == [MODEL.id, "vectors"]
