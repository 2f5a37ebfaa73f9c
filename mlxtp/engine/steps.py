"""What the scheduler takes and gives, as plain data: moves for the ranks, outcomes, wants, policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..errors import Code
from ..wire.messages import GREEDY, PLAIN, Sampling, Shaping

EndReason = Literal["stop", "length", "cancel"]
StopReason = Literal["stop", "length", "cancel", "preempt", "error"]
Agreement = Literal["verify", "broadcast"]
ExchangeKind = Literal["winners", "logits"]


@dataclass(frozen=True, slots=True)
class Prefill:
    """One forward over the prompt's tokens from `offset` on, behind the KV cache of `source` if not 0.

    The prefill of this prompt began behind `cached` tokens.
    """

    uid: int
    tokens: tuple[int, ...]
    offset: int
    total: int
    source: int = 0
    take: bool = False
    sampling: Sampling = GREEDY
    exchange: ExchangeKind = "winners"
    agreement: Agreement = "verify"
    request: int = 0
    cached: int = 0

    @property
    def last(self) -> bool:
        """Whether this chunk ends the prompt, and so gives the first new token."""
        return self.offset + len(self.tokens) == self.total


@dataclass(frozen=True, slots=True)
class PrefillTogether:
    """One forward over what is left of several short prompts. Each of `prompts` is a last chunk."""

    prompts: tuple[Prefill, ...]
    exchange: ExchangeKind = "winners"
    agreement: Agreement = "verify"


@dataclass(frozen=True, slots=True)
class Decode:
    """One forward over the running batch; fields as in `StepToken`.

    `late`: rank 0 chooses once the tokens of the forward before are known, because a grammar needs them.
    """

    rows: tuple[int, ...]
    positions: tuple[int, ...]
    widths: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    exchange: ExchangeKind = "winners"
    agreement: Agreement = "verify"
    late: bool = False


@dataclass(frozen=True, slots=True)
class StopSequence:
    """A sequence leaves after `forwards` forwards; the first `keep` tokens of its KV cache stay."""

    uid: int
    reason: StopReason
    forwards: int
    keep: int = 0


@dataclass(frozen=True, slots=True)
class EvictKept:
    """KV caches that were kept are given up."""

    uids: tuple[int, ...]


Move = Prefill | PrefillTogether | Decode | StopSequence | EvictKept

Score = tuple[float, tuple[tuple[int, float], ...]]
"""Log-probability of a chosen token, and its most probable alternatives with theirs."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token for the client: the `index`-th (from 0) of request `uid`."""

    uid: int
    index: int
    token: int
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """The last word about a request. `generated` counts the end token too."""

    uid: int
    reason: EndReason
    generated: int
    forwards: int
    cached: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """A request ends with an error of its own; the group goes on."""

    uid: int
    code: Code
    detail: str


StepResult = SampledToken | SequenceEnd | SequenceFailed


class Guide(Protocol):
    """What a grammar says about one request's tokens."""

    @property
    def finished(self) -> bool:
        """Nothing but an end token may follow."""
        ...

    @property
    def cut(self) -> bool:
        """The text was cut short so that it could be completed."""
        ...

    @property
    def foretells(self) -> bool:
        """True where several tokens can only follow, so that one forward could be fed all of them."""
        ...

    def accept(self, token: int) -> None:
        """The next token. Raises MlxtpError when there is no way on."""
        ...

    def forced(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that can only follow now; not accepted yet.

        Whoever chooses the token after them needs what is prepared here. Raises MlxtpError when no token can
        come.
        """
        ...


class Drafter(Protocol):
    """Proposes tokens where looking them up found none."""

    def propose(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """How one request's tokens are to be chosen."""

    max_tokens: int
    sampling: Sampling = GREEDY
    shaping: Shaping = PLAIN
    scored: bool = False
    ignore_eos: bool = False
    guide: Guide | None = None

    @property
    def shaped(self) -> bool:
        """Whether only rank 0 can choose."""
        return self.guide is not None or self.shaping != PLAIN

    @property
    def exchange(self) -> ExchangeKind:
        greedy = self.sampling.temperature == 0
        return "winners" if greedy and not self.shaped and not self.scored else "logits"


@dataclass(frozen=True, slots=True)
class Policy:
    """What a scheduler goes by.

    `prefill_chunk`: most prompt tokens in one forward. `chunk_beside`: the same while others decode, and
    between two of their steps; where `chunk_s` is not 0 and their time is known, as many as take so many
    seconds. `max_rows`: most sequences in the running batch. `together`: most
    tokens of a forward over several prompts. `kv_tokens`: what the KV caches of one rank hold, in tokens; the
    smallest of all ranks. `wide`: whether rows may be fed several tokens at once. `drafts`: whether these may
    be guesses, `draft_room`: the most tokens of such a step, all rows padded to the widest. `late`: whether
    a row with a grammar runs ahead beside others. `timed`: whether how long steps took may decide what is
    computed.
    """

    eos: frozenset[int]
    prefill_chunk: int = 2048
    chunk_beside: int = 256
    chunk_s: float = 0.0
    max_rows: int = 64
    together: int = 512
    kv_tokens: int = 1 << 40
    wide: bool = True
    drafts: bool = True
    draft_room: int = 64
    late: bool = True
    timed: bool = True
    agreement: Literal["auto", "broadcast", "broadcast-draws", "verify"] = "auto"
    drafter: Drafter | None = None
