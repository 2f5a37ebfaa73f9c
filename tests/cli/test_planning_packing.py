"""`mlxtp plan` of several models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.published_models import PUBLISHED, folder_of, published
from mlxtp.cli.main import app
from mlxtp.cli.planning import MacMemory, memory_of, pack
from mlxtp.placement.cost_model import usable_bytes
from mlxtp.placement.planner import PlacementOptions

from ..placement.made_up_macs import cabled, mac, on_lan

DESK = str(Path(__file__).parents[2] / "examples" / "desk.toml")
BIG, SMALL = "llama-3.3-70b-4bit", "llama-3.1-8b-4bit"


def planned(*words: str, status: int = 0) -> str:
    words = tuple(str(folder_of(word)) if word in PUBLISHED else word for word in words)
    made = CliRunner().invoke(app, ["plan", *words, "--machines", DESK])
    assert made.exit_code == status, made.output
    return made.stdout


def test_each_model_gets_macs_and_no_mac_more_than_it_has() -> None:
    members = on_lan([mac(i, memory=64) for i in range(3)])
    wanted = [(published(name), PlacementOptions()) for name in (BIG, SMALL, SMALL, SMALL)]
    packed = pack(members, wanted)
    assert [one.shape.name for one in packed] == [BIG, SMALL, SMALL, SMALL]
    assert {one.ranks[0] for one in packed[:3]} == {m.node_id for m in members}  # each has one of its own
    assert all(one.ranks and not one.why for one in packed)
    for member, memory in zip(members, memory_of(members, packed), strict=True):
        assert memory.available == usable_bytes(member)
        assert memory.free >= 0
        assert memory.weights > 0


def test_each_is_a_pipeline_where_that_is_wanted_and_several_macs_can() -> None:
    wanted = [(published(name), PlacementOptions(parallel="pipeline")) for name in (BIG, SMALL)]
    for packed in (pack(on_lan([mac(i, memory=128) for i in range(count)]), wanted) for count in (2, 3)):
        assert [one.plan.chosen.is_pipeline for one in packed] == [True, True]
    assert [len(one.ranks) for one in pack([mac(0, memory=128)], wanted)] == [1, 1]
    members = cabled([mac(i, memory=128) for i in range(2)], [(0, 1)])
    packed = pack(members, [(published(SMALL), PlacementOptions(nodes=2, parallel="tensor"))] * 2)
    assert [one.plan.chosen.backend for one in packed] == ["jaccl", "ring"], "a device serves one group"


def test_a_model_without_room_has_its_reason() -> None:
    members = on_lan([mac(0, memory=64)])
    first, second = pack(members, [(published(BIG), PlacementOptions())] * 2)
    assert first.ranks
    assert not second.ranks
    assert "GB for" in second.why
    (memory,) = memory_of(members, (first, second))
    assert memory == MacMemory(
        members[0].node_id, "a", usable_bytes(members[0]), *(
            getattr(first.plan.chosen.memory[0], part) for part in ("weights", "kv", "headroom")
        )
    )  # fmt: skip


def test_tables_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = planned(BIG, SMALL).splitlines()
    assert lines[0].split() == ["model", "Macs", "request", "first", "token", "tokens/s"]
    for line in lines:
        assert len(line) <= 80 or line.startswith("- ")
    (of_mac,) = (line.split() for line in lines if line.startswith("studio-2"))
    assert float(of_mac[1]) == pytest.approx(sum(map(float, of_mac[2:])), abs=0.21)
    assert sum(line.startswith(f"- {BIG}: ") and "per chat request" in line for line in lines) == 1


def test_json_has_the_same_and_the_workload_decides() -> None:
    made = json.loads(planned(BIG, SMALL, "--workload", "agent", "--json"))
    assert made["workload"]["name"] == "agent"
    assert [each["name"] for each in made["models"]] == [BIG, SMALL]
    for each in made["models"]:
        speed = each["plan"]["chosen"]["speed"]
        assert speed["ttft_s"] > 0
        assert each["plan"]["chosen"]["request_s"] > 0
        assert each["reason"] == ""
    assert {mac["name"] for mac in made["macs"]} == {"studio-1", "studio-2", "book"}
    refused = json.loads(planned("kimi-k2-4bit", "kimi-k2-4bit", "--json", status=1))
    assert refused["models"][0]["plan"] is None
    assert refused["models"][0]["reason"]
