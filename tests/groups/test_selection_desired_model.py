"""Refusals of what is known to fail, and models that are fetched while others are served."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
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
from ..played import scenes
from ..wire.members import Member
from .one_node import MACHINE, A, B, Node, play
from .scenes import sees, within

MODEL = "org/there"
COMING = {
    "name": "studio", "waits": False, "held_bytes": 5, "total_bytes": 10, "bytes_per_s": 0, "left_s": None,
    "lender": "", "problem": "",
}  # fmt: skip


class Desk:
    """A node, and who serves models there. A download that `comes` goes on until it is told to end."""

    def __init__(self, node: Node, member: Member) -> None:
        self.node = node
        self.desired = node.parts.node.desired
        self.models = (admin := Admin(node.parts, member.store)).models
        self.coming: Callable[[], list[str]] = lambda: admin.status(Status())["coming"]
        self.rows: list[dict[str, Any]] = []

    def served(self) -> None:
        """From now on `tiny` is served."""
        self.desired.serve("tiny")
        self.node.group.supervisor.status.state = ServingState.READY

    @property
    def wanted(self) -> list[str]:
        return [row.model for row in self.desired.table.live()]

    async def serve(self, model: str = MODEL, **how: Any) -> dict[str, Any]:
        return dict(await self.models.serve(Serve(model, **how)))

    async def refused(self, why: str, model: str = MODEL, **how: Any) -> None:
        with pytest.raises(UserError, match=why):
            await self.serve(model, **how)

    def comes(self) -> None:
        async def pull(model: str, *, everywhere: bool, known: object) -> str:
            assert everywhere
            return f"{model}@{COMMIT}"

        self.rows = [self._row(complete=False)]
        self.node.parts.transfers.pull = pull  # type: ignore[method-assign]
        self.node.parts.transfers.progress = lambda name: self.rows  # type: ignore[method-assign]

    def _row(self, **changes: Any) -> dict[str, Any]:
        return COMING | {"node_id": self.node.parts.node.node_id, "self": True} | changes

    async def has_come(self, problem: str = "", other: str = "") -> None:
        """Here, and at another member; what comes of it is over."""
        other = other or problem
        there = {"node_id": A, "name": "mac-a", "self": False, "complete": not other, "problem": other}
        self.rows = [self._row(complete=not problem, problem=problem), COMING | there]
        await within(asyncio.wait(self.node.parts.selection._background.tasks))


def play_desk(
    home: Path,
    member: Member,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    story: Callable[[Desk], Awaitable[None]],
) -> None:
    monkeypatch.setattr(selection, "LOOK_S", 0.02)
    monkeypatch.setattr(selection, "SILENT_S", 0.1)
    monkeypatch.setattr(transfers, "NO_SEEDER_S", 0.05)
    hub.models[MODEL] = Model(embedded())
    play(home, member, lambda node: story(Desk(node, member)))


at_desk = scenes(play_desk, "tmp_path", "member", "hub", "monkeypatch")


@at_desk()
async def test_a_model_that_no_mac_can_get_leaves_what_is_served(
    desk: Desk, tmp_path: Path, hub: Hub
) -> None:
    hub.models["org/labels"] = Model(
        embedded() | {"config.json": b'{"model_type": "bert", "architectures": ["BertModel"]}'}
    )
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_bytes(embedded()["config.json"])
    a = desk.node.meet(A)
    desk.served()
    for model, why in (
        ("org/typo", "the Hub knows no such model"),
        (f"{MODEL}@v9", "it has no revision 'v9'"),
        ("org/labels", "mlx-lm has no model family 'bert'"),
        (str(tmp_path), "holds no config.json"),
        (str(tmp_path / "half"), "lacks tokenizer.json"),
    ):
        await desk.refused(f"{model} cannot be served, so all stays as it is: .*{why}", model)
    hub.close()
    await desk.refused("the Hub cannot be reached", only=True)
    desk.node.hear(a, StoredModel(MODEL, COMMIT, 9, True))
    for revision in ("typo", NEWER):
        await desk.refused("the Hub cannot be reached", f"{MODEL}@{revision}")
    assert desk.wanted == ["tiny"]


@at_desk()
async def test_what_has_no_place_leaves_what_is_served(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.served()
    for model in ("tiny", MODEL):
        await desk.refused(r"all stays as it is: .*3 nodes", model, nodes="3")
    monkeypatch.setattr("mlxtp.models.hub_cache.free_bytes", lambda folder: 7_000_000)
    await desk.refused(r"all stays as it is: .* has 7.0 MB free", only=True)
    assert desk.desired.table.newest == 1
    desk.desired.unload_all()
    said = await desk.serve("tiny", nodes="3")
    assert said["nodes"] == "3", "where nothing is served, nothing is lost"


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
@at_desk()
async def test_macs_that_may_serve_it_and_do_not_suffice_leave_what_is_served(
    desk: Desk, wish: dict[str, str], why: str
) -> None:
    links = [desk.node.meet(A), desk.node.meet(B)]
    desk.node.hear(links[0], MACHINE)
    desk.desired.serve("tiny", on=(desk.node.parts.node.node_id, A))
    await desk.refused(f"all stays as it is: {why}", "tiny", **wish)
    assert desk.desired.table.newest == 1
    await desk.serve("tiny", nodes="2")
    assert desk.desired.table.newest == 2


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"split": "2,2"}, "--split 2,2 is for 2 ranks, and 3 share the model"),
        ({"split": "1,1,1"}, "the split 1,1,1 has 3 layers, and tiny has 4"),
        ({"parallel": "tensor"}, "8 attention heads do not divide by 3; 4 KV heads do not"),
    ],
)
@at_desk()
async def test_ranks_of_one_machine_that_cannot_share_it_so_leave_what_is_served(
    desk: Desk, wish: dict[str, str], why: str
) -> None:
    here = desk.node.parts.node
    here.settings = dataclasses.replace(here.settings, ranks=3)
    desk.served()
    await desk.refused(f"tiny cannot be served so, and all stays as it is: {why}", "tiny", **wish)
    assert desk.desired.table.newest == 1
    await desk.serve("tiny", split="2,1,1")
    assert desk.desired.table.newest == 2


@at_desk()
async def test_what_has_to_come_is_wanted_once_it_is_here(desk: Desk) -> None:
    desk.comes()
    desk.served()
    said = await desk.serve(only=True)
    assert (said["coming"], said["until_then"], said["version"]) == (True, "tiny", 1)
    await asyncio.sleep(0.2)
    assert desk.wanted == ["tiny"]
    (told,) = desk.coming()
    assert told.startswith(f"{MODEL} is served as soon as it is here: 0.0 MB of 0.0 MB")
    await desk.has_come()
    assert (desk.wanted, desk.coming()) == ([MODEL], [])


@pytest.mark.parametrize(
    ("before", "only", "elsewhere"),
    [(True, "1", False), (True, "", True), (False, "1", True), (False, "", True)],
)
@at_desk()
async def test_the_reply_tells_of_a_download_that_comes_first(
    desk: Desk, before: bool, only: str, elsewhere: bool
) -> None:
    a = desk.node.meet(A)
    desk.comes()
    if elsewhere:
        desk.node.hear(a, StoredModel(MODEL, COMMIT, 9, True))
    if before:
        desk.served()
    said = await desk.serve(only=only)
    assert said["coming"] == bool(before and only)
    assert said["downloads"] != elsewhere
    here = await desk.serve("tiny")
    assert (here["coming"], here["downloads"]) == (False, False)


@pytest.mark.parametrize("later", ["serve", "unload", "elsewhere"])
@at_desk()
async def test_what_is_said_later_counts(desk: Desk, later: str) -> None:
    desk.comes()
    desk.served()
    await desk.serve(only=True)
    if later == "serve":
        await desk.serve("tiny")
    elif later == "unload":
        desk.models.unload(UnloadModel())
    else:
        desk.desired.serve("org/other")
    before = desk.desired.table
    await desk.has_come()
    assert desk.desired.table == before
    assert desk.coming() == []


@pytest.mark.parametrize("how", ["here", "elsewhere"])
@at_desk()
async def test_the_unload_of_another_model_leaves_what_is_to_replace_all(desk: Desk, how: str) -> None:
    desk.comes()
    desk.served()
    desk.desired.serve("org/other")
    await desk.serve(only=True)
    if how == "here":
        assert desk.models.unload(UnloadModel("org/other"))["cancelled"] == []
    else:
        desk.desired.unload("org/other")
    assert desk.wanted == ["tiny"]
    await desk.has_come()
    assert desk.wanted == [MODEL]


@pytest.mark.parametrize("deployed", [False, True])
@at_desk()
async def test_the_unload_of_a_model_on_its_way_cancels_it_alone(desk: Desk, deployed: bool) -> None:
    desk.comes()
    desk.served()
    if deployed:
        desk.desired.serve(f"{MODEL}@{NEWER}")
    await desk.serve(only=True)
    said = desk.models.unload(UnloadModel(f"{MODEL}@main"))
    assert (said["cancelled"], said["unloaded"]) == ([MODEL], [MODEL] if deployed else [])
    assert not any("is served as soon" in line for line in desk.coming())
    await desk.has_come()
    assert desk.wanted == ["tiny"]
    with pytest.raises(UserError, match=f"{MODEL} is not deployed"):
        desk.models.unload(UnloadModel(MODEL))


@at_desk()
async def test_what_does_not_come_is_told(desk: Desk) -> None:
    desk.comes()
    desk.served()
    await desk.serve(only=True)
    await desk.has_come("it is gated")
    (told,) = desk.coming()
    assert told == f"{MODEL} was to be served, and cannot be: studio: it is gated; mac-a: it is gated"
    assert desk.wanted == ["tiny"]


@at_desk()
async def test_what_a_mac_that_it_needs_cannot_get_leaves_what_is_served(desk: Desk) -> None:
    desk.node.hear(desk.node.meet(A), MACHINE)
    desk.comes()
    desk.served()
    await desk.serve(nodes="2", only=True)
    await desk.has_come(other="no room")
    (told,) = desk.coming()
    assert told.startswith(f"{MODEL} was to be served, and cannot be: ")
    assert "needs 2 nodes" in told
    assert told.endswith("; mac-a: no room")
    assert desk.wanted == ["tiny"]
    await desk.serve(nodes="2", only=True)
    await desk.has_come()
    assert desk.wanted == [MODEL]


@at_desk()
async def test_two_models_that_users_serve_at_once_are_both_deployed(desk: Desk) -> None:
    """At this Mac, and at another one."""
    asking = asyncio.ensure_future(desk.serve())
    await asyncio.sleep(0)
    await desk.serve("tiny")
    desk.desired.serve("org/other")
    assert (await asking)["change"] == "added"
    assert sorted(desk.wanted) == ["org/other", MODEL, "tiny"]


@at_desk()
async def test_what_was_said_while_the_hub_was_asked_counts(desk: Desk) -> None:
    asking = asyncio.ensure_future(desk.serve(only=True))
    await asyncio.sleep(0)
    await desk.serve("tiny")
    with pytest.raises(UserError, match="another request changed the models meanwhile"):
        await asking
    assert desk.wanted == ["tiny"]


@pytest.mark.parametrize("before", [True, False])
@at_desk()
async def test_the_hub_is_asked_once_for_one_serve(desk: Desk, hub: Hub, before: bool) -> None:
    if before:
        desk.served()
    await desk.serve(only=True)
    await sees(lambda: Repo(MODEL).snapshot("main") is not None)
    await sees(lambda: desk.wanted == [MODEL])
    assert len([each for each in hub.asked if f"/api/models/{MODEL}" in each]) == 1
    main = Repo(MODEL).folder / "refs" / "main"
    await sees(main.exists)
    assert main.read_text() == COMMIT
