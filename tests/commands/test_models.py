"""`mlxtp pull`, `list`, `remove`, `verify`, as a user types them: with an agent, and without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxtp.errors import Code, UserError

from ..hub import (
    COMMIT,
    Hub,
    Model,
    put,
    running_hub,
    with_weights,
)
from .test_cluster import (
    Agent,
    agent,
    mlxtp,
    refusal,
    running,
)

__all__ = ["agent", "running"]  # fixtures

NAME = "some-body/llama"
EXTRA = 100_000
ROW: dict[str, Any] = {
    "name": "mini",
    "node_id": "ab" * 16,
    "lender": "studio",
    "held_bytes": 40_000_000_000,
    "total_bytes": 40_000_000_000,
    "bytes_per_s": 0,
    "left_s": None,
    "complete": True,
    "problem": "",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as found:
        found.models[NAME] = Model(with_weights(EXTRA))
        put(found.url, tmp_path / "cache", monkeypatch)
        yield found


def told(home: Path, *words: str) -> Any:
    result = mlxtp(home, *words, "--json")
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def test_without_an_agent_the_command_does_it_itself(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert "no model is in" in mlxtp(home, "list").stdout
    done = mlxtp(home, "pull", NAME)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{NAME} is on this Mac: ")
    (row,) = told(home, "list")["models"]
    size = sum(map(len, with_weights(EXTRA).values()))
    assert row == {
        "name": NAME, "revision": COMMIT, "refs": ["main"], "size_bytes": size, "held_bytes": size,
        "complete": True, "elsewhere": [],
    }  # fmt: skip
    assert "main" in mlxtp(home, "list").stdout
    assert mlxtp(home, "verify", NAME).stdout.endswith("all as they should be\n")
    assert told(home, "remove", NAME)["freed_bytes"] >= size
    assert "is not on this Mac" in refusal(home, "remove", NAME)
    assert told(home, "list")["models"] == []


def test_a_damaged_file_is_named_and_got_anew(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    mlxtp(home, "pull", NAME)
    snapshot = tmp_path / "cache" / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMIT
    with (snapshot / "model-extra-0.safetensors").open("r+b") as file:
        file.write(b"\0\0\0\0")
    (snapshot / "config.json").resolve().unlink()
    bad = told(home, "verify", NAME)["damaged"]
    assert sorted(bad) == ["config.json", "model-extra-0.safetensors"]
    shown = mlxtp(home, "verify", NAME)
    assert shown.exit_code == 1
    assert "config.json: it is not here" in shown.stdout
    assert f"`mlxtp verify {NAME} --repair` gets them anew" in shown.stdout
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


def test_what_an_agent_needs_is_not_removed(agent: Agent, hub: Hub, tmp_path: Path) -> None:
    mlxtp(tmp_path / "none", "pull", NAME)
    row = {"node": "mini", "name": NAME, "revision": COMMIT, "complete": True}
    agent.admin.answers["stored"] = {"elsewhere": [row, {**row, "node": "half", "complete": False}]}
    assert told(agent.home, "list")["models"][0]["elsewhere"] == ["mini"]
    agent.admin.error = UserError(f"{NAME} cannot be removed: it is served here", Code.CONFIG)
    assert "it is served here" in refusal(agent.home, "remove", NAME)
    agent.admin.error = None
    assert told(agent.home, "list")["models"]


@pytest.mark.parametrize("command", ["pull", "remove", "verify"])
@pytest.mark.parametrize(
    ("name", "words"),
    [("llama", "no OWNER/NAME"), (".", "a folder is left as it is"), ("a/b@../c", "is no revision")],
)
def test_what_is_no_model_of_the_hub(tmp_path: Path, command: str, name: str, words: str) -> None:
    assert words in refusal(tmp_path / "home", command, name)
