"""A roomy actor for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .actor import Stage, stage


@pytest.fixture(scope="module")
def acting() -> Iterator[Stage]:
    with stage() as found:
        yield found
