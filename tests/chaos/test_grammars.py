"""The process in which grammars are tried dies."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..live_cluster import SLOWNESS
from .answers import SHORT
from .harness import FaultyCluster, alive, assert_sound, before, kill


def regex(pattern: str) -> dict[str, Any]:
    return {"response_format": {"type": "regex", "pattern": pattern}}


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
    with ThreadPoolExecutor() as background:
        guided = background.submit(cluster.post, SHORT, **regex("[A-Z]{4,6}"))
        cluster.wait_note("trial", count=2)
        assert cluster.content(SHORT) == cluster.right(SHORT)
        kill(pid)
        refused = guided.result(60 * SLOWNESS)
    assert refused.status_code in (400, 500), refused.text
    assert "cannot be used" in refused.json()["error"]["message"]
    assert not alive(pid)
    assert 4 <= len(cluster.content(SHORT, **regex("[A-Z]{4,6}"))) <= 6
    assert helper(cluster) != pid
    assert cluster.epoch == was.epoch
    assert_sound(cluster, was)
