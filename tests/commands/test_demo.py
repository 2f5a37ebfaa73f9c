"""What the demo says when its question is not answered."""

from __future__ import annotations

import io
import socket
import threading
from pathlib import Path

import pytest

from mlxtp.commands import demo
from mlxtp.config import Settings
from mlxtp.errors import Code, GroupError

from ..cluster import WAIT_S

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def test_who_serves_says_where_other_commands_find_it(tmp_path: Path) -> None:
    shown = io.StringIO()
    settings = Settings(tmp_path / "a home", "127.0.0.1", 0, 2, "tiny")
    demo.View(demo.Screen(file=shown, width=60), settings).serving("http://127.0.0.1:52415")
    assert f"mlxtp status --home '{tmp_path}/a home'" in shown.getvalue()


def test_an_endpoint_that_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(GroupError, match=r"the answer broke off: .*refused") as broken:
        demo.ask(url, "hello", lambda _: None)
    assert broken.value.code is Code.LINK_LOST


@pytest.mark.parametrize(
    "answer",
    [b"", b"nonsense\r\n\r\n", HEAD + b"\r\n", HEAD + b'Content-Length: 99\r\n\r\ndata: {"choices": []}\n'],
)
def test_an_answer_that_breaks_off(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve_once() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(answer)

        thread = threading.Thread(target=serve_once)
        thread.start()
        with pytest.raises(GroupError, match="the answer broke off"):
            demo.ask(f"http://127.0.0.1:{server.getsockname()[1]}", "hello", lambda _: None)
        thread.join(WAIT_S)


def test_whoever_reads_the_output_may_leave() -> None:
    """That is no fault of the answer's."""
    chunk = b'data: {"choices": [{"delta": {"content": "x"}}]}\n'

    def leave(_: str) -> None:
        raise BrokenPipeError

    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve_once() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(HEAD + b"\r\n" + chunk)

        thread = threading.Thread(target=serve_once)
        thread.start()
        with pytest.raises(BrokenPipeError):
            demo.ask(f"http://127.0.0.1:{server.getsockname()[1]}", "hello", leave)
        thread.join(WAIT_S)
