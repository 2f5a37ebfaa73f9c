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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgpack

from mlxtp.engine import block_store, decode_links, decode_loop, worker
from mlxtp.engine import executor as rank_module
from mlxtp.engine.disk_index import DiskIndex
from mlxtp.engine.executor import RankExecutor, RunningForward
from mlxtp.engine.forwards import DecodeGraphs
from mlxtp.engine.grammar import GrammarSandbox
from mlxtp.engine.group import Proof, RingGroup
from mlxtp.engine.loader import ModelShare
from mlxtp.engine.mailbox import Mailbox
from mlxtp.engine.runner import Runner
from mlxtp.engine.sampler import Chooser, Chosen, Sampler, Scores
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
    """Write down what comes, in the order in which it comes."""
    if isinstance(received, Received) and orders.order("record"):
        message = received.message
        orders.note(
            "frame",
            sender=sender,
            type=kind_of(message),
            uid=getattr(message, "uid", 0),
            dropped=links[LinkKind.DECODE].protocol.dropped,
        )
    original(mail, sender, received)


# --- a rank that stands still, or fails --------------------------------------------------------------


@around(RankExecutor, "launch")
def hold_forward(
    original: Wrapped, rank: RankExecutor, step: int, frame: Forward, known: Any = None
) -> RunningForward:
    place = "prefill" if frame.prompts else "decode"
    if order := orders.due("hold", place):
        pause(order)
    return original(rank, step, frame, known)


@around(rank_module, "form")
def hold_form(original: Wrapped, *args: Any, **kwargs: Any) -> Any:
    if order := orders.due("hold", "form"):
        pause(order)
    return original(*args, **kwargs)


@around(rank_module, "load")
def hold_load(original: Wrapped, *args: Any) -> Any:
    if order := orders.due("hold", "load"):
        pause(order)
    return original(*args)


@around(worker, "_await_shutdown")
def hold_shutdown(original: Wrapped, mail: Mailbox) -> None:
    if order := orders.due("hold", "shutdown"):
        pause(order)
    original(mail)


NO_MEMORY = OUT_OF_MEMORY[-1]
"""Of Metal."""


@around(RankExecutor, "launch")
def raise_in_forward(
    original: Wrapped, rank: RankExecutor, step: int, frame: Forward, known: Any = None
) -> RunningForward:
    """The step's frame has gone out already."""
    if order := orders.due("raise_in_forward", kind_of(frame)):
        raise RuntimeError(NO_MEMORY if order.how == "memory" else "no such luck")
    return original(rank, step, frame, known)


@around(rank_module, "load")
def find_no_memory(original: Wrapped, folder: Path, group: Any, progress: Wrapped, *how: Any) -> ModelShare:
    """The first part of the model is here already."""

    def advance() -> None:
        progress()
        if orders.due("find_no_memory", "load"):
            raise RuntimeError(NO_MEMORY)

    loaded: ModelShare = original(folder, group, advance, *how)
    return loaded


@around(RankExecutor, "give_back")
def note_memory(original: Wrapped, rank: RankExecutor) -> None:
    """Write down what is left of a rank's memory when it ends."""
    launched = 0 if rank._runner is None else rank._runner.forwards
    original(rank)
    orders.note("given back", launched=launched, active=mx.get_active_memory())


@around(RankExecutor, "launch")
def die(
    original: Wrapped, rank: RankExecutor, step: int, frame: Forward, known: Any = None
) -> RunningForward:
    if orders.due("die", "prefill" if frame.prompts else "decode"):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(rank, step, frame, known)


prompts: dict[int, tuple[int, ...]] = {}
"""This rank's part of each prompt."""


def pieces(frame: Forward) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The tokens of each prompt in a frame, with its uid."""
    tokens = iter(frame.tokens)
    for uid, width in zip(frame.rows, frame.widths, strict=True) if frame.prompts else ():
        yield uid, tuple(itertools.islice(tokens, width))


@around(RankExecutor, "launch")
def poison(
    original: Wrapped, rank: RankExecutor, step: int, frame: Forward, known: Any = None
) -> RunningForward:
    """No rank survives a prompt with the tokens that `how` lists in it."""
    if order := orders.order("poison"):
        for uid, tokens in pieces(frame):
            prompts[uid] = (*prompts.get(uid, ()), *tokens)
            if f" {order.how} " in f" {' '.join(map(str, prompts[uid]))} " and orders.due("poison"):
                os.kill(os.getpid(), signal.SIGKILL)
    return original(rank, step, frame, known)


# --- caches on disk -----------------------------------------------------------------------------------


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


# --- a rank above 0 that does something else ----------------------------------------------------------


@around(Mailbox, "take")
def skip_step(original: Wrapped, mail: Mailbox, sender: int) -> Any:
    received = original(mail, sender)
    if not isinstance(received, Received):
        return received
    if is_step(received.message) and orders.due("skip_step"):
        return original(mail, sender)
    return received


@around(RankExecutor, "launch")
def run_twice(
    original: Wrapped, rank: RankExecutor, step: int, frame: Forward, known: Any = None
) -> RunningForward:
    forward: RunningForward = original(rank, step, frame, known)
    if is_step(frame) and orders.due("run_twice"):
        return original(rank, step, frame, known)
    return forward


@around(RankExecutor, "launch")
def swallow_exception(
    original: Wrapped, rank: RankExecutor, step: int, frame: Forward, known: Any = None
) -> RunningForward:
    """The forward raises; its caller catches that, goes on, and answers with what the last forward gave."""
    if not (is_step(frame) and orders.due("swallow_exception")):
        swallow_exception.last = original(rank, step, frame, known)  # type: ignore[attr-defined]
        return swallow_exception.last  # type: ignore[attr-defined]
    rank.status.in_flight += 1
    return dataclasses.replace(swallow_exception.last, step=step)  # type: ignore[attr-defined]


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


@around(Vocabulary, "winners")
def flip_before_winners(
    original: Wrapped, vocabulary: Vocabulary, local: mx.array
) -> tuple[mx.array, mx.array]:
    return original(vocabulary, flipped(local) if orders.due("flip_logit_bit", "winners") else local)


@around(Vocabulary, "gather")
def flip_before_gather(original: Wrapped, vocabulary: Vocabulary, local: mx.array) -> mx.array:
    return original(vocabulary, flipped(local) if orders.due("flip_logit_bit", "gather") else local)


@around(Chooser, "choose")
def flip_after_gather(
    original: Wrapped, chooser: Chooser, logits: mx.array, *args: Any, **how: Any
) -> tuple[mx.array, Scores]:
    chosen: tuple[mx.array, Scores] = original(
        chooser, flipped(logits) if orders.due("flip_logit_bit", "choose") else logits, *args, **how
    )
    return chosen


@around(RankExecutor, "launch")
def misread_step(
    original: Wrapped, rank: RankExecutor, step: int, frame: Forward, known: Any = None
) -> RunningForward:
    """This rank runs something else than the frame says. It counts frames of one row, or of several."""
    rows = "one row" if is_step(frame) and len(frame.rows) == 1 else "several rows"
    if is_step(frame) and (order := orders.due("misread_step", rows)):
        match order.how:
            case "positions":
                frame = dataclasses.replace(frame, positions=tuple(p - 1 for p in frame.positions))
            case "rows":
                frame = dataclasses.replace(frame, rows=frame.rows[::-1], positions=frame.positions[::-1])
            case "order":  # as if this rank had let another row take a place that became free
                rank.runner._batch.rows.reverse()
    if frame.prompts and orders.due("misread_prompt"):
        frame = dataclasses.replace(frame, tokens=(*frame.tokens[:-1], frame.tokens[-1] ^ 1))
    return original(rank, step, frame, known)


@around(RankExecutor, "apply")
def keep_otherwise(original: Wrapped, rank: RankExecutor, frame: Message) -> None:
    """A KV cache is not kept here, though all the others keep it; or less of it."""
    if isinstance(frame, SessionStop) and frame.keep and (order := orders.due("keep_otherwise")):
        frame = dataclasses.replace(frame, keep=max(frame.keep + int(order.how), 0))
    original(rank, frame)


@around(RankExecutor, "apply")
def evict_otherwise(original: Wrapped, rank: RankExecutor, frame: Message) -> None:
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


@around(rank_module, "load")
def change_weight(original: Wrapped, *args: Any) -> ModelShare:
    """One weight of one layer, on this rank, is not what the file says: memory, or a build, is broken."""
    loaded: ModelShare = original(*args)
    if orders.due("change_weight"):
        norm = loaded.model.layers[0].input_layernorm
        norm.weight = norm.weight.at[0].add(64)
        mx.eval(norm.weight)
    return loaded


@around(BlockingLink, "send")
def lie(original: Wrapped, link: BlockingLink, message: Message) -> int:
    """One field of an Ack, or of a SessionStop, is one too high."""
    if isinstance(message, Ack | SessionStop) and (order := orders.due("lie", kind_of(message))):
        message = dataclasses.replace(message, **{order.how: getattr(message, order.how) + 1})
    return original(link, message)


@around(RankExecutor, "launch")
def speak(
    original: Wrapped, rank: RankExecutor, step: int, frame: Forward, known: Any = None
) -> RunningForward:
    """Emission is on where it must not be: the token that rank 0 sends goes out here as well."""
    if is_step(frame) and (order := orders.due("speak")):
        pipe = links[LinkKind.PIPE]
        delta = Delta((frame.rows[0],), (0,), (7,))
        if order.how == "politely":
            pipe.send(delta)
        else:
            put(pipe, delta)
    return original(rank, step, frame, known)


# --- a rank 0 that takes one step too many ------------------------------------------------------------


@around(Scheduler, "next")
def extra_step(original: Wrapped, scheduler: Scheduler) -> DecodeFrame | None:
    """As the first published loop of this kind did: sent and run once more, after the last token."""
    frame: DecodeFrame | None = original(scheduler)
    if is_step(frame):
        extra_step.last = frame  # type: ignore[attr-defined]
    if isinstance(frame, SessionStop) and orders.due("extra_step"):
        scheduler.frames.appendleft(frame)
        scheduler.in_flight.append(QueuedForward((), tokens=1))
        last: Forward = extra_step.last  # type: ignore[attr-defined]
        return Forward((frame.uid,), (last.positions[last.rows.index(frame.uid)] + 1,))
    return frame


@around(BlockingLink, "send")
def extra_frame(original: Wrapped, link: BlockingLink, message: Message) -> int:
    """Sent, and not run here; "late": after the sequence has been stopped."""
    if is_step(message):
        extra_frame.last = message  # type: ignore[attr-defined]
    if not (isinstance(message, SessionStop) and (order := orders.due("extra_frame"))):
        return original(link, message)
    last: Forward = extra_frame.last  # type: ignore[attr-defined]
    extra = Forward((message.uid,), (last.positions[last.rows.index(message.uid)] + 1,))
    if order.how == "late":
        seq = original(link, message)
        put(link, extra)
        return seq
    put(link, extra)
    return original(link, message)


# --- frames that break the rules ----------------------------------------------------------------------

Send = Callable[[Message], int]


def _ahead_of(other: Callable[[Message], Message]) -> Callable[[Send, BlockingLink, Message], int]:
    def act(send: Send, link: BlockingLink, message: Message) -> int:
        put(link, other(message))
        return send(message)

    return act


def _other_epoch_as_well(send: Send, link: BlockingLink, message: Message) -> int:
    put(link, message, epoch=link.protocol.epoch + 1, seq=link.protocol.seq + 1)
    return send(message)


def _other_epoch(send: Send, link: BlockingLink, message: Message) -> int:
    return put(link, message, epoch=link.protocol.epoch + 1)


def _seq_ahead(send: Send, link: BlockingLink, message: Message) -> int:
    return put(link, message, seq=link.protocol.seq + 2)


def _seq_again(send: Send, link: BlockingLink, message: Message) -> int:
    seq = send(message)
    return put(link, message, seq=seq)


def _unknown_type(send: Send, link: BlockingLink, message: Message) -> int:
    payload = msgpack.packb((0x7E, link.protocol.epoch, link.protocol.seq + 1, {}))
    put_bytes(link, struct.pack(">I", len(payload)) + payload)
    return send(message)


def _truncated(send: Send, link: BlockingLink, message: Message) -> int:
    payload = encode(message, link.protocol.epoch, link.protocol.seq + 1)[4:-3]
    put_bytes(link, struct.pack(">I", len(payload)) + payload)
    return send(message)


def _oversize(send: Send, link: BlockingLink, message: Message) -> int:
    put_bytes(link, struct.pack(">I", MAX_FRAME + 1))
    return send(message)


def _garbage(send: Send, link: BlockingLink, message: Message) -> int:
    put_bytes(link, b"\0\0\0\x20" + bytes(range(0xC1, 0xE1)))
    return send(message)


def _twice(send: Send, link: BlockingLink, message: Message) -> int:
    seq = send(message)
    put(link, message)
    return seq


def _missing(send: Send, link: BlockingLink, message: Message) -> int:
    return link.protocol.seq


WAYS: dict[str, Callable[[Send, BlockingLink, Message], int]] = {
    "prompt first": _ahead_of(lambda _: of_prompt(1, 0, 4, (1, 2, 3, 4))),
    "unknown uid": _ahead_of(lambda _: Forward((4_000_000_000,), (40,))),
    "hello again": _ahead_of(lambda _: Hello(PROTOCOL_VERSION, 1, 1, bytes(16), bytes(32))),
    "delta": _ahead_of(lambda _: Delta((1,), (0,), (7,))),
    "other epoch as well": _other_epoch_as_well,
    "other epoch": _other_epoch,
    "seq ahead": _seq_ahead,
    "seq again": _seq_again,
    "unknown type": _unknown_type,
    "truncated": _truncated,
    "oversize": _oversize,
    "garbage": _garbage,
    "twice": _twice,
    "missing": _missing,
}


@around(BlockingLink, "send")
def wrong_frame(original: Wrapped, link: BlockingLink, message: Message) -> int:
    """On the decode link, at the message that `on` names, in one of the `WAYS`."""
    if link.protocol.link is LinkKind.DECODE and (order := orders.due("wrong_frame", kind_of(message))):
        return WAYS[order.how](functools.partial(original, link), link, message)
    return original(link, message)


@around(BlockingLink, "send")
def late(original: Wrapped, link: BlockingLink, message: Message) -> int:
    if link.protocol.link is LinkKind.DECODE and (order := orders.due("late", kind_of(message))):
        time.sleep(order.seconds)
    return original(link, message)


# --- strangers ----------------------------------------------------------------------------------------


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
def ring_stranger(
    original: Wrapped, backend: str, rank: int, world: int, hosts: tuple[str, ...], **how: Any
) -> Any:
    """A stranger reaches rank 0's ring port before this rank does, and speaks or is silent."""
    if order := orders.due("ring_stranger"):
        sock, _ = _knock(hosts[0], b"\x01" * 100_000 if order.how == "garbage" else b"")
        ring_stranger.sock = sock  # type: ignore[attr-defined]  # stays open as long as this process
        time.sleep(0.2)
    return original(backend, rank, world, hosts, **how)


# --- entry --------------------------------------------------------------------------------------------


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
