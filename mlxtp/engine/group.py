"""Distributed group of one epoch: forming it, proving it, agreeing on tokens.

Apart from models, only this file names `mx.distributed`. Ranks that run collectives in different order get
wrong numbers. So each collective is counted, and none is in a branch that ranks could take differently.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

import mlx.core as mx

from ..errors import Code, ConfigError, GroupError, why_not_written
from ..wire.rdma import device_file
from .jaccl import Factory, JacclFabric

#: Elements of the smallest collective. Shorter ones stall: one int32 took 8 ms, and 64 took 0.7 ms.
PAD = 64
RING_WAIT_US = 1000  # how long a thread of MLX's ring waits for data before it checks what to send
CHAINS = 3  # timings of a chain of collectives
Timed = Literal["sum", "gather", "chain"]

_MESSAGES = ("send", "recv", "recv_like")
_COLLECTIVES = ("all_sum", "all_gather", "all_max", "all_min", "sum_scatter", *_MESSAGES)


class CollectiveCounter:
    """Count of collectives at graph building, including mlx-lm's layers. Install once per process."""

    paused = False
    #: Size of the group if other ranks are left out, see `alone`; else 0.
    alone_of = 0
    left_out = 0  #: Collectives that were left out.

    def __init__(self) -> None:
        self.count = 0
        self._sent = self._received = 0  # messages between two ranks

    @property
    def total(self) -> int:
        """Collectives, and messages to or from a neighbor. It must equal rank 0's, or some are missing."""
        # A rank between two others receives as many messages as it sends; count them once.
        one_way = 0 in (self._sent, self._received) or self._sent == self._received
        return self.count + (max if one_way else sum)((self._sent, self._received))

    def install(self) -> None:
        for name in _COLLECTIVES:  # layers look them up at each call
            setattr(mx.distributed, name, self._counted(name, getattr(mx.distributed, name)))

    def _counted(self, name: str, collective: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if ranks := CollectiveCounter.alone_of:
                CollectiveCounter.left_out += 1
                return _own_part(name, args[0], ranks)
            counts = not CollectiveCounter.paused
            self._sent += counts and name == "send"
            self._received += counts and name.startswith("recv")
            self.count += counts and name not in _MESSAGES
            return collective(*args, **kwargs)

        return counted


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    CollectiveCounter.paused = True
    try:
        yield
    finally:
        CollectiveCounter.paused = False


@contextlib.contextmanager
def alone(ranks: int, *, compiled: bool) -> Iterator[None]:
    """Make collectives return this rank's own input: results have the right shape and meaningless numbers.

    Without `compiled`, MLX traces nothing: a compiled collective would leave the other ranks out forever.
    """
    if not compiled:
        mx.disable_compile()
    CollectiveCounter.alone_of = ranks
    try:
        yield
    finally:
        CollectiveCounter.alone_of = 0
        # MLX reads the variable only once, and `enable_compile` would override it.
        if not compiled and "MLX_DISABLE_COMPILE" not in os.environ:
            mx.enable_compile()


def _own_part(name: str, array: mx.array, ranks: int) -> mx.array:
    if name == "all_gather":
        return mx.concatenate([array] * ranks)
    return array[: array.shape[0] // ranks] if name == "sum_scatter" else array


@dataclass(frozen=True, slots=True)
class Proof:
    total: int
    ranks: tuple[int, ...]
    digests: tuple[int, ...]


class LoneGroup:
    rank = 0
    size = 1
    handle = None

    def prove(self, digest: int) -> Proof:
        return Proof(1, (0,), (digest,))

    def agree(self, tokens: mx.array) -> mx.array:
        return tokens

    def timed(self, kind: Timed, size: int, rounds: int, progress: Callable[[], None]) -> float:
        return 0.0

    def total(self, array: mx.array) -> mx.array:
        return array

    def gather(self, array: mx.array) -> mx.array:
        return array[None]


class RingGroup:
    """`uniform`: messages from one rank to another must all have the same shape."""

    def __init__(self, handle: Any, *, uniform: bool = False) -> None:
        self.handle = handle
        self._uniform = uniform
        #: Messages wait for other ranks in this stream, so that computing does not.
        self.messages = mx.new_stream(mx.cpu)
        self.rank: int = handle.rank()
        self.size: int = handle.size()
        #: Factor in `agree`: 0, so that other ranks still depend on their logits and the last collectives.
        self._mine = 1 if self.rank == 0 else 0

    def prove(self, digest: int) -> Proof:
        total, rows = self.total(mx.array([1])), self.gather(mx.array([self.rank, digest], dtype=mx.uint32))
        mx.eval(total, rows)
        ranks, digests = zip(*cast("list[list[int]]", rows.tolist()), strict=True)
        return Proof(cast(int, total.item()), ranks, digests)

    def timed(self, kind: Timed, size: int, rounds: int, progress: Callable[[], None]) -> float:
        """Return the median seconds of `rounds` collectives over `size` bytes. All ranks must call it.

        A "chain" is one graph of dependent sums: on a GPU, each includes a fence, as in a forward.
        """
        array = mx.ones((max(size // _NUMBER.size, 1),), dtype=_NUMBER)
        mx.eval(array, self.total(array))  # waits for late ranks
        if kind != "chain":
            collective = self.total if kind == "sum" else self.gather
            return median([_clocked(collective(array), progress) for _ in range(rounds)])
        times = []
        for _ in range(CHAINS):
            chain = array
            for _ in range(rounds):
                chain = self.total(chain) * (1 / self.size)  # the values stay the same
            times.append(_clocked(chain, progress))
        return median(times) / rounds

    def agree(self, tokens: mx.array) -> mx.array:
        return self.total(tokens * self._mine)

    def total(self, array: mx.array) -> mx.array:
        total: mx.array = mx.distributed.all_sum(_padded(array), group=self.handle)
        return total[: array.size].reshape(array.shape)

    def send_row(self, row: mx.array, rank: int, unit: int) -> list[mx.array]:
        """Return arrays that send a message [n]; evaluate them in order. If `uniform`, each has `unit`."""
        whole = mx.pad(row, (0, -row.size % unit)) if self._uniform else row
        pieces = mx.split(whole, whole.size // unit) if self._uniform else [row]
        return [self._send(piece, rank) for piece in pieces]

    def receive_row(self, size: int, dtype: mx.Dtype, rank: int, unit: int) -> list[mx.array]:
        lengths = [unit] * -(-size // unit) if self._uniform else [size]
        return [self._receive(length, dtype, rank) for length in lengths]

    def _send(self, row: mx.array, rank: int) -> mx.array:
        sent: mx.array = mx.distributed.send(row, rank, group=self.handle, stream=self.messages)
        return sent

    def _receive(self, size: int, dtype: mx.Dtype, rank: int) -> mx.array:
        row: mx.array = mx.distributed.recv((size,), dtype, rank, group=self.handle, stream=self.messages)
        return row

    def gather(self, array: mx.array) -> mx.array:
        rows: mx.array = mx.distributed.all_gather(_padded(array)[None], group=self.handle)
        return rows[:, : array.size].reshape(self.size, *array.shape)


_NUMBER = mx.bfloat16  # the type that ranks exchange in most models' forwards


def _clocked(array: mx.array, progress: Callable[[], None]) -> float:
    began = time.perf_counter()
    mx.eval(array)
    seconds = time.perf_counter() - began
    progress()
    return seconds


def _padded(array: mx.array) -> mx.array:
    row = array.reshape(-1)
    return row if row.size >= PAD else mx.pad(row, (0, PAD - row.size))


Group = LoneGroup | RingGroup


def is_available(backend: str) -> bool:
    return bool(mx.distributed.is_available(backend))


def init(backend: str, factory: Factory | None) -> Any:
    return mx.distributed.init(strict=True, backend=backend, all_gather_factory=factory)


def use_fast_fences(fast: bool) -> None:
    """Set whether MLX uses fast fences between CPU and GPU, which can wedge a GPU. MLX reads this once."""
    os.environ["MLX_METAL_FAST_SYNCH"] = "1" if fast else "0"


#: Limits of a command buffer that the owner of an M3 Ultra tried (MLX issue 4521).
LARGE_BUFFERS = {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "400"}


def use_large_buffers() -> None:
    """Make MLX use larger command buffers, unless the user has set their size. MLX reads it once."""
    for name, value in LARGE_BUFFERS.items():
        os.environ.setdefault(name, value)


def form(
    backend: str,
    rank: int,
    world_size: int,
    hosts: tuple[str, ...],
    *,
    folder: Path,
    deadline_s: float,
    fabric: JacclFabric | None = None,
    available: Callable[[str], bool] = is_available,
    init: Callable[[str, Factory | None], Any] = init,
) -> Group:
    """Form the group; block until every rank is here. `hosts`, for the ring: "ip:port" in rank order.

    MLX holds the GIL (but see `SideChannelExchange`) and its accept never times out, so an alarm that needs
    no Python ends the process at the deadline. Raises ConfigError without such a backend, errors of the
    fabric's all-gather, and GroupError (FORM_FAILED) if MLX fails or forms another group.
    """
    if backend == "none":
        if world_size != 1:
            raise GroupError(f"{world_size} ranks need a backend, not 'none'", Code.FORM_FAILED)
        return LoneGroup()
    assert (fabric is not None) == (backend == "jaccl")
    if not available(backend):
        needs = "; it needs macOS 26.2 or newer and its librdma" if backend == "jaccl" else ""
        raise ConfigError(f"rank {rank}: MLX has no {backend} backend on this machine{needs}")
    text = json.dumps([[host] for host in hosts]) if fabric is None else device_file(fabric.matrix)
    with _file(text, folder) as path, _deadman(deadline_s):
        hosted = {"MLX_RANK": str(rank), "MLX_HOSTFILE": path}
        for name, value in (fabric.environment(os.environ, rank, path) if fabric else hosted).items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        before = _sockets()
        try:
            handle = init(backend, None if fabric is None else fabric.factory)
            group = RingGroup(handle, uniform=backend == "jaccl")
        except (RuntimeError, ValueError, IndexError) as error:  # C++ exceptions arrive as one of these
            raise GroupError(f"rank {rank}: {backend} did not form: {error}", Code.FORM_FAILED) from error
    if (group.rank, group.size) != (rank, world_size):
        detail = f"requested rank {rank} of {world_size}, formed rank {group.rank} of {group.size}"
        raise GroupError(detail, Code.FORM_FAILED)
    if backend == "ring" and not mx.metal.is_available():
        _sleep_while_waiting(_sockets() - before)
    return group


def _sockets() -> set[int]:
    found = set()
    for each in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own descriptor is already closed
            if stat.S_ISSOCK(os.fstat(descriptor := int(each.name)).st_mode):
                found.add(descriptor)
    return found


def _sleep_while_waiting(ring: set[int]) -> None:
    """Make the sockets of MLX's ring block; otherwise its threads spin on cores that other ranks may need."""
    wait = struct.pack("@ll", 0, RING_WAIT_US)
    for descriptor in ring:
        with socket.socket(fileno=os.dup(descriptor)) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        os.set_blocking(descriptor, True)


def check_proof(proof: Proof, world_size: int, digest: int) -> None:
    """Check that all ranks are here, in order, and know the epoch's key. Raises GroupError (PROOF_FAILED)."""
    everyone = tuple(range(world_size))
    for what, seen, wanted in (("total", proof.total, world_size), ("ranks", proof.ranks, everyone)):
        if seen != wanted:
            raise GroupError(f"the group's {what}: expected {wanted}, computed {seen}", Code.PROOF_FAILED)
    if strangers := [rank for rank, value in enumerate(proof.digests) if value != digest]:
        raise GroupError(f"ranks {strangers} do not know this epoch's key", Code.PROOF_FAILED)


@contextlib.contextmanager
def _file(text: str, folder: Path) -> Iterator[str]:
    try:
        descriptor, name = tempfile.mkstemp(suffix=".json", dir=folder)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except OSError as error:
        raise GroupError(why_not_written(error, folder), Code.FORM_FAILED) from None
    try:
        yield name
    finally:
        Path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def _deadman(deadline_s: float) -> Iterator[None]:
    previous = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
