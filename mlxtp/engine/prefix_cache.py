"""The index of kept KV caches: whose tokens begin as a new prompt does, and who makes room.

Rank 0 has it and names what follows from it in frames; it holds tokens, not caches. A uid here is the
sequence whose cache it is: one that has ended and is kept, or one that runs and shares what it has.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from .kv_budget import capacity

SHORTEST_HIT = 16
"""Tokens a hit must save."""

_WORD = 4
"""Bytes of a packed token."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The cache of `uid` holds the first `length` tokens of the prompt.

    `whole`: it is kept, and holds nothing but tokens of the prompt, so that it may be taken over; one that
    holds the entire prompt must lose its last token, for one is always left to feed. Otherwise its beginning
    may be copied. `running`: the sequence is not over yet.
    """

    uid: int
    length: int
    whole: bool
    running: bool = False


class PrefixCache:
    """Kept caches of at most `max_entries` sequences and `budget` positions, and those of running ones.

    A cache counts as the `capacity` of its tokens, which is the most that its arrays hold. Running sequences
    count towards neither and are never evicted.
    """

    def __init__(self, budget: int, max_entries: int, shortest_hit: int = SHORTEST_HIT) -> None:
        self._budget = budget
        self._max_entries = max_entries
        self._shortest_hit = shortest_hit
        self._kept: dict[int, bytes] = {}
        """Packed tokens by uid, least recently used first."""
        self._running: dict[int, bytes] = {}
        self._positions = 0
        self.changes = 0
        """Grows whenever `find` may have another answer than before."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def positions(self) -> int:
        """Positions that the kept caches take."""
        return self._positions

    def keep(self, uid: int, tokens: Sequence[int]) -> tuple[int, ...]:
        """Keep the cache of a sequence that has ended and holds `tokens`. Returns whose caches to free.

        Those are the kept ones that `tokens` begins with, then the least recently used until there is room.
        It is `uid` itself, alone, when the cache is too short or too large, or all in a kept one, which
        then counts as used. Raises ValueError when `uid` is kept already.
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
        """A running sequence's cache holds `tokens` by now; others may copy it until `unshare` or `keep`."""
        self._running[uid] = _pack(tokens)
        self.changes += 1

    def unshare(self, uid: int) -> None:
        """The running sequence shares no longer, if it did."""
        if self._running.pop(uid, None) is not None:
            self.changes += 1

    def find(self, prompt: Sequence[int]) -> Hit | None:
        """The cache with the most of the beginning of `prompt`, its last token left out; None for too little.

        Among equals one that may be taken over comes first, then a kept one, then the latest used.
        """
        packed = _pack(prompt)
        usable = packed[:-_WORD]
        best: Hit | None = None
        least = max(self._shortest_hit, 1)
        for running, entries in ((False, self._kept), (True, self._running)):
            for uid, held in reversed(entries.items()):
                # Only an entry that has this much in common can be better, and most have not.
                if len(held) < _WORD * least or not _agree_at(held, usable, least - 1):
                    continue
                length = _common(held, usable)
                whole = not running and packed.startswith(held)
                if length >= least and (best is None or length > best.length or whole > best.whole):
                    best = Hit(uid, length, whole, running)
                    least = length
        return best

    def touch(self, uid: int) -> None:
        """The cache was used. Raises KeyError when there is none of that uid."""
        if uid not in self._running:
            self._kept[uid] = self._kept.pop(uid)

    def take(self, uid: int) -> int:
        """A kept cache leaves the index, for a sequence that goes on with it; how many tokens it holds.

        Raises KeyError when it is not kept.
        """
        words = len(self._kept.pop(uid)) // _WORD
        self.changes += 1
        self._positions -= capacity(words)
        return words

    def drop(self, uid: int) -> None:
        """Forget the cache, kept or running, if there is one."""
        self.unshare(uid)
        if uid in self._kept:
            self.take(uid)

    def evict(self, positions: int) -> tuple[int, ...]:
        """Evict the least recently used until so many positions are free or none is kept. Return whose."""
        enough = self._positions - positions
        freed = []
        while self._kept and self._positions > enough:
            freed.append(self._evict_one())
        return tuple(freed)

    def clear(self) -> None:
        """Forget everything, running sequences included."""
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
    """Whether both have the same token at an index."""
    at = slice(index * _WORD, (index + 1) * _WORD)
    return one[at] == other[at]


def _common(one: bytes, other: bytes) -> int:
    """Tokens both begin with."""
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
