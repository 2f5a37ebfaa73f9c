"""Facts of a model's weights, from parts of its files: their identity, and if an MTP head is among them.

Reads them without MLX.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from .model_config import Config, mtp_place
from .tokenizer_file import MAX_CONFIG_BYTES, MAX_TEXT_BYTES, text_of

_SAMPLE_BYTES = 1 << 20
MTP_FILE = "mtp.safetensors"  #: for an MTP head that is not in the model's own files


def has_mtp_head(folder: Path, config: Config) -> bool:
    """Return True if the folder's files name tensors of an MTP head. Raises OSError, ValueError."""
    place = mtp_place(config)
    if not place:
        return False
    if (folder / MTP_FILE).is_file():
        return True
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return any(name.startswith(place) for name in json.loads(text_of(index))["weight_map"])
    whole = folder / "model.safetensors"
    if not whole.is_file():
        return False
    with whole.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, MAX_TEXT_BYTES))
    return f'"{place}'.encode() in header


def fingerprint(folder: Path) -> str:
    """Return a hash of the model's configuration, and of the size and parts of every weight file.

    The beginning of each file holds the names and shapes of its tensors. Hashing all of a large model would
    take minutes. Its beginning, middle and end distinguish two models; they do not reveal a deliberate
    forgery.
    """
    with (folder / "config.json").open("rb") as file:
        digest = hashlib.sha256(file.read(MAX_CONFIG_BYTES))
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for start in (0, max(size // 2, 0), max(size - _SAMPLE_BYTES, 0)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
