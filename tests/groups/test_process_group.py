"""An epoch whose rank 1 is on another Mac: rank 0 is a process, the other agent plays what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxtp.config import Settings
from mlxtp.diagnostics import failure_store
from mlxtp.errors import TERMINATED_STATUS, Code, FailureReport, GroupError, LinkError, MlxtpError, ModelError
from mlxtp.groups import process_group
from mlxtp.groups import ranks as rank_module
from mlxtp.groups.boot_record import HERE
from mlxtp.groups.health import RankHealth, SideChannelHub
from mlxtp.groups.process_group import MAX_REPORTS, EpochGroup, ProcessGroup, canary_s
from mlxtp.groups.ranks import RankWord, RemoteRank, Watcher
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
from mlxtp.wire.messages import CountedShare, Gathered, Generate, Pong, SideChannel
from mlxtp.wire.rank_stats import RankStats

from ..live_cluster import LIMITS, WAIT_S, rank_processes
from ..played import scenes
from .fake_rank import Orders
from .scenes import run, sees, within

pytestmark = pytest.mark.slow

EPOCH = 7
PREPARED, STARTED = Prepared(EPOCH, "127.0.0.1:4711", "/there"), RankStarted(EPOCH, True)
PONG = RankPong(EPOCH, 1, Pong("idle", 0.0, 0, 0, "", RankStats()))
SIDE = RankSide(EPOCH, 1, SideChannel(1, b"1"))
NEVER_S = 10 * WAIT_S
"""A limit of silence that no test reaches: what ends an epoch then is something else."""


def trouble(code: Code, detail: str = "it said so", outside: bool = False) -> RankTrouble:
    return RankTrouble(EPOCH, 1, code, detail, outside)


class Peer:
    """The other agent. What it answers to each order is in `answers`; an error is the end of its link."""

    def __init__(self, rank: int = 1) -> None:
        self.rank = rank
        self.told: list[Message] = []
        self.answers: dict[type[Message], list[RankWord | MlxtpError]] = {
            Prepare: [PREPARED],
            StartRank: [STARTED],
            EndEpoch: [EpochEnded(EPOCH)],
        }
        self.seat: RemoteRank

    def sit(self, watcher: Watcher) -> RemoteRank:
        self.seat = RemoteRank(
            self._hear, f"mini-{self.rank}", Prepare(EPOCH, self.rank, "127.0.0.1", "tiny"), watcher
        )
        return self.seat

    def _hear(self, message: Message) -> None:
        self.told.append(message)
        for answer in self.answers.get(type(message), []):
            if isinstance(answer, LinkError):
                raise answer
            self.say(answer)

    def say(self, *words: RankWord | MlxtpError) -> None:
        """Over the network: not before this turn of the loop is over."""
        for word in words:
            if isinstance(word, MlxtpError):
                asyncio.get_running_loop().call_soon(self.seat.lost, word.detail)
            else:
                asyncio.get_running_loop().call_soon(self.seat.received, word)

    def heard(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]


LOST = GroupError("its cable was pulled")
COUNTED = (CountedShare(1 << 20, 64), CountedShare(1 << 21, 64))


class Story:
    def __init__(self, tmp_path: Path, peers: int, **group: Any) -> None:
        self.orders = Orders(tmp_path / "orders")
        self.home = tmp_path / "home"
        self.peers = [Peer(rank) for rank in range(1, peers + 1)]
        self.peer = next(iter(self.peers), Peer())
        self.stages: list[str] = []
        world = peers + 1
        own = {name: group.pop(name) for name in ("silence_s", "proof_s") if name in group}
        limits = replace(LIMITS, shutdown_s=2.0, **own)
        large = group.pop("large", False)
        settings = Settings(self.home, "", 0, 1, "tiny", name="studio", limits=limits, large_buffers=large)
        self.ranks = ProcessGroup(
            settings,
            EPOCH,
            lambda _: None,
            self.stages.append,
            worker=self.orders.worker,
            group=EpochGroup(
                1,
                world,
                group.pop("backend", "ring"),
                endpoints=lambda watcher: tuple(peer.sit(watcher) for peer in self.peers),
                decode_hosts=("127.0.0.1",) * world,
                **group,
            ),
        )

    async def serve(self) -> None:
        await self.ranks.start()
        self.beat()
        await self.ranks.load("/here", (), "", COUNTED)

    def beat(self) -> None:
        """Ranks elsewhere are alive: their agents say so."""
        for peer in self.peers:
            self.ranks.watch.received_pong(peer.rank, PONG.pong)
        asyncio.get_running_loop().call_later(0.2, self.beat)

    async def fails(self) -> MlxtpError:
        """Return the reason of its end, on its way up or later."""
        async with asyncio.timeout(WAIT_S):
            try:
                await self.serve()
            except MlxtpError as error:
                return error
            return await asyncio.shield(self.ranks.failed)


def play(tmp_path: Path, story: Callable[[Story], Awaitable[None]], peers: int = 1, **group: Any) -> None:
    async def scene() -> None:
        stage = Story(tmp_path, peers, **group)
        try:
            await within(story(stage))
        finally:
            async with asyncio.timeout(WAIT_S):
                await stage.ranks.kill()
        assert rank_processes(stage.home) == []
        assert list(stage.home.glob("run/*")) == []
        await asyncio.sleep(0)  # who was cancelled ends in this turn
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scene())


scene = scenes(play, "tmp_path")


@scene(pins=("a", "b"))
async def test_all_ranks_are_told_the_same_group_and_each_its_own_folder(
    stage: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HERE, "gpu_bytes", 0)
    stage.orders.give(0, gpu_bytes=464 << 30)
    await stage.serve()
    assert HERE.gpu_bytes == 464 << 30
    assert stage.stages == ["spawned", "linked", "formed", "proven"]
    [mine], [order] = stage.orders.notes("bootstrap"), stage.peer.heard(StartRank)
    theirs = order.bootstrap
    assert (mine["rank"], theirs.rank, theirs.world_size) == (0, 1, 2)
    assert mine["epoch_key"] == theirs.epoch_key.hex()
    assert mine["hosts"] == list(theirs.hosts)
    assert (theirs.hosts[0].rpartition(":")[0], theirs.hosts[1]) == ("127.0.0.1", PREPARED.ring)
    assert theirs.decode_address.rpartition(":")[0] == "127.0.0.1"
    assert mine["pins"] == list(theirs.pins) == ["a", "b"]
    assert mine["agreement"] == "auto"
    assert (mine["disk_folder"], mine["disk_bytes"] > 0) == (str(stage.home / "kv-cache"), True)
    assert (theirs.disk_folder, theirs.disk_bytes) == ("", 0), "each Mac decides about its own disk"
    [pid] = rank_processes(stage.home)
    assert "--keep-warm" in psutil.Process(pid).cmdline()
    [load] = stage.orders.notes("load")
    assert load["paths"] == ["/here", "/there"]
    assert load["counted"] == [asdict(each) for each in COUNTED]
    await stage.ranks.stop()
    assert [end.in_order for end in stage.peer.heard(EndEpoch)] == [True]
    assert stage.orders.notes("shut down")
    assert not (stage.home / failure_store.FOLDER).exists(), "an end in order is no failure"


@pytest.mark.parametrize(
    ("machines", "large", "agreement"),
    [(("M", "M"), False, "auto"), (("M", "N"), True, "broadcast-draws")],
    ids=["like", "unlike"],
)
@scene("machines", "large")
async def test_ranks_have_like_command_buffers_and_rank_0_draws_where_machines_are_unlike(
    stage: Story, large: bool, agreement: str
) -> None:
    await stage.serve()
    [mine], [order] = stage.orders.notes("bootstrap"), stage.peer.heard(StartRank)
    assert mine["large_buffers"] is order.bootstrap.large_buffers is large
    assert mine["agreement"] == order.bootstrap.agreement == agreement


@scene()
async def test_no_other_program_gets_the_port_of_a_ring_before_mlx_binds_it(stage: Story) -> None:
    await stage.serve()
    host, _, port = stage.orders.notes("bootstrap")[-1]["hosts"][0].partition(":")
    address = host, int(port)
    with socket.socket() as other, pytest.raises(OSError, match="already in use"):
        other.bind(address)
    with socket.socket() as ring:  # as MLX makes it
        ring.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ring.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        ring.bind(address)
        ring.listen(0)
    await stage.ranks.kill()
    with socket.socket() as other:
        other.bind(address)


@pytest.mark.parametrize(
    ("at", "words", "code"),
    [
        *((at, [LOST], Code.RANK_LOST) for at in (Prepare, StartRank, None)),
        *((at, [LinkError("its cable was pulled")], Code.LINK_LOST) for at in (Prepare, StartRank)),
        (Prepare, [PREPARED, LOST], Code.RANK_LOST),
        (StartRank, [STARTED, LOST], Code.RANK_LOST),
    ],
)
@scene(silence_s=NEVER_S)
async def test_a_control_link_that_ends_on_the_way_up_or_later_ends_the_epoch(
    stage: Story, at: type[Message] | None, words: list[Any], code: Code
) -> None:
    if at is not None:
        stage.peer.answers[at] = words
        error = await stage.fails()
        assert "its cable was pulled" in error.detail
    else:
        await stage.serve()
        stage.peer.say(*words)
        error = await asyncio.shield(stage.ranks.failed)
        assert error.detail == "its cable was pulled"
        await stage.ranks.kill()  # no one waits for a process that is gone
        assert stage.peer.heard(EndEpoch) == []
    assert error.code is code


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        ([trouble(Code.NOT_READY)], GroupError, Code.NOT_READY),
        ([trouble(Code.MODEL_NOT_FOUND)], ModelError, Code.MODEL_NOT_FOUND),
        ([trouble(Code.OUT_OF_MEMORY)], GroupError, Code.OUT_OF_MEMORY),
        ([STARTED], GroupError, Code.OUT_OF_ORDER),
        ([PREPARED, PREPARED], GroupError, Code.OUT_OF_ORDER),
    ],
)
@scene()
async def test_what_the_other_agent_says_instead_ends_the_epoch_in_its_words(
    stage: Story, words: list[Any], kind: type[MlxtpError], code: Code
) -> None:
    stage.peer.answers[Prepare] = words
    error = await stage.fails()
    assert isinstance(error, kind)
    assert error.code is code
    assert error.detail.startswith("mini-1")


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "CAUSE_GRACE_S", NEVER_S)


@pytest.mark.usefixtures("_patient")
@scene(peers=0, backend="none")
async def test_the_end_of_an_only_rank_waits_for_no_other_report(stage: Story) -> None:
    """Its requests go on at another replica; each millisecond here is one of their gap."""
    await stage.ranks.start()
    os.kill(stage.ranks.processes[0].pid, signal.SIGKILL)
    assert (await asyncio.shield(stage.ranks.failed)).code is Code.RANK_LOST


@scene()
async def test_an_agent_that_never_stops_talking_costs_no_memory(stage: Story) -> None:
    await stage.serve()
    for _ in range(2):  # also once the epoch has failed
        for _ in range(1000):
            stage.peer.seat.received(STARTED)
            stage.peer.seat.received(trouble(Code.RANK_LOST))
        assert len(stage.ranks.watch.reports) <= MAX_REPORTS
        error = await asyncio.shield(stage.ranks.failed)
    assert error.code is Code.OUT_OF_ORDER


@scene(peers=3)
async def test_one_refusal_among_many_leaves_no_request_waiting(stage: Story) -> None:
    """Of three other Macs one refuses, one never answers; all who were asked are told that it is over."""
    stage.peers[1].answers[Prepare] = [trouble(Code.NOT_READY)]
    stage.peers[2].answers[Prepare] = []
    assert (await stage.fails()).code is Code.NOT_READY
    await stage.ranks.kill()
    assert [len(peer.heard(EndEpoch)) for peer in stage.peers] == [1, 1, 1]


@scene()
async def test_an_agent_that_never_says_that_its_rank_is_gone(
    stage: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_module, "END_GRACE_S", 0.2)
    await stage.serve()
    stage.peer.answers[EndEpoch] = []
    await stage.ranks.stop()
    assert [end.in_order for end in stage.peer.heard(EndEpoch)] == [True, False]


@pytest.mark.parametrize("at", ["Bootstrap", "Init", "SanityCheck", "LoadShard", "Generate"])
@scene(silence_s=NEVER_S)
async def test_the_death_of_rank_0_at_any_time_is_the_cause_and_ends_the_other(stage: Story, at: str) -> None:
    stage.orders.give(0, die_on=at, code="out_of_memory")
    with contextlib.suppress(MlxtpError):
        await stage.serve()
        stage.ranks.send(Generate(1, (1,), 1))
    assert (await asyncio.shield(stage.ranks.failed)).detail == "studio: rank 0 ended with out_of_memory"
    await stage.ranks.kill()
    assert [end.in_order for end in stage.peer.heard(EndEpoch)] == [False]
    told, [mine] = kept(stage.home)
    assert told["cause"] == {"code": "out_of_memory", "detail": "studio: rank 0 ended with out_of_memory"}
    assert told["hosts"] == ["studio", "mini-1"]
    assert told["reports"][-1]["rank"] == 0
    assert (mine["rank"], mine["exit_code"], mine["by_agent"]) == (0, "out_of_memory", False)


@scene(proof_s=0.3)
async def test_a_proof_that_hangs_has_a_limit_of_its_own(stage: Story) -> None:
    """With a cable out JACCL forms, and its first sum waits for ever."""
    stage.orders.give(0, mute_on="SanityCheck")
    error = await stage.fails()
    assert error.code is Code.LINK_TIMEOUT
    assert error.detail == "the ranks did not reply to SanityCheck within 0.3 s"


SLOW_S = 0.6
WEDGED_S = 60.0


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent waits less for a sign than a slow rank takes to end."""
    monkeypatch.setattr(rank_module, "ANSWER_S", SLOW_S / 3)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    ("order", "patience_s", "deaf"),
    [
        ({"frees_s": SLOW_S}, WEDGED_S, False),
        ({"frees_s": WEDGED_S, "mute": True}, WEDGED_S, True),
        ({"frees_s": -1}, SLOW_S, True),
    ],
    ids=["gives a sign", "wedged", "gives signs, and never ends"],
)
@scene()
async def test_a_rank_that_gives_a_sign_after_sigterm_has_time_to_give_memory_back(
    stage: Story, monkeypatch: pytest.MonkeyPatch, order: dict[str, Any], patience_s: float, deaf: bool
) -> None:
    if patience_s is SLOW_S:
        monkeypatch.setattr(rank_module, "FREE_S", 0.0)
        monkeypatch.setattr(rank_module, "patience_s", lambda _: patience_s)
    stage.orders.give(0, **order)
    await stage.serve()
    end = await stage.ranks.processes[0].kill()
    assert (end.deaf, end.status) == (deaf, -signal.SIGKILL if deaf else TERMINATED_STATUS)
    await stage.ranks.kill()


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("backend", ["jaccl", "ring"])
@scene()
async def test_memory_that_a_killed_rank_may_have_lost_is_named_in_the_error(
    stage: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    async def ended(_epoch: int, _held: int, *, stuck: bool) -> int:
        return 96 * 10**9 * stuck

    monkeypatch.setattr(HERE, "ended", ended)
    stage.orders.give(0, frees_s=WEDGED_S, mute=True)
    await stage.serve()
    end = stage.ranks.processes[0]._end
    end.jaccl = backend == "jaccl"
    await sees(lambda: end.pong is not None)
    end.pong = replace(PONG.pong, phase="decode", in_flight=1)
    cause = await stage.ranks.kill(GroupError("rank 0 is stuck", Code.RANK_STALLED))
    lost = "; 96 GB may be stranded until this Mac restarts" * (backend == "jaccl")
    assert cause.detail == f"rank 0 is stuck{lost}"
    assert kept(tmp_path / "home")[0]["cause"]["detail"] == cause.detail


@pytest.mark.usefixtures("_impatient")
@scene()
async def test_an_end_that_all_its_tasks_were_cancelled_in_is_repeated_without_patience_for_a_wedged_rank(
    stage: Story,
) -> None:
    """As `asyncio.run` does once its main task is over."""
    stage.orders.give(0, frees_s=WEDGED_S, mute=True)
    await stage.serve()
    rank = stage.ranks.processes[0]
    cut = asyncio.ensure_future(rank.kill())
    await asyncio.sleep(0)
    for task in (cut, *rank._background.tasks):
        task.cancel()
    await asyncio.wait({cut, *rank._background.tasks})
    end = await rank.kill()
    assert (end.deaf, end.status) == (True, -signal.SIGKILL)
    await stage.ranks.kill()


@pytest.mark.usefixtures("_impatient")
@scene()
async def test_an_end_in_order_is_waited_for_until_memory_is_given_back(stage: Story) -> None:
    stage.orders.give(0, frees_s=SLOW_S)
    await stage.serve()
    await stage.ranks.stop()
    assert stage.ranks.processes[0]._end.status == 0
    assert not (stage.home / failure_store.FOLDER).exists()


@pytest.mark.parametrize(("owed", "before"), [("Init", "linked"), ("LoadShard", "proven")])
@scene()
async def test_an_end_in_order_reads_the_reply_that_a_rank_still_owes(
    stage: Story, owed: str, before: str
) -> None:
    stage.orders.give(0, late_on=owed)
    serving = asyncio.ensure_future(stage.serve())
    await sees(lambda: stage.stages[-1:] == [before])
    serving.cancel()
    await asyncio.wait({serving})
    await stage.ranks.stop()
    assert stage.orders.notes("shut down")
    assert stage.ranks.processes[0]._end.status == 0
    assert stage.peer.heard(EndEpoch) == [EndEpoch(EPOCH, True)]


@scene()
async def test_memory_is_compared_once_when_an_epoch_is_over(
    stage: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []

    async def ended(epoch: int, held: int, *, stuck: bool) -> int:
        assert not stuck
        compared.append((epoch, held))
        return 0

    monkeypatch.setattr(HERE, "ended", ended)
    await stage.serve()
    process = stage.ranks.processes[0]
    await sees(lambda: process._end.pong is not None)
    process._end.pong = replace(PONG.pong, stats=RankStats(memory_bytes=7))
    stage.ranks.give_up(LOST)
    await stage.ranks.kill()
    await stage.ranks.kill()
    assert compared == [(EPOCH, 7)]


def kept(home: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the files of the one failure: of the epoch, and of each rank of this machine."""
    [folder] = (home / failure_store.FOLDER).iterdir()
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    return json.loads((folder / "epoch.json").read_text()), ranks


@scene()
async def test_a_healthy_rank_that_is_ended_because_of_another_leaves_its_file(stage: Story) -> None:
    await stage.serve()
    stage.peer.say(trouble(Code.FORWARD_FAILED, "no such luck"))
    assert (await asyncio.shield(stage.ranks.failed)).code is Code.FORWARD_FAILED
    await stage.ranks.kill()
    told, [mine] = kept(stage.home)
    assert told["cause"]["code"] == "forward_failed"
    assert told["epoch_id"] == mine["epoch_id"] != ""
    assert (mine["signal"], mine["by_agent"], mine["deaf"]) == (15, True, False)
    await stage.ranks.kill()
    assert len(list((stage.home / failure_store.FOLDER).iterdir())) == 1, "it failed once"


NO_MEMORY = "rank 1: tiny: reading layers 1 to 2 of 4 (9.30 GB) failed"


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"code": "model_invalid"}, "rank 0 was told to fail"),
        ({"code": "out_of_memory", "words": NO_MEMORY}, f"mini-1: {NO_MEMORY}"),
    ],
)
@scene()
async def test_a_command_that_is_refused_is_the_cause_and_names_a_mac_elsewhere(
    stage: Story, order: dict[str, Any], words: str
) -> None:
    """Every rank is well: only the model was not."""
    stage.orders.give(0, error_on="LoadShard", **order)
    error = await stage.fails()
    assert (error.code, error.detail.endswith(words)) == (order["code"], True)
    assert not stage.ranks.failed.done()
    await stage.ranks.kill(error)
    told, _ = kept(stage.home)
    assert told["cause"] == {"code": order["code"], "detail": error.detail}


WISHED = GroupError("another is wanted now", Code.REPLANNED)


@pytest.mark.parametrize("end", ["stop", "kill"])
@scene()
async def test_of_an_end_in_order_nothing_is_kept(
    stage: Story, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Also while ranks wait for each other in MLX and do not hear SIGTERM."""
    stage.orders.give(0, deaf=True)
    starting = asyncio.ensure_future(stage.ranks.start())
    await sees(lambda: bool(stage.orders.notes("bootstrap")))
    stage.ranks.give_up(WISHED)
    with pytest.raises(GroupError, match="wanted now"):
        await starting
    never_hearing(stage, monkeypatch)
    await getattr(stage.ranks, end)()
    assert not (stage.home / failure_store.FOLDER).exists()


@scene()
async def test_a_rank_that_serves_and_does_not_end_when_it_should_is_a_failure(
    stage: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.serve()
    stage.ranks.give_up(WISHED)
    await asyncio.shield(stage.ranks.failed)
    never_hearing(stage, monkeypatch)
    await stage.ranks.stop()
    told, _ = kept(stage.home)
    assert told["cause"]["code"] == "rank_stalled"


def never_hearing(stage: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the agent had to end rank 0 by SIGKILL."""
    process = stage.ranks.processes[0]
    kill = process.kill

    async def killed() -> failure_store.RankEnd:
        return replace(await kill(), deaf=True)

    monkeypatch.setattr(process, "kill", killed)


@scene()
async def test_silence_of_a_rank_elsewhere_is_noticed_like_one_here(stage: Story) -> None:
    stage.beat = lambda: None  # type: ignore[method-assign]
    error = await stage.fails()
    assert error.code is Code.RANK_LOST
    assert error.detail.startswith("mini-1: rank 1 has been silent for")


@scene()
async def test_a_bug_in_what_watches_an_epoch_ends_it(stage: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    def err(_watch: RankHealth, _now: float) -> None:
        raise RuntimeError("a bug")

    await stage.serve()
    monkeypatch.setattr(RankHealth, "tick", err)
    error = await asyncio.shield(stage.ranks.failed)
    assert (error.code, error.detail) == (Code.INTERNAL, "RuntimeError: a bug")


@scene(fabric="192.0.2.1")
async def test_an_address_of_a_cable_that_was_pulled(stage: Story) -> None:
    error = await stage.fails()
    assert error.code is Code.FORM_FAILED
    assert "192.0.2.1" in error.detail


JACCL_ENDED = "rank 1: jaccl did not form: [jaccl] Couldn't create completion queue"


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("code", [Code.FORM_FAILED, Code.FORWARD_FAILED])
@scene()
async def test_the_mac_of_a_rank_is_named_by_any_first_report_of_its_error(
    stage: Story, first: int, code: Code
) -> None:
    """Its own agent, or rank 0, whose link to it may be faster. JACCL is explained while it forms, once."""
    await stage.serve()
    here = FailureReport(0, GroupError(JACCL_ENDED, code))
    there = FailureReport(1, GroupError(f"mini-1: {JACCL_ENDED}", code))
    for report in [(here, there), (there, here)][first]:
        stage.ranks.watch.report(report)
    error = await asyncio.shield(stage.ranks.failed)
    cause = ". Cause: all of an RDMA device's queue pairs" if code is Code.FORM_FAILED else ""
    assert error.detail.startswith(f"mini-1: {JACCL_ENDED}{cause}")
    assert ("Cause: " in error.detail) == bool(cause)
    assert stage.ranks._explained(error) is error, "as a failed load does once more"


def test_an_idle_group_proves_itself_as_often_as_is_set_and_over_jaccl_before_a_minute() -> None:
    assert canary_s(60.0, "ring") == 60.0
    assert canary_s(0.3, "jaccl") == 0.3


@scene(backend="jaccl")
async def test_a_crash_after_idling_over_jaccl_blames_no_cable(stage: Story) -> None:
    stage.orders.give(0, jaccl=True)
    await stage.serve()
    assert stage.orders.notes("bootstrap")[0]["canary_s"] == canary_s(60.0, "jaccl") == 20.0
    stage.peer.say(trouble(Code.RANK_LOST, "rank 1 was ended by signal 11 in phase idle", outside=True))
    error = await asyncio.shield(stage.ranks.failed)
    assert "a known fault of MLX" in error.detail


@scene(backend="jaccl")
async def test_the_rounds_of_the_side_channel_pass_through_the_agents(stage: Story) -> None:
    stage.orders.give(0, jaccl=True, rounds=True)
    stage.peer.answers[StartRank] = [STARTED, SIDE]
    await stage.serve()
    [gathered] = stage.peer.heard(RankGathered)
    assert (gathered.epoch, gathered.rank) == (EPOCH, 1)
    assert gathered.gathered == Gathered(1, b"01")
    [note] = stage.orders.notes("gathered")
    assert (note["data"], note["error"]) == ("01", "")


@pytest.mark.parametrize("rounds", [0, 2])
@scene()
async def test_a_rank_that_stays_away_from_a_round_is_named_to_those_who_came(
    stage: Story, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """However long the rounds before it took together."""
    monkeypatch.setattr(SideChannelHub, "ROUND_S", 0.4)
    watch = stage.ranks.watch
    await stage.ranks.start()
    stage.ranks.watch._hub = SideChannelHub(2)  # as if they still formed
    for number in range(1, rounds + 1):
        for rank in (0, 1):
            watch.side(rank, SideChannel(number, b"1"))
            await asyncio.sleep(0.15)
    watch.side(1, SideChannel(rounds + 1, b"1"))
    await sees(lambda: any(each.gathered.error for each in stage.peer.heard(RankGathered)))
    *before, last = stage.peer.heard(RankGathered)
    assert not any(each.gathered.error for each in before)
    assert last.gathered.error.startswith(f"rank 0 did not come to round {rounds + 1} ")


@pytest.mark.parametrize(
    ("said", "at", "cause", "told"),
    [
        (
            "rank 1: jaccl did not form: [jaccl] Changing queue pair to RTR failed with errno 22",
            "mini-1",
            "an RDMA port has no IPv4 address",
            "mini-1: ",
        ),
        (
            "rank 0 did not come to round 1 of JACCL's side channel within 10 s",
            "studio",
            "most likely the RDMA driver of that Mac",
            "",
        ),
    ],
    ids=["fails", "hangs"],
)
@scene(backend="jaccl")
async def test_a_rank_that_fails_while_they_form_is_named_with_its_mac_and_frees_those_that_wait_for_it(
    stage: Story, said: str, at: str, cause: str, told: str
) -> None:
    """The Mac of the rank that hangs, and not the reporter's."""
    stage.orders.give(0, jaccl=True, rounds=True)
    stage.peer.answers[StartRank] = [STARTED]
    waiting = asyncio.ensure_future(stage.fails())
    await sees(lambda: "linked" in stage.stages)
    stage.peer.say(trouble(Code.FORM_FAILED, said))
    error = await waiting
    assert error.code is Code.FORM_FAILED
    assert error.detail.startswith(f"{at}: {said}. Cause: {cause}")
    await sees(lambda: stage.orders.notes("gathered"))
    assert stage.orders.notes("gathered")[0]["error"] == f"{told}{said}"


@scene(backend="jaccl")
async def test_once_formed_no_rank_is_told_of_rounds(stage: Story) -> None:
    """It would break the order of the pipe, and hide what really happened."""
    stage.orders.give(0, jaccl=True, rounds=True)
    stage.peer.answers[StartRank] = [STARTED, SIDE]
    stage.ranks._on_stage = lambda stage_: stage.peer.say(LOST, SIDE) if stage_ == "formed" else None
    error = await stage.fails()
    assert error.detail == "its cable was pulled"
    assert len(stage.orders.notes("gathered")) == 1


@pytest.mark.parametrize(
    ("lacking", "who"), [([0], "studio"), ([1], "mini-1"), ([0, 1], "studio and mini-1")]
)
@scene(backend="jaccl")
async def test_macs_whose_mlx_has_no_jaccl_are_named(stage: Story, lacking: list[int], who: str) -> None:
    stage.orders.give(0, jaccl=0 not in lacking)
    stage.peer.answers[StartRank] = [RankStarted(EPOCH, 1 not in lacking)]
    error = await stage.fails()
    assert (type(error), error.code) == (GroupError, Code.FORM_FAILED)
    assert error.detail.startswith(f"MLX on {who} has no JACCL; it needs macOS")
    assert stage.stages == ["spawned"]


@scene()
async def test_a_disk_too_full_for_the_epochs_folder_is_said(
    stage: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def full(path: Path, *args: Any, **how: Any) -> None:
        if path.name == f"epoch-{EPOCH}":
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(path, *args, **how)

    monkeypatch.setattr(Path, "mkdir", full)
    error = await stage.fails()
    assert error.code is Code.FORM_FAILED
    folder = stage.home / "run" / f"epoch-{EPOCH}"
    assert error.detail == f"the disk is full, nothing can be written in {folder}"
    await stage.ranks.kill(error)
    assert kept(stage.home)[0]["cause"]["detail"] == error.detail
