"""The ranks that an agent runs for owners elsewhere: real processes, owners that listen."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import psutil
import pytest

from mlxtp.config import Settings
from mlxtp.diagnostics.failure_store import FOLDER, epoch_id
from mlxtp.errors import Code, FailureReport, GroupError, LinkError, ModelError
from mlxtp.groups.hosted_rank import MAX_OF_HOST, MAX_ORDERS, HostedRanks
from mlxtp.groups.ranks import MAX_REPORTS, Worker
from mlxtp.wire.cluster_messages import (
    EndEpoch,
    EpochEnded,
    Prepare,
    Prepared,
    RankGathered,
    RankPong,
    RankSide,
    RankStarted,
    RankTrouble,
    StartRank,
)
from mlxtp.wire.codecs import Message
from mlxtp.wire.messages import Bootstrap, Gathered, SideChannel

from ..live_cluster import LIMITS, WAIT_S, rank_processes
from ..played import scenes
from .fake_rank import Orders
from .scenes import run, sees, within

pytestmark = [pytest.mark.slow, pytest.mark.fault]

HOST, OTHER, HERE = "a" * 32, "b" * 32, "c" * 32
EPOCH_ID = epoch_id(bytes(32))
M = TypeVar("M", bound=Message)


def prepare(epoch: int = 5, model: str = "tiny", *, group: str = "0") -> Prepare:
    return Prepare(epoch, 1, "127.0.0.1", model, group)


def start(epoch: int = 5, backend: str = "ring") -> StartRank:
    return StartRank(
        epoch, Bootstrap(1, 2, backend, ("127.0.0.1:1", "127.0.0.1:2"), "127.0.0.1:3", bytes(32), 5, 5, 1)
    )


class Story:
    """Hosted ranks, and their reports by receiver."""

    def __init__(self, home: Path, worker: Worker | None = None) -> None:
        self.home = home
        self.orders = Orders(home.parent / "orders")
        self.said: dict[str, list[Message]] = {HOST: [], OTHER: []}
        self.deaf = False
        self._news = asyncio.Event()
        node = SimpleNamespace(
            settings=Settings(home, "", 0, 1, "tiny", limits=LIMITS),
            links=SimpleNamespace(send=self._send, on=lambda *_: None, on_lost=lambda _: None),
            enrolment=SimpleNamespace(on_gone=lambda _: None),
            membership=SimpleNamespace(status_of=lambda host: SimpleNamespace(boot_id=f"boot of {host}")),
            node_id=HERE,
            boot_id="boot",
        )
        self.hosted = HostedRanks(cast(Any, node), self._folder, 4, worker or self.orders.worker)

    def _folder(self, model: str) -> Path:
        if model != "tiny":
            raise ModelError("the model is not here", Code.MODEL_NOT_FOUND)
        return Path("/models/one")

    def _send(self, host: str, message: Message) -> None:
        if self.deaf:
            raise LinkError("gone")
        self.said[host].append(message)
        self._news.set()

    def heard(self, kind: type[M], host: str = HOST) -> list[M]:
        return [message for message in self.said[host] if isinstance(message, kind)]

    async def hears(self, kind: type[M], host: str = HOST, count: int = 1) -> M:
        """Wait for the `count`th message of this kind."""
        async with asyncio.timeout(WAIT_S):
            while len(found := self.heard(kind, host)) < count:
                self._news.clear()
                await self._news.wait()
        return found[count - 1]

    async def prepared(self, epoch: int = 5) -> None:
        self.hosted.received(HOST, prepare(epoch))
        await self.hears(Prepared)

    async def started(self, epoch: int = 5) -> None:
        await self.prepared(epoch)
        self.hosted.received(HOST, start(epoch))
        await self.hears(RankStarted)

    @property
    def epoch(self) -> int:
        """Number of the newest epoch that serves; 0 for none."""
        return max((rank.order.epoch for rank in self.hosted.ranks), default=0)

    def pids(self) -> list[int]:
        return rank_processes(self.home)


def play(tmp_path: Path, story: Callable[[Story], Awaitable[None]]) -> None:
    """Play a story at whose end nothing of the hosted rank is left."""

    async def scene() -> None:
        stage = Story(tmp_path / "home")
        try:
            await within(story(stage))
        finally:
            await stage.hosted.close()
        assert stage.pids() == []
        assert list(stage.home.glob("run/*")) == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scene())


scene = scenes(play, "tmp_path")


@scene()
async def test_a_rank_from_its_order_to_its_end(stage: Story) -> None:
    stage.orders.give(1, jaccl=True)
    stage.hosted.received(HOST, prepare())
    prepared = await stage.hears(Prepared)
    assert prepared.path == "/models/one"
    assert prepared.ring.startswith("127.0.0.1:")
    [rank] = stage.hosted.ranks
    assert (rank.order.epoch, rank.host, rank.host_boot) == (5, HOST, f"boot of {HOST}")
    assert (stage.hosted.last_epoch(HOST), stage.hosted.last_epoch(OTHER)) == (5, 4)
    assert stage.hosted.models == {Path("/models/one")}
    stage.hosted.received(HOST, start())
    assert (await stage.hears(RankStarted)).jaccl
    assert (await stage.hears(RankPong, count=2)).pong.phase == "idle"
    stage.hosted.received(HOST, EndEpoch(5, True))
    await stage.hears(EpochEnded)
    assert stage.orders.notes("shut down")
    assert not (stage.home / FOLDER).exists(), "an end in order is no failure"
    assert not stage.hosted.ranks
    assert stage.hosted.models == set()
    assert stage.pids() == []
    assert stage.heard(RankTrouble) == []


@scene()
async def test_only_this_mac_decides_where_and_how_much_its_ranks_write(stage: Story) -> None:
    await stage.prepared()
    order = start()
    chosen = replace(order.bootstrap, disk_folder="/Users/else/Library", disk_bytes=10**15)
    stage.hosted.received(HOST, replace(order, bootstrap=chosen))
    await stage.hears(RankStarted)
    [told] = stage.orders.notes("bootstrap")
    assert told["disk_folder"] == str(stage.home / "kv-cache")
    assert 0 < told["disk_bytes"] <= 50 * 10**9


@pytest.mark.parametrize("wanted", [True, False])
@scene()
async def test_each_mac_decides_whether_its_gpu_is_kept_warm(stage: Story, wanted: bool) -> None:
    stage.hosted._node.settings = replace(stage.hosted._node.settings, keep_warm=wanted)
    await stage.prepared()
    [pid] = stage.pids()
    assert ("--keep-warm" in psutil.Process(pid).cmdline()) is wanted


Ending = Callable[[Story], Awaitable[None]]


async def its_host_failed(stage: Story) -> None:
    stage.hosted.received(HOST, EndEpoch(5, False))
    await stage.hears(EpochEnded)


async def its_link_broke(stage: Story) -> None:
    stage.deaf = True
    stage.hosted.lost(HOST)
    await sees(lambda: not stage.pids())


async def it_died(stage: Story) -> None:
    os.kill(stage.pids()[0], signal.SIGKILL)
    await sees(lambda: any("signal 9" in each.detail for each in stage.heard(RankTrouble)))
    await its_host_failed(stage)


@pytest.mark.parametrize(
    ("fault", "detail", "number"),
    [
        (its_host_failed, "epoch 5 failed: its host knows why", signal.SIGTERM),
        (its_link_broke, "its host's link is gone", signal.SIGTERM),
        (it_died, "epoch 5 failed: its host knows why", signal.SIGKILL),
    ],
)
@scene()
async def test_a_failed_epoch_leaves_a_file_of_the_rank_here(
    stage: Story, fault: Ending, detail: str, number: int
) -> None:
    """With the epoch's number and id, so that it goes with the files of other Macs."""
    await stage.started()
    await stage.hears(RankPong)
    await fault(stage)
    await sees(lambda: list(stage.home.glob(f"{FOLDER}/*/rank-1.json")))
    [folder] = (stage.home / FOLDER).iterdir()
    told = json.loads((folder / "epoch.json").read_text())
    mine = json.loads((folder / "rank-1.json").read_text())
    assert told["cause"]["detail"] == detail
    assert (mine["epoch"], mine["epoch_id"], told["epoch_id"]) == (5, EPOCH_ID, EPOCH_ID)
    assert (mine["rank"], mine["signal"], mine["by_agent"]) == (1, number, number == signal.SIGTERM)
    assert mine["pong"]["phase"] == "idle"
    assert bool(told["reports"]) is (fault is not its_host_failed)


@scene()
async def test_a_rank_that_never_started_is_no_loss(stage: Story) -> None:
    await stage.prepared()
    stage.hosted.received(HOST, EndEpoch(5, False))
    await stage.hears(EpochEnded)
    assert not (stage.home / FOLDER).exists()


async def ended(stage: Story) -> None:
    stage.hosted.received(HOST, EndEpoch(5, True))
    await stage.hears(EpochEnded)


async def lost(stage: Story) -> None:
    stage.deaf = True
    stage.hosted.lost(HOST)


async def cleared(stage: Story) -> None:
    stage.hosted.clear("another group is formed")
    trouble = await stage.hears(RankTrouble)
    assert (trouble.code, trouble.outside) == (Code.RANK_LOST, True)
    assert "another group is formed" in trouble.detail


async def closed(stage: Story) -> None:
    await stage.hosted.close()


MOMENTS = ("before it is spawned", "before its hello", "while it joins")
ENDS = (ended, lost, cleared, closed)


@pytest.mark.parametrize(
    ("end", "moment"),
    [
        pytest.param(end, moment, marks=() if i % len(MOMENTS) == j else pytest.mark.chaos)
        for i, end in enumerate(ENDS)
        for j, moment in enumerate(MOMENTS)
    ],
)
@scene()
async def test_who_is_ended_on_the_way_up_does_not_live_on(stage: Story, end: Ending, moment: str) -> None:
    """An order to end, or the end of the link, may come at any time of starting."""
    if moment == "before its hello":
        stage.orders.give(1, silent=True)
    if moment == "while it joins":
        stage.orders.give(1, deaf=True)
    stage.hosted.received(HOST, prepare())
    if moment == "before its hello":
        await sees(lambda: stage.orders.notes("started"))
    if moment == "while it joins":
        await stage.hears(Prepared)
        stage.hosted.received(HOST, start())
        await sees(lambda: stage.orders.notes("bootstrap"))
    await end(stage)
    await sees(lambda: stage.epoch == 0)
    told = len(stage.said[HOST])
    stage.orders.give(1)
    stage.deaf = False
    if end is not closed:  # the next one finds its way free
        stage.hosted.received(HOST, prepare(6))
        assert (await stage.hears(Prepared, count=1 + (moment == "while it joins"))).epoch == 6
        assert len(stage.pids()) == 1
        assert len(stage.said[HOST]) == told + 1


@scene()
async def test_a_newer_order_takes_the_place_of_an_older_one(stage: Story) -> None:
    await stage.started()
    for epoch in range(6, 40):
        stage.hosted.received(HOST, prepare(epoch))
    assert stage.epoch == 39
    assert (await stage.hears(Prepared, count=2)).epoch == 39
    assert len(stage.pids()) == 1
    assert [note["epoch"] for note in stage.orders.notes("started")] == [5, 39]
    stage.hosted.received(HOST, EndEpoch(5, False))
    await stage.hears(EpochEnded)
    assert (stage.epoch, len(stage.pids())) == (39, 1)
    for epoch in range(40, 40 + 2 * MAX_ORDERS):
        stage.hosted.received(HOST, prepare(epoch))
    assert len(stage.hosted._alive) == MAX_ORDERS, "and no more wait for their turn"


@scene()
async def test_the_next_rank_of_a_group_starts_once_the_last_one_has_given_its_memory_back(
    stage: Story,
) -> None:
    stage.orders.give(1, frees_s=1.0)
    await stage.started()
    [first] = stage.pids()
    stage.hosted.received(HOST, prepare(6))
    assert stage.hosted.models == {Path("/models/one")}, "it still has its files open"
    await sees(lambda: stage.pids() != [first])
    assert stage.pids() == [] or first not in stage.pids()
    assert (await stage.hears(Prepared, count=2)).epoch == 6


@scene()
async def test_a_rank_that_fails_again_and_again_is_reported_so_often_and_no_more(stage: Story) -> None:
    await stage.started()
    [rank] = stage.hosted.ranks
    for _ in range(100):
        rank.report(FailureReport(1, GroupError("it says so again")))
    assert len(stage.heard(RankTrouble)) == len(rank._reports) == MAX_REPORTS


@scene()
async def test_orders_of_others_and_for_other_epochs_change_nothing(stage: Story) -> None:
    await stage.started()
    for host, epoch in ((OTHER, 5), (HOST, 4), (HOST, 6)):
        for order in (
            start(epoch),
            EndEpoch(epoch, False),
            EndEpoch(epoch, True),
            RankGathered(epoch, 1, Gathered(1, b"ab")),
        ):
            stage.hosted.received(host, order)
    stage.hosted.lost(OTHER)
    await stage.hears(EpochEnded, OTHER, count=2)
    await stage.hears(EpochEnded, HOST, count=4)
    pongs = len(stage.heard(RankPong))
    await stage.hears(RankPong, count=pongs + 3)
    assert (stage.epoch, len(stage.pids())) == (5, 1)
    assert len(stage.orders.notes("bootstrap")) == 1
    assert stage.heard(RankTrouble) == []


@scene()
async def test_ranks_of_two_hosts_and_of_several_groups_live_and_end_by_themselves(stage: Story) -> None:
    """Also where two hosts use one number: it is their own."""
    ours = ((HOST, 5, "0"), (HOST, 6, "big#0"), (OTHER, 5, "0"), (OTHER, 7, "small#1"))
    for host, epoch, group in ours:
        stage.hosted.received(host, prepare(epoch, group=group))
    for host in (HOST, OTHER):
        await stage.hears(Prepared, host, count=2)
    for host, epoch, _ in ours:
        stage.hosted.received(host, start(epoch))
    for host in (HOST, OTHER):
        await stage.hears(RankStarted, host, count=2)
    assert {rank.key for rank in stage.hosted.ranks} == {(host, epoch) for host, epoch, _ in ours}
    assert len(stage.pids()) == len({each.name for each in stage.home.glob("run/*")}) == 4

    [victim] = [each for each in stage.hosted._alive if each.key == (OTHER, 7)]
    os.kill(victim.process.pid, signal.SIGKILL)
    assert (await stage.hears(RankTrouble, OTHER)).epoch == 7
    stage.hosted.received(HOST, prepare(8, group="big#0"))
    assert (await stage.hears(Prepared, count=3)).epoch == 8
    stage.hosted.received(OTHER, EndEpoch(5, True))
    await stage.hears(EpochEnded, OTHER)
    assert {rank.key for rank in stage.hosted.ranks} == {(HOST, 5), (HOST, 8), (OTHER, 7)}
    pongs = len(stage.heard(RankPong))
    await stage.hears(RankPong, count=pongs + 3)
    assert {each.epoch for each in stage.heard(RankPong)[pongs + 1 :]} == {5}
    stage.hosted.lost(HOST)
    await sees(lambda: stage.pids() == [])
    assert {rank.key for rank in stage.hosted.ranks} == {(OTHER, 7)}
    assert {each.epoch for each in stage.heard(RankTrouble, OTHER)} == {7}


@scene()
async def test_a_slow_or_flooded_host_holds_up_no_other(stage: Story) -> None:
    stage.orders.give(1, silent=True)
    stage.hosted.received(HOST, prepare())
    await sees(lambda: stage.orders.notes("started"))
    for _ in range(2 * MAX_ORDERS):
        stage.hosted.received(HOST, start())
    [rank] = stage.hosted.ranks
    assert rank._orders.qsize() <= MAX_ORDERS
    stage.orders.give(1)
    stage.hosted.received(OTHER, prepare())
    await stage.hears(Prepared, OTHER)
    assert stage.said[HOST] == []


@scene()
async def test_a_rank_that_is_started_twice_is_no_rank_any_more(stage: Story) -> None:
    await stage.started()
    stage.hosted.received(HOST, start())
    assert (await stage.hears(RankTrouble)).code == Code.OUT_OF_ORDER
    assert len(stage.heard(RankStarted)) == 1


@scene()
async def test_its_rounds_of_the_side_channel_travel_both_ways(stage: Story) -> None:
    await stage.prepared()
    stage.hosted.received(HOST, start(backend="jaccl"))
    assert (await stage.hears(RankSide)).side == SideChannel(1, b"1")
    stage.hosted.received(HOST, RankGathered(5, 1, Gathered(1, b"01")))
    await sees(lambda: stage.orders.notes("gathered"))
    assert stage.orders.notes("gathered")[0]["data"] == "01"


@scene()
async def test_a_model_that_is_not_here_is_said_before_anything_is_started(stage: Story) -> None:
    stage.hosted.received(HOST, prepare(model="another"))
    trouble = await stage.hears(RankTrouble)
    assert (trouble.code, trouble.detail) == (Code.MODEL_NOT_FOUND, "the model is not here")
    assert stage.orders.notes("started") == []


@scene()
async def test_a_home_that_takes_no_files(stage: Story) -> None:
    stage.home.mkdir()
    (stage.home / "run").write_text("in the way")
    stage.hosted.received(HOST, prepare())
    trouble = await stage.hears(RankTrouble)
    assert trouble.code == Code.FORM_FAILED
    assert str(stage.home) in trouble.detail
    (stage.home / "run").unlink()


@pytest.mark.parametrize(
    ("order", "code", "words"),
    [
        ({"silent": True}, Code.LINK_TIMEOUT, "did not reply in time"),
        *(
            ({"die_on": at, "code": "out_of_memory"}, Code.OUT_OF_MEMORY, "rank 1 ended with out_of_memory")
            for at in ("Welcome", "Bootstrap")
        ),
        ({"error_on": "Bootstrap"}, Code.FORWARD_FAILED, "rank 1 was told to fail"),
    ],
)
@scene()
async def test_what_goes_wrong_with_it_is_told_by_its_cause(
    stage: Story, order: dict[str, Any], code: Code, words: str
) -> None:
    silent, node = "silent" in order, stage.hosted._node
    if silent:
        node.settings = replace(node.settings, limits=replace(LIMITS, spawn_s=0.5))
    stage.orders.give(1, **order)
    stage.hosted.received(HOST, prepare())
    if not silent:
        await stage.hears(Prepared)
        stage.hosted.received(HOST, start())
    await stage.hears(RankTrouble)
    await sees(lambda: any(words in trouble.detail for trouble in stage.heard(RankTrouble)))
    found = next(trouble for trouble in stage.heard(RankTrouble) if words in trouble.detail)
    assert found.code == code
    assert stage.heard(RankStarted) == []


@scene()
async def test_a_host_has_so_many_ranks_here_and_no_more(stage: Story) -> None:
    """Each is a process, and the groups may be invented."""
    for at in range(3 * MAX_OF_HOST):
        stage.hosted.received(HOST, prepare(5 + at, group=f"g{at}#0"))
    assert len(stage.hosted.ranks) == MAX_OF_HOST
    trouble = await stage.hears(RankTrouble)
    assert (trouble.epoch, trouble.code) == (5 + MAX_OF_HOST, Code.OVERLOADED)
    stage.hosted.lost(HOST)
    await sees(lambda: stage.pids() == [])
