"""The rank process: `python -m mlxtp.engine.worker`, started by an agent, for one epoch.

The main thread owns all MLX work on one stream. One reader thread for each link takes frames off its socket,
answers Pings, and ends the process when the link breaks, which works even while the main thread is stuck
in a collective whose peer is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn
from typing import Protocol as Interface

from ..errors import TERMINATED_STATUS, WEDGED_STATUS, Code, GroupError, LinkError, MlxtpError, exit_status
from ..wire.blocking import BlockingLink
from ..wire.exit_timeouts import FREE_S
from ..wire.messages import (
    PROTOCOL_VERSION,
    Bootstrap,
    Done,
    Error,
    Hello,
    Message,
    Ping,
    SessionEnd,
    Shutdown,
)
from ..wire.session import LinkKind, LinkState, Received, Session, Side
from .decode_links import open_links
from .jaccl import SideChannelExchange
from .mailbox import AGENT, LEADER, Mailbox, Terminated, read_in_background
from .mlx_errors import code_of
from .recorder import Recorder
from .telemetry import LEAST_PATIENCE_S, RankTelemetry
from .warm_rank import import_all, wait_for_arguments

PIPE_STALL_S = 60.0
"""Seconds that rank 0 waits for an agent that does not read. One that stands still comes back; the end of
one is seen at once."""
REPORT_S = 5.0
"""Seconds that the report of a failure to every link may take: an agent that stands still must not hold up
the end."""


class MemoryHolder(Interface):
    """The holder of a rank's memory."""

    def finish(self) -> None: ...

    def give_back(self) -> None: ...


class RankProcessLinks:
    """The links of this process and its one way out: `leave`, on the main thread, which gives memory back.

    A failure that another thread finds ends the main thread as SIGTERM does. Where the main thread does not
    come back, the process ends without it.
    """

    def __init__(self, rank: int, epoch: int, folder: Path, pipe: BlockingLink, recorder: Recorder) -> None:
        self.rank = rank
        self.epoch = epoch
        self.folder = folder
        self.pipe = pipe
        self.mail = Mailbox()
        self.status = RankTelemetry(recorder)
        self.memory: MemoryHolder | None = None
        """The rank, once there is one."""
        self._decode: list[BlockingLink] = []
        self._reporting = threading.Lock()
        self._exit_status = 0
        """That of the failure that was reported; 0 for none."""
        self.obeying = False
        """True while frames of rank 0 are taken."""
        self._finishes = False
        """True once another rank has said that it ends, but not before its forwards."""
        self._lost = False
        """True once the link to another rank is over that has not said so."""
        self._leaving = threading.Event()

    def report(self, error: MlxtpError) -> int:
        """Any thread: report the failure on every link. Only the first report counts.

        Returns the exit status for it.
        """
        if self._reporting.acquire(blocking=False):
            self._exit_status = exit_status(error.code)
            self.status.recorder.last_words(error.code, error.detail)
            word = Error(error.code, error.detail, 0)  # not the error itself, whose traceback holds the model
            telling = threading.Thread(target=self._tell, args=(word,), daemon=True)
            telling.start()
            telling.join(REPORT_S)
        return self._exit_status

    def _tell(self, word: Error) -> None:
        for link in (self.pipe, *self._decode):
            # What cannot be told to a link that is broken or not open yet is seen there as its end.
            with contextlib.suppress(MlxtpError, OSError):
                link.send(word)

    def fail(self, error: MlxtpError) -> None:
        """Any thread but the main one: report the failure and end the main thread, unless it ends already."""
        if self._exit_status:
            return
        self.report(error)
        # To that thread itself: a signal to the process does not wake it where another thread gets it.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _over(self) -> None:
        """Another rank's link is over. After a failure, a main thread that waits for that rank will not come
        back, so the process ends without it: at once, unless that rank has finished its forwards."""
        self._lost = not self._finishes
        patience_s = LEAST_PATIENCE_S if self._finishes else 0.0
        if self._exit_status and self.status.in_collective and not self._leaving.wait(patience_s):
            os._exit(self._exit_status)

    def terminate(self, _signal: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM. Frames that are here come first: rank 0 runs them, too, and waits for this rank."""
        if self.obeying and self.status.phase in ("prefill", "decode", "idle"):
            self.mail.post(LEADER, Terminated)
        else:
            raise Terminated

    def leave(self, status: int = 0, *, wait: bool = True) -> NoReturn:
        """Main thread: give memory back, then end without destructors that could wait for other ranks.

        Forwards in flight are waited for first, unless they can have no end: without `wait`, or when another
        rank is gone.
        """
        self._leaving.set()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        status = self._exit_status or status
        try:
            if self.memory is not None:
                if wait and not self._lost:
                    with contextlib.suppress(RuntimeError), _at_most(self.status.in_flight_s(), status):
                        self.memory.finish()
                with _at_most(FREE_S, status):
                    self.memory.give_back()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def end_when_wedged(self) -> None:
        """Start the thread that ends this process when the main thread does not come back after SIGTERM: it
        waits in a forward whose other rank is gone, where no signal handler runs."""
        heard, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.detach(), warn_on_full_buffer=False)

        def wait() -> None:
            while heard.recv(1) != bytes([signal.SIGTERM]):
                pass
            if not self._leaving.wait(self.status.patience_s()):
                os._exit(self._exit_status or WEDGED_STATUS)

        threading.Thread(target=wait, name="end-when-wedged", daemon=True).start()

    def listen_to_agent(self) -> None:
        """Start reading the pipe. Without the agent this process has no reason to be."""

        def deliver(received: Received) -> None:
            if isinstance(received.message, Ping):
                with contextlib.suppress(LinkError):  # this end may just have said its last word
                    self.pipe.send(self.status.pong())
            else:
                self.mail.post(AGENT, received)

        read_in_background(self.pipe, AGENT, deliver, self.fail)

    def listen_to_rank(self, link: BlockingLink, rank: int) -> None:
        """Start reading a decode link. A rank that reports its own end ends this process too."""
        self._decode.append(link)

        def deliver(received: Received) -> None:
            if isinstance(received.message, Error) and link.protocol.state is LinkState.FAILED:
                detail = received.message.detail
                detail = detail if detail.startswith("rank ") else f"rank {rank}: {detail}"
                code = Code(received.message.code)
                self._finishes = code is Code.DESYNC
                self.fail(GroupError(detail, code))
            else:
                self.mail.post(rank, received)

        read_in_background(link, rank, deliver, self.fail, self._over)


@contextlib.contextmanager
def _at_most(seconds: float, status: int) -> Iterator[None]:
    """End the process with `status` when the block takes longer."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run(process: RankProcessLinks, listener: socket.socket | None, identity: Path | None) -> None:
    """From the first Hello to the last SessionEnd."""
    pipe, mail = process.pipe, process.mail
    pipe.send(Hello(PROTOCOL_VERSION, process.rank, os.getpid(), os.urandom(16), b""))
    process.listen_to_agent()
    # imports MLX: a second during which the agent can already see us
    from .group import CollectiveCounter, is_available, use_fast_fences

    bootstrap = _bootstrap(process)
    use_fast_fences(bootstrap.fast_fences)
    links = open_links(process.epoch, bootstrap, listener, identity)
    for other, link in links.items():
        process.listen_to_rank(link, other)
    counter = CollectiveCounter()
    counter.install()
    from .agreement import NoLogitShaping
    from .executor import RankExecutor
    from .logit_shaping import RequestShaping
    from .mlx_lm_shim import import_mlx_lm

    shaping = RequestShaping()
    rank = RankExecutor(
        bootstrap,
        process.epoch,
        process.folder,
        process.status,
        counter,
        shaping=NoLogitShaping() if process.rank else shaping,
        exchange=_exchange(process, bootstrap),
    )
    process.memory = rank
    import_mlx_lm()  # now nobody waits for a token

    pipe.send(Done(jaccl=is_available("jaccl")))
    process.status.enter("idle")
    if process.rank == 0:
        from .decode_loop import DecodeLoop
        from .followers import Followers

        DecodeLoop(rank, mail, pipe, Followers(links, mail), shaping).run()
    else:
        from .serve_loop import ServeLoop

        process.obeying = True
        ServeLoop(rank, mail, links[0]).run()
        process.obeying = False
        _await_shutdown(mail)
    pipe.send(Done())
    pipe.send(SessionEnd())


def _bootstrap(process: RankProcessLinks) -> Bootstrap:
    while True:
        if received := process.mail.take(AGENT):
            if isinstance(received.message, Bootstrap):
                return received.message
            if isinstance(received.message, Shutdown):
                process.pipe.send(Done())
                process.pipe.send(SessionEnd())
                process.leave()
        else:
            process.mail.wait()


def _exchange(process: RankProcessLinks, bootstrap: Bootstrap) -> SideChannelExchange:
    def receive(timeout_s: float) -> Message:
        message: Message = process.mail.receive(AGENT, timeout_s).message
        return message

    return SideChannelExchange(
        bootstrap.rank, bootstrap.world_size, process.pipe.send, receive, bootstrap.round_s
    )


def _await_shutdown(mail: Mailbox) -> None:
    while not ((received := mail.take(AGENT)) and isinstance(received.message, Shutdown)):
        mail.wait()


# --- the process ------------------------------------------------------------------------------------


def told(argv: Sequence[str]) -> list[str]:
    """The arguments of a rank: `argv`, or, for a spare (`--spare-fd FD`), what it is told some day."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--spare-fd", type=int)
    fd = parser.parse_known_args(argv)[0].spare_fd
    if fd is None:
        return list(argv)
    import_all()
    return wait_for_arguments(fd)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry. Exits with 0 after an orderly end, otherwise with the `exit_status` of what happened, after
    SIGTERM with TERMINATED_STATUS or WEDGED_STATUS."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the agent decides
    parser = argparse.ArgumentParser(prog="mlxtp.engine.worker", description="One rank; started by an agent.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for files that live as long as the epoch")
    parser.add_argument("--pipe-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int)
    parser.add_argument("--recorder", type=Path, help="a file that is memory for the flight recorder")
    parser.add_argument("--identity", type=Path, help="folder of this node's key and certificate")
    args = parser.parse_args(told(sys.argv[1:] if argv is None else argv))
    recorder = Recorder() if args.recorder is None else Recorder.at(args.recorder)
    recorder.catch_crashes()
    kind = LinkKind.PIPE_LEADER if args.rank == 0 else LinkKind.PIPE
    sock = socket.socket(fileno=args.pipe_fd)
    pipe = BlockingLink(sock, Session(kind, Side.LOWER, args.epoch), PIPE_STALL_S)
    process = RankProcessLinks(args.rank, args.epoch, args.folder, pipe, recorder)
    signal.signal(signal.SIGTERM, process.terminate)
    process.end_when_wedged()
    listener = socket.socket(fileno=args.listen_fd) if args.listen_fd is not None else None
    status, wait = TERMINATED_STATUS, True
    with contextlib.suppress(Terminated):
        status, wait = _run_or_fail(process, listener, args.identity)
    # No frame of the run is left by now, nor an error that holds one, so that nothing else holds the model.
    process.leave(status, wait=wait)


def _run_or_fail(
    process: RankProcessLinks, listener: socket.socket | None, identity: Path | None
) -> tuple[int, bool]:
    """Run; returns the exit status, and whether forwards that are in flight may still end."""
    try:
        run(process, listener, identity)
    except MlxtpError as error:
        return process.report(error), not isinstance(error, LinkError)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the process boundary: whatever it is, the group must hear of it
        code = code_of(error, Code.FORWARD_FAILED)
        what = " ran out of memory" if code is Code.OUT_OF_MEMORY else ""
        words = f"rank {process.rank}{what}: {type(error).__name__}: {error}"
        return process.report(GroupError(words, code)), False
    return 0, True


def _die_with_parent() -> None:
    """On Linux, ask the kernel to end this process with its agent, even while MLX holds the GIL.

    macOS has no such call: there the end of the pipe does it, and the alarm around the group's forming.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
