"""Answers that the client began: the prompt ends with its text, and the reply has what follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from mlxtp.text.conversation import tool_json
from mlxtp.text.tokenizer import Text

from .conftest import BYTE_FALLBACK, FakeBackend, Loaded, Server, says, serving
from .test_prompts_replay import ADD, CALL, TEMPLATE, Remembering, common, made, remembering

pytestmark = pytest.mark.slow

USER = {"role": "user", "content": "hi"}
ASKED = "<|user|>hi</s>\n<|assistant|>"


@pytest.fixture(scope="module")
def text_of_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Text]:
    return made(TEMPLATE, tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(text_of_model: tuple[Tokenizer, Text]) -> Iterator[Remembering]:
    with remembering(*text_of_model) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_what_was_given_before_what_follows(server: Remembering, stream: bool) -> None:
    for given, turns in (("hello", begun()), ("", [USER])):
        server.backend.say(*[" world</s>"] * 2)
        found = server.client.chat.completions.create(
            model="tiny", messages=turns, stream=stream, n=2, extra_body={"echo": True}
        )
        texts = ["", ""]
        for choice in (choice for part in (found if stream else [found]) for choice in part.choices):
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
        assert texts == [f"{given} world"] * 2


def post(server: Server, path: str, body: Mapping[str, Any]) -> httpx.Response:
    return server.ask("POST", path, {"model": "tiny"} | body)


def begun(content: object = "hello", **more: object) -> list[dict[str, object]]:
    return [USER, {"role": "assistant", "content": content, **more}]


CHAT, MESSAGES, OLLAMA, RESPONSES = "/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"
THOUGHT = begun("", reasoning_content="hm")
JSON = {"response_format": {"type": "json_object"}}
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 2000}}
USE = [{"type": "tool_use", "id": "c", "name": "add", "input": {}}]
CALLED = {"tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}]}


def at(body: Any, path: str) -> Any:
    """The part of an answer at a path such as `choices.0.text`."""
    for name in path.split("."):
        body = body[int(name) if name.isdigit() else name]
    return body


FLAGS = {"continue_final_message": True, "add_generation_prompt": False}
OUTPUT = [{"type": "output_text", "text": "hello"}]


@pytest.mark.parametrize(
    ("path", "body", "text", "tokens"),
    [
        (CHAT, {"messages": begun()} | FLAGS, "choices.0.message.content", "usage.completion_tokens"),
        # without flags, as Open WebUI's and llama.cpp's Continue, and with aider's field
        (CHAT, {"messages": begun(prefix=True)}, "choices.0.message.content", "usage.completion_tokens"),
        (RESPONSES, {"input": begun(OUTPUT)}, "output.0.content.0.text", "usage.output_tokens"),
        (MESSAGES, {"messages": begun(), "max_tokens": 50}, "content.0.text", "usage.output_tokens"),
        (OLLAMA, {"messages": begun(), "stream": False}, "message.content", "eval_count"),
    ],
)
def test_each_dialect_continues_the_last_message_and_shows_what_follows(
    server: Remembering, path: str, body: Mapping[str, Any], text: str, tokens: str
) -> None:
    server.backend.say(" wide world </s>")
    answer = post(server, path, body).json()
    assert (at(answer, text), at(answer, tokens)) == (" wide world ", len(server.ids(" wide world </s>")))
    assert server.backend.prompts() == [f"{ASKED}hello"]
    if path == MESSAGES:
        counted = post(server, f"{path}/count_tokens", body).json()
        assert counted["input_tokens"] == answer["usage"]["input_tokens"]


def test_a_stream_has_what_follows(server: Remembering) -> None:
    server.backend.say(" wide world </s>")
    messages: Any = begun()
    chunks = server.client.chat.completions.create(model="tiny", messages=messages, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" for chunk in chunks]) == " wide world "


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (CHAT, {"messages": [USER], "continue_final_message": True}, "last message is not the assistant's"),
        (CHAT, {"messages": [USER], "add_generation_prompt": False}, "last message is not the assistant's"),
        (CHAT, {"messages": begun()} | FLAGS | {"add_generation_prompt": True}, "are both true"),
        (CHAT, {"messages": begun(), "chat_template_kwargs": {"continue_final_message": 1}}, "true or false"),
        (CHAT, {"messages": begun("", **CALLED)}, "a call cannot be continued; send the calls' results"),
        (CHAT, {"messages": begun(CALL), "tools": [tool_json(ADD)]}, "has a whole call in its text"),
        (CHAT, {"messages": THOUGHT, "reasoning_effort": "none"}, "is not to think here"),
        (CHAT, {"messages": THOUGHT} | JSON, "is not to think here"),
        (CHAT, {"messages": THOUGHT, "reasoning_effort": "low"} | JSON, "it is a thought"),
        (CHAT, {"messages": begun("1, " * 4000)} | JSON, "tokens; at most 4096 can be held to a format"),
        (MESSAGES, {"messages": begun("hello \n"), "max_tokens": 9}, "cannot end with trailing whitespace"),
        (MESSAGES, {"messages": begun(), "max_tokens": 9} | THINKS, "must start with a thinking block"),
        (MESSAGES, {"messages": begun(USE), "max_tokens": 9}, "a call cannot be continued"),
        (OLLAMA, {"messages": begun("", **CALLED)}, "a call cannot be continued"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_a_400_that_says_why(
    server: Remembering, path: str, body: Mapping[str, Any], why: str
) -> None:
    answer = post(server, path, body)
    assert (answer.status_code, why in answer.text) == (400, True), answer.text
    assert not server.backend.requests


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": begun(), "continue_final_message": False}),
        (CHAT, {"messages": begun(), "add_generation_prompt": True}),
        (CHAT, {"messages": begun(), "chat_template_kwargs": {"add_generation_prompt": True}}),
        (RESPONSES, {"input": begun(status="completed", type="message")}),
    ],
)
def test_a_client_may_say_that_the_message_is_complete(
    server: Remembering, path: str, body: Mapping[str, Any]
) -> None:
    server.backend.say("bye</s>")
    assert post(server, path, body).status_code == 200
    assert server.backend.prompts() == [f"{ASKED}hello</s>\n<|assistant|>"]


@pytest.mark.parametrize("content", ["", None, []])
def test_an_empty_message_begins_no_answer(server: Remembering, content: object) -> None:
    server.backend.say("bye</s>")
    assert post(server, CHAT, {"messages": begun(content)}).status_code == 200
    assert server.backend.prompts() == [ASKED]


@pytest.mark.parametrize(
    ("given", "said", "prompt", "thought", "text"),
    [
        ({"content": "", "reasoning_content": "hm"}, " so</think>\n\nbye</s>", "<think>\nhm", " so", "bye"),
        ({"content": "<think>hm"}, " so</think>bye</s>", "<think>hm", " so", "bye"),
        ({"content": "he", "reasoning_content": "hm"}, "llo</s>", "<think>\nhm\n</think>\n\nhe", None, "llo"),
    ],
)
def test_thoughts_go_on_or_are_over(
    server: Remembering, given: dict[str, str], said: str, prompt: str, thought: str | None, text: str
) -> None:
    server.backend.say(said)
    answer = post(server, CHAT, {"messages": [USER, {"role": "assistant"} | given]}).json()
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thought, text)
    assert server.backend.prompts() == [f"{ASKED}{prompt}"]


def test_a_call_that_the_client_began_arrives_whole(server: Remembering) -> None:
    server.backend.say(f"{CALL[20:]}</s>")
    answer = post(server, CHAT, {"messages": begun(f"Let me see.\n{CALL[:20]}"), "tools": [tool_json(ADD)]})
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(("last", "more"), [("Let  me", ""), ("Let  me", "\n\n"), ("Let me  ", "")])
def test_a_continued_answer_and_the_turns_after_it_repeat_its_tokens(
    server: Remembering, last: str, more: str, thinks: bool
) -> None:
    server.backend.say(f"<think>hm,  a 日本</think> {last}", " see. </s>", "<think>so</think>bye</s>", "</s>")

    def told(number: int, begun: str = "", more: str = "") -> dict[str, Any]:
        """Return what the client then keeps of an answer, without thoughts unless it `thinks`."""
        message = answers[number].json()["choices"][0]["message"]
        message["content"] = begun + message["content"] + more
        kept = ("role", "content", "reasoning_content") if thinks else ("role", "content")
        return {name: message[name] for name in kept if name in message}

    answers = [post(server, CHAT, {"messages": [USER]})]
    first = told(0, more=more)
    answers.append(post(server, CHAT, {"messages": [USER, first]}))
    both = first | {"content": told(1, first["content"])["content"]}
    answers.append(post(server, CHAT, {"messages": [USER, both, USER]}))
    answers.append(post(server, CHAT, {"messages": [USER, both, USER, told(2), USER]}))
    prompts = server.backend.prompts()
    assert prompts[1] == f"{ASKED}<think>hm,  a 日本</think> {last}{more}"
    assert prompts[2] == f"{prompts[1]} see. </s>\n{ASKED}"
    for held, request in zip(server.backend.held, server.backend.requests[1:], strict=False):
        assert common(held, request.tokens) == len(held)  # nothing is computed twice


def test_a_kept_response_has_the_beginning_too(server: Remembering) -> None:
    server.backend.say("lo wide</s>", "bye</s>")
    first: Any = server.client.responses.create(model="tiny", input=begun("hel"))  # type: ignore[arg-type]
    server.client.responses.create(model="tiny", input="more", previous_response_id=first.id)
    assert server.backend.prompts()[1] == f"{ASKED}hello wide</s>\n<|user|>more</s>\n<|assistant|>"
    held, tokens = server.backend.held[0], server.backend.requests[1].tokens
    assert common(held, tokens) == len(held)


def test_text_with_less_white_space_than_the_answer_is_written_anew(server: Remembering) -> None:
    server.backend.say("<think>hm</think>yes</s>", "hello  ", "bye</s>")
    asked = [USER]
    for given in ("yes", "hello "):
        post(server, CHAT, {"messages": asked})
        asked = [*asked, {"role": "assistant", "content": given}, USER]
    post(server, CHAT, {"messages": asked[:-1]})
    assert server.backend.prompts()[2] == f"{ASKED}<think>hm</think>yes</s>\n{ASKED}hello "


def test_the_grammar_reads_the_beginning(server: Remembering) -> None:
    server.backend.say('"a": 1}</s>')
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    answer = post(server, CHAT, {"messages": begun("{"), "response_format": schema}).json()
    assert answer["choices"][0]["message"]["content"] == '"a": 1}'
    [request] = server.backend.requests
    assert request.shaping.grammar_begun == len(server.ids("{"))
    assert server.backend.loaded_text.decoded(request.tokens).endswith(f"{ASKED}{{")


def test_a_space_before_the_first_word_is_kept(loaded: dict[str, Loaded], tmp_path: Path) -> None:
    model = loaded[BYTE_FALLBACK]
    word = model.tokenizer.token_to_id("▁world")
    with serving(FakeBackend(model.text, says([word])), model.tokenizer) as server:
        answer = post(server, CHAT, {"messages": begun()}).json()
    assert answer["choices"][0]["message"]["content"] == " world"
