"""A stream that may begin before its answer does: its model loads, or its request waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from ..errors import Code, MlxtpError
from ..text.transcript import AnswerEvent, Finish
from .adapter import About, Dialect, Json
from .backend import Progress
from .error_wording import in_words_of
from .http_errors import internal_error
from .request_context import note

log = logging.getLogger(__name__)


class LoadingStream:
    """Parts of a stream with `about.choices` answers. A failure is the last one.

    `asking` returns the events once rank 0 has accepted the request. `progress` reports the state of the
    request, until the first token.
    """

    def __init__(
        self,
        dialect: Dialect,
        about: About,
        asking: asyncio.Task[AsyncGenerator[AnswerEvent]],
        progress: Callable[[], Progress],
    ) -> None:
        self._dialect = dialect
        self._writer = dialect.writer(about)
        self._asking = asking
        self._progress = progress
        self._choices = about.choices
        self._over = False

    async def parts(self) -> AsyncGenerator[bytes]:
        writer, unfinished = self._writer, self._choices
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
        """Return an event that each client's parser counts, with the progress where the dialect has room.

        Empty once the last part is made, while a slow client may still be reading it.
        """
        return b"" if self._over else self._writer.idle(_fields(self._progress()))


def _fields(progress: Progress) -> Json:
    """Return the fields of an event, named as in llama.cpp's server."""
    if progress.total:
        return {
            "prompt_progress": {
                "total": progress.total,
                "cache": progress.cached,
                "processed": progress.processed,
                "time_ms": progress.time_ms,
            }
        }
    return {"state": progress.state} if progress.state else {}
