"""What every message is made of: a frozen dataclass whose fields say what they may hold."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from .codecs import FieldCodec

U32 = 2**32 - 1
U63 = 2**63 - 1


def holding(codec: FieldCodec, **default: Any) -> Any:
    """A dataclass field that may hold what `codec` says."""
    return field(metadata={"codec": codec}, **default)


class Message:
    """Base of all messages. `TYPE` is the number on the wire."""

    __slots__ = ()
    TYPE: ClassVar[int]
