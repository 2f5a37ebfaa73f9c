"""`/cluster` and `/cluster/events`, as a watching client reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxtp.api import admin
from mlxtp.api.api_keys import KeyFile, KeyRing
from mlxtp.api.app import create_app
from mlxtp.api.guard import Access

from ..live_cluster import WAIT_S
from .conftest import FORMING, MOMENT, FakeObserved, Running, Site


@contextmanager
def watching(url: str, **headers: str) -> Iterator[Iterator[str]]:
    """The lines that a watching client is sent."""
    with httpx.stream("GET", f"{url}/cluster/events", timeout=WAIT_S, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        yield response.iter_lines()


@pytest.fixture
def events(site: Site) -> Iterator[Iterator[str]]:
    with watching(site.url) as lines:
        yield lines


def following(lines: Iterator[str]) -> dict[str, Any]:
    """The next moment that comes."""
    found: dict[str, Any] = json.loads(next(line[6:] for line in lines if line.startswith("data: ")))
    return found


def test_one_moment_is_all_that_is_known(site: Site) -> None:
    response = httpx.get(f"{site.url}/cluster")
    assert response.status_code == 200
    assert response.json() == MOMENT
    assert response.headers["cache-control"] == "no-store"


def test_a_moment_comes_at_once_and_another_when_something_has_changed(
    site: Site, events: Iterator[str]
) -> None:
    assert following(events) == MOMENT
    site.show(**FORMING)
    began = time.monotonic()
    assert following(events)["state"] == "forming"
    assert time.monotonic() - began < WAIT_S / 4
    site.show()
    assert following(events) == MOMENT


def test_nothing_is_told_twice(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "LOOK_S", 0.01)
    with watching(site.url) as lines:
        assert following(lines) == MOMENT
        looks = site.observed.looks
        while site.observed.looks < looks + 10:
            time.sleep(0.01)
        site.show(epoch=99)
        assert following(lines)["epoch"] == 99


def test_who_watches_together_is_answered_from_one_look(site: Site) -> None:
    looks = site.observed.looks
    for _ in range(20):
        assert httpx.get(f"{site.url}/cluster").status_code == 200
    assert site.observed.looks - looks < 20


def test_at_most_twice_a_second(site: Site, events: Iterator[str]) -> None:
    following(events)
    began, told = time.monotonic(), 0
    while time.monotonic() - began < 2.0:
        site.show(epoch=1000 + told)
        following(events)
        told += 1
    assert told <= 5


def test_when_the_agent_ends_watchers_are_let_go() -> None:
    """Else each open page would hold up the end of the agent until it is cut off."""
    observed = FakeObserved()
    with Running(None, observed) as running, watching(running.url) as lines:
        assert following(lines) == MOMENT
        observed.shown = MOMENT | {"state": "stopped"}
        running.close()
        assert [json.loads(line[6:])["state"] for line in lines if line.startswith("data")] == ["stopped"]


def test_a_watcher_whose_key_is_revoked_is_let_go(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    headers = {"Authorization": f"Bearer {file.create('page', 0, 1.0)[1]}"}
    access = Access(keys=KeyRing(file, "always", beyond=False))
    with Running(None, FakeObserved(), access=access) as running, watching(running.url, **headers) as lines:
        assert following(lines) == MOMENT
        file.revoke("page")
        until = time.monotonic() + WAIT_S / 4
        for _ in lines:  # comments
            assert time.monotonic() < until, "it is still told of the cluster"


def test_a_key_sees_its_own_open_requests_and_this_mac_sees_all(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    made, text = file.create("guest", 0, 1.0)
    ring = KeyRing(file, "always", beyond=False)
    ring.own_key = "own"
    observed = FakeObserved()
    owners = (made.digest.hex(), "another", "")
    observed.shown = MOMENT | {
        "running": [{"number": number, "owner": owner} for number, owner in enumerate(owners)]
    }
    with Running(None, observed, access=Access(keys=ring)) as running:
        for key, seen in ((text, [0]), ("own", [0, 1, 2])):
            headers = {"Authorization": f"Bearer {key}"}
            now = httpx.get(f"{running.url}/cluster", headers=headers, timeout=WAIT_S).json()
            assert now["running"] == [{"number": number} for number in seen]
            with watching(running.url, **headers) as lines:
                assert following(lines)["running"] == now["running"]


def test_without_a_source_there_is_no_page() -> None:
    routes = {getattr(route, "path", "") for route in create_app(None).routes}  # type: ignore[arg-type]
    assert "/cluster" not in routes
    assert "/" not in routes
