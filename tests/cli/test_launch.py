"""`mlxtp launch`, as a user types it, with a program that says what it was given."""

from __future__ import annotations

import fcntl
import json
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from typer.testing import CliRunner

from mlxtp.admin.handlers import announced
from mlxtp.api.api_keys import KeyFile
from mlxtp.api.app import create_app
from mlxtp.api.backend import GREEDY, ModelInfo, StoredModelInfo
from mlxtp.api.endpoint import open_endpoint
from mlxtp.cli import bench
from mlxtp.cli.launch import PROGRAMS, Program, Served, Setup, as_shell, changed, output_limit
from mlxtp.cli.main import app
from mlxtp.config import Settings
from mlxtp.verbs import Status, Verb

from ..api.test_admin import KEY, FakeAdmin
from ..live_cluster import WAIT_S, until
from .test_cluster import served

pytestmark = [pytest.mark.slow, pytest.mark.fault]

MODEL = "org/model-70b"
STATUS = {"state": "ready", "reason": "", "model": MODEL, "deployments": []}
SERVED = Served("http://127.0.0.1:52415", "some/model", 131_072, "a-key", "/home/https-cert.pem")
TELLS = f"""#!{sys.executable}
import json, os, sys
print(json.dumps({{"arguments": sys.argv, "environment": dict(os.environ)}}))
sys.exit(7)
"""


class Backend:
    """Serves one model, or none, and could load another; no client asks it anything."""

    def __init__(self) -> None:
        self.served: tuple[ModelInfo, ...] = (
            ModelInfo(MODEL, ("model-70b",), Path(), 65_536, 1234, (1,), 512, GREEDY, ("tools", "reasoning")),
        )

    def models(self) -> tuple[ModelInfo, ...]:
        return self.served

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        """Others that are listed too, and would have to be loaded first."""
        return (StoredModelInfo("org/another", Path(), 512, 1234),)


class Admin(FakeAdmin):
    said: Mapping[str, object] = STATUS
    starting: tuple[str, ...] = ()
    """Its first words, one after the other."""

    async def carry_out(self, verb: Verb) -> Mapping[str, object]:
        assert isinstance(verb, Status)
        if not self.starting:
            return self.said
        first, *rest = self.starting
        self.starting = tuple(rest)
        return STATUS | {"state": "loading", "model": "", "starting": first}


class Agent:
    """A home whose agent answers as its settings say, and a folder of programs."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.home, self.programs = folder / "home", folder / "bin"
        self.home.mkdir()
        self.programs.mkdir()
        self.backend, self.admin = Backend(), Admin()
        self._settings = Settings(self.home, "127.0.0.1", 0, 1, "tiny", **settings)
        self._open = ExitStack()

    def __enter__(self) -> Agent:
        endpoint = self._open.enter_context(open_endpoint(self._settings))
        self.url = endpoint.url
        app = create_app(cast(Any, self.backend), admin=self.admin, access=endpoint.access(KEY))
        tls = endpoint.tls.context if endpoint.tls is not None else None
        self._open.enter_context(served(app, endpoint.sock, tls))
        self._open.enter_context(announced(self.home, endpoint.url, KEY, endpoint.certificate))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def install(self, name: str = "claude", folder: Path | None = None) -> Path:
        program = (folder or self.programs) / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(TELLS)
        program.chmod(0o755)
        return program

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """`mlxtp launch` with only `programs` on its PATH and this home."""
        given = {"PATH": str(self.programs), "HOME": str(self.home), "MLXTP_HOME": str(self.home)}
        return subprocess.Popen(
            [sys.executable, "-m", "mlxtp", "launch", *arguments],
            env=given | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def launch(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Start it and wait for its end."""
        with self.start(*arguments, **environment) as process:
            try:
                stdout, stderr = process.communicate(timeout=WAIT_S)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path) as found:
        yield found


def refusal(done: subprocess.CompletedProcess[str], status: int = 1) -> str:
    """Return its words, once it is clear that it refused and started nothing."""
    assert (done.returncode, done.stdout) == (status, ""), done
    return " ".join(done.stderr.split())


def test_claude_gets_arguments_and_environment_and_has_the_last_word(agent: Agent) -> None:
    agent.install()
    done = agent.launch(
        "claude", "--", "-p", "two words", "--print",
        ANTHROPIC_API_KEY="sk-ant-real", CLAUDE_CODE_USE_BEDROCK="1", ANTHROPIC_MODEL="opus", KEPT="yes",
    )  # fmt: skip
    assert done.returncode == 7  # the program's own status
    assert done.stderr.startswith(
        f"mlxtp: claude uses {MODEL} (65,536 tokens) at {agent.url}\n  set: ANTHROPIC_BASE_URL "
    )
    assert "\n  unset: ANTHROPIC_API_KEY " in done.stderr
    told = json.loads(done.stdout)
    assert told["arguments"][1:] == ["-p", "two words", "--print"]
    environment = told["environment"]
    assert environment["ANTHROPIC_BASE_URL"] == agent.url  # no /v1: Claude Code puts it there
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert environment["KEPT"] == "yes"
    models = {name for name, value in environment.items() if value == MODEL}
    assert models == {
        "ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    }  # fmt: skip
    assert environment["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "8192"
    assert not environment.keys() & {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK"}


def test_codex_finds_its_model_in_a_catalog(agent: Agent) -> None:
    agent.install("codex")
    done = agent.launch("codex", "--key", "a-key", "--", "exec", "-m", "other")
    told = json.loads(done.stdout)
    *set_, command, option, model = told["arguments"][1:]
    assert (command, option, model) == ("exec", "-m", "other")  # the user has the last word
    assert set_[::2] == ["-c"] * (len(set_) // 2)
    config = tomllib.loads("\n".join(set_[1::2]))
    provider = config["model_providers"][config["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == (f"{agent.url}/v1", "responses")
    assert told["environment"][provider["env_key"]] == "a-key"
    assert (config["model"], config["model_context_window"]) == (MODEL, 65_536)
    [listed] = json.loads(Path(config["model_catalog_json"]).read_text())["models"]
    assert (listed["slug"], listed["context_window"]) == (MODEL, 65_536)
    assert config["model_catalog_json"] in done.stderr


def test_opencode_gets_a_provider(agent: Agent) -> None:
    agent.install("opencode")
    told = json.loads(agent.launch("opencode", "--key", "a-key", "--", "run", "hello").stdout)
    assert told["arguments"][1:] == ["run", "hello"]
    config = json.loads(told["environment"]["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    assert model == MODEL
    options = config["provider"][provider]["options"]
    assert options["baseURL"] == f"{agent.url}/v1"
    assert told["environment"][options["apiKey"].removeprefix("{env:").removesuffix("}")] == "a-key"
    listed = config["provider"][provider]["models"][MODEL]
    assert listed["limit"] == {"context": 65_536, "output": 8192}
    assert (listed["tool_call"], listed["reasoning"]) == (True, True)  # as /v1/models has it


def test_aider_learns_the_context_from_a_file(agent: Agent) -> None:
    agent.install("aider")
    told = json.loads(agent.launch("aider", "--", "--message", "hello").stdout)
    assert told["arguments"][-2:] == ["--message", "hello"]
    assert told["environment"]["OPENAI_API_BASE"] == f"{agent.url}/v1"
    given = dict(zip(told["arguments"][1:], told["arguments"][2:], strict=False))
    listed = json.loads(Path(given["--model-metadata-file"]).read_text())[given["--model"]]
    assert given["--model"] == f"openai/{MODEL}"
    assert listed["max_input_tokens"] == 65_536


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("codex", "aider") else pytest.mark.chaos) for name in PROGRAMS],
)
def test_nothing_is_written_outside_of_the_home(tmp_path: Path, name: str) -> None:
    with Agent(tmp_path) as agent:
        agent.install(name)
        user = tmp_path / "user"
        user.mkdir()
        assert agent.launch(name, HOME=str(user)).returncode == 7
        assert list(user.iterdir()) == []
        written = {path.name for path in (agent.home / "launch").glob("*")}
        assert written == {file.name for file in PROGRAMS[name].setup(SERVED).files}


def test_what_is_printed_does_the_same_in_a_shell(agent: Agent) -> None:
    agent.install("aider")
    printed = agent.launch("aider", "--print")
    shell = subprocess.run(
        ["/bin/sh", "-c", f"{printed.stdout}aider --message 'two words'"],
        env={"PATH": str(agent.programs)}, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    launched = json.loads(agent.launch("aider", "--", "--message", "two words").stdout)
    assert json.loads(shell.stdout)["arguments"][1:] == launched["arguments"][1:]
    as_json = json.loads(agent.launch("aider", "--print", "--json").stdout)
    assert as_json["arguments"] == launched["arguments"][1:-2]
    assert as_json["files"] == [str(agent.home / "launch" / "aider-models.json")]
    printed = agent.launch("claude", "--print", "--key", "it's a key")
    assert (printed.returncode, printed.stderr) == (0, ""), "it need not be installed"
    shell = subprocess.run(
        ["/bin/sh", "-c", f"{printed.stdout}{agent.install()}"],
        env={"ANTHROPIC_API_KEY": "sk-ant-real"}, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    environment = json.loads(shell.stdout)["environment"]
    assert (environment["ANTHROPIC_AUTH_TOKEN"], environment["ANTHROPIC_BASE_URL"]) == (
        "it's a key",
        agent.url,
    )
    assert "ANTHROPIC_API_KEY" not in environment
    as_json = json.loads(agent.launch("claude", "--print", "--json", "--key", "it's a key").stdout)
    names = ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY")
    assert [as_json["variables"][name] for name in names] == ["it's a key", None]


@pytest.mark.parametrize(
    "place",
    [
        PROGRAMS["claude"].elsewhere[0],
        *(pytest.param(each, marks=pytest.mark.chaos) for each in PROGRAMS["claude"].elsewhere[1:]),
    ],
)
def test_claude_is_found_where_its_installers_put_it(agent: Agent, place: str) -> None:
    program = Path(place.replace("~", str(agent.home)))
    agent.install(folder=program.parent)
    assert json.loads(agent.launch("claude").stdout)["environment"]["ANTHROPIC_MODEL"] == MODEL


def test_a_model_with_too_little_room_is_started_with_a_word_of_warning(agent: Agent) -> None:
    agent.install()
    agent.backend.served = (ModelInfo(MODEL, (), Path(), 4096, 1234, (1,), 512, GREEDY),)
    done = agent.launch("claude")
    assert f"{MODEL} has a context of 4096 tokens, of which claude needs 65536 or more" in done.stderr
    assert json.loads(done.stdout)["environment"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"


def test_without_program_agent_or_model_it_says_what_to_do(agent: Agent, tmp_path: Path) -> None:
    unknown = refusal(agent.launch("vi"), 2)
    assert unknown == "mlxtp: vi is unknown; known programs: claude, codex, opencode, aider"
    assert refusal(agent.launch("claude")) == (
        "mlxtp: claude is not installed, or not on PATH; to install it, see "
        "https://code.claude.com/docs/en/setup"
    )
    agent.install()
    said = refusal(agent.launch("claude", "--home", str(tmp_path / "other")))
    assert said.startswith(f"mlxtp: no mlxtp node runs with home {tmp_path / 'other'}; start one with")
    agent.backend.served = ()
    assert "being replaced" in refusal(agent.launch("claude"))


@pytest.mark.parametrize(
    ("status", "why"),
    [
        pytest.param({"state": "idle", "reason": "", "model": ""}, "(idle)", marks=pytest.mark.chaos),
        ({"state": "failed", "reason": "rank 1 is gone", "model": ""}, "(failed: rank 1 is gone)"),
    ],
)
def test_without_a_model(agent: Agent, status: dict[str, str], why: str) -> None:
    agent.install()
    agent.admin.said = status
    said = refusal(agent.launch("claude"))
    assert said.startswith(f"mlxtp: no model is loaded {why}; `mlxtp serve MODEL` loads one")


def test_it_waits_for_a_model_that_is_on_its_way(agent: Agent) -> None:
    agent.install()
    agent.admin.starting = ("tiny is about to load", "tiny is loading (40 %)")
    done = agent.launch("claude")
    assert done.returncode == 7
    assert done.stderr.startswith("mlxtp is starting: tiny is about to load\nmlxtp: claude uses ")
    assert agent.admin.starting == ()


def test_it_waits_for_an_agent_that_has_no_address_yet(agent: Agent) -> None:
    agent.install()
    announced_, kept = agent.home / "agent.json", agent.home / "kept"
    announced_.rename(kept)
    with (agent.home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with agent.start("claude") as process:
            assert process.stderr.readline() == "mlxtp is starting: it has no address yet\n"
            kept.rename(announced_)
            assert process.stderr.readline().startswith("mlxtp: claude uses ")
            process.communicate(timeout=WAIT_S)
    assert process.returncode == 7


def test_where_a_key_is_asked_for(tmp_path: Path) -> None:
    with Agent(tmp_path, api_keys="always") as agent:
        agent.install()
        _, key = KeyFile(agent.home).create("laptop", 0, 1.0)
        asked = refusal(agent.launch("claude"))
        assert asked.startswith(
            "mlxtp: the endpoint requires an API key: give one with --key or in MLXTP_KEY"
        )
        wrong = refusal(agent.launch("claude", MLXTP_KEY=f"{key}x"))
        assert wrong.startswith("mlxtp: the endpoint refuses this API key")
        until(lambda: agent.launch("claude", MLXTP_KEY=key).returncode == 7, "the agent to see the new key")
        told = json.loads(agent.launch("claude", "--key", key, MLXTP_KEY="less").stdout)
    assert told["environment"]["ANTHROPIC_AUTH_TOKEN"] == key


def test_measuring_needs_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure", lambda served, *_: {"model": served.model})
    with Agent(tmp_path, api_keys="always") as agent:
        done = CliRunner().invoke(app, ["bench", "--json", "--home", str(agent.home)])
    assert json.loads(done.stdout) == {"model": MODEL}


def test_the_certificate_that_mlxtp_made_is_trusted(tmp_path: Path) -> None:
    """Claude Code is told where it lies; a client that trusts it and nothing else gets an answer."""
    with Agent(tmp_path, http_tls=True) as agent:
        agent.install()
        environment = json.loads(agent.launch("claude").stdout)["environment"]
        assert environment["ANTHROPIC_BASE_URL"] == agent.url
        assert agent.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=environment["NODE_EXTRA_CA_CERTS"])
        answer = httpx.get(f"{agent.url}/v1/models", verify=trusted, trust_env=False, timeout=WAIT_S)
    assert answer.json()["data"][0]["id"] == MODEL


def test_none_takes_a_variable_away() -> None:
    variables = {"A": "1", "B": None, "C": None}
    assert changed({"A": "0", "B": "0", "D": "0"}, variables) == {"A": "1", "D": "0"}
    program = Program("p", "", lambda _: Setup({}), 0)
    assert list(as_shell(program, Setup(variables))) == ["export A=1", "unset B", "unset C"]


@pytest.mark.parametrize(
    ("context", "limit"), [(131_072, 16_384), (1_000_000, 32_000), (32_768, 4096), (4096, 2048), (1, 1)]
)
def test_an_answer_gets_a_part_of_the_context(context: int, limit: int) -> None:
    assert output_limit(context) == limit


def test_every_program_is_described() -> None:
    for program in PROGRAMS.values():
        assert program.install.startswith("https://")
        setup = program.setup(SERVED)
        told = " ".join([*setup.arguments, *filter(None, setup.variables.values())])
        assert SERVED.url in told
        assert SERVED.model in told
        assert SERVED.certificate in setup.variables.values()
        assert SERVED.key in setup.variables.values()
