"""What Ollama's integration, route and middleware tests, written in Go, ask of a server, in own words."""

from __future__ import annotations

import json
from typing import Any

import ollama
import pytest
import requests

SAYS = {"model": "tiny", "messages": [{"role": "user", "content": "Repeat exactly: SKY"}]}
ASKS = {"model": "tiny", "prompt": "Repeat exactly: SKY"}
PLACE = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": PLACE}}
WEATHER = [{"role": "user", "content": "Call get_weather with location set to San Francisco."}]
CALLED = {"function": {"name": "get_weather", "arguments": {"location": "SF"}}}


def post(url: str, path: str, body: Any, **headers: str) -> requests.Response:
    given = {"data": body} if isinstance(body, str | bytes) else {"json": body}
    return requests.post(f"{url}{path}", headers=headers, timeout=60, **given)


def lines(url: str, path: str, body: Any) -> list[Any]:
    answer = post(url, path, body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


BOTH = pytest.mark.parametrize(("path", "body"), [("/api/chat", SAYS), ("/api/generate", ASKS)])
LAST = (
    "model created_at done done_reason total_duration load_duration prompt_eval_duration eval_duration "
    "eval_count prompt_eval_count"
)


@pytest.mark.parametrize("stream", [True, False])
@BOTH
def test_the_last_line(url: str, path: str, body: Any, stream: bool) -> None:
    last = lines(url, path, body | {"stream": stream, "options": {"temperature": 0, "seed": 5}})[-1]
    assert [field for field in LAST.split() if not last[field]] == []


@BOTH
def test_a_stream_is_the_whole_answer(url: str, path: str, body: Any) -> None:
    parts = lines(url, path, body)
    assert "".join(part.get("response", part.get("message", {}).get("content")) for part in parts) == "SKY"
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_context_comes_back(url: str) -> None:
    assert lines(url, "/api/generate", ASKS)[-1]["context"]


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps"])
def test_a_model_in_a_list(url: str, path: str) -> None:
    model = requests.get(f"{url}{path}", timeout=60).json()["models"][0]
    assert all(model[field] for field in ("name", "model", "size", "digest", "details"))
    assert {"format", "family", "parameter_size", "quantization_level"} <= model["details"].keys()


@pytest.mark.parametrize("name", ["name", "model"])
def test_a_model_is_shown(url: str, name: str) -> None:
    found = post(url, "/api/show", {name: "tiny"}).json()
    fields = "details model_info capabilities template modified_at parameters"
    assert [field for field in fields.split() if not found[field]] == []


@pytest.mark.parametrize(("path", "body", "status"), [
    ("/api/chat", {"model": ""} , 400), ("/api/generate", "", 400), ("/api/chat", "{", 400),
    ("/api/chat", SAYS | {"model": "absent"}, 404), ("/api/generate", ASKS | {"model": "absent"}, 404),
    ("/api/show", {"model": "absent"}, 404), ("/api/chat", SAYS | {"format": "no"}, 400),
    ("/api/chat", SAYS | {"think": True}, 400), ("/api/generate", ASKS | {"think": True}, 400),
    ("/api/generate", ASKS | {"suffix": "x"}, 400),
    ("/api/generate", ASKS | {"raw": True, "template": "x"}, 400),
    ("/api/chat", SAYS | {"top_logprobs": 21, "logprobs": True}, 400),
    ("/api/chat", SAYS | {"options": {"temperature": "hot"}}, 400),
])  # fmt: skip
def test_refusals(url: str, path: str, body: Any, status: int) -> None:
    answer = post(url, path, body)
    assert (answer.status_code, type(answer.json()["error"])) == (status, str)
    assert status != 404 or "not found" in answer.json()["error"]


@pytest.mark.parametrize(("path", "body", "reason"), [
    ("/api/chat", {"model": "tiny"}, "load"), ("/api/generate", {"model": "tiny"}, "load"),
    ("/api/generate", ASKS | {"raw": True, "options": {"num_predict": 1}}, "length"),
    ("/api/generate", ASKS | {"system": "You are kind."}, "stop"),
    *(("/api/chat", SAYS | {"options": options}, reason) for options, reason in (
        ({"num_predict": 1}, "length"), ({"stop": ["K"]}, "stop"), ({"num_predict": -1}, "stop"),
        ({"num_ctx": 2048, "num_keep": 5, "repeat_last_n": 64}, "stop"))),
    *(("/api/chat", SAYS | fields, "stop") for fields in (
        {"keep_alive": "5m"}, {"model": "tiny:latest"}, {"think": False})),
])  # fmt: skip
def test_reasons(url: str, path: str, body: Any, reason: str) -> None:
    assert lines(url, path, body | {"stream": False})[-1]["done_reason"] == reason


@pytest.mark.parametrize(("format_", "fields"), [("json", set()), (PLACE, {"location"})])
@pytest.mark.parametrize("stream", [True, False])
def test_json(url: str, format_: Any, fields: set[str], stream: bool) -> None:
    parts = lines(url, "/api/chat", SAYS | {"format": format_, "stream": stream})
    found = json.loads("".join(part["message"]["content"] for part in parts))
    assert fields <= found.keys()


@pytest.mark.parametrize("stream", [True, False])
def test_a_tool_is_called(url: str, stream: bool) -> None:
    parts = lines(url, "/api/chat", SAYS | {"messages": WEATHER, "tools": [TOOL], "stream": stream})
    [call] = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert call["function"]["name"] == "get_weather"
    assert set(call["function"]["arguments"]) == {"location"}


def test_the_result_of_a_tool_is_read(url: str) -> None:
    call = {"role": "assistant", "tool_calls": [CALLED]}
    history = [*WEATHER, call, {"role": "tool", "tool_name": "get_weather", "content": "98 degrees"}]
    [answer] = lines(url, "/api/chat", SAYS | {"messages": history, "tools": [TOOL], "stream": False})
    assert "98" in answer["message"]["content"]


def test_the_last_answer_is_continued(url: str) -> None:
    asked = {"role": "user", "content": "Repeat exactly: FALCON-SKY"}
    history = [asked, {"role": "assistant", "content": "FALCON-"}]
    [answer] = lines(url, "/api/chat", SAYS | {"messages": history, "stream": False})
    assert answer["message"]["content"] == "SKY"


@BOTH
def test_scores(url: str, path: str, body: Any) -> None:
    scored = lines(url, path, body | {"logprobs": True, "top_logprobs": 3, "stream": False})[-1]["logprobs"]
    assert scored
    assert all(len(each["top_logprobs"]) == 3 for each in scored)


@pytest.mark.parametrize(("path", "body"), [("/api/embed", {"model": "tiny", "input": "a"}),
                                            ("/api/embed", {"model": "tiny", "input": ["a", "b"]}),
                                            ("/api/embeddings", {"model": "tiny", "prompt": "a"}),
                                            ("/v1/embeddings", {"model": "tiny", "input": "a"})])  # fmt: skip
def test_embeddings(url: str, path: str, body: Any) -> None:
    answer = post(url, path, body).json()
    assert answer.get("embeddings") or answer.get("embedding") or answer["data"][0]["embedding"]


@pytest.mark.parametrize("method", ["get", "head"])
def test_it_says_that_it_runs(url: str, method: str) -> None:
    answer = requests.request(method, f"{url}/", timeout=60)
    assert answer.status_code == 200
    assert method == "head" or answer.text == "Ollama is running"


def test_version(url: str) -> None:
    assert requests.get(f"{url}/api/version", timeout=60).json()["version"]


LOCAL = ("http://localhost", "http://localhost:3000", "https://127.0.0.1:8080", "app://obsidian.md", "tauri://localhost",
         "vscode-webview://x", "file://x")  # fmt: skip


@pytest.mark.parametrize("origin", LOCAL)
def test_own_apps_come_in(url: str, origin: str) -> None:
    assert post(url, "/api/show", {"model": "tiny"}, Origin=origin).status_code == 200


def test_other_pages_do_not(url: str) -> None:
    assert post(url, "/api/show", {"model": "tiny"}, Origin="http://evil.example").status_code == 403


def test_the_library(url: str) -> None:
    client = ollama.Client(host=url)
    assert client.chat(**SAYS).message.content == "SKY"  # type: ignore[call-overload]
    assert client.list().models[0].model
    assert client.ps().models
