"""A member that lies: what it says may cost its link, and ends no agent, now or after a restart."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mlxtp.cluster import state_file
from mlxtp.groups.overview import ReplicaLoad
from mlxtp.models.inspect import ModelSource
from mlxtp.wire.cluster_messages import (
    BOTH_WAYS,
    Deployment,
    Deployments,
    EndEpoch,
    GroupAssignment,
    MachineWanted,
    ModelHeld,
    ModelStatus,
    Prepare,
    Serving,
)
from mlxtp.wire.codecs import Message

from ..groups import mutated
from ..groups.mutated import Lied
from ..groups.one_node import GROUP, A, B, Node, play
from ..wire.members import Member, founder
from ..wire.samples import EXAMPLES

pytestmark = pytest.mark.fault

INVENTED = 10_000
MOST = 1024
"""Elements that no collection of an agent has more of, whatever its members say."""
Messages = Callable[[str], Iterable[Message]]


@pytest.fixture(autouse=True)
def _nothing_is_fetched() -> Iterator[None]:
    with mutated.unconnected():
        yield


def quarter(begin: int) -> Messages:
    return lambda own: islice(mutated.each_field(own), begin, None, 4)


def random(seed: int, count: int) -> Messages:
    return lambda own: mutated.at_random(seed, count, own)


@pytest.mark.parametrize(
    ("leads", "messages"),
    [
        *(pytest.param(n < 2, quarter(n), marks=pytest.mark.slow, id=f"part {n}") for n in range(4)),
        *(pytest.param(bool(n), random(n, 500), id=f"some {n}") for n in (0, 1)),
        *(pytest.param(bool(n % 2), random(n, 2000), marks=pytest.mark.chaos) for n in range(2, 102)),
    ],
)
def test_no_message_ends_an_agent_or_an_honest_link(
    tmp_path: Path,
    member: Member,
    weights: ModelSource,
    leads: bool,
    messages: Messages,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    async def story(node: Node) -> None:
        lied = Lied(node, weights, leads=leads)
        await lied.hears(messages(node.parts.node.node_id))
        lied.shows()
        kept = state_file.SavedState(node.parts.node.leadership.persistent_state(), {})
        assert state_file.from_text(state_file.to_text(kept)) == kept, "it can be read after a restart"

    play(tmp_path, member, story)
    assert [each.getMessage() for each in caplog.records if each.exc_info] == [], "no handler, no step failed"


def test_each_message_that_members_send_is_mutated() -> None:
    assert set(mutated.ODD) == set(BOTH_WAYS)
    assert all(mutated.ODD[kind] or not mutated.field_codecs(kind) for kind in BOTH_WAYS)


def invented(own: str) -> Iterator[Message]:
    """Names of groups, deployments and models that nobody has."""
    serving, load, held = (EXAMPLES[kind] for kind in (Serving, ReplicaLoad, ModelHeld))
    for n in range(INVENTED):
        name = f"m{n}/x"
        yield replace(serving, group=f"{name}#{n % 64}", deployment=name, participants=(A,), epoch=3)
        yield replace(load, group=f"{name}#{n % 64}")
        yield GroupAssignment(f"{name}#0", name, 1000, n + 1, (A,))
        yield ModelStatus(name, "", "it has none")
        if n % 8 == 0:
            yield replace(held, model=name)
            yield Prepare(n + 1, 1, "", name, group=f"{name}#0")
            yield EndEpoch(n + 1, True)
        if n % 512 == 0:
            rows = tuple(
                Deployment(f"{name}{i}", f"{name}{i}", version=100 + n, writer=f"{n:032x}") for i in range(32)
            )
            yield Deployments(rows, 0, False)
        if n % 512 == 256:
            rows = tuple(Deployment(f"{name}{i}", keep_s=0, version=100 + n, removed=True) for i in range(32))
            yield Deployments(rows, 0, False)


def large(root: object, most: int = MOST) -> list[str]:
    """Return the collections of the agent with more elements, by the attributes that lead there."""
    seen, found, left = set[int](), [], deque([("", root)])
    while left:
        path, at = left.popleft()
        if id(at) in seen or isinstance(at, str | bytes | int | float | type(None)):
            continue
        seen.add(id(at))
        below: Iterable[tuple[object, Any]] = ()
        if isinstance(at, dict | list | tuple | set | frozenset | deque):
            if len(at) > most:
                found.append(f"{path}: {len(at)}")
            below = ((key, value) for key, value in (at.items() if isinstance(at, dict) else enumerate(at)))
        elif type(at).__module__.startswith("mlxtp."):
            names = {*vars(at)} if hasattr(at, "__dict__") else set()
            names |= {name for kind in type(at).__mro__ for name in getattr(kind, "__slots__", ())}
            below = ((name, getattr(at, name)) for name in names if hasattr(at, name))
        left.extend((f"{path}.{name}"[:200], value) for name, value in below)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("leads", [True, False])
def test_invented_names_fill_no_collection(
    tmp_path: Path, member: Member, weights: ModelSource, leads: bool
) -> None:
    async def story(node: Node) -> None:
        lied = Lied(node, weights, leads=leads)
        await lied.hears(invented(node.parts.node.node_id), every=3000)
        lied.shows()
        assert large(node.parts) == []

    play(tmp_path, member, story)


def test_deployments_that_no_mac_can_hold_make_no_groups(
    tmp_path: Path, member: Member, weights: ModelSource
) -> None:
    async def story(node: Node) -> None:
        lied, made = Lied(node, weights, leads=False), list[str]()
        names, make = [f"big{i}" for i in range(64)], node.parts.groups._make
        node.parts.groups._make = lambda name: made.append(name) or make(name)  # type: ignore[func-returns-value]
        for part in (names[:32], names[32:]):
            rows = tuple(Deployment(name, name, replicas=64, version=200, writer=A) for name in part)
            await lied.hears([Deployments(rows, 0, False)])
        each = (GroupAssignment(f"{n}#{i}", n, 1000, 1, (A,)) for n in names for i in range(64))
        await lied.hears(each, every=10_000)
        lied.shows()
        assert len(made) <= 3 * 16 + 2 * 64 + 128

    play(tmp_path, member, story)


def test_a_part_that_fails_costs_the_link_and_a_round_goes_on(
    tmp_path: Path, member: Member, weights: ModelSource, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with a part, its error reaches neither the reader of other links nor the agent."""

    async def story(node: Node) -> None:
        lied = Lied(node, weights, leads=True)
        node.parts.node.links.on(lambda _link, _message: {}["a bug"], MachineWanted)
        node.hear(lied.liar, MachineWanted())
        assert not lied.linked(lied.liar)
        assert "a message (MachineWanted) of mac-a (aaaaaaaa) is refused" in caplog.text
        liar, after = node.meet(A, "again"), []
        node.hear(liar, replace(EXAMPLES[Serving], participants=(A,)))  # type: ignore[type-var]
        controller = node.parts.groups.known(GROUP).controller
        controller.situation = lambda _since: {}["a bug"]  # type: ignore[method-assign]
        node.parts.node.rounds.add(after.append)
        node.live_once(lied.honest, liar)
        node.live_once(lied.honest)
        assert (len(after), lied.linked(liar), lied.linked(lied.honest)) == (2, False, True)
        assert caplog.text.count("a step of this agent failed, and is tried again") == 1
        assert not node.parts.node.over.done()

    play(tmp_path, member, story)


def test_the_signed_name_counts_and_the_audit_log_says_who_removed_a_deployment(
    tmp_path: Path, weights: ModelSource, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = founder(tmp_path)

    async def story(node: Node) -> None:
        for node_id in (A, B):
            node.parts.node.enrolment.admit(node_id, "a", node_id * 2)
        lied = Lied(node, weights, leads=True)
        assert lied.liar.hello.name == "mac-a"
        assert node.parts.node.name_of(A) == "a (aaaaaaaa)"
        [row] = node.parts.node.desired.table.rows
        gone = Deployment("tiny", keep_s=0, version=row.version + 1, writer=B, removed=True)
        node.hear(lied.liar, Deployments((gone,), 0, False))
        [record] = [each for each in caplog.records if "removed tiny" in each.getMessage()]
        assert record.getMessage() == "a (ffffffff) removed tiny, as a (aaaaaaaa) reports"
        assert record.foreign  # type: ignore[attr-defined]

    play(tmp_path, first, story)
