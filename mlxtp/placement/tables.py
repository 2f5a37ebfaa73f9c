"""Tables of chips, and of MTP heads of published models. Every number has its source.

bandwidth  of memory: Apple's technical specifications of the Macs with that chip. An M5 Ultra's 1,229 GB/s
           are given as 1.2 TB/s. Assumed: an M6 with 160 GB/s has 10 cores.
flops      of 16-bit matrix products, for a GPU core: clock x 128 lanes x 2 (Apple: 2.6 TFLOPS on an M1's 8
           cores). M5 cores have matrix units; Apple states more than four times an M4's peak. M6 as M5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache

SINGLE = 0.90  #: Share of the specified bandwidth that decoding reaches on a chip of one die.
#: The same for the two dies of an Ultra. Both are fitted, with `cost_model.KERNEL_S`, to published speeds of
#: single Macs; others measured 244 of 273 GB/s on an M4 Pro, and 650 to 690 of 819 on an M3 Ultra.
FUSED = 0.80
CPU_EFFICIENCY = 0.5  #: The same for machines without a known GPU; an assumption.


@dataclass(frozen=True, slots=True)
class Chip:
    name: str
    bandwidth: float  #: Bytes/s.
    efficiency: float
    gpu_cores: int  #: 0 if unknown.
    flops: float  #: The whole GPU's, in 1/s.
    thunderbolt5: bool = False  #: Macs with this chip have Thunderbolt 5, a condition of RDMA.
    ports: int = 3  #: Cables with RDMA at once; Mac Studios have one more port, without RDMA.
    known: bool = True  #: False for the numbers of a similar chip in the table.

    @property
    def reading(self) -> float:
        """Bytes/s that decoding reads."""
        return self.bandwidth * self.efficiency


#: GB/s by chip and GPU cores, the most cores first: the default for unknown cores.
_GBPS: Mapping[str, Mapping[int, float]] = {
    "M1": {8: 68.25, 7: 68.25},
    "M1 Pro": {16: 200, 14: 200},
    "M1 Max": {32: 400, 24: 400},
    "M1 Ultra": {64: 800, 48: 800},
    "M2": {10: 100, 8: 100},
    "M2 Pro": {19: 200, 16: 200},
    "M2 Max": {38: 400, 30: 400},
    "M2 Ultra": {76: 800, 60: 800},
    "M3": {10: 100, 8: 100},
    "M3 Pro": {18: 150, 14: 150},
    "M3 Max": {40: 400, 30: 300},
    "M3 Ultra": {80: 819, 60: 819},
    "M4": {10: 120, 8: 120},
    "M4 Pro": {20: 273, 16: 273},
    "M4 Max": {40: 546, 32: 410},
    "M5": {10: 153, 8: 153},
    "M5 Pro": {20: 307, 16: 307},
    "M5 Max": {40: 614, 32: 460},
    "M5 Ultra": {80: 1229, 64: 1229},
    "M6": {12: 170, 10: 160},
}
#: 16-bit FLOPS of a GPU core, by generation.
_CORE_FLOPS = {1: 0.325e12, 2: 0.36e12, 3: 0.355e12, 4: 0.46e12, 5: 1.84e12, 6: 1.84e12}
_THUNDERBOLT5 = frozenset({"M3 Ultra", "M4 Pro", "M4 Max", "M5 Pro", "M5 Max", "M5 Ultra"})
_PORTS, _ULTRA_PORTS = 3, 5
#: An unknown machine. Assumptions: two channels of memory, a few cores of arithmetic.
_CPU = Chip("", 20e9, CPU_EFFICIENCY, 0, 0.2e12, known=False)

_NAME = re.compile(r"\bApple M(\d+)(?: (Pro|Max|Ultra))?\b", re.IGNORECASE)


@lru_cache(256)
def chip(name: str, gpu_cores: int = 0) -> Chip:
    """Return the chip with Apple's `name` ("Apple M3 Ultra") and so many GPU cores (0: its largest). A newer
    chip counts as the newest of its kind in the table, anything else as a plain computer.
    """
    key, known = _entry(name)
    if not key:
        return replace(_CPU, name=name)
    cores = gpu_cores if gpu_cores in _GBPS[key] else next(iter(_GBPS[key]))
    efficiency, ports = (FUSED, _ULTRA_PORTS) if key.endswith("Ultra") else (SINGLE, _PORTS)
    return Chip(
        name=name,
        bandwidth=_GBPS[key][cores] * 1e9,
        efficiency=efficiency,
        gpu_cores=gpu_cores or cores,
        flops=_CORE_FLOPS[_generation(key)] * (gpu_cores or cores),
        thunderbolt5=key in _THUNDERBOLT5,
        ports=ports,
        known=known,
    )


def core_counts(name: str) -> tuple[int, ...]:
    key, known = _entry(name)
    return tuple(_GBPS[key]) if known else ()


def names() -> tuple[str, ...]:
    return tuple(f"Apple {key}" for key in _GBPS)


def named(text: str) -> str:
    """Return Apple's name of a user's chip: "Apple M4 Pro" for "m4 pro"; or ""."""
    return _BY_WORDS.get(_words(text), "")


def nearest(text: str) -> str:
    found = get_close_matches(_words(text), _BY_WORDS, n=1)
    return _BY_WORDS[found[0]] if found else ""


def _words(text: str) -> str:
    return " ".join(text.lower().split()).removeprefix("apple ")


_BY_WORDS = {_words(name): name for name in names()}


def _entry(name: str) -> tuple[str, bool]:
    """Return the chip's key in the table and True, or a similar chip's key, or "", and False."""
    found = _NAME.search(name)
    if found is None:
        return "", False
    generation, tier = int(found[1]), (found[2] or "").capitalize()
    key = f"M{generation} {tier}".strip()
    if key in _GBPS:
        return key, True
    similar = [k for k in _GBPS if k.partition(" ")[2] == tier and _generation(k) <= generation]
    return max(similar, key=_generation, default=""), False


def _generation(key: str) -> int:
    return int(key[1:].partition(" ")[0])


# --- MTP heads: the share of right first drafts by `model_type`, the lowest published figure --------------

ACCEPTED: Mapping[str, float] = {
    "deepseek_v3": 0.85,  # 85 to 90 %: DeepSeek-V3's report (arXiv 2412.19437), section 5.4.3
    "glm4_moe": 0.84,  # 84 % with GLM-4.5-Air in ik_llama.cpp #1992, over 90 % by vLLM's recipe for GLM-4.X
    "glm4_moe_lite": 0.9,  # over 90 %: the same recipe, which names GLM-4.7-Flash
    "mimo": 0.9,  # about 90 %: XiaomiMiMo/MiMo, README
    "qwen3_5": 0.65,  # Qwen3.8-27B, code, facts, prose: tenstorrent/vllm #442; 80 %: ml-explore/mlx-lm #990
    "qwen3_5_moe": 0.75,  # 75 to 80 %: waybarrios/vllm-mlx #245
}
ACCEPTED_UNKNOWN = 0.6  #: The same of any other family; an assumption.
#: Share of right drafts after a right draft, made from the head's own output. DeepSeek V3's head yielded 3.2
#: tokens a step with seven drafts (nebius/MTP-DeepSeek-V3-0324), GLM-5's more.
ACCEPTED_LATER = 0.6
