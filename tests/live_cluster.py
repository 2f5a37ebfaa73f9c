"""A real agent with real rank processes, as a test drives it: synchronous, on loopback, gone when closed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import io
import json
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from mlxtp.agent import Agent, running_agent
from mlxtp.api.backend import StreamEnd, TokenEvent, Tokens, TokenScore
from mlxtp.config import Limits, Settings
from mlxtp.errors import Code, GroupError, MlxtpError, ModelError
from mlxtp.groups.health import ServingState
from mlxtp.groups.lifecycle import Supervisor
from mlxtp.groups.ranks import WORKER
from mlxtp.models.inspect import ModelSource, open_model, weight_bytes
from mlxtp.wire.messages import Generate, Pong, Unload

from .switched_worker import SWITCHES

SLOWNESS = float(os.environ.get("MLXTP_TEST_SLOWNESS", "1"))
"""Times that this machine is slower than a free one. Every real-time deadline is multiplied by it."""

WAIT_S = 60 * SLOWNESS
"""For what ends by itself: a test that waits this long has found a hang."""
START_S = 120 * SLOWNESS
_POLL_S = 0.02

LIMITS = dataclasses.replace(
    Limits(heartbeat_s=0.1),
    **{
        field.name: field.default * SLOWNESS
        for field in dataclasses.fields(Limits)
        if field.name.endswith("_s") and field.name != "heartbeat_s"
    },
)
"""The limits of production, scaled; a fast heartbeat, so that what it reports is fresh."""

without_groups = False
"""True where tests that are marked `group` are left out."""

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, within_s: float = WAIT_S, *, every_s: float = _POLL_S) -> T:
    """Poll until `condition` gives something true, and return it. Fails, saying `what`, if it never does."""
    ends_at = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < ends_at, f"{what}: not within {within_s:g} s"
        time.sleep(every_s)
    return value


def assert_marked() -> None:
    """Assert that a test that starts a group does not run where such tests are left out."""
    assert not without_groups, "a test that starts a group is marked `group`"


def rank_processes(home: Path) -> list[int]:
    """Pids of the living rank processes of the agent in `home`, spares too, with any parent."""
    folder = str(home / "run")
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(argument.startswith(folder) for argument in process.cmdline()):
                found.append(process.pid)
    return sorted(found)


@dataclass(frozen=True)
class Snapshot:
    """Counts of the ranks, at a time when none of them had anything to do."""

    forwards: tuple[int, ...]
    collectives: tuple[int, ...]
    emitted: tuple[int, ...]

    def __sub__(self, earlier: Snapshot) -> Snapshot:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(earlier), strict=True)
        return Snapshot(*(tuple(map(operator.sub, now, then)) for now, then in pairs))


class Cluster:
    """An agent in a thread of its own. `home` is a folder of its own.

    `settings` are those of `Settings`, and of `tests.switched_worker`. Without `spare`, all rank processes
    are ranks. Raises what the agent raises on its way up. With `wait=False` the constructor returns while
    the ranks are still starting.
    """

    def __init__(
        self,
        home: Path,
        *,
        ranks: int = 2,
        model: str | Path = "tiny",
        worker: Sequence[str] = WORKER,
        run_ahead: int = 1,
        prefill_chunk: int = 512,
        limits: Limits = LIMITS,
        spare: bool = False,
        wait: bool = True,
        **settings: Any,
    ) -> None:
        if ranks > 1:
            assert_marked()
        settings.setdefault("repeatable", True)  # drafts would depend on how busy this machine is
        settings.setdefault("cache_disk", 0)
        if switches := {name: settings.pop(name) for name in SWITCHES & settings.keys()}:
            worker = (sys.executable, "-m", "tests.switched_worker", json.dumps(switches), *worker[2:])
        self.home = home
        self.stages: list[tuple[str, float]] = []
        settings |= {"prefill_chunk": prefill_chunk, "run_ahead": run_ahead, "limits": limits}
        self.settings = Settings(home, "127.0.0.1", 0, ranks, str(model), **settings)
        self._worker, self._spares = worker, spare
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._agent: concurrent.futures.Future[Agent] = concurrent.futures.Future()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"agent-{home.name}", daemon=True)
        self._thread.start()
        try:
            self.agent = self._agent.result(START_S)
            if wait:
                self.wait_ready()
        except BaseException:
            self.close()
            raise
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        try:
            async with running_agent(
                self.settings, lambda *s: self.stages.append(s), self._worker, spares=self._spares
            ) as agent:
                self._agent.set_result(agent)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - it is raised again in the test's thread
            if self._agent.done():
                self._ended = error
            else:
                self._agent.set_exception(error)

    def close(self) -> None:
        """End it in order and make sure that nothing is left. May be repeated."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # its loop has just ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), f"the agent does not end; it waits here:\n{self._waiting()}"
        if client := getattr(self, "client", None):
            client.close()
        if self._ended is not None:
            raise self._ended
        self.assert_nothing_left()

    def _waiting(self) -> str:
        where = io.StringIO()
        for task in asyncio.all_tasks(self._loop):
            task.print_stack(file=where)
        return where.getvalue()

    def assert_nothing_left(self) -> None:
        """No rank process lives, and no file of an epoch is left."""
        assert rank_processes(self.home) == []
        run = self.home / "run"
        assert not run.exists() or list(run.iterdir()) == []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = WAIT_S) -> T:
        """Run a coroutine on the agent's event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Raises the MlxtpError for which it never will be ready."""
        self.call(self.agent.wait_ready(), timeout_s)

    def wait_state(self, *states: ServingState, timeout_s: float = START_S) -> ServingState:
        status = self.supervisor.status
        [found] = until(lambda: [s for s in (status.state,) if s in states], f"{states}", timeout_s)
        return found

    @property
    def url(self) -> str:
        return self.agent.url

    @property
    def supervisor(self) -> Supervisor:
        return self.agent.parts.groups.shown.supervisor

    @property
    def epoch(self) -> int:
        return self.supervisor.status.epoch

    def pids(self) -> list[int]:
        """The rank processes of the present epoch, in rank order."""
        ranks = self.supervisor.status.ranks
        assert ranks is not None, "there is no group right now"
        return [child.pid for child in ranks.processes]

    def post(self, text: str, **fields: object) -> httpx.Response:
        """One chat request, greedy unless `fields` say something else."""
        return self.client.post("/v1/chat/completions", json=_body(text, fields))

    def chat(self, text: str, **fields: object) -> dict[str, Any]:
        """The whole answer. Fails unless it is a 200."""
        response = self.post(text, **fields)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def content(self, text: str, **fields: object) -> str:
        """Return the text of the model's answer."""
        return str(self.chat(text, **fields)["choices"][0]["message"]["content"])

    @contextlib.contextmanager
    def open_stream(self, text: str, **fields: object) -> Iterator[Iterator[str]]:
        """The data of each server-sent event as it comes, `[DONE]` and errors included; leaving hangs up."""
        body = _body(text, fields | {"stream": True})
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            yield (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))

    def stream(self, text: str, **fields: object) -> list[dict[str, Any]]:
        """All chunks of an answer that comes to its end."""
        with self.open_stream(text, **fields) as events:
            *chunks, done = events
        assert done == "[DONE]", done
        return [json.loads(chunk) for chunk in chunks]

    def health(self) -> dict[str, Any]:
        """The body of /health, ready or not."""
        return dict(self.client.get("/health").json())

    def idle(self) -> Snapshot:
        """Return the counts of the ranks, once they all report that they are idle and count the same."""

        def settled() -> Snapshot | None:
            self._hear_from_all()
            pongs = self._hear_from_all()  # the first answers may have left before we asked
            if any(pong.phase != "idle" or pong.in_flight for pong in pongs):
                return None
            if len({(pong.stats.forwards, pong.stats.collectives) for pong in pongs}) != 1:
                return None
            counts = ((each.stats.forwards, each.stats.collectives, each.stats.emitted) for each in pongs)
            return Snapshot(*zip(*counts, strict=True))

        return until(settled, "all ranks idle after the same number of forwards")

    def _hear_from_all(self) -> list[Pong]:
        """A heartbeat of every rank that is newer than this call, in rank order."""
        ranks = self.supervisor.status.ranks
        assert ranks is not None, "there is no group right now"
        before = dict(ranks.watch.pongs)

        def newer() -> bool:
            return len(ranks.watch.pongs) == self.settings.ranks and all(
                pong is not before.get(rank) for rank, pong in ranks.watch.pongs.items()
            )

        until(newer, "a heartbeat of every rank")
        return [pong for _, pong in sorted(ranks.watch.pongs.items())]

    def ask(self, wanted: Generate) -> Request:
        """A request straight to the gateway. Raises what the gateway refuses at once."""

        async def begin() -> Any:
            return self.supervisor.gateway.generate(wanted)

        return Request(self, self.call(begin()))

    def ask_all(self, wanted: Sequence[Generate], at_once: int = 256, sharer: str = "") -> list[Outcome]:
        """Many requests, never more than `at_once` open; what came of each, in their order."""

        async def run() -> list[Outcome]:
            turn = asyncio.Semaphore(at_once)

            async def one(each: Generate) -> Outcome:
                async with turn:
                    return await _collect(self.supervisor.gateway.generate(each, sharer=sharer))

            return await asyncio.gather(*(one(each) for each in wanted))

        return self.call(run(), WAIT_S + 2 * SLOWNESS * len(wanted))

    def start(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Request:
        """A request straight to the gateway, greedy unless `fields` of it say something else."""
        return self.ask(Generate(0, tuple(prompt), max_tokens, **fields))

    def complete(
        self, prompt: Sequence[int], max_tokens: int, **fields: Any
    ) -> tuple[tuple[int, ...], StreamEnd]:
        """The tokens that a request emits, and its end."""
        return self.start(prompt, max_tokens, **fields).finish()

    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int
    ) -> list[tuple[tuple[int, ...], StreamEnd]]:
        """Many greedy requests, never more than `at_once` open; answers in the order of the prompts."""
        outcomes = self.ask_all([Generate(0, tuple(prompt), max_tokens) for prompt in prompts], at_once)
        return [(outcome.tokens, outcome.whole()) for outcome in outcomes]

    def load(self, model: str | Path, draft: str | Path = "", **settings: Any) -> None:
        """Serve another model in the same epoch; `settings` are those of `Settings` that loading goes by.

        An agent does that by another epoch. Here it saves the start of the ranks.
        """

        async def work() -> None:
            ranks, supervisor = self.supervisor.status.ranks, self.supervisor
            source = await open_model(str(model), str(draft))
            if supervisor.gateway.models():
                await self._unload()
            ranks.kv_bytes = supervisor.kv.limit_bytes = 0
            ranks._settings = dataclasses.replace(self.settings, **settings)
            try:
                await _serve(supervisor, source)
            except GroupError as error:
                ranks.give_up(error)
                raise

        self.call(work())

    def unload(self) -> None:
        """Serve no model; the group stays."""
        self.call(self._unload())

    async def _unload(self) -> None:
        ranks, supervisor = self.supervisor.status.ranks, self.supervisor
        unloaded = GroupError("the model was unloaded", Code.SHUTTING_DOWN)
        supervisor.gateway.fail(supervisor.deployment, unloaded)
        supervisor.status.recoveries.rested()
        await ranks.do(Unload())
        supervisor.info = None
        supervisor.status.show(ServingState.IDLE)


async def _serve(supervisor: Supervisor, model: ModelSource) -> None:
    """Load a model on the ranks that are there, and serve it."""
    status, ranks = supervisor.status, supervisor.status.ranks
    assert ranks is not None
    status.weight_bytes = await asyncio.to_thread(weight_bytes, model.path)
    status.show(ServingState.LOADING)
    try:
        loaded = await supervisor.loader.bring_up(ranks, model, lambda _: None)
    except ModelError as error:
        status.reason = error
        status.show(ServingState.IDLE)
        raise
    supervisor.source, supervisor.info = model, loaded.info
    group, name, info = supervisor.group, supervisor.deployment, loaded.info
    supervisor.gateway.serve(group, name, ranks, info, model.text, load_s=loaded.load_s)
    await supervisor.kv.serve(ranks, loaded)
    status.ready()


@dataclass(frozen=True)
class Outcome:
    """Results of a request: its tokens, their scores where it asked for them, and its end or its error."""

    tokens: tuple[int, ...]
    scores: tuple[TokenScore, ...]
    end: StreamEnd | None
    error: MlxtpError | None = None

    def whole(self) -> StreamEnd:
        """Its end; raises the error that ended it instead."""
        if self.error is not None:
            raise self.error
        assert self.end is not None
        return self.end


class Request:
    """A request that is open at the gateway, read at the test's own pace."""

    def __init__(self, cluster: Cluster, answer: Any) -> None:
        self._cluster = cluster
        self._answer = answer
        self.tokens: list[int] = []
        self.scores: list[TokenScore] = []
        self.end: StreamEnd | None = None

    def accepted(self) -> None:
        """Wait until rank 0 has taken it. Raises the RequestError that it refuses it with."""
        self._cluster.call(self._answer.accepted())

    def take(self, count: int, timeout_s: float = WAIT_S) -> tuple[int, ...]:
        """Read until `count` tokens have come in all, or the end; returns the tokens so far."""
        self._cluster.call(self.read(count), timeout_s)
        return tuple(self.tokens)

    async def read(self, count: int) -> None:
        """Do what `take` does, on the agent's event loop."""
        while len(self.tokens) < count and self.end is None:
            event: TokenEvent = await anext(self._answer)
            if isinstance(event, Tokens):
                self.tokens += event.tokens
                self.scores += event.scores
            else:
                self.end = event

    def finish(self, timeout_s: float = WAIT_S) -> tuple[tuple[int, ...], StreamEnd]:
        """Everything, and the end. Raises the MlxtpError that ended the request instead."""
        outcome = self._cluster.call(_collect(self._answer), timeout_s)
        self.tokens += outcome.tokens
        self.scores += outcome.scores
        self.end = outcome.whole()
        return tuple(self.tokens), self.end

    def close(self) -> None:
        """Go away before the end."""
        self._cluster.call(self._answer.aclose())


async def _collect(answer: Any) -> Outcome:
    tokens: list[int] = []
    scores: list[TokenScore] = []
    try:
        async for event in answer:
            if isinstance(event, StreamEnd):
                return Outcome(tuple(tokens), tuple(scores), event)
            tokens += event.tokens
            scores += event.scores
    except MlxtpError as error:
        return Outcome(tuple(tokens), tuple(scores), None, error)
    raise AssertionError("a request without an end")


def _body(text: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 64, "temperature": 0, **fields}
