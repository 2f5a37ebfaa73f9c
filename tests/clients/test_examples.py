"""The examples, run as people run them, against two live ranks; and what programs are known to ask."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlxtp.cli.launch import Served, claude
from mlxtp.values import DEFAULT_HTTP

from ..live_cluster import WAIT_S, Cluster
from ..pages import ROOT, blocks
from .test_openai import SECRET

CLIENTS = Path(__file__).parents[2] / "examples" / "clients"
HERE = f"http://{DEFAULT_HTTP}"
WEATHER = (
    r"weather\('(Lisbon|Oslo|Rome)'\) = '\d+ degrees, \w+'\n"
    r".+"  # the model's own words
)
VERDICT = r"\{'wet': (True|False)\}"
SAID = {
    "openai_chat.py": {
        "answer": SECRET, "stream": rf"{SECRET}\n\d+ tokens", "tools": WEATHER, "structured": VERDICT,
    },
    "anthropic_messages.py": {
        "answer": SECRET, "stream": rf"{SECRET}\n\d+ tokens", "tools": WEATHER,
        "count": r"\d+ tokens of prompt",
    },
    "ollama_chat.py": {
        "models": "tiny", "answer": SECRET, "stream": rf"{SECRET}\n\d+ tokens", "tools": r".+",
        "structured": VERDICT,
    },
    "langchain_chat.py": {
        "answer": SECRET, "stream": rf"{SECRET}\n\d+ tokens", "tools": WEATHER,
        "structured": r"wet=(True|False)",
    },
}  # fmt: skip
"""The text below each heading."""


def run(command: list[str], url: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MLXTP_URL": url}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def sections(command: list[str], url: str) -> dict[str, str]:
    """Return the output of a script, by its headings. Fails unless it went well."""
    done = run(command, url)
    assert (done.returncode, done.stderr) == (0, ""), done
    before, *parts = re.split(r"^== (.+)\n", done.stdout, flags=re.MULTILINE)
    assert before == ""
    return {heading: text.strip() for heading, text in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize(
    "script",
    [pytest.param(each, marks=() if each == "openai_chat.py" else pytest.mark.chaos) for each in SAID],
)
def test_a_script_prints_what_it_should(two_ranks: Cluster, script: str) -> None:
    if script.startswith("langchain") and importlib.util.find_spec("langchain_openai") is None:
        pytest.skip("langchain-openai is not installed: pip install 'mlxtp[examples]'")
    found = sections([sys.executable, str(CLIENTS / script)], two_ranks.url)
    assert found.keys() == SAID[script].keys()
    for heading, text in found.items():
        assert re.fullmatch(SAID[script][heading], text, flags=re.DOTALL), (heading, text)


def test_the_endpoint_from_a_shell(two_ranks: Cluster) -> None:
    found = sections(["/bin/sh", str(CLIENTS / "curl.sh")], two_ranks.url)
    models, answer, stream, call, structured, error = found.values()
    assert json.loads(models)["data"][0]["id"] == "tiny"
    assert json.loads(answer)["choices"][0]["message"]["content"] == SECRET
    *chunks, done = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    *deltas, usage = map(json.loads, chunks)
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in deltas) == SECRET
    assert usage["usage"]["completion_tokens"] > 5
    function = json.loads(call)["choices"][0]["message"]["tool_calls"][0]["function"]
    assert function["name"] == "weather"
    assert json.loads(function["arguments"])["city"] in ("Lisbon", "Oslo", "Rome")
    assert json.loads(json.loads(structured)["choices"][0]["message"]["content"])["wet"] in (True, False)
    assert json.loads(error)["error"]["code"] == "model_not_found"


def test_what_the_readme_asks_is_answered(two_ranks: Cluster) -> None:
    typed = [command for block in blocks(ROOT / "README.md") for command in block.commands]
    (curl,) = [command for command in typed if command[0] == "curl"]
    asked = [word.replace("http://localhost:52415", two_ranks.url) for word in curl]
    done = subprocess.run([*asked, "--silent"], capture_output=True, timeout=WAIT_S, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == SECRET


PROGRAMS = [block.text for block in blocks(ROOT / "docs" / "api.md") if block.info == "python"]


@pytest.mark.parametrize("program", PROGRAMS, ids=["openai", "ollama"])
def test_the_programs_of_the_documents_count(two_ranks: Cluster, program: str) -> None:
    done = run([sys.executable, "-c", program.replace(HERE, two_ranks.url)], two_ranks.url)
    assert re.findall(r"\d+", done.stdout) == [str(number) for number in range(1, 21)], done


def test_a_script_says_when_no_server_replies() -> None:
    """On a machine where nothing listens at the port."""
    done = run(["/bin/sh", str(CLIENTS / "curl.sh")], "http://127.0.0.1:9")
    assert done.returncode != 0
    assert "curl:" in done.stderr


def test_the_settings_of_zed() -> None:
    wanted = {
        "name": "default",
        "display_name": "mlxtp",
        "max_tokens": 131072,
        "max_output_tokens": 8192,
        "capabilities": dict.fromkeys(("tools", "parallel_tool_calls", "chat_completions"), True)
        | dict.fromkeys(("images", "prompt_cache_key"), False),
    }
    provider = {"api_url": f"{HERE}/v1", "available_models": [wanted]}
    assert json.loads((CLIENTS / "zed.settings.json").read_text()) == {
        "language_models": {"openai_compatible": {"mlxtp": provider}},
        "agent": {"default_model": {"provider": "mlxtp", "model": "default"}},
    }
    assert "MLXTP_API_KEY" in (CLIENTS / "APPS.md").read_text()  # where Zed looks for the key


def test_the_settings_of_continue() -> None:
    openai, ollama = (
        {"name": name, "provider": provider, "model": "default", "apiBase": base, "roles": roles}
        for name, provider, base, roles in (
            ("mlxtp", "openai", f"{HERE}/v1", ["chat", "edit", "apply"]),
            ("mlxtp (Ollama API)", "ollama", HERE, ["chat"]),
        )
    )
    most: Any = {"contextLength": 131072, "maxTokens": 8192}
    openai |= {"apiKey": "none", "capabilities": ["tool_use"], "defaultCompletionOptions": most}
    assert yaml.safe_load((CLIENTS / "continue.config.yaml").read_text()) == {
        "name": "mlxtp",
        "version": "0.0.1",
        "schema": "v1",
        "models": [openai, ollama],
    }


def test_the_settings_of_open_webui() -> None:
    """They are the same in the file and in the guide."""
    compose = yaml.safe_load((CLIENTS / "open_webui.compose.yaml").read_text())
    service = compose["services"]["open-webui"]
    docker = HERE.replace("127.0.0.1", "host.docker.internal")
    assert service["environment"] == {
        "OPENAI_API_BASE_URL": f"${{MLXTP_URL:-{docker}}}/v1",
        "OPENAI_API_KEY": "${MLXTP_KEY:-none}",
        "ENABLE_OLLAMA_API": "false",
    }
    guide = (CLIENTS / "APPS.md").read_text()
    for setting in (f"OPENAI_API_BASE_URL={docker}/v1", "OPENAI_API_KEY=none", "ENABLE_OLLAMA_API=false"):
        assert f"-e {setting}" in guide
    assert service["image"] in guide
    assert service["volumes"] == ["open-webui:/app/backend/data"]
    assert compose["volumes"].keys() == {"open-webui"}


def test_the_settings_of_claude_code_are_those_of_launch() -> None:
    settings = json.loads((CLIENTS / "claude_code.settings.json").read_text())
    assert settings.keys() == {"env"}
    environment = settings["env"]
    served = Served(HERE, environment["ANTHROPIC_MODEL"], int(environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]))
    assert environment == {
        name: value for name, value in claude(served).variables.items() if value is not None
    }


def test_every_example_is_in_the_table() -> None:
    table = (CLIENTS.parent / "README.md").read_text()
    guide = (CLIENTS / "APPS.md").read_text()
    for path in CLIENTS.iterdir():
        assert f"clients/{path.name})" in table or f"]({path.name})" in guide, path


def test_open_webui_in_docker_comes_by_a_name_that_has_to_be_allowed(two_ranks: Cluster) -> None:
    """Hence `--allowed-host` in the guide. It shows what stands in `error`, so there has to be one."""
    refused = two_ranks.client.get("/v1/models", headers={"Host": "host.docker.internal:52415"})
    assert refused.status_code in (403, 421)
    assert "host.docker.internal" in refused.json()["error"]["message"]
    assert "--allowed-host host.docker.internal" in (CLIENTS / "APPS.md").read_text()
