"""Files that an agent keeps of failed epochs, in one folder each below `failures/` in its home.

`rank-K.json` is about a rank of this machine: its end, its last error, and its flight recorder. `epoch.json`
is the agent's own record. Files from several Macs belong together if their number and `epoch_id` match.
`mlxtp doctor --postmortem` reads them. Tokens appear only as digests, keyed with a key that is not stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from ..errors import (
    TERMINATED_STATUS,
    WEDGED_STATUS,
    Code,
    FailureReport,
    MlxtpError,
    UserError,
    code_of_exit,
    why_not_written,
)
from ..identity.private_files import FILE_MODE, make_private_folder, write_private
from ..wire.messages import Bootstrap, Error, Pong
from ..wire.recording import MAX_CRASH_BYTES, RECORDING_BYTES, Recording, Step, decode
from .causes import EpochRecord, Postmortem, RankRecord, checked, epoch_record, examine, rank_record

log = logging.getLogger(__name__)

FOLDER, PATTERN = "failures", "*-epoch-*"  #: In the home, and of the names of the folders in it.
FORMAT = 1
KEPT = 20  #: Failures kept; older ones are removed.
COLUMNS = tuple(Step.__dataclass_fields__)
_DIGEST_BYTES = 6
#: Exit statuses of a rank that handled SIGTERM.
_HEARD = (TERMINATED_STATUS, WEDGED_STATUS, -signal.SIGTERM)


@dataclass(slots=True)
class RankEnd:
    """State and end of a rank process, as its agent sees it. Times are time.monotonic(), 0 for never."""

    rank: int
    pid: int = 0
    status: int | None = None  #: None if it never started, negative for the signal that ended it
    asked_at: float = 0.0  #: when its agent sent SIGTERM
    deaf: bool = False  #: SIGTERM was in vain.
    error: Error | None = None  #: its newest one
    pong: Pong | None = None  #: its newest one
    pong_at: float = 0.0
    ended_at: float = 0.0
    memory: bytes = b""  #: content of its recorder
    key: bytes = b""  #: the epoch's; b"" until it was sent
    jaccl: bool = False  #: Its group forms over RDMA.
    formed: tuple[()] | tuple[Path, Bootstrap] = ()  #: the agent's home, and the formation counted there
    stranded_bytes: int = 0  #: memory that may be lost until the Mac restarts

    @property
    def stuck(self) -> bool:
        """True if the agent killed it in a collective over RDMA, according to its last heartbeat."""
        pong = self.pong
        waits = pong is not None and (pong.in_flight > 0 or pong.phase in ("forming", "proving", "measuring"))
        return self.deaf and self.jaccl and waits

    @property
    def by_agent(self) -> bool:
        return bool(self.asked_at) and (self.deaf or self.status in _HEARD)


@dataclass(frozen=True, slots=True)
class FailedEpoch:
    epoch: int
    node: str
    cause: MlxtpError
    hosts: tuple[str, ...] = ()  #: Macs in rank order, as far as known
    reports: tuple[FailureReport, ...] = ()
    pongs: Mapping[int, Pong] | None = None


def recorder_memory(path: Path) -> tuple[int, Path] | None:
    """Return memory for a rank's recorder and the name for the rank to open it, `path` if possible.

    A full disk must not keep a rank from starting. The memory is then elsewhere, or None is returned.
    """
    try:
        return recording_file(path), path
    except OSError as error:
        why = why_not_written(error, path.parent)
    for make in (_anonymous, _temporary):
        with contextlib.suppress(OSError):
            found = make()
            log.warning("%s; the flight recorder's memory is %s instead", why, found[1])
            return found
    log.warning("%s; the rank runs without a flight recorder", why)
    return None


def recording_file(path: Path) -> int:
    """Create the memory for a rank's recorder. Its descriptor outlives its name. Raises OSError."""
    return _filled(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, FILE_MODE), path)


def _anonymous() -> tuple[int, Path]:
    """Create the memory without a disk. Its name lasts as long as the descriptor."""
    if not hasattr(os, "memfd_create"):
        raise OSError("only Linux has such files")
    descriptor = _filled(os.memfd_create("recording"))
    return descriptor, Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def _temporary() -> tuple[int, Path]:
    """Create the memory in the folder for temporary files, perhaps on another disk."""
    descriptor, name = tempfile.mkstemp(prefix="mlxtp-", suffix=".recording")
    path = Path(name)
    return _filled(descriptor, path), path


def _filled(descriptor: int, path: Path | None = None) -> int:
    """Fill the memory now, so that a disk that fills up later does no harm. On OSError nothing is left."""
    left = memoryview(bytes(RECORDING_BYTES))
    try:
        while left:  # at the end of a disk a write is short, and only the next one raises
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.close(descriptor)
        if path is not None:
            path.unlink(missing_ok=True)
        raise
    return descriptor


def read_recording(descriptor: int) -> bytes:
    return os.pread(descriptor, RECORDING_BYTES + MAX_CRASH_BYTES, 0)


def keep(home: Path, failed: FailedEpoch, ends: Iterable[RankEnd]) -> Path:
    """Write the files of one failure, remove the oldest, and return the folder. Raises ConfigError."""
    now = time.time()
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
    make_private_folder(home / FOLDER)
    folder = home / FOLDER / f"{stamp}-epoch-{failed.epoch}"
    make_private_folder(folder)
    ends = tuple(ends)
    identity = next((epoch_id(end.key) for end in ends if end.key), "")
    common = {"format": FORMAT, "epoch": failed.epoch, "epoch_id": identity, "node": failed.node}
    others = sorted(set((home / FOLDER).glob(PATTERN)) - {folder}, key=age)
    _write(folder / "epoch.json", common | about_epoch(failed, now))
    latest_ns, _ = max(map(age, others), default=(0, ""))
    if age(folder)[0] <= latest_ns:  # the clock was set back, yet this failure is the newest
        with contextlib.suppress(OSError):
            os.utime(folder / "epoch.json", ns=(latest_ns + 1, latest_ns + 1))
    for end in ends:
        _write(folder / f"rank-{end.rank}.json", common | about_rank(end, now, time.monotonic()))
    for old in others[: 1 - KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def age(folder: Path) -> tuple[int, str]:
    """Sort key of failures, oldest first. Without an `epoch.json` a failure is of least use."""
    try:
        return (folder / "epoch.json").stat().st_mtime_ns, folder.name
    except OSError:
        return 0, folder.name


def epoch_id(key: bytes) -> str:
    """Return an id that tells epochs with the same number apart, without revealing the key."""
    return hashlib.blake2b(b"mlxtp epoch id", key=key, digest_size=_DIGEST_BYTES).hexdigest()


def about_epoch(failed: FailedEpoch, now: float) -> dict[str, Any]:
    """Return the fields of `epoch.json`. `now` is time.time()."""
    return {
        "kind": "epoch",
        "ended": now,
        "cause": {"code": str(failed.cause.code), "detail": failed.cause.detail},
        "hosts": list(failed.hosts),
        "reports": [
            {
                "rank": report.rank,
                "code": str(report.error.code),
                "detail": report.error.detail,
                "outside": report.seen_from_outside,
            }
            for report in failed.reports
        ],
        "pongs": {str(rank): asdict(pong) for rank, pong in (failed.pongs or {}).items()},
        "machine_bytes": psutil.virtual_memory().total,
    }


def about_rank(end: RankEnd, now: float, monotonic: float) -> dict[str, Any]:
    """Return the fields of a rank's file. `now` and `monotonic` are one instant on two clocks."""
    recording = decode(end.memory)
    code = code_of_exit(end.status) if end.status is not None else None
    expected_at = min(end.ended_at, end.asked_at or end.ended_at)  # the last time it owed a heartbeat
    return {
        "kind": "rank",
        "rank": end.rank,
        "pid": end.pid,
        "ended": now - (monotonic - end.ended_at),
        "status": end.status if end.status is not None and end.status >= 0 else None,
        "signal": -end.status if end.status is not None and end.status < 0 else None,
        "exit_code": str(code) if code is not None else "",
        "by_agent": end.by_agent,
        "deaf": end.deaf,
        "said": _words(end.error, recording),
        "pong": asdict(end.pong) if end.pong is not None else None,
        "pong_age_s": round(expected_at - end.pong_at, 3) if end.pong is not None else None,
        "recording": _recorded(recording, end) if recording is not None else None,
    }


def _words(error: Error | None, recording: Recording | None) -> dict[str, str] | None:
    """Return the last error: from the recorder's memory, else from the rank's pipe."""
    if recording is not None and recording.code:
        return {"code": recording.code, "detail": recording.detail}
    if error is not None:
        return {"code": str(Code(error.code)), "detail": error.detail}
    return None


def _recorded(recording: Recording, end: RankEnd) -> dict[str, Any]:
    def keyed(digest: int, step: Step) -> str:
        packed = struct.pack("<I", digest)
        found = hashlib.blake2b(packed, key=end.key, digest_size=_DIGEST_BYTES).hexdigest()
        return found if step.finished_us else ""

    def row(step: Step) -> list[Any]:
        fields = asdict(step) | {"digest": keyed(step.digest, step), "fed": keyed(step.fed, step)}
        return [fields[name] for name in COLUMNS]

    return {
        "began": recording.began,
        "ended_us": int((end.ended_at - recording.began_monotonic) * 1e6),
        "phase": recording.phase,
        "phase_since_us": recording.phase_since_us,
        "crash": recording.crash,
        "columns": list(COLUMNS),
        "steps": [row(step) for step in recording.steps],
    }


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    write_private(path, json.dumps(fields, ensure_ascii=False).encode())


# --- reading ----------------------------------------------------------------------------------------------

_MAX_BYTES = 4 << 20
#: An epoch's number and id, and the content of a file.
_Parsed = tuple[tuple[int, str], RankRecord | EpochRecord]


def newest(home: Path) -> Path:
    """Return the folder of the newest failure. Raises UserError if there is none."""
    found = list((home / FOLDER).glob(PATTERN))
    if not found:
        raise UserError(f"no failure is kept in {home / FOLDER}")
    return max(found, key=age)


def postmortems(folders: Sequence[Path]) -> list[Postmortem]:
    """Return one per epoch in the folders' files, oldest first. Raises UserError for unusable ones."""
    return _examined([_parsed(str(path), _read(path)) for folder in folders for path in _files(folder)])


def _parsed(where: str, fields: Mapping[str, Any]) -> _Parsed:
    try:
        key = checked(int, fields["epoch"]), checked(str, fields["epoch_id"])
        return key, rank_record(fields) if fields["kind"] == "rank" else epoch_record(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where} is not what an agent keeps of a failure ({error!r:.200})") from None


def _examined(read: Iterable[_Parsed]) -> list[Postmortem]:
    groups: dict[tuple[int, str], tuple[list[RankRecord], list[EpochRecord]]] = {}
    for own, record in sorted(read, key=lambda each: each[0][1] == ""):
        # A rank without the epoch's key has no id for it.
        key = own if own[1] else next((known for known in groups if known[0] == own[0]), own)
        ranks, agents = groups.setdefault(key, ([], []))
        if isinstance(record, RankRecord):
            ranks.append(record)
        else:
            agents.append(record)
    return sorted((examine(*key, *of) for key, of in groups.items()), key=lambda each: each.ended)


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    found = sorted(folder.glob("*.json"))
    if not found:
        raise UserError(f"{folder} has no files of a failure")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        fields = json.loads(data) if len(data) <= _MAX_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} is not what an agent keeps of a failure")
    return fields
