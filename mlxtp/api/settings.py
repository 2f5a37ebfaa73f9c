"""From what a client asks for to what the engine is asked: sampling, shaping, stop strings. Pure.

What a request leaves out is the model's default (`ModelInfo.defaults`), and without one: greedy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import Code, RequestError
from .ask import Options
from .backend import MAX_BIASES, MAX_GRAMMAR, Request, Sampling, Shaping
from .schema import shown

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_USER_CHARS = 256
"""Of `user`, as many tell clients apart."""

_SEEDS = 2**63


def seed_of(seed: int) -> int:
    """Any integer as the engine's 63 bits: modulo 2^63."""
    return seed % _SEEDS


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with `seed` (63 bits): choice 0 has the request's own.

    The others have BLAKE2b (8 bytes) of both numbers as 8 bytes each, modulo 2^63, everything little-endian:
    so choice 1 of seed 7 is not choice 0 of seed 8.
    """
    if index == 0:
        return seed
    both = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(both, digest_size=8).digest(), "little") % _SEEDS


def choices(first: Request, count: int) -> tuple[Request, ...]:
    """`count` requests that differ in their seeds only."""
    seed = first.sampling.seed
    seeds = [choice_seed(seed, index) for index in range(count)]
    return tuple(replace(first, sampling=replace(first.sampling, seed=seed)) for seed in seeds)


def sampling(wish: Options, defaults: Sampling, seed: int) -> Sampling:
    """How tokens are chosen for choice 0. `seed` has 63 bits."""
    top_p = _given(wish.top_p, defaults.top_p)
    top_k = max(0, _given(wish.top_k, defaults.top_k))
    if top_p == 0:  # nothing but the most probable token
        top_p, top_k = 1.0, 1
    return Sampling(
        temperature=_given(wish.temperature, defaults.temperature),
        top_p=top_p,
        top_k=top_k,
        min_p=_given(wish.min_p, defaults.min_p),
        xtc_probability=_given(wish.xtc_probability, defaults.xtc_probability),
        xtc_threshold=_given(wish.xtc_threshold, defaults.xtc_threshold),
        seed=seed,
    )


def shaping(wish: Options, vocabulary: int, grammar: tuple[str, str] | None = None) -> Shaping:
    """What is done to the logits before; `grammar` (kind and text) instead of that of the wish.

    Raises RequestError.
    """
    biases = _biases(wish.logit_bias, vocabulary)
    kind, text = grammar or _grammar(wish.format)
    if len(text) > MAX_GRAMMAR:
        field = "tools" if grammar else "response_format"
        raise RequestError(
            f"{field} makes a grammar of {len(text)} characters; at most {MAX_GRAMMAR}", param=field
        )
    return Shaping(
        repetition_penalty=_given(wish.repetition_penalty, 1.0),
        presence_penalty=_given(wish.presence_penalty, 0.0),
        frequency_penalty=_given(wish.frequency_penalty, 0.0),
        bias_tokens=tuple(biases),
        bias_values=tuple(biases.values()),
        min_tokens=wish.min_tokens,
        grammar_kind=kind,
        grammar=text,
    )


def guided(wish: Options, grammar: tuple[str, str] | None = None) -> bool:
    """Whether `shaping` holds the answer to a grammar. Raises RequestError."""
    return bool((grammar or _grammar(wish.format))[0])


def client_of(user: str, address: str) -> str:
    """Whose request this is, when clients take turns: an address, and there the user it names, if any."""
    return f"{address} {user[:MAX_USER_CHARS]}"


def stop_strings(stops: Sequence[str]) -> tuple[str, ...]:
    """Without empty ones, which stop nothing. Raises RequestError."""
    stops = tuple(stop for stop in stops if stop)
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings; it may have 0 to {MAX_STOPS}", param="stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise RequestError(
            f"stop has a string of {longest} characters; each may have 1 to {MAX_STOP_CHARS}", param="stop"
        )
    return stops


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises RequestError when the answer cannot be long enough."""
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens {min_tokens} is more than the answer may have: from 0 to {max_tokens}",
            param="min_tokens",
        )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _biases(given: Mapping[str, float], vocabulary: int) -> dict[int, float]:
    if len(given) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(given)} tokens; at most {MAX_BIASES}", param="logit_bias")
    biases = {}
    for key, value in given.items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS else vocabulary
        if token >= vocabulary:
            raise RequestError(
                f"logit_bias has the key {shown(key)}; its keys are token ids from 0 to {vocabulary - 1}",
                param="logit_bias",
            )
        biases[token] = value
    return biases


_MOST_DIGITS = 10  # of a token id


def _grammar(format_: Mapping[str, Any] | None) -> tuple[str, str]:
    """Kind and text as `Shaping` has them."""
    match format_:
        case None | {"type": "text"}:
            return "", ""
        case {"type": "json_object", "schema": dict(schema)}:  # as some clients spell json_schema
            return "json_schema", _compact(schema)
        case {"type": "json_object"}:
            return "json_object", ""
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return "json_schema", _compact(schema)
        case {"type": "json_schema"}:
            raise _incomplete("json_schema.schema", "a JSON schema (an object)", format_)
        case {"type": "regex", "pattern": str(pattern)} if pattern:
            return "regex", pattern
        case {"type": "regex"}:
            raise _incomplete("pattern", "a regular expression (a string)", format_)
        case {"type": "grammar" | "lark", "grammar": str(grammar)} if grammar:
            return "lark", grammar
        case {"type": "grammar" | "lark"}:
            raise _incomplete("grammar", "a Lark grammar (a string)", format_)
        case _:
            raise RequestError(
                f"response_format {shown(format_)} is not supported; its type may be text, json_object, "
                "json_schema, regex or lark",
                Code.NOT_SUPPORTED,
                param="response_format",
            )


def _incomplete(field: str, what: str, format_: Mapping[str, Any]) -> RequestError:
    return RequestError(
        f"response_format.{field} should be {what}, got {shown(format_)}", param=f"response_format.{field}"
    )


def _compact(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
