"""Sizes of a prompt's chunks: large alone, about a quarter of a second's work beside decoding rows. Pure."""

from __future__ import annotations

from .steps import Policy

LEAST, MOST = 64, 2048  #: tokens of a chunk beside others; times of smaller ones do not count
USUAL = 2048  #: tokens of a chunk without others; a GPU reads the weights once for all of them
ON_CPU = 512  #: the same without a GPU, where attention over a larger chunk costs more than it saves
BESIDE = 256  #: tokens of a chunk beside others while no time is known
TARGET_S = 0.25  #: seconds that such a chunk may take
NEWEST = 0.5  #: weight of the newest chunk in the average


def sizes(wanted: int, *, gpu: bool) -> tuple[int, int, float]:
    """Return `prefill_chunk`, `chunk_beside` and `chunk_s` of a Policy for chunks of at most `wanted` tokens.

    More than USUAL means that the pauses of other requests do not matter.
    """
    if wanted > USUAL:
        return wanted, wanted, 0.0
    alone = wanted if gpu else min(wanted, ON_CPU)
    return alone, min(alone, BESIDE), TARGET_S


class Chunks:
    """Choice of the size of chunks beside decoding rows, from the times of earlier chunks.

    Sizes are powers of two, so that shapes recur.
    """

    def __init__(self, policy: Policy) -> None:
        self._most = policy.prefill_chunk
        self._target_s = policy.chunk_s
        self._token_s = 0.0
        self.beside = min(policy.chunk_beside, self._most)  #: most tokens

    def took(self, tokens: int, seconds: float) -> None:
        """Record the time of one chunk."""
        if not self._target_s or tokens < LEAST:
            return
        newest = seconds / tokens
        self._token_s += (newest - self._token_s) * (NEWEST if self._token_s else 1.0)
        fitting = min(max(int(self._target_s / self._token_s), LEAST), MOST)
        self.beside = min(1 << fitting.bit_length() - 1, self._most)
