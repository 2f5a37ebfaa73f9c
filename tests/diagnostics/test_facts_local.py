"""Readings of the commands that only the doctor runs."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.diagnostics.checkup import linux_firewall, mac_firewall
from mlxtp.diagnostics.facts import FirewallFacts
from mlxtp.placement.probe_macos import (
    NOT_INSTALLED,
    Output,
    parse_block_all,
    parse_firewall_app,
    parse_firewall_state,
    parse_nft,
    parse_power,
)

from .recorded import FIREWALL, said

GUARDED, TROUBLED, WELL = (said(f"mac_{name}") for name in ("guarded", "troubled", "well"))
STATE, BLOCK_ALL, APP = (f"{FIREWALL} --get{what}" for what in ("globalstate", "blockall", "appblocked"))
NFT = "nft list ruleset"


def test_power_settings_are_those_in_use() -> None:
    used = parse_power(WELL["pmset -g"])
    assert (used["sleep"], used["autorestart"], used["powermode"]) == (0, 1, 0)
    assert "hibernatefile" not in used
    assert (parse_power(TROUBLED["pmset -g"]) or {})["lowpowermode"] == 1
    assert parse_power("AC Power:\n sleep 1\n") is None


def test_what_is_said_of_all_power_sources_counts_too() -> None:
    assert (parse_power(GUARDED["pmset -g"]) or {})["SleepDisabled"] == 1


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
    strict = mac_firewall(Output("(State = 2)"), Output("nonsense"), Output(GUARDED[APP]))
    assert strict.blocks_all
    off = mac_firewall(Output(WELL[STATE]), Output("nonsense"), Output("nonsense"))
    assert off == FirewallFacts(False, False, "")


def test_the_firewall_of_a_linux_machine() -> None:
    assert linux_firewall(Output(said("linux_closed")[NFT])) == FirewallFacts(drops=True)
    assert linux_firewall(Output(said("linux_open")[NFT])) == FirewallFacts(drops=False)
    assert linux_firewall(Output("")) == FirewallFacts(drops=False)
    refused = said("linux_open")[NFT].replace(
        "jump LIBVIRT_INP", "jump X\n\t\treject with icmp port-unreachable"
    )
    assert linux_firewall(Output(refused)) == FirewallFacts(drops=True)
    forwards = "chain in {\n type filter hook input priority 0; policy accept;\n}\nchain out {\n drop\n}\n"
    assert linux_firewall(Output(forwards)) == FirewallFacts(drops=False)
    behind = "chain in {\n type filter hook input priority 0; policy accept;\n}\nset s {\n drop\n}\n"
    assert linux_firewall(Output(behind)) == FirewallFacts(drops=False)
    denied = Output(problem="ended with status 1 (Operation not permitted (you must be root))")
    assert "you must be root" in linux_firewall(denied).problem


PARSERS = {
    parse_power: dict, parse_firewall_state: int, parse_block_all: bool, parse_firewall_app: str,
    parse_nft: bool,
}  # fmt: skip


@given(
    text=st.text() | st.sampled_from([*GUARDED.values(), *said("linux_open").values()]).map(lambda t: t[7:-3])
)
def test_no_text_is_too_much_for_a_parser(text: str) -> None:
    for parse, kind in PARSERS.items():
        assert isinstance(parse(text), (kind, type(None)))


def test_a_megabyte_of_rules_takes_no_time() -> None:
    began = time.process_time()
    assert not parse_nft("chain x {\n type filter hook input priority 0; policy accept;\n" * 20_000)
    assert time.process_time() - began < 1
