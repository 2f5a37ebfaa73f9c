"""Time limits for the end of a rank process, the same for a rank and its agent."""

from __future__ import annotations

PATIENCE_S = 10.0  #: seconds for the main thread to return from its work
STEPS = 4  #: forwards that the main thread may take instead, if that is longer
FREE_S = 20.0  #: seconds for giving memory back
ANSWER_S = 2.0  #: seconds for any sign of a rank after SIGTERM; without one its interpreter hangs


def patience_s(forward_s: float) -> float:
    """Return the seconds within which a main thread must return whose forwards take `forward_s` seconds."""
    return max(PATIENCE_S, STEPS * forward_s)
