"""Drafts and forced tokens of the running rows: who proposes, and how many tokens a step is fed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..wire.messages import MAX_WIDTH
from .lookup import Lookup, Payoff
from .sequence import FedRow, SequenceState
from .steps import Drafter, Policy

LOOKED_UP = 32_768  # tokens of a prompt, from its end, that are searched for drafts
DRAFT_TOKENS = 16  # most tokens drafted for one row
DRAFTED_ROWS = 2  #: most rows for which a draft model proposes


class Speculation:
    """Drafts and forced tokens of the `running` rows, as many as measured steps have paid for."""

    def __init__(self, policy: Policy, running: Sequence[SequenceState]) -> None:
        self._policy = policy
        self._running = running
        self._payoff, self._forced_payoff = Payoff(), Payoff(MAX_WIDTH)

    def join(self, sequence: SequenceState) -> None:
        """Prepare for a row whose prompt is complete."""
        may_draft = self._policy.wide and self._policy.drafts and not sequence.shaped
        if may_draft and sequence.lookup is None:
            sequence.lookup = Lookup(sequence.tokens[-LOOKED_UP:])

    def must_wait(self, sequence: SequenceState) -> bool:
        """Return True if this row's tokens in flight must be known before its next step."""
        if sequence.drafting or sequence.known_at > sequence.generated:
            return True
        if sequence.wants.guide is not None:
            # Forced tokens save more than run-ahead does, unless others would wait.
            return not self._policy.late or all(other.wants.guide is not None for other in self._running)
        lookup = sequence.lookup
        if lookup is None or self._draft_limit(sequence, lookup) <= 0:
            return False
        # With a likely continuation, waiting for the token in flight gains more than run-ahead.
        sequence.known_at = sequence.generated + 1
        return True

    def feed(self, sequence: SequenceState) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return drafts and forced tokens of a row whose tokens are all known.

        Returns None for a row that feeds only the token in the graph.
        """
        forced, lookup = sequence.forced, sequence.lookup
        drafts: tuple[int, ...] = ()
        if lookup is not None and (limit := self._draft_limit(sequence, lookup)) > 0:
            drafts = lookup.draft(limit)
            if not drafts and (drafter := self._drafter) is not None:
                drafts = drafter.propose(sequence.tokens, limit)
        sequence.proposes = not drafts and lookup is not None
        if sequence.proposes:
            drafts = sequence.proposed[: self._bounded(sequence, self._policy.mtp)]
        return None if not drafts and not forced and sequence.fed_inside else (drafts, forced)

    def proposals(self, rows: Sequence[SequenceState]) -> int:
        """Return how many tokens the MTP head is to propose in the next step of these rows."""
        may = [row for row in rows if row.lookup is not None]
        return max([self._bounded(row, self._policy.mtp, 1) for row in may], default=0)

    def expect(self, rows: Sequence[SequenceState]) -> None:
        """Have rows wait for the proposals of the step that was queued for them."""
        for row in rows:
            if row.lookup is not None and not row.stopped:
                row.known_at = max(row.known_at, row.generated + row.in_flight)

    def force(self, sequence: SequenceState) -> None:
        """Choose the forced tokens of a row's next step. Raises MlxtpError when no token can come."""
        wants, guide = sequence.wants, sequence.wants.guide
        if guide is None:
            return
        most = min(wants.max_tokens - sequence.generated - 1, self._room(), MAX_WIDTH - 1)
        wide = self._policy.wide and not wants.scored
        # A late step in flight has its input, and chooses the first of forced tokens itself.
        sequence.forced = guide.forced(most if wide and not sequence.in_flight else 0)
        pays = self._forced_payoff.limit(len(sequence.forced))
        if pays < len(sequence.forced):
            sequence.forced = guide.forced(pays)
        foretold = wide and sequence.in_flight and self._forced_payoff.limit(2) > 1
        if foretold and guide.foretells:
            sequence.known_at = sequence.generated + 1

    def record(self, rows: Sequence[FedRow], tokens: int, took_s: float) -> None:
        """Record a step of these rows that gave `tokens` tokens in all."""
        drafted, forced = max([len(row.drafts) for row in rows]), max([len(row.forced) for row in rows])
        if not forced:
            self._payoff.step(len(rows), tokens, took_s, drafted=drafted)
        if not drafted:
            self._forced_payoff.step(len(rows), tokens, took_s, drafted=forced)

    def _draft_limit(self, sequence: SequenceState, lookup: Lookup) -> int:
        limit = sequence.adaptive.limit(lookup.matched if self._drafter is None else None)
        return self._bounded(sequence, min(limit, DRAFT_TOKENS))

    def _bounded(self, sequence: SequenceState, limit: int, ahead: int = 0) -> int:
        """Return the most drafts up to `limit` for a row's next step, or for the one `ahead` steps later."""
        left = sequence.wants.max_tokens - sequence.generated - 1 - ahead
        return self._payoff.limit(min(limit, self._room(), left, MAX_WIDTH - 1))

    def _room(self) -> int:
        """Return the tokens that a row may be fed beside its own, because all are padded to the widest."""
        return self._policy.draft_room // max(len(self._running), 1) - 1

    @property
    def _drafter(self) -> Drafter | None:
        """Draft model, for few rows only, because proposing row by row soon takes longer than it saves."""
        return self._policy.drafter if len(self._running) <= DRAFTED_ROWS else None
