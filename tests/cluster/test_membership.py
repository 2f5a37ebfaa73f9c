"""Presence of members: silence, broken links, restarts, returns, copies. Time is an argument."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.cluster.membership import Change, Duplicate, Membership, MemberState, MemberStatus, Timeouts
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

    def told(self, script: str) -> Story:
        """Do what a script says, such as "b-1 on 1, beats 5 1, beats 2": it beats for 5 s, and not for 2."""
        for step in script.split(", "):
            match step.split():
                case [boot_id, "on", link]:
                    assert self.up(int(link), boot_id)
                case [boot_id, "refused", link]:
                    assert not self.up(int(link), boot_id)
                case ["beats", seconds, *links]:
                    self.beats(float(seconds), *map(int, links))
                case ["stands", seconds]:
                    self.now += float(seconds)
                case ["removed" | "admitted" as what]:
                    getattr(self.members, what)("b")
                case [("beat" | "link_down" | "goodbye") as what, link]:
                    getattr(self.members, what)(int(link), self.now)
                case _:
                    assert step == "tick"
                    self.tick()
        return self

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

    def became(self) -> str:
        """Return why `b` changed, each time with its start if that is not the first, and what it is now."""
        self.tick()
        whys = [f"{each.why.name.lower()} {each.boot_id.replace('b-1', '')}".strip() for each in self.changes]
        status = self.members.status_of("b")
        links = "".join(f" {link}" for link in range(10) if self.members.counts(link))
        present = f"{status.state} {status.boot_id}{' linked' * status.linked}{links}"
        return f"{', '.join(whys)}; {present}".strip()


STORIES = """
silent for 1.5 s: b-1 on 1, beats 5 1, beats 1.5
    linked, silent; suspect b-1 linked 1
silent for 3 s: b-1 on 1, beats 5 1, beats 3
    linked, silent, given_up; dead b-1
a suspect that is heard again: b-1 on 1, beats 2, beats 1 1
    linked, silent, heard; alive b-1 linked 1
a link that broke 1.5 s ago: b-1 on 1, beats 5 1, link_down 1, tick, beats 1.5
    linked, broken, given_up; dead b-1
a link that comes back in time is but a scare: b-1 on 1, link_down 1, beats 1, b-1 on 2, beats 5 2
    linked, broken, linked; alive b-1 linked 2
of two links one may go: b-1 on 1, b-1 on 2, beats 1 1 2, link_down 2, beats 5 1, b-1 on 3
    linked; alive b-1 linked 1 3
links of one member are few: b-1 on 1, b-1 on 2, b-1 on 3, b-1 on 4, b-1 refused 5, b-1 refused 6
    linked; alive b-1 linked 1 2 3 4
a restart ends one incarnation and begins another: b-1 on 1, beats 5 1, link_down 1, b-2 on 2
    linked, broken, ended, restarted b-2; alive b-2 linked 2
a return after a partition is the same incarnation: b-1 on 1, beats 5, b-1 on 2
    linked, silent, given_up, returned; alive b-1 linked 2
what is over never counts again: b-1 on 1, beats 5, b-2 on 2, b-1 refused 3, beat 3
    linked, silent, given_up, restarted b-2; alive b-2 linked 2
alone it is no copy: b-1 on 1, b-2 on 2, link_down 1, link_down 2, b-1 refused 3, b-1 refused 4, b-1 refused 5
    linked, ended, restarted b-2, broken b-2; suspect b-2
first words in the wrong order, and silence: b-2 on 2, b-1 on 1, beats 5 2, b-1 refused 3
    linked b-2, ended b-2, restarted, silent, ended, restarted b-2; alive b-2 linked 2
first words in the wrong order, and a goodbye: b-2 on 2, b-1 on 1, goodbye 1, beats 5 2, b-1 refused 3
    linked b-2, ended b-2, restarted, ended, restarted b-2; alive b-2 linked 2
a goodbye is a departure and not a death: b-1 on 1, goodbye 1, beats 5
    linked, goodbye; left b-1
beats of the first before the second came prove no copy: b-1 on 1, beats 20 1, b-2 on 2, beats 20 2
    linked, ended, restarted b-2; alive b-2 linked 2
a call to ourselves is no copy, and a stranger has no link: a-1 refused 1, z-1 refused 2
    ; away
time that we stood still counts against no link: b-1 on 1, b-1 on 2, stands 60
    linked; alive b-1 linked 1 2
a link that broke before we stood still gets its time: b-1 on 1, link_down 1, tick, stands 60, tick, beats 2
    linked, broken; suspect b-1
and no more than that: b-1 on 1, link_down 1, tick, stands 60, tick, beats 3
    linked, broken, given_up; dead b-1
a removed member is cut at once and not let in: b-1 on 1, removed, b-2 refused 7
    linked, removed; removed b-1
a removed member may be admitted again: removed, removed, admitted, admitted, b-1 on 1
    removed, admitted, linked; alive b-1 linked 1
"""
"""Of each: what node `a` sees, why `b` changes, then its state, its present start, the links that count."""
LINES = STORIES.strip().split("\n")
CASES = [(*story.split(": "), end.strip()) for story, end in zip(LINES[::2], LINES[1::2], strict=True)]


@pytest.mark.parametrize(("script", "became"), [each[1:] for each in CASES], ids=[each[0] for each in CASES])
def test_what_becomes_of_a_member(script: str, became: str) -> None:
    story = Story().told(script)
    assert story.became() == became
    assert story.duplicates == []


def test_a_suspect_with_a_link_can_be_counted_on_and_one_without_cannot() -> None:
    story = Story().told("b-1 on 1, beats 2")
    assert story.members.status_of("b") == MemberStatus(MemberState.SUSPECT, "b-1", True)
    assert story.members.status_of("b").present
    story.told("link_down 1")
    assert not story.members.status_of("b").present


def test_a_number_cannot_name_two_links() -> None:
    with pytest.raises(ValueError, match="link 1"):
        Story().told("b-1 on 1, c-1 on 1")


def test_old_boot_ids_are_forgotten_and_memory_is_bounded() -> None:
    story = Story()
    for start in range(100):
        story.told(f"b-{start} on {start}, link_down {start}")
    assert len(story.members._members["b"].retired) == 16


def test_two_incarnations_that_both_beat_are_two_machines() -> None:
    story = Story().told("b-1 on 1, beats 5 1, b-2 on 2, beats 0.5 1 2")
    assert story.duplicates == []  # what was on its way when the first one ended
    assert story.told("beats 0.5 1 2").became() == "linked, ended, restarted b-2, twins b-2; dead b-2"
    assert story.duplicates == [Duplicate("b", ("b-1", "b-2"), ("10.0.0.1:1", "10.0.0.1:2"))]
    story.told("b-1 refused 3, b-2 refused 4, b-3 on 5")


def test_one_that_should_be_over_and_keeps_calling_is_a_second_machine() -> None:
    story = Story().told("b-1 on 1, beats 5, b-2 on 2, b-1 refused 3, b-1 refused 4, tick")
    assert story.duplicates == []
    story.told("b-1 refused 5, tick")
    assert story.duplicates == [Duplicate("b", ("b-2", "b-1"), ("10.0.0.1:2", "10.0.0.1:5"))]
    assert story.state() is MemberState.DEAD


def test_a_node_with_our_own_id_is_told_of_once() -> None:
    story = Story().told("a-2 refused 1, a-2 refused 2, tick")
    assert story.duplicates == [Duplicate("a", ("a-1", "a-2"), ("", "10.0.0.1:1"))]


@pytest.mark.parametrize(("late_s", "healthy"), [(0.0, True), (0.5, True), (0.6, False), (59.5, False)])
def test_a_lagging_member_is_unwell_and_patient_for_a_while(late_s: float, healthy: bool) -> None:
    story = Story().told(f"b-1 on 1, stands {BEAT_S + late_s}, beat 1, tick")
    assert story.members.health.stood_still_s == (0.0 if healthy else pytest.approx(late_s))
    assert story.members.health.healthy is healthy
    assert story.beats(2.0).state() is (MemberState.SUSPECT if healthy else MemberState.ALIVE)
    assert story.beats(3.5).state() is (MemberState.DEAD if healthy else MemberState.SUSPECT)
    assert story.beats(1.0).members.health.healthy


def test_there_is_room_for_64() -> None:
    story = Story(*(f"n{i}" for i in range(MAX_MEMBERS - 1)))
    with pytest.raises(UserError, match="at most 64 members"):
        story.members.admitted("one more")
    story.members.removed("n3")
    story.members.admitted("one more")
    assert len(story.members.statuses()) == MAX_MEMBERS
    assert "z" not in story.members.statuses()
    story.members.admitted("a")  # this node itself takes no room


_input = st.one_of(
    st.tuples(st.just("up"), st.integers(1, 6), st.sampled_from(("b-1", "b-2", "b-3"))),
    st.tuples(st.sampled_from(("beat", "down", "goodbye")), st.integers(1, 6), st.just("")),
    st.tuples(st.sampled_from(("removed", "admitted")), st.just(0), st.just("")),
    st.tuples(st.just("tick"), st.sampled_from((0, 1, 2, 3, 8)), st.just("")),
)


@given(st.lists(_input, max_size=60))
def test_all_moves_are_legal_and_what_is_over_stays_over(inputs: list[tuple[str, int, str]]) -> None:
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
