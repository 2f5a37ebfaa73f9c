"""Health and deployments over all groups that an agent knows, by HTTP; the account of each Mac's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from mlxtp.admin import snapshot
from mlxtp.api.app import create_app
from mlxtp.groups.health import ServingState
from mlxtp.groups.overview import MIB, RankAccount, findings
from mlxtp.wire.cluster_messages import Serving

from .one_node import A, B, Node, at_node

SERVING = Serving(
    4, "ready", "", "ring", "ring over Ethernet", (A, B), 3, "org/two", 1, 4096, 512, (2,),
    group="org/two#0", deployment="org/two", running=2, speed=30, cached=512,
)  # fmt: skip


async def asked(node: Node, path: str) -> tuple[int, dict[str, Any]]:
    transport = httpx.ASGITransport(create_app(node.parts.gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.get(path)
        assert ("retry-after" in answer.headers) == (answer.status_code == 503)
        return answer.status_code, answer.json()


def deploy(node: Node, **keeps: int) -> dict[str, Any]:
    """Deploy models, each kept so long, and return the state of the first group of each."""
    for name, keep_s in keeps.items():
        node.parts.node.desired.serve(name, keep_s=keep_s)
    node.parts.groups.sync()
    return {name: node.parts.groups.known(f"{name}#0").supervisor.status for name in keeps}


@at_node()
async def test_health_is_good_once_each_pinned_deployment_has_a_ready_group(node: Node) -> None:
    states = deploy(node, one=-1, two=-1, three=600)
    status, health = await asked(node, "/health")
    assert (status, health["ready"]) == (503, False)
    states["one"].state = ServingState.READY
    status, health = await asked(node, "/health")
    assert (status, health["state"]) == (503, "ready")
    assert health["reason"].startswith("two is ")
    assert [(each["name"], each["ready"]) for each in health["deployments"]] == [
        ("one", True), ("two", False), ("three", False),
    ]  # fmt: skip
    assert (await asked(node, "/health?model=one"))[0] == 200
    assert (await asked(node, "/health?model=two"))[0] == 503
    assert (await asked(node, "/health?model=none"))[0] == 404
    states["two"].state = ServingState.READY
    assert (await asked(node, "/health"))[0] == 200, "three is not pinned"
    assert (await asked(node, "/health?model=three"))[0] == 503
    states["one"].state = ServingState.LOADING
    assert (await asked(node, "/health"))[0] == 503
    assert (await asked(node, "/health?model=two"))[0] == 200


@at_node()
async def test_without_a_pinned_deployment_the_first_one_has_to_be_ready(node: Node) -> None:
    states = deploy(node, one=600, two=600)  # the latest comes first
    assert (await asked(node, "/health"))[0] == 503
    states["one"].state = ServingState.READY
    assert (await asked(node, "/health"))[0] == 503
    states["two"].state = ServingState.READY
    assert (await asked(node, "/health"))[0] == 200


@pytest.mark.parametrize("ready", [True, False])
@at_node()
async def test_a_group_elsewhere_is_shown_as_its_owner_reports_it(node: Node, ready: bool) -> None:
    a = node.meet(A)
    node.parts.node.desired.serve("org/two@v2", replicas=2, on=(A,))
    told = SERVING if ready else replace(SERVING, state="loading", reason="40 % read")
    node.hear(a, told)
    node.tick()
    now = snapshot.gather(node.parts)
    [shown] = snapshot.status(now)["deployments"]
    assert (shown["name"], shown["model"]) == ("org/two", "org/two@v2")
    assert shown["replicas"] == {"ready": int(ready), "wanted": 2}
    assert shown["on"] == [node.parts.node.name_of(A)]
    first, second = shown["groups"]
    assert [each["node_id"] for each in first["members"]] == [A, B]
    assert (first["owner"], first["epoch"], first["kind"]) == (A, 4, "ring over Ethernet")
    assert first["requests"] == {"running": 2, "waiting": 1}
    assert (first["tokens_per_second"], first["why"]) == ((30, None) if ready else (None, "40 % read"))
    assert (second["id"], second["members"], second["state"]) == ("org/two#1", [], "idle")
    assert second["why"] in shown["why"]
    works = {each["node_id"]: each["works_for"] for each in snapshot.members(now.cluster)}
    assert works.get(A, ["org/two#0"]) == ["org/two#0"]


GIB = 1024 * MIB
FIRST = RankAccount("a#0", "mac", 10 * GIB, 4 * GIB, 12 * GIB, 2 * GIB)
SECOND = RankAccount("b#0", "mac", 2 * GIB, 1 * GIB, 2 * GIB, 0)


@pytest.mark.parametrize(
    ("ranks", "room", "found"),
    [
        ([], {}, {}),
        ([FIRST, SECOND], {"mac": 17 * GIB, "other": 0}, {}),
        (
            [FIRST, SECOND],
            {"mac": 17 * GIB - MIB},
            {("mac", ""): "its groups may have 17,408 MiB together, and this Mac has 17,407 MiB for them"},
        ),
        ([FIRST, replace(SECOND, node_id="other")], {"mac": 14 * GIB, "other": 3 * GIB}, {}),
        (
            [SECOND, replace(FIRST, kv_bytes=5 * GIB)],
            {},
            {("mac", "a#0"): "its KV caches have 5,120 MiB, and may have 4,096 MiB"},
        ),
        (
            [SECOND, replace(FIRST, memory_bytes=16 * GIB)],
            {},
            {("mac", "a#0"): "it has 16,384 MiB, and weights, KV caches and forwards may have 15,616 MiB"},
        ),
        ([replace(FIRST, kv_budget=0, memory_bytes=90 * GIB, kv_bytes=70 * GIB)], {}, {}),
    ],
    ids=["none", "kept to", "together", "two Macs", "caches", "memory", "no bound"],
)
def test_what_the_account_of_memory_finds(
    ranks: list[RankAccount], room: dict[str, int], found: dict[tuple[str, str], str]
) -> None:
    assert findings(ranks, room) == found
