"""What one file of a failed epoch holds, as `node/failures.py` wrote it on one Mac."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """One forward of one rank, as in `wire/recording.py`; digests are keyed, and empty until it finished."""

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
    """A rank's file. `code` and `detail` are its last words.

    `recorded`: its process came so far as to begin a recording; `ended_us` is when the process was gone, on
    the recording's clock. `by_agent`: it went on until its agent ended it; `deaf`: by SIGKILL only.
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
    steps: tuple[Step, ...] = ()

    @property
    def unfinished(self) -> Step | None:
        """The oldest of its steps that has no end."""
        return next((step for step in self.steps[-4:] if not step.finished_us), None)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """How far it came: the last step begun, the last queued, the last finished, its collectives."""
        started = max((step.seq for step in self.steps), default=0)
        queued = max((step.seq for step in self.steps if step.queued_us), default=0)
        finished = max((step.seq for step in self.steps if step.finished_us), default=0)
        return started, queued, finished, max((step.collectives for step in self.steps), default=0)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """What one agent knew of the epoch. `hosts` names the Macs of the ranks, as far as it knew them."""

    node: str
    ended: float
    code: str
    detail: str
    hosts: tuple[str, ...] = ()
    machine_bytes: int = 0


def rank_record(fields: Mapping[str, Any]) -> RankRecord:
    """From the fields of a rank's file. Raises KeyError, TypeError or ValueError for another one's."""
    said, pong, recording = fields["said"] or {}, fields["pong"] or {}, fields["recording"] or {}
    columns = recording.get("columns", [])
    return RankRecord(
        rank=int(fields["rank"]),
        node=str(fields["node"]),
        status=fields["status"],
        signal=fields["signal"],
        exit_code=str(fields["exit_code"]),
        by_agent=bool(fields["by_agent"]),
        deaf=bool(fields["deaf"]),
        code=str(said.get("code", "")),
        detail=str(said.get("detail", "")),
        pong_age_s=fields["pong_age_s"],
        peak_memory_bytes=int(pong.get("peak_memory_bytes", 0)),
        recorded=bool(recording),
        ended_us=int(recording.get("ended_us", 0)),
        phase=str(recording.get("phase", pong.get("phase", ""))),
        phase_since_us=int(recording.get("phase_since_us", 0)),
        crash=str(recording.get("crash", "")),
        steps=tuple(Step(**dict(zip(columns, row, strict=True))) for row in recording.get("steps", [])),
    )


def epoch_record(fields: Mapping[str, Any]) -> EpochRecord:
    """From the fields of an `epoch.json`. Raises as `rank_record` does."""
    cause = fields["cause"]
    return EpochRecord(
        str(fields["node"]),
        float(fields["ended"]),
        str(cause["code"]),
        str(cause["detail"]),
        tuple(str(host) for host in fields["hosts"]),
        int(fields["machine_bytes"]),
    )
