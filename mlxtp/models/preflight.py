"""Pre-flight check of a model, before the loaded one is unloaded for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import Code, GroupError, MlxtpError, ModelError
from ..placement.model_shape import ModelShape
from ..wire.cluster_messages import ModelTurn
from .inspect import inspect


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
