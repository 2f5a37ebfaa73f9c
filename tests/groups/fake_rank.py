"""A rank that computes nothing, and starts in a tenth of the time: `fake_rank.py ORDERS <arguments>`.

The arguments are those of a worker. It says what a rank says on its pipe; rank 0 needs no other rank to
answer: what it is asked comes back as the answer. ORDERS is a folder: what stands there when a rank starts
holds for it (see `Orders`), and there it writes down what it was told.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxtp.errors import TERMINATED_STATUS, exit_status
from mlxtp.wire.blocking import BlockingLink
from mlxtp.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Bootstrap,
    Cancel,
    CollectivesTimed,
    Delta,
    Done,
    Error,
    Finished,
    Gathered,
    Generate,
    Hello,
    Init,
    InitDone,
    KvBudget,
    Loaded,
    LoadShard,
    Message,
    Ping,
    Pong,
    SanityCheck,
    SanityDone,
    SessionEnd,
    Shutdown,
    SideChannel,
    TimeCollectives,
    Unload,
)
from mlxtp.wire.rank_process import take_over
from mlxtp.wire.rank_stats import RankStats
from mlxtp.wire.session import LinkKind, Session, Side

ENDLESS = 1000
"""A request for so many tokens gets one, and then waits to be cancelled."""
VOCABULARY = 512
CONTEXT = 4096
SEND_TIMEOUT_S = 5.0
SPARE = -1


class Orders:
    """Orders for ranks of a test, and notes of what they did. Keys of an order:

    silent   never say hello; a spare: never become ready
    broken   a spare that ends before it is ready
    model    what it says to have loaded from its start on
    deaf     do not answer Bootstrap
    jaccl    what `is_available("jaccl")` says
    frees_s  how long it takes to end after SIGTERM, or after it said its last word; -1: until it is killed
    mute     after SIGTERM it answers nothing
    die_on   name of a message on which it exits with the status of `code`
    error_on name of a message on which it reports an Error with `code`, and exits unless a model is at fault
    words    detail of that Error, which then refuses one command only
    mute_on  name of a message which is never answered
    late_on  name of a message which is answered at Shutdown, before it
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def worker(self) -> tuple[str, ...]:
        """The command that starts such ranks."""
        return (sys.executable, str(Path(__file__)), str(self.folder))

    def give(self, rank: int, **order: Any) -> None:
        """Order what rank `rank`, or `SPARE`, does from its next start on; without keys nothing special."""
        (self.folder / f"order-{rank}").write_text(json.dumps(order))

    def of(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"order-{rank}"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def note(self, rank: int, what: str, /, **details: Any) -> None:
        line = json.dumps(details | {"rank": rank, "what": what})
        with (self.folder / "notes").open("a") as file:
            file.write(line + "\n")

    def notes(self, what: str) -> list[dict[str, Any]]:
        path = self.folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [note for note in map(json.loads, lines) if note["what"] == what]

    def notes_of(self, rank: int, what: str) -> list[dict[str, Any]]:
        """Those of one rank, or of all spares."""
        return [note for note in self.notes(what) if note["rank"] == rank]


class FakeRank:
    """One rank's end of its pipe."""

    def __init__(self, orders: Orders, rank: int, epoch: int, pipe: BlockingLink) -> None:
        self._orders = orders
        self._order = orders.of(rank)
        self._rank = rank
        self._pipe = pipe
        self._world = 1
        self._model = str(self._order.get("model", ""))
        self._late: list[Message] = []
        self._answers: dict[type[Message], Callable[[Any], None]] = {
            Ping: lambda _: self._say(Pong("idle", 9.0, 0, 0, self._model, RankStats())),
            Bootstrap: self._bootstrap,
            Init: lambda _: self._init(),
            SanityCheck: lambda _: self._say(SanityDone(self._world, tuple(range(self._world)), 0)),
            LoadShard: self._load,
            KvBudget: self._budget,
            Unload: lambda _: self._say(Done()),
            TimeCollectives: lambda _: self._say(CollectivesTimed(1.0, False)),
            Generate: self._generate,
            Cancel: lambda cancel: self._say(Finished(cancel.uid, "cancel", 1, 1)),
            Gathered: self._gathered,
            Shutdown: lambda _: self._shut_down(),
        }
        orders.note(rank, "started", pid=os.getpid(), epoch=epoch)

    def run(self) -> None:
        self._say(Hello(PROTOCOL_VERSION, self._rank, os.getpid(), os.urandom(16), b""))
        while batch := self._pipe.receive():
            for received in batch:
                self._hear(received.message)

    def _hear(self, message: Message) -> None:
        name = type(message).__name__
        code = self._order.get("code", "forward_failed")
        if self._order.get("die_on") == name:
            os._exit(exit_status(code))
        if self._order.get("mute_on") == name:
            return
        if self._order.get("late_on") == name:
            self._late.append(message)
            return
        if self._order.get("error_on") == name:
            words = self._order.get("words", f"rank {self._rank} was told to fail")
            self._say(Error(code, words, 0))
            if not (code.startswith("model_") or "words" in self._order):  # which refuses one command
                os._exit(exit_status(code))
        elif type(message) in self._answers:
            self._answers[type(message)](message)

    def _say(self, message: Message) -> None:
        self._pipe.send(message)

    def _bootstrap(self, bootstrap: Bootstrap) -> None:
        self._world = bootstrap.world_size
        told = asdict(bootstrap) | {"epoch_key": bootstrap.epoch_key.hex()}
        self._orders.note(self._rank, "bootstrap", **told)
        if self._order.get("deaf"):
            return
        order = self._order
        self._say(Done(jaccl=order.get("jaccl", False), gpu_bytes=order.get("gpu_bytes", 0)))
        if bootstrap.backend == "jaccl" and self._rank:
            self._say(SideChannel(1, b"%d" % self._rank))

    def _init(self) -> None:
        if self._order.get("rounds"):
            self._say(SideChannel(1, b"%d" % self._rank))
        else:
            self._say(InitDone(self._rank, self._world))

    def _gathered(self, gathered: Gathered) -> None:
        self._orders.note(self._rank, "gathered", data=gathered.data.decode(), error=gathered.error)
        if self._rank == 0:
            self._say(InitDone(self._rank, self._world))

    def _load(self, load: LoadShard) -> None:
        counted = [asdict(each) for each in load.counted]
        told = {"paths": load.paths, "kv_bytes": load.kv_bytes, "counted": counted}
        self._orders.note(self._rank, "load", path=load.path, **told)
        self._model = load.path
        self._say(Loaded(CONTEXT, VOCABULARY, 1, ()))

    def _budget(self, budget: KvBudget) -> None:
        self._orders.note(self._rank, "budget", kv_bytes=budget.kv_bytes)
        room = budget.kv_bytes or CONTEXT
        self._say(Loaded(min(room, CONTEXT), VOCABULARY, 1, (), kv_token_bytes=1, kv_bytes=room))

    def _generate(self, generate: Generate) -> None:
        self._say(Accepted(generate.uid))
        self._orders.note(self._rank, "generate", tokens=generate.tokens, answered=generate.answered)
        endless = generate.max_tokens >= ENDLESS
        begun = generate.answered
        answer = generate.tokens[: len(generate.tokens) - begun][: 1 if endless else generate.max_tokens]
        for index, token in enumerate(answer[begun:], begun):
            self._say(Delta((generate.uid,), (index,), (token,)))
        if not endless:
            self._say(Finished(generate.uid, "length", len(answer), len(answer)))

    def _shut_down(self) -> None:
        self._orders.note(self._rank, "shut down")
        for message in self._late:
            self._answers[type(message)](message)
        self._say(Done())
        self._say(SessionEnd())
        time.sleep(self._order.get("frees_s", 0))
        os._exit(0)

    def terminated(self, *_: Any) -> None:
        """SIGTERM, in a rank that takes its time."""
        if self._order.get("mute"):
            self._answers = {}
        if (frees_s := self._order["frees_s"]) >= 0:
            threading.Timer(frees_s, os._exit, (TERMINATED_STATUS,)).start()


def wait_for_arguments(orders: Orders, fd: int) -> list[str]:
    """As a spare does."""
    orders.note(SPARE, "started", pid=os.getpid())
    order = orders.of(SPARE)
    if order.get("broken"):
        sys.exit(1)
    sock = socket.socket(fileno=fd)
    if order.get("silent"):
        sock.recv(1)
        sys.exit(0)
    told = take_over(sock)
    sock.detach()
    if told is None:
        sys.exit(0)
    arguments, listener = told
    if listener is not None:
        with socket.socket(fileno=listener) as sock:
            orders.note(SPARE, "listener", port=sock.getsockname()[1])
    return arguments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("orders", type=Path)
    for name in ("--spare-fd", "--rank", "--epoch", "--pipe-fd"):
        parser.add_argument(name, type=int)
    args, _ = parser.parse_known_args()
    if args.spare_fd is not None:
        told = wait_for_arguments(Orders(args.orders), args.spare_fd)
        args, _ = parser.parse_known_args([str(args.orders), *told])
    orders = Orders(args.orders)
    kind = LinkKind.PIPE_LEADER if args.rank == 0 else LinkKind.PIPE
    pipe = BlockingLink(
        socket.socket(fileno=args.pipe_fd), Session(kind, Side.LOWER, args.epoch), SEND_TIMEOUT_S
    )
    rank = FakeRank(orders, args.rank, args.epoch, pipe)
    if "frees_s" in orders.of(args.rank):
        signal.signal(signal.SIGTERM, rank.terminated)
    if orders.of(args.rank).get("silent"):
        while pipe.receive():
            pass
    rank.run()


if __name__ == "__main__":
    main()
