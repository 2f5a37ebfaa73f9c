"""Print how many kernels MLX compiles in a rank's first forwards alone, and in joint ones after those.

`kernels_member.py FOLDER ALONE`: ALONE is 0 to leave the forwards alone out. MLX's CPU backend keeps what it
compiles in the temp folder, which must be empty.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxtp.engine import loader
from mlxtp.engine.executor import RankExecutor
from mlxtp.engine.group import CollectiveCounter
from mlxtp.engine.logit_shaping import RequestShaping
from mlxtp.engine.telemetry import RankTelemetry
from mlxtp.wire.messages import Bootstrap, Forward, LoadShard
from tests.wire.forwards import of_prompt

CHUNK = 64


def kernels() -> int:
    return len(list(Path(tempfile.gettempdir()).rglob("*.so")))


def main() -> None:
    folder, alone = sys.argv[1:]
    bootstrap = Bootstrap(0, 1, "none", (), "", bytes(32), 5.0, 5.0, 1)
    how: Any = {"shaping": RequestShaping(), "exchange": None, "post": print}
    here = Path(tempfile.gettempdir())
    rank = RankExecutor(bootstrap, 1, here, RankTelemetry(), CollectiveCounter(), **how)
    rank.execute(LoadShard(folder, CHUNK, ()))
    assert rank.loaded is not None
    before = kernels()
    if alone == "1":
        loader.run_alone(rank.loaded, 2, lambda: rank._first_forwards(CHUNK))
    between = kernels()
    prompt = rank.launch(1, of_prompt(1, 0, CHUNK, tuple(range(CHUNK))))
    steps = [rank.launch(2 + n, Forward((1,), (CHUNK + n,), (), ())) for n in range(2)]
    for forward in (prompt, *steps):
        rank.settle(forward)
    mx.synchronize()
    print(json.dumps({"alone": between - before, "joint": kernels() - between}))


if __name__ == "__main__":
    main()
