"""Admission and refusal of Macs, with the reasons given; two clusters beside each other on one network."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxtp import __version__
from mlxtp.identity.store import FOLDER, MEMBER, NODE_KEY
from mlxtp.wire.tls import ALPN_CONTROL, ALPN_REQUESTS

from ..hosts import Host, Hosts, requires_namespaces
from ..live_cluster import SLOWNESS, WAIT_S
from .agents import NODE, SECRET, Agent, serving, wait

pytestmark = requires_namespaces

CONTROL = 52414
CUT_S = 1.0
"""docs/security.md: within it a removed member's links are cut."""


@dataclass(frozen=True)
class Lan:
    """A cluster of Anna and Ben, another one of a namesake of Anna, and a host that is free."""

    anna: Agent
    ben: Agent
    namesake: Agent
    free: Host

    def newcomer(self, name: str, *, called: str = "", program: tuple[str, ...] = NODE) -> Agent:
        """An agent on the free host."""
        return Agent(self.anna.home.parent, name, self.free, called=called, program=program)

    def names(self) -> set[str]:
        """Return the members of Anna's cluster, as she sees it."""
        return {member["name"] for member in self.anna.status()["members"]}


@pytest.fixture(scope="module")
def lan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lan]:
    folder = tmp_path_factory.mktemp("lan")
    with Hosts(4) as net:
        one, two, three, four = net.hosts
        namesake = Agent(folder, "namesake", three, called="anna")
        anna, ben = Agent(folder, "anna", one), Agent(folder, "ben", two)
        namesake.start()
        namesake.first_token()
        anna.start()
        ben.start("--join", anna.first_token())
        serving(anna, ben)
        yield Lan(anna, ben, namesake, four)


def test_two_clusters_with_one_name_do_not_mix(lan: Lan) -> None:
    serving(lan.namesake)
    assert lan.namesake.name == lan.anna.name
    ours, theirs = lan.anna.status(), lan.namesake.status()
    assert ours["cluster"] != theirs["cluster"]
    assert (len(ours["members"]), len(theirs["members"])) == (2, 1)
    assert (ours["world_size"], theirs["world_size"]) == (2, 1)
    assert lan.ben.member(lan.anna)["node_id"] == ours["node_id"]
    # Nor do they get into each other's way.
    for agent in (lan.anna, lan.ben, lan.namesake):
        assert not agent.said("WARNING")


def refused(agent: Agent, *flags: str) -> str:
    """Return the last words of an agent that ends because it may not come in."""
    agent.start(*flags)
    assert agent.ended() == 1, agent.log
    last = agent.log.splitlines()[-1]
    assert last.startswith("mlxtp: ")
    return last


def knock(lan: Lan, alpn: str, *files: Path) -> bytes:
    """Return the reply of Anna's control port to a client with this certificate and key, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([alpn])
    if files:
        context.load_cert_chain(*files)

    def connect() -> socket.socket:
        return socket.create_connection((lan.anna.address, CONTROL), WAIT_S)

    heard = b""
    with lan.free.inside(connect) as plain, contextlib.suppress(ssl.SSLError, ConnectionError):
        sock = context.wrap_socket(plain)
        sock.sendall(bytes(64))
        while data := sock.recv(4096):
            heard += data
    return heard


def test_strangers_hear_nothing(lan: Lan) -> None:
    before = lan.anna.status()
    theirs = lan.namesake.home / FOLDER
    for alpn in (ALPN_CONTROL, ALPN_REQUESTS):
        assert knock(lan, alpn) == b""
        assert knock(lan, alpn, theirs / MEMBER, theirs / NODE_KEY) == b""
    ours = lan.ben.home / FOLDER  # not that a member's own would not do
    assert knock(lan, ALPN_REQUESTS, ours / MEMBER, ours / NODE_KEY) != b""
    after = lan.anna.status()
    assert (after["epoch"], after["members"]) == (before["epoch"], before["members"])
    assert lan.ben.chat() == SECRET


def told(agent: Agent, *words: str) -> None:
    """Wait until its person can read these words, in the log and in the status."""

    def reads() -> bool:
        problem = agent.status().get("problem", "")
        return agent.said(*words) and all(word in problem for word in words)

    wait(reads, f"{agent.name} is told: {', '.join(words)}", agent)


def test_who_comes_and_goes(lan: Lan) -> None:
    """Another version, refused by name; with a foreign token; removed while away, and while here."""
    newer = lan.newcomer("carl", program=("tests.agents.changed_node", "version=9.1.0"))
    newer.start("--join", lan.ben.token())
    told(newer, "carl", "mlxtp 9.1.0", f"mlxtp {__version__}", "install the same mlxtp on both")
    wait(lambda: lan.anna.said("carl at", "is refused", "mlxtp 9.1.0"), "so is anna", lan.anna)
    assert lan.anna.member(newer)["state"] == "away"
    newer.stop()

    carl = lan.newcomer("carl")
    carl.start()  # of the right version, with the identity that it has
    serving(lan.anna, lan.ben, carl, ranks=2)
    epoch = lan.anna.status()["epoch"]

    carl.kill()
    ours, theirs = lan.anna.status()["cluster"], lan.namesake.status()["cluster"]
    two_clusters = f"a member of cluster {ours}, the token is for {theirs}"
    assert two_clusters in refused(carl, "--join", lan.namesake.token())
    removed = lan.ben.command("cluster", "remove", "carl")
    assert (removed.returncode, removed.stdout) == (0, "carl is no longer a member\n")
    carl.start()
    words = ("was removed from this cluster", "`mlxtp cluster leave`", "`mlxtp node --join TOKEN`")
    told(carl, *words)
    assert lan.names() == {"anna", "ben"}
    left = carl.command("cluster", "leave")
    assert left.returncode == 0, left.stderr
    assert carl.ended() == 0
    carl.start("--join", lan.anna.token())
    serving(lan.anna, lan.ben, carl, ranks=2)

    at = time.time()
    assert lan.anna.post("remove", node="carl")["saved_by"] == ["ben"]
    assert carl.ended() == 0
    took_s = carl.said_at("the link to anna ended") - at
    print(f"removed: cut after {took_s:.2f} s (goal: {CUT_S:g} s)")
    assert took_s < 4 * CUT_S * SLOWNESS
    assert carl.said("no longer belongs to a cluster")
    again = refused(carl)
    assert all(word in again for word in words)
    assert lan.names() == {"anna", "ben"}
    assert lan.anna.status()["epoch"] == epoch  # nothing of all this has ended the group


@pytest.mark.chaos
def test_a_copied_home_is_told_to_both(lan: Lan) -> None:
    serving(lan.anna, lan.ben)
    copy = lan.newcomer("copy", called="ben")
    shutil.copytree(lan.ben.home, copy.home, ignore=shutil.ignore_patterns("run", "lock", "agent.json"))
    copy.start()
    words = ("a home folder was copied", "remove the folder identity")
    told(lan.ben, *words)
    told(copy, *words)
    assert lan.anna.said(*words)
    copy.stop()
    lan.ben.stop()
    lan.ben.start()
    serving(lan.anna, lan.ben)
    assert lan.anna.status()["problem"] == ""
    shutil.rmtree(copy.home / FOLDER)
    copy.start("--join", lan.anna.token())
    serving(lan.anna, lan.ben, copy, ranks=2)
    assert copy.status()["node_id"] != lan.ben.status()["node_id"]
