"""`mlxtp doctor --postmortem`: reads the files of failed epochs and prints them.

Reading and printing only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..errors import WEDGED_STATUS, UserError
from .causes import (
    EpochRecord,
    Postmortem,
    RankRecord,
    RecordedStep,
    epoch_record,
    examine,
    rank_record,
    text,
    whole,
)
from .failure_store import FOLDER, PATTERN, age

SHOWN_STEPS = 12
MAX_STACK_LINES = 12
_MAX_BYTES = 4 << 20

#: An epoch's number and id, and the content of a file.
_Parsed = tuple[tuple[int, str], RankRecord | EpochRecord]


def newest(home: Path) -> Path:
    """Return the folder of the newest failure. Raises UserError when there is none."""
    found = list((home / FOLDER).glob(PATTERN))
    if not found:
        raise UserError(f"no failure is kept in {home / FOLDER}")
    return max(found, key=age)


def postmortems(folders: Sequence[Path]) -> list[Postmortem]:
    """Return one for each epoch that the folders have files of, oldest first.

    Raises UserError for a folder or file that is no failure's.
    """
    return _examined([_parsed(str(path), _read(path)) for folder in folders for path in _files(folder)])


def _parsed(where: str, fields: Mapping[str, Any]) -> _Parsed:
    try:
        key = (whole(fields["epoch"]), text(fields["epoch_id"]))
        return key, rank_record(fields) if fields["kind"] == "rank" else epoch_record(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where} is not what an agent keeps of a failure ({error!r:.200})") from None


def _examined(read: Iterable[_Parsed]) -> list[Postmortem]:
    groups: dict[tuple[int, str], tuple[list[RankRecord], list[EpochRecord]]] = {}
    for (epoch, epoch_id), fields in sorted(read, key=lambda each: each[0][1] == ""):
        key = (epoch, epoch_id)
        if not epoch_id:  # its ranks did not receive the epoch's key before it ended
            key = next((known for known in groups if known[0] == epoch), key)
        ranks, agents = groups.setdefault(key, ([], []))
        if isinstance(fields, RankRecord):
            ranks.append(fields)
        else:
            agents.append(fields)
    found = [examine(*key, *records) for key, records in groups.items()]
    return sorted(found, key=lambda each: each.ended)


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


def as_json(found: Iterable[Postmortem]) -> dict[str, Any]:
    """Return all of it as JSON, including every step."""
    return {"failures": [asdict(each) for each in found]}


# --- printing ---------------------------------------------------------------------------------------


def show(found: Postmortem) -> list[Any]:
    """Return lines and tables for a terminal."""
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
    lines.append(_ranks_table(found))
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
            f"of rank {rank} there is no file here: look {escape(where)}, in {FOLDER}/ of its home, for "
            f"epoch {found.epoch}, and copy its folder; `mlxtp doctor --postmortem FOLDER FOLDER` reads both"
        )
    return lines


def _ranks_table(found: Postmortem) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rank", "Mac", "ended", "last words", "phase", "step", "forwards", "collectives"):
        table.add_column(column, justify="right" if column in ("step", "forwards", "collectives") else "left")
    for rank in found.ranks:
        counts = [step for step in rank.steps if step.queued_us]
        said = f"{rank.code}: {rank.detail}" if rank.code else ""
        table.add_row(
            str(rank.rank),
            escape(rank.node),
            _ended(rank),
            escape(said),
            escape(rank.phase),
            str(rank.steps[-1].seq) if rank.steps else "",
            str(counts[-1].forwards) if counts else "",
            str(counts[-1].collectives) if counts else "",
        )
    return table


def _ended(rank: RankRecord) -> str:
    if rank.deaf:
        return "by its agent, with SIGKILL: it ignored SIGTERM"
    if rank.by_agent and rank.status == WEDGED_STATUS:
        return "by its agent: its main thread ignored SIGTERM"
    if rank.by_agent:
        return "by its agent"
    if rank.signal is not None:
        return f"by signal {rank.signal}"
    if rank.status is None:
        return "never started"
    return f"status {rank.status}" + (f" ({rank.exit_code})" if rank.exit_code else "")


def _steps_table(found: Postmortem) -> Table:
    """Return the last steps, or those around the first difference."""
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
