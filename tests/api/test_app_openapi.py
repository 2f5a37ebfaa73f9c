"""`/openapi.json` says what is there, and what is there does what it says."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import httpx
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
