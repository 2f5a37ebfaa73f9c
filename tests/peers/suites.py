"""Run a suite: a function of its table in `suites.toml` and of the servers' addresses."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..reference import TINY
from .sources import CACHE, bun, cloned, environment, run, unpacked

HERE = Path(__file__).parent
NOT_RUN = "it did not run"  # as `stand_in` says


@dataclass(frozen=True)
class Result:
    """One test of a suite. `passed` is None if it was skipped. `note` is why it failed."""

    test: str
    passed: bool | None
    note: str = ""


def by_pytest(suite: Mapping[str, Any], urls: Sequence[str]) -> list[Result]:
    """Tests for pytest. One that fails with the model is tried once more with the player."""
    if "package" not in suite:  # in a folder of its own, without the `conftest.py` above this one
        (folder := CACHE / "own").mkdir(exist_ok=True)
        for test in suite["tests"]:
            shutil.copy(HERE / test, folder)
    else:
        folder = unpacked(suite["package"], suite["folders"], suite.get("rewrites", {})) / suite.get(
            "root", ""
        )
        for path, text in suite.get("written", {}).items():
            with (folder / path).open("a") as file:
                file.write(text)
    found: dict[str, Result] = {}
    tests = list(suite["tests"])
    for url in urls:
        for _ in range(2):  # a test that runs out of time may take the process with those behind it along
            found |= {result.test: result for result in _asked(suite, folder, url, tests)}
            if not (tests := [result.test for result in found.values() if result.note == NOT_RUN]):
                break
        if not (tests := [result.test for result in found.values() if result.passed is False]):
            break
    return [result for result in found.values() if result.passed is not None]


def _asked(suite: Mapping[str, Any], folder: Path, url: str, tests: Sequence[str]) -> list[Result]:
    with tempfile.TemporaryDirectory() as name:
        results, chosen = Path(name) / "results", Path(name) / "chosen"
        chosen.write_text("\n".join(tests))
        given = {
            "PYTHONPATH": f"{HERE}:{folder}", "PEER_URL": url, "PEER_RESULTS": str(results),
            "PEER_TOKENIZER": str(TINY), "PEER_LEFT_OUT": json.dumps(list(suite.get("left_out", ()))),
            "DEBUG_EXTERNAL": "1", "PORT": url.rpartition(":")[2], "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        options = [
            "-q", "--tb=short", "-c", os.devnull, "--rootdir", folder, "--timeout", 60, "-m", "not slow",
            "-o", "python_files=test_*.py cases_*.py", "--continue-on-collection-errors",
            "-p", "stand_in", "-p", "no:cacheprovider", "-p", "no:schemathesis",
        ]  # fmt: skip
        try:
            run([environment(), "-m", "pytest", *options, f"@{chosen}"], cwd=folder, env=given)
        except LookupError:  # some failed
            if not results.exists():
                raise
        return [Result(**json.loads(line)) for line in results.read_text().splitlines()]


def by_open_responses(suite: Mapping[str, Any], urls: Sequence[str]) -> list[Result]:
    """The compliance tests of Open Responses, with bun."""
    folder = cloned(suite["repository"])
    command = f"{bun(folder)} run bin/compliance-test.ts -k none -m tiny --json -u"
    found: dict[str, Result] = {}
    for url in urls:
        written = run(["sh", "-c", f"{command} {url}/v1 2>{os.devnull} || true"], cwd=folder)
        for row in json.loads(written)["results"]:
            passed = row["status"] == "passed"
            if passed or row["id"] not in found:
                found[row["id"]] = Result(row["id"], passed, "; ".join(map(str, row.get("errors") or ())))
    return list(found.values())


def by_schemathesis(suite: Mapping[str, Any], urls: Sequence[str]) -> list[Result]:
    """Requests made from /openapi.json, by a fixed seed. A result is an operation or a failure of it."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        command = [environment().parent / "schemathesis", "run", f"{urls[1]}/openapi.json", *suite["options"]]
        try:
            run([*command, "--report", "junit", "--report-junit-path", report], cwd=name)
        except LookupError:  # some failed
            if not report.exists():
                raise
        found = []
        for case in ElementTree.parse(report).iter("testcase"):
            bad = [each for tag in ("failure", "error") for each in case.iter(tag)]
            words = "\n".join(f"{each.get('message') or ''} {each.text or ''}" for each in bad)
            kinds = sorted({*re.findall(r"\bST\d+", words)}) or ["error"] * bool(bad)
            found += [Result(f"{case.get('name')}: {kind}", False, words) for kind in kinds]
            found += [Result(f"{case.get('name')}", True)] * (not bad)
        return found


def by_lm_eval(suite: Mapping[str, Any], urls: Sequence[str]) -> list[Result]:
    """Tasks of the evaluation harness whose rows stand here: no data is fetched. A result is a task."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        rows, folder = suite["rows"], Path(name)
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        model = f"model=tiny,base_url={urls[0]}/v1/completions,tokenizer_backend=remote,num_concurrent=1"
        for kind, task in suite["tasks"].items():
            (folder / f"{kind}.yaml").write_text(task.replace("ROWS", str(folder / "rows.jsonl")))
            lm_eval = [environment().parent / "lm_eval", "--model", "local-completions"]
            command = [*lm_eval, "--model_args", model, "--tasks", kind, "--include_path", folder]
            try:
                score = re.search(suite["right"], run(command, env={"HF_HUB_OFFLINE": "1"}))
                found.append(Result(kind, bool(score), "another score"))
            except LookupError as error:
                found.append(Result(kind, False, str(error)[-500:]))
    return found


RUNNERS: dict[str, Callable[[Mapping[str, Any], Sequence[str]], list[Result]]] = {
    "pytest": by_pytest,
    "open-responses": by_open_responses,
    "schemathesis": by_schemathesis,
    "lm-eval": by_lm_eval,
}
