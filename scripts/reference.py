"""Write what docs/ has from the code: settings, commands, families, short names, markups, faults.

    make reference

`tests/repository/test_reference.py` compares them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple, get_args

from typer.main import get_command

from mlxtp import verbs
from mlxtp.api import field_names
from mlxtp.api.app import adapters
from mlxtp.api.dialects.ollama_request import OllamaOptions
from mlxtp.api.dialects.openai import StreamOptions
from mlxtp.api.request_body import BodySchema
from mlxtp.cli.main import app
from mlxtp.cli.options import AsJson, Home
from mlxtp.cli.service import DryRun
from mlxtp.description import CacheCapabilities
from mlxtp.diagnostics.rows import FAULTS, MAC, ROWS, CheckRow
from mlxtp.engine.families import COPIES_KV_HEADS, DIVIDE
from mlxtp.errors import Exit
from mlxtp.model_config import (
    ALSO_CALLED,
    MTP_PLACES,
    VLM_FAMILIES,
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
from tests.engine import vlm_families
from tests.engine.described_models import EVERY, description, families_of_pipelines
from tests.engine.mlx_lm_sources import shardable_families

DOCS = Path(__file__).parents[1] / "docs"
GENERATED = "<!-- Written by `make reference`. -->"

SETTINGS_HEAD = """# Settings

{generated}

`mlxtp node` takes each setting from its flag, else from its environment variable, else from `config.toml` in the
home folder, else it has the default. You create the file, at the path that `mlxtp config path` prints; mlxtp reads it when it
starts, and never writes it.

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

- Numbers, `true` and `false` have no quotes. An unknown key is an error that names the nearest known one, if any is near.
- In a variable, a list has commas, a switch is `yes` or `no`, and an empty value counts as not set. An unknown variable
  that begins with `MLXTP_` is a warning.
- Each switch has two flags, such as `--alone` and `--no-alone`; the tables have the flag that changes the default.
- `mlxtp config show` prints the settings in the form of the file, with defaults as comments; `--origin` adds the source of
  each. At the end are the values that a running agent uses instead, because of its flags or an earlier file.

**=** marks settings that must be the same on all Macs of a cluster.
"""

INTRODUCTIONS: Mapping[str, str] = {
    GENERAL: "",
    CLUSTER: "",
    ENDPOINT: "",
    TUNING: "",
    LIMITS: """Limits of one Mac, in the table `[limits]` of the file; times are in seconds. They have no flags. The times after which
agents and ranks count as lost cannot be set, since they only make sense together.
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

`mlxtp COMMAND --help` prints the same. Everywhere:

- `--home DIR` names the agent, if it was started with a `--home`; `MLXTP_HOME` does it for every command.
- `--json` prints one JSON object on stdout and nothing else there (`status --watch` one a line). An error is
  `{{"error": {{"code": …, "message": …}}}}`, with one of [these codes](doctor.md#errors).
- `--dry-run` only prints what would be written and run, and needs no sudo.
- `NODE` is a Mac's name, or the beginning of its node id: see `mlxtp cluster members`.
- Without `--json`, the result goes to stdout; errors and progress go to stderr.
- A command that needs a running agent says how to start one; the code is `not_ready`.

| exit status | meaning |
|---|---|
{statuses}
Rank processes have [statuses of their own](doctor.md#errors).
"""

STATUSES: Mapping[Exit, str] = {
    Exit.DONE: "done; `node`, `demo`, `chat` and `status --watch` also end with it after Ctrl-C",
    Exit.REFUSED: "not done, for the reason printed: no agent runs, a setting is wrong, no plan is possible",
    Exit.MISTYPED: "the command or an option is wrong; for `node`, also any wrong setting",
    Exit.INTERRUPTED: "Ctrl-C, before it was done",
}


SETTINGS_ARE_OPTIONS = {
    "mlxtp node": "Every setting is an option too: [settings.md](settings.md).",
    "mlxtp demo": "The settings `--model`, `--http` and `--ranks` are options too: [settings.md](settings.md).",
}


#: Help of the options and arguments that commands share, and that the head of the page explains.
SHARED = {get_args(each)[1].help for each in (Home, AsJson, DryRun)} | {verbs.MEMBER}


def commands_page() -> str:
    """Return docs/commands.md."""
    statuses = "".join(f"| {status:d} | {STATUSES[status]} |\n" for status in Exit)
    parts = [COMMANDS_HEAD.format(generated=GENERATED, statuses=statuses)]
    helps: dict[str, str] = {}
    for words, command in _leaves(get_command(app), "mlxtp"):
        first = helps.setdefault(command.help, words)
        link = f"The same as [`{first}`](#{first.replace(' ', '-')}).\n"
        parts.append(_command(words, command) if first == words else f"## {words}\n\n{link}")
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
    own = [each for each in options if each.help not in SHARED]
    shared = [f"[{_named(each)}]" for each in options if each.help in SHARED]
    usage = [words, *map(_argument, arguments), "[OPTIONS]" if own else "", *shared]
    parts = [f"## {words}\n", f"`{' '.join(filter(None, usage))}`\n", f"{command.help.strip()}\n"]
    if words in SETTINGS_ARE_OPTIONS:
        parts.append(f"{SETTINGS_ARE_OPTIONS[words]}\n")
    rows = [f"- `{_argument(each)}`: {each.help}\n" for each in arguments if each.help not in SHARED]
    rows += [f"- `{_named(each)}`: {each.help}\n" for each in own]
    return "\n".join([*parts, "".join(rows)] if rows else parts)


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _named(option: Any) -> str:
    usual = "DIR" if option.name == "home" else "N" if isinstance(option.default, int) else "TEXT"
    metavar = "" if option.is_flag else option.metavar or usual
    return f"{', '.join(sorted(option.opts, key=len))} {metavar}".strip()


FAMILIES = ("<!-- Families, written by `make reference`. -->", "<!-- End of the families. -->")
NAMES = ("<!-- Short names, written by `make reference`. -->", "<!-- End of the short names. -->")
WAYS = {
    (True, True): "tensor, pipeline", (False, True): "pipeline", (True, False): "tensor", (False, False): "one Mac",
}  # fmt: skip


def models_page() -> str:
    """Return docs/models.md with the families, what their caches allow, and the short names in it."""
    page = _filled("models.md", FAMILIES, "\n".join(_families()))
    return _filled(page, NAMES, "\n".join(_short_names()))


def _families() -> Iterator[str]:
    """Yield a table of families by caches and by how Macs share them, and one of the caches."""
    vlm = vlm_families.recorded()
    tensor, pipeline = shardable_families() | DIVIDE.keys(), families_of_pipelines()
    tensor |= {family for family, of in vlm.items() if "unsharable" not in of}
    pipeline |= {family for family, of in vlm.items() if "uncuttable" not in of}
    known = sorted(tensor | pipeline | vlm.keys(), key=str.lower)
    rows: dict[tuple[str, str], list[str]] = {}
    for family in known:
        for name in dict.fromkeys(_named_caches(kind).name for kind in _caches(family)) or ["not known"]:
            rows.setdefault((name, WAYS[family in tensor, family in pipeline]), []).append(_family(family))
    yield "| caches | shared as | families |"
    yield "|---|---|---|"
    yield from (f"| {name} | {shared} | {', '.join(rows[name, shared])} |" for name, shared in sorted(rows))
    yield "\n### Caches\n"
    named = sorted({_named_caches(kind) for each in known for kind in _caches(each)})
    off = [each.off for each in named if each.off]
    always = [part for part in off[0] if all(part in each for each in off)]
    yield "A kind of caches decides what speeds up a model of it; `mlxtp plan MODEL` prints this for any model."
    yield f"With all kinds that have a reason below, {' and '.join(always)} {'is' if len(always) == 1 else 'are'} off.\n"
    yield "| caches | a later prompt begins | also off | because |"
    yield "|---|---|---|---|"
    for each in named:
        also = ", ".join(part for part in each.off if part not in always)
        yield f"| {each.name} | {each.begins} | {also or '–'} | {each.why or '–'} |"


def _family(family: str) -> str:
    marks = ("†" if family in MTP_PLACES else "") + ("‡" if family in COPIES_KV_HEADS else "")
    marks += "§" if family in VLM_FAMILIES else ""
    also = ", ".join(f"`{name}`" for name, same in ALSO_CALLED.items() if same == family)
    return f"`{family}`{marks}{f' ({also})' if also else ''}"


def _caches(family: str) -> list[CacheCapabilities]:
    """Return the kinds of caches that models of a family have, of those that tests describe."""
    if family in VLM_FAMILIES:
        return [vlm_families.caches_of(family)]
    models = [name for name, config in EVERY.items() if config.get("model_type", name) == family]
    return list(dict.fromkeys(description(name).caches for name in models))


class _Caches(NamedTuple):
    """A row of the table of caches."""

    name: str
    begins: str
    off: tuple[str, ...]
    why: str


def _named_caches(kind: CacheCapabilities) -> _Caches:
    words = words_of(kind)
    alone = kind.truncatable and not kind.batched  # has the name of the caches that lack nothing
    begins = "after any token" if kind.truncatable else "where a copy was kept"
    off = tuple(words.off.split(", ")) if words.off else ()
    return _Caches(f"{words.name}{', one at a time' if alone else ''}", begins, off, words.why)


def _short_names() -> Iterator[str]:
    rows: dict[str, list[str]] = {}
    for name, full in SHORT_NAMES.items():
        rows.setdefault(full, []).append(f"`{name}`")
    yield "| short name | repository of `mlx-community` |"
    yield "|---|---|"
    yield from (
        f"| {', '.join(names)} | `{full.removeprefix('mlx-community/')}` |" for full, names in rows.items()
    )


def _filled(page: str, markers: tuple[str, str], part: str) -> str:
    """Return a page, by its name or its text, with this part between two markers."""
    begin, end = markers
    text = (DOCS / page).read_text() if page.endswith(".md") else page
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{part}\n\n{end}{rest.split(end)[1]}"


MARKUPS = ("<!-- Markups, written by `make reference`. -->", "<!-- End of the markups. -->")

FIELDS = ("<!-- Fields, written by `make reference`. -->", "<!-- End of the fields. -->")
MARKUPS_PART = """**Thoughts and calls**: {both}.

**Thoughts also**: {thoughts}.

**Calls also**: {calls}."""


def api_page() -> str:
    """Return docs/api.md with the families whose markups are read in it."""
    thoughts, calls = ([row.families for row in rows] for rows in (THOUGHTS, CALLS))
    part = MARKUPS_PART.format(
        both="; ".join(each for each in thoughts if each in calls),
        thoughts="; ".join(each for each in thoughts if each not in calls),
        calls="; ".join(each for each in calls if each not in thoughts),
    )
    wrapped = "\n".join(textwrap.fill(line, 140, break_on_hyphens=False) for line in part.splitlines())
    return _filled(_filled("api.md", MARKUPS, wrapped), FIELDS, "\n".join(_fields()))


def taken_fields() -> dict[str, set[str]]:
    """Return the names of fields that each API takes, with other names of the same."""
    bodies = [each.body for adapter in adapters() for each in adapter.endpoints if each.body]
    found: dict[str, set[str]] = {api: set() for api in field_names.APIS}
    for body in (*bodies, OllamaOptions, StreamOptions):
        if not issubclass(body, BodySchema) or not body.api:
            continue
        for name, field in body.model_fields.items():
            names = getattr(field.validation_alias, "choices", [field.alias or name])
            found[body.api] |= set(names)
    return found


def _fields() -> Iterator[str]:
    """Yield a table of fields: those that APIs take, by these APIs, and then the others, by reason."""
    own_section = ("embeddings", "ollama_embed", "rerank")
    where = {api: words for api, words in field_names.APIS.items() if api not in own_section}
    names = {api: fields for api, fields in taken_fields().items() if api in where}
    own = {
        (api, name) for row in field_names.OTHERS for api in row.apis.split() for name in row.names.split()
    }
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(set().union(*names.values())):
        if apis := tuple(api for api in where if name in names[api] and (api, name) not in own):
            rows.setdefault(apis, []).append(name)
    yield "| fields | in | |"
    yield "|---|---|---|"
    yield from (
        f"| {_codes(rows[apis])} | {', '.join(map(where.get, apis))} | taken |" for apis in sorted(rows)
    )
    for row in field_names.OTHERS:
        apis = ", ".join(where[api] for api in row.apis.split()) or "others"
        verdict = "refused" if row.refused else "ignored"
        yield f"| {_codes(row.names.split())} | {apis} | {verdict}: {row.why} |"


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


LONG = 6  #: Words of a remedy that the page has once, though several faults have it.
FAULTS_OF = ("<!-- Faults, written by `make reference`. -->", "<!-- End of the faults. -->")


def doctor_page() -> str:
    """Return docs/doctor.md with the rows of the doctor and the faults in it."""
    heads = {row.id: _head(row) for row in ROWS} | {"": "### Groups over JACCL\n\nIn errors and logs:"}
    parts = [
        f"{head}\n\n" + "".join(_fault(fault) for fault in FAULTS if fault.row == row)
        for row, head in heads.items()
    ]
    return _filled("doctor.md", FAULTS_OF, "\n".join(parts).rstrip())


def _head(row: CheckRow) -> str:
    known = row.id == row.title.lower().replace(" ", "-")
    words = [f"`{row.id}`"] * (not known) + ["on macOS"] * (row.systems == MAC)
    return "\n\n".join(filter(None, (f"### {row.title}", ", ".join(words))))


def _fault(fault: Fault[Any]) -> str:
    level = f", {fault.level}" if fault.row else ""
    what, why, fix = (_with_words(text) for text in (fault.what, fault.why, fault.fix))
    if isinstance(fault.test, partial):
        what = f"{_code(fault.test.args[0])}: {what}"
    for same in FAULTS:
        first = same.fix != fault.fix or FAULTS.index(same) < FAULTS.index(fault)
        if first and len(same.fix.split()) > LONG:
            fix = fix.replace(_with_words(same.fix), f"as for `{same.id}`")
    marks = f"`{fault.id}`{level}{' **×**' if fault.stops_rdma else ''}"
    return f"- {marks}: {what}{': ' if why else ''}{why} → {fix}\n"


def _with_words(template: str) -> str:
    """Return a text of the table of faults with ⟨words⟩ for its fields, each by the last part of its name."""
    parts = Formatter().parse(template)
    named = (
        (said, re.split(r"[.\[]", re.sub(r"\[\d+\]", "", field).rstrip("]"))[-1] if field else "")
        for said, field, *_ in parts
    )
    return "".join(said + (f"⟨{name.replace('_', ' ')}⟩" if name else "") for said, name in named)


def _code(text: str) -> str:
    """Return a text as code in a sentence."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


PAGES: Mapping[str, Callable[[], str]] = {
    "api.md": api_page,
    "doctor.md": doctor_page,
    "settings.md": settings_page,
    "commands.md": commands_page,
    "models.md": models_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
