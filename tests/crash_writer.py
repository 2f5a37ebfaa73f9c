"""Writes every file of a home again and again, and says after each round which one it was.

`python -m tests.crash_writer HOME`. Round N+1 follows the one that is found in `state.json`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mlxtp.admin.handlers import announce
from mlxtp.api.api_keys import KeyFile
from mlxtp.cluster import state_file
from mlxtp.cluster.cluster_state import ClusterState
from mlxtp.identity.store import Store
from mlxtp.models import self_test
from mlxtp.models.hub_cache import Repo

GOLDEN = 5  #: sets of answers in one file


def repo(home: Path) -> Repo:
    return Repo("owner/name", home / "hub")


def write(home: Path, number: int) -> None:
    keys, store = KeyFile(home), Store(home)
    old = [key.name for key in keys.load()]
    if f"k{number}" not in old:
        keys.create(f"k{number}", 0, 1.0)
    for name in old:
        if name != f"k{number}":
            keys.revoke(name)
    if store.load_or_create().membership is None:
        store.found_cluster()
    else:
        store.leave()
    repo(home).refer(["main"], f"{number:040x}", lambda: False, by_hub=True)
    self_test.kept(home / self_test.FILE, f"{number % GOLDEN}", ((number,),))
    announce(home, f"http://127.0.0.1:{number}", "key")
    state_file.save(home, state_file.SavedState(ClusterState(epoch=number)))


def main(home: Path) -> None:
    number = state_file.load(home)[0].beliefs.epoch
    while True:
        number += 1
        write(home, number)
        print(number, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
