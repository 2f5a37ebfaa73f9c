"""Golden proof: compares a model's answers to fixed prompts with its earlier answers.

A fabric or build that computes wrong values may still pass the test of its collectives. So after each load
the group answers greedily. This machine compares the tokens with its first ones for the same model, machines,
fabric, versions and settings. If they differ twice, without a near-tie, the group computes wrong values.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from ..identity.private_files import write_whole
from ..model_files import fingerprint, table

SelfTestTokens = tuple[tuple[int, ...], ...]  #: One tuple of tokens per prompt.
FILE = "golden.json"
PROMPTS = 4
PROMPT_TOKENS = 12
#: Tokens of an answer: few, because a long answer soon repeats itself and proves nothing new.
ANSWER_TOKENS = 4
FIXED_ORDER_BYTES = 32 * 1024  #: mlx/distributed/jaccl/mesh.cpp
NEAR_TIE = 0.25  #: natural logarithm of the ratio of two tokens' probabilities
_STRIDE = 7919  # a prime, so that the prompts visit the whole vocabulary


def prompts(vocabulary: int, tokens: int = PROMPT_TOKENS) -> list[tuple[int, ...]]:
    walk = [i * _STRIDE % vocabulary for i in range(PROMPTS * PROMPT_TOKENS)]
    return [tuple(walk[i::PROMPTS][:tokens]) for i in range(PROMPTS)]


def prompt_tokens(row_bytes: int, *, mesh: bool) -> int:
    """Return the most tokens of a prompt whose sums (`row_bytes` a token, 0: unknown) have a fixed order.

    A JACCL `mesh` of three or more ranks sums more than FIXED_ORDER_BYTES in order of arrival.
    """
    return max(min(PROMPT_TOKENS, FIXED_ORDER_BYTES // row_bytes), 1) if mesh and row_bytes else PROMPT_TOKENS


def key(folder: Path, group: Mapping[str, object], settings: Mapping[str, object]) -> str:
    """Return the key for kept answers. `group`: its machines in rank order, and its fabric."""
    parts: dict[str, object] = {
        "model": fingerprint(folder),
        # On macOS the version names the chip, too.
        "machine": f"{platform.system()} {platform.machine()} {platform.version()}",
        **{package: version(package) for package in ("mlxtp", "mlx", "mlx-lm")},
        **group,
        **settings,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def kept(path: Path, key: str, answers: SelfTestTokens) -> SelfTestTokens:
    """Return the answers that `path` keeps under `key`; if it has none, keep and return `answers`."""
    known: dict[str, object] = {}
    with suppress(OSError, ValueError):
        known = table(path)
    found = known.get(key)
    if isinstance(found, list) and list(map(len, found)) == list(map(len, answers)):
        return tuple(map(tuple, found))
    write_whole(path, json.dumps(known | {key: answers}).encode())
    return answers


def differences(
    prompts: Sequence[tuple[int, ...]], before: SelfTestTokens, now: SelfTestTokens
) -> list[tuple[tuple[int, ...], int, int]]:
    """Return, for each answer that differs: the tokens before the difference, then the old and new token."""
    found = []
    for prompt, one, other in zip(prompts, before, now, strict=True):
        at = next((at for at, pair in enumerate(zip(one, other, strict=True)) if len(set(pair)) > 1), None)
        if at is not None:
            found.append((prompt + one[:at], one[at], other[at]))
    return found


def is_near_tie(top: Sequence[tuple[int, float]], one: int, other: int) -> bool:
    """Return True if the two tokens are the top two, with nearly equal log-probabilities."""
    (first, likely), (second, less) = sorted(top, key=lambda each: -each[1])[:2]
    return {first, second} == {one, other} and likely - less < NEAR_TIE
