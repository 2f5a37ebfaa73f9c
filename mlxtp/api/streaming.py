"""Streaming of answers to clients that may leave, with comments that keep proxies from timing out.

A stream may begin before its answer, while a model loads or the request waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import Code, GroupError, MlxtpError
from ..text.transcript import AnswerEvent, ChoiceFinishReason, ContentDelta, Finish, Transcript, WholeAnswer
from .adapter import About, Dialect, Json, in_words_of, internal_error
from .backend import Progress, StreamEnd, Tokens, TokenStream
from .request_context import note

log = logging.getLogger(__name__)

# --- long answers -----------------------------------------------------------------------------------------


T = TypeVar("T")
PARTS_AT_ONCE = 16  # parts of one answer to send before other tasks run

COMMENT = b": mlxtp\n\n"  # a server-sent event without content


class ClientGone(Exception):
    """Signal that the client closed its connection and cannot read the answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` as a task. When the client leaves, cancel it, and raise ClientGone once it has ended.

    The caller has read the request's body.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class AnswerStream(Response):
    """Response that sends the parts of an answer as they are made. `parts` handles its own failures.

    After each `keep_alive_s` of silence, it sends the bytes that `idle` returns. It closes `source`, the
    generator behind the parts, however the stream ends, even before it began.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes],
        source: AsyncGenerator[Any] | AsyncExitStack,
        keep_alive_s: float,
        idle: Callable[[], bytes],
        media_type: str,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._parts = parts
        self._source = source
        self.keep_alive_s = keep_alive_s
        self._idle = idle
        self._quiet_since = 0.0
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that leaves is not an error.
        with suppress(ClientGone, OSError):
            async with aclosing(self._source):
                if scope["method"] == "HEAD":
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await _send_body(send, b"", more=False)
                    return
                await unless_gone(receive, self._send(send))

    async def drained(self, write: Callable[[bytes], None]) -> None:
        """Pass all parts to `write` as they are made, without a client, and close the source."""
        async with aclosing(self._source), aclosing(self._parts) as parts:
            async for part in parts:
                write(part)
                await asyncio.sleep(0)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._parts) as parts:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._quiet_since = asyncio.get_running_loop().time()
            keeper = asyncio.create_task(self._keep_alive(send))
            try:
                at_once = 0
                async for part in parts:
                    if part:
                        await _send_body(send, part)
                        self._quiet_since = asyncio.get_running_loop().time()
                    at_once += 1
                    if at_once == PARTS_AT_ONCE:
                        # Neither `parts` nor `send` has to wait: let other tasks, and a disconnect, run.
                        at_once = 0
                        await asyncio.sleep(0)
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
        await _send_body(send, b"", more=False)

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wait_s = self._quiet_since + self.keep_alive_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                self._quiet_since = loop.time()
                if part := self._idle():
                    await _send_body(send, part)


async def interleaved(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield the items of several sources in the order of their arrival; each is at most one item ahead.

    Raises the first failure; however it ends, all sources are closed.
    """
    queue: asyncio.Queue[_Handed[T]] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(source, queue)) for source in sources]
    try:
        running = len(pumps)
        while running:
            handed = await queue.get()
            if isinstance(handed, Exception):
                raise handed
            if handed is None:
                running -= 1
            else:
                yield handed[0]
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


_Handed = tuple[T] | Exception | None  # an item, a source's failure, or its end (None)


async def _pump(source: AsyncGenerator[T], queue: asyncio.Queue[_Handed[T]]) -> None:
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put((item,))
        await queue.put(None)
    except Exception as error:  # noqa: BLE001 - the reader of the queue raises it
        await queue.put(error)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


# --- several answers --------------------------------------------------------------------------------------


End = Callable[[WholeAnswer, Finish], None]


class Choices:
    """The answers of one request, closed together."""

    def __init__(self) -> None:
        self._answers: list[TokenStream] = []

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: TokenStream) -> None:
        self._answers.append(answer)

    async def accepted(self) -> None:
        for answer in self._answers:
            await answer.accepted()

    @property
    def group(self) -> str:
        return self._answers[0].group if self._answers else ""

    def progress(self) -> Progress:
        return self._answers[0].progress() if self._answers else Progress()

    def events(
        self, transcripts: Sequence[Transcript], ended: End, begun: Sequence[AnswerEvent] = ()
    ) -> AsyncGenerator[AnswerEvent]:
        """Return the events of all answers, one transcript for each. `ended` is called before each `Finish`,
        with an answer that includes `begun`, which the client gave.

        Raises an answer's error: then none is complete.
        """
        parts = [
            _recorded(_events(index, answer, transcript), ended, begun)
            for index, (answer, transcript) in enumerate(zip(self._answers, transcripts, strict=True))
        ]
        return parts[0] if len(parts) == 1 else interleaved(parts)

    async def aclose(self) -> None:
        for answer in self._answers:
            await answer.aclose()


async def collect(events: AsyncGenerator[AnswerEvent], count: int) -> list[WholeAnswer]:
    wholes = [WholeAnswer() for _ in range(count)]
    async for event in events:
        whole = wholes[event.choice]
        whole.see(event)
        if isinstance(event, ContentDelta) and event.prompt:
            whole.prompt.extend(event.scores)
        elif isinstance(event, ContentDelta):
            whole.scores.extend(event.scores)
    return wholes


async def _events(index: int, answer: TokenStream, transcript: Transcript) -> AsyncGenerator[AnswerEvent]:
    """Yield the events of one answer. A stop string ends it on every rank; then only used tokens count."""
    began_ns = 0
    async for event in answer:
        if isinstance(event, Tokens) and event.prompt:
            transcript.push_prompt(event.tokens, event.scores)
            continue
        for said in transcript.prompt_scores():
            yield said
        if isinstance(event, StreamEnd):
            if event.reason == "cancel":
                raise GroupError("the request was cancelled on the server", Code.SHUTTING_DOWN)
            for said in transcript.finish(cut=event.reason == "length"):
                yield said
            end = event
            if transcript.silent:
                end = StreamEnd("length", 0, event.cached)
            elif transcript.stopped:
                end = StreamEnd("stop", transcript.used, event.cached, event.drafted, event.accepted)
            break
        began_ns = began_ns or time.perf_counter_ns()
        for said in transcript.push(event.tokens, event.scores):
            yield said
        if transcript.stopped:
            await answer.aclose()
            for said in transcript.finish():
                yield said
            end = StreamEnd("stop", transcript.used, answer.cached)
            break
    else:
        raise GroupError("the answer broke off", Code.INTERNAL)
    yield _finish(index, transcript, end, began_ns)


async def _recorded(
    events: AsyncGenerator[AnswerEvent], end: End, begun: Sequence[AnswerEvent]
) -> AsyncGenerator[AnswerEvent]:
    record = WholeAnswer()
    for event in begun:
        record.see(event)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Finish):
                end(record, event)
            else:
                record.see(event)
            yield event


def _finish(index: int, transcript: Transcript, end: StreamEnd, began_ns: int) -> Finish:
    """Return the last event. "length" takes precedence over a call that the limit cut off."""
    why: ChoiceFinishReason = (
        "length" if end.reason == "length" else "tool_calls" if transcript.called else "stop"
    )
    return Finish(index, why, end, transcript.stopped_by, transcript.thought, began_ns)


# --- streams before their answers -------------------------------------------------------------------------


class LoadingStream:
    """Parts of a stream with `about.choices` answers. A failure is the last one.

    `asking` returns the events once rank 0 has accepted the request; `progress` is for the time until then.
    """

    def __init__(
        self,
        dialect: Dialect,
        about: About,
        asking: asyncio.Task[AsyncGenerator[AnswerEvent]],
        progress: Callable[[], Progress],
    ) -> None:
        self._dialect = dialect
        self.writer = dialect.writer(about)
        self._asking = asking
        self._progress = progress
        self._choices = about.choices
        self._over = False

    async def parts(self) -> AsyncGenerator[bytes]:
        writer, unfinished = self.writer, self._choices
        try:
            yield writer.open() + (b"" if self._asking.done() else self.idle())
            async with aclosing(await self._asking) as events:
                yield writer.begin()
                async for event in events:
                    part = writer.write(event)
                    unfinished -= isinstance(event, Finish)
                    if unfinished:
                        yield part
                    else:
                        self._over = True
                        yield part + writer.close()
        except MlxtpError as error:
            log.warning("stream failed with %s: %s", error.code, error.detail)
            note(error.code)
            self._over = True
            yield writer.fail(in_words_of(self._dialect, error))
        except Exception:  # the request ends here, the server continues
            log.exception("stream failed")
            note(Code.INTERNAL)
            self._over = True
            yield writer.fail(internal_error())

    def idle(self) -> bytes:
        """Return an event with the progress; empty after the last part, which may still be unread."""
        return b"" if self._over else self.writer.idle(_fields(self._progress()))


def _fields(progress: Progress) -> Json:
    """Return the fields of an event, named as in llama.cpp's server."""
    if not progress.total:
        return {"state": progress.state} if progress.state else {}
    found = {"total": progress.total, "cache": progress.cached, "processed": progress.processed}
    return {"prompt_progress": found | {"time_ms": progress.time_ms}}
