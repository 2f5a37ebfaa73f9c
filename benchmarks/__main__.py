"""Run the cases and print one table; a full run writes it into RESULTS.md as well."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from mlxtp.agent import stopped_by_signal
from mlxtp.errors import MlxtpError

from . import (
    building,
    caches,
    concurrency,
    copying,
    decode,
    describing,
    frames,
    http,
    idle,
    layout,
    links,
    loading,
    lookup,
    membership,
    mtp,
    pipeline,
    prefill,
    recovery,
    replicas,
    requests,
    results,
    speculation,
    strangers,
    vectors,
)
from .errors import Unmeasured
from .measures import Row, as_json, verdict
from .stage import Stage
from .table import show

CASES: Mapping[str, Callable[[Stage], Awaitable[list[Row]]]] = {
    "frames": frames.measure,
    "requests": requests.measure,
    "decode": decode.measure,
    "http": http.measure,
    "concurrency": concurrency.measure,
    "prefill": prefill.measure,
    "pipeline": pipeline.measure,
    "caches": caches.measure,
    "lookup": lookup.measure,
    "describing": describing.measure,
    "speculation": speculation.measure,
    "mtp": mtp.measure,
    "building": building.measure,
    "idle": idle.measure,
    "layout": layout.measure,
    "links": links.measure,
    "loading": loading.measure,
    "membership": membership.measure,
    "recovery": recovery.measure,
    "replicas": replicas.measure,
    "strangers": strangers.measure,
    "vectors": vectors.measure,
    "copying": copying.measure,
}
CASE_LIMIT_S = 1800.0  #: Seconds for one case, so that one that hangs does not cost the others' rows.

_INTERRUPTED = 130


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and tokens")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    parser.add_argument("--only", action="append", choices=CASES, help="this case alone; may be repeated")
    parser.add_argument("--no-docs", action="store_true", help="leave RESULTS.md as it is")
    args = parser.parse_args()
    console = Console(stderr=True)
    wanted = [name for name in CASES if not args.only or name in args.only]
    outcome, interrupted = asyncio.run(stopped_by_signal(run(wanted, console, quick=args.quick)))
    if interrupted or outcome is None:
        sys.exit(_INTERRUPTED)
    rows, failed = outcome
    show(rows)
    if args.json:
        args.json.write_text(as_json(rows) + "\n")
    lost = [] if args.quick else results.lost(rows)
    if not (failed or args.quick or args.only or args.no_docs):
        results.write(rows)
    print(verdict(rows, failed))
    if lost:
        print(f"met before on such a machine: {'; '.join(lost)}")
    sys.exit(1 if failed or lost else 0)


async def run(names: Sequence[str], console: Console, *, quick: bool) -> tuple[list[Row], list[str]]:
    """The rows of these cases, and the names of those that could not be measured."""
    rows: list[Row] = []
    failed: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mlxtp-bench-") as folder:
        async with Stage(Path(folder), console, quick=quick) as stage:
            for name in names:
                console.print(f"[bold]{name}[/]")
                stage.enter(name)
                try:
                    async with asyncio.timeout(CASE_LIMIT_S):
                        rows += await CASES[name](stage)
                except (Unmeasured, MlxtpError, TimeoutError, OSError) as error:
                    failed.append(name)
                    console.print(f"  [red]not measured:[/] {error or type(error).__name__}", markup=True)
    console.print(f"[dim]{time.monotonic() - began:.0f} s[/]")
    return rows, failed


if __name__ == "__main__":
    main()
