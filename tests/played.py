"""Tests that are coroutines: a file's own `play` sets the stage, and runs them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

Test = Callable[..., Any]


def scenes(
    play: Callable[..., None], *fixtures: str, stages: int = 1
) -> Callable[..., Callable[[Test], Test]]:
    """Return a decorator that makes tests of coroutines: `play` sets the stage, which they get first.

    `play` takes the values of these fixtures, the story, and settings: those of the decorator, and the
    arguments of the test that it names. It gives the story so many arguments.
    """

    def scene(*passed: str, **settings: Any) -> Callable[[Test], Test]:
        def decorated(story: Test) -> Test:
            own = list(inspect.signature(story).parameters.values())[stages:]
            names = [each.name for each in own]

            @wraps(story)
            def test(**given: Any) -> None:
                mine = {name: given[name] for name in names}
                how = settings | {name: given[name] for name in passed}
                play(*(given[name] for name in fixtures), lambda *stage: story(*stage, **mine), **how)

            others = [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
                for name in (*fixtures, *passed)
                if name not in names
            ]
            test.__signature__ = inspect.Signature([*own, *others])  # type: ignore[attr-defined]
            return test

        return decorated

    return scene
