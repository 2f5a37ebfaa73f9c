"""States of a cluster that tests of the page show, made of the parts in `conftest.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..api.test_admin import KEY
from .conftest import DEPLOYMENT, GROUP, MOMENT, NODE, RANK

ADMIN = "#key=" + KEY.replace(" ", "%20")
KEPT = {
    "group": "org/tiny#0", "kept_bytes": 1_500_000_000, "evicted_bytes": 0, "spilled_bytes": 0, "reused": 12,
    "reused_tokens": 96_000, "fetched": 3, "fetched_tokens": 64_000, "disk_bytes": 12 * 10**9,
    "disk_room_bytes": 50 * 10**9,
}  # fmt: skip


def node_id(number: int) -> str:
    return f"{number:032x}"


def group(name: str, macs: Sequence[int], **changes: Any) -> dict[str, Any]:
    """A group of these Macs, in rank order."""
    members = [{"node_id": node_id(each), "name": f"a Mac with a long name {each}"} for each in macs]
    owner = node_id(macs[0]) if macs else None
    return GROUP | {"id": name, "members": members, "owner": owner} | changes


def deployment(model: str, *groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    ready = sum(each["state"] == "ready" for each in groups)
    replicas = {"ready": ready, "wanted": len(groups)}
    return (
        DEPLOYMENT | {"name": model, "model": model, "replicas": replicas, "groups": list(groups)} | changes
    )


def request(number: int, phase: str, **changes: Any) -> dict[str, Any]:
    """An open request at the group of `MOMENT`."""
    found = {
        "number": number, "model": "org/tiny", "group": "org/tiny#0", "phase": phase, "prompt": 8000,
        "read": 8000, "cached": 6000, "tokens": 0, "here": True,
    }  # fmt: skip
    return found | changes


def cluster_of(count: int) -> dict[str, Any]:
    """A cluster of so many Macs with Ethernet, which share one model in a ring."""
    ids = [node_id(number) for number in range(count)]
    return {
        "self": ids[0],
        "nodes": [
            NODE | {"node_id": node, "name": f"a Mac with a long name {i}", "self": i == 0}
            for i, node in enumerate(ids)
        ],
        "ranks": [RANK | {"rank": i, "node": node} for i, node in enumerate(ids)],
        "group": MOMENT["group"]
        | {"world_size": count, "pairs": [[i, (i + 1) % count] for i in range(count)]},
        "deployments": [deployment("org/tiny", group("org/tiny#0", range(count), kind="ring over Ethernet"))],
        "links": [
            {"a": a, "b": b, "network": "ethernet", "rdma": False, "mbps": 10_000, "trip_us": None}
            for i, a in enumerate(ids)
            for b in ids[i + 1 :]
        ],
    }
