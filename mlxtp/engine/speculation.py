"""Drafts and forced tokens of the running rows: who proposes, and how many tokens a step is fed. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..wire.messages import MAX_WIDTH, RESTS
from . import payoff
from .lookup import Lookup
from .sequence import FedRow, SequenceState
from .steps import Policy

HEAD: payoff.Source = ("mtp", 0)
LEAST_LEFT = 8  #: tokens that a row must have left; with fewer, as in a warm-up, an MTP head seems slow
LOOKED_UP = 32_768  # last tokens of a prompt to search for drafts

Feed = tuple[tuple[int, ...], tuple[int, ...]]  # drafts and forced tokens


@dataclass(frozen=True, slots=True)
class _Step:
    """`waited`: for drafts, even if all were refused. `asked`: drafts requested of the MTP head, or RESTS."""

    waited: bool
    proposed: bool = False
    asked: int = 0

    def kind(self, rows: int, width: int) -> payoff.StepKind:
        proposer: payoff.Proposer = "draft" if self.proposed else "mtp" if self.asked > 0 else "lookup"
        is_plain = not (width or self.waited or self.proposed or self.asked > 0)
        return payoff.StepKind(rows, 0 if is_plain else 1 + payoff.bucket(width), proposer)


class Speculation:
    """Drafts and forced tokens of the `running` rows, as many as pay off."""

    def __init__(self, policy: Policy, running: Sequence[SequenceState]) -> None:
        self.choice = payoff.DraftPolicy()  # of all rows; if times may not decide, each row has its own
        self.use = payoff.DraftUse()
        self._policy = policy
        self._running = running
        #: Source and number of drafts by request; valid until the next results.
        self._plans: dict[int, tuple[payoff.Source, int]] | None = None
        self._steps: deque[_Step] = deque()
        #: Kind and time of the last step, and whether another step was in flight then.
        self._last: tuple[payoff.StepKind, float, bool] | None = None

    def join(self, sequence: SequenceState) -> None:
        drafts = sequence.drafts
        self._plans, drafts.mtp_stale = None, False
        if self._policy.rolls_back and self._policy.drafts != "off" and drafts.lookup is None:
            drafts.lookup = Lookup(sequence.tokens[-LOOKED_UP:])
            drafts.choice = None if self._policy.timed else payoff.DraftPolicy()

    def must_wait(self, sequence: SequenceState) -> bool:
        if sequence.drafting or sequence.known_at > sequence.generated:
            return True
        if sequence.guide is not None and (
            not self._policy.late or all(other.guide is not None for other in self._running)
        ):
            return True  # forced tokens save more than run-ahead, unless rows without a grammar would wait
        if (planned := self._planned().get(sequence.request)) is None:
            return False
        # With a likely continuation, waiting for the token in flight gains more than run-ahead.
        sequence.known_at = sequence.generated + 1
        drafts = sequence.drafts
        drafts.awaited = planned[0]
        if drafts.lookup is not None and planned[0][0] == "lookup":
            drafts.expected = drafts.lookup.draft(1)
        return True

    def feeds(self, rows: Sequence[SequenceState]) -> list[Feed | None]:
        """Return each row's drafts and forced tokens; None if its only input is the token in the graph."""
        known = [row for row in rows if not row.in_flight]
        waited = [row for row in known if row.drafts.awaited is not None]
        for row in waited:
            self._arrived(row)
        plans = self._planned() if known else {}
        found: dict[int, tuple[int, ...]] = {}
        asked: dict[int, Sequence[int]] = {}
        most = of_head = 0
        for row in known:
            drafts = row.drafts
            if (planned := plans.get(row.request)) is None or drafts.lookup is None:
                continue
            (proposer, _), number = drafts.source, _ = planned
            if proposer == "lookup":
                found[row.request] = drafts.lookup.draft(number)
            elif proposer == "mtp":
                found[row.request] = drafts.proposed[:number]
                of_head = max(of_head, min(number, row.wants.max_tokens - row.generated - 2))
            elif not row.forced:
                asked[row.request], most = row.tokens, max(most, number)
        if asked and self._policy.drafter is not None:
            proposals = self._policy.drafter.propose(asked, most)
            found |= {request: proposed[: plans[request][1]] for request, proposed in proposals.items()}
        feeds = [None if row.in_flight else _feed(row, found.get(row.request, ())) for row in rows]
        tried = bool(waited) or any(row.drafts.refused for row in known)
        if self._policy.mtp and not of_head and self.choice.suspends(HEAD):
            of_head = RESTS
            for row in rows:
                row.drafts.mtp_stale = True
        self._steps.append(_Step(tried, bool(asked), of_head))
        return feeds

    @property
    def asked(self) -> int:
        return self._steps[-1].asked

    def first(self, rows: Sequence[SequenceState]) -> int:
        plans = self._planned()
        return int(any(row.request in plans and plans[row.request][0][0] == "mtp" for row in rows))

    def _arrived(self, row: SequenceState) -> None:
        drafts = row.drafts
        if drafts.expected and drafts.awaited is not None:
            right = int(row.tokens[-1] == drafts.expected[0])
            self._choice_of(row).checked(drafts.shares, drafts.awaited, 1, right)
        drafts.awaited, drafts.expected = None, ()

    def force(self, sequence: SequenceState) -> None:
        wants, guide = sequence.wants, sequence.guide
        if guide is None:
            return
        most = min(wants.max_tokens - sequence.generated - 1, self._room(), MAX_WIDTH - 1)
        wide = self._policy.rolls_back and wants.logprobs < 0
        # A late step in flight already has its input; it samples the first forced token itself.
        sequence.forced = guide.forced(most if wide and not sequence.in_flight else 0)
        pays = self.choice.forced(self._rows(), len(sequence.forced))
        if pays < len(sequence.forced):
            sequence.forced = guide.forced(pays)
        waits = wide and sequence.in_flight and self.choice.forced(self._rows(), 2) > 1
        if waits and guide.foretells:
            sequence.known_at = sequence.generated + 1

    def checked(self, row: FedRow, new: int) -> None:
        drafts, fed = row.sequence.drafts, len(row.drafts)
        choice = self._choice_of(row.sequence)
        if (fed or drafts.refused) and drafts.source is not None:
            choice.checked(drafts.shares, drafts.source, fed + drafts.refused, new - 1)
            self.use.checked(drafts.source[0], fed, new - 1)
        if choice is not self.choice:
            choice.step(_Step(drafts.refused).kind(1, fed), new)
        drafts.refused = False

    def record(self, rows: Sequence[FedRow], tokens: int, at_s: float, *, complete: bool) -> None:
        """Record a step. `at_s`: when its tokens were known, 0 without a clock. `complete`: no row ended."""
        step, last = self._steps.popleft(), self._last
        drafted, forced = max([len(row.drafts) for row in rows]), max([len(row.forced) for row in rows])
        width = max(drafted, forced)
        kind = step.kind(len(rows), width)
        self._plans, self._last = None, (kind, at_s, bool(self._steps)) if complete and at_s else None
        self.use.steps += 1
        self.use.widths += 1 + width
        if not complete or not self._policy.timed:
            return
        took_s = 0.0  # includes the host's work between the steps
        if self._last and last and last[0].rows == len(rows):
            took_s, plain = at_s - last[1], kind.fed == last[0].fed == 0
            if not forced:  # a slow plain step is no loss by drafts
                usual_s = self.choice.costs.plain_s(len(rows)) * tokens / len(rows)
                self.use.took(took_s, took_s if plain else usual_s)
            if not kind.fed and last[0].fed and self._policy.run_ahead:
                kind = payoff.StepKind(len(rows), 1)  # after drafts, the first plain step does not run ahead
            elif plain and self._last[2] != last[2]:
                took_s = 0.0  # run-ahead began or ended, so the time between the two results says nothing
        self.choice.step(kind, tokens, took_s, paid=not forced)

    def prompted(self) -> None:
        self._plans = self._last = None

    def _planned(self) -> Mapping[int, tuple[payoff.Source, int]]:
        if self._plans is not None:
            return self._plans
        self._plans = {}
        longest = max([row.progress.position for row in self._running], default=0)
        self.choice.costs.context = (longest // payoff.SHORT).bit_length()
        if (room := self._room()) < 1:
            return self._plans
        options = [self._options(row) for row in self._running]
        if self._policy.timed:
            found = self.choice.plan(options, self._rows(), room)
        else:
            alone = zip(self._running, options, strict=True)
            plans_alone = [self._choice_of(row).plan([each], 1, room) for row, each in alone]
            found = tuple([each[0] if each else None for each in plans_alone])
        plans = {row.request: each for row, each in zip(self._running, found, strict=False) if each}
        if max([number for _, number in plans.values()], default=0) in self._policy.unfused:
            most = self._policy.unfused.start - 1
            plans = {request: (source, min(number, most)) for request, (source, number) in plans.items()}
        self._plans = plans
        return plans

    def _options(self, row: SequenceState) -> payoff.RowOptions:
        limit = min(row.wants.max_tokens - row.generated - 1, MAX_WIDTH - 1)
        sources: dict[payoff.Source, int] = {}
        if (lookup := row.drafts.lookup) is not None and limit > 0:
            mode = self._policy.drafts
            if lookup.matched and mode in ("auto", "lookup"):
                sources[payoff.source_of_match(lookup.matched)] = limit
            has_head = self._policy.mtp and not row.drafts.mtp_stale
            if has_head and mode in ("auto", "mtp") and limit >= LEAST_LEFT:
                sources[HEAD] = min(limit, self._policy.mtp)
            if self._policy.drafter is not None and mode in ("auto", "draft"):
                sources["draft", 0] = limit
        if row.guide is not None:
            most = row.guide.draftable
            sources = {source: min(limit, most) for source, limit in sources.items() if most}
        return sources, row.drafts.shares

    def _choice_of(self, row: SequenceState) -> payoff.DraftPolicy:
        return row.drafts.choice or self.choice

    def _rows(self) -> int:
        running = max(len(self._running), 1)
        return -(-running // min(self._policy.stages, running))

    def _room(self) -> int:
        """Return how many more tokens each row may be fed; all rows are padded to the widest."""
        return self._policy.draft_room // self._rows() - 1


def _feed(row: SequenceState, drafts: tuple[int, ...]) -> Feed | None:
    guide, proposed = row.guide, len(drafts)
    if row.forced:
        drafts = ()
    elif drafts and guide is not None:
        drafts = guide.allowed(drafts)
        row.drafts.refused = len(drafts) < proposed
    return None if not drafts and not row.forced and row.progress.fed_inside else (drafts, row.forced)
