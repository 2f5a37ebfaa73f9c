"""Groups that failed to form: how long they are left out, and what brings them back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.errors import Code
from mlxtp.placement.cost_model import JACCL_MESH, JACCL_RING
from mlxtp.placement.formation import (
    ADDRESS_RETRY_S,
    ADDRESSES_COME_S,
    DEATHS,
    RETRY_S,
    ROW_S,
    SOON_S,
    USED_UP_RETRY_S,
    FailedGroup,
    FailedGroups,
    blames_fabric,
    links_of,
    runs_short,
)
from mlxtp.placement.planner import PlacementOptions, plan
from mlxtp.placement.topology import MemberMachine
from mlxtp.wire.cluster_messages import Port

from .made_up_macs import cabled, mac, on_lan
from .made_up_models import shape

MACS = cabled(on_lan([mac(0), mac(1), mac(2)]), [(0, 1), (0, 2), (1, 2)])
MEMBERS = {each.node_id: each for each in MACS}
IDS = sorted(MEMBERS)
MODEL = shape(num_attention_heads=24, num_key_value_heads=6, intermediate_size=14592)  # divides by 2 and 3


def meshed(*places: int) -> FailedGroup:
    """The mesh of these Macs, as planned."""
    macs, options = [MACS[place] for place in places], PlacementOptions(backend="jaccl", nodes="all")
    chosen = plan(macs, MODEL, options=options).chosen
    assert chosen.kind == JACCL_MESH
    return FailedGroup(JACCL_MESH, links_of(chosen.ranks, chosen.rdma), "it did not form: errno 16")


def down(port: Port) -> Port:
    return replace(port, active=False)


def left_out(
    memory: FailedGroups, now: float, members: dict[str, MemberMachine] | None = None
) -> list[FailedGroup]:
    return [group for group, _ in memory.left_out(members or MEMBERS, now)]


def test_links_name_both_ends_and_their_devices() -> None:
    rdma = ((None, "x", "y"), ("z", None, None), ("w", None, None))
    assert links_of(("b", "a", "c"), rdma) == {("a", "b", "z", "x"), ("b", "c", "y", "w")}
    assert links_of(("b", "a"), ()) == {("a", "b", "", "")}


def test_a_loss_is_forgiven_once_and_sooner() -> None:
    memory, group = FailedGroups(), meshed(0, 1)
    assert not memory.failed(group, Code.RANK_LOST, MEMBERS, 0.0, strikes=2)
    assert left_out(memory, 0.0) == []
    assert memory.failed(group, Code.RANK_LOST, MEMBERS, 1.0, strikes=2)
    assert left_out(memory, SOON_S) == [group]
    assert left_out(memory, SOON_S + 1) == []


def test_a_success_forgives_what_came_before() -> None:
    memory, group = FailedGroups(), meshed(0, 1)
    memory.failed(group, Code.RANK_LOST, MEMBERS, 0.0, strikes=2)
    memory.formed(group.kind, group.links)
    assert not memory.failed(group, Code.RANK_LOST, MEMBERS, 1.0, strikes=2)


def test_a_missing_address_is_tried_again_soon_for_three_minutes() -> None:
    memory, now, waits = FailedGroups(), 0.0, []
    group = replace(meshed(0, 1), reason="[jaccl] Changing queue pair to RTR failed with errno 22")
    while now < ADDRESSES_COME_S + 2 * RETRY_S:
        assert memory.failed(group, Code.FORM_FAILED, MEMBERS, now)
        [(_, left_s)] = memory.left_out(MEMBERS, now)
        waits.append(left_s)
        now += left_s
        assert left_out(memory, now) == []
    often = math.ceil(ADDRESSES_COME_S / ADDRESS_RETRY_S)
    later = [RETRY_S, 2 * RETRY_S]  # longer each time, as if it had not been tried before
    assert waits == [ADDRESS_RETRY_S] * often + later


def with_ports(**changes: Any) -> dict[str, MemberMachine]:
    """The same Macs, each of whose ports has other fields."""
    return {
        node: replace(
            mac, machine=replace(mac.machine, ports=tuple(replace(p, **changes) for p in mac.machine.ports))
        )
        for node, mac in MEMBERS.items()
    }


@pytest.mark.parametrize(
    ("reason", "code", "formed", "left_s"),
    [
        ("[jaccl] Couldn't allocate protection domain", Code.FORM_FAILED, 3, USED_UP_RETRY_S),
        ("[jaccl] Changing queue pair to RTR failed with errno 22", Code.FORM_FAILED, 2, USED_UP_RETRY_S),
        ("[jaccl] Changing queue pair to RTR failed with errno 60", Code.FORM_FAILED, 9, RETRY_S),
        ("rank 1 is gone", Code.RANK_LOST, 2, RETRY_S),
    ],
)
def test_the_last_formations_are_not_spent_on_what_has_failed(
    reason: str, code: Code, formed: int, left_s: float
) -> None:
    memory, members = FailedGroups(), with_ports(formations=formed)
    assert memory.failed(replace(meshed(0, 1), reason=reason), code, members, 0.0, strikes=2)
    assert [seconds for _, seconds in memory.left_out(members, 0.0)] == [left_s]
    for no_change in ({"formations": formed + 1}, {"formations": formed, "service": "mlxtp 2"}):
        assert memory.left_out(with_ports(**no_change), 0.0), "it is the same Mac"


def test_devices_of_the_links_alone_run_short() -> None:
    few = {node: each.machine for node, each in with_ports(formations=2).items()}
    assert runs_short(meshed(0, 1).links, few)
    none = {node: each.machine for node, each in MEMBERS.items()}
    assert not runs_short(meshed(0, 1).links, {**none, IDS[2]: few[IDS[2]]})
    assert not runs_short(meshed(0, 1).links, {}), "a Mac that has left has none"
    other_ports = {
        node: replace(machine, ports=(replace(machine.ports[0], formations=0), *machine.ports[1:]))
        for node, machine in few.items()
    }
    assert not runs_short(meshed(0, 1).links, other_ports), "their cable is in the first port of both"


@pytest.mark.parametrize(
    "change",
    [
        lambda mac: replace(mac, boot_id="another"),
        lambda mac: replace(mac, machine=replace(mac.machine, release="26.9")),
        lambda mac: replace(mac, machine=replace(mac.machine, ports=mac.machine.ports[1:])),
        lambda mac: replace(
            mac,
            machine=replace(mac.machine, ports=tuple(replace(p, active=False) for p in mac.machine.ports)),
        ),
        lambda mac: replace(mac, machine=replace(mac.machine, interfaces=mac.machine.interfaces[1:])),
    ],
    ids=["agent", "release", "cable", "port", "address"],
)
def test_a_change_on_one_of_its_macs_brings_it_back(change) -> None:  # type: ignore[no-untyped-def]
    group = meshed(0, 1)
    for one in (0, 1):
        memory = FailedGroups()
        memory.failed(group, Code.FORM_FAILED, MEMBERS, 0.0)
        assert left_out(memory, 1.0, {**MEMBERS, IDS[one]: change(MEMBERS[IDS[one]])}) == []
    memory.failed(group, Code.FORM_FAILED, MEMBERS, 0.0)
    third = {**MEMBERS, IDS[2]: change(MEMBERS[IDS[2]])}
    assert left_out(memory, 1.0, third) == [group], "that is no Mac of it"
    assert left_out(memory, 1.0, {**MEMBERS, IDS[1]: change(MEMBERS[IDS[1]])}) == []
    assert left_out(memory, 2.0) == [], "and it stays so"


def died(memory: FailedGroups, now: float, served_s: float, *, at_once: bool = False) -> bool:
    strikes = 1 if at_once else DEATHS
    return memory.failed(meshed(0, 1), Code.RANK_LOST, MEMBERS, now, strikes=strikes, served_s=served_s)


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=12))
def test_a_group_is_left_out_at_its_second_end_and_longer_each_time(ends: list[tuple[int, bool]]) -> None:
    memory, group, now, row, out_s = FailedGroups(), meshed(0, 1), 0.0, 0, 0.0
    for served_s, at_once in ends:
        memory.formed(group.kind, group.links)  # which it must have, to serve
        now += served_s
        row = 1 if served_s >= max(ROW_S, out_s) else row + 1
        out_s = 0.0 if row == 1 else out_s
        expected = row >= DEATHS or at_once
        assert died(memory, now, served_s, at_once=at_once) == expected
        if expected:
            out_s = RETRY_S * 2 ** min(max(row - DEATHS, 0), 6)
            assert memory.left_out(MEMBERS, now) == ((group, out_s),)
            now += out_s
        assert left_out(memory, now) == []


def test_ends_long_after_one_another_are_not_in_a_row() -> None:
    """Whatever ended the group in between, and however shortly it served before."""
    memory = FailedGroups()
    assert [died(memory, now, 1.0) for now in (0.0, RETRY_S, 2 * RETRY_S, 2 * RETRY_S + 1)] == [
        False, False, False, True,
    ]  # fmt: skip


def test_a_request_that_was_to_blame_brings_back_only_what_it_ended() -> None:
    memory, other = FailedGroups(), replace(meshed(0, 2), reason="it did not form")
    assert not died(memory, 0.0, 1.0)
    assert died(memory, 1.0, 1.0)
    memory.failed(other, Code.FORM_FAILED, MEMBERS, 1.0)
    assert memory.absolve(IDS[2:]) == [], "no Mac of it"
    assert memory.absolve(IDS[:1]) == [meshed(0, 1)]
    assert left_out(memory, 2.0) == [other]
    assert not died(memory, 2.0, 1.0), "nothing of it is kept"


@pytest.mark.parametrize(
    ("code", "message", "blamed"),
    [
        (Code.RANK_LOST, "mini: rank 1 was ended by signal 11 in phase prefill", True),
        (Code.RANK_LOST, "rank 0 was ended by signal 6", True),
        (Code.FORWARD_FAILED, "rank 0: ValueError: [jaccl] Send failed with error code 22", True),
        (Code.PROOF_FAILED, "rank 0: the sum is wrong", True),
        (Code.RANK_STALLED, "no progress in prefill for 30.2 s; rank 1 is behind: 0 at step 7", True),
        (Code.RANK_STALLED, "no progress in prefill for 30.2 s; no rank is behind: 0 at step 7", False),
        (Code.RANK_LOST, "rank 1 was ended by signal 9 (the system may do this when memory runs out)", False),
        (Code.RANK_LOST, "rank 1 has been silent for 3.1 s", False),
        (Code.OUT_OF_MEMORY, "rank 1 ran out of memory", False),
        (Code.FORWARD_FAILED, "rank 0: ValueError: no such kernel", False),
    ],
)
def test_what_may_be_a_fabrics_fault_while_it_serves(code: Code, message: str, blamed: bool) -> None:
    assert blames_fabric(code, message) == blamed


def test_a_forward_that_was_slow_on_all_ranks_is_tried_again_soon() -> None:
    memory, group = FailedGroups(), replace(meshed(0, 1), reason="no progress in decode; no rank is behind")
    assert memory.failed(group, Code.RANK_STALLED, MEMBERS, 0.0)
    assert memory.left_out(MEMBERS, 0.0) == ((group, SOON_S),)


def test_a_pair_that_failed_is_in_no_mesh_and_another_pair_is() -> None:
    failed = tuple(replace(meshed(0, 1), kind=kind) for kind in (JACCL_MESH, JACCL_RING))
    options = PlacementOptions(failed=failed, nodes=2, backend="jaccl")
    chosen = plan(MACS, MODEL, IDS[0], options).chosen
    assert (chosen.kind, set(chosen.ranks)) == (JACCL_MESH, {IDS[0], IDS[2]})
    three = plan(MACS, MODEL, IDS[0], PlacementOptions(failed=failed, nodes=3, backend="jaccl"))
    assert three.chosen is None
    assert "errno 16" in three.reason


def test_other_devices_are_another_group() -> None:
    (link,) = meshed(0, 1).links
    elsewhere = FailedGroup(JACCL_MESH, frozenset({(*link[:2], "rdma_en9", link[3])}), "it did not form")
    for failed, rdma in ((elsewhere, True), (meshed(0, 1), False)):
        options = PlacementOptions(failed=(failed,), nodes="all")
        placement = plan(MACS[:2], MODEL, IDS[0], options)
        assert (placement.chosen.kind == JACCL_MESH) == rdma
        assert any("not JACCL: it did not form: errno 16" in note for note in placement.notes) != rdma
