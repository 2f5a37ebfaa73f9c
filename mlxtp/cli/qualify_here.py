"""Tries of `mlxtp qualify` on this Mac alone: kernels, watts, and outputs of commands as recordings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from ..config import embedded_model_path
from ..errors import UserError
from .bench import duration

if TYPE_CHECKING:
    from ..placement.hardware import RunProbe

PROBE_S = 120.0  # of the kernels, with the import of MLX
COMMAND_S = 20.0
#: Samples the whole chip's power for a second. It needs root; with -n it fails if that takes a password.
POWER = ("sudo", "-n", "powermetrics", "-n", "1", "-i", "1000", "--samplers", "cpu_power,gpu_power")
_WATTS = re.compile(r"^Combined Power \([^)]*\): +(\d+(?:\.\d+)?) mW", re.MULTILINE)


def probe_kernels(*how: str) -> dict[str, Any]:
    """Return the findings of `engine.kernel_probe`, run as a process. Raises UserError."""
    command = [sys.executable, "-m", "mlxtp.engine.kernel_probe", str(embedded_model_path()), *how]
    ended = _run(command, PROBE_S)
    if ended.returncode:
        why = ended.stderr.strip().rpartition("\n")[2] or f"it ended with status {ended.returncode}"
        raise UserError(f"the probe of MLX's kernels failed: {why}")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def kernel_summary(plain: Mapping[str, Any], large_s: float) -> str:
    """Return a probe in words; `large_s`: seconds of a step with large command buffers, 0 without Metal."""
    large = f"; large command buffers: {plain['step_s'] / large_s - 1:+.0%} steps a second" if large_s else ""
    return (
        f"{plain['launches']} kernels a step, {plain['mlx_lm_launches']} in mlx-lm; attention over "
        f"{plain['keys']:,} keys takes {duration(plain['attention_s'])}, and with a mask "
        f"{duration(plain['masked_attention_s'])}; a pass over weights takes {duration(plain['pass_s'])}, "
        f"and after a pause of {plain['pause_s']:g} s {duration(plain['pass_after_pause_s'])}{large}"
    )


def carried(answer: Mapping[str, Any]) -> tuple[float, float]:
    """Return a link's bytes/s as measured (0 if too noisy) and as expected (0 without a cable)."""
    from ..placement import cost_model, measurements
    from ..wire.cluster_messages import FabricResult

    result = measurements.from_json({field.name: answer[field.name] for field in fields(FabricResult)})
    return measurements.bandwidth(result), cost_model.cabled_bandwidth(result.kind)


def replug(carried: float, expected: float) -> str:
    """Return the remedy for a cable that carries far less than expected; "" for any other."""
    from ..placement.faults import MUCH_SLOWER, REPLUG

    return REPLUG if 0 < carried * MUCH_SLOWER < expected else ""


def watts_of(text: str) -> float:
    found = _WATTS.search(text)
    if found is None:
        raise UserError("`powermetrics` printed no line with Combined Power")
    return float(found[1]) / 1000


def watts(system: str = sys.platform) -> float:
    if system != "darwin":
        raise UserError("`powermetrics` is there on a Mac only")
    ended = _run(POWER, COMMAND_S)
    if ended.returncode:
        raise UserError("only root may read the power; type `sudo -v`, then `mlxtp qualify` again")
    return watts_of(ended.stdout)


def _run(command: tuple[str, ...] | list[str], within_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    except OSError as error:
        raise UserError(f"{command[0]} could not be started: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} did not end within {within_s:g} s") from None


# --- outputs of commands, as tests take them --------------------------------------------------------------

_HEX = "[0-9A-Fa-f]"
#: Values that identify a Mac: UUIDs, ids of Thunderbolt switches, GUIDs, hardware and IPv6 addresses.
_ID = re.compile(
    rf"\b(?:fe80::|f[cd]{_HEX}{{2}}:|[23]{_HEX}{{3}}:)[0-9A-Fa-f:]+"
    rf"|\b{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}\b|\b{_HEX}{{8}}-{_HEX}{{16}}\b|\b0x{_HEX}{{16}}\b"
    rf"|\b(?:{_HEX}{{2}}:){{5}}{_HEX}{{2}}\b|\b(?:{_HEX}{{4}}:){{3}}{_HEX}{{4}}\b"
    r'|(?<=serial[_-]number" : ")[^"]+'
)
#: Network services except Thunderbolt's: they may name a phone or a company's VPN.
_SERVICE = re.compile(r"^(\((?:\d+|\*)\)) (?!.*Thunderbolt).*$", re.MULTILINE)
_IPV4 = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")


def anonymous(text: str) -> str:
    """Replace serial numbers, ids, and addresses but for private IPv4 ones, in outputs of commands.

    Equal values get equal replacements, in the same form. Private addresses tell tests which Macs share a
    network.
    """
    known: dict[str, str] = {}

    def other(found: re.Match[str]) -> str:
        number = f"{len(known) + 1:x}"
        made = re.sub(r"[^\W_]", "0", found[0])[: -len(number)] + number
        return known.setdefault(found[0], made)

    text = _SERVICE.sub(r"\1 a service", _ID.sub(other, text))
    return _IPV4.sub(lambda found: "192.0.2.1" if _is_public(found[0]) else found[0], text)


def _is_public(address: str) -> bool:
    try:
        return ip_address(address).is_global
    except ValueError:
        return False


def recording(system: str = sys.platform, run: RunProbe | None = None) -> str:
    """Return what the probe's commands print on this Mac, as a recording for tests; "" on other systems."""
    import asyncio

    from ..placement import hardware

    if system != "darwin":
        return ""
    outputs = asyncio.run(hardware.outputs(run))
    return anonymous("".join(f"$ {name}\n{each.text}\n" for name, each in outputs.items() if each.text))
