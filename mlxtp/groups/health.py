"""An agent's decisions about epochs, without I/O or clock.

An epoch is one set of rank processes, from the first spawn to the last exit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ..background import Backoff
from ..config import Limits
from ..errors import (
    NOBODY_BEHIND,
    TERMINATED_STATUS,
    WEDGED_STATUS,
    Code,
    FailureReport,
    GroupError,
    MlxtpError,
    ModelError,
    is_consequence,
)
from ..wire.messages import MAX_ROUNDS, Gathered, Pong, SideChannel

BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
MAX_FAILURES = 5
FAILURE_WINDOW_S = 120.0
RING_BACKOFF = Backoff(0.5, 30.0)  #: Pauses after epochs that a stranger on a ring port may have ended.


class ServingState(StrEnum):
    """State of a group, as `/health` shows it."""

    STARTING = "starting"
    FORMING = "forming"
    LOADING = "loading"
    IDLE = "idle"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


_S = ServingState

SERVES = (_S.READY, _S.DRAINING)  #: Ranks serve requests, or finish the last ones.

#: Legal successors of each state of an agent's own epochs, besides itself. IDLE, and FORMING for a group that
#: is STARTING on other Macs, are only shown while this agent has no epoch.
TRANSITIONS: Mapping[ServingState, frozenset[ServingState]] = {
    _S.STARTING: frozenset((_S.LOADING, _S.RESTARTING, _S.STOPPED)),
    _S.LOADING: frozenset((_S.READY, _S.DRAINING, _S.RESTARTING, _S.STOPPED)),
    _S.READY: frozenset((_S.DRAINING, _S.RESTARTING, _S.STOPPED)),
    _S.DRAINING: frozenset((_S.RESTARTING, _S.STOPPED)),
    _S.RESTARTING: frozenset((_S.STARTING, _S.FAILED, _S.STOPPED)),
    _S.FAILED: frozenset((_S.STARTING, _S.STOPPED)),
    _S.STOPPED: frozenset(),
}


def is_legal(before: ServingState, after: ServingState) -> bool:
    return after is before or after in TRANSITIONS[before]


@dataclass(slots=True)
class RestartPolicy:
    """Pauses after failed epochs. The fifth within 120 s, or in a row without becoming ready, is the last.
    Epochs that ended `at_ring` do not count.
    """

    failures: list[float] = field(default_factory=list)
    unready: int = 0
    at_ring: int = 0
    jaccl: bool = False  #: The last epoch that counts had served over JACCL.

    def delay_s(
        self, now: float, error: MlxtpError, ready: bool, *, at_ring: bool = False, jaccl: bool = False
    ) -> float | None:
        """Return the seconds from an epoch's failure at `now` to the next epoch; None to give up.

        `ready`: it had become ready. `at_ring`: it ended while MLX's ring formed or proved itself. MLX takes
        any connection to a ring port for its neighbor's, so a stranger who keeps connecting costs epochs.
        """
        if of_the_model(error) or error.code is Code.CONFIG:
            return None  # another try would also fail
        if at_ring and error.code in _OF_STRANGERS:
            self.at_ring += 1
            return RING_BACKOFF.after(self.at_ring - 1)
        self.at_ring, self.jaccl = 0, ready and jaccl
        self.failures = [at for at in self.failures if now - at < FAILURE_WINDOW_S] + [now]
        self.unready = 0 if ready else self.unready + 1
        count = max(len(self.failures), self.unready)
        return BACKOFF_S[count - 1] if count < MAX_FAILURES else None

    def is_last(self, now: float) -> bool:
        return sum(now - at < FAILURE_WINDOW_S for at in self.failures) >= MAX_FAILURES - 1

    def replaced(self) -> float:
        """Return the seconds until another plan replaces a failed one. If that had served over JACCL, its
        failure does not count.
        """
        if self.jaccl:
            self.failures.pop()
        self.jaccl, self.unready = False, 0
        return BACKOFF_S[0]


_OF_STRANGERS = frozenset((Code.FORM_FAILED, Code.PROOF_FAILED, Code.LINK_TIMEOUT))
_OF_THE_MODEL = frozenset(
    (Code.MODEL_NOT_FOUND, Code.MODEL_INVALID, Code.MODEL_NOT_DIVISIBLE, Code.MODEL_UNSUPPORTED)
)


def of_the_model(error: MlxtpError) -> bool:
    return isinstance(error, ModelError) or error.code in _OF_THE_MODEL


def pick_cause(reports: Iterable[FailureReport]) -> MlxtpError:
    """Return the cause among the consequences: the first report of a rank about itself, or else the end of
    its process, or else a report that others lost it.
    """

    def distance(report: FailureReport) -> int:
        lost = is_consequence(report.error.code, report.error.detail)
        return 0 if not lost else 1 if report.seen_from_outside else 2

    return min(reports, key=distance).error


def with_name(detail: str, names: Sequence[str]) -> str:
    """Prefix a detail that begins with a rank with its Mac's name; `names` are by rank."""
    rank = rank_in(detail)
    name = names[rank] if rank is not None and rank < len(names) else ""
    named = not name or re.search(rf"(?<!\w){re.escape(name)}(?!\w)", detail)
    return detail if named else f"{name}: {detail}"


def rank_in(detail: str) -> int | None:
    match = re.match(r"rank (\d+)\b", detail)
    return int(match[1]) if match else None


_ALARM = 14  #: SIGALRM: the rank's own limit for forming the group; it works while MLX blocks Python.
_CRASHES = (10, 11)  #: SIGBUS on macOS, and SIGSEGV.


def exit_report(rank: int, status: int, code: Code | None, words: str = "", phase: str = "") -> FailureReport:
    """Return the report of a rank's exit status; a negative status is a signal, as in `subprocess`.

    `words` is the rank's last record before it ended with `code`, and `phase` its last known phase.
    """
    if status == -_ALARM:
        code, words = Code.FORM_FAILED, f"rank {rank} did not form the group in time"
    if code is not None:
        return FailureReport(rank, GroupError(words or f"rank {rank} ended with {code}", code))
    if status < 0:
        hint = " (the system may do this when memory runs out)" if status == -9 else ""
        if -status in _CRASHES and phase:
            hint = f" in phase {phase}"
        how = f"was ended by signal {-status}{hint}"
    elif status in (TERMINATED_STATUS, WEDGED_STATUS):
        how = "was ended by SIGTERM, and not by its agent"
    else:
        how = f"exited with status {status}"
    return FailureReport(rank, GroupError(f"rank {rank} {how}"), seen_from_outside=True)


class RankHealth:
    """Judges the ranks of one epoch by their Pongs: silent, or stuck in a phase."""

    def __init__(self, ranks: int, limits: Limits, now: float) -> None:
        self._limits = limits
        self._heard = dict.fromkeys(range(ranks), now)
        self._last_tick = now
        self._lag_until = now
        self.pongs: dict[int, Pong] = {}
        #: First forwards may compile kernels: each may then take as long as warming up may.
        self.warming_up = False

    def received_pong(self, rank: int, pong: Pong, now: float) -> None:
        """Take in a Pong. A new forward of rank 0 shows that all ranks live: each took part."""
        before, self.pongs[rank] = self.pongs.get(rank), pong
        self._heard[rank] = now
        if rank == 0 and before is not None and pong.stats.forwards > before.stats.forwards:
            self._heard = dict.fromkeys(self._heard, now)

    def tick(self, now: float) -> GroupError | None:
        """Call at every heartbeat. Return an error for the first rank that is silent or stuck for too long.

        If this call is late, the delay counts against no rank, and limits for stuck ranks double for a while.
        """
        lag_s = now - self._last_tick - self._limits.heartbeat_s
        if lag_s > self._limits.heartbeat_s:
            self._lag_until = now + 2 * self._limits.silence_s
            # This process stood still, and has not read the messages that arrived meanwhile.
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
        # Ranks wait for each other: while one of them progresses in a phase, the group does.
        for phase, limit_s in stall_limits_s(self._limits).items():
            there = [pong for pong in self.pongs.values() if pong.phase == phase]
            stood_s = min((pong.phase_s for pong in there), default=0.0)
            expected_s = max((pong.expected_us for pong in there), default=0) / 1e6
            longer_s = min(EXPECTED.get(phase, 0) * expected_s, self._limits.warm_up_s)
            allowed_s = factor * (limit_s + longer_s)
            if self.warming_up and phase in EXPECTED:
                allowed_s = max(allowed_s, self._limits.warm_up_s)
            if stood_s > allowed_s:
                steps = ", ".join(f"{r} at step {p.step}" for r, p in sorted(self.pongs.items()))
                return GroupError(
                    f"no progress in {phase} for {stood_s:.1f} s; {self._who_is_behind()}: {steps}",
                    Code.RANK_STALLED,
                )
        return None

    def _who_is_behind(self) -> str:
        # Started forwards count first: other ranks wait for a rank that has not started the same forward.
        places = {
            rank: (pong.stats.forwards + pong.in_flight, pong.step) for rank, pong in self.pongs.items()
        }
        if len(set(places.values())) == 1:
            return NOBODY_BEHIND
        return f"rank {min(places, key=lambda rank: places[rank])} is behind"


#: Factor on the expected time of a forward, which extends a phase's limit by at most `warm_up_s`.
EXPECTED = {"prefill": 4, "decode": 20}


def stall_limits_s(limits: Limits) -> Mapping[str, float]:
    """Return the longest time without progress in each phase, for instant forwards. Idling has no limit."""
    return {
        "forming": limits.form_s,
        "proving": limits.proof_s,
        "loading": limits.load_stall_s,
        "measuring": limits.decode_stall_s,
        "prefill": limits.prefill_stall_s,
        "decode": limits.decode_stall_s,
    }


# --- JACCL's side channel ------------------------------------------------------------------------------

RoundReplies = list[tuple[int, Gathered]]  #: Replies, each with its rank.


class SideChannelHub:
    """Collects every rank's bytes in a round of JACCL's side channel, and replies to all ranks.

    Rounds are numbered from 1. Every rank takes part in each, with equally many bytes, and their number is
    unknown. The first error ends them: every rank that sent or will send bytes gets the reason once.
    """

    #: Seconds from a round's first bytes to its last: shorter than Bootstrap.round_s, so that the missing
    #: rank is named before other ranks give up.
    ROUND_S = 10.0

    def __init__(self, world_size: int) -> None:
        self._size = world_size
        self._round = 1
        self._parts: dict[int, bytes] = {}
        self._seen: set[int] = set()
        self._replied: set[int] = set()
        self.error = ""  #: Why no other round may follow.

    def receive(self, rank: int, message: SideChannel) -> RoundReplies:
        """Take in a rank's part of a round, and return the replies to send."""
        self._seen.add(rank)
        if self.error:
            return self._reply()
        if wrong := self._fault(rank, message):
            return self.abort(wrong)
        self._parts[rank] = message.data
        if len(self._parts) < self._size:
            return []
        gathered = Gathered(self._round, b"".join(self._parts[each] for each in range(self._size)))
        self._round += 1
        self._parts.clear()
        return [(each, gathered) for each in range(self._size)]

    @property
    def has_begun(self) -> bool:
        """True at the first part of a round. If it is not complete after ROUND_S, call `late`."""
        return len(self._parts) == 1

    def late(self) -> RoundReplies:
        if not self._parts:
            return []
        missing = " and ".join(f"rank {rank}" for rank in range(self._size) if rank not in self._parts)
        return self.abort(f"{missing} did not come to {self._place} within {self.ROUND_S:g} s")

    def abort(self, reason: str) -> RoundReplies:
        """End all rounds, and send `reason` to all ranks; the first reason counts."""
        self.error = self.error or reason or "forming the group was given up"
        self._parts.clear()
        return self._reply()

    def _reply(self) -> RoundReplies:
        ranks = sorted(self._seen - self._replied)
        self._replied |= self._seen
        return [(rank, Gathered(min(self._round, MAX_ROUNDS), b"", self.error)) for rank in ranks]

    @property
    def _place(self) -> str:
        return f"round {self._round} of JACCL's side channel"

    def _fault(self, rank: int, message: SideChannel) -> str:
        unlike = "they run other versions of MLX, or other settings"
        if message.round != self._round:
            return f"rank {rank} came with round {message.round} to {self._place}; {unlike}"
        if rank in self._parts:
            return f"rank {rank} came twice to {self._place}"
        for other, data in self._parts.items():
            if len(data) != len(message.data):
                return (
                    f"rank {rank} sent {len(message.data)} bytes in {self._place}, rank {other} sent "
                    f"{len(data)}; {unlike}"
                )
        return ""
