"""Comparison of the files of one failed epoch, from one Mac or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .causes import Case, Cause, Difference, likely_cause
from .failure_record import EpochRecord, RankRecord

_COMPARED = ("kind", "rows", "forwards", "collectives", "fed", "digest")


@dataclass(frozen=True, slots=True)
class Postmortem:
    """One failed epoch. `ended` is in seconds since 1970; `epoch_id` distinguishes epochs of one number.

    `behind` is the rank that made the least progress, None when all made the same. `elsewhere` has the ranks
    without a file, each with the name of its Mac where that is known.
    """

    epoch: int
    epoch_id: str
    ended: float
    reason: str
    cause: Cause
    difference: Difference | None
    behind: int | None
    elsewhere: Mapping[int, str]
    ranks: tuple[RankRecord, ...]


def examine(
    epoch: int, epoch_id: str, ranks: Iterable[RankRecord], agents: Iterable[EpochRecord]
) -> Postmortem:
    """Compare the files of one epoch. Of two files of a rank, use the one with more steps."""
    by_rank = {rank.rank: rank for rank in sorted(ranks, key=lambda rank: (rank.recorded, len(rank.steps)))}
    records = tuple(by_rank[rank] for rank in sorted(by_rank))
    told = sorted(agents, key=lambda agent: len(agent.hosts), reverse=True)  # the agent of rank 0 knew most
    agent = told[0] if told else None
    hosts = agent.hosts if agent is not None else ()
    elsewhere = {rank: host for rank, host in enumerate(hosts) if rank not in by_rank}
    if 0 not in by_rank:
        elsewhere.setdefault(0, "")
    difference = first_difference(records)
    return Postmortem(
        epoch,
        epoch_id,
        max((each.ended for each in told), default=0.0),
        agent.detail if agent is not None else "",
        likely_cause(Case(records, agent, difference, elsewhere)),
        difference,
        behind(records),
        elsewhere,
        records,
    )


def first_difference(ranks: Iterable[RankRecord]) -> Difference | None:
    """Compare the steps that every rank still has.

    Final steps that a rank did not reach are no difference.
    """
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
    """Return the rank that began, queued and finished the least. None when all made the same progress."""
    places = {rank.rank: rank.place for rank in ranks if rank.recorded}
    if len(set(places.values())) < 2:
        return None
    return min(places, key=lambda rank: places[rank])
