"""Times to try again, silent and stuck ranks, the rank at fault, JACCL's side channel. Time is given."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.config import Limits
from mlxtp.errors import Code, FailureReport, GroupError, MlxtpError, ModelError, code_of_exit, exit_status
from mlxtp.groups.health import (
    BACKOFF_S,
    FAILURE_WINDOW_S,
    MAX_FAILURES,
    RING_BACKOFF,
    RankHealth,
    RestartPolicy,
    SideChannelHub,
    exit_report,
    pick_cause,
    stall_limits_s,
    with_name,
)
from mlxtp.wire.messages import MAX_ROUNDS, Bootstrap, Gathered, Pong, SideChannel
from mlxtp.wire.rank_stats import RankStats

LIMITS = Limits(heartbeat_s=0.5, silence_s=3.0, decode_stall_s=10.0, prefill_stall_s=30.0)
LOST = GroupError("gone")


def test_each_failure_waits_longer_and_the_fifth_is_the_last() -> None:
    policy = RestartPolicy()
    delays, last = [], []
    for now in (0, 5, 10, 20, 30):
        last.append(policy.is_last(now))
        delays.append(policy.delay_s(now, LOST, ready=True))
    assert delays == [*BACKOFF_S[: MAX_FAILURES - 1], None]
    assert last == [False] * (MAX_FAILURES - 1) + [True]


def test_ends_over_jaccl_for_which_another_plan_takes_over_do_not_count() -> None:
    policy = RestartPolicy()
    for now in range(0, 20, 2):
        assert policy.delay_s(now, LOST, ready=True, jaccl=True) == BACKOFF_S[0]
        assert policy.replaced() == BACKOFF_S[0]
    delays = []
    for now in range(20, 30, 2):
        delays.append(policy.delay_s(now, LOST, ready=True))
        assert policy.replaced() == BACKOFF_S[0], "and what ends over TCP in between does"
    assert delays == [*BACKOFF_S, None]


@pytest.mark.parametrize("code", [Code.FORM_FAILED, Code.PROOF_FAILED, Code.LINK_TIMEOUT])
def test_a_stranger_at_the_ring_is_never_the_end_and_costs_no_tries(code: Code) -> None:
    policy, error = RestartPolicy(), GroupError("rank 0 did not form the group in time", code)
    delays = [policy.delay_s(float(now), error, ready=False, at_ring=True) for now in range(0, 1000, 50)]
    assert delays[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert set(delays[6:]) == {RING_BACKOFF.most_s}
    for other, at_ring in ((error, False), (LOST, True)):  # what a stranger cannot cause counts there, too
        policy = RestartPolicy()
        assert [policy.delay_s(now, other, ready=False, at_ring=at_ring) for now in range(5)] == [
            *BACKOFF_S,
            None,
        ]


@pytest.mark.parametrize("load_s", [1.0, 40.0, 3600.0])
def test_five_epochs_that_never_became_ready_are_the_end_however_long_they_took(load_s: float) -> None:
    policy = RestartPolicy()
    assert policy.delay_s(0.0, LOST, ready=True) is not None
    began = FAILURE_WINDOW_S  # the one before is forgotten
    delays = [policy.delay_s(began + load_s * count, LOST, ready=False) for count in range(1, 6)]
    assert delays == [*BACKOFF_S, None]


def test_an_epoch_that_became_ready_begins_the_count_again() -> None:
    policy = RestartPolicy()
    for now, ready in enumerate([False, False, False, False, True, False, False, False, False]):
        assert policy.delay_s(now * FAILURE_WINDOW_S, LOST, ready) is not None
    assert policy.delay_s(9 * FAILURE_WINDOW_S, LOST, ready=False) is None


@pytest.mark.parametrize(
    "error",
    [
        ModelError("does not divide", Code.MODEL_NOT_DIVISIBLE),
        ModelError("broken"),
        GroupError("no such model", Code.MODEL_NOT_FOUND),
        MlxtpError("wrong flag", Code.CONFIG),
    ],
)
def test_what_will_not_change_is_not_tried_again(error: MlxtpError) -> None:
    assert RestartPolicy().delay_s(0, error, ready=True) is None


@given(st.lists(st.floats(0, 30), max_size=30))
def test_it_never_gives_up_before_five_failures_in_the_window(gaps: list[float]) -> None:
    policy, now, failures = RestartPolicy(), 0.0, []
    for gap in gaps:
        now += gap
        failures.append(now)
        recent = [at for at in failures if now - at < FAILURE_WINDOW_S]
        delay_s = policy.delay_s(now, LOST, ready=True)
        assert (delay_s is None) == (len(recent) >= MAX_FAILURES)
        if delay_s is None:
            return
        assert delay_s == BACKOFF_S[len(recent) - 1]


def pong(
    phase: str = "idle",
    phase_s: float = 0.0,
    step: int = 0,
    expected_us: int = 0,
    in_flight: int = 0,
    forwards: int = 0,
) -> Pong:
    return Pong(phase, phase_s, in_flight, step, "", RankStats(forwards), expected_us)


class Story:
    """A watch whose clock ticks at every heartbeat."""

    def __init__(self, ranks: int = 2) -> None:
        self.now = 100.0
        self.watch = RankHealth(ranks, LIMITS, self.now)

    def beats(self, seconds: float, **pongs: Pong) -> GroupError | None:
        """Heartbeats for `seconds`; `rank_K` answers each of them with its pong, others are silent."""
        ends_at = self.now + seconds
        while self.now < ends_at:
            for name, answer in pongs.items():
                self.watch.received_pong(int(name.removeprefix("rank_")), answer, self.now)
            self.now += LIMITS.heartbeat_s
            if error := self.watch.tick(self.now):
                return error
        return None

    def stuck(self, seconds: float, **pongs: Pong) -> GroupError:
        """As `beats`, which must end with an error."""
        error = self.beats(seconds, **pongs)
        assert error is not None
        return error


@pytest.mark.parametrize(
    "answer",
    [pong(), pong("idle", phase_s=1e6), *(pong(phase, phase_s=1e6) for phase in ("starting", "closing"))],
    ids=["they answer", "idle for days", "starting", "closing"],
)
def test_what_is_neither_silence_nor_being_stuck(answer: Pong) -> None:
    assert Story().beats(60, rank_0=answer, rank_1=answer) is None
    assert Story().beats(5, rank_0=answer, rank_1=pong()) is None


def test_silence_is_noticed_after_its_limit_and_not_before() -> None:
    story = Story()
    assert story.beats(5, rank_0=pong(), rank_1=pong()) is None
    assert story.beats(LIMITS.silence_s - 0.5, rank_0=pong()) is None
    error = story.stuck(1.0, rank_0=pong())
    assert (error.code, error.detail[:30]) == (Code.RANK_LOST, "rank 1 has been silent for 3.5")
    assert "rank 1 has been silent" in Story().stuck(10, rank_0=pong()).detail, "also who never answered"


def test_a_forward_that_ended_is_a_sign_of_every_rank() -> None:
    """Pongs of other Macs come over the control link, which may be slow; their part of a forward does not."""
    story = Story()
    forwards = 0
    while story.now < 160.0:
        forwards += 1
        assert story.beats(LIMITS.heartbeat_s, rank_0=pong("decode", forwards=forwards)) is None
    error = story.stuck(10, rank_0=pong("decode", forwards=forwards))
    assert "rank 1 has been silent for 3." in error.detail


def test_measuring_is_allowed_as_much_as_decoding() -> None:
    allowed = stall_limits_s(LIMITS)
    assert allowed["measuring"] == allowed["decode"] == LIMITS.decode_stall_s


@pytest.mark.parametrize(("phase", "limit_s"), stall_limits_s(LIMITS).items())
def test_each_phase_that_must_progress_has_its_limit(phase: str, limit_s: float) -> None:
    at_limit = pong(phase, phase_s=limit_s)
    assert Story().beats(5, rank_0=at_limit, rank_1=pong()) is None
    error = Story().stuck(5, rank_0=pong(phase, phase_s=limit_s + 0.1), rank_1=pong())
    assert error.code is Code.RANK_STALLED
    assert f"no progress in {phase} for {limit_s + 0.1:.1f} s" in error.detail


@pytest.mark.parametrize(
    ("ranks", "behind"),
    [
        # step, forwards that ended, in flight
        ([(70, 0, 0), (69, 0, 0), (70, 0, 0)], "rank 1 is behind: 0 at step 70, 1 at step 69, 2 at step 70"),
        ([(70, 40, 1), (70, 40, 0)], "rank 1 is behind"),
        ([(70, 40, 0), (70, 40, 1)], "rank 0 is behind"),
        ([(71, 41, 0), (70, 40, 1)], "rank 1 is behind"),
        ([(70, 40, 1), (73, 41, 0)], "rank 0 is behind"),
        ([(70, 40, 2), (71, 41, 0)], "rank 1 is behind"),
        ([(70, 40, 1), (70, 40, 1)], "no rank is behind"),
    ],
)
def test_the_rank_that_is_behind_is_named_and_not_the_one_that_is_ahead(
    ranks: list[tuple[int, int, int]], behind: str
) -> None:
    pongs = {
        f"rank_{at}": pong("decode", 11, step, 0, flying, done)
        for at, (step, done, flying) in enumerate(ranks)
    }
    assert behind in Story(len(ranks)).stuck(5, **pongs).detail


@pytest.mark.parametrize("slept_s", [4.0, 20.0])
def test_an_observers_own_sleep_is_no_silence_of_others(slept_s: float) -> None:
    story = Story()
    assert story.beats(5, rank_0=pong(), rank_1=pong()) is None
    story.now += slept_s
    assert story.watch.tick(story.now) is None
    story.stuck(10)
    silent_s = story.now - 105.0 - slept_s
    assert silent_s == pytest.approx(LIMITS.silence_s, abs=2 * LIMITS.heartbeat_s)


def test_a_group_in_which_one_rank_gets_on_is_not_stuck() -> None:
    done, reading = pong("loading", LIMITS.load_stall_s * 3), pong("loading", 1.0)
    assert Story().beats(5, rank_0=done, rank_1=reading) is None
    assert Story().stuck(5, rank_0=done, rank_1=pong("idle", 1.0)).code is Code.RANK_STALLED


@pytest.mark.parametrize(("phase", "times"), [("decode", 20), ("prefill", 4)])
def test_who_is_slow_is_given_time_by_what_forwards_took_before(phase: str, times: int) -> None:
    limit_s = {"decode": LIMITS.decode_stall_s, "prefill": LIMITS.prefill_stall_s}[phase] + times * 2.0
    slow, quick = (pong(phase, limit_s, expected_us=us) for us in (2_000_000, 0))
    assert Story().beats(3, rank_0=slow, rank_1=quick) is None
    late = pong(phase, limit_s + 0.1, expected_us=2_000_000)
    assert Story().stuck(3, rank_0=late, rank_1=late).code is Code.RANK_STALLED
    Story().stuck(3, rank_0=quick, rank_1=quick)


def test_any_expectation_of_a_rank_is_noticed_in_the_end() -> None:
    limit_s = LIMITS.prefill_stall_s + LIMITS.warm_up_s
    for over_s, code in ((-0.1, None), (0.1, Code.RANK_STALLED)):
        stuck = pong("prefill", limit_s + over_s, expected_us=10**10)
        error = Story().beats(3, rank_0=stuck, rank_1=stuck)
        assert (error and error.code) == code


def test_while_warming_up_a_forward_may_take_as_long_as_that_may_and_nothing_else() -> None:
    """First forwards may have kernels compiled. No disk that hangs is excused by that, and no silence."""

    def cold() -> Story:
        story = Story()
        story.watch.warming_up = True
        return story

    compiling, late = (pong("decode", phase_s=LIMITS.warm_up_s + over_s) for over_s in (0.0, 0.1))
    assert (story := cold()).beats(5, rank_0=compiling, rank_1=compiling) is None
    assert story.stuck(5, rank_0=late, rank_1=pong()).code is Code.RANK_STALLED
    hangs = pong("loading", phase_s=LIMITS.load_stall_s + 0.1)
    assert "no progress in loading" in cold().stuck(5, rank_0=hangs, rank_1=hangs).detail
    silent = cold().stuck(LIMITS.silence_s + 1, rank_0=pong("prefill", phase_s=5.0))
    assert "rank 1 has been silent" in silent.detail
    slow, warm = pong("decode", phase_s=LIMITS.decode_stall_s + 0.1), cold()
    assert warm.beats(5, rank_0=slow, rank_1=slow) is None
    warm.watch.warming_up = False
    assert warm.stuck(1, rank_0=slow, rank_1=slow).code is Code.RANK_STALLED


def test_an_observer_that_was_late_forgives_for_a_while() -> None:
    stuck = pong("decode", phase_s=LIMITS.decode_stall_s * 1.5)
    story = Story()
    story.now += 3.0
    assert story.beats(1, rank_0=stuck, rank_1=stuck) is None
    story = Story()
    story.now += 2.0
    assert story.beats(LIMITS.silence_s * 2 + 1, rank_0=pong(), rank_1=pong()) is None
    assert "silent for 3." in story.stuck(LIMITS.silence_s + 1, rank_0=pong()).detail


def lost(rank: int, other: int) -> FailureReport:
    return FailureReport(rank, GroupError(f"lost rank {other}: its link is gone", Code.RANK_LOST))


def said(rank: int, words: str, code: Code) -> FailureReport:
    return FailureReport(rank, GroupError(words, code))


def ended(rank: int, code: Code, words: str = "") -> FailureReport:
    return exit_report(rank, exit_status(code), code, words)


KILLED = exit_report(1, -9, None)
WHY = said(1, "rank 1: step 7: digest differs", Code.DESYNC)
FAILED = said(0, "rank 0: RuntimeError: no such luck", Code.FORWARD_FAILED)
RING = "rank 0: RuntimeError: [ring] connection to a peer was lost"
FOLLOWED = {code: said(0, RING, code) for code in (Code.FORWARD_FAILED, Code.PROOF_FAILED)}
CRASHED = [exit_report(1, status, code_of_exit(status)) for status in (-9, -11, -6, 1)]
LEFT = ended(0, Code.RANK_LOST)


@pytest.mark.parametrize(
    ("reports", "cause"),
    [
        pytest.param([lost(0, 1), WHY, ended(1, Code.DESYNC)], WHY, id="who says why"),
        pytest.param([lost(0, 1), KILLED], KILLED, id="how a process ended"),
        pytest.param([KILLED, lost(0, 1)], KILLED, id="how it ended, first"),
        *(
            (each, crash)
            for crash in CRASHED
            for each in ([crash, lost(0, 1), LEFT], [lost(0, 1), LEFT, crash])
        ),
        # MLX may notice sooner than anybody else that a neighbour is lost.
        *(([followed, KILLED], KILLED) for followed in FOLLOWED.values()),
        *(([followed, lost(1, 0)], followed) for followed in FOLLOWED.values()),
        ([FAILED, KILLED], FAILED),
        pytest.param(
            [ended(0, Code.FORWARD_FAILED, RING), KILLED], KILLED, id="an end before the last frame"
        ),
        pytest.param([WHY, FAILED], WHY, id="the first of equals"),
        pytest.param([only := lost(0, 1)], only, id="a consequence alone"),
    ],
)
def test_the_cause_among_reports(reports: list[FailureReport], cause: FailureReport) -> None:
    assert pick_cause(reports) is cause.error


@pytest.mark.parametrize(
    ("detail", "named"),
    [
        ("rank 1: no such luck", "mini: rank 1: no such luck"),
        ("rank 1 has been silent for 3.1 s", "mini: rank 1 has been silent for 3.1 s"),
        ("mini: rank 1: no such luck", "mini: rank 1: no such luck"),
        ("rank 1: mini is gone: no link", "rank 1: mini is gone: no link"),
        ("rank 0: no such luck", "in: rank 0: no such luck"),
        ("rank 12 ended", "rank 12 ended"),
        ("step 7: rank 1 reports digest 1", "step 7: rank 1 reports digest 1"),
    ],
)
def test_a_rank_on_another_mac_is_named_with_its_mac_and_once(detail: str, named: str) -> None:
    assert with_name(detail, {0: "in", 1: "mini"}) == named


@pytest.mark.parametrize(
    ("signal", "how", "code", "words"),
    [
        (-11, {}, Code.RANK_LOST, "rank 1 was ended by signal 11"),
        (-11, {"phase": "idle"}, Code.RANK_LOST, "rank 1 was ended by signal 11 in phase idle"),
        (-14, {}, Code.FORM_FAILED, "rank 1 did not form the group in time"),  # the alarm around forming
    ],
)
def test_a_signal_is_named(signal: int, how: dict[str, str], code: Code, words: str) -> None:
    report = exit_report(1, signal, None, **how)
    assert (report.error.code, report.error.detail) == (code, words)
    assert "memory runs out" in exit_report(1, -9, None, phase="idle").error.detail


@pytest.mark.parametrize("code", list(Code))
def test_an_exit_status_gives_its_code_back(code: Code) -> None:
    status = exit_status(code)
    assert 64 <= status < 128
    assert code_of_exit(status) is code
    assert exit_report(0, status, code).error.code is code


@pytest.mark.parametrize("status", [0, 1, 2, 63, 127, 200])
def test_any_other_exit_status_is_a_loss(status: int) -> None:
    assert code_of_exit(status) is None
    report = exit_report(1, status, None)
    assert report.error.code is Code.RANK_LOST
    assert report.error.detail == f"rank 1 exited with status {status}"


def part(rank: int, round_number: int, size: int = 4) -> SideChannel:
    return SideChannel(round_number, bytes([rank * 16 + round_number % 16]) * size)


def go_round(
    hub: SideChannelHub, ranks: range, round_number: int, size: int = 4
) -> list[tuple[int, Gathered]]:
    """All of them come; what the last one's coming answers."""
    answers = []
    for rank in ranks:
        assert answers == []
        answers = hub.receive(rank, part(rank, round_number, size))
    return answers


def test_each_rank_gets_all_bytes_in_rank_order_however_they_came() -> None:
    for order in itertools.permutations(range(3)):
        hub = SideChannelHub(3)
        for number, size in enumerate((4, 84, 0, 1), 1):
            answers: list[tuple[int, Gathered]] = []
            for rank in order:
                assert answers == []
                answers = hub.receive(rank, part(rank, number, size))
                assert hub.has_begun is (rank == order[0]), "a round begins with the first who comes"
            data = b"".join(part(rank, number, size).data for rank in range(3))
            assert answers == [(rank, Gathered(number, data)) for rank in range(3)]
            assert hub.late() == [], "no rank is late between two rounds"
    hub = SideChannelHub(2)
    assert hub.receive(0, SideChannel(1, b"same")) == []
    assert [answer.data for _, answer in hub.receive(1, SideChannel(1, b"same"))] == [b"samesame"] * 2


def test_ranks_that_stay_away_are_named_to_those_who_came() -> None:
    hub = SideChannelHub(3)
    assert hub.late() == []
    go_round(hub, range(3), 1)
    hub.receive(0, part(0, 2))
    hub.receive(2, part(2, 2))
    words = "rank 1 did not come to round 2 of JACCL's side channel within 10 s"
    assert hub.late() == [(rank, Gathered(2, b"", words)) for rank in range(3)]
    assert hub.error == words
    assert hub.late() == []
    hub = SideChannelHub(4)
    hub.receive(2, part(2, 1))
    ((rank, answer),) = hub.late()
    assert rank == 2
    assert answer.error.startswith("rank 0 and rank 1 and rank 3 did not come to round 1")


def test_who_speaks_after_the_end_is_told_why_and_only_once() -> None:
    hub = SideChannelHub(3)
    hub.receive(0, part(0, 1))
    assert [rank for rank, _ in hub.abort("rank 1 is gone")] == [0]
    assert hub.receive(2, part(2, 1)) == [(2, Gathered(1, b"", "rank 1 is gone"))]
    assert hub.receive(2, part(2, 1)) == []
    assert hub.receive(0, part(0, 2)) == []
    assert hub.late() == []


def test_the_first_reason_counts_and_none_is_an_error_too() -> None:
    hub = SideChannelHub(2)
    assert hub.abort("rank 0 did not form: errno 22") == []
    assert hub.abort("rank 1 is gone") == []
    ((_, answer),) = hub.receive(1, part(1, 1))
    assert answer.error == "rank 0 did not form: errno 22"
    hub = SideChannelHub(2)
    assert hub.abort("") == []
    ((_, answer),) = hub.receive(1, part(1, 1))
    assert answer.error


@pytest.mark.parametrize(
    ("rounds", "rank", "message", "words"),
    [
        (0, 1, SideChannel(2, b"abcd"), "rank 1 came with round 2 to round 1"),
        (0, 1, SideChannel(1, b"abcde"), "rank 1 sent 5 bytes in round 1 of {channel}, rank 0 sent 4; they"),
        (0, 1, SideChannel(1, b""), "rank 1 sent 0 bytes in round 1 of {channel}, rank 0 sent 4; they"),
        (1, 1, SideChannel(1, b"abcd"), "rank 1 came with round 1 to round 2"),
        (0, 0, SideChannel(1, b"abcd"), "rank 0 came twice to round 1"),
    ],
)
def test_a_rank_with_other_settings_ends_it_for_all(
    rounds: int, rank: int, message: SideChannel, words: str
) -> None:
    hub = SideChannelHub(3)
    for number in range(1, rounds + 1):
        go_round(hub, range(3), number)
    hub.receive(0, SideChannel(rounds + 1, b"abcd"))
    answers, words = hub.receive(rank, message), words.format(channel="JACCL's side channel")
    told = [0, 1, 2] if rounds else sorted({0, rank})
    assert [each for each, _ in answers] == told
    assert all(answer.error.startswith(words) and not answer.data for _, answer in answers)
    assert hub.error.startswith(words)
    assert [each for each, _ in hub.receive(2, SideChannel(rounds + 1, b"abcd"))] == [2][: 2 not in told]


def test_more_rounds_than_anybody_needs() -> None:
    hub = SideChannelHub(2)
    for number in range(1, MAX_ROUNDS + 1):
        assert len(go_round(hub, range(2), number)) == 2
    assert hub.abort("enough")[0][1].round == MAX_ROUNDS


def test_the_middle_gives_up_before_the_ranks_do() -> None:
    """So what they report names who was missing."""
    waits = next(f.default for f in Bootstrap.__dataclass_fields__.values() if f.name == "round_s")
    assert waits > SideChannelHub.ROUND_S
