"""The rank process: `python -m mlxtp.engine.worker`, started by an agent, for one epoch.

The main thread owns all MLX work on one stream. A reader thread for each link reads frames, replies to Pings,
and ends the process when the link breaks, even while the main thread is stuck in a collective.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ..errors import TERMINATED_STATUS, WEDGED_STATUS, Code, GroupError, LinkError, MlxtpError, exit_status
from ..wire import messages as msg
from ..wire.blocking import BlockingLink
from ..wire.rank_process import FREE_S, take_over
from ..wire.session import LinkKind, LinkState, Received, Session, Side
from .decode_links import open_links
from .jaccl import SideChannelExchange
from .mailbox import AGENT, DISK, LEADER, SIGNALS, KeepWarm, Mailbox, Terminated, read_in_background
from .mlx_compat import code_of, import_mlx_lm
from .telemetry import LEAST_PATIENCE_S, RankTelemetry, Recorder

if TYPE_CHECKING:
    from .executor import RankExecutor

# --- warm start: import everything before the rank's arguments arrive ------------------------------------
# Nothing here may depend on an epoch, form a group, or touch the GPU. MLX reads its environment at its
# first use, and `Bootstrap` sets some of it.

#: Modules that every rank imports; they take nearly all of its start.
_IMPORTS = (
    *(f"mlxtp.engine.{name}" for name in ("group", "logit_shaping", "executor", "decode_loop", "serve_loop")),
    "mlx_lm.models.llama",
)


def told(argv: Sequence[str]) -> list[str]:
    """Return `argv`, or with `--spare-fd FD`, the arguments that arrive at FD, which becomes the pipe."""
    if argv[:1] != ["--spare-fd"]:
        return list(argv)
    import_mlx_lm()
    for name in _IMPORTS:
        importlib.import_module(name)
    sock = socket.socket(fileno=int(argv[1]))
    taken = take_over(sock)
    sock.detach()
    if taken is None:
        sys.exit()
    arguments, listener = taken
    return [*arguments, *(() if listener is None else ("--listen-fd", str(listener)))]


# --- the rank --------------------------------------------------------------------------------------------
PIPE_STALL_S = 60.0  #: Seconds to wait for an agent that does not read but may continue.
REPORT_S = 5.0  #: Seconds to report a failure on every link.
EXIT_S = 2.0  #: Seconds for exit functions. JACCL's waits for no other rank.
FORMING_S = 3.0  #: Seconds to leave a forming group once another rank is lost.
_LAST = contextlib.ExitStack()  # closed at the very end of the interpreter
_CACHE = type(cache(lambda: None))


@dataclass(eq=False, repr=False)
class RankProcessLinks:
    """Links of this process, and its only exit: `leave`, on the main thread. Other threads interrupt that
    thread like SIGTERM does, or end the process if it does not return.
    """

    rank: int
    epoch: int
    folder: Path
    pipe: BlockingLink
    status: RankTelemetry

    mail: Mailbox = field(default_factory=Mailbox)
    memory: RankExecutor | None = None  # the rank, to free its memory
    obeying: bool = False  # this rank is executing rank 0's frames
    keeps_warm: bool = False  # give an idle GPU small work
    _decode: list[BlockingLink] = field(default_factory=list)
    _reporting: threading.Lock = field(default_factory=threading.Lock)
    _exit_status: int = 0  # of the reported failure; 0 for none
    _finishes: bool = False  # another rank has reported that it ends after its forwards
    _lost: bool = False  # a link to another rank has ended without that report
    _leaving: threading.Event = field(default_factory=threading.Event)

    def report(self, error: MlxtpError) -> int:
        """Report the first failure on every link, from any thread; return its exit status."""
        if self._reporting.acquire(blocking=False):
            self._exit_status = exit_status(error.code)
            self.status.recorder.last_words(error.code, error.detail)
            word = msg.Error(error.code, error.detail, 0)  # not the error, whose traceback holds the model
            telling = threading.Thread(target=self._tell, args=(word,), daemon=True)
            telling.start()
            telling.join(REPORT_S)
        return self._exit_status

    def _tell(self, word: msg.Error) -> None:
        for link in (self.pipe, *self._decode):
            # If a link is broken or not open yet, its peer notices the end.
            with contextlib.suppress(MlxtpError, OSError):
                link.send(word)

    def abort(self, error: MlxtpError) -> None:
        if self._exit_status:
            return
        self.report(error)
        # Signal the main thread itself: a signal to the process may wake another thread.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _over(self) -> None:
        self._lost = not self._finishes
        patience_s = LEAST_PATIENCE_S if self._finishes else 0.0
        if self.status.phase == "forming":  # with JACCL, SIGTERM ends the wait for addresses
            patience_s = FORMING_S
        if self._exit_status and self.status.in_collective and not self._leaving.wait(patience_s):
            os._exit(self._exit_status)

    def terminate(self, _signal: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM after all frames in the mailbox: rank 0 runs them, too, and waits for this rank."""
        if self.obeying and self.status.phase in ("prefill", "decode", "idle"):
            self.mail.post(LEADER, Terminated)
        else:
            raise Terminated

    def leave(self, status: int = 0, *, wait: bool = True) -> NoReturn:
        """Free memory on the main thread, then exit without destructors that could wait for other ranks."""
        self._leaving.set()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        status = self._exit_status or status
        over_rdma = False
        try:
            if self.memory is not None:
                if wait and not self._lost:
                    with contextlib.suppress(RuntimeError), _at_most(self.status.in_flight_s(), status):
                        self.memory.finish()
                with _at_most(FREE_S, status):
                    self.memory.give_back()
                over_rdma = self.memory.bootstrap.backend == "jaccl"
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            if not over_rdma:
                os._exit(status)
        self._leave_devices(status)

    def _leave_devices(self, status: int) -> NoReturn:
        """Exit through MLX's exit functions. They hold the GIL, so an alarm ends the process if one hangs."""
        for each in gc.get_objects():
            if isinstance(each, _CACHE):  # layers of MLX cache functions by group
                each.cache_clear()
        _LAST.callback(os._exit, status)
        _LAST.callback(self.status.recorder.gave_back)  # called first
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, EXIT_S)
        sys.exit(status)

    def end_when_wedged(self) -> None:
        heard, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.detach(), warn_on_full_buffer=False)

        def wait() -> None:
            while heard.recv(1) != bytes([signal.SIGTERM]):
                pass
            # The signal may have come just before the main thread began to wait.
            self.mail.post(SIGNALS, None)
            if not self._leaving.wait(self.status.patience_s()):
                os._exit(self._exit_status or WEDGED_STATUS)

        threading.Thread(target=wait, name="end-when-wedged", daemon=True).start()

    def listen_to_agent(self) -> None:
        def deliver(received: Received) -> None:
            if isinstance(received.message, msg.Ping):
                with contextlib.suppress(LinkError):  # this rank may just have sent its last message
                    self.pipe.send(self.status.pong())
            else:
                self.mail.post(AGENT, received)

        read_in_background(self.pipe, AGENT, deliver, self.abort)

    def listen_to_rank(self, link: BlockingLink, rank: int) -> None:
        self._decode.append(link)

        def deliver(received: Received) -> None:
            if isinstance(received.message, msg.Error) and link.protocol.state is LinkState.FAILED:
                detail = received.message.detail
                detail = detail if detail.startswith("rank ") else f"rank {rank}: {detail}"
                code = Code(received.message.code)
                self._finishes = code is Code.DESYNC
                self.abort(GroupError(detail, code))
            elif isinstance(received.message, msg.FetchedBlocks):  # it arrives between Acks
                self.mail.post(DISK, (rank, received.message))
            else:
                self.mail.post(rank, received)

        read_in_background(link, rank, deliver, self.abort, self._over)


@contextlib.contextmanager
def _at_most(seconds: float, status: int) -> Iterator[None]:
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run(process: RankProcessLinks, listener: socket.socket | None, identity: Path | None) -> None:
    pipe, mail = process.pipe, process.mail
    pipe.send(msg.Hello(msg.PROTOCOL_VERSION, process.rank, os.getpid(), os.urandom(16), b""))
    process.listen_to_agent()
    # Importing MLX takes a second; by now, the agent knows this rank.
    import mlx.core as mx

    from .group import CollectiveCounter, is_available, use_fast_fences, use_large_buffers

    bootstrap = _bootstrap(process)
    use_fast_fences(bootstrap.fast_fences)
    if bootstrap.large_buffers:
        use_large_buffers()
    links = open_links(process.epoch, bootstrap, listener, identity)
    for other, link in links.items():
        process.listen_to_rank(link, other)
    counter = CollectiveCounter()
    counter.install()
    from .executor import RankExecutor, gpu_bytes
    from .logit_shaping import RequestShaping
    from .sampler import LogitShaping

    shaping, ours = RequestShaping(), (bootstrap.rank, bootstrap.world_size, pipe.send)
    rank = RankExecutor(
        bootstrap,
        process.epoch,
        process.folder,
        process.status,
        counter,
        shaping=LogitShaping() if process.rank else shaping,
        exchange=SideChannelExchange(*ours, lambda s: mail.receive(AGENT, s).message, bootstrap.round_s),
        post=partial(mail.post, DISK),
    )
    process.memory = rank
    import_mlx_lm()  # while no client waits for a token

    if process.keeps_warm and mx.metal.is_available():  # only Metal unwires weights
        mail.warm = KeepWarm(mail, lambda: rank.loaded is not None)
    pipe.send(msg.Done(jaccl=is_available("jaccl"), gpu_bytes=gpu_bytes()))
    process.status.enter("idle")
    if process.rank == 0:
        from .decode_loop import DecodeLoop, Followers

        DecodeLoop(rank, mail, pipe, Followers(links, mail), shaping).run()
    else:
        from .serve_loop import ServeLoop

        process.obeying = True
        ServeLoop(rank, mail, links[0]).run()
        process.obeying = False
        _await_shutdown(mail)
    pipe.send(msg.Done())
    pipe.send(msg.SessionEnd())


def _bootstrap(process: RankProcessLinks) -> msg.Bootstrap:
    while not isinstance(message := process.mail.receive(AGENT, None).message, msg.Bootstrap):
        if isinstance(message, msg.Shutdown):
            process.pipe.send(msg.Done())
            process.pipe.send(msg.SessionEnd())
            process.leave()
    return message


def _await_shutdown(mail: Mailbox) -> None:
    while not ((received := mail.take(AGENT)) and isinstance(received.message, msg.Shutdown)):
        while mail.take(LEADER):  # a SIGTERM may have followed rank 0's Shutdown
            pass
        mail.wait(of=(AGENT, LEADER))


# --- the process ------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Run a rank process. Exits with 0, TERMINATED_STATUS, WEDGED_STATUS or the `exit_status` of an error."""
    if sys.platform == "linux":  # the kernel ends this process with its agent; on macOS, the pipe's end does
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    atexit.register(_LAST.close)  # before importing MLX: functions registered first run last
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the agent decides
    parser = argparse.ArgumentParser(prog="mlxtp.engine.worker", description="One rank; started by an agent.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for files that live as long as the epoch")
    parser.add_argument("--pipe-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int)
    parser.add_argument("--recorder", type=Path, help="a file that is memory for the flight recorder")
    parser.add_argument("--identity", type=Path, help="folder of this node's key and certificate")
    parser.add_argument("--keep-warm", action="store_true", help="give an idle GPU small work")
    args = parser.parse_args(told(sys.argv[1:] if argv is None else argv))
    recorder = Recorder() if args.recorder is None else Recorder.at(args.recorder)
    kind = LinkKind.PIPE_LEADER if args.rank == 0 else LinkKind.PIPE
    sock = socket.socket(fileno=args.pipe_fd)
    pipe = BlockingLink(sock, Session(kind, Side.LOWER, args.epoch), PIPE_STALL_S)
    status = RankTelemetry(recorder)
    process = RankProcessLinks(args.rank, args.epoch, args.folder, pipe, status, keeps_warm=args.keep_warm)
    signal.signal(signal.SIGTERM, process.terminate)
    recorder.catch_crashes()
    process.end_when_wedged()
    listener = socket.socket(fileno=args.listen_fd) if args.listen_fd is not None else None
    outcome, wait = TERMINATED_STATUS, True
    with contextlib.suppress(Terminated):
        outcome, wait = _run_or_fail(process, listener, args.identity)
    # By now, no frame or traceback of the run refers to the model.
    process.leave(outcome, wait=wait)


def _run_or_fail(
    process: RankProcessLinks, listener: socket.socket | None, identity: Path | None
) -> tuple[int, bool]:
    try:
        run(process, listener, identity)
    except MlxtpError as error:
        return process.report(error), not isinstance(error, LinkError)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the process boundary: every error must be reported to the group
        code = code_of(error, Code.FORWARD_FAILED)
        what = " ran out of memory" if code is Code.OUT_OF_MEMORY else ""
        words = f"rank {process.rank}{what}: {type(error).__name__}: {error}"
        return process.report(GroupError(words, code)), False
    return 0, True


if __name__ == "__main__":
    main()
