"""One member of a bare group: `group_member.py RANK HOSTS OUTPUT MODEL...`, no agent, no links.

Forms the group, does with it what a rank does, and writes down what it saw: OUTPUT.json and OUTPUT.npz.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtp.engine.group import CollectiveCounter, Group, form
from mlxtp.engine.loader import load, make_cache

PROMPT = (0, 43, 38, 49, 40, 52, 51, 18, 50, 42, 55, 300, 41, 77, 5, 9)
STEPS = 8
FORM_S = 60.0


def forwards(folder: Path, group: Group, counter: CollectiveCounter) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prefill and greedy steps as a runner does them: (what was counted, the logits of every forward)."""
    loaded = load(folder, group, lambda: None)
    cache = make_cache(loaded.model)
    x = mx.array([PROMPT])
    tokens, counts, logits = [], [], {}
    for step in range(1 + STEPS):
        before = counter.count
        out = loaded.vocabulary.gather(loaded.vocabulary.forward(loaded.model, x, cache))
        token = group.agree(mx.argmax(out[:, -1, :], axis=-1).astype(mx.int32))
        counts.append(counter.count - before)
        mx.eval(token, out)
        logits[str(step)] = np.array(out.astype(mx.float32))
        tokens.append(int(token[0].item()))
        x = token[:, None]
    facts = {
        "tokens": tokens,
        "collectives": counts,
        "layers": len(loaded.model.layers),
        "weight_bytes": loaded.weight_bytes,
    }
    return facts, logits


def main() -> None:
    rank, hosts, output, *models = sys.argv[1:]
    counter = CollectiveCounter()
    counter.install()
    addresses = tuple(hosts.split(","))
    group = form("ring", int(rank), len(addresses), addresses, folder=Path(output).parent, deadline_s=FORM_S)
    facts: dict[str, Any] = {"rank": group.rank, "size": group.size}
    facts["proof"] = asdict(group.prove(4_000_000_000))
    facts["proof_collectives"] = counter.count
    facts["proof_of_strangers"] = asdict(group.prove(100 + group.rank))
    facts["agreed"] = {
        rows: group.agree(mx.arange(rows, dtype=mx.int32) + 1000 * group.rank).tolist()
        for rows in (1, 3, 64, 100)
    }
    arrays = {}
    for model in models:
        name = Path(model).name
        facts[name], logits = forwards(Path(model), group, counter)
        arrays |= {f"{name}-{step}": value for step, value in logits.items()}
    Path(f"{output}.json").write_text(json.dumps(facts))
    np.savez(f"{output}.npz", **arrays)


if __name__ == "__main__":
    main()
