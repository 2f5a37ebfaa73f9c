from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.text.json_mender import JSON_QUOTES, PYTHON_QUOTES, JsonMender, mended

from .test_answers_stops import cut, quick, sizes

GEMMA = ('<|"|>', '"', "'")


def mend(
    parts: Sequence[str], quotes: Sequence[str] = JSON_QUOTES, stops: Sequence[str] = ()
) -> tuple[str, str, bool]:
    """Return the JSON, the text after it, and whether something was left out or guessed."""
    mender, made, rest = JsonMender(quotes, stops), "", ""
    for part in parts:
        if mender.done:
            rest += part
        else:
            made += mender.push(part)
    made += "" if mender.done else mender.close()
    return made, mender.rest + rest, mender.broken


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(['"', "\\", '"}', "]", ",", "a\nb", "'", ', "x": ']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@quick
@given(
    st.dictionaries(st.text(max_size=4), values, max_size=3), sizes, st.booleans(), st.sampled_from([None, 1])
)
def test_json_comes_out_letter_by_letter_however_it_is_cut(
    value: dict[str, object], steps: list[int], ascii_: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_, indent=indent)
    assert mend(cut(f"{text} rest", steps)) == (text, " rest", False)
    assert mended(text) == text


MENDED = {
    '{"a": "x\n\ty"}': '{"a": "x\\n\\ty"}',
    '{"a": 1,}': '{"a": 1}',
    '{"a": [1, 2, ], }': '{"a": [1, 2]}',
    '{"a": 1 "b": 2}': '{"a": 1 ,"b": 2}',
    '{"a": {"b": 1}': '{"a": {"b": 1}}',
    '{"a": "x': '{"a": "x"}',
    '{"a": ': '{"a": null}',
    '{"a": "say "hi" now", "b": 1}': '{"a": "say \\"hi\\" now", "b": 1}',
    '{"a": "say "hi", then go"}': '{"a": "say \\"hi\\", then go"}',
    '{"a": "\\d+\\.x"}': '{"a": "\\\\d+\\\\.x"}',
    "{'a': 'it\\'s', 'b': True, 'c': None}": '{"a": "it\'s", "b": true, "c": null}',
    '{a: 1, "b": New York}': '{"a": 1, "b": "New York"}',
    '{"a": 01, "b": .5, "c": NaN}': '{"a": "01", "b": 0.5, "c": null}',
    '{"a": +12345678901234567890}': '{"a": 12345678901234567890}',
    '{"a": 1_000_000_000_000_000_001}': '{"a": 1000000000000000001}',
    '{"a": +1e999}': '{"a": "+1e999"}',
    "{": "{}",
}


@pytest.mark.parametrize("text", MENDED)
def test_what_a_model_forgot_is_mended(text: str) -> None:
    for seed in range(5):
        assert mend(cut(text, Random(seed).choices(range(1, 5), k=30))) == (MENDED[text], "", False)


@pytest.mark.parametrize(
    ("text", "quotes", "expected", "rest"),
    [
        ('(cmd="echo \\"a\\"\nls", n=1)]', PYTHON_QUOTES, '{"cmd":"echo \\"a\\"\\nls", "n":1}', "]"),
        (
            "(a='x', b=[1, (2, 3)], c={'k': True})",
            PYTHON_QUOTES,
            '{"a":"x", "b":[1, [2, 3]], "c":{"k": true}}',
            "",
        ),
        ('(a="""say "hi\n"""")', PYTHON_QUOTES, '{"a":"say \\"hi\\n\\""}', ""),
        (
            '{user-id:<|"|>7 "x" \\d<|"|>,l:[1,<|"|>y<|"|>]}!',
            GEMMA,
            '{"user-id":"7 \\"x\\" \\\\d","l":[1,"y"]}',
            "!",
        ),
    ],
)
def test_objects_in_the_forms_of_other_families(
    text: str, quotes: Sequence[str], expected: str, rest: str
) -> None:
    for seed in range(5):
        steps = Random(seed).choices(range(1, 5), k=60)
        assert mend(cut(text, steps), quotes) == (expected, rest, False)


def test_it_stops_where_a_call_ends_but_not_in_a_string() -> None:
    text = '{"a": "</call> x", "b": {"c": 1</call>more'
    for size in range(1, 8):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert mend(parts, stops=("</call>",)) == ('{"a": "</call> x", "b": {"c": 1}}', "</call>more", False)


def test_the_object_of_a_key_may_stand_apart() -> None:
    mender = JsonMender(apart=("arguments", "parameters"))
    made = mender.push('{"x": {"arguments": {}}, "arguments": {"a": [{}], ')
    assert not mender.inner_done
    made += mender.push('}, "id": "i", "parameters": {}} rest')
    assert made == '{"x": {"arguments": {}}, "arguments": null, "id": "i", "parameters": {}}'
    assert ("".join(mender.inner), mender.inner_done, mender.rest) == ('{"a": [{}]}', True, " rest")


SIGNS = [*"{}[](),:=\"'\\ \n ab1.-", '<|"|>', "true", '"a": ', "</e>", "\\u00", '"""']


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_is_json_in_the_end_and_the_same_in_any_pieces(seed: int) -> None:
    random = Random(seed)
    for _ in range(300):
        text = random.choice("{[(") + "".join(random.choices(SIGNS, k=random.randrange(1, 25)))
        quotes, stops = random.choice((JSON_QUOTES, PYTHON_QUOTES, GEMMA)), random.choice(((), ("</e>",)))
        whole = mend([text], quotes, stops)
        assert mend(list(text), quotes, stops) == whole
        json.loads(whole[0], parse_constant=pytest.fail)


def test_a_container_with_more_than_itself_is_none() -> None:
    assert mended('{"a": 1} x') == mended('{"a": 1]}') == ""
