"""`benchmarks.lend HOME CACHE`: lends the model there, and sends its largest file by a plain connection.

Prints both ports, then runs until it is ended.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path

from mlxtp.identity.store import Store
from mlxtp.models.hub_cache import Repo
from mlxtp.models.peer_copy import PeerServer
from mlxtp.wire.tls import ALPN_MODELS, member_context_server

from .copying import BLOCK_BYTES, COMMIT, NAME


def _main() -> None:
    credentials, repo = Store(Path(sys.argv[1])).credentials, Repo(NAME, Path(sys.argv[2]))
    manifest = repo.manifest(COMMIT)
    assert manifest is not None
    lender = PeerServer("127.0.0.1", credentials, lambda _: (repo, manifest), lambda _: True)
    context = member_context_server(credentials, (ALPN_MODELS,))
    listening = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"lender": lender.port, "plain": listening.getsockname()[1]}), flush=True)
    path = repo.blobs.path(max(manifest.files, key=lambda file: file.size))
    while True:
        sock, _ = listening.accept()
        threading.Thread(target=_send, args=(context.wrap_socket(sock, server_side=True), path)).start()


def _send(tls: socket.socket, path: Path) -> None:
    block = memoryview(bytearray(BLOCK_BYTES))
    with tls, path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            tls.sendall(block[:count])
        tls.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    _main()
