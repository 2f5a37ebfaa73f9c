"""One moment of an agent, alone and in a cluster: what is known is right, what is not is None."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from rich.console import Console

from mlxtp.admin.handlers import Admin, CacheHandlers
from mlxtp.admin.snapshot import Observer, links, pairs
from mlxtp.cli.status import picture
from mlxtp.cluster.cluster_state import PINNED
from mlxtp.errors import Code, GroupError, UserError
from mlxtp.groups.health import ServingState
from mlxtp.groups.overview import health
from mlxtp.groups.process_group import EpochGroup
from mlxtp.models.inspect import ModelSource
from mlxtp.placement.topology import MemberMachine, Topology
from mlxtp.verbs import ClearCaches, ListCaches, Status
from mlxtp.wire.cluster_messages import Interface, Machine, Serving

from ..cluster.deployed import only
from ..groups.one_node import GROUP, MACHINE, A, B, Node, alone, play
from ..groups.scenes import run, sees
from ..groups.test_lifecycle import Stage
from ..groups.test_lifecycle import play as play_epochs
from ..models.test_disk_cache import layout
from ..played import scenes

played = scenes(play, "tmp_path", "member")
ran = scenes(lambda story: run(story()), stages=0)


def moment(observer: Observer) -> dict[str, Any]:
    """As a client gets it; `mlxtp status --watch` can draw each."""
    found: dict[str, Any] = json.loads(json.dumps(observer.snapshot()))
    Console(file=io.StringIO()).print(picture(found, 0.0))
    return found


@ran()
async def test_an_agent_that_has_just_begun_knows_little_and_says_so(tmp_path: Path) -> None:
    parts = alone(tmp_path)
    found = moment(Observer(parts))
    assert (found["state"], found["ready"], found["epoch"]) == ("starting", False, 0)
    nothing = ("model", "model_bytes", "context", "group", "cluster", "coordinator")
    assert {name: found[name] for name in nothing} == dict.fromkeys(nothing)
    assert (found["ranks"], found["links"], found["history"]) == ([], [], [])
    assert found["tokens_per_second"] == {"value": None, "of": "group"}
    [node] = found["nodes"]
    assert (node["node_id"], node["name"], node["chip"]) == (found["self"], "studio", "a chip")
    assert not node["coordinator"]
    assert node["memory_bytes"] == 64 << 30
    await parts.close()


@pytest.mark.slow
def test_an_epoch_from_its_beginning_to_its_end(tmp_path: Path, source: ModelSource) -> None:
    async def story(stage: Stage) -> None:
        parts = replace(alone(tmp_path / "alone"), gateway=stage.gateway)
        parts.node.desired.on_change.remove(parts.models.resolve)
        parts.node.desired.serve("tiny", keep_s=PINNED)
        parts.groups.shown.supervisor = stage.supervisor
        stage.gateway._health = partial(health, parts.node, parts.groups, stage.gateway)
        here = parts.models.of("tiny")
        here.source, here.weight_bytes = source, 2_000_000
        parts.models.of = lambda _name: here  # type: ignore[method-assign]
        observer = Observer(parts)
        await stage.serves(41)
        await sees(lambda: moment(observer)["ranks"][0]["phase"] is not None)
        found = moment(observer)
        assert (found["state"], found["model"]) == ("ready", "tiny")
        assert found["model_bytes"] > 1_000_000
        assert found["context"] == 4096
        assert (found["group"]["world_size"], found["group"]["pairs"]) == (1, [])
        assert found["ranks"][0]["node"] == found["self"]
        [rank] = Admin(parts, cast(Any, None)).status(Status())["ranks"]
        assert "fake_rank" in " ".join(psutil.Process(rank["pid"]).cmdline())
        admin = Admin(parts, cast(Any, None))
        await caches_come_and_go(admin.caches, tmp_path / "alone")
        assert found["history"][0]["epoch"] == 41
        assert found["history"][0]["ready_s"] > 0
        assert "loaded" in [stage for stage, _ in found["history"][0]["stages"]]
        stage.supervisor.end_epoch(GroupError("rank 0 was taken", Code.RANK_LOST))
        await sees(lambda: stage.asked == 2)
        [ended] = moment(observer)["history"]
        assert (ended["code"], ended["reason"]) == ("rank_lost", "rank 0 was taken")
        assert ended["lasted_s"] >= ended["ready_s"]
        assert moment(observer)["ranks"][0]["memory_bytes"] is None
        await stage.serves(42)
        assert [each["epoch"] for each in moment(observer)["history"]] == [42, 41]

    play_epochs(tmp_path, source, story)


async def caches_come_and_go(caches: CacheHandlers, home: Path) -> None:
    kept = await caches.kept(ListCaches())
    assert [each["group"] for each in kept["groups"]] == ["tiny#0"]
    assert (kept["elsewhere"], kept["disk"]["models"]) == ([], [])
    with pytest.raises(UserError, match=r"^other is neither served nor on this Mac's disk$"):
        await caches.clear(ClearCaches("other"))
    with pytest.raises(UserError, match=r"^other is not served$"):
        await caches.clear(ClearCaches("other", "memory"))
    with pytest.raises(UserError, match="'tape' is not memory or disk"):
        await caches.clear(ClearCaches(where="tape"))
    both = ["/models/other", "/models/tiny"]
    for model in both:
        layout(home / "kv-cache", model.rpartition("/")[2], model)
    assert [each["model"] for each in (await caches.kept(ListCaches()))["disk"]["models"]] == both
    cleared = await caches.clear(ClearCaches("tiny", "memory"))
    assert ([each["kept_bytes"] for each in cleared["groups"]], cleared["disk"]) == ([0], [])
    cleared = await caches.clear(ClearCaches("other", "disk"))
    assert (cleared["groups"], [each["model"] for each in cleared["disk"]]) == ([], ["/models/other"])
    cleared = await caches.clear(ClearCaches())
    assert (len(cleared["groups"]), [each["model"] for each in cleared["disk"]]) == (1, ["/models/tiny"])
    assert (await caches.kept(ListCaches()))["disk"]["models"] == []


@pytest.fixture(scope="module")
def source() -> ModelSource:
    from mlxtp.models.inspect import open_model

    return asyncio.run(open_model("tiny"))


@played()
async def test_a_group_on_other_macs_is_shown_as_it_is_told(node: Node) -> None:
    a, b = node.meet(A), node.meet(B)
    observer = Observer(node.parts)
    node.tick()
    before = moment(observer)
    rows = {each["name"]: (each["state"], each["chip"], each["memory_bytes"]) for each in before["nodes"]}
    assert (rows["studio"], rows["mac-a"]) == (("alive", "a chip", 64 << 30), ("alive", None, None))
    assert (before["deployments"], before["links"]) == ([], [])
    node.live(a, b)
    node.follow(a)
    told = Serving(
        9, "ready", "", "ring", "ring over Ethernet", (A, B), 0, "tiny", 1, 4096, 9, (1,),
        group=GROUP, deployment="tiny", cached=512,
    )  # fmt: skip
    node.hear(a, *only(1, A, "tiny").messages())
    node.hear_assigned(a, A, B)
    node.hear(a, told)
    node.tick()
    found = moment(observer)
    group = (found["epoch"], found["group"]["kind"], found["group"]["pairs"])
    assert group == (9, "ring over Ethernet", [[0, 1]])
    ranks = [(each["rank"], each["node"], each["memory_bytes"]) for each in found["ranks"]]
    assert ranks == [(0, A, None), (1, B, None)]
    [[shown]] = (each["groups"] for each in found["deployments"])
    assert shown["exposed"].startswith("tensors cross shared Ethernet in the clear: ")
    assert found["group"]["fabric"] is None
    assert found["tokens_per_second"]["value"] is None
    caches = CacheHandlers(node.parts)
    [elsewhere] = (await caches.kept(ListCaches()))["elsewhere"]
    assert elsewhere == {"group": GROUP, "owner": "mac-a", "cached_tokens": 512}
    for model, what in (("tiny", "tiny has no rank 0"), ("", "no model has its rank 0")):
        with pytest.raises(UserError, match=f"{what} on this Mac, so nothing of it is kept here"):
            await caches.clear(ClearCaches(model))
    with pytest.raises(UserError, match="other is neither served nor"):
        await caches.clear(ClearCaches("other"))
    cleared = await caches.clear(ClearCaches(where="disk"))
    assert (cleared["elsewhere"], cleared["other_macs"]) == ([], ["mac-a", "mac-f"])
    node.hear(a, replace(told, epoch=10, state="starting", reason="epoch 9 lost mac-f"))
    node.tick()
    history = [(each["epoch"], each["reason"]) for each in moment(observer)["history"]]
    assert history == [(10, None), (9, "epoch 9 lost mac-f")]


@ran()
async def test_tokens_are_counted_and_the_rate_is_of_now(tmp_path: Path) -> None:
    parts = alone(tmp_path)
    supervisor, observer = parts.groups.shown.supervisor, Observer(parts)
    supervisor.status.follow(ServingState.READY, 3, "", EpochGroup(0, 2, "ring"))
    assert moment(observer)["tokens_per_second"] == {"value": None, "of": "here"}
    await asyncio.sleep(0.5)
    supervisor.gateway.deployments.named("tiny").confirmed_tokens += 50
    value = moment(observer)["tokens_per_second"]["value"]
    assert 10 < value <= 100
    await parts.close()


@pytest.mark.parametrize(
    ("ranks", "mesh", "expected"),
    [
        (1, False, []),
        (2, False, [(0, 1)]),
        (2, True, [(0, 1)]),
        (3, False, [(0, 1), (1, 2), (2, 0)]),
        (4, False, [(0, 1), (1, 2), (2, 3), (3, 0)]),
        (4, True, [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
    ],
)
def test_who_exchanges_bytes_with_whom(ranks: int, mesh: bool, expected: list[tuple[int, int]]) -> None:
    assert pairs(ranks, mesh=mesh) == expected


def machine(*interfaces: Interface) -> Machine:
    return replace(MACHINE, interfaces=interfaces)


def test_the_best_way_between_two_macs_is_shown_and_no_other() -> None:
    def at(number: int) -> Machine:
        return machine(
            Interface("en0", f"10.0.0.{number}", 24, "ethernet", 10_000 // number, True),
            Interface("en1", f"192.168.1.{number}", 24, "wifi", 0, True),
        )

    alone = machine(Interface("en1", "192.168.1.9", 24, "wifi", 0, True))
    far = machine(Interface("en0", "10.9.9.9", 24, "ethernet", 0, True))
    machines = {"a": at(1), "b": at(2), "c": alone, "far": far}
    topology = Topology([MemberMachine(name, name, each) for name, each in machines.items()])
    took = {("a", "b"): 310}
    found = links(topology, ["c", "b", "a", "far"], lambda a, b: took.get((a, b)))
    assert [asdict(each) for each in found] == [
        {"a": "a", "b": "b", "trip_us": 310, "network": "ethernet", "rdma": False, "mbps": 5000},
        {"a": "a", "b": "c", "trip_us": None, "network": "wifi", "rdma": False, "mbps": None},
        {"a": "b", "b": "c", "trip_us": None, "network": "wifi", "rdma": False, "mbps": None},
    ]
