"""One member of a bare group (`members.py`), which proves itself and says something with each model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtp.engine.group import CollectiveCounter, Group
from mlxtp.engine.loader import load, make_cache

from .members import Notes, be_member

PROMPT = (0, 43, 38, 49, 40, 52, 51, 18, 50, 42, 55, 300, 41, 77, 5, 9)
STEPS = 8


def forwards(folder: Path, group: Group, counter: CollectiveCounter) -> Notes:
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
    sizes = {"layers": len(loaded.model.layers), "weight_bytes": loaded.weight_bytes}
    return {"tokens": tokens, "collectives": counts, **sizes}, logits


def prove(group: Group, counter: CollectiveCounter) -> dict[str, Any]:
    facts: dict[str, Any] = {"rank": group.rank, "size": group.size}
    facts["proof"] = asdict(group.prove(4_000_000_000))
    facts["proof_collectives"] = counter.count
    facts["proof_of_strangers"] = asdict(group.prove(100 + group.rank))
    ours = {rows: mx.arange(rows, dtype=mx.int32) + 1000 * group.rank for rows in (1, 3, 64, 100)}
    facts["agreed"] = {rows: group.agree(tokens).tolist() for rows, tokens in ours.items()}
    return facts


if __name__ == "__main__":
    be_member(forwards, prove)
