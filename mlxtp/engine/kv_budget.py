"""Room that KV caches take. Pure; the same on every rank, and the basis of rank 0's budget.

Sizes grow in steps of a half and a third (64, 96, 128, 192, ...). So an array that grows with its sequence
is copied seldom, and at most a third of it is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

SMALLEST = 64


def capacity(length: int) -> int:
    """Return the positions to allocate for a row of `length` tokens."""
    size = SMALLEST
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def fitting(room: int) -> int:
    """Return the longest sequence whose capacity is at most `room`; 0 for none."""
    size = SMALLEST
    if room < size:
        return 0
    while size * 2 <= room:
        size *= 2
    return size * 3 // 2 if size * 3 // 2 <= room else size


def slots(rows: int) -> int:
    """Return the rows to allocate for `rows` sequences that decode together: a power of two."""
    return 1 << max(rows - 1, 0).bit_length()


def view(length: int) -> int:
    """Return the positions that attention reads when the longest row has `length` tokens."""
    step = 64 if length <= 512 else 256
    return -(-length // step) * step


def batch_tokens(lengths: Sequence[int]) -> int:
    """Return the positions of a batch of rows of these lengths: all rows have the room of the longest."""
    return slots(len(lengths)) * capacity(max(lengths)) if lengths else 0
