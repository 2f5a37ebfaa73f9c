"""Flight recorder of a rank: its last steps, in memory that outlives the process.

The memory belongs to a file that the agent created and reads after this process has ended. So a failing
process need not write anything. It holds counts, times and digests, no token and no text of a request. A
step costs about a microsecond.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import time
from pathlib import Path
from time import monotonic
from typing import Self

from ..wire.recording import (
    BEGAN,
    HEADER_BYTES,
    KINDS,
    MAGIC,
    MAX_WORDS_BYTES,
    PHASE,
    PHASE_AT,
    PHASES,
    RECORDING_BYTES,
    SLOT_WORDS,
    STEPS,
    WORD_BYTES,
    WORDS,
    WORDS_AT,
)

PROMPT, PROMPTS, STEP = (KINDS.index(kind) for kind in ("prompt", "prompts", "step"))
_PHASES = {phase: place for place, phase in enumerate(PHASES)}
_FIRST = HEADER_BYTES // WORD_BYTES
_NO_FILE = -1


class Recorder:
    """Writer of one recording, laid out as in `wire/recording.py`.

    One thread writes steps; any thread may write the last words. `descriptor` belongs to a file of
    RECORDING_BYTES that is open for appending. Without it, the recording is discarded.
    """

    __slots__ = ("_descriptor", "_doubles", "_integers", "_memory", "_next")

    def __init__(self, descriptor: int = _NO_FILE) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, RECORDING_BYTES)
        words = memoryview(self._memory)
        self._doubles, self._integers = words.cast("d"), words.cast("Q")
        self._next = 0
        BEGAN.pack_into(self._memory, 0, MAGIC, time.time(), monotonic())
        self.entered("starting")

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open a recorder in the agent's file `path`. Raises OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        return cls(descriptor)

    def catch_crashes(self) -> None:
        """Write all stacks at a fatal signal, and the main thread's at SIGTERM.

        Call it after SIGTERM has its handler, which then runs after the write.
        """
        if self._descriptor != _NO_FILE:
            faulthandler.enable(self._descriptor)
            faulthandler.register(signal.SIGTERM, self._descriptor, all_threads=False, chain=True)

    def started(self, seq: int, kind: int, rows: int, now: float) -> int:
        """Record the start of a forward at `now` (monotonic, in seconds). Returns its place here."""
        at = _FIRST + self._next % STEPS * SLOT_WORDS
        self._next += 1
        self._doubles[at] = now
        integers = self._integers
        integers[at + 1] = seq
        integers[at + 2] = rows << 8 | kind
        return at

    def queued(self, at: int, forwards: int, collectives: int) -> None:
        """Record that the forward is built, and the device works on it."""
        integers = self._integers
        integers[at + 4] = forwards
        integers[at + 5] = collectives
        self._doubles[at + 3] = monotonic()

    def finished(self, at: int, now: float, digest: int, fed: int) -> None:
        """Record that the forward's tokens are known."""
        self._integers[at + 7] = fed << 32 | digest
        self._doubles[at + 6] = now

    def entered(self, phase: str) -> None:
        """Record that the rank has entered another phase."""
        PHASE.pack_into(self._memory, PHASE_AT, monotonic(), _PHASES[phase])

    def last_words(self, code: str, detail: str) -> None:
        """Record why this process ends."""
        what, why = code.encode(), detail.encode(errors="replace")[:MAX_WORDS_BYTES]
        at = WORDS_AT + WORDS.size
        self._memory[at : at + len(what) + len(why)] = what + why
        WORDS.pack_into(self._memory, WORDS_AT, monotonic(), len(what), len(why))
