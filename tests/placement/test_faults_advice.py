"""Advice to users about their cables and settings, with the commands to type."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxtp.placement.faults import cable_addresses, notes_of
from mlxtp.placement.probe_machine import mac
from mlxtp.wire.cluster_messages import MAX_SERVICE, Machine, Port

from .recorded_macs import (
    BOOK,
    FACTORY,
    MACS,
    MAX,
    MINI,
    OLD_BOOK,
    RDMA_ON,
    ULTRA,
    factory_ends,
    machine,
    outputs,
    port,
    recorded,
)


def told(of: Machine, word: str) -> str:
    """The one sentence that has this word."""
    (sentence,) = (sentence for sentence in notes_of(of) if word in sentence)
    return sentence


def with_port(of: Machine, receptacle: int, **changed: object) -> Machine:
    ports = [replace(p, **changed) if p.receptacle == receptacle else p for p in of.ports]  # type: ignore[arg-type]
    return replace(of, ports=tuple(ports))


@pytest.mark.parametrize(
    ("found", "word", "told_"),
    [
        (machine(BOOK), "rdma_ctl", "run: rdma_ctl enable"),
        (machine(ULTRA), "next to Ethernet", "Thunderbolt 1 (en2)"),
        (with_port(machine(MAX), 2, gbps=40, rdma=""), "40 Gb/s", "Thunderbolt 2 (en3) runs at 40 Gb/s"),
        (with_port(machine(MAX), 2, rdma=""), "no RDMA device", "ibv_devices"),
        (with_port(machine(MAX), 2, active=False), "not active", "rdma_ctl status"),
        (machine(MINI), "hub", "Thunderbolt 2 (en3)"),
        (machine(BOOK), "battery", "To do: plug it in"),
        (replace(machine(OLD_BOOK), system="linux", power="battery"), "battery", "plug it in"),
    ],
)
def test_what_is_wrong_is_told_with_its_remedy(found: Machine, word: str, told_: str) -> None:
    assert told_ in told(found, word)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (machine(MAX), ""),
        (machine(OLD_BOOK), ""),
        (machine(OLD_BOOK, rdma_ctl="disabled"), ""),  # the hardware has none, so recovery would not help
        (with_port(machine(ULTRA), 1, peer_domain=""), "next to Ethernet"),
        (replace(machine(MINI), system="linux"), ""),
    ],
)
def test_nothing_is_said_of_what_is_well_or_not_known(found: Machine, word: str) -> None:
    assert not [sentence for sentence in notes_of(found) if word in sentence]


@pytest.mark.parametrize("name", MACS)
def test_what_is_found_stands_in_the_notes(name: str) -> None:
    assert machine(name).notes == notes_of(machine(name))
    assert mac(outputs(MAX), "127.0.0.1").notes == (), "addresses left out on request are not missed"
    unread = machine(name, ifconfig="").notes
    assert not [sentence for sentence in unread if "IPv4" in sentence], "nor those that cannot be read"


def test_a_macos_too_old_for_rdma_is_told_when_a_fast_cable_is_in() -> None:
    old = replace(machine(MAX), release="26.1", rdma="unsupported")
    assert "macOS 26.1 has no RDMA" in told(old, "softwareupdate --list")
    assert notes_of(replace(old, release="26.2")) == ()
    assert notes_of(with_port(old, 2, gbps=40)) == ()
    assert notes_of(replace(old, release="")) == ()


@pytest.mark.parametrize(
    ("found", "command"),
    [
        (machine(MINI), "for good: sudo networksetup -setnetworkserviceenabled Thunderbolt-Bridge off"),
        (machine(FACTORY, **recorded(RDMA_ON)), "setnetworkserviceenabled 'Thunderbolt Bridge' off"),
        (
            replace(machine(MINI), bridge_service=""),
            "To do: after each restart: sudo ifconfig bridge0 down (no",
        ),
    ],
)
def test_the_bridge_stands_in_the_way_of_rdma(found: Machine, command: str) -> None:
    assert "sudo ifconfig bridge0 down" in told(found, "holds the Thunderbolt ports")
    assert command in told(found, "holds the Thunderbolt ports")


def test_a_cabled_port_without_an_address_is_given_one_of_a_pair() -> None:
    command = "sudo ifconfig en2 inet {} netmask 255.255.255.252; "
    mini, ultra = port(machine(MINI), 1), port(machine(ULTRA), 1)
    own, other = cable_addresses(mini.domain, mini.peer_domain)
    assert command.format(own) in told(machine(MINI), "Thunderbolt 1 (en2) is cabled to another Mac but")
    assert command.format(other) in told(machine(ULTRA), "169.254.31.7")
    assert cable_addresses(ultra.domain, ultra.peer_domain) == (other, own)


def test_an_address_stays_by_the_service_of_the_port_which_may_have_to_be_made() -> None:
    own, other = cable_addresses(*(getattr(port(machine(MINI), 1), key) for key in ("domain", "peer_domain")))
    assert told(machine(MINI), "Thunderbolt 1 (en2) is cabled").endswith(
        "for good: sudo networksetup -createnetworkservice 'mlxtp 1' 'Thunderbolt 1'; sudo networksetup "
        f"-setmanual 'mlxtp 1' {own} 255.255.255.252; after either: sudo route change {other} -interface"
        f" en2; the other end gets {other}"
    )
    named = with_port(machine(MINI), 1, service="Anna's cable")
    assert "createnetworkservice" not in told(named, "Thunderbolt 1 (en2) is cabled")
    assert """-setmanual 'Anna'"'"'s cable' 10.201.""" in told(named, "Thunderbolt 1 (en2) is cabled")


def test_factory_state() -> None:
    """One cable, the bridge with an address that it gave itself, RDMA off: both ends get the same pair."""
    here, there = (member.machine for member in factory_ends())
    own, other = cable_addresses(here.ports[2].domain, there.ports[2].domain, "bridge ")
    assert own != cable_addresses(here.ports[2].domain, there.ports[2].domain)[0], "a bridge keeps its route"
    command = "sudo ifconfig bridge0 inet {} netmask 255.255.255.252; "
    keep = "for good: sudo networksetup -setmanual 'Thunderbolt Bridge' {} 255.255.255.252"
    for end, first, second in ((here, own, other), (there, other, own)):
        assert command.format(first) in told(end, "bridge has only 169.254.")
        assert keep.format(first) in told(end, "bridge has only 169.254.")
        assert told(end, "bridge has only 169.254.").endswith(f"; the other end gets {second}")
    without = told(replace(here, bridge_service=""), "bridge has only 169.254.")
    assert f"To do: after each restart: {command.format(own, other)}" in without
    assert "networksetup" not in without
    empty = machine(
        FACTORY, ifconfig=recorded(FACTORY)["ifconfig"].replace("inet 169.254.31.7", "inet 0.0.0.0")
    )
    assert command.format(own) in told(empty, "bridge has no IPv4 address")
    given = machine(FACTORY, ifconfig=recorded(FACTORY)["ifconfig"].replace("169.254.31.7", own))
    assert not [sentence for sentence in notes_of(given) if "bridge" in sentence]
    uncabled = with_port(here, 3, peer_domain="")
    assert not [sentence for sentence in notes_of(uncabled) if "bridge" in sentence]


def test_one_pair_does_not_do_for_a_bridge_with_several_cables() -> None:
    both = with_port(machine(FACTORY), 2, peer_domain="A1A1A101-0000-4000-8000-000000000001")
    assert "-setnetworkserviceenabled 'Thunderbolt Bridge' off" in told(both, "broadcast storm")
    assert not [sentence for sentence in notes_of(both) if "10.201." in sentence]
    down = replace(both, bridge_up=False, interfaces=both.interfaces[:1])
    assert len([sentence for sentence in notes_of(down) if "10.201." in sentence]) == 2


def test_a_cable_from_a_mac_to_itself() -> None:
    own = machine(MAX)
    looped = with_port(own, 2, peer_domain=own.ports[2].domain, rdma="")
    assert notes_of(looped) == (told(looped, "this same Mac"),)


def test_the_worst_mac_gets_sentences_that_fit_its_message() -> None:
    worst = Port(64, "e" * 40, "A" * 64, "B" * 64, True, 999, "", False, service="'" * MAX_SERVICE)
    slow = replace(worst, gbps=79)
    off = replace(worst, rdma="r" * 60)
    found = replace(
        machine(MINI),
        ports=(worst, slow, off),
        power="battery",
        release="r" * 60,
        bridge_service="'" * MAX_SERVICE,
    )
    for rdma in ("enabled", "disabled", "unsupported"):
        assert all(len(sentence) <= 1000 for sentence in notes_of(replace(found, rdma=rdma)))
    sentences = notes_of(replace(found, rdma="enabled", interfaces=machine(MAX).interfaces))
    assert len(sentences) == 1 + 3 * 3 + 1
    assert all(len(sentence) <= 1000 for sentence in sentences)


def test_the_two_ends_get_the_two_hosts_of_one_network() -> None:
    for n in range(200):
        own, other = cable_addresses(f"{n:032x}", "F" * 32)
        networks = {address.rpartition(".")[0] for address in (own, other)}
        hosts = [int(address.rpartition(".")[2]) for address in (own, other)]
        assert len(networks) == 1
        assert own.startswith("10.201.")
        assert [host % 4 for host in hosts] == [1, 2]
        assert hosts[0] // 4 == hosts[1] // 4
        assert cable_addresses("F" * 32, f"{n:032x}") == (other, own)
