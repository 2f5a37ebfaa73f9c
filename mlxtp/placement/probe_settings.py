"""Commands that only the doctor runs, with a parser for each. They only read; none of them needs root.

Those of `probe_macos.py` report what a machine is; these report how it is set. A command that a system lacks
is not installed there, which is a result, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .probe_output import Reading

FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"  #: Its path in macOS; no PATH leads there.
NTP_CONF = "/etc/ntp.conf"  #: The file that names a Mac's time server.
ASK_S = 5.0

_SETTING = re.compile(r"^ {0,8}([A-Za-z]\w{1,39})[ \t]+(\d{1,9})\b", re.ASCII | re.MULTILINE)


def parse_power(text: str) -> Reading[Mapping[str, int]]:
    """Read `pmset -g`, the settings in use: names and whole numbers; times are in minutes."""
    known = "Currently in use:" in text[:20_000]
    found = {name: int(value) for name, value in _SETTING.findall(text[:20_000])} if known else {}
    return Reading(found, () if found else ("power settings",))


def parse_firewall_state(text: str) -> Reading[int | None]:
    """Read `socketfilterfw --getglobalstate`: 0 is off, 1 is on, 2 lets in only what the system needs."""
    found = re.search(r"\(State = (\d)\)", text[:1000])
    return Reading(int(found[1])) if found else Reading(None, ("whether the firewall is on",))


def parse_block_all(text: str) -> Reading[bool | None]:
    """Read `socketfilterfw --getblockall`, in the wording of older and of newer systems."""
    said = text[:1000].lower()
    if "block all" in said and ("enabled" in said) != ("disabled" in said):
        return Reading("enabled" in said)
    return Reading(None, ("whether the firewall lets anything in",))


_VERDICT = re.compile(r"\bis (blocked|permitted|allowed)\b")


def parse_firewall_app(text: str) -> Reading[str]:
    """Read `socketfilterfw --getappblocked PROGRAM`: "allowed", "blocked" or "unlisted"."""
    said = text[:4000].lower()
    if "not part of the firewall" in said:
        return Reading("unlisted")
    found = _VERDICT.findall(said)
    if not found:
        return Reading("", ("what the firewall lets this program do",))
    return Reading("blocked" if found[-1] == "blocked" else "allowed")


_SERVER = re.compile(r"^\s*server\s+([A-Za-z0-9.:-]{1,253})", re.MULTILINE)


def parse_ntp_conf(text: str) -> str:
    """Read the first time server of /etc/ntp.conf, which is the one that macOS uses; empty for none."""
    found = _SERVER.search(text[:10_000])
    return found[1] if found else ""


_OFFSET = re.compile(r"([+-]\d{1,12}\.\d{1,9}) \+/- ")


def parse_sntp(text: str) -> Reading[float | None]:
    """Read `sntp SERVER`: the seconds that this clock is behind; negative when it is ahead.

    Some versions print the time first.
    """
    found = _OFFSET.search(text[:4000])
    return Reading(float(found[1])) if found else Reading(None, ("how far the clock is off",))


def parse_timedatectl(text: str) -> Reading[bool | None]:
    """Read `timedatectl show`, which is `NAME=yes` and `NAME=no`."""
    found = re.search(r"^NTPSynchronized=(yes|no)$", text[:4000], re.MULTILINE)
    return (
        Reading(found[1] == "yes") if found else Reading(None, ("whether the clock follows a time server",))
    )


_MAX_CHAINS = 64


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of netfilter that all incoming packets of this machine pass.

    `closed`: a packet that no rule accepts is dropped or rejected.
    """

    name: str
    closed: bool


_LAST_WORD = re.compile(r"(?:counter packets \d+ bytes \d+ )?(?:drop|reject\b.*)")


def parse_nft(text: str) -> Reading[tuple[Chain, ...]]:
    """Read `nft list ruleset`. An empty text is a system without rules."""
    chains: list[Chain] = []
    name, hooked, closed = "", False, False
    for line in map(str.strip, text[: 1 << 20].splitlines()):
        if line.startswith("chain "):
            name, hooked, closed = line.split()[1][:80], False, False
        elif line.startswith("type filter hook input "):
            hooked, closed = True, "policy drop" in line
        elif line == "}" and hooked:
            chains.append(Chain(name, closed))
            hooked = False
        else:
            closed = closed or _LAST_WORD.fullmatch(line[:400]) is not None
    return Reading(tuple(chains[:_MAX_CHAINS]))
