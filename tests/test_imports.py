"""The start of a process: no garbage is collected while its modules are imported."""

from __future__ import annotations

import gc

from mlxtp.imports import importing


def test_modules_are_imported_without_collections_and_collected_objects_pass_by_them() -> None:
    before = gc.get_freeze_count()
    with importing():
        collects = gc.isenabled()
        kept: list[list[int]] = [[] for _ in range(1000)]
    assert (collects, gc.isenabled()) == (False, True)
    assert gc.get_freeze_count() >= before + len(kept)
