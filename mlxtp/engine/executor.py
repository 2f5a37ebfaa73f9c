"""One rank's part of a group: the commands that every rank carries out, including rank 0."""

from __future__ import annotations

import gc
import os
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from ..chunks import bounded
from ..errors import Code, GroupError, LocalProtocolError, MlxtpError, ModelError
from ..free_memory import free_bytes
from ..wire import messages as msg
from .batch import CacheKind
from .block_store import Read, Written
from .disk_share import DiskShare, open_store
from .group import CollectiveCounter, Group, LoneGroup, Timed, check_proof, form
from .jaccl import JacclFabric, SideChannelExchange
from .loader import ModelShare, load, run_alone
from .mlx_compat import code_of
from .mtp_head import read_head
from .pipeline import Border
from .runner import Runner, clear_pool
from .sampler import Chooser, Chosen, LogitShaping
from .steps import CacheFrame, Score
from .telemetry import PROMPT, PROMPTS, STEP, Phase, RankTelemetry

KV_TYPE_BITS = 16  # bits of a number in unquantized keys and values
SMALL_BYTES, SMALL_ROUNDS = 128, 8  # size and rounds to time a small collective
#: Most bytes that MLX keeps for reuse on Metal; its own limit is nearly all memory. A chunk needs few.
POOL_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class RunningForward:
    step: int
    chosen: Chosen
    forwards: int
    collectives: int
    launched_at: float
    fed: int = 0  # digest of its input
    entry: int = 0  # its place in the flight recorder
    queued_s: float = 0.0  # time to queue it; MLX blocks if much is queued already
    first: bool = False  # it chooses prompts' first tokens


@dataclass(frozen=True, slots=True)
class Result:
    """Forward with known tokens, in row order: as many for each row as it was fed."""

    step: int
    tokens: tuple[int, ...]
    scores: Mapping[int, Sequence[Score]]  # by uid, one for each token, if requested
    forwards: int
    collectives: int
    digest: int
    step_us: int  # as in Ack
    wait_us: int
    took_s: float  # since the previous forward ended, or since this one began
    at_s: float  # when the tokens were known (monotonic)
    drafts: tuple[tuple[int, ...], ...] = ()  # the MTP head's proposals for each row
    # scores by uid of the tokens after each of a prompt's
    prompts: Mapping[int, Sequence[Score]] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class RankExecutor:
    bootstrap: msg.Bootstrap
    epoch: int
    folder: Path
    status: RankTelemetry
    counter: CollectiveCounter
    shaping: LogitShaping
    exchange: SideChannelExchange
    post: Callable[[object], None]  # from threads, for `from_disk`

    loaded: ModelShare | None = None
    eos: frozenset[int] = frozenset()
    caches: CacheKind | None = None
    disk: DiskShare | None = None
    _collectives: int = 0  # of forwards
    _group: Group = field(default_factory=LoneGroup)
    _runner: Runner | None = None

    def execute(self, command: msg.Message) -> msg.Message:
        match command:
            case msg.Init():
                return self._init()
            case msg.SanityCheck():
                return self._prove()
            case msg.LoadShard():
                return self._load(command)
            case msg.TimeCollectives():
                return self._time(command)
            case msg.Unload():
                self._unload()
            case _:
                raise LocalProtocolError(f"{type(command).__name__} is not a command a rank carries out")
        return msg.Done()

    def launch(
        self, step: int, frame: msg.Forward, known: Callable[[], object] | None = None
    ) -> RunningForward:
        launched_at = time.monotonic()
        runner, recorder = self.runner, self.status.recorder
        border, room, before = runner.border, runner.room, self.counter.total
        phase: Phase = "prefill" if frame.prompts else "decode"
        if border.stage is not None and self.bootstrap.rank:
            border.times.began(frame, launched_at, idle=not self.status.in_flight)
        self.status.launched(phase, len(frame.tokens), launched_at)
        if phase == "prefill":
            border.make_way()
        kind = (STEP, PROMPT, PROMPTS)[min(len(frame.prompts), 2)]
        entry = recorder.started(step, kind, len(frame.rows), launched_at)
        chosen = runner.run(frame, known)
        self._collectives += self.counter.total - before
        recorder.queued(entry, runner.forwards, self._collectives)
        if phase == "prefill" or runner.room != room:
            self._count_caches()
        first, totals = phase == "prefill" and bool(chosen.widths), (runner.forwards, self._collectives)
        return RunningForward(step, chosen, *totals, launched_at, fed(frame), entry, border.queued_s, first)

    def settle(self, forward: RunningForward) -> Result:
        """Wait for a forward without the GIL, so that other threads can reply to Pings."""
        waiting_since = time.monotonic()
        chosen, status, border = forward.chosen, self.status, self.runner.border
        border.flush(forward.forwards)
        table = cast("list[list[int]]", chosen.tokens.tolist())
        proposed = cast("list[list[int]]", [] if chosen.drafts is None else chosen.drafts.tolist())
        drafts = tuple([tuple(row) for row in proposed])
        now = time.monotonic()
        tokens = tuple([t for row, width in zip(table, chosen.widths, strict=False) for t in row[:width]])
        took_s = status.settled(now)
        fed, chose = forward.fed, (*tokens, *[token for row in drafts for token in row])
        if border.stage is not None:
            border.times.ended(took_s, now)
            status.stats.stage_busy_us = int(border.times.busy_s * 1e6)
            status.stats.stage_waiting_us = int(border.times.waiting_s * 1e6)
            chose = ()  # only rank 0 knows it
            if chosen.fed is not None:
                fed = zlib.crc32(chosen.fed, fed)  # type: ignore[arg-type]
        status.step = forward.step
        status.stats.forwards, status.stats.collectives = forward.forwards, forward.collectives
        step_us = int((now - forward.launched_at) * 1e6)
        wait_us = int((forward.queued_s + now - waiting_since) * 1e6)
        status.took(step_us, wait_us)
        digested = digest(forward.step, chose, fed)
        status.recorder.finished(forward.entry, now, digested, fed)
        scores = {uid: _scored(arrays) for uid, arrays in chosen.scores.items()}
        return Result(
            forward.step,
            tokens,
            scores,
            forward.forwards,
            forward.collectives,
            digested,
            step_us,
            wait_us,
            took_s,
            now,
            drafts,
            {uid: _scored(arrays) for uid, arrays in chosen.prompts.items()},
        )

    def apply(self, frame: CacheFrame) -> None:
        runner, disk = self.runner, self.disk
        assert disk is not None, "a loaded model has one"
        match frame:
            case msg.SessionStop():
                counted = runner.stop(frame.uid, frame.keep, frame.covers)
                if counted != frame.forwards:
                    what = f"{frame.forwards} forwards by the frame, {counted} on rank {self.bootstrap.rank}"
                    raise GroupError(f"sequence {frame.uid}: {what}", Code.DESYNC)
            case msg.Evict():
                runner.evict(frame.uids)
            case msg.Arrange():
                runner.arrange(frame.rooms, frame.lanes, trim=frame.trim)
            case msg.Spill():
                disk.spill(frame)
            case msg.FetchBlocks():
                disk.fetch(frame)
            case msg.Restore():
                disk.restore(frame)
        self._count_caches()

    def _count_caches(self) -> None:
        use: dict[str, Any] = self.runner.cache_use() | (self.disk.use() if self.disk is not None else {})
        self.status.stats = replace(self.status.stats, **use)

    def from_disk(self, word: Read | Written) -> tuple[int, int] | None:
        if self.disk is None:  # the model was unloaded meanwhile
            return None
        self._count_caches()
        return self.disk.arrived(word) if isinstance(word, Read) else None

    def finish(self) -> None:
        mx.synchronize()

    def give_back(self) -> None:
        """Free all memory. A Mac may leak memory that is still wired when a process ends."""
        self._group = LoneGroup()
        self._unload()
        mx.set_wired_limit(0)

    def _init(self) -> msg.InitDone:
        b = self.bootstrap
        self.status.enter("forming")
        fabric = None
        if b.backend == "jaccl":
            fabric = JacclFabric.of(b.rdma, b.world_size, ring=b.jaccl_ring, factory=self.exchange.factory)
        ranks = b.backend, b.rank, b.world_size, b.hosts
        self._group = form(*ranks, folder=self.folder, deadline_s=b.deadline_s, fabric=fabric)
        return msg.InitDone(self._group.rank, self._group.size)

    def _prove(self) -> msg.SanityDone:
        self.status.enter("proving")
        expected = msg.epoch_digest(self.bootstrap.epoch_key, self.epoch)
        try:
            proof = self._group.prove(expected)
        except RuntimeError as error:
            raise GroupError(f"a collective failed: {error}", code_of(error, Code.PROOF_FAILED)) from error
        check_proof(proof, self.bootstrap.world_size, expected)
        small_s = self._group.timed("sum", SMALL_BYTES, SMALL_ROUNDS, self.status.advance)
        self.status.stats.collective_us = int(small_s * 1e6)
        self.status.enter("idle")
        return msg.SanityDone(proof.total, proof.ranks, proof.digests[self._group.rank])

    def _time(self, command: msg.TimeCollectives) -> msg.CollectivesTimed:
        self.status.enter("measuring")
        kind, progress = cast(Timed, command.kind), self.status.advance
        try:
            seconds = self._group.timed(kind, command.size, command.rounds, progress)
        except RuntimeError as error:
            raise GroupError(f"a collective failed: {error}", code_of(error, Code.PROOF_FAILED)) from error
        self.status.enter("idle")
        return msg.CollectivesTimed(seconds, mx.metal.is_available())

    def _load(self, command: msg.LoadShard) -> msg.Loaded | msg.Error:
        self.status.enter("loading")
        path = command.paths[self.bootstrap.rank] if command.paths else command.path
        if mx.metal.is_available():
            mx.set_cache_limit(POOL_BYTES)
        refused: msg.Error | None = None
        try:
            headed = self.bootstrap.speculation in ("auto", "mtp")
            how = (command.split, read_head) if headed else (command.split,)
            self.loaded = load(Path(path), self._group, self.status.advance, *how)
            self.caches = CacheKind(self.loaded.model, command.kv_bits, self.loaded.stage)
            if command.counted:
                check_share(self.loaded, command.counted[self.bootstrap.rank])
            if mx.metal.is_available():
                chunk = bounded(command.prefill_chunk, large_buffers=self.bootstrap.large_buffers)
                run_alone(self.loaded, self._group.size, partial(self._first_forwards, chunk))
        except MlxtpError as error:
            refused = msg.Error(error.code, error.detail, 0)
        finally:
            self.status.enter("idle")
        if refused is not None:  # here, no frame of the exception holds the weights any more
            self._unload()
            return refused
        loaded, caches = self.loaded, self.caches
        assert loaded is not None
        assert caches is not None
        self.eos = loaded.eos | frozenset(command.eos)
        self._runner = self._new_runner(self.counter)
        store = open_store(self.bootstrap, Path(path), command, caches, self.post)
        self.disk = DiskShare(self._runner, caches, store, self.post)
        self._count_caches()
        self.status.model, self.status.drafts.mtp = loaded.name, loaded.mtp_head is not None
        stats = self.status.stats
        stats.weight_bytes, stats.load_peak_bytes = loaded.weight_bytes, loaded.peak_bytes
        context = min(loaded.context, command.max_context or loaded.context)
        token_bytes = loaded.kv_token_bytes
        if command.kv_bits:
            # Each group has a scale and a bias of the original type.
            bits = command.kv_bits + 2 * KV_TYPE_BITS / caches.group_size
            token_bytes = int(token_bytes * bits / KV_TYPE_BITS)
        return msg.Loaded(
            context,
            loaded.vocabulary.size,
            loaded.weight_bytes,
            tuple(sorted(self.eos)),
            loaded.peak_bytes,
            token_bytes or min(loaded.kv_row_bytes, 1),
            kv_room_bytes(ranks_here(self.bootstrap)),
            loaded.kv_row_bytes,
            caches.can.copyable and not caches.can.truncatable,
            loaded.stage.layers if loaded.stage else (),
            loaded.mtp_head is not None,
        )

    def _new_runner(self, counter: CollectiveCounter) -> Runner:
        assert self.loaded is not None
        assert self.caches is not None
        stage = self.loaded.stage
        chooser = Chooser(LoneGroup() if stage else self._group, self.shaping, tuple(sorted(self.eos)))
        border, compiled = Border(stage, self._group), "MLX_DISABLE_COMPILE" not in os.environ
        return Runner(self.loaded, self.caches, counter, chooser, compiled=compiled, border=border)

    def _first_forwards(self, chunk: int) -> None:
        runner = self._new_runner(CollectiveCounter())
        runner.first_forwards(chunk)
        del runner
        gc.collect()  # traced graphs and the runner refer to each other
        clear_pool()

    def _unload(self) -> None:
        if self.disk is not None:
            self.disk.close()
        self.disk = self.loaded = self.caches = self._runner = None
        gc.collect()  # traced graphs and the runner refer to each other
        self.status.unloaded()
        clear_pool()

    @property
    def runner(self) -> Runner:
        if self._runner is None:
            raise LocalProtocolError("no model is loaded")
        return self._runner


def check_share(share: ModelShare, counted: msg.CountedShare) -> None:
    """Raise ModelError (MODEL_INVALID) if a share takes far more memory than its plan counted on."""
    # Plans leave out some scales, norms, and KV heads on two ranks; caches may be twice as wide.
    most = msg.CountedShare(counted.weight_bytes * 5 // 4 + (64 << 20), counted.kv_token_bytes * 2)
    for name, what in {"weight_bytes": "of weights", "kv_token_bytes": "of KV caches for a token"}.items():
        if (found := getattr(share, name)) > getattr(most, name):
            raise ModelError(
                f"{share.name}: a rank has {found} bytes {what}, where its plan counted on "
                f"{getattr(counted, name)}. If files of the model were changed, `mlxtp unload` and then "
                "`mlxtp serve` it, to plan it again. If not, the plan is wrong: report this and config.json",
                Code.MODEL_INVALID,
            )


def digest(step: int, tokens: tuple[int, ...], fed: int = 0) -> int:
    """Return the CRC-32 of a step with its input `fed`: ranks that exchange results agree on wrong tokens."""
    return zlib.crc32(struct.pack(f"<Q{len(tokens)}i", step, *tokens), fed)


def fed(frame: msg.Forward) -> int:
    where = (*frame.rows, *frame.positions, *frame.widths, frame.drafts - msg.RESTS)
    for prompt in frame.prompts:
        where += (prompt.total, prompt.source, prompt.save, prompt.following, prompt.scores + 1)
    return zlib.crc32(struct.pack(f"<{len(where)}I{len(frame.tokens)}i", *where, *frame.tokens))


def _scored(arrays: tuple[mx.array, mx.array, mx.array]) -> list[Score]:
    logprobs, tokens, alternatives = (cast("list[Any]", array.tolist()) for array in arrays)
    return [
        (logprob, tuple(zip(row, values, strict=True)))
        for logprob, row, values in zip(logprobs, tokens, alternatives, strict=True)
    ]


def gpu_bytes() -> int:
    return int(mx.device_info()["max_recommended_working_set_size"]) if mx.metal.is_available() else 0


def ranks_here(bootstrap: msg.Bootstrap) -> int:
    addresses = [host.rpartition(":")[0] for host in bootstrap.hosts]
    mine = addresses[bootstrap.rank] if addresses else ""
    return addresses.count(mine) if mine else 1  # JACCL has no addresses here, and one rank on each Mac


def kv_room_bytes(ranks: int) -> int:
    """Return bytes for KV caches: three quarters of one rank's part of free memory."""
    room = free_bytes() // ranks
    if mx.metal.is_available():  # at most the GPU's recommended memory, less this rank's
        room = min(room, gpu_bytes() - mx.get_active_memory())
    return max(room, 0) * 3 // 4
