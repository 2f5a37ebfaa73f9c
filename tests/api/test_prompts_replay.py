"""Answers that clients send back: the next prompt repeats the tokens of the answer, and never anything else.

The clients are the real libraries. The backend plays answers and, as a rank does, keeps the KV caches of all
prompts and answers but their last tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import httpx
import ollama
import pytest
from tokenizers import AddedToken, Tokenizer

from mlxtp.api.backend import ModelInfo
from mlxtp.text.conversation import StreamEnd, Tool, tool_json
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.replay import Beginning, CompleteAnswer, to_remember
from mlxtp.text.tokenizer import Text
from mlxtp.text.transcript import AnswerEvent, CallArguments, CallBegan, ContentDelta, Finish, WholeAnswer
from mlxtp.wire.messages import Generate

from .conftest import WAIT_S, FakeAnswer, FakeBackend, Server, byte_level, save, says, serving
from .test_server_access import door

pytestmark = pytest.mark.slow

# As Qwen3 does, it leaves thoughts out before the last message of the user, and writes JSON in its own way.
TEMPLATE = (
    "{% set last = namespace(at=-1) %}{% for m in messages if m.role == 'user' %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|system|># <tool_call> tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}</s>\n"
    "{% endif %}{% if reasoning_effort is defined %}<|system|>{{ reasoning_effort }}</s>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{% if m.reasoning_content and loop.index0 > last.at %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}</s>\n{% elif m.role == 'tool' %}<|user|><tool_response>\n{{ m.content }}\n</tool_response>"
    "</s>\n{% else %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
NUMBER = {"type": "number"}
ADD = Tool("add", "Adds", {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a"]})
# None of the three is written as the template would write it.
ANSWERS = (
    '<think>hm,  a 日本\n\nsum</think>  Let me  see.<tool_call>{"name":"add","arguments":{"b":2.0,  "a":1}} '
    "</tool_call></s>",
    "<think>\n3 then </think>It is 3. \n</s>",
    "<think>so</think>\n\n\nbye</s>",
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Keeping(FakeBackend):
    """A backend with a prefix cache, of one rank that never forgets, and what its model will say."""

    folder = Path("model")

    def __init__(self, tokenizer: Tokenizer, text: Text, *said: str, eos: tuple[int, ...] = (1,)) -> None:
        super().__init__(text, context=20_000, vocabulary=1000)
        self.tokenizer, self.eos = tokenizer, eos
        self.held: list[tuple[int, ...]] = []
        self.spoken: list[list[int]] = []
        self.say(*said)

    def say(self, *texts: str) -> None:
        self.spoken += [self.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    def models(self) -> tuple[ModelInfo, ...]:
        return tuple(replace(model, path=self.folder, eos=self.eos) for model in super().models())

    def generate(self, request: Generate, **whose: Any) -> FakeAnswer:
        cached = max([common(each, request.tokens[:-1]) for each in self.held], default=0)
        tokens = self.spoken.pop(0)
        reason = "length" if len(tokens) > request.max_tokens else "stop"
        tokens = tokens[: request.max_tokens]
        self.script = says(tokens, reason, cached=cached)
        self.held.append((*request.tokens, *tokens[:-1]))
        answer = super().generate(request, **whose)
        answer.cached = cached
        return answer

    def prompts(self) -> list[str]:
        return [self.loaded_text.decoded(request.tokens) for request in self.requests]

    def knows(self, number: int) -> bool:
        """Whether this prompt goes on from the whole of the first answer."""
        return common(self.held[0], self.requests[number].tokens) == len(self.held[0])


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@pytest.fixture(scope="module")
def text_of_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Text]:
    return made(TEMPLATE, tmp_path_factory.mktemp("model"))


def made(template: str, folder: Path, specials: tuple[str, ...] = ()) -> tuple[Tokenizer, Text]:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in MARKERS])
    return tokenizer, Text(LocalRenderer.load(save(tokenizer, folder, template)))


@dataclass
class Remembering(Server):
    backend: Keeping


@contextmanager
def remembering(tokenizer: Tokenizer, text: Text, *said: str, **more: Any) -> Iterator[Remembering]:
    """A server that remembers nothing yet."""
    backend = Keeping(tokenizer, text, *said, **more)
    with serving(backend, tokenizer) as found:
        yield Remembering(backend, found.port, tokenizer)


@pytest.fixture
def server(text_of_model: tuple[Tokenizer, Text]) -> Iterator[Remembering]:
    with remembering(*text_of_model) as found:
        yield found


Turn = Callable[[Server, list[Any], bool], tuple[list[Any], int | None]]
"""Ask with these messages; return what the client then sends back, and its cached tokens."""


def chat(server: Server, messages: list[Any], stream: bool) -> tuple[list[Any], int | None]:
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "tools": [tool_json(ADD)]}
    if stream:
        asked |= {"stream_options": {"include_usage": True}}
        with server.client.chat.completions.stream(**asked) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = server.client.chat.completions.create(**asked)
    told = answer.choices[0].message.model_dump(exclude_none=True)
    for call in told.get("tool_calls", []):
        call["function"].pop("parsed_arguments", None)
    return [told], answer.usage.prompt_tokens_details.cached_tokens


def forgetful_chat(server: Server, messages: list[Any], stream: bool) -> tuple[list[Any], int | None]:
    """As programs do that know no thoughts, number calls anew and write JSON again."""
    [told], cached = chat(server, messages, stream)
    told.pop("reasoning_content", None)
    told["content"] = [{"type": "text", "text": told["content"].strip()}] if told.get("content") else None
    for call in told.get("tool_calls", []):
        call["id"] = "call_1"
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(sorted(arguments.items())), indent=1).replace(
            "2.0", "2"
        )
    return [told], cached


def responses(server: Server, messages: list[Any], stream: bool) -> tuple[list[Any], int | None]:
    tool: Any = {"type": "function", "name": "add", "description": "Adds", "parameters": ADD.parameters}
    asked: dict[str, Any] = {"model": "tiny", "input": messages, "tools": [tool], "store": False}
    if stream:
        with server.client.responses.stream(**asked) as events:
            answer: Any = events.get_final_response()
    else:
        answer = server.client.responses.create(**asked)
    told = [item.model_dump(exclude_none=True) for item in answer.output]
    for item in told:
        item.pop("parsed_arguments", None)
    return told, answer.usage.input_tokens_details.cached_tokens


def messages(server: Server, messages: list[Any], stream: bool) -> tuple[list[Any], int | None]:
    tool: Any = {"name": "add", "description": "Adds", "input_schema": ADD.parameters}
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "tools": [tool], "max_tokens": 500}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=WAIT_S) as client:
        if stream:
            with client.messages.stream(**asked) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**asked)
    content = [block.to_dict() for block in answer.content]
    return [{"role": "assistant", "content": content}], answer.usage.cache_read_input_tokens


def by_ollama(server: Server, messages: list[Any], stream: bool) -> tuple[list[Any], int | None]:
    """Ollama's calls have objects, and most clients leave their ids out. Its dialect counts no cache."""
    client = ollama.Client(host=server.url, timeout=WAIT_S, trust_env=False)
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "tools": [tool_json(ADD)]}
    parts = list(client.chat(stream=True, **asked)) if stream else [client.chat(**asked)]
    told: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(part.message.content or "" for part in parts),
        "thinking": "".join(part.message.thinking or "" for part in parts),
        "tool_calls": [call.model_dump() for part in parts for call in part.message.tool_calls or ()],
    }
    return [told], None


def result_for(turn: Turn, told: list[Any], text: str) -> Any:
    """Return what the client's user sends as the result of the call."""
    if turn is responses:
        return {"type": "function_call_output", "call_id": told[-1]["call_id"], "output": text}
    if turn is messages:
        block = {"type": "tool_result", "tool_use_id": told[0]["content"][-1]["id"], "content": text}
        return {"role": "user", "content": [block]}
    if turn is by_ollama:
        return {"role": "tool", "tool_name": "add", "content": text}
    return {"role": "tool", "tool_call_id": told[0]["tool_calls"][0]["id"], "content": text}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("turn", [chat, forgetful_chat, responses, messages, by_ollama])
def test_three_turns_with_tools_and_thoughts_are_computed_once(
    server: Remembering, turn: Turn, stream: bool
) -> None:
    server.backend.say(*ANSWERS)
    sent: list[Any] = [{"role": "user", "content": "What is 1 + 2?"}]
    counted = []
    for new in ("3", "Thanks.", None):
        told, cached = turn(server, sent, stream)
        counted.append(cached)
        sent += told
        sent.append(result_for(turn, told, new) if new == "3" else {"role": "user", "content": new})
    first, second, third = server.backend.prompts()
    assert second == f"{first}{ANSWERS[0]}\n{RESULT}<|assistant|>"
    assert third == f"{second}{ANSWERS[1]}\n<|user|>Thanks.</s>\n<|assistant|>"
    known = [len(held) for held in server.backend.held]
    if turn is not by_ollama:
        assert counted == [0, *known[:2]]


def ask(server: Server, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "tools": [tool_json(ADD)]} | fields
    url = f"{server.url}/v1/chat/completions"
    response = httpx.post(url, json=body, timeout=WAIT_S, trust_env=False)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def second_prompt(server: Remembering, answer: str, **fields: Any) -> tuple[str, str, dict[str, Any]]:
    """Return the first prompt and the one after it, whose client sends everything back, and its usage."""
    server.backend.say(answer, "ok</s>")
    question = {"role": "user", "content": "hello"}
    told = ask(server, [question], **fields)["choices"][0]["message"]
    calls = told.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
    new = results or [{"role": "user", "content": "more"}]
    usage = ask(server, [question, told, *new], **fields)["usage"]
    first, second = server.backend.prompts()
    return first, second, usage


MORE = "</s>\n<|user|>more</s>\n<|assistant|>"
RESULT = "<|user|><tool_response>\n3\n</tool_response></s>\n"


def test_an_answer_that_a_stop_string_cut(server: Remembering) -> None:
    first, second, usage = second_prompt(server, "<think>a</think>Well,  1 2 3 STOP 4</s>", stop=["STOP"])
    assert second == f"{first}<think>a</think>Well,  1 2 3 {MORE}"
    kept = len(server.backend.held[0])
    assert kept - 8 <= usage["prompt_tokens_details"]["cached_tokens"] <= kept


def remembered(said: Callable[[Sequence[int]], str], tokens: tuple[int, ...], *events: AnswerEvent) -> Any:
    """What is remembered of an answer of these tokens, whose text is `said`."""
    text, record = cast(Text, SimpleNamespace(decoded=said)), WholeAnswer()
    for event in events[:-1]:
        record.see(event)
    whole = CompleteAnswer((3,), tokens, record, cast(Finish, events[-1]))
    found = to_remember(text, (), Beginning(1, 1, b"", ()), whole)
    assert found is not None
    return found[1]


def test_the_answer_ends_where_the_first_of_two_stop_strings_begins() -> None:
    words = ("one ", "#", "##", "question")
    finish = Finish(0, "stop", StreamEnd("stop", 3), "##")
    told = remembered(
        lambda ids: "".join(words[each] for each in ids), (0, 1, 2), ContentDelta(0, "one "), finish
    )
    assert ("".join(words[each] for each in told.tokens), told.text) == ("questionone ", "")


def test_a_call_whose_arguments_are_not_seen_in_the_tokens_is_not_taken_for_one_that_ends_there() -> None:
    call = CallBegan(0, 0, "id", "add"), CallArguments(0, 0, '{"a": 1}')
    finish = Finish(0, "tool_calls", StreamEnd("stop", 1))
    assert remembered(lambda ids: "add(1)" * len(ids), (4,), *call, finish).behind is None


def test_an_answer_that_is_as_long_as_it_may_be(server: Remembering) -> None:
    first, second, _ = second_prompt(server, "<think>a</think>Well,  one two three", max_tokens=12)
    said = server.backend.loaded_text.decoded(server.ids("<think>a</think>Well,  one two three")[:12])
    assert second == f"{first}{said}{MORE}"


def test_an_answer_that_ends_in_a_thought_is_no_answer(server: Remembering) -> None:
    _, second, _ = second_prompt(server, "<think>hm hm hm hm", max_tokens=5)
    assert "hm" not in second


def test_an_answer_that_ends_in_the_middle_of_a_character(server: Remembering) -> None:
    first, second, _ = second_prompt(server, "well 🜁", max_tokens=len(server.ids("well 🜁")) - 1)
    assert second == f"{first}well {MORE}"


def test_text_on_both_sides_of_a_call_is_not_written_twice(server: Remembering) -> None:
    _, second, _ = second_prompt(server, f"before {CALL} after</s>")
    assert second.count("after") == 1


def test_several_calls(server: Remembering) -> None:
    answer = f"{CALL}{CALL.replace('1', '2')}</s>"
    first, second, _ = second_prompt(server, answer)
    assert second == f"{first}{answer}\n{RESULT}{RESULT}<|assistant|>"


@pytest.mark.parametrize("rest", ["}", "}\n</tool_call>", "}\n</tool_call>" + CALL + "</s>"])
def test_an_answer_with_the_one_call_that_it_may_have(server: Remembering, rest: str) -> None:
    """The answer ends with the arguments; the template's text after them follows."""
    answer = f'<think>a  b</think><tool_call>{{"name":"add","arguments":{{"a":1}}{rest}'
    first, second, _ = second_prompt(server, answer, parallel_tool_calls=False)
    written = '<think>a  b</think><tool_call>{"name":"add","arguments":{"a":1}}\n</tool_call></s>\n'
    assert second == f"{first}{written}{RESULT}<|assistant|>"


def test_an_answer_without_room_for_its_thoughts_is_written_by_the_template(server: Remembering) -> None:
    answer = f"<think>{'hm ' * 100}</think>hello</s>"
    server.backend.context = 300 + len(server.ids(answer))
    first, second, _ = second_prompt(server, answer, max_tokens=800)
    assert second == f"{first}hello{MORE}"


def test_a_longer_beginning_counts_before_a_shorter_one(server: Remembering) -> None:
    server.backend.say(" one </s>", " two </s>", " three </s>")
    sent: list[Any] = [{"role": "user", "content": "hello"}]
    for word in "abc":
        told = ask(server, sent)["choices"][0]["message"]
        sent += [told | {"content": told["content"].strip()}, {"role": "user", "content": word}]
    first, _, third = server.backend.prompts()
    rest = " one </s>\n<|user|>a</s>\n<|assistant|> two </s>\n<|user|>b</s>\n<|assistant|>"
    assert third == first + rest


TOLD, TOOL = ("messages", 2), ("tools", 0, "function")
GIVEN = (*TOLD, "tool_calls", 0, "function", "arguments")
OTHER, LISTEN = tool_json(replace(ADD, name="sub")), {"role": "user", "content": "Listen."}
CHANGES: dict[str, tuple[tuple[Any, ...], Callable[[Any], Any]]] = {
    "nothing": (("model",), lambda _: "tiny"),
    "system": (("messages", 0, "content"), lambda old: old + "!"),
    "system's space": (("messages", 0, "content"), lambda old: old + " "),
    "user": (("messages", 1, "content"), str.upper),
    "text": ((*TOLD, "content"), lambda old: old.replace("see", "look")),
    "space in the text": ((*TOLD, "content"), lambda old: old.replace("me  see", "me see")),
    "no text": ((*TOLD, "content"), lambda _: None),
    "thoughts": ((*TOLD, "reasoning_content"), lambda old: old + " no"),
    "arguments": (GIVEN, lambda old: old.replace("2", "4")),
    "kind of an argument": (GIVEN, lambda old: old.replace('"a":1', '"a":"1"')),
    "more arguments": (GIVEN, lambda old: old.replace("{", '{"c": null, ')),
    "name": ((*GIVEN[:-1], "name"), lambda _: "sub"),
    "no call": (("messages",), lambda old: [*old[:2], old[2] | {"tool_calls": []}, old[4]]),
    "one more call": ((*TOLD, "tool_calls"), lambda old: [*old, old[0] | {"id": "x"}]),
    "tools": (("tools",), lambda old: [*old, OTHER]),
    "no tools": (("tools",), lambda _: []),
    "tool": ((*TOOL, "description"), lambda old: old + "!"),
    "order of a schema": ((*TOOL, "parameters", "properties"), lambda old: dict(reversed(old.items()))),
    "template": (("reasoning_effort",), lambda _: "high"),
    "one more message": (("messages",), lambda old: [old[0], LISTEN, *old[1:]]),
    "order": (("messages",), lambda old: [old[1], old[0], *old[2:]]),
}
"""The place in the body of a second turn, and how it is changed."""


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_makes_it_another_conversation(
    server: Remembering, text_of_model: tuple[Tokenizer, Text], what: str
) -> None:
    server.backend.say(ANSWERS[0], "ok</s>")
    first: list[Any] = [{"role": "system", "content": "Be"}, {"role": "user", "content": "What is 1 + 2?"}]
    told = ask(server, first)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": told["tool_calls"][0]["id"], "content": "3"}
    body: dict[str, Any] = {"messages": [*first, told, result, {"role": "user", "content": "So?"}]}
    holder = body = json.loads(json.dumps(body | {"model": "tiny", "tools": [tool_json(ADD)]}))
    (*place, last), change = CHANGES[what]
    for key in place:
        holder = holder[key]
    holder[last] = change(holder[last] if last != "reasoning_effort" else None)
    ask(server, **body)
    with remembering(*text_of_model, "ok</s>") as stranger:  # where no answer is remembered
        ask(stranger, **body)
    same = server.backend.requests[1].tokens == stranger.backend.request.tokens
    assert same or what == "nothing"
    assert server.backend.knows(1) == (what == "nothing")


def test_other_files_of_the_model_have_other_answers(server: Remembering) -> None:
    """Another revision of a model has its own weights, and perhaps its own tokens."""
    server.backend.say(" well </s>", "ok</s>", "ok</s>")
    sent: list[Any] = [{"role": "user", "content": "hello"}]
    told = ask(server, sent)["choices"][0]["message"]
    sent += [told | {"content": told["content"].strip()}, {"role": "user", "content": "more"}]
    ask(server, sent)
    server.backend.folder = Path("another")
    ask(server, sent)
    assert [" well </s>" in prompt for prompt in server.backend.prompts()] == [False, True, False]


def test_count_tokens_counts_the_tokens_of_the_answer(server: Remembering) -> None:
    server.backend.say(*ANSWERS[1:])
    sent: list[Any] = [{"role": "user", "content": "What is 1 + 2?"}]
    told, _ = messages(server, sent, False)
    sent += [*told, {"role": "user", "content": "Thanks."}]
    tools: Any = [{"name": "add", "description": "Adds", "input_schema": ADD.parameters}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=WAIT_S) as client:
        counted = client.messages.count_tokens(model="tiny", messages=sent, tools=tools).input_tokens
        usage = client.messages.create(model="tiny", messages=sent, tools=tools, max_tokens=9).usage
    assert counted == len(server.backend.requests[1].tokens)
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


LISTED = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
NEXT_BEGINS = LISTED + (
    "{# <arg_key> #}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OTHER_END = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}</s>{% else %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS_LAST = (
    "{% for m in messages %}{% if loop.last and tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# <tool_call> #}"
)
CALL_ALONE = LISTED + (
    '{# "parameters": dictionary of argument name #}{% for m in messages %}<|{{ m.role }}|>'
    '{% if m.tool_calls %}{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}{% endfor %}{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITHOUT_TOOLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_RESULT = "</s><|user|><tool_response>\n3\n</tool_response></s><|assistant|>"
TAGGED = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
TOOL_ENDS = "{{ m.content }}{% if m.role == 'tool' %}</s>{% endif %}"
PICKY = "{{ raise_exception('no') if messages[0].content == 'x' }}"
CALL_OF_THEIRS = '{"name":"add","parameters":{"a":1}}'
DATED = "{{ strftime_now('%S.%f') }}" + OTHER_END


@pytest.mark.parametrize(
    ("template", "answer", "after"),
    [
        (NEXT_BEGINS, "<think>a</think>well <|user|>", "<|user|>more<|assistant|>"),
        (NEXT_BEGINS, f"ok {TAGGED}</s>", "<|tool|>3<|assistant|>"),
        (
            NEXT_BEGINS.replace("{{ m.content }}", TOOL_ENDS),
            f"{TAGGED}<|tool|>",
            "<|tool|>3</s><|assistant|>",
        ),
        (OTHER_END, "<think>a</think>well </s>", "<end><|user|>more<end><|assistant|>"),
        (TOOLS_LAST, "<think>a</think>well</s>", None),
        (CALL_ALONE, f"{CALL_OF_THEIRS}</s>", "</s><|tool|>3</s><|assistant|>"),
        (CALL_ALONE, "<think>a</think>well </s>", "</s><|user|>more</s><|assistant|>"),
        (DATED, "<think>a</think>well</s>", None),
        (PICKY + DATED.replace("%S.%f", ""), "<think>a</think>well</s>", None),
        (WITHOUT_TOOLS, f"ok {CALL.replace(': ', ':')}</s>", WITH_RESULT),
    ],
)
def test_a_template(tmp_path: Path, template: str, answer: str, after: str | None) -> None:
    """The last token of an answer is what the template writes there, and not what the model wrote."""
    tokenizer, text = made(template, tmp_path, ("<|tool|>", "<end>"))
    ends = tuple(int(tokenizer.token_to_id(each)) for each in ("</s>", "<|user|>", "<|tool|>"))
    with remembering(tokenizer, text, eos=ends) as server:
        first, second, _ = second_prompt(server, answer)
    assert server.backend.knows(1) == (after is not None)
    if after is not None:
        assert second == f"{first}{answer[: answer.rindex('<')]}{after}"


def test_a_call_that_was_not_allowed_is_not_remembered(tmp_path: Path) -> None:
    """The client saw the words alone."""
    with remembering(*made(CALL_ALONE, tmp_path)) as server:
        _, second, _ = second_prompt(server, f"{CALL_OF_THEIRS} well </s>", tool_choice="none")
    assert "well" in second
    assert CALL_OF_THEIRS not in second


def test_each_key_has_its_own_answers(text_of_model: tuple[Tokenizer, Text], tmp_path: Path) -> None:
    backend = Keeping(*text_of_model, " well </s>", *["ok</s>"] * 2)
    sent: list[Any] = [{"role": "user", "content": "hello"}]
    with door(backend, tmp_path) as opened:
        mine, theirs = (opened.openai(opened.key(name)) for name in ("mine", "theirs"))
        told = mine.chat.completions.create(model="tiny", messages=sent).choices[0].message.content
        assert told
        sent += [{"role": "assistant", "content": told.strip()}, {"role": "user", "content": "more"}]
        for client in (theirs, mine):
            client.chat.completions.create(model="tiny", messages=sent)
    assert [" well </s>" in prompt for prompt in backend.prompts()] == [False, False, True]
