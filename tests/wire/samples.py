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
        msg.Vectors(1, (0, 2), bytes(32)),
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


def _lists(item: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(item, max_size=most).map(tuple)


_count = st.integers(0, msg.U63)
_u32 = st.integers(0, msg.U32)
_uid = st.integers(1, msg.U32)
_context = st.integers(1, msg.MAX_CONTEXT)
_place = st.integers(0, msg.MAX_CONTEXT)
_seconds = st.floats(0.0, 1e9)
_token = st.integers(0, 2**31 - 1)
_tokens = _ints(0, 2**31 - 1, 0, 40)
_some_tokens = _ints(0, 2**31 - 1, 1, 40)
_uids = _ints(1, msg.U32, 0, 40)
_some_uids = _ints(1, msg.U32, 1, 40)
_text = st.text(_printable, max_size=100)
_raw = st.text(st.characters(codec="utf-8"), max_size=100)
_short = st.text(_printable, max_size=8)
_name = st.text(_printable, max_size=64)
_node = st.text("0123456789abcdef", max_size=32)
_one_group = st.builds("{}#{}".format, st.text(_printable, min_size=1, max_size=20), st.integers(0, 99))
_digest = st.binary(min_size=msg.DIGEST_BYTES, max_size=msg.DIGEST_BYTES)
_nonce = st.binary(min_size=32, max_size=32)
_big = st.integers(0, 2**53)

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
    allowed_tokens=_ints(0, 2**31 - 1, 0, 40),
    bad_tokens=_ints(0, 2**31 - 1, 0, 40),
    bad_lengths=_ints(1, msg.MAX_WORD_TOKENS, 0, 40),
)

POOLING = st.builds(
    msg.Pooling,
    _ints(1, msg.MAX_CONTEXT, 0, 40),
    st.sampled_from(("last", "mean", "cls", "scores")),
    st.booleans(),
    _u32,
    _ints(0, 2**31 - 1, 0, 2),
)

_PART = st.builds(msg.PromptPart, _context, _u32, st.booleans(), SAMPLING, _u32, _uids, _token)
_INTERFACE = st.builds(
    Interface,
    _short,
    _short,
    st.integers(0, 32),
    st.sampled_from(("ethernet", "wifi", "thunderbolt", "bridge", "loopback", "other")),
    st.integers(0, 10**7),
    st.booleans(),
)
_PORT = st.builds(
    Port,
    st.integers(0, 64),
    *(_short,) * 3,
    st.booleans(),
    st.integers(0, 1000),
    _short,
    st.booleans(),
)
_DEPLOYMENT = st.builds(
    Deployment,
    _text,
    _text,
    st.integers(0, 64),
    _short,
    _lists(_node.filter(bool), 64),
    st.integers(-1, msg.U32),
    _count,
    _node,
    st.booleans(),
)
_MEMBER = st.builds(RosterEntry, _node, _short, _short, st.booleans(), _count, removed_in=_count)

_PHASES = ("starting", "forming", "proving", "loading", "idle", "measuring", "prefill", "decode", "closing")
_BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    name: values
    for values, names in (
        (
            _count,
            "accepted again asked_us cached client collectives computed desired disk_bytes drafted "
            "expected_us floor forward forwards free generated held in_flight kv_bytes kv_row_bytes "
            "kv_token_bytes number open_requests peak_bytes pid pulse queued requests roster running salt "
            "since size speed step step_us stranded_bytes term total user wait_us weight_bytes weight_mib",
        ),
        (
            st.booleans(),
            "answer bad batch bridge_up broken by_default checkpoints clear complete draining fast_fences "
            "healthy ignore_eos in_order jaccl jaccl_ring large_buffers metal more mtp outside over "
            "repeatable trim used wants",
        ),
        (
            _short,
            "build chip cluster_id commit fabric fingerprint http kind part release revision ring token",
        ),
        (_text, "decode_address deployment detail error faster model problem reason why"),
        (_seconds, "ack_deadline_s canary_s deadline_s phase_s queue_s round_s seconds"),
        (_lists(_short, 5), "addresses flags leaving links notes participants versions"),
        (_u32, "digest file idle_s kv_mib load_s ready_s version"),
        (_uid, "context uid vocabulary"),
        (_context, "block end max_tokens prefill_chunk"),
        (_place, "keep max_context start"),
        (_big, "free_bytes gpu_bytes memory_bytes wired_bytes"),
        (_raw, "disk_folder draft_path path"),
        (_name, "ask name"),
        (_node, "boot_id coordinator node_id"),
        (_token, "index"),
        (_tokens, "top_tokens"),
        (_some_tokens, "indices tokens"),
        (_uids, "covers gathered uids"),
        (_some_uids, "rows"),
        (_digest, "nonce"),
        (_nonce, "epoch_key"),
        (_one_group | st.just(""), "group"),
        (_floats(-1e9, 0.0, 0, 40), "top_logprobs"),
        (_floats(2.0**-29, 2.0**13, 0, MAX_SIZES), "gathers_s sums_s"),
        (_ints(0, msg.MAX_CONTEXT, 1, 40), "positions"),
        (_ints(0, msg.MAX_FRAME_TOKENS, 0, 40), "widths"),
        (_ints(0, msg.MAX_RANKS - 1, 0, 40), "lanes"),
        (_ints(1, msg.MAX_ROOM, 0, 40), "rooms"),
        (_ints(0, 2**31 - 1, 0, 64), "eos stop_tokens"),
        (st.integers(-1, 2**31 - 1), "ended_by"),
        (_ints(0, 2**31 - 1, 0, msg.MAX_RANKS), "ranks"),
        (_ints(0, msg.U32, 0, msg.MAX_RANKS), "held_mib"),
        (_ints(1, 2**31 - 1, 1, MAX_SIZES), "sizes"),
        (_ints(1, msg.MAX_CONTEXT, 0, msg.MAX_PLACES), "places"),
        (_ints(1, msg.MAX_LAYERS, 0, msg.MAX_RANKS), "split"),
        (st.integers(0, msg.MAX_RANKS - 1), "rank"),
        (st.integers(1, msg.MAX_RANKS), "world_size"),
        (st.integers(0, 1), "run_ahead"),
        (st.integers(msg.RESTS, msg.MAX_DRAFTS), "drafts"),
        (st.integers(0, msg.MAX_BLOCKS), "blocks"),
        (st.integers(0, 8), "kv_bits"),
        (st.integers(1, msg.MAX_ROUNDS), "round"),
        (st.integers(1, msg.MAX_TIMED_ROUNDS), "rounds"),
        (st.integers(-1, msg.MAX_TOP_LOGPROBS), "logprobs"),
        (st.integers(0, msg.MAX_TOP_LOGPROBS), "top"),
        (st.integers(0, 4096), "cpu_cores gpu_cores"),
        (st.integers(1, msg.U63), "epoch"),
        (st.integers(0, MAX_TRIP_US), "us"),
        (st.integers(0, 65535), "port"),
        (st.floats(1e-9, 1e4), "collective_s"),
        (st.binary(max_size=32), "proof"),
        (st.binary(max_size=64), "manifest"),
        (st.binary(max_size=100), "shape"),
        (st.binary(max_size=300), "data"),
        (st.binary(min_size=msg.DIGEST_BYTES, max_size=300), "digests"),
        (st.binary(max_size=msg.DIGEST_BYTES * MAX_HASHES), "prefixes"),
        (st.binary(min_size=1, max_size=1000), "key"),
        (st.binary(min_size=1, max_size=1500), "authority certificate"),
        (st.binary(min_size=8, max_size=8), "token_id"),
        (st.binary(min_size=8, max_size=80), "signature"),
        (st.binary(min_size=65, max_size=65), "public_key"),
        (st.just(b"") | _digest, "previous"),
        (st.sampled_from(Code), "code"),
        (st.sampled_from(("none", "ring", "jaccl")), "backend"),
        (st.sampled_from(("verify", "broadcast")), "agreement"),
        (st.sampled_from(("auto", "off", "lookup", "mtp", "draft")), "speculation"),
        (st.sampled_from(("ready", "failed", "restarting")), "state"),
        (st.sampled_from(("macos", "linux", "other")), "system"),
        (st.sampled_from(("ac", "battery", "unknown")), "power"),
        (st.sampled_from(_PHASES), "phase"),
        (_lists(st.sampled_from(("", "rdma_en5", "rdma_en3,rdma_en4")), msg.MAX_RANKS**2), "rdma"),
        (_lists(_text, msg.MAX_RANKS), "hosts"),
        (_lists(_short, msg.MAX_RANKS), "pins"),
        (_lists(_raw, msg.MAX_RANKS), "paths"),
        (_lists(_node, 8), "nodes"),
        (_lists(st.text(_printable, max_size=60), MAX_PEERS), "peers"),
        (_lists(st.text(_printable, max_size=60), MAX_ADDRESSES), "at"),
        (_lists(st.builds(msg.CountedShare, _count, _count), msg.MAX_RANKS), "counted"),
        (_lists(_PART, msg.MAX_PROMPTS), "prompts"),
        (_lists(_MEMBER, MAX_MEMBERS // 8), "entries"),
        (_lists(_INTERFACE, 3), "interfaces"),
        (_lists(_PORT, 3), "ports"),
        (SAMPLING, "sampling"),
        (SHAPING, "shaping"),
        (POOLING, "pooling"),
        (
            st.builds(
                RankStats,
                *(_count,) * 24,
                *(_ints(0, 2**32 - 1, 0, 8),) * 3,
                _count,
                _count,
                _seconds,
                st.booleans(),
            ),
            "stats",
        ),
    )
    for name in names.split()
}
"""What fields may be, by their names."""


def _made(kind: type[msg.Message], /, **others: st.SearchStrategy[Any]) -> st.SearchStrategy[msg.Message]:
    """Messages with any values of these fields, and of others that the table knows."""
    known = {each.name: others.get(each.name, _BY_NAME.get(each.name)) for each in fields(kind)}
    return st.builds(kind, **{name: values for name, values in known.items() if values is not None})


_OTHERWISE: dict[type[msg.Message], dict[str, st.SearchStrategy[Any]]] = {
    AgentHello: {"name": _short},
    Beat: {"epoch": _count},
    msg.Bootstrap: {"agreement": st.sampled_from(("auto", "broadcast-draws"))},
    msg.Delta: {"uids": _some_uids},
    Deployments: {"rows": _lists(_DEPLOYMENT, MAX_MEMBERS // 8)},
    msg.Error: {"uid": _u32},
    FabricResult: {"backend": st.sampled_from(("ring", "jaccl")), "at": _count},
    FileWanted: {"at": _count},
    FilesHeld: {"complete": st.binary(max_size=64)},
    msg.Finished: {"reason": st.sampled_from(("stop", "length", "cancel"))},
    msg.Forward: {"tokens": _tokens},
    msg.Gathered: {"round": st.integers(0, msg.MAX_ROUNDS), "data": st.binary(max_size=2400)},
    GroupAssignment: {"group": _one_group, "ranks": _lists(_short, 5)},
    JoinGrant: {"proof": _nonce},
    JoinOffer: {"nonce": _nonce},
    JoinRequest: {"nonce": _nonce, "proof": _nonce, "node_id": _digest},
    Machine: {"model": _short, "rdma": st.sampled_from(("enabled", "disabled", "unsupported"))},
    ModelStatus: {"model": _short},
    Prepare: {"model": _short},
    ReplicaLoad: {"group": _one_group, "speed": _u32},
    RoundTrip: {"node_id": _short},
    msg.ScoredDelta: {"logprobs": _floats(-1e9, 0.0, 0, 40)},
    Serving: {
        "epoch": _count,
        "backend": _short,
        "context": _u32,
        "vocabulary": _u32,
    },
    msg.SessionStop: {"reason": st.sampled_from(("stop", "length", "cancel", "preempt", "error"))},
    msg.Spill: {"digest": _digest},
    StoredModel: {"name": _text},
    msg.TimeCollectives: {
        "kind": st.sampled_from(("sum", "gather", "chain")),
        "size": st.integers(1, msg.MAX_TIMED_BYTES),
    },
    msg.Vectors: {"texts": _ints(0, msg.MAX_TEXTS - 1, 1, 40), "data": st.binary(min_size=4, max_size=64)},
    StartRank: {"bootstrap": _made(msg.Bootstrap, agreement=st.sampled_from(("auto", "broadcast-draws")))},
    RankPong: {"pong": _made(msg.Pong)},
    RankSide: {"side": _made(msg.SideChannel)},
    RankGathered: {
        "gathered": _made(msg.Gathered, round=st.integers(0, msg.MAX_ROUNDS), data=st.binary(max_size=2400))
    },
}
"""Fields that are something else in these messages than in others."""
_STRATEGIES = {kind: _made(kind, **_OTHERWISE.get(kind, {})) for kind in EXAMPLES if kind is not Report}
_STRATEGIES[Report] = _made(Report, row=st.one_of(*(_STRATEGIES[kind] for kind in ROWS)))

MESSAGE: st.SearchStrategy[msg.Message] = st.one_of(
    *(_STRATEGIES[message] for message in messages().values())
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
            msg.MAX_CONTEXT,
            tuple(range(msg.MAX_BIASES)),
        ),
        msg.MAX_TOP_LOGPROBS,
        ignore_eos=True,
        client=msg.U63,
        user=msg.U63,
        salt=msg.U63,
        places=(msg.MAX_CONTEXT,) * msg.MAX_PLACES,
        batch=True,
        pooling=msg.Pooling((msg.MAX_CONTEXT,) * msg.MAX_TEXTS, "scores", True, msg.U32, (2**31 - 1,) * 2),
        stop_tokens=tuple(range(msg.MAX_STOP_TOKENS)),
    )
