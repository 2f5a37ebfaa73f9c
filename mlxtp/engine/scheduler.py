"""Decides, on rank 0 alone, which forward comes next. Pure: no MLX, no clock, no I/O.

A sequence waits, prefills in chunks, runs, and stops. Each call of `next` names one move; `record` takes
what a forward produced. With run-ahead, `next` is called before the results of the previous forward are
known, so a sequence that meets its end token has one more forward on its way: its result is thrown away.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

Reason = Literal["stop", "length", "cancel"]


@dataclass(frozen=True, slots=True)
class Prefill:
    """One forward over the prompt's tokens from `offset` on."""

    uid: int
    tokens: tuple[int, ...]
    offset: int
    total: int

    @property
    def last(self) -> bool:
        """Whether this chunk ends the prompt, and so gives the first new token."""
        return self.offset + len(self.tokens) == self.total


@dataclass(frozen=True, slots=True)
class Decode:
    """One forward over the running batch."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """A sequence leaves after `forwards` forwards."""

    uid: int
    reason: Reason
    forwards: int


Move = Prefill | Decode | Stop


@dataclass(frozen=True, slots=True)
class Token:
    """A token for the client: the `index`-th (from 0) of `uid`."""

    uid: int
    index: int
    token: int


@dataclass(frozen=True, slots=True)
class End:
    """The last word about a sequence. `generated` counts the end token too."""

    uid: int
    reason: Reason
    generated: int
    forwards: int


Outcome = Token | End


@dataclass(slots=True)
class _Sequence:
    uid: int
    prompt: tuple[int, ...]
    max_tokens: int
    prefilled: int = 0
    scheduled: int = 0
    generated: int = 0
    forwards: int = 0
    stopped: bool = False


class Scheduler:
    """Books of every sequence from admission to its end.

    `prefill_chunk`: most prompt tokens in one forward, and between two decode steps of the others.
    `max_rows`: most sequences in the running batch.
    """

    def __init__(self, *, eos: frozenset[int], prefill_chunk: int, max_rows: int) -> None:
        self._eos = eos
        self._prefill_chunk = prefill_chunk
        self._max_rows = max_rows
        self._sequences: dict[int, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._stops: deque[Stop] = deque()
        self._budget = prefill_chunk

    def __len__(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    def add(self, uid: int, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Admit a sequence; it waits behind those that came before."""
        sequence = _Sequence(uid, prompt, max_tokens)
        self._sequences[uid] = sequence
        self._waiting.append(sequence)

    def cancel(self, uid: int) -> End | None:
        """End a sequence now; None when it has ended already."""
        sequence = self._sequences.get(uid)
        if sequence is None:
            return None
        self._stop(sequence, "cancel")
        return self._end(sequence, "cancel")

    def next(self) -> Move | None:
        """The next move, or None when there is nothing to run before more results or requests come.

        Sequences that are over leave first. Then prompts, up to one chunk of tokens between two decode steps,
        so that a long prompt never holds the others up for more than one chunk.
        """
        if self._stops:
            return self._stops.popleft()
        if self._waiting and self._may_prefill(self._waiting[0]):
            return self._next_prefill(self._waiting[0])
        if self._running:
            return self._next_decode()
        return None

    def record(self, uids: tuple[int, ...], tokens: tuple[int, ...]) -> list[Outcome]:
        """Take the tokens that a forward chose for `uids`; returns what the clients get of it."""
        outcomes: list[Outcome] = []
        for uid, token in zip(uids, tokens, strict=True):
            sequence = self._sequences.get(uid)
            if sequence is None:
                continue  # it ended while this forward was on its way
            sequence.generated += 1
            if token in self._eos:
                self._stop(sequence, "stop")
                outcomes.append(self._end(sequence, "stop"))
                continue
            outcomes.append(Token(uid, sequence.generated - 1, token))
            if sequence.generated == sequence.max_tokens:
                outcomes.append(self._end(sequence, "length"))
        return outcomes

    def _may_prefill(self, sequence: _Sequence) -> bool:
        if not self._running:
            return True
        chunk = min(self._prefill_chunk, len(sequence.prompt) - sequence.prefilled)
        return chunk <= self._budget and len(self._running) < self._max_rows

    def _next_prefill(self, sequence: _Sequence) -> Prefill:
        if not self._running:
            self._budget = self._prefill_chunk
        offset = sequence.prefilled
        tokens = sequence.prompt[offset : offset + self._prefill_chunk]
        self._budget -= len(tokens)
        sequence.prefilled += len(tokens)
        sequence.forwards += 1
        move = Prefill(sequence.uid, tokens, offset, len(sequence.prompt))
        if move.last:
            self._waiting.popleft()
            self._running.append(sequence)
            self._scheduled_one(sequence)
        return move

    def _next_decode(self) -> Decode:
        self._budget = self._prefill_chunk
        move = Decode(tuple(sequence.uid for sequence in self._running))
        for sequence in tuple(self._running):
            sequence.forwards += 1
            self._scheduled_one(sequence)
        return move

    def _scheduled_one(self, sequence: _Sequence) -> None:
        sequence.scheduled += 1
        if sequence.scheduled == sequence.max_tokens:
            self._stop(sequence, "length")

    def _stop(self, sequence: _Sequence, reason: Reason) -> None:
        """No further forward for this sequence; results that are on their way still count."""
        if sequence.stopped:
            return
        sequence.stopped = True
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.forwards:
            self._stops.append(Stop(sequence.uid, reason, sequence.forwards))

    def _end(self, sequence: _Sequence, reason: Reason) -> End:
        del self._sequences[sequence.uid]
        return End(sequence.uid, reason, sequence.generated, sequence.forwards)
