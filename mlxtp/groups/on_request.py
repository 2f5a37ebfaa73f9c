"""Requests for models that are not ready: each waits for its deployment, or makes one.

A request that names a model on this Mac's disk makes a deployment that ends after a while without requests.
The coordinator finds room for it, or removes the least recently used one that no user pinned.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path

from ..api.backend import AT_ONCE, ModelLease, StoredModelInfo
from ..api.catalog import UNNAMED
from ..cluster.deployments import KEEP_S, PINNED, YIELDS, DeploymentTable, name_of
from ..cluster.node import BEAT_S, ClusterNode
from ..errors import Code, ModelError, RequestError
from ..gateway.gateway import Gateway, ModelSwitch
from ..models.inspect import stored_models, stored_name
from ..wire.cluster_messages import Deployment
from .group import Group
from .groups import Groups
from .health import ServingState, of_the_model

log = logging.getLogger(__name__)

NEWS_S = 1.0  #: Seconds between two progress checks of a waiting request.
UNPLANNED_S = 5.0  #: Seconds that a deployment may have no place before the requests for it fail.
MOST_FOLDERS = 20  #: Folders that are known by the short name under which they were served.


class WaitingLease:
    """Lease of a deployment; implements `api.backend.ModelLease`. `late` ends a wait of `within_s`.

    `outcome` has the reason of a refusal; None once the request may begin.
    """

    model = ""

    def __init__(self, deployment: str, within_s: float, late: RequestError, owner: OnRequest) -> None:
        loop = asyncio.get_running_loop()
        self.deployment = deployment
        self.since = loop.time()
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
    """Requests of this node's clients that wait for a deployment, or use one."""

    def __init__(self, node: ClusterNode, gateway: Gateway, groups: Groups) -> None:
        self.leases: dict[WaitingLease, None] = {}
        self._node = node
        self._gateway = gateway
        self._groups = groups
        self._on = node.settings.load_on_request
        self._made: set[str] = set()  #: Deployments that requests at this node made.
        #: By the name under which it was served: a folder's whole path, the one served last at the end.
        self._folders: dict[str, str] = {}
        gateway.switch_models(self, node.changed)
        node.desired.on_change(self._remember)
        node.rounds.add(self.advance)

    async def on_request(self) -> tuple[StoredModelInfo, ...]:
        """Return the models that a request may have loaded."""
        if not self._on:
            return ()
        folders = [(name, Path(path)) for name, path in self._folders.items()]
        return await asyncio.to_thread(stored_models, folders)

    async def acquire_model(
        self, name: str | None, within_s: float, keep_s: float | None = None
    ) -> ModelLease:
        """See `Backend.acquire_model`."""
        row = self._row(name)
        if row is None and name in UNNAMED:
            if not self._on:
                return AT_ONCE
            raise _unready(
                "nothing is loaded; name a model that is on this Mac's disk, or run `mlxtp serve MODEL`"
            )
        if row is None and self._on:
            row = await self._stored(name or "", keep_s)
        elif row is not None and not row.pinned and keep_s is not None:
            row = self._node.desired.serve(row.model, keep_s=_kept(keep_s))
        if row is None:
            return AT_ONCE
        if (refusal := self._refusal(row.name, waited_s=0.0)) is not None:
            raise refusal
        lease = WaitingLease(row.name, *self._bound(row.name, within_s), self)
        self.leases[lease] = None
        if self._gateway.closing or not self._on:  # the gateway refuses it if it cannot begin
            lease.outcome.set_result(None)
        else:
            self._admit(lease)
            if not lease.come:
                self._node.changed()
        return lease

    def leave(self, lease: WaitingLease) -> None:
        """Note that a request has ended, or no longer waits. A model that none needs may end at once."""
        self.leases.pop(lease, None)
        row = self._node.desired.table.get(lease.deployment)
        if row is not None and row.keep_s == 0:
            self._node.changed()

    def progress(self, deployment: str) -> str:
        """Return how far a deployment is, in a few words."""
        groups = self._groups.replicas_of(deployment)
        coming = [each.supervisor.status.progress for each in groups if each.scope.assignment.owner]
        return coming[0] if coming else next((each.scope.why_not for each in groups), "waiting")

    # --- the deployment of a name --------------------------------------------------------------------

    def _row(self, name: str | None) -> Deployment | None:
        """Return the deployment that a request names; None for a model that is not deployed."""
        rows = self._node.desired.table.live()
        if name in UNNAMED:
            return rows[0] if rows else None
        for row in rows:
            dispatcher = self._gateway.deployments.by_name.get(row.name)
            info = dispatcher.served if dispatcher is not None else None
            known = (row.name, row.model, Path(row.model).name if row.model.startswith("/") else "")
            if name in known or (info is not None and name in (info.id, *info.aliases)):
                return row
        return None

    async def _stored(self, name: str, keep_s: float | None) -> Deployment | None:
        """Make a deployment of a model on this Mac's disk; None if it is not there."""
        try:
            model = await asyncio.to_thread(stored_name, self._folders.get(name, name))
        except ModelError as error:
            detail = f"{name} cannot be served: {error.detail}"
            if error.code is Code.MODEL_NOT_FOUND:
                raise RequestError(detail, error.code, status=404, param="model") from None
            raise RequestError(detail, Code.MODEL_INVALID, param="model") from None
        if model is None:
            return None
        log.info("%s is loaded for a request", model)
        self._made.add(name_of(model))
        return self._node.desired.serve(model, keep_s=KEEP_S if keep_s is None else _kept(keep_s))

    def _remember(self, before: DeploymentTable, _after: DeploymentTable) -> None:
        """Keep a folder's short name, which clients see, for the time after it is served."""
        for row in before.live():
            if row.model.startswith("/"):
                self._folders.pop(name := Path(row.model).name, None)
                self._folders[name] = row.model
        while len(self._folders) > MOST_FOLDERS:
            del self._folders[next(iter(self._folders))]

    def _bound(self, deployment: str, within_s: float) -> tuple[float, RequestError]:
        queue_s = self._node.settings.limits.queue_s
        if within_s and within_s < queue_s:
            words = f"{deployment} was not there within {within_s:g} s"
            return within_s, RequestError(words, Code.DEADLINE, status=504, param="deadline_s")
        words = f"{deployment} was not there within {queue_s:g} s; try again"
        return queue_s, RequestError(words, Code.OVERLOADED, status=503)

    # --- rounds --------------------------------------------------------------------------------------

    def advance(self, now: float) -> float:
        """Start the requests whose model is served, and refuse those whose model cannot be."""
        waiting = [lease for lease in self.leases if not lease.outcome.done()]
        for lease in waiting:
            self._admit(lease)
        return now + BEAT_S if waiting else math.inf

    def _admit(self, lease: WaitingLease) -> None:
        dispatcher = self._gateway.deployments.by_name.get(lease.deployment)
        waited_s = asyncio.get_running_loop().time() - lease.since
        if self._gateway.closing:
            lease.outcome.set_result(
                RequestError(f"{self._gateway.closing}; try again", Code.SHUTTING_DOWN, status=503)
            )
        elif dispatcher is not None and dispatcher.model is not None:
            lease.model = dispatcher.model.id
            lease.outcome.set_result(None)
        elif (refusal := self._refusal(lease.deployment, waited_s)) is not None:
            self._give_up(lease.deployment, refusal)

    def _refusal(self, deployment: str, waited_s: float) -> RequestError | None:
        """Return the reason why a request for this deployment need not wait; None if it has to."""
        if self._node.desired.table.get(deployment) is None:
            return _unready(f"{deployment} was unloaded")
        groups = self._groups.replicas_of(deployment)
        if any(
            group.supervisor.status.state in (ServingState.READY, ServingState.DRAINING) for group in groups
        ):
            return None
        whys = [_why_not(group, waited_s) for group in groups]
        return next(iter(whys), None) if whys and all(whys) else None

    def _give_up(self, deployment: str, refusal: RequestError) -> None:
        """Fail the requests that wait for a deployment. One that a request made ends."""
        for lease in [each for each in self.leases if each.deployment == deployment]:
            if not lease.outcome.done():
                lease.outcome.set_result(refusal)
        row = self._node.desired.table.get(deployment)
        if deployment in self._made and row is not None and not row.pinned:
            self._made.discard(deployment)
            log.warning("%s, loaded for a request, is given up: %s", deployment, refusal.detail)
            self._node.desired.unload(deployment)


def _why_not(group: Group, waited_s: float) -> RequestError | None:
    """Return the reason why a group will not serve soon; None while it may."""
    status, name, row = group.supervisor.status, group.scope.deployment, group.scope.row
    if status.state is ServingState.FAILED and status.reason is not None:
        detail = f"{name} cannot be served: {status.reason.detail}"
        if row is not None and row.keep_s in (PINNED, YIELDS):  # no client chose it
            return _unready(detail)
        if of_the_model(status.reason):
            return RequestError(detail, Code.MODEL_INVALID, param="model")
        return _unready(f"{detail}; try again later")
    if problem := group.scope.model.problem:
        return _unready(f"{name} cannot be served on this Mac: {problem}")
    if group.unplanned and waited_s >= UNPLANNED_S:
        return _unready(f"{name} cannot be served: {group.unplanned}; try again later")
    return None


def _kept(keep_s: float) -> int:
    """Return `Deployment.keep_s` for what a client wants; it cannot pin a model."""
    return min(math.ceil(keep_s), _LONGEST_S) if keep_s >= 0 else _LONGEST_S


_LONGEST_S = 2**32 - 2


def _unready(detail: str) -> RequestError:
    return RequestError(detail, Code.NOT_READY, status=503)
