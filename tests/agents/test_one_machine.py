"""Several agents on one machine, over its loopback and without multicast: no root, no second host."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..live_cluster import rank_processes
from .agents import SECRET, Agent, serving, wait


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Agent]]:
    folder = tmp_path_factory.mktemp("one-machine")
    ports = [free_port(), free_port()]
    a, b = (
        Agent(
            folder, name, None, "--http", "127.0.0.1:0", "--control", f"127.0.0.1:{port}",
            "--no-discovery",
        )
        for name, port in zip(("anna", "ben"), ports, strict=True)
    )  # fmt: skip
    try:
        a.start()
        b.start("--join", a.first_token(), "--peer", f"127.0.0.1:{ports[0]}")
        serving(a, b)
        yield a, b
    finally:
        a.close()
        b.close()


def test_two_agents_serve_together_and_any_of_them_is_asked(pair: tuple[Agent, Agent]) -> None:
    for agent in pair:
        shown = agent.command("status")
        assert shown.returncode == 0, shown.stderr
        for words in ("ready tiny on 2 Macs", "ring within one machine", "anna", "ben"):
            assert words in shown.stdout
        assert (agent.home / "agent.json").stat().st_mode & 0o77 == 0


def test_the_fabric_is_measured_from_any_member_and_all_know_it(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    epoch = a.status()["epoch"]
    assert [agent.status()["fabric"] for agent in pair] == [None, None]
    assert a.post("bench/fabric")["kind"] == "ring within one machine"
    done = b.command("bench", "--fabric", "--json")  # rank 0 is on one of them
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert sorted(told["names"]) == ["anna", "ben"]
    assert min(*told["sums_s"], *told["gathers_s"], told["collective_s"]) > 0
    for agent in pair:
        [kept] = json.loads((agent.home / "fabric.json").read_text())["results"]
        assert kept["collective_s"] == agent.status()["fabric"]["collective_s"] == told["collective_s"]
    assert {agent.chat() for agent in pair} == {SECRET}
    assert a.status()["epoch"] == epoch


def test_what_is_in_the_way_is_said_by_the_agents_themselves(pair: tuple[Agent, Agent]) -> None:
    for agent, other in zip(pair, reversed(pair), strict=True):
        done = agent.command("doctor", "--json")
        told = json.loads(done.stdout)
        assert told["looked"] == "agent"
        rows = {row["id"]: row for row in told["rows"]}
        said = {name: [finding["what"] for finding in row["findings"]] for name, row in rows.items()}
        assert [each.partition(";")[0] for each in said["peers"]] in (
            [f"{other.name}: both ways"],
            [f"{other.name}: reached"],  # by its only link, opened at this end
        )
        assert "same on 2 machines" in said["models"][0]
        assert [rows[each]["level"] for each in ("agent", "serving", "ports")] == ["ok"] * 3
        assert rows["identity"]["level"] == ("info" if agent is pair[0] else "ok"), "one holder of two Macs"
        assert done.returncode == 0


def failure(agent: Agent, epoch: int) -> str:
    """Return the folder with this agent's records of a failed epoch, of which it may not be the last one."""
    (folder,) = wait(
        lambda: list((agent.home / "failures").glob(f"*-epoch-{epoch}")), f"{agent.name} keeps it", agent
    )
    return str(folder)


def test_why_a_group_failed_is_said_at_any_member(pair: tuple[Agent, Agent]) -> None:
    """Each Mac keeps the file of its own rank. Folders of both make one report."""
    a, b = pair
    epoch = a.status()["epoch"]
    (rank,) = rank_processes(b.home)
    os.kill(rank, signal.SIGKILL)
    wait(lambda: a.status().get("epoch", 0) > epoch, "the group ends", *pair)
    serving(*pair)
    folders = [failure(agent, epoch) for agent in pair]
    for agent in pair:
        done = agent.command("doctor", "--postmortem", "--json", *folders)
        assert done.returncode == 0, done.stderr
        [found] = json.loads(done.stdout)["failures"]
        assert (found["epoch"], found["elsewhere"]) == (epoch, {})
        assert [each["node"] for each in sorted(found["ranks"], key=lambda each: each["node"])] == [
            "anna",
            "ben",
        ]
        assert found["cause"]["kind"] == "killed from outside"


def test_what_is_served_is_said_at_any_member(pair: tuple[Agent, Agent], tmp_path: Path) -> None:
    a, b = pair
    epoch = a.status()["epoch"]
    unloaded = b.command("unload")
    assert unloaded.returncode == 0, unloaded.stderr
    wait(lambda: [agent.status().get("state") for agent in pair] == ["idle", "idle"], "no one serves", *pair)
    assert not a.chat()
    why = "no model is configured; run `mlxtp serve MODEL`"
    wait(lambda: all(agent.status().get("reason") == why for agent in pair), "both say why", *pair)
    missing = a.command("serve", str(tmp_path / "nothing"))
    assert missing.returncode == 1
    assert "neither a folder nor an id on the Hub" in missing.stderr
    assert a.command("serve", "tiny", "--nodes", "auto").returncode == 0
    serving(*pair)
    assert a.status()["epoch"] > epoch
    assert {agent.chat() for agent in pair} == {SECRET}


def test_an_agent_that_is_told_to_end_says_goodbye_and_leaves_nothing(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    b.stop()
    wait(lambda: a.member(b)["state"] == "left", "the other one heard the goodbye", a)
    serving(a)
    gone = b.command("status")
    assert gone.returncode == 1
    assert f"no mlxtp node runs with home {b.home}" in gone.stderr
    assert not list((b.home / "run").iterdir())
    assert not (b.home / "agent.json").exists()
    b.start()  # it remembers where the other one is
    serving(a, b)
