"""Tests of many rows, and of refusals: what both are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from mlxtp.errors import Code, MlxtpError


def cases(names: str, rows: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Return the parameters of a test: what each row shows, and its values, a tuple if there are several."""
    several = "," in names
    params = [pytest.param(*(values if several else (values,)), id=what) for what, values in rows.items()]
    return pytest.mark.parametrize(names, params)


@contextmanager
def refused(kind: type[MlxtpError], code: Code, words: str | None = None) -> Iterator[None]:
    """Expect an error of this kind and code, whose words match."""
    with pytest.raises(kind, match=words) as caught:
        yield
    assert caught.value.code is code
