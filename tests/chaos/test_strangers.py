"""Processes that do not belong to the cluster reach its ports first."""

from __future__ import annotations

import pytest

from mlxtp.errors import Code

from .harness import NOTICED_S, FaultyCluster, assert_recovered, assert_sound, before, kill

HANDSHAKE_S = 3.0
"""Seconds that a connection has to introduce itself; production has no setting for it."""


def test_strangers_at_the_decode_port_are_turned_away(cluster: FaultyCluster) -> None:
    """All before rank 1 comes; the epoch forms all the same, and none of them got its key."""
    was = before(cluster)
    cluster.order("strangers_first", 1, epoch=was.epoch + 1)
    kill(was.pids[1])
    strangers = cluster.wait_note("stranger", count=5)
    assert cluster.wait_end(was.epoch, 0) is not None
    cluster.wait_ready()
    assert cluster.epoch == was.epoch + 1
    took_s = {note["who"]: note["seconds"] for note in strangers}
    print(took_s)
    assert all(note["answer"] == "" for note in strangers)
    assert took_s.pop("silent") <= HANDSHAKE_S + NOTICED_S
    assert max(took_s.values()) <= NOTICED_S
    assert_sound(cluster, was)


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["garbage", "silent"])
def test_a_stranger_at_the_ring_port(cluster: FaultyCluster, how: str) -> None:
    """MLX takes any caller for its peer; the group does not pass, and the next one does."""
    was = before(cluster)
    cluster.order("ring_stranger", 1, epoch=was.epoch + 1, how=how)
    kill(was.pids[1])
    form_s = cluster.settings.limits.form_s
    assert_recovered(
        cluster,
        was,
        {Code.FORM_FAILED, Code.PROOF_FAILED, Code.LINK_TIMEOUT},
        f"{how} stranger at the ring port",
        epochs=2,
        within_s=2 * form_s + NOTICED_S,
    )
