"""Memory that stays wired after an epoch: what counts, and what is said of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import psutil
import pytest

from mlxtp.groups import boot_record as wired_memory
from mlxtp.groups.boot_record import GB, LOOK_S, LOOKS, WiredMemory, left_bytes, wired_bytes


@pytest.mark.parametrize(
    ("before", "after", "held", "left"),
    [
        (5, 5, 400, 0),
        (5, 405, 400, 400),
        (5, 300, 400, 295),
        (5, 900, 400, 400),  # the rest is another program's
        (5, 40, 400, 0),  # a tenth may be
        (5, 6, 3, 0),
        (405, 5, 400, 0),
    ],
)
def test_what_is_wired_beyond_what_others_may_have_taken_was_left(
    before: int, after: int, held: int, left: int
) -> None:
    assert left_bytes(before * GB, after * GB, held * GB) == left * GB


class Mac(WiredMemory):
    """A machine whose wired memory is in `now`, in GB; after `settles` looks it is as low as before.

    So many ranks have `begun`, and `wired` more has been since.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, settles: int = -1, begun: int = 0, wired: int = 0
    ) -> None:
        self.now, self.low, self.looks = 5, 5, 0
        self.settles = settles
        self.slept_s = 0.0
        super().__init__(self._look)

        async def sleep(seconds: float) -> None:
            self.slept_s += seconds

        # Not asyncio's own: servers of other tests run on in their threads.
        monkeypatch.setattr(wired_memory, "asyncio", SimpleNamespace(sleep=sleep))
        for _ in range(begun):
            self.began()
        self.now += wired

    def _look(self) -> int:
        self.looks += 1
        return (self.low if self.looks > self.settles >= 0 else self.now) * GB

    def end(self, held: int, *, stuck: bool = False) -> int:
        """In bytes, what its agent calls stranded."""
        return asyncio.run(self.ended(7, held * GB, stuck=stuck))

    def epoch(self, *held: int) -> None:
        for _ in held:
            self.began()
        self.now += sum(held)
        for each in held:
            asyncio.run(self.ended(7, each * GB))


def test_what_stays_is_logged_once_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mac = Mac(monkeypatch)
    mac.epoch(200, 200)
    assert mac.summary().startswith("400.0 GB stayed wired after ranks of this Mac ended; only a restart")
    assert [record.message for record in caplog.records] == [f"epoch 7: {mac.summary()}"]
    mac.epoch(50)
    assert mac.summary().startswith("450.0 GB stayed wired")
    mac.now = 100
    assert mac.summary() == ""


@pytest.mark.parametrize(("stays", "left"), [(90, 90), (0, 0)])
def test_what_a_rank_killed_in_a_collective_held_counts_until_it_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, stays: int, left: int
) -> None:
    mac = Mac(monkeypatch, begun=2, wired=100)
    assert mac.end(90, stuck=True) == 90 * GB
    assert mac.stranded_bytes() == 90 * GB
    assert mac.summary().startswith("90.0 GB may have stayed wired after ranks of this Mac ended")
    mac.now = 5 + stays
    assert mac.end(10) == left * GB
    assert mac.stranded_bytes() == left * GB


def test_what_came_back_although_a_rank_was_killed_is_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac(monkeypatch, begun=2, wired=100)
    assert mac.stranded_bytes() == 0  # a look
    mac.now -= 40
    assert mac.end(40, stuck=True) == mac.stranded_bytes() == 0


def test_what_is_left_counts_also_if_another_rank_begins_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac(monkeypatch, begun=1, wired=400)

    async def begin(_seconds: float) -> None:
        mac.began()

    monkeypatch.setattr(wired_memory, "asyncio", SimpleNamespace(sleep=begin))
    assert mac.end(400) == mac.stranded_bytes() == 400 * GB


def test_what_another_program_had_wired_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac(monkeypatch, begun=1, wired=2)
    assert mac.end(2) == mac.stranded_bytes() == 2 * GB
    mac.now -= 2
    assert mac.stranded_bytes() == 0


def test_what_a_rank_that_ended_by_itself_held_is_only_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac(monkeypatch, begun=2, wired=100)
    assert mac.end(90) == mac.stranded_bytes() == 0


def test_what_comes_back_within_seconds_is_not_told_and_little_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    little = Mac(monkeypatch)
    little.epoch(0, 1)
    assert little.slept_s == 0
    mac = Mac(monkeypatch, settles=4)
    mac.epoch(400)
    assert 0 < mac.slept_s < LOOKS * LOOK_S
    assert mac.summary() == ""
    assert not caplog.records


def test_only_macos_counts_wired_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfMacOs:
        wired = 7 * GB

    monkeypatch.setattr(psutil, "virtual_memory", OfMacOs)
    assert wired_bytes("darwin") == 7 * GB
    assert wired_bytes("linux") is None
    idle = WiredMemory(lambda: None)
    idle.began()
    asyncio.run(idle.ended(1, 400 * GB))
    assert idle.summary() == ""
