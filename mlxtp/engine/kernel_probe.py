"""Probe of MLX's kernels on this machine, for `mlxtp qualify`: `python -m mlxtp.engine.kernel_probe MODEL`.

Prints JSON; with `large`, only a step's time with large command buffers, whose size MLX reads just once.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from .batch import CacheKind, arrays_of
from .describe import VIEWS
from .forwards import ModelForwards, StepInputs
from .group import CollectiveCounter, LoneGroup, use_large_buffers
from .loader import ModelShare, load, make_cache, steps

PROMPT = tuple(range(7, 39))
ROUNDS = 64
#: Query heads, KV heads and head size of models with 32 or 70 billion weights.
ATTENTION = (64, 8, 128)
KEYS, FEW_KEYS = 16_384, 512  #: a long chat on a GPU; few enough for a CPU
#: After such a pause, macOS was seen to unwire so many bytes of weights (MLX issue 4609).
PAUSE_S, WEIGHTS_BYTES, FEW_WEIGHTS_BYTES = 3.0, 4 << 30, 64 << 20


def launches(*arrays: mx.array) -> int:
    found = steps(*arrays)
    computed_places = found.count("DynamicSliceUpdate")  # on Metal, a further kernel each, for the position
    return computed_places + len([name for name in found if name not in VIEWS])


class Steps:
    def __init__(self, loaded: ModelShare) -> None:
        kinds, caches = CacheKind(loaded.model), make_cache(loaded.model)
        self._model = ModelForwards(loaded, kinds, CollectiveCounter(), traces=True)
        self._batch = kinds.empty_batch()
        self._at = len(PROMPT)
        logits, _ = self._model.read(mx.array([PROMPT]), caches, ends=mx.array([self._at - 1]))
        self._token = mx.argmax(logits, axis=-1).astype(mx.int32)
        mx.eval(self._token, arrays_of(caches))
        self._batch.join(1, caches)

    def next(self) -> list[mx.array]:
        parts, inputs = self._batch.parts((1,)), StepInputs(self._token, None, (1,))
        (logits, *_) = self._model.step(parts, (1,), (self._at,), inputs, winners=False, drafts=0)
        self._at += 1
        self._token = mx.argmax(logits, axis=-1).astype(mx.int32)
        return [self._token, *self._batch.arrays()]

    def run_ahead(self) -> mx.array:
        older = self._token
        mx.async_eval(self.next())
        return older


def mlx_lm_launches(model: Any) -> int:
    caches = make_cache(model)
    mx.eval(model(mx.array([PROMPT]), caches), arrays_of(caches))
    return launches(model(mx.zeros((1, 1), dtype=mx.int32), caches), *arrays_of(caches))


def seconds_of(act: Callable[[], mx.array], rounds: int = 5) -> float:
    took = []
    for _ in range(rounds + 1):
        began = time.monotonic()
        mx.eval(act())
        took.append(time.monotonic() - began)
    return median(took[1:])


def attention_s(keys: int) -> tuple[float, float]:
    """Return the seconds of attention over `keys` without a mask, and with a mask that hides nothing."""
    heads, kv_heads, size = ATTENTION
    q = mx.ones((1, heads, 1, size), mx.bfloat16)
    k, v = (mx.ones((1, kv_heads, keys, size), mx.bfloat16) for _ in range(2))
    mask = mx.ones((1, 1, 1, keys), mx.bool_)
    mx.eval(q, k, v, mask)
    attend = partial(mx.fast.scaled_dot_product_attention, q, k, v, scale=1.0)
    return seconds_of(attend), seconds_of(partial(attend, mask=mask))


def pause_s(weights_bytes: int) -> tuple[float, float]:
    weights, vector = mx.ones((weights_bytes // 8192, 4096), mx.bfloat16), mx.ones((4096,), mx.bfloat16)
    usual = seconds_of(lambda: weights @ vector)
    time.sleep(PAUSE_S)
    began = time.monotonic()
    mx.eval(weights @ vector)
    return usual, time.monotonic() - began


def probe(folder: Path, *, large: bool) -> dict[str, Any]:
    metal = mx.metal.is_available()
    if metal:
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    loaded = load(folder, LoneGroup(), lambda: None)
    steps = Steps(loaded)
    step_s = seconds_of(steps.run_ahead, ROUNDS)
    if large:
        return {"step_s": step_s}
    keys = KEYS if metal else FEW_KEYS
    plain, masked = attention_s(keys)
    usual, paused = pause_s(WEIGHTS_BYTES if metal else FEW_WEIGHTS_BYTES)
    return {
        "metal": metal,
        "launches": launches(*steps.next()),
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
    if large := "large" in sys.argv[2:]:
        use_large_buffers()
    sys.stdout.write(json.dumps(probe(Path(sys.argv[1]), large=large)))
    gc.collect()  # A Mac may leak memory that is still wired when a process ends.
    mx.clear_cache()
    mx.set_wired_limit(0)
