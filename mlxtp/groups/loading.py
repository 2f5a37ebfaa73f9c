"""From proven ranks to a model that serves: load it, warm it up, compare its golden answers."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..api.backend import ModelInfo
from ..api.catalog import load_defaults
from ..config import Settings
from ..errors import Code, GroupError, MlxtpError, ModelError, RequestError
from ..gateway.gateway import GroupSelfTest
from ..gateway.request import RequestBackend
from ..models import self_test
from ..models.descriptions import description_of
from ..models.inspect import ModelSource, read_config
from ..models.manifest import is_commit
from ..placement import measurements
from ..placement.cost_model import cabled_bandwidth
from ..placement.faults import REPLUG
from ..placement.pipelines import counted_shares
from ..wire.cluster_messages import Serving
from ..wire.messages import Loaded, Unload
from .process_group import ProcessGroup

log = logging.getLogger(__name__)

_NUMBERS = ("kv_bits", "draft_model", "speculation", "prefill_chunk")  #: Settings that may change answers.
_ACTIVATION_BYTES = 2
NO_HEAD = "--speculation mtp: the model has no MTP head that can be used, so nothing is drafted"
_RANK = re.compile(r"(?:^|; )rank (\d+): ")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model on ranks that are warm and proven."""

    info: ModelInfo
    kv_room: int  #: Tokens that KV caches may hold; 0 for no limit.
    load_s: float
    kv_bytes: int = 0  #: Bytes of KV caches on each rank; 0 for no limit.
    slow_link: str = ""  #: Words for users about links that are far too slow, or empty.

    def resized(self, loaded: Loaded) -> LoadedModel:
        info = replace(self.info, context=loaded.context)
        return replace(self, info=info, kv_room=_kv_room(loaded), kv_bytes=loaded.kv_bytes)


class KvRoom:
    """Room for a group's KV caches, with a limit for all its epochs. Calls `changed` if it changes in use."""

    def __init__(self, changed: Callable[[ProcessGroup, LoadedModel], None]) -> None:
        self.limit_bytes = 0  #: Most bytes on each rank, in addition to the setting's limit; 0 for no limit.
        self.loaded: LoadedModel | None = None  #: The model that the present epoch serves.
        self._ranks: ProcessGroup | None = None
        self._changed = changed
        self.commanding = asyncio.Lock()  #: Held during a command to ranks that serve: one at a time.

    @property
    def tokens(self) -> int:
        """Tokens that fit; 0 without a limit or a model."""
        return self.loaded.kv_room if self.loaded is not None else 0

    async def serve(self, ranks: ProcessGroup, loaded: LoadedModel) -> None:
        """Note that the present epoch serves a model, and apply a limit that changed while it loaded."""
        self._ranks, self.loaded = ranks, loaded
        await self._apply()

    def close(self) -> None:
        self._ranks = self.loaded = None

    async def limit(self, kv_bytes: int) -> None:
        """Change the limit. Returns once ranks that serve have freed memory accordingly."""
        self.limit_bytes = kv_bytes
        await self._apply()

    async def clear(self) -> None:
        await self._apply(clear=True)

    async def _apply(self, *, clear: bool = False) -> None:
        async with self.commanding:
            ranks, loaded = self._ranks, self.loaded
            if ranks is None or loaded is None or (ranks.kv_bytes == self.limit_bytes and not clear):
                return  # the next load uses the limit
            try:
                reply = await ranks.budget(self.limit_bytes, clear=clear)
            except MlxtpError as error:
                log.debug("epoch %d ends: %s", ranks.epoch, error)
                return
            if self.loaded is loaded:
                self.loaded = loaded.resized(reply)
                self._changed(ranks, self.loaded)


class ModelLoader:
    """Brings up a model on ranks. `self_test` returns the self-test for ranks without requests."""

    def __init__(self, settings: Settings, self_test: Callable[[RequestBackend], GroupSelfTest]) -> None:
        self.proof = ""  #: Words for users about a golden proof that is suspect but no failure, or empty.
        self._settings = settings
        self._self_test = self_test

    async def bring_up(
        self, ranks: ProcessGroup, model: ModelSource, reached: Callable[[str], None]
    ) -> LoadedModel:
        """Load a model and warm it up; call `reached` with each stage. Raises ModelError if the ranks refuse
        the model, and GroupError if they fail or answer wrongly.
        """
        began, group = time.monotonic(), ranks.group
        counted = counted_shares(model.shape, group.world_size, group.split) if model.shape else ()
        try:
            draft = str(model.draft_path or "")
            loaded = await ranks.load(str(model.path), model.text.eos, draft, counted)
        except ModelError as error:
            raise refusal(model.id, model.path.name, group.world_size, error) from error
        if self._settings.speculation == "mtp" and not loaded.mtp:
            log.warning("%s: %s", model.id, NO_HEAD)
        reached("loaded")
        slow_link = await self.judge_links(ranks)
        warm_up = self._warm_up(ranks, model.path, loaded.vocabulary)
        with ranks.watch.warming_up():
            try:
                await ranks.unless_failed(warm_up, self._settings.limits.warm_up_s, "run a first forward")
            except RequestError as error:
                await ranks.do(Unload())
                raise ModelError(f"a first forward was refused: {error.detail}", error.code) from error
        reached("warmed up")
        info = await model_info(model, loaded)
        return LoadedModel(info, _kv_room(loaded), time.monotonic() - began, loaded.kv_bytes, slow_link)

    async def judge_links(self, ranks: ProcessGroup) -> str:
        """Return a finding if links are far too slow: macOS may silently use a cable as USB."""
        group = ranks.group
        if not (group.world_size > 1 and (expected := cabled_bandwidth(group.kind))):
            return ""
        for _ in range(measurements.LINK_TRIES):
            seconds = (await ranks.time("sum", measurements.LINK_BYTES, 1)).seconds
            if not (said := measurements.slow_link(group.kind, expected, group.world_size, seconds)):
                return ""
        log.warning("%s; %s", said, REPLUG)
        return said

    async def _warm_up(self, ranks: ProcessGroup, folder: Path, vocabulary: int) -> None:
        """Run the first forwards, including the golden proof. Raises GroupError."""
        row = await asyncio.to_thread(row_bytes, folder)
        prompts = self_test.prompts(vocabulary, self_test.prompt_tokens(row, mesh=ranks.group.varies))
        answers = await self._self_test(ranks).warm_up(prompts)
        settings = {name: getattr(self._settings, name) for name in _NUMBERS}
        settings["compiled"] = "MLX_DISABLE_COMPILE" not in os.environ

        def earlier() -> self_test.SelfTestTokens:
            key = self_test.key(folder, ranks.group.about, settings)
            return self_test.kept(self._settings.home / self_test.FILE, key, answers)

        kept = answers
        try:
            kept = await asyncio.to_thread(earlier)
        except OSError as error:  # a full disk proves nothing about the group
            log.warning("golden proof: %s", error)
        self.proof = ""
        if kept != answers:
            await self.judge(ranks, prompts, kept, answers)

    async def judge(
        self,
        ranks: ProcessGroup,
        prompts: Sequence[tuple[int, ...]],
        kept: self_test.SelfTestTokens,
        answers: self_test.SelfTestTokens,
    ) -> None:
        """Judge answers that differ from earlier ones. Raises GroupError if wrong answers repeat."""
        test, near_ties = self._self_test(ranks), True
        for tokens, before, now in self_test.differences(prompts, kept, answers):
            near_ties = near_ties and self_test.is_near_tie(await test.most_probable(tokens), before, now)
        if near_ties:
            log.info("golden proof: near-ties fell differently than before")
        elif await test.golden_answers(prompts) != answers:
            self.proof = "the group answers fixed prompts differently than before, and differently each time"
            log.warning("golden proof: %s", self.proof)
        else:
            raise GroupError(
                "golden proof failed: the group answers fixed prompts differently than before with this "
                "model, twice alike. A link, memory or a build computes wrong values; if the machine was "
                f"changed on purpose, remove {self._settings.home / self_test.FILE}",
                Code.PROOF_FAILED,
            )


async def model_info(model: ModelSource, found: Loaded | Serving) -> ModelInfo:
    """Return clients' view of a model on ranks here, or in another agent's report."""
    return ModelInfo(
        id=model.id,
        aliases=("default",) if model.id != "default" else (),
        path=model.path,
        context=found.context,
        created=int(time.time()),
        eos=found.eos,
        vocabulary=found.vocabulary,
        defaults=await asyncio.to_thread(load_defaults, model.path),
        features=model.text.features,
        checkpoints=found.checkpoints,
        vectors=model.vectors,
    )


def _kv_room(loaded: Loaded) -> int:
    return loaded.kv_bytes // loaded.kv_token_bytes if loaded.kv_token_bytes else 0


def row_bytes(folder: Path) -> int:
    """Return the bytes of a token's row in a model's collectives; 0 if its `folder` is unreadable."""
    try:
        return description_of(read_config(folder)).hidden * _ACTIVATION_BYTES
    except MlxtpError:
        return 0


def refusal(model: str, folder: str, ranks: int, error: ModelError) -> ModelError:
    """Return the error for users, with ranks' texts merged if all `ranks` agree."""
    _, *parts = _RANK.split(error.detail)
    said = [words.removeprefix(f"{folder}: ") for words in parts[1::2]]
    words = "; ".join(f"rank {rank}: {each}" for rank, each in zip(parts[::2], said, strict=True))
    if len(said) == ranks and len(set(said)) == 1:
        words = said[0]
    words = words or error.detail
    if is_commit(folder) and error.code in (Code.MODEL_INVALID, Code.MODEL_NOT_FOUND):
        words += f"; `mlxtp verify {model}` checks its files for damage"
    return ModelError(f"{model} cannot be loaded: {words}", error.code)
