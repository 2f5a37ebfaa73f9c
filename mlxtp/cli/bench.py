"""`mlxtp bench`: the speed of the served model, or of the links between its ranks, as tables to paste."""

from __future__ import annotations

import math
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.bar import Bar
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..client import AgentClient, connection_to, streamed
from ..errors import Code, MlxtpError, UserError
from ..verbs import BenchFabric, Status
from . import options
from .launch import Served, find_served
from .options import AsJson, Home
from .printing import Console, day_of, home_of, joined, print_answer, table_of

# --- the command -----------------------------------------------------------------------------------------


@options.sends(BenchFabric)
def bench(
    *,
    fabric: Annotated[
        bool, typer.Option("--fabric", help="Measure sums and gathers over the group's links, by size.")
    ] = False,
    verb: BenchFabric,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast the served model reads and writes, as a table to paste. Needs an idle endpoint.

    With --fabric: measure the links between its ranks. Later plans use the result. Needs no API key.
    """
    if fabric:
        answer = AgentClient(home_of(home)).send(verb)
        print_answer(answer, as_json, fabric_shown if sys.stdout.isatty() else fabric_in_markdown)
        return

    agent = AgentClient(home_of(home))
    served = find_served(home_of(home), agent.key, verb.model)
    with Console(stderr=True, highlight=False).status("") as shown:
        found = measure(served, agent, shown.update)
    print_answer(found, as_json, show)


# --- the speed of the served model at its endpoint -------------------------------------------------------

READ_TOKENS = (512, 4096)
WRITE_TOKENS = 128
AT_ONCE = (1, 4, 8)
#: Fields of a group that say how its ranks share a model.
_JOINED = ("backend", "kind", "split")
_ANSWER_S = 600.0
_WORDS = (
    "stone river lamp copper seven window garden letter cloud hammer paper north violet engine quiet salt"
)


@dataclass(frozen=True, slots=True)
class BenchAnswer:
    asked_at: float  #: seconds; all three are readings of one clock
    first_at: float
    ended_at: float
    prompt: int
    tokens: int
    cached: int = 0
    drafted: int = 0  #: accepted draft tokens


@dataclass(frozen=True, slots=True)
class BenchRow:
    what: str
    prompt: int
    tokens: int
    first_s: float
    rate: float  #: tokens/s: of prompts in rows that read, else of replies
    drafted: int = 0


def measure(served: Served, agent: AgentClient, say: Callable[[str], None]) -> dict[str, Any]:
    """Return all rows, with their group. Raises UserError if requests are open or the group changes."""
    before = agent.send(Status())
    if before["open_requests"]:
        words = f"{before['open_requests']} requests are open; wait until they have ended"
        raise UserError(words, Code.NOT_READY)
    rows = list(_rows(_Asker(served, agent.certificate), served.context, say))
    after = agent.send(Status())
    if _group(after, served.model) != _group(before, served.model):
        raise UserError("the group changed during the measurement; try again", Code.NOT_READY)
    return {**_about(before, served), "rows": [asdict(row) for row in rows]}


def show(found: Mapping[str, Any]) -> str:
    group = f"{found['backend']} of {found['world_size']}" if found["world_size"] > 1 else "one rank"
    kind = joined(found)
    kind += f", {found['replicas']} replicas" if found["replicas"] > 1 else ""
    lines = [
        ", ".join(found["versions"]),
        f"{found['model']}, context {found['context']}; {group}{kind}; {'; '.join(found['machines'])}",
        "",
        "| | prompt | answer | first token | tokens/s | of these drafted |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:
        drafted = f"{row['drafted'] / row['tokens']:.0%}" if row["tokens"] > 1 else ""
        lines.append(
            f"| {row['what']} | {row['prompt']:,} | {row['tokens']:,} | {row['first_s']:.3g} s "
            f"| {row['rate']:,.4g} | {drafted} |"
        )
    return "\n".join(lines)


def _about(status: Mapping[str, Any], served: Served) -> dict[str, Any]:
    members = status.get("members") or [{"name": status["name"]}]
    group = _group(status, served.model)
    return {
        "versions": status["versions"],
        "model": served.model,
        "context": served.context,
        **{name: group[name] for name in ("world_size", *_JOINED, "replicas")},
        "machines": [
            _machine(each) for each in members if each.get("node_id") in group["macs"] or len(members) == 1
        ],
    }


def _group(status: Mapping[str, Any], model: str) -> Mapping[str, Any]:
    """Describe the first ready group of `model`, else the group that `Status` shows, and all its Macs."""
    found = [each for each in status["deployments"] if model in (each["name"], each["model"])]
    groups = [group for each in found for group in each["groups"] if group["state"] == "ready"]
    own = {
        "model": model,
        "epochs": [each["epoch"] for each in groups] or [status["epoch"]],
        "macs": {mac["node_id"] for each in groups for mac in each["members"]},
        "replicas": max(len(groups), 1),
    }
    if model == status["model"] or not groups:
        ranked = {each["node_id"] for each in status.get("members", ()) if each.get("rank") is not None}
        macs = own["macs"] or ranked
        return {**own, **{name: status[name] for name in ("world_size", *_JOINED)}, "macs": macs}
    return {**own, "world_size": len(groups[0]["members"]), **{name: groups[0][name] for name in _JOINED}}


def _machine(member: Mapping[str, Any]) -> str:
    size = member.get("memory_bytes")
    parts = [member.get("chip") or "", f"{size / 1e9:.0f} GB" if size else ""]
    return " ".join(filter(None, parts)) or str(member["name"])


def _rows(asker: _Asker, context: int, say: Callable[[str], None]) -> Iterator[BenchRow]:
    """Measure the rows. Prompts differ from their first word on, so that no cache helps."""
    say("warming up")
    trial = asker.ask(_text(64), 8)
    per_word = trial.prompt / 64
    for tokens in READ_TOKENS:
        if tokens > 0.9 * context:
            continue
        say(f"reading {tokens} tokens")
        yield read(asker.ask(_text(int(tokens / per_word)), 1))
    room = min(WRITE_TOKENS, context // 2)
    for count in AT_ONCE:
        say(f"{count} at once, {room} tokens each")
        yield wrote(asker.ask_at_once([_text(32) for _ in range(count)], room))


def read(answer: BenchAnswer) -> BenchRow:
    took_s = answer.first_at - answer.asked_at
    return BenchRow("read", answer.prompt, 1, took_s, (answer.prompt - answer.cached) / max(took_s, 1e-9))


def wrote(answers: Sequence[BenchAnswer]) -> BenchRow:
    """Return the speed of all replies together. A single reply's time starts at its first token."""
    tokens = sum(answer.tokens for answer in answers)
    firsts = sorted(answer.first_at - answer.asked_at for answer in answers)
    ended_at = max(answer.ended_at for answer in answers)
    if len(answers) == 1:
        rate = (tokens - 1) / max(ended_at - answers[0].first_at, 1e-9)
    else:
        rate = tokens / max(ended_at - min(answer.asked_at for answer in answers), 1e-9)
    name = "write" if len(answers) == 1 else f"write, {len(answers)} at once"
    drafted = sum(answer.drafted for answer in answers)
    return BenchRow(name, answers[0].prompt, tokens, firsts[len(firsts) // 2], rate, drafted)


def _text(words: int) -> str:
    kinds = _WORDS.split()
    return " ".join([secrets.token_hex(8), *(secrets.choice(kinds) for _ in range(words))])


def in_threads(act: Callable[[str], None], texts: Iterable[str]) -> None:
    """Call `act` with all texts at once. A Ctrl-C does not wait for the threads."""
    threads = [threading.Thread(target=act, args=(text,), daemon=True) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True, slots=True)
class _Asker:
    served: Served
    certificate: str

    def ask_at_once(self, texts: Sequence[str], tokens: int) -> list[BenchAnswer]:
        answers: list[BenchAnswer] = []
        failed: list[MlxtpError] = []

        def one(text: str) -> None:
            try:
                answers.append(self.ask(text, tokens))
            except MlxtpError as error:
                failed.append(error)

        in_threads(one, texts)
        if failed:
            raise failed[0]
        return answers

    def ask(self, text: str, tokens: int) -> BenchAnswer:
        """Request exactly `tokens` tokens. Raises MlxtpError."""
        body = {"model": self.served.model, "prompt": text, "max_tokens": tokens}
        body |= {"ignore_eos": True, "temperature": 0}
        connection = connection_to(self.served.url, self.certificate, _ANSWER_S)
        asked_at = time.perf_counter()
        return _read(streamed(connection, self.served.key, "/v1/completions", body, lambda e: [e]), asked_at)


def _read(events: Iterable[Mapping[str, Any]], asked_at: float) -> BenchAnswer:
    """Build a reply from its events. Empty ones before the first token only keep the connection alive."""
    first_at = ended_at = 0.0
    usage: Mapping[str, Any] | None = None
    for event in events:
        now = time.perf_counter()
        if any(choice["text"] or choice["finish_reason"] for choice in event.get("choices", ())):
            first_at, ended_at = first_at or now, now
        usage = event.get("usage") or usage
    if usage is None or not first_at:
        raise UserError("a reply ended before it was complete")
    prompt = usage.get("prompt_tokens_details") or {}
    details = usage.get("completion_tokens_details") or {}
    return BenchAnswer(
        asked_at,
        first_at,
        ended_at,
        int(usage["prompt_tokens"]),
        int(usage["completion_tokens"]),
        int(prompt.get("cached_tokens") or 0),
        int(details.get("accepted_prediction_tokens") or 0),
    )


# --- the links between ranks: a table with bars, or Markdown ---------------------------------------------


_BAR = 12  # characters of the longest bar
_LEAST_DECADES = 1.0


def fabric_shown(answer: Mapping[str, Any]) -> list[Any]:
    """Return the agent's measurement, line by line. Times are the slowest rank's."""
    names = " + ".join(answer["names"])
    fences = "fast fences (--fast-fences)" if answer["fast_fences"] else "default fences"
    return [
        f"[bold]{escape(answer['kind'])}[/], {escape(answer['backend'])}: {escape(names)}; {fences}",
        _fabric_table(answer),
        _collective(answer),
        "[dim]yellow: how long, on a logarithmic scale; cyan: bytes over one link, on a linear one[/]",
    ]


def fabric_in_markdown(answer: Mapping[str, Any]) -> str:
    first, _, collective, _ = fabric_shown(answer)
    return "\n".join(
        (
            Text.from_markup(first).plain,
            "",
            "| bytes | sum | a link | gather | a link |",
            "|--:|--:|--:|--:|--:|",
            *(f"| {' | '.join(cells)} |" for cells in _cells(answer)),
            "",
            Text.from_markup(collective).plain,
        )
    )


def _fabric_table(answer: Mapping[str, Any]) -> Table:
    names = ("bytes", "sum", "", "a link", "", "gather", "a link")
    table = table_of(*names, right=set(filter(None, names)), wrapped=())
    summing, _ = _speeds(answer)
    times, speeds = bars(answer["sums_s"], "yellow", logarithmic=True), bars(summing, "cyan")
    for (size, took, speed, *gather), how_long, how_fast in zip(_cells(answer), times, speeds, strict=True):
        table.add_row(size, took, how_long, speed, how_fast, *gather)
    return table


def _cells(answer: Mapping[str, Any]) -> list[tuple[str, ...]]:
    summing, gathering = _speeds(answer)
    sums, gathers = map(duration, answer["sums_s"]), map(duration, answer["gathers_s"])
    columns = map(amount, answer["sizes"]), sums, map(_rate, summing), gathers, map(_rate, gathering)
    return list(zip(*columns, strict=True))


def _speeds(answer: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    from ..placement.cost_model import sum_share

    def of(times: Sequence[float], share: float) -> list[float]:
        return [size * share / seconds for size, seconds in zip(answer["sizes"], times, strict=True)]

    count = len(answer["names"])
    return of(answer["sums_s"], sum_share(count)), of(answer["gathers_s"], count - 1)


def _rate(speed: float) -> str:
    return f"{speed / 1e9:.2f} GB/s" if speed >= 1e9 else f"{speed / 1e6:.0f} MB/s"


def _collective(answer: Mapping[str, Any]) -> str:
    each = f"a collective within a forward: [bold]{duration(answer['collective_s'])}[/]"
    if answer["metal"]:
        return f"{each}, its fence between GPU and CPU included; placement uses it"
    return f"{each}; no GPU computes here, so there are no fences: their cost appears on Metal only"


def fabric_summary(result: Mapping[str, Any]) -> str:
    return f"{duration(result['collective_s'])} a collective, measured {day_of(result['at'])}"


def bars(values: Sequence[float], color: str, *, logarithmic: bool = False) -> list[Bar]:
    """Return one bar per value, all of them positive; the largest value fills its bar."""
    largest, smallest = max(values), min(values)
    if logarithmic:
        decades = max(math.log10(largest / smallest), _LEAST_DECADES)
        shares = [1 + (math.log10(value / largest)) / (decades * 1.1) for value in values]
    else:
        shares = [value / largest for value in values]
    eighths = 8 * _BAR
    return [Bar(eighths, 0, max(round(share * eighths), 1), width=_BAR, color=color) for share in shares]


def duration(seconds: float) -> str:
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)
    value = seconds / size
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def amount(size: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
