"""Messages to test with: one plain example of each, and hypothesis strategies for all their values."""

from __future__ import annotations

from hypothesis import strategies as st

from mlxtp.errors import Code
from mlxtp.wire.messages import (
    MAX_CONTEXT,
    MAX_RANKS,
    MESSAGES,
    U32,
    U63,
    Abort,
    Ack,
    Bootstrap,
    Cancel,
    ClearCache,
    Delta,
    Done,
    Error,
    Finished,
    Generate,
    Hello,
    Init,
    InitDone,
    Loaded,
    LoadShard,
    Message,
    Ping,
    Pong,
    PromptTokens,
    SanityCheck,
    SanityDone,
    SessionEnd,
    SessionStop,
    Shutdown,
    StepToken,
    Unload,
    Welcome,
)

EXAMPLES: dict[type[Message], Message] = {
    type(message): message
    for message in (
        Hello(1, 0, 4711, b"n" * 16, b""),
        Welcome(1, b""),
        Ping(),
        Pong("idle", 0.25, 0, 7, 7, 14, 5, 1 << 30, 1 << 31, "tiny"),
        Bootstrap(0, 2, "ring", ("a:1", "b:2"), "a:3", b"k" * 32, 30.0, 5.0, 1),
        PromptTokens(1, 0, 3, (5, 6, 7)),
        StepToken((1,), "broadcast"),
        SessionStop(1, "stop", 3),
        Ack(5, 3, 6, 0xDEADBEEF),
        Error(Code.INTERNAL, "it broke", 0),
        Init(),
        SanityCheck(),
        LoadShard("/models/tiny", 512, (2,)),
        ClearCache(),
        Unload(),
        Abort(),
        Shutdown(),
        InitDone(0, 2),
        SanityDone(2, (0, 1), 0xDEADBEEF),
        Loaded(2048, 4096, 1 << 20, (2,)),
        Done(),
        Generate(1, (5, 6, 7), 100),
        Delta((1,), (0,), (42,)),
        Cancel(1),
        Finished(1, "stop", 1, 1),
        SessionEnd(),
    )
}
assert set(EXAMPLES) == set(MESSAGES.values())


def _ints(low: int, high: int, min_items: int, max_items: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(low, high), min_size=min_items, max_size=max_items).map(tuple)


_rank = st.integers(0, MAX_RANKS - 1)
_size = st.integers(1, MAX_RANKS)
_count = st.integers(0, U63)
_u32 = st.integers(0, U32)
_uid = st.integers(1, U32)
_context = st.integers(1, MAX_CONTEXT)
_seconds = st.floats(0.0, 1e9)
_token_lists = _ints(0, 2**31 - 1, 1, 40)
_proof = st.binary(max_size=32)
_text = st.text(st.characters(codec="utf-8"), max_size=100)
_reason = st.sampled_from(("stop", "length", "cancel"))
_phase = st.sampled_from(
    ("starting", "forming", "proving", "loading", "idle", "prefill", "decode", "closing")
)

_STRATEGIES: dict[type[Message], st.SearchStrategy[Message]] = {
    Hello: st.builds(Hello, _u32, _rank, _count, st.binary(min_size=16, max_size=16), _proof),
    Welcome: st.builds(Welcome, _u32, _proof),
    Pong: st.builds(Pong, _phase, _seconds, _count, _count, _count, _count, _count, _count, _count, _text),
    Bootstrap: st.builds(
        Bootstrap,
        _rank,
        _size,
        st.sampled_from(("none", "ring")),
        st.lists(_text, max_size=MAX_RANKS).map(tuple),
        _text,
        st.binary(min_size=32, max_size=32),
        _seconds,
        _seconds,
        st.integers(0, 1),
    ),
    PromptTokens: st.builds(PromptTokens, _uid, st.integers(0, MAX_CONTEXT), _context, _token_lists),
    StepToken: st.builds(StepToken, _ints(1, U32, 1, 40), st.just("broadcast")),
    SessionStop: st.builds(SessionStop, _uid, _reason, _count),
    Ack: st.builds(Ack, _count, _count, _count, _u32),
    Error: st.builds(Error, st.sampled_from(Code), _text, _u32),
    LoadShard: st.builds(LoadShard, _text, _context, _ints(0, 2**31 - 1, 0, 64)),
    InitDone: st.builds(InitDone, _rank, _size),
    SanityDone: st.builds(SanityDone, _count, _ints(0, 2**31 - 1, 0, MAX_RANKS), _u32),
    Loaded: st.builds(Loaded, _uid, _uid, _count, _ints(0, 2**31 - 1, 0, 64)),
    Generate: st.builds(Generate, _uid, _token_lists, _context),
    Delta: st.builds(Delta, _ints(1, U32, 1, 40), _token_lists, _token_lists),
    Cancel: st.builds(Cancel, _uid),
    Finished: st.builds(Finished, _uid, _reason, _count, _count),
}

MESSAGE: st.SearchStrategy[Message] = st.one_of(
    *(_STRATEGIES.get(message, st.builds(message)) for message in MESSAGES.values())
)
"""Any message with any values its fields allow."""
