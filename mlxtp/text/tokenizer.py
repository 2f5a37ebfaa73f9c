"""Text and token ids: chat template, tokenizer, and a detokenizer that shows no half characters."""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from ..errors import Code, ModelError, RequestError, is_library_error
from .call_style import CallStyle, answer_prefix, call_style
from .chat_template import (
    REFUSED,
    TemplateTraits,
    left_out,
    plainer,
    template_messages,
    template_options,
    traits_of,
)
from .conversation import ChatMessage, Conversation, tool_json
from .markups import JSON_CALLS, Markup, call_format, thought_markup
from .renderer import Renderer, RendererFacts, SandboxedRenderer, WorkerQueue, broken

_PROBE = " Hello,  world's end . \n\té 日本語 😀👩‍👧 e\u0301 x"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_LONGEST_MARKER = 16  # tokens of a marker and the white space after it
_LONGEST_HELD = 64  # tokens that the library's decoder may hold back before it is restarted


class Detokenizer(Protocol):
    """Token ids of one answer in, its text out. Text that `push` returned is final."""

    def push(self, tokens: Iterable[int]) -> str:
        """Return the text that is certain now. An incomplete character waits for the next tokens."""
        ...

    def finish(self) -> str:
        """Return the rest. A character that never became complete is dropped."""
        ...


#: Text of one token shown alone, and its bytes in the answer; None for special tokens, which have none there.
Name = tuple[str, tuple[int, ...] | None]


class Text:
    """Tokenizer and chat template of one model. Its methods may be called from any thread.

    Methods that render or encode block until the model's own process has done so: call them in a thread.
    """

    def __init__(self, writer: Renderer) -> None:
        """Use `writer` to render and encode; decoding is built here from its facts. Raises ModelError."""
        self._writer = writer
        self.relaxed = writer.relaxed
        self._names: dict[int, Name] = {}
        self._styles: dict[tuple[int, ...], CallStyle | None] = {}
        try:
            self._read(writer.facts)
        except BaseException as error:
            if not is_library_error(error):
                raise
            raise ModelError(f"the tokenizer fails: {error}", Code.MODEL_INVALID) from error

    def _read(self, facts: RendererFacts) -> None:
        from tokenizers import Tokenizer

        self._backend = Tokenizer.from_str(facts.tokenizer)
        #: text of special tokens, which answers do not show
        self.specials: dict[int, str] = {
            id_: token.content
            for id_, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._special = frozenset(self.specials)
        self._decoding = _byte_decoding(self._backend, self._special, self._writer)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        #: In characters: `n` tokens make at most `n` times as many.
        self.longest_token = max(map(len, vocabulary))
        self.markup = thought_markup(facts.template, vocabulary)
        own = call_format(facts.template, vocabulary)
        traits = _traits(self._writer, self.markup)
        #: Abilities of the chat template. It has no tools where their calls could not be read.
        self.traits = replace(traits, tools=traits.tools and own is not None)
        #: format of this model's tool calls, and that of tools in words if the template lists none
        self.tool_calls = JSON_CALLS if own is None else own if self.traits.tools else own.beside(JSON_CALLS)
        both = (facts.tokenizer + facts.template).encode(errors="surrogatepass")
        #: Equal for equal tokenizers and templates.
        self.identity = blake2b(both, digest_size=16).hexdigest()

    @property
    def features(self) -> tuple[str, ...]:
        """Abilities that requests may use: "tools" and "reasoning"."""
        found = {"tools": self.traits.tools, "reasoning": self.markup.think is not None}
        return tuple(name for name, there in found.items() if there)

    @classmethod
    def load(cls, path: Path) -> Text:
        """Read a model folder; its template and tokenizer get a process of their own. Raises ModelError.

        Blocks for a second or more: call it in a thread.
        """
        return cls(SandboxedRenderer(path))

    def close(self) -> None:
        """End the model's process once its work is done. A request that comes later takes seconds."""
        self._writer.close()

    @property
    def has_chat_template(self) -> bool:
        return self._writer.facts.renders

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokenizer's own end token, if it has one."""
        token = self._writer.facts.eos
        return () if token < 0 else (token,)

    def rendered(self, conversation: Conversation, prompting: bool = True, exact: bool = False) -> str:
        """Return a conversation as the chat template writes it; `prompting` adds the beginning of an answer.

        Where the template refuses the messages or leaves one out, they are written in a plainer form, unless
        `exact`. Raises RequestError when there is no template, or it writes no form of them whole.
        """
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template, so it cannot answer chat messages; "
                "use its instruct or chat version",
                Code.NOT_SUPPORTED,
                param="messages",
            )
        options = template_options(conversation)
        refusal: RequestError | None = None
        for traits in [self.traits] if exact else plainer(self.traits):
            messages = template_messages(
                conversation, traits, self.tool_calls.written, prompting=prompting, markup=self.markup
            )
            tools = [tool_json(tool) for tool in conversation.tools] if traits.tools else []
            try:
                prompt = self._writer.render(messages, tools, options, prompting=prompting)
                if not prompting or not (lacks := left_out(prompt, messages, tools)):
                    return prompt
                raise RequestError(f"the model's chat template leaves out {lacks}", param="messages")
            except RequestError as error:
                if error.status != REFUSED:
                    raise
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def stamp(self) -> str:
        """Return text that stands for the time in prompts; empty where the template writes none."""
        if "strftime_now" not in self._writer.facts.template:
            return ""
        try:
            return self.rendered(Conversation((ChatMessage("user", "x"),)), prompting=False)
        except RequestError:  # no two prompts are known to be of one time
            return secrets.token_hex(8)

    def call_style(self, eos: tuple[int, ...]) -> CallStyle | None:
        """Return the template's style of a call before one of the end tokens `eos`; None if it is unknown."""
        if eos not in self._styles:
            ends = [self._backend.id_to_token(token) or "" for token in (*eos, *self.eos)]
            if self.tool_calls.bare:  # nothing but JSON
                ends += self.specials.values()
            self._styles[eos] = call_style(self.rendered, self.tool_calls, ends)
        return self._styles[eos]

    @cached_property
    def answer_prefix(self) -> str:
        """Special tokens, with the text between them, that the template writes before an answer."""
        try:
            prefix = answer_prefix(self.rendered)
        except RequestError:  # without a chat template
            return ""
        return prefix if any(special in prefix for special in self.specials.values()) else ""

    @cached_property
    def grammar_tokens(self) -> tuple[tuple[str, int], ...]:
        """Tokens, with their ids, that the grammar library takes as one symbol instead of letters.

        Those are special tokens, and added ones in angle brackets.
        """
        added = {id_: token.content for id_, token in self._backend.get_added_tokens_decoder().items()}
        in_brackets = {
            id_: text for id_, text in added.items() if text.startswith("<") and text.endswith(">")
        }
        return tuple((text, id_) for id_, text in (self.specials | in_brackets).items())

    @property
    def call_tokens(self) -> tuple[int, ...]:
        """Token that begins a call, if the model has one."""
        token = self._backend.token_to_id(self.tool_calls.start)
        return () if token is None else (int(token),)

    def decoded(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens that a client sent, special ones too."""
        return _decoded(self._backend, tokens, skip_special=False)

    def thinks_on(self, prompt: Sequence[int]) -> bool:
        """Return True if a prompt ends in the middle of a thought; the answer then begins with it."""
        if self.markup.think is None:
            return False
        return self.decoded(prompt[-_LONGEST_MARKER:]).rstrip().endswith(self.markup.think[0])

    def encoded(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Return token ids; `special` adds the tokens that begin every sequence. Raises RequestError."""
        return self._writer.encode(text, special=special)

    def line(self, size: int) -> WorkerQueue:
        """Return the queue for work on texts of `size` bytes or characters."""
        return self._writer.line(size)

    def name(self, token: int) -> Name:
        """Return the name of `token` in log-probabilities.

        Bytes that are no whole character are shown as U+FFFD.
        """
        name = self._names.get(token)
        if name is None:
            name = self._names[token] = self._name(token)
        return name

    def _name(self, token: int) -> Name:
        known = self._backend.id_to_token(token)
        if known is None or token in self._special:
            return known or f"<{token}>", None
        if self._decoding is not None:
            piece = self._decoding.piece(token)
            return piece.decode(errors="replace"), tuple(piece)
        text = _decoded(self._backend, [token], skip_special=False)
        return text or known, None if "\ufffd" in text or not text else tuple(text.encode())

    def detokenizer(self, skip: Collection[int] = ()) -> Detokenizer:
        """Return a detokenizer for one answer. Special tokens and the ids in `skip` have no text."""
        if self._decoding is not None:
            return _ByteDetokenizer(self._decoding, frozenset(skip))
        return _LibraryDetokenizer(self._backend, frozenset(skip))


def _traits(writer: Renderer, markup: Markup) -> TemplateTraits:
    """Return the traits of a chat template; those of the best one if it takes too long to find them."""
    if not writer.facts.renders:
        return TemplateTraits()
    try:
        return traits_of(lambda turns, tools: writer.render(turns, tools, {}, prompting=True), markup)
    except RequestError:
        return TemplateTraits()


class _ByteDecoding:
    """Decoding for a tokenizer whose tokens are pieces of UTF-8.

    The bytes of each id are looked up once and kept.
    """

    def __init__(self, backend: Any, special: frozenset[int], byte_level: bool, strip: bool) -> None:
        self.strip = strip  # one space at the very beginning belongs to the tokenizer, not to the text
        self._backend = backend
        self._special = special
        self._to_bytes = _byte_level if byte_level else _byte_fallback
        self._known: dict[int, bytes] = {}

    def piece(self, token: int) -> bytes:
        piece = self._known.get(token)
        if piece is None:
            name = None if token in self._special or token < 0 else self._backend.id_to_token(token)
            piece = self._known[token] = b"" if name is None else self._to_bytes(name)
        return piece


class _ByteDetokenizer:
    """Exact and linear detokenizer: bytes through Python's incremental UTF-8 decoder."""

    def __init__(self, decoding: _ByteDecoding, skip: frozenset[int]) -> None:
        self._decoding = decoding
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = decoding.strip

    def push(self, tokens: Iterable[int]) -> str:
        piece, skip = self._decoding.piece, self._skip
        text = self._utf8.decode(b"".join([piece(token) for token in tokens if token not in skip]))
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def finish(self) -> str:
        self._utf8.reset()
        return ""


class _LibraryDetokenizer:
    """Detokenizer for decoders that do not produce bytes: the library's own stream, restarted where it gives
    up.

    Its stream raises "Invalid prefix encountered" when a token changes the text of earlier ones. It holds
    back everything while the text ends in U+FFFD.
    """

    def __init__(self, backend: Any, skip: frozenset[int]) -> None:
        self._backend = backend
        self._skip = skip
        self._held: list[int] = []
        self._restart()

    def push(self, tokens: Iterable[int]) -> str:
        return "".join([self._step(token) for token in tokens if token not in self._skip and token >= 0])

    def finish(self) -> str:
        return self._flush().rstrip("\ufffd")

    def _step(self, token: int) -> str:
        self._held.append(token)
        try:
            text = self._stream.step(self._backend, token)
        except BaseException as error:
            if not is_library_error(error):
                raise
            return self._flush()
        if text is None:
            return self._flush() if len(self._held) > _LONGEST_HELD else ""
        self._held.clear()
        return str(text)

    def _flush(self) -> str:
        text = _decoded(self._backend, self._held, skip_special=True) if self._held else ""
        self._restart()
        return text

    def _restart(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._held.clear()
        self._stream = DecodeStream(skip_special_tokens=True)


def _decoded(backend: Any, tokens: Sequence[int], *, skip_special: bool) -> str:
    """Return the library's text of these tokens. Raises RequestError where its decoder breaks."""
    try:
        return str(backend.decode(list(tokens), skip_special_tokens=skip_special))
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise broken(f"{type(error).__name__}: {error}") from error


def _byte_decoding(backend: Any, special: frozenset[int], writer: Renderer) -> _ByteDecoding | None:
    """Return the decoding of this tokenizer's tokens into bytes, or None when its decoder is of another kind.

    It is used only if it reproduces the library's own decoding of a text with all difficult cases.
    """
    if backend.decoder is None:
        return None
    steps = _steps(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        decoding = _ByteDecoding(backend, special, byte_level=True, strip=False)
    elif kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        decoding = _ByteDecoding(backend, special, byte_level=False, strip=kinds[-1] == "Strip")
    else:
        return None
    ids = writer.encode(_PROBE, special=False)
    expected = backend.decode(list(ids), skip_special_tokens=True)
    return decoding if _ByteDetokenizer(decoding, frozenset()).push(ids) == expected else None


def _steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _byte_level(token: str) -> bytes:
    """Return a byte per character; a token with any other character is literal text (an added token)."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    """Return the bytes of a token: `<0xF0>` is a byte, everything else is text with U+2581 for the space."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table: printable bytes stand for themselves, characters from U+0100 on for others."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
