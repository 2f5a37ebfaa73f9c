"""Bytes of all tokens, in a table that the model's process makes.

The agent decodes answers by lookup: it runs no code or pattern of a model's publisher.
"""

from __future__ import annotations

import codecs
import json
import re
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from ..errors import Code, ModelError
from ..model_files import CHARACTER_OF

MOST_TOKENS = 1 << 22  #: Most ids of a tokenizer; the largest known one has 262,144.
MOST_S = 0.25  #: Most CPU time to decode one token; it usually takes microseconds.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BATCH = 4096  # tokens that the library decodes at a time
_PLAIN = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}


@dataclass(frozen=True, slots=True)
class TokenBytes:
    starts: array[int]  #: offset of each token in `content`, by id, and the end of all
    content: bytes
    strip: bool  #: An initial space is the tokenizer's, not the text's.

    def joined(self, tokens: Iterable[int]) -> bytes:
        starts, content, end = self.starts, self.content, len(self.starts) - 1
        return b"".join([content[starts[token] : starts[token + 1]] for token in tokens if 0 <= token < end])

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, including special ones, as the beginning of a text."""
        found = self.joined(tokens).decode(errors="replace")
        return found.removeprefix(" ") if self.strip else found


class Detokenizer:
    """One answer's token ids in, its text out, except for ids in `skip`. Exact and linear."""

    def __init__(self, table: TokenBytes, skip: Collection[int], *, inside: bool = False) -> None:
        """`inside`: text goes before the answer, so an initial space is its own."""
        self._table = table
        self._skip = frozenset(skip)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = table.strip and not inside

    def push(self, tokens: Iterable[int]) -> str:
        """Return the text that is certain by now. An incomplete character waits for more tokens."""
        text = self._utf8.decode(self._table.joined(token for token in tokens if token not in self._skip))
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text


# --- in the process of the model --------------------------------------------------------------------------


def bytes_of(backend: Any, probe: Sequence[int]) -> TokenBytes:
    """Return a table that decodes `probe`, a text of difficult cases, like `backend`. Raises ModelError."""
    added = backend.get_added_tokens_decoder()
    names: dict[int, str] = {id_: name for name, id_ in backend.get_vocab(with_added_tokens=False).items()}
    names |= {id_: token.content for id_, token in added.items()}
    if max(names, default=0) >= MOST_TOKENS:
        raise ModelError(
            f"tokenizer.json has a token {max(names)}; the largest id that mlxtp takes is {MOST_TOKENS - 1}",
            Code.MODEL_UNSUPPORTED,
        )
    steps = [] if backend.decoder is None else [*_steps(json.loads(backend.decoder.__getstate__()))]
    special = {id_ for id_, token in added.items() if token.special}
    began = time.process_time()
    backend.decode(list(probe[:1]))
    if (took_s := time.process_time() - began) > MOST_S:
        raise ModelError(
            f"the tokenizer's decoder takes {took_s:.1f} s for one token; {MOST_S:g} s are the most",
            Code.MODEL_UNSUPPORTED,
        )
    expected = backend.decode(list(probe), skip_special_tokens=True).lstrip(" ")
    for pieces, strip in _ways(backend, names, steps):
        every = [pieces.get(id_, b"") for id_ in range(max(pieces, default=-1) + 1)]
        table = TokenBytes(array("I", [0, *accumulate(map(len, every))]), b"".join(every), strip)
        found = Detokenizer(table, special).push(probe)
        if found.lstrip(" ") == expected:  # Metaspace drops all spaces of the first token
            return table
    raise ModelError(
        f"the tokenizer's decoder ({', '.join(step['type'] for step in steps)}) writes a token in another "
        "way beside others than alone, which mlxtp does not support; use a conversion whose decoder is "
        "ByteLevel, or Replace, ByteFallback and Fuse",
        Code.MODEL_UNSUPPORTED,
    )


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for part in decoder.get("decoders", ()):
        yield from _steps(part)


def _ways(
    backend: Any, names: Mapping[int, str], steps: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[int, bytes], bool]]:
    """Yield bytes of tokens and `strip`: first by known rules, then as the library decodes each token."""
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        yield {id_: _byte_level(name) for id_, name in names.items()}, False
    elif kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == _PLAIN:
        yield {id_: _byte_fallback(name) for id_, name in names.items()}, kinds[3:] == ["Strip"]
    found, strip = _by_library(backend, names)
    if "ByteFallback" in kinds:
        found |= {id_: _byte_fallback(name) for id_, name in names.items() if _BYTE_TOKEN.fullmatch(name)}
    yield found, strip


def _by_library(backend: Any, names: Mapping[int, str]) -> tuple[dict[int, bytes], bool]:
    """Return each token's bytes after a word, and True if the library drops the space of a first token."""
    first = next((id_ for id_, name in names.items() if name.strip("\u2581 ").isalpha()), 0)
    decoded = partial(backend.decode_batch, skip_special_tokens=False)
    before, found = decoded([[first]])[0], dict[int, bytes]()
    ids = [*names]
    for at in range(0, len(ids), _BATCH):
        part = ids[at : at + _BATCH]
        both = decoded([[first, id_] for id_ in part])
        found |= {id_: text.removeprefix(before).encode() for id_, text in zip(part, both, strict=True)}
    spaced = next((id_ for id_, piece in found.items() if piece[:1] == b" " != piece), None)
    return found, spaced is not None and not decoded([[spaced]])[0].startswith(" ")


def _byte_level(token: str) -> bytes:
    """Return one byte per character; a token with any other character is literal text (an added token)."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    """Return a token's bytes: `<0xF0>` is a byte; in any other text U+2581 stands for a space."""
    byte = _BYTE_TOKEN.fullmatch(token) if token.startswith("<0x") else None
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


_BYTE_OF = {character: byte for byte, character in CHARACTER_OF.items()}
