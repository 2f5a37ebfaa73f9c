"""The tokenizer process imports transformers without the source of every model. Other code gets the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LOAD = """
from mlxtp.config import embedded_model_path
from mlxtp.imports import LightPackage, import_tokenizers
from mlxtp.text.renderer import LocalRenderer
import sys
%s
import_tokenizers()
light = isinstance(sys.modules.get("transformers"), LightPackage)
tokenizer = LocalRenderer.load(embedded_model_path())._tokenizer
print(light, isinstance(sys.modules["transformers"], LightPackage))
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
print(isinstance(sys.modules["transformers"], LightPackage), isinstance(tokenizer, PreTrainedTokenizerFast))
print(AutoConfig.for_model("llama").model_type, AutoTokenizer.__name__)
"""


def run(before: str = "") -> list[str]:
    """Load the embedded model's tokenizer in a new process. Return what it printed."""
    command = [sys.executable, "-c", LOAD % before]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_packages_stay_light_until_code_needs_the_rest_of_them() -> None:
    assert run() == ["True True", "False True", "llama AutoTokenizer"]


def test_another_transformers_is_imported_as_a_whole() -> None:
    moved = "from mlxtp import imports as it; it._NAMES['AutoTokenizer'] = 'elsewhere'"
    assert run(moved) == ["False False", "False True", "llama AutoTokenizer"]
