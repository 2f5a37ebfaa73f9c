"""Checks of one library against one endpoint, each reported as one line of JSON."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

URL, MODEL = os.environ["APPS_URL"], os.environ["APPS_MODEL"]
SCRIPTED = os.environ["APPS_ENGINE"] == "actor"
PART = sys.argv[1] if len(sys.argv) > 1 else ""
VALUES = {"answer": 9, "word": "nine"}
JSON = f"DO json {json.dumps(VALUES)}"
SAY = 'DO say "The sky is blue."'
CALL = 'DO call look_up {"n": 5}'


class Answer(BaseModel):
    """An answer."""

    answer: int
    word: str


def look_up(n: int) -> str:
    """Look a number up."""
    return f"FALCON-{n}"


def forced(tool: str) -> str:
    """The words that have the actor call `tool` with the values, or write them as JSON."""
    return f"DO call {tool} {json.dumps(VALUES)} {JSON}"


def check(name: str, act: Callable[[], Any], expected: str = "", scripted: bool = False) -> None:
    """Run one check. `expected`: text of the result. `scripted`: only a scripted engine can do it."""
    if scripted and not SCRIPTED:
        return
    try:
        found = act()
        found = asyncio.run(found) if inspect.iscoroutine(found) else found
        assert found, "nothing came"
        assert not SCRIPTED or expected in str(found), f"{str(found)[:80]!r} came"
        line = {"tried": name, "ok": True, "note": ""}
    except Exception as error:  # noqa: BLE001 - a library may raise anything
        note = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        line = {"tried": name, "ok": False, "note": note}
    print(json.dumps(line), flush=True)


def values(found: Any) -> str:
    """The fields of a pydantic model or of an object, as `expected` names them."""
    fields = found if isinstance(found, dict) else found.model_dump()
    assert set(fields) >= {"answer", "word"}, f"{fields} came"
    return f"{fields['answer']} {fields['word']}"


NINE = "9 nine"
