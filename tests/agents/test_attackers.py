"""The book of attackers: each attack against live agents, and what it must not bring about.

| attack | test |
|---|---|
| 1. large bodies, more than memory holds | here |
| 2. a chat template that never ends, or takes all memory | here; `tests/text/test_renderer_contained.py` |
| 3. a lender whose manifest lists code and pickles | here |
| 4. join tokens that a member asked for before its removal | here |
| 5. a founder that answers with a shell command for a token | here |
| 6. a disk that is full while a member is removed | here |
| 7. more connections from one address than a server takes | here |
| 8. liars that announce themselves to a Mac that wants to join | here |
| 9. a stranger at the ports of a group that forms | `tests/chaos/test_strangers.py` |
| 10. a prompt guessed by the tokens that a cache saves | none: `docs/security.md` promises nothing there |
| 11. a client that calls itself by many names | here |
| 12. a page of another origin that posts blindly | here; in a browser `tests/page/test_other_origins.py` |
| 13. slow grammars | here |
| 14. a kill at any moment | `tests/stories/test_crashes.py` |
| 15. damaged headers of weights | `tests/fuzzing`, `tests/engine/test_loader_tensor_headers.py` |
| 16. a member that sends messages as fast as it can | here |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from zeroconf import DNSAddress, DNSOutgoing, DNSPointer, DNSService, DNSText

from mlxtp.cluster.cluster_state import READS
from mlxtp.cluster.introduction import versions_here
from mlxtp.cluster.links import ControlLink
from mlxtp.cluster.state_file import load
from mlxtp.config import embedded_model_path
from mlxtp.discovery.addresses import MAX_ADDRESSES, SERVICE, Advert
from mlxtp.errors import MlxtpError
from mlxtp.identity.store import Store
from mlxtp.models.download import Fetch
from mlxtp.models.hub_cache import Repo
from mlxtp.wire.cluster_messages import AgentHello, Deployment, Deployments
from mlxtp.wire.messages import PROTOCOL_VERSION
from mlxtp.wire.streams import open_tls
from mlxtp.wire.tls import ALPN_CONTROL, member_context_client

from ..discovery.test_mdns_hosts import multicasting, txt_record
from ..hosts import Hosts, requires_namespaces
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
LIARS = 16
LIES = "198.18"  #: Network of the addresses that liars announce


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
@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:8080", "null"])
def test_a_page_of_another_origin_posts_in_vain(agent: Agent, origin: str) -> None:
    """A browser sends such a post without asking first."""
    headers = {"Origin": origin, "Content-Type": "text/plain"}
    reply = httpx.post(
        f"{url_of(agent)}/v1/chat/completions", content=json.dumps(body("hi")), headers=headers
    )
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "origin_not_allowed"


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


def refused(cluster: Cluster, name: str, token: str) -> str:
    """Return the last line of a Mac that ends because this token does not let it in."""
    agent = cluster.mac(name)
    agent.start("--join", token)
    try:
        assert agent.ended() == 1, agent.log
    finally:
        agent.close()
    return agent.log.splitlines()[-1]


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


def test_tokens_that_a_removed_member_asked_for_open_nothing(cluster: Cluster, join: Join) -> None:
    ben = join("ben")
    used, kept = ben.token(), ben.token()
    join("carl", used)
    assert "carl was admitted by ben" in cluster.anna.command("cluster", "members").stdout
    removed = cluster.anna.command("cluster", "remove", "ben")
    assert "it admitted carl" in removed.stdout
    last = refused(cluster, "dora", kept)
    assert "the member that requested this join token was removed or left" in last


@pytest.mark.chaos
def test_a_founder_hands_no_command_to_a_member_s_shell(tmp_path: Path) -> None:
    port = free_port()
    liar = Agent(
        tmp_path, "liar", None, *flags(port), program=("tests.agents.changed_node", "issues=x; touch owned")
    )
    ben = Agent(tmp_path, "ben", None, *flags(), "--peer", f"127.0.0.1:{port}")
    try:
        liar.start()
        ben.start("--join", liar.first_token())
        wait(lambda: ben.member(liar).get("state") == "alive", "ben is a member", liar, ben)
        said = ben.command("token")
        assert (said.returncode, said.stdout) == (1, "")
        assert "liar replied with something else than a join token of this cluster" in said.stderr
    finally:
        ben.close()
        liar.close()


async def flood(home: Path, port: int, seconds: float) -> int:
    """Send deployments as the member of this home, as fast as they are taken. Return how many."""
    store, sent = Store(home), 0
    identity = store.load()
    streams = await open_tls(
        "127.0.0.1", port, member_context_client(store.credentials, ALPN_CONTROL), ALPN_CONTROL, 5
    )
    link = ControlLink(*streams, dialled=True)
    me, versions = (identity.node_id, identity.cluster_id), (*versions_here(), READS)
    link.send(AgentHello(PROTOCOL_VERSION, *me, "boot", "mallory", versions, (), (), ""))
    await link.receive_hello()
    with contextlib.suppress(MlxtpError, TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                row = Deployment("m", "m", version=5000 + sent, writer=me[0])
                link.send(Deployments((row,), 0, False))
                await link.connection.drain()
                await asyncio.sleep(0)
                sent += 1
    link.close()
    return sent


def test_a_member_that_floods_delays_no_client_and_no_other_member(cluster: Cluster, join: Join) -> None:
    mallory, carol, anna = join("mallory"), join("carol"), cluster.anna
    mallory.stop()
    sent, took = list[int](), []
    flooding = threading.Thread(
        target=lambda: sent.append(asyncio.run(flood(mallory.home, cluster.port, 10.0)))
    )
    flooding.start()
    while flooding.is_alive():
        began = time.monotonic()
        anna.health()
        took.append(time.monotonic() - began)
        time.sleep(0.1)
    anna.command("unload", "m")
    assert sent[0] > 500
    assert max(took) < 3.0, took
    assert not anna.said("carol is dead")
    assert not carol.said("anna is dead")


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


def lie(number: int, cluster_id: str, port: int) -> bytes:
    """The announcement of a Mac that says it can let others in, at 16 addresses where no Mac answers."""
    advert = Advert(f"{number:08x}{'0' * 24}", cluster_id, f"a{number}", port, True, 1)
    service = advert.service()
    text = txt_record(*(f"{key}={value}" for key, value in advert.properties().items()))
    out = DNSOutgoing(0x8400)
    out.add_answer_at_time(DNSPointer(SERVICE, 12, 1, 4500, service), 0)
    out.add_answer_at_time(DNSService(service, 33, 0x8001, 4500, 0, 0, port, service), 0)
    out.add_answer_at_time(DNSText(service, 16, 0x8001, 4500, text), 0)
    for each in range(MAX_ADDRESSES):
        address = socket.inet_aton(f"{LIES}.{number}.{each + 1}")
        out.add_answer_at_time(DNSAddress(service, 1, 0x8001, 4500, address), 0)
    return bytes(out.packets()[0])


@pytest.mark.chaos
@requires_namespaces
def test_a_mac_joins_beside_liars(tmp_path: Path) -> None:
    """The liars accept each connection, send nothing, and are found first."""
    with Hosts(3) as net:
        one, two, liars = net.hosts
        liars.ip(f"route add local {LIES}.0.0/16 dev lo")
        two.ip(f"route add {LIES}.0.0/16 via {liars.address}")
        anna, ben = Agent(tmp_path, "anna", one), Agent(tmp_path, "ben", two)
        anna.start()
        token = anna.first_token()
        anna.post("unload")
        cluster_id, over = anna.status()["cluster"], threading.Event()
        silent = liars.inside(lambda: socket.create_server(("", 0), backlog=1024))
        port = silent.getsockname()[1]

        def announce() -> None:
            while not over.wait(0.2):
                for number in range(LIARS):
                    sock.send(lie(number, cluster_id, port))

        with silent, multicasting(liars) as sock:
            announcer = threading.Thread(target=announce)
            announcer.start()
            asked: list[socket.socket] = []
            try:
                net.cut(one)
                ben.start("--join", token)
                silent.settimeout(WAIT_S)
                asked += [silent.accept()[0] for _ in range(LIARS)]
                net.mend(one)
                assert wait(lambda: anna.member(ben), "ben is a member", anna, ben)
            finally:
                over.set()
                announcer.join()
                for each in asked:
                    each.close()
