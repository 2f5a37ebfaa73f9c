"""Completing what is typed, by the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlxtp.api.api_keys import KeyFile
from mlxtp.cli.main import app
from mlxtp.cli.shell_completion import SHELLS

from ..cluster import START_S

BASH = """
eval "$(mlxtp completion bash)"
for words in "$@"; do
  COMP_WORDS=($words) COMP_CWORD=$(( $(wc -w <<< "$words") - 1 ))
  _mlxtp_completion mlxtp
  echo "${COMPREPLY[*]}"
done
"""


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
    asked = (
        "mlxtp serve",
        "mlxtp serve t",
        "mlxtp key revoke l",
        "mlxtp node --kv",
        "mlxtp cluster remove x",
        "mlxtp remove t",
        "mlxtp remove o",
        "mlxtp pull o",
        "mlxtp node --backend j",
        "mlxtp node --api-keys a",
        "mlxtp plan --spread a",
    )
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", *asked],
        env=environment, capture_output=True, text=True, timeout=START_S, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        *("serve", "tiny", "laptop", "--kv-bits --kv-bytes", ""),
        *("", "one/half one/whole", "one/half one/whole"),
        *("jaccl", "auto always", "auto all"),
    ]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("shell", SHELLS)
def test_what_a_shell_is_given_is_a_script_of_its_own(shell: str) -> None:
    script = CliRunner().invoke(app, ["completion", shell]).stdout
    assert f"complete_{shell}" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, timeout=START_S, check=True)


def test_a_shell_that_is_not_known() -> None:
    refused = CliRunner().invoke(app, ["completion", "csh"])
    assert refused.exit_code == 2
    assert "'csh' is not one of bash, zsh, fish" in refused.stderr
