"""The cluster outlives the Mac that founded it: another one holds its authority, and lets a third one in."""

from __future__ import annotations

from pathlib import Path

from mlxtp.identity.store import AUTHORITY, FOLDER

from ..hosts import Hosts, requires_namespaces
from .agents import on_hosts, wait

pytestmark = requires_namespaces


def test_a_third_mac_joins_when_the_first_is_gone_for_good(tmp_path: Path) -> None:
    with Hosts(3) as net:
        anna, ben, carl = on_hosts(tmp_path, net, "anna", "ben", "carl")
        anna.start()
        ben.start("--join", anna.first_token())
        wait(lambda: anna.member(ben).get("state") == "alive", "ben is in", anna, ben)
        refused = ben.command("cluster", "authority", "add", "anna", "--yes")
        assert "run this command on anna" in refused.stderr
        given = anna.command("cluster", "authority", "add", "ben", "--yes")
        assert given.stdout == "ben has the key on its disk; anna and ben can let Macs in\n", given.stderr
        key = ben.home / FOLDER / AUTHORITY
        assert key.read_bytes() == (anna.home / FOLDER / AUTHORITY).read_bytes()
        assert key.stat().st_mode & 0o777 == 0o600
        unused = anna.token()
        anna.kill()
        removed = ben.command("cluster", "remove", "anna", "--without-admitted")
        assert "anna held the cluster's authority and may still have its key" in removed.stdout
        ben.stop()  # it remembers
        ben.start()
        wait(ben.status, "ben is back", ben)
        carl.start("--join", ben.token())
        wait(lambda: ben.member(carl).get("state") == "alive", "carl is in", ben, carl)
        assert {each["name"] for each in carl.status()["members"]} == {"ben", "carl"}
        assert carl.token() != unused
        assert [each["holds_authority"] for each in carl.status()["members"] if each["name"] == "ben"] == [
            True
        ]
        anna.start()  # its home still has the key, which opens nothing to a removed Mac
        wait(lambda: anna.said("was removed from this cluster"), "anna learns of it", anna, ben)
        assert not ben.member(anna)
