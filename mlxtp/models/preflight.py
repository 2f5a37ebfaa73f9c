"""Whether a model could be served, found out before anything is unloaded for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import Code, GroupError, MlxtpError, ModelError
from ..placement.model_shape import ModelShape
from ..wire.cluster_messages import ModelTurn
from .inspect import check_servable, read_config, shape_in
from .names import find_model


class ModelPreflight:
    """Looks at the model of one turn at a time, and calls `on_change` when it has.

    `no_place` says why those who are here have no place for a model of this shape, or nothing.
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
        """Whether the model that has this turn was looked at, and why it cannot be served."""
        if turn != self._turn:
            if self._task is not None:
                self._task.cancel()
            self._turn, self._task = turn, asyncio.ensure_future(self._inspect(turn.model))
            self._task.add_done_callback(lambda _: self._on_change())
        assert self._task is not None
        return (True, self._task.result()) if self._task.done() else (False, None)

    async def _inspect(self, model: str) -> MlxtpError | None:
        try:
            folder = await find_model(model, download=False)
        except ModelError:  # it is on another Mac's disk
            return None
        try:
            config = await asyncio.to_thread(read_config, folder)
            check_servable(config)
            shape = await asyncio.to_thread(shape_in, folder, config, model, self._kv_bits)
        except ModelError as error:
            return error
        why = self._no_place(shape)
        return GroupError(why, Code.NOT_READY) if why else None

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
