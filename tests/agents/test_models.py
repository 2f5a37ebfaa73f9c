"""Three agents that want one model: it is downloaded once, copied meanwhile, and served by all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..hub import TOKEN, Hub, Model, embedded, running_hub, with_weights
from .agents import Agent, serving, wait
from .test_one_machine import free_port

NAME, LATER, SMALL = "some-body/llama", "some-body/later", "some-body/tiny"
GATED, SLOW = "some-body/gated", "some-body/slow"
PIECE = 16 << 20
BIG = 3 * PIECE


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        running.models = {
            NAME: Model(with_weights(BIG, BIG), pace=24e6),
            LATER: Model(with_weights(BIG + 1, BIG + 1), pace=12e6),
            SMALL: Model(embedded()),
            GATED: Model(embedded(), gated=True),
            SLOW: Model(embedded(), pace=1e6),
        }
        yield running


@pytest.fixture(scope="module")
def three(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Agent, Agent]]:
    folder = tmp_path_factory.mktemp("models")
    ports = [free_port(), free_port(), free_port()]
    agents = tuple(
        Agent(
            folder, name, None, "--http", "127.0.0.1:0", "--control", f"127.0.0.1:{port}",
            "--no-discovery",
        )
        for name, port in zip(("anna", "ben", "cleo"), ports, strict=True)
    )  # fmt: skip
    a, b, c = agents
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        try:
            for agent in agents:
                patch.setenv("HF_HOME", str(agent.home / "hf"))  # each its own disk
                if agent is b:
                    patch.setenv("HF_TOKEN", TOKEN)
                else:
                    patch.delenv("HF_TOKEN", raising=False)
                if agent is a:
                    a.start()
                    first = a.first_token()
                    a.post("unload")
                else:
                    token = first if agent is b else a.token()
                    peers = (f"--peer=127.0.0.1:{port}" for port in ports[: agents.index(agent)])
                    agent.start("--join", token, *peers)
            for agent in agents:
                wait(lambda agent=agent: all_alive(agent), "all are here", *agents)
            yield a, b, c
        finally:
            for agent in agents:
                agent.close()


def all_alive(agent: Agent) -> bool:
    return [row["state"] for row in agent.status().get("members", ())] == ["alive"] * 3


def rows(agent: Agent, name: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in agent.post("pulling", model=name)["members"]}


def snapshot(agent: Agent, name: str) -> Path:
    (found,) = (agent.home / "hf" / "hub" / f"models--{name.replace('/', '--')}" / "snapshots").iterdir()
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_downloads_and_the_others_copy_meanwhile(hub: Hub, three: tuple[Agent, Agent, Agent]) -> None:
    a, b, _ = three
    name = b.post("pull", model=NAME, everywhere="yes")["model"]
    early = False

    def done() -> bool:
        nonlocal early
        now = rows(b, name)
        getters = [row for row in now.values() if not row["lender"] and row["held_bytes"]]
        copiers = [row for row in now.values() if row["lender"] and row["held_bytes"]]
        early = early or any(not row["complete"] for row in getters if copiers)
        assert not any(row["problem"] for row in now.values())
        return len(now) == 3 and all(row["complete"] for row in now.values())

    wait(done, "all have it", *three)
    assert early, "the others copy what the first one itself still gets"
    assert hub.models[NAME].sent == {path: len(body) for path, body in hub.models[NAME].files.items()}
    for agent in three:
        assert content(snapshot(agent, NAME)) == hub.models[NAME].files
    assert len({row["lender"] for row in rows(a, name).values()}) == 2


@pytest.mark.chaos
def test_one_that_dies_while_it_downloads_is_replaced(hub: Hub, three: tuple[Agent, Agent, Agent]) -> None:
    a = three[0]
    name = a.post("pull", model=LATER, everywhere="yes")["model"]

    def copied() -> dict[str, dict[str, Any]]:
        found = {row["name"]: row for row in rows(a, name).values() if row["lender"] and row["held_bytes"]}
        return found if len(found) == 2 else {}

    copiers = wait(copied, "two copy from the third", *three)
    (gone,) = [agent for agent in three if agent.name not in copiers]
    left = [agent for agent in three if agent is not gone]
    gone.kill()
    wait(lambda: all(row["complete"] for row in rows(left[0], name).values()), "the others have it", *left)
    for agent in left:
        assert content(snapshot(agent, LATER)) == hub.models[LATER].files
    size = sum(map(len, hub.models[LATER].files.values()))
    assert sum(hub.models[LATER].sent.values()) < 2 * size, "what had come was not asked for again"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(gone.home / "hf"))
        gone.start()
    wait(lambda: all(map(all_alive, three)), "it is back", *three)


def test_what_one_has_is_served_by_all(hub: Hub, three: tuple[Agent, Agent, Agent]) -> None:
    a, b, c = three
    asked = a.post("pull", model=SMALL)["model"]
    wait(lambda: rows(a, asked).get("anna", {}).get("complete"), "anna has it", *three)
    hub.models[SMALL].sent = {}
    c.post("serve", model=SMALL, nodes="2")
    serving(*three, ranks=2)
    assert hub.models[SMALL].sent.keys() <= {"config.json"}, "the others had it from anna"
    a.post("pull", model=NAME, everywhere="yes")

    def listed() -> bool:
        told = json.loads(c.command("list", "--json").stdout)["models"]  # HF_HOME is cleo's
        return {row["name"]: row["elsewhere"] for row in told}.get(NAME) == ["anna", "ben"]

    wait(listed, "who has it elsewhere is told", *three)
    refused = b.command("remove", SMALL)
    assert refused.returncode == 1
    assert "cannot be removed: the cluster serves it" in refused.stderr


def test_what_is_served_goes_on_until_the_next_model_is_here(
    hub: Hub, three: tuple[Agent, Agent, Agent]
) -> None:
    a, b, _ = three
    a.post("serve", model=SMALL, nodes="2")
    serving(*three, ranks=2)
    epoch = a.status()["epoch"]
    typo = a.command("serve", "some-body/typo")
    assert typo.returncode == 1
    assert "cannot be served, so all stays as it is: cannot get some-body/typo" in typo.stderr
    said = b.command("serve", SLOW, "--nodes", "2", "--replace")
    assert f"is downloading, and served once complete; until then {SMALL} is" in said.stdout
    wait(lambda: any("/s" in line for line in b.status()["coming"]), "it is told how far it is", *three)
    assert a.chat(), "and what is served goes on"
    assert (a.status()["epoch"], a.status()["model"]) == (epoch, SMALL)
    wait(lambda: a.status().get("model") == SLOW, "it is served", *three)
    assert hub.models[SLOW].sent["model.safetensors"] == len(hub.models[SLOW].files["model.safetensors"])
    assert b.status()["coming"] == []
