"""Writes the pages of docs/ that are read off the code: docs/settings.md.

    python scripts/reference.py

`tests/test_reference.py` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mlxtp.settings import CLUSTER, ENDPOINT, GENERAL, LIMITS, OTHER_VARIABLES, SETTINGS, TUNING, Setting

DOCS = Path(__file__).parents[1] / "docs"
GENERATED = "<!-- Written by scripts/reference.py. -->"

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

Numbers and `true` or `false` stand there without quotes. A key that nobody knows is an error, with the nearest
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
    """docs/settings.md."""
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
    name = f"--no-{setting.option[2:]}" if setting.default is True else setting.option
    return f"`{' '.join(filter(None, (name, setting.metavar)))}`{often}" if setting.option else ""


PAGES: Mapping[str, Callable[[], str]] = {"settings.md": settings_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
