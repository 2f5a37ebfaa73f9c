"""Post-mortem of an epoch: the likely cause of its failure, from the files of its ranks and agents. Pure.

The files are from one Mac or several. `diagnostics/failure_store.py` writes and reads them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar, get_args, get_type_hints

from rich.markup import escape
from rich.table import Table

from ..errors import TERMINATED_STATUS, WEDGED_STATUS, Code, is_consequence

T = TypeVar("T")

_YEAR_9999 = 253_370_764_800  #: Seconds since 1970.


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One forward of one rank, as in `wire/recording.py`. Digests are keyed, and "" until it finishes."""

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
    """A rank's file, made by `failure_store.about_rank`."""

    rank: int
    node: str = ""
    status: int | None = None
    signal: int | None = None
    exit_code: str = ""
    by_agent: bool = False  #: Its agent ended it.
    deaf: bool = False  #: Only SIGKILL could end it.
    code: str = ""  #: of its last error
    detail: str = ""  #: of its last error
    pong_age_s: float | None = None
    peak_memory_bytes: int = 0
    recorded: bool = True  #: Its process began a recording.
    ended_us: int = 0  #: end of the process, on the recording's clock
    phase: str = ""
    phase_since_us: int = 0
    crash: str = ""
    steps: tuple[RecordedStep, ...] = ()

    @property
    def unfinished(self) -> RecordedStep | None:
        return next((step for step in self.steps[-4:] if not step.finished_us), None)

    @property
    def ending(self) -> str:
        if self.deaf:
            return "by its agent, with SIGKILL: it ignored SIGTERM"
        if self.by_agent and self.status == WEDGED_STATUS:
            return "by its agent: its main thread ignored SIGTERM"
        if self.by_agent:
            return "by its agent"
        if self.signal is not None:
            return f"by signal {self.signal}"
        if self.status is None:
            return "never started"
        return f"status {self.status}" + (f" ({self.exit_code})" if self.exit_code else "")

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Progress: the last step begun, queued and finished, and the number of its collectives."""
        started = max((step.seq for step in self.steps), default=0)
        queued = max((step.seq for step in self.steps if step.queued_us), default=0)
        finished = max((step.seq for step in self.steps if step.finished_us), default=0)
        return started, queued, finished, max((step.collectives for step in self.steps), default=0)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    node: str  #: the agent's
    ended: float
    code: str
    detail: str
    hosts: tuple[str, ...] = ()  #: the ranks' Macs, as far as the agent knew them
    machine_bytes: int = 0


def rank_record(fields: Mapping[str, Any]) -> RankRecord:
    """Parse the fields of a rank's file. Raises KeyError, TypeError or ValueError for any other file."""
    said, pong, recording = (checked(dict, fields[name] or {}) for name in ("said", "pong", "recording"))
    stats, columns = checked(dict, pong.get("stats", {})), recording.get("columns", [])
    found = {name: fields[name] for name in _OF_THE_END}
    for source, names in ((said, _SAID), (stats, _OF_STATS), (pong, _OF_PONG), (recording, _OF_RECORDING)):
        found |= {name: source[name] for name in names if name in source}
    rows = (dict(zip(columns, row, strict=True)) for row in recording.get("steps", []))
    steps = tuple(_record(RecordedStep, row) for row in rows)
    return _record(RankRecord, found, recorded=bool(recording), steps=steps)


#: Fields of a RankRecord, by part of a rank's file. A later part overrides an earlier one.
_OF_THE_END = ("rank", "node", "status", "signal", "exit_code", "by_agent", "deaf", "pong_age_s")
_SAID, _OF_STATS, _OF_PONG = ("code", "detail"), ("peak_memory_bytes",), ("phase",)
_OF_RECORDING = ("ended_us", "phase", "phase_since_us", "crash")


def epoch_record(fields: Mapping[str, Any]) -> EpochRecord:
    """Parse the fields of an `epoch.json`. Raises as `rank_record` does."""
    found = {name: fields[name] for name in ("node", "ended", "machine_bytes")}
    found |= {name: fields["cause"][name] for name in _SAID}
    record = _record(EpochRecord, found, hosts=tuple(checked(str, host) for host in fields["hosts"]))
    if not 0 <= record.ended < _YEAR_9999:
        raise ValueError(f"{record.ended:g} is not a time")
    return record


def _record(kind: type[T], found: Mapping[str, Any], **made: Any) -> T:
    types = get_type_hints(kind)
    return kind(**{name: checked(types.get(name, type(None)), found[name]) for name in found}, **made)


def checked(kind: Any, value: Any) -> Any:
    """Return a printable value of this very kind, within 64 bits; ints pass as floats. Raises ValueError."""
    kinds = get_args(kind) or (kind,)
    fits = type(value) in kinds or (float in kinds and type(value) is int)
    if not fits or (isinstance(value, int | float) and not abs(value) < 1 << 64):
        raise ValueError(f"{value!r:.80} is no {' or '.join(each.__name__ for each in kinds)}")
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


# --- causes ---------------------------------------------------------------------------------------------

MEMORY_SHARE = 0.7  #: A rank killed with this share of the machine's memory was probably killed for it.
SILENT_S = 1.5  #: Heartbeats are sent twice a second, so an older one is not merely in transit.

_CRASHES = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 10: "SIGBUS", 11: "SIGSEGV"}
_SIGKILL, _SIGALRM, _SIGTERM = 9, 14, 15

_STUCK = frozenset((Code.RANK_STALLED, Code.ACK_MISSING, Code.LINK_TIMEOUT))
_KINDS: Mapping[str, str] = {
    code: kind
    for kind, codes in {
        "protocol": (
            Code.FRAME_OVERSIZE, Code.FRAME_MALFORMED, Code.UNKNOWN_TYPE, Code.FIELD_INVALID,
            Code.WRONG_SEQ, Code.OUT_OF_ORDER, Code.WRONG_UID, Code.NOT_AUTHENTIC,
        ),
        "configuration": (
            Code.CONFIG, Code.MODEL_NOT_FOUND, Code.MODEL_INVALID, Code.MODEL_NOT_DIVISIBLE,
            Code.MODEL_UNSUPPORTED, Code.MISMATCH,
        ),
        "forming": (Code.FORM_FAILED, Code.PROOF_FAILED),
        "failed forward": (Code.FORWARD_FAILED,),
        "gpu timeout": (Code.GPU_TIMEOUT,),
    }.items()
    for code in codes
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step that ranks disagree on."""

    seq: int
    what: str  #: the field that differs
    values: Mapping[int, str]  #: by rank


@dataclass(frozen=True, slots=True)
class Cause:
    kind: str  #: in a word or two
    rank: int | None  #: at fault; None: no single rank
    words: str  #: a sentence


@dataclass(frozen=True, slots=True)
class Case:
    ranks: tuple[RankRecord, ...]
    agent: EpochRecord | None = None
    difference: Difference | None = None
    elsewhere: Mapping[int, str] | None = None  #: Macs of the ranks without a file


def likely_cause(case: Case) -> Cause:
    """Return the cause: first a process that died, then a reported error, then outside observations."""
    for find in (_memory, _died, _spoken, _wedged, _differed):
        if (cause := find(case)) is not None:
            return cause
    return _peer_lost(case)


def _memory(case: Case) -> Cause | None:
    for rank in case.ranks:
        if Code.OUT_OF_MEMORY in (rank.code, rank.exit_code):
            return Cause("out of memory", rank.rank, f"rank {rank.rank} ran out of memory{_while(rank)}")
    return None


def _died(case: Case) -> Cause | None:
    """Find a process that died without a reason, and not by its agent."""
    for rank in case.ranks:
        if rank.by_agent or rank.deaf:
            continue
        if rank.signal is not None or rank.status in (TERMINATED_STATUS, WEDGED_STATUS):
            return _ended_by_signal(rank, rank.signal or _SIGTERM, case)
        if rank.status and not rank.exit_code:
            words = f"rank {rank.rank} exited with status {rank.status} and gave no reason{_while(rank)}"
            return Cause("exited", rank.rank, words)
    return None


def _ended_by_signal(rank: RankRecord, number: int, case: Case) -> Cause:
    who = f"rank {rank.rank}"
    machine_bytes = case.agent.machine_bytes if case.agent is not None else 0
    if number in _CRASHES:
        frames = [line.strip() for line in rank.crash.splitlines() if line.strip().startswith("File ")]
        at = f", at {frames[0]}" if frames else ""
        return Cause("crash", rank.rank, f"{who} crashed with {_CRASHES[number]}{_while(rank)}{at}")
    if number == _SIGALRM:
        words = f"{who} waited too long for the others while the group formed"
        return Cause("forming", rank.rank, words)
    if number == _SIGKILL and machine_bytes and rank.peak_memory_bytes >= MEMORY_SHARE * machine_bytes:
        share = rank.peak_memory_bytes / machine_bytes
        words = f"{who} was killed, probably by the system: it held {share:.0%} of its machine's memory"
        return Cause("out of memory", rank.rank, words)
    hint = "; the system does this too, when memory runs out" if number == _SIGKILL else ""
    words = f"{who} was ended by signal {number}, and not by its agent{_while(rank)}{hint}"
    return Cause("killed from outside", rank.rank, words)


def _spoken(case: Case) -> Cause | None:
    """Find the error that a rank reported, or the agent that judged it."""
    said = {
        rank.rank: (rank.code or rank.exit_code, rank.detail)
        for rank in case.ranks
        if _is_cause(rank.code or rank.exit_code, rank.detail)
    }
    # A rank that only relays another rank's error names that rank first.
    first_hand = [rank for rank, (_, detail) in said.items() if not _names_another(detail, rank)] or [*said]
    agent = case.agent
    speaker: int | None
    if agent is not None and _is_cause(agent.code, agent.detail):
        code, detail = agent.code, agent.detail
        speaker = next((rank for rank in first_hand if said[rank][0] == code), None)
    elif first_hand:
        speaker = first_hand[0]
        code, detail = said[speaker]
    else:
        return None
    if code == Code.DESYNC:
        return _differed(case) or Cause("desync", None, f"ranks disagree: {detail}")
    if code in _STUCK:
        return _stuck(case.ranks, detail)
    return Cause(_KINDS.get(code, code.replace("_", " ")), speaker, f"{code}: {detail}")


def _is_cause(code: str, detail: str) -> bool:
    return bool(code) and not is_consequence(code, detail)


def _names_another(detail: str, rank: int) -> bool:
    match = re.match(r"rank (\d+)\b", detail)
    return match is not None and int(match[1]) != rank


def _wedged(case: Case) -> Cause | None:
    silent = [(rank.pong_age_s or 0.0, rank) for rank in case.ranks if rank.deaf or rank.by_agent]
    age_s, rank = max(silent, key=lambda each: each[0], default=(0.0, None))
    if rank is None or age_s < SILENT_S:
        return None
    words = f"rank {rank.rank} answered nothing for {age_s:.1f} s{', SIGTERM included' * rank.deaf}"
    why = f"it was stopped, or something held its interpreter{_while(rank)}"
    return Cause("wedged", rank.rank, f"{words}: {why}")


def _differed(case: Case) -> Cause | None:
    if (difference := case.difference) is None:
        return None
    values = difference.values
    counts = Counter(values.values())
    # With two ranks the follower counts as the odd one.
    odd = min(sorted(values, reverse=True), key=lambda rank: counts[values[rank]])
    how = ", ".join(f"rank {rank}: {value}" for rank, value in sorted(values.items()))
    words = f"ranks differ from step {difference.seq} on, in {difference.what} ({how})"
    return Cause("desync", odd, words)


def _stuck(ranks: tuple[RankRecord, ...], detail: str) -> Cause:
    if all(rank.unfinished is None for rank in ranks):
        return _stuck_elsewhere(ranks, detail)
    # A follower begins a step when its frame arrives, even if the step before is unfinished.
    known = [rank for rank in ranks if rank.recorded]
    seq, late = max(rank.place[0] for rank in known), behind(known)
    waiting = [rank for rank in known if rank.rank != late]
    waited_s = max((rank.ended_us - rank.steps[-1].started_us) / 1e6 for rank in waiting)
    where = f"in the forward of step {seq} for {waited_s:.1f} s"
    if late is None:
        words = f"all ranks stood {where}, so a device did, or what joins them: {detail}"
        return Cause("stuck", None, words)
    names = " and ".join(f"rank {rank.rank}" for rank in waiting)
    return Cause("stuck", late, f"{names} waited {where} for rank {late}, which is behind: {detail}")


def _stuck_elsewhere(ranks: tuple[RankRecord, ...], detail: str) -> Cause:
    """Find the rank that was stuck outside a forward, such as while forming or loading."""
    late = max(ranks, key=lambda rank: rank.ended_us - rank.phase_since_us, default=None)
    if late is None or not late.phase:
        return Cause("stuck", None, detail)
    stood_s = (late.ended_us - late.phase_since_us) / 1e6
    return Cause("stuck", late.rank, f"rank {late.rank} stood in {late.phase} for {stood_s:.1f} s: {detail}")


def _peer_lost(case: Case) -> Cause:
    elsewhere = case.elsewhere or {}
    if not elsewhere:
        detail = case.agent.detail if case.agent is not None else "they lost each other"
        words = f"no process failed by itself, so the network between them did: {detail}"
        return Cause("peer lost", None, words)
    who = " and ".join(f"rank {rank}" for rank in sorted(elsewhere))
    words = f"what failed is not in these files: {who}, which left no file, or the network in between"
    return Cause("peer lost", min(elsewhere), words)


def _while(rank: RankRecord) -> str:
    step = rank.unfinished
    if step is None:
        return f", in phase {rank.phase}" if rank.phase else ""
    return f", in step {step.seq} ({step.kind}, rows {step.rows})"


# --- comparison of ranks --------------------------------------------------------------------------------

_COMPARED = ("kind", "rows", "forwards", "collectives", "fed", "digest")


@dataclass(frozen=True, slots=True)
class Postmortem:
    """One failed epoch."""

    epoch: int
    epoch_id: str  #: tells epochs with the same number apart
    ended: float  #: seconds since 1970
    reason: str
    cause: Cause
    difference: Difference | None
    behind: int | None  #: the rank with the least progress; None if all made the same
    elsewhere: Mapping[int, str]  #: ranks without a file, with the names of their Macs if known
    ranks: tuple[RankRecord, ...]


def examine(
    epoch: int, epoch_id: str, ranks: Iterable[RankRecord], agents: Iterable[EpochRecord]
) -> Postmortem:
    """Compare the files of one epoch. If a rank has two files, the file with more steps counts."""
    by_rank = {rank.rank: rank for rank in sorted(ranks, key=lambda rank: (rank.recorded, len(rank.steps)))}
    records, told = tuple(by_rank[rank] for rank in sorted(by_rank)), tuple(agents)
    agent = max(told, key=lambda each: len(each.hosts), default=None)  # the agent of rank 0 knows most
    hosts, reason = (agent.hosts, agent.detail) if agent is not None else ((), "")
    elsewhere = {rank: host for rank, host in enumerate(hosts or ("",)) if rank not in by_rank}
    difference, ended = first_difference(records), max((each.ended for each in told), default=0.0)
    cause = likely_cause(Case(records, agent, difference, elsewhere))
    late = behind(records)
    return Postmortem(epoch, epoch_id, ended, reason, cause, difference, late, elsewhere, records)


def first_difference(ranks: Iterable[RankRecord]) -> Difference | None:
    """Compare the steps that every rank still has. The last steps may be missing from some."""
    tables = {rank.rank: {step.seq: step for step in rank.steps} for rank in ranks if rank.steps}
    if len(tables) < 2:
        return None
    since = max(min(table) for table in tables.values())
    for seq in sorted({seq for table in tables.values() for seq in table if seq >= since}):
        skipped = [rank for rank, table in tables.items() if seq not in table and max(table) > seq]
        if skipped:
            here = {rank: "missing" if seq not in table else "there" for rank, table in tables.items()}
            return Difference(seq, "presence", here)
        for what in _COMPARED:
            found = {rank: getattr(table[seq], what) for rank, table in tables.items() if seq in table}
            known = {rank: str(value) for rank, value in found.items() if value}
            if len(set(known.values())) > 1:
                return Difference(seq, what, known)
    return None


def behind(ranks: Iterable[RankRecord]) -> int | None:
    """Return the rank that began, queued and finished the least, None if all made the same progress."""
    places = {rank.rank: rank.place for rank in ranks if rank.recorded}
    if len(set(places.values())) < 2:
        return None
    return min(places, key=lambda rank: places[rank])


# --- printing ---------------------------------------------------------------------------------------

SHOWN_STEPS = 12
MAX_STACK_LINES = 12


def show(found: Postmortem) -> list[Any]:
    when = datetime.fromtimestamp(found.ended, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lines: list[Any] = [f"[bold]epoch {found.epoch}[/] failed at {when}: {escape(found.reason)}"]
    lines.append(f"likely cause: [bold red]{escape(found.cause.kind)}[/]. {escape(found.cause.words)}")
    if (difference := found.difference) is not None:
        values = ", ".join(f"rank {rank} {value}" for rank, value in sorted(difference.values.items()))
        lines.append(f"ranks differ first at step {difference.seq}, in {difference.what}: {values}")
    else:
        lines.append("ranks agree in every step that more than one of them remembers")
    if found.behind is not None:
        lines.append(f"rank {found.behind} is behind")
    lines.append(_ranks_table(found.ranks))
    if any(rank.steps for rank in found.ranks):
        lines.append(_steps_table(found))
    for each in found.ranks:
        if each.crash:
            stack = each.crash.strip().splitlines()
            lines.append(f"[bold]rank {each.rank}[/] stood at")
            lines += [f"[dim]{escape(line)}[/]" for line in stack[:MAX_STACK_LINES]]
    for rank, host in sorted(found.elsewhere.items()):
        where = f"on {host}" if host and host != "here" else "on the Mac that ran it"
        lines.append(
            f"of rank {rank} there is no file here: look {escape(where)}, in failures/ of its home, for "
            f"epoch {found.epoch}, and copy its folder; `mlxtp doctor --postmortem FOLDER FOLDER` reads both"
        )
    return lines


def _ranks_table(ranks: Iterable[RankRecord]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rank", "Mac", "ended", "last words", "phase", "step", "forwards", "collectives"):
        table.add_column(column, justify="right" if column in ("step", "forwards", "collectives") else "left")
    for rank in ranks:
        last = [str(step.seq) for step in rank.steps[-1:]] or [""]
        counts = [(str(step.forwards), str(step.collectives)) for step in rank.steps if step.queued_us]
        said = f"{rank.code}: {rank.detail}" if rank.code else ""
        words = (escape(each) for each in (rank.node, rank.ending, said, rank.phase))
        table.add_row(str(rank.rank), *words, *last, *(counts or [("", "")])[-1])
    return table


def _steps_table(found: Postmortem) -> Table:
    """Return the last steps, or the steps around the first difference."""
    tables: Mapping[int, Mapping[int, RecordedStep]] = {
        r.rank: {s.seq: s for s in r.steps} for r in found.ranks
    }
    seqs = sorted({seq for table in tables.values() for seq in table})
    seq = found.difference.seq if found.difference is not None else seqs[-1]
    at = seqs.index(seq)
    end = min(max(at + SHOWN_STEPS // 2, SHOWN_STEPS), len(seqs))
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("step", justify="right")
    for rank in tables:
        shown.add_column(f"rank {rank}")
    for each in seqs[max(end - SHOWN_STEPS, 0) : end]:
        differs = found.difference is not None and each == seq
        cells = [_cell(table.get(each)) for table in tables.values()]
        shown.add_row(str(each), *cells, style="bold red" if differs else "")
    return shown


def _cell(step: RecordedStep | None) -> str:
    if step is None:
        return "–"
    what = f"{step.kind} ×{step.rows}"
    if step.finished_us:
        return f"{what} {(step.finished_us - step.started_us) / 1e3:.1f} ms {step.digest[:6]}"
    return f"{what} {'queued' if step.queued_us else 'begun'}, not finished"
