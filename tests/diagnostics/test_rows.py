"""Every row of the table: what recorded machines make of it, and what is said when something is wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlxtp.cli.about import version_facts
from mlxtp.diagnostics.facts import (
    AgentFacts,
    Attempt,
    Certificate,
    FirewallFacts,
    IdentityFacts,
    MachineFacts,
    MemberFacts,
    ModelFacts,
    PortFacts,
    PowerFacts,
    StageFacts,
)
from mlxtp.diagnostics.rows import FAULTS, ROWS, Examined, examine, to_json
from mlxtp.imports import metal_wheel
from mlxtp.placement.faults import Finding, Level
from mlxtp.placement.probe_macos import Output
from mlxtp.wire.cluster_messages import Interface

from ..placement.recorded_macs import BOOK, FACTORY, MAX, MINI, OLD_BOOK, ULTRA
from . import recorded
from .recorded import Machine

GB = 10**9
NOW = datetime(2026, 11, 22, 15, tzinfo=UTC)
Change = Callable[[MachineFacts], MachineFacts]


@cache
def seen(settings: str, mac: str = MAX) -> MachineFacts:
    return recorded.facts(Path("/nowhere"), Machine(settings, mac))


def well(**changed: Any) -> MachineFacts:
    """A Mac on which everything is as it should be, with an agent that serves, in a cluster of two."""
    found = seen("mac_well")
    forever = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
    facts = replace(
        found,
        now=NOW,
        agent=AgentFacts(
            True, "", "http://127.0.0.1:52415", 4711, "ready", model="tiny", has_rank=True,
            fabric="JACCL mesh on a + b",
            stages=(StageFacts(0, 2, 50.0, 50.0), StageFacts(1, 2, 48.0, 52.0)),
        ),
        program="/opt/python",
        network=replace(
            found.network, multicast=0, listened=True, heard=("mini",),
            ports=(PortFacts("endpoint", "--http", "127.0.0.1:52415", True),),
        ),
        identity=IdentityFacts("c" * 16, "", (Certificate("this member", *forever),), authority_here=True),
        model=ModelFacts("tiny", "ab" * 32),
        members=(MINI_WELL,),
        discovery=True,
    )  # fmt: skip
    return replace(facts, **changed)


MINI_WELL = MemberFacts(
    "mini", "alive", True, True,
    (Attempt("10.0.0.2:52414"),), called=True, fingerprint="ab" * 32,
)  # fmt: skip


def row(facts: MachineFacts, wanted: str) -> Examined:
    (found,) = (each for each in examine(facts) if each.row.id == wanted)
    return found


def worst(facts: MachineFacts, wanted: str) -> Finding:
    examined = row(facts, wanted)
    return next(each for each in examined.findings if each.level == examined.level)


def test_nothing_is_in_the_way_of_a_mac_that_is_well() -> None:
    examined = examine(well())
    assert [each.row.id for each in examined] == [each.id for each in ROWS]
    assert [each.row.id for each in examined if each.level is not Level.OK] == []


def _of(part: str, **fields: Any) -> Change:
    """A part of the facts with other values in some fields."""
    return lambda facts: replace(facts, **{part: replace(getattr(facts, part), **fields)})


def _mini(**fields: Any) -> Change:
    return lambda facts: replace(facts, members=(replace(MINI_WELL, **fields),))


def _mac(name: str) -> Change:
    """The hardware of another recorded Mac."""
    return lambda facts: replace(facts, machine=seen("mac_well", name).machine)


def _set(name: str, *parts: str) -> Change:
    """Set as another recorded Mac is."""

    def change(facts: MachineFacts) -> MachineFacts:
        other = seen(name)
        return replace(facts, **{part: getattr(other, part) for part in parts})

    return change


REFUSED = (Attempt("10.0.0.2:52414", "Connection refused", 61),)
LOOPBACK = Interface("lo0", "127.0.0.1", 8, "loopback", 0, True)
OURS = Attempt("10.0.0.2:52414")
CERTIFICATE = Certificate("HTTPS", NOW - timedelta(days=300), NOW + timedelta(days=3))
SIZE = 128 * GB


def _cable(**fields: Any) -> Change:
    """The one cable of this Mac otherwise."""

    def change(facts: MachineFacts) -> MachineFacts:
        ports = (replace(each, **fields) if each.rdma else each for each in facts.machine.ports)
        return replace(facts, machine=replace(facts.machine, ports=tuple(ports)))

    return change


def _two_on_the_bridge(facts: MachineFacts) -> MachineFacts:
    machine = seen("mac_well", FACTORY).machine
    ports = [replace(each, peer_domain=f"{each.receptacle}") for each in machine.ports[:2]]
    return replace(facts, machine=replace(machine, ports=tuple(ports)))


CASES: list[tuple[str, Change, Level, str, str]] = [
    ("agent", _of("agent", runs_here=False), Level.INFO, "this command's own", "mlxtp node"),
    ("agent", _of("agent", runs_here=False, problem="silent"), Level.ERROR, "did not answer: silent",
     "log"),
    ("serving", _of("agent", state="failed", reason="it broke"), Level.ERROR, "it broke", "mlxtp serve tiny"),
    ("serving", _of("agent", problem_of_cluster="two have one id"), Level.ERROR, "two have one id",
     "as it says"),
    ("serving", _of("agent", state="idle", waiting="too big"), Level.WARNING,
     "tiny is not served: too big", ""),
    ("serving", _of("agent", failures=2), Level.INFO, "something is kept: 2", "--postmortem"),
    ("fabric", _of("agent", state="ready", fabric="JACCL mesh on a + b"), Level.OK, "on a + b serves", ""),
    ("fabric", _of("agent", left_out=("JACCL mesh on a + b is left out",)), Level.WARNING, "is left out",
     "it is tried again"),
    ("stages", _of("agent", stages=(StageFacts(0, 3, 9.0, 1.0), StageFacts(1, 1, 3.0, 7.0))), Level.INFO,
     "too little work", ""),
    ("stages", _of("agent", stages=(StageFacts(0, 6, 90.0, 10.0), StageFacts(1, 2, 28.0, 72.0))),
     Level.WARNING, "rank 1 with 2 layers computes 28%: the others wait for rank 0", "--split auto"),
    ("system", _of("machine", release="13.6"), Level.ERROR, "macOS 13.6 is too old", "softwareupdate"),
    ("system", _of("machine", release="26.1"), Level.INFO, "RDMA over Thunderbolt comes with 26.2",
     "software"),
    ("rdma", _mac(BOOK), Level.WARNING, "RDMA over Thunderbolt is off", "rdma_ctl enable"),
    ("rdma", _mac(OLD_BOOK), Level.INFO, "this Mac has none", ""),
    ("rdma", _cable(formations=1), Level.INFO, "started: 1 over rdma_en3", ""),
    ("rdma", _cable(formations=2), Level.WARNING, "RDMA group over rdma_en3 may need", "restart it when"),
    ("cables", _mac(ULTRA), Level.WARNING, "next to Ethernet", "move the cable"),
    ("cables", _cable(rdma="", gbps=40), Level.WARNING, "(en3) runs at 40 Gb/s", "another cable"),
    ("cables", _cable(rdma=""), Level.WARNING, "(en3) has no RDMA device", "ibv_devices"),
    ("cables", lambda facts: _cable(peer_domain=facts.machine.ports[0].domain)(facts), Level.WARNING,
     "(en3) is cabled to another port of this same Mac", "move that end"),
    ("rdma", _of("machine", release="26.1", rdma="unsupported"), Level.WARNING,
     "macOS 26.1 has no RDMA", "softwareupdate --list"),
    ("bridge", _two_on_the_bridge, Level.WARNING, "holds 2 cables to Macs", "a pair of its own"),
    ("serving", _of("agent", proof="the answers differ"), Level.WARNING, "answers differ", "other cables"),
    ("firewall", _of("firewall", enabled=None, drops=True), Level.INFO, "without a rule are dropped",
     "all TCP ports"),
    ("identity", _of("identity", cluster_id=""), Level.INFO, "belongs to no cluster", "mlxtp node founds"),
    ("identity", _of("identity", https_problem="is unreadable"), Level.ERROR, "unreadable", "as it says"),
    ("power", lambda facts: _of("agent", keep_awake=False)(_of("power", settings={"sleep": 5})(facts)),
     Level.WARNING, "after 5 idle min", "omit --no-keep-awake"),
    ("cables", _mac(OLD_BOOK), Level.INFO, "ports leads to another Mac", ""),
    ("serving", _of("agent", slow_link="ring over Thunderbolt carries 12.5 MB/s, where 3,000"), Level.WARNING,
     "carries 12.5 MB/s", "plug it in again"),
    ("bridge", _mac(MINI), Level.WARNING, "holds the Thunderbolt ports", "sudo ifconfig bridge0 down"),
    ("addresses", _mac(FACTORY), Level.WARNING, "bridge has only 169.254.31.7",
     "sudo networksetup -setmanual 'Thunderbolt Bridge' 10.201."),
    ("addresses", _mac(MINI), Level.WARNING, "Thunderbolt 1 (en2) is cabled",
     "sudo ifconfig en2 inet 10.201."),
    ("addresses", _of("machine", interfaces=(LOOPBACK,)), Level.WARNING, "no network is up", "plug in"),
    ("local-network", _of("network", multicast=65), Level.ERROR, "keeps this process from the local network",
     "LaunchDaemon"),
    ("local-network", _of("network", unicast=(Attempt("10.0.0.2", "No route to host", 65),)), Level.ERROR,
     "errno 65 (No route to host) to 10.0.0.2", "Local Network"),
    ("local-network", _of("network", loopback=False), Level.ERROR, "does not reach itself", "127.0.0.1"),
    ("local-network", _of("agent", runs_here=False), Level.INFO, "tried from the shell", "start the service"),
    ("firewall", _set("mac_troubled", "firewall"), Level.WARNING, "does not know /opt/python",
     "socketfilterfw --add '/opt/python' &&"),
    ("firewall", _of("firewall", enabled=True, app="blocked"), Level.ERROR, "connections to /opt/python",
     "--unblockapp '/opt/python'"),
    ("firewall", _of("firewall", enabled=True, blocks_all=True), Level.ERROR, "blocks all incoming",
     "--setblockall off"),
    ("ports", _of("network", ports=(PortFacts("endpoint", "--http", "127.0.0.1:52415", False, "in use"),)),
     Level.ERROR,
     "endpoint 127.0.0.1:52415 is not available: in use", "sudo lsof -nP -iTCP:52415"),
    ("ports", _of("network", ports=(PortFacts("endpoint", "--http", ":1", False, "in use", by_mlxtp=True),)),
     Level.INFO, "is used by another mlxtp, a demo", "mlxtp doctor --home"),
    ("mdns", _of("network", heard=()), Level.OK, "no other Mac", ""),
    ("mdns", lambda facts: _of("network", heard=())(_mini(heard=False)(facts)), Level.WARNING,
     "no Mac is found, though mini is linked", "--peer HOST:PORT"),
    ("mdns", _mini(heard=False), Level.INFO, "reached by address: mini", ""),
    ("local-network", _of("network", multicast=65), Level.ERROR, "keeps this process",
     "or the app that it was started in"),
    ("local-network", _of("agent", runs_here=False), Level.INFO, "this was tried from the shell",
     "start the service"),
    ("mdns", _of("network", multicast=65), Level.WARNING, "errno 65", "Local Network"),
    ("mdns", _of("network", multicast_problem="some device floods this network"), Level.WARNING, "floods",
     "--peer"),
    ("peers", _mini(unlike="mlx-metal is made for two"), Level.WARNING, "for two",
     "platform.mac_ver() says 26 or newer"),
    ("peers", _mini(ours=REFUSED), Level.WARNING, "does not reach mini: 10.0.0.2:52414 (Connection refused)",
     "on mini"),
    ("peers", _mini(ours=(OURS, Attempt("10.201.0.2:52414", "no answer"))), Level.WARNING,
     "to mini, no way over 10.201.0.2:52414 (no answer)", "cable"),
    ("peers", _mini(ours=(OURS, Attempt("192.168.9.9:52414", "no answer", shared=False))), Level.OK,
     "both ways", ""),
    ("peers", _mini(called=False), Level.OK, "mini: reached; `mlxtp doctor` on mini shows the way back", ""),
    ("peers", _mini(ours=()), Level.OK, "mini has a link", ""),
    ("peers", _mini(linked=False, state="dead", ours=REFUSED), Level.WARNING, "mini is gone: 10.0.0.2:52414",
     "start mlxtp on mini"),
    ("peers", _mini(linked=False, state="left", refused="protocol 13, mini protocol 12: install"),
     Level.WARNING, "mini has no link: the last one was refused: protocol 13", "one of the two"),
    ("peers", _mini(linked=False, state="left", ours=REFUSED), Level.INFO, "mini has stopped", "start mlxtp"),
    ("peers", _mini(linked=False, state="dead"), Level.WARNING, "10.0.0.2:52414 takes connections", "logs"),
    ("identity", _of("identity", problem="/h/identity is open to others; run: chmod 700 '/h/identity'"),
     Level.ERROR, "chmod 700", "as it says"),
    ("identity", _of("identity", keys_problem="keys.json is damaged"), Level.ERROR, "damaged", "as it says"),
    ("identity", _of("identity", certificates=(CERTIFICATE,)), Level.WARNING, "HTTPS ends on 2026-11-25",
     "renew it"),
    ("identity", _of("identity", certificates=(replace(CERTIFICATE, ends=NOW - timedelta(1)),)), Level.ERROR,
     "ended on 2026-11-21", "renew it"),
    ("identity", _of("identity", certificates=(replace(CERTIFICATE, renews=True),)), Level.OK,
     "holds until", ""),
    ("identity", _of("identity", certificates=(replace(CERTIFICATE, begins=NOW + timedelta(1)),)),
     Level.ERROR,
     "holds from 2026-11-23 on", "clock"),
    ("identity", _of("network", beyond_loopback=True), Level.WARNING, "there is no API key",
     "mlxtp key create"),
    ("identity", _of("identity", authority_here=False, holders=("mini", "air")), Level.INFO,
     "only mini and air issues", ""),
    ("identity", _of("identity", authority_here=False, holders=("mini",), holders_here=("mini",)), Level.OK,
     "join tokens are issued by mini", ""),
    ("identity", _of("identity", holders=("mini",)), Level.OK, "issued here and by mini", ""),
    ("identity", _of("identity", alone=False), Level.INFO, "only this Mac can let others in",
     "mlxtp cluster authority add"),
    ("identity", _of("identity", authority_here=False, authority_lost=True, holders=("mini",)), Level.WARNING,
     "authority.pem is missing", "on mini: mlxtp cluster authority add"),
    ("models", _mini(fingerprint="cd" * 32), Level.ERROR, "this machine abababab, mini cdcdcdcd",
     "the same files"),
    ("models", _mini(fingerprint="", model_problem="it is gated"), Level.WARNING,
     "mini lacks tiny: it is gated",
     "on mini"),
    ("models", _of("model", fingerprint="", problem="the disk is full"), Level.ERROR, "the disk is full",
     "as it"),
    ("models", _of("model", fingerprint="", problem="it needs 40 GB more: make room (`mlxtp list`)"),
     Level.ERROR, "it needs 40 GB more", "make room (`mlxtp list`)"),
    ("models", lambda facts: _of("model", wanted="org/m")(_mini(fingerprint="cd" * 32)(facts)), Level.ERROR,
     "the files of org/m differ", "`mlxtp verify org/m --repair` on each"),
    ("models", _mini(fingerprint=""), Level.INFO, "on mini", ""),
    ("gpu-memory", _of("machine", memory_bytes=SIZE, gpu_bytes=SIZE - 2 * GB), Level.WARNING,
     "leaves macOS 2.0 GB", "sudo sysctl iogpu.wired_limit_mb=114440"),
    ("gpu-memory", lambda facts: _of("agent", has_rank=False)(_of("machine", wired_bytes=90 * GB)(facts)),
     Level.WARNING, "90.0 GB are wired although", "restart"),
    ("gpu-memory", _of("agent", left_wired="90.0 GB stayed wired after ranks ended"), Level.WARNING,
     "90.0 GB stayed wired", "restart"),
    ("memory", _of("machine", free_bytes=GB // 10), Level.ERROR, "requests are refused", "mlxtp plan"),
    ("memory", lambda facts: replace(facts, pressure_critical=True), Level.ERROR,
     "macOS calls the pressure critical", "end programs"),
    ("memory", _of("machine", free_bytes=GB), Level.WARNING, "1.0 GB of", "end programs"),
    ("power", _set("mac_troubled", "power"), Level.WARNING, "Low Power Mode", "sudo pmset -a lowpowermode 0"),
    ("power", _of("power", settings={"powermode": 1}), Level.WARNING, "Low Power Mode", "lowpowermode 0"),
    ("power", _of("power", settings={"sleep": 5}), Level.INFO, "after 5 idle min", "sudo pmset -c sleep 0"),
    ("power", _set("mac_guarded", "power"), Level.INFO, "after a power cut this Mac stays off",
     "autorestart 1"),
    ("power", lambda facts: replace(_mac(BOOK)(facts), power=PowerFacts()), Level.WARNING, "battery",
     "plug it in"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "level", "what", "fix"), CASES)
def test_what_is_wrong_is_said(name: str, change: Change, level: Level, what: str, fix: str) -> None:
    examined = row(change(well()), name)
    assert examined.level == level
    found = [each for each in examined.findings if each.level == level and what in each.what]
    assert [fix in each.fix for each in found] == [True]
    assert found[0].fix or level in (Level.OK, Level.INFO), "what is wrong can be mended"


@pytest.mark.parametrize(
    ("problem", "why"),
    [("it needs 40 GB more: make room", "all of it has room"), ("it is gated", "takes no part in its group")],
)
def test_why_a_model_that_is_not_here_matters(problem: str, why: str) -> None:
    facts = _of("model", fingerprint="", problem=problem)(
        _mini(fingerprint="", model_problem=problem)(well())
    )
    found = [each for each in row(facts, "models").findings if each.fix]
    assert len(found) == 2
    assert all(why in each.why for each in found)


def test_every_row_and_every_fault_has_a_case() -> None:
    bad = {name for name, _, level, _, _ in CASES if level is not Level.OK}
    assert bad == {each.id for each in ROWS}
    told = {
        found.id for _, change, *_ in CASES for each in examine(change(well())) for found in each.findings
    }
    assert {fault.id for fault in FAULTS if fault.row} - told == set()


def test_what_is_well_stands_before_what_is_worth_knowing() -> None:
    found = row(_of("agent", runs_here=False)(well()), "local-network").findings
    assert [each.level for each in found] == [Level.OK, Level.INFO]


def test_without_other_clients_nothing_is_wrong_with_a_firewall() -> None:
    closed = well(firewall=FirewallFacts(True, True), identity=IdentityFacts(), members=())
    assert row(closed, "firewall").level == Level.INFO
    joining = _of("agent", runs_here=False)(closed)
    assert row(joining, "firewall").level == Level.ERROR
    assert row(replace(joining, alone=True), "firewall").level == Level.INFO
    assert row(_of("network", multicast=65)(closed), "mdns").level == Level.INFO


@pytest.mark.parametrize(
    ("settings", "firewall"),
    [("linux_open", "no rule keeps connections out"),
     ("linux_closed", "connections without a rule are dropped")],
)  # fmt: skip
def test_a_linux_machine(tmp_path: Path, settings: str, firewall: str) -> None:
    machine = Machine(settings)
    found = recorded.facts(tmp_path, machine, "linux", http_tls=True)
    found = replace(found, identity=replace(found.identity, cluster_id="c" * 16))
    assert firewall in worst(found, "firewall").what
    if settings == "linux_closed":  # a rule for the control port does not let a group form
        assert "fresh TCP ports" in worst(found, "firewall").what
        assert "all TCP ports" in worst(found, "firewall").fix
    macs_only = {each.id for each in ROWS if "linux" not in each.systems}
    assert macs_only == {"rdma", "cables", "bridge", "local-network", "gpu-memory"}
    assert not macs_only & {each.row.id for each in examine(found)}
    assert machine.asked == ["nft list ruleset"]


def test_a_mac_of_which_nothing_is_known(tmp_path: Path) -> None:
    """Every command fails: that is said, and nothing is called right or wrong for it."""

    async def fails(name: str, arguments: tuple[str, ...], deadline_s: float) -> Output:
        await asyncio.sleep(0)
        return Output(problem="did not answer within 5 s")

    machine = Machine("mac_well")
    machine.run = fails  # type: ignore[method-assign]
    facts = recorded.facts(tmp_path, machine)
    examined = examine(facts)
    unknown = {each.row.id for each in examined if any("not known" in f.what for f in each.findings)}
    assert {"system", "rdma", "cables", "bridge", "firewall", "power", "memory", "gpu-memory"} <= unknown
    assert [each.row.id for each in examined if each.level in (Level.WARNING, Level.ERROR)] == []


def test_only_looking_commands_are_run(tmp_path: Path) -> None:
    machine = Machine("mac_well")
    recorded.facts(tmp_path, machine)
    own = [each for each in machine.asked if each.split()[0] in ("pmset", recorded.FIREWALL)]
    assert sorted(own) == sorted(["pmset -g batt", *recorded.said("mac_well")])
    assert not [each for each in machine.asked if "sudo" in each or "--set" in each]


def test_the_report_has_a_reason_for_each_task() -> None:
    facts = _of("network", multicast=65)(well())
    report = to_json(examine(facts), facts)
    assert (report["level"], report["looked"], report["system"]) == ("error", "agent", "macos")
    (found,) = (each for each in report["rows"] if each["id"] == "local-network")
    assert found["findings"][0]["why"].startswith("since macOS 15")
    assert all(each["why"] for row in report["rows"] for each in row["findings"] if each["fix"])


def test_a_process_that_macos_keeps_out_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As it shows itself there: packets to the network are refused, those to itself are not."""

    def refused(_addresses: object) -> None:
        raise OSError(65, "No route to host")

    monkeypatch.setattr("mlxtp.diagnostics.checkup.send_something", refused)
    found = recorded.facts(tmp_path, Machine("mac_well"))
    assert (found.network.multicast, found.network.loopback) == (65, True)
    assert row(found, "local-network").level == Level.ERROR


def test_the_wheel_of_mlx_metal_is_known_by_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "mlx_metal-0.32.4.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: mlx-metal\nVersion: 0.32.4\n")
    (about / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-macosx_26_0_arm64\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert metal_wheel() == "macosx_26_0_arm64"
    assert version_facts(tmp_path)["mlx-metal made for"] == "macosx_26_0_arm64"
    (about / "WHEEL").unlink()
    assert metal_wheel() == ""


def test_a_look_that_never_ends_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    monkeypatch.setattr("mlxtp.diagnostics.checkup.LOOK_S", 0.05)
    monkeypatch.setattr("mlxtp.diagnostics.checkup.identity_here", lambda settings: held.wait(60))
    try:
        found = recorded.facts(tmp_path, Machine("mac_well"))
    finally:
        held.set()
    assert found.identity.problem == "the home could not be read within 0.05 s"
