"""Replies of several ranks, of which some stay silent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest

from mlxtp.engine.decode_loop import Followers
from mlxtp.engine.executor import Result
from mlxtp.engine.mailbox import Mailbox
from mlxtp.errors import Code, LinkError
from mlxtp.wire.blocking import BlockingLink
from mlxtp.wire.messages import Ack, Done
from mlxtp.wire.session import Received

from ..live_cluster import WAIT_S
from .tables import refused

DONE = Received(1, Done())


class Mail(Mailbox):
    """A mailbox whose clock stands still: the time of a wait for a silent rank passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_s: list[float | None] = []

    def wait(self, timeout_s: float | None = None, of: Iterable[int] = ()) -> bool:
        self.waits_s.append(timeout_s)
        return super().wait(0, of)


def of(mail: Mailbox, ranks: int) -> Followers:
    return Followers({rank: cast(BlockingLink, None) for rank in range(1, ranks + 1)}, mail)


def test_every_reply_is_read_although_the_first_rank_is_silent() -> None:
    mail = Mail()
    for rank in (2, 3):
        mail.post(rank, DONE)
    with refused(LinkError, Code.LINK_TIMEOUT, r"nothing came from rank 1 within 5 s"):
        of(mail, 3).replies(5.0)
    assert mail.take(2) is None
    assert mail.take(3) is None


def test_all_silent_ranks_are_named() -> None:
    mail = Mail()
    mail.post(2, DONE)
    with pytest.raises(LinkError, match=r"nothing came from rank 1 and rank 3 within 5 s"):
        of(mail, 3).replies(5.0)


def test_all_ranks_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    mail = Mail()

    def receive(rank: int, deadline_s: float | None) -> Any:
        assert deadline_s is not None
        mail.waits_s.append(deadline_s)
        now[0] += deadline_s
        raise LinkError("silent", Code.LINK_TIMEOUT)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(mail, "receive", receive)
    with pytest.raises(LinkError):
        of(mail, 3).replies(5.0)
    assert mail.waits_s == [5.0, 0.0, 0.0]


def test_replies_that_are_there_come_in_the_order_of_ranks() -> None:
    mail = Mail()
    for rank in (2, 1):
        mail.post(rank, DONE)
    assert list(of(mail, 2).replies(WAIT_S)) == [1, 2]
    assert list(of(mail, 0).replies(WAIT_S)) == []


def test_a_rank_may_be_a_step_ahead_of_another_with_its_acks() -> None:
    mail = Mail()
    followers = of(mail, 2)
    one, two = (Result(step, (), {}, step, 0, 7, 0, 0, 0.0, 0.0) for step in (1, 2))
    for step in (1, 2):
        mail.post(1, Received(step, Ack(step, step, 0, 7)))
    assert not followers.acknowledged(one)
    assert not followers.acknowledged(one), "the second Ack of rank 1 is of the next step"
    assert followers.awaited == {2}
    for step in (1, 2):
        mail.post(2, Received(step, Ack(step, step, 0, 7)))
    assert followers.acknowledged(one)
    assert followers.acknowledged(two)
