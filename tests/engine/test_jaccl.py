"""One rank's part in forming over JACCL, without JACCL and without another process."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from mlxtp.engine.decode_loop import DecodeLoop
from mlxtp.engine.group import form, is_available
from mlxtp.engine.jaccl import Factory, JacclFabric, SideChannelExchange
from mlxtp.errors import Code, ConfigError, GroupError, LinkError
from mlxtp.wire.messages import Gathered, Message, Shutdown, SideChannel

from .tables import refused

MATRIX = ("", "rdma_en5", "rdma_en4", "")
TIMEOUT = LinkError("nothing came from the agent within 15 s", Code.LINK_TIMEOUT)


class Agent:
    """Says what it was told to say, one answer after the other, and keeps what it was sent."""

    def __init__(self, *answers: Message | LinkError) -> None:
        self.sent: list[Message] = []
        self.waits_s: list[float] = []
        self._answers = list(answers)

    def receive(self, timeout_s: float) -> Message:
        self.waits_s.append(timeout_s)
        answer = self._answers.pop(0)
        if isinstance(answer, LinkError):
            raise answer
        return answer

    def exchange(self, rank: int = 1, world_size: int = 2) -> SideChannelExchange:
        return SideChannelExchange(rank, world_size, self.sent.append, self.receive, 15.0)


def test_rounds_are_numbered_and_answered_with_bytes() -> None:
    agent = Agent(Gathered(1, b"AAAABBBB"), Gathered(2, b""), Gathered(3, b"ab"))
    gather = agent.exchange().factory(1, 2)
    got = [gather(b"BBBB", 4), gather(b"", 0), gather(b"b", 1)]
    assert got == [b"AAAABBBB", b"", b"ab"]
    assert {type(each) for each in got} == {bytes}
    assert agent.sent == [SideChannel(1, b"BBBB"), SideChannel(2, b""), SideChannel(3, b"b")]
    assert agent.waits_s == [15.0] * 3


def fails(gather: Any, src: bytes = b"BBBB", n: int = 4) -> GroupError:
    with pytest.raises(GroupError) as failed:
        gather(src, n)
    return failed.value


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (Gathered(1, b"", "rank 0 is gone"), Code.FORM_FAILED, "rank 0 is gone"),
        (Gathered(2, b"AAAABBBB"), Code.FORM_FAILED, "8 bytes arrived for round 2, expected 8 for round 1"),
        (Gathered(1, b"AAAABBB"), Code.FORM_FAILED, "7 bytes arrived for round 1, expected 8 for round 1"),
        (Gathered(1, b"AAAABBBBCCCC"), Code.FORM_FAILED, "12 bytes arrived for round 1, expected 8"),
        (Shutdown(), Code.SHUTTING_DOWN, "the agent sent Shutdown while JACCL was forming"),
        (TIMEOUT, Code.FORM_FAILED, "rank 1: round 1 of JACCL's side channel got no reply within 15 s"),
    ],
)
def test_what_ends_it_ends_every_later_round_too(answer: Message | LinkError, code: Code, words: str) -> None:
    agent = Agent(answer)
    gather = agent.exchange().factory(1, 2)
    for _ in range(3):
        failure = fails(gather)
        assert (failure.code, words in failure.detail) == (code, True), failure.detail
    assert len(agent.sent) == 1, "no agent hears of a round that cannot be"


def test_a_link_that_breaks_is_no_late_answer() -> None:
    gather = Agent(LinkError("pipe: the agent is gone")).exchange().factory(1, 2)
    with pytest.raises(LinkError, match="the agent is gone"):
        gather(b"BBBB", 4)


def test_bytes_that_are_not_as_many_as_announced_are_not_sent() -> None:
    agent = Agent()
    assert "announced 5 bytes and gave 4" in fails(agent.exchange().factory(1, 2), b"BBBB", 5).detail
    assert not agent.sent


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 3)])
def test_jaccl_that_takes_itself_for_another_rank(rank: int, size: int) -> None:
    agent = Agent()
    exchange = agent.exchange()
    with pytest.raises(GroupError, match=f"JACCL reports rank {rank} of {size}; this is rank 1 of 2"):
        exchange.factory(rank, size)
    assert "JACCL reports" in fails(exchange.gather).detail
    assert not agent.sent


def no_factory(rank: int, size: int) -> Any:
    raise AssertionError


def fabric(entries: Sequence[str] = MATRIX, *, ring: bool = False) -> JacclFabric:
    return JacclFabric.of(tuple(entries), 2, ring=ring, factory=no_factory)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (MATRIX[:3], "2 ranks has 4 entries, not 3"),
        ((), "2 ranks has 4 entries, not 0"),
        (("", "rdma_en5", "", ""), "a cable has two ends"),
    ],
)
def test_a_matrix_that_jaccl_would_misunderstand(entries: Sequence[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fabric(entries)


def test_nothing_is_left_to_the_environment_of_our_parent() -> None:
    present = ["PATH", "MLX_RANK", "JACCL_RANK", "JACCL_RING", "JACCL_ANYTHING", "MLX_JACCL_RING"]
    present += ["MLX_JACCL_COORDINATOR", "MLX_IBV_DEVICES", "MLX_METAL_FAST_SYNCH", "MY_JACCL_"]
    gone = dict.fromkeys(
        ("JACCL_RANK", "JACCL_RING", "JACCL_ANYTHING", "MLX_JACCL_RING", "MLX_JACCL_COORDINATOR")
    )
    ours = {"MLX_RANK": "1", "MLX_IBV_DEVICES": "/run/x.json"}
    assert fabric().environment(present, 1, "/run/x.json") == gone | ours
    assert fabric(ring=True).environment(present, 1, "/run/x.json") == gone | ours | {"MLX_JACCL_RING": "1"}
    assert fabric(ring=True).environment([], 1, "/run/x.json") == ours | {"MLX_JACCL_RING": "1"}


class Formed:
    """Stands for MLX's group."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self._place = rank, size

    def rank(self) -> int:
        return self._place[0]

    def size(self) -> int:
        return self._place[1]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what forming changes in it."""
    monkeypatch.setenv("MLX_RANK", "7")
    monkeypatch.setenv("MLX_IBV_DEVICES", "/nowhere")


def try_form(folder: Path, init: Any, available: Any = lambda _: True) -> Any:
    return form(
        "jaccl", 0, 2, (), folder=folder, deadline_s=60.0, fabric=fabric(), available=available, init=init
    )


def test_init_is_not_reached_where_there_is_no_jaccl(tmp_path: Path) -> None:
    """It would crash there."""
    asked: list[str] = []

    def available(backend: str) -> bool:
        asked.append(backend)
        return False

    def init(backend: str, factory: Factory | None) -> Any:
        raise AssertionError

    with pytest.raises(ConfigError, match="rank 0: MLX has no jaccl backend on this machine"):
        try_form(tmp_path, init, available)
    assert asked == ["jaccl"]


@pytest.mark.skipif(is_available("jaccl"), reason="this machine has JACCL")
def test_an_mlx_without_jaccl_is_asked_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MLX has no jaccl backend"):
        form("jaccl", 0, 2, (), folder=tmp_path, deadline_s=60.0, fabric=fabric())


def test_init_gets_a_file_for_this_user_alone_that_does_not_stay(tmp_path: Path) -> None:
    seen = []

    def init(backend: str, factory: Factory | None) -> Formed:
        (file,) = tmp_path.iterdir()
        seen.append((backend, factory, json.loads(file.read_text()), file.stat().st_mode & 0o777))
        return Formed()

    assert try_form(tmp_path, init).size == 2
    assert seen == [("jaccl", no_factory, [[None, "rdma_en5"], ["rdma_en4", None]], 0o600)]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_full_for_that_file_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    with pytest.raises(GroupError) as failed:
        try_form(tmp_path, lambda *_: Formed())
    assert failed.value.code is Code.FORM_FAILED
    assert failed.value.detail == f"the disk is full, nothing can be written in {tmp_path}"


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, IndexError])
def test_what_mlx_throws_is_a_failure_to_form(tmp_path: Path, kind: type[Exception]) -> None:
    def init(backend: str, factory: Factory | None) -> Any:
        raise kind("[jaccl] Changing queue pair to RTR failed with errno 22")

    with refused(GroupError, Code.FORM_FAILED, r"rank 0: jaccl did not form: \[jaccl\] .* errno 22"):
        try_form(tmp_path, init)
    assert list(tmp_path.iterdir()) == []


def test_another_group_than_was_asked_for(tmp_path: Path) -> None:
    with refused(GroupError, Code.FORM_FAILED, "requested rank 0 of 2, formed rank 0 of 1"):
        try_form(tmp_path, lambda *_: Formed(0, 1))


def test_a_rank_0_that_formed_ends_when_another_did_not() -> None:
    """The error crossed its InitDone, so it comes as if it were a command."""
    loop = DecodeLoop(*(MagicMock() for _ in range(5)))
    with refused(GroupError, Code.FORM_FAILED, "errno 60"):
        loop._obey(Gathered(5, b"", "rank 1: errno 60"))
