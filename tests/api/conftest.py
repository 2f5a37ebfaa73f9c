"""Small tokenizers made on the spot, a backend that plays a script, and a real server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mlxtp.api.app import create_app
from mlxtp.api.backend import (
    AT_ONCE,
    GREEDY,
    DeploymentHealth,
    Health,
    ModelInfo,
    ModelLease,
    Progress,
    Sampling,
    StoredModelInfo,
    StreamEnd,
    TokenEvent,
    Tokens,
    TokenScore,
)
from mlxtp.api.server import bind, serve
from mlxtp.errors import Code, RequestError
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text
from mlxtp.wire.messages import Generate

SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{{ raise_exception('no mood is known') if mood is defined }}{% for m in messages %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BYTE_LEVEL, BYTE_FALLBACK, METASPACE = "byte_level", "byte_fallback", "metaspace"
KINDS = [BYTE_LEVEL, BYTE_FALLBACK, METASPACE]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it. Merges cross the borders of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello wide world, hello 日本語日本語 😀😀😀😁 the end"] * 3, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma have it: words with a visible space, bytes for everything unknown."""
    letters = [(c, -5.0) for c in "abcdefghijklmnopqrstuvwxyz,."]
    words = [("▁", -3.0), ("▁hello", -1.0), ("▁wide", -1.0), ("▁world", -1.0), ("日", -4.0)]
    bytes_ = [(f"<0x{i:02X}>", -20.0) for i in range(256)]
    pieces = [(name, 0.0) for name in SPECIAL] + bytes_ + words + letters
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def metaspace() -> Tokenizer:
    """The same words, decoded in a way of which nothing is known but what the library does."""
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, template: str | None = TEMPLATE) -> Path:
    """A model folder without weights. Its post-processor adds a second BOS where the caller lets it."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


SECOND = "org/second"  # the model that is served beside `org/tiny`, by the backends that have its text
SECOND_VOCABULARY = 300


@dataclass(frozen=True)
class Loaded:
    """One of the small tokenizers, and the text made of it."""

    kind: str
    tokenizer: Tokenizer
    folder: Path
    text: Text


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    found = {}
    for make in (byte_level, byte_fallback, metaspace):
        tokenizer = make()
        folder = save(tokenizer, tmp_path_factory.mktemp(make.__name__))
        found[make.__name__] = Loaded(make.__name__, tokenizer, folder, Text(LocalRenderer.load(folder)))
    return found


Script = Callable[[], AsyncIterator[TokenEvent]]
CONTEXT = 200
VOCABULARY = 340
WAIT_S = 20


def says(tokens: list[int], reason: str = "stop", step: int = 1, **end: int) -> Script:
    """An answer in pieces of `step` tokens."""

    async def script() -> AsyncIterator[TokenEvent]:
        for i in range(0, len(tokens), step):
            yield Tokens(tuple(tokens[i : i + step]))
        yield StreamEnd(reason, len(tokens), **end)  # type: ignore[arg-type]

    return script


def score(at: int, top: int = 0) -> TokenScore:
    """Return the score of token number `at`: no two are alike."""
    return TokenScore(-0.25 * at, tuple((60 + i, -0.5 * i) for i in range(top)))


def says_scored(tokens: list[int], step: int = 1, top: int = 0) -> Script:
    """An answer with scores."""

    async def script() -> AsyncIterator[TokenEvent]:
        for i in range(0, len(tokens), step):
            part = tuple(tokens[i : i + step])
            yield Tokens(part, tuple(score(i + j, top) for j in range(len(part))))
        yield StreamEnd("stop", len(tokens))

    return script


def then(first: list[int], act: Callable[[], Any]) -> Script:
    """Some tokens, then what `act` does: wait for ever, raise."""

    async def script() -> AsyncIterator[TokenEvent]:
        if first:
            yield Tokens(tuple(first))
        result = act()
        if asyncio.iscoroutine(result):
            await result
        yield StreamEnd("stop", len(first))

    return script


async def forever() -> None:
    await asyncio.Event().wait()


class FakeAnswer:
    """The events of a script. As the gateway's, it may be closed while a reader waits in it."""

    group = ""
    cached = 0

    def __init__(self, backend: FakeBackend, script: Script) -> None:
        self._backend = backend
        self._script = script
        self._events: asyncio.Queue[TokenEvent | Exception | None] = asyncio.Queue(maxsize=1)
        self._player: asyncio.Task[None] | None = None
        self.closed = threading.Event()
        self.finished = False

    async def accepted(self) -> None:
        self._backend.began.set()
        try:
            await self._backend.judge()
        except BaseException:
            await self.aclose()
            raise

    def progress(self) -> Progress:
        return self._backend.progress

    def __aiter__(self) -> FakeAnswer:
        return self

    async def __anext__(self) -> TokenEvent:
        if self.closed.is_set():
            raise StopAsyncIteration
        if self._player is None:
            self._player = asyncio.create_task(self._play())
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        if self._player is not None:
            self._player.cancel()
        self.closed.set()

    async def _play(self) -> None:
        try:
            async for event in self._script():
                await self._events.put(event)
                self.finished = isinstance(event, StreamEnd)
            await self._events.put(None)
        except Exception as error:  # noqa: BLE001 - the reader raises it
            await self._events.put(error)


async def at_once() -> None:
    """Every request is accepted."""


@dataclass
class FakeBackend:
    """Plays the scripts in turn, the last one for every later request, and keeps what happened."""

    loaded_text: Text
    script: Script = field(default_factory=lambda: says([]))
    scripts: list[Script] = field(default_factory=list)
    refusal: Exception | None = None
    short: RequestError | None = None
    judge: Callable[[], Awaitable[None]] = at_once
    progress: Progress = Progress()  # noqa: RUF009 - frozen
    ready: bool = True
    unready: str = "loading"
    starting: str = ""
    most_open: int = 1000
    context: int = CONTEXT
    vocabulary: int = VOCABULARY
    defaults: Sampling = GREEDY
    checkpoints: bool = False
    requests: list[Generate] = field(default_factory=list)
    whose: list[SimpleNamespace] = field(default_factory=list)  # model, client and such of each
    answers: list[FakeAnswer] = field(default_factory=list)
    second_text: Text | None = None
    deployments: tuple[DeploymentHealth, ...] = ()
    kept: list[float | None] = field(default_factory=list)
    stored: tuple[StoredModelInfo, ...] = ()
    clients: list[str] = field(default_factory=list)
    take_turn: Callable[[str | None, float], ModelLease] = lambda _name, _within_s: AT_ONCE
    began: threading.Event = field(default_factory=threading.Event)
    number: int = field(default_factory=count().__next__)  # of its model: no answer of another is remembered

    def health(self, model: str = "") -> Health:
        ranks = ({"rank": 0, "alive": True},)
        for each in self.deployments:
            if each.name == model:
                memory = ({"rank": 0, "memory_bytes": len(each.name)},)
                return Health(each.state, 3, 2, "ring", each.model, each.reason, each.ready, 0, memory)
        state, id_, reason = ("ready", "tiny", None) if self.ready else (self.unready, None, "30 % read")
        return Health(state, 3, 2, "ring", id_, reason, self.ready, 0, ranks, self.starting, self.deployments)

    def models(self) -> tuple[ModelInfo, ...]:
        if not self.ready:
            return ()
        names, eos = ("tiny", "gpt-x"), (1,)
        model = ModelInfo(
            "org/tiny", names, Path(f"{self.number}"), self.context, 1234, eos, self.vocabulary, self.defaults
        )
        model = replace(model, checkpoints=self.checkpoints)
        if self.second_text is None:
            return (model,)
        second = replace(model, id=SECOND, aliases=("second", "default"), vocabulary=SECOND_VOCABULARY)
        return (model, replace(second, defaults=Sampling(0.5)))

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        return self.stored

    async def acquire_model(
        self, name: str | None, within_s: float = 0.0, keep_s: float | None = None, client: str = ""
    ) -> ModelLease:
        self.clients.append(client)
        self.kept.append(keep_s)
        return self.take_turn(name, within_s)

    def shortage(self) -> RequestError | None:
        return self.short

    def text(self, model: str = "") -> Text | None:
        text = self.second_text if model == SECOND else self.loaded_text
        return text if self.ready else None

    def generate(self, request: Generate, **whose: Any) -> FakeAnswer:
        if self.refusal is not None:
            raise self.refusal
        if len(self.answers) == self.most_open:
            raise RequestError("full", Code.OVERLOADED, status=429)
        self.requests.append(request)
        self.whose.append(SimpleNamespace(**whose))
        script = self.scripts.pop(0) if self.scripts else self.script
        self.answers.append(FakeAnswer(self, script))
        self.answers[-1].group = f"{whose['model']}#0"
        return self.answers[-1]

    @property
    def request(self) -> Generate:
        [request] = self.requests
        return request

    def all_closed(self) -> bool:
        return bool(self.answers) and all(answer.closed.wait(WAIT_S) for answer in self.answers)

    @property
    def finished(self) -> bool:
        return any(answer.finished for answer in self.answers)


@dataclass
class Server:
    """A running server and its backend."""

    backend: FakeBackend
    port: int
    tokenizer: Tokenizer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        url = self.url + path
        return httpx.request(method, url, json=body, headers=headers, timeout=WAIT_S, trust_env=False)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


@contextlib.contextmanager
def meanwhile(act: Callable[[], Any]) -> Iterator[list[Any]]:
    """Do something in another thread that ends before the block does; yields the list for its result."""
    results: list[Any] = []
    helper = threading.Thread(target=lambda: results.append(act()))
    helper.start()
    yield results
    helper.join(WAIT_S)
    assert not helper.is_alive()


@contextlib.contextmanager
def on_loopback(
    app: Any,
    *,
    sock: socket.socket | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
    **options: Any,
) -> Iterator[int]:
    """The port at which an app is served, on a loop of its own, which is closed unless it was given."""
    sock, own, stop = sock or bind("127.0.0.1", 0), loop or asyncio.new_event_loop(), asyncio.Event()
    served = serve(app, sock, stop, grace_s=1, **options)
    thread = threading.Thread(target=own.run_until_complete, args=(served,))
    thread.start()
    try:
        yield sock.getsockname()[1]
    finally:
        own.call_soon_threadsafe(stop.set)
        thread.join(3 * WAIT_S)
    assert not thread.is_alive(), "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0]))
    if loop is None:
        own.close()


@contextlib.contextmanager
def serving(backend: FakeBackend, tokenizer: Tokenizer, **settings: Any) -> Iterator[Server]:
    """A running server. `keep_alive_s` of a stream is longer than any test, unless it is given."""
    app = create_app(backend, max_body_bytes=MAX_BODY_BYTES, **{"keep_alive_s": 600.0} | settings)
    with on_loopback(app) as port:
        yield Server(backend, port, tokenizer)


@pytest.fixture(scope="session")
def running(loaded: dict[str, Loaded]) -> Iterator[Server]:
    byte_level = loaded[BYTE_LEVEL]
    with serving(FakeBackend(byte_level.text), byte_level.tokenizer, retry_after_s=7) as server:
        yield server


@pytest.fixture(scope="session")
def keep_alive_running(loaded: dict[str, Loaded]) -> Iterator[Server]:
    byte_level = loaded[BYTE_LEVEL]
    with serving(FakeBackend(byte_level.text), byte_level.tokenizer, keep_alive_s=0.5) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    """The running server with a fresh script."""
    running.backend.__init__(running.backend.loaded_text)  # type: ignore[misc]
    return running


@pytest.fixture
def keep_alive_server(keep_alive_running: Server) -> Server:
    """One whose streams are never silent for more than half a second."""
    keep_alive_running.backend.__init__(keep_alive_running.backend.loaded_text)  # type: ignore[misc]
    return keep_alive_running


MAX_BODY_BYTES = 300_000
ROOM = 20_000
TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}<|assistant|>{% if enable_thinking %}<think>{% endif %}"
)


class Roomy(FakeBackend):
    """Answers each request that fits with a few words, and has a folder for those who ask about the model."""

    folder = Path()
    words: tuple[int, ...] = ()

    def models(self) -> tuple[ModelInfo, ...]:
        return tuple(replace(model, context=ROOM, path=self.folder) for model in super().models())

    def generate(self, request: Generate, **whose: Any) -> FakeAnswer:
        """As many tokens as are wanted, and as many scores."""
        wanted = list(self.words[: request.max_tokens])
        self.script = says(wanted) if request.logprobs < 0 else says_scored(wanted, top=request.logprobs)
        return super().generate(request, **whose)


@pytest.fixture(scope="module")
def roomy_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tokenizer = byte_level()
    folder = save(tokenizer, tmp_path_factory.mktemp("model"), TOOLS_TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    Roomy.folder = folder
    Roomy.words = tuple(tokenizer.encode("hello world", add_special_tokens=False).ids)
    with serving(Roomy(Text(LocalRenderer.load(folder))), tokenizer) as server:
        yield server


@pytest.fixture
def roomy(roomy_running: Server) -> Server:
    """A server with room for long prompts and many requests, for tools, and for every question."""
    backend = roomy_running.backend
    backend.__init__(backend.loaded_text, most_open=100_000)  # type: ignore[misc]
    return roomy_running
