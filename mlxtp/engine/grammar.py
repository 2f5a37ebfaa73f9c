"""Grammars of answers: masks of the tokens that may come next. On rank 0 alone, without MLX.

`Grammars` compiles the grammars of requests and caches them; a `Grammar` makes one `Matcher` for each
request. The decode loop gets a mask from the matcher before it chooses a token, and passes the choice back.

JSON is written on one line, with the separators that `x-guidance` of its schema names, `", "` and `": "` by
default. Schemas follow JSON Schema. Properties that a schema does not name are allowed unless
`additionalProperties` forbids them. Keywords that cannot be enforced are refused. Properties come in the
schema's order.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import Code, MlxtpError, RequestError, is_library_error
from .grammar_sandbox import GrammarSandbox, build, read_tokenizer, readable, refused

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

DEADLINE_S = 5.0  # seconds that one grammar may take to compile
MAX_KEPT = 64
MAX_KEPT_BYTES = 256 << 20

_WORD_BITS = 32

PLAIN_TEXT = r'[^"\\{}\[\],:]+'
INSIDE_STRINGS = r'[^"]+'
# How a text ends in a Lark grammar, as `text/tool_grammar.py` writes it.
_SUFFIX = re.compile(r'\[suffix=("(?:[^"\\]|\\.)+")\]|\btext <\[(\d+)\]>')
CLOSING = '}],:"@-./0123456789tfn{['  # in this order, so that an object or a list ends before it grows

GrammarCallback = Callable[["Grammar | RequestError"], None]


@dataclass(frozen=True, slots=True)
class Hints:
    """Tokens of one vocabulary that help to end JSON; -1 for one that it lacks.

    `closing` are the tokens to try outside strings, the most helpful first. `plain` is the mask of text
    without JSON's own characters, such as a quote or a brace. `inside` is the mask of text without a quote,
    `whole` the mask of tokens that end with a whole character.

    `suffixes` are token sequences that end a text in this grammar. `text` is the mask of tokens that add
    nothing behind such an end. Where there are any, `plain` has digits only: letters name optional fields.
    """

    quote: int
    letter: int
    newline: int
    closing: tuple[int, ...]
    plain: NDArray[np.uint32]
    inside: NDArray[np.uint32]
    whole: NDArray[np.uint32]
    text: NDArray[np.uint32]
    suffixes: tuple[tuple[int, ...], ...] = ()


class Matcher:
    """Position of one answer in its grammar. Every chosen token must be accepted, in order."""

    def __init__(
        self, state: LLMatcher, tokens: int, vocabulary: int, hints: Hints, grammar_tokens: int = 0
    ) -> None:
        self._state = state
        self._tokens = tokens
        self._vocabulary = vocabulary
        self.hints = hints
        self.grammar_tokens = grammar_tokens  #: Length of the grammar's own text.

    def mask(self) -> NDArray[np.uint32]:
        """Return the tokens that may come next, [ceil(vocabulary / 32)] words.

        Token t is bit t % 32 of word t / 32. End tokens are in it where the answer may end, alone where it
        must. Raises MlxtpError where no token may come: the grammar has no continuation, or its next step
        exceeds a limit of time or memory.
        """
        words = np.full(-(-self._tokens // _WORD_BITS), 0xFFFFFFFF, np.uint32)
        self._state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        words = words[: -(-self._vocabulary // _WORD_BITS)]
        if rest := self._vocabulary % _WORD_BITS:
            words[-1] &= np.uint32((1 << rest) - 1)
        if not words.any():
            raise stuck("no token of this model can come next")
        return words

    def accept(self, token: int) -> None:
        """Advance by `token`. Raises MlxtpError, now and later, for one that `mask` does not allow."""
        self._state.consume_token(token)
        self._check()

    def forced(self, limit: int) -> tuple[int, ...]:
        """Return the next tokens that are the only choice, at most `limit`. They are not accepted yet."""
        return tuple(self._state.compute_ff_tokens()[:limit])

    @property
    def finished(self) -> bool:
        """True when only an end token may follow, or one was accepted."""
        return self._state.is_stopped() and not self._state.is_error()

    @property
    def complete(self) -> bool:
        """True where the text may end."""
        return self._state.is_accepting() or self.finished

    def copy(self) -> Matcher:
        """Return an independent matcher at the same position."""
        state = self._state.deep_copy()
        return Matcher(state, self._tokens, self._vocabulary, self.hints, self.grammar_tokens)

    def _check(self) -> None:
        if self._state.is_error():
            raise stuck(readable(self._state.get_error()))


def stuck(why: str) -> MlxtpError:
    """Return the error of an answer that cannot continue within its grammar."""
    return MlxtpError(f"the answer cannot continue within its grammar: {why}", Code.GRAMMAR_STUCK)


def unpack(words: NDArray[np.uint32], vocabulary: int) -> NDArray[np.bool_]:
    """Return the bits of a mask as booleans [vocabulary]."""
    little = words.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(little, count=vocabulary, bitorder="little").view(np.bool_)


@dataclass(frozen=True, slots=True)
class Grammar:
    """Compiled grammar; immutable. `size`: approximate memory, in bytes."""

    kind: str
    text: str
    size: int
    _start: LLMatcher
    _tokens: int
    _vocabulary: int
    _hints: Hints
    _length: int  # of the text, in tokens

    def matcher(self) -> Matcher:
        """Return a new matcher at the grammar's start."""
        state = self._start.deep_copy()
        return Matcher(state, self._tokens, self._vocabulary, self._hints, self._length)


class Grammars:
    """Grammars of one loaded model. Nothing is read or started before the first request.

    `vocabulary` is the length of the model's logits, `eos` its end tokens; each of them may end an answer.
    """

    def __init__(
        self,
        folder: Path,
        vocabulary: int,
        eos: frozenset[int],
        *,
        deadline_s: float = DEADLINE_S,
        max_kept: int = MAX_KEPT,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._folder = folder
        self._vocabulary = vocabulary
        self._eos = eos
        self._max_kept = max_kept
        self._max_kept_bytes = max_kept_bytes
        self._trial = GrammarSandbox(folder, vocabulary, eos, deadline_s)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._known: tuple[LLTokenizer, Hints] | None = None
        self._kept: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._compiling = threading.Lock()
        self._looking = threading.Lock()

    def kept(self, kind: str, text: str) -> Grammar | None:
        """Return the grammar if it is compiled already, without waiting."""
        with self._looking:
            grammar = self._kept.get((kind, text))
            if grammar is not None:
                self._kept.move_to_end((kind, text))
            return grammar

    def read(self) -> None:
        """Read the tokenizer while a model loads. Later it would stop all requests for a second or two.

        Without a usable tokenizer, the first grammar is refused.
        """
        with contextlib.suppress(RequestError):
            self._tokenizer_and_hints()

    def compile(self, kind: str, text: str) -> Grammar:
        """Return the grammar, compiled unless it is cached.

        Raises RequestError when the text is wrong, takes too long or too much memory, or the model has no
        tokenizer.
        """
        with self._compiling:
            return self.kept(kind, text) or self._keep(self._compile(kind, text))

    def submit(self, kind: str, text: str, done: GrammarCallback) -> Future[None]:
        """Compile in the background; the thread there calls `done` with the outcome.

        Grammars are compiled in the order of submission. One that has not begun can be cancelled.
        """
        return self._thread.submit(self._run, kind, text, done)

    def close(self) -> None:
        """Stop. The grammar in the sandbox is refused; waiting ones are cancelled and never `done`."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._trial.kill()
        with self._compiling:
            self._trial.close()

    def _run(self, kind: str, text: str, done: GrammarCallback) -> None:
        try:
            outcome: Grammar | RequestError = self.compile(kind, text)
        except RequestError as error:
            outcome = error
        except BaseException as error:  # the thread's boundary: every waiting request needs an outcome
            if not is_library_error(error):
                raise
            outcome = RequestError(
                f"the grammar could not be compiled ({type(error).__name__}: {error})",
                Code.INTERNAL,
                status=500,
            )
        done(outcome)

    def _compile(self, kind: str, text: str) -> Grammar:
        self._trial.start()
        tokenizer, hints = self._tokenizer_and_hints()
        size = max(self._trial.run(kind, text), len(text))
        if size > self._max_kept_bytes:
            raise refused(kind, f"it takes {size >> 20} MiB; the limit is {self._max_kept_bytes >> 20} MiB")
        start = build(tokenizer, kind, text)
        length = len(tokenizer.tokenize_str(text))
        if kind == "lark":
            hints = _with_suffixes(hints, text, tokenizer, self._vocabulary)
        return Grammar(kind, text, size, start, tokenizer.vocab_size, self._vocabulary, hints, length)

    def _tokenizer_and_hints(self) -> tuple[LLTokenizer, Hints]:
        if self._known is None:
            tokenizer = read_tokenizer(self._folder, self._vocabulary, self._eos)
            self._known = (tokenizer, _hints(tokenizer, self._vocabulary))
        return self._known

    def _keep(self, grammar: Grammar) -> Grammar:
        with self._looking:
            self._kept[grammar.kind, grammar.text] = grammar
            while (
                len(self._kept) > self._max_kept
                or sum(other.size for other in self._kept.values()) > self._max_kept_bytes
            ):
                self._kept.popitem(last=False)
        return grammar


def _hints(tokenizer: LLTokenizer, vocabulary: int) -> Hints:
    def token(character: str) -> int:
        found = tokenizer.tokenize_bytes(character.encode())
        return found[0] if len(found) == 1 and found[0] < vocabulary else -1

    closing = tuple(found for each in CLOSING if (found := token(each)) >= 0)
    inside = _allowed(INSIDE_STRINGS, tokenizer, vocabulary)
    return Hints(
        token('"'),
        token("~"),
        token("\n"),
        closing,
        plain=_allowed(PLAIN_TEXT, tokenizer, vocabulary),
        inside=inside,
        whole=_whole(tokenizer, vocabulary),
        text=inside,
    )


def _with_suffixes(hints: Hints, text: str, tokenizer: LLTokenizer, vocabulary: int) -> Hints:
    """Return the hints with the suffixes that a Lark grammar names."""
    suffixes, last = list[tuple[int, ...]](), ""
    for written, token in dict.fromkeys(_SUFFIX.findall(text)):
        with contextlib.suppress(ValueError):  # in a client's own grammar: no such token or escape
            if token:
                suffixes += [(id_,)] if (id_ := int(token)) < vocabulary else []
                continue
            suffix = json.loads(written)
            suffixes.append(tuple(tokenizer.tokenize_str(suffix)))
            last += f"\\x{{{ord(suffix[-1]):x}}}"
    if not suffixes:
        return hints
    mask = _allowed(f"[^{last}]*[{last}]" if last else "(?s:.+)", tokenizer, vocabulary)
    digits = _allowed("[0-9]+", tokenizer, vocabulary)
    return replace(hints, suffixes=tuple(suffixes), text=mask, plain=digits)


def _allowed(regex: str, tokenizer: LLTokenizer, vocabulary: int) -> NDArray[np.uint32]:
    """Return the mask of tokens with which a text that matches `regex` may begin."""
    none = np.zeros(0, np.uint32)
    hints = Hints(-1, -1, -1, (), none, none, none, none)
    return Matcher(build(tokenizer, "regex", regex), tokenizer.vocab_size, vocabulary, hints).mask()


def _whole(tokenizer: LLTokenizer, vocabulary: int) -> NDArray[np.uint32]:
    """Return the mask of tokens without a part of a character."""
    whole = np.zeros(-(-vocabulary // _WORD_BITS) * _WORD_BITS, np.bool_)
    for token in range(min(vocabulary, tokenizer.vocab_size)):
        whole[token] = "\ufffd" not in tokenizer.decode_str([token])
    return np.packbits(whole, bitorder="little").view("<u4").astype(np.uint32, copy=False)


# --- complete answers: JSON closes before its budget ends ------------------------------------------------
# Only the model itself ends a string or an array without a bound, or text up to a suffix. Near the end of
# the budget, `AnswerBudget` allows only tokens after which the shortest known ending still fits.

LEAST_MARGIN, MOST_MARGIN = 32, 512  # tokens; between them, the length of the grammar itself
ESCAPE = 16  # tokens that an escape in a string adds at most
SLACK = 3  # tokens that plain text adds at most: the rest of a character, a digit behind a point
MOST_TRIED = 24  # candidates that are tried one by one; where more are allowed, text is free
MOST_STEPS = 1000  # of all candidates' endings together, because other requests wait for this step
LONGEST_ENDING = 1024  # tokens
SAME = 4  # times in a row that an ending may repeat a token
GROWTH = 8  # tokens by which the ending grows at most for each token of the answer, beyond the margin


class AnswerBudget:
    """The room that one answer has left. `left` counts tokens."""

    def __init__(self, matcher: Matcher, left: int) -> None:
        self.cut = False  #: The ending left the model no choice.
        # One token lengthens the ending by an object at most, whose names and braces are in the grammar.
        self._margin = min(max(LEAST_MARGIN, matcher.grammar_tokens), MOST_MARGIN)
        self._check_at = left  # tokens left
        self._planned: tuple[tuple[int, ...], int] = (), 0  # the last ending, and the room at its start

    def fitting(self, matcher: Matcher, left: int) -> NDArray[np.uint32]:
        """Return the mask of tokens that may come next, with `left` tokens for them and the rest.

        An answer that cannot be complete in time keeps the mask of its grammar. Raises as `Matcher.mask`.
        """
        words = matcher.mask()
        if not self.watched(left):
            return words
        found = _ending(matcher, left)
        ending = self._continued(matcher, left, found)
        spare = 0 if ending is None else left - len(ending)
        if ending is None or spare > self._margin:  # without an ending: perhaps there is one later
            self._check_at = left - max(1, (left if ending is None else spare - self._margin) // GROWTH)
            return words
        allowed = [int(token) for token in np.flatnonzero(unpack(words, 32 * len(words)))]
        if len(allowed) <= min(MOST_TRIED, MOST_STEPS // max(len(ending), 1)):
            kept = [each for each in allowed if each in ending[:1] or _fits(matcher, each, left - 1)]
            self.cut = self.cut or len(kept) == 1 < len(allowed)
            return _mask(kept, len(words))
        if not ending:
            return words
        # Any other token than the ending's makes the ending begin again.
        free = words & _text(matcher, words, 0 if found is None else left - len(found))
        self.cut = self.cut or (ending is found and not free.any())
        return free | _mask(ending[:1], len(words))

    def watched(self, left: int) -> bool:
        """Return True where `fitting` may leave tokens out."""
        return left <= self._check_at

    def _continued(
        self, matcher: Matcher, left: int, found: tuple[int, ...] | None
    ) -> tuple[int, ...] | None:
        """Return the rest of the last ending if it is shorter than `found`, else `found`; remember it."""
        last, room = self._planned
        rest = last[room - left :] if room > left else ()
        shorter = rest and (found is None or len(rest) < len(found)) and _completes(matcher, rest)
        ending = rest if shorter else found
        self._planned = ending or (), left
        return ending


def _text(matcher: Matcher, words: NDArray[np.uint32], spare: int) -> NDArray[np.uint32]:
    """Return the mask of tokens that lengthen the shortest ending by less than `spare` tokens."""
    hints = matcher.hints
    if spare <= 0:
        return np.zeros_like(words)
    if spare > SLACK:
        if _in_text(matcher, words):
            return hints.text
        return hints.inside if spare > ESCAPE and _in_string(matcher, words) else hints.plain
    if _in_text(matcher, words):
        return hints.text & hints.whole
    return hints.plain & hints.whole if _in_string(matcher, words) else np.zeros_like(words)


def _fits(matcher: Matcher, token: int, left: int) -> bool:
    """Return True if the answer can still be complete after `token`."""
    state = matcher.copy()
    try:
        state.accept(token)
    except MlxtpError:
        return False
    return _ending(state, left) is not None


def _completes(matcher: Matcher, tokens: tuple[int, ...]) -> bool:
    state = matcher.copy()
    try:
        for token in tokens:
            state.accept(token)
    except MlxtpError:
        return False
    return state.complete


def _ending(matcher: Matcher, most: int) -> tuple[int, ...] | None:
    """Return tokens that complete the text, as few as a greedy search finds; None if they exceed `most`."""
    state, found = matcher.copy(), list[int]()
    most = min(most, LONGEST_ENDING)
    try:
        while not state.complete:
            tokens = state.forced(most + 1) or _closing(state, found[-SAME:])
            found += tokens
            if not tokens or len(found) > most:
                return None
            for token in tokens:
                state.accept(token)
    except MlxtpError:  # no way on
        return None
    return tuple(found)


def _closing(state: Matcher, last: list[int]) -> tuple[int, ...]:
    """Return tokens that bring JSON or a text closest to its end; for anything else, one that is allowed.

    A token that all of `last` repeat leads nowhere. Empty where nothing known ends a text.
    """
    words, hints = state.mask(), state.hints
    stale = last[0] if len(last) == SAME and len(set(last)) == 1 else -1
    if _in_text(state, words):
        ends = (*hints.suffixes, (hints.quote,))
        return next((end for end in ends if _leads_out(state, end)), ())
    if _in_string(state, words):
        return () if hints.quote == stale else (hints.quote,)
    for token in hints.closing:
        if token != stale and _has(words, token):
            return (token,)
    allowed = np.flatnonzero(unpack(words, 32 * len(words)))
    return (next((int(token) for token in allowed if token != stale), int(allowed[0])),)


def _leads_out(state: Matcher, end: tuple[int, ...]) -> bool:
    """Return True if `end` ends the text at `state`."""
    after = state.copy()
    try:
        for token in end:
            after.accept(token)
        return after.complete or not _in_text(after, after.mask())
    except MlxtpError:
        return False


def _in_string(state: Matcher, words: NDArray[np.uint32]) -> bool:
    """Return True in a string of JSON without a pattern: it may end or continue with any letter."""
    return _has(words, state.hints.quote) and _has(words, state.hints.letter)


def _in_text(state: Matcher, words: NDArray[np.uint32]) -> bool:
    """Return True in text that is no JSON: no string of JSON has a line break in it."""
    return _in_string(state, words) and _has(words, state.hints.newline)


def _has(words: NDArray[np.uint32], token: int) -> bool:
    return token >= 0 and bool(int(words[token >> 5]) >> (token & 31) & 1)


def _mask(tokens: list[int] | tuple[int, ...], length: int) -> NDArray[np.uint32]:
    words = np.zeros(length, np.uint32)
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words
