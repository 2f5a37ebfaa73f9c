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
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ..errors import TERMINATED_STATUS, WEDGED_STATUS, Code, GroupError, LinkError, MlxtpError, exit_status
from ..wire.link import Link
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
from ..wire.protocol import LinkKind, Protocol, Received, Side, State
from .decode_links import SEND_TIMEOUT_S, open_links
from .jaccl import Exchange
from .mail import AGENT, Mailbox, read_in_background
from .recorder import Recorder
from .spare import import_all, wait_for_arguments
from .status import Status

TERM_PATIENCE_S = 1.0
"""How long the main thread may take to hear SIGTERM. The agent's patience is a little longer."""


class Terminated(BaseException):
    """SIGTERM: the step that runs is finished, then the process ends."""


class Process:
    """The links of this process and its one way out."""

    def __init__(self, rank: int, epoch: int, folder: Path, pipe: Link, recorder: Recorder) -> None:
        self.rank = rank
        self.epoch = epoch
        self.folder = folder
        self.pipe = pipe
        self.mail = Mailbox()
        self.status = Status(recorder)
        self._decode: list[Link] = []
        self._ending = threading.Lock()

    def fail(self, error: MlxtpError) -> None:
        """Any thread: say on every link what happened, then end. The first caller wins; does not return."""
        self._ending.acquire()
        try:
            self.status.recorder.last_words(error.code, error.detail)
            for link in (self.pipe, *self._decode):
                # What cannot be told to a link that is broken or not open yet is seen there as its end.
                with contextlib.suppress(MlxtpError, OSError):
                    link.send(Error(error.code, error.detail, 0))
        finally:
            os._exit(exit_status(error.code))  # a SIGTERM that comes now changes nothing

    def leave(self, status: int = 0) -> None:
        """End without running destructors that could wait for other ranks."""
        self._ending.acquire()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def end_when_wedged(self) -> None:
        """Start the thread that ends this process when the main thread does not hear SIGTERM: it waits in a
        forward whose other rank is gone, where no signal handler runs."""
        heard, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.detach(), warn_on_full_buffer=False)

        def wait() -> None:
            while heard.recv(1) != bytes([signal.SIGTERM]):
                pass
            heard.settimeout(TERM_PATIENCE_S)
            with contextlib.suppress(TimeoutError):
                while heard.recv(1):
                    pass
            os._exit(WEDGED_STATUS)

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

    def listen_to_rank(self, link: Link, rank: int) -> None:
        """Start reading a decode link. A rank that reports its own end ends this process too."""
        self._decode.append(link)

        def deliver(received: Received) -> None:
            if isinstance(received.message, Error) and link.protocol.state is State.FAILED:
                self.fail(GroupError(f"rank {rank}: {received.message.detail}", Code(received.message.code)))
            self.mail.post(rank, received)

        read_in_background(link, rank, deliver, self.fail)


def run(process: Process, listener: socket.socket | None, identity: Path | None) -> None:
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
    from .choice import NoDesk
    from .desk import RequestDesk
    from .light_import import import_mlx_lm
    from .rank import Rank

    desk = RequestDesk()
    rank = Rank(
        bootstrap,
        process.epoch,
        process.folder,
        process.status,
        counter,
        desk=NoDesk() if process.rank else desk,
        exchange=_exchange(process, bootstrap),
    )
    import_mlx_lm()  # now nobody waits for a token

    pipe.send(Done(jaccl=is_available("jaccl")))
    process.status.enter("idle")
    if process.rank == 0:
        from .decode_loop import DecodeLoop
        from .followers import Followers

        DecodeLoop(rank, mail, pipe, Followers(links, mail), desk).run()
    else:
        from .serve_loop import ServeLoop

        ServeLoop(rank, mail, links[0]).run()
        _await_shutdown(mail)
    pipe.send(Done())
    pipe.send(SessionEnd())


def _bootstrap(process: Process) -> Bootstrap:
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


def _exchange(process: Process, bootstrap: Bootstrap) -> Exchange:
    def receive(timeout_s: float) -> Message:
        message: Message = process.mail.receive(AGENT, timeout_s).message
        return message

    return Exchange(bootstrap.rank, bootstrap.world_size, process.pipe.send, receive, bootstrap.round_s)


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
    signal.signal(signal.SIGTERM, _on_sigterm)
    recorder = Recorder() if args.recorder is None else Recorder.at(args.recorder)
    recorder.catch_crashes()
    kind = LinkKind.PIPE_LEADER if args.rank == 0 else LinkKind.PIPE
    sock = socket.socket(fileno=args.pipe_fd)
    pipe = Link(sock, Protocol(kind, Side.LOWER, args.epoch), SEND_TIMEOUT_S)
    process = Process(args.rank, args.epoch, args.folder, pipe, recorder)
    process.end_when_wedged()
    listener = socket.socket(fileno=args.listen_fd) if args.listen_fd is not None else None
    try:
        _run_or_fail(process, listener, args.identity)
    except Terminated:
        process.leave(TERMINATED_STATUS)
    process.leave()


def _run_or_fail(process: Process, listener: socket.socket | None, identity: Path | None) -> None:
    try:
        run(process, listener, identity)
    except MlxtpError as error:
        process.fail(error)
    except MemoryError:
        process.fail(GroupError(f"rank {process.rank} ran out of memory", Code.OUT_OF_MEMORY))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the process boundary: whatever it is, the group must hear of it
        process.fail(GroupError(f"rank {process.rank}: {type(error).__name__}: {error}", Code.FORWARD_FAILED))


def _on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated


def _die_with_parent() -> None:
    """On Linux, ask the kernel to end this process with its agent, even while MLX holds the GIL.

    macOS has no such call: there the end of the pipe does it, and the alarm around the group's forming.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
