"""`/v1/responses/{id}`: what is kept can be read, listed and deleted, by its client alone."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from ..conftest import Server, says
from ..test_app import assert_error
from .test_responses import TEXT, create, events_of, http, post, reference, user


def ask(server: Server, method: str, path: str, **query: Any) -> httpx.Response:
    return server.ask(method, f"/v1/responses/{path}?{urlencode(query)}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_read_as_it_was_sent_until_it_is_deleted(server: Server, stream: bool) -> None:
    server.backend.script = says(server.ids(TEXT))
    sent = post(server, stream=stream)
    body = events_of(sent)[-1]["response"] if stream else sent.json()
    assert ask(server, "GET", body["id"]).json() == body
    gone = ask(server, "DELETE", body["id"])
    assert gone.json() == {"id": body["id"], "object": "response", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        error = assert_error(ask(server, method, body["id"] + path), 404, "not_found")
        assert "6 hours, at most 1000 of them" in error["message"]
    assert_error(post(server, previous_response_id=body["id"]), 404, "not_found")


def test_the_input_is_listed_in_pages_with_what_came_before(thinker: Server) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    said = [{"type": "input_text", "text": "21"}]
    result = {"type": "function_call_output", "call_id": "c1", "output": said}
    thinker.backend.script = says(thinker.ids("warm"))
    first = create(thinker, input=[user("a"), call, result])
    second = create(thinker, input="more", previous_response_id=first.id)
    pages = thinker.client.responses.input_items
    items = list(pages.list(second.id, order="asc", limit=2))
    asked, called, *others = [item.to_dict() for item in items]
    assert called["type"] == "function_call"
    read = [(each["type"], *each.get("content", each.get("output"))) for each in (asked, *others)]
    assert [(kind, part["type"], part["text"]) for kind, part in read] == [
        ("message", "input_text", "a"),
        ("function_call_output", "input_text", "21"),
        ("message", "output_text", "warm"),
        ("message", "input_text", "more"),
    ]
    ids = [str(item.id) for item in items]
    assert len(set(ids)) == len(ids)
    assert first.output[0].id == ids[3]
    assert [item.id for item in pages.list(second.id, limit=3)] == ids[::-1]
    page = ask(thinker, "GET", f"{second.id}/input_items", order="asc", after=ids[0], limit=3).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[1], ids[3], True)
    last = ask(thinker, "GET", f"{second.id}/input_items", after=ids[4], limit=4).json()
    assert (last["last_id"], last["has_more"]) == (ids[0], False)
    create(thinker, input=[reference({"id": ids[0]}), user("x")])  # an item has a name for later requests


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/input_items", {"limit": 0}, "limit"),
        ("/input_items", {"limit": 101}, "limit"),
        ("/input_items", {"order": "up"}, "order"),
        ("/input_items", {"after": "msg_x"}, "after"),
        ("", {"stream": "perhaps"}, "stream"),
        ("", {"stream": True}, "stream"),
        ("", {"stream": True, "starting_after": -2}, "starting_after"),
    ],
)
def test_a_wrong_query_is_a_400_that_names_it(
    server: Server, path: str, query: dict[str, Any], param: str
) -> None:
    refused = ask(server, "GET", post(server).json()["id"] + path, **query)
    assert assert_error(refused, 400, "invalid_request")["param"] == param


def test_what_was_not_in_the_background_is_cancelled_by_its_client_alone(server: Server) -> None:
    id_ = post(server).json()["id"]
    refused = assert_error(ask(server, "POST", f"{id_}/cancel"), 400, "invalid_request")
    assert "ends with its client" in refused["message"]


def test_an_output_without_its_call_is_refused_where_all_calls_are_known(server: Server) -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "21"}
    assert post(server, input=[output]).status_code == 200  # a client's own history may lack the call
    id_ = post(server).json()["id"]
    error = assert_error(post(server, input=[output], previous_response_id=id_), 400, "invalid_request")
    assert (error["param"], '"c1"' in error["message"]) == ("input", True)


def test_a_new_history_is_for_a_model_that_is_named(server: Server) -> None:
    error = assert_error(http(server, {"input": "hello"}, "/compact"), 400, "invalid_request")
    assert error["param"] == "model"
