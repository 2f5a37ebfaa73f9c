"""Each codec takes what lies within its limits, and says of all else what it expected."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import pytest

from mlxtp.cluster.state_file import RosterSaved
from mlxtp.wire import codecs
from mlxtp.wire.codecs import U32, FieldCodec, integers, located, text, texts
from mlxtp.wire.messages import Ping

NUMBER = codecs.integer(1, 3)


@dataclass(slots=True)
class Pair:
    one: int = codecs.holding(NUMBER)
    two: int = codecs.holding(NUMBER)


@dataclass(slots=True)
class Empty: ...


def words(*items: float, kind: str = "i") -> bytes:
    return struct.pack(f"<{len(items)}{kind}", *items)


NAN, INF = float("nan"), float("inf")
PAIR = {"one": 1, "two": 3}
LONG = "a string of at most {} characters"
GROUP = "a string of at most 7 characters, the id of a group such as tiny#0"
Rows = list[tuple[FieldCodec, list[Any], dict[str, list[Any]]]]
ROWS: Rows = [
    (NUMBER, [1, 3], {"an integer from 1 to 3": [0, 4, True, 1.0, "1", None, [1]]}),
    (codecs.number(0, 1), [0.0, 1, 0.5], {"a number from 0 to 1": [-0.1, 1.1, NAN, INF, -INF, 1, True, {}]}),
    (codecs.boolean(), [True, False], {"true or false": [0, 1, None, "true"]}),
    (text(2), ["", "ab"],
     {LONG.format(2): ["abc", b"ab", None], "printable characters": [*"\n\x9b\u202e\u2066\u2028\0\x7f"]}),
    (text(2, raw=True), ["\n"], {LONG.format(2): ["abc", b"ab"]}),
    (text(2, cut=True), ["ab"], {LONG.format(2): ["abc", 1]}),
    (codecs.group_id(7), ["", "tiny#0", "a#b#99"],
     {GROUP: ["tiny", "#1", "a#01", "a#100", None], LONG.format(7): ["tinytiny#0"]}),
    (codecs.choice("a", "b"), ["a", "b"], {"one of a, b": ["c", "a, b", 1, None, ["a"]]}),
    (codecs.binary(1, 2), [b"x", b"xy"], {"1 to 2 bytes": [b"", b"xyz", "x", None]}),
    (integers(-1, 2, 1, 2), [(-1,), (2, -1)],
     {"1 to 2 packed 32-bit integers": [b"", b"\0" * 3, b"\0" * 12, "", None],
      "integers from -1 to 2": [words(3), words(-2), words(0, 3), words(0, -2), words(3, 0)]}),
    (integers(-1, 2**31 - 1, 0, 2), [(), (-1, 2**31 - 1)], {}),
    (integers(0, 2**31, 0, 2), [(), (2**31,)], {}),
    (integers(0, U32, 0, 70), [(), (U32,), (U32, 0) * 32, (7,) * 65, (7,) * 70], {}),
    (codecs.numbers(-1, 2, 2), [(), (-1.0,), (2.0, 0.5)],
     {"at most 2 packed 32-bit floats": [b"\0" * 3, b"\0" * 12, "", None],
      "numbers from -1 to 2": [words(*each, kind="f") for each in [(NAN,), (INF,), (-1.5,), (0, 3)]]}),
    (codecs.record(Pair), [Pair(1, 3)],
     {"a map of exactly the fields one, two": [[], {}, {"one": 1}, PAIR | {"three": 3}, b"", None],
      "two: expected a value, which is missing": [{"one": 1, "three": 3}],
      "two: expected an integer from 1 to 3": [PAIR | {"two": 4}]}),
    (codecs.record(Empty), [Empty()], {"a map of exactly the fields (none)": [{"one": 1}]}),
    (codecs.records(Pair, 1, 2), [(Pair(1, 3),) * 2],
     {"a list of 1 to 2 Pair": [[], [PAIR] * 3, (PAIR,), None],
      "two: expected an integer from 1 to 3": [[PAIR | {"two": 4}]]}),
    (codecs.records(Pair, 0, 2), [(), (Pair(1, 3),)], {}),
    (texts(2, 3), [(), ("a", "abc")],
     {"a list of at most 2 strings": [["a"] * 3, "ab"], LONG.format(3): [["abcd"]],
      "printable characters": [["\n"]]}),
    (texts(2, 3, raw=True), [("\n",)], {}),
    (codecs.joined(2, 3), [(), ("a",), ("abc", "abc")],
     {LONG.format(8): ["x" * 9, 1], "a list of at most 2 strings": ["a,b,c"], LONG.format(3): ["abcd"]}),
    (codecs.row(), [RosterSaved(7)],
     {"a row of a known kind": [[], {}, {"": True}, {"": "x"}, {"": [1]}, {"": 0}, {"": Ping.TYPE}]}),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "lawful", "unlawful"), ROWS)
def test_what_a_codec_takes(codec: FieldCodec, lawful: list[Any], unlawful: dict[str, list[Any]]) -> None:
    for value in lawful:
        assert codec.from_wire(codec.to_wire(value)) == value
    for expected, values in unlawful.items():
        for value in values:
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared as a whole
                codec.from_wire(value)
            assert str(caught.value) == expected, value


def test_what_a_codec_says_does_not_move_the_place_of_a_fault() -> None:
    fault = ValueError("one of these: expected ones")
    assert located("Beat", fault) == "Beat: expected one of these: expected ones"
