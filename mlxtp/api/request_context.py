"""The current HTTP request, returned by `current`: facts for its log line and the metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class SequenceProgress(Protocol):
    """Progress of one sequence of the request. Counts of tokens; times in seconds.

    `cached` and `first_s` are None while unknown. `reason` is empty before its end.
    """

    prompt: Sequence[int]
    cached: int | None
    generated: int
    first_s: float | None
    reason: str

    def settle(self, *, delivered: bool) -> None:
        """Note the end of the HTTP request; `delivered`: its client received the whole answer."""


class RequestContext:
    """One HTTP request. `arrived` is the time when all of it had arrived, by the metrics' clock.

    `origin` describes the sender if there is no key. `app` is the client program's name for itself.
    """

    __slots__ = (
        "admitted", "answers", "app", "arrived", "batch", "code", "counted_tokens", "id", "key", "key_hash",
        "loads", "models", "origin",
    )  # fmt: skip

    def __init__(self, id: str, arrived: float, origin: str = "") -> None:
        self.id = id
        self.arrived = arrived
        self.origin = origin
        self.app = ""
        self.key = ""  # name of the client's key, for servers that require one
        self.key_hash = ""  # SHA-256 of that key, equal on all servers that know it
        self.models: tuple[str, ...] = ()  # models that it may use; empty for all
        self.admitted = False  # a guard let it through
        self.loads = True  # it may load models
        self.batch = False  # its key is of class batch
        self.code = ""  # code of the error in its answer
        self.counted_tokens = 0  # of prompts that the client only had counted
        self.answers: list[SequenceProgress] = []

    def settle(self, *, delivered: bool) -> None:
        for answer in self.answers:
            answer.settle(delivered=delivered)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompts. A prompt with several answers counts once."""
        return sum({id(answer.prompt): len(answer.prompt) for answer in self.answers}.values())

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that rank 0 took from the cache."""
        known = {id(answer.prompt): answer.cached for answer in self.answers if answer.cached is not None}
        return sum(known.values()) if known else None

    @property
    def generated_tokens(self) -> int:
        return sum(answer.generated for answer in self.answers)

    @property
    def first_s(self) -> float | None:
        """Seconds from its arrival to the first token of any answer."""
        return min((answer.first_s for answer in self.answers if answer.first_s is not None), default=None)

    @property
    def reason(self) -> str:
        return ",".join(dict.fromkeys(answer.reason for answer in self.answers if answer.reason))


_current: ContextVar[RequestContext | None] = ContextVar("account", default=None)


def current() -> RequestContext | None:
    return _current.get()


def own_models() -> tuple[str, ...]:
    """Return the models that the current request's key may use; () for all."""
    account = _current.get()
    return () if account is None else account.models


@contextmanager
def answering(account: RequestContext) -> Iterator[None]:
    """Make `account` the current request in this task and its child tasks."""
    token = _current.set(account)
    try:
        yield
    finally:
        _current.reset(token)


def note(code: str) -> None:
    if (account := _current.get()) is not None:
        account.code = code


def note_key(
    name: str, key_hash: str, models: tuple[str, ...] = (), *, loads: bool = True, batch: bool = False
) -> None:
    if (account := _current.get()) is not None:
        account.key, account.key_hash, account.models = name, key_hash, models
        account.loads, account.batch = loads, batch
