"""Several models and replicas on three Macs, and every fault of one of them: the others go on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlxtp.config import embedded_model_path

from ..hosts import Hosts, requires_namespaces
from ..live_cluster import WAIT_S, rank_processes
from .agents import SECRET, Agent, on_hosts, wait

pytestmark = requires_namespaces

COUNT = "Count from 1 to 60."
"""The longest answer that the tiny model has learned."""
STREAMS = 16
"""Requests that are open at each of two endpoints."""


class Desk:
    """Three agents with a host each, and folders of models that all of them can read."""

    def __init__(self, net: Hosts, agents: Sequence[Agent], folder: Path) -> None:
        self.net = net
        self.agents = agents
        self.folder = folder

    def model(self, name: str) -> str:
        """The folder of a copy of the tiny model by another name."""
        folder = self.folder / name
        if not folder.exists():
            shutil.copytree(embedded_model_path(), folder)
        return str(folder)

    def groups(self, agent: Agent, deployment: str) -> list[dict[str, Any]]:
        """The rows of a deployment's groups, as an agent sees them."""
        rows = agent.status().get("deployments", ())
        return [group for row in rows if row["name"] == deployment for group in row["groups"]]

    def ready(self, deployment: str, count: int, *agents: Agent) -> None:
        """Wait until these agents, by default all, see so many ready groups of a deployment."""
        watchers = agents or tuple(each for each in self.agents if each.runs)

        def seen() -> bool:
            return all(
                sum(group["state"] == "ready" for group in self.groups(agent, deployment)) == count
                for agent in watchers
            )

        wait(seen, f"{count} groups of {deployment} are ready", *watchers)

    def owner(self, deployment: str, index: int = 0) -> Agent:
        """The agent that owns a group."""
        watcher = next(each for each in self.agents if each.runs)
        groups = {group["id"]: group for group in self.groups(watcher, deployment)}
        owner = groups[f"{deployment}#{index}"]["owner"]
        names = {row["node_id"]: row["name"] for row in watcher.status()["members"]}
        return next(agent for agent in self.agents if agent.name == names.get(owner, owner))

    def only(self, *models: str, replicas: str = "1") -> None:
        """Serve these models, each on one Mac, and no others."""
        a = next(each for each in self.agents if each.runs)
        for number, model in enumerate(models):
            a.post("serve", model=model, nodes="1", replicas=replicas, only="" if number else "1")
        for model in models:
            self.ready(Path(model).name, int(replicas))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    with Hosts(3) as net:
        agents = on_hosts(folder, net, "anna", "ben", "cleo", flags=("--nodes", "1"))
        agents[0].start()
        agents[1].start("--join", agents[0].first_token())
        agents[2].start("--join", agents[0].token())
        wait(
            lambda: all(len(each.status().get("members", ())) == 3 for each in agents),
            "three members",
            *agents,
        )
        yield Desk(net, agents, folder)


@contextmanager
def asking(*agents: Agent, model: str = "default", streams: int = STREAMS) -> Iterator[list[str]]:
    """Meanwhile so many requests are open at each of these. Yields the answers; "" stands for none."""
    over, answers = threading.Event(), list[str]()

    def ask(agent: Agent) -> None:
        while not over.is_set():
            answers.append(agent.chat(COUNT, model=model, max_tokens=200))

    threads = [threading.Thread(target=ask, args=(each,), daemon=True) for each in agents * streams]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join(2 * WAIT_S)
        assert not any(thread.is_alive() for thread in threads), "a request has not ended"


@pytest.mark.chaos
def test_a_mac_that_comes_and_goes_moves_nothing_else(desk: Desk) -> None:
    desk.only("tiny", replicas="3")
    anna, ben, cleo = desk.agents
    before = {agent.name: rank_processes(agent.home) for agent in (anna, ben)}
    with asking(anna, ben, streams=2) as answers:
        for _ in range(3):
            cleo.kill()
            desk.ready("tiny", 2, anna, ben)
            cleo.start()
            desk.ready("tiny", 3)
    assert {agent.name: rank_processes(agent.home) for agent in (anna, ben)} == before
    assert "" not in answers


@pytest.mark.chaos
def test_a_model_that_never_loads_stands_beside_one_that_serves(desk: Desk) -> None:
    desk.only(desk.model("good"))
    broken = Path(desk.model("broken"))
    for weights in broken.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    owner = desk.owner("good")
    pids = rank_processes(owner.home)
    with asking(*desk.agents, model="good", streams=2) as answers:
        desk.agents[1].post("serve", model=str(broken), nodes="1")
        wait(
            lambda: any(group["state"] == "failed" for group in desk.groups(desk.agents[0], "broken")),
            "the broken model is given up",
            *desk.agents,
        )
    assert "" not in answers
    assert set(pids) <= set(rank_processes(owner.home))
    assert desk.agents[2].chat(model="good") == SECRET
    desk.agents[0].post("unload", model="broken")


@pytest.mark.chaos
def test_two_users_serve_on_two_sides_of_a_partition_that_heals(desk: Desk) -> None:
    desk.only(desk.model("good"))
    anna, ben, cleo = desk.agents
    hosts = desk.net.hosts
    desk.net.partition([hosts[0]], [hosts[1], hosts[2]])
    wait(lambda: anna.member(ben).get("state") == "dead", "the sides miss each other", anna)
    wait(lambda: ben.member(anna).get("state") == "dead", "the sides miss each other", ben)
    anna.post("serve", model=desk.model("left"), nodes="1")
    cleo.post("serve", model=desk.model("right"), nodes="1")
    desk.ready("left", 1, anna)
    desk.ready("right", 1, ben, cleo)
    desk.net.heal()
    for name in ("good", "left", "right"):
        desk.ready(name, 1)
        for agent in desk.agents:
            wait(lambda: agent.chat(model=name) == SECRET, f"{agent.name} answers for {name}", agent)  # noqa: B023


@pytest.mark.chaos
def test_the_coordinator_is_killed_while_it_assigns(desk: Desk) -> None:
    desk.only(desk.model("good"))
    for round_ in range(3):
        coordinator = next(
            each for each in desk.agents if each.name == desk.agents[0].status()["coordinator"]
        )
        other = next(each for each in desk.agents if each is not coordinator)
        name = f"late-{round_}"
        other.post("serve", model=desk.model(name), nodes="1")
        coordinator.kill()
        desk.ready(name, 1, *(each for each in desk.agents if each is not coordinator))
        coordinator.start()
        desk.ready("good", 1)
        other.post("unload", model=name)
