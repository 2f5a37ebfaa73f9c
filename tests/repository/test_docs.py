"""Claims of the documents about the program."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import typer
from typer._click.exceptions import BadOptionUsage, MissingParameter, NoArgsIsHelpError
from typer.main import get_command

from mlxtp.cli.main import _with_values, app
from mlxtp.config import resolve_settings
from mlxtp.errors import ConfigError
from mlxtp.settings import BY_KEY
from scripts import prose

from ..pages import DOCS, ROOT, blocks, code_in_sentences, simple_commands

MLXTP = get_command(app)
SYSTEM = {"No route to host"}
"""Words of the system's."""


def words_of_the_program() -> str:
    """All of its text, with string literals that go on over several lines as one."""
    source = "\n".join(path.read_text() for path in sorted((ROOT / "mlxtp").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", source)


def test_every_message_of_the_troubleshooting_page_is_one_of_ours() -> None:
    program = words_of_the_program()
    page = (ROOT / "docs" / "doctor.md").read_text()
    messages = page.partition("\n## By the words you read\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^- `([^`]+)`: ", messages, re.MULTILINE)
    assert len(rows) > 20
    parts = {part.strip() for row in rows if row not in SYSTEM for part in re.split(r"⟨[^⟩]*⟩", row)}
    assert sorted(part for part in parts if part and part not in program) == []


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_links_within_the_documents_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor and other.suffix == ".md":
            assert anchor in anchors(other.read_text()), f"{page.name} links to {target}"


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = re.findall(
        r"^\| \[[^]]+\]\(([\w.-]+)\)", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE
    )
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(pages)


FIRST = ("README.md", "CONTRIBUTING.md")


def test_a_newcomer_has_little_to_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 150
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert len(pages) <= 14
    assert sum(len(page.read_text().split()) for page in (*pages, *map(ROOT.joinpath, FIRST))) <= 45_000


MOST_MARKS = {"documents": 2, "docstrings": 0, "comments": 0, "printed": 3}
"""Sentences of 1,000 with any one turn of phrase of `scripts/prose.py`, at most. They may only fall."""


def test_prose_is_no_harder_to_read_than_it_was() -> None:
    rates = {kind: prose.rates(found) for kind, found in prose.everything().items()}
    assert {kind: round(max(each.values())) for kind, each in rates.items()} == MOST_MARKS


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    named = set(re.findall(r'<a id="([\w-]+)"></a>', text))  # of earlier headings, to which links lead
    return named | {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in plain}


def test_modules_that_the_documents_name_are_there() -> None:
    """`engine/batch.py`, `gateway/gateway`: as the walks and the map call them."""
    folders = "|".join(path.name for path in (ROOT / "mlxtp").iterdir() if (path / "__init__.py").is_file())
    for page in DOCS:
        for name in re.findall(rf"`((?:mlxtp/)?(?:{folders})/[\w/]+(?:\.py)?)`", page.read_text()):
            path = ROOT / "mlxtp" / name.removeprefix("mlxtp/")
            assert path.exists() or path.with_suffix(".py").exists(), f"{page.name} names {name}"


def test_tests_that_the_documents_name_are_there() -> None:
    """`tests/a.py`, or `tests/a.py::test_b`."""
    named = [
        each for page in DOCS for each in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
    ]
    assert len(named) > 30
    for path, test in named:
        text = (ROOT / path).read_text()
        assert not test or f"def {test}(" in text, f"{path} has no {test}"


PAGES = sorted([*DOCS, ROOT / "packaging" / "README.md", *(ROOT / "examples").rglob("*.md")])
OTHERS: Mapping[str, str] = {
    "curl -X POST http://localhost:52415/v1/chat/completions": (
        "tests/clients/test_examples.py::test_what_the_readme_asks_is_answered"
    ),
    "lm_eval": "tests/peers/suites.py::by_lm_eval",
    "make demo": ".ci/run",
    "make lint": ".ci/run",
    "make test": ".ci/run",
    "make": "tests/repository/test_docs.py::test_make_is_told_what_it_understands",
    "pip install lm_eval[api]": "tests/peers/suites.py::by_lm_eval",
    "source .venv/bin/activate": (
        "tests/repository/test_docs.py::test_an_activated_environment_has_the_command"
    ),
}
"""Commands of the documents besides `mlxtp`, by their first words, and what runs them."""
UNCHECKED = {"text", "json", "toml", "python", "mermaid"}
"""Blocks in which nothing is typed."""
READERS: Mapping[str, str] = {
    "APPS_ARGS": "tests/apps/__main__.py",
    "BENCH_ARGS": "benchmarks/__main__.py",
    "CHAOS_ARGS": "tests/chaos/conftest.py",
    "DEMO_ARGS": "mlxtp/cli/main.py",
    "FUZZ_ARGS": "tests/fuzzing/__main__.py",
    "RELEASE_ARGS": "scripts/release.py",
    "SOAK_ARGS": "tests/soak/__main__.py",
}
"""The file that reads what `make` passes on."""


def understand(words: Sequence[str], home: Path) -> None:
    """Parse an `mlxtp` command without running it. A word of capitals stands for anything."""
    command, name, context = MLXTP, "mlxtp", None
    rest = _with_values(["2" if re.fullmatch("[A-Z]+", word) else word for word in words[1:]])
    while True:
        context = command.make_context(name, rest, parent=context)
        if not hasattr(command, "resolve_command"):
            break
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    if context.command_path in ("mlxtp node", "mlxtp demo"):
        settings = {key: value or None for key, value in context.params.items() if key in BY_KEY}
        resolve_settings(settings | {"home": home}, environment={})
    if context.command_path == "mlxtp service install":
        understand(["mlxtp", "node", *(context.params["arguments"] or ())], home)


def why_not(words: Sequence[str], home: Path, all_right: tuple[type[typer.TyperException], ...] = ()) -> str:
    """Return what is wrong with a command; nothing for one of the errors that are all right."""
    try:
        understand(words, home)
    except all_right:
        return ""
    except (typer.TyperException, ConfigError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_ours_can_be_typed_as_it_stands(page: Path, tmp_path: Path) -> None:
    typed = [command for block in blocks(page) for command in block.commands if command[0] == "mlxtp"]
    for command in typed:
        assert why_not(command, tmp_path) == "", f"{page.name}: {shlex.join(command)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_a_sentence_names_is_there(page: Path, tmp_path: Path) -> None:
    """With its options. What they take may be left out there, and what may be left out is in brackets."""
    for code in code_in_sentences(page):
        plain = re.sub(r"\[[^][]*\]|\.\.\.|…|--help|COMMAND", "", re.sub(r"\[[^][]*\]", "", code))
        if not re.match(r"(sudo |pbpaste \| )?mlxtp( |$)", plain):
            continue
        for command in simple_commands(plain):
            if command[0] == "mlxtp":
                left_out = (MissingParameter, NoArgsIsHelpError, BadOptionUsage)
                assert why_not(command, tmp_path, left_out) == "", f"{page.name}: {code}"


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_every_other_command_is_run_by_a_test_or_needs_a_mac(page: Path) -> None:
    """The line before a block that needs one has the words "on a Mac"."""
    for block in blocks(page):
        assert block.info in {"sh", "console", *UNCHECKED}, f"{page.name}: what is this?\n{block.text}"
        if block.info == "text":
            begins = [line.split(" ")[0] for line in block.text.splitlines()]
            assert not {"mlxtp", "make", "sudo", "curl"} & set(begins), f"{page.name}: sh?\n{block.text}"
        for command in block.commands:
            if command[0] != "mlxtp" and "on a mac" not in block.before.lower():
                assert run_by(command), f"{page.name}: no test runs {shlex.join(command)}"


def run_by(command: Sequence[str]) -> str:
    words = " ".join(command)
    return next((by for begins, by in OTHERS.items() if f"{words} ".startswith(f"{begins} ")), "")


@pytest.mark.parametrize(("begins", "by"), OTHERS.items(), ids=OTHERS)
def test_what_runs_a_command_is_there(begins: str, by: str) -> None:
    path, _, test = by.partition("::")
    assert (f"def {test}(" if test else begins) in (ROOT / path).read_text()


def test_make_is_told_what_it_understands() -> None:
    targets = (ROOT / "Makefile").read_text()
    for page in DOCS:
        typed = [command for block in blocks(page) for command in block.commands]
        typed += [tuple(shlex.split(code)) for code in code_in_sentences(page) if code.startswith("make ")]
        for _, target, *variables in (command for command in typed if command[0] == "make"):
            assert f"\n{target}: " in targets, f"{page.name}: make {target}"
            for name, _, value in (variable.partition("=") for variable in variables):
                reader = (ROOT / READERS[name]).read_text()
                for option in re.findall(r"(?<!\S)--[\w-]+", value):
                    assert f'"{option}"' in reader, f"{page.name}: make {target} {name}={value}"


def test_an_activated_environment_has_the_command() -> None:
    activate = Path(sys.prefix, "bin", "activate")
    done = subprocess.run(
        ["bash", "-c", f"source {shlex.quote(str(activate))} && command -v mlxtp"],
        env={**os.environ, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(activate.with_name("mlxtp"))
