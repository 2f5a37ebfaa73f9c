"""The loop of rank 0, from requests to confirmed tokens. Each round decides the next forward, then:

sends the step's frame on every decode link
queues the same forward here
waits for the previous forward, while this one runs
emits tokens of steps that every rank has acknowledged with the same digest
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..errors import Code, GroupError, LinkError, ModelError
from ..wire import messages as msg
from ..wire.blocking import BlockingLink
from . import kv_cache
from .draft_model import CACHES_SHARE, DraftModel
from .executor import RankExecutor, Result, RunningForward
from .logit_shaping import RequestShaping
from .mailbox import AGENT, COMPILER, DISK, Mailbox
from .requests import Emitter, Requests
from .scheduler import NO_FORWARD, QueuedForward
from .steps import DecodeFrame, StepResult

# --- ranks 1..N-1 ----------------------------------------------------------------------------------------


class Followers:
    """Decode links to ranks 1..N-1. Every frame goes to all of them; every reply is read from all."""

    def __init__(self, links: Mapping[int, BlockingLink], mail: Mailbox) -> None:
        self._links = dict(sorted(links.items()))
        self._mail = mail
        self._step = 0
        self._acknowledged: set[int] = set()

    def send(self, message: msg.Message) -> int:
        """Send to every rank; return the frame's seq, the same on all links. It counts without ranks, too."""
        self._step += 1
        for link in self._links.values():
            self._step = link.send(message)
        return self._step

    def replies(self, deadline_s: float | None) -> dict[int, msg.Message]:
        """Read one reply of each rank within `deadline_s`. Raises LinkError that names all silent ranks."""
        ends_at = None if deadline_s is None else time.monotonic() + deadline_s
        replies: dict[int, msg.Message] = {}
        for rank in self._links:
            left_s = None if ends_at is None else max(ends_at - time.monotonic(), 0.0)
            with contextlib.suppress(LinkError):
                replies[rank] = self._mail.receive(rank, left_s).message
        if silent := self._links.keys() - replies.keys():
            words = f"nothing came from {_names(silent)} within {deadline_s:g} s"
            raise LinkError(words, Code.LINK_TIMEOUT)
        return replies

    def acknowledged(self, result: Result) -> bool:
        """Return True once all ranks acknowledged; then check the next. Raises GroupError (DESYNC)."""
        for rank in self.awaited:
            received = self._mail.take(rank)
            if received is None:
                continue
            if not isinstance(received.message, msg.Ack):
                raise GroupError(
                    f"rank {rank} sent {type(received.message).__name__} for an Ack", Code.DESYNC
                )
            _compare(rank, received.message, result)
            self._acknowledged.add(rank)
        if len(self._acknowledged) < len(self._links):
            return False
        self._acknowledged.clear()
        return True

    @property
    def awaited(self) -> set[int]:
        return self._links.keys() - self._acknowledged


def _names(ranks: Iterable[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in sorted(ranks))


def _compare(rank: int, ack: msg.Ack, result: Result) -> None:
    for what in ("step", "forwards", "collectives", "digest"):
        theirs, ours = getattr(ack, what), getattr(result, what)
        if theirs != ours:
            raise GroupError(
                f"step {result.step}: rank {rank} reports {what} {theirs}, rank 0 has {ours}", Code.DESYNC
            )


# --- the loop --------------------------------------------------------------------------------------------
FETCH_S = 30.0  # seconds for all ranks to read blocks; after that, the prompt is computed
SPILL_S = 2.0  # seconds to write remaining blocks to disk when a model is unloaded


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    result: Result
    outcomes: tuple[StepResult, ...]
    settled_at: float


class DecodeLoop:
    """Rank 0's loop. It runs `run_ahead` forwards, plus one for each other stage, ahead of known tokens."""

    def __init__(
        self,
        rank: RankExecutor,
        mail: Mailbox,
        pipe: BlockingLink,
        followers: Followers,
        shaping: RequestShaping,
    ) -> None:
        self._rank = rank
        self._mail = mail
        self._pipe = pipe
        self._followers = followers
        self._requests = Requests(rank, mail, shaping, Emitter(pipe, rank.status))
        self._stages = 1  # of a pipeline
        self._loaded: msg.Loaded | None = None  # with the ranks' own room for KV caches
        self._drafter: DraftModel | None = None
        self._running: deque[RunningForward] = deque()
        self._unconfirmed: deque[Unconfirmed] = deque()

    def run(self) -> None:
        while True:
            while received := self._mail.take(AGENT):
                if isinstance(received.message, msg.Shutdown):
                    self._shutdown()
                    return
                self._obey(received.message)
            while compiled := self._mail.take(COMPILER):
                self._requests.compiled(*compiled)
            self._take_blocks()
            self._requests.give_up_waiting()
            ran = self._next()
            self._confirm()
            ahead = self._rank.bootstrap.run_ahead + self._stages - 1
            settled = self._settle(keep=ahead if ran else max(len(self._running) - 1, 0))
            self._confirm()
            if not ran and not settled:
                self._rest()

    # --- commands of the agent -----------------------------------------------------------------------

    def _obey(self, command: msg.Message) -> None:
        match command:
            case msg.Generate():
                self._requests.admit(command)
            case msg.Cancel():
                self._requests.cancel(command.uid)
            case msg.LoadShard():
                self._pipe.send(self._load(command))
            case msg.KvBudget():
                self._pipe.send(self._resize(command))
            case msg.Gathered():
                raise GroupError(command.error, Code.FORM_FAILED)  # another rank did not form
            case msg.Unload():
                self._drain()
                self._spill_rest()
                self._requests.drop("the model was unloaded while this request was running")
                self._close()
                self._pipe.send(self._everywhere(command))
            case _:
                self._drain()
                self._pipe.send(self._everywhere(command))

    def _load(self, command: msg.LoadShard) -> msg.Message:
        self._drain()
        self._close()
        reply = self._everywhere(command)
        if isinstance(reply, msg.Loaded):
            self._stages = max(len(command.split), 1)
            try:
                drafter = self._load_drafter(command)
            except ModelError as error:
                self._everywhere(msg.Unload())
                return msg.Error(error.code, error.detail, 0)
            self._loaded, self._drafter = reply, drafter
            reply = self._bounded(command.kv_bytes)
            return _fitting(reply, self._requests.open(command, reply, drafter))
        return reply

    def _close(self) -> None:
        self._requests.close()
        self._loaded = self._drafter = None

    def _resize(self, command: msg.KvBudget) -> msg.Loaded:
        self._drain()
        reply = self._bounded(command.kv_bytes)
        least = kv_cache.SMALLEST * reply.kv_token_bytes + reply.kv_row_bytes
        reply = replace(reply, kv_bytes=max(reply.kv_bytes, least))
        fits = self._requests.resize(reply, clear=command.clear)
        self._end_what_ended()
        return _fitting(reply, fits)

    def _bounded(self, kv_bytes: int) -> msg.Loaded:
        assert self._loaded is not None, "the pipe's protocol admits it to a loaded model only"
        return _beside(self._drafter, replace(self._loaded, kv_bytes=kv_bytes or self._loaded.kv_bytes))

    def _load_drafter(self, command: msg.LoadShard) -> DraftModel | None:
        if not command.draft_path or self._rank.bootstrap.speculation not in ("auto", "draft"):
            return None
        assert self._rank.loaded is not None
        status, size = self._rank.status, self._rank.loaded.vocabulary.size
        status.enter("loading")  # again: this folder's disk may hang, too
        try:
            return DraftModel(Path(command.draft_path), size, status.advance)
        finally:
            status.enter("idle")

    def _everywhere(self, command: msg.Message) -> msg.Message:
        """Carry out a command on every rank; return this rank's reply, or one Error for all errors."""
        self._followers.send(command)  # read every reply before anything else
        replies: dict[int, msg.Message] = {0: self._rank.execute(command)}
        if isinstance(command, msg.LoadShard):
            # A load has no deadline; the agent watches the phase and ends a load without progress.
            self._rank.status.enter("loading")
            replies |= self._followers.replies(None)
            self._rank.status.enter("idle")
        else:
            replies |= self._followers.replies(self._rank.bootstrap.deadline_s)
        errors = {rank: reply for rank, reply in replies.items() if isinstance(reply, msg.Error)}
        if not errors:
            errors = _without_head({r: each for r, each in replies.items() if isinstance(each, msg.Loaded)})
        if not errors:
            _check_layers({rank: r.layers for rank, r in replies.items() if isinstance(r, msg.Loaded)})
            return _combined(replies)
        if isinstance(command, msg.LoadShard):  # ranks that loaded the model must unload it
            self._everywhere(msg.Unload())
        detail = "; ".join(f"rank {rank}: {error.detail}" for rank, error in sorted(errors.items()))
        return msg.Error(errors[min(errors)].code, detail, 0)

    def _shutdown(self) -> None:
        self._drain()
        self._spill_rest()
        self._requests.drop("the cluster is shutting down")
        self._requests.close()
        self._rank.status.enter("closing")
        self._followers.send(msg.Shutdown())
        deadline_s = self._rank.bootstrap.deadline_s
        self._followers.replies(deadline_s)  # Done
        self._followers.replies(deadline_s)  # SessionEnd

    # --- decoding ------------------------------------------------------------------------------------

    def _next(self) -> bool:
        scheduler = self._requests.scheduler
        frame = scheduler.next() if scheduler is not None else None
        if scheduler is None or frame is None:
            return self._requests.pool()
        forward = scheduler.in_flight[-1] if isinstance(frame, msg.Forward) else NO_FORWARD
        first = bool(self._running) and self._running[-1].first
        if first and self._stages == 1 and forward.reads:
            self._drain()  # send a first token before another prompt occupies the device
        self._run(frame, forward)
        return True

    def _end_what_ended(self) -> None:
        while (scheduler := self._requests.scheduler) is not None and scheduler.frames:
            self._next()

    def _take_blocks(self) -> None:
        scheduler = self._requests.scheduler
        while word := self._mail.take(DISK):
            reply: tuple[int, int, int] | None = None
            if isinstance(word, tuple):
                reply = word[0], word[1].uid, word[1].blocks
            elif read := self._rank.from_disk(word):
                reply = 0, *read
            if reply is not None and scheduler is not None:
                scheduler.disk.reply(*reply)
        if scheduler is not None:
            scheduler.frames += scheduler.disk.over(time.monotonic())

    def _spill_rest(self) -> None:
        self._end_what_ended()
        self._drain()
        scheduler, until = self._requests.scheduler, time.monotonic() + SPILL_S
        while scheduler is not None and scheduler.disk.spills and time.monotonic() < until:
            if spill := scheduler.disk.next_spill():
                self._run(spill)
            else:
                time.sleep(0.005)  # until the disk accepts another block

    def _run(self, frame: DecodeFrame, forward: QueuedForward = NO_FORWARD) -> None:
        decodes = isinstance(frame, msg.Forward) and not frame.prompts
        while self._running and not decodes and not self._rank.runner.border.tokens.known():
            self._settle(len(self._running) - 1)  # the other ranks need the tokens of held forwards first
        if isinstance(frame, msg.Forward):
            self._requests.feeds(frame, forward.reads)
        step = self._followers.send(frame)
        if isinstance(frame, msg.FetchBlocks) and self._requests.scheduler is not None:
            self._requests.scheduler.disk.expect(frame.uid, time.monotonic() + FETCH_S)
        try:
            self._confirm()  # launching may wait for the device, so send acknowledged tokens first
        finally:  # even on an error, because the other ranks' forward ends only with this one
            if isinstance(frame, msg.Forward):
                known = partial(self._settle, 0) if forward.late else None
                self._running.append(self._rank.launch(step, frame, known))
            else:
                self._rank.apply(frame)
        if isinstance(frame, msg.Forward) and forward.reads:
            if len(forward.reads) == 1:
                # Settle everything before this chunk, except forwards that other stages are computing.
                self._settle(keep=max(self._stages - 1, 1))
            self._requests.prefilled(frame, forward.reads)

    def _settle(self, keep: int) -> bool:
        if len(self._running) <= keep:
            return False
        while len(self._running) > keep:
            result = self._rank.settle(self._running.popleft())
            if self._stages > 1:
                if result.tokens:
                    self._followers.send(msg.ChosenTokens(result.forwards, result.tokens))
                self._rank.runner.border.supply(result.forwards, result.tokens)
            assert self._requests.scheduler is not None
            record = self._requests.scheduler.record
            told = result.tokens, result.scores, result.took_s, result.at_s, result.drafts
            outcomes = tuple(record(*told, prompts=result.prompts))
            self._unconfirmed.append(Unconfirmed(result, outcomes, time.monotonic()))
        return True

    def _confirm(self) -> None:
        """Emit steps that all ranks have acknowledged, in order. Raises GroupError (ACK_MISSING)."""
        while self._unconfirmed:
            oldest = self._unconfirmed[0]
            if not self._followers.acknowledged(oldest.result):
                if self._ack_time_left_s() <= 0:
                    raise GroupError(
                        f"{_names(self._followers.awaited)} did not acknowledge step {oldest.result.step} "
                        f"within {self._rank.bootstrap.ack_deadline_s:g} s",
                        Code.ACK_MISSING,
                    )
                return
            self._unconfirmed.popleft()
            self._requests.emit(oldest.outcomes)

    def _ack_time_left_s(self) -> float:
        waited_s = time.monotonic() - self._unconfirmed[0].settled_at
        return self._rank.bootstrap.ack_deadline_s - waited_s

    def _rest(self) -> None:
        scheduler = self._requests.scheduler
        if scheduler is not None and not self._unconfirmed and (late := scheduler.late()):
            self._requests.emit(tuple(late))
            return
        asked = (AGENT, COMPILER, DISK)
        if self._unconfirmed:
            self._mail.wait(max(self._ack_time_left_s(), 0.0), (*asked, *self._followers.awaited))
            return
        if self._rank.status.phase != "idle":
            self._rank.status.enter("idle")
        left_s = None if scheduler is None else scheduler.disk.time_left_s(time.monotonic())
        if left_s is not None:
            self._mail.wait(left_s, asked)
        elif scheduler is None or self._rank.bootstrap.world_size == 1:
            self._mail.idle(of=asked)
        elif not self._mail.idle(self._rank.bootstrap.canary_s, asked):
            self._everywhere(msg.SanityCheck())  # raises when the group's collectives no longer work

    def _drain(self) -> None:
        self._settle(keep=0)
        self._confirm()
        while self._unconfirmed:
            self._mail.wait(max(self._ack_time_left_s(), 0.0), self._followers.awaited)
            self._confirm()


def _beside(drafter: DraftModel | None, reply: msg.Loaded) -> msg.Loaded:
    if drafter is None or not reply.kv_token_bytes:
        return reply
    left = max(reply.kv_bytes - drafter.weight_bytes, 0)
    drafter.bound(left // CACHES_SHARE)
    return replace(reply, kv_bytes=left - left // CACHES_SHARE)


def _fitting(reply: msg.Loaded, longest: int) -> msg.Loaded:
    return replace(reply, context=min(reply.context, max(longest, 1)))


def _check_layers(owned: Mapping[int, tuple[int, ...]]) -> None:
    """Check that each pipeline layer is on one rank, the last layers on rank 0. Raises GroupError."""
    found = [layer for rank in sorted(owned, reverse=True) for layer in owned[rank]]
    if found != list(range(len(found))) or (found and not all(owned.values())):
        words = "; ".join(f"rank {rank}: {list(layers)}" for rank, layers in sorted(owned.items()))
        raise GroupError(f"the ranks do not have each layer once ({words})", Code.DESYNC)


def _without_head(loads: Mapping[int, msg.Loaded]) -> dict[int, msg.Error]:
    if all(load.mtp for load in loads.values()) or not any(load.mtp for load in loads.values()):
        return {}
    detail = "its copy of the model lacks a usable MTP head, and another rank's copy has one"
    lacks = [rank for rank, load in loads.items() if not load.mtp and not load.layers]
    return {rank: msg.Error(Code.MODEL_INVALID, detail, 0) for rank in lacks}


def _combined(replies: dict[int, msg.Message]) -> msg.Message:
    """Combine replies: the longest time, the least room for KV caches, the largest fixed part of a row."""
    mine = replies[0]
    if isinstance(mine, msg.CollectivesTimed):
        timed = [reply for reply in replies.values() if isinstance(reply, msg.CollectivesTimed)]
        return msg.CollectivesTimed(max(each.seconds for each in timed), any(each.metal for each in timed))
    if not isinstance(mine, msg.Loaded):
        return mine
    loads = [reply for reply in replies.values() if isinstance(reply, msg.Loaded)]
    size = max(1, *(reply.kv_token_bytes for reply in loads))
    room = min(reply.kv_bytes // max(reply.kv_token_bytes, 1) for reply in loads)
    row = max(-(-reply.kv_row_bytes * size // max(reply.kv_token_bytes, 1)) for reply in loads)
    token_bytes = max(reply.kv_token_bytes for reply in loads)
    return replace(mine, kv_token_bytes=token_bytes, kv_row_bytes=row, kv_bytes=room * size)
