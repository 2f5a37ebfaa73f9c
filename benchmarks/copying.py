"""A model from one process to another: as members copy it, beside a plain TLS copy of the same file.

Both ends are processes of this machine, over its loopback, and files are in memory where the system has a
place for that (/dev/shm): the disk, for which both would wait alike, is left out. The plain copy is one
connection with the same certificates, one file, blocks of 1 MiB, nothing checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from mlxtp.identity.store import Store
from mlxtp.models import peer_copy
from mlxtp.models.download import Fetch
from mlxtp.models.hub_cache import Repo
from mlxtp.models.manifest import Manifest, ModelFile
from mlxtp.wire.certificates import MemberCertificates
from mlxtp.wire.tls import ALPN_MODELS, Credentials, member_context_client

from . import child
from .errors import Unmeasured
from .measures import Row, compare
from .stage import Stage, in_turn

NAME = "bench/model"
COMMIT = "b" * 40
BLOCK_BYTES = 1 << 20


async def measure(stage: Stage) -> list[Row]:
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else stage.folder
    folder = Path(tempfile.mkdtemp(prefix="mlxtp-copying-", dir=base))
    first, second = Store(folder / "first"), Store(folder / "second")
    identity, other = first.found_cluster(), second.load_or_create()
    assert identity.authority is not None
    certificate = identity.authority.certify(other.node_id, other.key.public_key())
    second.save_membership(MemberCertificates(certificate, identity.authority.certificate))
    manifest = await asyncio.to_thread(
        _write, Repo(NAME, folder / "there"), stage.pick(full=1 << 29, quick=1 << 28)
    )
    process = await child.start(None, "benchmarks.lend", str(folder / "first"), str(folder / "there"))
    ours: list[float] = []
    plain: list[float] = []
    try:
        assert process.stdout is not None
        ports = json.loads(await process.stdout.readline() or "{}")
        if not ports:
            raise Unmeasured("the lender did not start")

        def connect() -> peer_copy.PeerConnection:
            address = f"127.0.0.1:{ports['lender']}"
            return peer_copy.connect([address], identity.node_id, second.credentials)

        for number in stage.rounds("copying", full=15, quick=3):
            for as_members in in_turn(number, True, False):
                began = time.perf_counter()
                if as_members:
                    fetch = Fetch(Repo(NAME, folder / "here"), COMMIT)
                    await asyncio.to_thread(fetch.from_member, NAME, connect)
                else:
                    await asyncio.to_thread(_plain, ports["plain"], second.credentials, folder / "plain")
                rate = manifest.size / (time.perf_counter() - began) / 1e6
                if number:
                    (ours if as_members else plain).append(rate)
                shutil.rmtree(folder / "here", ignore_errors=True)
                (folder / "plain").unlink(missing_ok=True)
    finally:
        await child.end(process)
        shutil.rmtree(folder)
    return [compare("a model copied from another member", ours, plain)]


def _write(repo: Repo, size: int) -> Manifest:
    """A model whose only weights have so many random bytes."""
    draft = repo.folder / "blobs" / "draft"
    draft.parent.mkdir(parents=True)
    digest = hashlib.sha256()
    with draft.open("wb") as file:
        for _ in range(size // BLOCK_BYTES):
            block = os.urandom(BLOCK_BYTES)
            digest.update(block)
            file.write(block)
    weights = ModelFile("model.safetensors", size, digest.hexdigest())
    draft.rename(repo.blobs.path(weights))
    config = ModelFile("config.json", 2, hashlib.sha1(b"blob 2\0{}", usedforsecurity=False).hexdigest())
    repo.blobs.path(config).write_bytes(b"{}")
    manifest = Manifest(NAME, COMMIT, (config, weights))
    repo.keep(manifest)
    repo.publish(manifest, "main", by_hub=True)
    return manifest


def _plain(port: int, credentials: Credentials, path: Path) -> None:
    context = member_context_client(credentials, ALPN_MODELS)
    block = memoryview(bytearray(BLOCK_BYTES))
    with (
        context.wrap_socket(socket.create_connection(("127.0.0.1", port))) as tls,
        path.open("wb", buffering=0) as file,
    ):
        filled = 0
        while count := tls.recv_into(block[filled:]):
            filled += count
            if filled == BLOCK_BYTES:
                file.write(block)
                filled = 0
        file.write(block[:filled])
        os.fsync(file.fileno())
