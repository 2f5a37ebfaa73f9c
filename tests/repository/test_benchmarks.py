"""The parts of the benchmark that measure nothing: rows, goals, the page, what a stream of events held."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import models, pinning, pipeline, prefill, prompts, results
from benchmarks.__main__ import CASES, run
from benchmarks.delay import Delay, Underway
from benchmarks.errors import Unmeasured
from benchmarks.http_client import parse
from benchmarks.measures import MEASURES, Row, absolute, as_json, compare, met, verdict
from benchmarks.membership import Crowd
from benchmarks.stage import Stage
from benchmarks.table import HEADINGS, cells

SPEED = "one stream, pipe vs bare loop"


def test_a_ratio_is_the_median_of_each_rounds_own() -> None:
    row = compare(SPEED, ours=[100, 90, 300], peers=[100, 100, 200])
    assert (row.value, row.peer_value, row.ratio) == (100, 100, 1.0)
    assert row.spread == pytest.approx(0.6)  # 0.9 to 1.5 around 1.0


def test_a_goal_is_about_the_ratio_where_there_is_a_peer_and_else_about_the_value() -> None:
    assert [met(absolute("idle rank, share of one core", [share])) for share in (0.99, 1.0)] == [True, False]
    assert [met(compare(SPEED, [speed], [100.0])) for speed in (97.0, 96.9)] == [True, False]


def test_a_row_is_built_as_it_was_declared() -> None:
    with pytest.raises(ValueError, match="no peer"):
        compare("encode step", [1.0], [1.0])
    with pytest.raises(ValueError, match="against bare"):
        absolute(SPEED, [1.0])


def test_the_last_line_names_what_was_missed_and_what_was_not_measured() -> None:
    fast, slow = (absolute("encode + decode step", [value]) for value in (4.0, 8.25))
    aimless = absolute("encode step", [3.0])
    assert verdict([fast, aimless]) == "all 1 goals met"
    assert verdict([fast, slow]) == "1 of 2 goals missed: encode + decode step (8.25, goal ≤ 5)"
    assert verdict([fast], ["http", "copying"]) == "all 1 goals met; not measured: http, copying"
    assert verdict([], ["frames"]) == "no goals; not measured: frames"


def test_the_json_of_a_row() -> None:
    [row] = json.loads(as_json([compare(SPEED, [97.0], [100.0])]))
    told = {"name": SPEED, "unit": "tokens/s", "peer": "bare generate_step", "goal": "≥ 0.97", "met": True}
    assert row == told | {"value": 97.0, "peer_value": 100.0, "ratio": 0.97, "spread": None}
    missed, aimless = json.loads(as_json([compare(SPEED, [96.0], [100.0]), absolute("encode step", [3.0])]))
    assert (missed["met"], aimless["met"]) == (False, None)


def test_a_row_has_a_cell_for_each_heading() -> None:
    assert len(cells(absolute("encode step", [3.0]))) == len(HEADINGS)


def test_the_page_gets_the_table_and_keeps_the_rest(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("\n".join(["before", results.BEGIN, "old", results.END, *results.BEST, "after", ""]))
    results.write([compare(SPEED, [97.0], [100.0])], page)
    once = page.read_text()
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert f"| {SPEED} | 97 | tokens/s |" in once
    assert MEASURES[SPEED].says in once
    assert "mlx-lm" in once
    assert "old" not in once
    results.write([compare(SPEED, [97.0], [100.0])], page)
    assert page.read_text() == once


def test_what_a_machine_met_once_and_misses_now_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("\n".join([results.BEGIN, results.END, *results.BEST]))

    def row(name: str, value: float) -> Row:
        return compare(name, [value], [100.0]) if MEASURES[name].peer else absolute(name, [value])

    idle = "idle rank, share of one core"
    for speed, share in ((98.0, 3.0), (99.0, 0.2), (97.5, 0.1), (50.0, 0.5)):
        results.write([row(SPEED, speed), row(idle, share)], page)
    assert results.lost([row(SPEED, 96.0), row(idle, 0.9)], page) == [f"{SPEED} (0.96, was 0.99)"]
    assert results.lost([row(SPEED, 98.0), row(idle, 2.0)], page) == [f"{idle} (2, was 0.1)"]
    monkeypatch.setattr(results, "cpu_model", lambda: "another")
    assert results.lost([row(SPEED, 50.0), row(idle, 2.0)], page) == []


def test_the_real_page_has_its_markers() -> None:
    for markers in ((results.BEGIN, results.END), results.BEST):
        results.between_markers(results.PAGE.read_text(), "text", *markers)


@pytest.mark.parametrize(
    "page", ["", results.BEGIN, f"{results.END}{results.BEGIN}", f"{results.BEGIN * 2}{results.END}"]
)
def test_a_page_without_its_markers_is_left_alone(page: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        results.between_markers(page, "text")


def test_the_page_names_every_case() -> None:
    page = results.PAGE.read_text()
    assert [name for name in CASES if name not in page] == []


def _event(**fields: object) -> bytes:
    return b"data: " + json.dumps({"choices": [], **fields}).encode() + b"\n\n"


def _piece(text: str) -> bytes:
    return _event(choices=[{"delta": {"content": text}}])


def test_an_event_came_when_its_last_byte_did() -> None:
    usage = _event(usage={"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 7}})
    stream = _event(choices=[{"delta": {"role": "assistant", "content": ""}}]) + _piece("1") + _piece("2")
    stream += usage + b": comment\n\ndata: [DONE]\n\n"
    cut = stream.index(_piece("2")) + 10
    answer = parse(1.0, [(2.0, stream[:cut]), (3.5, stream[cut:])])
    assert answer.arrivals == ((2.0, "1"), (3.5, "2"))
    assert (answer.text, answer.tokens, answer.cached) == ("12", 2, 7)
    assert (answer.ttft_s, answer.ended_at) == (1.0, 3.5)
    assert answer.rate == pytest.approx(2 / 2.5)


def test_an_answer_without_text_had_its_first_token_at_its_end() -> None:
    answer = parse(1.0, [(2.0, _event(usage={"completion_tokens": 1}))])
    assert answer.ttft_s == 1.0
    with pytest.raises(Unmeasured):
        _ = answer.rate


def test_an_error_in_a_stream_is_no_answer() -> None:
    with pytest.raises(Unmeasured, match="lost"):
        parse(0.0, [(1.0, _event(error={"message": "lost"}))])


def test_a_gap_counts_if_it_overlaps_the_long_prompt() -> None:
    running = (0, 5, 6, 8, 9, 20)
    assert prefill.longest_gap_s(running, 5.5, 8.5) == 2
    assert prefill.longest_gap_s(running, 7, 30) == 11
    with pytest.raises(Unmeasured):
        prefill.longest_gap_s((0, 1, 2), 3, 4)


@pytest.mark.parametrize("size", [1, 5])
def test_a_crowd_agrees_and_agrees_again_without_its_coordinator(size: int) -> None:
    crowd = Crowd(size, seed=1)
    assert crowd.ticks_until_agreed() <= 6
    first = crowd.coordinator
    if size > 1:
        crowd.kill(first)
        assert 3 <= crowd.ticks_until_agreed() <= 6
        assert crowd.coordinator > first


def test_a_haystack_is_as_long_as_fits() -> None:
    text, second = prompts.haystack(1, lambda candidate: len(candidate) <= 500)
    assert 450 < len(text) <= 500
    assert second.removeprefix("What is the code for ").rstrip("?") in text
    assert prompts.haystack(1, lambda candidate: len(candidate) <= 500) == (text, second)
    assert prompts.haystack(2, lambda candidate: len(candidate) <= 500) != (text, second)


def test_the_walk_comes_to_every_token_once() -> None:
    seen = [100]
    while (token := models.successor(seen[-1], 512)) != 100:
        seen.append(token)
    assert len(seen) == len(set(seen)) == 504
    assert not {0, 1, 5} & set(seen)


def test_the_large_model_is_about_400_mb() -> None:
    shapes = models.shapes(models.LARGE)
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    vocabulary = sum(int(np.prod(shapes[name])) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert 380e6 < 2 * total < 420e6
    assert 0.1 < vocabulary / total < 0.25


def test_streams_are_counted_while_all_of_them_run() -> None:
    early, late = [0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]
    assert pipeline.steady_rate([early, late]) == 2.0  # four tokens between 1 and 3 s
    assert pipeline.steady_rate([early]) == 1.0
    with pytest.raises(Unmeasured, match="at once"):
        pipeline.steady_rate([[0.0, 1.0], [1.0, 2.0]])


def test_a_text_that_leaves_the_walk_is_not_measured() -> None:
    first = models.successor(100, 512)
    pipeline.check_walk([100, first, models.successor(first, 512)])
    with pytest.raises(Unmeasured, match=f"token {first + 1} came after 100"):
        pipeline.check_walk([100, first + 1])


@pytest.mark.parametrize(
    ("ours", "turns_at"),
    [
        ((3.0, 4.0, 8.0), 0.5),  # 2 more without delay, 2 less with 1 ms
        ((3.0, 7.0, 8.0), 2.0),  # 1 more with 1 ms, 3 less with 5 ms
        ((1.0, 2.0, 3.0), 0.0),
        ((1.0, 6.0, 11.0), 0.0),  # as much is not more
        ((0.5, 7.0, 8.0), 2.0),  # less at first, and for good
        ((2.0, 7.0, 12.0), 5.0),  # more with all of them
    ],
)
def test_the_delay_from_which_on_a_pipeline_takes_no_more(ours: tuple[float, ...], turns_at: float) -> None:
    assert pipeline.turning_ms((0, 1, 5), ours, (1.0, 6.0, 11.0)) == turns_at


def test_the_layers_are_divided_evenly() -> None:
    assert pipeline.even(pipeline.LAYERS, 2) == "6,6"
    assert pipeline.even(pipeline.LAYERS, 3) == "4,4,4"


def test_what_is_underway_arrives_in_order_also_when_the_delay_becomes_shorter() -> None:
    underway = Underway()
    underway.push(b"slow", 5.0)
    underway.push(b", fast", 1.0)
    underway.push(b", last", 6.0)
    assert underway.next_at() == 5.0
    assert underway.arrived(4.9) == b""
    assert underway.arrived(5.0) == b"slow, fast"
    assert underway.next_at() == 6.0
    assert underway.arrived(6.0) == b", last"
    assert underway.next_at() is None


def test_the_relay_delays_both_ways_and_loses_nothing(tmp_path: Path) -> None:
    file, sent = tmp_path / "delay", os.urandom(1 << 20)
    Delay(file).set(0.05)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        command = [sys.executable, "-m", "benchmarks.relay", str(file), host, str(port)]
        relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert relay.stdout is not None
        with (
            relay,
            socket.create_connection((host, int(relay.stdout.readline()))) as near,
            listening.accept()[0] as far,
        ):
            for source, sink in ((near, far), (far, near)):
                began, received = time.monotonic(), b""
                source.sendall(b"a")
                assert sink.recv(1) == b"a"
                assert time.monotonic() - began >= 0.05
                source.settimeout(10)
                sink.settimeout(10)
                sender = threading.Thread(target=source.sendall, args=(sent,))
                sender.start()
                while len(received) < len(sent) and (data := sink.recv(1 << 16)):
                    received += data
                sender.join()
                assert received == sent
            near.close()
            assert relay.wait(10) == 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins nothing")
def test_ranks_have_cores_of_their_own_also_where_the_rest_is_kept_on_one() -> None:
    cores = sorted(os.sched_getaffinity(0))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.sched_setaffinity(0, {cores[-1]})
        pinning.pin(child.pid, 0)
        assert os.sched_getaffinity(child.pid) == {cores[0]}
    finally:
        os.sched_setaffinity(0, cores)
        child.communicate(b"\n")


def test_two_cases_may_name_their_models_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(stage: Stage) -> list[Row]:
        models.write_deep(stage.folder / "deep", 1)
        return []

    monkeypatch.setattr("benchmarks.__main__.CASES", {"links": case, "replicas": case})
    assert asyncio.run(run(["links", "replicas"], Console(quiet=True), quick=True)) == ([], [])
