"""Write the pages of docs/ that are made from the code: docs/settings.md, docs/commands.md, docs/wire.md.

In docs/engine.md that is the table of families.

    make reference

`tests/test_reference.py` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

from mlxtp.cli.main import app
from mlxtp.errors import Exit
from mlxtp.placement.cache_kinds import CacheTraits, traits_of
from mlxtp.placement.model_shape import SHARDABLE
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
)

from .wire_reference import render

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
that is known; a variable that begins with `MLXTP_` and means nothing is a warning. In a variable a list has
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
        f"`{setting.variable}`",
        setting.help,
        setting.default_words,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flag(setting: Setting) -> str:
    often = ", may be repeated" if setting.repeatable else ""
    name = setting.typed(setting.default is not True)
    return f"`{' '.join(filter(None, (name, setting.metavar)))}`{often}" if setting.option else ""


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


FAMILIES_BEGIN, FAMILIES_END = "<!-- families, written by `make reference` -->\n", "<!-- end -->\n"


def engine_page() -> str:
    """Return docs/engine.md, with its table of families."""
    before, rest = (DOCS / "engine.md").read_text().split(FAMILIES_BEGIN)
    return before + FAMILIES_BEGIN + _families() + FAMILIES_END + rest.split(FAMILIES_END)[1]


def _families() -> str:
    by_kind: dict[CacheTraits, list[str]] = {}
    for family in sorted(SHARDABLE):
        by_kind.setdefault(traits_of(family), []).append(f"`{family}`")
    rows = ["| families | KV caches | reused | off | because |", "|---|---|---|---|---|"]
    for kind, families in by_kind.items():
        names = ", ".join(families)
        reused = "from any token on" if kind.cuttable else "whole, at chosen places"
        rows.append(f"| {names} | {kind.name} | {reused} | {kind.off or '–'} | {kind.why or '–'} |")
    return "\n".join(rows) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "commands.md": commands_page,
    "engine.md": engine_page,
    "wire.md": render,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
