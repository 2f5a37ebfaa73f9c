"""Records of the last epochs, and the rate of tokens. No clock runs here."""

from __future__ import annotations

from typing import Any

import pytest

from mlxtp.groups.history import MOST, EpochStory, History, RateMeter


class Told:
    """A history with a clock of its own; the time of day begins at 1000."""

    def __init__(self) -> None:
        self.history = History()
        self.clock = 0.0

    def story(self, epoch: int, kind: str, model: str | None) -> EpochStory:
        return EpochStory(epoch, 1000 + self.clock, model is not None, 2, "ring", kind, model)

    def begins(self, epoch: int, after: float = 0.0) -> None:
        self.clock += after
        self.history.began(self.story(epoch, "", "tiny"), self.clock)

    def ready(self, after: float) -> None:
        self.clock += after
        self.history.ready(self.clock)

    def ends(
        self, after: float, code: str | None = "rank_lost", reason: str | None = "rank 1 is gone"
    ) -> None:
        self.clock += after
        self.history.ended(self.clock, code, reason)

    def told(self, epoch: int, state: str, reason: str = "", after: float = 0.5) -> None:
        self.clock += after
        story = self.story(epoch, "ring over Wi-Fi", None)
        self.history.remote_epoch(story, self.clock, state=state, reason=reason)

    def rows(self, *names: str) -> list[tuple[Any, ...]]:
        return [tuple(getattr(story, name) for name in names) for story in self.history.stories]


def test_a_failure_and_the_epoch_after_it() -> None:
    told = Told()
    told.begins(1)
    told.history.reached("spawned", 0.4004)
    told.history.reached("formed", 1.5)
    assert told.history.served_s(1.9) == 0.0
    told.ready(2.0)
    assert told.history.served_s(7.5) == 5.5
    told.ends(30.0)
    told.begins(2, after=0.5)
    assert told.history.served_s(told.clock + 1.0) == 0.0
    assert told.rows("epoch", "began", "ready_s", "lasted_s", "code", "reason") == [
        (2, 1032.5, None, None, None, None),
        (1, 1000.0, 2.0, 32.0, "rank_lost", "rank 1 is gone"),
    ]
    assert told.history.stories[1].stages == [("spawned", 0.4), ("formed", 1.5)]


def test_what_was_said_first_holds_and_an_epoch_that_was_never_ready_says_so() -> None:
    told = Told()
    told.begins(1)
    told.ready(1.0)
    told.ready(5.0)
    told.ends(1.0)
    told.ends(1.0, "internal", "another reason")
    told.history.reached("loaded", 9.0)
    told.ready(1.0)
    assert told.rows("ready_s", "lasted_s", "code") == [(1.0, 7.0, "rank_lost")]
    assert told.history.stories[0].stages == []
    told.begins(2)
    told.ends(3.0, "group_form_failed", "no cable")
    assert told.rows("ready_s", "lasted_s")[0] == (None, 3.0)


def test_only_the_last_ones_are_kept() -> None:
    told = Told()
    for epoch in range(1, MOST + 6):
        told.begins(epoch, after=1.0)
    epochs = [epoch for (epoch,) in told.rows("epoch")]
    assert epochs == list(range(MOST + 5, 5, -1))
    assert told.rows("lasted_s")[1] == (1.0,)


def test_what_another_mac_tells_of_its_group() -> None:
    told = Told()
    told.told(7, "forming", "rank 0 was lost before")  # of an epoch that no agent here has seen
    told.told(7, "loading")
    told.told(7, "ready")
    told.told(7, "ready")
    told.told(8, "forming", "epoch 7 lost mini")
    told.told(8, "ready", after=2.0)
    assert told.rows("epoch", "here", "ready_s", "lasted_s", "code", "reason") == [
        (8, False, 2.0, None, None, None),
        (7, False, 1.0, 2.0, None, "epoch 7 lost mini"),
    ]


@pytest.mark.parametrize(
    ("news", "rows"),
    [
        *(
            ([(*new, "it is gone")], [(7, 3.0, "it is gone")])
            for new in ((0, "idle"), (7, "restarting"), (7, "failed"), (7, "idle"))
        ),
        pytest.param(
            [(8, "loading", "connecting to rank 0")],
            [(8, None, None), (7, 3.0, None)],
            id="a reason of the new one",
        ),
        pytest.param(
            [(0, "idle", "the link is gone"), (7, "ready", "")], [(7, None, None)], id="news that were lost"
        ),
    ],
)
def test_what_is_told_after_a_group_elsewhere_was_ready(
    news: list[tuple[int, str, str]], rows: list[tuple[object, ...]]
) -> None:
    told = Told()
    told.told(7, "ready")
    for epoch, state, reason in news:
        told.told(epoch, state, reason, after=3.0)
    assert told.rows("epoch", "lasted_s", "reason") == rows


def test_an_epoch_of_this_mac_that_has_ended_does_not_begin_again_because_another_mac_speaks_of_it() -> None:
    told = Told()
    told.begins(7)
    told.ends(1.0)
    told.told(7, "ready")
    told.told(6, "ready")
    assert told.rows("epoch", "lasted_s", "code") == [(7, 1.0, "rank_lost")]


@pytest.mark.parametrize(
    "reads",
    [
        pytest.param(
            [(100, 10.0, None), (110, 10.1, None), (150, 11.0, 50.0), (150, 13.0, 16.7)], id="two reads"
        ),
        pytest.param(
            [(0, 0.0, None), (1_000_000, 60.0, None), (1_000_030, 61.0, 30.0)], id="long after the last"
        ),
        # Others would refuse a negative rate. The next group counts its tokens from 0.
        pytest.param([(500, 0.0, None), (0, 1.0, None), (30, 2.0, 30.0)], id="a count that begins again"),
        pytest.param([(0, 0.0, None), None, (500, 1.0, None), (500, 2.0, 0.0)], id="a new group"),
    ],
)
def test_the_rate_after_each_read(reads: list[tuple[int, float, float | None] | None]) -> None:
    meter = RateMeter(window_s=4.0, least_s=0.5)
    for read in reads:
        if read is None:
            meter.reset()
        else:
            assert meter.rate(*read[:2]) == read[2]


def test_what_came_before_the_window_does_not_count() -> None:
    meter = RateMeter(window_s=4.0, least_s=0.5)
    for second in range(10):
        meter.rate(1000 if second else 0, float(second))
    assert meter.rate(1000, 10.0) == 0.0
