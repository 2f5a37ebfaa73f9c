"""Time limits for the end of a rank process. A rank and its agent count alike."""

from __future__ import annotations

PATIENCE_S = 10.0  #: for the main thread to come back from what it does
STEPS = 4  #: forwards, where these take longer
FREE_S = 20.0  #: for giving memory back
ANSWER_S = 2.0  #: for any sign of a rank that got SIGTERM; without one its interpreter is wedged


def patience_s(forward_s: float) -> float:
    """Return how many seconds a main thread has to come back whose forwards take `forward_s` seconds."""
    return max(PATIENCE_S, STEPS * forward_s)
