"""Requests as programs send them, answered so that the official parsers take every event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from .actor import stage
from .replay import answered, recordings

#: Programs in general; Codex, with namespaces and hosted tools; structured output from a model that rambles.
GROUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "codex": {},
    "structured": {"rambles": True, "context": 4096},
}


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    with ExitStack() as stages:
        yield {group: stages.enter_context(stage(**options)).url for group, options in GROUPS.items()}


@pytest.mark.parametrize(
    ("group", "recording"),
    [
        pytest.param(group, *each.values, id=f"{group}-{each.id}")
        for group in GROUPS
        for each in recordings(group)
    ],
)
def test_a_recorded_request_is_answered(urls: dict[str, str], group: str, recording: dict[str, Any]) -> None:
    assert answered(urls[group], recording) == recording["expected"]
