"""Whole clusters that come and go, on a clock and a network of our own: what holds in every story."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxtp.cluster.membership import Change, MemberState
from mlxtp.cluster.state_file import SavedState, to_text
from mlxtp.wire.cluster_messages import Deployment

from ..placement.made_up_macs import unsealed
from ..placement.made_up_models import shape
from .deployed import wants
from .several_groups import SeveralGroups
from .simulated_node import TICK_S, Journal
from .simulated_rules import GROUP, OneGroup
from .simulation import World

pytestmark = pytest.mark.slow

NAMES = "abcdef"
QUIET_S = 45.0
"""Within it everything has calmed down: a node that stood still (6 s), a member that was lost (10 s), open
requests (10 s), one after the other."""


def serving(names: str, seed: int = 0, delay_s: tuple[float, float] = (0.001, 0.02)) -> World:
    """These nodes, started together, with a model wanted."""
    world = World(names, seed, delay_s)
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


def owner(world: World) -> str:
    (name,) = {node.running.owner for node in world.nodes.values() if node.running}
    return name


class Told:
    """A world and what a script had happen in it. A check fails where it stands in the script."""

    def __init__(self, names: str, strong: str = "") -> None:
        self.world = World(names, rule=OneGroup(dict.fromkeys(strong, 5)))
        self.since = 0.0

    def act(self, what: str, *words: str) -> None:
        world, names = self.world, words[0] if words else ""
        match what:
            case "start" | "kill" | "leave":
                for name in names:
                    getattr(world, what)(name)
            case "drain":
                for name in set(names) & world.nodes.keys():
                    world.drain(name)
            case "power":
                world.kill(names, power=True)
            case "run":
                world.run(float(names))
            case "calm":
                world.run_until(world.complaint, within_s=float(names))
            case "want":
                want(world, names, words[1].strip("-"), *words[2:])
            case "requests":
                world.nodes[names].open_requests = int(words[1])
            case "pause":
                for name in names:
                    world.pause(name, float(words[1]))
            case "remove":
                remove(world, *words)
            case "cut" | "partition":
                getattr(world, what)(*words)
            case "heal":
                world.heal()
            case "now":
                self.since = world.now
            case _:
                assert self.found(what, names) == names, (what, names)

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
    remove b c; run 1; sees_removed abc; calm 10; here ab
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
        told.act(*step.split())


def all_changes(world: World) -> list[Change]:
    return [change for journal in world.journals.values() for _, change in journal.changes]


def test_a_coordinator_without_power_is_dead_within_its_limit() -> None:
    world = serving("abc")
    world.kill("a", power=True)
    killed = world.now
    world.run(5.0)
    (dead,) = [when for when, change in world.journals["b"].changes if change.after is MemberState.DEAD]
    assert 3.0 - TICK_S <= dead - killed <= 3.5


def test_the_epoch_of_a_killed_participant_ends_when_its_link_breaks() -> None:
    world = serving("ab")
    world.kill("b")
    killed = world.now
    world.run(1.0)
    left = [when for when, what, _, _ in world.journals["a"].epochs if what.startswith("leave")]
    assert left
    assert left[0] - killed < 0.1


def test_a_link_that_flaps_does_not_stop_a_running_epoch_each_time() -> None:
    world = serving("ab")
    wants(world.nodes["a"].replica, "llama")
    for _ in range(8):
        world.cut("ab")
        world.run(3.0)
        world.heal()
        world.run(3.0)
    assert len(formed(world)) <= 5
    world.run_until(world.complaint, within_s=QUIET_S)


def test_both_sides_of_a_partition_serve_and_the_larger_goes_on_undisturbed() -> None:
    world = serving("abc")
    world.partition("a", "bc")
    world.run_until(world.complaint, within_s=15.0)
    larger = owner_of(world, "b")
    world.heal()
    world.run_until(world.complaint, within_s=QUIET_S)
    assert [owner(world), *[world.nodes[name].running is None for name in "bca"]] == ["b", False, False, True]
    assert world.nodes["b"].running.number == larger


def owner_of(world: World, name: str) -> int:
    running = world.nodes[name].running
    return running.number


def test_what_a_coordinator_assigned_ends_with_it_although_another_one_has_the_same_term() -> None:
    """Here c and d claim one term apart, and d assigns more often. Then c wins."""
    world = serving("acd")
    world.kill("a")
    world.partition("c", "d")
    world.run_until(world.complaint, within_s=15.0)
    for model in ("", "qwen") * 3:
        want(world, "d", model)
        world.run(2.0)
    assert [node.leadership.claim.term for node in world.nodes.values()] == [2, 2]
    numbers = [world.nodes[name].part(GROUP).assigned.number for name in "cd"]
    assert numbers[1] > numbers[0] + 3
    world.heal()
    world.run_until(world.complaint, within_s=QUIET_S)


def test_a_member_that_was_removed_while_it_was_off_is_told_when_it_comes_back() -> None:
    world = serving("abc")
    world.kill("c")
    remove(world, "b", "c")
    world.run(5.0)
    world.start("c")
    world.run(2.0)
    assert "c" not in world.nodes
    assert not any(
        change.node_id == "c" and change.after is MemberState.ALIVE for change in all_changes(world)[-5:]
    )


def test_a_member_that_joins_is_known_to_all_shortly_afterwards() -> None:
    world = World("ab")
    world.start("a", "b")
    world.run(3.0)
    want(world, "a", "llama", "3")
    world.names.append("c")
    node = world.nodes["b"]
    node.replica.hold(node.replica.roster.admitting("c", "mac-c", "key of c", unsealed))
    node.broadcast(*node.replica.roster.messages())
    node.follow_roster()
    world.disks["c"] = to_text(SavedState(node.leadership.persistent_state()))
    world.start("c")
    joined = world.now
    world.run_until(world.complaint, within_s=10.0)
    assert formed(world)[-1][0] - joined < 1.5


def test_a_copied_home_folder_is_noticed_by_the_agent_that_meets_both() -> None:
    world = serving("abc")
    world.start_twin("b")
    world.run(2.0)
    first, second = world.nodes["b"].boot_id, world.nodes["b'"].boot_id
    for name in "ac":
        (duplicate,) = world.journals[name].duplicates
        assert (duplicate.node_id, duplicate.boot_ids) == ("b", (first, second))
        assert len(set(duplicate.addresses)) == 2
        assert world.nodes[name].membership.status_of("b").state is MemberState.DEAD


def test_a_copy_started_while_the_first_one_slept_is_noticed_when_that_wakes() -> None:
    world = serving("abc")
    world.pause("b", 10.0)
    world.run(5.0)
    world.start_twin("b")
    world.run(4.0)
    assert world.journals["a"].duplicates == []
    world.run(6.0)
    assert [duplicate.node_id for duplicate in world.journals["a"].duplicates] == ["b"]


_name = st.sampled_from(NAMES)


def steps(name: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, object]]:
    """Return events at nodes of these names."""
    return st.one_of(
        st.tuples(st.just("start"), name),
        st.tuples(st.just("kill"), name),
        st.tuples(st.just("power"), name),
        st.tuples(st.just("leave"), name),
        st.tuples(st.just("restart"), name),
        st.tuples(st.just("partition"), st.sets(name, min_size=1, max_size=5)),
        st.tuples(st.just("cut"), st.sets(name, min_size=2, max_size=2)),
        st.tuples(st.just("heal"), st.none()),
        st.tuples(st.just("pause"), st.tuples(name, st.sampled_from((0.8, 2.5, 7.0)))),
        st.tuples(st.just("want"), st.tuples(name, st.sampled_from(("llama", "qwen", "")))),
        st.tuples(st.just("requests"), st.tuples(name, st.integers(0, 2))),
        st.tuples(st.just("remove"), name),
    )


_step = steps(_name)
_strength = st.fixed_dictionaries(dict.fromkeys("bcd", st.integers(1, 3)))
_story = st.lists(st.tuples(_step, st.sampled_from((0.0, 0.1, 0.4, 1.2, 2.0, 4.0))), max_size=14)


def act(world: World, step: tuple[str, object]) -> None:
    match step:
        case ("start", str(name)):
            world.start(name)
        case ("kill", str(name)):
            world.kill(name)
        case ("power", str(name)):
            world.kill(name, power=True)
        case ("leave", str(name)):
            world.leave(name)
        case ("restart", str(name)):
            world.kill(name)
            world.start(name)
        case ("partition", set(names)):
            world.partition(sorted(names), sorted(set(NAMES) - names))
        case ("cut", set(names)):
            world.cut(sorted(names))
        case ("heal", None):
            world.heal()
        case ("pause", (str(name), float(seconds))):
            world.pause(name, seconds)
        case ("want", (str(name), str(model))) if name in world.nodes:
            want(world, name, model)
        case ("requests", (str(name), int(number))) if name in world.nodes:
            world.nodes[name].open_requests = number
        case ("remove", str(name)) if set(world.nodes) - {name}:
            remove(world, min(set(world.nodes) - {name}), name)


Story = list[tuple[tuple[str, object], float]]


def play(story: Story, seed: int, slow: bool, strength: dict[str, int]) -> World:
    world = World(NAMES, seed, (0.05, 0.3) if slow else (0.001, 0.02), OneGroup(strength))
    world.start("a", "b", "c", "d")
    for step, pause_s in story:
        act(world, step)
        world.run(pause_s)
    return world


@settings(max_examples=40)
@given(_story, st.integers(0, 3), st.booleans(), _strength)
def test_after_any_events_it_calms_down_and_all_agree(
    story: Story, seed: int, slow: bool, strength: dict[str, int]
) -> None:
    world = play(story, seed, slow, strength)
    if any(what == "remove" for (what, _), _ in story):
        world.heal()  # until then one side may not know who was removed
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


@settings(max_examples=10)
@given(_story, st.integers(0, 3), _strength)
def test_the_same_story_goes_the_same_way_twice(story: Story, seed: int, strength: dict[str, int]) -> None:
    one, other = (play(story, seed, True, strength) for _ in range(2))
    assert one.journals == other.journals


def states_of(world: World, name: str) -> list[MemberState]:
    """Return the states through which the others saw this agent since the beginning."""
    journals = [journal for other, journal in world.journals.items() if other != name]
    return [change.after for journal in journals for _, change in journal.changes if change.node_id == name]


def test_a_coordinator_that_is_told_to_stop_moves_its_group_first_and_then_leaves() -> None:
    """With requests of its own clients it stays until they are done, and has no rank meanwhile.

    All messages take equally long: c knows that b owns the group before it hears from b.
    """
    world = serving("abc", delay_s=(0.01, 0.01))
    world.nodes["a"].open_requests = 2
    world.drain("a")
    world.run(5.0)
    assert world.nodes["a"].running is None
    assert owner(world) == "b"
    assert {node.leadership.claim.node_id for node in world.nodes.values()} == {"a"}
    assert [world.nodes[name].running.ranks for name in "bc" if world.nodes[name].running] == [("b", "c")] * 2
    world.nodes["a"].open_requests = 0
    world.run(1.0)
    assert "a" not in world.nodes
    assert {node.leadership.claim.node_id for node in world.nodes.values()} == {"b"}
    world.run_until(world.complaint, within_s=5.0)
    assert [number for _, _, number in formed(world)] == [1, 2]
    assert sorted(states_of(world, "a")) == [
        MemberState.ALIVE,
        MemberState.ALIVE,
        MemberState.LEFT,
        MemberState.LEFT,
    ]


def test_all_are_started_again_one_after_the_other() -> None:
    """Someone serves all the time, but for the moments in which a group forms; no member is ever dead."""
    world = serving("abcd")
    for name in "abcd":
        world.drain(name)
        world.run(4.0)
        assert name not in world.nodes
        world.start(name)
        world.run_until(world.complaint, within_s=QUIET_S)
        assert MemberState.DEAD not in states_of(world, name)
    assert len({number for _, _, number in formed(world)}) == len(formed(world))


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    size=st.integers(2, 5),
    events=st.lists(
        st.tuples(st.sampled_from(["drain", "kill", "start", "cut", "heal"]), st.integers(0, 4),
                  st.floats(0.05, 4.0)),
        max_size=12,
    ),
)  # fmt: skip
def test_after_any_drain_at_any_time_all_is_well_in_the_end(
    seed: int, size: int, events: list[tuple[str, int, float]]
) -> None:
    names = NAMES[:size]
    world = serving(names, seed)
    for what, index, after_s in events:
        name = names[index % size]
        if what == "drain" and name in world.nodes:
            world.drain(name)
        elif what == "kill":
            world.kill(name)
        elif what == "start":
            world.start(name)
        elif what == "cut":
            world.cut((name, names[(index + 1) % size]))
        elif what == "heal":
            world.heal()
        world.run(after_s)
    world.heal()
    world.run(15.0)
    assert not [name for name, node in world.nodes.items() if name in node.leadership.draining]
    world.start(*names)
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


def test_two_deployments_run_side_by_side_and_the_end_of_one_touches_no_other() -> None:
    world = several(dict.fromkeys("abc", 64))
    serve(world, "a", "middle", nodes="1")
    serve(world, "b", "small", replicas=2, nodes="1")
    world.run_until(world.complaint, within_s=10.0)
    assert sorted(name for _, name, _ in formed(world)) == ["a", "b", "c"]
    before = formed(world)
    serve(world, "c", "middle", replicas=0)
    world.run_until(world.complaint, within_s=10.0)
    assert formed(world) == before
    assert len(running(world)) == 2


def test_the_group_of_a_mac_that_died_moves_to_a_free_one_and_others_stay() -> None:
    world = several(dict.fromkeys("abcd", 64))
    serve(world, "a", "middle", nodes="1")
    serve(world, "a", "small", nodes="1")
    world.run_until(world.complaint, within_s=10.0)
    (_, first, _), (_, second, _) = before = formed(world)
    world.kill(first)
    world.run_until(world.complaint, within_s=20.0)
    (again,) = formed(world)[2:]
    assert formed(world)[:2] == before
    assert again[1] not in (first, second)


_model = st.sampled_from(sorted(MODELS))
_few = st.sampled_from("abc")
_row = st.tuples(_few, _model, st.integers(1, 2), st.sampled_from(("auto", "1", "2")))
_serving = st.tuples(st.just("serve"), _row)
_unserving = st.tuples(st.just("serve"), st.tuples(_few, _model, st.just(0), st.just("auto")))
_gib = st.sampled_from((8, 20, 36))
_memory = st.fixed_dictionaries(dict.fromkeys(NAMES, _gib))


@settings(max_examples=20, deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys("abc", _gib)),
    st.lists(_row, min_size=2, max_size=3),
    st.lists(
        st.tuples(steps(_few) | _serving | _unserving, st.sampled_from((0.0, 0.4, 1.2, 4.0))), max_size=10
    ),
    st.integers(0, 3),
)
@example(
    {"a": 20, "b": 8, "c": 8},
    [("a", "small", 2, "auto"), ("a", "middle", 1, "auto")],
    [(("restart", "a"), 0.0)],
    0,
)
def test_after_any_events_every_deployment_that_fits_is_served_within_its_macs(
    memory: dict[str, int], rows: list[tuple[str, str, int, str]], story: Story, seed: int
) -> None:
    world = several(memory, seed)
    for row in rows:
        serve(world, *row)
    world.run(1.0)
    for step, pause_s in story:
        match step:
            case ("serve", (str(name), str(model), int(replicas), str(nodes))):
                if name in world.nodes:
                    serve(world, name, model, replicas, nodes)
            case ("want", _):
                pass
            case _:
                act(world, step)
        world.run(pause_s)
    if any(what == "remove" for (what, _), _ in story):
        world.heal()
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
            if what != "drain":
                act(world, (what, name))
            elif name in world.nodes:
                world.drain(name)
            world.run(1.5)
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
