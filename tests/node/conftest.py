"""A member of a cluster, and the model that it has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from mlxtp.config import embedded_model_path
from mlxtp.models.inspect import ModelSource
from mlxtp.text.tokenizer import Text

from ..hub import Hub, put, running_hub
from ..wire.members import Member, founder, member_of


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Member:
    """The Mac that founded the cluster of `member`."""
    return founder(tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="session")
def member(first: Member, tmp_path_factory: pytest.TempPathFactory) -> Member:
    return member_of(first, tmp_path_factory.mktemp("member"))


@pytest.fixture(scope="session")
def weights() -> ModelSource:
    """The embedded model without its tokenizer, which takes a second to open."""
    return ModelSource("tiny", embedded_model_path(), cast(Text, None))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub whose client does not wait long before it tries again, and has a cache of its own."""
    monkeypatch.setattr("time.sleep", lambda s: threading.Event().wait(min(s, 0.05)))
    with running_hub() as running:
        put(running.url, tmp_path / "cache", monkeypatch)
        yield running
