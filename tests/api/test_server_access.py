"""Keys, pages of other origins and HTTPS, as clients meet them: a real server on loopback, real keys."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest
from starlette.routing import Route

from mlxtp.api import access_log
from mlxtp.api import server as http_server
from mlxtp.api.access_log import AccessLog
from mlxtp.api.api_keys import LOOK_S, KeyFile, KeyRing
from mlxtp.api.app import create_app
from mlxtp.api.backend import DeploymentHealth, StoredModelInfo, TokenEvent, Tokens
from mlxtp.api.endpoint import Tls, here_and_now, own_tls
from mlxtp.api.guard import UNREAD_BYTES, Access
from mlxtp.api.request_metrics import RequestMetrics
from mlxtp.api.server import bind
from mlxtp.verbs import ModelsOnDisk, Verb

from ..live_cluster import until
from .conftest import BYTE_LEVEL, WAIT_S, FakeBackend, Loaded, on_loopback, says
from .test_admin import KEY as ADMIN_KEY
from .test_admin import FakeAdmin

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
BODY = {"model": "default", "messages": HELLO}
PAGE = "http://localhost:3000"


@dataclass
class Door:
    """A running server, and what decides about who comes in. `now` is the clock of the keys."""

    home: Path
    port: int
    file: KeyFile
    scheme: str = "http"
    now: float = 0.0

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def key(self, name: str = "laptop", per_minute: int = 0) -> str:
        """A new key, which the server has noticed."""
        self.now += LOOK_S
        return self.file.create(name, per_minute, 1.0)[1]

    def ask(self, method: str = "GET", path: str = "/v1/models", **options: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=WAIT_S, trust_env=False, **options)

    def openai(self, key: str, **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": WAIT_S} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)


@contextlib.contextmanager
def door(
    backend: FakeBackend,
    home: Path,
    *,
    rule: str = "always",
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
    tls: Tls | None = None,
    stall_s: float = 60.0,
    handshake_s: float = 60.0,
) -> Iterator[Door]:
    sock, file = bind("127.0.0.1", 0), KeyFile(home)
    found = Door(home, sock.getsockname()[1], file, "http" if tls is None else "https")
    ring = KeyRing(file, rule, beyond=False, clock=lambda: found.now)
    ring.own_key = ADMIN_KEY
    guarded = create_app(backend, admin=FakeAdmin(), access=Access(hosts, origins, ring))
    app = AccessLog(guarded, RequestMetrics(time.monotonic))
    context = None if tls is None else tls.context
    with on_loopback(app, sock=sock, tls=context, stall_s=stall_s, handshake_s=handshake_s):
        yield found


@pytest.fixture
def backend(loaded: dict[str, Loaded]) -> FakeBackend:
    return FakeBackend(loaded[BYTE_LEVEL].text, says([60, 61, 62]))


@pytest.fixture
def server(backend: FakeBackend, tmp_path: Path) -> Iterator[Door]:
    """One where all need a key."""
    with door(backend, tmp_path) as found:
        yield found


def status(server: Door, target: str, host: str = "localhost", key: str = "") -> int:
    """Return the status of the reply to a request of one line, with this target."""
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as sock:
        shown = f"x-api-key: {key}\r\n" if key else ""
        head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{shown}\r\n"
        sock.sendall(head.encode())
        return int(sock.makefile("rb").readline().split()[1])


def test_a_client_is_its_key_wherever_it_connects_from(server: Door, backend: FakeBackend) -> None:
    for name in ("laptop", "school"):
        headers = {"authorization": f"Bearer {server.key(name)}"}
        body = BODY | {"user": "alice"}
        assert server.ask("POST", "/v1/chat/completions", json=body, headers=headers).status_code == 200
    assert [(each.client, each.user) for each in backend.whose] == [
        ("key laptop", "alice"), ("key school", "alice"),
    ]  # fmt: skip


def sharers(server: Door, backend: FakeBackend, *headers: dict[str, str]) -> list[str]:
    """The names under which requests with these headers share cached prompts."""
    for each in headers:
        assert server.ask("POST", "/v1/chat/completions", json=BODY, headers=each).status_code == 200
    return [each.sharer for each in backend.whose[-len(headers) :]]


def test_cached_prompts_are_shared_within_a_key_and_by_this_mac_s_commands(
    server: Door, backend: FakeBackend
) -> None:
    """A key counts, not its name, which differs from Mac to Mac."""
    keys = [{"x-api-key": server.key(name)} for name in ("laptop", "school")]
    one, other, again = sharers(server, backend, *keys, keys[0])
    assert one == again != other != "" != one
    assert keys[0]["x-api-key"] not in one
    server.file.path.write_text(server.file.path.read_text().replace('"laptop"', '"mobile"'))
    server.now += LOOK_S
    assert sharers(server, backend, keys[0], {"x-api-key": ADMIN_KEY}) == [one, ""]


def test_without_keys_cached_prompts_are_shared_on_this_mac(backend: FakeBackend, tmp_path: Path) -> None:
    """A proxy speaks for clients of other machines."""
    with door(backend, tmp_path, rule="auto") as server:
        assert sharers(server, backend, {}, {"x-forwarded-for": "10.0.0.7"}) == ["", "address 127.0.0.1"]


def test_a_whole_url_is_its_path_with_the_same_guards(server: Door) -> None:
    key, there = server.key(), f"http://127.0.0.1:{server.port}"
    assert status(server, f"{there}/v1/models") == status(server, "/v1/models") == 401
    assert status(server, f"{there}/v1/models", key=key) == 200
    assert status(server, "HTTPS://localhost/v1/models?limit=1", key=key) == 200
    assert status(server, "http://LOCALHOST/v1/%6dodels", key=key) == 200
    assert status(server, f"{there}/admin/status") == status(server, "/admin/status") == 401
    assert status(server, f"{there}/admin/status", key=key) == 401
    for path in ("", "?x=1", "/", "/none"):
        assert status(server, f"{there}{path}", key=key) == 404
    assert status(server, "ftp://127.0.0.1/health", key=key) == 404
    assert status(server, "/http://127.0.0.1/health", key=key) == 404


@pytest.mark.parametrize(
    "place",
    ["evil.example", "", "localhost@evil.example", "localhost\\@evil", "127.0.0.1%2f", "localhost:x", "a#@b"],
)
def test_the_host_of_a_whole_url_has_to_be_this_mac_as_well_as_host(server: Door, place: str) -> None:
    assert status(server, "http://localhost/health") == 200
    assert status(server, f"http://{place}/health") == 421
    assert status(server, "http://localhost/health", host="evil.example") == 421


def test_openais_library_with_a_key_and_without(server: Door, backend: FakeBackend) -> None:
    key = server.key()
    client = server.openai(key)
    assert client.chat.completions.create(model="default", messages=HELLO).choices[0].message.content
    assert [chunk.object for chunk in client.chat.completions.create(**BODY, stream=True)]
    assert client.models.list().data
    for wrong in ("none", key[:-1]):
        with pytest.raises(openai.AuthenticationError) as refused:
            server.openai(wrong).chat.completions.create(model="default", messages=HELLO)
        assert refused.value.code == "invalid_api_key"
        assert "`mlxtp key create NAME`" in refused.value.message
    assert len(backend.requests) == 2


def test_a_conversation_is_of_the_key_that_began_it(server: Door, backend: FakeBackend) -> None:
    own, other = (server.openai(server.key(name)) for name in ("laptop", "phone"))
    first = own.responses.create(input="hello")
    named: Any = [{"type": "item_reference", "id": first.output[0].id}]
    asked: Any = [{"role": "user", "content": "go on"}]
    for going_on in ({"input": asked + named + asked}, {"input": asked, "previous_response_id": first.id}):
        assert own.responses.create(**going_on).output
        with pytest.raises((openai.BadRequestError, openai.NotFoundError), match="is not known here"):
            other.responses.create(**going_on)
    assert len(backend.requests) == 3


def test_anthropics_library_sends_its_key_in_a_header_of_its_own(server: Door) -> None:
    key = server.key(per_minute=2)

    def client(**credentials: str) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=server.url, max_retries=0, timeout=WAIT_S, **credentials)

    def ask(**credentials: str) -> anthropic.types.Message:
        return client(**credentials).messages.create(model="default", max_tokens=5, messages=HELLO)

    assert ask(api_key=key).content
    assert ask(auth_token=key).content
    with pytest.raises(anthropic.RateLimitError) as often:
        ask(api_key=key)
    assert often.value.response.headers["retry-after"] == "30"
    stranger = client(api_key="none")
    count = stranger.messages.count_tokens
    for refuse in (
        lambda: ask(api_key="none"),
        stranger.models.list,
        lambda: count(model="default", messages=HELLO),
    ):
        with pytest.raises(anthropic.AuthenticationError) as refused:
            refuse()
        body: Any = refused.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
        assert body["request_id"] == refused.value.request_id


def test_a_refusal_has_the_shape_of_the_dialect_that_owns_the_path(server: Door) -> None:
    server.key()
    for path, shape in (("/api/x", str), ("/v1/x", dict)):
        for headers, status in (
            ({}, 401),
            ({"host": "evil.example"}, 421),
            ({"origin": "http://evil.example"}, 403),
        ):
            refused = server.ask(path=path, headers=headers)
            assert refused.status_code == status
            assert isinstance(refused.json()["error"], shape)


def test_all_that_is_there_needs_a_key_but_what_is_public(backend: FakeBackend, tmp_path: Path) -> None:
    app = create_app(backend, admin=FakeAdmin())
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    assert {"/health", "/v1/models", "/v1/chat/completions", "/admin/status"} <= set(paths)
    with door(backend, tmp_path) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        server.key()
        for path in (*paths, "/cluster", "/cluster/events", "/metrics", "/openapi.json", "/api/tags", "/no"):
            for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
                refused = client.request(method, path, timeout=WAIT_S)
                if path == "/health":
                    assert refused.status_code in (200, 405), path
                elif path.startswith("/admin/"):
                    assert refused.status_code in (401, 405), path
                else:
                    assert refused.status_code == 401, path
        assert client.get("/").status_code != 401
        assert client.get("/page/none.js").status_code == 404
    assert backend.requests == []


ROWS = [{"name": "org/other"}, {"name": "org/tiny"}]


def test_a_key_for_one_model_reads_of_no_other(
    backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def carry_out(_: FakeAdmin, verb: Verb) -> Any:
        assert isinstance(verb, ModelsOnDisk)
        return {"models": ROWS, "left": ["org/other"], "model": "org/other"}

    monkeypatch.setattr(FakeAdmin, "carry_out", carry_out)
    backend.deployments = tuple(
        DeploymentHealth(name, name, "loading", pinned=True, ready=False)
        for name in ("org/other", "org/mine")
    )
    with door(backend, tmp_path) as server:
        models = ("org/tiny", "org/mine", "org/none")
        own = {"x-api-key": server.file.create("one", 0, 1.0, models=models, scopes=("chat", "load"))[1]}
        server.now += LOOK_S
        assert server.ask("POST", "/admin/unload", headers=own, json={}).status_code == 403
        found = server.ask(path="/admin/models", headers=own).json()
        assert found == {"models": ROWS[1:], "left": [], "model": ""}
        health = server.ask(path="/health", headers=own)
        assert [each["name"] for each in health.json()["deployments"]] == ["org/mine"]
        missing = server.ask("POST", "/v1/chat/completions", headers=own, json=BODY | {"model": "org/none"})
        words = [health, missing, server.ask(path="/health?model=org/other", headers=own)]
        assert [each.status_code for each in words] == [200, 404, 404]
        assert "available: org/tiny, org/mine" in missing.text
        none = {"x-api-key": server.file.create("none", 0, 1.0, models=("org/none",))[1]}
        server.now += LOOK_S
        missing = server.ask("POST", "/v1/chat/completions", headers=none, json=BODY | {"model": "org/none"})
        assert (missing.status_code, "available" in missing.text) == (404, False)
        assert not [each.text for each in words if "org/other" in each.text.replace('\\"org/other\\"', "")]


def test_a_key_of_the_same_name_goes_on_from_no_answer_of_the_former(
    server: Door, backend: FakeBackend
) -> None:
    backend.scripts = [says([60, 61]) for _ in range(4)]

    def ask(key: str, **more: str) -> httpx.Response:
        body = {"model": "default", "input": "hello", **more}
        return server.ask("POST", "/v1/responses", headers={"x-api-key": key}, json=body)

    former = server.key("one")
    known = ask(former).json()["id"]
    assert ask(former, previous_response_id=known).status_code == 200
    server.file.revoke("one")
    assert ask(server.key("one"), previous_response_id=known).status_code == 404


def test_wrong_keys_and_nonsense_write_few_lines_and_their_number(
    backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access_log, "FOREIGN_S", 2.0)
    caplog.set_level("INFO")

    def lines(words: str) -> list[str]:
        own = ("mlxtp.api.access_log", "uvicorn.error")
        return [each.message for each in caplog.records if each.name in own and words in each.message]

    with door(backend, tmp_path) as server:
        key = server.key()
        with httpx.Client(base_url=server.url, trust_env=False, headers={"x-api-key": "guessed"}) as client:
            for number in range(40):
                client.get(f"/v1/guess/{number}")
        for _ in range(30):
            with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as sock:
                sock.sendall(b"\x00\r\n\r\n")
                assert b" 400 " in sock.recv(100)
        for _ in range(20):
            assert server.ask(headers={"x-api-key": key}).status_code == 200
        until(lambda: len(lines("not logged")) == 2, "they are counted")
    assert len(lines("/v1/guess/")) == access_log.FOREIGN_LINES
    assert len(lines("Invalid HTTP request")) == access_log.FOREIGN_LINES
    assert len(lines("GET /v1/models 200")) == 20
    words = "more requests or connections without a valid key, not logged"
    assert lines(words) == [f"127.0.0.1: 30 {words}", f"what is no HTTP: 20 {words}"]


@pytest.mark.parametrize("rule", ["always", "auto"])
def test_this_mac_s_own_key_counts_nowhere_else(backend: FakeBackend, tmp_path: Path, rule: str) -> None:
    beyond = {"x-forwarded-for": "192.168.1.9", "authorization": f"Bearer {ADMIN_KEY}"}
    with door(backend, tmp_path, rule=rule) as server:
        for path in ("models", "keys", "status"):
            unread = 401 if rule == "always" and path != "status" else 403  # it is not compared
            assert server.ask(path=f"/admin/{path}", headers=beyond).status_code == unread, path
        for path in ("serve", "unload", "pull", "pulling"):
            refused = server.ask("POST", f"/admin/{path}", headers=beyond, json={"model": "x"})
            assert refused.status_code in (401, 403), path


@pytest.mark.parametrize(("rule", "told"), [("always", None), ("auto", "30 % read")])
def test_a_stranger_hears_of_no_reason_for_which_it_is_not_ready(
    backend: FakeBackend, tmp_path: Path, rule: str, told: str | None
) -> None:
    """A reason names Macs, models and folders. What a proxy passes on comes from beyond this Mac."""
    backend.ready = False
    beyond = {"x-forwarded-for": "192.168.1.9"}

    def reason(server: Door, **headers: str) -> object:
        found = server.ask(path="/health", headers=headers)
        assert (found.status_code, found.json()["state"], found.json()["ready"]) == (503, "loading", False)
        return found.json()["reason"]

    with door(backend, tmp_path, rule=rule) as server:
        assert reason(server) == "30 % read"
        assert reason(server, **beyond) == told
        backend.deployments = (DeploymentHealth("/anna/m", "m", "failed", pinned=True, ready=False),)
        assert [each["name"] for each in server.ask(path="/health").json()["deployments"]] == ["/anna/m"]
        strange = server.ask(path="/health", headers=beyond).json()["deployments"]
        unknown = server.ask(path="/health?model=x", headers=beyond)
        assert (unknown.status_code, len(strange)) == (404, int(told is not None))
        assert ("available: m" in unknown.text) is (told is not None)
        backend.deployments = ()
        found = server.ask(path="/health", headers=beyond).json()
        assert bool(found["ranks"]) is (told is not None)
        assert reason(server, **beyond, **{"x-api-key": "guessed"}) == told
        key = server.key(per_minute=1)
        for _ in range(3):  # no use of the key
            assert reason(server, **beyond, **{"x-api-key": key}) == "30 % read"
        assert reason(server, **beyond) is None
        backend.ready = True
        assert server.ask(headers={"x-api-key": key}).status_code == 200
        assert server.ask(headers={"x-api-key": key}).status_code == 429


def test_by_https_a_page_of_http_is_another_origin(backend: FakeBackend, tmp_path: Path, tls: Tls) -> None:
    with door(backend, tmp_path, tls=tls) as server:
        key = server.key()
        for scheme, status in (("https", 200), ("http", 403)):
            origin = {"origin": f"{scheme}://127.0.0.1:{server.port}", "x-api-key": key}
            assert server.ask(headers=origin, verify=False).status_code == status


def test_a_key_without_the_scope_has_nothing_loaded(
    server: Door, backend: FakeBackend, tmp_path: Path
) -> None:
    """Nor does it change how long a model stays. What is loaded answers."""
    backend.stored = (StoredModelInfo("org/stored", tmp_path, 4096, 1),)
    server.now += 2 * LOOK_S
    chats, loads = (
        {"x-api-key": server.file.create(name, 0, 1.0, scopes=("chat", *scopes))[1]}
        for name, scopes in (("chats", ()), ("loads", ("on-request",)))
    )
    stored = {**BODY, "model": "org/stored"}
    refused = server.ask("POST", "/v1/chat/completions", json=stored, headers=chats)
    assert refused.status_code == 403
    assert "the key chats lacks the scope to load it, on-request" in refused.json()["error"]["message"]
    assert backend.kept == [], "no place was taken for it"
    unload = {"model": "tiny", "keep_alive": 60}
    assert server.ask("POST", "/api/generate", json=unload, headers=chats).status_code == 403
    kept = {"model": "tiny", "messages": HELLO, "keep_alive": 60, "stream": False}
    for headers in (chats, loads):
        assert server.ask("POST", "/api/chat", json=kept, headers=headers).status_code == 200
    assert backend.kept == [None, 60.0]


def test_a_large_body_without_a_key_is_answered_and_not_kept(backend: FakeBackend, tmp_path: Path) -> None:
    with (
        door(backend, tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False) as client,
    ):
        key = server.key()
        refused = client.post("/v1/chat/completions", content=b"x" * 8_000_000)
        assert refused.status_code == 401
        assert "connection" not in refused.headers
        answered = client.post("/v1/chat/completions", json=BODY, headers={"x-api-key": key})
        assert answered.status_code == 200  # on the same connection


def test_a_body_that_is_far_too_large_is_not_read(server: Door) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    server.key()
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % (UNREAD_BYTES + 1))
        assert b" 401 " in received(sock).partition(b"\r\n")[0]  # and the connection ends
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
        sock.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"%x\r\n%b\r\n" % (1 << 20, b"x" * (1 << 20))
        with contextlib.suppress(ConnectionError):
            for _ in range(2 * UNREAD_BYTES >> 20):
                sock.sendall(chunk)
        with contextlib.suppress(ConnectionError):
            assert b" 401 " in received(sock).partition(b"\r\n")[0]


def received(sock: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    found = b""
    while data := sock.recv(65536):
        found += data
    return found


def preflight(server: Door, origin: str = PAGE, **headers: str) -> httpx.Response:
    given = {"origin": origin, "access-control-request-method": "POST", **headers}
    return server.ask("OPTIONS", "/v1/chat/completions", headers=given)


def cors(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


ASKED = "authorization,content-type,x-api-key,anthropic-version,anthropic-beta,x-stainless-retry-count"


def test_a_page_on_the_list_asks_first_and_then_in_earnest(backend: FakeBackend, tmp_path: Path) -> None:
    with door(backend, tmp_path, origins=(PAGE,)) as server:
        key = server.key()
        asked = preflight(
            server,
            **{"access-control-request-headers": ASKED, "access-control-request-private-network": "true"},
        )
        assert asked.status_code in (200, 204)
        told = cors(asked)
        assert told["access-control-allow-origin"] == PAGE
        assert {"GET", "POST", "DELETE"} <= set(told["access-control-allow-methods"].split(", "))
        assert set(ASKED.split(",")) <= set(told["access-control-allow-headers"].replace(" ", "").split(","))
        assert int(told["access-control-max-age"]) > 0
        assert told["access-control-allow-private-network"] == "true"
        assert "access-control-allow-credentials" not in told
        assert "Origin" in asked.headers["vary"]

        answered = server.ask(
            "POST", "/v1/chat/completions", json=BODY, headers={"origin": PAGE, "x-api-key": key}
        )
        assert answered.status_code == 200
        assert cors(answered)["access-control-allow-origin"] == PAGE
        assert "Retry-After" in cors(answered)["access-control-expose-headers"]
        assert "Origin" in answered.headers["vary"]


def test_a_page_may_read_why_it_was_refused(backend: FakeBackend, tmp_path: Path) -> None:
    with door(backend, tmp_path, origins=(PAGE,), hosts=("ai.example.com",)) as server:
        assert server.ask(path="/health", headers={"host": "ai.example.com"}).status_code == 200
        key = server.key(per_minute=1)
        for headers, status in (({}, 401), ({"x-api-key": key}, 200), ({"x-api-key": key}, 429)):
            answer = server.ask(headers={"origin": PAGE, **headers})
            assert answer.status_code == status
            assert cors(answer)["access-control-allow-origin"] == PAGE
        assert answer.headers["retry-after"] == "60"
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")


@pytest.mark.parametrize(("rule", "origin"), [("always", "http://localhost:4000"), ("never", "null")])
@pytest.mark.parametrize("origins", [(), (PAGE,)])
def test_a_page_that_is_not_on_the_list_hears_nothing_it_could_use(
    backend: FakeBackend, tmp_path: Path, origins: Sequence[str], rule: str, origin: str
) -> None:
    with door(backend, tmp_path, origins=origins, rule=rule) as server:
        asked = preflight(server, origin, **{"access-control-request-private-network": "true"})
        assert asked.status_code == 403
        assert asked.json()["error"]["code"] == "origin_not_allowed"
        assert cors(asked) == {}
        answer = server.ask("POST", "/v1/chat/completions", json=BODY, headers={"origin": origin})
        assert answer.status_code == 403
        assert backend.requests == []
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("app", ["app://obsidian.md", PAGE])
def test_an_app_of_this_mac_uses_models_until_there_is_a_key(
    backend: FakeBackend, tmp_path: Path, app: str
) -> None:
    with door(backend, tmp_path, rule="auto") as server:
        assert cors(preflight(server, app))["access-control-allow-origin"] == app
        asked: Any = {"json": BODY, "headers": {"origin": app, "sec-fetch-site": "cross-site"}}
        answered = server.ask("POST", "/v1/chat/completions", **asked)
        assert (answered.status_code, cors(answered)["access-control-allow-origin"]) == (200, app)
        for path in ("/openapi.json", "/admin/status"):
            refused = server.ask(path=path, headers={"origin": app, "x-api-key": ADMIN_KEY})
            assert (refused.status_code, cors(refused)) == (403, {})
        key = server.key()
        server.ask()
        asked["headers"]["x-api-key"] = key
        refused = server.ask("POST", "/v1/chat/completions", **asked)
        assert (refused.status_code, cors(refused), cors(preflight(server, app))) == (403, {}, {})


def test_what_to_do_for_a_page_is_said(server: Door) -> None:
    words = preflight(server, "https://chat.example.com").json()["error"]["message"]
    assert words.endswith("start `mlxtp node` with --allowed-origin https://chat.example.com")
    words = server.ask(headers={"host": "studio.lan:52415"}).json()["error"]["message"]
    assert words.endswith("start `mlxtp node` with --allowed-host studio.lan")


def test_any_page(backend: FakeBackend, tmp_path: Path) -> None:
    with door(backend, tmp_path, origins=("*",)) as server:
        key = server.key()
        for origin in ("https://chat.example.com", "null"):
            assert cors(preflight(server, origin))["access-control-allow-origin"] == "*"
            answer = server.ask(headers={"origin": origin, "x-api-key": key})
            assert (answer.status_code, cors(answer)["access-control-allow-origin"]) == (200, "*")
            refused = server.ask(
                path="/admin/status", headers={"origin": origin, "authorization": f"Bearer {ADMIN_KEY}"}
            )
            assert (refused.status_code, cors(refused)) == (403, {})


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return own_tls(tmp_path, ("localhost",), ("127.0.0.1",), here_and_now())


def test_openais_library_by_https_trusts_the_certificate_it_was_given(
    backend: FakeBackend, tmp_path: Path, tls: Tls
) -> None:
    with door(backend, tmp_path, tls=tls) as server:
        key = server.key()
        trusting = ssl.create_default_context(cafile=str(tmp_path / "https-cert.pem"))
        trusting.verify_flags |= ssl.VERIFY_X509_STRICT
        with httpx.Client(verify=trusting, trust_env=False) as transport:
            client = server.openai(key, http_client=transport)
            assert client.models.list().data
            stream = client.chat.completions.create(**BODY, stream=True)
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "stop"
            by_name = client.with_options(base_url=f"https://localhost:{server.port}/v1")
            assert by_name.models.list().data
        with pytest.raises(openai.APIConnectionError) as refused:
            server.openai(key).models.list()
        assert "CERTIFICATE_VERIFY_FAILED" in repr(refused.value.__cause__)


def test_a_long_answer_comes_whole_by_https(backend: FakeBackend, tmp_path: Path, tls: Tls) -> None:
    """More than what asyncio and the system hold for a client that does not read."""
    backend.script = says([60] * 8000)
    with door(backend, tmp_path, tls=tls, rule="never") as server:
        verify = ssl.create_default_context(cafile=str(tmp_path / "https-cert.pem"))
        answer = server.ask("POST", "/v1/chat/completions", json={**BODY, "stream": True}, verify=verify)
        assert answer.text.rstrip().endswith("data: [DONE]")
        assert len(answer.text) > 1_000_000


def test_who_stops_reading_by_https_is_cut_off(backend: FakeBackend, tmp_path: Path, tls: Tls) -> None:
    backend.script = says([60] * 400_000)
    context = ssl.create_default_context(cafile=str(tmp_path / "https-cert.pem"))
    with door(backend, tmp_path, tls=tls, rule="never", stall_s=0.3) as server, socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(("127.0.0.1", server.port))
        with context.wrap_socket(plain, server_hostname="localhost") as deaf:
            ask_for_stream(deaf.sendall)
            assert deaf.recv(100)
            until_closed(backend)
            assert not backend.finished


def test_who_never_ends_the_handshake_is_cut_off(backend: FakeBackend, tmp_path: Path, tls: Tls) -> None:
    with door(backend, tmp_path, tls=tls, handshake_s=0.2) as server:
        for said in (b"", b"\x16\x03\x01\x02\x00"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as silent:
                silent.sendall(said)
                assert silent.recv(100) == b""


def test_a_connection_counts_before_its_handshake(
    backend: FakeBackend, tmp_path: Path, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 3)
    verify = ssl.create_default_context(cafile=str(tmp_path / "https-cert.pem"))
    with door(backend, tmp_path, tls=tls) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) for _ in range(3)]
        with pytest.raises(httpx.TransportError):
            server.ask(path="/health", verify=verify)
        silent[0].close()
        until(lambda: _answers(lambda: server.ask(path="/health", verify=verify)), "the place is free")
        for each in silent[1:]:
            each.close()


def _answers(ask: Callable[[], httpx.Response]) -> bool:
    try:
        return ask().status_code == 200
    except httpx.TransportError:
        return False


def test_what_waits_for_who_never_reads_by_https_is_bounded(
    backend: FakeBackend, tmp_path: Path, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 requests, 20 on each connection; asyncio holds what waits in the clear, and again encrypted."""
    monkeypatch.setattr(http_server, "UNREAD_BYTES", 4096)
    context = ssl.create_default_context(cafile=str(tmp_path / "https-cert.pem"))
    taken = 0

    async def endless() -> AsyncIterator[TokenEvent]:
        nonlocal taken
        while True:
            taken += 1
            yield Tokens((60,) * 1000)

    def stands_still() -> bool:
        before = taken
        time.sleep(0.2)
        return taken == before > 0

    backend.script = endless
    process = psutil.Process()
    with door(backend, tmp_path, tls=tls, rule="never") as server, contextlib.ExitStack() as deaf:
        before = process.memory_info().rss
        for _ in range(10):
            plain = socket.create_connection(("127.0.0.1", server.port))
            client = deaf.enter_context(context.wrap_socket(plain, server_hostname="localhost"))
            for _ in range(20):
                ask_for_stream(client.sendall)
        until(lambda: len(backend.answers) == 10, "each connection's first request is answered")
        until(stands_still, "nothing more is asked of the model")
        remembered = 1000 * taken * 10  # bytes: text and tokens of an answer are kept until its end
        assert process.memory_info().rss - before < 10 * 2 * 1024 * 1024 + remembered
        assert len(backend.answers) == 10


def ask_for_stream(send: Callable[[bytes], Any]) -> None:
    body = b'{"messages": [{"role": "user", "content": "hello"}], "stream": true}'
    send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
    send(body)


def until_closed(backend: FakeBackend) -> None:
    assert backend.began.wait(WAIT_S)
    assert backend.answers[0].closed.wait(WAIT_S)
