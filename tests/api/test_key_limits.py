"""Rights and limits of keys by clocks of the test's own: no file, no server."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.api.backend import ModelInfo
from mlxtp.api.catalog import permitted_name
from mlxtp.api.key_limits import CHAT, ON_REQUEST, ApiKey, KeyCounts, KeyUse, Refusal, TokenBucket
from mlxtp.api.request_context import RequestContext
from mlxtp.errors import Code, RequestError

NOON = datetime(2026, 11, 26, 12, 0, 0).timestamp()  # of wherever the test runs
HOUR = 3600.0


def key(**fields: Any) -> ApiKey:
    return ApiKey("guest", b"", 1, **fields)


def use(**fields: Any) -> KeyUse:
    return KeyUse(key(**fields), KeyCounts(), 0.0)


def request(prompt: int = 0, generated: int = 0) -> RequestContext:
    """One with so many tokens, which may become more."""
    found = RequestContext("id", 0.0)
    found.answers.append(cast(Any, SimpleNamespace(prompt=range(prompt), generated=generated, cached=None)))
    return found


def refused(found: Refusal | None) -> tuple[int, Code, str, str]:
    """Status, code, words, and the time after which to retry."""
    assert found is not None
    return found.status, found.code, found.message, found.headers.get("retry-after", "")


def spend(used: KeyUse, tokens: int, now: float = NOON) -> None:
    """A request that ends with so many tokens."""
    used.end(request(tokens), now)


def test_a_key_without_limits_is_never_refused() -> None:
    used = use()
    for _ in range(100):
        assert used.refusal(CHAT, 0.0, NOON) is None
        used.open[request(10**9)] = None
    assert used.summary(NOON)["tokens_today"] == 100 * 10**9


def test_a_key_ends_with_its_last_second() -> None:
    used = use(expires=int(NOON) + 1)
    assert used.refusal(CHAT, 0.0, NOON) is None
    status, code, words, _ = refused(used.refusal("", 1.0, NOON + 1))
    assert (status, code) == (401, Code.KEY_INVALID)
    assert words.startswith("the key guest expired at 2026-11-26 12:00")


@pytest.mark.parametrize(
    ("scopes", "may", "may_not"),
    [
        (("chat",), ("", "chat"), ("on-request", "load", "metrics")),
        (("load",), ("", "load", "on-request"), ("chat", "metrics")),
        (("metrics",), ("", "metrics"), ("chat", "on-request", "load")),
        (key().scopes, ("", "chat", "metrics", "on-request"), ("load",)),
    ],
)
def test_what_scopes_permit(scopes: tuple[str, ...], may: tuple[str, ...], may_not: tuple[str, ...]) -> None:
    assert all(key(scopes=scopes).may(each) for each in may)
    for each in may_not:
        status, code, words, _ = refused(use(scopes=scopes).refusal(each, 0.0, NOON))
        assert (status, code) == (403, Code.NOT_PERMITTED)
        assert f"scope {each}, and it has {', '.join(scopes)}" in words


def test_tokens_a_minute_are_made_up_for_before_the_next_request() -> None:
    used = use(tokens_per_minute=60)
    assert used.refusal(CHAT, 0.0, NOON) is None
    spend(used, 59)
    assert used.refusal(CHAT, 0.0, NOON) is None
    spend(used, 31)  # more than was left
    assert refused(used.refusal(CHAT, 0.0, NOON)) == (
        429,
        Code.RATE_LIMITED,
        "the key guest allows 60 tokens a minute, which are used up; retry in 31 s",
        "31",
    )
    assert used.refusal("", 0.0, NOON) is None, "a list of models takes none"
    assert used.refusal(CHAT, 30.9, NOON) is not None
    assert used.refusal(CHAT, 31.0, NOON) is None


def test_counted_prompts_take_tokens_of_the_minute_alone() -> None:
    used = use(tokens_per_minute=60, tokens_per_day=100)
    counting = request()
    counting.counted_tokens = 600
    used.end(counting, NOON)
    assert refused(used.refusal(CHAT, 0.0, NOON))[:2] == (429, Code.RATE_LIMITED)
    assert used.counts.day_tokens == 0


def test_tokens_of_open_requests_count_as_they_come() -> None:
    used = use(tokens_per_minute=60, tokens_per_day=100)
    running = request(50)
    used.open[running] = None
    assert used.refusal(CHAT, 0.0, NOON) is None
    cast(Any, running.answers[0]).generated = 10
    assert refused(used.refusal(CHAT, 0.0, NOON))[3] == "1"
    cast(Any, running.answers[0]).generated = 50
    assert refused(used.refusal(CHAT, 0.0, NOON))[1] is Code.QUOTA
    used.end(running, NOON)
    assert used.summary(NOON)["tokens_today"] == 100, "once"


def test_tokens_a_day_come_again_at_midnight_here() -> None:
    used = use(tokens_per_day=100)
    spend(used, 99)
    assert used.refusal(CHAT, 0.0, NOON) is None
    spend(used, 24)
    found = used.refusal(CHAT, 0.0, NOON + 48 * 60)
    status, code, words, retry = refused(found)
    assert (status, code, retry) == (429, Code.QUOTA, str(int(11.2 * HOUR)))
    assert "allows 100 tokens a day and has used 123 today; the next day begins at 2026-11-27 00:00" in words
    assert words.endswith("; retry in 11 h 12 min")
    assert found is not None
    assert found.headers["x-should-retry"] == "false", "no client waits for so long"
    midnight = datetime.fromtimestamp(NOON).replace(hour=0) + timedelta(days=1)
    assert used.refusal(CHAT, 0.0, midnight.timestamp() - 1) is not None
    assert used.refusal(CHAT, 0.0, midnight.timestamp()) is None
    assert used.summary(midnight.timestamp())["prompt_tokens"] == 123


def test_a_clock_that_goes_back_begins_no_new_day() -> None:
    used = use(tokens_per_day=100)
    spend(used, 70)
    spend(used, 30, NOON - 24 * HOUR)
    assert used.refusal(CHAT, 0.0, NOON - 24 * HOUR) is not None
    assert used.refusal(CHAT, 0.0, NOON) is not None


def test_a_clock_that_was_ahead_for_a_while_uses_up_no_later_day() -> None:
    used = use(tokens_per_day=100)
    spend(used, 100, NOON + 3650 * 24 * HOUR)
    assert used.refusal(CHAT, 0.0, NOON) is None
    spend(used, 100)
    assert used.refusal(CHAT, 0.0, NOON) is not None
    assert used.refusal(CHAT, 0.0, NOON + 24 * HOUR) is None


def test_requests_at_one_time() -> None:
    used, first = use(concurrent=2), request()
    for each in (first, request()):
        assert used.refusal(CHAT, 0.0, NOON) is None
        used.open[each] = None
    assert used.refusal("", 0.0, NOON) is None
    assert refused(used.refusal(CHAT, 0.0, NOON)) == (
        429,
        Code.RATE_LIMITED,
        "the key guest allows 2 requests at one time, and as many are open; retry when one has ended",
        "1",
    )
    used.end(first, NOON)
    assert used.refusal(CHAT, 0.0, NOON) is None
    assert (used.counts.requests, used.counts.refused) == (4, 1)


def test_what_is_refused_takes_no_request_of_the_minute() -> None:
    used = use(per_minute=1, scopes=("chat",))
    for _ in range(3):
        assert refused(used.refusal("load", 0.0, NOON))[0] == 403
    assert used.refusal(CHAT, 0.0, NOON) is None
    assert refused(used.refusal(CHAT, 0.0, NOON))[2] == (
        "the key guest allows 1 request a minute; retry in 60 s"
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens_per_minute": -1}, "--tokens-per-minute -1: a key has from 1 to"),
        ({"concurrent": 10**7}, "--concurrent 10000000: a key has from 1 to 1000000 requests at one time"),
        ({"scopes": ("chat", "root")}, "--scope root: the scopes are chat, on-request, load, metrics"),
        ({"scopes": ("chat", "chat")}, "--scope: name each scope once"),
        ({"scopes": ()}, "--scope: name each scope once"),
        ({"models": ("",)}, "--model '': a model has a name"),
        ({"models": ("x",) * 65}, "--model: a key has at most 64 models"),
        ({}, ""),
    ],
)
def test_what_no_key_can_have(fields: dict[str, Any], words: str) -> None:
    assert key(**fields).problem.startswith(words)
    assert bool(key(**fields).problem) is bool(words)


def test_a_full_bucket_lets_a_minutes_worth_through_at_once() -> None:
    bucket = TokenBucket(3, 100.0)
    assert [bucket.take(100.0) for _ in range(3)] == [0.0] * 3
    assert bucket.take(100.0) == pytest.approx(20.0)
    assert bucket.take(105.0) == pytest.approx(15.0)  # asking in vain costs nothing
    assert bucket.take(120.0) == 0.0
    assert bucket.take(120.0) == pytest.approx(20.0)


def test_rest_fills_it_to_the_brim_and_not_beyond() -> None:
    bucket = TokenBucket(2, 0.0)
    assert [bucket.take(0.0), bucket.take(0.0)] == [0.0, 0.0]
    assert [bucket.take(1e6), bucket.take(1e6)] == [0.0, 0.0]
    assert bucket.take(1e6) > 0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(1, 50.0)
    assert bucket.take(50.0) == 0.0
    assert bucket.take(40.0) == pytest.approx(60.0)
    assert bucket.take(50.0) == pytest.approx(60.0)


@given(
    per_minute=st.integers(1, 1_000_000),
    steps=st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=60),
)
def test_no_client_gets_more_than_a_full_bucket_and_what_flows_in(
    per_minute: int, steps: list[float]
) -> None:
    bucket, now, passed = TokenBucket(per_minute, 0.0), 0.0, 0
    for step in steps:
        now += step
        passed += bucket.take(now) == 0.0
    assert passed <= per_minute + now * per_minute / 60 + 1e-6


@given(per_minute=st.integers(1, 1_000_000), at=st.floats(0, 1e9, allow_nan=False))
def test_who_comes_again_when_told_gets_through(per_minute: int, at: float) -> None:
    bucket = TokenBucket(per_minute, at)
    wait_s = 0.0
    for _ in range(per_minute if per_minute < 100 else 0):
        assert bucket.take(at) == 0.0
    if per_minute < 100:
        wait_s = bucket.take(at)
        assert 0 < wait_s <= 60 / per_minute * (1 + 1e-6)
    assert bucket.take(at + math.ceil(wait_s)) == 0.0


def loaded(name: str, *aliases: str) -> ModelInfo:
    return ModelInfo(name, aliases, Path(), 100, 1, (), 10)


LLAMA = "mlx-community/Llama-3.2-1B-Instruct-4bit"
LOADED = (loaded("org/big", "big", "default"), loaded("org/tiny", "tiny"))


@pytest.mark.parametrize(
    ("models", "name", "found"),
    [
        ((), "org/big", "org/big"),
        ((), None, None),
        (("org/tiny",), "org/tiny", "org/tiny"),
        (("org/tiny",), "tiny", "org/tiny"),
        (("tiny",), "org/tiny", "org/tiny"),
        (("org/tiny",), None, "org/tiny"),
        (("org/tiny",), "default", "org/tiny"),
        (("org/other", "org/tiny"), "default", "org/tiny"),
        (("org/other",), "default", "org/other"),
        (("org/other",), "org/other", "org/other"),
        (("org/tiny",), "org/big", None),
        (("org/tiny",), "big", None),
        (("org/tiny",), "org/unheard-of", None),
        ((LLAMA,), "llama3.2:1b", LLAMA),
        ((LLAMA,), "llama3.2:3b", None),
    ],
)
def test_a_key_for_some_models_reaches_these_alone(
    models: tuple[str, ...], name: str | None, found: str | None
) -> None:
    """Nor does a missing name, which means the first that is loaded, mean another one."""
    asked = RequestContext("id", 0.0)
    asked.key, asked.models = "guest", models
    if models and found is None:
        with pytest.raises(
            RequestError, match=f"the key guest is not for .*; it is for {models[0]}"
        ) as error:
            permitted_name(name, LOADED, asked)
        assert (error.value.status, error.value.code) == (403, Code.NOT_PERMITTED)
    else:
        assert permitted_name(name, LOADED, asked) == found
    assert ON_REQUEST in key().scopes
