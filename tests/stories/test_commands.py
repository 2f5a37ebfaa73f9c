"""The commands as a user types them: real processes, from the first line to the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mlxtp.agent import Agent
from mlxtp.api.api_keys import KeyFile
from mlxtp.cli import main
from mlxtp.config import resolve_settings
from mlxtp.identity.store import Store

from ..live_cluster import START_S, WAIT_S, rank_processes, until

pytestmark = [pytest.mark.slow, pytest.mark.fault]

COMMAND = (sys.executable, "-m", "mlxtp")
ANY_PORT = ("--http", "127.0.0.1:0")
ORACLE = "FALCON-MERCURY-7749"


def alone() -> dict[str, str]:
    """The environment of a command that must not speak to anybody on the network."""
    return {**os.environ, "MLXTP_ALONE": "1"}


def mlxtp(*args: str, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args],
        env=alone() | environment,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
        input=typed,
    )


@pytest.mark.group
def test_the_demo_answers_once_and_leaves_nothing(tmp_path: Path) -> None:
    done = mlxtp("demo", "--once", "--json", "--home", str(tmp_path), *ANY_PORT)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["text"] == ORACLE
    assert (outcome["ranks"], outcome["backend"]) == (2, "ring")
    assert outcome["tokens_per_second"] > 0
    assert outcome["ttft_s"] > 0
    assert list(outcome["stages_s"]) == ["spawned", "linked", "formed", "proven", "loaded", "warmed up"]
    assert list(outcome["stages_s"].values()) == sorted(outcome["stages_s"].values())
    assert outcome["ready_s"] >= outcome["stages_s"]["warmed up"]
    assert rank_processes(tmp_path) == []
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.group
@pytest.mark.chaos
def test_the_demo_shows_two_replicas_of_a_model_that_share_the_requests(tmp_path: Path) -> None:
    done = mlxtp("demo", "--replicas", "2", "--once", "--json", "--home", str(tmp_path), *ANY_PORT)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["text"] == ORACLE
    assert (outcome["replicas"], outcome["ranks"]) == (2, 1)
    assert sorted(outcome["answered_by"]) == ["tiny#0", "tiny#1"]
    assert sum(outcome["answered_by"].values()) == 8
    assert "tiny: ready, replicas: 2 of 2" in done.stderr
    assert rank_processes(tmp_path) == []


@pytest.mark.chaos
def test_the_demo_asks_also_where_a_key_is_needed_and_https_spoken(tmp_path: Path) -> None:
    done = mlxtp(
        *("demo", "--once", "--json", "--ranks", "1", "--home", str(tmp_path), *ANY_PORT),
        MLXTP_API_KEYS="always",
        MLXTP_HTTP_TLS="yes",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == ORACLE
    assert (tmp_path / "https-cert.pem").exists()


@pytest.mark.chaos
def test_the_demo_shows_its_stages_and_takes_a_prompt(tmp_path: Path) -> None:
    done = mlxtp(
        "demo",
        "--once",
        "--ranks",
        "1",
        "--prompt",
        "Repeat exactly: PANDA-42",
        "--home",
        str(tmp_path),
        *ANY_PORT,
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "1 rank, no group",
        "rank processes spawned",
        "model sharded and loaded",
        "PANDA-42",
        "tokens/s",
    ):
        assert words in done.stdout


MISTYPED = (
    (
        "MLXTP_SPECULATION=sometimes node",
        "MLXTP_SPECULATION: 'sometimes' is not one of auto, off, lookup, mtp, draft",
    ),
    ("demo --ranks 5", "--ranks: one machine runs 1 to 4 ranks, not 5"),
    ("demo --replicas 2 --ranks 2", "with --replicas each agent has one rank; omit --ranks"),
    ("node --http 52415", "--http: '52415' is not HOST:PORT"),
    ("node --api-keys some", "--api-keys: 'some' is not one of auto, always, never"),
    ("node --allowed-host http://x", "--allowed-host: 'http://x' is not a name or address"),
    ("node --allowed-origin x", "--allowed-origin: 'x' is not an origin, such as http://localhost:3000"),
    ("node --http-cert x.pem", "name the other with --http-key"),
    ("node --parallel perhaps", "--parallel: 'perhaps' is not one of auto, tensor, pipeline"),
    ("node --max-context many", "--max-context: 'many' is not a number of tokens"),
    ("node --kv-bits 5", "--kv-bits: '5' is not one of 0, 4, 8"),
    ("node --kv-bytes lots", "--kv-bytes: 'lots' is not a number of bytes, such as 500MB"),
    ("node --cache-disk much", "--cache-disk: 'much' is not a number of bytes, such as 500MB"),
    (
        "node --cache-disk 999999TB",
        "--cache-disk: '999999TB' is more than any machine has; 1024TiB is the most",
    ),
)
"""Commands that are refused before anything starts, some with a variable."""


@pytest.mark.parametrize(("typed", "words"), MISTYPED)
def test_a_mistake_is_answered_in_the_words_of_its_maker(tmp_path: Path, typed: str, words: str) -> None:
    variables = dict(word.split("=") for word in typed.split() if word.startswith("MLXTP_"))
    command = [word for word in typed.split() if not word.startswith("MLXTP_")]
    refused = CliRunner().invoke(main.app, [*command, "--home", str(tmp_path)], env=alone() | variables)
    assert isinstance(refused.exception, SystemExit)
    assert refused.exit_code != 0
    assert words in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("node", "--http", "192.0.2.1:0"), "192.0.2.1 is not an address of this Mac"),
        (("demo", "--model", "[/no]/such"), "[/no]/such is neither a folder"),
        pytest.param(
            ("node", "--http-cert", "x.pem", "--http-key", "y.pem"),
            "--http-cert x.pem: No such file",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            ("node", "--model", "/no/such/folder"),
            "neither a folder nor an id on the Hub",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            ("node", "--draft-model", "/no/such/draft"),
            "/no/such/draft is neither a folder nor an id",
            marks=pytest.mark.chaos,
        ),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_served(
    tmp_path: Path, args: tuple[str, ...], words: str
) -> None:
    where = () if "--http" in args else ANY_PORT
    refused = mlxtp(*args, *where, "--home", str(tmp_path))
    assert refused.returncode != 0
    assert words in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--max-context", "15"), "exceed the model's context of 15"),
        pytest.param(
            ("--kv-bytes", "10KB"), "the rank with the least memory has room for", marks=pytest.mark.chaos
        ),
    ],
)
def test_what_the_model_cannot_do_is_said_at_once_and_not_tried_again(
    tmp_path: Path, args: tuple[str, ...], words: str
) -> None:
    """The first forwards of every model need some room."""
    refused = mlxtp("node", *args, "--home", str(tmp_path), *ANY_PORT)
    assert refused.returncode == 1, refused.stderr
    said = " ".join(refused.stderr.split())
    assert words in said
    assert "next one in" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("args", "typed", "variable", "words"),
    [
        (("--join", "-"), "TYPED\n", "VARIABLE-VARIABLE", "the join token has 5 characters"),
        pytest.param((), "", "VARIABLE", "the join token has 8 characters", marks=pytest.mark.chaos),
        pytest.param(
            ("--join", "-"), "", "", "--join -: there is no token on standard input", marks=pytest.mark.chaos
        ),
    ],
)
def test_a_join_token_that_is_not_in_the_list_of_processes(
    tmp_path: Path, args: tuple[str, ...], typed: str, variable: str, words: str
) -> None:
    where = ("--control", "127.0.0.1:0", "--no-discovery", "--home", str(tmp_path))
    refused = mlxtp("node", *args, *ANY_PORT, *where, typed=typed, MLXTP_ALONE="", MLXTP_JOIN=variable)
    assert words in " ".join(refused.stderr.split())
    assert refused.returncode == 1


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = mlxtp("node", "--http", f"127.0.0.1:{port}", "--home", str(tmp_path))
    assert refused.returncode == 1
    assert f"127.0.0.1 port {port} is in use" in " ".join(refused.stderr.split())


def test_a_terminal_without_utf_8_and_a_reader_that_leaves(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "demo", "--once", "--ranks", "1", "--home", str(tmp_path), *ANY_PORT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert b"1 rank" in process.stdout.readline()
    process.stdout.close()
    complaints = process.stderr.read()
    assert process.wait(START_S) == 1
    assert b"Traceback" not in complaints
    assert rank_processes(tmp_path) == []


@contextlib.contextmanager
def node(home: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `mlxtp node` and the URL it printed. Killed if the test leaves it running."""
    process = subprocess.Popen(
        [*COMMAND, "node", "--home", str(home), *ANY_PORT, *args],
        env=alone(),
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        for line in process.stderr:
            if "ready" in line:
                break
        else:
            pytest.fail("the node ended before it was ready")
        yield process, line.split(" at ")[1].strip().removesuffix("/v1")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(each, marks=pytest.mark.chaos) for each in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_a_node_serves_until_it_is_told_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    with node(tmp_path, "--ranks", "1") as (process, url):
        body = {"messages": [{"role": "user", "content": f"Repeat exactly: {ORACLE}"}], "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S).json()
        assert answer["choices"][0]["message"]["content"] == ORACLE

        second = mlxtp("node", "--home", str(tmp_path), *ANY_PORT)
        assert second.returncode == 1
        assert "another mlxtp node uses" in " ".join(second.stderr.split())

        process.send_signal(number)
        assert process.wait(WAIT_S) == 0
    until(lambda: not rank_processes(tmp_path), "rank processes to be gone")


def test_a_key_learns_nothing_of_another_one_s_prompt(tmp_path: Path) -> None:
    one, other = (KeyFile(tmp_path).create(name, 0, 1.0)[1] for name in ("one", "other"))
    with node(tmp_path, "--ranks", "1") as (process, url):

        def cached(key: str) -> int:
            body = {"messages": [{"role": "user", "content": "My PIN is 4711." * 9}], "max_tokens": 4}
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S)
            found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert cached(one) < 16 < cached(one)
        assert cached(other) < 16 < cached(other)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


SETTINGS = (
    *("--max-context", "200", "--kv-bytes", "5MB", "--draft-model", "tiny", "--speculation", "auto"),
    "--no-keep-warm",
)


@pytest.mark.group
def test_what_is_set_reaches_the_ranks(tmp_path: Path) -> None:
    with node(tmp_path, "--ranks", "2", *SETTINGS) as (process, url):

        def ask(**fields: object) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": f"Repeat exactly: {ORACLE}"}], "temperature": 0}
            return httpx.post(f"{url}/v1/chat/completions", json=body | fields, timeout=WAIT_S)

        answer = ask(max_tokens=64).json()
        assert answer["choices"][0]["message"]["content"] == ORACLE
        home = ("--home", str(tmp_path))
        assert mlxtp("chat", *home, typed=f"Repeat exactly: {ORACLE}").stdout == f"{ORACLE}\n"
        started_with = json.loads(mlxtp("config", "show", "--json", *home).stdout)["agent"]
        assert started_with["max_context"] == {"value": 200, "origin": "--max-context"}
        assert started_with["keep_warm"] == {"value": False, "origin": "--no-keep-warm"}
        assert "alone" not in started_with  # which both have from the variable
        refused = ask(messages=[{"role": "user", "content": "hello " * 300}])
        assert refused.status_code == 400
        assert "maximum context length is 200 tokens" in refused.json()["error"]["message"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(("left", "says"), [(False, True), (True, False)])
def test_a_mac_that_was_removed_hears_what_happened_and_what_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left: bool, says: bool
) -> None:
    """One that left by itself knows."""
    store = Store(tmp_path)
    store.found_cluster()

    @contextlib.asynccontextmanager
    async def ended(*_: object) -> AsyncIterator[Agent]:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if left:
            store.leave()
        over.set_result(None)
        supervisor = SimpleNamespace(status=SimpleNamespace(state=None))
        scope = SimpleNamespace(model=SimpleNamespace(problem=""))
        groups = SimpleNamespace(shown=SimpleNamespace(supervisor=supervisor, scope=scope, unplanned=""))
        other: Any = SimpleNamespace(over=asyncio.Event())
        parts: Any = SimpleNamespace(node=SimpleNamespace(over=over, alone=False), groups=groups)
        yield Agent("", other, other, parts)

    monkeypatch.setattr("mlxtp.agent.running_agent", ended)
    settings = resolve_settings({"home": tmp_path}, {})
    with caplog.at_level(logging.INFO, logger="mlxtp"):
        asyncio.run(main._node(settings))
    words = ("removed this Mac from its cluster", "`mlxtp cluster leave`", "`mlxtp node --join TOKEN`")
    assert all((word in caplog.text) is says for word in words)
    assert "no longer belongs to a cluster" in caplog.text


def test_a_demo_without_a_gpu_has_no_kernels_built_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "restored by the end of this test")
    monkeypatch.delenv("MLX_DISABLE_COMPILE")
    found: list[str | None] = []

    async def run(*_: object, **__: object) -> None:
        found.append(os.environ.get("MLX_DISABLE_COMPILE"))

    monkeypatch.setattr("mlxtp.cli.demo.run", run)
    assert CliRunner().invoke(main.app, ["demo", "--home", str(tmp_path)]).exit_code == 0
    assert found == [None if sys.platform == "darwin" else "1"]


def test_a_folder_of_models_that_is_not_there_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def nothing(_: object) -> None:
        pass

    monkeypatch.setattr(main, "_node", nothing)
    folders = ("--model-folder", f"{tmp_path}/nowhere", "--model-folder", str(tmp_path))
    assert CliRunner().invoke(main.app, ["node", "--home", str(tmp_path), *folders]).exit_code == 0
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [f"--model-folder {tmp_path}/nowhere: the folder does not exist"]


def test_a_node_logs_json_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "node", "--home", str(tmp_path), *ANY_PORT, "--log-format", "json"],
        env=alone() | {"MLXTP_MODLE": "x"},
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    lines: list[dict[str, Any]] = []

    def read_until(found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        for text in process.stderr:
            lines.append(json.loads(text))
            if found(lines[-1]):
                return lines[-1]
        pytest.fail(f"the node ended: {lines}")

    try:
        ready = read_until(lambda line: line["message"].startswith("ready"))
        warned = [line["message"] for line in lines if line["level"] == "warning"]
        assert "MLXTP_MODLE is unknown; did you mean MLXTP_MODEL?" in warned
        url = ready["message"].split(" at ")[1].removesuffix("/v1")
        headers = {"x-request-id": "from-a-test"}
        body = {"messages": [{"role": "user", "content": f"Repeat exactly: {ORACLE}"}]}
        httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S)
        asked = read_until(lambda line: "status" in line)
        assert (asked["request_id"], asked["status"], asked["epoch"]) == ("from-a-test", 200, 1)
        assert asked["generated_tokens"] > asked["first_token_s"] > 0
        os.kill(rank_processes(tmp_path)[0], signal.SIGKILL)
        ended = read_until(lambda line: "ended" in line["message"])
        assert (ended["level"], ended["epoch"]) == ("warning", 1)
        until(lambda: httpx.get(f"{url}/health").json()["epoch"] == 2, "the next epoch")
        until(lambda: httpx.get(f"{url}/health").status_code == 200, "the next group")
        metrics = httpx.get(f"{url}/metrics").text
        assert 'mlxtp_epochs_ended_total{code="rank_lost"} 1.0' in metrics
        assert "mlxtp_recovery_seconds_count 1.0" in metrics
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=WAIT_S)
        assert all(json.loads(line)["level"] for line in rest.splitlines())
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
    assert process.returncode == 0
    assert ORACLE not in json.dumps(lines)
