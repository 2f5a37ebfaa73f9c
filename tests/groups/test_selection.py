"""States of a model on its way to be served, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from mlxtp.groups.model_queue import DesiredFate

from mlxtp.cluster.deployments import DesiredState
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


# --- the desired state afterwards -------------------------------------------------------------------------

OLD, NEW = (DesiredState(version, "a", f"model-{version}", "auto") for version in (1, 2))


def test_only_the_state_that_was_desired_at_its_failure_has_failed() -> None:
    fate = DesiredFate().next(OLD, 1.0, ready=False, failed=True, unplanned=False)
    later = fate.next(NEW, 2.0, ready=False, failed=True, unplanned=False)
    assert (fate.failed, later.failed) == (OLD, OLD)
    assert later.next(NEW, 3.0, ready=False, failed=False, unplanned=False).failed is None


def test_the_time_without_a_place_begins_again_with_each_state() -> None:
    fate = DesiredFate()
    for desired, now, unplanned in ((OLD, 1.0, False), (OLD, 5.0, True), (NEW, 7.0, True), (NEW, 9.0, True)):
        fate = fate.next(desired, now, ready=False, failed=False, unplanned=unplanned)
    assert (fate.present, fate.lacking_since) == (NEW, 7.0)
    assert fate.next(NEW, 9.5, ready=False, failed=False, unplanned=False).lacking_since is None


def test_the_state_to_go_back_to_is_the_last_one_that_served_or_was_empty() -> None:
    fate = DesiredFate().next(OLD, 1.0, ready=True, failed=False, unplanned=False)
    assert fate.next(NEW, 2.0, ready=False, failed=True, unplanned=False).served == OLD
    empty = DesiredState(3, "a", "", "auto")
    assert fate.next(empty, 2.0, ready=False, failed=False, unplanned=True).served == empty
