"""A key with limits from its first request to its last, in three dialects: a real server, rank 0 by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mlxtp import audit
from mlxtp.api.api_keys import LOOK_S, KeyFile, KeyRing
from mlxtp.api.generation import PRIORITY
from mlxtp.api.guard import Access
from mlxtp.logs import keep_audit
from mlxtp.settings import AUDIT_LOG
from mlxtp.short_names import SHORT_NAMES

from .conftest import BYTE_LEVEL, WAIT_S, Loaded
from .test_request_metrics_text import MODEL, Scraped, Stage, serving

pytestmark = pytest.mark.slow

NOON = datetime(2026, 11, 26, 12, 0, 0).timestamp()
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@dataclass
class Shop:
    """A server with keys, whose clocks stand still but when a test moves them."""

    file: KeyFile
    clock: float = 0.0
    now: float = NOON

    def key(self, name: str, **limits: Any) -> dict[str, str]:
        """The header of a new key, which the server has noticed."""
        self.clock += LOOK_S
        return {
            "authorization": f"Bearer {self.file.create(name, limits.pop('per_minute', 0), 1.0, **limits)[1]}"
        }


@pytest.fixture
def shop(tmp_path: Path, loaded: dict[str, Loaded]) -> Iterator[tuple[Shop, Stage]]:
    shop = Shop(KeyFile(tmp_path))
    ring = KeyRing(shop.file, "always", beyond=True, clock=lambda: shop.clock, now=lambda: shop.now)
    keep_audit(tmp_path)
    with serving(loaded[BYTE_LEVEL], tmp_path, Access(keys=ring)) as stage:
        yield shop, stage
    audit.log.handlers.clear()


def metrics(stage: Stage, header: dict[str, str]) -> Scraped:
    return Scraped(httpx.get(f"{stage.url}/metrics", headers=header, timeout=WAIT_S).text)


def test_a_day_s_tokens_are_counted_refused_and_come_again(shop: tuple[Shop, Stage]) -> None:
    keys, stage = shop
    guest, other = keys.key("guest", tokens_per_day=5), keys.key("other")
    answer = stage.says("hello wide world")
    used = stage.ask(headers=guest).json()["usage"]
    assert used["completion_tokens"] == answer
    today = used["total_tokens"]
    assert today > 5
    text = guest["authorization"].removeprefix("Bearer ")
    client = openai.OpenAI(base_url=f"{stage.url}/v1", api_key=text, max_retries=3, timeout=WAIT_S)
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(model="default", messages=HELLO)
    assert (refused.value.code, refused.value.type) == ("insufficient_quota", "insufficient_quota")
    words = (
        f"the key guest allows 5 tokens a day and has used {today} today; the next day begins at 2026-11-27"
    )
    assert words in refused.value.message
    assert refused.value.response.headers["retry-after"] == str(12 * 3600)
    theirs = anthropic.Anthropic(base_url=stage.url, api_key=text, max_retries=0, timeout=WAIT_S)
    with pytest.raises(anthropic.RateLimitError) as also:
        theirs.messages.create(model="claude-x", max_tokens=5, messages=HELLO)
    assert also.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
    assert words in also.value.body["error"]["message"]  # type: ignore[index]
    ollama = stage.ask("/api/chat", guest, model="tiny")
    assert (ollama.status_code, ollama.headers["retry-after"]) == (429, str(12 * 3600))
    assert words in ollama.json()["error"]
    assert client.models.list().data, "a list takes no tokens"
    assert stage.ask(headers=other).status_code == 200, "others go on"
    found = metrics(stage, other)
    assert found("mlxtp_key_tokens_today", key="guest") == today
    assert found("mlxtp_key_requests_total", key="guest") == 2
    assert found("mlxtp_key_refused_total", key="guest") == 3, "the client did not try again"
    assert found("mlxtp_key_generation_tokens_total", key="guest") == answer
    assert found("mlxtp_key_open_requests", key="guest") == 0
    keys.now = (datetime.fromtimestamp(NOON) + timedelta(hours=12)).timestamp()
    assert stage.ask(headers=guest).status_code == 200


def test_an_open_request_counts_until_its_client_leaves(shop: tuple[Shop, Stage]) -> None:
    keys, stage = shop
    guest, watcher = keys.key("guest", concurrent=1), keys.key("watcher", scopes=("metrics",))
    stage.desk.held = True
    body = {"messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{stage.url}/v1/chat/completions", json=body, headers=guest, timeout=WAIT_S):
        refused = stage.ask(headers=guest)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "allows 1 request at one time" in refused.json()["error"]["message"]
        assert metrics(stage, watcher)("mlxtp_key_open_requests", key="guest") == 1
    stage.desk.held = False
    stage.says("hello")
    for _ in range(200):
        if metrics(stage, watcher)("mlxtp_key_open_requests", key="guest") == 0:
            break
    assert stage.ask(headers=guest).status_code == 200


def test_rights_in_each_dialect_and_what_is_written_of_refusals(shop: tuple[Shop, Stage]) -> None:
    keys, stage = shop
    path = keys.file.path.parent / AUDIT_LOG
    other, ended = keys.key("other", models=("org/else",)), keys.key("ended", expires=int(NOON))
    watcher = keys.key("watcher", scopes=("metrics",))
    forbidden = 403, "insufficient_permissions", "permission_error"
    unknown = 401, "invalid_api_key", "authentication_error"
    for header, (status, code, kind), words in (
        (other, forbidden, "the key other is not for tiny; it is for org/else"),
        (watcher, forbidden, "that is scope chat, and it has metrics"),
        (ended, unknown, "the key ended expired at 2026-11-26 12:00"),
        ({"authorization": "Bearer mlxtp_guess"}, unknown, "not known here"),
    ):
        ours = stage.ask(headers=header, model="tiny")
        assert (ours.status_code, ours.json()["error"]["code"]) == (status, code)
        theirs = stage.ask("/v1/messages", header, model="tiny")
        assert (theirs.status_code, theirs.json()["error"]["type"]) == (status, kind)
        ollama = stage.ask("/api/chat", header, model="tiny")
        assert ollama.status_code == status
        assert words in ours.json()["error"]["message"]
        assert words in theirs.json()["error"]["message"]
        assert words in ollama.json()["error"]
    listed = httpx.get(f"{stage.url}/v1/models", headers=other, timeout=WAIT_S).json()["data"]
    assert listed == []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    refused = {(row["by"], row["code"], row["address"]) for row in rows if row["event"] == "key_refused"}
    assert refused == {
        ("key other", "insufficient_permissions", "127.0.0.1"),
        ("key watcher", "insufficient_permissions", "127.0.0.1"),
        ("key ended", "invalid_api_key", "127.0.0.1"),
        ("address 127.0.0.1", "invalid_api_key", "127.0.0.1"),
    }
    assert "mlxtp_" not in path.read_text(), "no key, not even a wrong one"


def test_a_key_for_the_page_loads_models_and_makes_no_join_tokens(shop: tuple[Shop, Stage]) -> None:
    keys, stage = shop
    page, plain = keys.key("page", scopes=("load", "metrics")), keys.key("plain")
    one = keys.key("one", scopes=("load",), models=(MODEL, SHORT_NAMES["qwen3:8b"]))

    def admin(header: dict[str, str], what: str, **body: str) -> int:
        if not body:
            return httpx.get(f"{stage.url}/admin/{what}", headers=header, timeout=WAIT_S).status_code
        url = f"{stage.url}/admin/{what}"
        return httpx.post(url, json=body, headers=header, timeout=WAIT_S).status_code

    assert [admin(page, each) for each in ("models", "keys")] == [200, 200]
    assert [admin(page, each, model="org/x") for each in ("serve", "unload", "pull", "pulling")] == [200] * 4
    for forbidden in ("token", "remove", "leave", "drain", "caches/clear", "let_in", "removed", "authority"):
        assert admin(page, forbidden, node="x", model="x") == 401, forbidden
    assert [admin(page, each) for each in ("status", "members", "settings", "plan")] == [401] * 4
    assert [admin(plain, "models"), admin(plain, "serve", model="x")] == [403, 403]
    assert admin(one, "keys") == 403
    assert [admin(one, "serve", model=name) for name in ("qwen3:8b", "qwen3:4b")] == [200, 403]
    assert [admin(one, "serve", model=MODEL), admin(one, "serve", model="org/x")] == [200, 403]
    assert [admin(one, "serve", model=MODEL, only="yes"), admin(one, "unload", everything="yes")] == [
        403,
        403,
    ]
    assert admin({"authorization": "Bearer wrong"}, "serve", model="x") == 401
    assert stage.ask(headers=page).status_code == 403


def test_a_batch_key_cannot_raise_itself_and_any_key_can_lower_itself(shop: tuple[Shop, Stage]) -> None:
    keys, stage = shop
    stage.says("hello")
    for priority in ("interactive", "batch"):
        key = keys.key(priority, priority=priority)
        for header in ({}, {PRIORITY: "interactive"}, {PRIORITY: "batch"}):
            assert stage.ask(headers=key | header, n=2).status_code == 200
    found = [request.batch for request in stage.desk.asked[::2]]
    assert found == [request.batch for request in stage.desk.asked[1::2]] == [False, False, *[True] * 4]
