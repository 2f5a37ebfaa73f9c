"""Messages on links that end at a rank; `cluster_messages` and `peer_messages` have the agents' messages.

A *pipe* joins an agent and one of its ranks; a *decode* link joins rank 0 and another rank. Each field
declares its limits once. A message that breaks them is refused before sending and after receiving.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

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

PROTOCOL_VERSION = 23
MAX_RANKS = 8
MAX_LAYERS = 1024  #: of a model
MAX_ROWS = 1024  #: sequences in one step
MAX_CONTEXT = 1 << 24  #: tokens of prompt and answer; a model's own context is usually far shorter
MAX_PROMPTS = 16  #: prompts in one forward
MAX_PLACES = 2  #: positions of a prompt that a request names
MAX_WIDTH = 64  #: tokens that one row may feed in one step
MAX_DRAFTS = 16  #: tokens that an MTP head proposes for a row in one step
RESTS = -1  #: in place of a number of drafts: the MTP head's cache gets no entries from a step
BLOCK = 256  #: tokens of a block; each block has a digest
DIGEST_BYTES = 16  #: of a digest over the tokens of a block and all blocks before it
MAX_BLOCKS = 1 << 16  #: blocks on disk that one sequence starts from
MAX_ROOM = 2 * MAX_CONTEXT  #: tokens of room for one row
MAX_DELTA = MAX_ROWS * (MAX_WIDTH + 1)
MAX_FRAME_TOKENS = 1 << 20  #: tokens in one frame: half of what the largest frame would hold
MAX_GROUP_ID = 1008  #: Characters of a group's id: its deployment's name, "#" and an index.
MAX_STRIKES = 9  #: failed epochs that one request may have been part of

MAX_TEXTS = 2048  #: of one request for vectors
MAX_VECTOR_BYTES = 1 << 20  #: in one message
MAX_BIASES = 1024
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 256  #: of one request, each in tokens
MAX_WORD_TOKENS = 32
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
_uids = integers(1, U32, 0, MAX_ROWS)
_eos = integers(0, 2**31 - 1, 0, 64)
_stop_tokens = integers(0, 2**31 - 1, 0, MAX_STOP_TOKENS)
_split = integers(1, MAX_LAYERS, 0, MAX_RANKS)
_matrix = texts(MAX_RANKS * MAX_RANKS, MAX_ENTRY)
_pins = texts(MAX_RANKS, 64)
_places = integers(1, MAX_CONTEXT, 0, MAX_PLACES)
_stats = record(RankStats)
_phase = choice(
    "starting", "forming", "proving", "loading", "idle", "measuring", "prefill", "decode", "closing"
)


# --- sampling parameters of a request -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of sampling, which uses only logits and position, so all ranks choose the same token."""

    temperature: float = _f(number(0.0, 100.0), default=0.0)  #: 0 is greedy
    top_p: float = _f(number(0.0, 1.0), default=1.0)  #: 1 excludes nothing, as does 0 in the next three
    top_k: int = _f(integer(0, 2**31 - 1), default=0)
    min_p: float = _f(number(0.0, 1.0), default=0.0)
    xtc_probability: float = _f(number(0.0, 1.0), default=0.0)
    xtc_threshold: float = _f(number(0.0, 0.5), default=0.1)
    seed: int = _f(integer(0, U63), default=0)  #: with the position, it keys draws


@dataclass(frozen=True, slots=True)
class Shaping:
    """Changes by rank 0 to the logits before it samples (`engine/logit_shaping.py`)."""

    repetition_penalty: float = _f(number(0.01, 100.0), default=1.0)
    presence_penalty: float = _f(number(-100.0, 100.0), default=0.0)
    frequency_penalty: float = _f(number(-100.0, 100.0), default=0.0)
    bias_tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, MAX_BIASES), default=())
    bias_values: tuple[float, ...] = _f(numbers(-1e9, 1e9, MAX_BIASES), default=())  #: added to these tokens
    min_tokens: int = _f(integer(0, MAX_CONTEXT), default=0)  #: before any end or stop token
    grammar_kind: str = _f(choice("", "json_schema", "regex", "lark"), default="")
    grammar: str = _f(text(MAX_GRAMMAR, raw=True), default="")
    grammar_begun: int = _f(integer(0, MAX_CONTEXT), default=0)  #: The prompt's last tokens are in it too.
    allowed_tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, MAX_BIASES), default=())  #: none: all
    #: Words, one after another: the last token of each may not follow the others at the answer's end.
    bad_tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, MAX_BAD_WORDS * MAX_WORD_TOKENS), default=())
    bad_lengths: tuple[int, ...] = _f(integers(1, MAX_WORD_TOKENS, 0, MAX_BAD_WORDS), default=())


@dataclass(frozen=True, slots=True)
class Pooling:
    """Vectors in place of an answer. The tokens of a request are several texts, one after another.

    `kind`: the hidden states of a text that make its vector. With "scores", its vector has the logits of the
    tokens `scored` after the text.
    """

    lengths: tuple[int, ...] = _f(integers(1, MAX_CONTEXT, 0, MAX_TEXTS), default=())  #: none: an answer
    kind: str = _f(choice("last", "mean", "cls", "scores"), default="last")
    normalized: bool = _f(boolean(), default=False)  #: to length 1
    dimensions: int = _f(integer(0, U32), default=0)  #: first numbers of each vector; 0 for all
    scored: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, 2), default=())


GREEDY = Sampling()
PLAIN = Shaping()
NO_POOLING = Pooling()
_sampling = record(Sampling)
_shaping = record(Shaping)
_pooling = record(Pooling)


# --- opening a link ---------------------------------------------------------------------------------


class Hello(Message, number=0x01):
    """First frame on a link, from the end that opens it."""

    version: int = _f(integer(0, U32))
    rank: int = _f(integer(0, MAX_RANKS - 1))
    pid: int = _f(_count)
    nonce: bytes = _f(binary(16, 16))
    proof: bytes = _f(binary(0, 32))  #: on a decode link, keyed by the epoch's secret


class Welcome(Message, number=0x02):
    """Reply to an accepted Hello. A refused Hello gets an Error, and the link ends."""

    version: int = _f(integer(0, U32))
    proof: bytes = _f(binary(0, 32))


class Ping(Message, number=0x03):
    """Request for exactly one Pong."""


class Pong(Message, number=0x04):
    """Status of a rank."""

    phase: str = _f(_phase)
    phase_s: float = _f(_seconds)  #: since it entered the phase or last made progress in it
    in_flight: int = _f(_count)
    step: int = _f(_count)
    model: str = _f(text(1000, cut=True))
    stats: RankStats = _f(_stats)
    expected_us: int = _f(_count, default=0)  #: time of the running forward, as expected from earlier ones


class Bootstrap(Message, number=0x07):
    """Agent to its rank: the group of this process, for one epoch."""

    rank: int = _f(integer(0, MAX_RANKS - 1))
    world_size: int = _f(integer(1, MAX_RANKS))
    backend: str = _f(choice("none", "ring", "jaccl"))
    hosts: tuple[str, ...] = _f(texts(MAX_RANKS, 100))
    decode_address: str = _f(text(200))  #: where rank 0 listens ("ip:port,ip:port"), fastest network first
    epoch_key: bytes = _f(binary(32, 32))
    deadline_s: float = _f(_seconds)
    ack_deadline_s: float = _f(_seconds)
    run_ahead: int = _f(integer(0, 1))
    queue_s: float = _f(_seconds, default=300.0)  #: bound of a request's wait for its first forward
    canary_s: float = _f(_seconds, default=60.0)  #: a group that idled so long proves itself
    agreement: str = _f(choice("auto", "broadcast-draws"), default="auto")
    speculation: str = _f(choice("auto", "off", "lookup", "mtp", "draft"), default="auto")
    rdma: tuple[str, ...] = _f(_matrix, default=())  #: of devices, row by row as in `wire/rdma.py`
    jaccl_ring: bool = _f(boolean(), default=False)  #: JACCL joins only neighbors
    fast_fences: bool = _f(boolean(), default=False)  #: turns MLX_METAL_FAST_SYNCH on
    round_s: float = _f(_seconds, default=15.0)  #: bound of one round of the side channel
    pins: tuple[str, ...] = _f(_pins, default=())  #: of agents' keys, by rank, for TLS; none if one has all
    repeatable: bool = _f(boolean(), default=False)  #: no computation depends on how long something took
    disk_folder: str = _f(text(4000, raw=True), default="")  #: for KV caches; set by the rank's own agent
    disk_bytes: int = _f(_count, default=0)  #: limit for all ranks of this Mac together
    large_buffers: bool = _f(boolean(), default=False)  #: MLX makes larger command buffers


class SideChannel(Message, number=0x0B):
    """One rank's bytes for one round of JACCL's all-gather. Rounds are numbered from 1. Reply: Gathered."""

    round: int = _f(integer(1, MAX_ROUNDS))
    data: bytes = _f(binary(0, MAX_ROUND_BYTES))


class Gathered(Message, number=0x0E):
    """Bytes of every rank in that round, in rank order. An error may arrive unsolicited between rounds."""

    round: int = _f(integer(0, MAX_ROUNDS))
    data: bytes = _f(binary(0, MAX_RANKS * MAX_ROUND_BYTES))
    error: str = _f(_detail, default="")  #: why no further rounds follow


# --- decoding ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Part of a prompt in a Forward: the row's tokens, from the row's position on.

    After the last part, the sequence has its first new token and is a row of the batch. If the first part
    begins after position 0, it starts from the KV cache of `source`, truncated there.
    """

    total: int = _f(integer(1, MAX_CONTEXT))  #: tokens of the whole prompt
    source: int = _f(integer(0, U32), default=0)  #: uid of a running or kept sequence; 0 in later parts
    take: bool = _f(boolean(), default=False)  #: take over the KV cache of `source` instead of copying it
    sampling: Sampling = _f(_sampling, default=GREEDY)
    save: int = _f(integer(0, U32), default=0)  #: uid of a copy of the KV cache so far; not of a whole prompt
    covers: tuple[int, ...] = _f(_uids, default=())  #: kept caches that begin it and share its arrays now
    following: int = _f(integer(0, 2**31 - 1), default=0)  #: the next token; 0 in the last part
    #: Alternatives in the scores of the tokens after each of these; -1: no scores.
    scores: int = _f(integer(-1, MAX_TOP_LOGPROBS), default=-1)


class Forward(Message, number=0x08, sparse=True):
    """One forward over the sequences in `rows`: a decode step of the running batch, in its order, or prompts.

    Ranks drop KV cache entries beyond `positions`. A row without tokens (width 0, or no `widths`) is fed the
    last token that it chose, inside the graph; in a pipeline, from ChosenTokens. A pipeline's step has the
    rows of one lane. A decode step chooses a token after each of its input tokens. `prompts` is empty in a
    decode step; else it has a part for each row, and either all parts end their prompts or none does.

    For rows that are not `gathered`, ranks exchange only the best token of their share of the vocabulary.
    With `agreement` "verify", every rank chooses for gathered rows, and rank 0 compares digests; with
    "broadcast", rank 0's choice for gathered rows is summed into every rank's graph.
    """

    rows: tuple[int, ...] = _f(integers(1, U32, 1, MAX_ROWS))
    positions: tuple[int, ...] = _f(integers(0, MAX_CONTEXT, 1, MAX_ROWS))  #: tokens of KV cache before it
    widths: tuple[int, ...] = _f(integers(0, MAX_FRAME_TOKENS, 0, MAX_ROWS), default=())  #: by row
    tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, MAX_FRAME_TOKENS), default=())
    gathered: tuple[int, ...] = _f(_uids, default=())  #: rows whose logits every rank gets
    agreement: str = _f(choice("verify", "broadcast"), default="verify")
    drafts: int = _f(integer(RESTS, MAX_DRAFTS), default=0)  #: for each row; -1: the MTP head gets no entries
    prompts: tuple[PromptPart, ...] = _f(records(PromptPart, 0, MAX_PROMPTS), default=())

    @property
    def unfinished(self) -> bool:
        """Return True if this forward leaves prompts incomplete; it then chooses no token."""
        return bool(self.prompts) and self.positions[0] + self.widths[0] < self.prompts[0].total


class ChosenTokens(Message, number=0x2C):
    """Tokens that a pipeline's forward chose, by row, for ranks above 0. The next step feeds the last."""

    forward: int = _f(_count)  #: its number
    tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 1, MAX_FRAME_TOKENS))


class SessionStop(Message, number=0x0A):
    """End of a sequence."""

    uid: int = _f(_uid)
    reason: str = _f(choice("stop", "length", "cancel", "preempt", "error"))
    forwards: int = _f(_count)  #: prefill chunks and steps; every rank checks its own count
    keep: int = _f(integer(0, MAX_CONTEXT), default=0)  #: tokens of KV cache that stay under its uid
    covers: tuple[int, ...] = _f(_uids, default=())  #: kept caches that begin it and share its arrays now


class Evict(Message, number=0x0C):
    """Command to drop kept KV caches."""

    uids: tuple[int, ...] = _f(_uids)


class Arrange(Message, number=0x2B):
    """Command to lay out the KV arrays of the running rows, in batch order, and then of free slots. Rows of
    one room and lane share arrays.
    """

    rooms: tuple[int, ...] = _f(integers(1, MAX_ROOM, 0, MAX_ROWS), default=())  #: tokens
    trim: bool = _f(boolean(), default=False)  #: free the memory that MLX keeps for reuse
    lanes: tuple[int, ...] = _f(integers(0, MAX_RANKS - 1, 0, MAX_ROWS), default=())  #: by room, else row


class Spill(Message, number=0x27):
    """Rank 0 to the others: write tokens `start` to `end` of a sequence's KV cache to disk."""

    uid: int = _f(_uid)
    start: int = _f(integer(0, MAX_CONTEXT))
    end: int = _f(integer(1, MAX_CONTEXT))
    digest: bytes = _f(binary(DIGEST_BYTES, DIGEST_BYTES))  #: of all tokens up to `end`: the block's name
    previous: bytes = _f(binary(0, DIGEST_BYTES), default=b"")  #: digest of the block before it


class FetchBlocks(Message, number=0x28):
    """Rank 0 to the others: read blocks from disk, for uid. Reply: FetchedBlocks."""

    uid: int = _f(_uid)
    block: int = _f(integer(1, MAX_CONTEXT))  #: tokens of each
    digests: bytes = _f(binary(DIGEST_BYTES, MAX_BLOCKS * DIGEST_BYTES))  #: in the order of the tokens


class FetchedBlocks(Message, number=0x29):
    """Reply to FetchBlocks, between Acks: this rank has the first `blocks` of them in memory."""

    uid: int = _f(_uid)
    blocks: int = _f(integer(0, MAX_BLOCKS))


class Restore(Message, number=0x2A):
    """Rank 0 to the others: keep the first `blocks` fetched for uid as its KV cache, and drop the rest."""

    uid: int = _f(_uid)
    blocks: int = _f(integer(0, MAX_BLOCKS))
    bad: bool = _f(boolean(), default=False)  #: every rank deletes the rest: some rank lacks its first block


class Ack(Message, number=0x10):
    """Reply to one Forward, named by its frame's seq. Totals are the rank's, after that step."""

    step: int = _f(_count)
    forwards: int = _f(_count)
    collectives: int = _f(_count)
    digest: int = _f(integer(0, U32))  #: covers its input and the tokens it chose
    step_us: int = _f(_count, default=0)  #: from the forward's launch to its end on that rank
    wait_us: int = _f(_count, default=0)  #: part of it that MLX spent queuing it and waiting for the device


class Error(Message, number=0x11):
    """Failure of request `uid`; with 0, of a command (in place of its reply) or of the ending sender."""

    code: str = _f(_code)
    detail: str = _f(_detail)
    uid: int = _f(integer(0, U32))


# --- lifecycle of a rank: each command gets exactly one reply ---------------------------------------


class Init(Message, number=0x12):
    """Command to form the group. Reply: InitDone."""


class SanityCheck(Message, number=0x13):
    """Command to prove the group by value. Reply: SanityDone."""


@dataclass(frozen=True, slots=True)
class CountedShare:
    """Memory that the plan expects one rank to need."""

    weight_bytes: int = _f(_count)
    kv_token_bytes: int = _f(_count)  #: of caches that keep all tokens, in the type that config.json names


class LoadShard(Message, number=0x14):
    """Command to load this rank's share of a model; 0 means not set. Reply: Loaded."""

    path: str = _f(text(4000, raw=True))  #: folder of the model
    prefill_chunk: int = _f(integer(1, MAX_CONTEXT))
    eos: tuple[int, ...] = _f(_eos)  #: of the tokenizer; the model's own configuration may add to them
    max_context: int = _f(integer(0, MAX_CONTEXT), default=0)  #: tokens, to shorten the model's own
    kv_bits: int = _f(integer(0, 8), default=0)  #: quantizes the KV cache
    kv_bytes: int = _f(_count, default=0)  #: of the caches of all sequences on each rank, as in KvBudget
    draft_path: str = _f(text(4000, raw=True), default="")  #: small model of this vocabulary, for rank 0
    paths: tuple[str, ...] = _f(texts(MAX_RANKS, 4000, raw=True), default=())  #: by rank, if Macs differ
    split: tuple[int, ...] = _f(_split, default=())  #: layers by rank of a pipeline; rank 0 has the last
    counted: tuple[CountedShare, ...] = _f(records(CountedShare, 0, MAX_RANKS), default=())  #: by rank


class KvBudget(Message, number=0x1F):
    """Agent to rank 0: limit the KV caches of all sequences on each rank to `kv_bytes` from now on.

    Rank 0 evicts caches and preempts sequences that no longer fit, and ends longer sequences with an Error.
    Unless the limit grows, ranks free memory. Reply: Loaded, with the new limit: at least one small cache.
    """

    kv_bytes: int = _f(_count)  #: 0: the memory that ranks found when they loaded the model
    clear: bool = _f(boolean(), default=False)  #: evict all kept caches


class Unload(Message, number=0x16):
    """Command to drop the model; the group stays. Reply: Done."""


class Shutdown(Message, number=0x18):
    """Command to finish, release everything and exit with status 0. Reply: Done, then SessionEnd."""


class InitDone(Message, number=0x19):
    """Reply to Init: the group is formed."""

    rank: int = _f(integer(0, MAX_RANKS - 1))
    world_size: int = _f(integer(1, MAX_RANKS))


class SanityDone(Message, number=0x1A):
    """Results of this rank: `total` = sum of ones, `ranks` = the gathered ranks, `digest` of the epoch."""

    total: int = _f(_count)
    ranks: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, MAX_RANKS))
    digest: int = _f(integer(0, U32))


class Loaded(Message, number=0x1B):
    """Reply to LoadShard and KvBudget: the shard is in memory. Figures are this rank's.

    From rank 0 to the agent, figures are the group's: `kv_bytes` applies to all ranks, `kv_token_bytes` is
    the largest, `kv_row_bytes` is worth the most tokens, and `context` is the longest sequence that fits.
    """

    context: int = _f(integer(1, U32))  #: tokens
    vocabulary: int = _f(integer(1, U32))  #: tokens
    weight_bytes: int = _f(_count)
    eos: tuple[int, ...] = _f(_eos)
    peak_bytes: int = _f(_count, default=0)  #: while loading
    kv_token_bytes: int = _f(_count, default=0)  #: one token in its KV cache
    kv_bytes: int = _f(_count, default=0)  #: memory for all caches together
    kv_row_bytes: int = _f(_count, default=0)  #: part of a KV cache that each sequence has once
    checkpoints: bool = _f(boolean(), default=False)  #: kept KV caches cannot be truncated
    layers: tuple[int, ...] = _f(integers(0, MAX_LAYERS, 0, MAX_LAYERS), default=())  #: of a stage
    mtp: bool = _f(boolean(), default=False)  #: it has the model's MTP head


class Done(Message, number=0x1C):
    """Reply to Bootstrap, Unload and Shutdown. After Bootstrap, fields describe this machine."""

    jaccl: bool = _f(boolean(), default=False)  #: MLX has JACCL
    gpu_bytes: int = _f(_count, default=0)  #: memory that Metal recommends for the GPU; 0 without Metal


class TimeCollectives(Message, number=0x1D):
    """Command to time `rounds` collectives over `size` bytes of every rank. A "chain" is one graph of sums,
    each of the sum before it, with arithmetic in between. Reply: CollectivesTimed.
    """

    kind: str = _f(choice("sum", "gather", "chain"))
    size: int = _f(integer(1, MAX_TIMED_BYTES))
    rounds: int = _f(integer(1, MAX_TIMED_ROUNDS))


class CollectivesTimed(Message, number=0x1E):
    """Time of one collective on this rank; from rank 0 to the agent, on the slowest rank."""

    seconds: float = _f(_seconds)
    metal: bool = _f(boolean())  #: a GPU computes there, so each collective includes a fence


# --- requests in, tokens out ------------------------------------------------------------------------


class Generate(Message, number=0x20):
    """Agent to rank 0: decode after this prompt until an end token or `max_tokens`.

    The last `answered` of `tokens` are an earlier group's part of the answer; `max_tokens` and indices
    include them. Scheduling is fair between clients, and between a client's users. Reply: Accepted or Error.
    """

    uid: int = _f(_uid)
    tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 1, MAX_FRAME_TOKENS))
    max_tokens: int = _f(integer(1, MAX_CONTEXT))
    sampling: Sampling = _f(_sampling, default=GREEDY)
    shaping: Shaping = _f(_shaping, default=PLAIN)
    logprobs: int = _f(integer(-1, MAX_TOP_LOGPROBS), default=-1)  #: -1: none, 0: of chosen tokens, n: of n
    prompt_logprobs: int = _f(integer(-1, MAX_TOP_LOGPROBS), default=-1)  #: the same for the prompt's tokens
    ignore_eos: bool = _f(boolean(), default=False)  #: the answer continues after an end token
    answered: int = _f(integer(0, MAX_FRAME_TOKENS), default=0)
    strikes: int = _f(integer(0, MAX_STRIKES), default=0)  #: failures of groups during this request
    client: int = _f(_count, default=0)
    user: int = _f(_count, default=0)
    salt: int = _f(_count, default=0)  #: only prompts of one salt share KV caches
    group: str = _f(group_id(MAX_GROUP_ID), default="")  #: between agents: of the receiver, or any
    places: tuple[int, ...] = _f(_places, default=())  #: ascending; other prompts may agree up to each
    batch: bool = _f(boolean(), default=False)  #: interactive requests begin before it, and keep their room
    pooling: Pooling = _f(_pooling, default=NO_POOLING)  #: `max_tokens` is unused with lengths
    stop_tokens: tuple[int, ...] = _f(_stop_tokens, default=())  #: end it as end tokens do, in any case


class Accepted(Message, number=0x24):
    """Rank 0 to agent: the request is valid and will run."""

    uid: int = _f(_uid)


class Prefilled(Message, number=0x26):
    """Rank 0 to agent, a few times a second: progress with the tokens of Generate."""

    uid: int = _f(_uid)
    computed: int = _f(_count)  #: tokens in a KV cache
    cached: int = _f(_count)  #: tokens of these that were cached before the prefill


class Delta(Message, number=0x21):
    """Rank 0 to agent: the confirmed tokens of one step, in order. A request may have several."""

    uids: tuple[int, ...] = _f(integers(1, U32, 1, MAX_DELTA))  #: by token
    indices: tuple[int, ...] = _f(integers(0, 2**31 - 1, 1, MAX_DELTA))  #: of a token in its answer
    tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 1, MAX_DELTA))


class ScoredDelta(Message, number=0x25):
    """Tokens of one request that wants log-probabilities (natural logarithms), in place of a Delta.

    With `prompt`, they are tokens of its prompt, before any of its answer; the first has no score.
    """

    uid: int = _f(_uid)
    index: int = _f(integer(0, 2**31 - 1))  #: of the first token, in its answer or in the prompt
    tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 1, MAX_WIDTH + 1))
    logprobs: tuple[float, ...] = _f(numbers(-1e9, 1e-3, MAX_WIDTH + 1))
    top: int = _f(integer(0, MAX_TOP_LOGPROBS))  #: so many alternatives of each token, in token order
    top_tokens: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, (MAX_WIDTH + 1) * MAX_TOP_LOGPROBS))
    top_logprobs: tuple[float, ...] = _f(numbers(-1e9, 1e-3, (MAX_WIDTH + 1) * MAX_TOP_LOGPROBS))
    prompt: bool = _f(boolean(), default=False)


class Vectors(Message, number=0x2D):
    """Rank 0 to agent: vectors of some texts of a request, float32, little-endian, of equal lengths."""

    uid: int = _f(_uid)
    texts: tuple[int, ...] = _f(integers(0, MAX_TEXTS - 1, 1, MAX_TEXTS))  #: indices in `Pooling.lengths`
    data: bytes = _f(binary(4, MAX_VECTOR_BYTES))


class Cancel(Message, number=0x22):
    """Agent to rank 0: the client canceled this request. Reply: Finished, unless it is over."""

    uid: int = _f(_uid)


class Finished(Message, number=0x23):
    """Rank 0 to agent: the end of a request."""

    uid: int = _f(_uid)
    reason: str = _f(choice("stop", "length", "cancel"))
    generated: int = _f(_count)  #: tokens, with the end token
    forwards: int = _f(_count)
    cached: int = _f(_count, default=0)  #: tokens of its prompt that were not computed again
    drafted: int = _f(_count, default=0)
    accepted: int = _f(_count, default=0)  #: of the drafted tokens
    ended_by: int = _f(integer(-1, 2**31 - 1), default=-1)  #: the end or stop token; -1 without one


class SessionEnd(Message, number=0xFF):
    """Last frame of a link that closes in order."""


#: From rank 0 to the client's agent.
RequestEvent = Accepted | Prefilled | Delta | ScoredDelta | Vectors | Finished | Error


# --- digests that name the contents of KV caches, for all ranks and gateways --------------------------


class PrefixDigests:
    """Digests of prefixes of `tokens`, each computed once. `tokens` may grow."""

    def __init__(self, tokens: Sequence[int], salt: int = 0) -> None:
        self._tokens = tokens
        self._hash = hashlib.blake2b(salt.to_bytes(8, "little"), digest_size=DIGEST_BYTES)
        self._at = 0
        #: By end: the digest, and the hash's state, to continue from.
        self._known = {0: (self._hash.digest(), self._hash.copy())}

    def up_to(self, end: int) -> bytes:
        if end not in self._known:
            if end < self._at:
                self._at = max([at for at in self._known if at < end])
                self._hash = self._known[self._at][1].copy()
            self._hash.update(packed(self._tokens[self._at : end]))
            self._at = end
            self._known[end] = self._hash.digest(), self._hash.copy()
        return self._known[end][0]

    def blocks(self) -> list[bytes]:
        return [self.up_to(end) for end in range(BLOCK, len(self._tokens) + 1, BLOCK)]


def packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"={len(tokens)}i", *tokens)  # less than half the time of an array


def digests_in(data: bytes) -> tuple[bytes, ...]:
    return tuple(data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES))


# --- proofs in Hello and Welcome, with the epoch's key (HMAC-SHA256, a label for each use) ----------------


def _proof(label: bytes, key: bytes, epoch: int, rank: int, nonce: bytes) -> bytes:
    return hmac.digest(key, label + struct.pack(">QI", epoch, rank) + nonce, hashlib.sha256)


#: 32 bytes to prove that the sender has `key`: in a Hello of `rank` with `nonce`, and in its Welcome.
hello_proof = partial(_proof, b"mlxtp hello\0")
welcome_proof = partial(_proof, b"mlxtp welcome\0")


def verify(proof: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(proof, expected)


def epoch_digest(key: bytes, epoch: int) -> int:
    """Return an epoch's 32 bits, equal on every rank, for the group's proof by value."""
    digest = hmac.digest(key, b"mlxtp epoch\0" + struct.pack(">Q", epoch), hashlib.sha256)
    return int.from_bytes(digest[:4], "big")
