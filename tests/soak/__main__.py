"""`make soak`: clusters of agents on this machine under mixed load, while ranks and agents fail.

In the middle third nothing fails, so that ranks live long enough for their memory to be watched. Ends with
status 1 when an answer was wrong, lost or without an end, when a process grew, when a group ended that no
fault concerned, or when something is left.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mlxtp.config import embedded_model_path

from ..agents.agents import NODE, SECRET, Agent
from ..agents.test_one_machine import free_port
from ..chaos.harness import alive
from ..live_cluster import SLOWNESS, rank_processes, until
from .load import HANGS_S, RIGHT, WRONG, App, questions, without_faults
from .report import Asked, Fault, Sample, Soak, Watched, tables

APPS = 3
"""At each agent."""
EVERY_S = 5.0
STILL_S = 90 * SLOWNESS  #: The longest time in which nothing may change on the way to being ready.
LOOKS_S = 2.0
LONGEST_S = 8 * STILL_S  #: The longest way.
#: Has glibc give large blocks back as they are freed: resident memory is then what a process holds.
ALLOCATOR = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}


@dataclass(frozen=True)
class Shape:
    """Agents by name, of which the first stays, and what they serve: replicas by deployment.

    A group has `ranks` ranks. `flags` go with every start of an agent, which has `spares` or none. `rest_s`,
    at least and at most, is between being ready again and the next fault: five failures of a group within
    120 s would be its last.
    """

    names: tuple[str, ...]
    replicas: dict[str, int]
    ranks: int
    rest_s: tuple[float, float]
    flags: tuple[str, ...]
    faults: dict[str, Callable[[Cluster, random.Random], set[str]]]
    spares: bool = False

    def processes(self, groups: int) -> int:
        """Number of ranks and spares while all of so many groups are well."""
        return groups * self.ranks + self.spares * len(self.names)


class Cluster:
    """Agents on the loopback. The first one, `stays`, lives all the time; the `others` come and go."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder = folder
        self.shape = shape
        self.ports = {name: (free_port(), free_port()) for name in shape.names}
        self.agents = [
            Agent(
                folder, name, None, "--http", f"127.0.0.1:{http}", "--control", f"127.0.0.1:{control}",
                "--no-discovery", *shape.flags,
                program=("mlxtp",) if shape.spares else NODE,
            )
            for name, (http, control) in self.ports.items()
        ]  # fmt: skip
        self.stays, *self.others = self.agents
        self.turns = {each: itertools.cycle(each) for each in (tuple(self.agents), tuple(self.others))}

    def next(self, agents: list[Agent]) -> Agent:
        """Each of them in turn."""
        return next(self.turns[tuple(agents)])

    def url(self, agent: Agent) -> str:
        return f"http://127.0.0.1:{self.ports[agent.name][0]}"

    def start(self) -> None:
        """Found the cluster with an agent that will be killed: it coordinates at first."""
        founder = self.others[0]
        founder.start()
        token = founder.first_token()
        for agent in self.agents:
            if agent is not founder:
                agent.start("--join", token, "--peer", f"127.0.0.1:{self.ports[founder.name][1]}")
                self.patiently(lambda agent=agent: founder.member(agent), f"{agent.name} has joined")
                token = founder.token()
        for name, count in self.shape.replicas.items():
            if name != "tiny" or count > 1:
                self.serve(name, replicas=str(count))
        self.ready()

    def serve(self, name: str, **fields: str) -> None:
        """As `mlxtp serve` does it at any agent that runs."""
        nodes = fields.pop("nodes", str(self.shape.ranks))
        model = name if name == "tiny" else str(self._model(name))
        self.stays.post("serve", model=model, nodes=nodes, **fields)

    def _model(self, name: str) -> Path:
        """A copy of the tiny model that draws other tokens: its logits are smaller."""
        folder = self.folder / name
        if not folder.exists():
            shutil.copytree(embedded_model_path(), folder)
            weights = str(folder / "model.safetensors")
            tensors = dict(mx.load(weights))
            tensors["model.norm.weight"] = tensors["model.norm.weight"] * 0.8
            mx.save_safetensors(weights, tensors, metadata={"format": "mlx"})
        return folder

    def close(self) -> list[str]:
        """End all in order; what is left of them."""
        for agent in reversed(self.agents):
            with contextlib.suppress(ProcessLookupError):
                agent.stop()
        marks = [str(agent.home) for agent in self.agents]
        return [
            f"process {process.pid} is left: {process.info['cmdline']}"
            for process in psutil.process_iter(["cmdline"])
            if any(mark in " ".join(process.info["cmdline"] or ()) for mark in marks)
        ]

    def groups(self, agent: Agent | None = None) -> dict[str, dict[str, Any]]:
        """Rows of all groups by id, as an agent sees them; by default the one that stays."""
        rows = (agent or self.stays).status().get("deployments", ())
        return {group["id"]: group for row in rows for group in row["groups"]}

    def at(self, agent: Agent) -> set[str]:
        """Ids of the groups with a rank on this Mac."""
        return {
            name
            for name, group in self.groups().items()
            if agent.name in (member["name"] for member in group["members"])
        }

    def ranks(self, *agents: Agent) -> list[int]:
        """Pids of ranks. A spare, unlike a rank of several, is connected to no other process."""
        pids = [pid for agent in agents or self.agents for pid in rank_processes(agent.home)]
        return [pid for pid in pids if self.shape.ranks == 1 or psutil.Process(pid).net_connections()]

    def ready(self, **also: int) -> None:
        """Wait until all agents see all groups ready, each group runs once, and each agent answers for each
        deployment. A Mac that comes back alone serves what it served, until it hears who has it now.

        `also`: replicas by deployment, where they are others than those of the shape.
        """
        wanted = {name: count for name, count in (self.shape.replicas | also).items() if count}
        ids = {f"{name}#{index}" for name, count in wanted.items() for index in range(count)}

        def agree() -> bool:
            views = [self.groups(agent) for agent in self.agents]
            whole = all(
                set(view) == ids and all(self._ready(group) for group in view.values()) for view in views
            )
            return whole and all(len({_life(view[each]) for view in views}) == 1 for each in ids)

        def answer() -> bool:
            return all(agent.chat(model=name) == SECRET for agent in self.agents for name in wanted)

        once = self.shape.processes(len(ids))
        self.patiently(
            lambda: agree() and self._processes() == once and answer(),
            f"{', '.join(sorted(ids))} are ready at all",
        )

    def rest(self) -> None:
        """No client asks, and every rank that waits to be needed is there."""
        self.patiently(
            lambda: all(agent.health()["open_requests"] == 0 for agent in self.agents), "no request is open"
        )
        count = self.shape.processes(sum(self.shape.replicas.values()))
        self.patiently(lambda: self._processes() == count, f"{count} ranks and spares")
        time.sleep(2.0)

    def patiently(self, condition: Callable[[], object], what: str) -> None:
        """Wait for as long as something changes, however slowly."""
        began = changed_at = looked_at = time.monotonic()
        seen: object = None
        while not condition():
            now = time.monotonic()
            if now - looked_at > LOOKS_S:
                looked_at, before = now, seen
                seen = [self._seen(agent) for agent in self.agents if agent.runs]
                changed_at = now if seen != before else changed_at
            still = now - changed_at > STILL_S
            assert not still, f"{what}: not yet, and nothing has changed for {STILL_S:g} s: {seen}"
            assert now - began < LONGEST_S, f"{what}: not within {LONGEST_S:g} s: {seen}"
            time.sleep(0.1)

    def _processes(self) -> int:
        return sum(len(rank_processes(agent.home)) for agent in self.agents)

    def _ready(self, group: dict[str, Any]) -> bool:
        return group["state"] == "ready" and len(group["members"]) == self.shape.ranks

    def _seen(self, agent: Agent) -> object:
        rows = [(name, group["state"], _life(group)) for name, group in self.groups(agent).items()]
        return agent.name, sorted(rows), rank_processes(agent.home)


def _life(group: dict[str, Any]) -> tuple[str, int]:
    """A group's epoch; its number is unique for an owner."""
    return str(group["owner_name"]), int(group["epoch"])


def has_ended(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> dict[str, tuple[object, object]]:
    """Return the epochs of before and of now of the groups that have ended meanwhile."""
    lives = {
        each: (_life(row), _life(after[each]) if each in after else None) for each, row in before.items()
    }
    return {each: life for each, life in lives.items() if life[0] != life[1]}


def kill_a_rank(cluster: Cluster, chance: random.Random) -> set[str]:
    agent, pid = _a_rank(cluster, chance)
    may_end = cluster.at(agent)
    os.kill(pid, signal.SIGKILL)
    return may_end


def stop_a_rank(cluster: Cluster, chance: random.Random) -> set[str]:
    agent, pid = _a_rank(cluster, chance)
    may_end = cluster.at(agent)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: not alive(pid), "its agent ends a rank that stands still")
    return may_end


def hold_a_rank(cluster: Cluster, chance: random.Random) -> set[str]:
    _, pid = _a_rank(cluster, chance)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.8)
    os.kill(pid, signal.SIGCONT)
    return set()


def kill_a_spare(cluster: Cluster, chance: random.Random) -> set[str]:
    ranks = cluster.ranks()
    everything = [pid for agent in cluster.agents for pid in rank_processes(agent.home)]
    os.kill(chance.choice([pid for pid in everything if pid not in ranks]), signal.SIGKILL)
    return set()


def start_an_agent_again(end: Callable[[Agent], object], cluster: Cluster, chance: random.Random) -> set[str]:
    agent = cluster.next(cluster.others)
    may_end = cluster.at(agent)
    end(agent)
    time.sleep(chance.uniform(0, 5))
    agent.start()
    return may_end


def put_a_mac_to_sleep(cluster: Cluster, chance: random.Random) -> set[str]:
    agent = cluster.next(cluster.others)
    may_end = cluster.at(agent)
    agent.signal_everything(signal.SIGSTOP)
    time.sleep(chance.uniform(4, 8))
    agent.signal_everything(signal.SIGCONT)
    return may_end


def come_and_go(cluster: Cluster, chance: random.Random) -> set[str]:
    """A Mac that is there for a few seconds, three times."""
    agent = cluster.next(cluster.others)
    may_end = cluster.at(agent)
    for _ in range(3):
        agent.kill()
        time.sleep(chance.uniform(0, 5))
        agent.start()
        time.sleep(chance.uniform(3, 10))
        may_end |= cluster.at(agent)
    return may_end


def add_change_unload(cluster: Cluster, chance: random.Random) -> set[str]:
    """A third model comes, gets a second replica, and goes."""
    for replicas in (1, 2):
        cluster.serve("late", replicas=str(replicas))
        cluster.ready(late=replicas)
    cluster.stays.post("unload", model="late")
    return set()


def more_and_fewer(cluster: Cluster, chance: random.Random) -> set[str]:
    """A deployment gets a replica more, and loses it again."""
    name, count = chance.choice(list(cluster.shape.replicas.items()))
    for replicas in (count + 1, count):
        cluster.serve(name, replicas=str(replicas))
        cluster.ready(**{name: replicas})
    return set()


def move(cluster: Cluster, chance: random.Random) -> set[str]:
    """A deployment goes to another Mac by a user's word, and may stay there."""
    name = next(name for name, count in cluster.shape.replicas.items() if count == 1)
    here = cluster.groups()[f"{name}#0"]["owner_name"]
    other = chance.choice([agent.name for agent in cluster.agents if agent.name != here])
    cluster.serve(name, on=other)
    cluster.patiently(lambda: cluster.groups()[f"{name}#0"]["owner_name"] == other, f"{name} is on {other}")
    cluster.ready()
    cluster.serve(name, on="any")
    return {f"{name}#0"}


def _is_rank(process: psutil.Process) -> bool:
    """Return True for a rank, or a spare, and False for the process of a tokenizer."""
    with contextlib.suppress(psutil.Error):
        return "mlxtp.engine.worker" in process.cmdline()
    return False


def _a_rank(cluster: Cluster, chance: random.Random) -> tuple[Agent, int]:
    """One of the next Mac that has any."""
    while True:
        agent = cluster.next(cluster.agents)
        if pids := cluster.ranks(agent):
            return agent, chance.choice(pids)


_FAULTS = {
    "a rank is killed": kill_a_rank,
    "a rank stands still": stop_a_rank,
    "a rank stands still for 0.8 s": hold_a_rank,
    "an agent is killed": partial(start_an_agent_again, Agent.kill),
    "an agent is started again": partial(start_an_agent_again, Agent.stop),
    "an agent and its ranks stand still for a while": put_a_mac_to_sleep,
}
SHAPES = {
    "group": Shape(
        ("anna", "ben"),
        {"tiny": 1},
        2,
        (32.0, 45.0),
        (),
        {**_FAULTS, "a spare is killed": kill_a_spare},
        spares=True,
    ),
    "deployments": Shape(
        ("anna", "ben", "cleo"),
        {"tiny": 2, "twin": 1},
        1,
        (15.0, 25.0),
        ("--nodes", "1"),
        {
            **_FAULTS,
            "a Mac comes and goes": come_and_go,
            "a model is served, changed and unloaded": add_change_unload,
            "a replica more and one less": more_and_fewer,
            "a model goes to another Mac": move,
        },
    ),
}
"""One group of two Macs; two replicas and a second model on three."""


class Run:
    """Until `seconds` are over."""

    def __init__(self, cluster: Cluster, soak: Soak, console: Console) -> None:
        self.cluster, self.soak, self.console = cluster, soak, console
        self.chance = random.Random(soak.seed)
        self._began = time.monotonic()
        self._watched: dict[int, Watched] = {}
        self._over = threading.Event()
        self._coming: list[str] = []
        """Faults whose turn has not come since all have."""
        self.apps: list[App] = []

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def go(self, progress: Progress, task: TaskID) -> None:
        cluster, soak = self.cluster, self.soak
        stays = cluster.stays.process.pid
        progress.update(task, text="the right answers, while nothing fails")
        expected = without_faults(cluster.url(cluster.stays), questions(self.chance, cluster.shape.replicas))
        cluster.rest()
        self._began = time.monotonic()
        first = self._sample(stays)
        steady = self._watched[stays] = Watched(f"agent {cluster.stays.name}", idle=(first, first))
        self.apps = [
            App(agent.name, cluster.url(agent), expected, f"{soak.seed} {agent.name} {number}")
            for agent in cluster.agents
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
            for agent in cluster.agents:
                soak.asked.append(
                    summed(agent.name, [app for app in self.apps if app.agent == agent.name], hung)
                )
        try:
            cluster.ready()
            cluster.rest()
        except AssertionError as error:
            soak.left_over.append(f"at the end: {error}")
        steady.idle = (first, self._sample(stays))
        soak.processes += [process for process in self._watched.values() if len(process.samples) > 1]

    def _fail_until(self, end: float) -> None:
        while self.now < end:
            self._coming = self._coming or list(self.cluster.shape.faults)
            name = self._coming.pop(self.chance.randrange(len(self._coming)))
            fault = self._fail(name)
            self.soak.faults.append(fault)
            pause = f"{fault.pause_s:5.1f} s" if fault.pause_s is not None else "nothing"
            self.console.print(f"{fault.at:7.0f} s  {name:48} {pause} {fault.problem[:1000]}")
            time.sleep(min(self.chance.uniform(*self.cluster.shape.rest_s), max(end - self.now, 5.0)))

    def _fail(self, name: str) -> Fault:
        cluster, at = self.cluster, self.now
        before = cluster.groups()
        try:
            may_end = cluster.shape.faults[name](cluster, self.chance)
            time.sleep(0.5)  # until it has been noticed
            cluster.ready()
        except AssertionError as error:
            return Fault(name, at, problem=str(error))
        ended = has_ended(before, cluster.groups())
        wrong = ended.keys() - may_end
        problem = f"groups ended that it does not concern: {sorted(wrong)} of {ended}" if wrong else ""
        return Fault(name, at, self.now - at if ended else None, problem)

    def _calm_until(self, end: float) -> None:
        """The ranks of this time are watched."""
        if self.now >= end:
            return
        self.console.print(f"{self.now:7.0f} s  nothing fails")
        for agent in self.cluster.agents:
            for number, pid in enumerate(rank_processes(agent.home)):
                self._watched[pid] = Watched(f"rank or spare {number} of {agent.name}")
        for agent in self.cluster.others:
            self._watched[agent.process.pid] = Watched(f"agent {agent.name}")
        time.sleep(max(end - self.now, 0.0))
        for pid in [pid for pid, process in self._watched.items() if process.idle is None]:
            self.soak.processes.append(self._watched.pop(pid))

    def _watch(self, progress: Progress, task: TaskID) -> None:
        while not self._over.wait(EVERY_S):
            graphs = self._graphs() if len(self._watched) > 1 else {}
            for pid, process in list(self._watched.items()):
                with contextlib.suppress(psutil.Error):
                    process.samples.append(self._sample(pid, graphs.get(pid, 0)))
            text = f"{self._count(RIGHT):,} answers right, {self._count(WRONG)} wrong"
            progress.update(task, completed=min(self.now, self.soak.seconds), text=text)

    def _count(self, outcome: str) -> int:
        return sum(app.outcomes[outcome] for app in self.apps)

    def _graphs(self) -> dict[int, int]:
        """Return the number of traced graphs of each rank, by pid: all ranks of a group have the same."""
        found = [agent.status() for agent in self.cluster.agents]
        of_pid = {
            rank["pid"]: rank["graphs"] for each in found for rank in each.get("ranks", ()) if rank["pid"]
        }
        members: dict[str, list[int]] = {}
        for each in found:
            for group, pids in each.get("processes", {}).items():
                members.setdefault(group, []).extend(pids)
        return {
            pid: max([of_pid.get(other, 0) for other in pids]) for pids in members.values() for pid in pids
        }

    def _sample(self, pid: int, graphs: int = 0) -> Sample:
        process, now = psutil.Process(pid), self.now
        memory_mb, ranks = process.memory_info().rss / 1e6, sum(map(_is_rank, process.children()))
        descriptors, threads = process.num_fds(), process.num_threads()
        return Sample(now, memory_mb, descriptors, threads, self._count(RIGHT), ranks, graphs)


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
def agents(shape: Shape) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="mlxtp-soak-") as folder:
        cluster = Cluster(Path(folder), shape)
        try:
            yield cluster
        finally:
            for agent in cluster.agents:
                agent.close()


def soaked(name: str, minutes: float, seed: int, console: Console) -> Soak:
    """One run of a shape. Raises AssertionError when the agents do not even begin to serve."""
    shape = SHAPES[name]
    soak = Soak(name, seed, minutes * 60, shape.names[0])
    columns = (BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn(), TimeRemainingColumn())
    with agents(shape) as cluster, Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=soak.seconds, text=f"{len(shape.names)} agents start")
        cluster.start()
        Run(cluster, soak, console).go(progress, task)
        soak.left_over += cluster.close()
    return soak


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of all shapes together")
    parser.add_argument("--seed", type=int, default=0, help="of the load and of the faults")
    parser.add_argument("--only", choices=SHAPES, help="one shape of the cluster")
    parser.add_argument("--json", type=Path, help="a file for all of it")
    args = parser.parse_args()
    os.environ.update(ALLOCATOR)
    console, soaks = Console(), list[Soak]()
    for name in [args.only] if args.only else list(SHAPES):
        soaks.append(soaked(name, args.minutes / (1 if args.only else len(SHAPES)), args.seed, console))
        for table in tables(soaks[-1]):
            console.print(table)
        if soaks[-1].cut_short_at is not None:
            break
    if args.json:
        args.json.write_text(json.dumps([soak.as_json() for soak in soaks], indent=1) + "\n")
    for soak in soaks:
        for problem in soak.problems:
            console.print(f"[red]✗[/] {soak.shape}: {problem[:2000]}", highlight=False)
        if soak.cut_short_at is not None:
            console.print(f"ended after {soak.cut_short_at / 60:.1f} of {soak.seconds / 60:g} minutes")
    if not any(soak.problems for soak in soaks):
        console.print("[green]✓[/] every answer right and whole, nothing grew, nothing is left")
    sys.exit(1 if any(soak.problems for soak in soaks) else 0)


if __name__ == "__main__":
    main()
