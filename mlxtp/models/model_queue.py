"""Requests that wait until the model which they name is served: this node's part in changing it for them.

`models/queue_policy.py` decides, where this node coordinates; here it is heard, told and carried out, and the
requests of this node's clients wait for their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from ..api.backend import AT_ONCE, ModelLease, StoredModelInfo
from ..api.budget import UNNAMED
from ..cluster.cluster_state import NOBODY, NOTHING, LeaderClaim
from ..cluster.failure_detector import MemberState as Standing
from ..cluster.surroundings import Surroundings
from ..config import EMBEDDED_MODEL
from ..errors import Code, GroupError, MlxtpError, ModelError, RequestError
from ..groups.health import ServingState, of_the_model
from ..placement.model_shape import ModelShape
from ..wire.cluster_messages import MAX_WAITING, DesiredState, ModelQueue, ModelTurn
from .inventory import stored_models
from .names import stored_name
from .preflight import ModelPreflight
from .queue_policy import AnnounceModel, LoadModel, ModelQueues

log = logging.getLogger(__name__)

UNHEARD = ModelTurn(0, 0, "", "", "")
NEWS_S = 1.0
"""How often a request that waits looks how far its model is."""
REFUSED_S = 60.0
"""How long a model that could not be served is not tried again."""
MOST_FOLDERS = 20
"""How many folders are known by the short name under which they were served."""
UNPLANNED_S = 12.0
"""How long a model may have no place: longer than the others take to tell that their memory is free again."""


class QueuedLease:
    """Implements `api.backend.ModelLease`. `named` is what `DesiredState` calls the model; empty for any."""

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
        """What it waits for; empty when it named nothing, and nothing is wanted any more."""
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


class ModelSwitcher:
    """Implements `gateway.ModelSwitch`. `unplanned` says why there is no group for what is wanted, or
    nothing; `no_place` why there could be none for a model of this shape."""

    def __init__(
        self, cluster: Surroundings, unplanned: Callable[[], str], no_place: Callable[[ModelShape], str]
    ) -> None:
        self._cluster = cluster
        gateway = cluster.supervisor.gateway
        gateway.switch, gateway.on_serving = self, cluster.changed
        self._unplanned = unplanned
        self._preflight = ModelPreflight(cluster.settings.kv_bits, no_place, cluster.changed)
        self._turns = ModelQueues()
        self._turn = UNHEARD
        """The last that was heard, of the coordinator in `_by`."""
        self._by = NOBODY
        self._waiting: dict[QueuedLease, None] = {}
        self._running: set[QueuedLease] = set()
        self._reported: object = None
        self._refused: dict[str, tuple[RequestError, float]] = {}
        """By model: why it could not be served, and until when it is not tried again."""
        self._before: DesiredState | None = None
        """What was served, or that nothing was to be, before anything else was wanted."""
        self._folders: dict[str, str] = {}
        """By the name under which it was served: a folder's whole path, the one served last at the end."""
        self._failed: DesiredState | None = None
        """What was wanted when an epoch failed for good, as long as nothing comes after it."""
        self._placed = (NOTHING, 0.0)
        """What is wanted, and when it last had a place."""

    # --- for requests --------------------------------------------------------------------------------

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        """What a request may have loaded."""
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
        if not self._on or self._cluster.supervisor.gateway.closing:  # it is refused as it always was
            self._begin(lease)
        else:
            self._admit()
            if not lease.come:
                self._cluster.changed()
        return lease

    async def _stored(self, name: str) -> str | None:
        """What `DesiredState` would call a model on this Mac's disk; None for what is not there."""
        try:
            return await asyncio.to_thread(stored_name, self._folders.get(name, name))
        except ModelError as error:
            detail = f"{name} cannot be served: {error.detail}"
            if error.code is Code.MODEL_NOT_FOUND:
                raise RequestError(detail, error.code, status=404, param="model") from None
            raise RequestError(detail, Code.MODEL_INVALID, param="model") from None

    def leave(self, lease: QueuedLease) -> None:
        """A request has ended, or waits no more."""
        known = lease in self._waiting or lease in self._running
        self._waiting.pop(lease, None)
        self._running.discard(lease)
        if known and (self._waiting or self._pending or self._reported is not None):
            self._cluster.changed()

    def progress(self, target: str) -> str:
        """How far a model is, in a few words."""
        desired = self._desired.model
        if target != desired or not self._may_begin(target):
            return f"waiting until nothing is asked of {desired} any more" if desired else "waiting"
        return self._cluster.supervisor.progress

    def _known(self, name: str | None) -> str | None:
        """What `DesiredState` calls it, if that is what the name means; None for another model."""
        desired = self._desired.model
        models = self._cluster.supervisor.gateway.models()
        if name in (*UNNAMED, desired):
            return desired
        return desired if models and (name == models[0].id or name in models[0].aliases) else None

    def _waiter(self, target: str, within_s: float, *, named: bool) -> QueuedLease:
        queue_s = self._cluster.settings.limits.queue_s
        if within_s and within_s < queue_s:
            late = RequestError(
                f"{target} was not there within {within_s:g} s", Code.DEADLINE, status=504, param="deadline_s"
            )
            return QueuedLease(target if named else "", within_s, late, self)
        detail = f"{target} was not there within {queue_s:g} s, as others are asked for; try again"
        late = RequestError(detail, Code.OVERLOADED, status=503)
        return QueuedLease(target if named else "", queue_s, late, self)

    @property
    def wanted(self) -> str:
        """What shall be served; empty is nothing."""
        return self._desired.model

    # --- what is heard -------------------------------------------------------------------------------

    def received(self, node_id: str, message: ModelTurn | ModelQueue, now: float) -> None:
        """A member said something. Turns are given by who coordinates alone."""
        if isinstance(message, ModelQueue):
            self._turns.received(node_id, message, now)
            if self._behind(message):
                with contextlib.suppress(MlxtpError):  # it hears of it over the next link
                    self._cluster.links.send(node_id, self._turn)
        elif LeaderClaim(message.term, node_id) == self._cluster.leadership.claim:
            self._received_turn(message, now)
            self._reported = None  # it asks, by saying it, whether this node has heard
        self._cluster.changed()

    def met(self) -> ModelTurn | None:
        """There is a new link to a member: this node repeats its word, and a coordinator the turn."""
        self._reported = None
        return self._turn if self._cluster.leadership.leading and self._given else None

    def _behind(self, queue: ModelQueue) -> bool:
        """Whether a member has not heard the turn that this coordinator gave last."""
        turn, leading = self._turn, self._cluster.leadership.leading and self._given
        return leading and (queue.term, queue.number) < (turn.term, turn.number)

    def _received_turn(self, turn: ModelTurn, now: float) -> None:
        claim = self._cluster.leadership.claim
        if self._by == claim and turn.number <= self._turn.number:
            return
        self._turn, self._by = turn, claim
        if not turn.refused:
            return
        if turn.refused != turn.model:  # what is wanted all the same may be there any moment
            self._refused[turn.refused] = (_cannot(turn), now + REFUSED_S)
        for lease in self._waiting:
            if lease.target == turn.refused:
                _refuse(lease, _cannot(turn))

    # --- what follows --------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """After each change, and twice a second."""
        self._refused = {model: said for model, said in self._refused.items() if said[1] > now}
        if not self._desired.model or self._ready:
            self._before = self._desired
        self._remember()
        if self._cluster.leadership.leading:
            self._lead(now)
        self._admit()
        self._report_queue()

    def _remember(self) -> None:
        """A folder that is served keeps the short name that clients see, when it is served no more."""
        model, models = Path(self._desired.model), self._cluster.supervisor.gateway.models()
        name = models[0].id if models else ""
        if not model.is_absolute() or name != model.name or name == EMBEDDED_MODEL:
            return
        self._folders.pop(name, None)
        self._folders[name] = str(model)
        while len(self._folders) > MOST_FOLDERS:
            del self._folders[next(iter(self._folders))]

    def remind(self) -> None:
        """With each beat: who has not heard yet hears it again."""
        if self._cluster.leadership.leading and self._pending:
            self._cluster.links.broadcast(self._turn)

    @property
    def _on(self) -> bool:
        return self._cluster.settings.load_on_request

    @property
    def _desired(self) -> DesiredState:
        return self._cluster.leadership.desired

    @property
    def _ready(self) -> bool:
        """Whether what is wanted is served. The state alone may still be that of what was wanted before."""
        supervisor = self._cluster.supervisor
        return supervisor.state is ServingState.READY and bool(supervisor.gateway.models())

    @property
    def _given(self) -> bool:
        """Whether the present coordinator has given anybody a turn. Of one term there may have been two."""
        return self._turn.number > 0 and self._by == self._cluster.leadership.claim

    @property
    def _pending(self) -> bool:
        return self._given and self._turn.model != self._desired.model

    def _may_begin(self, target: str) -> bool:
        return target == (self._turn.model if self._given else self._desired.model)

    def _refusal(self, target: str) -> RequestError | None:
        """Why a request for this model need not wait."""
        if not target:
            detail = "nothing is loaded; name a model that is on this Mac's disk, or `mlxtp serve MODEL`"
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
        supervisor = self._cluster.supervisor
        if desired.pinned and supervisor.state is ServingState.FAILED and supervisor.reason is not None:
            return RequestError(
                f"{target} cannot be served: {supervisor.reason.detail}", Code.NOT_READY, status=503
            )
        if why := self._missing(target):
            return RequestError(f"{target} cannot be served on this Mac: {why}", Code.NOT_READY, status=503)
        if target != desired.model and target in self._refused:
            return self._refused[target][0]
        return None

    def _missing(self, target: str) -> str:
        """Why what is wanted can be had elsewhere at most: a request needs its tokenizer, here."""
        cluster, desired = self._cluster, self._desired
        here = cluster.model
        if target != desired.model or here.version != desired.version or cluster.supervisor.gateway.models():
            return ""
        elsewhere = any(
            told.fingerprint and told.desired == here.version for told in cluster.peer_info.models.values()
        )
        return here.problem if desired.pinned or elsewhere else ""  # else the coordinator gives it up

    def _admit(self) -> None:
        """Let begin whose turn has come, and say why to those whose turn never will."""
        gateway = self._cluster.supervisor.gateway
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
        running = len(self._running) + self._cluster.supervisor.gateway.relayed  # some perhaps twice
        return ModelQueue(turn.term, turn.number, tuple(waiting)[:MAX_WAITING], running)

    def _report_queue(self) -> None:
        """The coordinator hears of this node's queue, if there ever was one."""
        claim, queue = self._cluster.leadership.claim, self._queue()
        if self._cluster.leadership.leading or not claim.node_id:
            return
        word = (claim, queue if self._pending else (queue.term, queue.number, queue.waiting))
        if word == self._reported or not (queue.waiting or self._reported or self._given):
            return
        with contextlib.suppress(MlxtpError):  # it hears of it over the next link
            self._cluster.links.send(claim.node_id, queue)
            self._reported = word

    # --- where this node coordinates -----------------------------------------------------------------

    def _lead(self, now: float) -> None:
        cluster = self._cluster
        statuses = cluster.membership.statuses()
        here = (Standing.ALIVE, Standing.SUSPECT)  # whose link broke may be back with requests that go on
        present = {cluster.node_id, *(node for node, each in statuses.items() if each.state in here)}
        while True:
            self._turns.received(cluster.node_id, self._queue(), now)
            action = self._turns.decide(
                cluster.leadership.claim.term, self._desired, present, served=self._ready, now=now
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
                cluster.set_desired(action.model, by_person=False)
            else:
                break
        if (error := self._why_not(now)) is not None:
            self._go_back(error, now)

    def _give(self, turn: ModelTurn, now: float) -> None:
        self._received_turn(turn, now)
        self._cluster.links.broadcast(turn)
        self._admit()

    def _why_not(self, now: float) -> MlxtpError | None:
        """Why what is wanted cannot be served, once that is certain."""
        supervisor, desired = self._cluster.supervisor, self._desired
        if supervisor.resting and supervisor.state is ServingState.FAILED:
            if self._failed is None:
                self._failed = desired
            return supervisor.reason if self._failed == desired else None  # it is still that of another one
        self._failed = None
        why = self._unplanned()
        if not why or self._placed[0] != desired:
            self._placed = (desired, now)
        elif self._cluster.model.problem and self._all_have_looked():
            return ModelError(why)
        elif now >= self._placed[1] + UNPLANNED_S:
            return GroupError(why, Code.NOT_READY)
        return None

    def _all_have_looked(self) -> bool:
        """Whether every member with a link has said whether it has what is wanted: one of them may."""
        told = [self._cluster.peer_info.models.get(node) for node in self._cluster.links.nodes()]
        return all(
            each is not None
            and each.desired == self._cluster.model.version
            and bool(each.fingerprint or each.problem)
            for each in told
        )

    def _go_back(self, error: MlxtpError, now: float) -> None:
        """What is wanted cannot be served. If a request brought it, serve what was there before."""
        desired, before = self._desired, self._before
        if not desired.model:
            return
        if desired.pinned or before is None or before.model == desired.model:
            if self._turns.waits_for(desired.model):
                self._give_up(desired.model, error, desired.model, now)
            return
        instead = before.model or "nothing"
        log.warning("%s cannot be served: %s; %s is again", desired.model, error.detail, instead)
        self._give_up(desired.model, error, before.model, now)
        self._cluster.set_desired(before.model, before.nodes, by_person=False)

    def _give_up(self, model: str, error: MlxtpError, instead: str, now: float) -> None:
        broken = of_the_model(error) and not self._desired.pinned  # that is no client's choice
        self._give(self._turns.refuse(model, error.detail, instead, broken=broken).announcement, now)

    async def close(self) -> None:
        """Nothing is looked at any more."""
        await self._preflight.close()


def _cannot(turn: ModelTurn) -> RequestError:
    detail = f"{turn.refused} could not be loaded: {turn.why}"
    if turn.broken:
        return RequestError(detail, Code.MODEL_INVALID, param="model")
    return RequestError(f"{detail}; try again later", Code.NOT_READY, status=503)


def _refuse(lease: QueuedLease, refusal: RequestError) -> None:
    lease.refusal = refusal
    lease.news.set()
