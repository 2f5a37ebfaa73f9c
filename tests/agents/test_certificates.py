"""Certificates in the lives of real agents: clocks that are wrong by years, ends, renewal while they run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxtp.identity.store import Store
from mlxtp.identity.validity import DAY_S, own_time
from mlxtp.wire.certificates import MemberCertificates, read_node

from .agents import NODE, Agent, wait
from .test_one_machine import free_port

TEN_YEARS = 3650 * DAY_S


class Desk:
    """Agents on this machine's loopback; the first one founds the cluster."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.agents: list[Agent] = []
        self._first = ""

    def agent(self, name: str, *, ahead_s: float = 0.0) -> Agent:
        """An agent whose clock is ahead by so many seconds."""
        port = free_port()
        self._first = self._first or f"127.0.0.1:{port}"
        program = ("tests.agents.changed_node", f"clock={ahead_s}") if ahead_s else NODE
        made = Agent(
            self._folder, name, None, "--http", "127.0.0.1:0", "--control", f"127.0.0.1:{port}",
            "--no-discovery", "--peer", self._first, program=program,
        )  # fmt: skip
        self.agents.append(made)
        return made


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    for agent in made.agents:
        agent.close()


def ends(agent: Agent) -> float:
    """The end of the certificate that is in its files now."""
    membership = Store(agent.home).load().membership
    assert membership is not None
    return read_node(membership.certificate).ends


def together(*agents: Agent) -> None:
    """Wait until each of them has a link to each other one."""

    def linked() -> bool:
        return all(a.member(b).get("state") == "alive" for a in agents for b in agents if a is not b)

    wait(linked, "all are linked", *agents)


def ended(agent: Agent, holder: Agent, days: float) -> None:
    """Give it, while it is off, a certificate that ended so many days ago."""
    store, authority = Store(holder.home), Store(holder.home).load().authority
    assert authority is not None
    own = Store(agent.home)
    identity, at = own.load(), own_time() - (days + 365) * DAY_S
    old = authority.certify(identity.node_id, identity.key.public_key(), at, 365 * DAY_S)
    own.save_membership(MemberCertificates(old, store.load().membership.authority))  # type: ignore[union-attr]
    assert ends(agent) < own_time()


def authority(agent: Agent) -> bytes:
    """The authority that it trusts, once no other one counts and its certificate is of it; else none."""
    held = Store(agent.home).load().membership
    return held.authority if held is not None and held.moved and not held.former else b""


@pytest.mark.chaos
@pytest.mark.slow
def test_neither_wrong_clocks_nor_absence_nor_another_authority_cost_a_membership(desk: Desk) -> None:
    """Ben's clock is ten years ahead, Carl's stands at 1970. Carl was off for two years, and in a rotation.

    When the former key ends at once meanwhile, he needs a token, and keeps his node id."""
    anna, ben = desk.agent("anna"), desk.agent("ben", ahead_s=TEN_YEARS)
    carl = desk.agent("carl", ahead_s=60.0 - own_time())
    anna.start()
    ben.start("--join", anna.first_token())
    together(anna, ben)
    carl.start("--join", ben.token())
    together(anna, ben, carl)
    for agent in (anna, ben, carl):
        assert own_time() + 364 * DAY_S < ends(agent) < own_time() + 366 * DAY_S
        assert not agent.said("certificate", "ended")
    assert "3650 days ahead of the cluster's time" in ben.command("doctor", "--json").stdout
    before, node_id = authority(anna), carl.status()["node_id"]

    carl.kill()
    ended(carl, anna, 730)
    done = anna.command("cluster", "authority", "rotate")
    assert done.returncode == 0, done.stderr
    for words in ("the cluster has another authority", "moved: anna and ben; to come: carl"):
        assert words in done.stdout
    assert "to come: carl" in ben.command("cluster", "members").stdout
    carl.start()
    wait(lambda: authority(carl) not in (b"", before), "carl moves", anna, ben, carl)
    wait(lambda: authority(anna) == authority(ben) == authority(carl), "all have moved", anna, ben, carl)
    assert ends(carl) > own_time() + 364 * DAY_S
    together(anna, ben, carl)
    assert anna.said("anna renews the certificate of carl")
    assert anna.said("the former authority of the cluster has ended")

    carl.kill()
    asked = anna.command("cluster", "authority", "rotate", "--at-once")
    assert asked.returncode == 1
    assert "carl must join again with a token" in asked.stderr
    done = anna.command("cluster", "authority", "rotate", "--at-once", "--yes")
    assert done.returncode == 0, done.stderr
    assert "the former one has ended" in done.stdout
    wait(lambda: authority(anna) == authority(ben) != authority(carl), "two have moved", anna, ben)
    for words in ("the cluster has another authority", "if the cluster's authority was rotated while"):
        carl.start()
        wait(lambda words=words: words in carl.status().get("problem", ""), words, anna, carl)
        assert "`mlxtp node --join TOKEN`" in carl.status()["problem"]
        carl.kill()
        last = authority(anna)
        assert anna.command("cluster", "authority", "rotate", "--at-once", "--yes").returncode == 0
        wait(lambda last=last: authority(anna) == authority(ben) not in (b"", last), "another", anna, ben)
    carl.start("--join", ben.token())
    together(anna, ben, carl)
    assert (carl.status()["node_id"], carl.status()["problem"]) == (node_id, "")
    audited = (anna.home / "audit.jsonl").read_text()
    for event in ("authority_rotated", "authority_ended", "certificate_renewed"):
        assert event in audited
