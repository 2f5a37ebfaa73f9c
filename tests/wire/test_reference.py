"""docs/wire.md is what the tables say."""

from __future__ import annotations

import runpy
from pathlib import Path

from mlxtp.wire.table import MESSAGES

ROOT = Path(__file__).parents[2]


def test_the_reference_is_what_both_ends_run() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "wire_reference.py"))
    page = (ROOT / "docs" / "wire.md").read_text()
    assert page == script["render"](), "run `make reference`"
    assert all(f"0x{number:02X} {message.__name__}\n" in page for number, message in MESSAGES.items())
