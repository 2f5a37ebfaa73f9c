"""Counts of what this boot of the Mac has used up, which only its restart gives back: `boot.json`.

The file is in the agent's home and survives the agent. A file of another boot, or one that cannot be read,
counts as empty. `load` and `save` do not wait, so a change from one to the other loses no other change.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from ..errors import MlxtpError
from ..identity.private_files import read_private, write_private
from ..placement.cost_model import default_gpu_bytes
from ..placement.formation import spending
from ..wire.cluster_messages import MAX_NOTES, Machine
from ..wire.codecs import U32, U63
from ..wire.messages import Bootstrap
from ..wire.rdma import devices, peers
from .sleep import HERE

log = logging.getLogger(__name__)

FILE = "boot.json"
_LINUX_ID = Path("/proc/sys/kernel/random/boot_id")
_UUID_BYTES = 64  #: Room for the 36 characters of `kern.bootsessionuuid`.


@dataclass(frozen=True, slots=True)
class BootRecord:
    """Counts since the Mac started.

    `formations`: attempts to form a JACCL group, by RDMA device. `stranded_bytes`: memory that ranks left
    wired when they ended.
    """

    formations: Mapping[str, int] = field(default_factory=dict)
    stranded_bytes: int = 0

    @classmethod
    def from_object(cls, value: Mapping[str, Any]) -> Self:
        """Read the file's object: what is missing or makes no sense counts as nothing."""
        formations = value.get("formations")
        pairs = formations.items() if isinstance(formations, dict) else ()
        stranded = value.get("stranded_bytes")
        return cls(
            {name: count for name, count in pairs if type(count) is int and 0 < count <= U32},
            stranded if type(stranded) is int and 0 < stranded <= U63 else 0,
        )

    def formed(self, devices: Iterable[str]) -> Self:
        """Return the record with one more attempt over each of these devices."""
        more = {name: self.formations.get(name, 0) + 1 for name in devices}
        return replace(self, formations={**self.formations, **more})


def load(home: Path, boot: str | None = None) -> BootRecord:
    """Return the record of this boot. `boot` is its id, by default the system's."""
    path, boot = home / FILE, boot_id() if boot is None else boot
    try:
        value = json.loads(read_private(path) or b"{}")
    except (MlxtpError, ValueError, RecursionError) as error:
        log.debug("%s counts as empty: %s", path, error)  # it is read every few seconds
        return BootRecord()
    same = bool(boot) and isinstance(value, dict) and value.get("boot") == boot
    return BootRecord.from_object(value) if same else BootRecord()


def save(home: Path, record: BootRecord, boot: str | None = None) -> None:
    """Write the record. A full disk is logged, and the record is as before."""
    kept = {"boot": boot_id() if boot is None else boot} | asdict(record)
    try:
        write_private(home / FILE, json.dumps(kept).encode())
    except MlxtpError as error:
        log.warning("what this boot of the Mac has used up is not kept: %s", error.detail)


def count_formation(home: Path, bootstrap: Bootstrap) -> None:
    """Count an attempt to form over each RDMA device of a rank here, which is about to call `init`.

    It may take a protection domain of each that only a restart of the Mac gives back, also when it fails.
    """
    rank, size = bootstrap.rank, bootstrap.world_size
    row = bootstrap.rdma[rank * size : (rank + 1) * size]  # shorter for other backends
    used = {
        name
        for peer in peers(rank, size, ring=bootstrap.jaccl_ring)
        for name in devices(row[peer] if peer < len(row) else "")
    }
    if used:
        save(home, load(home).formed(sorted(used)))


def counted(home: Path, machine: Machine) -> Machine:
    """Return the machine with the attempts over each of its ports, and a note before the last one.

    It also has the memory that is stranded, and MLX's figure for the GPU unless the user set a limit.
    """
    record = load(home)
    formations = record.formations
    if HERE.left is None:  # this agent has just started
        HERE.left = record.stranded_bytes
    if (stranded := HERE.stranded_bytes()) != record.stranded_bytes:
        save(home, replace(record, stranded_bytes=stranded))
    if HERE.gpu_bytes and machine.gpu_bytes == default_gpu_bytes(machine.memory_bytes):
        machine = replace(machine, gpu_bytes=HERE.gpu_bytes)
    machine = replace(machine, stranded_bytes=stranded)
    ports = tuple(replace(port, formed=formations.get(port.rdma, 0)) for port in machine.ports)
    machine = replace(machine, ports=ports)
    return replace(machine, notes=(*map(str, spending(machine)), *machine.notes)[:MAX_NOTES])


@cache
def boot_id() -> str:
    """Return an id that is new at each start of the machine, unlike its clock; empty if it has none."""
    if sys.platform == "darwin":
        text = ctypes.create_string_buffer(_UUID_BYTES)
        size = ctypes.c_size_t(_UUID_BYTES)
        name, nothing = b"kern.bootsessionuuid", ctypes.c_size_t(0)
        failed = ctypes.CDLL(None).sysctlbyname(name, text, ctypes.byref(size), None, nothing)
        return "" if failed else text.value.decode(errors="replace")
    try:
        return _LINUX_ID.read_text().strip()
    except OSError:
        return ""
