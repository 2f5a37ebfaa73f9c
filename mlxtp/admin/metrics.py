"""`GET /metrics`: this agent's metrics, in Prometheus' text format.

`api/request_metrics.py` and `groups/history.py` count; the rest is rendered from a snapshot at each request.
A metric without a source here, such as a rank of another Mac's group, has no samples. `docs/operations.md`
has the rules for reading them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.types import ASGIApp

from ..api.access_log import AccessLog, metrics_route
from ..api.api_keys import KeyRing
from ..api.backend import Health
from ..api.request_metrics import RequestMetrics
from ..cluster.introduction import versions_here
from ..groups.health import ServingState
from ..wire.messages import Pong
from ..wire.rank_stats import RankStats, figures
from .parts import PROPOSERS, AgentParts, DeploymentSnapshot, GroupSnapshot, deployments_of
from .snapshot import AgentSnapshot, gather_agent


def _metric(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    says: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    family = kind(name, says, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


_gauge, _counter = partial(_metric, GaugeMetricFamily), partial(_metric, CounterMetricFamily)


def observed(app: Starlette, parts: AgentParts, keys: KeyRing | None = None) -> ASGIApp:
    """Add `GET /metrics` to `app`, and count its requests and the gateway's."""
    counted = RequestMetrics(time.perf_counter)
    parts.gateway.deployments.meter = counted
    app.router.routes.insert(0, metrics_route(Metrics(parts, counted, keys).collect))
    return AccessLog(app, counted, lambda: parts.groups.shown.supervisor.status.epoch)


class Metrics:
    """All metrics of one agent, separate from other agents in the same process."""

    def __init__(self, parts: AgentParts, counted: RequestMetrics, keys: KeyRing | None = None) -> None:
        self._gateway = parts.gateway
        self._counted = counted
        process = ProcessCollector(registry=None) if sys.platform == "linux" else OwnProcess()
        recoveries = parts.groups.recoveries
        for each in (_Agent(parts), _Keys(keys), recoveries.ended, recoveries.seconds, process):
            counted.registry.register(each)

    def collect(self) -> tuple[bytes, str]:
        for each in self._gateway.deployments.ready():
            if each.model is not None:
                for group in each.groups:
                    self._counted.group(each.model.id, group)  # so that counters exist before a request
        return generate_latest(self._counted.registry), CONTENT_TYPE_PLAIN_0_0_4


class _Agent(Collector):
    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        parts = self._parts
        return rendered(gather_agent(parts), deployments_of(parts, parts.groups.reports()))


class _Keys(Collector):
    def __init__(self, keys: KeyRing | None) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        rows = self._keys.reports() if self._keys is not None else []
        for family, name, says, field in _OF_A_KEY:
            yield family(name, says, ("key",), [((row["name"],), row[field]) for row in rows])


def rendered(now: AgentSnapshot, deployments: Sequence[DeploymentSnapshot] = ()) -> Iterator[Metric]:
    says = "Always 1; the labels have the versions of mlxtp and its libraries."
    versions = tuple(each.partition("=")[2] for each in versions_here())
    yield _gauge("mlxtp_build_info", says, ("version", "mlx", "mlx_lm"), [(versions, 1)])
    yield from _requests(now)
    yield from _group(now.health)
    yield from _ranks(now.pongs)
    yield from _deployed(deployments)


def _deployed(deployments: Sequence[DeploymentSnapshot]) -> Iterator[Metric]:
    for name, says, count in _OF_A_DEPLOYMENT:
        yield _gauge(name, says, ("deployment",), [((each.row.name,), count(each)) for each in deployments])
    groups = [((each.row.name, group.id), group) for each in deployments for group in each.groups]
    says, by_group = "1 for the state that a group is in, 0 for all others.", ("deployment", "group")
    states = [(labels, state, group) for labels, group in groups for state in ServingState]
    found = [((*labels, str(state)), float(group.state == state)) for labels, state, group in states]
    yield _gauge("mlxtp_group_state", says, (*by_group, "state"), found)
    for name, says, read in _OF_A_GROUP:
        known = [(labels, value) for labels, group in groups if (value := read(group)) is not None]
        yield _gauge(name, says, by_group, known)


def _requests(now: AgentSnapshot) -> Iterator[Metric]:
    rows = [each for each in now.requests if each.model or each.running or each.waiting]
    room, by_model = now.kv_room, ("model_name",)
    first = [each for each in rows if each.model][:1] if room else []
    says = "Open requests of clients of this agent that have their first token."
    running, waiting = ([((x.model,), getattr(x, of)) for x in rows] for of in ("running", "waiting"))
    yield _gauge("vllm:num_requests_running", says, by_model, running)
    says = "Open requests without a first token: queued, in prefill, or between two groups."
    yield _gauge("vllm:num_requests_waiting", says, by_model, waiting)
    says = (
        "Tokens of all running requests as a fraction of the KV caches' room, from 0 to 1. Only where "
        "rank 0 is. Tokens cached for later prompts do not count, since they make room."
    )
    held = [((each.model,), min(each.held / room, 1.0)) for each in first]
    yield _gauge("vllm:kv_cache_usage_perc", says, by_model, held)
    says = "Tokens that fit into the KV caches. Only where rank 0 is."
    yield _gauge("mlxtp_kv_cache_room_tokens", says, by_model, [((each.model,), room) for each in first])
    says = "Open requests at this agent, including those that other agents forwarded."
    yield _gauge("mlxtp_open_requests", says, (), [((), now.health.open_requests)])


def _group(health: Health) -> Iterator[Metric]:
    yield _gauge("mlxtp_epoch", "Number of the current epoch, or of the last one.", (), [((), health.epoch)])
    says = "1 for the state that this agent is in, 0 for all others."
    states = [((str(state),), float(health.state == state)) for state in ServingState]
    yield _gauge("mlxtp_state", says, ("state",), states)
    says = "1 while this agent answers requests, else 0."
    yield _gauge("mlxtp_ready", says, (), [((), float(health.ready))])
    says = "Ranks of the current group, including those that are still starting."
    yield _gauge("mlxtp_world_size", says, (), [((), health.world_size)])


def _ranks(found: Mapping[int, Pong] | None) -> Iterator[Metric]:
    pongs = found or {}
    says = "Ranks whose heartbeats this agent receives; all of them where rank 0 is."
    yield _gauge("mlxtp_ranks_alive", says, (), [((), len(pongs))] if found is not None else ())
    for name, figure in figures().items():
        if figure.metric:
            unit = 1e6 if name.endswith("_us") else 1
            rows = [((str(rank),), getattr(pong.stats, name) / unit) for rank, pong in pongs.items()]
            yield (_counter if figure.counts else _gauge)(figure.metric, figure.says, ("rank",), rows)
    yield from _drafts([pong.stats for rank, pong in pongs.items() if rank == 0])


def _drafts(of_rank_0: Sequence[RankStats]) -> Iterator[Metric]:
    for name, says, of in _OF_PROPOSERS:
        rows = [each for stats in of_rank_0 for each in zip(_PROPOSERS, of(stats), strict=False)]
        yield _counter(name, says, ("proposer",), rows)
    says = "Proposed tokens that were right, by their place in the draft, from 0."
    places = [((str(place),), count) for stats in of_rank_0 for place, count in enumerate(stats.right_at)]
    yield _counter("vllm:spec_decode_num_accepted_tokens_per_pos", says, ("position",), places)
    steps = [((), stats.decode_steps) for stats in of_rank_0]
    yield _counter("mlxtp_decode_steps", "Steps that decoded tokens.", (), steps)
    says, widths = "Tokens that these steps fed their widest row.", [((), s.decode_widths) for s in of_rank_0]
    yield _counter("mlxtp_decode_step_tokens", says, (), widths)
    says = "Speed of recent steps, in that of steps without drafts as they were measured."
    gains = [((), stats.draft_gain) for stats in of_rank_0 if stats.draft_gain]
    yield _gauge("mlxtp_draft_gain", says, (), gains)


_PROPOSERS = tuple((proposer,) for proposer in PROPOSERS)
_OF_PROPOSERS: tuple[tuple[str, str, Callable[[RankStats], Sequence[int]]], ...] = (
    ("mlxtp_drafted_tokens",
        "Tokens that a lookup, the model's MTP head or a draft model proposed. Only where rank 0 is.",
        lambda stats: stats.drafted),
    ("mlxtp_accepted_drafts", "Proposed tokens that were right.", lambda stats: stats.accepted),
)  # fmt: skip
_OF_A_DEPLOYMENT: tuple[tuple[str, str, Callable[[DeploymentSnapshot], int]], ...] = (
    ("mlxtp_replicas_ready", "Groups of a deployment that answer requests, on any Mac.", lambda x: x.ready),
    ("mlxtp_replicas_wanted", "Groups that a deployment must have; 0 for as many as fit.",
        lambda x: x.row.replicas),
)  # fmt: skip

#: Metrics of each API key: kind, name, help, field of its report.
_OF_A_KEY = (
    (_counter, "mlxtp_key_requests", "Requests of an API key since it was made.", "requests"),
    (_counter, "mlxtp_key_refused", "Requests of an API key that its rights or limits refused.", "refused"),
    (_counter, "mlxtp_key_prompt_tokens", "Tokens of an API key's prompts.", "prompt_tokens"),
    (_counter, "mlxtp_key_generation_tokens", "Tokens generated for an API key.", "generated_tokens"),
    (_gauge, "mlxtp_key_tokens_today", "Tokens of an API key since midnight.", "tokens_today"),
    (_gauge, "mlxtp_key_open_requests", "Open requests of an API key.", "open"),
)

#: Metrics of each group from its owner's report: name, help, reader; None if unknown.
_OF_A_GROUP: tuple[tuple[str, str, Callable[[GroupSnapshot], float | None]], ...] = (
    ("mlxtp_group_ready", "1 while a group answers requests.", lambda x: x.state == ServingState.READY),
    ("mlxtp_group_epoch", "Number of a group's epoch, or of its last one.", lambda x: x.epoch),
    ("mlxtp_group_world_size", "Macs that run a group now.", lambda x: len(x.members)),
    ("mlxtp_group_requests", "Open requests at a group.", lambda x: x.requests),
    ("mlxtp_group_tokens_per_second", "Speed of a group over the last seconds.", lambda x: x.speed),
    ("mlxtp_group_cached_tokens", "Tokens that a group keeps for later prompts.", lambda x: x.cached),
    ("mlxtp_group_kv_cache_room_tokens",
        "Tokens that fit into a group's KV caches. Only where rank 0 is.", lambda x: x.room or None),
)  # fmt: skip


class OwnProcess(Collector):
    """Process metrics that prometheus-client has on Linux, for systems without /proc."""

    def collect(self) -> Iterator[Metric]:
        import resource

        import psutil

        process = psutil.Process()
        memory, times, born = process.memory_info(), process.cpu_times(), process.create_time()
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        for family, name, says, value in (
            (_gauge, "virtual_memory_bytes", "Virtual memory in bytes.", memory.vms),
            (_gauge, "resident_memory_bytes", "Resident memory in bytes.", memory.rss),
            (_gauge, "start_time_seconds", "Time of its start, in seconds since 1970.", born),
            (_counter, "cpu_seconds", "User and system CPU time in seconds.", times.user + times.system),
            (_gauge, "open_fds", "Open file descriptors.", process.num_fds()),
            (_gauge, "max_fds", "Maximum number of open file descriptors.", most),
        ):
            yield family(f"process_{name}", says, (), [((), value)])
