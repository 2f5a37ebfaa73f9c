"""`mlxtp pull`, `list`, `remove` and `verify`: the models of the Hub on this Mac's disk.

A running agent pulls, so that its cluster downloads once; without one this process does.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from ..client import AgentClient
from ..cluster.manifests import Manifest
from ..errors import (
    Code,
    Exit,
    MlxtpError,
    ModelError,
    UserError,
    why_not_written,
)
from ..node.store.hub_cache import (
    Repo,
    Stopped,
    cache_folder,
    gigabytes,
    hash_of,
    hub_name,
)
from ..node.store.stored import Revision, revisions_here
from . import completions
from .options import AsJson, Home
from .printing import home_of, print_json

LOOK_S = 0.5
_PULL_S = 60.0
"""How long the agent may take to ask the Hub what a model consists of."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="OWNER/NAME on the Hub; OWNER/NAME@REVISION for a certain one.",
        autocompletion=completions.models,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(pull)
    app.command(name="list")(list_)
    app.command()(remove)
    app.command()(verify)


def pull(
    model: Model,
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="On every Mac of the cluster that is there now.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Download a model, or what is missing of it: from a member that has it, else from the Hub.

    Cut short, it goes on where it was when it is said again.
    """
    _check_hub(model)
    rows = _by_agent(model, everywhere, home, as_json)
    if rows is None:
        rows = [_by_itself(model, as_json)]
    problems = [f"{row['name']}: {row['problem']}" for row in rows if row["problem"]]
    if as_json:
        print_json({"model": model, "members": rows})
    for problem in () if as_json else problems:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]mlxtp:[/] {escape(problem)}")
    if problems:
        raise typer.Exit(Exit.REFUSED)
    if not as_json:
        where = " and ".join(row["name"] for row in rows)
        print(f"{model} is on {where}: {gigabytes(max(row['total_bytes'] for row in rows))}")


def list_(home: Home = None, as_json: AsJson = False) -> None:
    """List the models of the Hub on this Mac: size, how much of each is here, which other Macs have it."""
    elsewhere = _elsewhere(home)
    rows = [_row(each, elsewhere) for each in revisions_here()]
    if as_json:
        print_json({"folder": str(cache_folder()), "models": rows})
        return
    if not rows:
        print(f"no model is in {cache_folder()}; `mlxtp pull OWNER/NAME` brings one")
        return
    Console(highlight=False).print(_table(rows))
    print(f"in {cache_folder()}")


def remove(model: Model, home: Home = None, as_json: AsJson = False) -> None:
    """Remove a model from this Mac's disk, all revisions unless one is named. What others share stays."""
    repo, revision = _check_hub(model)
    _unless_needed(model, home)
    here = repo.commits()
    chosen = frozenset({repo.commit(revision)}) if "@" in model else here
    if not chosen & here and not (repo.folder.exists() and "@" not in model):
        raise ModelError(f"{model} is not on this Mac; `mlxtp list` shows what is", Code.MODEL_NOT_FOUND)
    try:
        freed = repo.remove(chosen)
    except OSError as error:
        raise ModelError(f"{model}: {why_not_written(error, repo.cache)}") from None
    if as_json:
        print_json({"removed": model, "revisions": sorted(chosen), "freed_bytes": freed})
        return
    print(f"{model} is removed; {gigabytes(freed)} are free again")


def verify(
    model: Model,
    repair: Annotated[bool, typer.Option("--repair", help="Get damaged files anew.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Read a model's files on this Mac and compare each with its hash."""
    repo, revision = _check_hub(model)
    commit = repo.commit(revision)
    manifest = repo.manifest(commit)
    if manifest is None:
        raise ModelError(
            f"nothing is known of {model} on this Mac; `mlxtp list` shows what is here", Code.MODEL_NOT_FOUND
        )
    bad = _damaged(repo, manifest, quiet=as_json)
    if bad and repair:
        _unless_needed(model, home)
        for file in manifest.files:
            if file.path in bad:
                repo.blob(file).unlink(missing_ok=True)
        _by_itself(f"{repo.name}@{commit}", as_json)
    if as_json:
        print_json({"model": model, "revision": commit, "bytes": manifest.size, "damaged": bad})
    elif not bad:
        print(f"{model}: {len(manifest.files)} files, {gigabytes(manifest.size)}, all as they should be")
    else:
        for path, why in bad.items():
            print(f"{path}: {why}")
        again = "what was bad was got anew" if repair else f"`mlxtp verify {model} --repair` gets them anew"
        print(f"bad files: {len(bad)} of {len(manifest.files)}; {again}")
    if bad and not repair:
        raise typer.Exit(Exit.REFUSED)


# --- pulling ------------------------------------------------------------------------------------------


def _by_agent(
    model: str, everywhere: bool, home: Path | None, as_json: bool
) -> list[Mapping[str, Any]] | None:
    """The agent's last word of each member; None when there is no agent that can."""
    try:
        client = AgentClient(home_of(home), _PULL_S)
        name = client.post("pull", model=model, everywhere="yes" if everywhere else "")["model"]
    except UserError as error:
        if everywhere or error.code not in (Code.NOT_READY, Code.NOT_SUPPORTED):
            raise
        return None
    with _Bars(quiet=as_json) as bars:
        try:
            while True:
                rows: list[Mapping[str, Any]] = client.post("pulling", model=name)["members"]
                bars.show((row["name"], row["held_bytes"], row["total_bytes"]) for row in rows)
                if rows and all(row["complete"] or row["problem"] for row in rows):
                    return rows
                time.sleep(LOOK_S)  # nothing tells when there is more
        except KeyboardInterrupt:
            print("mlxtp: the agent goes on; the same command shows how far it is", file=sys.stderr)
            raise typer.Exit(Exit.INTERRUPTED) from None


def _by_itself(model: str, as_json: bool) -> Mapping[str, Any]:
    """This process gets it. Raises ModelError."""
    from ..node.store.fetching import Fetch

    repo, revision = hub_name(model)
    refs = [ref for ref, commit in repo.refs().items() if commit == revision]
    fetch = Fetch(repo, refs[0] if refs else revision, revision)
    failed: list[MlxtpError] = []

    def work() -> None:
        try:
            fetch.from_hub()
        except MlxtpError as error:
            failed.append(error)
        except Stopped:
            pass

    worker = threading.Thread(target=work)
    worker.start()
    try:
        with _Bars(quiet=as_json) as bars:
            while worker.is_alive():
                worker.join(LOOK_S)
                if fetch.manifest is not None:
                    bars.show([(repo.name, fetch.held, fetch.manifest.size)])
    except KeyboardInterrupt:
        fetch.stop()
        worker.join()
        print("mlxtp: what has come stays; the same command goes on", file=sys.stderr)
        raise typer.Exit(Exit.INTERRUPTED) from None
    if failed:
        if fetch.manifest is not None or repo.snapshot(revision) is None:
            raise failed[0]
        print(f"mlxtp: {failed[0].detail}. What is here is left as it is", file=sys.stderr)
    manifest = fetch.manifest or repo.manifest(repo.commit(revision))
    size = manifest.size if manifest is not None else 0
    return {
        "name": "this Mac",
        "held_bytes": size,
        "total_bytes": size,
        "complete": True,
        "problem": "",
        "revision": repo.commit(revision),
    }


class _Bars:
    """A bar on stderr for each of what is told."""

    def __init__(self, *, quiet: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tasks:
            self._progress.stop()

    def show(self, rows: Iterable[tuple[str, int, int]]) -> None:
        """Names, bytes that are there, bytes in all (0: not known yet)."""
        for name, held, total in rows:
            self._progress.start()
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, completed=held, total=total or None)
            self._progress.update(self._tasks[name], completed=held, total=total or None)


# --- the disk -----------------------------------------------------------------------------------------


def _damaged(repo: Repo, manifest: Manifest, *, quiet: bool) -> dict[str, str]:
    """What is wrong, by path."""
    bad, done = {}, 0
    lock = threading.Lock()
    with _Bars(quiet=quiet) as bars:

        def read(count: int) -> None:
            nonlocal done
            with lock:
                done += count
            bars.show([(manifest.name, done, manifest.size)])

        for file in manifest.files:
            try:
                found = hash_of(repo.readable(file), file, read) if repo.has(file) else None
            except OSError as error:
                bad[file.path] = f"it cannot be read: {error.strerror}"
                continue
            if found is None:
                bad[file.path] = "it is not here, or has another size"
            elif found != file.hash:
                bad[file.path] = f"its hash is {found[:12]}…, not {file.hash[:12]}…"
    return bad


def _check_hub(model: str) -> tuple[Repo, str]:
    """Raises UserError for what is no model of the Hub."""
    from ..node.store.models import is_hub_id

    if not is_hub_id(model):
        what = "a folder is left as it is" if Path(model).exists() else f"{model!r:.200} is no OWNER/NAME"
        raise UserError(f"{what}: this is about models of the Hub, by OWNER/NAME or OWNER/NAME@REVISION")
    return hub_name(model)


def _unless_needed(model: str, home: Path | None) -> None:
    """Raises UserError while a running agent needs it."""
    try:
        AgentClient(home_of(home)).post("removable", model=model)
    except UserError as error:
        if error.code is not Code.NOT_READY:
            raise


def _elsewhere(home: Path | None) -> list[Mapping[str, Any]]:
    try:
        return list(AgentClient(home_of(home)).get("stored")["elsewhere"])
    except UserError:
        return []


def _row(here: Revision, elsewhere: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    others = [each for each in elsewhere if (each["name"], each["revision"]) == (here.name, here.revision)]
    return {
        "name": here.name,
        "revision": here.revision,
        "refs": list(here.refs),
        "size_bytes": here.total,
        "held_bytes": here.held,
        "complete": here.complete,
        "elsewhere": sorted(each["node"] for each in others if each["complete"]),
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "revision", "size", "here", "also on"):
        table.add_column(column, justify="right" if column == "size" else "left")
    for row in rows:
        share = "all" if row["complete"] else f"[yellow]{gigabytes(row['held_bytes'])}[/]"
        named = ", ".join(row["refs"])
        table.add_row(
            escape(row["name"]),
            f"{row['revision'][:12]}{f' ({escape(named)})' if named else ''}",
            gigabytes(row["size_bytes"]),
            share,
            escape(", ".join(row["elsewhere"])),
        )
    return table
