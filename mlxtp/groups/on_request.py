"""Requests for models that are not ready: each waits for its deployment, or makes one.

A request for a model on this Mac's disk makes a deployment, which ends after a while without requests. The
coordinator finds room for it, or removes the least recently used deployment that is not pinned.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from ..api.backend import AT_ONCE, ModelInfo, ModelLease, StoredModelInfo
from ..api.catalog import UNNAMED
from ..cluster.cluster_state import KEEP_S, LONGEST_S, PINNED, YIELDS, DeploymentTable, name_of
from ..cluster.node import BEAT_S, ClusterNode
from ..errors import Code, ModelError, RequestError, UserError
from ..gateway.gateway import Gateway, ModelSwitch
from ..models.inspect import full_name, named_folders, stored_models, stored_name
from ..short_names import stands_for
from ..wire.cluster_messages import Deployment
from .group import Group
from .groups import Groups
from .health import ServingState, of_the_model
from .machines import Machines

log = logging.getLogger(__name__)

NEWS_S = 1.0  #: Seconds between two progress checks of a waiting request.
UNPLANNED_S = 5.0  #: Seconds that a deployment may have no place before the requests for it fail.
REFUSED_S = 60.0  #: Seconds after a failure to load a model before another request may load it.
ENDS_S = 3 * BEAT_S  #: Seconds until a failed deployment ends, so that all members report why.
MOST_FOLDERS = 20  #: Folders that keep the short name of their deployment.


class WaitingLease:
    """Implements `api.backend.ModelLease`. The wait ends with `late` after `within_s`. `outcome` is the
    reason for a refusal, or None once the request may begin.
    """

    model = ""

    def __init__(
        self, deployment: str, client: int, within_s: float, late: RequestError, owner: OnRequest
    ) -> None:
        loop = asyncio.get_running_loop()
        self.client = client
        self.deployment = deployment
        self.since = time.monotonic()
        self.outcome: asyncio.Future[RequestError | None] = loop.create_future()
        self._late = late
        self._until = loop.time() + within_s
        self._owner = owner

    @property
    def come(self) -> bool:
        return self.outcome.done() and self.outcome.result() is None

    def progress(self) -> str:
        return self._owner.progress(self.deployment)

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
        self._owner.leave(self)


class OnRequest(ModelSwitch):
    """Requests of this node's clients that wait for a deployment or use it."""

    def __init__(self, node: ClusterNode, gateway: Gateway, groups: Groups, machines: Machines) -> None:
        self.leases: dict[WaitingLease, None] = {}
        self._node = node
        self._gateway = gateway
        self._groups = groups
        self._machines = machines
        self._on = node.settings.load_on_request
        self._made: set[str] = set()  #: Deployments that requests at this node made.
        self._ends: dict[str, float] = {}  #: When deployments of `_made` that cannot be loaded end.
        #: Reason and end of the refusal of failed models, by deployment.
        self._refused: dict[str, tuple[RequestError, float]] = {}
        self._folders: dict[str, str] = {}  #: Paths by deployment, the last served at the end.
        gateway.switch_models(self, node.changed)
        gateway.deployments.leased = lambda name: any(each.deployment == name for each in self.leases)
        gateway.deployments.waiting = lambda: (each.client for each in self.leases if not each.outcome.done())
        node.desired.on_change(self._changed)
        node.rounds.add(self.advance)

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        if not self._on:
            return ()
        served = {name: Path(path) for name, path in self._folders.items()}
        named = await asyncio.to_thread(named_folders, self._node.settings.model_folders)
        return await asyncio.to_thread(stored_models, (named | served).items())

    async def acquire_model(
        self, name: str | None, within_s: float, keep_s: float | None, client: int
    ) -> ModelLease:
        row = self._row(name)
        if row is None and name in UNNAMED:
            if not self._on:
                return AT_ONCE
            raise _unready(
                "nothing is loaded; name a model that is on this Mac's disk, or run `mlxtp serve MODEL`"
            )
        if row is None and self._on:
            row = await self._stored(name or "", keep_s, client)
        if row is None:
            return AT_ONCE
        if (refusal := self._refusal(row.name, waited_s=0.0)) is not None:
            raise refusal
        # Without the option, requests do not reload a deployment that yields its room.
        if keep_s is not None and not row.pinned and (self._on or row.keep_s != YIELDS):
            row = self._node.desired.serve(row.model, keep_s=_kept(keep_s))
        if self._model(row.name) is None and not self._gateway.closing:
            self._check_wait(client)
        lease = WaitingLease(row.name, client, *self._bound(row.name, within_s), self)
        self.leases[lease] = None
        if self._gateway.closing:  # the gateway refuses it
            lease.outcome.set_result(None)
        else:
            self._admit(lease.deployment, [lease])
            if not lease.come:
                self._node.changed()
        return lease

    def leave(self, lease: WaitingLease) -> None:
        """Note that a request ended or no longer waits: its model may then end at once."""
        self.leases.pop(lease, None)
        row = self._node.desired.table.get(lease.deployment)
        if row is not None and row.keep_s == 0:
            self._node.changed()

    def progress(self, deployment: str) -> str:
        groups = self._groups.replicas_of(deployment)
        if coming := [each.supervisor.status.progress for each in groups if each.scope.assignment.owner]:
            return coming[0]
        if in_use := ", ".join(dict.fromkeys(self._in_use(deployment))):
            return f"waiting until the requests for {in_use} end"
        return next((each.scope.why_not for each in groups), "waiting")

    # --- the deployment of a name --------------------------------------------------------------------

    def _row(self, name: str | None) -> Deployment | None:
        rows = self._node.desired.table.live()
        if name in UNNAMED:
            return next((row for row in rows if not self._makes_vectors(row)), next(iter(rows), None))
        for row in rows:
            dispatcher = self._gateway.deployments.by_name.get(row.name)
            info = dispatcher.served if dispatcher is not None else None
            if name in (row.name, row.model) or (info is not None and name in (info.id, *info.aliases)):
                return row
        return next((row for row in rows if row.model == stands_for(name)), None)

    async def _stored(self, name: str, keep_s: float | None, client: int) -> Deployment | None:
        """Make a deployment of a model on this Mac's disk; None if it is not there."""
        try:
            model = await asyncio.to_thread(self._stored_name, name)
        except ModelError as error:
            detail = f"{name} cannot be served: {error.detail}"
            if error.code is Code.MODEL_NOT_FOUND:
                raise RequestError(detail, error.code, status=404, param="model") from None
            raise RequestError(detail, Code.MODEL_INVALID, param="model") from None
        if model is None:
            return None
        deployment = name_of(model)
        present = self._node.desired.table.get(deployment)
        if present is not None and present.model == model:
            return present  # another request, or a user, was faster
        if present is not None and present.pinned:
            detail = f"{name} is on this Mac, but {present.model} is pinned under the same name"
            raise RequestError(detail, Code.MODEL_NOT_FOUND, status=404, param="model")
        if (refused := self._refused.get(deployment)) is not None and time.monotonic() < refused[1]:
            raise refused[0]
        self._check_wait(client)
        log.info("%s is loaded for a request", model)
        self._refused.pop(deployment, None)
        try:
            row = self._node.desired.serve(model, keep_s=KEEP_S if keep_s is None else _kept(keep_s))
        except UserError as error:
            raise _unready(error.detail) from None
        self._made.add(deployment)
        return row

    def _stored_name(self, name: str) -> str | None:
        """Return the full name of a model on this Mac's disk, or None."""
        path = self._folders.get(name)
        if path is None and (folder := named_folders(self._node.settings.model_folders).get(name)):
            return name if stored_name(str(folder)) is not None else None  # each Mac has its own folders
        return stored_name(path or full_name(name))

    def _changed(self, before: DeploymentTable, after: DeploymentTable) -> None:
        """Keep folders' short names, which clients know, after they are served."""
        for row in before.live():
            if row.model.startswith("/"):
                self._folders.pop(row.name, None)
                self._folders[row.name] = row.model
        wanted = {row.name for row in after.live() if row.pinned}  # by a user
        self._made = {name for name in self._made - wanted if after.get(name) is not None}
        while len(self._folders) > MOST_FOLDERS:
            del self._folders[next(iter(self._folders))]

    def _bound(self, deployment: str, within_s: float) -> tuple[float, RequestError]:
        queue_s = self._node.settings.limits.queue_s
        bound_s = min(within_s or queue_s, queue_s)
        words = f"{deployment} was not there within {bound_s:g} s"
        if bound_s < queue_s:
            return bound_s, RequestError(words, Code.DEADLINE, status=504, param="deadline_s")
        return queue_s, RequestError(f"{words}; try again", Code.OVERLOADED, status=503)

    # --- rounds --------------------------------------------------------------------------------------

    def advance(self, now: float) -> float:
        waiting = defaultdict[str, list[WaitingLease]](list)
        for lease in self.leases:
            if not lease.outcome.done():
                waiting[lease.deployment].append(lease)
        for deployment, leases in waiting.items():
            self._admit(deployment, leases)
        for deployment in [each for each, at in self._ends.items() if now >= at]:
            del self._ends[deployment]
            wanted = deployment not in self._made or deployment in waiting
            if not wanted and self._refusal(deployment, UNPLANNED_S) is not None:
                self._node.desired.unload(deployment)
        return now + BEAT_S if waiting or self._ends else math.inf

    def _admit(self, deployment: str, leases: list[WaitingLease]) -> None:
        model = self._model(deployment)
        waited_s = time.monotonic() - min(lease.since for lease in leases)
        refusal = None
        if self._gateway.closing:
            refusal = RequestError(f"{self._gateway.closing}; try again", Code.SHUTTING_DOWN, status=503)
        elif model is None and (refusal := self._refusal(deployment, waited_s)) is None:
            return
        for lease in leases:
            lease.model = model.id if model is not None else ""
            lease.outcome.set_result(refusal)
        if refusal is not None and refusal.code is not Code.SHUTTING_DOWN:
            self._give_up(deployment, refusal)

    def _check_wait(self, client: int) -> None:
        """Raise RequestError if too many requests wait already."""
        self._gateway.admission.check_bounds(client, 0, self._gateway.deployments.open())

    def _makes_vectors(self, row: Deployment) -> bool:
        return (model := self._model(row.name)) is not None and model.vectors is not None

    def _model(self, deployment: str) -> ModelInfo | None:
        dispatcher = self._gateway.deployments.by_name.get(deployment)
        return dispatcher.model if dispatcher is not None else None

    def _refusal(self, deployment: str, waited_s: float) -> RequestError | None:
        """Return the error for a request that waits in vain; None if it should wait or start."""
        if self._node.desired.table.get(deployment) is None:
            return _unready(f"{deployment} was unloaded; try again")
        groups = self._groups.replicas_of(deployment)
        states = [group.supervisor.status for group in groups]
        if any(status.state is ServingState.READY for status in states):
            return None
        if states and all(status.state is ServingState.DRAINING for status in states):
            why = states[0].closing or (states[0].reason.detail if states[0].reason is not None else "")
            return RequestError(f"{why}; try again", Code.SHUTTING_DOWN, status=503)
        whys = [self._why_not(group, waited_s) for group in groups]
        return next(iter(whys), None) if whys and all(whys) else None

    def _why_not(self, group: Group, waited_s: float) -> RequestError | None:
        status, name, row = group.supervisor.status, group.scope.deployment, group.scope.row
        if status.state is ServingState.FAILED and status.reason is not None:
            if row is not None and row.keep_s in (PINNED, YIELDS):  # no client chose it
                return _unready(f"{name} cannot be served: {status.reason.detail}")
            detail = f"{name} could not be loaded: {status.reason.detail}"
            if of_the_model(status.reason) or any(each.broken for _, each in group.scope.reports()):
                return RequestError(detail, Code.MODEL_INVALID, param="model")
            return _unready(f"{detail}; try again later")
        model, queue_s = group.scope.model, self._node.settings.limits.queue_s
        if model.problem or model.left_s > queue_s:
            prevented = f"{name} cannot be served on this Mac: {model.problem}"
            return _unready(prevented if model.problem else f"{model.coming}; try again later")
        if group.unplanned and waited_s >= UNPLANNED_S and not self._has_room_later(group):
            return _unready(f"{name} cannot be served: {group.unplanned}; try again later")
        return None

    def _in_use(self, deployment: str) -> Iterator[str]:
        """Yield other deployments that give way after their open requests."""
        for each in self._groups.reports():
            row = self._node.desired.table.get(each.deployment)
            if row is not None and not row.pinned and each.open_requests and row.name != deployment:
                yield row.name

    def _has_room_later(self, group: Group) -> bool:
        """Return True if a group may get a place once other models are unused."""
        row, model = group.scope.row, group.scope.model
        if row is None or model.path is None or not any(self._in_use(row.name)):
            return False
        return not self._machines.no_place(model.shape, row)

    def _give_up(self, deployment: str, refusal: RequestError) -> None:
        """Have a deployment end that only requests made, and that cannot be loaded."""
        if deployment in self._made:
            log.warning("%s, loaded for a request, is given up: %s", deployment, refusal.detail)
            self._ends[deployment] = time.monotonic() + ENDS_S
        states = [group.supervisor.status.state for group in self._groups.replicas_of(deployment)]
        if ServingState.FAILED in states:
            now = time.monotonic()
            self._refused = {name: each for name, each in self._refused.items() if now < each[1]}
            self._refused[deployment] = (refusal, now + REFUSED_S)


def _kept(keep_s: float) -> int:
    """Return `Deployment.keep_s` for a client's value; clients cannot pin a model."""
    return min(math.ceil(keep_s), LONGEST_S) if keep_s >= 0 else LONGEST_S


def _unready(detail: str) -> RequestError:
    return RequestError(detail, Code.NOT_READY, status=503)
