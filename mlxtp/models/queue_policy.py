"""Which model has its turn, where requests may name one that is not loaded: the coordinator's part. Pure.

Each member tells for which models its clients wait, and how many of their requests run. Whoever has waited
longest decides which model is next. It gets the turn: from then on no member lets a request for another one
begin. Once all of them have heard that, and nothing runs any more, the model is loaded. So none is ever
unloaded under a running request, and those who come for the old one meanwhile wait behind the new one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from ..wire.cluster_messages import DesiredState, ModelQueue, ModelTurn


@dataclass(frozen=True, slots=True)
class AnnounceModel:
    """Everybody shall hear whose turn it is now."""

    announcement: ModelTurn


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Nothing runs, and nothing but this will: let it be served."""

    model: str


class ModelQueues:
    """What the coordinator knows of all queues. `turn` is the last that was told."""

    def __init__(self) -> None:
        self.current = ModelTurn(0, 0, "", "", "")
        self._queues: dict[str, ModelQueue] = {}
        self._since: dict[tuple[str, str], float] = {}
        """By node id and model: when the first of those that wait there was heard of."""
        self._desired: DesiredState | None = None
        """What was wanted, when that was last looked at."""
        self._served_at = math.inf

    def waits_for(self, model: str) -> bool:
        """Whether anybody does."""
        return any(waited == model for _, waited in self._since)

    def received(self, node_id: str, queue: ModelQueue, now: float) -> None:
        """What a member, or this node itself, tells."""
        self._queues[node_id] = queue
        turn = self.current
        stale = (queue.term, queue.number) < (turn.term, turn.number)
        waiting = {
            (node_id, model) for model in queue.waiting if model and not (stale and model == turn.refused)
        }
        for key in [key for key in self._since if key[0] == node_id and key not in waiting]:
            del self._since[key]
        for key in waiting:
            self._since.setdefault(key, now)

    def decide(
        self, term: int, desired: DesiredState, present: Collection[str], *, served: bool, now: float
    ) -> AnnounceModel | LoadModel | None:
        """What the coordinator of `term` does next; `served`: the group of what is desired is ready."""
        if term != self.current.term:
            self.current, self._desired = ModelTurn(term, 0, desired.model, "", ""), None
        for node_id in self._queues.keys() - set(present):
            del self._queues[node_id]
        self._since = {key: since for key, since in self._since.items() if key[0] in self._queues}
        if desired != self._desired:
            self._desired, self._served_at = desired, math.inf
            if self.current.number == 0:  # nobody has ever waited
                self.current = replace(self.current, model=desired.model)
            elif self.current.model != desired.model:  # a person said so
                return self._announce(desired.model)
        if served:
            self._served_at = min(self._served_at, now)
        wanted = desired.model if desired.pinned else self._first(desired.model)
        if wanted != self.current.model:
            return self._announce(wanted)
        if wanted != desired.model and self._quiet(present):
            return LoadModel(wanted)
        return None

    def refuse(self, model: str, why: str, instead: str, *, broken: bool = False) -> AnnounceModel:
        """`model` cannot be served: whoever waits for it is told, and `instead` has the turn."""
        self._since = {key: since for key, since in self._since.items() if key[1] != model}
        return self._announce(instead, model, why, broken)

    def _announce(self, model: str, refused: str = "", why: str = "", broken: bool = False) -> AnnounceModel:
        self.current = ModelTurn(self.current.term, self.current.number + 1, model, refused, why, broken)
        return AnnounceModel(self.current)

    def _first(self, loaded: str) -> str:
        """What whoever has waited longest wants. Who waited for the loaded one when it came is first."""

        def place(key: tuple[str, str]) -> tuple[bool, float, str]:
            since = self._since[key]
            return key[1] != loaded or since > self._served_at, since, key[0]

        return min(self._since, key=place)[1] if self._since else loaded

    def _quiet(self, present: Collection[str]) -> bool:
        turn, queues = self.current, [self._queues.get(node_id) for node_id in present]
        return all(
            queue is not None and (queue.term, queue.number) == (turn.term, turn.number) and not queue.running
            for queue in queues
        )
