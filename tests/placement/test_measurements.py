"""Measurements of fabrics: what is kept, and what placement makes of it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.placement.cost_model import JACCL_MESH, RING_ETHERNET, RING_THUNDERBOLT
from mlxtp.placement.measurements import (
    EACH_S,
    LINK_BYTES,
    MOST_ROUNDS,
    SIZES,
    bandwidth,
    check,
    find,
    from_json,
    from_text,
    measured,
    merged,
    rounds,
    sizes,
    slow_link,
    to_text,
)
from mlxtp.placement.planner import PlacementOptions, plan
from mlxtp.wire.cluster_messages import FabricResult

from .made_up_macs import all_pairs, cabled, mac, node_id, on_lan
from .made_up_models import shape

A, B, C = (node_id(i) for i in range(3))
RESULT = FabricResult(
    (A, B), "ring", RING_ETHERNET, False, True, 100, 0.25, (1024, 4096), (0.5, 1.0), (0.5, 2.0)
)


def test_sizes_are_powers_of_four_and_a_row() -> None:
    assert sizes(0) == SIZES
    assert (SIZES[0], SIZES[-1]) == (1 << 10, 1 << 24)
    assert sizes(10240) == (1024, 4096, 10240, *SIZES[2:])
    assert sizes(4096) == SIZES
    assert sizes(1 << 40) == SIZES


@given(st.floats(0.0, 1e9))
def test_rounds_are_bounded_and_so_is_their_time(once_s: float) -> None:
    count = rounds(once_s)
    assert 1 <= count <= MOST_ROUNDS
    assert count == 1 or count * once_s <= EACH_S * 1.001
    assert count == MOST_ROUNDS or (count + 1) * once_s > EACH_S, "as many as the time has room for"


def test_the_newest_of_each_group_and_fabric_is_kept() -> None:
    newer = replace(RESULT, nodes=(B, A), at=200, collective_s=0.5)  # who is rank 0 makes no difference
    others = [
        replace(RESULT, kind=RING_THUNDERBOLT),
        replace(RESULT, fast_fences=True),
        replace(RESULT, nodes=(A, B, C)),
        replace(RESULT, backend="jaccl", kind=JACCL_MESH),
    ]
    for order in ([RESULT, newer, *others], [*others, newer, RESULT]):
        kept = merged(order[:3], order[3:])
        assert set(kept) == {newer, *others}
        assert kept[-1] == newer
    assert merged(kept, kept) == kept


def test_the_oldest_go_when_there_are_too_many() -> None:
    many = [replace(RESULT, nodes=(A, f"{i:032x}"), at=i) for i in range(FabricResult.MOST + 5)]
    assert [each.at for each in merged((), reversed(many))] == list(range(5, FabricResult.MOST + 5))


def test_what_was_measured_of_a_group_is_found_by_its_nodes_fabric_and_fences() -> None:
    assert find([RESULT], (B, A), RING_ETHERNET, fast_fences=False) == RESULT
    assert find([RESULT], (A, B), RING_ETHERNET, fast_fences=True) is None
    assert find([RESULT], (A, B), RING_THUNDERBOLT, fast_fences=False) is None
    assert find([RESULT], (A, B, C), RING_ETHERNET, fast_fences=False) is None


def test_it_goes_into_a_file_and_comes_back() -> None:
    results = (RESULT, replace(RESULT, nodes=(A, C), at=300, metal=False))
    assert from_text(to_text(results)) == results


NONSENSE: dict[str, dict[str, Any]] = {
    "zero": {"collective_s": 0.0},
    "not a number": {"collective_s": float("nan")},
    "for ever": {"collective_s": float("inf")},
    "a sum of zero": {"sums_s": (0.5, 0.0)},
    "a gather that is no number": {"gathers_s": (float("nan"), 1.0)},
    "one sum too few": {"sums_s": (0.5,)},
    "one gather too many": {"gathers_s": (0.5, 1.0, 2.0)},
    "sizes that shrink": {"sizes": (4096, 1024)},
    "a size of nothing": {"sizes": (0, 1024)},
    "no sizes": {"sizes": (), "sums_s": (), "gathers_s": ()},
    "one node": {"nodes": (A,)},
    "a node twice": {"nodes": (A, A)},
    "nine nodes": {"nodes": tuple(f"{i:032x}" for i in range(9))},
    "a backend of another kind": {"backend": "mpi"},
    "a time before all times": {"at": -1},
    "words for numbers": {"sums_s": ("a", "b")},
    "a size that no word holds": {"sizes": (1024, 1 << 40)},
}


@pytest.mark.parametrize("changes", NONSENSE.values(), ids=list(NONSENSE))
def test_nonsense_is_no_measurement(changes: dict[str, Any]) -> None:
    assert check(RESULT) == RESULT
    wrong = replace(RESULT, **changes)
    with pytest.raises(ValueError, match=r"."):
        check(wrong)
    with pytest.raises(ValueError, match=r"."):
        from_json(json.loads(json.dumps(asdict(wrong))))


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "null", "5", '{"format": 1}', '{"format": 2, "results": []}',
        '{"format": 1, "results": {}}', '{"format": 1, "results": [5]}', '{"format": 1, "results": [{}]}',
        to_text((RESULT,)).replace("ring", "mpi", 1),
        to_text((RESULT,)).replace('"metal": true', '"metal": 1'),
        to_text((RESULT,)).replace("0.25", "NaN"),
        to_text((RESULT,))[:-20],
    ],
)  # fmt: skip
def test_a_foreign_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_text(text)


def test_the_bandwidth_is_what_more_bytes_cost_more() -> None:
    assert bandwidth(RESULT) == 3072 / 0.5
    four = replace(RESULT, nodes=(A, B, C, "d" * 32))
    assert bandwidth(four) == 1.5 * 3072 / 0.5
    assert bandwidth(replace(RESULT, sums_s=(1.0, 0.5))) == 0
    assert bandwidth(replace(RESULT, sizes=(1024,), sums_s=(0.5,), gathers_s=(0.5,))) == 0


def test_slow_fences_say_nothing_of_fast_ones_and_without_a_gpu_there_are_none() -> None:
    fast = replace(RESULT, fast_fences=True, collective_s=0.125)
    assert [c.seconds for c in measured([RESULT, fast], fast_fences=False)] == [0.25]
    assert [c.seconds for c in measured([RESULT, fast], fast_fences=True)] == [0.125]
    cpu = replace(RESULT, metal=False)
    [found] = measured([cpu], fast_fences=True)
    assert (found.fenced, found.kind, found.nodes) == (False, RING_ETHERNET, frozenset((A, B)))


def test_a_measurement_changes_what_is_chosen() -> None:
    """Two Macs that would be slower than one by what is assumed, and are faster by what was measured."""
    macs, model = on_lan([mac(0), mac(1)]), shape()
    assumed = plan(macs, model, A)
    assert assumed.ranks == (A,)
    quick = replace(RESULT, collective_s=2e-5, sums_s=(2e-5, 2.1e-5))
    made = plan(macs, model, A, PlacementOptions(measured=measured([quick], fast_fences=False)))
    assert made.ranks == (A, B)
    assert made.chosen.speed.measured
    for other in (replace(quick, nodes=(A, C)), replace(quick, kind=RING_THUNDERBOLT)):
        unknown = PlacementOptions(measured=measured([other], fast_fences=False))
        assert plan(macs, model, A, unknown).ranks == (A,)


def test_a_slow_cable_is_left_for_a_measured_ring() -> None:
    desk = on_lan(cabled([mac(0), mac(1)], all_pairs(2)))
    large = shape(hidden_size=8192, num_attention_heads=64, intermediate_size=28672, num_hidden_layers=60)
    assert plan(desk, large, A, PlacementOptions(fast_fences=True)).chosen.backend == "jaccl"
    slow = replace(RESULT, backend="jaccl", kind=JACCL_MESH, fast_fences=True, collective_s=1e-3)
    known = PlacementOptions(fast_fences=True, measured=measured([slow], fast_fences=True))
    assert plan(desk, large, A, known).chosen.backend == "ring"


def test_a_link_is_called_slow_at_a_tenth_of_what_it_should_carry() -> None:
    mib_s = LINK_BYTES / 12.5e6  # 100 Mb/s
    said = slow_link(RING_THUNDERBOLT, 3e9, 2, mib_s)
    assert said == "ring over Thunderbolt carries 12.5 MB/s, where 3,000 MB/s are expected"
    assert slow_link(RING_THUNDERBOLT, 3e9, 4, mib_s * 1.5) == said
    assert slow_link(RING_THUNDERBOLT, 125e6, 2, mib_s)
    assert slow_link(RING_THUNDERBOLT, 124e6, 2, mib_s) == ""
