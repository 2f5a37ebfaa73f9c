"""Rows that say which tests `make test` leaves out, and the table of laws, name tests that there are."""

from __future__ import annotations

import re

import pytest

from ..pages import ROOT
from ..rings import KEPT, SLOW, WHOLE, in_whole

TESTS = ROOT / "tests"


def stands_in(file: str, test: str) -> bool:
    return re.search(rf"^(async )?def {test}\(", (TESTS / file).read_text(), re.MULTILINE) is not None


@pytest.mark.parametrize("row", [*WHOLE, *KEPT, *SLOW])
def test_a_row_names_tests(row: str) -> None:
    path, _, test = row.partition("::")
    assert (TESTS / path).exists()
    assert not test or stands_in(path, test.partition("[")[0])


def test_only_what_is_left_out_is_kept() -> None:
    assert [
        row for row in KEPT if not any(row.startswith(f"{each}::") or f"{each}[" in row for each in WHOLE)
    ] == []
    assert in_whole("page/test_chat.py::test_x")
    assert not in_whole("pages.py::test_x")


def test_each_law_has_the_tests_that_are_named_as_its_holders() -> None:
    rows = (TESTS / "README.md").read_text().splitlines()
    laws = [row for row in rows[rows.index("|---|---|---|") :] if row.startswith("| ")]
    assert len(laws) > 20
    for law in laws:
        holder, story = re.findall(r"`([\w/]+\.py)::(\w+)`", law)
        for file, name in (holder, story):
            assert stands_in(file, name), law
        assert not in_whole("::".join(holder)), f"`make test` leaves out: {law}"
