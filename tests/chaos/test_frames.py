"""Frames that break the rules between rank 0 and rank 1: refused with their code, and nothing is skipped."""

from __future__ import annotations

import math

import pytest

from mlxtp.errors import Code

from ..live_cluster import until
from .answers import LONG, SHORT
from .harness import (
    STALL_S,
    Fault,
    FaultyCluster,
    assert_noticed,
    assert_recovered,
    assert_sound,
    before,
    faults,
    kill,
)
from .orders import Order

chaos = pytest.mark.chaos
PROMPT = "Forward of prompts"


def frames_of(cluster: FaultyCluster, prompt: str, max_tokens: int) -> tuple[list[str], int, int]:
    """The types of the frames of one request on the decode link, its prompt and generated tokens.

    A layout of its room runs no forward. The request before may stop late.
    """
    cluster.order("record", 1)
    usage = cluster.chat(prompt, max_tokens=max_tokens)["usage"]
    frames = until(
        lambda: len(f := cluster.book.notes("frame")) > 1 and f[-1]["type"] == "SessionStop" and f,
        "a SessionStop",
    )
    assert {frame["sender"] for frame in frames} == {0}
    types = [frame["type"] for frame in frames if frame["type"] != "Arrange"]
    types = types[types.index(PROMPT) :]
    return types, usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize("prompt", [pytest.param(SHORT, marks=chaos), LONG], ids=["one chunk", "four chunks"])
def test_one_request_is_prompt_steps_and_one_stop(cluster: FaultyCluster, prompt: str) -> None:
    """N generated tokens take one prefill and N-1 step frames."""
    types, prompt_tokens, generated = frames_of(cluster, prompt, max_tokens=15)
    chunks = math.ceil(prompt_tokens / 32)
    assert generated == 15
    assert types == [PROMPT] * chunks + ["Forward"] * 14 + ["SessionStop"]


@chaos
def test_an_end_token_costs_at_most_the_step_that_was_on_its_way(cluster: FaultyCluster) -> None:
    types, _, generated = frames_of(cluster, SHORT, max_tokens=64)
    steps = types.count("Forward")
    assert types == [PROMPT] + ["Forward"] * steps + ["SessionStop"]
    assert generated - 1 <= steps <= generated


def refused(how: str, rank: int, *codes: Code, always: bool = False) -> Fault:
    """`rank` sends something else than, or besides, the 20th frame or Ack of an answer."""
    order = Order("wrong_frame", rank, on=("Forward", "Ack")[rank], how=how, at=20)
    noticed = {"within_s": STALL_S} if Code.RANK_STALLED in codes else {"likely": "protocol"}
    return Fault(f"{how} from rank {rank}", order, {*codes}, always=always, **noticed)  # type: ignore[arg-type]


@faults(
    refused("seq ahead", 0, Code.WRONG_SEQ, always=True),
    refused("unknown uid", 0, Code.WRONG_UID),
    refused("unknown type", 0, Code.UNKNOWN_TYPE),
    refused("truncated", 0, Code.FRAME_MALFORMED),
    # Noticed by the number of the next frame, or, when rank 0 cannot send one before this step is done, by
    # no rank's progress.
    refused("other epoch", 0, Code.WRONG_SEQ, Code.ACK_MISSING, Code.RANK_STALLED),
    refused("seq again", 0, Code.WRONG_SEQ),
    refused("hello again", 0, Code.OUT_OF_ORDER),
    refused("garbage", 0, Code.FRAME_MALFORMED),
    refused("oversize", 0, Code.FRAME_OVERSIZE),
    # Rank 1 misses its own Ack when it sends the next one, and may be the first to report.
    refused("seq ahead", 1, Code.WRONG_SEQ, Code.OUT_OF_ORDER),
    refused("truncated", 1, Code.FRAME_MALFORMED),
    refused("unknown type", 1, Code.UNKNOWN_TYPE),
    refused("other epoch", 1, Code.WRONG_SEQ, Code.OUT_OF_ORDER),
    refused("delta", 1, Code.OUT_OF_ORDER),
    refused("seq again", 1, Code.WRONG_SEQ),
    refused("oversize", 1, Code.FRAME_OVERSIZE),
)
def test_a_frame_that_breaks_the_rules_is_refused(cluster: FaultyCluster, fault: Fault) -> None:
    assert_noticed(cluster, fault)


@chaos
@pytest.mark.parametrize(("rank", "on"), [(0, "Forward"), (1, "Ack")])
def test_a_frame_of_another_epoch_is_dropped_and_counted(cluster: FaultyCluster, rank: int, on: str) -> None:
    """Nothing else comes of it: the request is answered in the same epoch."""
    was = before(cluster)
    cluster.book.give(
        Order("wrong_frame", rank, was.epoch, on=on, how="other epoch as well", at=20, times=3),
        Order("record", 1 - rank, was.epoch),
    )
    answer = cluster.read(LONG)
    assert (answer.text, answer.error) == (cluster.right(LONG), None)
    counts = [frame["dropped"] for frame in cluster.book.notes("frame")]
    assert max(counts) - min(counts) == 3
    assert cluster.epoch == was.epoch
    assert_sound(cluster, was)


@chaos
def test_a_prompt_before_the_model_is_loaded(cluster: FaultyCluster) -> None:
    """Refused by rank 1 while the next group comes up; the one after it serves."""
    was = before(cluster)
    cluster.order("wrong_frame", 0, epoch=was.epoch + 1, on="LoadShard", how="prompt first")
    kill(was.pids[1])
    end = assert_recovered(cluster, was, {Code.OUT_OF_ORDER}, "a prompt before load", epochs=2)
    assert "Forward in state" in end.error.detail
