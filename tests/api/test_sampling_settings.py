from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlxtp
from mlxtp.api import sampling as settings
from mlxtp.api.backend import GREEDY, MAX_GRAMMAR, PLAIN, Sampling, Shaping
from mlxtp.api.dialects.openai import parse_chat
from mlxtp.api.request_body import MOST_TOKENS
from mlxtp.errors import Code, RequestError
from mlxtp.text.conversation import GenerationOptions
from mlxtp.wire.messages import MAX_CONTEXT, Generate

from ..changed_package import run_changed
from ..reference import text
from ..wire.samples import to_body

VOCABULARY = 340


def chat(**fields: Any) -> GenerationOptions:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]} | fields).encode()
    return parse_chat(body).options


def sampling(defaults: Sampling = GREEDY, seed: int = 5, **fields: Any) -> Sampling:
    return settings.sampling(chat(**fields), defaults, seed)


def shaping(**fields: Any) -> Shaping:
    return settings.shaping(chat(**fields), VOCABULARY)


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        shaping(**fields)
    assert caught.value.status == 400
    return caught.value


def test_what_is_left_out_is_greedy_or_what_the_model_says() -> None:
    assert sampling() == Sampling(seed=5)
    defaults = Sampling(0.6, 0.95, 20, 0.05, seed=99)
    assert sampling(defaults) == Sampling(0.6, 0.95, 20, 0.05, seed=5)
    assert sampling(defaults, temperature=0).temperature == 0
    assert sampling(defaults, temperature=0.1) == Sampling(0.1, 0.95, 20, 0.05, seed=5)
    assert sampling(defaults, top_k=0).top_k == sampling(defaults, top_k=-1).top_k == 0


def test_every_setting_reaches_the_engine() -> None:
    wanted = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
    }  # fmt: skip
    assert sampling(**wanted) == Sampling(0.7, 0.9, 40, 0.02, 0.5, 0.2, 5)
    wanted = {"repetition_penalty": 1.1, "presence_penalty": -2, "frequency_penalty": 0.5, "min_tokens": 4}
    assert shaping(**wanted) == Shaping(1.1, -2, 0.5, min_tokens=4)
    assert shaping() == PLAIN


def test_a_nucleus_of_nothing_is_the_most_probable_token() -> None:
    found = sampling(temperature=1, top_p=0, top_k=40)
    assert (found.top_p, found.top_k) == (1.0, 1)


def test_log_probabilities_are_counted_as_the_engine_counts_them() -> None:
    assert chat().logprobs == chat(logprobs=False, top_logprobs=0).logprobs == -1
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20


def values(range_: tuple[float, float], field: str) -> st.SearchStrategy[float]:
    least, most = range_
    if isinstance(getattr(GREEDY, field, getattr(PLAIN, field, None)), int):
        return st.integers(int(least), MAX_CONTEXT if field == "min_tokens" else int(most))
    return st.floats(least, most) | st.sampled_from(range_)


BIASES = st.dictionaries(st.integers(0, VOCABULARY - 1).map(str), st.floats(-100, 100))


@given(
    st.fixed_dictionaries(
        {},
        optional={field: values(each.openai, field) for field, each in settings.SETTINGS.items()}
        | {"logit_bias": BIASES, "seed": st.integers(), "ignore_eos": st.booleans()},
    )
)
def test_what_passes_the_checks_may_travel(fields: dict[str, Any]) -> None:
    asked = chat(**fields)
    assert {field: fields[field] for field in fields if field in settings.SETTINGS} == asked.settings
    seed = settings.seed_of(asked.seed or 0)
    wanted = Generate(
        1, (1,), 50, settings.sampling(asked, GREEDY, seed), settings.shaping(asked, VOCABULARY)
    )
    Generate.CODEC.from_wire(to_body(wanted))


@pytest.mark.parametrize("dialect", ["openai", "anthropic", "ollama"])
def test_the_ends_of_every_range_may_travel(dialect: str) -> None:
    ranges = {field: getattr(each, dialect) for field, each in settings.SETTINGS.items()}
    ranges["min_tokens"] = (0, MAX_CONTEXT)  # no answer may be longer
    for ends in zip(*[[(field, end) for end in each] for field, each in ranges.items() if each], strict=True):
        asked = GenerationOptions(settings=dict(ends))
        sampled, shaped = settings.sampling(asked, GREEDY, 1), settings.shaping(asked, VOCABULARY)
        Generate.CODEC.from_wire(to_body(Generate(1, (1,), 50, sampled, shaped)))


def test_every_setting_is_in_the_documents_with_its_ranges() -> None:
    text = (Path(mlxtp.__file__).parents[1] / "docs" / "api.md").read_text()
    table = text.partition("\n## Sampling\n")[2].partition("\n## ")[0]
    rows = {
        cells[0]: cells[1:4]
        for cells in re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|", table, re.MULTILINE)
    }
    for field, each in settings.SETTINGS.items():
        openai, anthropic, ollama = rows[field]
        assert openai.removesuffix(" *") == documented(each.openai), field
        assert anthropic == documented(each.anthropic), field
        name = f"`{each.ollama_name}`, " if each.ollama_name else ""
        assert ollama == name + documented(each.ollama), field


def documented(ends: tuple[float, float] | None) -> str:
    if ends is None:
        return "–"
    low, high = ends
    return f"{low:g} or more" if high == MOST_TOKENS else f"{low:g} to {high:g}"


FIELD, ROW = "xtc_threshold: float", '"xtc_threshold":'
ADDED = """
import json
from mlxtp.api import sampling
from mlxtp.api.backend import GREEDY
from mlxtp.api.dialects.completions import parse
from mlxtp.api.dialects.ollama_request import Arrival, parse_chat as parse_ollama
from mlxtp.api.dialects.openai import ChatRequest, parse_chat
from mlxtp.errors import RequestError
from mlxtp.wire.messages import Generate

def body(value):
    hello = {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello", "model": "tiny"}
    return json.dumps(hello | {"warmth": value, "options": {"heat": value}}).encode()

for read in parse_chat, parse, lambda body: parse_ollama(Arrival(0, ()), body):
    told = Generate(1, (5,), 9, sampling.sampling(read(body(0.25)).options, GREEDY, 7))
    assert Generate.CODEC.from_wire(Generate.CODEC.to_wire(told)).sampling.warmth == 0.25
    try:
        read(body(2))
    except RequestError as error:
        print(error.detail)
print(sorted(ChatRequest.model_json_schema()["properties"]["warmth"]["anyOf"][0].items()))
"""


@pytest.mark.slow
def test_a_new_sampler_is_one_field_and_one_row_up_to_the_engine(tmp_path: Path) -> None:
    told = run_changed(
        tmp_path,
        ADDED,
        ("wire/messages.py", FIELD, "    warmth: float = _f(number(0.0, 1.0), default=0.0)"),
        ("api/sampling.py", ROW, '    "warmth": ClientSetting((0, 1), ollama=(0, 1), ollama_name="heat"),'),
    )
    assert told == [
        "warmth should be from 0 to 1, got 2",
        "warmth should be from 0 to 1, got 2",
        "options.heat should be from 0 to 1, got 2",
        "[('maximum', 1), ('minimum', 0), ('type', 'number')]",
    ]


@given(st.integers())
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= settings.seed_of(seed) < 2**63
    assert (settings.seed_of(seed) - seed) % 2**63 == 0


def test_the_seeds_of_choices_are_documented_numbers() -> None:
    """They may not change: who repeats a request with its seed expects the same answers."""
    assert [settings.seed_of(seed) for seed in (0, 7, -1, 2**63)] == [0, 7, 2**63 - 1, 0]
    assert [settings.choice_seed(7, index) for index in range(3)] == SEEDS_OF_7


SEEDS_OF_7 = [7, 5595607496629875680, 4504606891059362275]


@given(st.integers(0, 2**63 - 2))
def test_neighbouring_seeds_share_no_choice(seed: int) -> None:
    seeds = [settings.choice_seed(one, index) for one in (seed, seed + 1) for index in range(16)]
    assert len(set(seeds)) == 32
    assert all(0 <= one < 2**63 for one in seeds)


def test_choices_differ_in_their_seeds_only() -> None:
    first = Generate(0, (1, 2), 9, Sampling(0.5, seed=7), Shaping(min_tokens=2), 3, ignore_eos=True)
    assert settings.choices(first, 1) == (first,)
    found = settings.choices(first, 3)
    assert [one.sampling.seed for one in found] == SEEDS_OF_7
    assert {(one.tokens, one.max_tokens, one.sampling.temperature, one.shaping, one.logprobs, one.ignore_eos)
            for one in found} == {((1, 2), 9, 0.5, Shaping(min_tokens=2), 3, True)}  # fmt: skip


def test_stop_is_a_string_or_a_list_and_empty_ones_stop_nothing() -> None:
    for given_, found in (("end", ("end",)), (["a", "", "b"], ("a", "b")), ("", ()), ([], ()), (None, ())):
        assert settings.stop_strings(chat(stop=given_).stop) == found
    assert len(settings.stop_strings(chat(stop=["x" * 1000] * 16).stop)) == 16


@pytest.mark.parametrize(("stop", "number"), [(["x"] * 17, "17"), ("x" * 1001, "1001")])
def test_too_much_to_stop_at_is_refused(stop: Any, number: str) -> None:
    with pytest.raises(RequestError, match=number) as caught:
        settings.stop_strings(chat(stop=stop).stop)
    assert caught.value.param == "stop"


def test_an_answer_must_be_able_to_be_long_enough() -> None:
    settings.check_min_tokens(9, 9)
    with pytest.raises(RequestError, match=r"min_tokens 10 .* from 0 to 9"):
        settings.check_min_tokens(10, 9)


def test_biases_are_pairs_of_token_and_value() -> None:
    found = shaping(logit_bias={"339": -100, "0": 2.5})
    assert (found.bias_tokens, found.bias_values) == ((339, 0), (-100.0, 2.5))


@pytest.mark.parametrize("key", ["340", "-1", "x", "", "1.0", "٣", " 1", "9" * 5000])
def test_a_bias_for_what_is_no_token_is_refused(key: str) -> None:
    error = refusal(logit_bias={key: 1})
    assert (error.code, error.param) == (Code.BAD_REQUEST, "logit_bias")
    assert "from 0 to 339" in error.detail
    assert len(error.detail) < 300


def test_a_bias_out_of_range_names_its_token() -> None:
    error = refusal(logit_bias={"5": 101})
    assert error.param == "logit_bias.5"
    assert error.detail == "logit_bias.5 should be from -100 to 100, got 101"


def test_more_biases_than_travel_are_refused() -> None:
    biases = {str(token): 1 for token in range(1025)}
    with pytest.raises(RequestError, match="1025 tokens; at most 1024"):
        settings.shaping(chat(logit_bias=biases), 2000)
    del biases["7"]
    assert len(settings.shaping(chat(logit_bias=biases), 2000).bias_tokens) == 1024


def test_a_banned_token_is_next_to_impossible() -> None:
    found = settings.shaping(chat(logit_bias={"5": 1}), VOCABULARY, banned=(7,))
    assert dict(zip(found.bias_tokens, found.bias_values, strict=True)) == {5: 1, 7: -100}


def test_a_ban_takes_the_place_of_a_bias() -> None:
    biases = {str(token): 1 for token in range(1024)}
    with pytest.raises(RequestError, match="1024 tokens; at most 1023"):
        settings.shaping(chat(logit_bias=biases), 2000, banned=(1999,))


def test_a_bad_word_is_its_tokens_with_and_without_a_blank() -> None:
    spelled = [text().encoded(each, special=False) for each in ("hello", " hello", "BY", " BY")]
    options = chat(bad_words=["hello", " BY", "hello", "BY"])
    found = settings.without_words(Shaping(min_tokens=2), options.bad_words, text(), 512)
    assert found == Shaping(
        min_tokens=2, bad_tokens=tuple(chain(*spelled)), bad_lengths=tuple(map(len, spelled))
    )
    assert settings.without_words(PLAIN, chat(bad_words=[]).bad_words, text(), 512) == PLAIN


@pytest.mark.parametrize(
    ("words", "vocabulary", "detail"),
    [
        ([""], 512, '"" of 0 characters; a word has 1 to 1000, not just blanks'),
        (["x", " \n"], 512, '" \\n" of 2 characters; a word has 1 to 1000, not just blanks'),
        (["y" * 1001], 512, "of 1001 characters"),
        (["ab", "Z" * 32], 512, "of 33 tokens; each has 1 to 32"),
        (["a", "hello"], 443, '"hello" of token 443; the model has 0 to 442'),
        ([f"{n}" for n in range(129)], 512, "129 words; at most 128"),
    ],
)
def test_a_bad_word_that_cannot_be_is_named(words: list[str], vocabulary: int, detail: str) -> None:
    with pytest.raises(RequestError) as caught:
        settings.without_words(PLAIN, chat(bad_words=words).bad_words, text(), vocabulary)
    assert (caught.value.code, caught.value.param) == (Code.BAD_REQUEST, "bad_words")
    assert caught.value.detail.startswith("bad_words has ")
    assert detail in caught.value.detail
    assert len(caught.value.detail) < 200


def test_a_grammar_that_is_too_long_is_refused() -> None:
    for fields, param in (({}, "tools"), ({"response_format": {"type": "json_object"}}, "response_format")):
        with pytest.raises(RequestError, match=str(MAX_GRAMMAR)) as caught:
            settings.shaping(chat(**fields), VOCABULARY, ("lark", "x" * (MAX_GRAMMAR + 1)))
        assert caught.value.param == param
