"""Models on their way to one member: in turn, bounded, and on again when a member that has one comes back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlxtp.errors import ModelError
from mlxtp.models import model_transfer, peer_copy
from mlxtp.models import transfers as getting_module
from mlxtp.models.download import Fetch
from mlxtp.models.hub_cache import Repo
from mlxtp.models.manifest import described
from mlxtp.models.model_transfer import MAX_JOBS
from mlxtp.models.transfers import AT_ONCE, MAX_PULLS, TransferCoordinator
from mlxtp.wire.cluster_messages import ModelHeld, ModelPull, Report, StoredModel

from ..groups.one_node import CLOCK, A, B, FakeLink, Node, play
from ..groups.scenes import sees
from ..hub import COMMIT, NEWER, Hub, Model, embedded, put, running_hub
from ..played import scenes
from ..wire.members import Member, founder, member_of

played = scenes(play, "tmp_path", "member")


pytestmark = pytest.mark.slow

NAME = "some-body/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as running:
        running.models = {NAME: Model(embedded())}
        put(running.url, tmp_path / "cache", monkeypatch)
        yield running


def leads(node: Node) -> TransferCoordinator:
    leadership = node.parts.node.leadership
    leadership._follow(leadership._next_claim(node.parts.node.node_id), CLOCK.now)
    node.tick()
    return node.parts.transfers


def row(getting: TransferCoordinator, name: str, node_id: str) -> dict[str, Any]:
    return next((each for each in getting.progress(name) if each["node_id"] == node_id), {})


@played()
async def test_slow_downloads_wait_for_their_turn_and_nothing_waits_for_them(node: Node, hub: Hub) -> None:
    names = [f"some-body/slow-{i}" for i in range(AT_ONCE + 2)]
    hub.models = {name: Model(embedded(), pace=4e4) for name in names}
    getting, me = leads(node), node.parts.node.node_id
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    pulled = [await getting.pull(name, everywhere=False) for name in names]
    await sees(lambda: sum(bool(model.sent) for model in hub.models.values()) == AT_ONCE)
    await sees(lambda: row(getting, pulled[-1], me).get("waits") and row(getting, pulled[-2], me))
    assert described(row(getting, pulled[-1], me)) == "waits for others to come first"
    assert [row(getting, name, me)["waits"] for name in pulled] == [False] * AT_ONCE + [True, True]
    async with asyncio.timeout(1.0):
        assert await asyncio.to_thread(lambda: "quick") == "quick"
    for model in hub.models.values():
        model.pace = 0.0
    await sees(lambda: all(row(getting, name, me).get("complete") for name in pulled))


@pytest.mark.usefixtures("hub")
@played()
async def test_one_member_cannot_have_all_looked_for(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    getting, a = leads(node), node.meet(A)
    for i in range(2 * MAX_JOBS):
        node.hear(a, ModelHeld(f"o/m{i}", "", 0, 0, 0, wants=True, problem="", port=0))
    assert len(list(getting.table)) <= MAX_JOBS
    assert len(getting._background.tasks) <= MAX_JOBS + 1, "nor is the disk looked at for more"
    await sees(lambda: not getting._background.tasks)
    for i in range(100):
        node.hear(a, ModelPull(f"o/p{i}", COMMIT))
    await asyncio.sleep(0)
    assert sum(job.runs for job in getting.table) == MAX_PULLS
    (why,) = {word.problem for word in a.heard(ModelHeld) if word.model == f"o/p99@{COMMIT}"}
    assert why.startswith(f"{MAX_PULLS} models come here at your request already")
    node.hear(node.meet(B), ModelPull("o/other", COMMIT))
    await asyncio.sleep(0)
    assert getting.table.of(f"o/other@{COMMIT}").runs, "another member has turns of its own"
    assert len([line for line in caplog.messages if "request by" in line]) == 1


@played()
async def test_a_model_on_its_way_is_not_forgotten_for_another_one(
    node: Node, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_transfer, "MAX_JOBS", 0)
    with pytest.raises(ModelError, match="0 models are under way here; request o/m when some are done"):
        await node.parts.transfers.get("o/m")
    monkeypatch.setattr(model_transfer, "MAX_JOBS", 1)
    hub.models = {NAME: Model(embedded(), stalls="/resolve/")}
    table = leads(node).table
    job = table.of(await node.parts.transfers.pull(NAME, everywhere=False))
    with pytest.raises(ModelError, match="1 models are under way here; request o/m when some are done"):
        table.of("o/m")
    hub.models[NAME].goes_on.set()

    def forgotten() -> bool:  # once its files were looked at, too
        with contextlib.suppress(ModelError):
            table.of("o/m")
        return table.find(job.model) is None

    await sees(forgotten)


class Lending:
    """Another Mac that has all of NAME, which the Hub no longer knows."""

    def __init__(self, tmp_path: Path, hub: Hub) -> None:
        hub.models = {NAME: Model(embedded())}
        self.first = founder(tmp_path)
        self.second = member_of(self.first, tmp_path)
        self.repo = Repo(NAME, tmp_path / "theirs")
        Fetch(self.repo, "main").from_hub()
        hub.models = {}
        self.node_id = self.first.identity.node_id
        self.lender: peer_copy.PeerServer | None = None

    def opens(self) -> None:
        lent = (self.repo, self.repo.manifest(COMMIT))
        mine = self.first.credentials
        self.lender = peer_copy.PeerServer("127.0.0.1", mine, lambda _: lent, lambda _: True)

    def plays(self, home: Path, story: Callable[[Node], Awaitable[None]]) -> None:
        try:
            play(home, self.second, story)
        finally:
            if self.lender is not None:
                self.lender.close()

    def joins(self, node: Node) -> FakeLink:
        link = node.meet(self.node_id)
        node.hear(link, self.word())
        return link

    def word(self) -> ModelHeld:
        manifest = self.repo.manifest(COMMIT)
        port = self.lender.port if self.lender is not None else 1
        return ModelHeld(NAME, COMMIT, manifest.size, manifest.size, 0, wants=False, problem="", port=port)


@pytest.mark.parametrize("later", [False, True], ids=["in a moment", "after it was given up"])
def test_a_lender_that_comes_back_is_copied_from(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    there = Lending(tmp_path, hub)
    monkeypatch.setattr(getting_module, "AGAIN_S", 0.05)
    if later:
        monkeypatch.setattr(getting_module, "NO_SEEDER_S", 0.3)

    async def story(node: Node) -> None:
        getting, me = leads(node), node.parts.node.node_id
        link = there.joins(node)
        node.hear(link, ModelPull(NAME, ""))  # everywhere
        await sees(lambda: getting.table.of(NAME).lender == there.node_id)
        link.close()
        await sees(lambda: "the Hub knows no such model" in row(getting, NAME, me).get("problem", ""))
        if later:
            await sees(lambda: not getting.table.of(NAME).runs)
        else:
            await asyncio.sleep(0.5)
        there.opens()
        there.joins(node)
        await sees(lambda: row(getting, NAME, me).get("complete"))

    there.plays(tmp_path, story)


def test_a_download_gives_way_to_a_member_that_has_it(tmp_path: Path, hub: Hub) -> None:
    there = Lending(tmp_path, hub)
    there.opens()
    hub.models = {NAME: Model(embedded(), stalls="/resolve/")}
    hub.asked.clear()

    async def story(node: Node) -> None:
        getting = leads(node)
        getter = asyncio.ensure_future(getting.get(NAME))
        await sees(lambda: any("/resolve/" in asked for asked in hub.asked))
        there.joins(node)
        node.tick()
        assert (await asyncio.wait_for(getter, 30)).name == COMMIT

    try:
        there.plays(tmp_path, story)
    finally:
        hub.models[NAME].goes_on.set()


def answers(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


@played()
async def test_a_member_that_has_it_lends_it_until_the_others_have_it(node: Node, hub: Hub) -> None:
    getting, me, a = leads(node), node.parts.node.node_id, node.meet(A)
    name = await getting.pull(NAME, everywhere=False)
    await sees(lambda: row(getting, name, me).get("complete") and not getting.table.of(name).runs)
    assert [word.port for word in a.heard(ModelHeld)] == [0] * len(a.heard(ModelHeld))
    node.hear(a, ModelHeld(name))
    node.tick()
    told = a.heard(ModelHeld)[-1]
    assert answers(told.port)
    assert getting.is_getting(NAME)
    node.hear(a, ModelHeld(name, COMMIT, told.total, told.total))
    node.tick()
    await sees(lambda: not answers(told.port))
    assert not getting.is_getting(NAME)


def test_who_asked_for_it_here_alone_is_not_surprised_by_it_later(tmp_path: Path, hub: Hub) -> None:
    there = Lending(tmp_path, hub)

    async def story(node: Node) -> None:
        getting = leads(node)
        await getting.pull(NAME, everywhere=False)
        await sees(lambda: getting.table.of(NAME).task is not None and not getting.table.of(NAME).runs)
        there.joins(node)
        await asyncio.sleep(0)
        assert not getting.table.of(NAME).runs

    play(tmp_path, there.second, story)


@played()
async def test_what_was_complete_counts_only_when_it_was_looked_at_again(node: Node, hub: Hub) -> None:
    getting, me = leads(node), node.parts.node.node_id
    name = await getting.pull(NAME, everywhere=False)
    await sees(lambda: row(getting, name, me).get("complete") and not getting.table.of(name).runs)
    await asyncio.to_thread((Repo(NAME).folder / "snapshots" / COMMIT / "config.json").unlink)
    await getting.pull(NAME, everywhere=False)
    await asyncio.sleep(0)
    assert row(getting, name, me)["complete"] is False
    await sees(lambda: row(getting, name, me)["complete"])


@played()
async def test_what_is_wanted_again_before_its_download_has_stopped_comes(node: Node, hub: Hub) -> None:
    hub.models = {NAME: Model(embedded(), stalls="/resolve/")}
    getting = leads(node)
    job = getting.table.of(NAME)
    for _ in range(2):  # requests that have waited for the end of one may go, too
        first = asyncio.ensure_future(getting.get(NAME))
        await sees(lambda: job.fetch is not None and job.fetch.manifest is not None)
        first.cancel()
        await asyncio.sleep(0)
        assert job.ends
    second = asyncio.ensure_future(getting.get(NAME))
    third = getting._begin(NAME, "main", everywhere=False)
    assert row(getting, NAME, node.parts.node.node_id)["complete"] is False
    hub.models[NAME].stalls = "\0"
    hub.models[NAME].goes_on.set()
    assert await asyncio.wait_for(second, 30) == await third


@played()
async def test_a_branch_is_the_commit_that_was_asked_for_last(node: Node, hub: Hub) -> None:
    hub.models = {NAME: Model(embedded(), commits={"main": COMMIT, "v1": COMMIT})}
    repo = Repo(NAME)
    getting = leads(node)
    await getting.get(f"{NAME}@{COMMIT}")
    assert repo.refs.commits() == {}
    for commit in (COMMIT, NEWER, COMMIT):
        hub.models[NAME].commits["main"] = commit
        name = await getting.pull(NAME, everywhere=False)
        await asyncio.wait_for(getting.get(name), 30)
        assert repo.refs.commits() == {"main": commit}
    await getting.pull(f"{NAME}@v1", everywhere=False)
    await sees(lambda: repo.refs.commit("v1") == COMMIT)
    await getting.get(f"{NAME}@{NEWER}")
    assert repo.refs.commits() == {"main": COMMIT, "v1": COMMIT}, "a commit moves nothing"


@played()
async def test_a_model_that_another_program_put_there_is_here(node: Node, hub: Hub) -> None:
    folder = Repo(NAME).folder / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for path, data in embedded().items():
        (folder / path).write_bytes(data)
    getting, me = leads(node), node.parts.node.node_id
    name = await getting.pull(NAME, everywhere=False)
    await sees(lambda: row(getting, name, me).get("complete"))
    assert not Repo(NAME).manifest(COMMIT)
    own = getting.table.of(name).own
    assert not own.wants, "nor does it lend it: nobody knows the hashes of its files"


@pytest.mark.parametrize("where", ["refer", "snapshot"])
@played()
async def test_each_end_is_told_to_waiting_clients(
    node: Node, hub: Hub, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:

    def cannot(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Repo, where, cannot)
    getting, me = leads(node), node.parts.node.node_id
    name = await getting.pull(NAME, everywhere=False)
    await sees(lambda: "Read-only file system" in row(getting, name, me).get("problem", ""))


@played()
async def test_earlier_reports_no_longer_count_when_it_is_pulled_again(node: Node, hub: Hub) -> None:
    getting, me, a = leads(node), node.parts.node.node_id, node.meet(A)
    name = await getting.pull(NAME, everywhere=True)
    node.hear(a, ModelHeld(name, "", 0, 0, 0, wants=True, problem="no room", port=0))
    await sees(lambda: row(getting, name, me).get("complete") and not getting.table.of(name).runs)
    await asyncio.to_thread(shutil.rmtree, Repo(NAME).folder)
    await getting.pull(NAME, everywhere=True)
    assert row(getting, name, me)["complete"] is False
    assert row(getting, name, A)["problem"] == ""


def test_the_end_does_not_wait_for_a_hub_that_is_silent(
    tmp_path: Path, member: Member, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fetch, "from_hub", lambda _: time.sleep(8))

    async def story(node: Node) -> None:
        getting = leads(node)
        name = await getting.pull(NAME, everywhere=False)
        await sees(lambda: getting.table.of(name).fetch is not None)

    began = time.monotonic()
    play(tmp_path, member, story)
    assert time.monotonic() - began < 7


@played()
async def test_what_a_command_did_by_itself_is_told_at_once(node: Node, hub: Hub) -> None:
    getting, a = leads(node), node.meet(A)
    repo = Repo(NAME)
    await asyncio.to_thread(Fetch(repo, "main").from_hub)
    getting.stored.changed(NAME)
    await sees(lambda: [each.name for each in a.heard(StoredModel)] == [NAME])
    changes: list[str] = []
    getting.stored.on_change(lambda: changes.append("changed"))
    getting.stored.refresh()
    await sees(lambda: not getting.stored._background.tasks)
    assert changes == []
    await asyncio.to_thread(repo.remove, repo.commits())
    getting.stored.changed(NAME)
    await sees(lambda: a.heard(Report)[-1].over)
