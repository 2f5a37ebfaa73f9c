"""Whole clusters that come and go, on a clock and a network of our own: what holds in every story."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxtp.cluster.membership import Change, MemberState
from mlxtp.wire.cluster_messages import Deployment

from ..placement.made_up_macs import unsealed
from ..placement.made_up_models import shape
from .deployed import wants
from .several_groups import SeveralGroups
from .simulated_node import Journal
from .simulated_rules import OneGroup
from .simulation import World

pytestmark = pytest.mark.slow

NAMES = "abcdef"
QUIET_S = 45.0
"""Within it everything has calmed down: a node that stood still (6 s), a member that was lost (10 s), open
requests (10 s), one after the other."""


def serving(names: str, seed: int = 0) -> World:
    """These nodes, started together, with a model wanted."""
    world = World(names, seed)
    world.start(*names)
    world.run(1.0)
    want(world, names[0], "llama")
    world.run_until(world.complaint, within_s=10.0)
    return world


def want(world: World, name: str, model: str, nodes: str = "auto") -> None:
    node = world.nodes[name]
    wants(node.replica, model, nodes)
    node.broadcast(*node.replica.deployments.messages())
    node.step()


def formed(world: World) -> list[tuple[float, str, int]]:
    """(when, owner, number) of every epoch."""
    return sorted(
        (when, name, number)
        for name, journal in world.journals.items()
        for when, what, number, owner in journal.epochs
        if what == "join" and owner == name
    )


def remove(world: World, by: str, name: str) -> None:
    node = world.nodes[by]
    node.replica.hold(node.replica.roster.removing(name, unsealed))
    node.broadcast(*node.replica.roster.messages())
    node.follow_roster()


def act(world: World, step: str) -> bool:
    """Have happen what a step says, such as "kill ab", as far as it can. Return False if it says no event."""
    what, *words = step.split()
    names = words[0] if words else ""
    node = world.nodes.get(names)
    match what:
        case "start" | "kill" | "leave":
            for name in names:
                getattr(world, what)(name)
        case "restart":
            world.kill(names)
            world.start(names)
        case "drain":
            for name in sorted(set(names) & world.nodes.keys()):
                world.drain(name)
        case "power":
            world.kill(names, power=True)
        case "want":
            if node is not None:
                want(world, names, words[1].strip("-"), *words[2:])
        case "serve":
            if node is not None:
                serve(world, names, words[1], int(words[2]), words[3])
        case "requests":
            if node is not None:
                node.open_requests = int(words[1])
        case "pause":
            for name in names:
                world.pause(name, float(words[1]))
        case "remove":
            if others := world.nodes.keys() - {names}:
                remove(world, min(others), names)
        case "cut" | "partition" | "heal":
            getattr(world, what)(*words)
        case _:
            return False
    return True


class Told:
    """A world and what a script had happen in it. A check fails where it stands in the script."""

    def __init__(self, names: str, strong: str = "") -> None:
        self.world = World(names, rule=OneGroup(dict.fromkeys(strong, 5)))
        self.since = 0.0

    def act(self, step: str) -> None:
        what, *words = step.split()
        names = words[0] if words else ""
        match what:
            case "run":
                self.world.run(float(names))
            case "calm":
                self.world.run_until(self.world.complaint, within_s=float(names))
            case "now":
                self.since = self.world.now
            case _:
                assert act(self.world, step) or self.found(what, names) == names, step

    def found(self, what: str, names: str) -> str:
        """Return what is true now, in the words in which a script tells it."""
        nodes, epochs = self.world.nodes, [each for each in formed(self.world) if each[0] > self.since]
        match what:
            case "led_by":
                claims = {node.leadership.claim for node in nodes.values()}
                return "|".join(f"{claim.node_id}{claim.term}" for claim in claims)
            case "formed":  # since "now"
                return "".join(f"{owner}{number}" for _, owner, number in epochs) or "-"
            case "after":  # seconds, the last of these was
                low, _, high = names.partition("..")
                return names if float(low) <= epochs[-1][0] - self.since <= float(high) else str(epochs)
            case "runs":
                return "".join(sorted(name for name, node in nodes.items() if node.running)) or "-"
            case "models":
                return "".join({node.running.form.model for node in nodes.values() if node.running})
            case "deployed":
                [rows] = {node.replica.deployments.live() for node in nodes.values()}
                return "+".join(row.model for row in rows)
            case "here":
                return "".join(sorted(nodes)) or "-"
            case "sees_removed":  # "abc": a and b see that c is
                *seers, gone = names
                states = {nodes[name].membership.status_of(gone).state for name in seers}
                return names if states == {MemberState.REMOVED} else str(states)
            case _:
                assert what == "nobody_dead"
                return (
                    ""
                    if all(change.after is not MemberState.DEAD for change in all_changes(self.world))
                    else "!"
                )


STORIES = """
all that start at once form one epoch: abcd serving
    formed a1
a whole cluster restarts without a hand, in one epoch: abcd serving
    kill abcd; run 5; start db; run 0.7; start ac; now; calm 10; formed a2; after 0..3
a coordinator that is killed is followed by the next: abc serving
    now; kill a; run 3; led_by b2; calm 10; after 0..3.5
the third of three waits and is used when one leaves: abc serving
    runs ab; leave b; calm 10; runs ac
a node that comes back takes nothing over: abcd
    start bcd; run 3; want b llama; run 3; led_by b1; start a; run 3; led_by b1
a better group waits for open requests and not for ever: ab
    start a; run 3; want a llama; run 3; requests a 1; start b; now; calm 20; after 10..12
a better group forms at once without requests: ab
    start a; run 3; want a llama; run 3; start b; now; calm 10; after 0..1.5
a node that only others can reach does not depose the coordinator: abc serving
    led_by a1; cut ac; run 30; led_by a1; formed a1
the coordinator that only others could reach is missed when it dies: abcd
    cut ac ad; start abcd; run 4; led_by a1; kill a; run 5; led_by b2
a coordinator outside of the best group assigns it and goes on coordinating: abc with a strong bc
    start abc; run 1; want a llama 2; calm 10; formed b1; led_by a1
a group that its coordinator is no part of outlives it: abc with a strong bc
    start abc; run 1; want a llama 2; calm 10; kill a; calm 10; led_by b2; start a; calm 10; formed b1
also where that has no power: abc with a strong bc
    start abc; run 1; want a llama 2; calm 10; power a; calm 10; led_by b2; start a; calm 10; formed b1
one that stood still accuses no other: abc serving
    pause b 2; run 8; nobody_dead
all that stood still together go on as if nothing had been: abc serving
    pause abc 20; run 30; formed a1; nobody_dead
an unloaded model stops everywhere and another is served: ab serving
    want b -; calm 5; runs -; want b qwen; calm 5; models qwen
both sides of a partition get what they wanted, and the first is served: abcd serving
    partition ab cd; run 5; want a qwen; want d mistral; calm 15; heal; calm 45; \\
    deployed mistral+qwen; models mistral
a removed member is cut off by all at once, is told so, and stops: abc serving
    remove c; run 1; sees_removed abc; calm 10; here ab
a rank that is told to stop is replaced at once with any open requests: abc serving
    requests a 3; drain b; run 2; here ac; runs ac; nobody_dead
a rank without which nothing goes stays until the requests are done: ab serving
    want a llama 2; calm 10; now; requests a 3; drain b; run 20; here ab; formed -; \
    requests a 0; run 2; here a; runs -; start b; calm 20; formed a2
a Mac that does nothing leaves at once and disturbs no other: abc serving
    now; drain c; run 5; here ab; formed -
all are told to stop at once and all leave: abcd serving
    drain abcd; run 10; here -
"""
"""Of each its name and its nodes, and what happens, with what is true then."""
LINES = STORIES.replace("\\\n   ", "").strip().split("\n")
CASES = [(*head.split(": "), script) for head, script in zip(LINES[::2], LINES[1::2], strict=True)]


@pytest.mark.parametrize(("nodes", "script"), [each[1:] for each in CASES], ids=[each[0] for each in CASES])
def test_a_story_of_a_cluster(nodes: str, script: str) -> None:
    names, _, how = nodes.partition(" ")
    told = Told(names, how.removeprefix("with a strong ") if how.startswith("with") else "")
    if how == "serving":
        told.world = serving(names)
    for step in script.split(";"):
        told.act(step)


def all_changes(world: World) -> list[Change]:
    return [change for journal in world.journals.values() for _, change in journal.changes]


def letters(names: set[str]) -> str:
    return "".join(sorted(names))


def steps(names: str) -> st.SearchStrategy[str]:
    """Return events at nodes of these names."""
    name = st.sampled_from(names)
    return st.one_of(
        st.builds("{} {}".format, st.sampled_from(("start", "kill", "power", "leave", "restart")), name),
        st.sets(name, min_size=1, max_size=5).map(
            lambda some: f"partition {letters(some)} {letters(set(NAMES) - some)}"
        ),
        st.sets(name, min_size=2, max_size=2).map(lambda pair: f"cut {letters(pair)}"),
        st.just("heal"),
        st.builds("pause {} {}".format, name, st.sampled_from((0.8, 2.5, 7.0))),
        st.builds("requests {} {}".format, name, st.integers(0, 2)),
        st.builds("remove {}".format, name),
    )


_name = st.sampled_from(NAMES)
_wants = st.builds("want {} {}".format, _name, st.sampled_from(("llama", "qwen", "-")))
_strength = st.fixed_dictionaries(dict.fromkeys("bcd", st.integers(1, 3)))
Story = list[tuple[str, float]]


def stories(step: st.SearchStrategy[str], most: int, pauses: tuple[float, ...]) -> st.SearchStrategy[Story]:
    return st.lists(st.tuples(step, st.sampled_from(pauses)), max_size=most)


def play(world: World, story: Story) -> None:
    for step, pause_s in story:
        assert act(world, step)
        world.run(pause_s)
    if any(step.startswith("remove") for step, _ in story):
        world.heal()  # until then one side may not know who was removed


@settings(max_examples=40)
@given(
    stories(steps(NAMES) | _wants, 14, (0.0, 0.1, 0.4, 1.2, 2.0, 4.0)),
    st.integers(0, 3),
    st.booleans(),
    _strength,
)
def test_after_any_events_it_calms_down_and_all_agree(
    story: Story, seed: int, slow: bool, strength: dict[str, int]
) -> None:
    world = World(NAMES, seed, (0.05, 0.3) if slow else (0.001, 0.02), OneGroup(strength))
    world.start("a", "b", "c", "d")
    play(world, story)
    world.run_until(world.complaint, QUIET_S)
    for name, journal in world.journals.items():
        assert_lawful(name, journal)


def assert_lawful(name: str, journal: Journal) -> None:
    """Assert the laws that hold at any time, read from an agent's notes."""
    assert journal.duplicates == []
    states: dict[str, MemberState] = {}
    youngest: dict[str, int] = {}
    for _, change in journal.changes:
        if change.before is not MemberState.AWAY:  # as it is after each start of this node
            assert states.get(change.node_id, MemberState.AWAY) is change.before
        states[change.node_id] = change.after
        if change.after is MemberState.ALIVE:
            boot = int(change.boot_id.partition("-")[2])
            assert boot >= youngest.get(change.node_id, 0), f"{name} sees the ghost {change.boot_id}"
            youngest[change.node_id] = boot
    inside = None
    last: dict[str, int] = {}
    for _, what, number, owner in journal.epochs:
        if what == "join":
            assert not inside, f"{name} joins epoch {number} of {owner} while in {inside}"
            assert number > last.get(owner, 0)
            inside, last[owner] = (owner, number), number
        else:
            assert (owner, number) == inside
            inside = None


_drains = st.builds("{} {}".format, st.sampled_from(("drain", "kill", "start")), st.sampled_from("abcd"))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**16),
    stories(
        _drains | st.sampled_from(("cut ab", "cut bc", "cut da", "heal")), 12, (0.05, 0.5, 1.2, 2.5, 4.0)
    ),
)
def test_after_any_drain_at_any_time_all_is_well_in_the_end(seed: int, story: Story) -> None:
    world = serving("abcd", seed)
    play(world, story)
    world.heal()
    world.run(15.0)
    assert not [name for name, node in world.nodes.items() if name in node.leadership.draining]
    world.start(*"abcd")
    world.run_until(world.complaint, within_s=QUIET_S)


MODELS = {
    "small": shape(num_hidden_layers=8),  # 5 GB
    "middle": shape(),  # 16 GB
    "large": shape(num_hidden_layers=64),  # 30 GB
}


def serve(world: World, name: str, model: str, replicas: int = 1, nodes: str = "auto") -> None:
    """Add a deployment at this node, or change it; 0 replicas remove it."""
    node = world.nodes[name]
    table = node.replica.deployments
    node.replica.deployments = (
        table.setting(Deployment(model, model, replicas, nodes), node.id)
        if replicas
        else table.removing(node.id, model)
    )
    node.broadcast(*node.replica.deployments.messages())
    node.step()


def several(memory: dict[str, int], seed: int = 0, first: str = "") -> World:
    """These Macs, of so many GiB; those in `first` are started, or all."""
    world = World(memory, seed, rule=SeveralGroups(memory, MODELS))
    world.start(*(first or memory))
    world.run(3.0)
    return world


def running(world: World) -> set[tuple[str, int]]:
    """Return owner and number of every epoch that has a rank."""
    parts = [part for node in world.nodes.values() for part in node.parts.values()]
    return {(part.running.owner, part.running.number) for part in parts if part.running is not None}


_model = st.sampled_from(sorted(MODELS))
_serve = st.builds(
    "serve {} {} {} {}".format,
    st.sampled_from("abc"), _model, st.integers(1, 2), st.sampled_from(("auto", "1", "2")),
)  # fmt: skip
_unserve = st.builds("serve {} {} 0 auto".format, st.sampled_from("abc"), _model)
_gib = st.sampled_from((8, 20, 36))
_memory = st.fixed_dictionaries(dict.fromkeys(NAMES, _gib))


@settings(max_examples=20, deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys("abc", _gib)),
    st.lists(_serve, min_size=2, max_size=3),
    stories(steps("abc") | _serve | _unserve, 10, (0.0, 0.4, 1.2, 4.0)),
    st.integers(0, 3),
)
@example(
    {"a": 20, "b": 8, "c": 8},
    ["serve a small 2 auto", "serve a middle 1 auto"],
    [("restart a", 0.0)],
    0,
)
@example({"b": 8, "a": 8, "c": 36}, ["serve a middle 2 auto", "serve c large 1 auto"], [], 1)
def test_after_any_events_every_deployment_that_fits_is_served_within_its_macs(
    memory: dict[str, int], rows: list[str], story: Story, seed: int
) -> None:
    world = several(memory, seed)
    play(world, [(row, 0.0) for row in rows])
    world.run(1.0)
    play(world, story)
    world.run_until(world.complaint, within_s=2 * QUIET_S)


@settings(max_examples=15, deadline=None)
@given(
    _memory,
    _model,
    _model,
    st.sampled_from(("def", "cdef", NAMES)),
    st.lists(st.tuples(st.sampled_from(("kill", "leave", "start", "start", "drain")), _name), max_size=8),
)
def test_a_healthy_group_stays_while_other_macs_come_and_go(
    memory: dict[str, int], one: str, other: str, first: str, events: list[tuple[str, str]]
) -> None:
    world = several(memory, first=first)
    serve(world, "e", one, nodes="1")
    serve(world, "f", other, nodes="1")
    world.run_until(world.complaint, within_s=20.0)
    before = running(world)
    used = {name for name, _ in before}
    for what, name in events:
        if name not in used:
            play(world, [(f"{what} {name}", 1.5)])
    assert before <= running(world)


@pytest.mark.parametrize("name", "abc")
@pytest.mark.parametrize("apart_s", [0.0, 5.0])
def test_a_mac_that_served_alone_after_its_start_ends_no_group_of_others(name: str, apart_s: float) -> None:
    """It takes all groups for lost, and claims a later term. It meets one of the others before the other."""
    world = several(dict.fromkeys("abc", 64))
    serve(world, "a", "middle", nodes="1")
    serve(world, "b", "small", replicas=2, nodes="1")
    world.run_until(world.complaint, within_s=10.0)
    world.kill(name)
    world.run_until(world.complaint, within_s=20.0)
    before, (one, other) = running(world), sorted({*"abc"} - {name})
    world.partition(one + other, name)
    world.start(name)
    world.run(15.0)
    assert any(owner == name for owner, _ in running(world))
    world.heal()
    world.cut((name, other))
    world.run(apart_s)
    world.heal()
    world.run_until(world.complaint, within_s=QUIET_S)
    assert before <= running(world)
