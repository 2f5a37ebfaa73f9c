"""The process in which grammars are tried dies, stands still, or is left alone."""

from __future__ import annotations

import signal
import threading
from typing import Any

import httpx
import pytest

from mlxtp.engine.grammar import DEADLINE_S

from ..live_cluster import SLOWNESS, until
from .answers import SHORT
from .harness import FaultyCluster, alive, assert_recovered, assert_sound, before, kill
from .test_deaths import LOST

SLOW = {"type": "integer", "multipleOf": 999983}
"""Takes some ten seconds to compile; nothing but a deadline stops it."""


def regex(pattern: str) -> dict[str, Any]:
    return {"response_format": {"type": "regex", "pattern": pattern}}


class Guided:
    """A guided request in the background."""

    def __init__(self, cluster: FaultyCluster, **fields: Any) -> None:
        self._responses: list[httpx.Response] = []
        self._thread = threading.Thread(target=lambda: self._responses.append(cluster.post(SHORT, **fields)))
        self._thread.start()

    def response(self) -> httpx.Response:
        self._thread.join(60 * SLOWNESS)
        assert self._responses, "the request hangs"
        return self._responses[0]


def helper(cluster: FaultyCluster) -> int:
    """The pid of the process that is trying a grammar now."""
    return int(cluster.wait_note("trial")[-1]["pid"])


def test_the_helper_is_killed_while_it_compiles(cluster: FaultyCluster) -> None:
    """Its request fails; others go on meanwhile, and the same grammar can be asked for again."""
    cluster.right(SHORT)
    was = before(cluster)
    cluster.order("record", 0)
    assert cluster.content(SHORT, **regex("[A-Z]{3,5}")).isupper()
    pid = helper(cluster)
    kill(pid, signal.SIGSTOP)
    guided = Guided(cluster, **regex("[A-Z]{4,6}"))
    cluster.wait_note("trial", count=2)
    assert cluster.content(SHORT) == cluster.right(SHORT)
    kill(pid)
    refused = guided.response()
    assert refused.status_code in (400, 500), refused.text
    assert "cannot be used" in refused.json()["error"]["message"]
    assert not alive(pid)
    assert 4 <= len(cluster.content(SHORT, **regex("[A-Z]{4,6}"))) <= 6
    assert helper(cluster) != pid
    assert cluster.epoch == was.epoch
    assert_sound(cluster, was)


@pytest.mark.chaos
def test_rank_0_is_killed_while_a_grammar_is_compiled(cluster: FaultyCluster) -> None:
    """The helper outlives it by its own deadline at most. The next rank 0 finds the grammar as slow."""
    cluster.right(SHORT)
    was = before(cluster)
    cluster.order("record", 0)
    guided = Guided(cluster, response_format={"type": "json_object", "schema": SLOW})
    pid = helper(cluster)
    at = kill(was.pids[0])
    refused = guided.response()
    assert (refused.status_code, "cannot be used" in refused.text) == (400, True), refused.text
    assert_recovered(cluster, was, LOST, "killed in a compile", since=at)
    until(lambda: not alive(pid), "the helper is gone", DEADLINE_S + 10 * SLOWNESS)


@pytest.mark.chaos
def test_a_model_is_taken_away_while_a_grammar_is_compiled(cluster: FaultyCluster) -> None:
    was = before(cluster)
    cluster.order("record", 0)
    guided = Guided(cluster, response_format={"type": "json_object", "schema": SLOW})
    pid = helper(cluster)
    cluster.unload()
    assert guided.response().json()["error"]["code"] == "shutting_down"
    until(lambda: not alive(pid), "the helper is gone", DEADLINE_S + 10 * SLOWNESS)
    cluster.load("tiny")
    assert cluster.content(SHORT, **regex("[A-Z]{3,5}")).isupper()
    assert cluster.epoch == was.epoch
