"""Base of all messages: frozen dataclasses whose fields declare their limits."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from .codecs import FieldCodec

U32 = 2**32 - 1
U63 = 2**63 - 1


def holding(codec: FieldCodec, **default: Any) -> Any:
    """Return a dataclass field whose values `codec` packs and checks."""
    return field(metadata={"codec": codec}, **default)


class Message:
    """Base of all messages. `TYPE` is the number on the wire."""

    __slots__ = ()
    TYPE: ClassVar[int]
