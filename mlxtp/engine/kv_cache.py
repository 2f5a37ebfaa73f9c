"""Accounts of KV caches: how much room they take, an index of the kept ones, and evictions. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, combinations, islice, pairwise, takewhile

from ..wire.messages import MAX_WIDTH, Arrange, Evict, PromptPart, SessionStop, packed
from .disk_index import DiskIndex
from .sequence import SequenceState, WaitingQueue
from .steps import DecodeFrame, Policy, StopReason

# --- room; the same on every rank, and the basis of rank 0's budget --------------------------------------
# Rows of similar lengths share one array a layer. While there is room, arrays grow by a half or a third (64,
# 96, 128, 192, ...), so they are rarely copied. When room is short, they grow in small steps.

SMALLEST = 64
#: Small steps of a row's room, each up to a length. Copying costs at most 1/20 of what attention reads.
STEPS = ((1024, 32), (4096, 64))
LONG_STEP = 256
MOST_BUCKETS = 3  #: most buckets of rows in one step
LEAST_SAVED = 16  #: Adding a bucket must save at least 1 / LEAST_SAVED of the room.
STAYS = 4  #: Changing the number of buckets must save at least 1 / STAYS of a step.
#: One more bucket's fixed cost per layer, as bytes read in the same time. Measured on a CPU: 0.1 ms at
#: 2.7 GB/s. Estimated on a GPU: 6 kernels of 5 µs at 800 GB/s.
BUCKET_ON_CPU, BUCKET_ON_GPU = 1 << 18, 24 << 20
APART = 1 << 40  #: cost of one more bucket that has a forward of its own
SKIPS = 2  #: Metal's fused attention skips so many masked positions in the time of a visible one; assumed.


def capacity(length: int) -> int:
    step = next((step for end, step in STEPS if length <= end), LONG_STEP)
    return max(-(-length // step) * step, SMALLEST)


def roomy(length: int) -> int:
    size = SMALLEST
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def fitting(room: int) -> int:
    """Return the longest sequence whose capacity is at most `room`; 0 for none."""
    if room < SMALLEST:
        return 0
    step = next((step for end, step in STEPS if room < end + step), LONG_STEP)
    return room // step * step


def slots(rows: int) -> int:
    return 1 << max(rows - 1, 0).bit_length()


def view(length: int) -> int:
    step = 64 if length <= 512 else 256
    return -(-length // step) * step


@lru_cache(maxsize=512)
def layouts(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return layouts for rows of these lengths, fewest buckets first: the rows' room, then the free slots'.
    Each number of buckets has two layouts: one with spare room to grow and join, one without.
    """
    if not lengths:
        return ((),)
    own = [capacity(length) for length in lengths]
    sizes = sorted(set(own), reverse=True)
    rows = list(accumulate([own.count(size) for size in sizes], initial=0))

    def bounds(cuts: tuple[int, ...]) -> Iterable[tuple[int, int]]:
        return pairwise((0, *cuts, len(sizes)))

    def room(cuts: tuple[int, ...]) -> int:
        return sum([sizes[first] * (rows[end] - rows[first]) for first, end in bounds(cuts)])

    found: list[tuple[int, ...]] = []
    least = 0
    for buckets in range(1, min(MOST_BUCKETS, len(sizes)) + 1):
        cuts = min(combinations(range(1, len(sizes)), buckets - 1), key=room)
        if least and (least - room(cuts)) * LEAST_SAVED < least:
            break
        least = room(cuts)
        shared = {size: sizes[first] for first, end in bounds(cuts) for size in sizes[first:end]}
        grown = [roomy(shared[size]) for size in own]
        free = [[room] * (slots(count) - count) for room, count in Counter(grown).items()]
        found += [(*grown, *chain(*free)), tuple([shared[size] for size in own])]
    return tuple(found)


Slots = tuple[tuple[int, int], ...]  #: Room and lane of each slot.


@lru_cache(maxsize=512)
def laned_layouts(lengths: tuple[int, ...], lanes: tuple[int, ...]) -> tuple[Slots, ...]:
    own = {
        lane: layouts(tuple([size for size, other in zip(lengths, lanes, strict=True) if other == lane]))
        for lane in sorted(set(lanes))
    }
    found: list[Slots] = []
    for way in range(max([len(ways) for ways in own.values()], default=1)):
        # A lane with fewer ways repeats its last two: with spare room, and without.
        left = {lane: deque(ways[way if way < len(ways) else way % 2 - 2]) for lane, ways in own.items()}
        rows = [(left[lane].popleft(), lane) for lane in lanes]
        found.append((*rows, *[(room, lane) for lane, free in left.items() for room in free]))
    return tuple(found)


def another_bucket(layers: int, token_bytes: int, *, gpu: bool, skips: bool) -> int:
    """Return what one more bucket costs a step, as cached tokens."""
    cost = layers * (BUCKET_ON_GPU if gpu else BUCKET_ON_CPU)
    return cost * (SKIPS if skips else 1) // max(token_bytes, 1)


def step_tokens(slots: Slots, lengths: Sequence[int], bucket: int) -> int:
    buckets: dict[tuple[int, int], list[int]] = {}
    for slot, length in zip(slots, lengths, strict=False):
        buckets.setdefault(slot, []).append(view(length))
    return sum([bucket + len(rows) * max(rows) for rows in buckets.values()])


def cheapest(ways: Iterable[Slots], lengths: Sequence[int], bucket: int, held: int) -> Slots:
    return min(ways, key=lambda way: step_tokens(way, lengths, bucket) * (STAYS - (len(set(way)) == held)))


def batch_tokens(lengths: Sequence[int]) -> int:
    return slots(len(lengths)) * roomy(max(lengths)) if lengths else 0


# --- index of kept caches: the longest prefix shared with a new prompt, and evictions --------------------
# Only rank 0 has the index, which holds tokens, not caches. A uid names a kept cache or a running sequence.

SHORTEST_HIT = 16  # tokens that a hit must save
#: Tokens that a cache which cannot be truncated must have beyond the next shorter one.
SHORTEST_CHECKPOINT = 32
KEPT_SHARE = 2  # kept caches take at most 1 / KEPT_SHARE of the room

_WORD = 4  # bytes of a packed token
_SALT_WORDS = 2  # words of salt before the packed tokens
_MOST_UIDS = 1 << 32


@dataclass(frozen=True, slots=True)
class Hit:
    """Cache that shares a prefix with a prompt. The prompt's last token never counts: it must be fed."""

    uid: int
    length: int  # tokens in common
    whole: bool  # a kept cache with no other tokens: a sequence may take it over instead of copying it


class PrefixCache:
    """Index of kept caches (at most `max_entries` with `budget` positions) and of running sequences.

    A cache counts as the `capacity` of its tokens, plus `row_tokens` for the part that does not grow. Prompts
    with different salts share nothing. If caches are not `truncatable`, only a kept one whose every token
    begins the prompt is a hit. With `overlapping`, a kept cache lends its arrays to kept prefixes of itself.
    """

    def __init__(
        self,
        budget: int,
        max_entries: int,
        shortest_hit: int = SHORTEST_HIT,
        *,
        truncatable: bool = True,
        overlapping: bool = False,
        row_tokens: int = 0,
    ) -> None:
        self.truncatable = truncatable
        self._overlapping = overlapping
        #: Kept caches without arrays of their own, each with the uid of the cache that lends it arrays.
        self._within: dict[int, int] = {}
        self._row_tokens = row_tokens
        self._budget = budget
        self._max_entries = max_entries
        self._shortest_hit = shortest_hit
        self._kept: dict[int, bytes] = {}  # packed tokens by uid, least recently used first
        self._running: dict[int, bytes] = {}
        #: Packed tokens of both, with their uids. A prompt's longest match is next to its own sorted place.
        self._sorted: list[tuple[bytes, int]] = []
        self.positions = 0  #: Positions that the kept caches take.
        self.changes = 0  # grows whenever the result of `find` may change

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, uid: int, tokens: Sequence[int], salt: int = 0) -> tuple[int, ...]:
        """Keep a cache; returns the uids of caches to free. Raises ValueError when it is kept already.

        Frees kept caches that truncating this one would give, then the least recently used until there is
        room. Returns only `uid` itself if it is too short, too large, or no better than a kept cache.
        """
        if uid in self._kept:
            raise ValueError(f"uid {uid} is kept already")
        self.unshare(uid)
        size = capacity(len(tokens)) + self._row_tokens
        if len(tokens) < self._shortest_hit or size > self._budget or self._max_entries < 1:
            return (uid,)
        words = _pack(tokens, salt)
        if (other := self._stand_in(words)) is not None:
            self.touch(other)
            return (uid,)
        covered = [other for other, held in self._kept.items() if words.startswith(held)]
        freed = covered if self.truncatable else []
        for other in freed:
            self.take(other)
        self._kept[uid] = self._add(uid, words)
        self.positions += size
        for other in covered if self._overlapping else ():
            if other not in self._within:
                self.positions -= self._grown(other)
            self._within[other] = uid
        while self.positions > self._budget or len(self._kept) > self._max_entries:
            freed.append(self._evict_one())
        return tuple(freed)

    def covered(self, uid: int) -> tuple[int, ...]:
        return tuple([other for other, owner in self._within.items() if owner == uid])

    def _grown(self, uid: int) -> int:
        return capacity(self.length(uid))

    def _stand_in(self, words: bytes) -> int | None:
        if self.truncatable:
            return next((uid for uid, held in self._kept.items() if held.startswith(words)), None)
        near = len(words) - _WORD * (self._shortest_hit - 1)
        alike = (uid for uid, held in self._kept.items() if len(held) >= near and words.startswith(held))
        return next(alike, None)

    def _add(self, uid: int, words: bytes) -> bytes:
        insort(self._sorted, (words, uid))
        self.changes += 1
        return words

    def _remove(self, uid: int, words: bytes) -> None:
        del self._sorted[bisect_left(self._sorted, (words, uid))]
        self.changes += 1

    def share(self, uid: int, tokens: Sequence[int], salt: int = 0) -> None:
        if self.truncatable:
            self.unshare(uid)
            self._running[uid] = self._add(uid, _pack(tokens, salt))

    def unshare(self, uid: int) -> None:
        if (words := self._running.pop(uid, None)) is not None:
            self._remove(uid, words)

    def find(self, prompt: Sequence[int], salt: int = 0) -> Hit | None:
        """Return the longest match. If several are equal, prefer one to take over, then a kept one."""
        words = _pack(prompt, salt)
        usable = words[:-_WORD]
        if not self.truncatable:
            return self._longest_beginning(usable)
        at = bisect_left(self._sorted, (usable, 0))
        beside = self._sorted[max(at - 1, 0) : at + 1]
        length = max([_common(held, usable) for held, _ in beside], default=0)
        if length - _SALT_WORDS < max(self._shortest_hit, 1):
            return None
        beginning = usable[: length * _WORD]
        following = islice(self._sorted, bisect_left(self._sorted, (beginning, 0)), None)
        equals = takewhile(lambda entry: entry[0].startswith(beginning), following)
        alike = {uid: held for held, uid in equals}
        kept = [uid for uid in reversed(self._kept) if uid in alike]
        whole = [uid for uid in kept if words.startswith(alike[uid])]
        running = [uid for uid in reversed(self._running) if uid in alike]
        return Hit([*whole, *kept, *running][0], length - _SALT_WORDS, bool(whole))

    def _longest_beginning(self, words: bytes) -> Hit | None:
        while at := bisect_right(self._sorted, (words, _MOST_UIDS)):
            held, uid = self._sorted[at - 1]
            if words.startswith(held):
                return Hit(uid, len(held) // _WORD - _SALT_WORDS, whole=True)
            # Any shorter prefix of `words` sorts before `held` and is a prefix of their common part, too.
            words = words[: _common(held, words) * _WORD]
        return None

    def length(self, uid: int) -> int:
        return len(self._kept[uid]) // _WORD - _SALT_WORDS if uid in self._kept else 0

    def touch(self, uid: int) -> None:
        if uid not in self._running:
            self._kept[uid] = self._kept.pop(uid)

    def take(self, uid: int) -> int:
        """Remove a kept cache; returns its tokens. Raises KeyError."""
        words = self._kept.pop(uid)
        tokens = len(words) // _WORD - _SALT_WORDS
        self.positions -= self._row_tokens + (0 if self._within.pop(uid, 0) else capacity(tokens))
        self._remove(uid, words)
        if heirs := self.covered(uid):  # the longest gets its own arrays and lends them to the others
            longest = max(heirs, key=lambda other: len(self._kept[other]))
            self._within.update(dict.fromkeys(heirs, longest))
            del self._within[longest]
            self.positions += self._grown(longest)
        return tokens

    def evict(self, positions: int) -> tuple[int, ...]:
        enough, freed = self.positions - positions, []
        while self._kept and self.positions > enough:
            freed.append(self._evict_one())
        return tuple(freed)

    def resize(self, budget: int) -> tuple[int, ...]:
        self._budget = budget
        return self.evict(max(self.positions - budget, 0))

    def _evict_one(self) -> int:
        uid = next(iter(self._kept))
        self.take(uid)
        return uid


def _pack(tokens: Sequence[int], salt: int) -> bytes:
    return salt.to_bytes(_SALT_WORDS * _WORD, "little") + packed(tokens)


def _common(one: bytes, other: bytes) -> int:
    same, differs = 0, min(len(one), len(other)) // _WORD + 1
    # They agree in the first `same` words, but not in the first `differs`; each round halves the gap.
    while differs - same > 1:
        middle = (same + differs) // 2
        part = slice(same * _WORD, middle * _WORD)
        same, differs = (middle, differs) if one[part] == other[part] else (same, middle)
    return same


# --- room for running sequences, which kept caches make way for ------------------------------------------

#: A prompt waits for another one's prefill if that saves it at least so many tokens beyond any kept cache.
SHARED_BEGINNING = 32


def places_to_save(sequence: SequenceState, hit: int) -> tuple[int, ...]:
    """Return where to snapshot the cache: the request's own places, and before a new prompt's last token."""
    places = [place for place in sequence.wants.places if place < sequence.progress.prompt]
    if not sequence.generated and sequence.progress.prompt - max(places, default=0) > SHORTEST_CHECKPOINT:
        places.append(sequence.progress.prompt - 1)
    found: list[int] = []
    for place in places:
        if place - (found[-1] if found else hit) >= SHORTEST_CHECKPOINT:
            found.append(place)
    return tuple(found)


def _places(sequence: SequenceState, hit: int) -> tuple[int, ...]:
    return sequence.progress.saves if sequence.uid else places_to_save(sequence, hit)


class KVCacheManager:
    """Room for the KV caches of `running` and `waiting` sequences, and of kept ones in `prefixes`.

    If caches roll back, this class rather than mlx-lm chooses the sizes of arrays. In a pipeline, only rows
    of one lane share arrays.
    """

    def __init__(
        self,
        policy: Policy,
        prefixes: PrefixCache | None,
        running: Sequence[SequenceState],
        waiting: WaitingQueue,
        disk: DiskIndex | None,
    ) -> None:
        #: Frames that free caches, and the frames that depend on them; sent before all other frames.
        self.frames: deque[DecodeFrame] = deque()
        self.disk = disk or DiskIndex()
        self.disk.holds = self._holds
        self.kv_tokens = policy.kv_tokens
        self._policy = policy
        self._keeps = prefixes is not None
        self._prefixes = PrefixCache(0, 0) if prefixes is None else prefixes
        self._running = running
        self._waiting = waiting
        #: All slots, including free ones. A free slot remains until its bucket has no rows.
        self._slots: Slots = ()
        self._is_stale = False  # a row has left or the room has changed since rows were laid out

    @property
    def keeps_snapshots(self) -> bool:
        return not self._prefixes.truncatable

    def hit_length(self, sequence: SequenceState) -> int:
        if sequence.progress.asked_at != self._prefixes.changes:
            sequence.progress.asked_at = self._prefixes.changes
            hit = self._prefixes.find(sequence.reusable, sequence.wants.salt)
            sequence.progress.hit_length = 0 if hit is None else hit.length
            if hit is not None:
                self._prefixes.touch(hit.uid)  # evict others first
        return max(sequence.progress.hit_length, sequence.disk.fetched)

    def is_being_computed(self, sequence: SequenceState, others: Sequence[SequenceState]) -> bool:
        """Return True if one of `others` will soon have computed more of this prompt than caches hold."""
        if not (self._keeps and others) or sequence.scores >= 0:
            return False
        enough = self.hit_length(sequence) + SHARED_BEGINNING
        if not self._prefixes.truncatable:
            return any(
                other.wants.salt == sequence.wants.salt
                and enough <= place < sequence.progress.prompt
                and place - other.progress.prefilled <= sequence.progress.prompt
                and other.tokens[:place] == sequence.tokens[:place]
                for other in others
                for place in _places(other, self.hit_length(other))
                if place > other.progress.prefilled
            )
        beginning = sequence.tokens[:enough]
        return len(beginning) < sequence.progress.prompt and any(
            other.wants.salt == sequence.wants.salt
            and other.progress.prompt - other.progress.prefilled <= sequence.progress.prompt + len(beginning)
            and other.tokens[: len(beginning)] == beginning
            for other in others
        )

    def start_from(self, sequence: SequenceState, *, may_take: bool) -> tuple[int, bool]:
        """Return the uid of the KV cache to start from (0: none), and True to take it over."""
        hit = self._prefixes.find(sequence.reusable, sequence.wants.salt)
        uid, length, take = (0, 0, False) if hit is None else (hit.uid, hit.length, hit.whole and may_take)
        fetch, fetched = sequence.disk.fetch, sequence.disk.fetched > length
        if fetch is not None and fetched:
            uid, length, take = fetch.uid, sequence.disk.fetched, True
            sequence.disk.fetch = None
        if not self._prefixes.truncatable:
            sequence.progress.saves = places_to_save(sequence, length)
            take = fetched
        if not uid:
            return 0, False
        if not fetched:
            self._prefixes.take(uid) if take else self._prefixes.touch(uid)
        sequence.progress.prefilled = sequence.progress.reused = length
        if not sequence.generated:
            sequence.cached = length
        return uid, take

    def next_part(self, sequence: SequenceState) -> tuple[int, int]:
        """Return where the next part of a prompt begins, and where it ends if it is not too long."""
        at = sequence.progress.prefilled if sequence.uid else self.hit_length(sequence)
        places = _places(sequence, at) if self.keeps_snapshots else ()
        return at, min([place for place in places if place > at], default=sequence.progress.prompt)

    def save(
        self, group: Sequence[SequenceState], parts: Sequence[PromptPart]
    ) -> tuple[list[PromptPart], tuple[int, ...]]:
        """Keep the caches of prompts so far, by the uids that their parts of a forward name.

        Return the parts, without a uid where there is no room, and kept caches to evict after the forward.
        """
        freed: list[int] = []
        for sequence, part in zip(group, parts, strict=True):
            tokens = sequence.tokens[: sequence.progress.prefilled]
            gone = self._prefixes.keep(part.save, tokens, sequence.wants.salt)
            if part.save not in gone and (beyond := self._occupied() - self.kv_tokens) > 0:
                gone += self._prefixes.evict(beyond)
            freed += gone
        sources = {part.source for part in parts}
        known = sources.union([part.save for part in parts])
        if others := tuple([uid for uid in freed if uid not in known]):
            self.frames.append(Evict(others))
        saved = [0 if part.save in freed else part.save for part in parts]
        if any(saved) and self._policy.rolls_back:
            self._lay_out()  # the kept caches may take room that rows had to grow
        takes = len(parts) == 1  # take over a cache that would be evicted
        found = [
            replace(
                part,
                save=save,
                take=part.take or (takes and part.source in freed),
                covers=self._prefixes.covered(save),
            )
            for part, save in zip(parts, saved, strict=True)
        ]
        return found, () if takes else tuple([uid for uid in freed if uid in sources])

    def line_up(self, sequence: SequenceState) -> None:
        if not self.keeps_snapshots:
            self.disk.line_up(sequence, sequence.uid, sequence.progress.prefilled)

    def stays(self, sequence: SequenceState, others: Sequence[SequenceState], *, full: bool) -> bool:
        if sequence.disk.fetched and self.hit_length(sequence) == sequence.progress.hit_length:
            self.frames += self.disk.forget(sequence)  # memory has as much by now
            return True
        if sequence.disk.fetch:
            return not sequence.disk.fetched  # its room is already counted
        return full or self.is_being_computed(sequence, others)

    def _holds(self, uid: int, tokens: int) -> bool:
        if self._prefixes.length(uid) >= tokens:
            return True
        # A part of a row cannot be extracted from mlx-lm's own batched caches, nor from states.
        running = self._running if self._policy.rolls_back and not self.keeps_snapshots else ()
        rows = (*running, *self._waiting.started())
        known = [max(row.progress.position, row.progress.prefilled) for row in rows if row.uid == uid]
        return max(known, default=-1) >= tokens

    def must_wait(self, sequence: SequenceState) -> bool:
        """Return True if the next step ends an answer whose cache can be kept only with known tokens."""
        return self.keeps_snapshots and sequence.scheduled + 1 >= sequence.wants.max_tokens

    def share(self, sequence: SequenceState) -> None:
        if self._keeps:
            self._prefixes.share(
                sequence.uid, sequence.tokens[: sequence.progress.prompt], sequence.wants.salt
            )

    def lost(self, sequence: SequenceState) -> int:
        """Return the tokens that a preempted sequence would have to compute again."""
        self._prefixes.unshare(sequence.uid)
        hit = self._prefixes.find(sequence.tokens, sequence.wants.salt)
        if sequence in self._running:
            self.share(sequence)
        held = max(sequence.progress.position, sequence.progress.prefilled)
        return held - (0 if hit is None else hit.length)

    def release(self, sequence: SequenceState, reason: StopReason, held: int) -> None:
        keep, progress, self._is_stale = 0, sequence.progress, True
        bucket = (progress.room, progress.lane)
        if all((other.progress.room, other.progress.lane) != bucket for other in self._running):
            self._slots = tuple([slot for slot in self._slots if slot != bucket])
        progress.room = 0
        covers: tuple[int, ...] = ()
        evicted: tuple[int, ...] = ()
        known = len(sequence.tokens)
        # With steps in flight, a cache that extends beyond the known tokens cannot always be truncated.
        held = 0 if held > known and sequence.in_flight and self.keeps_snapshots else min(held, known)
        self._prefixes.unshare(sequence.uid)
        if reason != "preempt" and held:
            evicted = self._prefixes.keep(sequence.uid, sequence.tokens[:held], sequence.wants.salt)
            if (beyond := self._occupied() - self.kv_tokens) > 0:
                evicted += self._prefixes.evict(beyond)
            keep = 0 if sequence.uid in evicted else held
            covers = self._prefixes.covered(sequence.uid)
            if keep:
                self.disk.line_up(sequence, sequence.uid, keep)
        self.frames.append(SessionStop(sequence.uid, reason, sequence.progress.forwards, keep, covers))
        if others := tuple([uid for uid in evicted if uid != sequence.uid]):
            self.frames.append(Evict(others))
        sequence.all_forwards += progress.forwards
        self._lay_out()

    def make_room(self, joining: Sequence[SequenceState] = ()) -> bool:
        if not (joining or self._is_stale) and _has_room(self._running):
            return True
        beyond = self._occupied(joining) - self.kv_tokens
        if beyond > 0 and (evicted := self._prefixes.evict(beyond)):
            self.frames.append(Evict(evicted))
            beyond = self._occupied(joining) - self.kv_tokens
        rows = self._rows(joining)
        alone = len(rows) == 1 and self.fits_alone(rows[0])
        if (beyond <= 0 or alone) and self._lay_out(joining):
            return True
        fetching = next((each for each in reversed(self._waiting) if each.disk.fetch), None)
        if joining or fetching is None:
            return False
        self.frames += self.disk.forget(fetching)  # running sequences take precedence
        return self.make_room()

    def _lay_out(self, joining: Sequence[SequenceState] = ()) -> bool:
        """Lay out the running rows in the room that prefilling prompts leave; False if they do not fit."""
        if not self._policy.rolls_back:
            if self._policy.stages > 1 and not all(sequence.progress.room for sequence in self._running):
                self.frames.append(Arrange(lanes=_lanes(self._running)))
            for sequence in self._running:
                sequence.progress.room = roomy(max(_lengths(self._running)))
            self._is_stale = self._occupied(joining) > self.kv_tokens
            return True
        running, started = self._running, self._waiting.holding()
        own = [capacity(sequence.progress.prompt) for sequence in started]
        longest = max([sequence.progress.prompt for sequence in joining], default=0)
        # Several prompts that are computed together share arrays, with one position for padding.
        own += [capacity(longest + (len(joining) > 1))] * len(joining)
        left = self.kv_tokens - self._prefixes.positions - sum(own) - self._policy.row_tokens * len(own)
        lengths, now = _lengths(running), tuple([(row.progress.room, row.progress.lane) for row in running])
        ways = laned_layouts(lengths, _lanes(running))
        ways = tuple([slots for slots in ways if _room_of(slots, self._policy.row_tokens) <= left])
        if not ways:
            return False
        held, needed = [_room_of(each, self._policy.row_tokens) for each in (self._slots, ways[0])]
        self._is_stale = False
        # Keep the layout, unless no prompt joins and half of the room is free, or another is much faster.
        stays = _has_room(self._running) and held <= left and (bool(joining) or held <= 2 * needed)
        ways = (now, *ways) if stays else ways
        slots = cheapest(ways, lengths, self._policy.bucket_tokens, len(set(self._slots)))
        if stays and (joining or slots == now):
            return True
        for (room, _), sequence in zip(slots, running, strict=False):
            sequence.progress.room = room
        self._slots = slots
        rooms, lanes = tuple([room for room, _ in slots]), tuple([lane for _, lane in slots])
        self.frames.append(Arrange(rooms, lanes=lanes if any(lanes) else ()))
        return True

    def fits_alone(self, sequence: SequenceState) -> bool:
        soon = max(sequence.progress.position, sequence.progress.prompt) + MAX_WIDTH
        return capacity(min(soon, sequence.longest)) + self._policy.row_tokens <= self.kv_tokens

    def resize(self, kv_tokens: int, *, clear: bool = False) -> None:
        self.kv_tokens, self._is_stale = kv_tokens, True
        evicted = self._prefixes.resize(0) if clear else ()
        if evicted := (*evicted, *self._prefixes.resize(kv_tokens // KEPT_SHARE)):
            self.frames.append(Evict(evicted))

    def _occupied(self, joining: Sequence[SequenceState] = ()) -> int:
        started = self._waiting.holding()
        rows = self._rows(joining)
        lengths, kept = _lengths(rows), self._prefixes.positions
        if self._policy.rolls_back:
            return _room_of(laned_layouts(lengths, _lanes(rows))[-1], self._policy.row_tokens) + kept
        # A prompt has its own cache until it decodes, unless it is the only sequence.
        own = (
            [capacity(sequence.progress.prompt) for sequence in [*started, *joining]] if len(rows) > 1 else []
        )
        return batch_tokens(lengths) + sum(own) + self._policy.row_tokens * (len(rows) + len(own)) + kept

    def _rows(self, joining: Sequence[SequenceState]) -> list[SequenceState]:
        rows = [*self._running, *self._waiting.holding()]
        return [*rows, *(sequence for sequence in joining if sequence not in rows)]


def _has_room(running: Sequence[SequenceState]) -> bool:
    """Check room before each step, without computing lengths."""
    held = [sequence.progress for sequence in running]
    return all(at.position + MAX_WIDTH <= at.room for at in held) or (
        len(held) == 1 and running[0].longest <= held[0].room
    )


def _room_of(slots: Slots, row_tokens: int) -> int:
    return sum([room + row_tokens for room, _ in slots])


def _lanes(rows: Sequence[SequenceState]) -> tuple[int, ...]:
    return tuple([sequence.progress.lane for sequence in rows])


def _lengths(rows: Sequence[SequenceState]) -> tuple[int, ...]:
    lengths = [max(sequence.progress.position, sequence.progress.prompt) + MAX_WIDTH for sequence in rows]
    return (min(lengths[0], rows[0].longest),) if len(rows) == 1 else tuple(lengths)
