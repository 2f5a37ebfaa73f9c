"""`mlxtp plan`: the needs of models, the machines that can serve one or several, and the speed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from ..cluster.place import PlaceView, WantedDeployment, place, without_rdma
from ..config import EMBEDDED_MODEL, embedded_model_path, expanded
from ..errors import Code, ConfigError, ModelError, UserError
from ..model_files import INDEX, MAX_INDEX_BYTES, MTP_FILE, has_mtp_head, table, weight_sizes
from ..models.hub_cache import lacks
from ..models.inspect import described, read_config
from ..placement.candidates import Candidate
from ..placement.cost_model import LONG_PROMPT, DraftedSpeed, SpeedEstimate, Workload, usable_bytes
from ..placement.machines_file import read_machines
from ..placement.model_shape import DescribedModel, ModelShape, words_of
from ..placement.planner import Placement, PlacementOptions, plan
from ..placement.topology import MemberMachine
from ..values import stage_words
from ..wire.cluster_messages import Deployment
from .printing import Console, print_json, table_of

GB = 1e9
_COLUMNS = ("way", "nodes", "request", "first token", "tokens/s", "GB a rank", "verdict", "why")
_RIGHT = ("request", "first token", "tokens/s", "GB a rank")
_WORDY = ("nodes", "why")
#: Characters of a line with room for the wordy columns too.
_WIDE = 130
_COLOURS = {"chosen": "bold green", "possible": "default", "refused": "dim"}


def run(
    model: str | Path,
    members: Sequence[MemberMachine],
    *,
    name: str = "",
    coordinator: str = "",
    options: PlacementOptions | None = None,
    as_json: bool = False,
    console: Console | None = None,
    now: Callable[[DescribedModel], Mapping[str, Any]] | None = None,
) -> Placement:
    """Plan `model` on `members` and print it. `now` returns the reply to PlanNow. Raises ModelError."""
    described = read_model(model)
    shape = described.shape(name or _path_of(model).name, 0)
    made = _plan(str(model), members, shape, coordinator, options or PlacementOptions())
    placed = now(described) if now is not None else None
    if as_json:
        print_json(to_json(made, shape) | ({"now": placed} if placed is not None else {}))
        return made
    console = console or _console()
    show(made, shape, console)
    if placed is not None:
        console.print(escape(_now_line(placed)))
    return made


def _now_line(placed: Mapping[str, Any]) -> str:
    macs, gone = placed["macs"], placed["gives_way"]
    where = f"on {' + '.join(macs)}" if macs else f"nowhere: {placed['why']}"
    if placed["split"]:
        where += f", {stage_words(placed['split'])}"
    gives_way = f". {' and '.join(gone)} would give way" if gone else ""
    return f"served now, beside what runs: {where}{gives_way}"


def _console() -> Console:
    """Return a console for standard output that wraps lines in a terminal only."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def _plan(
    model: str,
    members: Sequence[MemberMachine],
    shape: ModelShape,
    coordinator: str,
    options: PlacementOptions,
) -> Placement:
    served = as_served(model, options)
    made = plan(members, shape, coordinator, served)
    if served == options or len(made.ranks) < 2:
        return made
    why = (
        "the embedded model demonstrates that the Macs work together, so it runs on as many as can divide "
        "each layer, even where one alone is faster"
    )
    return replace(made, notes=(why, *made.notes))


def expected(
    model: str | Path, members: Sequence[MemberMachine], coordinator: str, options: PlacementOptions
) -> float:
    """Return the tokens/s that a plan expects of one answer; 0 if it expects none."""
    chosen = _plan(str(model), members, read_shape(model), coordinator, options).chosen
    return chosen.speed.tokens_per_second if chosen is not None and chosen.speed is not None else 0.0


def hostfile(one: Candidate, addresses: Mapping[str, str], *, fast_fences: bool) -> dict[str, Any]:
    """Return the hostfile of `mlx.launch` for a candidate's Macs, in rank order.

    `addresses`: of members, by node id. Fields: `Hostfile` in MLX's `_distributed_utils/common.py`.
    """
    ring = one.ring_addresses or tuple(addresses.get(node, "") for node in one.ranks)
    hosts = [
        {
            "ssh": addresses.get(node) or address or name,
            "ips": [address] if address else [],
            "rdma": list(one.rdma[rank]) if one.rdma else [],
        }
        for rank, (node, name, address) in enumerate(zip(one.ranks, one.names, ring, strict=True))
    ]
    backend = "jaccl-ring" if one.jaccl_ring else one.backend
    return {"backend": backend, "envs": ["MLX_METAL_FAST_SYNCH=1"] * fast_fences, "hosts": hosts}


def over_all(members: Sequence[MemberMachine], coordinator: str, options: PlacementOptions) -> Candidate:
    """Return the best candidate with all Macs. Raises UserError with the reasons if there is none."""
    refused: dict[str, None] = {}
    shape = read_shape(EMBEDDED_MODEL)
    for parallel in ("tensor", "pipeline"):
        made = plan(members, shape, coordinator, replace(options, nodes="all", parallel=parallel))
        chosen = made.chosen
        if chosen is not None and len(chosen.ranks) == len(members) > 1:
            return chosen
        refused |= dict.fromkeys(each.reason for each in made.alternatives if each.verdict == "refused")
    raise UserError(f"these Macs cannot work together: {'; '.join(filter(None, refused)) or made.reason}")


def as_served(model: str, options: PlacementOptions) -> PlacementOptions:
    """Spread the embedded model over all Macs, as clusters do, unless the user chose a number or a way."""
    demonstrates = model == EMBEDDED_MODEL and options.nodes == "auto" and options.parallel == "auto"
    return replace(options, nodes="all", parallel="tensor") if demonstrates else options


def read_shape(model: str | Path, name: str = "") -> ModelShape:
    return read_model(model).shape(name or _path_of(model).name, 0)


def _path_of(model: str | Path) -> Path:
    return embedded_model_path() if model == EMBEDDED_MODEL else expanded(str(model), "MODEL")


def read_model(model: str | Path) -> DescribedModel:
    """Describe a model folder, a config.json, or the embedded model. Raises ModelError."""
    path = _path_of(model)
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        raise ModelError(
            f"{model} is neither a model folder, nor a config.json, nor an id on the Hub (OWNER/NAME)",
            Code.MODEL_NOT_FOUND,
        )
    found = read_config(path) if path.is_dir() else _read_object(config)
    mtp = path.is_dir() and _has_head(path, found)
    return DescribedModel(described(path, found), _weight_bytes(path), mtp)


def read_machines_file(path: Path) -> tuple[MemberMachine, ...]:
    """Return the machines that a file describes. Raises ConfigError with the problem and its place."""
    try:
        return read_machines(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--machines: {path} cannot be read: {why}. It is a TOML file of Macs, such as "
            "examples/desk.toml; docs/placement.md explains it"
        ) from None


def _request(workload: Workload) -> str:
    return f"request: {workload.name}, {workload}; first token: after {LONG_PROMPT:,} in"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return table(path, MAX_INDEX_BYTES)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", Code.MODEL_INVALID) from None


def _has_head(path: Path, config: Mapping[str, Any]) -> bool:
    """Return True if the weights have an MTP head. If they are complete, the code of ranks checks it."""
    try:
        named = has_mtp_head(path, config)
    except (OSError, ValueError, LookupError, AttributeError):
        return False
    if not named or path == embedded_model_path() or lacks(path):
        return named
    check = [sys.executable, "-m", "mlxtp.engine.mtp_head", str(path)]
    return subprocess.run(check, stdout=subprocess.DEVNULL, check=False).returncode == 0


def _weight_bytes(path: Path) -> int:
    """Return the bytes of a folder's weights, from the index if there is one; 0 if it is no folder."""
    if not path.is_dir():
        return 0
    beside = sum(file.stat().st_size for file in path.glob(MTP_FILE))
    if (path / INDEX).is_file():
        metadata = _read_object(path / INDEX).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int) and total > 0:
            return total + beside
    return sum(weight_sizes(path).values())


def to_json(made: Placement, shape: ModelShape) -> dict[str, Any]:
    """Return the plan as JSON. Sizes are bytes, times seconds, speeds tokens a second."""
    alternatives = [_way(one, made.workload) for one in made.alternatives]
    told: dict[str, Any] = {name: getattr(shape, name) for name in _TOLD}
    told |= {"experts": shape.model.experts, "experts_per_token": shape.model.picked}
    return {
        "model": told | {"caches": asdict(words_of(shape.model.caches))},
        "context": made.context,
        "workload": asdict(made.workload),
        "reason": made.reason,
        "leader": (*made.ranks, "")[0],
        "notes": list(made.notes),
        "chosen": next((one for one in alternatives if one["verdict"] == "chosen"), None),
        "alternatives": alternatives,
    }


_TOLD = (
    "name", "family", "layers", "hidden", "max_context", "weight_bytes", "whole_bytes", "token_bytes",
    "token_whole_bytes", "token_weights", "kv_token_bytes", "kv_window_bytes", "kv_heads", "window",
    "kernels", "collectives", "mtp_kv_bytes", "output_bytes",
)  # fmt: skip


def _way(one: Candidate, workload: Workload) -> dict[str, Any]:
    request_s = one.speed.request_seconds(workload) if one.speed else None
    return {"title": one.title, **asdict(one), "request_s": request_s}


def show(made: Placement, shape: ModelShape, console: Console) -> None:
    """Print the plan. Reasons appear in their rows, or below the table if lines are short."""
    console.print(escape(_model_line(made, shape)))
    wide = console.width >= _WIDE
    columns = [column for column in _COLUMNS if wide or column not in _WORDY]
    table = table_of(*columns, right=_RIGHT, wrapped=_WORDY if wide else ("way",))
    shown = _shown(made.alternatives)
    for one in shown:
        row = dict(zip(_COLUMNS, cells(one, made.workload), strict=True))
        table.add_row(*(escape(row[column]) for column in columns), style=_COLOURS[one.verdict])
    console.print(table)
    console.print(_request(made.workload), style="dim")
    if not wide:
        reasons: dict[tuple[str, str], list[str]] = {}
        for one in shown:
            reasons.setdefault((one.reason, one.verdict), []).append(one.title)
        for (reason, verdict), titles in reasons.items():
            if reason:
                console.print(escape(f"- {', '.join(titles)}: {reason}"), style=_COLOURS[verdict])
    if made.chosen or not any(one.reason for one in made.alternatives):
        summary = made.reason
        for one in made.alternatives:  # a row has it already
            summary = summary.removesuffix(f". Not {one.title}: {one.reason}")
        console.print(escape(summary), style="bold" if made.chosen else "bold red")
    else:  # the reasons are in the rows
        console.print("These Macs cannot serve it.", style="bold red")
    if made.chosen and made.chosen.speed:
        console.print(escape(_time_line(made.chosen.speed, shape)))
        if made.chosen.speed.drafts:
            console.print(escape(_drafts_line(made.chosen.speed, made.chosen.speed.drafts, shape)))
    caches = words_of(shape.model.caches)
    if caches.off:
        kept = "" if shape.model.caches.truncatable else "; kept whole at chosen places"
        console.print(escape(f"KV caches: {caches.name}{kept}. Off: {caches.off}, because {caches.why}."))
    for note in made.notes:
        console.print(escape(f"Note: {note}"))


def _shown(alternatives: Sequence[Candidate]) -> list[Candidate]:
    """Return all ways but pipelines, and of these the best one for each number of nodes."""
    first = {one.nodes: one for one in reversed(alternatives) if one.is_pipeline}
    return [one for one in alternatives if not one.is_pipeline or one is first[one.nodes]]


def _model_line(made: Placement, shape: ModelShape) -> str:
    model, kv = shape.model, shape.rank_kv(1, made.context)
    met = f", {model.picked} of {model.experts} experts a token" if model.experts else ""
    return (
        f"{shape.name}: {_gb(shape.weight_bytes)} of weights, of which a token reads "
        f"{_gb(shape.token_bytes)}{met}; {_gb(kv)} of KV caches for {made.context:,} tokens"
    )


def _time_line(speed: SpeedEstimate, shape: ModelShape) -> str:
    parts = [
        f"{speed.reading_s * 1e3:.1f} reading memory",
        f"{speed.kernels_s * 1e3:.1f} starting {shape.kernels} kernels",
    ]
    waiting = speed.latency_s + speed.wire_s
    stages = len(speed.stages)
    exchanges = f"{stages} transfers" if stages > 1 else f"{shape.collectives} collectives"
    if speed.measured:
        waiting += speed.fences_s
        parts.append(f"{waiting * 1e3:.1f} in {exchanges}, fences included (measured)")
    elif waiting:
        parts += [
            f"{speed.fences_s * 1e3:.1f} in the fences of {exchanges}",
            f"{waiting * 1e3:.1f} on the links (assumed)",
        ]
    return f"{1e3 / speed.tokens_per_second:.1f} ms a token: {', '.join(parts)}"


def _drafts_line(speed: SpeedEstimate, found: DraftedSpeed, shape: ModelShape) -> str:
    source = "as published" if found.published else "an assumption: nothing is published of this family"
    count = "1 draft" if found.count == 1 else f"{found.count} drafts"
    pays = found.tokens_per_second > speed.tokens_per_second
    told = "With MTP drafts" if pays else "MTP drafts would not pay"
    told += f": {found.tokens_per_second:.1f} tokens/s, {count} a step "
    told += f"(acceptance {found.accepted:.2f}, {source})"
    if shape.mtp_head and not shape.mtp_kv_bytes:
        told += f". Its files need the head for that, {_gb(shape.mtp_head.weight_bytes)} more on a rank"
    return told


def cells(one: Candidate, workload: Workload) -> tuple[str, ...]:
    tightest = min(one.memory, key=lambda rank: rank.available - rank.needed, default=None)
    return (
        one.kind if one.nodes == 1 else one.title,
        one.layers or ", ".join(one.names),
        *times(one, workload),
        f"{tightest.needed / GB:.1f}/{tightest.available / GB:.1f}" if tightest else "",
        one.verdict,
        one.reason,
    )


def times(one: Candidate, workload: Workload) -> tuple[str, str, str]:
    """Return the time of a request, the time to the first token of a long prompt, and the tokens/s."""
    if one.speed is None:
        return "", "", ""
    request_s = one.speed.request_seconds(workload)
    return f"{request_s:.1f} s", f"{one.speed.ttft_s:.1f} s", f"{one.speed.tokens_per_second:.1f}"


def _gb(size: int) -> str:
    return f"{size / GB:.1f} GB" if size >= GB / 10 else f"{size / 1e6:.1f} MB"


# --- several models at once -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packed:
    """One model of a packing."""

    shape: ModelShape
    plan: Placement | None
    why: str = ""  #: reason if it gets no group

    @property
    def ranks(self) -> tuple[str, ...]:
        """Node ids in rank order; () for no group."""
        return self.plan.ranks if self.plan else ()


@dataclass(frozen=True, slots=True)
class MacMemory:
    """Memory of a Mac, in bytes."""

    node_id: str
    name: str
    available: int  #: to ranks
    weights: int
    kv: int
    headroom: int

    @property
    def free(self) -> int:
        return self.available - self.weights - self.kv - self.headroom


def pack(
    members: Sequence[MemberMachine], wanted: Sequence[tuple[ModelShape, PlacementOptions]]
) -> tuple[Packed, ...]:
    """Assign a group to each model, in order, as a cluster without any group would."""
    # Deployments are named by their model's place in the command.
    rows = [WantedDeployment(Deployment(str(i)), options, shape) for i, (shape, options) in enumerate(wanted)]
    taken = {member.node_id: 0 for member in members}
    busy: set[str] = set()  # with a rank of a group over several Macs
    packed = []
    for given in place(PlaceView(members, rows)).assignments:
        shape, options = wanted[int(given.deployment)]
        if not given.owner:
            packed.append(Packed(shape, None, given.why))
            continue
        there = [
            replace(without_rdma(each) if each.node_id in busy else each, taken_bytes=taken[each.node_id])
            for each in members
            if each.node_id in given.ranks
        ]
        way = "pipeline" if given.split else options.parallel
        made = plan(there, shape, given.owner, replace(options, nodes=len(there), parallel=way))
        for rank in made.chosen.memory if made.chosen else ():
            taken[rank.node_id] += rank.needed
        busy.update(made.ranks if len(made.ranks) > 1 else ())
        packed.append(Packed(shape, made, "" if made.chosen else made.reason))
    return tuple(packed)


def memory_of(members: Sequence[MemberMachine], packed: Sequence[Packed]) -> tuple[MacMemory, ...]:
    ranks = [rank for one in packed if one.plan and one.plan.chosen for rank in one.plan.chosen.memory]

    def of(member: MemberMachine) -> MacMemory:
        here = [rank for rank in ranks if rank.node_id == member.node_id]
        sums = (sum(getattr(rank, part) for rank in here) for part in ("weights", "kv", "headroom"))
        return MacMemory(member.node_id, member.name, usable_bytes(member), *sums)

    return tuple(map(of, members))


def run_several(
    models: Sequence[tuple[str, str | Path]],
    members: Sequence[MemberMachine],
    *,
    options: PlacementOptions,
    as_json: bool = False,
) -> tuple[Packed, ...]:
    """Plan and print several models, each a name and a model as in `run`, most important first."""
    wanted = [(read_shape(model, name), as_served(str(model), options)) for name, model in models]
    packed = pack(members, wanted)
    macs = memory_of(members, packed)
    if as_json:
        plans = [to_json(one.plan, one.shape) if one.plan else None for one in packed]
        answer = {
            "workload": asdict(options.workload),
            "models": [
                {"name": one.shape.name, "reason": one.why, "plan": made}
                for one, made in zip(packed, plans, strict=True)
            ],
            "macs": [{**asdict(mac), "free": mac.free} for mac in macs],
        }
        print_json(answer)
    else:
        _show(packed, macs, options.workload)
    return packed


def _show(packed: Sequence[Packed], macs: Sequence[MacMemory], workload: Workload) -> None:
    """Print each model's Macs, the memory of each Mac, and the reasons."""
    console = _console()
    numbers = ("request", "first token", "tokens/s")
    table = table_of("model", "Macs", *numbers, right=numbers, wrapped=("model", "Macs"))
    for one in packed:
        chosen = one.plan.chosen if one.plan else None
        names = ", ".join(chosen.names) if chosen else "none"
        columns = times(chosen, workload) if chosen else ("", "", "")
        table.add_row(escape(one.shape.name), escape(names), *columns)
    console.print(table)
    console.print(f"{_request(workload)}\n", style="dim")
    parts = ("GB for ranks", "weights", "KV caches", "headroom", "free")
    table = table_of("Mac", *parts, right=parts, wrapped=("Mac",))
    for mac in macs:
        sizes = (mac.available, mac.weights, mac.kv, mac.headroom, mac.free)
        table.add_row(escape(mac.name), *(f"{size / GB:.1f}" for size in sizes))
    console.print(table)
    for one in packed:
        if one.why:
            console.print(escape(f"- {one.shape.name}: {one.why}"), style="bold red")
        elif one.plan:
            for line in (one.plan.reason, *one.plan.notes):
                console.print(escape(f"- {one.shape.name}: {line}"))
