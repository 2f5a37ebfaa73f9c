"""Choice of the next forward, on rank 0 alone. Pure: no MLX, no clock, no I/O.

`next` returns one frame; `record` takes the tokens that a forward chose. With run-ahead, the loop calls
`next` without the previous results. If a row's step depends on them (drafts in flight), it returns None.
A step with a grammar may be `late`: rank 0 needs the grammar's mask only once the forward has its logits.

When the KV caches exceed their budget, the scheduler preempts the sequence that loses least, and later
prefills its prompt and answer again. It does the same with a request that an earlier group left unfinished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ..errors import Code, MlxtpError, RequestError
from ..wire.messages import MAX_PROMPTS, Arrange, Error, Evict, Finished, Forward, Generate, PromptPart
from . import kv_cache, steps
from .disk_index import DiskIndex
from .kv_cache import KVCacheManager, PrefixCache
from .sequence import FedRow, Lanes, SequenceState, WaitingQueue
from .speculation import Speculation

#: Most prompts in prefill at once. Long prompts alternate; a prompt of a single chunk does not count.
MAX_PREFILLING = 4
#: Most tokens of KV caches in a forward over several prompts where rows share no arrays: up to four copies of
#: them live at once. The room holds COPIED_SHARE times as much, and a third of its memory is free.
MAX_COPIED, COPIED_SHARE = 1 << 14, 12


@dataclass(frozen=True, slots=True)
class QueuedForward:
    """Queued forward: the rows that it samples, and the prompts that it prefills."""

    rows: tuple[FedRow, ...]
    reads: tuple[SequenceState, ...] = ()
    tokens: int = 0
    late: bool = False  # a grammar needs the previous tokens before rank 0 samples


NO_FORWARD = QueuedForward(())  #: for other frames


class Scheduler:
    def __init__(
        self,
        policy: steps.Policy,
        prefixes: PrefixCache | None = None,
        last_uid: int = 0,
        disk: DiskIndex | None = None,
    ) -> None:
        #: Newest uid. Uids are never reused on the same links.
        self.last_uid = last_uid
        self._policy = policy
        self._requests: dict[int, SequenceState] = {}
        self._waiting = WaitingQueue()
        self._running: list[SequenceState] = []
        self._kv = KVCacheManager(policy, prefixes, self._running, self._waiting, disk)
        self.disk = self._kv.disk
        #: Frames that end sequences or free KV caches; sent before all other frames.
        self.frames = self._kv.frames
        self.speculation = Speculation(policy, self._running)
        #: Forwards without results, in the order that `next` returned them.
        self.in_flight: deque[QueuedForward] = deque()
        self._lanes = Lanes(self._running, policy.stages)
        self._spilled = False  # True if the last frame was a block for the disk
        self._late: list[steps.StepResult] = []  # sent to clients with the next results
        self._budget = policy.prefill_chunk
        self._chunks = steps.Chunks(policy)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, wants: Generate, guide: steps.Guide | None = None) -> None:
        """Raises MlxtpError (CONTEXT_OVERFLOW) when the request could not run even alone."""
        prompt = len(wants.tokens) - wants.answered
        needed = kv_cache.capacity(prompt + wants.max_tokens) + self._policy.row_tokens
        if needed > self._kv.kv_tokens:
            raise MlxtpError(
                f"{prompt} prompt tokens and {wants.max_tokens} new ones take room for {needed} in the "
                f"KV cache; the rank with the least memory has room for {self._kv.kv_tokens}",
                Code.CONTEXT_OVERFLOW,
            )
        self._requests[wants.uid] = sequence = SequenceState(wants, guide)
        self._waiting.line_up(sequence)

    def cancel(self, request: int) -> Finished | None:
        sequence = self._requests.get(request)
        if sequence is None:
            return None
        self._finish(sequence, "cancel")
        return sequence.end("cancel")

    def resize(self, kv_tokens: int, *, clear: bool = False) -> None:
        """End sequences that outgrow the room; `clear`: evict kept caches. No forward may be in flight."""
        larger = kv_tokens > self._kv.kv_tokens
        self._kv.resize(kv_tokens, clear=clear)
        for sequence in tuple(self._requests.values()):
            if not self._kv.fits_alone(sequence):
                self._late.append(self._fail(sequence, _outgrown(sequence, kv_tokens)))
        while (self._running or self._waiting.holding()) and not self._kv.make_room():
            self._preempt()
        if not larger:
            self.frames.append(Arrange(trim=True))

    def next(self) -> steps.DecodeFrame | None:
        """Return the next frame, or None if nothing can run before more results or requests arrive.

        Ended sequences leave first. Prefill runs next, at most one chunk between two decode steps, then a
        decode step. Between two forwards, at most one block goes to disk.
        """
        if self.frames:
            return self.frames.popleft()
        self._spilled = not self._spilled
        if self._spilled and (spill := self.disk.next_spill()):
            return spill
        self._spilled = False
        forward = self._next_prefill() if self._waiting else None
        if forward is None and self._running and not self.frames:
            forward = self._next_decode()
        if forward is None and self.frames:
            return self.frames.popleft()  # make room first
        return forward or self.disk.next_spill()

    def _next_prefill(self) -> Forward | None:
        policy = self._policy
        beside = bool(self._running)
        limit = self._chunks.beside if beside else policy.prefill_chunk
        self._budget = min(self._budget, limit) if beside else limit
        started = self._waiting.holding()
        free = policy.max_rows - len(self._running) - len(started)
        head = self._waiting[0].uid
        if len(self._waiting) > 1 and (self._kv.keeps_snapshots if head else free > 1):
            group = self._short_ones(started, free, min(policy.together, limit, self._budget))
            if self.frames:
                return None  # make room first
            if len(group) > 1:
                return self._prefill(group, limit)
        crowded = len(self._waiting.started()) >= MAX_PREFILLING
        full = (len(started) >= MAX_PREFILLING and not crowded) or free < 1
        for sequence in self._waiting:
            left = sequence.progress.prompt - sequence.progress.prefilled
            if not sequence.uid:
                long = crowded and left - self._kv.hit_length(sequence) > limit
                if self._kv.stays(sequence, started, full=full or long):
                    continue
                left -= self._kv.hit_length(sequence)
            if beside and min(left, limit) > self._budget:
                return None
            if not sequence.uid and not sequence.disk.fetch:
                if not self._kv.make_room([sequence]):
                    full = True  # later requests must not overtake this one
                    continue
                uid = self.last_uid + 1
                if not self.frames and (
                    fetch := self.disk.fetch(sequence, uid, self._kv.hit_length(sequence))
                ):
                    self.last_uid = uid
                    self.frames.append(fetch)
                if self.frames:
                    return None
            return self._prefill([sequence], limit)
        return None

    def _short_ones(self, started: Sequence[SequenceState], free: int, budget: int) -> list[SequenceState]:
        """Return prompts whose next parts fit into one forward, which ends all of them or none.

        At most `free` of them begin.
        """
        group: list[SequenceState] = []
        fresh: list[SequenceState] = []
        widest, longest, ends = 0, 0, False
        snapshots, most = self._kv.keeps_snapshots, min(MAX_COPIED, self._kv.kv_tokens // COPIED_SHARE)
        for sequence in self._waiting:
            if len(group) == MAX_PROMPTS:
                break
            if sequence.disk.fetch or (sequence.uid and not snapshots):
                continue
            prompt = sequence.progress.prompt
            at, end = self._kv.next_part(sequence)
            if group and (end == prompt) != ends:
                if sequence.uid:
                    continue
                break  # prompts begin in order
            left = (end if sequence.uid else prompt) - at  # a longer prompt begins alone
            wide, long = max(widest, left) * (len(group) + 1), max(longest, prompt)
            copied = 0 if self._policy.rolls_back and not snapshots else long * (len(group) + 1)
            scored = any(each.scores >= 0 for each in [*group, sequence])
            most_wide = min(budget, steps.SCORED) if scored else budget
            if wide > most_wide or wide * long > self._policy.scores or copied > most:
                break
            if not sequence.uid:
                if self._kv.is_being_computed(sequence, [*started, *group]):
                    continue
                if len(fresh) >= free or not self._kv.make_room([*fresh, sequence]):
                    break
                fresh.append(sequence)
            ends, widest, longest = end == prompt, max(widest, left), long
            group.append(sequence)
        return group

    def _prefill(self, group: Sequence[SequenceState], limit: int) -> Forward | None:
        """Return a forward over the next chunks of prompts: of one, or what `_short_ones` found."""
        chunks = [self._chunk(each, 0 if len(group) > 1 else limit) for each in group]
        if all(each.progress.prefilled == each.progress.prompt for each in group):
            for each in group:
                self._join(each)
            return self._forward(group, chunks)
        # Long prompts alternate, but a prompt that lacks only its last token is first.
        last = [each for each in group if each.progress.prompt - each.progress.prefilled == 1]
        self._waiting.extendleft(reversed(last))
        self._waiting.extend([each for each in group if each not in last])
        for sequence in group:
            self._kv.line_up(sequence)
            sequence.progress.forwards += 1
        afterwards: tuple[int, ...] = ()  # to evict
        if group[0].progress.prefilled in group[0].progress.saves:  # then all of several are at such places
            numbers = range(self.last_uid + 1, self.last_uid + 1 + len(group))
            saving = [replace(part, save=uid) for (_, part), uid in zip(chunks, numbers, strict=True)]
            self.last_uid = numbers[-1]
            parts, afterwards = self._kv.save(group, saving)
            chunks = [(offset, part) for (offset, _), part in zip(chunks, parts, strict=True)]
            for sequence, part in zip(group, parts, strict=True):
                if part.save and sequence.progress.prefilled == sequence.progress.saves[-1]:
                    self.disk.line_up(sequence, part.save, sequence.progress.prefilled)
        forward = self._forward(group, chunks)
        if not (self.frames or afterwards):
            return forward
        self.frames.append(forward)
        if afterwards:
            self.frames.append(Evict(afterwards))
        return None

    def _chunk(self, sequence: SequenceState, limit: int) -> tuple[int, PromptPart]:
        """Remove a sequence from the queue; return where its next chunk begins, and the chunk.

        `limit`: 0 for one of several. They may need the same cache, and their size is checked already.
        """
        source, take = 0, False
        if not sequence.uid:
            self.last_uid += 1
            sequence.uid = self.last_uid
            self._waiting.begun(sequence)
            source, take = self._kv.start_from(sequence, may_take=limit > 0)
        progress = sequence.progress
        offset = progress.prefilled
        limit = min(limit, steps.SCORED) if sequence.scores >= 0 else limit
        limit = steps.within(self._policy.scores, offset, limit) if limit else progress.prompt
        end = min([offset + limit, progress.prompt, *[at for at in progress.saves if at > offset]])
        self._budget -= end - offset
        progress.prefilled = end
        self._waiting.remove(sequence)
        following = sequence.tokens[end] if end < progress.prompt else 0
        scores = sequence.scores if end - offset > (end == progress.prompt) else -1
        wants = sequence.wants.sampling
        return offset, PromptPart(progress.prompt, source, take, wants, following=following, scores=scores)

    def _forward(self, group: Sequence[SequenceState], chunks: Sequence[tuple[int, PromptPart]]) -> Forward:
        offsets, first = tuple([offset for offset, _ in chunks]), group[0].progress
        spans = [each.tokens[at : each.progress.prefilled] for each, at in zip(group, offsets, strict=True)]
        forward = Forward(
            rows=tuple([sequence.uid for sequence in group]),
            positions=offsets,
            widths=tuple(map(len, spans)),
            tokens=tuple(chain.from_iterable(spans)),
            gathered=_gathered(self._policy.agreement, group),
            agreement=_agreement(self._policy.agreement, group),
            drafts=self.speculation.first(group) if first.prefilled == first.prompt else 0,
            prompts=tuple([part for _, part in chunks]),
        )
        ends = () if forward.unfinished else group
        rows = tuple([self._queue(sequence, (), ()) for sequence in ends])
        self.in_flight.append(QueuedForward(rows, tuple(group), len(forward.tokens)))
        return forward

    def _join(self, sequence: SequenceState) -> None:
        sequence.progress.position = sequence.progress.prompt
        self._running.append(sequence)
        self._kv.share(sequence)
        if self._policy.rolls_back and not self._kv.keeps_snapshots:
            self._kv.line_up(sequence)
        else:  # blocks that are not on disk yet must wait until the sequence ends
            sequence.disk.spilled = 0
        self.speculation.join(sequence)

    def _next_decode(self) -> Forward | None:
        must_wait, policy = self.speculation.must_wait, self._policy

        def may_step(row: SequenceState) -> bool:
            if policy.stages > 1 and row.in_flight > policy.run_ahead:
                return False
            return not row.in_flight or not (must_wait(row) or self._kv.must_wait(row))

        running = self._lanes.next(may_step)
        if not running:
            return None
        if not self._kv.make_room():
            self._preempt()
            return None
        if self.frames:
            return None  # make room first
        self._budget = self._chunks.beside
        feeds = self.speculation.feeds(running)
        widths: tuple[int, ...] = ()
        tokens: tuple[int, ...] = ()
        if any(feed is not None for feed in feeds):
            explicit = [
                () if feed is None else (sequence.tokens[-1], *feed[0], *feed[1])
                for sequence, feed in zip(running, feeds, strict=True)
            ]
            widths = tuple([len(fed) for fed in explicit])
            tokens = tuple([token for fed in explicit for token in fed])
        step = Forward(
            rows=tuple([sequence.uid for sequence in running]),
            positions=tuple([sequence.progress.position for sequence in running]),
            widths=widths,
            tokens=tokens,
            gathered=_gathered(self._policy.agreement, running),
            agreement=_agreement(self._policy.agreement, running),
            drafts=self.speculation.asked,
        )
        late = any(sequence.in_flight and sequence.guide is not None for sequence in running)
        rows = []
        for sequence, feed in zip(tuple(running), feeds, strict=True):
            drafts, forced = feed or ((), ())
            if not drafts:
                sequence.progress.position += 1 + len(forced)
            rows.append(self._queue(sequence, drafts, forced))
        self.in_flight.append(QueuedForward(tuple(rows), late=late))
        return step

    def _queue(self, sequence: SequenceState, drafts: tuple[int, ...], forced: tuple[int, ...]) -> FedRow:
        sequence.progress.forwards += 1
        sequence.in_flight += 1
        sequence.drafting = bool(drafts)
        sequence.drafts.fed += len(drafts)
        sequence.progress.fed_inside = not drafts
        sequence.scheduled += 1 + len(forced)
        if sequence.scheduled >= sequence.wants.max_tokens:
            self._stop(sequence, "length")
        return FedRow(sequence, drafts, forced)

    def record(
        self,
        tokens: tuple[int, ...],
        scores: Mapping[int, Sequence[steps.Score]] | None = None,
        took_s: float = 0.0,
        at_s: float = 0.0,
        proposed: Sequence[tuple[int, ...]] = (),
        *,
        prompts: Mapping[int, Sequence[steps.Score]] | None = None,
    ) -> list[steps.StepResult]:
        """Record the tokens of the oldest forward in flight; return the results for clients.

        `tokens`: in row order, as many as each row was fed; `scores`: by uid; `took_s`: seconds, 0 if
        unknown; `at_s`: when the tokens were known, by the same clock; `proposed`: the MTP head's, by row;
        `prompts`: scores of prompts' tokens, by uid.
        """
        outcomes, self._late = self._late, []
        at = given_tokens = live = 0
        forward = self.in_flight.popleft()
        rows = forward.rows
        for sequence in forward.reads:
            known = prompts.get(sequence.uid) if prompts else None
            if known and self._requests.get(sequence.request) is sequence:
                sequence.score(known, outcomes)
        for row, ahead in zip(rows, proposed or ((),) * len(rows), strict=bool(rows)):
            width = 1 + len(row.drafts) + len(row.forced)
            chosen = tokens[at : at + width]
            at += width
            sequence = row.sequence
            if self._requests.get(sequence.request) is not sequence:
                continue  # it ended while this forward was in flight
            sequence.in_flight -= 1
            given = scores.get(sequence.uid) if scores else None
            new = sequence.verify(row, chosen)
            sequence.drafts.proposed = ahead
            self.speculation.checked(row, len(new))
            given_tokens += len(new)
            live += 1
            try:
                drafted = len(new) - 1 if row.drafts else 0
                reason = sequence.extend(new, drafted, given, self._policy.eos, outcomes)
                if reason is not None:
                    self._finish(sequence, reason)
                    outcomes.append(sequence.end(reason))
                elif sequence.guide is not None:
                    self.speculation.force(sequence)
            except MlxtpError as error:
                outcomes.append(self._fail(sequence, error))
        if forward.tokens:
            self.speculation.prompted()
            if took_s and self._policy.timed:
                self._chunks.took(forward.tokens, took_s)
        else:
            self.speculation.record(rows, given_tokens, at_s, complete=live == len(rows))
        return outcomes

    def late(self) -> list[steps.StepResult]:
        outcomes, self._late = self._late, []
        return outcomes

    def _finish(self, sequence: SequenceState, reason: steps.StopReason) -> None:
        self._stop(sequence, reason)
        del self._requests[sequence.request]

    def _fail(self, sequence: SequenceState, error: MlxtpError) -> Error:
        self._finish(sequence, "error")
        return Error(error.code, error.detail, sequence.request)

    def _stop(self, sequence: SequenceState, reason: steps.StopReason) -> None:
        if sequence.stopped:
            return
        sequence.stopped = True
        held = sequence.progress.prefilled
        if sequence in self._running:
            _take_out(sequence, self._running)
            held = sequence.progress.position
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self.frames += self.disk.forget(sequence)
        if sequence.uid:
            self._kv.release(sequence, reason, held)

    def _preempt(self) -> None:
        """Preempt the sequence that loses least, the younger of equals. The oldest of several stays.

        Batch requests go before others, unless they were preempted already.
        """
        started = self._waiting.started()
        held = sorted([*self._running, *started], key=lambda each: (each.gives_way, each.request))
        oldest, *others = held
        taken = min(
            reversed(others), key=lambda each: (not each.gives_way, self._kv.lost(each)), default=oldest
        )
        if taken.in_flight:
            return  # wait for its tokens first
        if not self._kv.fits_alone(taken):
            self._late.append(self._fail(taken, _outgrown(taken, self._kv.kv_tokens)))
            return
        try:
            taken.drop_forced()
        except MlxtpError as error:
            self._late.append(self._fail(taken, error))
            return
        if taken in started:
            self._waiting.remove(taken)
        else:
            _take_out(taken, self._running)
        self._kv.release(taken, "preempt", 0)
        taken.start_again()
        self._waiting.put_back(taken)


def _outgrown(sequence: SequenceState, room: int) -> RequestError:
    prompt = len(sequence.tokens) - sequence.generated
    return RequestError(
        f"{prompt} prompt tokens and {sequence.generated} of {sequence.wants.max_tokens} new ones outgrow "
        f"the KV cache, which has become smaller; the rank with the least memory has room for {room}",
        Code.CONTEXT_OVERFLOW,
    )


def _take_out(sequence: SequenceState, running: list[SequenceState]) -> None:
    """Remove a row. The last row takes its place, as in every rank's `SequenceCaches`."""
    row = running.index(sequence)
    running[row] = running[-1]
    running.pop()


def _gathered(policy: str, rows: Sequence[SequenceState]) -> tuple[int, ...]:
    return tuple([row.uid for row in rows if row.gathered or policy == "broadcast"])


def _agreement(policy: str, rows: Sequence[SequenceState]) -> steps.Agreement:
    told = policy == "broadcast" or any(row.shaped for row in rows)
    unlike = policy == "broadcast-draws" and any(row.gathered for row in rows)
    return "broadcast" if told or unlike else "verify"
