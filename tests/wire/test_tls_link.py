"""The stories of `test_blocking_link.py` over TLS: a `BlockingLink` must not notice what carries it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxtp.errors import LinkError
from mlxtp.wire.blocking import BlockingLink
from mlxtp.wire.messages import Ack, Forward, SessionEnd
from mlxtp.wire.session import LinkKind, LinkState
from mlxtp.wire.tls import ALPN_DECODE, member_context_client, member_context_server

from .forwards import of_prompt
from .members import founder, member_of
from .test_blocking_link import (
    TIMEOUT_S,
    Joined,
    in_background,
    test_a_frame_in_two_halves,
    test_a_frame_larger_than_the_socket_buffers,
    test_a_peer_that_breaks_a_rule,
    test_a_peer_that_does_not_read_can_still_be_heard,
    test_a_peer_that_is_gone,
    test_a_step_and_its_ack,
    test_close_wakes_the_reader,
    test_frames_of_many_threads_do_not_mix,
    test_half_a_frame_and_the_end,
    test_receive_with_a_deadline,
    test_sending_to_a_peer_that_is_gone,
)
from .test_tls import handshake
from .walk import pair_in

pytestmark = pytest.mark.slow

__all__ = [
    "test_a_frame_in_two_halves",
    "test_a_frame_larger_than_the_socket_buffers",
    "test_a_peer_that_breaks_a_rule",
    "test_a_peer_that_does_not_read_can_still_be_heard",
    "test_a_peer_that_is_gone",
    "test_a_step_and_its_ack",
    "test_close_wakes_the_reader",
    "test_frames_of_many_threads_do_not_mix",
    "test_half_a_frame_and_the_end",
    "test_receive_with_a_deadline",
    "test_sending_to_a_peer_that_is_gone",
]


class Secured(Joined):
    """Two links over TLS over a socket pair."""

    def __init__(
        self,
        folder: Path,
        kind: LinkKind = LinkKind.DECODE,
        state: LinkState = LinkState.LOADED,
        upper_timeout_s: float = TIMEOUT_S,
    ) -> None:
        first = founder(folder)
        second = member_of(first, folder)
        server, client = handshake(
            member_context_server(first.credentials, [ALPN_DECODE]),
            member_context_client(second.credentials, ALPN_DECODE),
        )
        self.upper_sock, self.lower_sock = server.result(), client.result()  # type: ignore[assignment]
        pair = pair_in(kind, state)
        self.upper = BlockingLink(self.upper_sock, pair.upper, upper_timeout_s)
        self.lower = BlockingLink(self.lower_sock, pair.lower, TIMEOUT_S)


@pytest.fixture
def decode(tmp_path: Path) -> Iterator[Joined]:
    joined = Secured(tmp_path)
    yield joined
    joined.close()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Joined]:
    joined = Secured(tmp_path, LinkKind.PIPE_LEADER)
    yield joined
    joined.close()


def test_the_end_in_order(tmp_path: Path) -> None:
    joined = Secured(tmp_path, LinkKind.PIPE, LinkState.ENDED)
    joined.lower.send(SessionEnd())
    joined.lower.close()
    ((_, message),) = joined.upper.receive(timeout_s=TIMEOUT_S)
    assert message == SessionEnd()
    assert joined.upper.receive(timeout_s=TIMEOUT_S) == []
    joined.close()


def test_a_peer_that_does_not_read(tmp_path: Path) -> None:
    joined = Secured(tmp_path, upper_timeout_s=0.2)
    tokens = tuple(range(500_000))
    with pytest.raises(LinkError, match=r"Forward was not taken within 0\.2 s"):
        joined.upper.send(of_prompt(2, 0, len(tokens), tokens))
    joined.close()


def test_waiting_outlasts_the_send_timeout(tmp_path: Path) -> None:
    joined = Secured(tmp_path, upper_timeout_s=0.02)
    received = in_background(joined.upper.receive)
    with pytest.raises(TimeoutError):
        received.result(0.1)
    seq = joined.upper.send(Forward((1,), (2,)))
    joined.lower.receive()
    joined.lower.send(Ack(seq, 1, 1, 0))
    assert len(received.result(TIMEOUT_S)) == 1
    joined.close()


def test_close_wakes_the_sender(decode: Joined) -> None:
    tokens = tuple(range(500_000))
    sending = in_background(decode.upper.send, of_prompt(2, 0, len(tokens), tokens))
    with pytest.raises(TimeoutError):
        sending.result(0.1)
    decode.upper.close()
    with pytest.raises(LinkError):
        sending.result(TIMEOUT_S)


def test_prompts_and_acks_at_once(decode: Joined) -> None:
    """One thread of rank 0 sends megabytes while another one reads what the rank has to say."""
    count, tokens = 8, tuple(range(200_000))
    acks: list[int] = []

    def read_acks() -> None:
        while len(acks) < count:
            acks.extend(received.message.step for received in decode.upper.receive())  # type: ignore[attr-defined]

    def acknowledge() -> None:
        seen = 0
        while seen < count:
            for seq, _ in decode.lower.receive(timeout_s=TIMEOUT_S):
                decode.lower.send(Ack(seq, 1, 1, 0))
                seen += 1

    readers = [threading.Thread(target=act, daemon=True) for act in (read_acks, acknowledge)]
    for reader in readers:
        reader.start()
    sent = [decode.upper.send(of_prompt(uid, 0, len(tokens), tokens)) for uid in range(2, 2 + count)]
    for reader in readers:
        reader.join(TIMEOUT_S)
    assert acks == sent
