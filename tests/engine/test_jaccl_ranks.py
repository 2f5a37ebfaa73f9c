"""Real rank processes whose pretended JACCL forms through their pipes; the hub between them is the agent's.

The hub's time is a number that the test names, so no test waits for a deadline.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from mlxtp.diagnostics.failure_store import recording_file
from mlxtp.engine.mailbox import Mailbox, read_in_background
from mlxtp.errors import TERMINATED_STATUS, Code, GroupError, LinkError, exit_status
from mlxtp.groups.health import RoundReplies, SideChannelHub
from mlxtp.placement.faults import explain
from mlxtp.wire.blocking import BlockingLink, listen
from mlxtp.wire.messages import (
    PROTOCOL_VERSION,
    Bootstrap,
    Done,
    Error,
    Hello,
    Init,
    InitDone,
    LoadShard,
    Ping,
    Pong,
    SanityCheck,
    SanityDone,
    SessionEnd,
    Shutdown,
    SideChannel,
    Welcome,
    epoch_digest,
)
from mlxtp.wire.recording import gave_back
from mlxtp.wire.session import LinkKind, Session, Side

from ..live_cluster import WAIT_S
from .jaccl_worker import SIZES, Script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EPOCH = 7
KEY = b"k" * 32
ERRNO_22 = "jaccl did not form: [jaccl] Changing queue pair to RTR failed with errno 22"
M = TypeVar("M")


class Ranks:
    """The processes of one epoch, one for each script, and the agent's end of their pipes."""

    def __init__(self, folder: Path, *scripts: Script, **bootstrap: Any) -> None:
        self.folder = folder
        self.size = len(scripts)
        self.hub = SideChannelHub(self.size)
        self.links: list[BlockingLink] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._mail = Mailbox()
        with listen("127.0.0.1") as listener:
            for rank, script in enumerate(scripts):
                self._spawn(rank, script, listener if rank == 0 else None)
            address = "{}:{}".format(*listener.getsockname())
        for rank, link in enumerate(self.links):
            assert self.hear(rank, Hello).rank == rank
            link.send(Welcome(PROTOCOL_VERSION, b""))
            link.send(self._bootstrap(rank, address, bootstrap))
        for rank in range(self.size):
            assert self.hear(rank, Done).jaccl
        self.links[0].send(Init())

    def _spawn(self, rank: int, script: Script, listener: socket.socket | None) -> None:
        (self.folder / f"rank-{rank}.json").write_text(json.dumps(dataclasses.asdict(script)))
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno()] + ([listener.fileno()] if listener else [])
        command = [sys.executable, "-m", "tests.engine.jaccl_worker", str(self.folder)]
        command += ["--rank", str(rank), "--epoch", str(EPOCH), "--pipe-fd", str(theirs.fileno())]
        recording = self.folder / f"rank-{rank}.recording"
        os.close(recording_file(recording))
        command += ["--folder", str(self.folder), "--recorder", str(recording)]
        command += ["--listen-fd", str(listener.fileno())] if listener else []
        misleading = {"JACCL_RANK": "5", "JACCL_IBV_DEVICES": "/nowhere", "JACCL_RING": "1"}
        misleading |= {"MLX_JACCL_COORDINATOR": "10.0.0.1:1", "MLX_METAL_FAST_SYNCH": "1"}
        misleading |= {"MLX_JACCL_RING": ""}
        with theirs:
            self.processes.append(
                subprocess.Popen(command, cwd=ROOT, pass_fds=fds, env=os.environ | misleading)
            )
        kind = LinkKind.PIPE_LEADER if rank == 0 else LinkKind.PIPE
        link = BlockingLink(ours, Session(kind, Side.UPPER, EPOCH), WAIT_S)
        self.links.append(link)
        read_in_background(
            link,
            rank,
            lambda received: self._mail.post(rank, received.message),
            lambda error: self._mail.post(rank, error),
        )

    def _bootstrap(self, rank: int, address: str, fields: dict[str, Any]) -> Bootstrap:
        rdma = tuple(f"rdma_en{p}" if p != r else "" for r in range(self.size) for p in range(self.size))
        usual = Bootstrap(rank, self.size, "jaccl", (), address, KEY, WAIT_S, WAIT_S, 1, rdma=rdma)
        return dataclasses.replace(usual, **{"round_s": WAIT_S, **fields})

    def hear(self, rank: int, kind: type[M]) -> M:
        """The next thing that rank says, which is of this kind."""
        said = self._mail.receive(rank, WAIT_S)
        assert isinstance(said, kind), said
        return said

    def take_part(self, rank: int) -> None:
        """Its part of a round reaches the hub, and what the hub says to that reaches whom it is for."""
        self.tell(self.hub.receive(rank, self.hear(rank, SideChannel)))

    def go_rounds(self, count: int) -> None:
        for _ in range(count):
            for rank in reversed(range(self.size)):
                self.take_part(rank)

    def tell(self, answers: RoundReplies) -> None:
        for rank, answer in answers:
            with suppress(LinkError):  # gone, which its reader has reported
                self.links[rank].send(answer)

    def fails(self, rank: int, code: Code) -> str:
        """Return that rank's own reason before it exits with the status that names the reason."""
        error = self.hear(rank, Error)
        assert error.code == code, error
        assert self.processes[rank].wait(WAIT_S) == exit_status(code)
        return error.detail

    def form(self) -> None:
        """Have whole ranks form and prove their group."""
        self.go_rounds(len(SIZES) + 1)  # one for the ring
        self.hear(0, InitDone)
        self.links[0].send(SanityCheck())
        self.hear(0, SanityDone)

    def gave_back(self, rank: int) -> bool:
        """True if that rank has ended and says so. Then nothing of its group is left."""
        self.processes[rank].wait(WAIT_S)
        said = gave_back((self.folder / f"rank-{rank}.recording").read_bytes())
        left = self.folder / f"left-{rank}"
        assert not said or left.read_text() == "0"
        return said

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for link in self.links:
            link.close()


@contextmanager
def ranks(folder: Path, *scripts: Script, **bootstrap: Any) -> Iterator[Ranks]:
    group = Ranks(folder, *scripts, **bootstrap)
    try:
        yield group
    finally:
        group.close()


def test_two_ranks_form_prove_themselves_and_leave(tmp_path: Path) -> None:
    """Whole rank processes; MLX's ring stands in for RDMA, so the proof by value is real."""
    script = Script(whole=True, variables=("MLX_JACCL_RING",))
    with ranks(tmp_path, script, script, jaccl_ring=True) as group:
        first = [group.hear(rank, SideChannel) for rank in range(2)]
        for rank, link in enumerate(group.links):
            link.send(Ping())
            assert group.hear(rank, Pong).phase == "forming", "a rank that waits for a round still answers"
        for rank in range(2):
            group.tell(group.hub.receive(rank, first[rank]))
        group.go_rounds(len(SIZES))  # all but the first, and one for the ring
        assert group.hear(0, InitDone) == InitDone(0, 2)
        group.links[0].send(SanityCheck())
        assert group.hear(0, SanityDone) == SanityDone(2, (0, 1), epoch_digest(KEY, EPOCH))
        assert not [path for path in tmp_path.iterdir() if not path.name.startswith("rank-")]
        for rank, link in enumerate(group.links):
            link.send(Shutdown())
            group.hear(rank, Done)
            group.hear(rank, SessionEnd)
        assert [process.wait(WAIT_S) for process in group.processes] == [0, 0]


def test_three_ranks_get_the_same_bytes_in_rank_order(tmp_path: Path) -> None:
    with ranks(tmp_path, Script(), Script(), Script()) as group:
        group.go_rounds(len(SIZES))
        assert group.hear(0, InitDone) == InitDone(0, 3)


def test_a_late_rank_ends_it_for_all_and_for_itself_when_it_comes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    with ranks(tmp_path, Script(), Script("wait", at=2)) as group:
        group.go_rounds(1)
        group.take_part(0)
        group.tell(group.hub.late())
        words = f"rank 1 did not come to round 2 of JACCL's side channel within {group.hub.ROUND_S:g} s"
        assert group.fails(0, Code.FORM_FAILED) == words
        (tmp_path / "gate").write_text("")
        group.take_part(1)
        assert group.fails(1, Code.FORM_FAILED) == words


def test_a_dead_rank_ends_it_for_the_other(tmp_path: Path) -> None:
    with ranks(tmp_path, Script("retry"), Script("die", at=2)) as group:
        group.go_rounds(1)
        assert group.hear(1, GroupError).code is Code.RANK_LOST
        group.tell(group.hub.abort("rank 1 was ended by signal 9"))
        group.take_part(0)  # whether it came before or after, it is told once
        assert group.fails(0, Code.FORM_FAILED) == "rank 1 was ended by signal 9"


@pytest.mark.parametrize("at", [1, 3])
def test_a_rank_whose_jaccl_fails_says_so_and_the_other_hears_of_it(tmp_path: Path, at: int) -> None:
    """Before the first round, as where a device is missing, and after the second, as with a wrong cable."""
    with ranks(tmp_path, Script(), Script("raise", at=at)) as group:
        group.go_rounds(at - 1)
        reason = group.fails(1, Code.FORM_FAILED)
        assert reason == f"rank 1: {ERRNO_22}"
        group.tell(group.hub.abort(reason))
        group.take_part(0)
        assert group.fails(0, Code.FORM_FAILED) == reason
        assert "sudo ifconfig bridge0 down" in str(explain(reason))


def test_a_round_without_replies_ends_by_itself(tmp_path: Path) -> None:
    with ranks(tmp_path, Script(), Script(), round_s=0.2) as group:
        for rank in range(2):
            group.hear(rank, SideChannel)
            assert group.fails(rank, Code.FORM_FAILED) == (
                f"rank {rank}: round 1 of JACCL's side channel got no reply within 0.2 s"
            )


def test_a_rank_that_is_told_to_end_while_it_waits_ends_in_order(tmp_path: Path) -> None:
    with ranks(tmp_path, Script(), Script()) as group:
        for rank, process in enumerate(group.processes):
            group.hear(rank, SideChannel)
            process.terminate()
            assert process.wait(WAIT_S) == TERMINATED_STATUS


def test_an_agent_that_stops_or_dies_takes_forming_ranks_along(tmp_path: Path) -> None:
    with ranks(tmp_path, Script(), Script()) as group:
        group.go_rounds(1)
        for rank in range(2):
            group.hear(rank, SideChannel)
        group.links[0].send(Shutdown())
        assert "the agent sent Shutdown" in group.fails(0, Code.SHUTTING_DOWN)
        group.links[1].close()
        assert group.processes[1].wait(WAIT_S) == exit_status(Code.RANK_LOST)


def _in_order(group: Ranks) -> None:
    for link in group.links:
        link.send(Shutdown())


def _by_sigterm(group: Ranks) -> None:
    for process in group.processes:
        process.terminate()


def _by_an_exception(group: Ranks) -> None:
    group.links[0].send(LoadShard("/nowhere", 1, (), 0, 0, 0, "", ("/nowhere",)))  # it has no path for rank 1


def _by_the_loss_of_its_agent(group: Ranks) -> None:
    for link in group.links:
        link.close()


@pytest.mark.parametrize("end", [_in_order, _by_sigterm, _by_an_exception, _by_the_loss_of_its_agent])
def test_every_end_gives_back_what_the_group_has_taken(
    tmp_path: Path, end: Callable[[Ranks], object]
) -> None:
    """MLX's ring stands in for RDMA: its sockets close where JACCL's devices would."""
    with ranks(tmp_path, Script(whole=True), Script(whole=True)) as group:
        group.form()
        end(group)
        assert [group.gave_back(rank) for rank in range(2)] == [True, True]


def test_a_rank_gives_back_after_a_loss_and_one_that_is_killed_does_not(tmp_path: Path) -> None:
    with ranks(tmp_path, Script(whole=True), Script(whole=True)) as group:
        group.form()
        group.processes[1].kill()
        assert [group.gave_back(rank) for rank in range(2)] == [True, False]


def test_both_ranks_give_back_after_a_failure_of_one_to_form(tmp_path: Path) -> None:
    with ranks(tmp_path, Script(whole=True), Script("raise", at=3, whole=True)) as group:
        group.go_rounds(2)
        group.take_part(0)
        assert [group.gave_back(rank) for rank in (1, 0)] == [True, True]


def test_giving_back_is_bounded(tmp_path: Path) -> None:
    with ranks(tmp_path, Script("stay", whole=True), Script(whole=True)) as group:
        group.form()
        _by_sigterm(group)
        assert [group.gave_back(rank) for rank in range(2)] == [False, True]
        assert group.processes[0].returncode == -signal.SIGALRM
