"""Rows of the doctor: why each matters, what it shows apart from faults, and their reports.

The faults are in `placement/faults.py` and `checks.py`. `docs/doctor.md` is generated from both.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.text import Text

from ..placement import faults
from ..placement.faults import ORDER, THUNDERBOLT_5_GBPS, Finding, Level, is_older, place, version
from ..wire.cluster_messages import Machine
from .checks import OF_FACTS, SHOWN, certificate_state, fingerprints, gb, names, stage_shares
from .facts import MachineFacts

FAULTS = (*faults.FAULTS, *OF_FACTS)
ok = partial(Finding, Level.OK)
info = partial(Finding, Level.INFO)  #: Worth knowing, or unknown.


# --- rows, in their order ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One line of the doctor, on the `systems`. `why` explains its importance if a fault does not.

    `state` yields what it shows apart from faults; its flag says whether one is a warning or an error.
    """

    id: str
    title: str
    why: str
    systems: tuple[str, ...]
    state: RowState


RowState = Callable[[MachineFacts, bool], Iterable[Finding]]
MAC = ("macos",)
ROWS: list[CheckRow] = []


def _row(
    name: str, title: str, why: str, systems: tuple[str, ...] = ("macos", "linux", "other")
) -> Callable[[RowState], RowState]:
    def add(state: RowState) -> RowState:
        ROWS.append(CheckRow(name, title, why, systems, state))
        return state

    return add


@_row("agent", "Agent", "only the agent sees the network as a service does, which macOS may keep out")
def _agent(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    agent = facts.agent
    if agent.runs_here:
        yield ok(f"runs as process {agent.pid}, answers at {agent.url}; the findings below are its own")


@_row("serving", "Serving", "requests wait, or get a 503, until a group is ready")
def _serving(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    agent = facts.agent
    if agent.state == "ready":
        yield ok(f"{agent.model or 'a model'} is served")
    elif agent.state and agent.state != "failed" and not (facts.model.wanted and agent.waiting):
        why = agent.reason or agent.waiting
        yield info(agent.state + (f": {why}" if why not in ("", agent.problem_of_cluster) else ""))


@_row("fabric", "Fabric", "over TCP many models are slower on two Macs than on one")
def _fabric(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    if facts.agent.fabric and facts.agent.state == "ready":
        yield ok(f"{facts.agent.fabric} serves")


@_row("stages", "Stages", "all go as fast as the slowest stage")
def _stages(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    if facts.agent.stages and not bad:
        shares = stage_shares(facts)
        yield ok(shares) if shares else info("too little work since the model was loaded to judge them")


@_row("system", "System", "MLX needs macOS 14, RDMA over Thunderbolt 26.2")
def _system(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    machine = facts.machine
    if machine.system != "macos":
        yield ok(f"{machine.release or machine.system}, kernel {machine.build}")
    elif not version(machine.release):
        yield info("the version of macOS is not known")
    elif not is_older(machine):
        yield ok(f"macOS {machine.release} ({machine.build}), {machine.model}, {machine.chip}")


@_row("rdma", "RDMA", "over TCP many models are slower on two Macs than on one", MAC)
def _rdma(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    machine = facts.machine
    if unread := _unread(machine, "rdma_ctl", "ibv_devices", "ibv_devinfo"):
        yield info(unread)
    elif machine.rdma == "enabled":
        devices = [port.rdma for port in machine.ports if port.rdma]
        yield ok(f"enabled; devices: {', '.join(devices) or 'none'}")
    elif not bad:
        fast = any(port.gbps >= THUNDERBOLT_5_GBPS for port in machine.ports)
        why = "macOS is older than 26.2" if is_older(machine) else "it takes Thunderbolt 5"
        yield info(f"this Mac has none{'' if fast else f': {why}'}")
    if counted := [port for port in machine.ports if port.formations]:
        each = ", ".join(f"{port.formations} over {port.rdma}" for port in counted)
        yield info(f"RDMA groups that serve, or whose ranks were killed since this Mac started: {each}")


@_row("cables", "Cables", "a slow cable, or a port without RDMA, costs more than any setting", MAC)
def _cables(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    machine = facts.machine
    cabled = [port for port in machine.ports if port.peer_domain]
    if unread := _unread(machine, "system_profiler", "networksetup"):
        yield info(unread)
    elif not cabled:
        yield info(f"none of {len(machine.ports)} Thunderbolt ports leads to another Mac")
    else:
        yield from (ok(f"{place(port)} leads to another Mac, {port.gbps or '?'} Gb/s") for port in cabled)


@_row("bridge", "Bridge", "ports that it holds carry no RDMA", MAC)
def _bridge(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    up = facts.machine.bridge_up
    if unread := _unread(facts.machine, "ifconfig"):
        yield info(unread)
    elif not bad:
        yield ok("bridge0 is up, and not in the way: there is no RDMA" if up else "bridge0 is down")


@_row("addresses", "Addresses", "neither RDMA nor TCP uses a cable without one that stays")
def _addresses(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    machine = facts.machine
    for port in machine.ports:
        own = [each.address for each in machine.interfaces if each.name == port.interface and each.up]
        if port.peer_domain and own:
            yield ok(f"{place(port)} has {', '.join(own)}")
    up = [each for each in machine.interfaces if each.up]
    networks = [f"{each.address} ({each.name})" for each in up if each.kind != "thunderbolt"]
    yield ok(f"networks: {', '.join(networks[:6]) or 'none but cables'}")


@_row("local-network", "Local network", "since macOS 15 it may keep a service out, which finds no Mac", MAC)
def _local_network(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    if bad:
        return
    if facts.network.multicast is None and not facts.network.unicast:
        yield info("not known: no network is up that could be tried")
    else:
        yield ok("this process may send into the local network")


@_row("firewall", "Firewall", "members and clients cannot connect to this machine")
def _firewall(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    wall = facts.firewall
    if wall.problem:
        yield info(f"not known: {wall.problem}")
    if wall.enabled is False:
        yield ok("off")
    elif wall.enabled and wall.app == "allowed" and not wall.blocks_all:
        yield ok(f"on, and lets others in to {facts.program}")
    elif wall.drops is False:
        yield ok("no rule keeps connections out")
    elif (wall.enabled or wall.drops) and not facts.among_others:
        yield info("on; no other machine has to connect")


@_row("ports", "Ports", "an agent that does not get its ports does not start")
def _ports(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    for port in facts.network.ports:
        if not port.problem:
            yield ok(f"{port.name} {port.address} {'is ours' if port.ours else 'is free'}")


@_row("mdns", "Bonjour", "without it, each member has to be named by address")
def _mdns(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    network = facts.network
    missed = [each.name for each in facts.members if each.linked and not each.heard]
    if not facts.discovery:
        yield info("switched off (--no-discovery, --alone): others are found by address only")
    elif network.multicast_problem or network.multicast:
        if not bad:
            yield info("nothing can be sent; no other machine has to be found")
    elif not network.listened:
        yield info("not known: discovery was not tried")
    elif not bad:
        yield ok(f"found: {names(network.heard) or 'no other Mac'}")
        if missed:
            yield info(f"not found by multicast, but reached by address: {names(missed)}")


@_row("peers", "Other members", "a group needs connections in both directions")
def _peers(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    if not facts.members:
        yield info("there are none" if facts.identity.cluster_id else "this machine belongs to no cluster")
    for member in facts.members:
        there = member.answering
        if member.linked and not member.ours:
            yield ok(f"{member.name} has a link")
        elif member.linked and there:
            other = f"reached; `mlxtp doctor` on {member.name} shows the way back"
            yield ok(f"{member.name}: {'both ways' if member.called else other}")
        elif there and not member.state and not member.refused:
            yield ok(f"{member.name} takes connections at {names(there)}; only an agent knows the way back")


@_row("identity", "Identity", "a Mac without a valid one is no member; clients reject an expired certificate")
def _identity(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    identity = facts.identity
    for each in identity.certificates:
        if not certificate_state(each, facts):
            until = "" if each.ends.year == 9999 else f" until {each.ends:%Y-%m-%d}"
            yield ok(f"the certificate of {each.name} holds{until}")
    if identity.keys and not identity.keys_problem:
        yield ok(f"API keys: {identity.keys}")
    if identity.problem or not identity.cluster_id:
        return
    others = " and ".join(identity.holders)
    if identity.authority_here:
        yield ok(f"join tokens are issued {f'here and by {others}' if others else 'here'}: `mlxtp token`")
    elif not facts.agent.runs_here:
        yield info("not known whether a Mac can join: only an agent knows which Macs issue join tokens")
    elif identity.holders_here:
        yield ok(f"join tokens are issued by {' and '.join(identity.holders_here)}: `mlxtp token`")
    else:
        who = others or "the Mac that founded the cluster"
        yield info(f"no Mac can join now: only {who} issues join tokens, and cannot be reached")


@_row("models", "Model files", "ranks with different files form no group")
def _models(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    model = facts.model
    if not facts.identity.cluster_id:
        yield info("there is no other member to compare with")
        return
    if not model.wanted:
        yield info("no model is wanted" if facts.agent.runs_here else "not known: only an agent knows")
        return
    told = fingerprints(facts)
    known = {each for each in told.values() if each}
    if len(known) == 1:
        count = len([each for each in told.values() if each])
        same = f", the same on {count} machines" if count > 1 else ""
        yield ok(f"{model.wanted}: {known.pop()[:SHOWN]}{same}")
    lacking = {each.name for each in facts.members if each.model_problem}
    lacking |= {"this machine"} if model.problem else set()
    if late := [name for name, each in told.items() if not each and name not in lacking]:
        yield info(f"still looked for or downloaded, or unknown, on {', '.join(late)}")


@_row("gpu-memory", "GPU memory", "too high a limit freezes a Mac; memory that stays wired is lost", MAC)
def _gpu_memory(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    total, limit, wired = facts.machine.memory_bytes, facts.machine.gpu_bytes, facts.machine.wired_bytes
    if total and limit:
        yield ok(f"the GPU may wire {gb(limit)} of {gb(total)}; wired now: {gb(wired)}")
    else:
        yield info("not known: how much memory the GPU may wire")


@_row("memory", "Memory", "below 256 MiB, this machine and the Macs of its group refuse requests")
def _memory(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    machine = facts.machine
    if not machine.free_bytes:
        yield info("not known: how much memory is free")
    elif not bad:
        yield ok(f"{gb(machine.free_bytes)} of {gb(machine.memory_bytes)} are free")


@_row("power", "Power", "a Mac that slows down or sleeps holds up all others")
def _power(facts: MachineFacts, bad: bool) -> Iterator[Finding]:
    if facts.power.problem:
        yield info(f"not known: {facts.power.problem}")
    power = facts.machine.power
    if power == "ac" or (facts.machine.system != "macos" and power != "battery"):
        yield ok("mains")


def _unread(machine: Machine, *commands: str) -> str:
    """Return these commands' notes on facts they could not determine, or ""."""
    return "; ".join([each for each in machine.notes if each.partition(": ")[0] in commands])


# --- reports ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Examined:
    row: CheckRow
    findings: tuple[Finding, ...]

    @property
    def level(self) -> Level:
        return max((each.level for each in self.findings), key=ORDER.index)


def examine(facts: MachineFacts) -> tuple[Examined, ...]:
    """Return this machine's findings in the order of the rows, without rows that have none."""
    row_of = {fault.id: fault.row for fault in FAULTS}
    seen = faults.faults_of(facts.machine) + [each for fault in OF_FACTS for each in fault.found(facts)]
    examined = []
    for row in ROWS:
        found = [each for each in seen if row_of[each.id] == row.id]
        bad = any(each.level in (Level.WARNING, Level.ERROR) for each in found)
        state = list(row.state(facts, bad))
        found = [*found, *state] if bad else [*state, *found]
        if found and facts.machine.system in row.systems:
            examined.append(Examined(row, tuple(found)))
    return tuple(examined)


def to_json(examined: Sequence[Examined], facts: MachineFacts) -> Mapping[str, Any]:
    """Return the JSON that `mlxtp doctor --json` prints. `docs/doctor.md` names the fields."""

    def of(each: Finding, row: CheckRow) -> Mapping[str, str]:
        why = (each.why or row.why) if each.fix else ""
        return {"level": each.level, "what": each.what, "why": why, "fix": each.fix}

    rows = [
        {
            "id": each.row.id,
            "title": each.row.title,
            "level": each.level,
            "findings": [of(finding, each.row) for finding in each.findings],
        }
        for each in examined
    ]
    return {
        "level": max((each.level for each in examined), key=ORDER.index, default=Level.OK),
        "looked": "agent" if facts.agent.runs_here else "command",
        "system": facts.machine.system,
        "name": facts.name,
        "rows": rows,
    }


# --- printing ---------------------------------------------------------------------------------------------

MARKS = {"ok": "✓", "info": "·", "warning": "!", "error": "✗"}
ASCII_MARKS = {"ok": "+", "info": "-", "warning": "!", "error": "x"}
STYLES = {"ok": "green", "info": "dim", "warning": "yellow", "error": "bold red"}
_TITLE = 15
_LEAST = 40  #: Least columns of text in any terminal.
_wrap = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


def show(report: Mapping[str, Any], width: int, *, plain: bool) -> list[Text]:
    """Return lines of at most `width` columns. `plain`: with ASCII marks, for terminals without Unicode."""
    marks = ASCII_MARKS if plain else MARKS
    lines = [_line(row, width, marks) for row in report["rows"]]
    for row in report["rows"]:
        for finding in row["findings"]:
            if finding["fix"]:
                lines += _advice(row["title"], finding, width, marks)
    return [*lines, Text(), _summary(report)]


def _line(row: Mapping[str, Any], width: int, marks: Mapping[str, str]) -> Text:
    """Return a row's worst findings on one line, as they appear again below; or all if none is bad."""
    level, indent = row["level"], " " * (_TITLE + 3)
    bad = level in ("warning", "error")
    worst = [each for each in row["findings"] if each["level"] == level or not bad]
    said, room = "; ".join(each["what"] for each in worst), max(width - len(indent), _LEAST)
    lines = [textwrap.shorten(said, room, placeholder=" ...")] if bad else _wrap(said, room)
    return Text.assemble(
        (f"{marks[level]} ", STYLES[level]),
        f"{row['title']:<{_TITLE}} ",
        (f"\n{indent}".join(lines), "" if level == "ok" else STYLES[level]),
    )


def _advice(title: str, finding: Mapping[str, Any], width: int, marks: Mapping[str, str]) -> Iterator[Text]:
    level, width = finding["level"], max(width, _LEAST)
    what = _wrap(f"{marks[level]} {title}: {finding['what']}", width, subsequent_indent="  ")
    yield Text()
    yield Text("\n".join(what), STYLES[level])
    if level in ("warning", "error"):
        yield Text("\n".join(_wrap(f"  why: {finding['why']}", width, subsequent_indent="    ")))
    # A command stays on one line, so that the user can copy it.
    yield Text(f"  to do: {finding['fix']}")


def _summary(report: Mapping[str, Any]) -> Text:
    levels = Counter(finding["level"] for row in report["rows"] for finding in row["findings"])
    counts = [
        f"{levels[level]} {level}{'s' if levels[level] > 1 else ''}"
        for level in ("error", "warning")
        if levels[level]
    ]
    if not counts:
        return Text("no problems found", STYLES["ok"])
    return Text(" and ".join(counts) + "; mlxtp runs none of these commands itself", STYLES[report["level"]])
