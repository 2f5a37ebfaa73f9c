"""Three Macs that share a model of four layers as a pipeline, by hand and by what is set."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from ..hosts import Hosts, requires_namespaces
from .agents import SECRET, Agent, on_hosts, serving, wait
from .test_going_on import goes_on

pytestmark = requires_namespaces


@pytest.fixture
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Agent, Agent]]:
    folder = tmp_path_factory.mktemp("three")
    with Hosts(3) as net:
        a, b, c = on_hosts(folder, net, "anna", "ben", "cleo")
        a.start("--parallel", "pipeline")
        b.start("--join", a.first_token(), "--parallel", "pipeline")
        wait(lambda: a.member(b).get("state") == b.member(a).get("state") == "alive", "two members", a, b)
        c.start("--join", b.token(), "--parallel", "pipeline")
        wait(
            lambda: all(len(agent.status()["members"]) == 3 for agent in (a, b)),
            "all know each other",
            a,
            b,
            c,
        )
        yield a, b, c


def group(agent: Agent) -> dict[str, Any]:
    """The group as it is reported: empty without ranks."""
    rows = agent.status().get("deployments", ())
    found = [each for row in rows for each in row["groups"] if each["members"] and each["state"] == "ready"]
    return found[0] if found else {}


@pytest.mark.chaos
def test_a_split_is_served_by_as_many_macs_and_by_no_others(three: tuple[Agent, Agent, Agent]) -> None:
    a, b, c = three
    wrong = b.command("serve", "tiny", "--split", "2,2,1")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "the split 2,2,1 has 5 layers, and tiny has 4" in " ".join(wrong.stderr.split())
    set_by_hand = b.command("serve", "tiny", "--split", "2,1,1")
    assert set_by_hand.returncode == 0, set_by_hand.stderr
    serving(a, b, c, ranks=3)
    for agent in three:
        assert group(agent)["split"] == [2, 1, 1]
        assert agent.chat() == SECRET
    assert "pipeline of 2 + 1 + 1 layers" in c.command("status").stdout
    assert [each["split"] for each in a.status()["deployments"]] == ["2,1,1"]
    c.kill()
    wait(lambda: "the split 2,1,1 needs 3 nodes, 2 are here" in str(a.status()), "two Macs are too few", a, b)
    by_speed = b.command("serve", "tiny", "--split", "auto")
    assert by_speed.returncode == 0, by_speed.stderr
    serving(a, b, ranks=2)  # as the settings have it
    assert sum(group(b)["split"]) == 4
    assert b.chat() == SECRET
    divided = a.command("serve", "tiny", "--parallel", "tensor")
    assert divided.returncode == 0, divided.stderr
    wait(lambda: group(b).get("split") == [], "each Mac has a part of each layer", a, b)
    serving(a, b, ranks=2)
    assert b.chat() == SECRET


@pytest.mark.chaos
@pytest.mark.parametrize("rank", [2, 1, 0])
def test_a_stage_that_stands_still_and_goes_on_later(three: tuple[Agent, Agent, Agent], rank: int) -> None:
    """A stream goes on with the other two. The Mac that comes back ends its old stage and takes part."""
    a, b, c = three
    assert a.command("serve", "tiny", "--nodes", "all").returncode == 0
    serving(a, b, c, ranks=3)
    (stopped,) = (agent for agent in three if a.member(agent)["rank"] == rank)
    gateway, other = (agent for agent in three if agent is not stopped)
    epoch, (_, old) = gateway.status()["epoch"], stopped.processes()
    goes_on(gateway, f"SIGSTOP of the Mac of stage {rank}", lambda: stopped.signal_everything(signal.SIGSTOP))
    serving(gateway, other, ranks=2)
    assert gateway.status()["epoch"] > epoch
    assert old.is_running()
    stopped.signal_everything(signal.SIGCONT)
    wait(lambda: not old.is_running(), "its old stage ends", stopped)
    serving(a, b, c, ranks=3)
