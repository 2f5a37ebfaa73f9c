"""The states of an agent's epochs: the table, its drawing in the docs, and what comes of a forbidden move."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mlxtp.config import Settings
from mlxtp.errors import GroupError
from mlxtp.groups.health import TRANSITIONS, ServingState
from mlxtp.groups.process_group import EpochGroup

from .scenes import made

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
FENCE = "```mermaid\nstateDiagram-v2\n"


def drawing() -> str:
    """The table as a Mermaid diagram, in its own order."""
    moves = [
        (before, after) for before in TRANSITIONS for after in TRANSITIONS if after in TRANSITIONS[before]
    ]
    lines = ["[*] --> starting", *(f"{before} --> {after}" for before, after in moves), "stopped --> [*]"]
    return "".join(f"    {line}\n" for line in lines)


def test_the_docs_draw_the_table() -> None:
    drawn = PAGE.read_text().partition(FENCE)[2].partition("```")[0]
    assert drawn == drawing(), f"docs/cluster.md should have:\n\n{FENCE}{drawing()}```"


def test_every_state_is_reached_and_left_but_the_last() -> None:
    reached = {after for following in TRANSITIONS.values() for after in following}
    assert reached == set(TRANSITIONS) == set(ServingState) - {ServingState.FORMING, ServingState.IDLE}
    assert [state for state in TRANSITIONS if not TRANSITIONS[state]] == [ServingState.STOPPED]
    assert all(
        ServingState.STOPPED in following
        for state, following in TRANSITIONS.items()
        if state is not ServingState.STOPPED
    )


def test_a_move_that_is_not_legal_is_logged_and_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = made(Settings(tmp_path, "", 0, 1, "tiny"))
    with caplog.at_level(logging.ERROR):
        supervisor.status.enter(ServingState.LOADING)
        supervisor.status.enter(ServingState.LOADING)
        assert caplog.records == []
        supervisor.status.enter(ServingState.FAILED)
    [record] = caplog.records
    assert record.getMessage() == "epoch 0 went from loading to failed, which is a bug"
    assert supervisor.status.state is ServingState.FAILED


def test_what_another_mac_goes_through_is_not_judged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = made(Settings(tmp_path, "", 0, 1, "tiny"))
    with caplog.at_level(logging.ERROR):
        for state in (ServingState.READY, ServingState.FAILED, ServingState.LOADING):
            supervisor.status.show(state)
        supervisor.status.enter(ServingState.STARTING)
    assert caplog.records == []


def test_the_reason_of_the_wait_for_a_plan_ends_with_the_wait(tmp_path: Path) -> None:
    status = made(Settings(tmp_path, "", 0, 1, "tiny")).status
    group = EpochGroup(1, 1, "none")
    status.follow(ServingState.IDLE, 0, "tiny is still being looked for", group)
    status.began(1, group, "tiny")
    assert status.reason is None
    status.failed(GroupError("rank 0 is gone"))
    status.began(2, group, "tiny")
    assert status.reason.detail == "rank 0 is gone"
