"""Sums over answers, of which the workload is learnt."""

from __future__ import annotations

from mlxtp.api.backend import StreamEnd
from mlxtp.api.request_metrics import MOST_ASKED, Asked, RequestMetrics
from mlxtp.errors import Code, GroupError


def test_whole_answers_count_with_those_that_were_open() -> None:
    meter = RequestMetrics(lambda: 0.0)
    first, second, third = (meter.begin("m", "g", range(100)) for _ in range(3))
    for each in (first, second):
        each.tokens(7, 0.0)
        each.end(StreamEnd("stop", 7, 60))
        each.end(StreamEnd("stop", 7, 60))  # counts once
    third.fail(GroupError("gone", Code.RANK_LOST))
    assert meter.asked == Asked(2, 200, 120, 14, 1 + 2)
    alone = meter.begin("m", "g", range(10))
    alone.end(StreamEnd("length", 0, 0))
    assert meter.asked == Asked(3, 210, 120, 14, 1 + 2 + 1)
    meter.begin("m", "g", range(10)).leave()  # its client went away
    assert meter.asked.answers == 3


def test_later_answers_count_more() -> None:
    asked = Asked()
    for _ in range(MOST_ASKED):
        asked = asked.plus(1000, 0, 100, 1)
    assert (asked.answers, asked.prompt) == (MOST_ASKED, 1000 * MOST_ASKED)
    for _ in range(2 * MOST_ASKED):
        asked = asked.plus(9000, 0, 100, 1)
    assert asked.answers <= MOST_ASKED
    assert asked.prompt / asked.answers > 7500
    assert asked.answer == 100 * asked.answers
