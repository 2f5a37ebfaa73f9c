"""One node of a cluster whose other members are played by hand: no links, no processes, time by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlxtp.admin.parts import AgentParts
from mlxtp.agent import build_parts
from mlxtp.cluster import node as cluster_module
from mlxtp.cluster import state_changes
from mlxtp.cluster.cluster_state import PINNED
from mlxtp.cluster.node import ClusterNode
from mlxtp.cluster.state_changes import RosterProofs
from mlxtp.config import Settings
from mlxtp.errors import Code, MlxtpError, ModelError
from mlxtp.groups.group import Group
from mlxtp.groups.lifecycle import EpochPlan
from mlxtp.models import local_model
from mlxtp.models.inspect import ModelSource, facts_in
from mlxtp.models.local_model import LocalModel
from mlxtp.placement.cost_model import ALONE, RING_ETHERNET
from mlxtp.wire.certificates import NodeIdentity
from mlxtp.wire.cluster_messages import (
    AgentHello,
    Beat,
    GroupAssignment,
    Interface,
    Machine,
    Members,
    ModelStatus,
    Report,
)
from mlxtp.wire.codecs import Message, NodeRow
from mlxtp.wire.frames import encode
from mlxtp.wire.messages import Error

from ..played import scenes
from ..wire.members import Member, founder
from .scenes import run, within

MACHINE = Machine(
    "linux", "", "", "", "a chip", 8, 0, 64 << 30, 32 << 30, 0, 0, "ac", "unsupported", False,
    (Interface("lo", "127.0.0.1", 8, "loopback", 0, True),),
)  # fmt: skip
A, B = "a" * 32, "f" * 32
"""Two other members: the smallest id of all, and the largest."""
FINGERPRINT = "5" * 64
GROUP = "tiny#0"


class FakeLink:
    """A control link as `PeerLinks` sees it."""

    def __init__(self, number: int, node_id: str, boot_id: str, cluster_id: str, node: Node) -> None:
        self.number = number
        self.node_id = node_id
        self.hello = AgentHello(
            1, node_id, cluster_id, boot_id, f"mac-{node_id[0]}", (), (), ("10.0.0.9:4711",), ""
        )
        self.fingerprint = node_id * 2
        self.identity = NodeIdentity(node_id, cluster_id, self.fingerprint)
        self.dialled, self.local, self.remote = False, "127.0.0.1", "127.0.0.1"
        self.sent: list[Message] = []
        self._node = node

    def send(self, message: Message) -> None:
        encode(message, 0, 1)
        self.sent.append(message)

    def refuse(self, error: MlxtpError) -> None:
        self.sent.append(Error(error.code, error.detail, 0))
        self.close()

    def close(self, goodbye: bool = False) -> None:
        links = self._node.parts.node.links._links
        if links.pop(self.number, None) is not None:
            self._node.parts.node.links.down(cast(Any, self), "closed here", False)

    def heard(self, kind: type[Message]) -> list[Any]:
        """Messages of a kind; of a kind of rows, those that were reported."""
        rows = [each.row if isinstance(each, Report) and not each.over else each for each in self.sent]
        return [each for each in (rows if issubclass(kind, NodeRow) else self.sent) if isinstance(each, kind)]

    def ended(self, kind: type[NodeRow]) -> list[Any]:
        """Rows of a kind that there are no longer."""
        return [
            each.row
            for each in self.sent
            if isinstance(each, Report) and each.over and isinstance(each.row, kind)
        ]


class Clock:
    """The time of the node under test goes on only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


CLOCK = Clock()


class Node:
    """The node under test. Its shown group is that of the model `tiny`, once that is wanted."""

    def __init__(self, member: Member, home: Path, machine: Machine | None = None, **changes: Any) -> None:
        chosen = Settings(home, "", 0, 1, "tiny", cluster=True, name="studio", **changes)
        self.parts = build_parts(ClusterNode(chosen, member.identity, machine or MACHINE), member.store)
        self.orders: list[tuple[str, Message]] = []
        self.parts.hosted.received = lambda host, order: self.orders.append((host, order))  # type: ignore[method-assign]
        self._numbers = iter(range(1, 10_000))
        self._reports = itertools.count(1)

    @property
    def group(self) -> Group:
        """The group that stands for this node."""
        return self.parts.groups.shown

    def meet(self, node_id: str, boot_id: str = "boot", fingerprint: str = "") -> FakeLink:
        link = FakeLink(next(self._numbers), node_id, boot_id, self.parts.node.identity.cluster_id, self)
        link.fingerprint = fingerprint or link.fingerprint
        self.parts.node.links._links[link.number] = cast(Any, link)
        if not self.parts.node.links.up(cast(Any, link)):
            self.parts.node.links._links.pop(link.number, None)
        return link

    def hear(self, link: FakeLink, *messages: Message) -> None:
        """As `Neighbours` does: a member that breaks a rule loses the link. Rows come in reports."""
        for each in messages:
            message = Report(next(self._reports), each, False) if isinstance(each, NodeRow) else each
            encode(message, 0, 1)
            try:
                self.parts.node.links.received(cast(Any, link), message)
            except MlxtpError:
                link.close()

    def obey(self, link: FakeLink, *assignments: GroupAssignment) -> None:
        """Hear assignments, and take them in as the next round does."""
        self.hear(link, *assignments)
        self.parts.coordinator.step(CLOCK.now)

    def no_longer(self, link: FakeLink, *rows: NodeRow) -> None:
        """The other end of this link has these rows no longer."""
        self.hear(link, *(Report(next(self._reports), each, True) for each in rows))

    def holds(self, node_id: str, first: Member) -> None:
        """A member that it has met tells it that it holds the authority, as `first` has signed."""
        entry, proofs = self.parts.node.replica.roster.members()[node_id], RosterProofs(first.identity)
        stated = proofs.holding(replace(entry, holds=True, holds_in=50))
        self.hear(cast(FakeLink, self.parts.node.links.to(node_id)), Members((stated,)))

    def tick(self, seconds: float = 0.5) -> None:
        """Do what `live` does, twice a second, but for writing to the disk."""
        CLOCK.now += seconds
        self.parts.node.gossip.beat()
        self.parts.groups._broadcast()
        self.parts.node.rounds.step(CLOCK.now)

    async def tick_and_save(self) -> None:
        self.tick()
        await self.parts.node.save()

    def live(self, *links: FakeLink) -> None:
        """Some seconds in which all of them beat."""
        for _ in range(8):
            self.live_once(*links)

    def live_once(self, *links: FakeLink) -> None:
        """Half a second of that."""
        for link in links:
            self.hear(link, Beat(0, "", 0, 0, 0, True, 0))
        self.tick()

    def follow(self, link: FakeLink, term: int = 5) -> None:
        """From now on the other end of this link coordinates."""
        self.hear(link, Beat(term, link.node_id, 0, 0, 0, True, 1))
        assert self.parts.node.leadership.claim.node_id == link.node_id

    def hear_assigned(self, link: FakeLink, owner: str, *others: str, group: str = GROUP) -> None:
        """The other end of this link, which coordinates, assigns these ranks to a group, or none."""
        term, deployment = self.parts.node.leadership.claim.term, group.rpartition("#")[0]
        ranks = (owner, *others) if owner else ()
        kind = RING_ETHERNET if others else ALONE
        self.obey(link, GroupAssignment(group, deployment, term, next(self._numbers), ranks, kind))

    def lead(self, source: ModelSource, machines: Mapping[str, Machine] = {}) -> None:
        """From now on this node coordinates, and has each model that is wanted, as all others have `tiny`.

        It has assigned the group of `tiny`: to itself, as it has the most memory of equal Macs.
        """
        node = self.parts.node
        mine = node.links.reports.of(Machine)[node.node_id]
        sizes = {name: getattr(mine, name) for name in ("memory_bytes", "free_bytes", "gpu_bytes")}
        more = {name: size + size // 16 for name, size in sizes.items()}
        node.links.reports.publish(Machine, replace(mine, **more))
        self.know(source)
        node.desired.serve("tiny", nodes=node.settings.nodes, keep_s=PINNED)
        for link in cast(list[FakeLink], list(node.links.links())):
            self.hear(link, Beat(0, "", 0, 0, 0, True, 0), machines.get(link.node_id, MACHINE))
            self.hear(link, ModelStatus("tiny", FINGERPRINT, ""))
        node.leadership._follow(node.leadership._next_claim(node.node_id), CLOCK.now)
        self.tick()  # it takes in who is here
        self.tick()
        assert node.leadership.leading
        assert self.parts.coordinator.waiting == ""

    def know(self, source: ModelSource) -> None:
        """From now on each search for a model finds this one at once."""
        models = self.parts.models

        def new(name: str) -> LocalModel:
            model = LocalModel(name, self.parts.node.settings, self.parts.transfers, models._report)

            def search() -> None:
                model.path = source.path
                try:
                    model._shape = facts_in(source.path).shape(source.id, 0)
                except ModelError as error:
                    model.problem = error.detail
                else:
                    model.source, model.fingerprint, model.weight_bytes = source, FINGERPRINT, 1 << 20
                models._report(model)

            model.search = search  # type: ignore[method-assign]
            model.close = model._background.close  # type: ignore[method-assign]
            return model

        models._new = new  # type: ignore[method-assign]


def awaited(group: Group) -> asyncio.Future[EpochPlan]:
    """As if its supervisor waited for the next plan: return what gets it."""
    group.controller._next = made = asyncio.get_running_loop().create_future()
    return made


def alone(home: Path) -> AgentParts:
    """The parts of an agent that runs alone, with no deployment. Nothing runs them."""
    member = founder(home / "member")
    settings = Settings(home, "", 0, 1, "tiny", name="studio")
    node = ClusterNode(settings, member.identity, MACHINE, home=member.store.folder.parent)
    return build_parts(node, member.store)


@contextmanager
def by_hand() -> Iterator[None]:
    """Meanwhile time is `CLOCK`'s, and no model is looked for."""

    async def find(name: str) -> Path:
        raise ModelError(f"{name} is not here", Code.MODEL_NOT_FOUND)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_model, "find_model", find)
        for module in (cluster_module, state_changes):
            patch.setattr(module, "time", CLOCK)
        yield


def play(home: Path, member: Member, story: Callable[[Node], Awaitable[None]], **changes: Any) -> None:
    async def scene() -> None:
        node = Node(member, home, **changes)
        try:
            await within(story(node))
        finally:
            await node.parts.close()

    with by_hand():
        run(scene())


def play_leading(
    home: Path,
    member: Member,
    weights: ModelSource,
    story: Callable[[Node, FakeLink], Awaitable[None]],
    machines: Mapping[str, Machine] = {},
    **changes: Any,
) -> None:
    """As `play`; the node coordinates, and has met A. `machines` are its own ("") and those of others."""

    async def leads(node: Node) -> None:
        a = node.meet(A)
        node.lead(weights, machines)
        await story(node, a)

    play(home, member, leads, machine=machines.get(""), **changes)


at_node = scenes(play, "tmp_path", "member")
at_leader = scenes(play_leading, "tmp_path", "member", "weights", stages=2)
