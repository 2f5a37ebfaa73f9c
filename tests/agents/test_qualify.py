"""`mlxtp qualify` on two Macs: every verdict, with a rank killed under streams."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..hosts import Hosts, requires_namespaces
from .agents import Agent, on_hosts, serving, wait

TRIES = (
    *(
        "kernels",
        "speed",
        "exact answers, one Mac",
        "watts",
        "exact answers, pipeline",
        "exact answers, tensor",
    ),
    *("links", "links after a pause", "kill of the rank on this Mac", "memory after an epoch"),
    "kill of the agent on this Mac",
)


def start_again(agent: Agent) -> None:
    """As the service does."""
    agent.ended()
    agent.start()


@pytest.mark.chaos
@requires_namespaces
def test_two_macs_are_qualified(tmp_path: Path) -> None:
    with Hosts(2) as net:
        anna, ben = on_hosts(tmp_path, net, "anna", "ben")
        anna.start()
        ben.start("--join", anna.first_token())
        serving(anna, ben)
        hosts = json.loads(anna.command("cluster", "export").stdout)["hosts"]
        assert sorted(host["ips"][0] for host in hosts) == sorted(host.address for host in net.hosts)
        before = anna.status()["deployments"]
        with ThreadPoolExecutor() as threads:
            again = threads.submit(start_again, anna)
            ended = anna.command("qualify", "--yes", "--kill-agent", "--idle", "1", within_s=180)
            again.result()
        print(ended.stdout, ended.stderr)
        kept = (anna.home / "qualify.json").read_text()
        rows = {row["what"]: row for row in json.loads(kept)["rows"]}
        assert [name for name in rows if not name.startswith("doctor")] == list(TRIES)
        assert {rows[name]["verdict"] for name in TRIES if name not in ("speed", "watts")} <= {
            "ok",
            "warning",
        }
        assert rows["speed"]["verdict"] == rows["watts"]["verdict"] == "left out"
        assert rows["kill of the rank on this Mac"]["figures"]["wrong"] == 0
        assert rows["kill of the rank on this Mac"]["figures"]["longest_s"] > 0.5, (
            "streams stood still until the next group"
        )
        assert rows["exact answers, tensor"]["figures"]["asked"] > 17
        assert not any(name in kept for name in ("anna", "ben", "10.87.", str(tmp_path)))
        assert "Mac 1" in kept
        assert ended.returncode == (any(row["verdict"] == "failed" for row in rows.values()))
        wait(
            lambda: anna.status()["deployments"][0]["groups"][0]["state"] == "ready", "it serves again", anna
        )
        after = anna.status()["deployments"]
        assert [(each["name"], each["nodes"], each["split"]) for each in after] == [
            (each["name"], each["nodes"], each["split"]) for each in before
        ]
