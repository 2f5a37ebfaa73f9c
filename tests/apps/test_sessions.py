"""Whole agent sessions: 16,000 tokens before the first word, then three turns with calls."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from .actor import Stage
from .sessions import DIALECTS


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_session_goes_on_and_each_prompt_begins_with_the_one_before(acting: Stage, dialect: Any) -> None:
    session, since = dialect(acting.url), len(acting.ledger)
    for turn, words in enumerate(("FALCON", "MERCURY", "naïve 世界")):
        session.say(f'Please. DO call bash {{"command": "echo {words}"}}')
        assert session.answer() == ("", {"command": f"echo {words}"})
        session.returned(f"{words}-{turn}")
        assert session.answer() == (f"The tool returned: {words}-{turn}", None)
    seen = acting.ledger[since:]
    assert len(seen) == 6
    assert len(seen[0].prompt) > 16_000
    lost = [len(one.prompt) - two.shared for one, two in pairwise(seen)]
    assert max(lost) <= 0, "tokens of an earlier prompt would be read again"
