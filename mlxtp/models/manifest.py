"""Manifest of a model: its files by size and hash; and the election of the member that seeds it. Pure.

A model on the Hub is called OWNER/NAME, or OWNER/NAME@REVISION: a branch, a tag or a commit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from typing import Any

from ..model_files import MAX_CONFIG_BYTES, MAX_TEXT_BYTES, MTP_FILE, WEIGHTS
from ..wire.cluster_messages import ModelHeld

MAX_FILES = 4096
MAX_FILE_BYTES = 1 << 43
MAX_MODEL_BYTES = 1 << 46  #: Bytes of all its files, far more than any model has.
MAX_MANIFEST_BYTES = 1 << 20
DEFAULT_REVISION = "main"

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ +=-]{0,199}(/[A-Za-z0-9_][A-Za-z0-9._ +=-]{0,199}){0,3}")
_WANTED = (
    *("*.json", "*.jinja", "*.txt", "tokenizer.model", "tiktoken.model"),
    *("additional_chat_templates/*.jinja", "?_*/config.json"),
)


@dataclass(frozen=True, slots=True)
class ModelFile:
    path: str  #: inside the snapshot
    size: int  #: bytes
    hash: str  #: the blob's name on the Hub: SHA-256 (64 hex digits) if large, else git's id (40)

    def digest(self) -> Any:
        if len(self.hash) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Wanted files of the model `name` (OWNER/NAME) at one commit."""

    name: str
    revision: str
    files: tuple[ModelFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files, each content once."""
        return sum(file.size for file in self.blobs)

    @property
    def blobs(self) -> tuple[ModelFile, ...]:
        """One file for each distinct content, in order."""
        return tuple({file.hash: file for file in reversed(self.files)}.values())[::-1]


def split_name(name: str) -> tuple[str, str]:
    """Return OWNER/NAME and the revision of `name`, "main" by default. Raises ValueError."""
    repo, _, revision = name.partition("@")
    owner, _, model = repo.partition("/")
    if not (_PART.fullmatch(owner) and _PART.fullmatch(model)) or ".." in repo or "--" in owner:
        raise ValueError(f"{name[:200]!r} is no OWNER/NAME")
    if "@" in name and (not _REVISION.fullmatch(revision) or ".." in revision or revision.endswith("/")):
        raise ValueError(f"{revision[:200]!r} is no revision: a branch, a tag or a commit is meant")
    return repo, revision or DEFAULT_REVISION


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


def wanted(files: Iterable[ModelFile]) -> tuple[ModelFile, ...]:
    """Return the files that serving needs, small ones first: many models have weights in several formats."""
    files = tuple(files)
    plain = [each for each in files if any(_matches(each.path, name) for name in (WEIGHTS, MTP_FILE))]
    others = [
        each
        for each in files
        if any(_matches(each.path, pattern) for pattern in _WANTED) and _fits(each.path)
        if each.size <= (MAX_CONFIG_BYTES if each.path == "config.json" else MAX_TEXT_BYTES)
    ]
    return tuple(sorted({*plain, *others}, key=lambda file: (file in plain, file.path)))


def to_bytes(manifest: Manifest) -> bytes:
    return json.dumps(asdict(manifest), separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Manifest:
    """Parse and check the output of `to_bytes`. Raises ValueError."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are taken")
    try:
        fields = json.loads(data)
        files = tuple(ModelFile(each["path"], each["size"], each["hash"]) for each in fields["files"])
        return check(Manifest(fields["name"], fields["revision"], files))
    except (KeyError, TypeError, RecursionError, AttributeError) as error:
        raise ValueError(f"no manifest: {type(error).__name__}: {error}") from None


def check(manifest: Manifest) -> Manifest:
    """Return the manifest. Raises ValueError for paths outside the snapshot, wrong sizes and hashes."""
    if split_name(manifest.name) != (manifest.name, DEFAULT_REVISION):
        raise ValueError(f"{manifest.name!r:.200} is no OWNER/NAME")
    if not is_commit(manifest.revision):
        raise ValueError(f"{manifest.revision!r:.200} is no commit")
    if not 0 < len(manifest.files) <= MAX_FILES:
        raise ValueError(f"{len(manifest.files)} files; from 1 to {MAX_FILES} are taken")
    for file in manifest.files:
        if not _fits(file.path):
            raise ValueError(f"{file.path!r:.200} is no path inside a snapshot")
        if type(file.size) is not int or not 0 <= file.size <= MAX_FILE_BYTES:
            raise ValueError(f"{file.path}: {file.size!r:.40} is no size")
        if not _HASH.fullmatch(file.hash):
            raise ValueError(f"{file.path}: {file.hash!r:.80} is no hash of the Hub")
    if (size := sum(file.size for file in manifest.files)) > MAX_MODEL_BYTES:
        raise ValueError(f"{size} bytes in all cannot be right; at most {MAX_MODEL_BYTES} are taken")
    paths = {file.path for file in manifest.files}
    folders = {path[:end] for path in paths for end, char in enumerate(path) if char == "/"}
    if len(paths) != len(manifest.files) or folders & paths:
        raise ValueError("two files have one path")
    if len({(file.hash, file.size) for file in manifest.files}) != len({f.hash for f in manifest.files}):
        raise ValueError("one hash has two sizes")
    return manifest


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _fits(path: str) -> bool:
    return _PATH.fullmatch(path) is not None and ".." not in path


def _matches(path: str, pattern: str) -> bool:
    return fnmatch(path, pattern) and path.count("/") == pattern.count("/")


# --- holdings of members --------------------------------------------------------------------------------

RATE_S = 10.0  #: Seconds over which speeds are measured.


def elect_seeder(members: Mapping[str, ModelHeld], now: str) -> str:
    """Return the node id of the seeder, `now` as long as it is able; "" if no member is.

    Members that have all of the model come first, then members that want it and can get it from the Hub.
    """
    able = {
        node: each for node, each in members.items() if each.complete or (each.wants and not each.problem)
    }
    best = {node: each for node, each in able.items() if each.complete} or able
    if now in best:
        return now
    return min(best, key=lambda node: (-best[node].held, -best[node].free, node), default="")


@dataclass(slots=True)
class TransferRate:
    """Speed of a transfer, in bytes per second."""

    seen: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now: float, held: int) -> None:
        self.seen.append((now, held))
        while now - self.seen[0][0] > RATE_S:
            self.seen.popleft()

    @property
    def bytes_per_s(self) -> float:
        (began, had), (now, has) = (self.seen[0], self.seen[-1]) if self.seen else ((0.0, 0), (0.0, 0))
        return max(has - had, 0) / (now - began) if now > began else 0.0


def described(row: dict[str, Any]) -> str:
    """Return the progress for people: `12.3 GB of 40.1 GB, 110 MB/s, 4 min left`."""
    if row["problem"]:
        return str(row["problem"])
    if row["waits"]:
        return "waits for others to come first"
    if not row["total_bytes"]:
        return "its files are looked up"
    words = [f"{gigabytes(row['held_bytes'])} of {gigabytes(row['total_bytes'])}"]
    if row["bytes_per_s"]:
        words.append(f"{row['bytes_per_s'] / 1e6:.0f} MB/s")
    if row["left_s"] is not None:
        words.append(f"{row['left_s'] // 60} min left" if row["left_s"] >= 90 else f"{row['left_s']} s left")
    return ", ".join([*words, *([f"from {row['lender']}"] if row["lender"] else [])])
