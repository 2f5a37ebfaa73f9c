"""Blocking requests to the Hub: for the list of a model's files, and for the files.

Files come by plain HTTP and in order, so that an interrupted download resumes; `hf_hub_download` of the Hub's
client starts the file over.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from ..errors import Code, ModelError, ProtocolError, is_disk_full
from ..model_files import INDEX, TEMPLATE_FILES, TIKTOKEN_FILE, WEIGHTS, indexed, refusal, table
from .hub_cache import Damaged, PartialFile, Repo
from .manifest import DEFAULT_REVISION, Manifest, ModelFile, from_bytes, is_commit, to_bytes, wanted

TIMEOUT_S = 15.0
TRIES = 5  #: Broken connections in a row, without a new byte, before a download fails.
AGAIN_S = 1.0  #: Seconds from a broken connection to the next one.
_BLOCK_BYTES = 1 << 20


def look_up(name: str, revision: str) -> Manifest:
    """Return the manifest of OWNER/NAME at `revision` now. Raises ModelError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    named = name if revision == DEFAULT_REVISION else f"{name}@{revision}"
    with _understood(name, named):
        try:
            info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
        except RevisionNotFoundError:
            why = f"cannot get {named}: it has no revision {revision!r}"
            raise _NoSuchRevision(why, Code.MODEL_NOT_FOUND) from None
        found = wanted(
            ModelFile(each.rfilename, size or 0, blob or "")
            for each in info.siblings or ()
            for size, blob in [(each.lfs.size, each.lfs.sha256) if each.lfs else (each.size, each.blob_id)]
        )
        if not any(file.path == "config.json" for file in found):
            raise ModelError(f"cannot get {name}: it has no config.json, so it is no model that MLX can run")
        if not any(file.path.endswith(".safetensors") for file in found):
            raise ModelError(f"cannot get {name}: it has no weights in the safetensors format ({WEIGHTS})")
        manifest = from_bytes(to_bytes(Manifest(name, info.sha or "", found)))
    manifest = _without_strays(manifest)
    _check_tokenizer(manifest)
    if is_commit(revision) and manifest.revision != revision:
        raise ModelError(
            f"cannot get {named}: the Hub answered with another commit, {manifest.revision}; try again, or "
            "see which server HF_ENDPOINT names",
            Code.MODEL_NOT_FOUND,
        )
    return manifest


def _without_strays(manifest: Manifest) -> Manifest:
    """Drop weight files that the model's index does not name. Fetches the index unless names are uniform."""
    weights = {file.path for file in manifest.files if fnmatch(file.path, WEIGHTS)}
    alike = all(path.endswith(f"-of-{len(weights):05}.safetensors") for path in weights)
    if len(weights) == 1 or alike or not any(file.path == INDEX for file in manifest.files):
        return manifest
    folder = fetch_some(manifest, (INDEX,))
    with _understood(manifest.name):
        strays = weights - indexed(folder)
    return replace(manifest, files=tuple(file for file in manifest.files if file.path not in strays))


def _check_tokenizer(manifest: Manifest) -> None:
    """Raise ModelError if a model has no usable tokenizer, before its large files are downloaded."""
    paths = {file.path for file in manifest.files}
    if paths & {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"}:
        return
    if not {TIKTOKEN_FILE, "tokenizer_config.json"} <= paths:
        why = "it has no tokenizer.json; use a conversion that has one"
    else:
        folder = fetch_some(manifest, ("config.json", "tokenizer_config.json"))
        with _understood(manifest.name):
            settings = table(folder / "tokenizer_config.json")
            template = "chat_template" in settings or bool(paths & {*TEMPLATE_FILES[1:]})
            why = refusal(table(folder / "config.json"), settings, template=template)
    if why:
        raise ModelError(f"cannot get {manifest.name}: {why}", Code.MODEL_UNSUPPORTED)


def confirm(manifest: Manifest, refs: Iterable[str], known: Manifest | None) -> frozenset[str]:
    """Compare a member's manifest with the Hub's, `known` or requested now. Returns `named`'s refs.

    Raises ProtocolError if the Hub has other files, or no such commit. Returns none if it is unreachable.
    """
    found = named(manifest.name, manifest.revision, refs)
    try:
        theirs = known or next(iter(found.values()), None) or look_up(manifest.name, manifest.revision)
    except _NoSuchRevision:
        why = f"a member offers a commit of {manifest.name} that the Hub does not know"
        raise ProtocolError(why, Code.NOT_AUTHENTIC) from None
    except ModelError:
        return frozenset()
    if theirs.files != manifest.files:
        why = f"a member offers other files of {manifest.name} than the Hub"
        raise ProtocolError(why, Code.NOT_AUTHENTIC)
    return frozenset(found)


def named(name: str, commit: str, refs: Iterable[str]) -> dict[str, Manifest]:
    """Return the branches and tags that the Hub maps to this commit now, as far as it can be reached."""
    found = {}
    for ref in refs:
        with contextlib.suppress(ModelError):
            if (manifest := look_up(name, ref)).revision == commit:
                found[ref] = manifest
    return found


class _NoSuchRevision(ModelError): ...


def fetch(manifest: Manifest, part: PartialFile) -> None:
    """Download the rest of a file from the Hub. Raises ModelError, Damaged, Stopped."""
    from huggingface_hub.errors import HfHubHTTPError

    at, tries = part.open(), 0
    with _understood(manifest.name, manifest.name, f"{part.file.path}: "):
        while at < part.file.size:
            try:
                _stream(manifest, part, at)
                if part.held_bytes < part.file.size:
                    raise OSError("it ends early")
            except _broken() as error:
                tries += 1
                if isinstance(error, HfHubHTTPError) or (tries >= TRIES and part.held_bytes <= at):
                    raise
                threading.Event().wait(AGAIN_S)
            tries, at = tries if part.held_bytes <= at else 0, part.held_bytes
    part.finish()


def _stream(manifest: Manifest, part: PartialFile, at: int) -> None:
    from huggingface_hub import constants, hf_hub_url, hf_raise_for_status
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # its `__all__` is computed
        build_hf_headers,
        http_stream_backoff,
    )

    url = hf_hub_url(manifest.name, part.file.path, revision=manifest.revision)
    # A compressed transfer could not resume in the middle.
    headers = build_hf_headers() | {"accept-encoding": "identity"} | ({"range": f"bytes={at}-"} if at else {})
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with http_stream_backoff("GET", url, headers=headers, timeout=timeout, retry_on_exceptions=()) as answer:
        hf_raise_for_status(answer)
        if at and answer.status_code == 200:  # the server ignores the range and sends all of it
            part.restart()
        for data in answer.iter_bytes(_BLOCK_BYTES):
            part.write(data)


def fetch_some(manifest: Manifest, patterns: tuple[str, ...]) -> Path:
    """Return a folder with the files that match. No ref points at it, so it is no model. Raises ModelError.

    One request per file, because the Hub's client would keep a list of all files; it compares only sizes.
    """
    from huggingface_hub import hf_hub_download

    repo = Repo(manifest.name)
    folder = repo.folder / "snapshots" / manifest.revision
    with _understood(manifest.name):
        for file in manifest.files:
            if any(fnmatch(file.path, pattern) for pattern in patterns):
                # By its commit, so that no branch points at an incomplete download.
                path = Path(hf_hub_download(manifest.name, file.path, revision=manifest.revision))
                if path.resolve() != (folder / file.path).resolve():
                    raise ValueError(f"{file.path} is of another commit")
                try:
                    repo.blobs.check(file, path)
                except Damaged as error:
                    why = f"cannot get {repo.name}: {error}; try again"
                    raise ModelError(why, Code.MODEL_NOT_FOUND) from None
    return folder


@contextlib.contextmanager
def _understood(name: str, named: str = "", file: str = "") -> Iterator[None]:
    """Raise ModelError for any error of the Hub's client, which trusts any server's answer.

    `named`: the model in the message, `name` by default. `file`: the file in it.
    """
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # as above

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    disable_progress_bars()
    unreached: tuple[type[Exception], ...] = (HfHubHTTPError, OSError, *_broken())
    try:
        yield
    except unreached as error:
        file = "" if isinstance(error, RepositoryNotFoundError) else file
        why = f"cannot get {named or name}: {file}{_why(error)}"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        why = f"the Hub's answer about {name} cannot be understood: {said:.300}"
    else:
        return
    raise ModelError(why, Code.MODEL_NOT_FOUND) from None


def _why(error: Exception) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    # The query of a URL may contain a signature.
    said = (re.sub(r"\?\S+", "?…", str(error).strip())[:300] or type(error).__name__).splitlines()[0]
    match error:
        case GatedRepoError():
            return "it is gated; accept its terms on the Hub, then log in (`hf auth login`) or set HF_TOKEN"
        case RepositoryNotFoundError():
            return (
                "the Hub knows no such model, or it is private; for a private one log in (`hf auth login`) "
                "or set HF_TOKEN"
            )
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, so the Hub is not contacted"
        case OSError() if is_disk_full(error):
            return "the disk is full"
        case HfHubHTTPError() | OSError():
            return said
    return f"it is not on this machine and the Hub cannot be reached; check the network ({said})"


def _broken() -> tuple[type[Exception], ...]:
    """Return the errors of the client's HTTP library, which differs between versions."""
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(each for each in HfHubHTTPError.__mro__ if each.__name__ == "HTTPError")
