"""Choice of the next forward, on rank 0 alone. Pure: no MLX, no clock, no I/O.

A sequence waits, prefills in chunks, runs, and stops. Each call of `next` returns one move; `record` takes
the tokens that a forward chose. With run-ahead, `next` is called before the previous forward's results are
known. Where a row's next move depends on them (drafts in flight), `next` returns None until they are. A
grammar's mask is not needed before the forward has its logits, so such a step is only `late`.

A request may run as several sequences, in succession. When the KV caches exceed their budget, the
youngest sequence is removed and later prefilled again, with its tokens so far. A request that an earlier
group left unfinished arrives with its tokens, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import Code, MlxtpError
from ..wire.messages import MAX_PROMPTS, MAX_WIDTH
from . import kv_cache
from .kv_cache import PrefixCache
from .speculation import Adaptive, Lookup, Payoff
from .steps import (
    MAX_CLIENTS,
    Agreement,
    Chunks,
    Decode,
    Drafter,
    EndReason,
    EvictKept,
    ExchangeKind,
    FairQueue,
    Move,
    Policy,
    Prefill,
    PrefillTogether,
    SampledToken,
    Score,
    SequenceEnd,
    SequenceFailed,
    SequenceParams,
    StepResult,
    StopReason,
    StopSequence,
)

#: Prompts that are partly computed at once. Long ones alternate, so that short ones need not wait.
MAX_PREFILLING = 4
#: Tokens that a prompt must share with one that is being computed, beyond a kept cache, to wait for it.
SHARED_BEGINNING = 32
LOOKED_UP = 32_768  # tokens of a prompt, from its end, that are searched for drafts
DRAFT_TOKENS = 16  # most tokens drafted for one row


@dataclass(slots=True, eq=False)
class _Sequence:
    request: int
    wants: SequenceParams
    tokens: list[int]  # prompt and answer, as far as the host knows it
    prompt: int  # tokens to prefill; after a preemption the answer so far is among them
    uid: int = 0  # its name in frames, assigned when it starts
    generated: int = 0  # tokens of the answer that are known
    #: Tokens of the answer for which forwards have been queued; drafts count when they are right.
    scheduled: int = 0
    prefilled: int = 0
    reused: int = 0  # tokens of the current prefill that a kept KV cache held
    position: int = 0  # length of its KV cache before its next step
    forwards: int = 0
    all_forwards: int = 0
    in_flight: int = 0  # forwards that will choose a token and have not been recorded
    drafting: bool = False
    fed_inside: bool = True  # the ranks hold its next input in their graphs
    #: Value of `PrefixCache.changes` at which `hit_length` of its prompt's tokens were found in a cache.
    asked_at: int = -1
    hit_length: int = 0
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    stopped: bool = False
    lookup: Lookup | None = None
    adaptive: Adaptive = field(default_factory=Adaptive)
    forced: tuple[int, ...] = ()
    known_at: int = 0  # tokens of the answer that must be known before its next step
    client: int = 0
    user: int = 0
    turn: int = 0  # its client's number in FairQueue; `user_turn` is its user's among those of the client
    user_turn: int = 0


@dataclass(frozen=True, slots=True)
class _Row:
    """Drafts or forced tokens that one row of a queued forward was fed besides the previous token."""

    sequence: _Sequence
    drafts: tuple[int, ...]
    forced: tuple[int, ...]


_Feed = tuple[tuple[int, ...], tuple[int, ...]]
_NOTHING: _Feed = ((), ())


DRAFTED_ROWS = 2  #: most rows for which a draft model proposes


class Scheduler:
    """State of every sequence from admission to its end."""

    def __init__(self, policy: Policy, prefixes: PrefixCache | None = None, last_uid: int = 0) -> None:
        #: Newest uid of a sequence. No uid is used again on the same links.
        self.last_uid = last_uid
        self._policy = policy
        self._prefixes = prefixes
        self._requests: dict[int, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        #: Rows of each forward in flight, and the tokens of a prompt's chunk; 0 for a decode step.
        self._queued: deque[tuple[tuple[_Row, ...], int]] = deque()
        self._payoff, self._forced_payoff = Payoff(), Payoff(MAX_WIDTH)
        self._moves: deque[StopSequence | EvictKept] = deque()
        self._late: list[StepResult] = []  # sent to clients with the next results
        #: Rows, rows with started prompts, and capacity that were last found to fit.
        self._fits: tuple[int, int, int] = (0, 0, 0)
        self._budget = policy.prefill_chunk
        self._chunks = Chunks(policy)
        self._turns = FairQueue()
        self._user_turns: dict[int, FairQueue] = {}  # by client, while one of its requests waits

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """Number of requests whose prefill is not complete."""
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """Positions that the KV caches occupy, as computed here."""
        return self._occupied()

    def add(
        self,
        request: int,
        tokens: tuple[int, ...],
        wants: SequenceParams,
        answered: int = 0,
        *,
        client: int = 0,
        user: int = 0,
    ) -> None:
        """Admit a request. FairQueue orders clients, and then the users of each client.

        The last `answered` of `tokens` are the beginning of its answer. Raises MlxtpError (CONTEXT_OVERFLOW)
        when it could not run even alone.
        """
        prompt = len(tokens) - answered
        needed = kv_cache.capacity(prompt + wants.max_tokens)
        if needed > self._policy.kv_tokens:
            raise MlxtpError(
                f"{prompt} prompt tokens and {wants.max_tokens} new ones take room for {needed} in the "
                f"KV cache; the rank with the least memory has room for {self._policy.kv_tokens}",
                Code.CONTEXT_OVERFLOW,
            )
        sequence = _Sequence(
            request, wants, list(tokens), len(tokens), generated=answered, scheduled=answered,
            client=client, user=user,
        )  # fmt: skip
        self._requests[request] = sequence
        self._line_up(sequence)

    def cancel(self, request: int) -> SequenceEnd | None:
        """End a request now; None when it has ended already."""
        sequence = self._requests.get(request)
        if sequence is None:
            return None
        self._stop(sequence, "cancel")
        return self._end(sequence, "cancel")

    def _line_up(self, sequence: _Sequence) -> None:
        waiting = [other for other in self._waiting if not other.uid]
        own = [other for other in waiting if other.client == sequence.client]
        sequence.turn = self._turns.following(sequence.client, [other.turn for other in own])
        if not own:
            self._user_turns.pop(sequence.client, None)
            while len(self._user_turns) >= MAX_CLIENTS:
                del self._user_turns[next(iter(self._user_turns))]
        users = self._user_turns.setdefault(sequence.client, FairQueue())
        same = (other.user_turn for other in own if other.user == sequence.user)
        sequence.user_turn = users.following(sequence.user, same)
        later = next((other for other in waiting if other.turn > sequence.turn), None)
        self._waiting.insert(len(self._waiting) if later is None else self._waiting.index(later), sequence)
        if any(other.user_turn > sequence.user_turn for other in own):
            self._give_turns([*own, sequence])

    def _give_turns(self, own: list[_Sequence]) -> None:
        """Assign the numbers and places of one client's waiting sequences to its users in order."""
        ids = {id(each) for each in own}
        places = [place for place, each in enumerate(self._waiting) if id(each) in ids]
        turns = sorted(each.turn for each in own)
        own.sort(key=lambda each: each.user_turn)
        for place, turn, each in zip(places, turns, own, strict=True):
            self._waiting[place] = each
            each.turn = turn

    # --- moves ---------------------------------------------------------------------------------------

    def next(self) -> Move | None:
        """Return the next move, or None when there is nothing to run before more results or requests arrive.

        Ended sequences leave first. Then prompts run, up to one chunk of tokens between two decode steps, so
        that a long prompt never delays the others by more than one chunk.
        """
        if self._moves:
            return self._moves.popleft()
        move: Move | None = self._next_prefill() if self._waiting else None
        if move is None and self._running and not self._moves:
            move = self._next_decode()
        if move is None and self._moves:
            return self._moves.popleft()  # room is made first
        return move

    def _next_prefill(self) -> Prefill | PrefillTogether | None:
        policy = self._policy
        beside = bool(self._running)
        if not beside:
            self._budget = policy.prefill_chunk
        limit = self._chunks.beside if beside else policy.prefill_chunk
        self._budget = min(self._budget, limit)
        started = [sequence for sequence in self._waiting if sequence.uid]
        free = policy.max_rows - len(self._running) - len(started)
        if policy.wide and free > 1 and len(self._waiting) > 1 and not self._waiting[0].uid:
            group = self._short_ones(
                started, min(free, MAX_PROMPTS), min(policy.together, limit, self._budget)
            )
            if self._moves:
                return None  # room is made first
            if len(group) > 1:
                return self._prefill_together(group)
        full = len(started) >= MAX_PREFILLING or free < 1
        for sequence in self._waiting:
            left = sequence.prompt - sequence.prefilled
            if not sequence.uid:
                if full or self._is_being_computed(sequence, started):
                    continue
                left -= self._hit_length(sequence)
            if beside and min(left, limit) > self._budget:
                return None
            if not sequence.uid:
                if not self._make_room([sequence]):
                    full = True  # later requests must not overtake it
                    continue
                if self._moves:
                    return None
            return self._prefill(sequence, limit)
        return None

    def _short_ones(self, started: Sequence[_Sequence], most: int, budget: int) -> list[_Sequence]:
        """Return waiting sequences, from the first on, whose prompts fit one forward of `budget` tokens."""
        group: list[_Sequence] = []
        widest = 0
        for sequence in self._waiting:
            if len(group) == most:
                break
            if sequence.uid:
                continue
            left = sequence.prompt - self._hit_length(sequence)
            if max(widest, left) * (len(group) + 1) > budget:
                break
            if self._is_being_computed(sequence, [*started, *group]):
                continue
            if not self._make_room([*group, sequence]):
                break
            widest = max(widest, left)
            group.append(sequence)
        return group

    def _hit_length(self, sequence: _Sequence) -> int:
        """Return the tokens of its prompt that a kept or running KV cache holds."""
        if self._prefixes is None:
            return 0
        if sequence.asked_at != self._prefixes.changes:
            sequence.asked_at = self._prefixes.changes
            hit = self._prefixes.find(sequence.tokens[: sequence.prompt])
            sequence.hit_length = 0 if hit is None else hit.length
        return sequence.hit_length

    def _is_being_computed(self, sequence: _Sequence, others: Sequence[_Sequence]) -> bool:
        """Return True if one of `others` will soon have more of this prompt's beginning than caches have.

        Soon means before both prompts could be computed alternately.
        """
        if self._prefixes is None or not others:
            return False
        beginning = sequence.tokens[: self._hit_length(sequence) + SHARED_BEGINNING]
        return len(beginning) < sequence.prompt and any(
            other.prompt - other.prefilled <= sequence.prompt + len(beginning)
            and other.tokens[: len(beginning)] == beginning
            for other in others
        )

    def _prefill(self, sequence: _Sequence, limit: int) -> Prefill:
        move = self._chunk(sequence, limit)
        if move.last:
            self._join(sequence)
            self._queued.append(((self._queue(sequence, (), ()),), len(move.tokens)))
            return move
        sequence.forwards += 1
        self._waiting.append(sequence)  # behind the others, because long prompts alternate
        self._queued.append(((), len(move.tokens)))
        return move

    def _prefill_together(self, group: Sequence[_Sequence]) -> PrefillTogether:
        prompts = tuple([self._chunk(sequence, sequence.prompt, may_take=False) for sequence in group])
        for sequence in group:
            self._join(sequence)
        rows = tuple([self._queue(sequence, (), ()) for sequence in group])
        self._queued.append((rows, sum([len(prompt.tokens) for prompt in prompts])))
        return PrefillTogether(prompts, _exchange(group), self._agreement(group))

    def _chunk(self, sequence: _Sequence, limit: int, *, may_take: bool = True) -> Prefill:
        """Return the next tokens of a prompt. The sequence no longer waits.

        Without `may_take`, it takes over no cache, because another sequence of the same forward may need it.
        """
        source, take = 0, False
        if not sequence.uid:
            self.last_uid += 1
            sequence.uid = self.last_uid
            self._turns.record(sequence.client, sequence.turn)
            if (users := self._user_turns.get(sequence.client)) is not None:
                users.record(sequence.user, sequence.user_turn)
            source, take = self._start_from(sequence, may_take=may_take)
        offset = sequence.prefilled
        tokens = tuple(sequence.tokens[offset : min(offset + limit, sequence.prompt)])
        self._budget -= len(tokens)
        sequence.prefilled += len(tokens)
        self._waiting.remove(sequence)
        return Prefill(
            sequence.uid,
            tokens,
            offset,
            sequence.prompt,
            source,
            take,
            sequence.wants.sampling,
            sequence.wants.exchange,
            self._agreement((sequence,)),
            sequence.request,
            sequence.reused,
        )

    def _join(self, sequence: _Sequence) -> None:
        """Add a sequence with a complete prompt as the last row of the batch."""
        sequence.position = sequence.prompt
        self._running.append(sequence)
        if self._prefixes is not None:
            self._prefixes.share(sequence.uid, sequence.tokens[: sequence.prompt])
        if sequence.lookup is None and self._may_ever_draft(sequence.wants):
            sequence.lookup = Lookup(sequence.tokens[-LOOKED_UP:])

    def _start_from(self, sequence: _Sequence, *, may_take: bool) -> tuple[int, bool]:
        """Find a KV cache that begins like this prompt.

        Returns its uid and True if it may be taken over; (0, False) for none.
        """
        if self._prefixes is None:
            return 0, False
        hit = self._prefixes.find(sequence.tokens[: sequence.prompt])
        if hit is None:
            return 0, False
        take = may_take and hit.whole
        if take:
            self._prefixes.take(hit.uid)
        else:
            self._prefixes.touch(hit.uid)
        sequence.prefilled = sequence.reused = hit.length
        if not sequence.generated:
            sequence.cached = hit.length
        return hit.uid, take

    def _next_decode(self) -> Decode | None:
        running = self._running
        if any(self._must_wait(sequence) for sequence in running):
            return None
        if not self._make_room():
            self._preempt()
            return None
        if self._moves:
            return None  # room is made first
        self._budget = self._chunks.beside
        feeds = [None if sequence.in_flight else self._feed(sequence) for sequence in running]
        widths: tuple[int, ...] = ()
        tokens: tuple[int, ...] = ()
        if any(feed is not None for feed in feeds):
            explicit = [
                () if feed is None else (sequence.tokens[-1], *feed[0], *feed[1])
                for sequence, feed in zip(running, feeds, strict=True)
            ]
            widths = tuple([len(fed) for fed in explicit])
            tokens = tuple([token for fed in explicit for token in fed])
        move = Decode(
            rows=tuple([sequence.uid for sequence in running]),
            positions=tuple([sequence.position for sequence in running]),
            widths=widths,
            tokens=tokens,
            exchange=_exchange(running),
            agreement=self._agreement(running),
            late=any(sequence.in_flight and sequence.wants.guide is not None for sequence in running),
        )
        rows = []
        for sequence, feed in zip(tuple(running), feeds, strict=True):
            drafts, forced = feed or _NOTHING
            if not drafts:
                sequence.position += 1 + len(forced)
            rows.append(self._queue(sequence, drafts, forced))
        self._queued.append((tuple(rows), 0))
        return move

    def _must_wait(self, sequence: _Sequence) -> bool:
        """Return True if this row's tokens must be known before its next step."""
        if not sequence.in_flight:
            return False
        if sequence.drafting or sequence.known_at > sequence.generated:
            return True
        if sequence.wants.guide is not None:
            # Forced tokens save more than run-ahead does, unless others would wait.
            return not self._policy.late or all(other.wants.guide is not None for other in self._running)
        if not self._may_draft(sequence):
            return False
        # With a likely continuation, waiting for the token in flight gains more than run-ahead.
        assert sequence.lookup is not None
        if self._drafter is None and not sequence.lookup.peek(1):
            return False
        sequence.known_at = sequence.generated + 1
        return True

    def _may_ever_draft(self, wants: SequenceParams) -> bool:
        return self._policy.wide and self._policy.drafts and not wants.shaped

    def _may_draft(self, sequence: _Sequence) -> bool:
        return sequence.lookup is not None and self._draft_limit(sequence) > 0

    def _draft_limit(self, sequence: _Sequence) -> int:
        share = min(self._share, DRAFT_TOKENS)
        room = sequence.wants.max_tokens - sequence.generated - 1
        matched = None if self._drafter or sequence.lookup is None else sequence.lookup.matched
        return self._payoff.limit(min(sequence.adaptive.limit(matched), share, room, MAX_WIDTH - 1))

    @property
    def _share(self) -> int:
        """Tokens that a row may be fed beside its own, because every row is padded to the widest one."""
        return self._policy.draft_room // max(len(self._running), 1) - 1

    def _feed(self, sequence: _Sequence) -> _Feed | None:
        """Return drafts and forced tokens of a row whose tokens are all known.

        Returns None for a row that feeds only the token in the graph.
        """
        forced = sequence.forced
        drafts = self._drafts(sequence) if self._may_draft(sequence) else ()
        return None if not drafts and not forced and sequence.fed_inside else (drafts, forced)

    def _drafts(self, sequence: _Sequence) -> tuple[int, ...]:
        assert sequence.lookup is not None
        limit = self._draft_limit(sequence)
        drafts = sequence.lookup.draft(limit)
        if not drafts and (drafter := self._drafter) is not None:
            drafts = drafter.propose(sequence.tokens, limit)
        return drafts

    @property
    def _drafter(self) -> Drafter | None:
        """Draft model, for few rows only, because proposing row by row soon takes longer than it saves."""
        return self._policy.drafter if len(self._running) <= DRAFTED_ROWS else None

    def _queue(self, sequence: _Sequence, drafts: tuple[int, ...], forced: tuple[int, ...]) -> _Row:
        """Record a queued forward that will choose tokens for a row."""
        sequence.forwards += 1
        sequence.in_flight += 1
        sequence.drafting = bool(drafts)
        sequence.drafted += len(drafts)
        sequence.fed_inside = not drafts
        sequence.scheduled += 1 + len(forced)
        if sequence.scheduled >= sequence.wants.max_tokens:
            self._stop(sequence, "length")
        return _Row(sequence, drafts, forced)

    def _agreement(self, rows: Sequence[_Sequence]) -> Agreement:
        policy = self._policy.agreement
        unlike = policy == "broadcast-draws" and _exchange(rows) == "logits"
        return (
            "broadcast" if policy == "broadcast" or unlike or any(s.wants.shaped for s in rows) else "verify"
        )

    # --- results -------------------------------------------------------------------------------------

    def record(
        self,
        tokens: tuple[int, ...],
        scores: Mapping[int, Sequence[Score]] | None = None,
        took_s: float = 0.0,
    ) -> list[StepResult]:
        """Take the choice of the oldest forward in flight; returns the results for clients.

        `tokens`: every row's in row order, as many as it was fed. `scores`: for each uid that wanted them.
        `took_s`: seconds, 0 where unknown.
        """
        outcomes, self._late = self._late, []
        at = given_tokens = live = 0
        rows, prefilled = self._queued.popleft()
        for row in rows:
            width = 1 + len(row.drafts) + len(row.forced)
            chosen = tokens[at : at + width]
            at += width
            sequence = row.sequence
            if self._requests.get(sequence.request) is not sequence:
                continue  # it ended while this forward was in flight
            sequence.in_flight -= 1
            given = scores.get(sequence.uid) if scores else None
            new = self._new_tokens(sequence, row, chosen)
            given_tokens += len(new)
            live += 1
            self._extend(sequence, new, len(new) - 1 if row.drafts else 0, given, outcomes)
        timed = took_s and self._policy.timed
        if timed and prefilled:
            self._chunks.took(prefilled, took_s)
        elif timed and live == len(rows):
            drafted, forced = max([len(row.drafts) for row in rows]), max([len(row.forced) for row in rows])
            if not forced:
                self._payoff.step(live, given_tokens, took_s, drafted=drafted)
            if not drafted:
                self._forced_payoff.step(live, given_tokens, took_s, drafted=forced)
        return outcomes

    def late(self) -> list[StepResult]:
        """Return outcomes of requests since the last results."""
        outcomes, self._late = self._late, []
        return outcomes

    def _new_tokens(self, sequence: _Sequence, row: _Row, chosen: tuple[int, ...]) -> tuple[int, ...]:
        if not row.drafts:
            sequence.adaptive.report(0, 0)
            return (*row.forced, chosen[-1])
        right = 0
        while right < len(row.drafts) and row.drafts[right] == chosen[right]:
            right += 1
        sequence.drafting = False
        sequence.fed_inside = right == len(row.drafts)
        sequence.position += 1 + right
        sequence.scheduled += right
        sequence.adaptive.report(len(row.drafts), right)
        return chosen[: right + 1]

    def _extend(
        self,
        sequence: _Sequence,
        new: tuple[int, ...],
        drafted: int,
        scores: Sequence[Score] | None,
        outcomes: list[StepResult],
    ) -> None:
        """Extend the answer by `new`, the first `drafted` of which were drafts."""
        wants = sequence.wants
        try:
            for i, token in enumerate(new):
                sequence.tokens.append(token)
                sequence.generated += 1
                sequence.accepted += i < drafted
                if token in self._policy.eos and not wants.ignore_eos:
                    outcomes.append(self._finish(sequence, _ended(wants)))
                    return
                if sequence.lookup is not None:
                    sequence.lookup.append(token)
                if wants.guide is not None:
                    wants.guide.accept(token)  # a token that it refuses never leaves
                score = scores[i] if scores is not None else None
                outcomes.append(SampledToken(sequence.request, sequence.generated - 1, token, score))
                if wants.guide is not None and wants.guide.finished:
                    outcomes.append(self._finish(sequence, _ended(wants)))
                    return
                if sequence.generated == wants.max_tokens:
                    outcomes.append(self._finish(sequence, "length"))
                    return
            if wants.guide is not None:
                most = min(wants.max_tokens - sequence.generated - 1, self._share, MAX_WIDTH - 1)
                wide = self._policy.wide and not wants.scored
                # A late step in flight has its input, and chooses the first of forced tokens itself.
                sequence.forced = wants.guide.forced(most if wide and not sequence.in_flight else 0)
                pays = self._forced_payoff.limit(len(sequence.forced))
                if pays < len(sequence.forced):
                    sequence.forced = wants.guide.forced(pays)
                foretold = wide and sequence.in_flight and self._forced_payoff.limit(2) > 1
                if foretold and wants.guide.foretells:
                    sequence.known_at = sequence.generated + 1
        except MlxtpError as error:
            outcomes.append(self._fail(sequence, error))

    # --- ends ----------------------------------------------------------------------------------------

    def _finish(self, sequence: _Sequence, reason: EndReason) -> SequenceEnd:
        self._stop(sequence, reason)
        return self._end(sequence, reason)

    def _fail(self, sequence: _Sequence, error: MlxtpError) -> SequenceFailed:
        self._stop(sequence, "error")
        self._forget(sequence)
        return SequenceFailed(sequence.request, error.code, error.detail)

    def _stop(self, sequence: _Sequence, reason: StopReason) -> None:
        """Queue no further forward for this sequence; results in flight still count."""
        if sequence.stopped:
            return
        sequence.stopped = True
        held = sequence.prefilled
        if sequence in self._running:
            self._take_out(sequence)
            held = min(sequence.position, len(sequence.tokens))
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.uid:
            self._leave(sequence, reason, held)

    def _take_out(self, sequence: _Sequence) -> None:
        """Remove a row from the batch; the last row takes its place, as in every rank's `Batch`."""
        row = self._running.index(sequence)
        self._running[row] = self._running[-1]
        self._running.pop()

    def _leave(self, sequence: _Sequence, reason: StopReason, held: int) -> None:
        """Queue its last frame, and keep or evict the first `held` tokens of its KV cache."""
        self._fits = (0, 0, 0)
        keep = 0
        evicted: tuple[int, ...] = ()
        if self._prefixes is not None:
            self._prefixes.unshare(sequence.uid)
            if reason != "preempt" and held:
                evicted = self._prefixes.keep(sequence.uid, sequence.tokens[:held])
                if (beyond := self._occupied() - self._policy.kv_tokens) > 0:
                    evicted += self._prefixes.evict(beyond)
                keep = 0 if sequence.uid in evicted else held
        self._moves.append(StopSequence(sequence.uid, reason, sequence.forwards, keep))
        if others := tuple([uid for uid in evicted if uid != sequence.uid]):
            self._moves.append(EvictKept(others))
        sequence.all_forwards += sequence.forwards

    def _end(self, sequence: _Sequence, reason: EndReason) -> SequenceEnd:
        self._forget(sequence)
        return SequenceEnd(
            sequence.request,
            reason,
            sequence.generated,
            sequence.all_forwards,
            sequence.cached,
            sequence.drafted,
            sequence.accepted,
        )

    def _forget(self, sequence: _Sequence) -> None:
        del self._requests[sequence.request]

    # --- room ----------------------------------------------------------------------------------------

    def _occupied(self, joining: Sequence[_Sequence] = ()) -> int:
        """Return the positions of all KV caches once the started prompts and `joining` run as well."""
        started = [sequence for sequence in self._waiting if sequence.uid]
        rows = [*self._running, *started, *joining]
        lengths = [max(sequence.position, sequence.prompt) + MAX_WIDTH for sequence in rows]
        # A prompt that is prefilled alone has its own cache until it runs, unless no other sequence does.
        apart = [*started, *joining] if len(joining) == 1 else started
        own = sum([kv_cache.capacity(sequence.prompt) for sequence in apart]) if len(rows) > 1 else 0
        kept = self._prefixes.positions if self._prefixes is not None else 0
        return kv_cache.batch_tokens(lengths) + own + kept

    def _make_room(self, joining: Sequence[_Sequence] = ()) -> bool:
        """Return True if all fit beside each other, after evicting kept caches where needed."""
        live = len(self._running) + sum([1 for sequence in self._waiting if sequence.uid])
        longest = max([max(s.position, s.prompt) for s in (*self._running, *joining)])
        shape = (len(self._running), live, kv_cache.capacity(longest + MAX_WIDTH))
        if not joining and shape == self._fits:
            return True
        beyond = self._occupied(joining) - self._policy.kv_tokens
        if beyond > 0 and self._prefixes is not None and (evicted := self._prefixes.evict(beyond)):
            self._moves.append(EvictKept(evicted))
            beyond = self._occupied(joining) - self._policy.kv_tokens
        if beyond > 0 and live + len(joining) > 1:
            return False  # a sequence alone fits: `add` checked it
        if not joining:
            self._fits = shape
        return True

    def _preempt(self) -> None:
        """Remove the youngest sequence; it will be prefilled again when there is room."""
        started = [sequence for sequence in self._waiting if sequence.uid]
        youngest = max([*self._running, *started], key=lambda sequence: sequence.request)
        if youngest.in_flight:
            return  # its tokens must be known first
        if not self._let_go_of_forced(youngest):
            return
        if youngest in started:
            self._waiting.remove(youngest)
        else:
            self._take_out(youngest)
        self._leave(youngest, "preempt", 0)
        youngest.uid = youngest.forwards = youngest.prefilled = youngest.reused = youngest.position = 0
        youngest.prompt = len(youngest.tokens)
        youngest.fed_inside = True
        self._waiting.appendleft(youngest)

    def _let_go_of_forced(self, sequence: _Sequence) -> bool:
        """Drop forced tokens, so that the next one follows the known ones. False when none can follow."""
        if sequence.forced and sequence.wants.guide is not None:
            sequence.forced = ()
            try:
                sequence.wants.guide.forced(0)
            except MlxtpError as error:
                self._late.append(self._fail(sequence, error))
                return False
        return True


def _ended(wants: SequenceParams) -> EndReason:
    """Return the reason of an answer that ended by itself, or under a guide that cut it."""
    return "length" if wants.guide is not None and wants.guide.cut else "stop"


def _exchange(rows: Sequence[_Sequence]) -> ExchangeKind:
    return "logits" if any(sequence.wants.exchange == "logits" for sequence in rows) else "winners"
