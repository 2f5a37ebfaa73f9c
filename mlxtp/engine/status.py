"""What a rank is doing, written by the MLX thread and read by the thread that answers Pings."""

from __future__ import annotations

import time
from typing import Literal

from ..wire.messages import Pong
from .recorder import Recorder

Phase = Literal[
    "starting", "forming", "proving", "loading", "idle", "measuring", "prefill", "decode", "closing"
]


RECENT = 0.1
"""Weight of the newest forward in the averages."""


class Status:
    """Plain attributes: each is written by one thread and read whole by another.

    What shall be known when this process is gone goes to the `recorder`.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or Recorder()
        self.phase: Phase = "starting"
        self.in_flight = 0
        self.step = 0
        self.forwards = 0
        self.collectives = 0
        self.emitted = 0
        self.model = ""
        self.weight_bytes = 0
        self.load_peak_bytes = 0
        self.kv_bytes = 0
        self.step_us = 0.0
        self.wait_us = 0.0
        self.collective_us = 0
        self._since = time.monotonic()

    def enter(self, phase: Phase) -> None:
        """Change the phase; its clock starts again."""
        self.phase = phase
        self.recorder.entered(phase)
        self.progress()

    def progress(self) -> None:
        """Something was achieved: the time that a stall is judged by starts again."""
        self._since = time.monotonic()

    def took(self, step_us: int, wait_us: int) -> None:
        """A forward ended; averages follow the newest ten or so."""
        self.step_us += (step_us - self.step_us) * RECENT
        self.wait_us += (wait_us - self.wait_us) * RECENT

    def pong(self) -> Pong:
        import mlx.core as mx

        return Pong(
            phase=self.phase,
            phase_s=time.monotonic() - self._since,
            in_flight=self.in_flight,
            step=self.step,
            forwards=self.forwards,
            collectives=self.collectives,
            emitted=self.emitted,
            memory_bytes=mx.get_active_memory(),
            peak_memory_bytes=mx.get_peak_memory(),
            model=self.model,
            weight_bytes=self.weight_bytes,
            load_peak_bytes=self.load_peak_bytes,
            kv_bytes=self.kv_bytes,
            step_us=int(self.step_us),
            wait_us=int(self.wait_us),
            collective_us=self.collective_us,
        )
