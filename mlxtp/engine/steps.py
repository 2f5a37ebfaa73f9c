"""Plain data of the scheduler: results, policy; and the sizes of chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..chunks import BESIDE, USUAL, chunk_of
from ..wire.messages import Arrange, Error, Evict, FetchBlocks, Finished, Forward, Restore, SessionStop, Spill

EndReason = Literal["stop", "length", "cancel"]
StopReason = Literal["stop", "length", "cancel", "preempt", "error"]
Agreement = Literal["verify", "broadcast"]
ExchangeKind = Literal["winners", "logits"]
DraftKind = Literal["auto", "off", "lookup", "mtp", "draft"]

#: Frames that change sequences or KV caches and run no forward.
CacheFrame = SessionStop | Evict | Arrange | Spill | FetchBlocks | Restore
#: Frames on decode links by which a scheduler drives all ranks.
DecodeFrame = Forward | CacheFrame

#: Log-probability of a chosen token, and its most probable alternatives with theirs.
Score = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Token for the client: the `index`-th (from 0) of request `uid`."""

    uid: int
    index: int
    token: int
    score: Score | None = None


#: A token, or the last result of a request; the group goes on.
StepResult = SampledToken | Finished | Error


#: Proposed tokens, by the uid of a request.
Drafts = dict[int, tuple[int, ...]]


class Guide(Protocol):
    """Constraint of a grammar on one request's tokens."""

    @property
    def finished(self) -> bool: ...  # only an end token may follow

    @property
    def cut(self) -> bool: ...  # the text was cut short so that it could be completed

    @property
    def foretells(self) -> bool: ...  # one forward can be fed the next few tokens, without alternative

    @property
    def draftable(self) -> int: ...  # tokens that may be drafted, as the text need not be complete soon

    def accept(self, token: int) -> None: ...  # raises MlxtpError when the grammar has no continuation

    def forced(self, limit: int) -> tuple[int, ...]:
        """At most `limit` next tokens without alternative, not accepted. Raises MlxtpError for none."""

    def allowed(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """Return the first of `drafts` that may come, where no token is forced, with masks as `forced`.

        They end before one after which the choice could differ from that of a step for each token.
        """


class Drafter(Protocol):
    def propose(self, rows: Mapping[int, Sequence[int]], limit: int) -> Drafts: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits and choices of a scheduler. Sizes are tokens."""

    eos: frozenset[int]
    prefill_chunk: int = 2048  # most of a prompt in one forward
    chunk_beside: int = 256  # the same while others decode, and between two of their steps
    chunk_s: float = 0.0  # if not 0, seconds of such a chunk, once chunks have been timed
    max_rows: int = 64  # most sequences in the running batch
    together: int = 512  # most of a forward over several prompts
    kv_tokens: int = 1 << 40  # room of the KV caches, on the rank with the least
    row_tokens: int = 0  # the part of each sequence's cache that does not grow with it
    forward_tokens: int = 1 << 40  # cached ones whose reading takes as long as another forward of a step
    rolls_back: bool = True  # caches do, so that rows may be fed several tokens at once
    drafts: DraftKind = "auto"  # source of such tokens
    draft_room: int = 64  # most of such a step, all rows padded to the widest
    late: bool = True  # a row with a grammar runs ahead beside others
    timed: bool = True  # measured times may influence the frames
    agreement: Literal["auto", "broadcast", "broadcast-draws", "verify"] = "auto"
    drafter: Drafter | None = None
    stages: int = 1  # of a pipeline
    run_ahead: int = 1  # most steps of a row that are queued there before the tokens of the one before
    mtp: int = 0  # most that the model's MTP head proposes in a step; 0 without a head
    unfused: range = range(0)  # lengths of drafts to avoid, for which attention has no kernel
    scores: int = 1 << 62  # most of a chunk times those of its context, because of attention's memory


# --- sizes of a prompt's chunks: large alone, about a quarter of a second's work beside decoding rows ----
LEAST, MOST = 64, 2048  #: tokens of a chunk beside others; times of smaller ones do not count
ON_CPU = 512  #: the same without a GPU, where attention over a larger chunk costs more than it saves
TARGET_S = 0.25  #: seconds that such a chunk may take
NEWEST = 0.5  #: weight of the newest chunk in the average


def chunk_sizes(wanted: int, *, gpu: bool, stages: int = 1) -> tuple[int, int, float]:
    """Return `prefill_chunk`, `chunk_beside`, `chunk_s` of a Policy. Above USUAL pauses do not matter."""
    if wanted > USUAL:
        return wanted, wanted, 0.0
    alone = chunk_of(wanted if gpu else min(wanted, ON_CPU), stages, BESIDE if gpu else LEAST)
    return alone, min(alone, BESIDE), TARGET_S


def within(scores: int, offset: int, limit: int) -> int:
    """Return as many of `limit` as keep the chunk's tokens times its context's within `scores`, or LEAST."""
    while limit > LEAST and limit * (offset + limit) > scores:
        limit = 1 << (limit - 1).bit_length() - 1
    return limit


class Chunks:
    """Choice of the size of chunks beside decoding rows, from the times of earlier ones: a power of two."""

    def __init__(self, policy: Policy) -> None:
        self._most = policy.prefill_chunk
        self._target_s = policy.chunk_s
        self._token_s = 0.0
        self.beside = min(policy.chunk_beside, self._most)  #: most tokens

    def took(self, tokens: int, seconds: float) -> None:
        if not self._target_s or tokens < LEAST:
            return
        newest = seconds / tokens
        self._token_s += (newest - self._token_s) * (NEWEST if self._token_s else 1.0)
        fitting = min(max(int(self._target_s / self._token_s), LEAST), MOST)
        self.beside = min(1 << fitting.bit_length() - 1, self._most)
