"""Figures of a rank, each defined once here with its metric. Heartbeats carry them, and reports show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from typing import Any, Literal

from .codecs import U32, U63, FieldCodec, boolean, integer, integers, number

MAX_PLACES = 64  #: of a draft with counts
Caches = Literal["", "sum", "first", "Macs"]


@dataclass(frozen=True, slots=True)
class Figure:
    """Description of a figure. Metrics show microseconds in seconds."""

    metric: str = ""  #: name of the metric for each rank; empty: none
    says: str = ""  #: its meaning in words, which is the metric's help
    counts: bool = False  #: it only grows in an epoch
    #: For figures of KV caches, how to combine the ranks of a group: their "sum"; the "first", because all
    #: have the same; or a sum over "Macs", because ranks of a Mac share its disk.
    caches: Caches = ""


def _figure(metric: str = "", says: str = "", caches: Caches = "", *, counts: bool = False) -> Any:
    return _told(integer(0, U63), 0, Figure(metric and f"mlxtp_rank_{metric}", says, counts, caches))


_counter = partial(_figure, counts=True)


def _told(codec: FieldCodec, default: Any, figure: Figure) -> Any:
    return field(default=default, metadata={"codec": codec, "figure": figure})


@dataclass(slots=True)
class RankStats:
    """Figures of a rank. Only rank 0 counts drafts: by lookup, by the MTP head and by a draft model."""

    forwards: int = _counter("forwards", "Forwards of a rank in this epoch.")
    collectives: int = _figure(says="Collectives of a rank in this epoch.")
    emitted: int = _figure(says="Tokens that rank 0 sent in this epoch.")
    memory_bytes: int = _figure(
        "memory_bytes", "Memory that MLX holds on a rank, with what it keeps for reuse."
    )
    pool_bytes: int = _figure(says="Part of this memory that MLX keeps for reuse; arrays have the rest.")
    peak_memory_bytes: int = _figure(
        "peak_memory_bytes", "The most memory that MLX held on a rank in this epoch."
    )
    weight_bytes: int = _figure("weight_bytes", "Weights on a rank.")
    load_peak_bytes: int = _figure(says="The most memory while loading.")
    kv_bytes: int = _figure(
        "kv_cache_bytes",
        "KV caches on a rank when a sequence last ended, including those kept for later prompts.",
    )
    kept_bytes: int = _figure(
        "kept_cache_bytes", "Part of these KV caches that is kept for later prompts.", "sum"
    )
    evicted_bytes: int = _counter(
        "evicted_cache_bytes",
        "KV caches that a rank kept and dropped in this epoch: for lack of room, for a longer one, cleared.",
        "sum",
    )
    reused: int = _counter(
        "reused_caches", "Prompts that a rank began with another sequence's KV cache in this epoch.", "first"
    )
    reused_tokens: int = _counter(
        "reused_tokens", "Tokens of these prompts that were not computed again.", "first"
    )
    fetched: int = _counter(
        "fetched_caches", "Part of these prompts whose KV caches came from disk.", "first"
    )
    fetched_tokens: int = _counter(
        "fetched_tokens", "Part of these tokens whose KV caches came from disk.", "first"
    )
    graphs: int = _figure("traced_graphs", "Graphs of decode steps that a rank keeps to replay.")
    spilled_bytes: int = _counter(
        "spilled_cache_bytes", "KV caches that a rank wrote to disk in this epoch.", "sum"
    )
    disk_bytes: int = _figure(
        "disk_cache_bytes", "KV caches on the disk of a rank's Mac, of all its ranks and models.", "Macs"
    )
    disk_room_bytes: int = _figure(
        "disk_cache_room_bytes", "Room for these on that disk; 0 when none are kept there.", "Macs"
    )
    step_us: int = _figure("step_seconds", "Duration of a forward, on average over the last ten.")
    wait_us: int = _figure(
        "wait_seconds",
        "Part of a forward that MLX spent queuing and waiting for the device, on average over the last ten.",
    )
    collective_us: int = _figure(
        "collective_seconds",
        "Duration of one small collective at the last proof, including links between ranks.",
    )
    stage_busy_us: int = _counter(
        "stage_busy_seconds", "Time that a rank of a pipeline spent computing its layers."
    )
    stage_waiting_us: int = _counter(
        "stage_waiting_seconds",
        "Time that a rank of a pipeline waited for other stages while sequences ran.",
    )
    drafted: tuple[int, ...] = _told(integers(0, U32, 0, 8), (), Figure(says="Drafted tokens by proposer."))
    accepted: tuple[int, ...] = _told(integers(0, U32, 0, 8), (), Figure(says="Accepted tokens by proposer."))
    right_at: tuple[int, ...] = _told(
        integers(0, U32, 0, MAX_PLACES), (), Figure(says="Accepted tokens by place in a draft.")
    )
    decode_steps: int = _figure(says="Steps that decoded tokens.")
    decode_widths: int = _figure(says="Tokens that these steps fed their widest row.")
    draft_gain: float = _told(number(0.0, 1e9), 0.0, Figure(says="Speed of recent steps, in plain ones."))
    mtp: bool = _told(boolean(), False, Figure(says="The model's MTP head is loaded."))


@cache
def figures() -> Mapping[str, Figure]:
    return {each.name: each.metadata["figure"] for each in fields(RankStats)}


def shown(stats: RankStats) -> dict[str, Any]:
    return {name: list(value) if type(value) is tuple else value for name, value in asdict(stats).items()}


def of_group(stats: Iterable[RankStats], of_macs: Iterable[RankStats]) -> dict[str, int]:
    """Return the figures of a group's KV caches. `of_macs` has one rank of each Mac."""
    every = list(stats)
    among = {"sum": every, "first": every[:1], "Macs": list(of_macs)}
    return {
        name: sum(getattr(each, name) for each in among[figure.caches])
        for name, figure in figures().items()
        if figure.caches
    }
