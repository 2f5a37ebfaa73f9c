"""Choice of blocks to write to disk and to read back, on rank 0 alone. Pure.

A digest of the salt and all tokens up to its end names a block of `BLOCK` tokens. A cache that cannot be
truncated is one block; the digest up to its last multiple of `STEM` (the stem) keeps comparisons few.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Protocol

from ..wire.messages import BLOCK, Evict, FetchBlocks, PrefixDigests, Restore, Spill
from .sequence import BlockFetch, SequenceState

STEM = 1024
#: Least tokens of a sequence to write it to disk, unless it began with a kept cache.
SPILL_FROM = 1024
MAX_FETCHES = 4  # sequences that wait for the disk at once; as many prompts are in prefill at once


class Blocks(Protocol):
    """Blocks on rank 0's disk. Rank 0 expects the same on the other ranks."""

    @property
    def room_bytes(self) -> int: ...  # 0 for a while after the disk has failed

    @property
    def takes(self) -> bool: ...  # another block can be written now

    def has(self, digest: bytes) -> bool: ...  # the block can be read

    def is_kept(self, digest: bytes) -> bool: ...  # the block can be read, now or soon

    def ends(self, stems: Container[bytes]) -> list[int]: ...  # of blocks with these stems, descending


class DiskIndex:
    def __init__(
        self,
        blocks: Blocks | None = None,
        *,
        truncatable: bool = True,
        block: int = BLOCK,
        spill_from: int = SPILL_FROM,
        ranks: Iterable[int] = (0,),
    ) -> None:
        #: Tells whether a uid's cache still has so many tokens.
        self.holds: Callable[[int, int], bool] = lambda _uid, _tokens: False
        self._blocks = blocks
        self._truncatable = truncatable
        self._block = block
        self._spill_from = spill_from
        #: Blocks to write by digest, oldest first. The newest cache that holds a block writes it.
        self._due: dict[bytes, Spill] = {}
        self._ranks = frozenset(ranks)
        self._fetches: dict[int, BlockFetch] = {}  # by uid, until every rank has replied

    def line_up(self, sequence: SequenceState, uid: int, held: int) -> None:
        """Queue blocks that are not on disk for the first `held` tokens, from the cache of `uid`."""
        if self._blocks is None or not self._blocks.room_bytes:
            return
        if held < self._spill_from and not sequence.progress.reused:
            return
        digests, start = self._digests(sequence), 0
        if not self._truncatable:
            previous = digests.up_to(held - held % STEM)
        else:
            start = sequence.disk.spilled
            previous = digests.up_to(start) if start else b""
            sequence.disk.spilled = max(held - held % self._block, start)
        for end in range(start + self._block, held + 1, self._block) if self._truncatable else (held,):
            digest = digests.up_to(end)
            if not self._blocks.is_kept(digest):
                self._due[digest] = Spill(uid, start, end, digest, previous)
            start, previous = end, digest

    @property
    def spills(self) -> bool:
        return bool(self._due) and self._blocks is not None and self._blocks.room_bytes > 0

    def next_spill(self) -> Spill | None:
        while self._due and self._blocks is not None and self._blocks.takes:
            spill = self._due.pop(next(iter(self._due)))
            if self.holds(spill.uid, spill.end) and not self._blocks.is_kept(spill.digest):
                return spill
        return None

    def fetch(self, sequence: SequenceState, uid: int, hit: int) -> FetchBlocks | None:
        """Begin to fetch a prompt's blocks from disk; None unless they save a block more than `hit`."""
        hangs = any(each.phase == "late" for each in self._fetches.values())
        busy = hangs or len(self._fetches) >= MAX_FETCHES
        if self._blocks is None or sequence.disk.asked or busy or sequence.scores >= 0:  # it tries once
            return None
        sequence.disk.asked = True
        found = self._found(sequence, self._blocks)
        if found is None or found[0] * len(found[1]) < hit + self._block:
            return None
        block, digests = found
        sequence.disk.fetch = self._fetches[uid] = BlockFetch(
            uid, block, len(digests), sequence, len(digests), set(self._ranks)
        )
        return FetchBlocks(uid, block, b"".join(digests))

    def _found(self, sequence: SequenceState, blocks: Blocks) -> tuple[int, list[bytes]] | None:
        digests, most = self._digests(sequence), sequence.progress.prompt - 1
        if not self._truncatable:
            stems = {digests.up_to(at) for at in range(0, most + 1, STEM)}
            ends = blocks.ends(stems)
            longest = next((end for end in ends if end <= most and blocks.has(digests.up_to(end))), 0)
            return (longest, [digests.up_to(longest)]) if longest else None
        found: list[bytes] = []
        for end in range(self._block, most + 1, self._block):
            if not blocks.has(digest := digests.up_to(end)):
                break
            found.append(digest)
        return (self._block, found) if found else None

    def expect(self, uid: int, until: float) -> None:
        self._fetches[uid].until = until

    def reply(self, rank: int, uid: int, blocks: int) -> None:
        if (fetch := self._fetches.get(uid)) is None:
            return
        fetch.silent.discard(rank)
        if fetch.phase == "reading":
            fetch.blocks = min(fetch.blocks, blocks)
        elif not fetch.silent:
            del self._fetches[uid]

    def over(self, now: float) -> list[Restore]:
        reading = [each for each in self._fetches.values() if each.phase == "reading"]
        return [self._conclude(each) for each in reading if not each.silent or each.until <= now]

    def time_left_s(self, now: float) -> float | None:
        ends = [each.until for each in self._fetches.values() if each.phase == "reading"]
        return max(min(ends) - now, 0.0) if ends else None

    def _conclude(self, fetch: BlockFetch) -> Restore:
        late, sequence = bool(fetch.silent), fetch.sequence
        fetch.phase = "late" if late else "held"
        if not late:
            del self._fetches[fetch.uid]
        if late or sequence is None:
            fetch.blocks = 0
        if sequence is None:
            return Restore(fetch.uid, 0)
        if not fetch.blocks:
            sequence.disk.fetch = None
        return Restore(fetch.uid, fetch.blocks, bad=not late and fetch.blocks < fetch.wanted)

    def forget(self, sequence: SequenceState) -> tuple[Evict, ...]:
        fetch, sequence.disk.fetch = sequence.disk.fetch, None
        if fetch is None:
            return ()
        fetch.sequence = None
        return (Evict((fetch.uid,)),) if fetch.phase == "held" else ()

    def _digests(self, sequence: SequenceState) -> PrefixDigests:
        if sequence.disk.digests is None:
            sequence.disk.digests = PrefixDigests(sequence.tokens, sequence.wants.salt)
        return sequence.disk.digests
