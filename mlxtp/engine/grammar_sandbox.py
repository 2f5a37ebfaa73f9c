"""Process that compiles each client's grammar first, with a deadline, where it can do no harm.

The cost of a grammar shows only when it is compiled and computes its first mask. Some take minutes and
gigabytes, and a thread cannot be stopped; some overflow the stack, which ends the process. This process may
end: it has a deadline and a smaller stack than rank 0, and is started again for the next grammar. A grammar
that passes is compiled again in rank 0 by the same `build`, and known to be quick.

`python -m mlxtp.engine.grammar_sandbox FOLDER VOCABULARY DEADLINE_S EOS...` reads one JSON line `[kind,
text]` for each grammar and replies to each with one line `[error or null, bytes]`. Its first line is the
reply for the tokenizer.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Code, ModelError, RequestError
from ..tokenizer_file import tokenizer_json
from ..wire.messages import MAX_GRAMMAR
from ..wire.rank_process import without_secrets

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

START_S = 60.0  # seconds to read a tokenizer; large ones need about one
#: Stack of the compiling thread. The threads of rank 0 have at least four times as much.
STACK_BYTES = 2 << 20
MAX_WORDS = 300  # characters of an explanation

_SEPARATORS = {"item_separator": ", ", "key_separator": ": "}  # unless the schema's `x-guidance` has others
_JSON = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}

_SUBJECT = {
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "lark": "the grammar",
}


def read_tokenizer(folder: Path, vocabulary: int, eos: frozenset[int]) -> LLTokenizer:
    """Return the tokenizer of the model in `folder`, whose logits have `vocabulary` entries.

    A tokenizer with more tokens than that is read whole. Holds the GIL throughout, about a second for
    128,000 tokens. Raises RequestError (NOT_SUPPORTED) without a usable tokenizer.
    """
    from llguidance import LLTokenizer

    def refusal(why: object) -> RequestError:
        return RequestError(f"this model does not support grammars: {why}", Code.NOT_SUPPORTED)

    try:
        content = tokenizer_json(folder)
    except OSError:
        raise refusal("it has no tokenizer.json") from None
    except ModelError as error:
        raise refusal(error.detail) from None
    try:
        # Most models: the tokenizer fits the vocabulary and knows every end token.
        return LLTokenizer(content, n_vocab=vocabulary, eos_token=sorted(eos))
    except ValueError:
        pass
    try:
        size = LLTokenizer(content).vocab_size
        known = sorted(token for token in eos if token < min(size, vocabulary))
        return LLTokenizer(content, n_vocab=max(size, vocabulary), eos_token=known)
    except ValueError as error:
        raise refusal(error) from None


def build(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Return a matcher at its start, with its first mask computed. Releases the GIL while it works.

    Raises RequestError that explains `text`: it is wrong, too big, or nothing can match it.
    """
    from llguidance import LLMatcher, LLParserLimits

    if kind not in _SUBJECT:
        raise RequestError(f"unknown grammar kind {kind!r}; use one of {', '.join(_SUBJECT)}")
    if len(text) > MAX_GRAMMAR:
        raise refused(kind, f"it has {len(text)} characters; the limit is {MAX_GRAMMAR}")
    limits = LLParserLimits(initial_lexer_fuel=300_000, max_lexer_states=50_000, verbose_errors=False)
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
    """Return the error of a refused grammar."""
    return RequestError(f"{_SUBJECT.get(kind, kind)} cannot be used: {why}")


def readable(message: str) -> str:
    """Return a compiler's message for the grammar's author: one line, at most MAX_WORDS characters."""
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
    """Process in which grammars are compiled first, one at a time. For one thread."""

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
            raise RequestError(
                f"the process that compiles grammars did not start: {error}", Code.INTERNAL, status=500
            ) from None
        self._greeted = False

    def run(self, kind: str, text: str) -> int:
        """Compile a grammar there; returns the bytes by which the process's memory grew.

        Raises RequestError: the one of `build`, or one for a grammar that took too long or ended the process.
        """
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
        answer = self._answer()
        if answer is None:
            if self.close() == -signal.SIGALRM:
                raise refused(kind, f"compiling it takes longer than {self._deadline_s:g} s; make it simpler")
            raise refused(kind, "it is nested too deep or too big to be compiled")
        error, size = answer
        if error is not None:
            raise RequestError(error)
        return size

    def close(self) -> int:
        """End the process; returns its exit status."""
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
        """Read the next reply of the process; None when it ended. The process enforces its own deadline."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            return None
        error, size = json.loads(line)
        return error, size


def main(arguments: list[str]) -> None:
    """Run the process itself. Its deadline is a signal, which ends it even in C code."""
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
