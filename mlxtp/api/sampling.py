"""From a client's options to the engine's: sampling, shaping, stop strings. Pure.

A request's missing options take the model's defaults (`ModelInfo.defaults`); without one: greedy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import RequestError
from ..text.conversation import GenerationOptions
from .backend import MAX_BIASES, MAX_GRAMMAR, Request, Sampling, Shaping
from .schema import shown

BAN = -100.0  # added to a logit; also the least that clients may add
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_USER_CHARS = 256  # characters of `user` that distinguish users

_SEEDS = 2**63


def seed_of(seed: int) -> int:
    """Reduce any integer to the engine's 63 bits, modulo 2^63."""
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


def choices(first: Request, count: int) -> tuple[Request, ...]:
    """Return `count` requests that differ only in their seeds."""
    seed = first.sampling.seed
    seeds = [choice_seed(seed, index) for index in range(count)]
    return tuple(replace(first, sampling=replace(first.sampling, seed=seed)) for seed in seeds)


def sampling(options: GenerationOptions, defaults: Sampling, seed: int) -> Sampling:
    """Return the sampling of choice 0. `seed` has 63 bits."""
    top_p = _given(options.top_p, defaults.top_p)
    top_k = max(0, _given(options.top_k, defaults.top_k))
    if top_p == 0:  # only the most probable token
        top_p, top_k = 1.0, 1
    return Sampling(
        temperature=_given(options.temperature, defaults.temperature),
        top_p=top_p,
        top_k=top_k,
        min_p=_given(options.min_p, defaults.min_p),
        xtc_probability=_given(options.xtc_probability, defaults.xtc_probability),
        xtc_threshold=_given(options.xtc_threshold, defaults.xtc_threshold),
        seed=seed,
    )


def shaping(
    options: GenerationOptions,
    vocabulary: int,
    grammar: tuple[str, str] = ("", ""),
    banned: Sequence[int] = (),
) -> Shaping:
    """Return the changes to the logits before sampling: `grammar` (kind and text), and `banned` tokens.

    Raises RequestError.
    """
    biases = _biases(options.logit_bias, vocabulary, MAX_BIASES - len(banned)) | dict.fromkeys(banned, BAN)
    kind, text = grammar
    if len(text) > MAX_GRAMMAR:
        field = "tools" if options.format is None else "response_format"
        raise RequestError(
            f"{field} makes a grammar of {len(text)} characters; at most {MAX_GRAMMAR}", param=field
        )
    return Shaping(
        repetition_penalty=_given(options.repetition_penalty, 1.0),
        presence_penalty=_given(options.presence_penalty, 0.0),
        frequency_penalty=_given(options.frequency_penalty, 0.0),
        bias_tokens=tuple(biases),
        bias_values=tuple(biases.values()),
        min_tokens=options.min_tokens,
        grammar_kind=kind,
        grammar=text,
    )


def stop_strings(stops: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings without empty ones, which stop nothing. Raises RequestError."""
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
    """Raise RequestError when the answer cannot be long enough."""
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens {min_tokens} is more than the answer may have: from 0 to {max_tokens}",
            param="min_tokens",
        )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _biases(given: Mapping[str, float], vocabulary: int, most: int) -> dict[int, float]:
    if len(given) > most:
        raise RequestError(f"logit_bias has {len(given)} tokens; at most {most}", param="logit_bias")
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
