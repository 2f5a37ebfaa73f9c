"""Laws of every plan, for any set of Macs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from ipaddress import IPv4Interface
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published_models import published
from mlxtp.placement.candidates import Candidate
from mlxtp.placement.cost_model import AGENT, BATCH, CHAT, usable_bytes
from mlxtp.placement.model_shape import ModelShape
from mlxtp.placement.planner import Placement, PlacementOptions, plan
from mlxtp.placement.topology import MemberMachine, Topology
from mlxtp.wire.cluster_messages import Interface

from .made_up_macs import GIB, add, all_pairs, cabled, changed, ethernet, mac, node_id, on_lan
from .made_up_models import layered, shape  # fmt: skip

MODELS = (
    shape(),
    shape(num_attention_heads=24, num_key_value_heads=6, intermediate_size=14592),
    layered(),
    layered(num_attention_heads=24, num_key_value_heads=6, intermediate_size=14592, num_hidden_layers=3),
    layered(tie_word_embeddings=True),
    shape(num_key_value_heads=1),
    published("qwen3-235b-a22b-4bit"),
    published("deepseek-v3.1-4bit"),
)
CHIPS = ("Apple M3 Ultra", "Apple M4 Max", "Apple M4", "Apple M9", "")
NUMBER = re.compile(r"\d")


FAULTS: Mapping[str, Callable[[MemberMachine], MemberMachine]] = {
    "no memory": lambda m: changed(m, memory_bytes=8 * GIB, gpu_bytes=8 * GIB),
    "memory in use": lambda m: changed(m, free_bytes=4 * GIB),
    "held by us": lambda m: replace(changed(m, free_bytes=4 * GIB), held_bytes=50 * GIB),
    "RDMA disabled": lambda m: changed(m, rdma="disabled"),
    "bridge up": lambda m: changed(m, bridge_up=True),
    "no model": lambda m: replace(m, lack="it has no model"),
    "other system": lambda m: changed(m, system="linux", rdma="unsupported", chip="", ports=()),
    "ports asleep": lambda m: changed(m, ports=tuple(replace(p, active=False) for p in m.machine.ports)),
    "a hub": lambda m: changed(m, ports=tuple(replace(p, hub=True) for p in m.machine.ports)),
    "cables forgotten": lambda m: changed(
        m, ports=tuple(replace(p, peer_domain="") for p in m.machine.ports)
    ),
    "containers": lambda m: add(m, [ethernet("172.17.0.1", 16, name="docker0")]),
    "second network": lambda m: add(m, [ethernet(f"10.77.0.{int(m.node_id, 16) + 1}", name="e9")]),
    "network down": lambda m: changed(
        m, interfaces=tuple(replace(i, up=i.kind == "thunderbolt") for i in m.machine.interfaces)
    ),
    "only itself": lambda m: changed(m, ports=(), interfaces=(LOOP,)),
}
"""Faults, or other differences, of one Mac."""
LOOP = Interface("lo0", "127.0.0.1", 8, "loopback", 0, True)


@st.composite
def desks(draw: st.DrawFn) -> list[MemberMachine]:
    """Some Macs that would work, and what is wrong with a few of them."""
    size = draw(st.integers(1, 6))
    members = [
        mac(i, chip=draw(st.sampled_from(CHIPS)), memory=draw(st.sampled_from((24, 64, 512))))
        for i in range(size)
    ]
    around = [(i, (i + 1) % size) for i in range(size)] if size > 2 else all_pairs(size)
    some = draw(st.lists(st.sampled_from(all_pairs(size)), max_size=9)) if size > 1 else []
    members = cabled(members, draw(st.sampled_from([[], some, around, all_pairs(size)])))
    members = on_lan(members) if draw(st.booleans()) else members
    faults = st.tuples(st.integers(0, size - 1), st.sampled_from(sorted(FAULTS)))
    for place, fault in draw(st.lists(faults, max_size=3)):
        members[place] = FAULTS[fault](members[place])
    fault = draw(st.sampled_from(["", "", "", "only itself", "second network", "RDMA disabled"]))
    return [FAULTS[fault](m) for m in members] if fault else members


@st.composite
def wishes(draw: st.DrawFn) -> PlacementOptions:
    by_hand: dict[str, dict[str, str]] = {}
    for a, b in draw(st.lists(st.sampled_from(all_pairs(4)), max_size=2)):
        by_hand.setdefault(node_id(a), {})[node_id(b)] = draw(st.sampled_from(("rdma_x", "rdma_y")))
        by_hand.setdefault(node_id(b), {})[node_id(a)] = "rdma_z"
    return PlacementOptions(
        backend=draw(st.sampled_from(("auto", "auto", "jaccl", "ring"))),
        nodes=draw(st.sampled_from(("auto", "auto", "auto", "all", "all", 2, 4, 8))),
        max_context=draw(st.sampled_from((0, 512, 100_000))),
        fast_fences=draw(st.booleans()),
        rdma=by_hand,
        workload=draw(st.sampled_from((CHAT, AGENT, BATCH))),
        parallel=draw(st.sampled_from(("auto", "auto", "tensor", "pipeline"))),
        fabric_networks=draw(st.sampled_from(("any", "any", "private", "thunderbolt"))),
    )


Case = tuple[list[MemberMachine], ModelShape, str, PlacementOptions]
cases = st.tuples(desks(), st.sampled_from(MODELS), st.sampled_from(("", *map(node_id, range(6)))), wishes())


def for_every_plan(test: Callable[[Case, Placement], None]) -> Callable[[], None]:
    """A test of any plan: hypothesis makes up the desk, the model and the wishes."""

    @given(cases)
    @settings(max_examples=60, deadline=None)
    def run(case: Case) -> None:
        test(case, plan(*case))

    return run


def groups(made: Placement) -> list[Candidate]:
    """Those that could serve, whether they may or not."""
    return [a for a in made.alternatives if a.ranks]


@for_every_plan
def test_no_rank_has_less_than_it_needs(case: Case, made: Placement) -> None:
    members, model, _, _ = case
    by_id = {m.node_id: m for m in members}
    same = Topology([m for m in members if not m.lack]).is_one_machine
    for one in groups(made):
        size = len(one.ranks)
        for node, rank in zip(one.ranks, one.memory, strict=True):
            assert rank.node_id == node
            assert rank.weights * size >= model.weight_bytes or one.split
            assert rank.needed <= usable_bytes(by_id[node]) // (size if same else 1)
        assert sum(rank.weights for rank in one.memory) >= model.weight_bytes
        assert not (model.uncuttable(size, one.split) if one.split else model.obstacles(size))


@for_every_plan
def test_each_layer_of_a_pipeline_has_one_rank(case: Case, made: Placement) -> None:
    for one in groups(made):
        assert not one.split or (len(one.split), sum(one.split)) == (one.nodes, case[1].layers)
        assert all(one.split)
        assert [bool(one.split), one.is_pipeline] in ([True, True], [False, False])
        assert case[3].parallel != "tensor" or not one.split
        assert case[3].parallel != "pipeline" or one.split or one.nodes == 1


@for_every_plan
def test_ranks_of_a_ring_share_a_network_with_the_rank_before_them(case: Case, made: Placement) -> None:
    by_id = {m.node_id: m for m in case[0]}

    def interfaces(node: str) -> set[IPv4Interface]:
        return {IPv4Interface((i.address, i.prefix)) for i in by_id[node].machine.interfaces if i.up}

    for one in groups(made):
        assert len(one.ring_addresses) == (len(one.ranks) if one.backend == "ring" else 0)
        for i, address in enumerate(one.ring_addresses):
            mine = {x for x in interfaces(one.ranks[i]) if str(x.ip) == address}
            theirs = interfaces(one.ranks[i - 1])
            # The Ethernet of these desks has room for many machines, and each of their cables for two.
            assert case[3].fabric_networks == "any" or {x.network.prefixlen for x in mine} <= {8, 30}
            if address == "127.0.0.1":
                assert all({str(x.ip) for x in interfaces(n)} == {address} for n in one.ranks)
            else:
                assert any(x.network == y.network and x.ip != y.ip for x in mine for y in theirs)


@for_every_plan
def test_rdma_matrices_are_symmetric_and_give_each_peer_its_own_device(case: Case, made: Placement) -> None:
    for one in groups(made):
        size = len(one.ranks)
        assert len(one.rdma) == (size if one.backend == "jaccl" else 0)
        for i, row in enumerate(one.rdma):
            used = [device for device in row if device]
            assert len(used) == len(set(used)), "one device, one peer"
            assert row[i] is None
            for j, device in enumerate(row):
                neighbours = (i - j) % size in (1, size - 1)
                assert bool(device) == bool(one.rdma[j][i]) == (i != j and (neighbours or not one.jaccl_ring))


@for_every_plan
def test_the_coordinator_is_rank_0_or_nowhere(case: Case, made: Placement) -> None:
    for one in groups(made):
        assert len(set(one.ranks)) == len(one.ranks) == one.nodes <= 8
        assert case[2] not in one.ranks[1:]


@for_every_plan
def test_every_refusal_names_a_number(case: Case, made: Placement) -> None:
    for one in made.alternatives:
        assert bool(one.reason) == (one.verdict == "refused")
        assert not one.reason or NUMBER.search(one.reason), one.reason
    assert NUMBER.search(made.reason)


@for_every_plan
def test_what_was_asked_for_is_kept(case: Case, made: Placement) -> None:
    options = case[3]
    if made.chosen is None:
        assert all(a.verdict == "refused" for a in made.alternatives)
        return
    assert isinstance(options.nodes, str) or made.chosen.nodes == options.nodes
    assert options.backend == "auto" or made.chosen.backend in ("none", options.backend)
    alone = [a for a in made.alternatives if a.ranks == made.ranks[:1]]
    if options.nodes == "auto" and options.parallel == "auto" and alone:
        assert made.chosen.request_seconds(options.workload) <= alone[0].request_seconds(options.workload)
    assert [a.verdict for a in made.alternatives].count("chosen") == 1
    assert made.alternatives[0] is made.chosen


@for_every_plan
def test_the_choice_answers_a_request_soonest(case: Case, made: Placement) -> None:
    """No other way that is possible is sooner, and none is refused as slower that is not."""
    options = case[3]
    if made.chosen is None:
        return
    if options.parallel != "auto" and made.chosen.nodes == 1:  # there is no other way
        assert all(one.nodes == 1 for one in made.alternatives if one.verdict != "refused")
    chosen_s = made.chosen.request_seconds(options.workload)
    for one in made.alternatives:
        fewer = options.nodes == "all" and one.nodes < made.chosen.nodes
        if one.verdict == "possible" and not fewer:
            assert one.request_seconds(options.workload) >= chosen_s
        if one.reason.startswith("slower"):
            assert one.request_seconds(options.workload) > chosen_s


@for_every_plan
def test_a_request_takes_longer_the_more_tokens_it_has(case: Case, made: Placement) -> None:
    work = case[3].workload
    more = {
        "prompt": replace(work, prompt=work.prompt + 3000),
        "computed": replace(work, cached=work.cached // 2),
        "answer": replace(work, answer=work.answer + 1),
        "at once": replace(work, at_once=work.at_once + 1),
    }
    for one in groups(made):
        usual = one.speed.request_seconds(work)
        assert 0 < one.speed.prompt_s(work) < usual
        for what, longer in more.items():
            seconds = one.speed.request_seconds(longer)
            assert seconds > usual or (what == "computed" and not work.cached and seconds == usual), what


@for_every_plan
def test_the_order_of_members_does_not_matter(case: Case, made: Placement) -> None:
    members, *rest = case
    shuffled = random.Random(7).sample(members, len(members))
    turned = [
        changed(m, interfaces=m.machine.interfaces[::-1], ports=m.machine.ports[::-1]) for m in shuffled
    ]
    again: Any = plan(turned, *rest)
    assert again == made


@given(st.lists(st.tuples(st.integers(40, 64), st.integers(40, 64)), min_size=3, max_size=3))
def test_free_memory_never_changes_the_order_of_equal_macs(free: list[tuple[int, int]]) -> None:
    """The caches that a rank keeps on disk are of its place in that order."""
    before, after = (on_lan([mac(i, free=each[now]) for i, each in enumerate(free)]) for now in (0, 1))
    for nodes, parallel in ((1, "auto"), (2, "tensor"), (2, "pipeline")):
        options = PlacementOptions(nodes=nodes, parallel=parallel)
        assert plan(before, layered(), "", options).ranks == plan(after, layered(), "", options).ranks
