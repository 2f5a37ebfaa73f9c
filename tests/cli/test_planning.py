"""Input and output of `mlxtp plan`."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.published_models import PUBLISHED, folder_of, published
from mlxtp.cli import planning as plan
from mlxtp.cli.main import app
from mlxtp.config import resolve_settings
from mlxtp.errors import ConfigError, ModelError, UserError
from mlxtp.groups.machines import placement_options
from mlxtp.model_files import MTP_FILE
from mlxtp.placement.candidates import Candidate
from mlxtp.placement.cost_model import AGENT, ALONE, BATCH, CHAT, JACCL_MESH, RING_THUNDERBOLT, Workload
from mlxtp.placement.machines_file import read_machines
from mlxtp.placement.planner import PlacementOptions
from mlxtp.placement.planner import plan as choose
from mlxtp.placement.topology import MemberMachine
from mlxtp.wire.cluster_messages import Deployment

from ..engine.mtp_heads import add_head
from ..engine.small_models import write_model
from ..placement.made_up_macs import all_pairs, cabled, changed, mac, on_lan
from ..placement.made_up_models import LLAMA
from ..placement.test_planner_properties import LOOP

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "desk.toml"


def table(page: str, name: str) -> list[str]:
    """The rows of a table that a page has from plans."""
    (found,) = re.findall(
        rf"<!-- {name} -->(.*?)<!-- end of {name} -->", (ROOT / page).read_text(), re.DOTALL
    )
    return str(found).strip().splitlines()[2:]


def desk(size: int, **changes: Any) -> list[MemberMachine]:
    return on_lan(cabled([mac(i, **changes) for i in range(size)], all_pairs(size)))


def as_object(model: str, members: list[MemberMachine], **more: Any) -> dict[str, Any]:
    with redirect_stdout(io.StringIO()) as out:
        plan.run(folder_of(model), members, as_json=True, **more)
    return cast(dict[str, Any], json.loads(out.getvalue()))


def printed(model: str | Path, members: list[MemberMachine], width: int = 200, **more: Any) -> str:
    out, model = io.StringIO(), folder_of(str(model)) if model in PUBLISHED else model
    plan.run(model, members, console=Console(file=out, width=width, highlight=False), **more)
    return out.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder of 4 GB, none of which is there."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    index = {"metadata": {"total_size": 4_000_000_000}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_model_has_a_name_and_the_weight_of_its_index_or_files(folder: Path) -> None:
    assert plan.read_shape(folder).weight_bytes == 4_000_000_000
    assert plan.read_shape(folder).name == folder.name
    assert plan.read_shape(folder / "config.json").weight_bytes == pytest.approx(16.06e9, rel=0.01)
    (folder / "model.safetensors.index.json").unlink()
    for name, size in (("model-1", 500), ("model-2", 700), ("draft", 900)):
        (folder / f"{name}.safetensors").write_bytes(b"x" * size)
    assert plan.read_shape(folder).weight_bytes == 1200
    assert plan.read_shape(folder_of("gpt-oss-120b"), "o/gpt").name == "o/gpt"
    assert plan.read_shape("tiny").weight_bytes < 5_000_000
    for name in ("llama", "/nowhere", "owner/model"):
        with pytest.raises(ModelError, match=f"{name} is neither a model folder, nor"):
            plan.read_shape(name)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "cannot be read"), ("[" * 100_000, "cannot be read"), ("[]", "is not a JSON object")],
    ids=["half", "deep", "list"],
)
def test_a_broken_configuration_is_refused(folder: Path, text: str, says: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=says):
        plan.read_shape(folder)


def test_every_alternative_has_a_row_with_its_numbers() -> None:
    text = printed("llama-3.3-70b-8bit", desk(3, memory=128), width=300)
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "75.0 GB of weights, of which a token reads 73.8 GB; 2.7 GB of KV caches for 8,192 tokens" in text
    assert "10.7" in rows["JACCL mesh of 2"]
    assert "42.0/137.4" in rows["JACCL mesh of 2"]
    assert "chosen" in rows["JACCL mesh of 2"]
    assert "a, b" in rows["JACCL mesh of 2"]
    assert "possible" in rows["one node alone"]
    assert "8 KV heads do not divide by 3" in text
    assert "possible" in rows["ring over Ethernet of 2"]  # slower to write than one Mac, sooner to read
    assert "in the fences of 161 collectives" in text
    assert "on the links (assumed)" in text


def test_on_a_narrow_terminal_reasons_stand_below() -> None:
    text = printed("llama-3.3-70b-8bit", desk(3, memory=128), width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.splitlines()[2].split() == [
        "way", "request", "first", "token", "tokens/s", "GB", "a", "rank", "verdict"
    ]  # fmt: skip
    assert "- tensor parallel of 3: 3 Macs cannot share this model, 2 can: 64 attention" in text
    assert "why" not in text.splitlines()[2]
    alone = [changed(mac(i), ports=(), interfaces=(LOOP,)) for i in range(2)]
    long_way = printed("tiny", alone, width=80)
    assert "ring within one machine" in long_way
    assert "…" not in long_way


def test_where_nothing_works_the_reason_stands_there() -> None:
    made = as_object("llama-3.3-70b-8bit", desk(1))
    assert made["chosen"] is None
    assert made["reason"].startswith("alone: rank 0 (a) has")
    text = printed("llama-3.3-70b-8bit", desk(1))
    assert text.count("rank 0 (a) has 68.7 GB for 83.4 GB") == 1
    assert "These Macs cannot serve it." in text
    assert "ms a token" not in text


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("nodes", ["auto", 3])
def test_a_refusal_is_said_once(width: int, nodes: int | str) -> None:
    """A reason that several ways share has one line, and the summary does not repeat it."""
    out, members = io.StringIO(), desk(3, memory=256)
    console = Console(file=out, width=width, highlight=False)
    model, options = folder_of("llama-3.3-70b-4bit"), PlacementOptions(nodes=nodes)
    made = plan.run(model, members, console=console, options=options)
    text = " ".join(out.getvalue().split())
    reasons = [one.reason for one in made.alternatives if one.reason]
    assert reasons
    assert ". Not " not in text
    if width == 80:
        assert [text.count(reason) for reason in reasons] == [1] * len(reasons)


def test_a_plan_says_where_tensors_cross_a_network_of_others_or_why_they_do_not() -> None:
    members = on_lan([mac(0, memory=128), mac(1, memory=128)])
    text = printed("llama-3.3-70b-8bit", members, options=PlacementOptions(nodes="all"))
    assert "Note: tensors cross shared Ethernet in the clear: other machines on it can compute" in text
    assert "Note: the ring over Ethernet, not JACCL: 1 of 1 links by cables with RDMA are missing" in text
    strict = PlacementOptions(nodes="all", fabric_networks="private")
    text = " ".join(printed("llama-3.3-70b-8bit", members, width=80, options=strict).split())
    why = "--fabric-networks private excludes 1 link: shared Ethernet a – b"
    assert f"- pipeline of 2, ring over Ethernet of 2: {why}" in text
    assert "Note: " not in text
    assert "a alone: " in text


def test_names_are_printed_as_they_are(folder: Path) -> None:
    """They come from people, and rich would take brackets for colours."""
    (folder / "[red]").mkdir()
    (folder / "[red]" / "config.json").write_text(json.dumps(LLAMA))
    text = printed(folder / "[red]", [replace(mac(0), name="[bold]a")])
    assert text.startswith("[red]: ")
    assert text.count("[bold]a") == 2


def test_words_say_once_why_a_mesh_wins_or_one_mac() -> None:
    """Of a model that one Mac writes a little faster, and a mesh reads twice as fast."""
    members = list(plan.read_machines_file(EXAMPLE))
    chat = printed("llama-3.3-70b-4bit", members, width=80)
    words = " ".join(chat.split())
    assert (
        words.count(
            "JACCL mesh of 2: 42.1 s per chat request, 14.9 s for its prompt and 27.2 s for its answer; "
            "studio-1 alone: 54.3 s, 27.1 s and 27.2 s"
        )
        == 1
    )
    essay = PlacementOptions(workload=Workload("essay", 100, 0, 2000))
    text = printed("llama-3.3-70b-4bit", members, width=80, options=essay)
    assert " ".join(text.split()).count("studio-1 alone: 133.4 s per essay request") == 1
    for line in (chat + text).splitlines():
        assert len(line) <= 80


def test_the_example_is_what_the_sample_of_a_nodes_file_gives() -> None:
    page = (ROOT / "docs" / "placement.md").read_text()
    (sample,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert EXAMPLE.read_text() == sample
    members = list(plan.read_machines_file(EXAMPLE))
    ((command, shown),) = re.findall(r"```console\n\$ (mlxtp plan .*?)\n(.*?)```", page, re.DOTALL)
    assert command == "mlxtp plan llama-3.3-70b-8bit --machines examples/desk.toml"
    real = printed("llama-3.3-70b-8bit", members, width=129)
    said = " ".join(real.split())
    for line in shown.splitlines():
        assert " ".join(line.removesuffix("…").split()) in said
    verdicts = re.findall(r"chosen|possible|refused", shown)
    assert verdicts == [
        word for word in re.findall(r"\w+", real) if word in ("chosen", "possible", "refused")
    ]


def test_the_embedded_model_is_planned_as_a_cluster_would_place_it(folder: Path) -> None:
    """On as many as can, though one alone is faster."""
    tcp = on_lan([mac(i) for i in range(2)])
    text = printed("tiny", tcp)
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "chosen" in rows["ring over Ethernet of 2"]
    assert "possible" in rows["one node alone"]
    assert "Note: the embedded model demonstrates that the Macs work together" in text
    one = printed("tiny", tcp, options=PlacementOptions(nodes=1))
    assert "a alone: " in one
    assert "1 node was requested, this has 2" in one
    assert "Note: the embedded" not in one
    assert "Note: the embedded" not in printed("tiny", tcp[:1])
    pipeline = PlacementOptions(parallel="pipeline")
    text = printed("tiny", on_lan([mac(i) for i in range(3)]), options=pipeline)
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "chosen" in rows["pipeline of 2, ring over Ethernet"], "as many as answer soonest"
    assert "Note: the embedded" not in text
    assert "slower than a alone" in printed(folder, tcp)


@pytest.mark.parametrize("model", ["tiny", "org/model"])
@pytest.mark.parametrize("nodes", ["auto", "all", 1, 2])
def test_a_plan_and_a_cluster_take_the_same_choice(tmp_path: Path, model: str, nodes: str | int) -> None:
    settings = resolve_settings({"home": tmp_path}, {})
    served = placement_options(settings, Deployment("m", nodes=str(nodes)), model)
    planned = plan.as_served(model, PlacementOptions(nodes=nodes))
    assert (planned.nodes, planned.parallel) == (served.nodes, served.parallel)


def test_json_has_everything() -> None:
    made = as_object("llama-3.3-70b-8bit", desk(2, memory=128))
    assert made["model"]["weight_bytes"] == pytest.approx(74.96e9, rel=1e-4)
    assert made["chosen"]["rdma"] == [[None, "rdma_en2"], ["rdma_en2", None]]
    assert made["chosen"]["speed"]["tokens_per_second"] == pytest.approx(10.6, abs=0.1)
    assert made["chosen"]["memory"][1]["name"] == "b"
    assert made["leader"] == made["chosen"]["ranks"][0]
    assert made["model"]["caches"] == {"name": "keys and values", "off": "", "why": ""}
    assert made["alternatives"][0] == made["chosen"]
    assert {"title", "verdict", "reason"} <= made["alternatives"][1].keys()


def test_a_plan_says_what_drafts_would_bring_where_the_model_has_a_head() -> None:
    text = " ".join(printed("glm-4.6-4bit", desk(2, memory=256)).split())
    made = as_object("glm-4.6-4bit", desk(2, memory=256))
    drafts = made["chosen"]["speed"]["drafts"]
    assert (drafts["count"], drafts["accepted"], drafts["published"]) == (1, 0.84, True)
    told = f"With MTP drafts: {drafts['tokens_per_second']:.1f} tokens/s, 1 draft a step"
    assert f"{told} (acceptance 0.84, as published). Its files need the head for that, 2.2 GB more on" in text
    assert "drafts" not in printed("llama-3.3-70b-4bit", desk(2, memory=256))
    tiny = printed("tiny", desk(1))
    assert "0.60, an assumption: nothing is published of this family)\n" in tiny
    assert "MTP drafts: " in tiny or "MTP drafts would not pay: " in tiny


@pytest.mark.slow
def test_a_plan_counts_a_head_that_ranks_would_load(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = add_head(write_model(tmp_path / "small"), (7, 8, 9), length=9)
    assert plan.read_shape(folder).mtp_kv_bytes
    stored = {**mx.load(str(folder / MTP_FILE))}
    mx.eval(stored)
    name = "model.layers.2.eh_proj.weight"
    for tensors in ({**stored, name: mx.ones((3, 3))}, {n: a for n, a in stored.items() if n != name}):
        mx.save_safetensors(str(folder / MTP_FILE), tensors)
        assert not plan.read_shape(folder).mtp_kv_bytes
        assert "small is served without its MTP head: " in capfd.readouterr().err
    (folder / "model.safetensors").unlink()
    assert plan.read_shape(folder).mtp_kv_bytes, "what is not here yet is taken for whole"


def test_a_plan_in_a_pipe_has_whole_sentences_and_a_missing_file_is_named_once(tmp_path: Path) -> None:
    words = ["plan", str(folder_of("qwen3-235b-a22b-8bit")), "--machines", str(EXAMPLE)]
    lines = CliRunner().invoke(app, words, env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, lines)) > 80
    assert lines[-1].startswith(("Note:", "These Macs")) or " ms a token: " in lines[-1]
    missing = CliRunner().invoke(app, [*words[:-1], "/nonexistent.toml"]).stderr
    assert missing.count("/nonexistent.toml") == 1
    assert "No such file or directory. It is a TOML file of Macs" in missing
    (tmp_path / "desk.toml").write_text("links = 3")
    with pytest.raises(ConfigError, match=r"desk\.toml: it has no machines"):
        plan.read_machines_file(tmp_path / "desk.toml")


COMPARED = (
    "qwen3-235b-a22b-8bit", "llama-3.3-70b-bf16", "llama-3.3-70b-8bit", "llama-3.3-70b-4bit",
    "llama-3.1-8b-8bit", "gpt-oss-120b",
)  # fmt: skip


def compared(model: str) -> str:
    """A row of the table: what two large Macs would do with a model."""
    members = list(plan.read_machines_file(EXAMPLE))
    made, fast = (
        as_object(model, members, options=PlacementOptions(fast_fences=fences)) for fences in (False, True)
    )

    def expected(plans: dict[str, Any], kind: str) -> str:
        (found,) = (each for each in plans["alternatives"] if each["kind"] == kind and not each["split"])
        return f"{found['speed']['tokens_per_second']:.1f}" if found["speed"] else "does not fit"

    cells = (
        f"`{model}`",
        f"{made['model']['token_bytes'] / 1e9:.1f} GB",
        expected(made, ALONE),
        expected(made, JACCL_MESH),
        expected(fast, JACCL_MESH),
        expected(made, RING_THUNDERBOLT),
    )
    return f"| {' | '.join(cells)} |"


def test_the_comparison_is_what_plans_say() -> None:
    # To renew it: python -c "from tests.cli.test_planning import *; print(*map(compared, COMPARED))"
    assert table("docs/engine.md", "plans") == [compared(model) for model in COMPARED]


def timed(model: str) -> str:
    """A row of the table of requests: their seconds on one Mac and on a mesh of two."""
    members = list(plan.read_machines_file(EXAMPLE))
    made = as_object(model, members)
    alone, mesh = (
        next(each["speed"] for each in made["alternatives"] if each["kind"] == kind and not each["split"])
        for kind in (ALONE, JACCL_MESH)
    )
    cells = [f"`{model}`", f"{alone['ttft_s']:.1f}", f"{mesh['ttft_s']:.1f}"]
    for workload in (CHAT, AGENT):
        plans = as_object(model, members, options=PlacementOptions(workload=workload))
        cells += [
            f"{found['request_s']:.1f}"
            for kind in (ALONE, JACCL_MESH)
            for found in plans["alternatives"]
            if found["kind"] == kind and not found["split"]
        ]
    return f"| {' | '.join(cells)} |"


def test_the_times_of_requests_are_what_plans_say() -> None:
    # To renew it: python -c "from tests.cli.test_planning import *; print(*map(timed, COMPARED[1:]))"
    assert table("benchmarks/RESULTS.md", "requests") == [timed(model) for model in COMPARED[1:]]


TWO = '[[node]]\nchip = "M3 Ultra"\nmemory = "256GB"\ncount = 2'
UNLIKE = '[[node]]\nchip = "M3 Ultra"\nmemory = "512GB"\n[[node]]\nchip = "M4 Max"\nmemory = "128GB"'
DESKS = {
    "two M3 Ultra 256, Thunderbolt 5": f'links = "thunderbolt5 mesh"\n{TWO}',
    "the same, Ethernet 1 Gb/s": f'links = "ethernet 1g"\n{TWO}',
    "M3 Ultra 512 + M4 Max 128, Thunderbolt 5": f'links = "thunderbolt5 mesh"\n{UNLIKE}',
    "three of examples/three.toml": (ROOT / "examples" / "three.toml").read_text(),
}
OF_EACH_KIND = ("llama-3.3-70b-8bit", "qwen3-235b-a22b-8bit", "gpt-oss-120b")


def kinds(desk: str, model: str) -> str:
    """A row of the table of kinds: seconds of a chat request, and requests a minute where 16 come at once."""
    members, shape = read_machines(DESKS[desk]), published(model)

    def best(workload: Workload, kind: Callable[[Candidate], bool]) -> float | None:
        made = choose(members, shape, members[0].node_id, PlacementOptions(workload=workload))
        found = [one.request_seconds(workload) for one in made.alternatives if one.speed and kind(one)]
        return min(found, default=None)

    def tensor(one: Candidate) -> bool:
        return one.nodes > 1 and not one.split

    def pipeline(one: Candidate) -> bool:
        return bool(one.split)

    chat = [best(CHAT, kind) for kind in (lambda one: one.nodes == 1, tensor, pipeline)]
    batch = [best(BATCH, kind) for kind in (tensor, pipeline)]
    each = [choose([member], shape, options=PlacementOptions(workload=BATCH)).chosen for member in members]
    each_s = [one.request_seconds(BATCH) for one in each if one is not None and one.speed]
    replicas = sum(BATCH.at_once / seconds for seconds in each_s)
    cells = [desk, f"`{model}`", *("–" if seconds is None else f"{seconds:.1f}" for seconds in chat)]
    cells += ["–" if seconds is None else f"{60 * BATCH.at_once / seconds:.1f}" for seconds in batch]
    cells.append(f"{60 * replicas:.1f}" if replicas else "–")
    return f"| {' | '.join(cells)} |"


def test_the_table_of_kinds_is_what_plans_say() -> None:
    # To renew it: python -c "from tests.cli.test_planning import *; print(*table_of_kinds(), sep='\n')"
    assert table("benchmarks/RESULTS.md", "kinds") == table_of_kinds()


def table_of_kinds() -> list[str]:
    return [kinds(desk, model) for desk in DESKS for model in OF_EACH_KIND]


def test_three_unlike_macs_are_planned_as_the_page_says() -> None:
    page = (ROOT / "docs" / "two-macs.md").read_text()
    ((command, shown),) = re.findall(r"```console\n\$ (mlxtp plan .*?)\n(.*?)```", page, re.DOTALL)
    _, _, model, _, file = command.split()
    members = list(plan.read_machines_file(ROOT / file))
    assert model == "mlx-community/Llama-4-Maverick-17B-128E-Instruct-6bit"
    said = " ".join(printed("llama-4-maverick-6bit", members, width=129, name=model).split())
    for line in shown.splitlines():
        assert " ".join(line.removesuffix("…").split()) in said


@pytest.mark.parametrize(("size", "backend"), [(2, "jaccl"), (2, "ring"), (3, "ring")])
def test_mlx_launch_reads_the_file_of_all_macs(tmp_path: Path, size: int, backend: str) -> None:
    from mlx._distributed_utils.common import Hostfile

    members = desk(size)
    one = plan.over_all(members, members[0].node_id, PlacementOptions(backend=backend, fast_fences=True))
    addresses = {node: f"192.168.9.{rank}" for rank, node in enumerate(one.ranks)}
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(plan.hostfile(one, addresses, fast_fences=True)))
    read = Hostfile.from_file(file)
    assert read.backend == one.backend == backend
    assert read.envs == ["MLX_METAL_FAST_SYNCH=1"]
    assert [host.ssh_hostname for host in read.hosts] == list(addresses.values())
    assert all(len(host.ips) == 1 for host in read.hosts)
    if backend == "jaccl":
        assert all(
            (device is None) is (to == host.rank)
            for host in read.hosts
            for to, device in enumerate(host.rdma)
        )
        assert all(len(host.rdma) == size for host in read.hosts)
    else:
        assert [host.ips[0] for host in read.hosts] == list(one.ring_addresses)


@pytest.mark.parametrize(
    ("size", "options", "why"),
    [
        (1, PlacementOptions(), "cannot work together"),
        (2, PlacementOptions(backend="jaccl"), r"with RDMA are missing: a – b \(no cable\)"),
        (
            2,
            PlacementOptions(backend="ring", fabric_networks="private"),
            "--fabric-networks private excludes 1 link: shared Ethernet a – b",
        ),
    ],
)
def test_macs_that_cannot_work_together_have_no_file_and_the_reason_is_named(
    size: int, options: PlacementOptions, why: str
) -> None:
    with pytest.raises(UserError, match=why) as raised:
        plan.over_all(on_lan([mac(i) for i in range(size)]), "", options)
    assert size == 1 or "alone" not in raised.value.detail
