"""Grammars of answers: masks of the allowed next tokens. On rank 0 alone, without MLX.

JSON is on one line, with separators from its schema's `x-guidance`, or `", "` and `": "`. Properties are in
order; others are allowed unless `additionalProperties` forbids them. An unenforceable schema is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import Code, MlxtpError, ModelError, RequestError, is_library_error
from ..model_files import tokenizer_json
from ..wire.codecs import MAX_GRAMMAR
from ..wire.rank_process import without_secrets

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

DEADLINE_S = 5.0  # seconds that one grammar may take to compile
FUEL, STATES = 300_000, 50_000  # the compiler's limits for one grammar
ITEMS = 10_000  #: Most parser items in a step. An object of 500 optional properties needs almost as many.
#: Average CPU seconds of a step. With 128,000 tokens, JSON takes 0.0001 and 300 optional properties 0.0002.
STEP_S = 0.001
BURST_S, SEARCH_BURST_S = 0.3, 0.1  #: CPU seconds beyond that average: for an answer, to search its ending.
MAX_KEPT = 64
MAX_KEPT_BYTES = 256 << 20

_WORD_BITS = 32
_MOST_SUFFIXES = 32  # most that a search for an ending tries

PLAIN_TEXT = r'[^"\\{}\[\],:]+'
INSIDE_STRINGS = r'[^"]+'
# The end of a text in a Lark grammar of `text/tool_grammar.py`.
_SUFFIX = re.compile(r'\[suffix=("(?:[^"\\]|\\.)+")\]|\btext <\[(\d+)\]>')
CLOSING = '}],:"@-./0123456789tfn{['  # in this order, objects and lists end before they grow

GrammarCallback = Callable[["Grammar | RequestError"], None]


@dataclass(frozen=True, slots=True)
class Hints:
    """Tokens of one vocabulary that help to end JSON (-1 if it lacks one), and masks of tokens."""

    quote: int
    letter: int
    newline: int
    closing: tuple[int, ...]  # to try outside strings, the most helpful first
    #: Text without JSON's own characters. With `suffixes`, only digits, because letters name optional fields.
    plain: NDArray[np.uint32]
    inside: NDArray[np.uint32]  # text without a quote
    whole: NDArray[np.uint32]  # tokens that end with a whole character
    text: NDArray[np.uint32]  # tokens with nothing after one of `suffixes`
    suffixes: tuple[tuple[int, ...], ...] = ()  # each ends a text in this grammar


class CpuAllowance:
    """Budget of CPU time: `burst_s`, and STEP_S more a step. Waiting on a busy machine does not count."""

    def __init__(self, burst_s: float = BURST_S, search: CpuAllowance | None = None) -> None:
        self.search = search or self  #: separate budget to search for an answer's ending
        self._burst_s = burst_s
        self._left_s = burst_s

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Spend the time of one step. Raises MlxtpError while the budget is exceeded."""
        self._spend(-STEP_S)
        begun = time.thread_time()
        yield
        self._spend(time.thread_time() - begun)

    def _spend(self, seconds: float) -> None:
        self._left_s = max(min(self._left_s - seconds, self._burst_s), -self._burst_s)
        if self._left_s < 0:
            raise stuck(f"its steps take more than {1000 * STEP_S:g} ms of CPU time; make it less ambiguous")


@dataclass(slots=True)
class Matcher:
    _state: LLMatcher
    _tokens: int
    _vocabulary: int
    hints: Hints
    grammar_tokens: int = 0  #: Length of the grammar's own text.
    _cpu: CpuAllowance = field(default_factory=lambda: CpuAllowance(search=CpuAllowance(SEARCH_BURST_S)))

    def mask(self) -> NDArray[np.uint32]:
        """Return the allowed next tokens in 32-bit words, with end tokens if the answer may end here.

        Raises MlxtpError if no token is allowed, or a step exceeds a limit of time or memory.
        """
        words = np.full(-(-self._tokens // _WORD_BITS), 0xFFFFFFFF, np.uint32)
        with self._cpu.step():
            self._state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self._check()
        words = words[: -(-self._vocabulary // _WORD_BITS)]
        if rest := self._vocabulary % _WORD_BITS:
            words[-1] &= np.uint32((1 << rest) - 1)
        if not words.any():
            raise stuck("no token of this model can come next")
        return words

    def accept(self, token: int) -> None:
        """Accept a token. If `mask` does not allow it, raises MlxtpError now and in later calls."""
        with self._cpu.step():
            self._state.consume_token(token)
            self._check()

    def forced(self, limit: int) -> tuple[int, ...]:
        return tuple(self._state.compute_ff_tokens()[:limit])

    @property
    def finished(self) -> bool:
        return self._state.is_stopped() and not self._state.is_error()

    @property
    def complete(self) -> bool:
        return self._state.is_accepting() or self.finished

    def copy(self, *, search: bool = False) -> Matcher:
        """Return an independent matcher; with `search` it cannot end the answer."""
        cpu, state = self._cpu.search if search else self._cpu, self._state.deep_copy()
        return Matcher(state, self._tokens, self._vocabulary, self.hints, self.grammar_tokens, cpu)

    def _check(self) -> None:
        if self._state.is_error():
            raise stuck(readable(self._state.get_error()))


def stuck(why: str) -> MlxtpError:
    return MlxtpError(f"the answer cannot continue within its grammar: {why}", Code.GRAMMAR_STUCK)


def unpack(words: NDArray[np.uint32], vocabulary: int) -> NDArray[np.bool_]:
    little = words.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(little, count=vocabulary, bitorder="little").view(np.bool_)


@dataclass(frozen=True, slots=True)
class Grammar:
    size: int
    _start: Matcher

    def matcher(self) -> Matcher:
        return self._start.copy()


@dataclass(eq=False, repr=False)
class Grammars:
    folder: Path
    vocabulary: int
    eos: frozenset[int]
    _: KW_ONLY
    deadline_s: float = DEADLINE_S
    max_kept: int = MAX_KEPT
    max_kept_bytes: int = MAX_KEPT_BYTES

    def __post_init__(self) -> None:
        self._trial = GrammarSandbox(self.folder, self.vocabulary, self.eos, self.deadline_s)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._kept: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._compiling = threading.Lock()
        self._looking = threading.Lock()
        self._was_read: tuple[LLTokenizer, Hints] | None = None

    def kept(self, kind: str, text: str) -> Grammar | None:
        with self._looking:
            if (grammar := self._kept.get((kind, text))) is not None:
                self._kept.move_to_end((kind, text))
            return grammar

    def read(self) -> None:
        """Read the tokenizer while a model loads. Later, it would block all requests for a second or two."""
        with contextlib.suppress(RequestError):
            self._tokenizer_and_hints()

    def compile(self, kind: str, text: str) -> Grammar:
        with self._compiling:
            return self.kept(kind, text) or self._keep(kind, text, self._compile(kind, text))

    def submit(self, kind: str, text: str, done: GrammarCallback) -> Future[None]:
        """Compile in a background thread, in order. The thread calls `done`, but not after `close`."""
        return self._thread.submit(self._run, kind, text, done)

    def close(self) -> None:
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
            detail = f"the grammar could not be compiled ({type(error).__name__}: {error})"
            outcome = RequestError(detail, Code.INTERNAL, status=500)
        done(outcome)

    def _compile(self, kind: str, text: str) -> Grammar:
        self._trial.start()
        tokenizer, hints = self._tokenizer_and_hints()
        size = max(self._trial.run(kind, text), len(text))
        if size > self.max_kept_bytes:
            raise refused(kind, f"it takes {size >> 20} MiB; the limit is {self.max_kept_bytes >> 20} MiB")
        state = build(tokenizer, kind, text)
        length = len(tokenizer.tokenize_str(text))
        if kind == "lark":
            hints = _with_suffixes(hints, text, tokenizer, self.vocabulary)
        return Grammar(size, Matcher(state, tokenizer.vocab_size, self.vocabulary, hints, length))

    def _tokenizer_and_hints(self) -> tuple[LLTokenizer, Hints]:
        if self._was_read is None:  # no `cached_property`: in Python 3.11 all instances share its lock
            tokenizer = read_tokenizer(self.folder, self.vocabulary, self.eos)
            self._was_read = tokenizer, _hints(tokenizer, self.vocabulary)
        return self._was_read

    def _keep(self, kind: str, text: str, grammar: Grammar) -> Grammar:
        with self._looking:
            kept = self._kept
            kept[kind, text] = grammar
            while len(kept) > self.max_kept or sum(g.size for g in kept.values()) > self.max_kept_bytes:
                kept.popitem(last=False)
        return grammar


def _hints(tokenizer: LLTokenizer, vocabulary: int) -> Hints:
    def token(character: str) -> int:
        found = tokenizer.tokenize_bytes(character.encode())
        return found[0] if len(found) == 1 and found[0] < vocabulary else -1

    closing = tuple(found for each in CLOSING if (found := token(each)) >= 0)
    plain, inside = (_allowed(regex, tokenizer, vocabulary) for regex in (PLAIN_TEXT, INSIDE_STRINGS))
    whole = _whole(tokenizer, vocabulary)
    return Hints(token('"'), token("~"), token("\n"), closing, plain, inside, whole, text=inside)


def _with_suffixes(hints: Hints, text: str, tokenizer: LLTokenizer, vocabulary: int) -> Hints:
    suffixes, last = list[tuple[int, ...]](), ""
    for written, token in dict.fromkeys(_SUFFIX.findall(text)):
        with contextlib.suppress(ValueError):  # a client's own grammar may have invalid tokens or escapes
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
    return replace(hints, suffixes=tuple(suffixes[:_MOST_SUFFIXES]), text=mask, plain=digits)


def _allowed(regex: str, tokenizer: LLTokenizer, vocabulary: int) -> NDArray[np.uint32]:
    none = np.zeros(0, np.uint32)
    hints = Hints(-1, -1, -1, (), none, none, none, none)
    return Matcher(build(tokenizer, "regex", regex), tokenizer.vocab_size, vocabulary, hints).mask()


def _whole(tokenizer: LLTokenizer, vocabulary: int) -> NDArray[np.uint32]:
    whole = np.zeros(-(-vocabulary // _WORD_BITS) * _WORD_BITS, np.bool_)
    for token in range(min(vocabulary, tokenizer.vocab_size)):
        whole[token] = "\ufffd" not in tokenizer.decode_str([token])
    return np.packbits(whole, bitorder="little").view("<u4").astype(np.uint32, copy=False)


# --- sandbox: a process that compiles each client's grammar first, with a deadline -----------------------
# Some grammars take minutes and gigabytes to compile, and a thread cannot be stopped; some overflow a stack.
# The sandbox has a deadline and a smaller stack than rank 0, which compiles a grammar again if it passes.
# `python -m mlxtp.engine.grammar FOLDER VOCABULARY DEADLINE_S EOS...` reads one JSON line `[kind, text]`
# for each grammar and replies with one line `[error or null, bytes]`. Its first line is about the tokenizer.

START_S = 60.0  # seconds to read a tokenizer; large ones need about one
#: Stack of the compiling thread. The threads of rank 0 have at least four times as much.
STACK_BYTES = 2 << 20
MAX_WORDS = 300  # characters of an explanation

_SEPARATORS = {"item_separator": ", ", "key_separator": ": "}  # unless the schema's `x-guidance` has others
_JSON = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}

_SUBJECT = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}


def read_tokenizer(folder: Path, vocabulary: int, eos: frozenset[int]) -> LLTokenizer:
    """Read a tokenizer; hold the GIL, 1 s for 128,000 tokens. Raises RequestError (NOT_SUPPORTED)."""
    from llguidance import LLTokenizer

    def refusal(why: object) -> RequestError:
        return RequestError(f"this model does not support grammars: {why}", Code.NOT_SUPPORTED)

    try:
        content = tokenizer_json(folder)
    except OSError:
        raise refusal("it has no tokenizer.json") from None
    except ModelError as error:
        raise refusal(error.detail) from None
    with contextlib.suppress(ValueError):  # in most models it fits the vocabulary and has each end token
        return LLTokenizer(content, n_vocab=vocabulary, eos_token=sorted(eos))
    try:
        size = LLTokenizer(content).vocab_size
        known = sorted(token for token in eos if token < min(size, vocabulary))
        return LLTokenizer(content, n_vocab=max(size, vocabulary), eos_token=known)
    except ValueError as error:
        raise refusal(error) from None


def build(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Return a matcher at its start, with its first mask; release the GIL. Raises RequestError."""
    from llguidance import LLMatcher, LLParserLimits

    if kind not in _SUBJECT:
        raise RequestError(f"unknown grammar kind {kind!r}; use one of {', '.join(_SUBJECT)}")
    if len(text) > MAX_GRAMMAR:
        raise refused(kind, f"it has {len(text)} characters; the limit is {MAX_GRAMMAR}")
    limits = LLParserLimits(
        initial_lexer_fuel=FUEL, max_lexer_states=STATES, step_max_items=ITEMS, verbose_errors=False
    )
    try:
        match kind:
            case "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(text, _SEPARATORS, _JSON)  # type: ignore[arg-type]
            case "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            case _:
                grammar = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
    except UnicodeEncodeError:
        raise refused(kind, "it holds half characters (lone surrogates)") from None
    except ValueError as error:  # not JSON
        raise refused(kind, readable(str(error))) from None
    if matcher.is_error():
        raise refused(kind, readable(matcher.get_error()))
    return matcher


def refused(kind: str, why: str) -> RequestError:
    return RequestError(f"{_SUBJECT.get(kind, kind)} cannot be used: {why}")


def readable(message: str) -> str:
    message = re.sub(r"^at \d+\(\d+\): ", "", re.split(r"\n<|\n *\d+ \| ", message, maxsplit=1)[0])
    if "NoExtension" in message:
        return "nothing can match it"
    if message.startswith("panic"):
        return "it is too big"
    if "Expecting object schema" in message:
        return "it must be a JSON object"
    inner = re.findall(r"^error: (.+)$", message, re.MULTILINE)
    words = " ".join((inner[-1] if inner else message).split())
    return words if len(words) <= MAX_WORDS else f"{words[:MAX_WORDS]}…"


class GrammarSandbox:
    def __init__(self, folder: Path, vocabulary: int, eos: frozenset[int], deadline_s: float) -> None:
        self._command = [
            sys.executable, "-m", __name__,
            str(folder.absolute()), str(vocabulary), str(deadline_s), *map(str, sorted(eos)),
        ]  # fmt: skip
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._greeted = False

    def start(self) -> None:
        """Start the process without waiting for it, unless it runs. Raises RequestError (INTERNAL)."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=without_secrets(os.environ),
            )
        except OSError as error:
            detail = f"the process that compiles grammars did not start: {error}"
            raise RequestError(detail, Code.INTERNAL, status=500) from None
        self._greeted = False

    def run(self, kind: str, text: str) -> int:
        """Compile a grammar in the sandbox; return how many bytes it grew. Raises RequestError."""
        self.start()
        assert self._process is not None
        if not self._greeted:
            error, _ = self._answer() or ("the process that compiles grammars did not start", 0)
            if error is not None:
                self.close()
                raise RequestError(error, Code.NOT_SUPPORTED)
            self._greeted = True
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([kind, text]).encode() + b"\n")
            self._process.stdin.flush()
        if (answer := self._answer()) is None:
            if self.close() == -signal.SIGALRM:
                raise refused(kind, f"compiling it takes longer than {self._deadline_s:g} s; make it simpler")
            raise refused(kind, "it is nested too deep or too big to be compiled")
        error, size = answer
        if error is not None:
            raise RequestError(error)
        return size

    def close(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:  # its end closes the pipes and waits
            pass
        return process.returncode

    def kill(self) -> None:
        """End the process, from any thread. A thread that waits for its reply continues."""
        if (process := self._process) is not None:
            process.kill()

    def _answer(self) -> tuple[str | None, int] | None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return tuple(json.loads(line)) if line.endswith(b"\n") else None


def main(arguments: list[str]) -> None:
    import psutil

    signal.setitimer(signal.ITIMER_REAL, START_S)
    folder, vocabulary, deadline_s, *eos = arguments

    def answer(error: RequestError | None, size: int = 0) -> None:
        sys.stdout.write(json.dumps([error and error.detail, size]) + "\n")
        sys.stdout.flush()

    try:
        tokenizer = read_tokenizer(Path(folder), int(vocabulary), frozenset(map(int, eos)))
    except RequestError as error:
        answer(error)
        return
    answer(None)
    memory = psutil.Process().memory_info
    threading.stack_size(STACK_BYTES)
    with ThreadPoolExecutor(max_workers=1) as thread:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for line in sys.stdin:
            signal.setitimer(signal.ITIMER_REAL, float(deadline_s))
            before = memory().rss
            kind, text = json.loads(line)
            try:
                matcher = thread.submit(build, tokenizer, kind, text).result()
                answer(None, max(0, memory().rss - before))
                del matcher
            except RequestError as error:
                answer(error)
            signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
