"""One node among others that send all that the wire lets them send: no links, no processes, time by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlxtp.cluster import peer_reports
from mlxtp.cluster.cluster_state import DeploymentTable
from mlxtp.cluster.node import ClusterNode
from mlxtp.cluster.state_changes import RosterProofs
from mlxtp.cluster.state_file import load
from mlxtp.config import Settings
from mlxtp.errors import Code, GroupError, MlxtpError, UserError
from mlxtp.gateway.admission import SystemMemory
from mlxtp.groups.boot_record import BootRecord, save
from mlxtp.groups.hosted_rank import HostedRank
from mlxtp.groups.overview import ReplicaLoads
from mlxtp.identity.join_protocol import JoinToken, TokenIssuer
from mlxtp.models.inspect import ModelSource
from mlxtp.placement import hardware
from mlxtp.placement.cost_model import RING_ETHERNET
from mlxtp.wire.certificates import authority_hash
from mlxtp.wire.cluster_messages import (
    MAX_ENTERED,
    MAX_MEMBERS,
    Beat,
    Deployment,
    Deployments,
    EndEpoch,
    GroupAssignment,
    Machine,
    MachineWanted,
    Members,
    MemoryShortage,
    ModelStatus,
    Port,
    Prepare,
    RankTrouble,
    RosterEntry,
    Serving,
    TokenIssued,
    TokenWanted,
)
from mlxtp.wire.frames import encode

from ..groups.one_node import GROUP, MACHINE, A, B, Node, by_hand, play
from ..groups.scenes import run, sees
from ..live_cluster import WAIT_S
from ..played import scenes
from ..wire.members import Member, founder
from .deployed import only

played = scenes(play, "tmp_path", "member")


def hosts(node: Node, host: str, order: Prepare) -> None:
    """Have it run a rank whose process has not been started yet."""
    rank = HostedRank(order, host, node.parts.node.settings, node.parts.node.links.send)
    rank.life = node.parts.hosted._alive[rank] = asyncio.ensure_future(asyncio.Event().wait())
    rank.life.add_done_callback(lambda _life: node.parts.hosted._gone(rank))


@played()
async def test_only_the_owner_of_a_group_may_have_a_rank_of_it_started(node: Node) -> None:
    """A node that has yet to hear who owns a group takes part: its owner may be the first to tell."""
    a, b = node.meet(A), node.meet(B)
    node.follow(a)
    order = Prepare(7, 1, "", "tiny", group=GROUP)
    node.parts.node.desired.serve("tiny")
    node.hear_assigned(a, A)
    node.hear(b, order)
    [refused] = b.heard(RankTrouble)
    assert (refused.epoch, refused.rank, refused.code) == (7, 1, Code.NOT_READY)
    assert "comes from ffffffff, but aaaaaaaa owns its group" in refused.detail
    assert node.orders == []
    other = replace(order, group="other#0")
    node.hear(b, other)
    node.hear(a, order)
    assert node.orders == [(B, other), (A, order)]
    assert a.heard(RankTrouble) == b.heard(RankTrouble)[1:] == []
    assert node.parts.node.replica.epoch == 7


@played()
async def test_only_the_present_coordinator_assigns_groups_and_its_last_word_holds(node: Node) -> None:
    a, b, groups = node.meet(A), node.meet(B), node.parts.groups

    def hear(link: Any, term: int, number: int, owner: str) -> str:
        node.obey(link, GroupAssignment(GROUP, "tiny", term, number, (owner,)))
        return groups.known(GROUP).scope.assignment.owner

    assert hear(b, 5, 9, B) == ""
    node.follow(b)
    assert hear(a, 5, 1, A) == B, "its word counts since it coordinates"
    assert hear(b, 4, 9, A) == B
    assert hear(b, 5, 9, B) == B
    assert hear(b, 5, 8, A) == B
    assert hear(b, 5, 10, A) == A
    # Both claimed one term while they were separated. The smaller node id holds, and has assigned less.
    node.follow(a)
    assert hear(b, 5, 11, B) == A
    assert hear(a, 5, 2, B) == B
    assert hear(a, 5, 2, A) == B


@played()
async def test_an_epoch_is_joined_once_and_not_by_a_node_that_has_its_own(node: Node) -> None:
    a = node.meet(A)
    node.follow(a)
    node.parts.hosted._last_epochs |= {A: 7, B: 9}
    for epoch in (6, 7):
        node.hear(a, Prepare(epoch, 1, "", "tiny", group=GROUP))
        assert "is not newer than epoch 7" in a.heard(RankTrouble)[-1].detail
    ended: list[MlxtpError] = []
    supervisor = node.parts.groups.known(GROUP).supervisor
    supervisor.status.in_epoch = True
    supervisor.end_epoch = ended.append  # type: ignore[method-assign]
    node.hear(a, Prepare(8, 1, "", "tiny", group=GROUP))
    assert "still ends an epoch of its own" in a.heard(RankTrouble)[-1].detail
    assert [error.code for error in ended] == [Code.REPLANNED]
    node.hear(a, Prepare(8, 1, "", "other", group="other#0"))
    supervisor.status.in_epoch = False
    node.hear(a, Prepare(9, 1, "", "tiny", group=GROUP))
    orders = [(order.epoch, order.group) for _, order in cast(Any, node.orders)]
    assert orders == [(8, "other#0"), (9, GROUP)], "one of another group is in no way"


@pytest.mark.parametrize("heard", [False, True], ids=["said here", "heard"])
@played()
async def test_requests_outlive_a_choice_of_the_same_model_and_no_other(node: Node, heard: bool) -> None:
    cluster, a = node.parts, node.meet(A)
    ended: list[MlxtpError] = []
    cluster.gateway.fail = lambda _, error: ended.append(error)  # type: ignore[method-assign]
    desired = cluster.node.desired

    def want(model: str) -> None:
        if heard:
            node.hear(a, *only(desired.table.newest + 1, A, model, pinned=False).messages())
        elif model:
            desired.serve(model, replace=True)
        else:
            desired.unload_all()

    want("tiny")
    ended.clear()
    want("tiny")
    assert ended == []
    want("org/other")
    want("")
    assert [(error.code, error.detail) for error in ended] == [
        (Code.SHUTTING_DOWN, "tiny was unloaded"),
        (Code.SHUTTING_DOWN, "org/other was unloaded"),
    ]


@played()
async def test_a_rank_whose_end_was_not_heard_of_ends_with_its_host_s_next_epoch(node: Node) -> None:
    a, b = node.meet(A), node.meet(B)
    for host, epoch, group in ((A, 7, GROUP), (A, 6, "other#0"), (B, 5, GROUP)):
        hosts(node, host, Prepare(epoch, 1, "", "tiny", group=group))
    serving = Serving(8, "loading", "", "ring", "", (A,), 0, "tiny", 1, 0, 0, (), group=GROUP)
    node.hear(b, replace(serving, group="new#0"))
    node.hear(a, replace(serving, epoch=7))
    assert a.heard(RankTrouble) == b.heard(RankTrouble) == []
    node.hear(a, serving)
    [trouble] = a.heard(RankTrouble)
    assert (trouble.epoch, trouble.detail) == (7, "its agent ended it: its host is at epoch 8")
    assert b.heard(RankTrouble) == []


@played()
async def test_only_rank_0_s_agent_speaks_for_a_group(node: Node, weights: ModelSource) -> None:
    a, b = node.meet(A), node.meet(B)
    node.lead(weights)
    node.live(a, b)
    scope = node.group.scope
    assert scope.owned
    group = Serving(
        9, "ready", "", "ring", RING_ETHERNET, (A, B), 0, "tiny", 1, 0, 0, (),
        group=GROUP, deployment="tiny", used=True,
    )  # fmt: skip
    node.hear(b, group)
    node.live(a, b)
    assert scope.owned
    node.hear(a, group)
    node.live(a, b)
    assert scope.assignment.ranks == (A, B)


@played()
async def test_a_removed_member_is_no_longer_heard(node: Node) -> None:
    a, b = node.meet(A), node.meet(B)
    node.follow(a)
    told: list[None] = []
    node.parts.node.enrolment.on_change(lambda: told.append(None))
    node.parts.node.enrolment.remove(A)
    assert told
    node.hear(a, Prepare(7, 1, "", "tiny"), *only(99, A, "org/model").messages())
    assert node.orders == []
    assert node.parts.node.desired.table.rows == ()
    node.tick()
    assert node.parts.node.links.nodes() == {B}
    assert any(entry.removed for members in b.heard(Members) for entry in members.entries)
    assert not node.parts.node.over.done()
    node.meet(A, "another start")
    assert node.parts.node.links.nodes() == {B}


def removed_by(first: Member, *entries: RosterEntry) -> Members:
    """Return the founder's message when it has removed these members; it is one itself."""
    proofs, mine = RosterProofs(first.identity), first.identity
    own = proofs.own(RosterEntry(mine.node_id, "first", mine.fingerprint, False, 1))
    gone = [proofs.removal(replace(proofs.admission(each), removed=True, removed_in=60)) for each in entries]
    return Members((own, *gone))


@played()
async def test_a_node_that_was_removed_ends_and_says_what_brings_it_back(node: Node, first: Member) -> None:
    a, me = node.meet(A), node.parts
    own = RosterEntry(me.node.node_id, "studio", me.node.identity.fingerprint, False, 50)
    node.hear(a, Members((replace(own, removed=True),)))
    assert not me.node.over.done(), "no one signed it"
    node.hear(a, removed_by(first, own))
    assert me.node.over.done()
    assert "mlxtp node --join TOKEN" in me.node.introduction.problem
    node.tick()


def crowd(first: Member, start: int, version: int) -> Members:
    """Return a message with members that the authority admitted in this version."""
    proofs = RosterProofs(first.identity)
    ghosts = (
        RosterEntry(f"{i:032x}", "ghost", f"{i:064x}", False, version)
        for i in range(start, start + MAX_ENTERED)
    )
    return Members(tuple(map(proofs.admission, ghosts)))


@played()
async def test_of_more_members_than_there_can_be_the_latest_are_left_out(
    node: Node, first: Member, caplog: pytest.LogCaptureFixture
) -> None:
    """On each Mac the same ones, and it is logged once."""
    me = node.parts
    a, b = node.meet(A), node.meet(B)
    before = set(me.node.replica.roster.members())
    for start in range(1, 300, MAX_ENTERED):
        node.hear(a, crowd(first, start, version=50))
        node.live_once(a, b)
    members = me.node.replica.roster.members()
    assert before == {me.node.node_id, A, B}
    assert before < set(members)
    assert len(members) == len(me.node.membership.statuses()) == MAX_MEMBERS
    assert me.node.links.nodes() == {A, B}
    assert caplog.text.count("mac-a reports more than 64 members") == 1
    ghost = next(node_id for node_id in members if node_id not in before)
    node.hear(b, removed_by(first, members[ghost]))
    assert ghost not in me.node.replica.roster.members()
    assert len(me.node.replica.roster.members()) == MAX_MEMBERS
    node.hear(a, removed_by(first, members[me.node.node_id]), crowd(first, 400, version=70))
    assert me.node.over.done()
    node.tick()


@played()
async def test_a_mac_for_which_there_is_no_room_ends_and_says_why(node: Node, first: Member) -> None:
    a, me = node.meet(A), node.parts.node
    for start in range(1, 64, MAX_ENTERED):
        assert not me.over.done()
        node.hear(a, crowd(first, start, version=0))
    assert me.over.done()
    assert "while another became the last of 64 members" in me.introduction.problem
    node.tick()


@played()
async def test_who_is_short_of_memory_says_so_and_the_group_it_is_in_takes_nothing_new(node: Node) -> None:
    a, b = node.meet(A), node.meet(B)
    node.hear(a, Serving(7, "ready", "", "ring", "ring", (A, B), 0, "tiny", 1, 4096, 512, ()))
    assert node.parts.gateway.admission.elsewhere() == ""
    node.hear(b, MemoryShortage())
    assert node.parts.gateway.admission.elsewhere() == "mac-f"
    node.no_longer(b, MemoryShortage())
    assert node.parts.gateway.admission.elsewhere() == ""
    node.hear(b, MemoryShortage())
    node.hear(a, Serving(8, "ready", "", "ring", "ring", (A,), 0, "tiny", 1, 4096, 512, ()))
    assert node.parts.gateway.admission.elsewhere() == "", "it has no part of the model any more"
    gateway = node.parts.gateway
    loads = ReplicaLoads(node.parts.node, gateway, node.parts.groups)
    for free, over in ((1 << 20, []), (1 << 40, [MemoryShortage()])):
        gateway.admission.memory = lambda free=free: SystemMemory(free)
        loads._report()
        assert (a.heard(MemoryShortage), a.ended(MemoryShortage)) == ([MemoryShortage()], over)


@played()
async def test_tokens_come_from_holders_of_the_authority(node: Node, member: Member, first: Member) -> None:
    me = node.parts
    with pytest.raises(UserError, match="the Mac that founded this cluster can issue join tokens"):
        await me.tokens.token()
    a, b = node.meet(A), node.meet(B)
    node.holds(A, first)
    asking = asyncio.ensure_future(me.tokens.token())
    await asyncio.sleep(0)
    [wanted] = a.heard(TokenWanted)
    assert b.heard(TokenWanted) == []
    node.hear(b, TokenIssued(bytes(16), "FORGED", ""), TokenWanted(wanted.nonce))
    assert b.heard(TokenIssued)[0].problem == "this Mac cannot issue join tokens"
    await asyncio.sleep(0)
    assert not asking.done()
    desk = TokenIssuer(me.node.identity.cluster_id, authority_hash(member.membership.authority))
    token, second = (desk.issue(bytes((i,)) * 16, 0.0).text() for i in (1, 2))
    node.hear(a, TokenIssued(wanted.nonce, token, ""), TokenIssued(wanted.nonce, second, ""))
    assert await asking == token
    refused = asyncio.ensure_future(me.tokens.token())
    await asyncio.sleep(0)
    node.hear(a, TokenIssued(a.heard(TokenWanted)[1].nonce, "", "16 tokens are open"))
    with pytest.raises(UserError, match="16 tokens are open"):
        await refused
    node.holds(B, first)
    asking = asyncio.ensure_future(me.tokens.token())
    await asyncio.sleep(0)
    node.hear(a, TokenIssued(a.heard(TokenWanted)[2].nonce, "", "16 tokens are open"))
    await asyncio.sleep(0)
    node.hear(b, TokenIssued(b.heard(TokenWanted)[0].nonce, second, ""))
    assert await asking == second, "the other one had room"
    for link in cast(Any, me.node.links.links()):
        link.close()
    with pytest.raises(UserError, match=r"only mac-a or mac-f can issue join tokens, but is out of reach"):
        await me.tokens.token()
    assert me.node.links._open == {}


@pytest.mark.parametrize("of", ["a shell", "another cluster", "another authority"])
@played()
async def test_what_is_no_token_of_this_cluster_is_not_printed(
    node: Node, member: Member, first: Member, of: str
) -> None:
    """A person hands it to a shell: `ssh mini "mlxtp node --join $(mlxtp token)"`."""
    cluster_id = member.identity.cluster_id
    said = {
        "a shell": "x; touch owned",
        "another cluster": JoinToken("c2" * 8, authority_hash(member.membership.authority), b"s" * 16).text(),
        "another authority": JoinToken(cluster_id, b"h" * 16, b"s" * 16).text(),
    }
    a = node.meet(A)
    node.holds(A, first)
    asking = asyncio.ensure_future(node.parts.tokens.token())
    await asyncio.sleep(0)
    node.hear(a, TokenIssued(a.heard(TokenWanted)[0].nonce, said[of], ""))
    with pytest.raises(
        UserError, match="mac-a replied with something else than a join token of this cluster"
    ):
        await asking


@played()
async def test_who_holds_the_authority_is_its_own_word(node: Node, tmp_path: Path, first: Member) -> None:
    own = removed_by(first)
    node.hear(node.meet(B), own)
    assert node.parts.node.replica.roster.holders() == [first.identity.node_id]
    a = node.meet(A)
    node.holds(A, founder(tmp_path))  # as the authority of another cluster has signed
    node.hear(a, Members((replace(node.parts.node.replica.roster.members()[A], holds=True, holds_in=50),)))
    assert node.parts.node.replica.roster.holders() == [first.identity.node_id]
    with pytest.raises(UserError, match="only first can issue join tokens, but is out of reach"):
        await node.parts.tokens.token()
    with pytest.raises(UserError, match=r"first holds the cluster's authority.* there is none"):
        node.parts.node.enrolment.remove(A, first.identity.node_id)
    assert {A, first.identity.node_id} <= node.parts.node.replica.roster.members().keys()


@played()
async def test_an_agent_that_ends_by_a_bug_says_it_once(node: Node) -> None:
    """`run` fails when an error is left that was not asked for."""
    node.parts.node.end(GroupError("a bug", Code.INTERNAL))
    node.parts.node.end()
    assert node.parts.node.over.done()


def test_a_name_by_the_system_that_cannot_be_printed_is_told_too(tmp_path: Path, member: Member) -> None:
    async def scene() -> None:
        chosen = Settings(tmp_path, "", 0, 1, "tiny", cluster=True, name="studio\x1b[2J\u202e")
        node = ClusterNode(chosen, member.identity, MACHINE)
        assert node.introduction.hello().name == "studio?[2J?"
        encode(node.introduction.hello(), 0, 1)
        for members in node.replica.roster.messages():
            encode(members, 0, 1)
        await node.close()

    with by_hand():
        run(scene())


@pytest.mark.parametrize("model", ["x" * 1001, "a\nb", "\ud800", "nul\0"])
@played()
async def test_a_name_that_no_message_can_carry_is_refused_where_it_is_typed(node: Node, model: str) -> None:
    a = node.meet(A)
    with pytest.raises(UserError):
        node.parts.node.desired.serve(model)
    node.tick()
    assert {table.rows for table in a.heard(Deployments)} == {()}


def test_a_removal_that_a_full_disk_refused_is_written_at_the_end(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        node.meet(A)
        await node.tick_and_save()
        (tmp_path / ".state.json.new").mkdir()
        node.parts.node.enrolment.remove(A)
        await node.tick_and_save()
        assert A in load(tmp_path)[0].beliefs.roster.members()
        (tmp_path / ".state.json.new").rmdir()

    play(tmp_path, member, story)
    assert A not in load(tmp_path)[0].beliefs.roster.members()


@played()
async def test_many_changes_of_one_member_reach_the_others_by_beats(node: Node) -> None:
    a, b = node.meet(A), node.meet(B)
    before = len(b.heard(Deployments))
    for version in range(5, 500):
        row = Deployment("m", "m", version=version, writer=A)
        node.hear(a, Deployments((row,), 0, False))
    assert len(b.heard(Deployments)) == before + 1
    node.hear(b, Beat(0, "", 0, 0, 0, True, 0))
    assert b.heard(Deployments)[-1].rows == (row,)
    for _ in range(10):
        node.hear(a, ModelStatus("m", "", ""))
        node.tick()
    status_of = node.parts.node.membership.status_of
    assert (status_of(A).present, status_of(B).present) == (True, False), "every message is a sign of life"


@played()
async def test_serving_adds_to_what_is_deployed_and_keeps_what_is_not_named(node: Node) -> None:
    a, desired, replica = node.meet(A), node.parts.node.desired, node.parts.node.replica
    tables: list[int] = []
    desired.on_change(lambda before, after: tables.append(len(after.rows) - len(before.rows)))
    desired.serve("org/one", replicas=2, nodes="2", on=(A,), keep_s=60)
    desired.serve("org/one@main")
    desired.serve("org/one@main")
    me = node.parts.node.node_id
    one = Deployment("org/one", "org/one@main", 2, "2", (A,), 60, 2, me)
    assert replica.deployments.live() == (one,)
    desired.serve("org/two")
    assert [row.name for row in replica.deployments.live()] == ["org/two", "org/one"]
    desired.serve("org/three", keep_s=600)
    assert tables == [1, 0, 1, 1]
    assert a.heard(Deployments)[-1].rows == replica.deployments.rows
    desired.serve("org/two", replace=True)
    assert [row.name for row in replica.deployments.live()] == ["org/two"]
    assert replica.deployments.live()[0].version == 5, "it stays alone, which is a change"
    desired.serve("org/two", replace=True)
    assert replica.deployments.newest == 5


@played()
async def test_a_long_table_counts_once_all_of_it_has_come(node: Node) -> None:
    a, b, replica = node.meet(A), node.meet(B), node.parts.node.replica
    rows = [Deployment(f"m{number:02}", "m", version=number + 1, writer=A) for number in range(70)]
    first, second, last = DeploymentTable(tuple(rows)).messages()
    node.hear(a, first)
    node.hear(b, *DeploymentTable(tuple(rows[40:50])).messages())
    assert len(replica.deployments.rows) == 10
    node.hear(a, second, last)
    assert replica.deployments.rows == tuple(rows)
    node.hear(a, *[replace(first, rows=(rows[0],) * 32)] * 33)
    assert node.parts.node.links.nodes() == {B}, "it never ends"


def looks(monkeypatch: pytest.MonkeyPatch, *machines: Machine) -> asyncio.Semaphore:
    """Have this machine read as one of `machines` after the other, each when it is released."""
    go, left = asyncio.Semaphore(0), iter(machines)

    async def refresh(*_: object) -> Machine:
        await go.acquire()
        return next(left)

    monkeypatch.setattr(hardware, "refresh", refresh)
    return go


@played()
async def test_a_member_that_is_asked_reports_its_machine_though_nothing_changed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = looks(monkeypatch, MACHINE, MACHINE)
    a, b = node.meet(A), node.meet(B)
    node.parts.readings.read_again()
    await asyncio.sleep(0)
    told = len(a.heard(Machine))
    node.hear(a, MachineWanted())
    go.release()
    await asyncio.sleep(0)
    assert len(a.heard(Machine)) == told, "that look began before the request"
    go.release()
    await sees(lambda: len(a.heard(Machine)) > told)
    assert len(b.heard(Machine)) == 1, "it did not ask"


@played()
async def test_members_hear_how_often_this_mac_formed_over_each_device(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = Port(5, "en5", "D5", "E5", False, 80, "rdma_en5", True)
    go, a = looks(monkeypatch, replace(MACHINE, ports=(port,))), node.meet(A)
    save(node.parts.node.home, BootRecord({"rdma_en5": 2}))
    node.hear(a, EndEpoch(3, False))  # a group failed: it looks again
    go.release()
    await sees(lambda: a.heard(Machine)[-1].ports == (replace(port, formations=2),))


@pytest.mark.parametrize("end", ["report", "link", "time"])
@played()
async def test_a_look_waits_for_the_reports_of_members_and_not_for_ever(
    node: Node, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(peer_reports, "LOOK_S", 0.05 if end == "time" else WAIT_S)
    go = looks(monkeypatch, MACHINE)
    go.release()
    a, b = node.meet(A), node.meet(B)
    looking = asyncio.ensure_future(
        node.parts.readings.read_machine_now((node.parts.node.node_id, A, B, "e" * 32))
    )
    await sees(lambda: a.heard(MachineWanted) and b.heard(MachineWanted))
    await sees(go.locked)
    node.hear(b, MACHINE)
    assert not looking.done()
    if end == "report":
        node.hear(a, MACHINE)
    elif end == "link":
        a.close()
    await looking
