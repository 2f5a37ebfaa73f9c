"""An agent whose member says anything: messages whose fields the input chooses, one after the other."""

from __future__ import annotations

import functools
import logging
import tempfile
from pathlib import Path
from typing import Any, cast

from mlxtp.config import embedded_model_path
from mlxtp.models.inspect import ModelSource
from mlxtp.wire.cluster_messages import BOTH_WAYS
from mlxtp.wire.codecs import Message

from ..groups.mutated import ODD, Lied, read, unconnected
from ..groups.one_node import Node, play
from ..wire.members import Member, founder, member_of
from ..wire.samples import EXAMPLES, to_body

_MORE = 0x80
SEEDS = tuple(bytes((kind % 2, kind, 0, 0, 7)) for kind in range(len(BOTH_WAYS)))


class _Kept(logging.Handler):
    """Errors that the agent logged instead of ending."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.errors.append(record.exc_info[1])


@functools.cache
def _home() -> tuple[Path, Member, frozenset[Path]]:
    folder = Path(tempfile.mkdtemp(prefix="mlxtp-fuzz-"))
    member = member_of(founder(folder), folder)
    return folder, member, frozenset(folder.rglob("*"))


def run(data: bytes) -> None:
    """Play the input: whether this node leads, then of each message its kind, and odd values of fields."""
    home, member, first = _home()
    weights = ModelSource("tiny", embedded_model_path(), cast(Any, None))
    kept = _Kept()

    async def story(node: Node) -> None:
        lied = Lied(node, weights, leads=not data[:1] > b"\x7f")
        await lied.hears(_messages(data[1:], node.parts.node.node_id))
        lied.shows()

    logging.getLogger().addHandler(kept)
    try:
        with unconnected():
            play(home, member, story)
    finally:
        logging.getLogger().removeHandler(kept)
        _forget(home, first)
    for error in kept.errors:
        raise error


def _forget(home: Path, first: frozenset[Path]) -> None:
    """Remove what a story left behind, so that an input means the same after any other."""
    for each in sorted(set(home.rglob("*")) - first, reverse=True):
        each.rmdir() if each.is_dir() else each.unlink()


def _messages(data: bytes, own: str) -> list[Message]:
    story, found = iter(data), []
    for which in story:
        kind = BOTH_WAYS[which % len(BOTH_WAYS)]
        body, more = to_body(EXAMPLES[kind]), bool(ODD[kind])
        while more:
            field, high, low = (next(story, 0) for _ in range(3))
            name = sorted(ODD[kind])[(field & ~_MORE) % len(ODD[kind])]
            body[name] = ODD[kind][name][(high << 8 | low) % len(ODD[kind][name])]
            more = bool(field & _MORE)
        if (message := read(kind, body, own)) is not None:
            found.append(message)
    return found
