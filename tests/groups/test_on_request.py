"""Requests for models that are not ready, at one node whose other members are played by hand; and the end of
deployments that no request needs."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlxtp.api.backend import COMING, ModelInfo, ModelLease
from mlxtp.cluster.cluster_state import KEEP_S, LONGEST_S, PINNED, YIELDS
from mlxtp.config import Limits, embedded_model_path
from mlxtp.errors import Code, GroupError, ModelError, RequestError
from mlxtp.groups import on_request
from mlxtp.groups.health import ServingState
from mlxtp.groups.on_request import ENDS_S, REFUSED_S, UNPLANNED_S
from mlxtp.models.inspect import ModelSource, stored_name
from mlxtp.wire.cluster_messages import Beat, Deployment, Deployments, GroupAssignment, ModelStatus, Serving
from mlxtp.wire.messages import Generate

from ..gateway.test_gateway import TEXT, FakeRanks
from ..wire.members import Member
from .one_node import CLOCK, FINGERPRINT, MACHINE, A, FakeLink, Node, at_node, play
from .scenes import sees, within

LOADED, WANTED = "org/loaded", "org/wanted"
LEAD = ModelSource("tiny", embedded_model_path(), cast(Any, None))


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of `org` are on this disk; time is `CLOCK`'s."""
    monkeypatch.setattr(
        on_request, "stored_name", lambda name: name if name.startswith("org/") else stored_name(name)
    )
    monkeypatch.setattr(on_request, "time", CLOCK)


class Waiting:
    """A request that waits for its model."""

    def __init__(self, lease: ModelLease) -> None:
        self.lease = lease
        self.told: list[str] = []
        self._task = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        async for what in self.lease.wait():
            self.told.append(what)

    async def has_come(self) -> None:
        await within(asyncio.shield(self._task))
        assert self.lease.come

    async def refused(self) -> RequestError:
        with pytest.raises(RequestError) as caught:
            await within(asyncio.shield(self._task))
        return caught.value


async def ask(node: Node, model: str | None, within_s: float = 0.0, keep_s: float | None = None) -> Waiting:
    waiting = Waiting(await node.parts.gateway.acquire_model(model, within_s, keep_s))
    await asyncio.sleep(0)
    node.tick(0.01)
    return waiting


async def refusal(node: Node, model: str | None) -> RequestError:
    """Of a request that need not even wait."""
    with pytest.raises(RequestError) as caught:
        await node.parts.gateway.acquire_model(model)
    return caught.value


def ready(node: Node, model: str) -> None:
    """From now on a group of this model takes requests."""
    group = node.parts.groups.known(f"{model}#0")
    group.forwarding.follow = lambda: None  # type: ignore[method-assign]
    info = ModelInfo(model, (), Path(), 1000, 1, (1,), 300)
    node.parts.gateway.serve(group.scope.group, model, cast(Any, FakeRanks()), info, TEXT)
    node.tick(0.01)


def row(node: Node, model: str) -> Deployment | None:
    return node.parts.node.desired.table.get(model)


def names(node: Node) -> list[str]:
    return [each.name for each in node.parts.node.desired.table.live()]


def told(model: str, state: str, why: str = "", **more: Any) -> Serving:
    """A's report of a group of this model."""
    serving = state in ("ready", "loading")
    ranks = (A,) if serving else ()
    backend, requests = "none", more.pop("open_requests", 0)
    ends = {"group": f"{model}#0", "deployment": model} | more
    return Serving(1, state, why, backend, "", ranks, requests, model, 0, 1000, 300, (1,), **ends)


def following(node: Node) -> FakeLink:
    """The other end, which coordinates a cluster that serves `LOADED`; it is not pinned."""
    link = node.meet(A)
    node.know(LEAD)
    node.follow(link)
    node.hear(link, MACHINE)
    node.parts.node.desired.serve(LOADED, keep_s=KEEP_S)
    node.hear_assigned(link, A, group=f"{LOADED}#0")
    ready(node, LOADED)
    return link


@at_node(load_on_request=True)
async def test_a_request_for_a_ready_model_begins_at_once(node: Node) -> None:
    link = following(node)
    before, table = len(link.heard(Deployments)), node.parts.node.desired.table
    for name in (None, "", "default", LOADED):
        lease = await node.parts.gateway.acquire_model(name)
        assert lease.come
        assert lease.model == LOADED
        lease.close()
    node.tick()
    assert len(link.heard(Deployments)) == before
    assert node.parts.node.desired.table is table


@at_node(load_on_request=True)
async def test_a_request_makes_a_deployment_and_waits_for_it(node: Node) -> None:
    link = following(node)
    waiting, second = await ask(node, WANTED), await ask(node, WANTED)
    made = row(node, WANTED)
    assert (made.model, made.keep_s, made.replicas) == (WANTED, KEEP_S, 1)
    assert made in link.heard(Deployments)[-1].rows
    assert (await ask(node, LOADED)).lease.come, "the other one goes on"
    node.hear_assigned(link, A, group=f"{WANTED}#0")
    node.hear(link, told(WANTED, "loading", "loading 40 %"))
    node.tick(0.01)
    await sees(lambda: "loading 40 %" in waiting.told)
    assert not waiting.lease.come
    ready(node, WANTED)
    for each in (waiting, second):
        await each.has_come()
        assert each.lease.model == WANTED
    leased = node.parts.gateway.deployments.leased
    assert leased(WANTED)
    waiting.lease.close()
    second.lease.close()
    assert not leased(WANTED)


@pytest.mark.parametrize(
    ("keep_s", "kept"), [(None, KEEP_S), (30.2, 31), (0, 0), (-1, LONGEST_S), (1e12, LONGEST_S)]
)
@at_node(load_on_request=True)
async def test_a_client_says_how_long_its_model_stays_but_pins_none(
    node: Node, keep_s: float | None, kept: int
) -> None:
    following(node)
    (await ask(node, WANTED, keep_s=keep_s)).lease.close()
    made = row(node, WANTED)
    assert (made.keep_s, made.pinned) == (kept, False)
    (await ask(node, LOADED, keep_s=90)).lease.close()
    served = row(node, LOADED)
    assert served.keep_s == 90
    node.parts.node.desired.serve(LOADED, keep_s=PINNED)
    (await ask(node, LOADED, keep_s=0)).lease.close()
    assert row(node, LOADED) == replace(served, keep_s=PINNED, version=row(node, LOADED).version)  # type: ignore[union-attr]


@at_node()
async def test_a_model_that_no_request_could_bring_back_stays(node: Node) -> None:
    following(node)
    node.parts.node.desired.serve(LOADED, keep_s=YIELDS)
    (await ask(node, LOADED, keep_s=0)).lease.close()
    assert row(node, LOADED).keep_s == YIELDS  # type: ignore[union-attr]


@at_node(load_on_request=True)
async def test_what_is_on_no_disk_is_answered_as_ever(node: Node) -> None:
    following(node)
    for name in ("other/none", "/no/such/folder", "nonsense"):
        assert (await node.parts.gateway.acquire_model(name)).come
    assert names(node) == [LOADED]


def test_a_short_name_means_the_model_that_it_stands_for(
    tmp_path: Path, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = "mlx-community/Llama-3.2-1B-Instruct-4bit"
    monkeypatch.setattr(on_request, "stored_name", lambda name: name if name == llama else None)

    async def story(node: Node) -> None:
        following(node)
        waiting = await ask(node, "llama3.2:1b")
        again = await ask(node, "llama-3.2-1b")
        assert names(node) == [llama, LOADED]
        assert {each.lease.deployment for each in (waiting, again)} == {llama}  # type: ignore[attr-defined]
        for each in (waiting, again):
            each.lease.close()

    async def without_the_option(node: Node) -> None:
        following(node)
        node.parts.node.desired.serve(llama)
        waiting = await ask(node, "llama3.2:1b")
        assert waiting.lease.deployment == llama  # type: ignore[attr-defined]
        waiting.lease.close()

    play(tmp_path / "on", member, story, load_on_request=True)
    play(tmp_path / "off", member, without_the_option)


@at_node()
async def test_without_the_option_a_request_makes_nothing(node: Node) -> None:
    following(node)
    assert await node.parts.gateway.on_request() == ()
    assert (await node.parts.gateway.acquire_model(WANTED)).come
    assert names(node) == [LOADED]
    node.parts.node.desired.unload_all()
    assert (await node.parts.gateway.acquire_model(None)).come


@pytest.mark.parametrize("name", [WANTED, None])
@at_node()
async def test_without_the_option_a_request_waits_for_a_deployment_that_loads_or_recovers(
    node: Node, name: str | None
) -> None:
    link = node.meet(A)
    node.know(LEAD)
    node.follow(link)
    node.hear(link, MACHINE)
    node.parts.node.desired.serve(WANTED, keep_s=PINNED)
    node.hear_assigned(link, A, group=f"{WANTED}#0")
    node.hear(link, told(WANTED, "loading", "loading 40 %"))
    waiting = await ask(node, name)
    await sees(lambda: "loading 40 %" in waiting.told)
    assert not waiting.lease.come
    ready(node, WANTED)
    await waiting.has_come()
    assert waiting.lease.model == WANTED
    node.parts.gateway.park(f"{WANTED}#0", GroupError("a rank died", Code.RANK_LOST))
    status = node.parts.groups.known(f"{WANTED}#0").supervisor.status
    status.state, status.reason = ServingState.RESTARTING, GroupError("a rank died")
    again = await ask(node, name)
    assert not again.lease.come
    status.state = ServingState.FAILED
    node.tick(0.01)
    assert (await again.refused()).detail == f"{WANTED} cannot be served: a rank died"
    assert node.parts.on_request.leases == {waiting.lease: None}


@at_node()
async def test_no_request_waits_for_an_agent_that_ends_without_a_drain(node: Node) -> None:
    node.parts.node.desired.serve(WANTED, keep_s=PINNED)
    waiting = await ask(node, WANTED)
    assert not waiting.lease.come
    node.parts.gateway.close(GroupError("the server is shutting down", Code.SHUTTING_DOWN))
    await node.parts.groups.close()
    node.tick(0.01)
    error = await waiting.refused()
    assert (error.status, error.code) == (503, Code.SHUTTING_DOWN)
    assert (await ask(node, WANTED)).lease.outcome.done(), "the gateway refuses it"  # type: ignore[attr-defined]


@at_node()
async def test_a_request_does_not_wait_for_files_that_take_longer_than_it_may(node: Node) -> None:
    row = {"node_id": node.parts.node.node_id, "self": True, "waits": False, "lender": "", "problem": ""}
    row |= {"complete": False, "held_bytes": 10**9, "total_bytes": 31 * 10**9, "bytes_per_s": 10**8}
    rows = [row | {"left_s": 300}]
    node.parts.transfers.progress = lambda name: rows  # type: ignore[method-assign]
    node.parts.node.desired.serve(WANTED, keep_s=PINNED)
    waiting = await ask(node, WANTED)
    assert not waiting.lease.come
    rows[:] = [row | {"left_s": 301}]
    node.tick(0.01)
    for error in (await waiting.refused(), await refusal(node, WANTED)):
        assert (error.status, error.code) == (503, Code.NOT_READY)
        assert error.detail == (
            f"{WANTED} is on its way: 1.0 GB of 31.0 GB, 100 MB/s, 5 min left; try again later"
        )


def test_a_plain_name_of_a_folder_is_loaded_by_that_name(tmp_path: Path, member: Member) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first / "beta", second / "beta", second / "gamma"):
        shutil.copytree(embedded_model_path(), folder)
    (second / "beta" / "tokenizer.json").unlink()
    (second / "gamma" / "tokenizer.json").unlink()

    async def story(node: Node) -> None:
        following(node)
        listed = {each.id: each.path for each in await node.parts.gateway.on_request()}
        assert listed["beta"] == first / "beta"
        assert "gamma" not in listed
        waiting = await ask(node, "beta")
        assert row(node, "beta").model == "beta", "each Mac has folders of its own"  # type: ignore[union-attr]
        waiting.lease.close()
        assert (await refusal(node, "gamma")).status == 404
        for name in ("..", ".", "x" * 300, "first/beta"):
            assert (await node.parts.gateway.acquire_model(name)).come
        assert names(node) == ["beta", LOADED]

    folders = (str(first), str(second), str(tmp_path / "none"))
    play(tmp_path, member, story, load_on_request=True, model_folders=folders)


@pytest.mark.parametrize(
    ("broken", "status", "code", "more"),
    [(True, 400, Code.MODEL_INVALID, ""), (False, 503, Code.NOT_READY, "; try again later")],
)
@at_node(load_on_request=True)
async def test_requests_for_a_model_that_cannot_be_loaded_fail_with_the_reason_and_it_ends(
    node: Node, broken: bool, status: int, code: Code, more: str
) -> None:
    link = following(node)
    waiting, second = await ask(node, WANTED), await ask(node, WANTED)
    node.hear_assigned(link, A, group=f"{WANTED}#0")
    node.hear(link, told(WANTED, "failed", "no weights", broken=broken))
    node.tick(0.01)
    for error in (await waiting.refused(), await second.refused(), await refusal(node, WANTED)):
        assert (error.status, error.code) == (status, code)
        assert error.detail == f"{WANTED} could not be loaded: no weights{more}"
    assert names(node) == [WANTED, LOADED], "the others have yet to see why"
    node.tick(ENDS_S)
    assert names(node) == [LOADED]
    node.no_longer(link, told(WANTED, "failed"))
    node.tick()
    assert (await refusal(node, WANTED)).detail == error.detail
    assert names(node) == [LOADED], "no request tries it again"
    node.tick(REFUSED_S)
    again = await ask(node, WANTED)
    assert not again.lease.come
    assert names(node) == [WANTED, LOADED]
    again.lease.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [(PINNED, None), (KEEP_S, None), (None, PINNED)],
    ids=["pinned", "kept", "pinned then"],
)
@at_node(load_on_request=True)
async def test_what_no_request_here_made_or_a_user_pinned_stays_though_it_cannot_be_loaded(
    node: Node, before: int | None, after: int | None
) -> None:
    link, serve = following(node), node.parts.node.desired.serve
    if before is not None:
        serve(WANTED, keep_s=before)
    waiting = await ask(node, WANTED)
    if after is not None:
        serve(WANTED, keep_s=after)
    node.hear_assigned(link, A, group=f"{WANTED}#0")
    node.hear(link, told(WANTED, "failed", "a rank died"))
    node.tick(0.01)
    assert "a rank died" in (await waiting.refused()).detail
    node.tick(ENDS_S)
    node.tick()
    assert names(node) == [WANTED, LOADED]
    assert "a rank died" in (await refusal(node, WANTED)).detail


NO_ROOM = "mac-a has 3.0 GB for 40.0 GB"


def coordinates(node: Node, link: FakeLink, seconds: float) -> None:
    """A, which coordinates, beats for so long."""
    for pulse in range(int(seconds * 2)):
        node.hear(link, Beat(5, A, 0, 0, 0, True, 10 * int(CLOCK.now) + pulse))
        node.tick()


def nowhere(node: Node, link: FakeLink, model: str) -> None:
    """A, which coordinates, has no place for this model."""
    term = node.parts.node.leadership.claim.term
    node.obey(link, GroupAssignment(f"{model}#0", model, term, 900, why=NO_ROOM))
    node.tick(0.01)


@at_node(load_on_request=True)
async def test_a_model_that_has_no_place_for_a_while_has_none(node: Node) -> None:
    link = following(node)
    waiting = await ask(node, WANTED)
    nowhere(node, link, WANTED)
    node.tick(UNPLANNED_S / 2)
    assert row(node, WANTED) is not None
    await sees(lambda: NO_ROOM in waiting.told)
    node.tick(UNPLANNED_S)
    error = await waiting.refused()
    assert (error.status, error.code) == (503, Code.NOT_READY)
    assert error.detail == f"{WANTED} cannot be served: {NO_ROOM}; try again later"
    node.tick(ENDS_S)
    assert names(node) == [LOADED]
    again = await ask(node, WANTED)
    assert row(node, WANTED) is not None, "there may be room by now"
    again.lease.close()


@at_node(load_on_request=True)
async def test_a_request_waits_for_the_room_of_a_model_that_is_in_use(node: Node) -> None:
    link = following(node)
    node.hear(link, ModelStatus(WANTED, FINGERPRINT, ""), told(LOADED, "ready", open_requests=1))
    waiting = await ask(node, WANTED)
    nowhere(node, link, WANTED)
    coordinates(node, link, 2 * UNPLANNED_S)
    await sees(lambda: waiting.told == [f"waiting until the requests for {LOADED} end"])
    assert not waiting.lease.come
    node.hear(link, told(LOADED, "ready"))
    coordinates(node, link, 1.0)
    assert NO_ROOM in (await waiting.refused()).detail


@at_node(load_on_request=True)
async def test_a_request_does_not_wait_for_room_that_no_mac_has(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = following(node)
    monkeypatch.setattr(node.parts.machines, "no_place", lambda *_: NO_ROOM)
    node.hear(link, told(LOADED, "ready", open_requests=1))
    waiting = await ask(node, WANTED)
    nowhere(node, link, WANTED)
    node.tick(UNPLANNED_S)
    assert NO_ROOM in (await waiting.refused()).detail


@pytest.mark.parametrize(
    ("limits", "within_s", "status", "code"),
    [
        (Limits(queue_s=0.05), 0.0, 503, Code.OVERLOADED),
        (Limits(queue_s=0.05), 9.0, 503, Code.OVERLOADED),
        (Limits(queue_s=9.0), 0.05, 504, Code.DEADLINE),
    ],
)
@at_node("limits", load_on_request=True)
async def test_no_request_waits_for_ever(node: Node, within_s: float, status: int, code: Code) -> None:
    following(node)
    error = await (await ask(node, WANTED, within_s)).refused()
    assert (error.status, error.code) == (status, code)
    assert "within 0.05 s" in error.detail
    assert node.parts.on_request.leases == {}


@at_node(load_on_request=True, limits=Limits(max_open_requests=8))
async def test_requests_that_wait_count_among_the_open_ones(node: Node) -> None:
    """Of eight, one client may have seven; a model that is ready answers on."""
    link, gateway = following(node), node.parts.gateway

    async def refused(model: str, client: str) -> tuple[str, int]:
        with pytest.raises(RequestError) as caught:
            await gateway.acquire_model(model, client=client)
        assert caught.value.code is Code.OVERLOADED
        return caught.value.detail, caught.value.status

    seven = [Waiting(await gateway.acquire_model(WANTED, client="key ada")) for _ in range(7)]
    limit = "7 requests of this client are open; one client may have 7 of 8"
    assert await refused(WANTED, "key ada") == (limit, 429)
    assert await refused("org/other", "key ada") == (limit, 429)
    with pytest.raises(RequestError, match=limit):
        gateway.generate(Generate(0, (1, 2), 5), client="key ada", model=LOADED)
    other = Waiting(await gateway.acquire_model(WANTED, client="key bo"))
    full = ("8 requests are open, the most this server takes", 503)
    for model in (WANTED, "org/other"):
        assert await refused(model, "key cy") == full
    assert set(names(node)) == {LOADED, WANTED}
    assert (await gateway.acquire_model(LOADED, client="key cy")).come
    seven[0].lease.close()
    third = Waiting(await gateway.acquire_model(WANTED, client="key cy"))
    node.hear_assigned(link, A, group=f"{WANTED}#0")
    ready(node, WANTED)
    for each in (*seven[1:], other, third):
        await each.has_come()
    gateway.generate(Generate(0, (1, 2), 5), client="key cy", model=WANTED)


@at_node(load_on_request=True)
async def test_a_request_at_an_agent_about_to_stop_must_go_elsewhere(node: Node) -> None:
    following(node)
    waiting = await ask(node, WANTED)
    node.parts.gateway.closing = "this Mac is about to stop"
    node.parts.on_request.advance(CLOCK.now)
    error = await waiting.refused()
    assert (error.status, error.code) == (503, Code.SHUTTING_DOWN)
    assert row(node, WANTED) is not None


@at_node(load_on_request=True)
async def test_a_request_without_a_name_takes_the_first_model_and_brings_none(node: Node) -> None:
    following(node)
    node.parts.node.desired.serve(WANTED, keep_s=PINNED)
    waiting = await ask(node, "default")
    ready(node, WANTED)
    await waiting.has_come()
    assert waiting.lease.model == WANTED
    waits = await ask(node, "org/third")
    node.parts.node.desired.unload_all()  # as a user
    node.tick(0.01)
    assert (await waits.refused()).detail == "org/third was unloaded; try again"
    error = await refusal(node, None)
    assert (error.status, error.code) == (503, Code.NOT_READY)
    assert "nothing is loaded; name a model" in error.detail
    assert names(node) == []


@at_node(load_on_request=True)
async def test_another_revision_does_not_replace_a_pinned_one(node: Node) -> None:
    following(node)
    node.parts.node.desired.serve(LOADED, keep_s=PINNED)
    error = await refusal(node, f"{LOADED}@old")
    assert (error.status, error.code) == (404, Code.MODEL_NOT_FOUND)
    assert f"{LOADED} is pinned" in error.detail
    assert row(node, LOADED).model == LOADED  # type: ignore[union-attr]


@at_node(load_on_request=True)
async def test_a_model_that_its_configuration_rules_out_makes_no_deployment(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(name: str) -> str:
        raise ModelError("it is a BertModel, which writes no text")

    monkeypatch.setattr(on_request, "stored_name", look)
    following(node)
    error = await refusal(node, WANTED)
    assert (error.status, error.code, error.param) == (400, Code.MODEL_INVALID, "model")
    assert error.detail == f"{WANTED} cannot be served: it is a BertModel, which writes no text"
    assert names(node) == [LOADED]


@at_node(load_on_request=True)
async def test_a_folder_that_was_served_keeps_its_short_name(node: Node, tmp_path: Path) -> None:
    following(node)
    folder = shutil.copytree(embedded_model_path(), tmp_path / "beta")
    node.parts.node.desired.serve(str(folder), keep_s=PINNED)
    node.parts.node.desired.unload("beta")
    listed = {each.id for each in await node.parts.gateway.on_request()}
    assert "beta" in listed
    waiting = await ask(node, "beta")
    assert row(node, "beta").model == str(folder)  # type: ignore[union-attr]
    waiting.lease.close()
    node.parts.node.desired.unload("beta")
    (folder / "tokenizer.json").unlink()
    error = await refusal(node, "beta")
    assert (error.status, error.code, error.param) == (404, Code.MODEL_NOT_FOUND, "model")
    assert error.detail == "beta cannot be served: the folder is incomplete: it lacks tokenizer.json"


def leading(node: Node, **keeps: int) -> FakeLink:
    """A link to A, which serves `org/NAME` for each of these; this node coordinates."""
    link = node.meet(A)
    node.lead(LEAD)
    for name, keep_s in keeps.items():
        node.parts.node.desired.serve(f"org/{name}", keep_s=keep_s)
        node.hear(link, ModelStatus(f"org/{name}", FINGERPRINT, ""))
    return link


def use(node: Node, link: FakeLink, **idle_s: int) -> None:
    """A reports how long `org/NAME` is unused; half a second passes."""
    node.hear(link, *(told(f"org/{name}", "ready", idle_s=seconds) for name, seconds in idle_s.items()))
    node.live_once(link)


@at_node()
async def test_a_deployment_ends_once_no_request_came_for_as_long_as_it_stays(node: Node) -> None:
    link = leading(node, brief=0, short=20, long=600, yields=YIELDS, endless=LONGEST_S)
    everything = {"org/short", "org/long", "org/yields", "org/endless", "tiny"}
    use(node, link, brief=0, short=10, long=500, yields=9000, endless=9000)
    assert set(names(node)) == everything | {"org/brief"}
    health = node.parts.gateway.health()
    expires = {each.name: each.expires_s for each in health.deployments}
    assert expires == {
        "tiny": None, "org/brief": 2, "org/short": 10, "org/long": 100, "org/yields": None,
        "org/endless": None,
    }  # fmt: skip
    assert node.parts.coordinator.step(CLOCK.now) <= CLOCK.now + 2
    use(node, link, brief=2, short=10, long=590, yields=9000, endless=9000)
    assert set(names(node)) == everything
    use(node, link, short=20, long=600, yields=9000, endless=9000)
    assert set(names(node)) == everything - {"org/short", "org/long"}


@at_node(limits=replace(Limits(), queue_s=30))
async def test_a_deployment_that_is_not_ready_stays_while_requests_may_wait_for_it(node: Node) -> None:
    link = leading(node, loads=5, lost=5)
    for _ in range(10):
        node.hear(link, told("org/loads", "loading"))
        node.live_once(link)
    assert {"org/loads", "org/lost"} <= set(names(node))
    node.parts.coordinator._expire(CLOCK.now + 20)
    node.parts.coordinator._expire(CLOCK.now + 40)
    assert {"org/loads"} <= set(names(node))
    assert "org/lost" not in names(node)


@pytest.mark.parametrize(
    ("idle_s", "gone"),
    [({"one": 5, "two": 9}, "two"), ({"one": 90, "two": 9}, "one"), ({"one": 90, "two": 0}, "one")],
)
@at_node()
async def test_the_least_recently_used_deployment_gives_way_and_no_pinned_one(
    node: Node, idle_s: dict[str, int], gone: str, weights: ModelSource
) -> None:
    link = leading(node, one=600, two=600, pinned=PINNED)
    turns = node.parts.coordinator._view(CLOCK.now)
    assert {each.row.name: each.unused_s for each in turns.wanted}["org/pinned"] == 0
    use(node, link, **idle_s, pinned=9000)
    view = node.parts.coordinator._view(CLOCK.now)
    unused = {each.row.name: each.unused_s for each in view.wanted}
    assert max(unused, key=unused.__getitem__) == f"org/{gone}"
    assert unused["org/pinned"] == unused["tiny"] == 0
    use(node, link, **{name: seconds and seconds + 1 for name, seconds in idle_s.items()}, pinned=9000)
    after = node.parts.coordinator._view(CLOCK.now)
    assert after.wanted == view.wanted, "time alone makes no other decision"


@pytest.mark.parametrize("state", [*map(ServingState, COMING)])
@at_node()
async def test_open_requests_wait_for_a_replica_on_its_way_when_another_is_given_up(
    node: Node, state: ServingState
) -> None:
    gateway, groups = node.parts.gateway, node.parts.groups
    link = following(node)
    node.parts.node.desired.serve(LOADED, replicas=2)
    lost = GroupError("a rank died", Code.RANK_LOST)
    first, second = (groups.known(f"{LOADED}#{index}").supervisor for index in (0, 1))
    answer = gateway.generate(Generate(0, (1, 2), 4))
    gateway.park(f"{LOADED}#0", lost)
    node.hear_assigned(link, A, group=f"{LOADED}#1")
    first.status.state, second.status.state = ServingState.FAILED, state
    gateway.fail(LOADED, lost, unless_ready=True)
    assert gateway.open_requests == 1
    second.status.state = ServingState.FAILED
    gateway.fail(LOADED, lost, unless_ready=True)
    with pytest.raises(GroupError, match="a rank died"):
        await within(anext(answer))
    assert gateway.open_requests == 0
