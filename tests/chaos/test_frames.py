"""Frames that break the rules between rank 0 and rank 1: refused with their code, and nothing is skipped."""

from __future__ import annotations

import math

import pytest

from mlxtp.errors import Code

from ..live_cluster import until
from .answers import LONG, SHORT
from .harness import NOTICED_S, STALL_S, FaultyCluster, assert_recovered, assert_sound, before, kill
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


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["one chunk", "four chunks"])
def test_one_request_is_prompt_steps_and_one_stop(cluster: FaultyCluster, prompt: str) -> None:
    """N generated tokens take one prefill and N-1 step frames."""
    types, prompt_tokens, generated = frames_of(cluster, prompt, max_tokens=15)
    chunks = math.ceil(prompt_tokens / 32)
    assert generated == 15
    assert types == [PROMPT] * chunks + ["Forward"] * 14 + ["SessionStop"]


def test_an_end_token_costs_at_most_the_step_that_was_on_its_way(cluster: FaultyCluster) -> None:
    types, _, generated = frames_of(cluster, SHORT, max_tokens=64)
    steps = types.count("Forward")
    assert types == [PROMPT] + ["Forward"] * steps + ["SessionStop"]
    assert generated - 1 <= steps <= generated


TO_RANK_1 = [
    pytest.param("seq ahead", {Code.WRONG_SEQ}),
    pytest.param("unknown uid", {Code.WRONG_UID}),
    pytest.param("unknown type", {Code.UNKNOWN_TYPE}, marks=chaos),
    pytest.param("truncated", {Code.FRAME_MALFORMED}),
    # Noticed by the number of the next frame, or, when rank 0 cannot send one before this step is done, by
    # no rank's progress.
    pytest.param("other epoch", {Code.WRONG_SEQ, Code.ACK_MISSING, Code.RANK_STALLED}, marks=chaos),
    pytest.param("seq again", {Code.WRONG_SEQ}, marks=chaos),
    pytest.param("hello again", {Code.OUT_OF_ORDER}, marks=chaos),
    pytest.param("garbage", {Code.FRAME_MALFORMED}, marks=chaos),
    pytest.param("oversize", {Code.FRAME_OVERSIZE}, marks=chaos),
]

TO_RANK_0 = [
    # Rank 1 misses its own Ack when it sends the next one, and may be the first to report.
    pytest.param("seq ahead", {Code.WRONG_SEQ, Code.OUT_OF_ORDER}),
    pytest.param("truncated", {Code.FRAME_MALFORMED}),
    pytest.param("unknown type", {Code.UNKNOWN_TYPE}),
    pytest.param("other epoch", {Code.WRONG_SEQ, Code.OUT_OF_ORDER}),
    pytest.param("delta", {Code.OUT_OF_ORDER}, marks=chaos),
    pytest.param("seq again", {Code.WRONG_SEQ}, marks=chaos),
    pytest.param("oversize", {Code.FRAME_OVERSIZE}, marks=chaos),
]


@pytest.mark.parametrize(("how", "codes"), TO_RANK_1)
def test_rank_1_refuses(cluster: FaultyCluster, how: str, codes: set[Code]) -> None:
    refuse(cluster, 0, "Forward", how, codes)


@pytest.mark.parametrize(("how", "codes"), TO_RANK_0)
def test_rank_0_refuses(cluster: FaultyCluster, how: str, codes: set[Code]) -> None:
    refuse(cluster, 1, "Ack", how, codes)


def refuse(cluster: FaultyCluster, rank: int, on: str, how: str, codes: set[Code]) -> None:
    """`rank` sends something else than, or besides, the 20th message `on` of an answer."""
    was = before(cluster)
    cluster.order("wrong_frame", rank, on=on, how=how, at=20)
    answer = cluster.read(LONG)
    within_s = STALL_S if Code.RANK_STALLED in codes else NOTICED_S
    case = f"{how} from rank {rank}"
    assert_recovered(
        cluster,
        was,
        codes,
        detected_within_s=within_s,
        case=case,
        answers=((answer, cluster.right(LONG)),),
        likely="" if Code.RANK_STALLED in codes else "protocol",
    )


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


def test_a_prompt_before_the_model_is_loaded(cluster: FaultyCluster) -> None:
    """Refused by rank 1 while the next group comes up; the one after it serves."""
    was = before(cluster)
    cluster.order("wrong_frame", 0, epoch=was.epoch + 1, on="LoadShard", how="prompt first")
    kill(was.pids[1])
    end = assert_recovered(
        cluster,
        was,
        {Code.OUT_OF_ORDER},
        epochs=2,
        detected_within_s=NOTICED_S,
        case="a prompt before load",
    )
    assert "Forward in state" in end.error.detail
