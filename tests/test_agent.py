"""An agent takes its home for itself, and leaves nothing in it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import stat
import subprocess
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from mlxtp import agent as agent_module
from mlxtp.agent import _own_home, running_agent
from mlxtp.cluster.peer_reports import MachineReports
from mlxtp.config import Settings
from mlxtp.errors import Code, ConfigError, GroupError, ModelError
from mlxtp.groups import sleep
from mlxtp.groups.lifecycle import Supervisor
from mlxtp.groups.sleep import Clocks, watch_sleep
from mlxtp.models.manifest import gigabytes
from mlxtp.models.transfers import TransferCoordinator

from .groups.scenes import run, sees, within
from .hub import Hub, Model, embedded
from .live_cluster import Cluster, rank_processes, until
from .played import scenes

played = scenes(lambda story: run(within(story())), stages=0)


pytestmark = pytest.mark.group


def in_(home: Path, **fields: Any) -> Settings:
    return Settings(home, "127.0.0.1", 0, 1, **fields)


async def start_and_stop(settings: Settings) -> None:
    async with running_agent(settings):
        pass


def test_a_home_has_one_agent_at_a_time(one_rank: Cluster) -> None:
    before = one_rank.pids()
    with pytest.raises(ConfigError, match=r"another mlxtp node uses .* give each its own folder with --home"):
        asyncio.run(start_and_stop(one_rank.settings))
    assert rank_processes(one_rank.home) == before
    assert one_rank.health()["ready"]


def test_a_hard_limit_of_open_files_with_which_no_rank_starts_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))
    monkeypatch.setattr("resource.setrlimit", refuses)
    with pytest.raises(ConfigError, match=r"at most 256 files .* ranks need 4096; raise the hard limit"):
        asyncio.run(start_and_stop(in_(tmp_path)))


def test_a_home_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--home .*file/home: "):
        asyncio.run(start_and_stop(in_(tmp_path / "file" / "home")))


@pytest.mark.parametrize("open_", ["", "run", "lock", "kv-cache"])
def test_a_home_that_others_can_change_is_refused_and_the_remedy_works(tmp_path: Path, open_: str) -> None:
    home = tmp_path / "a home"
    found = home / open_
    (found.parent if open_ == "lock" else found).mkdir(parents=True)
    if open_ == "lock":
        found.touch()
    home.chmod(0o755)
    found.chmod(0o775)
    with (
        pytest.raises(
            ConfigError, match=r"can be changed by other users of this machine \(mode 0775\)"
        ) as why,
        _own_home(home),
    ):
        pass
    subprocess.run(["/bin/sh", "-c", why.value.detail.rpartition("run: ")[2]], check=True)
    with _own_home(home):
        pass
    home.chmod(0o700)
    if open_:
        found.chmod(0o775)  # as an earlier version made it with umask 002: no other user can get there
        with _own_home(home):
            assert stat.S_IMODE(found.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["run", "lock", "kv-cache"])
def test_a_link_in_the_home_is_not_followed(tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / name).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=f"{name} is a link"), _own_home(tmp_path / "home"):
        pass


def test_a_new_home_is_closed_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with _own_home(tmp_path / "above" / "home"):
            pass
    finally:
        os.umask(before)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.rglob("*")}
    assert modes == {"above": 0o700, "home": 0o700, "run": 0o700, "lock": 0o600}


def test_what_a_killed_agent_left_is_cleared_and_ending_early_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rest = tmp_path / "run" / "epoch-7" / "hosts.json"
    rest.parent.mkdir(parents=True)
    rest.write_text("[]")
    cluster = Cluster(tmp_path, ranks=2, wait=False)
    until(lambda: len(rank_processes(tmp_path)) == 2, "two rank processes")
    assert not rest.exists()
    cluster.close()  # while it waits for the ranks' first word
    gc.collect()  # asyncio tells of a task that was left behind when it is thrown away
    assert not [each for each in caplog.records if each.name == "asyncio" and each.levelno >= logging.ERROR]


def test_a_foreign_folder_in_the_home_stays(tmp_path: Path) -> None:
    theirs, left = tmp_path / "run" / "important", tmp_path / "run" / "epoch-7"
    theirs.mkdir(parents=True)
    left.mkdir()
    with pytest.raises(ModelError):
        asyncio.run(start_and_stop(in_(tmp_path, model="/no/such/model")))
    assert theirs.exists()
    assert not left.exists()


@pytest.fixture(params=[False, True], ids=["alone", "in a cluster"])
def settings(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of an agent whose supervisor a test plays, so it has no ranks."""
    monkeypatch.setattr(Supervisor, "run", lambda *_: asyncio.Event().wait())
    where = {"control_host": "127.0.0.1", "control_port": 0, "discovery": False}
    return in_(tmp_path, cluster=request.param, keep_awake=False, **where)


@played()
async def test_a_mac_that_slept_ends_its_epoch(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = chain([Clocks(100, 5000), Clocks(101, 5601)], repeat(Clocks(102, 5602)))
    slept: list[float] = []
    monkeypatch.setattr(sleep, "TICK_S", 0.01)
    monkeypatch.setattr(agent_module, "watch_sleep", partial(watch_sleep, read=lambda: next(moments)))
    monkeypatch.setattr(Supervisor, "woke", lambda _, slept_s: slept.append(slept_s))
    async with running_agent(settings, spares=False):
        await sees(lambda: slept == [600.0])


@played()
async def test_clients_still_read_once_ranks_have_ended(settings: Settings) -> None:
    reached: list[bool] = []

    def reaches(url: str) -> bool:
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)):
            return True

    async with running_agent(settings, spares=False) as agent:
        agent.on_left = lambda: reached.append(reaches(agent.url))
    assert reached == [True]


@pytest.mark.parametrize("endpoint", [False, True])
@played()
async def test_a_bug_of_the_endpoint_or_in_what_keeps_ranks_ends_an_agent(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, endpoint: bool
) -> None:
    async def err(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(*(agent_module, "serve") if endpoint else (Supervisor, "run"), err)
    async with running_agent(settings, spares=False) as agent:
        with pytest.raises(GroupError, match="RuntimeError: a bug") as failed:
            await agent.wait_ready()
        assert failed.value.code is Code.INTERNAL
        assert agent.over.exception() is failed.value


@pytest.mark.parametrize("settings", [False], ids=["alone"], indirect=True)
def test_an_agent_alone_reports_the_progress_of_its_download(
    settings: Settings, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.models["o/tiny"] = Model(embedded())
    caplog.set_level("INFO", "mlxtp.agent")
    run(within(start_and_stop(replace(settings, model="o/tiny"))))
    size = gigabytes(sum(map(len, embedded().values())))
    assert caplog.messages[:1] == ["o/tiny comes from the Hub"]
    assert f"o/tiny: {size} of {size} are here" in caplog.messages
    assert len([each for each in hub.asked if "/api/models/o/tiny" in each]) == 1
    caplog.clear()
    hub.close()
    run(within(start_and_stop(replace(settings, model="o/tiny"))))
    assert not [each.getMessage() for each in caplog.records if each.name == "mlxtp.agent"]


@pytest.mark.parametrize("settings", [False], ids=["alone"], indirect=True)
def test_an_agent_alone_downloads_nothing_that_it_cannot_serve(settings: Settings, hub: Hub) -> None:
    hub.models["o/labels"] = Model(embedded() | {"config.json": b'{"model_type": "bert"}'})
    with pytest.raises(ModelError, match="mlx-lm has no model family 'bert'"):
        asyncio.run(start_and_stop(replace(settings, model="o/labels")))
    assert "model.safetensors" not in hub.models["o/labels"].sent


def test_when_one_part_fails_to_end_the_others_end_all_the_same(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = []

    async def err(_: object) -> None:
        raise RuntimeError("a bug")

    async def end(_: object) -> None:
        ended.append("transfers")

    monkeypatch.setattr(MachineReports, "close", err)
    monkeypatch.setattr(TransferCoordinator, "close", end)
    run(within(start_and_stop(settings)))
    assert ended == ["transfers"]
    assert "a part of this agent ended" in caplog.messages
