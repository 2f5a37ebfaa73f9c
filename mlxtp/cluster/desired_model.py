"""The desired model of the cluster, as this node sets and receives it."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import UserError
from ..wire.cluster_messages import MAX_MODEL, DesiredState
from .cluster_state import Replica
from .links import ControlLink, PeerLinks

#: Called with the desired state before and after a change.
DesiredHandler = Callable[[DesiredState, DesiredState], None]


class DesiredModel:
    """Changes of the desired state. `changed` is called after each, when all handlers have run."""

    def __init__(self, replica: Replica, links: PeerLinks, changed: Callable[[], None]) -> None:
        self._replica = replica
        self._links = links
        self._changed = changed
        self._handlers: list[DesiredHandler] = []
        self._lacking: list[Callable[[], bool]] = []
        links.on(self._received, DesiredState)

    def on_change(self, handler: DesiredHandler) -> None:
        """Have `handler` called when the desired state changes, at this node or at another one."""
        self._handlers.append(handler)

    def retry_if(self, lacking: Callable[[], bool]) -> None:
        """Have a repeated request try the desired model again while `lacking` returns True."""
        self._lacking.append(lacking)

    @property
    def now(self) -> DesiredState:
        """The present desired state."""
        return self._replica.desired

    def set(self, model: str, nodes: str = "", *, by_person: bool = True) -> DesiredState:
        """Set the model the cluster should run. `by_person`: pin it against models that requests name.

        An empty model is not pinned. A state that is set already stays as it is, unless its model is lacking.
        Raises UserError for a name that no message can carry.
        """
        if len(model) > MAX_MODEL or not model.isprintable():
            raise UserError(
                f"a model is called by at most {MAX_MODEL} printable characters, not {model[:200]!r}"
            )
        present = self.now
        nodes = nodes or present.nodes
        wanted = (model, nodes, by_person and bool(model))
        there = (present.model, present.nodes, present.pinned)
        if wanted == there and not any(lacking() for lacking in self._lacking):
            return present
        desired = self._replica.set_desired(model, nodes, by_person=by_person)
        self._set(present, desired)
        return desired

    def _received(self, _link: ControlLink, message: DesiredState) -> None:
        before = self.now
        if self._replica.desires(message):
            self._set(before, message)

    def _set(self, before: DesiredState, desired: DesiredState) -> None:
        for handler in self._handlers:
            handler(before, desired)
        self._links.broadcast(desired)
        self._changed()
