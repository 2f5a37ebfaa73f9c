"""Sequences, and the queue for prefill, which is fair to clients and users. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from ..admission_counter import MAX_CLIENTS, FairQueue
from ..wire.messages import PLAIN, Finished, Generate, PrefixDigests
from .lookup import Lookup
from .payoff import DraftPolicy, Shares, Source
from .steps import EndReason, Guide, SampledToken, Score, StepResult


@dataclass(slots=True, eq=False, repr=False)
class BlockFetch:
    """Blocks of a prompt that all ranks read from disk, until the sequence starts from them."""

    uid: int  # of the cache that the blocks form
    block: int  # tokens of a block
    wanted: int
    sequence: SequenceState | None  # None once it no longer waits
    blocks: int  # blocks that every rank with a reply has
    silent: set[int]  # ranks that have not replied
    until: float = inf  # when they are late
    #: "late": given up; the disk hangs until the last rank replies. "held": every rank has the cache.
    phase: Literal["reading", "late", "held"] = "reading"


@dataclass(slots=True)
class DiskState:
    digests: PrefixDigests | None = None  # computed when first needed
    spilled: int = 0  # tokens in blocks that are on disk or queued for it
    asked: bool = False
    fetch: BlockFetch | None = None

    @property
    def fetched(self) -> int:
        fetch = self.fetch
        return fetch.blocks * fetch.block if fetch is not None and fetch.phase == "held" else 0


@dataclass(slots=True)
class ProgressState:
    prompt: int = 0  # tokens to prefill; after a preemption they include the answer so far
    prefilled: int = 0
    reused: int = 0  # prefill tokens taken from a kept KV cache
    saves: tuple[int, ...] = ()  # lengths where a copy of its KV cache is kept
    position: int = 0  # length of its KV cache before its next step
    scored: int = 1  # tokens of the prompt with known scores; the first has none
    told: int = 1  # the same of the client, also before a preemption
    room: int = 0  # capacity of its row's arrays in tokens; 0 while its KV cache is its own
    lane: int = 0  # rows of one lane step together
    forwards: int = 0
    fed_inside: bool = True  # the ranks hold its next input in their graphs
    #: Value of `PrefixCache.changes` when `hit_length` was looked up.
    asked_at: int = -1
    hit_length: int = 0


@dataclass(slots=True)
class DraftState:
    lookup: Lookup | None = None  # None: no drafts
    proposed: tuple[int, ...] = ()  # by the MTP head, after the known tokens
    mtp_stale: bool = False  # the MTP head's cache lacks entries
    shares: dict[Source, Shares] = field(default_factory=dict)  # acceptance rates of its drafts
    choice: DraftPolicy | None = None  # its own policy; None: the one of all rows
    source: Source | None = None  # of its last drafts
    refused: bool = False  # its grammar rejected some of its drafts
    awaited: Source | None = None  # the next step waits to draft from this source
    expected: tuple[int, ...] = ()  # the lookup's guess of the token in flight
    fed: int = 0
    accepted: int = 0


#: Lines of waiting sequences. The first is for a batch request that others have overtaken often enough.
NEXT, INTERACTIVE, BATCH = range(3)
MOST_OVERTAKING = 8  #: interactive requests that begin in a row while a batch request waits


@dataclass(slots=True)
class QueueState:
    line: int
    turn: int = 0  # number in the FairQueue of clients
    user_turn: int = 0  # number in the client's FairQueue of users


@dataclass(slots=True, eq=False, repr=False)
class SequenceState:
    wants: Generate
    guide: Guide | None = None
    tokens: list[int] = field(default_factory=list)  # prompt, and the answer as far as it is known
    uid: int = 0  # its name in frames, assigned when it starts
    progress: ProgressState = field(default_factory=ProgressState)
    drafts: DraftState = field(default_factory=DraftState)
    disk: DiskState = field(default_factory=DiskState)
    generated: int = 0  # known tokens of the answer
    scheduled: int = 0  # tokens of the answer with a queued forward; drafts count once they are accepted
    in_flight: int = 0  # forwards that choose a token and whose result is not recorded yet
    drafting: bool = False
    forced: tuple[int, ...] = ()
    known_at: int = 0  # tokens of the answer that must be known before its next step
    stopped: bool = False
    cached: int = 0
    all_forwards: int = 0
    preempted: bool = False
    place: QueueState = field(init=False)
    shaped: bool = field(init=False)  # only rank 0 can choose its tokens
    gathered: bool = field(init=False)  # a choice of its tokens needs all logits

    def __post_init__(self) -> None:
        wants = self.wants
        self.place = QueueState(BATCH if wants.batch else INTERACTIVE)
        self.tokens.extend(wants.tokens)
        self.progress.prompt = len(wants.tokens)
        self.generated = self.scheduled = wants.answered
        self.shaped = self.guide is not None or wants.shaping != PLAIN
        self.gathered = self.shaped or wants.sampling.temperature != 0 or wants.logprobs >= 0

    @property
    def request(self) -> int:
        return self.wants.uid

    @property
    def order(self) -> tuple[int, int, int]:
        return self.place.line, self.place.turn, self.request

    @property
    def scores(self) -> int:
        """Alternatives of each score that the client still lacks of its prompt; -1: it lacks none."""
        return self.wants.prompt_logprobs if self.progress.told < len(self.wants.tokens) else -1

    @property
    def reusable(self) -> list[int]:
        """The tokens that a kept KV cache may begin with: none if they must be scored."""
        return self.tokens[: self.progress.prompt] if self.scores < 0 else []

    @property
    def gives_way(self) -> bool:
        return self.wants.batch and not self.preempted

    @property
    def longest(self) -> int:
        return len(self.tokens) - self.generated + self.wants.max_tokens

    def verify(self, fed: FedRow, chosen: tuple[int, ...]) -> tuple[int, ...]:
        drafts = fed.drafts
        if not drafts:
            return (*fed.forced, chosen[-1])
        right = 0
        while right < len(drafts) and drafts[right] == chosen[right]:
            right += 1
        self.drafting = False
        self.progress.fed_inside = right == len(drafts)
        self.progress.position += 1 + right
        self.scheduled += right
        return chosen[: right + 1]

    def score(self, scores: Sequence[Score], outcomes: list[StepResult]) -> None:
        """Take the next scores of the prompt. After a preemption, the client has some already."""
        progress = self.progress
        for index, score in enumerate(scores, progress.scored):
            if index >= progress.told:
                outcomes.append(SampledToken(self.request, index, self.tokens[index], score, prompt=True))
        progress.scored += len(scores)
        progress.told = max(progress.told, progress.scored)

    def extend(
        self,
        new: tuple[int, ...],
        drafted: int,
        scores: Sequence[Score] | None,
        eos: frozenset[int],
        outcomes: list[StepResult],
    ) -> EndReason | None:
        """Extend the answer; `drafted` of `new` were drafts. Returns why it ends. Raises MlxtpError."""
        wants, guide, lookup = self.wants, self.guide, self.drafts.lookup
        for i, token in enumerate(new):
            self.tokens.append(token)
            self.generated += 1
            self.drafts.accepted += i < drafted
            if (token in eos and not wants.ignore_eos) or token in wants.stop_tokens:
                return self._ended()
            if lookup is not None:
                lookup.append(token)
            if guide is not None:
                guide.accept(token)  # raises for a refused token, so clients never get one
            score = scores[i] if scores is not None else None
            outcomes.append(SampledToken(self.request, self.generated - 1, token, score))
            if guide is not None and guide.finished:
                return self._ended()
            if self.generated == wants.max_tokens:
                return "length"
        return None

    def _ended(self) -> EndReason:
        return "length" if self.guide is not None and self.guide.cut else "stop"

    def drop_forced(self) -> None:
        if self.forced and self.guide is not None:
            self.forced = ()
            self.guide.forced(0)

    def start_again(self) -> None:
        self.progress = ProgressState(len(self.tokens), told=self.progress.told)
        self.uid, self.preempted = 0, True
        self.disk.asked, self.disk.spilled = False, 0

    def end(self, reason: EndReason) -> Finished:
        fed, right = self.drafts.fed, self.drafts.accepted
        forwards, last = self.all_forwards, -1
        if reason == "stop" and not (self.guide is not None and self.guide.finished):
            last = self.tokens[-1]  # an end or stop token
        return Finished(self.request, reason, self.generated, forwards, self.cached, fed, right, last)


class Lanes:
    """Lanes of `running` rows, one for each stage of a pipeline: while one lane waits, others step."""

    def __init__(self, running: Sequence[SequenceState], count: int) -> None:
        self._running = running
        self._count = count
        self._last = 0  # lane of the last step

    def next(self, may_step: Callable[[SequenceState], bool]) -> list[SequenceState]:
        if self._count > 1:
            self._balance()
        for lane in range(self._last + 1, self._last + 1 + self._count):
            rows = [row for row in self._running if row.progress.lane == lane % self._count]
            if rows and all(map(may_step, rows)):
                self._last = lane % self._count
                return rows
        return []

    def _balance(self) -> None:
        """Even out the lanes. Move rows without a step in flight first: the new lane would wait for one."""
        members: list[list[SequenceState]] = [[] for _ in range(self._count)]
        for sequence in self._running:
            members[sequence.progress.lane].append(sequence)
        while len(longest := max(members, key=len)) - len(shortest := min(members, key=len)) > 1:
            moved = min(reversed(longest), key=lambda sequence: sequence.in_flight)
            longest.remove(moved)
            shortest.append(moved)
            moved.progress.lane, moved.progress.room = members.index(shortest), 0


@dataclass(frozen=True, slots=True)
class FedRow:
    sequence: SequenceState
    drafts: tuple[int, ...]
    forced: tuple[int, ...]


# --- the queue -------------------------------------------------------------------------------------------


class WaitingQueue(deque[SequenceState]):
    """Sequences whose prefill is not complete. In a line, FairQueue orders clients and then their users."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = FairQueue(), FairQueue()  # of interactive requests, and of batch ones
        #: By client and `Generate.batch`, while such a request waits.
        self._user_turns: dict[tuple[int, bool], FairQueue] = {}
        self._overtaking = 0  # interactive requests that began since a batch request waits, or began

    def started(self) -> list[SequenceState]:
        return [sequence for sequence in self if sequence.uid]

    def holding(self) -> list[SequenceState]:
        return [sequence for sequence in self if sequence.uid or sequence.disk.fetch]

    def line_up(self, sequence: SequenceState) -> None:
        wants, whose = sequence.wants, (sequence.wants.client, sequence.wants.batch)
        waiting = [other for other in self if not other.uid and other.place.line == sequence.place.line]
        own = [other for other in waiting if other.wants.client == wants.client]
        sequence.place.turn = self._turns[wants.batch].following(
            wants.client, [other.place.turn for other in own]
        )
        if not own:
            self._user_turns.pop(whose, None)
            while len(self._user_turns) >= MAX_CLIENTS:
                del self._user_turns[next(iter(self._user_turns))]
        users = self._user_turns.setdefault(whose, FairQueue())
        same = (other.place.user_turn for other in own if other.wants.user == wants.user)
        sequence.place.user_turn = users.following(wants.user, same)
        self._insert(sequence)
        if any(other.place.user_turn > sequence.place.user_turn for other in own):
            self._give_turns([*own, sequence])

    def put_back(self, sequence: SequenceState) -> None:
        """Line up a preempted sequence by age, before all of its class that were not preempted."""
        sequence.place = QueueState(BATCH if sequence.wants.batch else INTERACTIVE, -1, -1)
        self._insert(sequence)

    def _insert(self, sequence: SequenceState) -> None:
        later = (at for at, other in enumerate(self) if not other.uid and other.order > sequence.order)
        self.insert(next(later, len(self)), sequence)

    def _give_turns(self, own: list[SequenceState]) -> None:
        ids = {id(each) for each in own}
        places = [place for place, each in enumerate(self) if id(each) in ids]
        turns = sorted(each.place.turn for each in own)
        own.sort(key=lambda each: each.place.user_turn)
        for place, turn, each in zip(places, turns, own, strict=True):
            self[place] = each
            each.place.turn = turn

    def begun(self, sequence: SequenceState) -> None:
        wants = sequence.wants
        self._turns[wants.batch].record(wants.client, sequence.place.turn)
        if (users := self._user_turns.get((wants.client, wants.batch))) is not None:
            users.record(wants.user, sequence.place.user_turn)
        first = next((other for other in self if not other.uid and other.place.line == BATCH), None)
        self._overtaking = 0 if first is None or wants.batch else self._overtaking + 1
        if first is not None and self._overtaking == MOST_OVERTAKING:
            self._overtaking, first.place.line = 0, NEXT
            self.remove(first)
            self._insert(first)
