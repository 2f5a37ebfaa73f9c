"""Queue of requests for models that are not loaded: this node's part in changing the model for them.

`groups/queue_policy.py` decides, on the coordinator. Here its announcements are received, sent and carried
out, and the requests of this node's clients wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from ..api.backend import AT_ONCE, ModelLease, StoredModelInfo
from ..api.catalog import UNNAMED
from ..cluster.cluster_state import NO_CLAIM, NOTHING, LeaderClaim
from ..cluster.links import ControlLink
from ..cluster.membership import MemberState as Standing
from ..cluster.node import BEAT_S, ClusterNode
from ..config import EMBEDDED_MODEL
from ..errors import Code, GroupError, MlxtpError, ModelError, RequestError
from ..gateway.gateway import ModelSwitch
from ..models.inspect import inspect, stored_models, stored_name
from ..models.local_model import LocalModel
from ..placement.model_shape import ModelShape
from ..wire.cluster_messages import MAX_WAITING, DesiredState, ModelQueue, ModelTurn
from .health import ServingState, of_the_model
from .lifecycle import Supervisor
from .queue_policy import AnnounceModel, LoadModel, ModelQueues

log = logging.getLogger(__name__)

UNHEARD = ModelTurn(0, 0, "", "", "")
NEWS_S = 1.0  #: Seconds between two progress checks of a waiting request.
REFUSED_S = 60.0  #: Seconds until a model that could not be served is tried again.
MOST_FOLDERS = 20  #: Folders that are known by the short name under which they were served.
#: Seconds that a model may have no place: longer than the others take to report that their memory is free.
UNPLANNED_S = 12.0


class QueuedLease:
    """Lease of a model; implements `api.backend.ModelLease`.

    `named` is the model's name in `DesiredState`; empty for any model.
    """

    model = ""

    def __init__(self, named: str, within_s: float, late: RequestError, switching: ModelSwitcher) -> None:
        self._named = named
        self.come = False
        self.refusal: RequestError | None = None
        self.news = asyncio.Event()
        self._switching = switching
        self._late = late
        self._until = asyncio.get_running_loop().time() + within_s

    @property
    def target(self) -> str:
        """The model that it waits for; empty if it named none, and no model is desired any longer."""
        return self._named or self._switching.wanted

    def progress(self) -> str:
        return self._switching.progress(self.target)

    async def wait(self) -> AsyncIterator[str]:
        told, loop = "", asyncio.get_running_loop()
        while not self.come:
            self.news.clear()
            left_s = self._until - loop.time()
            if self.refusal is None and left_s <= 0:
                self.refusal = self._late
            if self.refusal is not None:
                self.close()
                raise self.refusal
            if told != (told := self.progress()):
                yield told
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, NEWS_S)):
                    await self.news.wait()

    def close(self) -> None:
        self._switching.leave(self)


class ModelPreflight:
    """Checker of one announced model at a time; calls `on_change` when it is done.

    `no_place` returns the reason why the present members have no place for a model of this shape, or "".
    """

    def __init__(
        self, kv_bits: int, no_place: Callable[[ModelShape], str], on_change: Callable[[], None]
    ) -> None:
        self._kv_bits = kv_bits
        self._no_place = no_place
        self._on_change = on_change
        self._turn: ModelTurn | None = None
        self._task: asyncio.Task[MlxtpError | None] | None = None

    def about(self, turn: ModelTurn) -> tuple[bool, MlxtpError | None]:
        """Return True if the announced model was checked, and the error that prevents serving it."""
        if turn != self._turn:
            if self._task is not None:
                self._task.cancel()
            self._turn, self._task = turn, asyncio.ensure_future(self._inspect(turn.model))
            self._task.add_done_callback(lambda _: self._on_change())
        assert self._task is not None
        return (True, self._task.result()) if self._task.done() else (False, None)

    async def _inspect(self, model: str) -> MlxtpError | None:
        try:
            found = await asyncio.to_thread(inspect, model, self._kv_bits)
        except ModelError as error:  # it may be on another Mac's disk
            return None if error.code is Code.MODEL_NOT_FOUND else error
        why = self._no_place(found.shape)
        return GroupError(why, Code.NOT_READY) if why else None

    async def close(self) -> None:
        """Cancel the check."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class ModelSwitcher(ModelSwitch):
    """Switcher of models for requests.

    `unplanned` returns the reason why there is no group for the desired model, or "". `no_place` returns the
    reason why there can be none for a model of this shape.
    """

    def __init__(
        self,
        node: ClusterNode,
        supervisor: Supervisor,
        model: LocalModel,
        unplanned: Callable[[], str],
        no_place: Callable[[ModelShape], str],
    ) -> None:
        self._node = node
        self._supervisor = supervisor
        self._model = model
        supervisor.gateway.switch_models(self, node.changed)
        self._unplanned = unplanned
        self._preflight = ModelPreflight(node.settings.kv_bits, no_place, node.changed)
        self._turns = ModelQueues()
        self._turn = UNHEARD  #: The last announcement received, of the coordinator in `_by`.
        self._by = NO_CLAIM
        self._waiting: dict[QueuedLease, None] = {}
        self._running: set[QueuedLease] = set()
        self._reported: object = None
        #: By model: why it could not be served, and until when it is not tried again.
        self._refused: dict[str, tuple[RequestError, float]] = {}
        #: The desired state that was last served, or was empty, before the present one.
        self._before: DesiredState | None = None
        #: By the name under which it was served: a folder's whole path, the one served last at the end.
        self._folders: dict[str, str] = {}
        #: The desired state when an epoch failed for good, until another state follows it.
        self._failed: DesiredState | None = None
        self._placed = (NOTHING, 0.0)  #: The desired state, and when it last had a place.
        node.links.on(self._received, ModelTurn, ModelQueue)
        node.links.on_up(self._greet)
        node.rounds.every(BEAT_S, self._remind, needed=node.links.nodes)
        node.rounds.add(self.advance)

    # --- for requests --------------------------------------------------------------------------------

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        """Return the models that a request may have loaded."""
        if not self._on or self._desired.pinned:
            return ()
        folders = [(name, Path(path)) for name, path in self._folders.items()]
        return await asyncio.to_thread(stored_models, folders)

    async def acquire_model(self, name: str | None, within_s: float) -> ModelLease:
        """See `Backend.acquire_model`."""
        target = self._known(name)
        if target is None and self._on:
            target = await self._stored(name or "")
        if target is None or not (target or self._on):
            return AT_ONCE
        if (refusal := self._refusal(target)) is not None:
            raise refusal
        if not self._on and not self._may_begin(target):
            raise RequestError(
                f"{self._turn.model} is loaded next, for a request that came before; try again",
                Code.NOT_READY,
                status=503,
            )
        lease = self._waiter(target, within_s, named=name not in UNNAMED)
        self._waiting[lease] = None
        if not self._on or self._supervisor.gateway.closing:  # the gateway refuses it
            self._begin(lease)
        else:
            self._admit()
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
        known = lease in self._waiting or lease in self._running
        self._waiting.pop(lease, None)
        self._running.discard(lease)
        if known and (self._waiting or self._pending or self._reported is not None):
            self._node.changed()

    def progress(self, target: str) -> str:
        """Return how far a model is, in a few words."""
        desired = self._desired.model
        if target != desired or not self._may_begin(target):
            return f"waiting until the requests for {desired} end" if desired else "waiting"
        return self._supervisor.status.progress

    def _known(self, name: str | None) -> str | None:
        """Return the desired model if that is what the name means; None for another model."""
        desired = self._desired.model
        models = self._supervisor.gateway.models()
        if name in (*UNNAMED, desired):
            return desired
        return desired if models and (name == models[0].id or name in models[0].aliases) else None

    def _waiter(self, target: str, within_s: float, *, named: bool) -> QueuedLease:
        queue_s = self._node.settings.limits.queue_s
        if within_s and within_s < queue_s:
            late = RequestError(
                f"{target} was not there within {within_s:g} s", Code.DEADLINE, status=504, param="deadline_s"
            )
            return QueuedLease(target if named else "", within_s, late, self)
        detail = f"{target} was not there within {queue_s:g} s, as other models are in use; try again"
        late = RequestError(detail, Code.OVERLOADED, status=503)
        return QueuedLease(target if named else "", queue_s, late, self)

    @property
    def wanted(self) -> str:
        """The desired model; empty for none."""
        return self._desired.model

    # --- messages from others ------------------------------------------------------------------------

    def _received(self, link: ControlLink, message: ModelTurn | ModelQueue) -> None:
        """Process a message from a member. Announcements count only from the coordinator."""
        now = time.monotonic()
        if isinstance(message, ModelQueue):
            self._turns.received(link.node_id, message, now)
            if self._behind(message):
                with contextlib.suppress(MlxtpError):  # it is sent over the next link
                    link.send(self._turn)
        elif LeaderClaim(message.term, link.node_id) == self._node.leadership.claim:
            self._received_turn(message, now)
            self._reported = None  # the announcement requests an acknowledgement
        self._node.changed()

    def _greet(self, link: ControlLink) -> None:
        """Send the coordinator's announcement over a new link. This node will also report its queue again."""
        self._reported = None
        if self._node.leadership.leading and self._given:
            link.send(self._turn)

    def _behind(self, queue: ModelQueue) -> bool:
        """Return True if a member has not received this coordinator's last announcement."""
        turn, leading = self._turn, self._node.leadership.leading and self._given
        return leading and (queue.term, queue.number) < (turn.term, turn.number)

    def _received_turn(self, turn: ModelTurn, now: float) -> None:
        claim = self._node.leadership.claim
        if self._by == claim and turn.number <= self._turn.number:
            return
        self._turn, self._by = turn, claim
        if not turn.refused:
            return
        if turn.refused != turn.model:  # the desired model itself may come at any time
            self._refused[turn.refused] = (_cannot(turn), now + REFUSED_S)
        for lease in self._waiting:
            if lease.target == turn.refused:
                _refuse(lease, _cannot(turn))

    # --- advancing -----------------------------------------------------------------------------------

    def advance(self, now: float) -> float:
        """Advance the queue. Return the time of the next advance, if nothing changes before."""
        self._refused = {model: said for model, said in self._refused.items() if said[1] > now}
        if not self._desired.model or self._ready:
            self._before = self._desired
        self._remember()
        if self._node.leadership.leading:
            self._lead(now)
        self._admit()
        self._report_queue()
        if self._waiting or self._pending:
            return now + BEAT_S
        return min((until for _, until in self._refused.values()), default=math.inf)

    def _remember(self) -> None:
        """Keep a served folder's short name, which clients see, for the time after it is served."""
        model, models = Path(self._desired.model), self._supervisor.gateway.models()
        name = models[0].id if models else ""
        if not model.is_absolute() or name != model.name or name == EMBEDDED_MODEL:
            return
        self._folders.pop(name, None)
        self._folders[name] = str(model)
        while len(self._folders) > MOST_FOLDERS:
            del self._folders[next(iter(self._folders))]

    def _remind(self, _now: float) -> None:
        """Repeat the pending announcement with each heartbeat, for members that have not received it."""
        if self._node.leadership.leading and self._pending:
            self._node.links.broadcast(self._turn)

    @property
    def _on(self) -> bool:
        return self._node.settings.load_on_request

    @property
    def _desired(self) -> DesiredState:
        return self._node.replica.desired

    @property
    def _ready(self) -> bool:
        """True if the desired model is served. The state alone may still be that of the model before it."""
        supervisor = self._supervisor
        return supervisor.status.state is ServingState.READY and bool(supervisor.gateway.models())

    @property
    def _given(self) -> bool:
        """True if the present coordinator has announced a model. One term may have had two coordinators."""
        return self._turn.number > 0 and self._by == self._node.leadership.claim

    @property
    def _pending(self) -> bool:
        return self._given and self._turn.model != self._desired.model

    def _may_begin(self, target: str) -> bool:
        return target == (self._turn.model if self._given else self._desired.model)

    def _refusal(self, target: str) -> RequestError | None:
        """Return the reason why a request for this model need not wait; None if it has to."""
        if not target:
            detail = "nothing is loaded; name a model that is on this Mac's disk, or run `mlxtp serve MODEL`"
            return RequestError(detail, Code.NOT_READY, status=503)
        desired = self._desired
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
            return RequestError(
                f"{target} cannot be served: {status.reason.detail}", Code.NOT_READY, status=503
            )
        if why := self._missing(target):
            return RequestError(f"{target} cannot be served on this Mac: {why}", Code.NOT_READY, status=503)
        if target != desired.model and target in self._refused:
            return self._refused[target][0]
        return None

    def _missing(self, target: str) -> str:
        """Return why this Mac lacks the desired model that others may have: a request needs its tokenizer
        here.
        """
        desired, here = self._desired, self._model
        if target != desired.model or here.version != desired.version or self._supervisor.gateway.models():
            return ""
        elsewhere = any(
            told.fingerprint and told.desired == here.version for told in self._node.peer_info.models.values()
        )
        return here.problem if desired.pinned or elsewhere else ""  # else the coordinator gives up the model

    def _admit(self) -> None:
        """Start the requests whose model is served, and refuse those whose model never will be."""
        gateway = self._supervisor.gateway
        for lease in list(self._waiting):
            if gateway.closing:
                _refuse(lease, RequestError(f"{gateway.closing}; try again", Code.SHUTTING_DOWN, status=503))
            elif lease.refusal is None and (refusal := self._refusal(lease.target)) is not None:
                _refuse(lease, refusal)
            elif (
                lease.refusal is None
                and lease.target == self._desired.model
                and self._may_begin(lease.target)
                and gateway.models()
            ):
                lease.model = gateway.models()[0].id
                self._begin(lease)

    def _begin(self, lease: QueuedLease) -> None:
        del self._waiting[lease]
        self._running.add(lease)
        lease.come = True
        lease.news.set()

    def _queue(self) -> ModelQueue:
        waiting = dict.fromkeys(lease.target for lease in self._waiting if lease.refusal is None)
        turn = self._turn if self._given else UNHEARD
        running = len(self._running) + self._supervisor.gateway.dispatcher.relayed  # some may count twice
        return ModelQueue(turn.term, turn.number, tuple(waiting)[:MAX_WAITING], running)

    def _report_queue(self) -> None:
        """Report this node's queue to the coordinator, if there ever was one."""
        claim, queue = self._node.leadership.claim, self._queue()
        if self._node.leadership.leading or not claim.node_id:
            return
        word = (claim, queue if self._pending else (queue.term, queue.number, queue.waiting))
        if word == self._reported or not (queue.waiting or self._reported or self._given):
            return
        with contextlib.suppress(MlxtpError):  # it is sent over the next link
            self._node.links.send(claim.node_id, queue)
            self._reported = word

    # --- where this node coordinates -----------------------------------------------------------------

    def _lead(self, now: float) -> None:
        node = self._node
        statuses = node.membership.statuses()
        here = (Standing.ALIVE, Standing.SUSPECT)  # a suspect may be back with running requests
        present = {node.node_id, *(other for other, each in statuses.items() if each.state in here)}
        while True:
            self._turns.received(node.node_id, self._queue(), now)
            action = self._turns.decide(
                node.leadership.claim.term, self._desired, present, served=self._ready, now=now
            )
            if isinstance(action, AnnounceModel):
                self._give(action.announcement, now)
                continue
            if not self._turn.model or not self._pending:
                break
            looked, error = self._preflight.about(self._turn)
            if error is not None:
                log.warning("%s is not loaded for a request: %s", self._turn.model, error.detail)
                self._give_up(self._turn.model, error, self._desired.model, now)
            elif looked and isinstance(action, LoadModel):
                log.info("%s is loaded for a request", action.model)
                node.desired.set(action.model, by_person=False)
            else:
                break
        if (error := self._why_not(now)) is not None:
            self._go_back(error, now)

    def _give(self, turn: ModelTurn, now: float) -> None:
        self._received_turn(turn, now)
        self._node.links.broadcast(turn)
        self._admit()

    def _why_not(self, now: float) -> MlxtpError | None:
        """Return the error that prevents serving the desired model, once that is certain."""
        status, desired = self._supervisor.status, self._desired
        if status.resting and status.state is ServingState.FAILED:
            if self._failed is None:
                self._failed = desired
            return status.reason if self._failed == desired else None  # else it is an older model's
        self._failed = None
        why = self._unplanned()
        if not why or self._placed[0] != desired:
            self._placed = (desired, now)
        elif self._model.problem and self._all_have_looked():
            return ModelError(why)
        elif now >= self._placed[1] + UNPLANNED_S:
            return GroupError(why, Code.NOT_READY)
        return None

    def _all_have_looked(self) -> bool:
        """Return True if every member with a link has reported on its search for the desired model."""
        return all(map(self._model.reported_by, self._node.links.nodes()))

    def _go_back(self, error: MlxtpError, now: float) -> None:
        """Give up the desired model. If a request brought it, serve the model before it."""
        desired, before = self._desired, self._before
        if not desired.model:
            return
        if desired.pinned or before is None or before.model == desired.model:
            if self._turns.waits_for(desired.model):
                self._give_up(desired.model, error, desired.model, now)
            return
        instead = before.model or "nothing"
        log.warning("%s cannot be served: %s; going back to %s", desired.model, error.detail, instead)
        self._give_up(desired.model, error, before.model, now)
        self._node.desired.set(before.model, before.nodes, by_person=False)

    def _give_up(self, model: str, error: MlxtpError, instead: str, now: float) -> None:
        broken = of_the_model(error) and not self._desired.pinned  # a pinned model is no client's choice
        self._give(self._turns.refuse(model, error.detail, instead, broken=broken).announcement, now)

    async def close(self) -> None:
        """Cancel the pre-flight check."""
        await self._preflight.close()


def _cannot(turn: ModelTurn) -> RequestError:
    detail = f"{turn.refused} could not be loaded: {turn.why}"
    if turn.broken:
        return RequestError(detail, Code.MODEL_INVALID, param="model")
    return RequestError(f"{detail}; try again later", Code.NOT_READY, status=503)


def _refuse(lease: QueuedLease, refusal: RequestError) -> None:
    lease.refusal = refusal
    lease.news.set()
