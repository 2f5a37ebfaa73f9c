"""Messages between a Mac that copies a model and one that has it, on their own connection (`mlxtp-models`).

They use the usual frames, with epoch and seq 0. `size` bytes of the file follow a PieceHeld. The copying Mac
requests, the other replies to each request. Files are named by their index in the manifest, never by a path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import U32, Message
from .base import holding as _f
from .codecs import binary, integer, text

MAX_NAME = 400
MAX_MANIFEST = 1 << 20
MAX_PIECES = 1 << 20


@dataclass(frozen=True, slots=True)
class FilesWanted(Message):
    """Request for the state of this model (OWNER/NAME[@REVISION]). Reply: FilesHeld.

    Later requests are about it.
    """

    TYPE: ClassVar[int] = 0x64
    model: str = _f(text(MAX_NAME))


@dataclass(frozen=True, slots=True)
class FilesHeld(Message):
    """Reply: the manifest, and a byte for each piece of its files in their order, 1 if it is here.

    Both are empty when there is nothing of the model.
    """

    TYPE: ClassVar[int] = 0x65
    manifest: bytes = _f(binary(0, MAX_MANIFEST))
    here: bytes = _f(binary(0, MAX_PIECES))


@dataclass(frozen=True, slots=True)
class PieceWanted(Message):
    """Request for a piece of a file, both by number. Reply: PieceHeld."""

    TYPE: ClassVar[int] = 0x66
    file: int = _f(integer(0, U32))
    piece: int = _f(integer(0, U32))


@dataclass(frozen=True, slots=True)
class PieceHeld(Message):
    """Reply: `size` bytes follow, which are all of the piece, or none when it is not here."""

    TYPE: ClassVar[int] = 0x67
    size: int = _f(integer(0, U32))


COPY_MESSAGES: tuple[type[Message], ...] = (FilesWanted, FilesHeld, PieceWanted, PieceHeld)
