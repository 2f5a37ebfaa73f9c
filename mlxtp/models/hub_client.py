"""Requests to the Hub: for the list of a model's files, and for the files. Everything here waits: call it in
threads.

Files come by plain HTTP, in order, so that an interruption loses nothing that has come. The Hub's own client
restarts a file after one. Its faster protocol (Xet) fills a file in no order, so that others could not copy
it meanwhile. Logins, addresses and errors are the client's own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO, cast

from ..errors import Code, ModelError, ProtocolError, is_disk_full
from ..tokenizer_file import TIKTOKEN_FILE, refusal, table
from .hub_cache import Damaged, PartialFile, Repo, Stopped
from .manifest import (
    CHUNK_BYTES,
    DEFAULT_REVISION,
    Manifest,
    ModelFile,
    check,
    from_bytes,
    is_commit,
    to_bytes,
    wanted,
)

TIMEOUT_S = 15.0


def look_up(name: str, revision: str) -> Manifest:
    """Return the manifest of OWNER/NAME at `revision` now. Raises ModelError, which uses the user's name of
    the model.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    _quiet()
    named = name if revision == DEFAULT_REVISION else f"{name}@{revision}"
    with _understood(name, named):
        try:
            info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
        except RevisionNotFoundError:
            raise _NoSuchRevision(
                f"cannot get {named}: it has no revision {revision!r}", Code.MODEL_NOT_FOUND
            ) from None
        files = [
            ModelFile(
                each.rfilename,
                (each.lfs.size if each.lfs else each.size) or 0,
                (each.lfs.sha256 if each.lfs else each.blob_id) or "",
            )
            for each in info.siblings or ()
        ]
        found = wanted(files)
        if not any(file.path == "config.json" for file in found):
            raise ModelError(f"cannot get {name}: it has no config.json, so it is no model that MLX can run")
        if not any(file.path.endswith(".safetensors") for file in found):
            raise ModelError(f"cannot get {name}: it has no weights in the safetensors format")
        manifest = from_bytes(to_bytes(check(Manifest(name, info.sha or "", found))))
    _check_tokenizer(manifest)
    if is_commit(revision) and manifest.revision != revision:
        raise ModelError(
            f"cannot get {named}: the Hub answered with another commit, {manifest.revision}; try again, or "
            "see which server HF_ENDPOINT names",
            Code.MODEL_NOT_FOUND,
        )
    return manifest


def compare(manifest: Manifest) -> None:
    """Compare a member's manifest with the Hub's, if the Hub can be reached.

    Raises ProtocolError if the Hub has other files, or no such commit.
    """
    try:
        found = look_up(manifest.name, manifest.revision)
    except _NoSuchRevision:
        raise ProtocolError(
            f"a member offers a commit of {manifest.name} that the Hub does not know", Code.NOT_AUTHENTIC
        ) from None
    except ModelError:
        return
    if found.files != manifest.files:
        raise ProtocolError(
            f"a member offers other files of {manifest.name} than the Hub", Code.NOT_AUTHENTIC
        )


def named(name: str, commit: str, refs: Iterable[str]) -> frozenset[str]:
    """Return those branches and tags that the Hub maps to this commit now, as far as it can be reached."""
    found = set()
    for ref in refs:
        with contextlib.suppress(ModelError):
            if look_up(name, ref).revision == commit:
                found.add(ref)
    return frozenset(found)


class _NoSuchRevision(ModelError):
    """Error: the Hub has the model, but not at this revision."""


def _check_tokenizer(manifest: Manifest) -> None:
    """Raise ModelError for a model without a usable tokenizer, before large files of it come."""
    paths = {file.path for file in manifest.files}
    if paths & {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"}:
        return
    if not {TIKTOKEN_FILE, "tokenizer_config.json"} <= paths:
        raise ModelError(
            f"cannot get {manifest.name}: it has no tokenizer.json; use a conversion that has one",
            Code.MODEL_UNSUPPORTED,
        )
    folder = fetch_some(manifest, ("config.json", "tokenizer_config.json"))
    with _understood(manifest.name, manifest.name):
        settings = table(folder / "tokenizer_config.json")
        template = "chat_template" in settings or "chat_template.jinja" in paths
        why = refusal(table(folder / "config.json"), settings, template=template)
    if why:
        raise ModelError(f"cannot get {manifest.name}: {why}", Code.MODEL_UNSUPPORTED)


def fetch(manifest: Manifest, part: PartialFile, stopped: Callable[[], bool]) -> None:
    """Have the Hub send the rest of a file. Raises ModelError, and Stopped."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # not in its `__all__`

    _quiet()
    begins = part.begins
    if begins == part.file.size:
        return
    url = hf_hub_url(manifest.name, part.file.path, revision=manifest.revision)
    # A compressed transfer could not resume in the middle.
    headers = build_hf_headers() | {"accept-encoding": "identity"}
    try:
        http_get(url, cast(BinaryIO, _Into(part, begins, stopped)), resume_size=begins, headers=headers)
    except _errors() as error:
        why = _why(error)
        what = "" if isinstance(error, RepositoryNotFoundError) else f"{part.file.path}: "
    else:
        if not part.missing:
            return
        what, why = f"{part.file.path}: ", "it ends early"
    raise ModelError(f"cannot get {manifest.name}: {what}{why}", Code.MODEL_NOT_FOUND)


def fetch_some(manifest: Manifest, patterns: tuple[str, ...]) -> Path:
    """Return a folder with the files that match. It is no model, and no branch names it. Raises ModelError.

    The client requests each file, not the list of all that it would keep. It compares only sizes, so a file
    with the wrong hash is deleted afterwards.
    """
    from huggingface_hub import hf_hub_download

    _quiet()
    repo = Repo(manifest.name)
    folder = repo.folder / "snapshots" / manifest.revision
    with _understood(manifest.name, manifest.name):
        for file in manifest.files:
            if any(fnmatch(file.path, pattern) for pattern in patterns):
                # By its commit, so that only a complete download points a branch at it.
                path = Path(hf_hub_download(manifest.name, file.path, revision=manifest.revision))
                if path.resolve() != (folder / file.path).resolve():
                    raise ValueError(f"{file.path} is of another commit")
                _check_hash(repo, file, path)
    return folder


def _check_hash(repo: Repo, file: ModelFile, path: Path) -> None:
    """Check a file's hash. Raises ModelError, OSError."""
    try:
        repo.check(file, path)
    except Damaged as error:
        raise ModelError(f"cannot get {repo.name}: {error}; try again", Code.MODEL_NOT_FOUND) from None


class _Into(io.RawIOBase):
    """File as the Hub's client writes it: in order. Pieces count as soon as they are complete."""

    def __init__(self, part: PartialFile, at: int, stopped: Callable[[], bool]) -> None:
        self._part = part
        self._at = at
        self._stopped = stopped
        self._next = at // CHUNK_BYTES

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Restart at an offset; the client does so only where the Hub cannot resume in the middle."""
        self._at, self._next = offset, offset // CHUNK_BYTES
        return offset

    def truncate(self, size: int | None = None) -> int:
        self._part.discard()
        return self._at

    def write(self, data: object) -> int:
        if self._stopped():
            raise Stopped
        view = memoryview(cast(bytes, data))
        if self._at + len(view) > self._part.file.size:
            raise ValueError(f"more than the {self._part.file.size} bytes came that it should have")
        self._part.write(self._at, view)
        self._at += len(view)
        while self._next < self._part.file.chunks and sum(self._part.file.span(self._next)) <= self._at:
            self._part.wrote(self._next)
            self._next += 1
        return len(view)


@contextlib.contextmanager
def _understood(name: str, named: str) -> Iterator[None]:
    """Raise ModelError for any error in the block.

    The client trusts the answer as the Hub's; another server may send anything.
    """
    try:
        yield
    except _unreached() as error:
        raise ModelError(f"cannot get {named}: {_why(error)}", Code.MODEL_NOT_FOUND) from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ModelError(
            f"the Hub's answer about {name} cannot be understood: {said:.300}", Code.MODEL_NOT_FOUND
        ) from None


def _why(error: Exception) -> str:
    """Return the reason in words, and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    said = (_secretless(str(error).strip()) or type(error).__name__).splitlines()[0]
    match error:
        case GatedRepoError():
            return "it is gated; accept its terms on the Hub, then log in (`hf auth login`) or set HF_TOKEN"
        case RepositoryNotFoundError():
            return (
                "the Hub knows no such model, or it is private; for a private one log in (`hf auth login`) "
                "or set HF_TOKEN"
            )
        case OfflineModeIsEnabled():
            why = "HF_HUB_OFFLINE is set, so the Hub is not contacted"
        case OSError() if is_disk_full(error):
            why = "the disk is full"
        case HfHubHTTPError() | OSError() | ValueError():
            why = said
        case _:
            why = f"it is not on this machine and the Hub cannot be reached; check the network ({said})"
    return why


def _secretless(text: str) -> str:
    """Remove queries from addresses: those of files may contain a signature."""
    return re.sub(r"\?\S+", "?…", text)[:300]


def _unreached() -> tuple[type[Exception], ...]:
    """Return the errors that the Hub's client raises without an answer.

    They include those of its HTTP library, which differs between versions.
    """
    from huggingface_hub.errors import HfHubHTTPError

    http = [each for each in HfHubHTTPError.__mro__ if each.__name__ == "HTTPError"]
    return (HfHubHTTPError, OSError, *http)


def _errors() -> tuple[type[Exception], ...]:
    return (*_unreached(), ValueError)


def _quiet() -> None:
    """Turn off the client's progress bars and advice."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    disable_progress_bars()
