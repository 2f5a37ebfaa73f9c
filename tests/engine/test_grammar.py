"""Grammars on the embedded model's tokenizer: what masks allow is valid, and no grammar does harm."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import is_valid
from tokenizers import Tokenizer

from mlxtp.config import embedded_model_path
from mlxtp.engine import grammar as grammar_module
from mlxtp.engine.grammar import MAX_WORDS, Grammar, Grammars, Matcher, build, read_tokenizer, unpack
from mlxtp.errors import Code, MlxtpError, RequestError
from mlxtp.text.conversation import Tool
from mlxtp.text.tool_grammar import JSON_STYLE, call_grammar, checked_tools
from mlxtp.text.tool_schemas import relaxed
from mlxtp.wire.messages import MAX_GRAMMAR

from .tables import cases, refused

pytestmark = pytest.mark.slow

FOLDER = Path(embedded_model_path())
VOCABULARY = 512
EOS = frozenset((5, 1))
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
WAIT_S = 60.0
ANY_OBJECT = '{"type": "object"}'


Made = Callable[..., Grammars]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with closing(Grammars(FOLDER, VOCABULARY, EOS)) as held:
        yield held


@pytest.fixture
def made() -> Iterator[Made]:
    """Grammars of a test's own, for a model of so many tokens."""
    with ExitStack() as held:

        def make(vocabulary: int = VOCABULARY, eos: frozenset[int] = EOS, **limits: Any) -> Grammars:
            folder = limits.pop("folder", FOLDER)
            return held.enter_context(closing(Grammars(folder, vocabulary, eos, **limits)))

        yield make


def text_of(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=False))


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def allowed(matcher: Matcher, vocabulary: int = VOCABULARY) -> list[int]:
    return [int(token) for token in np.flatnonzero(unpack(matcher.mask(), vocabulary))]


def accepts(grammar: Grammar, text: str) -> bool:
    """Return whether `text`, token by token, is allowed and may end."""
    matcher = grammar.matcher()
    for token in tokens_of(text):
        if token not in allowed(matcher):
            return False
        matcher.accept(token)
    return set(allowed(matcher)) >= EOS


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2, "maxLength": 6},
            "age": {"type": "integer", "minimum": 3, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"enum": ["red", 7, None]}, "maxItems": 3, "minItems": 1},
            "done": {"type": "boolean"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
        },
        "required": ["tags"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "number"}]}, "minItems": 2},
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#/$defs/tree"}},
                "required": ["leaf"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
]  # fmt: skip

CLOSING = [tokens_of(text)[0] for text in ('"', "}", "]", ")", ",", "1")]


def walk(matcher: Matcher, dice: random.Random, check: Callable[[str], bool], tokens: int = 40) -> str:
    """Random tokens that the masks allow; after `tokens` of them, those that come to an end.

    `check` says whether a text is complete and valid: it must be so where an end token is allowed.
    """
    chosen: list[int] = []
    forced: list[str] = []
    for step in range(tokens + 400):
        choices = allowed(matcher)
        if EOS & set(choices):
            assert set(choices) >= EOS
            assert check(text_of(chosen))
        forced.append(text_of([*chosen, *matcher.forced(16)]).rstrip("\ufffd"))  # half a character
        closers = [token for token in (*sorted(EOS), *CLOSING) if token in choices]
        token = closers[0] if step >= tokens and closers else dice.choice(choices)
        if matcher.finished:
            assert set(choices) == EOS
        matcher.accept(token)
        if token in EOS:
            text = text_of(chosen)
            assert all(text.startswith(ahead) for ahead in forced)
            return text
        chosen.append(token)
    raise AssertionError(f"no end after {text_of(chosen)!r}")


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_all_that_a_schema_allows_is_valid(grammars: Grammars, number: int) -> None:
    def check(text: str) -> bool:
        value = json.loads(text, parse_float=lambda _: 0.5)  # 9e999 is no infinity
        return "\ufffd" not in text and is_valid(SCHEMAS[number], value)

    grammar = grammars.compile("json_schema", json.dumps(SCHEMAS[number]))
    dice = random.Random(number)
    texts = {walk(grammar.matcher(), dice, check) for _ in range(15)}
    assert len(texts) > 3
    assert all(map(check, texts))


A = {"type": "object", "properties": {"a": {"type": "integer"}}}
A_B = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}}
COMPACT = {**A_B, "x-guidance": {"item_separator": ",", "key_separator": ":"}}
SPACED = ('{"a":1}', ' {"a": 1}', '{"a": 1}\n', '{"a":  1}', '{\n"a": 1}', '{"a": 1,"b": null}')


@cases(
    "schema, right, wrong",
    {
        "any object": ({"type": "object"}, '{"a": [1, {"b": null}], "c": {}}', ("[1]",)),
        "one way to be separated": (A_B, '{"a": 1, "b": null}', SPACED),
        "the way that is asked for": (COMPACT, '{"a":1,"b":null}', ('{"a": 1, "b": null}',)),
        "unnamed properties": (A, '{"b": true}', ()),
        "none where they are forbidden": ({**A, "additionalProperties": False}, "{}", ('{"b": true}',)),
    },
)
def test_json_has(grammars: Grammars, schema: dict[str, Any], right: str, wrong: tuple[str, ...]) -> None:
    grammar = grammars.compile("json_schema", json.dumps(schema))
    assert accepts(grammar, right)
    assert not any(accepts(grammar, text) for text in wrong)


@pytest.mark.parametrize("pattern", ["[a-c]{2,5}", "(yes|no)!?", "[0-9]{3}-[0-9]{2}", "é+ü"])
def test_all_that_a_regex_allows_matches(grammars: Grammars, pattern: str) -> None:
    def check(text: str) -> bool:
        return re.fullmatch(pattern, text) is not None

    grammar = grammars.compile("regex", pattern)
    dice = random.Random(3)
    assert all(check(walk(grammar.matcher(), dice, check, tokens=8)) for _ in range(10))


def test_all_that_a_lark_grammar_allows_follows_its_rules(grammars: Grammars) -> None:
    grammar = grammars.compile("lark", 'start: item ("," item)*\nitem: "(" item ")" | /[0-9]/')
    dice = random.Random(5)

    def check(text: str) -> bool:
        while "(" in text and (inner := re.sub(r"\(([0-9])\)", r"\1", text)) != text:
            text = inner
        return re.fullmatch(r"[0-9](,[0-9])*", text) is not None

    assert all(check(walk(grammar.matcher(), dice, check, tokens=20)) for _ in range(5))


def test_matchers_do_not_disturb_each_other(grammars: Grammars) -> None:
    def one(number: int) -> tuple[str, str]:
        return "json_schema", json.dumps(SCHEMAS[number % len(SCHEMAS)])

    def walked(number: int) -> list[int]:
        """The tokens of request `number`, by a dice of its own."""
        matcher, dice = grammars.compile(*one(number)).matcher(), random.Random(number)
        tokens: list[int] = []
        while len(tokens) < 25 and not matcher.finished:
            tokens.append(dice.choice(allowed(matcher)))
            matcher.accept(tokens[-1])
        return tokens

    alone = [walked(number) for number in range(24)]
    dices = [random.Random(number) for number in range(24)]
    matchers = [grammars.compile(*one(number)).matcher() for number in range(24)]
    together: list[list[int]] = [[] for _ in matchers]
    order = random.Random(0)
    for number in order.sample([n for n in range(24) for _ in range(25)], 24 * 25):
        if not matchers[number].finished:
            together[number].append(dices[number].choice(allowed(matchers[number])))
            matchers[number].accept(together[number][-1])
    assert together == alone


def test_an_end_token_comes_only_where_the_answer_may_end(grammars: Grammars) -> None:
    matcher = grammars.compile("regex", "ab?").matcher()
    assert not EOS & set(allowed(matcher))
    assert not matcher.finished
    matcher.accept(tokens_of("a")[0])
    assert set(allowed(matcher)) == EOS | {tokens_of("b")[0]}
    assert not matcher.finished
    early = matcher.copy()
    matcher.accept(tokens_of("b")[0])
    assert set(allowed(matcher)) == EOS
    assert matcher.finished
    assert len(allowed(early)) == len(EOS) + 1, "a copy goes its own way"
    for end in EOS:
        other = early.copy()
        other.accept(end)
        assert other.finished


def test_forced_tokens_are_what_masks_allow(grammars: Grammars) -> None:
    matcher = grammars.compile("regex", '\\{"temperature": [0-9]+\\}').matcher()
    forced = matcher.forced(64)
    assert text_of(list(forced)).startswith('{"temperature":')
    assert matcher.forced(3) == forced[:3]
    assert matcher.forced(64) == forced
    for token in forced:
        assert token in allowed(matcher)
        matcher.accept(token)
    assert matcher.forced(64) == ()
    assert len(allowed(matcher)) > 1


def test_a_token_that_is_not_allowed_is_an_error(grammars: Grammars) -> None:
    for token in (tokens_of("b")[0], 3, 5, VOCABULARY + 40):
        matcher = grammars.compile("regex", "a{3}").matcher()
        with pytest.raises(MlxtpError, match="cannot continue"):
            matcher.accept(token)
        assert not matcher.finished


@pytest.mark.parametrize("rules", ['start: "a" x\nx: x "b"', 'start: "a" B\nB: /b/ & /c/'])
def test_a_grammar_with_no_way_on_is_a_named_error(grammars: Grammars, rules: str) -> None:
    def go_on() -> None:
        matcher = grammars.compile("lark", rules).matcher()
        matcher.accept(tokens_of("a")[0])
        matcher.mask()

    with refused(MlxtpError, Code.GRAMMAR_STUCK, r"nothing can match it|cannot continue"):
        go_on()


def test_a_step_that_passes_the_limits_is_a_named_error(grammars: Grammars) -> None:
    rules = [f"r{level}: r{level + 1} r{level + 1}" for level in range(40)]
    matcher = grammars.compile("lark", "\n".join(["start: r0", *rules, 'r40: "a"'])).matcher()

    def go_on() -> None:
        for _ in range(100):
            matcher.mask()
            matcher.accept(tokens_of("a")[0])

    with pytest.raises(MlxtpError, match=r"cannot continue .* Too many items"):
        go_on()


def bits_of(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little")


def test_nothing_beyond_the_tokenizer_is_allowed(made: Made) -> None:
    matcher = made(600).compile("regex", "(.|\n)*").matcher()
    words = matcher.mask()
    assert (words.dtype, words.shape) == (np.uint32, (19,))
    bits = bits_of(words)
    assert not bits[VOCABULARY:].any()
    assert bits[:VOCABULARY].sum() > 400
    assert np.array_equal(unpack(words, 600), bits[:600].astype(bool))
    matcher.accept(tokens_of("a")[0])
    assert set(allowed(matcher, 600)) >= EOS


def test_nothing_beyond_the_model_is_allowed(made: Made) -> None:
    words = made(300, frozenset((5, 511))).compile("regex", "[a-z ]*").matcher().mask()
    assert words.shape == (10,)
    bits = bits_of(words)
    assert not bits[300:].any()
    assert bits[5]
    assert bits[tokens_of("a")[0]]


def test_a_grammar_whose_tokens_the_model_lacks_has_no_way_on(made: Made) -> None:
    with pytest.raises(MlxtpError, match="no token of this model"):
        made(8).compile("regex", "abc").matcher().mask()


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_model_without_a_usable_tokenizer_is_named(made: Made, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    held = made(folder=tmp_path)
    held.read()
    with refused(RequestError, Code.NOT_SUPPORTED, "this model does not support grammars"):
        held.compile("json_schema", ANY_OBJECT)


def test_the_tokenizer_that_was_read_at_load_is_used(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    held = made()
    held.read()
    monkeypatch.setattr(grammar_module, "read_tokenizer", None)
    assert held.compile("json_schema", ANY_OBJECT).matcher().mask().any()


def test_a_model_is_not_kept_waiting_by_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose thread may still read a tokenizer. A lock of a property is all instances' in Python 3.11."""
    begun, go_on = threading.Event(), threading.Event()
    read = grammar_module.read_tokenizer

    def slow(folder: Path, vocabulary: int, eos: frozenset[int]) -> Any:
        if vocabulary == VOCABULARY + 1:
            begun.set()
            assert go_on.wait(WAIT_S)
        return read(folder, VOCABULARY, eos)

    monkeypatch.setattr(grammar_module, "read_tokenizer", slow)
    former, new = Grammars(FOLDER, VOCABULARY + 1, EOS), Grammars(FOLDER, VOCABULARY, EOS)
    with ThreadPoolExecutor() as threads:
        reading = threads.submit(former.read)
        try:
            assert begun.wait(WAIT_S)
            threads.submit(new.read).result(WAIT_S / 2)
        finally:
            go_on.set()
            reading.result(WAIT_S)


def test_nothing_is_started_before_the_first_grammar(made: Made, tmp_path: Path) -> None:
    assert made(folder=tmp_path / "nowhere").kept("json_schema", ANY_OBJECT) is None


def test_a_grammar_is_compiled_once_and_the_oldest_goes(made: Made) -> None:
    held = made(max_kept=2)
    first, second = held.compile("regex", "a"), held.compile("regex", "b")
    assert held.compile("regex", "a") is first
    held.compile("lark", 'start: "a"')
    assert held.kept("regex", "b") is None
    assert held.kept("regex", "a") is first
    assert held.compile("regex", "b") is not second
    assert accepts(second, "b")


def test_what_is_kept_has_a_size(made: Made) -> None:
    held = made(max_kept_bytes=64 << 20)
    grammar = held.compile("regex", "a" * 5000)
    assert grammar.size >= 5000
    for number in range(3):
        held._keep("regex", str(number), replace(grammar, size=30 << 20))
    assert [held.kept("regex", text) is not None for text in ("0", "1", "2")] == [False, True, True]


def test_a_grammar_too_large_to_keep_is_refused(made: Made) -> None:
    with pytest.raises(RequestError, match="MiB"):
        made(max_kept_bytes=4000).compile("regex", "a" * 5000)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", "nope", "JSON schema cannot be used: expected"),
        ("json_schema", "true", "must be a JSON object"),
        ("json_schema", '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"if": {}, "x-guidance": {"lenient": true}}', 'Unimplemented keys: ["if"]'),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "not present"),
        ("json_schema", '{"$ref": "#"}', "nothing can match it"),
        ("regex", "(", "regular expression cannot be used: unclosed group"),
        ("regex", "\ud800", "half characters"),
        ("lark", "", "Empty grammar"),
        ("lark", "start: x\nx: x", "nothing can match it"),
        ("regex", "a" * (MAX_GRAMMAR + 1), "the limit is"),
        ("yaml", "", "unknown grammar kind 'yaml'"),
    ],
)
def test_a_bad_grammar_is_refused_in_its_own_words(
    grammars: Grammars, kind: str, text: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.compile(kind, text)
    assert words in caught.value.detail
    assert "\n" not in caught.value.detail
    assert len(caught.value.detail) < MAX_WORDS + 100
    assert caught.value.code is Code.BAD_REQUEST
    assert caught.value.status == 400


PIECES = st.sampled_from(
    ['"a"', "start", ":", "\n", "|", "(", ")", "*", "+", "?", "/a+/", "%json", "{", "}", "[", "]", "{2,9}",
     "x", "A", "&", "~", "<", ">", "<[5]>", "@", "%import common.INT", "%ignore", '"type"', "1", "\\"]
)  # fmt: skip


def try_out(grammars: Grammars, kind: str, text: str) -> None:
    """It is refused, or there is a way to begin."""
    try:
        grammar = grammars.compile(kind, text)
    except RequestError:
        return
    assert grammar.matcher().mask().any()


@settings(max_examples=150)
@given(
    kind=st.sampled_from(["json_schema", "regex", "lark"]),
    text=st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=14).map(" ".join)),
    start=st.booleans(),
)
def test_any_text_is_compiled_or_refused(grammars: Grammars, kind: str, text: str, start: bool) -> None:
    try_out(grammars, kind, f"start: {text}" if start and kind == "lark" else text)


KEYWORDS = st.sampled_from(
    ["type", "properties", "items", "enum", "anyOf", "allOf", "$ref", "required", "minItems", "maxLength",
     "const", "pattern", "additionalProperties", "minimum", "multipleOf", "format", "x-guidance"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100)
@given(schema=st.dictionaries(KEYWORDS, JSON, max_size=4))
def test_any_json_is_a_schema_or_refused(grammars: Grammars, schema: dict[str, Any]) -> None:
    try_out(grammars, "json_schema", json.dumps(schema))


SLOW = json.dumps({"type": "integer", "multipleOf": 999983})
"""Takes some ten seconds to compile; nothing but a deadline stops it."""
DEEP = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(50_000)) + '\nr50000: "a"'
"""Overflows the stack of its compiler."""


def doubling(levels: int) -> str:
    """A schema whose every level holds the one below twice."""
    levels_of: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, levels):
        below = {"$ref": f"#/$defs/d{level - 1}"}
        levels_of[f"d{level}"] = {"anyOf": [{**below, "type": "string"}, {**below, "minLength": level}]}
    return json.dumps({"$defs": levels_of, "$ref": f"#/$defs/d{levels - 1}"})


REFUSED = {
    "slow": ("json_schema", SLOW),
    "a stack overflow": ("lark", DEEP),
    "references that double": ("json_schema", doubling(25)),
    "a hundred thousand positions": ("json_schema", json.dumps({"prefixItems": [{}] * 100_000})),
    "stars of stars": ("regex", "(" * 400 + "a*" + ")*" * 400),
    "optional letters": ("regex", "a?" * 100_000),
    "a terminal that doubles": (
        "lark", "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "a"'
    ),
}  # fmt: skip
TAMED = {
    "counted letters": ("regex", "a{1,1000000}"),
    "a far look back": ("regex", ".*x.{60}"),
    "a long minimum": ("json_schema", '{"type":"string","minLength":1000000000}'),
    "a huge enum": ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(20_000)]})),
    "recursion": ("json_schema", '{"type":"object","additionalProperties":{"$ref":"#"}}'),
}  # fmt: skip


@pytest.fixture(scope="module")
def hasty() -> Iterator[Grammars]:
    with closing(Grammars(FOLDER, VOCABULARY, EOS, deadline_s=2.0)) as held:
        yield held


@pytest.mark.parametrize("name", REFUSED)
def test_an_explosive_grammar_is_refused_and_the_next_one_is_not(hasty: Grammars, name: str) -> None:
    with pytest.raises(RequestError, match="cannot be used") as caught:
        hasty.compile(*REFUSED[name])
    assert len(caught.value.detail) < MAX_WORDS + 100
    assert accepts(hasty.compile("regex", name), name)


@pytest.mark.parametrize("name", TAMED)
def test_what_looks_explosive_but_is_not_can_be_used(hasty: Grammars, name: str) -> None:
    matcher = hasty.compile(*TAMED[name]).matcher()
    dice = random.Random(1)
    for _ in range(20):
        if matcher.finished:
            break
        matcher.accept(dice.choice(allowed(matcher)))
    assert matcher.mask().any()


def counted(busy: Callable[[Callable[[], None]], object]) -> int:
    """Count the rounds of this thread while `busy` has not called what it was given."""
    done = threading.Event()
    busy(done.set)
    rounds = 0
    while not done.wait(0.001):
        rounds += 1
        assert rounds < WAIT_S / 0.001
    return rounds


def test_the_decode_loop_goes_on_while_a_grammar_is_tried(hasty: Grammars) -> None:
    outcomes: list[Grammar | RequestError] = []

    def submit(done: Callable[[], None]) -> None:
        def note(outcome: Grammar | RequestError) -> None:
            outcomes.append(outcome)
            done()

        hasty.submit("json_schema", SLOW, note)

    assert counted(submit) > 100
    assert isinstance(outcomes[0], RequestError)
    assert "longer than 2 s" in outcomes[0].detail


def test_compiling_lets_go_of_the_interpreter() -> None:
    tokenizer = read_tokenizer(FOLDER, VOCABULARY, EOS)

    def busy(done: Callable[[], None]) -> None:
        def run() -> None:
            build(tokenizer, "json_schema", '{"type":"array","items":{"type":"integer","multipleOf":49999}}')
            done()

        threading.Thread(target=run).start()

    assert counted(busy) > 20


def test_submitted_grammars_come_from_another_thread(grammars: Grammars) -> None:
    came: list[tuple[Grammar | RequestError, int]] = []
    finished = threading.Event()

    def note(outcome: Grammar | RequestError) -> None:
        came.append((outcome, threading.get_ident()))
        if len(came) == 3:
            finished.set()

    for text in ("x+", "(", "x+"):
        grammars.submit("regex", text, note)
    assert finished.wait(WAIT_S)
    (first, thread), (bad, _), (again, _) = came
    assert isinstance(first, Grammar)
    assert first is again
    assert first is grammars.kept("regex", "x+")
    assert isinstance(bad, RequestError)
    assert thread != threading.get_ident()


def trial_of(grammars: Grammars) -> Any:
    """The process in which grammars are tried."""
    process = grammars._trial._process
    assert process is not None
    return process


def test_a_trial_that_was_killed_between_two_grammars_is_started_again(grammars: Grammars) -> None:
    grammars.compile("regex", "before")
    process = trial_of(grammars)
    process.kill()
    process.wait(WAIT_S)
    assert accepts(grammars.compile("regex", "after"), "after")


def test_a_trial_knows_no_secrets(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    grammars._trial.close()
    grammars.compile("regex", "secret")
    assert "HF_TOKEN" not in psutil.Process(trial_of(grammars).pid).environ()


def test_closing_ends_what_is_being_tried(made: Made) -> None:
    held = made(deadline_s=WAIT_S)
    held.compile("regex", "a")
    process = trial_of(held)
    running = held.submit("json_schema", SLOW, lambda _: None)
    waiting = held.submit("regex", "b", lambda _: None)
    held.close()
    assert running.result(WAIT_S) is None
    assert waiting.cancelled()
    assert process.returncode is not None


WEATHER = Tool(
    "weather",
    parameters={
        "properties": {"day": {"$ref": "#/$defs/day"}},
        "required": ["day"],
        "additionalProperties": False,
        "$defs": {"day": {"enum": ["now", "later"]}},
    },
)
TOOLS = [
    WEATHER,
    Tool('odd "name" é', parameters={"type": "object", "properties": {"n": {"type": "integer"}}}),
    Tool("stop"),
]


def of_calls(
    grammars: Grammars, tools: list[Tool], style: Any = JSON_STYLE, *marks: Any, **more: Any
) -> Grammar:
    """The grammar of calls of these tools."""
    return grammars.compile(
        "lark", call_grammar(relaxed(checked_tools(tools), True)[0], style, *marks, **more)
    )


def test_a_tool_call_is_valid_for_the_tool_it_names(grammars: Grammars) -> None:
    style = replace(JSON_STYLE, before='<call>\n{"name": "', after='}é"</call>')
    grammar = of_calls(grammars, TOOLS, style)
    closed = {"type": "object", "additionalProperties": False}
    odd = {**closed, "properties": {"n": {"type": "integer"}}}
    schemas: dict[str, Mapping[str, Any]] = {"weather": WEATHER.schema, 'odd "name" é': odd, "stop": closed}
    seen = set()

    def check(text: str) -> bool:
        assert text.startswith("<call>\n")
        assert text.endswith('é"</call>')
        call = json.loads(text.removeprefix("<call>\n").removesuffix('é"</call>'))
        assert call.keys() == {"name", "arguments"}
        seen.add(call["name"])
        return isinstance(call["arguments"], dict) and is_valid(schemas[call["name"]], call["arguments"])

    dice = random.Random(2)
    assert all(check(walk(grammar.matcher(), dice, check)) for _ in range(25))
    assert seen == schemas.keys()


def test_a_required_tool_is_the_only_one(grammars: Grammars) -> None:
    grammar = of_calls(grammars, TOOLS, required="stop")
    assert accepts(grammar, '{"name": "stop", "arguments": {}}')
    assert not accepts(grammar, '{"name": "weather", "arguments": {"day": "now"}}')
    assert text_of(list(grammar.matcher().forced(64))).startswith('{"name": "stop", "arguments": {')


def test_a_call_may_open_with_a_special_token(grammars: Grammars) -> None:
    marks = [("<open>", 4), ("<close>", 2)]
    style = replace(JSON_STYLE, before='<open>{"name": "', after="}<close>")
    matcher = of_calls(grammars, TOOLS, style, marks).matcher()
    assert allowed(matcher) == [4]
    for token in (4, *tokens_of('{"name": "stop", "arguments": {}}')):
        assert token in allowed(matcher)
        matcher.accept(token)
    assert allowed(matcher) == [2]


@pytest.mark.parametrize(
    ("tools", "required", "words"),
    [
        ([Tool("x", parameters={"const": float("nan")})], None, "not a JSON schema"),
        ([WEATHER, WEATHER], None, "same name"),
        ([WEATHER], "other", "no tool named 'other'"),
    ],
)
def test_bad_tools_are_named(tools: list[Tool], required: str | None, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        call_grammar(checked_tools(tools), JSON_STYLE, required=required)
    assert words in caught.value.detail
    assert caught.value.param is not None
    assert caught.value.param.startswith("tool")


@pytest.mark.parametrize("beside", [{}, {"otherwise": ("", '{"type": "integer"}')}])
def test_a_pattern_that_cannot_be_enforced_does_not_make_a_tool_useless(
    grammars: Grammars, beside: dict[str, Any]
) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}, "required": ["a"]}
    style = replace(JSON_STYLE, before='<call>{"name": "')
    grammar = of_calls(grammars, [Tool("x", parameters=schema)], style, **beside)
    assert accepts(grammar, '<call>{"name": "x", "arguments": {"a": "b"}}')
    assert not accepts(grammar, '<call>{"name": "x", "arguments": {"a": 1}}')
    assert accepts(grammar, "5") == bool(beside)


def test_a_panic_is_the_error_of_its_grammar(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As libraries in Rust raise it."""

    def panic(*_arguments: object) -> None:
        raise PanicException("index out of bounds")

    outcomes: list[object] = []
    monkeypatch.setattr(grammars, "compile", panic)
    grammars.submit("regex", "a", outcomes.append).result()
    [outcome] = outcomes
    assert isinstance(outcome, RequestError)
    assert "index out of bounds" in outcome.detail


def test_answers_in_a_grammar_share_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(10_000))
    monkeypatch.setattr(grammar_module.time, "thread_time", lambda: 11 * grammar_module.STEP_S * next(times))
    shared = grammar_module.CpuAllowance()
    for _ in range(int(grammar_module.BURST_S / (10 * grammar_module.STEP_S)) - 1):
        with shared.step():
            pass
    with pytest.raises(MlxtpError, match="CPU time") as caught, shared.step(), shared.step():
        pass
    assert caught.value.code is Code.GRAMMAR_STUCK
    with pytest.raises(MlxtpError), shared.step():
        pass


def test_an_ambiguous_grammar_ends_and_leaves_others_alone(grammars: Grammars) -> None:
    rows = [grammars.compile("lark", "start: e\ne: e e | /[a-z]/ | e e e").matcher() for _ in range(16)]

    def answer() -> None:
        for row in rows * 200:
            row.accept(next(token for token in allowed(row) if token not in EOS))

    with pytest.raises(MlxtpError, match=r"CPU time|items"):
        answer()
    assert allowed(grammars.compile("json_schema", ANY_OBJECT).matcher())
