"""The table of the ring of peers' suites: what no pattern knows is red."""

from __future__ import annotations

from .__main__ import SUITES, told
from .suites import RUNNERS, Result

SUITE = {"title": "A", "known": {"one[a": "lacks: it", "one*500": "theirs: b", "gone": "tiny: c"}}


def test_a_failure_has_the_kind_of_the_first_pattern_that_fits_its_words() -> None:
    tried = [("one[a]", False, "500"), ("one[b]", False, "x\n500"), ("two", False, ""), ("gone", True, "")]
    row = told("a", SUITE, [Result(*each) for each in tried])
    assert [each["kind"] for each in row["failures"]] == ["lacks", "theirs", "mlxtp"]
    assert [row[key] for key in ("run", "passed", "mlxtp", "lacks", "theirs", "tiny")] == [4, 1, 1, 1, 1, 0]
    assert row["stale"] == ["gone"]


def test_every_known_failure_has_a_kind_and_a_reason() -> None:
    for suite in SUITES.values():
        assert suite["runner"] in RUNNERS
        for words in suite.get("known", {}).values():
            kind, _, reason = words.partition(": ")
            assert kind in {"lacks", "theirs", "tiny"}
            assert reason
