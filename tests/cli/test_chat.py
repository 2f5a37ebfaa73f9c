"""`mlxtp chat`, in a terminal and in a pipe, with a real agent, and with one that is slow or fails."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mlxtp.cli.chat import ChatScreen, Talk
from mlxtp.cli.main import app
from mlxtp.client import FILE, EndpointAnswer, Piece
from mlxtp.errors import UserError

from ..live_cluster import WAIT_S, Cluster, until
from ..pseudo_terminal import CTRL_C, CTRL_D, UP, Terminal, terminal

pytestmark = pytest.mark.slow

ORACLE = "FALCON-MERCURY-7749"


def mlxtp(home: Path, *words: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", *words, "--home", str(home)], input=typed)


def test_a_pipe_gets_the_answer_and_nothing_else(one_rank: Cluster) -> None:
    answered = mlxtp(one_rank.home, typed=f"Repeat exactly: {ORACLE}\n")
    assert (answered.stdout, answered.stderr, answered.exit_code) == (f"{ORACLE}\n", "", 0)
    with_both = mlxtp(one_rank.home, "Repeat exactly: PANDA-42", "--json")
    told = json.loads(with_both.stdout)
    assert (told["text"], told["model"], told["finish_reason"]) == ("PANDA-42", "tiny", "stop")
    assert told["tokens"] > 1
    assert told["prompt_tokens"] > 1
    assert told["ttft_s"] > 0
    cut = json.loads(mlxtp(one_rank.home, f"Repeat exactly: {ORACLE}", "--max-tokens", "2", "--json").stdout)
    assert (cut["finish_reason"], cut["tokens"]) == ("length", 2)
    nothing = mlxtp(one_rank.home, typed=" \n")
    assert nothing.exit_code == 1
    assert nothing.stderr.startswith("mlxtp: the prompt is empty; type one, such as `mlxtp chat ")
    refused = mlxtp(one_rank.home, "hello", "--model", "org/none", "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["error"]["code"] == "model_not_found"


def test_without_an_agent_it_says_how_to_start_one(tmp_path: Path) -> None:
    assert "start one with `mlxtp node`" in mlxtp(tmp_path, "hello").stderr
    with terminal("chat", "--home", str(tmp_path)) as screen:
        screen.see("no mlxtp node runs with home")
        assert screen.end() == 1


def test_a_conversation_in_a_terminal(one_rank: Cluster, tmp_path: Path) -> None:
    saved = tmp_path / "talk.md"
    with terminal("chat", "--home", str(one_rank.home)) as screen:
        assert "tiny" in screen.see(">>> ")
        shown = say(screen, f"Repeat exactly: {ORACLE}", "first token after")
        assert f"\n{ORACLE}\n" in shown
        assert " tokens, " in shown
        say(screen, "/sav x", "/sav is not known; /help lists the commands.")
        say(screen, f"/save {saved}", "written to")
        say(screen, f"/save {saved}", "File exists; give another name")
        say(screen, "/save ~nosuch/x.md", "this machine has no user ~nosuch")
        again = f"/clear\n{UP}{UP}{UP}{UP}{UP}{UP}"  # which is what was asked first
        assert f"\n{ORACLE}\n" in say(screen, again, "first token after")
        ends(screen)
    assert saved.read_text() == f"## User\n\nRepeat exactly: {ORACLE}\n\n## Assistant\n\n{ORACLE}\n\n"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"
STATUS = HEAD % b"application/json" + b'{"model": "slow", "state": "ready"}'


def said(text: str, name: str = "content") -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {name: text}}]}).encode() + b"\n\n"


def _request(sock: socket.socket) -> bytes:
    """Head and body, which come apart."""
    got = b""
    while b"\r\n\r\n" not in got or (got.startswith(b"POST") and not got.endswith(b"}")):
        if not (part := sock.recv(65_536)):
            break
        got += part
    return got


def say(screen: Terminal, line: str, *shown: str) -> str:
    """Type a line, see what comes of it and then the prompt; return the last of it."""
    screen.type(f"{line}\n")
    seen = "".join([screen.see(each) for each in shown])
    return seen + screen.see(">>> ")


def ends(screen: Terminal, how: str = "/quit\n") -> None:
    screen.type(how)
    assert screen.end() == 0


class Slow:
    """An agent that says how far it is, then what it is given, and stops there until its client leaves."""

    def __init__(self, home: Path, *parts: bytes, hangs: bool) -> None:
        self.asked: list[bytes] = []
        self.left = threading.Event()
        self._parts, self._hangs = parts, hangs
        self._server = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        (home / FILE).write_text(json.dumps({"url": url, "key": "secret", "certificate": ""}))
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        while True:
            sock, _ = self._server.accept()
            with sock:
                if not (request := _request(sock)):
                    return
                if request.startswith(b"GET"):
                    sock.sendall(STATUS)
                    continue
                self.asked.append(request)
                sock.sendall(HEAD % b"text/event-stream" + b"".join(self._parts))
                if self._hangs:
                    sock.settimeout(WAIT_S)
                    assert sock.recv(1) == b""
                    self.left.set()

    def __enter__(self) -> Slow:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        socket.create_connection(self._server.getsockname()).close()
        self._thread.join(WAIT_S)
        self._server.close()


@contextmanager
def slow(home: Path, *parts: bytes, hangs: bool = False) -> Iterator[Slow]:
    with Slow(home, *parts, hangs=hangs) as agent:
        yield agent


def test_ctrl_c_stops_an_answer_and_twice_it_leaves(tmp_path: Path) -> None:
    begun = (b": mlxtp\n\n", said("It is **because"))
    with slow(tmp_path, *begun, hangs=True) as agent, terminal("chat", "--home", str(tmp_path)) as screen:
        screen.see(">>> ")
        screen.type("why?\n")
        screen.see("It is")
        assert not agent.left.is_set()
        screen.type(CTRL_C)
        screen.see("stopped; Ctrl-C again leaves")
        assert agent.left.wait(WAIT_S)
        screen.see(">>> ")
        screen.type("go on\n")
        screen.see("It is")
        screen.type(CTRL_C)
        screen.see(">>> ")
        ends(screen, CTRL_C)
    assert "It is **because" in agent.asked[1].decode()  # what was said before it was stopped


def test_a_ctrl_c_just_before_a_read_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal just before the system call does not end that call. Neither does one to another thread."""
    typed = iter(("why?", "/quit"))
    monkeypatch.setattr("builtins.input", lambda _prompt: next(typed))
    with slow(tmp_path, said("It is"), hangs=True) as agent:

        def press() -> None:
            until(lambda: agent.asked, "it was asked")
            threading.Event().wait(0.5)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        pressing = threading.Thread(target=press)
        pressing.start()
        ChatScreen(Talk(tmp_path)).run()
        pressing.join()
        assert agent.left.wait(WAIT_S / 2), "the reply ran on until the agent gave up"


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"state": "loading 40 %"}, "loading 40 %"),
        ({"prompt_progress": {"total": 4000, "processed": 1520}}, "reading the prompt, 38 %"),
    ],
)
def test_what_an_answer_waits_for_is_shown(tmp_path: Path, more: dict[str, Any], shown: str) -> None:
    chunk = {"choices": [{"delta": {}, "finish_reason": None}]} | more
    waits = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    with slow(tmp_path, waits, hangs=True), terminal("chat", "--home", str(tmp_path)) as screen:
        screen.see(">>> ")
        screen.type("why?\n")
        screen.see(shown)
        screen.type(CTRL_C)
        screen.see(">>> ")
        screen.type(CTRL_C)
        screen.end()


def test_ctrl_c_before_a_line_has_to_be_meant(tmp_path: Path) -> None:
    with slow(tmp_path), terminal("chat", "--home", str(tmp_path)) as screen:
        screen.see(">>> ")
        screen.type("half a li")
        screen.see("half a li")
        screen.type(CTRL_C)
        screen.see("Ctrl-C again, or Ctrl-D, leaves")
        screen.see(">>> ")
        say(screen, "/clear", "forgotten")
        screen.type(CTRL_C)
        screen.see("Ctrl-C again, or Ctrl-D, leaves")
        screen.see(">>> ")
        ends(screen, CTRL_D)


def test_an_answer_that_breaks_off_is_said_and_does_not_end_the_conversation(tmp_path: Path) -> None:
    thinks = said("let me see", "reasoning_content")
    with slow(tmp_path, thinks, said("half")), terminal("chat", "--home", str(tmp_path)) as screen:
        screen.see(">>> ")
        say(screen, "hello", "let me see", "half", "the answer broke off")
        say(screen, "go on", "the answer broke off")
        ends(screen)


EVIL = "fine\n\n\x1b]0;owned\x07\x1b[2J\x9b31m`a\x1b[5m`"


@pytest.mark.parametrize("kind", ["xterm-256color", "dumb"])
def test_a_model_does_not_steer_the_terminal(tmp_path: Path, kind: str) -> None:
    told = said("half \x1b]0;owned\x07 [/b]", "reasoning_content"), said(EVIL), b"data: [DONE]\n\n"
    with slow(tmp_path, *told), terminal("chat", "--home", str(tmp_path), TERM=kind) as screen:
        screen.see(">>> ")
        seen = say(screen, "hello", "fine")
        ends(screen)
    assert kind != "dumb" or "`a" in seen, "a terminal that can only write gets the text"
    assert not [each for each in ("\x1b]0;", "\x07", "\x1b[2J", "\x9b", "\x1b[5m") if each in seen]


def test_a_pipe_gets_no_control_characters(tmp_path: Path) -> None:
    with slow(tmp_path, said(EVIL), b"data: [DONE]\n\n"):
        assert mlxtp(tmp_path, "hello").stdout == "fine\n\n]0;owned[2J31m`a[5m`\n"
        raw = mlxtp(tmp_path, "hello", "--json").stdout
    assert json.loads(raw)["text"] == EVIL
    assert raw.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    ("part", "code", "words"),
    [
        (b'data: {"error": {"code": "rank_lost", "message": "a rank is gone"}}\n', "rank_lost", "a rank is"),
        (b"data: nonsense\n", "internal", "not a reply of mlxtp"),
        (b"data: {}\n", "internal", "not a reply of mlxtp"),
        (b"hello\n", "link_lost", "the answer broke off"),
    ],
)
def test_what_is_no_answer(tmp_path: Path, part: bytes, code: str, words: str) -> None:
    with slow(tmp_path, part):
        refused = mlxtp(tmp_path, "hello", "--json")
    error = json.loads(refused.stdout)["error"]
    assert (refused.exit_code, error["code"]) == (1, code)
    assert words in error["message"]


def test_the_speed_of_an_answer() -> None:
    answer = EndpointAnswer(10.0)
    for at, piece in (
        (10.5, Piece(waiting="loading 40 %")),
        (11.0, Piece(thought="so")),
        (12.0, Piece(text="a")),
        (13.0, Piece(tokens=5, prompt_tokens=7)),
    ):
        answer.add(piece, at)
    assert (answer.text, answer.thoughts, answer.ttft_s, answer.tokens_per_second) == ("a", "so", 1.0, 2.0)
    assert (EndpointAnswer(1.0).ttft_s, EndpointAnswer(1.0).tokens_per_second) == (0.0, 0.0)


def test_a_conversation_is_saved_as_it_would_be_asked(tmp_path: Path) -> None:
    talk = Talk(tmp_path, {"model": "default"}, "Be brief.")
    talk.add_exchange("Who?", "Me.")
    talk.save(tmp_path / "talk.json")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["model"] == "default"
    assert [each["role"] for each in saved["messages"]] == ["system", "user", "assistant"]
    with pytest.raises(UserError, match="No such file or directory; give another name"):
        talk.save(tmp_path / "none" / "talk.md")
