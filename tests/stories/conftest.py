"""Groups and a model for the stories of features."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..engine.small_models import write_model
from ..live_cluster import Cluster


@pytest.fixture(
    params=[
        *(pytest.param(name, marks=pytest.mark.chaos) for name in ("one_rank", "two_stages")),
        "two_ranks",
    ]
)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    found: Cluster = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights."""
    return write_model(tmp_path_factory.mktemp("model") / "small")
