"""`make soak`: two agents on this machine under mixed load, while ranks and one of the agents fail.

In the middle third nothing fails, so that ranks live long enough for their memory to be watched. Ends with
status 1 when an answer was wrong, lost or without an end, when a process grew, or when something is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..agents.agents import Agent, serving
from ..agents.test_one_machine import free_port
from ..chaos.harness import alive
from ..live_cluster import SLOWNESS, rank_processes, until
from .load import App, questions, without_faults
from .report import Asked, Fault, Sample, Soak, Watched, tables

APPS = 4
"""At each agent."""
EVERY_S = 5.0
REST_S = (32.0, 45.0)
"""Between serving again and the next fault. Five failures within 120 s would be the last."""
SERVES_S = 90 * SLOWNESS
HANGS_S = 150 * SLOWNESS


class Pair:
    """`anna` stays all the time; `ben` comes and goes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {"anna": (free_port(), free_port()), "ben": (free_port(), free_port())}
        self.anna, self.ben = (
            Agent(
                folder, name, None, "--http", f"127.0.0.1:{http}", "--control", f"127.0.0.1:{control}",
                "--interface", "127.0.0.1", "--no-discovery", "--spare",
            )
            for name, (http, control) in self.ports.items()
        )  # fmt: skip

    @property
    def agents(self) -> tuple[Agent, Agent]:
        return self.anna, self.ben

    def url(self, agent: Agent) -> str:
        return f"http://127.0.0.1:{self.ports[agent.name][0]}"

    def start(self) -> None:
        self.anna.start()
        self.ben.start("--join", self.anna.first_token(), "--peer", f"127.0.0.1:{self.ports['anna'][1]}")
        serving(*self.agents)

    def rest(self) -> None:
        """No client asks, and every rank that waits to be needed is there."""
        until(
            lambda: all(agent.health()["open_requests"] == 0 for agent in self.agents), "no request is open"
        )
        until(lambda: all(len(rank_processes(agent.home)) == 2 for agent in self.agents), "ranks and spares")
        time.sleep(2.0)

    def close(self) -> list[str]:
        """End both in order; what is left of them."""
        for agent in reversed(self.agents):
            with contextlib.suppress(ProcessLookupError):
                agent.stop()
        marks = [str(agent.home) for agent in self.agents]
        return [
            f"process {process.pid} is left: {process.info['cmdline']}"
            for process in psutil.process_iter(["cmdline"])
            if any(mark in " ".join(process.info["cmdline"] or ()) for mark in marks)
        ]


# --- faults -----------------------------------------------------------------------------------------------


def kill_a_rank(pair: Pair, chance: random.Random) -> None:
    os.kill(_a_rank(pair, chance), signal.SIGKILL)


def stop_a_rank(pair: Pair, chance: random.Random) -> None:
    pid = _a_rank(pair, chance)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: not alive(pid), "its agent ends a rank that stands still")


def hold_a_rank(pair: Pair, chance: random.Random) -> None:
    pid = _a_rank(pair, chance)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.8)
    os.kill(pid, signal.SIGCONT)


def kill_an_agent(pair: Pair, chance: random.Random) -> None:
    pair.ben.kill()
    time.sleep(chance.uniform(0, 5))
    pair.ben.start()


def restart_an_agent(pair: Pair, chance: random.Random) -> None:
    pair.ben.stop()
    time.sleep(chance.uniform(0, 5))
    pair.ben.start()


def put_a_mac_to_sleep(pair: Pair, chance: random.Random) -> None:
    pair.ben.signal_everything(signal.SIGSTOP)
    time.sleep(chance.uniform(4, 8))
    pair.ben.signal_everything(signal.SIGCONT)


def kill_a_spare(pair: Pair, chance: random.Random) -> None:
    spares = [pid for pid in _processes(pair) if not psutil.Process(pid).net_connections()]
    os.kill(chance.choice(spares), signal.SIGKILL)


def _a_rank(pair: Pair, chance: random.Random) -> int:
    """Return whether it is a rank: unlike a spare it is connected to others."""
    return chance.choice([pid for pid in _processes(pair) if psutil.Process(pid).net_connections()])


def _processes(pair: Pair) -> list[int]:
    return [pid for agent in pair.agents for pid in rank_processes(agent.home)]


FAULTS: dict[str, Callable[[Pair, random.Random], None]] = {
    "a rank is killed": kill_a_rank,
    "a spare is killed": kill_a_spare,
    "a rank stands still": stop_a_rank,
    "a rank stands still for 0.8 s": hold_a_rank,
    "an agent is killed": kill_an_agent,
    "an agent is started again": restart_an_agent,
    "an agent and its ranks stand still for a while": put_a_mac_to_sleep,
}


# --- a run ------------------------------------------------------------------------------------------------


class Run:
    """Until `seconds` are over."""

    def __init__(self, pair: Pair, soak: Soak, console: Console) -> None:
        self.pair, self.soak, self.console = pair, soak, console
        self.chance = random.Random(soak.seed)
        self._began = time.monotonic()
        self._watched: dict[int, Watched] = {}
        self._over = threading.Event()
        self.apps: list[App] = []

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def go(self, progress: Progress, task: TaskID) -> None:
        pair, soak = self.pair, self.soak
        assert pair.anna.process is not None
        progress.update(task, text="the right answers, while nothing fails")
        expected = without_faults(pair.url(pair.anna), questions(self.chance))
        pair.rest()
        self._began = time.monotonic()
        steady = self._watched[pair.anna.process.pid] = Watched("agent anna")
        first = sample(pair.anna.process.pid, self.now)
        self.apps = [
            App(agent.name, pair.url(agent), expected, f"{soak.seed} {agent.name} {number}")
            for agent in pair.agents
            for number in range(APPS)
        ]
        watch = threading.Thread(target=self._watch, args=(progress, task), daemon=True)
        watch.start()
        try:
            self._fail_until(soak.seconds / 3)
            self._calm_until(soak.seconds * 2 / 3)
            self._fail_until(soak.seconds)
        except KeyboardInterrupt:
            soak.cut_short_at = self.now
            self.console.print(f"{self.now:7.0f} s  ended early; what is open is waited for")
        finally:
            self._over.set()
            watch.join()
            hung = [app for app in self.apps if not app.close(HANGS_S)]
            for agent in pair.agents:
                soak.asked.append(
                    summed(agent.name, [app for app in self.apps if app.agent == agent.name], hung)
                )
        pair.rest()
        steady.idle = (first, sample(pair.anna.process.pid, self.now))
        soak.processes += [process for process in self._watched.values() if len(process.samples) > 1]

    def _fail_until(self, end: float) -> None:
        names = list(FAULTS)
        while self.now < end:
            if not names:
                names = list(FAULTS)
            name = names.pop(self.chance.randrange(len(names)))
            fault = self._fail(name)
            self.soak.faults.append(fault)
            pause = f"{fault.pause_s:5.1f} s" if fault.pause_s is not None else "nothing"
            self.console.print(f"{fault.at:7.0f} s  {fault.name:48} {pause} {fault.problem[:300]}")
            self._rest(min(self.chance.uniform(*REST_S), max(end - self.now, 5.0)))

    def _fail(self, name: str) -> Fault:
        pair, at = self.pair, self.now
        epoch = pair.anna.status()["epoch"]
        try:
            FAULTS[name](pair, self.chance)
            time.sleep(0.5)  # until it has been noticed
            serving(*pair.agents, within_s=SERVES_S)
        except AssertionError as error:
            return Fault(name, at, problem=str(error))
        same = pair.anna.status()["epoch"] == epoch
        if not same and FAULTS[name] in (hold_a_rank, kill_a_spare):
            return Fault(name, at, self.now - at, "the epoch ended, although nothing was to happen")
        return Fault(name, at, None if same else self.now - at)

    def _calm_until(self, end: float) -> None:
        """The ranks of this time are watched."""
        if self.now >= end:
            return
        self.console.print(f"{self.now:7.0f} s  nothing fails")
        for agent in self.pair.agents:
            for number, pid in enumerate(rank_processes(agent.home)):
                self._watched[pid] = Watched(f"rank or spare {number} of {agent.name}")
        assert self.pair.ben.process is not None
        self._watched[self.pair.ben.process.pid] = Watched("agent ben")
        self._rest(end - self.now)
        for pid in [pid for pid, process in self._watched.items() if process.name != "agent anna"]:
            self.soak.processes.append(self._watched.pop(pid))

    def _rest(self, seconds: float) -> None:
        time.sleep(max(seconds, 0.0))

    def _watch(self, progress: Progress, task: TaskID) -> None:
        while not self._over.wait(EVERY_S):
            for pid, process in list(self._watched.items()):
                with contextlib.suppress(psutil.Error):
                    process.samples.append(sample(pid, self.now))
            right, wrong = (sum(app.outcomes[what] for app in self.apps) for what in ("right", "wrong"))
            text = f"{right:,} answers right, {wrong} wrong"
            progress.update(task, completed=min(self.now, self.soak.seconds), text=text)


def sample(pid: int, at: float) -> Sample:
    process = psutil.Process(pid)
    return Sample(at, process.memory_info().rss / 1e6, process.num_fds(), process.num_threads())


def summed(agent: str, apps: list[App], hung: list[App]) -> Asked:
    asked = Asked(agent)
    for app in (app for app in apps if app.agent == agent):
        asked.outcomes += app.outcomes
        asked.codes += app.codes
        asked.kinds += app.kinds
        asked.tokens += app.tokens
        asked.complaints += app.complaints
        asked.hung += app in hung
    return asked


@contextlib.contextmanager
def two_agents() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="mlxtp-soak-") as folder:
        pair = Pair(Path(folder))
        try:
            yield pair
        finally:
            for agent in pair.agents:
                agent.close()


def soaked(minutes: float, seed: int, console: Console) -> Soak:
    """One run. Raises AssertionError when the agents do not even begin to serve."""
    soak = Soak(seed, minutes * 60, "anna")
    columns = (BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn(), TimeRemainingColumn())
    with two_agents() as pair, Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=soak.seconds, text="two agents start")
        pair.start()
        Run(pair, soak, console).go(progress, task)
        soak.left_over += pair.close()
    return soak


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the load and of the faults")
    parser.add_argument("--json", type=Path, help="a file for all of it")
    args = parser.parse_args()
    console = Console()
    soak = soaked(args.minutes, args.seed, console)
    for table in tables(soak):
        console.print(table)
    if args.json:
        args.json.write_text(json.dumps(soak.as_json(), indent=1) + "\n")
    for problem in soak.problems:
        console.print(f"[red]✗[/] {problem[:2000]}", highlight=False)
    if soak.cut_short_at is not None:
        console.print(f"ended after {soak.cut_short_at / 60:.1f} of {soak.seconds / 60:g} minutes")
    if not soak.problems:
        console.print("[green]✓[/] every answer right and whole, nothing grew, nothing is left")
    sys.exit(1 if soak.problems else 0)


if __name__ == "__main__":
    main()
