"""The workflows of hosted runners, as far as they can be read here: YAML, targets, bounds and rights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
HOSTED = {"ubuntu-24.04", "macos-26"}
MOST_MINUTES = 60


def wrong(text: str) -> list[str]:
    """Return what is wrong with a workflow. A matrix has one list of rows, with `os`."""
    workflow: dict[Any, Any] = yaml.safe_load(text)
    targets = (ROOT / "Makefile").read_text()
    found = [] if workflow.get("permissions") == {"contents": "read"} else ["it may write"]
    if {"push", "pull_request"} - set(workflow[True]):  # YAML 1.1 reads `on` as true
        found.append("it does not run for each change")
    for name, job in workflow["jobs"].items():
        if not job.get("timeout-minutes", MOST_MINUTES + 1) <= MOST_MINUTES:
            found.append(f"{name} has no bound of time")
        if {row["os"] for row in job["strategy"]["matrix"]["include"]} != HOSTED:
            found.append(f"{name} does not run on {HOSTED}")
        for step in job["steps"]:
            if "uses" in step and not re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]):
                found.append(f"{name} uses {step['uses']}")
            for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
                if f"\n{target}:" not in targets:
                    found.append(f"{name}: make {target}")
    return found


CHECK = (ROOT / ".github" / "workflows" / "check.yml").read_text()


def test_the_workflow_can_be_run_on_linux_and_on_macs() -> None:
    assert wrong(CHECK) == []
    assert {"make lint", "make quick", "make test-groups"} <= set(re.findall(r"run: (make .*)", CHECK))
    assert "NOT RUN YET" in CHECK


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("make quick", "make quack", "quick: make quack"),
        ("contents: read", "contents: write", "it may write"),
        ("  pull_request:\n", "", "it does not run for each change"),
        ("    timeout-minutes: 60\n", "", "ring has no bound of time"),
        ("os: macos-26", "os: macos-13", "quick does not run on"),
        ("actions/checkout@v7", "someone/checkout@main", "quick uses someone/checkout@main"),
    ],
)
def test_what_is_wrong_is_found(before: str, after: str, words: str) -> None:
    assert before in CHECK
    assert any(each.startswith(words) for each in wrong(CHECK.replace(before, after, 1)))
