"""The pages that are read off the code say what the code says now."""

from __future__ import annotations

import pytest

from scripts.reference import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_the_code_is(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `make reference`"
