"""Real agents: `python -m mlxtp node` with a home of its own, on one of several hosts or on this machine.

    with Hosts(2) as net:
        a, b = on_hosts(folder, net, "a", "b")
        a.start()
        b.start("--join", a.token())
        serving(a, b)
        assert b.chat("Repeat exactly: ABC") == "ABC"

What an agent is asked is asked from its own host, over its endpoint on the loopback there. `net` ends what
runs on its hosts; a test that runs agents on this machine ends them by `close`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psutil

from mlxtp.client import AgentClient
from mlxtp.errors import UserError
from mlxtp.verbs import VERBS, MakeToken, Status

from ..hosts import Host, Hosts
from ..live_cluster import START_S, WAIT_S, rank_processes, until

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
POLL_S = 0.1
COMMAND_S = WAIT_S
NODE = ("tests.agents.changed_node",)  #: `mlxtp` without spares.
SECRET = "FALCON-MERCURY-7749"
PROMPT = f"Repeat exactly: {SECRET}"
"""The embedded model's answer to it is `SECRET`."""


class Agent:
    """One agent, which may be started again and again with the same home.

    `flags` go with every start. `program` is what runs instead of `-m mlxtp`, see `changed_node`. On this
    machine, without a `host`, agents share its loopback and need ports of their own.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        host: Host | None = None,
        *flags: str,
        called: str = "",
        program: tuple[str, ...] = NODE,
    ) -> None:
        self.name = called or name
        self.home = folder / name
        self.host = host
        self.flags = flags
        self.program = program
        self.process: subprocess.Popen[bytes] | None = None
        self._log = folder / f"{name}.log"
        self._log_begins = 0

    def __repr__(self) -> str:
        return f"Agent({self.name})"

    @property
    def address(self) -> str:
        """Its address for other hosts."""
        return self.host.address if self.host is not None else "127.0.0.1"

    def start(self, *flags: str) -> None:
        """Start it; `flags` only for this time."""
        assert self.process is None or self.process.poll() is not None, f"{self.name} runs already"
        self._log_begins = self._log.stat().st_size if self._log.exists() else 0
        command = [
            sys.executable, "-m", *self.program, "node", "--home", str(self.home), "--name", self.name,
            *self.flags, *flags,
        ]  # fmt: skip
        with self._log.open("ab") as log:
            options: dict[str, Any] = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            options |= {"env": _environment(), "cwd": self._log.parent}
            if self.host is not None:
                self.process = self.host.start(command, **options)
            else:
                self.process = subprocess.Popen(command, start_new_session=True, **options)

    def kill(self) -> None:
        """As a power cut does, but for the kernel's own goodbye."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def stop(self) -> None:
        """As launchd does. It must end in order, with nothing left."""
        self.process.terminate()
        status = self.process.wait(WAIT_S)
        assert status == 0, f"{self.name} ended with {status}\n{self.log}"
        assert rank_processes(self.home) == []

    def ended(self) -> int:
        """Wait until it has ended by itself; its exit status."""
        assert self.process is not None
        process = self.process
        wait(lambda: process.poll() is not None, f"{self.name} ends", self)
        return process.returncode

    def close(self) -> None:
        """Make sure that it is gone, and what it started."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        until(lambda: not rank_processes(self.home), f"the ranks of {self.name} end")

    def signal_everything(self, number: signal.Signals) -> None:
        """To the agent and its ranks, in one go."""
        for pid in (self.process.pid, *rank_processes(self.home)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> str:
        """Its log since it was started last."""
        with self._log.open("rb") as file:
            file.seek(self._log_begins)
            return file.read().decode(errors="replace")

    def said(self, *words: str) -> bool:
        """Return whether one line of its log has all of these."""
        return any(all(word in line for word in words) for line in self.log.splitlines())

    def said_at(self, *words: str) -> float:
        """Return the time of the first such line, in seconds as `time.time` counts them."""
        line = next(line for line in self.log.splitlines() if all(word in line for word in words))
        stamp, milliseconds = line[:23].split(",")
        return time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S")) + int(milliseconds) / 1000

    def first_token(self) -> str:
        """The token that it prints when it founds a cluster."""
        printed = re.compile(r"node --join ([A-Z2-7]{72})")
        found = wait(lambda: printed.search(self.log), f"{self.name} prints a token", self)
        return found[1]

    def token(self) -> str:
        """A new one."""
        return str(self._inside(lambda: AgentClient(self.home).send(MakeToken()))["token"])

    def post(self, what: str, **body: str) -> dict[str, Any]:
        """As a command does. Raises UserError."""
        return self._inside(lambda: AgentClient(self.home).send(VERBS[what].read(body)))

    def status(self) -> dict[str, Any]:
        """Return the object of `mlxtp status --json`; empty while no agent replies."""
        try:
            return self._inside(lambda: AgentClient(self.home).send(Status()))
        except UserError:
            return {}

    def member(self, other: Agent) -> dict[str, Any]:
        """Return its row for a member."""
        rows = [row for row in self.status().get("members", ()) if row["name"] == other.name]
        return rows[0] if rows else {}

    def command(self, *words: str, within_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        """Run `mlxtp` with these words and this home, on its host."""
        command = [sys.executable, "-m", "mlxtp", *words, "--home", str(self.home)]
        options: dict[str, Any] = {"timeout": within_s, "env": _environment() | {"COLUMNS": "200"}}
        if self.host is not None:
            return self.host.run(command, **options)
        return subprocess.run(command, text=True, capture_output=True, check=False, **options)

    def health(self) -> dict[str, Any]:
        """The body of /health, ready or not."""
        with self.request("GET", "/health") as response:
            body: dict[str, Any] = json.loads(response.read())
            return body

    def chat(self, text: str = PROMPT, **fields: object) -> str:
        """The answer; empty when there is none now."""
        try:
            with self._ask(text, fields) as response:
                body = json.loads(response.read())
        except (OSError, HTTPException, ValueError):
            return ""
        if response.status != 200:
            return ""
        return str(body["choices"][0]["message"]["content"])

    def stream(self, text: str = PROMPT, **fields: object) -> bytes:
        """All bytes of the body of a streamed answer."""
        with self.open_stream(text, **fields) as response:
            return response.read()

    @contextlib.contextmanager
    def open_stream(self, text: str, **fields: object) -> Iterator[HTTPResponse]:
        """The answer as it comes; leaving hangs up."""
        with self._ask(text, {"stream": True, **fields}) as response:
            assert response.status == 200, response.read()
            yield response

    def _ask(self, text: str, fields: Mapping[str, object]) -> AbstractContextManager[HTTPResponse]:
        message = {"role": "user", "content": text}
        return self.request(
            "POST",
            "/v1/chat/completions",
            {"model": "default", "messages": [message], "max_tokens": 64, "temperature": 0, **fields},
        )

    @contextlib.contextmanager
    def request(self, method: str, path: str, body: object = None) -> Iterator[HTTPResponse]:
        """One request to its endpoint. Raises OSError when no agent listens there."""
        try:
            url = json.loads((self.home / "agent.json").read_text())["url"]
        except FileNotFoundError as error:
            raise ConnectionRefusedError(f"{self.name} has no endpoint") from error
        connection = HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S)
        with contextlib.closing(connection):
            self._inside(connection.connect)
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                yield response

    def processes(self) -> list[psutil.Process]:
        """The agent, then its ranks."""
        return [psutil.Process(pid) for pid in (self.process.pid, *rank_processes(self.home))]

    def _inside(self, function: Callable[[], T]) -> T:
        return self.host.inside(function) if self.host is not None else function()


def on_hosts(folder: Path, net: Hosts, *names: str, flags: tuple[str, ...] = ()) -> list[Agent]:
    """Return an agent for each host. None of them runs yet."""
    return [Agent(folder, name, host, *flags) for name, host in zip(names, net.hosts, strict=True)]


def _environment() -> dict[str, str]:
    """This one, without settings that a person may have made; its Python finds `mlxtp` and `tests`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXTP_")}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    ours = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return kept | ours


def wait(condition: Callable[[], T], what: str, *agents: Agent, within_s: float = START_S) -> T:
    """As `until`; a failure shows what the agents have said."""
    try:
        return until(condition, what, within_s, every_s=POLL_S)
    except AssertionError as error:
        logs = "\n".join(f"--- {agent.name}: {agent.status()}\n{agent.log}" for agent in agents)
        raise AssertionError(f"{error}\n{logs}") from None


def serving(*agents: Agent, ranks: int = 0, within_s: float = START_S) -> float:
    """Wait until all of these serve with one group, and each of them answers. Returns after how many seconds.

    The group has `ranks` ranks; if that is not said, as many as they are.
    """
    began, wanted = time.monotonic(), ranks or len(agents)

    def agree() -> bool:
        states = [agent.status() for agent in agents]
        ready = all(state and state["state"] == "ready" and state["world_size"] == wanted for state in states)
        return ready and len({(state["epoch"], state["coordinator"]) for state in states}) == 1

    def serves() -> bool:
        return agree() and all(agent.chat() == SECRET for agent in agents)

    names = " and ".join(agent.name for agent in agents)
    wait(serves, f"{names} serve with {wanted} ranks", *agents, within_s=within_s)
    return time.monotonic() - began
