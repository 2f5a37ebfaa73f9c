"""Tries of one Mac: words and figures of real trials, power, and recordings that tests can read again."""

from __future__ import annotations

import pytest

from mlxtp.cli import qualify_here
from mlxtp.errors import UserError
from mlxtp.placement.probe_machine import mac
from mlxtp.placement.probe_macos import COMMANDS, NOT_INSTALLED, Output

from ..placement.recorded_macs import ULTRA, outputs, recorded, sections
from .test_cluster import RESULT

POWER = """*** Sampled system activity (Sat Nov 28 10:00:00 2026 +0100) (1004.21ms elapsed) ***

**** Processor usage ****

CPU Power: 8200 mW
GPU Power: 12100 mW
ANE Power: 0 mW
Combined Power (CPU + GPU + ANE): 20300 mW
"""


def test_a_probe_counts_and_times_the_kernels_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = qualify_here.probe_kernels()
    assert "large" not in qualify_here.kernel_summary(found, 0.0)
    words = qualify_here.kernel_summary(found, found["step_s"] / 1.05)
    assert 0 < found["launches"] <= found["mlx_lm_launches"]
    assert min(found[name] for name in found if name.endswith("_s")) > 0
    assert words.startswith(f"{found['launches']} kernels a step, {found['mlx_lm_launches']} in mlx-lm; ")
    assert words.endswith("large command buffers: +5% steps a second")
    monkeypatch.setattr(qualify_here, "embedded_model_path", lambda: "/nowhere")
    with pytest.raises(UserError, match=r"kernels failed: .*nowhere"):
        qualify_here.probe_kernels()


def test_watts_are_those_of_the_whole_chip() -> None:
    assert qualify_here.watts_of(POWER) == 20.3
    with pytest.raises(UserError, match="no line with Combined Power"):
        qualify_here.watts_of("Password:")


def test_outputs_become_a_recording_that_tells_the_same_and_no_id() -> None:
    told = recorded(ULTRA)

    async def run(name: str, _arguments: tuple[str, ...], _deadline_s: float) -> Output:
        return Output(told[name].replace("X000000000", "C02XK1")) if name in told else NOT_INSTALLED

    text = qualify_here.recording("darwin", run)
    assert "C02XK1" not in text
    again = sections(text)
    read = mac({name: Output(again[name]) if name in again else NOT_INSTALLED for name in COMMANDS})
    expected = mac(outputs(ULTRA))
    assert [(port.receptacle, port.rdma, port.active, bool(port.peer_domain)) for port in read.ports] == [
        (port.receptacle, port.rdma, port.active, bool(port.peer_domain)) for port in expected.ports
    ]
    assert read.interfaces == expected.interfaces
    assert qualify_here.recording("linux") == ""


def test_ids_are_replaced_alike_wherever_they_stand() -> None:
    text = "aa:bb:cc:dd:ee:01 8.8.8.8 192.168.1.5 aa:bb:cc:dd:ee:02 aa:bb:cc:dd:ee:01 fe80::1c:2%en0"
    assert qualify_here.anonymous(text) == (
        "00:00:00:00:00:01 192.0.2.1 192.168.1.5 00:00:00:00:00:02 00:00:00:00:00:01 0000::00:3%en0"
    )
    assert qualify_here.anonymous('"switch_uid_key" : "0x05AC7A6C4D2E1F00"').endswith('0000000000000001"')


@pytest.mark.parametrize(
    ("kind", "expected"), [("JACCL mesh", 8e9), ("ring over Thunderbolt", 3e9), ("ring over Ethernet", 0.0)]
)
def test_cables_are_expected_to_carry_as_much_as_plans_count_with(kind: str, expected: float) -> None:
    two = {
        "sizes": [1 << 10, 1 << 24],
        "sums_s": [1e-4, 1e-2],
        "gathers_s": [1e-4, 1e-2],
        "names": ["a", "b"],
    }
    answer = {**RESULT, **two, "backend": "ring", "kind": kind}
    carried, most = qualify_here.carried(answer)
    assert carried == pytest.approx((2**24 - 2**10) / 0.0099)
    assert most == expected
