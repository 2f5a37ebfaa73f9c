"""Paths beside those that are served: answered as meant, or told what to write."""

from __future__ import annotations

import pytest

from .conftest import Server
from .dialects.shapes import read_answer
from .test_app_mutated_bodies import BODIES


@pytest.mark.parametrize("path", [each for each in BODIES if each.startswith("/v1/")])
def test_a_path_without_v1_is_answered_and_refused_as_with_it(roomy: Server, path: str) -> None:
    label, short = f"POST {path}", path.removeprefix("/v1")
    answer = roomy.ask("POST", short, BODIES[path][0])
    assert answer.status_code == 200
    refused = roomy.ask("POST", short, {})
    assert refused.status_code == 400
    for each in (answer, refused, roomy.ask("PATCH", short)):
        read_answer(label, each.status_code, each.content)


def test_models_are_listed_without_v1(server: Server) -> None:
    for path in ("/models", "/models/org/tiny"):
        for headers in ({}, {"anthropic-version": "2023-06-01"}):
            short, whole = (server.ask("GET", base + path, **headers) for base in ("", "/v1"))
            assert (short.status_code, short.json()) == (200, whole.json())
    unknown = server.ask("GET", "/models/none", **{"anthropic-version": "2023-06-01"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/v1/chat/completions", "the path is /v1/chat/completions"),
        ("/api/v1/chat/completions", "the path is /v1/chat/completions"),
        ("/openai/v1/responses/input_tokens", "the path is /v1/responses/input_tokens"),
        ("/openai/deployments/x/chat/completions", "the path is /chat/completions"),
        ("/v1/v1/messages", "the path is /v1/messages"),
        ("/v1/chat/completions/", "the path is /v1/chat/completions"),
        ("/v1/api/chat", "the path is /api/chat"),
        ("/api/api/tags", "the path is /api/tags"),
        ("/v1/health", "the path is /health"),
        ("/v1beta/models/gemini-2.5-pro:generateContent", "Gemini's API is not served here"),
        ("/api/v0/models", "LM Studio's own API is not served here"),
        ("/generate", "/v1/completions continues a prompt"),
        ("/generated", ""),
        ("/v1/none", ""),
        ("/" + "x/" * 2000, ""),
    ],
)
def test_what_is_not_there_is_told_as_it_was_meant(server: Server, path: str, words: str) -> None:
    refused = server.ask("POST", path, {})
    assert refused.status_code == 404
    error = refused.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"POST {path}: Not Found")
    assert (words in message) if words else message.endswith("Not Found")
    assert ("request_id" in refused.json()) == path.endswith("/messages")
    assert isinstance(error, str) == path.endswith(("/api/chat", "/api/tags"))


@pytest.mark.parametrize("name", ["default_model", "chat_model"])
def test_a_name_of_mlx_lm_s_server_is_the_default(roomy: Server, name: str) -> None:
    for path in ("/v1/chat/completions", "/api/chat"):
        answer = roomy.ask("POST", path, BODIES[path][0] | {"model": name, "stream": False})
        assert answer.status_code == 200
    assert {each.model for each in roomy.backend.whose} == {"org/tiny"}
