"""Tokens of a prompt that ranks compute at once, for the engine and for plans of its speed. Pure."""

from __future__ import annotations

USUAL = 2048  #: tokens of a chunk without others; a GPU reads the weights once for all of them
BESIDE = 256  #: tokens of a chunk beside others while no time is known


def chunk_of(alone: int, stages: int, least: int = BESIDE) -> int:
    """Return the tokens of a chunk where one rank would take `alone`, in a pipeline of so many stages.

    Chunks follow each other through the stages, and smaller ones fill these sooner.
    """
    if stages == 1:
        return alone
    return min(max(1 << (alone // (2 * stages)).bit_length() - 1, least), alone)
