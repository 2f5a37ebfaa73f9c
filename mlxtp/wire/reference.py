"""Reference of all messages between agents and ranks, from the tables that both ends run.

It covers the messages of imported modules: the caller imports `agent`, which imports them all.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from .codecs import FieldCodec, Message
from .frames import MAX_DEPTH, MAX_FRAME, MAX_ITEMS, MAX_OBJECTS, MAX_OPENING_FRAME, messages
from .messages import PROTOCOL_VERSION
from .protocol import TERMINAL, LinkKind, LinkState, RequestFailed, Side, table

_WIDTH = 118


def render() -> str:
    return "\n".join([*_beginning(), *_orders(), *_messages()]) + "\n"


def _beginning() -> Iterator[str]:
    yield "# Messages of agents and ranks"
    yield ""
    yield from _wrapped(
        f"Protocol version {PROTOCOL_VERSION}. A frame is its length as four bytes, big-endian, then one "
        f"msgpack array `[number, epoch, seq, body]`; the body is a map of exactly the fields below, but a "
        f"Forward leaves out fields with their default. A frame has at most {MAX_OPENING_FRAME} bytes until "
        f"a link is open, {MAX_FRAME} from then on, at most "
        f"{MAX_DEPTH} levels, {MAX_ITEMS} items in an array or map, and {MAX_OBJECTS} objects. `seq` counts "
        f"the frames of each direction from 1; `epoch` is 0 on links between agents. A message that breaks a "
        f"rule ends the link. The section on frames in docs/cluster.md explains the layers."
    )


# --- the order ----------------------------------------------------------------------------------------


def _orders() -> Iterator[str]:
    yield ""
    yield "## The legal order"
    for kind in LinkKind:
        upper, lower = kind.who(Side.UPPER), kind.who(Side.LOWER)
        yield from ("", f"### {str(kind).capitalize()}: {upper} and {lower}", "")
        yield "| in state | sender | messages | next state |"
        yield "|---|---|---|---|"
        for state in LinkState:
            for side in Side:
                for targets, names in _moves(kind, state, side):
                    end = "" if targets is state else f"{targets}"
                    yield f"| {state} | {kind.who(side)} | {', '.join(names)} | {end} |"


def _moves(kind: LinkKind, state: LinkState, side: Side) -> Iterator[tuple[LinkState, list[str]]]:
    """Yield the legal messages by the next state; messages that keep the state are last."""
    if state in TERMINAL or state not in table(kind):
        return
    found: dict[LinkState, list[str]] = defaultdict(list)
    for message, end in table(kind)[state][side].items():
        found[end].append("Error with a uid" if message is RequestFailed else message.__name__)
    yield from sorted(found.items(), key=lambda item: (item[0] is state, list(LinkState).index(item[0])))


# --- the messages -------------------------------------------------------------------------------------


def _messages() -> Iterator[str]:
    yield ""
    yield "## The messages"
    parts: dict[str, type[object]] = {}
    for number, message in sorted(messages().items()):
        yield from ("", f"### 0x{number:02X} {message.__name__}", "")
        yield from _described(message)
        yield from _table(message)
        parts |= {part.__name__: part for part in _parts_of(message)}
    yield from ("", "## Parts of messages", "")
    yield "Maps in a field of a message, with exactly these fields."
    for name, part in sorted(parts.items()):
        yield from ("", f"### {name}", "")
        yield from _described(part)
        yield from _table(part)


def _table(part: type[object]) -> Iterator[str]:
    found = fields(part)  # type: ignore[arg-type]
    if not found:
        return
    says = {f.name: f.metadata["figure"].says for f in found if "figure" in f.metadata} | _comments(part)
    yield from ("", "| field | holds | meaning |", "|---|---|---|")
    for field in found:
        yield f"| `{field.name}` | {_holds(field.metadata['codec'])} | {says.get(field.name, '')} |"


def _comments(part: type[object]) -> dict[str, str]:
    own = [kind for kind in reversed(part.__mro__) if hasattr(kind, "__dataclass_fields__")]
    found = (re.findall(r"(?m)^    (\w+): .*#: (.*)$", inspect.getsource(kind)) for kind in own)
    return {name: comment for each in found for name, comment in each}


def _holds(codec: FieldCodec) -> str:
    """Return the allowed values of a field, in the words of the error for any other value."""
    try:
        codec.from_wire(object())
    except ValueError as error:
        return str(error).replace("|", "\\|")
    raise AssertionError("a field takes anything")


def _parts_of(message: type[Message]) -> Iterator[type[object]]:
    module = inspect.getmodule(message)
    for field in fields(message):
        for word in str(field.type).replace("[", " ").replace("]", " ").replace(",", " ").split():
            part: Any = getattr(module, word, None)
            if hasattr(part, "__dataclass_fields__") and part not in messages().values():
                yield part


def _described(part: type[object]) -> Iterator[str]:
    paragraphs = inspect.cleandoc(part.__doc__ or "").split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        if number:
            yield ""
        listed = any(line.startswith("  ") or "   " in line.strip() for line in paragraph.splitlines())
        if listed:  # keep a docstring's table
            yield from ("```", *paragraph.splitlines(), "```")
        else:
            yield from _wrapped(" ".join(paragraph.split()))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
