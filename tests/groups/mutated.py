"""Messages of a member that lies: each field with values at and beyond the edge of what its codec takes."""

from __future__ import annotations

import asyncio
import random
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from mlxtp.admin.snapshot import gather, page, status
from mlxtp.errors import LinkError
from mlxtp.groups import forwarding
from mlxtp.models import transfers
from mlxtp.models.inspect import ModelSource
from mlxtp.wire import cluster_messages
from mlxtp.wire import messages as rank_messages
from mlxtp.wire.cluster_messages import BOTH_WAYS, Report
from mlxtp.wire.codecs import FieldCodec, Message

from ..wire.samples import EXAMPLES, ROWS, field_codecs, to_body
from .one_node import A, B, FakeLink, Node

OWN = "0" * 31 + "1"
"""Stands for the id of the node that is lied to."""
TEXTS = (
    OWN, "a" * 32, "f" * 32, "b" * 32, "", "tiny", "tiny#0", "tiny#1", "tiny#63", "tiny#64", "tiny#007",
    "tiny#one", "tiny#", "#", "#0", "tiny#\u0663", "tiny#\u00b2", "tiny#-1", "tiny# 1", "tiny#1_0", "x#0#1",
    "tiny#" + "9" * 40, "org/one", "org/one@main", "a/b@" + "c" * 40, "/etc", "../x", "~", ".", "@", "0", "1",
    "2", "65", "-1",
    "all", "auto", "none", "99999999", "1,2", "40,24", ",", "pipeline", "tensor", "127.0.0.1:1",
    "[::1]:99999", "10.0.0.1:x", "10.0.0.1", "198.51.100.1", "http://", "=", "%s", "{}", "[/b]", "\u00e9" * 9,
    "ab" * 32, "cd" * 20, "00", "\x1b", "\u202e",
)  # fmt: skip
INTEGERS = (
    -1, 0, 1, 2, 3, 17, 63, 64, 65, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63
)  # fmt: skip
NUMBERS = (0.0, -1.0, 1.0, 0.5, 1e-9, 1e4, 1e12, -1e12, float("nan"), float("inf"))
OTHERS: tuple[Any, ...] = (None, True, False, b"", [], {}, "\x00")
_PARTS = {
    frozenset(each.name for each in fields(kind)): kind
    for module in (cluster_messages, rank_messages)
    for kind in vars(module).values()
    if isinstance(kind, type) and is_dataclass(kind)
}


def holds(codec: FieldCodec) -> str:
    """Return what a field holds, in the words of the codec's refusal."""
    try:
        codec.from_wire(object())
    except ValueError as error:
        return str(error)
    raise AssertionError("a field takes anything")


def values(codec: FieldCodec) -> Iterator[Any]:
    """Yield values of a field as they travel, most of them possible ones, by what the codec says it holds."""
    words = holds(codec)
    low, high = [int(each) for each in [*re.findall(r"-?\d+", words), "0", "0"][:2]]
    yield from OTHERS
    if words.startswith("an integer"):
        yield from {*INTEGERS, low, high, low - 1, high + 1, (low + high) // 2}
    elif words.startswith("a number"):
        yield from NUMBERS
    elif words.startswith("one of"):
        yield from (*words.removeprefix("one of ").split(", "), "other")
    elif words.startswith(("a string", "a group's id")):
        yield from (*(each[:low] for each in TEXTS), "n" * low, "n" * (low + 1))
    elif words.endswith("strings"):
        one = [*TEXTS, "n" * 2000]
        yield from ([each] for each in one)
        yield from ([each, each] for each in one[:8])
        yield [TEXTS[n % len(TEXTS)] for n in range(low)]
        yield ["a"] * (low + 1)
    elif "packed 32-bit integers" in words:
        numbers = (0, 1, 2**31 - 1, 2**32 - 1)
        yield from (struct.pack(f"<{n}I", *[each] * n) for n in (1, 2, 8, high) for each in numbers)
    elif "packed 32-bit floats" in words:
        yield from (struct.pack(f"<{n}f", *[value] * n) for n in (1, 2, low) for value in NUMBERS)
    elif words.endswith("bytes"):
        yield from (bytes(n) for n in {low, high, min(low + 1, high), high + 1, low - 1} if n >= 0)
        yield bytes(range(256))[: max(high, 0)]
    elif words.startswith("a list of"):
        kind = next(kind for kind in _PARTS.values() if kind.__name__ == words.split()[-1])
        some = list(parts(kind))
        yield from ([each] for each in some)
        yield [some[0]] * high
        yield some[:high]


def parts(kind: type[Any]) -> Iterator[dict[str, Any]]:
    """Yield maps for a part of a message, with one odd field each."""
    codecs = {each.name: each.metadata["codec"] for each in fields(kind)}
    usual = {name: _usual(codec) for name, codec in codecs.items()}
    yield usual
    for name, codec in codecs.items():
        yield from (usual | {name: value} for value in values(codec))


def _usual(codec: FieldCodec) -> Any:
    for value in values(codec):
        try:
            codec.from_wire(value)
        except ValueError:
            continue
        if value not in OTHERS:
            return value
    return True


def rows() -> Iterator[dict[str, Any]]:
    """Yield rows of all kinds as they travel, each with one odd field."""
    for kind, example in ROWS.items():
        body = {"": kind.TYPE, **to_body(example)}
        yield from (body | {name: value} for name, values in odd(kind).items() for value in values)


def odd(kind: type[Message]) -> dict[str, list[Any]]:
    """Return the odd values of each field of a message, as they travel."""
    found = {}
    for name, codec in field_codecs(kind):
        if holds(codec).startswith("a row"):
            found[name] = [*OTHERS, {}, {"": Report.TYPE}, {"": []}, *rows()]
        elif holds(codec).startswith("a map"):
            names = frozenset(holds(codec).removeprefix("a map of exactly the fields ").split(", "))
            found[name] = list(parts(_PARTS[names]))
        else:
            found[name] = list(values(codec))
    return found


ODD = {kind: odd(kind) for kind in BOTH_WAYS}


def read(kind: type[Message], body: dict[str, Any], own: str) -> Message | None:
    """Return the message of a body; None where the codec refuses it. `own` stands where OWN does."""
    try:
        return kind.CODEC.from_wire(_named(body, own))  # type: ignore[no-any-return]
    except ValueError:
        return None


def _named(value: Any, own: str) -> Any:
    match value:
        case str():
            return value.replace(OWN, own)
        case list():
            return [_named(each, own) for each in value]
        case dict():
            return {name: _named(each, own) for name, each in value.items()}
    return value


def each_field(own: str) -> Iterator[Message]:
    """Yield each message with each odd value in each field, one at a time."""
    for kind in BOTH_WAYS:
        for name, odd_values in ODD[kind].items():
            for value in odd_values:
                if (found := read(kind, to_body(EXAMPLES[kind]) | {name: value}, own)) is not None:
                    yield found


def at_random(seed: int, count: int, own: str) -> Iterator[Message]:
    """Yield messages with several odd fields."""
    draw = random.Random(seed)
    while count:
        kind = draw.choice(BOTH_WAYS)
        names = draw.sample(sorted(ODD[kind]), draw.randint(0, len(ODD[kind])))
        body = to_body(EXAMPLES[kind]) | {name: draw.choice(ODD[kind][name]) for name in names}
        if (found := read(kind, body, own)) is not None:
            count -= 1
            yield found


@contextmanager
def unconnected() -> Iterator[None]:
    """Meanwhile no requests link is opened, and nothing is looked for on the Hub."""

    async def unreachable(*_: object) -> None:
        raise LinkError("no requests link is opened here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forwarding, "model_info", unreachable)
        patch.setattr(transfers, "MAX_PULLS", 0)
        yield


class Lied:
    """A node that leads or follows the liar, an honest member, and a liar that comes back after each cut."""

    def __init__(self, node: Node, weights: ModelSource, *, leads: bool) -> None:
        self.node, self.came = node, 1
        self.liar, self.honest = node.meet(A), node.meet(B)
        node.lead(weights)
        if not leads:
            node.follow(self.liar, 1000)

    async def hears(self, messages: Iterable[Message], every: int = 1) -> None:
        """Hear messages, with half a second of life after so many of them."""
        for count, message in enumerate(messages):
            if not self.linked(self.liar):
                self.came += 1
                self.liar = self.node.meet(A, f"boot {self.came}")
            self.node.hear(
                self.liar, message.row if isinstance(message, Report) and not message.over else message
            )
            if count % every == 0:
                self.node.live_once(self.honest, *([self.liar] if self.linked(self.liar) else []))
                await asyncio.sleep(0)
            if count % (16 * every) == 0:
                self.shows()

    def linked(self, link: FakeLink) -> bool:
        return link in self.node.parts.node.links.links()

    def shows(self) -> None:
        """What its user and its clients see; and the honest member is still there."""
        now = gather(self.node.parts)
        status(now), page(now, None)
        self.node.parts.gateway.health()
        assert self.linked(self.honest)
