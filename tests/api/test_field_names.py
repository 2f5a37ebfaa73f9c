"""What clients of other servers send is taken, told or refused, by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxtp.api import field_names
from mlxtp.errors import Code, RequestError
from mlxtp.text.tool_grammar import log_once
from scripts.reference import taken_fields

from .conftest import Server, says

HELLO = [{"role": "user", "content": "hello"}]
PATHS = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}),
    "completions": ("/v1/completions", {"prompt": "hello"}),
    "responses": ("/v1/responses", {"input": "hello"}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
    "ollama": ("/api/chat", {"model": "tiny", "messages": HELLO}),
}
DOCUMENTED: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "recordings" / "fields.json").read_text()
)
"""Fields in the documents or the sources of other servers and programs, by the API that they are for."""


def post(server: Server, api: str, **fields: Any) -> httpx.Response:
    path, body = PATHS[api]
    return server.ask("POST", path, body | fields)


@pytest.mark.parametrize("of", DOCUMENTED)
def test_each_field_that_others_document_is_taken_or_has_a_reason(of: str) -> None:
    taken = taken_fields()
    for api, names in DOCUMENTED[of].items():
        reasons = {name: field_names.reason(api, name) for name in names.split() if name not in taken[api]}
        assert [name for name, why in reasons.items() if why == field_names.UNKNOWN] == [], api


def test_a_reason_without_an_api_is_not_given_twice() -> None:
    for api in field_names.APIS:
        rows = [row for row in field_names.OTHERS if api in (row.apis or api).split()]
        names = [(name, bool(row.apis)) for row in rows for name in row.names.split()]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_ignored_fields_are_named_in_the_answer_and_logged_once(
    server: Server, caplog: pytest.LogCaptureFixture, api: str, stream: bool
) -> None:
    log_once.cache_clear()
    caplog.set_level(logging.INFO, "mlxtp.text.tool_grammar")
    server.backend.script = says(server.ids("hello"))
    for _ in range(2):
        answer = post(server, api, stream=stream, mirostat=2, **{"Ünknown": {"a": [1]}, "rid": None})
        assert (answer.status_code, answer.headers[field_names.HEADER]) == (200, "mirostat, %C3%9Cnknown")
    assert [each.message for each in caplog.records] == [
        f'ignoring "mirostat" in {api}: a sampler that is not built',
        f'ignoring "Ünknown" in {api}: no such field is known',
    ]
    assert post(server, api, stream=stream, rid=1, **{"": 1}).headers[field_names.HEADER] == "rid"
    assert field_names.HEADER not in post(server, api, stream=stream).headers


def test_parts_with_fields_of_their_own(server: Server) -> None:
    server.backend.script = says(server.ids("hello"))
    options = {"num_ctx": 4096, "mirostat": 2, "seed": 1}
    told = post(server, "ollama", options=options).headers[field_names.HEADER]
    assert told == "num_ctx, mirostat"
    told = post(server, "responses", truncation="auto", max_tool_calls=None).headers[field_names.HEADER]
    assert told == "truncation"


def test_names_of_ignored_fields_are_bounded(server: Server) -> None:
    server.backend.script = says(server.ids("hello"))
    for letter in "x😀":
        sent = {f"{i:03d}" + letter * 500: i for i in range(100)}
        names = post(server, "chat", **sent).headers[field_names.HEADER].split(", ")
        assert (len(names), {len(name) for name in names}) == (field_names.MOST_TOLD, {field_names.MOST_NAME})


REFUSED = [
    (api, name, row)
    for row in field_names.OTHERS
    if row.refused and not row.apis
    for api in PATHS
    for name in row.names.split()
    if name not in taken_fields()[api]
]


@pytest.mark.parametrize(("api", "name", "row"), REFUSED, ids=lambda value: str(value)[:20])
def test_a_refused_field_is_a_400_that_names_it(api: str, name: str, row: field_names.OtherFields) -> None:
    for nothing in (None, False):
        assert field_names.ignored(api, {name: nothing}) == ()
    with pytest.raises(RequestError) as caught:
        field_names.ignored(api, {"x": True, name: True})
    assert (caught.value.code, caught.value.param, caught.value.status) == (Code.NOT_SUPPORTED, name, 400)
    assert caught.value.detail == f"{name} is not supported: {row.why}"


@pytest.mark.parametrize("api", PATHS)
def test_a_refused_field_begins_no_answer(server: Server, api: str) -> None:
    answer = post(server, api, stop_regex="x", mirostat=1)
    assert (answer.status_code, server.backend.requests) == (400, [])
    assert "stop_regex is not supported: send stop, or" in answer.text
    server.backend.script = says(server.ids("hello"))
    assert post(server, api, stop_regex="").status_code == 200
