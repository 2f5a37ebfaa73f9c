"""Every row of the table: its name, its unit, its peer, its goal, its meaning.

Names are stable: a JSON file of one version can be compared with one of another. Pure.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

BARE = "bare generate_step"
SERVER = "mlx_lm.server"
DELAYS_MS = (0, 1, 5)  #: Added to each way of a link between two ranks.


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a row's ratio, or on its value where it has no peer. `relation` is ≥, ≤ or <."""

    relation: str
    bound: float

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:g}"

    def met(self, number: float) -> bool:
        if self.relation == "≥":
            return number >= self.bound
        return number <= self.bound if self.relation == "≤" else number < self.bound


@dataclass(frozen=True, slots=True)
class Measure:
    """A row before it is measured. `peer` is empty where the value stands for itself."""

    name: str
    unit: str
    says: str
    peer: str = ""
    goal: Goal | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Measured values: medians over rounds; `ratio` is the median of each round's own ratio.

    `spread` is the distance between the smallest and the largest round, relative to the median: of the ratios
    where there is a peer, else of the values. None where there was one round only.
    """

    name: str
    value: float
    unit: str
    peer: str
    peer_value: float | None
    ratio: float | None
    spread: float | None
    goal: str


_OVER_HTTP = "Tokens of all streams, from the first request to the last token."
_AT_THE_PIPE = "The same where tokens leave the engine, beside the same server over HTTP."
_ALL = (
    # --- decode
    Measure("bare loop, one stream", "tokens/s",
            "mlx-lm's generate_step on the same two ranks with nothing around it: the limit."),
    Measure("one stream, pipe vs bare loop", "tokens/s",
            "Decode speed where tokens leave the engine, after the first token.", BARE, Goal("≥", 0.97)),
    Measure("one stream, HTTP vs bare loop", "tokens/s",
            "What a streaming client gets, from its request to the last token.", BARE, Goal("≥", 0.90)),
    Measure("one stream, HTTP vs mlx_lm.server", "tokens/s",
            "The same client at both servers, from its request to the last token.", SERVER, Goal("≥", 1)),
    Measure("HTTP and text, cost of a token", "µs",
            "What a token of a single stream takes longer at the client than at the pipe, on average."),
    # --- http
    Measure("HTTP and text at 200 tokens/s, 1 stream", "%",
            "CPU time for 200 tokens, as a share of one core's second, of a process that is an agent's HTTP "
            "side and gateway, while something in it makes 200 tokens a second.", "", Goal("≤", 10)),
    Measure("HTTP and text at 200 tokens/s, 16 streams", "%",
            "The same, 200 tokens a second in all.", "", Goal("≤", 10)),
    Measure("a step of 16 rows streamed over HTTP, 99th percentile", "ms",
            "From the beginning of one step to the next, by the rank's own flight recorder. One rank on the "
            "first core; agent and client share the second.", "the same without HTTP", Goal("<", 1.1)),
    # --- concurrency
    Measure("8 streams at once, pipe vs mlx_lm.server", "tokens/s", _AT_THE_PIPE, SERVER),
    Measure("8 streams at once, HTTP vs mlx_lm.server", "tokens/s", _OVER_HTTP, SERVER, Goal("≥", 1.05)),
    Measure("8 streams at once, median time to first token vs mlx_lm.server", "ms",
            "From a stream's request to its first text; the median of the eight.", SERVER, Goal("≤", 0.8)),
    Measure("16 streams at once, pipe vs mlx_lm.server", "tokens/s", _AT_THE_PIPE, SERVER),
    Measure("16 streams at once, HTTP vs mlx_lm.server", "tokens/s", _OVER_HTTP, SERVER, Goal("≥", 1.05)),
    Measure("16 streams at once, median time to first token vs mlx_lm.server", "ms",
            "The same of sixteen.", SERVER, Goal("≤", 0.7)),
    *(
        Measure(f"{streams} streams at once, {thread} of a rank, share of a core", "%", says)
        for streams in (8, 16)
        for thread, says in (
            ("MLX's threads", "Kernels and the ring, at the pipe. Agent and client have the same cores."),
            ("main thread", "Python and the building of graphs, meanwhile."),
        )
    ),
    Measure("arrivals over time, total time vs mlx_lm.server", "s",
            "Requests at random moments, the same for both: from the first to the last token.", SERVER),
    Measure("arrivals over time, median time to first token vs mlx_lm.server", "ms",
            "The same requests: half of them waited longer than this.", SERVER),
    Measure("arrivals over time, p95 time to first token vs mlx_lm.server", "ms",
            "The same requests: one in twenty waited longer than this.", SERVER),
    # --- prefill
    Measure("second turn after 1,000 cached tokens, time to first token vs the first turn", "ms",
            "A chat goes on: its first thousand tokens are in the prefix cache.",
            "first turn", Goal("≤", 0.15)),
    Measure("longest gap beside a 4,000-token prompt vs without chunks", "ms",
            "The longest silence of a running stream while another request's prompt is prefilled.",
            "prefill in one piece", Goal("≤", 0.2)),
    # --- pipeline
    Measure("long prompt over two stages vs one rank", "ms",
            "Time to the first token of 1,024 tokens, 512 in a quick run, in chunks that follow each other "
            "through the stages. A stage computes on one core, like the one rank.",
            "one rank", Goal("≤", 0.65)),
    Measure("one stream over two stages vs one rank", "ms",
            "Between two tokens: the layers in sequence, a frame and a message.",
            "one rank", Goal("≤", 1.15)),
    Measure("8 streams over two stages, two lanes vs one", "tokens/s",
            "Four rows on each stage, beside eight on one of them while the other waits.",
            "one lane", Goal("≥", 1.5)),
    Measure("8 streams over two stages vs one rank", "tokens/s",
            "Two cores instead of one.", "one rank"),
    Measure("long prompt over three stages vs one rank", "ms",
            "On two cores, so no more than two stages compute at once.", "one rank"),
    Measure("8 streams over three stages vs one rank", "tokens/s", "The same.", "one rank"),
    *(
        measure
        for name, says in (
            ("one stream", "Between two tokens of a single stream, two ranks."),
            ("8 streams", "Between two tokens of each of eight streams, two ranks."),
            ("long prompt", "Time to the first token, two ranks."),
        )
        for measure in (
            *(
                Measure(f"{name}, pipeline vs tensor, {delay} ms each way", "ms",
                        f"{says} All that they send each other comes {delay} ms later.", "tensor")
                for delay in DELAYS_MS
            ),
            Measure(f"delay each way from which on {name} takes no more over a pipeline", "ms",
                    "By straight lines between the measured ones; the longest where it takes more even so."),
        )
    ),
    *(
        Measure(f"one stream, {kind}, relay without delay vs none", "ms",
                "What the process in the link costs that adds the delay.", "no relay")
        for kind in ("pipeline", "tensor")
    ),
    # --- caches
    *(
        Measure(f"second turn after {tokens} tokens, {size} model, from {kind} vs the first turn", "ms",
                f"Time to the first token over HTTP, two ranks. {more}", "first turn", Goal("≤", bound))
        for size, tokens, more in (
            ("400 MB", "1,560", "A longer first turn would take ten minutes on two cores."),
            ("thin", "8,000", "A model that prefills 8,000 tokens in seconds, so that the rest weighs more."),
        )
        for kind, bound in (("memory", 0.05), ("disk after a restart", 0.25), ("disk after kill -9", 0.25))
    ),
    Measure("token of a stream beside prompts that go to disk vs to none", "ms",
            "A stream of the thin model on one rank, while two prompts of 2,000 tokens are prefilled.",
            "cache_disk = 0", Goal("≤", 1.03)),
    Measure("median decode step beside prompts that go to disk vs to none", "ms",
            "The stream's steps between which nothing else ran, by the rank's own flight recorder.",
            "cache_disk = 0", Goal("≤", 1.03)),
    Measure("95th percentile of decode steps beside prompts that go to disk vs to none", "ms",
            "The same steps.", "cache_disk = 0"),
    Measure("until a stream with 8,000 tokens goes on after a lost rank vs a short one", "ms",
            "From SIGKILL of one of two ranks to the stream's next token, thin model, with spares.",
            "16 tokens", Goal("≤", 1.5)),
    # --- lookup
    *(
        Measure(f"lookup of a prompt among 1,000 caches, {where}", "ms", says, "", Goal("<", 0.2))
        for where, says in (
            ("memory", "A prompt of 8,000 tokens; a tenth of the caches share half of it."),
            ("memory, whole", "The same for caches that cannot be cut."),
            ("disk", "The same for 1,000 blocks of 256 tokens, with the digests of the prompt."),
            ("disk, whole", "The same for blocks of caches that cannot be cut, of as many lengths."),
        )
    ),
    # --- describing
    Measure("description of the largest published models", "s",
            "Until a process has built the slowest of five without weights, and printed what it is. An agent "
            "has it done once for a model.", "", Goal("<", 3)),
    Measure("description of the largest published models, memory", "MB",
            "The most that such a process had at one time, of the five the most.", "", Goal("<", 1000)),
    # --- speculation
    Measure("copy-heavy text, speculation vs none", "tokens/s",
            "The embedded model repeats a string of its prompt.", "no speculation", Goal("≥", 2.5)),
    Measure("8 streams of copy-heavy text, speculation vs none", "tokens/s",
            "The same, eight strings at once.", "no speculation", Goal("≥", 1.1)),
    Measure("counting, speculation vs none", "tokens/s",
            "The embedded model counts: some of what comes resembles what came.", "no speculation"),
    Measure("text with nothing to copy, speculation vs none", "tokens/s",
            "A model that never says a token twice, so that no draft can be right.",
            "no speculation", Goal("≥", 0.97)),
    # --- mtp
    Measure("counting, MTP head vs none", "tokens/s",
            "The embedded model counts, with drafts of its MTP head alone.", "no speculation"),
    Measure("prose-like text, MTP head vs none", "tokens/s",
            "The same where it repeats words; its head is right half of the time.", "no speculation",
            Goal("≥", 0.97)),
    Measure("random text, MTP head vs none", "tokens/s",
            "The same at temperature 2, where its head is useless.", "no speculation", Goal("≥", 0.97)),
    Measure("8 mixed streams, MTP head vs none", "tokens/s",
            "Counting, characters and words at once.", "no speculation", Goal("≥", 0.97)),
    Measure("counting, steps per token with the MTP head", "steps", "1 without drafts."),
    *(
        Measure(f"{task}, MTP head vs none, 1 ms more a sum", "tokens/s",
                "The same over links that delay, as fences do on Macs.", "no speculation", Goal("≥", 1.5))
        for task in ("counting", "drawn counting")
    ),
    Measure("drawn counting, right drafts", "%", "Share of drafts that were right. Some draws are odd."),
    # --- loading
    Measure("weights of a rank vs total / N", "MB",
            "The rank that holds the most, of a generated model of about 400 MB.",
            "total / N", Goal("≤", 1.02)),
    Measure("peak memory while loading vs the shard", "MB",
            "MLX's peak on the rank where it is highest.", "total / N", Goal("≤", 1.15)),
    Measure("load time, 400 MB model", "s", "From the proven group to every rank's share in memory."),
    # --- idle
    Measure("idle rank, share of one core", "%",
            "CPU time of the busier rank of a loaded model without requests.", "", Goal("<", 1.0)),
    Measure("idle rank of mlx_lm.server, share of one core", "%", "The same of its busier rank."),
    # --- layout
    Measure("tokens in the room for KV caches, one long row beside short ones", "",
            "The share of 65,536 that tokens take once no further request is admitted: one of 32,768, the "
            "others of 500 to 2,000.", "", Goal("≥", 0.85)),
    Measure("a step of 16 rows, one of them long, by length vs in one array", "ms",
            "One row of 2,000 tokens and 15 of 200, on one rank: a forward over two buckets instead of one "
            "over rows with the room of the longest.", "one array", Goal("≤", 0.5)),
    Measure("a step of 8 rows that are copied every 64 tokens vs never", "ms",
            "As rows grow where there is little room.", "not copied", Goal("≤", 1.03)),
    Measure("a step of 7 short rows and a long one, vs the same apart", "ms",
            "Rows of 200 tokens and one of 3,800 on one rank, laid out as rank 0 chooses where there is room "
            "for anything. Apart: a step of the seven, then one of the long row.", "apart", Goal("≤", 1)),
    Measure("a step of two tokens behind 2,048 over compressed keys, vs one token", "ms",
            "Two layers with a quarter of DeepSeek V3's sizes and 16 heads, on one rank.",
            "one token", Goal("≤", 3)),
    # --- building
    *(
        Measure(f"main thread of a step of {rows} row{'s' * (rows > 1)} vs mlx-lm", "µs",
                "Processor time of one process with a Llama of 64 small layers: building graphs, launching "
                f"and reading tokens, not kernels. Beside mlx-lm's {peer}.", peer, Goal("≤", 0.8))
        for rows, peer in ((1, "generate_step"), (8, "BatchGenerator"), (16, "BatchGenerator"))
    ),
    Measure("main thread of a step of three tokens vs of one", "µs",
            "The same model and one row: a step with two drafts.", "one token"),
    Measure("main thread of reading 8 prompts together vs apart, windows", "µs",
            "The same with windows in half of the layers: eight prompts of 48 tokens.", "apart"),
    # --- links
    Measure("decode link with 1 ms each way vs none", "tokens/s",
            "Every frame between the ranks is delivered 1 ms late, both ways; MLX's ring is not delayed.",
            "undelayed", Goal("≥", 0.92)),
    Measure("model behind the delayed link, one step", "ms",
            "Its step without the delay; the case wants 5 ms or more."),
    Measure("steps begun after a client's disconnect", "steps",
            "Forwards for a request beyond the tokens its client had received when it closed its socket, "
            "less the one that was already running behind the last of them.", "", Goal("≤", 1)),
    # --- frames
    Measure("encode step", "µs", "Fields to bytes, one row."),
    Measure("decode step", "µs", "Bytes to checked fields, one row."),
    Measure("encode + decode step", "µs", "Both.", "", Goal("≤", 5)),
    Measure("protocol send + receive step", "µs", "With the link's order and ledger, both ends."),
    Measure("protocol send + receive Ack", "µs", "The way back."),
    # --- requests
    Measure("a chat of 30 messages and 20 tools, its messages and their check", "ms",
            "What an agent does besides the template and the tokens: 8,000 words.", "", Goal("<", 1)),
    Measure("its parser, up to the first call", "ms", "Building it, and the heads of calls of 20 tools."),
    # --- membership
    Measure("64 members, from their start to one coordinator", "ticks",
            "Half a second each; the members find each other within the first four."),
    Measure("64 members, from the coordinator's death to the next", "ticks",
            "Its links break; all the others follow the same one again."),
    Measure("64 members, one tick of one of them", "µs",
            "Judging 63 others, deciding, and taking in a beat of each, twice a second."),
    Measure("64 members, one plan", "ms",
            "Placing a 70B model on 64 unequal Macs, eight of them cabled in a circle."),
    # --- recovery
    Measure("serving again after a rank was killed, with spares", "s",
            "From SIGKILL of rank 1 until the next group has its model and has run a forward; half a second "
            "of it is the pause before a second attempt.", "", Goal("≤", 3)),
    Measure("serving again after a rank was killed, without spares", "s",
            "The same, with rank processes that have to be started.", "", Goal("≤", 6)),
    Measure("memory of a spare", "MB", "Of one that waits, what no other process shares."),
    # --- replicas
    Measure("16 streams over two replicas vs one", "tokens/s",
            "Sixteen streams where tokens leave the engine, of a model whose step takes milliseconds. Each "
            "rank has a core of its own, which agents and client share.", "one replica", Goal("≥", 1.7)),
    Measure("agents' and client's share of one core meanwhile", "%",
            "CPU time of the process that has both agents and the client, while two replicas work."),
    Measure("second turns over two replicas, cached share vs one replica", "",
            "The cached share of the prompts of 32 second turns, which come in random order.",
            "one replica", Goal("≥", 0.95)),
    Measure("the same with groups in turn, cached share vs one replica", "",
            "Each request goes to the other group than the one before.", "one replica"),
    Measure("choice of a replica for a prompt of 4,000 tokens", "ms",
            "Hashes of the prompt, and the comparison of two groups.", "", Goal("<", 1)),
    Measure("gap in a stream whose replica is killed, 95th percentile", "ms",
            "The longest silence of each stream whose rank got SIGKILL; it goes on at the other replica.",
            "", Goal("≤", 300)),
    Measure("idle agent with three deployments, share of one core", "%",
            "CPU time of an agent with three loaded models and no requests.", "", Goal("≤", 1)),
    # --- strangers
    Measure("a step beside a flood of strangers, 99th percentile", "ms",
            "Between two tokens where they leave the engine. One rank on the first core; on the second the "
            "agent, and 200 new connections a second to its control port, 4 KiB of garbage on each.",
            "no strangers", Goal("<", 1.1)),
    Measure("strangers turned away meanwhile", "per second",
            "Connections that were closed without a word, or with a TLS alert."),
    # --- vectors
    Measure("a stream beside embeddings, 95th percentile of its gaps", "ms",
            "At the client of a chat, while another one has 256 texts of 200 tokens embedded, over and over. "
            "Each model has a rank and a core; agent and clients share them.",
            "no embeddings", Goal("≤", 2)),
    Measure("a stream beside embeddings, time to first token", "ms", "The same chat.",
            "no embeddings", Goal("≤", 2)),
    # --- copying
    Measure("a model copied from another member", "MB/s",
            "512 MiB from one process to another, in memory, over TLS, and hashed.",
            "plain TLS copy", Goal("≥", 0.8)),
)  # fmt: skip

MEASURES = {measure.name: measure for measure in _ALL}


def compare(name: str, ours: Sequence[float], peers: Sequence[float]) -> Row:
    """A row with a peer: `ours[i]` and `peers[i]` come from the same round."""
    measure = MEASURES[name]
    if not measure.peer:
        raise ValueError(f"{name!r} has no peer")
    ratios = [mine / theirs for mine, theirs in zip(ours, peers, strict=True)]
    return Row(
        name,
        statistics.median(ours),
        measure.unit,
        measure.peer,
        statistics.median(peers),
        statistics.median(ratios),
        spread(ratios),
        "" if measure.goal is None else str(measure.goal),
    )


def absolute(name: str, values: Sequence[float]) -> Row:
    """A row whose values stand for themselves."""
    measure = MEASURES[name]
    if measure.peer:
        raise ValueError(f"{name!r} is measured against {measure.peer}")
    goal = "" if measure.goal is None else str(measure.goal)
    return Row(name, statistics.median(values), measure.unit, "", None, None, spread(values), goal)


def met(row: Row) -> bool | None:
    """Return True when the row reached its goal; None when it has none."""
    goal = MEASURES[row.name].goal
    if goal is None:
        return None
    return goal.met(judged(row))


def judged(row: Row) -> float:
    """Return what a row's goal is about."""
    return row.value if row.ratio is None else row.ratio


def better(name: str, one: float, other: float) -> bool:
    """Return True if `one` serves the goal of the row of this name more than `other`."""
    goal = MEASURES[name].goal
    return goal is not None and (one > other if goal.relation == "≥" else one < other)


def as_json(rows: Sequence[Row]) -> str:
    """Return a list of rows with their fields and `met`."""
    return json.dumps([asdict(row) | {"met": met(row)} for row in rows], indent=1, ensure_ascii=False)


def verdict(rows: Sequence[Row], not_measured: Sequence[str] = ()) -> str:
    """Name the goals that were missed and the cases that could not be measured, in one line."""
    with_goals = [row for row in rows if met(row) is not None]
    missed = [f"{row.name} ({judged(row):.3g}, goal {row.goal})" for row in with_goals if not met(row)]
    if missed:
        line = f"{len(missed)} of {len(with_goals)} goals missed: {'; '.join(missed)}"
    else:
        line = f"all {len(with_goals)} goals met" if with_goals else "no goals"
    return f"{line}; not measured: {', '.join(not_measured)}" if not_measured else line


def spread(values: Sequence[float]) -> float | None:
    """(largest - smallest) / median; None for a single value, or around zero."""
    middle = abs(statistics.median(values))
    if len(values) < 2 or not middle:
        return None
    return (max(values) - min(values)) / middle
