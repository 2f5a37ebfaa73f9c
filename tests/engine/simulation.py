"""The decode loop without ranks: drives a scheduler as rank 0 does, and plays the ranks' part by the letter.

`Ranks` holds the tokens that each KV cache would hold, and executes frames literally. Its model knows what
every request's answer is, and says it only when the KV cache holds what it should: a row that starts from a
wrong cache, skips a token or forgets to roll back hears nonsense.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from random import Random
from typing import Any

from mlxtp.engine import kv_cache
from mlxtp.engine.disk_index import DiskIndex
from mlxtp.engine.kv_cache import SHORTEST_CHECKPOINT, SHORTEST_HIT, PrefixCache
from mlxtp.engine.scheduler import NO_FORWARD, QueuedForward, Scheduler
from mlxtp.engine.steps import DecodeFrame, Guide, Policy, SampledToken, Score, StepResult
from mlxtp.errors import Code, RequestError
from mlxtp.wire.messages import (
    Arrange,
    Error,
    Evict,
    FetchBlocks,
    FetchedBlocks,
    Finished,
    Forward,
    Generate,
    PromptPart,
    Restore,
    SessionStop,
    Spill,
    digests_in,
)
from mlxtp.wire.session import DecodeLedger

EOS = 1
NONSENSE = 999_999


@dataclass
class Request:
    """`says` is what the model will answer, as long as one asks; it ends with EOS or never does."""

    uid: int
    prompt: tuple[int, ...]
    max_tokens: int
    says: tuple[int, ...]
    ignore_eos: bool = False
    scored: bool = False
    scored_prompt: bool = False
    read: int = 1  #: tokens of the prompt, with the first, whose scores came
    guide: FakeGuide | None = None
    cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    ends: list[Finished] = field(default_factory=list)
    failures: list[Error] = field(default_factory=list)

    def answer(self, index: int) -> int:
        return self.says[index] if index < len(self.says) else 2 + (self.uid * 31 + index) % 50

    def token(self, index: int) -> int:
        """Of prompt and answer."""
        length = len(self.prompt)
        return self.prompt[index] if index < length else self.answer(index - length)

    def begins(self, tokens: Sequence[int]) -> bool:
        return all(token == self.token(index) for index, token in enumerate(tokens))

    @property
    def expected(self) -> tuple[tuple[int, ...], str]:
        """The visible tokens and the reason, without interference."""
        tokens: list[int] = []
        for index in range(self.max_tokens):
            token = self.answer(index)
            if token == EOS and not self.ignore_eos:
                return tuple(tokens), "stop"
            tokens.append(token)
        return tuple(tokens), "length"


class FakeGuide(Guide):
    """A grammar that allows exactly `says`, and leaves no choice at the indices in `forced_at`.

    It is finished after `ends` tokens, and refuses the one at index `fails`. It has cut the answer once
    `cuts` tokens came.
    """

    def __init__(
        self,
        says: Sequence[int],
        forced_at: frozenset[int] = frozenset(),
        ends: int = -1,
        fails: int = -1,
        cuts: int = 1 << 40,
    ) -> None:
        self._says = says
        self._forced_at = forced_at
        self._ends = ends
        self._fails = fails
        self._cuts = cuts
        self.most_drafted = 1 << 30
        self.accepted = 0
        self.prepared = 0
        """The index of the token that may be chosen under what was prepared last."""
        self.stuck_at = -1
        """The index of a token that nothing can be prepared for."""

    @property
    def finished(self) -> bool:
        return self.accepted == self._ends

    @property
    def cut(self) -> bool:
        return self.accepted >= self._cuts

    @property
    def draftable(self) -> int:
        return self.most_drafted

    @property
    def foretells(self) -> bool:
        return {self.accepted, self.accepted + 1} <= self._forced_at

    def accept(self, token: int) -> None:
        if self.accepted == self._fails:
            raise RequestError("no way on", Code.BAD_REQUEST)
        assert token == self._says[self.accepted]
        self.accepted += 1

    def forced(self, limit: int) -> tuple[int, ...]:
        end = self.accepted
        while end in self._forced_at and end - self.accepted < limit:
            end += 1
        if self.stuck_at == end == self.accepted:
            raise RequestError("no way on", Code.BAD_REQUEST)
        self.prepared = end
        return tuple(self._says[self.accepted : end])

    def allowed(self, drafts: Sequence[int]) -> tuple[int, ...]:
        assert self.prepared == self.accepted, "nothing is forced"
        end = self.accepted
        for token in drafts:
            if token != self._says[end] or end + 1 in self._forced_at | {self._ends}:
                break
            end += 1
        self.prepared = end
        return tuple(self._says[self.accepted : end])


@dataclass(frozen=True)
class Chunk:
    """Tokens of a prompt in a forward, as the ranks and the scheduler know them."""

    uid: int
    offset: int
    tokens: tuple[int, ...]
    part: PromptPart
    request: int
    cached: int

    @property
    def total(self) -> int:
        return self.part.total

    @property
    def last(self) -> bool:
        return self.offset + len(self.tokens) == self.part.total


def chunks_of(forward: Forward, queued: QueuedForward) -> tuple[Chunk, ...]:
    found, at = [], 0
    columns = zip(forward.rows, forward.positions, forward.widths, forward.prompts, queued.reads, strict=True)
    for uid, offset, width, part, sequence in columns:
        assert (uid, offset + width) == (sequence.uid, sequence.progress.prefilled)
        tokens = forward.tokens[at : at + width]
        found.append(Chunk(uid, offset, tokens, part, sequence.request, sequence.progress.reused))
        at += width
    return tuple(found)


class Disk:
    """Blocks by digest, on rank 0 and on another rank that has lost some of them. It lags behind at times."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.room_bytes = 1
        #: Each with where it ends, and the digest that it follows.
        self.blocks: dict[bytes, tuple[int, bytes, tuple[int, ...]]] = {}
        self.elsewhere: set[bytes] = set()

    @property
    def takes(self) -> bool:
        return self.room_bytes > 0 and self.random.random() < 0.7

    def has(self, digest: bytes) -> bool:
        return digest in self.blocks

    is_kept = has

    def ends(self, stems: Container[bytes]) -> list[int]:
        return sorted({end for end, previous, _ in self.blocks.values() if previous in stems}, reverse=True)

    def write(self, frame: Spill, tokens: tuple[int, ...]) -> None:
        assert not self.has(frame.digest)
        self.blocks[frame.digest] = frame.end, frame.previous, tokens
        if self.random.random() < 0.9:
            self.elsewhere.add(frame.digest)

    def read(self, fetch: FetchBlocks) -> list[tuple[int, ...]]:
        """The leading blocks that both ranks have."""
        found = []
        for at, digest in enumerate(digests_in(fetch.digests)):
            if digest not in self.blocks or digest not in self.elsewhere:
                break  # lost there, or deleted for another sequence
            end, _, tokens = self.blocks[digest]
            assert end == (at + 1) * fetch.block
            found.append(tokens)
        return found

    def delete(self, digest: bytes) -> None:
        self.blocks.pop(digest, None)


class Ranks:
    """The tokens that every rank would hold, `contents[uid]`, and those it would choose.

    `whole`: no KV cache can be cut.
    """

    def __init__(
        self,
        requests: dict[int, Request],
        kv_tokens: int,
        *,
        whole: bool = False,
        row_tokens: int = 0,
        disk: Disk | None = None,
    ) -> None:
        self._disk = disk
        self.fetches: dict[int, FetchBlocks] = {}
        self.restored: set[int] = set()
        self.row_tokens = row_tokens
        self.whole = whole
        self._requests = requests
        self.kv_tokens = kv_tokens
        self._ledger = DecodeLedger()
        self._seq = 0
        self.rows: list[int] = []
        self.rooms: dict[int, tuple[int, int]] = {}
        """Room of each row in arrays that it shares with all of the same room, once it is arranged."""
        self.slots: list[tuple[int, int]] = []
        """Room of each of their slots."""
        self.own: dict[int, int] = {}
        """Room of each sequence that has arrays of its own."""
        self.arranges = True
        self.most_buckets = 0
        self.stages = 1
        self.most_lanes = 0
        self.prefilling: dict[int, int] = {}
        """Length of each prompt that is not complete."""
        self.contents: dict[int, list[int]] = {}
        self.kept: dict[int, list[int]] = {}
        self.within: dict[int, int] = {}
        """Kept caches that have no arrays of their own, each with the one whose arrays it shares."""
        self.forwards: dict[int, int] = {}
        self.request_of: dict[int, int] = {}
        self.least: dict[int, int] = {}
        """Tokens of each sequence that its cache cannot be cut below, if it cannot be cut anywhere."""
        self._inside: dict[int, int] = {}
        """The token in each row's graph, which its next forward feeds."""

    def make(
        self, frame: DecodeFrame, queued: QueuedForward = NO_FORWARD, known: Callable[[], None] = lambda: None
    ) -> tuple[tuple[int, int], ...] | None:
        """Carry out a frame. Of a forward: (uid, token) of everything it chose, in order.

        `known` is called before a late step chooses.
        """
        self._check_rules(frame)
        match frame:
            case Forward() if frame.prompts:
                chunks = chunks_of(frame, queued)
                assert len({chunk.last for chunk in chunks}) == 1
                chosen = self._prefill(chunks)
            case Forward():
                if queued.late:
                    known()
                chosen = self._decode(frame)
            case SessionStop():
                self._stop(frame)
                return None
            case Evict():
                for uid in frame.uids:
                    self._drop(uid)
                return None
            case Arrange():
                self._arrange(frame.rooms, frame.lanes)
                return None
            case Spill() | FetchBlocks() | Restore():
                self._on_disk(frame)
                return None
        self.check_room()
        return chosen

    def _on_disk(self, frame: Spill | FetchBlocks | Restore) -> None:
        assert self._disk is not None
        match frame:
            case Spill():
                held = self.kept.get(frame.uid) or self.contents[frame.uid]
                readable = frame.uid in self.kept or frame.uid in self.prefilling or self.arranges
                assert readable, "a row of mlx-lm's own batched caches"
                if self.whole:
                    assert (frame.start, frame.end) == (0, len(held)), "a cut checkpoint"
                assert len(held) >= frame.end
                self._disk.write(frame, tuple(held[frame.start : frame.end]))
            case FetchBlocks():
                self.fetches[frame.uid] = frame
            case Restore():
                fetch = self.fetches.pop(frame.uid)
                if frame.blocks:
                    parts = self._disk.read(fetch)[: frame.blocks]
                    self.kept[frame.uid] = [token for part in parts for token in part]
                    self.restored.add(frame.uid)
                    assert len(self.kept[frame.uid]) == frame.blocks * fetch.block
                if frame.bad:
                    for digest in digests_in(fetch.digests)[frame.blocks :]:
                        self._disk.delete(digest)
                self.check_room()

    def reply(self, uid: int) -> int:
        """How many blocks all ranks have, as their replies say."""
        assert self._disk is not None
        blocks = len(self._disk.read(self.fetches[uid]))
        self._ledger.rules()[FetchedBlocks](FetchedBlocks(uid, blocks), 0)
        return blocks

    def _prefill(self, chunks: Sequence[Chunk]) -> tuple[tuple[int, int], ...]:
        for chunk in chunks:
            if chunk.uid not in self.prefilling:
                self._begin(chunk)
            together = len(chunks) > 1 and self.arranges and not self.whole
            longest = max(each.total for each in chunks) + 1 if together else chunk.total
            self.own[chunk.uid] = kv_cache.capacity(longest)
        chosen = []
        for chunk in chunks:
            contents, save = self.contents[chunk.uid], chunk.part.save
            assert len(contents) == chunk.offset
            contents += chunk.tokens
            self.forwards[chunk.uid] += 1
            if chunk.last:
                assert not save
                del self.prefilling[chunk.uid]
                self.rows.append(chunk.uid)
                chosen.append((chunk.uid, self._choose(chunk.uid)))
                self._check_guide(chunk.uid)
            if save:
                assert save not in self.forwards
                self._keep(save, list(contents), chunk.request, chunk.part.covers)
        return tuple(chosen)

    def _keep(self, uid: int, contents: list[int], request: int, covers: tuple[int, ...]) -> None:
        assert self._requests[request].begins(contents)
        assert not covers or self.whole
        for other in covers:
            assert self.kept[other] == contents[: len(self.kept[other])]
            self.within[other] = uid
        self.kept[uid] = contents

    def _drop(self, uid: int) -> None:
        """The longest of those that share its arrays gets its own, and the others share these."""
        del self.kept[uid]
        self.within.pop(uid, None)
        heirs = sorted((len(self.kept[other]), other) for other, owner in self.within.items() if owner == uid)
        for _, other in heirs:
            self.within[other] = heirs[-1][1]
        if heirs:
            del self.within[heirs[-1][1]]

    def _begin(self, chunk: Chunk) -> None:
        assert chunk.uid not in self.forwards, "no uid is given twice"
        origin = chunk.part.source
        source = self.kept if origin in self.kept else self.contents
        assert not origin or origin in self.rows or origin in self.kept
        held = source[origin] if origin else []
        assert len(held) >= chunk.offset == chunk.cached
        if origin in self.restored:
            assert chunk.part.take
            assert self._requests[chunk.request].begins(held)
        if self.whole and origin:
            assert held is self.kept.get(origin), "a running one is not shared"
            assert len(held) == chunk.offset, "a cut checkpoint"
        if chunk.part.take:
            self._drop(origin)
        self.contents[chunk.uid] = held[: chunk.offset]
        self.prefilling[chunk.uid] = chunk.total
        self.forwards[chunk.uid] = 0
        self.request_of[chunk.uid] = chunk.request

    def _decode(self, step: Forward) -> tuple[tuple[int, int], ...]:
        if self.stages == 1:
            assert list(step.rows) == self.rows
        else:
            self._check_lane(step)
        chosen, at = [], 0
        if self.arranges:
            widest = max(step.widths, default=1)
            for uid, position in zip(step.rows, step.positions, strict=True):
                assert position + widest <= self.rooms[uid][0]
        for uid, position, width in zip_longest(step.rows, step.positions, step.widths, fillvalue=0):
            contents = self.contents[uid]
            assert position <= len(contents)
            assert not self.whole or position >= self.least.get(uid, 0)
            del contents[position:]
            fed = step.tokens[at : at + width] or (self._inside[uid],)
            at += width
            self.least[uid] = position + (len(fed) == 1)
            self.forwards[uid] += 1
            for token in fed:
                contents.append(token)
                chosen.append((uid, self._choose(uid)))
            self._check_guide(uid)
        assert at == len(step.tokens)
        return tuple(chosen)

    def _check_lane(self, step: Forward) -> None:
        """Assert that these rows share arrays with no others."""
        assert [uid for uid in self.rows if uid in step.rows] == list(step.rows)
        shared = {self.rooms[uid] for uid in step.rows if uid in self.rooms}
        assert all(uid in step.rows for uid in self.rows if self.rooms.get(uid) in shared)
        lanes = {lane for _, lane in shared}
        assert len(lanes) <= 1
        self.most_lanes = max(self.most_lanes, len({lane for _, lane in self.rooms.values()}))

    def _choose(self, uid: int) -> int:
        contents, request = self.contents[uid], self._requests[self.request_of[uid]]
        self._inside[uid] = request.token(len(contents)) if request.begins(contents) else NONSENSE
        return self._inside[uid]

    def _check_guide(self, uid: int) -> None:
        """Assert that a row's grammar is prepared for the token that it chooses last."""
        request = self._requests[self.request_of[uid]]
        if request.guide is not None and not (request.ends or request.failures):
            assert request.guide.prepared == len(self.contents[uid]) - len(request.prompt)

    def _stop(self, stop: SessionStop) -> None:
        contents = self.contents.pop(stop.uid)
        if self.prefilling.pop(stop.uid, None) is None:
            row = self.rows.index(stop.uid)
            self.rows[row] = self.rows[-1]
            self.rows.pop()
        self.own.pop(stop.uid, None)
        room = self.rooms.pop(stop.uid, (0, 0))
        if room not in self.rooms.values():
            self.slots = [each for each in self.slots if each != room]
        assert stop.forwards == self.forwards[stop.uid]
        assert stop.keep <= len(contents)
        if stop.keep:
            assert not self.whole or stop.keep >= self.least.get(stop.uid, len(contents)), "a cut checkpoint"
            self._keep(stop.uid, contents[: stop.keep], self.request_of[stop.uid], stop.covers)

    def _arrange(self, rooms: tuple[int, ...], lanes: tuple[int, ...]) -> None:
        if not rooms:
            if lanes:
                assert not self.arranges
                self.rooms = {uid: (0, lane) for uid, lane in zip(self.rows, lanes, strict=True)}
            return
        assert self.arranges
        assert len(rooms) >= len(self.rows)
        self.slots = list(zip(rooms, lanes or (0,) * len(rooms), strict=True))
        self.rooms = dict(zip(self.rows, self.slots, strict=False))
        assert all(len(self.contents[uid]) <= room for uid, (room, _) in self.rooms.items())
        assert set(self.slots) == set(self.rooms.values()), "arrays without rows"
        self.most_buckets = max(self.most_buckets, len(set(self.slots)))
        for uid in self.rows:
            self.own.pop(uid, None)

    def occupied(self) -> int:
        """Positions of all KV caches: of arrays as they are, or where mlx-lm has them as they grow."""
        own = self.kept.keys() - self.within.keys()
        kept = sum(kv_cache.capacity(len(self.kept[uid])) for uid in own)
        rows = (
            len(self.slots) + sum(uid not in self.rooms for uid in self.rows)
            if self.arranges
            else len(self.rows)
        )
        fixed = self.row_tokens * (len(self.kept) + len(self.prefilling) + rows)
        if self.arranges:
            return fixed + kept + sum(room for room, _ in self.slots) + sum(self.own.values())
        prompts = sum(kv_cache.capacity(total) for total in self.prefilling.values())
        return fixed + kept + prompts + kv_cache.batch_tokens([len(self.contents[uid]) for uid in self.rows])

    def check_room(self) -> None:
        assert self.occupied() <= self.kv_tokens

    def _check_rules(self, frame: DecodeFrame) -> None:
        """The frame keeps the rules of a decode link."""
        self._seq += 1
        self._ledger.rules()[type(frame)](frame, self._seq)


def next_frame(scheduler: Scheduler, ranks: Ranks | None = None) -> DecodeFrame | None:
    """The next frame other than a layout of rows, which the ranks carry out at once."""
    while isinstance(frame := scheduler.next(), Arrange):
        if ranks is not None:
            ranks.make(frame)
    return frame


class Simulation:
    """`run_ahead`: how many forwards are queued before the tokens of an earlier one are known.

    `prefixes`: whether KV caches are kept and shared, `whole`: only whole. `disk`: they go there, too. Other
    settings are those of `Policy`.
    """

    def __init__(
        self,
        *,
        run_ahead: int = 1,
        prefixes: bool = False,
        whole: bool = False,
        row_tokens: int = 0,
        kv_tokens: int = 1 << 40,
        drafts: bool = False,
        together: int = 0,
        slow_when_wide: bool = False,
        disk: Disk | None = None,
        **policy: Any,
    ) -> None:
        self.disk = disk
        self.policy = Policy(
            frozenset([EOS]),
            kv_tokens=kv_tokens,
            row_tokens=row_tokens,
            drafts="auto" if drafts else "off",
            together=together,
            run_ahead=run_ahead,
            **{"rolls_back": not whole, **policy},
        )
        shortest = SHORTEST_CHECKPOINT if whole else SHORTEST_HIT
        kept = (
            PrefixCache(
                kv_tokens // 2, 8, shortest, truncatable=not whole, overlapping=whole, row_tokens=row_tokens
            )
            if prefixes or whole
            else None
        )
        self.kept = kept
        index = None if disk is None else DiskIndex(disk, truncatable=not whole, block=8, spill_from=16)
        self.scheduler = Scheduler(self.policy, kept, disk=index)
        self.requests: dict[int, Request] = {}
        self.ranks = Ranks(self.requests, kv_tokens, whole=whole, row_tokens=row_tokens, disk=disk)
        self.ranks.arranges = self.policy.rolls_back
        self.ranks.stages = self.policy.stages
        self.frames: list[DecodeFrame] = []
        self.late: list[bool] = []
        """Whether each decode step was late."""
        self._chunks: dict[tuple[int, int], tuple[Chunk, ...]] = {}
        self._run_ahead = run_ahead
        self._slow_when_wide = slow_when_wide
        self._now_s = 0.0
        self._running: deque[tuple[tuple[tuple[int, int], ...], dict[int, list[Score]]]] = deque()

    def add(
        self,
        prompt: int | tuple[int, ...] = 3,
        max_tokens: int = 5,
        says: tuple[int, ...] = (),
        *,
        guide: FakeGuide | None = None,
        ignore_eos: bool = False,
        scored: bool = False,
        scored_prompt: bool = False,
        client: int = 0,
        user: int = 0,
        salt: int = 0,
        places: tuple[int, ...] = (),
        batch: bool = False,
    ) -> Request:
        """Admit a request; a prompt of so many tokens is like no other."""
        uid = len(self.requests) + 1
        tokens = tuple(1000 * uid + n for n in range(prompt)) if isinstance(prompt, int) else prompt
        request = Request(uid, tokens, max_tokens, says, ignore_eos, scored, scored_prompt, guide=guide)
        self.requests[uid] = request
        whose = {"client": client, "user": user, "salt": salt, "batch": batch}
        wants = {"logprobs": 0 if scored else -1, "prompt_logprobs": 0 if scored_prompt else -1}
        wants |= {"ignore_eos": ignore_eos, "places": places}
        self.scheduler.add(Generate(uid, tokens, max_tokens, **wants, **whose), guide)
        return request

    def cancel(self, uid: int) -> Finished | None:
        end = self.scheduler.cancel(uid)
        if end is not None:
            self.requests[uid].cancelled = True
            self._take(end)
        return end

    def resize(self, kv_tokens: int) -> None:
        """Change the room for KV caches, as rank 0 does: at once, between forwards."""
        self._settle(0)
        self.scheduler.resize(kv_tokens)
        self.ranks.kv_tokens = max(kv_tokens, self.ranks.kv_tokens)
        while self.scheduler.frames:
            frame = self.scheduler.next()
            assert frame is not None
            self._make(frame)
            if frame == Arrange(trim=True) or not isinstance(frame, Arrange):
                self.frames.append(frame)
        self.ranks.kv_tokens = kv_tokens
        self.ranks.check_room()

    def _make(self, frame: DecodeFrame) -> None:
        queued = self.scheduler.in_flight[-1] if isinstance(frame, Forward) else NO_FORWARD
        if isinstance(frame, Forward) and frame.prompts:
            self._chunks[frame.rows[0], frame.positions[0]] = chunks_of(frame, queued)
        elif isinstance(frame, Forward):
            self.late.append(queued.late)
        chosen = self.ranks.make(frame, queued, partial(self._settle, 0))
        if chosen is not None:
            self._running.append((chosen, prompt_scores(frame) if isinstance(frame, Forward) else {}))

    def tick(self) -> DecodeFrame | None:
        """One turn of the loop: run a frame, then take the tokens of what has run long enough.

        Rows are laid out before the frame for which that is done.
        """
        if self.disk is not None and self.ranks.fetches and self.disk.random.random() < 0.3:
            self._reply(self.disk.random.choice(list(self.ranks.fetches)))
        frame = next_frame(self.scheduler, self.ranks)
        if frame is not None:
            self.frames.append(frame)
            self._make(frame)
        ahead = self._run_ahead + self.policy.stages - 1
        self._settle(ahead if frame is not None else max(len(self._running) - 1, 0))
        if frame is None:
            for outcome in self.scheduler.late():
                self._take(outcome)
        return frame

    def _reply(self, uid: int) -> None:
        """Tell the scheduler what all ranks have read, or that time is up."""
        assert self.disk is not None
        late = self.disk.random.random() < 0.1
        self.fetched(uid, 0 if late else self.ranks.reply(uid), late=late)
        while self.scheduler.frames:
            self._make(self.scheduler.frames.popleft())

    def fetched(self, uid: int, blocks: int, *, late: bool = False) -> None:
        """Have all ranks reply, after their time if `late`."""
        index = self.scheduler.disk
        if late:
            index.expect(uid, 0.0)
            self.scheduler.frames += index.over(1.0)
        index.reply(0, uid, blocks)
        self.scheduler.frames += index.over(0.0)

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.tick()

    def drain(self, turns: int = 50_000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(turns):
            quiet = not (self._running or self.ranks.fetches or self.scheduler.disk.spills)
            if self.tick() is None and quiet:
                break
        else:
            raise AssertionError("the scheduler never comes to rest")
        assert not self.ranks.rows
        assert not self.ranks.prefilling
        assert len(self.scheduler) == 0, "no request is left behind"
        if self.kept is not None:
            assert len(self.ranks.kept) == len(self.kept), "a cache is left that the index does not know"

    def prefills(self) -> list[Chunk]:
        """All chunks, those computed together too."""
        reads = [frame for frame in self.frames if isinstance(frame, Forward) and frame.prompts]
        return [chunk for frame in reads for chunk in self._chunks[frame.rows[0], frame.positions[0]]]

    def forwards_of(self, request: int) -> int:
        """Forwards of all sequences that worked on a request."""
        uids = [uid for uid, of in self.ranks.request_of.items() if of == request]
        return sum(self.ranks.forwards[uid] for uid in uids)

    def pause(self, seconds: float) -> None:
        """Let other programs run."""
        self._now_s += seconds

    def _settle(self, keep: int) -> None:
        while len(self._running) > keep:
            chosen, prompts = self._running.popleft()
            scores: dict[int, list[Score]] = {}
            for uid, token in chosen:
                if self.requests[self.ranks.request_of[uid]].scored:
                    scores.setdefault(uid, []).append((-float(token), ()))
            tokens = tuple(token for _, token in chosen)
            took_s = len(tokens) ** 2.0 if self._slow_when_wide else 0.0
            self._now_s += took_s
            for outcome in self.scheduler.record(
                tokens, scores or None, took_s, self._now_s, prompts=prompts
            ):
                self._take(outcome)

    def _take(self, outcome: StepResult) -> None:
        request = self.requests[outcome.uid]
        assert not request.ends
        assert not request.failures
        match outcome:
            case SampledToken(prompt=True):
                assert (outcome.index, outcome.token) == (request.read, request.prompt[request.read])
                assert (outcome.score, request.tokens) == ((-float(outcome.token), ()), [])
                request.read += 1
            case SampledToken():
                assert outcome.score == ((-float(outcome.token), ()) if request.scored else None)
                request.tokens.append(outcome.token)
                request.indices.append(outcome.index)
            case Finished():
                request.ends.append(outcome)
            case Error():
                request.failures.append(outcome)


def prompt_scores(forward: Forward) -> dict[int, list[Score]]:
    """Return the scores that a forward's parts ask for: of the tokens that follow theirs."""
    found, at = dict[int, list[Score]](), 0
    for uid, width, part in zip(forward.rows, forward.widths, forward.prompts, strict=False):
        after = [*forward.tokens[at + 1 : at + width], *([part.following] if forward.unfinished else [])]
        at += width
        if part.scores >= 0:
            found[uid] = [(-float(token), ()) for token in after]
    return found
