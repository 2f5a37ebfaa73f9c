"""Chat template and tokenizer of one model: all code that runs files of the model.

An agent runs it in a process with limits of time and memory: a template may never end, and a tokenizer may
take any amount of memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from ..admission_counter import FairQueue
from ..errors import Code, MlxtpError, ModelError, RequestError, is_library_error
from ..imports import import_tokenizers, importing
from ..model_files import (
    TIKTOKEN_FILE,
    is_lfs_pointer,
    lfs_pointer,
    table,
    tokenizer_json,
    tokenizer_settings,
)
from ..wire.rank_process import without_secrets
from .json_limits import SHORT
from .markups import MARKERS
from .token_bytes import TokenBytes, bytes_of
from .tool_schemas import relaxed

log = logging.getLogger(__name__)


# --- the queue of work ------------------------------------------------------------------------------------

T = TypeVar("T")

MOST_WAIT_S = 30.0  # seconds until a waiting request is refused
MOST_OWN = 8 * SHORT  # bytes or characters of one client's limited work that may wait


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    client: str
    turn: int  # in FairQueue
    size: int  # counts toward MOST_OWN
    work: Callable[[], Any]
    outcome: Future[Any]


class WorkerQueue:
    """One thread that runs pieces of work one by one, clients by turns. `busy` begins its refusals."""

    def __init__(self, busy: str = "other prompts kept the tokenizer busy") -> None:
        self._busy = busy
        self._pool = ThreadPoolExecutor(1, "text")
        self._thread = self._pool.submit(threading.get_ident).result()
        self._lock = threading.Lock()
        self._turns = FairQueue()
        self._waiting: list[_Waiting] = []

    @property
    def here(self) -> bool:
        return threading.get_ident() == self._thread

    def run_blocking(self, work: Callable[[], T]) -> T:
        return work() if self.here else self._pool.submit(work).result()

    async def run(self, work: Callable[[], T], client: str = "", size: int = 0) -> T:
        """Return the result of a client's `work`. Raises as `work` does, and RequestError 429 or 503.

        `size`: bytes or characters of the work if MOST_OWN limits it, else 0.
        """
        import asyncio  # in the agent alone

        outcome = Future[T]()
        with self._lock:
            self._waiting = [each for each in self._waiting if not each.outcome.cancelled()]
            own = [each for each in self._waiting if each.client == client]
            waits = sum(each.size for each in own)
            if size and waits and waits + size > MOST_OWN:
                why = f"requests of this client to count {waits} characters wait, and at most {MOST_OWN} may"
                raise RequestError(f"{why}; send fewer at one time", Code.OVERLOADED, status=429)
            turn = self._turns.following(client, [each.turn for each in own])
            in_context = partial(copy_context().run, work)
            self._waiting.append(_Waiting(client, turn, size, in_context, outcome))
        self._pool.submit(self._do_next)
        waiting = asyncio.wrap_future(outcome)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=MOST_WAIT_S)
            if not done and outcome.cancel():  # it has not started
                raise RequestError(f"{self._busy} for {MOST_WAIT_S:g} s", Code.OVERLOADED, status=503)
            return await waiting
        finally:
            outcome.cancel()

    def _do_next(self) -> None:
        with self._lock:
            if not self._waiting:  # the work was cancelled
                return
            first = min(self._waiting, key=lambda each: each.turn)
            self._waiting.remove(first)
            self._turns.record(first.client, first.turn)
        try:
            if first.outcome.set_running_or_notify_cancel():
                first.outcome.set_result(first.work())
        except BaseException as error:  # noqa: BLE001 - the reader of the outcome raises it
            first.outcome.set_exception(error)


# --- templates in Python ----------------------------------------------------------------------------------

# Chat templates of mlx-lm in Python, for models without a Jinja template, such as DeepSeek V3.2. They are
# mlx-lm's code, never the model's.

#: Takes messages, `add_generation_prompt`, and perhaps `tools` and `enable_thinking`; returns the prompt.
ModuleRender = Callable[..., str]


@cache
def template_module(name: str) -> ModuleRender | None:
    """Return a module's `apply_chat_template` or None, without importing mlx_lm, which would import MLX."""
    package = importlib.util.find_spec("mlx_lm")
    if package is None or package.origin is None or not name.isidentifier() or name.startswith("_"):
        return None
    path = Path(package.origin).parent / "chat_templates" / f"{name}.py"
    if not path.is_file():
        return None
    return runpy.run_path(str(path), run_name=f"mlxtp_chat_template_{name}").get("apply_chat_template")


# --- the renderer -----------------------------------------------------------------------------------------

Json = Mapping[str, Any]

_PROBE = " Hello,  world's end . \n\té 日本語 😀👩‍👧 e\u0301 x"
_SHOWN = 200  # characters shown of another library's error
_TEXTS = (".json", ".jinja", ".model", ".txt")  # suffixes of tokenizer and template files
_SETTINGS = ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "chat_template_type")


@dataclass(frozen=True, slots=True)
class RendererFacts:
    template: str  #: the model's chat templates; "" if it has none, or mlx-lm's module replaces them
    renders: bool  #: True if there is a template or a module
    eos: int  #: the end token or -1
    identity: str  #: equal for equal tokenizers and templates
    longest_token: int  #: in characters
    markers: Mapping[str, int]  #: the `MARKERS` that are tokens, with their ids
    added: Sequence[tuple[int, str, bool]]  #: each added token's id and text; True if it is special
    tokens: TokenBytes

    def packed(self) -> bytes:
        tokens, few = self.tokens, asdict(replace(self, tokens=None))  # type: ignore[arg-type]
        told = json.dumps([few, len(tokens.starts), tokens.strip]).encode()
        return b"".join((_LENGTH.pack(len(told)), told, tokens.starts.tobytes(), tokens.content))

    @classmethod
    def unpacked(cls, found: bytes) -> RendererFacts:
        """Parse `packed` facts. Raises ValueError, TypeError and struct.error for anything else."""
        start = _LENGTH.size + _LENGTH.unpack_from(found)[0]
        few, count, strip = json.loads(found[_LENGTH.size : start])
        starts = array("I", found[start : start + 4 * count])
        return cls(**few | {"tokens": TokenBytes(starts, found[start + 4 * count :], strip)})


class LocalRenderer:
    """Renderer in this process: a `transformers` tokenizer and perhaps a template `module` of mlx-lm."""

    def __init__(self, tokenizer: Any, module: ModuleRender | None = None) -> None:
        self._tokenizer = tokenizer
        self._module = module
        self._backend = tokenizer.backend_tokenizer
        self._line = WorkerQueue()
        self._backend.no_truncation()
        self._backend.no_padding()

    @classmethod
    def load(cls, path: Path) -> LocalRenderer:
        if not path.is_dir():
            raise ModelError(f"{path} is not a folder", Code.MODEL_NOT_FOUND)
        for file in sorted(path.glob("*")):
            if file.suffix in _TEXTS and file.is_file() and is_lfs_pointer(file):
                raise ModelError(f"{path}: {lfs_pointer(file)}", Code.MODEL_INVALID)
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        try:
            settings = tokenizer_settings(path)
            if (path / TIKTOKEN_FILE).is_file():
                backend = Tokenizer.from_str(tokenizer_json(path))
                options = {name: _plain(settings[name]) for name in _SETTINGS if name in settings}
                tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **options)
            else:
                tokenizer = _from_files(path, settings)
            tokenizer.chat_template = _templates(tokenizer.chat_template or settings.get("chat_template"))
        except BaseException as error:
            if isinstance(error, ModelError) or not is_library_error(error):
                raise
            what = " ".join(str(error).split())[:_SHOWN]
            raise ModelError(
                f"the tokenizer or config.json in {path} cannot be read ({type(error).__name__}: {what}); "
                "a complete model folder has tokenizer.json and tokenizer_config.json"
            ) from error
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelError(f"{path} has no tokenizer.json; tokenizers written in Python are not supported")
        if "auto_map" in settings or not (path / "tokenizer.json").is_file():
            _check_added_tokens(tokenizer, settings, path)
        return cls(tokenizer, _template_module(tokenizer, path))

    @cached_property
    def facts(self) -> RendererFacts:
        try:
            return self._facts()
        except BaseException as error:
            if not is_library_error(error):
                raise
            detail = error.detail if isinstance(error, MlxtpError) else f"the tokenizer fails: {error}"
            raise ModelError(detail, Code.MODEL_INVALID) from error

    def _facts(self) -> RendererFacts:
        own = self._tokenizer.chat_template
        eos = self._tokenizer.eos_token_id
        texts = own.values() if isinstance(own, Mapping) else [own or ""]  # for chats, and for tools
        template = "" if self._module else "\n".join(map(str, texts))
        both = (self._backend.to_str() + template).encode(errors="surrogatepass")
        added = self._backend.get_added_tokens_decoder().items()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return RendererFacts(
            template,
            bool(self._module or own),
            -1 if eos is None else int(eos),
            blake2b(both, digest_size=16).hexdigest(),
            max(map(len, vocabulary)),
            {marker: vocabulary[marker] for marker in MARKERS & vocabulary.keys()},
            [(id_, token.content, token.special) for id_, token in added],
            bytes_of(self._backend, self.encode(_PROBE, special=False)),
        )

    def render(
        self, messages: Sequence[Json], tools: Sequence[Json], options: Json, *, prompting: bool
    ) -> str:
        """Return a conversation as the template writes it; `prompting` adds the beginning of an answer."""
        write: Callable[..., Any] = self._tokenizer.apply_chat_template
        given = {"tools": list(tools) or None, "tokenize": False, **options}
        if self._module is not None:
            write, given = self._module, {"tools": list(tools)} if tools else {}
            given |= {name: options[name] for name in ("enable_thinking",) if name in options}
        try:
            plain = [dict(message) for message in messages]
            return str(write(plain, add_generation_prompt=prompting, **given))
        except MemoryError:
            raise too_large() from None
        except Exception as error:  # a template may raise any error
            if type(error).__name__ == "TemplateSyntaxError":
                raise broken(f"the template is not valid Jinja: {error}") from error
            why = f"the model's chat template refuses these messages: {error or type(error).__name__}"
            raise RequestError(why, param="messages") from error

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Return token ids; `special` adds the tokens that begin every sequence."""
        try:
            (found,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        except (TypeError, UnicodeError) as error:
            why = f"the messages hold half a character, such as \\ud800, which is no text: {error}"
            raise RequestError(why, param="messages") from None
        except BaseException as error:
            if not is_library_error(error):
                raise
            raise broken(f"{type(error).__name__}: {str(error)[:_SHOWN]}") from error
        return tuple(found.ids)

    def relaxed(self, tools: Json, nullable: bool) -> Json:
        """Return the tools' schemas by name, reduced to what a grammar can enforce. It never fails."""
        return relaxed(tools, nullable)[0]

    def line(self, size: int) -> WorkerQueue:
        """Return the queue for texts of `size` bytes or characters. Its work may call this renderer."""
        return self._line

    def close(self) -> None:
        """Free resources once work is done. A later request takes longer."""


def broken(why: str, code: Code = Code.MODEL_INVALID, status: int = 422) -> RequestError:
    detail = f"the model's chat template or tokenizer fails: {why}"
    return RequestError(detail, code, status=status, param="messages")


def too_large() -> RequestError:
    return broken("these messages need more memory than its process may use")


def _from_files(path: Path, settings: Json) -> Any:
    """Load a model folder's tokenizer with the library. Raises as the library does.

    tokenizer.json, if present, decides alone: the class named in the files may split text differently.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    library = PreTrainedTokenizerFast if (path / "tokenizer.json").is_file() else AutoTokenizer
    ends = {name: value for name, value in settings.items() if name.endswith("_token")}
    plain = {name: _plain(value) for name, value in ends.items() if isinstance(value, Mapping)}
    return library.from_pretrained(path, local_files_only=True, trust_remote_code=False, **plain)


def _templates(found: Any) -> Any:
    """Return a chat template, or several by name, with the first as default. Raises ValueError."""
    if isinstance(found, list | tuple):
        found = {each["name"]: each["template"] for each in found}
    several = found if isinstance(found, Mapping) else {"default": found}
    if not all(isinstance(text, str) for text in several.values() if text is not None):
        raise ValueError("the chat template is no text")
    return {"default": next(iter(several.values())), **found} if found and several is found else found


def _plain(setting: Any) -> Any:
    return setting.get("content") if isinstance(setting, Mapping) else setting


def _template_module(tokenizer: Any, path: Path) -> ModuleRender | None:
    name = tokenizer.init_kwargs.get("chat_template_type")
    if name is None and not tokenizer.chat_template:
        with contextlib.suppress(OSError, ValueError):
            name = table(path / "config.json").get("model_type")
    return template_module(name) if isinstance(name, str) else None


def _check_added_tokens(tokenizer: Any, settings: Json, path: Path) -> None:
    """Raise ModelError if a tokenizer made from other files has other ids than its settings say."""
    try:
        added = settings.get("added_tokens_decoder", {})
        wanted = {int(id_): token["content"] for id_, token in added.items()}
    except (ValueError, TypeError, LookupError, AttributeError):
        return  # nothing to compare with
    for id_, content in wanted.items():
        if (found := tokenizer.backend_tokenizer.token_to_id(content)) != id_:
            raise ModelError(
                f"{path}: its files make {content!r} token {found} instead of {id_}, and Python code of its "
                "own is not run; use a conversion whose tokenizer.json serves",
                Code.MODEL_UNSUPPORTED,
            )


# --- the same in a process of its own --------------------------------------------------------------------
# The process handles one request at a time. It limits its CPU time itself, so that a busy machine fails no
# request; the agent watches its memory and progress. If it dies, the next request starts a new one.
#
# `python -m mlxtp.text.renderer FD FOLDER` sends the model's facts on the socket FD, then one reply for
# each frame. A frame is 4 bytes of length, then JSON. A reply has one more byte: `f` before facts, `t` before
# text, `i` before token ids of 4 bytes each, `e` before an error in JSON.

START_CPU_S = 120.0
START_BYTES = 4 << 30  # resident bytes while it reads the tokenizer
CPU_S = 3.0  # seconds of CPU time of one request
CPU_S_PER_MIB = 2.0  # more seconds for each MiB of its text
ROOM_BYTES = 512 << 20  # resident bytes beyond those after loading
ROOM_PER_BYTE = 64  # more bytes for each byte of text
TICK_S = 0.05  # seconds between two checks of a busy process
# Seconds of consecutive checks that find it stopped or asleep, with no CPU time used. If the system calls a
# sleeping process "running", as macOS may, only a stopped one is found.
STILL_S = 10.0
WALL_S = 300.0  # seconds of checks in total
REPLY_BYTES = 4 << 20  # most bytes of a reply
REPLY_PER_BYTE = 16  # more bytes for each byte of the request
MOST_FACTS = 1 << 26  # most bytes of the facts
MOST_RELAXED = 2 << 20  # bytes of tools whose relaxed schemas are cached

_LENGTH = struct.Struct("<I")
_TOO_LATE = Code.DEADLINE, 504


class SandboxedRenderer:
    """Renderer in another process, which takes a second or two to start. Raises ModelError."""

    def __init__(self, path: Path) -> None:
        self._lanes = _Lane(path), _Lane(path)
        self._relaxed: dict[bytes, Json] = {}  # clients send the same tools with every turn
        self.facts = self._lanes[0].start()

    def render(
        self, messages: Sequence[Json], tools: Sequence[Json], options: Json, *, prompting: bool
    ) -> str:
        return str(self._reply(b"t", [messages, tools, options, prompting]))

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(self._reply(b"i", [text, special]))

    def relaxed(self, tools: Json, nullable: bool) -> Json:
        work = [tools, nullable, "relaxed"]
        if (found := self._relaxed.get(key := _json(work))) is None:
            try:
                found, left_out = json.loads(self._reply(b"t", work))
            except (RequestError, ValueError):
                found = {name: {"type": "object"} for name in tools}
                left_out = [f"{', '.join(tools)}: they take too much time or memory"]
            if left_out:
                log.info("not enforced by a grammar: %.2000s", "; ".join(left_out))
            if sum(map(len, [*self._relaxed])) > MOST_RELAXED:
                self._relaxed.clear()
            self._relaxed[key] = found
        return found

    def line(self, size: int) -> _Lane:
        return self._lanes[size > SHORT]

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def _reply(self, kind: bytes, work: list[Any]) -> Any:
        try:
            body = _json(work)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the messages cannot be read: {error}", param="messages") from None
        lane = next((each for each in self._lanes if each.here), self.line(len(body)))
        return read_reply(kind, *lane.run_blocking(partial(lane.request, body)))


def _json(work: list[Any]) -> bytes:
    """Encode JSON. pydantic is faster than `json`, but it refuses half characters."""
    from pydantic_core import to_json  # in the agent alone

    try:
        return to_json(work, inf_nan_mode="constants")
    except ValueError:
        return json.dumps(work).encode()


def read_reply(wanted: bytes, kind: bytes, found: bytes) -> Any:
    """Return a reply of the `wanted` kind. Raises RequestError for an error or an unreadable reply."""
    try:
        if kind == wanted:
            return _READERS[kind](found)
        detail, code, status = json.loads(found) if kind == b"e" else (None, "", 0)
        if not isinstance(detail, str) or status not in (400, 422, 500, 503, 504):
            raise ValueError(detail)
        raise RequestError(detail, Code(code), status=status, param="messages")
    except (ValueError, TypeError, RecursionError, struct.error):
        raise broken("its reply cannot be read") from None


_READERS: Mapping[bytes, Callable[[bytes], Any]] = {
    b"f": RendererFacts.unpacked,
    b"t": lambda found: found.decode("utf-8", "surrogatepass"),
    b"i": lambda found: tuple(array("I", found)),
}


Renderer = LocalRenderer | SandboxedRenderer  #: Methods block, in any thread, and raise RequestError.


class _Lane(WorkerQueue):
    """Queue with its own process. Long texts use another lane, so that short ones overtake them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._process: _Process | None = None
        self._closed = False

    def request(self, body: bytes) -> tuple[bytes, bytes]:
        """Return a reply and its kind. Call it in this queue's thread. Raises RequestError."""
        try:
            if self._process is None or self._process.has_ended():
                self._drop()
                self.start()
            assert self._process is not None
            return self._process.request(body)
        except BaseException as error:  # the next request would read this one's reply
            self._drop()
            if isinstance(error, OSError | ModelError):
                raise broken(str(error)) from None
            raise
        finally:
            if self._closed:
                self._drop()

    def close(self) -> None:
        self._closed = True
        self._pool.submit(self._drop)

    def start(self) -> RendererFacts:
        try:
            self._process = _Process(self._path)
            greeting = self._process.greeting()
        except OSError as error:
            raise ModelError(f"cannot start a process for the tokenizer of {self._path}: {error}") from None
        except RequestError as error:
            self._drop()
            raise ModelError(f"the tokenizer in {self._path} cannot be read: {error.detail}") from None
        try:
            facts: RendererFacts = read_reply(b"f", *greeting)
        except RequestError as error:
            self._drop()
            raise ModelError(str(error), error.code) from None
        return facts

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


class _Process:
    def __init__(self, path: Path) -> None:
        import psutil

        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-m", __name__, str(there.fileno()), str(path.absolute())]
            environment = {**without_secrets(os.environ), "TOKENIZERS_PARALLELISM": "false"}
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()], env=environment
            )
        here.settimeout(TICK_S)
        self._path = path
        self._socket = here
        self._popen = popen
        self._process = psutil.Process(popen.pid)
        self._warm_bytes = 0
        self.close = weakref.finalize(self, _end, popen, here)

    def has_ended(self) -> bool:
        """Return True if the process has ended, and log how unless a CPU limit ended it."""
        if (status := self._popen.poll()) is not None and status != -signal.SIGPROF:
            log.warning(
                "the process %d, which runs the chat template and tokenizer of %s, %s; "
                "the next request for this model starts a new one",
                self._popen.pid,
                self._path,
                _end_words(status),
            )
        return status is not None

    def greeting(self) -> tuple[bytes, bytes]:
        import psutil

        reply = self._receive(Watch(START_BYTES, f"it takes more than {START_CPU_S:g} s"), MOST_FACTS)
        with contextlib.suppress(psutil.Error):
            self._warm_bytes = self._process.memory_info().rss
        return reply

    def request(self, body: bytes) -> tuple[bytes, bytes]:
        late = f"it takes more than {_cpu_s(len(body)):.3g} s for these messages"
        watch = Watch(self._warm_bytes + ROOM_BYTES + ROOM_PER_BYTE * len(body), late)
        unsent = memoryview(_LENGTH.pack(len(body)) + body)
        while unsent:
            unsent = unsent[self._watched(watch, partial(self._socket.send, unsent)) :]
        return self._receive(watch, REPLY_BYTES + REPLY_PER_BYTE * len(body))

    def _receive(self, watch: Watch, most_reply: int) -> tuple[bytes, bytes]:
        found, size = bytearray(), _LENGTH.size
        while len(found) < size:
            part = self._watched(watch, partial(self._socket.recv, 1 << 20))
            if not part:
                raise self._why(watch)
            found += part
            if size == _LENGTH.size and len(found) >= size:
                size += _LENGTH.unpack_from(found)[0]
                if size > most_reply:
                    raise too_large()
        start = _LENGTH.size + 1
        return bytes(found[_LENGTH.size : start]), bytes(found[start:])

    def _watched(self, watch: Watch, step: Callable[[], T]) -> T:
        while True:
            try:
                return step()
            except TimeoutError:
                self._look(watch)
            except OSError:
                raise self._why(watch) from None

    def _look(self, watch: Watch) -> None:
        import psutil

        resident, cpu_s, status = 0, 0.0, ""  # for a process that has ended; its socket reports the end
        with contextlib.suppress(psutil.Error), self._process.oneshot():
            times = self._process.cpu_times()
            resident, cpu_s = self._process.memory_info().rss, times.user + times.system
            status = self._process.status()
        if (error := watch.look(resident, cpu_s, status)) is not None:
            raise error

    def _why(self, watch: Watch) -> RequestError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(5.0)
        self.has_ended()
        if (status := self._popen.poll()) == -signal.SIGPROF:
            return broken(watch.late, *_TOO_LATE)
        return broken(f"the process that runs it {_end_words(status)}")


@dataclass(slots=True)
class Watch:
    """Checks of a busy process. They count looks, not seconds, since the agent may be stopped too. Pure."""

    most_bytes: int  # resident
    late: str  # message for work that takes too long
    looks: int = 0
    still: int = 0
    cpu_s: float = -1.0

    def look(self, resident: int, cpu_s: float, status: str) -> RequestError | None:
        """Return the error that must end the process. While it waits for a core its status is "running"."""
        moves = cpu_s != self.cpu_s or status not in ("stopped", "sleeping")
        self.looks, self.still, self.cpu_s = self.looks + 1, 0 if moves else self.still + 1, cpu_s
        if resident > self.most_bytes:
            return too_large()
        if self.still * TICK_S > STILL_S:
            return broken(f"its process stood still for {STILL_S:g} s", *_TOO_LATE)
        return broken(self.late, *_TOO_LATE) if self.looks * TICK_S > WALL_S else None


def _end(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    process.kill()
    process.wait()


def _end_words(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by signal {-status}"
    return f"ended with status {status}"


def _cpu_s(size: int) -> float:
    return CPU_S + CPU_S_PER_MIB * size / (1 << 20)


# --- the process itself -----------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    link = socket.socket(fileno=int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the agent handles Ctrl-C in a terminal
    with contextlib.suppress(ConnectionError):
        signal.setitimer(signal.ITIMER_PROF, START_CPU_S)
        try:
            with importing():
                import_tokenizers()
                writer = LocalRenderer.load(Path(arguments[1]))
            reply = b"f" + writer.facts.packed()
        except MlxtpError as error:
            _send(link, _error(error))
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(link, reply)
        requests = link.makefile("rb")
        while len(head := requests.read(_LENGTH.size)) == _LENGTH.size:
            (size,) = _LENGTH.unpack(head)
            if not size or len(body := requests.read(size)) < size:
                return
            signal.setitimer(signal.ITIMER_PROF, _cpu_s(len(body)))
            reply = _answer(writer, body)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(link, reply)


def _answer(writer: LocalRenderer, body: bytes) -> bytes:
    try:
        match json.loads(body):
            case [str(text), special]:
                return b"i" + array("I", writer.encode(text, special=special)).tobytes()
            case [messages, tools, options, prompting]:
                text = writer.render(messages, tools, options, prompting=prompting)
                return b"t" + text.encode("utf-8", "surrogatepass")
            case other:
                tools, nullable, _ = other
                return b"t" + json.dumps(relaxed(tools, nullable)).encode()
    except MemoryError:
        return _error(too_large())
    except MlxtpError as error:
        return _error(error)


def _error(error: MlxtpError) -> bytes:
    status = error.status if isinstance(error, RequestError) else 500
    return b"e" + json.dumps([error.detail, error.code.value, status]).encode()


def _send(link: socket.socket, reply: bytes) -> None:
    link.sendall(_LENGTH.pack(len(reply)) + reply)


if __name__ == "__main__":
    main(sys.argv[1:])
