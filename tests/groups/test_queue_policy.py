"""Order of models: first come first served, nothing unloaded under a request, a pinned model stays."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from mlxtp.groups.model_queue import LoadModel, ModelQueues

from mlxtp.cluster.deployments import DesiredState
from mlxtp.wire.cluster_messages import ModelQueue, ModelTurn

TERM = 5


@dataclass
class Story:
    """A coordinator, `a`, and other members whose queues are played by hand."""

    desired: DesiredState = field(default_factory=lambda: DesiredState(1, "a", "old", "auto"))
    turns: ModelQueues = field(default_factory=ModelQueues)
    present: tuple[str, ...] = ("a", "b")
    served: bool = True
    now: float = 0.0

    def queue(self, node: str, *waiting: str, running: int = 0, behind: bool = False) -> None:
        """Deliver the queue of `node`; `behind`: before it has the present turn."""
        self.now += 1
        turn = self.turns.current
        number = turn.number - 1 if behind else turn.number
        self.turns.received(node, ModelQueue(TERM, max(number, 0), waiting, running), self.now)

    def decide(self) -> ModelTurn | LoadModel | None:
        self.now += 1
        return self.turns.decide(TERM, self.desired, self.present, served=self.served, now=self.now)

    def told(self) -> ModelTurn:
        action = self.decide()
        assert isinstance(action, ModelTurn)
        return action

    def load(self) -> str:
        """It is loaded."""
        action = self.decide()
        assert isinstance(action, LoadModel), action
        self.want(action.model)
        return action.model

    def want(self, model: str, pinned: bool = False) -> None:
        version = self.desired.version + 1
        self.desired = DesiredState(version, "a", model, "auto", version if pinned else 0)


def test_while_no_request_waits_no_member_is_told_anything() -> None:
    story = Story()
    story.queue("a", running=3)
    story.queue("b")
    assert story.decide() is None
    assert story.turns.current.number == 0
    story.queue("b", "old")  # it is loaded, and begins as soon as it is ready there
    assert story.decide() is None
    assert story.turns.current.number == 0


def test_a_model_is_loaded_when_all_have_heard_and_nothing_runs() -> None:
    story = Story()
    story.decide()
    story.queue("a", running=1)
    story.queue("b", "new")
    assert story.told() == ModelTurn(TERM, 1, "new", "", "")
    assert story.decide() is None
    story.queue("a", running=1)
    story.queue("b", "new")
    assert story.decide() is None, "a request runs"
    story.queue("a", behind=True)
    assert story.decide() is None, "a may let one begin: it has not heard of the turn"
    story.queue("a")
    assert story.load() == "new"
    assert story.decide() is None


def test_who_is_present_and_has_said_nothing_may_have_a_request_running() -> None:
    story = Story(present=("a", "b", "c"))
    story.decide()
    story.queue("a", "new")
    story.told()
    story.queue("a", "new")
    story.queue("b")
    assert story.decide() is None
    story.present = ("a", "b")  # c is gone, and its requests with it
    assert story.load() == "new"


def test_those_who_come_for_the_old_one_wait_behind_the_new_one_and_then_have_their_turn() -> None:
    story = Story()
    story.decide()
    story.queue("a", running=1)
    story.queue("b", "new")
    assert story.told().model == "new"
    story.queue("a", "old")  # the running one has ended, and another has come
    story.queue("b", "new")
    assert story.load() == "new"
    story.served = False
    story.queue("a", "old", "new")  # and one more for the new one, while it is loaded
    assert story.decide() is None
    story.served = True
    assert story.decide() is None, "those who waited for it when it came begin first"
    story.queue("b", running=1)
    story.queue("a", "old", running=1)
    assert story.told().model == "old"
    story.queue("b", "new", running=1)  # a newcomer waits
    story.queue("a", "old")
    assert story.decide() is None
    story.queue("b", "new")
    assert story.load() == "old"


def test_neither_model_starves_however_many_come_for_the_other() -> None:
    story = Story()
    story.decide()
    served = []
    for _ in range(5):
        other = "new" if story.desired.model == "old" else "old"
        story.queue("a", running=1)
        story.queue("b", other, running=1)
        assert story.told().model == other
        story.queue("a", story.desired.model)  # always one more for the loaded one
        story.queue("b", other)
        served.append(story.load())
        story.queue("b", running=1)  # it has begun
        assert story.told().model == ("new" if other == "old" else "old")
        story.queue("a", story.turns.current.model)
        story.queue("b", "third")
        served.append(story.load())
        story.queue("a")
        assert story.told().model == "third"
        story.queue("b")  # its client has left
        assert story.told().model == story.desired.model
    assert served == ["new", "old"] * 5


def test_what_no_request_waits_for_is_not_loaded() -> None:
    story = Story()
    story.decide()
    story.queue("b", "new")
    story.queue("a", "old")
    assert story.told().model == "new"
    story.queue("b")
    assert story.told() == ModelTurn(TERM, 2, "old", "", "")
    assert story.decide() is None


def test_a_pinned_model_keeps_its_turn() -> None:
    story = Story(desired=DesiredState(1, "a", "old", "auto", 1))
    story.queue("a", "new")
    story.queue("b")
    assert story.decide() is None
    story.desired = replace(story.desired, said=0)
    assert story.told().model == "new"
    story.want("old", pinned=True)  # a user pins it before the other is loaded
    assert story.told().model == "old"
    story.queue("a", "new")
    story.queue("b")
    assert story.decide() is None


def test_what_a_person_wants_has_the_turn_at_once() -> None:
    story = Story()
    story.decide()
    story.queue("b", "new")
    story.told()
    story.want("third")
    assert story.told().model == "third"
    story.want("")
    assert story.told().model == ""
    story.queue("a")
    story.queue("b", "new")
    assert story.told().model == "new"  # after `unload` a request may have what it names
    story.queue("a")
    story.queue("b", "new")
    assert story.load() == "new"


def test_who_waited_for_what_cannot_be_served_is_told_once_and_may_ask_again() -> None:
    story = Story()
    story.decide()
    story.queue("a")
    story.queue("b", "new")
    story.told()
    story.queue("a")
    story.queue("b", "new")
    assert story.load() == "new"
    story.turns.refuse("new", "it does not fit", "old")
    story.want("old")
    assert story.turns.current == ModelTurn(TERM, 2, "old", "new", "it does not fit")
    story.queue("b", "new", behind=True)  # on its way before it heard
    assert story.decide() is None
    story.queue("b")
    assert story.decide() is None
    story.queue("b", "new")
    assert story.told().model == "new"


def test_a_new_coordinator_knows_nothing_until_it_is_told() -> None:
    story = Story()
    story.decide()
    story.queue("b", "new")
    story.told()
    turns = story.turns
    assert turns.decide(TERM + 1, story.desired, story.present, served=True, now=50.0) == ModelTurn(
        TERM + 1, 1, "new", "", ""
    )
    for node in story.present:
        turns.received(node, ModelQueue(TERM, 1, ("new",), 0), 51.0)
    assert turns.decide(TERM + 1, story.desired, story.present, served=True, now=52.0) is None
    for node in story.present:
        turns.received(node, ModelQueue(TERM + 1, 1, ("new",), 0), 53.0)
    assert turns.decide(TERM + 1, story.desired, story.present, served=True, now=54.0) == LoadModel("new")


_MODELS = ("old", "new", "third")
_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("come", "come", "end", "hear", "tell", "tell", "tell", "ready", "leave")),
        st.sampled_from(("a", "b", "c")),
        st.sampled_from(_MODELS),
    ),
    max_size=120,
)


class _Mac:
    """A member that keeps the rules: it lets a request begin when its model is served and has the turn."""

    def __init__(self) -> None:
        self.turn = ModelTurn(TERM, 0, "old", "", "")
        self.waiting: list[str] = []
        self.running: list[str] = []

    def look(self, served: str) -> None:
        if self.turn.model == served:
            self.running += [model for model in self.waiting if model == served]
            self.waiting = [model for model in self.waiting if model != served]

    def queue(self) -> ModelQueue:
        waiting = tuple(dict.fromkeys(self.waiting))
        return ModelQueue(TERM, self.turn.number, waiting, len(self.running))


@settings(max_examples=300)
@given(_EVENTS)
def test_in_any_order_nothing_is_unloaded_under_a_request_and_all_are_served(
    events: list[tuple[str, str, str]],
) -> None:
    macs = {name: _Mac() for name in "abc"}
    turns, desired = ModelQueues(), DesiredState(1, "a", "old", "auto")
    wire: dict[str, list[ModelQueue]] = {name: [] for name in macs}
    for name, mac in macs.items():
        turns.received(name, mac.queue(), 0.0)
    told: list[ModelTurn] = [macs["a"].turn]
    heard = dict.fromkeys(macs, 0)
    ready, now = True, 0.0

    def decide() -> None:
        nonlocal desired, ready
        while (action := turns.decide(TERM, desired, tuple(macs), served=ready, now=now)) is not None:
            if isinstance(action, ModelTurn):
                told.append(action)
                continue
            assert not any(mac.running for mac in macs.values()), "unloaded under a running request"
            desired, ready = DesiredState(desired.version + 1, "a", action.model, "auto"), False

    def step(what: str, name: str, model: str) -> None:
        nonlocal ready, now
        now += 1
        mac = macs[name]
        match what:
            case "come":
                mac.waiting.append(model)
            case "leave":
                mac.waiting = mac.waiting[1:]
            case "end":
                mac.running = mac.running[1:]
            case "hear" if heard[name] + 1 < len(told):
                heard[name] += 1
                mac.turn = told[heard[name]]
            case "tell" if wire[name]:
                turns.received(name, wire[name].pop(0), now)
            case "ready":
                ready = True
        if ready:
            for each in macs.values():
                each.look(desired.model)
        wire[name].append(mac.queue())
        decide()

    for event in events:
        step(*event)
    for _ in range(40):  # no request comes any more: all are served in a while
        for name, mac in macs.items():
            step("ready", name, "")
            step("hear", name, "")
            step("end", name, "")
            while wire[name]:
                turns.received(name, wire[name].pop(0), now)
            turns.received(name, mac.queue(), now)
            decide()
        while any(mac.running for mac in macs.values()):
            for name in macs:
                step("end", name, "")
                step("hear", name, "")
    assert not any(mac.waiting for mac in macs.values())
