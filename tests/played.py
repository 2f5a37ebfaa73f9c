"""Tests that are coroutines: what a file's own `play` runs, with the fixtures that each asks for."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any

Story = Callable[..., Coroutine[Any, Any, None]]


def as_test(
    play: Callable[..., None], *needs: str, passes: int = 1
) -> Callable[[Story], Callable[..., None]]:
    """Return a decorator that makes a test of a story: `play` gets the fixtures `needs`, and the story.

    Of the story's arguments `play` passes the first `passes`. The others are fixtures.
    """

    def decorator(story: Story) -> Callable[..., None]:
        given = list(signature(story).parameters)[passes:]

        @wraps(story)
        def test(**fixtures: Any) -> None:
            own = {name: fixtures[name] for name in given}
            play(*(fixtures[name] for name in needs), lambda *scene: story(*scene, **own))

        names = dict.fromkeys((*needs, *given))
        test.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter(name, Parameter.KEYWORD_ONLY) for name in names]
        )
        return test

    return decorator
