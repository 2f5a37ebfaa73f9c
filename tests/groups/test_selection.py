"""States of a model on its way to be served, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from mlxtp.groups.selection import SelectedModel, SelectionState
from mlxtp.models.inspect import Servable

CHECKING, CHECKED, FETCHING, READY, WANTED, FAILED = SelectionState


def through(*states: SelectionState) -> SelectedModel:
    model = SelectedModel("org/model")
    for state in states:
        model = model.next(state)
    return model


@pytest.mark.parametrize(
    "states",
    [
        (CHECKED, READY, WANTED),
        (CHECKED, FETCHING, READY, WANTED),
        (CHECKED, FETCHING, FAILED),
        (FAILED,),
    ],
)
def test_a_model_goes_through_its_states_in_order(states: tuple[SelectionState, ...]) -> None:
    assert through(*states).state is states[-1]


@pytest.mark.parametrize(
    "states",
    [
        (READY,),
        (FETCHING,),
        (CHECKED, CHECKED),
        (CHECKED, WANTED),
        (CHECKED, FETCHING, WANTED),
        (CHECKED, READY, FETCHING),
        (CHECKED, READY, WANTED, FAILED),
        (FAILED, CHECKED),
    ],
)
def test_no_state_is_skipped_and_none_comes_back(states: tuple[SelectionState, ...]) -> None:
    before = through(*states[:-1])
    with pytest.raises(ValueError, match=f"org/model is {before.state}, so it cannot be {states[-1]}"):
        before.next(states[-1])


def test_what_a_check_finds_stays_with_the_model() -> None:
    here = Servable("org/model", cast(Any, None), Path("/models/one"))
    assert SelectedModel("org/model").next(CHECKED, servable=here).next(FETCHING).servable is here
