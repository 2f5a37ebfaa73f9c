"""Words for a prompt that does not fit, as agents look for them, and answers that are cut to what fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from .actor import Stage, stage

CONTEXT = 2000
LONG: Any = [{"role": "user", "content": "Why? " * CONTEXT}]
FAR_TOO_LONG: Any = [{"role": "user", "content": "Why? " * CONTEXT * 20}]
SHORT: Any = [{"role": "user", "content": 'DO say "hello"'}]


@pytest.fixture(scope="module")
def acting() -> Iterator[Stage]:
    with stage(context=CONTEXT) as found:
        yield found


def by_openai(found: Stage) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0)


def by_anthropic(found: Stage) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=found.url, api_key="none", max_retries=0)


@pytest.mark.parametrize("messages", [LONG, FAR_TOO_LONG], ids=["long", "far too long"])
def test_anthropic_says_that_the_prompt_is_too_long(acting: Stage, messages: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        by_anthropic(acting).messages.create(model="actor", messages=messages, max_tokens=100)
    message = raised.value.body["error"]["message"]  # type: ignore[index]
    found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
    assert found, message
    assert int(found[1]) > int(found[2]) == CONTEXT


@pytest.mark.parametrize("messages", [LONG, FAR_TOO_LONG], ids=["long", "far too long"])
def test_openai_says_that_the_maximum_context_length_is_passed(acting: Stage, messages: Any) -> None:
    library = by_openai(acting)
    asks: list[Callable[[], object]] = [
        lambda: library.chat.completions.create(model="actor", messages=messages),
        lambda: library.responses.create(model="actor", input=messages),
        lambda: library.completions.create(model="actor", prompt=messages[0]["content"]),
    ]
    for ask in asks:
        with pytest.raises(
            openai.BadRequestError, match=rf"maximum context length is {CONTEXT} tokens"
        ) as raised:
            ask()
        assert raised.value.code == "context_length_exceeded"


def test_ollama_refuses_in_tokens(acting: Stage) -> None:
    with pytest.raises(ollama.ResponseError, match="context") as raised:
        ollama.Client(acting.url).chat("actor", FAR_TOO_LONG)
    assert raised.value.status_code == 400
    assert "characters" not in raised.value.error


def test_more_tokens_than_fit_are_cut_and_a_short_answer_still_ends(acting: Stage) -> None:
    asked: Any = {"model": "actor", "messages": SHORT}
    for name in ("max_tokens", "max_completion_tokens"):
        choice = by_openai(acting).chat.completions.create(**asked | {name: 8192}).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("hello", "stop")
    answer = by_openai(acting).responses.create(model="actor", input=SHORT, max_output_tokens=8192)
    assert answer.output_text == "hello"
    told = by_anthropic(acting).messages.create(**asked, max_tokens=8192)
    assert (told.content[0].text, told.stop_reason) == ("hello", "end_turn")
    said = ollama.Client(acting.url).chat(**asked, options={"num_predict": 8192})
    assert said.message.content == "hello"
    assert (
        by_openai(acting).completions.create(model="actor", prompt="hello", max_tokens=8192).choices[0].text
    )
    assert all(len(seen.prompt) + seen.max_tokens <= CONTEXT for seen in acting.ledger)


def test_an_answer_that_is_cut_says_so(acting: Stage) -> None:
    prompt: Any = [{"role": "user", "content": f'DO say "{"a " * 500}"'}]
    choice = (
        by_openai(acting).chat.completions.create(model="actor", messages=prompt, max_tokens=8192).choices[0]
    )
    assert choice.finish_reason == "length"
