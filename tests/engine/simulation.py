"""The decode loop without ranks: drives a scheduler as rank 0 does, and keeps what happened."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mlxtp.engine.scheduler import Decode, End, Move, Prefill, Scheduler, Stop, Token

EOS = 1


@dataclass
class Request:
    """`says` is what the model will answer, as long as one asks; it ends with EOS or never does."""

    uid: int
    prompt: tuple[int, ...]
    max_tokens: int
    says: tuple[int, ...]
    cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def answer(self, index: int) -> int:
        return self.says[index] if index < len(self.says) else 2 + (self.uid * 31 + index) % 50

    @property
    def expected(self) -> tuple[tuple[int, ...], str]:
        """The visible tokens and the reason, when nobody interferes."""
        tokens = []
        for index in range(self.max_tokens):
            token = self.answer(index)
            if token == EOS:
                return tuple(tokens), "stop"
            tokens.append(token)
        return tuple(tokens), "length"


class Simulation:
    """`run_ahead`: how many forwards are queued before the tokens of an earlier one are known."""

    def __init__(self, *, prefill_chunk: int = 4, max_rows: int = 8, run_ahead: int = 1) -> None:
        self.scheduler = Scheduler(eos=frozenset([EOS]), prefill_chunk=prefill_chunk, max_rows=max_rows)
        self.requests: dict[int, Request] = {}
        self.moves: list[Move] = []
        self.must_stop: set[int] = set()
        """Sequences whose end the scheduler knows, and that have been in a forward, but have not left."""
        self._run_ahead = run_ahead
        self._running: deque[tuple[int, ...]] = deque()
        self._chosen: dict[int, int] = {}
        """Tokens that forwards have chosen for each sequence, those nobody will see included."""

    def add(self, prompt: int = 3, max_tokens: int = 5, says: tuple[int, ...] = ()) -> Request:
        uid = len(self.requests) + 1
        request = Request(uid, tuple(range(100, 100 + prompt)), max_tokens, says)
        self.requests[uid] = request
        self.scheduler.add(uid, request.prompt, max_tokens)
        return request

    def cancel(self, uid: int) -> End | None:
        end = self.scheduler.cancel(uid)
        if end is not None:
            self.requests[uid].cancelled = True
            self._end(end)
        return end

    def tick(self) -> Move | None:
        """One turn of the loop: make a move, then take the tokens of what has run long enough."""
        move = self.scheduler.next()
        if move is not None:
            self._make(move)
        keep = self._run_ahead if move is not None else 0
        while len(self._running) > keep:
            self._settle()
        return move

    def drain(self, turns: int = 100_000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(turns):
            quiet = not self._running
            if self.tick() is None and quiet:
                return
        raise AssertionError("the scheduler never comes to rest")

    def moves_of(self, uid: int) -> list[Move]:
        return [m for m in self.moves if (uid in m.rows if isinstance(m, Decode) else uid == m.uid)]

    def forwards_of(self, uid: int) -> int:
        return len([m for m in self.moves_of(uid) if not isinstance(m, Stop)])

    def _make(self, move: Move) -> None:
        self.moves.append(move)
        match move:
            case Stop():
                self.must_stop.discard(move.uid)
                return
            case Prefill():
                uids: tuple[int, ...] = (move.uid,) if move.last else ()
            case Decode():
                uids = move.rows
        # Whoever is over leaves before anybody moves on.
        assert not self.must_stop
        self._running.append(uids)

    def _settle(self) -> None:
        uids = self._running.popleft()
        tokens = []
        for uid in uids:
            index = self._chosen.get(uid, 0)
            self._chosen[uid] = index + 1
            tokens.append(self.requests[uid].answer(index))
        for outcome in self.scheduler.record(uids, tuple(tokens)):
            match outcome:
                case Token():
                    assert not self.requests[outcome.uid].ends
                    self.requests[outcome.uid].tokens.append(outcome.token)
                    self.requests[outcome.uid].indices.append(outcome.index)
                case End():
                    self._end(outcome)

    def _end(self, end: End) -> None:
        self.requests[end.uid].ends.append(end)
        if self.forwards_of(end.uid) and not any(isinstance(m, Stop) for m in self.moves_of(end.uid)):
            self.must_stop.add(end.uid)
