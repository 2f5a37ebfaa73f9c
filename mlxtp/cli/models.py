"""`mlxtp pull`, `list`, `remove` and `verify`: models of the Hub on this Mac's disk.

If an agent runs, it downloads, so that its cluster does so once; else this process does.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ..client import AgentClient
from ..errors import Code, Exit, MlxtpError, ModelError, UserError, why_not_written
from ..models.hub_cache import Repo, StoredCommit, commits_here, hash_of, hub_name
from ..models.manifest import Manifest, gigabytes
from ..short_names import near, short_for
from ..verbs import CheckRemovable, FilesRemoved, PullModel, PullProgress
from . import options
from .options import AsJson, Home
from .printing import Console, complain, home_of, print_answer, print_json, table_of

LOOK_S = 0.5

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="OWNER/NAME on the Hub, OWNER/NAME@REVISION, or a short name.",
        autocompletion=options.hub_model_names,
    ),
]


def pull(
    model: Model,
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="On every Mac of the cluster that is present.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Download a model, or its missing files, from a member that has it, else from the Hub.

    An interrupted download resumes when you run the command again.
    """
    model = _check_hub(model)
    rows = _pulled(model, everywhere, home, as_json)
    problems = [f"{row['name']}: {row['problem']}" for row in rows if row["problem"]]
    where = " and ".join(row["name"] for row in rows)
    size = max(row["total_bytes"] for row in rows)  # 0 for files of another program
    if as_json or not problems:
        words = f"{model} is on {where}" + (f": {gigabytes(size)}" if size else "")
        print_answer({"model": model, "members": rows}, as_json, words)
    else:
        for problem in problems:
            complain(problem)
    if problems:
        raise typer.Exit(Exit.REFUSED)


def list_(home: Home = None, as_json: AsJson = False) -> None:
    """List the models of the Hub on this Mac: short name, size, how much is here, other Macs with each."""
    cache, elsewhere = options.models_stored(home_of(home))
    rows = [_row(each, elsewhere) for each in commits_here(cache)]
    if as_json:
        print_json({"folder": str(cache), "models": rows})
        return
    if not rows:
        print(f"no model is in {cache}; `mlxtp pull OWNER/NAME` downloads one")
        return
    Console(highlight=False).print(_table(rows))
    print(f"in {cache}")


def remove(model: Model, home: Home = None, as_json: AsJson = False) -> None:
    """Remove a model from this Mac's disk, all revisions unless one is named. Shared files stay."""
    model = _check_hub(model)
    repo, revision = _here(model, home)
    _check_removable(model, home)
    here = repo.commits()
    chosen = frozenset({repo.refs.commit(revision)}) if "@" in model else here
    if not chosen & here and not (repo.folder.exists() and "@" not in model):
        raise ModelError(
            f"{model} is not on this Mac, in {repo.cache}; `mlxtp list` shows the models here",
            Code.MODEL_NOT_FOUND,
        )
    try:
        freed = repo.remove(chosen)
    except OSError as error:
        raise ModelError(f"{model}: {why_not_written(error, repo.cache)}") from None
    _tell_removed(model, home)
    answer = {"removed": model, "revisions": sorted(chosen), "freed_bytes": freed}
    print_answer(answer, as_json, f"{model} is removed from {repo.cache}; {gigabytes(freed)} are free again")


def verify(
    model: Model,
    repair: Annotated[bool, typer.Option("--repair", help="Download damaged files again.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Read a model's files on this Mac and compare each with its hash."""
    model = _check_hub(model)
    repo, revision = _here(model, home)
    commit = repo.refs.commit(revision)
    manifest = repo.manifest(commit)
    if manifest is None:
        raise ModelError(
            f"this Mac has no list of files of {model}, in {repo.cache}; `mlxtp list` shows the models here",
            Code.MODEL_NOT_FOUND,
        )
    bad, unread = _damaged(repo, manifest, quiet=as_json)
    if bad and repair:
        _repair(repo, manifest, bad, home, as_json)
    found = bad | unread
    if as_json:
        print_json({"model": model, "revision": commit, "bytes": manifest.size, "damaged": found})
    elif not found:
        print(f"{model}: {len(manifest.files)} files, {gigabytes(manifest.size)}, all correct")
    else:
        for path, why in found.items():
            print(f"{path}: {why}")
        if bad:
            how = f"`mlxtp verify {model} --repair` downloads them again"
            again = "they were downloaded again" if repair else how
            print(f"bad files: {len(bad)} of {len(manifest.files)}; {again}")
        if unread:
            print(f"files that cannot be read: {len(unread)}; they were not changed")
    if unread or (bad and not repair):
        raise typer.Exit(Exit.REFUSED)


# --- pulling ------------------------------------------------------------------------------------------


def _pulled(model: str, everywhere: bool, home: Path | None, as_json: bool) -> Sequence[Mapping[str, Any]]:
    rows = _by_agent(model, everywhere, home, as_json)
    if rows is None:
        rows = [_by_itself(model, as_json)]
        _tell_removed(model, home)
    return rows


def _by_agent(
    model: str, everywhere: bool, home: Path | None, as_json: bool
) -> list[Mapping[str, Any]] | None:
    try:
        client = AgentClient(home_of(home))
        name = client.send(PullModel(model, everywhere))["model"]
    except UserError as error:
        if everywhere or error.code not in (Code.NOT_READY, Code.NOT_SUPPORTED):
            raise
        return None
    with _Bars(quiet=as_json) as bars:
        try:
            while True:
                rows: list[Mapping[str, Any]] = client.send(PullProgress(name))["members"]
                for row in rows:
                    bars.show(row["name"], row["held_bytes"], row["total_bytes"], waits=row["waits"])
                if rows and all(row["complete"] or row["problem"] for row in rows):
                    return rows
                time.sleep(LOOK_S)  # the agent does not push progress
        except KeyboardInterrupt:
            print("mlxtp: the agent continues; the same command shows the progress", file=sys.stderr)
            raise typer.Exit(Exit.INTERRUPTED) from None


def _by_itself(model: str, as_json: bool) -> Mapping[str, Any]:
    import asyncio

    from ..models.download import download

    repo, revision = hub_name(model)
    size = 0

    def on_progress(held: int, total: int) -> None:
        nonlocal size
        size = total
        if total:
            bars.show(repo.name, held, total)

    try:
        with _Bars(quiet=as_json) as bars:
            here = asyncio.run(download(model, on_progress))
    except KeyboardInterrupt:
        print("mlxtp: the download stops; the same command resumes it", file=sys.stderr)
        raise typer.Exit(Exit.INTERRUPTED) from None
    except Exception as error:
        if not isinstance(error, MlxtpError):
            raise ModelError(f"cannot get {repo.name}: {type(error).__name__}: {error}") from error
        found = repo.snapshot(revision)
        if size or found is None:
            raise
        here = found
        print(f"mlxtp: {error.detail}. The files here were not changed", file=sys.stderr)
        manifest = repo.manifest(here.name)
        size = manifest.size if manifest is not None else 0
    whole = {"held_bytes": size, "total_bytes": size, "complete": True, "problem": ""}
    return {"name": "this Mac", **whole, "revision": here.name}


class _Speed(TransferSpeedColumn):
    """Current speed; the average of a finished download; empty while unknown."""

    def render(self, task: Task) -> Text:
        if task.finished_speed or task.speed:
            return super().render(task)
        came = int(task.completed - task.fields["begun"])
        if not came or not task.finished_time:
            return Text("")
        return Text(f"{decimal(int(came / task.finished_time))}/s", style="progress.data.speed")


class _Bars:
    def __init__(self, *, quiet: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            _Speed(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._progress.tasks:
            if not task.completed:
                self._progress.remove_task(task.id)
        if self._progress.tasks:
            self._progress.stop()
        else:  # leave no empty line, either
            self._progress.live.transient = True
            self._progress.live.stop()

    def show(self, name: str, held: int, total: int, *, waits: bool = False) -> None:
        """Show the bytes here and in total (0: unknown). `waits`: other downloads run first."""
        self._progress.start()
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, completed=held, begun=held)
        said = f"{name} (waits for other downloads)" if waits else name
        self._progress.update(self._tasks[name], description=said, completed=held, total=total or None)


# --- the disk -----------------------------------------------------------------------------------------


def _damaged(repo: Repo, manifest: Manifest, *, quiet: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Return problems by path: of files with wrong content, and of unreadable files."""
    bad: dict[str, str] = {}
    unread: dict[str, str] = {}
    done = 0
    with _Bars(quiet=quiet) as bars:

        def read(count: int) -> None:
            nonlocal done
            done += count
            bars.show(manifest.name, done, manifest.size)

        for file in manifest.files:
            try:
                found = hash_of(repo.blobs.readable(file), file, read) if repo.blobs.has(file) else None
            except OSError as error:
                unread[file.path] = f"it cannot be read: {error.strerror}"
                continue
            if found is None:
                bad[file.path] = "it is missing, or has another size"
            elif found != file.hash:
                bad[file.path] = f"its hash is {found[:12]}…, not {file.hash[:12]}…"
    return bad, unread


def _repair(repo: Repo, manifest: Manifest, bad: Collection[str], home: Path | None, as_json: bool) -> None:
    """Remove bad files and pull them again, if a member or the Hub has them. Raises UserError."""
    from ..models import hub_client

    model = f"{repo.name}@{manifest.revision}"
    _check_removable(model, home, repair=True)
    stored = options.models_stored(home_of(home))[1]
    if not any(_is_of(each, repo.name, manifest.revision) for each in stored):
        hub_client.look_up(repo.name, manifest.revision)
    try:
        with repo.locked():
            for file in manifest.files:
                if file.path in bad:
                    repo.blobs.path(file).unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"{model}: {why_not_written(error, repo.cache)}") from None
    rows = _pulled(model, False, home, as_json)
    if problems := [row["problem"] for row in rows if row["problem"]]:
        raise ModelError(f"{model} is still damaged: {'; '.join(problems)}")


def _check_hub(model: str) -> str:
    """Return the Hub name for a name or short name of a model. Raises UserError for anything else."""
    from ..models.inspect import full_name, is_hub_id

    model = full_name(model)
    if not is_hub_id(model):
        what = f"{model!r:.200} is a path" if Path(model).exists() else f"{model!r:.200} is not OWNER/NAME"
        known = f"; near are the short names {names}" if (names := near(model)) else ""
        raise UserError(
            f"{what}: this command takes models of the Hub, as OWNER/NAME or OWNER/NAME@REVISION{known}"
        )
    hub_name(model)
    return model


def _here(model: str, home: Path | None) -> tuple[Repo, str]:
    repo, revision = hub_name(model)
    return Repo(repo.name, options.models_stored(home_of(home))[0]).as_here(), revision


def _check_removable(model: str, home: Path | None, *, repair: bool = False) -> None:
    try:
        AgentClient(home_of(home)).send(CheckRemovable(model, repair))
    except UserError as error:
        if error.code is not Code.NOT_READY:
            raise


def _tell_removed(model: str, home: Path | None) -> None:
    with contextlib.suppress(UserError):
        AgentClient(home_of(home)).send(FilesRemoved(model))


def _row(here: StoredCommit, elsewhere: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "name": here.name,
        "short": short_for(here.name),
        "revision": here.revision,
        "refs": list(here.refs),
        "size_bytes": here.total,
        "held_bytes": here.held,
        "complete": here.complete,
        "elsewhere": sorted(each["node"] for each in elsewhere if _is_of(each, here.name, here.revision)),
    }


def _is_of(stored: Mapping[str, Any], name: str, revision: str) -> bool:
    return bool(stored["complete"]) and (stored["name"], stored["revision"]) == (name, revision)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = table_of("model", "revision", "size", "here", "also on", right=("size",))
    for row in rows:
        table.add_row(
            escape(row["name"]) + (f" ({row['short']})" if row["short"] else ""),
            row["revision"][:12] + (f" ({escape(', '.join(row['refs']))})" if row["refs"] else ""),
            gigabytes(row["size_bytes"]),
            "all" if row["complete"] else f"[yellow]{gigabytes(row['held_bytes'])}[/]",
            escape(", ".join(row["elsewhere"])),
        )
    return table
