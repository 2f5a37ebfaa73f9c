"""A cluster whose ranks err on order, what it went through, and what must hold after every fault."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from mlxtp import doctor
from mlxtp.config import Limits
from mlxtp.errors import Code, MlxtpError
from mlxtp.node.epoch import State, is_legal
from mlxtp.postmortem.examination import Postmortem

from ..cluster import LIMITS, SLOWNESS, Cluster, until
from .orders import Order, OrderBook

FAULT_LIMITS = dataclasses.replace(
    LIMITS,
    heartbeat_s=0.25,
    silence_s=3.0 * SLOWNESS,
    ack_s=2.0 * SLOWNESS,
    decode_stall_s=4.0 * SLOWNESS,
    form_s=6.0 * SLOWNESS,
)
"""Shorter than in production where a test waits for the limit to pass."""
STALL_S = 2 * FAULT_LIMITS.decode_stall_s + 2 * FAULT_LIMITS.heartbeat_s + 0.5 * SLOWNESS
"""When a stuck decode must have been noticed: twice its limit, which a watch that was late itself allows."""
ACK_S = FAULT_LIMITS.ack_s + 0.5 * SLOWNESS
"""When an acknowledgement that does not come must have been noticed."""

RESTART_S = 15 * SLOWNESS
"""For reaping an epoch, a rank that hears no SIGTERM included, the backoff and forming the next. A free
machine takes 1.4 to 4 s; most of it is imports, which suffer most from a busy one."""

LONG = "Repeat exactly: " + "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" * 3
"""117 tokens, four chunks of prefill in a `FaultyCluster`; the answer is about as long."""
COUNT = "Count from 1 to 60."
"""The longest answer that the tiny model has learned: 171 tokens."""
SHORT = "Repeat exactly: FALCON-MERCURY-7749"

REPORT = os.environ.get("MLXTP_FAULT_REPORT")
"""A file to which every fault's finding is appended as a line of JSON."""


@dataclass(frozen=True)
class Moment:
    """A state that was entered, or (`error`) the end of an epoch."""

    at: float
    epoch: int
    state: State | None = None
    error: MlxtpError | None = None


@dataclass
class Answer:
    """What a client got over one stream, until its end. Times are time.time()."""

    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    ended_at: float = 0.0

    @property
    def code(self) -> str | None:
        return self.error["code"] if self.error else None


class FaultyCluster(Cluster):
    """Two ranks that take orders, and a record of every state and every epoch's end.

    Without speculation and prefix cache unless asked for: then N tokens are N forwards, whatever was asked
    before, and orders can say at which of them something happens.
    """

    def __init__(self, folder: Path, *, limits: Limits = FAULT_LIMITS, **settings: Any) -> None:
        self.moments: list[Moment] = []
        self._right: dict[tuple[str, str], str] = {}
        orders = folder / "orders"
        orders.mkdir()
        self.book = OrderBook(orders)
        self.first_orders = settings.pop("orders", ())
        self.book.give(*self.first_orders)
        worker = (sys.executable, "-m", "tests.chaos.worker", str(orders))
        wait = settings.pop("wait", True)
        plain = {"prefill_chunk": 32, "speculation": False, "prefix_cache": False}
        super().__init__(folder / "home", worker=worker, limits=limits, wait=False, **plain | settings)
        self._observe()
        if wait:
            self.wait_ready()
            assert self.right(SHORT) == "FALCON-MERCURY-7749"
            assert len(self.right(LONG)) > 50, "too short an answer to break off"

    def _observe(self) -> None:
        supervisor, gateway = self.supervisor, self.supervisor.gateway
        enter, suspend = supervisor._enter, gateway.suspend

        def observed_enter(state: State) -> None:
            self.moments.append(Moment(time.time(), supervisor.epoch, state))
            enter(state)

        def observed_suspend(error: MlxtpError) -> None:
            self.moments.append(Moment(time.time(), supervisor.epoch, error=error))
            suspend(error)

        supervisor._enter, gateway.suspend = observed_enter, observed_suspend  # type: ignore[method-assign]

    # --- ordering faults -----------------------------------------------------------------------------

    def order(self, fault: str, rank: int, *, epoch: int | None = None, **details: Any) -> None:
        """One fault, in the present epoch unless another is named; it takes the place of earlier orders."""
        self.book.clear()
        self.book.give(Order(fault, rank, self.epoch if epoch is None else epoch, **details))

    def tighten(self, **limits: float) -> None:
        """Other limits for the watch over the present epoch: shorter than coming up would allow."""
        ranks = self.supervisor.ranks
        assert ranks is not None
        assert ranks._watch is not None
        ranks._watch._limits = dataclasses.replace(self.settings.limits, **limits)

    def wait_note(self, what: str, count: int = 1) -> list[dict[str, Any]]:
        until(lambda: len(self.book.notes(what)) >= count, f"{count} notes of {what!r}")
        return self.book.notes(what)

    # --- clients -------------------------------------------------------------------------------------

    def read(self, prompt: str, **fields: Any) -> Answer:
        """Stream one answer to its end, whatever that is; fails when it has none."""
        answer = Answer()
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 400, "temperature": 0}
        with httpx.stream(
            "POST",
            f"{self.url}/v1/chat/completions",
            json=body | fields | {"stream": True},
            timeout=120 * SLOWNESS,
        ) as response:
            if response.status_code != 200:
                response.read()
                answer.error = response.json()["error"]
            else:
                read_events(response.iter_lines(), answer)
        answer.ended_at = time.time()
        return answer

    def right(self, prompt: str, max_tokens: int = 400, **fields: Any) -> str:
        """The answer without any fault; ask for it before one is ordered."""
        fields["max_tokens"] = max_tokens
        key = (prompt, json.dumps(fields, sort_keys=True))
        if key not in self._right:
            answer = self.read(prompt, **fields)
            assert answer.done, answer
            self._right[key] = answer.text
        return self._right[key]

    @contextlib.contextmanager
    def asking(self, prompt: str, **fields: Any) -> Iterator[Callable[[], Answer]]:
        """A client in the background; call what is yielded for its answer."""
        answers: list[Answer] = []
        client = threading.Thread(target=lambda: answers.append(self.read(prompt, **fields)))
        client.start()

        def result() -> Answer:
            client.join(150 * SLOWNESS)
            assert answers, "the client has no answer and no error"
            return answers[0]

        try:
            yield result
        finally:
            client.join(150 * SLOWNESS)

    # --- what it consists of -------------------------------------------------------------------------

    def rank_processes(self, count: int) -> list[psutil.Process]:
        """The living rank processes, those on their way up too, in rank order; none unless there are `count`.

        Unlike `pids`, this asks the system.
        """
        found = {}
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                args = child.cmdline()
                if str(self.book.folder) in args and child.status() != psutil.STATUS_ZOMBIE:
                    found[int(args[args.index("--rank") + 1])] = child
        return [child for _, child in sorted(found.items())] if len(found) == count else []

    def everybody(self) -> set[int]:
        """All living processes that were started for this cluster, whoever their parent is by now."""
        folder = str(self.book.folder)
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if folder in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process.pid)
        return found

    # --- what it went through ------------------------------------------------------------------------

    def ends(self, epoch: int) -> list[Moment]:
        """The errors with which an epoch ended: one, or none yet."""
        return [m for m in self.moments if m.error is not None and m.epoch == epoch]

    def wait_end(self, epoch: int, within_s: float) -> Moment:
        # A model that was unloaded suspends the gateway too, and its epoch goes on.
        def last() -> list[Moment]:
            return [m for m in self.ends(epoch) if m.error and m.error.code is not Code.SHUTTING_DOWN]

        return until(last, f"epoch {epoch} ended", within_s)[0]

    def postmortem(self, epoch: int) -> Postmortem:
        """What is kept of a failed epoch: a file of each rank, and nothing that anybody asked or was told."""
        (folder,) = (self.home / "failures").glob(f"*-epoch-{epoch}")
        assert sorted(path.name for path in folder.iterdir()) == ["epoch.json", "rank-0.json", "rank-1.json"]
        for path in folder.iterdir():
            text = path.read_text()
            assert not [word for word in ("Repeat", "FALCON", "UVWXYZ", "Count from") if word in text]
        (found,) = doctor.postmortems([folder])
        return found

    def states(self) -> list[State]:
        return [m.state for m in self.moments if m.state is not None]


def read_events(lines: Iterator[str], answer: Answer) -> None:
    """Server-sent events into `answer`. What comes after an error or the end is a failure."""
    for line in lines:
        if not line.startswith("data: "):
            continue
        assert not answer.done, f"after the end: {line}"
        assert answer.error is None, f"after the error: {line}"
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            answer.done = True
            continue
        event = json.loads(data)
        if "error" in event:
            answer.error = event["error"]
            continue
        for choice in event["choices"]:
            assert answer.finish is None, f"after the finish reason: {line}"
            answer.text += choice["delta"].get("content") or ""
            answer.finish = choice["finish_reason"]


def processes_of(root: int) -> set[int]:
    """Living processes below `root`, and not `root` itself."""
    return {
        child.pid
        for child in psutil.Process(root).children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    }


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listening(pids: set[int]) -> set[int]:
    """TCP ports on which one of these processes listens."""
    ports = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            ports |= {
                c.laddr.port
                for c in psutil.Process(pid).net_connections("tcp")
                if c.status == psutil.CONN_LISTEN
            }
    return ports


@dataclass
class Before:
    """A cluster as it was when it was sound."""

    epoch: int
    pids: list[int]
    states: int
    descriptors: int


def before(cluster: FaultyCluster) -> Before:
    cluster.book.clear()
    return Before(cluster.epoch, cluster.pids(), len(cluster.states()), descriptors(cluster))


def descriptors(cluster: FaultyCluster) -> int:
    """Open in this process, which holds the agent; connections of its clients, which come and go, apart."""
    process, port = psutil.Process(), int(cluster.url.rpartition(":")[2])
    connections = process.net_connections("tcp")
    http = [c for c in connections if c.laddr.port == port or (c.raddr and c.raddr.port == port)]
    return process.num_fds() - len(http)


def kill(pid: int, number: int = signal.SIGKILL) -> float:
    """Send a signal; returns when."""
    os.kill(pid, number)
    return time.time()


def assert_honest(answer: Answer, expected: str) -> None:
    """Each character that came is right, none twice; a short answer does not look complete."""
    assert expected.startswith(answer.text), f"wrong text reached the client: {answer.text!r}"
    if answer.error is None:
        assert answer.done
        assert answer.finish is not None
        assert answer.text == expected
    else:
        assert not answer.done, "[DONE] after an error"
        assert answer.finish is None, "a finish reason before an error"


def assert_recovered(
    cluster: FaultyCluster,
    was: Before,
    codes: set[Code],
    *,
    since: float | None = None,
    detected_within_s: float,
    epochs: int = 1,
    case: str = "",
    answers: tuple[tuple[Answer, str], ...] = (),
    likely: str = "",
) -> Moment:
    """The epoch ended with one of `codes` in time, the next serves, and nothing of the old one is left but
    what its ranks recorded.

    `since`: when the fault happened, if no rank has noted that. `likely`: the kind of cause that the records
    tell. Returns the end of the faulty epoch.
    """
    faulty = was.epoch + epochs - 1
    end = cluster.wait_end(faulty, detected_within_s + 30 * SLOWNESS)
    assert end.error is not None
    if since is None:
        since = cluster.wait_note("fault")[0]["time"]
    cluster.wait_ready()
    recovered_at = time.time()
    for answer, expected in answers:
        assert_honest(answer, expected)
    found = cluster.postmortem(faulty)
    finding = {
        "case": case,
        "likely": found.cause.kind,
        "words": found.cause.words,
        "code": str(end.error.code),
        "reason": end.error.detail,
        "detect_s": round(end.at - since, 3),
        "recover_s": round(recovered_at - end.at, 3),
        "client_code": [answer.code for answer, _ in answers],
        "characters_checked": sum(len(answer.text) for answer, _ in answers),
    }
    print(json.dumps(finding))
    if REPORT:
        with Path(REPORT).open("a") as report:
            report.write(json.dumps(finding) + "\n")
    assert end.error.code in codes, end.error.detail
    assert likely in ("", found.cause.kind), found.cause.words
    assert recovered_at - end.at <= RESTART_S
    assert end.at - since <= detected_within_s, f"detected after {end.at - since:.1f} s"
    assert cluster.epoch == faulty + 1
    assert_sound(cluster, was)
    return end


def assert_sound(cluster: FaultyCluster, was: Before) -> None:
    """Three right answers, and nothing left of what was."""
    cluster.book.clear()
    for prompt, max_tokens in ((SHORT, 400), (LONG, 400), (SHORT, 400)):
        assert cluster.content(prompt, max_tokens=max_tokens) == cluster.right(prompt, max_tokens)
    assert cluster.health()["reason"] is None
    now = set(cluster.pids())
    assert cluster.everybody() == now, "a process of an old epoch lives"
    until(lambda: descriptors(cluster) <= was.descriptors, "no descriptor is left", 5 * SLOWNESS)
    run = cluster.home / "run"
    assert [path.name for path in run.iterdir()] == [f"epoch-{cluster.epoch}"]
    left = [path.name for path in (run / f"epoch-{cluster.epoch}").iterdir()]
    assert not left, f"files of the forming are left: {left}"
    assert listening(now) == set(), "a rank listens after the group has formed"
    states = cluster.states()[max(was.states - 1, 0) :]
    for state, following in itertools.pairwise(states):
        assert is_legal(state, following), f"{state} was followed by {following} in {states}"
    assert states[-1] is State.READY
