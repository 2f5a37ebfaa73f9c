"""A process that is killed at any moment leaves each file as it was or as it was to be: never neither."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlxtp.api.api_keys import KeyFile
from mlxtp.client import AgentClient
from mlxtp.cluster import state_file
from mlxtp.identity.store import Store
from mlxtp.models import self_test

from .. import crash_writer
from ..agents.agents import Agent, wait
from ..agents.test_one_machine import free_port

pytestmark = [pytest.mark.slow, pytest.mark.fault]

LONGEST_S = 0.06
"""Some rounds of the writer."""


def killed(home: Path, after_s: float) -> int:
    """The last round that the writer said to be over, when it was killed so long after its first one."""
    command = [sys.executable, "-m", "tests.crash_writer", str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        first = process.stdout.readline()
        time.sleep(after_s)
        process.kill()
        rest = process.stdout.read()
    assert first, "the writer could not begin"
    return int((first + rest[: rest.rfind("\n") + 1]).split()[-1])


def check(home: Path, last: int) -> None:
    """Everything is as after round `last`, or as after the next one. What each file says is read as ever."""
    kept, told = state_file.load(home)
    assert told == ""
    assert kept.beliefs.epoch in (last, last + 1)
    names = [key.name for key in KeyFile(home).load()]
    assert names in ([f"k{last}"], [f"k{last}", f"k{last + 1}"], [f"k{last + 1}"])
    Store(home).load_or_create()
    ref = (crash_writer.repo(home).folder / "refs" / "main").read_text()
    assert int(ref, 16) in (last, last + 1)
    assert len(json.loads((home / self_test.FILE).read_text())) <= crash_writer.GOLDEN
    assert int(AgentClient(home).url.rpartition(":")[2]) in (last, last + 1)


@pytest.mark.parametrize("kills", [3, pytest.param(500, marks=pytest.mark.chaos)])
def test_every_file_is_the_old_one_or_the_new_one(tmp_path: Path, kills: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    node_id = Store(tmp_path).load_or_create().node_id
    for _ in range(kills):
        check(tmp_path, killed(tmp_path, moments.uniform(0, LONGEST_S)))
    assert Store(tmp_path).load().node_id == node_id
    left = {path.name for path in tmp_path.iterdir() if path.name.endswith((".new", ".draft"))}
    assert len(left) <= 3, left  # at most one of each writer, which the next write replaces


#: In place of "" the name of the other Mac.
COMMANDS = (
    ("key", "create", "laptop"),
    ("serve", "tiny"),
    ("cluster", "remove", ""),
    ("key", "revoke", "laptop"),
    ("cluster", "leave"),
)


@pytest.mark.chaos
@pytest.mark.group
def test_agents_that_are_killed_around_commands_start_with_the_old_or_the_new(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    moments, port = random.Random(seed), free_port()
    common = ("--no-discovery", "--http", "127.0.0.1:0")
    a = Agent(tmp_path, "anna", None, *common, "--control", f"127.0.0.1:{port}")
    try:
        a.start()
        for number in range(4 * len(COMMANDS)):
            wait(a.status, "anna answers", a)
            b = Agent(tmp_path, f"ben-{number}", None, *common, "--control", "127.0.0.1:0")
            try:
                b.start("--join", a.token(), "--peer", f"127.0.0.1:{port}")
                wait(lambda: a.member(b) and b.member(a), "ben is a member", a, b)  # noqa: B023
                words = [word or b.name for word in COMMANDS[number % len(COMMANDS)]]
                agent = b if words == ["cluster", "leave"] else a
                with begun(agent, *words) as process:
                    time.sleep(moments.uniform(0.3, 1.0))
                    process.kill()
                    agent.kill()
                assert [key.name for key in KeyFile(a.home).load()] in ([], ["laptop"])
                agent.start()
                wait(agent.status, f"{agent.name} answers", agent)
                assert not agent.said("set aside"), agent.log
            finally:
                b.close()
    finally:
        a.close()


def begun(agent: Agent, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlxtp", *words, "--home", str(agent.home)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)
