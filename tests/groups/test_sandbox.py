"""Sandbox of ranks: its rules, and real ranks behind a `sandbox-exec` that reads them and enforces none."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxtp import sandbox
from mlxtp.agent import running_agent
from mlxtp.config import Settings, embedded_model_path
from mlxtp.errors import ConfigError, GroupError
from mlxtp.groups.hosted_rank import HostedRank
from mlxtp.groups.process_group import EpochGroup, ProcessGroup
from mlxtp.sandbox import HINT, Reach, Sandbox
from mlxtp.wire.cluster_messages import Prepare
from mlxtp.wire.messages import Generate

from ..live_cluster import Cluster
from ..reference import expected
from .fake_rank import Orders
from .fake_sandbox import __file__ as FAKE
from .fake_sandbox import rules_of
from .scenes import run

HOSTILE = 'a "quoted") (allow file-write* (subpath "/")) \\ \\" name;\n(allow default)'
GPU = [
    "allow",
    "iokit-open",
    ["iokit-registry-entry-class", "AGXDeviceUserClient"],
    ["iokit-registry-entry-class", "IOSurfaceRootUserClient"],
]
Rules = list[list[Any]]


def rules(given: Sandbox) -> Rules:
    program, *arguments = given.command()
    assert program == "/usr/bin/sandbox-exec"
    found, command = rules_of([*arguments, "python", "-D"])
    assert command == ["python", "-D"]
    return found


def below(found: Rules, *operations: str) -> list[str]:
    """Return the folders below which one rule allows these operations."""
    split = 1 + len(operations)
    [paths] = [
        rule[split:]
        for rule in found
        if rule[1:split] == [*operations] and len(rule) > split and rule[split][0] == "subpath"
    ]
    return [path for _, path in paths]


def test_names_of_folders_add_no_rule(tmp_path: Path) -> None:
    tame, wild = tmp_path / "tame", tmp_path / HOSTILE
    plain = rules(Sandbox(tame, (tame / "model",), (tame / "cache",)))
    hostile = rules(Sandbox(wild, (wild / "model",), (wild / "cache",)))
    assert [rule[:2] for rule in hostile] == [rule[:2] for rule in plain]
    assert below(hostile, "file-read*", "file-write*") == [str(wild)]
    assert hostile[:3] == [["version", "1"], ["deny", "default"], ["import", "system.sb"]]
    assert GPU in hostile


def test_a_rank_reads_its_model_and_writes_its_own_folders(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "models--org--tiny/snapshots/abc").mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    found = rules(
        Sandbox(
            real / "run",
            (tmp_path / "link/models--org--tiny/snapshots/abc", tmp_path / "link/plain/snapshots/a"),
            (real / "kv-cache", real / "run/recording"),
        )
    )
    assert below(found, "file-read*") == [str(real / "models--org--tiny"), str(real / "plain/snapshots/a")]
    assert below(found, "file-read*", "file-write*") == [str(real / "kv-cache"), str(real / "run")]
    assert os.path.realpath(sys.prefix) in below(found, "process-exec*")
    [above] = [rule[2:] for rule in found if rule[1] == "file-read-metadata"]
    assert {kind for kind, _ in above} == {"literal"}
    assert {str(real), str(tmp_path), "/"} <= {path for _, path in above}
    everywhere = {each[1] for rule in found for each in rule if each[0] == "subpath"}
    assert not {str(Path.home()), str(Path.home().parent), "/"} & everywhere


@pytest.mark.parametrize(
    ("reach", "allowed"),
    [
        ("none", []),
        (
            "loopback",
            [
                ["allow", "system-socket"],
                ["allow", "network-outbound", ["remote", "ip", "localhost:*"]],
                ["allow", "network-bind", "network-inbound", ["local", "ip", "localhost:*"]],
            ],
        ),
        (
            "network",
            [
                ["allow", "system-socket"],
                ["allow", "network-outbound", ["remote", "tcp", "*:*"]],
                ["allow", "network-bind", "network-inbound", ["local", "tcp", "*:*"]],
            ],
        ),
    ],
)
def test_a_rank_has_the_connections_of_its_group(tmp_path: Path, reach: Reach, allowed: Rules) -> None:
    group = {
        "none": EpochGroup(1, 1, "none"),
        "loopback": EpochGroup(2, 2, "ring"),
        "network": EpochGroup(1, 2, "ring"),
    }[reach]
    assert group.reach == reach
    found = rules(Sandbox(tmp_path, reach=group.reach))
    assert [rule for rule in found if "network" in rule[1] or "socket" in rule[1]] == allowed
    assert not any("RDMA" in str(rule) for rule in found)
    assert any("RDMA" in str(rule) for rule in rules(Sandbox(tmp_path, reach=reach, rdma=True)))


def test_without_the_program_the_setting_is_refused(tmp_path: Path) -> None:
    async def start() -> None:
        settings = Settings(
            tmp_path, "127.0.0.1", 0, 1, "tiny", sandbox_ranks=True,
            origins=(("sandbox_ranks", "config.toml, line 3"),),
        )  # fmt: skip
        async with running_agent(settings):
            pass

    with pytest.raises(
        ConfigError, match=r"config\.toml, line 3: ranks have a sandbox on macOS only, .* --no-"
    ):
        run(start())
    assert not list(tmp_path.iterdir())


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a `sandbox-exec` that stands for that of macOS."""
    folder, program = tmp_path / "notes", tmp_path / "sandbox-exec"
    folder.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "{folder}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sandbox, "PROGRAM", str(program))
    return folder


@pytest.mark.slow
def test_the_end_of_a_rank_in_a_sandbox_names_the_setting(notes: Path, tmp_path: Path) -> None:
    (notes / "refuse").touch()

    async def start() -> None:
        settings = Settings(tmp_path / "home", "", 0, 1, "tiny", sandbox_ranks=True)
        ranks = ProcessGroup(settings, 1, lambda _: None)
        try:
            with pytest.raises(GroupError) as failed:
                await ranks.start()
        finally:
            await ranks.kill()
        assert failed.value.detail == f"rank 0 exited with status 1. {HINT}"

    run(start())


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["127.0.0.1", ""])
def test_a_rank_of_another_macs_group_reads_its_own_key_alone(
    notes: Path, tmp_path: Path, fabric: str
) -> None:
    home, model = tmp_path / "home", tmp_path / "model"

    async def start() -> None:
        settings = Settings(home, "", 0, 1, "tiny", sandbox_ranks=True)
        rank = HostedRank(Prepare(1, 1, fabric, "tiny", False, "g"), "a" * 32, settings, lambda *_: None)
        try:
            await rank.spawn(model, Orders(tmp_path / "orders").worker)
        finally:
            await rank.remove()

    run(start())
    [about] = [json.loads(each.read_text()) for each in notes.glob("*.json")]
    identity = home / "identity"
    assert below(about["rules"], "file-read*") == [
        str(identity / "member.pem"), str(identity / "node.key"), str(model)
    ]  # fmt: skip
    assert ["allow", "network-outbound", ["remote", "tcp", "*:*"]] in about["rules"]
    assert ("RDMA" in str(about["rules"])) == (not fabric)


@pytest.mark.group
def test_ranks_in_it_open_no_file_that_its_rules_exclude(notes: Path, tmp_path: Path) -> None:
    model = tmp_path / HOSTILE.partition("\n")[0].replace("*", "")
    home = tmp_path / "it's (allow default) \\n"  # MLX's compiler on Linux takes no quotes
    shutil.copytree(embedded_model_path(), model)
    wanted = Generate(0, (7, 8, 9), 20, ignore_eos=True)
    with Cluster(home, sandbox_ranks=True, cache_disk=1 << 30, spare=True, model=model) as cluster:
        assert cluster.ask_all([wanted])[0].tokens == expected(wanted).tokens
    told = [(each, json.loads(each.read_text())) for each in notes.glob("*.json")]
    assert len(told) == 2
    folder = str(home / "run/epoch-1")
    for each, about in told:
        assert about["places"] == [folder] * 3
        writes = below(about["rules"], "file-read*", "file-write*")
        assert writes == [str(home / "kv-cache"), folder]
        files = below(about["rules"], "file-read*")
        assert files == [str(model)]
        reads = [*writes, *files, *below(about["rules"], "file-read*", "file-map-executable")]
        opened = [line.split(" ", 1) for line in each.with_suffix(".opened").read_text().splitlines()]
        paths = [(int(mode), Path(ast.literal_eval(path)).resolve()) for mode, path in opened]
        assert any(path.is_relative_to(model) for _, path in paths)
        assert not [
            (mode, path)
            for mode, path in paths
            if not any(path.is_relative_to(root) for root in (writes if mode else reads))
            and path.parts[1] not in ("dev", "proc", "etc", "sys")
            and not path.is_relative_to(notes)
        ]
