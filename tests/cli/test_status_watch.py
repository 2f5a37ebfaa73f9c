"""`mlxtp status --watch`: the picture of a moment, and an agent that goes and comes back."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mlxtp.admin.handlers import announced
from mlxtp.api.app import create_app
from mlxtp.api.server import bind
from mlxtp.cli.main import app
from mlxtp.cli.status import picture

from ..api.test_admin import KEY
from ..pseudo_terminal import CTRL_C, terminal
from .test_cluster import TWO_REPLICAS, served

NODE = {
    "node_id": "ab" * 16, "name": "studio [left]", "state": "alive", "self": True, "coordinator": True,
    "draining": False, "model_problem": None,
}  # fmt: skip
RANK = {
    "rank": 0, "node": "ab" * 16, "phase": "decode", "memory_bytes": 52 * 10**9, "step_us": 31_400,
    "stage_busy_us": 0, "stage_waiting_us": 0,
}  # fmt: skip
UNHEARD = dict.fromkeys(("phase", "memory_bytes", "step_us", "stage_busy_us", "stage_waiting_us"))
ENDED = {
    **{"group": "org/model#0", "epoch": 6, "began": 0.0, "lasted_s": 3700.0},
    **{"code": "rank_lost", "reason": "rank 1 [x] fell silent"},
}
MOMENT: dict[str, Any] = {
    "state": "ready", "ready": True, "reason": None, "problem": None, "waiting": None, "epoch": 7,
    "model": "org/[model]", "group": {"world_size": 2, "kind": "JACCL mesh", "split": []},
    "ranks": [RANK, {"rank": 1, "node": "cd" * 16, **UNHEARD}],
    "tokens_per_second": {"value": 31.26, "of": "group"},
    "requests": {"open": 3, "generating": 2, "first_token": 0, "group": 0, "held_back": 1},
    "shown": "org/model#0",
    "history": [
        {**ENDED, "epoch": 7, "began": 10_000.0, "lasted_s": None, "code": None, "reason": None},
        ENDED,
    ],
    "deployments": [TWO_REPLICAS],
    "nodes": [
        NODE,
        {**NODE, "node_id": "cd" * 16, "name": "mini", "state": "suspect", "self": False,
         "coordinator": False, "model_problem": "half of it is missing"},
    ],
}  # fmt: skip


def drawn(moment: dict[str, Any] | None, away: dict[str, str] | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(picture(moment, 10_065.0, away))
    return [line.rstrip() for line in cast(io.StringIO, console.file).getvalue().splitlines()]


def test_the_picture_of_a_moment() -> None:
    state, speed, _, deployment, group, work, *none_yet, _, head, first, second, problem, _, before = drawn(
        MOMENT
    )
    assert state == "ready org/[model] on 2 ranks, JACCL mesh   epoch 7 for 1 min 5 s"
    assert speed == "31.3 tokens/s   open requests: 3: 2 generating, 1 held back"
    assert deployment == "org/[model]: ready, replicas: 1 of 2, --nodes 2"
    assert group == "  #0 ready on studio [left] (owner) + mini, JACCL mesh, epoch 7"
    assert work.endswith("3 running, 1 waiting, 120 tokens/s, 4,096 tokens cached")
    assert none_yet == ["  #1 idle", "     air: 30.1 GB are needed, and 12.0 GB are free"]
    assert head.split() == ["name", "state", "rank", "phase", "memory", "step"]
    assert first.split() == [
        *("studio", "[left]", "alive", "0", "decode", "52.0", "GB", "31.4", "ms"),
        *("this", "Mac,", "coordinator"),
    ]
    assert second.split() == ["mini", "suspect", "1"]
    assert problem == "mini: half of it is missing"
    assert before == "epoch 6 ended after 1 h 1 min: rank 1 [x] fell silent"
    ranks = [{**RANK, "stage_busy_us": 600, "stage_waiting_us": 200}, MOMENT["ranks"][1]]
    assert any("busy 75%" in line for line in drawn({**MOMENT, "ranks": ranks}))


def test_the_picture_of_a_cluster_without_a_group() -> None:
    nothing = {
        "state": "stopped", "ready": False, "reason": "nothing shall be served", "waiting": "who leads?",
        "model": None, "group": None, "ranks": [], "tokens_per_second": {"value": None, "of": "here"},
        "requests": {"open": 0}, "history": [],
        "deployments": [{**TWO_REPLICAS, "model": "org/next", "state": "idle", "groups": [], "nodes": "auto",
                         "replicas": {"ready": 0, "wanted": 1}, "why": "no Mac has it"}],
    }  # fmt: skip
    lines = drawn(MOMENT | nothing)
    assert lines[:7] == [
        "stopped   epoch 7",
        "- tokens/s (of requests to this Mac)   open requests: 0",
        "  nothing shall be served",
        "  who leads?",
        "",
        "org/next: idle, replicas: 0 of 1",
        "  no Mac has it",
    ]
    away = drawn(None, {"message": "nobody is there"})
    assert away == ["nobody is there", "waiting for it; Ctrl-C ends this", ""]


def test_a_model_that_comes_stands_once_with_the_mac_that_it_comes_to() -> None:
    coming = "org/next is on its way: 40 % of 9 GB"
    nothing = {
        "state": "idle",
        "ready": False,
        "model": None,
        "epoch": 0,
        "reason": coming,
        "waiting": coming,
    }
    lines = drawn(MOMENT | nothing | {"nodes": [NODE | {"model_progress": coming}]})
    assert [line for line in lines if "on its way" in line] == [f"studio [left]: {coming}"]
    assert lines[0] == "idle for 1 min 5 s"
    apart = {**nothing, "history": [], "reason": "who leads?", "waiting": "who leads?"}
    assert drawn(MOMENT | apart)[:3:2] == ["idle", "  who leads?"]
    assert [line.strip() for line in drawn(MOMENT | apart)].count("who leads?") == 1


class Observed:
    """An agent's state as it shows it."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.told: dict[str, Any] = MOMENT

    def snapshot(self) -> dict[str, Any]:
        return self.told


@contextmanager
def agent(home: Path, observed: Observed) -> Iterator[None]:
    """The real application behind a real port, which commands find in `home`."""
    sock = bind("127.0.0.1", 0)
    url, application = (
        "http://{}:{}".format(*sock.getsockname()),
        create_app(cast(Any, None), observed=observed),
    )
    with announced(home, url, KEY), served(application, sock):
        yield


@pytest.mark.slow
def test_a_terminal_shows_it_until_ctrl_c_whether_the_agent_is_there_or_not(tmp_path: Path) -> None:
    observed = Observed()
    with terminal("status", "--watch", "--home", str(tmp_path)) as screen:
        screen.see("no mlxtp node runs with home")
        screen.see("waiting for it")
        with agent(tmp_path, observed):
            screen.see("31.3 tokens/s")
            observed.told = MOMENT | {"tokens_per_second": {"value": 7.0, "of": "group"}}
            screen.see("7.0 tokens/s")
        screen.see("waiting for it")
        screen.see("7.0 tokens/s")  # what was last
        with agent(tmp_path, observed):
            screen.see("studio [left]")
            screen.type(CTRL_C)
            assert screen.end() == 0
    assert screen.shown.rstrip().endswith("fell silent")  # the last picture stays


def test_programs_get_a_line_for_each_change_and_a_picture_needs_a_terminal(tmp_path: Path) -> None:
    with (
        agent(tmp_path, Observed()),
        terminal("status", "--watch", "--json", "--home", str(tmp_path)) as screen,
    ):
        line = screen.see('"problem"')
        assert line.startswith('{"state": "ready"')
        screen.see("}]}\n")
        screen.type(CTRL_C)
        assert screen.end() == 0
    assert json.loads(screen.shown.splitlines()[0]) == MOMENT
    refused = CliRunner().invoke(app, ["status", "--watch", "--home", str(tmp_path)])
    assert refused.exit_code == 2
    assert "--watch needs a terminal" in " ".join(refused.stderr.replace("│", "").split())
