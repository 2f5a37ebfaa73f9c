"""`mlxtp plan`: parses the options and collects the machines; `planning` does the rest. Imports are late."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..client import AgentClient
from ..errors import Exit, UserError
from ..settings import BY_KEY
from ..values import one_of, parse_nodes, parse_split, split_layers
from ..verbs import PlanNow, PresentMachines
from .options import AsJson, Home, like, model_names, setting_of, words
from .printing import home_of, typed

if TYPE_CHECKING:
    from ..placement.model_shape import DescribedModel
    from ..placement.topology import MemberMachine
    from ..wire.cluster_messages import FabricResult


#: Settings that a plan takes from the running agent, and their values without one.
_UNSET: Mapping[str, str] = {"parallel": "auto", "fabric_networks": "any"}
_WORKLOADS = "chat|agent|batch"


def plan(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="A model folder, its config.json, a plain name in a --model-folder, or an id on the Hugging "
            "Face Hub (only its configuration is downloaded).",
            autocompletion=model_names,
        ),
    ],
    machines: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A TOML file of Macs you do not have. Default: the cluster's Macs."
        ),
    ] = None,
    spread: Annotated[
        str, like("nodes", "How many Macs to spread it over; auto: as many as answer soonest.")
    ] = "auto",
    parallel: Annotated[
        str,
        like(
            "parallel",
            "How several Macs share the model: parts of each layer, or whole layers. Default: as the running "
            "agent is set, else auto.",
        ),
    ] = "",
    split: Annotated[
        str,
        like(
            "split",
            "Layers of each Mac of a pipeline, such as 40,24,16, in the order of ranks. Rank 0 has the last "
            "layers.",
            show_default="by memory and speed",
        ),
    ] = "auto",
    workload: Annotated[
        str,
        typer.Option(
            metavar=_WORKLOADS,
            help="Requests whose expected time decides: chat (4,000 tokens in, 400 out; as the cluster "
            "itself plans), agent (30,000 in, mostly cached, 300 out), or batch (many at once).",
            autocompletion=words(_WORKLOADS),
        ),
    ] = "chat",
    backend: Annotated[str, like("backend", "How ranks of several Macs communicate: RDMA or TCP.")] = "auto",
    fabric_networks: Annotated[
        str,
        like(
            "fabric_networks",
            "Links that may carry tensors, as of `mlxtp node --fabric-networks`.",
            show_default="those of the running agent, else any",
        ),
    ] = "",
    max_context: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            help="Most tokens of prompt and reply.",
            show_default="8192, or the model's own if that is less",
        ),
    ] = 0,
    fast_fences: Annotated[
        bool, typer.Option("--fast-fences", help="As if `mlxtp node --fast-fences` ran on each.")
    ] = False,
    repeatable: Annotated[
        bool, typer.Option("--repeatable", help="As if `mlxtp node --repeatable` ran on each.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show which Macs can serve a model, how fast, and why. Nothing is started.

    For several models: the Macs of each in a cluster that serves nothing else, and the memory of each Mac.
    """
    from ..placement.cost_model import WORKLOADS
    from ..placement.measurements import measured
    from ..placement.planner import PlacementOptions
    from . import planning

    if not all(model.strip() for model in models):
        raise UserError("MODEL is empty; give a folder or an id on the Hub: `mlxtp plan --help`")
    with typed():
        number = parse_nodes(spread, "--spread")
        one_of(*WORKLOADS)(workload, "--workload")
        BY_KEY["fabric_networks"].kind.parse(fabric_networks or "any", "--fabric-networks")
        chosen = BY_KEY["parallel"].kind.parse(parallel or "auto", "--parallel")
        layers = split_layers(parse_split(split, "--split"), chosen, number)
    wanted: str | int = int(number) if number.isdecimal() else number
    coordinator = ""
    results: tuple[FabricResult, ...] = ()
    theirs = _UNSET
    if machines is not None:
        found = planning.read_machines_file(machines)
    else:
        found, coordinator, results, theirs = members_here(home_of(home))
    options = PlacementOptions(
        backend=backend,
        nodes=wanted,
        max_context=max_context,
        fast_fences=fast_fences,
        measured=measured(results, fast_fences=fast_fences),
        repeatable=repeatable,
        workload=WORKLOADS[workload],
        parallel=parallel or theirs["parallel"],
        split=layers,
        fabric_networks=fabric_networks or theirs["fabric_networks"],
    )
    shaped = [named_model(model, home) for model in models]
    if len(shaped) > 1:
        packed = planning.run_several(shaped, found, options=options, as_json=as_json)
        possible = all(one.ranks for one in packed)
    else:
        [(name, model)] = shaped

        def now(described: DescribedModel) -> Mapping[str, object]:
            packed = b64encode(described.packed()).decode()
            return AgentClient(home_of(home)).send(
                PlanNow(name or str(model), packed, spread, parallel, split)
            )

        made = planning.run(
            model,
            found,
            name=name,
            coordinator=coordinator,
            options=options,
            as_json=as_json,
            now=None if theirs is _UNSET else now,
        )
        possible = made.chosen is not None
    if not possible:
        raise typer.Exit(Exit.REFUSED)


def named_model(typed: str, home: Path | None) -> tuple[str, str | Path]:
    """Return a name for people ("" if the path has it), and the path to read. Raises ModelError."""
    from ..models.inspect import find_config, full_name, in_folders, is_hub_id

    model = typed
    if "/" not in model and not Path(model).exists():
        folders = tuple(setting_of("model_folders", home_of(home)))
        model = in_folders(full_name(model, folders), folders)
    return (typed, find_config(model)) if is_hub_id(model) else ("", model)


def members_here(
    home: Path,
) -> tuple[tuple[MemberMachine, ...], str, tuple[FabricResult, ...], Mapping[str, str]]:
    """Return the cluster's machines (without an agent, this Mac), coordinator, results and settings."""
    import asyncio

    from ..description import built
    from ..placement import hardware
    from ..placement.measurements import from_json
    from ..placement.topology import MemberMachine

    try:
        told = AgentClient(home).send(PresentMachines())
    except UserError:
        machine = asyncio.run(hardware.probe())
        return (MemberMachine("this", "this Mac", machine),), "this", (), _UNSET
    found = tuple(built(MemberMachine, node) for node in told["nodes"])
    fabric = tuple(map(from_json, told["fabric"]))
    return found, str(told["coordinator"]), fabric, {name: str(told[name]) for name in _UNSET}
