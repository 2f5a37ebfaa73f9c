"""`/v1/completions` and the endpoints that are not served: the real client library, a real server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from mlxtp.api.backend import Sampling, StreamEnd, TokenEvent, Tokens
from mlxtp.api.dialects.completions import Logprobs
from mlxtp.errors import GroupError
from mlxtp.text import transcript
from mlxtp.text.conversation import GenerationOptions, TokenScore

from ..conftest import CONTEXT, VOCABULARY, WAIT_S, Script, Server, says, says_scored, score, then
from ..test_app import assert_error, data_of, fail_with
from . import shapes
from .conftest import impossible

BOS = 0
TEXT = "hello wide world, 日本語 😀"


def create(server: Server, **fields: Any) -> Any:
    """The library's answer, read strictly, or its chunks."""
    answer = server.client.completions.create(**({"model": "tiny", "prompt": "hello"} | fields))
    return answer if fields.get("stream") else shapes.read(Completion, answer.to_json())


def post(server: Server, body: Any = None, path: str = "/v1/completions", **kwargs: Any) -> httpx.Response:
    if body is not None:
        kwargs["json"] = body
    return httpx.post(server.url + path, timeout=WAIT_S, trust_env=False, **kwargs)


def streamed(server: Server, count: int = 1, *, strict: bool = True, **fields: Any) -> list[dict[str, Any]]:
    """The choices put together from a stream, in the shape of those of a whole answer.

    `strict`: its chunks are what the library's types allow; these know no first token without a score.
    """
    *chunks, done = data_of(post(server, {"prompt": "hello", "stream": True} | fields))
    assert done == "[DONE]"
    choices: list[dict[str, Any]] = [
        {"text": "", "logprobs": None, "finish_reason": None} for _ in range(count)
    ]
    for chunk in chunks:
        if strict:
            parsed = shapes.read(shapes.CompletionChunk, chunk)
            assert (parsed.id[:5], parsed.model) == ("cmpl-", "org/tiny")
        for part in json.loads(chunk)["choices"]:
            choice = choices[part["index"]]
            assert choice["finish_reason"] is None
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            if part["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {key: [] for key in part["logprobs"]}
                for key, values in part["logprobs"].items():
                    choice["logprobs"][key] += values
    return choices


@pytest.mark.parametrize("stream", [False, True])
def test_every_kind_of_prompt(server: Server, stream: bool) -> None:
    hello, wide = server.ids("hello"), server.ids("wide")
    for prompt, expected in (
        ("hello", [[BOS, *hello]]),
        (["hello", "wide"], [[BOS, *hello], [BOS, *wide]]),
        (hello, [hello]),
        ([wide, hello], [wide, hello]),
    ):
        server.backend.requests.clear()
        answer = create(server, prompt=prompt, stream=stream)
        count = len({choice.index for part in (answer if stream else [answer]) for choice in part.choices})
        assert count == len(expected)
        assert [list(request.tokens) for request in server.backend.requests] == expected


def test_an_answer_has_16_tokens_unless_more_are_asked_for_or_fewer_fit(server: Server) -> None:
    create(server)
    create(server, max_tokens=20)
    create(server, prompt=[3] * (CONTEXT - 5))
    assert [request.max_tokens for request in server.backend.requests] == [16, 20, 5]
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {CONTEXT} tokens"):
        create(server, prompt=[3] * (CONTEXT + 5))
    error = assert_error(post(server, {"prompt": "q" * CONTEXT}), 400, "context_length_exceeded")
    assert error["param"] == "prompt"


def test_settings_reach_the_backend(server: Server) -> None:
    create(
        server, temperature=0.5, seed=7, presence_penalty=0.5, logit_bias={"7": -100}, logprobs=3, user="me",
        extra_body={
            "top_k": 30, "min_tokens": 2, "ignore_eos": True, "response_format": {"type": "json_object"},
            "deadline_s": 5, "bad_words": ["hello"],
        },
    )  # fmt: skip
    request, [whose] = server.backend.request, server.backend.whose
    assert request.sampling == Sampling(0.5, top_k=30, seed=7)
    shaping = request.shaping
    assert (shaping.presence_penalty, shaping.bias_tokens, shaping.min_tokens) == (0.5, (7,), 2)
    assert shaping.bad_tokens[: shaping.bad_lengths[0]] == tuple(server.ids("hello"))
    assert (shaping.grammar_kind, request.logprobs, request.ignore_eos) == ("json_schema", 3, True)
    assert (whose.user, whose.deadline_s) == ("me", 5)


def test_a_whole_answer(server: Server) -> None:
    tokens = server.ids(TEXT)
    server.backend.script = says([*tokens, 1], cached=1, drafted=3, accepted=2)
    answer = create(server)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (TEXT, "stop", 0, None)
    assert answer.id.startswith("cmpl-")
    prompt = 1 + len(server.ids("hello"))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, len(tokens) + 1)
    assert answer.usage.total_tokens == prompt + len(tokens) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 2


@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_streamed_answer_is_the_whole_one(server: Server, step: int) -> None:
    server.backend.script = says(server.ids(TEXT), "length", step)
    [choice] = streamed(server)
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")


@pytest.mark.parametrize("echo", [False, True])
def test_n_answers_to_each_prompt_stand_in_the_order_of_the_prompts(server: Server, echo: bool) -> None:
    words, fields = ["a", "bc", "def", "ghij"], {"prompt": ["x ", "yz "], "n": 2, "echo": echo}
    shown = ["x a", "x bc", "yz def", "yz ghij"] if echo else words
    server.backend.scripts = [says(server.ids(word), cached=i % 4) for i, word in enumerate(words * 2)]
    answer = create(server, **fields)
    assert [(choice.index, choice.text) for choice in answer.choices] == [*enumerate(shown)]
    assert answer.usage.prompt_tokens == 2 + len(server.ids("x ")) + len(server.ids("yz "))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0 + 2
    assert [choice["text"] for choice in streamed(server, 4, **fields)] == shown


def test_usage_streams_in_one_trailer_when_asked_for(server: Server) -> None:
    server.backend.script = says(server.ids("wide"), cached=2)
    *chunks, trailer = create(server, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert (trailer.choices, trailer.usage.completion_tokens) == ([], len(server.ids("wide")))
    assert trailer.usage.prompt_tokens_details.cached_tokens == 2
    assert all(chunk.usage is None for chunk in create(server, stream=True))


def test_echo_puts_the_prompt_in_front(server: Server) -> None:
    server.backend.script = says(server.ids(" world"))
    for prompt in ("wide", server.ids("wide"), [server.ids("wide")]):
        [choice] = create(server, prompt=prompt, echo=True, n=1).choices
        [part] = streamed(server, prompt=prompt, echo=True)
        assert choice.text == part["text"] == "wide world"


@pytest.mark.parametrize("top", [0, 2, 5])
@pytest.mark.parametrize("step", [1, 4])
def test_logprobs_in_the_older_shape(server: Server, top: int, step: int) -> None:
    tokens = server.ids(TEXT)
    server.backend.script = says_scored(tokens, step, top)
    found = create(server, logprobs=top).choices[0].logprobs
    assert len(found.tokens) == len(tokens)
    assert found.token_logprobs == [score(at).logprob for at in range(len(tokens))]
    assert all(max(top, 1) <= len(each) <= top + 1 for each in found.top_logprobs)
    for name, own, others in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert others[name] == own
    ends = [*found.text_offset[1:], len(TEXT)]
    for name, start, end in zip(found.tokens, found.text_offset, ends, strict=True):
        if not name.startswith("bytes:"):
            assert TEXT[start:end] == name
    assert streamed(server, logprobs=top)[0]["logprobs"] == found.model_dump()


def test_bytes_that_are_no_text_have_a_name_each() -> None:
    names = {5: ("\ufffd", (0xE2,)), 6: ("\ufffd", (0x82, 0x0A)), 7: ("hi", (0x68, 0x69)), 8: ("</s>", None)}
    about: Any = SimpleNamespace(
        names=names.__getitem__, ask=SimpleNamespace(options=GenerationOptions(logprobs=4))
    )
    found = Logprobs(about).of([(5, TokenScore(-1.0, ((5, -1.0), (6, -2.0), (7, -3.0), (8, -4.0))))])
    own = "bytes:\\xe2"
    assert found["tokens"] == [own]
    assert found["top_logprobs"] == [{own: -1.0, "bytes:\\x82\\x0a": -2.0, "hi": -3.0, "</s>": -4.0}]
    assert next(iter(found["top_logprobs"][0])) == own


def says_prompt(prompt: list[int], tokens: list[int]) -> Script:
    """Scores of a prompt in two parts, then an answer with scores."""

    async def script() -> AsyncIterator[TokenEvent]:
        for part in filter(None, (prompt[1:3], prompt[3:])):
            yield Tokens(tuple(part), tuple([score(token, 2) for token in part]), prompt=True)
        for token in tokens:
            yield Tokens((token,), (score(token, 2),))
        yield StreamEnd("length", len(tokens))

    return script


def test_a_prompt_is_echoed_with_its_scores(server: Server) -> None:
    prompt, said = server.ids("wide open"), server.ids(" world")
    server.backend.script = says_prompt(prompt, said)
    asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": len(said)}
    [choice] = post(server, asked).json()["choices"]
    assert choice["text"] == "wide open world"
    found = choice["logprobs"]
    assert found["token_logprobs"] == [None, *[score(token).logprob for token in [*prompt[1:], *said]]]
    assert found["top_logprobs"][0] is None
    assert all(1 <= len(each) <= 2 for each in found["top_logprobs"][1:])
    ends = [*found["text_offset"][1:], len(choice["text"])]
    places = zip(found["text_offset"], ends, strict=True)
    assert [choice["text"][at:end] for at, end in places] == found["tokens"]
    request = server.backend.requests[-1]
    assert (request.prompt_logprobs, request.logprobs, request.ignore_eos) == (1, 1, False)
    [told] = streamed(server, strict=False, **asked)
    assert (told["text"], told["logprobs"]) == (choice["text"], found)


def test_a_prompt_of_one_token_is_echoed_in_a_stream(server: Server) -> None:
    [token] = server.ids("wide")[:1]
    asked = {"prompt": [token], "echo": True, "logprobs": 0, "max_tokens": 1}
    server.backend.script = says_prompt([token], [token])
    [choice] = post(server, asked).json()["choices"]
    [told] = streamed(server, strict=False, **asked)
    assert (told["text"], told["logprobs"]) == (choice["text"], choice["logprobs"])


def test_many_scores_of_a_prompt_are_sent_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript, "SCORES_AT_ONCE", 1)
    test_a_prompt_is_echoed_with_its_scores(server)


def test_a_prompt_is_scored_without_an_answer(server: Server) -> None:
    prompt = server.ids("wide open")
    server.backend.script = says_prompt(prompt, prompt[:1])
    body = post(server, {"prompt": prompt, "prompt_logprobs": 1, "max_tokens": 0}).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("", "length", None)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (len(prompt), 0)
    first, *rows = choice["prompt_logprobs"]
    assert first is None
    for token, row in zip(prompt[1:], rows, strict=True):
        assert row[str(token)]["logprob"] == score(token).logprob
        assert [key for key, each in row.items() if each["rank"] == 1] == ["60"]
    assert server.backend.requests[-1].max_tokens == 1


def test_scores_of_prompts_are_bounded_together(server: Server) -> None:
    refused = post(server, {"prompt": [[5] * 199] * 126, "prompt_logprobs": 20})
    assert "25074 tokens to score with 20" in assert_error(refused, 400, "invalid_request")["message"]


def test_the_one_token_behind_a_scored_prompt_has_a_score_even_if_it_is_an_end_token(server: Server) -> None:
    """lm-eval leaves out an answer's last score, as the one of the token behind the prompt."""
    post(server, {"prompt": "wide", "echo": True, "logprobs": 1, "max_tokens": 1})
    assert server.backend.requests[-1].ignore_eos


def test_a_token_that_cannot_be_has_a_number_that_json_knows(server: Server) -> None:
    server.backend.script = impossible
    found = create(server, logprobs=2).choices[0].logprobs
    assert found.token_logprobs == [-9999.0]
    assert sorted(found.top_logprobs[0].values()) == [-9999.0, -9999.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": []}, "prompt", "token ids"),
        ({"prompt": {}}, "prompt", "got {}"),
        ({"prompt": [1, "a"]}, "prompt[1]", 'got "a"'),
        ({"prompt": ["a", 1]}, "prompt[1]", "got 1"),
        ({"prompt": [[1], []]}, "prompt[1]", "got []"),
        ({"prompt": [1.0, 1.5]}, "prompt[1]", "got 1.5"),
        ({"prompt": [True]}, "prompt[0]", "got true"),
        ({"prompt": [1.5]}, "prompt[0]", "got 1.5"),
        ({"prompt": [[3, -1]]}, "prompt[0][1]", "got -1"),
        ({"prompt": [VOCABULARY]}, "prompt[0]", f"from 0 to {VOCABULARY - 1}"),
        ({"prompt": ["a"] * 100, "n": 2}, "prompt", "200 answers"),
        ({"prompt": ["a"] * 9, "best_of": 15, "stream": False}, "prompt", "135 answers"),
        ({"n": 3, "best_of": 2}, "best_of", "best_of 2 is less than n 3"),
        ({"best_of": 17}, "best_of", "from 1 to 16"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids", f"from 0 to {VOCABULARY - 1}"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids", "has 65 tokens; at most 64"),
        ({"allowed_token_ids": [VOCABULARY]}, "allowed_token_ids", f"from 0 to {VOCABULARY - 1}"),
        ({"suffix": "end"}, "suffix", '"end"'),
        ({"logprobs": 6}, "logprobs", "from 0 to 5, got 6"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"max_tokens": -2}, "max_tokens", "from 0 to"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20, got 21"),
        ({"response_format": {"type": "x"}}, "response_format", "not supported"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_a_400_that_names_it(
    server: Server, fields: dict[str, Any], param: str, named: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, stream=stream, extra_body=fields)
    assert caught.value.param == param
    assert named in caught.value.message
    assert server.backend.requests == []


def test_the_best_of_several_do_not_stream(server: Server) -> None:
    refused = assert_error(
        post(server, {"prompt": "a", "best_of": 2, "stream": True}), 400, "invalid_request"
    )
    assert (refused["param"], "cannot stream" in refused["message"]) == ("best_of", True)


def test_the_best_of_each_prompt_are_returned_and_all_are_counted(server: Server) -> None:
    def scored(word: str, mean: float) -> Any:
        async def script() -> Any:
            tokens = tuple(server.ids(word))
            yield Tokens(tokens, (TokenScore(mean, ()),) * len(tokens))
            yield StreamEnd("stop", len(tokens))

        return script

    words = [("a", -3), ("bc", -1), ("def", -2), ("wide", -5), ("x", -4), ("", 0)]
    server.backend.scripts = [scored(*each) for each in words]
    answer = create(server, prompt=["x", "y"], n=2, best_of=3)
    shown = [(choice.index, choice.text, choice.logprobs) for choice in answer.choices]
    assert shown == [(0, "bc", None), (1, "def", None), (2, "x", None), (3, "wide", None)]
    assert answer.usage.completion_tokens == sum(len(server.ids(word)) for word, _ in words)
    assert [request.logprobs for request in server.backend.requests] == [0] * 6


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_named_with_the_one_that_ended_them(server: Server, stream: bool) -> None:
    said = server.ids("wide world")
    server.backend.script = says(said, token=7)
    fields: Any = {"extra_body": {"return_token_ids": True, "stop_token_ids": [7, 7]}, "stream": stream}
    answer = create(server, **fields)
    parts = [part.choices[0] for part in (answer if stream else [answer])]
    assert [token for part in parts for token in part.token_ids] == [*said, 7]
    assert parts[0].prompt_token_ids == [BOS, *server.ids("hello")]
    assert (parts[-1].stop_reason, parts[-1].matched_stop) == (7, 7)
    assert (server.backend.request.stop_tokens, server.backend.request.logprobs) == ((7,), -1)


def test_a_lost_group_is_an_error_event_and_no_done(server: Server) -> None:
    server.backend.script = then(server.ids("ab"), fail_with(GroupError("rank 1 is gone")))
    *chunks, error = data_of(post(server, {"prompt": "hello", "stream": True}))
    assert [json.loads(chunk)["choices"][0]["text"] for chunk in chunks] == ["ab"]
    assert json.loads(error)["error"]["code"] == "rank_lost"
    assert_error(post(server, {"prompt": "hello"}), 503, "rank_lost")


def test_endpoints_that_are_not_served_say_so(server: Server) -> None:
    client, upload = server.client, ("a.wav", b"RIFF")
    calls: dict[str, Callable[[], Any]] = {
        "moderations are not served": lambda: client.moderations.create(input="x"),
        "images are not served": lambda: client.images.generate(prompt="x"),
        "audio is not served": lambda: client.audio.transcriptions.create(model="tiny", file=upload),
    }
    for words, call in calls.items():
        with pytest.raises(openai.NotFoundError, match=words) as caught:
            call()
        assert caught.value.code == "not_supported"
