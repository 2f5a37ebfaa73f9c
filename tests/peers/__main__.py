"""`make peers`: run other projects' tests against the endpoint and print one table."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tomllib
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .player import servers
from .sources import CACHE
from .suites import RUNNERS, Result

KINDS = ("mlxtp", "lacks", "theirs", "tiny")
SUITES = tomllib.loads((Path(__file__).parent / "suites.toml").read_text())


def pattern_of(suite: dict[str, Any], failed: Result) -> str:
    """Return the first pattern that knows a failure, else an empty one."""
    words, known = f"{failed.test} | {failed.note}", suite.get("known", {})
    return next((each for each in known if fnmatchcase(words, f"*{each.replace('[', '[[]')}*")), "")


def told(name: str, suite: dict[str, Any], results: list[Result]) -> dict[str, Any]:
    """Return a suite's row for the table and for `--json`. A failure that no pattern knows is mlxtp's."""
    known, failures = suite.get("known", {}), []
    for each in results:
        if not each.passed:
            pattern = pattern_of(suite, each)
            kind, _, reason = known.get(pattern, "mlxtp: not known").partition(": ")
            of = {"test": each.test, "kind": kind, "reason": reason, "pattern": pattern, "note": each.note}
            failures.append(of)
    counts = Counter(each["kind"] for each in failures)
    return {
        "suite": name, "title": suite["title"], "run": len(results), "passed": len(results) - len(failures),
        **{kind: counts[kind] for kind in KINDS}, "failures": failures,
        "stale": sorted(known.keys() - {each["pattern"] for each in failures}),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="make peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help=f"some of {', '.join(SUITES)}")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    chosen = [name for name in given.only.split(",") if name] or list(SUITES)
    if unknown := set(chosen) - SUITES.keys():
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    rows, skipped = [], {}
    print(f"| suite | run | passed | {' | '.join(KINDS)} |\n|---{'|---' * (2 + len(KINDS))}|", flush=True)
    with servers() as urls:
        for name in chosen:
            suite = SUITES[name]
            try:
                results = RUNNERS[suite["runner"]](suite, urls)
            except LookupError as error:
                skipped[name] = str(error)
                print(f"| {suite['title']} | skipped: {str(error).splitlines()[-1][-100:]} |", flush=True)
                continue
            rows.append(row := told(name, suite, results))
            counts = " | ".join(str(row[key]) for key in ("run", "passed", *KINDS))
            print(f"| {suite['title']} | {counts} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"suites": rows, "skipped": skipped}, indent=1))
    for row in rows:
        if row["stale"]:
            print(f"\n{row['suite']}: nothing fails any more of {', '.join(row['stale'])}")
    red = [(row["suite"], each) for row in rows for each in row["failures"] if each["kind"] == "mlxtp"]
    for name, each in red:
        print(f"\n{name}: {each['test']}\n  {each['reason']}\n  {each['note'][:500]}")
    sys.exit(bool(red) or not rows)


if __name__ == "__main__":
    main()
