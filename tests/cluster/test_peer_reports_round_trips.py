"""Latency of messages to another agent: measured here, and reported by the others of their links."""

from __future__ import annotations

from mlxtp.cluster.peer_reports import RoundTripTimes
from mlxtp.wire.cluster_messages import Echo, RoundTrip

from ..groups.one_node import A, B, Node, play
from ..played import scenes

played = scenes(play, "tmp_path", "member")


@played()
async def test_the_best_trip_of_the_last_counts_and_is_told(node: Node) -> None:
    a, b = node.meet(A), node.meet(B)
    echoes: RoundTripTimes = node.parts.round_trips
    for at, took in ((10.0, 0.004), (12.0, 0.0005), (14.0, 0.9)):
        echoes.measure(at)
        question = a.heard(Echo)[-1]
        assert not question.answer
        echoes.received(a, Echo(question.asked_us, True), at + took)  # type: ignore[arg-type]
    assert echoes.between(node.parts.node.node_id, A) == echoes.between(A, node.parts.node.node_id) == 500
    assert echoes.between(node.parts.node.node_id, B) is None
    echoes.report()
    assert b.heard(RoundTrip)[-1] == RoundTrip(A, 500)
    for late in range(20):  # it takes longer now
        echoes.measure(20.0 + late)
        echoes.received(a, Echo(a.heard(Echo)[-1].asked_us, True), 20.0 + late + 0.002)  # type: ignore[arg-type]
    assert echoes.between(node.parts.node.node_id, A) == 2000


@played()
async def test_a_question_is_answered_at_once_and_no_other_answer_counts(node: Node) -> None:
    a, b = node.meet(A), node.meet(B)
    here, echoes = node.parts.node.node_id, node.parts.round_trips
    node.hear(a, Echo(77, False), RoundTrip(B, 180))
    assert a.heard(Echo) == [Echo(77, True)]
    assert echoes.between(A, B) == echoes.between(B, A) == 180
    echoes.measure(10.0)
    asked_us = a.heard(Echo)[-1].asked_us
    node.hear(b, Echo(1, True))  # not asked for
    assert echoes.between(here, B) is None
    for answered_at in (10.003, 10.0):  # the second is one too many
        echoes.received(a, Echo(asked_us, True), answered_at)  # type: ignore[arg-type]
    assert echoes.between(here, A) == 3000
    a.close()
    echoes.measure(12.0)
    assert echoes.between(A, B) is None
    assert echoes.between(here, A) is None
