"""Files of failed epochs that no agent wrote: each wrong field is named, none gets further."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxtp.diagnostics.causes import epoch_record, rank_record
from mlxtp.diagnostics.failure_store import FailedEpoch, RankEnd, about_epoch, about_rank
from mlxtp.errors import Code, GroupError

RANK: dict[str, Any] = json.loads(json.dumps(about_rank(RankEnd(1, 7, 64, ended_at=1.0), 2.0, 1.0)))
EPOCH: dict[str, Any] = about_epoch(FailedEpoch(3, "a", GroupError("gone", Code.RANK_LOST), ("a",)), 1e9)
STEPS = {"columns": ["seq", "kind"], "steps": [[5, "step"]]}


def test_files_as_they_should_be() -> None:
    assert rank_record(RANK | {"node": "a", "recording": STEPS}).steps[0].seq == 5
    assert epoch_record(EPOCH | {"node": "a"}).hosts == ("a",)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": "1"},
        {"rank": float("inf")},
        {"rank": 1 << 70},
        {"status": [1]},
        {"pong_age_s": float("nan")},
        {"said": ["code"]},
        {"said": {"code": 5}},
        {"pong": 3},
        {"recording": {"columns": ["seq"], "steps": [["five"]]}},
        {"recording": {"columns": ["seq", "digest"], "steps": [[5, 5]]}},
        {"recording": {"columns": ["seq"], "steps": [[True]]}},
        {"recording": {"columns": ["when"], "steps": [[5]]}},
        {"recording": {"columns": ["seq"], "steps": [[5, 6]]}},
    ],
    ids=repr,
)
def test_a_rank_that_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        rank_record(RANK | {"node": "a"} | wrong)


@pytest.mark.parametrize(
    "wrong", [{"ended": 1e300}, {"ended": -1}, {"ended": "now"}, {"hosts": [1]}], ids=repr
)
def test_an_epoch_that_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is no"):
        epoch_record(EPOCH | {"node": "a"} | wrong)


def test_what_cannot_be_printed_is_replaced() -> None:
    assert rank_record(RANK | {"node": "a\ud800"}).node == "a?"
