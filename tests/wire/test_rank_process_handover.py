"""Messages to a spare rank process, over real socket pairs."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlxtp.errors import LinkError
from mlxtp.wire.blocking import listen
from mlxtp.wire.rank_process import MAX_ARGUMENTS, READY, TAKEN, hand_over, take_over, without_secrets

ODD = b"\xff".decode("ascii", "surrogateescape")
ARGUMENTS = ["--rank", "1", "--folder", "/Users/jürgen/a folder\n", "", "--epoch", "7", ODD]
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The agent's end, which never blocks, and the spare's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(10)
    with ours, theirs:
        yield ours, theirs


def test_a_spare_is_told_its_arguments_and_gets_the_listener(pair: Pair) -> None:
    ours, theirs = pair
    with listen("127.0.0.1") as listener:
        hand_over(ours, ARGUMENTS, listener)
        address = listener.getsockname()
    told = take_over(theirs)
    assert told is not None
    arguments, fd = told
    assert arguments == ARGUMENTS
    assert fd is not None
    assert not os.get_inheritable(fd)
    with socket.socket(fileno=fd) as mine:
        assert mine.getsockname() == address
        socket.create_connection(address).close()
    assert ours.recv(100) == READY + TAKEN


def test_without_a_listener_there_is_no_descriptor(pair: Pair) -> None:
    ours, theirs = pair
    hand_over(ours, ["x"], None)
    assert take_over(theirs) == (["x"], None)


def test_what_comes_in_pieces_is_put_together(pair: Pair) -> None:
    ours, theirs = pair
    data = struct.pack(">I", 10) + b"--epoch\x0017"
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(take_over, theirs)
        for at, byte in enumerate(data):
            socket.send_fds(ours, [bytes([byte])], [] if at else [theirs.fileno()])
            while fcntl.ioctl(theirs, termios.FIONREAD, bytes(4)) != bytes(4) and not told.done():
                time.sleep(0.001)
        arguments, fd = told.result()
    assert arguments == ["--epoch", "17"]
    os.close(fd)


@pytest.mark.parametrize("said", [b"", b"\0\0", struct.pack(">I", 10) + b"--rank"])
def test_a_spare_whose_agent_goes_has_nothing_to_do(pair: Pair, said: bytes) -> None:
    ours, theirs = pair
    ours.send(said)
    ours.shutdown(socket.SHUT_WR)
    assert take_over(theirs) is None


def test_a_spare_whose_agent_went_before_it_was_ready_has_nothing_to_do(pair: Pair) -> None:
    ours, theirs = pair
    ours.close()
    assert take_over(theirs) is None


@pytest.mark.parametrize(
    "said",
    [struct.pack(">I", 0), struct.pack(">I", MAX_ARGUMENTS + 1) + b"x", struct.pack(">I", 6) + b"--rank1"],
    ids=["nothing", "too much", "more than it said"],
)
def test_what_no_agent_says_is_refused(pair: Pair, said: bytes) -> None:
    ours, theirs = pair
    ours.send(said)
    with pytest.raises(LinkError, match=r"^the agent sent (a warm process more than its|\d+ bytes of) arg"):
        take_over(theirs)
    assert ours.recv(100) == READY


def test_a_spare_that_cannot_be_told_is_an_error_and_no_wait(pair: Pair) -> None:
    ours, theirs = pair
    with pytest.raises(OSError, match="bytes of arguments; a warm process takes at most 8000"):
        hand_over(ours, ["x" * MAX_ARGUMENTS, "y"], None)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with pytest.raises(OSError, match=r"^the socket of a warm process did not take all of its arguments$"):
        hand_over(ours, ["x" * MAX_ARGUMENTS], None)
    theirs.close()
    with pytest.raises(BrokenPipeError):
        hand_over(ours, ARGUMENTS, None)


def test_the_longest_arguments_go_at_once(pair: Pair) -> None:
    ours, theirs = pair
    hand_over(ours, ["x" * MAX_ARGUMENTS], None)
    assert take_over(theirs) == (["x" * MAX_ARGUMENTS], None)


STAYS = """
PATH HOME HF_HOME HF_HUB_CACHE MLXTP_HOME MLX_METAL_FAST_SYNCH METAL_DEVICE_WRAPPER_TYPE
DYLD_LIBRARY_PATH LD_LIBRARY_PATH MALLOC_ARENA_MAX MallocStackLogging TMPDIR LC_ALL PYTHONPATH JACCL_RING
OMP_NUM_THREADS TOKENIZERS_PARALLELISM
"""
GOES = """
HTTP_PROXY https_proxy GITHUB_PAT SENTRY_DSN DATABASE_URL HF_ENDPOINT HF_HUB_TOKEN HF_TOKEN hf_token
HUGGING_FACE_HUB_TOKEN OPENAI_API_KEY AWS_SECRET_ACCESS_KEY AWS_CREDENTIALS PGPASSWORD MLXTP_KEY MLXTP_JOIN
SSH_AUTH_SOCK XPATH PIP_INDEX_URL
"""


def test_which_variables_a_process_gets_that_reads_what_models_bring() -> None:
    stays = dict.fromkeys(STAYS.split(), "value")
    assert without_secrets(stays | dict.fromkeys(GOES.split(), "value")) == stays
