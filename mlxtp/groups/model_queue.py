"""Queue of requests for models that are not loaded, and the change of the model for them.

Each member reports the models that its clients wait for, and how many of their requests run. The longest
waiting request decides which model is next. The coordinator announces it: from then on no member starts a
request for another model. Once all members have received the announcement and no request runs, the model is
loaded. So no model is unloaded under a running request. Later requests for the old model wait behind the new
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from ..api.backend import AT_ONCE, ModelLease, StoredModelInfo
from ..api.catalog import UNNAMED
from ..cluster.cluster_state import NO_CLAIM, LeaderClaim
from ..cluster.deployments import NOTHING, DesiredState
from ..cluster.links import ControlLink
from ..cluster.membership import MemberState as Standing
from ..cluster.node import BEAT_S, ClusterNode
from ..config import EMBEDDED_MODEL
from ..errors import Code, GroupError, MlxtpError, ModelError, RequestError
from ..gateway.gateway import ModelSwitch
from ..models.inspect import stored_models, stored_name
from ..models.local_model import LocalModels
from ..wire.cluster_messages import MAX_WAITING, ModelQueue, ModelTurn
from .health import ServingState, of_the_model
from .lifecycle import Supervisor
from .reconciler import Reconciler
from .selection import ModelSelection, SelectionState

log = logging.getLogger(__name__)

UNHEARD = ModelTurn(0, 0, "", "", "")
NEWS_S = 1.0  #: Seconds between two progress checks of a waiting request.
REFUSED_S = 60.0  #: Seconds until a model that could not be served is tried again.
MOST_FOLDERS = 20  #: Folders that are known by the short name under which they were served.
#: Seconds that a model may have no place: longer than the others take to report that their memory is free.
UNPLANNED_S = 12.0


# --- policy: which model is next. Pure, the coordinator's part ----------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Action: serve this model. No request runs, and only requests for this model will start."""

    model: str


class ModelQueues:
    """Queues of all members, as known to the coordinator. `current` is the last announcement."""

    def __init__(self) -> None:
        self.current = UNHEARD
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
    ) -> ModelTurn | LoadModel | None:
        """Return what the coordinator of `term` has to announce, or the model to load; None for neither.

        `served`: the group of the desired model is ready.
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

    def refuse(self, model: str, why: str, instead: str, *, broken: bool = False) -> ModelTurn:
        """Announce that `model` cannot be served, which fails the requests that wait for it, and that
        `instead` is next.
        """
        self._since = {key: since for key, since in self._since.items() if key[1] != model}
        return self._announce(instead, model, why, broken)

    def _announce(self, model: str, refused: str = "", why: str = "", broken: bool = False) -> ModelTurn:
        self.current = ModelTurn(self.current.term, self.current.number + 1, model, refused, why, broken)
        return self.current

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


@dataclass(frozen=True, slots=True)
class DesiredFate:
    """Fate of the desired states so far. Pure.

    `served` is the last one that was served, or was empty. `lacking_since`: since when `present` has had no
    place; None while it has one. `failed`: the one whose epoch failed for good, while that failure lasts.
    """

    served: DesiredState | None = None
    present: DesiredState = NOTHING
    lacking_since: float | None = None
    failed: DesiredState | None = None

    def next(
        self, desired: DesiredState, now: float, *, ready: bool, failed: bool, unplanned: bool
    ) -> DesiredFate:
        """Return the fate after a look at the group of `desired`."""
        served = desired if ready or not desired.model else self.served
        if failed:
            return replace(self, served=served, failed=self.failed or desired)
        lasts = self.present == desired and self.lacking_since is not None
        since = self.lacking_since if lasts else now
        return DesiredFate(served, desired, since if unplanned else None)


# --- requests of this node --------------------------------------------------------------------------------


class Announcement:
    """The coordinator's last announcement, as this node received it, and the models it says are refused."""

    def __init__(self, node: ClusterNode) -> None:
        self.turn = UNHEARD
        self.refused: dict[str, tuple[RequestError, float]] = {}  #: The error, and until when it holds.
        self._node = node
        self._by = NO_CLAIM

    @property
    def given(self) -> bool:
        """True if the present coordinator has announced a model. One term may have had two coordinators."""
        return self.turn.number > 0 and self._by == self._node.leadership.claim

    @property
    def pending(self) -> bool:
        """True until the announced model is the desired one."""
        return self.given and self.turn.model != self._node.desired.now.model

    def may_begin(self, model: str) -> bool:
        """Return True if requests for this model may start."""
        return model == (self.turn.model if self.given else self._node.desired.now.model)

    def received(self, turn: ModelTurn, now: float) -> bool:
        """Take in an announcement of the present coordinator. Return True if it is a new one."""
        claim = self._node.leadership.claim
        if self._by == claim and turn.number <= self.turn.number:
            return False
        self.turn, self._by = turn, claim
        if turn.refused and turn.refused != turn.model:  # the desired model itself may come at any time
            self.refused[turn.refused] = (_cannot(turn), now + REFUSED_S)
        return True

    def expire(self, now: float) -> None:
        """Forget refusals that no longer hold."""
        self.refused = {model: said for model, said in self.refused.items() if said[1] > now}


class QueuedLease:
    """Lease of a model; implements `api.backend.ModelLease`.

    `named` is the model's name in `DesiredState`; empty for any model. `outcome` has the reason of a refusal;
    None once the request may begin.
    """

    model = ""

    def __init__(self, named: str, within_s: float, late: RequestError, requests: WaitingRequests) -> None:
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[RequestError | None] = loop.create_future()
        self._named = named
        self._requests = requests
        self._late = late
        self._until = loop.time() + within_s

    @property
    def come(self) -> bool:
        return self.outcome.done() and self.outcome.result() is None

    @property
    def target(self) -> str:
        """The model that it waits for; empty if it named none, and no model is desired any longer."""
        return self._named or self._requests.desired.model

    def progress(self) -> str:
        return self._requests.progress(self.target)

    async def wait(self) -> AsyncIterator[str]:
        told, loop = "", asyncio.get_running_loop()
        while not self.outcome.done():
            if (left_s := self._until - loop.time()) <= 0:
                self.outcome.set_result(self._late)
                break
            if told != (told := self.progress()):
                yield told
            await asyncio.wait({self.outcome}, timeout=min(left_s, NEWS_S))
        if (refusal := self.outcome.result()) is not None:
            self.close()
            raise refusal

    def close(self) -> None:
        self._requests.leave(self)


class WaitingRequests(ModelSwitch):
    """Requests of this node's clients that wait for a model, or run."""

    def __init__(
        self, node: ClusterNode, supervisor: Supervisor, models: LocalModels, announcement: Announcement
    ) -> None:
        self.waiting: dict[QueuedLease, None] = {}
        self.running: set[QueuedLease] = set()
        self.reported: object = None  #: The last report to the coordinator; None if it has to be repeated.
        self._node = node
        self._supervisor = supervisor
        self._models = models
        self._announcement = announcement
        #: By the name under which it was served: a folder's whole path, the one served last at the end.
        self._folders: dict[str, str] = {}
        self._on = node.settings.load_on_request
        supervisor.gateway.switch_models(self, node.changed)

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        """Return the models that a request may have loaded."""
        if not self._on or self.desired.pinned:
            return ()
        folders = [(name, Path(path)) for name, path in self._folders.items()]
        return await asyncio.to_thread(stored_models, folders)

    async def acquire_model(
        self, name: str | None, within_s: float, keep_s: float | None = None
    ) -> ModelLease:
        """See `Backend.acquire_model`. `keep_s` changes nothing."""
        target = self._known(name)
        if target is None and self._on:
            target = await self._stored(name or "")
        if target is None or not (target or self._on):
            return AT_ONCE
        if (refusal := self._refusal(target)) is not None:
            raise refusal
        if not self._on and not self._announcement.may_begin(target):
            before = self._announcement.turn.model
            raise _unready(f"{before} is loaded next, for a request that came before; try again")
        lease = self._waiter(target, within_s, named=name not in UNNAMED)
        self.waiting[lease] = None
        if not self._on or self._supervisor.gateway.closing:  # the gateway refuses it
            self._begin(lease)
        else:
            self.admit()
            if not lease.come:
                self._node.changed()
        return lease

    async def _stored(self, name: str) -> str | None:
        """Return the name in `DesiredState` of a model on this Mac's disk; None if it is not there."""
        try:
            return await asyncio.to_thread(stored_name, self._folders.get(name, name))
        except ModelError as error:
            detail = f"{name} cannot be served: {error.detail}"
            if error.code is Code.MODEL_NOT_FOUND:
                raise RequestError(detail, error.code, status=404, param="model") from None
            raise RequestError(detail, Code.MODEL_INVALID, param="model") from None

    def leave(self, lease: QueuedLease) -> None:
        """Record that a request has ended, or no longer waits."""
        known = lease in self.waiting or lease in self.running
        self.waiting.pop(lease, None)
        self.running.discard(lease)
        if known and (self.waiting or self._announcement.pending or self.reported is not None):
            self._node.changed()

    def progress(self, target: str) -> str:
        """Return how far a model is, in a few words."""
        desired = self.desired.model
        if target != desired or not self._announcement.may_begin(target):
            return f"waiting until the requests for {desired} end" if desired else "waiting"
        return self._supervisor.status.progress

    def _known(self, name: str | None) -> str | None:
        """Return the desired model if that is what the name means; None for another model."""
        desired = self.desired.model
        models = self._supervisor.gateway.models()
        if name in (*UNNAMED, desired):
            return desired
        return desired if models and (name == models[0].id or name in models[0].aliases) else None

    def _waiter(self, target: str, within_s: float, *, named: bool) -> QueuedLease:
        queue_s = self._node.settings.limits.queue_s
        if within_s and within_s < queue_s:
            words = f"{target} was not there within {within_s:g} s"
            late = RequestError(words, Code.DEADLINE, status=504, param="deadline_s")
        else:
            words = f"{target} was not there within {queue_s:g} s, as other models are in use; try again"
            within_s, late = queue_s, RequestError(words, Code.OVERLOADED, status=503)
        return QueuedLease(target if named else "", within_s, late, self)

    @property
    def desired(self) -> DesiredState:
        """The present desired state."""
        return self._node.desired.now

    def _refusal(self, target: str) -> RequestError | None:
        """Return the reason why a request for this model need not wait; None if it has to."""
        if not target:
            return _unready(
                "nothing is loaded; name a model that is on this Mac's disk, or run `mlxtp serve MODEL`"
            )
        desired = self.desired
        if desired.pinned and target != desired.model:
            return RequestError(
                f"{target} is on this Mac, but {desired.model} is pinned, so no request replaces it; "
                f"`mlxtp serve {target}` serves that instead, and after `mlxtp unload` requests choose",
                Code.MODEL_NOT_FOUND,
                status=404,
                param="model",
            )
        status = self._supervisor.status
        if desired.pinned and status.state is ServingState.FAILED and status.reason is not None:
            return _unready(f"{target} cannot be served: {status.reason.detail}")
        if why := self._missing(target):
            return _unready(f"{target} cannot be served on this Mac: {why}")
        if target != desired.model and target in self._announcement.refused:
            return self._announcement.refused[target][0]
        return None

    def _missing(self, target: str) -> str:
        """Return why this Mac lacks the desired model that others may have: a request needs its tokenizer
        here.
        """
        desired, here = self.desired, self._models.desired
        if target != desired.model or self._supervisor.gateway.models():
            return ""
        elsewhere = any(told.fingerprint for told in self._node.peer_info.reported(target).values())
        return here.problem if desired.pinned or elsewhere else ""  # else the coordinator gives up the model

    def admit(self) -> None:
        """Start the requests whose model is served, and refuse those whose model never will be."""
        gateway = self._supervisor.gateway
        for lease in [each for each in self.waiting if not each.outcome.done()]:
            refusal = self._refusal(lease.target)
            if gateway.closing:
                refusal = RequestError(f"{gateway.closing}; try again", Code.SHUTTING_DOWN, status=503)
            at_once = lease.target == self.desired.model and self._announcement.may_begin(lease.target)
            if refusal is not None:
                lease.outcome.set_result(refusal)
            elif at_once and (models := gateway.models()):
                lease.model = models[0].id
                self._begin(lease)

    def _begin(self, lease: QueuedLease) -> None:
        del self.waiting[lease]
        self.running.add(lease)
        lease.outcome.set_result(None)

    def refuse(self, turn: ModelTurn) -> None:
        """Fail the requests that wait for the model that the coordinator refuses."""
        for lease in self.waiting:
            if turn.refused and lease.target == turn.refused and not lease.outcome.done():
                lease.outcome.set_result(_cannot(turn))

    def queue(self) -> ModelQueue:
        """Return the report of these requests to the coordinator."""
        waiting = dict.fromkeys(lease.target for lease in self.waiting if not lease.outcome.done())
        turn = self._announcement.turn if self._announcement.given else UNHEARD
        running = len(self.running) + self._supervisor.gateway.deployments.relayed  # some may count twice
        return ModelQueue(turn.term, turn.number, tuple(waiting)[:MAX_WAITING], running)

    def remember_folder(self) -> None:
        """Keep a served folder's short name, which clients see, for the time after it is served."""
        model, models = Path(self.desired.model), self._supervisor.gateway.models()
        name = models[0].id if models else ""
        if not model.is_absolute() or name != model.name or name == EMBEDDED_MODEL:
            return
        self._folders.pop(name, None)
        self._folders[name] = str(model)
        while len(self._folders) > MOST_FOLDERS:
            del self._folders[next(iter(self._folders))]


# --- the exchange between nodes ---------------------------------------------------------------------------


class ModelSwitcher:
    """Exchange of queues and announcements; where this node coordinates, the change of the model."""

    def __init__(
        self,
        node: ClusterNode,
        supervisor: Supervisor,
        models: LocalModels,
        *,
        reconciler: Reconciler,
        selection: ModelSelection,
    ) -> None:
        self.announcement = Announcement(node)
        self.requests = WaitingRequests(node, supervisor, models, self.announcement)
        self.fate = DesiredFate()
        self._node = node
        self._supervisor = supervisor
        self._models = models
        self._reconciler = reconciler
        self._selection = selection
        self._queues = ModelQueues()
        node.links.on(self._received, ModelTurn, ModelQueue)
        node.links.on_up(self._greet)
        node.rounds.every(BEAT_S, self._remind, needed=node.links.nodes)
        node.rounds.add(self.advance)

    # --- messages from others ------------------------------------------------------------------------

    def _received(self, link: ControlLink, message: ModelTurn | ModelQueue) -> None:
        """Process a message from a member. Announcements count only from the coordinator."""
        now, turn = time.monotonic(), self.announcement.turn
        if isinstance(message, ModelQueue):
            self._queues.received(link.node_id, message, now)
            leading = self._node.leadership.leading and self.announcement.given
            if leading and (message.term, message.number) < (turn.term, turn.number):
                with contextlib.suppress(MlxtpError):  # it is sent over the next link
                    link.send(turn)
        elif LeaderClaim(message.term, link.node_id) == self._node.leadership.claim:
            self._take(message, now)
            self.requests.reported = None  # the announcement requests an acknowledgement
        self._node.changed()

    def _greet(self, link: ControlLink) -> None:
        """Send the coordinator's announcement over a new link. This node will also report its queue again."""
        self.requests.reported = None
        if self._node.leadership.leading and self.announcement.given:
            link.send(self.announcement.turn)

    def _remind(self, _now: float) -> None:
        """Repeat the pending announcement with each heartbeat, for members that have not received it."""
        if self._node.leadership.leading and self.announcement.pending:
            self._node.links.broadcast(self.announcement.turn)

    def _take(self, turn: ModelTurn, now: float) -> None:
        if self.announcement.received(turn, now):
            self.requests.refuse(turn)

    # --- advancing -----------------------------------------------------------------------------------

    def advance(self, now: float) -> float:
        """Advance the queue. Return the time of the next advance, if nothing changes before."""
        self.announcement.expire(now)
        status = self._supervisor.status
        self.fate = self.fate.next(
            self._node.desired.now,
            now,
            ready=self._ready,
            failed=status.resting and status.state is ServingState.FAILED,
            unplanned=bool(self._reconciler.unplanned),
        )
        self.requests.remember_folder()
        if self._node.leadership.leading:
            self._lead(now)
        self.requests.admit()
        self._report_queue()
        if self.requests.waiting or self.announcement.pending:
            return now + BEAT_S
        until = [until for _, until in self.announcement.refused.values()]
        if self.fate.lacking_since is not None:
            until.append(self.fate.lacking_since + UNPLANNED_S)
        return min((each for each in until if each > now), default=math.inf)

    @property
    def _ready(self) -> bool:
        """True if the desired model is served. The state alone may still be that of the model before it."""
        supervisor = self._supervisor
        return supervisor.status.state is ServingState.READY and bool(supervisor.gateway.models())

    def _report_queue(self) -> None:
        """Report this node's queue to the coordinator, if there ever was one."""
        claim, queue = self._node.leadership.claim, self.requests.queue()
        if self._node.leadership.leading or not claim.node_id:
            return
        pending, given = self.announcement.pending, self.announcement.given
        word = (claim, queue if pending else (queue.term, queue.number, queue.waiting))
        if word == self.requests.reported or not (queue.waiting or self.requests.reported or given):
            return
        with contextlib.suppress(MlxtpError):  # it is sent over the next link
            self._node.links.send(claim.node_id, queue)
            self.requests.reported = word

    # --- where this node coordinates -----------------------------------------------------------------

    def _lead(self, now: float) -> None:
        node = self._node
        statuses = node.membership.statuses()
        here = (Standing.ALIVE, Standing.SUSPECT)  # a suspect may be back with running requests
        present = {node.node_id, *(other for other, each in statuses.items() if each.state in here)}
        while True:
            self._queues.received(node.node_id, self.requests.queue(), now)
            term, desired = node.leadership.claim.term, node.desired.now
            action = self._queues.decide(term, desired, present, served=self._ready, now=now)
            if isinstance(action, ModelTurn):
                self._announce(action, now)
                continue
            turn = self.announcement.turn
            if not turn.model or not self.announcement.pending:
                break
            selected = self._selection.announced(turn)
            if selected.error is not None:
                log.warning("%s is not loaded for a request: %s", turn.model, selected.error.detail)
                self._give_up(turn.model, selected.error, desired.model, now)
            elif selected.state is SelectionState.CHECKED and isinstance(action, LoadModel):
                log.info("%s is loaded for a request", action.model)
                node.desired.set(action.model, by_person=False)
            else:
                break
        if (error := self._why_not(now)) is not None:
            self._go_back(error, now)

    def _announce(self, turn: ModelTurn, now: float) -> None:
        self._take(turn, now)
        self._node.links.broadcast(turn)
        self.requests.admit()

    def _why_not(self, now: float) -> MlxtpError | None:
        """Return the error that prevents serving the desired model, once that is certain."""
        fate, desired, why = self.fate, self._node.desired.now, self._reconciler.unplanned
        if fate.failed is not None:  # perhaps an older one
            return self._supervisor.status.reason if fate.failed == desired else None
        if fate.lacking_since is None or fate.present != desired:
            return None
        if self._models.desired.problem and all(map(self._models.reported_by, self._node.links.nodes())):
            return ModelError(why)
        return GroupError(why, Code.NOT_READY) if now >= fate.lacking_since + UNPLANNED_S else None

    def _go_back(self, error: MlxtpError, now: float) -> None:
        """Give up the desired model. If a request brought it, serve the model before it."""
        desired, before = self._node.desired.now, self.fate.served
        if not desired.model:
            return
        if desired.pinned or before is None or before.model == desired.model:
            if self._queues.waits_for(desired.model):
                self._give_up(desired.model, error, desired.model, now)
            return
        instead = before.model or "nothing"
        log.warning("%s cannot be served: %s; going back to %s", desired.model, error.detail, instead)
        self._give_up(desired.model, error, before.model, now)
        self._node.desired.set(before.model, before.nodes, by_person=False)

    def _give_up(self, model: str, error: MlxtpError, instead: str, now: float) -> None:
        pinned = self._node.desired.now.pinned  # it is no client's choice
        broken = of_the_model(error) and not pinned
        self._announce(self._queues.refuse(model, error.detail, instead, broken=broken), now)


def _cannot(turn: ModelTurn) -> RequestError:
    detail = f"{turn.refused} could not be loaded: {turn.why}"
    if turn.broken:
        return RequestError(detail, Code.MODEL_INVALID, param="model")
    return _unready(f"{detail}; try again later")


def _unready(detail: str) -> RequestError:
    return RequestError(detail, Code.NOT_READY, status=503)
