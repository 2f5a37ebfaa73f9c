"""The choice of a group for a request, and the measured speed that it goes by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.gateway.routing import SPEED, TIE, GroupLoad, PrefillMeter, RouteOption, choose, load_tokens

LOADS = st.builds(
    GroupLoad, st.integers(0, 50_000), st.integers(0, 40), st.sampled_from([0.0, 80.0, 500.0, 4000.0])
)
OPTIONS = st.lists(
    st.builds(RouteOption, st.text("ab#", max_size=3), st.booleans(), LOADS, st.integers(0, 40_000)),
    min_size=1,
    max_size=6,
    unique_by=lambda option: option.group,
)


def option(group: str = "a#0", cached: int = 0, *, here: bool = False, **load: float) -> RouteOption:
    return RouteOption(group, here, GroupLoad(**load), cached)  # type: ignore[arg-type]


def seconds(prompt: int, each: RouteOption, options: list[RouteOption]) -> float:
    speed = each.load.speed or max(other.load.speed for other in options) or SPEED
    least = min(load_tokens(90, other.load.requests) for other in options)
    load = load_tokens(90, each.load.requests) - least
    return (max(prompt - each.cached, 0) + each.load.queued + load) / speed


@given(st.integers(1, 40_000), OPTIONS)
def test_no_dearer_group_is_chosen(prompt: int, options: list[RouteOption]) -> None:
    best = choose(prompt, options, 90)
    assert seconds(prompt, best, options) <= TIE * min(seconds(prompt, each, options) for each in options)


@given(st.integers(1, 40_000), OPTIONS, st.randoms())
def test_the_order_of_groups_changes_nothing(prompt: int, options: list[RouteOption], random: object) -> None:
    shuffled = list(options)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(prompt, shuffled) == choose(prompt, options)


@pytest.mark.parametrize(
    ("prompt", "options", "chosen"),
    [
        (1000, [option("a#0"), option("a#1", 768)], "a#1"),
        (1000, [option("a#0"), option("a#1", 768, queued=600)], "a#1"),
        (1000, [option("a#0"), option("a#1", 768, queued=900)], "a#0"),
        (1000, [option("a#0", speed=200.0), option("a#1", speed=900.0)], "a#1"),
        (1000, [option("a#0", speed=200.0), option("a#1", speed=900.0, queued=9000)], "a#0"),
        (1000, [option("a#0", speed=900.0), option("a#1")], "a#0"),
        (1000, [option("a#0", requests=2), option("a#1", requests=1)], "a#1"),
        (90_000, [option("a#0", requests=2), option("a#1", requests=1)], "a#1"),
        (2100, [option("a#0", 2048, requests=500), option("a#1")], "a#1"),
        (2100, [option("a#0", 2048, requests=2), option("a#1")], "a#0"),
        (2100, [option("a#0", 2048, requests=502), option("a#1", requests=500)], "a#0"),
        (2100, [option("a#0", 2048, requests=6), option("a#1", requests=2)], "a#1"),
        (32_000, [option("a#0", 30_720, requests=20), option("a#1")], "a#0"),
        (32_000, [option("a#0", 30_720, requests=60), option("a#1")], "a#1"),
        (1000, [option("a#0", speed=900.0, requests=2), option("a#1", speed=880.0, requests=1)], "a#1"),
        (1000, [option("a#0"), option("a#1", here=True)], "a#1"),
        (1000, [option("a#1"), option("a#0")], "a#0"),
    ],
)
def test_the_first_token_and_open_requests_decide_then_the_place(
    prompt: int, options: list[RouteOption], chosen: str
) -> None:
    assert choose(prompt, options).group == chosen


def test_a_short_answer_minds_other_rows_less_but_not_those_that_no_step_has_room_for() -> None:
    def chosen(requests: int) -> str:
        return choose(2100, [option("a#0", 2048, requests=requests), option("a#1")], 9).group

    assert (chosen(60), chosen(100)) == ("a#0", "a#1")


def test_speed_is_measured_while_there_are_prompts() -> None:
    meter = PrefillMeter()
    meter.begin(10.0)
    meter.computed(500, 11.0)
    assert meter.speed == 500
    meter.computed(1000, 12.0)
    assert 500 < meter.speed < 1000
    before = meter.speed
    meter.begin(100.0)  # it had none in between
    meter.computed(900, 101.0)
    assert before < meter.speed < 1000
    meter.computed(5, 101.5)  # says nothing
    meter.computed(700, 102.5)
    assert meter.speed > before
