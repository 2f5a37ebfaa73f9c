"""Ranks import neither transformers and the Hub nor messages of agents; later code gets the real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ..live_cluster import Cluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMES = ("transformers", "tokenizers", "huggingface_hub", "cryptography", "mlxtp.wire.cluster_messages")
HEAVY = f"[name for name in {NAMES} if name in sys.modules]"


def run(code: str) -> str:
    """In a new process."""
    code = f"import sys\nfrom mlxtp.engine import mlx_compat\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_models_are_there_and_nothing_that_only_agents_need() -> None:
    code = "mlx_compat.import_mlx_lm(); import mlx_lm.models.llama; from mlxtp.engine import executor, worker"
    assert run(f"{code}; print({HEAVY})") == "[]"


def test_a_process_that_compiles_grammars_has_neither_messages_nor_mlx() -> None:
    loaded = "{'mlxtp.wire.messages', 'mlx', 'asyncio'} & set(sys.modules)"
    assert run(f"from mlxtp.engine import grammar; print({loaded})") == "set()"


def test_who_needs_them_later_gets_the_real_ones_and_what_is_not_there_says_so() -> None:
    code = """
mlx_compat.import_mlx_lm()
try:
    import mlx_lm.utils
    mlx_lm.utils.load("x")
except RuntimeError as error:
    print(error)
from transformers import PreTrainedTokenizer
from huggingface_hub import snapshot_download
from mlx_lm.tokenizer_utils import TokenizerWrapper
print(PreTrainedTokenizer.from_pretrained.__name__, snapshot_download.__name__, TokenizerWrapper.__mro__)
"""
    said, found = run(code).splitlines()
    assert said == "a rank used huggingface_hub.snapshot_download, which only agents load"
    assert "Absent" not in found


def test_an_mlx_lm_that_needs_more_is_imported_as_a_whole() -> None:
    code = f"""
mlx_compat._ABSENT["transformers"] = ()
mlx_compat.import_mlx_lm()
import mlx_lm.models.llama
from mlx_lm.utils import load_model, TokenizerWrapper
print({HEAVY}, TokenizerWrapper.__mro__[-2].__name__)
"""
    assert run(code) == "['transformers', 'tokenizers', 'huggingface_hub'] TokenizerWrapper"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for the libraries of a process")
def test_a_rank_that_has_answered_has_loaded_no_tokenizer(two_ranks: Cluster) -> None:
    assert two_ranks.content("Repeat exactly: PANDA-42") == "PANDA-42"
    for pid in two_ranks.pids():
        libraries = [each.path for each in psutil.Process(pid).memory_maps()]
        assert any("/mlx/" in path for path in libraries)
        assert not [path for path in libraries if "/tokenizers/" in path]
