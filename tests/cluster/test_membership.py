"""Presence of members: silence, broken links, restarts, returns, copies. Time is an argument."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.cluster.membership import (
    TRANSITIONS,
    Change,
    ChangeCause,
    Duplicate,
    Membership,
    MemberState,
    MemberStatus,
    Timeouts,
)
from mlxtp.errors import UserError
from mlxtp.wire.cluster_messages import MAX_MEMBERS

PACE = Timeouts()
BEAT_S = PACE.beat_s


class Story:
    """Node `a` and what it sees of others, told step by step; the clock ticks at every beat."""

    def __init__(self, *known: str) -> None:
        self.now = 100.0
        self.members = Membership("a", "a-1", known or ("b", "c"), self.now, PACE)
        self.changes: list[Change] = []
        self.duplicates: list[Duplicate] = []

    def up(self, link: int, boot_id: str) -> bool:
        """A link with the node that a boot id such as "b-1" begins with."""
        return self.members.link_up(link, boot_id[0], boot_id, f"10.0.0.1:{link}", self.now)

    def beats(self, seconds: float, *links: int) -> Story:
        """Time passes, and something comes over these links at every beat."""
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for link in links:
                self.members.beat(link, self.now)
            self.tick()
        return self

    def tick(self) -> None:
        for event in self.members.tick(self.now):
            if isinstance(event, Change):
                self.changes.append(event)
            else:
                self.duplicates.append(event)

    def state(self, node_id: str = "b") -> MemberState:
        return self.members.status_of(node_id).state

    def whys(self, node_id: str = "b") -> list[ChangeCause]:
        self.tick()
        return [change.why for change in self.changes if change.node_id == node_id]


# --- coming, falling silent, breaking ---------------------------------------------------------------------


def test_a_member_is_away_until_it_is_first_seen() -> None:
    story = Story()
    assert story.beats(60).state() is MemberState.AWAY
    assert story.up(1, "b-1")
    story.tick()
    assert story.changes == [Change("b", MemberState.AWAY, MemberState.ALIVE, ChangeCause.LINKED, "b-1")]


def test_a_member_that_beats_stays_alive() -> None:
    story = Story()
    story.up(1, "b-1")
    assert story.beats(60, 1).whys() == [ChangeCause.LINKED]


@pytest.mark.parametrize(
    ("silent_s", "state"),
    [
        (1.0, MemberState.ALIVE),
        (1.5, MemberState.SUSPECT),
        (2.5, MemberState.SUSPECT),
        (3.0, MemberState.DEAD),
    ],
)
def test_silence_makes_a_suspect_and_then_a_dead(silent_s: float, state: MemberState) -> None:
    story = Story()
    story.up(1, "b-1")
    assert story.beats(5, 1).beats(silent_s).state() is state


def test_a_member_whose_beats_wait_behind_other_messages_is_not_silent() -> None:
    story = Story()
    story.up(1, "b-1")
    for _ in range(20):
        story.members.heard(1, story.now)
        story.beats(BEAT_S)
    assert story.whys() == [ChangeCause.LINKED]


def test_a_suspect_that_is_heard_again_is_alive() -> None:
    story = Story()
    story.up(1, "b-1")
    assert story.beats(2).beats(1, 1).whys() == [ChangeCause.LINKED, ChangeCause.SILENT, ChangeCause.HEARD]


@pytest.mark.parametrize(
    ("later_s", "state"), [(0.0, MemberState.SUSPECT), (1.0, MemberState.SUSPECT), (1.5, MemberState.DEAD)]
)
def test_a_broken_link_makes_a_suspect_at_once_and_a_dead_soon(later_s: float, state: MemberState) -> None:
    story = Story()
    story.up(1, "b-1")
    story.beats(5, 1)
    story.members.link_down(1, story.now)
    story.tick()
    assert story.beats(later_s).state() is state


def test_a_silent_member_whose_link_breaks_is_given_no_time_on_top() -> None:
    story = Story()
    story.up(1, "b-1")
    story.beats(5, 1).beats(2.5)
    story.members.link_down(1, story.now)
    assert story.beats(0.5).state() is MemberState.DEAD


def test_a_link_that_comes_back_in_time_is_nothing_but_a_scare() -> None:
    story = Story()
    story.up(1, "b-1")
    story.members.link_down(1, story.now)
    story.beats(1)
    story.up(2, "b-1")
    assert story.beats(5, 2).whys() == [ChangeCause.LINKED, ChangeCause.BROKEN, ChangeCause.LINKED]


def test_a_suspect_with_a_link_can_be_counted_on_and_one_without_cannot() -> None:
    story = Story()
    story.up(1, "b-1")
    assert story.beats(2).members.status_of("b") == MemberStatus(MemberState.SUSPECT, "b-1", True)
    assert story.members.status_of("b").present
    story.members.link_down(1, story.now)
    assert story.members.status_of("b") == MemberStatus(MemberState.SUSPECT, "b-1", False)
    assert not story.members.status_of("b").present


def test_when_a_member_is_dead_its_links_no_longer_count() -> None:
    story = Story()
    story.up(1, "b-1")
    assert story.members.counts(1)
    story.beats(3)
    assert not story.members.counts(1)


# --- both ends dialled ------------------------------------------------------------------------------------


def test_of_two_links_either_may_go() -> None:
    for goes, stays in ((1, 2), (2, 1)):
        story = Story()
        story.up(1, "b-1")
        story.up(2, "b-1")
        story.beats(1, 1, 2)
        story.members.link_down(goes, story.now)
        assert story.beats(5, stays).whys() == [ChangeCause.LINKED]
        assert story.up(3, "b-1")


def test_a_second_link_over_which_nothing_comes_stops_counting() -> None:
    story = Story()
    story.up(1, "b-1")
    story.up(2, "b-1")
    story.beats(3, 2)
    assert [story.members.counts(link) for link in (1, 2)] == [False, True]
    assert story.state() is MemberState.ALIVE


def test_links_of_one_member_are_few() -> None:
    story = Story()
    assert [story.up(link, "b-1") for link in range(6)] == [True] * 4 + [False] * 2


def test_a_number_cannot_name_two_links() -> None:
    story = Story()
    story.up(1, "b-1")
    with pytest.raises(ValueError, match="link 1"):
        story.up(1, "c-1")


# --- restarts and returns ---------------------------------------------------------------------------------


def test_a_restart_ends_one_incarnation_and_begins_another() -> None:
    story = Story()
    story.up(1, "b-1")
    story.beats(5, 1)
    story.members.link_down(1, story.now)
    story.up(2, "b-2")
    story.tick()
    assert story.changes[-2:] == [
        Change("b", MemberState.SUSPECT, MemberState.DEAD, ChangeCause.ENDED, "b-1"),
        Change("b", MemberState.DEAD, MemberState.ALIVE, ChangeCause.RESTARTED, "b-2"),
    ]


def test_a_restart_is_noticed_while_the_old_link_still_stands() -> None:
    story = Story()
    story.up(1, "b-1")
    story.beats(5, 1)
    story.up(2, "b-2")
    assert story.beats(5, 2).whys()[-2:] == [ChangeCause.ENDED, ChangeCause.RESTARTED]
    assert story.members.status_of("b") == MemberStatus(MemberState.ALIVE, "b-2", True)
    assert not story.members.counts(1)
    assert story.duplicates == []


def test_a_return_after_a_partition_is_the_same_incarnation() -> None:
    story = Story()
    story.up(1, "b-1")
    assert story.beats(5).state() is MemberState.DEAD
    assert story.up(2, "b-1")
    story.tick()
    assert story.changes[-1] == Change("b", MemberState.DEAD, MemberState.ALIVE, ChangeCause.RETURNED, "b-1")


def test_a_late_beat_over_the_link_it_was_given_up_on_revives_no_member() -> None:
    story = Story()
    story.up(1, "b-1")
    assert story.beats(5).beats(5, 1).state() is MemberState.DEAD


def test_what_is_over_never_counts_again() -> None:
    story = Story()
    story.up(1, "b-1")
    story.beats(5)
    story.up(2, "b-2")
    assert not story.up(3, "b-1")
    story.members.beat(3, story.now)
    story.tick()
    assert story.members.status_of("b") == MemberStatus(MemberState.ALIVE, "b-2", True)


def test_a_late_beat_of_an_incarnation_that_was_followed_is_not_its_successors() -> None:
    story = Story()
    story.up(1, "b-1")
    story.up(2, "b-2")
    story.beats(1.0)
    story.members.beat(1, story.now)
    assert story.beats(0.5).state() is MemberState.SUSPECT
    story.members.beat(1, story.now)
    assert story.state() is MemberState.SUSPECT


def test_two_first_words_in_the_wrong_order_come_right() -> None:
    """Of a process that ended, and of the one after it, the first frames may be read in either order."""
    for ended_by in ("fin", "silence", "goodbye"):
        story = Story()
        story.up(2, "b-2")
        story.up(1, "b-1")
        if ended_by == "fin":
            story.members.link_down(1, story.now)
        elif ended_by == "goodbye":
            story.members.goodbye(1, story.now)
        story.beats(5, 2)
        assert story.members.status_of("b") == MemberStatus(MemberState.ALIVE, "b-2", True), ended_by
        assert story.duplicates == []
        assert not story.up(3, "b-1")


def test_a_goodbye_is_a_departure_and_not_a_death() -> None:
    story = Story()
    story.up(1, "b-1")
    story.members.goodbye(1, story.now)
    assert story.beats(5).whys() == [ChangeCause.LINKED, ChangeCause.GOODBYE]
    assert not story.members.counts(1)
    assert not story.up(2, "b-1")
    assert story.up(3, "b-2")
    assert story.whys()[-1] is ChangeCause.RESTARTED


def test_old_boot_ids_are_forgotten_and_memory_is_bounded() -> None:
    story = Story()
    for start in range(100):
        story.up(start, f"b-{start}")
        story.members.link_down(start, story.now)
    assert len(story.members._members["b"].retired) == 16


# --- copies -----------------------------------------------------------------------------------------------


def test_two_incarnations_that_both_beat_are_two_machines() -> None:
    story = Story()
    story.up(1, "b-1")
    story.beats(5, 1)
    story.up(2, "b-2")
    story.beats(0.5, 1, 2)
    assert story.duplicates == []  # what was on its way when the first one ended
    story.beats(0.5, 1, 2)
    assert story.duplicates == [Duplicate("b", ("b-1", "b-2"), ("10.0.0.1:1", "10.0.0.1:2"))]
    assert story.changes[-1] == Change("b", MemberState.ALIVE, MemberState.DEAD, ChangeCause.TWINS, "b-2")
    assert not story.members.counts(1)
    assert not story.members.counts(2)
    assert not story.up(3, "b-1")
    assert not story.up(4, "b-2")
    assert story.up(5, "b-3")


def test_beats_of_the_first_before_the_second_came_prove_nothing() -> None:
    story = Story()
    story.up(1, "b-1")
    story.beats(20, 1)
    story.up(2, "b-2")
    assert story.beats(20, 2).duplicates == []


def test_one_that_should_be_over_and_keeps_calling_is_a_second_machine() -> None:
    story = Story()
    story.up(1, "b-1")
    story.beats(5)
    story.up(2, "b-2")
    assert [story.up(link, "b-1") for link in (3, 4)] == [False, False]
    story.tick()
    assert story.duplicates == []
    assert not story.up(5, "b-1")
    story.tick()
    assert story.duplicates == [Duplicate("b", ("b-2", "b-1"), ("10.0.0.1:2", "10.0.0.1:5"))]
    assert story.state() is MemberState.DEAD


def test_a_node_with_our_own_id_is_told_of_once() -> None:
    story = Story()
    assert [story.up(link, "a-2") for link in (1, 2)] == [False, False]
    story.tick()
    assert story.duplicates == [Duplicate("a", ("a-1", "a-2"), ("", "10.0.0.1:1"))]


def test_a_call_to_ourselves_is_no_copy() -> None:
    story = Story()
    assert not story.up(1, "a-1")
    story.tick()
    assert story.duplicates == []


# --- our own loop -----------------------------------------------------------------------------------------


def test_time_that_we_stood_still_counts_against_no_member() -> None:
    story = Story()
    story.up(1, "b-1")
    story.beats(5, 1)
    story.now += 60
    story.tick()
    assert story.members.health.stood_still_s == 59.5
    assert story.state() is MemberState.ALIVE
    assert story.beats(1, 1).whys() == [ChangeCause.LINKED]


def test_nor_against_a_second_link() -> None:
    story = Story()
    story.up(1, "b-1")
    story.up(2, "b-1")
    story.now += 60
    story.tick()
    assert story.members.counts(1)
    assert story.members.counts(2)


def test_a_link_that_broke_before_we_stood_still_gets_its_time() -> None:
    story = Story()
    story.up(1, "b-1")
    story.members.link_down(1, story.now)
    story.tick()
    story.now += 60
    story.tick()
    assert story.beats(2.0).state() is MemberState.SUSPECT
    assert story.beats(1.0).state() is MemberState.DEAD


@pytest.mark.parametrize(("late_s", "healthy"), [(0.0, True), (0.5, True), (0.6, False)])
def test_a_lagging_member_is_unwell_and_patient_for_a_while(late_s: float, healthy: bool) -> None:
    story = Story()
    story.up(1, "b-1")
    story.now += BEAT_S + late_s
    story.members.beat(1, story.now)
    story.tick()
    assert story.members.health.healthy is healthy
    assert story.beats(2.0).state() is (MemberState.SUSPECT if healthy else MemberState.ALIVE)
    assert story.beats(3.5).state() is (MemberState.DEAD if healthy else MemberState.SUSPECT)
    assert story.beats(1.0).members.health.healthy


def test_after_that_the_limits_are_what_they_were() -> None:
    story = Story()
    story.up(1, "b-1")
    story.now += 5
    story.members.beat(1, story.now)
    story.tick()
    assert story.beats(7, 1).beats(3).state() is MemberState.DEAD


# --- who belongs ------------------------------------------------------------------------------------------


def test_strangers_have_no_link() -> None:
    story = Story()
    assert not story.up(1, "z-1")
    assert story.state("z") is MemberState.AWAY
    assert set(story.members.statuses()) == {"a", "b", "c"}


@pytest.mark.parametrize("links", [0, 1, 2])
def test_a_removed_member_is_cut_at_once_and_not_let_in(links: int) -> None:
    story = Story()
    for link in range(links):
        story.up(link, "b-1")
    story.members.removed("b")
    assert story.whys()[-1] is ChangeCause.REMOVED
    assert not any(story.members.counts(link) for link in range(links))
    assert not story.up(7, "b-2")


def test_a_removed_member_may_be_admitted_again() -> None:
    story = Story()
    story.members.removed("b")
    story.members.removed("b")
    story.members.admitted("b")
    story.members.admitted("b")
    assert story.whys() == [ChangeCause.REMOVED, ChangeCause.ADMITTED]
    assert story.up(1, "b-1")
    assert story.state() is MemberState.ALIVE


def test_there_is_room_for_64() -> None:
    story = Story(*(f"n{i}" for i in range(MAX_MEMBERS - 1)))
    with pytest.raises(UserError, match="at most 64 members"):
        story.members.admitted("one more")
    story.members.removed("n3")
    story.members.admitted("one more")
    assert len(story.members.statuses()) == MAX_MEMBERS
    story.members.admitted("a")  # this node itself takes no room


# --- the table --------------------------------------------------------------------------------------------


def test_every_state_is_reached_and_left_by_legal_moves_only() -> None:
    legal = {(before, after) for (before, _), after in TRANSITIONS.items()}
    forbidden = set(itertools.permutations(MemberState, 2)) - legal
    assert forbidden == {
        (MemberState.AWAY, MemberState.SUSPECT),
        (MemberState.AWAY, MemberState.DEAD),
        (MemberState.AWAY, MemberState.LEFT),
        (MemberState.ALIVE, MemberState.AWAY),
        (MemberState.SUSPECT, MemberState.AWAY),
        (MemberState.DEAD, MemberState.AWAY),
        (MemberState.DEAD, MemberState.SUSPECT),
        (MemberState.DEAD, MemberState.LEFT),
        (MemberState.LEFT, MemberState.AWAY),
        (MemberState.LEFT, MemberState.SUSPECT),
        (MemberState.LEFT, MemberState.DEAD),
        (MemberState.REMOVED, MemberState.ALIVE),
        (MemberState.REMOVED, MemberState.SUSPECT),
        (MemberState.REMOVED, MemberState.DEAD),
        (MemberState.REMOVED, MemberState.LEFT),
    }


_input = st.one_of(
    st.tuples(st.just("up"), st.integers(1, 6), st.sampled_from(("b-1", "b-2", "b-3"))),
    st.tuples(st.sampled_from(("beat", "down", "goodbye")), st.integers(1, 6), st.just("")),
    st.tuples(st.sampled_from(("removed", "admitted")), st.just(0), st.just("")),
    st.tuples(st.just("tick"), st.sampled_from((0, 1, 2, 3, 8)), st.just("")),
)


@given(st.lists(_input, max_size=60))
def test_all_moves_are_legal_and_what_is_over_stays_over(
    inputs: list[tuple[str, int, str]],
) -> None:
    story, ended = Story("b"), set[str]()
    members = story.members
    for what, number, boot_id in inputs:
        match what:
            case "up" if not members.counts(number):
                story.up(number, boot_id)
            case "beat":
                members.beat(number, story.now)
            case "down":
                members.link_down(number, story.now)
            case "goodbye":
                members.goodbye(number, story.now)
            case "removed" | "admitted":
                getattr(members, what)("b")
            case "tick":
                story.now += number * BEAT_S
        story.tick()
        standing = members.status_of("b")
        linked = {boot for link in members._members["b"].links.values() for boot in [link.boot_id]}
        assert standing.linked == (standing.boot_id in linked)
        assert (standing.state in (MemberState.ALIVE, MemberState.SUSPECT)) or not linked
        assert not linked & set(members._members["b"].retired)
        assert set(members._of_link) == set(members._members["b"].links)
        ended |= set(members._members["b"].retired)
        assert standing.state is not MemberState.ALIVE or standing.boot_id not in ended
    for one, other in itertools.pairwise(story.changes):
        assert one.after is other.before
