"""Knowledge of fabrics: measuring, reporting, keeping, and the group that is planned then."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.admin.handlers import Admin as Administration
from mlxtp.admin.snapshot import gather
from mlxtp.config import embedded_model_path
from mlxtp.errors import UserError
from mlxtp.groups import fabric as fabric_module
from mlxtp.groups.fabric import FILE, FabricBench, measure, row_bytes
from mlxtp.groups.process_group import EpochGroup
from mlxtp.placement.cost_model import JACCL_MESH, RING_ETHERNET, RING_THUNDERBOLT
from mlxtp.placement.measurements import to_text
from mlxtp.verbs import BenchFabric, PresentMachines
from mlxtp.wire.cluster_messages import FabricAnswer, FabricResult, FabricWanted, Serving
from mlxtp.wire.messages import CollectivesTimed

from ..wire.members import Member
from .one_node import CLOCK, GROUP, A, B, FakeLink, Node, at_node, awaited, play
from .test_controller import jaccl

RESULT = FabricResult(
    (A, B), "ring", RING_ETHERNET, False, True, 100, 0.25, (1024, 4096), (0.5, 1.0), (0.5, 2.0)
)


PAIR = EpochGroup(1, 2, "ring", kind=RING_ETHERNET, nodes=(A, B))


def serving(*nodes: str, state: str = "ready") -> Serving:
    told = (state, "", "ring", RING_ETHERNET, nodes, 0, "tiny", 1, 4096, 512, (), 0, ())
    return Serving(7, *told, GROUP, "tiny")


class Clock:
    """Ranks of which a collective takes `fixed_s` and `per_byte_s` for each byte."""

    def __init__(self, fixed_s: float, per_byte_s: float) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self._times = fixed_s, per_byte_s

    async def __call__(self, kind: str, size: int, rounds: int) -> CollectivesTimed:
        await asyncio.sleep(0)
        self.asked.append((kind, size, rounds))
        fixed_s, per_byte_s = self._times
        return CollectivesTimed(fixed_s + size * per_byte_s, True)


def test_each_size_is_tried_once_and_then_as_often_as_there_is_time() -> None:
    clock = Clock(1e-3, 1e-8)
    times = asyncio.run(measure(PAIR, clock, 640, fast_fences=True))
    assert (times.nodes, times.backend, times.kind, times.fast_fences) == (
        (A, B),
        "ring",
        RING_ETHERNET,
        True,
    )
    assert times.sizes[:3] == (640, 1024, 4096)
    assert times.sizes[-1] == 1 << 24
    assert times.metal
    assert times.collective_s == pytest.approx(1e-3, rel=0.02)
    assert times.sums_s == times.gathers_s
    assert clock.asked[:4] == [("chain", 1024, 1), ("chain", 1024, 100), ("sum", 640, 1), ("sum", 640, 100)]
    assert clock.asked[-1] == ("gather", 1 << 24, 1)
    spent = sum(rounds * (1e-3 + size * 1e-8) for _, size, rounds in clock.asked)
    assert spent < 5


def test_a_slow_network_is_not_kept_busy_for_minutes() -> None:
    clock = Clock(2e-3, 1e-6)  # 1 MB/s
    times = asyncio.run(measure(PAIR, clock, 0, fast_fences=False))
    assert times.sizes == (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
    assert len(times.sums_s) == len(times.gathers_s) == 6
    dead = Clock(10.0, 0)
    assert asyncio.run(measure(PAIR, dead, 0, fast_fences=False)).sizes == (1024,)
    assert len(dead.asked) == 4


def test_the_row_of_a_model(tmp_path: Path) -> None:
    assert row_bytes(embedded_model_path()) == 256
    assert row_bytes(tmp_path) == 0
    for text in ("", "[]", "{}", '{"hidden_size": "many"}'):
        (tmp_path / "config.json").write_text(text)
        assert row_bytes(tmp_path) == 0


@at_node()
async def test_the_agent_of_rank_0_is_asked_and_all_keep_its_reply(node: Node, tmp_path: Path) -> None:
    fabric = node.parts.fabric_bench
    a, b = node.meet(A), node.meet(B)
    node.hear(a, serving(A, B, state="loading"))
    with pytest.raises(UserError, match="no group serves right now"):
        await fabric.bench()
    node.hear(b, serving(B, A))
    asking = asyncio.ensure_future(fabric.bench())
    await asyncio.sleep(0)
    [wanted] = b.heard(FabricWanted)
    assert a.heard(FabricWanted) == []
    node.hear(a, replace(RESULT, at=7), FabricAnswer(wanted.nonce, ""))  # not who was asked
    node.hear(b, FabricAnswer(bytes(16), ""))  # not what was asked
    await asyncio.sleep(0)
    assert not asking.done()
    answer = FabricAnswer(wanted.nonce, "", (RESULT,))
    node.hear(b, RESULT, answer, answer)
    assert await asking == RESULT
    assert node.parts.results.results == (RESULT,)
    kept = tmp_path / FILE
    await node.parts.results.flush()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert json.loads(kept.read_text())["results"][0]["collective_s"] == 0.25


@at_node()
async def test_reports_are_written_off_the_loop_at_most_once_a_second_and_the_last_at_the_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def write(path: Path, data: bytes) -> None:
        assert threading.current_thread() is not threading.main_thread()
        written.append(data.decode())

    monkeypatch.setattr(fabric_module, "write_private", write)
    a, rounds, now = node.meet(A), node.parts.node.rounds, CLOCK.now
    for at in range(1, 100):
        node.hear(a, replace(RESULT, at=at))
        rounds.due(now + at / 100)
        await asyncio.sleep(0.002)
    assert len(written) <= 2
    await node.parts.fabric_bench.close()
    assert '"at": 99' in written[-1]


@at_node()
async def test_what_keeps_it_from_measuring_is_passed_on(node: Node) -> None:
    fabric, a = node.parts.fabric_bench, node.meet(A)
    node.hear(a, serving(A, B))
    for answer, words in ((FabricAnswer, "3 requests are open"), (None, "mac-a went while it measured")):
        asking = asyncio.ensure_future(fabric.bench())
        await asyncio.sleep(0)
        if answer is None:
            a.close()
        else:
            node.hear(a, answer(a.heard(FabricWanted)[-1].nonce, words))
        with pytest.raises(UserError, match=words):
            await asking
    assert node.parts.node.links._open == {}
    assert node.parts.results.results == ()


@at_node()
async def test_an_agent_without_rank_0_says_so_and_asks_no_other(node: Node) -> None:
    a, b = node.meet(A), node.meet(B)
    node.hear(b, serving(B, A))
    node.hear(a, FabricWanted(b"n" * 16))
    await asyncio.gather(*node.parts.fabric_bench._background.tasks)
    [answer] = a.heard(FabricAnswer)
    assert answer == FabricAnswer(b"n" * 16, "rank 0 is no longer on studio; try again")
    assert b.heard(FabricWanted) == []


@at_node()
async def test_who_asked_gets_the_result(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(_bench: FabricBench, _deployment: str) -> FabricResult:
        return RESULT

    monkeypatch.setattr(FabricBench, "_bench_here", measured)
    a, fabric = node.meet(A), node.parts.fabric_bench
    fabric._shown = cast(Any, lambda _deployment: SimpleNamespace(status=SimpleNamespace(in_epoch=True)))
    node.hear(a, FabricWanted(b"n" * 16))
    await asyncio.gather(*fabric._background.tasks)
    assert a.heard(FabricAnswer) == [FabricAnswer(b"n" * 16, "", (RESULT,))]


@at_node()
async def test_the_group_of_the_named_model_is_measured(node: Node, member: Member) -> None:
    admin, a, b = Administration(node.parts, member.store), node.meet(A), node.meet(B)
    node.parts.node.desired.serve("tiny")
    node.parts.node.desired.serve("org/other")
    node.hear(a, serving(A, B))
    node.hear(b, replace(serving(B, A), group="org/other#0", deployment="org/other"))
    asking = asyncio.ensure_future(admin.bench_fabric(BenchFabric("org/other@main")))
    await asyncio.sleep(0)
    [wanted] = b.heard(FabricWanted)
    assert (wanted.deployment, a.heard(FabricWanted)) == ("org/other", [])
    node.hear(b, FabricAnswer(wanted.nonce, "", (RESULT,)))
    assert (await asking)["nodes"] == RESULT.nodes
    node.hear(a, replace(wanted, nonce=b"m" * 16, deployment="org/third"))
    await asyncio.gather(*node.parts.fabric_bench._background.tasks)
    [answer] = a.heard(FabricAnswer)
    assert answer.problem.startswith("org/third is not deployed")
    with pytest.raises(UserError, match="org/third is not deployed"):
        await admin.bench_fabric(BenchFabric("org/third"))


def test_it_is_known_after_a_restart_and_told_to_newcomers(tmp_path: Path, member: Member) -> None:
    async def first(node: Node) -> None:
        a, b = node.meet(A), node.meet(B)
        assert a.heard(FabricResult) == []
        node.hear(a, RESULT, replace(RESULT, kind="another"))
        assert [each.kind for each in b.heard(FabricResult)] == [RING_ETHERNET, "another"]

    async def second(node: Node) -> None:
        assert [each.kind for each in node.parts.results.results] == [RING_ETHERNET, "another"]
        assert len(node.meet(B).heard(FabricResult)) == 2

    play(tmp_path, member, first)
    play(tmp_path, member, second)


@at_node()
async def test_what_makes_no_sense_is_not_kept(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a = node.meet(A)
    node.hear(a, replace(RESULT, sums_s=(0.5,)), replace(RESULT, nodes=(A, A)))
    assert node.parts.results.results == ()
    assert not (tmp_path / FILE).exists()
    assert caplog.text.count("is left aside: ") == 2


def _readable(path: Path) -> None:
    path.write_text(to_text((RESULT,)))
    path.chmod(0o644)


BROKEN: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda path: path.write_text("{"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "a bomb": lambda path: path.write_text("[" * 100_000),
    "another table": lambda path: path.write_text('{"format": 9}'),
    "a folder": lambda path: path.mkdir(),
    "for all to write": _readable,
    "zero": lambda path: path.write_text(to_text((RESULT,)).replace("0.25", "0.0")),
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=list(BROKEN))
def test_a_file_that_cannot_be_used_stops_no_agent(
    tmp_path: Path, member: Member, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(tmp_path / FILE)
    if (tmp_path / FILE).is_file() and spoil is not _readable:
        (tmp_path / FILE).chmod(0o600)

    async def story(node: Node) -> None:
        assert node.parts.results.results == ()
        assert f"{tmp_path / FILE} is left aside, so fabric speeds are assumed" in caplog.text
        node.hear(node.meet(A), RESULT)
        assert node.parts.results.results == (RESULT,)

    with caplog.at_level(logging.WARNING):
        play(tmp_path, member, story)


@jaccl()
async def test_what_was_measured_changes_the_next_group(node: Node, a: FakeLink, member: Member) -> None:
    before = node.group.scope.assignment
    assert before.kind == JACCL_MESH
    slow = replace(
        RESULT, nodes=(A, node.parts.node.node_id), backend="jaccl", kind=JACCL_MESH, collective_s=5e-3
    )
    node.hear(a, replace(slow, fast_fences=True))  # no agent runs with those
    node.hear(a, replace(slow, nodes=(A, B)))
    node.live(a)
    assert node.group.scope.assignment == before
    node.hear(a, slow)
    node.live(a)
    assert node.group.scope.assignment.kind == RING_THUNDERBOLT
    told = json.loads(json.dumps(Administration(node.parts, member.store).plans.plan(PresentMachines())))
    assert sorted(each["collective_s"] for each in told["fabric"]) == [5e-3, 5e-3, 5e-3]


@jaccl()
async def test_what_is_shown_as_measured_is_of_the_group_that_runs(node: Node, a: FakeLink) -> None:
    awaited(node.group)
    node.live(a)
    mine = node.group.scope.serving()
    assert len(mine.participants) == 2
    node.hear(a, replace(RESULT, nodes=mine.participants, backend="jaccl", kind=JACCL_MESH))
    node.hear(a, serving(A, B))
    status = node.group.supervisor.status
    status.epoch, status.group = 7, EpochGroup(0, 2, "ring", kind=RING_ETHERNET)
    assert gather(node.parts).measured is None  # that group was not measured
    node.hear(a, RESULT)
    measured = gather(node.parts).measured
    assert measured.collective_s == 0.25
