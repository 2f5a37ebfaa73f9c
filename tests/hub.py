"""A Hub on loopback, as much of it as its real client asks for: what a model has, and its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mlxtp.config import embedded_model_path
from mlxtp.models.hub_cache import Repo
from mlxtp.models.manifest import ModelFile

COMMIT = "a" * 40
NEWER = "b" * 40
TOKEN = "hf_" + 20 * "t"
#: Files that serving does not need, and other programs run.
EVIL = {"modeling_x.py": b"import os", "pytorch_model.bin": b"pickle", "sub/model.safetensors": b"w"}
_BLOCK = 64 * 1024


@dataclass
class Model:
    """A model of the Hub under a name. `cut` ends the first answer for a path after so many bytes; `pace` is
    in bytes per second. `lies` are sent instead of a file's bytes, and `anew`, from the beginning, to a
    client that asks for the rest of one. `answer` is what the API says instead of the truth; `stalls` is a
    part of the addresses for which nothing comes until `goes_on` is set."""

    files: Mapping[str, bytes]
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    private: bool = False
    gated: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    pace: float = 0.0
    lies: dict[str, bytes] = field(default_factory=dict)
    anew: dict[str, bytes] = field(default_factory=dict)
    answer: bytes = b""
    stalls: str = "\0"
    goes_on: threading.Event = field(default_factory=threading.Event)
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes of each file that went out."""


def embedded() -> dict[str, bytes]:
    """The files of the embedded model that serving needs."""
    folder = embedded_model_path()
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def with_weights(*extra: int) -> dict[str, bytes]:
    """The embedded model with more files of weights, of so many bytes, which only a copy reads."""
    noise = [hashlib.shake_128(bytes([i])).digest(size) for i, size in enumerate(extra)]
    return embedded() | {f"model-extra-{i}.safetensors": body for i, body in enumerate(noise)}


def blob_name(path: str, body: bytes) -> str:
    """Its hash, as the Hub has it: large files by SHA-256, others as git does."""
    return hashlib.sha256(body).hexdigest() if path.endswith(".safetensors") else _by_git(body)


def _by_git(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


class Hub:
    """A Hub's address (`url`), and its models by name."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.asked: list[str] = []
        hub = self

        class Handler(_Handler):
            served = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Hang up and stop listening."""
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """One that is gone afterwards."""
    hub = Hub()
    try:
        yield hub
    finally:
        hub.close()


class _Handler(BaseHTTPRequestHandler):
    served: Hub

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def _answer(self, *, send_body: bool) -> None:
        self.served.asked.append(f"{self.command} {self.path}")
        path = self.path.split("?")[0]
        for name, model in self.served.models.items():
            if not (path.startswith(f"/api/models/{name}") or path.startswith(f"/{name}/resolve/")):
                continue
            knows = self.headers.get("authorization") == f"Bearer {TOKEN}"
            if model.stalls in path:
                model.goes_on.wait(60)
            if model.private and not knows:
                self._refuse(401, "RepoNotFound")
            elif path.startswith("/api/") and model.answer:
                self._send(model.answer, {"Content-Type": "application/json"}, send_body)
            elif path.startswith("/api/"):
                self._tell(name, model, path.removeprefix(f"/api/models/{name}"), send_body)
            elif model.gated and not knows:
                self._refuse(403, "GatedRepo")
            else:
                _, _, file = path.removeprefix(f"/{name}/resolve/").partition("/")
                self._send_file(model, file, send_body)
            return
        self._refuse(401, "RepoNotFound")

    def _tell(self, name: str, model: Model, rest: str, send_body: bool) -> None:
        revision = rest.rpartition("/")[2] or "main"
        if revision not in model.commits and revision not in model.commits.values():
            self._refuse(404, "RevisionNotFound")
            return
        if rest.startswith("/tree/"):
            answer: object = [_entry(path, body) for path, body in model.files.items()]
        else:
            files = [{"rfilename": path, **_entry(path, body)} for path, body in model.files.items()]
            about = {"id": name, "modelId": name, "private": model.private, "siblings": files}
            answer = about | {"sha": model.commits.get(revision, revision)}
        self._send(json.dumps(answer).encode(), {"Content-Type": "application/json"}, send_body)

    def _send_file(self, model: Model, path: str, send_body: bool) -> None:
        if path not in model.files:
            self._refuse(404, "EntryNotFound")
            return
        honest = model.files[path]
        body = model.lies.get(path, honest)
        headers = {"ETag": f'"{blob_name(path, honest)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        begins = 0
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        if match and path in model.anew:
            body = model.anew[path]
        elif match:
            begins = int(match[1])
            headers["Content-Range"] = f"bytes {begins}-{len(body) - 1}/{len(body)}"
        self._head(206 if begins else 200, len(body) - begins, headers)
        ends = model.cut.pop(path, len(body)) if send_body else begins
        for at in range(begins, ends, _BLOCK):
            part = body[at : min(at + _BLOCK, ends)]
            try:
                self.wfile.write(part)
            except OSError:
                break
            model.sent[path] = model.sent.get(path, 0) + len(part)
            if model.pace:
                time.sleep(len(part) / model.pace)
        if send_body and ends < len(body):
            self.connection.close()

    def _head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, body: bytes, headers: Mapping[str, str], send_body: bool) -> None:
        self._head(200, len(body), headers)
        if send_body:
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, 0, {"X-Error-Code": code})

    def log_message(self, format: str, *args: object) -> None:
        pass


def _entry(path: str, body: bytes) -> dict[str, object]:
    git = _by_git(body)
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(body), "oid": git, "blobId": git}
    if path.endswith(".safetensors"):
        digest = blob_name(path, body)
        entry["lfs"] = {"size": len(body), "sha256": digest, "oid": digest, "pointerSize": 134}
    return entry


def poison(repo: Repo, files: Mapping[str, bytes]) -> None:
    """Add files to a complete model, as if they had always belonged to it."""
    manifest = repo.manifest(COMMIT)
    added = tuple(ModelFile(path, len(body), blob_name(path, body)) for path, body in files.items())
    for file, body in zip(added, files.values(), strict=True):
        repo.blobs.path(file).write_bytes(body)
    whole = replace(manifest, files=(*added, *manifest.files))
    repo.keep(whole)
    repo.publish(whole, "main", by_hub=True)


def put(hub_url: str, cache: Path, monkeypatch: object) -> None:
    """Have the Hub's client in this process ask `hub_url` and keep what comes in `cache`."""
    from huggingface_hub import constants

    setattr_ = monkeypatch.setattr  # type: ignore[attr-defined]
    setattr_(constants, "ENDPOINT", hub_url)
    setattr_(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub_url + "/{repo_id}/resolve/{revision}/{filename}")
    setattr_(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_TOKEN", raising=False)  # type: ignore[attr-defined]
    setattr_(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
