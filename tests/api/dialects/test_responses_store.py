from __future__ import annotations

import contextlib
import json
import tracemalloc
from typing import Any

import pytest

from mlxtp.api import adapter
from mlxtp.api.dialects import responses_store
from mlxtp.api.dialects.responses_store import MOST_RUNNING, ResponseStore
from mlxtp.errors import Code, RequestError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def item(id_: str, text: Any = "") -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{id_}", "text": text}


def put(store: ResponseStore, id_: str, given: Any) -> None:
    store.put("", id_, json.dumps([item("in", given)]).encode(), body(item(id_)))


def body(*output: Any) -> dict[str, Any]:
    return {"status": "completed", "output": output}


def known(store: ResponseStore, *ids: str, client: str = "") -> list[str]:
    found = []
    for id_ in ids:
        with contextlib.suppress(RequestError):
            found.append(store.find(client, id_).id)
    return found


def test_what_is_put_is_found_by_its_client_with_all_that_went_before_it() -> None:
    store = ResponseStore()
    put(store, "a", "hello")
    assert store.items("", "a") == [item("in", "hello"), item("a")]
    assert known(store, "a", client="phone") == []
    with pytest.raises(RequestError):
        store.items("phone", "a")


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
    modules = (responses_store, adapter, json.decoder, json.encoder)
    files = (__file__, *[str(each.__file__) for each in modules])
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


def test_a_client_with_much_makes_room_for_others_and_what_runs_goes_last() -> None:
    """One client's responses displace none of a client that has less."""
    cancelled: list[str] = []
    store = ResponseStore(most=4)
    put(store, "mine", "x")
    running = store.start("phone", "run", b"[]", body(), events=True)
    running.cancel = lambda: cancelled.append("run")
    for id_ in "abc":
        store.put("phone", id_, b"[]", body())
    assert known(store, "mine") == ["mine"]
    assert known(store, "run", "a", "b", "c", client="phone") == ["run", "b", "c"]
    small = ResponseStore(most_bytes=3000)
    put(small, "mine", "x" * 500)
    running = small.start("phone", "run", b"[]", body(), events=True)
    running.cancel = lambda: cancelled.append("small")
    small.record(running, [b"x" * 900])
    assert (known(small, "mine"), known(small, "run", client="phone"), cancelled) == (["mine"], [], ["small"])
    small.record(running, [b"x" * 900], body())
    small.delete("", "mine")
    assert small.size == 0


def test_a_client_has_so_many_background_responses_and_no_more() -> None:
    store = ResponseStore()
    begun = [store.start("phone", f"r{i}", b"[]", body(), events=False) for i in range(MOST_RUNNING)]
    with pytest.raises(RequestError, match=f"{MOST_RUNNING} background responses") as told:
        store.start("phone", "more", b"[]", body(), events=False)
    assert (told.value.status, told.value.code) == (429, Code.OVERLOADED)
    store.start("laptop", "other", b"[]", body(), events=False)
    begun[3].cancel = None
    store.start("phone", "more", b"[]", body(), events=False)


def test_a_reader_holds_no_events_that_are_no_longer_counted() -> None:
    store = ResponseStore()
    kept = store.start("phone", "id", b"[]", body(), events=True)
    store.record(kept, [b"event"])
    kept.cancel = None
    store.delete("phone", "id")
    assert (kept.events, store.size) == ([], 0)


def test_what_only_a_socket_may_continue() -> None:
    store = ResponseStore()
    for id_ in ("first", "second"):
        store.put("phone", id_, b"[]", body(item(id_)), socket="s1")
    assert store.items("phone", "second", "s1") == [item("second")]
    for client, id_, socket in (
        ("phone", "second", ""), ("phone", "second", "s2"), ("", "second", "s1"),
        ("phone", "first", "s1"), ("phone", "s1", "s1"), ("phone", "s1", ""),
    ):  # fmt: skip
        with pytest.raises(RequestError):
            store.find(client, id_, socket=socket)
    store.delete("phone", "s1")
    assert store.size == 0
