"""State of one group, as this agent shows it: from its own epoch, else from the owner's reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ..errors import GroupError, MlxtpError
from ..gateway.gateway import Gateway
from ..wire.messages import Pong
from ..wire.rank_stats import shown
from .health import SERVES, ServingState, is_legal
from .history import EpochStory, History, Recoveries
from .process_group import EpochGroup, ProcessGroup

log = logging.getLogger(__name__)

#: States that an agent shows as DRAINING while it drains.
_DRAINABLE = frozenset((ServingState.READY, ServingState.IDLE))

_BEFORE_READY = frozenset(ServingState) - {*SERVES, ServingState.FAILED, ServingState.STOPPED}


class GroupStatus:
    """State machine of this agent's epochs of a group, and users' view of the group."""

    def __init__(self, gateway: Gateway) -> None:
        self.leaving = ""  #: Why the group takes no new requests; empty while it does.
        self.state = ServingState.STARTING
        self._own = ServingState.STARTING  #: State of this agent's epochs; `state` may be an owner's report.
        self.in_epoch = False  #: This agent owns ranks, is about to, or still ends them.
        self.epoch = 0
        self.group: EpochGroup | None = None  #: The ranks of the present epoch, or of the last one.
        self.ranks: ProcessGroup | None = None  #: This agent's ranks, once proven, until they fail.
        self.reason: MlxtpError | None = None  #: Why it is not ready, or why the last epoch ended.
        self.wanted = ""  #: The model to serve; empty while something prevents it.
        self.resting = False  #: After a failure, the next epoch waits: `state` is the failed epoch's.
        self.weight_bytes = 0  #: Bytes of the model's files; 0 if unknown.
        self.history = History()
        self.recoveries = Recoveries()
        self._gateway = gateway

    # --- this agent's own epochs ---------------------------------------------------------------------

    def began(self, epoch: int, group: EpochGroup, model: str) -> None:
        self.epoch, self.group = epoch, group
        self.history.began(_story(epoch, group, model), time.monotonic())
        if self._own is not ServingState.RESTARTING and self._own is not ServingState.FAILED:
            self.reason = None  # of the wait for a plan; a failed epoch's reason stays until the next serves
        self.enter(ServingState.STARTING)

    def ready(self) -> None:
        self.reason = None
        self.enter(ServingState.READY)
        now = time.monotonic()
        self.recoveries.serving(now)
        self.history.ready(now)

    def failed(self, error: MlxtpError) -> None:
        self.ranks, self.reason = None, error
        now = time.monotonic()
        self.recoveries.over(error.code, now)
        self.history.ended(now, error.code, error.detail)
        self.enter(ServingState.RESTARTING)

    def enter(self, state: ServingState) -> None:
        """Change the state of this agent's epoch. An illegal move is made, and logged as a bug."""
        before, self._own = self._own, self.show(state)
        if not is_legal(before, self._own):
            words = "epoch %d went from %s to %s, which is a bug"
            log.error(words, self.epoch, before, self._own, extra={"epoch": self.epoch})

    def show(self, state: ServingState) -> ServingState:
        """Show a state, or DRAINING in its place, and return it."""
        self.state = ServingState.DRAINING if self.closing and state in _DRAINABLE else state
        return self.state

    # --- reports and orders --------------------------------------------------------------------------

    def follow(self, state: ServingState, epoch: int, reason: str, group: EpochGroup) -> None:
        """Show the owner's report of the group, while this agent has no epoch."""
        self.epoch, self.group = epoch, group
        story = _story(epoch, group, None, here=False)
        self.history.remote_epoch(story, time.monotonic(), state=state, reason=reason)
        self.reason = GroupError(reason) if reason else None
        self.show(state)

    @property
    def closing(self) -> str:
        """Reason why the group, or this agent, takes no new requests; empty while both do."""
        return self._gateway.closing or self.leaving

    def drain(self, why: str) -> None:
        """Take no new requests, because of `why`; if empty, take requests again."""
        self.leaving = why
        if self.closing and self.in_epoch and self._own in _DRAINABLE:
            self.enter(ServingState.DRAINING)
        elif self.closing and not self.in_epoch and self.state in _DRAINABLE:
            self.show(ServingState.DRAINING)

    # --- queries -------------------------------------------------------------------------------------

    @property
    def pongs(self) -> dict[int, Pong]:
        return self.ranks.watch.pongs if self.ranks is not None else {}

    @property
    def progress(self) -> str:
        """Progress of the next epoch, in a few words, such as "loading 40 %"."""
        if self.loaded is not None:
            return f"loading {self.loaded} %"
        if not self.in_epoch and self.reason is not None:
            return self.reason.detail
        return str(self.state)

    @property
    def starting(self) -> str:
        """The model that is about to serve and its progress, as `Health` has it."""
        if not self.wanted or self.state not in _BEFORE_READY:
            return ""
        if self.state is ServingState.LOADING:
            return f"{self.wanted} is loading" + (f" ({self.loaded} %)" if self.loaded is not None else "")
        reason = self.reason.detail if self.reason is not None else ""
        if self.state is ServingState.RESTARTING and reason:
            return f"{reason}; {self.wanted} is about to load again"
        return reason if self.wanted in reason else f"{self.wanted} is about to load"

    @property
    def loaded(self) -> int | None:
        """Loaded part of the weights in percent; None while nothing loads here."""
        if self.ranks is None or self._own is not ServingState.LOADING or not self.weight_bytes:
            return None
        held = sum(pong.stats.memory_bytes for pong in self.pongs.values())
        return min(held * 100 // self.weight_bytes, 99)

    def rows(self) -> tuple[Mapping[str, object], ...]:
        return tuple(
            {"rank": rank, "phase": pong.phase, "step": pong.step, **shown(pong.stats)}
            for rank, pong in sorted(self.pongs.items())
        )


def _story(epoch: int, group: EpochGroup, model: str | None, *, here: bool = True) -> EpochStory:
    return EpochStory(epoch, time.time(), here, group.world_size, group.backend, group.kind, model)
