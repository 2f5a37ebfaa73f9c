"""`mlxtp chat`: a conversation with the model at this Mac's endpoint, kept in memory until /save."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ..client import AgentClient, EndpointAnswer, Piece
from ..config import expanded, home_folder
from ..errors import MlxtpError, UserError
from .options import AsJson, Home, model_names
from .printing import Console, print_json, when_started, without_controls

PROMPT = ">>> "
MEASURED_S = 0.1  #: Shortest reply whose speed means something.
NOTICED_S = 0.25  #: Longest delay until a Ctrl-C takes effect.
COMMANDS = {
    "/clear": "forget the conversation",
    "/system": "/system TEXT: instructions for the model from now on; without a text, none",
    "/save": "/save FILE: write the conversation to a new file, as JSON if it is called .json, else Markdown",
    "/help": "show this list",
    "/quit": "leave, as Ctrl-D does",
}


def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="Send this and end. Piped input is appended to it."),
    ] = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="Instructions for the model.")] = "",
    model: Annotated[
        str,
        typer.Option(
            help="A deployed model, or another one where the agent loads on request.",
            autocompletion=model_names,
        ),
    ] = "default",
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Most tokens of a reply. Default: all that fit."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, metavar="T", help="From 0 to 2. Default: the model's own.")
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Talk to the model that this Mac's endpoint serves. Needs no API key.

    Ctrl-C stops a reply; twice, it leaves. /system TEXT sets instructions, /clear forgets the conversation,
    /save FILE writes it to a new file, /quit leaves. Nothing is kept without /save.
    """
    options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    talk = Talk(home_folder(home).resolve(), {k: v for k, v in options.items() if v is not None}, system)
    alone = sys.stdin.isatty()
    if prompt is None and alone and sys.stdout.isatty() and not as_json:
        ChatScreen(talk).run()
        return
    if as_json and prompt is None and alone:
        raise typer.BadParameter("--json needs a prompt, as an argument or through a pipe")
    piped = "" if alone and prompt is not None else sys.stdin.buffer.read().decode(errors="replace")
    asked = "\n\n".join(part for part in (prompt or "", piped.strip()) if part)
    if not asked:
        raise UserError('the prompt is empty; type one, such as `mlxtp chat "Why is the sky blue?"`')
    _ask_once(talk, asked, as_json=as_json)


@dataclass(slots=True)
class Talk:
    home: Path
    options: dict[str, Any] = field(default_factory=dict)  #: go into every request
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> Generator[Piece]:
        """Yield the pieces of the reply to `text`. `add_exchange` then adds both to the conversation."""
        return AgentClient(self.home).ask(
            {**self.options, "messages": [*self.all(), {"role": "user", "content": text}]}
        )

    def add_exchange(self, text: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def all(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def save(self, path: Path) -> None:
        if path.suffix == ".json":
            talk = {**self.options, "messages": self.all()}
            content = json.dumps(talk, ensure_ascii=False, indent=2) + "\n"
        else:
            content = "".join(f"## {m['role'].capitalize()}\n\n{m['content']}\n\n" for m in self.all())
        try:
            with expanded(path, "/save").open("x") as file:
                file.write(content)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; give another name") from None


@contextmanager
def _noticing_ctrl_c() -> Iterator[None]:
    """Interrupt the main thread's system calls every NOTICED_S seconds, so that it notices a Ctrl-C.

    A Ctrl-C that arrives just before a system call, or in another thread, would not end that call.
    """
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, NOTICED_S, NOTICED_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _ask_once(talk: Talk, asked: str, *, as_json: bool) -> None:
    """Print only the reply, streamed unless `as_json`. Raises MlxtpError if there is none."""
    when_started(talk.home)
    answer = EndpointAnswer(time.monotonic())
    with _noticing_ctrl_c(), closing(talk.ask(asked)) as pieces:
        for piece in pieces:
            answer.add(piece, time.monotonic())
            if not as_json:
                typer.echo(without_controls(piece.text), nl=False)
    if as_json:
        print_json(_as_json(answer))
    else:
        typer.echo()


def _as_json(answer: EndpointAnswer) -> dict[str, Any]:
    names = ("text", "thoughts", "model", "finish_reason", "prompt_tokens", "tokens")
    return {
        **{name: getattr(answer, name) for name in names},
        "ttft_s": round(answer.ttft_s, 4),
        "tokens_per_second": round(answer.tokens_per_second, 1),
    }


class ChatScreen:
    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._console = Console(highlight=False)
        self._stopped = False  #: The last event was Ctrl-C.

    def run(self) -> None:
        """Read lines until the user leaves. Raises UserError if no agent runs at the start."""
        _, status = when_started(self._talk.home)
        served = status["model"] or f"no model yet ({status['state']})"
        self._console.print(Text.assemble((served, "cyan"), "   /help lists the commands, Ctrl-D leaves"))
        with suppress(ImportError):
            import readline  # noqa: F401  # enables line editing, and the arrow keys for earlier lines
        with _noticing_ctrl_c():
            self._converse()

    def _converse(self) -> None:
        while True:
            try:
                line = input(PROMPT).encode(errors="replace").decode()
                self._stopped = False
                if line.startswith("/"):
                    if not self._obey(line.strip()):
                        return
                elif text := line.strip():
                    self._answer(text)
            except UserError as error:
                self._complain(error.detail)
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print()
                if self._stopped:
                    return
                self._stopped = True
                self._say("Ctrl-C again, or Ctrl-D, leaves")

    def _obey(self, text: str) -> bool:
        """Run a command that begins with /. Return False to leave. Raises UserError."""
        command, _, rest = text.partition(" ")
        rest = rest.strip()
        if command == "/quit":
            return False
        if command == "/clear":
            self._talk.messages.clear()
            self._say("forgotten")
        elif command == "/system":
            self._talk.system = rest
            self._say("the instructions are set" if rest else "the instructions are removed")
        elif command == "/save":
            if not rest:
                raise UserError("/save needs the name of a file, such as /save talk.md")
            self._talk.save(Path(rest))
            self._say(f"written to {rest}")
        elif command == "/help":
            for name, what in COMMANDS.items():
                self._say(what if what.startswith("/") else f"{name}: {what}")
        else:
            raise UserError(
                f"{command} is not known; /help lists the commands. A space before it sends it as text."
            )
        return True

    def _answer(self, text: str) -> None:
        answer, note = EndpointAnswer(time.monotonic()), ""
        try:
            with closing(self._talk.ask(text)) as pieces:
                self._write(pieces, answer)
            note = _speed(answer)
        except KeyboardInterrupt:
            self._stopped, note = True, "stopped; Ctrl-C again leaves"
        except MlxtpError as error:
            self._complain(error.detail)
        if note:
            self._say(note)
        if answer.text:
            self._talk.add_exchange(text, answer.text)

    def _write(self, pieces: Iterator[Piece], answer: EndpointAnswer) -> None:
        """Show why the reply waits until its first token, then its thoughts, dimmed, and its text."""
        with self._console.status("", spinner="line") as shown:
            for first in pieces:
                if first.text or first.thought:
                    break
                answer.add(first, time.monotonic())
                shown.update(Text(first.waiting, "dim"))
            else:
                return
        try:
            for piece in chain([first], pieces):
                if piece.text and answer.thoughts and not answer.text:
                    self._console.print("\n")
                answer.add(piece, time.monotonic())
                self._console.out(piece.thought, style="dim", end="")
                self._console.out(piece.text, end="")
        finally:
            self._console.print()

    def _say(self, text: str) -> None:
        self._console.print(Text(text, "dim"))

    def _complain(self, text: str) -> None:
        self._console.print(Text(text, "red"), soft_wrap=True)


def _speed(answer: EndpointAnswer) -> str:
    parts = [f"{answer.tokens} tokens"] if answer.tokens else []
    if answer.tokens and answer.last_at - (answer.first_at or 0.0) >= MEASURED_S:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    if answer.first_at is not None:
        parts.append(f"first token after {answer.ttft_s * 1000:.0f} ms")
    if answer.finish_reason == "length":
        parts.append("cut: no room for more tokens")
    return ", ".join(parts)
