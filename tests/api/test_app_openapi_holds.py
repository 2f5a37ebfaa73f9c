"""Requests made from `/openapi.json`, right ones and wrong ones: every answer is one that it promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from mlxtp.api.adapter import document
from mlxtp.api.app import HEALTH, adapters

from .conftest import Server
from .dialects.shapes import read_answer
from .test_app_mutated_bodies import VECTORS

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hello"}]
EXAMPLES = 4
PLAIN = settings(
    database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
ASKED: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/responses/compact": {"model": "default", "input": "hello"},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/api/chat": {"model": "default", "messages": HELLO},
    "/api/generate": {"model": "default", "prompt": "hello"},
    "/api/show": {"model": "default"},
    "/v1/chat/completions/input_tokens": {"messages": HELLO},
    "/v1/tokenize": {"prompt": "hello"},
    "/v1/detokenize": {"tokens": [70]},
    "/apply-template": {"messages": HELLO},
}
DESCRIPTION = document([HEALTH, *(each for adapter in adapters() for each in adapter.endpoints)], "1")


def operations(description: dict[str, Any]) -> list[schemathesis.APIOperation]:
    return [found.ok() for found in schemathesis.openapi.from_dict(description).get_all_operations()]


OPERATIONS = operations(DESCRIPTION)
BODIES = [each for adapter in adapters() for each in adapter.endpoints if each.body]
FIELDS = {each.path: set(each.body.model_fields) for each in BODIES if each.body}
WITH_BODY = [each for each in OPERATIONS if each.body and each.path not in VECTORS]
# the last is the last: OpenAPI 3.1 has no words for the events of a stream
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
STREAMS = ("text/event-stream", "application/x-ndjson")


Change = Callable[[schemathesis.Case], None]


def check(
    roomy: Server, operation: schemathesis.APIOperation, mode: GenerationMode, change: Change
) -> set[int]:
    """The statuses of all answers, each of which is as described."""
    statuses: set[int] = set()
    with requests.Session() as session:
        session.trust_env = False

        @seed(0)
        @settings(PLAIN, max_examples=EXAMPLES)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            change(case)
            response = case.call(base_url=roomy.url, session=session)
            streamed = response.headers["content-type"][0].startswith(STREAMS)
            case.validate_response(response, checks=CHECKS[:-1] if streamed else CHECKS)
            if not streamed:
                read_answer(operation.label, response.status_code, response.content)
            statuses.add(response.status_code)

        ask()
    return statuses


def as_it_is(_case: schemathesis.Case) -> None:
    """Nothing is changed."""


def with_something_to_say(case: schemathesis.Case) -> None:
    """Random are numbers and flags only; conversations of random words are all refused."""
    assert isinstance(case.body, dict)
    simple = {name: value for name, value in case.body.items() if isinstance(value, bool | int | float)}
    simple.pop("deadline_s", None)  # it may be too short for any answer
    case.body = simple | ASKED[case.path]
    if "stream" in FIELDS[case.path]:
        case.body["stream"] = len(simple) % 2 == 1


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_what_is_promised_is_kept(roomy: Server, operation: schemathesis.APIOperation) -> None:
    assert check(roomy, operation, GenerationMode.POSITIVE, as_it_is) <= {200, 400, 404, 426}


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda operation: operation.label)
def test_what_is_answered_is_as_described(roomy: Server, operation: schemathesis.APIOperation) -> None:
    assert 200 in check(roomy, operation, GenerationMode.POSITIVE, with_something_to_say)


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda operation: operation.label)
def test_what_breaks_the_promise_is_refused(roomy: Server, operation: schemathesis.APIOperation) -> None:
    assert 400 in check(roomy, operation, GenerationMode.NEGATIVE, as_it_is)


TEXT = {"schema": {"type": "string"}}


@pytest.mark.parametrize(
    ("status", "content", "broken"),
    [
        ("200", {"application/json": TEXT}, "schema"),
        ("200", {"text/plain": TEXT}, "content"),
        ("404", {"application/json": {}}, "status"),
    ],
)
def test_a_broken_promise_is_found(roomy: Server, status: str, content: Any, broken: str) -> None:
    paths = {"/health": {"get": {"responses": {status: {"description": "", "content": content}}}}}
    (health,) = operations({**DESCRIPTION, "paths": paths})
    with pytest.raises(FailureGroup, match=f"(?i){broken}"):
        check(roomy, health, GenerationMode.POSITIVE, as_it_is)
