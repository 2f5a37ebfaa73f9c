"""Election of the coordinator: claims, pulses, the time to wait. What owners of groups wait for.

Time is an argument.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxtp.cluster.cluster_state import NO_CLAIM, NO_DEPLOYMENTS, ClusterState, LeaderClaim, Replica, Roster
from mlxtp.cluster.leadership import Debounce, Leadership
from mlxtp.cluster.membership import Membership, MemberState, Timeouts
from mlxtp.cluster.reconcile import Action, FormEpoch, GroupForm, Situation, Wait, decide
from mlxtp.wire.cluster_messages import Beat

from ..placement.made_up_macs import unsealed
from .deployed import wants

BEAT_S = Timeouts().beat_s
CALM = Debounce()


def beat(claim: LeaderClaim = NO_CLAIM, pulse: int = 0, epoch: int = 0) -> Beat:
    return Beat(claim.term, claim.node_id, NO_DEPLOYMENTS.digest, Roster().digest(), epoch, True, pulse)


class Story:
    """Node `b` among `a` and `c`, whose links are 1 and 3."""

    def __init__(self, kept: ClusterState | None = None, known: tuple[str, ...] = ("a", "c")) -> None:
        self.now = 100.0
        self.membership = Membership("b", "b-1", known, self.now)
        kept = kept or ClusterState()
        self.replica = Replica("b", kept)
        self.leadership = Leadership(self.replica, kept.claim.term, self.now, CALM)
        self.pulses = 0
        self.boots = {1: "a-1", 3: "c-1"}

    def up(self, link: int, boot_id: str) -> None:
        self.boots[link] = boot_id
        assert self.membership.link_up(link, boot_id[0], boot_id, "", self.now)

    def hear(self, link: int, word: Beat) -> bool:
        self.membership.beat(link, self.now)
        return self.leadership.received_beat(self.boots[link][0], self.boots[link], word, self.now)

    def tick(self) -> None:
        before, changes = self.claim, self.membership.tick(self.now)
        assert self.leadership.tick(self.membership, changes, self.now) is (self.claim != before)

    def beats(self, seconds: float, **words: Beat) -> Story:
        """`link_1=word` and `link_3=word` come at every beat; a pulse that they have rises each time."""
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            self.pulses += 1
            for name, word in words.items():
                self.hear(int(name[-1]), replace(word, pulse=word.pulse and word.pulse + self.pulses))
            self.tick()
        return self

    @property
    def claim(self) -> LeaderClaim:
        return self.leadership.claim


def led_by(claim: LeaderClaim) -> Story:
    """Both others are here, and `claim` holds."""
    story = Story()
    story.up(1, "a-1")
    story.up(3, "c-1")
    story.beats(3, link_1=beat(claim, 10), link_3=beat(claim, 10))
    assert story.claim == claim
    return story


A5 = LeaderClaim(5, "a")
B6 = LeaderClaim(6, "b")


def claim_of(text: str) -> LeaderClaim:
    """Return the claim of "c5", of "?5", which has no name, or of "-", none at all."""
    return NO_CLAIM if text == "-" else LeaderClaim(int(text[1:]), text[0].strip("?"))


def word(text: str) -> Beat:
    """Return the beat of "c5^10": one with this claim and pulse."""
    claim, _, pulse = text.partition("^")
    return beat(claim_of(claim), int(pulse or 0))


def played(script: str) -> Story:
    """Return the story of a script, such as "led c5, goodbye 1, beats 0.5 3=c5^20, is c5"."""
    opening, *steps = script.split(", ")
    match opening.split():
        case ["led", claim]:
            story = led_by(claim_of(claim))
        case ["knows", names, *kept]:
            state = ClusterState(claim=claim_of(kept[1])) if kept else None
            story = Story(state, tuple(names.strip("-")))
    for step in steps:
        match step.split():
            case ["up", link, boot_id]:
                story.up(int(link), boot_id)
            case ["hears", link, text]:
                assert not story.hear(int(link), word(text))
            case ["follows", link, text]:
                assert story.hear(int(link), word(text))
            case ["beats", seconds, *words]:
                story.beats(float(seconds), **{f"link_{each[0]}": word(each[2:]) for each in words})
            case ["leaves", link, text]:
                story.hear(int(link), replace(word(text), draining=True))
            case ["stands", seconds]:
                story.now += float(seconds)
            case ["removed", name]:
                story.membership.removed(name)
            case [("goodbye" | "link_down") as what, link]:
                getattr(story.membership, what)(int(link), story.now)
            case ["is", *what]:
                assert standing(story) == " ".join(what)
            case ["drain"]:
                story.leadership.drain()
            case _:
                assert step == "tick"
                story.tick()
    return story


def standing(story: Story) -> str:
    """Return the claim, whether it is our own, what the next start would begin with, and who is to stop."""
    leadership = story.leadership
    kept = leadership.persistent_state().claim
    claims = [f"{each.node_id or '?'}{each.term}" if each.term else "-" for each in (story.claim, kept)]
    return " ".join(
        [
            claims[0],
            *["leads"] * leadership.leading,
            *([f"keeps {claims[1]}"] if kept != story.claim else []),
            *([f"draining {''.join(sorted(leadership.draining))}"] if leadership.draining else []),
        ]
    )


STORIES = """
a node alone claims at once: knows -, tick
    b1 leads
one that misses others gives them time to show up: knows ac, beats 1.5, is -, beats 0.5
    b1 leads
when all are here no member is waited for but its word: knows c, up 3 c-1, tick, is -, hears 3 -, tick
    b1 leads
a node that starts follows whom the others follow: knows c, up 3 c-1, follows 3 c5^10, beats 10 3=c5^11
    c5
the smallest claims: knows ac, up 1 a-1, up 3 c-1, beats 10 1=- 3=-, is -, goodbye 1, beats 0.5 3=-
    b1 leads
terms go on after a restart and an old claim is void: knows - kept b7, is - keeps ?7, tick
    b8 leads
hearing of its own past makes no coordinator: knows c kept b7, up 3 c-1, follows 3 b7^10, is b7, tick
    b8 leads
a lower term is followed: knows c kept z9, up 3 c-1, beats 3 3=c5^10, is c5 keeps ?9, goodbye 3, tick
    b10 leads
as long as it lives the coordinator stays, with any id: led c5, beats 60 1=c5^20 3=c5^20
    c5
a weaker claim and one without a name change nothing: led c5, hears 1 a4^99, hears 1 -, hears 1 ?9^99
    c5
a coordinator gives way to a stronger claim: knows ac, beats 3, is b1 leads, up 1 a-1, follows 1 a5^10
    a5
the named member coordinates: led a5, follows 1 b6
    b6 leads
a broken link costs it after its time: led a5, link_down 1, tick, beats 1 3=a5, is a5, beats 0.5 3=a5
    b6 leads
silence costs it too: led a5, beats 2.5 3=a5, is a5, beats 0.5 3=a5
    b6 leads
passed on pulses keep it: led a5, link_down 1, tick, beats 20 3=a5^20, beats 2.5 3=a5, is a5, beats 0.5 3=a5
    b6 leads
one that is here and does not know it: led c5, goodbye 1, tick, beats 2.5 3=c4^50, is c5, beats 0.5 3=c4^60
    b6 leads
a goodbye costs it at once: led a5, goodbye 1, tick
    b6 leads
one that only others heard, when it is removed: knows ac, up 3 c-1, beats 3 3=a5^10, is a5, removed a, tick
    b6 leads
and one with a link without a word: knows ac, up 3 c-1, up 1 a-1, beats 3 3=a5^10, is a5, removed a, tick
    b6 leads
a restart costs it at once: led c5, goodbye 1, up 4 c-2, tick, hears 4 -, tick
    b6 leads
a claim of the new start is not lost with the old one: led c5, goodbye 1, up 4 c-2, follows 4 c6^1, tick
    c6
time that we stood still does not depose it: led c5, goodbye 1, tick, stands 60, tick, is c5, beats 30 3=c5^50
    c5
the next start is not to stop: led c5, leaves 1 c5^10, goodbye 1, tick, up 4 a-2, beats 1 4=c5^10 3=c5^10
    c5
nor after an unannounced restart: led c5, leaves 1 c5^10, up 4 a-2, hears 4 c5^10, tick
    c5
a copy of another member's folder changes nothing: led a5, up 4 c-2, beats 2 1=a5^20 3=a5 4=a5
    a5
who is to stop does not claim while another is here: led c5, leaves 1 c5^10, goodbye 3, tick
    b6 leads draining a
of those that are all to stop the smallest claims: led c5, leaves 1 c5^10, drain, goodbye 3, tick
    c5 draining ab
and alone any: led c5, leaves 1 c5^10, drain, goodbye 3, tick, goodbye 1, tick
    b6 leads draining b
"""
"""What node `b` sees of `a` and `c`, and then the claim that it follows."""
LINES = STORIES.strip().split("\n")
CASES = [(*story.split(": "), end.strip()) for story, end in zip(LINES[::2], LINES[1::2], strict=True)]


@pytest.mark.parametrize(("script", "end"), [each[1:] for each in CASES], ids=[each[0] for each in CASES])
def test_who_coordinates(script: str, end: str) -> None:
    assert standing(played(script)) == end


def test_only_the_coordinator_adds_to_the_pulse() -> None:
    story = led_by(A5)
    pulses = [story.leadership.beat(healthy=True).pulse for _ in range(3)]
    assert len(set(pulses)) == 1
    story = leading()
    first = story.leadership.beat(healthy=True).pulse
    assert [story.leadership.beat(healthy=True).pulse - first for _ in range(3)] == [1, 2, 3]


def test_a_beat_tells_everything_in_short() -> None:
    story = led_by(A5)
    wants(story.replica, "llama")
    story.replica.hold(story.replica.roster.admitting("a", "studio", "key", unsealed))
    story.replica.saw_epoch(17)
    word = story.leadership.beat(healthy=False)
    assert (word.term, word.coordinator, word.epoch, word.healthy) == (5, "a", 17, False)
    assert (word.desired, word.roster) == (story.replica.deployments.digest, story.replica.roster.digest())


def test_what_is_kept_is_what_the_next_start_begins_with() -> None:
    story = led_by(A5)
    wants(story.replica, "llama")
    story.replica.hold(story.replica.roster.admitting("a", "studio", "key", unsealed))
    story.replica.saw_epoch(17)
    story.hear(1, beat(A5, 90, epoch=21))
    kept = story.leadership.persistent_state()
    assert (kept.claim, kept.epoch) == (A5, 21)
    again = Replica("b", kept)
    assert (again.deployments, again.roster, again.epoch) == (kept.deployments, kept.roster, 21)


BOTH = GroupForm("llama", ("b", "c"), "ring")
ONE = GroupForm("llama", ("b",))
ALONE = FormEpoch(1, ONE, ("b-1",))


def decided(story: Story, form: GroupForm = BOTH, running: FormEpoch | None = None) -> Action:
    """Return what this node does about its own group."""
    situation = Situation("b", "llama", form, running=running)
    return decide(story.leadership.view(story.membership, situation, story.now))


def leading() -> Story:
    story = led_by(A5)
    wants(story.replica, "llama")
    story.membership.goodbye(1, story.now)
    story.beats(0.5, link_3=beat(A5, 30))
    assert story.leadership.leading
    return story


def test_changes_settle_before_anything_is_formed() -> None:
    story = leading()
    settled_at = story.now + CALM.settle_s
    assert decided(story) == Wait("members come and go", settled_at)
    assert story.leadership.unrest(story.membership.statuses(), story.now) == decided(story)
    story.beats(0.5, link_3=beat(B6))
    assert decided(story) == FormEpoch(1, BOTH, ("b-1", "c-1"))
    assert story.leadership.unrest(story.membership.statuses(), story.now) is None


def test_changes_that_never_settle_are_not_waited_for_longer_than_their_limit() -> None:
    story = leading()
    began = story.now
    actions, unrest = [], []
    for step in range(12):
        story.now += 0.25
        if step % 2:
            story.membership.link_down(1 + 10 * step, story.now)
        else:
            story.up(11 + 10 * step, "a-2")
        story.hear(3, beat(B6))
        story.leadership.received_beat("a", "a-2", beat(B6), story.now)
        story.tick()
        actions.append(decided(story))
        unrest.append(story.leadership.unrest(story.membership.statuses(), story.now) is not None)
    waited = [isinstance(action, Wait) for action in actions]
    assert waited == unrest == sorted(waited, reverse=True)
    assert 1.5 <= 0.25 * sum(waited) <= CALM.settle_most_s
    assert story.now - began == 3.0


def test_a_lost_member_is_shaky_for_a_while() -> None:
    """The coordinator, whose view has it, then moves no running group to it."""
    story = leading()
    story.membership.link_down(3, story.now)
    story.tick()
    lost = story.now
    story.up(4, "c-1")
    story.beats(1, link_4=beat(B6))
    assert story.leadership.flapping == {"c": lost + CALM.flapping_s}


def test_a_removed_member_is_not_waited_for() -> None:
    story = leading()
    story.membership.link_down(3, story.now)
    story.tick()
    story.membership.removed("c")
    story.tick()
    assert "c" not in story.leadership.flapping


def test_a_node_that_returns_has_to_tell_again_what_it_believes() -> None:
    story = leading()
    story.membership.link_down(3, story.now)
    story.beats(3)
    assert story.membership.status_of("c").state is MemberState.DEAD
    story.up(4, "c-1")
    story.beats(1)
    action = decided(story)
    assert isinstance(action, Wait)
    assert action == Wait("c has not yet reported its state")
    assert story.leadership.unrest(story.membership.statuses(), story.now) == action


def test_who_is_about_to_stop_says_so_with_every_beat() -> None:
    story = led_by(A5)
    assert not story.leadership.beat(healthy=True).draining
    story.leadership.drain()
    story.beats(1, link_1=beat(A5, 10), link_3=beat(A5, 10))
    assert story.leadership.beat(healthy=True).draining
    assert story.leadership.draining == {"b"}
