"""Choice of the next model, where requests may name one that is not loaded. The coordinator's part. Pure.

Each member reports the models that its clients wait for, and how many of their requests run. The longest
waiting request decides which model is next. The coordinator announces it: from then on no member starts a
request for another model. Once all members have received the announcement and no request runs, the model is
loaded. So no model is unloaded under a running request. Later requests for the old model wait behind the new
one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from ..wire.cluster_messages import DesiredState, ModelQueue, ModelTurn


@dataclass(frozen=True, slots=True)
class AnnounceModel:
    """Action: broadcast the announced model."""

    announcement: ModelTurn


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Action: serve this model. No request runs, and only requests for this model will start."""

    model: str


class ModelQueues:
    """Queues of all members, as known to the coordinator. `current` is the last announcement."""

    def __init__(self) -> None:
        self.current = ModelTurn(0, 0, "", "", "")
        self._queues: dict[str, ModelQueue] = {}
        #: By node id and model: when the first request that waits there was reported, in seconds.
        self._since: dict[tuple[str, str], float] = {}
        self._desired: DesiredState | None = None  #: The desired state at the last decision.
        self._served_at = math.inf

    def waits_for(self, model: str) -> bool:
        """Return True if a request waits for this model."""
        return any(waited == model for _, waited in self._since)

    def received(self, node_id: str, queue: ModelQueue, now: float) -> None:
        """Store the queue that a member, or this node itself, reports."""
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
        """Return the next action of the coordinator of `term`. `served`: the group of the desired model is
        ready.
        """
        if term != self.current.term:
            self.current, self._desired = ModelTurn(term, 0, desired.model, "", ""), None
        for node_id in self._queues.keys() - set(present):
            del self._queues[node_id]
        self._since = {key: since for key, since in self._since.items() if key[0] in self._queues}
        if desired != self._desired:
            self._desired, self._served_at = desired, math.inf
            if self.current.number == 0:  # no request has ever waited
                self.current = replace(self.current, model=desired.model)
            elif self.current.model != desired.model:  # a user changed it
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
        """Announce that `model` cannot be served, which fails the requests that wait for it, and that
        `instead` is next.
        """
        self._since = {key: since for key, since in self._since.items() if key[1] != model}
        return self._announce(instead, model, why, broken)

    def _announce(self, model: str, refused: str = "", why: str = "", broken: bool = False) -> AnnounceModel:
        self.current = ModelTurn(self.current.term, self.current.number + 1, model, refused, why, broken)
        return AnnounceModel(self.current)

    def _first(self, loaded: str) -> str:
        """Return the model that has been waited for longest. Requests that waited for the loaded model when
        it came are first.
        """

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
