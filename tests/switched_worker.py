"""`python -m tests.switched_worker SWITCHES MODULE <arguments>`: a rank of MODULE with other rules.

SWITCHES is a JSON object. `prefix_cache` false: no prompt begins with caches of another. `compiled` false: no
graph is traced. `agreement` "broadcast": rank 0 chooses every token. `orders`: how many arrays wide MLX goes
through a graph, by rank; it changes the order of all in it that does not depend on each other.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import replace
from typing import Any

SWITCHES = frozenset({"prefix_cache", "compiled", "agreement", "orders"})


def main() -> None:
    switches = json.loads(sys.argv.pop(1))
    if not switches.get("compiled", True):
        os.environ["MLX_DISABLE_COMPILE"] = "1"
    if orders := switches.get("orders"):
        os.environ["MLX_BFS_MAX_WIDTH"] = str(orders[int(sys.argv[sys.argv.index("--rank") + 1])])
    from mlxtp.engine import executor, requests

    cache_kind, policy = executor.CacheKind, requests.Policy

    def kept_by_none(*args: Any) -> executor.CacheKind:
        kinds = cache_kind(*args)
        kinds.can = replace(kinds.can, copyable=False)
        return kinds

    if not switches.get("prefix_cache", True):
        executor.CacheKind = kept_by_none  # type: ignore[assignment, misc]
    if agreement := switches.get("agreement"):
        requests.Policy = lambda **fields: policy(**fields | {"agreement": agreement})  # type: ignore[assignment, misc]
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
