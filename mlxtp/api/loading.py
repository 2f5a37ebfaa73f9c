"""A stream that begins while its model is still being loaded: what its client gets until it is."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from ..errors import Code, MlxtpError
from .account import note
from .adapter import SSE, About, Dialect, Writer
from .ask import Ask
from .backend import Turn
from .errors import internal_error
from .text.tokens import Name
from .wording import in_words_of

log = logging.getLogger(__name__)

Begin = Callable[[], Awaitable[tuple[Writer, AsyncGenerator[bytes]]]]
"""The answer's writer and its parts, once the model is there. Raises MlxtpError."""


class Loading:
    """The parts of such a stream. A failure is its last word: the status went out with the headers."""

    def __init__(self, dialect: Dialect, ask: Ask, turn: Turn, begin: Begin) -> None:
        self._dialect = dialect
        self._turn = turn
        self._begin = begin
        self._writer = dialect.writer(_before_it_is_known(ask))
        self._begun = False

    async def parts(self) -> AsyncGenerator[bytes]:
        try:
            async for what in self._turn.wait():
                yield self._waiting(what)
            self._writer, parts = await self._begin()
            self._begun = True
        except MlxtpError as error:
            log.warning("stream failed with %s: %s", error.code, error.detail)
            note(error.code)
            yield self._writer.fail(in_words_of(self._dialect.names, error))
        except Exception:  # the request ends here, the server goes on
            log.exception("stream failed")
            note(Code.INTERNAL)
            yield self._writer.fail(internal_error())
        else:
            async with aclosing(parts):
                async for part in parts:
                    yield part

    def idle(self) -> bytes:
        """What keeps the client patient, and tells it how far the model is."""
        return self._writer.idle() if self._begun else self._waiting(self._turn.progress())

    def _waiting(self, what: str) -> bytes:
        if self._dialect.media_type != SSE:
            return self._writer.idle()
        return f": {' '.join(what.split())}\n\n".encode()


def _before_it_is_known(ask: Ask) -> About:
    """What can be said of an answer whose model has yet to come."""

    def unnamed(_token: int) -> Name:
        return "", None

    return About(uuid.uuid4().hex, time.time(), ask.model or "", (0,), ("",), unnamed, ask)
