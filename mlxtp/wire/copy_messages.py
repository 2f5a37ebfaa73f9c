"""Messages between a Mac that copies a model and one that has it, on their own connection (`mlxtp-models`).

They use the usual frames, with epoch and seq 0. `size` bytes of the file follow a FileHeld. The copying Mac
requests, the other replies to each request. Files are named by their index in the manifest, never by a path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import U32, U63, Message
from .base import holding as _f
from .codecs import binary, integer, text

MAX_NAME = 400
MAX_MANIFEST = 1 << 20
MAX_FILES = 4096


@dataclass(frozen=True, slots=True)
class FilesWanted(Message):
    """Request for the state of this model (OWNER/NAME[@REVISION]). Reply: FilesHeld.

    Later requests are about it.
    """

    TYPE: ClassVar[int] = 0x64
    model: str = _f(text(MAX_NAME))


@dataclass(frozen=True, slots=True)
class FilesHeld(Message):
    """Reply: the manifest, a byte for each of its files in their order, 1 if it is complete here, and the
    bytes of all files that are here.

    The manifest is empty when there is nothing of the model.
    """

    TYPE: ClassVar[int] = 0x65
    manifest: bytes = _f(binary(0, MAX_MANIFEST))
    complete: bytes = _f(binary(0, MAX_FILES))
    held: int = _f(integer(0, U63))


@dataclass(frozen=True, slots=True)
class FileWanted(Message):
    """Request for a file, by its number, from byte `at` to its end. Reply: FileHeld."""

    TYPE: ClassVar[int] = 0x68
    file: int = _f(integer(0, U32))
    at: int = _f(integer(0, U63))


@dataclass(frozen=True, slots=True)
class FileHeld(Message):
    """Reply: `size` bytes follow, the rest of the file, or none when it is not complete here."""

    TYPE: ClassVar[int] = 0x69
    size: int = _f(integer(0, U63))


COPY_MESSAGES: tuple[type[Message], ...] = (FilesWanted, FilesHeld, FileWanted, FileHeld)
