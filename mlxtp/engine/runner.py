"""Forwards on every rank: prefill chunks and decode steps over the running batch.

The runner decides nothing: frames name every forward, and every sequence that joins or leaves. The same
frames give the same graph on every rank. Results are lazy arrays; only reading them waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import le

import mlx.core as mx

from ..errors import Code, GroupError
from ..wire.messages import RESTS, Forward, PromptPart, Sampling
from . import kv_cache
from .batch import (
    Bucket,
    CacheKind,
    Caches,
    ForwardShape,
    MergedCaches,
    SlotCaches,
    arrays_of,
    cut,
    divide,
    merged,
    overlap,
    plain,
    rows_without,
    separate,
    share,
    snapshot,
)
from .block_store import Items, block_of
from .forwards import ModelForwards, StepInputs
from .group import CollectiveCounter, LoneGroup
from .loader import ModelShare, leaves
from .pipeline import Border, HiddenStates, nothing_chosen, padded
from .sampler import Chooser, Chosen, Scores
from .sharding import at_ends

#: Return MLX's unused buffers to the system after so many forwards, as mlx-lm does.
CLEAR_EVERY = 256


class InputBatch:
    """Each row's next input token, still being computed by its last forward."""

    def __init__(self) -> None:
        #: Tokens int32 [rows], and their embeddings [rows, hidden] if the choice returned them.
        self._last: list[mx.array] = []

    def feed(self, frame: Forward, width: int, _forward: int) -> tuple[mx.array, mx.array | None]:
        """Return tokens int32 [rows, width], padded with zeros, and embeddings [rows, 1, hidden] if known."""
        tokens, *embeddings = self._last
        if not frame.widths:
            return tokens[:, None], embeddings[0][:, None] if embeddings else None
        known = padded(frame.tokens, frame.widths, width)
        if all(frame.widths):
            return known, None
        inside = mx.array([[count == 0] for count in frame.widths])
        first = mx.where(inside, tokens[:, None], known[:, :1])
        return mx.concatenate([first, known[:, 1:]], axis=1), None

    def chose(self, chosen: Chosen, embeddings: mx.array | None) -> None:
        found = [chosen.tokens] if embeddings is None else [chosen.tokens, embeddings]
        if chosen.tokens.shape[1] == 1:
            self._last = [array[:, 0] for array in found]
        else:
            rows, last = mx.arange(len(chosen.widths)), mx.array([width - 1 for width in chosen.widths])
            self._last = [array[rows, last] for array in found]

    def joined(self, chosen: Chosen, embeddings: mx.array | None) -> None:
        """Add joining rows with their first tokens, and the tokens' embeddings [rows, 1, hidden]."""
        found = [chosen.tokens] if embeddings is None else [chosen.tokens, embeddings]
        new = [array[:, 0] for array in found]
        both = zip(self._last, new, strict=False)  # without embeddings, unless all have them
        self._last = [mx.concatenate([*pair]) for pair in both] if self._last else new

    def left(self, _uid: int, order: list[int]) -> None:
        self._last = [array[mx.array(order)] for array in self._last] if order else []


@dataclass(slots=True)
class KeptCache:
    """Caches of `length` tokens. `within`: uid of the caches that lend them arrays; 0 for none."""

    caches: Caches
    length: int
    within: int = 0
    size_bytes: int = 0


class KeptCaches:
    def __init__(self) -> None:
        self.fetched: set[int] = set()  # uids of caches from disk
        self._entries: dict[int, KeptCache] = {}

    def insert(
        self, uid: int, caches: Caches, length: int, covers: tuple[int, ...] = (), *, fetched: bool = False
    ) -> None:
        if fetched:
            self.fetched.add(uid)
        self._entries[uid] = KeptCache(caches, length)
        self._count(uid)
        self._overlap(uid, covers)

    @property
    def size_bytes(self) -> int:
        return sum(kept.size_bytes for kept in self._entries.values())

    def held(self, uid: int) -> tuple[Caches, int]:
        kept = self._entries.get(uid)
        return ([], 0) if kept is None else (kept.caches, kept.length)

    def pop(self, uid: int) -> Caches:
        kept = self._entries.pop(uid)
        self.fetched.discard(uid)
        # The longest cache that used its arrays gets its own, and lends them to the others.
        heirs = sorted([(each.length, other) for other, each in self._entries.items() if each.within == uid])
        if heirs:
            (_, heir), others = heirs.pop(), tuple([other for _, other in heirs])
            separate(self._entries[heir].caches)
            self._entries[heir].within = 0
            self._count(heir)
            self._overlap(heir, others)
        return kept.caches

    def _overlap(self, uid: int, others: tuple[int, ...]) -> None:
        for other in others:
            overlap(self._entries[other].caches, self._entries[uid].caches)
            self._entries[other].within = uid
            self._count(other)

    def _count(self, uid: int) -> None:
        kept = self._entries[uid]
        mx.async_eval(arrays_of(kept.caches))
        kept.size_bytes = _bytes([each for each in leaves(kept.caches) if not (kept.within and plain(each))])


class Runner:
    """Sequences of one loaded model and their KV caches. `compiled` replays decode graphs."""

    def __init__(
        self,
        loaded: ModelShare,
        caches: CacheKind,
        counter: CollectiveCounter,
        chooser: Chooser,
        *,
        compiled: bool,
        border: Border | None = None,
    ) -> None:
        self.border = border or Border(None, LoneGroup())
        self._caches = caches
        self._vocabulary = loaded.vocabulary
        self._model = ModelForwards(loaded, caches, counter, traces=compiled and caches.can.rolls_back)
        self._chooser = chooser
        self._prefilling: dict[int, Caches] = {}
        self.kept = KeptCaches()
        self._use: Counter[str] = Counter()  # counters of cache use
        #: Count of each sequence's forwards, and the number of the newest.
        self._forwards: dict[int, tuple[int, int]] = {}
        self._samplings: dict[int, Sampling] = {}
        #: Possible lengths of each sequence's KV cache at its next forward, as drafts may be rejected.
        self._lengths: dict[int, range] = {}
        self._batch: SlotCaches | MergedCaches = caches.empty_batch()
        self._inputs = self.border.tokens if self.border.stage else InputBatch()
        self.forwards = 0  # forwards of this runner, prefill chunks and steps

    def run(self, frame: Forward, known: Callable[[], object] | None = None) -> Chosen:
        """Queue one forward. Raises GroupError (DESYNC) for a step of other rows or lengths than this rank's.

        A chunk that does not end its prompt returns a zero to wait for. `known`: called while a step's logits
        are computed, to wait until rank 0 can choose from them.
        """
        if not frame.prompts:
            return self._step(frame, known)
        whole = len(frame.rows) > 1 and not frame.unfinished and self._caches.can.truncatable
        if whole and isinstance(self._batch, SlotCaches):
            return self._read_into(self._batch, frame)
        return self._read(frame)

    def _read(self, frame: Forward) -> Chosen:
        """Read parts of prompts; all of them end, or none does."""
        rows, widths = frame.rows, frame.widths
        ends = [offset + width for offset, width in zip(frame.positions, widths, strict=True)]
        each = [self._part(*part) for part in zip(rows, frame.positions, frame.prompts, strict=True)]
        self._count(rows)
        self._lengths.update({uid: range(end, end + 1) for uid, end in zip(rows, ends, strict=True)})
        width, caches = widths[0], each[0]
        if len(rows) > 1:
            width = max(2, *widths)  # mlx-lm puts a single token of a window elsewhere
            caches = merged(each, widths, width)
        tokens = padded(frame.tokens, widths, width)
        received = self.border.expect(*tokens.shape)
        local, remember = self._model.read(
            tokens,
            caches,
            received.given,
            ends=mx.array(widths) - 1,
            following=[prompt.following for prompt in frame.prompts],
            every=_is_scored(frame),
        )
        local, found = self._score(local, frame, tokens)

        def arrays() -> list[mx.array]:
            if len(rows) > 1:
                divide(caches, each, widths, width)
            return [array for own in each for array in arrays_of(own)]

        if frame.unfinished:
            remember(None)
            # Wait only for the caches: the output head and the last layer's output are then never computed.
            sent = [] if self._vocabulary.chooses else [self.border.hand_on(local, self.forwards)]
            done = nothing_chosen(1, 1, [*arrays(), *sent])
            self.border.submit(self.forwards, received, done, found)
            if any(prompt.save for prompt in frame.prompts):
                self.border.flush(self.forwards)
            for own, end, prompt in zip(each, ends, frame.prompts, strict=True):
                if prompt.save:
                    self.kept.insert(prompt.save, snapshot(own, end), end, prompt.covers)
            clear_pool()  # attention scores have another size in each chunk
            return Chosen(done, (), (), {}, self.forwards, prompts=found)
        outcome = self._first_tokens(local, frame, found, after=received, arrays=arrays, remember=remember)
        for uid, own in zip(rows, each, strict=True):
            del self._prefilling[uid]
            self._batch.join(uid, own)
        return outcome

    def _part(self, uid: int, offset: int, prompt: PromptPart) -> Caches:
        if uid not in self._prefilling:
            self._prefilling[uid] = self._begin(uid, offset, prompt)
        self._caches.reserve(self._prefilling[uid], offset, prompt.total)
        return self._prefilling[uid]

    def _read_into(self, batch: SlotCaches, frame: Forward) -> Chosen:
        """Read whole prompts into the arrays that their rows will share."""
        widths = frame.widths
        for uid, offset, prompt in zip(frame.rows, frame.positions, frame.prompts, strict=True):
            self._lengths[uid] = range(prompt.total, prompt.total + 1)
            batch.join(uid, self._begin(uid, offset, prompt))
        self._count(frame.rows)
        longest = max([prompt.total for prompt in frame.prompts])
        room = kv_cache.capacity(longest + 1)  # the last position is for padding
        bucket = batch.gather(frame.rows, room)
        positions, targets, mask = ForwardShape.arrays(
            mx.array(frame.positions, dtype=mx.int32), max(widths), min(kv_cache.view(longest), room)
        )
        # Padding beyond the room goes to the last position. Later tokens overwrite all padding.
        shape = ForwardShape(positions, mx.minimum(targets, room - 1), mask)
        arrays, bucket.arrays = bucket.arrays, []
        layers = self._caches.views(arrays, shape)
        del arrays  # the last other owner, so MLX writes in place
        tokens = padded(frame.tokens, widths, max(widths))
        received = self.border.expect(*tokens.shape)
        ends = mx.array(widths, dtype=mx.int32) - 1
        local, remember = self._model.read(tokens, layers, received.given, ends=ends, every=_is_scored(frame))
        local, found = self._score(local, frame, tokens)

        def arrays_now() -> list[mx.array]:
            bucket.arrays = [array for layer in layers for array in layer.arrays]
            return bucket.arrays

        return self._first_tokens(local, frame, found, after=received, arrays=arrays_now, remember=remember)

    def _step(self, frame: Forward, known: Callable[[], object] | None) -> Chosen:
        rows, running = frame.rows, self._batch.rows
        if self.border.stage is not None:  # one lane steps
            lane = {uid for part in self._batch.parts(rows) for uid in part.rows}
            running = [uid for uid in running if uid in lane]
        if rows != tuple(running):
            raise GroupError(f"a step for rows {rows}, but this rank runs {tuple(running)}", Code.DESYNC)
        widths = tuple(width or 1 for width in frame.widths) or (1,) * len(rows)
        self._lengthen(frame, widths)
        self._count(rows)
        width = max(widths)
        tokens, given = self._inputs.feed(frame, width, self.forwards)
        received = self.border.expect(*tokens.shape)
        given = given if received.given is None else received.given
        greedy = not frame.gathered and self._vocabulary.chooses
        drafts = frame.drafts if self._vocabulary.chooses else 0
        if drafts > 0 and self._model.head is None:
            raise GroupError("a step with drafts, but this rank has no MTP head", Code.DESYNC)
        inputs = StepInputs(tokens, given, widths)
        parts, at = self._batch.parts(rows), frame.positions
        found = self._model.step(parts, rows, at, inputs, winners=greedy, drafts=max(drafts, 0))

        def end(chosen: mx.array, embeddings: mx.array | None, scores: Scores) -> Chosen:
            proposed: list[mx.array] = []
            ahead: list[mx.array] = []  # a sum over all ranks, never left for a later graph
            if self._model.head is not None and drafts != RESTS:
                embeddings = self._model.embedded(chosen) if embeddings is None else embeddings
                ahead = [embeddings]
                pairs = inputs.chose(found[-1], embeddings, chosen)
                proposed = self._model.follow(parts, rows, at, pairs, drafts=drafts)
            arrays = self._batch.arrays(rows)
            self.border.submit(self.forwards, received, chosen, arrays, proposed, ahead, told=scores)
            outcome = Chosen(chosen, rows, widths, scores, self.forwards, tokens, _one(proposed))
            self._inputs.chose(outcome, embeddings)
            return outcome

        if greedy:
            return end(found[0], found[1], {})
        logits, choose = self._exchange(found[0], frame, widths, tuple([place + 1 for place in at]))
        try:
            if known is not None:
                mx.async_eval(logits, *self._batch.arrays())
                known()
        finally:  # even if `known` raises, because the other ranks wait for the choice
            chosen, scores = choose()
            outcome = end(chosen, None, scores)
        return outcome

    def first_forwards(self, chunk: int) -> None:
        """Run a chunk of a prompt and one step, traced as for requests, to compile their kernels."""
        caches = self._caches.new()
        zeros, chooses = mx.zeros((1, chunk), dtype=mx.int32), self._vocabulary.chooses
        local, remember = self._model.read(zeros, caches, ends=mx.array([chunk - 1]))
        token, embeddings = mx.zeros((1, 1), dtype=mx.int32), None
        if chooses:
            token, embeddings = self._vocabulary.winners(local)
        remember(embeddings)
        mx.eval(local, token, arrays_of(caches))
        self._batch.join(1, caches)
        inputs = StepInputs(token, embeddings if self.border.stage is None else None, (1,))
        parts, drafts = self._batch.parts((1,)), int(self._model.head is not None)
        found = self._model.step(parts, (1,), (chunk,), inputs, winners=chooses, drafts=drafts)
        if drafts:
            pairs = inputs.chose(found[2], found[1], found[0])
            found += self._model.follow(parts, (1,), (chunk,), pairs, drafts=drafts)
        mx.eval(found, self._batch.arrays())

    def stop(self, uid: int, keep: int, covers: tuple[int, ...] = ()) -> int:
        """Remove a sequence, keep `keep` tokens of its cache, and return the number of its forwards.

        The kept cache lends arrays to `covers`. Raises GroupError (DESYNC) if it cannot be truncated so.
        """
        self._samplings.pop(uid, None)
        lengths = self._lengths.pop(uid, range(0))
        # After a step of several tokens, states lag behind until the next step.
        reached = lengths if len(lengths) < 2 else range(lengths[0] - 1, lengths[-1] + 1)
        if keep and not self._caches.can.truncatable and keep not in reached:
            held = f"this rank holds {lengths[-1]}, not to be cut"
            raise GroupError(f"sequence {uid}: {keep} tokens to keep, but {held}", Code.DESYNC)
        count, newest = self._forwards.pop(uid)
        self.border.flush(newest)
        kept: Caches | None = None
        if (caches := self._prefilling.pop(uid, None)) is not None:
            kept = cut(caches, keep) if keep else None
        elif uid in self._batch.rows:
            self._model.catch_up(self._batch.parts((uid,)))
            row, last = self._batch.rows.index(uid), len(self._batch.rows) - 1
            self._inputs.left(uid, rows_without(row, last))
            kept = self._batch.leave(uid, keep)
        if kept is not None:
            self.kept.insert(uid, kept, keep, covers)
        if not self._batch.rows and not self._prefilling:
            clear_pool()
        return count

    def evict(self, uids: tuple[int, ...]) -> None:
        before = self.kept.size_bytes
        for uid in uids:
            self.kept.pop(uid)
        self._use["evicted_bytes"] += before - self.kept.size_bytes

    def arrange(self, rooms: tuple[int, ...], lanes: tuple[int, ...] = (), *, trim: bool = False) -> None:
        """Lay out rows. `trim`: free unused memory. Raises GroupError (DESYNC) for other or longer rows."""
        self.border.flush()
        batch = self._batch
        lengths = [self._lengths[uid][-1] for uid in batch.rows]
        fit = len(rooms) >= len(lengths) and all(map(le, lengths, rooms))
        if rooms and not (fit and self._caches.can.rolls_back):
            raise GroupError(f"room for {rooms} tokens, but this rank holds {lengths}", Code.DESYNC)
        if rooms or (lanes and isinstance(batch, MergedCaches)):
            self._model.catch_up(batch.parts(batch.rows))
            batch.arrange(rooms, lanes)
        if trim:
            mx.eval(self._batch.arrays())
            mx.clear_cache()

    def block(self, uid: int, start: int, end: int) -> Items:
        """Return a block of a KV cache for the disk. Raises GroupError (DESYNC) if there is none."""
        self.border.flush()
        truncatable = self._caches.can.truncatable
        caches = self._prefilling.get(uid) or self.kept.held(uid)[0]
        if not caches and isinstance(self._batch, SlotCaches) and uid in self._batch.rows:
            self._model.catch_up(self._batch.parts((uid,)))
            caches, start, end = self._batch.between(uid, start, end), 0, end - start
        if not caches:
            raise GroupError(f"sequence {uid}: a block for the disk, but this rank has no cache", Code.DESYNC)
        return block_of(caches, start, end, truncatable=truncatable)

    @property
    def room(self) -> list[tuple[int, int]]:
        return [part.shape for part in self._batch.every if isinstance(part, Bucket)]

    def kv_bytes(self) -> int:
        held = self.kept.size_bytes + sum(map(_bytes, self._prefilling.values()))
        return held + sum(array.nbytes for array in self._batch.arrays())

    def cache_use(self) -> dict[str, int]:
        held = {"kv_bytes": self.kv_bytes(), "kept_bytes": self.kept.size_bytes}
        return {**self._use, **held, "graphs": self._model.traced}

    def _begin(self, uid: int, offset: int, prompt: PromptPart) -> Caches:
        source = prompt.source
        self._forwards[uid] = 0, 0
        self._samplings[uid] = prompt.sampling
        if not source:
            return self._caches.new()
        self._use.update(reused=1, reused_tokens=offset)
        if source in self.kept.fetched:
            self._use.update(fetched=1, fetched_tokens=offset)
        if source in self._batch.rows:
            self._model.catch_up(self._batch.parts((source,)))
            return self._batch.copy(source, offset)
        kept, held = self.kept.held(source)
        if held < offset or (held > offset and not self._caches.can.truncatable):
            why = f"sequence {uid} starts after {offset} tokens of sequence {source}; this rank keeps {held}"
            raise GroupError(why, Code.DESYNC)
        return cut(self.kept.pop(source), offset) if prompt.take else share(kept, offset)

    def _score(self, local: mx.array, frame: Forward, tokens: mx.array) -> tuple[mx.array, Scores]:
        """Return the logits at the ends of parts, and the scores by uid that their prompts ask for."""
        if not (_is_scored(frame) and self._vocabulary.chooses):
            return local, {}
        ends = mx.array(frame.widths) - 1
        following = mx.array([[prompt.following] for prompt in frame.prompts], dtype=mx.int32)
        targets = mx.concatenate([tokens[:, 1:], following], axis=1)
        targets = mx.where(mx.arange(tokens.shape[1]) == ends[:, None], following, targets)
        rows = [row for row, prompt in enumerate(frame.prompts) if prompt.scores >= 0]
        which, top = mx.array(rows), max([frame.prompts[row].scores for row in rows])
        scores = self._vocabulary.scores(local[which], targets[which], top)
        known = [frame.widths[row] - (not frame.unfinished) for row in rows]
        # No rank exchanges what the choice needs before these scores.
        (ended,) = mx.depends([at_ends(local, ends)], list(scores))
        return ended, {
            frame.rows[row]: (scores[0][at, :count], scores[1][at, :count], scores[2][at, :count])
            for at, (row, count) in enumerate(zip(rows, known, strict=True))
        }

    def _first_tokens(
        self,
        local: mx.array,
        frame: Forward,
        prompts: Scores,
        *,
        after: HiddenStates,
        arrays: Callable[[], list[mx.array]],
        remember: Callable[[mx.array | None], mx.array | None],
    ) -> Chosen:
        """Submit a forward that ends prompts. Call `remember` with its tokens' embeddings, then `arrays`."""
        rows, widths = frame.rows, (1,) * len(frame.rows)
        scores: Scores = {}
        embeddings: mx.array | None = None
        proposed: list[mx.array] = []
        if not frame.gathered and self._vocabulary.chooses:
            tokens, embeddings = self._vocabulary.winners(local)
        else:
            at = tuple([prompt.total for prompt in frame.prompts])
            tokens, scores = self._exchange(local, frame, widths, at)[1]()
        if self._model.head is not None:
            embeddings = self._model.embedded(tokens) if embeddings is None else embeddings
            found = remember(embeddings)
            if frame.drafts and found is not None:
                proposed = [self._vocabulary.winners(self._vocabulary.logits(found))[0]]
        self.border.submit(self.forwards, after, tokens, prompts, arrays(), proposed, told=scores)
        outcome = Chosen(tokens, rows, widths, scores, self.forwards, None, _one(proposed), prompts)
        self._inputs.joined(outcome, embeddings)
        return outcome

    def _exchange(
        self, local: mx.array, frame: Forward, widths: tuple[int, ...], at: tuple[int, ...]
    ) -> tuple[mx.array, Callable[[], tuple[mx.array, Scores]]]:
        """Exchange what the frame says. Return the logits of its gathered rows, and a function that chooses
        from them and returns all rows' tokens, int32 [rows, width]. `at`: positions of the first of them.
        """
        rows, gathered, vocabulary = frame.rows, set(frame.gathered), self._vocabulary
        if not vocabulary.chooses:
            sent = [self.border.hand_on(local, self.forwards)]
            return local, lambda: (nothing_chosen(len(rows), max(widths), sent), {})
        drawn = [row for row, uid in enumerate(rows) if uid in gathered]
        uids, own = tuple([rows[row] for row in drawn]), tuple([widths[row] for row in drawn])
        winners: mx.array | None = None
        if len(drawn) == len(rows):
            logits = vocabulary.gather(local)
        else:
            winners, logits = vocabulary.winners_and_logits(local, drawn, max(own))

        def choose() -> tuple[mx.array, Scores]:
            samplings = tuple([self._samplings[uid] for uid in uids])
            first = mx.array([at[row] for row in drawn], dtype=mx.int32)
            broadcast = frame.agreement == "broadcast"
            tokens, scores = self._chooser.choose(logits, uids, own, samplings, first, broadcast=broadcast)
            if winners is None:
                return tokens, scores
            winners[mx.array(drawn), : tokens.shape[1]] = tokens
            return winners, scores

        return logits, choose

    def _lengthen(self, frame: Forward, widths: tuple[int, ...]) -> None:
        """Check and update the rows' lengths. Sums would spread a wrong one to all ranks, and hide it."""
        for uid, position, width in zip(frame.rows, frame.positions, widths, strict=True):
            if position not in (lengths := self._lengths[uid]):
                held = f"this rank holds from {lengths[0]} to {lengths[-1]} tokens"
                raise GroupError(f"sequence {uid}: a step at position {position}, but {held}", Code.DESYNC)
            self._lengths[uid] = range(position + 1, position + width + 1)

    def _count(self, uids: tuple[int, ...]) -> None:
        self.forwards += 1
        for uid in uids:
            self._forwards[uid] = self._forwards[uid][0] + 1, self.forwards
        if self.forwards % CLEAR_EVERY == 0:
            clear_pool()


def _one(arrays: Sequence[mx.array]) -> mx.array | None:
    return arrays[0] if arrays else None


def _is_scored(frame: Forward) -> bool:
    return any(prompt.scores >= 0 for prompt in frame.prompts)


def clear_pool() -> None:
    """Free MLX's unused buffers on Metal. Elsewhere they are few, and MLX would wait for other ranks."""
    if mx.metal.is_available():
        mx.clear_cache()


def _bytes(caches: Caches) -> int:
    return sum(array.nbytes for array in arrays_of(caches))
