"""A request may name a model that is on the disk while another one is loaded: what is asked is asked of that
model, not of the one that happens to be there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from mlxtp.api.backend import AT_ONCE, ModelLease, StoredModelInfo
from mlxtp.text.conversation import ChatMessage as Said
from mlxtp.text.conversation import Conversation
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text

from ..reference import conversation_ids
from .conftest import BYTE_FALLBACK, VOCABULARY, WAIT_S, Loaded, Server, byte_level, meanwhile, save, says
from .dialects.ollama_shapes import OllamaShown
from .test_generation_loading import BROKEN, Turns, turns

pytestmark = pytest.mark.slow

__all__ = ["turns"]

HELLO = [{"role": "user", "content": "hello wide world"}]
NAME = "org/stored"


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=WAIT_S, trust_env=False)


def swap(server: Server, text: Text | None = None, vocabulary: int = VOCABULARY) -> None:
    """With the turn of the next request, another model is there."""

    def take(_name: str | None, _within_s: float) -> ModelLease:
        backend = server.backend
        backend.loaded_text, backend.vocabulary, backend.ready = text or backend.loaded_text, vocabulary, True
        return AT_ONCE

    server.backend.take_turn = take


@pytest.fixture
def plain(server: Server) -> Iterator[Server]:
    """With a loaded model that neither thinks nor calls; the text of it is put back."""
    text = server.backend.loaded_text
    yield server
    server.backend.loaded_text = text


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that thinks and calls tools."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<think>", "</think>"])
    template = (
        "{# <tool_call> #}{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    )
    folder = save(tokenizer, tmp_path_factory.mktemp("thinker"), template)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64}))
    settings = {"do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("ready", [True, False])
def test_a_prompt_is_counted_with_the_tokenizer_of_the_model_that_is_named(
    server: Server, loaded: dict[str, Loaded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    stored = loaded[BYTE_FALLBACK]
    folder = shutil.copytree(stored.folder, tmp_path / "stored")
    server.backend.stored = (StoredModelInfo(NAME, folder, 4096, 1),)
    server.backend.ready = ready
    right = len(conversation_ids(stored.text, Conversation((Said("user", "hello wide world"),))))
    read: list[Path] = []
    load = Text.load
    monkeypatch.setattr(Text, "load", lambda path: read.append(path) or load(path))
    for _ in range(2):
        claude = post(server, "/v1/messages/count_tokens", model=NAME, messages=HELLO)
        assert claude.json() == {"input_tokens": right}
        openai = post(server, "/v1/responses/input_tokens", model=NAME, input=HELLO[0]["content"])
        assert openai.json()["input_tokens"] == right
    assert read == [folder], "it is read once"


def test_a_stored_model_that_cannot_be_read_is_named_in_the_refusal(server: Server, tmp_path: Path) -> None:
    server.backend.stored = (StoredModelInfo(NAME, tmp_path, 4096, 1),)
    for path, more in (("/v1/messages/count_tokens", {"messages": HELLO}), ("/api/show", {})):
        refused = post(server, path, model=NAME, **more)
        assert refused.status_code == 400, refused.text
        assert f"{NAME} cannot be read" in refused.text


@pytest.mark.parametrize("ready", [True, False])
def test_a_stored_model_is_shown_from_its_folder(server: Server, thinker: Path, ready: bool) -> None:
    server.backend.stored = (StoredModelInfo(NAME, thinker, 4096, 1_700_000_000),)
    server.backend.ready = ready
    shown = OllamaShown.model_validate_json(post(server, "/api/show", model=f"{NAME}:latest").content)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.parameters.split() == ["num_ctx", "4096", "temperature", "0.6"]
    assert shown.model_info["general.basename"] == NAME
    assert shown.model_info["qwen3.context_length"] == 4096


def test_no_prompt_loads_the_model_and_waits_for_it(server: Server, turns: Turns) -> None:
    turns.model = "org/tiny"
    with meanwhile(lambda: post(server, "/api/generate", model="org/tiny:latest").json()) as answers:
        turn = turns.wait()
        assert turns.taken == [("org/tiny", 0.0)]
        assert not answers
        turn.tell("")
    assert [(each["model"], each["done_reason"]) for each in answers] == [("org/tiny:latest", "load")]
    assert turn.closed.wait(WAIT_S)
    assert server.backend.requests == []


def test_no_prompt_hears_why_the_model_cannot_be_loaded(server: Server, turns: Turns) -> None:
    with meanwhile(lambda: turns.wait().tell(BROKEN)):
        refused = post(server, "/api/chat", model=NAME)
    assert (refused.status_code, refused.json()) == (400, {"error": BROKEN.detail})
    assert turns.turns[0].closed.wait(WAIT_S)


def test_what_is_not_loaded_need_not_be_unloaded(server: Server, turns: Turns, thinker: Path) -> None:
    server.backend.stored = (StoredModelInfo(NAME, thinker, 4096, 1),)
    client = ollama.Client(host=server.url, timeout=WAIT_S, trust_env=False)
    assert client.generate(model=NAME, keep_alive=0).done_reason == "unload"
    assert turns.taken == []


@pytest.mark.parametrize("stream", [True, False])
def test_who_can_think_is_asked_of_the_model_whose_turn_has_come(
    plain: Server, thinker: Path, stream: bool
) -> None:
    before = plain.backend.loaded_text
    plain.backend.script = says([1])
    swap(plain, Text(LocalRenderer.load(thinker)))
    asked = {"model": "tiny", "messages": HELLO, "think": True, "stream": stream}
    assert post(plain, "/api/chat", **asked).status_code == 200
    swap(plain, before)
    refused = post(plain, "/api/chat", **asked)
    assert (refused.status_code, refused.json()["error"]) == (
        400, 'think: "org/tiny" does not support thinking; leave it out',
    )  # fmt: skip


def test_tokens_are_those_of_the_model_whose_turn_has_come(plain: Server) -> None:
    plain.backend.script = says([1])
    swap(plain, vocabulary=VOCABULARY + 1)
    assert post(plain, "/v1/completions", model="tiny", prompt=[VOCABULARY]).status_code == 200
    plain.backend.ready = False
    swap(plain)
    for prompt, where in (([3, VOCABULARY], "prompt[1]"), ([[3], [3, VOCABULARY]], "prompt[1][1]")):
        error = post(plain, "/v1/completions", model="tiny", prompt=prompt).json()["error"]
        expected = f"{where}: expected a token id from 0 to {VOCABULARY - 1}, got {VOCABULARY}"
        assert (error["param"], error["message"], error["code"]) == (where, expected, "invalid_request")


def test_what_is_neither_loaded_nor_stored_is_not_found_though_nothing_is_loaded(
    server: Server, tmp_path: Path
) -> None:
    stored = (StoredModelInfo(NAME, tmp_path, 4096, 1),)
    bodies = {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/messages": {"messages": HELLO, "max_tokens": 3},
        "/api/chat": {"messages": HELLO},
        "/v1/messages/count_tokens": {"messages": HELLO},
    }
    for ready, known in ((True, f"org/tiny, {NAME}"), (False, NAME)):
        server.backend.ready, server.backend.unready, server.backend.stored = ready, "idle", stored
        url = f"{server.url}/v1/models/org/none"
        answers = [post(server, path, model="org/none", **body) for path, body in bodies.items()]
        for refused in (*answers, httpx.get(url, timeout=WAIT_S, trust_env=False)):
            assert refused.status_code == 404, refused.text
            assert json.dumps(f" does not exist here; available: {known}")[1:] in refused.text
    assert post(server, "/v1/chat/completions", model="default", messages=HELLO).status_code == 503
    server.backend.stored = ()
    assert post(server, "/v1/chat/completions", model="org/none", messages=HELLO).status_code == 503
