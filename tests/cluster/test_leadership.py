"""Election of the coordinator: claims, pulses, the time to wait. What owners of groups wait for.

Time is an argument.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxtp.cluster.cluster_state import NO_CLAIM, NO_DEPLOYMENTS, ClusterState, LeaderClaim, Replica, Roster
from mlxtp.cluster.leadership import Debounce, Leadership
from mlxtp.cluster.membership import Membership, MemberState, Timeouts
from mlxtp.cluster.reconcile import (
    Action,
    FormEpoch,
    GroupForm,
    NoAction,
    Situation,
    StopEpoch,
    Wait,
    decide,
)
from mlxtp.errors import RemoteProtocolError, UserError
from mlxtp.wire.cluster_messages import Beat, RosterEntry

from ..placement.made_up_macs import unsealed
from .deployed import only, wants

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
        self.claimed = 0
        self.pulses = 0
        self.boots = {1: "a-1", 3: "c-1"}

    def up(self, link: int, boot_id: str) -> None:
        self.boots[link] = boot_id
        assert self.membership.link_up(link, boot_id[0], boot_id, "", self.now)

    def hear(self, link: int, word: Beat) -> bool:
        self.membership.beat(link, self.now)
        return self.leadership.received_beat(self.boots[link][0], self.boots[link], word, self.now)

    def tick(self) -> None:
        changes = self.membership.tick(self.now)
        self.claimed += self.leadership.tick(self.membership, changes, self.now)

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
C5 = LeaderClaim(5, "c")


# --- claiming ---------------------------------------------------------------------------------------------


def test_a_node_alone_claims_at_once() -> None:
    story = Story(known=())
    story.tick()
    assert (story.claim, story.leadership.leading) == (LeaderClaim(1, "b"), True)


def test_a_node_that_misses_others_gives_them_time_to_show_up() -> None:
    story = Story().beats(CALM.start_s - BEAT_S)
    assert story.claim == NO_CLAIM
    assert story.beats(BEAT_S).claim == LeaderClaim(1, "b")


def test_when_all_are_here_no_member_is_waited_for() -> None:
    story = Story(known=("c",))
    story.up(3, "c-1")
    story.tick()
    assert story.claim == NO_CLAIM  # it has not told yet whom it follows
    story.hear(3, beat())
    story.tick()
    assert story.claim == LeaderClaim(1, "b")


def test_a_node_that_starts_follows_whom_the_others_follow() -> None:
    story = Story(known=("c",))
    story.up(3, "c-1")
    assert story.hear(3, beat(C5, 10))
    assert story.beats(10, link_3=beat(C5, 11)).claim == C5


def test_the_smallest_of_the_living_claims_and_the_others_wait() -> None:
    story = Story()
    story.up(1, "a-1")
    story.up(3, "c-1")
    assert story.beats(10, link_1=beat(), link_3=beat()).claim == NO_CLAIM
    story.membership.goodbye(1, story.now)
    assert story.beats(0.5, link_3=beat()).claim == LeaderClaim(1, "b")


def test_terms_go_on_after_a_restart_and_an_old_claim_is_void() -> None:
    story = Story(ClusterState(claim=LeaderClaim(7, "b")), known=())
    assert not story.leadership.leading
    assert story.leadership.persistent_state().claim == LeaderClaim(7)
    story.tick()
    assert story.claim == LeaderClaim(8, "b")


def test_hearing_of_ones_own_past_makes_no_coordinator() -> None:
    story = Story(ClusterState(claim=LeaderClaim(7, "b")), known=("c",))
    story.up(3, "c-1")
    story.hear(3, beat(LeaderClaim(7, "b"), 10))
    assert not story.leadership.leading
    story.tick()
    assert story.claim == LeaderClaim(8, "b")


def test_a_lower_term_than_before_is_followed_and_topped_later() -> None:
    story = Story(ClusterState(claim=LeaderClaim(9, "z")), known=("c",))
    story.up(3, "c-1")
    assert story.beats(3, link_3=beat(C5, 10)).claim == C5
    assert story.leadership.persistent_state().claim == LeaderClaim(9)
    story.membership.goodbye(3, story.now)
    story.tick()
    assert story.claim == LeaderClaim(10, "b")


# --- following --------------------------------------------------------------------------------------------


def test_as_long_as_it_lives_the_coordinator_stays_with_any_id() -> None:
    assert led_by(C5).beats(60, link_1=beat(C5, 20), link_3=beat(C5, 20)).claim == C5


def test_a_weaker_claim_changes_nothing() -> None:
    story = led_by(C5)
    assert not story.hear(1, beat(LeaderClaim(4, "a"), 99))
    assert not story.hear(1, beat())
    assert story.claim == C5


def test_a_claim_without_a_name_is_none() -> None:
    story = led_by(C5)
    assert not story.hear(1, beat(LeaderClaim(9, ""), 99))
    assert story.claim == C5


def test_a_coordinator_gives_way_to_a_stronger_claim() -> None:
    story = Story(known=("a", "c"))
    story.beats(3)
    assert story.leadership.leading
    story.up(1, "a-1")
    assert story.hear(1, beat(A5, 10))
    assert not story.leadership.leading
    assert story.claim == A5


def test_the_named_member_coordinates() -> None:
    story = led_by(A5)
    assert story.hear(1, beat(B6))
    assert story.leadership.leading


# --- losing the coordinator -------------------------------------------------------------------------------


def since_link_broke(story: Story, **words: Beat) -> float:
    story.membership.link_down(1, story.now)
    story.tick()
    waited_s = 0.0
    while not story.claimed and waited_s < 20:
        story.beats(BEAT_S, **words)
        waited_s += BEAT_S
    return waited_s


def test_a_broken_link_costs_the_coordination_after_its_time() -> None:
    story = led_by(A5)
    assert since_link_broke(story, link_3=beat(A5)) == 1.5
    assert story.claim == B6


def test_silence_costs_it_too() -> None:
    story = led_by(A5)
    assert story.beats(2.5, link_3=beat(A5)).claim == A5
    assert story.beats(0.5, link_3=beat(A5)).claim == B6


def test_pulses_that_others_pass_on_keep_it() -> None:
    story = led_by(A5)
    assert since_link_broke(story, link_3=beat(A5, 20)) == 20
    assert story.claim == A5


def test_what_is_passed_on_may_come_in_jerks() -> None:
    story = led_by(A5)
    since_link_broke(story, link_3=beat(A5, 20))
    assert story.beats(2.5, link_3=beat(A5)).claim == A5
    assert story.beats(0.5, link_3=beat(A5)).claim == B6


def test_a_coordinator_that_is_here_and_does_not_know_it_is_none() -> None:
    story = led_by(C5)
    story.membership.goodbye(1, story.now)
    story.tick()
    assert story.beats(2.5, link_3=beat(LeaderClaim(4, "c"), 50)).claim == C5
    assert story.beats(0.5, link_3=beat(LeaderClaim(4, "c"), 60)).claim == B6


def test_a_goodbye_and_a_removal_cost_it_at_once() -> None:
    for how in ("goodbye", "removed"):
        story = led_by(A5)
        if how == "goodbye":
            story.membership.goodbye(1, story.now)
        else:
            story.membership.removed("a")
        story.tick()
        assert story.claim == B6, how


@pytest.mark.parametrize("linked", [True, False])
def test_a_coordinator_that_only_others_heard_is_lost_when_it_is_removed(linked: bool) -> None:
    story = Story()
    story.up(3, "c-1")
    if linked:
        story.up(1, "a-1")
    assert story.beats(3, link_3=beat(A5, 10)).claim == A5
    story.membership.removed("a")
    story.tick()
    assert story.claim == B6


def test_a_restart_costs_it_at_once() -> None:
    story = led_by(C5)
    story.membership.goodbye(1, story.now)
    story.up(4, "c-2")
    story.tick()
    story.hear(4, beat())
    story.tick()
    assert story.claim == B6


def test_a_claim_of_the_new_start_is_not_lost_with_the_old_one() -> None:
    story = led_by(C5)
    story.membership.goodbye(1, story.now)
    story.up(4, "c-2")
    story.hear(4, beat(LeaderClaim(6, "c"), 1))
    story.tick()
    assert story.claim == LeaderClaim(6, "c")


def test_time_that_we_stood_still_does_not_depose_it() -> None:
    story = led_by(C5)
    story.membership.goodbye(1, story.now)
    story.tick()
    story.now += 60
    story.tick()
    assert story.claim == C5
    assert story.beats(30, link_3=beat(C5, 50)).claim == C5


# --- what is said -----------------------------------------------------------------------------------------


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


def test_who_lacks_something_is_sent_it() -> None:
    story = Story()
    assert story.replica.lacks(beat()) == (False, False)
    wants(story.replica, "llama")
    story.replica.hold(story.replica.roster.admitting("a", "studio", "key", unsealed))
    assert story.replica.lacks(beat()) == (True, True)


def test_what_a_person_deployed_is_served_before_what_requests_chose() -> None:
    """Here requests have chosen three times while a person spoke on the other side of a partition."""
    replica = Story().replica
    for model in ("one", "two", "three"):
        wants(replica, model, pinned=False)
    wish = only(2, "c", "llama")
    assert replica.desires(wish)
    live = replica.deployments.live()
    assert [(row.name, row.pinned, row.version, row.writer) for row in live] == [
        ("llama", True, 2, "c"),
        ("three", False, 3, "b"),
    ], "both are still deployed"
    assert not replica.desires(only(1, "a", "three"))
    wants(replica, "")
    assert (replica.deployments.live(), replica.deployments.newest) == ((), 4)
    wants(replica, "one", pinned=False)
    (one,) = replica.deployments.live()
    assert (one.version, one.writer, one.model, one.pinned) == (5, "b", "one", False)
    assert not replica.desires(wish)
    with pytest.raises(RemoteProtocolError, match="too far ahead"):
        replica.desires(only(1 << 40, "c", "llama"))
    with pytest.raises(RemoteProtocolError, match="too far ahead"):
        replica.desires(only(1 << 40, "c", ""))
    assert replica.deployments.live() == (one,)


def test_deployments_and_rosters_are_taken_over_once() -> None:
    replica = Story().replica
    wish = only(4, "c", "llama")
    assert [replica.desires(wish) for _ in range(2)] == [True, False]
    assert not replica.desires(NO_DEPLOYMENTS)
    wants(replica, "qwen", "2")
    (row,) = replica.deployments.live()
    assert (row.version, row.writer, row.model, row.nodes, row.pinned) == (5, "b", "qwen", "2", True)
    entry = RosterEntry("c", "mini", "key", False, 1)
    assert [replica.enrols([entry]) for _ in range(2)] == [True, False]


def test_the_roster_is_changed_here_or_the_reason_told() -> None:
    replica = Story().replica
    replica.hold(replica.roster.admitting("a", "studio", "key", unsealed))
    replica.hold(replica.roster.removing("a", unsealed))
    assert replica.roster.members() == {}
    with pytest.raises(UserError, match="was removed"):
        replica.hold(replica.roster.admitting("a", "studio", "key", unsealed))
    with pytest.raises(UserError, match="no member"):
        replica.hold(replica.roster.removing("z", unsealed))


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


# --- deciding ---------------------------------------------------------------------------------------------

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


def test_an_owner_decides_about_its_group_although_another_node_coordinates() -> None:
    story = led_by(A5)
    story.beats(1, link_1=beat(A5, 20), link_3=beat(A5, 20))
    assert not story.leadership.leading
    assert decided(story) == FormEpoch(1, BOTH, ("b-1", "c-1"))
    assert decided(story, ONE, ALONE) == NoAction()
    assert isinstance(decided(story, BOTH, ALONE), StopEpoch), "it is assigned otherwise now"


def test_losing_the_coordinator_ends_no_epoch() -> None:
    story = led_by(A5)
    story.membership.goodbye(1, story.now)
    story.tick()
    for _ in range(10):
        assert decided(story, ONE, ALONE) == NoAction()
        story.beats(0.5, link_3=beat())


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


# --- those that are about to stop -------------------------------------------------------------------------


def leaving(claim: LeaderClaim, pulse: int = 0) -> Beat:
    return replace(beat(claim, pulse), draining=True)


def test_who_is_about_to_stop_says_so_with_every_beat() -> None:
    story = led_by(A5)
    assert not story.leadership.beat(healthy=True).draining
    story.leadership.drain()
    story.beats(1, link_1=beat(A5, 10), link_3=beat(A5, 10))
    assert story.leadership.beat(healthy=True).draining
    assert story.leadership.draining == {"b"}


def test_what_a_start_of_an_agent_said_of_itself_ends_with_it() -> None:
    story = led_by(C5)
    story.hear(1, leaving(C5, 10))
    assert story.leadership.draining == {"a"}
    story.membership.goodbye(1, story.now)
    story.tick()
    assert story.leadership.draining == frozenset()
    story.up(4, "a-2")
    story.boots[1] = "a-2"
    story.beats(1, link_4=beat(C5, 10), link_3=beat(C5, 10))
    assert story.leadership.draining == frozenset()


def test_an_unannounced_restart_ends_it_too() -> None:
    story = led_by(C5)
    story.hear(1, leaving(C5, 10))
    story.up(4, "a-2")
    story.boots[4] = "a-2"
    story.hear(4, beat(C5, 10))
    story.tick()
    assert story.leadership.draining == frozenset()


def test_an_agent_about_to_stop_claims_only_if_it_is_alone() -> None:
    story = led_by(C5)
    story.hear(1, leaving(C5, 10))
    story.membership.goodbye(3, story.now)
    story.tick()
    assert story.claim == B6  # not a, though it has the smaller id
    story = led_by(C5)
    story.hear(1, leaving(C5, 10))
    story.leadership.drain()
    story.membership.goodbye(3, story.now)
    story.tick()
    assert story.claim == C5  # now a is the smallest of all again
    story.membership.goodbye(1, story.now)
    story.tick()
    assert story.claim == B6
