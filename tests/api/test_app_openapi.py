"""`/openapi.json` says what is there, and what is there does what it says."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import httpx
import jsonschema_rs
import pytest
from starlette.routing import Route

from mlxtp.api.access_log import metrics_route
from mlxtp.api.adapter import document
from mlxtp.api.admin import admin_operations
from mlxtp.api.app import HEALTH, adapters, create_app

from .conftest import FakeBackend, Loaded, Server
from .test_admin import FakeAdmin

UNDESCRIBED = {"/openapi.json", "/v1/models/", "/models/", "/"}
"""The description itself, a second spelling, and the page."""


def described() -> dict[str, Any]:
    return document([HEALTH, *(each for adapter in adapters() for each in adapter.endpoints)], "1")


def test_every_endpoint_is_described_and_nothing_else(loaded: dict[str, Loaded]) -> None:
    backend = cast(Any, FakeBackend(loaded["byte_level"].text))
    app = create_app(backend, admin=FakeAdmin(), observed=cast(Any, SimpleNamespace(over=None)))
    app.router.routes.insert(0, metrics_route(lambda: (b"", "text/plain")))
    there = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, Route) and route.path not in UNDESCRIBED and not route.path.startswith("/page/")
        for method in (route.methods or set()) - {"HEAD"}
    }

    async def described_there() -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.get("/openapi.json")).json()["paths"]

    paths = asyncio.run(described_there())
    there -= {(method, path) for method, path in there if path not in paths and f"/v1{path}" in paths}
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == there


def test_a_command_is_described_by_its_fields() -> None:
    whole = document(admin_operations(), "1")
    fields = whole["components"]["schemas"]["HandOver"]
    assert {name: each["type"] for name, each in fields["properties"].items()} == {
        **{"node": "string", "move": "boolean", "sure": "boolean"}
    }
    assert fields["required"] == ["node"]
    assert "requestBody" not in whole["paths"]["/admin/status"]["get"]
    assert whole["paths"]["/admin/token"]["post"]["summary"] == "Make a join token."


@pytest.mark.parametrize("path", ["/v1/conversations", "/v1/audio/{rest}", "/api/pull"])
def test_what_is_always_refused_promises_no_answer(server: Server, path: str) -> None:
    promised = described()["paths"][path]["post"]["responses"]
    status = httpx.post(f"{server.url}{path}", json={}, trust_env=False).status_code
    assert set(promised) == {str(status), "4XX", "5XX"}


def test_every_reference_leads_somewhere_and_ranges_are_told() -> None:
    whole = described()
    schemas = whole["components"]["schemas"]
    named = {part.split('"')[0] for part in json.dumps(whole).split('"#/components/schemas/')[1:]}
    assert named <= schemas.keys()
    assert "ChatRequest" in named
    temperature = schemas["ChatRequest"]["properties"]["temperature"]["anyOf"]
    assert {"minimum": 0, "maximum": 2, "type": "number"} in temperature


USER = [{"role": "user", "content": "a"}]
TOLD = [{"role": "tool", "content": [{"type": "output_text", "text": None}, [5]]}, *USER]
LOGPROBS = "message.output_text.logprobs"
TOOL = {"name": "f", "input_schema": {}}
#: Bodies that are right, and each with fields that are not right beside the others.
RULES: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("/v1/chat/completions", {"messages": TOLD}, [
        {"stream_options": {}}, {"stream": True, "prompt_logprobs": 1}, {"top_logprobs": 1}, {"regex": ""},
        {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"logit_bias": {"a": 1}}, {"grammar": {}}, {"grammar": {"type": "regex", "value": ""}},
    ]),
    ("/v1/chat/completions", {"messages": USER, "stream": True, "stream_options": {}, "top_logprobs": 0}, []),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 1}, "grammar": {"type": "json", "value": {}}}, [
        {"grammar": {"type": "json"}},
    ]),
    ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1}, [{"stream_options": {}}]),
    ("/v1/responses", {"input": "a", "include": [LOGPROBS], "top_logprobs": 1, "tools": [{"type": "x"}]}, [
        {"include": []}, {"background": True, "store": False}, {"tools": [{}]},
        {"tools": [{"type": "function"}]}, {"tools": [{"type": "namespace", "name": "n", "tools": [{}]}]},
    ]),
    ("/v1/messages", {"messages": TOLD, "max_tokens": 0}, [
        {"mcp_servers": [1]}, {"tools": [{}]}, {"tools": [{"type": "x"}]}, {"tool_choice": {"type": "any"}},
    ]),
    ("/v1/messages/count_tokens", {"messages": USER, "tools": [{"type": "x"}, TOOL], "mcp_servers": [1]}, []),
    ("/api/chat", {"messages": [{"role": "user"}]}, []),
    ("/api/chat", {"messages": TOLD}, [{"messages": [{"role": "user", "content": [{"type": "text"}]}]}]),
    ("/v1/tokenize", {"messages": [{"role": "user", "content": ["a"]}]}, [{"prompt": "a"}]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "right", "wrong"), RULES)
def test_rules_between_fields_are_told_as_they_are_held(
    roomy: Server, path: str, right: dict[str, Any], wrong: list[dict[str, Any]]
) -> None:
    whole = described()
    schema = whole["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    described_as = jsonschema_rs.validator_for({**schema, "components": whole["components"]})
    for body, holds in ((right, True), *((right | each, False) for each in wrong)):
        status = httpx.post(f"{roomy.url}{path}", json=body, trust_env=False).status_code
        assert (status == 200, described_as.is_valid(body)) == (holds, holds), body


def test_a_wrong_method_is_told_all_the_right_ones(server: Server) -> None:
    for path, allowed in (("/v1/responses", "GET, HEAD, POST"), ("/v1/responses/compact", "POST")):
        answer = httpx.options(f"{server.url}{path}", trust_env=False)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
