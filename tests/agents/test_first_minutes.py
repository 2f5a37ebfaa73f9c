"""Two Macs, two commands: found, join, ask. What is on the wire meanwhile, and which ports are open."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..hosts import Capture, Host, Hosts, requires_namespaces
from ..live_cluster import SLOWNESS, WAIT_S, rank_processes
from .agents import PROMPT, SECRET, Agent, on_hosts, serving, wait

pytestmark = requires_namespaces

CONTROL, HTTP, MDNS = 52414, 52415, 5353
GOAL_S = 10.0


@dataclass(frozen=True)
class Pair:
    """Two agents that serve together, and what had passed between their hosts when they first did."""

    a: Agent
    b: Agent
    token: str
    capture: Capture
    took_s: float
    """From the second start to an answer from either."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with Hosts(2) as net:
        a, b = on_hosts(folder, net, "anna", "ben")
        with net.capture() as capture:
            a.start()
            token = a.first_token()
            assert serving(a)
            b.start("--join", token)
            took_s = serving(a, b)
        yield Pair(a, b, token, capture, took_s)


def test_the_second_command_is_all_it_takes(pair: Pair) -> None:
    print(
        f"second start to an answer of two ranks from either host: {pair.took_s:.1f} s (goal: {GOAL_S:g} s)"
    )
    assert pair.took_s < 4 * GOAL_S * SLOWNESS
    for agent in (pair.a, pair.b):
        status = agent.status()
        assert (status["world_size"], status["backend"]) == (2, "ring")
        assert sorted(member["name"] for member in status["members"]) == ["anna", "ben"]
        assert {member["rank"] for member in status["members"]} == {0, 1}
        assert agent.chat() == SECRET
    shown = pair.b.command("status").stdout
    assert "ready tiny on 2 Macs" in shown
    assert "anna" in shown


def test_each_agent_names_the_processes_of_its_ranks(pair: Pair) -> None:
    for agent in (pair.a, pair.b):
        assert agent.status()["processes"] == {"tiny#0": rank_processes(agent.home)}


def test_neither_token_nor_text_was_on_the_wire(pair: Pair) -> None:
    """MLX's ring carries activations in the clear, see docs/security.md; no text, nor tokens of text."""
    everything = b"".join(pair.capture.frames)
    assert len(everything) > 100_000
    # The capture sees what is sent in the clear: discovery is.
    assert b"_mlxtp" in everything
    for secret in (pair.token, PROMPT, SECRET, "Repeat exactly", "chat.completion"):
        assert secret.encode() not in everything
        assert secret.lower().encode() not in everything
    control = {
        ends: stream for ends, stream in pair.capture.streams().items() if str(CONTROL) in "".join(ends)
    }
    assert len(control) >= 4


OPEN_NOW = """
import json, psutil
print(json.dumps([
    [c.type.name, c.laddr.ip, c.laddr.port, c.pid] for c in psutil.net_connections("inet")
    if c.status == "LISTEN" or c.type.name == "SOCK_DGRAM"
]))
"""
OPEN_MEANWHILE = """
import json, sys, threading, time
def listening():
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in open(table).readlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                host, port = local.split(":")
                yield ".".join(str(byte) for byte in reversed(bytes.fromhex(host))), int(port, 16)
seen = set()
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
print("watching", flush=True)
while not over.wait(0.005):
    seen.update(listening())
print(json.dumps(sorted(seen)))
"""


@contextlib.contextmanager
def watching(host: Host) -> Iterator[set[tuple[str, int]]]:
    """Yield what listens on a host for TCP, address and port, during the context; filled at its end."""
    seen: set[tuple[str, int]] = set()
    watcher = host.start(
        [sys.executable, "-c", OPEN_MEANWHILE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdout.readline() == "watching\n"
    yield seen
    output, _ = watcher.communicate(timeout=WAIT_S)
    seen.update((address, port) for address, port in json.loads(output))


def documented() -> dict[str, set[tuple[str, int]]]:
    """Address and port of each row of the table in docs/security.md, by TCP and UDP."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (TCP|UDP) \| ([\d.]+) \|", page, re.MULTILINE)
    return {kind: {(at, int(port)) for port, other, at in rows if other == kind} for kind in ("TCP", "UDP")}


def test_the_documented_ports_are_those_of_the_other_tests() -> None:
    assert documented() == {"TCP": {("0.0.0.0", CONTROL), ("127.0.0.1", HTTP)}, "UDP": {("0.0.0.0", MDNS)}}


def test_every_open_port_is_documented(pair: Pair) -> None:
    """While a group runs, the table of docs/security.md is what the system says."""
    for agent in (pair.a, pair.b):
        found = json.loads(agent.host.run([sys.executable, "-c", OPEN_NOW]).stdout)
        assert {pid for *_, pid in found} == {agent.process.pid}
        tcp = {(address, port) for kind, address, port, _ in found if kind == "SOCK_STREAM"}
        udp = {port for kind, _, port, _ in found if kind == "SOCK_DGRAM"}
        assert tcp == documented()["TCP"]
        assert udp == {port for _, port in documented()["UDP"]}


def test_ports_of_a_group_that_forms_are_random_and_few_and_on_one_address(pair: Pair) -> None:
    """One for the decode links, at rank 0; one of MLX's ring on each host."""
    a, b = pair.a, pair.b
    assert a.host is not None
    assert b.host is not None
    with watching(a.host) as on_a, watching(b.host) as on_b:
        _, rank = b.processes()
        rank.kill()
        wait(lambda: a.status().get("state") != "ready", "the group ends", a, b)
        serving(a, b)
    always = {("0.0.0.0", CONTROL), ("127.0.0.1", HTTP)}
    few = {agent.name: len(seen - always) for agent, seen in ((a, on_a), (b, on_b))}
    assert sum(few.values()) >= 1  # some are open for a moment only
    assert all(count <= 2 for count in few.values()), few
    assert sum(few.values()) <= 3, few
    for host, seen in ((a.host, on_a), (b.host, on_b)):
        assert always <= seen
        assert {address for address, _ in seen - always} <= {host.address}
        assert all(port >= 1024 for _, port in seen)
    ports = [port for seen in (on_a, on_b) for _, port in seen - always]
    assert len(set(ports)) == len(ports)
