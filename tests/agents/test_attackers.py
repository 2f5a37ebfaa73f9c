"""The book of attackers: each attack against live agents, and what it must not bring about.

| attack | test |
|---|---|
| 1. large bodies, more than memory holds | here |
| 2. a chat template that never ends, or takes all memory | here; `tests/text/test_renderer_contained.py` |
| 3. a lender whose manifest lists code and pickles | here |
| 4. join tokens that a member asked for before its removal | `tests/cluster/test_control_port.py` |
| 5. a founder that answers with a shell command for a token | `tests/cluster/test_node.py` |
| 6. a disk that is full while a member is removed | here |
| 7. more connections from one address than a server takes | here |
| 8. liars that announce themselves to a Mac that joins | `tests/identity/test_join_network_queue.py` |
| 9. a stranger at the ports of a group that forms | `tests/chaos/test_strangers.py` |
| 10. a prompt guessed by the tokens that a cache saves | none: `docs/security.md` promises nothing there |
| 11. a client that calls itself by many names | here |
| 12. a page of another origin that posts blindly | `tests/api/test_server_access.py`, and in `tests/page` |
| 13. slow grammars | here |
| 14. a kill at any moment | `tests/stories/test_crashes.py` |
| 15. damaged headers of weights | `tests/fuzzing`, `tests/engine/test_loader_tensor_headers.py` |
| 16. a member that sends messages as fast as it can | `tests/cluster/test_links.py` |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from mlxtp.cluster.state_file import load
from mlxtp.config import embedded_model_path
from mlxtp.models.download import Fetch
from mlxtp.models.hub_cache import Repo

from ..hub import EVIL, Hub, Model, embedded, poison, put, running_hub
from ..live_cluster import WAIT_S
from .agents import PROMPT, SECRET, Agent, wait
from .test_models import content, rows, snapshot
from .test_one_machine import free_port

HONEST = "127.0.0.2"
"""The address of the honest client; loopback has many."""
_LOOP = "{% for each in range(99999) %}"
ENDLESS = _LOOP * 3 + "{% endfor %}" * 3
BODIES = 200
BODY_BYTES = 15 << 20
ROOM_BYTES = 512 << 20
SLOW_GRAMMARS = 6
ROWS = 64  #: Sequences that a rank decodes at once.
NAMES = 4 * ROWS  #: Of one client, with a request each.
CONNECTIONS = 2100
NAME = "some-body/llama"


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
    with httpx.Client(transport=transport, timeout=4 * WAIT_S) as client:
        url = f"{url_of(agent)}/v1/chat/completions"
        return client.post(url, json=body(PROMPT, temperature=0, **fields))


@pytest.mark.chaos
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


@pytest.mark.chaos
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
def test_a_client_gains_nothing_by_many_names(agent: Agent) -> None:
    url = f"{url_of(agent)}/v1/chat/completions"

    async def story() -> int:
        limits = httpx.Limits(max_connections=NAMES)
        async with httpx.AsyncClient(timeout=WAIT_S * 8, limits=limits) as client:
            names = [body("hi", user=f"user {n}", max_tokens=300, ignore_eos=True) for n in range(NAMES)]
            crowd = [asyncio.create_task(client.post(url, json=each)) for each in names]
            while (await asyncio.to_thread(agent.health))["open_requests"] < 3 * ROWS:
                assert sum(each.done() for each in crowd) <= NAMES - 3 * ROWS, "the crowd comes too slowly"
            before = sum(each.done() for each in crowd)
            assert (await asyncio.to_thread(honest, agent, max_tokens=1)).status_code == 200
            meanwhile = sum(each.done() for each in crowd) - before
            for each in crowd:
                each.cancel()
            return meanwhile

    # By names, the honest client would come last: when fewer of the open requests than rows are left.
    assert asyncio.run(story()) < 2 * ROWS


@pytest.mark.chaos
def test_abandoned_bodies_take_at_most_the_memory_of_their_bound(agent: Agent) -> None:
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
    assert set(statuses) <= {200, 400, 408, 422, 503}, "408 for what comes slowly, as all of them may"
    assert statuses[503], "the surplus is told to come again"
    assert most - idle < ROOM_BYTES
    wait(lambda: agent.chat() == SECRET, "it serves on", agent)


@dataclass(frozen=True)
class Cluster:
    """A founder on loopback, with a Hub on loopback, and a folder for other Macs."""

    folder: Path
    hub: Hub
    port: int
    anna: Agent

    def mac(self, name: str) -> Agent:
        return Agent(self.folder, name, None, *flags(), "--peer", f"127.0.0.1:{self.port}")

    def start(self, agent: Agent, *flags: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_ENDPOINT", self.hub.url)
            patch.setenv("HF_HOME", str(agent.home / "hf"))  # each its own disk
            patch.delenv("HF_TOKEN", raising=False)
            agent.start(*flags)


Join = Callable[..., Agent]


def flags(port: int = 0) -> tuple[str, ...]:
    """Return the flags of an agent that shares loopback with others."""
    control = ("--control", f"127.0.0.1:{port}")
    return ("--http", "127.0.0.1:0", *control, "--no-discovery")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, port = tmp_path_factory.mktemp("members"), free_port()
    with running_hub() as hub:
        cluster = Cluster(folder, hub, port, Agent(folder, "anna", None, *flags(port)))
        try:
            cluster.start(cluster.anna)
            cluster.anna.first_token()
            cluster.anna.post("unload")
            yield cluster
        finally:
            cluster.anna.close()


@pytest.fixture
def join(cluster: Cluster) -> Iterator[Join]:
    """Yield a function that starts another member, which is gone when the test ends."""
    members: list[Agent] = []

    def joined(name: str, token: str = "") -> Agent:
        agent = cluster.mac(name)
        members.append(agent)
        cluster.start(agent, "--join", token or cluster.anna.token())

        def sees(one: Agent, other: Agent) -> bool:
            return bool(one.member(other).get("state") == "alive")

        anna = cluster.anna
        wait(lambda: sees(anna, agent) and sees(agent, anna), f"{name} is a member", anna, agent)
        return agent

    yield joined
    for each in members:
        each.close()


def test_a_lender_brings_no_code_and_moves_no_branch(
    cluster: Cluster, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub does not know the model, so the lender's word is all there is."""
    theirs = Repo(NAME, cluster.folder / "lena" / "hf" / "hub")
    cluster.hub.models = {NAME: Model(embedded())}
    put(cluster.hub.url, theirs.cache, monkeypatch)
    Fetch(theirs, "main").from_hub()
    poison(theirs, EVIL)
    cluster.hub.models = {}
    lena, anna = join("lena"), cluster.anna
    name = lena.post("pull", model=NAME, everywhere="yes")["model"]
    wait(lambda: rows(lena, name).get("anna", {}).get("complete"), "anna has it", lena, anna)
    folder = snapshot(anna, NAME)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == set(embedded())
    assert not (folder.parents[1] / "refs" / "main").exists()


def test_a_removal_on_a_full_disk_outlives_a_kill(cluster: Cluster, join: Join) -> None:
    anna, emil = cluster.anna, join("emil")
    emil.kill()  # so that it does not hear of it
    draft = anna.home / ".state.json.new"

    def taken() -> bool:
        with contextlib.suppress(FileExistsError):  # anna may be writing her state just now
            draft.mkdir()
        return draft.is_dir()

    wait(taken, "nothing can be written", anna)
    removal = anna.command("cluster", "remove", "emil")
    assert removal.returncode == 1
    assert "Free space there" in removal.stderr
    wait(lambda: anna.said("state.json cannot be written"), "anna notices", anna)
    draft.rmdir()

    def kept() -> set[str]:
        return {entry.name for entry in load(anna.home)[0].beliefs.roster.members().values()}

    wait(lambda: "emil" not in kept(), "it is written", anna, within_s=WAIT_S / 3)
    anna.kill()
    cluster.start(anna)
    wait(anna.status, "anna is back", anna)
    cluster.start(emil)
    wait(lambda: emil.said("was removed from this cluster"), "emil is told", anna, emil)
    assert anna.member(emil) == {}


@pytest.mark.chaos
def test_connections_of_one_address_keep_neither_clients_nor_members_out(
    cluster: Cluster, join: Join
) -> None:
    """The descriptors above 1,023 are taken as well, which `select` would not survive."""
    anna, mia = cluster.anna, join("mia")
    larger = embedded() | {"model-extra-0.safetensors": b"mia"}
    cluster.hub.models = {"some-body/other": Model(larger)}
    name = anna.post("pull", model="some-body/other")["model"]
    wait(lambda: rows(anna, name).get("anna", {}).get("complete"), "anna has it", anna)
    cluster.hub.models = {}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, CONNECTIONS + 1024), hard))
    port = urlsplit(url_of(anna)).port
    try:
        with contextlib.ExitStack() as crowd:
            for _ in range(CONNECTIONS):
                crowd.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            transport = httpx.HTTPTransport(local_address=HONEST)
            with httpx.Client(transport=transport, timeout=WAIT_S) as client:
                reply = client.get(url_of(anna))
                assert reply.status_code == 200, reply.text
            name = mia.post("pull", model="some-body/other")["model"]
            wait(lambda: rows(mia, name).get("mia", {}).get("complete"), "mia has it", mia)
            assert content(snapshot(mia, "some-body/other")) == larger
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
