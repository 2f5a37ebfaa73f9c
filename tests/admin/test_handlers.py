"""Requests of users to one member of a cluster, and its refusals."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlxtp.admin.handlers import Admin, handlers_of
from mlxtp.cluster import state_file
from mlxtp.cluster.cluster_state import PINNED
from mlxtp.cluster.introduction import flags_of, versions_here
from mlxtp.cluster.state_changes import RosterProofs
from mlxtp.cluster.state_file import RosterSaved, load
from mlxtp.config import Settings
from mlxtp.errors import Code, RequestError, UserError
from mlxtp.groups.health import ServingState
from mlxtp.models.hub_cache import Repo
from mlxtp.models.inspect import ModelSource
from mlxtp.placement.model_shape import DescribedModel
from mlxtp.text.tokenizer import Text
from mlxtp.verbs import (
    CheckRemovable,
    HandOver,
    LeaveCluster,
    LetIn,
    ListMembers,
    MakeToken,
    PlanNow,
    PresentMachines,
    RemoveMember,
    Serve,
    Status,
    UnloadModel,
)
from mlxtp.wire.cluster_messages import Deployments, Members, ModelStatus, RosterEntry

from ..cluster.deployed import only
from ..groups.one_node import A, B, Node, alone, play
from ..groups.scenes import run
from ..hub import COMMIT
from ..placement.made_up_models import llama
from ..played import scenes
from ..wire import members

played = scenes(play, "tmp_path", "member")


def play_founder(home: Path, story: Callable[[Node, members.Member], Awaitable[None]]) -> None:
    first = members.founder(home)
    play(home, first, lambda node: story(node, first))


played_by_founder = scenes(play_founder, "tmp_path", stages=2)


NAME = "some-body/tiny"


@played()
async def test_the_wanted_model_is_told_to_all_and_once(node: Node, member: members.Member) -> None:
    admin, a = Admin(node.parts, member.store), node.meet(A)
    assert await admin.models.serve(Serve("tiny", nodes="2")) == {
        **{"model": "tiny", "name": "tiny", "nodes": "2", "replicas": 1, "on": [], "keep_s": None},
        **{"version": 1, "change": "added", "replaced": [], "until_then": ""},
        **{"coming": False, "downloads": False, "parallel": "auto", "split": "auto"},
    }
    again = await admin.models.serve(Serve("tiny", nodes="02"))
    assert (again["version"], again["change"]) == (1, "kept")
    assert (await admin.models.serve(Serve("tiny")))["version"] == 1
    node.group.supervisor.status.state = ServingState.FAILED
    again = await admin.models.serve(Serve("tiny"))
    assert again["version"] == 2, "asking again is how a failed group is tried again"
    assert admin.models.unload(UnloadModel()) == {
        **{"model": "", "nodes": "auto", "version": 3},
        **{"unloaded": ["tiny"], "left": [], "cancelled": []},
    }
    told = [[(row.version, row.model) for row in table.rows] for table in a.heard(Deployments)]
    assert told == [[], [(1, "tiny")], [(2, "tiny")], [(3, "")]]


@played()
async def test_each_verb_has_a_handler_which_gets_it(node: Node, member: members.Member) -> None:
    admin = Admin(node.parts, member.store)
    with pytest.raises(KeyError, match="ModelsOnDisk"):
        handlers_of(admin, admin.plans, admin.members, admin.caches)
    assert (await admin.carry_out(Serve("tiny", only=True)))["name"] == "tiny"
    assert (await admin.carry_out(Status()))["state"]


@played()
async def test_of_several_models_one_is_unloaded_by_name_or_all(node: Node, member: members.Member) -> None:
    admin, desired = Admin(node.parts, member.store), node.parts.node.desired
    llama = "mlx-community/Llama-3.2-1B-Instruct-4bit"
    desired.serve(llama)
    assert (await admin.models.serve(Serve("llama3.2:1b")))["model"] == llama
    assert admin.models.unload(UnloadModel("llama-3.2-1b"))["unloaded"] == [llama]
    with pytest.raises(UserError, match=r"tiny is not deployed\. Deployed models: none"):
        admin.models.unload(UnloadModel("tiny"))
    desired.serve("tiny", nodes="2")
    desired.serve("org/one@main", keep_s=600)
    desired.serve("org/two")
    assert admin.models.unload(UnloadModel("org/two")) == {
        **{"model": "tiny", "nodes": "2", "version": 6},
        **{"unloaded": ["org/two"], "left": ["tiny", "org/one@main"], "cancelled": []},
    }
    with pytest.raises(UserError, match="several models are deployed: tiny, org/one"):
        admin.models.unload(UnloadModel())
    with pytest.raises(UserError, match="Deployed models: tiny, org/one"):
        admin.models.unload(UnloadModel("org/two"))
    assert admin.models.unload(UnloadModel(everything=True))["model"] == ""
    desired.serve("org/one@main")
    assert admin.models.unload(UnloadModel("org/one@other"))["model"] == ""


@played()
async def test_a_split_holds_until_something_contradicts_it(node: Node, member: members.Member) -> None:
    admin = Admin(node.parts, member.store)
    for parallel, split, nodes, wrong in (
        ("", "3,2", "", r"the split 3,2 has 5 layers, and tiny has 4"),
        ("tensor", "3,1", "", r"--split 3,1 is for a pipeline, and --parallel is tensor"),
        ("", "2,1,1", "2", r"--split 2,1,1 is for 3 Macs, and 2 are to share the model"),
        ("pipeline", "", "1", r"--parallel pipeline takes 2 Macs or more, and 1 is to serve"),
        ("both", "", "", r"--parallel: 'both' is not one of auto, tensor, pipeline"),
        ("", "4", "", r"--split: '4' is not auto, nor the layers of 2 to 8 Macs, such as 40,24,16"),
        ("", "4,0", "", r"--split: '4,0' is not auto, nor"),
    ):
        with pytest.raises(UserError, match=wrong):
            await admin.models.serve(Serve("tiny", nodes or None, parallel or None, split or None))
    desired, found = node.parts.node.desired, []
    for asked in (
        {"nodes": "2", "parallel": "tensor"}, {"split": "2,1,1"}, {"nodes": "3"}, {"nodes": "2"},
        {"split": "3,1"}, {"parallel": "tensor"}, {"nodes": "1"}, {"parallel": "pipeline"},
        {"nodes": "1"}, {"split": "3,1"}, {"parallel": "auto"},
    ):  # fmt: skip
        row = desired.serve("tiny", **asked)
        found.append((row.parallel, row.split, row.nodes))
    assert found == [
        ("tensor", "auto", "2"), ("", "2,1,1", "auto"), ("", "2,1,1", "3"), ("", "auto", "2"),
        ("", "3,1", "auto"), ("tensor", "auto", "auto"), ("tensor", "auto", "1"),
        ("pipeline", "auto", "auto"), ("", "auto", "1"), ("", "3,1", "auto"),
        ("auto", "auto", "auto"),
    ]  # fmt: skip


@played()
async def test_a_deployment_is_changed_by_what_is_named_and_replaces_others_only_on_request(
    node: Node, member: members.Member
) -> None:
    admin, table = Admin(node.parts, member.store), node.parts.node.desired
    me = node.parts.node.node_id
    await admin.models.serve(Serve("tiny"))
    node.parts.node.desired.serve("org/one")
    node.parts.node.settings = replace(node.parts.node.settings, parallel="pipeline")
    told = await admin.models.serve(Serve("tiny", nodes="1", replicas="2", on=f" {me[:6]} ", keep="10m"))
    assert {name: told[name] for name in ("change", "nodes", "parallel", "replicas", "on", "keep_s")} == {
        **{"change": "changed", "nodes": "1", "parallel": "auto", "replicas": 2, "keep_s": 600},
        "on": [node.parts.node.name_of(me)],
    }
    assert [row.name for row in table.table.live()] == ["org/one", "tiny"]
    told = await admin.models.serve(Serve("tiny", on="any", only=True))
    assert (told["replaced"], told["on"], told["replicas"]) == (["org/one"], [], 2)
    assert told["keep_s"] is None
    assert [row.name for row in table.table.live()] == ["tiny"]
    for count in (1, 2):
        told = await admin.models.serve(Serve("tiny", again=True))
        [row] = table.table.live()
        assert (row.again, told["change"], "again" in told) == (count, "changed", False)
    with pytest.raises(UserError, match=r"--on mini: no member is called that; the members are .+"):
        await admin.models.serve(Serve("tiny", on="mini"))
    for names, wrong in (
        (" ", "' ' names no Mac"),
        (",", "',' names no Mac"),
        (f"{me},,{me}", f"'{me},,{me}' has an empty name"),
        (f"{me},", f"'{me},' has an empty name"),
        (f"{me}, {me}", f"'{me}, {me}' has {me} twice"),
        (f"{me[:6]},{me}", f"{me[:6]} and {me} are one Mac"),
        (f"any,{me}", "any stands for all Macs, so it stands alone"),
    ):
        with pytest.raises(UserError, match=f"--on: {wrong}"):
            await admin.models.serve(Serve("tiny", on=names))
    with pytest.raises(UserError, match="--replicas: '65'"):
        await admin.models.serve(Serve("tiny", replicas="65"))


@played()
async def test_a_member_that_could_not_get_it_tries_again_when_it_is_asked_for_again(node: Node) -> None:
    cluster, a = node.parts, node.meet(A)
    node.hear(a, *only(7, A, "org/model", "2").messages())
    node.group.supervisor.status.state = ServingState.STARTING
    before = ModelStatus("org/before", "", "no room for what was wanted before")
    node.hear(a, before, ModelStatus("org/model", "f", ""))
    wanted = cluster.node.desired

    def serves(**how: str) -> int:
        wanted.serve("org/model", **how)
        return wanted.table.newest

    assert (serves(), serves(nodes="2")) == (7, 7)
    assert [[row.version for row in table.rows] for table in a.heard(Deployments)] == [[], [7]]
    node.group.supervisor.status.state = ServingState.READY
    node.hear(a, ModelStatus("org/model", "", "no room"))
    assert serves(nodes="2") == 8
    node.hear(a, ModelStatus("org/model", "", ""))
    assert serves(nodes="2") == 8, "it has not said yet what came of that"
    assert serves(nodes="auto") == 9
    node.group.supervisor.status.state = ServingState.FAILED
    assert serves(nodes="auto") == 10


@pytest.mark.parametrize(
    ("model", "nodes"),
    [
        *((name, "") for name in ("", "x" * 1001, "a\nb", "\ud800", "tinny")),
        *(("tiny", nodes) for nodes in ("0", "9", "both")),
    ],
    ids=["nothing", "long", "two lines", "half a letter", "a typo", "no Mac", "nine Macs", "a word"],
)
@played()
async def test_a_choice_that_makes_no_sense_changes_nothing(
    node: Node, member: members.Member, model: str, nodes: str
) -> None:
    a = node.meet(A)
    with pytest.raises(UserError):
        await Admin(node.parts, member.store).models.serve(Serve(model, nodes=nodes))
    node.tick()
    assert node.parts.node.desired.table.newest == 0
    assert node.parts.node.links.nodes() == {A}
    assert {table.rows for table in a.heard(Deployments)} == {()}


@played()
async def test_a_member_is_named_by_name_or_by_the_beginning_of_its_id(
    node: Node, member: members.Member, first: members.Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "ELSEWHERE_S", 0.0)
    sign = RosterProofs(first.identity).admission
    admin, cluster = Admin(node.parts, member.store), node.parts
    a, _ = node.meet(A), node.meet(B)
    twins = [RosterEntry(f"{i}" * 32, name, f"{i}" * 64, False, 9) for i, name in ((1, "mini"), (2, "mini"))]
    odd = RosterEntry("3" * 32, "ff", "3" * 64, False, 9)
    node.hear(a, Members(tuple(map(sign, (*twins, odd)))))
    for wrong, words in (
        ("", "more than one member is called ''; there are "),
        ("nobody", "no member is called 'nobody'; there are "),
        ("mini", "more than one member is called 'mini'"),
        ("studio", "this Mac itself leaves with `mlxtp cluster leave`"),
    ):
        with pytest.raises(UserError, match=words):
            await admin.members.remove(RemoveMember(wrong))
    with pytest.raises(UserError, match="this Mac hands the key over; name another member"):
        await admin.members.hand_over(HandOver("studio"))
    assert len(cluster.node.replica.roster.members()) == 6
    removed = [await admin.members.remove(RemoveMember(each)) for each in ("ff", "ff", "1111", "mini")]
    called = [each["removed"] for each in removed]
    assert called == ["ff", "mac-f", "mini (11111111)", "mini"]  # first by its name
    assert [each["node_id"] for each in removed] == ["3" * 32, B, "1" * 32, "2" * 32]
    assert removed[-1]["saved_by"] == []
    assert set(cluster.node.replica.roster.members()) == {cluster.node.node_id, A}
    again = await admin.members.remove(RemoveMember("mini"))
    assert again["node_id"] == "2" * 32, "of those that were removed, the last"
    assert again["held_authority"] == []


@played()
async def test_whom_a_member_let_in_is_told_and_goes_with_it_if_that_is_asked(
    node: Node, tmp_path: Path, member: members.Member, first: members.Member
) -> None:
    proofs = RosterProofs(first.identity)

    def joined(number: int, name: str, by: str) -> RosterEntry:
        entry = RosterEntry(f"{number}" * 32, name, f"{number}" * 64, False, 10 + number)
        return proofs.admission(entry, by, "10.0.0.7", 1_780_000_000)

    admin, cluster = Admin(node.parts, member.store), node.parts
    a = node.meet(A)
    mini, air, max_, other = (f"{number}" * 32 for number in range(1, 5))
    node.hear(a, Members((joined(1, "mini", A), joined(2, "air", mini), joined(3, "max", air))))
    node.hear(a, Members((joined(4, "other", A),)))
    [row] = [each for each in admin.members.roster(ListMembers())["members"] if each["name"] == "air"]
    about = {name: row[name] for name in ("admitted_by", "admitted_by_name", "joined_from", "joined_at")}
    assert list(about.values()) == [mini, "mini", "10.0.0.7", 1_780_000_000]
    let_in = [{"node_id": air, "name": "air"}, {"node_id": max_, "name": "max"}]
    assert admin.members.let_in(LetIn("mini")) == {"name": "mini", "let_in": let_in}
    removing = asyncio.ensure_future(admin.members.remove(RemoveMember("mini", with_admitted=True)))
    await asyncio.sleep(0)
    digest = cluster.node.replica.roster.digest()
    node.hear(a, RosterSaved(digest ^ 1))
    await asyncio.sleep(0)
    assert not removing.done(), "what the other has on its disk is something else"
    node.hear(a, RosterSaved(digest))
    answer = await removing
    assert (answer["let_in"], answer["with_admitted"]) == (let_in, True)
    assert (answer["saved_by"], answer["others"]) == (["mac-a"], 2)
    assert set(cluster.node.replica.roster.members()) == {cluster.node.node_id, A, other}
    node.tick()
    saved = [report.roster for report in a.heard(RosterSaved)]
    assert saved[-1] == digest, "this one's disk has it, too"
    assert load(tmp_path)[0].beliefs.roster.digest() == digest
    five = "5" * 32
    node.hear(a, Members((joined(5, "five", other),)))
    removing = asyncio.ensure_future(admin.members.remove(RemoveMember("other")))
    await asyncio.sleep(0)
    node.hear(a, RosterSaved(cluster.node.replica.roster.digest()))
    assert (await removing)["let_in"] == [{"node_id": five, "name": "five"}]
    assert set(cluster.node.replica.roster.members()) == {cluster.node.node_id, A, five}


@played()
async def test_a_removal_that_no_disk_has_is_refused_until_one_has_it(
    node: Node, tmp_path: Path, member: members.Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_home: Path, _kept: state_file.SavedState) -> None:
        raise UserError("state.json cannot be written: No space left on device")

    remove, here = Admin(node.parts, member.store).members.remove, node.parts.node
    node.meet(B)
    node.parts.node.links.cut(B, UserError("it is off"))
    with monkeypatch.context() as patched:
        patched.setattr(state_file, "save", full)
        for _ in range(2):
            with pytest.raises(
                UserError, match=r"mac-f is removed until this agent restarts, .* state\.json cannot be"
            ):
                await remove(RemoveMember("mac-f"))
        a = node.meet(A)
        removing = asyncio.ensure_future(remove(RemoveMember("mac-f")))
        await asyncio.sleep(0.1)
        node.hear(a, RosterSaved(here.replica.roster.digest()))
        answer = await removing
        assert "No space left" in answer["problem"]
        assert answer["saved_by"] == ["mac-a"]
    await here.save()  # as the next round does
    assert (await remove(RemoveMember("mac-f")))["problem"] == ""
    assert B not in load(tmp_path)[0].beliefs.roster.members()


def test_leaving_is_told_to_the_others_and_ends_the_agent(tmp_path: Path) -> None:
    first = members.founder(tmp_path)
    second = members.member_of(first, tmp_path)

    async def story(node: Node) -> None:
        a = node.meet(A)
        left = Admin(node.parts, second.store).members.leave(LeaveCluster())
        assert left == {"left": second.identity.cluster_id, "members": 1}
        assert node.parts.node.over.done()
        assert second.store.load().membership is None
        entries = {entry.node_id: entry for each in a.heard(Members) for entry in each.entries}
        assert entries[node.parts.node.node_id].removed

    play(tmp_path, second, story)


@played_by_founder()
async def test_the_last_holder_of_the_authority_leaves_by_force(node: Node, first: members.Member) -> None:
    admin = Admin(node.parts, first.store)
    node.meet(A)
    with pytest.raises(UserError, match="only this Mac holds the cluster's authority"):
        admin.members.leave(LeaveCluster())
    assert not node.parts.node.over.done()
    assert first.store.load().authority is not None
    assert admin.members.leave(LeaveCluster(force=True))["members"] == 1
    assert first.store.load().authority is None


@played_by_founder()
async def test_a_lone_mac_may_always_leave(node: Node, first: members.Member) -> None:
    assert Admin(node.parts, first.store).members.leave(LeaveCluster())["members"] == 0
    assert node.parts.node.over.done()


@played()
async def test_what_is_told_about_the_cluster_can_be_told_as_json(
    node: Node, member: members.Member, weights: ModelSource
) -> None:
    admin = Admin(node.parts, member.store)
    node.meet(A)
    node.lead(weights)
    status = json.loads(json.dumps(admin.status(Status())))
    assert status["state"]
    assert [each["model"] for each in status["deployments"]] == ["tiny"]
    rows = {row["name"]: row for row in status["members"]}
    who = (rows["studio"]["self"], rows["studio"]["coordinator"], rows["mac-a"]["self"])
    assert who == (True, True, False)
    assert rows["mac-a"]["address"] == "127.0.0.1"
    assert json.loads(json.dumps(admin.members.roster(ListMembers())))["members"] == status["members"]
    plan = json.loads(json.dumps(admin.plans.plan(PresentMachines())))
    assert plan["coordinator"] == node.parts.node.node_id
    assert sorted(each["name"] for each in plan["nodes"]) == ["mac-a", "studio"]
    small = b64encode(DescribedModel(llama(num_hidden_layers=2), 1 << 30, mtp=False).packed()).decode()
    placed = json.loads(json.dumps(admin.plans.plan_now(PlanNow("other", small))))
    assert (placed["macs"], placed["why"], placed["gives_way"]) == (["mac-a"], "", [])
    whole = admin.plans.plan_now(PlanNow("other", small, nodes="3"))
    assert (whole["macs"], "3" in whole["why"]) == ([], True)
    for wrong in ("!", "eJw="):
        with pytest.raises(RequestError, match="described: "):
            admin.plans.plan_now(PlanNow("other", wrong))


def test_an_agent_that_keeps_to_itself_says_so(tmp_path: Path) -> None:
    async def scene() -> None:
        parts = alone(tmp_path)
        admin = Admin(parts, cast(Any, None))
        status = json.loads(json.dumps(admin.status(Status())))
        assert status["state"] == "starting"
        assert "members" not in status
        for ask in (
            lambda: admin.members.roster(ListMembers()),
            lambda: admin.members.let_in(LetIn("x")),
            lambda: admin.members.leave(LeaveCluster()),
        ):
            with pytest.raises(UserError, match="keeps to this Mac") as refused:
                ask()
            assert refused.value.code is Code.NOT_SUPPORTED
        with pytest.raises(UserError, match="keeps to this Mac"):
            await admin.members.token(MakeToken())
        with pytest.raises(UserError, match="keeps to this Mac"):
            await admin.members.remove(RemoveMember("x"))
        assert [each["name"] for each in admin.plans.plan(PresentMachines())["nodes"]] == ["studio"]
        assert admin.models.unload(UnloadModel())["model"] == ""
        await parts.close()

    run(scene())


def test_only_settings_that_ranks_must_have_in_common_are_compared(tmp_path: Path) -> None:
    plain = Settings(tmp_path, "127.0.0.1", 52415, 1, "tiny")
    own = replace(
        plain, home=tmp_path / "x", http_port=1, name="studio", control_host="10.0.0.1", nodes="2", model="m"
    )
    assert flags_of(plain, {}) == flags_of(own, {}) == ()
    assert flags_of(replace(plain, kv_bits=8, repeatable=True), {}) == ("repeatable=True", "kv_bits=8")
    environment = {"MLX_ENABLE_TF32": "0", "MLX_RANK": "1", "MLX_METAL_FAST_SYNCH": "1", "PATH": "/bin"}
    only_times = ("METAL_RESIDENCY_REFRESH_INTERVAL_MS", "MAX_OPS_PER_BUFFER", "MAX_MB_PER_BUFFER")
    environment |= {f"MLX_{name}": "1000" for name in only_times}
    assert flags_of(plain, environment) == ("MLX_ENABLE_TF32=0",)
    assert [each.partition("=")[0] for each in versions_here()] == ["mlxtp", "mlx", "mlx-lm"]
    assert "none" not in " ".join(versions_here())


@pytest.mark.usefixtures("hub")
@played()
async def test_files_are_repaired_while_no_rank_here_has_them_open(
    node: Node, tmp_path: Path, member: members.Member
) -> None:
    name = f"{NAME}@{COMMIT}"
    cluster, admin = node.parts, Admin(node.parts, member.store)
    cluster.node.desired.on_change.remove(cluster.models.resolve)
    cluster.node.desired.serve(NAME, keep_s=PINNED)
    with pytest.raises(UserError, match="cannot be removed: the cluster serves it, or is about to"):
        admin.models.removable(CheckRemovable(NAME))
    assert admin.models.removable(CheckRemovable(name, repair=True)) == {"removable": NAME}
    snapshot = Repo(NAME).folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(cluster.hosted), "models", {tmp_path / "another", snapshot})
        with pytest.raises(UserError, match="a rank of this Mac has it open; `mlxtp unload` first"):
            admin.models.removable(CheckRemovable(name, repair=True))
    source = ModelSource(NAME, snapshot, cast(Text, None))
    node.group.supervisor.source = source
    assert admin.models.removable(CheckRemovable(name, repair=True)) == {"removable": NAME}, (
        "it is no longer open"
    )
    node.group.supervisor.status.in_epoch = True
    with pytest.raises(UserError, match="a rank of this Mac has it open"):
        admin.models.removable(CheckRemovable(name, repair=True))
