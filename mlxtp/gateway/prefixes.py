"""Beginnings of prompts that groups have in their KV caches, as a gateway remembers them. Pure.

Tokens are cut in blocks of equal size. The hash of a block covers all tokens before it, too, so that one
equal hash proves an equal beginning. It covers the salt of the request, too, as the engine shares cached
beginnings within one salt only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

BLOCK = 256  #: Tokens.
MOST_HASHES = 512  #: Hashes of one group that are remembered and reported: 131,072 tokens.


class PrefixChain:
    """Hashes of the whole blocks of one sequence, which grows. `hashes` has one of 8 bytes for each block.

    `salt`: that of `Generate`, of 63 bits.
    """

    def __init__(self, tokens: Sequence[int] = (), salt: int = 0) -> None:
        self.hashes: list[int] = []
        self._hash = blake2b(digest_size=8, salt=salt.to_bytes(8, "little"))
        self._rest = array("i")  #: Tokens after the last whole block.
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        self._rest += array("i", tokens)  # three times as fast as `extend`
        if len(self._rest) < BLOCK:
            return
        data, size = memoryview(self._rest).cast("B"), BLOCK * self._rest.itemsize
        whole = len(data) // size
        for start in range(0, whole * size, size):
            self._hash.update(data[start : start + size])
            self.hashes.append(int.from_bytes(self._hash.copy().digest(), "little"))
        data.release()
        self._rest = self._rest[whole * BLOCK :]


class PrefixSummary:
    """Beginnings that a group has computed, the latest last, within the room of its KV caches.

    room  tokens that the KV caches may hold; 0 without a bound
    """

    def __init__(self, room: int = 0) -> None:
        self._hashes: dict[int, None] = {}
        self.bound(room)

    def bound(self, room: int) -> None:
        """Change the room."""
        self._most = min(room // BLOCK, MOST_HASHES) if room else MOST_HASHES
        self._trim()

    def note(self, hashes: Sequence[int]) -> None:
        """Note that the group has, or will have, these blocks of one sequence. The oldest give way.

        The first blocks of a sequence count as used after its last ones, which so give way before them.
        """
        for each in reversed(hashes):
            self._hashes.pop(each, None)
            self._hashes[each] = None
        self._trim()

    def _trim(self) -> None:
        while len(self._hashes) > self._most:
            del self._hashes[next(iter(self._hashes))]

    def match(self, hashes: Sequence[int]) -> int:
        """Return the number of leading tokens of a sequence that the group has cached."""
        known = self._hashes
        return next((count * BLOCK for count in range(len(hashes), 0, -1) if hashes[count - 1] in known), 0)

    def replace(self, hashes: Iterable[int]) -> None:
        """Take over the owner's report, the oldest first."""
        self._hashes = dict.fromkeys(hashes)

    @property
    def hashes(self) -> tuple[int, ...]:
        """The report for other gateways: at most `MOST_HASHES` hashes of 8 bytes, the oldest first."""
        return tuple(self._hashes)
