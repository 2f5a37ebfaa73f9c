"""Messages that arrive while a rank asks for others, and what an idle rank has its GPU do meanwhile.

Time is that of a mailbox which tells it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from mlxtp.engine import mailbox
from mlxtp.engine.decode_loop import DecodeLoop, Followers
from mlxtp.engine.mailbox import AGENT, DISK, LEADER, POWER_S, KeepWarm, Mailbox
from mlxtp.engine.serve_loop import ServeLoop
from mlxtp.wire.blocking import BlockingLink


@pytest.mark.parametrize("warm", [False, True])
def test_a_wait_is_over_for_what_has_arrived_from_its_senders_alone(warm: bool) -> None:
    mail = Mailbox()
    mail.warm = KeepWarm(mail, lambda: True, touch=lambda: None, on_battery=lambda: False) if warm else None
    mail.post(AGENT, "said")
    assert mail.take(DISK) is None
    assert mail.idle(0.0, (AGENT, DISK))
    assert not mail.idle(0.0, (DISK,))
    assert mail.take(AGENT) == "said"
    assert not mail.idle(0.0, (AGENT, DISK))


class Over(Exception):
    """Raised where a loop would sleep."""


class Crossing(Mailbox):
    """A mailbox in which what was read from disk arrives while the loop asks for the leader's frames."""

    reads = 1

    def take(self, sender: int) -> Any:
        if sender == LEADER and self.reads:
            self.reads -= 1
            self.post(DISK, "read")
        return super().take(sender)

    def wait(self, timeout_s: float | None = None, of: Iterable[int] = ()) -> bool:
        if timeout_s is None and not super().wait(0, of):
            raise Over
        return super().wait(timeout_s, of) if timeout_s is not None else True


def test_a_rank_takes_what_was_read_from_disk_before_it_sleeps() -> None:
    rank = MagicMock()
    rank.from_disk.return_value = None
    with pytest.raises(Over):
        ServeLoop(rank, Crossing(), MagicMock()).run()
    rank.from_disk.assert_called_once_with("read")


def test_only_ranks_whose_ack_is_to_come_are_waited_for() -> None:
    """Another Ack of a rank that is ahead would end each wait at once."""
    mail = Mailbox()
    followers = Followers({rank: cast(BlockingLink, None) for rank in (1, 2)}, mail)
    assert followers.awaited == {1, 2}
    followers._acknowledged.add(1)
    assert followers.awaited == {2}


class Post(Mailbox):
    """A mailbox whose next message comes at `mail_at`, and the GPU beside it."""

    def __init__(self, mail_at: float, *, loaded: bool = True, battery: tuple[float, float] = (0, 0)) -> None:
        super().__init__()
        self.now = 0.0
        self.mail_at = mail_at
        self.waits = 0
        self.touched_at: list[float] = []
        self.keeper = KeepWarm(
            self,
            lambda: loaded,
            touch=lambda: self.touched_at.append(self.now),
            on_battery=lambda: battery[0] <= self.now < battery[1],
            clock=lambda: self.now,
        )

    def wait(self, timeout_s: float | None = None, _of: Iterable[int] = ()) -> bool:
        self.waits += 1
        until = float("inf") if timeout_s is None else self.now + timeout_s
        self.now = min(until, self.mail_at)
        return self.mail_at <= until


def test_an_idle_rank_touches_its_gpu_once_a_second_until_mail_comes() -> None:
    post = Post(mail_at=5.5)
    assert post.keeper.wait()
    assert (post.now, post.touched_at) == (5.5, [1, 2, 3, 4, 5])


def test_a_busy_rank_does_not() -> None:
    post = Post(mail_at=0.3)
    for _ in range(20):
        assert post.keeper.wait(60.0)
        post.mail_at += 0.3
    assert post.touched_at == []


def test_a_touch_that_fails_is_tried_again() -> None:
    post, failed = Post(mail_at=3.5), list[float]()

    def fail() -> None:
        failed.append(post.now)
        raise RuntimeError("[METAL] Command buffer execution failed: Impacting Interactivity")

    post.keeper.touch = fail
    assert post.keeper.wait()
    assert failed == [1, 2, 3]


def test_without_a_model_it_blocks() -> None:
    post = Post(mail_at=1000.0, loaded=False)
    assert post.keeper.wait()
    assert (post.waits, post.touched_at) == (1, [])


def test_it_still_notices_when_its_time_is_up() -> None:
    post = Post(mail_at=1000.0)
    assert not post.keeper.wait(2.5)
    assert (post.now, post.touched_at) == (2.5, [1, 2])


def test_on_battery_it_wakes_once_a_minute_to_see_whether_that_lasts() -> None:
    post = Post(mail_at=3 * POWER_S + 2.5, battery=(0, 2 * POWER_S))
    assert post.keeper.wait()
    assert post.touched_at == [2 * POWER_S + n for n in range(1, 63)]
    assert post.waits == 3 + 61 + 1


class Idle(Exception):
    """Raised by the wait of an idle rank."""


class NoMail(Mailbox):
    def wait(self, timeout_s: float | None = None, of: Iterable[int] = ()) -> bool:
        raise AssertionError("this wait keeps no GPU warm")


@pytest.mark.parametrize("leads", [True, False], ids=["rank 0", "rank 1"])
def test_the_loops_wait_by_it_when_nothing_runs(leads: bool) -> None:
    rank, mail = MagicMock(), NoMail()
    mail.warm = MagicMock()
    mail.warm.wait.side_effect = Idle
    others = MagicMock(), MagicMock(), MagicMock()
    loop = DecodeLoop(rank, mail, *others) if leads else ServeLoop(rank, mail, others[0])
    with pytest.raises(Idle):
        loop.run()
    mail.warm = None
    with pytest.raises(AssertionError, match="no GPU warm"):
        loop.run()


class Battery:
    power_plugged = False


def test_a_battery_is_one_that_is_not_plugged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, expected in ((Battery, True), (type("", (), {"power_plugged": True}), False), (None, False)):
        monkeypatch.setattr("psutil.sensors_battery", lambda found=found: found, raising=False)
        assert mailbox.runs_on_battery() is expected
    mailbox.touch_gpu()
