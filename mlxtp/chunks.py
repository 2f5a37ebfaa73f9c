"""Sizes that the engine shares with the plans of its speed and memory. Pure."""

from __future__ import annotations

from .wire.messages import MAX_WIDTH

USUAL = 2048  #: tokens of a chunk that runs alone; a GPU reads the weights once for all of them
BUFFERED = 512  #: most tokens with large command buffers, which hold the arrays of many operations
BESIDE = 256  #: tokens of a chunk that shares steps, until its time is known
_RING_STEP = 64


def bounded(wanted: int, *, large_buffers: bool) -> int:
    return min(wanted, BUFFERED) if large_buffers else wanted


def chunk_of(alone: int, stages: int, least: int = BESIDE) -> int:
    """Return the tokens of a chunk in a pipeline of `stages`, which smaller chunks fill sooner."""
    if stages == 1:
        return alone
    return min(max(1 << (alone // (2 * stages)).bit_length() - 1, least), alone)


def ring_slots(window: int) -> int:
    """Return the most slots of a layer that keeps a window of `window` tokens.

    A step writes up to MAX_WIDTH tokens, and the first of them needs its whole window.
    """
    return -(-(window + MAX_WIDTH - 1) // _RING_STEP) * _RING_STEP
