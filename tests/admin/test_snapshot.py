"""Renderings of one snapshot: health, status, page, metrics and doctor agree on the same state."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric
from rich.console import Console

from mlxtp.admin import checkup, metrics, snapshot
from mlxtp.admin.parts import DeploymentSnapshot, GroupSnapshot, drafts_of, use_of
from mlxtp.admin.snapshot import AgentSnapshot, ClusterSnapshot, MemberSnapshot, NodeLink, Snapshot, gather
from mlxtp.api.backend import Health, ModelInfo
from mlxtp.api.dialects import openai as answers
from mlxtp.cli.status import _shown, picture
from mlxtp.cluster.cluster_state import LeaderClaim
from mlxtp.diagnostics.facts import Attempt
from mlxtp.gateway.dispatcher import OpenRequests
from mlxtp.groups.health import ServingState
from mlxtp.groups.history import EpochStory
from mlxtp.groups.loading import NO_HEAD
from mlxtp.groups.process_group import EpochGroup
from mlxtp.wire.cluster_messages import Deployment, FabricResult, ModelStatus, Port, RosterEntry
from mlxtp.wire.messages import Pong
from mlxtp.wire.rank_stats import RankStats

from ..groups.one_node import MACHINE, A, B, alone
from ..groups.scenes import run

STATS = RankStats(
    forwards=9, collectives=3, emitted=4, memory_bytes=10 << 20, peak_memory_bytes=12 << 20, weight_bytes=5,
    load_peak_bytes=6, kv_bytes=8, step_us=1500, wait_us=300, collective_us=44,
)  # fmt: skip
PONG = Pong("decode", 0.5, 1, 7, "tiny", STATS, 100)
KEPT_STATS = replace(
    STATS, kept_bytes=10**9, evicted_bytes=10**8, reused=12, reused_tokens=96_000, fetched=3,
    fetched_tokens=64_000, spilled_bytes=7, disk_bytes=3 * 10**9, disk_room_bytes=50 * 10**9,
)  # fmt: skip
KEPT = replace(PONG, stats=KEPT_STATS)
GROUP = EpochGroup(1, 2, "ring", kind="ring over Ethernet")
AGENT = AgentSnapshot(
    health=Health("ready", 9, 2, "ring", "tiny", None, ready=True, open_requests=3),
    state=ServingState.READY,
    model=ModelInfo("tiny", (), Path("/models/tiny"), 4096, 0, (1,), 300),
    group=GROUP,
    pongs={0: PONG, 1: replace(PONG, phase="idle")},
    pids={0: 4711},
    processes={"tiny#0": [4711]},
    requests=(OpenRequests("tiny", 2, 1, 50),),
    phases={"generating": 2, "first_token": 1, "group": 0, "held_back": 0},
    tokens=77,
    kv_room=200,
    in_epoch=True,
    proof="",
)
DRAFT_STATS = replace(
    KEPT_STATS,
    drafted=(10, 0, 30),
    accepted=(8, 0, 12),
    decode_steps=50,
    decode_widths=110,
    draft_gain=1.2649,
)
DRAFTED = replace(KEPT, stats=DRAFT_STATS)
HERE = MemberSnapshot(
    A, "studio", True, "alive", True, False, 0, "", False, "http://127.0.0.1:52415", MACHINE,
    ModelStatus("tiny", "ab" * 32, ""), "", RosterEntry(A, "studio", A * 2, False, 1), "",
)  # fmt: skip
OTHER = MemberSnapshot(
    B, "mini", False, "suspect", False, True, 1, "10.0.0.7", True, "", None,
    ModelStatus("tiny", "", "no room"), "tiny is on its way",
    RosterEntry(B, "mini", B * 2, False, 2, admitted_by=A, at=1_780_000_000), "studio", refused="protocol 12",
)  # fmt: skip
CLUSTER = ClusterSnapshot(
    alone=False,
    cluster_id="c" * 16,
    claim=LeaderClaim(5, A),
    coordinator="studio",
    deployments=(
        DeploymentSnapshot(
            Deployment("tiny", "tiny", 2, "2", version=3, writer=A),
            (
                GroupSnapshot("tiny#0", "ready", "", A, (A, B), "ring", GROUP.kind, 9, 3, 2, 30, 512, 800),
                GroupSnapshot("tiny#1", "idle", "mini: no room"),
            ),
        ),
    ),
    coming=("org/next is on its way here",),
    problem="a copied home",
    waiting="too few members",
    left_out=("JACCL is left out",),
    members=(HERE, OTHER),
    links=(NodeLink(A, B, 310, "ethernet", rdma=False, mbps=None),),
)
RESULT = FabricResult((A, B), "ring", GROUP.kind, False, False, 5, 0.001, (64,), (0.1,), (0.2,))
NOW = Snapshot(
    node_id=A,
    name="studio",
    agent=AGENT,
    cluster=CLUSTER,
    shown="tiny#0",
    participants=(A, B),
    serving=None,
    measured=RESULT,
    hosted=False,
    model_bytes=1000,
    left_wired="2 GB stay wired",
    caches=(use_of("tiny#0", {0: KEPT, 1: KEPT}, (A, B)),),
    drafts=(drafts_of("tiny#0", DRAFTED, "mtp"),),
    history=(("tiny#0", EpochStory(9, 1.0, True, 2, "ring", GROUP.kind, "tiny")),),
)
ALONE = replace(NOW, cluster=replace(CLUSTER, alone=True, members=(HERE,), links=()))
FOLLOWER = replace(NOW, agent=replace(AGENT, pongs=None, pids={}))


def test_status_and_page_have_the_drafts_that_rank_0_counted_and_the_use_of_caches() -> None:
    for found in (snapshot.status(NOW), snapshot.page(NOW, 30.0)):
        drafted, accepted = (
            {"lookup": lookup, "mtp": 0, "draft": draft} for lookup, draft in ((10, 30), (8, 12))
        )
        counts = {"drafted": drafted, "accepted": accepted, "width": 2.2, "gain": 1.26}
        assert found["drafts"] == [{"group": "tiny#0", **counts, "note": NO_HEAD}]
        [use] = found["caches"]
        assert (use["group"], use["fetched_tokens"], use["disk_bytes"]) == ("tiny#0", 64_000, 6 * 10**9)
    assert drafts_of("tiny#0", replace(DRAFTED, stats=replace(DRAFT_STATS, mtp=True)), "mtp")["note"] == ""
    assert drafts_of("tiny#0", DRAFTED, "auto")["note"] == ""


def samples(now: AgentSnapshot) -> dict[str, list[tuple[dict[str, str], float]]]:
    def of(metric: Metric) -> list[tuple[dict[str, str], float]]:
        return [(each.labels, each.value) for each in metric.samples]

    return {metric.name: of(metric) for metric in metrics.rendered(now, CLUSTER.deployments)}


@pytest.mark.parametrize(
    ("nodes", "macs"),
    [
        ((A, B), 2),
        ((A, A), 1),  # two ranks report the disk that they share
        ((A,), 1),  # one Mac for all ranks of an agent alone
        ((), 1),
    ],
)
def test_the_use_of_caches_is_summed_over_ranks_and_disks(nodes: tuple[str, ...], macs: int) -> None:
    use = use_of("tiny#0", {1: KEPT, 0: replace(KEPT, stats=replace(KEPT_STATS, reused=13))}, nodes)
    assert use == {
        "group": "tiny#0", "kept_bytes": 2 * 10**9, "evicted_bytes": 2 * 10**8, "spilled_bytes": 14,
        "reused": 13, "reused_tokens": 96_000, "fetched": 3, "fetched_tokens": 64_000,
        "disk_bytes": macs * 3 * 10**9, "disk_room_bytes": macs * 50 * 10**9,
    }  # fmt: skip


def test_metrics_have_each_deployment_and_group() -> None:
    found = samples(AGENT)
    first, second = ({"deployment": "tiny", "group": f"tiny#{index}"} for index in (0, 1))
    assert found["mlxtp_replicas_ready"] == [({"deployment": "tiny"}, 1)]
    assert found["mlxtp_replicas_wanted"] == [({"deployment": "tiny"}, 2)]
    assert found["mlxtp_group_ready"] == [(first, 1), (second, 0)]
    assert found["mlxtp_group_epoch"] == [(first, 9), (second, 0)]
    assert found["mlxtp_group_world_size"] == [(first, 2), (second, 0)]
    assert found["mlxtp_group_requests"] == [(first, 3), (second, 0)]
    assert found["mlxtp_group_tokens_per_second"] == [(first, 30)]
    assert found["mlxtp_group_cached_tokens"] == [(first, 512)]
    assert found["mlxtp_group_kv_cache_room_tokens"] == [(first, 800)]
    states = [labels for labels, value in found["mlxtp_group_state"] if value]
    assert states == [first | {"state": "ready"}, second | {"state": "idle"}]
    others = (OpenRequests("second", 0, 4, 0), OpenRequests("", 0, 0, 0))
    found = samples(replace(AGENT, requests=(*AGENT.requests, *others)))
    for name, counts in (("vllm:num_requests_running", (2, 0)), ("vllm:num_requests_waiting", (1, 4))):
        models = ({"model_name": model} for model in ("tiny", "second"))
        assert found[name] == list(zip(models, counts, strict=True))


@pytest.mark.parametrize(("tokens", "room", "used"), [(50, 200, [0.25]), (900, 200, [1.0]), (50, 0, [])])
def test_the_use_of_the_kv_caches_is_a_fraction_of_their_room(
    tokens: int, room: int, used: list[float]
) -> None:
    now = replace(AGENT, requests=(OpenRequests("tiny", 2, 1, tokens),), kv_room=room)
    assert samples(now)["vllm:kv_cache_usage_perc"] == [({"model_name": "tiny"}, part) for part in used]


def test_every_rendering_has_the_same_state_epoch_model_and_requests() -> None:
    health = answers.health_body(AGENT.health)
    status, page = snapshot.status(NOW), snapshot.page(NOW, 12.5)
    for name in ("state", "epoch", "model"):
        assert health[name] == status[name] == page[name], name
    assert health["open_requests"] == status["open_requests"] == page["requests"]["open"] == 3
    facts, counted = checkup.agent_facts(NOW), samples(AGENT)
    assert (facts.state, facts.model) == ("ready", "tiny")
    assert [labels["state"] for labels, value in counted["mlxtp_state"] if value] == ["ready"]
    assert [counted[name] for name in ("mlxtp_epoch", "mlxtp_open_requests")] == [[({}, 9)], [({}, 3)]]


def test_status_names_ranks_members_and_the_fabric_of_a_group_that_serves() -> None:
    status = snapshot.status(NOW)
    ranks = [(each["rank"], each["pid"], each["phase"]) for each in status["ranks"]]
    assert ranks == [(0, 4711, "decode"), (1, None, "idle")]
    assert (status["coordinator"], status["term"]) == ("studio", 5)
    rows = {each["name"]: each for each in status["members"]}
    assert (rows["mini"]["rank"], rows["mini"]["admitted_by_name"], rows["mini"]["chip"]) == (1, "studio", "")
    assert rows["mini"]["model_problem"] == "no room"
    assert rows["mini"]["refused"] == "protocol 12"
    assert status["group"] == "tiny#0"
    assert status["fabric"] is None, "no report says that the group serves"
    told = io.StringIO()
    Console(file=told, width=120).print(*_shown(status), sep="\n")
    assert "2 GB stay wired" in told.getvalue()
    assert json.loads(json.dumps(status)) == status


def test_status_and_page_have_each_deployment_with_its_groups_and_each_member_with_its_work() -> None:
    told, shown = snapshot.status(NOW), snapshot.page(NOW, None)
    assert told["deployments"] == shown["deployments"]
    [tiny] = told["deployments"]
    assert {name: tiny[name] for name in ("name", "state", "replicas", "pinned", "why")} == {
        **{"name": "tiny", "state": "ready", "pinned": True, "why": "mini: no room"},
        "replicas": {"ready": 1, "wanted": 2},
    }
    group, waiting = tiny["groups"]
    assert [each["name"] for each in group["members"]] == ["studio", "mini"]
    assert group["requests"] == {"running": 2, "waiting": 1}
    assert (group["owner"], group["tokens_per_second"], group["cached_tokens"]) == (A, 30, 512)
    assert (waiting["owner"], waiting["members"], waiting["tokens_per_second"]) == (None, [], None)
    assert [each["works_for"] for each in told["members"]] == [["tiny#0"], ["tiny#0"]]
    assert [each["works_for"] for each in shown["nodes"]] == [["tiny#0"], ["tiny#0"]]
    alone_, page = snapshot.status(ALONE), snapshot.page(ALONE, None)
    assert (alone_["deployments"] != [], "members" in alone_) == (True, False)
    assert (page["cluster"], page["coordinator"]) == (None, None)
    assert [each["name"] for each in page["nodes"]] == ["studio"]


def test_the_page_has_figures_of_ranks_and_links_and_none_for_unknown_facts() -> None:
    page = snapshot.page(NOW, 12.5)
    Console(file=io.StringIO()).print(picture(page, 0.0))
    group = {"world_size": 2, "backend": "ring", "kind": GROUP.kind, "split": [], "pairs": [(0, 1)]}
    assert page["group"] == {**group, "fabric": {"collective_us": 1000, "by": "bench", "at": 5}}
    assert [(each["node"], each["memory_bytes"]) for each in page["ranks"]] == [(A, 10 << 20), (B, 10 << 20)]
    assert page["tokens_per_second"] == {"value": 12.5, "of": "group"}
    link = {"a": A, "b": B, "trip_us": 310, "network": "ethernet", "rdma": False, "mbps": None}
    assert page["links"] == [link]
    [here, mini] = page["nodes"]
    assert (here["address"], mini["chip"], mini["memory_bytes"], mini["notes"]) == (None, None, None, [])
    page, counted = snapshot.page(FOLLOWER, 3.0), samples(FOLLOWER.agent)  # without rank 0
    assert [each["phase"] for each in page["ranks"]] == [None, None]
    assert page["tokens_per_second"] == {"value": 3.0, "of": "here"}
    assert (counted["mlxtp_ranks_alive"], counted["mlxtp_rank_step_seconds"]) == ([], [])
    assert samples(AGENT)["mlxtp_ranks_alive"] == [({}, 2)]


@pytest.mark.parametrize(
    ("changed", "fabric"),
    [
        ({}, {"collective_us": 1000, "by": "bench", "at": 5}),
        ({"measured": None}, {"collective_us": 44, "by": "proof", "at": None}),
        ({"measured": None, "agent": FOLLOWER.agent}, None),
    ],
    ids=["measured", "by the last proof", "of ranks that report elsewhere"],
)
def test_the_speed_of_a_fabric_is_the_best_known(changed: dict[str, Any], fabric: object) -> None:
    assert snapshot.page(replace(NOW, **changed), None)["group"]["fabric"] == fabric


def test_the_doctor_has_the_facts_of_an_agent_of_its_model_and_of_other_members() -> None:
    facts = checkup.agent_facts(NOW)
    assert (facts.problem_of_cluster, facts.waiting) == ("a copied home", "too few members")
    assert facts.left_out == ("JACCL is left out",)
    assert facts.fabric == f"{GROUP.kind} on studio + mini"
    assert (facts.has_rank, facts.left_wired) == (True, "2 GB stay wired")
    port = Port(5, "en5", "D5", "E5", False, 80, "rdma_en5", True, formations=2)
    formed = replace(HERE, machine=replace(MACHINE, ports=(port, replace(port, rdma="", formations=0))))
    now = replace(NOW, cluster=replace(CLUSTER, members=(OTHER, formed)))
    assert checkup.agent_facts(now).formations == {"rdma_en5": 2}
    assert [each["formations"] for each in snapshot.status(now)["members"]] == [{}, {"rdma_en5": 2}]
    resting = replace(NOW, agent=replace(AGENT, in_epoch=False))
    assert not checkup.agent_facts(resting).has_rank
    assert checkup.agent_facts(replace(resting, hosted=True)).has_rank
    model = checkup.model_facts(CLUSTER)
    assert (model.wanted, model.fingerprint, model.problem) == ("tiny", "ab" * 32, "")
    tried = (Attempt("10.0.0.7:1"),)
    other = checkup.member_facts(OTHER, heard=True, ours=tried)
    assert (other.name, other.state, other.linked, other.heard, other.called) == (
        "mini", "suspect", True, True, True,
    )  # fmt: skip
    assert (other.ours, other.fingerprint, other.model_problem) == (tried, "", "no room")
    assert not checkup.member_facts(replace(OTHER, address=""), heard=False, ours=()).linked


def test_a_snapshot_stays_as_it_was(tmp_path: Path) -> None:
    async def story() -> None:
        parts = alone(tmp_path)
        parts.groups.shown.supervisor.status.follow(ServingState.READY, 3, "", GROUP)
        now = gather(parts)
        parts.groups.shown.supervisor.status.follow(ServingState.RESTARTING, 3, "a rank is gone", GROUP)
        assert [(each.epoch, each.lasted_s) for _, each in now.history] == [(3, None)]
        assert (now.agent.health.state, now.agent.state) == ("ready", ServingState.READY)
        for part, name in ((now, "name"), (now.agent, "kv_room"), (now.cluster, "waiting")):
            with pytest.raises(AttributeError):
                setattr(part, name, "x")
        await parts.close()

    run(story())
