"""What a rank is doing, written by the MLX thread and read by the thread that answers Pings."""

from __future__ import annotations

import time
from typing import Literal

from ..wire.messages import Pong

Phase = Literal["starting", "forming", "proving", "loading", "idle", "prefill", "decode", "closing"]


class Status:
    """Plain attributes: each is written by one thread and read whole by another."""

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.in_flight = 0
        self.step = 0
        self.forwards = 0
        self.collectives = 0
        self.emitted = 0
        self.model = ""
        self._since = time.monotonic()

    def enter(self, phase: Phase) -> None:
        """Change the phase; its clock starts again."""
        self.phase = phase
        self.progress()

    def progress(self) -> None:
        """Something was achieved: the time that a stall is judged by starts again."""
        self._since = time.monotonic()

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
        )
