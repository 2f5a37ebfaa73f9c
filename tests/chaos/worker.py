"""`python -m tests.chaos.worker FOLDER <arguments of mlxtp.engine.worker>`: a rank that errs on order.

It puts functions around methods of the engine, in its own process only, then runs the real entry. Without an
order (see `orders.py`; FOLDER is where they stand) each of them calls the original and does nothing else.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxtp.engine import block_store, decode_links, decode_loop, worker
from mlxtp.engine import executor as rank_module
from mlxtp.engine.disk_index import DiskIndex
from mlxtp.engine.executor import RankExecutor
from mlxtp.engine.forwards import DecodeGraphs
from mlxtp.engine.grammar import GrammarSandbox
from mlxtp.engine.group import Proof, RingGroup
from mlxtp.engine.loader import ModelShare
from mlxtp.engine.mailbox import Mailbox
from mlxtp.engine.runner import Runner
from mlxtp.engine.sampler import Chosen, Sampler
from mlxtp.engine.scheduler import QueuedForward, Scheduler
from mlxtp.engine.sharding import Vocabulary
from mlxtp.engine.steps import DecodeFrame
from mlxtp.wire.blocking import BlockingLink
from mlxtp.wire.frames import MAX_FRAME, encode
from mlxtp.wire.messages import PROTOCOL_VERSION, Ack, Delta, Evict, Forward, Hello, Message, SessionStop
from mlxtp.wire.session import LinkKind, Received, Session, Side

from ..mlx_errors import OUT_OF_MEMORY
from ..wire.forwards import is_step, kind_of, of_prompt
from .orders import Order, Orders

orders: Orders
links: dict[LinkKind, BlockingLink] = {}
"""The links of this process: with two ranks there is one of a kind."""

Wrapped = Callable[..., Any]


def around(owner: Any, attribute: str) -> Callable[[Wrapped], Wrapped]:
    """Put the decorated function around `owner.attribute`. It gets the original as its first argument."""

    def decorate(function: Wrapped) -> Wrapped:
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, attribute, wrapped)
        return function

    return decorate


def put(link: BlockingLink, message: Message, *, epoch: int | None = None, seq: int | None = None) -> int:
    """A frame that no protocol here has seen; it takes the next number unless `seq` says another."""
    if seq is None:
        seq = link.protocol.seq = link.protocol.seq + 1
    put_bytes(link, encode(message, link.protocol.epoch if epoch is None else epoch, seq))
    return seq


def put_bytes(link: BlockingLink, data: bytes) -> None:
    with link._turn_to_send:
        link._sock.sendall(data)


def pause(order: Order) -> None:
    """Stand still. "gil": so that no other thread of this process runs either."""
    orders.note("held", place=order.on)
    if order.how == "gil":
        ctypes.PyDLL(None).usleep(int(order.seconds * 1e6))
    else:
        time.sleep(order.seconds)


@around(BlockingLink, "__init__")
def know_links(
    original: Wrapped, link: BlockingLink, sock: socket.socket, protocol: Session, timeout_s: float
) -> None:
    original(link, sock, protocol, timeout_s)
    links[protocol.link] = link


@around(Mailbox, "post")
def record(original: Wrapped, mail: Mailbox, sender: int, received: Any) -> None:
    """Write down how many frames were dropped when one comes."""
    if isinstance(received, Received) and orders.order("record"):
        orders.note("frame", dropped=links[LinkKind.DECODE].protocol.dropped)
    original(mail, sender, received)


@around(RankExecutor, "launch")
def launch(original: Wrapped, rank: RankExecutor, step: int, frame: Forward, known: Any = None) -> Any:
    """The frame has gone out: this rank stands still, fails, runs it otherwise, or speaks as rank 0 does."""
    place = "prefill" if frame.prompts else "decode"
    if order := orders.due("hold", place):
        pause(order)
    if order := orders.due("raise_in_forward", kind_of(frame)):
        raise RuntimeError(NO_MEMORY if order.how == "memory" else "no such luck")
    if orders.due("die", place) or poisonous(frame):
        os.kill(os.getpid(), signal.SIGKILL)
    if is_step(frame) and (order := orders.due("speak")):
        pipe, delta = links[LinkKind.PIPE], Delta((frame.rows[0],), (0,), (7,))
        if order.how == "politely":
            pipe.send(delta)
        else:
            put(pipe, delta)
    if is_step(frame) and orders.due("swallow_exception"):  # and answers with what the last forward gave
        rank.status.in_flight += 1
        return dataclasses.replace(launch.last, step=step)  # type: ignore[attr-defined]
    frame = misread(rank, frame)
    forward = launch.last = original(rank, step, frame, known)  # type: ignore[attr-defined]
    return original(rank, step, frame, known) if is_step(frame) and orders.due("run_twice") else forward


NO_MEMORY = OUT_OF_MEMORY[-1]
"""Of Metal."""
prompts: dict[int, tuple[int, ...]] = {}
"""This rank's part of each prompt."""


def poisonous(frame: Forward) -> bool:
    """No rank survives a prompt with the tokens that `how` lists in it."""
    order, tokens = orders.order("poison"), iter(frame.tokens)
    if order is None or not frame.prompts:
        return False
    for uid, width in zip(frame.rows, frame.widths, strict=True):
        prompts[uid] = (*prompts.get(uid, ()), *itertools.islice(tokens, width))
        if f" {order.how} " in f" {' '.join(map(str, prompts[uid]))} " and orders.due("poison"):
            return True
    return False


def misread(rank: RankExecutor, frame: Forward) -> Forward:
    """Something else than the frame says. Frames of one row are counted, or of several."""
    rows = "one row" if is_step(frame) and len(frame.rows) == 1 else "several rows"
    if is_step(frame) and (order := orders.due("misread_step", rows)):
        match order.how:
            case "positions":
                return dataclasses.replace(frame, positions=tuple(p - 1 for p in frame.positions))
            case "rows":
                return dataclasses.replace(frame, rows=frame.rows[::-1], positions=frame.positions[::-1])
            case "order":  # as if this rank had let another row take a place that became free
                rank.runner._batch.rows.reverse()
    if frame.prompts and orders.due("misread_prompt"):
        return dataclasses.replace(frame, tokens=(*frame.tokens[:-1], frame.tokens[-1] ^ 1))
    return frame


@around(rank_module, "load")
def load(original: Wrapped, folder: Path, group: Any, progress: Wrapped, *how: Any) -> ModelShare:
    """It hangs, finds no memory after the first part, or one weight is not what the file says."""
    if order := orders.due("hold", "load"):
        pause(order)

    def advance() -> None:
        progress()
        if orders.due("find_no_memory", "load"):
            raise RuntimeError(NO_MEMORY)

    loaded: ModelShare = original(folder, group, advance, *how)
    if orders.due("change_weight"):
        norm = loaded.model.layers[0].input_layernorm
        norm.weight = norm.weight.at[0].add(64)
        mx.eval(norm.weight)
    return loaded


@around(RankExecutor, "give_back")
def note_memory(original: Wrapped, rank: RankExecutor) -> None:
    """Write down what is left of a rank's memory when it ends."""
    launched = 0 if rank._runner is None else rank._runner.forwards
    original(rank)
    orders.note("given back", launched=launched, active=mx.get_active_memory())


@around(block_store, "write_block")
def tear_block(original: Wrapped, path: Path, items: Any, name: str) -> int:
    """This rank dies in the middle of a block, or its disk is full or hangs then."""
    if order := orders.due("disk", "write"):
        if not order.seconds:
            size: int = original(path, items, name)
            os.truncate(path, size // 2)
        fail(order)
    return original(path, items, name)


@around(block_store._Account, "_note")
def die_uncounted(original: Wrapped, account: Any, used: int) -> None:
    """A block has its name and is not counted."""
    if order := orders.due("disk", "count"):
        fail(order)
    original(account, used)


@around(block_store, "read_block")
def hold_reading(original: Wrapped, path: Path, name: str) -> Any:
    if order := orders.due("disk", "read"):
        fail(order)
    return original(path, name)


@around(DiskIndex, "expect")
def fetch_hastily(original: Wrapped, index: DiskIndex, uid: int, until: float) -> None:
    if order := orders.order("hasty"):
        until += order.seconds - decode_loop.FETCH_S
    original(index, uid, until)


def fail(order: Order) -> None:
    if order.seconds:
        pause(order)
    elif order.how:
        raise OSError(int(order.how), "as ordered")
    else:
        os.kill(os.getpid(), signal.SIGKILL)


@around(Mailbox, "take")
def skip_step(original: Wrapped, mail: Mailbox, sender: int) -> Any:
    received = original(mail, sender)
    skips = isinstance(received, Received) and is_step(received.message) and orders.due("skip_step")
    return original(mail, sender) if skips else received


@around(Runner, "run")
def take_another_token(original: Wrapped, runner: Runner, frame: Forward, known: Any = None) -> Chosen:
    chosen: Chosen = original(runner, frame, known)
    if is_step(frame) and orders.due("take_another_token"):
        chosen = dataclasses.replace(chosen, tokens=chosen.tokens + 1)
        runner._inputs._last[0] = chosen.tokens[:, -1]
    return chosen


@around(Sampler, "choose")
def draw_another_token(original: Wrapped, sampler: Sampler, logits: mx.array, at: mx.array) -> mx.array:
    """This rank draws a token from the gathered logits that is one too high."""
    tokens: mx.array = original(sampler, logits, at)
    if orders.due("draw_another_token"):
        wrong = (tokens + 1) % logits.shape[-1]
        orders.note("drawn", before=tokens.tolist(), after=wrong.tolist())
        return wrong
    return tokens


def flipped(logits: mx.array) -> mx.array:
    """The highest bit of one logit's exponent: a small number becomes a huge one, the argmax with it."""
    bits = mx.zeros((logits.shape[-1],), dtype=mx.uint32)
    scores = logits.astype(mx.float32)
    bits[mx.argmin(mx.where(scores[0, -1] > 0, scores[0, -1], mx.inf))] = 0x40000000
    changed = (scores.view(mx.uint32) ^ bits).view(mx.float32)
    before, after = mx.argmax(logits[0, -1]).item(), mx.argmax(changed[0, -1]).item()
    orders.note("flipped", before=before, after=after)
    return changed.astype(logits.dtype)


@around(DecodeGraphs, "_replay")
def see_every_forward(original: Wrapped, graphs: DecodeGraphs, key: Any, inputs: Any) -> Any:
    """A graph that is replayed passes by the functions here; while a logit is to be flipped, none is."""
    if orders.order("flip_logit_bit"):
        return graphs._body(*key[1], *inputs)
    return original(graphs, key, inputs)


def flip_before(owner: type, place: str) -> None:
    """Before ranks exchange logits: "winners" or "gather"."""

    @around(owner, place)
    def flip(original: Wrapped, it: Any, logits: mx.array, *args: Any, **how: Any) -> Any:
        return original(it, flipped(logits) if orders.due("flip_logit_bit", place) else logits, *args, **how)


flip_before(Vocabulary, "winners")
flip_before(Vocabulary, "gather")


@around(RankExecutor, "apply")
def apply(original: Wrapped, rank: RankExecutor, frame: Message) -> None:
    """A KV cache is not kept here, though all the others keep it; or less of it; or it is not dropped."""
    if isinstance(frame, SessionStop) and frame.keep and (order := orders.due("keep_otherwise")):
        frame = dataclasses.replace(frame, keep=max(frame.keep + int(order.how), 0))
    if not (isinstance(frame, Evict) and orders.due("evict_otherwise")):
        original(rank, frame)


@around(RingGroup, "prove")
def prove_otherwise(original: Wrapped, group: RingGroup, digest: int) -> Proof:
    if orders.order("record"):
        orders.note("proof")
    if order := orders.due("hold", "proof"):
        pause(order)
    if orders.due("crash", "proof"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return original(group, digest ^ 1 if orders.due("prove_otherwise") else digest)


@around(GrammarSandbox, "run")
def know_trials(original: Wrapped, trial: GrammarSandbox, kind: str, text: str) -> int:
    if orders.order("record"):
        trial.start()
        orders.note("trial", pid=trial._process.pid)
    return original(trial, kind, text)


def one_more(last: Forward, uid: int) -> Forward:
    """The step of one row behind its last one."""
    return Forward((uid,), (last.positions[last.rows.index(uid)] + 1,))


@around(Scheduler, "next")
def extra_step(original: Wrapped, scheduler: Scheduler) -> DecodeFrame | None:
    """As the first published loop of this kind did: sent and run once more, after the last token."""
    frame: DecodeFrame | None = original(scheduler)
    if is_step(frame):
        extra_step.last = frame  # type: ignore[attr-defined]
    if isinstance(frame, SessionStop) and orders.due("extra_step"):
        scheduler.frames.appendleft(frame)
        scheduler.in_flight.append(QueuedForward((), tokens=1))
        return one_more(extra_step.last, frame.uid)  # type: ignore[attr-defined]
    return frame


def put_truncated(link: BlockingLink, message: Message) -> None:
    payload = encode(message, link.protocol.epoch, link.protocol.seq + 1)[4:-3]
    put_bytes(link, struct.pack(">I", len(payload)) + payload)


AHEAD: dict[str, Callable[[BlockingLink, Message], object]] = {
    "prompt first": lambda link, _: put(link, of_prompt(1, 0, 4, (1, 2, 3, 4))),
    "unknown uid": lambda link, _: put(link, Forward((4_000_000_000,), (40,))),
    "hello again": lambda link, _: put(link, Hello(PROTOCOL_VERSION, 1, 1, bytes(16), bytes(32))),
    "delta": lambda link, _: put(link, Delta((1,), (0,), (7,))),
    "other epoch as well": lambda link, message: put(
        link, message, epoch=link.protocol.epoch + 1, seq=link.protocol.seq + 1
    ),
    "truncated": put_truncated,
    "oversize": lambda link, _: put_bytes(link, struct.pack(">I", MAX_FRAME + 1)),
}
"""What goes out before a message."""
INSTEAD: dict[str, Callable[[BlockingLink, Message], int]] = {
    "other epoch": lambda link, message: put(link, message, epoch=link.protocol.epoch + 1),
    "seq ahead": lambda link, message: put(link, message, seq=link.protocol.seq + 2),
    "missing": lambda link, _: link.protocol.seq,
}
AFTER: dict[str, Callable[[BlockingLink, Message], int]] = {
    "seq again": lambda link, message: put(link, message, seq=link.protocol.seq),
    "twice": put,
}


@around(BlockingLink, "send")
def send(original: Wrapped, link: BlockingLink, message: Message) -> int:
    """Late, against the rules, with one field one too high, or with a step that is not run here."""
    decode, kind = link.protocol.link is LinkKind.DECODE, kind_of(message)
    if decode and (order := orders.due("late", kind)):
        time.sleep(order.seconds)
    wrong = order.how if decode and (order := orders.due("wrong_frame", kind)) else ""
    if isinstance(message, Ack | SessionStop) and (order := orders.due("lie", kind)):
        message = dataclasses.replace(message, **{order.how: getattr(message, order.how) + 1})
    if is_step(message):
        send.last = message  # type: ignore[attr-defined]
    extra = orders.due("extra_frame") if isinstance(message, SessionStop) else None
    if extra and extra.how != "late":
        put(link, one_more(send.last, message.uid))  # type: ignore[attr-defined]
    if wrong in AHEAD:
        AHEAD[wrong](link, message)
    seq: int = INSTEAD[wrong](link, message) if wrong in INSTEAD else original(link, message)
    if wrong in AFTER:
        AFTER[wrong](link, message)
    if extra and extra.how == "late":  # after the sequence has been stopped
        put(link, one_more(send.last, message.uid))  # type: ignore[attr-defined]
    return seq


def _knock(address: str, data: bytes) -> tuple[socket.socket, float]:
    host, _, port = address.rpartition(":")
    ends_at = time.monotonic() + 30
    while True:
        try:
            sock = socket.create_connection((host, int(port)), timeout=10)
            break
        except ConnectionRefusedError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.01)
    sock.sendall(data)
    return sock, time.monotonic()


def _hello(epoch: int, rank: int) -> bytes:
    return Session(LinkKind.DECODE, Side.LOWER, epoch).send(
        Hello(PROTOCOL_VERSION, rank, os.getpid(), os.urandom(16), os.urandom(32))
    )


@around(decode_links, "_connect")
def strangers_first(original: Wrapped, epoch: decode_links.Epoch) -> BlockingLink:
    """Before this rank connects to rank 0, others do who do not know the epoch's key."""
    if orders.due("strangers_first"):
        greetings = {
            "garbage": b"GET / HTTP/1.1\r\n\r\n",
            "wrong key": _hello(epoch.number, 1),
            "rank 0 itself": _hello(epoch.number, 0),
            "no such rank": _hello(epoch.number, 7),
            "silent": b"",
        }
        for who, data in greetings.items():
            sock, since = _knock(epoch.bootstrap.decode_address, data)
            try:
                answer = sock.recv(4096)
            except ConnectionResetError:
                answer = b""
            orders.note("stranger", who=who, answer=answer.hex(), seconds=time.monotonic() - since)
            sock.close()
    return original(epoch)


@around(rank_module, "form")
def form(original: Wrapped, backend: str, rank: int, world: int, hosts: tuple[str, ...], **how: Any) -> Any:
    """It hangs; or a stranger reaches rank 0's ring port before this rank does, and speaks or is silent."""
    if order := orders.due("hold", "form"):
        pause(order)
    if order := orders.due("ring_stranger"):
        sock, _ = _knock(hosts[0], b"\x01" * 100_000 if order.how == "garbage" else b"")
        form.sock = sock  # type: ignore[attr-defined]  # stays open as long as this process
        time.sleep(0.2)
    return original(backend, rank, world, hosts, **how)


def main() -> None:
    global orders  # noqa: PLW0603 - as long as the process, and only main sets it
    folder, *argv = sys.argv[1:]
    argv = worker.told(argv)
    rank, epoch = (int(argv[argv.index(name) + 1]) for name in ("--rank", "--epoch"))
    orders = Orders(Path(folder), rank, epoch)
    if orders.due("exit", "start"):
        os._exit(7)
    worker.main(argv)


if __name__ == "__main__":
    main()
