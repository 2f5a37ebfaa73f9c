"""Completing what is typed, by the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from mlxtp.api.api_keys import KeyFile
from mlxtp.cli.main import app
from mlxtp.cli.options import SHELLS

from ..live_cluster import START_S

BASH = """
eval "$(mlxtp completion bash)"
for words in "$@"; do
  COMP_WORDS=($words) COMP_CWORD=$(( $(wc -w <<< "$words") - 1 ))
  _mlxtp_completion mlxtp
  echo "${COMPREPLY[*]}"
done
"""


@pytest.mark.slow
def test_a_shell_completes_commands_options_models_and_keys(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    KeyFile(tmp_path / "home").create("laptop", 0, time.time())
    for begun in ("one/half", "one/whole"):
        folder = tmp_path / "cache" / f"models--{begun.replace('/', '--')}" / ".mlxtp"
        folder.mkdir(parents=True)
        (folder / f"{'a' * 40}.json").touch()
    before = sorted(tmp_path.rglob("*"))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "MLXTP_HOME": str(tmp_path / "home"),
    }
    asked = ("mlxtp serve t", "mlxtp key revoke l", "mlxtp node --kv", "mlxtp remove o")
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", *asked],
        env=environment, capture_output=True, text=True, timeout=START_S, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["tiny", "laptop", "--kv-bits --kv-bytes", "one/half one/whole"]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("mlxtp serve", ["serve"]),
        ("mlxtp cluster remove x", []),
        ("mlxtp remove t", []),
        ("mlxtp pull o", ["one/half"]),
        ("mlxtp node --backend j", ["jaccl"]),
        ("mlxtp node --api-keys a", ["auto", "always"]),
        ("mlxtp plan --spread a", ["auto", "all"]),
    ],
)
def test_what_is_suggested_for_each_kind_of_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, suggested: list[str]
) -> None:
    (tmp_path / "models--one--half" / ".mlxtp").mkdir(parents=True)
    (tmp_path / "models--one--half" / ".mlxtp" / f"{'a' * 40}.json").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    environment = {
        "_MLXTP_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
        "MLXTP_HOME": str(tmp_path),
    }
    done = CliRunner().invoke(app, [], env=environment, prog_name="mlxtp")
    assert done.stdout.split() == suggested


@pytest.mark.parametrize("shell", SHELLS)
def test_what_a_shell_is_given_is_a_script_of_its_own(shell: str) -> None:
    script = CliRunner().invoke(app, ["completion", shell]).stdout
    assert f"complete_{shell}" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, timeout=START_S, check=True)
    refused = CliRunner().invoke(app, ["completion", f"c{shell}"])
    assert refused.exit_code == 2
    assert f"'c{shell}' is not one of bash, zsh, fish" in refused.stderr
