"""Clients and models that mean harm, against a live agent: what they cost ends with them."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from mlxtp.config import embedded_model_path

from ..cluster import WAIT_S
from .agents import PROMPT, SECRET, Agent, wait

HONEST = "127.0.0.2"
"""The address of the honest client; loopback has many."""
_LOOP = "{% for each in range(99999) %}"
ENDLESS = _LOOP * 3 + "{% endfor %}" * 3
BODIES = 200
BODY_BYTES = 15 << 20
ROOM_BYTES = 512 << 20
SLOW_GRAMMARS = 6


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent whose model has a context of a million tokens, and a template that one message never ends."""
    folder = tmp_path_factory.mktemp("attacked")
    model = shutil.copytree(embedded_model_path(), folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template", "") or (model / "chat_template.jinja").read_text()
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    hostile = f"{{% if messages[-1].content == 'endless' %}}{ENDLESS}{{% endif %}}{template}"
    (model / "chat_template.jinja").write_text(hostile)
    agent = Agent(
        folder, "anna", None, "--http", "127.0.0.1:0", "--alone", "--no-discovery", "--model", str(model)
    )
    agent.start()
    try:
        wait(lambda: agent.chat() == SECRET, "it serves", agent)
        yield agent
    finally:
        agent.close()


def url_of(agent: Agent) -> str:
    return str(json.loads((agent.home / "agent.json").read_text())["url"])


def body(text: str, **fields: object) -> dict[str, object]:
    return {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 32, **fields}


def honest(agent: Agent, **fields: object) -> httpx.Response:
    """The reply to a client at another address."""
    transport = httpx.HTTPTransport(local_address=HONEST)
    with httpx.Client(transport=transport, timeout=WAIT_S) as client:
        url = f"{url_of(agent)}/v1/chat/completions"
        return client.post(url, json=body(PROMPT, temperature=0, **fields))


def test_a_template_that_never_ends_costs_its_request_alone(agent: Agent) -> None:
    replies: list[httpx.Response] = []
    url = f"{url_of(agent)}/v1/chat/completions"
    attack = threading.Thread(
        target=lambda: replies.append(httpx.post(url, json=body("endless"), timeout=WAIT_S))
    )
    attack.start()
    while attack.is_alive():
        assert agent.health()["state"] == "ready"
    attack.join()
    assert replies[0].status_code == 504
    assert "takes more than 3 s" in replies[0].json()["error"]["message"]
    assert agent.chat() == SECRET


def test_slow_grammars_of_one_client_do_not_keep_another_s_out(agent: Agent) -> None:
    url = f"{url_of(agent)}/v1/chat/completions"

    async def story() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=SLOW_GRAMMARS)
        async with httpx.AsyncClient(timeout=WAIT_S * 8, limits=limits) as client:
            schemas = [{"type": "integer", "multipleOf": 999_983 + n} for n in range(SLOW_GRAMMARS)]
            formats = [{"type": "json_schema", "json_schema": {"name": "x", "schema": s}} for s in schemas]
            crowd = [
                asyncio.create_task(client.post(url, json=body("hi", response_format=each)))
                for each in formats
            ]
            answered = asyncio.create_task(
                asyncio.to_thread(honest, agent, response_format={"type": "regex", "pattern": "[A-Z]{3}"})
            )
            assert (await answered).status_code == 200
            compiled = [each for each in crowd if each.done() and each.result().status_code != 429]
            assert len(compiled) <= 3, "one is compiled when the honest client comes"
            return await asyncio.gather(*crowd)

    replies = asyncio.run(story())
    assert {reply.status_code for reply in replies} <= {200, 400, 429}


@pytest.mark.chaos
def test_bodies_that_nobody_waits_for_take_no_more_memory_than_their_bound(agent: Agent) -> None:
    process = psutil.Process(agent.process.pid) if agent.process else psutil.Process()
    idle, most = process.memory_info().rss, 0
    content = json.dumps(body("a" * BODY_BYTES + "\U0001f600"), ensure_ascii=False).encode()
    parts = urlsplit(url_of(agent))

    async def story() -> Counter[int]:
        nonlocal most
        limits = httpx.Limits(max_connections=BODIES)
        async with httpx.AsyncClient(timeout=WAIT_S * 10, limits=limits) as client:
            url = f"{parts.geturl()}/v1/chat/completions"
            crowd = asyncio.gather(*(client.post(url, content=content) for _ in range(BODIES)))
            while not crowd.done():
                most = max(most, process.memory_info().rss)
                await asyncio.wait([crowd], timeout=0.1)
            return Counter(reply.status_code for reply in crowd.result())

    statuses = asyncio.run(story())
    assert set(statuses) <= {200, 400, 503}
    assert statuses[503], "the surplus is told to come again"
    assert most - idle < ROOM_BYTES
    wait(lambda: agent.chat() == SECRET, "it serves on", agent)
