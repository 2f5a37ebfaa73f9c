"""Two whole agents and their clients, which name one model and another: each gets the answer of the one it
named, and none is unloaded under a request."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants

from mlxtp.agent import Agent
from mlxtp.api import generation
from mlxtp.cluster.cluster_state import PINNED
from mlxtp.groups.health import ServingState

from ..engine.small_models import change_weights, write_model
from ..groups.scenes import in_a_loop, sees
from ..groups.two_agents import two_agents
from ..hub import COMMIT
from ..live_cluster import START_S
from ..reference import prompt_ids, reference, spoken

QUESTION = "Count from 1 to 60."
OTHER = "org/other"
TOKENS = 20


def put_into_the_hub_cache(cache: Path, name: str) -> Path:
    """A complete snapshot, as `huggingface_hub` leaves it."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    return write_model(folder / "snapshots" / COMMIT, seed=3)


def right(folder: Path | None = None, tokens: int = TOKENS) -> str:
    """Return the answer of the model in this folder; without one, of the embedded model."""
    folders = () if folder is None else (folder,)
    return spoken(reference(prompt_ids(QUESTION), tokens, *folders))


@dataclass
class Client:
    """A client of one agent."""

    agent: Agent
    http: httpx.AsyncClient

    async def ask(self, model: str, tokens: int = TOKENS) -> httpx.Response:
        return await self.http.post(f"{self.agent.url}/v1/chat/completions", json=body(model, tokens))

    async def answer(self, model: str, tokens: int = TOKENS) -> tuple[str, str]:
        """The model's id and what it said."""
        response = await self.ask(model, tokens)
        assert response.status_code == 200, response.text
        told = response.json()
        return told["model"], told["choices"][0]["message"]["content"]

    async def stream(
        self, model: str, tokens: int = TOKENS, begun: asyncio.Event | None = None
    ) -> tuple[str, list[str]]:
        """Return what the model said, and the states of the wait, comments and errors."""
        said, other = "", []
        url = f"{self.agent.url}/v1/chat/completions"
        async with self.http.stream("POST", url, json=body(model, tokens) | {"stream": True}) as response:
            if response.status_code != 200:  # refused before the stream began
                return "", [(await response.aread()).decode()]
            async for line in response.aiter_lines():
                if line.startswith("data: {") and "choices" in (chunk := json.loads(line[6:])):
                    other += [chunk["state"]] if "state" in chunk else []
                    said += "".join(each["delta"].get("content") or "" for each in chunk["choices"])
                    if said and begun is not None:
                        begun.set()
                elif line:
                    other.append(line)
        return said, other

    async def models(self) -> list[str]:
        response = await self.http.get(f"{self.agent.url}/v1/models")
        return [model["id"] for model in response.json()["data"]]


def body(model: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}


@asynccontextmanager
async def two_clients(folder: Path, **settings: Any) -> AsyncIterator[tuple[Client, Client]]:
    """One at each of two agents that load on request."""
    async with two_agents(folder, load_on_request=True, **settings) as agents:
        for agent in agents:
            await agent.wait_ready()
        async with httpx.AsyncClient(timeout=START_S) as http:
            first, second = (Client(agent, http) for agent in agents)
            yield first, second


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of the Hub that is complete in this Mac's cache."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return put_into_the_hub_cache(cache, OTHER)


@pytest.mark.group
@in_a_loop(seconds=3 * START_S)
async def test_each_is_answered_by_the_model_it_names_and_all_are_served_side_by_side(
    tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert right() != right(other)
    monkeypatch.setattr(generation, "ACCEPT_S", 0.1)
    folder = shutil.copytree(other, tmp_path / "folder")
    async with two_clients(tmp_path) as (first, second):
        begun = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            long = group.create_task(second.stream("tiny", 200, begun))
            await begun.wait()
            wanted = group.create_task(first.stream(OTHER))
            elsewhere = group.create_task(second.answer(OTHER))
            unnamed = await first.ask("org/unknown")
        assert unnamed.status_code == 404
        said, ends = long.result()
        assert (said, ends[-1]) == (right(tokens=200), "data: [DONE]")
        assert wanted.result()[0] == right(other)
        assert elsewhere.result() == (OTHER, right(other))

        clients = [(client, model) for model in ("tiny", OTHER) for client in (first, second)]
        answers = await asyncio.gather(*(client.answer(model) for client, model in clients))
        assert answers == [(model, right(other if model == OTHER else None)) for _, model in clients]
        assert await second.answer(str(folder)) == ("folder", right(other))
        while set(await first.models()) != {"tiny", OTHER, "folder"}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.group
@in_a_loop(seconds=3 * START_S)
async def test_one_that_cannot_be_loaded_ends_and_one_that_is_kept_for_no_time_ends_after_its_answer(
    tmp_path: Path, other: Path
) -> None:
    broken = shutil.copytree(other, tmp_path / "broken")
    change_weights(broken, model__layers__1__mlp__up_proj__weight=None)
    async with two_clients(tmp_path) as (first, second):
        plain, (said, told) = await asyncio.gather(second.ask(str(broken)), first.stream(str(broken)))
        assert plain.status_code == 400, plain.text
        error = plain.json()["error"]
        assert error["code"] == "model_invalid"
        assert "could not be loaded" in error["message"]
        assert "up_proj" in error["message"]
        assert said == ""
        assert "could not be loaded" in told[-1]
        for client in (first, second):
            parts = client.agent.parts

            table = parts.node.replica
            await sees(lambda table=table: [r.name for r in table.deployments.live()] == ["tiny"])
            assert await client.answer("tiny") == ("tiny", right())
        ollama = {"model": OTHER, "prompt": QUESTION, "keep_alive": 0, "stream": False, "raw": True}
        answer = await first.http.post(f"{first.agent.url}/api/generate", json=ollama)
        assert answer.status_code == 200, answer.text
        await sees(lambda: [r.name for r in table.deployments.live()] == ["tiny"])


LOOKED_FOR = "is still being looked for"


@pytest.mark.group
@in_a_loop(seconds=3 * START_S)
async def test_a_mac_that_lacks_what_is_served_says_so_at_once(tmp_path: Path, other: Path) -> None:
    shutil.copytree(other, tmp_path / "models" / "house")
    folders = {"model_folders": (str(tmp_path / "models"),)}
    async with two_clients(tmp_path, founder=folders, nodes="auto") as (first, second):
        first.agent.parts.node.desired.serve("house", keep_s=PINNED, replace=True)  # as `mlxtp serve house`
        shown = second.agent.parts.groups
        await sees(
            lambda: (
                first.agent.parts.gateway.models()
                and shown.shown.scope.deployment == "house"
                and shown.shown.supervisor.status.state is ServingState.IDLE
            )
        )
        model, said = await first.answer("house")
        assert (model, said) == ("house", right(other))
        health = {"reason": LOOKED_FOR}
        while LOOKED_FOR in health["reason"]:
            health = (await second.http.get(f"{second.agent.url}/health")).json()
        assert health["state"] == "idle"
        assert "house" in health["reason"]
        for name in ("house", "default"):
            refused = await second.ask(name)
            assert refused.status_code == 503, refused.text
            assert health["reason"] in refused.json()["error"]["message"]
        url = f"{second.agent.url}/v1/chat/completions"
        stream = await second.http.post(url, json=body("house", TOKENS) | {"stream": True})
        assert stream.status_code == 503, "nothing is streamed before"
