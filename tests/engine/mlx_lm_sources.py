"""Facts of mlx-lm's families, read from its sources, because importing all of them takes seconds."""

from __future__ import annotations

import pkgutil
import re
from functools import cache
from pathlib import Path

import mlx_lm.models


@cache
def shardable_families() -> frozenset[str]:
    """Families whose `Model` has `shard`."""
    folder = Path(mlx_lm.models.__path__[0])
    sources = {
        module.name: path.read_text()
        for module in pkgutil.iter_modules([str(folder)])
        if (path := folder / f"{module.name}.py").is_file()
    }
    found = {family for family, text in sources.items() if "def shard(self" in text}
    return frozenset(found | {family for family, text in sources.items() if _source(text) in found})


def _source(text: str) -> str | None:
    """The family whose `Model` this one's extends or is, if any."""
    if same := re.search(r"^from \.(\w+) import (?:\w+, )*Model\b(?! as)", text, re.MULTILINE):
        return same[1]
    base = re.search(r"^class Model\(([\w.]+)\)", text, re.MULTILINE)
    if base is None:
        return None
    family, _, name = base[1].rpartition(".")
    imported = re.search(rf"^from \.(\w+) import Model as {name}$", text, re.MULTILINE)
    return imported[1] if imported else family or None
