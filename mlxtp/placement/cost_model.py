"""Estimate of a model's speed and memory on a group of ranks, from its shape, chips, fabric and workload.

Every unmeasured value is a named assumption here; `python -m benchmarks.backtest` compares with published
figures. A token reads the weights that it meets and its KV cache, starts kernels, and on several Macs waits
for each collective (`docs/placement.md`).

a request   Prompt: the larger of its arithmetic, attention to earlier tokens included, and of reading all
            weights once a chunk, plus collectives. Answer: a step for each token, which reads
            the weights once for all rows, and each row's KV cache.
a pipeline  A token: all stages in turn, plus N fences and steps of the fabric, for N - 1 transfers and the
            way back. A prompt: one chunk through all stages, and others at the pace of the slowest stage or
            transfer. Several requests, in a lane for each stage: the larger of a lane's way through all
            stages and of lanes x the slowest stage.
drafts      A step reads weights once for all its tokens, and all experts that they meet, x (1 + WIDER x
            drafts); it yields 1 + accepted x (1 + ACCEPTED_LATER + ...) tokens.

A mesh's latency counts as equal for two and four ranks; it grows a little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from ..chunks import USUAL, chunk_of
from .model_shape import ModelShape
from .tables import ACCEPTED, ACCEPTED_LATER, ACCEPTED_UNKNOWN, Chip, chip
from .topology import MemberMachine

# --- workloads ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workload:
    """A typical request in tokens, and how many run at once. The prefix cache has `cached` of its prompt."""

    name: str
    prompt: int
    cached: int
    answer: int
    at_once: int = 1

    @property
    def computed(self) -> int:
        return max(1, self.prompt - self.cached)

    @property
    def context(self) -> float:
        """Average number of tokens before a token of the answer."""
        return self.prompt + self.answer / 2

    def __str__(self) -> str:
        cached = f" ({self.cached:,} cached)" if self.cached else ""
        at_once = f", {self.at_once} at once" if self.at_once > 1 else ""
        return f"{self.prompt:,} tokens in{cached}, {self.answer:,} out{at_once}"


CHAT = Workload("chat", 4_000, 0, 400)
AGENT = Workload("agent", 30_000, 27_000, 300)
BATCH = Workload("batch", 1_000, 0, 250, 16)
WORKLOADS: Mapping[str, Workload] = {each.name: each for each in (CHAT, AGENT, BATCH)}


# --- speed ----------------------------------------------------------------------------------------------

#: Seconds of a GPU kernel in addition to its reading: fitted, with the two efficiencies of `tables`, to
#: published single-Mac speeds. In a chain of empty kernels, each took 2.8 us.
KERNEL_S = 4.5e-6
FENCE_S = 165e-6  #: GPU and CPU wait for each other at a collective: 150 to 180 us (ml-explore/mlx #4438).
FAST_FENCE_S = 10e-6  #: The same with MLX_METAL_FAST_SYNCH=1: 4 to 16 us.
PROMPT = 1000  #: Tokens of the prompt before the estimated decode speed.
LONG_PROMPT = 10_000  #: Tokens of the prompt before the estimated first token.
#: Share of a GPU's arithmetic that long prompts reach on dense models: 91 tokens/s for 123 B weights on an M3
#: Ultra (ml-explore/mlx #3094) is 79 % of its 28 TFLOPS.
PREFILL_EFFICIENCY = 0.75
EXPERT_EFFICIENCY = 0.55  #: The same with experts: 16 TFLOPS on an M3 Ultra, 11 on an M4 Max.
#: Share of a step's reading that each further token of a row adds: kernels for a few rows are slower than for
#: one. Fitted to one figure: 15.3 to 23.3 tokens/s on an M4 Pro (ml-explore/mlx-lm #990).
WIDER = 0.12
DRAFTS = 3  #: Most tokens that an MTP head proposes in a step.
_ACTIVATION_BYTES = 2
_MOST_TCP = 3e9  #: Bytes/s of one TCP connection on the fastest link; an assumption.


@dataclass(frozen=True, slots=True)
class Fabric:
    """Costs of an exchange between ranks: seconds of a message to a neighbor, and bytes/s of one link. A sum
    takes 2 (N - 1) steps in a `circle`, otherwise two steps between all pairs.
    """

    step_s: float
    bandwidth: float
    circle: bool

    def latency_s(self, ranks: int) -> float:
        """Return the seconds of a sum of a few kilobytes."""
        return self.step_s * (2 * (ranks - 1) if self.circle else 2)


def sum_share(ranks: int) -> float:
    """Return how often each byte of a sum over `ranks` ranks crosses each link."""
    return 2 * (ranks - 1) / ranks


JACCL_MESH = "JACCL mesh"
JACCL_RING = "JACCL ring"
JACCL = (JACCL_MESH, JACCL_RING)
RING_THUNDERBOLT = "ring over Thunderbolt"
RING_ETHERNET = "ring over Ethernet"
RING_WIFI = "ring over Wi-Fi"
RING_LOOPBACK = "ring within one machine"
ALONE = "one node alone"

FABRICS: Mapping[str, Fabric] = {
    # 25 us for 4 KB over RDMA (ml-explore/mlx #2808), large sums at 8 to 12 GB/s.
    JACCL_MESH: Fabric(12.5e-6, 8e9, circle=False),
    JACCL_RING: Fabric(12.5e-6, 8e9, circle=True),
    # "About ten times" JACCL's latency for four ranks (six steps); TCP over a Thunderbolt cable.
    RING_THUNDERBOLT: Fabric(42e-6, _MOST_TCP, circle=True),
    # 56 instead of 31 ms a token in one report on both (Blaizzy/mlx-vlm #730); 10 Gb/s unless known.
    RING_ETHERNET: Fabric(105e-6, 1.1e9, circle=True),
    # An assumption for a good network.
    RING_WIFI: Fabric(2e-3, 5e7, circle=True),
    # Measured on Linux with a core for each rank.
    RING_LOOPBACK: Fabric(42e-6, 2e9, circle=True),
}


@dataclass(frozen=True, slots=True)
class Collective:
    """A measured sum of a few kilobytes over the ranks on `nodes`: it overrides assumptions. `kind` is a key
    of FABRICS. `fenced`: `seconds` has a fence in it. `bandwidth`: bytes/s of a link in large sums, or 0.
    """

    kind: str
    seconds: float
    nodes: frozenset[str]
    fenced: bool = False
    bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class RankHardware:
    """Hardware of a rank. `metal`: it has a GPU, which waits for the CPU at each collective."""

    node_id: str
    chip: Chip
    metal: bool = True


def hardware_of(member: MemberMachine) -> RankHardware:
    machine = member.machine
    return RankHardware(member.node_id, chip(machine.chip, machine.gpu_cores), machine.system == "macos")


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of one stage of a model, in seconds. A tensor-parallel group is one stage."""

    reading_s: float  #: To read the weights that one token meets, and a KV cache of `PROMPT` tokens.
    kernels_s: float  #: To start the kernels of a forward.
    arithmetic_s: float  #: For the products of one token.
    chunk_s: float  #: To read all weights, once a chunk.
    waiting_s: float = 0.0  #: For the collectives of a forward, without their bytes.
    wire_s: float = 0.0  #: For the bytes of one token on the wire.
    kv_s: float = 0.0  #: To read the KV cache of one more token.
    others_s: float = 0.0  #: To read all experts that a token does not meet.
    unmet: float = 0.0  #: The share of these experts, 0 for a dense model.
    attended_s: float = 0.0  #: For the products of a prompt's token with one earlier token.
    attended_window_s: float = 0.0  #: The part of this in layers with at most `window` tokens.
    window: int = 0

    def prompt_s(self, tokens: int, chunk: int, cached: int = 0) -> float:
        """Return the seconds of a prompt's `tokens` after `cached` ones."""
        chunks, earlier = -(-tokens // chunk), cached + tokens / 2
        attended_s = self.attended_s * earlier - self.attended_window_s * max(earlier - self.window, 0)
        computing_s = max(tokens * (self.arithmetic_s + attended_s), chunks * self.chunk_s)
        return computing_s + chunks * self.waiting_s + tokens * self.wire_s

    def step_s(self, rows: float, context: float, width: int = 1) -> float:
        """Return the seconds of a forward over `width` tokens of each row, after `context` tokens."""
        tokens = rows * width
        reading_s = self.reading_s + self.others_s * (1.0 - float(self.unmet ** (tokens - 1)))
        reading_s += self.kv_s * (rows * context - PROMPT)
        reading_s *= 1 + WIDER * (width - 1)
        computing_s = max(reading_s, tokens * self.arithmetic_s)
        return computing_s + self.kernels_s + self.waiting_s + tokens * self.wire_s

    def request_s(self, workload: Workload, stages: int) -> float:
        chunk = chunk_of(USUAL, stages)
        prompts_s = workload.at_once * self.prompt_s(workload.computed, chunk, workload.cached)
        return prompts_s + workload.answer * self.step_s(workload.at_once, workload.context)


@dataclass(frozen=True, slots=True)
class DraftedSpeed:
    """Estimated speed with the best `count` of drafts a step by the model's MTP head. `accepted`: share of
    right first drafts, `published` for the family or assumed.
    """

    tokens_per_second: float
    count: int
    accepted: float
    published: bool = True


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Estimated speed of a group, and the parts of one token's time, all in seconds."""

    tokens_per_second: float
    ttft_s: float  #: To the first token after `LONG_PROMPT` tokens.
    reading_s: float
    kernels_s: float
    fences_s: float
    latency_s: float
    wire_s: float
    stages: tuple[StageCosts, ...]  #: In the order of layers.
    measured: bool = False  #: The time of collectives is measured; its part of fences may still be assumed.
    hop_s: float = 0.0  #: For a transfer to the next stage, plus `row_s` for each token.
    row_s: float = 0.0
    drafts: DraftedSpeed | None = None  #: None without a usable MTP head. Choices ignore it.

    def prompt_s(self, workload: Workload) -> float:
        """Return the seconds to compute the prompts of a workload's simultaneous requests."""
        return self.prompts_s(workload.computed, workload.at_once, workload.cached)

    def prompts_s(self, tokens: int, at_once: int, cached: int = 0) -> float:
        # Chunks follow each other through the stages, at the pace of the slowest stage or a link.
        chunk = chunk_of(USUAL, len(self.stages))
        chunks = -(-tokens // chunk)
        borders = len(self.stages) - 1
        hop_s = self.hop_s + tokens / chunks * self.row_s
        each = [stage.prompt_s(tokens, chunk, cached) / chunks for stage in self.stages]
        slowest_s = max(*each, hop_s) if borders else each[0]
        return sum(each) + borders * hop_s + (chunks * at_once - 1) * slowest_s

    def answer_s(self, workload: Workload) -> float:
        """Return the seconds to decode their answers together, in a lane for each stage."""
        lanes = min(len(self.stages), workload.at_once)
        rows = workload.at_once / lanes
        each = [stage.step_s(rows, workload.context) for stage in self.stages]
        around_s = sum(each) + self.around_s(rows)
        return workload.answer * max(around_s, lanes * max(each))

    def around_s(self, rows: float) -> float:
        """Return the seconds on links while a step passes all stages, and returns to the first."""
        stages = len(self.stages)
        return stages * self.hop_s + (stages - 1) * rows * self.row_s if stages > 1 else 0.0

    def request_seconds(self, workload: Workload) -> float:
        return self.prompt_s(workload) + self.answer_s(workload)


def speed(
    shape: ModelShape,
    ranks: Sequence[RankHardware],
    kind: str,
    *,
    costs: Sequence[StageCosts] = (),
    fast_fences: bool = False,
    measured: Sequence[Collective] = (),
    mbps: int = 0,
) -> SpeedEstimate:
    """Estimate the speed of `ranks`, in rank order, over the fabric `kind` (a key of FABRICS, or ALONE), for
    one greedy request after a prompt of `PROMPT` tokens. `mbps`: of the slowest TCP link, 0 if unknown.
    `costs`: of each rank's stage in a pipeline, where a transfer is one step of the fabric.
    """
    size, whole = len(ranks), stage_costs(shape, *ranks)
    if size == 1:
        return _with_drafts(_estimate((whole,)), shape, ranks)
    fence_s, latency_s, link, known = _link(ranks, kind, fast_fences, measured, mbps)
    row_s = shape.hidden * _ACTIVATION_BYTES / link
    if costs:
        latency_s *= FABRICS[kind].step_s / FABRICS[kind].latency_s(size)
        count, wire_s = size, (size - 1) * row_s
        found = _estimate(tuple(reversed(costs)), hop_s=fence_s + latency_s, row_s=row_s)
    else:
        count, wire_s = shape.collectives, shape.collectives * row_s * sum_share(size)
        found = _estimate((replace(whole, waiting_s=count * (fence_s + latency_s), wire_s=wire_s),))
    found = replace(
        found, fences_s=count * fence_s, latency_s=count * latency_s, wire_s=wire_s, measured=known
    )
    return _with_drafts(found, shape, ranks)


def _with_drafts(found: SpeedEstimate, shape: ModelShape, ranks: Sequence[RankHardware]) -> SpeedEstimate:
    if not shape.model.drafts:
        return found
    accepted = ACCEPTED.get(shape.family, ACCEPTED_UNKNOWN)
    each = [drafted(found, shape, ranks, count, accepted) for count in range(1, DRAFTS + 1)]
    best = max(each, key=lambda one: one.tokens_per_second)
    return replace(found, drafts=replace(best, published=shape.family in ACCEPTED))


def drafted(
    found: SpeedEstimate, shape: ModelShape, ranks: Sequence[RankHardware], count: int, accepted: float
) -> DraftedSpeed:
    """Return the speed with so many drafts a step.

    A step reads weights and the head's layer once for all its tokens. Each draft reads the whole head and a
    share of the output head on each rank that chooses tokens, with one exchange between these ranks.
    """
    assert shape.mtp_head is not None
    chosen = ranks if len(found.stages) == 1 else ranks[:1]
    reading, head = min(rank.chip.reading for rank in chosen), shape.mtp_head
    flops = min(rank.chip.flops for rank in chosen) * PREFILL_EFFICIENCY
    output = shape.output_bytes / len(chosen)
    draft = StageCosts(
        reading_s=(head.token_bytes + output + head.kv_token_bytes * PROMPT) / reading,
        kernels_s=head.kernels * KERNEL_S,
        arithmetic_s=2 * (head.token_weights + shape.model.vocabulary * shape.hidden / len(chosen)) / flops,
        chunk_s=0.0,
        waiting_s=(found.fences_s + found.latency_s) / shape.collectives if len(chosen) > 1 else 0.0,
        others_s=(head.weight_bytes - head.token_bytes) / reading,
        unmet=found.stages[0].unmet,
    )
    width = count + 1
    step_s = sum(stage.step_s(1, PROMPT, width) for stage in found.stages) + found.around_s(width)
    step_s += draft.step_s(1, PROMPT, width) + (count - 1) * draft.step_s(1, PROMPT)
    tokens = 1 + accepted * sum(ACCEPTED_LATER**later for later in range(count))
    return DraftedSpeed(tokens / step_s, count, accepted)


def stage_costs(shape: ModelShape, *ranks: RankHardware) -> StageCosts:
    """Return the costs of layers on these ranks together, without collectives."""
    size, reading = len(ranks), min(rank.chip.reading for rank in ranks)
    efficiency = EXPERT_EFFICIENCY if shape.model.experts else PREFILL_EFFICIENCY
    flops = min(rank.chip.flops for rank in ranks) * efficiency
    unmet = 1 - shape.model.picked / shape.model.experts if shape.model.experts else 0.0
    heads = shape.mtp_head.weight_bytes if shape.mtp_head and shape.mtp_kv_bytes else 0
    own = shape.rank_weights(size) - heads
    met = shape.rank_token_bytes(size)
    return StageCosts(
        reading_s=(met + shape.rank_kv(size, PROMPT)) / reading,
        kernels_s=shape.kernels * KERNEL_S,
        arithmetic_s=2 * shape.token_weights / size / flops,
        chunk_s=own / reading,
        kv_s=(shape.rank_kv(size, shape.window + 1) - shape.rank_kv(size, shape.window)) / reading,
        others_s=(own - met if unmet else 0) / reading,
        unmet=unmet,
        attended_s=2 * shape.attended / size / flops,
        attended_window_s=2 * shape.attended_window / size / flops,
        window=shape.window,
    )


def stages(split: Sequence[int]) -> list[tuple[int, int]]:
    """Return each rank's layers, from first to before last. Rank 0 has the last layers."""
    return [(sum(split[rank + 1 :]), sum(split[rank:])) for rank in range(len(split))]


def _estimate(costs: tuple[StageCosts, ...], hop_s: float = 0.0, row_s: float = 0.0) -> SpeedEstimate:
    reading_s, kernels_s = (sum(getattr(each, name) for each in costs) for name in ("reading_s", "kernels_s"))
    found = SpeedEstimate(0.0, 0.0, reading_s, kernels_s, 0.0, 0.0, 0.0, costs, hop_s=hop_s, row_s=row_s)
    token_s = sum(each.step_s(1, PROMPT) for each in costs) + found.around_s(1)
    return replace(found, tokens_per_second=1 / token_s, ttft_s=found.prompts_s(LONG_PROMPT, 1) + token_s)


def cabled_bandwidth(kind: str) -> float:
    """Return the bytes/s that a cable of this fabric should carry; 0 for networks."""
    return FABRICS[kind].bandwidth if kind in (*JACCL, RING_THUNDERBOLT) else 0.0


def _link(
    ranks: Sequence[RankHardware], kind: str, fast_fences: bool, measured: Sequence[Collective], mbps: int
) -> tuple[float, float, float, bool]:
    """Return fence and latency of a sum, in seconds, bytes/s of a link, and whether they were measured: for
    the same group, or else for all pairs that exchange messages. A pair's sum takes two steps; a circle of N
    takes 2 (N - 1) steps of the slowest pair, with one fence.
    """
    fabric = FABRICS[kind]
    link = min(mbps * 1e6 / 8, _MOST_TCP) if mbps else fabric.bandwidth
    fence_s = (FAST_FENCE_S if fast_fences else FENCE_S) * any(rank.metal for rank in ranks)
    known = {each.nodes: each for each in measured if each.kind == kind}
    nodes, times = [rank.node_id for rank in ranks], 1
    talking = [frozenset(nodes)]
    if talking[0] not in known:
        pairs = pairwise([*nodes, nodes[0]]) if fabric.circle else combinations(nodes, 2)
        talking, times = list(map(frozenset, pairs)), len(nodes) - 1 if fabric.circle else 1
    if not all(pair in known for pair in talking):
        return fence_s, fabric.latency_s(len(ranks)), link, False
    sums = [known[pair] for pair in talking]
    fences = [min(fence_s, each.seconds) if each.fenced else fence_s for each in sums]
    latencies = [each.seconds - each.fenced * fence for each, fence in zip(sums, fences, strict=True)]
    bandwidth = min(each.bandwidth for each in sums) or link
    return max(fences), times * max(latencies), bandwidth, True


# --- memory: the room for a rank's share of a model on a machine -----------------------------------------

HEADROOM_BYTES = 512 * 1024**2  #: For Python, MLX and the arrays of one chunk.
HEADROOM_SHARE = 0.07  #: Further share of a rank's weights at the peak of loading.
_GIB = 1024**3
#: Bytes of memory, and bytes that Metal recommends for the GPU: several owners' reports.
_GPU_BYTES = (
    (36 * _GIB, 27 * _GIB),
    (48 * _GIB, 38_338 << 20),
    (64 * _GIB, 53_084 << 20),
    (128 * _GIB, 215 * _GIB // 2),
    (256 * _GIB, 212_992 << 20),
)
_FOR_MACOS_BYTES = 48 * _GIB  #: Metal's reserve for macOS on Macs of 256 and 512 GiB, by the same reports.


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's memory, in bytes; the machine's `total`, and its `stranded` bytes until it restarts."""

    node_id: str
    name: str
    weights: int
    kv: int
    headroom: int
    available: int
    total: int
    stranded: int = 0

    @property
    def needed(self) -> int:
        return self.weights + self.kv + self.headroom

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def rank_memory(
    member: MemberMachine, shape: ModelShape, ranks: int, context: int, *, sharing: int = 1
) -> RankMemory:
    """Return the memory of one of `ranks` ranks on a machine with `sharing` ranks."""
    total, stranded = member.machine.memory_bytes, member.machine.stranded_bytes
    needs, available = rank_needs(shape, ranks, context), usable_bytes(member) // sharing
    return RankMemory(member.node_id, member.name, *needs, available, total, stranded)


def rank_needs(shape: ModelShape, ranks: int, context: int) -> tuple[int, int, int]:
    """Return the bytes of weights, of KV caches of `context` tokens, and of headroom."""
    weights = shape.rank_weights(ranks)
    return weights, shape.rank_kv(ranks, context), HEADROOM_BYTES + int(HEADROOM_SHARE * weights)


def usable_bytes(member: MemberMachine) -> int:
    """Return the bytes that ranks may use on a Mac: free bytes, up to the GPU's limit less stranded bytes.
    Its present ranks' memory counts as free: they end before others begin.
    """
    machine = member.machine
    default = default_gpu_bytes(machine.memory_bytes) if machine.system == "macos" else machine.memory_bytes
    free = machine.free_bytes + member.held_bytes if machine.free_bytes else machine.memory_bytes
    limit = (machine.gpu_bytes or default) - machine.stranded_bytes
    return max(0, min(limit, free) - member.taken_bytes)


def default_gpu_bytes(memory_bytes: int) -> int:
    """Return the bytes that macOS lets a GPU wire by default, until MLX on that Mac reports its figure."""
    if memory_bytes < _GPU_BYTES[0][0]:
        return memory_bytes * 2 // 3
    for (less, low), (more, high) in pairwise(_GPU_BYTES):
        if memory_bytes < more:
            return low + (memory_bytes - less) * (high - low) // (more - less)
    return memory_bytes - _FOR_MACOS_BYTES
