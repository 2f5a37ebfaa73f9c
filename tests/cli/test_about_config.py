"""`mlxtp config`: what holds, where it was set, and what an agent was started with."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mlxtp.cli.main import app
from mlxtp.config import resolve_settings, shown, told
from mlxtp.settings import BY_KEY

from .test_cluster import Agent, agent, running

__all__ = ["agent", "running"]  # fixtures

FILE = """# mine
name = "studio \\"left\\""
kv_bytes = "4GB"

[limits]
queue = 2.5
[rdma]
mini = "rdma_en5"
"""


def mlxtp(home: Path, *words: str, **environment: str) -> Result:
    variables = dict.fromkeys(map(str, ("MLXTP_ALONE", "MLXTP_HOME"))) | environment
    return CliRunner().invoke(app, [*words, "--home", str(home)], env={"COLUMNS": "80", **variables})


def test_each_setting_and_where_it_was_set(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(FILE)
    shown_lines = mlxtp(tmp_path, "config", "show", "--origin", MLXTP_RANKS="2").output.splitlines()
    assert shown_lines[0] == f"# {tmp_path / 'config.toml'}"
    for line in (
        "ranks = 2   # MLXTP_RANKS",
        'name = "studio \\"left\\""   # config.toml, line 2',
        "kv_bytes = 4000000000   # config.toml, line 3",
        "queue = 2.5   # config.toml, line 6",
        'rdma = ["mini=rdma_en5"]   # config.toml, line 7',
        "# drain = 10   # default",
    ):
        assert line in shown_lines
    told_as_json = json.loads(mlxtp(tmp_path, "config", "show", "--json", MLXTP_RANKS="2").output)
    assert told_as_json["settings"].keys() == BY_KEY.keys()
    assert told_as_json["settings"]["ranks"] == {"value": 2, "origin": "MLXTP_RANKS"}
    assert told_as_json["settings"]["limits.queue"] == {"value": 2.5, "origin": "config.toml, line 6"}
    assert told_as_json["agent"] is None
    for words in (("--origin",), ("--json",)):
        printed = mlxtp(tmp_path, "config", "show", *words, MLXTP_JOIN="SECRET-1").output
        assert ("SECRET-1" in printed, "MLXTP_JOIN" in printed) == (False, True)


def test_what_is_shown_is_a_file_that_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(FILE)
    printed = mlxtp(tmp_path, "config", "show", "--origin", MLXTP_CONTROL="10.0.0.1:7").output
    assert tomllib.loads(printed).keys() == {"name", "kv_bytes", "control", "rdma", "limits"}
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "config.toml").write_text(printed)
    again = resolve_settings({"home": tmp_path / "copy"}, {})
    assert shown(again) == shown(resolve_settings({"home": tmp_path}, {"MLXTP_CONTROL": "10.0.0.1:7"}))


def test_what_a_running_agent_was_started_with(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    started = resolve_settings({"home": agent.home, "http": "127.0.0.1:7"}, {"MLXTP_KV_BITS": "8"})
    (agent.home / "config.toml").write_text("ranks = 2")  # since then
    monkeypatch.setitem(agent.admin.answers, "settings", told(started))
    *_, head, http, ranks, bits = mlxtp(agent.home, "config", "show").output.splitlines()
    assert head == "# The agent that runs here has instead:"
    assert http == '#   http = "127.0.0.1:7"   (--http)'
    assert ranks == "#   ranks = 1   (default)"
    assert bits == "#   kv_bits = 8   (MLXTP_KV_BITS)"
    answer: dict[str, Any] = json.loads(mlxtp(agent.home, "config", "show", "--json").output)
    assert answer["agent"]["ranks"] == {"value": 1, "origin": "default"}
    (agent.home / "config.toml").write_text("rank = 1")
    assert mlxtp(agent.home, "token").output == "TOKEN-1\n", "a typo there stops no question to the agent"


def test_the_path_of_the_file_also_of_one_that_is_wrong(tmp_path: Path) -> None:
    warned = mlxtp(tmp_path / "home", "config", "path", "--json", MLXTP_MODLE="x")
    assert json.loads(warned.stdout) == {"path": str(tmp_path / "home" / "config.toml"), "exists": False}
    assert warned.stderr == "mlxtp: MLXTP_MODLE is unknown; did you mean MLXTP_MODEL?\n"
    mlxtp(tmp_path / "home", "config", "show", "--origin")
    assert not (tmp_path / "home").exists(), "nothing is written"
    (tmp_path / "config.toml").write_text("rank = 1")
    assert mlxtp(tmp_path, "config", "path").output == f"{tmp_path / 'config.toml'}\n"
    wrong = mlxtp(tmp_path, "config", "show")
    assert wrong.exit_code == 1
    assert "did you mean ranks?" in wrong.stderr
