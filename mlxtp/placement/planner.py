"""Placement: the nodes that serve a model, their order and their fabric.

The choice finishes a request of the expected workload first; docs/placement.md has the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .candidates import PIPELINE, TENSOR_PARALLEL, Candidate, CandidateFinder, exposed
from .candidates import PlacementOptions as PlacementOptions
from .cost_model import ALONE, JACCL_MESH, Workload
from .model_shape import ModelShape
from .topology import MemberMachine, Topology

DEFAULT_CONTEXT = 8192  #: Tokens of KV cache that a plan makes room for by default.
FASTER_WITHOUT = 1.2  #: Factor of speed that makes a group without the planning Mac worth a note.
_SAID = 4  #: Most reasons in a sentence.


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen nodes. If no group can serve, `chosen` is None."""

    chosen: Candidate | None
    reason: str  #: If no group can serve, it begins with nodes without the model: users can fix that.
    alternatives: tuple[Candidate, ...]  #: All considered: chosen, possible, then refused.
    notes: tuple[str, ...]
    context: int  #: Tokens that KV caches have room for on every rank.
    workload: Workload

    @property
    def ranks(self) -> tuple[str, ...]:
        return self.chosen.ranks if self.chosen else ()


def plan(
    members: Sequence[MemberMachine],
    shape: ModelShape,
    must: str = "",
    options: PlacementOptions | None = None,
) -> Placement:
    """Return the best placement of a model on `members`. `must` is the node id of the planning Mac, or empty:
    it is rank 0 of its groups.
    """
    options = options or PlacementOptions()
    present = {m.node_id: m for m in members if not m.lack}
    context = min(options.max_context or DEFAULT_CONTEXT, shape.max_context)
    topology = Topology(list(present.values()), options.rdma, options.fabric_networks)
    finder = CandidateFinder(present, topology, shape, context, options)
    must = must if must in present else ""
    considered = _judged(finder.alternatives(must), options)
    considered += _too_few(options, shape, len(present), len(members))
    chosen, lacking = _best(considered, options), left_out(sorted((m.name, m.lack) for m in members))
    notes = list(lacking)
    several = must and len(present) > 1
    without = _judged(finder.alternatives("", leave_out=must), options) if several else []
    if free := _best(without, options):
        name, free_s = present[must].name, _seconds(free, options)
        if chosen is None:
            notes.append(f"{name} can be in no group: {_trouble(considered, options)}")
            chosen, considered = free, [*considered, *without]
        elif options.nodes == "auto" and FASTER_WITHOUT * free_s < (own_s := _seconds(chosen, options)):
            times = f"{free_s:.1f} s per {options.workload.name} request instead of {own_s:.1f}"
            notes.append(f"without {name}: {free.title}, {times}")
    considered = _ranked(considered, chosen, options)
    if chosen is not None:
        notes += _fallback(considered, chosen, finder) + finder.assumptions(chosen)
        notes += filter(None, [exposed(chosen.kind, chosen.ranks, topology)])
        chosen = considered[0]
    return Placement(
        chosen=chosen,
        reason=_reason(considered, chosen, options, lacking),
        alternatives=tuple(considered),
        notes=tuple(notes) if chosen is not None else (),
        context=context,
        workload=options.workload,
    )


def _judged(found: Sequence[Candidate], options: PlacementOptions) -> list[Candidate]:
    alone = next((a for a in found if a.nodes == 1 and a.verdict == "possible"), None)
    judged = [_refused(one, _objection(one, alone, options)) for one in found]
    several = any(one.nodes > 1 and one.verdict == "possible" for one in judged)
    if options.parallel == "auto" or options.nodes != "auto" or not several:
        return judged
    why = f"{options.parallel} was requested, which takes 2 nodes or more"
    return [_refused(one, why if one.nodes == 1 else "") for one in judged]


def _refused(one: Candidate, objection: str) -> Candidate:
    refuses = one.verdict == "possible" and objection
    return replace(one, verdict="refused", reason=objection) if refuses else one


def _too_few(options: PlacementOptions, shape: ModelShape, able: int, here: int) -> list[Candidate]:
    if not isinstance(options.nodes, int) or options.nodes <= able:
        return []
    are_here = "is here" if able == 1 else "are here"
    found = f"{able} {are_here}" if able == here else f"{able} of the {here} here can"
    kind = PIPELINE if options.parallel == "pipeline" else TENSOR_PARALLEL
    what = f"the split {','.join(map(str, options.split))} " if options.split else ""
    wrong = shape.uncuttable(options.nodes, options.split) if options.split else ""
    return [Candidate(kind, options.nodes, reason=wrong or f"{what}needs {options.nodes} nodes, {found}")]


def _objection(one: Candidate, alone: Candidate | None, options: PlacementOptions) -> str:
    if isinstance(options.nodes, int) and one.nodes != options.nodes:
        wanted = "1 node was" if options.nodes == 1 else f"{options.nodes} nodes were"
        return f"{wanted} requested, this has {one.nodes}"
    if one.nodes > 1 and options.backend not in ("auto", one.backend):
        return f"{one.nodes} nodes could use it, but the backend {options.backend} was requested"
    if alone is None or one.nodes == 1 or options.nodes != "auto" or options.parallel != "auto":
        return ""
    if _seconds(one, options) <= _seconds(alone, options):
        return ""
    return (
        f"slower than {alone.names[0]} alone per {options.workload.name} request; "
        f"asking for {one.nodes} nodes accepts it"
    )


def _best(considered: Sequence[Candidate], options: PlacementOptions) -> Candidate | None:
    possible = [a for a in considered if a.verdict == "possible"]
    most = max((a.nodes for a in possible), default=0) if options.nodes == "all" else 0
    return min((a for a in possible if a.nodes >= most), key=lambda one: _order(one, options), default=None)


def _order(one: Candidate, options: PlacementOptions) -> tuple[object, ...]:
    return (_seconds(one, options), one.nodes, one.kind, one.ranks)


def _seconds(one: Candidate, options: PlacementOptions) -> float:
    return one.request_seconds(options.workload)


def _ranked(
    considered: Sequence[Candidate], chosen: Candidate | None, options: PlacementOptions
) -> list[Candidate]:
    marked = [replace(a, verdict="chosen") if a is chosen else a for a in considered]
    return sorted(marked, key=lambda a: (a.verdict, *_order(a, options), a.reason))  # by alphabet


def left_out(lacks: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name} is left out: {lack}" for name, lack in lacks if lack]


def _fallback(considered: Sequence[Candidate], chosen: Candidate, finder: CandidateFinder) -> list[str]:
    if chosen.backend != "ring" or not finder.fabrics.hopes_for_rdma:
        return []
    missed = (a for a in considered if (a.kind, a.nodes, a.verdict) == (JACCL_MESH, chosen.nodes, "refused"))
    return [f"the {chosen.kind}, not JACCL: {a.reason}" for a in missed][:1]


def _reason(
    considered: Sequence[Candidate],
    chosen: Candidate | None,
    options: PlacementOptions,
    lacking: Sequence[str],
) -> str:
    if chosen is None:
        trouble = _trouble(considered, options) or "0 nodes here can serve this model"
        return "; ".join([*lacking, trouble])
    total, prompt, answer = _times(chosen, options)
    layers = f" (layers: {chosen.layers})" if chosen.split else ""
    reason = f"{chosen.title}{layers}: {total} per {options.workload.name} request"
    reason += f", {prompt} for its prompt and {answer} for its answer"
    later = [a for a in considered if a.speed and _seconds(a, options) >= _seconds(chosen, options)]
    unlike = [a for a in later if (a.nodes == 1) != (chosen.nodes == 1)]
    for other in [*unlike, *(a for a in later if a.verdict != "chosen")][:1]:
        total, prompt, answer = _times(other, options)
        reason += f"; {other.title}: {total}, {prompt} and {answer}"
    larger = [a for a in considered if a.nodes > chosen.nodes and a.verdict == "refused" and not a.speed]
    if chosen.split:
        larger += [a for a in considered if a.nodes == chosen.nodes and not (a.speed or a.is_pipeline)]
    if larger and (options.nodes != chosen.nodes or chosen.split):
        first = min(larger, key=lambda a: (a.nodes, a.is_pipeline, a.kind))
        reason += f". Not {first.title}: {first.reason}"
    return reason


def _times(one: Candidate, options: PlacementOptions) -> tuple[str, str, str]:
    assert one.speed is not None
    prompt_s, answer_s = one.speed.prompt_s(options.workload), one.speed.answer_s(options.workload)
    return f"{prompt_s + answer_s:.1f} s", f"{prompt_s:.1f} s", f"{answer_s:.1f} s"


def _trouble(considered: Sequence[Candidate], options: PlacementOptions) -> str:
    """Return the obstacles of all requested groups, the smallest first, each reason once."""
    wanted = [a for a in considered if options.nodes in (a.nodes, "auto", "all")] or considered
    reasons: dict[str, str] = {}
    for one in sorted(wanted, key=lambda a: (a.nodes, a.is_pipeline, a.kind, a.reason)):
        reasons.setdefault(one.reason, "alone" if one.kind == ALONE else one.title)
    said = [f"{title}: {reason}" for reason, title in reasons.items() if reason]
    more = [f"and {len(said) - _SAID} more reasons"] if len(said) > _SAID else []
    return "; ".join(said[:_SAID] + more)
