"""The deployments of the cluster, as this node sets and receives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from .. import audit
from ..errors import Code, RemoteProtocolError, UserError
from ..wire.cluster_messages import MAX_MODEL, Deployment, Deployments
from .cluster_state import Replica
from .deployments import MAX_ROWS, DeploymentTable, name_of, received
from .links import ControlLink, PeerLinks

#: Called with the deployments before and after a change.
TableHandler = Callable[[DeploymentTable, DeploymentTable], None]


class DesiredDeployments:
    """Changes of the deployments. `changed` is called after each, when all handlers have run."""

    def __init__(self, replica: Replica, links: PeerLinks, changed: Callable[[], None]) -> None:
        self._replica = replica
        self._links = links
        self._changed = changed
        self._handlers: list[TableHandler] = []
        self._lacking: list[Callable[[str], bool]] = []
        self._parts: WeakKeyDictionary[ControlLink, list[Deployment]] = WeakKeyDictionary()
        links.on(self._received, Deployments)

    def on_change(self, handler: TableHandler) -> None:
        """Have `handler` called when the deployments change, at this node or at another one."""
        self._handlers.append(handler)

    def retry_if(self, lacking: Callable[[str], bool]) -> None:
        """Have a repeated request try the same model again while `lacking` returns True for it."""
        self._lacking.append(lacking)

    @property
    def table(self) -> DeploymentTable:
        """The present deployments."""
        return self._replica.deployments

    def has(self, model: str, *, replace: bool = False, **asked: Any) -> bool:
        """Return True if the table is already as `serve` would make it."""
        return self._is_there(self.row(model, **asked), replace=replace)

    def row(self, model: str, **asked: Any) -> Deployment:
        """Return the row as `serve` would make it. It has yet to get a version."""
        return _changed(self.table, model, **asked)

    def serve(
        self,
        model: str,
        *,
        replicas: int | None = None,
        nodes: str = "",
        on: tuple[str, ...] | None = None,
        keep_s: int | None = None,
        parallel: str = "",
        split: str = "",
        replace: bool = False,
    ) -> Deployment:
        """Add a deployment of `model`, or change it: see `Deployment`. None and "" keep a field's value.

        `replace`: remove all others. A table that has all that already stays as it is, unless a model is
        lacking. Raises UserError for a name that no message can carry, and when there is no room.
        """
        if len(model) > MAX_MODEL or not model.isprintable():
            raise UserError(
                f"a model is called by at most {MAX_MODEL} printable characters, not {model[:200]!r}"
            )
        row = self.row(
            model, replicas=replicas, nodes=nodes, on=on, keep_s=keep_s, parallel=parallel, split=split
        )
        there = self._is_there(row, replace=replace)
        if not there or any(lacking(model) for lacking in self._lacking):
            self._set(self.table.setting(row, self._replica.self_id, alone=replace))
        return row

    def _is_there(self, row: Deployment, *, replace: bool) -> bool:
        return row == self.table.get(row.name) and (not replace or len(self.table.live()) == 1)

    def unload(self, model: str) -> None:
        """Remove the deployment of `model`. Raises UserError when there is none."""
        table, name = self._replica.deployments, name_of(model)
        if table.get(name) is None:
            deployed = ", ".join(row.name for row in table.live()) or "none"
            raise UserError(f"{model[:200]} is not deployed. Deployed models: {deployed}")
        self._set(table.removing(self._replica.self_id, name))

    def unload_all(self) -> None:
        """Remove all deployments."""
        table = self._replica.deployments
        if names := [row.name for row in table.rows if not row.removed]:
            self._set(table.removing(self._replica.self_id, *names))

    def _received(self, link: ControlLink, message: Deployments) -> None:
        rows = self._parts.setdefault(link, [])
        rows += message.rows
        if len(rows) > MAX_ROWS:
            raise RemoteProtocolError(f"more than {MAX_ROWS} deployments", Code.FIELD_INVALID)
        if message.more:
            return
        del self._parts[link]
        before = self._replica.deployments
        if self._replica.desires(received(rows, message.floor)):
            self._spread(before)

    def _set(self, table: DeploymentTable) -> None:
        before, self._replica.deployments = self._replica.deployments, table
        for row in before.live():
            if table.get(row.name) is None:
                audit.record("model_unloaded", f"{row.model} is no longer to be served", {"model": row.model})
        for row in table.live():
            if (was := before.get(row.name)) is None or was.model != row.model:
                audit.record("model_served", f"{row.model} is to be served", {"model": row.model})
        self._spread(before)

    def _spread(self, before: DeploymentTable) -> None:
        table = self._replica.deployments
        for handler in self._handlers:
            handler(before, table)
        for message in table.messages():
            self._links.broadcast(message)
        self._changed()


def _changed(
    table: DeploymentTable,
    model: str,
    *,
    replicas: int | None = None,
    nodes: str = "",
    on: tuple[str, ...] | None = None,
    keep_s: int | None = None,
    parallel: str = "",
    split: str = "",
) -> Deployment:
    """Return the row of a model with the fields that are given.

    A split gives way to what contradicts it, and the other way round; so do a pipeline and one Mac.
    """
    row = table.get(name_of(model)) or Deployment(name_of(model))
    if split and split != "auto":
        row = dataclasses.replace(row, nodes="auto", parallel="")
    elif parallel in ("tensor", "auto") or nodes not in ("", "auto", "all", str(row.split.count(",") + 1)):
        row = dataclasses.replace(row, split="auto")
    if nodes == "1" and row.parallel == "pipeline":
        row = dataclasses.replace(row, parallel="")
    elif parallel == "pipeline" and row.nodes == "1":
        row = dataclasses.replace(row, nodes="auto")
    return dataclasses.replace(
        row,
        model=model,
        replicas=row.replicas if replicas is None else replicas,
        nodes=nodes or row.nodes,
        on=row.on if on is None else on,
        keep_s=row.keep_s if keep_s is None else keep_s,
        parallel=parallel or row.parallel,
        split=split or row.split,
    )
