"""JSON, mended piece by piece from what models write instead. Pure.

Models leave newlines in strings, or forget quotes, commas and brackets. Some write Python, `key=value` in
parentheses, or strings in other quotes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from enum import Enum, auto

#: Quotes of strings without escapes, which end only with the same quote.
PLAIN_QUOTES = ('<|"|>', "<escape>")
JSON_QUOTES = ('"', "'")
PYTHON_QUOTES = ('"""', "'''", '"', "'")

_LONGEST_WORD = 256  # characters held until a number, word or unquoted key ends
_LETTERS = re.compile(r'[^"\'\\\x00-\x1f]+')
_BLANKS = re.compile(r"\s*")
_WORD = re.compile(r"[^,\[\](){}\n]+")
_KEY = re.compile(r"""[^\s"'<,\[\](){}:=][^"<,\[\](){}:=\n]*(?=[:=])""")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEFORE = re.compile(rf"{_NUMBER.pattern}(?=\s+[\"'])")  # a comma is missing after it
_NUMBER_OF_PYTHON = re.compile(r"[+-]?(?:[1-9][0-9_]*|0)?\.?[0-9]+(?:[eE][+-]?[0-9]+)?|[+-]?[1-9][0-9_]*\.?")
_WORDS = {
    "true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null",
    "nan": "null", "NaN": "null", "Infinity": "null", "-Infinity": "null", "undefined": "null",
}  # fmt: skip
_ESCAPES = frozenset('"\\/bfnrt')
_CLOSERS = {"{": "}", "[": "])", "(": ")"}
_END = {"{": "}", "[": "]", "(": "}"}  # in JSON


class _Expect(Enum):
    VALUE = auto()
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # a comma, or the end of the container


class _OpenString:
    """A string in a container that the bracket `inside` opened. `bare`: keys may lack quotes."""

    def __init__(self, quote: str, is_key: bool, inside: str, stops: Sequence[str], bare: bool) -> None:
        self.is_key = is_key
        self.letters: list[str] = []
        self.done = False
        self._quote = quote
        self._inside = inside
        self._stops = stops
        self._bare = bare

    def mend(self, text: str, at: int, made: list[str], final: bool) -> int:
        """Read from `at`. Return where it stopped; -1 to wait for more text."""
        quote = self._quote
        if quote in PLAIN_QUOTES:
            return self._plain(text, at, made, final)
        if letters := _LETTERS.match(text, at):
            return self._add(letters[0], made, letters.end())
        if text[at] == "\\":
            return self._escape(text, at, made, final)
        if text.startswith(quote, at):
            if (ends := self._ends(text, at + len(quote), final)) is not False:
                self.done = ends is True
                return at + len(quote) if ends else -1
        elif not final and quote.startswith(text[at:]):
            return -1
        return self._add(text[at] if text[at] == "'" else json.dumps(text[at])[1:-1], made, at + 1)

    def _add(self, letters: str, made: list[str], at: int) -> int:
        made.append(letters)
        if self.is_key:
            self.letters.append(letters)
        return at

    def _plain(self, text: str, at: int, made: list[str], final: bool) -> int:
        end = text.find(self._quote, at)
        safe = end if end >= 0 else len(text) if final else max(at, len(text) - len(self._quote) + 1)
        self._add(json.dumps(text[at:safe], ensure_ascii=False)[1:-1], made, safe)
        self.done = end >= 0
        return end + len(self._quote) if end >= 0 else safe if safe > at else -1

    def _escape(self, text: str, at: int, made: list[str], final: bool) -> int:
        wanted = 6 if text.startswith("u", at + 1) else 4 if text.startswith("x", at + 1) else 2
        if len(text) < at + wanted and not final:
            return -1
        sign, digits = text[at + 1 : at + 2], text[at + 2 : at + wanted]
        if wanted > 2 and len(digits) == wanted - 2 and all(each in _HEX for each in digits):
            return self._add(f"\\u{digits:0>4}", made, at + wanted)
        if sign == "'":
            return self._add("'", made, at + 2)
        if sign in _ESCAPES and sign:
            return self._add(f"\\{sign}", made, at + 2)
        return self._add("\\\\", made, at + 1)  # not an escape: a path, or a regular expression

    def _ends(self, text: str, at: int, final: bool) -> bool | None:
        """Return True if JSON can go on after a quote, which else lacks its escape; None if unclear yet."""
        at = skip_blanks(text, at)
        if at == len(text):
            return True if final else None
        if self.is_key:
            return text[at] in ":=,})"
        if text[at] in "}])" or any(text.startswith(stop, at) for stop in self._stops):
            return True
        if text[at] != ",":
            return None if not final and _may_stop(self._stops, text[at:]) else False
        at = skip_blanks(text, at + 1)
        if at == len(text):
            return True if final else None
        bare = self._bare and (text[at].isalpha() or text[at] == "_")
        return self._inside == "[" or bare or text[at] in "}),\"'<"


class JsonMender:
    """Reader of one container. An initial `(` opens an object whose keys need no quotes.

    `quotes` open strings; with a common beginning the longest is first. `stops` end the container, except in
    a string. The first top-level object under a key in `apart` goes to `inner`, and null takes its place.
    """

    def __init__(
        self, quotes: Sequence[str] = JSON_QUOTES, stops: Sequence[str] = (), apart: Sequence[str] = ()
    ) -> None:
        self.done = False
        self.inner: list[str] = []
        self.broken = False  #: Text was dropped or guessed, because no JSON could hold it.
        self.rest = ""  #: text after the end
        self._quotes = quotes
        self._stops = stops
        self._apart = apart
        self._open: list[str] = []
        self._expect = _Expect.VALUE
        self._string: _OpenString | None = None
        self._key = ""  # the latest top-level key
        self._comma = ""  # with the blanks after it; written once something follows
        self._held = ""
        self._outer: list[str] = []  # JSON to return
        self._made = self._outer  # or `inner` while reading that

    @property
    def inner_done(self) -> bool:
        return bool(self.inner) and self._made is self._outer

    @property
    def in_string(self) -> bool:
        return self._string is not None

    def push(self, text: str, final: bool = False) -> str:
        """Return the JSON that is certain by now. `final`: no text follows."""
        text, at = self._held + text, 0
        while at < len(text) and not self.done:
            if (string := self._string) is None:
                after = self._between(text, at, final)
            else:
                after = string.mend(text, at, self._made, final)
                if string.done:
                    self._end_string(string)
            if after < 0:
                break
            at = after
        if self.done:
            self.rest, self._held = text[at:], ""
        else:
            self._held = text[at:]
        return self._taken()

    def close(self) -> str:
        made = "" if self.done else self.push("", final=True)
        if self._string is not None:
            self._end_string(self._string)
        self._end_all()
        return made + self._taken()

    def _taken(self) -> str:
        made = "".join(self._outer)
        self._outer.clear()
        return made

    # Each of the following reads from `at` and returns where it stopped; -1 to wait for more text.

    def _between(self, text: str, at: int, final: bool) -> int:
        if text[at].isspace():
            return self._blank(text, at)
        if self._open and any(text.startswith(stop, at) for stop in self._stops):
            self._end_all()
            return at
        if self._open and not final and _may_stop(self._stops, text[at:]):
            return -1
        if text[at] in "}])":
            return self._end_container(text[at], at)
        if self._expect is _Expect.NEXT:
            self._comma = ","
            self._expect = _Expect.VALUE if self._open[-1] == "[" else _Expect.KEY
            return at + (text[at] == ",")
        return self._colon(text, at) if self._expect is _Expect.COLON else self._value(text, at, final)

    def _blank(self, text: str, at: int) -> int:
        end = skip_blanks(text, at)
        blanks = "".join(each if each in " \t\r\n" else " " for each in text[at:end])
        if self._comma:
            self._comma += blanks
        else:
            self._made.append(blanks)
        return end

    def _value(self, text: str, at: int, final: bool) -> int:
        is_key = self._expect is _Expect.KEY
        if (quote := self._opening_quote(text, at, final)) is None:
            return -1
        if quote:
            self._begin('"')
            inside = self._open[-1] if self._open else ""
            bare = inside == "(" or any(quote in PLAIN_QUOTES for quote in self._quotes)
            self._string = _OpenString(quote, is_key, inside, self._stops, bare)
            return at + len(quote)
        if is_key:
            return self._bare_key(text, at, final)
        if text[at] in "{[(":
            return self._begin_container(text[at], at)
        return self._word(text, at, final)

    def _opening_quote(self, text: str, at: int, final: bool) -> str | None:
        """Return the quote at this place, or ""; None if that is unclear yet."""
        for quote in self._quotes:
            if text.startswith(quote, at):
                return quote
            if not final and quote.startswith(text[at:]):
                return None
        return ""

    def _begin_container(self, sign: str, at: int) -> int:
        if sign == "{" and len(self._open) == 1 and self._key in self._apart and not self.inner:
            self._made.append("null")
            self._made = self.inner
        if sign == "(" and self._open:
            sign = "["  # a Python tuple
        self._open.append(sign)
        self._expect = _Expect.VALUE if sign == "[" else _Expect.KEY
        self._begin("[" if sign == "[" else "{")
        return at + 1

    def _end_container(self, sign: str, at: int) -> int:
        ends = [i for i, each in enumerate(self._open) if sign in _CLOSERS[each]]
        if not ends:
            self.broken = True
            return at + 1
        self.broken = self.broken or len(self._open) > ends[-1] + 1
        self._end_all(ends[-1])
        return at + 1

    def _end_all(self, depth: int = 0) -> None:
        """Close all containers down to this depth, and complete them. Drop a trailing comma."""
        self._comma = ""
        if self._expect is _Expect.COLON:
            self.broken = True
            self._made.append(": null")
        elif self._expect is _Expect.VALUE and self._open and self._open[-1] != "[":
            self._made.append("null")
        while len(self._open) > depth:
            self._made.append(_END[self._open.pop()])
            if len(self._open) == 1:
                self._made = self._outer
        self._expect = _Expect.NEXT
        self.done = not self._open

    def _colon(self, text: str, at: int) -> int:
        self._expect = _Expect.VALUE
        if text[at] in ":=":
            self._made.append(":")
            return at + 1
        self.broken = True
        if text[at] == ",":
            self._made.append(": null")
            self._expect = _Expect.NEXT
        else:
            self._made.append(":")
        return at

    def _begin(self, sign: str) -> None:
        self._made += [self._comma, sign]
        self._comma = ""

    def _bare_key(self, text: str, at: int, final: bool) -> int:
        if key := _KEY.match(text, at):
            word = key[0].strip()
            if len(self._open) == 1:
                self._key = word
            self._begin(json.dumps(word, ensure_ascii=False))
            self._expect = _Expect.COLON
            return key.end()
        waits = text[at] not in ",:=" and not final and len(text) - at < _LONGEST_WORD
        if waits and _KEY.match(f"{text}:", at):
            return -1
        self.broken = self.broken or text[at] != ","
        return at + 1

    def _word(self, text: str, at: int, final: bool) -> int:
        word = _NUMBER_BEFORE.match(text, at) or _WORD.match(text, at)
        if word is None:
            if text[at] == "," and self._open[-1] != "[":  # the value is missing
                self._made.append("null")
                self._expect = _Expect.NEXT
                return at
            self.broken = self.broken or text[at] != ","
            return at + 1
        if word.end() == len(text) and not final and len(word[0]) < _LONGEST_WORD:
            return -1
        end = word.end()
        for stop in self._stops:
            if (found := text.find(stop, at, end)) > 0:
                end = found
        self._begin(_json_word(text[at:end].strip()))
        self._expect = _Expect.NEXT
        return end

    def _end_string(self, string: _OpenString) -> None:
        self._made.append('"')
        self._string = None
        self._expect = _Expect.COLON if string.is_key else _Expect.NEXT
        if string.is_key and len(self._open) == 1:
            self._key = "".join(string.letters)


_HEX = frozenset("0123456789abcdefABCDEF")


def _may_stop(stops: Sequence[str], text: str) -> bool:
    return any(stop.startswith(text) for stop in stops)


def skip_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None
    return found.end()


def _json_word(word: str) -> str:
    """Return an unquoted value as JSON: a number, one of JSON's words, or a string."""
    if _NUMBER.fullmatch(word):
        return word
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER_OF_PYTHON.fullmatch(word) and not word.lstrip("+-").startswith("0"):
        plain = word.replace("_", "").removeprefix("+")
        number = float(plain)
        if plain.removeprefix("-").isdecimal():
            return plain
        if math.isfinite(number):
            return json.dumps(int(number) if number.is_integer() and "." not in word else number)
    return json.dumps(word, ensure_ascii=False)


def mended(text: str, quotes: Sequence[str] = JSON_QUOTES) -> str:
    """Return a container as JSON; "" if it is no container, more text follows, or parts had to be guessed."""
    if not text.startswith(("{", "[", "(")):
        return ""
    mender = JsonMender(quotes)
    made = mender.push(text)
    made += mender.close()
    return "" if mender.broken or mender.rest.strip() else made
