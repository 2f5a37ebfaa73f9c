"""KV caches on paper: the room that they take, and the index of the kept ones. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

# --- room; the same on every rank, and the basis of rank 0's budget --------------------------------------
# Sizes grow in steps of a half and a third (64, 96, 128, 192, ...). So an array that grows with its
# sequence is copied seldom, and at most a third of it is empty.

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


# --- index of kept caches: the longest shared beginning with a new prompt, and evictions -----------------
# Only rank 0 has it, and sends its decisions in frames. It holds tokens, not caches. A uid here is the
# cache's sequence: one that has ended and is kept, or one that runs and shares its cache.

SHORTEST_HIT = 16  # tokens that a hit must save

_WORD = 4  # bytes of a packed token


@dataclass(frozen=True, slots=True)
class Hit:
    """Cache of `uid`, which holds the first `length` tokens of the prompt.

    `whole`: it is kept and holds only tokens of the prompt, so that it may be taken over. If it holds the
    entire prompt, it must lose its last token, because one is always left to feed. Otherwise its beginning
    may be copied. `running`: the sequence has not ended.
    """

    uid: int
    length: int
    whole: bool
    running: bool = False


class PrefixCache:
    """Kept caches of at most `max_entries` sequences and `budget` positions, and those of running ones.

    A cache counts as the `capacity` of its tokens, which is the most that its arrays hold. Running sequences
    count towards neither limit and are never evicted.
    """

    def __init__(self, budget: int, max_entries: int, shortest_hit: int = SHORTEST_HIT) -> None:
        self._budget = budget
        self._max_entries = max_entries
        self._shortest_hit = shortest_hit
        self._kept: dict[int, bytes] = {}  # packed tokens by uid, least recently used first
        self._running: dict[int, bytes] = {}
        self._positions = 0
        self.changes = 0  # grows whenever `find` may return another result than before

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def positions(self) -> int:
        """Positions that the kept caches take."""
        return self._positions

    def keep(self, uid: int, tokens: Sequence[int]) -> tuple[int, ...]:
        """Keep the cache of an ended sequence that holds `tokens`. Returns the uids of caches to free.

        Those are the kept ones that `tokens` begins with, then the least recently used until there is room.
        Returns only `uid` itself when the cache is too short or too large, or a kept one contains it. The
        kept one then counts as used. Raises ValueError when `uid` is kept already.
        """
        if uid in self._kept:
            raise ValueError(f"uid {uid} is kept already")
        self.unshare(uid)
        size = capacity(len(tokens))
        if len(tokens) < self._shortest_hit or size > self._budget or self._max_entries < 1:
            return (uid,)
        packed = _pack(tokens)
        for other, held in self._kept.items():
            if held.startswith(packed):
                self.touch(other)
                return (uid,)
        freed = [other for other, held in self._kept.items() if packed.startswith(held)]
        for other in freed:
            self.take(other)
        while self._positions + size > self._budget or len(self._kept) >= self._max_entries:
            freed.append(self._evict_one())
        self._kept[uid] = packed
        self.changes += 1
        self._positions += size
        return tuple(freed)

    def share(self, uid: int, tokens: Sequence[int]) -> None:
        """Record that a running sequence's cache holds `tokens`, to be copied until `unshare` or `keep`."""
        self._running[uid] = _pack(tokens)
        self.changes += 1

    def unshare(self, uid: int) -> None:
        """Stop sharing a running sequence's cache, if it is shared."""
        if self._running.pop(uid, None) is not None:
            self.changes += 1

    def find(self, prompt: Sequence[int]) -> Hit | None:
        """Return the cache with the longest beginning of `prompt` without its last token; None if too short.

        Among equals one that may be taken over comes first, then a kept one, then the latest used.
        """
        packed = _pack(prompt)
        usable = packed[:-_WORD]
        best: Hit | None = None
        least = max(self._shortest_hit, 1)
        for running, entries in ((False, self._kept), (True, self._running)):
            for uid, held in reversed(entries.items()):
                # Only an entry with this much in common can be better, and most have less.
                if len(held) < _WORD * least or not _agree_at(held, usable, least - 1):
                    continue
                length = _common(held, usable)
                whole = not running and packed.startswith(held)
                if length >= least and (best is None or length > best.length or whole > best.whole):
                    best = Hit(uid, length, whole, running)
                    least = length
        return best

    def touch(self, uid: int) -> None:
        """Mark the cache as used. Raises KeyError when there is none of that uid."""
        if uid not in self._running:
            self._kept[uid] = self._kept.pop(uid)

    def take(self, uid: int) -> int:
        """Remove a kept cache, for a sequence that continues with it; returns its number of tokens.

        Raises KeyError when it is not kept.
        """
        words = len(self._kept.pop(uid)) // _WORD
        self.changes += 1
        self._positions -= capacity(words)
        return words

    def drop(self, uid: int) -> None:
        """Remove the cache, kept or running, if there is one."""
        self.unshare(uid)
        if uid in self._kept:
            self.take(uid)

    def evict(self, positions: int) -> tuple[int, ...]:
        """Evict the least recently used until `positions` are freed or none is kept; returns their uids."""
        enough = self._positions - positions
        freed = []
        while self._kept and self._positions > enough:
            freed.append(self._evict_one())
        return tuple(freed)

    def clear(self) -> None:
        """Remove everything, including running sequences."""
        self._kept.clear()
        self._running.clear()
        self._positions = 0
        self.changes += 1

    def _evict_one(self) -> int:
        uid = next(iter(self._kept))
        self.take(uid)
        return uid


def _pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _agree_at(one: bytes, other: bytes, index: int) -> bool:
    """Return True if both have the same token at an index."""
    at = slice(index * _WORD, (index + 1) * _WORD)
    return one[at] == other[at]


def _common(one: bytes, other: bytes) -> int:
    """Return the number of tokens that both begin with."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter // _WORD
    same, differs = 0, shorter // _WORD
    # Both agree before `same` and differ somewhere before `differs`; each slice is half as long as the last.
    while differs - same > 1:
        middle = (same + differs) // 2
        part = slice(same * _WORD, middle * _WORD)
        if one[part] == other[part]:
            same = middle
        else:
            differs = middle
    return same
