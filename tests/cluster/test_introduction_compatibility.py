"""Compatibility of two Macs that want to compute together."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mlxtp.cluster.introduction import Introduction, compare, unlike_kernels
from mlxtp.wire.cluster_messages import AgentHello

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
