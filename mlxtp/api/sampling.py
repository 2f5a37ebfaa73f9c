"""The client's options as the engine's: sampling, shaping, stop strings, constraints of the answer. Pure.

`SETTINGS` lists the fields of the engine's `Sampling` and `Shaping` that clients of each dialect may set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import create_model

from ..errors import RequestError
from ..text.call_style import CallStyle, Separators
from ..text.calls import CallFormat
from ..text.conversation import AUTO, NONE, REQUIRED, Conversation, GenerationOptions, GenerationRequest
from ..text.markups import JSON_CALLS
from ..text.tokenizer import Text
from ..text.tool_grammar import (
    JSON_STYLE,
    answer_grammar,
    call_grammar,
    checked_tools,
    guided_schema,
    lark,
    marked_call_grammar,
)
from .backend import (
    GREEDY,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_GRAMMAR,
    MAX_WORD_TOKENS,
    PLAIN,
    Generate,
    Sampling,
    Shaping,
)
from .request_body import MOST_TOKENS, Integer, S, Schema, in_range, named, not_supported, shown

# --- settings that are numbers ----------------------------------------------------------------------------


Range = tuple[float, float]
DialectName = Literal["openai", "anthropic", "ollama"]  #: "openai": of all its APIs


@dataclass(frozen=True, slots=True)
class ClientSetting:
    """Range, by dialect, of a client's values for one field of `Sampling` or `Shaping`.

    A dialect without a range lacks the setting. `ollama_name` is Ollama's own name for it, if it has one.
    `of_model`: requests that leave it out get the value in the model's `generation_config.json`.
    """

    openai: Range
    anthropic: Range | None = None
    ollama: Range | None = None
    ollama_name: str = ""
    of_model: bool = False


SETTINGS: Mapping[str, ClientSetting] = {
    "min_tokens": ClientSetting((0, MOST_TOKENS)),
    "temperature": ClientSetting((0, 2), anthropic=(0, 1), ollama=(0, 100), of_model=True),
    "top_p": ClientSetting((0, 1), anthropic=(0, 1), ollama=(0, 1), of_model=True),
    "top_k": ClientSetting(  # -1 is off, as 0 is
        (-1, MOST_TOKENS), anthropic=(0, MOST_TOKENS), ollama=(-1, MOST_TOKENS), of_model=True
    ),
    "min_p": ClientSetting((0, 1), ollama=(0, 1), of_model=True),
    "xtc_probability": ClientSetting((0, 1)),
    "xtc_threshold": ClientSetting((0, 0.5)),
    "presence_penalty": ClientSetting((-2, 2), ollama=(-100, 100)),
    "frequency_penalty": ClientSetting((-2, 2), ollama=(-100, 100)),
    "repetition_penalty": ClientSetting((0.01, 100), ollama=(0.01, 100), ollama_name="repeat_penalty"),
}
_UNSET: Mapping[str, Any] = asdict(GREEDY) | asdict(PLAIN)


def _names(dialect: DialectName) -> dict[str, str]:
    offered = {field: each for field, each in SETTINGS.items() if getattr(each, dialect) is not None}
    return {field: (dialect == "ollama" and each.ollama_name) or field for field, each in offered.items()}


def with_settings(dialect: DialectName) -> Callable[[type[S]], type[S]]:
    """Add a dialect's settings to the schema of a body."""
    shape: dict[str, Any] = {}
    for field, name in _names(dialect).items():
        kind = Integer if isinstance(_UNSET[field], int) else float
        also = SETTINGS[field].ollama_name if dialect == "openai" else ""
        names = named(*filter(None, (name, also)))
        shape[name] = (
            Annotated[Annotated[kind, in_range(*getattr(SETTINGS[field], dialect))] | None, names],
            None,
        )
    return lambda schema: create_model(
        schema.__name__, __base__=schema, __doc__=schema.__doc__, __module__=schema.__module__, **shape
    )


def given_settings(body: Schema, dialect: DialectName) -> dict[str, float]:
    """Return a body's settings, by their fields in `Sampling` and `Shaping`."""
    values = {field: getattr(body, name) for field, name in _names(dialect).items()}
    return {field: value for field, value in values.items() if value is not None}


# --- options ----------------------------------------------------------------------------------------------


BAN = -100.0  # added to a logit; also the least that clients may add
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_SCORES = 1 << 19  # of the prompts of one request, with their alternatives
MAX_USER_CHARS = 256  # characters of `user` that distinguish users

_SEEDS = 2**63


def seed_of(seed: int) -> int:
    """Reduce any integer to the engine's 63 bits."""
    return seed % _SEEDS


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` of a request with `seed` (63 bits): choice 0 has the request's own.

    The others have BLAKE2b (8 bytes) of both numbers as 8 bytes each, modulo 2^63, everything little-endian.
    So choice 1 of seed 7 is not choice 0 of seed 8.
    """
    if index == 0:
        return seed
    both = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(both, digest_size=8).digest(), "little") % _SEEDS


def choices(first: Generate, count: int) -> tuple[Generate, ...]:
    """Return `count` requests that differ only in their seeds."""
    seed = first.sampling.seed
    seeds = [choice_seed(seed, index) for index in range(count)]
    return tuple(replace(first, sampling=replace(first.sampling, seed=seed)) for seed in seeds)


def sampling(options: GenerationOptions, defaults: Sampling, seed: int) -> Sampling:
    """Return the sampling of choice 0, with the model's `defaults`. `seed` has 63 bits."""
    found = replace(defaults, **_of(Sampling, options), seed=seed)
    if found.top_p == 0:  # only the most probable token
        return replace(found, top_p=1.0, top_k=1)
    return replace(found, top_k=max(found.top_k, 0))


def shaping(
    options: GenerationOptions,
    vocabulary: int,
    grammar: tuple[str, str] = ("", ""),
    banned: Sequence[int] = (),
) -> Shaping:
    """Return the changes to the logits: `grammar` (kind and text), `banned` tokens. Raises RequestError."""
    biases = _biases(options.logit_bias, vocabulary, MAX_BIASES - len(banned)) | dict.fromkeys(banned, BAN)
    kind, text = grammar
    if len(text) > MAX_GRAMMAR:
        field = "tools" if options.format is None else options.format_field
        words = f"{field} makes a grammar of {len(text)} characters; at most {MAX_GRAMMAR}"
        raise RequestError(words, param=field)
    tokens, values = tuple(biases), tuple(biases.values())
    allowed = token_ids(options.allowed_tokens, vocabulary, MAX_BIASES, "allowed_token_ids")
    return Shaping(
        bias_tokens=tokens,
        bias_values=values,
        allowed_tokens=allowed,
        grammar_kind=kind,
        grammar=text,
        **_of(Shaping, options),
    )


def _of(part: type[Sampling | Shaping], options: GenerationOptions) -> dict[str, Any]:
    names = {each.name for each in fields(part)}
    return {name: value for name, value in options.settings.items() if name in names}


def stop_strings(stops: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings without empty ones, which stop nothing. Raises RequestError."""
    stops = tuple(stop for stop in stops if stop)
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings; it may have 0 to {MAX_STOPS}", param="stop")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARS:
        words = f"stop has a string of {longest} characters; each may have 1 to {MAX_STOP_CHARS}"
        raise RequestError(words, param="stop")
    return stops


def without_words(shaping: Shaping, words: Sequence[str], text: Text, vocabulary: int) -> Shaping:
    """Forbid words, each with and without a blank before it. Blocks. Raises RequestError."""

    def refused(what: str) -> RequestError:
        return RequestError(f"bad_words has {what}", param="bad_words")

    words = tuple(dict.fromkeys(words))
    if len(words) > (most := MAX_BAD_WORDS // 2):
        raise refused(f"{len(words)} words; at most {most}")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not (alone := word.lstrip()) or len(word) > MAX_STOP_CHARS:
            raise refused(
                f"{shown(word)} of {len(word)} characters; a word has 1 to {MAX_STOP_CHARS}, not just blanks"
            )
        for each in (alone, f" {alone}"):
            tokens = text.encoded(each, special=False)
            if not 0 < len(tokens) <= MAX_WORD_TOKENS:
                raise refused(f"{shown(word)} of {len(tokens)} tokens; each has 1 to {MAX_WORD_TOKENS}")
            if (largest := max(tokens)) >= vocabulary:
                raise refused(f"{shown(word)} of token {largest}; the model has 0 to {vocabulary - 1}")
            found[tokens] = None
    return replace(shaping, bad_tokens=tuple(chain(*found)), bad_lengths=tuple(map(len, found)))


def check_scores(tokens: int, options: GenerationOptions) -> None:
    """Raise RequestError if prompts of `tokens` tokens in all would have too many scores."""
    if (asked := options.prompt_logprobs) >= 0 and tokens > (most := MAX_SCORES // (1 + asked)):
        words = f"prompt has {tokens} tokens to score with {asked} alternatives each; at most {most}"
        raise RequestError(words, param="prompt")


def token_ids(given: Sequence[int], vocabulary: int, most: int, field: str) -> tuple[int, ...]:
    """Return a client's token ids in `field`, each once. Raises RequestError."""
    if len(found := tuple(dict.fromkeys(given))) > most:
        raise RequestError(f"{field} has {len(found)} tokens; at most {most}", param=field)
    for token in found:
        if not 0 <= token < vocabulary:
            words = f"{field} has {token}; token ids are from 0 to {vocabulary - 1}"
            raise RequestError(words, param=field)
    return found


def check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and min_tokens > max_tokens:
        words = f"min_tokens {min_tokens} is more than the answer may have: from 0 to {max_tokens}"
        raise RequestError(words, param="min_tokens")


def _biases(given: Mapping[str, float], vocabulary: int, most: int) -> dict[int, float]:
    if len(given) > most:
        raise RequestError(f"logit_bias has {len(given)} tokens; at most {most}", param="logit_bias")
    biases = {}
    for key, value in given.items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS else vocabulary
        if token >= vocabulary:
            words = f"logit_bias has the key {shown(key)}; its keys are token ids from 0 to {vocabulary - 1}"
            raise RequestError(words, param="logit_bias")
        biases[token] = value
    return biases


_MOST_DIGITS = 10  # of a token id


# --- constraints ------------------------------------------------------------------------------------------


MOST_SCHEMAS = 16_000  # characters of all tools' schemas that fit in a grammar with another one


@dataclass(frozen=True, slots=True)
class Guidance:
    """Constraints of one answer, and the format of its calls."""

    grammar: tuple[str, str] = ("", "")  #: kind and text; empty for free text
    calls: CallFormat | None = None  #: None: it has no calls.
    forced: bool = False  #: It is one call in plain JSON.
    banned: tuple[int, ...] = ()  #: These tokens begin calls, which are not allowed.
    dropped: bool = False  #: Calls are not allowed; the answer leaves out any that the model writes.


def guidance(ask: GenerationRequest, text: Text, eos: tuple[int, ...]) -> Guidance:
    """Return the constraints of the answer to a request; one of `eos` ends it. Raises RequestError."""
    prompt, format_, field = ask.prompt, ask.options.format, ask.options.format_field
    if not isinstance(prompt, Conversation):
        return Guidance(_grammar(format_, Separators(), field))
    if not prompt.tools:
        if prompt.tool_choice not in (AUTO, NONE):
            words = f"tool_choice {prompt.tool_choice!r} needs tools"
            raise RequestError(words, param="tool_choice")
        return Guidance(_behind_prefix(_grammar(format_, Separators(), field), text))
    style = text.call_style(eos)
    schemas = checked_tools(prompt.tools)
    if prompt.tool_choice in (AUTO, NONE):
        answer = _grammar(format_, Separators() if style is None else style.separators, field)
        if prompt.tool_choice == NONE:
            return _without_calls(_behind_prefix(answer, text), text)
        return Guidance(_or_call(answer, schemas, style, text, field), text.tool_calls)
    required = None if prompt.tool_choice == REQUIRED else prompt.tool_choice
    relaxed = text.relaxed(schemas, style is None or style.field is None)
    grammar = call_grammar(relaxed, style or JSON_STYLE, text.grammar_tokens, required=required)
    return Guidance(("lark", grammar), text.tool_calls if style else JSON_CALLS, forced=style is None)


def _without_calls(grammar: tuple[str, str], text: Text) -> Guidance:
    """Ban the token that begins a call. A grammar never allows one anyway.

    If no token begins a call, or a call is bare JSON, the model may still write one; the answer omits it.
    """
    banned, calls = text.call_tokens, text.tool_calls
    if grammar[0] or (banned and not calls.bare):
        return Guidance(grammar, banned=banned)
    return Guidance(grammar, calls, banned=banned, dropped=True)


def _behind_prefix(grammar: tuple[str, str], text: Text) -> tuple[str, str]:
    """Allow the text that the template writes before an answer."""
    if grammar[0] != "json_schema" or not text.answer_prefix:
        return grammar
    return "lark", answer_grammar(text.answer_prefix, grammar[1], text.grammar_tokens)


def _or_call(
    grammar: tuple[str, str],
    tools: Mapping[str, Mapping[str, Any]],
    style: CallStyle | None,
    text: Text,
    field: str,
) -> tuple[str, str]:
    """Allow a call instead of the answer, with any arguments if the tools' schemas are too large."""
    kind, schema = grammar
    if not kind:
        return grammar
    if kind != "json_schema":
        raise not_supported(
            f"{field} of type {kind} is not supported together with tools: "
            'leave one of them out, or send tool_choice "none"',
            field,
        )
    otherwise = (text.answer_prefix, schema)
    if style is None or style.field is not None:
        return "lark", marked_call_grammar(text.tool_calls, text.grammar_tokens, otherwise)
    if len(json.dumps(tools)) > MOST_SCHEMAS:
        tools = {name: {"type": "object"} for name in tools}
    try:
        tools = text.relaxed(tools, True)
        return "lark", call_grammar(tools, style, text.grammar_tokens, otherwise=otherwise)
    except ValueError:  # a call in bare JSON with other text around it
        return "lark", marked_call_grammar(text.tool_calls, text.grammar_tokens, otherwise)


def _grammar(format_: Mapping[str, Any] | None, separators: Separators, field: str) -> tuple[str, str]:
    """Return kind and text of the grammar of a format, which is in this `field`. Raises RequestError."""
    match format_:
        case None | {"type": "text"}:
            return "", ""
        case {"type": "regex", "pattern": str(pattern)} if pattern:
            return "regex", pattern
        case {"type": "regex"}:
            raise _incomplete("pattern", "a regular expression (a string)", format_)
        case {"type": "grammar" | "lark", "grammar": str(grammar)} if grammar:
            return "lark", grammar
        case {"type": "gbnf", "grammar": str(grammar)}:
            return "lark", lark(grammar, field)
        case {"type": "grammar" | "lark"}:
            raise _incomplete("grammar", "a Lark grammar (a string)", format_)
        case (
            {"type": "json_schema", "json_schema": {"schema": dict(schema)}}
            | {"type": "json_object", "schema": dict(schema)}  # as some clients spell it
            | {"type": "json_object" | "json", "value": dict(schema)}  # as TGI's clients do
            | {"type": "json_schema", "value": {"schema": dict(schema)}}
        ):
            pass
        case {"type": "json_object"}:
            schema = {"type": "object"}
        case {"type": "json_schema"}:
            raise _incomplete("json_schema.schema", "a JSON schema (an object)", format_)
        case _:
            raise not_supported(
                f"response_format {shown(format_)} is not supported; its type may be text, json_object, "
                "json_schema, regex, lark or gbnf",
                "response_format",
            )
    return "json_schema", guided_schema(schema, separators, field)


def _incomplete(field: str, what: str, format_: Mapping[str, Any]) -> RequestError:
    where = f"response_format.{field}"
    return RequestError(f"{where} should be {what}, got {shown(format_)}", param=where)
