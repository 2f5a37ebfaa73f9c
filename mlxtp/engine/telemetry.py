"""State of a rank: its last steps, in memory that outlives it, and the current state that Pongs report."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import time
from collections import deque
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from struct import Struct
from typing import Literal, Self

from ..wire import recording
from ..wire.messages import Pong
from ..wire.rank_process import PATIENCE_FORWARDS, patience_s
from ..wire.rank_stats import RankStats
from .payoff import DraftUse

# --- flight recorder -------------------------------------------------------------------------------------
# The memory is a mapped file. The agent reads it after this process has ended, even if it crashed. The file
# has counts, times and digests, but no token or text of a request. A step costs about a microsecond.

PROMPT, PROMPTS, STEP = (recording.KINDS.index(kind) for kind in ("prompt", "prompts", "step"))
_PHASES = {phase: place for place, phase in enumerate(recording.PHASES)}
_THIRD, _END = Struct("=dQQ"), Struct("=dQ")  # parts of a slot; each begins with a time
_NO_FILE = -1


class Recorder:
    """Writer of a recording. One thread writes steps; any thread may write last words. No file: no record."""

    def __init__(self, descriptor: int = _NO_FILE) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, recording.RECORDING_BYTES)
        self._slots = cycle(range(recording.HEADER_BYTES, recording.RECORDING_BYTES, recording.SLOT.size))
        recording.BEGAN.pack_into(self._memory, 0, recording.MAGIC, time.time(), time.monotonic())
        self.entered("starting")

    @classmethod
    def at(cls, path: Path) -> Self:
        return cls(os.open(path, os.O_RDWR | os.O_APPEND))

    def catch_crashes(self) -> None:
        """Write all stacks at a fatal signal, and the main one at SIGTERM; set SIGTERM's handler before."""
        if self._descriptor != _NO_FILE:
            faulthandler.enable(self._descriptor)
            faulthandler.register(signal.SIGTERM, self._descriptor, all_threads=False, chain=True)

    def started(self, seq: int, kind: int, rows: int, now: float) -> int:
        at = next(self._slots)
        _THIRD.pack_into(self._memory, at, now, seq, rows << 8 | kind)
        return at

    def queued(self, at: int, forwards: int, collectives: int) -> None:
        _THIRD.pack_into(self._memory, at + _THIRD.size, time.monotonic(), forwards, collectives)

    def finished(self, at: int, now: float, digest: int, fed: int) -> None:
        _END.pack_into(self._memory, at + 2 * _THIRD.size, now, fed << 32 | digest)

    def entered(self, phase: str) -> None:
        recording.PHASE.pack_into(self._memory, recording.PHASE_AT, time.monotonic(), _PHASES[phase])

    def gave_back(self) -> None:
        self._memory[recording.GAVE_BACK_AT] = 1

    def last_words(self, code: str, detail: str) -> None:
        what, why = code.encode(), detail.encode(errors="replace")[: recording.MAX_WORDS_BYTES]
        at = recording.WORDS_AT + recording.WORDS.size
        self._memory[at : at + len(what) + len(why)] = what + why
        recording.WORDS.pack_into(self._memory, recording.WORDS_AT, time.monotonic(), len(what), len(why))


# --- current state, written by the MLX thread and read by the thread that replies to Pings ---------------

Phase = Literal[
    "starting", "forming", "proving", "loading", "idle", "measuring", "prefill", "decode", "closing"
]

LEAST_PATIENCE_S = 1.0  # least time for the main thread to return from its current work
RECENT = 0.1  # weight of the newest forward in the averages
#: Weights in the expected time, if the newest forward took longer (as with new kernels), or less.
_SLOWER, _FASTER = 0.05, 0.3
#: Expected time of each row in a step, in times of a single row: about 0 on a GPU, 1 on a CPU.
_ROWS = 0.2


class RankTelemetry:
    """Current state in plain attributes: one thread writes each, and another reads it and copies `stats`."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or Recorder()
        self.phase: Phase = "starting"
        self.in_flight = 0
        self.step = 0
        self.model = ""
        self.stats = RankStats()
        self.drafts = DraftUse()
        self.expected_us = 0
        self._since = time.monotonic()
        #: Phase and tokens of the forwards in flight. The device runs them in order.
        self._flying: deque[tuple[Phase, int]] = deque()
        self._began = 0.0  # when the oldest one began
        self._step_us = self._wait_us = 0.0
        self._step_s: float | None = None  # time of a decode step with any number of rows
        self._token_s: dict[Phase, float] = {}  # time of a forward for each of its tokens

    def unloaded(self) -> None:
        had, self.model, self.drafts.mtp = self.stats, "", False
        left = RankStats(forwards=had.forwards, collectives=had.collectives)
        left.emitted, left.collective_us = had.emitted, had.collective_us
        self.stats = left  # in one assignment, because another thread reads it

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.recorder.entered(phase)
        self.advance()

    def advance(self) -> None:
        """Record progress, which restarts the clock for stalls."""
        self._since = time.monotonic()

    def launched(self, phase: Phase, tokens: int, now: float) -> None:
        self._flying.append((phase, tokens))
        self.in_flight += 1
        if self.in_flight == 1:
            self._since = self._began = now  # the time since the last forward was idling
            self._runs(phase, tokens)

    def settled(self, now: float) -> float:
        """Return the seconds that the oldest forward in flight took; 0 without one."""
        if not self._flying:  # the forward failed in flight
            return 0.0
        self.in_flight -= 1
        phase, tokens = self._flying.popleft()
        took_s = now - self._began
        self._since = self._began = now
        self._token_s[phase] = _followed(self._token_s.get(phase), took_s / max(tokens, 1))
        if phase == "decode":
            self._step_s = _followed(self._step_s, took_s)
        if self._flying:
            self._runs(*self._flying[0])
        return took_s

    def _runs(self, phase: Phase, tokens: int) -> None:
        self.phase = phase
        expected_s = self._token_s.get(phase, 0.0) * tokens
        if phase == "decode":
            expected_s = max(self._step_s or 0.0, expected_s * _ROWS)
        self.expected_us = int(expected_s * 1e6)

    def took(self, step_us: int, wait_us: int) -> None:
        self._step_us += (step_us - self._step_us) * RECENT
        self._wait_us += (wait_us - self._wait_us) * RECENT

    @property
    def in_collective(self) -> bool:
        return self.in_flight > 0 or self.phase in ("forming", "proving", "measuring")

    def patience_s(self) -> float:
        """Return the seconds that the main thread may still take; few if it has no weights to free."""
        if not self.stats.weight_bytes and self.phase != "loading":
            return LEAST_PATIENCE_S
        stood_s = 0.0 if self.phase in ("idle", "closing") else time.monotonic() - self._since
        return max(patience_s(self.expected_us / 1e6) - stood_s, LEAST_PATIENCE_S)

    def in_flight_s(self) -> float:
        return max(PATIENCE_FORWARDS * self.expected_us / 1e6, LEAST_PATIENCE_S)

    def pong(self) -> Pong:
        import mlx.core as mx

        pool_bytes = mx.get_cache_memory()
        since = self._since  # read before the clock, because the main thread may begin a phase meanwhile
        phase, in_flight, step = self.phase, self.in_flight, self.step  # read before `stats`
        stats = replace(
            self.stats,
            memory_bytes=mx.get_active_memory() + pool_bytes,
            pool_bytes=pool_bytes,
            peak_memory_bytes=mx.get_peak_memory(),
            step_us=int(self._step_us),
            wait_us=int(self._wait_us),
            **self.drafts.figures(),
        )
        phase_s = time.monotonic() - since
        return Pong(phase, phase_s, in_flight, step, self.model, stats, self.expected_us)


def _followed(known_s: float | None, took_s: float) -> float:
    if known_s is None:
        return took_s
    return known_s + (took_s - known_s) * (_SLOWER if took_s > known_s else _FASTER)
