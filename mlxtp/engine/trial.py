"""Trial of a machine's kernels for `mlxtp qualify`: `python -m mlxtp.engine.trial MODEL [large]` prints JSON.

`large`: with large command buffers, whose size MLX reads once in a process.
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from .batch import CacheKind, Kernels, arrays_of
from .forwards import ModelForwards, StepInputs
from .group import CollectiveCounter, LoneGroup, use_large_buffers
from .loader import ModelShare, load, make_cache

PROMPT = tuple(range(7, 39))
STEPS, ROUNDS = 64, 5
#: Heads of queries, of keys and values, and their size, of the attention that is timed: a model of 32 or 70
#: billion weights.
ATTENTION = (64, 8, 128)
KEYS, FEW_KEYS = 16_384, 512  #: a long chat on a GPU, and what a CPU is done with soon
#: Seconds, after which macOS has been seen to unwire weights, and the part of the GPU's limit that is held.
PAUSE_S, HELD = 3.0, 16
#: Primitives that launch no kernel. A slice at a place that is computed takes two.
_VIEWS = frozenset(
    (
        "Reshape",
        "Transpose",
        "Slice",
        "Broadcast",
        "ExpandDims",
        "Squeeze",
        "Flatten",
        "Unflatten",
        "Full",
        "Split",
    )
)
_TWO = "DynamicSliceUpdate"


def launches(*arrays: mx.array) -> int:
    """Return the kernels that the graph of these arrays launches, as far as its primitives tell."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    found = Counter(re.findall(r'label ?=\s*"([^"]+)", shape=rectangle', text.getvalue()))
    return sum(number * (1 + (name == _TWO)) for name, number in found.items() if name not in _VIEWS)


class Steps:
    """Steps of one row of a model, each fed the token that the one before chose."""

    def __init__(self, loaded: ModelShare) -> None:
        kinds, caches = CacheKind(loaded.model), make_cache(loaded.model)
        kernels = Kernels.here(loaded.model)
        self._model = ModelForwards(loaded, kinds, CollectiveCounter(), kernels, traces=True)
        self._batch = kinds.empty_batch()
        self._at = len(PROMPT)
        logits, _ = self._model.read(mx.array([PROMPT]), caches, ends=mx.array([self._at - 1]))
        self.token = mx.argmax(logits, axis=-1).astype(mx.int32)  #: int32 [1, 1], perhaps not computed yet
        mx.eval(self.token, arrays_of(caches))
        self._batch.join(1, caches)

    def queue(self) -> list[mx.array]:
        """Make the next step; returns all that it computes."""
        parts, inputs = self._batch.parts((1,)), StepInputs(self.token, None, (1,))
        (logits, *_) = self._model.step(parts, (1,), (self._at,), inputs, winners=False, drafts=0)
        self._at += 1
        self.token = mx.argmax(logits, axis=-1).astype(mx.int32)
        return [self.token, *self._batch.arrays()]

    def seconds(self) -> float:
        """Return the median time of a step, with the next one queued before its token is read."""
        took = []
        for _ in range(STEPS):
            began, older = time.monotonic(), self.token
            mx.async_eval(self.queue())
            mx.eval(older)
            took.append(time.monotonic() - began)
        mx.eval(self.token)
        return median(took)


def mlx_lm_launches(model: Any) -> int:
    """Return those of a step of mlx-lm's own."""
    caches = make_cache(model)
    mx.eval(model(mx.array([PROMPT]), caches), arrays_of(caches))
    return launches(model(mx.zeros((1, 1), dtype=mx.int32), caches), *arrays_of(caches))


def seconds_of(act: Callable[[], mx.array]) -> float:
    """Return the median time of an evaluation, after a first one."""
    took = []
    for _ in range(ROUNDS + 1):
        began = time.monotonic()
        mx.eval(act())
        took.append(time.monotonic() - began)
    return median(took[1:])


def attention_s(keys: int) -> tuple[float, float]:
    """Return the seconds of attention over `keys` without a mask, and with one that hides nothing."""
    heads, kv_heads, size = ATTENTION
    q = mx.ones((1, heads, 1, size), mx.bfloat16)
    k, v = (mx.ones((1, kv_heads, keys, size), mx.bfloat16) for _ in range(2))
    mask = mx.ones((1, 1, 1, keys), mx.bool_)
    mx.eval(q, k, v, mask)
    attend = partial(mx.fast.scaled_dot_product_attention, q, k, v, scale=1.0)
    return seconds_of(attend), seconds_of(partial(attend, mask=mask))


def pause_s(limit_bytes: int) -> tuple[float, float]:
    """Return the seconds of a pass over wired weights, and of one after `PAUSE_S` without any work."""
    weights = mx.ones((limit_bytes // HELD // 8192, 4096), mx.bfloat16)
    vector = mx.ones((4096,), mx.bfloat16)
    usual = seconds_of(lambda: weights @ vector)
    time.sleep(PAUSE_S)
    began = time.monotonic()
    mx.eval(weights @ vector)
    return usual, time.monotonic() - began


def tried(folder: Path) -> dict[str, Any]:
    """Return what was found: times in seconds, kernels of a step beside those of mlx-lm."""
    device = mx.device_info()
    metal = mx.metal.is_available()
    limit = int(device.get("max_recommended_working_set_size", 0)) if metal else 1 << 30
    if metal:
        mx.set_wired_limit(limit)
    loaded = load(folder, LoneGroup(), lambda: None)
    steps = Steps(loaded)
    step_s = steps.seconds()
    keys = KEYS if metal else FEW_KEYS
    plain, masked = attention_s(keys)
    usual, paused = pause_s(limit)
    return {
        "device": device.get("device_name", ""),
        "metal": metal,
        "limit_bytes": limit,
        "launches": launches(*steps.queue()),
        "mlx_lm_launches": mlx_lm_launches(loaded.model),
        "step_s": step_s,
        "keys": keys,
        "attention_s": plain,
        "masked_attention_s": masked,
        "pause_s": PAUSE_S,
        "pass_s": usual,
        "pass_after_pause_s": paused,
    }


if __name__ == "__main__":
    if "large" in sys.argv[2:]:
        use_large_buffers()
    sys.stdout.write(json.dumps(tried(Path(sys.argv[1]))))
