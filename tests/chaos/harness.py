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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxtp.config import Limits
from mlxtp.diagnostics.causes import Postmortem
from mlxtp.diagnostics.failure_store import postmortems
from mlxtp.errors import Code, MlxtpError
from mlxtp.groups.health import ServingState, is_legal
from mlxtp.wire.messages import Generate

from ..live_cluster import LIMITS, SLOWNESS, WAIT_S, Cluster, until
from .answers import LONG, SHORT, Answer, ask
from .findings import found, wrong
from .orders import Order, OrderBook

FAULT_LIMITS = dataclasses.replace(
    LIMITS,
    heartbeat_s=0.25,
    silence_s=3.0 * SLOWNESS,
    ack_s=2.0 * SLOWNESS,
    prefill_stall_s=4.0 * SLOWNESS,
    decode_stall_s=4.0 * SLOWNESS,
    form_s=6.0 * SLOWNESS,
)
"""Shorter than in production where a test waits for the limit to pass."""
NOTICED_S = 2.5 * SLOWNESS
"""For what is seen at once: a child's death, the end of a pipe, a frame that cannot be right; then one tenth
of a second for other reports. A busy machine takes longer for that, but less than silence would."""
SILENCE_S = FAULT_LIMITS.silence_s + NOTICED_S
"""The deadline for noticing silence."""
STALL_S = 2 * FAULT_LIMITS.decode_stall_s + 2 * FAULT_LIMITS.heartbeat_s + NOTICED_S
"""The deadline for noticing a stuck decode: twice its limit, which a watch that was late itself allows."""
ACK_S = FAULT_LIMITS.ack_s + NOTICED_S
"""The deadline for noticing that an acknowledgement does not come."""

RESTART_S = WAIT_S
"""For reaping an epoch, a rank that hears no SIGTERM included, the backoff and forming the next: whatever
takes longer hangs. How long it takes is in the report; most of it is imports, which suffer most from a busy
machine."""

ANSWER_S = WAIT_S
"""For the rest of an answer, once a group serves again."""

KEEP_ALIVE_S = 0.3
"""A stream that says nothing for so long gets a comment."""


@dataclass(frozen=True)
class Moment:
    """A state that was entered, or (`error`) the end of an epoch."""

    at: float
    epoch: int
    state: ServingState | None = None
    error: MlxtpError | None = None


class FaultyCluster(Cluster):
    """Ranks that take orders, two unless told otherwise, and a record of all states and ends of epochs.

    Without speculation and prefix cache unless asked for: then N tokens are N forwards, with any requests
    before, and orders can say at which of them something happens.
    """

    def __init__(self, folder: Path, *, limits: Limits = FAULT_LIMITS, **settings: Any) -> None:
        self.moments: list[Moment] = []
        self.asked = 0
        """Requests that the gateway has taken."""
        self._right: dict[tuple[str, str], str] = {}
        orders = folder / "orders"
        orders.mkdir()
        self.book = OrderBook(orders)
        self.later: list[Order] = []
        """Orders for the time when a group begins to serve, then when the next one does, and so on."""
        self.book.give(*settings.pop("orders", ()))
        worker = (sys.executable, "-m", "tests.chaos.worker", str(orders))
        wait = settings.pop("wait", True)
        plain = {"prefill_chunk": 32, "speculation": "off", "prefix_cache": False}
        super().__init__(folder / "home", worker=worker, limits=limits, wait=False, **plain | settings)
        self._observe()
        if wait:
            self.wait_ready()
            assert self.right(SHORT) == "FALCON-MERCURY-7749"
            assert len(self.right(LONG)) > 50, "too short an answer to break off"

    def _observe(self) -> None:
        supervisor, gateway = self.supervisor, self.supervisor.gateway
        enter, pause, generate = supervisor.status.enter, gateway.park, gateway.generate

        def observed_enter(state: ServingState) -> None:
            self.moments.append(Moment(time.time(), supervisor.status.epoch, state))
            if state is ServingState.READY and self.later:
                self.book.give(dataclasses.replace(self.later.pop(0), epoch=supervisor.status.epoch))
            enter(state)

        def observed_pause(group: str, error: MlxtpError, *, spare: bool = False) -> None:
            if not self.ends(supervisor.status.epoch):  # else the next epoch pauses them
                self.moments.append(Moment(time.time(), supervisor.status.epoch, error=error))
            pause(group, error, spare=spare)

        def observed_generate(wanted: Generate, **whose: Any) -> Any:
            answer = generate(wanted, **whose)
            self.asked += 1
            return answer

        supervisor.status.enter, gateway.park = observed_enter, observed_pause  # type: ignore[method-assign]
        gateway.generate = observed_generate  # type: ignore[method-assign]

    def order(self, fault: str, rank: int, *, epoch: int | None = None, **details: Any) -> None:
        """One fault, in the present epoch unless another is named; it takes the place of earlier orders."""
        self.book.clear()
        self.book.give(Order(fault, rank, self.epoch if epoch is None else epoch, **details))

    def tighten(self, **limits: float) -> None:
        """Other limits for the watch over the present epoch: shorter than coming up would allow."""
        ranks = self.supervisor.status.ranks
        ranks.watch.health._limits = dataclasses.replace(self.settings.limits, **limits)

    def wait_note(self, what: str, count: int = 1) -> list[dict[str, Any]]:
        until(lambda: len(self.book.notes(what)) >= count, f"{count} notes of {what!r}")
        return self.book.notes(what)

    def read(self, prompt: str, **fields: Any) -> Answer:
        """Stream one answer to any end; fails when it has none."""
        return self.read_all(prompt, **fields)[0]

    def read_all(self, prompt: str, **fields: Any) -> list[Answer]:
        """As `read`, for `n` answers to one request; without `stream` they come in one piece."""
        return ask(self.url, prompt, **fields)

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
            if not answers:
                found("a client hangs", hung=1)
                pytest.fail("the client has no answer and no error")
            return answers[0]

        try:
            yield result
        finally:
            client.join(150 * SLOWNESS)

    def wait_asked(self, count: int, *, since: Before) -> None:
        """Wait until so many requests have been taken: who comes in a pause is told to come again."""
        until(lambda: self.asked >= since.asked + count, f"{count} requests")

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

    def all_pids(self) -> set[int]:
        """All living processes that were started for this cluster, with any parent."""
        folder = str(self.book.folder)
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if folder in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process.pid)
        return found

    def ends(self, epoch: int) -> list[Moment]:
        """The errors with which an epoch ended: one, or none yet."""
        return [m for m in self.moments if m.error is not None and m.epoch == epoch]

    def wait_end(self, epoch: int, within_s: float) -> Moment:
        return until(lambda: self.ends(epoch), f"epoch {epoch} ended", within_s)[0]

    def ready_at(self, epoch: int) -> float:
        """Return the time at which that epoch began to serve."""
        began = [m.at for m in self.moments if (m.epoch, m.state) == (epoch, ServingState.READY)]
        assert began, (
            f"epoch {epoch} served no client: {[m.error and m.error.detail for m in self.ends(epoch)]}"
        )
        return began[0]

    def postmortem(self, epoch: int) -> Postmortem:
        """Return the records of a failed epoch: a file of each rank, without text of requests and answers."""
        (folder,) = (self.home / "failures").glob(f"*-epoch-{epoch}")
        ranks = [f"rank-{rank}.json" for rank in range(self.settings.ranks)]
        assert sorted(path.name for path in folder.iterdir()) == ["epoch.json", *ranks]
        for path in folder.iterdir():
            text = path.read_text()
            assert not [word for word in ("Repeat", "FALCON", "UVWXYZ", "Count from") if word in text]
        (postmortem,) = postmortems([folder])
        return postmortem

    def states(self) -> list[ServingState]:
        return [m.state for m in self.moments if m.state is not None]


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
    asked: int
    descriptors: int


def before(cluster: FaultyCluster) -> Before:
    cluster.book.clear()
    counts = len(cluster.states()), cluster.asked, descriptors(cluster)
    return Before(cluster.epoch, cluster.pids(), *counts)


def descriptors(cluster: FaultyCluster) -> int:
    """Open in this process, which holds the agent; connections of its clients, which come and go, apart."""
    process, port = psutil.Process(), int(cluster.url.rpartition(":")[2])
    while True:
        count = process.num_fds()
        connections = process.net_connections("tcp")
        if count == process.num_fds():  # none of them has ended meanwhile
            break
    http = [c for c in connections if c.laddr.port == port or (c.raddr and c.raddr.port == port)]
    return count - len(http)


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


def assert_whole(answer: Answer, expected: str) -> None:
    """The client has got what it would have got without any fault."""
    assert (answer.code, answer.text) == (None, expected), answer.error
    assert answer.done
    assert answer.finish is not None


def reported(
    cluster: FaultyCluster,
    case: str,
    epoch: int,
    since: float,
    answers: Sequence[tuple[Answer, str]],
    *,
    whole: bool = True,
    seed: int | None = None,
) -> tuple[Moment, float]:
    """Keep as a finding how an epoch ended and the next one began, which must not take too long.

    Returns its end, and the seconds from the fault to that.
    """
    end, cause = cluster.wait_end(epoch, 0), cluster.postmortem(epoch).cause
    assert end.error is not None
    detect_s, recover_s = end.at - since, cluster.ready_at(epoch + 1) - end.at
    found(
        case,
        seed=seed,
        detect_s=round(detect_s, 3),
        recover_s=round(recover_s, 3),
        tokens_checked=sum(answer.tokens for answer, _ in answers),
        wrong_tokens=sum(wrong(answer.text, text, whole=whole) for answer, text in answers),
        orphans=len(cluster.all_pids() - set(cluster.pids())),
        code=str(end.error.code),
        reason=end.error.detail,
        likely=cause.kind,
        words=cause.words,
    )
    assert recover_s <= RESTART_S
    return end, detect_s


def assert_recovered(
    cluster: FaultyCluster,
    was: Before,
    codes: set[Code],
    case: str,
    *,
    since: float | None = None,
    within_s: float = NOTICED_S,
    epochs: int = 1,
    seed: int | None = None,
    answers: tuple[tuple[Answer, str], ...] = (),
    told: frozenset[Code] = frozenset(),
    likely: str = "",
) -> Moment:
    """The epoch ended with one of `codes` in time, the next serves, and nothing of the old one is left but
    what its ranks recorded.

    `answers`, each with what it would be without the fault, are whole. If `told` names codes, the contract
    has them end with one of these errors instead. `since`: when the fault happened, if no rank has noted
    that. `likely`: the kind of cause that the records tell. Returns the end of the faulty epoch.
    """
    faulty = was.epoch + epochs - 1
    cluster.wait_end(faulty, within_s + 30 * SLOWNESS)
    since = cluster.wait_note("fault")[0]["time"] if since is None else since
    cluster.wait_ready()
    assert cluster.epoch == faulty + 1
    end, detect_s = reported(cluster, case, faulty, since, answers, whole=not told, seed=seed)
    assert end.error is not None
    assert end.error.code in codes, end.error.detail
    cause = cluster.postmortem(faulty).cause
    assert likely in ("", cause.kind), cause.words
    assert detect_s <= within_s, f"detected after {detect_s:.1f} s"
    for answer, expected in answers:
        if told:
            assert answer.code in told
            assert_honest(answer, expected)
        else:
            assert_whole(answer, expected)
        assert answer.ended_at <= cluster.ready_at(cluster.epoch) + ANSWER_S
    assert_sound(cluster, was)
    return end


@dataclass(frozen=True)
class Fault:
    """A fault under one long answer or several; `codes`, `within_s`, `likely`: how it is noticed."""

    case: str
    order: Order
    codes: set[Code]
    within_s: float = NOTICED_S
    max_tokens: int = 400
    likely: str = ""
    clients: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict)
    always: bool = False
    """`make test` has it, too: it stands for others."""


def faults(*rows: Fault) -> pytest.MarkDecorator:
    """Parametrize a test by its faults."""
    marks = {False: [pytest.mark.chaos], True: []}
    return pytest.mark.parametrize(
        "fault", [pytest.param(each, id=each.case, marks=marks[each.always]) for each in rows]
    )


def assert_noticed(cluster: FaultyCluster, fault: Fault) -> None:
    """The epoch ends with one of its codes, the next one completes the answers; only the client is told that
    took too much memory.
    """
    expected = cluster.right(LONG, fault.max_tokens, **fault.fields)
    was = before(cluster)
    cluster.book.give(dataclasses.replace(fault.order, epoch=was.epoch))
    with contextlib.ExitStack() as stack:
        asked = {"max_tokens": fault.max_tokens, **fault.fields}
        clients = [stack.enter_context(cluster.asking(LONG, **asked)) for _ in range(fault.clients)]
        answers = tuple((answer(), expected) for answer in clients)
    told = frozenset(fault.codes & {Code.OUT_OF_MEMORY})
    how = {"within_s": fault.within_s, "likely": fault.likely}
    assert_recovered(cluster, was, fault.codes, fault.case, answers=answers, told=told, **how)


def assert_recovered_each_time(
    cluster: FaultyCluster,
    was: Before,
    case: str,
    *,
    seed: int | None = None,
    answers: tuple[tuple[Answer, str], ...] = (),
) -> int:
    """As `assert_recovered`, for a fault in each of several epochs that ranks die of; returns how many."""
    cluster.wait_ready()
    at = {note["epoch"]: note["time"] for note in cluster.book.notes("fault")}
    faulty = range(was.epoch, cluster.epoch)
    assert set(at) == set(faulty)
    for epoch in faulty:
        checked = answers if epoch == faulty[-1] else ()
        _, detect_s = reported(cluster, case, epoch, at[epoch], checked, seed=seed)
        assert detect_s <= NOTICED_S
    for answer, expected in answers:
        assert_whole(answer, expected)
        assert answer.ended_at <= cluster.ready_at(cluster.epoch) + ANSWER_S
    assert_sound(cluster, was)
    return len(faulty)


def assert_sound(cluster: FaultyCluster, was: Before) -> None:
    """Three right answers, and nothing left of what was."""
    cluster.book.clear()
    for prompt, max_tokens in ((SHORT, 400), (LONG, 400), (SHORT, 400)):
        assert cluster.content(prompt, max_tokens=max_tokens) == cluster.right(prompt, max_tokens)
    assert cluster.health()["reason"] is None
    now = set(cluster.pids())
    assert cluster.all_pids() == now, "a process of an old epoch lives"
    until(lambda: descriptors(cluster) <= was.descriptors, "no descriptor is left", WAIT_S)
    run = cluster.home / "run"
    assert [path.name for path in run.iterdir()] == [f"epoch-{cluster.epoch}"]
    left = [path.name for path in (run / f"epoch-{cluster.epoch}").iterdir()]
    assert not left, f"files of the forming are left: {left}"
    assert listening(now) == set(), "a rank listens after the group has formed"
    assert assert_legal(cluster, was.states)[-1] is ServingState.READY


def assert_legal(cluster: FaultyCluster, since: int = 0) -> list[ServingState]:
    """Each state may follow the one before it; the states, from number `since` on and the one before."""
    states = cluster.states()[max(since - 1, 0) :]
    for state, following in itertools.pairwise(states):
        assert is_legal(state, following), f"{state} was followed by {following} in {states}"
    return states
