"""Completeness of a model's folder."""

from __future__ import annotations

import re
from pathlib import Path

from ..tokenizer_file import TIKTOKEN_FILE, table

_SHARD = re.compile(r".*-(\d+)-of-(\d+)\.safetensors")
#: Errors of a file that cannot be read, or holds no table.
READ_ERRORS = (OSError, ValueError, RecursionError)


def is_complete(folder: Path) -> bool:
    """Return True if configuration, tokenizer and all weights are in this folder. Reads the disk."""
    return not lacks(folder)


def lacks(folder: Path) -> str:
    """Return the missing parts of the model in this folder, in words; empty for none. Reads the disk."""
    try:
        missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
        if (folder / TIKTOKEN_FILE).is_file() and (folder / "tokenizer_config.json").is_file():
            missing = [name for name in missing if name != "tokenizer.json"]  # made from these two
        weights = {path.name for path in folder.glob("model*.safetensors") if path.is_file()}
        indices = list(folder.glob("*.safetensors.index.json"))
        wanted = {name for index in indices for name in table(index)["weight_map"].values()}
    except (*READ_ERRORS, LookupError, AttributeError):
        return "files that can be read"
    shards = [match for match in map(_SHARD.fullmatch, weights) if match]
    if not weights:
        missing.append("weights (model*.safetensors)")
    elif not wanted <= weights or any(int(shard[2]) != len(shards) for shard in shards):
        missing.append("some files of its weights")
    return " and ".join(missing)
