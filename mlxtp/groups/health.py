"""What an agent decides about epochs. Pure: time comes in as an argument.

An epoch is one group of rank processes, from spawn to the last of them gone. `RankHealth` judges ranks by
what they report, `pick_cause` finds what broke an epoch among what everybody reported, `RestartPolicy`
says when to try again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ..config import Limits
from ..errors import TERMINATED_STATUS, WEDGED_STATUS, Code, GroupError, MlxtpError, ModelError
from ..wire.messages import Pong

BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
MAX_FAILURES = 5
FAILURE_WINDOW_S = 120.0
RING_BACKOFF_S = 30.0  #: The longest wait after epochs that a stranger at a ring port may have ended.


class ServingState(StrEnum):
    """What the cluster is doing, as `/health` shows it."""

    STARTING = "starting"
    FORMING = "forming"
    LOADING = "loading"
    IDLE = "idle"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


TRANSITIONS: Mapping[ServingState, frozenset[ServingState]] = {
    state: frozenset(following)
    for state, following in (
        (
            ServingState.STARTING,
            (ServingState.LOADING, ServingState.IDLE, ServingState.RESTARTING, ServingState.STOPPED),
        ),
        (
            ServingState.LOADING,
            (
                ServingState.READY,
                ServingState.IDLE,
                ServingState.DRAINING,
                ServingState.RESTARTING,
                ServingState.STOPPED,
            ),
        ),
        (
            ServingState.IDLE,
            (ServingState.LOADING, ServingState.DRAINING, ServingState.RESTARTING, ServingState.STOPPED),
        ),
        (
            ServingState.READY,
            (ServingState.LOADING, ServingState.DRAINING, ServingState.RESTARTING, ServingState.STOPPED),
        ),
        (ServingState.DRAINING, (ServingState.LOADING, ServingState.RESTARTING, ServingState.STOPPED)),
        (ServingState.RESTARTING, (ServingState.STARTING, ServingState.FAILED, ServingState.STOPPED)),
        (ServingState.FAILED, (ServingState.STARTING, ServingState.STOPPED)),
        (ServingState.STOPPED, ()),
    )
}
"""What may follow each state of an agent's own epochs; to stay is always legal. FORMING is only shown, of a
group on other Macs that is STARTING. A model that was taken away, or does not load, leaves IDLE."""


def is_legal(before: ServingState, after: ServingState) -> bool:
    """Whether an agent's own epochs may go from one state to the other."""
    return after is before or after in TRANSITIONS[before]


@dataclass(slots=True)
class RestartPolicy:
    """Backoff 0.5, 1, 2, 4 s. The end is the fifth failed epoch within 120 s, and the fifth in a row that
    never became ready, however long they took. Epochs that end at the ring do not count: see `at_ring`.
    """

    failures: list[float] = field(default_factory=list)
    unready: int = 0
    at_ring: int = 0

    def delay_s(self, now: float, error: MlxtpError, ready: bool, *, at_ring: bool = False) -> float | None:
        """How long to wait before the next epoch, after one that failed at `now`; None to give up.

        `ready`: that one had become ready. A model that cannot be loaded will not load the next time either.
        `at_ring`: it ended while MLX's ring formed or proved itself. MLX takes any connection to a ring port
        for the neighbour. No rank can tell a stranger's silence from a neighbour's. So a stranger who keeps
        coming costs epochs, and the group forms once it stays away.
        """
        if of_the_model(error) or error.code is Code.CONFIG:
            return None
        if at_ring and error.code in _OF_STRANGERS:
            self.at_ring += 1
            return min(BACKOFF_S[0] * 2.0 ** min(self.at_ring - 1, 9), RING_BACKOFF_S)
        self.at_ring = 0
        self.failures = [at for at in self.failures if now - at < FAILURE_WINDOW_S] + [now]
        self.unready = 0 if ready else self.unready + 1
        count = max(len(self.failures), self.unready)
        return BACKOFF_S[count - 1] if count < MAX_FAILURES else None


_OF_STRANGERS = frozenset((Code.FORM_FAILED, Code.PROOF_FAILED, Code.LINK_TIMEOUT))
_OF_THE_MODEL = frozenset(
    (Code.MODEL_NOT_FOUND, Code.MODEL_INVALID, Code.MODEL_NOT_DIVISIBLE, Code.MODEL_UNSUPPORTED)
)


def of_the_model(error: MlxtpError) -> bool:
    """Whether the model itself is at fault, whoever found out."""
    return isinstance(error, ModelError) or error.code in _OF_THE_MODEL


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Somebody's word about what happened: a rank's own Error, or what the agent saw of it."""

    rank: int
    error: MlxtpError
    seen_from_outside: bool = False


def pick_cause(reports: Iterable[FailureReport]) -> MlxtpError:
    """The cause among the consequences, with who it came from.

    A rank's word about itself counts most, then how its process ended, then that others lost it. Among
    equals the first report counts.
    """
    return min(reports, key=_distance_from_cause).error


def with_name(detail: str, names: Mapping[int, str]) -> str:
    """The detail behind the name of the Mac whose rank it begins with, whichever rank or agent reported it.

    `names` are those of other Macs, by rank.
    """
    match = re.match(r"rank (\d+)\b", detail)
    name = names.get(int(match[1]), "") if match else ""
    return f"{name}: {detail}" if name not in detail else detail


def _distance_from_cause(report: FailureReport) -> int:
    if not is_consequence(report.error):
        return 0
    return 1 if report.seen_from_outside else 2


def is_consequence(error: MlxtpError) -> bool:
    """Whether it only says that somebody is gone: why may still be on its way."""
    if error.code in (Code.FORWARD_FAILED, Code.PROOF_FAILED):
        return _RING_LOST in error.detail
    return error.code in (Code.RANK_LOST, Code.LINK_LOST, Code.NOT_READY)


_RING_LOST = "[ring] connection to a peer was lost"
"""MLX's words, in a forward or a proof, when a neighbour's process has ended."""


_ALARM = 14
"""SIGALRM: the rank's own limit for forming the group, which holds while MLX lets no Python run."""


_CRASHES = (10, 11)
"""SIGBUS on macOS, and SIGSEGV."""


def exit_report(rank: int, status: int, code: Code | None, words: str = "", phase: str = "") -> FailureReport:
    """What a rank's exit status tells. Negative is the signal that ended it, as `subprocess` has it. `words`
    are what it wrote down itself before it ended with `code`, `phase` is that of its last heartbeat."""
    if status == -_ALARM:
        return FailureReport(
            rank, GroupError(f"rank {rank} did not form the group in time", Code.FORM_FAILED)
        )
    if status < 0:
        hint = " (the system may do this when memory runs out)" if status == -9 else ""
        if -status in _CRASHES and phase:
            hint = f" in phase {phase}"
        return FailureReport(rank, GroupError(f"rank {rank} was ended by signal {-status}{hint}"), True)
    if code is not None:
        return FailureReport(rank, GroupError(words or f"rank {rank} ended with {code}", code))
    if status in (TERMINATED_STATUS, WEDGED_STATUS):
        return FailureReport(
            rank, GroupError(f"rank {rank} was ended by SIGTERM, and not by its agent"), True
        )
    return FailureReport(rank, GroupError(f"rank {rank} exited with status {status}"), True)


class RankHealth:
    """Judges the ranks of one epoch by their Pongs. Silence and being stuck are two things."""

    def __init__(self, ranks: int, limits: Limits, now: float) -> None:
        self._limits = limits
        self._heard = dict.fromkeys(range(ranks), now)
        self._last_tick = now
        self._lag_until = now
        self.pongs: dict[int, Pong] = {}
        self.warming_up = False
        """First forwards may have kernels compiled: a forward may then take as long as warming up may."""

    def received_pong(self, rank: int, pong: Pong, now: float) -> None:
        """A rank answered. A forward that ended on rank 0 is a sign of all: each takes its part in it."""
        before, self.pongs[rank] = self.pongs.get(rank), pong
        self._heard[rank] = now
        if rank == 0 and before is not None and pong.forwards > before.forwards:
            self._heard = dict.fromkeys(self._heard, now)

    def tick(self, now: float) -> GroupError | None:
        """Call at every heartbeat; the first rank that is silent or stuck for too long, as an error.

        When the observer itself was late, that time counts against nobody, and for a while ranks may be stuck
        for twice as long.
        """
        lag_s = now - self._last_tick - self._limits.heartbeat_s
        if lag_s > self._limits.heartbeat_s:
            self._lag_until = now + 2 * self._limits.silence_s
            # What came while we stood still has not been read yet: that time is ours, not theirs.
            self._heard = {rank: heard + lag_s for rank, heard in self._heard.items()}
        self._last_tick = now
        factor = 2.0 if now < self._lag_until else 1.0
        return self._silent(now) or self._stuck(factor)

    def _silent(self, now: float) -> GroupError | None:
        for rank, heard in self._heard.items():
            if now - heard > self._limits.silence_s:
                return GroupError(f"rank {rank} has been silent for {now - heard:.1f} s", Code.RANK_LOST)
        return None

    def _stuck(self, factor: float) -> GroupError | None:
        # Ranks wait for each other: as long as one of them gets on in a phase, the group does.
        for phase, limit_s in stall_limits_s(self._limits).items():
            there = [pong for pong in self.pongs.values() if pong.phase == phase]
            stood_s = min((pong.phase_s for pong in there), default=0.0)
            expected_s = max((pong.expected_us for pong in there), default=0) / 1e6
            longer_s = min(EXPECTED.get(phase, 0) * expected_s, self._limits.warm_up_s)
            allowed_s = factor * (limit_s + longer_s)
            if self.warming_up:
                allowed_s = max(allowed_s, self._limits.warm_up_s)
            if stood_s > allowed_s:
                steps = ", ".join(f"{r} at step {p.step}" for r, p in sorted(self.pongs.items()))
                return GroupError(
                    f"no progress in {phase} for {stood_s:.1f} s; {self._who_is_behind()}: {steps}",
                    Code.RANK_STALLED,
                )
        return None

    def _who_is_behind(self) -> str:
        # Forwards that began count before those that ended: others wait for a rank that has not begun theirs.
        places = {rank: (pong.forwards + pong.in_flight, pong.step) for rank, pong in self.pongs.items()}
        if len(set(places.values())) == 1:
            return "no rank is behind"
        return f"rank {min(places, key=lambda rank: places[rank])} is behind"


EXPECTED = {"prefill": 4, "decode": 20}
"""How many times as long as the rank expects it a forward may take, on top of its phase's limit; in
all no longer than kernels may take to compile, whatever it expects."""


def stall_limits_s(limits: Limits) -> Mapping[str, float]:
    """The longest time without progress in each phase that has to make some, for forwards that take no time.

    Idling is not among them.
    """
    return {
        "forming": limits.form_s,
        "proving": limits.proof_s,
        "loading": limits.load_stall_s,
        "measuring": limits.decode_stall_s,
        "prefill": limits.prefill_stall_s,
        "decode": limits.decode_stall_s,
    }
