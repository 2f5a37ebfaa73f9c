"""Choice of the member that the others copy a model from."""

from __future__ import annotations

import pytest

from mlxtp.models.manifest import elect_seeder
from mlxtp.wire.cluster_messages import ModelHeld

WHOLE = ModelHeld("org/one", "a" * 40, 9, 9)
PASSING = ModelHeld("org/one", "a" * 40, 9, 9, wants=False)
"""It has all of it and does not want it."""
HALF = ModelHeld("org/one", "", 5, 0, free=100)
EMPTY = ModelHeld("org/one", free=100)
ROOMY = ModelHeld("org/one", free=500)
GATED = ModelHeld("org/one", free=100, problem="it is gated")
OTHER = ModelHeld("org/one", wants=False)


@pytest.mark.parametrize(
    ("members", "now", "chosen"),
    [
        ({"a": HALF, "b": WHOLE}, "", "b"),
        ({"a": HALF, "b": PASSING}, "a", "b"),
        ({"a": WHOLE, "b": WHOLE}, "b", "b"),
        ({"a": EMPTY, "b": HALF}, "", "b"),
        ({"a": EMPTY, "b": ROOMY}, "", "b"),
        ({"a": EMPTY, "b": EMPTY}, "", "a"),
        ({"a": EMPTY, "b": HALF}, "a", "a"),
        ({"a": GATED, "b": EMPTY}, "a", "b"),
        ({"a": GATED, "b": OTHER}, "a", ""),
        ({"a": EMPTY, "b": OTHER}, "gone", "a"),
        ({}, "gone", ""),
    ],
)
def test_who_has_it_then_who_can_get_it_and_no_choice_changes_in_the_middle(
    members: dict[str, ModelHeld], now: str, chosen: str
) -> None:
    assert elect_seeder(members, now) == chosen
    assert elect_seeder(dict(reversed(members.items())), now) == chosen
