"""The table of deployments: no row is lost, in any order of edits and meetings."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.cluster.cluster_state import (
    KEEP_S,
    LONGEST_S,
    MAX_LIVE,
    MAX_REMOVED,
    MOST_LIVE,
    MOST_REMOVED,
    NO_DEPLOYMENTS,
    PINNED,
    YIELDS,
    DeploymentTable,
    name_of,
    received,
)
from mlxtp.errors import RemoteProtocolError, UserError
from mlxtp.wire.cluster_messages import Deployment
from mlxtp.wire.frames import encode


def deployed(*names: str, writer: str = "a", keep_s: int = PINNED) -> DeploymentTable:
    table = NO_DEPLOYMENTS
    for name in names:
        table = table.setting(Deployment(name, name, keep_s=keep_s), writer)
    return table


def names(table: DeploymentTable) -> list[str]:
    return [row.name for row in table.live()]


def joined(*tables: DeploymentTable) -> DeploymentTable:
    whole = NO_DEPLOYMENTS
    for table in tables:
        whole = whole.merged(table)
    return whole


def test_a_pinned_deployment_that_is_changed_keeps_its_place_and_so_stays_the_default() -> None:
    table = (
        deployed("k", "l", "m").setting(Deployment("k", "k", 2), "b").setting(Deployment("k", "k", 3), "a")
    )
    assert names(table) == ["k", "l", "m"]
    assert names(received(table.rows, table.floor)) == ["k", "l", "m"]
    assert names(table.removing("a", "k").setting(Deployment("k", "k"), "a")) == ["l", "m", "k"]


def test_one_that_is_pinned_later_comes_after_those_that_were() -> None:
    table = deployed("k", keep_s=KEEP_S).merged(
        deployed("k", keep_s=KEEP_S).setting(Deployment("l", "l"), "a")
    )
    assert names(table.setting(Deployment("k", "k"), "a")) == ["l", "k"]


_names = st.sampled_from("klmn")
_live = st.builds(
    Deployment,
    name=_names,
    model=st.sampled_from(("m", "m@1")),
    nodes=st.sampled_from(("auto", "2")),
    keep_s=st.sampled_from((PINNED, KEEP_S)),
    version=st.integers(1, 6),
    writer=st.sampled_from("ab"),
    since=st.integers(0, 1),
)
_gone = st.builds(
    Deployment, _names, keep_s=st.just(0), version=st.integers(1, 6), writer=st.sampled_from("ab"),
    removed=st.just(True),
)  # fmt: skip
_tables = st.builds(
    received, st.lists(_live | _gone, max_size=4, unique_by=lambda row: row.name), st.integers(0, 5)
)


@given(_tables, _tables, _tables)
def test_merging_needs_no_order(one: DeploymentTable, two: DeploymentTable, three: DeploymentTable) -> None:
    assert one.merged(two) == two.merged(one)
    assert one.merged(two).merged(three) == one.merged(two.merged(three))
    assert one.merged(one) == one
    assert one.merged(two).merged(two) == one.merged(two)
    assert one.merged(NO_DEPLOYMENTS) == one


class Cluster:
    """Members that edit their tables and meet now and then."""

    def __init__(self) -> None:
        self.tables = {"a": NO_DEPLOYMENTS, "b": NO_DEPLOYMENTS, "c": NO_DEPLOYMENTS}

    def meet(self, one: str, other: str) -> None:
        for sender, receiver in ((one, other), (other, one)):
            parts = self.tables[sender].messages()
            rows = [row for part in parts for row in part.rows]
            self.tables[receiver] = self.tables[receiver].merged(received(rows, parts[-1].floor))


_steps = st.lists(
    st.tuples(
        st.sampled_from(("serve", "keep", "alone", "unload", "meet")),
        st.sampled_from("abc"),
        st.sampled_from("abcd"),
    ),
    max_size=30,
)


@given(_steps)
def test_members_that_have_all_met_hold_the_same_table_with_the_last_edit_of_each_name(
    steps: list[tuple[str, str, str]],
) -> None:
    cluster, edits = Cluster(), set[Deployment]()
    for step, member, what in steps:
        table = cluster.tables[member]
        if step == "meet":
            cluster.meet(member, what if what in cluster.tables else "a")
            continue
        if step == "unload":
            cluster.tables[member] = table.removing(member, what)
        else:
            row = Deployment(what, what, keep_s=KEEP_S if step == "keep" else PINNED)
            cluster.tables[member] = table.setting(row, member, alone=step == "alone")
        edits |= {*cluster.tables[member].rows} - {*table.rows}
    for one, other in ("ab", "bc", "ab"):
        cluster.meet(one, other)
    a, b, c = cluster.tables.values()
    assert a == b == c
    assert a.digest == b.digest == c.digest
    for name in "abcd":
        versions = [row.version for row in edits if row.name == name]
        last = {row for row in edits if row.name == name and row.version == max(versions)}
        assert {row for row in a.rows if row.name == name} <= last
        assert bool(versions) == any(row.name == name for row in a.rows)
    assert a.floor == 0


def test_two_people_who_serve_different_models_at_once_both_get_them() -> None:
    before = deployed("old")
    a = before.setting(Deployment("llama", "llama"), "a")
    b = before.setting(Deployment("qwen", "qwen"), "b")
    assert names(a.merged(b)) == ["old", "llama", "qwen"]
    a, b = (
        before.setting(Deployment("llama", "llama"), "a", alone=True),
        before.setting(Deployment("qwen", "qwen"), "b", alone=True),
    )
    assert names(a.merged(b)) == ["llama", "qwen"]


def test_of_two_changes_of_one_row_the_later_holds_and_of_one_version_the_pinned_one() -> None:
    before = deployed("llama", "qwen")
    late = before.setting(Deployment("x", "x"), "b").setting(Deployment("llama", "llama", nodes="2"), "b")
    removed = before.removing("a", "llama")
    assert (late.merged(removed).get("llama") or NO).nodes == "2"
    assert names(late.removing("b", "llama").merged(removed)) == ["qwen", "x"]
    pinned = before.setting(Deployment("llama", "llama", nodes="3"), "a")
    kept = before.setting(Deployment("llama", "llama", keep_s=9), "b")
    for each in (kept, before.removing("b", "llama")):
        assert each.merged(pinned).get("llama") == pinned.get("llama")


NO = Deployment("")


def test_pinned_ones_come_first_by_age_then_the_others_the_latest_first() -> None:
    table = deployed("z", "y")
    for name in ("k", "l"):
        table = table.setting(Deployment(name, name, keep_s=KEEP_S), "a")
    assert names(table) == ["z", "y", "l", "k"]
    assert [row.pinned for row in table.live()] == [True, True, False, False]
    rest = table.removing("a", "z", "y")
    assert names(rest) == ["l", "k"]
    assert names(rest.removing("b", "k", "l")) == []
    assert rest.removing("b", "k", "l").newest == 6
    assert rest.removing("b", "z", "never deployed") == rest
    assert names(NO_DEPLOYMENTS) == []


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/model@abc", "org/model"), ("tiny", "tiny"), ("/models/a@b", "a@b"), ("~/a@b/", "a@b")],
)
def test_a_revision_belongs_to_the_row_not_to_its_name(model: str, name: str) -> None:
    assert name_of(model) == name


def test_what_was_removed_long_ago_takes_no_row_and_does_not_come_back() -> None:
    long_away = deployed("kept", "gone")
    table = long_away.removing("a", "gone")
    for number in range(3 * MAX_REMOVED):
        table = table.setting(Deployment(f"m{number}", "m"), "a").removing("a", f"m{number}")
        assert len(table.rows) <= MAX_REMOVED + 1
    assert table.floor > 2
    assert names(table) == ["kept"]
    for merged in (table.merged(long_away), long_away.merged(table)):
        assert merged == table
    new = long_away.setting(Deployment("new", "new"), "b")
    assert names(table.merged(new)) == ["kept"], "by now its removal would not be known"
    assert names(table.merged(new.merged(table).setting(Deployment("new", "new"), "b"))) == ["kept", "new"]


@given(st.integers(0, 40), st.integers(0, 40), _tables, _tables)
def test_forgetting_removals_changes_nothing_for_a_member_that_knows_them(
    first: int, second: int, one: DeploymentTable, two: DeploymentTable
) -> None:
    whole = joined(one, two)
    forgetting = whole.merged(DeploymentTable(whole.rows, min(max(first, second), whole.newest)))
    assert forgetting.live() == whole.live()
    assert forgetting.merged(one).live() == forgetting.merged(two).live() == whole.live()


def test_64_deployments_have_room_and_of_more_that_sides_added_apart_the_first_count() -> None:
    full = deployed(*(f"m{number}" for number in range(MAX_LIVE)))
    with pytest.raises(UserError, match="64 models are deployed"):
        full.setting(Deployment("more", "more"), "a")
    assert names(full.setting(Deployment("more", "more"), "a", alone=True)) == ["more"]
    assert (full.setting(Deployment("m3", "m3", nodes="2"), "a").get("m3") or NO).nodes == "2"
    other = deployed(*(f"x{number}" for number in range(MAX_LIVE)), writer="b")
    merged = full.merged(other)
    assert names(merged) == [f"{side}{number}" for number in range(MAX_LIVE // 2) for side in "mx"]
    assert names(merged.removing("a", "m0"))[-1] == f"m{MAX_LIVE // 2}"


@settings(max_examples=6, deadline=None)
@given(st.randoms(use_true_random=False))
def test_members_agree_however_many_rows_one_of_them_invents(draw: random.Random) -> None:
    """No merge fails, no table grows, and all that go on meeting come to hold the same."""

    def invented(side: str) -> DeploymentTable:
        rows = [
            Deployment(
                f"{draw.choice((side, side, 'x'))}{n}", "m", version=draw.randrange(1, 900), writer=side,
                keep_s=draw.choice((PINNED, KEEP_S)), since=draw.choice((0, 0, 1)),
            )
            for n in range(draw.randrange(500))
        ]  # fmt: skip
        rows += [
            Deployment(f"y{n}", keep_s=0, version=n + 1, removed=True) for n in range(draw.randrange(500))
        ]
        return received(rows, draw.choice((0, 0, 300)))

    tables = [invented(side) for side in "abcd"] + [deployed("honest")]
    meetings = [draw.sample(range(5), 2) for _ in range(5)]
    meetings += [pair for _ in range(5) for pair in itertools.combinations(range(5), 2)]
    for one, other in meetings:
        both = tables[one].merged(tables[other])
        assert both == tables[other].merged(tables[one])
        tables[one] = tables[other] = both
        live = sum(not row.removed for row in both.rows)
        assert live <= MOST_LIVE
        assert len(both.rows) - live <= MOST_REMOVED
    assert len({table.digest for table in tables}) == 1


@pytest.mark.parametrize(
    "rows",
    [
        [Deployment("m", "m", version=1), Deployment("m", "m", version=2)],
        [Deployment("", "m", version=1)],
        [Deployment("m", "", version=1)],
        [Deployment("m", "m", version=1, removed=True)],
    ],
)
def test_rows_that_no_member_writes_are_refused(rows: list[Deployment]) -> None:
    with pytest.raises(RemoteProtocolError, match="no table has such a row"):
        received(rows, 0)


def test_a_long_table_travels_in_several_frames() -> None:
    macs = tuple(f"{number:032x}" for number in range(64))
    row = Deployment("", "m" * 1000, 64, "auto", macs, 1 << 31, 1 << 40, "f" * 32, since=1 << 39)
    table = received([replace(row, name=f"{number:04}" + "n" * 996) for number in range(70)], 5)
    messages = table.messages()
    assert [(len(message.rows), message.more) for message in messages] == [(32, True), (32, True), (6, False)]
    assert all(encode(message, 0, 1) for message in messages)
    assert received([row for message in messages for row in message.rows], 5) == table


@pytest.mark.parametrize(
    ("keep_s", "shown"), [(PINNED, None), (YIELDS, None), (LONGEST_S, None), (600, 600), (0, 0)]
)
def test_a_deployment_that_stays_shows_no_number_of_seconds(keep_s: int, shown: int | None) -> None:
    wishes = Deployment("tiny", keep_s=keep_s).wishes()
    assert wishes.keys() == {"replicas", "nodes", "on", "keep_s", "parallel", "split"}
    assert wishes["keep_s"] == shown


OTHER: dict[str, Any] = {"replicas": 2, "nodes": "3", "on": ("a" * 32,), "keep_s": 5, "parallel": "tensor"}


@pytest.mark.parametrize("name", [*Deployment("").wishes(), "model", "since"])
def test_rows_that_differ_in_any_field_have_an_order(name: str) -> None:
    row = Deployment("tiny", "tiny", version=1)
    rival = replace(row, **{name: OTHER.get(name, 7 if name == "since" else "3,1")})
    one, other = DeploymentTable((row,)), DeploymentTable((rival,))
    assert one.digest != other.digest
    assert one.merged(other) == other.merged(one)
