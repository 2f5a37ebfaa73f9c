"""Content of one file of a failed epoch, as `diagnostics/failure_store.py` wrote it on one Mac."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Seconds since 1970.
_YEAR_9999 = 253_370_764_800


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One forward of one rank, as in `wire/recording.py`.

    Digests are keyed, and empty if it did not finish.
    """

    seq: int
    kind: str = "step"
    rows: int = 1
    started_us: int = 0
    queued_us: int = 0
    finished_us: int = 0
    forwards: int = 0
    collectives: int = 0
    digest: str = ""
    fed: str = ""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A rank's file. `code` and `detail` are its last error.

    `recorded`: its process began a recording. `ended_us` is the end of the process, on the recording's clock.
    `by_agent`: its agent ended it; `deaf`: by SIGKILL only.
    """

    rank: int
    node: str = ""
    status: int | None = None
    signal: int | None = None
    exit_code: str = ""
    by_agent: bool = False
    deaf: bool = False
    code: str = ""
    detail: str = ""
    pong_age_s: float | None = None
    peak_memory_bytes: int = 0
    recorded: bool = True
    ended_us: int = 0
    phase: str = ""
    phase_since_us: int = 0
    crash: str = ""
    steps: tuple[RecordedStep, ...] = ()

    @property
    def unfinished(self) -> RecordedStep | None:
        """The oldest of its last steps that did not finish."""
        return next((step for step in self.steps[-4:] if not step.finished_us), None)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Progress: the last step begun, the last queued, the last finished, and its collectives."""
        started = max((step.seq for step in self.steps), default=0)
        queued = max((step.seq for step in self.steps if step.queued_us), default=0)
        finished = max((step.seq for step in self.steps if step.finished_us), default=0)
        return started, queued, finished, max((step.collectives for step in self.steps), default=0)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """The record of one agent. `hosts` names the Macs of the ranks, as far as the agent knew them."""

    node: str
    ended: float
    code: str
    detail: str
    hosts: tuple[str, ...] = ()
    machine_bytes: int = 0


def rank_record(fields: Mapping[str, Any]) -> RankRecord:
    """Parse the fields of a rank's file. Raises KeyError, TypeError or ValueError for any other file."""
    said, pong, recording = (_table(fields[name]) for name in ("said", "pong", "recording"))
    columns = recording.get("columns", [])
    status, signal, pong_age_s = fields["status"], fields["signal"], fields["pong_age_s"]
    return RankRecord(
        rank=whole(fields["rank"]),
        node=text(fields["node"]),
        status=None if status is None else whole(status),
        signal=None if signal is None else whole(signal),
        exit_code=text(fields["exit_code"]),
        by_agent=bool(fields["by_agent"]),
        deaf=bool(fields["deaf"]),
        code=text(said.get("code", "")),
        detail=text(said.get("detail", "")),
        pong_age_s=None if pong_age_s is None else _number(pong_age_s),
        peak_memory_bytes=whole(pong.get("peak_memory_bytes", 0)),
        recorded=bool(recording),
        ended_us=whole(recording.get("ended_us", 0)),
        phase=text(recording.get("phase", pong.get("phase", ""))),
        phase_since_us=whole(recording.get("phase_since_us", 0)),
        crash=text(recording.get("crash", "")),
        steps=tuple(_step(dict(zip(columns, row, strict=True))) for row in recording.get("steps", [])),
    )


def epoch_record(fields: Mapping[str, Any]) -> EpochRecord:
    """Parse the fields of an `epoch.json`. Raises as `rank_record` does."""
    cause, ended = fields["cause"], _number(fields["ended"])
    if not 0 <= ended < _YEAR_9999:
        raise ValueError(f"{ended:g} is not a time")
    return EpochRecord(
        text(fields["node"]),
        ended,
        text(cause["code"]),
        text(cause["detail"]),
        tuple(map(text, fields["hosts"])),
        whole(fields["machine_bytes"]),
    )


#: Text fields of a step; the others are whole numbers.
_TEXTS = ("kind", "digest", "fed")


def _step(fields: Mapping[str, Any]) -> RecordedStep:
    values: dict[str, Any] = {
        name: (text if name in _TEXTS else whole)(value) for name, value in fields.items()
    }
    return RecordedStep(**values)


def whole(value: object) -> int:
    """Return the value if it is a whole number of up to 64 bits. Raises ValueError otherwise."""
    if type(value) is not int or abs(value) >= 1 << 64:
        raise ValueError(f"{value!r:.80} is not a whole number")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float) or not abs(value) < 1 << 64:  # type: ignore[arg-type]
        raise ValueError(f"{value!r:.80} is not a number")
    return float(value)  # type: ignore[arg-type]


def text(value: object) -> str:
    """Return the value if it is a text, in printable form. Raises ValueError otherwise."""
    if type(value) is not str:
        raise ValueError(f"{value!r:.80} is not a text")
    return value.encode(errors="replace").decode()


def _table(value: object) -> Mapping[str, Any]:
    """Return the value if it is a table, or an empty one for None. Raises ValueError otherwise."""
    if value is not None and type(value) is not dict:
        raise ValueError(f"{value!r:.80} is not a table")
    return value or {}
