"""Write what docs/ has from the code: settings, commands, families, short names, markups, faults.

    make reference

`tests/test_reference.py` compares them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any

from typer.main import get_command

from mlxtp.cli.main import app
from mlxtp.description import CacheCapabilities
from mlxtp.diagnostics.rows import FAULTS, MAC, ROWS
from mlxtp.engine.families import DIVIDE
from mlxtp.errors import Exit
from mlxtp.model_config import (
    ALSO_CALLED,
    MTP_PLACES,
)
from mlxtp.placement.faults import Fault
from mlxtp.placement.model_shape import words_of
from mlxtp.settings import (
    BY_KEY,
    CLUSTER,
    ENDPOINT,
    GENERAL,
    LIMITS,
    OTHER_VARIABLES,
    SETTINGS,
    TUNING,
    Setting,
    variable_of,
)
from mlxtp.short_names import SHORT_NAMES
from mlxtp.text.markups import CALLS, THOUGHTS
from tests.engine.described_models import EVERY, description, families_of_pipelines
from tests.engine.families import FAMILIES, NAMED, OWN
from tests.engine.mlx_lm_sources import shardable_families

DOCS = Path(__file__).parents[1] / "docs"
GENERATED = "<!-- Written by `make reference`. -->"

SETTINGS_HEAD = """# Settings

{generated}

What `mlxtp node` runs with. A flag counts before an environment variable, that before the file, and that before
the default. The file is `config.toml` in the home folder (`mlxtp config path` prints where); mlxtp reads it when
it starts, and never writes it. There is none until you make one.

```toml
# config.toml
http = "0.0.0.0:52415"
allowed_origins = ["http://localhost:3000"]
kv_bytes = "8GB"

[limits]
queue = 120

[rdma]
studio = "rdma_en5"
```

Numbers and `true` or `false` stand there without quotes. An unknown key is an error, with the nearest
that is known, or with what holds instead of a former one; a variable that begins with `MLXTP_` and means nothing is a
warning. In a variable a list has
commas, and a switch is `yes` or `no`; an empty one counts as not set. Each switch has two flags, such as `--alone`
and `--no-alone`; below stands the one that changes something.

`mlxtp config show` prints what holds, in the form of the file: what is a default is a comment. With `--origin` each
line says where its value comes from. What a running agent uses instead, because it was started with flags or
before the file changed, stands at the end.

**=** marks what has to be the same on all Macs of a cluster.
"""

INTRODUCTIONS: Mapping[str, str] = {
    GENERAL: "",
    CLUSTER: "",
    ENDPOINT: "",
    TUNING: "",
    LIMITS: """What one Mac takes at once, and how long it may take; times in seconds. They stand in the table
`[limits]` of the file and have variables, but no flags. How often agents and ranks look after each other, and when they take
each other for lost, is not for setting: those times only make sense together.
""",
}

VARIABLES = """## Not in the file

| variable | what |
|---|---|
"""


def settings_page() -> str:
    """Return docs/settings.md."""
    parts = [SETTINGS_HEAD.format(generated=GENERATED)]
    for panel, introduction in INTRODUCTIONS.items():
        rows = [_row(setting) for setting in SETTINGS if setting.panel == panel]
        head = "| key | flag | variable | what | default |\n|---|---|---|---|---|\n"
        parts.append("\n".join(filter(None, (f"## {panel}\n", introduction, head + "\n".join(rows) + "\n"))))
    parts.append(VARIABLES + "".join(f"| `{name}` | {what} |\n" for name, what in OTHER_VARIABLES.items()))
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    same = " **=**" if setting.same_on_all else ""
    cells = (
        f"`{setting.key}`{same}",
        _flag(setting),
        f"`{variable_of(setting.key)}`",
        setting.help,
        setting.default_words,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flag(setting: Setting) -> str:
    often = ", may be repeated" if setting.repeatable else ""
    name = setting.typed(setting.default is not True)
    return f"`{' '.join(filter(None, (name, setting.kind.metavar)))}`{often}" if setting.option else ""


COMMANDS_HEAD = """# Commands

{generated}

`mlxtp COMMAND --help` says the same in a terminal. Words mean the same everywhere:

- `--home DIR` names an agent that was started with a `--home`; `MLXTP_HOME` does it for every command.
- `--json` prints one JSON object on stdout and nothing else there (`status --watch` one a line). Where a command
  cannot do what it was asked, that is `{{"error": {{"code": …, "message": …}}}}`; [doctor.md](doctor.md#errors) has the codes.
- Without `--json`, what was asked for goes to stdout, and all else, such as errors and progress, to stderr.
- A command that asks the agent says so when none runs, and how to start one; the code is `not_ready`.

| exit status | meaning |
|---|---|
{statuses}
A rank process, which only agents start, has statuses of its own: [doctor.md](doctor.md#errors).
"""

STATUSES: Mapping[Exit, str] = {
    Exit.DONE: "done; also `node`, `demo`, `chat` and `status --watch` that were ended by Ctrl-C, as they are meant to be",
    Exit.REFUSED: "it could not be done, for a reason that was said: no agent runs, a setting is wrong, no plan is possible",
    Exit.MISTYPED: "the command or an option was typed wrong; also of `node`, when a setting is wrong wherever it stands",
    Exit.INTERRUPTED: "ended by Ctrl-C before it was done",
}


SETTINGS_ARE_OPTIONS = {
    "mlxtp node": "Every setting is an option too: [settings.md](settings.md).",
    "mlxtp demo": "The settings `--model`, `--http` and `--ranks` are options too: [settings.md](settings.md).",
}


def commands_page() -> str:
    """Return docs/commands.md."""
    statuses = "".join(f"| {status:d} | {STATUSES[status]} |\n" for status in Exit)
    parts = [COMMANDS_HEAD.format(generated=GENERATED, statuses=statuses)]
    parts += [_command(words, command) for words, command in _leaves(get_command(app), "mlxtp")]
    return "\n".join(parts)


def _leaves(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", {})
    if not below:
        yield words, command
    for name, each in below.items():
        yield from _leaves(each, f"{words} {name}")


def _command(words: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [
        each
        for each in command.params
        if each.param_type_name == "option"
        and each.opts != ["--help"]
        and not (words in SETTINGS_ARE_OPTIONS and each.name in BY_KEY)
    ]
    usage = [words, *map(_argument, arguments), "[OPTIONS]" if options else ""]
    parts = [f"## {words}\n", f"`{' '.join(filter(None, usage))}`\n", f"{command.help.strip()}\n"]
    if words in SETTINGS_ARE_OPTIONS:
        parts.append(f"{SETTINGS_ARE_OPTIONS[words]}\n")
    rows = [f"| `{_cell(_argument(each))}` | {_cell(each.help)} |" for each in arguments]
    rows += [f"| `{_cell(_named(each))}` | {_cell(each.help)} |" for each in options]
    if rows:
        parts.append("| | |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _named(option: Any) -> str:
    metavar = "" if option.is_flag else option.metavar or ("DIR" if option.name == "home" else "TEXT")
    return f"{', '.join(sorted(option.opts, key=len))} {metavar}".strip()


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


FAMILIES_HEAD = """# Families

{generated}

A family is what a model's `config.json` calls `model_type`. These can be shared by several Macs:

- **tensor**: each rank has a part of each layer. `mlx-lm`: it divides the layers itself. `mlxtp`: mlx-lm has no way, and
  `mlxtp/engine/families.py` has one. Sizes have to divide by the number of ranks ([placement.md](placement.md)).
- **pipeline**: each rank has whole layers.
- **caches**: the kind of its KV caches, in the second table. **reused**: where a later prompt can begin with them. **drafts**: whether
  several tokens are guessed ahead (speculation). `MTP head`: that of the model proposes some, where its files have one.
- **tried**: how tests compare it with mlx-lm alone on the same weights, in models of a few layers with random weights. `parts`: on
  two ranks of a TCP ring, a batch of two rows, prompt and steps. `chunks`: on two, and some on four, prompts of unlike lengths in
  several chunks, then in one batch, plain and in 4 and 8 bits. `types`: bfloat16, 4 and 8 bits too. `stages`: cut into two and three
  stages. No family has run on Macs yet.

"""

FAMILIES_NOTES = """
Some parts are whole on each rank: routers; Gemma 4's embeddings of single layers (E2B, E4B), and its gates behind them; in Nemotron-H the
projections to and from a smaller size around experts. Mamba mixers are divided by their groups, gated linear attention by its key heads. If
there are fewer KV heads than ranks, families of `mlxtp` and Qwen 3.5 have the same head on several ranks. OLMo 2 and 3 and MiniMax add up
over the ranks for the norms of queries and keys: two small sums more a layer. The first OLMo needs a package that mlxtp does not
install, so it is refused.

## Caches

What the engine leaves out with each kind of caches. `mlxtp plan` says it for any model.

"""


def families_page() -> str:
    """Return docs/families.md."""
    known = sorted(shardable_families() | DIVIDE.keys() | families_of_pipelines(), key=str.lower)
    head = FAMILIES_HEAD.format(generated=GENERATED)
    rows = [
        "| family | tensor | pipeline | caches | reused | drafts | tried |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [_family(family) for family in known]
    return head + "\n".join(rows) + "\n" + FAMILIES_NOTES + "\n".join(_kinds(known)) + "\n"


def _family(family: str) -> str:
    also = [f"`{name}`" for name, same in ALSO_CALLED.items() if same == family]
    name = f"`{family}`" + (f", also {', '.join(also)}" if also else "")
    tensor = "mlxtp" if family in DIVIDE else "mlx-lm" if family in shardable_families() else "–"
    kinds = _caches(family)
    caches = ", or ".join(dict.fromkeys(words_of(kind).name for kind in kinds)) or "–"
    ways = {"parts": FAMILIES, "chunks": OWN, "types": NAMED, "stages": families_of_pipelines()}
    tried = ", ".join(way for way, families in ways.items() if family in families)
    pipeline = "yes" if family in ways["stages"] else "–"
    reused = ", or ".join(dict.fromkeys(map(_reused, kinds))) or "–"
    drafts = "yes" if any(kind.rolls_back for kind in kinds) else "–"
    if family in MTP_PLACES:
        drafts = "yes, MTP head"
    return f"| {name} | {tensor} | {pipeline} | {caches} | {reused} | {drafts} | {tried or '–'} |"


def _caches(family: str) -> list[CacheCapabilities]:
    """Return the kinds of caches that models of a family have, of those that tests describe."""
    models = [name for name, config in EVERY.items() if config.get("model_type", name) == family]
    return list(dict.fromkeys(description(name).caches for name in models))


def _reused(kind: CacheCapabilities) -> str:
    return "from any token on" if kind.truncatable else "whole, at chosen places"


def _kinds(families: Iterable[str]) -> Iterator[str]:
    yield "| caches | reused by later prompts | off | because |"
    yield "|---|---|---|---|"
    every = (kind for family in families for kind in _caches(family))
    for words, reused in sorted({(words_of(kind), _reused(kind)) for kind in every}, key=str):
        yield f"| {words.name} | {reused} | {words.off or '–'} | {words.why or '–'} |"


SHORT_NAMES_HEAD = """# Short names

{generated}

`mlxtp serve llama3.2:3b` serves `mlx-community/Llama-3.2-3B-Instruct-4bit`. `serve`, `unload`, `pull`, `remove`,
`verify`, `plan`, `chat`, `bench` and `key create` take such names, and so do `--model`, `--draft-model` and the `model` of a request. Names
with a colon are Ollama's, the others are those of exo 1.0, written small. Capitals do not matter, and `:latest` at the end is left out.

- The model is of the same family and size. Its quantization, and sometimes its release, are not those of Ollama.
- Exact names come first: a folder of that name, also in a `--model-folder`, or a deployment.
- Replies, lists and `mlxtp status` have the name of the repository.
- A name that is not here is refused, with those that are spelled much like it.

| short name | repository |
|---|---|
"""


def short_names_page() -> str:
    """Return docs/short-names.md."""
    rows: dict[str, list[str]] = {}
    for name, full in SHORT_NAMES.items():
        rows.setdefault(full, []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | `{full}` |" for full, names in rows.items()]
    return SHORT_NAMES_HEAD.format(generated=GENERATED) + "\n".join(lines) + "\n"


MARKUPS = ("<!-- Markups, written by `make reference`. -->", "<!-- End of the markups. -->")

MARKUPS_PART = """
**Thoughts**: {thoughts}.

**Calls**: {calls}.
"""


def api_page() -> str:
    """Return docs/api.md with the families whose markups are read in it."""
    begin, end = MARKUPS
    before, rest = (DOCS / "api.md").read_text().split(begin)
    part = MARKUPS_PART.format(
        thoughts="; ".join(row.families for row in THOUGHTS), calls="; ".join(row.families for row in CALLS)
    )
    wrapped = "\n".join(textwrap.fill(line, 140, break_on_hyphens=False) for line in part.splitlines())
    return f"{before}{begin}\n{wrapped}\n\n{end}{rest.split(end)[1]}"


FAULTS_OF = ("<!-- Faults, written by `make reference`. -->", "<!-- End of the faults. -->")


def doctor_page() -> str:
    """Return docs/doctor.md with the rows of the doctor and the faults in it."""
    begin, end = FAULTS_OF
    before, rest = (DOCS / "doctor.md").read_text().split(begin)
    heads = {
        row.id: f"### {row.title}\n\n`{row.id}`{' (macOS)' if row.systems == MAC else ''}: {row.why}."
        for row in ROWS
    } | {"": "### Groups over JACCL\n\nIn errors and logs, beforehand or afterwards:"}
    parts = [
        f"{head}\n\n| fault | it says | why it matters | what to do |\n|---|---|---|---|\n"
        + "".join(_fault(fault) for fault in FAULTS if fault.row == row)
        for row, head in heads.items()
    ]
    return f"{before}{begin}\n\n{chr(10).join(parts)}\n{end}{rest.split(end)[1]}"


def _fault(fault: Fault[Any]) -> str:
    level = f", {fault.level}" if fault.row else ""
    marks = f"`{fault.id}`{level}{' **×**' if fault.stops_rdma else ''}"
    what, why, fix = (_cell(_with_words(text)) for text in (fault.what, fault.why, fault.fix))
    if isinstance(fault.test, partial):
        what = f"{_code(fault.test.args[0])} means: {what}"
    return f"| {marks} | {what} | {why} | {fix} |\n"


def _with_words(template: str) -> str:
    """Return a text of the table of faults with ⟨words⟩ for its fields, each by the last part of its name."""
    parts = Formatter().parse(template)
    named = (
        (said, re.split(r"[.\[]", re.sub(r"\[\d+\]", "", field).rstrip("]"))[-1] if field else "")
        for said, field, *_ in parts
    )
    return "".join(said + (f"⟨{name.replace('_', ' ')}⟩" if name else "") for said, name in named)


def _code(text: str) -> str:
    """Return a text as code in a table. A new line is `⏎`."""
    fence = "````" if "`" in text else "`"
    return f"{fence}{_cell(text.replace(chr(10), '⏎'))}{' ' * (len(fence) > 1)}{fence}"


PAGES: Mapping[str, Callable[[], str]] = {
    "api.md": api_page,
    "doctor.md": doctor_page,
    "settings.md": settings_page,
    "commands.md": commands_page,
    "families.md": families_page,
    "short-names.md": short_names_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
