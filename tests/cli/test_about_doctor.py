"""`mlxtp doctor`, as a user types it, with an agent and without."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mlxtp.admin.checkup import AgentCheckup
from mlxtp.agent import _own_home
from mlxtp.api.backend import Health
from mlxtp.api.dialects.openai import health_body
from mlxtp.api.endpoint import open_endpoint
from mlxtp.cli.main import app
from mlxtp.config import Settings
from mlxtp.diagnostics import checkup
from mlxtp.diagnostics.rows import show
from mlxtp.errors import Code
from mlxtp.identity.store import Store

from ..groups.one_node import alone


def type_in(home: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "--home", str(home), *words])


def rows(result: Result) -> dict[str, Any]:
    return {row["id"]: row for row in json.loads(result.stdout)["rows"]}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No other Mac is listened for, and nothing leaves this machine."""
    monkeypatch.setenv("MLXTP_DISCOVERY", "false")
    monkeypatch.setenv("MLXTP_CONTROL", "127.0.0.1:0")
    monkeypatch.setenv("MLXTP_HTTP", "127.0.0.1:0")


def test_without_an_agent_the_command_looks_itself_and_says_so(tmp_path: Path) -> None:
    result = type_in(tmp_path, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["looked"] == "command"
    found = rows(result)
    assert "no agent runs" in found["agent"]["findings"][0]["what"]
    assert found["system"]["level"] == "ok"
    assert "serving" not in found
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind
    assert " System          " in type_in(tmp_path).stdout
    (tmp_path / "config.toml").write_text("rank = 1")
    refused = type_in(tmp_path, "--json")
    error = json.loads(refused.stdout)["error"]
    assert (refused.exit_code, error["code"]) == (1, Code.CONFIG)
    assert "line 1: unknown key 'rank'; did you mean ranks?" in error["message"]


def test_a_look_that_fails_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "identity_here", lambda _settings: 1 // 0)
    result = type_in(tmp_path, "--json")
    assert result.exit_code == 1
    told = rows(result)["identity"]["findings"][0]["what"]
    assert told == "the home could not be read: ZeroDivisionError: integer division or modulo by zero"


def test_an_error_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path).found_cluster()
    (tmp_path / "identity").chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("MLXTP_HTTP", address)
        result = type_in(tmp_path, "--json")
        with _own_home(tmp_path):  # an agent that does not answer
            held = type_in(tmp_path, "--json")
    assert (result.exit_code, held.exit_code) == (1, 1)
    assert "did not answer" in rows(held)["agent"]["findings"][0]["what"]
    assert "ports" not in rows(held)
    found = rows(result)
    assert f"endpoint {address} is not available" in found["ports"]["findings"][0]["what"]
    assert "chmod 700" in found["identity"]["findings"][0]["what"]


def test_a_demo_at_the_port_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Demo(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            told = health_body(Health("idle", 0, 0, "none", None, None, False, 0))
            self.wfile.write(json.dumps(told).encode())

    with HTTPServer(("127.0.0.1", 0), Demo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("MLXTP_HTTP", address)
        result = type_in(tmp_path, "--json")
        server.shutdown()
    found = rows(result)["ports"]
    assert (result.exit_code, found["level"]) == (0, "info")
    assert f"endpoint {address} is used by another mlxtp, a demo" in found["findings"][0]["what"]


def test_an_agent_that_keeps_to_itself_looks_from_within(tmp_path: Path) -> None:
    settings = Settings(tmp_path, "127.0.0.1", 0, 1, "tiny", alone=True)
    with open_endpoint(settings) as endpoint:

        async def look() -> Any:
            parts = alone(tmp_path)
            found = await AgentCheckup(settings, endpoint, parts).report()
            await parts.close()
            return found

        found = asyncio.run(look())
    assert found["looked"] == "agent"
    told = {row["id"]: row["findings"][0]["what"] for row in found["rows"]}
    assert told["ports"] == f"endpoint {endpoint.url.rpartition('/')[2]} is ours"
    assert told["serving"].startswith("starting")
    assert told["mdns"].startswith("switched off")
    assert told["models"].startswith("there is no other member")


def report(level: str = "warning") -> dict[str, Any]:
    bad = {"level": level, "what": "a [b] " * 30, "why": "it matters", "fix": "sudo " + "x" * 90}
    good = {"level": "ok", "what": "fine", "why": "", "fix": ""}
    return {
        "level": level,
        "rows": [
            {"id": "a", "title": "Bad", "level": level, "findings": [good, bad]},
            {"id": "b", "title": "Good", "level": "ok", "findings": [good]},
        ],
    }


def test_a_report_fits_a_terminal_and_leaves_commands_whole() -> None:
    lines = "\n".join(line.plain for line in show(report(), 80, plain=False)).splitlines()
    assert lines[0] == f"! Bad             {'a [b] ' * 9}a ..."
    assert lines[1] == "✓ Good            fine"
    assert [line for line in lines if len(line) > 80] == [f"  to do: sudo {'x' * 90}"]
    assert "  why: it matters" in lines
    assert lines[-1] == "1 warning; mlxtp runs none of these commands itself"
    text = "\n".join(line.plain for line in show(report("error"), 80, plain=True))
    assert text.isascii(), "for a terminal without Unicode"
    assert text.startswith("x Bad")
