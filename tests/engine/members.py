"""Members of bare groups: `python -m MEMBER RANK HOSTS OUTPUT MODEL...`, no agent, no links.

Each forms the group, does with every model what a rank does, and writes down what it saw: OUTPUT.json for
facts, by the names of models, and OUTPUT.npz for numbers, `MODEL/WHAT` each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mlxtp.engine.group import CollectiveCounter, form

FORM_S = 60.0
Notes = tuple[dict[str, Any], dict[str, Any]]
"""Facts, and arrays."""


def be_member(
    work: Callable[[Path, Any, CollectiveCounter], Notes],
    begin: Callable[[Any, CollectiveCounter], dict[str, Any]] = lambda *_: {},
) -> None:
    """Be one of a group: `begin` gives facts of the group, `work` those of each model, and arrays."""
    rank, hosts, output, *models = sys.argv[1:]
    counter = CollectiveCounter()
    counter.install()
    addresses = tuple(hosts.split(","))
    group = form("ring", int(rank), len(addresses), addresses, folder=Path(output).parent, deadline_s=FORM_S)
    facts, arrays = begin(group, counter), {}
    for model in map(Path, models):
        facts[model.name], numbers = work(model, group, counter)
        arrays |= {f"{model.name}/{what}": array for what, array in numbers.items()}
    Path(f"{output}.json").write_text(json.dumps(facts))
    np.savez(f"{output}.npz", **arrays)
