"""A rank with a pretended JACCL: `python -m tests.engine.jaccl_worker FOLDER <a worker's arguments>`.

FOLDER/rank-K.json says what rank K's pretended `init` does (see `Script`). It is called as MLX's would be,
reads what that reads, and asks for rounds as that does, without letting other threads run in between.

As in a rank, MLX is imported by `worker.run`. After MLX's exit functions FOLDER/left-K gets the number of
sockets of its real ring that are still open.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxtp.engine import telemetry, worker
from mlxtp.engine.jaccl import Factory, Gather, JacclFabric
from mlxtp.errors import GroupError
from mlxtp.wire.messages import PROTOCOL_VERSION, Done, Hello, Init, InitDone, SessionEnd

SIZES = (4, 84, 4, 84, 1)
HELD_US = 20_000
ADDRESS_BYTES = 32
UNRUN = (256, 512)


@dataclass(frozen=True)
class Script:
    """A fault of the bootstrap and its time: just before round `at`, counted from 1.

    `fault`: "raise" as JACCL does, "die", "wait" for a test to open FOLDER/gate, "retry" after a round
    that failed, "stay" with the GIL in an exit function, or nothing. `whole`: all of a rank process, with a
    real group over the ring in the end.
    """

    fault: str = ""
    at: int = 0
    sizes: tuple[int, ...] = SIZES
    whole: bool = False
    words: str = "Changing queue pair to RTR failed with errno 22"
    """JACCL's words when it raises."""
    crash_tokens: int = 0
    """Least tokens of a forward over JACCL in which the process dies by SIGSEGV; 0 for none."""
    everywhere: bool = False
    """It dies so over the ring, too."""
    variables: tuple[str, ...] = ()
    """JACCL's variables that may be set, beside the file and the rank."""


class Pretence:
    """The fake `init`, for the seam of `group.form`."""

    def __init__(self, script: Script, folder: Path) -> None:
        self._script = script
        self._folder = folder
        self.ring: set[int] = set()

    def __call__(self, backend: str, factory: Factory | None) -> Any:
        if self._script.crash_tokens and (backend == "jaccl" or self._script.everywhere):
            crash_in_sums(self._script.crash_tokens)
        if backend != "jaccl":
            from mlxtp.engine.group import init

            return init(backend, factory)
        assert factory is not None
        assert set(_variables_of_jaccl()) == set(self._script.variables)
        rank = int(_getenv("MLX_RANK"))
        size = len(json.loads(Path(_getenv("MLX_IBV_DEVICES")).read_text()))
        gather = factory(rank, size)
        for number, n in enumerate(self._script.sizes, 1):
            ctypes.PyDLL(None).usleep(HELD_US)
            if number == self._script.at:
                self._err()
            got = self._gather(gather, part(rank, number, n))
            assert type(got) is bytes
            assert got == b"".join(part(each, number, n) for each in range(size))
        if self._script.fault == "stay":
            atexit.register(ctypes.PyDLL(None).sleep, 1000)
        if not self._script.whole:
            return NoGroup(rank, size)
        before = sockets()
        formed = over_the_ring(gather, rank)
        self.ring = sockets(connected=True) - before
        return formed

    def count(self, rank: str) -> None:
        """Write down what is left of the ring."""
        (self._folder / f"left-{rank}").write_text(str(len(self.ring & sockets())))

    def _gather(self, gather: Gather, mine: bytes) -> bytes:
        try:
            return gather(mine, len(mine))
        except GroupError as error:
            if self._script.fault != "retry":
                raise
            ended = error
        try:
            gather(mine, len(mine))
        except GroupError as error:
            if (error.detail, error.code) == (ended.detail, ended.code):
                raise
        raise AssertionError("a round after the end did not end as the one before")

    def _err(self) -> None:
        match self._script.fault:
            case "raise":
                raise ValueError(f"[jaccl] {self._script.words}")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "wait":
                (self._folder / "gate").read_text()


@dataclass(frozen=True)
class NoGroup:
    """A group without computations."""

    of_rank: int
    of_size: int

    def rank(self) -> int:
        return self.of_rank

    def size(self) -> int:
        return self.of_size


def part(rank: int, number: int, n: int) -> bytes:
    """Return a rank's part of a round: unlike those of others, and unlike its own in another round."""
    return bytes((rank * 70 + number * 11 + at) % 256 for at in range(n))


def crash_in_sums(least: int) -> None:
    """Have this process die in each forward of at least so many tokens.

    Loading builds graphs of `UNRUN` tokens and does not run them.
    """
    import mlx.core as mx

    added = mx.distributed.all_sum

    def all_sum(array: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if array.ndim == 3 and array.shape[1] >= least and array.shape[1] not in UNRUN:
            os.kill(os.getpid(), signal.SIGSEGV)
        return added(array, *args, **kwargs)

    mx.distributed.all_sum = all_sum


def over_the_ring(gather: Gather, rank: int) -> Any:
    """A real group whose ranks find each other by one more round."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        mine = "{}:{}".format(*sock.getsockname())
    told, size = gather(mine.encode().ljust(ADDRESS_BYTES), ADDRESS_BYTES), ADDRESS_BYTES
    hosts = [[told[at : at + size].decode().strip()] for at in range(0, len(told), size)]
    assert hosts[rank] == [mine]
    import mlx.core as mx

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(hosts, file)
        file.flush()
        os.environ["MLX_HOSTFILE"] = file.name
        return mx.distributed.init(strict=True, backend="ring")


def sockets(*, connected: bool = False) -> set[int]:
    """This process's sockets by inode, because a number is soon another socket's.

    MLX's ring leaves those open whose connection was refused.
    """
    from mlxtp.engine.group import _sockets

    found = set()
    for descriptor in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as each:
            if connected:
                each.getpeername()
            found.add(os.fstat(descriptor).st_ino)
    return found


def _getenv(name: str) -> str:
    """As C sees it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value = getenv(name.encode())
    return "" if value is None else value.decode()


def _variables_of_jaccl() -> Iterator[str]:
    names = ("RANK", "IBV_DEVICES", "COORDINATOR", "RING")
    for name in (*(f"JACCL_{name}" for name in names), "MLX_JACCL_COORDINATOR", "MLX_JACCL_RING"):
        if _getenv(name):
            yield name
    if (fences := _getenv("MLX_METAL_FAST_SYNCH")) != "0":
        yield f"MLX_METAL_FAST_SYNCH={fences}"


def form_only(
    pretence: Pretence,
    process: worker.RankProcessLinks,
    _listener: socket.socket | None,
    _identity: Path | None,
) -> None:
    """The beginning of a rank's life and its end, without all that takes seconds to import."""
    from mlxtp.engine import group

    pipe, mail = process.pipe, process.mail
    pipe.send(Hello(PROTOCOL_VERSION, process.rank, os.getpid(), os.urandom(16), b""))
    process.listen_to_agent()
    bootstrap = worker._bootstrap(process)
    group.use_fast_fences(bootstrap.fast_fences)
    pipe.send(Done(jaccl=True))
    if process.rank == 0:
        assert isinstance(mail.receive(worker.AGENT, None).message, Init)
    process.status.enter("forming")
    ours = (bootstrap.rank, bootstrap.world_size)
    hears = (pipe.send, lambda wait_s: mail.receive(worker.AGENT, wait_s).message, bootstrap.round_s)
    factory = worker.SideChannelExchange(*ours, *hears).factory
    fabric = JacclFabric.of(bootstrap.rdma, bootstrap.world_size, ring=bootstrap.jaccl_ring, factory=factory)
    how: Any = {"folder": process.folder, "deadline_s": bootstrap.deadline_s, "fabric": fabric}
    how |= {"available": lambda _: True, "init": pretence}
    formed = group.form(bootstrap.backend, *ours, bootstrap.hosts, **how)
    if process.rank == 0:
        pipe.send(InitDone(formed.rank, formed.size))
    worker._await_shutdown(mail)
    pipe.send(Done())
    pipe.send(SessionEnd())


def run_whole(pretence: Pretence, rank: str, run: Callable[..., None], *args: Any) -> None:
    """All of a rank's life."""
    atexit.register(pretence.count, rank)
    from mlxtp.engine import executor, group

    group.is_available = lambda _: True
    executor.form = functools.partial(group.form, available=lambda _: True, init=pretence)
    run(*args)


def main() -> None:
    folder, *argv = sys.argv[1:]
    rank = argv[argv.index("--rank") + 1]
    fields = json.loads((Path(folder) / f"rank-{rank}.json").read_text())
    script = Script(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})
    pretence = Pretence(script, Path(folder))
    if script.fault != "stay":  # a rank that ends may take its time, however busy the machine is
        telemetry.LEAST_PATIENCE_S = worker.LEAST_PATIENCE_S = worker.EXIT_S = 60.0
    if script.whole:
        worker.run = functools.partial(run_whole, pretence, rank, worker.run)
    else:
        worker.run = functools.partial(form_only, pretence)
    worker.main(argv)


if __name__ == "__main__":
    main()
