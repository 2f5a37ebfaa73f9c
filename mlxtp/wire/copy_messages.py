"""What a Mac that copies a model says to one that has it, on a connection of its own (`mlxtp-models`).

Frames as everywhere, with epoch and seq 0; after a PieceHeld, so many bytes of the file. The one that copies
asks, the other answers each question. Files are told by their place in the manifest, never by a path.
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
    """What is there of this model (OWNER/NAME[@REVISION])? Answered by FilesHeld. What is asked then is about
    it."""

    TYPE: ClassVar[int] = 0x64
    model: str = _f(text(MAX_NAME))


@dataclass(frozen=True, slots=True)
class FilesHeld(Message):
    """The manifest, and a byte for each piece of its files in their order, 1 if it is here. Both are empty
    when there is nothing of the model."""

    TYPE: ClassVar[int] = 0x65
    manifest: bytes = _f(binary(0, MAX_MANIFEST))
    here: bytes = _f(binary(0, MAX_PIECES))


@dataclass(frozen=True, slots=True)
class PieceWanted(Message):
    """A piece of a file, both by number. Answered by PieceHeld."""

    TYPE: ClassVar[int] = 0x66
    file: int = _f(integer(0, U32))
    piece: int = _f(integer(0, U32))


@dataclass(frozen=True, slots=True)
class PieceHeld(Message):
    """So many bytes follow: all of the piece, or none when it is not here."""

    TYPE: ClassVar[int] = 0x67
    size: int = _f(integer(0, U32))


COPY_MESSAGES: tuple[type[Message], ...] = (FilesWanted, FilesHeld, PieceWanted, PieceHeld)
