"""Rank processes that were started ahead: when, what becomes of them, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mlxtp.background import Backoff
from mlxtp.config import Settings
from mlxtp.groups import warm_pool
from mlxtp.groups.process_group import ProcessGroup
from mlxtp.groups.warm_pool import BUSY_S, QUIET_S, RETRY, WarmPool, WarmPoolPolicy, new_pipe
from mlxtp.wire.cluster_messages import EndEpoch, EpochEnded
from mlxtp.wire.messages import Ping, Pong
from mlxtp.wire.rank_stats import RankStats

from ..live_cluster import LIMITS, SLOWNESS, Cluster, rank_processes, until
from ..played import scenes
from . import test_hosted_rank
from .fake_rank import SPARE, Orders
from .scenes import run, sees, within
from .test_hosted_rank import HOST

pytestmark = [pytest.mark.slow, pytest.mark.fault]


def pong(phase: str = "idle", phase_s: float = QUIET_S, model: str = "tiny", in_flight: int = 0) -> Pong:
    return Pong(phase, phase_s, in_flight, 0, model, RankStats())


@pytest.mark.parametrize(
    ("word", "due"),
    [
        (pong(), True),
        (pong(phase_s=QUIET_S / 2), False),
        (pong(model=""), False),
        (pong("loading", 9.0, ""), False),
        (pong("decode", 9.0), False),
        (pong(in_flight=1), False),
    ],
)
def test_a_spare_is_started_beside_a_rank_that_has_been_idle(word: Pong, due: bool) -> None:
    assert WarmPoolPolicy(1).received_pong(word, 100.0, spares=0, importing=0) == due


def test_a_rank_that_is_never_idle_gets_one_in_the_end() -> None:
    books = WarmPoolPolicy(1)
    busy = pong("decode", 0.0)
    due = [
        books.received_pong(busy, now, spares=0, importing=0) for now in (5.0, 5.0 + BUSY_S - 1, 5.0 + BUSY_S)
    ]
    assert due == [False, False, True]
    books.received_pong(pong("loading", 0.0, ""), 100.0, spares=0, importing=0)  # the next epoch
    assert not books.received_pong(busy, 101.0, spares=0, importing=0)


@pytest.mark.parametrize(
    ("wanted", "spares", "importing", "due"),
    [
        (0, 0, 0, False),
        (1, 0, 0, True),
        (1, 1, 0, False),
        (2, 1, 0, True),
        (2, 1, 1, False),
        (2, 2, 0, False),
    ],
)
def test_one_after_the_other_until_there_are_enough(
    wanted: int, spares: int, importing: int, due: bool
) -> None:
    assert WarmPoolPolicy(wanted).received_pong(pong(), 5.0, spares=spares, importing=importing) == due


def test_those_that_end_by_themselves_are_replaced_ever_more_slowly() -> None:
    books, now, waits = WarmPoolPolicy(1), 100.0, []
    for _ in range(15):
        books.lost(now)
        wait = next(w for w in range(10_000) if books.received_pong(pong(), now + w, spares=0, importing=0))
        waits.append(wait)
        now += wait
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    assert waits[-1] == RETRY.most_s
    books.used()
    books.lost(now)
    assert books.received_pong(pong(), now + RETRY.first_s, spares=0, importing=0)


class Story:
    """Epochs one after the other, with spares."""

    def __init__(self, tmp_path: Path, ranks: int, wanted: int) -> None:
        self.orders = Orders(tmp_path / "orders")
        limits = replace(LIMITS, heartbeat_s=0.02)
        self.settings = Settings(tmp_path / "home", "", 0, ranks, "tiny", limits=limits)
        self.home = self.settings.home
        self.spares = WarmPool(self.orders.worker, self.home / "run", wanted)
        self.ranks: ProcessGroup | None = None
        self.epoch = 0

    async def serve(self) -> list[int]:
        """The next epoch, until it has its model; the pids of its ranks."""
        self.epoch += 1
        self.ranks = ProcessGroup(self.settings, self.epoch, lambda _: None, worker=self.spares)
        await self.ranks.start()
        await self.ranks.load("/here", ())
        return [process.pid for process in self.ranks.processes]

    async def spare_pids(self, count: int) -> set[int]:
        """Pids of the spares, once so many are ready."""
        await sees(lambda: len(self.spares.ready) == count, f"{count} spares")
        return set(self.spares.ready)

    async def end(self) -> None:
        if self.ranks is not None:
            await self.ranks.kill()

    def starts(self) -> int:
        """Count the spares that were started so far."""
        return len(self.orders.notes_of(SPARE, "started"))


def play(
    tmp_path: Path, story: Callable[[Story], Awaitable[None]], ranks: int = 1, wanted: int | None = None
) -> None:
    async def scene() -> None:
        stage = Story(tmp_path, ranks, ranks if wanted is None else wanted)
        async with stage.spares:
            try:
                await within(story(stage))
            finally:
                await stage.end()
        assert rank_processes(stage.home) == []
        await asyncio.sleep(0)  # who was cancelled ends in this turn
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scene())


scene = scenes(play, "tmp_path")


@scene(ranks=2)
async def test_spares_become_the_next_ranks_and_rank_0_gets_the_listener(stage: Story) -> None:
    first = await stage.serve()
    waiting = await stage.spare_pids(2)
    assert not waiting & set(first)
    await stage.end()
    assert set(await stage.serve()) == waiting
    [listener] = stage.orders.notes("listener")
    told = stage.orders.notes("bootstrap")[-1]
    assert told["decode_address"] == f"127.0.0.1:{listener['port']}"
    assert not await stage.spare_pids(2) & waiting


@scene()
async def test_ranks_and_spares_know_no_secrets_of_their_agent(
    stage: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "MLX_METAL_FAST_SYNCH"):
        monkeypatch.setenv(name, "1")
    for pid in (*await stage.serve(), *await stage.spare_pids(1)):
        known = psutil.Process(pid).environ()
        assert {"HF_TOKEN", "OPENAI_API_KEY"} & known.keys() == set()
        assert known["MLX_METAL_FAST_SYNCH"] == "1"


WATCHED = """
import sys
from pathlib import Path
import mlx.core as mx
def called(*_, **__):
    Path({note!r}).touch()
mx.distributed.init = mx.distributed.is_available = called
from mlxtp.engine import worker
worker.main(sys.argv[1:])
"""


def test_a_spare_opens_no_device_before_it_is_a_rank(tmp_path: Path) -> None:
    """A protection domain that it took might not come back before the Mac restarts."""
    note = tmp_path / "called"

    async def story() -> None:
        command = (sys.executable, "-c", WATCHED.format(note=str(note)))
        async with WarmPool(command, tmp_path, 1) as pool:
            pool.received_pong(pong())
            await sees(lambda: pool.ready, "a spare")

    run(within(story()))
    assert not note.exists()


@scene()
async def test_one_that_dies_is_replaced(stage: Story) -> None:
    await stage.serve()
    [pid] = await stage.spare_pids(1)
    os.kill(pid, signal.SIGKILL)
    await sees(lambda: stage.spares.ready and stage.spares.ready != (pid,), "another one")
    assert not psutil.pid_exists(pid)
    [another] = stage.spares.ready
    await stage.end()
    assert await stage.serve() == [another]


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
@scene()
async def test_one_that_does_not_answer_is_ended_and_not_waited_for(
    stage: Story, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(warm_pool, "ANSWER_S", 0.2)
    await stage.serve()
    [pid] = await stage.spare_pids(1)
    await stage.end()
    os.kill(pid, how)
    while how is signal.SIGKILL and runs(pid):
        pass  # the agent must not have had a turn to notice
    assert stage.spares.ready == (pid,)
    assert pid not in await stage.serve()
    await sees(lambda: not psutil.pid_exists(pid), "it is reaped")


@scene()
async def test_the_error_of_a_pipe_that_broke_is_read_when_its_rank_is_ended(stage: Story) -> None:
    """Otherwise asyncio reports it, or not, by the order in which the garbage collector finds it."""
    [pid] = await stage.serve()
    assert stage.ranks is not None
    link = stage.ranks.processes[0]._connection
    assert link is not None
    closed = link._writer.transport.get_protocol()._closed
    os.kill(pid, signal.SIGKILL)
    while runs(pid):
        pass  # the agent must not have had a turn to notice
    link.send(Ping())
    await stage.end()
    assert "Broken pipe" in str(closed)
    assert not closed._log_traceback


@scene()
async def test_one_that_cannot_start_costs_nothing_but_itself(
    stage: Story, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm_pool, "RETRY", Backoff(3600.0, 3600.0))
    stage.orders.give(SPARE, broken=True)
    await stage.serve()
    await sees(lambda: stage.starts() == 1)
    [note] = stage.orders.notes_of(SPARE, "started")
    await sees(lambda: "ended with 1" in caplog.text)
    assert not psutil.pid_exists(note["pid"])
    stage.spares.received_pong(pong())
    assert not stage.spares._starting
    await stage.end()
    await stage.serve()
    assert stage.starts() == 1
    assert stage.spares.ready == ()


@scene()
async def test_one_that_still_imports_is_left_alone(stage: Story) -> None:
    stage.orders.give(SPARE, silent=True)
    await stage.serve()
    await sees(lambda: stage.starts() == 1)
    [note] = stage.orders.notes_of(SPARE, "started")
    await stage.end()
    assert note["pid"] not in await stage.serve()
    assert psutil.pid_exists(note["pid"])
    assert stage.starts() == 1


@scene()
async def test_one_that_never_becomes_ready_is_ended(
    stage: Story, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm_pool, "IMPORT_S", 0.1)
    monkeypatch.setattr(warm_pool, "RETRY", Backoff(3600.0, 3600.0))
    stage.orders.give(SPARE, silent=True)
    before = await stage.serve()
    await sees(lambda: "ended with " in caplog.text)
    assert rank_processes(stage.home) == before


@scene()
async def test_an_old_one_is_replaced(stage: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    await stage.serve()
    [pid] = await stage.spare_pids(1)
    monkeypatch.setattr(warm_pool, "MAX_AGE_S", 0.0)
    await sees(lambda: stage.spares.ready == ())
    monkeypatch.setattr(warm_pool, "MAX_AGE_S", 3600.0)
    assert await stage.spare_pids(1) != {pid}
    assert not psutil.pid_exists(pid)


@scene()
async def test_without_ranks_there_are_no_spares_after_a_while(
    stage: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_pool, "UNUSED_S", 1.0)
    await stage.serve()
    await stage.spare_pids(1)
    await stage.end()
    await sees(lambda: rank_processes(stage.home) == [], "it is gone")
    await stage.serve()
    await stage.spare_pids(1)


@pytest.mark.parametrize("imports", [False, True])
@scene()
async def test_nothing_is_left_of_one_that_is_just_started_or_imports(stage: Story, imports: bool) -> None:
    stage.orders.give(SPARE, silent=imports)
    stage.spares.received_pong(pong())  # and the agent ends in the same turn
    if imports:
        await sees(lambda: stage.starts() == 1)


@pytest.mark.chaos
@scene(ranks=2)
async def test_eight_epochs_leave_no_descriptor_and_no_process(stage: Story) -> None:
    me, counts = psutil.Process(), []
    for _ in range(8):
        pids = await stage.serve()
        await stage.spare_pids(2)
        counts.append((me.num_fds(), len(me.children())))
        os.kill(pids[-1], signal.SIGKILL)
        await stage.end()
    assert stage.starts() == 16
    (early, children), *_, (late, _) = counts[1:]
    assert late <= early, counts  # fewer when something of another test is collected meanwhile
    assert {each for _, each in counts} == {children}, counts


@scene()
async def test_a_rank_for_another_mac_is_a_spare_too(stage: Story) -> None:
    stage.orders.give(1, model="tiny")
    there = test_hosted_rank.Story(stage.home, stage.spares)
    try:
        await there.started(5)
        waiting = await stage.spare_pids(1)
        there.hosted.received(HOST, EndEpoch(5, in_order=False))
        await there.hears(EpochEnded)
        there.said[HOST].clear()
        await there.started(6)
        assert {stage.orders.notes_of(1, "started")[-1]["pid"]} == waiting
    finally:
        await there.hosted.close()


def test_a_pipe_holds_more_than_a_plain_socket_pair() -> None:
    """An agent that stands still must not make rank 0 wait. How much more, the system limits."""
    assert frames_held(new_pipe()) > 1.5 * frames_held(socket.socketpair())


def frames_held(ends: tuple[socket.socket, socket.socket]) -> int:
    """Count the small frames that a rank can send to an agent that reads none."""
    ours, theirs = ends
    sent = 0
    with ours, theirs, contextlib.suppress(BlockingIOError):
        theirs.setblocking(False)
        while theirs.send(bytes(100)):
            sent += 1
    return sent


def rests(process: psutil.Process) -> bool:
    """Return whether it does nothing at all for a while."""
    worked = process.cpu_times()
    time.sleep(0.3)
    return bool(process.cpu_times() == worked)


@pytest.mark.group
def test_after_a_kill_the_group_is_made_of_spares_and_answers_as_before(tmp_path: Path) -> None:
    with Cluster(tmp_path, ranks=2, spare=True) as cluster:
        prompt = "Repeat exactly: FALCON-MERCURY-7749"
        expected = cluster.content(prompt)
        waiting = spares_of(cluster)
        assert len(rank_processes(tmp_path)) == 4
        for process in map(psutil.Process, waiting):
            assert process.net_connections("inet") == []
            until(lambda process=process: rests(process), "a spare waits without working")
        os.kill(cluster.pids()[1], signal.SIGKILL)
        until(lambda: cluster.epoch == 2 and cluster.health()["ready"], "the next epoch")
        assert set(cluster.pids()) == waiting
        assert cluster.content(prompt) == expected


def spares_of(cluster: Cluster) -> set[int]:
    """Pids of both spares, once they wait."""
    spares = cluster.agent.warm_pool
    return set(until(lambda: len(spares.ready) == 2 and spares.ready, "two spares", 60 * SLOWNESS))
