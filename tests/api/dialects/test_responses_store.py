from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from mlxtp.api.dialects.responses_store import ResponseStore, encoded
from mlxtp.errors import Code, RequestError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def answer(id_: str, said: str = "") -> dict[str, Any]:
    return {"id": id_, "output": [{"type": "message", "id": f"msg_{id_}", "said": said}]}


def asked(said: str) -> list[dict[str, Any]]:
    return [{"type": "message", "id": "msg_in", "said": said}]


def put(store: ResponseStore, body: dict[str, Any], input_: list[dict[str, Any]]) -> None:
    store.put(body, json.dumps(input_).encode())


def known(store: ResponseStore, *ids: str) -> list[str]:
    found = []
    for id_ in ids:
        try:
            store.get(id_)
        except RequestError:
            continue
        store.item(f"msg_{id_}", "input[0]")
        found.append(id_)
    return found


def test_what_is_put_is_found_with_all_that_went_before_it() -> None:
    store = ResponseStore()
    put(store, answer("a", "one"), asked("hello"))
    kept = store.get("a")
    assert json.loads(kept.body) == answer("a", "one")
    assert kept.items() == [*asked("hello"), *answer("a", "one")["output"]]
    assert store.item("msg_a", "input[0].id") == answer("a", "one")["output"][0]


def test_the_oldest_makes_room() -> None:
    store = ResponseStore(most=2)
    for id_ in "abc":
        put(store, answer(id_), asked("x"))
    assert known(store, "a", "b", "c") == ["b", "c"]


def test_size_counts_and_is_given_back() -> None:
    store = ResponseStore()
    put(store, answer("a"), asked("x" * 1000))
    one = store.size
    assert one > 1000
    put(store, answer("b"), asked("x" * 5000))
    assert store.size == 2 * one + 4000
    store.delete("b")
    assert store.size == one
    store.delete("a")
    assert store.size == 0

    small = ResponseStore(most_bytes=2 * one)
    for id_ in "abc":
        put(small, answer(id_), asked("x" * 1000))
    assert known(small, "a", "b", "c") == ["b", "c"]
    put(small, answer("d"), asked("x" * 2 * one))
    assert known(small, "b", "c", "d") == ["b", "c"]  # one that is too large takes nobody's place


def test_what_is_kept_takes_no_more_memory_than_is_counted() -> None:
    """Of nothing but brackets, Python's objects are twenty times as large as their JSON."""
    store = ResponseStore()
    odd = json.dumps([[] for _ in range(50_000)])
    tracemalloc.start()
    try:
        body = answer("a") | {"tools": [{"parameters": json.loads(odd)}]}
        put(store, body, [{"type": "message", "id": "msg_in", "said": json.loads(odd)}])
        del body
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(odd) < kept < 1.2 * store.size


def test_an_item_that_is_named_often_is_encoded_once_and_counted_each_time() -> None:
    item = {"type": "message", "id": "msg_a", "said": "x" * 1000}
    found = encoded([item] * 3, 4000)
    assert found is not None
    assert json.loads(found) == [item] * 3
    assert encoded([item] * 4, 4000) is None


def test_an_answer_is_kept_for_a_time() -> None:
    clock = Clock()
    store = ResponseStore(age_s=7200, clock=clock)
    put(store, answer("a"), asked("x"))
    clock.now += 3600
    put(store, answer("b"), asked("x"))
    clock.now += 3599
    assert known(store, "a", "b") == ["a", "b"]
    clock.now += 1
    assert known(store, "a", "b") == ["b"]
    clock.now += 3600
    assert known(store, "a", "b") == []
    assert store.size == 0


def test_who_looks_for_what_is_gone_hears_how_long_answers_are_kept() -> None:
    store = ResponseStore(most=3, most_bytes=500, age_s=5400)
    for look in (
        lambda: store.get("x", "previous_response_id"),
        lambda: store.item("x", "previous_response_id"),
        lambda: store.delete("x"),
    ):
        with pytest.raises(RequestError) as caught:
            look()
        assert (caught.value.status, caught.value.code) == (404, Code.NOT_FOUND)
        for word in ('"x"', "1.5 hours", "3 of them", "500 bytes", "store false"):
            assert word in caught.value.detail
