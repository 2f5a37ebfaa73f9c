"""`mlxtp qualify`: tries every promise on the Macs of a running cluster, and prints one table of verdicts.

Most tries use the embedded model, whose right answers are known.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.markup import escape
from rich.table import Table

from ..client import FILE as AGENT_FILE
from ..client import AgentClient
from ..config import EMBEDDED_MODEL, embedded_model_path
from ..errors import Code, Exit, MlxtpError, UserError
from ..free_memory import free_bytes
from ..identity.private_files import write_private
from ..imports import metal_wheel
from ..verbs import BenchFabric, Diagnose, Serve, Status, UnloadModel
from . import bench, qualify_here
from .launch import find_served
from .options import AsJson, Home
from .printing import Console, home_of, print_json, table_of

Verdict = Literal["ok", "warning", "failed", "left out"]
COLOURS: Mapping[Verdict, str] = {"ok": "green", "warning": "yellow", "failed": "red", "left out": "dim"}

RANK = "the rank on this Mac"
AGENT = "the agent on this Mac"
ALONE = "one Mac"
FILE = "qualify.json"  #: of the last run, in the agent's home
READY_S = 180.0  # seconds until a group of the embedded model serves
IDLE_S = 60.0  # after about a minute without messages, JACCL's next large sum has been seen to fail
BACK_S = 120.0  # seconds until an agent that was killed is back
STREAMS = 4  # at once, while a rank is killed
STREAM_S = 8.0
SLOWER = 1.5  # a time longer by this factor is a warning
ITS_OWN = 0.2  # share of answers that the embedded model may get wrong on one Mac
UNLIKE = 0.3  # a speed that is less than planned by this share is a warning

_POLL_S = 0.25
_ECHOES = 16
_COUNT = "Count from 1 to 60."
_COUNTED = " ".join(map(str, range(1, 61)))
_HAYSTACKS = 6
_SENTENCES = 40  # of each haystack, without the codes


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    verdict: Verdict
    words: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bed:
    """The cluster under test."""

    agent: AgentClient  #: here
    home: Path
    macs: tuple[str, ...]  #: the members' names
    say: Callable[[str], None]  #: shows progress

    @property
    def key_heads(self) -> int:
        """Key/value heads of the embedded model, which tensor parallelism divides."""
        from ..models.inspect import read_config

        return int(read_config(embedded_model_path())["num_key_value_heads"])


def qualify(
    yes: Annotated[
        bool, typer.Option("--yes", help="Kill a rank without a question. Streams must survive it.")
    ] = False,
    with_names: Annotated[
        bool, typer.Option("--with-names", help="Keep names and addresses in the table and the file.")
    ] = False,
    kill_agent: Annotated[
        bool,
        typer.Option(
            "--kill-agent",
            help="Also kill the agent on this Mac, which the service, or you, must start again within two "
            "minutes.",
        ),
    ] = False,
    idle: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the links idle before the second measurement.")
    ] = IDLE_S,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Try in about ten minutes whether this cluster is sound: cables, links, exact answers, recovery, speed.

    Needs two Macs or more that no one else uses meanwhile. It serves the embedded model next to the others.
    The table is also kept in the agent's home as qualify.json, without names and addresses. The exit status
    is 1 if something failed.
    """
    folder = home_of(home)
    agent = AgentClient(folder)
    status = agent.send(Status())
    macs = tuple(each["name"] for each in status.get("members") or () if each.get("state") == "alive")
    if len(macs) < 2:
        raise UserError(
            f"{len(macs) or 1} Mac is here; qualify tries how several work together. `mlxtp token` on this "
            "one lets another join",
            Code.NOT_SUPPORTED,
        )
    if status["open_requests"]:
        raise UserError(f"{status['open_requests']} requests are open; wait until they have ended")
    rows: list[Row] = []
    console = Console(stderr=True, highlight=False)
    with console.status("") as shown:
        bed = Bed(agent, folder, macs, lambda text: shown.update(escape(text)))

        def may(kill: str) -> bool:
            if yes or (kill == AGENT and kill_agent):
                return kill == RANK or kill_agent
            shown.stop()
            try:
                return typer.confirm(f"Kill {kill}?", err=True)
            except typer.Abort:
                return False
            finally:
                shown.start()

        try:
            for row in tries(bed, status, idle, may):
                rows.append(row)
                if not as_json:
                    console.print(f"[{COLOURS[row.verdict]}]{row.verdict:>8}[/]  {escape(row.what)}")
        except MlxtpError as error:  # the agent is gone, so nothing restores the earlier deployment
            rows.append(Row("the deployment of before", "failed", error.detail))
    with suppress(MlxtpError):  # with the formations and the wired memory that the tries left behind
        status = AgentClient(folder).send(Status())
    everyone = tuple(dict.fromkeys([*macs, *(each["name"] for each in status["members"])]))
    hide = (lambda text: text) if with_names else hider(everyone, status, folder)
    found = report(rows, status, hide)
    found["recording"] = hider(everyone, status, folder, addresses=False)(qualify_here.recording())
    write_private(folder / FILE, (json.dumps(found, indent=1) + "\n").encode())
    if as_json:
        print_json(found)
    else:
        out = Console(highlight=False)
        out.print(shown_table(found["rows"]))
        out.print(f"The same as JSON, to paste into a report: {escape(str(folder / FILE))}", soft_wrap=True)
    if any(row.verdict == "failed" for row in rows):
        raise typer.Exit(Exit.REFUSED)


def tries(bed: Bed, status: Mapping[str, Any], idle_s: float, may: Callable[[str], bool]) -> Iterator[Row]:
    """Run all tries in order. A try that raises is a failed row, and the next one starts."""
    yield from tried("doctor", lambda: doctor(bed))
    yield from tried("kernels", lambda: kernels(bed))
    if status["model"] and status["model"] != EMBEDDED_MODEL:
        yield from tried("speed", lambda: speed(bed))
    else:
        yield Row("speed", "left out", "no model but the embedded one is served; `mlxtp serve MODEL` one")
    count = len(bed.macs)
    asked = dict([*map(echo, range(_ECHOES)), *(haystack() for _ in range(_HAYSTACKS)), (_COUNT, _COUNTED)])
    kinds = [(ALONE, "1", "auto"), ("pipeline", str(count), "pipeline"), ("tensor", str(count), "tensor")]
    with deployed(bed, status):
        for kind, nodes, parallel in kinds:
            if why := impossible(kind, count, bed.key_heads):
                yield Row(f"exact answers, {kind}", "left out", why)
            else:
                yield from tried(f"exact answers, {kind}", partial(exact, bed, kind, nodes, parallel, asked))
            if kind == ALONE:  # soon, because sudo forgets its permission after some minutes
                yield watts(bed)
        yield from links(bed, idle_s)
        for what, act in ((RANK, kill), (AGENT, kill_own_agent)):
            if may(what):
                yield from tried(f"kill of {what}", partial(act, bed))
            else:
                yield Row(f"kill of {what}", "left out", "not wanted")


def tried(what: str, act: Callable[[], Row | Sequence[Row]]) -> Sequence[Row]:
    try:
        found = act()
    except MlxtpError as error:
        return [Row(what, "failed", error.detail)]
    return [found] if isinstance(found, Row) else found


def impossible(kind: str, macs: int, key_heads: int) -> str:
    """Return why so many Macs cannot share the embedded model in this way; "" if they can."""
    if kind == "tensor" and key_heads % macs:
        return f"{key_heads} key/value heads of the embedded model do not divide among {macs} Macs"
    if kind == "pipeline" and macs > key_heads:  # it has as many layers as key/value heads
        return f"the embedded model has too few layers for {macs} Macs"
    return ""


# --- what is tried ----------------------------------------------------------------------------------------


def doctor(bed: Bed) -> list[Row]:
    bed.say("examining Macs, cables and links")
    found = bed.agent.send(Diagnose())
    rows = []
    for each in found["rows"]:
        bad = [one for one in each["findings"] if one["level"] in ("warning", "error")]
        told = [one["what"] + (f" ({one['fix']})" if one["fix"] else "") for one in bad]
        if bad:
            verdict: Verdict = "failed" if each["level"] == "error" else "warning"
            rows.append(Row(f"doctor: {each['title']}", verdict, "; ".join(told)))
    good = len(found["rows"]) - len(rows)
    return [Row("doctor", "ok", f"{good} of {len(found['rows'])} checks found no problem"), *rows]


def kernels(bed: Bed) -> Row:
    bed.say("kernels of MLX on this machine")
    plain = qualify_here.probe_kernels()
    large_s = qualify_here.probe_kernels("large")["step_s"] if plain["metal"] else 0.0
    more = plain["launches"] > plain["mlx_lm_launches"]
    words = qualify_here.kernel_summary(plain, large_s)
    return Row("kernels", "warning" if more else "ok", words, {**plain, "large_buffers_step_s": large_s})


def watts(bed: Bed) -> Row:
    bed.say("watts, idle and answering")
    try:
        idle = qualify_here.watts()
        until = time.monotonic() + STREAM_S / 2
        streams = threading.Thread(target=counting, args=(bed.agent, until), daemon=True)
        streams.start()
        busy = qualify_here.watts()
        streams.join()
    except UserError as error:
        return Row("watts", "left out", error.detail)
    words = f"{idle:.0f} W idle, {busy:.0f} W while {STREAMS} streams are answered"
    return Row("watts", "ok", words, {"idle_w": idle, "busy_w": busy})


def speed(bed: Bed) -> Row:
    from ..placement.measurements import measured
    from ..placement.planner import PlacementOptions
    from . import plan, planning

    served = find_served(bed.home, bed.agent.key)
    made = bench.measure(served, bed.agent, bed.say)
    written = next((row for row in made["rows"] if row["what"] == "write"), None)
    if written is None:
        return Row("speed", "left out", "the context is too short to measure it", made)
    deployments = bed.agent.send(Status())["deployments"]
    row = next(each for each in deployments if served.model in (each["name"], each["model"]))
    found, coordinator, results, theirs = plan.members_here(bed.home)
    nodes, pipeline = made["world_size"], any(group["split"] for group in row["groups"])
    options = PlacementOptions(
        nodes=nodes,
        parallel="pipeline" if pipeline else "tensor" if nodes > 1 else "auto",
        measured=measured(results, fast_fences=False),
        fabric_networks=theirs["fabric_networks"],
    )
    _, model = plan.named_model(row["model"], bed.home)
    return compared(written["rate"], planning.expected(model, found, coordinator, options), made)


def compared(measured: float, planned: float, figures: Mapping[str, Any]) -> Row:
    """Compare a speed with the planned one, both in tokens/s; 0 if the plan has none."""
    words = f"{measured:.3g} tokens/s"
    if not planned:
        return Row("speed", "warning", f"{words}; the plan does not know these Macs", figures)
    error = measured / planned - 1
    words += f", {planned:.3g} by plan ({error:+.0%})"
    figures = {**figures, "planned": planned, "error": error}
    return Row("speed", "ok" if error > -UNLIKE else "warning", words, figures)


def exact(bed: Bed, kind: str, nodes: str, parallel: str, asked: dict[str, str]) -> Row:
    """Ask questions with one right answer, several at a time. One Mac drops its failures from `asked`."""
    from concurrent.futures import ThreadPoolExecutor

    bed.say(f"exact answers: {kind}")
    began = time.monotonic()
    serve(bed, nodes, parallel)
    formed_s = time.monotonic() - began
    with ThreadPoolExecutor(STREAMS) as threads:
        count, told = len(asked), dict(zip(asked, threads.map(partial(ask, bed.agent), asked), strict=True))
    wrong = [text for text, right in asked.items() if told[text] != right]
    figures = {"asked": count, "wrong": len(wrong), "formed_s": round(formed_s, 2)}
    first = f": {told[wrong[0]]!r} instead of {asked[wrong[0]]!r}" if wrong else ""
    words = f"{count - len(wrong)} of {count}; {group_of(bed).get('kind')}, serving after {formed_s:.1f} s"
    bad = len(wrong) > (count * ITS_OWN if kind == ALONE else 0)
    for text in wrong if kind == ALONE else ():
        del asked[text]
    return Row(f"exact answers, {kind}", "failed" if bad else "ok", words + first * bad, figures)


def links(bed: Bed, idle_s: float) -> Iterator[Row]:
    first: dict[str, Any] = {}

    def measure(what: str) -> Row:
        bed.say(f"{what}: sums of all sizes over the links")
        answer = bed.agent.send(BenchFabric(EMBEDDED_MODEL))
        words = f"{bench.duration(answer['collective_s'])} a collective; {bench.amount(answer['sizes'][-1])} "
        words += f"take {bench.duration(answer['sums_s'][-1])}"
        figures = {name: answer[name] for name in ("backend", "kind", "collective_s", "sizes", "sums_s")}
        carried, expected = qualify_here.carried(answer)
        figures |= {"bandwidth": carried, "expected_bandwidth": expected}
        words += f"; {carried / 1e6:,.0f} MB/s" + (f" of {expected / 1e6:,.0f} expected" if expected else "")
        slower = answer["collective_s"] / first.get("collective_s", answer["collective_s"])
        first.update(figures)
        doubt = f"; {slower:.1f} times as long as before" if slower > SLOWER else ""
        if advice := qualify_here.replug(carried, expected):
            doubt = f": {advice}"
        return Row(what, "warning" if doubt else "ok", words + doubt, figures)

    yield from tried("links", lambda: measure("links"))
    if not first:
        return
    for left in range(int(idle_s), 0, -1):
        bed.say(f"the links idle: {left} s left")
        time.sleep(min(1.0, idle_s))
    yield from tried("links after a pause", lambda: measure("links after a pause"))


def kill(bed: Bed) -> list[Row]:
    """Kill the rank on this Mac while streams run. They must go on, with not one token changed."""
    bed.say("streams while a rank is killed")
    before = free_bytes()
    epoch = group_of(bed)["epoch"]
    killed = threading.Timer(STREAM_S / 4, os.kill, (own_rank(bed), signal.SIGKILL))
    killed.start()
    longest, wrong, count = counting(bed.agent, time.monotonic() + STREAM_S)
    killed.join()
    wait(bed, lambda group: group["epoch"] > epoch)
    figures = {"streams": STREAMS, "answers": count, "wrong": len(wrong), "longest_s": round(longest, 2)}
    words = f"{count} answers over {STREAMS} streams, the longest in {longest:.1f} s"
    after = free_bytes()
    lost = max(before - after, 0)
    verdict: Verdict = "warning" if lost > max(before * 0.05, 1 << 28) else "ok"
    said = f"{lost / 1e6:.0f} MB less free than before the rank was killed"
    sizes = {"before_bytes": before, "after_bytes": after}
    kept = Row("memory after an epoch", verdict, said, sizes)
    return [_survived(RANK, words, wrong, figures), kept]


def kill_own_agent(bed: Bed) -> Row:
    """Kill this Mac's agent, and wait until it serves again. Its own clients lose their answers."""
    bed.say("the agent of this Mac was killed; it must be started again")
    killed, began = agent_pid(bed.home), time.monotonic()
    os.kill(killed, signal.SIGKILL)
    while True:
        if time.monotonic() > began + BACK_S:
            raise UserError(f"the agent was not back {BACK_S:g} s after it was killed")
        with suppress(OSError, ValueError, UserError):
            if agent_pid(bed.home) != killed:
                again = replace(bed, agent=AgentClient(bed.home))
                group_of(again)
                break
        time.sleep(_POLL_S)
    wait(again, lambda group: len(group["members"]) > 1)
    back_s = time.monotonic() - began
    _, wrong, count = counting(again.agent, time.monotonic() + 1.0)
    figures = {"back_s": round(back_s, 2), "answers": count, "wrong": len(wrong)}
    return _survived(AGENT, f"several Macs served again after {back_s:.1f} s", wrong, figures)


def _survived(what: str, words: str, wrong: Sequence[str], figures: Mapping[str, Any]) -> Row:
    said = "; ".join([words, *wrong[:1]])
    return Row(f"kill of {what}", "failed" if wrong else "ok", said, figures)


# --- the embedded model: served, asked --------------------------------------------------------------------


@contextmanager
def deployed(bed: Bed, status: Mapping[str, Any]) -> Iterator[None]:
    """Restore the embedded model's deployment at the end: as it was before, or none."""
    was = next((each for each in status["deployments"] if each["name"] == EMBEDDED_MODEL), None)
    try:
        yield
    finally:
        agent = AgentClient(bed.home)  # it may have been started again
        if was is None:
            agent.send(UnloadModel(EMBEDDED_MODEL))
        else:
            replicas, parallel = str(was["replicas"]["wanted"] or "all"), was["parallel"] or "auto"
            agent.send(Serve(EMBEDDED_MODEL, was["nodes"], parallel, was["split"], replicas))


def serve(bed: Bed, nodes: str, parallel: str) -> None:
    bed.agent.send(Serve(EMBEDDED_MODEL, nodes=nodes, parallel=parallel, split="auto", replicas="1"))
    pipeline = parallel == "pipeline"
    wait(bed, lambda group: len(group["members"]) == int(nodes) and bool(group["split"]) is pipeline)


def wait(bed: Bed, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    until = time.monotonic() + READY_S
    while not (group := group_of(bed)) or group["state"] != "ready" or not wanted(group):
        if time.monotonic() > until:
            why = group.get("why") or group.get("state") or "no group forms"
            raise UserError(f"the embedded model is not served within {READY_S:g} s: {why}")
        time.sleep(_POLL_S)


def group_of(bed: Bed) -> Mapping[str, Any]:
    rows = [each for each in bed.agent.send(Status())["deployments"] if each["name"] == EMBEDDED_MODEL]
    return next((group for each in rows for group in each["groups"]), {})


def own_rank(bed: Bed) -> int:
    pids = bed.agent.send(Status())["processes"].get(group_of(bed).get("id"))
    if not pids:
        raise UserError("this Mac has no rank of the embedded model; run this on a Mac that has one")
    return int(pids[0])


def agent_pid(home: Path) -> int:
    return int(json.loads((home / AGENT_FILE).read_text())["pid"])


def ask(agent: AgentClient, text: str) -> str:
    """Return the answer, or the message of an error."""
    message = {"role": "user", "content": text}
    body = {"model": EMBEDDED_MODEL, "messages": [message], "temperature": 0, "max_tokens": 300}
    try:
        return "".join(piece.text for piece in agent.ask(body))
    except MlxtpError as error:
        return error.detail


def counting(agent: AgentClient, until: float) -> tuple[float, list[str], int]:
    """Have the model count until then (monotonic). Return the longest time (s), wrong answers, and count."""
    answers: list[tuple[float, str]] = []

    def stream(text: str) -> None:
        while (began := time.monotonic()) < until:
            said = ask(agent, text)
            answers.append((time.monotonic() - began, said))

    bench.in_threads(stream, [_COUNT] * STREAMS)
    wrong = [f"{said[:80]!r}" for _, said in answers if said != _COUNTED]
    return max(answers)[0], wrong, len(answers)


def echo(number: int) -> tuple[str, str]:
    """Return a request to repeat a new text, and the right answer."""
    letters = string.ascii_uppercase + string.digits
    text = "-".join("".join(secrets.choice(letters) for _ in range(7)) for _ in range(1 + number % 4))
    return f"Repeat exactly: {text}", text


def haystack() -> tuple[str, str]:
    """Return a long text with codes that asks for one of them, and the right answer."""
    names, letter = ("Ada", "Bob", "Eve"), partial(secrets.choice, string.ascii_uppercase)
    codes = {name: f"{letter()}{letter()}-{secrets.randbelow(9000) + 1000}" for name in names}
    sentences = [f"The code for {name} is {code}." for name, code in codes.items()]
    sentences += ["The sky is grey today."] * _SENTENCES
    secrets.SystemRandom().shuffle(sentences)
    name = secrets.choice(names)
    return f"{' '.join(sentences)} What is the code for {name}?", codes[name]


# --- the report -------------------------------------------------------------------------------------------

_ADDRESS = re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b|\b[0-9a-fA-F]{0,4}(:[0-9a-fA-F]{0,4}){3,7}\b")


def hider(
    macs: Sequence[str], status: Mapping[str, Any], home: Path, *, addresses: bool = True
) -> Callable[[str], str]:
    """Return a function that replaces names, ids, home folders and perhaps addresses in a text."""
    names = {name: f"Mac {number}" for number, name in enumerate(macs, 1)}
    names |= {
        str(each["node_id"]): names[each["name"]] for each in status["members"] if each["name"] in names
    }
    names |= {str(Path.home()): "~", str(home): "HOME"}
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    words = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

    def hide(text: str) -> str:
        text = words.sub(lambda found: names[found[0]], text)
        return _ADDRESS.sub("ADDRESS", text) if addresses else text

    return hide


def report(rows: Sequence[Row], status: Mapping[str, Any], hide: Callable[[str], str]) -> dict[str, Any]:
    """Return the report as JSON. Speeds are in tokens a second, times in seconds, sizes in bytes."""
    found = {
        "format": 1,
        "at": int(time.time()),
        "versions": status["versions"],
        "macs": [
            {name: each.get(name) for name in ("name", "chip", "memory_bytes", "formations")}
            for each in status["members"]
        ],
        "mlx_metal": metal_wheel(),
        "left_wired": status.get("left_wired"),
        "rows": [asdict(row) for row in rows],
    }
    return cast("dict[str, Any]", _hidden(found, hide))


_OWN_WORDS = frozenset({"what", "verdict", "chip"})  #: Fields without names, though their words may look so.


def _hidden(value: Any, hide: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: each if key in _OWN_WORDS else _hidden(each, hide) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(each, hide) for each in value]
    return hide(value) if isinstance(value, str) else value


def shown_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = table_of("verdict", "try", "result", wrapped=("result",))
    for row in rows:
        verdict = f"[{COLOURS[row['verdict']]}]{row['verdict']}[/]"
        table.add_row(verdict, escape(row["what"]), escape(row["words"]))
    return table
