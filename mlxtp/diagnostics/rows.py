"""The doctor's table: objects of examination, reasons, and remedies; its findings as JSON and in a terminal.

`docs/doctor.md` is made from the table.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from . import checks
from .facts import ORDER, Finding, Level, MachineFacts


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One line of the doctor's table.

    `looks_at`, `why` and `fix` are for people: the thing examined, its importance, and the remedy. `check`
    yields the findings on one of the `systems`.
    """

    id: str
    title: str
    looks_at: str
    why: str
    fix: str
    check: Callable[[MachineFacts], Iterable[Finding]]
    systems: tuple[str, ...] = ("macos", "linux", "other")


MAC = ("macos",)

ROWS: tuple[CheckRow, ...] = (
    CheckRow(
        "agent", "Agent",
        "whether `mlxtp node` runs with this home and answers",
        "only the agent sees the network as a service does: macOS lets Terminal and ssh through where it "
        "keeps services out",
        "`mlxtp node`; end an agent that hangs, and start it again",
        checks.of_agent,
    ),
    CheckRow(
        "serving", "Serving",
        "the state of the group, why there is none, what the user must fix, failures that are kept",
        "requests wait, or get a 503, until a group is ready",
        "what the sentence says; `mlxtp doctor --postmortem` for a group that failed",
        checks.of_serving,
    ),
    CheckRow(
        "fabric", "Fabric",
        "how the Macs of the group exchange (JACCL or TCP), and which groups are left out, and why",
        "over TCP many models are slower on two Macs than on one",
        "what the finding names; the group is tried again as soon as cables or ports change",
        checks.of_fabric,
    ),
    CheckRow(
        "stages", "Stages",
        "of a pipeline with rank 0 here: how long each stage computes, and waits for the others",
        "all go as fast as the slowest stage",
        "`--split auto`, or by hand fewer layers for that Mac",
        checks.of_stages,
    ),
    CheckRow(
        "system", "System",
        "the version of macOS, or of Linux",
        "MLX needs macOS 14, RDMA over Thunderbolt 26.2",
        "`softwareupdate --list`",
        checks.of_system,
    ),
    CheckRow(
        "rdma", "RDMA",
        "`rdma_ctl status`, `ibv_devices`",
        "without it Macs communicate over TCP, and many models are slower on two Macs than on one",
        "in Recovery: `rdma_ctl enable`",
        checks.of_rdma, MAC,
    ),
    CheckRow(
        "cables", "Cables",
        "each Thunderbolt port with a Mac at the other end: its speed, its RDMA port, hubs in between",
        "a cable in a port without RDMA, a slow one, or a hub costs more than any setting",
        "the port or cable that the finding names",
        checks.of_cables, MAC,
    ),
    CheckRow(
        "bridge", "Bridge",
        "whether `bridge0`, the Thunderbolt bridge, holds the ports while RDMA is enabled, or several "
        "cables",
        "RDMA connections fail with errno 22 as long as it does, so a TCP ring is used; a circle of cables "
        "through bridges is a broadcast storm",
        "`sudo ifconfig bridge0 down`; for good, switch its service off, by the name that the finding has",
        checks.of_bridge, MAC,
    ),
    CheckRow(
        "addresses", "Addresses",
        "whether each cabled port, or the bridge where RDMA is off, has an IPv4 address that stays; the "
        "other networks",
        "neither RDMA nor TCP uses a port without one; a self-assigned one changes with the next cable, "
        "and TCP to it may leave by Wi-Fi",
        "`sudo ifconfig en3 inet ADDRESS netmask 255.255.255.252`, or `sudo networksetup -setmanual` for "
        "good, with the pair and the names that the finding has",
        checks.of_addresses,
    ),
    CheckRow(
        "local-network", "Local network",
        "whether a packet may leave for the group of multicast DNS and for other members, while "
        "loopback works",
        "since macOS 15 a service may be silently kept from the local network (errno 65): it "
        "finds no other Mac, and none finds it",
        "System Settings > Privacy & Security > Local Network, or a LaunchDaemon, which is exempt",
        checks.of_local_network, MAC,
    ),
    CheckRow(
        "firewall", "Firewall",
        "macOS: whether it is on, blocks everything, or blocks this Python. Linux: chains of "
        "netfilter for what comes in, if they may be read",
        "members and clients cannot connect to this machine",
        "`sudo /usr/libexec/ApplicationFirewall/socketfilterfw --unblockapp PYTHON`",
        checks.of_firewall,
    ),
    CheckRow(
        "ports", "Ports",
        "the TCP ports of the agent: its own, or whether they are free",
        "an agent that does not get its ports does not start",
        "end the process that has it, or `--control` and `--http`",
        checks.of_ports,
    ),
    CheckRow(
        "mdns", "Bonjour",
        "whether multicast DNS can be sent, and which Macs are found",
        "members find each other by it; without it, each has to be named by address",
        "a network without guest isolation or VPN; `--peer HOST:PORT`",
        checks.of_mdns,
    ),
    CheckRow(
        "peers", "Other members",
        "each member: whether this machine gets a TCP connection to each of its addresses, and whether the "
        "member has opened one to this machine; why one of the two refused the other; "
        "whether its mlx-metal is made for the same macOS",
        "a group needs connections in both directions",
        "the firewall or the cable at the end that is not reached",
        checks.of_peers,
    ),
    CheckRow(
        "identity", "Identity",
        "the files of the identity and their permissions, validity of certificates, API keys, which Mac "
        "issues join tokens",
        "a Mac without a valid identity is not a member; clients reject an expired certificate",
        "the command that the finding names",
        checks.of_identity,
    ),
    CheckRow(
        "models", "Model files",
        "the fingerprint of the wanted model on each member: a hash of `config.json` and, of each file of "
        "weights, of its name, its size and 1 MiB at its beginning, middle and end. Not of all bytes, nor of "
        "the tokenizer: `mlxtp verify` reads all of a model of the Hub",
        "ranks with different files compute different tokens, so no group is formed of them",
        "`mlxtp verify MODEL --repair` on each for a model of the Hub; for a folder, the same files on all",
        checks.of_models,
    ),
    CheckRow(
        "gpu-memory", "GPU memory",
        "how much the GPU may wire, and whether memory is wired though no model is loaded, or stayed so "
        "after ranks ended",
        "a limit too close to all of the memory freezes a Mac; memory that is not released is lost "
        "to models",
        "`sudo sysctl iogpu.wired_limit_mb=MB` (until the next restart); a restart for memory that is stuck",
        checks.of_gpu_memory, MAC,
    ),
    CheckRow(
        "memory", "Memory",
        "free memory, and on a Mac the kernel's memory pressure",
        "below 256 MiB, this machine and the Macs of its group refuse requests",
        "end other programs, or a smaller model",
        checks.of_memory,
    ),
    CheckRow(
        "power", "Power",
        "mains or battery; on a Mac Low Power Mode, sleep, and what happens after a power cut",
        "a Mac that slows down or sleeps holds up all others",
        "`sudo pmset -a lowpowermode 0`, `sudo pmset -c sleep 0`, `sudo pmset -a autorestart 1`",
        checks.of_power,
    ),
)  # fmt: skip


# --- findings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Examined:
    """A row and its findings, at least one."""

    row: CheckRow
    findings: tuple[Finding, ...]

    @property
    def level(self) -> Level:
        """Level of the worst finding."""
        return max((each.level for each in self.findings), key=ORDER.index)


def examine(rows: Iterable[CheckRow], facts: MachineFacts) -> tuple[Examined, ...]:
    """Return this machine's findings in the order of the rows. Rows without a finding are left out."""
    here = (row for row in rows if facts.machine.system in row.systems)
    found = (Examined(row, tuple(row.check(facts))) for row in here)
    return tuple(each for each in found if each.findings)


def to_json(examined: Sequence[Examined], facts: MachineFacts) -> Mapping[str, Any]:
    """Return the JSON that `mlxtp doctor --json` prints. `docs/doctor.md` names the fields."""
    rows = [
        {
            "id": each.row.id,
            "title": each.row.title,
            "level": each.level,
            "findings": [
                {
                    "level": finding.level,
                    "what": finding.what,
                    "why": (finding.why or each.row.why) if finding.fix else "",
                    "fix": finding.fix,
                }
                for finding in each.findings
            ],
        }
        for each in examined
    ]
    worst = max((each.level for each in examined), key=ORDER.index, default=Level.OK)
    return {
        "level": worst,
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
#: Least number of columns of text, in any terminal.
_LEAST = 40


def show(report: Mapping[str, Any], width: int, *, plain: bool) -> list[Text]:
    """Return lines of at most `width` columns. `plain`: with ASCII marks, for terminals without Unicode."""
    marks = ASCII_MARKS if plain else MARKS
    lines = [_row(row, width, marks) for row in report["rows"]]
    for row in report["rows"]:
        for finding in row["findings"]:
            if finding["fix"]:
                lines += _advice(row["title"], finding, width, marks)
    return [*lines, Text(), _summary(report)]


def _row(row: Mapping[str, Any], width: int, marks: Mapping[str, str]) -> Text:
    """Return a row's worst findings, or all of them if none is bad.

    A bad row has one line, because it appears again below with its remedy.
    """
    level = row["level"]
    bad = level in ("warning", "error")
    worst = [each for each in row["findings"] if each["level"] == level or not bad]
    said, room = "; ".join(each["what"] for each in worst), max(width - _TITLE - 3, _LEAST)
    if bad:
        lines = [textwrap.shorten(said, room, placeholder=" ...")]
    else:
        lines = textwrap.wrap(said, room, break_long_words=False, break_on_hyphens=False)
    words = f"\n{' ' * (_TITLE + 3)}".join(lines)
    return Text.assemble(
        (f"{marks[level]} ", STYLES[level]),
        f"{row['title']:<{_TITLE}} ",
        (words, "" if level == "ok" else STYLES[level]),
    )


def _advice(title: str, finding: Mapping[str, Any], width: int, marks: Mapping[str, str]) -> Iterator[Text]:
    level = finding["level"]
    yield Text()
    yield Text(_wrapped(f"{marks[level]} {title}: {finding['what']}", "  ", width), STYLES[level])
    if level in ("warning", "error"):
        yield Text(_wrapped(f"  why: {finding['why']}", "    ", width))
    # A command stays on one line, so that the user can copy it.
    yield Text(f"  to do: {finding['fix']}")


def _wrapped(words: str, indent: str, width: int) -> str:
    return "\n".join(
        textwrap.wrap(
            words,
            max(width, _LEAST),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _summary(report: Mapping[str, Any]) -> Text:
    levels = [finding["level"] for row in report["rows"] for finding in row["findings"]]
    errors, warnings = levels.count("error"), levels.count("warning")
    if not errors and not warnings:
        return Text("no problems found", STYLES["ok"])
    counts = [
        f"{number} {word}{'s' if number > 1 else ''}"
        for number, word in ((errors, "error"), (warnings, "warning"))
        if number
    ]
    return Text(" and ".join(counts) + "; mlxtp runs none of these commands itself", STYLES[report["level"]])
