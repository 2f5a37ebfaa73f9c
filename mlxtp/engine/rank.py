"""One rank's own part of a group: the commands every rank carries out alike, rank 0 included."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx

from ..errors import Code, GroupError, LocalProtocolError, MlxtpError
from ..wire.identity import epoch_digest
from ..wire.messages import (
    Abort,
    Bootstrap,
    ClearCache,
    Done,
    Error,
    Init,
    InitDone,
    Loaded,
    LoadShard,
    Message,
    PromptTokens,
    SanityCheck,
    SanityDone,
    StepToken,
    Unload,
)
from .group import CollectiveCounter, Group, LoneGroup, check_proof, form
from .loader import LoadedModel, load
from .runner import Runner
from .status import Status


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward that is queued or running. `tokens` will hold what it chose for `uids`, int32 [rows]."""

    step: int
    uids: tuple[int, ...]
    tokens: mx.array
    forwards: int
    collectives: int


@dataclass(frozen=True, slots=True)
class Result:
    """A forward whose tokens are known on this rank."""

    step: int
    uids: tuple[int, ...]
    tokens: tuple[int, ...]
    forwards: int
    collectives: int
    digest: int


class Rank:
    """Group, model and runner of this process, for one epoch."""

    def __init__(
        self, bootstrap: Bootstrap, epoch: int, folder: Path, status: Status, counter: CollectiveCounter
    ) -> None:
        self.bootstrap = bootstrap
        self.status = status
        self.loaded: LoadedModel | None = None
        self.eos: frozenset[int] = frozenset()
        self._epoch = epoch
        self._folder = folder
        self._counter = counter
        self._group: Group = LoneGroup()
        self._runner: Runner | None = None

    def execute(self, command: Message) -> Message:
        """Carry out one command of a rank's life and return its one reply.

        A model that cannot be loaded is an Error reply and leaves the group usable; everything else that goes
        wrong is raised, because it ends the epoch.
        """
        match command:
            case Init():
                return self._init()
            case SanityCheck():
                return self._prove()
            case LoadShard():
                return self._load(command)
            case Unload():
                self._unload()
            case Abort():
                self._require_runner().clear()
            case ClearCache():
                mx.clear_cache()
            case _:
                raise LocalProtocolError(f"{type(command).__name__} is not a command a rank carries out")
        return Done()

    def launch(self, step: int, frame: PromptTokens | StepToken) -> Forward:
        """Queue the forward that frame number `step` names. Returns at once; the device works on."""
        runner = self._require_runner()
        if not self.status.in_flight:
            self.status.progress()  # the time since the last forward was idling
        if isinstance(frame, PromptTokens):
            self.status.phase = "prefill"
            last = frame.offset + len(frame.tokens) == frame.total
            tokens = runner.prefill(frame.uid, frame.tokens, last=last)
            uids: tuple[int, ...] = (frame.uid,) if last else ()
        else:
            self.status.phase = "decode"
            tokens = runner.step(frame.rows)
            uids = frame.rows
        self.status.in_flight += 1
        return Forward(step, uids, tokens, runner.forwards, self._counter.count)

    def settle(self, forward: Forward) -> Result:
        """Wait for a forward. The GIL is free while waiting, so other threads answer Pings."""
        chosen = cast("list[int]", forward.tokens.tolist())
        tokens = tuple(chosen[: len(forward.uids)])
        status = self.status
        status.in_flight -= 1
        status.step = forward.step
        status.forwards = forward.forwards
        status.collectives = forward.collectives
        status.progress()
        return Result(
            forward.step,
            forward.uids,
            tokens,
            forward.forwards,
            forward.collectives,
            digest(forward.step, tokens),
        )

    def stop(self, uid: int, forwards: int) -> None:
        """Forget a sequence. Raises GroupError (DESYNC) when it was not in exactly `forwards` forwards."""
        counted = self._require_runner().stop(uid)
        if counted != forwards:
            raise GroupError(
                f"sequence {uid}: {forwards} forwards by the frame, {counted} on rank {self.bootstrap.rank}",
                Code.DESYNC,
            )

    def _init(self) -> InitDone:
        b = self.bootstrap
        self.status.enter("forming")
        self._group = form(
            b.backend, b.rank, b.world_size, b.hosts, folder=self._folder, deadline_s=b.deadline_s
        )
        return InitDone(self._group.rank, self._group.size)

    def _prove(self) -> SanityDone:
        self.status.enter("proving")
        expected = epoch_digest(self.bootstrap.epoch_key, self._epoch)
        try:
            proof = self._group.prove(expected)
        except RuntimeError as error:
            raise GroupError(f"a collective failed: {error}", Code.PROOF_FAILED) from error
        check_proof(proof, self.bootstrap.world_size, expected)
        self.status.enter("idle")
        return SanityDone(proof.total, proof.ranks, proof.digests[self._group.rank])

    def _load(self, command: LoadShard) -> Loaded | Error:
        self.status.enter("loading")
        try:
            self.loaded = load(Path(command.path), self._group, self.status.progress)
        except MlxtpError as error:
            self._unload()
            return Error(error.code, error.detail, 0)
        except MemoryError:
            self._unload()
            return Error(Code.OUT_OF_MEMORY, f"not enough memory for {command.path}", 0)
        finally:
            self.status.enter("idle")
        self._runner = Runner(self.loaded, self._group)
        self.eos = self.loaded.eos | frozenset(command.eos)
        self.status.model = self.loaded.name
        return Loaded(
            self.loaded.context, self.loaded.vocabulary, self.loaded.weight_bytes, tuple(sorted(self.eos))
        )

    def _unload(self) -> None:
        self.loaded = None
        self._runner = None
        self.status.model = ""
        mx.clear_cache()

    def _require_runner(self) -> Runner:
        if self._runner is None:
            raise LocalProtocolError("no model is loaded")
        return self._runner


def digest(step: int, tokens: tuple[int, ...]) -> int:
    """CRC-32 of a step's number and the tokens it chose: what ranks compare before a token leaves."""
    return zlib.crc32(struct.pack(f"<Q{len(tokens)}i", step, *tokens))
