"""Drafts of this agent's groups: who proposed them, how many were right, and what they gained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..groups.loading import NO_HEAD
from ..wire.messages import Pong
from .parts import AgentParts

PROPOSERS = ("lookup", "mtp", "draft")  #: In the order of Pong.


@dataclass(frozen=True, slots=True)
class GroupDrafts:
    """Drafts of one group in this epoch, by the newest heartbeat of rank 0.

    `drafted` and `accepted` are tokens by proposer. `width` is the number of tokens that a decode step feeds
    its widest row, on average; 0 before the first one. `gain`: tokens a second of recent steps, in those of
    steps without drafts as they were measured; 0 where nothing was. `note`: why no draft can come, or "".
    """

    group: str
    drafted: dict[str, int]
    accepted: dict[str, int]
    width: float
    gain: float
    note: str


def drafts_of(group: str, pong: Pong, speculation: str) -> GroupDrafts:
    """Return what rank 0's heartbeat `pong` says of drafts; `speculation` is the setting."""
    lacks = speculation == "mtp" and bool(pong.model) and not pong.mtp
    return GroupDrafts(
        group,
        dict(zip(PROPOSERS, pong.drafted, strict=False)),
        dict(zip(PROPOSERS, pong.accepted, strict=False)),
        round(pong.decode_widths / pong.decode_steps, 2) if pong.decode_steps else 0.0,
        round(pong.draft_gain, 2),
        NO_HEAD if lacks else "",
    )


def gather(parts: AgentParts) -> Iterator[GroupDrafts]:
    """Yield the drafts of each group whose rank 0 is here."""
    for each in parts.groups.by_id.values():
        if pongs := each.supervisor.status.pongs:
            yield drafts_of(each.scope.group, pongs[min(pongs)], parts.node.settings.speculation)
