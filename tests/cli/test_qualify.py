"""Verdicts and the report of `mlxtp qualify`, without Macs. tests/agents/test_qualify.py has it run."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from mlxtp.cli import qualify
from mlxtp.cli.qualify import Row
from mlxtp.client import Piece
from mlxtp.errors import UserError


@pytest.mark.parametrize(
    ("kind", "macs", "why"),
    [
        ("one Mac", 3, ""),
        ("tensor", 2, ""),
        ("tensor", 3, "4 key/value heads of the embedded model do not divide among 3 Macs"),
        ("pipeline", 3, ""),
        ("pipeline", 5, "the embedded model has too few layers for 5 Macs"),
    ],
)
def test_what_so_many_macs_cannot_share_is_left_out_with_the_reason(kind: str, macs: int, why: str) -> None:
    assert qualify.impossible(kind, macs, 4) == why


@pytest.mark.parametrize(
    ("measured", "planned", "verdict", "words"),
    [
        (21.0, 20.0, "ok", "21 tokens/s, 20 by plan (+5%)"),
        (13.0, 20.0, "warning", "13 tokens/s, 20 by plan (-35%)"),
        (13.0, 0.0, "warning", "13 tokens/s; the plan does not know these Macs"),
    ],
)
def test_speeds_are_judged_by_the_plan(measured: float, planned: float, verdict: str, words: str) -> None:
    row = qualify.compared(measured, planned, {})
    assert (row.verdict, row.words) == (verdict, words)


def test_a_try_that_raises_is_a_row_that_failed() -> None:
    def fails() -> Row:
        raise UserError("no group forms")

    assert qualify.tried("links", fails) == [Row("links", "failed", "no group forms")]


@pytest.mark.parametrize(("error", "wrong"), [("", ""), ("gone", "'gone'")])
def test_streams_count_until_their_time_is_over(error: str, wrong: str) -> None:
    def ask(_: object) -> Iterator[Piece]:
        if error:
            raise UserError(error)
        yield Piece(text=" ".join(map(str, range(1, 61))))

    agent = cast(Any, SimpleNamespace(ask=ask))
    longest, said, count = qualify.counting(agent, time.monotonic() + 0.05)
    assert count >= qualify.STREAMS
    assert longest < 60
    assert set(said) == ({wrong} if wrong else set())
    assert len(said) == (count if wrong else 0)


def test_names_ids_and_addresses_are_hidden_from_a_report() -> None:
    members = [{"node_id": "ab12cd34", "name": "Ann's Studio"}, {"node_id": "ef56", "name": "Ann"}]
    hide = qualify.hider(("Ann's Studio", "Ann"), {"members": members}, Path("/srv/agent"))
    text = "Ann's Studio (ab12cd34) at 192.168.1.7 and fe80::1:2:3, not Ann; "
    text += f"{Path.home()}/x /srv/agent/y; 12:30:05"
    assert hide(text) == "Mac 1 (Mac 1) at ADDRESS and ADDRESS, not Mac 2; ~/x HOME/y; 12:30:05"


def test_names_that_are_words_of_json_or_of_rich_break_no_report() -> None:
    status = {"members": [{"node_id": "ab12", "name": name} for name in ("a", "true", "rows", "1")]}
    hide = qualify.hider(("a", "true", "rows", "1"), status, Path("/srv/agent"))
    rows = [Row("try of [red]", "ok", "a said [/] 1 of 11", {"metal": True, "rows": 1})]
    found = qualify.report(rows, {**status, "versions": ["mlx=1"]}, hide)
    assert found["rows"][0]["words"] == "Mac 1 said [/] Mac 4 of 11"
    assert found["rows"][0]["figures"]["metal"] is True
    assert set(found) >= {"format", "rows", "versions"}
    shown = Console(file=io.StringIO(), width=200)
    shown.print(qualify.shown_table(found["rows"]))
    assert "try of [red]" in shown.file.getvalue()  # type: ignore[attr-defined]


def test_questions_have_one_right_answer() -> None:
    for number in range(8):
        text, right = qualify.echo(number)
        assert text == f"Repeat exactly: {right}"
    text, right = qualify.haystack()
    name = text.rpartition(" ")[2].rstrip("?")
    assert f"The code for {name} is {right}." in text


def bed_with(processes: dict[str, list[int]]) -> qualify.Bed:
    told = {
        "deployments": [
            {"name": "other", "groups": [{"id": "other#0"}]},
            {"name": "tiny", "groups": [{"id": "tiny#0"}]},
        ],
        "processes": processes,
    }
    agent = cast(Any, SimpleNamespace(send=lambda _verb: told))
    return qualify.Bed(agent, Path("/nowhere"), ("a", "b"), lambda _words: None)


def test_the_rank_that_is_killed_is_that_of_the_embedded_model() -> None:
    """Whether it was a warm process before does not matter, and other models' ranks are left alone."""
    assert qualify.own_rank(bed_with({"other#0": [11], "tiny#0": [12]})) == 12
    with pytest.raises(UserError, match="this Mac has no rank of the embedded model"):
        qualify.own_rank(bed_with({"other#0": [11]}))
