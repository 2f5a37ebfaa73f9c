"""Data of the scheduler: results and policy; and the sizes of chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..chunks import BESIDE, USUAL, chunk_of
from ..wire.messages import Arrange, Error, Evict, FetchBlocks, Finished, Forward, Restore, SessionStop, Spill

EndReason = Literal["stop", "length", "cancel"]
StopReason = Literal["stop", "length", "cancel", "preempt", "error"]
Agreement = Literal["verify", "broadcast"]
DraftKind = Literal["auto", "off", "lookup", "mtp", "draft"]

#: Frames that change sequences or KV caches and run no forward.
CacheFrame = SessionStop | Evict | Arrange | Spill | FetchBlocks | Restore
#: Frames on decode links; a scheduler drives all ranks with them.
DecodeFrame = Forward | CacheFrame

#: Log-probability of a chosen token, and the most probable alternatives with their log-probabilities.
Score = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Token for the client: the `index`-th (from 0) of request `uid`, or of its prompt."""

    uid: int
    index: int
    token: int
    score: Score | None = None
    prompt: bool = False


#: A token, or the last result of a request; the group goes on.
StepResult = SampledToken | Finished | Error


#: Proposed tokens, by the uid of a request.
Drafts = dict[int, tuple[int, ...]]


class Guide(Protocol):
    """Constraint of a grammar on one request's tokens."""

    @property
    def finished(self) -> bool: ...  # only an end token may follow

    @property
    def cut(self) -> bool: ...  # the text was ended early so that it would be complete

    @property
    def foretells(self) -> bool: ...  # the next few tokens have no alternative, so one forward can take them

    @property
    def draftable(self) -> int: ...  # most tokens that may be drafted before the text must be completed

    def accept(self, token: int) -> None: ...  # raises MlxtpError when the grammar has no continuation

    def forced(self, limit: int) -> tuple[int, ...]:
        """Return at most `limit` next tokens without alternative. Raises MlxtpError if none is allowed."""

    def allowed(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """Return the longest allowed prefix of `drafts`; no token is forced. Sets masks as `forced` does.

        It ends where several tokens in one step could give another choice than one token a step.
        """


class Drafter(Protocol):
    def propose(self, rows: Mapping[int, Sequence[int]], limit: int) -> Drafts: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits and choices of a scheduler. Sizes are tokens."""

    eos: frozenset[int]
    prefill_chunk: int = 2048  # most of a prompt in one forward
    chunk_beside: int = 256  # most of prompts between two decode steps of other rows
    chunk_s: float = 0.0  # target seconds of such a chunk, once chunks have been timed; 0: none
    max_rows: int = 64  # most sequences in the running batch
    together: int = 512  # most in a forward over several prompts
    kv_tokens: int = 1 << 40  # room for KV caches, on the rank with the least
    row_tokens: int = 0  # size of the part of a sequence's cache that does not grow
    bucket_tokens: int = 1 << 40  # cost of one more bucket in a step, as cached tokens read in that time
    rolls_back: bool = True  # caches can drop rejected tokens, so a step may feed a row several
    drafts: DraftKind = "auto"  # source of drafts
    draft_room: int = 64  # most in a step with drafts, with all rows padded to the widest
    late: bool = True  # a row with a grammar runs ahead if other rows do
    timed: bool = True  # measured times may influence the frames
    agreement: Literal["auto", "broadcast", "broadcast-draws", "verify"] = "auto"
    drafter: Drafter | None = None
    stages: int = 1  # of a pipeline
    run_ahead: int = 1  # most steps of a row that a pipeline queues before it knows the tokens before
    mtp: int = 0  # most that the model's MTP head proposes in a step; 0: no head
    unfused: range = range(0)  # lengths of drafts to avoid: attention has no fused kernel for them
    scores: int = 1 << 62  # most tokens of a chunk times tokens of its context: bounds attention's memory


# --- sizes of a prompt's chunks: large when it runs alone, about 0.25 s of work while rows decode --------
LEAST, MOST = 64, 2048  #: tokens of a chunk while rows decode; smaller chunks are not timed
SCORED = 256  #: most tokens of a chunk that is scored: all of their logits are in memory
ON_CPU = 512  #: most tokens of a chunk without a GPU: attention over a larger one costs more than it saves
TARGET_S = 0.25  #: seconds of a chunk while rows decode
NEWEST = 0.5  #: weight of the newest chunk in the average


def chunk_sizes(wanted: int, *, gpu: bool, stages: int = 1) -> tuple[int, int, float]:
    """Return a Policy's `prefill_chunk`, `chunk_beside`, `chunk_s`. Above USUAL, pauses do not matter."""
    if wanted > USUAL:
        return wanted, wanted, 0.0
    alone = chunk_of(wanted if gpu else min(wanted, ON_CPU), stages, BESIDE if gpu else LEAST)
    return alone, min(alone, BESIDE), TARGET_S


def within(scores: int, offset: int, limit: int) -> int:
    """Reduce `limit` until a chunk's tokens times its context's are at most `scores`; stop at LEAST."""
    while limit > LEAST and limit * (offset + limit) > scores:
        limit = 1 << (limit - 1).bit_length() - 1
    return limit


class Chunks:
    """Choice of a chunk's size while rows decode: a power of two, from the times of earlier chunks."""

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
