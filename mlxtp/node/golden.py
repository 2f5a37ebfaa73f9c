"""The golden proof: what a model says to fixed prompts, compared with what it said before.

A fabric or a build that computes wrong values may still form a group and prove its collectives. So after each
load the group answers fixed prompts, greedily, and the tokens' digest is compared with the one that this
machine kept for the same model, number of ranks, versions and settings. The first load keeps it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from ..errors import Code, GroupError

PROMPTS = 4
PROMPT_TOKENS = 12
ANSWER_TOKENS = 4
"""Few for each prompt: what a model says at length soon repeats itself and tells nothing new."""
_STRIDE = 7919  # a prime, so that the prompts visit the whole vocabulary
_SAMPLE_BYTES = 1 << 20


def prompts(vocabulary: int) -> list[tuple[int, ...]]:
    """The fixed prompts for a vocabulary of this size."""
    walk = [i * _STRIDE % vocabulary for i in range(PROMPTS * PROMPT_TOKENS)]
    return [tuple(walk[i::PROMPTS]) for i in range(PROMPTS)]


def fingerprint(folder: Path) -> str:
    """Which model this is: a hash of its configuration, and of the size and parts of every weight file.

    The beginning of each file holds the names and shapes of its tensors. Hashing all of a large model would
    take minutes; its beginning, middle and end tell two models apart, not a deliberate forgery.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for start in (0, max(size // 2, 0), max(size - _SAMPLE_BYTES, 0)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def key(folder: Path, world_size: int, settings: Mapping[str, object]) -> str:
    """Under what a digest is kept."""
    parts: dict[str, object] = {
        "model": fingerprint(folder),
        "world_size": world_size,
        "machine": f"{platform.system()} {platform.machine()}",
        **{package: version(package) for package in ("mlxtp", "mlx", "mlx-lm")},
        **settings,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def check(path: Path, key: str, tokens: tuple[int, ...]) -> bool:
    """Compare an answer with the one that `path` keeps under `key`; True when there was one.

    The first answer is kept. Raises GroupError (PROOF_FAILED) for another one than before.
    """
    kept = _read(path)
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    if (expected := kept.get(key)) is None:
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(kept | {key: digest}, indent=1))
        draft.replace(path)
        return False
    if expected != digest:
        raise GroupError(
            "golden proof failed: the group does not answer fixed prompts as it did before with this model. "
            "A link, memory or a build computes wrong values; if the machine was changed on purpose, "
            f"remove {path}",
            Code.PROOF_FAILED,
        )
    return True


def _read(path: Path) -> dict[str, str]:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
