"""Models on the disks of all members: this node's are listed and broadcast, those of others are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..background import Background
from ..cluster.links import ControlLink
from ..cluster.node import ClusterNode
from ..wire.cluster_messages import MAX_STORED, ModelsHere, StoredModel
from .inspect import revisions_here

REPORT_S = 10.0  #: Seconds between two looks at the models on this disk.


class StoredModels:
    """Models that each member has reported as stored, and the handlers of changes on this disk."""

    def __init__(self, node: ClusterNode) -> None:
        self.elsewhere: dict[str, tuple[StoredModel, ...]] = {}  #: By the node id of each other member.
        self._node = node
        self._here: tuple[StoredModel, ...] = ()
        self._on_files: list[Callable[[str], None]] = []
        self._on_change: list[Callable[[], None]] = []
        self._background = Background()
        node.links.on(self._receive, ModelsHere)
        node.links.on_up(lambda link: link.send(ModelsHere(self._here)))
        node.links.on_lost(self._lost)
        node.rounds.every(REPORT_S, lambda _now: self.refresh())

    def on_files(self, handler: Callable[[str], None]) -> None:
        """Have `handler` called with OWNER/NAME when its files on this disk have changed."""
        self._on_files.append(handler)

    def on_change(self, handler: Callable[[], None]) -> None:
        """Have `handler` called when the list of models on this disk has changed."""
        self._on_change.append(handler)

    def changed(self, name: str) -> None:
        """Report that files of OWNER/NAME on this disk have changed."""
        self.refresh()
        for handler in self._on_files:
            handler(name)

    def refresh(self) -> None:
        """Report to the others which models are here, if that has changed."""
        self._background.start(self._list(), "the list of models on this disk")

    def has(self, node_id: str, model: str) -> bool:
        """Return True if another member has reported OWNER/NAME or OWNER/NAME@COMMIT as complete.

        Branches and tags are not reported.
        """
        name, _, revision = model.partition("@")
        return any(
            each.complete and each.name == name and revision in ("", each.revision)
            for each in self.elsewhere.get(node_id, ())
        )

    def is_elsewhere(self, model: str) -> bool:
        """Return True if any other member has it."""
        return any(self.has(node_id, model) for node_id in self.elsewhere)

    def _receive(self, link: ControlLink, message: ModelsHere) -> None:
        self.elsewhere[link.node_id] = message.models

    def _lost(self, node_id: str, _why: str) -> None:
        self.elsewhere.pop(node_id, None)

    async def _list(self) -> None:
        here = await asyncio.to_thread(revisions_here)
        largest = sorted(here, key=lambda each: -each.total)[:MAX_STORED]
        found = tuple(StoredModel(each.name, each.revision, each.total, each.complete) for each in largest)
        if found != self._here:
            self._here = found
            self._node.links.broadcast(ModelsHere(found))
            for handler in self._on_change:
                handler()

    async def close(self) -> None:
        """Stop listing."""
        await self._background.close()
