"""`mlxtp pull`, `list`, `remove`, `verify`, as a user types them: with an agent, and without one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Task, TaskID

from mlxtp.cli.models import _Speed
from mlxtp.errors import Code, UserError
from mlxtp.models.download import Fetch
from mlxtp.models.hub_cache import Repo

from ..hub import COMMIT, Hub, Model, put, running_hub, with_weights
from ..live_cluster import START_S
from .test_cluster import Agent, agent, mlxtp, refusal, running

__all__ = ["agent", "running"]  # fixtures

NAME = "some-body/llama"
LLAMA = "mlx-community/Llama-3.2-1B-Instruct-4bit"
EXTRA = 100_000
ROW: dict[str, Any] = {
    **{"name": "mini", "node_id": "ab" * 16, "lender": "studio", "waits": False, "complete": True},
    **dict.fromkeys(("held_bytes", "total_bytes"), 40_000_000_000),
    **{"bytes_per_s": 0, "left_s": None, "problem": ""},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as found:
        found.models[NAME] = found.models[LLAMA] = Model(with_weights(EXTRA))
        put(found.url, tmp_path / "cache", monkeypatch)
        yield found


def told(home: Path, *words: str) -> Any:
    result = mlxtp(home, *words, "--json")
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


@pytest.mark.parametrize(("typed", "name"), [(NAME, NAME), ("llama3.2:1b", LLAMA)])
def test_without_an_agent_the_command_does_it_itself(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, name: str
) -> None:
    home = tmp_path / "home"
    assert "no model is in" in mlxtp(home, "list").stdout
    done = mlxtp(home, "pull", typed)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{name} is on this Mac: ")
    (row,) = told(home, "list")["models"]
    size = sum(map(len, with_weights(EXTRA).values()))
    assert row == {
        "name": name, "short": typed if typed != name else "", "revision": COMMIT, "refs": ["main"],
        "size_bytes": size, "held_bytes": size, "complete": True, "elsewhere": [],
    }  # fmt: skip
    shown = mlxtp(home, "list").stdout
    assert "main" in shown
    assert ("(llama3.2:1b)" in shown) == (typed != name)
    assert mlxtp(home, "verify", typed).stdout.endswith("all correct\n")
    assert told(home, "remove", typed)["freed_bytes"] >= size
    assert "is not on this Mac" in refusal(home, "remove", typed)
    assert told(home, "list")["models"] == []
    monkeypatch.setattr(Fetch, "from_hub", lambda _: 1 // 0)  # an error of any kind
    assert refusal(home, "pull", name).startswith(f"mlxtp: cannot get {name}: ZeroDivisionError: ")


def snapshot_in(folder: Path) -> Path:
    return folder / "cache" / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMIT


def damage(folder: Path) -> Path:
    """A file of NAME with other bytes."""
    bad = (snapshot_in(folder) / "model-extra-0.safetensors").resolve()
    with bad.open("r+b") as file:
        file.write(b"\0\0\0\0")
    return bad


def test_a_damaged_file_is_named_and_got_again(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    mlxtp(home, "pull", NAME)
    damage(tmp_path)
    (snapshot_in(tmp_path) / "config.json").resolve().unlink()
    bad = told(home, "verify", NAME)["damaged"]
    assert sorted(bad) == ["config.json", "model-extra-0.safetensors"]
    shown = mlxtp(home, "verify", NAME)
    assert shown.exit_code == 1
    assert "config.json: it is missing" in shown.stdout
    assert f"`mlxtp verify {NAME} --repair` downloads them again" in shown.stdout
    hub.models[NAME].sent = {}
    assert mlxtp(home, "verify", NAME, "--repair").exit_code == 0
    assert sorted(hub.models[NAME].sent) == sorted(bad)
    assert told(home, "verify", NAME)["damaged"] == {}


def test_an_agent_is_asked_and_its_word_is_shown(agent: Agent, hub: Hub, tmp_path: Path) -> None:
    answers = {"pull": {"model": f"{NAME}@{COMMIT}"}, "pulling": {"members": [ROW]}}
    agent.admin.answers |= answers
    done = mlxtp(agent.home, "pull", NAME, "--everywhere")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{NAME} is on mini: 40.0 GB\n"
    assert agent.admin.asked == [("pull", NAME, "yes"), ("pulling", f"{NAME}@{COMMIT}")]
    assert hub.asked == []
    failed = {**ROW, "complete": False, "problem": "it is gated"}
    agent.admin.answers["pulling"] = {"members": [ROW, failed]}
    shown = mlxtp(agent.home, "pull", NAME)
    assert shown.exit_code == 1
    assert "mini: it is gated" in shown.stderr
    assert told(agent.home, "pull", NAME)["members"] == [ROW, failed]
    none = {**failed, "held_bytes": 0}  # what does not come has no bar
    agent.admin.answers["pulling"] = {"members": [none]}
    assert mlxtp(agent.home, "pull", NAME).stderr == "mlxtp: mini: it is gated\n"
    agent.admin.answers["pulling"] = {"members": [none, {**ROW, "name": "studio"}]}
    first, second = filter(None, mlxtp(agent.home, "pull", NAME).stderr.splitlines())
    assert (first.startswith("studio "), "?" in first, second) == (True, False, "mlxtp: mini: it is gated")


def test_a_bar_that_is_full_says_how_fast_it_came() -> None:
    task = Task(TaskID(1), "x", 2_000_000, 2_000_000, _get_time=lambda: 5.0, fields={"begun": 1_000_000})
    assert str(_Speed().render(task)) == ""  # not known
    task.start_time, task.stop_time, task.finished_time = 0.0, 2.0, 2.0
    assert str(_Speed().render(task)) == "500.0 kB/s"
    task.finished_speed = 3e6
    assert str(_Speed().render(task)) == "3.0 MB/s"


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once_though_the_hub_is_silent(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = "http://{}:{}".format(*silent.getsockname())
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "mlxtp", "pull", NAME, "--home", str(tmp_path / "home")]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        silent.settimeout(START_S)
        with silent.accept()[0]:
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=START_S)
    assert (process.returncode, time.monotonic() - began < 5) == (130, True)
    assert said == "mlxtp: the download stops; the same command resumes it\n"


def test_models_are_looked_for_where_the_agent_has_them(agent: Agent, hub: Hub, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    Fetch(Repo(NAME, theirs), "main").from_hub()
    row = {"node": "mini", "name": NAME, "revision": COMMIT, "complete": True}
    elsewhere = [row, {**row, "node": "half", "complete": False}]
    agent.admin.answers["stored"] = {"folder": str(theirs), "elsewhere": elsewhere}
    assert told(agent.home, "list")["folder"] == str(theirs)
    assert told(agent.home, "list")["models"][0]["elsewhere"] == ["mini"]
    agent.admin.error = UserError(f"{NAME} cannot be removed: it is served here", Code.CONFIG)
    assert "it is served here" in refusal(agent.home, "remove", NAME)
    agent.admin.error = None
    assert mlxtp(agent.home, "verify", NAME).stdout.endswith("all correct\n")
    assert f"from {theirs}" in mlxtp(agent.home, "remove", NAME).stdout
    assert agent.admin.asked[-1] == ("removed", NAME), "so that others hear of it"
    assert f"is not on this Mac, in {theirs}" in refusal(agent.home, "remove", NAME)


def test_nothing_is_deleted_that_no_source_could_give_again(agent: Agent, hub: Hub, tmp_path: Path) -> None:
    alone = tmp_path / "none"
    mlxtp(alone, "pull", NAME)
    bad = damage(tmp_path)
    agent.admin.answers["stored"] = {"elsewhere": []}
    agent.admin.error = UserError(f"{NAME} cannot be repaired now: a rank of this Mac has it open")
    assert "has it open" in refusal(agent.home, "verify", NAME, "--repair")
    agent.admin.error = None
    model, hub.models = hub.models, {}
    for home in (alone, agent.home):
        assert "knows no such model" in refusal(home, "verify", NAME, "--repair")
    assert bad.exists()
    hub.models = model
    with Repo(NAME).locked():
        assert "another process is adding to" in refusal(alone, "verify", NAME, "--repair")
    assert bad.exists()
    link = next(path for path in bad.parent.iterdir() if len(path.name) == 40)
    link.rename(tmp_path / "outside")
    link.symlink_to(tmp_path / "outside")
    done = mlxtp(alone, "verify", NAME, "--repair")
    assert done.exit_code == 1
    assert "files that cannot be read: 1; they were not changed" in done.stdout
    assert "bad files: 1 of" in done.stdout
    assert link.is_symlink()


def test_an_agent_repairs_with_what_others_have(agent: Agent, hub: Hub, tmp_path: Path) -> None:
    mlxtp(tmp_path / "none", "pull", NAME)
    bad = damage(tmp_path)
    name = f"{NAME}@{COMMIT}"
    agent.admin.answers |= {
        "pull": {"model": name},
        "pulling": {"members": [{**ROW, "problem": "it is gone"}]},
        "stored": {"elsewhere": [{"node": "mini", "name": NAME, "revision": COMMIT, "complete": True}]},
    }
    hub.models = {}
    assert f"{name} is still damaged: it is gone" in refusal(agent.home, "verify", NAME, "--repair")
    assert not bad.exists()
    assert ("removable", name, "yes") in agent.admin.asked
    assert agent.admin.asked[-2:] == [("pull", name, ""), ("pulling", name)]


@pytest.mark.parametrize("command", ["pull", "remove", "verify"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama", "not OWNER/NAME"),
        (".", "is a path"),
        ("a/b@../c", "is no revision"),
        ("llama3.2:7b", "near are the short names llama3.2:3b"),
    ],
)
def test_what_is_no_model_of_the_hub(tmp_path: Path, command: str, name: str, words: str) -> None:
    assert words in refusal(tmp_path / "home", command, name)
