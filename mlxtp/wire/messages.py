"""Messages of links that end at a rank, as frozen dataclasses; `cluster_messages.py` has those of agents.

A frame is `[type, epoch, seq, body]` (see `frames.py`); `body` is the message's fields as a map. Each field
declares its limits once, for both directions. A message that breaks them is refused before it is sent and
after it is received.

Links: *pipe* joins an agent and one rank of its own. *decode* joins rank 0 and one other rank. *join* lets a
Mac join a cluster (its messages are in `peer_messages.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import Code
from .codecs import MAX_GRAMMAR as MAX_GRAMMAR
from .codecs import U32 as U32
from .codecs import U63 as U63
from .codecs import Message as Message
from .codecs import (
    binary,
    boolean,
    choice,
    group_id,
    integer,
    integers,
    number,
    numbers,
    record,
    records,
    text,
    texts,
)  # fmt: skip
from .codecs import holding as _f
from .rank_stats import RankStats
from .rdma import MAX_ENTRY

PROTOCOL_VERSION = 16
MAX_RANKS = 8
MAX_LAYERS = 1024  #: of a model
MAX_ROWS = 1024  #: sequences in one step
MAX_CONTEXT = 1 << 24  #: tokens of prompt and answer; a model's own context is usually far shorter
MAX_PROMPTS = 16  #: prompts in one forward
MAX_PLACES = 2  #: positions of a prompt that a request names
MAX_WIDTH = 64  #: tokens that one row may feed in one step
MAX_DRAFTS = 16  #: tokens that an MTP head proposes for a row in one step
RESTS = -1  #: in place of a number of drafts: the MTP head gets no entries of a step
BLOCK = 256  #: tokens of a block, of which a chain of digests has one each
DIGEST_BYTES = 16  #: of the tokens that a block and all before it hold
MAX_BLOCKS = 1 << 16  #: blocks on disk that one sequence starts from
MAX_ROOM = 2 * MAX_CONTEXT  #: tokens for which one row has room
MAX_DELTA = MAX_ROWS * (MAX_WIDTH + 1)
MAX_FRAME_TOKENS = 1 << 20  #: tokens in one frame: half of what the largest frame would hold
MAX_GROUP_ID = 1008  #: Characters of a group's id: its deployment's name, "#" and an index.
MAX_STRIKES = 9  #: failed epochs that one request may have been part of

MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_ROUND_BYTES = 1 << 16  #: Bytes of one rank in one round of the side channel; JACCL sends a few hundred.
MAX_ROUNDS = 1024
MAX_TIMED_BYTES = 1 << 26
MAX_TIMED_ROUNDS = 1024

_uid = integer(1, U32)
_count = integer(0, U63)
_detail = text(1000, cut=True)  # an Error fits the 4 KiB of a link that is not open yet
_code = choice(*(code.value for code in Code))
_seconds = number(0.0, 1e9)


# --- sampling parameters of a request -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of the choice of a token from logits.

    The choice depends only on the logits and the token's position, so that all ranks choose alike.
    `temperature` 0 is greedy. `top_p` 1, `top_k` 0, `min_p` 0 and `xtc_probability` 0 exclude nothing. Draws
    are keyed by (`seed`, position).
    """

    temperature: float = _f(number(0.0, 100.0), default=0.0)
    top_p: float = _f(number(0.0, 1.0), default=1.0)
    top_k: int = _f(integer(0, 2**31 - 1), default=0)
    min_p: float = _f(number(0.0, 1.0), default=0.0)
    xtc_probability: float = _f(number(0.0, 1.0), default=0.0)
    xtc_threshold: float = _f(number(0.0, 0.5), default=0.1)
    seed: int = _f(integer(0, U63), default=0)


@dataclass(frozen=True, slots=True)
class Shaping:
    """Changes that only rank 0 makes to the logits before a token is chosen from them.

    Penalties apply to prompt and answer as described in `engine/sampler.py`. `bias_values[i]` is added to
    `bias_tokens[i]`. No end token comes before `min_tokens`. `grammar` is text of the kind `grammar_kind`.
    """

    repetition_penalty: float = _f(number(0.01, 100.0), default=1.0)
    presence_penalty: float = _f(number(-100.0, 100.0), default=0.0)
    frequency_penalty: float = _f(number(-100.0, 100.0), default=0.0)
    bias_tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, MAX_BIASES), default=())
    bias_values: tuple[float, ...] = _f(numbers(-1e9, 1e9, MAX_BIASES), default=())
    min_tokens: int = _f(integer(0, MAX_CONTEXT), default=0)
    grammar_kind: str = _f(choice("", "json_schema", "regex", "lark"), default="")
    grammar: str = _f(text(MAX_GRAMMAR, raw=True), default="")


GREEDY = Sampling()
PLAIN = Shaping()
_sampling = record(Sampling)
_shaping = record(Shaping)


# --- opening a link ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First frame of the end that opens a link. On a decode link, `proof` is keyed by the epoch's secret."""

    TYPE: ClassVar[int] = 0x01
    version: int = _f(integer(0, U32))
    rank: int = _f(integer(0, MAX_RANKS - 1))
    pid: int = _f(_count)
    nonce: bytes = _f(binary(16, 16))
    proof: bytes = _f(binary(0, 32))


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Reply to a Hello that was accepted. A refused one gets an Error and the link ends."""

    TYPE: ClassVar[int] = 0x02
    version: int = _f(integer(0, U32))
    proof: bytes = _f(binary(0, 32))


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Request for exactly one Pong."""

    TYPE: ClassVar[int] = 0x03


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """Status of a rank.

    `phase_s` is the time in seconds since it entered the phase or last made progress in it. `expected_us` is
    the expected time of the running forward, judged by those before it.
    """

    TYPE: ClassVar[int] = 0x04
    phase: str = _f(
        choice(
            "starting", "forming", "proving", "loading", "idle", "measuring", "prefill", "decode", "closing"
        )
    )
    phase_s: float = _f(_seconds)
    in_flight: int = _f(_count)
    step: int = _f(_count)
    model: str = _f(text(1000, cut=True))
    stats: RankStats = _f(record(RankStats))  # noqa: RUF009 - a field
    expected_us: int = _f(_count, default=0)


@dataclass(frozen=True, slots=True)
class Bootstrap(Message):
    """Agent to its rank: the group that this process belongs to, for one epoch.

    `decode_address` has the addresses ("ip:port") where rank 0 listens: the fastest network first, with
    commas between. `queue_s` bounds a request's wait for its first forward. A group that idled for `canary_s`
    proves itself. `rdma` is JACCL's matrix of devices, row by row as in `wire/rdma.py`; with `jaccl_ring`
    JACCL joins only neighbours. `round_s` bounds one round of the side channel. `fast_fences` turns
    MLX_METAL_FAST_SYNCH on, `large_buffers` has MLX make larger command buffers. `repeatable`: no computation
    depends on how long something took. `pins` are the key fingerprints of the ranks' agents, in rank order:
    decode links then use TLS. Without them all ranks belong to one agent and its machine. `disk_folder` is
    where the rank keeps KV caches, and `disk_bytes` bounds what all ranks of this Mac keep there. The rank's
    own agent sets both; without them none is kept.
    """

    TYPE: ClassVar[int] = 0x07
    rank: int = _f(integer(0, MAX_RANKS - 1))
    world_size: int = _f(integer(1, MAX_RANKS))
    backend: str = _f(choice("none", "ring", "jaccl"))
    hosts: tuple[str, ...] = _f(texts(MAX_RANKS, 100))
    decode_address: str = _f(text(200))
    epoch_key: bytes = _f(binary(32, 32))
    deadline_s: float = _f(_seconds)
    ack_deadline_s: float = _f(_seconds)
    run_ahead: int = _f(integer(0, 1))
    queue_s: float = _f(_seconds, default=300.0)
    canary_s: float = _f(_seconds, default=60.0)
    agreement: str = _f(choice("auto", "broadcast-draws"), default="auto")
    speculation: str = _f(choice("auto", "off", "lookup", "mtp", "draft"), default="auto")
    rdma: tuple[str, ...] = _f(texts(MAX_RANKS * MAX_RANKS, MAX_ENTRY), default=())
    jaccl_ring: bool = _f(boolean(), default=False)
    fast_fences: bool = _f(boolean(), default=False)
    round_s: float = _f(_seconds, default=15.0)
    pins: tuple[str, ...] = _f(texts(MAX_RANKS, 64), default=())
    repeatable: bool = _f(boolean(), default=False)
    disk_folder: str = _f(text(4000, raw=True), default="")
    disk_bytes: int = _f(_count, default=0)
    large_buffers: bool = _f(boolean(), default=False)


@dataclass(frozen=True, slots=True)
class SideChannel(Message):
    """One rank's bytes for one round of JACCL's all-gather. Rounds are numbered from 1. Reply: Gathered."""

    TYPE: ClassVar[int] = 0x0B
    round: int = _f(integer(1, MAX_ROUNDS))
    data: bytes = _f(binary(0, MAX_ROUND_BYTES))


@dataclass(frozen=True, slots=True)
class Gathered(Message):
    """Bytes of every rank in that round, in rank order. `error`: why no further rounds follow.

    An error may come unsolicited, to a rank that is between two rounds.
    """

    TYPE: ClassVar[int] = 0x0E
    round: int = _f(integer(0, MAX_ROUNDS))
    data: bytes = _f(binary(0, MAX_RANKS * MAX_ROUND_BYTES))
    error: str = _f(_detail, default="")


# --- decoding ---------------------------------------------------------------------------------------

_exchange = choice("winners", "logits")
_agreement = choice("verify", "broadcast")


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Part of a prompt that a Forward reads: the row's tokens, behind as many others as its position.

    `total`: tokens of the whole prompt. The part that reaches it makes the sequence a row of the batch, and
    chooses its first new token by `sampling`. A first part may begin behind position 0: the KV cache before
    it is then that of `source`, a running or kept sequence. With `take`, `source` ends with it. Later parts
    have source 0. With `save`, each rank keeps a copy of the KV cache after this part under that uid; only a
    part that does not end its prompt has one. The kept caches in `covers` begin it. They share its arrays
    from then on. `following` is the prompt's token after this part, for an MTP head; 0 in the last one.
    """

    total: int = _f(integer(1, MAX_CONTEXT))
    source: int = _f(integer(0, U32), default=0)
    take: bool = _f(boolean(), default=False)
    sampling: Sampling = _f(_sampling, default=GREEDY)  # noqa: RUF009 - a field
    save: int = _f(integer(0, U32), default=0)
    covers: tuple[int, ...] = _f(integers(1, U32, 0, MAX_ROWS), default=())
    following: int = _f(integer(0, 2**31 - 1), default=0)


@dataclass(frozen=True, slots=True)
class Forward(Message):
    """One forward over the sequences in `rows`: a decode step of the running batch, in its order, or prompts.

    `positions[i]` is the length of row i's KV cache before it; ranks roll back everything beyond it.
    `widths[i]` counts the tokens that row i feeds from `tokens`; 0 stands for the one that its previous
    forward produced, inside the graph. `widths` is empty when that is so for every row. The reply has the
    choice after each token of a decode step.

    `prompts` is empty for a decode step. Else it has a part for each row: of one prompt, or the last parts of
    several new ones. In a pipeline, a step is for the rows of one lane, and ChosenTokens brings the tokens
    inside the graph.

    `exchange`: "winners" when every row is greedy and ranks only exchange the best of their share of the
    vocabulary, "logits" when they gather the whole. `agreement`: "verify" when every rank chooses alike and
    digests are compared, "broadcast" when rank 0's choice is summed into every rank's graph.

    `drafts`: tokens that the model's MTP head proposes after each row's last right token; -1 where it rests,
    and its caches get no entries.
    """

    TYPE: ClassVar[int] = 0x08
    rows: tuple[int, ...] = _f(integers(1, U32, 1, MAX_ROWS))
    positions: tuple[int, ...] = _f(integers(0, MAX_CONTEXT, 1, MAX_ROWS))
    widths: tuple[int, ...] = _f(integers(0, MAX_FRAME_TOKENS, 0, MAX_ROWS), default=())
    tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, MAX_FRAME_TOKENS), default=())
    exchange: str = _f(_exchange, default="winners")
    agreement: str = _f(_agreement, default="verify")
    drafts: int = _f(integer(RESTS, MAX_DRAFTS), default=0)
    prompts: tuple[PromptPart, ...] = _f(records(PromptPart, 0, MAX_PROMPTS), default=())

    @property
    def unfinished(self) -> int:
        """Uid of the prompt that goes on after this forward, which then chooses nothing; 0 for none."""
        if self.prompts and self.positions[0] + self.widths[0] < self.prompts[0].total:
            return self.rows[0]
        return 0


@dataclass(frozen=True, slots=True)
class ChosenTokens(Message):
    """Tokens that forward number `forward` of a pipeline chose, in row order, for the ranks above 0.

    Each row's next step feeds the last of its tokens. Comes before any frame that follows from them.
    """

    TYPE: ClassVar[int] = 0x2C
    forward: int = _f(_count)
    tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 1, MAX_FRAME_TOKENS))


@dataclass(frozen=True, slots=True)
class SessionStop(Message):
    """End of a sequence. `forwards` counts its prefill chunks and steps; every rank checks its own count.

    The first `keep` tokens of its KV cache stay under its uid, for other sequences to start from; 0 keeps
    nothing. The kept caches in `covers` begin it. They share its arrays from then on.
    """

    TYPE: ClassVar[int] = 0x0A
    uid: int = _f(_uid)
    reason: str = _f(choice("stop", "length", "cancel", "preempt", "error"))
    forwards: int = _f(_count)
    keep: int = _f(integer(0, MAX_CONTEXT), default=0)
    covers: tuple[int, ...] = _f(integers(1, U32, 0, MAX_ROWS), default=())


@dataclass(frozen=True, slots=True)
class Evict(Message):
    """Command to drop KV caches that were kept."""

    TYPE: ClassVar[int] = 0x0C
    uids: tuple[int, ...] = _f(integers(1, U32, 0, MAX_ROWS))


@dataclass(frozen=True, slots=True)
class Arrange(Message):
    """Command to lay out the KV arrays of the running rows. Rows of the same room share arrays.

    `rooms`: tokens for which each row has room, in row order, then those of free slots. `lanes` has a number
    for each of them, or for each row where there are no `rooms`, and only rows of one number share arrays;
    without it, all may. With `trim`, ranks also give memory back to the system that MLX keeps for reuse.
    """

    TYPE: ClassVar[int] = 0x2B
    rooms: tuple[int, ...] = _f(integers(1, MAX_ROOM, 0, MAX_ROWS), default=())
    trim: bool = _f(boolean(), default=False)
    lanes: tuple[int, ...] = _f(integers(0, MAX_RANKS - 1, 0, MAX_ROWS), default=())


@dataclass(frozen=True, slots=True)
class Spill(Message):
    """Rank 0 to the others: write tokens `start` to `end` of a sequence's KV cache to disk.

    `digest` is that of all tokens up to `end`, and names the block; `previous` that of the block before it.
    """

    TYPE: ClassVar[int] = 0x27
    uid: int = _f(_uid)
    start: int = _f(integer(0, MAX_CONTEXT))
    end: int = _f(integer(1, MAX_CONTEXT))
    digest: bytes = _f(binary(DIGEST_BYTES, DIGEST_BYTES))
    previous: bytes = _f(binary(0, DIGEST_BYTES), default=b"")


@dataclass(frozen=True, slots=True)
class FetchBlocks(Message):
    """Rank 0 to the others: read blocks of `block` tokens each from disk, for uid.

    `digests` follow each other, in the order of the tokens. Reply: FetchedBlocks.
    """

    TYPE: ClassVar[int] = 0x28
    uid: int = _f(_uid)
    block: int = _f(integer(1, MAX_CONTEXT))
    digests: bytes = _f(binary(DIGEST_BYTES, MAX_BLOCKS * DIGEST_BYTES))


@dataclass(frozen=True, slots=True)
class FetchedBlocks(Message):
    """Reply to FetchBlocks, between Acks: the first `blocks` of them are in this rank's memory."""

    TYPE: ClassVar[int] = 0x29
    uid: int = _f(_uid)
    blocks: int = _f(integer(0, MAX_BLOCKS))


@dataclass(frozen=True, slots=True)
class Restore(Message):
    """Rank 0 to the others: keep the first `blocks` that were fetched for uid as its KV cache.

    The others are dropped. With `bad`, every rank deletes them, because some rank has not got the first.
    """

    TYPE: ClassVar[int] = 0x2A
    uid: int = _f(_uid)
    blocks: int = _f(integer(0, MAX_BLOCKS))
    bad: bool = _f(boolean(), default=False)


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """Reply to exactly one Forward, named by the seq of its frame.

    `forwards` and `collectives` are the rank's totals after that step, `digest` covers the tokens it chose.
    `step_us` is the time from the forward's launch to its end on that rank, `wait_us` the part of it in
    which MLX queued it and blocked for the device, both in microseconds.
    """

    TYPE: ClassVar[int] = 0x10
    step: int = _f(_count)
    forwards: int = _f(_count)
    collectives: int = _f(_count)
    digest: int = _f(integer(0, U32))
    step_us: int = _f(_count, default=0)
    wait_us: int = _f(_count, default=0)


@dataclass(frozen=True, slots=True)
class Error(Message):
    """Report of a failure.

    With a `uid`, only that request is over. Without one (0), an Error that is the reply to a command stands
    for the success it replaces. An unsolicited one without a uid means that the sender is ending.
    """

    TYPE: ClassVar[int] = 0x11
    code: str = _f(_code)
    detail: str = _f(_detail)
    uid: int = _f(integer(0, U32))


# --- the life of a rank: each gets exactly one reply ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Init(Message):
    """Command to form the group. Reply: InitDone."""

    TYPE: ClassVar[int] = 0x12


@dataclass(frozen=True, slots=True)
class SanityCheck(Message):
    """Command to prove the group by value. Reply: SanityDone."""

    TYPE: ClassVar[int] = 0x13


@dataclass(frozen=True, slots=True)
class CountedShare:
    """Part of LoadShard: memory that plans count on for one rank.

    `kv_token_bytes`: of caches that keep all tokens, in the type that config.json names.
    """

    weight_bytes: int = _f(_count)
    kv_token_bytes: int = _f(_count)


@dataclass(frozen=True, slots=True)
class LoadShard(Message):
    """Command to load this rank's share of the model in folder `path`. Reply: Loaded.

    `eos` are end tokens that the tokenizer knows; the model's own configuration may add to them.
    `max_context` (tokens) shortens the model's own context, `kv_bits` quantizes the KV cache, `kv_bytes`
    bounds the caches of all sequences on each rank, as KvBudget does. 0 leaves each of them to the model and
    the machine.
    `draft_path` is the folder of a small model with the same vocabulary, for rank 0 to propose tokens with.
    `paths` has a folder for each rank where they differ from Mac to Mac, else it is empty. `split` has the
    number of whole layers for each rank of a pipeline, of which rank 0 has the last ones. It is empty where
    every rank has its part of each layer. `counted` has what plans count on for each rank, if there is one.
    """

    TYPE: ClassVar[int] = 0x14
    path: str = _f(text(4000, raw=True))
    prefill_chunk: int = _f(integer(1, MAX_CONTEXT))
    eos: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, 64))
    max_context: int = _f(integer(0, MAX_CONTEXT), default=0)
    kv_bits: int = _f(integer(0, 8), default=0)
    kv_bytes: int = _f(_count, default=0)
    draft_path: str = _f(text(4000, raw=True), default="")
    paths: tuple[str, ...] = _f(texts(MAX_RANKS, 4000, raw=True), default=())
    split: tuple[int, ...] = _f(integers(1, MAX_LAYERS, 0, MAX_RANKS), default=())
    counted: tuple[CountedShare, ...] = _f(records(CountedShare, 0, MAX_RANKS), default=())


@dataclass(frozen=True, slots=True)
class KvBudget(Message):
    """Agent to rank 0: bound the KV caches of all sequences on each rank to `kv_bytes` from now on.

    0 is the room that was found when the model was loaded. Rank 0 evicts and preempts what no longer fits.
    With `clear`, it evicts all caches that no sequence runs with. Unless the room grows, all ranks give back
    memory that no sequence needs. A sequence with more tokens than the room ends with an Error. Reply:
    Loaded, with the room that is in force: at least that of the shortest sequence.
    """

    TYPE: ClassVar[int] = 0x1F
    kv_bytes: int = _f(_count)
    clear: bool = _f(boolean(), default=False)


@dataclass(frozen=True, slots=True)
class Unload(Message):
    """Command to drop the model; the group stays. Reply: Done."""

    TYPE: ClassVar[int] = 0x16


@dataclass(frozen=True, slots=True)
class Shutdown(Message):
    """Command to finish, release everything and exit with status 0. Reply: Done, then SessionEnd."""

    TYPE: ClassVar[int] = 0x18


@dataclass(frozen=True, slots=True)
class InitDone(Message):
    """Reply to Init: the group is formed."""

    TYPE: ClassVar[int] = 0x19
    rank: int = _f(integer(0, MAX_RANKS - 1))
    world_size: int = _f(integer(1, MAX_RANKS))


@dataclass(frozen=True, slots=True)
class SanityDone(Message):
    """Results of this rank: `total` = sum of ones, `ranks` = the gathered ranks, `digest` of the epoch."""

    TYPE: ClassVar[int] = 0x1A
    total: int = _f(_count)
    ranks: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, MAX_RANKS))
    digest: int = _f(integer(0, U32))


@dataclass(frozen=True, slots=True)
class Loaded(Message):
    """Reply to LoadShard and KvBudget: the shard is in memory.

    `context` and `vocabulary` are the model's, in tokens.

    `weight_bytes` and `peak_bytes` are this rank's, the latter while loading. `kv_token_bytes` is the size of
    one token in its KV cache, `kv_row_bytes` that of the part that each sequence has once, `kv_bytes` the
    memory that it has for all caches together. From rank 0 to the agent, `kv_bytes` is the bound that is in
    force on all ranks, and `kv_token_bytes` the largest of them. `kv_row_bytes` is the part that is worth
    most tokens, in these. `context` is the most that a sequence has room for. `checkpoints`: KV caches are
    kept, and cannot be cut. `layers`: numbers of the layers whose weights a rank of a pipeline has. `mtp`: it
    has the model's MTP head.
    """

    TYPE: ClassVar[int] = 0x1B
    context: int = _f(integer(1, U32))
    vocabulary: int = _f(integer(1, U32))
    weight_bytes: int = _f(_count)
    eos: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, 64))
    peak_bytes: int = _f(_count, default=0)
    kv_token_bytes: int = _f(_count, default=0)
    kv_bytes: int = _f(_count, default=0)
    kv_row_bytes: int = _f(_count, default=0)
    checkpoints: bool = _f(boolean(), default=False)
    layers: tuple[int, ...] = _f(integers(0, MAX_LAYERS, 0, MAX_LAYERS), default=())
    mtp: bool = _f(boolean(), default=False)


@dataclass(frozen=True, slots=True)
class Done(Message):
    """Reply to Bootstrap, Unload and Shutdown.

    After Bootstrap, `jaccl` reports whether MLX has JACCL on this machine, and `gpu_bytes` the memory that
    Metal recommends for its GPU; 0 without Metal.
    """

    TYPE: ClassVar[int] = 0x1C
    jaccl: bool = _f(boolean(), default=False)
    gpu_bytes: int = _f(_count, default=0)


@dataclass(frozen=True, slots=True)
class TimeCollectives(Message):
    """Command to time `rounds` collectives of one kind over `size` bytes of every rank.

    Reply: CollectivesTimed. "sum" and "gather" run one after the other. A "chain" is `rounds` sums in one
    graph. Each takes the result of the one before, with a step of arithmetic in between, as in a forward.
    """

    TYPE: ClassVar[int] = 0x1D
    kind: str = _f(choice("sum", "gather", "chain"))
    size: int = _f(integer(1, MAX_TIMED_BYTES))
    rounds: int = _f(integer(1, MAX_TIMED_ROUNDS))


@dataclass(frozen=True, slots=True)
class CollectivesTimed(Message):
    """Seconds of one collective on this rank; from rank 0 to the agent, on the slowest rank.

    `metal`: a GPU computes there, so that each collective includes a fence.
    """

    TYPE: ClassVar[int] = 0x1E
    seconds: float = _f(_seconds)
    metal: bool = _f(boolean())


# --- requests in, tokens out ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate(Message):
    """Agent to rank 0: decode after this prompt until an end token or `max_tokens`.

    `logprobs` -1 requests none, 0 those of the chosen tokens, more the most probable alternatives as well.
    With `ignore_eos` the answer continues after an end token. The last `answered` of `tokens` are the
    beginning of the answer, given by an earlier group; `max_tokens` counts them, and the next token has their
    number as its index. `strikes` groups failed during this request. Scheduling is fair between clients, and
    between users of the same `client`. Only prompts of one `salt` share KV caches. Before each of `places`,
    ascending positions, the prompt is likely to be that of other requests, too. Reply: Accepted, or an Error
    with the uid.

    Between agents, `group` is the id of the receiver's group that is to work on it; empty for any of them.
    """

    TYPE: ClassVar[int] = 0x20
    uid: int = _f(_uid)
    tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 1, MAX_FRAME_TOKENS))
    max_tokens: int = _f(integer(1, MAX_CONTEXT))
    sampling: Sampling = _f(_sampling, default=GREEDY)  # noqa: RUF009 - a field
    shaping: Shaping = _f(_shaping, default=PLAIN)  # noqa: RUF009 - a field
    logprobs: int = _f(integer(-1, MAX_TOP_LOGPROBS), default=-1)
    ignore_eos: bool = _f(boolean(), default=False)
    answered: int = _f(integer(0, MAX_FRAME_TOKENS), default=0)
    strikes: int = _f(integer(0, MAX_STRIKES), default=0)
    client: int = _f(_count, default=0)
    user: int = _f(_count, default=0)
    salt: int = _f(_count, default=0)
    group: str = _f(group_id(MAX_GROUP_ID), default="")
    places: tuple[int, ...] = _f(integers(1, MAX_CONTEXT, 0, MAX_PLACES), default=())


@dataclass(frozen=True, slots=True)
class Accepted(Message):
    """Rank 0 to agent: this request passed every check and will be run."""

    TYPE: ClassVar[int] = 0x24
    uid: int = _f(_uid)


@dataclass(frozen=True, slots=True)
class Prefilled(Message):
    """Rank 0 to agent, a few times a second: `computed` tokens of this request's prompt are in a KV cache.

    The prefill began with `cached` of them. The prompt is that of Generate, with the part of the answer
    already given.
    """

    TYPE: ClassVar[int] = 0x26
    uid: int = _f(_uid)
    computed: int = _f(_count)
    cached: int = _f(_count)


@dataclass(frozen=True, slots=True)
class Delta(Message):
    """Rank 0 to agent: the confirmed tokens of one step. `tokens[i]` is number `indices[i]` of `uids[i]`.

    A request may have several tokens in one Delta, in order.
    """

    TYPE: ClassVar[int] = 0x21
    uids: tuple[int, ...] = _f(integers(1, U32, 1, MAX_DELTA))
    indices: tuple[int, ...] = _f(integers(0, 2**31 - 1, 1, MAX_DELTA))
    tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 1, MAX_DELTA))


@dataclass(frozen=True, slots=True)
class ScoredDelta(Message):
    """Tokens of one request that wants log-probabilities (natural logarithms), in place of a Delta.

    `logprobs[i]` belongs to `tokens[i]`. The `top` most probable alternatives of each token follow each other
    in `top_tokens` and `top_logprobs`.
    """

    TYPE: ClassVar[int] = 0x25
    uid: int = _f(_uid)
    index: int = _f(integer(0, 2**31 - 1))
    tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 1, MAX_WIDTH + 1))
    logprobs: tuple[float, ...] = _f(numbers(-1e9, 1e-3, MAX_WIDTH + 1))
    top: int = _f(integer(0, MAX_TOP_LOGPROBS))
    top_tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, (MAX_WIDTH + 1) * MAX_TOP_LOGPROBS))
    top_logprobs: tuple[float, ...] = _f(numbers(-1e9, 1e-3, (MAX_WIDTH + 1) * MAX_TOP_LOGPROBS))


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Agent to rank 0: the client no longer wants this request. Reply: Finished, unless it is over."""

    TYPE: ClassVar[int] = 0x22
    uid: int = _f(_uid)


@dataclass(frozen=True, slots=True)
class Finished(Message):
    """Rank 0 to agent: the end of a request. `generated` counts tokens with the end token.

    `cached` of its prompt tokens were not computed again. Of `drafted` tokens, `accepted` were right.
    """

    TYPE: ClassVar[int] = 0x23
    uid: int = _f(_uid)
    reason: str = _f(choice("stop", "length", "cancel"))
    generated: int = _f(_count)
    forwards: int = _f(_count)
    cached: int = _f(_count, default=0)
    drafted: int = _f(_count, default=0)
    accepted: int = _f(_count, default=0)


@dataclass(frozen=True, slots=True)
class SessionEnd(Message):
    """Last frame of a link that closes in order."""

    TYPE: ClassVar[int] = 0xFF


#: Events of a request, from rank 0 to the agent that has it.
RequestEvent = Accepted | Prefilled | Delta | ScoredDelta | Finished | Error

RANK_MESSAGES: tuple[type[Message], ...] = (
    Hello, Welcome, Ping, Pong, Bootstrap, SideChannel, Gathered, Forward,
    ChosenTokens, SessionStop, Evict, Arrange, Spill, FetchBlocks, FetchedBlocks, Restore, Ack, Error, Init,
    SanityCheck, LoadShard, Unload, Shutdown, InitDone, SanityDone, Loaded, Done, KvBudget, TimeCollectives,
    CollectivesTimed, Generate, Accepted, Prefilled, Delta, ScoredDelta, Cancel, Finished, SessionEnd,
)  # fmt: skip


# --- names of what a KV cache holds, alike on all ranks and for all gateways --------------------------


class PrefixDigests:
    """Digests of the beginnings of `tokens`, which may grow, each computed once. They cover the salt, too."""

    def __init__(self, tokens: Sequence[int], salt: int = 0) -> None:
        self._tokens = tokens
        self._hash = hashlib.blake2b(salt.to_bytes(8, "little"), digest_size=DIGEST_BYTES)
        self._at = 0
        #: By end: the digest, and the state from which a later end goes on.
        self._known = {0: (self._hash.digest(), self._hash.copy())}

    def up_to(self, end: int) -> bytes:
        """Return the digest of the first `end` tokens."""
        if end not in self._known:
            if end < self._at:
                self._at = max([at for at in self._known if at < end])
                self._hash = self._known[self._at][1].copy()
            self._hash.update(packed(self._tokens[self._at : end]))
            self._at = end
            self._known[end] = self._hash.digest(), self._hash.copy()
        return self._known[end][0]

    def blocks(self) -> list[bytes]:
        """Return the digests up to the end of each whole block."""
        return [self.up_to(end) for end in range(BLOCK, len(self._tokens) + 1, BLOCK)]


def packed(tokens: Sequence[int]) -> bytes:
    """Return the tokens as 32-bit words."""
    return struct.pack(f"={len(tokens)}i", *tokens)  # less than half the time of an array


def digests_in(data: bytes) -> tuple[bytes, ...]:
    """Return the digests that a message has as one field."""
    return tuple(data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES))


# --- proofs in Hello and Welcome, which hold the key of the epoch (HMAC-SHA256, a label for each use) -----

_HELLO = b"mlxtp hello\0"
_WELCOME = b"mlxtp welcome\0"
_EPOCH = b"mlxtp epoch\0"


def hello_proof(key: bytes, epoch: int, rank: int, nonce: bytes) -> bytes:
    """Return the 32 bytes that prove, in a Hello of `rank` with this `nonce`, that it holds `key`."""
    return _proof(_HELLO, key, epoch, rank, nonce)


def welcome_proof(key: bytes, epoch: int, rank: int, nonce: bytes) -> bytes:
    """Return the 32 bytes with which rank 0 replies to the Hello of `rank` that carried `nonce`."""
    return _proof(_WELCOME, key, epoch, rank, nonce)


def verify(proof: bytes, expected: bytes) -> bool:
    """Compare a received proof with the expected one, in constant time."""
    return hmac.compare_digest(proof, expected)


def epoch_digest(key: bytes, epoch: int) -> int:
    """Return 32 bits that every rank of the epoch computes alike: its part of the group's proof by value."""
    digest = hmac.digest(key, _EPOCH + struct.pack(">Q", epoch), hashlib.sha256)
    return int.from_bytes(digest[:4], "big")


def _proof(label: bytes, key: bytes, epoch: int, rank: int, nonce: bytes) -> bytes:
    return hmac.digest(key, label + struct.pack(">QI", epoch, rank) + nonce, hashlib.sha256)
