"""Requests of commands, and clients that may not make them: the real application, without a network."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, cast

import httpx
import pytest

from mlxtp.api.access_log import AccessLog
from mlxtp.api.admin import MAX_BODY_BYTES
from mlxtp.api.app import create_app
from mlxtp.api.request_context import current
from mlxtp.api.request_metrics import RequestMetrics
from mlxtp.errors import Code, LinkError, UserError
from mlxtp.verbs import Serve, Verb

pytestmark = pytest.mark.slow

KEY = "the key in the home"
GETS = {"status", "keys", "caches", "settings", "plan", "models", "doctor", "members", "stored", "progress"}
VERBS = (
    "status keys caches caches/clear settings plan plan/now models doctor members token bench/fabric serve "
    "unload pull pulling stored removable removed drain progress let_in remove leave authority"
)
ROUTES = {what: "GET" if what in GETS else "POST" for what in VERBS.split()}


NAMED = ("again", "replicas", "on", "keep", "parallel", "split", "only")
"""Fields of `serve` that it has with their names."""


class FakeAdmin:
    """Keeps what it was asked; `error` is raised instead of an answer."""

    key = KEY

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.error: Exception | None = None

    def _do(self, *what: str) -> dict[str, object]:
        self.asked.append(what)
        if self.error is not None:
            raise self.error
        return {"did": what[0]}

    async def carry_out(self, verb: Verb) -> Any:
        """Texts and switches of a verb, in their order; of `serve` what is given, with names."""
        await asyncio.sleep(0)
        told = {name: "yes" if value is True else value or "" for name, value in vars(verb).items()}
        named = [f"{name}={told[name]}" for name in NAMED if told.get(name) and isinstance(verb, Serve)]
        left_out = NAMED if isinstance(verb, Serve) else ()
        return self._do(verb.path, *(told[name] for name in told if name not in left_out), *named)


@pytest.fixture
def admin() -> FakeAdmin:
    return FakeAdmin()


def ask(
    admin: FakeAdmin | None,
    method: str,
    path: str,
    body: bytes = b"",
    key: str | None = f"Bearer {KEY}",
    **headers: str,
) -> httpx.Response:
    async def run() -> httpx.Response:
        app = create_app(cast(Any, None), admin=admin)
        transport = httpx.ASGITransport(AccessLog(app, RequestMetrics(time.monotonic)))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:52415") as client:
            sent = headers | ({"authorization": key} if key is not None else {})
            raw = {name.encode(): value.encode() for name, value in sent.items()}
            return await client.request(method, path, content=body, headers=raw)

    return asyncio.run(run())


def test_a_command_that_waits_does_not_fill_the_log(
    admin: FakeAdmin, caplog: pytest.LogCaptureFixture
) -> None:
    """It asks twice a second. What was wrong with it is said all the same."""
    with caplog.at_level(logging.INFO, "mlxtp"):
        for path in ("status", "progress", "members"):
            assert ask(admin, "GET", f"/admin/{path}").status_code == 200
        assert ask(admin, "POST", "/admin/pulling", b'{"model": "x"}').status_code == 200
        assert ask(admin, "GET", "/admin/status", key=None).status_code == 401
    said = [line.split(" in ")[0] for line in caplog.messages if "/admin" in line]
    assert said == ["GET /admin/members 200", "GET /admin/status 401"]


def test_the_author_of_a_command_is_this_mac_once_its_key_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    admin, authors = FakeAdmin(), []

    async def carry_out(_: Verb) -> dict[str, object]:
        context = current()
        assert context is not None
        authors.append(context.origin)
        return {}

    monkeypatch.setattr(admin, "carry_out", carry_out)
    refused: list[str] = []
    monkeypatch.setattr(
        "mlxtp.audit.record", lambda *_args, **_how: refused.append(cast(Any, current()).origin)
    )
    assert ask(admin, "GET", "/admin/status").status_code == 200
    assert ask(admin, "GET", "/admin/status", key=None).status_code == 401
    assert authors == ["commands of this Mac"]
    assert [origin.split()[0] for origin in refused] == ["address"]


def test_each_command_reaches_the_agent(admin: FakeAdmin) -> None:
    for what, method in ROUTES.items():
        body = (
            b'{"model": "tiny", "nodes": "2", "node": "mini", "described": "eJw", "force": "yes", '
            b'"with_admitted": "yes"}'
            if method == "POST"
            else b""
        )
        response = ask(admin, method, f"/admin/{what}", body)
        assert (response.status_code, response.json()) == (200, {"did": what})
    assert admin.asked == [
        ("status",), ("keys",), ("caches",), ("caches/clear", "tiny", ""), ("settings",), ("plan",),
        ("plan/now", "tiny", "eJw", "2", "", "auto"),
        ("models",), ("doctor",), ("members",), ("token",), ("bench/fabric", "tiny"),
        ("serve", "tiny", "2"), ("unload", "tiny", ""), ("pull", "tiny", ""), ("pulling", "tiny"),
        ("stored",),
        ("removable", "tiny", ""), ("removed", "tiny"),
        ("drain", ""), ("progress",), ("let_in", "mini"), ("remove", "mini", "yes"), ("leave", "yes"),
        ("authority", "mini", "", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "key", [None, "", "Bearer ", "Bearer wrong", f"Bearer {KEY} ", f"Basic {KEY}", "Bearer ké"]
)
def test_without_the_key_nothing_is_told_and_nothing_done(admin: FakeAdmin, key: str | None) -> None:
    for what, method in ROUTES.items():
        response = ask(admin, method, f"/admin/{what}", b'{"model": "tiny", "node": "x"}', key)
        assert response.status_code == 401
        assert "read the key in the home folder" in response.json()["error"]["message"]
    assert admin.asked == []


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"not json", 400, "not a JSON object"),
        (b"\xff\xfe", 400, "not a JSON object"),
        (b"[]", 400, "not a JSON object"),
        (b'"tiny"', 400, "not a JSON object"),
        (b"[" * 10_000, 400, "not a JSON object"),
        (b"{}", 400, "model: a string is expected"),
        (b'{"model": 5}', 400, "model: a string is expected"),
        (b'{"model": "tiny", "only": "maybe"}', 400, "only: 'maybe' is neither true nor false"),
        (b'{"model": "tiny", "only": []}', 400, "only: "),
        (b'{"model": "tiny", "nodes": 2}', 400, "nodes: a string is expected"),
        (b'{"model": "' + b"x" * MAX_BODY_BYTES + b'"}', 413, f"larger than {MAX_BODY_BYTES} bytes"),
    ],
)
def test_a_body_that_makes_no_sense(admin: FakeAdmin, body: bytes, status: int, words: str) -> None:
    response = ask(admin, "POST", "/admin/serve", body)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]
    assert admin.asked == []


@pytest.mark.parametrize(
    ("given", "taken"),
    [("true", "yes"), ('"yes"', "yes"), ('"1"', "yes"), ("false", ""), ('""', ""), ('"no"', "")],
)
def test_switches_are_booleans_or_words(admin: FakeAdmin, given: str, taken: str) -> None:
    assert ask(admin, "POST", "/admin/leave", f'{{"force": {given}}}'.encode()).status_code == 200
    assert admin.asked == [("leave", taken)]


def test_an_empty_text_is_one_that_is_not_given(admin: FakeAdmin) -> None:
    ask(admin, "POST", "/admin/serve", b'{"model": "tiny", "nodes": "", "split": ""}')
    assert admin.asked == [("serve", "tiny", "")]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UserError("no member is called 'x'"), 400, Code.CONFIG),
        (UserError("only studio can issue tokens", Code.NOT_READY), 400, Code.NOT_READY),
        (LinkError("the link is gone"), 500, Code.LINK_LOST),
    ],
)
def test_what_the_agent_refuses_is_told_in_its_words(
    admin: FakeAdmin, error: Any, status: int, code: Code
) -> None:
    admin.error = error
    for what in ("status", "token", "remove"):
        response = ask(admin, ROUTES[what], f"/admin/{what}", b'{"node": "x"}' if what == "remove" else b"")
        assert response.json()["error"]["message"] == error.detail
        assert response.json()["error"]["code"] == code
        assert response.status_code >= status


def test_what_is_not_there(admin: FakeAdmin) -> None:
    assert ask(admin, "POST", "/admin/status").status_code == 405
    assert ask(admin, "GET", "/admin/leave").status_code == 405
    assert ask(admin, "POST", "/admin/shutdown").status_code == 404
    assert ask(None, "GET", "/admin/status").status_code == 404
    assert admin.asked == []
