"""`make apps`: install the programs, run each of them against the endpoint, print one table."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from .actor import stage, with_template
from .bench import ROOT, Bench, Check, end, free_port, install, node, wait_for
from .rows import ROWS, Row

SLOW_S = 9.0


@contextlib.contextmanager
def acted(row: Row, folder: Path, npm: Path, given: argparse.Namespace) -> Iterator[Bench]:
    """A bench where the actor answers."""
    engine, record, first_token_s = dict(row.engine), given.record, given.first_token_s
    if given.template:
        engine["folder"] = with_template(given.template, folder / "model")
    prefill_s = first_token_s if engine.pop("slow", False) else 0.0
    if record:
        (record := record / row.key).mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as home,
        stage(first_token_s=prefill_s, record=record, **engine) as found,
    ):
        found.write_home(Path(home))
        model = found.actor.models()[0]
        bench = Bench(folder, npm, found.url, model.id, model.context, Path(home), found, prefill_s)
        with contextlib.closing(bench):
            yield bench


@contextlib.contextmanager
def served(folder: Path, npm: Path) -> Iterator[Bench]:
    """A bench where a real agent with one rank answers, with the embedded model."""
    with tempfile.TemporaryDirectory() as name:
        home, url = Path(name), f"http://127.0.0.1:{free_port()}"
        bench = Bench(folder, npm, url, "tiny", 4096, home, None, 0.0)
        with contextlib.closing(bench):
            process = bench.start(node(home, url.removeprefix("http://")), bench.home())
            try:
                wait_for(f"{url}/health", 120)
                listed = urllib.request.urlopen(f"{url}/v1/models").read()
                bench.model = json.loads(listed)["data"][0]["id"]
                yield bench
            finally:
                end(process)


def run(row: Row, bench: Bench) -> list[Check]:
    """All checks of one row. An error of the harness is one that failed."""
    checks: list[Check] = []
    try:
        checks += row.act(bench)
    except Exception as error:  # noqa: BLE001 - the next program must run
        checks.append(Check("run", False, f"{type(error).__name__}: {error}"))
    return checks or [Check("run", False, "nothing was tried")]


def line(row: Row, checks: Sequence[Check]) -> str:
    """The row in Markdown."""
    passed, failed = [check for check in checks if check.ok], [check for check in checks if not check.ok]
    result = "works" if not failed else f"{len(passed)} of {len(checks)}"
    note = "; ".join(f"{check.tried}: {check.note}" for check in failed).replace("|", "\\|")
    tried = "; ".join(check.tried for check in checks)
    return f"| {row.app} | {row.version} | {tried} | {result} | {note[:400]} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make apps", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="rows or groups, such as codex,claude")
    parser.add_argument(
        "--engine", choices=["actor", "node"], default="actor", help="script or embedded model"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".venv" / "apps", help="of the Python environments"
    )
    parser.add_argument("--npm", type=Path, help="folder with node_modules")
    parser.add_argument(
        "--first-token-s", type=float, default=SLOW_S, help="the prefill in rows about idle limits"
    )
    parser.add_argument("--template", type=Path, help="chat template in place of the embedded model's")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--record", type=Path, help="folder for the requests that the programs send")
    given = parser.parse_args()
    names = {name for name in given.only.split(",") if name}
    rows = [row for row in ROWS if not names or any(f"{row.key}-".startswith(f"{name}-") for name in names)]
    rows = [row for row in rows if given.engine == "actor" or row.node]
    folder, npm = given.folder.absolute(), (given.npm or given.folder / "npm").absolute()
    install(folder, npm, {row.venv for row in rows} | {"clients"})
    results = []
    print("| app | version | tried | result | note |\n|---|---|---|---|---|", flush=True)
    with contextlib.ExitStack() as open_:
        node = open_.enter_context(served(folder, npm)) if given.engine == "node" else None
        for row in rows:
            began = time.monotonic()
            with contextlib.nullcontext(node) if node else acted(row, folder, npm, given) as bench:
                checks = run(row, bench)
            print(line(row, checks), flush=True)
            results.append({"key": row.key, "app": row.app, "version": row.version,
                            "seconds": round(time.monotonic() - began),
                            "checks": [vars(check) for check in checks]})  # fmt: skip
            if given.json:
                given.json.write_text(json.dumps(results, indent=1))
    works = sum(all(check["ok"] for check in result["checks"]) for result in results)  # type: ignore[attr-defined]
    print(f"\n{works} of {len(results)} work at the first try")


if __name__ == "__main__":
    main()
