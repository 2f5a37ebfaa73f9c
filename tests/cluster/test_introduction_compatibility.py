"""Compatibility of two Macs that want to compute together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxtp.cluster.introduction import Introduction, compare, unlike_kernels
from mlxtp.config import Settings
from mlxtp.errors import Code
from mlxtp.wire.certificates import NodeIdentity
from mlxtp.wire.cluster_messages import AgentHello
from mlxtp.wire.messages import Error

OURS = AgentHello(
    1, "1" * 32, "c" * 16, "2" * 32, "mini", ("mlxtp=0.4.1", "mlx=0.32.4", "mlx-lm=0.32.2"),
    ("speculation=off", "repeatable=True"), (), "",
)  # fmt: skip


def versions(**changes: str) -> AgentHello:
    have = dict(item.split("=") for item in OURS.versions) | {
        k.replace("_", "-"): v for k, v in changes.items()
    }
    return replace(OURS, versions=tuple(f"{name}={value}" for name, value in have.items()))


@pytest.mark.parametrize("theirs", [
    OURS, versions(mlxtp="0.4.2"), versions(mlxtp="0.5.0"),
    replace(OURS, flags=OURS.flags[::-1], versions=OURS.versions[::-1]),
])  # fmt: skip
def test_equal_builds_fit_and_mlxtp_may_differ_a_little(theirs: AgentHello) -> None:
    assert compare(OURS, theirs) is None


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (replace(OURS, version=2), ("protocol 1", "protocol 2", "same mlxtp")),
        (versions(mlxtp="1.0.0"), ("mlxtp 0.4.1", "mlxtp 1.0.0", "install the same mlxtp")),
        (versions(mlx="0.32.5"), ("mlx 0.32.4", "mlx 0.32.5", "install one version")),
        (versions(mlx_lm="0.33.0"), ("mlx-lm 0.32.2", "mlx-lm 0.33.0", "install one version")),
        (replace(OURS, versions=()), ("mlxtp 0.4.1", "mlxtp none")),
        (
            replace(OURS, flags=("speculation=mtp", "repeatable=True")),
            ("speculation is off on mini", "mtp on studio", "same flags"),
        ),
        (
            replace(OURS, flags=("speculation=off", "repeatable=True", "kv_bits=8")),
            ("kv_bits is at its default on mini", "8 on studio"),
        ),
        (replace(OURS, flags=("speculation=off",)), ("repeatable is True", "at its default on studio")),
    ],
)
def test_what_does_not_fit_is_named_with_values_and_remedy(theirs: AgentHello, said: tuple[str, ...]) -> None:
    reason = compare(OURS, replace(theirs, name="studio"))
    assert "studio" in reason
    for part in said:
        assert part in reason


def test_unlike_kernels_are_a_warning_and_no_refusal(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = (versions(mlx_metal=f"macosx_{number}_0_arm64") for number in (26, 15))
    theirs = replace(theirs, name="studio")
    assert compare(ours, theirs) is None
    assert "macosx_26_0_arm64 on mini and for macosx_15_0_arm64 on studio" in unlike_kernels(ours, theirs)
    assert unlike_kernels(ours, ours) == unlike_kernels(OURS, theirs) == ""
    here: Any = SimpleNamespace(hello=lambda: ours, unlike={}, _doubles={})
    for _ in range(2):
        Introduction.met(here, theirs)
    (record,) = caplog.records
    assert record.getMessage().startswith(here.unlike[theirs.node_id] + "; `mlxtp doctor`")
    Introduction.met(here, ours)
    assert here.unlike[ours.node_id] == ""


NODE, OTHER = "3" * 32, "4" * 32
COPIED = "another running agent has the identity of mini: a home folder was copied"


def introduced() -> Introduction:
    """Of a Mac that knows NODE by the key "key" and has removed who had the key "gone"."""
    ours: Any = SimpleNamespace(node_id=OURS.node_id, cluster_id=OURS.cluster_id)
    members = {NODE: SimpleNamespace(fingerprint="key")}
    roster: Any = SimpleNamespace(removed="gone".__eq__, members=lambda: members)
    return Introduction(Settings(Path(), "", 0, 1, name="mini"), lambda: ours, "", tuple, lambda: roster)


@pytest.mark.parametrize(
    ("shown", "said", "code", "words"),
    [
        ((NODE, "key"), {}, None, ""),
        ((OTHER, "new"), {"node_id": OTHER}, None, ""),
        ((NODE, "key"), {"version": 1}, Code.MISMATCH, "protocol 1"),
        ((OTHER, "key"), {}, Code.NOT_AUTHENTIC, "its certificate and its hello name different nodes"),
        ((NODE, "key"), {"cluster_id": "d" * 16}, Code.NOT_AUTHENTIC, "name different nodes"),
        ((NODE, "new"), {}, Code.NOT_AUTHENTIC, "33333333 is known by another key"),
        ((NODE, "gone"), {}, Code.REMOVED_NODE, "studio was removed from this cluster"),
        ((OURS.node_id, "key"), {"node_id": OURS.node_id}, Code.SAME_NODE, "this is the same node"),
        ((OURS.node_id, "key"), {"node_id": OURS.node_id, "boot_id": "b"}, Code.DUPLICATE_NODE, COPIED),
    ],
)
def test_who_may_have_a_link(
    shown: tuple[str, str], said: dict[str, Any], code: Code | None, words: str
) -> None:
    here = introduced()
    node, key = shown
    hello = replace(here.hello(), **{"node_id": NODE, "name": "studio"} | said)
    refused = here.judge(NodeIdentity(node, OURS.cluster_id, key), hello)
    assert (refused and refused.code) == code
    assert words in str(refused)
    assert here.problem == (str(refused) if code is Code.DUPLICATE_NODE else "")


def test_two_agents_with_one_identity_are_refused_until_one_starts_again() -> None:
    here, peer = introduced(), NodeIdentity(NODE, OURS.cluster_id, "key")
    one, later = (replace(here.hello(), node_id=NODE, boot_id=boot) for boot in ("one", "later"))
    assert here.doubled(NODE, ("one", "two"), "studio twice").code is Code.DUPLICATE_NODE
    assert "Then restart mlxtp" in str(here.judge(peer, one))
    assert here.problem
    assert here.judge(peer, later) is None
    here.met(later)
    assert (here.problem, here.judge(peer, one)) == ("", None)
    here.received_error(SimpleNamespace(hello=later, node_id=NODE), Error(Code.DUPLICATE_NODE, COPIED, 0))
    assert here.problem == COPIED
