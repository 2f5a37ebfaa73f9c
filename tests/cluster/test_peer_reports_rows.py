"""The table of what each node reports of itself: who may write it, when it is sent, and when rows go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.cluster.links import ReportTable
from mlxtp.errors import LocalProtocolError
from mlxtp.gateway.routing import GroupLoad
from mlxtp.groups.overview import ReplicaLoad, ReplicaLoads
from mlxtp.wire.cluster_messages import (
    Beat,
    Machine,
    ModelLender,
    ModelStatus,
    Report,
    ReportsSent,
    StoredModel,
)
from mlxtp.wire.codecs import NUMBERED, NodeRow, holding, integer, text
from mlxtp.wire.frames import encode

from ..groups.one_node import CLOCK, MACHINE, A, B, FakeLink, Node, play
from ..played import scenes

played = scenes(play, "tmp_path", "member")


class Mood(NodeRow, number=0x7E):
    """A fact that is new: this class and the three calls below are all of it."""

    KEYS = ("of_whom",)
    MOST = 3
    of_whom: str = holding(text(9))
    degree: int = holding(integer(0, 9), default=0)


NUMBERED.pop(Mood.TYPE)  # for other tests there is none


@pytest.fixture(autouse=True)
def _there_is_such_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NUMBERED, Mood.TYPE, Mood)


def table(node: Node) -> ReportTable:
    return node.parts.node.links.reports


def told(link: FakeLink) -> list[tuple[Mood, bool]]:
    """The moods that went over a link, each with whether it is over."""
    reports = [each for each in link.sent if isinstance(each, Report)]
    return [(each.row, each.over) for each in reports if isinstance(each.row, Mood)]


@played()
async def test_a_row_is_sent_when_it_changes_and_to_who_comes(node: Node) -> None:
    a = node.meet(A)
    table(node).publish(Mood, Mood("cat"), Mood("dog"))
    table(node).publish(Mood, Mood("cat"), Mood("dog"))
    assert told(a) == [(Mood("cat"), False), (Mood("dog"), False)]
    table(node).publish(Mood, Mood("cat", 2))
    assert told(a)[2:] == [(Mood("dog"), True), (Mood("cat", 2), False)]
    b = node.meet(B)
    assert told(b) == [(Mood("cat", 2), False)]
    assert isinstance(b.sent[-1], Beat), "who has it has all rows"


@played()
async def test_rows_are_of_the_node_whose_link_they_came_over(node: Node) -> None:
    heard: list[tuple[str, Mood]] = []
    table(node).on(lambda node_id, mood: heard.append((node_id, mood)), Mood)
    a, b = node.meet(A), node.meet(B)
    node.hear(a, Mood("cat", 1), Mood("dog"))
    node.hear(b, Mood("cat", 2))
    table(node).publish(Mood, Mood("cat", 3))
    own = node.parts.node.node_id
    assert table(node).of(Mood, "cat") == {A: Mood("cat", 1), B: Mood("cat", 2), own: Mood("cat", 3)}
    assert table(node).others(Mood) == [(A, Mood("cat", 1)), (A, Mood("dog")), (B, Mood("cat", 2))] == heard
    node.hear(a, Report(100, Mood("cat"), True))
    assert table(node).of(Mood, "cat").keys() == {B, own}, "it ends none but its own"
    assert len(heard) == 3


@played()
async def test_rows_go_with_the_last_link_and_some_with_the_membership(node: Node) -> None:
    links = [node.meet(A), node.meet(A)]
    node.hear(links[0], Mood("cat"), MACHINE)
    links[0].close()
    assert table(node).of(Mood, "cat").keys() == {A}
    links[1].close()
    assert table(node).of(Mood, "cat") == {}
    assert table(node).of(Machine)[A] == MACHINE, "a suspect may be back in a moment"
    node.parts.node.enrolment.remove(A)
    assert A not in table(node).of(Machine)


@played()
async def test_no_row_of_an_earlier_start_counts(node: Node) -> None:
    before = node.meet(A, "before")
    node.hear(before, Mood("cat"), Mood("dog"), MACHINE)
    after = node.meet(A, "after")
    assert (table(node).others(Mood), A in table(node).of(Machine)) == ([], False)
    node.hear(before, Mood("cat", 1))
    node.parts.node.links.received(cast(Any, after), Report(1, Mood("dog", 2), False))
    assert table(node).others(Mood) == [(A, Mood("dog", 2))], "its numbers begin again"


@played()
async def test_a_row_that_a_part_refuses_costs_its_link_and_does_not_count(node: Node) -> None:
    links = [node.meet(A), node.meet(A)]
    node.hear(links[0], ModelStatus("tiny", "5" * 64, "", shape=b"made up"))
    assert [each.number in node.parts.node.links._links for each in links] == [False, True]
    assert A not in table(node).of(ModelStatus, "tiny")


@played()
async def test_what_a_link_lost_comes_over_the_one_that_is_left(node: Node) -> None:
    first, second = node.meet(A), node.meet(A)
    table(node).publish(Mood, Mood("cat"))
    chosen = node.parts.node.links.to(A)
    lost, left = (first, second) if cast(Any, chosen) is first else (second, first)
    assert (told(lost), told(left)) == ([(Mood("cat"), False)], [])
    lost.close()
    assert told(left) == [(Mood("cat"), False)]


@played()
async def test_a_row_that_was_over_on_a_link_that_is_lost_goes_with_the_next_rows(node: Node) -> None:
    """Of two links, whichever is faster."""
    one, other = node.meet(A), node.meet(A)
    node.hear(one, Report(2, Mood("cat"), False), Report(3, Mood("dog"), False), ReportsSent(1))
    node.hear(other, Report(6, Mood("cat", 1), False), ReportsSent(5))
    assert table(node).by(A, Mood) == [Mood("cat", 1)]
    node.hear(one, Report(4, Mood("dog"), False), ReportsSent(1))
    assert table(node).by(A, Mood) == [Mood("cat", 1)], "that came late"
    node.hear(one, Report(9, Mood("cat", 2), False))
    node.hear(other, Report(8, Mood("cow"), False), ReportsSent(7))
    assert table(node).by(A, Mood) == [Mood("cat", 2), Mood("cow")]
    node.hear(one, Report(10, Mood("cow"), True))
    node.hear(other, Report(9, Mood("cow", 3), False))
    assert table(node).by(A, Mood) == [Mood("cat", 2)]


@played()
async def test_of_two_links_the_later_report_holds(node: Node) -> None:
    slow, fast = cast(Any, node.meet(A)), cast(Any, node.meet(A))
    links = node.parts.node.links
    for link, number, degree in ((slow, 1, 1), (fast, 5, 5), (slow, 2, 2), (fast, 6, 6)):
        links.received(link, Report(number, Mood("cat", degree), False))
        assert table(node).others(Mood) == [(A, Mood("cat", 5 if degree == 2 else degree))]


@played()
async def test_rows_of_a_kind_are_bounded_and_the_newest_stay(node: Node) -> None:
    a = node.meet(A)
    node.hear(a, *(Mood(f"m{n}") for n in range(3)), Mood("m0", 1), *(Mood(f"m{n}") for n in (3, 4)))
    assert [each.of_whom for _, each in table(node).others(Mood)] == ["m0", "m3", "m4"]
    table(node).publish(Mood, *(Mood(f"m{n}") for n in range(9)))
    assert [each.of_whom for each, _ in told(a)] == ["m6", "m7", "m8"]


@pytest.mark.parametrize("row", [MACHINE, ModelStatus("tiny", "5" * 64, "")], ids=["machine", "model"])
@played()
async def test_who_decides_by_a_row_does_so_at_once(node: Node, row: NodeRow) -> None:
    a, wake = node.meet(A), node.parts.node.rounds._wake
    wake.clear()
    node.hear(a, row)
    assert wake.is_set()


@played()
async def test_a_model_is_on_the_disk_of_who_reports_it(node: Node) -> None:
    a, stored = node.meet(A), node.parts.transfers.stored
    node.meet(B)
    node.hear(a, StoredModel("o/n", "c" * 40, 1, True), StoredModel("o/m", "d" * 40, 1, False))
    assert [stored.has(each, "o/n") for each in (A, B)] == [True, False]
    assert stored.has(A, "o/n@" + "c" * 40)
    assert not stored.has(A, "o/m")


@played()
async def test_the_coordinator_alone_names_who_lends_a_model(node: Node) -> None:
    a, b, leadership = node.meet(A), node.meet(B), node.parts.node.leadership
    node.follow(a)
    job = node.parts.transfers.table.of("o/n")

    def lender(link: FakeLink, node_id: str) -> str | None:
        node.hear(link, ModelLender("o/n", node_id))
        node.parts.transfers._election.decide(job)
        return job.lender

    assert lender(b, B) is None
    assert lender(a, "e" * 32) is None, "that Mac is not here"
    assert lender(a, B) == B
    assert a.heard(ModelLender) == []
    leadership._follow(leadership._next_claim(node.parts.node.node_id), CLOCK.now)
    node.tick()
    assert a.heard(ModelLender) == [ModelLender("o/n", B)]
    node.follow(a, 99)
    node.tick()
    assert a.ended(ModelLender) == [ModelLender("o/n", B)]


class Ready(dict[str, Any]):
    def load_of(self, _name: str) -> GroupLoad:
        return GroupLoad(queued=9)


@played()
async def test_work_is_reported_where_gateways_have_a_choice(node: Node) -> None:
    a, several = node.meet(A), [0, 1]
    ready = Ready({"tiny#0": SimpleNamespace(here=True), "tiny#1": SimpleNamespace(here=False)})
    by_name = {"tiny": SimpleNamespace(groups=ready)}
    gateway: Any = SimpleNamespace(
        deployments=SimpleNamespace(by_name=by_name), admission=SimpleNamespace(short=False)
    )
    groups: Any = SimpleNamespace(replicas_of=lambda _deployment: several)
    loads = ReplicaLoads(node.parts.node, gateway, groups)
    for _ in range(2):
        loads._report()
    assert [(each.group, each.queued) for each in a.heard(ReplicaLoad)] == [("tiny#0", 9)]
    several.pop()
    loads._report()
    assert a.sent[-1] == Report(a.sent[-1].number, ReplicaLoad("tiny#0", 9, 0, 0, b""), True)  # type: ignore[attr-defined]


@pytest.mark.parametrize("body", [{"": 0x7D}, {"": 0x31}, {"": [], "of_whom": "cat", "degree": 0}, {}, 3])
def test_what_is_no_row_is_refused(body: object) -> None:
    with pytest.raises(ValueError, match="row: expected a row of a known kind"):
        Report.CODEC.from_wire({"number": 1, "row": body, "over": False})


def test_a_row_that_breaks_its_limits_is_sent_to_nobody() -> None:
    with pytest.raises(LocalProtocolError, match=r"row\.degree: expected an integer from 0 to 9"):
        encode(Report(1, Mood("cat", 10), False), 0, 0)
    models = [StoredModel("o/n", "c" * 40, 1, True), StoredModel("o/n", "d" * 40, 1, True)]
    assert len({each.about for each in models}) == 2
