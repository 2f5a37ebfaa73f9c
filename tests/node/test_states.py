"""The states of an agent's epochs: the table, its drawing in the docs, and what comes of a forbidden move."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mlxtp.config import Settings
from mlxtp.groups.health import MOVES, State, is_legal
from mlxtp.groups.lifecycle import Supervisor

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
FENCE = "```mermaid\nstateDiagram-v2\n"


def drawing() -> str:
    """The table as a Mermaid diagram, in its own order."""
    moves = [(before, after) for before in MOVES for after in MOVES if after in MOVES[before]]
    lines = ["[*] --> starting", *(f"{before} --> {after}" for before, after in moves), "stopped --> [*]"]
    return "".join(f"    {line}\n" for line in lines)


def test_the_docs_draw_the_table() -> None:
    drawn = PAGE.read_text().partition(FENCE)[2].partition("```")[0]
    assert drawn == drawing(), f"docs/architecture.md should have:\n\n{FENCE}{drawing()}```"


def test_every_state_is_reached_and_left_but_the_last() -> None:
    reached = {after for following in MOVES.values() for after in following}
    assert reached == set(MOVES) == set(State) - {State.FORMING}
    assert [state for state in MOVES if not MOVES[state]] == [State.STOPPED]
    assert all(State.STOPPED in following for state, following in MOVES.items() if state is not State.STOPPED)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (State.STARTING, State.READY),
        (State.RESTARTING, State.READY),
        (State.DRAINING, State.READY),
        (State.FAILED, State.READY),
        (State.READY, State.FAILED),
        (State.STOPPED, State.STARTING),
    ],
)
def test_what_is_not_in_the_table_is_not_legal(before: State, after: State) -> None:
    assert not is_legal(before, after)
    assert is_legal(before, before)


def test_a_move_that_is_not_legal_is_logged_and_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(Settings(tmp_path, "", 0, 1, "tiny"))
    with caplog.at_level(logging.ERROR):
        supervisor._enter(State.LOADING)
        assert caplog.records == []
        supervisor._enter(State.FAILED)
    [record] = caplog.records
    assert record.getMessage() == "epoch 0 went from loading to failed, which is a bug"
    assert supervisor.state is State.FAILED


def test_what_another_mac_goes_through_is_not_judged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(Settings(tmp_path, "", 0, 1, "tiny"))
    with caplog.at_level(logging.ERROR):
        for state in (State.READY, State.FAILED, State.LOADING):
            supervisor._show(state)
        supervisor._enter(State.STARTING)
    assert caplog.records == []
