"""`/tokenize`, `/detokenize` and `/apply-template` in the shapes of vLLM and llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxtp.api.backend import StoredModelInfo
from mlxtp.text.conversation import ChatMessage, Conversation

from ...reference import conversation_ids
from ..conftest import BYTE_LEVEL, CONTEXT, Loaded, Server

CHAT = "/v1/chat/completions"
HALF = "hello 😀"
HELLO = [{"role": "user", "content": "hello"}]
WRITTEN = "<s><|user|>hello"


def post(server: Server, path: str, body: Any) -> Any:
    answer = server.ask("POST", path, body)
    found = answer.json()
    return found if answer.status_code == 200 else (answer.status_code, found["error"]["message"])


def test_a_text_in_vllm_s_shape(server: Server) -> None:
    tokens, bos = server.ids("hello world"), server.tokenizer.token_to_id("<s>")
    for more, expected in (({}, [bos, *tokens]), ({"add_special_tokens": False}, tokens)):
        found = post(server, "/tokenize", {"prompt": "hello world", "model": "tiny"} | more)
        own = {"count": len(expected), "tokens": expected}
        assert found == own | {"max_model_len": CONTEXT, "token_strs": None}
    found = post(server, "/tokenize", {"prompt": "hello world", "return_token_strs": True})
    assert "".join(found["token_strs"]) == "<s>hello world"
    assert post(server, "/tokenize", {"prompt": "", "add_special_tokens": False})["tokens"] == []


def test_a_chat_has_the_tokens_of_its_prompt(server: Server) -> None:
    asked = Conversation((ChatMessage("user", "hello"),))
    expected = list(conversation_ids(server.backend.loaded_text, asked))
    bos, end = server.tokenizer.token_to_id("<s>"), server.tokenizer.token_to_id("<|assistant|>")
    assert expected[-1] == end
    for more, tokens in (
        ({}, expected),
        ({"add_special_tokens": True}, [bos, *expected]),
        ({"add_generation_prompt": False}, expected[:-1]),
    ):
        assert post(server, "/tokenize", {"messages": HELLO} | more)["tokens"] == tokens
    post(server, CHAT, {"messages": HELLO})
    assert list(server.backend.request.tokens) == expected
    assert post(server, "/v1/tokenize", {"messages": HELLO})["tokens"] == expected
    assert post(server, f"{CHAT}/input_tokens", {"messages": HELLO})["input_tokens"] == len(expected)


def test_a_text_in_llama_cpp_s_shape(server: Server) -> None:
    tokens, bos = server.ids(HALF), server.tokenizer.token_to_id("<s>")
    assert post(server, "/tokenize", {"content": HALF}) == {"tokens": tokens}
    assert post(server, "/tokenize", {"content": HALF, "add_special": True})["tokens"] == [bos, *tokens]
    pieces = post(server, "/tokenize", {"content": HALF, "with_pieces": True})["tokens"]
    assert [each["id"] for each in pieces] == tokens
    said = [each["piece"] for each in pieces]
    whole = b"".join([bytes(each) if isinstance(each, list) else each.encode() for each in said])
    assert whole.decode() == HALF
    assert any(isinstance(each, list) for each in said), "half a character is bytes"


def test_tokens_become_text_again(server: Server) -> None:
    for text in (HALF, "", "<s>hello"):
        found = post(server, "/detokenize", {"tokens": server.ids(text), "model": "default"})
        assert found == {"prompt": text, "content": text}
    size = server.tokenizer.get_vocab_size()
    words = f"tokens[1]: expected a token id of this model's tokenizer, got {size}"
    assert post(server, "/detokenize", {"tokens": [0, size]}) == (400, words)
    assert post(server, "/detokenize", {"tokens": [-1]})[0] == 400


def test_a_chat_as_its_template_writes_it(server: Server) -> None:
    for more, end in (({}, "<|assistant|>"), ({"add_generation_prompt": False}, "")):
        assert post(server, "/apply-template", {"messages": HELLO} | more) == {"prompt": WRITTEN + end}
    mood = {"chat_template_kwargs": {"mood": "x"}}
    status, words = post(server, "/apply-template", {"messages": HELLO} | mood)
    assert (status, "no mood is known" in words) == (400, True)


def test_the_settings_of_a_tokenizer(server: Server, tmp_path: Path) -> None:
    told = {"eos_token": {"content": "</s>", "lstrip": False}, "model_max_length": 9, "mark": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": "old"}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    bare = tmp_path / "bare"
    server.backend.stored = (StoredModelInfo("org/one", tmp_path, 77, 0), StoredModelInfo("two", bare, 77, 0))

    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert server.ask("GET", "/tokenizer_info?model=org/one").json() == kind | {
        "eos_token": "</s>", "model_max_length": 9, "mark": {}, "chat_template": "{{ messages }}",
    }  # fmt: skip
    assert server.ask("GET", "/tokenizer_info?model=two").json() == kind | {"model_max_length": 77}
    assert server.ask("GET", "/tokenizer_info").json()["model_max_length"] > 0
    assert server.ask("GET", "/tokenizer_info?model=absent").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "send one of prompt, messages and content; there are none"),
        ("/tokenize", {"prompt": "x", "content": "x"}, "there are prompt and content"),
        ("/tokenize", {"content": "x", "parse_special": False}, "parse_special false is not supported"),
        ("/tokenize", {"messages": []}, "messages is empty"),
        ("/tokenize", {"prompt": ["x"]}, 'prompt should be a valid string, got ["x"]'),
        ("/detokenize", {}, "tokens is missing"),
        ("/apply-template", {}, "messages is missing"),
    ],
)
def test_what_is_wrong_is_told(server: Server, path: str, body: Any, words: str) -> None:
    status, told = post(server, path, body)
    assert (status, words in told) == (400, True), told


def test_a_model_that_is_not_loaded_is_read_from_disk(server: Server, loaded: dict[str, Loaded]) -> None:
    server.backend.stored = (StoredModelInfo("org/stored", Path(loaded[BYTE_LEVEL].folder), 77, 0),)
    body = {"model": "org/stored"}
    found = post(server, "/tokenize", body | {"prompt": "hello"})
    assert (found["count"], found["max_model_len"]) == (1 + len(server.ids("hello")), 77)
    assert post(server, "/detokenize", body | {"tokens": server.ids("hello")})["content"] == "hello"
