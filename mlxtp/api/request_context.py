"""One HTTP request while it is answered: what its line in the log and the metrics will say of it.

Whoever answers it finds it by `current()`, and so does the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class SequenceProgress(Protocol):
    """One sequence that was generated for it, as far as it has come. Counts of tokens; times in seconds.

    `cached` and `first_s` are None while nobody knows. `reason` is empty before its end.
    """

    prompt: Sequence[int]
    cached: int | None
    generated: int
    first_s: float | None
    reason: str

    def settle(self, *, delivered: bool) -> None:
        """The HTTP request is over; `delivered` says whether its client had all of the answer."""
        ...


class RequestContext:
    """One HTTP request. `arrived` is when all of it was here, by the clock of the metrics."""

    __slots__ = ("answers", "arrived", "code", "id", "key")

    def __init__(self, id: str, arrived: float) -> None:
        self.id = id
        self.arrived = arrived
        self.key = ""
        """The name of the client's key, for servers that ask for one."""
        self.code = ""
        """Of the error that it was answered with."""
        self.answers: list[SequenceProgress] = []

    def settle(self, *, delivered: bool) -> None:
        """It is over."""
        for answer in self.answers:
            answer.settle(delivered=delivered)

    @property
    def prompt_tokens(self) -> int:
        """Of each of its prompts once, however many answers that had."""
        prompts = {id(answer.prompt): len(answer.prompt) for answer in self.answers}
        return sum(prompts.values())

    @property
    def cached_tokens(self) -> int | None:
        """How many of the prompts' tokens were not computed again, as far as rank 0 has said."""
        known = {id(answer.prompt): answer.cached for answer in self.answers if answer.cached is not None}
        return sum(known.values()) if known else None

    @property
    def generated_tokens(self) -> int:
        return sum(answer.generated for answer in self.answers)

    @property
    def first_s(self) -> float | None:
        """From its arrival to the first token of any answer."""
        return min((answer.first_s for answer in self.answers if answer.first_s is not None), default=None)

    @property
    def reason(self) -> str:
        """Why its answers ended, each reason once."""
        return ",".join(dict.fromkeys(answer.reason for answer in self.answers if answer.reason))


_current: ContextVar[RequestContext | None] = ContextVar("account", default=None)


def current() -> RequestContext | None:
    """The request that is being answered here."""
    return _current.get()


@contextmanager
def answering(account: RequestContext) -> Iterator[None]:
    """Meanwhile, in this task and those that it starts, that is the request."""
    token = _current.set(account)
    try:
        yield
    finally:
        _current.reset(token)


def note(code: str) -> None:
    """The request that is being answered here ends with this error."""
    if (account := _current.get()) is not None:
        account.code = code


def note_key(name: str) -> None:
    """It showed the key with this name."""
    if (account := _current.get()) is not None:
        account.key = name
