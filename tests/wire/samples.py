"""Messages to test with: one plain example of each, and hypothesis strategies for all their values."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

import mlxtp.agent  # noqa: F401 - it imports all kinds of rows
from mlxtp.cluster.state_file import RosterSaved
from mlxtp.errors import Code
from mlxtp.gateway.routing import MAX_HASHES
from mlxtp.groups.overview import ReplicaLoad
from mlxtp.wire import messages as msg
from mlxtp.wire.cluster_messages import (
    MAX_MEMBERS,
    MAX_SIZES,
    MAX_TRIP_US,
    AgentHello,
    AuthorityHandover,
    AuthorityKept,
    Beat,
    Deployment,
    Deployments,
    Echo,
    EndEpoch,
    EpochEnded,
    FabricAnswer,
    FabricResult,
    FabricWanted,
    GroupAssignment,
    Interface,
    LeftOutGroup,
    Machine,
    MachineWanted,
    Members,
    MemoryShortage,
    ModelHeld,
    ModelLender,
    ModelPull,
    ModelStatus,
    Port,
    Prepare,
    Prepared,
    RankGathered,
    RankPong,
    RankSide,
    RankStarted,
    RankTrouble,
    Report,
    ReportsSent,
    RosterEntry,
    RosterParting,
    RoundTrip,
    Serving,
    StartRank,
    StoredModel,
    TokenIssued,
    TokenWanted,
)
from mlxtp.wire.codecs import FieldCodec, NodeRow
from mlxtp.wire.frames import messages
from mlxtp.wire.peer_messages import (
    MAX_ADDRESSES,
    MAX_PEERS,
    FileHeld,
    FilesHeld,
    FilesWanted,
    FileWanted,
    JoinGrant,
    JoinOffer,
    JoinRefusal,
    JoinRequest,
)
from mlxtp.wire.rank_stats import RankStats

from .forwards import of_prompt

NODE = "0123456789abcdef" * 2
_MEMBER = RosterEntry(
    NODE, "studio", "ab" * 32, True, 3, NODE, "10.0.0.7", 9, "5a" * 70, 4, "04" + "5b" * 64, "5c" * 70,
    "5d" * 70, True, 5, "5e" * 70,
)  # fmt: skip
_CHANGED = Deployment("tiny", "tiny@main", 2, "all", (NODE, "b"), 600, 2, NODE, False, 1, "pipeline", "40,24")
_REMOVED = Deployment("org/old", keep_s=0, version=3, writer=NODE, removed=True)
_ETHERNET = Interface("en0", "10.0.0.1", 24, "ethernet", 10_000, True)
_PORT = Port(1, "en5", "AAAA-BBBB", "CCCC-DDDD", False, 80, "rdma_en5", True)

_CONTROL_EXAMPLES: tuple[msg.Message, ...] = (
    AgentHello(1, NODE, "ab" * 8, NODE, "studio", ("mlx=1",), (), ("10.0.0.1:52414",), ""),
    Beat(3, NODE, 2, 5, 17, True, 40, True),
    Deployments((_CHANGED, _REMOVED), 1, True),
    Members((_MEMBER,)),
    RosterParting("{}", False),
    RosterSaved(7),
    Report(3, RosterSaved(7), False),
    ReportsSent(3),
    Machine(
        "macos", "26.3", "25D1", "Mac15,14", "Apple M3 Ultra", 32, 80, 1 << 39, 1 << 38, 9, 9, "ac",
        "enabled", False, (_ETHERNET,), (_PORT,), ("all is well",), reached=("10.0.0.1 10.0.0.2",),
    ),
    ModelStatus("tiny", "ab" * 32, "", "cd" * 20, 40_960, b"facts"),
    Prepare(17, 1, "10.0.0.1", "tiny", group="tiny#0"),
    Prepared(17, "10.0.0.1:50000", "/models/tiny"),
    StartRank(17, msg.Bootstrap(1, 2, "ring", ("a:1", "b:2"), "a:3", b"k" * 32, 30.0, 5.0, 1)),
    RankStarted(17, False),
    RankPong(17, 1, msg.Pong("idle", 0.25, 0, 7, "tiny", RankStats(7, 14, 5, 1 << 30))),
    RankTrouble(17, 1, Code.RANK_LOST, "rank 1 was ended by signal 9", True),
    EndEpoch(17, True),
    EpochEnded(17),
    RankSide(17, 1, msg.SideChannel(1, b"abc")),
    RankGathered(17, 1, msg.Gathered(1, b"abcabc")),
    MachineWanted(),
    Serving(
        17, "ready", "", "ring", "ring over Ethernet", (NODE,), 3, "tiny", 2, 2048, 512, (2,),
        group="tiny#0", deployment="tiny", running=2, speed=30, cached=512, idle_s=20, broken=True,
        ready_s=90, used=True,
    ),
    GroupAssignment(
        "tiny#0", "tiny", 3, 2, (NODE, "b"), "ring over Ethernet", (40, 24), "", "it would be faster alone",
        512, 4, ("f" * 32,),
    ),
    LeftOutGroup("JACCL mesh", (f"{NODE} b rdma_en5 rdma_en3",), "it broke", True),
    ReplicaLoad("tiny#0", 9000, 3, 500, b"12345678" * 2),
    TokenWanted(b"n" * 16),
    TokenIssued(b"n" * 16, "ABCD", ""),
    AuthorityHandover(b"n" * 16, b"certificate", b"key"),
    AuthorityKept(b"n" * 16, "its disk is full"),
    FabricWanted(b"n" * 16, "tiny"),
    FabricResult(
        (NODE, "f" * 32), "ring", "ring over Ethernet", False, True, 1, 0.25, (1024, 4096), (0.5, 1.0),
        (0.5, 2.0),
    ),
    FabricAnswer(b"n" * 16, ""),
    Echo(4_000_000, False),
    RoundTrip(NODE, 310),
    MemoryShortage(),
    ModelHeld("org/one", "ab" * 20, 3, 9, 100, True, "it is gated", 50000),
    ModelLender("org/one", NODE),
    ModelPull("org/one", "ab" * 20),
    StoredModel("org/one", "ab" * 20, 9, True),
)  # fmt: skip

EXAMPLES: dict[type[msg.Message], msg.Message] = {
    type(message): message
    for message in (
        msg.Hello(1, 0, 4711, b"n" * 16, b""),
        msg.Welcome(1, b""),
        msg.Ping(),
        msg.Pong("idle", 0.25, 0, 7, "tiny", RankStats(7, 14, 5, 1 << 30)),
        msg.Bootstrap(0, 2, "ring", ("a:1", "b:2"), "a:3", b"k" * 32, 30.0, 5.0, 1),
        msg.SideChannel(1, b"abcd"),
        msg.Gathered(0, b"", "rank 1 is gone"),
        of_prompt(1, 2, 3, (7,), drafts=1),
        msg.ChosenTokens(1, (7,)),
        msg.SessionStop(1, "stop", 3),
        msg.Evict((1,)),
        msg.Arrange((64, 64), lanes=(0, 1)),
        msg.Spill(1, 0, 2, b"d" * 16),
        msg.FetchBlocks(1, 256, b"d" * 32),
        msg.FetchedBlocks(1, 2),
        msg.Restore(1, 1),
        msg.Ack(5, 3, 6, 0xDEADBEEF),
        msg.Error(Code.INTERNAL, "it broke", 0),
        msg.Init(),
        msg.SanityCheck(),
        msg.LoadShard("/models/tiny", 512, (2,), counted=(msg.CountedShare(1 << 30, 2048),)),
        msg.KvBudget(1 << 30),
        msg.Unload(),
        msg.Shutdown(),
        msg.InitDone(0, 2),
        msg.SanityDone(2, (0, 1), 0xDEADBEEF),
        msg.Loaded(2048, 4096, 1 << 20, (2,), layers=(24, 25)),
        msg.Done(),
        msg.TimeCollectives("sum", 1024, 8),
        msg.CollectivesTimed(0.25, False),
        msg.Generate(1, (5, 6, 7), 100, group="tiny#1", places=(1, 2), batch=True),
        msg.Accepted(1),
        msg.Prefilled(1, 512, 128),
        msg.Delta((1,), (0,), (42,)),
        msg.ScoredDelta(1, 0, (42,), (-0.5,), 2, (42, 43), (-0.5, -1.5)),
        msg.Cancel(1),
        msg.Finished(1, "stop", 1, 1),
        msg.SessionEnd(),
        *_CONTROL_EXAMPLES,
        JoinOffer(b"ca", b"n" * 32, "studio", ("10.0.0.1:52414",)),
        JoinRequest(b"t" * 8, b"i" * 16, "mini", b"\4" * 65, b"n" * 32, b"p" * 32, b"s" * 70),
        JoinGrant(b"certificate", b"p" * 32, ("10.0.0.1:52414",)),
        JoinRefusal("it was used", b"s" * 70, "studio", ("10.0.0.1:52414",)),
        FilesWanted("org/one"),
        FilesHeld(b"{}", b"\1\0", 1 << 40),
        FileWanted(3, 1 << 40),
        FileHeld(1 << 40),
    )
}
assert set(EXAMPLES) == set(messages().values())


ROWS: dict[type[msg.Message], msg.Message] = {
    kind: row for kind, row in EXAMPLES.items() if isinstance(row, NodeRow)
}
"""Those of `EXAMPLES` that come in a Report."""


def to_body(message: msg.Message) -> dict[str, Any]:
    """The map that a frame of this message has."""
    return message.CODEC.to_wire(message)


def field_codecs(message: type[msg.Message]) -> tuple[tuple[str, FieldCodec], ...]:
    """Names and codecs of a message's fields, in order."""
    return tuple((f.name, f.metadata["codec"]) for f in fields(message))


def _ints(low: int, high: int, min_items: int, max_items: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(low, high), min_size=min_items, max_size=max_items).map(tuple)


def _floats(low: float, high: float, min_items: int, max_items: int) -> st.SearchStrategy[tuple[float, ...]]:
    """Such as 32 bits can hold: frames carry no larger numbers in a list."""
    return st.lists(st.floats(low, high, width=32), min_size=min_items, max_size=max_items).map(tuple)


_printable = st.characters(codec="utf-8").filter(str.isprintable)


def _addresses(max_items: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.text(_printable, max_size=60), max_size=max_items).map(tuple)


_rank = st.integers(0, msg.MAX_RANKS - 1)
_size = st.integers(1, msg.MAX_RANKS)
_count = st.integers(0, msg.U63)
_u32 = st.integers(0, msg.U32)
_uid = st.integers(1, msg.U32)
_context = st.integers(1, msg.MAX_CONTEXT)
_seconds = st.floats(0.0, 1e9)
_token = st.integers(0, 2**31 - 1)
_token_lists = _ints(0, 2**31 - 1, 1, 40)
_agreement = st.sampled_from(("verify", "broadcast"))
_proof = st.binary(max_size=32)
_text = st.text(_printable, max_size=100)
_raw = st.text(st.characters(codec="utf-8"), max_size=100)
_short = st.text(_printable, max_size=8)
_node = st.text("0123456789abcdef", max_size=32)
_nodes = st.lists(_node.filter(bool), max_size=64).map(tuple)
_epoch = st.integers(1, msg.U63)
_name = st.text(_printable, max_size=64)
_group = st.just("") | st.builds(
    "{}#{}".format, st.text(_printable, min_size=1, max_size=20), st.integers(0, 99)
)
_one_group = _group.filter(bool)
_split = _ints(1, msg.MAX_LAYERS, 0, msg.MAX_RANKS)
_certificate = st.binary(min_size=1, max_size=1500)
_nonce = st.binary(min_size=32, max_size=32)
_digest = st.binary(min_size=msg.DIGEST_BYTES, max_size=msg.DIGEST_BYTES)
_reason = st.sampled_from(("stop", "length", "cancel"))
_phase = st.sampled_from(
    ("starting", "forming", "proving", "loading", "idle", "measuring", "prefill", "decode", "closing")
)

SAMPLING = st.builds(
    msg.Sampling,
    st.floats(0.0, 100.0),
    st.floats(0.0, 1.0),
    _token,
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.5),
    _count,
)
SHAPING = st.builds(
    msg.Shaping,
    st.floats(0.01, 100.0),
    st.floats(-100.0, 100.0),
    st.floats(-100.0, 100.0),
    _ints(0, 2**31 - 1, 0, 40),
    _floats(-1e9, 1e9, 0, 40),
    st.integers(0, msg.MAX_CONTEXT),
    st.sampled_from(("", "json_schema", "regex", "lark")),
    _raw,
)

_STRATEGIES: dict[type[msg.Message], st.SearchStrategy[msg.Message]] = {
    msg.Hello: st.builds(msg.Hello, _u32, _rank, _count, st.binary(min_size=16, max_size=16), _proof),
    msg.Welcome: st.builds(msg.Welcome, _u32, _proof),
    msg.Pong: st.builds(
        msg.Pong,
        _phase,
        _seconds,
        _count,
        _count,
        _text,
        st.builds(
            RankStats,
            *(_count,) * 24,
            *(_ints(0, 2**32 - 1, 0, 8),) * 3,
            _count,
            _count,
            _seconds,
            st.booleans(),
        ),
        _count,
    ),
    msg.Bootstrap: st.builds(
        msg.Bootstrap,
        _rank,
        _size,
        st.sampled_from(("none", "ring", "jaccl")),
        st.lists(_text, max_size=msg.MAX_RANKS).map(tuple),
        _text,
        st.binary(min_size=32, max_size=32),
        _seconds,
        _seconds,
        st.integers(0, 1),
        _seconds,
        _seconds,
        st.sampled_from(("auto", "broadcast-draws")),
        st.sampled_from(("auto", "off", "lookup", "mtp", "draft")),
        st.lists(st.sampled_from(("", "rdma_en5", "rdma_en3,rdma_en4")), max_size=msg.MAX_RANKS**2).map(
            tuple
        ),
        st.booleans(),
        st.booleans(),
        _seconds,
        st.lists(_short, max_size=msg.MAX_RANKS).map(tuple),
        disk_folder=_raw,
        disk_bytes=_count,
    ),
    msg.ChosenTokens: st.builds(msg.ChosenTokens, _count, _token_lists),
    msg.SideChannel: st.builds(msg.SideChannel, st.integers(1, msg.MAX_ROUNDS), st.binary(max_size=300)),
    msg.Gathered: st.builds(msg.Gathered, st.integers(0, msg.MAX_ROUNDS), st.binary(max_size=2400), _text),
    msg.Forward: st.builds(
        msg.Forward,
        _ints(1, msg.U32, 1, 40),
        _ints(0, msg.MAX_CONTEXT, 1, 40),
        _ints(0, msg.MAX_FRAME_TOKENS, 0, 40),
        _ints(0, 2**31 - 1, 0, 40),
        _ints(1, msg.U32, 0, 40),
        _agreement,
        st.integers(msg.RESTS, msg.MAX_DRAFTS),
        st.lists(
            st.builds(
                msg.PromptPart,
                _context,
                _u32,
                st.booleans(),
                SAMPLING,
                _u32,
                _ints(1, msg.U32, 0, 40),
                _token,
            ),
            max_size=msg.MAX_PROMPTS,
        ).map(tuple),
    ),
    msg.SessionStop: st.builds(
        msg.SessionStop,
        _uid,
        st.sampled_from(("stop", "length", "cancel", "preempt", "error")),
        _count,
        st.integers(0, msg.MAX_CONTEXT),
        _ints(1, msg.U32, 0, 40),
    ),
    msg.Evict: st.builds(msg.Evict, _ints(1, msg.U32, 0, 40)),
    msg.Arrange: st.builds(msg.Arrange, _ints(1, msg.MAX_ROOM, 0, 40), st.booleans()),
    msg.Spill: st.builds(
        msg.Spill, _uid, st.integers(0, msg.MAX_CONTEXT), _context, _digest, st.just(b"") | _digest
    ),
    msg.FetchBlocks: st.builds(
        msg.FetchBlocks, _uid, _context, st.binary(min_size=msg.DIGEST_BYTES, max_size=300)
    ),
    msg.FetchedBlocks: st.builds(msg.FetchedBlocks, _uid, st.integers(0, msg.MAX_BLOCKS)),
    msg.Restore: st.builds(msg.Restore, _uid, st.integers(0, msg.MAX_BLOCKS), st.booleans()),
    msg.KvBudget: st.builds(msg.KvBudget, _count, st.booleans()),
    msg.Ack: st.builds(msg.Ack, _count, _count, _count, _u32, _count, _count),
    msg.Error: st.builds(msg.Error, st.sampled_from(Code), _text, _u32),
    msg.LoadShard: st.builds(
        msg.LoadShard,
        _raw,
        _context,
        _ints(0, 2**31 - 1, 0, 64),
        st.integers(0, msg.MAX_CONTEXT),
        st.integers(0, 8),
        _count,
        _raw,
        st.lists(_raw, max_size=msg.MAX_RANKS).map(tuple),
        _split,
        st.lists(st.builds(msg.CountedShare, _count, _count), max_size=msg.MAX_RANKS).map(tuple),
    ),
    msg.InitDone: st.builds(msg.InitDone, _rank, _size),
    msg.SanityDone: st.builds(msg.SanityDone, _count, _ints(0, 2**31 - 1, 0, msg.MAX_RANKS), _u32),
    msg.Loaded: st.builds(
        msg.Loaded, _uid, _uid, _count, _ints(0, 2**31 - 1, 0, 64), *[_count] * 4, st.booleans()
    ),
    msg.Done: st.builds(msg.Done, st.booleans()),
    msg.TimeCollectives: st.builds(
        msg.TimeCollectives,
        st.sampled_from(("sum", "gather", "chain")),
        st.integers(1, msg.MAX_TIMED_BYTES),
        st.integers(1, msg.MAX_TIMED_ROUNDS),
    ),
    msg.CollectivesTimed: st.builds(msg.CollectivesTimed, _seconds, st.booleans()),
    msg.Generate: st.builds(
        msg.Generate,
        _uid,
        _token_lists,
        _context,
        SAMPLING,
        SHAPING,
        st.integers(-1, msg.MAX_TOP_LOGPROBS),
        st.booleans(),
        client=_count,
        user=_count,
        salt=_count,
        group=_group,
        places=_ints(1, msg.MAX_CONTEXT, 0, msg.MAX_PLACES),
        batch=st.booleans(),
    ),
    msg.Accepted: st.builds(msg.Accepted, _uid),
    msg.Prefilled: st.builds(msg.Prefilled, _uid, _count, _count),
    msg.ScoredDelta: st.builds(
        msg.ScoredDelta,
        _uid,
        _token,
        _token_lists,
        _floats(-1e9, 0.0, 0, 40),
        st.integers(0, msg.MAX_TOP_LOGPROBS),
        _ints(0, 2**31 - 1, 0, 40),
        _floats(-1e9, 0.0, 0, 40),
    ),
    msg.Delta: st.builds(msg.Delta, _ints(1, msg.U32, 1, 40), _token_lists, _token_lists),
    msg.Cancel: st.builds(msg.Cancel, _uid),
    msg.Finished: st.builds(msg.Finished, _uid, _reason, *(_count,) * 5),
    JoinOffer: st.builds(JoinOffer, _certificate, _nonce, _name, _addresses(MAX_ADDRESSES)),
    JoinRequest: st.builds(
        JoinRequest,
        st.binary(min_size=8, max_size=8),
        st.binary(min_size=16, max_size=16),
        _name,
        st.binary(min_size=65, max_size=65),
        _nonce,
        _nonce,
        st.binary(min_size=8, max_size=80),
    ),
    JoinRefusal: st.builds(
        JoinRefusal, _text, st.binary(min_size=8, max_size=80), _name, _addresses(MAX_ADDRESSES)
    ),
    JoinGrant: st.builds(JoinGrant, _certificate, _nonce, _addresses(MAX_PEERS)),
}

_shorts = st.lists(_short, max_size=5).map(tuple)
_big = st.integers(0, 2**53)

_MACHINE_PARTS = (
    st.sampled_from(("macos", "linux", "other")),
    *(_short,) * 4,
    *(st.integers(0, 4096),) * 2,
    *(_big,) * 4,
    st.sampled_from(("ac", "battery", "unknown")),
    st.sampled_from(("enabled", "disabled", "unsupported")),
    st.booleans(),
    st.lists(
        st.builds(
            Interface,
            _short,
            _short,
            st.integers(0, 32),
            st.sampled_from(("ethernet", "wifi", "thunderbolt", "bridge", "loopback", "other")),
            st.integers(0, 10**7),
            st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    st.lists(
        st.builds(
            Port,
            st.integers(0, 64),
            _short,
            _short,
            _short,
            st.booleans(),
            st.integers(0, 1000),
            _short,
            st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    _shorts,
)

_STRATEGIES |= {
    AgentHello: st.builds(
        AgentHello, _u32, _node, _short, _node, _short, _shorts, _shorts, _shorts, _short
    ),
    Beat: st.builds(Beat, _count, _node, _count, _count, _count, st.booleans(), _count),
    Deployments: st.builds(
        Deployments,
        st.lists(
            st.builds(
                Deployment, _text, _text, st.integers(0, 64), _short, _nodes,
                st.integers(-1, 2**32 - 1), _count, _node, st.booleans(),
            ),
            max_size=MAX_MEMBERS // 8,
        ).map(tuple),
        _count,
        st.booleans(),
    ),
    Members: st.builds(
        Members,
        st.lists(
            st.builds(RosterEntry, _node, _short, _short, st.booleans(), _count, removed_in=_count),
            max_size=MAX_MEMBERS // 8,
        ).map(tuple),
    ),
    Machine: st.builds(Machine, *_MACHINE_PARTS),
    ModelStatus: st.builds(ModelStatus, _short, _short, _text, shape=st.binary(max_size=100)),
    Prepare: st.builds(Prepare, _epoch, _rank, _short, _short, _group),
    Prepared: st.builds(Prepared, _epoch, _short, _raw),
    StartRank: st.builds(StartRank, _epoch, _STRATEGIES[msg.Bootstrap]),
    RankStarted: st.builds(RankStarted, _epoch, st.booleans()),
    RankPong: st.builds(RankPong, _epoch, _rank, _STRATEGIES[msg.Pong]),
    RankTrouble: st.builds(RankTrouble, _epoch, _rank, st.sampled_from(Code), _text, st.booleans()),
    EndEpoch: st.builds(EndEpoch, _epoch, st.booleans()),
    EpochEnded: st.builds(EpochEnded, _epoch),
    RankSide: st.builds(RankSide, _epoch, _rank, _STRATEGIES[msg.SideChannel]),
    RankGathered: st.builds(RankGathered, _epoch, _rank, _STRATEGIES[msg.Gathered]),
    MachineWanted: st.builds(MachineWanted),
    Serving: st.builds(
        Serving, _count, st.sampled_from(("ready", "failed", "restarting")), _text, _short, _short, _shorts,
        _count, _text, _count, _u32, _u32, _ints(0, 2**31 - 1, 0, 64),
        _u32, _ints(0, msg.U32, 0, msg.MAX_RANKS), _group, _text,
        _count, _count, _count, _u32, st.booleans(), st.booleans(),
    ),
    GroupAssignment: st.builds(
        GroupAssignment, _one_group, _text, _count, _count, _shorts, _short, _split, _text, _text, _u32,
        _count, _shorts,
    ),
    LeftOutGroup: st.builds(LeftOutGroup, _short, _shorts, _text, st.booleans()),
    ReplicaLoad: st.builds(
        ReplicaLoad, _one_group, _count, _count, _u32, st.binary(max_size=msg.DIGEST_BYTES * MAX_HASHES)
    ),
    RosterParting: st.builds(RosterParting, _short, st.booleans()),
    RosterSaved: st.builds(RosterSaved, _count),
    ReportsSent: st.builds(ReportsSent, _count),
    TokenWanted: st.builds(TokenWanted, st.binary(min_size=16, max_size=16)),
    TokenIssued: st.builds(TokenIssued, st.binary(min_size=16, max_size=16), _short, _text),
    AuthorityHandover: st.builds(
        AuthorityHandover, st.binary(min_size=16, max_size=16), _certificate,
        st.binary(min_size=1, max_size=1000),
    ),
    AuthorityKept: st.builds(AuthorityKept, st.binary(min_size=16, max_size=16), _text),
    FabricWanted: st.builds(FabricWanted, st.binary(min_size=16, max_size=16), _text),
    FabricResult: st.builds(
        FabricResult, st.lists(_node, max_size=8).map(tuple), st.sampled_from(("ring", "jaccl")), _short,
        st.booleans(), st.booleans(), _count, st.floats(1e-9, 1e4), _ints(1, 2**31 - 1, 1, MAX_SIZES),
        *(_floats(2.0**-29, 2.0**13, 0, MAX_SIZES),) * 2,
    ),
    FabricAnswer: st.builds(FabricAnswer, st.binary(min_size=16, max_size=16), _text),
    Echo: st.builds(Echo, _count, st.booleans()),
    RoundTrip: st.builds(RoundTrip, _short, st.integers(0, MAX_TRIP_US)),
    MemoryShortage: st.builds(MemoryShortage),
    ModelHeld: st.builds(
        ModelHeld, _text, _short, _count, _count, _count, st.booleans(), _text, st.integers(0, 65535)
    ),
    ModelLender: st.builds(ModelLender, _text, _node),
    ModelPull: st.builds(ModelPull, _text, _short),
    StoredModel: st.builds(StoredModel, _text, _short, _count, st.booleans()),
    FilesWanted: st.builds(FilesWanted, _text),
    FilesHeld: st.builds(FilesHeld, st.binary(max_size=64), st.binary(max_size=64), _count),
    FileWanted: st.builds(FileWanted, _u32, _count),
    FileHeld: st.builds(FileHeld, _count),
}  # fmt: skip

_STRATEGIES[Report] = st.builds(
    Report, _count, st.one_of(*(_STRATEGIES[kind] for kind in ROWS)), st.booleans()
)

MESSAGE: st.SearchStrategy[msg.Message] = st.one_of(
    *(_STRATEGIES.get(message, st.builds(message)) for message in messages().values())
)
"""Any message with any values its fields allow."""


def fullest_generate(tokens: int) -> msg.Generate:
    """A request that asks for everything, with `tokens` prompt tokens."""
    return msg.Generate(
        msg.U32,
        tuple(range(tokens)),
        msg.MAX_CONTEXT,
        msg.Sampling(0.7, 0.9, 40, 0.1, 0.5, 0.2, msg.U63),
        msg.Shaping(
            1.5,
            -2.0,
            2.0,
            tuple(range(msg.MAX_BIASES)),
            (-1e9,) * msg.MAX_BIASES,
            msg.MAX_CONTEXT,
            "json_schema",
            "\U0001f4a5" * msg.MAX_GRAMMAR,
        ),
        msg.MAX_TOP_LOGPROBS,
        True,
        client=msg.U63,
        user=msg.U63,
        salt=msg.U63,
        places=(msg.MAX_CONTEXT,) * msg.MAX_PLACES,
        batch=True,
    )
