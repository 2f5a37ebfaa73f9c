"""Requests on rank 0, from Generate to the scheduler and out again.

Rank 0 checks a request, compiles its grammar while others continue, and gives it to the scheduler.
`RequestShaping` holds the parts of a request that only rank 0 knows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import mlx.core as mx

from ..admission_counter import FairQueue
from ..chunks import bounded
from ..errors import Code, MlxtpError, RequestError
from ..wire import messages as msg
from ..wire.blocking import BlockingLink
from . import kv_cache, steps
from .batch import unfused_drafts
from .disk_index import DiskIndex
from .draft_model import DraftModel
from .executor import RankExecutor
from .families import attention_heads, score_bytes
from .grammar import Grammar, Grammars
from .kv_cache import SHORTEST_CHECKPOINT, SHORTEST_HIT, PrefixCache
from .logit_shaping import Guided, RequestShaping
from .mailbox import COMPILER, Mailbox
from .mtp_head import PROPOSES
from .pooling import ON_CPU, ON_GPU, Pooler, PoolingRequests, PoolingStep
from .scheduler import Scheduler
from .sequence import SequenceState
from .steps import Policy, SampledToken, StepResult
from .telemetry import RankTelemetry

# --- output of the group: tokens, scores, ends and errors, from rank 0 to its agent ----------------------
LEAST_LOGPROB = -1e9  # stands for the logarithm of zero, because frames have no infinities
PROGRESS_S = 0.3  # least time between two Prefilled of one request


class Emitter:
    """The group's only sender of tokens and ends to the agent. Other ranks have none."""

    def __init__(
        self, pipe: BlockingLink, status: RankTelemetry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pipe = pipe
        self._status = status
        self._clock = clock
        self._open: dict[int, float] = {}  # by uid: the earliest time for the next Prefilled

    def admit(self, uid: int) -> None:
        self._open[uid] = 0.0

    def emit(self, outcomes: tuple[StepResult, ...]) -> None:
        """Send a step's tokens in one frame, then the ends. Drop results of requests that have ended."""
        tokens = [o for o in outcomes if isinstance(o, SampledToken) and o.uid in self._open]
        self._status.stats.emitted += sum(not token.prompt for token in tokens)
        if scored := [token for token in tokens if token.score is not None]:
            self._emit_scored(scored)
            tokens = [token for token in tokens if token.score is None]
        if tokens:
            self._pipe.send(msg.Delta(*zip(*[(t.uid, t.index, t.token) for t in tokens], strict=True)))
        for outcome in outcomes:
            if (
                isinstance(outcome, msg.Finished | msg.Error)
                and self._open.pop(outcome.uid, None) is not None
            ):
                self._pipe.send(outcome)

    def _emit_scored(self, tokens: list[SampledToken]) -> None:
        most = msg.MAX_WIDTH + 1
        for (uid, prompt, _), group in groupby(
            tokens, key=lambda token: (token.uid, token.prompt, token.index // most)
        ):
            run = list(group)
            scores = [token.score for token in run if token.score is not None]
            self._pipe.send(
                msg.ScoredDelta(
                    uid,
                    run[0].index,
                    tuple(token.token for token in run),
                    tuple(_finite(logprob) for logprob, _ in scores),
                    len(scores[0][1]),
                    tuple(token for _, top in scores for token, _ in top),
                    tuple(_finite(logprob) for _, top in scores for _, logprob in top),
                    prompt,
                )
            )

    def vectors(self, step: PoolingStep) -> None:
        size = len(step.data) // max(len(step.places), 1)
        most = max(msg.MAX_VECTOR_BYTES // max(size, 1), 1)
        for at in range(0, len(step.places), most):
            data = step.data[at * size : (at + most) * size]
            self._pipe.send(msg.Vectors(step.uid, step.places[at : at + most], data))

    def accept(self, uid: int) -> None:
        self._pipe.send(msg.Accepted(uid))

    def prefilled(self, uid: int, computed: int, cached: int) -> None:
        now = self._clock()
        if self._open.get(uid, math.inf) <= now:
            self._open[uid] = now + PROGRESS_S
            self._pipe.send(msg.Prefilled(uid, computed, cached))

    def send_error(self, uid: int, code: Code, detail: str) -> None:
        self._open.pop(uid, None)
        self._pipe.send(msg.Error(code, detail, uid))

    def fail_all(self, code: Code, detail: str) -> None:
        for uid in sorted(self._open):
            self.send_error(uid, code, detail)


def _named_tokens(request: msg.Generate) -> tuple[int, ...]:
    shaping = request.shaping
    return shaping.bias_tokens + shaping.allowed_tokens + shaping.bad_tokens + request.stop_tokens


def _finite(logprob: float) -> float:
    """Replace NaN and minus infinity; a greedy choice treats NaN as minus infinity, too."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB


# --- requests --------------------------------------------------------------------------------------------
MAX_ROWS = 64  # sequences that decode at once; others wait
#: Most tokens in a forward over several prompts. A GPU reads the weights once for all of them.
TOGETHER_ON_GPU = 512
#: The same on a CPU, which needs as long for each token, and saves only the fixed cost of a forward.
TOGETHER_ON_CPU = 64
#: Most tokens in a step with drafts, with all rows padded to the widest: a GPU waits for weights anyway.
DRAFTS_ON_GPU = 64
DRAFTS_ON_CPU = 24
MAX_PREFIXES = 64  # KV caches kept after their sequence has ended
#: Most grammars that wait for compilation, which may take seconds each. Resumed answers are exempt.
MAX_COMPILING = 32
MAX_OWN_COMPILING = 28  # the same of one client
UNLIMITED = 1 << 40
LEAST_FOR_SCORES = 256 << 20  #: bytes, even if caches got little room


class Requests:
    """Requests of the loaded model. `scheduler` is None while none is loaded."""

    def __init__(self, rank: RankExecutor, mail: Mailbox, shaping: RequestShaping, emitter: Emitter) -> None:
        self.scheduler: Scheduler | None = None
        self._rank = rank
        self._mail = mail
        self._shaping = shaping
        self._emitter = emitter
        self._policy: Policy | None = None
        self._pooling: PoolingRequests | None = None
        self._grammars: Grammars | None = None
        self._compiling: dict[int, msg.Generate] = {}
        #: Grammars that wait for compilation, by kind and text: the number in FairQueue, client and `batch`.
        self._lined_up: dict[tuple[str, str], tuple[int, tuple[int, bool]]] = {}
        self._turns = FairQueue()
        self._compiles: tuple[str, str] | None = None  # the grammar in compilation
        #: Arrival (monotonic, in seconds) of requests without a forward yet, oldest first.
        self._waiting_since: dict[int, float] = {}
        self._context = 0
        self._last_uid = 0

    def open(self, command: msg.LoadShard, reply: msg.Loaded, drafter: DraftModel | None) -> int:
        """Begin with a model that all ranks loaded. Return the length of the longest sequence that fits."""
        rank, bootstrap = self._rank, self._rank.bootstrap
        assert rank.loaded is not None
        assert rank.caches is not None
        can, model = rank.caches.can, rank.loaded.model
        self._context = reply.context
        gpu, stages = mx.metal.is_available(), max(len(command.split), 1)
        most = bounded(command.prefill_chunk, large_buffers=bootstrap.large_buffers)
        chunk, beside, chunk_s = steps.chunk_sizes(most, gpu=gpu, stages=stages)
        score = score_bytes(model, command.kv_bits) if gpu else 0
        # A quarter of the memory that caches leave free, which is a third of their room.
        scores_bytes = max(reply.kv_bytes // 3 // 4, LEAST_FOR_SCORES)
        self._policy = Policy(
            eos=rank.eos,
            prefill_chunk=chunk,
            chunk_beside=beside,
            chunk_s=chunk_s,
            together=(TOGETHER_ON_GPU if gpu else TOGETHER_ON_CPU) if can.joint else 0,
            max_rows=MAX_ROWS if can.batched else 1,
            kv_tokens=_room(reply),
            row_tokens=-(-reply.kv_row_bytes // max(reply.kv_token_bytes, 1)),
            bucket_tokens=kv_cache.another_bucket(
                rank.caches.attending, reply.kv_token_bytes, gpu=gpu, skips=gpu and not command.kv_bits
            )
            if rank.caches.joins_buckets
            else kv_cache.APART,
            rolls_back=can.rolls_back,
            drafts=bootstrap.speculation,  # type: ignore[arg-type]
            draft_room=DRAFTS_ON_GPU if gpu else DRAFTS_ON_CPU,
            late=gpu and stages == 1,
            timed=not bootstrap.repeatable,
            agreement=bootstrap.agreement,  # type: ignore[arg-type]
            drafter=drafter,
            stages=stages,
            run_ahead=bootstrap.run_ahead,
            mtp=PROPOSES if reply.mtp else 0,
            unfused=unfused_drafts(*attention_heads(model)) if gpu else range(0),
            scores=scores_bytes // score if score else UNLIMITED,
        )
        self._start_over()
        self._shaping.prepare(self._vocabulary, rank.eos)
        self._grammars = Grammars(Path(command.path), self._vocabulary, rank.eos)
        self._grammars.read()
        if bootstrap.world_size == 1 and rank.loaded.vocabulary.head is not None:
            pooler = Pooler(rank.loaded, ON_GPU if gpu else ON_CPU)
            self._pooling = PoolingRequests(pooler, rank.status)
        return kv_cache.fitting(self._policy.kv_tokens - self._policy.row_tokens)

    def resize(self, reply: msg.Loaded, *, clear: bool) -> int:
        """Change the room for KV caches; return as `open`. `clear`: evict kept caches. No forward may run."""
        assert self._policy is not None
        assert self.scheduler is not None
        self._policy = replace(self._policy, kv_tokens=_room(reply))
        self.scheduler.resize(self._policy.kv_tokens, clear=clear)
        return kv_cache.fitting(self._policy.kv_tokens - self._policy.row_tokens)

    def close(self) -> None:
        if self.scheduler is not None:
            self._last_uid = self.scheduler.last_uid
        self.scheduler = self._policy = self._pooling = None
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None
            self._lined_up.clear()
            self._compiles = None

    def drop(self, why: str) -> None:
        self._emitter.fail_all(Code.SHUTTING_DOWN, why)
        self._compiling.clear()
        self._lined_up.clear()
        self._waiting_since.clear()
        self._shaping.clear()
        if self._pooling is not None:
            self._pooling.clear()
        if self._policy is not None:
            self._start_over()

    def _start_over(self) -> None:
        kinds = self._rank.caches
        assert self._policy is not None
        assert kinds is not None
        if self.scheduler is not None:
            self._last_uid = self.scheduler.last_uid
        truncatable = kinds.can.truncatable
        prefixes: PrefixCache | None = None
        if kinds.can.copyable:
            prefixes = PrefixCache(
                self._policy.kv_tokens // kv_cache.KEPT_SHARE,
                MAX_PREFIXES,
                SHORTEST_HIT if truncatable else SHORTEST_CHECKPOINT,
                truncatable=truncatable,
                overlapping=kinds.overlapping,
                row_tokens=self._policy.row_tokens,
            )
        store = None if self._rank.disk is None else self._rank.disk.store
        disk = DiskIndex(store, truncatable=truncatable, ranks=range(self._rank.bootstrap.world_size))
        self.scheduler = Scheduler(self._policy, prefixes, self._last_uid, disk)
        self.scheduler.speculation.use = self._rank.status.drafts

    @property
    def _vocabulary(self) -> int:
        return 0 if self._rank.loaded is None else self._rank.loaded.vocabulary.size

    def admit(self, request: msg.Generate) -> None:
        shaping, lengths, why, code = request.shaping, request.pooling.lengths, "", Code.BAD_REQUEST
        self._emitter.admit(request.uid)
        prompt, new = len(request.tokens) - request.answered, request.max_tokens
        if lengths:
            prompt, new = max(lengths), 0
        if lengths and self._pooling is None:
            code, why = (
                Code.NOT_SUPPORTED,
                "vectors are computed by one rank alone, and several share the model",
            )
        elif len(shaping.bias_tokens) != len(shaping.bias_values):
            why = f"{len(shaping.bias_tokens)} biased tokens have {len(shaping.bias_values)} values"
        elif len(shaping.bad_tokens) != sum(shaping.bad_lengths):
            why = f"bad words of {sum(shaping.bad_lengths)} tokens have {len(shaping.bad_tokens)}"
        elif (largest := max(0, *request.tokens, *_named_tokens(request))) >= self._vocabulary:
            why = f"token {largest} is not in the model's vocabulary of {self._vocabulary}"
        elif prompt + new > self._context:
            code = Code.CONTEXT_OVERFLOW
            why = f"{prompt} prompt tokens and {new} new ones exceed the model's context of {self._context}"
        if why:
            self._emitter.send_error(request.uid, code, why)
        elif lengths and self._pooling is not None:
            self._pooling.add(request)
            self._waiting_since[request.uid] = time.monotonic()
            self._emitter.accept(request.uid)
        elif shaping.grammar_kind:
            self._compile(request)
        else:
            self._start(request, None)

    def _compile(self, request: msg.Generate) -> None:
        assert self._grammars is not None
        kind, text = request.shaping.grammar_kind, request.shaping.grammar
        if (grammar := self._grammars.kept(kind, text)) is not None:
            self._start(request, grammar)
            return
        if (kind, text) != self._compiles and (kind, text) not in self._lined_up:
            whose = request.client, request.batch
            own = [turn for turn, other in self._lined_up.values() if other == whose]
            crowd = (
                sum(client == request.client for _, (client, _) in self._lined_up.values())
                >= MAX_OWN_COMPILING
            )
            if (crowd or len(self._lined_up) >= MAX_COMPILING) and not request.answered:
                who = f"{MAX_OWN_COMPILING} grammars of this client" if crowd else f"{MAX_COMPILING} grammars"
                detail = f"{who} wait to be compiled, which is the limit"
                self._emitter.send_error(request.uid, Code.OVERLOADED, detail)
                return
            self._lined_up[kind, text] = self._turns.following(whose, own), whose
        self._compiling[request.uid] = request
        self._compile_next()

    def _compile_next(self) -> None:
        if self._compiles is not None or not self._lined_up:
            return
        kind, text = self._compiles = min(self._lined_up, key=lambda each: self._lined_up[each][0])
        turn, whose = self._lined_up.pop(self._compiles)
        self._turns.record(whose, turn)
        mail, grammars = self._mail, self._grammars
        assert grammars is not None
        grammars.submit(kind, text, lambda outcome: mail.post(COMPILER, (grammars, kind, text, outcome)))

    def compiled(self, grammars: Grammars, kind: str, text: str, outcome: Grammar | RequestError) -> None:
        if grammars is not self._grammars:
            return  # it belongs to an unloaded model
        self._compiles = None
        self._compile_next()
        for request in self._who_waits_for(kind, text):
            del self._compiling[request.uid]
            if isinstance(outcome, RequestError):
                self._emitter.send_error(request.uid, outcome.code, outcome.detail)
            else:
                self._start(request, outcome)

    def _who_waits_for(self, kind: str, text: str) -> list[msg.Generate]:
        waiting = self._compiling.values()
        return [r for r in waiting if (r.shaping.grammar_kind, r.shaping.grammar) == (kind, text)]

    def _start(self, request: msg.Generate, grammar: Grammar | None) -> None:
        assert self.scheduler is not None
        guide: Guided | None = None
        try:
            if grammar is not None:
                given = request.shaping.grammar_begun
                begun = request.tokens[len(request.tokens) - request.answered - given :]
                guide = Guided(grammar.matcher(), self._vocabulary, request.max_tokens + given, begun)
            if guide is None or not guide.finished:
                self.scheduler.add(request, guide)
        except MlxtpError as error:
            code, why = error.code, error.detail
            if guide is None and request.shaping.grammar_begun and not request.answered:
                code = Code.BAD_REQUEST
                why = f"the assistant's last message is no beginning that the answer's format allows: {why}"
            self._emitter.send_error(request.uid, code, why)
            return
        if guide is not None and guide.finished:  # the resumed answer lacks only its end
            self.emit((msg.Finished(request.uid, "length" if guide.cut else "stop", request.answered, 0),))
            return
        self._shaping.enter(request, guide)
        if not request.answered:  # never give up on an answer that has begun
            self._waiting_since[request.uid] = time.monotonic()
        self._emitter.accept(request.uid)

    def cancel(self, uid: int) -> None:
        if (request := self._compiling.pop(uid, None)) is not None:
            wanted = request.shaping.grammar_kind, request.shaping.grammar
            if not self._who_waits_for(*wanted):
                self._lined_up.pop(wanted, None)
            self.emit((msg.Finished(uid, "cancel", 0, 0),))
            return
        if self._pooling is not None and self._pooling.cancel(uid):
            self.emit((msg.Finished(uid, "cancel", 0, 0),))
        elif self.scheduler is not None and (end := self.scheduler.cancel(uid)):
            self.emit((end,))

    def pool(self) -> bool:
        """Run one forward for vectors, and send them. Returns False if no request waits for any."""
        if self._pooling is None or (step := self._pooling.next()) is None:
            return False
        self._waiting_since.pop(step.uid, None)
        if not step.finite:
            self._emitter.send_error(step.uid, Code.INTERNAL, "the model's vectors are no finite numbers")
            return True
        self._emitter.vectors(step)
        self._emitter.prefilled(step.uid, step.computed, 0)
        if step.ended:
            self.emit((msg.Finished(step.uid, "stop", 0, 0),))
        return True

    def give_up_waiting(self) -> None:
        if not self._waiting_since:
            return
        uid, since = next(iter(self._waiting_since.items()))
        waited_s = time.monotonic() - since
        if waited_s < self._rank.bootstrap.queue_s or self.scheduler is None:
            return
        self.scheduler.cancel(uid)
        if self._pooling is not None:
            self._pooling.cancel(uid)
        self._forget(uid)
        self._emitter.send_error(uid, Code.OVERLOADED, f"no room for this request within {waited_s:.0f} s")

    def _forget(self, uid: int) -> None:
        self._shaping.leave(uid)
        self._waiting_since.pop(uid, None)

    def emit(self, outcomes: tuple[StepResult, ...]) -> None:
        for outcome in outcomes:
            if not isinstance(outcome, SampledToken):
                self._forget(outcome.uid)
        self._emitter.emit(outcomes)

    def prefilled(self, forward: msg.Forward, reads: Sequence[SequenceState]) -> None:
        for sequence, offset in zip(reads, forward.positions, strict=True):
            self._emitter.prefilled(sequence.request, offset, sequence.progress.reused)

    def feeds(self, forward: msg.Forward, reads: Sequence[SequenceState]) -> None:
        for sequence in reads:
            self._waiting_since.pop(sequence.request, None)
            self._shaping.assign(sequence.uid, sequence.request)
            self._shaping.feeds(sequence.uid, sequence.progress.prompt)
        if not forward.prompts and forward.agreement == "broadcast":
            fed, widths = 0, forward.widths or (0,) * len(forward.rows)
            for uid, position, width in zip(forward.rows, forward.positions, widths, strict=True):
                self._shaping.feeds(uid, position + 1, forward.tokens[fed + 1 : fed + width])
                fed += width


def _room(reply: msg.Loaded) -> int:
    return reply.kv_bytes // reply.kv_token_bytes if reply.kv_token_bytes else UNLIMITED
