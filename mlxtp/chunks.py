"""Sizes that the engine and plans of its speed and memory share. Pure."""

from __future__ import annotations

from .wire.messages import MAX_WIDTH

USUAL = 2048  #: tokens of a chunk without others; a GPU reads the weights once for all of them
BUFFERED = 512  #: the most with large command buffers, each of which holds the arrays of many operations
BESIDE = 256  #: tokens of a chunk beside others while no time is known
_RING_STEP = 64


def bounded(wanted: int, *, large_buffers: bool) -> int:
    """Return the tokens of the largest chunk of a prompt, of those `wanted`."""
    return min(wanted, BUFFERED) if large_buffers else wanted


def chunk_of(alone: int, stages: int, least: int = BESIDE) -> int:
    """Return the tokens of a chunk where one rank would take `alone`, in a pipeline of so many stages.

    Chunks follow each other through the stages, and smaller ones fill these sooner.
    """
    if stages == 1:
        return alone
    return min(max(1 << (alone // (2 * stages)).bit_length() - 1, least), alone)


def ring_slots(window: int) -> int:
    """Return the most slots of a layer that keeps a window of so many tokens.

    A step writes up to MAX_WIDTH tokens. The slots of the others are beside the window of the first.
    """
    return -(-(window + MAX_WIDTH - 1) // _RING_STEP) * _RING_STEP
