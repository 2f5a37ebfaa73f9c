"""Commands that ask a running agent, as a user types them: the real application behind a real port."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import pytest
import typer
from click.testing import Result
from rich.console import Console
from starlette.applications import Starlette
from typer.testing import CliRunner

from benchmarks.published_models import folder_of
from mlxtp.admin.handlers import FILE, announced
from mlxtp.agent import _own_home
from mlxtp.api.app import create_app
from mlxtp.api.server import bind, serve
from mlxtp.cli import bench, cluster
from mlxtp.cli.main import _with_values, app
from mlxtp.client import agent_runs
from mlxtp.cluster.cluster_state import ClusterState, Roster
from mlxtp.cluster.state_file import SavedState, save
from mlxtp.config import embedded_model_path
from mlxtp.errors import Code, UserError
from mlxtp.identity.store import Store
from mlxtp.models.hub_cache import cache_folder
from mlxtp.placement.model_shape import unpacked
from mlxtp.verbs import PresentMachines
from mlxtp.wire.cluster_messages import Interface, Machine, RosterEntry

from ..api.test_admin import KEY, FakeAdmin
from ..live_cluster import WAIT_S
from ..models.test_disk_cache import layout

MEMBER: dict[str, Any] = {
    **{"node_id": "ab" * 16, "name": "studio [left]", "state": "alive", "self": True, "coordinator": True},
    **{"rank": 0, "address": "", "http": "http://127.0.0.1:52415", "draining": False, "works_for": []},
    **{"chip": "Apple M3 Ultra", "memory_bytes": 512 * 10**9, "notes": [], "joined_at": 0},
    **dict.fromkeys(("model_problem", "model_progress", "refused"), ""),
}
GROUP: dict[str, Any] = {
    **{"id": "org/[model]#0", "kind": "JACCL mesh", "split": [], "state": "ready", "why": None, "epoch": 7},
    "members": [{"node_id": "ab" * 16, "name": "studio [left]"}, {"node_id": "cd" * 16, "name": "mini"}],
    **{"owner": "ab" * 16, "owner_name": "studio [left]", "exposed": None, "faster": None},
    **{"requests": {"running": 3, "waiting": 1}, "tokens_per_second": 120, "cached_tokens": 4096},
}
EXPOSED = (
    "tensors cross Wi-Fi in the clear: other machines on it can compute prompts and answers from them "
    "(--fabric-networks excludes it)"
)
TWO_REPLICAS: dict[str, Any] = {
    "name": "org/[model]",
    "model": "org/[model]",
    "state": "ready",
    "replicas": {"ready": 1, "wanted": 2},
    "pinned": True,
    "nodes": "2",
    "parallel": "",
    "split": "auto",
    "on": [],
    "keep_s": None,
    "why": "air: 30.1 GB are needed, and 12.0 GB are free",
    "groups": [
        GROUP,
        {**GROUP, "id": "org/[model]#1", "state": "idle", "owner": None, "owner_name": None, "members": [],
         "why": "air: 30.1 GB are needed, and 12.0 GB are free"},
    ],
}  # fmt: skip
STATUS: dict[str, Any] = {
    **{"state": "ready", "model": "org/model", "epoch": 7, "cluster": "c" * 16, "fabric": None},
    **{"group": "org/[model]#0", "world_size": 2, "kind": "JACCL mesh", "split": []},
    **{"coordinator": "studio [left]", "deployments": [TWO_REPLICAS]},
    **dict.fromkeys(("ranks", "caches", "drafts", "coming", "left_out"), ()),
    **dict.fromkeys(("left_wired", "slow_link", "reason", "problem", "waiting"), ""),
    "members": [
        MEMBER,
        MEMBER
        | {"node_id": "cd" * 16, "name": "mini", "state": "dead", "self": False, "coordinator": False}
        | {"rank": None, "memory_bytes": 0, "chip": "", "model_problem": "it is not there"}
        | {"notes": ["RDMA is [off]"]},
    ],
}
MACHINE = Machine(
    "macos", "26.2", "25C56", "Mac15,14", "Apple M3 Ultra", 24, 60, 96 * 10**9, 80 * 10**9, 0, 72 * 10**9,
    "ac", "enabled", False, (Interface("en0", "10.0.0.1", 24, "ethernet", 10_000, True),), (), (),
)  # fmt: skip
RESULT: dict[str, Any] = {
    **{"nodes": ["ab" * 16, "cd" * 16], "backend": "jaccl", "kind": "JACCL mesh", "fast_fences": False},
    **{"metal": True, "at": 1_780_000_000, "collective_s": 195e-6, "sizes": [1024, 1 << 20, 1 << 24]},
    **{"sums_s": [2e-4, 4e-4, 2e-3], "gathers_s": [1e-4, 3e-4, 2.5e-3]},
}
BENCH = {**RESULT, "names": ["studio [left]", "mini"]}
SERVED: dict[str, object] = {
    **{"model": "org/model", "name": "org/model", "nodes": "auto", "replicas": 1, "on": [], "keep_s": None},
    **{"parallel": "auto", "split": "auto", "version": 3, "change": "added", "replaced": []},
    **{"coming": False, "downloads": False, "until_then": ""},
}
REMOVED: dict[str, object] = {
    **{"removed": "mini", "node_id": "cd" * 16, "let_in": [], "with_admitted": False},
    **{"held_authority": [], "others": 1, "saved_by": ["air"]},
}
CACHES: dict[str, object] = {
    **{"group": "org/model#0", "kept_bytes": 1_500_000_000, "evicted_bytes": 20_000_000},
    **{"spilled_bytes": 3_000_000_000, "reused": 1200, "reused_tokens": 34_000},
    **{"fetched": 300, "fetched_tokens": 9_000, "disk_bytes": 12 * 10**9, "disk_room_bytes": 50 * 10**9},
}
ELSEWHERE = {"group": "org/big#0", "owner": "mini [left]", "cached_tokens": 4096}
ON_DISK: dict[str, object] = {
    **{"model": "org/[model]", "blocks": 1234, "bytes": 12 * 10**9, "used_at": 1_780_000_000.0},
    **{"layouts": [{"rank": rank, "ranks": ranks} for rank, ranks in ((0, 1), (1, 2), (0, 2))]},
}


def on_ethernet(plan: dict[str, Any]) -> dict[str, Any]:
    """Give the second Mac an address of its own."""
    interface = {**asdict(MACHINE.interfaces[0]), "address": "10.0.0.2"}
    plan["nodes"][1]["machine"]["interfaces"] = [interface]
    return plan


NO_CHANGES: dict[str, dict[str, object]] = {"removable": {}, "removed": {}, "stored": {"elsewhere": []}}


class Admin(FakeAdmin):
    """Says what an agent of two Macs says."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = dict(NO_CHANGES)

    def _do(self, *what: str) -> dict[str, object]:
        super()._do(*what)
        answers: dict[str, dict[str, object]] = {
            "status": STATUS,
            "members": {"cluster": "c" * 16, "members": STATUS["members"]},
            "token": {"token": "TOKEN-1", "valid_s": 900},
            "serve": SERVED,
            "unload": {"unloaded": ["org/model"], "left": [], "cancelled": []},
            "drain": {"draining": True, "over": False, "open_requests": 2, "left_s": 9.7},
            "progress": {"draining": True, "over": True, "open_requests": 1, "left_s": 0.0},
            "let_in": {"name": "mini", "let_in": [{"node_id": "ef" * 16, "name": "air [x]"}]},
            "remove": REMOVED,
            "authority": {
                "name": "mini [x]",
                "node_id": "cd" * 16,
                "moved": what[2:] == ("yes", "yes"),
                "holders": ["studio", "mini [x]"],
            },
            "leave": {"left": "c" * 16, "members": 1},
            "caches": {
                "groups": [CACHES],
                "elsewhere": [ELSEWHERE],
                "disk": {"folder": "/home/kv-cache", "room_bytes": 50 * 10**9, "models": [ON_DISK]},
            },
            "caches/clear": {
                **{"groups": [CACHES], "elsewhere": [ELSEWHERE], "disk": [ON_DISK]},
                "other_macs": ["air", "mini [left]"],
            },
            "bench/fabric": BENCH,
            "plan/now": {"macs": ["mini"], "kind": "alone", "split": [], "why": "", "gives_way": []},
            "plan": {
                "fabric": [],
                "parallel": "auto",
                "fabric_networks": "any",
                "coordinator": MEMBER["node_id"],
                "nodes": [
                    {"node_id": node, "name": name, "machine": asdict(MACHINE), "held_bytes": 0}
                    for node, name in ((MEMBER["node_id"], "studio"), ("cd" * 16, "mini"))
                ],
            },
        }
        found = (answers | self.answers)[what[0]]
        return {"folder": str(cache_folder()), **found} if what[0] == "stored" else found


DESK = Path(__file__).parents[2] / "examples" / "desk.toml"


@contextmanager
def served(application: Starlette, sock: socket.socket, tls: ssl.SSLContext | None = None) -> Iterator[None]:
    """An application behind a real port."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    serving = serve(application, sock, stop, tls=tls, grace_s=0)
    thread = threading.Thread(target=lambda: loop.run_until_complete(serving))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
        loop.close()


class Agent:
    """A home whose agent answers."""

    def __init__(self, url: str) -> None:
        self.home, self.url, self.admin = Path(), url, Admin()

    def says(self, what: str, **changes: object) -> Agent:
        """Have it answer so, from now on."""
        usual = {"status": STATUS, "serve": SERVED, "remove": REMOVED}
        self.admin.answers[what] = usual.get(what, {}) | changes
        return self

    def shown(self, *args: str, width: int = 200) -> str:
        return mlxtp(self.home, *args, width=width).output


@contextmanager
def answering() -> Iterator[Agent]:
    sock = bind("127.0.0.1", 0)
    agent = Agent("http://{}:{}".format(*sock.getsockname()))
    with served(create_app(cast(Any, None), admin=agent.admin), sock):
        yield agent


@pytest.fixture(scope="module")
def running() -> Iterator[Agent]:
    with answering() as agent:
        yield agent


@pytest.fixture
def agent(running: Agent, tmp_path: Path) -> Iterator[Agent]:
    running.admin.asked.clear()
    running.admin.error = None
    running.admin.answers = dict(NO_CHANGES)
    running.home = tmp_path
    with announced(tmp_path, running.url, KEY):
        yield running


def mlxtp(home: Path, *args: str, width: int = 200) -> Result:
    return CliRunner().invoke(app, [*args, "--home", str(home)], env={"COLUMNS": str(width)})


def refusal(home: Path, *args: str, status: int = 1) -> str:
    result = mlxtp(home, *args)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    return " ".join(result.stderr.split())


def test_status_is_one_screen(agent: Agent) -> None:
    first, deployment, *_groups, second, fabric = (lines := agent.shown("status").splitlines())[:8]
    table = lines[8:]
    assert first == "ready org/model on 2 Macs, JACCL mesh   epoch 7"
    assert second == f"cluster {'c' * 16}, coordinated by studio [left]"
    assert deployment == "org/[model]: ready, replicas: 1 of 2, --nodes 2"
    assert fabric == "fabric: speed assumed; `mlxtp bench --fabric` measures it"
    assert table[0].split()[:4] == ["name", "state", "rank", "address"]
    assert "studio [left]" in table[1]
    assert "512 GB" in table[1]
    assert table[1].rstrip().endswith("this Mac, coordinator")
    assert table[2].split()[:2] == ["mini", "dead"]
    assert table[3:] == ["mini:", "  - it is not there", "mini:", "  - RDMA is [off]"]
    failed = agent.says("status", state="failed", model="", reason="rank 1 [x] is gone").shown("status")
    assert failed.startswith("failed   epoch 7\n")
    assert "rank 1 [x] is gone" in failed


def test_the_status_has_the_time_in_which_each_stage_computes(agent: Agent) -> None:
    ranks = [
        {"rank": rank, "stage_busy_us": busy, "stage_waiting_us": waiting}
        for rank, (busy, waiting) in enumerate([(300, 100), (1, 9), (0, 0)])
    ]
    shares = "of the time with requests: rank 0 busy 75%, waiting 25%; rank 1 busy 10%, waiting 90%"
    for groups, of in ((TWO_REPLICAS["groups"], " of org/[model]#0"), ([GROUP], "")):
        agent.says("status", ranks=ranks, deployments=[{**TWO_REPLICAS, "groups": groups}])
        assert agent.shown("status").splitlines()[1] == f"  stages{of}, {shares}"


def test_status_has_a_row_for_each_deployment_and_below_it_its_groups(agent: Agent) -> None:
    members = [{"node_id": "ef" * 16, "name": "air"}]
    other = {
        **TWO_REPLICAS,
        **{"name": "tiny", "model": "tiny", "replicas": {"ready": 1, "wanted": 0}, "pinned": False},
        **{"nodes": "auto", "keep_s": 600, "on": ["air"], "why": None},
        "groups": [{**GROUP, "id": "tiny#0", "members": members, "exposed": EXPOSED}],
    }
    works = [{**MEMBER, "works_for": ["org/[model]#0"]}, {**MEMBER, "name": "air", "works_for": ["tiny#0"]}]
    agent.says("status", deployments=[TWO_REPLICAS, other], members=works)
    lines = agent.shown("status", width=80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.rstrip() for line in lines[1:12]] == [
        "org/[model]: ready, replicas: 1 of 2, --nodes 2",
        "  #0 ready on studio [left] (owner) + mini, JACCL mesh, epoch 7",
        "     requests: 3 running, 1 waiting, 120 tokens/s, 4,096 tokens cached",
        "  #1 idle",
        "     air: 30.1 GB are needed, and 12.0 GB are free",
        "tiny: ready, replicas: 1, as many as fit, on air only, until it is unused for",
        "  600 s",
        "  #0 ready on air, JACCL mesh, epoch 7",
        "     requests: 3 running, 1 waiting, 120 tokens/s, 4,096 tokens cached",
        "     tensors cross Wi-Fi in the clear: other machines on it can compute prompts",
        "       and answers from them (--fabric-networks excludes it)",
    ]
    assert "works for" in "\n".join(lines)


LONG = "the model cannot be read: " + "word " * 40 + "and this is its end"


@pytest.mark.parametrize("command", [["status"], ["cluster", "members"]])
def test_a_long_error_has_lines_of_its_own(agent: Agent, command: list[str]) -> None:
    """Below the table, which it would squeeze; indented, and broken between words."""
    shown = []
    for problem in ("", LONG):
        mini = {**STATUS["members"][1], "model_problem": problem, "notes": []}
        agent.says(command[-1], **{**STATUS, "members": [MEMBER, mini]})
        shown.append(agent.shown(*command, width=80).splitlines())
    without, told = shown
    assert told[: len(without)] == without
    who, *below = told[len(without) :]
    assert who == "mini:"
    assert all(line.startswith("  ") for line in below)
    assert " ".join(" ".join(below).split()) == f"- {LONG}"


COUNTS = {
    "drafted": {"lookup": 0, "mtp": 40, "draft": 1000}, "accepted": {"lookup": 0, "mtp": 30, "draft": 50}
}  # fmt: skip
DRAFTS = {"group": "org/model#0", **COUNTS, "width": 2.24, "gain": 1.31, "note": ""}
NO_DRAFTS = {**DRAFTS, "drafted": dict.fromkeys(("lookup", "mtp", "draft"), 0), "note": "no head"}
OF_DRAFTS = "MTP head 75% of 40 right, draft model 5% of 1,000 right; 2.2 tokens a step and row at most"
NO_CACHES = {**dict.fromkeys(CACHES, 0), "group": "org/model#0"}
OTHER = {**CACHES, "group": "org/[other]#0", "fetched": 0, "disk_room_bytes": 0}
KEPT, REUSED = "1.5 GB kept", "20 MB evicted; 1,200 prompts began with 34,000 of their tokens"
OF_CACHES = f"{KEPT}, 12.0 GB of 50.0 GB on disk, {REUSED}, 9,000 of these from disk"
FASTER = "JACCL mesh of a + b: 2.1 s per chat request instead of 3.9"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"deployments": [{**TWO_REPLICAS, "groups": [{**GROUP, "faster": FASTER}]}]}, f"faster: {FASTER}"),
        ({"problem": "two Macs are one"}, "two Macs are one"),
        ({"left_wired": "90.0 GB stayed wired"}, "90.0 GB stayed wired"),
        ({"slow_link": "it carries 12.5 MB/s"}, "it carries 12.5 MB/s"),
        ({"fabric": RESULT}, "fabric: 195 µs a collective, measured 2026-"),
        ({"drafts": [NO_DRAFTS]}, "drafts: no head"),
        ({"drafts": [DRAFTS]}, f"drafts: {OF_DRAFTS}; recent steps gave 1.31 times the tokens of plain ones"),
        ({"drafts": [{**DRAFTS, "gain": 0.0}, NO_DRAFTS]}, f"drafts of org/model#0: {OF_DRAFTS}"),
        ({"drafts": [{**DRAFTS, "gain": 0.0}, NO_DRAFTS]}, "drafts of org/model#0: no head"),
        ({"caches": [CACHES]}, f"caches of earlier prompts: {OF_CACHES}"),
        ({"caches": [CACHES, OTHER]}, f"caches of earlier prompts of org/model#0: {OF_CACHES}"),
        ({"caches": [CACHES, OTHER]}, f"caches of earlier prompts of org/[other]#0: {KEPT}, {REUSED}"),
    ],
)
def test_the_status_says_what_is_special_and_nothing_of_what_is_not(
    agent: Agent, changes: dict[str, object], said: str
) -> None:
    assert said in " ".join(agent.says("status", **changes).shown("status").split())
    usual = agent.says("status", caches=[NO_CACHES], world_size=1).shown("status")
    assert not [word for word in ("fabric", "drafts", "earlier prompts") if word in usual]


def test_kept_caches_are_listed_and_cleared(agent: Agent) -> None:
    with _own_home(agent.home):
        listed = agent.shown("cache", "list").splitlines()
        assert listed[1].split() == [
            "org/model#0", "1.5", "GB", "20", "MB", "3.0", "GB", "1,200", "34,000", "9,000",
        ]  # fmt: skip
        assert listed[2] == (
            "org/big#0 keeps 4,096 tokens; its rank 0 is on mini [left], where `mlxtp cache list` has more"
        )
        assert listed[4] == "on this Mac's disk: 12.0 GB of 50.0 GB, in /home/kv-cache"
        row = ["org/[model]", "1,234", "12.0", "GB", "0", "of", "1;", "0,", "1", "of"]
        assert listed[6].split()[:10] == row
        narrow = agent.shown("cache", "list", width=80).splitlines()
        headers = [" ".join(line.split()) for line in narrow]
        assert headers[0] == "group kept evicted written prompts tokens reused from disk"
        assert narrow[1].startswith("org/model#0 ")
        assert "model blocks size ranks last used" in headers
        agent.admin.asked.clear()
        assert agent.shown("cache", "clear") == (
            "org/model#0: 1.5 GB dropped\norg/[model]: 12.0 GB removed from this Mac's disk\n"
            "org/big#0 has its rank 0 on mini [left]: clear it there\n"
            "not removed: what is on the disks of air, mini [left]; clear it there\n"
        )
        assert json.loads(agent.shown("cache", "clear", "org/model", "--json"))["groups"] == [CACHES]
        for options in (["--disk"], ["--memory"], ["--memory", "--disk"]):
            agent.shown("cache", "clear", *options)
        assert agent.admin.asked == [
            ("caches/clear", "", ""), ("caches/clear", "org/model", ""),
            ("caches/clear", "", "disk"), ("caches/clear", "", "memory"), ("caches/clear", "", ""),
        ]  # fmt: skip
        agent.admin.error = UserError("tiny has no rank 0 on this Mac")
        assert "tiny has no rank 0 on this Mac" in refusal(agent.home, "cache", "clear", "tiny")


def test_the_disk_is_listed_and_cleared_while_no_agent_runs(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("cache_disk = 0\n")
    kept = layout(tmp_path / "kv-cache", "a", "/models/[one]", sizes=(2_000_000,))
    (kept / ".unfinished").write_text("")
    layout(tmp_path / "kv-cache", "b", "/models/other")
    listed = mlxtp(tmp_path, "cache", "list").output
    assert "no group has its rank 0 on this Mac" in listed
    assert "on this Mac's disk: off, 2 MB left in " in " ".join(listed.split())
    assert "no mlxtp node runs" in refusal(tmp_path, "cache", "clear", "--memory")
    for said in (
        "/models/[one]: 2 MB removed from this Mac's disk\n",
        "nothing of it was on this Mac's disk\n",
    ):
        assert mlxtp(tmp_path, "cache", "clear", "/models/[one]").output == said
    assert not kept.exists()
    [left] = json.loads(mlxtp(tmp_path, "cache", "list", "--json").output)["disk"]["models"]
    assert left["model"] == "/models/other"
    mlxtp(tmp_path, "cache", "clear")
    assert mlxtp(tmp_path, "cache", "list").output.endswith("\non this Mac's disk: off\n")


def test_the_status_of_an_agent_that_keeps_to_itself(agent: Agent) -> None:
    own = ("state", "reason", "model", "epoch", "caches", "ranks", "drafts", "left_wired", "slow_link")
    deployments = [{**TWO_REPLICAS, "groups": [GROUP]}]
    alone = {name: STATUS[name] for name in own} | {"deployments": deployments}
    ring = "ready org/model, 2 ranks on this Mac, a ring over loopback"
    for size, kind, split, said in (
        (1, "", [], "ready org/model on this Mac"),
        (2, "a ring over loopback", [], ring),
        (2, "a ring over loopback", [40, 24], f"{ring}, pipeline of 40 + 24 layers"),
    ):
        agent.admin.answers["status"] = {**alone, "world_size": size, "kind": kind, "split": split}
        assert agent.shown("status") == f"{said}   epoch 7\n"


@pytest.mark.parametrize(
    ("served", "said"),
    [
        ({"change": "kept"}, "org/model is deployed already: 1 replica"),
        (
            {"change": "changed", "replicas": 3, "nodes": "2", "keep_s": 600},
            "org/model is changed: 3 replicas, each over 2 Macs, until it is unused for 600 s",
        ),
        ({"keep_s": 0}, "org/model is added: 1 replica, until it has answered"),
        ({"parallel": "pipeline"}, "org/model is added: 1 replica, as a pipeline"),
        ({"parallel": "tensor"}, "org/model is added: 1 replica, as tensor parallel"),
        ({"split": "40,24"}, "org/model is added: 1 replica, as a pipeline of 40,24 layers"),
        (
            {"replaced": ["tiny", "org/b"], "replicas": 0, "nodes": "1", "on": ["studio [left]"]},
            "org/model is added and replaces tiny and org/b: as many replicas as fit, each over 1 Mac, "
            "on studio [left] only",
        ),
        (
            {"downloads": True},
            "org/model is added: 1 replica; it is downloaded first, and `mlxtp status` shows the progress",
        ),
        (
            {"coming": True, "downloads": True, "until_then": "tiny"},
            "org/model is downloading, and served once complete; until then tiny is",
        ),
    ],
)
def test_serve_says_what_becomes_of_deployments(agent: Agent, served: dict[str, object], said: str) -> None:
    output = agent.says("serve", **served).shown("serve", "org/model")
    assert output.replace("\n", " ").startswith(said)


def test_unload_says_what_stays(agent: Agent) -> None:
    for unloaded, cancelled, said in (
        (["tiny"], [], "tiny unloaded"),
        ([], ["org/c"], "org/c is not served once it has come"),
    ):
        agent.says("unload", unloaded=unloaded, left=["org/a", "org/b"], cancelled=cancelled)
        assert agent.shown("unload", "tiny") == f"{said}; still deployed: org/a, org/b\n"


ADDED, UNLOADED = "org/model is added: 1 replica; ", "org/model unloaded; no model is deployed\n"
MEASURED, LEFT = (
    "JACCL mesh, jaccl: studio [left] + mini; default fences\n",
    f"this Mac left cluster {'c' * 16}\n",
)
WISHES = "--replicas 2 --on a,b --keep-alive 10m --replace"


@pytest.mark.parametrize(
    ("command", "asked", "said"),
    [
        ("serve org/model --nodes 2", "serve|org/model|2", f"{ADDED}`mlxtp status` shows the progress\n"),
        ("serve tiny", "serve|tiny|", ADDED),
        (f"serve tiny {WISHES}", "serve|tiny||replicas=2|on=a,b|keep=10m|only=yes", ADDED),
        ("unload", "unload||", UNLOADED),
        ("unload org/model", "unload|org/model|", UNLOADED),
        ("unload --all", "unload||yes", UNLOADED),
        ("token", "token", "TOKEN-1\n"),
        ("bench --fabric", "bench/fabric|", MEASURED),
        ("bench --fabric --model org/b", "bench/fabric|org/b", MEASURED),
        ("cluster remove mini", "remove|mini|", "mini is no longer a member\n"),
        ("cluster remove mini --with-admitted", "remove|mini|yes", "mini is no longer a member"),
        ("cluster leave", "leave|", LEFT),
        ("cluster leave --force", "leave|yes", LEFT),
        ("cluster members", "members", "name "),
    ],
)
def test_each_command_asks_and_says_what_came_of_it(
    agent: Agent, command: str, asked: str, said: str
) -> None:
    result = mlxtp(agent.home, *command.split())
    assert result.exit_code == 0
    assert result.output.startswith(said)
    assert agent.admin.asked == [tuple(asked.split("|"))]
    assert isinstance(json.loads(agent.shown(*command.split(), "--json")), dict)


LET_IN = [{"node_id": "ef" * 16, "name": "air [x]"}]
PROBLEM = "state.json [x] cannot be written"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"saved_by": []}, "it admitted air [x] (efefefef), still members"),
        ({"saved_by": []}, "no other Mac has this on its disk yet"),
        ({"with_admitted": True}, "nor are the Macs that it admitted: air [x] (efefefef)"),
        (
            {"held_authority": ["mini", "air [x]"]},
            "mini and air [x] held the cluster's authority and may still have its key",
        ),
        ({"problem": PROBLEM}, f"{PROBLEM}. The removal is on the disk of air; free space here"),
    ],
)
def test_what_a_removal_leaves_is_named(agent: Agent, changes: dict[str, object], said: str) -> None:
    agent.says("remove", let_in=LET_IN, others=2, **changes)
    lines = agent.shown("cluster", "remove", "mini", "--with-admitted").splitlines()
    assert [line for line in lines if line.startswith(said)], lines


@pytest.mark.parametrize("yes", [True, False])
def test_in_a_terminal_one_is_asked_of_them(agent: Agent, monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    asked: list[str] = []
    monkeypatch.setattr("typer.confirm", lambda words: (asked.append(words), yes)[1])
    monkeypatch.setattr(cluster, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    agent.shown("cluster", "remove", "mini")
    assert asked == ["mini admitted air [x] (efefefef). Remove them too?"]
    assert agent.admin.asked == [("let_in", "mini"), ("remove", "mini", "yes" if yes else "")]


def test_a_person_confirms_that_the_authority_is_handed_over(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = mlxtp(agent.home, "cluster", "authority", "add", "mini")
    assert (refused.exit_code, agent.admin.asked) == (1, [("authority", "mini", "", "")])
    assert "mini [x] would be able to make and remove members; --yes confirms that" in refused.output
    assert "to which member?" in refusal(agent.home, "cluster", "authority", "move", " ")
    added = agent.shown("cluster", "authority", "add", "mini", "--yes")
    assert added == "mini [x] has the key on its disk; studio and mini [x] can let Macs in\n"
    assert agent.admin.asked[-2:] == [("authority", "mini", "", ""), ("authority", "mini", "", "yes")]
    moved = agent.shown("cluster", "authority", "move", "mini", "--yes").splitlines()
    assert moved[1:] == ["this Mac has forgotten it; backups of this Mac still have it"]
    assert agent.admin.asked[-1] == ("authority", "mini", "yes", "yes")
    monkeypatch.setattr(cluster, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    before, asked = len(agent.admin.asked), []
    for yes in (False, True):

        def confirm(words: str, abort: bool, yes: bool = yes) -> None:
            asked.append(words)
            if not yes:
                raise typer.Abort

        monkeypatch.setattr("typer.confirm", confirm)
        agent.shown("cluster", "authority", "add", "mini")
    assert set(asked) == {"mini [x] will be able to make and remove members. Hand over the key?"}
    assert [each[3] for each in agent.admin.asked[before:]] == ["", "", "yes"]


def test_who_let_each_member_in_is_listed(agent: Agent) -> None:
    let_in = {"admitted_by": "ab" * 16, "admitted_by_name": "studio", "joined_from": "10.0.0.7"}
    members = [{**MEMBER, "name": "mini [x]", **let_in, "joined_at": 1_780_000_000}, MEMBER]
    output = agent.says("members", cluster="c" * 16, members=members).shown("cluster", "members")
    assert output.count("was admitted") == 1
    assert "mini [x] was admitted by studio from 10.0.0.7, at 2026-05-2" in output


def test_the_page_is_where_the_agent_is_with_its_key(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"{agent.url}/#key={quote(KEY)}"
    assert agent.shown("page") == f"{address}\n"
    assert json.loads(agent.shown("page", "--json")) == {"url": address}
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)) or len(opened) == 1)
    assert mlxtp(agent.home, "page", "--open").exit_code == 0
    assert f"no browser can be opened here; the page is at {address}" in refusal(agent.home, "page", "--open")
    assert opened == [address, address]


def test_a_drain_is_watched_to_the_end_of_the_agent(agent: Agent) -> None:
    """The agent lets go of its home when it ends; until then the command waits."""
    with ExitStack() as holding:
        holding.enter_context(_own_home(agent.home))
        done = threading.Event()
        said: list[Result] = []

        def drain() -> None:
            said.append(mlxtp(agent.home, "drain", "--within", "10", "--json"))
            done.set()

        thread = threading.Thread(target=drain)
        thread.start()
        assert not done.wait(1.0)
        assert agent.admin.asked == [("drain", "10"), ("progress",)]
    thread.join(WAIT_S)
    assert json.loads(said[0].stdout) == {"ended": True, "cut": 1}
    assert agent.shown("drain") == "mlxtp has stopped on this Mac; requests that were cut: 1\n"
    assert agent.admin.asked[2:] == [("drain", ""), ("progress",)]


def test_a_folder_is_served_by_its_path(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    agent.shown("serve", "model")
    assert agent.admin.asked == [("serve", str(tmp_path / "model"), "")]


def test_a_plan_for_the_members_that_are_there(agent: Agent) -> None:
    made = json.loads(agent.shown("plan", str(folder_of("llama-3.3-70b-4bit")), "--json"))
    assert {"studio", "mini"} >= set(made["alternatives"][0]["names"])
    assert made["now"]["macs"] == ["mini"]
    [_, (asked, model, described, *wishes)] = agent.admin.asked
    assert (asked, Path(model).name, wishes) == ("plan/now", "llama-3.3-70b-4bit", ["auto", "", "auto"])
    assert unpacked(b64decode(described)).shape("", 0).layers == 80


@pytest.mark.parametrize(
    ("now", "line"),
    [
        ({}, "on mini"),
        ({"macs": ["mini", "studio"], "split": [8, 2]}, "on mini + studio, pipeline of 8 + 2 layers"),
        ({"gives_way": ["a", "b"]}, "on mini. a and b would give way"),
        ({"macs": [], "why": "needs 9 GB"}, "nowhere: needs 9 GB"),
    ],
)
def test_a_plan_says_where_a_model_runs_beside_others(
    agent: Agent, now: dict[str, object], line: str
) -> None:
    agent.says(
        "plan/now", **{"macs": ["mini"], "kind": "alone", "split": [], "why": "", "gives_way": []} | now
    )
    said = agent.shown("plan", "tiny")
    assert f"served now, beside what runs: {line}\n" in said
    alone = agent.shown("plan", "tiny", "--machines", str(DESK))
    assert "served now" not in alone, "these Macs serve nothing"


def test_a_plan_has_macs_share_a_model_as_the_agent_does_unless_a_user_says_how(agent: Agent) -> None:
    told = on_ethernet(asyncio.run(agent.admin.carry_out(PresentMachines())))
    agent.admin.answers["plan"] = told
    agent.says("settings", settings={"model_folders": []}, origins={})

    def is_pipeline(*args: str) -> bool:
        made = json.loads(agent.shown("plan", "tiny", "--json", *args))
        return bool(made["chosen"]["split"])

    assert not is_pipeline()
    told["parallel"] = "pipeline"
    assert is_pipeline()
    assert not is_pipeline("--parallel", "auto")
    assert not is_pipeline("--spread", "1")
    assert not is_pipeline("--machines", str(DESK))
    told["parallel"] = "tensor"
    assert is_pipeline("--split", "2,2")


def test_a_fabric_in_a_pipe_can_be_pasted(agent: Agent) -> None:
    console = Console(width=80, highlight=False)
    with console.capture() as drawn:
        for part in bench.fabric_shown(BENCH):
            console.print(part)
    bars = [line.count("█") for line in drawn.get().splitlines()[2:5]]
    assert (bars, bars[-1]) == (sorted(bars), 24), "on a screen with a picture"
    shown = agent.shown("bench", "--fabric", width=40).splitlines()
    assert shown[1:4] == ["", "| bytes | sum | a link | gather | a link |", "|--:|--:|--:|--:|--:|"]
    assert shown[6] == "| 16 MiB | 2 ms | 8.39 GB/s | 2.5 ms | 6.71 GB/s |"
    assert shown[8].startswith("a collective within a forward: 195 µs")
    assert len(shown) == 9


def test_a_plan_counts_with_what_was_measured(agent: Agent) -> None:
    """Two Macs on Ethernet share whole layers only, until it turns out that theirs is a fast one."""
    told = on_ethernet(asyncio.run(agent.admin.carry_out(PresentMachines())))
    agent.admin.answers["plan"] = told
    args = ("plan", str(folder_of("llama-3.3-70b-4bit")), "--json")
    apart = json.loads(agent.shown(*args))
    assert apart["chosen"]["split"]
    told["fabric_networks"] = "private"  # the agent's setting counts, unless the plan has its own
    for options, macs in (((), 1), (("--fabric-networks", "any"), 2)):
        assert json.loads(agent.shown(*args, *options))["chosen"]["nodes"] == macs
    told["fabric_networks"] = "any"
    kind = "ring over Ethernet"
    fast = {**RESULT, "backend": "ring", "kind": kind, "collective_s": 3e-5}
    told["fabric"] = [fast]
    together = json.loads(agent.shown(*args))
    assert (together["chosen"]["kind"], together["chosen"]["nodes"]) == (kind, 2)
    assert together["chosen"]["speed"]["measured"] is True
    shown = " ".join(agent.shown(*args[:-1]).split())
    assert "collectives, fences included (measured)" in shown
    fast_fences = json.loads(agent.shown(*args, "--fast-fences"))["chosen"]
    assert fast_fences["speed"]["measured"] is False  # those were not measured


def test_what_the_agent_refuses_is_one_line_and_keeps_its_code(agent: Agent) -> None:
    words = "no member is called [x]; there are studio (abababab)"
    agent.admin.error = UserError(words, Code.NOT_READY)
    for args in (["status"], ["cluster", "remove", "[x]"], ["token"]):
        assert refusal(agent.home, *args) == f"mlxtp: {words}"
        told = json.loads(mlxtp(agent.home, *args, "--json").stdout)
        assert told == {"error": {"code": "not_ready", "message": words}}


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        *((["serve", "tiny", "--replicas", count], 2, f"--replicas: {count!r}") for count in ("65", "0")),
        (["serve", "tiny", "--keep-alive", "soon"], 2, "--keep-alive: 'soon'"),
        *(
            (["serve", "tiny", "--nodes", count], 2, f"{count!r} is not auto, all, or a number from 1 to 8")
            for count in ("foo", "9", "0", "")
        ),
        *((["serve", "tiny", "--on", names], 2, f"--on: {names!r}") for names in ("", ",", "a,,b", "a, a")),
        *((["drain", "--within", s], 2, "mlxtp: --within: ") for s in ("soon", "-1", "nan", "100000")),
        *(
            (
                ["cluster", "remove", name],
                1,
                "which member? Its name, or the beginning of its id: see `mlxtp cl",
            )
            for name in ("", " ")
        ),
        (["plan", ""], 1, "mlxtp: MODEL is empty; give a folder or "),
    ],
)
def test_a_mistake_of_typing_is_named_and_nothing_is_asked(
    agent: Agent, command: list[str], status: int, said: str
) -> None:
    assert said in refusal(agent.home, *command, status=status)
    assert agent.admin.asked == []


def test_a_plan_finds_a_plain_name_where_the_agent_does(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    copy = (embedded_model_path() / "config.json").read_text()
    (tmp_path / "models" / "small" / "config.json").write_text(copy)
    plan = ("plan", "small", "--json")
    agent.says("settings", settings={"model_folders": []}, origins={})
    assert json.loads(agent.shown(*plan))["error"]["code"] == "model_not_found"
    agent.says("settings", settings={"model_folders": [str(tmp_path / "models")]}, origins={})
    assert json.loads(agent.shown(*plan))["model"]["name"] == "small"
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.toml").write_text(f'model_folders = ["{tmp_path / "models"}"]')
    assert json.loads(mlxtp(alone, *plan).output)["model"]["name"] == "small"


COMMANDS = (
    ["status"],
    ["serve", "tiny"],
    ["unload"],
    ["drain"],
    ["token"],
    ["bench", "--fabric"],
    ["cluster", "members"],
    ["cluster", "remove", "x"],
)


def test_without_an_agent_each_command_says_how_to_start_one(tmp_path: Path) -> None:
    for args in COMMANDS:
        said = refusal(tmp_path / "home", *args)
        assert said.startswith(f"mlxtp: no mlxtp node runs with home {tmp_path / 'home'}; start one with")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"url": 5}', '{"url": "http://127.0.0.1:1"}', "\udcff", "[" * 100_000],
    ids=lambda content: content[:30],
)
def test_a_file_that_no_agent_wrote(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content, errors="surrogateescape")
    assert "no mlxtp node runs with home" in refusal(tmp_path, "status")


@contextmanager
def stranger(answer: bytes) -> Iterator[str]:
    """Another program at the port that the agent had before it was killed."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve_once() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(answer)

        thread = threading.Thread(target=serve_once)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(WAIT_S)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhi!!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnull",
        b'HTTP/1.1 401 Unauthorized\r\nContent-Length: 22\r\n\r\n{"error": {"message":1}',
        b'HTTP/1.1 401 Unauthorized\r\nContent-Length: 17\r\n\r\n{"error": "none"}',
    ],
)
def test_after_a_kill_another_program_may_answer_there(tmp_path: Path, answer: bytes) -> None:
    with stranger(answer) as url:
        (tmp_path / FILE).write_text(json.dumps({"url": url, "key": "old", "certificate": ""}))
        said = refusal(tmp_path, "status")
        assert said.startswith(f"mlxtp: the agent of {tmp_path} does not answer at {url}")


def test_an_error_in_a_form_of_its_own_is_said_and_no_url_that_leads_nowhere_is_a_bug(tmp_path: Path) -> None:
    body = b'{"error": ["odd"]}'
    with stranger(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)) as url:
        (tmp_path / FILE).write_text(json.dumps({"url": url, "key": "old", "certificate": ""}))
        assert "odd" in refusal(tmp_path, "status")
    for url in ("http://127.0.0.1:1", "http://127.0.0.1:port", "nonsense", "http://[::1"):
        (tmp_path / FILE).write_text(json.dumps({"url": url, "key": "old", "certificate": ""}))
        assert f"does not answer at {url}" in refusal(tmp_path, "status")


def test_leaving_while_no_agent_runs(tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    store.found_cluster()
    assert "only this Mac holds its cluster's authority" in refusal(tmp_path / "home", "cluster", "leave")
    assert store.load().membership is not None
    left = mlxtp(tmp_path / "home", "cluster", "leave", "--force")
    assert "run `mlxtp cluster remove`" in " ".join(left.output.split())
    assert store.load().membership is None
    for home in (tmp_path / "home", tmp_path / "typo"):
        assert "belongs to no cluster" in refusal(home, "cluster", "leave")
    assert not (tmp_path / "typo").exists()


def test_the_authority_s_holder_leaves_without_force_if_none_needs_it(tmp_path: Path) -> None:
    """No other Mac belongs to it, or another one has the key, too."""
    home = tmp_path / "home"
    store = Store(home)

    def remember(*others: str, holds: bool = False) -> None:
        entries = [RosterEntry(store.load().node_id, "mini", "key", False, 1)]
        entries += [
            RosterEntry(each, "air", each, False, 1, holds=holds, holds_in=2, holding="signed")
            for each in others
        ]
        save(home, SavedState(ClusterState(roster=Roster().merged(entries))))

    store.found_cluster()
    remember("ab" * 16)
    assert "only this Mac holds its cluster's authority" in refusal(home, "cluster", "leave")
    remember()
    left = mlxtp(home, "cluster", "leave")
    assert (left.exit_code, left.stderr) == (0, "")
    assert left.output.startswith("this Mac left cluster ")
    assert "cluster remove" not in left.output
    assert store.load().membership is None
    store.found_cluster()
    remember("ab" * 16, holds=True)
    assert "also run `mlxtp cluster remove`" in mlxtp(home, "cluster", "leave").output


def test_an_agent_that_lives_but_does_not_answer_keeps_its_identity(tmp_path: Path) -> None:
    """It holds the files; taking them away behind its back breaks it."""
    store = Store(tmp_path)
    store.found_cluster()
    (tmp_path / FILE).write_text(json.dumps({"url": "http://127.0.0.1:1", "key": "k", "certificate": ""}))
    with _own_home(tmp_path):
        assert agent_runs(tmp_path)
        assert "does not answer" in refusal(tmp_path, "cluster", "leave", "--force")
    assert not agent_runs(tmp_path)
    assert store.load().membership is not None
    assert mlxtp(tmp_path, "cluster", "leave", "--force").exit_code == 0


def test_where_an_agent_answers_is_for_its_user_only_and_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text("left by one that was killed")
    with announced(tmp_path, "http://127.0.0.1:1", KEY):
        assert path.stat().st_mode & 0o777 == 0o600
        assert json.loads(path.read_text())["key"] == KEY
    assert not path.exists()
    with announced(tmp_path, "http://127.0.0.1:1", KEY):
        path.unlink()  # tidied up: no reason to fail at the end


def test_a_home_that_takes_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "agent.draft").mkdir()
    with pytest.raises(UserError, match=r"--home .*: agent.json cannot be written"), ExitStack() as stack:
        stack.enter_context(announced(tmp_path, "http://127.0.0.1:1", KEY))


@pytest.mark.parametrize(
    ("typed", "understood"),
    [
        ("node --join", "node --join="),
        ("node --join TOKEN", "node --join TOKEN"),
        ("node --join -", "node --join -"),
        ("node --join - --home x", "node --join - --home x"),
        ("node --join --home x", "node --join= --home x"),
        ("node --join=TOKEN --home x", "node --join=TOKEN --home x"),
        ("node --home x --join", "node --home x --join="),
        ("node", "node"),
    ],
)
def test_options_with_and_without_a_value(typed: str, understood: str) -> None:
    assert _with_values(typed.split()) == understood.split()
