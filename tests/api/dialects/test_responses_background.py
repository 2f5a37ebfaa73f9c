"""`background`: a response that needs no client, until it is over or cancelled."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxtp.api.api_keys import LOOK_S
from mlxtp.api.dialects.responses_store import MOST_READERS_OF_ONE
from mlxtp.errors import Code, GroupError, RequestError

from ..conftest import BYTE_LEVEL, FakeBackend, Loaded, Server, forever, says, serving, then
from ..test_app import assert_error, fail_with, until
from ..test_server_access import door
from .test_responses import EVENTS, create, post, strict_response
from .test_responses_kept import ask

RUNNING = ("queued", "in_progress")


def begun(server: Server, **fields: Any) -> str:
    response = post(server, background=True, **fields)
    body = response.json()
    strict_response(body)
    assert (response.status_code, body["status"], body["background"]) == (200, "queued", True)
    return str(body["id"])


def once(server: Server, id_: str, *before: str) -> dict[str, Any]:
    """The response, once its status is none of those before."""
    until(lambda: ask(server, "GET", id_).json()["status"] not in before)
    body: dict[str, Any] = ask(server, "GET", id_).json()
    strict_response(body)
    return body


def waits(gate: threading.Event) -> Any:
    return lambda: asyncio.to_thread(gate.wait)


def streamed(server: Server, id_: str, **query: Any) -> list[Any]:
    return list(server.client.responses.retrieve(id_, stream=True, **query))


def test_it_goes_on_without_its_client_and_says_how_far_it_is(server: Server) -> None:
    accepted, gate = threading.Event(), threading.Event()
    server.backend.judge = waits(accepted)
    server.backend.script = then(server.ids("hello"), waits(gate))
    id_ = begun(server)
    assert once(server, id_)["status"] == "queued"
    accepted.set()
    assert once(server, id_, "queued")["status"] == "in_progress"
    refused = assert_error(post(server, previous_response_id=id_), 400, "invalid_request")
    assert "is in_progress" in refused["message"]
    gate.set()
    body = once(server, id_, *RUNNING)
    assert (body["status"], body["output"][0]["content"][0]["text"]) == ("completed", "hello")
    assert ask(server, "POST", f"{id_}/cancel").json() == body
    assert post(server, previous_response_id=id_).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/cancel", "cancelled"), ("DELETE", "", None)]
)
def test_who_cancels_or_deletes_it_frees_it(
    server: Server, method: str, path: str, status: str | None
) -> None:
    server.backend.script = then(server.ids("ab"), forever)
    id_ = begun(server)
    once(server, id_, "queued")
    body = ask(server, method, id_ + path).json()
    assert body.get("status") == status
    assert server.backend.all_closed()
    found = ask(server, "GET", id_)
    assert found.json() == body if status else found.status_code == 404


def test_a_stream_is_read_again_from_any_event_on(server: Server) -> None:
    gate = threading.Event()
    server.backend.script = then(server.ids("hello"), waits(gate))
    seen: list[Any] = []
    with create(server, background=True, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break  # and leave
    assert [each.type for each in seen[:3]] == [f"response.{kind}" for kind in ("created", *RUNNING)]
    id_, last = seen[0].response.id, seen[-1].sequence_number
    threading.Timer(0.2, gate.set).start()
    rest = streamed(server, id_, starting_after=last)
    whole = streamed(server, id_)
    assert whole == [*seen, *rest]
    assert [each.sequence_number for each in whole] == list(range(len(whole)))
    assert all(isinstance(each, EVENTS[each.type]) for each in whole)
    assert (whole[-1].type, whole[-1].response.output_text) == ("response.completed", "hello")
    assert streamed(server, id_, starting_after=whole[-1].sequence_number) == []


def test_who_reads_the_events_of_a_cancelled_one_is_told(server: Server) -> None:
    server.backend.script = then(server.ids("ab"), forever)
    with create(server, background=True, stream=True) as stream:
        id_ = next(iter(stream)).response.id
        assert ask(server, "POST", f"{id_}/cancel").json()["status"] == "cancelled"
        last = list(stream)[-1]
    assert (last.type, last.response["status"]) == ("response.cancelled", "cancelled")
    assert streamed(server, id_)[-1] == last


def test_one_that_fails_says_so(server: Server) -> None:
    server.backend.script = then(server.ids("ab"), fail_with(GroupError("rank 1 is gone")))
    body = once(server, begun(server), *RUNNING)
    assert (body["status"], body["error"]["type"]) == ("failed", "rank_lost")
    assert_error(post(server, previous_response_id=body["id"]), 400, "invalid_request")


def test_a_refusal_at_once_has_its_status(server: Server) -> None:
    server.backend.refusal = RequestError("full", Code.OVERLOADED, status=429)
    assert_error(post(server, background=True), 429, "overloaded")


def test_it_ends_with_the_server(loaded: dict[str, Loaded]) -> None:
    text, tokenizer = loaded[BYTE_LEVEL].text, loaded[BYTE_LEVEL].tokenizer
    with serving(FakeBackend(text, then([70], forever)), tokenizer) as server:
        id_ = begun(server)
        once(server, id_, "queued")
        began = time.monotonic()
    assert server.backend.all_closed()
    assert time.monotonic() - began < 10


def test_it_is_open_for_its_key_until_it_is_over(loaded: dict[str, Loaded], tmp_path: Path) -> None:
    gate, path = threading.Event(), "/v1/responses"
    backend = FakeBackend(loaded[BYTE_LEVEL].text, then([70], waits(gate)))
    with door(backend, tmp_path) as server:
        keys = [server.file.create(name, 0, 1.0, concurrent=1)[1] for name in ("one", "other")]
        own, other = ({"headers": {"x-api-key": key}} for key in keys)
        server.now += LOOK_S
        body: dict[str, Any] = {"json": {"input": "hello", "background": True}}
        id_ = server.ask("POST", path, **own, **body).json()["id"]
        assert server.ask("POST", path, **own, **body).status_code == 429
        gate.set()
        until(lambda: server.ask("GET", f"{path}/{id_}", **own).json()["status"] == "completed")
        until(lambda: server.ask("POST", path, **own, json={"input": "hello"}).status_code == 200)
        for method, more in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            found = [server.ask(method, f"{path}/{id_}{more}", **whose) for whose in (other, own)]
            assert [each.status_code for each in found] == [404, 200]


def test_who_reads_is_counted_to_the_key_until_the_reading_ends(
    loaded: dict[str, Loaded], tmp_path: Path
) -> None:
    path = "/v1/responses"
    backend = FakeBackend(loaded[BYTE_LEVEL].text, then([70], forever))
    with door(backend, tmp_path) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        body: dict[str, Any] = {"input": "hello", "background": True, "stream": True}

        def reads(key: str, id_: str) -> httpx.Response:
            asked = client.build_request("GET", f"{path}/{id_}?stream=true", headers={"x-api-key": key})
            return client.send(asked, stream=True)

        def begins(key: str) -> str:
            with client.stream("POST", path, json=body, headers={"x-api-key": key}) as answer:
                first = next(each for each in answer.iter_lines() if each.startswith("data: "))
            return str(json.loads(first[6:])["response"]["id"])

        one, other = server.key("one"), server.key("other")
        own, others = begins(one), begins(other)
        opened = [reads(one, own) for _reader in range(MOST_READERS_OF_ONE)]
        assert {each.status_code for each in opened} == {200}
        assert (refused := reads(one, own)).status_code == 429
        assert json.loads(refused.read())["error"]["code"] == "overloaded"
        assert reads(other, others).status_code == 200
        opened[0].close()
        until(lambda: reads(one, own).status_code == 200)


def test_a_summary_is_made_in_the_background(server: Server) -> None:
    server.backend.context = 4096
    server.backend.script = says(server.ids("hello"))
    steps = [{"role": "user", "content": "a"}, {"type": "compaction_trigger"}]
    body = once(server, begun(server, input=steps), *RUNNING)
    assert [item["type"] for item in body["output"]] == ["compaction"]
