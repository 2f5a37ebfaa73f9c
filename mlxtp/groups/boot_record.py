"""Memory and RDMA formations that this boot of the Mac used up, until a restart frees them: `boot.json`.

An unreadable file, or another boot's, counts as empty. `load` and `save` do not await, so no change between
them is lost.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

import psutil

from ..errors import MlxtpError
from ..identity.private_files import read_private, write_private
from ..placement.cost_model import default_gpu_bytes
from ..placement.faults import scarcity
from ..wire.cluster_messages import MAX_NOTES, Machine
from ..wire.codecs import U32, U63, integer
from ..wire.messages import Bootstrap
from ..wire.rdma import devices, peers

log = logging.getLogger(__name__)

FILE = "boot.json"
_LINUX_ID = Path("/proc/sys/kernel/random/boot_id")
_UUID_BYTES = 64  #: Room for the 36 characters of `kern.bootsessionuuid`.


@dataclass(frozen=True, slots=True)
class BootRecord:
    formations: Mapping[str, int] = field(default_factory=dict)  #: Attempts not given back, by RDMA device.
    stranded_bytes: int = 0  #: Memory that ranks left wired when they ended.


def load(home: Path) -> BootRecord:
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
    """Write the record; on a full disk, only log that it stays as it was."""
    try:
        write_private(home / FILE, json.dumps({"boot": mac_start_id()} | asdict(record)).encode())
    except MlxtpError as error:
        log.warning("what this boot of the Mac has used up is not kept: %s", error.detail)


def count_formation(home: Path, bootstrap: Bootstrap, by: int = 1) -> None:
    """Count that a rank here takes a domain of each RDMA device in `init`; with `by` -1, that it gave them
    back. A restart of the Mac is said to be the only other way to get them back.
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
    """Return the machine with formations by port, a note before the last one, stranded memory, and, unless
    the user set a limit, MLX's figure for the GPU.
    """
    record = load(home)
    if HERE.left is None:  # the agent just started
        HERE.left = record.stranded_bytes
    if (stranded := HERE.stranded_bytes()) != record.stranded_bytes:
        save(home, replace(record, stranded_bytes=stranded))
    if HERE.gpu_bytes and machine.gpu_bytes == default_gpu_bytes(machine.memory_bytes):
        machine = replace(machine, gpu_bytes=HERE.gpu_bytes)
    ports = tuple(replace(port, formations=record.formations.get(port.rdma, 0)) for port in machine.ports)
    machine = replace(machine, stranded_bytes=stranded, ports=ports)
    return replace(machine, notes=(*scarcity(machine), *machine.notes)[:MAX_NOTES])


@cache
def mac_start_id() -> str:
    """Return an id that is new at each start of the machine; empty if it has none."""
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


# --- wired memory ----------------------------------------------------------------------------------------

GB = 10**9
LITTLE_BYTES = GB  #: bytes that other programs wire and release meanwhile
LOOK_S = 0.2  #: seconds between readings
LOOKS = 25  #: readings: macOS may take some seconds after a process ends


def wired_bytes(system: str = sys.platform) -> int | None:
    """Return the bytes wired by all processes and the kernel; None outside macOS."""
    return int(getattr(psutil.virtual_memory(), "wired", 0)) if system == "darwin" else None


def left_bytes(before: int, after: int, held: int) -> int:
    """Return how many of the `held` bytes are still wired; 0 if they may be other programs'."""
    left = min(after - before, held)
    return left if left > max(LITTLE_BYTES, held // 10) else 0


class WiredMemory:
    """Memory of this machine that ranks may wire, and that ended ranks left wired."""

    def __init__(self, look: Callable[[], int | None] = wired_bytes) -> None:
        self.look = look
        self.gpu_bytes = 0  #: Bytes that Metal recommends for the GPU; 0 until a rank reports them.
        self.left: int | None = None  #: Bytes left since the machine started; None until known.
        self._seen = 0  #: Wired bytes when `stranded_bytes` last looked, every few seconds.
        self._floor = 0  #: Wired bytes without `left`; 0 if unknown.
        self._assumed = 0  #: Bytes of ranks killed in a collective, until they can be measured.
        self._ranks = 0
        self._before: int | None = None
        self._held = 0

    def began(self) -> None:
        """Note that a rank process started; it holds nothing yet."""
        if not self._ranks:
            self._before, self._held = self.look(), 0
        self._ranks += 1

    async def ended(self, epoch: int, held: int, *, stuck: bool = False) -> int:
        """Note that a rank process that `held` so many bytes is gone. Return the bytes that may be stranded.

        Killing a rank in a JACCL collective (`stuck`) is said to strand its memory. While other ranks run,
        assume so, less what was freed since the last look. After the last rank, only measurements count.
        """
        self._ranks -= 1
        self._held += held
        before = self._before
        if before is None:
            return 0
        if self._ranks:
            came_back = max(self._seen - (self.look() or 0), 0)
            assumed = held - came_back if stuck and held - came_back > LITTLE_BYTES else 0
            self._assumed += assumed
            return assumed
        self._assumed = 0
        if (held := self._held) <= LITTLE_BYTES:
            return 0
        for _ in range(LOOKS):
            if not (left := left_bytes(before, self.look() or 0, held)):
                return 0
            if self._held != held:  # new ranks started, and wire memory, too
                break
            await asyncio.sleep(LOOK_S)
        left_before = self.left or 0
        self.left = min(left_before + left, self.look() or 0)
        self._floor = max(before - left_before, 0)
        log.warning("epoch %d: %s", epoch, self.summary(), extra={"epoch": epoch})
        return left

    def stranded_bytes(self) -> int:
        """Return the bytes that only a restart frees. Forget them if less than that is wired now."""
        stranded, wired = (self.left or 0) + self._assumed, self.look()
        self._seen = wired or 0
        if wired is not None and wired < (self._floor + stranded // 2 if self._floor else stranded):
            self.left = self._assumed = stranded = 0
        return stranded

    def summary(self) -> str:
        """Describe the memory that ended epochs left wired, for users; empty for none."""
        stranded = self.stranded_bytes()
        if not stranded:
            return ""
        stayed = "may have stayed" if self._assumed else "stayed"
        return (
            f"{stranded / GB:.1f} GB {stayed} wired after ranks of this Mac ended; only a restart of the Mac "
            "gives them back"
        )


HERE = WiredMemory()  #: Wired memory of this machine.
