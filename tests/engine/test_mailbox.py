"""Messages that arrive while the loop of a rank asks for another sender's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from mlxtp.engine.decode_loop import Followers
from mlxtp.engine.mailbox import AGENT, DISK, LEADER, KeepWarm, Mailbox
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
