"""Readings of the commands that only the doctor runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.diagnostics.checkup import linux_firewall, mac_firewall
from mlxtp.diagnostics.facts import FirewallFacts
from mlxtp.placement.probe_macos import (
    NOT_INSTALLED,
    Output,
    Reading,
    parse_block_all,
    parse_firewall_app,
    parse_firewall_state,
    parse_nft,
    parse_ntp_conf,
    parse_power,
    parse_sntp,
    parse_timedatectl,
)

from .recorded import FIREWALL, said

GUARDED, TROUBLED, WELL = (said(f"mac_{name}") for name in ("guarded", "troubled", "well"))
STATE, BLOCK_ALL, APP = (f"{FIREWALL} --get{what}" for what in ("globalstate", "blockall", "appblocked"))
SNTP = "sntp time.apple.com"
NFT = "nft list ruleset"


def test_power_settings_are_those_in_use() -> None:
    used = parse_power(WELL["pmset -g"]).value
    assert (used["sleep"], used["autorestart"], used["powermode"]) == (0, 1, 0)
    assert "hibernatefile" not in used
    assert parse_power(TROUBLED["pmset -g"]).value["lowpowermode"] == 1
    assert parse_power("AC Power:\n sleep 1\n").missing == ("power settings",)


def test_what_is_said_of_all_power_sources_counts_too() -> None:
    assert parse_power(GUARDED["pmset -g"]).value["SleepDisabled"] == 1


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (WELL, FirewallFacts(False, False, "unlisted")),
        (GUARDED, FirewallFacts(True, False, "allowed")),
        (TROUBLED, FirewallFacts(True, False, "unlisted")),
        ({**TROUBLED, BLOCK_ALL: "Block all ENABLED! "}, FirewallFacts(True, True, "unlisted")),
        (
            {**GUARDED, BLOCK_ALL: "Firewall has block all state set to enabled."},
            FirewallFacts(True, True, "allowed"),
        ),
        (
            {**TROUBLED, APP: "Incoming connection to the application is blocked "},
            FirewallFacts(True, False, "blocked"),
        ),
    ],
)
def test_the_firewall_of_a_mac(texts: dict[str, str], expected: FirewallFacts) -> None:
    assert mac_firewall(*(Output(texts[each]) for each in (STATE, BLOCK_ALL, APP))) == expected


def test_a_firewall_that_does_not_answer_is_not_known() -> None:
    found = mac_firewall(NOT_INSTALLED, NOT_INSTALLED, NOT_INSTALLED)
    assert found == FirewallFacts(None, False, "", problem="socketfilterfw: is not installed")
    odd = mac_firewall(Output(GUARDED[STATE]), Output("nonsense"), Output(GUARDED[APP]))
    assert odd.problem == "socketfilterfw --getblockall: nonsense"


def test_the_firewall_of_a_linux_machine() -> None:
    assert linux_firewall(Output(said("linux_closed")[NFT])) == FirewallFacts(drops=True)
    assert linux_firewall(Output(said("linux_open")[NFT])) == FirewallFacts(drops=False)
    assert linux_firewall(Output("")) == FirewallFacts(drops=False)
    refused = said("linux_open")[NFT].replace(
        "jump LIBVIRT_INP", "jump X\n\t\treject with icmp port-unreachable"
    )
    assert linux_firewall(Output(refused)) == FirewallFacts(drops=True)
    denied = Output(problem="ended with status 1 (Operation not permitted (you must be root))")
    assert "you must be root" in linux_firewall(denied).problem


@pytest.mark.parametrize(
    ("text", "offset"),
    [(WELL[SNTP], 0.007462), (GUARDED[SNTP], -7300.25), (TROUBLED[SNTP], None), ("", None)],
)
def test_the_clock_against_a_time_server(text: str, offset: float | None) -> None:
    assert parse_sntp(text).value == offset


def test_the_time_server_is_the_one_the_system_asks() -> None:
    assert parse_ntp_conf("# comment\nserver time.euro.apple.com\nserver other\n") == "time.euro.apple.com"
    assert parse_ntp_conf("driftfile /var/db/ntp.drift\n") == ""


def test_whether_linux_follows_a_time_server() -> None:
    command = "timedatectl show --property=NTPSynchronized"
    assert parse_timedatectl(said("linux_open")[command]).value is True
    assert parse_timedatectl(said("linux_closed")[command]).value is False
    assert parse_timedatectl("Failed to connect to bus").missing


PARSERS: list[Callable[[str], Reading[Any]]] = [
    parse_power, parse_firewall_state, parse_block_all, parse_firewall_app, parse_sntp, parse_timedatectl,
    parse_nft,
]  # fmt: skip


@given(
    text=st.text() | st.sampled_from([*GUARDED.values(), *said("linux_open").values()]).map(lambda t: t[7:-3])
)
def test_no_text_is_too_much_for_a_parser(text: str) -> None:
    assert all(isinstance(parse(text), Reading) for parse in PARSERS)
    assert isinstance(parse_ntp_conf(text), str)


def test_a_megabyte_of_rules_takes_no_time() -> None:
    began = time.process_time()
    assert parse_nft("chain x {\n type filter hook input priority 0; policy accept;\n" * 20_000).value == ()
    assert time.process_time() - began < 1
