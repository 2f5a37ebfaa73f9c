"""The place where programs run: what is installed, fresh homes, time limits, and the engines that answer."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .actor import Seen, Stage

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MLXTP = Path(sys.executable).with_name("mlxtp")
Command = Sequence[object]  # words and paths
LONG_PROMPT = 8000  # tokens; titles and the like are shorter
LIMIT_S = 120.0  # of one command
VERSIONS: dict[str, Any] = tomllib.loads((HERE / "versions.toml").read_text())


@dataclass(frozen=True)
class Check:
    """One thing that was tried."""

    tried: str
    ok: bool
    note: str = ""


@dataclass(frozen=True)
class Output:
    """The result of one command."""

    text: str
    code: int
    late: bool

    def last(self) -> str:
        """The last lines that say something."""
        return " ".join(self.text.split())[-300:]


@dataclass
class Bench:
    """One engine and everything that is installed. `stage` is None where a real agent answers."""

    folder: Path
    npm: Path
    url: str
    model: str
    context: int
    agent_home: Path
    stage: Stage | None
    first_token_s: float
    temporary: list[Path] = field(default_factory=list)

    @property
    def ledger(self) -> list[Seen]:
        return self.stage.ledger if self.stage else []

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of library scripts."""
        engine = "node" if self.stage is None else "actor"
        return {
            "APPS_URL": self.url,
            "APPS_MODEL": self.model,
            "APPS_ENGINE": engine,
            "OPENAI_API_KEY": "none",
        }

    def python(self, venv: str) -> Path:
        return self.folder / venv / "bin" / "python"

    def home(self) -> Path:
        """A fresh home with a folder `project` in it, in which `secret.txt` is."""
        home = Path(tempfile.mkdtemp(prefix="apps-"))
        self.temporary.append(home)
        (home / "project").mkdir()
        (home / "project" / "secret.txt").write_text("FALCON-7749\n")
        return home

    def start(
        self,
        command: Command,
        home: Path,
        more: Mapping[str, str] | None = None,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        out: IO[bytes] | int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """A process in a group of its own, with nothing of this environment."""
        places = [self.npm / "node_modules" / ".bin", self.folder / "aider" / "bin", "/usr/bin", "/bin"]
        path = ":".join(map(str, places))
        environment = {"HOME": str(home), "PATH": path, "TERM": "dumb", "LANG": "C.UTF-8", **(more or {})}
        words, project = [str(part) for part in command], home / "project"
        return subprocess.Popen(words, env=environment, cwd=project, stdin=stdin, stdout=out,
                                stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip

    def run(self, command: Command, home: Path, more: Mapping[str, str] | None = None, *,
            stdin: str = "", limit_s: float = LIMIT_S, interrupt_s: float = 0.0) -> Output:  # fmt: skip
        """Run one command to its end or its limit. `interrupt_s`: when it gets a Ctrl-C."""
        late = False
        with tempfile.TemporaryFile() as words, tempfile.TemporaryFile() as out:
            words.write(stdin.encode())
            words.seek(0)
            process = self.start(command, home, more, words, out)
            try:
                if interrupt_s:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(interrupt_s)
                    process.send_signal(signal.SIGINT)
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                end(process)
            out.seek(0)
            text = out.read().decode(errors="replace") + f" (ended after {limit_s:g} s)" * late
        return Output(text, process.returncode, late)

    def launch(self, app: str, arguments: Sequence[str], otherwise: Sequence[str]) -> list[object]:
        """The command by `mlxtp launch`, or `otherwise` where it does not know the program."""
        launch: list[object] = [MLXTP, "launch", app, "--home", self.agent_home]
        known = not self.run([*launch, "--print"], self.home()).code
        return [*launch, "--", *arguments] if known else [*otherwise]

    @contextlib.contextmanager
    def server(self, command: Command, home: Path, more: Mapping[str, str], url: str,
               within_s: float) -> Iterator[None]:  # fmt: skip
        """A server that runs until the block ends. It is up when it answers at `url`."""
        with (home / "server.log").open("wb") as log:
            process = self.start(command, home, more, out=log)
            try:
                wait_for(url, within_s)
                yield
            finally:
                end(process)

    def close(self) -> None:
        for folder in self.temporary:
            shutil.rmtree(folder, ignore_errors=True)


def node(home: Path | str, at: str) -> list[object]:
    """The command of an agent with one rank and the embedded model, at an address HOST:PORT."""
    return [MLXTP, "node", "--alone", "--ranks", "1", "--home", home, "--http", at]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group by their id."""
    for name in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, name)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def wait_for(url: str, within_s: float) -> None:
    """Wait until something answers at `url`. Raises TimeoutError."""
    ends_at = time.monotonic() + within_s
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > ends_at:
                raise TimeoutError(f"nothing answers at {url} after {within_s:g} s") from None
        time.sleep(0.5)


def post(url: str, body: Mapping[str, Any], key: str = "none", limit_s: float = LIMIT_S) -> str:
    """The answer to one request, as text."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=limit_s) as answer:
        return str(answer.read().decode())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def install(folder: Path, npm: Path, wanted: set[str]) -> None:
    """Install what is not there yet, one after the other. `wanted` are environments and "npm"."""
    if "npm" in wanted and not (npm / "node_modules").is_dir():
        npm.mkdir(parents=True, exist_ok=True)
        (npm / "package.json").write_text("{}")
        packages = [f"{name}@{version}" for name, version in VERSIONS["npm"].items()]
        print(f"installing {' '.join(packages)}", flush=True)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", *packages], cwd=npm, check=True)
    for name, packages in VERSIONS["pip"].items():
        if name not in wanted or (folder / name / "installed").exists():
            continue
        pinned = [f"{package}=={version}" for package, version in packages.items()]
        print(f"installing {' '.join(pinned)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
        pip = [folder / name / "bin" / "pip", "install", "--quiet", *pinned]
        subprocess.run([str(part) for part in pip], check=True)
        (folder / name / "installed").touch()


def says(tried: str, output: Output, *expected: str) -> Check:
    """One check of a command's words."""
    good = not output.late and all(words in f"\n{output.text}" for words in expected)
    return Check(tried, good, "" if good else output.last())


def shares(ledger: Sequence[Seen]) -> Check:
    """Every long prompt begins with the whole long prompt before it."""
    seen = [each for each in ledger if len(each.prompt) > LONG_PROMPT]
    lost = [len(one.prompt) - two.shared for one, two in itertools.pairwise(seen)]
    note = f"{lost} tokens of the prompts before are lost" if max(lost, default=1) > 0 else ""
    return Check("prefix reused", not note, note)
