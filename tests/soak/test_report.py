"""Criteria of a bad run; and a short run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from ..chaos.answers import Answer
from ..engine.tables import cases
from .__main__ import SHAPES, has_ended, soaked
from .load import CUT, ENDED, LEFT, REFUSED, RIGHT, WRONG, judged
from .report import Asked, Fault, Sample, Soak, Watched, tables

WHOLE = Answer("one two", "stop", None, True, 200)
IDLE = Sample(0.0, 100.0, 40, 12, 0, 1)


def good() -> Soak:
    steady = Watched(
        "agent anna", [replace(IDLE, at=5.0 * n, answers=10 * n) for n in range(100)], (IDLE, IDLE)
    )
    asked = [
        Asked(name, Counter({RIGHT: 7, REFUSED: 2, LEFT: 1}), tokens=70, hung=0) for name in ("anna", "ben")
    ]
    return Soak(
        "group", 0, 500, "anna", [Fault("a fault", 3.0, 1.5), Fault("no fault", 9.0)], asked, [steady]
    )


def test_a_good_run_has_no_problem_and_can_be_shown() -> None:
    soak = good()
    soak.asked[1].outcomes += Counter({CUT: 1, ENDED: 1})  # it was killed
    assert soak.problems == []
    console = Console(width=120, record=True)
    for table in tables(soak):
        console.print(table)
    shown = console.export_text()
    assert all(words in shown for words in ("agent anna", "1.5 / 1.5 / 1.5", "40 → 40", "refused"))
    told = json.loads(json.dumps(soak.as_json()))
    assert told["growth_mb"] == {"agent anna": 0.0}
    assert told["asked"][0]["outcomes"] == {RIGHT: 7, REFUSED: 2, LEFT: 1}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda s: s.asked[0].outcomes.update({CUT: 1}), "was there all the time: cut"),
        (lambda s: s.asked[0].outcomes.update({ENDED: 1}), "was there all the time: ended"),
        (lambda s: s.asked[1].outcomes.update({RIGHT: -7}), "ben has answered no one"),
        (lambda s: (s.asked[1].outcomes.update({WRONG: 1}), s.asked[1].complaints.append("x")), "are wrong"),
        (lambda s: s.asked[1].codes.update({"rank_lost": 1}), "ben ended with rank_lost"),
        (lambda s: setattr(s.asked[0], "hung", 1), "have no end"),
        (lambda s: s.faults.append(Fault("a fault", 4.0, problem="not within")), "a fault at 4 s"),
        (lambda s: s.left_over.append("process 7 is left"), "process 7"),
        (lambda s: setattr(s.processes[0], "idle", (IDLE, replace(IDLE, descriptors=43))), "descriptors"),
        (
            lambda s: setattr(s.processes[0], "idle", (IDLE, replace(IDLE, threads=IDLE.threads + 40))),
            "threads",
        ),
        (
            lambda s: setattr(
                s.processes[0],
                "samples",
                [replace(IDLE, at=n, memory_mb=100 + n / 4, answers=10 * n) for n in range(100)],
            ),
            "grew by 15.0 MB",
        ),
    ],
)
def test_each_thing_that_must_not_happen_is_a_problem(spoil, words: str) -> None:
    soak = good()
    spoil(soak)
    (problem,) = soak.problems
    assert words in problem


def test_an_agent_may_have_descriptors_for_another_rank() -> None:
    soak = good()
    soak.processes[0].idle = (IDLE, replace(IDLE, descriptors=46, ranks=2))
    assert soak.problems == []
    soak.processes[0].idle = (IDLE, replace(IDLE, descriptors=47, ranks=2))
    assert len(soak.problems) == 1


def watched(memory_mb: Callable[[int], float], answers: int = 50, graphs: int = 0) -> Watched:
    """A process whose memory goes by the time; so many answers, and so many graphs, come each second."""
    seconds = range(101)
    return Watched("p", [Sample(n, memory_mb(n), 40, 12, answers * n, 1, graphs * n) for n in seconds])


@cases(
    "process",
    {
        "what a process fills at first": watched(lambda n: 100 + min(n, 20), answers=10),
        "what comes before enough answers": watched(lambda n: 100 + n, answers=1),
        "graphs that a rank keeps": watched(lambda n: 100 + 0.45 * n, graphs=1),
        "memory that it gives back": watched(lambda n: 160 + 150 * (n % 7 > 2)),
    },
)
def test_what_is_no_growth(process: Watched) -> None:
    assert process.growth_mb == pytest.approx(0.0, abs=1.0)


def test_what_is_kept_beside_what_is_given_back_is_growth() -> None:
    process = watched(lambda n: 160 + 150 * (n % 7 > 2) + n / 5)
    assert process.growth_mb > process.allowed_mb


@pytest.mark.parametrize(
    ("answer", "cut", "outcome"),
    [
        (WHOLE, False, RIGHT),
        (replace(WHOLE, text="one"), False, WRONG),
        (replace(WHOLE, finish="length"), False, WRONG),
        (replace(WHOLE, done=False), False, WRONG),
        (replace(WHOLE, text="one", finish=None, done=False), True, CUT),
        (replace(WHOLE, text="two", finish=None, done=False), True, WRONG),
        (replace(WHOLE, text="one"), True, WRONG),  # it said that it was complete
        (replace(WHOLE, text="one", finish=None, done=False, error={"code": "rank_lost"}), False, ENDED),
        (replace(WHOLE, error={"code": "rank_lost"}), False, WRONG),  # an end after an error
        (Answer(status=503, retry_after="2"), False, REFUSED),
        (Answer(status=503), False, WRONG),
        (Answer(status=500, error={"code": "internal"}), False, ENDED),
    ],
)
def test_what_became_of_a_request(answer: Answer, cut: bool, outcome: str) -> None:
    assert judged([answer], [WHOLE], cut=cut) == outcome


def test_a_group_has_ended_if_its_epoch_or_its_owner_is_another() -> None:
    row = {"owner_name": "anna", "epoch": 3}
    before = dict.fromkeys(("same", "next", "moved", "gone"), row)
    after = {"same": row, "next": row | {"epoch": 4}, "moved": row | {"owner_name": "ben"}, "new": row}
    assert has_ended(before, after).keys() == {"next", "moved", "gone"}


@pytest.mark.chaos
@pytest.mark.parametrize("shape", SHAPES)
def test_three_minutes(shape: str) -> None:
    assert soaked(shape, 3, 0, Console()).problems == []
