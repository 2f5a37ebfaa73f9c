from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from mlxtp.api.dialects import responses_request
from mlxtp.api.dialects.responses_request import ResponseStore
from mlxtp.errors import Code, RequestError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def item(id_: str, text: Any = "") -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{id_}", "text": text}


def put(store: ResponseStore, id_: str, given: Any) -> None:
    store.put("", id_, json.dumps([item("in", given)]).encode(), [item(id_)])


def known(store: ResponseStore, *ids: str) -> list[str]:
    return [id_ for id_ in ids if store.output("", id_)]


def test_what_is_put_is_found_by_its_client_with_all_that_went_before_it() -> None:
    store = ResponseStore()
    put(store, "a", "hello")
    assert store.items("", "a") == [item("in", "hello"), item("a")]
    assert (store.output("", "a"), store.output("phone", "a")) == ([item("a")], [])
    with pytest.raises(RequestError):
        store.items("phone", "a")


def test_the_oldest_makes_room() -> None:
    store = ResponseStore(most=2)
    for id_ in "abc":
        put(store, id_, "x")
    assert known(store, "a", "b", "c") == ["b", "c"]
    assert store.output("", "a") == []
    assert store.output("", "b") == [item("b")]


def test_size_counts_and_is_given_back() -> None:
    store = ResponseStore()
    put(store, "a", "x" * 1000)
    one = store.size
    assert one > 1000
    put(store, "b", "x" * 5000)
    assert store.size == 2 * one + 4000

    small = ResponseStore(most_bytes=2 * one)
    for id_ in "abc":
        put(small, id_, "x" * 1000)
    assert known(small, "a", "b", "c") == ["b", "c"]
    assert small.size == 2 * one
    put(small, "d", "x" * 2 * one)
    assert known(small, "b", "c", "d") == ["b", "c"]  # one that is too large displaces no other


def test_a_stored_answer_takes_at_most_the_counted_memory() -> None:
    """Of nothing but brackets, Python's objects are twenty times as large as their JSON."""
    store = ResponseStore()
    odd = json.dumps([[] for _ in range(50_000)])
    tracemalloc.start()
    try:
        put(store, "a", json.loads(odd))
        taken = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    # other tests' servers may still allocate in their threads
    files = (__file__, responses_request.__file__, json.decoder.__file__, json.encoder.__file__)
    traces = taken.filter_traces([tracemalloc.Filter(True, file) for file in files])
    kept = sum(each.size for each in traces.statistics("filename"))
    assert len(odd) < kept < 1.2 * store.size


def test_an_answer_is_kept_for_a_time() -> None:
    clock = Clock()
    store = ResponseStore(age_s=7200, clock=clock)
    put(store, "a", "x")
    clock.now += 3600
    put(store, "b", "x")
    clock.now += 3599
    assert known(store, "a", "b") == ["a", "b"]
    clock.now += 1
    assert known(store, "a", "b") == ["b"]
    clock.now += 3600
    assert known(store, "a", "b") == []
    assert store.size == 0


def test_the_refusal_of_an_unknown_answer_says_how_long_answers_are_kept() -> None:
    store = ResponseStore(most=3, most_bytes=64 << 20, age_s=5400)
    with pytest.raises(RequestError) as caught:
        store.items("", "x")
    assert (caught.value.status, caught.value.code) == (404, Code.NOT_FOUND)
    assert caught.value.param == "previous_response_id"
    for word in ('"x"', "1.5 hours", "3 of them", "64 MiB", "store false"):
        assert word in caught.value.detail
