"""Life of one group of ranks: starts an epoch, watches it, ends it, starts the next one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ..api.backend import Health, ModelInfo
from ..api.model_card import load_defaults
from ..config import Settings
from ..errors import Code, GroupError, MlxtpError, ModelError, RequestError, UserError
from ..gateway.admission import AdmissionLimits
from ..gateway.gateway import Gateway
from ..models import self_test
from ..models.inspect import ModelSource
from ..wire.messages import Loaded, Unload
from . import fabric_results
from .health import BACKOFF_S, RestartPolicy, ServingState, is_legal
from .history import History, Instant, Recoveries
from .load_errors import refusal
from .local_rank import WORKER, Worker
from .process_group import EpochGroup, ProcessGroup, Stage

log = logging.getLogger(__name__)

#: Fields of each rank's heartbeat that /health shows.
_SHOWN = (
    "phase", "step", "forwards", "collectives", "emitted", "memory_bytes", "peak_memory_bytes",
    "weight_bytes", "load_peak_bytes", "kv_bytes", "step_us", "wait_us", "collective_us",
)  # fmt: skip

ABOUT_TO_STOP = "this Mac is about to stop"
#: States in which an agent takes requests or would; while it drains it shows DRAINING instead.
_DRAINABLE = frozenset((ServingState.READY, ServingState.IDLE))

#: States before a model is ready.
_BEFORE_READY = frozenset(
    (
        ServingState.STARTING,
        ServingState.FORMING,
        ServingState.LOADING,
        ServingState.IDLE,
        ServingState.RESTARTING,
    )
)

#: Called with the name of a stage that was just reached and the seconds since its epoch began.
StageListener = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model on ranks that are warm and proven. `kv_room` in tokens; it took `load_s` seconds to load."""

    info: ModelInfo
    kv_room: int
    load_s: float


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The next epoch: its number, its model (None: only the group), and its ranks.

    `ranks` and `loaded` are set if it was formed and loaded beside the epoch before.
    """

    epoch: int
    model: ModelSource | None
    group: EpochGroup
    ranks: ProcessGroup | None = None
    loaded: LoadedModel | None = None


class EpochOwner(Protocol):
    """Owner of the epochs: it passes each plan to `Supervisor.start_epoch`."""

    async def prepare(self) -> None:
        """Make room for the next epoch. Then the supervisor waits for its plan."""

    async def changed(self) -> None:
        """Wait until something has changed since the last epoch failed for good."""

    def failed(self, error: MlxtpError, formed: bool) -> bool:
        """Note that an epoch failed on its way up, before or after it had `formed` and proven itself.

        Return whether another plan takes its place.
        """


class Supervisor:
    """The desired model, the current epoch, and the state in between."""

    def __init__(
        self,
        settings: Settings,
        on_stage: StageListener = lambda _stage, _seconds: None,
        worker: Worker = WORKER,
    ) -> None:
        limits = settings.limits
        bounds = AdmissionLimits(limits.max_open_requests, limits.max_open_tokens, limits.min_free_bytes)
        self.gateway = Gateway(self._health, bounds, limits.recovery_s, limits.deadline_s)
        self.state = ServingState.STARTING
        #: State of this agent's own epochs; `state` may be that of a group elsewhere.
        self._own = ServingState.STARTING
        self.epoch = 0
        self.reason: MlxtpError | None = None  #: Reason why it is not ready, or why the last epoch ended.
        #: The model to serve; empty while something prevents it.
        self.wanted = ""
        #: True while the next epoch has to wait after a failure: then the state is about the failed one.
        self.resting = False
        self.ranks: ProcessGroup | None = None
        self._plan: asyncio.Future[EpochPlan] | None = None  #: Of the next epoch, or of the present one.
        self._current: ProcessGroup | None = None
        #: Ranks that are formed, and perhaps loaded, beside the present epoch.
        self.beside: ProcessGroup | None = None
        #: True once the present epoch, or the last one, had formed and proven itself, and became ready.
        self._formed = self._served = False
        self._at_ring = False  #: True if the last epoch ended while MLX's ring formed.
        self.group: EpochGroup | None = None  #: The ranks of the present epoch, or of the last one.
        self._weight_bytes = 0  #: File bytes of the model that is loaded, or being loaded; 0 if unknown.
        self.history = History()
        self.fast_fences = settings.fast_fences
        self.recoveries = Recoveries()
        self.proof = ""  #: The golden proof's finding that is no failure, for users; empty for none.
        #: Tokens that the KV caches of the loaded model may hold; 0 without a bound, or with no model.
        self.kv_room = 0
        self._settings = settings
        self._on_stage = on_stage
        self._worker = worker
        self._policy = RestartPolicy()
        self._desired: ModelSource | None = None
        self._changed = asyncio.Event()
        self._busy = asyncio.Lock()
        self._began = time.monotonic()

    @property
    def source(self) -> ModelSource | None:
        """Model that is served here, or is to be."""
        return self._desired

    async def run(self, owner: EpochOwner) -> None:
        """Run the epochs that `owner` plans, one after the other, until cancelled.

        After a failure for good it waits for the owner to change. Cancelling ends the ranks in order; no
        process is left when this returns.
        """
        try:
            await self._keep_up(owner)
        except asyncio.CancelledError:
            if self.state is not ServingState.STOPPED:
                self._enter(ServingState.STOPPED)
                self.gateway.close(GroupError("the server is shutting down", Code.SHUTTING_DOWN))
            raise

    @property
    def waits_for_plan(self) -> bool:
        """True while no epoch runs and none is planned."""
        return self._plan is not None and not self._plan.done()

    def start_epoch(self, plan: EpochPlan) -> None:
        """Start the next epoch. Call it only while `waits_for_plan`."""
        assert self._plan is not None
        self._plan.set_result(plan)

    async def _keep_up(self, owner: EpochOwner) -> None:
        while True:
            await owner.prepare()
            self._plan = asyncio.get_running_loop().create_future()
            try:
                plan = await self._plan
                error = await self._run_epoch(plan)
            finally:
                self._plan = None
            if error.code is Code.REPLANNED:
                log.info("epoch %d ended: %s", self.epoch, error.detail, extra=self._where)
                continue
            self.resting = True
            instead = not self._served and owner.failed(error, self._formed)
            delay_s = self._policy.delay_s(time.monotonic(), error, self._served, at_ring=self._at_ring)
            if delay_s is None and instead and not self._formed:
                delay_s = BACKOFF_S[-1]  # it loaded nothing, and another plan may form
            if delay_s is not None:
                words = "epoch %d ended: %s; next one in %g s"
                log.warning(words, self.epoch, error.detail, delay_s, extra=self._where)
                self._enter(ServingState.RESTARTING)
                await asyncio.sleep(delay_s)
            else:
                log.error("epoch %d: %s; giving up", self.epoch, error.detail, extra=self._where)
                self._enter(ServingState.FAILED)
                self.gateway.fail_all(error)
                await owner.changed()
                self._policy = RestartPolicy()
            self.resting = False

    async def wait_until(self, *states: ServingState) -> ServingState:
        """Wait until the state is one of `states`, and return it."""
        while self.state not in states:
            self._changed.clear()
            await self._changed.wait()
        return self.state

    # --- the model -----------------------------------------------------------------------------------

    async def measure_fabric(self) -> fabric_results.Times:
        """Time collectives on the idle group; requests that come meanwhile must be retried.

        Raises UserError when there is no such group, or it ends meanwhile.
        """
        ranks, model = self.ranks, next(iter(self.gateway.models()), None)
        if self._busy.locked():
            raise UserError("the group is loading or being measured right now; try again", Code.NOT_READY)
        if ranks is None or model is None:
            raise UserError(f"there is no group to measure; it is {self.state}", Code.NOT_READY)
        if ranks.group.world_size == 1:
            raise UserError(
                "one rank serves alone and exchanges nothing; `mlxtp serve MODEL --nodes 2` makes a group"
            )
        if count := self.gateway.open_requests:
            requests = "1 request is" if count == 1 else f"{count} requests are"
            raise UserError(
                f"{requests} open; a fabric is measured only without open requests", Code.NOT_READY
            )
        async with self._busy:
            with self.gateway.hold_admission(
                "the fabric is being measured, which takes some seconds; try again"
            ):
                try:
                    return await fabric_results.measure(ranks.time, fabric_results.row_bytes(model.path))
                except MlxtpError as error:
                    raise UserError(f"the group ended while it was measured: {error.detail}") from error

    async def _load(self, ranks: ProcessGroup, model: ModelSource) -> None:
        self._weight_bytes = await asyncio.to_thread(_weight_bytes, model.path)
        self._enter(ServingState.LOADING)
        try:
            loaded = await self._bring_up(ranks, model, self._reached)
        except ModelError as error:
            self.reason = error
            self._enter(ServingState.IDLE)
            raise
        self._serve(ranks, model, loaded)

    async def _bring_up(
        self, ranks: ProcessGroup, model: ModelSource, reached: Callable[[str], None]
    ) -> LoadedModel:
        began = time.monotonic()
        loaded = await self._loaded(ranks, model)
        reached("loaded")
        with ranks.warming_up():
            await self._warmed_up(ranks, self._warm_up(ranks, model.path, loaded.vocabulary))
        reached("warmed up")
        info = ModelInfo(
            id=model.id,
            aliases=("default",) if model.id != "default" else (),
            path=model.path,
            context=loaded.context,
            created=int(time.time()),
            eos=loaded.eos,
            vocabulary=loaded.vocabulary,
            defaults=await asyncio.to_thread(load_defaults, model.path),
            features=model.text.features,
        )
        kv_room = loaded.kv_bytes // loaded.kv_token_bytes if loaded.kv_token_bytes else 0
        return LoadedModel(info, kv_room, time.monotonic() - began)

    def _serve(self, ranks: ProcessGroup, model: ModelSource, loaded: LoadedModel) -> None:
        self._desired, self.reason, self.kv_room = model, None, loaded.kv_room
        self.gateway.serve(ranks, loaded.info, model.text, load_s=loaded.load_s)
        self._enter(ServingState.READY)
        self._served = True
        self.recoveries.serving(time.monotonic())
        self.history.ready(_now())

    @staticmethod
    async def _loaded(ranks: ProcessGroup, model: ModelSource) -> Loaded:
        try:
            return await ranks.load(str(model.path), model.text.eos, str(model.draft_path or ""))
        except ModelError as error:
            raise refusal(model.id, model.path.name, ranks.group.world_size, error) from error

    async def _warmed_up(self, ranks: ProcessGroup, warm_up: Coroutine[Any, Any, None]) -> None:
        try:
            await ranks.unless_failed(warm_up, self._settings.limits.warm_up_s, "run a first forward")
        except RequestError as error:
            await ranks.do(Unload())
            raise ModelError(f"a first forward was refused: {error.detail}", error.code) from error

    async def _warm_up(self, ranks: ProcessGroup, folder: Path, vocabulary: int) -> None:
        """Run the first forwards, the golden proof among them. Raises GroupError where that fails."""
        row_bytes = await asyncio.to_thread(fabric_results.row_bytes, folder)
        prompts = self_test.prompts(vocabulary, self_test.prompt_tokens(row_bytes, mesh=ranks.group.varies))
        answers = await self.gateway.warm_up(ranks, prompts)
        kept = answers
        try:
            kept = await asyncio.to_thread(self._kept, ranks.group, folder, answers)
        except OSError as error:  # a full disk proves nothing about the group
            log.warning("golden proof: %s", error)
        self.proof = ""
        if kept != answers:
            await self._judge(ranks, prompts, kept, answers)

    def _kept(
        self, group: EpochGroup, folder: Path, answers: self_test.SelfTestTokens
    ) -> self_test.SelfTestTokens:
        settings = self._settings
        numbers = ("compiled", "kv_bits", "draft_model", "speculation", "prefill_chunk", "agreement")
        about = {"fabric": group.fabric_kind, "machines": group.machines, "world_size": group.world_size}
        key = self_test.key(folder, about, {name: getattr(settings, name) for name in numbers})
        return self_test.kept(settings.home / self_test.FILE, key, answers)

    async def _judge(
        self,
        ranks: ProcessGroup,
        prompts: Sequence[tuple[int, ...]],
        kept: self_test.SelfTestTokens,
        answers: self_test.SelfTestTokens,
    ) -> None:
        """Judge answers that differ from earlier ones. Raises GroupError for wrong ones that come twice."""
        if await self._only_near_ties(ranks, prompts, kept, answers):
            log.info("golden proof: near-ties fell differently than before")
        elif await self.gateway.golden_answers(ranks, prompts) != answers:
            self.proof = "the group answers fixed prompts differently than before, and differently each time"
            log.warning("golden proof: %s", self.proof)
        else:
            raise GroupError(
                "golden proof failed: the group answers fixed prompts differently than before with this "
                "model, twice alike. A link, memory or a build computes wrong values; if the machine was "
                f"changed on purpose, remove {self._settings.home / self_test.FILE}",
                Code.PROOF_FAILED,
            )

    async def _only_near_ties(
        self,
        ranks: ProcessGroup,
        prompts: Sequence[tuple[int, ...]],
        kept: self_test.SelfTestTokens,
        answers: self_test.SelfTestTokens,
    ) -> bool:
        """Return True if every answer that differs does so where two tokens are about as probable."""
        for prompt, before, now in zip(prompts, kept, answers, strict=True):
            at = self_test.difference(before, now)
            if at >= 0:
                top = await self.gateway.most_probable(ranks, prompt + before[:at])
                if not self_test.is_near_tie(top, before[at], now[at]):
                    return False
        return True

    # --- epochs --------------------------------------------------------------------------------------

    async def _run_epoch(self, plan: EpochPlan) -> MlxtpError:
        """Run one epoch to its end, and return why it ended."""
        # This group will finish the requests that another Mac has served so far.
        self.gateway.park_open_requests(GroupError("another group is formed", Code.REPLANNED))
        self.epoch, self.group, self._desired = plan.epoch, plan.group, plan.model
        self._formed = self._served = self._at_ring = False
        self.history.began(
            plan.epoch,
            _now(),
            world_size=plan.group.world_size,
            backend=plan.group.backend,
            kind=plan.group.kind,
            model=plan.model.id if plan.model is not None else None,
        )
        self._enter(ServingState.STARTING)
        self._began = time.monotonic()
        try:
            ranks = plan.ranks or self._ranks_of(plan, self._reached)
        except OSError as error:  # a full disk
            self._enter(ServingState.RESTARTING)
            self.reason = GroupError(f"there is no folder for the epoch: {error}", Code.FORM_FAILED)
            self.recoveries.over(self.reason.code, time.monotonic())
            self.history.ended(_now(), self.reason.code, self.reason.detail)
            return self.reason
        self._current = ranks
        if ranks is self.beside:
            self.beside = None
        try:
            return await self._through(ranks, plan.loaded)
        finally:
            self._current = None

    def _ranks_of(self, plan: EpochPlan, on_stage: Stage) -> ProcessGroup:
        events = self.gateway.on_event
        return ProcessGroup(
            self._settings, plan.epoch, events, on_stage, worker=self._worker, group=plan.group
        )

    async def try_out(self, plan: EpochPlan, on_stage: Stage) -> EpochPlan:
        """Form and prove the group of `plan` beside the present epoch, and load its model, if it has one.

        `on_stage` is called with the name of each stage. Returns the plan, with these ranks for the next
        epoch if they have a model; otherwise they have ended. Raises MlxtpError.
        """
        self.beside = ranks = self._ranks_of(plan, on_stage)
        try:
            await ranks.start()
            if plan.model is not None:
                loaded = await self._bring_up(ranks, plan.model, on_stage)
                return replace(plan, ranks=ranks, loaded=loaded)
        except BaseException as error:
            await self.end_beside(error if isinstance(error, MlxtpError) else None)
            raise
        await self.end_beside()
        return plan

    async def end_beside(self, error: MlxtpError | None = None) -> None:
        """End the ranks beside the present epoch, if there are any; at once if they failed by `error`."""
        if (ranks := self.beside) is not None:
            try:
                await _to_its_end(ranks.stop() if error is None else ranks.kill(error))
            finally:
                self.beside = None

    async def _through(self, ranks: ProcessGroup, loaded: LoadedModel | None) -> MlxtpError:
        try:
            if loaded is None:
                await ranks.start()
            self.ranks, self._formed = ranks, True
            if self._desired is None:
                self._enter(ServingState.IDLE)
                self._served = True
            elif loaded is not None:
                self._enter(ServingState.LOADING)
                self._serve(ranks, self._desired, loaded)
            else:
                async with self._busy:
                    await self._load(ranks, self._desired)
            error = await asyncio.shield(ranks.failed)
        except MlxtpError as failure:
            error = failure
        except Exception as bug:  # the process boundary of the ranks: they must not outlive a bug here
            log.exception("epoch %d", self.epoch, extra=self._where)
            error = GroupError(f"{type(bug).__name__}: {bug}", Code.INTERNAL)
        except asyncio.CancelledError:
            self.ranks = None
            self._enter(ServingState.STOPPED)
            self.gateway.close(GroupError("the server is shutting down", Code.SHUTTING_DOWN))
            await _to_its_end(ranks.stop())
            raise
        self._at_ring = ranks.at_ring
        self.ranks, self.reason, self.kv_room = None, error, 0
        self.recoveries.over(error.code, time.monotonic())
        self.history.ended(_now(), error.code, error.detail)
        self._enter(ServingState.RESTARTING)
        self.gateway.park_open_requests(error)
        await _to_its_end(ranks.stop() if error.code is Code.REPLANNED else ranks.kill(error))
        return error

    @property
    def desired(self) -> ModelSource | None:
        """Model of this agent's present epoch, or of the last one."""
        return self._desired

    @property
    def in_epoch(self) -> bool:
        """True while this agent owns ranks, is about to, or still ends them."""
        return self.has_ranks or (self._plan is not None and self._plan.done())

    @property
    def has_ranks(self) -> bool:
        """True while this agent owns ranks, or still ends them."""
        return self._current is not None

    def end_epoch(self, error: MlxtpError) -> None:
        """End the present epoch, if there is one, because of `error`."""
        if self._current is not None:
            self._current.give_up(error)

    def woke(self, slept_s: float) -> None:
        """End an epoch with ranks elsewhere: while this machine slept, they went on or gave up."""
        if self.group is not None and self.group.world_size > self.group.local:
            self.end_epoch(GroupError(f"this Mac slept for {slept_s:.0f} s", Code.REPLANNED))

    def follow(self, state: ServingState, epoch: int, reason: str, group: EpochGroup) -> None:
        """Show the coordinator's report of the group, while this agent has no epoch of its own."""
        self.epoch, self.group = epoch, group
        self.history.remote_epoch(
            epoch,
            _now(),
            state=state,
            reason=reason,
            world_size=group.world_size,
            backend=group.backend,
            kind=group.kind,
        )
        self.reason = GroupError(reason) if reason else None
        self._show(state)

    def drain(self, why: str) -> None:
        """Take no new requests, because of `why`; open ones go on. Empty: take requests again."""
        self.gateway.closing = why
        if why and self.in_epoch and self._own in _DRAINABLE:
            self._enter(ServingState.DRAINING)
        elif why and not self.in_epoch and self.state in _DRAINABLE:
            self._show(ServingState.DRAINING)

    @property
    def progress(self) -> str:
        """Progress of the next group, in a few words, such as "loading 40 %"."""
        if percent := self._loaded_percent:
            return f"loading {percent}"
        if not self.in_epoch and self.reason is not None:
            return self.reason.detail
        return str(self.state)

    @property
    def starting(self) -> str:
        """The model that is about to serve and its progress, as `Health` has it."""
        if not self.wanted or self.gateway.models() or self.state not in _BEFORE_READY:
            return ""
        if self.state is ServingState.LOADING:
            percent = self._loaded_percent
            return f"{self.wanted} is loading" + (f" ({percent})" if percent else "")
        reason = self.reason.detail if self.reason is not None else ""
        if self.state is ServingState.RESTARTING and reason:
            return f"{reason}; {self.wanted} is about to load again"
        return reason if self.wanted in reason else f"{self.wanted} is about to load"

    @property
    def _loaded_percent(self) -> str:
        """Loaded part of the weights, such as "40 %"; empty while no rank of this agent's epoch loads."""
        if not (
            self.in_epoch
            and self.ranks is not None
            and self._own is ServingState.LOADING
            and self._weight_bytes
        ):
            return ""
        held = sum(pong.memory_bytes for pong in self.ranks.pongs.values())
        return f"{min(held * 100 // self._weight_bytes, 99)} %"

    @property
    def _where(self) -> dict[str, int]:
        """Fields for log lines about the present epoch."""
        return {"epoch": self.epoch}

    def _reached(self, stage: str) -> None:
        seconds = time.monotonic() - self._began
        self.history.reached(stage, seconds)
        try:
            self._on_stage(stage, seconds)
        except Exception:  # a listener must not end the epoch
            log.debug("the listener failed at %r", stage, exc_info=True)

    def _enter(self, state: ServingState) -> None:
        before, self._own = self._own, self._show(state)
        if not is_legal(before, self._own):
            words = "epoch %d went from %s to %s, which is a bug"
            log.error(words, self.epoch, before, self._own, extra=self._where)

    def _show(self, state: ServingState) -> ServingState:
        self.state = ServingState.DRAINING if self.gateway.closing and state in _DRAINABLE else state
        self._changed.set()
        return self.state

    def _health(self, open_requests: int) -> Health:
        model = next(iter(self.gateway.models()), None)
        pongs = self.ranks.pongs if self.ranks is not None else {}
        rows = []
        for rank, pong in sorted(pongs.items()):
            row = {name: getattr(pong, name) for name in _SHOWN}
            rows.append({"rank": rank, **row})
        closing = self.gateway.closing
        reason = closing or (self.reason.detail if self.reason is not None else None)
        return Health(
            state=str(ServingState.DRAINING if closing else self.state),
            epoch=self.epoch,
            world_size=self.group.world_size if self.group is not None else self._settings.ranks,
            backend=self.group.backend if self.group is not None else self._settings.local_backend,
            model=model.id if model is not None else None,
            reason=reason,
            ready=self.state is ServingState.READY and not closing,
            open_requests=open_requests,
            ranks=tuple(rows),
            starting="" if closing else self.starting,
        )


def _weight_bytes(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    except OSError:
        return 0


def _now() -> Instant:
    return Instant(time.time(), time.monotonic())


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end through any number of cancellations; then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()
