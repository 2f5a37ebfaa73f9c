"""`mlxtp bench`: the rows, the table, and a real endpoint that is measured."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import count
from typing import Any

import pytest

from mlxtp.cli import bench
from mlxtp.cli.bench import BenchAnswer, BenchRow, measure, read, show, wrote
from mlxtp.cli.launch import deployed_as, find_served
from mlxtp.client import AgentClient
from mlxtp.errors import Code, UserError
from mlxtp.verbs import Status

from ..live_cluster import Cluster

pytestmark = pytest.mark.slow

ONE = BenchAnswer(asked_at=10.0, first_at=10.5, ended_at=12.5, prompt=400, tokens=101, drafted=20)


def test_one_answer_counts_from_its_first_token_several_from_when_they_were_asked_for() -> None:
    assert read(ONE) == BenchRow("read", 400, 1, 0.5, 800.0)
    assert read(replace(ONE, cached=100)).rate == 600.0, "what was cached is not read"
    assert wrote([ONE]) == BenchRow("write", 400, 101, 0.5, 50.0, 20)
    late = replace(ONE, asked_at=10.0, first_at=11.5, ended_at=14.0)
    both = wrote([ONE, late])
    assert (both.what, both.tokens, both.first_s, both.drafted) == ("write, 2 at once", 202, 1.5, 40)
    assert both.rate == pytest.approx(202 / 4.0)


def test_the_first_token_is_no_empty_event_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(1)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(clock)))
    texts = [("", None), ("", None), ("a", None), ("b", None), ("", "length")]
    events = [{"choices": [{"text": text, "finish_reason": reason}]} for text, reason in texts]
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}, "choices": []}
    answer = bench._read([*events, usage], 0.0)
    assert (answer.first_at, answer.ended_at) == (3.0, 5.0)


def test_the_table_can_be_pasted() -> None:
    found: dict[str, Any] = {
        "versions": ["mlxtp=1"], "model": "org/m", "context": 4096, "world_size": 2, "backend": "jaccl",
        "kind": "JACCL mesh", "split": [], "replicas": 1,
        "machines": ["Apple M3 Ultra 512 GB", "Apple M4 Max 128 GB"],
        "rows": [asdict(read(ONE)), asdict(wrote([ONE]))],
    }  # fmt: skip
    assert show(found).splitlines() == [
        "mlxtp=1",
        "org/m, context 4096; jaccl of 2, JACCL mesh; Apple M3 Ultra 512 GB; Apple M4 Max 128 GB",
        "",
        "| | prompt | answer | first token | tokens/s | of these drafted |",
        "|---|--:|--:|--:|--:|--:|",
        "| read | 400 | 1 | 0.5 s | 800 |  |",
        "| write | 400 | 101 | 0.5 s | 50 | 20% |",
    ]
    stages = show(found | {"backend": "ring", "kind": "", "world_size": 3, "split": [1, 2, 1]}).splitlines()
    assert stages[1].startswith("org/m, context 4096; ring of 3, pipeline of 1 + 2 + 1 layers; Apple")


def test_the_group_of_a_named_model_is_measured() -> None:
    group = {"state": "ready", "epoch": 4, "backend": "ring", "kind": "ring over Ethernet", "split": [3, 1],
             "members": [{"node_id": "a"}, {"node_id": "b"}]}  # fmt: skip
    big = {"name": "org/big", "model": "org/big@v2",
           "groups": [group, group | {"epoch": 5}, group | {"state": "loading", "epoch": 6}]}  # fmt: skip
    status = {
        "model": "tiny", "epoch": 1, "world_size": 1, "backend": "none", "kind": "", "split": [],
        "deployments": [big],
        "members": [{"node_id": "c", "rank": 0}],
    }  # fmt: skip
    named = bench._group(status, "org/big@v2")
    assert (named["epochs"], named["replicas"], named["macs"]) == ([4, 5], 2, {"a", "b"})
    assert (named["world_size"], named["backend"], named["kind"]) == (2, "ring", "ring over Ethernet")
    assert named["split"] == [3, 1]
    shown = bench._group(status, "tiny")
    assert (shown["epochs"], shown["world_size"], shown["macs"], shown["replicas"]) == ([1], 1, {"c"}, 1)


def test_a_short_name_means_what_it_stands_for_unless_a_deployment_has_it() -> None:
    llama = "mlx-community/Llama-3.2-3B-Instruct-4bit"
    deployed = [{"name": llama, "model": llama}, {"name": "qwen3:8b", "model": "/models/qwen3:8b"}]
    asked = ["llama3.2", "qwen3:8b", "org/big", ""]
    found = [[each["name"] for each in deployed_as(name, deployed)] for name in asked]
    assert found == [[llama], ["qwen3:8b"], [], []]


def test_a_real_endpoint_is_measured_and_one_that_works_is_left_alone(
    one_rank: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"org/big is not served: it is not deployed\. Ready models: tiny"):
        find_served(one_rank.home, "", "org/big")
    assert find_served(one_rank.home, "", "tiny").model == "tiny"
    monkeypatch.setattr(bench, "WRITE_TOKENS", 12)
    agent, said = AgentClient(one_rank.home), list[str]()
    found = measure(find_served(one_rank.home, ""), agent, said.append)
    rows = {row["what"]: row for row in found["rows"]}
    assert set(rows) == {"read", "write", "write, 4 at once", "write, 8 at once"}
    assert 400 < rows["read"]["prompt"] < 700
    assert [rows[what]["tokens"] for what in list(rows)[1:]] == [12, 48, 96]
    assert all(row["rate"] > 0 and row["first_s"] > 0 for row in rows.values())
    assert (found["model"], found["world_size"], len(found["machines"])) == ("tiny", 1, 1)
    assert said[0] == "warming up"

    status = agent.send(Status())
    monkeypatch.setattr(AgentClient, "send", lambda *_: status | {"open_requests": 3})
    with pytest.raises(UserError, match="3 requests are open") as refused:
        measure(find_served(one_rank.home, ""), agent, said.append)
    assert refused.value.code == Code.NOT_READY
