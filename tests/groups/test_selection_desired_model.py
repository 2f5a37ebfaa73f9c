"""Refusals of what is known to fail, and models that are fetched while others are served."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mlxtp.admin.handlers import Admin
from mlxtp.errors import UserError
from mlxtp.groups import selection
from mlxtp.groups.health import ServingState
from mlxtp.models import transfers
from mlxtp.models.hub_cache import Repo
from mlxtp.verbs import Serve, Status, UnloadModel
from mlxtp.wire.cluster_messages import StoredModel

from ..hub import COMMIT, NEWER, Hub, Model, embedded
from ..wire import members
from .one_node import MACHINE, A, B, Node, at_node
from .scenes import sees, within

MODEL = "org/there"
COMING = {
    "node_id": "me",
    "name": "studio",
    "waits": False,
    "held_bytes": 5,
    "total_bytes": 10,
    "bytes_per_s": 0,
    "left_s": None,
    "lender": "",
    "problem": "",
}


@pytest.fixture(autouse=True)
def there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "LOOK_S", 0.02)
    monkeypatch.setattr(selection, "SILENT_S", 0.1)
    monkeypatch.setattr(transfers, "NO_SEEDER_S", 0.05)
    hub.models[MODEL] = Model(embedded())


def served(node: Node, model: str = "tiny") -> None:
    node.parts.node.desired.serve(model)
    node.group.supervisor.status.state = ServingState.READY


def wanted(node: Node) -> list[str]:
    return [row.model for row in node.parts.node.desired.table.live()]


class Coming:
    """A download that goes on until it is told to end."""

    def __init__(self, node: Node) -> None:
        self.node_id = node.parts.node.node_id
        self.rows: list[dict[str, Any]] = [self.row(complete=False)]
        node.parts.transfers.pull = self.pull  # type: ignore[method-assign]
        node.parts.transfers.progress = lambda name: self.rows  # type: ignore[method-assign]

    async def pull(self, model: str, *, everywhere: bool, known: object) -> str:
        assert everywhere
        return f"{model}@{COMMIT}"

    def row(self, **changes: Any) -> dict[str, Any]:
        return COMING | {"node_id": self.node_id, "self": True} | changes

    def end(self, problem: str = "", other: str = "") -> None:
        """Here, and at another member."""
        other = other or problem
        there = {"node_id": A, "name": "mac-a", "self": False, "complete": not other, "problem": other}
        self.rows = [self.row(complete=not problem, problem=problem), COMING | there]


async def until_no_more_is_awaited(node: Node) -> None:
    await within(asyncio.wait(node.parts.selection._background.tasks))


@at_node()
async def test_a_model_that_no_mac_can_get_leaves_what_is_served(
    node: Node, tmp_path: Path, member: members.Member, hub: Hub
) -> None:
    hub.models["org/labels"] = Model(
        embedded() | {"config.json": b'{"model_type": "bert", "architectures": ["BertModel"]}'}
    )
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_bytes(embedded()["config.json"])
    admin, a = Admin(node.parts, member.store), node.meet(A)
    served(node)
    for model, why in (
        ("org/typo", "the Hub knows no such model"),
        (f"{MODEL}@v9", "it has no revision 'v9'"),
        ("org/labels", "mlx-lm has no model family 'bert'"),
        (str(tmp_path), "holds no config.json"),
        (str(tmp_path / "half"), "lacks tokenizer.json"),
    ):
        with pytest.raises(UserError, match=f"{model} cannot be served, so all stays as it is: .*{why}"):
            await admin.models.serve(Serve(model))
    hub.close()
    with pytest.raises(UserError, match="the Hub cannot be reached"):
        await admin.models.serve(Serve(MODEL, only=True))
    node.hear(a, StoredModel(MODEL, COMMIT, 9, True))
    for revision in ("typo", NEWER):
        with pytest.raises(UserError, match="the Hub cannot be reached"):
            await admin.models.serve(Serve(f"{MODEL}@{revision}"))
    assert wanted(node) == ["tiny"]


@at_node()
async def test_what_has_no_place_leaves_what_is_served(
    node: Node, member: members.Member, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = Admin(node.parts, member.store)
    served(node)
    for model in ("tiny", MODEL):
        with pytest.raises(UserError, match=r"all stays as it is: .*3 nodes"):
            await admin.models.serve(Serve(model, nodes="3"))
    monkeypatch.setattr("mlxtp.models.hub_cache.free_bytes", lambda folder: 7_000_000)
    with pytest.raises(UserError, match=r"all stays as it is: .* has 7.0 MB free"):
        await admin.models.serve(Serve(MODEL, only=True))
    assert node.parts.node.desired.table.newest == 1
    node.parts.node.desired.unload_all()
    assert (await admin.models.serve(Serve("tiny", nodes="3")))["nodes"] == "3", (
        "where nothing is served, nothing is lost"
    )


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"nodes": "2", "on": "studio"}, "tiny needs 2 Macs, --on allows 1"),
        ({"nodes": "3", "parallel": "pipeline"}, "tiny needs 3 Macs, --on allows 2"),
        ({"split": "1,2,1", "on": "studio,mac-a"}, "tiny needs 3 Macs, --on allows 2"),
        ({"parallel": "pipeline", "on": "mac-a"}, "tiny needs 2 Macs, --on allows 1"),
        ({"on": "mac-f"}, "--on allows mac-f: 0 of the 0 Macs here may serve it and stay"),
    ],
)
@at_node()
async def test_macs_that_may_serve_it_and_do_not_suffice_leave_what_is_served(
    node: Node, member: members.Member, wish: dict[str, str], why: str
) -> None:
    admin, here, links = Admin(node.parts, member.store), node.parts.node, [node.meet(A), node.meet(B)]
    node.hear(links[0], MACHINE)
    here.desired.serve("tiny", on=(here.node_id, A))
    with pytest.raises(UserError, match=f"all stays as it is: {why}"):
        await admin.models.serve(Serve("tiny", **wish))
    assert here.desired.table.newest == 1
    await admin.models.serve(Serve("tiny", nodes="2"))
    assert here.desired.table.newest == 2


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"split": "2,2"}, "--split 2,2 is for 2 ranks, and 3 share the model"),
        ({"split": "1,1,1,1"}, "--split 1,1,1,1 is for 4 ranks, and 3 share the model"),
        ({"split": "1,1,1"}, "the split 1,1,1 has 3 layers, and tiny has 4"),
        ({"parallel": "tensor"}, "8 attention heads do not divide by 3; 4 KV heads do not"),
    ],
)
@at_node()
async def test_ranks_of_one_machine_that_cannot_share_it_so_leave_what_is_served(
    node: Node, member: members.Member, wish: dict[str, str], why: str
) -> None:
    admin, here = Admin(node.parts, member.store), node.parts.node
    here.settings = dataclasses.replace(here.settings, ranks=3)
    served(node)
    with pytest.raises(UserError, match=f"tiny cannot be served so, and all stays as it is: {why}"):
        await admin.models.serve(Serve("tiny", **wish))
    assert here.desired.table.newest == 1
    await admin.models.serve(Serve("tiny", split="2,1,1"))
    assert here.desired.table.newest == 2


@at_node()
async def test_what_has_to_come_is_wanted_once_it_is_here(
    node: Node, member: members.Member, hub: Hub
) -> None:
    admin, coming = Admin(node.parts, member.store), Coming(node)
    served(node)
    said = await admin.models.serve(Serve(MODEL, only=True))
    assert (said["coming"], said["until_then"], said["version"]) == (True, "tiny", 1)
    await asyncio.sleep(0.2)
    assert wanted(node) == ["tiny"]
    (told,) = admin.status(Status())["coming"]
    assert told.startswith(f"{MODEL} is served as soon as it is here: 0.0 MB of 0.0 MB")
    coming.end()
    await until_no_more_is_awaited(node)
    assert wanted(node) == [MODEL]
    assert admin.status(Status())["coming"] == []


@pytest.mark.parametrize("before", ["tiny", ""])
@pytest.mark.parametrize("only", ["1", ""])
@pytest.mark.parametrize("elsewhere", [False, True])
@at_node()
async def test_the_reply_tells_of_a_download_that_comes_first(
    node: Node, member: members.Member, hub: Hub, before: str, only: str, elsewhere: bool
) -> None:
    admin, a = Admin(node.parts, member.store), node.meet(A)
    Coming(node)
    if elsewhere:
        node.hear(a, StoredModel(MODEL, COMMIT, 9, True))
    if before:
        served(node)
    said = await admin.models.serve(Serve(MODEL, only=only))
    assert said["coming"] == bool(before and only)
    assert said["downloads"] != elsewhere
    here = await admin.models.serve(Serve("tiny"))
    assert (here["coming"], here["downloads"]) == (False, False)


@pytest.mark.parametrize("later", ["serve", "unload", "elsewhere"])
@at_node()
async def test_what_is_said_later_counts(node: Node, member: members.Member, hub: Hub, later: str) -> None:
    admin, coming = Admin(node.parts, member.store), Coming(node)
    served(node)
    await admin.models.serve(Serve(MODEL, only=True))
    if later == "serve":
        await admin.models.serve(Serve("tiny"))
    elif later == "unload":
        admin.models.unload(UnloadModel())
    else:
        node.parts.node.desired.serve("org/other")
    before = node.parts.node.desired.table
    coming.end()
    await until_no_more_is_awaited(node)
    assert node.parts.node.desired.table == before
    assert admin.status(Status())["coming"] == []


@pytest.mark.parametrize("how", ["here", "elsewhere"])
@at_node()
async def test_the_unload_of_another_model_leaves_what_is_to_replace_all(
    node: Node, member: members.Member, hub: Hub, how: str
) -> None:
    admin, coming = Admin(node.parts, member.store), Coming(node)
    served(node)
    node.parts.node.desired.serve("org/other")
    await admin.models.serve(Serve(MODEL, only=True))
    if how == "here":
        assert admin.models.unload(UnloadModel("org/other"))["cancelled"] == []
    else:
        node.parts.node.desired.unload("org/other")
    assert wanted(node) == ["tiny"]
    coming.end()
    await until_no_more_is_awaited(node)
    assert wanted(node) == [MODEL]


@pytest.mark.parametrize("deployed", [False, True])
@at_node()
async def test_the_unload_of_a_model_on_its_way_cancels_it_alone(
    node: Node, member: members.Member, hub: Hub, deployed: bool
) -> None:
    admin, coming = Admin(node.parts, member.store), Coming(node)
    served(node)
    if deployed:
        node.parts.node.desired.serve(f"{MODEL}@{NEWER}")
    await admin.models.serve(Serve(MODEL, only=True))
    said = admin.models.unload(UnloadModel(f"{MODEL}@main"))
    assert (said["cancelled"], said["unloaded"]) == ([MODEL], [MODEL] if deployed else [])
    assert not any("is served as soon" in line for line in admin.status(Status())["coming"])
    coming.end()
    await until_no_more_is_awaited(node)
    assert wanted(node) == ["tiny"]
    with pytest.raises(UserError, match=f"{MODEL} is not deployed"):
        admin.models.unload(UnloadModel(MODEL))


@at_node()
async def test_what_does_not_come_is_told(node: Node, member: members.Member, hub: Hub) -> None:
    admin, coming = Admin(node.parts, member.store), Coming(node)
    served(node)
    await admin.models.serve(Serve(MODEL, only=True))
    coming.end("it is gated")
    await until_no_more_is_awaited(node)
    (told,) = admin.status(Status())["coming"]
    assert told == f"{MODEL} was to be served, and cannot be: studio: it is gated; mac-a: it is gated"
    assert wanted(node) == ["tiny"]


@at_node()
async def test_what_a_mac_that_it_needs_cannot_get_leaves_what_is_served(
    node: Node, member: members.Member, hub: Hub
) -> None:
    admin, coming, a = Admin(node.parts, member.store), Coming(node), node.meet(A)
    node.hear(a, MACHINE)
    served(node)
    await admin.models.serve(Serve(MODEL, nodes="2", only=True))
    coming.end(other="no room")
    await until_no_more_is_awaited(node)
    (told,) = admin.status(Status())["coming"]
    assert told.startswith(f"{MODEL} was to be served, and cannot be: ")
    assert "needs 2 nodes" in told
    assert told.endswith("; mac-a: no room")
    assert wanted(node) == ["tiny"]
    await admin.models.serve(Serve(MODEL, nodes="2", only=True))
    coming.end()
    await until_no_more_is_awaited(node)
    assert wanted(node) == [MODEL]


@at_node()
async def test_two_models_that_users_serve_at_once_are_both_deployed(
    node: Node, member: members.Member, hub: Hub
) -> None:
    """At this Mac, and at another one."""
    admin = Admin(node.parts, member.store)
    asking = asyncio.ensure_future(admin.models.serve(Serve(MODEL)))
    await asyncio.sleep(0)
    await admin.models.serve(Serve("tiny"))
    node.parts.node.desired.serve("org/other")
    assert (await asking)["change"] == "added"
    assert sorted(wanted(node)) == ["org/other", MODEL, "tiny"]


@at_node()
async def test_what_was_said_while_the_hub_was_asked_counts(
    node: Node, member: members.Member, hub: Hub
) -> None:
    admin = Admin(node.parts, member.store)
    asking = asyncio.ensure_future(admin.models.serve(Serve(MODEL, only=True)))
    await asyncio.sleep(0)
    await admin.models.serve(Serve("tiny"))
    with pytest.raises(UserError, match="another request changed the models meanwhile"):
        await asking
    assert wanted(node) == ["tiny"]


@pytest.mark.parametrize("before", ["tiny", ""])
@at_node()
async def test_the_hub_is_asked_once_for_one_serve(
    node: Node, member: members.Member, hub: Hub, before: str
) -> None:
    admin = Admin(node.parts, member.store)
    if before:
        served(node)
    await admin.models.serve(Serve(MODEL, only=True))
    await sees(lambda: Repo(MODEL).snapshot("main") is not None)
    await sees(lambda: wanted(node) == [MODEL])
    assert len([each for each in hub.asked if f"/api/models/{MODEL}" in each]) == 1
    main = Repo(MODEL).folder / "refs" / "main"
    await sees(main.exists)
    assert main.read_text() == COMMIT
