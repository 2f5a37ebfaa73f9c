"""Counts of what this boot of the Mac has in use or used up, which its restart gives back: `boot.json`.

The file is in the agent's home and survives the agent. A file of another boot, or one that cannot be read,
counts as empty. `load` and `save` do not wait, so a change from one to the other loses no other change.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

from ..errors import MlxtpError
from ..identity.private_files import read_private, write_private
from ..placement.cost_model import default_gpu_bytes
from ..placement.faults import scarcity
from ..wire.cluster_messages import MAX_NOTES, Machine
from ..wire.codecs import U32, U63, integer
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

    `formations`: attempts to form a JACCL group whose rank here has not given back what it took, by RDMA
    device; a group that serves is one. `stranded_bytes`: memory that ranks left wired when they ended.
    """

    formations: Mapping[str, int] = field(default_factory=dict)
    stranded_bytes: int = 0


def load(home: Path) -> BootRecord:
    """Return the record of this start of the Mac; of another one, or of what makes no sense, an empty one."""
    start = mac_start_id()
    try:
        kept = json.loads(read_private(home / FILE) or b"{}")
        if not start or kept["boot"] != start:
            return BootRecord()
        formations = {name: integer(1, U32).from_wire(count) for name, count in kept["formations"].items()}
        return BootRecord(formations, integer(0, U63).from_wire(kept["stranded_bytes"]))
    except (MlxtpError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        log.debug("%s counts as empty: %s", home / FILE, error)
        return BootRecord()


def save(home: Path, record: BootRecord) -> None:
    """Write the record. A full disk is logged, and the record is as before."""
    try:
        write_private(home / FILE, json.dumps({"boot": mac_start_id()} | asdict(record)).encode())
    except MlxtpError as error:
        log.warning("what this boot of the Mac has used up is not kept: %s", error.detail)


def count_formation(home: Path, bootstrap: Bootstrap, by: int = 1) -> None:
    """Count an attempt to form over each RDMA device of a rank here, which is about to call `init`.

    It takes a protection domain of each. `by` is -1 once the rank has given them back; only a restart of the
    Mac is said to bring back those of a rank that has not.
    """
    rank, size = bootstrap.rank, bootstrap.world_size
    row = bootstrap.rdma[rank * size : (rank + 1) * size]  # shorter for other backends
    used = {
        name
        for peer in peers(rank, size, ring=bootstrap.jaccl_ring)
        for name in devices(row[peer] if peer < len(row) else "")
    }
    if used:
        record = load(home)
        counts = {name: min(max(record.formations.get(name, 0) + by, 0), U32) for name in sorted(used)}
        left = {name: count for name, count in {**record.formations, **counts}.items() if count}
        save(home, replace(record, formations=left))


def with_counts(home: Path, machine: Machine) -> Machine:
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
    ports = tuple(replace(port, formations=formations.get(port.rdma, 0)) for port in machine.ports)
    machine = replace(machine, ports=ports)
    return replace(machine, notes=(*scarcity(machine), *machine.notes)[:MAX_NOTES])


@cache
def mac_start_id() -> str:
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
